"""Makes the devices of a run smaller than they are, for as long as its keeper lives (``--vram-emulate``).

An RPC device is served by a process: its data limit (``RLIMIT_DATA``) is set so that allocations beyond the size really
fail. Of an NVIDIA card the rest is occupied by a process of our own (:mod:`pytest_vram.keeper.occupy`). Both end with
the keeper, also when it is killed.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import selectors
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from pytest_vram.errors import KeeperError
from pytest_vram.keeper import limits
from pytest_vram.measure import DeviceInfo, procfs
from pytest_vram.measure.emulated import PlayedProbe, emulated
from pytest_vram.measure.probes import Probe
from pytest_vram.measure.probes.rpc import OWN
from pytest_vram.units import mib, written

#: Seconds for a ballast to occupy a card; a driver that has to wake up takes three, 80 GiB are allocated in one.
_OCCUPY_SECONDS = 20.0
#: Stack of a thread where the process has no limit of its own.
_STACK = 8 << 20


class Ballast:
    """What a run did to its devices.

    :ivar pids: processes that occupy cards, which are never members of the run.
    """

    def __init__(self, socket: str) -> None:
        self._path = limits.path_of(socket)
        self._folder = self._path.parent
        self._occupied: dict[str, tuple[int, int]] = {}
        self._processes: list[subprocess.Popen[bytes]] = []

    @property
    def pids(self) -> list[int]:
        """PIDs of the processes that occupy cards."""
        return [process.pid for process in self._processes]

    def play(self, probes: Sequence[Probe], size: int) -> list[Probe]:
        """Make every device of these probes a card of ``size`` bytes; the probes that see it so.

        :raises VramError: it is not possible on one of them; then nothing is changed on any.
        """
        infos = [emulated(probe.info, size) for probe in probes]
        try:
            served = [(info, probe) for info, probe in zip(infos, probes, strict=True) if info.kind == "rpc"]
            if served:
                self._limit([(info, getattr(probe, "pid", 0)) for info, probe in served], size)
            for info in infos:
                if info.kind != "rpc":
                    self._occupied[info.label] = self._occupy(info, size)
        except BaseException:
            self.end()
            raise
        return [
            PlayedProbe(probe, info, self._occupied.get(info.label)) for probe, info in zip(probes, infos, strict=True)
        ]

    def end(self) -> None:
        """Give back what was taken. Calling it twice is fine."""
        if self._path.exists():
            limits.lift(self._path)
        for process in self._processes:
            with process:  # closes its pipes, and waits
                process.kill()
        self._processes.clear()

    # ------------------------------------------------------------ RPC devices

    def _limit(self, served: list[tuple[DeviceInfo, int]], size: int) -> None:
        old: list[limits.Limit] = []
        sizes: list[int] = []
        for info, pid in served:
            limit, most = self._limit_of(info, pid, size)
            old.append(limit)
            sizes.append(most)
        try:
            limits.put(self._path, old, sizes)
        except PermissionError:
            names = " and ".join(f"process {limit.pid}" for limit in old)
            raise _refused(
                served[0][0], size, f"its server ({names}) belongs to another user; start one of your own"
            ) from None
        except ProcessLookupError:
            raise _refused(served[0][0], size, "its server has ended; start it again") from None
        except OSError as error:
            place = f"{error.filename}: " if error.filename else ""
            raise _refused(served[0][0], size, f"a limit could not be set: {place}{error.strerror}") from None

    def _limit_of(self, info: DeviceInfo, pid: int, size: int) -> tuple[limits.Limit, int]:
        """The present limit of a server, and the one under which its clients have ``size`` bytes."""
        import resource

        other = limits.holder(self._folder, pid)
        if other is not None:
            raise _refused(
                info, size, f"another run (its keeper is process {other}) plays a smaller card on it; wait for its end"
            )
        start, memory = limits.started(pid), procfs.read_memory(pid)
        if start is None or memory is None:
            raise _refused(info, size, f"its server (process {pid}) has ended; start it again")
        held = memory.anonymous + memory.swap - OWN
        if held > size:
            raise _refused(
                info, size, f"its server (process {pid}) holds {mib(held)} already; end what uses it, or start it anew"
            )
        try:
            soft, hard = resource.prlimit(pid, resource.RLIMIT_DATA)
        except OSError as error:
            raise _refused(
                info, size, f"the limit of its server (process {pid}) cannot be read: {error.strerror}"
            ) from None
        most = size + own_need(pid)
        for limit in (soft, hard):
            if limit != resource.RLIM_INFINITY and limit < most:
                raise _refused(info, size, f"its server (process {pid}) may allocate only {mib(limit)} as it is")
        return limits.Limit(pid, start, soft, hard), most

    # ------------------------------------------------------------ cards

    def _occupy(self, info: DeviceInfo, size: int) -> tuple[int, int]:
        """Start the process that occupies the rest of a card; its PID and what it holds."""
        if info.uuid is None:
            raise _refused(info, size, "its UUID is not known, so it cannot be told from other cards")
        process = subprocess.Popen(
            [sys.executable, "-P", "-W", "ignore", "-m", "pytest_vram.keeper.occupy", info.uuid, str(size)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": info.uuid},
        )
        self._processes.append(process)
        line = _first_line(process, _OCCUPY_SECONDS)
        try:
            answer = json.loads(line)
            if "error" in answer:
                raise _refused(info, size, str(answer["error"]))
            return process.pid, int(answer["held"])
        except (ValueError, KeyError, TypeError):
            said = "it did not answer in time" if process.poll() is None else f"it ended with {process.poll()}"
            raise _refused(info, size, f"the process that should occupy its rest failed ({said})") from None


def own_need(pid: int) -> int:
    """Bytes of data that an RPC server needs for itself: its heap, and the stacks of the threads that compute.

    Stacks are counted in full by the kernel's limit and hardly ever used, so that a device of a server with many
    threads may give its clients up to that much more than its size.
    """
    return OWN + (_threads(procfs.command_line(pid)) - 1) * _stack(pid)


def _threads(command: Sequence[str]) -> int:
    """Threads that a ``ggml-rpc-server`` computes with, by its command line; its default is half of the machine's."""
    for option, value in itertools.pairwise(command):
        if option in ("-t", "--threads") and value.isdigit():
            return max(1, int(value))
    return max(1, (os.cpu_count() or 1) // 2)


def _stack(pid: int) -> int:
    try:
        text = Path(f"/proc/{pid}/limits").read_text(encoding="ascii", errors="replace")
    except OSError:
        return _STACK
    found = re.search(r"^Max stack size\s+(\d+)", text, re.MULTILINE)
    return int(found[1]) if found else _STACK


def _first_line(process: subprocess.Popen[bytes], seconds: float) -> bytes:
    """The first line that a process prints; what there is of it where it takes longer, or ends."""
    assert process.stdout is not None
    line = b""
    deadline = time.monotonic() + seconds
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while not line.endswith(b"\n") and selector.select(max(0.0, deadline - time.monotonic())):
            piece = os.read(process.stdout.fileno(), 4096)
            if not piece:
                break
            line += piece
    return line


def _refused(info: DeviceInfo, size: int, reason: str) -> KeeperError:
    return KeeperError(f"--vram-emulate={written(size)} cannot be played on {info.label} ({info.name}): {reason}.")
