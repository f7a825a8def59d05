"""Admission holds what it promises for any tests, in any order, over any number of runs."""

from __future__ import annotations

from hypothesis import example, given, settings
from hypothesis import strategies as st

from pytest_vram.leases import MOST_PASSED, Want, World, decide
from tests.unit.lease_model import Trial, simulate

KEYS = ("gpu", "host")
CEILING = {"gpu": 100, "host": 60}

a_test = st.builds(
    Trial,
    takes=st.dictionaries(st.sampled_from(KEYS), st.integers(0, 150), max_size=2),
    seconds=st.floats(0.001, 10.0),
    exclusive=st.sampled_from([False, False, False, False, True]),
)
some_runs = st.lists(st.lists(a_test, max_size=25), min_size=1, max_size=3)


@settings(max_examples=150, deadline=None)
@given(runs=some_runs, workers=st.integers(1, 6), most=st.sampled_from([0, 1, 3, MOST_PASSED]))
def test_any_tests_in_any_order(runs: list[list[Trial]], workers: int, most: int) -> None:
    """Nothing beyond a ceiling but one test alone, no overlap with a serial test, no deadlock, no test passed by more."""
    result = simulate(runs, CEILING, workers=workers, most_passed=most)
    assert result.over == []
    assert result.left == 0
    assert result.passed <= most


@settings(max_examples=150, deadline=None)
@given(
    takes=st.lists(st.integers(0, 120), min_size=1, max_size=12),
    held=st.integers(0, 120) | st.just(0),
    mine=st.lists(st.booleans(), min_size=12, max_size=12),
)
@example(takes=[101], held=0, mine=[True] * 12)
@example(takes=[101, 101, 0], held=0, mine=[False, True] * 6)
def test_one_decision(takes: list[int], held: int, mine: list[bool]) -> None:
    """What goes at once, in this run or another, fits together, but one that is larger than everything and goes alone."""
    wants = [
        Want(
            id=str(number),
            order=number,
            devices=frozenset(KEYS),
            takes={"gpu": size},
            ceiling=CEILING,
            mine=mine[number],
            competes=True,
        )
        for number, size in enumerate(takes)
    ]
    world = World(held={"gpu": held}, loose={"gpu": held})
    decision = decide(wants, world)
    stuck = {want.id for want in decision.stuck}
    going = [want.takes["gpu"] for want in wants if want.id not in stuck and want.takes["gpu"]]
    assert held + sum(going) <= max(held, 100) or (held == 0 and len(going) == 1)
    assert all(want.mine for want in decision.admitted)
    assert not {want.id for want in decision.admitted} & {want.id for want in decision.stuck}
    for want in decision.stuck:
        later = sum(other.order > want.order for other in decision.admitted)
        assert decision.passed.get(want.id, 0) == later
