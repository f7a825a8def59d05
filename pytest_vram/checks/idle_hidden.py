"""Rises that the level of most turns hides: at one phase of a cycle, in the highest readings, at the end.

Medians of blocks do not move with a minority of the turns. None of what is found here is called a leak: it keeps a
series from being called flat.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from statistics import fmean, median
from typing import Literal

import msgspec

from pytest_vram.stats import mann_kendall, theil_sen

Point = tuple[float, float]
#: Turns of one phase, or blocks, on which a rise is seen: fewer cannot reach a p-value of 0.01.
FEWEST = 5
#: Blocks whose highest reading is taken, and medians that the turns of one phase are reduced to.
BLOCKS, MEDIANS = 12, 24
#: Turns at the end that are a spike or a jump; more of them are a level.
LAST = 2


class Hidden(msgspec.Struct, frozen=True, kw_only=True):
    """A rise beside the level. ``bytes`` is its height.

    :ivar reason: ``phase`` (at one phase of a cycle), ``tops`` (in the highest readings), ``last`` (in the last one or
        two turns). :ivar turn: where it was seen first: a turn of the phase, the first of the last ones; else the first
        judged. :ivar count: turns of the cycle, or last turns.
    """

    reason: Literal["phase", "tops", "last"]
    turn: int
    bytes: int
    count: int = 0


def find(
    judged: Sequence[Sequence[tuple[int, float]]],
    settled: Sequence[Sequence[tuple[int, float]]],
    period: int,
    floor: float,
    p_value: float,
) -> Hidden | None:
    """What rises by more than ``floor`` beside a level that does not; ``None`` where nothing does.

    :param judged: points (turn, bytes) of each segment after its warm-up, as read. :param settled: the same without
        phases and explained jumps. :param period: turns of the cycle, 0 for none.
    """
    groups = [points for points in judged if points]
    found = _phase(groups, period, floor, p_value) if period > 1 else _tops(groups, floor, p_value)
    return found or _last(settled, floor)


def _rises(groups: Sequence[Sequence[Point]], floor: float, p_value: float) -> float | None:
    """The growth of a rise that Mann–Kendall's test and the slope of Theil and Sen agree on."""
    used = [points for points in groups if len(points) > 1]
    if sum(map(len, used)) < FEWEST:
        return None
    slope = theil_sen(*used)
    if slope.slope is None or slope.low is None or slope.low <= 0:
        return None
    growth = slope.slope * sum(points[-1][0] - points[0][0] for points in used)
    if growth <= floor or mann_kendall(*([value for _, value in points] for points in used)).p_rise >= p_value:
        return None
    return growth


def _phase(groups: Sequence[Sequence[tuple[int, float]]], period: int, floor: float, p_value: float) -> Hidden | None:
    best: Hidden | None = None
    for phase in range(period):
        own = [own for points in groups if (own := [point for point in points if point[0] % period == phase])]
        growth = _rises([_blocks(points, MEDIANS, median) for points in own], floor, p_value)
        if growth is not None and (best is None or growth > best.bytes):
            best = Hidden(reason="phase", turn=own[0][0][0], bytes=round(growth), count=period)
    return best


def _tops(groups: Sequence[Sequence[tuple[int, float]]], floor: float, p_value: float) -> Hidden | None:
    growth = _rises([_blocks(points, min(BLOCKS, len(points) // FEWEST), max) for points in groups], floor, p_value)
    return None if growth is None else Hidden(reason="tops", turn=groups[0][0][0], bytes=round(growth))


def _blocks(points: Sequence[tuple[int, float]], most: int, of: Callable[[list[float]], float]) -> list[Point]:
    number = min(len(points), max(1, most))
    edges = [round(place * len(points) / number) for place in range(number + 1)]
    parts = [points[begin:end] for begin, end in itertools.pairwise(edges)]
    return [(fmean(turn for turn, _ in part), of([value for _, value in part])) for part in parts]


def _last(settled: Sequence[Sequence[tuple[int, float]]], floor: float) -> Hidden | None:
    """One or two turns at the end that are above every one before."""
    points = settled[-1]
    for count in range(LAST, 0, -1):
        rest, last = points[:-count], points[-count:]
        if len(rest) < FEWEST:
            continue
        height = min(value for _, value in last) - max(value for _, value in rest)
        if height > floor:
            return Hidden(reason="last", turn=last[0][0], bytes=round(height), count=count)
    return None


def climb(settled: Sequence[Sequence[tuple[int, float]]]) -> int:
    """Bytes from the level of the first segment to that of the last, where each one is above the one before; else 0.

    No slope goes across a restart, but the sum of them is there.
    """
    levels = [median(value for _, value in points) for points in settled if points]
    if len(levels) < 2 or any(later <= earlier for earlier, later in itertools.pairwise(levels)):
        return 0
    return round(levels[-1] - levels[0])
