"""An NVIDIA card or MIG slice: what each process holds, by the driver's own lists."""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping
from typing import NamedTuple

from pytest_vram.measure.device import DeviceInfo
from pytest_vram.measure.probes import trust
from pytest_vram.measure.probes.accounting import Accounting
from pytest_vram.measure.probes.base import Figure, Snapshot, Sources
from pytest_vram.measure.probes.ends import Ends
from pytest_vram.measure.probes.nvml_library import ABSENT, FOR_GOOD, NO_PERMISSION, DriverFault, Library
from pytest_vram.measure.probes.nvml_tables import CardMemory, MemoryTable, ProcessTable
from pytest_vram.units import mib

SAMPLED = Sources(mark="nvml-process", sampled="nvml-process", now="nvml-process", device="nvml-device")
ACCOUNTED = SAMPLED._replace(mark="nvml-accounting")
DELTA = Sources(mark="device-delta", sampled="device-delta", now="device-delta", device="nvml-device")


class _Before(NamedTuple):
    """A read of everything by process, which stands as long as none of what it was made of changes."""

    listed: Mapping[int, int | None]
    memory: CardMemory
    pids: Collection[int]
    snapshot: Snapshot


class NvmlProbe:
    """One card or MIG slice, found by its UUID.

    Figures are by process as long as nothing speaks against the driver's lists (:class:`~trust.Trust`). Once
    something does, the device's figure over its quiet baseline stands for the run, for good: what is on the device
    besides is then within it.

    :raises DriverFault: the card is not there, or its memory cannot be read.
    """

    counts_pytest = True

    def __init__(
        self,
        info: DeviceInfo,
        library: Library,
        *,
        proc: str = "/proc",
        container: bool | None = None,
    ) -> None:
        self.info = info
        self._library = library
        handle = library.ask("nvmlDeviceGetHandleByUUID", info.uuid)
        self._memory = MemoryTable(library, handle)
        self._processes = ProcessTable(library, handle)
        self._proc = proc
        self._ends = Ends(proc)
        self._accounting = Accounting(library, handle, proc) if info.accounting else None
        self._trust = trust.Trust(
            container=trust.in_container(proc) if container is None else container,
            exists=functools.partial(trust.exists, proc=proc),
        )
        self._quiet = self._memory.read().used
        self._before: _Before | None = None
        self._asked: Collection[int] = ()
        #: A process of this run that may have been on the card when the baseline was taken.
        self._early: int | None = None
        self._doubt: str | None = None
        self._fell = 0
        self._lost: str | None = None
        self.per_process = True
        self.sources = ACCOUNTED if self._accounting is not None else SAMPLED
        self.note: str | None = None

    def read(self, pids: Collection[int]) -> Snapshot:
        """Read the card and these processes; a card that is lost stays lost.

        Gives the very snapshot of the read before where everything is as it was then.
        """
        if self._lost is not None:
            return Snapshot({}, None, fault=self._lost, lost=True)
        self._asked = pids
        try:
            listed = self._listed()
            memory = self._memory.read()
        except DriverFault as fault:
            return self._failed(fault)
        before = self._before
        if before is not None and listed is before.listed and memory is before.memory and self._stands(before, pids):
            return before.snapshot
        self._before = None
        if memory.used > memory.total:
            reason = f"the driver says that {memory.used} bytes of {memory.total} are in use, which is impossible"
            return Snapshot({}, None, fault=f"{self.info.name}: {reason}")
        device = Figure(memory.used, memory.used)
        if self.per_process and listed is not None:
            doubt = self._trust.doubt(listed, pids, memory.used - self._quiet)
            if doubt is None:
                snapshot = self._by_process(listed, pids, memory, device)
                # One that has ended is told of once.
                if self._trust.settled and not snapshot.gone and len(snapshot.processes) == len(pids):
                    self._before = _Before(listed, memory, list(pids), snapshot)
                return snapshot
            self._distrust(doubt)
        others = {pid: held for pid, held in (listed or {}).items() if held is not None and pid not in pids}
        return self._as_whole(memory, device, others if self._trust.without_figures else {})

    def _stands(self, before: _Before, pids: Collection[int]) -> bool:
        """Whether nothing besides the lists and the memory has changed."""
        if pids != before.pids or self._ends.ended():
            return False
        return self._accounting is None or self._accounting.stands(pids)

    def _listed(self) -> Mapping[int, int | None] | None:
        if not self.per_process and not self._trust.without_figures:
            return None
        try:
            return self._processes.read()
        except DriverFault as fault:
            if not self.per_process:
                # Only names of others were asked for; what became of the card, its memory says.
                return None
            if fault.code in ABSENT or fault.code == NO_PERMISSION:
                self._distrust(f"the driver does not list processes here ({fault.text})")
                return None
            raise

    def _failed(self, fault: DriverFault) -> Snapshot:
        reason = f"{self.info.name} could not be read: {fault.text}"
        if fault.code in FOR_GOOD:
            self._lost = reason
            return Snapshot({}, None, fault=reason, lost=True)
        return Snapshot({}, None, fault=reason)

    # ------------------------------------------------------------ by process

    def _by_process(
        self, listed: Mapping[int, int | None], pids: Collection[int], memory: CardMemory, device: Figure
    ) -> Snapshot:
        self._ends.follow(pids)
        ended = self._ends.ended()
        figures: dict[int, Figure] = {}
        gone: list[int] = []
        accounting = self._accounting
        for pid in pids:
            held = listed.get(pid)
            if held is None:
                # What is not on the list holds nothing here; one that ended is not on it any more.
                if pid in ended:
                    gone.append(pid)
                    last = accounting.last(pid) if accounting is not None else None
                    if last is not None:
                        figures[pid] = last
                    continue
                held = 0
            figures[pid] = Figure(held, held) if accounting is None else accounting.figure(pid, held)
        pending = self._trust.pending
        if pending:
            # Whose they are will show; until then they are nobody's, and may be ours.
            listed = {pid: None if pid in pending else held for pid, held in listed.items()}
            first = next(iter(figures), None)
            if first is not None and figures[first].mark is None:
                figures[first] = figures[first]._replace(most=max(figures[first].held, memory.used - self._quiet))
        others, unlisted = self._rest(listed, figures, memory.used)
        if accounting is not None:
            figures.update({pid: last for pid in accounting.left(pids) if (last := accounting.last(pid)) is not None})
        doubt = self._trust.open_question
        return Snapshot(figures, device, tuple(gone), others=others, unlisted=unlisted, doubt=doubt)

    def _rest(
        self, listed: Mapping[int, int | None], ours: Mapping[int, Figure], used: int
    ) -> tuple[dict[int, int], int | None]:
        """What other processes hold, and what nobody who is listed does."""
        others: dict[int, int] = {}
        total, complete = 0, True
        for pid, held in listed.items():
            if held is None:
                complete = False
                continue
            total += held
            if pid not in ours:
                others[pid] = held
        return others, max(0, used - total) if complete else None

    # ------------------------------------------------------------ as a whole

    def _distrust(self, doubt: str) -> None:
        """From now on the device's figure counts."""
        self._doubt = doubt
        self.per_process = False
        self.sources = DELTA
        self._ends.close()
        self._say()

    def _say(self) -> None:
        # Why is in each read's doubt; who reads a figure gets both.
        whose = "that others held before" if self._early is None else "that were in use before"
        text = f"the device's figure less the {mib(self._quiet)} {whose}"
        if self._fell:
            text += f" (shrunk by {mib(self._fell)} since)"
        self.note = f"{text}: what they take or free meanwhile is within it"
        if self._early is not None:
            self.note += f"; {trust.early(self._early)}"

    def _as_whole(self, memory: CardMemory, device: Figure, others: dict[int, int]) -> Snapshot:
        if memory.used < self._quiet:
            # Others gave memory back: with the old baseline this run would seem to hold less than it does.
            self._fell += self._quiet - memory.used
            self._quiet = memory.used
            self._say()
        rise = memory.used - self._quiet
        # What of the baseline is the run's own nobody says: it may be all of it.
        most = None if self._early is None else memory.used
        return Snapshot({}, device, rise=Figure(rise, rise, most=most), others=others, doubt=self._doubt)

    # ------------------------------------------------------------ upkeep

    def reset(self) -> None:
        """Peaks of the driver's accounting count from now on; there are no other marks."""
        if self._accounting is not None and self._lost is None:
            self._before = None
            self._accounting.reset()

    def settle(self) -> None:
        """Take what is in use now as the quiet baseline. A card that cannot be read keeps the one before."""
        try:
            memory = self._memory.read()
        except DriverFault:
            return
        if memory.used <= memory.total:
            self._before = None
            self._quiet, self._fell = memory.used, 0
            self._early = trust.at_work(self._asked, self._known(), self._proc)
            if not self.per_process:
                self._say()

    def _known(self) -> Collection[int]:
        """PIDs that the driver lists, with figures or without."""
        try:
            return self._processes.read()
        except DriverFault:
            return ()

    def close(self) -> None:
        """Give up the driver."""
        self._ends.close()
        self._library.close()
