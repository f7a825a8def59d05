"""What ``vram sweep --measure`` found, for people: tables by device, and what follows from them."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterator, Mapping, Sequence

from pytest_vram.backends.growth import HOST
from pytest_vram.checks.wording import STAND_IN
from pytest_vram.readings import Measured, Reading
from pytest_vram.report.measured import MeasuredPoint
from pytest_vram.report.prediction_lines import columns
from pytest_vram.report.predictions import PointRecord, SweepDocument
from pytest_vram.text import printable
from pytest_vram.units import MIB, mib

_WIDTH = 80
_NARROWEST = 30
_NONE = "-"
_WORDS = {"context each": "each has its own context", "context in all": "they share one context"}
_HEAD = ("KV: predicted", "printed", "all: predicted", "printed", "at ready", "boot peak", "serving", "stayed")
#: So many times the memory, give or take a tenth.
_AS_MANY = 0.9


def measured_lines(document: SweepDocument) -> list[str]:
    """Everything that a measured sweep says.

    Predicted figures are ranges where a rule leaves something open. ``all`` is what is predicted, or was printed, for
    the device; ``at ready`` is idle memory after the boot, ``serving`` the peak of the probe, ``stayed`` its growth.
    """
    about = document.measured
    if about is None:
        return []
    names = ", ".join(f"{device.label} = {device.name}" for device in about.devices)
    lines = [f"measured over {document.over}, {document.model}, MiB", f"  on {names}; engine {about.binary}"]
    good = [point for point in document.points if point.measured is not None and point.measured.boot_peak]
    for label in [device.label for device in about.devices]:
        for way, points in _by_way(good):
            title = f"{label}{f' ({STAND_IN})' if label == HOST else ''}{f', {way}' if way else ''}"
            lines += ["", title, *columns([(_value(document.over), *_HEAD), *(_row(point, label) for point in points)])]
            if document.over == "parallel":
                lines += _flights(points, label)
    for point in document.points:
        lines += _failures(point)
    for label in [device.label for device in about.devices]:
        for way, points in _by_way(good):
            lines += _follows(document.over, way, points, label)
    lines += _notes(good, document)
    lines.append(f"journal and logs: {about.folder}")
    return [printable(line) for line in lines]


def _by_way(points: Sequence[PointRecord]) -> Iterator[tuple[str, list[PointRecord]]]:
    """The points of each way to share; one slot, where both ways are the same, stands in both."""
    ways = list(dict.fromkeys(point.measured.way for point in points if point.measured is not None))
    alone = [point for point in points if point.value == "1"]
    for way in ways:
        found = [point for point in points if point.measured is not None and point.measured.way == way]
        yield _WORDS.get(way, ""), [*(point for point in alone if way and point not in found), *found]


def _value(over: str) -> str:
    return {"parallel": "slots", "n-cpu-moe": "layers"}.get(over, over)


def _row(point: PointRecord, label: str) -> list[str]:
    found = _found(point)
    growth = found.growth
    return [
        point.value,
        _range(point.buckets.get("kv", {}).get(label), point.at_most.get("kv", {}).get(label)),
        _size(found.printed.get("kv", {}).get(label)),
        _range(point.total.get(label), point.total_at_most.get(label)),
        _size(found.printed_total.get(label)),
        _figure(found.at_ready, label),
        _figure(found.boot_peak, label),
        _figure(growth.peak, label) if growth is not None else _NONE,
        _figure(growth.growth, label, sign=True) if growth is not None else _NONE,
    ]


def _found(point: PointRecord) -> MeasuredPoint:
    assert point.measured is not None
    return point.measured


def _flights(points: Sequence[PointRecord], label: str) -> list[str]:
    """The peak with so many requests on their way at once, and what each further one took."""
    counts = sorted({count for point in points for count in _peaks(point, label)})
    if len(counts) < 2:
        return []
    rows = [["slots", *(f"{count} at once" for count in counts), "each further"]]
    for point in points:
        peaks = _peaks(point, label)
        each = _each_further(peaks)
        cells = [f"{peaks[count].bytes / MIB:,.1f}" if count in peaks else _NONE for count in counts]
        rows.append([point.value, *cells, _NONE if each is None else f"{each / MIB:+,.2f}"])
    return ["  peak by requests at once", *columns(rows)]


def _peaks(point: PointRecord, label: str) -> dict[int, Reading]:
    """Requests that really were on their way at once → peak meanwhile."""
    growth = _found(point).growth
    found: dict[int, Reading] = {}
    for step in growth.steps if growth is not None else ():
        peak = step.peak.get(label)
        if step.name.endswith(" in flight") and isinstance(peak, Reading) and step.in_flight == step.requests:
            found[step.in_flight] = peak
    return found


def _each_further(peaks: Mapping[int, Reading]) -> float | None:
    if len(peaks) < 2:
        return None
    first, last = min(peaks), max(peaks)
    return (peaks[last].bytes - peaks[first].bytes) / (last - first)


# ---------------------------------------------------------------- what follows


def _follows(over: str, way: str, points: Sequence[PointRecord], label: str) -> list[str]:
    if len(points) < 2:
        return []
    if over == "context":
        return _over_context(points, label)
    if over == "parallel":
        return _over_slots(way, points, label)
    first, last = points[0], points[-1]
    sizes = [_found(point).printed_total.get(label) for point in (first, last)]
    peaks = [_serving(point, label) for point in (first, last)]
    if None in sizes or None in peaks:
        return []
    printed = (sizes[0] or 0) - (sizes[1] or 0)
    measured = (peaks[0] or 0) - (peaks[1] or 0)
    text = (
        f"{label}: {last.value} in place of {first.value} saves {mib(printed)} by what the engine prints, and"
        f" {mib(measured)} of the peak while serving"
    )
    if over == "n-cpu-moe" and last.value.isdigit() and first.value.isdigit() and last.value != first.value:
        layers = int(last.value) - int(first.value)
        text += f": {mib(round(printed / layers))} for each layer whose experts go to the host"
    return _wrapped(f"{text}.")


def _over_context(points: Sequence[PointRecord], label: str) -> list[str]:
    first, last = points[0], points[-1]
    caches = [_found(point).printed.get("kv", {}).get(label, 0) for point in (first, last)]
    peaks = [_serving(point, label) for point in (first, last)]
    if not (first.value.isdigit() and last.value.isdigit()) or not all(caches) or int(first.value) >= int(last.value):
        return []
    times, grown = int(last.value) / int(first.value), caches[1] / caches[0]
    text = (
        f"{label}: {times:g} times the context takes {grown:.3g} times the KV cache ({mib(caches[0])} at {first.value},"
        f" {mib(caches[1])} at {last.value})"
    )
    if grown < 0.9 * times:
        text += ": it does not grow in step, for some layers keep a window of fixed size, or the cache has a least size"
    if None not in peaks and peaks[0]:
        text += f"; the peak while serving grows {(peaks[1] or 0) / peaks[0]:.3g} times"
    return _wrapped(f"{text}.")


def _over_slots(way: str, points: Sequence[PointRecord], label: str) -> list[str]:
    lines: list[str] = []
    one = next((point for point in points if point.value == "1"), None)
    base = _serving(one, label) if one is not None else None
    for point in points:
        peak = _serving(point, label)
        if point is one or not base or peak is None:
            continue
        times = peak / base
        double = f"{'about' if times >= _AS_MANY * int(point.value) else 'not'} {point.value} times"
        lines += _wrapped(
            f"{label}: {point.value} slots ({way}) peak at {times:.3g} times what one takes"
            f" ({mib(peak)}, and {mib(base)}): {double}."
        )
        peaks = _peaks(point, label)
        each = _each_further(peaks)
        if each is not None:
            share = each / base
            meaning = "less than one, and not nothing"
            if share > _AS_MANY:
                meaning = "as much as a server of its own"
            elif share < 1 - _AS_MANY:
                meaning = "its slot was paid for at boot"
            takes = f"takes {mib(round(each))} ({share:.1%} of the peak of one)" if each > 0 else "takes nothing"
            lines += _wrapped(
                f"{label}: with {point.value} slots booted, each further request at once {takes}: {meaning}."
            )
    return lines


def _serving(point: PointRecord, label: str) -> int | None:
    growth = _found(point).growth
    figure = growth.peak.get(label) if growth is not None else None
    return figure.bytes if isinstance(figure, Reading) else None


# ---------------------------------------------------------------- what went wrong, and what to know


def _failures(point: PointRecord) -> list[str]:
    if point.refused:
        return _wrapped(f"{point.value}: refused: {point.refused}")
    found = point.measured
    if found is None or not found.error:
        return []
    way = f" ({_WORDS[found.way]})" if found.way else ""
    failure = found.failure
    what = ""
    if failure is not None:
        size = f", {mib(failure.bytes)}" if failure.bytes else ""
        what = f" [{failure.kind}{size}{f' of {failure.bucket}' if failure.bucket else ''}"
        what += f"{f' on {failure.device}' if failure.device else ''}, {failure.certainty}]"
    did = "did not boot" if not found.boot_peak else "failed while serving"
    return _wrapped(f"{point.value}{way} {did}{what}: {found.error}")


def _notes(points: Sequence[PointRecord], document: SweepDocument) -> list[str]:
    lines: list[str] = []
    short: dict[str, dict[str, str]] = {}
    cut: list[str] = []
    for point in points:
        found = _found(point)
        for step in found.growth.steps if found.growth is not None else ():
            if step.outcome in ("shortened", "no_time"):
                short.setdefault(step.name, {})[point.value] = step.reason
        asked, served = found.settings.get("ctx-size"), found.facts.get("context")
        if isinstance(asked, int) and isinstance(served, int) and served < asked:
            cut.append(f"{asked:,} tokens were asked for, and the engine has {served:,}")
    for name, reasons in short.items():
        value, reason = list(reasons.items())[-1]
        lines += _wrapped(f"{name} was shorter than wanted, or left out, at {', '.join(reasons)}: at {value} {reason}")
    lines += [line for text in dict.fromkeys(cut) for line in _wrapped(f"context: {text}")]
    if any(_counted_apart(point) for point in points):
        lines += _wrapped(
            f"{HOST}: at ready is what the engine allocated itself; both peaks contain the pages of the mapped model"
            " file that it read as well, so that the difference was not given back"
        )
    touched = sorted(
        {label for point in points if (growth := _found(point).growth) is not None for label in growth.touched}
    )
    measured = document.measured.devices if document.measured is not None else []
    for label in touched:
        if any(device.label == label for device in measured):
            lines += _wrapped(
                f"{label}: memory counts there once it is written, so that what stayed is partly buffers of the boot"
                " (compute, mostly), which a card counts at boot"
            )
    return lines


def _counted_apart(point: PointRecord) -> bool:
    """Whether idle host memory is without the mapped file, and its peak with it."""
    found = _found(point)
    idle, peak = (table.get(HOST) for table in (found.at_ready, found.boot_peak))
    return (
        isinstance(idle, Reading)
        and isinstance(peak, Reading)
        and (idle.source == "host-anon")
        and (peak.source != "host-anon")
    )


def _range(low: int | None, high: int | None) -> str:
    if low is None:
        return _NONE
    if high is None or high - low < MIB // 20:
        return _size(low)
    return f"{_size(low)}–{_size(high)}"


def _size(size: int | None) -> str:
    return _NONE if size is None else f"{size / MIB:,.1f}"


def _figure(table: Mapping[str, Measured], label: str, *, sign: bool = False) -> str:
    figure = table.get(label)
    if not isinstance(figure, Reading):
        return "?" if label in table else _NONE
    return f"{figure.bytes / MIB:+,.1f}" if sign else f"{figure.bytes / MIB:,.1f}"


def _wrapped(text: str) -> list[str]:
    width = max(_NARROWEST, min(_WIDTH, shutil.get_terminal_size((_WIDTH, 24)).columns))
    return textwrap.wrap(
        text, width, initial_indent="  ", subsequent_indent="    ", break_long_words=False, break_on_hyphens=False
    )
