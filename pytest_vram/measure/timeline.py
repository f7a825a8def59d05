"""From samples and marks to peaks.

The keeper reads every probe at each tick and at each boundary, folds what it read into every open span, and sets the
marks back at boundaries. Time between two resets is an *epoch*. The peak of several processes together lies between

* the largest sum of a sample, or the largest single mark, whichever is more, and
* the largest sum, over the epochs, of the marks of the processes that lived in that epoch.

With one process both are the same figure. With several, an extra reset whenever the marks have become stale keeps
epochs short, so that the upper end follows the samples closely.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from statistics import median
from typing import NamedTuple

from pytest_vram.measure.members import PYTEST, TEST, UNKNOWN, Member, Members
from pytest_vram.measure.probes import HostProbe, Probe, Snapshot
from pytest_vram.readings import Measured, Reading, Unmeasurable

#: Marks that together exceed the present sum by this much are stale: bytes.
STALE = 1 << 20
_KEPT_INTERVALS = 4096
_MOST_SHARES = 256
#: Nanoseconds between two looks, at ticks, for processes that left the tree; at boundaries there is always one.
_LOOK = 100_000_000
_MOST_DOUBTS = 3

NOTHING_SEEN = "no process of this run besides pytest (one that lived shorter than a sampling interval is not seen)"
_NESTED = "another run of this plugin goes on within this one and sets high-water marks back as well"
_DISTURBED = (
    "a high-water mark fell between two reads: a process executed another program, or another tool sets marks back"
)


class Rate(NamedTuple):
    """How a span was sampled, in milliseconds."""

    samples: int
    interval_ms: float | None
    longest_gap_ms: float | None


class Sums(NamedTuple):
    """What a group of processes held at one read.

    :ivar held: sum at this moment. :ivar top: largest single mark. :ivar marks: sum of the marks of this epoch.
    :ivar alive: processes that run. :ivar exact: every one had a mark. :ivar ended: names of those that ended
        since the read before. :ivar disturbed: some mark fell without a reset. :ivar fault: why some figure is
        missing. :ivar doubts: other reasons why something may be missing in it.
    """

    held: int
    top: int
    marks: int
    now: int
    alive: int
    exact: bool
    ended: tuple[str, ...] = ()
    disturbed: bool = False
    fault: str | None = None
    doubts: tuple[str, ...] = ()


class Peak:
    """The peak of one group of processes on one device over one span."""

    __slots__ = ("_disturbed", "_doubts", "_ended", "_exact", "_fault", "_high", "_low", "_seen")

    def __init__(self) -> None:
        self._low = 0
        self._high = 0
        self._seen = False
        self._exact = True
        self._disturbed = False
        self._ended: list[str] = []
        self._doubts: list[str] = []
        self._fault: str | None = None

    def fold(self, sums: Sums) -> None:
        """Take in one read."""
        if sums.fault is not None:
            self._fault = self._fault or sums.fault
        for doubt in sums.doubts:
            if len(self._doubts) < _MOST_DOUBTS and doubt not in self._doubts:
                self._doubts.append(doubt)
        if sums.alive or sums.ended:
            self._seen = True
            self._low = max(self._low, sums.held, sums.top)
            self._high = max(self._high, self._low, sums.marks)
            self._exact = self._exact and sums.exact
            self._disturbed = self._disturbed or sums.disturbed
            for name in sums.ended:
                if len(self._ended) < 3 and name not in self._ended:
                    self._ended.append(name)

    def reading(self, probe: Probe, scope: str, rate: Rate, *, source: str | None = None) -> Measured:
        """The peak as a figure."""
        if self._fault is not None:
            return Unmeasurable(reason=self._fault, scope=scope, device=probe.info.label)
        notes = [probe.note] if probe.note else []
        if not self._seen:
            notes.insert(0, NOTHING_SEEN)
        if self._ended:
            notes.append(f"contains a process that ended between two samples ({', '.join(self._ended)})")
        if not self._exact:
            reason = probe.unmarked() if isinstance(probe, HostProbe) else None
            notes.append(reason or "the peak is the largest sample")
        if self._disturbed:
            notes.append(_DISTURBED)
        notes += self._doubts
        exact = self._seen and self._exact and not (self._ended or self._disturbed or self._doubts)
        interval = self._high > self._low
        sampled = not exact or interval
        return Reading(
            bytes=self._low,
            at_most=self._high if interval else None,
            source=source or (probe.sources.mark if self._exact else probe.sources.sampled),
            scope=scope,
            device=probe.info.label,
            exact=exact,
            interval_ms=rate.interval_ms if sampled else None,
            samples=rate.samples if sampled else None,
            note="; ".join(notes) or None,
        )


def _named(member: Member) -> str:
    return f"{member.name}, PID {member.pid}"


class Held(NamedTuple):
    """The mark of one process within a span."""

    pid: int
    name: str
    owner: str
    device: str
    bytes: int


class Span:
    """What one window sees while it is open.

    :ivar owners: backends (``name#generation``) that it uses; may grow.
    :ivar pid: pytest process that it belongs to, for the scope ``process``.
    """

    def __init__(self, t: int, ticks: int, owners: Iterable[str] = (), pid: int | None = None) -> None:
        self.t = t
        self.ticks = ticks
        self.owners: frozenset[str] = frozenset(owners)
        self.pid = pid
        self.run: dict[str, Peak] = {}
        self.backend: dict[str, Peak] = {}
        self.process: dict[str, Peak] = {}
        self.device: dict[str, Peak] = {}
        self.host = Peak()
        self.shares: dict[tuple[str, int], Held] = {}
        self.longest_gap = 0
        self.rate: tuple[int, Rate] | None = None


class _Line:
    """One probe with its epoch and its last read."""

    def __init__(self, probe: Probe, counted: bool) -> None:
        self.probe = probe
        self.counted = counted
        self.marks: dict[int, int] = {}
        self.device_mark: int | None = None
        self.last = Snapshot({}, None)
        self.sums: dict[tuple[str, frozenset[str]], Sums] = {}

    def read(self, pids: Sequence[int]) -> None:
        self.last = snapshot = self.probe.read(pids if self.probe.per_process else ())
        self.sums = {}
        for pid, figure in snapshot.processes.items():
            mark = figure.held if figure.mark is None else max(figure.mark, figure.held)
            self.marks[pid] = max(self.marks.get(pid, 0), mark)
        if snapshot.device is not None:
            figure = snapshot.device
            mark = figure.held if figure.mark is None else max(figure.mark, figure.held)
            self.device_mark = max(self.device_mark or 0, mark)

    def new_epoch(self) -> None:
        self.marks = {}
        self.device_mark = None
        self.sums = {}

    def group(self, pids: Sequence[int], ended: Sequence[Member]) -> Sums:
        held = top = marks = now = count = 0
        exact, disturbed = True, False
        fault = self.last.fault
        processes = self.last.processes
        for pid in pids:
            mark = self.marks.get(pid)
            if mark is not None:
                marks += mark
                top = max(top, mark)
            figure = processes.get(pid)
            if figure is None:
                fault = fault or self.last.faults.get(pid)
                continue
            held += figure.held
            now += figure.now
            count += 1
            exact = exact and figure.mark is not None
            disturbed = disturbed or figure.disturbed
        names = tuple(map(_named, ended))
        return Sums(held, top, marks, now, count, exact, names, disturbed, fault)

    def whole(self, *, rise: bool = False) -> Sums:
        figure = self.last.rise if rise else self.last.device
        if figure is None:
            return Sums(0, 0, 0, 0, 0, False, fault=self.last.fault or "the device gives no figure")
        mark = self.device_mark if self.device_mark is not None else figure.held
        return Sums(figure.held, mark, mark, figure.now, 1, figure.mark is not None, (), figure.disturbed)


class Timeline:
    """All probes and all open spans of a run. One thread; the caller brings the time.

    :param probes: the devices that are judged. :param host: probe of host memory, read in any case (for
        ``max_host_memory``); where ``cpu`` is among the devices it is one of ``probes``.
    """

    def __init__(self, probes: Sequence[Probe], host: Probe, members: Members) -> None:
        self.members = members
        self._lines = [_Line(probe, True) for probe in probes]
        hosts = [line for line in self._lines if line.probe is host]
        self._host = hosts[0] if hosts else _Line(host, False)
        self._all = self._lines if hosts else [*self._lines, self._host]
        self._spans: set[Span] = set()
        self._intervals: deque[tuple[int, int]] = deque(maxlen=_KEPT_INTERVALS)
        self._looked = 0
        #: Called when a span is opened: from now on every sample counts.
        self.on_open: Callable[[], None] = lambda: None
        self.ticks = 0
        self.last_tick: int | None = None

    @property
    def probes(self) -> list[Probe]:
        """Probes of the judged devices."""
        return [line.probe for line in self._lines]

    def snapshots(self) -> list[tuple[Probe, Snapshot]]:
        """Each judged device with its last read."""
        return [(line.probe, line.last) for line in self._lines]

    # ------------------------------------------------------------ reading

    def tick(self, now: int) -> None:
        """One sample."""
        if self.last_tick is not None:
            self._intervals.append((now, now - self.last_tick))
        for span in self._spans:
            span.longest_gap = max(span.longest_gap, now - max(self.last_tick or 0, span.t))
        # Without a span there is no hurry: how long it is to the next sample says nothing.
        self.last_tick = now if self._spans else None
        self.ticks += 1
        self._read(now, reset=False)

    def boundary(self, now: int) -> None:
        """Read, fold into every span, and set all marks back: what comes after is of a new epoch."""
        self._read(now, reset=True)

    def _read(self, now: int, *, reset: bool) -> None:
        members = self.members
        look = reset or now - self._looked >= _LOOK
        if look:
            self._looked = now
        members.scan(look=look)
        if reset and members.has_young():
            # A window must not close before a process that was forked a moment ago is counted.
            members.scan()
        pids = [member.pid for member in members.all()]
        for line in self._all:
            line.read(pids)
            for pid in line.last.gone:
                members.forget(pid)
        ended = members.ended()
        for span in self._spans:
            self._fold(span)
        if reset or ended or members.late or self._stale():
            for line in self._all:
                line.probe.reset()
                line.new_epoch()
            members.clear_ended()

    def _stale(self) -> bool:
        sums = self._sums(self._host, "run", frozenset())
        return sums.alive > 1 and sums.marks > sums.held + STALE

    def _sums(self, line: _Line, scope: str, owners: frozenset[str], pid: int | None = None) -> Sums:
        key = (scope if pid is None else f"{scope} {pid}", owners)
        found = line.sums.get(key)
        if found is None:
            found = line.sums[key] = self._sum(line, scope, owners, pid)
        return found

    def _sum(self, line: _Line, scope: str, owners: frozenset[str], pid: int | None) -> Sums:
        if scope == "device" or (not line.probe.per_process and scope == "run"):
            return line.whole(rise=scope == "run")
        if not line.probe.per_process:
            if scope == "backend" and owners:
                return self._of_whole_device(line, owners)
            return Sums(0, 0, 0, 0, 0, True, fault=f"{line.probe.info.name} does not say what one process holds")
        ended = self.members.ended()
        if scope == "run":
            sums = line.group(self.members.run(), [member for member in ended if member.owner != PYTEST])
            return sums._replace(doubts=self._doubts())
        if scope == "backend":
            sums = line.group(self.members.group(owners), [member for member in ended if member.owner in owners])
            return sums._replace(doubts=self._unclaimed()) if owners else sums
        return line.group([pid] if pid is not None else [], [])

    def _doubts(self) -> tuple[str, ...]:
        """Why the run may hold, or have held, more than its processes show."""
        found = [
            f"{_named(member)} had left the process tree and was found late: what it held before is not known"
            for member in self.members.late
        ]
        if self.members.nested:
            found.append(_NESTED)
        return tuple(found)

    def _unclaimed(self) -> tuple[str, ...]:
        """Processes of some backend, nobody knows of which."""
        found = [*self.members.of(UNKNOWN), *(member for member in self.members.ended() if member.owner == UNKNOWN)]
        return tuple(f"{_named(member)} is of some backend, unknown which, and not counted here" for member in found)

    def _of_whole_device(self, line: _Line, owners: frozenset[str]) -> Sums:
        """A device without figures by process: its whole figure is the backend's when no other backend runs."""
        others = {member.owner for member in self.members.all()} - owners - {PYTEST, TEST}
        if others:
            reason = (
                f"{line.probe.info.name} does not say who holds its memory, and {', '.join(sorted(others))} ran"
                " at the same time"
            )
            return Sums(0, 0, 0, 0, 0, True, fault=reason)
        return line.whole(rise=True)

    # ------------------------------------------------------------ spans

    def open(self, now: int, owners: Iterable[str] = (), pid: int | None = None) -> Span:
        """Begin a span. The caller has just called :meth:`boundary`, or knows that nothing runs."""
        span = Span(now, self.ticks, owners, pid)
        self._spans.add(span)
        self.on_open()
        return span

    @property
    def busy(self) -> bool:
        """Whether any span is open."""
        return bool(self._spans)

    def use(self, span: Span, owners: Iterable[str]) -> None:
        """Let a span use these backends from now on. Call :meth:`boundary` first."""
        span.owners = span.owners | frozenset(owners)

    def close(self, span: Span) -> None:
        """End a span; its peaks stay readable."""
        self._spans.discard(span)

    def _fold(self, span: Span) -> None:
        for line in self._lines:
            label = line.probe.info.label
            span.run.setdefault(label, Peak()).fold(self._sums(line, "run", frozenset()))
            span.device.setdefault(label, Peak()).fold(self._sums(line, "device", frozenset()))
            if span.owners:
                span.backend.setdefault(label, Peak()).fold(self._sums(line, "backend", span.owners))
            if span.pid is not None and line.probe.per_process:
                span.process.setdefault(label, Peak()).fold(self._sums(line, "process", frozenset(), span.pid))
            self._fold_shares(span, line, label)
        if span.owners:
            span.host.fold(self._sums(self._host, "backend", span.owners))

    def _fold_shares(self, span: Span, line: _Line, label: str) -> None:
        shares = span.shares
        for pid, mark in line.marks.items():
            old = shares.get((label, pid))
            if old is not None and old.bytes >= mark:
                continue
            member = self.members.get(pid)
            if member is not None and member.owner != PYTEST:
                shares[(label, pid)] = Held(pid, member.name, member.owner, label, mark)
        if len(shares) > _MOST_SHARES:
            kept = sorted(shares.items(), key=lambda item: -item[1].bytes)[: _MOST_SHARES // 2]
            span.shares = dict(kept)

    # ------------------------------------------------------------ results

    def rate(self, span: Span | None = None) -> Rate:
        """How well a span (or the whole run so far) was sampled; the median is over the latest intervals."""
        if span is not None and span.rate is not None and span.rate[0] == self.ticks:
            return span.rate[1]
        since = span.t if span else 0
        intervals: list[int] = []
        for t, interval in reversed(self._intervals):
            if t - interval < since:
                break
            intervals.append(interval)
        gap = span.longest_gap if span else max((interval for _, interval in self._intervals), default=0)
        rate = Rate(
            samples=self.ticks - (span.ticks if span else 0),
            interval_ms=round(median(intervals) / 1e6, 3) if intervals else None,
            longest_gap_ms=round(gap / 1e6, 3) if gap else None,
        )
        if span is not None:
            span.rate = (self.ticks, rate)
        return rate

    def peaks(self, span: Span, scope: str) -> dict[str, Measured]:
        """Peaks of a span by device label, for ``run``, ``backend``, ``process`` or ``device``."""
        rate = self.rate(span)
        table: dict[str, Peak] = getattr(span, scope)
        found: dict[str, Measured] = {}
        for line in self._lines:
            label = line.probe.info.label
            peak = table.get(label)
            if peak is None:
                if scope == "run":
                    peak = Peak()
                else:
                    continue
            source = line.probe.sources.device if scope == "device" else None
            found[label] = peak.reading(line.probe, scope, rate, source=source)
        return found

    def host_peak(self, span: Span) -> Measured | None:
        """Peak host memory of the span's backends; ``None`` when it uses none."""
        return span.host.reading(self._host.probe, "backend", self.rate(span)) if span.owners else None

    def held(self, scope: str, owners: frozenset[str] = frozenset()) -> dict[str, Measured]:
        """What ``run`` or the backends ``owners`` held at the last read, in the terms of peaks (for a baseline)."""
        return self._current(scope, owners, "held")

    def now(self, scope: str, owners: frozenset[str] = frozenset()) -> dict[str, Measured]:
        """What ``run`` or the backends ``owners`` hold for good at the last read (for idle memory)."""
        return self._current(scope, owners, "now")

    def _current(self, scope: str, owners: frozenset[str], which: str) -> dict[str, Measured]:
        found: dict[str, Measured] = {}
        for line in self._lines:
            label, sources = line.probe.info.label, line.probe.sources
            sums = self._sums(line, scope, owners)
            if sums.fault is not None:
                found[label] = Unmeasurable(reason=sums.fault, scope=scope, device=label)
                continue
            found[label] = Reading(
                bytes=sums.now if which == "now" else sums.held,
                source=sources.now if which == "now" else sources.sampled,
                scope=scope,
                device=label,
                exact=True,
                note=None if sums.alive else "no process of this run besides pytest",
            )
        return found

    def run_sums(self) -> list[tuple[str, Sums]]:
        """Label and sums of the whole run at the last read, for the journal."""
        return [(line.probe.info.label, self._sums(line, "run", frozenset())) for line in self._lines]

    def close_probes(self) -> None:
        """Give up every probe."""
        for line in self._all:
            line.probe.close()
