"""``vram boot``: a log for people and as a document, its exit codes, and following a log that grows."""

from __future__ import annotations

import gzip
import io
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from pytest_vram.advice import Advice, Saving
from pytest_vram.bootlog import Boot, Failure, PhaseSpan
from pytest_vram.bootlog.boot import Peak
from pytest_vram.cli import boot_follow, main
from pytest_vram.errors import BadInput
from pytest_vram.ledger import Entry
from pytest_vram.readings import Reading, Unmeasurable
from pytest_vram.report import boot_lines, schemas
from tests.unit import sizing_models
from tests.unit.test_bootlog_files import BOOT, LEDGER, SMALLER

MIB = 1 << 20
FAILED = "\n".join(
    [
        *BOOT.splitlines()[:4],
        "ggml_backend_cuda_buffer_type_alloc_buffer: allocating 4096.00 MiB on device 0: cudaMalloc failed: out of memory",
        "llama_init_from_model: failed to initialize the context: failed to allocate buffer for kv cache",
        "",
    ]
)
QUIET = "main: model loaded\nmain: server is listening on http://127.0.0.1:8080\nllama_server: ready\n"


@pytest.fixture
def log(tmp_path: Path) -> Callable[[str], str]:
    def write(text: str) -> str:
        path = tmp_path / "boot.log"
        path.write_text(text, encoding="utf-8")
        return str(path)

    return write


@pytest.fixture
def document(capsys: pytest.CaptureFixture[str]) -> Callable[[int, list[str]], dict[str, Any]]:
    """Runs ``vram boot --json`` and gives its document, which must be valid."""

    def run(code: int, arguments: list[str]) -> dict[str, Any]:
        assert main(["boot", *arguments, "--json"]) == code
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        if found["format"].startswith("pytest-vram/boot/"):
            jsonschema.validate(found, schemas()["boot.json"])
        return found

    return run


def test_document_of_a_boot(log: Callable[[str], str], document: Callable[[int, list[str]], dict[str, Any]]) -> None:
    """The document has what the log says, and is of its published schema."""
    path = log(BOOT)
    found = document(0, [path])
    assert (found["format"], found["log"], found["engine"]) == ("pytest-vram/boot/1", path, "llama-server")
    assert (found["evidence"], found["ready"], found["failure"], found["boots"]) == ("complete", True, None, 1)
    assert found["buckets"] == LEDGER
    assert found["total"] == {"gpu0": 112 * MIB}
    assert found["devices"]["gpu0"] == "CUDA0"
    assert [span["name"] for span in found["phases"]] == ["start", "weights", "kv", "reserve", "ready"]
    assert (found["advice"], found["no_advice"]) == ([], None)


def test_lines_for_people(log: Callable[[str], str], capsys: pytest.CaptureFixture[str]) -> None:
    """People get phases, the breakdown by device, and what is wrong."""
    assert main(["boot", log(BOOT)]) == 0
    told = capsys.readouterr().out
    for words in ("ready", "every buffer was printed", "the log has no clock", "printed by the engine", "112.00"):
        assert words in told
    assert main(["boot", log(BOOT + SMALLER)]) == 0
    assert "the log holds 2 boots: this is the last one" in capsys.readouterr().out


def test_failure(
    log: Callable[[str], str],
    capsys: pytest.CaptureFixture[str],
    document: Callable[[int, list[str]], dict[str, Any]],
) -> None:
    """A log that shows a failure exits with 1, and says which allocation it was and what to change."""
    path = log(FAILED)
    assert main(["boot", path]) == 1
    told = capsys.readouterr().out
    for words in (
        "failure: out_of_memory",
        "phase kv, for kv, on gpu0 (CUDA0)",
        "4,096 MiB (4,294,967,296 bytes) asked",
    ):
        assert words in told
    assert "what to change" in told
    found = document(1, [path])
    assert (found["failure"]["kind"], found["failure"]["bytes"]) == ("out_of_memory", 4096 * MIB)
    assert found["advice"] or found["no_advice"]


def test_log_without_memory_lines(
    log: Callable[[str], str],
    capsys: pytest.CaptureFixture[str],
    document: Callable[[int, list[str]], dict[str, Any]],
) -> None:
    """A log that says nothing of memory is inconclusive, never zero bytes, and the way to more is said."""
    path = log(QUIET)
    assert main(["boot", path]) == 3
    told = " ".join(capsys.readouterr().out.split())
    assert "no memory lines" in told
    assert "-lv 4" in told
    found = document(3, [path])
    assert (found["evidence"], found["buckets"], found["total"]) == ("none", {}, {})


def test_standard_input(monkeypatch: pytest.MonkeyPatch, document: Callable[[int, list[str]], dict[str, Any]]) -> None:
    """``-`` reads standard input, packed or not."""
    for content in (BOOT.encode(), gzip.compress(BOOT.encode())):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
        assert document(0, ["-"])["log"] == "standard input"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"")))
    assert "standard input is empty" in document(2, ["-"])["error"]
    monkeypatch.setattr(sys, "stdin", None)
    assert "standard input is closed" in document(2, ["-"])["error"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty"),
        (b"\x7fELF\x01\x02\x03\x04", "is not a text"),
        (b"GET / HTTP/1.1\n", "the log of no engine that is known here (llama-server"),
        (None, "No such file"),
        ("folder", "is a folder"),
    ],
)
def test_bad_input_is_one_message(
    tmp_path: Path,
    content: bytes | str | None,
    words: str,
    capsys: pytest.CaptureFixture[str],
    document: Callable[[int, list[str]], dict[str, Any]],
) -> None:
    """What is no log of an engine is one message and exit code 2."""
    path = tmp_path / "some.log"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        path.mkdir()
    assert words in document(2, [str(path)])["error"]
    assert main(["boot", str(path)]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.count("\n") == 1
    assert words in told.err


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may read everything")
def test_log_that_may_not_be_read(
    log: Callable[[str], str], document: Callable[[int, list[str]], dict[str, Any]]
) -> None:
    """A file without permission says so."""
    path = log(BOOT)
    Path(path).chmod(0)
    assert "Permission denied" in document(2, [path])["error"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "required: LOG"),
        (["LOG", "--engine", "foo"], "'foo' has no logs that are read: write one of llama-server"),
        (["LOG", "-c", "4096"], "an engine's options go with --model"),
        (["LOG", "other"], "takes one log and its own options, not 'other'"),
        (["-", "--follow"], "--follow follows a file"),
        (["LOG", "--model", "none.gguf"], "none.gguf"),
        (["LOG", "--engine"], "has no value"),
    ],
)
def test_bad_use(
    log: Callable[[str], str],
    arguments: list[str],
    words: str,
    document: Callable[[int, list[str]], dict[str, Any]],
) -> None:
    """What cannot be understood is said, with what is accepted."""
    path = log(FAILED)
    assert words in document(2, [path if word == "LOG" else word for word in arguments])["error"]


def test_engine_that_is_named(log: Callable[[str], str], document: Callable[[int, list[str]], dict[str, Any]]) -> None:
    """``--engine`` decides whose log it is, where no line tells."""
    path = log("a line\nanother\n")
    assert document(2, [path])["exit"] == 2
    assert document(3, [path, "--engine", "vllm"])["engine"] == "vllm"


def test_advice_for_a_model(
    tmp_path: Path, log: Callable[[str], str], document: Callable[[int, list[str]], dict[str, Any]]
) -> None:
    """With the model and the engine's options the advice is computed for them."""
    sizing_models.dense_8b(tmp_path / "model.gguf")
    found = document(1, [log(FAILED), "--model", str(tmp_path / "model.gguf"), "-c", "32768", "-ngl", "99"])
    assert {one.get("source", "estimate") for one in found["advice"]} == {"estimate"}
    assert any(one["setting"] == "ctx-size" and one["from"] == "32768" for one in found["advice"])


# ---------------------------------------------------------------- what people read

FIGURE = Reading(bytes=5 * MIB, source="nvidia-smi", scope="device", device="gpu0", exact=False)


def lines(boot: Boot, **more: Any) -> str:
    return "\n".join(boot_lines.boot_lines(boot, "boot.log", **more))


def boot_of(**fields: Any) -> Boot:
    return Boot(engine="vllm", era="", evidence="partial", **fields)


def test_phases_and_peaks() -> None:
    """Times are shown on the log's clock, with the peaks of samples where there are some."""
    spans = (
        PhaseSpan(name="start", line=1, start=1_767_323_045.5, end=1_767_323_047.0),
        PhaseSpan(
            name="weights", line=12, start=1_767_323_047.0, peak={"gpu0": FIGURE, "gpu1": Unmeasurable(reason="x")}
        ),
    )
    told = lines(
        boot_of(phases=spans, clock="epoch", peaks=(Peak(device="gpu0", part="weights", text="it is the weights"),))
    )
    assert "phases (UTC, or the log's own zone where it names none)" in told
    assert "01-02 03:04:05.500" in told
    assert "5.00 MiB" in told
    assert "unknown" in told
    assert "weights, or cache and runtime?\n  gpu0: it is the weights" in told
    assert "ends in phase weights" in told
    assert boot_lines.moment(1e30, "epoch").startswith("1000000")


def test_failure_in_words() -> None:
    """A failure says what, where, how much and how sure; what is not known is not claimed."""
    failure = Failure(
        kind="precheck", certainty="certain", text="ValueError: Free memory", line=7, free=3 * MIB, total=4 * MIB, note="Others hold it.",
    )  # fmt: skip
    told = lines(boot_of(failure=failure))
    assert "failure: precheck: less was free than the engine wants" in told
    assert "3.00 MiB (3,145,728 bytes) free, 4.00 MiB (4,194,304 bytes) in all" in told
    assert "Others hold it." in told
    assert "line 7: ValueError: Free memory" in told
    assert "phase" not in told.split("failure:")[1]
    vague = Failure(kind="out_of_memory", certainty="unknown", text="x", device="gpu0", phase="kv", absurd=True)
    told = lines(boot_of(failure=vague, ready=True))
    assert "ready, and failed later" in told
    assert "in phase kv, for what is unknown, on gpu0" in told
    assert "smaller steps of a setting will not help" in " ".join(told.split())


def test_advice_in_words() -> None:
    """Advice is ranked, with what suffices first, and names what would do nothing."""
    one = Advice(
        setting="ctx-size", before="8192", after="4096", effect="saves", why="half of the cache", device="gpu0",
        saves_bytes=Saving(bytes=64 * MIB), enough=True, flag="--ctx-size 4096", cost="shorter texts", proof="n_ctx = 4096",
        source="estimate",
    )  # fmt: skip
    none = Advice(
        setting="n-cpu-moe", before="0", after="2", effect="nothing", why="its first layers are dense", source="rule"
    )
    told = lines(boot_of(), advice=[one, none])
    assert "first: --ctx-size 4096 (enough alone)" in told
    assert "1. ctx-size 8192 → 4096, saves 64.00 MiB, enough alone" in told
    assert "costs: shorter texts" in told
    assert "shown by: n_ctx = 4096" in told
    assert "n-cpu-moe would save nothing here: its first layers are dense" in told
    assert "what to change\n  because" in lines(boot_of(), no_advice="because")


def test_facts_in_words() -> None:
    """Sizes are shown as such, and texts of others cannot command the terminal."""
    facts = {"model_bytes": 3 * MIB, "context": 4096, "mmap": False, "load_seconds": 1.25, "model_name": "a\x1b[31m"}
    told = lines(boot_of(facts=facts, entries=(Entry(bucket="kv", device="gpu0", bytes=MIB, source="engine-log"),)))
    assert "model bytes 3.00 MiB, context 4,096, mmap no, load seconds 1.25, model name a\\x1b[31m" in " ".join(
        told.split()
    )


# ---------------------------------------------------------------- following


class Growing:
    """A log that gets its next part with each sleep."""

    def __init__(self, path: Path, parts: list[Callable[[], object] | str]) -> None:
        self.path, self.parts = path, parts
        self.told: list[str] = []
        path.write_text("")

    def sleep(self, seconds: float) -> None:
        if not self.parts:
            return
        part = self.parts.pop(0)
        if isinstance(part, str):
            with self.path.open("a", encoding="utf-8") as stream:
                stream.write(part)
        else:
            part()

    def follow(self, engine: str | None = None) -> Boot:
        return boot_follow.follow(self.path, engine, tell=self.told.append, sleep=self.sleep)


def begun(told: list[str]) -> list[str]:
    return [line.split()[0] for line in told if line.startswith("  ")]


def test_follow_to_ready(tmp_path: Path) -> None:
    """Phases are told as they begin, however the file grows, and the end is the server's being ready."""
    text = BOOT[: len(BOOT) - 80]
    parts: list[Callable[[], object] | str] = [text[at : at + 50] for at in range(0, len(text), 50)]
    growing = Growing(tmp_path / "boot.log", [*parts, BOOT[len(text) :]])
    boot = growing.follow()
    assert boot.ready
    assert boot.ledger().buckets() == LEDGER
    assert growing.told[0].endswith("boot.log: llama-server")
    assert begun(growing.told) == ["start", "weights", "kv", "reserve", "ready"]


def test_follow_to_a_failure(tmp_path: Path) -> None:
    """A failure is the end once the log stands still, also where its last line has no end."""
    growing = Growing(tmp_path / "boot.log", [FAILED.rstrip("\n")])
    boot = growing.follow("llama-server")
    assert boot.failure is not None
    assert boot.failure.kind == "out_of_memory"


def test_follow_waits_where_an_engine_may_recover(tmp_path: Path) -> None:
    """What looks like a failure is none where the engine goes on."""
    trouble = "ggml_cuda: allocating 9.00 MiB on device 0: cudaMalloc failed: out of memory\n"
    recovered = "llama_init: retrying without pipeline parallelism\n"
    head, tail = BOOT.split("sched_reserve: reserving ...\n")
    boot = Growing(tmp_path / "boot.log", [head + trouble, recovered + tail]).follow()
    assert (boot.ready, boot.failure) == (True, None)


def test_follow_through_truncation_and_rotation(tmp_path: Path) -> None:
    """A log that begins anew is followed on, and the last boot counts."""
    path = tmp_path / "boot.log"
    head = "\n".join(BOOT.splitlines()[:4]) + "\n"
    growing = Growing(path, [head, lambda: path.write_text(""), head, lambda: path.rename(tmp_path / "old.log")])
    growing.parts += [lambda: path.write_text(SMALLER)]
    boot = growing.follow()
    assert boot.ledger().buckets() == {**LEDGER, "weights": {"gpu0": 48 * MIB}}
    assert growing.told.count("  the log begins anew") >= 1
    assert begun(growing.told).count("weights") == 3


def test_follow_of_another_program_ends(tmp_path: Path) -> None:
    """A log that is no engine's is not followed for ever."""
    growing = Growing(tmp_path / "boot.log", ["GET / HTTP/1.1 200\n" * 10_000] * 30)
    with pytest.raises(BadInput, match="no engine that is known"):
        growing.follow()


def test_follow_of_nothing_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Empty lines without an end are the log of nobody, and each line is looked at once."""
    monkeypatch.setattr(boot_follow, "_MOST_UNKNOWN", 10_000)
    seen: list[str] = []
    monkeypatch.setattr(boot_follow, "recognise", seen.append)
    growing = Growing(tmp_path / "boot.log", ["\n" * 3000] * 20)
    with pytest.raises(BadInput, match="no engine that is known"):
        growing.follow()
    assert sum(map(len, seen)) <= 12_000


def test_follow_command(tmp_path: Path) -> None:
    """The command tells the phases while the file grows, then the whole, and Ctrl-C ends it with 130."""
    path = tmp_path / "boot.log"
    head = "\n".join(BOOT.splitlines()[:4]) + "\n"
    path.write_text(head)
    argv = [
        sys.executable,
        "-c",
        "import sys; from pytest_vram.cli import main; sys.exit(main())",
        "boot",
        "--follow",
        str(path),
    ]
    for interrupt in (True, False):
        with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
            guard = threading.Timer(60, process.kill)
            guard.start()
            assert process.stdout is not None
            for line in process.stdout:
                if line.split()[:1] == ["kv"]:
                    break
            if interrupt:
                process.send_signal(signal.SIGINT)
            else:
                with path.open("a") as stream:
                    stream.write(BOOT.removeprefix(head))
            rest = process.stdout.read()
            guard.cancel()
            assert process.wait(60) == (130 if interrupt else 0)
            assert ("printed by the engine" in rest) is not interrupt


def test_the_device_of_a_lone_line_is_told(log: Callable[[str], str], capsys: pytest.CaptureFixture[str]) -> None:
    """Where one line is all there is, the device that refused is named though phase and part are not known."""
    line = "ggml_backend_cuda_buffer_type_alloc_buffer: allocating 8849.72 MiB on device 3: cudaMalloc failed: out of memory"
    assert main(["boot", log(line + "\n")]) == 1
    assert "on gpu3 (CUDA3): which phase and part it was is not certain" in capsys.readouterr().out
