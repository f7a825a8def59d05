"""What a test must have before it may start."""

from __future__ import annotations

from typing import Any

import pytest

from pytest_vram.markers import read
from pytest_vram.needs import need_of, plan_of, settling_of
from pytest_vram.settings import parse_budget

GPUS = ("gpu0", "gpu1")


def limits(*marks: tuple[str, dict[str, Any]]) -> list[dict[str, Any]]:
    return [read("max_vram", (size,), more) for size, more in marks]


@pytest.mark.parametrize(
    ("marks", "budget", "expected"),
    [
        ([], "4GB", {}),
        ([("3GB", {})], None, {"gpu0": 3 * 10**9, "gpu1": 3 * 10**9}),
        ([("3GB", {})], "2GB", {"gpu0": 2 * 10**9, "gpu1": 2 * 10**9}),
        ([("3GB", {})], "gpu0=1GB", {"gpu0": 10**9, "gpu1": 3 * 10**9}),
        ([("3GB", {})], "sum=2GB", {"gpu0": 2 * 10**9, "gpu1": 2 * 10**9}),
        ([("3GB", {}), ("1GB", {"scope": "backend"})], None, {"gpu0": 10**9, "gpu1": 10**9}),
        ([("1GB", {"over": "baseline"})], None, {}),
        ([("1GB", {"scope": "process"})], None, {}),
        ([("1GB", {"scope": "device"})], None, {}),
        ([("1GB", {"phase": "warm-up"})], None, {}),
    ],
)
def test_the_need_of_a_test(
    marks: list[tuple[str, dict[str, Any]]], budget: str | None, expected: dict[str, int]
) -> None:
    """The smaller of marker and budget on each device; no need without a marker on the whole of what a test holds."""
    assert need_of(limits(*marks), parse_budget(budget) if budget else None, GPUS) == expected


def test_only_a_limit_on_the_rise_waits_for_a_quiet_baseline() -> None:
    """Waiting costs 100 ms, and matters only where the baseline is a part of the verdict."""
    assert settling_of(limits(("1GB", {}))) == 0
    assert settling_of(limits(("1GB", {"over": "baseline"}))) > 0


def test_a_test_that_may_fail_is_known() -> None:
    """An expected failure has a window of its own, so that a broken limit can be the failure that was expected."""
    assert plan_of([("xfail", (), {})], ()).may_fail
    assert not plan_of([("parametrize", (), {})], ()).may_fail
