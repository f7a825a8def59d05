"""A test that breaks a limit on memory says what to change; nothing of it costs a test that passes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pytest_vram.sizing import estimate
from pytest_vram.testing import recipes
from tests.conftest import Inner

SPECS = """
default = "large"
[backend.large]
engine = "llama-server"
model = "large.gguf"
[backend.large.options]
ctx-size = 65536
n-gpu-layers = 99
parallel = 1
"""
TEST = """
import sys
import pytest

@pytest.mark.vram_backend("large")
@pytest.mark.max_vram("{limit}")
def test_it(): pass
"""


@pytest.fixture
def project(pytester: pytest.Pytester) -> pytest.Pytester:
    """A project with a backend that is sized and never started."""
    recipe = recipes.llama(layers=16, embedding=2048, heads=16, kv_heads=8, head_size=128, feed_forward=8192)
    recipe.write(pytester.path / "large.gguf")
    pytester.path.joinpath("vram.toml").write_text(SPECS)
    return pytester


def the_test(folder: Path) -> dict[str, Any]:
    """The record of the only test."""
    (found,) = json.loads((folder / "out.json").read_text())["tests"]
    table: dict[str, Any] = found
    return table


def test_a_broken_limit_names_what_to_change(project: pytest.Pytester, inner: Inner) -> None:
    """The report has the first change and the three best; the record has all, in the form of `vram boot --json`."""
    project.makepyfile(TEST.format(limit="5.3GB"))
    result = inner("--vram-device=predicted", "--vram-report=out.json")
    assert result.ret == 1
    result.stdout.fnmatch_lines(
        [
            "*- vram: advice -*",
            "first: --cache-type-k q8_0 --cache-type-v q8_0 (saves * on gpu0: enough*",
            "1. cache-type-k, cache-type-v f16 → q8_0, saves 1,7?? MiB, enough alone",
            "   --cache-type-k q8_0 --cache-type-v q8_0",
            "2. ctx-size 65536 → *",
        ]
    )
    advice = the_test(project.path)["advice"]
    assert [one["setting"] for one in advice[:2]] == ["cache-type-k, cache-type-v", "ctx-size"]
    first = advice[0]
    assert (first["from"], first["to"], first["effect"], first["device"]) == ("f16", "q8_0", "saves", "gpu0")
    assert first["saves_by_bucket"]["kv"] == 4096 * 2**20 * 15 // 32
    assert {"n-cpu-moe"} <= {one["setting"] for one in advice if one["effect"] == "nothing"}
    longer = estimate(str(project.path / "large.gguf"), ctx_size=int(advice[1]["to"]), n_gpu_layers=99, parallel=1)
    assert longer.at_most()["gpu0"] <= 53 * 10**8


def test_a_test_that_passes_computes_nothing(project: pytest.Pytester, inner: Inner) -> None:
    """No advice in its record, and the modules that make it are not even imported."""
    project.makepyfile(TEST.format(limit="80GB"))
    project.makeconftest(
        """
        import sys

        def pytest_unconfigure():
            assert "pytest_vram.advice.deployed" not in sys.modules
            assert "pytest_vram.advice.printed" not in sys.modules
        """
    )
    inner("--vram-device=predicted", "--vram-report=out.json").assert_outcomes(passed=1)
    record = the_test(project.path)
    assert (record["advice"], record["no_advice"]) == ([], None)


def test_a_failure_to_make_advice_takes_nothing_from_the_report(project: pytest.Pytester, inner: Inner) -> None:
    """The verdict stands, and why there is no advice is said in its place."""
    project.makepyfile(TEST.format(limit="5.3GB"))
    project.makeconftest(
        """
        from pytest_vram.advice import deployed

        def broken(*_, **__):
            raise KeyError("of a defect")

        deployed.advise = broken
        """
    )
    result = inner("--vram-device=predicted", "--vram-report=out.json")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*predicted memory*", "*- vram: advice -*", "no advice: KeyError: 'of a defect'*"])
    assert the_test(project.path)["no_advice"].startswith("KeyError")


def test_a_test_that_fails_for_another_reason_gets_no_advice(project: pytest.Pytester, inner: Inner) -> None:
    """An assertion of its own is not about memory."""
    project.makepyfile(TEST.format(limit="80GB").replace("pass", "assert False"))
    result = inner("--vram-device=predicted", "--vram-report=out.json")
    result.assert_outcomes(failed=1)
    result.stdout.no_fnmatch_line("*vram: advice*")
    assert the_test(project.path)["advice"] == []


def test_tests_that_fail_alike_share_their_advice(project: pytest.Pytester, inner: Inner) -> None:
    """Each record has it, and it is made once for all tests of one backend, limit and peak."""
    project.makepyfile(
        TEST.format(limit="5.3GB")
        .replace("def test_it(): pass", "def test_it(number): pass")
        .replace("@pytest.mark.max_vram", "@pytest.mark.parametrize('number', range(5))\n@pytest.mark.max_vram")
    )
    project.makeconftest(
        """
        from pathlib import Path

        from pytest_vram.advice import deployed

        real = deployed.advise

        def counted(*positional, **named):
            with Path("made").open("a") as stream:
                stream.write("x")
            return real(*positional, **named)

        deployed.advise = counted
        """
    )
    inner("--vram-device=predicted", "--vram-report=out.json").assert_outcomes(failed=5)
    lists = [test["advice"] for test in json.loads((project.path / "out.json").read_text())["tests"]]
    assert lists[0]
    assert lists == [lists[0]] * 5
    assert (project.path / "made").read_text() == "x"
