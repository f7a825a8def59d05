"""Which processes belong to the run, and to what part of it.

A process belongs to whatever its parent belonged to when it was first seen, and keeps that membership until it
ends, even when its parent dies first.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable

from pytest_vram.measure import procfs

#: Owner of pytest's own processes: measured for the scope ``process``, never part of the run's sum.
PYTEST = "pytest"
#: Owner of what tests start.
TEST = "test"

#: Told the orphan that the keeper inherited; answers its owner, or ``None``.
Adopter = Callable[[procfs.Stat], str | None]


class Member:
    """A process of the run. ``owner`` is :data:`PYTEST`, :data:`TEST` or a backend's ``name#generation``."""

    __slots__ = ("name", "owner", "parent", "pid", "start")

    def __init__(self, stat: procfs.Stat, owner: str) -> None:
        self.pid = stat.pid
        self.start = stat.start
        self.name = stat.name
        self.parent = stat.parent
        self.owner = owner


class Members:
    """The processes of the run, kept up to date by :meth:`scan`.

    Uses ``/proc/PID/task/*/children`` where the kernel has it, which costs by the size of the run; else a listing of
    ``/proc``, where only processes that were not there before are looked at.

    :param excluded: PIDs that are never members, whose children do not inherit anything (keeper, guard).
    :param reaper: PID that inherits orphans; ``adopter`` then says whose they are.
    :param undecided: says of a child of pytest that it may yet turn out to be pytest's own (an xdist worker that
        has not introduced itself); it is asked again at every scan.
    """

    def __init__(
        self,
        *,
        excluded: Iterable[int] = (),
        reaper: int | None = None,
        adopter: Adopter | None = None,
        undecided: Callable[[procfs.Stat], bool] | None = None,
        proc: str = "/proc",
    ) -> None:
        self.proc = proc
        self._excluded = set(excluded)
        self._reaper = reaper
        self._adopter = adopter
        self._undecided = undecided
        self._members: dict[int, Member] = {}
        self._ended: list[Member] = []
        self._strangers: set[int] = set()
        self._young: set[int] = set()
        self._groups: dict[frozenset[str], list[int]] | None = None
        self._by_children = procfs.children(reaper, proc) is not None if reaper else False
        self.joined: list[Member] = []
        self.left: list[Member] = []

    def __len__(self) -> int:
        return len(self._members)

    def exclude(self, pid: int) -> None:
        """Never count this process."""
        self._excluded.add(pid)
        self._remove(pid)

    def adopt(self, pid: int, owner: str) -> Member | None:
        """Make a process a root with this owner; ``None`` when there is no such process.

        A process that was counted as something else before (a worker before it said so) changes its owner; its
        children keep theirs.
        """
        stat = procfs.read_stat(pid, self.proc)
        if stat is None:
            return None
        old = self._members.get(pid)
        if old is not None and old.start == stat.start:
            old.owner = owner
            self._groups = None
            return old
        member = Member(stat, owner)
        self._add(member)
        # Its children may have been seen before, as somebody else's.
        self._strangers.clear()
        return member

    def forget(self, pid: int) -> None:
        """The process is gone, or is not to be counted any more."""
        member = self._members.get(pid)
        if member is not None:
            self._remove(pid)
            # A zombie keeps its PID for a while, and an attached server lives on: neither may join again.
            self._strangers.add(pid)
            self._ended.append(member)
            self.left.append(member)

    def release(self, owner: str) -> None:
        """Stop counting the processes of an owner, though they may live on (an attached server)."""
        for member in [member for member in self._members.values() if member.owner == owner]:
            self.forget(member.pid)

    def get(self, pid: int) -> Member | None:
        """The member with this PID."""
        return self._members.get(pid)

    def all(self) -> list[Member]:
        """Every member, pytest's own processes included."""
        return list(self._members.values())

    def of(self, owner: str) -> list[Member]:
        """Members of one owner."""
        return [member for member in self._members.values() if member.owner == owner]

    def ended(self) -> list[Member]:
        """Members that ended since :meth:`clear_ended`."""
        return self._ended

    def clear_ended(self) -> None:
        """Start a new list of ended members."""
        self._ended = []
        self._groups = None

    def run(self) -> list[int]:
        """PIDs of the run: everything but pytest's own; those that ended since :meth:`clear_ended` included."""
        return self._group(frozenset())

    def group(self, owners: frozenset[str]) -> list[int]:
        """PIDs of these owners, recently ended ones included; an empty set of owners has none."""
        return self._group(owners) if owners else []

    def has_run(self) -> bool:
        """Whether any process besides pytest's own is there."""
        return any(member.owner != PYTEST for member in self._members.values())

    def has_young(self) -> bool:
        """Whether a process was seen that has not joined yet, because it was forked a moment ago."""
        return bool(self._young)

    def _group(self, owners: frozenset[str]) -> list[int]:
        if self._groups is None:
            self._groups = {}
        found = self._groups.get(owners)
        if found is None:
            found = [
                member.pid
                for member in [*self._members.values(), *self._ended]
                if (member.owner in owners if owners else member.owner != PYTEST)
            ]
            self._groups[owners] = found
        return found

    def _add(self, member: Member) -> None:
        self._members[member.pid] = member
        self._groups = None
        self.joined.append(member)

    def _remove(self, pid: int) -> None:
        self._members.pop(pid, None)
        self._strangers.discard(pid)
        self._groups = None

    def scan(self) -> None:
        """Bring the list up to date: ended members are dropped, new descendants are added."""
        present = self._walk() if self._by_children else set(procfs.pids(self.proc))
        for pid in [pid for pid in self._members if pid not in present]:
            self.forget(pid)
        self._strangers &= present
        self._young &= present
        known = self._members.keys() | self._strangers | self._excluded
        fresh = {pid: stat for pid in present - known if (stat := procfs.read_stat(pid, self.proc)) is not None}
        if not fresh:
            return
        # A parent may be as new as its child: the recursion settles parents first.
        settle = functools.partial(self._settle, fresh, {})
        for pid in fresh:
            settle(pid)

    def _settle(self, fresh: dict[int, procfs.Stat], done: dict[int, str | None], pid: int) -> str | None:
        """Owner of a process, ``None`` for a stranger's; classifies those of ``fresh`` on the way."""
        member = self._members.get(pid)
        if member is not None:
            return TEST if member.owner == PYTEST else member.owner
        if pid in done:
            return done[pid]
        stat = fresh.get(pid)
        if stat is None:
            return None
        done[pid] = None
        if stat.state in "ZX":
            self._strangers.add(pid)
            return None
        if stat.parent == self._reaper:
            owner = self._adopter(stat) if self._adopter else None
        elif stat.parent in self._excluded:
            owner = None
        else:
            owner = self._settle(fresh, done, stat.parent)
        done[pid] = owner
        if owner is None:
            # Parents of young processes are strangers until they are settled themselves.
            if stat.parent not in self._young:
                self._strangers.add(pid)
        elif self._too_young(stat) or self._may_be_pytest(stat):
            self._young.add(pid)
            done[pid] = None
        else:
            self._young.discard(pid)
            self._add(Member(stat, owner))
        return done[pid]

    def _too_young(self, stat: procfs.Stat) -> bool:
        """Whether to wait one more scan: between fork and exec a process shows its parent's memory as its own."""
        if not stat.flags & procfs.FORKED_NOT_EXECUTED:
            return False
        return stat.pid not in self._young or procfs.shares_memory(stat.pid, stat.parent)

    def _may_be_pytest(self, stat: procfs.Stat) -> bool:
        parent = self._members.get(stat.parent)
        return parent is not None and parent.owner == PYTEST and self._undecided is not None and self._undecided(stat)

    def _walk(self) -> set[int]:
        """PIDs of the members and of all their descendants, by their ``children`` files.

        A PID that was used again at once is noticed when its memory is read: kept descriptors name one process.
        """
        present = {pid for pid in self._members if os.path.exists(f"{self.proc}/{pid}")}
        waiting = list(present)
        if self._reaper is not None:
            waiting.append(self._reaper)
        visited: set[int] = set()
        while waiting:
            pid = waiting.pop()
            if pid in visited:
                continue
            visited.add(pid)
            for child in procfs.children(pid, self.proc) or ():
                present.add(child)
                waiting.append(child)
        return present
