"""Counters that lie, read through NVIDIA's own bindings: what a window makes of them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator

import pytest

from pytest_vram.measure import PYTEST, Members, Timeline, host_probe, open_probes
from pytest_vram.measure.probes import Probe
from pytest_vram.measure.sanity import READS
from pytest_vram.readings import Measured, Reading, Unmeasurable
from pytest_vram.spec import DeviceSpec
from pytest_vram.testing.fake_nvml import Card, FakeDriver, FakeDriverUnavailable, Script, fake_nvml

GIB = 1 << 30
ME = os.getpid()


@pytest.fixture
def driver() -> Iterator[FakeDriver]:
    try:
        with fake_nvml([Card(total=8 * GIB)]) as made:
            yield made
    except FakeDriverUnavailable as error:
        pytest.skip(str(error))


def _watch(change: Callable[[], int]) -> Measured:
    """The run's peak over reads of the card before a change, after it, and at the time that it gives (ns); this process
    is the run."""
    probe = open_probes([DeviceSpec(kind="cuda", index=0, text="cuda:0")], [])[0]
    assert not isinstance(probe, Unmeasurable), probe
    found: Probe = probe
    members = Members(excluded=(), reaper=None)
    members.adopt(ME, PYTEST)
    timeline = Timeline([found], host_probe(), members)

    def ticks() -> None:
        for _ in range(2 * READS):
            timeline.tick(time.monotonic_ns())

    try:
        timeline.boundary(time.monotonic_ns())
        span = timeline.open(time.monotonic_ns())
        ticks()
        until = change()
        ticks()
        while time.monotonic_ns() < until:
            time.sleep(0.001)
        ticks()
        return timeline.peaks(span, "run")["gpu0"]
    finally:
        timeline.close_probes()


def _hold(driver: FakeDriver, size: int) -> int:
    driver.process(ME, size)
    return 0


def test_frozen_counters(driver: FakeDriver) -> None:
    """The card goes on and the counters of processes stand still: refused, with the reason."""
    driver.process(ME, GIB)

    def freeze() -> int:
        now = time.monotonic_ns()
        driver.process(ME, Script(((0, GIB), (100, 3 * GIB)), start=now))
        driver.update(frozen=now + 1)
        return now + 101_000_000

    found = _watch(freeze)
    assert isinstance(found, Unmeasurable), found
    assert "stood still" in found.reason


def test_more_than_the_card_has(driver: FakeDriver) -> None:
    """A process with more than the card has, where nothing can be allocated beyond it, is no figure."""
    driver.process(ME, GIB)
    found = _watch(lambda: _hold(driver, 12 * GIB))
    assert isinstance(found, Unmeasurable), found


def test_an_honest_card(driver: FakeDriver) -> None:
    """The same changes with counters that go on are a figure."""
    driver.process(ME, GIB)
    found = _watch(lambda: _hold(driver, 3 * GIB))
    assert isinstance(found, Reading), found
    assert found.bytes == 3 * GIB
