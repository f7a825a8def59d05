"""Memory that tests leave behind, and whose it is.

At each boundary of a test, what the processes of tests, and pytest's own where they count, hold is compared with what
they held at the boundary before. What came meanwhile is the test's that ran last in that pytest process. It stays that
test's until it goes away again; what goes away is taken from the youngest first, because a teardown frees what its own
test took.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple

from pytest_vram.keeper.messages import Residue
from pytest_vram.measure import PYTEST, TEST, DeviceInfo, Member, Members
from pytest_vram.measure.probes import Snapshot

#: Growth of a pytest process between two boundaries that is not worth a word: bytes. A process that a test started has
#: no business to be there after it, and counts from the first page on.
NOISE = 64 << 20
BEFORE_TESTS = "before the first test"
_CARDS = ("nvml", "drm")
_MOST_GENERATIONS = 64


class Look(NamedTuple):
    """One device at a boundary.

    :ivar counts_pytest: whether pytest's own processes are a part of the run on it. :ivar per_process: whether
        figures are by process. :ivar backends: whether processes of backends run, which may hold the memory then.
    """

    device: DeviceInfo
    snapshot: Snapshot
    counts_pytest: bool
    per_process: bool
    backends: bool


class _Part:
    __slots__ = ("bytes", "first", "test")

    def __init__(self, test: str, size: int, first: bool) -> None:
        self.test = test
        self.bytes = size
        self.first = first


class _Holder:
    """What one process holds on one device, by the tests during which it came."""

    __slots__ = ("base", "name", "parts", "pid", "root", "start")

    def __init__(self, pid: int, start: int, name: str, root: int | None, base: int) -> None:
        self.pid, self.start, self.name, self.root, self.base = pid, start, name, root, base
        self.parts: list[_Part] = []

    def level(self) -> int:
        return self.base + sum(part.bytes for part in self.parts)

    def move(self, held: int, test: str, noise: int) -> None:
        """Take in what it holds now; growth below ``noise`` is nobody's until it adds up to more."""
        level = self.level()
        change = held - level
        if change > noise:
            last = self.parts[-1] if self.parts else None
            if last is not None and last.test == test:
                last.bytes += change
            else:
                first = level == 0 and self.pid != 0 and self.pid == self.root
                self.parts.append(_Part(test, change, first))
        while change < 0 and self.parts:
            part = self.parts[-1]
            taken = min(part.bytes, -change)
            part.bytes -= taken
            change += taken
            if not part.bytes:
                self.parts.pop()
        if change < 0:
            self.base = max(0, self.base + change)


class Residues:
    """The account of one run. The caller looks at each boundary at which a test begins or ends."""

    def __init__(self, members: Members) -> None:
        self._members = members
        self._holders: dict[tuple[str, int], _Holder] = {}
        #: Test that began last, by pytest process.
        self._latest: dict[int, str] = {}

    def began(self, test: str, pid: int) -> None:
        """A test begins in this pytest process; call after :meth:`look`."""
        self._latest[pid] = test

    def look(self, looks: Iterable[Look]) -> None:
        """Bring the account up to date, just after the devices were read."""
        for one in looks:
            if one.snapshot.fault is not None:
                continue
            if one.per_process:
                self._by_process(one)
            else:
                self._whole(one)

    def _by_process(self, one: Look) -> None:
        label, figures = one.device.label, one.snapshot.processes
        present = set()
        for member in self._members.all():
            if member.owner != TEST and not (one.counts_pytest and member.owner == PYTEST):
                continue
            key = (label, member.pid)
            present.add(key)
            figure = figures.get(member.pid)
            own = member.owner == PYTEST
            holder = self._holders.get(key)
            if holder is not None and holder.start != member.start:
                holder = None
            if figure is None:
                continue
            if holder is None:
                base = figure.held if own else 0
                root = member.pid if own else self._root(member)
                holder = self._holders[key] = _Holder(member.pid, member.start, member.name, root, base)
            holder.move(figure.held, self._during(holder.root), NOISE if own else 0)
        for key in [key for key in self._holders if key[0] == label and key not in present]:
            del self._holders[key]

    def _whole(self, one: Look) -> None:
        """A card that does not say who holds its memory: what is there without any backend is somebody's."""
        figure = one.snapshot.rise
        if figure is None or one.backends or one.device.kind not in _CARDS:
            return
        key = (one.device.label, 0)
        holder = self._holders.get(key)
        if holder is None:
            holder = self._holders[key] = _Holder(0, 0, "", None, 0)
        holder.move(figure.held, self._during(None), NOISE)

    def _root(self, member: Member) -> int | None:
        """The pytest process that a test's process descends from, where the way up is still there."""
        for _ in range(_MOST_GENERATIONS):
            above = self._members.get(member.parent)
            if above is None:
                return None
            if above.owner == PYTEST:
                return above.pid
            member = above
        return None

    def _during(self, root: int | None) -> str:
        if root is not None and root in self._latest:
            return self._latest[root]
        if root is not None or not self._latest:
            return BEFORE_TESTS
        names = list(dict.fromkeys(self._latest.values()))
        return names[0] if len(names) == 1 else "one of " + ", ".join(names[:8]) + (" …" if len(names) > 8 else "")

    def held(self, running: Collection[str] = ()) -> list[Residue]:
        """What is left behind now by tests that are over, the largest first.

        :param running: tests that still run: what they hold is theirs.
        """
        found: dict[tuple[str, str], list[tuple[_Holder, int]]] = {}
        first: set[tuple[str, str]] = set()
        for (label, _), holder in self._holders.items():
            for part in holder.parts:
                if part.test not in running and part.bytes:
                    found.setdefault((part.test, label), []).append((holder, part.bytes))
                    if part.first:
                        first.add((part.test, label))
        residues = [
            Residue(
                test=test,
                device=label,
                bytes=sum(size for _, size in parts),
                pids=[
                    (holder.pid, holder.name) for holder, _ in sorted(parts, key=lambda part: -part[1]) if holder.pid
                ],
                first_use=(test, label) in first,
            )
            for (test, label), parts in found.items()
        ]
        return sorted(residues, key=lambda residue: -residue.bytes)
