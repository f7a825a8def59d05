"""What reading, judging and reporting a long soak takes, beside plainly parsing its journal.

    python ci/bench/soak_judging.py [--turns 100000] [--runs 3]

Writes a journal of so many turns of a formula with two layers of memory (``pytest_vram.testing.soaks``), then, in a
process of its own each time, does what ``vram soak --resume`` does of a soak that has nothing left to ask: the journal
is read and checked line by line, every gate judged, the report printed and saved. The peer is ``json.loads`` of each
line of the same journal, and nothing else. Prints JSON with medians; exits with 1 from 10 s or 300 MB on.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from pytest_vram.readings import Reading
from pytest_vram.report import soaks
from pytest_vram.sessions.soak import Soak
from pytest_vram.sessions.soak_journal import FILE_NAME, SegmentLine, SessionLine, SoakJournal, TurnLine, encode, now
from pytest_vram.sessions.soak_series import Series
from pytest_vram.spec import Amount
from pytest_vram.testing.soaks import GATES, PERIOD, FormulaTalker

MOST_SECONDS, MOST_BYTES = 10.0, 300_000_000
FINGERPRINT = {"formula": True}


def main() -> int:
    """Write, judge, parse; 1 where it takes too much."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=100_000)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--child", nargs=2, metavar=("WAY", "FOLDER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child is not None:
        way, folder = options.child
        print(json.dumps(measured({"judge": judge, "parse": parse}[way], Path(folder), options.turns)))
        return 0
    with tempfile.TemporaryDirectory(prefix="vram-soak-") as name:
        folder = Path(name)
        write(folder, options.turns)
        rows = {way: [child(way, folder, options.turns) for _ in range(options.runs)] for way in ("judge", "parse")}
        size = (folder / FILE_NAME).stat().st_size
    found = {
        way: {key: statistics.median(row[key] for row in rows[way]) for key in ("seconds", "peak_bytes")}
        for way in rows
    }
    report = {
        "turns": options.turns,
        "journal_bytes": size,
        **found,
        "outcome": rows["judge"][0]["outcome"],
        "seconds_of_parsing": round(found["judge"]["seconds"] / found["parse"]["seconds"], 2),
    }
    print(json.dumps(report, indent=1))
    fits = found["judge"]["seconds"] < MOST_SECONDS and found["judge"]["peak_bytes"] < MOST_BYTES
    return 0 if fits and report["outcome"] == "passed" else 1


def write(folder: Path, turns: int) -> None:
    """A journal as a soak leaves it. Its lines are not brought to the disk one by one, which takes a night."""
    SoakJournal.open(folder, FINGERPRINT, name="formula").close()
    talker = FormulaTalker("flat")
    with (folder / FILE_NAME).open("wb") as stream:
        stream.write(encode(SessionLine(n=1, pid=1, amount=f"{turns}turns", at=now())))
        stream.write(encode(SegmentLine(n=2, segment=1, first=1, why="start", pid=2, build="1", at=now())))
        for number in range(1, turns + 1):
            turn = talker.turn(number)
            idle = turn.idle["gpu0"]
            assert isinstance(idle, Reading)
            host = Reading(bytes=idle.bytes // 3, source="host-anon", scope="backend", device="host", exact=True)
            turn = msgspec.structs.replace(turn, layers={"process": idle, "host": host}, host=host)
            stream.write(encode(TurnLine(n=number + 2, turn=turn, spent=float(number))))


def child(way: str, folder: Path, turns: int) -> dict[str, Any]:
    """One run in a process of its own: seconds, its peak of memory in bytes, and what it said."""
    command = [sys.executable, __file__, "--turns", str(turns), "--child", way, str(folder)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE)
    row: dict[str, Any] = json.loads(done.stdout)
    return row


def measured(work: Callable[[Path, int], str], folder: Path, turns: int) -> dict[str, Any]:
    """Do it: imports are counted in its memory, not in its time."""
    import resource

    began = time.perf_counter()
    outcome = work(folder, turns)
    seconds = time.perf_counter() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"seconds": round(seconds, 3), "peak_bytes": peak, "outcome": outcome}


def judge(folder: Path, turns: int) -> str:
    """Take up the soak, judge it, print its report and save it."""
    series = Series(period=PERIOD, limit=GATES.limit, context=GATES.context)

    def fold(line: TurnLine) -> None:
        series.add(line.turn, line.spent)

    journal = SoakJournal.open(folder, FINGERPRINT, name="formula", told=fold)
    try:
        amount = Amount(text=f"{turns}turns", turns=turns)
        made = Soak(journal, FormulaTalker("flat"), series, GATES, amount)
        end = made.run()
        found = soaks.document(journal, series, made.verdict(end), end, amount=amount.text)
        trouble = soaks.save(found, folder)
    finally:
        journal.close()
    assert trouble is None, trouble
    assert found.turn_count == turns
    print("\n".join(soaks.lines(found)), file=sys.stderr)
    return found.verdict.outcome


def parse(folder: Path, turns: int) -> str:
    """Parse every line, and keep none."""
    count = 0
    with (folder / FILE_NAME).open("rb") as stream:
        for line in stream:
            count += json.loads(line)["kind"] == "turn"
    assert count == turns
    return ""


if __name__ == "__main__":
    sys.exit(main())
