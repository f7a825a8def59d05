"""The software GPU: memory of an RPC device is memory of the process that serves it."""

from __future__ import annotations

import time
from collections.abc import Collection

from pytest_vram.measure import procfs
from pytest_vram.measure.device import DeviceInfo
from pytest_vram.measure.probes.base import Figure, Snapshot, Sources
from pytest_vram.measure.probes.host import MarkedProcess

#: Nanoseconds between two looks for a device server that has gone.
_LOOK_AGAIN = 1_000_000_000
#: Most that a server holds for itself before its first client: 933,888 bytes were seen.
OWN = 1 << 20


def served_by(endpoint: str, proc: str = "/proc") -> int | str:
    """PID of the process that listens on ``host:port``, or a reason why it is not known."""
    host, _, number = endpoint.rpartition(":")
    if not number.isdigit() or host.strip("[]") not in ("127.0.0.1", "::1", "localhost"):
        return f"{endpoint} is not an address of this machine's loopback (127.0.0.1:PORT)"
    inodes = {found.inode for found in procfs.listeners(int(number), proc) if procfs.loopback(found)}
    if not inodes:
        return f"nothing listens on {endpoint}"
    owners = procfs.socket_owners(inodes, proc)
    if not owners:
        return f"the process that listens on {endpoint} cannot be seen by this user"
    return owners[0]


class RpcProbe:
    """One RPC device.

    The device's memory is the anonymous memory of its server less what is the server's own: the least that it was
    seen to hold, but no more than :data:`OWN`. What it held before beyond that is not taken off, because a server
    keeps some of what it freed and uses it again, so that such a baseline would hide the memory of later clients.
    Pages of its program and libraries are not the device's. The peak is the kernel's mark less the pages of files at
    the time of the read. The server does not say for whom it holds memory, so there is one figure for all.
    """

    per_process = False
    counts_pytest = False
    sources = Sources(mark="rpc-hwm", sampled="rpc-rss", now="rpc-anon", device="rpc-hwm")
    note: str | None = None

    def __init__(self, info: DeviceInfo, endpoint: str, pid: int, proc: str = "/proc") -> None:
        self.info = info
        self.endpoint = endpoint
        self.pid = pid
        self._proc = proc
        self._process: MarkedProcess | None = None
        self._fault: str | None = None
        self._look_at = 0
        self._own = OWN
        self._attach(pid)

    def _attach(self, pid: int) -> None:
        try:
            process = MarkedProcess(pid, self._proc)
            memory = process.read()
        except OSError as error:
            self._lose(f"the memory of process {pid}, which serves {self.endpoint}, cannot be read: {error.strerror}")
            return
        if memory is None:
            process.close()
            self._lose(self._gone(pid))
            return
        self.pid, self._process, self._fault = pid, process, None

    def _gone(self, pid: int) -> str:
        return f"the server of device {self.info.name} (process {pid}) has ended"

    def _lose(self, reason: str) -> None:
        if self._process is not None:
            self._process.close()
        self._process, self._fault = None, reason
        self._look_at = time.monotonic_ns() + _LOOK_AGAIN

    def read(self, pids: Collection[int]) -> Snapshot:
        """Read the device; a server that has ended is looked for again once a second at its address."""
        if self._process is None and time.monotonic_ns() >= self._look_at:
            found = served_by(self.endpoint, self._proc)
            if isinstance(found, int):
                self._attach(found)
            else:
                self._look_at = time.monotonic_ns() + _LOOK_AGAIN
        process = self._process
        if process is None:
            return Snapshot({}, None, fault=self._fault)
        try:
            memory = process.read()
        except OSError as error:
            self._lose(f"the memory of process {self.pid} cannot be read any more: {error.strerror}")
            return Snapshot({}, None, fault=self._fault)
        if memory is None:
            self._lose(self._gone(self.pid))
            return Snapshot({}, None, fault=self._fault)
        self._own = own = min(self._own, memory.anonymous + memory.swap)
        files = memory.resident - memory.anonymous
        held = max(0, memory.anonymous - own)
        figure = Figure(
            now=memory.anonymous + memory.swap - own,
            held=held,
            mark=max(held, memory.mark - files - own) if process.marked else None,
            disturbed=process.disturbed,
        )
        return Snapshot({}, figure, rise=figure)

    def reset(self) -> None:
        """Set the server's mark back."""
        if self._process is not None:
            self._process.reset()

    def settle(self) -> None:
        """What is the server's own is known without a baseline."""

    def close(self) -> None:
        """Close the descriptors."""
        if self._process is not None:
            self._process.close()
            self._process = None
