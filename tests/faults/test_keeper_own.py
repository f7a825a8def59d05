"""Whose memory a test is charged with, and what its rise is counted from, with real servers and real processes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pytest_vram.checks import judge_peak
from pytest_vram.keeper import KeeperClient
from pytest_vram.keeper.messages import Closed, Restart, Running
from pytest_vram.readings import Measured, Reading
from pytest_vram.spec import Limits
from tests.faults.keeper_kit import Run, acquire, closed, opened, plan

MIB = 1 << 20
#: Filled to the last page, so that it is held.
FILLED = f"fill={100 * MIB}"


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    made = Run(tmp_path).start()
    yield made
    made.close()


@pytest.fixture
def client(run: Run) -> KeeperClient:
    return run.client()


def size(found: Measured | None) -> int:
    assert isinstance(found, Reading), found
    return found.bytes


def rises(figures: Closed, limit: int, scope: str = "run") -> bool:
    """Whether the test rose by more than the limit for certain."""
    limits = Limits(text="x", each=limit)
    found = judge_peak(figures, check="max_vram", limits=limits, limit_from="here", scope=scope, over="baseline")
    return found is not None and found.verdict == "failed"


def hold(megabytes: int) -> subprocess.Popen[bytes]:
    """A child of this process that holds so much once it has said so."""
    code = f"b = bytearray({megabytes * MIB}); b[::4096] = b'x' * len(b[::4096]); print(flush=True); input()"
    child = subprocess.Popen([sys.executable, "-S", "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()
    return child


def end(child: subprocess.Popen[bytes]) -> None:
    child.communicate(b"\n")


def test_a_rise_does_not_depend_on_who_starts_the_backend(client: KeeperClient) -> None:
    """Two equal tests rise equally, though the first of them starts the backend; what they hold themselves counts."""
    for extra in (0, 60):
        made = plan(FILLED, name=f"agent{extra}")
        for _ in range(2):
            window = opened(client)
            acquire(client, made, window)
            if extra:
                end(hold(extra))
            figures = closed(client, window)
            assert size(figures.baseline["host"]) >= 100 * MIB
            assert rises(figures, 50 * MIB) == bool(extra)
            assert not rises(figures, 50 * MIB, "backend")


def test_a_rise_before_the_backend_counts(client: KeeperClient) -> None:
    """What a test held before its backend raised the baseline is its rise, though the backend holds more."""
    window = opened(client)
    end(hold(80))
    acquire(client, plan(FILLED), window)
    figures = closed(client, window)
    assert size(figures.baseline["host"]) >= 100 * MIB
    assert size(figures.risen["host"]) >= 80 * MIB
    assert rises(figures, 60 * MIB)


def test_a_restart_does_not_raise_the_baseline_twice(client: KeeperClient) -> None:
    """After a restart the baseline has the new generation only, so that a rise over it shows."""
    window = opened(client)
    running = acquire(client, plan(FILLED), window)
    assert isinstance(client.call(Restart(key=running.key, window=window)), Running)
    end(hold(80))
    figures = closed(client, window)
    assert 100 * MIB <= size(figures.baseline["host"]) < 180 * MIB
    assert 100 * MIB <= size(figures.baseline_backend["host"]) < 180 * MIB
    assert rises(figures, 60 * MIB)


def test_two_backends_are_in_the_baseline(client: KeeperClient) -> None:
    """The baseline of the test's backends has all of them."""
    window = opened(client)
    for number in (1, 2):
        acquire(client, plan(FILLED, name=f"agent{number}"), window)
    figures = closed(client, window)
    assert size(figures.baseline_backend["host"]) >= 200 * MIB
    assert not rises(figures, 50 * MIB, "backend")


def test_a_boot_that_decides_is_the_moment_of_the_peak(client: KeeperClient) -> None:
    """Where a boot decides the peak, the peak fell within the boot; else within the window."""
    made = plan(f"burst={100 * MIB}")
    acquire(client, made)
    window = opened(client)
    running = acquire(client, made, window)
    figures = closed(client, window)
    assert figures.boot
    assert (figures.peak_at["host"].since, figures.peak_at["host"].at) == (running.t_start, running.t_ready)
    assert figures.peak_at["host"].at < figures.t0
    window = opened(client)
    acquire(client, made, window)
    end(hold(200))
    figures = closed(client, window)
    assert not figures.boot
    assert figures.peak_at["host"].at > figures.t0
