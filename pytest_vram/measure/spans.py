"""What one window saw while it was open: peaks of groups of processes, strangers, spill, and faults.

Each read of a device is summed once for each group of processes (:class:`Sums`) and folded into every open span. A
process has an exact mark, or an upper end that is true for longer than was asked, or neither:

* the lower end of a peak is the largest sum of one read, or the largest single mark, whichever is more;
* its upper end is the largest sum, over the epochs, of the marks or upper ends of the processes of that epoch.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from pytest_vram.measure.floors import Floors
from pytest_vram.measure.members import Member
from pytest_vram.measure.probes import HostProbe, Probe, Sources
from pytest_vram.readings import Measured, Reading, Unmeasurable

#: A stranger that rose by more than this is told at once to whoever asked to be told, in bytes.
GREW = 64 << 20
_MOST_DOUBTS = 3
_MOST_SHARES = 256
_MOST_STRANGERS = 256

NOTHING_SEEN = "no process of this run besides pytest (one that lived shorter than a sampling interval is not seen)"
NONE_ON_IT = "no process of this run was seen on it (one that used it for less than a sampling interval is not seen)"
NOT_ON_IT = "this process was not seen on it"
_DISTURBED = (
    "a high-water mark fell between two reads: a process executed another program, or another tool sets marks back"
)
_LARGEST_SAMPLE = "the peak is the largest sample"
_BOUNDED = "the peak is the largest sample, and at most what the driver kept of the processes' whole lives"
_BLIND = "for {:,.0f} ms nobody looked: the keeper was stopped or starved, or the driver hung"
_SWITCHED = "for a part of the time the figures were by process, and for the rest of the whole device"


class Rate(NamedTuple):
    """How a span was sampled, in milliseconds. ``gaps``: intervals of more than three times the wanted one.

    ``blind_ms``: the longest time between two reads, where it was so long that samples say nothing of it.
    """

    samples: int
    interval_ms: float | None
    longest_gap_ms: float | None
    gaps: int = 0
    blind_ms: float | None = None


class Sums(NamedTuple):
    """What a group of processes held at one read.

    :ivar held: sum at this moment. :ivar top: largest single mark. :ivar most: sum of marks and other upper ends of
        this epoch. :ivar now: sum of what they hold for good. :ivar alive: processes that run (and are on the device).
    :ivar exact: every one had a mark. :ivar bounded: every one had a mark or another upper end.
    :ivar ended: names of those that ended since the read before. :ivar disturbed: some mark fell without a reset.
    :ivar fault: why some figure is missing. :ivar doubts: other reasons why something may be missing in it.
    :ivar whole: it is a figure of the whole device, which does not say who holds what.
    :ivar suspect: what is missing was refused for what reads before this one said, so that those are in doubt as well.
    """

    held: int = 0
    top: int = 0
    most: int = 0
    now: int = 0
    alive: int = 0
    exact: bool = True
    bounded: bool = True
    ended: tuple[str, ...] = ()
    disturbed: bool = False
    fault: str | None = None
    doubts: tuple[str, ...] = ()
    whole: bool = False
    suspect: bool = False


class Peak:
    """The peak of one group of processes on one device over one span.

    :ivar since: the lower end was reached after this time … :ivar at: … and not later than this (monotonic ns; 0 and 0
        while nothing was held).
    """

    __slots__ = (
        "_bounded",
        "_disturbed",
        "_doubts",
        "_ended",
        "_exact",
        "_fault",
        "_high",
        "_kinds",
        "_low",
        "_seen",
        "_sources",
        "_suspect",
        "at",
        "since",
    )

    def __init__(self) -> None:
        self._low = 0
        self._high = 0
        self._seen = False
        self._exact = True
        self._bounded = True
        self._disturbed = False
        self._ended: list[str] = []
        self._doubts: list[str] = []
        self._fault: str | None = None
        self._suspect = False
        self._sources: Sources | None = None
        #: Kinds of figures that were folded: whole device (true), by process (false).
        self._kinds: set[bool] = set()
        self.since = 0
        self.at = 0

    def fold(self, sums: Sums, sources: Sources, since: int, at: int) -> None:
        """Take in one read, which began after ``since`` (when the read before began) and was over at ``at``."""
        if sums.fault is not None:
            self._fault = self._fault or sums.fault
            self._suspect = self._suspect or sums.suspect
        for doubt in sums.doubts:
            if len(self._doubts) < _MOST_DOUBTS and doubt not in self._doubts:
                self._doubts.append(doubt)
        if sums.fault is None and (self._sources is not sources or sums.whole not in self._kinds):
            self._kinds.add(sums.whole)
            if sums.whole or True not in self._kinds:
                self._sources = sources
        if not (sums.alive or sums.ended or sums.top):
            return
        self._seen = True
        low = max(sums.held, sums.top)
        if low > self._low or (low and low == self._low and not self.at):
            self._low, self.since, self.at = low, since, at
        self._high = max(self._high, self._low, sums.most)
        self._exact = self._exact and sums.exact
        self._bounded = self._bounded and sums.bounded
        self._disturbed = self._disturbed or sums.disturbed
        for name in sums.ended:
            if len(self._ended) < 3 and name not in self._ended:
                self._ended.append(name)

    def copy(self) -> Peak:
        """The same peak so far, which goes its own way from now on."""
        return copy.deepcopy(self)

    @property
    def fault(self) -> str | None:
        """Why there is no figure."""
        return self._fault

    def reading(
        self, probe: Probe, scope: str, rate: Rate, *, source: str | None = None, nothing: str = NOTHING_SEEN
    ) -> Measured:
        """The peak as a figure; ``nothing`` is what is said of one that is 0 because nobody was there."""
        if self._fault is not None:
            known = None if self._suspect else self._low or None
            return Unmeasurable(
                reason=self._fault,
                source=source or (self._sources or probe.sources).sampled,
                scope=scope,
                device=probe.info.label,
                at_least=known,
            )
        sources = self._sources or probe.sources
        notes = [probe.note] if probe.note else []
        if not self._seen:
            notes.insert(0, nothing)
        if self._ended:
            notes.append(f"contains a process that ended between two samples ({', '.join(self._ended)})")
        interval = self._high > self._low
        # An upper end that was reached is a mark, whatever it was asked as.
        marked = self._exact or (self._bounded and not interval)
        if not marked:
            reason = probe.unmarked() if isinstance(probe, HostProbe) else None
            notes.append(reason or (_BOUNDED if self._bounded else _LARGEST_SAMPLE))
        if self._disturbed:
            notes.append(_DISTURBED)
        if len(self._kinds) > 1:
            notes.append(_SWITCHED)
        notes += self._doubts
        exact = self._seen and marked and not (self._ended or self._disturbed or self._doubts) and len(self._kinds) < 2
        sampled = not exact or interval
        # Marks and other upper ends say what was held while nobody looked, but for those that came and went unseen.
        told = self._seen and self._bounded and not self._ended and len(self._kinds) < 2
        return Reading(
            bytes=self._low,
            at_most=self._high if interval else None,
            source=source or (sources.mark if marked else sources.sampled),
            scope=scope,
            device=probe.info.label,
            exact=exact,
            interval_ms=rate.interval_ms if sampled else None,
            samples=rate.samples if sampled else None,
            note="; ".join(notes) or None,
            missed=None if exact or told or rate.blind_ms is None else _BLIND.format(rate.blind_ms),
        )


def named(member: Member) -> str:
    """A process for people."""
    return f"{member.name}, PID {member.pid}"


class Held(NamedTuple):
    """The mark of one process within a span."""

    pid: int
    name: str
    owner: str
    device: str
    bytes: int
    root: int | None = None


class Seen:
    """What somebody else held on a device during a span, in bytes.

    :ivar opening: at the first read of the span; 0 for one that came later. :ivar most: largest read.
    :ivar held: at the last read; 0 when it has gone.
    """

    __slots__ = ("held", "most", "opening")

    def __init__(self, opening: int, held: int) -> None:
        self.opening = opening
        self.most = self.held = held

    @property
    def grew(self) -> int:
        """Most that it rose above what it held at the opening; never negative."""
        return max(0, self.most - self.opening)

    def __repr__(self) -> str:
        return f"Seen(opening={self.opening}, most={self.most}, held={self.held})"


class Span:
    """What one window sees while it is open. Every table is keyed by the device's label.

    :ivar t: when it was opened. :ivar owners: backends (``name#generation``) that it uses; may grow.
    :ivar pid: pytest process that it belongs to, for the scopes ``process`` and ``own``.
    :ivar boots: backends that start for it: their memory is not other tests', though it cannot use them yet.
    :ivar run: peaks of the whole run; ``backend``, ``process``, ``device`` likewise. ``run[label].since`` and ``.at``
        say when the lower end was reached. :ivar own: peaks of the run without what certainly belongs to other tests;
        of a device that is not in it, it is the run's. :ivar host: peak host memory of the backends.
    :ivar shares: (label, PID) → the most that one process of the run held; pytest's own too, where they count.
    :ivar strangers: (label, PID) → what a process that is not of this run held, as far as the device lists it.
    :ivar unlisted: label → what no listed process holds, where that can be told.
    :ivar floors: what processes that tests had left behind held all along; set by whoever wants to know.
    :ivar spill: label → most bytes of the run that were given on the device and lay in host memory; only above 0.
    :ivar faults: label → why the device could not be read at some time of the span (which leaves it without peaks).
    :ivar lost: one sentence for each device that went away for good ("GPU is lost"): no verdict, but an error.
    :ivar blind: longest time between the ends of two reads, in nanoseconds. :ivar longest_gap: the same between two
        samples. :ivar gaps: intervals of more than three times the wanted one.
    """

    def __init__(self, t: int, ticks: int, owners: Iterable[str] = (), pid: int | None = None) -> None:
        self.t = t
        self.ticks = ticks
        self.owners: frozenset[str] = frozenset(owners)
        self.pid = pid
        self.boots: frozenset[str] = frozenset()
        self.run: dict[str, Peak] = {}
        self.own: dict[str, Peak] = {}
        self.backend: dict[str, Peak] = {}
        self.process: dict[str, Peak] = {}
        self.device: dict[str, Peak] = {}
        self.host = Peak()
        self.shares: dict[tuple[str, int], Held] = {}
        self.strangers: dict[tuple[str, int], Seen] = {}
        self.unlisted: dict[str, Seen] = {}
        self.floors: Floors | None = None
        self.spill: dict[str, int] = {}
        self.faults: dict[str, str] = {}
        self.lost: list[str] = []
        self.longest_gap = 0
        self.gaps = 0
        self.blind = 0
        self.rate: tuple[int, int, Rate] | None = None

    def fault(self, probe: Probe, reason: str, *, lost: bool) -> None:
        """Take in that the device could not be read."""
        label = probe.info.label
        self.faults.setdefault(label, reason)
        sentence = f"{label} ({probe.info.name}) was lost: {reason}"
        if lost and sentence not in self.lost and len(self.lost) < _MOST_DOUBTS:
            self.lost.append(sentence)

    def hold(self, label: str, member: Member, size: int) -> None:
        """Take in what a process of the run held."""
        old = self.shares.get((label, member.pid))
        if size > 0 and (old is None or old.bytes < size):
            self.shares[(label, member.pid)] = Held(member.pid, member.name, member.owner, label, size, member.root)
            if len(self.shares) > _MOST_SHARES:
                kept = sorted(self.shares.items(), key=lambda item: -item[1].bytes)[: _MOST_SHARES // 2]
                self.shares = dict(kept)

    def others(self, label: str, others: Mapping[int, int], members: Collection[int], *, opening: bool) -> list[int]:
        """Take in what strangers hold; returns those that have now risen by more than :data:`GREW`.

        One that turns out to be of the run (``members``) is a stranger no more.
        """
        grown: list[int] = []
        for pid, size in others.items():
            seen = self.strangers.get((label, pid))
            if seen is None:
                seen = self.strangers[(label, pid)] = Seen(size if opening else 0, size)
                before = 0
            else:
                before = seen.grew
                seen.held = size
                seen.most = max(seen.most, size)
            if seen.grew > GREW >= before:
                grown.append(pid)
        for at, pid in [key for key in self.strangers if key[0] == label and key[1] not in others]:
            if pid in members:
                del self.strangers[(at, pid)]
            else:
                self.strangers[(at, pid)].held = 0
        if len(self.strangers) > _MOST_STRANGERS:
            self._forget_gone()
        return grown

    def _forget_gone(self) -> None:
        """Drop half of the strangers that have gone, those that grew least; one that is there would seem new."""
        gone = sorted((seen.grew, key) for key, seen in self.strangers.items() if not seen.held)
        for _, key in gone[: (len(gone) + 1) // 2]:
            del self.strangers[key]

    def hidden(self, label: str, size: int) -> bool:
        """Take in what no listed process holds; whether it has now risen by more than :data:`GREW`."""
        seen = self.unlisted.get(label)
        if seen is None:
            self.unlisted[label] = Seen(size, size)
            return False
        before = seen.grew
        seen.held = size
        seen.most = max(seen.most, size)
        return seen.grew > GREW >= before
