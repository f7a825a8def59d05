"""Observations that come in clusters: how much less they say than as many independent ones."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from functools import lru_cache

from pytest_vram.stats.beta import student_t_quantile


class ClusterTally:
    """Sums over clusters, kept up with every observation, from which the intraclass correlation follows at any time."""

    __slots__ = ("_between", "_counts", "_sizes", "_squares", "_sums", "n", "total")

    def __init__(self) -> None:
        self._counts: dict[Hashable, int] = {}
        self._sums: dict[Hashable, float] = {}
        self._squares = 0.0  # Σ y²
        self._between = 0.0  # Σ (cluster's sum)² ÷ its size
        self._sizes = 0  # Σ size²
        self.n = 0
        self.total = 0.0

    def add(self, cluster: Hashable, value: float) -> None:
        """Count one observation of a cluster."""
        count, sum_ = self._counts.get(cluster, 0), self._sums.get(cluster, 0.0)
        if count:
            self._between -= sum_ * sum_ / count
        sum_ += value
        self._between += sum_ * sum_ / (count + 1)
        self._sizes += 2 * count + 1
        self._squares += value * value
        self._counts[cluster], self._sums[cluster] = count + 1, sum_
        self.n += 1
        self.total += value

    @property
    def clusters(self) -> int:
        """How many clusters have an observation."""
        return len(self._counts)

    @property
    def sums(self) -> dict[Hashable, float]:
        """The sum of every cluster."""
        return dict(self._sums)

    @property
    def pairs(self) -> list[tuple[float, int]]:
        """(sum, size) of every cluster."""
        return [(self._sums[name], count) for name, count in self._counts.items()]

    @property
    def mean_size(self) -> float:
        """The size of the cluster of an average observation, Σ size² ÷ n."""
        return self._sizes / self.n if self.n else 0.0

    def icc(self) -> float | None:
        """The intraclass correlation by the analysis of variance; ``None`` where there is nothing to tell it from.

        (MSB − MSW) ÷ (MSB + (n₀ − 1)·MSW) with n₀ = (n − Σ size² ÷ n) ÷ (clusters − 1): Donner (1986), the
        estimator that Ridout, Demétrio and Firth (1999) find good for binary data. It may be negative.
        """
        clusters, n = len(self._counts), self.n
        if clusters < 2 or n == clusters:
            return None
        overall = self.total * self.total / n
        msb = (self._between - overall) / (clusters - 1)
        msw = (self._squares - self._between) / (n - clusters)
        n0 = (n - self._sizes / n) / (clusters - 1)
        whole = msb + (n0 - 1) * msw
        # Sums of squares of binary data are either 0 or of the order of 1 ÷ n; less is rounding.
        return (msb - msw) / whole if whole * n > 1e-9 else None

    def design_effect(self, *, least_icc: float = 0.0) -> float:
        """1 + (Σ size² ÷ n − 1)·ICC, at least 1 (Kish 1965); n observations say what n ÷ this independent ones do.

        One cluster is one observation, whatever its size.

        :param least_icc: taken where the estimate is smaller, or nothing can be estimated since all is the same.
        """
        if not self.n:
            return 1.0
        if len(self._counts) == 1:
            return float(self.n)
        icc = self.icc()
        return 1.0 + (self.mean_size - 1.0) * min(1.0, max(least_icc, icc if icc is not None else 0.0))


def _tally(clusters: Mapping[str, Sequence[float]]) -> ClusterTally:
    tally = ClusterTally()
    for name, values in clusters.items():
        for value in values:
            tally.add(name, value)
    return tally


def anova_icc(clusters: Mapping[str, Sequence[float]]) -> float | None:
    """The intraclass correlation of clusters of outcomes; see :meth:`ClusterTally.icc`."""
    return _tally(clusters).icc()


def design_effect(clusters: Mapping[str, Sequence[float]]) -> float:
    """The design effect of clusters of outcomes, at least 1; see :meth:`ClusterTally.design_effect`."""
    return _tally(clusters).design_effect()


def korn_graubard_factor(clusters: int, n: int, confidence: float) -> float:
    """(t of clusters − 1 ÷ t of n − 1)², at least 1: what the design effect grows by for being estimated.

    From Korn and Graubard (1998): with few clusters the variance between them is known badly.
    """
    if clusters < 2:
        return 1.0
    return max(1.0, (_t_quantile(confidence, clusters - 1) / _t_quantile(confidence, n - 1)) ** 2)


@lru_cache(maxsize=2048)
def _t_quantile(confidence: float, degrees: int) -> float:
    return student_t_quantile(confidence, degrees)


def cluster_robust_interval(clusters: Iterable[tuple[float, int]], confidence: float = 0.95) -> tuple[float, float]:
    """One-sided bounds, each at ``confidence``, of Σ sums ÷ Σ sizes, from the variance between clusters alone.

    The ratio estimator linearised (Obuchowski 1998 for paired rates), with Student's t of clusters − 1 degrees.

    :param clusters: (sum of outcomes, number of outcomes) of each, at least two.
    """
    drawn = list(clusters)
    count, n = len(drawn), sum(size for _, size in drawn)
    if count < 2:
        raise ValueError("the variance between clusters takes at least two of them")
    mean = sum(sum_ for sum_, _ in drawn) / n
    variance = count / (count - 1) * sum((sum_ - mean * size) ** 2 for sum_, size in drawn) / (n * n)
    half = _t_quantile(confidence, count - 1) * math.sqrt(variance)
    return mean - half, mean + half
