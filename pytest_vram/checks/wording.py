"""How checks say figures, limits and places: short lines that a reader of a build log can act on."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from pytest_vram.keeper.messages import Closed, DeviceInfo, Residue, Share, Stranger
from pytest_vram.ledger import Ledger
from pytest_vram.readings import Reading, Unmeasurable
from pytest_vram.units import mib

HOST = "host"
ESTIMATE = "estimate"
STAND_IN = "host memory stands in for VRAM"
#: What is not worth a word: bytes.
WORTH_A_WORD = 1 << 20
_SHOWN = 5
_WIDTH = 80


def device(label: str, ledger: Ledger | None) -> str:
    """A device's label with its name, and what it stands in for where it is host memory."""
    name = ledger.devices.get(label) if ledger is not None else None
    if label == HOST:
        return f"host ({STAND_IN})"
    return label if name is None or name == label else f"{label} = {name}"


def size_of(info: DeviceInfo) -> str:
    """Capacity of a device as the user's limit sees it, with what sets it: ``8,192 MiB (MIG slice)``."""
    capacity = info.capacity
    if isinstance(capacity, Unmeasurable):
        return f"capacity unknown ({capacity.reason})"
    return mib(capacity.bytes) + (f" ({info.limit_from})" if info.limit_from else "")


def amount(reading: Reading) -> str:
    """The figure, or both ends where it is an interval."""
    if reading.missed:
        return f"at least {mib(reading.bytes)}"
    if reading.upper == reading.bytes:
        return mib(reading.bytes)
    return f"between {mib(reading.bytes)} and {mib(reading.upper)}"


def provenance(reading: Reading) -> str:
    """Source of a figure, and how far it can be trusted."""
    parts = [reading.source]
    if reading.source == ESTIMATE and reading.upper == reading.bytes:
        pass  # its note says that nothing was measured
    elif reading.upper != reading.bytes:
        parts.append(f"{'predicted' if reading.source == ESTIMATE else 'known'} to lie in this interval")
    elif reading.exact:
        parts.append("exact: this source cannot miss a peak")
    else:
        parts.append("not exact: a peak between two reads can be missed")
    if reading.samples:
        every = "" if reading.interval_ms is None else f", one every {reading.interval_ms:.1f} ms"
        parts.append(f"{reading.samples:,} samples{every}")
    if reading.note:
        parts.append(reading.note)
    if reading.missed:
        parts.append(f"a lower end only: {reading.missed}")
    return "; ".join(parts)


def holders(shares: Sequence[Share], label: str | None) -> str | None:
    """Who held what on a device, largest first."""
    found = sorted((s for s in shares if label is None or s.device == label), key=lambda s: -s.bytes)
    if not found:
        return None
    texts = [
        f"{share.name} (PID {share.pid}{f', backend {share.backend}' if share.backend else ''}) {mib(share.bytes)}"
        for share in found[:_SHOWN]
    ]
    if len(found) > _SHOWN:
        texts.append(f"{len(found) - _SHOWN} more")
    return ", ".join(texts)


def stranger(one: Stranger) -> str:
    """A process that is not of the run, with what it holds."""
    pid = f" (PID {one.pid})" if one.pid else ""
    grew = f", {mib(one.grew)} more than at the opening" if one.grew else ""
    return f"{one.name or 'unknown'}{pid} held {mib(one.held)} of {one.device}{grew}"


def residue(one: Residue, *, became: bool = False) -> str:
    """What a test left behind.

    :param became: also how much of it was gone at the peak of the window.
    """
    held = ", ".join(f"{name} (PID {pid})" for pid, name in one.pids[:_SHOWN])
    more = f" and {len(one.pids) - _SHOWN} more" if len(one.pids) > _SHOWN else ""
    parts = [f"{mib(one.bytes)} of {one.device} by {one.test}"]
    if held:
        parts.append(f"still held by {held}{more}")
        if one.first_use:
            parts.append("the driver's context included, which stays until the process ends")
    gone = one.bytes - one.context - one.at_peak_most
    if became and gone >= WORTH_A_WORD:
        parts.append(f"{mib(gone)} of it gone when the peak was reached")
    return ", ".join(parts)


def surroundings(closed: Closed, label: str | None, *, own: bool = False) -> list[tuple[str, str]]:
    """What else a reader must know of a window: who held the memory, what overlapped, what went wrong.

    :param own: the figure has nothing of what certainly belongs to other tests.
    """
    rows: list[tuple[str, str]] = []
    if closed.boot:
        rows.append(("boot", "reached while the backend started, which counts for every test that uses it"))
    held = holders([share for share in closed.shares if not (own and share.others)], label)
    if held is not None:
        rows.append(("held by", held))
    before = closed.baseline.get(label) if label is not None else None
    if isinstance(before, Reading) and before.bytes >= WORTH_A_WORD:
        rows.append(("held before", f"{mib(before.bytes)}, when this test began, and began to use its backends"))
    if closed.overlapped:
        shown = ", ".join(closed.overlapped[:_SHOWN])
        more = f" and {len(closed.overlapped) - _SHOWN} more" if len(closed.overlapped) > _SHOWN else ""
        what = "a backend" if own else "a backend or device"
        rows.append(("at the same time", f"{shown}{more} (tests that share {what} share its peak)"))
    rows.extend(
        ("left behind", residue(one, became=not closed.boot))
        for one in closed.residues
        if label in (None, one.device) and one.bytes >= WORTH_A_WORD
    )
    rows.extend(
        ("stranger", stranger(one)) for one in closed.strangers if not one.decisive and label in (None, one.device)
    )
    rows.extend(("trouble", sentence) for sentence in closed.trouble)
    return rows


def block(title: str, rows: Sequence[tuple[str, str]]) -> str:
    """A sentence and the rows below it, in two columns."""
    width = max((len(name) for name, _ in rows), default=0)
    lines = [title]
    for name, text in rows:
        head = f"  {name.ljust(width)}  "
        lines.extend(
            textwrap.wrap(
                text,
                _WIDTH,
                initial_indent=head,
                subsequent_indent=" " * len(head),
                break_long_words=False,
                break_on_hyphens=False,
            )
        )
    return "\n".join(lines)
