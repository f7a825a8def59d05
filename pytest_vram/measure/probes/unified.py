"""A GPU whose memory is the host's (NVIDIA's GB10 and Jetson): the machine's memory is the device's.

The driver answers "not supported" to questions about memory. What its programs allocate on the GPU is in no resident
set of theirs, so that figures of processes would miss it; the machine's memory in use misses nothing. What stands for
the run is its rise over a quiet baseline, and whatever else runs on the machine is within it.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping

from pytest_vram.measure import procfs
from pytest_vram.measure.device import DeviceInfo
from pytest_vram.measure.probes import trust
from pytest_vram.measure.probes.base import Figure, Snapshot, Sources
from pytest_vram.measure.probes.nvml_library import DriverFault, Library
from pytest_vram.measure.probes.nvml_tables import ProcessTable
from pytest_vram.units import mib

DOUBT = "the GPU has no memory of its own, and the driver does not say what of the host's it uses"
#: Reads between two looks at the driver's list of processes.
_SELDOM = 32


class UnifiedProbe:
    """The machine's memory in use, less what was in use before.

    :param library: NVIDIA's driver, whose list of processes is information only.
    :raises OSError: ``/proc/meminfo`` cannot be read.
    """

    per_process = False
    counts_pytest = True
    sources = Sources(mark="device-delta", sampled="device-delta", now="device-delta", device="host-meminfo")

    def __init__(self, info: DeviceInfo, library: Library | None = None, *, proc: str = "/proc") -> None:
        self.info = info
        self._library = library
        self._meminfo = os.open(f"{proc}/meminfo", os.O_RDONLY | os.O_CLOEXEC)
        self._processes: ProcessTable | None = None
        if library is not None:
            try:
                handle = library.ask("nvmlDeviceGetHandleByUUID", info.uuid)
                self._processes = ProcessTable(library, handle)
            except DriverFault:
                pass  # information only
        self._listed: Mapping[int, int | None] = {}
        self._until_listed = 0
        self._quiet = 0
        self._proc = proc
        self._asked: Collection[int] = ()
        #: A process of this run that may have been on the GPU when the baseline was taken.
        self._early: int | None = None
        self.note: str | None = None
        self.settle()

    def _used(self) -> int | None:
        try:
            read = procfs.parse_machine_memory(os.pread(self._meminfo, 512, 0))
        except OSError:
            return None
        return None if read is None else read[0] - read[1]

    def read(self, pids: Collection[int]) -> Snapshot:
        """Read the machine; what the driver lists of processes is in ``others``."""
        self._asked = pids
        used = self._used()
        if used is None:
            return Snapshot({}, None, fault="/proc/meminfo cannot be read")
        if used < self._quiet:
            self._quiet = used
            self._say()
        rise = used - self._quiet
        most = None if self._early is None else used
        figure = Figure(rise, rise, most=most)
        return Snapshot({}, Figure(used, used), rise=figure, others=self._others(pids), doubt=DOUBT)

    def _others(self, pids: Collection[int]) -> dict[int, int]:
        self._until_listed -= 1
        if self._until_listed < 0:
            self._until_listed = _SELDOM
            self._list()
        return {pid: held for pid, held in self._listed.items() if held is not None and pid not in pids}

    def _list(self) -> None:
        self._listed = {}
        if self._processes is not None:
            try:
                self._listed = self._processes.read()
            except DriverFault:
                self._processes = None

    def reset(self) -> None:
        """There are no marks."""

    def settle(self) -> None:
        """Take what is in use now as the quiet baseline."""
        used = self._used()
        if used is not None:
            self._quiet = used
            self._list()
            self._early = trust.at_work(self._asked, self._listed, self._proc)
        self._say()

    def _say(self) -> None:
        self.note = (
            f"the machine's memory in use less the {mib(self._quiet)} that were in use before:"
            " what other programs take or free meanwhile is within it"
        )
        if self._early is not None:
            self.note += f"; {trust.early(self._early)}"

    def close(self) -> None:
        """Close the descriptor and give up the driver."""
        if self._meminfo >= 0:
            os.close(self._meminfo)
            self._meminfo = -1
        if self._library is not None:
            self._library.close()
            self._library = None
