"""`vram compare` as users meet it: what can be compared, exit codes, sentences, the document."""

from __future__ import annotations

import gzip
import io
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from pytest_vram.cli import main
from pytest_vram.report import RunReport, encode, schemas
from pytest_vram.units import MIB
from tests.unit import sizing_models
from tests.unit.compare_kit import attempt_at, backend, card, reading, run_of

Cli = Callable[..., tuple[int, str, str]]
LOG = """0.00.100.000 I llama_model_loader: - kv   0:                       general.architecture str              = llama
0.00.150.000 I print_info: arch                  = llama
0.00.200.000 I load_tensors: offloaded 33/33 layers to GPU
0.00.300.000 I load_tensors:        CUDA0 model buffer size =  4000.00 MiB
0.00.400.000 I llama_context: n_ctx         = {context}
0.00.500.000 I llama_kv_cache:      CUDA0 KV buffer size =   {kv:.2f} MiB
0.00.600.000 I sched_reserve:      CUDA0 compute buffer size =   300.00 MiB
0.00.700.000 I main: server is listening on http://127.0.0.1:8080
"""

ARCHITECTURE = "0.00.150.000 I print_info: arch                  = llama\n"


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Cli:
    """Run the command in an empty project: exit code, standard output, standard error."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> tuple[int, str, str]:
        code = main(["compare", *arguments])
        out, err = capsys.readouterr()
        return code, out, err

    return run


def saved(path: Path, report: RunReport) -> str:
    """A report in a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(encode(report))
    return str(path)


def document(cli: Cli, *arguments: str) -> tuple[int, dict[str, Any]]:
    """The JSON document, checked against its published schema."""
    code, out, _ = cli(*arguments, "--json")
    found = json.loads(out)
    jsonschema.Draft202012Validator(schemas()["compare.json"]).validate(found)
    return code, found


def test_two_reports_are_compared(cli: Cli, tmp_path: Path) -> None:
    """By file, by folder and by the id of a run of this project."""
    run = tmp_path / ".vram" / "runs" / "20260101T000000Z-abcdef"
    saved(run / "report.json", run_of(backend(), tests=(attempt_at("t", reading(100), "passed"),)))
    (run / "run.json").write_text("{}")
    after = saved(tmp_path / "b.json", run_of(backend(kv=1024 * MIB, context=8192)))
    for before in (str(run / "report.json"), str(run), run.name):
        code, out, err = cli(before, after)
        assert (code, err) == (0, "")
        assert "kv" in out
        assert "ctx-size 4,096 → 8,192" in out
        code, found = document(cli, before, after)
        assert code == 0
        assert found["verdict"] is None
        assert found["only_before"] == ["t"]


@pytest.mark.parametrize(("kv", "code"), [(512, 0), (600, 1)])
def test_logs_are_judged_by_what_was_printed(cli: Cli, tmp_path: Path, kv: int, code: int) -> None:
    """Two logs have totals of one kind."""
    for name, size in (("a.log", 512), ("b.log", kv)):
        (tmp_path / name).write_text(LOG.format(context=4096, kv=size))
    assert cli("a.log", "b.log", "--fail-on", "peak:1%,kv:1%")[0] == code


@pytest.mark.parametrize(
    ("kv", "fail_on", "code"),
    [
        (512.01, "peak,kv:1KiB", 0),
        (512.02, "peak", 1),
        (512.02, "kv:11KiB", 0),
        (512.03, "kv:11KiB", 1),
        (511.99, "kv", 0),
    ],
)
def test_the_printed_digits_are_no_growth(cli: Cli, tmp_path: Path, kv: float, fail_on: str, code: int) -> None:
    """Two figures with two decimals may be the same where the last digit differs by one; more of it is growth."""
    for name, size in (("a.log", 512.0), ("b.log", kv)):
        (tmp_path / name).write_text(LOG.format(context=4096, kv=size))
    assert cli("a.log", "b.log", "--fail-on", fail_on)[0] == code


def test_a_verdict_has_the_digits_that_differ(cli: Cli, tmp_path: Path) -> None:
    """No line says that 4,812 MiB outgrew 4,812 MiB."""
    for name, size in (("a.log", 512.0), ("b.log", 512.10)):
        (tmp_path / name).write_text(LOG.format(context=4096, kv=size))
    out = cli("a.log", "b.log", "--fail-on", "peak")[1]
    assert "4,812.00 MiB → 4,812.10 MiB, allowed 4,812.00 MiB: grew" in " ".join(out.split())


@pytest.mark.parametrize(
    ("first", "second", "code", "part"),
    [
        (LOG, ARCHITECTURE, 3, "the second one does not say which it is"),
        (ARCHITECTURE, LOG, 3, "the first one does not say which it is"),
        (ARCHITECTURE, ARCHITECTURE, 0, ""),
        (LOG, LOG, 0, ""),
    ],
)
def test_where_the_model_is_not_told_nothing_is_judged(
    cli: Cli, tmp_path: Path, first: str, second: str, code: int, part: str
) -> None:
    """The logs of two models may have the same buffers: one that says which it is does not tell it of the other."""
    for name, text in (("a.log", first), ("b.log", second)):
        text = text if text is LOG else LOG.replace(text, "")
        (tmp_path / name).write_text(text.format(context=4096, kv=512))
    found, out, _ = cli("a.log", "b.log", "--fail-on", "peak,kv")
    assert found == code
    assert part in " ".join(out.split())


@pytest.mark.parametrize(("weights", "code"), [("4000.01", 0), ("3999.00", 3), ("4000.02", 3)])
def test_the_same_weights_stand_for_a_model_that_nobody_names(
    cli: Cli, tmp_path: Path, weights: str, code: int
) -> None:
    """Of two logs that both say nothing of it: the same bytes to the printed digit are one model, others may be two."""
    text = LOG.replace(ARCHITECTURE, "")
    (tmp_path / "a.log").write_text(text.format(context=4096, kv=512))
    (tmp_path / "b.log").write_text(text.replace("4000.00", weights).format(context=4096, kv=512))
    found, out, _ = cli("a.log", "b.log", "--fail-on", "peak:1MiB,kv")
    assert (found, "neither says which it is" in " ".join(out.split())) == (code, code == 3)


def test_a_log_beside_a_run_is_not_judged_by_its_total(cli: Cli, tmp_path: Path) -> None:
    """It has no driver's context: that cannot be told, while a bucket can."""
    (tmp_path / "a.log").write_text(LOG.format(context=4096, kv=512))
    after = saved(tmp_path / "b.json", run_of(backend()))
    assert cli("a.log", after, "--fail-on", "peak:5%")[0] == 3
    assert cli("a.log", after, "--fail-on", "kv")[0] == 0


def test_estimates_are_compared_with_each_other_and_with_a_log(
    cli: Cli, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of standard input, too; settings that decide a bucket are named."""
    model = str(sizing_models.dense_8b(tmp_path / "m.gguf"))
    for name, context in (("a.json", "4096"), ("b.json", "8192")):
        assert main(["estimate", model, "-c", context, "-np", "1", "--device", "CUDA0", "--json"]) == 0
        (tmp_path / name).write_text(capsys.readouterr().out)
    code, found = document(cli, "a.json", "b.json", "--fail-on", "peak:5%")
    assert code == 1
    rows = {(row["bucket"], row["device"]): row for row in found["deployments"][0]["differences"]}
    assert rows["kv", "gpu0"]["least"] == rows["kv", "gpu0"]["most"] == 512 * MIB
    assert rows["kv", "gpu0"]["meaning"] == "setting"
    assert rows["weights", "gpu0"]["meaning"] == rows["context", "gpu0"]["meaning"] == "equal"
    (tmp_path / "c.log").write_text(LOG.format(context=4096, kv=512))
    code, found = document(cli, "a.json", "c.log")
    kinds = {row["bucket"]: row["meaning"] for row in found["deployments"][0]["differences"] if row["device"] == "gpu0"}
    assert kinds["kv"] == "equal"
    assert kinds["context"] == "context"
    assert kinds["weights"] == "unknown"


def test_an_estimate_for_a_card_beside_a_host_says_how_to_make_the_other(
    cli: Cli, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A card is what is estimated for where nothing is said; with the option that is named, the two are alike."""
    model = str(sizing_models.dense_8b(tmp_path / "m.gguf"))
    text = LOG.replace("CUDA0", "CPU").replace("offloaded 33/33", "offloaded 0/33")
    (tmp_path / "a.log").write_text(text.format(context=4096, kv=512))
    for option, said in (((), True), (("--device", "none"), False)):
        assert main(["estimate", model, "-c", "4096", "-np", "1", *option, "--json"]) == 0
        (tmp_path / "e.json").write_text(capsys.readouterr().out)
        for sides in (("a.log", "e.json"), ("e.json", "a.log")):
            code, out, _ = cli(*sides)
            out = " ".join(out.split())
            assert (code, "NOT ALIKE" in out, "--device none" in out) == (0, said, said), out


def test_one_side_may_be_standard_input(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A document or a log."""
    before = saved(tmp_path / "a.json", run_of(backend()))
    for data in (Path(before).read_bytes(), LOG.format(context=4096, kv=512).encode()):
        stream = io.TextIOWrapper(io.BufferedReader(io.BytesIO(data)))  # type: ignore[arg-type]
        monkeypatch.setattr(sys, "stdin", stream)
        code, out, err = cli(before, "-")
        assert (code, err) == (0, "")
        assert "standard input" in out


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32"])
@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gzip"])
def test_documents_are_read_as_a_shell_writes_them(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encoding: str, packed: bool
) -> None:
    """What `>` of PowerShell makes of a document, with a mark or without, packed or not; from standard input too."""
    good = saved(tmp_path / "good.json", run_of(backend()))
    data = Path(good).read_text(encoding="utf-8").encode(encoding)
    data = gzip.compress(data) if packed else data
    (tmp_path / "written.json").write_bytes(data)
    assert cli("written.json", good, "--fail-on", "peak")[0] == 0
    stream = io.TextIOWrapper(io.BufferedReader(io.BytesIO(data)))
    monkeypatch.setattr(sys, "stdin", stream)
    assert cli("-", good, "--fail-on", "peak")[0] == 0


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="pipes with a name are POSIX")
def test_a_pipe_is_refused_where_nobody_may_ever_write(cli: Cli, tmp_path: Path) -> None:
    """Nothing is waited for, on either side; what a shell has opened itself is read."""
    good = saved(tmp_path / "good.json", run_of(backend()))
    os.mkfifo(tmp_path / "pipe")
    for sides in (("pipe", good), (good, "pipe"), ("/dev/null", good)):
        code, out, err = cli(*sides)
        assert (code, out) == (2, "")
        assert "a device or a pipe" in err
        assert "vram boot" not in err


@pytest.mark.skipif(not Path("/dev/fd").exists(), reason="needs /dev/fd")
@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gzip"])
@pytest.mark.parametrize("kind", ["document", "log"])
def test_what_a_shell_has_opened_is_read(cli: Cli, tmp_path: Path, kind: str, packed: bool) -> None:
    """As in `vram compare <(…) b.json`."""
    good = saved(tmp_path / "good.json", run_of(backend()))
    data = Path(good).read_bytes() if kind == "document" else LOG.format(context=4096, kv=512).encode()
    reader, writer = os.pipe()
    try:
        os.write(writer, gzip.compress(data) if packed else data)  # less than a pipe holds
        os.close(writer)
        code, out, err = cli(f"/dev/fd/{reader}", good)
    finally:
        os.close(reader)
    assert (code, err) == (0, "")
    assert "kv" in out


def test_an_engine_can_be_named(cli: Cli, tmp_path: Path) -> None:
    """The advice of a log that gives no engine away can be followed here, too."""
    (tmp_path / "a.log").write_text("CUDA0 model buffer size =  4000.00 MiB\n")
    (tmp_path / "b.log").write_text(LOG.format(context=4096, kv=512))
    code, _, err = cli("a.log", "b.log")
    assert (code, "--engine" in err) == (2, True)
    assert cli("a.log", "b.log", "--engine", "llama-server")[0] == 0
    code, _, err = cli("a.log", "b.log", "--engine", "nothing")
    assert (code, "llama-server" in err) == (2, True)


def test_one_of_several_backends_is_named(cli: Cli, tmp_path: Path) -> None:
    """A log is of one deployment."""
    run = saved(tmp_path / "a.json", run_of(backend(), backend(name="embedder")))
    (tmp_path / "a.log").write_text(LOG.format(context=4096, kv=512))
    code, _, err = cli(run, "a.log")
    assert code == 2
    assert "--backend" in err
    assert cli(run, "a.log", "--backend", "embedder")[0] == 0
    code, _, err = cli(run, "a.log", "--backend", "other")
    assert (code, "agent, embedder" in err) == (2, True)


def test_other_models_and_devices_are_not_judged(cli: Cli, tmp_path: Path) -> None:
    """They are shown, and loudly; with --fail-on that is bad use."""
    before = saved(tmp_path / "a.json", run_of(backend()))
    for name, report in (
        ("model", run_of(backend(facts={"layers": 36}))),
        ("card", run_of(backend(), devices=(card("NVIDIA GeForce RTX 4060"),))),
    ):
        after = saved(tmp_path / f"{name}.json", report)
        code, out, _ = cli(before, after)
        assert (code, "NOT ALIKE" in out) == (0, True)
        code, out, err = cli(before, after, "--fail-on", "peak")
        assert (code, out) == (2, "")
        assert "other models or devices" in err


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (None, "neither a file nor a run"),
        (b"", "empty"),
        (b"\x7fELF\x02\x01\x01" + bytes(5000), "not a text"),
        (b"{", "no document"),
        (b'{"format": "pytest-vram/plan/1"}', "pytest-vram/estimate/1"),
        (b'{"format": "pytest-vram/report/1"}', "run report"),
        (b'{"format": "pytest-vram/report/1", "run": {"id": 5}}', "run report"),
        (b'{"format": "pytest-vram/estimate/1", "engine": []}', "damaged, or of another version"),
        (b'{"a": 1}', "without a format"),
        (b"[" * 100_000, ""),
        (b'{"format": ' + b"[" * 100_000, ""),
        (b"12:00:00 backup finished, 3 files\n" * 20, ""),
        (b"0.00.100.000 I llama_model_loader: loaded meta data\n", "no memory lines"),
    ],
    ids=["missing", "empty", "binary", "cut", "plan", "no fields", "wrong type", "estimate", "no format", "deep", "deep document", "other program", "no memory"],
)  # fmt: skip
def test_what_cannot_be_compared_is_one_sentence(cli: Cli, tmp_path: Path, content: bytes | None, part: str) -> None:
    """Exit code 2, nothing on standard output, on either side."""
    good = saved(tmp_path / "good.json", run_of(backend()))
    if content is not None:
        (tmp_path / "bad").write_bytes(content)
    for sides in (("bad", good), (good, "bad")):
        code, out, err = cli(*sides)
        assert (code, out) == (2, ""), err
        assert part in err
        assert err.startswith("vram compare: ")
        assert err.count("\n") == 1


def test_folders_that_are_no_runs_are_refused(cli: Cli, tmp_path: Path) -> None:
    """Any folder, and that of a run without a report."""
    good = saved(tmp_path / "good.json", run_of(backend()))
    run = tmp_path / ".vram" / "runs" / "20260101T000000Z-abcdef"
    run.mkdir(parents=True)
    (run / "run.json").write_text("{}")
    for name in (str(tmp_path), run.name):
        code, _, err = cli(good, name)
        assert (code, "report.json" in err) == (2, True)


@pytest.mark.parametrize(
    "arguments",
    [
        ("-", "-"),
        ("a",),
        ("a", "b", "c"),
        ("a", "b", "--fail-on", "peak:3g"),
        ("a", "b", "--fail-on"),
        ("a", "b", "--nothing"),
    ],
)
def test_bad_arguments_are_bad_use(cli: Cli, arguments: tuple[str, ...]) -> None:
    """One sentence, before anything is read."""
    code, out, err = cli(*arguments)
    assert (code, out) == (2, "")
    assert err


def test_runs_without_backends_compare_their_tests(cli: Cli, tmp_path: Path) -> None:
    """What a test held itself needs no engine; a log has no tests."""
    before = saved(tmp_path / "a.json", run_of(tests=(attempt_at("t", reading(100 * MIB), "passed"),)))
    after = saved(tmp_path / "b.json", run_of(tests=(attempt_at("t", reading(200 * MIB), "passed"),)))
    code, out, _ = cli(before, after, "--fail-on", "peak:5%")
    assert (code, "+100.00" in out) == (1, True)
    (tmp_path / "a.log").write_text(LOG.format(context=4096, kv=512))
    assert cli(before, "a.log")[0] == 2
