"""The regularised incomplete beta function, its inverse, and the quantiles that follow from it."""

from __future__ import annotations

import math
from statistics import NormalDist

_TINY = 1e-300
_EPSILON = 1e-16
_NORMAL = NormalDist()


def regularised_incomplete_beta(x: float, a: float, b: float) -> float:
    """I_x(a, b): the probability that a beta variable with shapes ``a`` and ``b`` is at most ``x``.

    By the continued fraction DLMF 8.17.22, evaluated with Lentz's method as modified by Thompson and Barnett; on the
    side of the mean where it converges in about √max(a, b) steps, the other by I_x(a, b) = 1 − I_{1−x}(b, a).

    :raises ValueError: a shape that is not positive.
    """
    if not (a > 0 and b > 0):
        raise ValueError(f"the shapes of a beta distribution are positive numbers, not {a!r} and {b!r}")
    if x <= 0:
        return 0.0
    if x >= 1:
        return 1.0
    front = math.exp(a * math.log(x) + b * math.log1p(-x) - log_beta(a, b))
    if x < (a + 1) / (a + b + 2):
        return min(1.0, front * _continued_fraction(x, a, b) / a)
    return max(0.0, 1.0 - front * _continued_fraction(1 - x, b, a) / b)


def log_beta(a: float, b: float) -> float:
    """The logarithm of Euler's beta function."""
    return math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)


def _continued_fraction(x: float, a: float, b: float) -> float:
    c = 1.0
    d = 1.0 - (a + b) * x / (a + 1)
    d = 1.0 / (d if abs(d) > _TINY else _TINY)
    value = d
    for m in range(1, 200 + 20 * math.isqrt(int(max(a, b)) + 1)):
        twice = a + 2 * m
        for numerator in (
            m * (b - m) * x / ((twice - 1) * twice),
            -(a + m) * (a + b + m) * x / (twice * (twice + 1)),
        ):
            d = 1.0 + numerator * d
            d = 1.0 / (d if abs(d) > _TINY else _TINY)
            c = 1.0 + numerator / c
            c = c if abs(c) > _TINY else _TINY
            value *= c * d
        if abs(c * d - 1.0) < 4 * _EPSILON:
            break
    return value


def inverse_regularised_incomplete_beta(p: float, a: float, b: float) -> float:
    """The x with I_x(a, b) = ``p``: the ``p``-quantile of a beta distribution, to about 1e-14.

    Newton's steps, and halving wherever one would leave the interval that holds the root.
    """
    if p <= 0:
        return 0.0
    if p >= 1:
        return 1.0
    low, high = 0.0, 1.0
    x = a / (a + b)
    scale = log_beta(a, b)
    for _ in range(200):
        error = regularised_incomplete_beta(x, a, b) - p
        if error > 0:
            high = x
        else:
            low = x
        log_density = (a - 1) * math.log(x) + (b - 1) * math.log1p(-x) - scale
        step = error * math.exp(-log_density) if log_density > -700 else math.inf
        following = x - step
        if not low < following < high:
            following = (low + high) / 2
        if abs(following - x) <= 1e-15 * max(following, 1e-3) or not 0.0 < following < 1.0:
            return following
        x = following
    return x


def normal_quantile(p: float) -> float:
    """The quantile of the standard normal distribution."""
    return _NORMAL.inv_cdf(p)


def student_t_quantile(p: float, degrees: float) -> float:
    """The quantile of Student's t distribution, through I_x(degrees/2, 1/2) with x = degrees/(degrees + t²)."""
    if p == 0.5:
        return 0.0
    tail = 2 * min(p, 1 - p)
    x = inverse_regularised_incomplete_beta(tail, degrees / 2, 0.5)
    size = math.sqrt(degrees * (1 - x) / x) if x > 0 else math.inf
    return size if p > 0.5 else -size
