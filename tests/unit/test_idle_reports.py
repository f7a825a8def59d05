"""Growth as people reported it of real engines: their few points decide nothing, a soak of the same shape does."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import pytest

from pytest_vram.checks import judge_idle, judge_idle_rollback
from pytest_vram.readings import Reading

MIB = 1 << 20
GIB = 1 << 30
TURNS = 120


def mib(*values: float) -> list[int]:
    """MiB as bytes."""
    return [round(value * MIB) for value in values]


def soak(curve: Callable[[int], float], spread: float = 4.0, turns: int = TURNS) -> list[int]:
    """A series in bytes from a curve in MiB."""
    source = random.Random(11)
    return mib(*(curve(turn) + source.gauss(0, spread) for turn in range(turns)))


def uneven(every: int, mean: float, start: float) -> list[int]:
    """Jumps of uneven height (exponential, so many MiB in the mean) every few turns."""
    source = random.Random(5)
    return mib(
        *accumulate(
            (source.expovariate(1 / mean) if turn and turn % every == 0 else 0.0 for turn in range(TURNS - 1)),
            initial=start,
        )
    )


@pytest.mark.parametrize(
    "points",
    [
        pytest.param(mib(412, 5184), id="two readings a day apart"),
        pytest.param([round(value * 1e9) for value in (25.5, 26.3, 26.5, 29.9, 31.3)], id="five uneven steps"),
        pytest.param([round(value * 1e9) for value in (26, 26)], id="the same without the feature"),
        pytest.param([0, 13 * GIB, 20 * GIB], id="free memory of half an hour"),
        pytest.param([0, 20 * 10**9], id="twenty gigabytes in a week"),
        pytest.param(mib(29114, 30296), id="two cards, one reading each"),
        pytest.param(mib(166_300, 7_040, 165_530), id="awake, asleep, awake"),
        pytest.param(mib(1167, 1105), id="a tensor freed"),
    ],
)
def test_the_points_of_a_report_decide_nothing(points: list[int]) -> None:
    """However large the growth: a few readings have no trend and no noise to hold it against."""
    found = judge_idle(points)
    assert found.kind == "inconclusive"
    assert found.slope is None
    assert found.settles == ["a longer run"]


def test_a_saw_tooth_whose_floor_climbs_leaks() -> None:
    """Each large prefill of a cycle leaves its high-water mark behind."""
    readings = soak(lambda turn: 14_000 + 90 * (turn % 8) + 2.5 * turn)
    assert judge_idle(readings, cycle=8).kind == "leak"
    assert judge_idle(soak(lambda turn: 14_000 + 90 * (turn % 8)), cycle=8).kind == "flat"


def test_a_prompt_cache_that_ignores_its_limit_leaks() -> None:
    """8192 MiB allowed, hundreds a turn taken for good; one entry of 2460 with 1200 allowed is no growth."""
    found = judge_idle({"host": soak(lambda turn: 9_000 + 400.0 * turn)}, caps={"prompt-cache": 8192 * MIB})
    assert found.kind == "leak"
    assert "not enforced" in found.text
    one = judge_idle({"host": soak(lambda turn: 9_000 + 2460.0 * (turn >= 50))}, caps={"prompt-cache": 1200 * MIB})
    assert one.kind == "step"


def test_context_checkpoints_grow_though_the_prompt_cache_is_off() -> None:
    """32 of them in each slot: named by their own setting, not by --cache-ram."""
    caps = {"prompt-cache": 0, "context-checkpoints": 32 * 60 * MIB}
    found = judge_idle({"host": soak(lambda turn: 4_000 + 8.0 * turn)}, caps=caps)
    assert found.kind == "inconclusive"
    assert "--ctx-checkpoints" in found.text


def test_a_sleeping_process_that_keeps_more_each_time_leaks() -> None:
    """From 412 to 5184 MiB in uneven parts."""
    found = judge_idle({"process": uneven(1, 40, 412)})
    assert (found.kind, found.cause) == ("leak", "unknown")


def test_a_residue_that_is_level_is_flat() -> None:
    """7 GB after each sleep, and slightly less after waking than before."""
    assert judge_idle(soak(lambda turn: 7_040 - 0.5 * turn, spread=40)).kind == "flat"
    assert judge_idle(soak(lambda turn: 166_300 - 790.0 * (turn >= 60), spread=60)).kind == "flat"


def test_a_context_that_stays_is_flat() -> None:
    """The driver's context is there after everything was freed."""
    assert judge_idle(mib(1167, *[1105] * 119)).kind == "flat"


def test_growth_in_uneven_steps_leaks_and_its_twin_without_the_feature_does_not() -> None:
    """5.8 GB over the run, a few turns apart; which feature it is, memory cannot say."""
    found = judge_idle({"process": uneven(5, 240, 24_300)})
    assert (found.kind, found.cause) == ("leak", "unknown")
    assert judge_idle({"process": soak(lambda _: 24_800)}).kind == "flat"


def test_inputs_that_are_kept_are_a_leak_of_live_tensors() -> None:
    """13 GB in half an hour, in torch's own count."""
    live = soak(lambda turn: 30_000 + 110.0 * turn)
    found = judge_idle({"torch-allocated": live, "process": [size + 2 * GIB for size in live]})
    assert (found.kind, found.layer, found.cause) == ("leak", "torch-allocated", "live tensors")


def test_twenty_gigabytes_in_a_week_are_below_what_a_short_run_sees() -> None:
    """27 KB a request: 120 turns say from where on they exclude a leak; 6000 find it."""

    def curve(turn: int) -> float:
        return 40_000 + 20e9 / 750_000 * turn / MIB

    short = judge_idle(soak(curve))
    assert short.kind == "flat"
    assert "a leak of 0.33 MiB a turn or more is excluded" in short.text
    long = judge_idle(soak(curve, turns=6_000))
    assert long.kind == "leak"
    assert "KiB" in long.text


def test_a_cache_that_every_call_abandons_leaks_by_its_size() -> None:
    """24 MiB a call, to the byte."""
    found = judge_idle([2 * GIB + 24 * MIB * turn for turn in range(TURNS)])
    assert found.kind == "leak"
    assert found.slope == pytest.approx(24 * MIB)


def test_a_larger_level_is_no_growth() -> None:
    """A cache for the whole context, taken at the start: level at 9.29 GB as at 7.78."""
    for level in (7.78e9, 9.29e9):
        assert judge_idle([round(level)] * TURNS).kind == "flat"


@pytest.mark.parametrize("source", ["device", "process"])
def test_ten_megabytes_a_cycle_leak_of_unknown_cause(source: str) -> None:
    """The slope is told, the cause is not."""
    found = judge_idle({source: soak(lambda turn: 28_000 + 10e6 / MIB * turn)})
    assert (found.kind, found.cause) == ("leak", "unknown")
    assert found.slope == pytest.approx(10e6, rel=0.05)


def test_an_engine_that_was_deleted_in_its_process_did_not_give_back() -> None:
    """One before and one after are a matter for the rollback of one test, and fail it."""

    def held(size: int, **more: Any) -> Reading:
        return Reading(bytes=size, source="nvml-process", scope="process", device="gpu0", exact=False, **more)

    finding = judge_idle_rollback(held(600 * MIB), held(48 * GIB), 64 * MIB)
    assert finding is not None
    assert finding.verdict == "failed"
