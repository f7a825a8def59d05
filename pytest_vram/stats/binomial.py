"""The binomial distribution and intervals for its rate."""

from __future__ import annotations

import math
from typing import Literal

from pytest_vram.stats.beta import (
    inverse_regularised_incomplete_beta,
    normal_quantile,
    regularised_incomplete_beta,
)

Side = Literal["lower", "upper", "both"]


def binomial_cdf(k: float, n: float, p: float) -> float:
    """P(X ≤ k) of X ~ Bin(n, p) = I_{1−p}(n − k, k + 1); the right-hand side also for real ``k`` and ``n``."""
    if k < 0:
        return 0.0
    if k >= n:
        return 1.0
    return regularised_incomplete_beta(1 - p, n - k, k + 1)


def clopper_pearson(k: float, n: float, confidence: float = 0.95, side: Side = "both") -> tuple[float, float]:
    """The exact interval of Clopper and Pearson (1934) for the rate of ``k`` of ``n``.

    :param side: ``both``: two-sided, (1 − confidence)/2 on each side; ``lower`` or ``upper``: one-sided, the other
        end is 1 or 0. ``k`` and ``n`` may be real: counts divided by a design effect (Korn and Graubard 1998).
    :returns: (low, high).
    """
    if not 0 <= k <= n or n <= 0:
        raise ValueError(f"{k!r} of {n!r} is not a count of successes")
    tail = (1 - confidence) / 2 if side == "both" else 1 - confidence
    low, high = 0.0, 1.0
    if side != "upper" and k > 0:
        low = inverse_regularised_incomplete_beta(tail, k, n - k + 1)
    if side != "lower" and k < n:
        high = inverse_regularised_incomplete_beta(1 - tail, k + 1, n - k)
    return low, high


def wilson(k: float, n: float, confidence: float = 0.95) -> tuple[float, float]:
    """The two-sided score interval of Wilson (1927) for the rate of ``k`` of ``n``."""
    if not 0 <= k <= n or n <= 0:
        raise ValueError(f"{k!r} of {n!r} is not a count of successes")
    z = normal_quantile((1 + confidence) / 2)
    rate = k / n
    centre = (rate + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(rate * (1 - rate) / n + z * z / (4 * n * n))
    # At 0 and n the ends are 0 and 1; rounding must not move them.
    return (0.0 if k == 0 else max(0.0, centre - half)), (1.0 if k == n else min(1.0, centre + half))
