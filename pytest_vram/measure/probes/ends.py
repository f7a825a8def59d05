"""Which of the processes that are asked for have ended, for one system call per read."""

from __future__ import annotations

import os
import select
from collections.abc import Collection

from pytest_vram.measure import procfs


class Ends:
    """Watches processes by their descriptors (``pidfd_open``), which stay true when a PID is used again.

    Where the kernel or a sandbox has no such descriptors, ``/proc/PID/stat`` is read instead.
    """

    def __init__(self, proc: str = "/proc") -> None:
        self._proc = proc
        self._asked: Collection[int] = ()
        self._fds: dict[int, int] = {}
        self._pid_of: dict[int, int] = {}
        self._plain: set[int] = set()
        self._ended: set[int] = set()
        self._poll = select.poll() if hasattr(select, "poll") else None
        self._can = self._poll is not None and hasattr(os, "pidfd_open") and proc == "/proc"

    def follow(self, pids: Collection[int]) -> None:
        """Watch these processes from now on, and no others."""
        if pids == self._asked:
            return
        self._asked = list(pids)
        wanted = set(pids)
        for pid in self._fds.keys() - wanted:
            self._drop(pid)
        self._plain &= wanted
        self._ended &= wanted
        for pid in wanted - self._fds.keys() - self._plain - self._ended:
            self._watch(pid)

    def _watch(self, pid: int) -> None:
        if self._can:
            try:
                fd = os.pidfd_open(pid)
            except ProcessLookupError:
                self._ended.add(pid)
                return
            except OSError:
                pass
            else:
                self._fds[pid], self._pid_of[fd] = fd, pid
                assert self._poll is not None
                self._poll.register(fd, select.POLLIN)
                return
        self._plain.add(pid)

    def _drop(self, pid: int) -> None:
        fd = self._fds.pop(pid)
        del self._pid_of[fd]
        assert self._poll is not None
        self._poll.unregister(fd)
        os.close(fd)

    def ended(self) -> set[int]:
        """Those of the watched processes that have ended; one that is a zombie has."""
        if self._fds:
            assert self._poll is not None
            for fd, _ in self._poll.poll(0):
                pid = self._pid_of[fd]
                self._drop(pid)
                self._ended.add(pid)
        for pid in list(self._plain):
            stat = procfs.read_stat(pid, self._proc)
            if stat is None or stat.state in "ZX":
                self._plain.discard(pid)
                self._ended.add(pid)
        return self._ended

    def close(self) -> None:
        """Close every descriptor."""
        for pid in list(self._fds):
            self._drop(pid)
        self._asked = ()
