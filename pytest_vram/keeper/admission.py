"""Who may run a test now."""

from __future__ import annotations

import asyncio
from collections import deque


class Admission:
    """Who may run a test now: any number at once, or one alone; in the order of asking, so that nobody starves."""

    def __init__(self) -> None:
        self._inside: dict[int, bool] = {}
        self._owners: dict[int, int] = {}
        self._queue: deque[tuple[int, bool, asyncio.Future[int]]] = deque()
        self._next = 0

    async def enter(self, holder: int, exclusive: bool) -> int:
        """Wait for admission; returns the ticket for :meth:`leave`. Tests of the same connection never wait for each
        other: the outer one of two nested tests would wait for ever."""
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        entry = (holder, exclusive, future)
        self._queue.append(entry)
        self._admit()
        try:
            return await future
        except asyncio.CancelledError:
            if entry in self._queue:
                self._queue.remove(entry)
            elif future.done() and not future.cancelled():
                self.leave(future.result())
            self._admit()
            raise

    def leave(self, ticket: int) -> None:
        """Give the admission back."""
        self._inside.pop(ticket, None)
        self._owners.pop(ticket, None)
        self._admit()

    def _admit(self) -> None:
        while self._queue:
            holder, exclusive, future = self._queue[0]
            if future.done():
                self._queue.popleft()
                continue
            others = [alone for ticket, alone in self._inside.items() if self._owners[ticket] != holder]
            if any(others) or (exclusive and others):
                return
            self._queue.popleft()
            self._next += 1
            self._inside[self._next] = exclusive
            self._owners[self._next] = holder
            future.set_result(self._next)
