"""Where the memory of a boot peaked: in which phase, and whether it is weights, or cache and runtime."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from pytest_vram.bootlog.alignment import Aligned, Place, align, device_labels
from pytest_vram.bootlog.boot import Boot, Failure, Peak, Phase, PhaseSpan
from pytest_vram.bootlog.devices import HOST
from pytest_vram.bootlog.samples import JournalBoot, Samples, Series
from pytest_vram.ledger import Bucket
from pytest_vram.readings import Measured, Reading, Unmeasurable
from pytest_vram.units import mib

Part = Literal["weights", "later", "unknown"]
#: Phases at whose end no more than the weights is there.
_LOADING: tuple[Phase, ...] = ("start", "weights")
_OF_WEIGHTS: tuple[Bucket, ...] = ("weights", "experts", "projector", "lora")
_LATER: tuple[Bucket, ...] = ("kv", "recurrent", "compute", "context", "other")
_OUT_OF_MEMORY = ("out_of_memory", "host_out_of_memory", "kv_planning")
_WORDS: dict[Part, str] = {
    "weights": "weights",
    "later": "cache and runtime",
    "unknown": "weights or later, that is not known",
}


class _Seen(NamedTuple):
    """What is known of one device, phase by phase. ``highest``: the most that may be of a phase."""

    figures: list[Measured | None]
    highest: list[int | None]
    before: int | None
    how: str


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
        found[label] = _Seen(figures, highest, aligned.before.get(label), aligned.how)
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
        found[label] = _Seen(figures, highest, 0, f"by the journal of the run ({own.backend})")
    return found, None, []


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
    first = where[0] if figure is None else where[_first_with(boot, seen, where, top)]
    phase = first.name if figure is not None or len({span.name for span in where}) == 1 else None
    part, grounds = _composed(boot, label, seen, where, top)
    refused = _refused(boot, label)
    if refused is not None:
        part, because = refused
        grounds = [because, *grounds]
    fell = f"its peak of {mib(top)} fell into phase {phase}" if phase else f"its peak was {mib(top)}"
    text = f"{_WORDS[part]}: {'; '.join([*grounds, fell])} (samples placed {seen.how})"
    return Peak(device=label, part=part, phase=phase, figure=figure, text=text)


def _first_with(boot: Boot, seen: _Seen, where: list[PhaseSpan], top: int) -> int:
    sure = [
        span
        for span, one in zip(boot.phases, seen.figures, strict=True)
        if isinstance(one, Reading) and one.bytes == top
    ]
    return where.index(sure[0])


def _composed(boot: Boot, label: str, seen: _Seen, where: list[PhaseSpan], top: int) -> tuple[Part, list[str]]:
    """Which part a peak is made of: reached while weights were loaded, or by what stood when they were there."""
    loading = [span.name in _LOADING for span in where]
    if all(loading):
        return "weights", ["it was reached while the weights were loaded, and later there was no more"]
    grounds = []
    if seen.before:
        grounds.append(f"{mib(seen.before)} were held before the boot")
    stood = max(
        (
            figure.bytes
            for span, figure in zip(boot.phases, seen.figures, strict=True)
            if span.name == "weights" and isinstance(figure, Reading) and figure.at_most is None
        ),
        default=None,
    )
    printed = _sum(boot, label, _OF_WEIGHTS)
    if stood is not None and seen.before is not None and stood > seen.before:
        loaded, later = stood - seen.before, top - stood
        told = f"memory rose by {mib(loaded)} until the weights were loaded, and by {mib(max(0, later))} after that"
    elif printed and seen.before is not None and top - seen.before >= printed:
        loaded, later = printed, top - seen.before - printed
        told = f"{mib(printed)} of weights were printed, and memory rose by {mib(top - seen.before)}"
    elif any(loading):
        return "unknown", [*grounds, "when exactly it was reached is not known"]
    else:
        return "later", [*grounds, "it was reached after the weights were loaded"]
    return ("weights" if loaded >= later else "later"), [told, *grounds]


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
