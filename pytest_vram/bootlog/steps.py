"""A boot in samples of memory, found by its steps: what was printed, against the levels at which memory stood."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
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


class Fit(NamedTuple):
    """A climb that is the boot. ``reached``: phase → first and last sample on its level. ``base``: held before."""

    base: int
    start: int
    reached: dict[Phase, tuple[int, int]]


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
    at: int | None = None
    for place, value in enumerate(series.values):
        if value is None:
            continue
        if at is not None and flat and abs(value - flat[-1][0]) <= _FLAT and flat[-1][2] == at:
            flat[-1] = (max(value, flat[-1][0]), flat[-1][1], place)
        else:
            flat.append((value, place, place))
        at = place
    found: list[list[tuple[int, int, int]]] = []
    for level in flat:
        if found and level[0] >= found[-1][-1][0] - within:
            found[-1].append(level)
        else:
            found.append([level])
    return tuple(Climb(levels[0][0], tuple(levels)) for levels in found)


def fits(series: Series, wanted: Sequence[Level]) -> tuple[Fit, ...]:
    """Every climb of the samples in which the first and the last level, at least, stand as far apart as was printed."""
    if len(wanted) < 2:
        return ()
    within = near(wanted[-1].bytes)
    return tuple(fit for climb in climbs(series, within) if (fit := _fit(climb, wanted, within)) is not None)


def _fit(climb: Climb, wanted: Sequence[Level], within: int) -> Fit | None:
    # A level that only one sample is on may as well be a moment of a load that is under way.
    stood = [level for level in climb.plateaus if level[2] > level[1]]
    best: list[dict[Phase, tuple[int, int]]] = []
    for one, level in itertools.product(stood, wanted):
        below = one[0] - level.bytes
        if not climb.base - within <= below <= climb.base + MOST_UNPRINTED:
            continue
        reached = _reached(climb, wanted, below, within)
        if wanted[0].phase not in reached or wanted[-1].phase not in reached:
            continue  # part of a boot looks like another part where two buffers are of one size
        if not best or len(reached) > len(best[0]):
            best = [reached]
        elif len(reached) == len(best[0]) and reached not in best:
            best.append(reached)
    if len(best) != 1:
        return None  # none, or several that are as good
    return Fit(climb.base, climb.plateaus[0][1], best[0])


def _reached(climb: Climb, wanted: Sequence[Level], below: int, within: int) -> dict[Phase, tuple[int, int]]:
    reached: dict[Phase, tuple[int, int]] = {}
    for level in wanted:
        here = [one for one in climb.plateaus if abs(one[0] - below - level.bytes) <= within]
        if any(last > first for _, first, last in here):
            reached[level.phase] = (here[0][1], here[-1][2])
    return reached
