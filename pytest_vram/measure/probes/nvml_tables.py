"""The two things that are read of a card all the time, through kept buffers: its memory, and its process lists.

The bindings' own functions make new arrays at each call and ask twice; these call the same entry points with the
bindings' structures, once. An idle card answers the same bytes over and over: such an answer is not read again, and the
very object of the read before is given, by which all that follow know it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
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
        self._bytes, self._raw = _bytes_of(struct), b""
        self.read()

    @property
    def version(self) -> int:
        """2 where reserved memory is told apart, else 1."""
        return 2 if self._apart else 1

    def read(self) -> CardMemory:
        """What is in use now; the same object while that does not change.

        :raises DriverFault: it could not be read.
        """
        assert self._get is not None
        code = self._get(self._handle, self._address)
        Library.answers += 1
        if code:
            raise DriverFault(code, self._library.text(code))
        raw = self._bytes.tobytes()
        if raw != self._raw:
            struct = self._struct
            self._raw, self._last = raw, CardMemory(struct.total, struct.used, struct.reserved if self._apart else None)
        return self._last


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
        self._get = self._found[1]
        used = self._entry.usedGpuMemory.offset
        self._layout = Struct(f"=I{used - 4}xQ{ctypes.sizeof(self._entry) - used - 8}x")
        self._grow(_ROOM)

    def _grow(self, room: int) -> None:
        self._room = room
        self._array = (self._entry * room)()
        self._bytes = _bytes_of(self._array)

    def ask(self) -> bytes:
        """The entries as the driver gives them, for :meth:`read`.

        :raises DriverFault: it could not be read; :data:`~nvml_library.ABSENT` where there is no such list.
        """
        if self._found is None:
            raise DriverFault(13, f"the driver has no list of {self.kind} processes")
        code = INSUFFICIENT_SIZE
        for _ in range(_TRIES):
            self._count.value = self._room
            code = self._get(self._handle, self._size, self._array)
            Library.answers += 1
            if code != INSUFFICIENT_SIZE:
                break
            self._grow(max(2 * self._room, self._count.value + 16))
        if code:
            raise DriverFault(code, self._library.text(code))
        return self._bytes[: min(self._count.value, self._room) * self._layout.size].tobytes()

    def read(self, entries: bytes) -> dict[int, int | None]:
        """PID → bytes, ``None`` where the driver does not say.

        A process with contexts in several MIG slices is listed for each; listed twice for one, it is the same memory.
        """
        found: dict[int, int | None] = {}
        parts: dict[tuple[int, int, int], int] | None = None
        # At the offsets that the bindings give; their attributes cost more.
        for pid, used in self._layout.iter_unpack(entries):
            if used == NOT_AVAILABLE:
                found.setdefault(pid, None)
            elif pid not in found:
                found[pid] = used
            else:
                parts = parts if parts is not None else self._parts(entries)
                found[pid] = sum(part for (owner, _, _), part in parts.items() if owner == pid)
        return found

    def _parts(self, entries: bytes) -> dict[tuple[int, int, int], int]:
        parts: dict[tuple[int, int, int], int] = {}
        for entry in (self._entry * (len(entries) // self._layout.size)).from_buffer_copy(entries):
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
        self._raw: tuple[bytes, ...] = ()
        self._found: Mapping[int, int | None] = {}

    @property
    def version(self) -> int | None:
        """Of the entry point for compute processes."""
        return self._compute.version

    def read(self) -> Mapping[int, int | None]:
        """PID → bytes, ``None`` where the driver does not say; the same object while the lists do not change.

        :raises DriverFault: the list of compute processes could not be read.
        """
        compute, graphics, clients = self._compute.ask(), b"", b""
        if self._graphics is not None:
            try:
                graphics = self._graphics.ask()
            except DriverFault as fault:
                if fault.code not in ABSENT:
                    raise
                self._graphics = None
        self._until_shared -= 1
        if self._shared is not None and self._until_shared < 0:
            try:
                clients = self._shared.ask()
                self._until_shared = 0 if clients else _SELDOM
            except DriverFault:
                # Servers of compute alone lack it, and so do MIG slices.
                self._shared = None
        raw = (compute, graphics, clients)
        if raw != self._raw:
            found = self._compute.read(compute)
            if self._graphics is not None:
                _unite(found, self._graphics.read(graphics))
            if self._shared is not None:
                _unite(found, self._shared.read(clients))
            # What lies between the fields may differ by itself.
            if found != self._found:
                self._found = found
            self._raw = raw
        return self._found


def _bytes_of(made: Any) -> memoryview:
    """What a structure or an array of the bindings lies in."""
    return memoryview((ctypes.c_ubyte * ctypes.sizeof(made)).from_buffer(made)).cast("B")


def _unite(found: dict[int, int | None], more: dict[int, int | None]) -> None:
    for pid, used in more.items():
        known = found.get(pid)
        found[pid] = used if known is None else known if used is None else max(known, used)
