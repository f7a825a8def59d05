"""The memory breakdown ("ledger") as a table for people."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from pytest_vram.checks.wording import ESTIMATE, HOST, STAND_IN
from pytest_vram.differences import GROWTH, Beside, Difference, ends_of
from pytest_vram.ledger import Bucket, Ledger
from pytest_vram.units import MIB, mib

_PER_BLOCK = 4
_NONE = "-"
#: Row of what a probe found to stay.
STAYED = "stayed after requests"


def ledger_table(ledger: Ledger, *, width: int = 80, beside: Beside | None = None) -> list[str]:
    """Lines of a table of buckets by device, in MiB with two decimals.

    With an estimate ``beside`` it each device has a table of its own: what was predicted, what the engine printed, what
    was measured, and below it what the differences mean.

    What a probe found to stay after requests has a row of its own: no engine prints it.
    ``unattributed`` is what was measured minus what the engine printed; with it each column adds up to the measured
    total exactly (in bytes). A device that was not measured shows what was printed alone, and a line below says so.
    """
    labels = _labels(ledger)
    if not labels:
        return ["memory breakdown (ledger): nothing was printed and nothing was measured"]
    lines: list[str] = []
    if beside is not None and beside.predicted is not None:
        for label in labels:
            lines.extend(_three(ledger, beside, label, width))
        if beside.reason:
            lines.extend(_sentence(f"predicted: {beside.reason}", width))
        lines.extend(line for note in _notes(ledger, labels) for line in _sentence(note, width))
        return lines
    block = _PER_BLOCK if all(entry.at_most is None for entry in ledger.entries) else _PER_BLOCK - 1
    for start in range(0, len(labels), block):
        lines.extend(_block(ledger, labels[start : start + block], width))
    lines.extend(line for note in _notes(ledger, labels) for line in _sentence(note, width))
    if beside is not None and beside.reason:
        lines.extend(_sentence(f"not predicted: {beside.reason}", width))
    return lines


def _sentence(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False)


def _three(ledger: Ledger, beside: Beside, label: str, width: int) -> list[str]:
    """Predicted, printed and measured figures of one device."""
    assert beside.predicted is not None
    mine = [one for one in beside.differences if one.device == label]
    printed_alone = _printed(ledger)
    rows = []
    for one in mine:
        if one.bucket == "unattributed":
            continue
        stayed = _stayed(ledger, label, one.bucket)
        if stayed and not any((entry.bucket, entry.device) == (one.bucket, label) for entry in printed_alone.entries):
            if one.before is not None:
                rows.append((one.bucket, _end(one.before, one.before_at_most), _NONE, ""))
            continue
        after, most = (None if size is None else size - stayed for size in (one.after, one.after_at_most))
        rows.append((one.bucket, _end(one.before, one.before_at_most), _end(after, most), ""))
    known = {row[0] for row in rows}
    for bucket, table in beside.predicted.buckets().items():
        # A context without a printed figure is weighed against the rest.
        if bucket == "context" and bucket not in known and label in table:
            rows.append((bucket, _range(table[label], _at_most(beside.predicted, bucket)[label]), _NONE, ""))
    sums = ends_of(beside.predicted).get(label)
    explained, named = ledger.explained(), printed_alone.explained()
    printed = _cell(named[label]) if label in named else _NONE
    lines_of = [*rows, ("sum", _NONE if sums is None else _range(*sums), printed, "")]
    reading = ledger.measured.get(label)
    if _stayed(ledger, label):
        lines_of.append((STAYED, "", "", _cell(_stayed(ledger, label), sign=True)))
    if reading is not None:
        lines_of.append(("unattributed", "", "", _cell(reading.bytes - explained.get(label, 0), sign=True)))
        lines_of.append(("total measured", "", "", _cell(reading.bytes)))
    wide = max(12, *(len(cell) + 2 for _, *cells in lines_of for cell in cells))
    first = max(18, min(36, width - 3 * wide - 2))
    head = f"memory breakdown (ledger), MiB, {label}"
    head = head if len(head) <= first + 2 else f"ledger, MiB, {label}"
    lines = [head.ljust(first + 2) + "".join(name.rjust(wide) for name in ("predicted", "printed", "measured"))]
    for name, *cells in lines_of:
        lines.append((f"  {name.ljust(first)}" + "".join(cell.rjust(wide) for cell in cells)).rstrip())
    said = [one for one in mine if one.meaning not in _QUIET and max(abs(one.least), abs(one.most)) >= _SMALL]
    told = [line for one in said for line in _sentence(difference(one), width)]
    return [*lines, *(told or _sentence(f"{label}: as predicted, within what was printed", width))]


#: Meanings without a line of their own, and bytes that are worth none.
_QUIET = ("equal", "rounding")
_SMALL = MIB // 20


def difference(one: Difference) -> str:
    """A difference as a line: where, how much, and what it means."""
    ends = [f"{size / MIB:+,.2f}" for size in (one.least, one.most)]
    amount = ends[0] if ends[0] == ends[1] else f"between {ends[0]} and {ends[1]}"
    return f"{one.device} {one.bucket} {amount}: {one.meaning}" + (f" ({one.text})" if one.text else "")


def _end(low: int | None, high: int | None) -> str:
    return _NONE if low is None else _range(low, low if high is None else high)


def _labels(ledger: Ledger) -> list[str]:
    used = set(ledger.total()) | set(ledger.measured)
    return sorted(used - {HOST}, key=lambda label: (len(label), label)) + ([HOST] if HOST in used else [])


def _stayed(ledger: Ledger, label: str, bucket: Bucket | None = None) -> int:
    """Bytes of a device, in one bucket or in all, that a probe found to stay: measured, and printed by nobody."""
    return sum(
        entry.bytes
        for entry in ledger.entries
        if entry.device == label and bucket in (None, entry.bucket) and entry.detail.startswith(GROWTH)
    )


def _printed(ledger: Ledger) -> Ledger:
    """The ledger without what a probe found to stay."""
    entries = tuple(entry for entry in ledger.entries if not entry.detail.startswith(GROWTH))
    return Ledger(entries=entries, measured=ledger.measured, devices=ledger.devices)


def _block(ledger: Ledger, labels: Sequence[str], width: int) -> list[str]:
    total, whole = ledger.total(), ledger.explained()
    stayed = {label: _stayed(ledger, label) for label in labels}
    measured = ledger.measured
    ledger = _printed(ledger)
    buckets = ledger.buckets()
    # An estimate explains nothing that was printed, and both of its ends are shown.
    predicted = bool(ledger.entries) and all(entry.source == ESTIMATE for entry in ledger.entries)
    rows: list[tuple[str, list[str]]] = []
    for bucket, table in buckets.items():
        if bucket != "unattributed":
            upper = _at_most(ledger, bucket) if predicted else table
            rows.append((bucket, [_range(table[one], upper[one]) if one in table else _NONE for one in labels]))
    explained = ledger.explained()
    upper = _at_most(ledger) if predicted else explained
    name = "predicted" if predicted else "printed by the engine"
    rows.append((name, [_range(explained[one], upper[one]) if one in explained else _NONE for one in labels]))
    if any(stayed.values()):
        rows.append((STAYED, [_cell(stayed[one], sign=True) if stayed[one] else _NONE for one in labels]))
    if any(label in measured for label in labels):
        signed = {label: reading.bytes - whole.get(label, 0) for label, reading in measured.items()}
        rows.append(
            ("unattributed", [_cell(signed[label], sign=True) if label in signed else _NONE for label in labels])
        )
        rows.append(("total measured", [_cell(total[label]) if label in measured else _NONE for label in labels]))
    wide = max(12, *(len(cell) + 1 for _, cells in rows for cell in cells), *(len(label) + 1 for label in labels))
    first = max(18, min(36, width - wide * len(labels) - 2))
    title = "memory breakdown (ledger), MiB" if first >= 28 else "ledger, MiB"
    lines = [title.ljust(first + 2) + "".join(label.rjust(wide) for label in labels)]
    lines.extend(f"  {name.ljust(first)}" + "".join(cell.rjust(wide) for cell in cells) for name, cells in rows)
    return lines


def _at_most(ledger: Ledger, bucket: Bucket | None = None) -> dict[str, int]:
    """Device label → the upper ends, of one bucket or of all."""
    sums: dict[str, int] = {}
    for entry in ledger.entries:
        if bucket in (None, entry.bucket):
            upper = entry.bytes if entry.at_most is None else entry.at_most
            sums[entry.device] = sums.get(entry.device, 0) + upper
    return sums


def _range(low: int, high: int) -> str:
    return _cell(low) if high <= low else f"{_cell(low)}–{_cell(high)}"


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
