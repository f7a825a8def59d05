"""Reading single processes, sockets and machine figures from ``/proc``.

Every function takes the root of the file system as ``proc``, so that tests can lay out machines of their own.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Iterator
from typing import NamedTuple

#: Flag of ``/proc/PID/stat`` (``PF_FORKNOEXEC``): forked, and has not executed a program of its own yet.
FORKED_NOT_EXECUTED = 0x40
#: ``PF_EXITING``: on its way out.
EXITING = 0x4
#: ``PF_KTHREAD``: a thread of the kernel.
KERNEL_THREAD = 0x200000

_LISTEN = "0A"


class Stat(NamedTuple):
    """The fields of ``/proc/PID/stat`` that are used here; ``start`` is field 22, in clock ticks since boot.

    ``image`` is where its program, stack and environment lie (fields 26, 28 and 50). A program that is executed gets
    random places, and a fork keeps them: equal images are forks of one process. Empty where the kernel does not tell.
    """

    pid: int
    name: str
    state: str
    parent: int
    session: int
    flags: int
    start: int
    image: tuple[bytes, ...] = ()


def read_stat(pid: int, proc: str = "/proc") -> Stat | None:
    """The process with this PID, or ``None`` when there is none (or this user may not see it)."""
    try:
        with open(f"{proc}/{pid}/stat", "rb") as stream:
            text = stream.read()
    except OSError:
        return None
    # The name is in parentheses and may itself hold spaces and parentheses.
    opening, closing = text.find(b"("), text.rfind(b")")
    fields = text[closing + 2 :].split()
    if opening < 0 or len(fields) < 20:
        return None
    return Stat(
        pid=pid,
        name=text[opening + 1 : closing].decode("utf-8", "replace"),
        state=fields[0].decode(),
        parent=int(fields[1]),
        session=int(fields[3]),
        flags=int(fields[6]),
        start=int(fields[19]),
        # Zeros stand for what this user may not know.
        image=(fields[23], fields[25], fields[47]) if len(fields) > 47 and fields[47] != b"0" else (),
    )


def start_time(pid: int, proc: str = "/proc") -> int:
    """Field 22 of ``/proc/PID/stat``: with the PID it names one process for good, reused PIDs included.

    :raises ProcessLookupError: no such process here.
    """
    stat = read_stat(pid, proc)
    if stat is None:
        raise ProcessLookupError(f"there is no process {pid} in {proc}")
    return stat.start


def alive(pid: int, start: int, proc: str = "/proc") -> bool:
    """Whether the process that began at ``start`` still runs; a zombie does not."""
    stat = read_stat(pid, proc)
    return stat is not None and stat.start == start and stat.state not in "ZX"


def parse_major_faults(stat: bytes) -> int | None:
    """Pages that a process, and children that it waited for, had to wait for until they were read from disk.

    Fields 12 and 13 of a ``/proc/PID/stat`` text; ``None`` where it is none.
    """
    fields = stat[stat.rfind(b")") + 2 :].split()
    return int(fields[9]) + int(fields[10]) if len(fields) > 10 else None


def has_swap(proc: str = "/proc") -> bool:
    """Whether anything can be swapped out on this machine, compressed memory included; true where that is unknown."""
    try:
        with open(f"{proc}/swaps", "rb") as stream:
            return len(stream.read().splitlines()) > 1
    except OSError:
        return True


def reset_mark(pid: int, proc: str = "/proc") -> bool:
    """Set the high-water mark of a process back to what it holds now; whether that was possible."""
    try:
        fd = os.open(f"{proc}/{pid}/clear_refs", os.O_WRONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        os.write(fd, b"5")
    except OSError:
        return False
    finally:
        os.close(fd)
    return True


def randomised(proc: str = "/proc") -> bool:
    """Whether programs are put at random places, so that :attr:`Stat.image` tells one process from another."""
    try:
        with open(f"{proc}/sys/kernel/randomize_va_space") as stream:
            return stream.read().strip() in ("1", "2")
    except OSError:
        return False


def boot_clock() -> float:
    """Seconds since the machine was started: the clock of :attr:`Stat.start`."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def age(stat: Stat) -> float:
    """Seconds since a process was forked; right to one clock tick (10 ms)."""
    return boot_clock() - stat.start / os.sysconf("SC_CLK_TCK")


class Births:
    """The kernel's counter of new processes and threads: while it stands still, there is no new process to look for.

    The counter is the last field of ``/proc/loadavg``, the PID that was given out last. Sandboxes and containers may
    lay a file of their own over it that does not count, so it is tried out first.
    """

    def __init__(self, proc: str = "/proc") -> None:
        self._fd = -1
        try:
            fd = os.open(f"{proc}/loadavg", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return
        if os.fstat(fd).st_dev != os.stat(proc).st_dev:
            os.close(fd)
            return
        self._fd = fd
        before = self.count()
        thread = threading.Thread(target=int)
        thread.start()
        thread.join()
        if before == self.count():
            self.distrust()

    def count(self) -> bytes | None:
        """Equal to the last answer while nothing was born; ``None`` where that cannot be told."""
        if self._fd < 0:
            return None
        try:
            return os.pread(self._fd, 128, 0).rpartition(b" ")[2]
        except OSError:
            return None

    def distrust(self) -> None:
        """It was seen not to count."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1


def pids(proc: str = "/proc") -> list[int]:
    """PIDs of every process that can be seen."""
    return [int(name) for name in os.listdir(proc) if name.isdigit()]


def command_line(pid: int, proc: str = "/proc") -> list[str]:
    """Arguments of a process, empty when they cannot be read."""
    try:
        with open(f"{proc}/{pid}/cmdline", "rb") as stream:
            text = stream.read()
    except OSError:
        return []
    return [part.decode("utf-8", "replace") for part in text.rstrip(b"\0").split(b"\0")] if text else []


def program(pid: int, proc: str = "/proc") -> str | None:
    """Program of a process for people, with its script or its verb; not all its arguments, which may hold secrets."""
    arguments = command_line(pid, proc)
    if not arguments:
        return None
    name = os.path.basename(arguments[0])
    word = arguments[1] if len(arguments) > 1 else ""
    return f"{name} {os.path.basename(word)[:40]}" if word and not word.startswith("-") else name


def environment_value(pid: int, name: str, proc: str = "/proc") -> str | None:
    """A variable of the environment that a process was started with, or ``None``."""
    try:
        with open(f"{proc}/{pid}/environ", "rb") as stream:
            text = stream.read()
    except OSError:
        return None
    prefix = name.encode() + b"="
    for part in text.split(b"\0"):
        if part.startswith(prefix):
            return part[len(prefix) :].decode("utf-8", "replace")
    return None


def children(pid: int, proc: str = "/proc") -> list[int] | None:
    """PIDs of direct children from ``task/*/children``; ``None`` where the kernel has no such file."""
    found: list[int] = []
    try:
        tasks = os.listdir(f"{proc}/{pid}/task")
    except OSError:
        return []
    for task in tasks:
        try:
            with open(f"{proc}/{pid}/task/{task}/children", "rb") as stream:
                found.extend(int(child) for child in stream.read().split())
        except FileNotFoundError:
            if os.path.exists(f"{proc}/{pid}/task/{task}/stat"):
                return None
        except OSError:
            continue
    return found


class Memory(NamedTuple):
    """Memory of one process in bytes, from ``/proc/PID/status``."""

    mark: int
    resident: int
    anonymous: int
    swap: int


def parse_memory(status: bytes) -> Memory | None:
    """Memory lines of ``/proc/PID/status`` (kB there); ``None`` for zombies and kernel threads, which have none."""
    resident = _size(status, b"\nVmRSS:")
    if resident is None:
        return None
    mark, anonymous = _size(status, b"\nVmHWM:"), _size(status, b"\nRssAnon:")
    return Memory(
        mark=resident if mark is None else mark,
        resident=resident,
        anonymous=resident if anonymous is None else anonymous,
        swap=_size(status, b"\nVmSwap:") or 0,
    )


def _size(status: bytes, name: bytes) -> int | None:
    """The figure after a name that begins a line; line breaks in the name of a process are escaped there."""
    at = status.find(name)
    if at < 0:
        return None
    at += len(name)
    return int(status[at : status.index(b"kB", at)]) * 1024


def read_memory(pid: int, proc: str = "/proc") -> Memory | None:
    """Memory of one process; ``None`` when it is gone, has none, or may not be read."""
    try:
        with open(f"{proc}/{pid}/status", "rb") as stream:
            return parse_memory(stream.read())
    except OSError:
        return None


def proportional(pid: int, proc: str = "/proc") -> int | None:
    """Proportional set size (PSS) in bytes from ``smaps_rollup``; ``None`` when it cannot be read.

    Costs about 3 ms for each 300 MB of the process: not for a sampling loop.
    """
    try:
        with open(f"{proc}/{pid}/smaps_rollup", "rb") as stream:
            for line in stream:
                if line.startswith(b"Pss:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        return None
    return None


def shares_memory(first: int, second: int) -> bool:
    """Whether two processes have one address space (a ``vfork`` child before it executes its program).

    Asks ``kcmp``; where that is not possible, equal memory lines decide.
    """
    from pytest_vram.measure import syscalls

    answer = syscalls.same_memory(first, second)
    if answer is not None:
        return answer
    mine = read_memory(first)
    return mine is not None and mine == read_memory(second)


def machine_memory(proc: str = "/proc") -> tuple[int, int] | None:
    """``MemTotal`` and ``MemAvailable`` in bytes, or ``None``."""
    try:
        with open(f"{proc}/meminfo", "rb") as stream:
            return parse_machine_memory(stream.read())
    except OSError:
        return None


def parse_machine_memory(text: bytes) -> tuple[int, int] | None:
    """``MemTotal`` and ``MemAvailable`` of a ``meminfo`` text, in bytes."""
    found: dict[bytes, int] = {}
    for line in text.splitlines():
        name, _, rest = line.partition(b":")
        if name in (b"MemTotal", b"MemAvailable"):
            found[name] = int(rest.split()[0]) * 1024
    if len(found) != 2:
        return None
    return found[b"MemTotal"], found[b"MemAvailable"]


def control_group_limit(proc: str = "/proc", cgroup: str = "/sys/fs/cgroup") -> int | None:
    """The smallest memory limit of this process's control groups in bytes (both versions), or ``None``."""
    limits: list[int] = []
    for folder, names in _memory_groups(proc, cgroup):
        for name in names:
            try:
                with open(f"{folder}/{name}") as stream:
                    text = stream.read().strip()
            except OSError:
                continue
            # Version 1 prints the largest page-aligned number for "no limit".
            if text.isdigit() and int(text) < 1 << 62:
                limits.append(int(text))
    return min(limits, default=None)


def out_of_memory_kills(proc: str = "/proc", cgroup: str = "/sys/fs/cgroup") -> int | None:
    """How often the kernel killed for lack of memory in this process's control group, or ``None``."""
    for folder, _ in _memory_groups(proc, cgroup):
        for name in ("memory.events", "memory.oom_control"):
            try:
                with open(f"{folder}/{name}") as stream:
                    match = re.search(r"^oom_kill (\d+)$", stream.read(), re.MULTILINE)
            except OSError:
                continue
            if match:
                return int(match[1])
    return None


def _memory_groups(proc: str, cgroup: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Folders of this process's memory groups, innermost first, with the names of their limit files."""
    try:
        with open(f"{proc}/self/cgroup") as stream:
            lines = stream.read().splitlines()
    except OSError:
        return
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "":
            yield from _upwards(cgroup, path, ("memory.max",))
        elif "memory" in controllers.split(","):
            yield from _upwards(f"{cgroup}/memory", path, ("memory.limit_in_bytes",))


def _upwards(base: str, path: str, names: tuple[str, ...]) -> Iterator[tuple[str, tuple[str, ...]]]:
    parts = [part for part in path.split("/") if part and part != ".."]
    for length in range(len(parts), -1, -1):
        yield "/".join([base, *parts[:length]]), names


def data_limit(pid: int, proc: str = "/proc") -> int | None:
    """Soft limit on a process's data size in bytes (``prlimit --data``), or ``None`` when there is none."""
    try:
        with open(f"{proc}/{pid}/limits") as stream:
            match = re.search(r"^Max data size\s+(\S+)", stream.read(), re.MULTILINE)
    except OSError:
        return None
    return int(match[1]) if match and match[1].isdigit() else None


class Listener(NamedTuple):
    """A listening TCP socket: ``address`` as the kernel's hexadecimal, ``wildcard`` for all addresses."""

    inode: int
    address: str
    wildcard: bool


def tcp_lines(states: tuple[str, ...], proc: str = "/proc") -> Iterator[list[str]]:
    """Fields of each TCP socket of this network namespace in one of these states, IPv4 and IPv6."""
    for name in ("tcp", "tcp6"):
        try:
            with open(f"{proc}/net/{name}") as stream:
                lines = stream.readlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            if len(fields) >= 10 and fields[3] in states:
                yield fields


def listeners(port: int, proc: str = "/proc") -> list[Listener]:
    """Every listening TCP socket on ``port``, IPv4 and IPv6."""
    found: list[Listener] = []
    for fields in tcp_lines((_LISTEN,), proc):
        address, _, number = fields[1].rpartition(":")
        if int(number, 16) == port:
            found.append(Listener(int(fields[9]), address, set(address) == {"0"}))
    return found


def loopback(listener: Listener) -> bool:
    """Whether a connection to 127.0.0.1 or ::1 can reach this socket."""
    address = listener.address
    # IPv4 as one little-endian word; IPv6 as four; ::ffff:127.x is IPv4 within IPv6.
    return (
        listener.wildcard
        or (len(address) == 8 and address.endswith("7F"))
        or address == "00000000000000000000000001000000"
        or (address.startswith("0000000000000000FFFF0000") and address.endswith("7F"))
    )


def holds_socket(pid: int, inodes: frozenset[int] | set[int], proc: str = "/proc") -> bool | None:
    """Whether a process has one of these sockets open; ``None`` when its descriptors may not be read."""
    wanted = {f"socket:[{inode}]" for inode in inodes}
    try:
        names = os.listdir(f"{proc}/{pid}/fd")
    except PermissionError:
        return None
    except OSError:
        return False
    for name in names:
        try:
            if os.readlink(f"{proc}/{pid}/fd/{name}") in wanted:
                return True
        except OSError:
            continue
    return False


def socket_owners(inodes: set[int], proc: str = "/proc") -> list[int]:
    """PIDs of the visible processes that have one of these sockets open, lowest first."""
    return sorted(pid for pid in pids(proc) if inodes and holds_socket(pid, inodes, proc))
