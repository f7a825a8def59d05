"""A timeline of any length in bounded memory, and a keeper that does not grow with time."""

from __future__ import annotations

import gc
import random
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_vram.journal import Journal, Writer
from pytest_vram.measure import PYTEST, Members, Timeline
from pytest_vram.measure.series import Bucket, Mark, Series
from pytest_vram.readings import Reading
from tests.unit.measure_kit import PaperCard, PaperMembers, PaperProbe
from tests.unit.test_measure_procfs import Machine

MIB = 1 << 20
MS = 1_000_000
DAY = 24 * 3600 * 1000 * MS


# ---------------------------------------------------------------- the curve


def test_few_samples_stay_as_they_are() -> None:
    """As long as there is room, each interval has a bucket of its own."""
    series = Series(4, width=10)
    for t, size in ((100, 5), (104, 9), (110, 7), (139, 1)):
        series.add(t, size)
    assert series.buckets() == [Bucket(100, 104, 5, 9), Bucket(110, 110, 7, 7), Bucket(139, 139, 1, 1)]
    assert (series.low, series.high, series.width, series.samples, len(series)) == (1, 9, 10, 4, 3)


def test_neighbours_are_merged_when_all_are_taken() -> None:
    """Pairs become one, and the extremes of both stay."""
    series = Series(4, width=10)
    for t, size in enumerate((5, 9, 2, 7, 3)):
        series.add(10 * t, size)
    assert series.width == 20
    assert series.buckets() == [Bucket(0, 10, 5, 9), Bucket(20, 30, 2, 7), Bucket(40, 40, 3, 3)]


def test_a_pause_takes_no_room() -> None:
    """Time without samples has no buckets; the width doubles until there is room."""
    series = Series(2, width=10)
    for t in (0, 10, 10_000_000):
        series.add(t, t)
    assert [(bucket.t0, bucket.t1) for bucket in series.buckets()] == [(0, 10), (10_000_000, 10_000_000)]


def test_a_curve_for_a_terminal() -> None:
    """Fewer columns than buckets: each column has the extremes of what falls into it."""
    series = Series(1000, width=1)
    for t in range(600):
        series.add(t, t, 2 * t)
    columns = series.buckets(6)
    assert [(column.low, column.high) for column in columns] == [
        (100 * index, 2 * (100 * index + 99)) for index in range(6)
    ]
    assert len(series.buckets(600)) == 600
    with pytest.raises(ValueError, match="at least one"):
        series.buckets(0)


@given(st.lists(st.tuples(st.integers(0, 2**62), st.integers(0, 2**40)), min_size=1, max_size=50), st.integers(1, 60))
def test_a_picture_keeps_the_maximum(samples: list[tuple[int, int]], slices: int) -> None:
    """However long a run is and in whatever order its samples come, a picture has so many slices at most, and the
    largest value in one of them."""
    series = Series(16)
    for t, value in samples:
        series.add(t, value // 2, value, last=value // 2)
    levels = series.levels(slices)
    assert len(levels) <= slices
    assert max(levels) == max(value for _, value in samples)


def test_what_was_held_stays_in_a_picture() -> None:
    """Samples are written when they change: between two of them, and after the last, what was held last still is."""
    series = Series()
    series.add(0, 5, 9, last=5)
    series.add(40 * MS, 1, 7, last=1)
    assert series.levels(10, 90 * MS) == [9, 5, 5, 5, 7, 1, 1, 1, 1, 1]
    assert series.levels(2, 90 * MS) == [9, 1]
    assert series.levels(3, 90 * MS) == [9, 7, 1]
    assert series.levels(1) == [9]
    assert Series().levels(3) == []
    with pytest.raises(ValueError, match="at least one"):
        series.levels(0)


def test_what_was_held_last_survives_merging() -> None:
    """Of two buckets that become one, the later one's last value is what is held after it."""
    series = Series(2, width=10 * MS)
    for t, last in ((0, 3), (10 * MS, 1), (20 * MS, 2)):
        series.add(t, last, 8, last=last)
    assert series.levels(5, 40 * MS)[-1] == 2
    assert series.levels(3, 30 * MS)[0] == 8


@pytest.mark.parametrize(("buckets", "width"), [(1, 10), (4, 0)])
def test_a_series_of_nothing(buckets: int, width: int) -> None:
    """A series without room is refused."""
    with pytest.raises(ValueError, match="two buckets"):
        Series(buckets, width)


def test_an_empty_series() -> None:
    """Without samples there is no figure, and a mark has none."""
    series = Series()
    series.mark("a", "test", 0, 5)
    assert (series.low, series.high, series.buckets(), series.buckets(5)) == (None, None, [], [])
    assert list(series.marks()) == [Mark("a", "test", 0, 5, None, None)]


SAMPLES = st.lists(st.tuples(st.integers(1, 50), st.integers(0, 1000)), min_size=1, max_size=200)


@given(SAMPLES, st.integers(2, 9), st.lists(st.tuples(st.integers(0, 199), st.integers(0, 60)), max_size=8))
@settings(max_examples=200, deadline=None)
def test_every_extreme_stays(samples: list[tuple[int, int]], buckets: int, stretches: list[tuple[int, int]]) -> None:
    """However often buckets are merged, the curve has the extremes of all samples, in order and within its bound, and
    each mark exactly those of its own."""
    series = Series(buckets, width=10)
    t, times, sizes = 0, [], []
    going: dict[int, list[tuple[int, int]]] = {}
    for index, (step, size) in enumerate(samples):
        t += step
        for first, length in stretches:
            if first == index:
                going.setdefault(index + length, []).append((index, series.begin(f"{first}", "cell", t)))
        series.add(t, size)
        times.append(t)
        sizes.append(size)
        for first, number in going.pop(index, ()):
            series.end(number, t)
            mark = [mark for mark in series.marks("cell") if mark.t1 is not None][-1]
            assert (mark.name, mark.low, mark.high) == (f"{first}", min(sizes[first:]), max(sizes[first:]))
    found = series.buckets()
    assert len(found) <= buckets
    assert (series.low, series.high) == (min(sizes), max(sizes))
    assert [bucket.t0 for bucket in found] == sorted({bucket.t0 for bucket in found})
    for moment, size in zip(times, sizes, strict=True):
        assert any(bucket.t0 <= moment <= bucket.t1 and bucket.low <= size <= bucket.high for bucket in found)


# ---------------------------------------------------------------- marks


def test_a_mark_that_is_known_late() -> None:
    """Ends that are given stand; one that is not is an outer bound from the buckets that it touches."""
    series = Series(100, width=10)
    for t in range(10):
        series.add(10 * t, t, 100 + t)
    series.mark("known", "cell", 35, 52, low=4, high=999)
    series.mark("late", "cell", 35, 52)
    assert list(series.marks("cell")) == [Mark("known", "cell", 35, 52, 4, 999), Mark("late", "cell", 35, 52, 4, 105)]


def test_samples_from_before_are_not_a_marks() -> None:
    """A block of samples that began before a mark does not count for it; its end counts what is known from elsewhere."""
    series = Series()
    series.begin("outer", "test", 0)
    inner = series.begin("inner", "phase", 50)
    series.add(60, 1, 900, since=10)
    series.add(70, 20, 30, since=60)
    series.end(inner, 80, high=44)
    series.end(12345, 80)
    assert list(series.marks()) == [Mark("inner", "phase", 50, 80, 20, 44), Mark("outer", "test", 0, None, 1, 900)]


# ---------------------------------------------------------------- from a journal


def _journal(path: Path) -> Path:
    def peak(size: int) -> Reading:
        return Reading(bytes=size, source="nvml-process", scope="run", device="gpu0", exact=False)

    writer = Writer(path)
    lines: list[tuple[int, str, dict[str, Any]]] = [
        (1, "run", {"run": "r"}),
        (2, "device", {"label": "gpu0"}),
        (5, "phase", {"backend": "agent", "name": "ready", "before": {"name": "start", "start": 2, "end": 5,
                                                                      "peak": {"gpu0": peak(70)}}}),
        (10, "window", {"event": "open", "window": 1, "name": "t1", "what": "test", "parent": None}),
        (20, "sample", {"device": "gpu0", "t0": 11, "min": 5, "max": 60, "last": 6, "now": 6, "count": 9}),
        (30, "window", {"event": "open", "window": 2, "name": "r1", "what": "request", "parent": 1}),
        (35, "window", {"event": "close", "window": 2, "name": "r1", "what": "request",
                        "closed": {"run": {"gpu0": {"kind": "unmeasurable", "reason": "?"}}}}),
        (40, "window", {"event": "close", "window": 1, "name": "t1", "what": "test",
                        "closed": {"run": {"gpu0": peak(90)}, "peak_at": {"gpu0": {"since": 14, "at": 15}}}}),
        (50, "window", {"event": "open", "window": 3, "name": "t2", "what": "test", "parent": None}),
        (60, "window", {"event": "close", "window": 3, "name": "t2", "what": "test",
                        "closed": {"run": {"gpu0": peak(500)}, "boot": True,
                                   "peak_at": {"gpu0": {"since": 51, "at": 55}}}}),
    ]  # fmt: skip
    for t, kind, fields in lines:
        writer.write(t, kind, fields)
    writer.close()
    return path


def test_series_of_a_journal(tmp_path: Path) -> None:
    """Windows and boot phases are marks with their own peaks; the curve reaches a peak that no sample saw, but not
    that of a boot, which was before."""
    series = Series.of(Journal(_journal(tmp_path / "journal.jsonl")))["gpu0"]
    assert list(series.marks()) == [
        Mark("agent: start", "phase", 2, 5, None, 70),
        Mark("r1", "request", 30, 35, None, None),
        Mark("t1", "test", 10, 40, 5, 90),
        Mark("t2", "test", 50, 60, None, 500),
    ]
    assert series.high == 90


@pytest.mark.parametrize(
    "line",
    [
        {},
        {"kind": "sample", "t": 1},
        {"kind": "sample", "t": 1, "device": 5, "min": 1, "max": 2},
        {"kind": "sample", "t": 1, "device": "gpu0", "min": -1, "max": 2},
        {"kind": "sample", "t": 1, "device": "gpu0", "min": 1, "max": 1 << 70},
        {"kind": "sample", "t": True, "device": "gpu0", "min": 1, "max": 1},
        {"kind": "window", "t": 1, "event": "close", "window": 9, "closed": 7},
        {"kind": "window", "t": 1, "event": "open", "window": "x"},
        {"kind": "window", "t": 1, "event": "open", "window": 4, "name": 5, "what": "test"},
        {"kind": "phase", "t": 1, "before": {"name": "x", "start": 1, "end": 2, "peak": [1]}},
        {"kind": "phase", "t": 1, "before": {"name": "x", "start": 1, "end": 2, "peak": {"gpu0": {"bytes": "?"}}}},
    ],
)
def test_lines_that_it_cannot_use(line: dict[str, Any]) -> None:
    """What is not as it should be is passed over."""
    assert all(not len(series) for series in Series.of([line]).values())


# ---------------------------------------------------------------- a day


def test_a_day_stays_small() -> None:
    """A day of samples with thousands of tests, phases and cells stays under 50 MB, and every one keeps its maximum."""
    rng = random.Random(5)
    tests, blocks = 3_000, 10
    gc.collect()
    tracemalloc.start()
    try:
        series = Series()
        truth: list[int] = []
        step = DAY // (tests * blocks)
        for number in range(tests):
            t0 = number * blocks * step
            numbers = [series.begin(f"tests/test_{number // 50}.py::test[{number}]", "test", t0)]
            tops: list[int] = []
            for index in range(blocks):
                t = t0 + index * step
                if index in (2, 6):
                    numbers.append(
                        series.begin(f"{'phase' if index == 2 else 'cell'}-{number}", ("phase", "cell")[index == 6], t)
                    )
                low = rng.randrange(1 << 30)
                tops.append(low + rng.randrange(1 << 33))
                series.add(t, low, tops[-1], since=t)
                if index in (4, 8):
                    series.end(numbers.pop(), t)
            series.end(numbers.pop(), t0 + blocks * step)
            truth += [max(tops[2:5]), max(tops[6:9]), max(tops)]
        size, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert [mark.high for mark in series.marks()] == truth
    assert series.high == max(truth)
    assert len(series) <= 4096
    assert most < 50_000_000
    assert size < 10_000_000


class _Scanned(PaperMembers):
    def scan(self, *, look: bool = True) -> None:
        """No PID of one that ended is taken any more."""
        self._dead.clear()
        self._roots.clear()


def test_members_do_not_grow_with_time(tmp_path: Path) -> None:
    """Processes that came and went, of the run or not, leave nothing in any table of the real :class:`Members`."""
    machine = Machine(tmp_path)
    machine.add(1, 0)
    machine.add(100, 1)
    members = Members(excluded=(), reaper=None, marked=lambda stat: False, proc=str(tmp_path))
    members.adopt(100, PYTEST)

    def processes(first: int, count: int) -> list[int]:
        for pid in range(first, first + count):
            machine.add(pid, 100)
            machine.add(50_000 + pid, 1)
            members.scan()
            assert members.get(pid) is not None
            machine.remove(pid)
            machine.remove(50_000 + pid)
            members.scan()
            assert members.ended()
            members.clear_ended()
            members.joined.clear()
            members.left.clear()
        return [len(table) for table in vars(members).values() if isinstance(table, set | dict | list)]

    assert processes(1_000, 3) == processes(2_000, 60)


def test_the_keeper_does_not_grow_with_time(tmp_path: Path) -> None:
    """What the keeper itself holds (timeline, windows, processes, strangers, journal) is the same after a few
    tests as after many, each with processes and strangers of its own."""
    members, card, host = _Scanned(), PaperCard(accounting=True), PaperProbe()
    now = 0
    timeline = Timeline([card], host, members, interval=10 * MS, clock=lambda: now)
    writer = Writer(tmp_path / "journal.jsonl")
    members.join(1, "agent#1")
    card.set(1, 500 * MIB)
    host.set(1, 5 * MIB)

    def tests(first: int, count: int) -> None:
        nonlocal now
        for number in range(first, first + count):
            now += 10 * MS
            timeline.boundary(now)
            span = timeline.open(now, ("agent#1",), 1)
            pid, stranger = 10_000 + number, 1_000_000 + number
            members.join(pid)
            host.set(pid, MIB)
            card.set(pid, MIB)
            card.set(stranger, 70 * MIB)
            for tick in range(4):
                now += 10 * MS
                card.set(1, (500 + number % 7 + tick) * MIB)
                timeline.tick(now)
            card.end(stranger)
            card.end(pid)
            host.end(pid)
            now += 10 * MS
            timeline.boundary(now)
            timeline.close(span)
            assert ("gpu0", stranger) in span.strangers
            for scope in ("run", "backend", "device"):
                writer.write(now, "note", {"closed": timeline.peaks(span, scope)})
            members.joined.clear()
            members.left.clear()

    gc.collect()
    tracemalloc.start()
    try:
        for _ in range(4_200):
            # The rings of intervals are full after this.
            now += 10 * MS
            timeline.tick(now)
            timeline.last_tick = now
        tests(0, 100)
        gc.collect()
        before = tracemalloc.get_traced_memory()[0]
        tests(100, 400)
        gc.collect()
        after = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
        writer.close()
    # What grew with each test would be at least some hundred bytes each.
    assert after - before < 20_000
