"""Exact peaks of processes from NVML's accounting, where an administrator has switched it on.

The driver keeps the most that each process ever held on the card, also after it ended. For the time since a reset
that is the exact peak when it rose meanwhile; otherwise it is an upper end, and samples are the lower one.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Collection
from struct import Struct
from typing import Any

from pytest_vram.measure import procfs
from pytest_vram.measure.probes import nvml_library
from pytest_vram.measure.probes.base import Figure
from pytest_vram.measure.probes.nvml_library import Library

#: Seconds by which the start of a process is known too late: two ticks of the kernel's clock.
_TICKS = 0.02


class _Known:
    """A process that the driver accounts for.

    :ivar base: its peak at the last reset. :ivar reached: since then it was seen to hold as much as ever.
    """

    __slots__ = ("base", "peak", "reached", "started")

    def __init__(self, started: int, base: int) -> None:
        self.started = started
        self.base = base
        self.peak = base
        self.reached = False

    @property
    def sure(self) -> bool:
        """Whether the peak of its life is of the time since the last reset."""
        return self.reached or self.peak > self.base


class Accounting:
    """The accounting of one card. ``proc`` is where processes are looked up."""

    def __init__(self, library: Library, handle: Any, proc: str = "/proc") -> None:
        self._handle = handle
        self._proc = proc
        structure = library.struct("c_nvmlAccountingStats_t")
        peak, started = structure.maxMemoryUsage.offset, structure.startTime.offset
        # The two fields that count, at the offsets that the bindings give; their attributes cost more.
        self._unpack = Struct(f"={peak}xQ{started - peak - 8}xQ").unpack_from
        self._stats = structure()
        self._address = ctypes.byref(self._stats)
        found = library.function("nvmlDeviceGetAccountingStats")
        self._get = found[1] if found else None
        self._known: dict[int, _Known] = {}
        #: What the driver answered for each process at its last figure; ``None`` where it knew nothing of it yet.
        self._answers: dict[int, tuple[int, int] | None] = {}
        self._mark_time()

    def _mark_time(self) -> None:
        """The time of the reset on the clocks of the kernel (seconds) and of the driver (µs since 1970)."""
        self._reset_at = procfs.boot_clock()
        self._reset_wall = time.time_ns() // 1000

    @staticmethod
    def state(library: Library, handle: Any) -> bool | None:
        """Whether it is on for this card; ``None`` where the card or the driver has none, or does not say."""
        try:
            return bool(library.ask("nvmlDeviceGetAccountingMode", handle))
        except nvml_library.DriverFault:
            return None

    def _ask(self, pid: int) -> tuple[int, int] | None:
        """Peak of a process in bytes and when it started, on the driver's clock; ``None`` where it is not known."""
        if self._get is None or self._get(self._handle, pid, self._address):
            return None
        peak, started = self._unpack(self._stats)
        return None if peak >= 1 << 63 else (peak, started)

    def stands(self, pids: Collection[int]) -> bool:
        """Whether the driver still answers what it did at the last figure of each of these processes.

        Who also holds what it held then has the same figure, unless marks were set back meanwhile.
        """
        answers = self._answers
        return all(pid in answers and self._ask(pid) == answers[pid] for pid in pids)

    def figure(self, pid: int, held: int) -> Figure:
        """What a process holds, with its peak as far as the driver knows it."""
        was_absent = self._answers.get(pid, ()) is None
        self._answers[pid] = answer = self._ask(pid)
        if answer is None:
            return Figure(held, held)
        peak, started = answer
        known = self._known.get(pid)
        if known is None or known.started != started:
            new = was_absent or self._new(pid, started)
            known = self._known[pid] = _Known(started, 0 if new else peak)
        known.peak = peak = max(peak, held)
        # A process that stands still where it was highest has its exact peak as well.
        known.reached = known.reached or held >= peak > 0
        return Figure(held, held, mark=peak) if known.sure else Figure(held, held, most=peak)

    def _new(self, pid: int, started: int) -> bool:
        """Whether a process came onto the card after the last reset, so that its whole peak is of this time."""
        if started >= self._reset_wall:
            return True
        stat = procfs.read_stat(pid, self._proc)
        return stat is not None and procfs.boot_clock() - procfs.age(stat) >= self._reset_at + _TICKS

    def left(self, pids: Collection[int]) -> list[int]:
        """Processes that are not asked for any more: they have ended."""
        if len(self._answers) > 2 * len(pids):
            self._answers = {pid: answer for pid, answer in self._answers.items() if pid in pids}
        return [pid for pid in self._known if pid not in pids]

    def last(self, pid: int) -> Figure | None:
        """The figure of a process that has ended, once; ``None`` when the driver did not account for it."""
        known = self._known.pop(pid, None)
        if known is None:
            return None
        answer = self._ask(pid)
        if answer is not None and answer[1] == known.started:
            known.peak = answer[0]
        return Figure(0, 0, mark=known.peak) if known.sure else Figure(0, 0, most=known.peak)

    def reset(self) -> None:
        """Peaks count from now on."""
        self._mark_time()
        for pid, known in list(self._known.items()):
            answer = self._ask(pid)
            if answer is None or answer[1] != known.started:
                del self._known[pid]
            else:
                known.base = known.peak = answer[0]
                known.reached = False
