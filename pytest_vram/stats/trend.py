"""Trends of series: the test of Mann and Kendall and the slope of Theil and Sen, within groups that pool."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Sequence

import msgspec

from pytest_vram.stats.beta import normal_quantile


class MannKendall(msgspec.Struct, frozen=True, kw_only=True):
    """Kendall's score of a series against its order.

    :ivar score: S, rising pairs minus falling pairs. :ivar variance: of S where there is no trend, corrected for ties.
    :ivar pairs: how many pairs were compared.
    """

    score: int
    variance: float
    pairs: int

    @property
    def z(self) -> float:
        """The normal score with the continuity correction; 0 where nothing can be said."""
        if self.variance <= 0 or self.score == 0:
            return 0.0
        return (self.score - math.copysign(1, self.score)) / math.sqrt(self.variance)

    @property
    def p_rise(self) -> float:
        """One-sided p value of a rise; 1 where the series cannot rise or fall (no pairs, or all values equal)."""
        if self.variance <= 0:
            return 1.0
        # The correction moves the score towards 0, so a falling series keeps a p value above one half.
        return 0.5 * math.erfc((self.score - 1) / math.sqrt(2 * self.variance))


def mann_kendall(*groups: Sequence[float]) -> MannKendall:
    """The test of Mann (1945) and Kendall (1975) for a monotone trend, pooled over ``groups``.

    Scores and variances of independent groups add (the blocked test of Hirsch, Slack and Smith 1982): no pair goes
    across two groups. The variance is n(n−1)(2n+5)/18 less t(t−1)(2t+5)/18 for every tie of t values. It takes
    n log n comparisons for n values.
    """
    score, variance, pairs = 0, 0.0, 0
    for group in groups:
        seen: list[float] = []
        for value in group:
            below, upto = bisect_left(seen, value), bisect_right(seen, value)
            score += below - (len(seen) - upto)
            insort(seen, value)
        n = len(seen)
        pairs += n * (n - 1) // 2
        variance += (_spread(n) - sum(_spread(t) for t in Counter(seen).values())) / 18
    return MannKendall(score=score, variance=variance, pairs=pairs)


class TheilSen(msgspec.Struct, frozen=True, kw_only=True):
    """A robust slope: the median over pairs of points, with an interval; ``None`` where there is no pair."""

    slope: float | None = None
    low: float | None = None
    high: float | None = None


def theil_sen(*groups: Sequence[tuple[float, float]], confidence: float = 0.95) -> TheilSen:
    """The slope of Theil (1950) and Sen (1968) over points (x, y), from pairs within ``groups`` only.

    The two-sided interval is Sen's: order statistics of the pairs' slopes at (N ± z·σ)/2, σ² the variance of
    Kendall's score over the same groups. Pairs with one x are left out. Time and memory grow with the pairs of each
    group, so thin out long series first.
    """
    slopes = [
        (later[1] - earlier[1]) / (later[0] - earlier[0])
        for group in groups
        for place, later in enumerate(group)
        for earlier in group[:place]
        if later[0] != earlier[0]
    ]
    if not slopes:
        return TheilSen()
    slopes.sort()
    count = len(slopes)
    variance = mann_kendall(*([y for _, y in group] for group in groups)).variance
    reach = normal_quantile((1 + confidence) / 2) * math.sqrt(max(0.0, variance))
    low = slopes[max(0, round((count - reach) / 2) - 1)]
    high = slopes[min(count - 1, round((count + reach) / 2))]
    return TheilSen(slope=_median(slopes), low=low, high=high)


def _spread(count: int) -> int:
    """n(n−1)(2n+5): eighteen times the variance of Kendall's score over ``count`` values without ties."""
    return count * (count - 1) * (2 * count + 5)


def _median(ordered: Sequence[float]) -> float:
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2
