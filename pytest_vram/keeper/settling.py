"""Clean before and after: what a card held before the run, and when it has given back what was stopped."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection
from typing import NamedTuple

from pytest_vram.keeper.core import Core
from pytest_vram.measure import procfs
from pytest_vram.measure.probes import Probe, Snapshot
from pytest_vram.readings import Reading
from pytest_vram.units import mib

#: Seconds between two reads that are compared.
BETWEEN_READS = 0.1
#: Seconds to wait for two agreeing reads before the run, and for a card to give back what was stopped.
LONGEST = 5.0
#: Bytes by which two reads may differ and still agree.
TOLERANCE = 1 << 20
_CARDS = ("nvml", "drm")


class Left(NamedTuple):
    """A process that holds memory of a device."""

    pid: int
    name: str
    bytes: int


class Settling:
    """Waits on the cards of a run; without cards nothing waits."""

    def __init__(self, core: Core, *, pause: float = BETWEEN_READS, longest: float = LONGEST) -> None:
        self._core = core
        self._pause = pause
        self._longest = longest
        self._baseline: asyncio.Task[None] | None = None
        self._pending: set[asyncio.Task[None]] = set()

    def cards(self) -> list[tuple[Probe, Snapshot]]:
        """Cards of the run, with their last reads."""
        return [
            (probe, snapshot)
            for probe, snapshot in self._core.timeline.snapshots()
            if probe.info.kind in _CARDS or (probe.info.kind == "unified" and not probe.per_process)
        ]

    # ------------------------------------------------------------ before

    def begin(self) -> None:
        """Begin to look for the quiet baseline, before anything of the run is on a card."""
        if self._baseline is None and self.cards():
            self._baseline = asyncio.ensure_future(self._find_baseline())

    async def baseline(self) -> None:
        """Wait until the quiet baseline of every card is taken; at once where there is no card, and ever after."""
        self.begin()
        if self._baseline is not None:
            await asyncio.shield(self._baseline)

    async def _find_baseline(self) -> None:
        moving = await self.quiet(self._longest)
        core = self._core
        for probe, _ in self.cards():
            probe.settle()
        core.boundary()
        for probe, snapshot in self.cards():
            if snapshot.fault is not None or snapshot.device is None:
                continue
            label, held = probe.info.label, mib(snapshot.device.held)
            state = f"still changing after {self._longest:g} s" if label in moving else "at rest"
            core.log("note", text=f"{label} before the run: {held} in use, {state}", device=label)

    async def quiet(self, seconds: float) -> list[str]:
        """Wait until two reads of every card agree, for ``seconds`` at most; labels of those that still change."""
        if not self.cards():
            return []
        deadline = time.monotonic() + seconds
        before = self._read()
        while True:
            await asyncio.sleep(self._pause)
            now = self._read()
            moving = [label for label, held in now.items() if abs(held - before.get(label, held)) > TOLERANCE]
            if not moving or time.monotonic() >= deadline:
                return moving
            before = now

    def _read(self) -> dict[str, int]:
        """What everyone holds on each card, read now; a card that cannot be read is left out."""
        self._core.boundary()
        return {
            probe.info.label: snapshot.device.held
            for probe, snapshot in self.cards()
            if snapshot.fault is None and snapshot.device is not None
        }

    # ------------------------------------------------------------ after

    async def after_stop(self, what: str, pids: Collection[int]) -> None:
        """Wait until the cards have given back what these processes held: nothing falls any more, and none of them is
        listed; what is still there at the end of the wait is named in the journal.

        :param what: what was stopped, for people.
        """
        if self.cards() and pids:
            task = asyncio.ensure_future(self._given_back(what, pids))
            self._pending.add(task)
            task.add_done_callback(self._pending.discard)
            await asyncio.shield(task)

    async def stopped(self) -> None:
        """Wait for every wait of :meth:`after_stop` that goes on."""
        for task in list(self._pending):
            await asyncio.shield(task)

    async def _given_back(self, what: str, pids: Collection[int]) -> None:
        deadline = time.monotonic() + self._longest
        before = self._read()
        while True:
            await asyncio.sleep(self._pause)
            now = self._read()
            # Others may start to use the card meanwhile: only falling figures are waited for.
            falling = [label for label, held in now.items() if held < before.get(label, held) - TOLERANCE]
            left = self._left(pids)
            if not falling and not left:
                return
            if time.monotonic() >= deadline:
                break
            before = now
        for label, found in left.items():
            who = ", ".join(f"process {one.pid} ({one.name}) {mib(one.bytes)}" for one in found)
            text = f"{self._longest:g} s after {what} was stopped, {label} is still held by {who}"
            self._core.log("note", text=text, device=label, pids=[one.pid for one in found])
        for label in falling:
            text = f"{self._longest:g} s after {what} was stopped, the memory in use on {label} still falls"
            self._core.log("note", text=text, device=label)

    def _left(self, pids: Collection[int]) -> dict[str, list[Left]]:
        """Which of these processes still hold memory, by device."""
        found: dict[str, list[Left]] = {}
        for probe, snapshot in self.cards():
            held = {pid: size for pid, size in snapshot.others.items() if pid in pids and size}
            held |= {pid: one.held for pid, one in snapshot.processes.items() if pid in pids and one.held}
            if held:
                found[probe.info.label] = [Left(pid, name_of(pid), size) for pid, size in held.items()]
        return found


def name_of(pid: int) -> str:
    """Name of a process for people."""
    stat = procfs.read_stat(pid)
    return stat.name if stat is not None else "it has ended"


def room(probe: Probe, snapshot: Snapshot) -> str | None:
    """How much of a card is free, for people; ``None`` where that is not known."""
    usable = probe.info.usable if isinstance(probe.info.usable, Reading) else probe.info.capacity
    if not isinstance(usable, Reading) or snapshot.device is None:
        return None
    return f"{mib(max(0, usable.bytes - snapshot.device.held))} of {mib(usable.bytes)} free"
