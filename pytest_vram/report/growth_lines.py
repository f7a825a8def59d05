"""A probe of what a deployment takes while it serves, for people: a line for each step, and what stays of it."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping

from pytest_vram.backends.growth import HOST, Growth, Step
from pytest_vram.readings import Measured, Reading, Unmeasurable
from pytest_vram.units import MIB, mib

_NAME = 20
_CELL = 12


def growth_lines(growth: Growth, *, width: int = 80) -> list[str]:
    """Lines of a probe: for each step the peak and what stayed, on each device, in MiB; then where it belongs."""
    if growth.unmeasured:
        return _wrapped(f"while serving: not measured: {growth.unmeasured}", width)
    # Host memory beside a card is shown where something stayed there.
    labels = sorted(growth.idle.keys() | growth.peak.keys(), key=lambda label: (label == HOST, len(label), label))
    if not labels:
        return _wrapped("while serving: nothing could be measured", width)
    lines: list[str] = []
    for label in labels:
        lines.append(f"while serving, MiB on {label}".ljust(_NAME + 12) + "peak".rjust(_CELL) + "stayed".rjust(_CELL))
        for step in growth.steps:
            if step.outcome not in ("skipped", "no_time"):
                cells = (_cell(step.peak, label), _cell(step.growth, label, sign=True))
                lines.append(f"  {_named(step)}".ljust(_NAME + 12) + "".join(cell.rjust(_CELL) for cell in cells))
        lines.append(
            "  since the boot".ljust(_NAME + 12)
            + _cell(growth.peak, label).rjust(_CELL)
            + _cell(growth.growth, label, sign=True).rjust(_CELL)
        )
        lines += _meaning(growth, label, width)
    for step in growth.steps:
        if step.outcome not in ("served", "skipped") or step.reason:
            lines += _wrapped(f"{step.name}: {step.outcome.replace('_', ' ')}: {step.reason}", width)
    return lines


def _named(step: Step) -> str:
    tokens = sorted(set(step.tokens))
    if not tokens:
        return step.name
    span = f"{tokens[0]:,}" if len(tokens) == 1 else f"{tokens[0]:,}–{tokens[-1]:,}"
    return f"{step.name}, {span} tokens"


def _meaning(growth: Growth, label: str, width: int) -> list[str]:
    lines: list[str] = []
    sums: dict[str, int] = {}
    for entry in growth.entries:
        if entry.device == label:
            sums[entry.bucket] = sums.get(entry.bucket, 0) + entry.bytes
    parts = []
    if "kv" in sums:
        parts.append(f"{mib(sums['kv'])} are the engine's prompt cache and checkpoints, as its log says")
    if growth.touched.get(label):
        parts.append(f"{mib(growth.touched[label])} may be buffers of the boot, written for the first time")
    if sums.get("other"):
        parts.append(f"{mib(sums['other'])} are neither: allocator caches, or what the engine made for requests")
    if parts:
        lines += _wrapped(f"of what stayed on {label}: {'; '.join(parts)}", width)
    for table in (growth.growth, growth.peak):
        figure = table.get(label)
        if isinstance(figure, Unmeasurable):
            return [*lines, *_wrapped(f"{label}: {figure.reason}", width)]
    return lines


def _cell(table: Mapping[str, Measured], label: str, *, sign: bool = False) -> str:
    figure = table.get(label)
    if not isinstance(figure, Reading):
        return "?" if label in table else "-"
    return f"{figure.bytes / MIB:+,.1f}" if sign else f"{figure.bytes / MIB:,.1f}"


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False)
