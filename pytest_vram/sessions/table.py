"""The turn table as text: one row for each turn, in the columns that people write by hand in such tables."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Sequence

from pytest_vram.readings import Measured, Reading
from pytest_vram.sessions.turns import Turn
from pytest_vram.text import printable
from pytest_vram.units import MIB

#: Rows of a table: of more turns the first, the last, those with the highest idle memory and peak, and those that
#: failed (:data:`MOST_FAILED` of them) are shown.
MOST = 60
MOST_FAILED = 20
#: Errors that are told in full.
MOST_ERRORS = 4
_HEAD = (
    f"{'turn':>5} {'in':>6} {'cap':>5} {'out':>5} {'peak':>9} {'idle':>9} {'time':>7} {'tok/s':>6} {'calls':>6}  events"
)
#: Bytes from which figures are written without a decimal.
_WHOLE = 10_000 * MIB


def lines(turns: Sequence[Turn], *, width: int = 80, unmeasured: str | None = None) -> list[str]:
    """The table; memory in MiB, at its upper end where a figure is an interval.

    :param width: columns; at least 72 are used. :param unmeasured: why there are no figures of memory.
    """
    if not turns:
        return ["no turn was taken"]
    width = max(72, width)
    labels = list(dict.fromkeys(label for turn in turns for label in (*turn.peak, *turn.idle)))
    found: list[str] = []
    for label in labels or [""]:
        if len(labels) > 1:
            found.append(f"on {label}:")
        found.append(_HEAD)
        chosen = _chosen(turns, label)
        last = 0
        for index in chosen:
            if index > last:
                gap = index - last
                found.append(f"{'…':>5} {gap} turn{'s are' if gap > 1 else ' is'} not shown")
            found += _row(turns[index], label, width)
            last = index + 1
    remarks = []
    if labels:
        remarks.append(f"peak and idle in MiB on {', '.join(labels)}, time in seconds, calls right of those expected.")
    else:
        remarks.append(f"peak and idle were not measured: {unmeasured or 'no device is measured'}.")
    remarks += _remarks(turns)
    for remark in remarks:
        found += textwrap.wrap(
            printable(remark), width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
        )
    return found


def _chosen(turns: Sequence[Turn], label: str) -> list[int]:
    if len(turns) <= MOST:
        return list(range(len(turns)))
    half = MOST // 3
    ends = {*range(half), *range(len(turns) - half, len(turns))}
    rest = sorted(range(half, len(turns) - half), key=lambda index: -_upper(turns[index].peak.get(label)))
    high = sorted(range(half, len(turns) - half), key=lambda index: -_upper(turns[index].idle.get(label)))
    failed = [index for index, turn in enumerate(turns) if turn.result != "ok"]
    return sorted(ends | set(rest[: half // 2]) | set(high[: half - half // 2]) | set(failed[:MOST_FAILED]))


def _row(turn: Turn, label: str, width: int) -> list[str]:
    calls = "-" if not turn.calls else f"{turn.calls_right or 0}/{turn.calls}"
    events = [*turn.events]
    if turn.repeated:
        events.append(f"{turn.repeated} repeated call{'s' if turn.repeated > 1 else ''}")
    if turn.result != "ok":
        events.append("server lost" if turn.result == "lost" else "request failed")
    text = (
        f"{turn.number:>5} {_plain(turn.tokens_in):>6} {_plain(turn.output_cap):>5} {_plain(turn.tokens_out):>5}"
        f" {_mib(turn.peak.get(label)):>9} {_mib(turn.idle.get(label)):>9}"
        f" {'-' if turn.latency is None else _short(turn.latency):>7}"
        f" {'-' if turn.tokens_per_second is None else _short(turn.tokens_per_second):>6} {calls:>6}"
    )
    said = printable(", ".join(events))
    if not said:
        return [text]
    if len(text) + 2 + len(said) <= width:
        return [f"{text}  {said}"]
    indent = " " * 7
    return [text, *textwrap.wrap(said, width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)]


def _remarks(turns: Sequence[Turn]) -> list[str]:
    remarks = []
    reasons = dict.fromkeys(
        figure.reason
        for turn in turns
        for table in (turn.peak, turn.idle)
        for figure in table.values()
        if not isinstance(figure, Reading)
    )
    remarks += [f"? could not be measured: {reason}" for reason in list(reasons)[:3]]
    sources = dict.fromkeys(
        figure.source
        for turn in turns
        for table in (turn.peak, turn.idle)
        for figure in table.values()
        if isinstance(figure, Reading)
    )
    if sources:
        remarks.append(f"sources: {', '.join(sources)}.")
    failed = [turn for turn in turns if turn.unanswered or turn.error]
    causes: dict[str, list[int]] = {}
    for turn in failed:
        causes.setdefault(turn.error or turn.unanswered or "", []).append(turn.number)
    for reason, numbers in list(causes.items())[:MOST_ERRORS]:
        more = f" and {len(numbers) - MOST_ERRORS} more" if len(numbers) > MOST_ERRORS else ""
        listed = ", ".join(map(str, numbers[:MOST_ERRORS]))
        remarks.append(f"turn{'s' if len(numbers) > 1 else ''} {listed}{more}: {reason}")
    if len(causes) > MOST_ERRORS:
        remarks.append(f"{len(failed)} turns have no answer, for {len(causes)} reasons; these were the first.")
    if any(turn.result == "error" and later.segment == turn.segment for turn, later in itertools.pairwise(turns)):
        remarks.append("after a request that failed the server may still work on it: the next turn is slower.")
    return remarks


def _upper(figure: Measured | None) -> int:
    return figure.upper if isinstance(figure, Reading) else -1


def _mib(figure: Measured | None) -> str:
    if figure is None:
        return "-"
    if not isinstance(figure, Reading):
        return "?"
    amount = figure.upper / MIB
    return f"{amount:,.0f}" if figure.upper >= _WHOLE else f"{amount:,.1f}"


def _plain(value: int | None) -> str:
    return "-" if value is None else str(value)


def _short(value: float) -> str:
    return f"{value:.2f}" if value < 100 else f"{value:.0f}"
