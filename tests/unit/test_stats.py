"""Statistics in plain Python agree with scipy, with definitions, and with figures from the literature."""

from __future__ import annotations

import itertools
import math
import random

import numpy
import pytest
from scipy import special
from scipy import stats as oracle

from pytest_vram import stats

SHAPES = (0.05, 0.5, 1.0, 1.7, 8.0, 57.3, 300.0, 4_000.0)
COUNTS = [(k, n) for n in (1, 7, 50, 300, 2_000) for k in sorted({0, 1, n // 3, n - 2, n - 1, n}) if 0 <= k <= n]


@pytest.mark.parametrize("a", SHAPES)
@pytest.mark.parametrize("b", SHAPES)
def test_the_incomplete_beta_function_and_its_inverse_are_scipys(a: float, b: float) -> None:
    """Over shapes and arguments on a grid, to 1e-10 and 1e-11."""
    mean = a / (a + b)
    for x in (1e-9, 0.01, 0.3, mean * 0.9, mean, min(0.999, mean * 1.1), 0.5, 0.97, 1 - 1e-9):
        assert stats.regularised_incomplete_beta(x, a, b) == pytest.approx(special.betainc(a, b, x), abs=1e-10)
    for p in (1e-6, 0.025, 0.05, 0.5, 0.95, 0.975, 1 - 1e-6):
        found = stats.inverse_regularised_incomplete_beta(p, a, b)
        assert found == pytest.approx(special.betaincinv(a, b, p), rel=1e-9, abs=1e-11)


def test_the_incomplete_beta_function_at_its_ends() -> None:
    """0 at 0, 1 at 1, and shapes are positive."""
    assert stats.regularised_incomplete_beta(0.0, 2, 3) == 0.0
    assert stats.regularised_incomplete_beta(1.0, 2, 3) == 1.0
    assert stats.inverse_regularised_incomplete_beta(0.0, 2, 3) == 0.0
    assert stats.inverse_regularised_incomplete_beta(1.0, 2, 3) == 1.0
    with pytest.raises(ValueError, match="positive"):
        stats.regularised_incomplete_beta(0.5, 0, 1)


def test_quantiles_are_scipys() -> None:
    """Of the normal and of Student's t distribution."""
    for p in (0.001, 0.05, 0.3, 0.5, 0.8, 0.95, 0.999):
        assert stats.normal_quantile(p) == pytest.approx(oracle.norm.ppf(p), abs=1e-12)
        for degrees in (1, 2, 5, 59, 299, 10_000):
            assert stats.student_t_quantile(p, degrees) == pytest.approx(oracle.t.ppf(p, degrees), rel=1e-8, abs=1e-12)


@pytest.mark.parametrize(("k", "n"), COUNTS)
def test_binomial_probabilities_and_intervals_are_scipys(k: int, n: int) -> None:
    """The distribution function, Clopper and Pearson's interval on each side, and Wilson's."""
    for p in (0.0, 0.03, 0.5, 0.94, 1.0):
        assert stats.binomial_cdf(k, n, p) == pytest.approx(oracle.binom.cdf(k, n, p), abs=1e-10)
    for confidence in (0.8, 0.95, 0.99):
        exact = {
            "both": oracle.binomtest(k, n).proportion_ci(confidence, "exact"),
            "upper": oracle.binomtest(k, n, alternative="less").proportion_ci(confidence, "exact"),
            "lower": oracle.binomtest(k, n, alternative="greater").proportion_ci(confidence, "exact"),
        }
        for side in ("both", "upper", "lower"):
            assert stats.clopper_pearson(k, n, confidence, side) == pytest.approx(tuple(exact[side]), abs=1e-10)  # type: ignore[arg-type]
        score = oracle.binomtest(k, n).proportion_ci(confidence, "wilson")
        assert stats.wilson(k, n, confidence) == pytest.approx(tuple(score), abs=1e-12)


def test_counts_that_are_none_are_refused() -> None:
    """More successes than cases, or no case."""
    for k, n in ((3, 2), (-1, 2), (0, 0)):
        with pytest.raises(ValueError, match="count of successes"):
            stats.clopper_pearson(k, n)
        with pytest.raises(ValueError, match="count of successes"):
            stats.wilson(k, n)


def test_real_counts_are_between_whole_ones() -> None:
    """A bound on counts divided by a design effect moves smoothly, and is wider than on whole counts."""
    low, high = stats.clopper_pearson(282, 300, 0.95)
    wider_low, wider_high = stats.clopper_pearson(282 / 1.37, 300 / 1.37, 0.95)
    assert wider_low < low < high < wider_high
    assert wider_high == pytest.approx(oracle.beta.ppf(0.975, 282 / 1.37 + 1, 18 / 1.37), abs=1e-10)


@pytest.mark.parametrize(("n", "most"), [(50, 43), (100, 89), (200, 181), (400, 367)])
def test_the_most_that_fails(n: int, most: int) -> None:
    """With so many right of n the upper bound is below 94 %, with one more it is not."""
    assert stats.critical_count(n, 0.94) == most
    assert (
        stats.clopper_pearson(most, n, 0.95, "upper")[1] < 0.94 <= stats.clopper_pearson(most + 1, n, 0.95, "upper")[1]
    )


def test_the_most_that_fails_where_nothing_does() -> None:
    """Of few cases of a low target not even 0 right is enough; of a target of 1 any failure is."""
    assert stats.critical_count(3, 0.5) == -1
    assert stats.power_of_not_below(3, 0.5, 0.0) == 0.0
    assert stats.detectable_drop(3, 0.5) is None
    assert stats.critical_count(3, 1.0) == 2


@pytest.mark.parametrize(("failures", "n"), [(0, 49), (1, 78), (2, 103), (3, 127), (5, 173), (10, 280)])
def test_cases_that_a_proof_needs(failures: int, n: int) -> None:
    """The lower bound reaches 94 % with n cases and not with n - 1."""
    assert stats.required_n_proven(failures, 0.94) == n
    assert stats.clopper_pearson(n - failures, n, 0.95, "lower")[0] >= 0.94
    assert stats.clopper_pearson(n - 1 - failures, n - 1, 0.95, "lower")[0] < 0.94


def test_what_no_number_proves() -> None:
    """A target of 1; and what is proven already needs no more."""
    assert stats.required_n_proven(0, 1.0) is None
    assert stats.more_without_failure(300, 300, 0.94) == 0
    assert stats.more_without_failure(40, 40, 0.94) == 9


@pytest.mark.parametrize(
    ("n", "needed", "passes"), [(50, 47, 0.65), (100, 94, 0.61), (200, 188, 0.58), (400, 376, 0.55)]
)
def test_the_point_rule_is_a_coin(n: int, needed: int, passes: float) -> None:
    """A deployment that is at its target passes k ÷ n ≥ target little more often than not."""
    assert stats.least_count_of_point_rule(n, 0.94) == needed
    assert 1 - stats.false_alarm_of_point_rule(n, 0.94) == pytest.approx(passes, abs=0.006)


def test_the_point_rule_at_any_size() -> None:
    """From 16 to 400 cases it fails a deployment at 94 % in 27 to 63 % of the runs; it is the literal rule."""
    rates = [stats.false_alarm_of_point_rule(n, 0.94) for n in range(16, 401)]
    assert (round(min(rates), 2), round(max(rates), 2)) == (0.27, 0.63)
    for n, target in itertools.product((1, 3, 7, 100, 333), (0.01, 1 / 3, 0.7, 0.94, 1.0)):
        least = stats.least_count_of_point_rule(n, target)
        assert [k / n >= target for k in range(n + 1)] == [k >= least for k in range(n + 1)]


def test_power_and_detectable_drops() -> None:
    """150 cases find a drop of 5 points 69 % of the time and 300 find it 92 %; the drop named is found 80 %."""
    assert stats.power_of_not_below(150, 0.94, 0.89) == pytest.approx(0.69, abs=0.005)
    assert stats.power_of_not_below(300, 0.94, 0.89) == pytest.approx(0.92, abs=0.005)
    for n, effect in ((60, 1.0), (300, 1.0), (300, 2.2)):
        drop = stats.detectable_drop(n, 0.94, design_effect=effect)
        assert drop is not None
        assert stats.power_of_not_below(n, 0.94, 0.94 - drop, design_effect=effect) == pytest.approx(0.8, abs=1e-5)
    assert stats.detectable_drop(300, 0.94, design_effect=2.2) > stats.detectable_drop(300, 0.94)  # type: ignore[operator]


def test_the_fixed_test_of_both_errors() -> None:
    """94 % against 89 % takes 334 cases, by scipy's binomial distribution too; fewer do not hold both errors."""
    assert stats.fixed_sample_size(0.94, 0.89) == 334

    def holds(n: int) -> bool:
        failing = numpy.arange(n + 1)
        kept = oracle.binom.cdf(failing, n, 0.94) <= 0.05
        return bool(numpy.any(kept & (oracle.binom.sf(failing, n, 0.89) <= 0.05)))

    assert holds(334)
    assert not any(holds(n) for n in range(150, 334))
    with pytest.raises(ValueError, match="lower rate"):
        stats.fixed_sample_size(0.8, 0.9)


def _families(*values: list[float]) -> dict[str, list[float]]:
    return {str(index): list(of) for index, of in enumerate(values)}


def test_the_intraclass_correlation_by_its_definition() -> None:
    """Mean squares between and within, of random families of unequal sizes."""
    rng = random.Random(3)
    families = _families(*([float(rng.random() < 0.7 + 0.2 * (i % 2)) for _ in range(1 + i % 5)] for i in range(40)))
    sizes = numpy.array([len(of) for of in families.values()])
    means = numpy.array([numpy.mean(of) for of in families.values()])
    n, k = sizes.sum(), len(sizes)
    overall = (sizes * means).sum() / n
    between = (sizes * (means - overall) ** 2).sum() / (k - 1)
    within = sum(((numpy.array(of) - mean) ** 2).sum() for of, mean in zip(families.values(), means, strict=True)) / (
        n - k
    )
    n0 = (n - (sizes**2).sum() / n) / (k - 1)
    expected = (between - within) / (between + (n0 - 1) * within)
    icc = stats.anova_icc(families)
    assert icc == pytest.approx(expected, abs=1e-12)
    assert stats.design_effect(families) == pytest.approx(
        max(1.0, 1 + ((sizes**2).sum() / n - 1) * expected), abs=1e-12
    )


def test_the_design_effect_where_there_is_little_to_tell_it_from() -> None:
    """1 of single cases and of equal outcomes; the size where families are all of one mind; n for one family."""
    assert stats.design_effect({}) == 1.0
    assert stats.design_effect(_families([1], [0], [1])) == 1.0
    assert stats.anova_icc(_families([1], [0], [1])) is None
    assert stats.design_effect(_families([1, 1], [1, 1])) == 1.0
    assert stats.anova_icc(_families([1, 1], [1, 1])) is None
    assert stats.design_effect(_families([1, 1, 1], [0, 0, 0], [1, 1, 1], [0, 0, 0])) == pytest.approx(3.0)
    assert stats.design_effect(_families([1, 0], [0, 1], [1, 0])) == 1.0  # families more even than chance
    assert stats.design_effect(_families([1, 0, 1, 1])) == 4.0


def test_a_tally_kept_up_is_the_tally_made_at_once() -> None:
    """In any order of observations, also of -1, 0 and 1."""
    rng = random.Random(4)
    families = _families(*([float(rng.choice((-1, 0, 0, 1))) for _ in range(1 + i % 4)] for i in range(20)))
    seen = [(name, value) for name, values in families.items() for value in values]
    rng.shuffle(seen)
    tally = stats.ClusterTally()
    for name, value in seen:
        tally.add(name, value)
    assert tally.icc() == pytest.approx(stats.anova_icc(families), abs=1e-9)
    assert (tally.n, tally.clusters, tally.total) == (len(seen), 20, sum(value for _, value in seen))
    assert sorted(tally.pairs) == sorted((sum(of), len(of)) for of in families.values())


def test_correlation_that_was_drawn_is_found() -> None:
    """Beta-binomial families with a correlation of 0.3: the estimate is near it, on average."""
    rng = random.Random(5)
    found = []
    for _ in range(200):
        families = {}
        for family in range(60):
            rate = rng.betavariate(0.9 * 7 / 3, 0.1 * 7 / 3)
            families[str(family)] = [float(rng.random() < rate) for _ in range(5)]
        found.append(stats.anova_icc(families) or 0.0)
    assert sum(found) / len(found) == pytest.approx(0.3, abs=0.03)


def test_the_factor_for_few_families() -> None:
    """(t ÷ t)² of scipy's quantiles, hardly any for 60 families, much for 3."""
    assert stats.korn_graubard_factor(60, 300, 0.95) == pytest.approx(
        (oracle.t.ppf(0.95, 59) / oracle.t.ppf(0.95, 299)) ** 2
    )
    assert stats.korn_graubard_factor(3, 300, 0.95) > 3
    assert stats.korn_graubard_factor(1, 300, 0.95) == 1.0


def test_the_interval_between_families_is_that_of_a_bootstrap_of_them() -> None:
    """Families drawn again with numpy: percentiles within a tenth of the width."""
    rng = random.Random(6)
    families = [(float(sum(rng.choice((-1, 0, 0, 0, 0, 1)) for _ in range(size))), size) for size in [3, 5, 8] * 40]
    sums, sizes = numpy.array(families).T
    chosen = numpy.random.default_rng(1).integers(0, 120, (20_000, 120))
    means = sums[chosen].sum(1) / sizes[chosen].sum(1)
    low, high = stats.cluster_robust_interval(families)
    tolerance = (high - low) / 10
    assert (low, high) == pytest.approx(tuple(numpy.quantile(means, (0.05, 0.95))), abs=tolerance)
    with pytest.raises(ValueError, match="two of them"):
        stats.cluster_robust_interval([(1.0, 2)])


def test_mcnemars_exact_test_is_a_fair_coin() -> None:
    """As scipy's binomial test has it; 1 where nothing changed."""
    assert stats.mcnemar_exact(0, 0) == 1.0
    for lost, won in itertools.product(range(13), repeat=2):
        if lost + won:
            assert stats.mcnemar_exact(lost, won) == pytest.approx(oracle.binomtest(lost, lost + won).pvalue, abs=1e-12)


def _likeliest(lost: int, won: int, n: int, difference: float) -> float:
    """The probability of a lost pair with the greatest likelihood where won minus lost is given, by search."""
    low, high = max(0.0, -difference), (1 - difference) / 2

    def likelihood(q: float) -> float:
        parts = ((lost, q), (won, q + difference), (n - lost - won, 1 - 2 * q - difference))
        return sum(count * math.log(max(p, 1e-300)) for count, p in parts if count)

    for _ in range(200):  # the likelihood is concave: golden section
        third = (high - low) * 0.381966011
        if likelihood(low + third) < likelihood(high - third):
            low += third
        else:
            high -= third
    return (low + high) / 2


@pytest.mark.parametrize(
    ("lost", "won", "n"), [(7, 1, 21), (0, 0, 50), (5, 0, 40), (0, 9, 300), (30, 12, 300), (10, 10, 20)]
)
def test_tangos_score_is_that_of_the_likelihood(lost: int, won: int, n: int) -> None:
    """The statistic with the constrained maximum found by search, over differences."""
    for difference in (-0.9, -0.3, -0.05, -0.01, 0.01, 0.05, 0.4):
        q = _likeliest(lost, won, n, difference)
        variance = n * (2 * q + difference - difference**2)
        expected = (won - lost - n * difference) / math.sqrt(variance)
        assert stats.tango_score_test(lost, won, n, difference) == pytest.approx(expected, rel=1e-4, abs=1e-6)


def test_tangos_interval_of_the_literature() -> None:
    """Airway reactivity before and after transplantation, 1 and 7 of 21 changed: (-0.517, -0.026).

    Fagerland, Lydersen and Laake (2014), Recommended tests and confidence intervals for paired binomial proportions.
    """
    assert stats.tango_interval(7, 1, 21) == pytest.approx((-0.517, -0.026), abs=5e-4)


def test_tangos_score_at_no_difference_is_mcnemars() -> None:
    """(won - lost) ÷ √(won + lost)."""
    for lost, won in ((1, 0), (7, 1), (4, 9), (20, 20)):
        assert stats.tango_score_test(lost, won, 60, 0.0) == pytest.approx((won - lost) / math.sqrt(won + lost))


def test_tangos_interval_turns_round_with_its_pairs_and_holds_the_difference() -> None:
    """Exchanging lost and won mirrors it; no pair or all of them may have changed; real counts are taken."""
    for lost, won, n in itertools.product((0, 1, 4.5, 10), (0, 2, 10), (20, 300)):
        low, high = stats.tango_interval(lost, won, n)
        assert (-high, -low) == pytest.approx(stats.tango_interval(won, lost, n), abs=1e-9)
        assert -1 <= low <= (won - lost) / n <= high <= 1
    with pytest.raises(ValueError, match="cannot be"):
        stats.tango_interval(5, 6, 10)


@pytest.mark.parametrize(("discordance", "pairs"), [(0.04, 138), (0.08, 275), (0.12, 412)])
def test_pairs_that_non_inferiority_needs(discordance: float, pairs: int) -> None:
    """At 5 points and 90 % power; where nothing changes the score still wants some."""
    assert stats.pairs_needed(discordance, 0.05) == pairs
    least = stats.pairs_needed(0.0, 0.05)
    assert least is not None
    z = stats.normal_quantile(0.95)
    assert stats.tango_bound(0, 0, least, z) > -0.05 >= stats.tango_bound(0, 0, least - 1, z)
    assert stats.pairs_needed(0.1, 0.05, difference=-0.05) is None
    assert stats.pairs_needed(0.1, 0.05, difference=-0.02) > 412  # type: ignore[operator]
