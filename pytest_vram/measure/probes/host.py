"""Host memory: exact marks of each process from ``/proc/PID/status``.

Writing 5 to ``/proc/PID/clear_refs`` sets ``VmHWM`` back to the present ``VmRSS``; from then on it is the kernel's own
high-water mark. A spike that rises and falls in the microseconds between reading a mark and setting it back is lost,
and the kernel counts pages by processor, so that a mark is true to about 128 KiB for each processor; nothing else is
missed.
"""

from __future__ import annotations

import os
from collections.abc import Collection

from pytest_vram.measure import procfs
from pytest_vram.measure.device import DeviceInfo
from pytest_vram.measure.probes.base import Figure, Snapshot, Sources

_NO_RESET = "its high-water mark may not be set back by this user, so its peak is the largest sample"
#: The kernel counts pages by processor and adds up late, so that marks may move by this much: bytes.
_SLACK = 1 << 20


class MarkedProcess:
    """Kept descriptors of one process. Opening them for each read would cost five times as much.

    :ivar marked: whether its high-water mark can be set back, so that it is exact within a window.
    :ivar disturbed: whether its mark fell since the last reset without one of ours.
    """

    __slots__ = ("_clear", "_last", "_proc", "_status", "disturbed", "marked", "pid")

    def __init__(self, pid: int, proc: str = "/proc") -> None:
        self.pid = pid
        self._proc = proc
        self._clear = -1
        self._status = os.open(f"{proc}/{pid}/status", os.O_RDONLY | os.O_CLOEXEC)
        self._last = 0
        self.disturbed = False
        self.marked = True
        try:
            self._clear = os.open(f"{proc}/{pid}/clear_refs", os.O_WRONLY | os.O_CLOEXEC)
        except OSError:
            self.marked = False

    def read(self) -> procfs.Memory | None:
        """Its memory, or ``None`` when it has ended (a zombie has no memory).

        :raises PermissionError: it may not be read any more.
        """
        try:
            memory = procfs.parse_memory(os.pread(self._status, 8192, 0))
        except PermissionError:
            raise
        except OSError:
            return None
        if memory is not None:
            if memory.mark < self._last - _SLACK and not self._exiting():
                self.disturbed = True
            self._last = memory.mark
        return memory

    def _exiting(self) -> bool:
        """Whether it is on its way out: while its memory is given back the kernel shows a falling mark."""
        stat = procfs.read_stat(self.pid, self._proc)
        return stat is None or bool(stat.flags & procfs.EXITING) or stat.state in "ZX"

    def reset(self) -> None:
        """Set its high-water mark back to what it holds now."""
        if self._clear < 0:
            return
        self._last, self.disturbed = 0, False
        try:
            os.write(self._clear, b"5")
        except ProcessLookupError:
            pass  # it ended; the next read says so
        except OSError:
            self.marked = False

    def close(self) -> None:
        """Close the descriptors."""
        for fd in (self._status, self._clear):
            if fd >= 0:
                os.close(fd)
        self._status = self._clear = -1


class HostProbe:
    """Host memory of processes, and of the machine."""

    per_process = True
    counts_pytest = False
    sources = Sources(mark="host-hwm", sampled="host-rss", now="host-anon", device="host-meminfo")
    note: str | None = None

    def __init__(self, info: DeviceInfo, proc: str = "/proc") -> None:
        self.info = info
        self._proc = proc
        self._processes: dict[int, MarkedProcess] = {}
        try:
            self._meminfo = os.open(f"{proc}/meminfo", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._meminfo = -1

    def read(self, pids: Collection[int]) -> Snapshot:
        """Read each process and the machine; one that could not be read is in ``faults`` with the reason."""
        figures: dict[int, Figure] = {}
        gone: list[int] = []
        faults: dict[int, str] = {}
        for pid in pids:
            try:
                process = self._processes.get(pid)
                if process is None:
                    process = self._processes[pid] = MarkedProcess(pid, self._proc)
                memory = process.read()
            except (FileNotFoundError, ProcessLookupError):
                gone.append(pid)
                continue
            except OSError as error:
                faults[pid] = f"the memory of process {pid} cannot be read: {error.strerror}"
                continue
            if memory is None:
                gone.append(pid)
                continue
            figures[pid] = Figure(
                now=memory.anonymous + memory.swap,
                held=memory.resident,
                mark=memory.mark if process.marked else None,
                disturbed=process.disturbed,
            )
        for pid in [pid for pid in self._processes if pid not in figures]:
            self._processes.pop(pid).close()
        return Snapshot(figures, self._machine(), tuple(gone), faults)

    def _machine(self) -> Figure | None:
        if self._meminfo < 0:
            return None
        try:
            read = procfs.parse_machine_memory(os.pread(self._meminfo, 512, 0))
        except OSError:
            return None
        if read is None:
            return None
        total, available = read
        return Figure(now=total - available, held=total - available)

    def reset(self) -> None:
        """Set the marks of all processes of the last read back."""
        for process in self._processes.values():
            process.reset()

    def unmarked(self) -> str | None:
        """Why the peaks of some process are samples only, or ``None`` when every mark is exact."""
        for process in self._processes.values():
            if not process.marked:
                return f"process {process.pid}: {_NO_RESET}"
        return None

    def settle(self) -> None:
        """Figures by process need no baseline."""

    def close(self) -> None:
        """Close every descriptor."""
        for process in self._processes.values():
            process.close()
        self._processes.clear()
        if self._meminfo >= 0:
            os.close(self._meminfo)
            self._meminfo = -1
