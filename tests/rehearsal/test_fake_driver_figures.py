"""Whole runs whose figures have a hole, a gap, or a baseline that is not quiet: what is known is judged, and no more."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from pytest_vram.testing import Card, FakeDriver, fake_nvml
from pytest_vram.units import GIB
from tests.conftest import Inner

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux") or not any(map(shutil.which, ("cc", "gcc", "clang"))),
    reason="the fake driver needs Linux and a C compiler",
)
#: The card from within a test: what this process holds, and what goes wrong.
KIT = """
import os, time
from pathlib import Path
import pytest
from pytest_vram import max_vram
from pytest_vram.testing import Card, FakeDriver
from pytest_vram.units import GIB, MIB

card = FakeDriver(
    Path(os.environ["PYTEST_VRAM_NVML"]), Path(os.environ["PYTEST_VRAM_FAKE_NVML"]), [Card()], "550.54.15", ()
)

def hold(size, seconds=0.1, **how):
    card.process(os.getpid(), size, **how)
    time.sleep(seconds)
"""


@pytest.fixture
def driver() -> Iterator[FakeDriver]:
    """A card of 4 GiB."""
    with fake_nvml([Card()]) as made:
        yield made


def judged(pytester: pytest.Pytester, inner: Inner, text: str) -> tuple[int, dict[str, Any]]:
    """Run a suite under a budget of 2 GiB: exit code, and the first test of the report."""
    pytester.makepyfile(KIT + text)
    result = inner("--vram-device=cuda:0", "--vram-budget=2GiB", "--vram-report=out.json")
    (test, *_) = json.loads((pytester.path / "out.json").read_text())["tests"]
    return int(result.ret), dict(test)


@pytest.mark.usefixtures("driver")
def test_a_model_loaded_at_import_is_not_what_others_held(pytester: pytest.Pytester, inner: Inner) -> None:
    """Without figures by process, memory of the run from before the baseline may be its own: 3 GiB pass under no 2."""
    _, test = judged(pytester, inner, "hold(3 * GIB, available=False)\ndef test_it(): time.sleep(0.1)\n")
    peak = test["peak"]["gpu0"]
    assert (peak["bytes"], peak["at_most"], peak["source"]) == (0, 3 * GIB, "device-delta")
    assert test["outcome"] == "inconclusive"


@pytest.mark.usefixtures("driver")
@pytest.mark.parametrize(("size", "outcome"), [("3 * GIB", "failed"), ("1 * GIB", "inconclusive")])
def test_a_failed_read_takes_nothing_from_a_broken_limit(
    pytester: pytest.Pytester, inner: Inner, size: str, outcome: str
) -> None:
    """What was held before a read that failed breaks the limit, or nothing is decided."""
    body = f"""
def test_it():
    hold({size})
    card.fail("processes", "UNKNOWN")
    hold(0)
    card.heal()
    time.sleep(0.1)
"""
    code, test = judged(pytester, inner, body)
    assert test["peak"]["gpu0"]["kind"] == "unmeasurable"
    assert test["peak"]["gpu0"]["at_least"] == (3 if outcome == "failed" else 1) * GIB
    assert (test["outcome"], code) == (outcome, 1 if outcome == "failed" else 0)
    assert "Unknown Error" in test["findings"][0]["text"]


@pytest.mark.usefixtures("driver")
def test_while_the_driver_hangs_nobody_looks(pytester: pytest.Pytester, inner: Inner) -> None:
    """Three gigabytes that were held while a call of the driver took a second are not "within the limit"."""
    body = """
def test_it():
    hold(1 * GIB)
    card.fail("memory", "OK", hang=1000)
    time.sleep(0.1)
    hold(3 * GIB, 0.5)
    hold(1 * GIB, 0)
    card.heal()
    time.sleep(1.2)
"""
    _, test = judged(pytester, inner, body)
    peak = test["peak"]["gpu0"]
    if peak["bytes"] > 2 * GIB:
        pytest.skip("this machine was so slow that a read fell into the time")
    assert peak["bytes"] == GIB
    assert "nobody looked" in peak["missed"]
    assert test["outcome"] == "inconclusive"
