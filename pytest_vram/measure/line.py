"""One probe with its last read, summed for groups of processes, and its marks since they were set back."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from pytest_vram.measure.members import Member
from pytest_vram.measure.probes import Figure, Probe, Snapshot
from pytest_vram.measure.sanity import Checked, Judge, beyond, capacity_of
from pytest_vram.measure.spans import Sums, named

#: Marks that together exceed the present sum by this much are stale: bytes.
STALE = 1 << 20
_NO_FIGURE = "the device gives no figure"
#: Kinds of devices on which every process has memory.
_HOSTS = ("cpu", "unified")


class Line:
    """One probe with its epoch and its last read.

    :ivar read_at: when the last read began. :ivar before: when the read before that began.
    """

    def __init__(self, probe: Probe) -> None:
        self.probe = probe
        self.label = probe.info.label
        self.judge = Judge(probe.info)
        self.capacity = capacity_of(probe.info) if probe.info.oversubscribes else None
        #: Whether every process has memory on it, so that one that ended unseen had some.
        self.host = probe.info.kind in _HOSTS
        #: Whether the source keeps the peak of every process that ever was on it: one without any held nothing.
        self.accounted = probe.info.accounting is True
        #: Of this epoch, by PID: largest mark, largest upper end, largest figure of any kind.
        self.marks: dict[int, int] = {}
        self.uppers: dict[int, int] = {}
        self.tops: dict[int, int] = {}
        self.device_mark: int | None = None
        self.rise_mark: int | None = None
        self.last = Snapshot({}, None)
        self.device_fault: str | None = None
        self.suspect = False
        self.per_process = probe.per_process
        self.sources = probe.sources
        self.sums: dict[tuple[str, frozenset[str]], Sums] = {}
        #: Processes whose largest figure of this epoch came with the last read.
        self.grown: list[int] = []
        #: What nobody listed held at this read and at the one before.
        self.unlisted: int | None = None
        #: Whether strangers came with the last read.
        self.newcomers = False
        self.spill = 0
        self.read_at = self.before = 0
        #: Whether the next read must be taken in, though it may be equal to the one before.
        self.fresh = True

    def read(self, now: int, pids: Collection[int]) -> bool:
        """Read the device; whether anything differs from the last read, or the epoch is new."""
        if now != self.read_at:
            self.before, self.read_at = self.read_at, now
        probe = self.probe
        # Asked for in any case: whose figures they are decides what the others' are.
        checked = self.judge.check(probe.read(pids))
        snapshot = checked.snapshot
        if (
            not self.fresh
            and snapshot == self.last
            and checked.device_fault == self.device_fault
            and probe.per_process == self.per_process
            and probe.sources == self.sources
        ):
            if self.unlisted == snapshot.unlisted:
                return False
            self.unlisted = snapshot.unlisted
            return True
        self._take(checked)
        return True

    def _take(self, checked: Checked) -> None:
        snapshot = checked.snapshot
        self.newcomers = not snapshot.others.keys() <= self.last.others.keys()
        # A process list and a device's figure are not read at the same moment: what nobody holds at one read only is
        # somebody's.
        now, before = snapshot.unlisted, self.last.unlisted
        self.unlisted = now if now is None or before is None else min(now, before)
        self.last = snapshot
        self.device_fault, self.suspect = checked.device_fault, checked.suspect
        self.per_process, self.sources = self.probe.per_process, self.probe.sources
        self.sums = {}
        marks, uppers, tops = self.marks, self.uppers, self.tops
        # A window that is new takes in everything, not only what grew.
        self.grown = grown = list(snapshot.processes) if self.fresh else []
        for pid, figure in snapshot.processes.items():
            top = figure.held
            if figure.mark is not None:
                top = max(top, figure.mark)
                marks[pid] = max(marks.get(pid, 0), top)
            upper = top if figure.most is None else max(top, figure.most)
            if upper > uppers.get(pid, -1):
                uppers[pid] = upper
            if top > tops.get(pid, -1):
                tops[pid] = top
                if not self.fresh:
                    grown.append(pid)
        self.fresh = False
        self.device_mark = _mark(snapshot.device, self.device_mark)
        self.rise_mark = _mark(snapshot.rise, self.rise_mark)
        self.spill = sum(snapshot.spill.values())
        if self.capacity is not None:
            mine = snapshot.processes.values() if self.per_process else filter(None, [snapshot.rise])
            self.spill = max(self.spill, beyond(sum(figure.held for figure in mine), self.capacity))

    def new_epoch(self) -> None:
        """Set the marks back: what they say from now on is of a new epoch."""
        self.probe.reset()
        self.marks = {}
        self.uppers = {}
        self.tops = {}
        self.device_mark = self.rise_mark = None
        self.sums = {}
        self.fresh = True

    def stale(self, pids: Iterable[int]) -> bool:
        """Whether the marks of several processes together are far above what they hold now."""
        if len(self.marks) < 2:
            return False
        held = marks = count = 0
        processes = self.last.processes
        for pid in pids:
            figure, mark = processes.get(pid), self.marks.get(pid)
            if figure is not None:
                held += figure.held
                count += 1
            if mark is not None:
                marks += mark
            elif figure is not None:
                marks += figure.held
        return count > 1 and marks > held + STALE

    def group(self, pids: Iterable[int], ended: Iterable[Member] = ()) -> Sums:
        """What these processes hold; ``ended`` are those among them that have ended since the read before."""
        held = top = most = now = count = 0
        exact, bounded, disturbed = True, True, False
        last = self.last
        fault, processes = last.fault, last.processes
        for pid in pids:
            figure, mark = processes.get(pid), self.marks.get(pid)
            if mark is not None:
                top = max(top, mark)
            if figure is None:
                fault = fault or last.faults.get(pid)
                if mark is not None:
                    most += self.uppers[pid]
                continue
            held += figure.held
            now += figure.now
            if not self.host and not figure.held and not figure.mark:
                # It runs and is not on the device.
                exact = exact and (figure.mark is not None or self.accounted)
                bounded = bounded and (figure.mark is not None or figure.most is not None or self.accounted)
                most += self.uppers.get(pid, figure.most) if figure.most is not None else 0
                continue
            count += 1
            marked = figure.mark is not None
            # Without any upper end the figure of this read stands: largest reads of different moments do not add up.
            # Right after marks were set back, the read before is all there is.
            most += (
                self.uppers.get(pid, figure.held if figure.most is None else figure.most)
                if (mark is not None or figure.most is not None)
                else figure.held
            )
            exact = exact and marked
            bounded = bounded and (marked or figure.most is not None)
            disturbed = disturbed or figure.disturbed
        names = tuple(map(named, ended)) if self.host else ()
        return Sums(held, top, most, now, count, exact, bounded, names, disturbed, fault, suspect=self.suspect)

    def whole(self, *, rise: bool = False) -> Sums:
        """What the whole device holds, or by how much that rose."""
        figure = self.last.rise if rise else self.last.device
        if figure is None:
            return Sums(fault=self.last.fault or self.device_fault or _NO_FIGURE, whole=True)
        mark = self.rise_mark if rise else self.device_mark
        top = figure.held if mark is None else mark
        most = top if figure.most is None else max(top, figure.most)
        marked = figure.mark is not None
        return Sums(
            held=figure.held,
            top=top,
            most=most,
            now=figure.now,
            alive=1,
            exact=marked,
            # Its upper end is of this moment: what may have been in use before the run, and be of the run.
            bounded=marked,
            disturbed=figure.disturbed,
            whole=True,
        )


def _mark(figure: Figure | None, before: int | None) -> int | None:
    """The largest mark of the epoch, this read included."""
    if figure is None:
        return before
    top = figure.held if figure.mark is None else max(figure.mark, figure.held)
    return top if before is None else max(before, top)
