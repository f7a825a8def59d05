"""Turns at a backend: one request at a time, in the order of asking, over all processes of the run."""

from __future__ import annotations

import asyncio
from collections import deque

from pytest_vram.errors import BackendDied, RequestTimeout


class Turns:
    """The queue of one backend."""

    def __init__(self) -> None:
        self._queue: deque[asyncio.Future[None]] = deque()
        self._taken = False
        self._death: str | None = None

    async def take(self, timeout: float) -> None:
        """Wait for the turn; give it back with :meth:`release`.

        :raises RequestTimeout: others took longer than ``timeout`` seconds. :raises BackendDied: it died meanwhile.
        """
        if self._death is not None:
            raise BackendDied(self._death)
        if not self._taken:
            self._taken = True
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.append(future)
        try:
            await asyncio.wait_for(asyncio.shield(future), timeout)
        except (TimeoutError, asyncio.CancelledError) as error:
            if future.done() and not future.cancelled() and future.exception() is None:
                self.release()
            elif future in self._queue:
                self._queue.remove(future)
            if isinstance(error, TimeoutError):
                raise RequestTimeout(
                    f"The backend serves one request at a time, and its turn did not come within {timeout:g} s."
                ) from None
            raise

    def release(self) -> None:
        """End the turn; the next in the queue has it."""
        self._taken = False
        while self._queue:
            future = self._queue.popleft()
            if not future.done():
                self._taken = True
                future.set_result(None)
                return

    def died(self, sentence: str) -> None:
        """The backend died: whoever waits is told."""
        self._death = sentence
        while self._queue:
            future = self._queue.popleft()
            if not future.done():
                future.set_exception(BackendDied(sentence))
