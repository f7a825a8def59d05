"""The rest of a line behind a journal is never dropped unsaid, and what a soak found is told before another begins."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pytest_vram import soaking as product
from pytest_vram.report import soaks
from pytest_vram.sessions import soak_journal
from pytest_vram.sessions.soak import Soak
from pytest_vram.sessions.soak_journal import FILE_NAME, SoakJournal, encode, read
from pytest_vram.sessions.turns import Turn
from tests.unit.soak_kit import FINGERPRINT, ScriptedTalker, a_turn, soaking, turns

TORN = b'{"crc":"00000000","n":9,"kind":"tu'


def torn(folder: Path, count: int = 4, rest: bytes = TORN) -> bytes:
    """A soak of so many turns that was cut short in a line; its whole lines."""
    soak = soaking(folder, ScriptedTalker(), turns(count))
    soak.run()
    soak.journal.close()
    whole = (folder / FILE_NAME).read_bytes()
    (folder / FILE_NAME).write_bytes(whole + rest)
    return whole


def ran(soak: Soak) -> str:
    """Why a soak ended that is run to its end."""
    end = soak.run()
    soak.journal.close()
    return end.reason


def test_a_process_that_ends_before_it_wrote_anything_leaves_a_torn_line_to_the_next(tmp_path: Path) -> None:
    """What was killed between the opening and its first line has told nobody of it."""
    torn(tmp_path)
    SoakJournal.open(tmp_path, FINGERPRINT, name="nightly").close()
    assert read(tmp_path).torn == len(TORN)


@pytest.mark.parametrize("longer", [False, True])
def test_a_torn_line_is_said_though_the_disk_was_full_when_it_was_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, longer: bool
) -> None:
    """However much of the first line had room: the committed lines stay, and the next process drops the rest and says so."""
    rest = TORN * 40 if longer else TORN
    whole = torn(tmp_path, 4, rest)
    write = os.write
    for room in (0, 1, 17, 40, 90):
        left = [room]

        def full(fd: int, data: bytes, left: list[int] = left) -> int:
            if left[0] <= 0:
                raise OSError(28, "No space left on device")
            done = write(fd, bytes(data)[: left[0]])
            left[0] -= done
            return done

        monkeypatch.setattr(os, "write", full)
        assert ran(soaking(tmp_path, ScriptedTalker(), turns(6))) == "disk"
        monkeypatch.undo()
        assert (tmp_path / FILE_NAME).read_bytes().startswith(whole)
        assert (read(tmp_path).turns, read(tmp_path).torn) == (4, max(room, len(rest)))
    told: list[str] = []
    again = ScriptedTalker()
    assert ran(soaking(tmp_path, again, turns(6), told=told.append)) == "amount"
    assert again.asked == [5, 6]
    found = read(tmp_path)
    assert (found.turns, found.torn) == (6, 0)
    assert found.sessions[-1].dropped > 0
    assert any("without its end was dropped" in line for line in told)


def test_a_kill_between_the_line_that_says_so_and_the_end_of_the_rest_leaves_a_journal(tmp_path: Path) -> None:
    """What the longer rest leaves behind the new line has no end, and is dropped in its turn."""
    rest = TORN * 40
    whole = torn(tmp_path, 4, rest)
    line = encode(soak_journal.SessionLine(n=whole.count(b"\n") + 1, pid=1, amount="6turns", dropped=len(rest)))
    (tmp_path / FILE_NAME).write_bytes(whole + line + rest[len(line) :])
    assert read(tmp_path).torn == len(rest) - len(line)
    assert ran(soaking(tmp_path, ScriptedTalker(), turns(6))) == "amount"
    assert read(tmp_path).turns == 6


def test_a_torn_line_behind_a_soak_that_failed_is_dropped_and_said_and_it_stays_failed(tmp_path: Path) -> None:
    """Nothing is asked, and its end is the last word."""

    def over(number: int) -> Turn:
        turn = a_turn(number)
        return turn if number < 3 else a_turn(number, peak={"gpu0": a_turn(number, leak=2000.0).peak["gpu0"]})

    first = soaking(tmp_path, ScriptedTalker(over), turns(10))
    assert ran(first) == "budget"
    path = tmp_path / FILE_NAME
    path.write_bytes(path.read_bytes() + TORN)
    for dropped in (len(TORN), 0):
        told: list[str] = []
        talker = ScriptedTalker()
        soak = soaking(tmp_path, talker, turns(10), told=told.append)
        end = soak.run()
        soak.journal.close()
        assert (end.reason, soak.verdict(end).outcome, talker.asked) == ("budget", "failed", [])
        found = read(tmp_path)
        assert found.end is not None
        assert (found.end.reason, found.torn) == ("budget", 0)
        assert any("without its end was dropped" in line for line in told) == bool(dropped)
    assert [line.dropped for line in read(tmp_path).sessions] == [0, len(TORN)]


def test_a_soak_that_was_killed_between_its_end_and_its_report_is_told_before_another_begins(tmp_path: Path) -> None:
    """A report of an earlier process is none of this end."""
    folder = tmp_path / "1"
    for amount in (3, 5):
        soak = soaking(folder, ScriptedTalker(), turns(amount))
        end = soak.run()
        assert product.to_go_on(tmp_path) == folder
        document = soaks.document(soak.journal, soak.series, soak.verdict(end), end, amount=f"{amount}turns")
        soak.journal.close()
        assert soaks.save(document, folder) is None
        assert product.to_go_on(tmp_path) == tmp_path / "2"
    (folder / "report.json").write_bytes(b"{")
    assert product.to_go_on(tmp_path) == folder
