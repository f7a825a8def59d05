"""What a number of cases can tell: the rates that fail, the drops that are found, the cases that a proof needs.

``design_effect`` divides counts before a bound is taken; 1 for independent cases.
"""

from __future__ import annotations

import math
from functools import lru_cache

from pytest_vram.stats.beta import normal_quantile
from pytest_vram.stats.binomial import binomial_cdf, clopper_pearson


@lru_cache(maxsize=1024)
def critical_count(n: int, target: float, confidence: float = 0.95, *, design_effect: float = 1.0) -> int:
    """The most successes of ``n`` whose one-sided upper bound is still below ``target``; -1 where even 0 is not."""
    low, high = -1, n - 1  # of n successes of n the bound is 1
    while low < high:
        middle = (low + high + 1) // 2
        # The bound is below the target exactly where so few successes are this improbable at the target.
        if binomial_cdf(middle / design_effect, n / design_effect, target) < 1 - confidence:
            low = middle
        else:
            high = middle - 1
    return low


def power_of_not_below(
    n: int, target: float, true: float, confidence: float = 0.95, *, design_effect: float = 1.0
) -> float:
    """How often ``n`` cases fail a deployment whose true rate is ``true``: P(upper bound < target)."""
    critical = critical_count(n, target, confidence, design_effect=design_effect)
    return binomial_cdf(critical / design_effect, n / design_effect, true) if critical >= 0 else 0.0


@lru_cache(maxsize=1024)
def detectable_drop(
    n: int, target: float, confidence: float = 0.95, power: float = 0.8, *, design_effect: float = 1.0
) -> float | None:
    """The least drop below ``target`` that ``n`` cases find with this power; ``None`` where none is."""
    if power_of_not_below(n, target, 0.0, confidence, design_effect=design_effect) < power:
        return None
    low, high = 0.0, target  # rates: of the lower it is found, of the higher it is not
    for _ in range(24):
        middle = (low + high) / 2
        if power_of_not_below(n, target, middle, confidence, design_effect=design_effect) >= power:
            low = middle
        else:
            high = middle
    return target - low


def least_count_of_point_rule(n: int, target: float) -> int:
    """The fewest successes with k ÷ n ≥ target, as the division of floating-point numbers says it."""
    k = max(0, min(n, math.ceil(target * n)))
    while k > 0 and (k - 1) / n >= target:
        k -= 1
    while k < n and k / n < target:
        k += 1
    return k


def false_alarm_of_point_rule(n: int, target: float) -> float:
    """How often ``n`` independent cases of a deployment that is truly at ``target`` miss the rule k ÷ n ≥ target."""
    return binomial_cdf(least_count_of_point_rule(n, target) - 1, n, target)


def required_n_proven(failures: int, target: float, confidence: float = 0.95) -> int | None:
    """The fewest cases that prove ``target`` with so many failures: lower bound ≥ target; ``None``: none do."""
    more = more_without_failure(0, failures, target, confidence)
    return None if more is None else failures + more


def more_without_failure(
    right: int, n: int, target: float, confidence: float = 0.95, *, design_effect: float = 1.0
) -> int | None:
    """How many further successes in a row lift the lower bound to ``target``; ``None``: no number does."""
    if target >= 1:
        return None

    def proves(more: int) -> bool:
        k, all_ = (right + more) / design_effect, (n + more) / design_effect
        return k > 0 and clopper_pearson(k, all_, confidence, "lower")[0] >= target

    most = 1
    while not proves(most):
        if most > 10**9:
            return None
        most *= 2
    low, high = -1, most
    while high - low > 1:
        middle = (low + high) // 2
        if proves(middle):
            high = middle
        else:
            low = middle
    return high


@lru_cache(maxsize=256)
def fixed_sample_size(p0: float, p1: float, alpha: float = 0.05, beta: float = 0.05) -> int:
    """The fewest cases of a test of rate ``p0`` against the lower ``p1`` whose exact errors are at most these.

    :raises ValueError: not 0 ≤ p1 < p0 ≤ 1.
    """
    if not 0 <= p1 < p0 <= 1:
        raise ValueError(f"{p1!r} is not a lower rate than {p0!r}")
    # Normal approximation; the exact number is of its size, and is looked for from below.
    spread = normal_quantile(1 - alpha) * math.sqrt(p0 * (1 - p0)) + normal_quantile(1 - beta) * math.sqrt(
        p1 * (1 - p1)
    )
    n = max(1, int((spread / (p0 - p1)) ** 2 * 0.5))
    while True:
        # It fails at most so many successes that the first error holds.
        cut = critical_count(n, p0, 1 - alpha)
        if cut >= 0 and 1 - binomial_cdf(cut, n, p1) <= beta:
            return n
        n += 1
