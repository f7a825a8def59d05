"""What the tests of a run may hold together, and what its backends hold now, by device key."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import NamedTuple

from pytest_vram.keeper.core import Core
from pytest_vram.keeper.messages import MEMBER_MARK
from pytest_vram.measure import PYTEST, TEST, UNKNOWN, procfs
from pytest_vram.readings import Measured, Reading

_MOST_ANCESTORS = 64


class Holding(NamedTuple):
    """What one backend of this run holds.

    :ivar label: ``name#generation``. :ivar plan: key of its plan. :ivar holds: device key → bytes.
    :ivar state: of the server. :ivar used: whether an open window uses it.
    """

    label: str
    plan: str
    holds: dict[str, int]
    state: str = "ready"
    attached: bool = False
    used: bool = False


class Backends:
    """What admission must know of the servers, and may do to them; :class:`~pytest_vram.keeper.servers.Servers`
    fills it in.

    :ivar holdings: all servers. :ivar end: stops an idle one, with the reason. :ivar workers: xdist workers of the run.
    """

    def __init__(self) -> None:
        self.holdings: Callable[[], list[Holding]] = list
        self.end: Callable[[str, str], None] = lambda label, reason: None
        self.workers: Callable[[], int] = lambda: 0


class Room:
    """Devices and ceilings of one run.

    :ivar run: id of the run. :ivar keys: device label → key. :ivar devices: the keys, and one for the run itself, so
        that tests of a run without devices can be alone as well. :ivar ceilings: key → bytes that all may hold there.
    :ivar within: ids of the runs that this one is a part of: a test of theirs waits for it to end.
    :ivar names: PID → name of an xdist worker.
    """

    def __init__(self, core: Core | None = None) -> None:
        self.core = core
        self.run = core.launch.run if core else "run"
        self.names: dict[int, str] = {}
        self.keys = {info.label: info.key for info in core.devices} if core else {}
        self.own = f"run {self.run}"
        self.devices = frozenset({*self.keys.values(), self.own})
        self.ceilings = self._ceilings() if core and core.launch.leases else {}
        marks = os.environ.get(MEMBER_MARK, "") if core else ""
        self.within = frozenset(mark for mark in marks.split(":") if mark and mark != self.run)
        self.ancestors = _ancestors(core.launch.controller[0]) if core else frozenset[int]()

    @property
    def _sum(self) -> str:
        return f"sum {self.run}"

    def _ceilings(self) -> dict[str, int]:
        assert self.core is not None
        launch = self.core.launch
        found: dict[str, int] = {}
        for info in self.core.devices:
            usable = info.usable if info.usable is not None else info.capacity
            limits: list[int] = []
            if isinstance(usable, Reading):
                limits.append(max(0, usable.bytes - launch.reserve))
            if launch.budget is not None and (budget := launch.budget.of(info.label)) is not None:
                limits.append(budget)
            if limits:
                found[info.key] = min(limits)
        if launch.budget is not None and launch.budget.total is not None:
            found[self._sum] = launch.budget.total
        return found

    def keyed(self, by_label: Mapping[str, int]) -> dict[str, int]:
        """The same bytes by device key, those of unknown labels left out, and their sum where a budget is for that."""
        found = {self.keys[label]: size for label, size in by_label.items() if label in self.keys}
        if self._sum in self.ceilings and found:
            found[self._sum] = sum(found.values())
        return found

    def label(self, key: str) -> str:
        """What this run calls a device."""
        if key == self._sum:
            return "the sum of all devices"
        return next((label for label, other in self.keys.items() if other == key), key)

    @property
    def whole(self) -> frozenset[str]:
        """Keys of the devices that do not say who holds what: one run at a time has them."""
        if self.core is None or not self.core.launch.leases:
            return frozenset()
        return frozenset(probe.info.key for probe in self.core.timeline.probes if not probe.per_process)

    def workers(self) -> dict[int, dict[str, int]]:
        """What is held by each pytest process, its own and what came from it: PID → device key → bytes.

        PID 0 stands for what came from one of them, nobody knows from which. Where a device does not say who holds
        what, nothing is known.
        """
        if self.core is None or not self.ceilings:
            return {}
        found: dict[int, dict[str, int]] = {}
        for probe, snapshot in self.core.timeline.snapshots():
            if not probe.per_process:
                continue
            label, figures = probe.info.label, snapshot.processes
            for member in self.core.members.all():
                counted = member.owner in (TEST, UNKNOWN) or (member.owner == PYTEST and probe.counts_pytest)
                # What a run within this one has is in its own sheet.
                figure = figures.get(member.pid) if counted and not member.nested else None
                if figure is not None and figure.held:
                    held = found.setdefault(member.root or 0, {})
                    held[label] = held.get(label, 0) + figure.held
        return {pid: self.keyed(held) for pid, held in found.items()}

    def look(self) -> None:
        """Read the devices again: what was read last may be older than the end of a test."""
        if self.core is not None:
            self.core.boundary()

    def measured(self, figures: Mapping[str, Measured], otherwise: Mapping[str, Measured]) -> dict[str, int]:
        """Bytes by key, out of ``otherwise`` where a figure could not be measured."""
        found: dict[str, int] = {}
        for label, figure in {**otherwise, **figures}.items():
            chosen = figure if isinstance(figure, Reading) else otherwise.get(label)
            if isinstance(chosen, Reading):
                found[label] = chosen.bytes
        return self.keyed(found)


def _ancestors(pid: int) -> frozenset[int]:
    """The process and those that it descends from: a test of theirs may wait for what runs here."""
    found: set[int] = set()
    while pid > 1 and len(found) < _MOST_ANCESTORS:
        found.add(pid)
        stat = procfs.read_stat(pid)
        if stat is None:
            break
        pid = stat.parent
    return frozenset(found)
