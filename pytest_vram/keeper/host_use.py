"""What the backends of a window do to the host besides its memory: pages read from disk, swap, their control group."""

from __future__ import annotations

import os
from typing import NamedTuple

from pytest_vram.keeper.messages import HostUse
from pytest_vram.measure import Member, Members, groups, procfs
from pytest_vram.readings import Measured, Reading, Unmeasurable

#: Nanoseconds between two looks at the processes while a window is open: what a process counted since the last one is
#: lost when it ends and nobody waits for it.
_LOOK = 500_000_000
_HOST = "host"


class _Process:
    """One process of a backend: its count of major faults, those of children that it waited for included.

    :ivar group: control group that it was in when it was first seen.
    """

    __slots__ = ("_stat", "faults", "group", "owner", "parent", "start", "swap")

    def __init__(self, member: Member, proc: str, group: str | None) -> None:
        self.owner = member.owner
        self.start = member.start
        self.parent = member.parent
        self.group = group
        try:
            # Kept, because this is read twice for every request.
            self._stat = os.open(f"{proc}/{member.pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._stat = -1
        self.faults = 0
        self.swap = 0

    def read(self) -> bool:
        """Read its count; whether that was possible."""
        if self._stat < 0:
            return False
        try:
            faults = procfs.parse_major_faults(os.pread(self._stat, 1024, 0))
        except OSError:
            return False
        if faults is not None:
            self.faults = max(self.faults, faults)
        return faults is not None

    def close(self) -> None:
        """Give up the descriptor."""
        if self._stat >= 0:
            os.close(self._stat)
            self._stat = -1


class Mark(NamedTuple):
    """Where a window began to count a backend.

    :ivar faults: major faults of the backend so far. :ivar swap: bytes of it in swap.
    """

    faults: int
    swap: int


class Counted:
    """What one window counts. ``marks``: backend → where its count began."""

    __slots__ = ("marks", "most_swap")

    def __init__(self) -> None:
        self.marks: dict[str, Mark] = {}
        self.most_swap = 0


class HostUses:
    """Counts of all backends. A count of a backend never falls: that of an ended process stays.

    :param me: a process in whose control group pytest is; ``None``: this one.
    """

    def __init__(
        self, members: Members, proc: str = "/proc", cgroup: str = "/sys/fs/cgroup", *, me: int | None = None
    ) -> None:
        self._members = members
        self._proc = proc
        self._cgroup = cgroup
        self._processes: dict[int, _Process] = {}
        self._ended: dict[str, int] = {}
        self._most: dict[str, int] = {}
        self._faults: dict[str, str] = {}
        self._looked = 0
        self._swaps = procfs.has_swap(proc)
        self._own = groups.memory_group(os.getpid() if me is None else me, proc, cgroup)
        self._open: set[Counted] = set()

    # ------------------------------------------------------------ looking

    def look(self, owners: frozenset[str]) -> None:
        """Read the processes of these backends now."""
        seen: set[int] = set()
        for member in self._members.all():
            if member.owner not in owners:
                continue
            seen.add(member.pid)
            found = self._processes.get(member.pid)
            if found is None or found.start != member.start:
                if found is not None:
                    self._end(found)
                group = groups.memory_group(member.pid, self._proc, self._cgroup)
                found = self._processes[member.pid] = _Process(member, self._proc, group)
            if not found.read() and os.path.exists(f"{self._proc}/{member.pid}"):
                self._faults[member.owner] = f"/proc/{member.pid}/stat cannot be read"
            memory = procfs.read_memory(member.pid, self._proc) if self._swaps else None
            if memory is not None:
                found.swap = memory.swap
        for pid in [pid for pid, one in self._processes.items() if one.owner in owners and pid not in seen]:
            self._end(self._processes.pop(pid))
        for counted in self._open:
            self._fold(counted)

    def _end(self, process: _Process) -> None:
        process.close()
        parent = self._processes.get(process.parent)
        if parent is not None and parent.owner == process.owner:
            return  # the count of who waits for it takes it in
        self._ended[process.owner] = self._ended.get(process.owner, 0) + process.faults

    def tick(self, now: int) -> None:
        """A look at everything that some window counts, at most twice a second."""
        if not self._open or now - self._looked < _LOOK:
            return
        self._looked = now
        self.look(frozenset(owner for counted in self._open for owner in counted.marks))

    def _now(self, owner: str) -> Mark:
        living = [one for one in self._processes.values() if one.owner == owner]
        # Between the end of a child and the moment when its parent waits for it, its count is nowhere.
        most = max(self._most.get(owner, 0), self._ended.get(owner, 0) + sum(one.faults for one in living))
        self._most[owner] = most
        return Mark(most, sum(one.swap for one in living))

    def _fold(self, counted: Counted) -> None:
        grown = sum(max(0, self._now(owner).swap - mark.swap) for owner, mark in counted.marks.items())
        counted.most_swap = max(counted.most_swap, grown)

    # ------------------------------------------------------------ windows

    def begin(self, owners: frozenset[str]) -> Counted:
        """A window begins, with these backends."""
        counted = Counted()
        self._open.add(counted)
        self.use(counted, owners)
        return counted

    def use(self, counted: Counted, owners: frozenset[str]) -> None:
        """A window uses more backends from now on."""
        new = owners - counted.marks.keys()
        if new:
            self.look(new)
            for owner in new:
                counted.marks[owner] = self._now(owner)

    def end(self, counted: Counted) -> None:
        """A window is over; :meth:`of` still tells of it."""
        self._open.discard(counted)
        used = {owner for other in self._open for owner in other.marks}
        for owner in counted.marks.keys() - used:
            if not self._members.of(owner):
                self._forget(owner)

    def _forget(self, owner: str) -> None:
        """A backend is gone, and nobody counts it any more."""
        for pid in [pid for pid, one in self._processes.items() if one.owner == owner]:
            self._processes.pop(pid).close()
        for table in (self._ended, self._most, self._faults):
            table.pop(owner, None)

    def of(self, counted: Counted) -> HostUse | None:
        """What the window's backends did since it began; ``None`` when it has none."""
        if not counted.marks:
            return None
        owners = frozenset(counted.marks)
        self.look(owners)
        self._fold(counted)
        fault = next((self._faults[owner] for owner in owners if owner in self._faults), None)
        if fault is not None:
            faults: Measured = Unmeasurable(reason=fault, source="host-faults", scope="backend", device=_HOST)
            count = None
        else:
            count = sum(self._now(owner).faults - mark.faults for owner, mark in counted.marks.items())
            faults = _reading(
                count * os.sysconf("SC_PAGESIZE"),
                "host-faults",
                note=f"{count:,} major faults, one page each; the kernel may have read neighbouring pages with them",
            )
        return HostUse(
            major_faults=faults,
            major_fault_count=count,
            swap_grew=_reading(
                counted.most_swap,
                "host-swap",
                exact=not self._swaps,
                note="the largest of some samples" if self._swaps else "there is no swap on this machine",
            ),
            group_peak=self._group_peak(owners),
        )

    # ------------------------------------------------------------ control groups

    def _group_peak(self, owners: frozenset[str]) -> Measured | None:
        """The peak of the control group of the backends; ``None`` where it is not theirs alone but also pytest's."""
        mine = {pid: one for pid, one in self._processes.items() if one.owner in owners}
        found = {one.group for one in mine.values()}
        if len(found) != 1:
            return None
        group = found.pop()
        if group is None or group == self._own:
            return None
        inside = groups.processes(group)
        name = group.removeprefix(self._cgroup)
        if inside is None or inside - mine.keys():
            count = "unknown" if inside is None else len(inside - mine.keys())
            reason = (
                f"control group {name} holds other processes as well ({count}), so that its peak is not the backend's"
            )
            return Unmeasurable(reason=reason, source="cgroup-peak", scope="backend", device=_HOST)
        peak = groups.peak(group)
        if peak is None:
            return None
        return _reading(peak, "cgroup-peak", note=f"of control group {name}, since it was made")


def _reading(size: int, source: str, *, exact: bool = True, note: str | None = None) -> Reading:
    return Reading(bytes=size, source=source, scope="backend", device=_HOST, exact=exact, note=note)
