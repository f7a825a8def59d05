"""The least that some processes have held since a window opened: how much of what they held then was there all along.

A peak contains what a process had held before the window only as far as it still held it when the peak was reached.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from pytest_vram.measure.probes import Snapshot


class AtPeak(NamedTuple):
    """PID → the least that it held up to the peak: certainly (``least``), and possibly (``most``)."""

    least: dict[int, int]
    most: dict[int, int]


class Floors:
    """Floors of one window.

    :param opening: label of the device → PID → bytes held at the opening; PID 0 stands for the whole device's rise.
    """

    def __init__(self, opening: Mapping[str, Mapping[int, int]]) -> None:
        self._now = {label: dict(floors) for label, floors in opening.items()}
        self._peaks: dict[str, AtPeak] = {}

    def fold(self, label: str, snapshot: Snapshot, *, peak: bool, mark: int | None, marks: Mapping[int, int]) -> None:
        """Take in one read of a device, after the peaks of the window have taken it in.

        :param peak: whether the run's peak was reached with it. :param mark: the peak, where it is the mark of one
            process, and not a sum that was read. :param marks: marks of the processes.
        """
        floors = self._now.get(label)
        if floors is None or snapshot.fault is not None:
            return
        before = dict(floors)
        for pid, floor in floors.items():
            if pid in snapshot.faults:
                continue
            figure = snapshot.processes.get(pid) if pid else snapshot.rise
            floors[pid] = min(floor, figure.held if figure is not None else 0)
        if not peak:
            return
        if mark is None:
            self._peaks[label] = AtPeak(dict(floors), dict(floors))
            return
        # The peak is of one process alone, and of some moment since the read before.
        theirs = {pid for pid in floors if not pid or marks.get(pid) == mark}
        self._peaks[label] = AtPeak(
            {pid: floor if pid in theirs else 0 for pid, floor in floors.items()},
            {pid: floor if pid in theirs else 0 for pid, floor in before.items()},
        )

    def now(self, label: str) -> dict[int, int]:
        """PID → the least that it has held until now."""
        return dict(self._now.get(label, {}))

    def at_peak(self, label: str) -> AtPeak:
        """The floors when the peak of the run was reached; those of now where it was never above nothing."""
        return self._peaks.get(label) or AtPeak(self.now(label), self.now(label))
