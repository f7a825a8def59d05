"""Ticks at a steady rate that do not drift.

An event loop wakes up to a millisecond late, because the timeout of ``epoll`` is in whole milliseconds and rounded up;
and a coroutine that sleeps costs more than a sample. The kernel's own interval timer (``timerfd``) has neither fault:
it keeps absolute times and counts what was missed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable

from pytest_vram.measure import syscalls

#: After a tick that takes longer than a period, others have the loop for this part of its time, or for a period.
_REST = 8


class Ticker:
    """Calls ``tick`` at multiples of a period, fast or slow, with the number of periods since the last call.

    :param period: nanoseconds between two ticks while it is fast. :param idle: nanoseconds while it is slow.
    """

    def __init__(self, period: int, idle: int, tick: Callable[[int], None]) -> None:
        self._period = period
        self._idle = max(period, idle)
        self._tick = tick
        self._now = self._idle
        self._timer = -1
        self._handle: asyncio.TimerHandle | None = None
        self._due = 0.0
        self._broken: asyncio.Future[None] | None = None
        #: When a tick began that took longer than a period, ns; 0 where the last one did not.
        self._begun = 0

    async def run(self) -> None:
        """Tick until cancelled, or until ``tick`` raises, which is raised here."""
        loop = asyncio.get_running_loop()
        self._broken = loop.create_future()
        self._timer = syscalls.timer()
        if self._timer >= 0:
            loop.add_reader(self._timer, self._expired)
        self._arm()
        try:
            await self._broken
        finally:
            if self._timer >= 0:
                loop.remove_reader(self._timer)
                os.close(self._timer)
                self._timer = -1
            if self._handle is not None:
                self._handle.cancel()
            self._broken = None

    def fast(self) -> None:
        """From now on tick fast; the first tick comes one period from now."""
        if self._now != self._period:
            self._now = self._period
            self._arm()

    def slow(self) -> None:
        """From now on tick slowly."""
        if self._now != self._idle:
            self._now = self._idle
            self._arm()

    def _arm(self, period: int | None = None) -> None:
        if self._broken is None:
            return
        period = self._now if period is None else period
        if self._timer >= 0:
            syscalls.set_timer(self._timer, period)
            return
        if self._handle is not None:
            self._handle.cancel()
        self._due = time.monotonic() + period / 1e9
        self._handle = asyncio.get_running_loop().call_at(self._due, self._passed)

    def _expired(self) -> None:
        """The kernel's timer ran out, once or more often."""
        with contextlib.suppress(BlockingIOError):
            # It was set anew between its end and this read.
            self._call(int.from_bytes(os.read(self._timer, 8), "little"))

    def _passed(self) -> None:
        """The loop's own timer ran out, where the kernel has none."""
        period = self._now / 1e9
        periods = 1 + max(0, int((time.monotonic() - self._due) / period))
        self._due += periods * period
        self._handle = asyncio.get_running_loop().call_at(self._due, self._passed)
        self._call(periods)

    def _call(self, periods: int) -> None:
        began, before = time.monotonic_ns(), self._begun
        if before:
            periods = max(1, (began - before) // self._now)
        try:
            self._tick(periods)
            took = time.monotonic_ns() - began
            self._begun = began if took >= self._now else 0
            if self._begun:
                # The next one is due already, and so it would be after each: who else waits for the loop comes first.
                self._arm(min(self._now, took // _REST))
            elif before:
                self._arm()
        except Exception as error:  # noqa: BLE001 - whatever it is, it ends the ticks and is raised by run()
            if self._broken is not None and not self._broken.done():
                self._broken.set_exception(error)
