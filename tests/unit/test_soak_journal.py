"""The journal of a soak: what a kill leaves, what is damage, and what may go on with it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tracemalloc
import zlib
from pathlib import Path

import pytest

from pytest_vram.errors import BadInput
from pytest_vram.sessions import soak_journal
from pytest_vram.sessions.soak_gates import Gates, judge
from pytest_vram.sessions.soak_journal import FILE_NAME, SegmentLine, SoakJournal, TurnLine, encode, read
from pytest_vram.sessions.soak_lines import StructuredLog
from pytest_vram.sessions.soak_series import Series
from pytest_vram.spec import Limits
from tests.unit.soak_kit import FINGERPRINT, PERIOD, a_turn


def begun(folder: Path, count: int = 5) -> bytes:
    """A journal of so many turns; its bytes."""
    journal = SoakJournal.open(folder, FINGERPRINT, name="nightly")
    journal.commit(SegmentLine(segment=1, first=1, why="start"))
    for number in range(1, count + 1):
        journal.commit(TurnLine(turn=a_turn(number), spent=2.0 * number))
    journal.close()
    return (folder / FILE_NAME).read_bytes()


def test_a_torn_last_line_is_dropped_wherever_it_was_cut(tmp_path: Path) -> None:
    """Every length that a kill can leave of the last line: the turns before it stay, and the next one is asked anew."""
    whole = begun(tmp_path)
    path = tmp_path / FILE_NAME
    start = whole.rindex(b"\n", 0, -1) + 1
    for cut in (start, start + 1, start + 20, *range(start + 30, len(whole) - 1, 41), len(whole) - 1):
        path.write_bytes(whole[:cut])
        found = read(tmp_path)
        assert (found.turns, found.torn) == (4, cut - start)
    journal = SoakJournal.open(tmp_path, FINGERPRINT, name="nightly")
    journal.commit(TurnLine(turn=a_turn(5), spent=10.0))
    journal.close()
    assert path.read_bytes() == whole


def test_any_other_damage_is_refused_by_its_line(tmp_path: Path) -> None:
    """A changed byte anywhere, a line lost, doubled or moved: no soak goes on upon it."""
    whole = begun(tmp_path)
    path = tmp_path / FILE_NAME
    lines = whole.splitlines(keepends=True)
    assert len(lines) == 6
    for at in range(0, len(whole) - 1, 97):
        changed = bytearray(whole)
        changed[at] ^= 0x04
        path.write_bytes(changed)
        with pytest.raises(BadInput, match=r"soak.jsonl, line \d"):
            read(tmp_path)
    for kept in (
        lines[:2] + lines[3:],
        [*lines, lines[-1]],
        [lines[0], lines[2], lines[1], *lines[3:]],
        [b"\n", *lines],
    ):
        path.write_bytes(b"".join(kept))
        with pytest.raises(BadInput, match=r"line \d"):
            SoakJournal.open(tmp_path, FINGERPRINT, name="nightly")
    path.write_bytes(lines[0] + encode(TurnLine(n=2, turn=a_turn(7), spent=1.0)))
    with pytest.raises(BadInput, match="line 2 has turn 7, and turn 1 comes next"):
        read(tmp_path)
    path.write_bytes(b"\0" * 5000 + b"\n")
    with pytest.raises(BadInput, match="line 1 is no line of a soak"):
        read(tmp_path)


@pytest.mark.parametrize(
    ("fields", "spent"),
    [
        ({"tokens_in": 10**30}, 10.0),
        ({"tokens_in": -5}, 10.0),
        ({"calls_right": 7}, 10.0),
        ({"segment": 9}, 10.0),
        ({}, 1e400),
        ({}, -1.0),
    ],
)
def test_a_line_that_no_soak_writes_is_damage(tmp_path: Path, fields: dict[str, int], spent: float) -> None:
    """A checksum can be made for any line: figures that cannot be are refused, and are no figures of a verdict."""
    begun(tmp_path)
    line = encode(TurnLine(n=7, turn=a_turn(6), spent=12345.0))
    body = json.loads(b"{" + line[18:])
    body["turn"] |= fields
    text = json.dumps(body).replace("12345.0", "1e400" if spent > 1e300 else str(spent)).encode()[1:]
    with (tmp_path / FILE_NAME).open("ab") as stream:
        stream.write(b'{"crc":"%08x",' % zlib.crc32(text) + text + b"\n")
    with pytest.raises(BadInput, match="line 7 "):
        read(tmp_path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no pipes with names")
@pytest.mark.parametrize("name", [FILE_NAME, "manifest.json", "log.jsonl"])
def test_a_pipe_in_the_folder_is_not_waited_for(tmp_path: Path, name: str) -> None:
    """It would be, without end: a journal and a manifest are refused, and a log is done without."""
    begun(tmp_path)
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    if name == "log.jsonl":
        log = StructuredLog(tmp_path)
        log.close()
        assert log.lost == 1
        return
    with pytest.raises(BadInput, match="it is no file"):
        SoakJournal.open(tmp_path, FINGERPRINT, name="nightly")


def test_another_configuration_is_refused_by_what_differs(tmp_path: Path) -> None:
    """Names, old and new values; nothing of the journal is touched."""
    whole = begun(tmp_path)
    other = {"backend": {"engine": "scripted", "options": {"ctx-size": 8192}}, "device": "cuda:0", "build": "b2"}
    with pytest.raises(BadInput) as caught:
        SoakJournal.open(tmp_path, other, name="nightly")
    for part in ("backend.options.ctx-size was 4096 and is 8192", "build was not set and is", str(tmp_path)):
        assert part in str(caught.value)
    assert (tmp_path / FILE_NAME).read_bytes() == whole
    (tmp_path / "manifest.json").write_text("{}")
    with pytest.raises(BadInput, match="is not the manifest of a soak"):
        SoakJournal.open(tmp_path, FINGERPRINT, name="nightly")
    (tmp_path / "manifest.json").unlink()
    with pytest.raises(BadInput, match="manifest.json cannot be read"):
        SoakJournal.open(tmp_path, FINGERPRINT, name="nightly")


def test_two_soaks_never_share_a_folder(tmp_path: Path) -> None:
    """Within one process, from another one, and free again once the holder is gone, however it went."""
    journal = SoakJournal.open(tmp_path, FINGERPRINT, name="nightly")
    with pytest.raises(BadInput, match="another soak is running in"):
        SoakJournal.open(tmp_path, FINGERPRINT, name="nightly")
    journal.close()
    code = (
        "import sys; from pathlib import Path; from pytest_vram.sessions.soak_lock import FolderLock;"
        " lock = FolderLock(Path(sys.argv[1])); print('held', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"held\n"
        with pytest.raises(BadInput, match="another soak is running in"):
            SoakJournal.open(tmp_path, FINGERPRINT, name="nightly")
        other.kill()
        other.wait()
    SoakJournal.open(tmp_path, FINGERPRINT, name="nightly").close()


def test_a_turn_is_on_the_disk_before_it_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The line is whole when the disk is waited for, and a disk that refuses leaves nothing of it."""
    journal = SoakJournal.open(tmp_path, FINGERPRINT, name="nightly")
    sizes: list[int] = []

    def waited(fd: int) -> None:
        sizes.append(os.fstat(fd).st_size)
        if len(sizes) == 3:
            raise OSError(5, "Input/output error")

    monkeypatch.setattr(soak_journal.os, "fsync", waited)
    journal.commit(SegmentLine(segment=1, first=1, why="start"))
    journal.commit(TurnLine(turn=a_turn(1), spent=1.0))
    with pytest.raises(soak_journal.DiskTrouble, match="Input/output error"):
        journal.commit(TurnLine(turn=a_turn(2), spent=2.0))
    journal.close()
    assert journal.contents.turns == 1
    assert sizes[0] < sizes[1] == (tmp_path / FILE_NAME).stat().st_size < sizes[2]


def test_memory_does_not_follow_the_number_of_turns(tmp_path: Path) -> None:
    """Rows of the table, names and reasons that are kept are few, whatever the turns say."""
    path = tmp_path / FILE_NAME
    SoakJournal.open(tmp_path, FINGERPRINT, name="nightly").close()
    count = 6_000
    with path.open("wb") as stream:
        stream.write(encode(SegmentLine(n=1, segment=1, first=1, why="start")))
        for number in range(1, count + 1):
            turn = a_turn(number, kinds=[f"kind {number}"], error=f"reason {number}", conversation=f"c{number}")
            stream.write(encode(TurnLine(n=number + 1, turn=turn, spent=float(number))))
    gates = Gates(limit=Limits(text="2GiB", each=2 << 30))
    tracemalloc.start()
    series = Series(period=PERIOD, limit=gates.limit)
    contents = read(tmp_path, lambda line: series.add(line.turn, line.spent))
    assert contents.turns == count
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    verdict = judge(series, gates, contents.losses)
    assert verdict.idle["gpu0"].kind == "flat"
    assert held < 4 << 20, held
    assert len(series.table()) <= 20
    assert len(series.kinds) <= 65


def test_an_interrupt_within_a_commit_leaves_no_line_that_the_next_one_collides_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C while the disk is waited for: the line was not committed, and the last line of the soak takes its place."""
    journal = SoakJournal.open(tmp_path, FINGERPRINT, name="nightly")
    journal.commit(TurnLine(turn=a_turn(1), spent=1.0))

    def interrupted(fd: int) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(soak_journal.os, "fsync", interrupted)
        with pytest.raises(KeyboardInterrupt):
            journal.commit(TurnLine(turn=a_turn(2), spent=2.0))
    journal.commit(soak_journal.EndLine(reason="interrupted", text="by hand"))
    journal.close()
    found = read(tmp_path)
    assert (found.turns, found.lines) == (1, 2)
    assert found.end is not None


def test_a_loss_that_is_taken_out_is_noticed(tmp_path: Path) -> None:
    """A soak without its losses would look better than it was: lines are numbered, and one that is missing is damage."""
    journal = SoakJournal.open(tmp_path, FINGERPRINT, name="nightly")
    journal.commit(SegmentLine(segment=1, first=1, why="start"))
    journal.commit(soak_journal.LossLine(number=1, segment=1, error="it died"))
    journal.commit(TurnLine(turn=a_turn(1), spent=2.0))
    journal.close()
    path = tmp_path / FILE_NAME
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + lines[2])
    with pytest.raises(BadInput, match="line 2 is line 3 of the soak"):
        read(tmp_path)
