"""Suites whose tests have needs, and what a run's journal says about how they shared a device."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pytest_vram.journal import FILE_NAME, Journal

CAPACITY = 10**9
NEEDS = {"equal": (500,), "mixed": (200, 300, 400, 500, 600, 800, 1000)}

HEAD = """
import os, time
import pytest
from pytest_vram import max_vram, serial_only

def sleep(name, seconds):
    start = time.monotonic_ns()
    time.sleep(seconds)
    with open({log!r}, "a") as stream:
        stream.write(f"{{name}} {{start}} {{time.monotonic_ns()}} {{os.getpid()}}\\n")
"""
NEEDY = """
@max_vram("{need}MB")
def test_{number}():
    sleep("test_{number}", {seconds})
"""
SERIAL = """
@serial_only
def test_{number}():
    sleep("test_{number}", {seconds})
"""
PLAIN = """
def test_{number}():
    sleep("test_{number}", {seconds})
"""


class Lease(NamedTuple):
    """A lease out of a journal: times in monotonic nanoseconds, bytes on all devices, tests that passed it."""

    name: str
    asked: int
    granted: int
    released: int
    takes: int
    passed: int


def write(path: Path, seed: int, kind: str, *, tests: int = 40, seconds: tuple[float, float] = (0.05, 0.1)) -> Path:
    """Write a suite in a random order: ``equal``, ``mixed``, ``serial`` (a quarter alone) or ``plain``.

    Returns the file in which its tests note when they ran.
    """
    rng = random.Random(seed)
    log = path.parent / "ran.txt"
    bodies = []
    for number in range(tests):
        template = PLAIN if kind == "plain" else SERIAL if kind == "serial" and number % 4 == 0 else NEEDY
        if kind == "serial" and number % 4 == 1:
            template = PLAIN
        need = rng.choice(NEEDS["mixed" if kind == "serial" else kind if kind in NEEDS else "equal"])
        bodies.append(template.format(number=number, need=need, seconds=round(rng.uniform(*seconds), 3)))
    rng.shuffle(bodies)
    path.write_text(HEAD.format(log=str(log)) + "".join(bodies))
    return log


def journal(folder: Path) -> list[dict[str, Any]]:
    """Lines of the newest run in a folder."""
    newest = max((folder / ".vram" / "runs").iterdir(), key=lambda run: run.stat().st_mtime_ns)
    return list(Journal(newest / FILE_NAME))


def leases(lines: Iterable[dict[str, Any]]) -> list[Lease]:
    """The leases of a journal, in the order in which they were granted."""
    asked: dict[int, int] = {}
    granted: dict[int, dict[str, Any]] = {}
    found = []
    for line in lines:
        if line["kind"] != "lease":
            continue
        ticket = line["ticket"]
        match line["event"]:
            case "wait":
                asked[ticket] = line["t"]
            case "granted":
                granted[ticket] = line
            case "released" if ticket in granted:
                grant = granted.pop(ticket)
                start = grant["t"]
                takes = sum(grant["takes"].values())
                waited = asked.get(ticket, start)
                found.append(Lease(grant["name"], waited, start, line["t"], takes, grant.get("passed", 0)))
    return sorted(found, key=lambda lease: lease.granted)


def most_held(found: Iterable[Lease]) -> int:
    """The most that leases held at one moment, in bytes."""
    changes = sorted(
        (t, size) for lease in found for t, size in ((lease.granted, lease.takes), (lease.released, -lease.takes))
    )
    held = most = 0
    for _, size in changes:
        held += size
        most = max(most, held)
    return most


def most_passed(found: Sequence[Lease]) -> int:
    """The most tests that asked later than another one and went before it."""
    return max(
        (sum(other.asked > lease.asked and other.granted < lease.granted for other in found) for lease in found),
        default=0,
    )


def to_best(found: Sequence[Lease], wide: int) -> float:
    """Wall time of these leases, over what no packing of them can beat: by area, by those that fit beside no other, by
    number of workers. It counts from the moment when as many tests had asked as there are workers.
    """
    begin = max(sorted(lease.asked for lease in found)[min(wide, len(found)) - 1], found[0].granted)
    rows = [(max(0, lease.released - max(lease.granted, begin)), lease.takes) for lease in found]
    area = sum(length * takes for length, takes in rows) / CAPACITY
    large = sum(length * (1.0 if takes > CAPACITY / 2 else 0.5) for length, takes in rows if takes >= CAPACITY / 2)
    narrow = sum(length for length, _ in rows) / wide
    return (max(lease.released for lease in found) - begin) / max(area, large, narrow)


def overlaps(log: Path, names: Iterable[str] | None = None) -> list[tuple[str, str]]:
    """Pairs of tests that ran at the same time, out of what they noted; with ``names`` only pairs with one of them."""
    rows = [line.split() for line in log.read_text().splitlines()]
    times = sorted((int(start), int(end), name) for name, start, end, _ in rows)
    running: list[tuple[int, str]] = []
    found = []
    for start, end, name in times:
        while running and running[0][0] <= start:
            heapq.heappop(running)
        found += [(other, name) for _, other in running]
        heapq.heappush(running, (end, name))
    wanted = set(names) if names is not None else None
    return [pair for pair in found if wanted is None or not wanted.isdisjoint(pair)]


def widest(log: Path) -> int:
    """The most tests that ran at the same time."""
    changes: list[tuple[int, int]] = []
    for line in log.read_text().splitlines():
        _, start, end, _ = line.split()
        changes += [(int(start), 1), (int(end), -1)]
    wide = most = 0
    for _, change in sorted(changes):
        wide += change
        most = max(most, wide)
    return most


def serial(path: Path) -> set[str]:
    """Names of the tests of a suite that want the device alone."""
    lines = path.read_text().splitlines()
    return {after[4:-3] for line, after in itertools.pairwise(lines) if line == "@serial_only"}
