"""Cycles of idle memory: how long one is where nobody says it, and what each of its phases adds."""

from __future__ import annotations

import itertools
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from statistics import fmean, median

#: Lags, and points, that are looked at for a cycle that was not given.
LONGEST_CYCLE = 60
LOOKED_AT = 600

Point = tuple[int, float]


def seasons(judged: Sequence[Sequence[Point]], period: int) -> list[float]:
    """What each phase adds: the median, over cycles, of values less the median of the cycle about them.

    A median over one whole cycle does not move with the phase, but follows slopes and jumps.
    """
    beside: list[list[float]] = [[] for _ in range(period)]
    for points in judged:
        levels = list(_moving_median([value for _, value in points], period))
        for place, (turn, value) in enumerate(points):
            level = levels[min(max(0, place - period // 2), len(levels) - 1)]
            beside[turn % period].append(value - level)
    return [median(values) if values else 0.0 for values in beside]


def _moving_median(values: Sequence[float], width: int) -> Iterator[float]:
    """Medians of each run of ``width`` values; of all values where there are fewer."""
    window = sorted(values[:width])
    yield median(window)
    for gone, come in zip(values, values[width:], strict=False):
        del window[bisect_left(window, gone)]
        insort(window, come)
        half = len(window) // 2
        yield window[half] if len(window) % 2 else (window[half - 1] + window[half]) / 2


def find_cycle(points: Sequence[Point]) -> int:
    """The length of a plain cycle, 0 where none stands out.

    A lag at which a series without its slope is like itself (correlation above one half), more than at the lags about
    it and much more than at half of it. A series that only wanders, jumps or rises is most like itself at lag 1.
    """
    values = [value for _, value in points[:LOOKED_AT]]
    count = len(values)
    slope = (fmean(values[-(count // 3) :]) - fmean(values[: count // 3])) / max(1, count - count // 3)
    flat = centred([value - slope * place for place, value in enumerate(values)])
    changes = [later - earlier for earlier, later in itertools.pairwise(values)]
    # A jump hides the cycle from the levels, but not from the changes between turns.
    return _likeness(flat, 6) or _likeness(changes, 20)


def _likeness(flat: list[float], spikes: int) -> int:
    """The lag at which values about 0 are most like themselves, 0 where none stands out.

    Values beyond ``spikes`` times the usual one are cut to that: lone ones would hide the cycle.
    """
    count = len(flat)
    reach = spikes * median(abs(value) for value in flat)
    flat = [max(-reach, min(reach, value)) for value in flat]
    power = sum(value * value for value in flat)
    if power == 0:
        return 0
    longest = min(LONGEST_CYCLE, count // 3)
    like = [
        sum(one * other for one, other in zip(flat, flat[lag:], strict=False)) / power * count / (count - lag)
        for lag in range(longest + 2)
    ]
    for lag in range(3, longest + 1):
        around = max(like[lag - 1], like[lag + 1])
        if like[lag] > 0.5 and like[lag] > around and like[lag] - min(like[1:lag]) > 0.5:
            return lag
    return 0


def centred(values: list[float]) -> list[float]:
    """The values less their mean."""
    middle = fmean(values) if values else 0.0
    return [value - middle for value in values]
