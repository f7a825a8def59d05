"""The one interface of everything that reads device memory."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple, Protocol

from pytest_vram.measure.device import DeviceInfo


class Figure(NamedTuple):
    """Bytes of one process, or of a whole device, at one moment.

    :ivar now: what it holds for good: the figure for idle memory and growth.
    :ivar held: what it holds in the terms of peaks; on most sources the same as ``now``.
    :ivar mark: exact high-water mark of ``held`` since the last :meth:`Probe.reset`; ``None`` where the source has
        none and a peak is the largest sample.
    :ivar disturbed: the mark fell although nobody here set it back, so that a peak before may be lost: the process
        executed another program, or another tool sets marks back as well.
    :ivar most: upper end of ``held`` since the last reset, where the source knows one though it has no mark for this
        time (NVML's accounting keeps the peak of a process's whole life); ``None``: the mark, else unknown.
    """

    now: int
    held: int
    mark: int | None = None
    disturbed: bool = False
    most: int | None = None


class Snapshot(NamedTuple):
    """One read of a probe.

    :ivar processes: PID → figure, of those asked for that still run. A process that ended since the read before is
        here once more where the source keeps its exact peak (NVML's accounting), holding nothing, whether it is asked
        for or not; it is among ``gone`` as well.
    :ivar device: everything on the device, everyone included; ``None`` where the source has no such figure.
    :ivar gone: PIDs that were asked for and have ended.
    :ivar faults: PID → why its figure could not be read.
    :ivar fault: why nothing could be read, for the whole device.
    :ivar lost: the fault is for good: the device is gone, or its driver is.
    :ivar rise: what stands for the run where the source does not say who holds the memory (``per_process`` is
        false): the device's figure less what was there before; ``None`` where figures are by process.
    :ivar others: PID → bytes of the processes on the device that were not asked for, as far as the source lists them.
    :ivar unlisted: bytes in use on the device that no listed process holds (driver, hidden processes); ``None``
        where that cannot be told.
    :ivar spill: PID → bytes that it was given on this device and that lie in host memory instead.
    :ivar doubt: why these figures are second best, such as figures by process that the driver does not give.
    """

    processes: dict[int, Figure]
    device: Figure | None
    gone: tuple[int, ...] = ()
    faults: dict[int, str] = {}
    fault: str | None = None
    rise: Figure | None = None
    others: dict[int, int] = {}
    unlisted: int | None = None
    spill: dict[int, int] = {}
    doubt: str | None = None
    lost: bool = False


class Sources(NamedTuple):
    """What the readings of a probe call their source.

    :ivar mark: peaks from exact marks. :ivar sampled: peaks from samples, and baselines. :ivar now: current figures.
    :ivar device: figures of the whole device.
    """

    mark: str
    sampled: str
    now: str
    device: str


class Probe(Protocol):
    """Reads one device. Its owner alone calls it, from one thread.

    ``per_process`` and ``sources`` may change from one read to the next, when a source turns out not to give what it
    promised; the figures of a read are what the attributes say after it.

    :ivar per_process: whether figures are known by process; else :attr:`Snapshot.rise` stands for the run, and what
        strangers hold is within it.
    :ivar counts_pytest: whether pytest's own processes are a part of the run here: on every card, not on ``cpu``.
    :ivar note: what every reader of a figure should know, or ``None``.
    """

    info: DeviceInfo
    per_process: bool
    counts_pytest: bool
    sources: Sources
    note: str | None

    def read(self, pids: Collection[int]) -> Snapshot:
        """Read the device and these processes. Never raises for what it reads: faults are data."""

    def reset(self) -> None:
        """Set every mark back to the present value. Does nothing where there are no marks."""

    def settle(self) -> None:
        """Take the present figure of the device as its quiet baseline: nothing of this run is on it yet.

        Does nothing where figures need none.
        """

    def close(self) -> None:
        """Give up descriptors and handles."""
