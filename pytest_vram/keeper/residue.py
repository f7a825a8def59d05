"""Memory that tests leave behind, and whose it is.

At each boundary of a test, what the processes of tests, and pytest's own where they count, hold is compared with what
they held at the boundary before. What came meanwhile is the test's that ran last in that pytest process. It stays that
test's until it goes away again; what goes away is taken from the youngest first, because a teardown frees what its own
test took.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from pytest_vram.keeper.messages import Residue
from pytest_vram.measure import PYTEST, TEST, DeviceInfo, Member, Members, procfs
from pytest_vram.measure.floors import Floors
from pytest_vram.measure.probes import Snapshot

#: Growth of a pytest process by several tests that is not worth a word until it adds up to more: bytes. A process that
#: a test started has no business to be there after it, and counts from the first page on.
NOISE = 64 << 20
#: Most that a driver's context takes of what the first use of a card left in a process: bytes. 107 to 1,105 MiB were
#: seen, by card. It stays until the process ends, whoever uses the card first, and is nobody's leftover.
CONTEXT = 1280 << 20
BEFORE_TESTS = "before the first test"
_CARDS = ("nvml", "drm")
_MOST_GENERATIONS = 64
#: Most tests that are kept by name for one process, and that are told in one window.
_MOST_PARTS, _MOST_TOLD = 256, 20
_SEVERAL = "several tests, little by each"


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


class Part(NamedTuple):
    """What came during one test. :ivar first: it was the first use of the device by a pytest process."""

    test: str
    bytes: int
    first: bool


class Held(NamedTuple):
    """What one process held at a boundary; PID 0 stands for the whole of a device that does not say who holds it.

    :ivar root: pytest process that it descends from, where known. :ivar base: bytes from before the tests.
    :ivar parts: what came later, the oldest first. :ivar own: it is a pytest process, or the whole device.
    """

    device: str
    pid: int
    start: int
    name: str
    root: int | None
    own: bool
    base: int
    parts: tuple[Part, ...]

    def left(self, floor: int | None = None) -> list[int]:
        """Bytes of each part that are there where it holds no more than ``floor``: the youngest has gone first."""
        over = 0 if floor is None else max(0, self.base + sum(part.bytes for part in self.parts) - floor)
        found: list[int] = []
        for part in reversed(self.parts):
            gone = min(over, part.bytes)
            over -= gone
            found.append(part.bytes - gone)
        return found[::-1]

    def told(self, running: Collection[str]) -> list[int]:
        """Which parts are worth a word: those of tests that are over; little ones of pytest's own when they add up."""
        over = [at for at, part in enumerate(self.parts) if part.test not in running]
        small = [at for at in over if self.parts[at].bytes <= NOISE] if self.own else []
        if sum(self.parts[at].bytes for at in small) <= NOISE:
            over = [at for at in over if at not in small]
        return over


class _Holder:
    """What one process holds on one device, by the tests during which it came."""

    __slots__ = ("base", "name", "own", "parts", "pid", "root", "start")

    def __init__(self, pid: int, start: int, name: str, root: int | None, base: int, *, own: bool) -> None:
        self.pid, self.start, self.name, self.root, self.base = pid, start, name, root, base
        self.own = own
        self.parts: list[Part] = []

    def move(self, held: int, test: str) -> None:
        """Take in what it holds now."""
        level = self.base + sum(part.bytes for part in self.parts)
        change = held - level
        if change > 0:
            self._grow(change, test, first=self.own and level == 0)
        while change < 0 and self.parts:
            part = self.parts.pop()
            if part.bytes > -change:
                self.parts.append(part._replace(bytes=part.bytes + change))
            change += part.bytes
        if change < 0:
            self.base = max(0, self.base + change)

    def _grow(self, size: int, test: str, *, first: bool) -> None:
        parts = self.parts
        if parts and not self.own and size <= NOISE:
            # What a process grows by a little after its test is still of whoever started it.
            parts[0] = parts[0]._replace(bytes=parts[0].bytes + size)
        elif parts and parts[-1].test == test:
            parts[-1] = parts[-1]._replace(bytes=parts[-1].bytes + size)
        else:
            parts.append(Part(test, size, first))
            if len(parts) > _MOST_PARTS:
                self._shorten()

    def _shorten(self) -> None:
        """Make the littlest parts one, so that a run of any length is kept in bounded memory."""
        order = sorted(range(len(self.parts)), key=lambda at: -self.parts[at].bytes)
        kept = set(order[: _MOST_PARTS // 2])
        little = sum(part.bytes for at, part in enumerate(self.parts) if at not in kept)
        self.parts = [Part(_SEVERAL, little, False), *(part for at, part in enumerate(self.parts) if at in kept)]


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

    def renamed(self, old: str, new: str) -> None:
        """A window that several tests share has another name: which of them it is about is known at its end."""
        for holder in self._holders.values():
            holder.parts = [part._replace(test=new) if part.test == old else part for part in holder.parts]

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
                holder = _Holder(member.pid, member.start, member.name, root, base, own=own)
                self._holders[key] = holder
            holder.move(figure.held, self._during(holder.root))
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
            holder = self._holders[key] = _Holder(0, 0, "", None, 0, own=True)
        holder.move(figure.held, self._during(None))

    def _root(self, member: Member) -> int | None:
        """The pytest process that a test's process descends from, where that is known."""
        if member.root is not None:
            return member.root
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

    def holding(self) -> tuple[Held, ...]:
        """Who holds what came during tests, as it is now."""
        return tuple(
            Held(label, one.pid, one.start, one.name, one.root, one.own, one.base, tuple(one.parts))
            for (label, _), one in self._holders.items()
            if one.parts
        )

    def held(self, running: Collection[str] = ()) -> list[Residue]:
        """What is left behind now by tests that are over, the largest first.

        :param running: tests that still run: what they hold is theirs.
        """
        return residues(self.holding(), running)


def floors(holding: Iterable[Held]) -> Floors | None:
    """What a window has to keep of these, so that :func:`residues` can tell what was there all along."""
    opening: dict[str, dict[int, int]] = {}
    for one in holding:
        opening.setdefault(one.device, {})[one.pid] = one.base + sum(part.bytes for part in one.parts)
    return Floors(opening) if opening else None


class _Sum:
    """What one test left on one device, as a :class:`Residue` says it."""

    def __init__(self) -> None:
        self.bytes = self.context = self.lasted = self.at_peak = self.at_peak_most = 0
        self.own = True
        self.holders: list[tuple[int, int, str]] = []


def residues(
    holding: Sequence[Held],
    running: Collection[str] = (),
    kept: Floors | None = None,
    *,
    root: int | None = None,
    elsewhere: Collection[str] = (),
) -> list[Residue]:
    """What tests that are over had left behind, the largest first.

    :param holding: who held it when the window opened. :param running: tests that still ran then.
    :param kept: what was there all along; without it, nothing is told of it.
    :param root: pytest process of the window.
    :param elsewhere: devices whose peak was reached without any of it (a boot before).
    """
    found: dict[tuple[str, str, bool], _Sum] = {}
    for one in holding:
        told = one.told(running)
        if not told:
            continue
        now = kept.now(one.device).get(one.pid, 0) if kept is not None else 0
        peak = kept.at_peak(one.device) if kept is not None and one.device not in elsewhere else None
        lasted = one.left(now)
        least = one.left(peak.least.get(one.pid, 0) if peak is not None else 0)
        most = one.left(peak.most.get(one.pid, 0) if peak is not None else 0)
        name = _name(one)
        mine = root is None or one.root is None or one.root == root
        for at in told:
            part = one.parts[at]
            context = CONTEXT if part.first else 0
            total = found.setdefault((part.test, one.device, mine), _Sum())
            total.bytes += part.bytes
            total.context += min(part.bytes, context)
            total.lasted += max(0, lasted[at] - context)
            total.at_peak += max(0, least[at] - context)
            total.at_peak_most += max(0, most[at] - context)
            total.own = mine
            total.holders.append((part.bytes, one.pid, name))
    listed = [_residue(test, device, total) for (test, device, _), total in found.items()]
    return _shortened(sorted(listed, key=lambda one: -one.bytes))


def _residue(test: str, device: str, total: _Sum) -> Residue:
    holders = sorted(total.holders, key=lambda item: -item[0])
    return Residue(
        test=test,
        device=device,
        bytes=total.bytes,
        pids=[(pid, name) for _, pid, name in holders if pid],
        first_use=total.context > 0,
        context=total.context,
        own=total.own,
        lasted=total.lasted,
        at_peak=total.at_peak,
        at_peak_most=total.at_peak_most,
    )


def _name(holder: Held) -> str:
    """A process by its program, which it may have executed after it was seen first."""
    stat = procfs.read_stat(holder.pid)
    if stat is None or stat.start != holder.start:
        return holder.name
    return stat.name if holder.own else procfs.program(holder.pid) or stat.name


def _shortened(found: list[Residue]) -> list[Residue]:
    """The largest, and the others of each device as one."""
    rest: dict[tuple[str, bool], list[Residue]] = {}
    for one in found[_MOST_TOLD:]:
        rest.setdefault((one.device, one.own), []).append(one)
    return found[:_MOST_TOLD] + [_as_one(many) for many in rest.values()]


def _as_one(many: list[Residue]) -> Residue:
    def total(field: str) -> int:
        return sum(getattr(one, field) for one in many)

    return Residue(
        test=many[0].test if len(many) == 1 else f"{len(many)} more tests",
        device=many[0].device,
        bytes=total("bytes"),
        pids=list(dict.fromkeys(pid for one in many for pid in one.pids)),
        first_use=any(one.first_use for one in many),
        context=total("context"),
        own=many[0].own,
        lasted=total("lasted"),
        at_peak=total("at_peak"),
        at_peak_most=total("at_peak_most"),
    )
