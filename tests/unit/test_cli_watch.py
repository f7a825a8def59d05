"""`vram watch`: a run's picture from its journal, whatever that holds and however narrow the terminal is."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.cells import cell_len

from pytest_vram.cli import entry, watch
from pytest_vram.cli.following import LONGEST, Picture, Tail
from pytest_vram.journal import KINDS
from pytest_vram.keeper.messages import State
from pytest_vram.readings import Reading, Unmeasurable
from pytest_vram.report.json import SCHEMA_FOLDER
from pytest_vram.report.watch_lines import watch_lines
from pytest_vram.report.watched import Watched, WatchedWaiting

SECOND = 1_000_000_000
RUN = "20300101T000000Z-abc123"
COMMAND = [sys.executable, "-c", "from pytest_vram.cli.entry import main; raise SystemExit(main())", "watch"]
Write = Callable[..., None]
Once = Callable[..., tuple[int, str]]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a run in a project that is the working directory."""
    (tmp_path / "vram.toml").write_text("")
    made = tmp_path / ".vram" / "runs" / RUN
    made.mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    # Runs of projects that cannot be written to lie there, those of other tests too.
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return made


@pytest.fixture
def write(folder: Path) -> Write:
    """Appends a line to the journal."""

    def append(kind: str, second: float = 0.0, **fields: Any) -> None:
        line = {"v": 1, "t": 1 + int(second * SECOND), "kind": kind, **fields}
        with (folder / "journal.jsonl").open("ab") as stream:
            stream.write(json.dumps(line).encode() + b"\n")

    return append


def begin(write: Write, *, controller: int = 2**22 + 1) -> None:
    """The first lines of a run whose processes are gone."""
    write("run", run=RUN, wall=1.5e9, controller=controller, interval_ms=10.0, settings={"device": {"value": "rpc"}})
    write("keeper", pid=2**22 + 2, guard=2**22 + 3, generation=1)
    capacity = Reading(bytes=150_000_000, source="emulated", scope="device", device="gpu0", exact=True)
    write(
        "device", label="gpu0", type="rpc", name="RPC0", capacity=msgspec.to_builtins(capacity), limit_from="emulated"
    )


def a_run(write: Write) -> None:
    """Two backends and two tests, of which one goes on."""
    begin(write)
    write("backend", 1, name="small", generation=1, state="starting", engine="llama-server", pid=77)
    write("phase", 1.5, name="weights", backend="small", generation=1)
    write("backend", 2, name="small", generation=1, state="ready", engine="llama-server", pid=77)
    write("window", 3, event="open", window=1, name="test_a.py::test_one", what="test", parent=None)
    write("sample", 3.5, device="gpu0", min=1, max=90_000_000, last=50_000_000, now=1, count=100)
    peak = Reading(bytes=100_000_000, source="rpc-hwm", scope="run", device="gpu0", exact=True)
    closed = {"t0": 1, "t1": 2, "run": {"gpu0": msgspec.to_builtins(peak)}}
    write("window", 4, event="close", window=1, name="test_a.py::test_one", what="test", backends=[], closed=closed)
    write("test", 4, nodeid="test_a.py::test_one", outcome="passed", attempt=1, worker="gw0")
    write("window", 5, event="open", window=2, name="test_a.py::test_two", what="test", parent=None)
    write("window", 5, event="open", window=3, name="long prompt", what="phase", parent=2)
    write("phase", 5, name="long prompt", window=2)
    write("window", 5, event="open", window=4, name="r1", what="request", parent=2)
    write("lease", 6, event="wait", ticket=9, name="test_b.py::test_x", worker="gw1", need={"gpu0": 3_000_000_000})
    write("note", 6, text="something odd")
    write("gap", 6, late_ms=31.0)


@pytest.fixture
def once(capsys: pytest.CaptureFixture[str]) -> Once:
    """Runs the command, whose output is no terminal; its exit code and output."""

    def run(*arguments: str) -> tuple[int, str]:
        code = entry.main(["watch", *arguments])
        return code, capsys.readouterr().out

    return run


def test_picture_of_a_run(folder: Path, write: Write) -> None:
    """The journal alone gives devices with peak, backends, tests with phase and requests, who waits, and counts."""
    a_run(write)
    picture = Picture(folder)
    picture.read()
    (device,) = picture.show("running").devices
    assert (device.held, device.peak, device.capacity) == (50_000_000, 100_000_000, 150_000_000)
    seen = picture.show("lost")
    (device,) = seen.devices
    assert (device.held, device.peak, device.capacity) == (None, 100_000_000, 150_000_000)
    assert [(one.name, one.state, one.phase) for one in seen.backends] == [("small", "ready", None)]
    (test,) = seen.tests
    assert (test.name, test.phase, test.requests, test.seconds) == ("test_a.py::test_two", "long prompt", 1, 1.0)
    (waiting,) = seen.waiting
    assert (waiting.name, waiting.worker, waiting.takes) == ("test_b.py::test_x", "gw1", {"gpu0": 3_000_000_000})
    assert seen.counts == {"passed": 1}
    assert (seen.notes, seen.gaps, seen.torn, seen.unreadable) == (["something odd"], 1, 0, 0)
    picture.close()


def test_short_tests_are_counted(folder: Path, write: Write) -> None:
    """Those of a shared window stand in the line that closes it; one that is judged later counts once, as what it is."""
    begin(write)
    write("window", 1, event="open", window=1, name="t.py::test_a", what="test", parent=None)
    tests = {"t.py::test_a": "passed", "t.py::test_b": "passed", "t.py::test_c": "skipped"}
    write("window", 2, event="close", window=1, name="several", what="test", record={"tests": tests})
    picture = Picture(folder)
    picture.read()
    assert picture.show("lost").counts == {"passed": 2, "skipped": 1}
    write("test", 3, nodeid="t.py::test_a", outcome="failed", earlier="passed")
    write("test", 3, nodeid="t.py::test_b", outcome="failed", earlier="passed")
    picture.read()
    assert picture.show("lost").counts == {"failed": 2, "skipped": 1}
    picture.close()


def test_boot_phase_is_shown(folder: Path, write: Write) -> None:
    """A server that boots is shown with the phase that it is in."""
    begin(write)
    write("backend", 1, name="small", generation=1, state="starting", pid=77)
    write("phase", 1.5, name="weights", backend="small", generation=1)
    picture = Picture(folder)
    picture.read()
    assert picture.show("lost").backends[0].phase == "weights"
    picture.close()


@pytest.mark.parametrize("width", [20, 40, 80, 200])
@pytest.mark.parametrize("unicode", [True, False])
def test_lines_keep_to_the_width(folder: Path, write: Write, width: int, unicode: bool) -> None:
    """No line is wider than the terminal, also with wide characters in names; ASCII terminals get ASCII."""
    a_run(write)
    write("window", 6, event="open", window=7, name="test_漢字.py::" + "漢" * 300, what="test", parent=None)
    picture = Picture(folder)
    picture.read()
    lines = watch_lines(picture.show("running"), width, unicode=unicode)
    picture.close()
    assert all(cell_len(line) <= width for line in lines)
    assert unicode or all(line.isascii() for line in lines)
    assert any("gpu0" in line for line in lines)


def test_who_waits_for_what(folder: Path) -> None:
    """A waiting test stands with what it wants and the sentences of who holds it."""
    waiting = WatchedWaiting(
        name="test_x", seconds=61.2, worker="gw1", takes={"gpu0": 3 * 10**9}, reasons=["test_y (gw0) holds 2GB of gpu0"]
    )
    seen = Watched(run=RUN, folder=str(folder), state="running", waiting=[waiting])
    lines = watch_lines(seen, 80)
    assert "waits     gw1 test_x 1 min 01 s, for 3GB of gpu0" in lines
    assert "          test_y (gw0) holds 2GB of gpu0" in lines


def test_what_the_keeper_says_is_taken(folder: Path, write: Write) -> None:
    """Where the keeper answers, its figures, leases and reasons replace those of the journal; a fault is named."""
    a_run(write)
    picture = Picture(folder)
    picture.read()
    held = Reading(bytes=120_000_000, source="rpc-rss", scope="run", device="gpu0", exact=False)
    state = State(
        pid=1,
        run=RUN,
        t=1,
        windows=[{"name": "test_a.py::test_two", "exclusive": True}],
        leases=[{"kind": "server", "name": "small#1", "holds": {"gpu0": 5}, "mine": False, "run": "other"}],
        waiting=[{"name": "test_x", "seconds": 2.0, "takes": {"gpu0": 7}, "for": ["small#1 holds it"]}],
        held={"gpu0": held},
    )
    seen = watch.merged(picture.show("running"), state)
    assert (seen.devices[0].held, seen.devices[0].peak) == (120_000_000, 120_000_000)
    assert seen.tests[0].exclusive
    assert (seen.leases[0].name, seen.leases[0].run, seen.leases[0].mine) == ("small#1", "other", False)
    assert seen.waiting[0].reasons == ["small#1 holds it"]
    broken = msgspec.structs.replace(state, held={"gpu0": Unmeasurable(reason="GPU is lost", device="gpu0")})
    lines = watch_lines(watch.merged(picture.show("running"), broken), 80)
    assert "gpu0      cannot be read: GPU is lost" in lines
    picture.close()


@pytest.mark.parametrize(
    ("verdict", "code"), [("passed", 0), ("failed", 1), ("inconclusive", 3), ("nonsense", 1), (None, 1)]
)
def test_a_finished_run_ends_by_its_verdict(
    folder: Path, write: Write, once: Once, verdict: str | None, code: int
) -> None:
    """The exit code of a run that is over is its verdict: 0, 1, or 3 where it is inconclusive."""
    begin(write)
    write("end", 7, reason="the run is finished", outcome="1")
    if verdict is not None:
        (folder / "run.json").write_text(json.dumps({"run": {"verdict": verdict}}))
    assert once()[0] == code
    assert once("--once")[0] == code


def test_a_run_that_was_killed_is_lost(folder: Path, write: Write, once: Once) -> None:
    """A journal without an end, of which no process lives, is a lost run: exit code 1, and said so."""
    a_run(write)
    code, text = once("--once")
    assert code == 1
    assert "lost: nothing of it lives" in text


def test_json_is_one_document_of_the_schema(folder: Path, write: Write, once: Once) -> None:
    """`--json` prints one document that fits the published schema, and nothing else."""
    a_run(write)
    code, text = once("--json")
    document = json.loads(text)
    jsonschema.validate(document, json.loads((SCHEMA_FOLDER / "watch.json").read_text()))
    assert (code, document["format"], document["state"]) == (1, "pytest-vram/watch/1", "lost")


@pytest.mark.parametrize("text", [RUN, f".vram/runs/{RUN}", f".vram/runs/{RUN}/journal.jsonl"])
def test_a_run_by_name(folder: Path, write: Write, once: Once, text: str) -> None:
    """A run is named by its id, its folder or its journal."""
    begin(write)
    write("end", 7, reason="over", outcome="0")
    assert RUN in once(text, "--once")[1]


def test_the_newest_run(folder: Path, write: Write) -> None:
    """The newest run is the one whose journal began last, also of two that began in the same second and whatever was
    written into their folders since; one that is not to be followed again is left out."""
    begin(write)
    later = folder.with_name(f"{RUN[:17]}zzz")
    later.mkdir()
    line = {"v": 1, "t": 1, "kind": "run", "run": "later", "wall": 1.5e9 + 0.5}
    (later / "journal.jsonl").write_text(json.dumps(line) + "\n")
    (folder / "run.json").write_text("{}")
    runs = watch.Runs(folder.parents[2])
    assert runs.all() == [folder, later]
    assert runs.newest() == later
    assert runs.newest(but=[later]) == folder
    assert runs.newest(but=[later, folder]) is None


def test_no_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a run, or with a name that is none, one sentence and exit code 2."""
    folder.rmdir()
    assert entry.main(["watch"]) == 2
    assert "no run was found in" in capsys.readouterr().err
    assert entry.main(["watch", "nowhere"]) == 2
    assert "there is no run 'nowhere'" in capsys.readouterr().err
    assert entry.main(["watch", "a", "b"]) == 2
    assert entry.main(["watch", "--once", "--follow"]) == 2


def test_names_cannot_command_the_terminal(folder: Path, write: Write, once: Once) -> None:
    """Escape codes in names of tests, backends and notes are printed as text, in every form of output."""
    begin(write)
    evil = "\x1b]0;owned\x07\x1b[2J\u202e\r\n"
    write("window", 1, event="open", window=1, name=evil, what="test", parent=None)
    write("backend", 1, name=evil, generation=1, state=evil)
    write("note", 1, text=evil)
    write("test", 1, nodeid=evil, outcome=evil)
    write("end", 1, reason=evil, outcome=evil)
    for arguments in ([], ["--once"], ["--json"]):
        _, text = once(*arguments)
        assert "\x1b" not in text
        assert "\u202e" not in text
        assert "\x07" not in text


HOSTILE = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=20), st.just([]), st.just({})
)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    lines=st.lists(
        st.one_of(
            st.binary(max_size=60),
            st.builds(
                lambda kind, t, fields: json.dumps({**fields, "v": 1, "t": t, "kind": kind}).encode(),
                st.sampled_from(sorted(KINDS)),
                st.integers(min_value=-5, max_value=2**70),
                st.dictionaries(
                    st.sampled_from(
                        [
                            "event",
                            "name",
                            "pid",
                            "owner",
                            "device",
                            "max",
                            "last",
                            "label",
                            "state",
                            "generation",
                            "window",
                            "what",
                            "parent",
                            "closed",
                            "backend",
                            "nodeid",
                            "outcome",
                            "text",
                            "ticket",
                            "need",
                            "capacity",
                            "settings",
                            "wall",
                            "backends",
                        ]
                    ),
                    HOSTILE,
                ),
            ),
        ),
        max_size=30,
    )
)
def test_any_journal_is_shown(tmp_path: Path, lines: list[bytes]) -> None:
    """Whatever stands in the journal, there is a picture, a document and lines of the right width."""
    (tmp_path / "journal.jsonl").write_bytes(b"\n".join(lines))
    picture = Picture(tmp_path)
    picture.read()
    for state in ("running", "lost"):
        seen = picture.show(state)
        msgspec.json.encode(seen)
        assert all(cell_len(line) <= 60 for line in watch_lines(seen, 60))
    picture.close()


def test_lines_that_grow(tmp_path: Path) -> None:
    """A line is given once it is whole; one that is cut short waits, and is told as cut."""
    path = tmp_path / "journal.jsonl"
    tail = Tail(path)
    assert list(tail.lines()) == []  # there is none yet
    path.write_bytes(b"one\ntw")
    assert list(tail.lines()) == [b"one"]
    cut = [tail.cut]
    with path.open("ab") as stream:
        stream.write(b"o\nthree\n")
    assert list(tail.lines()) == [b"two", b"three"]
    assert [*cut, tail.cut] == [True, False]
    path.write_bytes(b"new\n")
    assert list(tail.lines()) == [b"new"]
    tail.close()


def test_a_line_without_an_end(tmp_path: Path) -> None:
    """A line of tens of MiB is passed over and counted, and the next one is read."""
    path = tmp_path / "journal.jsonl"
    path.write_bytes(b"x" * (LONGEST + (3 << 20)) + b"\nnext\n")
    tail = Tail(path)
    assert list(tail.lines()) == [b"next"]
    assert tail.dropped == 1
    tail.close()


def test_a_strip_reaches_its_own_peak(folder: Path, write: Write) -> None:
    """A run that takes little of a large card has a strip to be seen all the same, and says what its top is."""
    begin(write)
    for second, size in ((1, 10_000_000), (2, 20_000_000), (3, 10_000_000)):
        write("sample", second, device="gpu0", min=1, max=size, last=size, now=1, count=100)
    picture = Picture(folder)
    picture.read()
    seen = picture.show("lost")
    picture.close()
    assert max(seen.devices[0].series) == 20_000_000
    (strip,) = [line for line in watch_lines(seen, 80) if "█" in line]
    assert strip.strip().endswith("to 19.07 MiB")
    assert set(strip.split()[0]) == {"▄", "█"}


def test_a_run_that_is_over_holds_nothing_and_says_when_it_was(folder: Path, write: Write, once: Once) -> None:
    """The last sample before the end is not what is held now, and a stopped server is not stopped for 0 seconds."""
    a_run(write)
    write("backend", 6, name="small", generation=1, state="stopped", engine="llama-server", pid=77)
    write("end", 7, reason="the run is finished", outcome="0")
    _, text = once("--once")
    assert "begun 2017-07-1" in text
    assert "backend   small#1 stopped\n" in text
    assert "peak 95.37 MiB of 143.1 MiB" in text
    assert json.loads(once("--json")[1])["devices"][0]["held"] is None


@pytest.mark.parametrize("text", ["", "a" * 5000, "\0", "nowhere/" * 600])
def test_a_name_that_is_none(folder: Path, write: Write, capsys: pytest.CaptureFixture[str], text: str) -> None:
    """Whatever stands in place of a run's name, one that names none is bad use, also where there are runs."""
    begin(write)
    assert entry.main(["watch", text]) == 2
    assert "there is no run" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["journal.jsonl", "run.json"])
def test_pipes_in_place_of_files(folder: Path, write: Write, once: Once, name: str) -> None:
    """A pipe that somebody put there is not waited for."""
    if name != "journal.jsonl":
        begin(write)
        write("end", 7, reason="over", outcome="0")
    os.mkfifo(folder / name)
    assert once("--once")[0] == 0


def test_ctrl_c_ends_with_130_and_gives_the_cursor_back(folder: Path, write: Write) -> None:
    """On a terminal Ctrl-C ends with exit code 130, and the cursor is shown again."""
    pty = pytest.importorskip("pty")
    begin(write, controller=os.getpid())
    write("keeper", pid=os.getpid(), guard=1, generation=1)
    master, slave = pty.openpty()
    process = subprocess.Popen(
        COMMAND,
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "80", "LINES": "24"},
    )
    os.close(slave)
    shown = b""
    deadline = time.monotonic() + 20
    while b"gpu0" not in shown and time.monotonic() < deadline:
        shown += os.read(master, 65536)
    process.send_signal(signal.SIGINT)
    assert process.wait(20) == 130
    while True:
        try:
            piece = os.read(master, 65536)
        except OSError:
            break
        shown += piece
        if not piece:
            break
    os.close(master)
    assert b"Traceback" not in shown
    assert shown.rindex(b"\x1b[?25h") > shown.rindex(b"\x1b[?25l")


def test_without_a_terminal_there_is_a_line_for_each_change(folder: Path, write: Write, once: Once) -> None:
    """Into a pipe goes a line for each change, and the last picture."""
    a_run(write)
    write("end", 7, reason="the run is finished", outcome="0")
    code, text = once()
    assert code == 0
    assert re.search(r"2\.00 s  backend small#1 ready", text)
    assert "test test_a.py::test_one passed" in text
    assert "done      1 passed" in text
