"""A day of samples at 10 ms on a simulated clock: what do the timeline and the keeper's own state take?

Run from a checkout; prints JSON::

    python ci/bench/timeline.py [--hours 24]

Two parts. ``series``: 8.64 million samples with a test every 4 s, in each of which a phase and a cell, into
:class:`pytest_vram.measure.series.Series`; every mark's maximum is compared with the true one. ``keeper``: the real
:class:`pytest_vram.measure.Timeline` on a card and processes on paper, one window after the other, each with a process
and a stranger of its own; what it takes is the growth of this process, all in all and after the first hour. Ends with 1
where a maximum is wrong, where more than 50 MB were taken, or where the keeper's state grew by more than 1 MB. A day
takes some minutes.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from pytest_vram.measure import Timeline
from pytest_vram.measure.series import Series
from tests.unit.measure_kit import PaperCard, PaperMembers, PaperProbe

MIB = 1 << 20
INTERVAL = 10_000_000
PER_TEST = 400
MOST = 50_000_000
MOST_GROWTH = 1_000_000


def rss() -> int:
    """Peak of this process's memory in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def series(samples: int) -> dict[str, object]:
    """The day in a series; its figures, and whether every maximum is right."""
    rng = random.Random(1)
    before, began = rss(), time.process_time()
    found = Series()
    tests = samples // PER_TEST
    wrong = 0
    truth: list[int] = []
    for number in range(tests):
        t0 = number * PER_TEST * INTERVAL
        test = found.begin(f"tests/test_agent_{number // 40}.py::test_turn[{number}]", "test", t0)
        tops = [0, 0, 0]
        inner = part = 0
        for index in range(PER_TEST):
            t = t0 + index * INTERVAL
            if index % 200 == 50:
                part = 1 + index // 200
                inner = found.begin(f"{('phase', 'cell')[part - 1]} {number}", ("phase", "cell")[part - 1], t)
            size = rng.getrandbits(33)
            found.add(t, size)
            tops[0] = max(tops[0], size)
            if part:
                tops[part] = max(tops[part], size)
            if index % 200 == 150:
                found.end(inner, t)
                part = 0
        found.end(test, t0 + PER_TEST * INTERVAL)
        truth += [tops[1], tops[2], tops[0]]
    grown = rss() - before - sys.getsizeof(truth) - 32 * len(truth)
    seconds = time.process_time() - began
    wrong += sum(mark.high != most for mark, most in zip(found.marks(), truth, strict=True))
    wrong += found.high != max(truth)
    return {
        "samples": found.samples,
        "marks": len(truth),
        "wrong_maxima": wrong,
        "megabytes": round(max(0, grown) / 1e6, 1),
        "microseconds_per_sample": round(seconds / max(1, found.samples) * 1e6, 2),
    }


def keeper(ticks: int) -> dict[str, object]:
    """The day in the keeper's own timeline; what it holds after an hour and at the end."""
    members, card, host = PaperMembers(), PaperCard(accounting=True), PaperProbe()
    now = 0
    timeline = Timeline([card], host, members, interval=INTERVAL, clock=lambda: now)
    members.join(1, "agent#1")
    card.set(1, 500 * MIB)
    host.set(1, 5 * MIB)
    first = 0
    hour = 3_600_000_000_000 // INTERVAL
    before = rss()
    for number in range(ticks // PER_TEST):
        timeline.boundary(now)
        span = timeline.open(now, ("agent#1",), 1)
        pid, stranger = 10_000 + number, 10_000_000 + number
        members.join(pid)
        host.set(pid, MIB)
        card.set(pid, MIB)
        card.set(stranger, 70 * MIB)
        for tick in range(PER_TEST):
            now += INTERVAL
            if tick % 20 == 0:
                card.set(1, (500 + number % 7 + tick % 9) * MIB)
            timeline.tick(now)
        card.end(stranger)
        card.end(pid)
        host.end(pid)
        timeline.boundary(now)
        timeline.close(span)
        timeline.peaks(span, "run")
        for table in (members.joined, members.left, members._dead):
            table.clear()  # what the keeper and a real look at /proc do
        if number * PER_TEST <= hour:
            first = rss()
    return {
        "ticks": timeline.ticks,
        "megabytes": round((rss() - before) / 1e6, 2),
        "megabytes_after_the_first_hour": round((rss() - first) / 1e6, 2),
    }


def main() -> int:
    """Print the figures; 1 where a promise does not hold."""
    parser = argparse.ArgumentParser(description="A day of samples on a simulated clock.")
    parser.add_argument("--hours", type=float, default=24.0)
    count = int(parser.parse_args().hours * 3_600_000_000_000 / INTERVAL)
    # This first: memory that the other part gave back would hide its growth.
    state = keeper(count)
    curve = series(count)
    print(json.dumps({"series": curve, "keeper": state}, indent=1))
    grew = float(str(state["megabytes_after_the_first_hour"]))
    fits = float(str(curve["megabytes"])) + float(str(state["megabytes"])) <= MOST / 1e6
    return 0 if fits and not curve["wrong_maxima"] and grew * 1e6 <= MOST_GROWTH else 1


if __name__ == "__main__":
    sys.exit(main())
