"""Memory that a scripted backend takes with each generation, as a server with a leak does."""

from __future__ import annotations

import contextlib
import mmap
import sys
import threading
import time
from collections.abc import Iterator

from pytest_vram.testing.scripted.recording import Asked
from pytest_vram.testing.scripted.script import Script


class Holder:
    """Takes memory for real, page by page, and keeps it. :ivar held: bytes."""

    def __init__(self, script: Script) -> None:
        self.held = 0
        self._script = script
        self._blocks: list[mmap.mmap] = []
        self._lock = threading.Lock()
        self._last = time.monotonic()
        self._closing = threading.Event()
        if script.hold and script.hold_idle is not None:
            threading.Thread(target=self._give_back, daemon=True).start()

    def turn(self) -> None:
        """One more generation."""
        with self._lock:
            self._last = time.monotonic()
            size = min(self._script.hold, self._script.hold_most - self.held)
            if size <= 0:
                return
            self._blocks.append(_taken(size))
            self.held += size

    @contextlib.contextmanager
    def during(self, asked: Asked) -> Iterator[None]:
        """Hold what this generation takes for itself, while it is answered."""
        burst = self._script.burst
        due = burst is not None and asked.role == "user" and asked.said.startswith(burst.said)
        block = _taken(burst.size) if burst is not None and due and asked.before >= burst.after else None
        try:
            yield
        finally:
            if block is not None:
                block.close()

    def release(self) -> None:
        """Give everything back."""
        with self._lock:
            for block in self._blocks:
                block.close()
            self._blocks.clear()
            self.held = 0

    def close(self) -> None:
        """Give everything back, for good."""
        self._closing.set()
        self.release()

    def _give_back(self) -> None:
        idle = self._script.hold_idle
        assert idle is not None
        while not self._closing.wait(max(idle / 4, 0.01)):
            with self._lock:
                due = self._blocks and time.monotonic() - self._last >= idle
            if due:
                self.release()


def _taken(size: int) -> mmap.mmap:
    block = _block(size)
    for at in range(0, size, mmap.PAGESIZE):
        block[at] = 1  # a page that was never written is not resident
    return block


def _block(size: int) -> mmap.mmap:
    """Memory that is given back to the system whole, unlike what an allocator keeps; private, as a server's is."""
    if sys.platform == "win32":
        return mmap.mmap(-1, size)
    return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
