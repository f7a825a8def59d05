"""A timeline of any length in bounded memory, which keeps every maximum.

Samples fall into buckets that keep the least and the most of what fell into them. When all buckets are taken, each pair
of neighbours becomes one and the width doubles: nothing is averaged away, so that the curve's extremes stay where they
were to one bucket. What must stay exact for itself (a test, a phase, a cell of a sweep) is a *mark* with its own least
and most, which no merging touches.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeGuard

#: Buckets of a series, unless told otherwise. More than any terminal or picture has columns.
BUCKETS = 4096
#: Nanoseconds that a bucket is wide at first: the default sampling interval.
WIDTH = 10_000_000
_WINDOWS = ("test", "phase", "request")


class Bucket(NamedTuple):
    """Least and most bytes that were seen from ``t0`` to ``t1`` (first and last time in it, ns)."""

    t0: int
    t1: int
    low: int
    high: int


class Mark(NamedTuple):
    """Least and most bytes of a stretch of time that has a name; ``None`` where nothing was sampled in it.

    :ivar kind: ``test``, ``phase``, ``request``, ``cell`` … :ivar t1: ``None`` while it goes on.
    """

    name: str
    kind: str
    t0: int
    t1: int | None
    low: int | None
    high: int | None


class _Going:
    """A mark that goes on."""

    __slots__ = ("high", "kind", "low", "name", "t0")

    def __init__(self, name: str, kind: str, t0: int) -> None:
        self.name = name
        self.kind = kind
        self.t0 = t0
        self.low: int | None = None
        self.high: int | None = None

    def take(self, low: int | None, high: int | None) -> None:
        if low is not None:
            self.low = low if self.low is None else min(self.low, low)
        if high is not None:
            self.high = high if self.high is None else max(self.high, high)


class Series:
    """Samples of one device over time.

    Memory: 40 bytes for each of ``buckets``, whatever the number of samples; 48 bytes and its name for each mark that
    is over; some hundred bytes for each that goes on.

    :param buckets: most buckets, at least 2. :param width: nanoseconds of a bucket at first; it doubles as needed.
    """

    def __init__(self, buckets: int = BUCKETS, width: int = WIDTH) -> None:
        if buckets < 2 or width < 1:
            raise ValueError(f"a series needs two buckets and some width, not {buckets} and {width}")
        self._most = buckets
        self._width = width
        self._origin = 0
        self._t0 = array("q")
        self._t1 = array("q")
        self._low = array("q")
        self._high = array("q")
        self._last = array("q")
        #: When the last bucket is over.
        self._until = 0
        self._names: list[str] = []
        self._kinds: list[str] = []
        #: Start, end, least and most of each mark that is over; -1: nothing was sampled.
        self._marks = array("q")
        self._going: dict[int, _Going] = {}
        self._next = 0
        self.samples = 0

    def __len__(self) -> int:
        return len(self._t0)

    @property
    def width(self) -> int:
        """Nanoseconds that a bucket is wide now."""
        return self._width

    # ------------------------------------------------------------ taking in

    def add(
        self, t: int, low: int, high: int | None = None, *, since: int | None = None, last: int | None = None
    ) -> None:
        """Take in a sample, or the least and the most of several that ended at ``t``.

        :param last: the last of several; the most where it is not told.
        :param since: when the first of several was. A mark that began later does not count them: what was extreme in
            them may have been before it.
        """
        top = low if high is None else high
        self.samples += 1
        self._put(t, low, top, top if last is None else last)
        if self._going:
            first = t if since is None else since
            for mark in self._going.values():
                if mark.t0 <= first:
                    mark.take(low, top)

    def _put(self, t: int, low: int, high: int, last: int) -> None:
        if t >= self._until and len(self._t0) >= self._most:
            self._halve()
        if not self._t0 or t >= self._until:
            if not self._t0:
                self._origin = t
            self._t0.append(t)
            self._t1.append(t)
            self._low.append(low)
            self._high.append(high)
            self._last.append(last)
            self._until = self._end(t)
            return
        at = len(self._t0) - 1
        if t < self._t0[at]:
            at = max(0, bisect_right(self._t0, t) - 1)
            self._t0[at] = min(self._t0[at], t)
        if t >= self._t1[at]:
            self._t1[at], self._last[at] = t, last
        if low < self._low[at]:
            self._low[at] = low
        if high > self._high[at]:
            self._high[at] = high

    def _end(self, t: int) -> int:
        return t - (t - self._origin) % self._width + self._width

    def _halve(self) -> None:
        """Double the width, as often as it takes until there is room: neighbours within one width become one."""
        while len(self._t0) >= self._most:
            self._width *= 2
            t0, t1, low, high, tail = array("q"), array("q"), array("q"), array("q"), array("q")
            until = self._origin
            rows = zip(self._t0, self._t1, self._low, self._high, self._last, strict=True)
            for start, end, least, most, last in rows:
                if t0 and start < until:
                    if end >= t1[-1]:
                        t1[-1], tail[-1] = end, last
                    low[-1] = min(low[-1], least)
                    high[-1] = max(high[-1], most)
                    continue
                t0.append(start)
                t1.append(end)
                low.append(least)
                high.append(most)
                tail.append(last)
                until = self._end(start)
            self._t0, self._t1, self._low, self._high, self._last, self._until = t0, t1, low, high, tail, until

    def begin(self, name: str, kind: str, t: int) -> int:
        """A mark begins; the number is for :meth:`end`."""
        self._next += 1
        self._going[self._next] = _Going(name, kind, t)
        return self._next

    def end(self, number: int, t: int, *, low: int | None = None, high: int | None = None) -> None:
        """A mark ends; one that is not known is let be.

        :param low: least that is known of it from elsewhere, such as a source with exact marks. :param high: most.
        """
        mark = self._going.pop(number, None)
        if mark is not None:
            mark.take(low, high)
            self._over(mark.name, mark.kind, mark.t0, t, mark.low, mark.high)

    def mark(self, name: str, kind: str, t0: int, t1: int, *, low: int | None = None, high: int | None = None) -> None:
        """A mark that becomes known when it is over, with its least and most.

        An end that is not given is taken from the buckets that it touches, which may reach beyond it: it is then an
        outer bound. :meth:`begin` and :meth:`end` are exact without it.
        """
        if low is None or high is None:
            touched = [bucket for bucket in self.buckets() if bucket.t1 >= t0 and bucket.t0 <= t1]
            if touched:
                low = min(bucket.low for bucket in touched) if low is None else low
                high = max(bucket.high for bucket in touched) if high is None else high
        self._over(name, kind, t0, t1, low, high)

    def _over(self, name: str, kind: str, t0: int, t1: int, low: int | None, high: int | None) -> None:
        self._names.append(name)
        self._kinds.append(kind)
        self._marks.extend((t0, t1, -1 if low is None else low, -1 if high is None else high))

    # ------------------------------------------------------------ giving out

    def buckets(self, most: int | None = None) -> list[Bucket]:
        """The curve, oldest first, in at most so many buckets of equal width; times without samples have none."""
        found = [Bucket(*row) for row in zip(self._t0, self._t1, self._low, self._high, strict=True)]
        if most is None or len(found) <= most:
            return found
        if most < 1:
            raise ValueError("a curve has at least one bucket")
        start = found[0].t0
        width = (found[-1].t1 - start) // most + 1
        merged: dict[int, Bucket] = {}
        for bucket in found:
            key = (bucket.t0 - start) // width
            old = merged.get(key)
            merged[key] = (
                bucket
                if old is None
                else Bucket(old.t0, max(old.t1, bucket.t1), min(old.low, bucket.low), max(old.high, bucket.high))
            )
        return list(merged.values())

    def levels(self, most: int, until: int | None = None) -> list[int]:
        """The largest value of at most so many equal slices of time, oldest first, for a picture.

        Samples are written when they change: where there is none, the last one before still holds.

        :param until: end of the last slice, where that is later than the last sample.
        """
        if most < 1:
            raise ValueError("a picture has at least one slice")
        if not self._t0:
            return []
        start = self._t0[0]
        end = max(self._t1[-1], start if until is None else until)
        count = min(most, (end - start) // WIDTH + 1)
        width = (end - start) // count + 1
        found = [0] * count
        held, place = 0, 0
        for t0, t1, high, last in zip(self._t0, self._t1, self._high, self._last, strict=True):
            first, final = (t0 - start) // width, max(0, t1 - start) // width
            for at in range(place, first + 1):
                found[at] = max(found[at], held)
            for at in range(first, final + 1):
                found[at] = max(found[at], high)
            held, place = last, final
        for at in range(place, count):
            found[at] = max(found[at], held)
        return found

    def marks(self, kind: str | None = None) -> Iterator[Mark]:
        """Every mark in the order in which they ended, and those that go on."""
        rows = self._marks
        for index, (name, what) in enumerate(zip(self._names, self._kinds, strict=True)):
            if kind is None or what == kind:
                t0, t1, low, high = rows[4 * index : 4 * index + 4]
                yield Mark(name, what, t0, t1, None if low < 0 else low, None if high < 0 else high)
        for going in self._going.values():
            if kind is None or going.kind == kind:
                yield Mark(going.name, going.kind, going.t0, None, going.low, going.high)

    @property
    def low(self) -> int | None:
        """Least of all samples."""
        return min(self._low, default=None)

    @property
    def high(self) -> int | None:
        """Most of all samples."""
        return max(self._high, default=None)

    # ------------------------------------------------------------ from a journal

    @classmethod
    def of(cls, journal: Iterable[Mapping[str, Any]], *, buckets: int = BUCKETS) -> dict[str, Series]:
        """Label of each device → its series, from the lines of a journal.

        The curve is what the run held by samples; where a window closed with a peak that no sample saw, it reaches that
        peak at the time that the window tells. Tests, phases and requests are marks whose most is their own peak.
        """
        reader = JournalSeries(buckets)
        for line in journal:
            reader.feed(line)
        return reader.series


class JournalSeries:
    """Builds the series of all devices from the lines of a journal, also while it is still being written.

    :ivar series: label of the device → its series.
    """

    def __init__(self, buckets: int = BUCKETS) -> None:
        self.series: dict[str, Series] = {}
        self._buckets = buckets
        #: Window → its name, kind and start, and its number in each series.
        self._open: dict[int, tuple[str, str, int, dict[str, int]]] = {}

    def _of(self, label: str) -> Series:
        found = self.series.get(label)
        if found is None:
            found = self.series[label] = Series(self._buckets)
            for name, kind, t, numbers in self._open.values():
                numbers[label] = found.begin(name, kind, t)
        return found

    def feed(self, line: Mapping[str, Any]) -> None:
        """Take in one line; what it cannot use, it passes over."""
        kind, t = line.get("kind"), line.get("t")
        if not _is_size(t):
            return
        if kind == "sample":
            label, low, high = line.get("device"), line.get("min"), line.get("max")
            if isinstance(label, str) and _is_size(low) and _is_size(high):
                since, last = line.get("t0"), line.get("last")
                self._of(label).add(
                    t, low, high, since=since if _is_size(since) else None, last=last if _is_size(last) else None
                )
        elif kind == "device":
            if isinstance(line.get("label"), str):
                self._of(line["label"])
        elif kind == "window":
            self._window(line, t)
        elif kind == "phase" and isinstance(line.get("before"), Mapping):
            self._boot_phase(line["before"], line.get("backend"))

    def _window(self, line: Mapping[str, Any], t: int) -> None:
        number, name, what = line.get("window"), line.get("name"), line.get("what")
        if not isinstance(number, int):
            return
        if line.get("event") == "open":
            if isinstance(name, str) and what in _WINDOWS:
                numbers = {label: series.begin(name, what, t) for label, series in self.series.items()}
                self._open[number] = (name, what, t, numbers)
            return
        opened = self._open.pop(number, None)
        if opened is None:
            return
        closed = line.get("closed")
        closed = closed if isinstance(closed, Mapping) else {}
        for label, mark in opened[3].items():
            high = _bytes(closed.get("run"), label)
            if high is not None:
                moment = closed.get("peak_at")
                moment = moment.get(label) if isinstance(moment, Mapping) else None
                at = moment.get("at") if isinstance(moment, Mapping) else None
                # A peak that a boot decided is not of this time.
                if _is_size(at) and opened[2] <= at <= t and not closed.get("boot"):
                    self.series[label].add(at, high, since=opened[2])
            self.series[label].end(mark, t, high=high)

    def _boot_phase(self, phase: Mapping[str, Any], backend: object) -> None:
        name, start, end = phase.get("name"), phase.get("start"), phase.get("end")
        if isinstance(name, str) and _is_size(start) and _is_size(end):
            peaks = phase.get("peak")
            for label in peaks if isinstance(peaks, Mapping) else ():
                high = _bytes(peaks, label)
                if high is not None and isinstance(label, str):
                    self._of(label).mark(f"{backend}: {name}", "phase", start, end, high=high)


def _bytes(table: object, label: object) -> int | None:
    """Bytes of the reading under this label; ``None`` where there is none that was measured."""
    found = table.get(label) if isinstance(table, Mapping) else None
    size = found.get("bytes") if isinstance(found, Mapping) else None
    return size if _is_size(size) else None


def _is_size(found: object) -> TypeGuard[int]:
    """Whether it is a number of bytes or nanoseconds that a journal of ours can hold."""
    return isinstance(found, int) and not isinstance(found, bool) and 0 <= found < 1 << 62
