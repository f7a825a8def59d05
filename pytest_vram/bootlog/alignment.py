"""A log and samples on one axis: by their clocks, by the steps of the memory, or not at all, with the reason."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from pytest_vram.bootlog.boot import Boot, PhaseSpan
from pytest_vram.bootlog.devices import HOST
from pytest_vram.bootlog.samples import Samples, Series
from pytest_vram.bootlog.steps import MOST_UNPRINTED, Fit, Level, fits, levels, narrowed, near
from pytest_vram.units import MIB, mib

#: Zones differ by whole and half hours.
_HALF_HOUR = 1800
_FARTHEST = 28 * _HALF_HOUR
#: Printed bytes below which a rise says nothing.
_TELLING = 64 * MIB
_NO_CLOCK = "by the steps of the memory, without a clock"
#: Words in the names of an engine's processes.
_PROCESSES = {
    "llama-server": ("llama",),
    "ollama": ("ollama", "llama"),
    "vllm": ("vllm", "VLLM", "python"),
    "sglang": ("sglang", "python"),
    "transformers": ("python",),
}


class Shift(NamedTuple):
    """Seconds to add to a time of the log for that of the samples, give or take ``slack``; ``how`` it is known."""

    seconds: float
    slack: float
    how: str


class Place(NamedTuple):
    """What the samples say of one phase on one device.

    ``inside``: figures that are of this phase for certain; ``near``: those that may be. ``None`` is a hole.
    """

    inside: list[int | None]
    near: list[int | None]


class Stood(NamedTuple):
    """What was held when the weights were loaded: between the last sample before that and the first one after it.

    ``most`` is ``None`` where nobody looked afterwards. ``unseen``: seconds from the last sample to the load's end.
    """

    least: int
    most: int | None
    unseen: float = 0.0


class Aligned(NamedTuple):
    """Label → its series, and for each phase of the log what of it falls there; or why that is not known.

    :ivar before: label → bytes that were held before the boot, where that was seen.
    :ivar stood: label → what was held when its weights were loaded, where that was seen.
    """

    series: dict[str, Series]
    places: dict[str, list[Place]]
    before: dict[str, int]
    how: str
    notes: tuple[str, ...] = ()
    reason: str | None = None
    stood: Mapping[str, Stood] = {}


def align(boot: Boot, samples: Samples) -> Aligned:
    """Bring samples and log together; nothing is placed where that is not certain enough."""
    labels = device_labels(boot)
    candidates = _of_engine(boot, samples.series)
    shift, reason, notes = _by_clock(boot, candidates, labels)
    window = _window(boot, shift) if shift is not None else None
    series, unknown = devices(boot, candidates, labels, window)
    if shift is not None:  # a torn file may have times for one device and none for another
        torn = [label for label, one in series.items() if not one.times]
        series = {label: one for label, one in series.items() if label not in torn}
        notes = [
            *notes,
            *(f"the samples of {label} have no times, unlike others: left out" for label in torn),
        ]
    by_step: dict[str, list[Place]] = {}
    stood_before: dict[str, int] = {}
    if shift is None and reason is None:
        found = _by_steps(boot, series)
        shift, reason, by_step, stood_before = found.shift, found.reason, found.places, found.before
        if shift is None and reason is None:
            names = {label: series[label] for label in by_step}
            stood = _stood(boot, names, by_step, None)
            return Aligned(names, by_step, found.before, _NO_CLOCK, (*notes, *unknown), stood=stood)
    if shift is None or not series:
        why = (unknown[0] if unknown and not series else reason) or "no samples are of a device of this boot"
        return Aligned(series, {}, {}, "", tuple(notes), why)
    places = {label: _placed(boot, one, shift) for label, one in series.items()}
    for label, stepped in by_step.items():
        places[label] = [one if one.inside else timed for one, timed in zip(stepped, places[label], strict=True)]
    begin = _window(boot, shift)[0] - shift.slack
    seen = {label: held for label, one in series.items() if (held := _held_before(one, begin)) is not None}
    before = stood_before | seen
    stood = _stood(boot, series, by_step, shift)
    return Aligned(series, places, before, shift.how, (*notes, *unknown), stood=stood)


def _stood(
    boot: Boot, series: Mapping[str, Series], by_step: Mapping[str, list[Place]], shift: Shift | None
) -> dict[str, Stood]:
    """A step to the level that was printed tells it; else the samples on both sides of the end of the load."""
    at = [place for place, span in enumerate(boot.phases) if span.name == "weights"]
    found: dict[str, Stood] = {}
    for label, one in series.items() if len(at) == 1 else ():
        stepped = by_step[label][at[0]].inside if label in by_step else []
        level = max((value for value in stepped if value is not None), default=None)
        timed = _around(boot.phases[at[0]], one, shift) if shift is not None else None
        stood = timed if level is None else Stood(level, level)
        if stood is not None:
            found[label] = stood
    return found


def _around(span: PhaseSpan, series: Series, shift: Shift) -> Stood | None:
    if span.start is None or span.end is None:
        return None
    begin, end = span.start + shift.seconds + shift.slack, span.end + shift.seconds
    least = None
    for value, since, at in _moments(series):
        if value is None or since < begin:
            continue
        if at < end - shift.slack:
            least = Stood(value, None, end - at)
        elif since > end + shift.slack:
            return None if least is None else least._replace(most=value)
    return least


def device_labels(boot: Boot) -> list[str]:
    """The labels of the devices of a boot that samples of GPUs may be of."""
    named = dict.fromkeys([*boot.devices, *(entry.device for entry in boot.entries)])
    found = [label for label in named if label != HOST]
    return found or ["gpu0"]


def _of_engine(boot: Boot, series: tuple[Series, ...]) -> list[Series]:
    words = _PROCESSES.get(boot.engine, ())
    own = [one for one in series if one.pid is not None and any(word in (one.name or "") for word in words)]
    return own or list(series)


# ---------------------------------------------------------------- clocks


def _window(boot: Boot, shift: Shift) -> tuple[float, float]:
    """When the boot began, and when it was over, on the clock of the samples."""
    times = [span.start for span in boot.phases if span.start is not None]
    ready = next((span.start for span in boot.phases if span.name == "ready" and span.start is not None), None)
    return times[0] + shift.seconds, (max(times) if ready is None else ready) + shift.seconds


def _by_clock(boot: Boot, series: list[Series], labels: list[str]) -> tuple[Shift | None, str | None, list[str]]:
    """The shift between two clocks that both tell the time of day; else nothing, with a reason if that is final."""
    dated = [one for one in series if one.clock in ("epoch", "local")]
    if boot.clock != "epoch" or not dated or not any(span.start is not None for span in boot.phases):
        return None, None, []
    printed = sum(boot.ledger().total().get(label, 0) for label in labels)
    fitting: list[int] = []
    overlapping: list[int] = []
    for offset in sorted(range(-_FARTHEST, _FARTHEST + 1, _HALF_HOUR), key=abs):
        begin, end = _window(boot, Shift(offset, 0.0, ""))
        there = [one for one in dated if one.times[0] <= end and one.times[-1] >= begin]
        if not there:
            continue
        overlapping.append(offset)
        rises = [rise for one in there if (rise := _rise(one, begin, end)) is not None]
        if printed < _TELLING or (not rises and offset == 0) or (rises and max(rises) * 2 * len(labels) >= printed):
            fitting.append(offset)
    if not overlapping:
        return None, "the times of the samples and those of the log do not meet, in any time zone", []
    if 0 in fitting:
        return Shift(0.0, 0.0, "by their clocks"), None, []
    if len(fitting) == 1:
        hours = -fitting[0] / 3600
        note = f"the clock of the log was taken to be {hours:+g} hours from that of the samples: another time zone"
        return Shift(float(fitting[0]), 0.0, f"by their clocks, {abs(hours):g} hours apart"), None, [note]
    if fitting:
        return None, "log and samples are of different time zones, and several would fit", []
    return (
        None,
        (
            "at the time of the boot the samples do not rise by what the log says was allocated: they are of another"
            " device, boot or time zone"
        ),
        [],
    )


def _rise(series: Series, begin: float, end: float) -> int | None:
    """Bytes by which memory rose in this time; ``None`` where nobody looked before it."""
    before = _held_before(series, begin)
    slack = series.interval or 0.0
    inside = [value for value, at in _timed(series) if value is not None and begin <= at <= end + 2 * slack]
    return None if before is None or not inside else max(inside) - before


def _timed(series: Series) -> Iterator[tuple[int | None, float]]:
    """The samples with their times; none where they have none."""
    return zip(series.values if series.times else (), series.times, strict=True)


def _held_before(series: Series, begin: float) -> int | None:
    held = None
    for value, at in _timed(series):
        if at >= begin:
            break
        held = value if value is not None else held
    return held


def _placed(boot: Boot, series: Series, shift: Shift) -> list[Place]:
    last = _end_of_last(boot, series, shift)
    return [_place(span, series, shift, last) for span in boot.phases]


def _place(span: PhaseSpan, series: Series, shift: Shift, last: float) -> Place:
    if span.start is None:
        return Place([], [])
    begin = span.start + shift.seconds
    end = last if span.end is None else span.end + shift.seconds
    inside: list[int | None] = []
    near_it: list[int | None] = []
    for value, since, at in _moments(series):
        if since >= begin + shift.slack and at < end - shift.slack:
            inside.append(value)
        elif at >= begin - shift.slack and since < end + shift.slack:
            near_it.append(value)
    return Place(inside, near_it)


def _moments(series: Series) -> Iterator[tuple[int | None, float, float]]:
    return zip(series.values, series.since or series.times, series.times, strict=True)


def _end_of_last(boot: Boot, series: Series, shift: Shift) -> float:
    """When the last phase ended. A server that is ready goes on; one that failed ends where its memory goes."""
    if boot.ready or boot.failure is None:
        return float("inf")
    start = next((span.start for span in reversed(boot.phases) if span.start is not None), 0.0) + shift.seconds
    begin, _ = _window(boot, shift)
    before, highest = _held_before(series, begin) or 0, 0
    for value, at in zip(series.values, series.times, strict=True):
        if value is None or at < begin:
            continue
        highest = max(highest, value)
        if at >= start and highest > before and value - before < (highest - before) / 2:
            return at
    return float("inf")


# ---------------------------------------------------------------- steps


class _Steps(NamedTuple):
    """What the steps say: of phases that allocate, their samples; of all others by ``shift``, where there is one."""

    places: dict[str, list[Place]]
    before: dict[str, int]
    shift: Shift | None = None
    reason: str | None = None


def _by_steps(boot: Boot, series: Mapping[str, Series]) -> _Steps:
    """By what was printed, against the levels of the samples."""
    found: dict[str, tuple[Series, Fit, tuple[Level, ...]]] = {}
    several = False
    for label, one in series.items():
        wanted = levels(boot, label)
        here = fits(one, wanted)
        several = several or len(here) > 1
        if len(here) == 1:
            found[label] = (one, here[0], wanted)
    if not found:
        return (None if several else _by_ramp(boot, series)) or _Steps({}, {}, None, _no_fit(boot, series, several))
    if any(wanted[-1].phase not in fit.reached for _, fit, wanted in found.values()):
        # what is held only as it is written to rises without steps, and a pause in it may look like one
        ramp = _by_ramp(boot, series)
        if ramp is not None:
            return ramp
    places = {label: _stepped(boot, *one) for label, one in found.items()}
    before = {label: fit.base for label, (_, fit, _) in found.items()}
    timed = any(span.start is not None for span in boot.phases)
    if not timed or not all(one.times for one, _, _ in found.values()):
        return _Steps(places, before)
    shift = _shift_of(boot, found)
    if shift is None:
        return _Steps(
            {}, {}, None, "the steps of the samples lie at other distances in time than the phases of the log"
        )
    for label, (_, fit, _) in found.items():
        places[label] = [
            place if span.name in fit.reached else Place([], [])
            for span, place in zip(boot.phases, places[label], strict=True)
        ]
    return _Steps(places, before, shift)


def _by_ramp(boot: Boot, series: Mapping[str, Series]) -> _Steps | None:
    """By a rise without steps, of every device that has one, where log and samples both have times."""
    starts = {span.name: span.start for span in boot.phases if span.start is not None}
    if not starts or len(starts) != len(boot.phases) or len(series) != len(device_labels(boot)):
        return None
    lowest, highest = float("-inf"), float("inf")
    before: dict[str, int] = {}
    for label, one in series.items():
        here = narrowed(one, levels(boot, label), starts, remote=_remote(boot, label)) if one.times else ()
        if len(here) != 1:
            return None
        before[label] = here[0].base
        lowest, highest = max(lowest, here[0].lowest), min(highest, here[0].highest)
    if not lowest <= highest:
        return None
    slack = (highest - lowest) / 2
    return _Steps({}, before, Shift((lowest + highest) / 2, slack, f"by the rise of the memory, to ±{slack:.2g} s"))


def _remote(boot: Boot, label: str) -> bool:
    return boot.devices.get(label, "").startswith("RPC")


def _no_fit(boot: Boot, series: Mapping[str, Series], several: bool) -> str:
    why = "log and samples have no clock in common" if boot.clock != "epoch" else "the samples have no clock"
    if not series:
        return f"{why}, and which device the samples are of is not known"
    if several:
        return f"{why}, and the samples show several boots that fit"
    if not any(levels(boot, label) for label in series):
        return f"{why}, and the log prints no buffers in an order that steps of the samples could be held against"
    return f"{why}, and no steps of the samples are those that the log printed"


def _shift_of(boot: Boot, found: Mapping[str, tuple[Series, Fit, tuple[Level, ...]]]) -> Shift | None:
    """A level is reached between two samples, and in its phase: every step narrows down where the log lies."""
    lowest, highest = float("-inf"), float("inf")
    spans = {span.name: span for span in boot.phases}
    following = {span.name: after for span, after in itertools.pairwise(boot.phases)}
    for label, (series, fit, _) in found.items():
        for phase, (first, _, _) in fit.reached.items():
            span = spans[phase]
            if span.start is None:
                continue
            if first:
                over = following.get(phase, span) if _remote(boot, label) else span
                end = over.end if over.end is not None else float("inf")
                lowest = max(lowest, series.times[first - 1] - end)
            highest = min(highest, series.times[first] - span.start)
    if not lowest <= highest or lowest == float("-inf") or highest == float("inf"):
        return None
    slack = (highest - lowest) / 2
    return Shift((lowest + highest) / 2, slack, f"by the steps of the memory, to ±{slack:.2f} s")


def _stepped(boot: Boot, series: Series, fit: Fit, wanted: tuple[Level, ...]) -> list[Place]:
    places: list[Place] = []
    values = list(series.values)
    order = [level.phase for level in wanted]
    blurred = [level.phase for level in wanted if level.blurred]
    last_seen = next(phase for phase in reversed(order) if phase in fit.reached)
    top = fit.reached[last_seen]
    before_first = True
    done = fit.start
    late = [span.name for span in boot.phases[_after(boot, order[-1]) :]]
    for place, span in enumerate(boot.phases):
        if span.name in fit.reached:
            _, stood, last = fit.reached[span.name]
            # The level stands until the next step: who is on it may be in the next phase already, at the same height.
            end = last if span.name != order[-1] else stood
            on_it = values[done + (not before_first) : end + 1]
            places.append(Place([], on_it) if span.name in blurred else Place(on_it, []))
            done, before_first = end, False
        elif place >= _after(boot, last_seen):
            rest = values[(top.stood if last_seen == order[-1] else top.last) + 1 :]
            alone = len(late) == 1 and last_seen == order[-1] not in blurred
            places.append(Place(rest, []) if alone else Place([], rest))
        else:
            places.append(Place([], []))
    return places


def _after(boot: Boot, phase: str) -> int:
    return next(place for place, span in enumerate(boot.phases) if span.name == phase) + 1


# ---------------------------------------------------------------- which device is which


def devices(
    boot: Boot, series: list[Series], labels: list[str], window: tuple[float, float] | None
) -> tuple[dict[str, Series], list[str]]:
    """Label → the series that is of this device, and what could not be told.

    By the size of the card where the log names it; of several by the rise that was printed. An order alone says
    nothing: engines and drivers count cards in orders of their own.
    """
    printed = boot.ledger().total()
    sizes = boot.facts.get("total_bytes")
    sizes = sizes if isinstance(sizes, dict) else {}
    possible: dict[str, list[Series]] = {}
    for label in labels:
        known = sizes.get(label)
        here = [one for one in series if not isinstance(known, int) or not one.total or _alike(known, one.total)]
        if not here:
            return {}, [f"{label} has {mib(known or 0)} by the log, and no device of the samples has that size"]
        possible[label] = here
    if len(labels) == 1 and len(series) == 1:
        return {labels[0]: series[0]}, []
    for label, here in possible.items():
        size = printed.get(label, 0)
        if size >= _TELLING:
            possible[label] = [one for one in here if _rises_by(boot, label, one, size, window)]
    found: dict[str, Series] = {}
    while len(found) < len(labels):
        left = {
            label: [one for one in here if one not in found.values()]
            for label, here in possible.items()
            if label not in found
        }
        sure = next((label for label, here in left.items() if len(here) == 1), None)
        if sure is None:
            break
        found[sure] = left[sure][0]
    unknown = [label for label in labels if label not in found]
    told = f"which of the {len(series)} devices of the samples is {', '.join(unknown)} of the log cannot be told"
    return found, [told] if unknown else []


def _alike(one: int, other: int) -> bool:
    return abs(one - other) * 20 <= max(one, other)


def _rises_by(boot: Boot, label: str, series: Series, size: int, window: tuple[float, float] | None) -> bool:
    if window is None or not series.times:
        return len(fits(series, levels(boot, label))) == 1
    rise = _rise(series, *window)
    return rise is not None and size - near(size) <= rise <= size + MOST_UNPRINTED
