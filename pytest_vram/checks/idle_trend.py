"""What one series of idle memory does: it rises, eases, jumps, or does nothing that can be told from noise."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from statistics import fmean, median
from typing import Literal

import msgspec

from pytest_vram.checks import idle_hidden
from pytest_vram.checks.idle_cycles import centred, find_cycle
from pytest_vram.checks.idle_cycles import seasons as seasons_of
from pytest_vram.checks.idle_hidden import Hidden
from pytest_vram.stats import TheilSen, mann_kendall, theil_sen
from pytest_vram.units import KIB, MIB

#: Points on either side of a jump from which its height is read.
BESIDE = 8
#: Jumps that are taken out of one series at most; each costs a pass over it.
MOST_STEPS = 10
#: Jumps without an explanation, after which a series grows in jumps.
FEW_STEPS = 3
#: Points of a segment below which it says nothing.
SHORTEST = 8

Reason = Literal[
    "", "short", "cycle", "steps", "events", "eases", "drops", "wanders", "weak", "late", "noisy",
    "phase", "tops", "last", "pieces",
]  # fmt: skip
Point = tuple[int, float]


class Thresholds(msgspec.Struct, frozen=True, kw_only=True):
    """Where the lines are drawn. Sizes in bytes, lengths in turns.

    :ivar minimum: turns that were read, below which there is no verdict.
    :ivar warm_up: turns that are left out at the start of each segment, at least; ``warm_up_share`` of it, if more.
    :ivar blocks: medians that a segment is reduced to. :ivar p_value: of Mann–Kendall's test, one-sided.
    :ivar floor: a growth over the judged turns, or a jump, that is not worth a verdict.
    :ivar sharp: share of a jump's height that its next neighbours show; a slope shows less.
    :ivar easing: second half's slope over the first's, below which growth eases.
    :ivar wander: bytes a turn, as a standard deviation, by which memory may stray at random without being a leak.
    :ivar noisy: growth, in floors, that must be excluded before a series is called flat.
    :ivar missing: share of turns without a reading, above which there is no verdict.
    """

    minimum: int = 60
    warm_up: int = 10
    warm_up_share: float = 0.2
    blocks: int = 12
    p_value: float = 0.01
    floor: float = 32 * MIB
    sharp: float = 0.6
    easing: float = 0.5
    wander: float = 1.0 * MIB
    noisy: float = 8.0
    missing: float = 0.1


class Trend(msgspec.Struct, frozen=True, kw_only=True):
    """What the judged turns of one series do.

    :ivar reason: why ``kind`` is inconclusive. :ivar turns: judged; ``warm_up`` were left out.
    :ivar span: turns over which the growth is projected. :ivar until: the index behind the last of them.
    :ivar rise: from the first turns of all, warm-up included, to the last. :ivar tail: slope of the last third.
    :ivar steps: (turn, bytes) of jumps that nothing explains; ``explained``, those at an event.
    :ivar since: the turn up to which nearly nothing of the growth happened; ``None`` where it is spread over the run.
    :ivar ending: (turn, bytes) of a rise in the last third alone.
    :ivar cycle: by which the phases were taken out; 0: none.
    :ivar hidden: what rises beside the level, where that is why ``kind`` is inconclusive.
    :ivar climb: bytes from the first segment's level to the last one's, where each is above the one before.
    :ivar pieces: servers that a growth was put together from and that none shows alone;
        ``needs``, turns of one server that would tell.
    """

    kind: Literal["flat", "warming", "step", "leak", "inconclusive"]
    reason: Reason = ""
    turns: int = 0
    warm_up: int = 0
    span: int = 0
    until: int = 0
    slope: float | None = None
    low: float | None = None
    high: float | None = None
    growth: float | None = None
    p_value: float | None = None
    rise: float = 0.0
    tail: float | None = None
    since: int | None = None
    ending: tuple[int, int] | None = None
    steps: tuple[tuple[int, int], ...] = ()
    explained: tuple[tuple[int, int], ...] = ()
    cycle: int = 0
    segments: int = 1
    left_out: int = 0
    hidden: Hidden | None = None
    climb: int = 0
    pieces: int = 0
    needs: int = 0

    def slope_words(self) -> str:
        """The slope with its interval, in MiB, without "a turn"."""
        if self.slope is None or self.low is None or self.high is None:
            return "an unknown amount"
        unit, name = _unit(max(abs(self.low), abs(self.high)))
        return f"{self.slope / unit:,.2f} {name} ({self.low / unit:,.2f} to {self.high / unit:,.2f})"


def per_turn(size: float) -> str:
    """Bytes a turn in MiB, or in KiB where that would be nearly nothing."""
    unit, name = _unit(size)
    return f"{size / unit:,.2f} {name}"


def _unit(size: float) -> tuple[int, str]:
    return (MIB, "MiB") if abs(size) >= 0.1 * MIB else (KIB, "KiB")


def trend_of(
    values: Sequence[float | None],
    *,
    thresholds: Thresholds,
    cycle: int | None = None,
    events: Sequence[int] = (),
    segments: Sequence[int] = (),
) -> Trend:
    """Judge one series; ``None`` is a turn that could not be read. Time grows with n log n."""
    found = _trend_of(values, thresholds=thresholds, cycle=cycle, events=events, segments=segments)
    begins = sorted({0, *(begin for begin in segments if 0 < begin < len(values))})
    if found.kind not in ("warming", "step") or len(begins) < 2:
        return found
    # Growth that eases or is one jump is what one server does. Put together from several, a leak looks like it too:
    # each piece begins anew, and how fast the last of them grows depends on where they were cut.
    first, last = max(itertools.pairwise([*begins, len(values)]), key=lambda piece: piece[1] - piece[0])
    if last - first >= 2 * thresholds.minimum:
        own = [event - first for event in events if first <= event < last]
        alone = _trend_of(values[first:last], thresholds=thresholds, cycle=cycle, events=own, segments=())
        if alone.kind in ("flat", "warming", "step"):
            return found
    return msgspec.structs.replace(
        _as(found, "inconclusive", "pieces"), pieces=len(begins), needs=2 * thresholds.minimum
    )


def _trend_of(
    values: Sequence[float | None],
    *,
    thresholds: Thresholds,
    cycle: int | None,
    events: Sequence[int],
    segments: Sequence[int],
) -> Trend:
    count = len(values)
    known = [value for value in values if value is not None]
    begins = sorted({0, *(begin for begin in segments if 0 < begin < count)})
    spans = list(zip(begins, [*begins[1:], count], strict=True))
    whole: list[list[Point]] = []
    judged_from: list[int] = []
    left_out = 0
    for begin, end in spans:
        first = begin + max(thresholds.warm_up, math.ceil(thresholds.warm_up_share * (end - begin)))
        points = [(turn, value) for turn in range(begin, end) if (value := values[turn]) is not None]
        if sum(turn >= first for turn, _ in points) < SHORTEST:
            left_out += 1
            continue
        whole.append(points)
        judged_from.append(first)
    turns = sum(turn >= first for points, first in zip(whole, judged_from, strict=True) for turn, _ in points)
    about = Trend(
        kind="inconclusive",
        turns=turns,
        warm_up=len(known) - turns,
        segments=len(whole),
        left_out=left_out,
        rise=_rise(known),
    )
    if not whole or len(known) < thresholds.minimum or turns < thresholds.minimum // 2:
        return _as(about, "inconclusive", "short")
    judged = [
        [point for point in points if point[0] >= first] for points, first in zip(whole, judged_from, strict=True)
    ]
    read = judged
    # Jumps at regular events look like a cycle on a slope; who marks events knows the cycle, if there is one.
    period = cycle if cycle is not None else 0 if events else find_cycle(max(judged, key=len))
    if period > 1:
        if cycle is not None and turns < 3 * period:
            return msgspec.structs.replace(about, reason="cycle", cycle=period)
        seasons = seasons_of(judged, period)
        whole = [[(turn, value - seasons[turn % period]) for turn, value in points] for points in whole]
        about = msgspec.structs.replace(about, cycle=period)
    steps: list[tuple[int, int]] = []
    explained: list[tuple[int, int]] = []
    settled: list[list[Point]] = []
    begun = [[point for point in points if point[0] < first] for points, first in zip(whole, judged_from, strict=True)]
    for points, first in zip(whole, judged_from, strict=True):
        # A few turns of warm-up stay in sight, so that a jump in the first judged turns has a level before it.
        start = max(0, next(place for place, point in enumerate(points) if point[0] >= first) - BESIDE)
        rest = points[start:]
        for _ in range(MOST_STEPS):
            jump = _step(rest, thresholds)
            if jump is None:
                break
            place, height = jump
            turn = rest[place][0]
            at_event = any(abs(turn - event) <= 2 for event in events)
            if not at_event and sum(1 for step in steps if step[0] >= points[0][0]) >= FEW_STEPS:
                break
            rest = [*rest[:place], *((turn, value - height) for turn, value in rest[place:])]
            if turn >= first:
                (explained if at_event else steps).append((turn, round(height)))
        settled.append([point for point in rest if point[0] >= first])
    about = msgspec.structs.replace(about, climb=idle_hidden.climb(read))
    found = _judge(settled, begun, thresholds, steps, explained, about)
    if found.kind == "flat":
        found = _without_drop(settled, begun, thresholds, found, steps, explained, about)
    if found.kind in ("flat", "step"):
        jumps = [*steps, *explained]
        # The height of a jump is known about: half of it may be left in what it was taken from.
        floor = thresholds.floor + sum(height for _, height in jumps) / 2
        level = [[(turn, value - sum(h for at, h in jumps if at <= turn)) for turn, value in points] for points in read]
        hidden = idle_hidden.find(level, settled, period, floor, thresholds.p_value)
        if hidden is not None:
            return msgspec.structs.replace(_as(found, "inconclusive", hidden.reason), hidden=hidden)
        return found
    if found.kind == "leak" and events:
        return _without_events(settled, begun, events, thresholds, found, steps, about)
    return found


def _judge(
    judged: list[list[Point]],
    begun: list[list[Point]],
    thresholds: Thresholds,
    steps: list[tuple[int, int]],
    explained: list[tuple[int, int]],
    about: Trend,
) -> Trend:
    blocks = _blocks(judged, thresholds.blocks)
    score = mann_kendall(*([value for _, value in group] for group in blocks))
    sen = theil_sen(*blocks)
    span = sum(points[-1][0] - points[0][0] + 1 for points in judged)
    growth = None if sen.slope is None else sen.slope * span
    trend = msgspec.structs.replace(
        about,
        kind="flat",
        span=span,
        until=judged[-1][-1][0] + 1,
        slope=sen.slope,
        low=sen.low,
        high=sen.high,
        growth=growth,
        p_value=score.p_rise,
        tail=_tail(blocks),
        since=_since(blocks),
        steps=tuple(sorted(steps)),
        explained=tuple(sorted(explained)),
    )
    if growth is None or sen.low is None or sen.high is None:
        return _as(trend, "inconclusive", "short")
    if score.p_rise < thresholds.p_value and sen.low > 0 and growth > thresholds.floor:
        late = _halves(blocks)[1]
        if _eases(blocks, judged, begun, thresholds):
            # A curve that eases can hide a leak: what is left of its slope must go on easing or be too small to see.
            left = late.slope if late.slope is not None and late.low is not None and late.low > 0 else 0.0
            if left * span / 2 > thresholds.floor and not _eases_on(blocks):
                return _as(trend, "inconclusive", "eases")
            return _as(trend, "warming")
        if growth < _strays(blocks, span, thresholds.wander):
            return _as(trend, "inconclusive", "wanders")
        return _as(trend, "leak")
    if sen.high * span > thresholds.noisy * thresholds.floor:
        return _as(trend, "inconclusive", "noisy")
    if len(steps) > 1:
        return _as(trend, "inconclusive", "steps")
    ending = _ending(judged, blocks, thresholds)
    if ending is not None:
        return msgspec.structs.replace(_as(trend, "inconclusive", "late"), ending=ending)
    if steps:
        return _as(trend, "step")
    if len(explained) > FEW_STEPS:
        return _as(trend, "inconclusive", "events")
    if score.p_rise < 5 * thresholds.p_value and growth > thresholds.floor:
        return _as(trend, "inconclusive", "weak")
    return trend


def _as(trend: Trend, kind: Literal["warming", "step", "leak", "inconclusive"], reason: Reason = "") -> Trend:
    return msgspec.structs.replace(trend, kind=kind, reason=reason)


def _without_events(
    judged: list[list[Point]],
    begun: list[list[Point]],
    events: Sequence[int],
    thresholds: Thresholds,
    found: Trend,
    steps: list[tuple[int, int]],
    about: Trend,
) -> Trend:
    """The verdict where rises at events, each too small for a step, are taken out; the first one if it stays a leak.

    They are taken out only where what happens between events excludes the slope that was found.
    """
    marked = frozenset(events)
    cut = [
        [0, *(place for place, point in enumerate(points) if point[0] in marked and place), len(points)]
        for points in judged
    ]
    stretches = [
        points[begin:end]
        for points, places in zip(judged, cut, strict=True)
        for begin, end in itertools.pairwise(places)
        if end - begin >= 3
    ]
    between = theil_sen(*_blocks(stretches, thresholds.blocks, shortest=1)) if stretches else TheilSen()
    if between.slope is None or between.high is None or found.slope is None or between.high >= found.slope:
        return found
    explained = list(found.explained)
    settled: list[list[Point]] = []
    for points, places in zip(judged, cut, strict=True):
        height = 0.0
        rest: list[Point] = list(points[: places[1]])
        for before, begin, end in zip(places, places[1:], places[2:], strict=False):
            past = points[max(before, begin - BESIDE) : begin]
            here = points[begin : min(end, begin + BESIDE)]
            rise = median(value for _, value in here) - median(value for _, value in past)
            # What the slope adds between the two windows is no jump.
            rise -= between.slope * (fmean(turn for turn, _ in here) - fmean(turn for turn, _ in past))
            if rise > thresholds.floor / 4:
                height += rise
                explained.append((points[begin][0], round(rise)))
            rest += [(turn, value - height) for turn, value in points[begin:end]]
        settled.append(rest)
    again = _judge(settled, begun, thresholds, steps, explained, about)
    return found if again.kind == "leak" else again


def _without_drop(
    judged: list[list[Point]],
    begun: list[list[Point]],
    thresholds: Thresholds,
    found: Trend,
    steps: list[tuple[int, int]],
    explained: list[tuple[int, int]],
    about: Trend,
) -> Trend:
    """Open, where a level series rises before and after one sharp drop; else ``found``.

    What was let go may be all that had piled up, or something else, under which a leak goes on.
    """
    for number, points in enumerate(judged):
        # A drop that undoes the slope shows no two levels; without the slope between near turns it does.
        near = [
            (later[1] - earlier[1]) / (later[0] - earlier[0])
            for earlier, later in zip(points, points[BESIDE:], strict=False)
        ]
        slope = median(near) if near else 0.0
        drop = _step([(turn, slope * turn - value) for turn, value in points], thresholds)
        if drop is None:
            continue
        place, height = drop
        rest = [*points[:place], *((turn, value + height) for turn, value in points[place:])]
        again = _judge([*judged[:number], rest, *judged[number + 1 :]], begun, thresholds, steps, explained, about)
        if again.kind == "leak":
            return msgspec.structs.replace(
                again, kind="inconclusive", reason="drops", explained=((points[place][0], -round(height)),)
            )
    return found


def _rise(known: Sequence[float]) -> float:
    """From the lowest of the first readings to the level of the last ones."""
    if not known:
        return 0.0
    return median(known[-5:]) - min(known[:5])


def _blocks(judged: Sequence[Sequence[Point]], wanted: int, shortest: int = 3) -> list[list[tuple[float, float]]]:
    """Each segment as medians of equally long blocks, at most ``2 × wanted`` of them.

    One length for all, so that the medians are of like precision, but a long segment is not cut into thousands.
    """
    total = sum(map(len, judged))
    typical = sorted(map(len, judged))[len(judged) // 2]
    length = max(shortest, min(math.ceil(total / wanted), typical // 4)) if len(judged) > 1 else max(1, total // wanted)
    groups = []
    for points in judged:
        size = max(length, math.ceil(len(points) / (2 * wanted)))
        number = max(1, len(points) // size)
        edges = [round(place * len(points) / number) for place in range(number + 1)]
        parts = [points[begin:end] for begin, end in itertools.pairwise(edges)]
        groups.append([(fmean(turn for turn, _ in part), median(value for _, value in part)) for part in parts])
    return groups


def _halves(blocks: Sequence[Sequence[tuple[float, float]]]) -> tuple[TheilSen, TheilSen]:
    return (
        theil_sen(*(group[: len(group) // 2] for group in blocks)),
        theil_sen(*(group[len(group) // 2 :] for group in blocks)),
    )


def _tail(blocks: Sequence[Sequence[tuple[float, float]]]) -> float | None:
    """The slope over the last third of the longest segment."""
    longest = max(blocks, key=len)
    return theil_sen(longest[-max(2, len(longest) // 3) :]).slope


def _since(blocks: Sequence[Sequence[tuple[float, float]]]) -> int | None:
    """The turn up to which a single segment had less than a tenth of its growth, if that is a third of it or more."""
    group = blocks[0]
    if len(blocks) > 1 or len(group) < 6:
        return None
    first = median(value for _, value in group[:3])
    growth = group[-1][1] - first
    before = [place for place, (_, value) in enumerate(group) if value - first < growth / 10]
    if growth <= 0 or not before or before[-1] < len(group) // 3:
        return None
    return round(group[before[-1]][0])


def _ending(
    judged: Sequence[Sequence[Point]], blocks: Sequence[Sequence[tuple[float, float]]], thresholds: Thresholds
) -> tuple[int, int] | None:
    """The turn and the height of a rise in the last third of the last segment; ``None`` where there is none.

    It is above the floor by itself, but the turns before it, being level, keep it out of the slope of all.
    """
    points, group = judged[-1], blocks[-1]
    if len(group) < 6:
        return None
    rest = points[-(len(points) // 3) :]
    before = median(value for _, value in points[: -len(rest)])
    height = group[-1][1] - before
    if height <= thresholds.floor:
        return None
    low = theil_sen(*_blocks([rest], thresholds.blocks, shortest=1)).low
    return (rest[0][0], round(height)) if low is not None and low > 0 else None


def _eases(
    blocks: Sequence[Sequence[tuple[float, float]]],
    judged: Sequence[Sequence[Point]],
    begun: Sequence[Sequence[Point]],
    thresholds: Thresholds,
) -> bool:
    """Whether the second half rises less than what was before it, the warm-up included, and than the first half alone.

    Noise makes a straight leak look so in one of twenty runs if the first half stands alone; with the warm-up, in
    nearly none. The warm-up alone would make a curve of every leak that follows on one. A second half that may be
    level, or whose slope would not add up to the floor, is slower than the first, whatever noise does to that.
    """
    early, late = _halves(blocks)
    with_warm_up = [[*before, *points[: len(points) // 2]] for before, points in zip(begun, judged, strict=True)]
    longer = theil_sen(*_blocks(with_warm_up, thresholds.blocks))
    if early.slope is None or late.slope is None or longer.slope is None:
        return False
    slower = late.slope < thresholds.easing * early.slope or late.low is None or late.low <= 0
    small = late.slope * sum(points[-1][0] - points[0][0] + 1 for points in judged) < thresholds.floor
    return (slower or small) and late.slope < thresholds.easing * longer.slope


def _eases_on(blocks: Sequence[Sequence[tuple[float, float]]]) -> bool:
    """Whether the second half eases by itself, as a curve towards a level does."""
    early, late = _halves([group[len(group) // 2 :] for group in blocks])
    return early.slope is not None and late.slope is not None and late.slope < 0.5 * early.slope


def _strays(blocks: Sequence[Sequence[tuple[float, float]]], span: int, allowed: float) -> float:
    """The growth that a random walk of this roughness shows by chance in one of a hundred runs.

    Its slope, fitted to ``span`` turns with steps of variance q, adds up to a growth of variance 6/5·q·span. Of q two
    things are known: differences over two blocks of a random walk vary more than those over one (of noise about a
    line, they do not), and it is no more than what one block adds, noise included. The second is believed only up
    to ``allowed``, since noise looks the same.
    """
    near: list[float] = []
    far: list[float] = []
    number = 0
    length = 1.0
    for group in blocks:
        values = [value for _, value in group]
        number += len(values)
        if len(group) > 1:
            length = max(length, (group[-1][0] - group[0][0]) / (len(group) - 1))
        near += centred([later - earlier for earlier, later in itertools.pairwise(values)])
        far += centred([later - earlier for earlier, later in zip(values, values[2:], strict=False)])
    if len(near) < 3 or len(far) < 3:
        return 0.0
    one = fmean(value * value for value in near)
    excess = fmean(value * value for value in far) - one
    at_most = min(allowed * allowed, 1.5 * one / length)
    return max(2.6 * math.sqrt(max(0.0, excess) * number), 2.33 * math.sqrt(1.2 * at_most * span))


# ---------------------------------------------------------------- jumps


def _step(points: Sequence[Point], thresholds: Thresholds) -> tuple[int, float] | None:
    """The place and height of the sharpest lasting rise; ``None`` where there is none.

    The place is where two levels fit best (least squares over medians of five, which drop lone spikes). It is a jump,
    not a slope, where the next few turns on either side already show most of the difference.
    """
    values = [value for _, value in points]
    count = len(values)
    if count < 2 * SHORTEST:
        return None
    smooth = [median(values[max(0, place - 2) : place + 3]) for place in range(count)]
    base = smooth[0]
    total = sum(value - base for value in smooth)
    best, gain, left = 0, 0.0, 0.0
    for place in range(1, count - 2):
        left += smooth[place - 1] - base
        apart = (total - left) / (count - place) - left / place
        if place >= 3 and apart > 0 and apart * apart * place * (count - place) > gain:
            best, gain = place, apart * apart * place * (count - place)
    if not best:
        return None
    before, after = median(values[:best]), median(values[best:])
    height = median(values[best : best + BESIDE]) - median(values[max(0, best - BESIDE) : best])
    nearest = median(values[best : best + 3]) - median(values[max(0, best - 3) : best])
    spread = 1.4826 * median([abs(value - (before if place < best else after)) for place, value in enumerate(values)])
    if after - before <= max(thresholds.floor, 4 * spread):
        return None
    if min(height, nearest) < thresholds.sharp * (after - before):
        return None
    # Two spikes among the last three turns are no level.
    if count - best < 5 and min(values[best:]) < (before + after) / 2:
        return None
    return best, height
