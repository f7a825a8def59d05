"""Ticks that do not drift, on the kernel's timer and on the event loop's own."""

from __future__ import annotations

import asyncio
import os
import select
import time
from collections.abc import Callable

import pytest

from pytest_vram.keeper.ticker import Ticker
from pytest_vram.measure import syscalls

MS = 1_000_000


@pytest.fixture(params=["timerfd", "event loop"])
def timers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "event loop":
        monkeypatch.setattr(syscalls, "timer", lambda: -1)
    else:
        timer = syscalls.timer()
        if timer < 0:
            pytest.skip("this kernel has no timerfd")
        os.close(timer)
    return str(request.param)


def run(ticker: Ticker, until: Callable[[], bool]) -> None:
    """Let it tick until something is so."""

    async def both() -> None:
        task = asyncio.ensure_future(ticker.run())
        while not until() and not task.done():
            await asyncio.sleep(0.001)
        if task.done():
            task.result()
        task.cancel()
        await asyncio.wait({task})

    asyncio.run(asyncio.wait_for(both(), 20))


@pytest.mark.usefixtures("timers")
def test_periods_add_up_to_the_time_that_passed() -> None:
    """However late each tick comes, the periods that are told are those that passed: nothing drifts."""
    told: list[int] = []
    ticker = Ticker(2 * MS, 100 * MS, told.append)
    ticker.fast()
    began = time.monotonic_ns()
    over: list[int] = []

    def enough() -> bool:
        over[:] = [time.monotonic_ns() - began]
        return sum(told) >= 50

    run(ticker, enough)
    assert all(periods >= 1 for periods in told)
    assert 50 <= sum(told) <= over[0] // (2 * MS)


@pytest.mark.usefixtures("timers")
def test_what_was_missed_is_counted() -> None:
    """While the loop is held up for 40 ms nothing ticks, and then at least 19 periods of 2 ms are told at once."""
    told: list[int] = []

    def tick(periods: int) -> None:
        told.append(periods)
        if len(told) == 2:
            time.sleep(0.04)

    ticker = Ticker(2 * MS, 100 * MS, tick)
    ticker.fast()
    run(ticker, lambda: len(told) >= 4)
    assert told[2] >= 19


@pytest.mark.usefixtures("timers")
def test_slow_ticks_leave_time_for_others() -> None:
    """Where each tick takes longer than a period, whoever else waits for the loop has many turns between two of them."""
    told: list[int] = []
    turns = 0

    def tick(periods: int) -> None:
        told.append(periods)
        time.sleep(0.05)

    ticker = Ticker(10 * MS, 100 * MS, tick)
    ticker.fast()

    async def drive() -> None:
        nonlocal turns
        task = asyncio.ensure_future(ticker.run())
        while len(told) < 1:
            await asyncio.sleep(0.001)
        while len(told) < 4:
            await asyncio.sleep(0)
            turns += 1
        task.cancel()
        await asyncio.wait({task})

    asyncio.run(asyncio.wait_for(drive(), 20))
    assert turns > 30
    assert all(periods >= 5 for periods in told[2:])


@pytest.mark.usefixtures("timers")
def test_after_a_slow_tick_it_is_as_fast_as_before() -> None:
    """One tick that takes long changes nothing for those after it."""
    told: list[int] = []

    def tick(periods: int) -> None:
        told.append(periods)
        if len(told) == 2:
            time.sleep(0.03)

    ticker = Ticker(5 * MS, 100 * MS, tick)
    ticker.fast()
    run(ticker, lambda: len(told) >= 4)
    began, count = time.monotonic_ns(), len(told)
    run(ticker, lambda: len(told) >= count + 10)
    assert sum(told[count:]) <= 2 + (time.monotonic_ns() - began) // (5 * MS)


@pytest.mark.usefixtures("timers")
def test_fast_and_slow() -> None:
    """It begins slowly; a call makes it fast at once, and another slow again."""
    told: list[int] = []
    ticker = Ticker(MS, 3_600_000 * MS, told.append)

    async def drive() -> None:
        task = asyncio.ensure_future(ticker.run())
        await asyncio.sleep(0.02)
        assert not told
        ticker.fast()
        ticker.fast()
        while len(told) < 3:
            await asyncio.sleep(0.001)
        ticker.slow()
        count = len(told)
        await asyncio.sleep(0.02)
        assert len(told) <= count + 1
        task.cancel()
        await asyncio.wait({task})

    asyncio.run(asyncio.wait_for(drive(), 20))


@pytest.mark.usefixtures("timers")
def test_a_tick_that_fails_ends_it() -> None:
    """What a tick raises is raised where it runs, once; the descriptor is closed."""
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0

    def tick(periods: int) -> None:
        raise OSError(f"after {periods}")

    ticker = Ticker(MS, MS, tick)
    with pytest.raises(OSError, match="after"):
        run(ticker, lambda: False)
    if before:
        assert len(os.listdir("/proc/self/fd")) == before


def test_a_timer_of_the_kernel() -> None:
    """It is readable after its time and tells how often it ran out; a time that cannot be is an error."""
    timer = syscalls.timer()
    if timer < 0:
        pytest.skip("this kernel has no timerfd")
    try:
        syscalls.set_timer(timer, MS)
        assert select.select([timer], [], [], 5)[0]
        assert int.from_bytes(os.read(timer, 8), "little") >= 1
        with pytest.raises(OSError, match="Invalid argument"):
            syscalls.set_timer(timer, -5)
    finally:
        os.close(timer)
