"""Where the memory of a boot peaked: in which phase, and whether it is weights, or cache and runtime."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from pytest_vram.bootlog.alignment import Aligned, Place, Stood, align, device_labels
from pytest_vram.bootlog.boot import Boot, Failure, Peak, Phase, PhaseSpan
from pytest_vram.bootlog.devices import HOST
from pytest_vram.bootlog.samples import JournalBoot, Samples, Series
from pytest_vram.ledger import Bucket
from pytest_vram.readings import Measured, Reading, Unmeasurable
from pytest_vram.units import MIB, mib

Part = Literal["weights", "later", "unknown"]
#: Phases at whose end no more than the weights is there.
_LOADING: tuple[Phase, ...] = ("start", "weights")
#: Later buckets that are held in full, however little was written to them.
_CACHE: tuple[Bucket, ...] = ("kv", "recurrent")
_OF_WEIGHTS: tuple[Bucket, ...] = ("weights", "experts", "projector", "lora")
_LATER: tuple[Bucket, ...] = ("kv", "recurrent", "compute", "context", "other")
#: Figures that differ by no more, or by a hundredth, are those of one moment: nvidia-smi rounds to whole MiB.
_DIGITS = 2 * MIB
_OUT_OF_MEMORY = ("out_of_memory", "host_out_of_memory", "kv_planning")
_WORDS: dict[Part, str] = {
    "weights": "weights",
    "later": "cache and runtime",
    "unknown": "weights or later, that is not known",
}


class _Seen(NamedTuple):
    """What is known of one device, phase by phase. ``highest``: the most that may be of a phase.

    ``stood``: what was held when the weights were loaded. ``interval``: seconds between samples.
    """

    figures: list[Measured | None]
    highest: list[int | None]
    before: int | None
    how: str
    stood: Stood | None = None
    interval: float | None = None


def with_peaks(boot: Boot, samples: Samples | None = None, log: str = "") -> Boot:
    """A boot with the peak of each phase where there are samples, and with the answer for each device.

    :param log: name of the log's file, by which a journal knows it. Notes on the samples become warnings.
    """
    if samples is None:
        return msgspec.structs.replace(boot, peaks=tuple(_by_log(boot, label) for label in _labels(boot)))
    if samples.boots:
        seen, reason, notes = _of_journal(boot, samples, log)
        series: Mapping[str, Series] = {one.index: one for one in samples.series if one.index is not None}
    else:
        aligned = align(boot, samples)
        seen, reason, notes = _of_samples(boot, aligned), aligned.reason, list(aligned.notes)
        series = aligned.series
    phases = []
    for place, span in enumerate(boot.phases):
        peak = {label: figure for label, one in seen.items() if (figure := one.figures[place]) is not None}
        phases.append(msgspec.structs.replace(span, peak=peak) if peak else span)
    labels = list(dict.fromkeys([*seen, *_labels(boot)]))
    if not labels and reason is not None:
        labels = [label for label in device_labels(boot) if label in series]
    found = [
        _by_figures(boot, label, seen[label]) if label in seen else _unplaced(boot, label, reason, series.get(label))
        for label in labels
    ]
    if reason is not None:
        notes.insert(0, f"the samples could not be brought together with the log: {reason}")
    warnings = tuple(dict.fromkeys([*boot.warnings, *samples.notes, *notes]))
    return msgspec.structs.replace(boot, phases=tuple(phases), peaks=tuple(found), warnings=warnings)


def _labels(boot: Boot) -> list[str]:
    """Devices of which the log says something; the host where it says nothing of any other."""
    named = dict.fromkeys(entry.device for entry in boot.entries if entry.bytes)
    if boot.failure is not None and boot.failure.device is not None and boot.failure.kind in _OUT_OF_MEMORY:
        named.setdefault(boot.failure.device)
    return [label for label in named if label != HOST] or list(named)


# ---------------------------------------------------------------- figures of the phases


def _of_samples(boot: Boot, aligned: Aligned) -> dict[str, _Seen]:
    found: dict[str, _Seen] = {}
    for label, places in aligned.places.items():
        series = aligned.series[label]
        figures: list[Measured | None] = [_figure(label, series, place) for place in places]
        highest = [_most([*place.inside, *place.near]) for place in places]
        before, stood = aligned.before.get(label), aligned.stood.get(label)
        found[label] = _Seen(figures, highest, before, aligned.how, stood, series.interval)
    return found


def _most(values: Sequence[int | None]) -> int | None:
    return max((value for value in values if value is not None), default=None)


def _figure(label: str, series: Series, place: Place) -> Measured:
    """The largest of the samples of a phase, as an interval where some may be of the phase beside it."""
    high, beside = _most(place.inside), _most(place.near)
    if high is None:
        reason = "no sample fell into it"
        if place.inside:
            reason = "its samples have no figure"
        elif place.near:
            reason = "which samples are of it is known too roughly"
        return Unmeasurable(reason=reason, source=series.source, scope=series.scope, device=label)
    holes = sum(value is None for value in place.inside)
    return Reading(
        bytes=high,
        at_most=beside if beside is not None and beside > high else None,
        source=series.source,
        scope=series.scope,
        device=label,
        exact=False,
        interval_ms=None if series.interval is None else round(series.interval * 1000, 3),
        samples=len(place.inside),
        missed=f"{holes} of its {len(place.inside)} samples have no figure" if holes else None,
    )


def _of_journal(boot: Boot, samples: Samples, log: str) -> tuple[dict[str, _Seen], str | None, list[str]]:
    """The figures that the keeper itself wrote down for each phase of this boot."""
    chosen = [one for one in samples.boots if one.log == Path(log).name] or list(samples.boots)
    if len(chosen) != 1:
        names = ", ".join(one.log for one in chosen[:6])
        return {}, f"the journal is of {len(chosen)} boots: give the log as the run's folder has it ({names})", []
    (own,) = chosen
    order = [span.name for span in boot.phases]
    if [phase.name for phase in own.phases] != order[: len(own.phases)] and own.phases:
        return {}, f"the phases of the log are not those of {own.backend} in the journal", []
    labels = list(dict.fromkeys(label for phase in own.phases for label in phase.peak))
    labels += [one.index for one in samples.series if one.index is not None and one.index not in labels]
    on_device = [label for label in labels if label != HOST]
    if len(on_device) > 1 or (on_device and len(device_labels(boot)) > 1):
        return {}, "the journal counts devices in an order of its own, and the log has several", []
    found: dict[str, _Seen] = {}
    for label in labels:
        figures: list[Measured | None] = [phase.peak.get(label) for phase in own.phases]
        figures += [None] * (len(order) - len(figures))
        if own.phases and len(own.phases) < len(order):
            figures[len(own.phases)] = _after(label, samples, own)
        # a phase that allocated nothing new may be without a figure
        highest = [figure.upper if isinstance(figure, Reading) else None for figure in figures]
        stood = next((_held(one) for name, one in zip(order, figures, strict=True) if name == "weights"), None)
        interval = next(
            (one.interval_ms / 1000 for one in figures if isinstance(one, Reading) and one.interval_ms is not None),
            None,
        )
        found[label] = _Seen(figures, highest, 0, f"by the journal of the run ({own.backend})", stood, interval)
    return found, None, []


def _held(figure: Measured | None) -> Stood | None:
    return Stood(figure.bytes, figure.upper) if isinstance(figure, Reading) else None


def _after(label: str, samples: Samples, own: JournalBoot) -> Measured | None:
    """The most that was sampled after the last phase whose end the journal has."""
    series = next((one for one in samples.series if one.index == label), None)
    if series is None:
        return None
    over = own.phases[-1].end
    inside = [value for value, since in zip(series.values, series.since, strict=True) if since >= over]
    return _figure(label, series, Place(list(inside), [])) if inside else None


# ---------------------------------------------------------------- answers


def _by_figures(boot: Boot, label: str, seen: _Seen) -> Peak:
    known = [(high, place) for place, high in enumerate(seen.highest) if high is not None]
    if not known:
        return _unplaced(boot, label, "no sample fell into a phase of the log", None)
    top, _ = max(known)
    where = [boot.phases[place] for high, place in known if high == top]
    figure = next(
        (
            one
            for one, high in zip(seen.figures, seen.highest, strict=True)
            if high == top and isinstance(one, Reading) and one.bytes == top
        ),
        None,
    )
    phase, fell = _fell(boot, seen, where, top, figure)
    part, grounds = _composed(boot, label, seen, where, top)
    refused = _refused(boot, label)
    if refused is not None:
        part, because = refused
        grounds = [because, *grounds]
    text = f"{_WORDS[part]}: {'; '.join([*grounds, fell])} (samples placed {seen.how})"
    return Peak(device=label, part=part, phase=phase, figure=figure, text=text)


def _fell(
    boot: Boot, seen: _Seen, where: list[PhaseSpan], top: int, figure: Reading | None
) -> tuple[Phase | None, str]:
    """The phase that reached the peak first, where it is known, and the sentence of it."""
    sure = [
        span
        for span, one in zip(boot.phases, seen.figures, strict=True)
        if isinstance(one, Reading) and one.bytes == top
    ]
    names = [span.name for span in where]
    if sure:
        names = names[: next(place for place, span in enumerate(where) if span is sure[0]) + 1]
    names = list(dict.fromkeys(names))
    size = mib(top)
    if figure is None or not figure.exact:
        every = f"sampled every {_seconds(seen.interval)}" if seen.interval else "by samples alone"
        size = f"at least {size}, {every},"
    if len(names) == 1:
        return names[0], f"its peak of {size} fell into phase {names[0]}"
    return None, f"its peak of {size} fell into one of the phases {', '.join(names)}"


def _seconds(interval: float) -> str:
    return f"{round(interval * 1000)} ms" if interval < 1 else f"{interval:.3g} s"


def _composed(boot: Boot, label: str, seen: _Seen, where: list[PhaseSpan], top: int) -> tuple[Part, list[str]]:
    """Which part a peak is made of: reached while weights were loaded, or by what stood when they were there."""
    loading = [span.name in _LOADING for span in where]
    printed = _sum(boot, label, _OF_WEIGHTS)
    if all(loading):
        later = [
            high
            for span, high in zip(boot.phases, seen.highest, strict=True)
            if span.name not in _LOADING and high is not None
        ]
        if boot.failure is None and later and max(later) < printed - max(_DIGITS, printed // 10):
            return "unknown", ["log and samples contradict each other: later less was held than the weights alone"]
        return "weights", ["it was reached while the weights were loaded, and later there was no more"]
    grounds = [f"{mib(seen.before)} were held before the boot"] if seen.before else []
    if seen.stood is not None and seen.before is not None:
        least, most, told = _loaded(seen.stood, seen.before, top, printed, _sum(boot, label, _CACHE))
    elif printed and seen.before is not None and top - seen.before >= printed:
        # what is printed nowhere, as a driver's context, may have come before the weights or after them
        least, most = printed, max(printed, top - seen.before - _sum(boot, label, _CACHE))
        told = f"{mib(printed)} of weights were printed, and memory rose by {mib(top - seen.before)}"
    else:
        by_log = _by_log(boot, label)
        told = by_log.text if printed else "what was held when the weights were loaded is not known"
        return (by_log.part if printed else "unknown"), [told.partition(": ")[2] or told, *grounds]
    rise = top - seen.before
    part: Part = "weights" if 2 * least >= rise else "later" if 2 * most < rise else "unknown"
    return part, [told, *grounds]


def _loaded(stood: Stood, before: int, top: int, printed: int, cache: int) -> tuple[int, int, str]:
    """Least and most bytes by which memory rose until the weights were loaded, and the sentence of it.

    One figure where all that was printed was seen, or where samples on both sides agree; else a range, which the
    printed weights, and the ``cache`` that came after them, narrow down; weights that contradict it widen it.
    """
    least = max(0, stood.least - before)
    most = max(least, (top if stood.most is None else stood.most) - before)
    off = max(_DIGITS, round((printed or least) * 0.01))
    there = printed and least >= printed - off
    if (there or most - least <= off) and printed <= most + off:
        told = (
            f"memory rose by {mib(least)} until the weights were loaded, and by {mib(top - before - least)} after that"
        )
        return least, least, told
    unseen = f" (the last {_seconds(stood.unseen)} of it were not sampled)" if stood.unseen else ""
    span = mib(least) if least == most else f"{mib(least)} to {mib(most)}"
    told = f"memory rose by {span} until the weights were loaded{unseen}, and by {mib(top - before)} in all"
    if not printed:
        return least, most, told
    if printed > most + off:
        return least, printed, f"{told}, though {mib(printed)} of weights were printed"
    least = max(least, printed - off)
    if not least <= top - before - cache + off <= most:
        return least, most, f"{told}; {mib(printed)} of weights were printed"
    return (
        least,
        top - before - cache + off,
        f"{told}; {mib(printed)} of weights and {mib(cache)} of cache were printed",
    )


def _sum(boot: Boot, label: str, buckets: Sequence[Bucket]) -> int:
    return sum(entry.bytes for entry in boot.entries if entry.device == label and entry.bucket in buckets)


def _refused(boot: Boot, label: str) -> tuple[Part, str] | None:
    """The answer of a failure for want of memory on this device."""
    failure: Failure | None = boot.failure
    if failure is None or failure.kind not in _OUT_OF_MEMORY or failure.device not in (None, label):
        return None
    if failure.device is None and len(_labels(boot)) > 1:
        return None
    if failure.certainty == "unknown" or (failure.phase is None and failure.bucket is None):
        return None
    weights = failure.bucket in _OF_WEIGHTS or (failure.bucket is None and failure.phase in _LOADING)
    likely = "" if failure.certainty == "certain" else ", which is likely and not certain"
    what = f"for {failure.bucket}" if failure.bucket is not None else f"in phase {failure.phase}"
    return ("weights" if weights else "later"), f"memory ran out {what}{likely}"


def _unplaced(boot: Boot, label: str, reason: str | None, series: Series | None) -> Peak:
    """The answer by the log alone, where samples are there that could not be used."""
    peak = _by_log(boot, label)
    why = f"the samples could not be used: {reason or 'none is known to be of this device'}"
    figure = None
    if series is not None and (most := _most(series.values)) is not None:
        why += f"; their largest figure is {mib(most)}"
        measured = _figure(label, series, Place(list(series.values), []))
        figure = measured if isinstance(measured, Reading) else None
    return msgspec.structs.replace(peak, text=f"{peak.text}; {why}", figure=figure)


def _by_log(boot: Boot, label: str) -> Peak:
    """The answer by what was printed, and by what was refused."""
    refused = _refused(boot, label)
    weights, later = _sum(boot, label, _OF_WEIGHTS), _sum(boot, label, _LATER)
    rest = boot.ledger().total().get(label, 0) - weights - later
    printed = f"{mib(weights)} of weights and {mib(later)} of cache and runtime were printed"
    if refused is not None:
        part, because = refused
        return Peak(device=label, part=part, text=f"{_WORDS[part]}: {because}; {printed}")
    if boot.failure is not None and boot.failure.kind in _OUT_OF_MEMORY:
        return Peak(device=label, part="unknown", text=f"{_WORDS['unknown']}: {printed}, and memory ran out elsewhere")
    if boot.evidence == "partial" and not later:
        return Peak(
            device=label,
            part="unknown",
            text=f"{_WORDS['unknown']}: {mib(weights)} of weights were printed, and no more",
        )
    if abs(weights - later) <= rest:
        return Peak(device=label, part="unknown", text=f"{_WORDS['unknown']}: {printed}, and {mib(rest)} of both")
    part = "weights" if weights > later else "later"
    return Peak(device=label, part=part, text=f"{_WORDS[part]}: {printed}")
