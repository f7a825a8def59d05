"""A boot in samples of memory, found by its steps: what was printed, against the levels at which memory stood."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from pytest_vram.bootlog.boot import Boot, Phase
from pytest_vram.bootlog.samples import Series
from pytest_vram.ledger import Bucket
from pytest_vram.units import GIB, MIB

#: Bucket → phase that allocates it, where that is the same in every engine and release.
_ALLOCATED_IN: dict[Bucket, Phase] = {
    "weights": "weights",
    "experts": "weights",
    "lora": "weights",
    "kv": "kv",
    "recurrent": "kv",
    "compute": "reserve",
}
#: Most that a driver's context and libraries take beyond what is printed.
MOST_UNPRINTED = 2 * GIB
#: A level is met within this, or this share of everything printed, whichever is more.
_NEAR, _NEAR_SHARE = 6 * MIB, 0.01
#: Climbs without steps that are looked at: of more than that, several would fit.
_MOST_CLIMBS = 16
#: Phase whose buffers some devices hold only as far as they are written to.
HIDDEN: Phase = "reserve"
#: Samples that differ by no more lie on one level.
_FLAT = 2 * MIB


class Level(NamedTuple):
    """``bytes`` printed on the device when ``phase`` is over.

    ``blurred``: a phase beside it took too little for a level of its own, so that samples on this one may be of that.
    """

    phase: Phase
    bytes: int
    blurred: bool = False


class Climb(NamedTuple):
    """Levels of one device that follow one another upwards: ``base``, and (bytes, first sample, last sample)."""

    base: int
    plateaus: tuple[tuple[int, int, int], ...]


class Reach(NamedTuple):
    """A level in the samples: the ``first`` that is near it, and from where to where (``last``) it ``stood`` there."""

    first: int
    stood: int
    last: int


class Fit(NamedTuple):
    """A climb that is the boot. ``reached``: phase → its level. ``base``: held before."""

    base: int
    start: int
    reached: dict[Phase, Reach]


class Ramp(NamedTuple):
    """A climb without steps that is the boot, where the log's clock is ``lowest`` to ``highest`` seconds behind."""

    base: int
    lowest: float
    highest: float


def near(total: int) -> int:
    """How far a level may be off, of a boot that printed ``total`` bytes."""
    return max(_NEAR, round(total * _NEAR_SHARE))


def levels(boot: Boot, label: str) -> tuple[Level, ...]:
    """What was printed on a device, added up phase by phase; empty where the order cannot be told."""
    names = [span.name for span in boot.phases]
    by_phase: dict[Phase, int] = {}
    for entry in boot.entries:
        if entry.device != label or not entry.bytes:
            continue
        phase = _ALLOCATED_IN.get(entry.bucket)
        if phase is None or names.count(phase) != 1:
            return ()
        by_phase[phase] = by_phase.get(phase, 0) + entry.bytes
    least = 2 * near(sum(by_phase.values()))
    found: list[Level] = []
    sum_so_far = 0
    for name in names:
        if name not in by_phase:
            continue
        sum_so_far += by_phase[name]
        if found and sum_so_far - found[-1].bytes < least:
            found[-1] = found[-1]._replace(blurred=True)
            continue
        found.append(Level(name, sum_so_far, bool(found) and found[-1].blurred))
    return tuple(found)


def climbs(series: Series, within: int) -> tuple[Climb, ...]:
    """The times in which a device's memory rose, each from its lowest level on."""
    flat: list[tuple[int, int, int]] = []
    lowest = 0
    for place, value in enumerate(series.values):
        if value is None:
            continue
        # by the lowest of a level: a slow rise is none
        if flat and flat[-1][0] - _FLAT <= value <= lowest + _FLAT:
            flat[-1] = (max(value, flat[-1][0]), flat[-1][1], place)
            lowest = min(value, lowest)
        else:
            flat.append((value, place, place))
            lowest = value
    found: list[list[tuple[int, int, int]]] = []
    for level in flat:
        if found and level[0] >= found[-1][-1][0] - within:
            found[-1].append(level)
        else:
            found.append([level])
    return tuple(Climb(levels[0][0], tuple(levels)) for levels in found)


def fits(series: Series, wanted: Sequence[Level]) -> tuple[Fit, ...]:
    """Every climb of the samples in which the first and the last level, at least, stand as far apart as was printed.

    Compute buffers at the end may be missing: some devices hold of them only what was written to.
    """
    if len(wanted) < 2:
        return ()
    within = near(wanted[-1].bytes)
    return tuple(fit for climb in climbs(series, within) if (fit := _fit(climb, wanted, within)) is not None)


def _fit(climb: Climb, wanted: Sequence[Level], within: int) -> Fit | None:
    heights = _heights(climb)
    # A level that only one sample is on may as well be a moment of a load that is under way.
    stood = [height for height in heights if height.stood is not None]
    best: list[dict[Phase, Reach]] = []
    for one, level in itertools.product(stood, wanted):
        below = one.bytes - level.bytes
        if not climb.base - within <= below <= climb.base + MOST_UNPRINTED:
            continue
        reached = _reached(heights, wanted, below, within)
        if wanted[0].phase not in reached:
            continue
        if wanted[-1].phase not in reached and not _tells(wanted, reached, within):
            continue  # part of a boot looks like another part where two buffers are of one size
        if not best or len(reached) > len(best[0]):
            best = [reached]
        elif len(reached) == len(best[0]) and reached != best[0]:
            best[1:] = [reached]
    if len(best) != 1:
        return None  # none, or several that are as good
    return Fit(climb.base, climb.plateaus[0][1], best[0])


def _tells(wanted: Sequence[Level], reached: Mapping[Phase, Reach], within: int) -> bool:
    """Whether levels without those of the compute buffers can be no other levels: none are as far apart."""
    if wanted[-1].phase != HIDDEN or len(reached) < 2 or wanted[-2].phase not in reached:
        return False
    apart = wanted[-2].bytes - wanted[0].bytes
    others = [two.bytes - one.bytes for one, two in itertools.combinations([Level("start", 0), *wanted], 2)]
    return sum(abs(other - apart) <= 2 * within for other in others) == 1


def narrowed(
    series: Series, wanted: Sequence[Level], starts: Mapping[Phase, float], *, remote: bool = False
) -> tuple[Ramp, ...]:
    """Every climb without steps that can be the boot at all, with the shifts of the clock at which it can be.

    Memory that is held as it is written to rises without a step from one phase into the next. What was printed until
    the end of a phase is there at its end, and no more than that is there before the next phase begins.

    :param starts: when each phase began, on the clock of the log. Series and log must have times.
    :param remote: the device is behind a socket, where what was sent is there at the end of the next phase only, as
        that waits for an answer.
    """
    if len(wanted) < 2:
        return ()
    within = near(wanted[-1].bytes)
    sure = wanted[:-1] if wanted[-1].phase == HIDDEN else wanted
    possible: list[tuple[Climb, int, int]] = []
    for climb in climbs(series, within):
        top = max(level[0] for level in climb.plateaus)
        unprinted = top - climb.base - sure[-1].bytes
        if -within <= unprinted <= MOST_UNPRINTED + wanted[-1].bytes - sure[-1].bytes:
            possible.append((climb, top, max(0, unprinted)))
    if len(possible) > _MOST_CLIMBS:
        return ()
    found = []
    for climb, top, unprinted in possible:
        half = (top - climb.base) // 2
        if _goes_on(series, climb.plateaus[-1][2] + 1, top + within, climb.base + half):
            continue  # a fall between was noise, and the boot is not over here
        if _noisy(series.values[: next(level[1] for level in climb.plateaus if level[0] == top)], within, half):
            continue
        over = climb.plateaus[0][1], climb.plateaus[-1][2]
        bounds = _bounds(series, over, climb.base, wanted, sure, starts, within, unprinted, remote)
        if bounds is not None:
            found.append(Ramp(climb.base, *bounds))
    return tuple(found)


def _bounds(
    series: Series,
    over: tuple[int, int],
    base: int,
    wanted: Sequence[Level],
    sure: Sequence[Level],
    starts: Mapping[Phase, float],
    within: int,
    unprinted: int,
    remote: bool,
) -> tuple[float, float] | None:
    order = list(starts)
    lowest, highest = float("-inf"), float("inf")
    floor = 0
    for level in wanted:
        # more than was printed before a phase is there once it has begun
        above = _first_above(series, over, base + floor + unprinted + within)
        if above is not None and level.phase in starts:
            highest = min(highest, series.times[above] - starts[level.phase])
        floor = level.bytes
        after = order[order.index(level.phase) + 1 :] if level.phase in starts else []
        if level in sure and after:
            there = _first_above(series, over, base + level.bytes - within)
            if there:
                end = starts[after[1] if remote and len(after) > 1 else after[0]]
                lowest = max(lowest, series.times[there - 1] - end)
    return (lowest, highest) if float("-inf") < lowest <= highest < float("inf") else None


def _goes_on(series: Series, begin: int, above: int, below: int) -> bool:
    """Whether memory gets ``above`` the top of a climb without having fallen ``below`` its half."""
    for value in series.values[begin:]:
        if value is not None and (value > above or value < below):
            return value > above
    return False


def _noisy(values: Sequence[int | None], least: int, most: int) -> bool:
    """Whether memory fell by more than a level may be off, and by less than the end of a boot would be."""
    known = [value for value in values if value is not None]
    return any(least < before - after < most for before, after in itertools.pairwise(known))


def _first_above(series: Series, over: tuple[int, int], size: int) -> int | None:
    places = range(over[0], over[1] + 1)
    return next((place for place in places if (value := series.values[place]) is not None and value > size), None)


class _Height(NamedTuple):
    """All plateaus of one height: the first sample of them, and from where to where some stood."""

    bytes: int
    first: int
    stood: int | None
    last: int | None


def _heights(climb: Climb) -> list[_Height]:
    """The heights of a climb in whole MiB, in order: few, however long a server's memory goes up and down."""
    found: dict[int, _Height] = {}
    for value, first, last in climb.plateaus:
        before = found.get(value // MIB) or _Height(value, first, None, None)
        if last > first:
            before = before._replace(stood=first if before.stood is None else before.stood, last=last)
        found[value // MIB] = before
    return sorted(found.values())


def _reached(heights: Sequence[_Height], wanted: Sequence[Level], below: int, within: int) -> dict[Phase, Reach]:
    reached: dict[Phase, Reach] = {}
    for level in wanted:
        least = bisect.bisect_left(heights, below + level.bytes - within, key=lambda height: height.bytes)
        most = bisect.bisect_right(heights, below + level.bytes + within, key=lambda height: height.bytes)
        here = heights[least:most]
        stood = [height.stood for height in here if height.stood is not None]
        last = [height.last for height in here if height.last is not None]
        if stood:
            reached[level.phase] = Reach(min(height.first for height in here), min(stood), max(last))
    return reached
