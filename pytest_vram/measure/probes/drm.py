"""AMD and Intel cards on Linux: what each process holds, by the statistics of its DRM clients.

The kernel prints them in ``/proc/PID/fdinfo/FD`` of every descriptor of a card ("DRM client usage stats" in its
documentation). A client may be open at many descriptors, and in several processes: it counts once. Memory in the GTT
is host memory; ordinary staging buffers lie there too, so that only what the driver calls evicted is spill.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Collection
from typing import NamedTuple

from pytest_vram.measure import procfs
from pytest_vram.measure.device import DeviceInfo
from pytest_vram.measure.probes.base import Figure, Snapshot, Sources

_NODES = "/dev/dri/"
_UNITS = {b"": 1, b"KiB": 1 << 10, b"MiB": 1 << 20, b"GiB": 1 << 30}
#: Reads after which the descriptors of a process are listed again though their number has not changed.
_AGAIN = 16
#: The same for a process that had no descriptor of this card.
_AGAIN_WITHOUT = 4
#: Bytes that strangers' figures may be out of date by, and nanoseconds where there is no figure of the device.
_MOVED, _STRANGERS_EVERY = 16 << 20, 2_000_000_000
_SOURCES = Sources(mark="drm-fdinfo", sampled="drm-fdinfo", now="drm-fdinfo", device="drm-sysfs")


class Client(NamedTuple):
    """One DRM client. :ivar device: PCI address. :ivar id: its number, one for each device.

    :ivar local: bytes in the card's own memory. :ivar host: bytes in host memory that the card uses.
    :ivar evicted: bytes that belong on the card and lie in host memory, ``None`` where the driver does not say.
    """

    device: str
    id: str
    local: int
    host: int
    evicted: int | None


#: The lines that count: which card and client, memory by region, and what AMD's driver says of spill.
_LINE = re.compile(
    rb"^(?:drm-(pdev|client-id|driver)|drm-(memory|total|resident)-((?:vram|local|gtt|system|stolen)\w*)"
    rb"|amd-(evicted|requested)-vram):[ \t]*(\S+)(?: (\S+))?[ \t]*$",
    re.MULTILINE,
)


def parse(text: bytes) -> Client | None:
    """Read the statistics of one descriptor; ``None`` when it is of no DRM client."""
    names: dict[bytes, bytes] = {}
    regions: dict[bytes, dict[bytes, int]] = {}
    amd: dict[bytes, int] = {}
    for name, kind, region, spill, value, unit in _LINE.findall(text):
        if name:
            names[name] = value
            continue
        factor = _UNITS.get(unit)
        if factor is None or not value.isdigit():
            continue
        if spill:
            amd[spill] = int(value) * factor
        else:
            regions.setdefault(region, {})[kind] = int(value) * factor
    device, identity = names.get(b"pdev"), names.get(b"client-id")
    if device is None or identity is None:
        return None
    local = host = total = 0
    for region, sizes in regions.items():
        size = sizes.get(b"resident", sizes.get(b"memory", sizes.get(b"total", 0)))
        if region.startswith((b"vram", b"local")):
            local += size
            total += sizes.get(b"total", size)
        else:
            host += size
    evicted = amd.get(b"evicted")
    if evicted is None and (amd or names.get(b"driver") == b"amdgpu"):
        # Elsewhere the total also holds buffers that were never filled, and says nothing of spill.
        evicted = max(0, amd.get(b"requested", total) - local)
    return Client(_ascii(device).lower(), _ascii(identity), local, host, evicted)


def _ascii(value: bytes) -> str:
    return value.decode("ascii", "replace")


class _Process:
    """The clients of one process on one card; one descriptor of each is kept open and read."""

    def __init__(self, pid: int, proc: str, address: str) -> None:
        self._folder = f"{proc}/{pid}"
        self._address = address
        self._files: dict[str, int] = {}
        self._size = -1
        self._age = 0

    def clients(self) -> list[Client]:
        """Its clients, each once.

        :raises OSError: it has ended, or may not be read.
        """
        # Since Linux 6.2 the size of the folder is the number of descriptors.
        size = os.stat(f"{self._folder}/fd").st_size
        self._age += 1
        if size == self._size and self._age < (_AGAIN if self._files else _AGAIN_WITHOUT):
            found = self._kept()
            if found is not None:
                return found
        self._size, self._age = size, 0
        return self._scan()

    def _kept(self) -> list[Client] | None:
        """Read the kept descriptors; ``None`` when one of them is not what it was."""
        found: list[Client] = []
        for fd in self._files.values():
            try:
                client = parse(os.pread(fd, 8192, 0))
            except OSError:
                return None
            if client is None or client.device != self._address:
                return None
            found.append(client)
        return found

    def _scan(self) -> list[Client]:
        """Look at every descriptor, and keep one of each client.

        :raises OSError: it has ended, or may not be read.
        """
        names = os.listdir(f"{self._folder}/fd")
        self.close()
        found: dict[str, Client] = {}
        for name in names:
            try:
                if not os.readlink(f"{self._folder}/fd/{name}").startswith(_NODES):
                    continue
                fd = os.open(f"{self._folder}/fdinfo/{name}", os.O_RDONLY | os.O_CLOEXEC)
            except OSError:
                continue  # closed meanwhile
            client = self._first(fd)
            if client is None or client.device != self._address or client.id in found:
                os.close(fd)
            else:
                found[client.id] = client
                self._files[name] = fd
        return list(found.values())

    def _first(self, fd: int) -> Client | None:
        try:
            return parse(os.pread(fd, 8192, 0))
        except OSError:
            return None

    def close(self) -> None:
        """Close every descriptor."""
        for fd in self._files.values():
            os.close(fd)
        self._files.clear()


class DrmProbe:
    """One AMD or Intel card.

    A client that several processes share is the first one's that is asked for. ROCm's own bookkeeping by process
    (``/sys/class/kfd``) counts where it shows more.

    :param address: PCI address. :param folder: its folder in ``/sys``. :param unified: its memory is the host's.
    :param kfd: the number that ROCm's kernel driver gives it, or ``None``.
    """

    per_process = True
    counts_pytest = True
    sources = _SOURCES
    note: str | None = None

    def __init__(
        self,
        info: DeviceInfo,
        address: str,
        folder: str,
        *,
        unified: bool = False,
        kfd: int | None = None,
        proc: str = "/proc",
        sysfs: str = "/sys",
    ) -> None:
        self.info = info
        self._address = address.lower()
        self._folder = folder
        self._unified = unified
        self._kfd = kfd
        self._proc = proc
        self._kfd_folder = f"{sysfs}/class/kfd/kfd/proc"
        self._processes: dict[int, _Process] = {}
        self._others: dict[int, int] = {}
        self._others_at: tuple[int, int] | None = None
        self._used = [self._open(name) for name in self._names()]

    def _names(self) -> tuple[str, ...]:
        return ("mem_info_vram_used", "mem_info_gtt_used") if self._unified else ("mem_info_vram_used",)

    def _open(self, name: str) -> int:
        try:
            return os.open(f"{self._folder}/{name}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return -1

    def read(self, pids: Collection[int]) -> Snapshot:
        """Read the card and these processes; one that may not be read is in ``faults`` with the reason."""
        device, fault = self._device()
        if fault is not None:
            return Snapshot({}, None, fault=fault, lost=True)
        figures: dict[int, Figure] = {}
        gone: list[int] = []
        faults: dict[int, str] = {}
        spill: dict[int, int] = {}
        counted: set[str] = set()
        for pid in pids:
            try:
                process = self._processes.get(pid)
                if process is None:
                    process = self._processes[pid] = _Process(pid, self._proc, self._address)
                held, evicted = self._sum(process.clients(), counted)
            except OSError as error:
                if self._ended(pid):
                    gone.append(pid)
                else:
                    faults[pid] = f"the open files of process {pid} cannot be read: {error.strerror}"
                continue
            held = max(held, self._rocm(pid))
            figures[pid] = Figure(held, held)
            if evicted:
                spill[pid] = evicted
        for pid in [pid for pid in self._processes if pid not in figures]:
            self._processes.pop(pid).close()
        ours = sum(figure.held for figure in figures.values())
        others = self._strangers(pids, device, ours, counted)
        unlisted = None if device is None or faults else max(0, device.held - ours - sum(others.values()))
        return Snapshot(figures, device, tuple(gone), faults, others=others, unlisted=unlisted, spill=spill)

    def _sum(self, clients: list[Client], counted: set[str]) -> tuple[int, int]:
        held = evicted = 0
        for client in clients:
            if client.id not in counted:
                counted.add(client.id)
                held += client.local + (client.host if self._unified else 0)
                evicted += client.evicted or 0
        return held, 0 if self._unified else evicted

    def _rocm(self, pid: int) -> int:
        if self._kfd is None:
            return 0
        return number(f"{self._kfd_folder}/{pid}/vram_{self._kfd}") or 0

    def _ended(self, pid: int) -> bool:
        stat = procfs.read_stat(pid, self._proc)
        return stat is None or stat.state in "ZX"

    def _device(self) -> tuple[Figure | None, str | None]:
        """The figure of the whole card, where the driver has one; and why it is gone, where it is."""
        if self._used[0] < 0:
            present = os.path.isdir(self._folder)
            return None, None if present else f"{self.info.name} ({self._address}) is gone"
        total = 0
        for fd in self._used:
            if fd < 0:
                continue
            try:
                total += int(os.pread(fd, 64, 0))
            except (OSError, ValueError) as error:
                return None, f"{self.info.name} ({self._address}) cannot be read any more: {error}"
        return Figure(total, total), None

    def _strangers(self, pids: Collection[int], device: Figure | None, ours: int, counted: set[str]) -> dict[int, int]:
        """What other processes hold; looked up again when the part of the card that is not ours has moved."""
        now = time.monotonic_ns()
        rest = device.held - ours if device is not None else 0
        if self._others_at is not None:
            then, before = self._others_at
            fresh = abs(rest - before) < _MOVED if device is not None else now - then < _STRANGERS_EVERY
            if fresh:
                return {pid: held for pid, held in self._others.items() if pid not in pids}
        self._others_at = (now, rest)
        self._others = {}
        for pid in procfs.pids(self._proc):
            if pid in pids:
                continue
            try:
                process = _Process(pid, self._proc, self._address)
            except OSError:
                continue  # another user's, or it has ended
            try:
                held, _ = self._sum(process.clients(), counted)
            except OSError:
                continue
            finally:
                process.close()
            held = max(held, self._rocm(pid))
            if held:
                self._others[pid] = held
        return dict(self._others)

    def reset(self) -> None:
        """There are no marks."""

    def settle(self) -> None:
        """Figures by process need no baseline; what strangers hold is looked up again."""
        self._others_at = None

    def close(self) -> None:
        """Close every descriptor."""
        for process in self._processes.values():
            process.close()
        self._processes.clear()
        for fd in self._used:
            if fd >= 0:
                os.close(fd)
        self._used = [-1]


def number(path: str) -> int | None:
    """The number in a file of ``/sys``, or ``None``."""
    try:
        with open(path) as stream:
            return int(stream.read().strip(), 0)
    except (OSError, ValueError):
        return None
