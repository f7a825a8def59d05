"""Settings as pytest sees them: bad ones end the run before any test, with one line."""

from __future__ import annotations

import os

import pytest

from tests.conftest import Inner

TEST = "def test_it():\n    print('RAN')\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--vram-budget=3g"], "*`3g` is ambiguous: 3GB (3,000,000,000 bytes) or 3GiB (3,221,225,472 bytes) (from --vram-budget)*"),
        (["--vram-budget=4GB", "--vram-device=gpu0"], "*'gpu0' is not a device*(from --vram-device)*"),
        (["--vram-missing=maybe"], "*'maybe' is not accepted: write skip or fail (from --vram-missing)*"),
        (["--vram-interval=0"], "*'0' is not an interval*(from --vram-interval)*"),
        (["--vram-report=x.pdf"], "*'.pdf'*this version writes .json (from --vram-report)*"),
        (["--vram-reserve=1"], "*--vram-reserve*"),
        (["--vram-leases=maybe"], "*'maybe' is not accepted: write on or off (from --vram-leases)*"),
        (["--vram-save"], "*--vram-save*not built yet*"),
        (["--vram-backend=nobody"], "*backend 'nobody' is not in*known are 'demo'*(from --vram-backend)*"),
        (["--vram-config=nowhere.toml"], "*nowhere.toml*does not exist*"),
        (["--vram-budget=gpu0=1GB", "--vram-device=cpu"], "*names gpu0, but this run measures host*"),
    ],
)  # fmt: skip
def test_a_bad_option_is_a_usage_error_before_any_test(
    pytester: pytest.Pytester, inner: Inner, arguments: list[str], message: str
) -> None:
    """Exit code 4 (pytest's usage error), one line, no test ran."""
    pytester.makepyfile(TEST)
    result = inner("-s", *arguments)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([message])
    result.stdout.no_fnmatch_line("*RAN*")


@pytest.mark.parametrize("table", ["pytest.ini_options", "pytest"])
def test_a_bad_ini_value_names_the_file(pytester: pytest.Pytester, inner: Inner, table: str) -> None:
    """Both tables of pyproject.toml are read, and a budget in either is checked."""
    pytester.makepyprojecttoml(f"[tool.{table}]\nvram_budget = '3g'\n")
    pytester.makepyfile(TEST)
    result = inner()
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    if table == "pytest" and pytest.version_tuple < (9, 0):
        result.stderr.fnmatch_lines(["*ignores [[]tool.pytest] in pyproject.toml, so vram_budget there would be off*"])
    else:
        result.stderr.fnmatch_lines(["*ambiguous*(from vram_budget in pyproject.toml)*"])


@pytest.mark.skipif(pytest.version_tuple < (9, 0), reason="native TOML tables came with pytest 9")
@pytest.mark.parametrize("value", ["4", "true", "['4GB']"])
def test_an_ini_value_of_the_wrong_type_is_a_usage_error(pytester: pytest.Pytester, inner: Inner, value: str) -> None:
    """A number or list where a string belongs is refused with the key's name, not with a traceback."""
    pytester.makepyprojecttoml(f"[tool.pytest]\nvram_budget = {value}\n")
    pytester.makepyfile(TEST)
    result = inner()
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*vram_budget*"])


def test_a_bad_config_file_names_itself(pytester: pytest.Pytester, inner: Inner) -> None:
    """A mistake in vram.toml ends the run with the file's path and the key."""
    pytester.path.joinpath("vram.toml").write_text("bugdet = '4GB'\n")
    pytester.makepyfile(TEST)
    result = inner()
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*vram.toml: unknown key 'bugdet': did you mean 'budget'?"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a = " + "[" * 100_000, "*vram.toml is not valid TOML: it is nested too deeply"),
        ('report = "a\\u0000b.json"', "*is not a path (from report in *vram.toml)"),
        ("report = 3", "*3 is not a path or a list of paths*"),
    ],
)
def test_a_hostile_config_file_is_one_line(pytester: pytest.Pytester, inner: Inner, text: str, message: str) -> None:
    """Nested without end, or with a NUL in a path: a usage error before any test."""
    pytester.path.joinpath("vram.toml").write_text(text)
    pytester.makepyfile(TEST)
    result = inner()
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([message])


def test_the_environment_counts_and_is_named(
    pytester: pytest.Pytester, inner: Inner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bad variable is refused with its own name."""
    monkeypatch.setenv("PYTEST_VRAM_BUDGET", "many")
    pytester.makepyfile(TEST)
    result = inner()
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*'many' is not a size*(from PYTEST_VRAM_BUDGET)*"])


@pytest.mark.parametrize("source", ["option", "environment"])
def test_a_typed_budget_with_nothing_measurable_is_a_usage_error(
    pytester: pytest.Pytester, inner: Inner, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    """Before any test: what was tried, and the ways on."""
    pytester.makepyfile(TEST)
    arguments = ["-s", "--vram-device=vulkan:0"]
    if source == "option":
        arguments.append("--vram-budget=4GB")
    else:
        monkeypatch.setenv("PYTEST_VRAM_BUDGET", "4GB")
    result = inner(*arguments)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stdout.no_fnmatch_line("*RAN*")
    result.stderr.fnmatch_lines(
        [
            "*the budget 4GB*cannot be held: nothing can be measured with --vram-device=vulkan:0: *Ways on: *--vram-device=cpu*"
        ]
    )
    assert len([line for line in result.stderr.lines if line.strip()]) == 1


@pytest.mark.parametrize("source", ["ini", "config"])
def test_a_budget_in_a_file_with_nothing_measurable_warns_once(
    pytester: pytest.Pytester, inner: Inner, source: str
) -> None:
    """The tests run unjudged, and one line says so; a warning filter of the project does not turn it into an error."""
    if source == "ini":
        pytester.makeini("[pytest]\nvram_budget = 4GB\nvram_device = vulkan:0\n")
    else:
        pytester.path.joinpath("vram.toml").write_text("budget = '4GB'\ndevice = 'vulkan:0'\n")
    pytester.makepyfile(TEST)
    result = inner()
    assert result.ret == 0
    result.stdout.fnmatch_lines(["*the budget 4GB*is not held*--vram-device=cpu*"])


def test_markers_and_options_are_listed(inner: Inner) -> None:
    """`--markers` and `--help` know every marker and option of the contract."""
    result = inner("--markers")
    for name in (
        "max_vram",
        "max_host_memory",
        "serial_only",
        "vram_backend",
        "requires_vram",
        "min_tokens_per_second",
    ):
        result.stdout.fnmatch_lines([f"@pytest.mark.{name}(*"])
    text = inner("--help").stdout.str()
    for name in ("budget", "device", "backend", "config", "interval", "missing", "report"):
        assert f"--vram-{name}" in text
        assert f"vram_{name}" in text


def test_several_backends_and_no_default_are_an_error_of_who_wants_one(pytester: pytest.Pytester, inner: Inner) -> None:
    """The built-in demo is not tested in their stead."""
    pytester.path.joinpath("vram.toml").write_text(
        "[backend.a]\nengine='command'\nargv=['x']\n[backend.b]\nengine='command'\nargv=['y']\n"
    )
    pytester.makepyfile("def test_it(vram_backend): pass\n\ndef test_plain(): pass\n")
    result = inner("--vram-device=cpu")
    result.assert_outcomes(errors=1, passed=1)
    result.stdout.fnmatch_lines(["*several backends ('a', 'b') and no default*--vram-backend=NAME*"])


@pytest.mark.parametrize("kind", ["folder", "broken link", "loop", "pipe"])
def test_a_config_file_that_is_no_file_is_not_ignored(pytester: pytest.Pytester, inner: Inner, kind: str) -> None:
    """vram.toml that cannot be read ends the run instead of testing the built-in demo."""
    path = pytester.path / "vram.toml"
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("nowhere" if kind == "broken link" else "vram.toml")
    pytester.makepyfile(TEST)
    result = inner()
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*vram.toml is there, but it is no file that can be read*"])
