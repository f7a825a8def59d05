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
    """

    now: int
    held: int
    mark: int | None = None
    disturbed: bool = False


class Snapshot(NamedTuple):
    """One read of a probe.

    :ivar processes: PID → figure, of those asked for that still run.
    :ivar device: everything on the device, everyone included; ``None`` where the source has no such figure.
    :ivar gone: PIDs that were asked for and have ended.
    :ivar faults: PID → why its figure could not be read.
    :ivar fault: why nothing could be read, for the whole device.
    """

    processes: dict[int, Figure]
    device: Figure | None
    gone: tuple[int, ...] = ()
    faults: dict[int, str] = {}
    fault: str | None = None


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

    :ivar per_process: whether figures are known by process; else the device's figure stands for the run, and what
        strangers hold is within it.
    :ivar note: what every reader of a figure should know, or ``None``.
    """

    info: DeviceInfo
    per_process: bool
    sources: Sources
    note: str | None

    def read(self, pids: Collection[int]) -> Snapshot:
        """Read the device and these processes. Never raises for what it reads: faults are data."""

    def reset(self) -> None:
        """Set every mark back to the present value. Does nothing where there are no marks."""

    def close(self) -> None:
        """Give up descriptors and handles."""
