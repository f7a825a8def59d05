"""From samples and marks to peaks.

The keeper reads every probe at each tick and at each boundary, folds what it read into every open span, and sets the
marks back at boundaries. Time between two resets of a device's marks is an *epoch* of it. The peak of several processes
together lies between

* the largest sum of a sample, or the largest single mark, whichever is more, and
* the largest sum, over the epochs, of the marks of the processes that lived in that epoch.

With one process both are the same figure. With several, an extra reset whenever the marks have become stale keeps
epochs short, so that the upper end follows the samples closely.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from statistics import median

import msgspec

from pytest_vram.measure.floors import Floors
from pytest_vram.measure.line import STALE, Line
from pytest_vram.measure.members import PYTEST, TEST, UNKNOWN, Member, Members
from pytest_vram.measure.probes import Probe, Snapshot
from pytest_vram.measure.spans import NONE_ON_IT, NOT_ON_IT, NOTHING_SEEN, Held, Peak, Rate, Span, Sums, named
from pytest_vram.readings import Measured, Reading, Unmeasurable

__all__ = ["STALE", "Held", "Peak", "Rate", "Span", "Sums", "Timeline"]

_KEPT_INTERVALS = 4096
#: Nanoseconds between two looks, at ticks, for processes that left the tree; at boundaries there is always one.
_LOOK = 100_000_000
#: The same where host memory is no judged device. It is read as often then: its marks miss nothing.
_SELDOM = 250_000_000
#: Nanoseconds, and wanted intervals, without a read from which on samples say nothing of that time.
_BLIND, _BLIND_INTERVALS = 500_000_000, 50

_NOT_APART = "the device does not say who holds its memory: what other tests held at the same time is in it"
_NESTED = "another run of this plugin goes on within this one and sets high-water marks back as well"


class Timeline:
    """All probes and all open spans of a run. One thread; the caller brings the time.

    :param probes: the devices that are judged. :param host: probe of host memory, read in any case (for
        ``max_host_memory``); where ``cpu`` is among the devices it is one of ``probes``, else it is read at boundaries
        and four times a second while there are backends.
    :param interval: wanted nanoseconds between two ticks, for counting gaps; 0: none is counted.
    :param clock: asked when a read is over; else it is taken to be over when it began.
    """

    def __init__(
        self,
        probes: Sequence[Probe],
        host: Probe,
        members: Members,
        *,
        interval: int = 0,
        clock: Callable[[], int] | None = None,
    ) -> None:
        self.members = members
        self._lines = [Line(probe) for probe in probes]
        hosts = [line for line in self._lines if line.probe is host]
        self._host = hosts[0] if hosts else Line(host)
        self._all = self._lines if hosts else [*self._lines, self._host]
        self._spans: set[Span] = set()
        self._intervals: deque[tuple[int, int]] = deque(maxlen=_KEPT_INTERVALS)
        self._interval = interval
        self._clock = clock
        self._looked = 0
        self._read_at = 0
        #: Whether new processes are looked for at every tick: where each has memory. Elsewhere they are when one comes
        #: onto the device that is not known, and at every look.
        self._by_birth = any(line.host for line in self._lines)
        self._every = _LOOK if self._by_birth else _SELDOM
        #: Members that ended at a read before: a source may keep their exact peak, and give it late.
        self._recent: list[Member] = []
        #: What the members were at the last read.
        self._pids: list[int] = []
        #: Called when a span is opened: from now on every sample counts.
        self.on_open: Callable[[], None] = lambda: None
        #: Called with a span, a label and a PID (0: none is listed) when it is first seen that a stranger has risen by
        #: more than 64 MiB above the span's opening. It may look at what the stranger does at this moment.
        self.on_growth: Callable[[Span, str, int], None] = lambda span, label, pid: None
        #: Called after each read, with the times at which it began and was over; before any mark is set back.
        self.on_read: Callable[[int, int], None] = lambda now, at: None
        self.ticks = 0
        self.gaps = 0
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
        last = self.last_tick
        if last is not None:
            interval = now - last
            self._intervals.append((now, interval))
            gap = self._interval > 0 and interval > 3 * self._interval
            self.gaps += gap
            for span in self._spans:
                since = interval if last >= span.t else now - span.t
                if since > span.longest_gap:
                    span.longest_gap = since
                span.gaps += gap
        else:
            for span in self._spans:
                span.longest_gap = max(span.longest_gap, now - span.t)
        # Without a span there is no hurry: how long it is to the next sample says nothing.
        self.last_tick = now if self._spans else None
        self.ticks += 1
        self._read(now, reset=False)

    def boundary(self, now: int) -> None:
        """Read, fold into every span, and set all marks back: what comes after is of a new epoch."""
        self._read(now, reset=True)

    def _read(self, now: int, *, reset: bool) -> None:
        members = self.members
        look = reset or now - self._looked >= self._every
        if look:
            self._looked = now
        if look or self._by_birth or members.has_young():
            members.scan(look=look)
            if reset and members.has_young():
                # A window must not close before a process that was forked a moment ago is counted.
                members.scan()
        pids = members.pids()
        lines = self._all if look and self._host_counts() else self._lines
        changed = [line for line in lines if line.read(now, pids)]
        if not look and any(line.newcomers for line in changed):
            # Somebody came onto a card: whether it is one of the run must be known with this read.
            members.scan()
            if (found := members.pids()) != pids:
                pids = found
                changed += [line for line in lines if line.read(now, pids) and line not in changed]
        for line in changed:
            if line.per_process:
                for pid in line.last.gone:
                    members.forget(pid)
        ended = members.ended()
        if ended or members.late or pids != self._pids:
            # Whose figures add up to what has changed, though no figure may have.
            changed = list(lines)
            for line in lines:
                line.sums = {}
            self._pids = pids
        at = self._clock() if self._clock is not None else now
        for span in self._spans:
            span.blind = max(span.blind, at - max(self._read_at, span.t))
            for line in changed:
                self._fold(span, line, at)
        self._read_at = at
        self.on_read(now, at)
        if reset or ended or members.late:
            for line in self._all:
                line.new_epoch()
            self._recent = list(ended)
            members.clear_ended()
            return
        for line in changed:
            if line.stale(self._everyone(line)):
                line.new_epoch()

    def _host_counts(self) -> bool:
        """Whether host memory that is no judged device says anything: of backends what they hold, and where no device
        tells its processes apart, who has ended."""
        return self.members.has_backends() or not any(line.per_process for line in self._lines)

    def _everyone(self, line: Line) -> list[int]:
        """PIDs of the run on this device."""
        members = self.members
        if not line.probe.counts_pytest:
            return members.run()
        return members.everyone()

    def _sums(self, line: Line, scope: str, owners: frozenset[str], pid: int | None = None) -> Sums:
        key = (scope if pid is None else f"{scope} {pid}", owners)
        found = line.sums.get(key)
        if found is None:
            found = line.sums[key] = self._sum(line, scope, owners, pid)
        return found

    def _sum(self, line: Line, scope: str, owners: frozenset[str], pid: int | None) -> Sums:
        if scope == "device":
            return line.whole()
        doubt = line.last.doubt
        doubts = (doubt,) if doubt is not None else ()
        if not line.per_process:
            if scope in ("run", "own"):
                return line.whole(rise=True)._replace(doubts=doubts)
            if scope == "backend" and owners:
                return self._of_whole_device(line, owners)._replace(doubts=doubts)
            return Sums(fault=f"{line.probe.info.name} does not say what one process holds")
        members = self.members
        if scope == "run":
            everyone = line.probe.counts_pytest
            ended = [member for member in members.ended() if everyone or member.owner != PYTEST]
            pids = self._everyone(line) + [
                member.pid for member in self._late(line) if everyone or member.owner != PYTEST
            ]
            return line.group(pids, ended)._replace(doubts=doubts + self._doubts(members.late, members.nested))
        if scope == "own":
            return self._sum_own(line, owners, pid, doubts)
        if scope == "backend":
            if not owners:
                return Sums()
            ended = [member for member in members.ended() if member.owner in owners]
            pids = members.group(owners) + [member.pid for member in self._late(line) if member.owner in owners]
            return line.group(pids, ended)._replace(doubts=doubts + self._unclaimed())
        return line.group([pid] if pid is not None else [])._replace(doubts=doubts)

    def _sum_own(self, line: Line, apart: frozenset[str], pid: int | None, doubts: tuple[str, ...]) -> Sums:
        """The run without these backends, and without pytest processes of other workers and what comes from them.

        What cannot be told to be of other tests counts: orphans that hide where they came from, and whatever the
        controller holds.
        """
        members, everyone = self.members, line.probe.counts_pytest
        roots = members.workers - {pid}

        def counts(member: Member) -> bool:
            if member.owner in (PYTEST, TEST):
                return member.root not in roots and (everyone or member.owner != PYTEST)
            return member.owner not in apart

        ended = [member for member in members.ended() if counts(member)]
        mine = [member.pid for member in [*members.all(), *ended, *self._late(line)] if counts(member)]
        late = [member for member in members.late if counts(member)]
        nested = members.nested.intersection(mine)
        return line.group(dict.fromkeys(mine), ended)._replace(doubts=doubts + self._doubts(late, nested))

    def apart(self, span: Span) -> frozenset[str]:
        """Backends that certainly belong to other tests: another window uses them, or nobody does."""
        if len(self.members.workers) < 2:
            return frozenset()
        mine = span.owners | span.boots
        return self._backends() - mine

    def is_own(self, span: Span, held: Held) -> bool:
        """Whether a share is in the span's own part of the run."""
        if held.owner in (PYTEST, TEST):
            return span.pid is None or held.root not in self.members.workers - {span.pid}
        return held.owner == UNKNOWN or len(self.members.workers) < 2 or held.owner in span.owners | span.boots

    def _is_apart(self, span: Span) -> bool:
        """Whether there may be anything that belongs to other tests than the span's."""
        return span.pid is not None and not self.members.workers <= {span.pid}

    def _late(self, line: Line) -> list[Member]:
        """Members that ended at a read before, and whose last figure came with this read."""
        if not self._recent or line.host:
            return []
        members, processes = self.members, line.last.processes
        ended = {member.pid for member in members.ended()}
        return [
            member
            for member in self._recent
            if member.pid in processes and member.pid not in ended and members.get(member.pid) is None
        ]

    def _doubts(self, late: Iterable[Member], nested: Collection[int]) -> tuple[str, ...]:
        """Why the run may hold, or have held, more than its processes show."""
        found = [
            f"{named(member)} had left the process tree and was found late: what it held before is not known"
            for member in late
        ]
        if nested:
            found.append(_NESTED)
        return tuple(found)

    def _unclaimed(self) -> tuple[str, ...]:
        """Processes of some backend, nobody knows of which."""
        found = [*self.members.of(UNKNOWN), *(member for member in self.members.ended() if member.owner == UNKNOWN)]
        return tuple(f"{named(member)} is of some backend, unknown which, and not counted here" for member in found)

    def _of_whole_device(self, line: Line, owners: frozenset[str]) -> Sums:
        """A device without figures by process: its whole figure is the backend's when no other backend runs."""
        others = {member.owner for member in self.members.all()} - owners - {PYTEST, TEST}
        if others:
            reason = (
                f"{line.probe.info.name} does not say who holds its memory, and {', '.join(sorted(others))} ran"
                " at the same time"
            )
            return Sums(fault=reason, whole=True)
        return line.whole(rise=True)

    # ------------------------------------------------------------ spans

    def open(self, now: int, owners: Iterable[str] = (), pid: int | None = None) -> Span:
        """Begin a span. The caller has just called :meth:`boundary`, or knows that nothing runs."""
        span = Span(now, self.ticks, owners, pid)
        for line in self._lines:
            last = line.last
            if last.others:
                span.others(line.label, last.others, (), opening=True)
            if line.unlisted is not None:
                span.hidden(line.label, line.unlisted)
            if line.read_at:
                self._fold_opening(span, line)
        self._spans.add(span)
        self._refresh()
        self.on_open()
        return span

    def _fold_opening(self, span: Span, line: Line) -> None:
        """What is held at the opening is held in the span, though it may be gone at the first read.

        No moment is set: a later read that is as large has one that is within the span.
        """
        label, sources = line.label, line.sources
        found = [
            (span.run, self._sums(line, "run", frozenset())),
            (span.device, self._sums(line, "device", frozenset())),
        ]
        if self._is_apart(span) and line.per_process:
            found.append((span.own, self._sums(line, "own", self.apart(span), span.pid)))
        if span.owners:
            found.append((span.backend, self._sums(line, "backend", span.owners)))
        if span.pid is not None and line.per_process:
            found.append((span.process, self._sums(line, "process", frozenset(), span.pid)))
        for table, sums in found:
            if sums.fault is None:
                _of(table, label).fold(_at_opening(sums), sources, 0, 0)
        counted = line.probe.counts_pytest
        for pid, figure in line.last.processes.items():
            member = self.members.get(pid)
            if member is not None and (counted or member.owner != PYTEST):
                span.hold(label, member, figure.held)

    @property
    def busy(self) -> bool:
        """Whether any span is open."""
        return bool(self._spans)

    def use(self, span: Span, owners: Iterable[str]) -> None:
        """Let a span use these backends from now on. Call :meth:`boundary` first."""
        span.owners = span.owners | frozenset(owners)
        for line in self._all:
            sums = self._sums(line, "backend", span.owners)
            if not line.read_at or sums.fault is not None:
                continue
            if line in self._lines:
                _of(span.backend, line.label).fold(_at_opening(sums), line.sources, 0, 0)
            if line is self._host:
                span.host.fold(_at_opening(sums), line.sources, 0, 0)
        self._refresh()

    def _refresh(self) -> None:
        """Let the next read be taken in by every span, whether or not it differs from the last."""
        for line in self._all:
            line.fresh = True

    def close(self, span: Span) -> None:
        """End a span; its peaks stay readable."""
        self._spans.discard(span)

    def _fold(self, span: Span, line: Line, at: int) -> None:
        """Take one read of one device into a span."""
        sources, since = line.sources, line.before
        if line is self._host and span.owners:
            span.host.fold(self._sums(line, "backend", span.owners), sources, since, at)
            if line not in self._lines:
                return
        elif line not in self._lines:
            return
        label, last = line.label, line.last
        if self._is_apart(span) and (line.per_process or label in span.own):
            if label not in span.own:
                # Until now nobody was there but the span's own.
                span.own[label] = _of(span.run, label).copy()
            span.own[label].fold(self._sums(line, "own", self.apart(span), span.pid), sources, since, at)
        _of(span.run, label).fold(self._sums(line, "run", frozenset()), sources, since, at)
        _of(span.device, label).fold(self._sums(line, "device", frozenset()), sources, since, at)
        if span.owners:
            _of(span.backend, label).fold(self._sums(line, "backend", span.owners), sources, since, at)
        if span.pid is not None and (line.per_process or label in span.process):
            _of(span.process, label).fold(self._sums(line, "process", frozenset(), span.pid), sources, since, at)
        if last.fault is not None:
            span.fault(line.probe, last.fault, lost=last.lost)
        if span.floors is not None:
            self._fold_floors(span, span.floors, line, at)
        self._fold_shares(span, line)
        if line.spill > span.spill.get(label, 0):
            span.spill[label] = line.spill
        if last.others or span.strangers:
            for pid in span.others(label, last.others, self._pids, opening=False):
                self.on_growth(span, label, pid)
        if line.unlisted is not None and span.hidden(label, line.unlisted):
            self.on_growth(span, label, 0)

    def _fold_floors(self, span: Span, floors: Floors, line: Line, at: int) -> None:
        sums, peak = self._sums(line, "run", frozenset()), span.run[line.label]
        mark = sums.top if sums.top > sums.held else None
        floors.fold(line.label, line.last, peak=peak.at == at, mark=mark, marks=line.marks)

    def _fold_shares(self, span: Span, line: Line) -> None:
        members, counted = self.members, line.probe.counts_pytest
        for pid in line.grown:
            member = members.get(pid)
            if member is not None and (counted or member.owner != PYTEST):
                span.hold(line.label, member, line.tops[pid])

    # ------------------------------------------------------------ results

    def rate(self, span: Span | None = None) -> Rate:
        """How well a span (or the whole run so far) was sampled; the median is over the latest intervals."""
        if span is not None and span.rate is not None and span.rate[:2] == (self.ticks, span.blind):
            return span.rate[2]
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
            gaps=span.gaps if span else self.gaps,
        )
        if span is not None:
            if self._interval and span.blind >= max(_BLIND, _BLIND_INTERVALS * self._interval):
                rate = rate._replace(blind_ms=round(span.blind / 1e6, 3))
            span.rate = (self.ticks, span.blind, rate)
        return rate

    def peaks(self, span: Span, scope: str) -> dict[str, Measured]:
        """Peaks of a span by device label, for ``run``, ``own``, ``backend``, ``process`` or ``device``.

        Where nobody but the span's own test was there, or the device does not say who was, ``own`` is the run's.
        """
        rate = self.rate(span)
        table: dict[str, Peak] = getattr(span, scope)
        found: dict[str, Measured] = {}
        for line in self._lines:
            label = line.label
            peak, whose = table.get(label), scope
            if peak is None and scope == "own":
                peak, whose = span.run.get(label), "run"
            if peak is None:
                if whose != "run":
                    continue
                peak = Peak()
            source = line.sources.device if scope == "device" else None
            nothing = NOTHING_SEEN
            if line.probe.counts_pytest:
                nothing = NOT_ON_IT if scope == "process" else NONE_ON_IT
            figure = peak.reading(line.probe, whose, rate, source=source, nothing=nothing)
            if scope == "own" and whose == "run" and self._is_apart(span) and isinstance(figure, Reading):
                figure = msgspec.structs.replace(figure, note="; ".join(filter(None, (figure.note, _NOT_APART))))
            found[label] = figure
        return found

    def spill(self, span: Span) -> dict[str, Measured]:
        """Memory of the run that was given on a device and lay in host memory, by label, where there was any.

        The figure is the largest sample; it is no part of, and no more than, what the run's peak says.
        """
        rate = self.rate(span)
        return {
            line.label: Reading(
                bytes=span.spill[line.label],
                source=line.sources.sampled,
                scope="run",
                device=line.label,
                exact=False,
                interval_ms=rate.interval_ms,
                samples=rate.samples,
            )
            for line in self._lines
            if line.label in span.spill
        }

    def host_peak(self, span: Span) -> Measured | None:
        """Peak host memory of the span's backends; ``None`` when it uses none."""
        return span.host.reading(self._host.probe, "backend", self.rate(span)) if span.owners else None

    def held(self, scope: str, owners: frozenset[str] = frozenset()) -> dict[str, Measured]:
        """What ``run`` or the backends ``owners`` held at the last read, in the terms of peaks (for a baseline)."""
        return self._current(scope, owners, "held")

    def held_own(self, span: Span) -> dict[str, Measured]:
        """What the run held at the last read without what certainly belongs to other tests than this span's."""
        if not self._is_apart(span):
            return self.held("run")
        return self._current("own", self.apart(span), "held", span.pid)

    def now(self, scope: str, owners: frozenset[str] = frozenset()) -> dict[str, Measured]:
        """What ``run`` or the backends ``owners`` hold for good at the last read (for idle memory)."""
        return self._current(scope, owners, "now")

    def own_now(self, pid: int, owners: Collection[str]) -> dict[str, Measured]:
        """What the run holds for good without what certainly belongs to other tests than one of this process."""
        apart: frozenset[str] = frozenset()
        if len(self.members.workers) > 1:
            apart = self._backends() - frozenset(owners)
        return self._current("own", apart, "now", pid)

    def rest_now(self, pid: int) -> dict[str, Measured]:
        """The same without any backend, on devices that say which process holds what."""
        backends = self._backends()
        return {
            line.label: self._currently(line, "own", backends, "now", pid) for line in self._lines if line.per_process
        }

    def _backends(self) -> frozenset[str]:
        return frozenset(member.owner for member in self.members.all()) - {PYTEST, TEST, UNKNOWN}

    def host_now(self, owners: frozenset[str]) -> Measured:
        """Host memory that the backends ``owners`` hold for good at the last read, whatever else is measured."""
        return self._currently(self._host, "backend", owners, "now")

    def _current(self, scope: str, owners: frozenset[str], which: str, pid: int | None = None) -> dict[str, Measured]:
        return {line.label: self._currently(line, scope, owners, which, pid) for line in self._lines}

    def _currently(
        self, line: Line, scope: str, owners: frozenset[str], which: str, pid: int | None = None
    ) -> Measured:
        label, sources = line.label, line.sources
        sums = self._sums(line, scope, owners, pid)
        if sums.fault is not None:
            return Unmeasurable(reason=sums.fault, scope=scope, device=label)
        return Reading(
            bytes=sums.now if which == "now" else sums.held,
            source=sources.now if which == "now" else sources.sampled,
            scope=scope,
            device=label,
            # What is no figure of these processes alone is doubtful as a present figure too.
            exact=not sums.doubts,
            note="; ".join([*([] if sums.alive else [_nobody(line)]), *sums.doubts]) or None,
        )

    def run_sums(self) -> list[tuple[str, Sums]]:
        """Label and sums of the whole run at the last read, for the journal."""
        return [(line.label, self._sums(line, "run", frozenset())) for line in self._lines]

    def close_probes(self) -> None:
        """Give up every probe."""
        for line in self._all:
            line.probe.close()


def _of(table: dict[str, Peak], label: str) -> Peak:
    found = table.get(label)
    if found is None:
        found = table[label] = Peak()
    return found


def _at_opening(sums: Sums) -> Sums:
    """A read that was just before: its marks and its troubles are of the time before."""
    return sums._replace(top=0, most=sums.held, ended=(), disturbed=False, doubts=())


def _nobody(line: Line) -> str:
    return "no process of this run is on it" if line.probe.counts_pytest else "no process of this run besides pytest"
