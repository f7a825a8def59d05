"""What a keeper and its guard share: a sign of life, and whether the run is over. Imports next to nothing."""

from __future__ import annotations

import mmap
import struct
import time

_FIELD = struct.Struct("q")


class Pulse:
    """Two numbers in memory that a fork shares; each is written whole by the keeper and read by the guard."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 2 * _FIELD.size)

    def beat(self) -> None:
        """The keeper's loop has turned."""
        _FIELD.pack_into(self._memory, 0, time.monotonic_ns())

    @property
    def last(self) -> int:
        """When the loop turned last, monotonic ns; 0 before it began."""
        return int(_FIELD.unpack_from(self._memory, 0)[0])

    def finish(self) -> None:
        """The run is over: the keeper has nothing to do but to end."""
        _FIELD.pack_into(self._memory, _FIELD.size, 1)

    @property
    def finished(self) -> bool:
        """Whether the run is over."""
        return bool(_FIELD.unpack_from(self._memory, _FIELD.size)[0])
