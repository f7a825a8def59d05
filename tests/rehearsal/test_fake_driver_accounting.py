"""A keeper on a card of the fake driver whose accounting is on: peaks that no sample saw."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pytest_vram.readings import Reading
from pytest_vram.spec import DeviceSpec
from pytest_vram.testing import Card, FakeDriver, FakeDriverUnavailable, Script, fake_nvml
from pytest_vram.units import GIB, MIB
from tests.faults.keeper_kit import Run, closed, opened, until

#: Long enough that no sample falls on a spike by chance.
INTERVAL_MS = 400.0


@pytest.fixture
def driver() -> Iterator[FakeDriver]:
    try:
        with fake_nvml([Card(total=16 * GIB, accounting=True)]) as made:
            yield made
    except FakeDriverUnavailable as reason:
        pytest.skip(str(reason))


@pytest.fixture
def child() -> Iterator[int]:
    """A process of the test that holds the same all the time."""
    with subprocess.Popen(["sleep", "60"]) as process:
        yield process.pid
        process.kill()


def spike(driver: FakeDriver, height: int) -> int:
    """This process holds ``height`` for 2 ms, a little later; when it is over, ns."""
    start = time.monotonic_ns() + 20_000_000
    driver.process(os.getpid(), Script(((0, 100 * MIB), (20, height), (22, 100 * MIB)), start=start))
    return start + 25_000_000


def test_a_spike_between_samples_is_known(tmp_path: Path, driver: FakeDriver, child: int) -> None:
    """A spike that no sample saw is in the figure: from the spiking process's own peak to that of all of them."""
    driver.process(child, 8 * MIB)
    driver.process(os.getpid(), 100 * MIB)
    devices = [DeviceSpec(kind="cuda", index=0, text="cuda:0")]
    run = Run(tmp_path, devices=devices, interval_ms=INTERVAL_MS).start()
    try:
        client = run.client()
        for height in (500 * MIB, 700 * MIB):
            window = opened(client, "spikes")
            over = spike(driver, height)
            assert until(lambda over=over: time.monotonic_ns() > over)
            peak = closed(client, window).run["gpu0"]
            assert isinstance(peak, Reading)
            assert height <= peak.bytes <= height + 8 * MIB
            assert (peak.at_most or peak.bytes) == height + 8 * MIB
        # A lower one than before is an interval, which ends at the peak of the process's life.
        window = opened(client, "lower")
        over = spike(driver, 300 * MIB)
        assert until(lambda: time.monotonic_ns() > over)
        peak = closed(client, window).run["gpu0"]
        assert isinstance(peak, Reading)
        assert not peak.exact
        assert peak.bytes <= 308 * MIB
        assert peak.at_most == 708 * MIB
    finally:
        run.close()
