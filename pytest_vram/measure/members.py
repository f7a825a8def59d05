"""Which processes belong to the run, and to what part of it.

A process belongs to whatever its parent belonged to when it was first seen, and keeps that membership until it
ends, even when its parent dies first. A process whose parent was gone before it was seen is known by where it came to:
orphans of servers come to the keeper; orphans of tests go to PID 1 and are told by a marker in their environment, or
by being forks of a process of the run.
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
#: Owner of an orphan of some server, when it cannot be told of which: part of the run's sum.
UNKNOWN = "unknown"

#: Told the orphan that the keeper inherited; answers its owner, or ``None``.
Adopter = Callable[[procfs.Stat], str | None]

#: In place of an owner: cannot be told at this scan.
_LATER = ""
_MOST_IMAGES = 4096
#: Seconds by which a process may seem older than it is (the kernel's clock tick, twice).
_TICKS = 0.02
#: Seconds from one walk through the tree to the next while the kernel counts no birth: it is seen whether that is true.
_TRUST = 0.25
#: Seconds after its birth in which a process without readable places is looked at again.
_EXECUTING = 1.0


class Member:
    """A process of the run. ``owner`` is :data:`PYTEST`, :data:`TEST`, :data:`UNKNOWN` or a backend's
    ``name#generation``.

    :ivar nested: it belongs to another run within this one, whose keeper sets marks back as well.
    :ivar root: PID of the pytest process that it is or came from, also when that has ended; ``None`` where that cannot
        be told, and for backends, which come from the keeper.
    """

    __slots__ = ("name", "nested", "owner", "parent", "pid", "root", "start")

    def __init__(self, stat: procfs.Stat, owner: str, *, nested: bool = False, root: int | None = None) -> None:
        self.pid = stat.pid
        self.start = stat.start
        self.name = stat.name
        self.parent = stat.parent
        self.owner = owner
        self.nested = nested
        self.root = stat.pid if owner == PYTEST else root

    @property
    def passes_on(self) -> int | None:
        """The root of its children."""
        return self.pid if self.owner == PYTEST else self.root


class Members:
    """The processes of the run, kept up to date by :meth:`scan`.

    Uses ``/proc/PID/task/*/children`` where the kernel has it, which costs by the size of the run; else a listing of
    ``/proc``, where only processes that were not there before are looked at.

    :param excluded: PIDs that are never members, whose children do not inherit anything (keeper, guard).
    :param reaper: PID that inherits orphans; ``adopter`` then says whose they are.
    :param undecided: says of a child of pytest that it may yet turn out to be pytest's own (an xdist worker that
        has not introduced itself); it is asked again at every scan.
    :param marked: says of a process outside the tree that it carries the marker of this run; without it nothing
        outside the tree is looked for.
    :param nested: says of a process of a test that it belongs to a run of its own.
    """

    def __init__(
        self,
        *,
        excluded: Iterable[int] = (),
        reaper: int | None = None,
        adopter: Adopter | None = None,
        undecided: Callable[[procfs.Stat], bool] | None = None,
        marked: Callable[[procfs.Stat], bool] | None = None,
        nested: Callable[[procfs.Stat], bool] | None = None,
        proc: str = "/proc",
    ) -> None:
        self.proc = proc
        self._excluded = set(excluded)
        self._reaper = reaper
        self._adopter = adopter
        self._undecided = undecided
        self._marked = marked
        self._is_nested = nested
        self._members: dict[int, Member] = {}
        self._ended: list[Member] = []
        self._strangers: set[int] = set()
        #: Ended processes whose PID is still taken, with their owners.
        self._dead: dict[int, str | None] = {}
        #: Seen before they executed a program, with their owners.
        self._young: dict[int, str] = {}
        #: The roots of what comes from processes of the two tables above.
        self._roots: dict[int, int | None] = {}
        self._waiting: set[int] = set()
        self._images: dict[tuple[bytes, ...], tuple[str, int | None]] = {}
        self._use_images = procfs.randomised(proc)
        self._groups: dict[frozenset[str], list[int]] | None = None
        self._by_children = procfs.children(reaper, proc) is not None if reaper else False
        self._births = procfs.Births(proc)
        self._count: bytes | None = None
        self._looked_count: bytes | None = None
        self._looked = procfs.boot_clock()
        self._walked = 0.0
        self._oldest: int | None = None
        self.nested: set[int] = set()
        #: Pytest processes that run tests for a controller (xdist workers), also those that have ended.
        self.workers: set[int] = set()
        self.joined: list[Member] = []
        self.left: list[Member] = []
        #: Members that had lived for a while before they were found, since :meth:`clear_ended`.
        self.late: list[Member] = []

    def __len__(self) -> int:
        return len(self._members)

    def exclude(self, pid: int) -> None:
        """Never count this process."""
        self._excluded.add(pid)
        self._remove(pid)

    def adopt(self, pid: int, owner: str, *, history: bool = True) -> Member | None:
        """Make a process a root with this owner; ``None`` when there is no such process.

        A process that was counted as something else before (a worker before it said so) changes its owner; its
        children keep theirs.

        :param history: whether what it held before now is the run's; else its high-water mark is set back.
        """
        stat = procfs.read_stat(pid, self.proc)
        if stat is None:
            return None
        old = self._members.get(pid)
        if old is not None and old.start == stat.start:
            old.owner = owner
            self._remember(stat, old)
            self._groups = None
            self._take_root(old)
            return old
        member = Member(stat, owner)
        if not history:
            procfs.reset_mark(pid, self.proc)
        if owner == PYTEST:
            self._oldest = stat.start if self._oldest is None else min(self._oldest, stat.start)
        self._add(member, stat)
        self._take_root(member)
        # Its children may have been seen before, as somebody else's.
        self._strangers.clear()
        self._count = self._looked_count = None
        return member

    def forget(self, pid: int) -> None:
        """The process is gone."""
        member = self._members.get(pid)
        if member is not None:
            self._remove(pid)
            # A zombie keeps its PID for a while and may not join again. Its children are its owner's.
            self._dead[pid] = _inherited(member.owner)
            self._roots[pid] = member.passes_on
            self._leave(member)

    def release(self, owner: str) -> None:
        """Stop counting the processes of an owner, though they may live on (an attached server)."""
        for member in self.of(owner):
            self._remove(member.pid)
            self._strangers.add(member.pid)
            self._leave(member)

    def _take_root(self, member: Member) -> None:
        """Let a process that says that it is pytest be the root of what it started before it said so."""
        if member.owner != PYTEST:
            return
        member.root = member.pid
        below = {member.pid}
        # Parents join before their children.
        for one in self._members.values():
            if one.parent in below and one.owner == TEST:
                one.root = member.pid
                below.add(one.pid)

    def _leave(self, member: Member) -> None:
        self._ended.append(member)
        self.left.append(member)

    def get(self, pid: int) -> Member | None:
        """The member with this PID."""
        return self._members.get(pid)

    def all(self) -> list[Member]:
        """Every member, pytest's own processes included."""
        return list(self._members.values())

    def pids(self) -> list[int]:
        """PID of every member, pytest's own processes included."""
        return list(self._members)

    def of(self, owner: str) -> list[Member]:
        """Members of one owner."""
        return [member for member in self._members.values() if member.owner == owner]

    def ended(self) -> list[Member]:
        """Members that ended since :meth:`clear_ended`."""
        return self._ended

    def clear_ended(self) -> None:
        """Start new lists of ended and of late members."""
        self.nested.difference_update(member.pid for member in self._ended)
        self._ended = []
        self.late = []
        self._groups = None

    def run(self) -> list[int]:
        """PIDs of the run: everything but pytest's own; those that ended since :meth:`clear_ended` included."""
        return self._group(frozenset())

    def everyone(self) -> list[int]:
        """PIDs of the run and of pytest's own processes, recently ended ones included."""
        return [member.pid for member in [*self._members.values(), *self._ended]]

    def group(self, owners: frozenset[str]) -> list[int]:
        """PIDs of these owners, recently ended ones included; an empty set of owners has none."""
        return self._group(owners) if owners else []

    def has_backends(self) -> bool:
        """Whether there is a process of a backend, or one that ended since :meth:`clear_ended`."""
        return any(member.owner not in (PYTEST, TEST) for member in [*self._members.values(), *self._ended])

    def has_young(self) -> bool:
        """Whether a process was seen that has not joined yet: it was forked, or lost its parent, a moment ago."""
        return bool(self._young or self._waiting)

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

    def _add(self, member: Member, stat: procfs.Stat | None = None) -> None:
        self._members[member.pid] = member
        self._young.pop(member.pid, None)
        self._roots.pop(member.pid, None)
        self._groups = None
        self.joined.append(member)
        if member.nested:
            self.nested.add(member.pid)
        if stat is not None:
            self._remember(stat, member)

    def _remember(self, stat: procfs.Stat, member: Member) -> None:
        """Keep the image of a member, also after its end: its forks are told by it."""
        if stat.image and self._use_images:
            # A fork of a process that has the same image belongs to what its parent belongs to.
            self._images[stat.image] = (_inherited(member.owner), member.passes_on)
            while len(self._images) > _MOST_IMAGES:
                del self._images[next(iter(self._images))]

    def _remove(self, pid: int) -> None:
        self._members.pop(pid, None)
        self._strangers.discard(pid)
        self._groups = None

    def scan(self, *, look: bool = True) -> None:
        """Bring the list up to date: ended members are dropped, new descendants and strays are added.

        :param look: whether to look beyond the tree, and four times a second in any case. Where the kernel counts
            births, and there was none, nothing else is done: ends are noticed when memory is read.
        """
        count, now = self._births.count(), procfs.boot_clock()
        still = count is not None and count == self._count and not self.has_young()
        beyond = self._marked is not None or not self._by_children
        if still and (not look or (now - self._walked < _TRUST and not (beyond and count != self._looked_count))):
            self._looked = now if look else self._looked
            return
        self._count, self._walked = count, now
        looked, listing = self._looked, None
        if look and beyond:
            self._looked = now
            if count is None or count != self._looked_count:
                listing, self._looked_count = set(procfs.pids(self.proc)), count
        if not self._by_children and listing is None:
            listing = set(procfs.pids(self.proc))
        present = self._walk() if self._by_children else set()
        if listing is not None:
            present |= listing
            self._strangers &= present
        for pid in [pid for pid in self._members if pid not in present]:
            self.forget(pid)
        self._dead = {pid: owner for pid, owner in self._dead.items() if pid in present}
        self._young = {pid: owner for pid, owner in self._young.items() if pid in present}
        kept = self._dead.keys() | self._young.keys()
        self._roots = {pid: root for pid, root in self._roots.items() if pid in kept}
        self._waiting.clear()
        known = self._members.keys() | self._strangers | self._excluded | self._dead.keys()
        fresh = {pid: stat for pid in present - known if (stat := procfs.read_stat(pid, self.proc)) is not None}
        if not fresh:
            return
        born = any(stat.state not in "ZX" for stat in fresh.values())
        if born and still and listing is None and self._births.count() == count:
            self._births.distrust()
        # A parent may be as new as its child: the recursion settles parents first.
        settle = functools.partial(self._settle, fresh, {}, looked)
        for pid in fresh:
            settle(pid)

    def _settle(
        self, fresh: dict[int, procfs.Stat], done: dict[int, str | None], looked: float, pid: int
    ) -> str | None:
        """What children of a process belong to: an owner, ``None`` for a stranger's, or :data:`_LATER`; classifies
        those of ``fresh`` on the way."""
        member = self._members.get(pid)
        if member is not None:
            return _inherited(member.owner)
        if pid in done:
            return done[pid]
        if pid in self._dead:
            return _LATER if self._dead[pid] is None else self._dead[pid]
        stat = fresh.get(pid)
        if stat is None:
            # A parent that is neither known nor new ended a moment ago; the child has another one now.
            return None if pid in self._strangers or pid in self._excluded or pid == 0 else _LATER
        if stat.state in "ZX":
            self._dead[pid] = None
            return _LATER
        done[pid] = None
        seen = self._young.get(pid)
        settle = functools.partial(self._settle, fresh, done, looked)
        done[pid] = owner = self._owner(stat, settle) if seen is None else seen
        if owner is None:
            self._strangers.add(pid)
        elif owner == _LATER:
            self._waiting.add(pid)
        elif self._too_young(stat) or self._may_be_pytest(stat):
            self._young[pid] = owner
            self._roots.setdefault(pid, self._root(stat))
        else:
            # What was seen young was seen in time.
            self._join(stat, owner, looked if seen is None else None)
        return done[pid]

    def _owner(self, stat: procfs.Stat, settle: Callable[[int], str | None]) -> str | None:
        if stat.parent == self._reaper:
            if _executing(stat):
                return _LATER
            return self._by_image(stat) or (self._adopter(stat) if self._adopter else None)
        if stat.parent in self._excluded:
            return None
        owner = settle(stat.parent)
        return self._stray(stat) if owner is None else owner

    def _stray(self, stat: procfs.Stat) -> str | None:
        """Owner of a process whose parents do not tell: it left the tree before it was seen."""
        if self._marked is None or self._oldest is None or stat.start < self._oldest:
            return None
        if _executing(stat):
            return _LATER
        return self._by_image(stat) or (TEST if self._marked(stat) else None)

    def _by_image(self, stat: procfs.Stat) -> str | None:
        found = self._images.get(stat.image) if stat.flags & procfs.FORKED_NOT_EXECUTED else None
        return None if found is None else found[0]

    def _root(self, stat: procfs.Stat) -> int | None:
        """The pytest process that a new process of a test came from."""
        if stat.pid in self._roots:
            # Seen young: its parent may be another one by now.
            return self._roots[stat.pid]
        above = self._members.get(stat.parent)
        if above is not None:
            return above.passes_on
        if stat.parent in self._roots:
            return self._roots[stat.parent]
        found = self._images.get(stat.image) if stat.flags & procfs.FORKED_NOT_EXECUTED else None
        return None if found is None else found[1]

    def _join(self, stat: procfs.Stat, owner: str, looked: float | None) -> None:
        nested = owner == TEST and self._is_nested is not None and self._is_nested(stat)
        member = Member(stat, owner, nested=nested, root=self._root(stat) if owner == TEST else None)
        stray = self._marked is not None and stat.parent != self._reaper and stat.parent not in self._members
        if stray and looked is not None and procfs.age(stat) - _TICKS > procfs.boot_clock() - looked:
            # Its mark tells of all its life; what was before the last look belongs to windows that may be closed.
            procfs.reset_mark(stat.pid, self.proc)
            self.late.append(member)
        self._add(member, stat)

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
        outside = self._young.keys() | self._waiting | self._dead.keys()
        present = {pid for pid in self._members.keys() | outside if os.path.exists(f"{self.proc}/{pid}")}
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


def _executing(stat: procfs.Stat) -> bool:
    """Whether a process may be in the middle of executing a program: its environment reads as empty then."""
    return not stat.image and not stat.flags & procfs.KERNEL_THREAD and procfs.age(stat) < _EXECUTING


def _inherited(owner: str) -> str:
    """What children of a process of this owner belong to."""
    return TEST if owner == PYTEST else owner
