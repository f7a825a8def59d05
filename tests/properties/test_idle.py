"""Verdicts on idle memory hold for any series: nothing is raised, and what cannot matter does not."""

from __future__ import annotations

import random
from typing import get_args

from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_vram.checks import judge_idle
from pytest_vram.checks.idle_series import Kind
from pytest_vram.readings import Measured, Reading, Unmeasurable

MIB = 1 << 20
KINDS = get_args(Kind)

sizes = st.integers(0, 64 << 30) | st.sampled_from([0, 1, 8_519_680, (1 << 62) - 1])
anything = sizes | st.integers() | st.floats() | st.booleans() | st.none() | st.text(max_size=3)
readings = sizes.map(
    lambda size: Reading(bytes=size, source="nvml-process", scope="process", device="gpu0", exact=False)
) | st.just(Unmeasurable(reason="N/A"))
places = st.lists(st.integers(-5, 200), max_size=8, unique=True)


@given(st.lists(anything, max_size=130), st.none() | st.integers(1, 50), places, places)
@settings(max_examples=150, deadline=None)
def test_any_list_has_a_verdict(values: list[int], cycle: int | None, events: list[int], segments: list[int]) -> None:
    """Whatever stands in it; few values are never more than inconclusive."""
    found = judge_idle(values, cycle=cycle, events=events, segments=segments, limit=1 << 33)
    assert found.kind in KINDS
    assert found.text.endswith(".")
    if len(values) < 60:
        assert found.kind in ("inconclusive", "invalid")


@given(
    st.integers(60, 130).flatmap(
        lambda turns: st.dictionaries(
            st.sampled_from(
                ["torch-allocated", "torch-reserved", "torch-inactive-split", "process", "device", "host", "kv-usage"]
            ),
            st.lists(readings, min_size=turns, max_size=turns),
            max_size=4,
        )
    ),
    st.dictionaries(st.sampled_from(["prompt-cache", "graphs", "mine"]), sizes, max_size=2),
)
@settings(max_examples=60, deadline=None)
def test_any_layers_have_a_verdict(layers: dict[str, list[Measured | int]], caps: dict[str, int]) -> None:
    """In any combination, with holes, and with caps of any size."""
    found = judge_idle(layers, caps=caps)
    assert found.kind in KINDS
    assert found.layer in ("", *layers)


@given(st.integers(0, 10_000), st.sampled_from([0.0, 0.5, 1.0, 3.0]), st.integers(0, 1 << 40))
@settings(max_examples=40, deadline=None)
def test_the_base_does_not_matter(seed: int, rate: float, base: int) -> None:
    """The same series on another level has the same verdict, slope and steps."""
    source = random.Random(seed)
    series = [round((rate * turn + 100 + source.gauss(0, 8)) * MIB) for turn in range(120)]
    low, high = judge_idle([max(0, size) for size in series]), judge_idle([max(0, size) + base for size in series])
    assert (low.kind, low.steps, low.p_value) == (high.kind, high.steps, high.p_value)
    assert low.slope is not None
    assert high.slope is not None
    assert abs(low.slope - high.slope) < 1


@given(st.integers(0, 10_000), st.integers(1, 30))
@settings(max_examples=40, deadline=None)
def test_what_falls_never_leaks(seed: int, rate: int) -> None:
    """A series of drops and levels is no leak, no step and no warm-up."""
    source = random.Random(seed)
    level, series = 60 << 30, []
    for _ in range(120):
        level -= source.choice([0, 0, 0, rate * MIB])
        series.append(level)
    assert judge_idle(series).kind in ("flat", "inconclusive")
