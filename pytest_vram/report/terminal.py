"""The run's summary for a terminal: data in, lines out."""

from __future__ import annotations

import re
import statistics
import textwrap
from collections.abc import Sequence

from pytest_vram.checks.breakdown import ledger_table
from pytest_vram.checks.wording import HOST, STAND_IN, size_of
from pytest_vram.keeper.messages import DeviceInfo, Sampling
from pytest_vram.readings import Measured, Reading
from pytest_vram.report import soaks
from pytest_vram.report.growth_lines import growth_lines
from pytest_vram.report.records import BackendRecord, RunReport, TestRecord
from pytest_vram.report.toolcall_lines import defect_lines, one_line
from pytest_vram.units import mib, with_mib

__all__ = ["ledger_table", "summary"]

PREDICTED = "predicted, nothing was measured"
_LABEL = 12
_CELL = 9
_TABLES = 4
_LISTED = 5
#: A gap of this many intervals between two samples is worth a line.
_POOR = 3.0
#: What a terminal would obey instead of showing it; reasons and node ids are other people's text.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
#: Seconds of waiting that are worth a line.
_FELT = 1.0
_DELTA = (
    "device-delta: it is not known which process holds what, so that the rise of the whole device over a quiet"
    " baseline stands for this run"
)
#: Seconds below which a share of processor time says nothing.
_LONG_ENOUGH = 5.0


def summary(report: RunReport, *, verbosity: int = 0, width: int = 80, unicode: bool = True) -> list[str]:
    """Lines of the summary: one with ``-q``, a few by default, a table of the tests with ``-v``.

    :param width: columns of the terminal; at least 60 are used.
    :param unicode: false where the terminal takes ASCII only; other characters are then written as escapes.
    :returns: no lines where there is nothing to say: nothing was judged, no backend ran, nothing is amiss.
    """
    if not _has_something(report):
        return []
    width = max(60, min(width, 160))
    if verbosity < 0:
        lines = [_one_line(report)]
    else:
        lines = _lines(report, width)
        if verbosity > 0:
            lines += ["", *_tests(report, width), *_details(report, width)]
    return lines if unicode else [line.encode("ascii", "backslashreplace").decode("ascii") for line in lines]


def _has_something(report: RunReport) -> bool:
    return bool(
        report.run.warnings
        or report.backends
        or any(test.findings or test.limit or test.toolcalls or _figures(test.peak) for test in report.tests)
    )


def _figures(table: dict[str, Measured]) -> dict[str, Reading]:
    return {label: figure for label, figure in table.items() if isinstance(figure, Reading)}


def _stands_in(report: RunReport) -> bool:
    return any(device.label == HOST for device in report.run.devices)


def _predicted(report: RunReport) -> bool:
    return report.run.device == "predicted"


def _tag(report: RunReport) -> str:
    if _predicted(report):
        return f" ({PREDICTED})"
    return f" ({STAND_IN})" if _stands_in(report) else ""


def _row(name: str, text: str, width: int) -> list[str]:
    return textwrap.wrap(
        _CONTROL.sub("?", text),
        width,
        initial_indent=name.ljust(_LABEL),
        subsequent_indent=" " * _LABEL,
        break_long_words=False,
        break_on_hyphens=False,
    )


# ---------------------------------------------------------------- summary


def _one_line(report: RunReport) -> str:
    parts = [f"vram: {report.run.verdict}", _counts(report)]
    peaks = _highest(report)
    if any(figure.upper for _, figure, _ in peaks):
        # The one nearest to its limit, or farthest above it; where there are no limits, the highest.
        label, figure, test = max(
            peaks, key=lambda peak: (peak[1].upper / peak[2].limit.get(peak[0], 1 << 62), peak[1].upper)
        )
        limit = test.limit.get(label)
        of = f" of {with_mib(limit)}" if limit is not None else ""
        what = "highest estimate" if _predicted(report) else "highest peak"
        parts.append(f"{what} {_amount(figure)}{of} in {_short(test.nodeid, 40)}")
    parts.extend(f"undecided: {test.nodeid}: {_why(test)}" for test in report.tests if test.outcome == "inconclusive")
    parts.extend(f"WARNING: {text}" for text in report.run.warnings)
    return _CONTROL.sub("?", " ".join("; ".join(parts).split())) + _tag(report)


def _lines(report: RunReport, width: int) -> list[str]:
    tag = _tag(report)
    lines: list[str] = []
    if _predicted(report):
        lines += _row("device", "none: the estimate of each backend is held against the limits", width)
    for device in report.run.devices:
        lines += _row("device", _device(device), width)
    lines += _row("verdict", f"{report.run.verdict}: {_counts(report)}{tag}", width)
    budget = _budget(report)
    if budget is not None:
        lines += _row("budget", budget + tag, width)
    reserve = _setting(report, "reserve")
    if reserve is not None:
        lines += _row("reserve", reserve, width)
    for device in report.run.devices:
        if not device.per_process:
            lines += _row("scope", f"{device.label}: {_DELTA}", width)
    for label, figure, test in _highest(report):
        if not figure.upper:
            lines += _row(
                "peak", f"{label}: nothing was seen that counts: {figure.note or 'every test read 0'}{tag}", width
            )
            continue
        limit = test.limit.get(label)
        of = "" if limit is None else f", {_margin(limit, figure)}"
        boot = ", reached while its backend started" if test.boot else ""
        what = "estimate" if _predicted(report) else "peak"
        lines += _row(
            what, f"{label}: {_amount(figure)}{of}, in {_short(test.nodeid, width - _LABEL - 4)}{boot}{tag}", width
        )
    lines += _tool_calls(report, width)
    lines += _soaks(report, width)
    lines += _undecided(report, width)
    lines += _waited(report, width)
    lines += _backends(report, width)
    sampling = None if _predicted(report) else report.run.sampling
    if sampling is not None and _is_poor(sampling) and not _all_exact(report):
        lines += _row("sampling", _sampling(sampling) + ": short peaks may have been missed", width)
    for text in report.run.warnings:
        lines += _row("WARNING", text, width)
    for table in report.defects:
        lines += ["", *defect_lines(table, width), ""]
    if report.run.verdict != "passed" and report.run.folder is not None:
        lines += _row("run folder", report.run.folder, width)
    return lines


def _tool_calls(report: RunReport, width: int) -> list[str]:
    """A line for each test that asked cases; what a failing one has besides stands with its failure."""
    last = {test.nodeid: test for test in report.tests if test.toolcalls is not None}
    lines: list[str] = []
    for test in list(last.values())[:_LISTED]:
        assert test.toolcalls is not None
        name = _short(test.nodeid, width - _LABEL - 4)
        lines += _row("tool calls", f"{one_line(test.toolcalls)}: {test.toolcalls.verdict.outcome}, in {name}", width)
    if len(last) > _LISTED:
        lines += _row("tool calls", f"{len(last) - _LISTED} tests more; the report has them", width)
    return lines


def _soaks(report: RunReport, width: int) -> list[str]:
    """A line for each test that soaked; what a failing one has besides stands with its failure."""
    last = {test.nodeid: test for test in report.tests if test.soak is not None}
    lines: list[str] = []
    for test in list(last.values())[:_LISTED]:
        assert test.soak is not None
        name = _short(test.nodeid, width - _LABEL - 4)
        lines += _row("soak", f"{soaks.one_line(test.soak)}, in {name}", width)
    if len(last) > _LISTED:
        lines += _row("soak", f"{len(last) - _LISTED} tests more; the report has them", width)
    return lines


def _counts(report: RunReport) -> str:
    """Tests by outcome, and of how many there is a measured peak."""
    parts = []
    for outcome in ("passed", "failed", "error", "inconclusive", "skipped"):
        count = report.run.counts.get(outcome, 0)
        if count:
            parts.append(f"{count} {outcome}{'s' if outcome == 'error' and count > 1 else ''}")
    # A peak of no process at all is a figure, but measures nothing.
    measured = len(
        {
            test.nodeid
            for test in report.tests
            if test.outcome != "skipped" and any(figure.upper for figure in _figures(test.peak).values())
        }
    )
    how = "predicted" if _predicted(report) else "measured"
    return f"{', '.join(parts) or 'no test took part'}; {measured} {how}"


def _margin(limit: int, figure: Reading) -> str:
    if figure.missed and figure.bytes <= limit:
        return f"a lower end only; its limit {with_mib(limit)} is undecided"
    if figure.upper <= limit:
        return f"{mib(limit - figure.upper)} under its limit"
    if figure.bytes > limit:
        return f"{mib(figure.bytes - limit)} over its limit"
    return f"its limit {with_mib(limit)} lies in between"


def _budget(report: RunReport) -> str | None:
    setting = report.run.settings.get("budget")
    if not setting or not setting.get("value"):
        return None
    return f"{setting['value']} from {setting.get('from', 'an unknown place')}"


def _setting(report: RunReport, name: str) -> str | None:
    """A setting in bytes, and where it came from."""
    setting = report.run.settings.get(name)
    if not setting or not isinstance(setting.get("value"), int) or not setting["value"]:
        return None
    return f"{mib(setting['value'])} from {setting.get('from', 'an unknown place')}"


def _device(device: DeviceInfo) -> str:
    size = size_of(device)
    stand_in = f"; {STAND_IN}" if device.label == HOST and "stands in" not in device.name else ""
    name = "" if device.name == device.label else f" {device.name},"
    return f"{device.label}:{name} {size}, measured by {device.source}{stand_in}"


def _amount(figure: Reading) -> str:
    low, high = mib(figure.bytes), mib(figure.upper)
    return low if low == high else f"{low} to {high}"


def _highest(report: RunReport) -> list[tuple[str, Reading, TestRecord]]:
    """The highest peak of each device and the test that reached it."""
    best: dict[str, tuple[str, Reading, TestRecord]] = {}
    for test in report.tests:
        if test.outcome == "error":  # what never ran as it should says nothing about the room that is left
            continue
        for label, figure in _figures(test.peak).items():
            if label not in best or figure.upper > best[label][1].upper:
                best[label] = (label, figure, test)
    return sorted(best.values(), key=lambda item: (item[0] == HOST, item[0]))


def _undecided(report: RunReport, width: int) -> list[str]:
    lines: list[str] = []
    undecided = [test for test in report.tests if test.outcome == "inconclusive"]
    for test in undecided[:_LISTED]:
        lines += _row("undecided", f"{_short(test.nodeid, width - _LABEL - 4)}: {_why(test)}", width)
    if len(undecided) > _LISTED:
        lines += _row("", f"and {len(undecided) - _LISTED} more undecided tests", width)
    return lines


def _waited(report: RunReport, width: int) -> list[str]:
    """How long tests waited for room, where that was long enough to be felt."""
    waits = [test for test in report.tests if test.waited > 0]
    total = sum(test.waited for test in waits)
    if total < _FELT:
        return []
    longest = max(waits, key=lambda test: test.waited)
    reason = f": {longest.waited_for[0]}" if longest.waited_for else ""
    tests = f"{len(waits)} test{'' if len(waits) == 1 else 's'}"
    text = f"{tests} waited {total:.1f} s in all for room, {_short(longest.nodeid, 60)} {longest.waited:.1f} s{reason}"
    return _row("waited", text, width)


def _why(test: TestRecord) -> str:
    """Why a test is undecided: the first line of its finding, and the reason in it where it has one."""
    text = next((finding.text for finding in test.findings if finding.verdict == "inconclusive"), None)
    if text is None:
        return test.reason or "no reason was given"
    first, *rest = text.splitlines()
    reason = re.search(r"^  (?:reason|trouble) +(.+(?:\n {8,}.+)*)", "\n".join(rest), re.MULTILINE)
    return f"{first} {' '.join(reason[1].split())}" if reason else first


def _backends(report: RunReport, width: int) -> list[str]:
    lines: list[str] = []
    tag = "" if _predicted(report) else _tag(report)  # what the engine printed was printed, whatever was predicted
    for number, backend in enumerate(report.backends):
        lines += _row("backend", _backend(backend) + tag, width)
        if not backend.ledger.explained():
            lines += _row("", "its log prints no buffer sizes, so there is no breakdown of its memory", width)
        elif number < _TABLES:
            beside = backend.beside if backend.beside is not None and backend.beside.predicted is not None else None
            lines += ledger_table(backend.ledger, width=width, beside=beside)
        if backend.growth is not None and number < _TABLES:
            lines += growth_lines(backend.growth, width=width)
    if len(report.backends) > _TABLES:
        lines += _row("", f"breakdowns of {len(report.backends) - _TABLES} more are in the report", width)
    return lines


def _backend(backend: BackendRecord) -> str:
    facts = backend.facts
    parts = [f"{backend.name}#{backend.generation} ({backend.engine})"]
    if backend.boot_seconds is not None:
        parts.append(f"ready after {backend.boot_seconds:.1f} s")
    boots = [f"{label} {_amount(figure)}" for label, figure in _figures(backend.boot_peak).items()]
    if boots:
        parts.append(f"boot peak {', '.join(boots)}")
    if "context" in facts:
        slots = facts.get("slots")
        parts.append(
            f"context {facts['context']}" + (f" for {slots} slots" if isinstance(slots, int) and slots > 1 else "")
        )
    if "layers_on_device_real" in facts:
        of_all = f"/{facts['layers']}" if "layers" in facts else ""
        parts.append(f"{facts['layers_on_device_real']}{of_all} layers on a device")
    if "cache_type_k" in facts:
        parts.append(f"KV cache {facts['cache_type_k']}/{facts.get('cache_type_v', '?')}")
    return ", ".join(parts)


def _all_exact(report: RunReport) -> bool:
    """True where no peak rests on samples: gaps between them then hide nothing."""
    return all(figure.exact for test in report.tests for figure in _figures(test.peak).values())


def _is_poor(sampling: Sampling) -> bool:
    interval, gap = sampling.interval_ms, sampling.longest_gap_ms
    return interval is not None and gap is not None and gap > _POOR * interval


def _sampling(sampling: Sampling) -> str:
    every = "" if sampling.interval_ms is None else f", one every {sampling.interval_ms:.1f} ms (median)"
    gap = "" if sampling.longest_gap_ms is None else f", longest gap {sampling.longest_gap_ms:.1f} ms"
    return f"{sampling.samples:,} samples{every}{gap}"


# ---------------------------------------------------------------- with -v


def _tests(report: RunReport, width: int) -> list[str]:
    first = width - 5 * _CELL
    unit = f"MiB of {'host memory standing in for VRAM' if _stands_in(report) else 'VRAM'}"
    if _predicted(report):
        unit += f" ({PREDICTED})"
    lines = [f"tests, {unit}"]
    heads = ("peak", "limit", "margin", "tokens/s", "idle")
    lines.append("  " + "test".ljust(first - 2) + "".join(head.rjust(_CELL) for head in heads))
    for test in report.tests:
        labels = list(test.peak) or [""]
        for label in labels:
            name = f"{test.nodeid} [{label}]" if len(labels) > 1 else test.nodeid
            cells = [*_memory(test, label), _rate(test) if label == labels[0] else "", _size(test.baseline.get(label))]
            lines.append("  " + _short(name, first - 3).ljust(first - 2) + "".join(cell.rjust(_CELL) for cell in cells))
    lines.append("  limit: the smallest; idle: held by the run before the test; -: not measured")
    return lines


def _memory(test: TestRecord, label: str) -> Sequence[str]:
    peak, limit = test.peak.get(label), test.limit.get(label)
    margin = _mib(limit - peak.upper, sign=True) if limit is not None and isinstance(peak, Reading) else "-"
    return _size(peak), "-" if limit is None else _mib(limit), margin


def _size(figure: Measured | None) -> str:
    return _mib(figure.upper) if isinstance(figure, Reading) else "-"


def _mib(size: int, *, sign: bool = False) -> str:
    return f"{size / 2**20:+,.1f}" if sign else f"{size / 2**20:,.1f}"


def _rate(test: TestRecord) -> str:
    rates = [request.tokens_per_second for request in test.requests if request.tokens_per_second is not None]
    return f"{statistics.median(rates):.1f}" if rates else "-"


def _details(report: RunReport, width: int) -> list[str]:
    lines: list[str] = []
    sampling = None if _predicted(report) else report.run.sampling
    if sampling is not None and (not _is_poor(sampling) or _all_exact(report)):  # else it was said already
        lines += _row("sampling", _sampling(sampling), width)
    for backend in report.backends:
        phases = [
            f"{phase.name} {', '.join(f'{label} {_amount(figure)}' for label, figure in _figures(phase.peak).items())}"
            for phase in backend.phases
            if _figures(phase.peak)
        ]
        if phases:
            lines += _row("boot", f"{backend.name}#{backend.generation}, peak by phase: {'; '.join(phases)}", width)
    for test in report.tests:
        lines += _host_use(test, width)
    if report.run.keeper_cpu_share is not None and report.run.seconds >= _LONG_ENOUGH:
        lines += _row("keeper", f"{report.run.keeper_cpu_share:.1%} of one core", width)
    if report.run.folder is not None and report.run.verdict == "passed":
        lines += _row("run folder", report.run.folder, width)
    return lines


def _host_use(test: TestRecord, width: int) -> list[str]:
    """Pages read from disk and memory that went to swap while a test used its backends."""
    use = test.host_use
    if use is None:
        return []
    faults, swap = use.major_faults, use.swap_grew
    parts = []
    if isinstance(faults, Reading) and faults.bytes:
        parts.append(f"{mib(faults.bytes)} read from disk by page faults")
    if isinstance(swap, Reading) and swap.bytes:
        parts.append(f"{mib(swap.bytes)} went to swap")
    if not parts:
        return []
    return _row("host", f"{_short(test.nodeid, 60)}: {', '.join(parts)} in its backends: expect erratic latency", width)


def _short(text: str, width: int) -> str:
    """``text`` within ``width`` columns; what is cut off is at the front, because test names differ at the end."""
    return text if len(text) <= width else "..." + text[-(width - 3) :]
