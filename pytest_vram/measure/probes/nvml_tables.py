"""The two things that are read of a card all the time, through kept buffers: its memory, and its process lists.

The bindings' own functions make new arrays at each call and ask twice; these call the same entry points with the
bindings' structures, once.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from struct import Struct
from typing import Any, NamedTuple

from pytest_vram.measure.probes.nvml_library import (
    ABSENT,
    INSUFFICIENT_SIZE,
    NOT_AVAILABLE,
    DriverFault,
    Function,
    Library,
    OldProcess,
)

_ROOM = 64
#: Reads between two looks for clients of CUDA's multi-process service while there are none.
_SELDOM = 64
#: Times that a list may outgrow its buffer within one read.
_TRIES = 5


class CardMemory(NamedTuple):
    """Bytes of a card. :ivar reserved: what the driver keeps for itself, not within ``used``; ``None`` where the
    driver does not tell it apart, and it is within ``used``."""

    total: int
    used: int
    reserved: int | None


class MemoryTable:
    """A card's memory by the newest entry point that it answers.

    :raises DriverFault: it answers none.
    """

    def __init__(self, library: Library, handle: Any) -> None:
        self._library = library
        self._handle = handle
        self._get: Function | None = None
        self._apart = True
        found = library.function("nvmlDeviceGetMemoryInfo_v2")
        if found is not None:
            try:
                struct = library.struct("c_nvmlMemory_v2_t")()
                struct.version = library.struct("nvmlMemory_v2")
                self._use(found[1], struct)
                return
            except DriverFault as fault:
                if fault.code not in ABSENT:
                    raise
        self._apart = False
        found = library.function("nvmlDeviceGetMemoryInfo")
        if found is None:
            raise DriverFault(13, "the driver has no nvmlDeviceGetMemoryInfo")
        self._use(found[1], library.struct("c_nvmlMemory_t")())

    def _use(self, get: Function, struct: Any) -> None:
        self._get, self._struct, self._address = get, struct, ctypes.byref(struct)
        self.read()

    @property
    def version(self) -> int:
        """2 where reserved memory is told apart, else 1."""
        return 2 if self._apart else 1

    def read(self) -> CardMemory:
        """What is in use now.

        :raises DriverFault: it could not be read.
        """
        assert self._get is not None
        code = self._get(self._handle, self._address)
        Library.answers += 1
        if code:
            raise DriverFault(code, self._library.text(code))
        struct = self._struct
        return CardMemory(struct.total, struct.used, struct.reserved if self._apart else None)


class ProcessList:
    """One list of processes (compute, graphics or clients of the multi-process service) of one card.

    :ivar kind: as in the name of its entry point. :ivar version: of the entry point; ``None`` where there is none.
    """

    def __init__(self, library: Library, handle: Any, kind: str) -> None:
        self.kind = kind
        self._library = library
        self._handle = handle
        name = f"nvmlDeviceGet{kind}RunningProcesses"
        self._count = ctypes.c_uint()
        self._size = ctypes.byref(self._count)
        try:
            # The second and third versions have the same layout, and the bindings have had it under three names.
            entry = library.struct("c_nvmlProcessInfo_v2_t", "c_nvmlProcessInfo_v3_t", "c_nvmlProcessInfo_t")
            self._found = library.function(f"{name}_v3", f"{name}_v2", name)
        except DriverFault:
            entry = OldProcess
            self._found = library.function(name)
        self.version: int | None = None
        if self._found is None:
            return
        self.version = int(self._found[0][-1]) if self._found[0][-3:-1] == "_v" else 1
        self._entry: Any = entry if self.version > 1 else OldProcess
        used = self._entry.usedGpuMemory.offset
        self._layout = Struct(f"=I{used - 4}xQ{ctypes.sizeof(self._entry) - used - 8}x")
        self._grow(_ROOM)

    def _grow(self, room: int) -> None:
        self._room = room
        self._array = (self._entry * room)()
        self._bytes = memoryview((ctypes.c_ubyte * ctypes.sizeof(self._array)).from_buffer(self._array))

    def read(self) -> dict[int, int | None]:
        """PID → bytes, ``None`` where the driver does not say.

        A process with contexts in several MIG slices is listed for each; listed twice for one, it is the same memory.

        :raises DriverFault: it could not be read; :data:`~nvml_library.ABSENT` where there is no such list.
        """
        if self._found is None:
            raise DriverFault(13, f"the driver has no list of {self.kind} processes")
        get, code = self._found[1], INSUFFICIENT_SIZE
        for _ in range(_TRIES):
            self._count.value = self._room
            code = get(self._handle, self._size, self._array)
            Library.answers += 1
            if code != INSUFFICIENT_SIZE:
                break
            self._grow(max(2 * self._room, self._count.value + 16))
        if code:
            raise DriverFault(code, self._library.text(code))
        count = min(self._count.value, self._room)
        found: dict[int, int | None] = {}
        parts: dict[tuple[int, int, int], int] | None = None
        for pid, used in self._pairs(count):
            if used == NOT_AVAILABLE:
                found.setdefault(pid, None)
            elif pid not in found:
                found[pid] = used
            else:
                parts = parts if parts is not None else self._parts(count)
                found[pid] = sum(part for (owner, _, _), part in parts.items() if owner == pid)
        return found

    def _pairs(self, count: int) -> Iterator[tuple[int, int]]:
        """PID and bytes of each entry, at the offsets that the bindings give; their attributes cost more."""
        return self._layout.iter_unpack(self._bytes[: count * self._layout.size])

    def _parts(self, count: int) -> dict[tuple[int, int, int], int]:
        parts: dict[tuple[int, int, int], int] = {}
        for entry in self._array[:count]:
            if entry.usedGpuMemory != NOT_AVAILABLE:
                key = (entry.pid, getattr(entry, "gpuInstanceId", 0), getattr(entry, "computeInstanceId", 0))
                parts[key] = max(parts.get(key, 0), entry.usedGpuMemory)
        return parts


class ProcessTable:
    """All processes of a card: compute, graphics (Vulkan programs) and clients of the multi-process service.

    A process in two lists has one memory, not two.
    """

    def __init__(self, library: Library, handle: Any) -> None:
        self._compute = ProcessList(library, handle, "Compute")
        self._graphics: ProcessList | None = ProcessList(library, handle, "Graphics")
        self._shared: ProcessList | None = ProcessList(library, handle, "MPSCompute")
        self._until_shared = 0

    @property
    def version(self) -> int | None:
        """Of the entry point for compute processes."""
        return self._compute.version

    def read(self) -> dict[int, int | None]:
        """PID → bytes, ``None`` where the driver does not say.

        :raises DriverFault: the list of compute processes could not be read.
        """
        found = self._compute.read()
        if self._graphics is not None:
            try:
                _unite(found, self._graphics.read())
            except DriverFault as fault:
                if fault.code not in ABSENT:
                    raise
                self._graphics = None
        self._until_shared -= 1
        if self._shared is not None and self._until_shared < 0:
            try:
                clients = self._shared.read()
            except DriverFault:
                # Servers of compute alone lack it, and so do MIG slices.
                self._shared = None
            else:
                _unite(found, clients)
                self._until_shared = 0 if clients else _SELDOM
        return found


def _unite(found: dict[int, int | None], more: dict[int, int | None]) -> None:
    for pid, used in more.items():
        known = found.get(pid)
        found[pid] = used if known is None else known if used is None else max(known, used)
