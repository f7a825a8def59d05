"""The trend statistics agree with scipy and with worked examples, and pool over groups."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from scipy import stats as oracle

from pytest_vram import stats

SERIES = [
    (count, spread, slope, ties)
    for count in (4, 5, 12, 13, 40)
    for spread in (0.5, 8.0)
    for slope in (-1.0, 0.0, 0.3)
    for ties in (False, True)
]


def draw(count: int, spread: float, slope: float, ties: bool) -> list[float]:
    """A seeded series; rounded to fives where ties are wanted."""
    source = random.Random(f"{count} {spread} {slope} {ties}")
    values = [slope * place + source.gauss(0, spread) for place in range(count)]
    return [5.0 * round(value / 5) for value in values] if ties else values


@pytest.mark.parametrize(("count", "spread", "slope", "ties"), SERIES)
def test_the_slope_and_its_interval_are_scipys(count: int, spread: float, slope: float, ties: bool) -> None:
    """Over lengths, noise, slopes and ties."""
    values = draw(count, spread, slope, ties)
    found = stats.theil_sen(list(enumerate(values)))
    known = oracle.theilslopes(values, range(count), alpha=0.95)
    assert found.slope == pytest.approx(known.slope, abs=1e-12)
    assert found.low == pytest.approx(known.low_slope, abs=1e-12)
    assert found.high == pytest.approx(known.high_slope, abs=1e-12)


@pytest.mark.parametrize(("count", "spread", "slope", "ties"), SERIES)
def test_the_score_is_the_sum_of_signs_and_its_p_value_scipys(
    count: int, spread: float, slope: float, ties: bool
) -> None:
    """Kendall's τ of scipy has the same score and variance, without the continuity correction."""
    values = draw(count, spread, slope, ties)
    found = stats.mann_kendall(values)
    pairs = itertools.combinations(values, 2)
    assert found.score == sum((later > earlier) - (later < earlier) for earlier, later in pairs)
    assert found.pairs == count * (count - 1) // 2
    known = oracle.kendalltau(range(count), values, method="asymptotic").pvalue
    if found.variance:
        ours = math.erfc(abs(found.score) / math.sqrt(2 * found.variance))
        assert ours == pytest.approx(known, rel=1e-9)


def test_the_p_value_of_a_rise_is_near_the_exact_one() -> None:
    """With the correction the normal tail is within a fifth of the exact distribution of τ for ten values."""
    values = draw(10, 8.0, 2.0, False)
    exact = oracle.kendalltau(range(10), values, method="exact", alternative="greater").pvalue
    assert stats.mann_kendall(values).p_rise == pytest.approx(exact, rel=0.2)


def test_twelve_blocks_that_only_rise_and_only_fall() -> None:
    """S is 66 or −66 of 66 pairs and its variance 12·11·29/18, as in the tables."""
    rising = stats.mann_kendall(range(12))
    assert (rising.score, rising.pairs) == (66, 66)
    assert rising.variance == pytest.approx(12 * 11 * 29 / 18)
    assert rising.z == pytest.approx(65 / math.sqrt(rising.variance))
    falling = stats.mann_kendall(range(12, 0, -1))
    assert falling.z == -rising.z
    assert falling.p_rise > 0.999


def test_groups_add_and_no_pair_crosses_them() -> None:
    """Two falling groups, the second far above the first, fall."""
    first, second = [5.0, 4.0, 3.0], [105.0, 104.0, 103.0]
    pooled = stats.mann_kendall(first, second)
    one = stats.mann_kendall(first)
    assert (pooled.score, pooled.variance, pooled.pairs) == (2 * one.score, 2 * one.variance, 2 * one.pairs)
    assert stats.theil_sen(list(enumerate(first)), list(enumerate(second, 3))).slope == -1


@pytest.mark.parametrize("groups", [[], [[]], [[1.0]], [[2.0, 2.0, 2.0]], [[1.0], [2.0]]])
def test_nothing_to_compare_says_nothing(groups: list[list[float]]) -> None:
    """No pairs, or only ties, are no evidence; nothing is raised."""
    found = stats.mann_kendall(*groups)
    assert (found.score, found.z, found.p_rise) == (0, 0.0, 1.0)


def test_points_at_one_place_are_no_slope() -> None:
    """Pairs with one x are left out, and no pair is no slope."""
    assert stats.theil_sen([(1.0, 2.0), (1.0, 9.0)]) == stats.TheilSen()
    assert stats.theil_sen([(1.0, 2.0), (1.0, 9.0), (2.0, 4.0)]).slope == pytest.approx(-1.5)
