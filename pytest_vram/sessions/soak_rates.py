"""How sure the decode rate's retention is: what a machine does besides moves it, and for many turns in a row."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from statistics import median

from pytest_vram.stats import student_t_quantile

#: Correlation of neighbours above which an estimate from a soak is taken for this.
_MOST_CORRELATED = 0.98
#: Ends of the residuals are drawn in to so many robust deviations: one turn beside a backup says nothing of the others.
_DRAWN_IN = 4.0
#: Of an interval that says nothing: beyond it exp() has no finite value before long.
_WIDEST = 100.0


def log_error(
    rates: Sequence[float], *, period: int, begin: int, early: int, late: int, confidence: float = 0.98
) -> float:
    """Half the width of the interval of log(late rate / early rate).

    The log rates, phases taken out, are a line or one step, whichever leaves less, and what is left follows itself
    (first-order autoregression): its correlation is corrected for the bias of a fit with two parameters (Marriott and
    Pope 1954), and a mean of m turns has the variance s²/m² · (m + 2Σ(m−k)φᵏ). Turns without a rate are left out.

    :param rates: tokens/s of all turns; NaN: none. :param begin: index of the first turn that is compared.
    :param early: turns of the early part, from ``begin``; ``late``: of the late part, up to the end.
    """
    phases: dict[int, list[float]] = {}
    kept = [(index, math.log(rate)) for index, rate in enumerate(rates) if index >= begin and rate > 0]
    for index, value in kept:
        phases.setdefault(index % period, []).append(value)
    middles = {phase: median(values) for phase, values in phases.items()}
    values = [value - middles[index % period] for index, value in kept]
    n = len(values)
    if n < 8:
        return _WIDEST
    left = _drawn_in(min((_without_line(values), _without_step(values)), key=lambda one: sum(x * x for x in one)))
    total = sum(value * value for value in left)
    if total <= n * 1e-12:
        return 0.0
    seen = sum(before * after for before, after in itertools.pairwise(left)) / total
    correlation = min(_MOST_CORRELATED, max(0.0, (seen + 2 / n) / (1 - 4 / n)))
    # So many turns say what one that is independent of the others would.
    alike = (1 + correlation) / (1 - correlation)
    free = max(n / alike - 2, 2.0)
    variance = total / max(n - 2 * alike, n / 4)
    error = math.sqrt(variance * (_of_mean(correlation, early) + _of_mean(correlation, late)))
    return min(_WIDEST, student_t_quantile((1 + confidence) / 2, free) * error)


def _of_mean(correlation: float, count: int) -> float:
    """Variance of the mean of so many turns in a row, for a variance of 1."""
    count = max(1, count)
    return (count + 2 * sum((count - lag) * correlation**lag for lag in range(1, min(count, 2000)))) / count**2


def _without_line(values: Sequence[float]) -> list[float]:
    n = len(values)
    middle, mean = (n - 1) / 2, sum(values) / n
    slope = sum((place - middle) * value for place, value in enumerate(values)) / (n * (n * n - 1) / 12)
    return [value - mean - slope * (place - middle) for place, value in enumerate(values)]


def _without_step(values: Sequence[float]) -> list[float]:
    """Less the two means of the best place for one step, which has an eighth of the turns or more on either side."""
    n, total, before = len(values), sum(values), 0.0
    least, best, cut = max(1, n // 8), -1.0, 0
    for place, value in enumerate(values[:-1], start=1):
        before += value
        gain = (before - total * place / n) ** 2 * n / (place * (n - place))
        if least <= place <= n - least and gain > best:
            best, cut = gain, place
    first, second = sum(values[:cut]) / cut, sum(values[cut:]) / (n - cut)
    return [value - (first if place < cut else second) for place, value in enumerate(values)]


def _drawn_in(values: Sequence[float]) -> list[float]:
    most = _DRAWN_IN * 1.4826 * median(map(abs, values))
    return list(values) if most <= 0 else [max(-most, min(most, value)) for value in values]
