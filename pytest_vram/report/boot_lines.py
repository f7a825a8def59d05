"""A boot log for a terminal: data in, lines out."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from pytest_vram.advice.records import Advice
from pytest_vram.bootlog.boot import FAILURES, Boot, Failure, PhaseSpan
from pytest_vram.bootlog.devices import named
from pytest_vram.bootlog.numbering import rank
from pytest_vram.checks.breakdown import ledger_table
from pytest_vram.readings import Measured, Reading
from pytest_vram.report.advice_lines import ranked_lines
from pytest_vram.report.prediction_lines import columns
from pytest_vram.text import printable
from pytest_vram.units import mib

_WIDTH = 80
_NARROWEST = 30
_EVIDENCE = {
    "complete": "every buffer was printed",
    "partial": "not every buffer was printed",
    "none": "no memory lines, so that nothing is known of its memory",
}
_CERTAINTY = {
    "certain": "certain, the engine says so",
    "likely": "likely",
    "unknown": "which phase and part it was is not certain",
}


def boot_lines(boot: Boot, log: str, *, advice: Sequence[Advice] = (), no_advice: str | None = None) -> list[str]:
    """Everything that ``vram boot`` says."""
    era = f" ({boot.era})" if boot.era else ""
    lines = _wrapped(f"{log}: {boot.engine}{era}, {_state(boot)}", indent="")
    lines += _wrapped(f"evidence: {boot.evidence}: {_EVIDENCE[boot.evidence]}")
    if boot.failure is not None:
        lines += ["", *failure_lines(boot.failure, boot.devices)]
    if boot.phases:
        lines += ["", *phase_lines(boot)]
    if boot.entries:
        lines += ["", *ledger_table(boot.ledger(), width=_width())]
    if boot.peaks:
        lines += ["", "weights, or cache and runtime?"]
        for peak in sorted(boot.peaks, key=lambda one: rank(one.device)):
            lines += _wrapped(f"{named(peak.device, boot.devices)}: {peak.text}")
    if advice or no_advice:
        lines += ["", *ranked_lines(advice, no_advice, width=_width())]
    if boot.warnings:
        lines += ["", "warnings"]
        for warning in boot.warnings:
            lines += _wrapped(warning)
    if boot.facts:
        lines += ["", "settings and facts, as printed", *_wrapped(_facts(boot.facts), hang="  ")]
    return [printable(line) for line in lines]


def _state(boot: Boot) -> str:
    if boot.ready:
        return "ready" if boot.failure is None else "ready, and failed later"
    if boot.failure is not None:
        return "failed"
    last = boot.phases[-1].name if boot.phases else "start"
    return f"not ready: the log ends in phase {last}"


# ---------------------------------------------------------------- phases


def phase_lines(boot: Boot) -> list[str]:
    """The phases with their times, and with the peak of each device where there are samples."""
    labels = sorted({label for span in boot.phases for label in span.peak}, key=lambda label: (len(label), label))
    clock = {
        "start": "seconds since the process started",
        "epoch": "UTC, or the log's own zone where it names none",
        None: "the log has no clock",
    }[boot.clock]
    if boot.clock is None and any(span.start is not None for span in boot.phases):
        clock = "seconds on the log's own clock"
    rows: list[Sequence[str]] = [("phase", "from", "seconds", "line", *(f"peak {label}" for label in labels))]
    for span in boot.phases:
        peaks = [_peak(span.peak.get(label)) for label in labels]
        rows.append((span.name, moment(span.start, boot.clock), _took(span), f"{span.line:,}", *peaks))
    sampled = any(isinstance(one, Reading) and not one.exact for span in boot.phases for one in span.peak.values())
    note = ["  peaks are the largest samples: at least so much was held"] if sampled else []
    return [f"phases ({clock})", *columns(rows), *note]


def moment(time: float | None, clock: str | None) -> str:
    """A time on the log's clock."""
    if time is None:
        return "-"
    if clock != "epoch":
        return f"{time:.3f}"
    try:
        return datetime.fromtimestamp(time, UTC).strftime("%m-%d %H:%M:%S.%f")[:-3]
    except (ValueError, OverflowError, OSError):  # a year that no calendar has
        return f"{time:.3f}"


def _took(span: PhaseSpan) -> str:
    if span.start is None or span.end is None:
        return "-"
    return f"{span.end - span.start:.3f}"


def _peak(measured: Measured | None) -> str:
    if isinstance(measured, Reading):
        return mib(measured.bytes) + (f" to {mib(measured.at_most)}" if measured.at_most is not None else "")
    return "-" if measured is None else "unknown"


# ---------------------------------------------------------------- failure, facts


def failure_lines(failure: Failure, devices: dict[str, str]) -> list[str]:
    """Why it failed: what, where, how much, how sure."""
    lines = _wrapped(f"failure: {failure.kind}: {FAILURES.get(failure.kind, 'it failed')}", indent="")
    if failure.phase is not None or failure.bucket is not None:
        where = [f"in phase {failure.phase}" if failure.phase else "phase unknown"]
        where.append(f"for {failure.bucket}" if failure.bucket else "for what is unknown")
        if failure.device is not None:
            where.append(f"on {named(failure.device, devices)}")
        lines += _wrapped(f"{', '.join(where)}: {_CERTAINTY.get(failure.certainty, failure.certainty)}")
    elif failure.device is not None:
        lines += _wrapped(
            f"on {named(failure.device, devices)}: {_CERTAINTY.get(failure.certainty, failure.certainty)}"
        )
    elif failure.certainty != "certain":
        lines += _wrapped(f"certainty: {failure.certainty}")
    amounts = [
        f"{mib(size)} ({size:,} bytes) {what}"
        for size, what in ((failure.bytes, "asked for"), (failure.free, "free"), (failure.total, "in all"))
        if size is not None
    ]
    if amounts:
        lines += _wrapped(", ".join(amounts))
    if failure.absurd:
        lines += _wrapped("more was asked for than the whole device has: smaller steps of a setting will not help")
    if failure.note:
        lines += _wrapped(failure.note)
    place = f"line {failure.line:,}: " if failure.line is not None else ""
    return lines + _wrapped(f"{place}{failure.text}")


def _facts(facts: dict[str, Any]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {_fact(name, value)}" for name, value in facts.items())


def _fact(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return mib(value) if name.endswith("_bytes") and value >= 0 else f"{value:,}"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, dict):
        return "; ".join(f"{key}: {_fact(name, one)}" for key, one in value.items())
    if isinstance(value, list | tuple):
        return "; ".join(_fact(name, one) for one in value)
    return str(value)


# ---------------------------------------------------------------- width


def _width() -> int:
    return max(_NARROWEST, min(_WIDTH, shutil.get_terminal_size((_WIDTH, 24)).columns))


def _wrapped(text: str, *, indent: str = "  ", hang: str | None = None) -> list[str]:
    return textwrap.wrap(
        text,
        _width(),
        initial_indent=indent,
        subsequent_indent=indent + "  " if hang is None else hang,
        break_long_words=False,
        break_on_hyphens=False,
    )
