"""Leftovers and hidden processes in whole runs on one card of the fake driver: who is accused, and who is excused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from pytest_vram.testing import Card, FakeDriver, FakeDriverUnavailable, fake_nvml
from pytest_vram.units import GIB, MIB
from tests.conftest import Inner

#: Whoever runs these commands holds so much of the card.
LEAK, HOG, LITTLE = "sleep 61.7", "sleep 0.33", "sleep 0.34"


@pytest.fixture
def driver() -> Iterator[FakeDriver]:
    """A card of 8 GiB."""
    try:
        with fake_nvml([Card(name="NVIDIA GeForce RTX 3050", total=8 * GIB)]) as made:
            for command, held in ((LEAK, 2 * GIB), (HOG, 3 * GIB), (LITTLE, 500 * MIB)):
                made.process(command=command, held=held)
            yield made
    except FakeDriverUnavailable as reason:
        pytest.skip(str(reason))


@pytest.mark.usefixtures("driver")
def test_who_is_to_mend_what(pytester: pytest.Pytester, inner: Inner) -> None:
    """Of two tests after one that left 2 GiB behind, the one that takes little is a victim, and the one that ends the
    leftover and then takes 3 GiB itself fails for itself; its message accuses nobody."""
    pytester.makepyfile(
        f"""
        import subprocess
        from pytest_vram import max_vram

        left = []

        def test_leaks():
            left.append(subprocess.Popen({LEAK.split()!r}))
            subprocess.run({LITTLE.split()!r}, check=True)

        @max_vram("1GiB")
        def test_victim():
            subprocess.run({LITTLE.split()!r}, check=True)

        @max_vram("2.5GiB")
        def test_hog():
            left[0].kill()
            left[0].wait()
            subprocess.run({HOG.split()!r}, check=True)
        """
    )
    result = inner("--vram-device=cuda:0", "--vram-budget=7GiB", "--vram-report=out.json")
    result.assert_outcomes(passed=1, errors=1, failed=1)
    tests: list[dict[str, Any]] = json.loads((pytester.path / "out.json").read_text())["tests"]
    found = {test["nodeid"].partition("::")[2]: test for test in tests}
    (victim,), (hog,) = found["test_victim"]["findings"], found["test_hog"]["findings"]
    assert victim["verdict"] == "error"
    assert "test_leaks left 2,048 MiB behind" in " ".join(victim["text"].split())
    assert f"still held by {LEAK} (PID" in " ".join(victim["text"].split())
    assert hog["verdict"] == "failed"
    assert "only because" not in hog["text"]
    assert "2,048 MiB of it gone when the peak was reached" in " ".join(hog["text"].split())
    assert found["test_hog"]["peak"]["gpu0"]["bytes"] == 3 * GIB
