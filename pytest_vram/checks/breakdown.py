"""The memory breakdown ("ledger") as a table for people."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence

from pytest_vram.checks.wording import ESTIMATE, HOST, STAND_IN
from pytest_vram.ledger import Bucket, Ledger
from pytest_vram.units import MIB, mib

_PER_BLOCK = 4
_NONE = "-"


def ledger_table(ledger: Ledger, *, width: int = 80) -> list[str]:
    """Lines of a table of buckets by device, in MiB with two decimals.

    ``unattributed`` is what was measured minus what the engine printed; with it each column adds up to the measured
    total exactly (in bytes). A device that was not measured shows what was printed alone, and a line below says so.
    """
    buckets = ledger.buckets()
    labels = _labels(ledger)
    if not labels:
        return ["memory breakdown (ledger): nothing was printed and nothing was measured"]
    lines: list[str] = []
    for start in range(0, len(labels), _PER_BLOCK):
        lines.extend(_block(ledger, buckets, labels[start : start + _PER_BLOCK], width))
    for note in _notes(ledger, labels):
        lines.extend(textwrap.wrap(note, width, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False))
    return lines


def _labels(ledger: Ledger) -> list[str]:
    used = set(ledger.total()) | set(ledger.measured)
    return sorted(used - {HOST}, key=lambda label: (len(label), label)) + ([HOST] if HOST in used else [])


def _block(ledger: Ledger, buckets: Mapping[Bucket, Mapping[str, int]], labels: Sequence[str], width: int) -> list[str]:
    first = max(18, min(36, width - 12 * len(labels) - 2))
    explained, total = ledger.explained(), ledger.total()

    def row(name: str, cells: Sequence[str]) -> str:
        return f"  {name.ljust(first)}" + "".join(cell.rjust(12) for cell in cells)

    def figures(table: Mapping[str, int]) -> list[str]:
        return [_cell(table[label]) if label in table else _NONE for label in labels]

    lines = [f"{'memory breakdown (ledger), MiB'.ljust(first + 2)}" + "".join(label.rjust(12) for label in labels)]
    for bucket, table in buckets.items():
        if bucket != "unattributed":
            lines.append(row(bucket, figures(table)))
    # An estimate explains nothing that was printed.
    predicted = bool(ledger.entries) and all(entry.source == ESTIMATE for entry in ledger.entries)
    lines.append(row("predicted" if predicted else "printed by the engine", figures(explained)))
    measured = {label: total[label] for label in labels if label in ledger.measured}
    if measured:
        signed = {
            label: reading.bytes - explained.get(label, 0)
            for label, reading in ledger.measured.items()
            if label in labels
        }
        lines.append(
            row("unattributed", [_cell(signed[label], sign=True) if label in signed else _NONE for label in labels])
        )
        lines.append(row("total measured", figures(measured)))
    return lines


def _cell(size: int, *, sign: bool = False) -> str:
    return f"{size / MIB:+,.2f}" if sign else f"{size / MIB:,.2f}"


def _notes(ledger: Ledger, labels: Sequence[str]) -> list[str]:
    notes: list[str] = []
    for label in labels:
        reading = ledger.measured.get(label)
        parts = []
        name = ledger.devices.get(label)
        if name and label != HOST:
            parts.append(name)
        if reading is None:
            if ledger.measured:
                parts.append("not measured in this run, printed figures only")
        else:
            parts.append(f"measured by {reading.source}")
            if reading.upper != reading.bytes:
                parts.append(f"at most {mib(reading.upper)}")
            elif not reading.exact:
                parts.append("not exact")
            if list(labels) == [HOST]:  # beside a card it is what it is
                parts.append(STAND_IN)
        if parts:
            notes.append(f"{label}: {', '.join(parts)}")
    if any(entry.bytes and "Mapped" in entry.detail for entry in ledger.entries):
        notes.append("mapped weights count as measured only where their pages were touched")
    return notes
