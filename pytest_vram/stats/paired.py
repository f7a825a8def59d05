"""Two deployments on the same cases: pairs of which only those that changed tell anything.

``lost`` pairs were right before and are wrong now, ``won`` the other way round; the difference is the rate now minus
the rate before, (won − lost) ÷ n. Counts may be real: divided by a design effect.
"""

from __future__ import annotations

import math

from pytest_vram.stats.beta import normal_quantile
from pytest_vram.stats.binomial import binomial_cdf


def mcnemar_exact(lost: int, won: int) -> float:
    """The two-sided p-value of McNemar's test, exact: ``lost`` against ``won`` as a fair coin."""
    changed = lost + won
    return min(1.0, 2 * binomial_cdf(min(lost, won), changed, 0.5)) if changed else 1.0


def constrained_lost(lost: float, won: float, n: float, difference: float) -> float:
    """The maximum-likelihood probability of a lost pair where the true difference is given (Tango 1998, appendix)."""
    b = -(won + lost) + (2 * n - won + lost) * difference
    c = -lost * difference * (1 - difference)
    # 2n·q² + b·q + c = 0; the root that is a probability, without cancellation.
    root = math.sqrt(max(0.0, b * b - 8 * n * c))
    found = (root - b) / (4 * n) if b <= 0 else -2 * c / (b + root) if b + root > 0 else 0.0
    return min(1.0, max(0.0, -difference, found))


def tango_score_test(lost: float, won: float, n: float, difference: float) -> float:
    """Tango's score statistic (1998) for the true difference ``difference``: standard normal under it.

    Large values speak for a greater difference: with ``difference = -margin`` it tests non-inferiority.
    """
    q = constrained_lost(lost, won, n, difference)
    variance = n * (2 * q + difference - difference * difference)
    distance = won - lost - n * difference
    if variance <= 1e-15 * n:
        return 0.0 if abs(distance) <= 1e-12 * n else math.copysign(math.inf, distance)
    return distance / math.sqrt(variance)


def tango_bound(lost: float, won: float, n: float, z: float) -> float:
    """The difference at which the score statistic is ``z``: a bound of the interval; it falls as ``z`` grows."""
    low, high = -1.0, 1.0
    for _ in range(45):
        middle = (low + high) / 2
        if tango_score_test(lost, won, n, middle) > z:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def tango_interval(lost: float, won: float, n: float, confidence: float = 0.95) -> tuple[float, float]:
    """Tango's two-sided score interval (1998) for the difference of two paired rates."""
    if n <= 0 or lost < 0 or won < 0 or lost + won > n * (1 + 1e-12):
        raise ValueError(f"{lost!r} lost and {won!r} won of {n!r} pairs cannot be")
    z = normal_quantile((1 + confidence) / 2)
    return tango_bound(lost, won, n, z), tango_bound(lost, won, n, -z)


def pairs_needed(
    discordance: float, margin: float, confidence: float = 0.95, power: float = 0.9, *, difference: float = 0.0
) -> int | None:
    """How many pairs show non-inferiority within ``margin`` with this power at this true difference.

    (z + z′)²·(discordance − difference²) ÷ (margin + difference)² (Connor 1987), and at least as many as Tango's
    bound needs where no pair changes: z²·(1 − margin) ÷ margin. ``None``: the difference is beyond the margin.
    """
    if difference <= -margin:
        return None
    z = normal_quantile(confidence)
    spread = (z + normal_quantile(power)) ** 2 * (discordance - difference**2) / (margin + difference) ** 2
    return math.ceil(max(spread, z * z * (1 - margin) / margin) - 1e-9)
