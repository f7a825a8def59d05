"""The truncated sequential test keeps its errors exactly, and saves cases."""

from __future__ import annotations

import itertools
import math

import pytest

from pytest_vram import stats
from pytest_vram.stats import TruncatedSprt


@pytest.mark.parametrize(("p0", "p1", "most"), [(0.9, 0.4, 11), (0.6, 0.2, 12), (1.0, 0.5, 9), (0.95, 0.7, 12)])
@pytest.mark.parametrize("p", [0.0, 0.37, 0.8, 1.0])
def test_what_it_does_is_the_sum_over_all_runs(p0: float, p1: float, most: int, p: float) -> None:
    """Every sequence of right and wrong answers, walked one by one with its probability."""
    test = TruncatedSprt(p0, p1, 0.1, 0.1, most)
    sums = {"passed": 0.0, "failed": 0.0, None: 0.0}
    average = 0.0
    for run in itertools.product((1, 0), repeat=most):
        weight = math.prod(p if right else 1 - p for right in run)
        for n in range(1, most + 1):
            decision = test.decide(sum(run[:n]), n)
            if decision is not None or n == most:
                average += weight * n
                sums[decision if decision is not None else test.final(sum(run), most)] += weight
                break
    found = test.operating_characteristic(p)
    assert (found.passed, found.failed, found.inconclusive) == pytest.approx(
        (sums["passed"], sums["failed"], sums[None]), abs=1e-12
    )
    assert found.average == pytest.approx(average, abs=1e-9)


@pytest.mark.parametrize("p0", [0.6, 0.8, 0.94, 0.99, 1.0])
@pytest.mark.parametrize("margin", [0.02, 0.05, 0.2])
@pytest.mark.parametrize("most", [1, 12, 60, 300, 700])
def test_both_errors_hold_at_any_end(p0: float, margin: float, most: int) -> None:
    """At most 5 % each, exactly computed, however few cases there are; what they cannot decide is inconclusive."""
    test = stats.sprt(p0, p0 - margin, 0.05, 0.05, most)
    high, low = test.operating_characteristic(p0), test.operating_characteristic(p0 - margin)
    assert high.failed <= 0.05 + 1e-12
    assert low.passed <= 0.05 + 1e-12
    assert test.complete == (high.inconclusive < 1e-9)
    assert high.passed + high.failed + high.inconclusive == pytest.approx(1.0)
    assert high.average <= most


def test_it_saves_at_least_two_fifths_of_the_fixed_test() -> None:
    """At both hypotheses, of 94 % against 89 % with 400 cases at hand: 334 are what a fixed test takes."""
    fixed = stats.fixed_sample_size(0.94, 0.89)
    for p in (0.94, 0.89):
        assert stats.average_sample_number(p, 0.94, 0.89, most=400) <= 0.6 * fixed
    test = stats.sprt(0.94, 0.89, most=400)
    assert test.complete
    assert test.least_to_pass() == test.operating_characteristic(1.0).average == 59
    assert test.operating_characteristic(0.0).average == 6


def test_limits_are_walds_where_the_end_is_too_near() -> None:
    """A perfect run passes after 54 cases, a dead deployment fails after 5; some runs of 300 stay open."""
    test = stats.sprt(0.94, 0.89, most=300)
    assert (test.scale, test.complete, test.least_to_pass()) == (1.0, False, 54)
    assert test.operating_characteristic(0.0).average == 5
    assert 0.0 < test.operating_characteristic(0.94).inconclusive < 0.1
    assert test.final(270, 300) == "failed"
    assert test.final(276, 300) is None
    assert test.final(282, 300) == "passed"


def test_a_target_of_all_is_refuted_by_one() -> None:
    """A single wrong answer refutes 100 %; 59 right ones speak for it against 95 %."""
    test = stats.sprt(1.0, 0.95, most=300)
    assert test.decide(58, 59) == "failed"
    assert test.decide(58, 58) is None
    assert test.decide(59, 59) == "passed"
    assert test.operating_characteristic(1.0).failed == 0.0


def test_counts_divided_by_a_design_effect_decide_later() -> None:
    """Half as much evidence, in the middle and at the end."""
    test = stats.sprt(0.94, 0.89, most=300)
    assert test.decide(60, 60) == "passed"
    assert test.decide(30, 30) is None
    assert test.final(278, 300) == "passed"
    assert test.final(278 / 2, 300 / 2) is None
    assert test.final(0.0, 0.5) is None


def test_any_number_of_cases_is_taken_in_bounded_time() -> None:
    """Hypotheses next to each other and a million cases: the walk ends early, and the limits go on."""
    test = TruncatedSprt(0.5, 0.499, 0.05, 0.05, 1_000_000)
    assert test.most < 1_000_000
    assert test.decide(0, 10_000) == "failed"
    assert test.final(500_000, 1_000_000) in ("passed", None)


@pytest.mark.parametrize(
    ("figures", "part"),
    [((0.9, 0.9, 0.05, 0.05), "lower one"), ((0.9, 0.0, 0.05, 0.05), "lower one"), ((0.9, 0.8, 0.0, 0.05), "errors")],
)
def test_hypotheses_that_are_none_are_refused(figures: tuple[float, float, float, float], part: str) -> None:
    """Equal rates, a rate of 0, an error of 0."""
    with pytest.raises(ValueError, match=part):
        TruncatedSprt(*figures)
