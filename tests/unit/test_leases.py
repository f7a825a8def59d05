"""Files that say who holds what: gates, the board, and what stands in the way of them."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pytest_vram.leases import FOLDER_VARIABLE, Board, BoardTrouble, Gate, Lease, Sheet, Turnstiles, shared_folder
from pytest_vram.leases import sheet as sheets

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="record locks of Linux")

#: Another process: it has a gate, turnstiles and a board, and does what it is told, line by line.
OTHER = """
import os, sys
from pathlib import Path
from pytest_vram.leases import *
folder = Path(sys.argv[1])
gate = Gate(folder, "other", os.getpid(), sys.argv[2:])
stiles = Turnstiles(folder, sys.argv[2:])
board = Board(folder, "other")
for line in sys.stdin:
    print(eval(line), flush=True)
"""


class Other:
    """That process."""

    def __init__(self, folder: Path, *devices: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", OTHER, str(folder), *devices],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        self.pid = self.process.pid

    def __call__(self, code: str) -> str:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(code + "\n")
        return self.process.stdout.readline().strip()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(10)
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            stream.close()


@pytest.fixture
def other(tmp_path: Path) -> Iterator[Other]:
    made = Other(tmp_path, "gpu")
    assert made("1") == "1"
    yield made
    made.kill()


def sheet(**fields: Any) -> Sheet:
    return Sheet(**{"version": sheets.VERSION, "run": "me", "pid": os.getpid(), **fields})


WRITES = "board.begin() and (board.write(Sheet(version=1, run='other', pid=0, held={'gpu': 7})), board.end())"


# ---------------------------------------------------------------- gates


def test_a_gate_is_open_unless_somebody_wants_to_be_alone(tmp_path: Path, other: Other) -> None:
    """Processes enter side by side; whoever wants the device alone sees them, and keeps newcomers out."""
    gate = Gate(tmp_path, "me", os.getpid(), ["gpu"])
    assert gate.enter()
    assert other("gate.enter()") == "True"
    assert other("stiles.inside()") == f"[{os.getpid()}]"
    assert other("stiles.close()") == "True"
    gate.leave()
    assert not gate.enter()
    assert other("stiles.inside()") == "[]"
    other("stiles.reopen()")
    assert gate.enter()
    gate.close()


def test_a_gate_is_of_its_devices(tmp_path: Path, other: Other) -> None:
    """Whoever has one device alone keeps nobody from another; a gate without devices is that of all."""
    here, elsewhere, any_device = (Gate(tmp_path, "me", os.getpid(), keys) for keys in (["gpu"], ["second"], []))
    assert other("stiles.close()") == "True"
    assert [here.enter(), elsewhere.enter(), any_device.enter()] == [False, True, False]
    for gate in (here, elsewhere, any_device):
        gate.close()


def test_devices_are_had_alone_side_by_side(tmp_path: Path, other: Other) -> None:
    """Two may have a device of their own alone at the same time; who names no device waits for both."""
    stiles = Turnstiles(tmp_path, ["second"])
    gate = Gate(tmp_path, "me", os.getpid())
    assert other("stiles.close()") == "True"
    assert stiles.closed_by() is None
    assert stiles.close()
    # This process holds its own lock; whether the gate is shut is seen from another one.
    other("stiles.reopen()")
    assert other("Gate(folder, 'third', os.getpid()).enter()") == "False"
    stiles.reopen()
    assert other("Gate(folder, 'third', os.getpid()).enter()") == "True"
    gate.close()
    stiles.give_up()


def test_a_dead_process_is_not_inside(tmp_path: Path, other: Other) -> None:
    """Gates and turnstiles are free the moment their process is dead."""
    stiles = Turnstiles(tmp_path, ["gpu"])
    assert other("gate.enter()") == "True"
    assert stiles.inside() == [other.pid]
    assert stiles.inside([other.pid]) == []
    assert other("stiles.close()") == "True"
    assert stiles.closed_by() == other.pid
    assert not stiles.enter()
    assert not stiles.close()
    other.process.kill()
    other.process.wait(10)
    assert stiles.inside() == []
    assert stiles.enter()
    assert stiles.close()
    stiles.give_up()


def test_gates_within_gates(tmp_path: Path, other: Other) -> None:
    """A run within a test of the same process neither lets go of the outer one's place nor waits for it."""
    outer, inner = (Gate(tmp_path, name, os.getpid(), ["gpu"]) for name in ("outer", "inner"))
    assert outer.enter()
    assert other("stiles.close()") == "True"
    assert inner.enter()
    inner.leave()
    inner.close()
    assert other("stiles.inside()") == f"[{os.getpid()}]"
    outer.close()
    assert other("stiles.inside()") == "[]"


def test_a_forked_copy_has_no_place(tmp_path: Path, other: Other) -> None:
    """A forked copy cannot enter, and its end does not take its parent out."""
    gate = Gate(tmp_path, "me", os.getpid(), ["gpu"])
    assert gate.enter()
    pid = os.fork()
    if pid == 0:
        copy = Gate(tmp_path, "copy", os.getpid(), ["gpu"])
        code = 10 * copy.enter()
        gate.leave()
        gate.close()
        os._exit(7 + code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 17
    assert other("stiles.inside()") == f"[{os.getpid()}]"
    gate.close()


@pytest.mark.parametrize("trouble", ["no folder", "a folder", "a link", "a pipe"])
def test_a_gate_without_its_file_is_closed(tmp_path: Path, trouble: str) -> None:
    """Whatever lies where the file should be, the gate is closed and nothing is raised or followed."""
    folder = tmp_path / "leases"
    if trouble != "no folder":
        folder.mkdir()
    path = folder / "gate-any"
    match trouble:
        case "a folder":
            path.mkdir()
        case "a link":
            path.symlink_to(tmp_path / "target")
        case "a pipe":
            os.mkfifo(path)
    gate = Gate(folder, "me", os.getpid())
    assert not gate.enter()
    gate.leave()
    gate.close()
    assert not (tmp_path / "target").exists()


# ---------------------------------------------------------------- board


def test_the_board_shows_the_living(tmp_path: Path, other: Other) -> None:
    """A sheet is seen while its writer lives, and removed when it is dead."""
    board = Board(tmp_path, "me")
    assert board.begin()
    assert other("board.begin()") == "False"
    assert board.others() == []
    board.write(sheet(leases=[Lease(kind="test", name="t", holds={"gpu": 5})], held={"gpu": 5}))
    board.end()
    assert other(WRITES) == "(None, None)"
    assert [board.alone] == [False]
    assert other("board.begin(), [one.held for one in board.others()], board.end()") == "(True, [{'gpu': 5}], None)"
    assert board.begin()
    (found,) = board.others()
    assert found.held == {"gpu": 7}
    other.process.kill()
    other.process.wait(10)
    assert board.others() == []
    board.end()
    assert [path.name for path in tmp_path.glob("*.lease")] == [board.path.name]
    board.close()
    assert list(tmp_path.glob("*.lease")) == []
    assert board.warnings == []


def test_a_sheet_may_grow_and_shrink(tmp_path: Path, other: Other) -> None:
    """What is read is what was written last, however long it is."""
    board = Board(tmp_path, "me")
    for size in (1, 300, 2):
        assert board.begin()
        board.write(sheet(leases=[Lease(kind="test", name=str(number)) for number in range(size)]))
        board.end()
        seen = other("board.begin(), [len(one.leases) for one in board.others()], board.end()")
        assert seen == f"(True, [{size}], None)"
    board.close()


@pytest.mark.parametrize("what", ["garbage", "version", "large", "shape", "folder", "pipe", "link", "denied", "empty"])
def test_what_is_no_sheet_is_ignored_with_a_sentence(tmp_path: Path, other: Other, what: str) -> None:
    """Files that cannot be used are told once and never raise; unlocked ones are removed without a word."""
    path = tmp_path / "strange.lease"
    body = b'{"version":99,"run":"x"}'
    contents = {
        "garbage": b"\x00\xff not a sheet",
        "version": b"%08x " % zlib.crc32(body) + body,
        "large": b"x" * (sheets.LARGEST + 1),
        "shape": b"%08x " % zlib.crc32(b'{"version":1}') + b'{"version":1}',
        "empty": b"",
        "denied": b"x",
    }
    match what:
        case "folder":
            path.mkdir()
        case "pipe":
            os.mkfifo(path)
        case "link":
            path.symlink_to(tmp_path / "target")
        case _:
            path.write_bytes(contents[what])
            held = f"__import__('fcntl').lockf(globals().setdefault('f', open({str(path)!r}, 'r+')), 6, 1, 0)"
            assert other(held) == "None"
    if what == "denied":
        if os.getuid() == 0:
            pytest.skip("root may read everything")
        path.chmod(0)
    board = Board(tmp_path, "me")
    for _ in range(2):
        assert board.begin()
        assert board.others() == []
        board.end()
    expected = {
        "garbage": "it is damaged",
        "version": "it is of format 99",
        "large": "larger than",
        "shape": "not what pytest-vram writes",
        "folder": "it is not a file",
        "pipe": "it is not a file",
        "link": "it is a link",
        "denied": "Permission denied",
    }
    if what == "empty":
        assert board.warnings == []
    else:
        (warning,) = board.warnings
        assert str(path) in warning
        assert expected[what] in warning
    if what in contents and what != "denied":
        assert board.unknown == [other.pid]
        other.process.kill()
        other.process.wait(10)
        assert board.begin()
        board.others()
        board.end()
        assert not path.exists()
    board.close()


def test_alone_until_somebody_comes(tmp_path: Path, other: Other, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without another run nothing needs to be looked at again, and a new one is noticed, in the same tick as well."""
    from pytest_vram.leases import board as module

    monkeypatch.setattr(module, "_TICK", -1)
    board = Board(tmp_path, "me")
    assert [board.alone] == [False]
    assert board.begin()
    board.write(sheet())
    board.others()
    board.end()
    assert [board.alone] == [True]
    monkeypatch.setattr(module, "_TICK", 1 << 62)
    board.others()
    assert other(WRITES) == "(None, None)"
    assert [board.alone] == [False]
    board.close()


def test_a_torn_sheet_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: Other) -> None:
    """A reader that comes in the middle of a write sees the old or the new sheet, not half of each."""
    assert other(WRITES) == "(None, None)"
    board = Board(tmp_path, "me")
    whole = os.pread
    torn = [b"00000000 {}", b"0"]
    monkeypatch.setattr(os, "pread", lambda fd, size, at: torn.pop() if torn else whole(fd, size, at))
    assert board.begin()
    assert [found.held for found in board.others()] == [{"gpu": 7}]
    board.end()
    assert board.warnings == []
    board.close()


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What cannot be written is trouble with a reason."""
    board = Board(tmp_path, "me")
    assert board.begin()
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: 3)
    with pytest.raises(BoardTrouble, match="No space left"):
        board.write(sheet())
    board.close()


def test_a_stopped_process_in_the_middle_of_a_step(tmp_path: Path, other: Other) -> None:
    """Nobody waits for a step that does not end; who is in it can be said."""
    assert other("board.begin()") == "True"
    os.kill(other.pid, signal.SIGSTOP)
    board = Board(tmp_path, "me")
    assert not board.begin()
    assert board.stepping() == other.pid
    os.kill(other.pid, signal.SIGCONT)
    other("board.end()")
    assert board.begin()
    board.close()


# ---------------------------------------------------------------- the folder


def test_the_folder_is_for_everybody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is made for all users of the machine, whose files in it are their own."""
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "a" / "b"))
    assert shared_folder().stat().st_mode & 0o7777 == 0o1777
    assert shared_folder() == tmp_path / "a" / "b"
    Board(shared_folder(), "me").close()
    assert (tmp_path / "a" / "b" / "mutex").stat().st_mode & 0o777 == 0o666
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv(FOLDER_VARIABLE, "~/c")
    assert shared_folder() == tmp_path / "c"


def test_a_folder_that_cannot_be_used_is_trouble(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file, a link, or a place where nothing can be made: a sentence says which."""
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path)
    for name, reason in (("file", "is not a folder"), ("link", "is not a folder"), ("file/x", "cannot be made")):
        monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / name))
        with pytest.raises(BoardTrouble, match=reason):
            shared_folder()


def test_a_folder_without_locks_is_trouble(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the file system knows no record locks, the board says so at once."""
    from pytest_vram.leases import board as module

    monkeypatch.setattr(module, "try_lock", lambda fd, byte, *, exclusive: False)
    with pytest.raises(BoardTrouble, match="without record locks"):
        Board(tmp_path, "me")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("here/leases", "'here/leases', which does not begin with a slash: write the whole path"),
        ("~nobody-of-that-name/x", "no home folder that '~nobody-of-that-name' stands for"),
        ("/tmp/\udcff", r"the name of /tmp/\\udcff is not in UTF-8"),
    ],
)
def test_a_name_that_means_something_else_for_each_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, reason: str
) -> None:
    """A folder that would be another one in each project, or that cannot be told to others, is refused."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(FOLDER_VARIABLE, name)
    with pytest.raises(BoardTrouble, match=re.escape(reason) if "udcff" not in reason else reason):
        shared_folder()
    assert list(tmp_path.iterdir()) == []
