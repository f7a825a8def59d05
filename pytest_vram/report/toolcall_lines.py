"""Tool calls for a terminal: records in, lines out."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from pytest_vram.report.toolcalls import AskedRecord, DefectTable, RateRow, ToolcallDocument, ToolcallRecord, WorstCase
from pytest_vram.text import printable
from pytest_vram.toolcalls.verdict import Paired

WIDTH = 80
#: Worst cases of a terminal, and most lines of one text of them.
SHOWN = 3
_LINES = 4
_KINDS = 12
_LOST = 10
_NAME = 20
_CELL = 13


def failure_lines(record: ToolcallRecord, width: int = WIDTH) -> list[str]:
    """Everything that a failing test shows: verdict, tables, kinds, worst cases, where the rest is.

    The first line is one sentence, for places that show no more.
    """
    return [*verdict_lines(record), "", *asked_lines(record, width)]


def verdict_lines(record: ToolcallRecord) -> list[str]:
    """The sentences of the verdict and of the comparison; first what brought the outcome about."""
    verdict, paired = record.verdict, record.paired
    told = [line for line in verdict.text.splitlines() if line.strip()]
    compared = paired_lines(paired)
    first = paired is not None and paired.outcome == verdict.outcome
    lines = [*compared, *told] if first else [*told, *compared]
    return lines or [f"tool calls: {verdict.outcome}"]


def asked_lines(record: ToolcallRecord | ToolcallDocument, width: int = WIDTH) -> list[str]:
    """The tables, the worst cases and what is to be known besides, without the verdict."""
    asked = record.asked
    lines = textwrap.wrap(how_asked(asked), width, subsequent_indent="  ", break_on_hyphens=False)
    lines += rate_table(asked, record.baseline)
    lines += ["", *kind_table(asked, record.baseline)] if asked.kinds else []
    for case in record.worst[:SHOWN]:
        lines += ["", *case_lines(case, width)]
    lines += [""] if asked.kinds else []
    warnings = record.verdict.warnings if record.verdict is not None else []
    for text in [*warnings, *_paired_notes(record), *asked.notes]:
        lines += textwrap.wrap(f"note: {text}", width, subsequent_indent="  ", break_long_words=False)
    if asked.reused:
        lines.append("note: an earlier test of this run had asked the same: its answers were taken")
    if asked.file is not None:
        lines.append(f"all answers: {asked.file}")
    while lines and not lines[-1]:
        lines.pop()
    return lines


def _paired_notes(record: ToolcallRecord | ToolcallDocument) -> list[str]:
    return list(record.paired.notes) if record.paired is not None else []


def paired_lines(paired: Paired | None) -> list[str]:
    """The sentences of a comparison, and which cases were lost."""
    if paired is None:
        return []
    lines = [line for line in paired.text.splitlines() if line.strip()]
    if paired.lost_ids:
        shown = ", ".join(map(printable, paired.lost_ids[:_LOST]))
        more = f" and {paired.lost - _LOST} more" if paired.lost > _LOST else ""
        lines.append(f"Right before and wrong now: {shown}{more}.")
    return lines


def rate_line(asked: AskedRecord) -> str:
    """The rate alone, where nothing is judged."""
    if not asked.n:
        return f"no case has an answer: {asked.infrastructure} of {asked.planned} ended in trouble of the server"
    retry = f", {_share(asked.after_retry, asked.n)} after a retry" if asked.retries else ""
    lost = f"; {asked.infrastructure} without an answer" if asked.infrastructure else ""
    return f"{_share(asked.right, asked.n)} right at first try{retry}{lost}"


def how_asked(asked: AskedRecord) -> str:
    """One line: which cases, how, by which sampling."""
    how = f"{asked.protocol}{', streamed' if asked.stream else ''}"
    sampling = ", ".join(f"{name} {_plain(value)}" for name, value in asked.sampling.items() if _is_plain(value))
    stopped = f"; stopped after {asked.n + asked.infrastructure} of {asked.planned}" if asked.stopped else ""
    cases = f"cases {asked.cases} ({asked.n} answered)"
    return f"backend {asked.backend!r}, {cases}, {how}; {sampling}{stopped}".rstrip("; ")


def rate_table(asked: AskedRecord, baseline: AskedRecord | None = None) -> list[str]:
    """Category × right of n, at first try and after the retry; beside a baseline its own first tries."""
    retried = asked.retries > 0
    head = f"{'category':<{_NAME}}{'first try':>{_CELL}}"
    head += f"{'after retry':>{_CELL}}" if retried else ""
    head += f"{'baseline':>{_CELL}}" if baseline is not None else ""
    lines = [head]
    before = {row.name: row for row in baseline.categories} if baseline is not None else {}
    compared = baseline is not None
    lines += [_row(row, retried, before.get(row.name), compared) for row in asked.categories]
    lines.append(_row(_whole(asked), retried, _whole(baseline) if baseline is not None else None, compared))
    if len(asked.languages) > 1:
        cells = (f"{row.name} {row.right}/{row.n}" for row in asked.languages)
        lines += textwrap.wrap(
            f"by language: {', '.join(cells)}", WIDTH, subsequent_indent="  ", break_on_hyphens=False
        )
    return lines


def _whole(asked: AskedRecord) -> RateRow:
    return RateRow(name="all", n=asked.n, right=asked.right, after_retry=asked.after_retry)


def _row(row: RateRow, retried: bool, before: RateRow | None, compared: bool) -> str:
    line = f"{_cut(row.name, _NAME - 1):<{_NAME}}{_share(row.right, row.n):>{_CELL}}"
    if retried:
        line += f"{_share(row.after_retry, row.n):>{_CELL}}"
    if compared:
        line += f"{_share(before.right, before.n) if before is not None else '-':>{_CELL}}"
    return line.rstrip()


def _share(right: int, n: int) -> str:
    """``281/300 94%``; a share that is not all of them is never shown as 100 %, nor one above none as 0 %."""
    if n == 0:
        return "-"
    percent = round(100 * right / n)
    if right < n:
        percent = min(percent, 99)
    if right > 0:
        percent = max(percent, 1)
    return f"{right}/{n} {percent:>3}%"


def kind_table(asked: AskedRecord, baseline: AskedRecord | None = None) -> list[str]:
    """Kind of defect × cases, at first try and after the retry."""
    retried = asked.retries > 0
    head = f"{'kind of defect':<{_NAME}}{'first try':>{_CELL}}"
    head += f"{'after retry':>{_CELL}}" if retried else ""
    head += f"{'baseline':>{_CELL}}" if baseline is not None else ""
    lines = [head]
    before = {row.kind: row.first for row in baseline.kinds} if baseline is not None else {}
    for row in asked.kinds[:_KINDS]:
        line = f"{_cut(row.kind, _NAME - 1):<{_NAME}}{row.first:>{_CELL}}"
        line += f"{row.after_retry:>{_CELL}}" if retried else ""
        line += f"{before.get(row.kind, 0):>{_CELL}}" if baseline is not None else ""
        lines.append(line)
    if len(asked.kinds) > _KINDS:
        lines.append(f"and {len(asked.kinds) - _KINDS} kinds more")
    return lines


def case_lines(case: WorstCase, width: int = WIDTH) -> list[str]:
    """One case: what was asked, what was answered, what was expected."""
    more = [kind for kind in case.kinds if kind != case.kind]
    also = f" (also {', '.join(more)})" if more else ""
    lines = textwrap.wrap(f"{case.id}: {case.kind}{also}", width, subsequent_indent="  ")
    question = _question(case.request)
    if question:
        lines += _said("asked", question, width)
    raw = case.raw if case.raw.strip() else "(nothing)"
    lines += _said("answered", raw, width, more=case.raw_length > len(case.raw))
    lines += _said("expected", _expected(case.expect), width)
    if case.detail:
        lines += _said("why", case.detail, width)
    return lines


def _said(name: str, text: str, width: int, *, more: bool = False) -> list[str]:
    """A text of somebody else on a few lines, nothing in it left that a terminal would obey."""
    flat = " ".join(printable(text[: width * _LINES * 2]).split())
    found = textwrap.wrap(
        flat,
        width,
        initial_indent=f"  {name + ':':<10}",
        subsequent_indent=" " * 12,
        break_on_hyphens=False,
        max_lines=_LINES,
        placeholder=" …",
    )
    if more and found and not found[-1].endswith("…"):
        found[-1] = f"{found[-1][: width - 2]} …"
    return found


def _question(request: Mapping[str, Any] | None) -> str:
    """The last message of the user in a request."""
    messages = request.get("messages") if request is not None else None
    for message in reversed(messages if isinstance(messages, list) else []):
        if isinstance(message, dict) and message.get("role") == "user" and isinstance(message.get("content"), str):
            return str(message["content"])
    return ""


def _expected(expect: Sequence[Mapping[str, Any]]) -> str:
    if not expect:
        return "an answer without a call"
    return "; ".join(_call(call) for call in expect)


def _call(call: Mapping[str, Any]) -> str:
    """``name(argument=value or value, [argument=value])``, values as JSON, in brackets what may be left out."""
    arguments = call.get("arguments")
    free = call.get("omittable") or ()
    parts = []
    for name, values in arguments.items() if isinstance(arguments, dict) else ():
        allowed = values if isinstance(values, list) else [values]
        shown = " or ".join(json.dumps(value, ensure_ascii=False) for value in allowed[:3])
        part = f"{name}={shown}{' or …' if len(allowed) > 3 else ''}"
        parts.append(f"[{part}]" if name in free else part)
    return f"{call.get('name')}({', '.join(parts)})"


def one_line(record: ToolcallRecord) -> str:
    """A test whose calls were right often enough, in one sentence for the summary."""
    asked, verdict = record.asked, record.verdict
    kinds = ", ".join(f"{row.kind} {row.first}" for row in asked.kinds[:3])
    wrong = f"; mostly {kinds}" if kinds else ""
    return f"{rate_line(asked)}, target {_plain(verdict.target)}{wrong}"


def defect_lines(table: DefectTable, width: int = WIDTH) -> list[str]:
    """Kinds of defect × backends, with the settings in which they differ above the counts."""
    cell = max(10, min(24, (width - _NAME) // max(1, len(table.columns))))
    names = [_cut(column.backend, cell - 1) for column in table.columns]
    if len(names) * cell + _NAME > width:
        return _defect_list(table, width)
    lines = [_cells("defects by setting", names, cell)]
    for setting in table.columns[0].settings:
        values = _apart([column.settings[setting] or "-" for column in table.columns], cell - 1)
        lines.append(_cells(setting, values, cell))
    lines.append(_cells("right", [_share(column.right, column.n) for column in table.columns], cell))
    lines += [_cells(row.kind, [str(count) if count else "." for count in row.counts], cell) for row in table.rows]
    return lines


def _apart(values: Sequence[str], most: int) -> list[str]:
    """Values cut so that what differs is seen: those that are long begin where they differ."""
    same = next(
        (place for place, letters in enumerate(zip(*values, strict=False)) if len(set(letters)) > 1),
        min(map(len, values)),
    )
    if max(map(len, values)) <= most or same < most // 2:
        return [_cut(value, most) for value in values]
    return [_cut("…" + value[same:], most) for value in values]


def _defect_list(table: DefectTable, width: int) -> list[str]:
    """As a list where the columns have no room beside each other."""
    lines = ["defects by setting"]
    for index, column in enumerate(table.columns):
        settings = ", ".join(f"{name} {value or '-'}" for name, value in column.settings.items())
        kinds = ", ".join(f"{row.kind} {row.counts[index]}" for row in table.rows if row.counts[index])
        text = f"{column.backend} ({settings}): {_share(column.right, column.n)} right; {kinds}".rstrip("; ")
        lines += textwrap.wrap(text, width, initial_indent="  ", subsequent_indent="    ")
    return lines


def _cells(name: str, cells: Sequence[str], cell: int) -> str:
    return (f"{_cut(name, _NAME - 1):<{_NAME}}" + "".join(f"{text:>{cell}}" for text in cells)).rstrip()


def _cut(text: str, most: int) -> str:
    text = printable(text)
    return text if len(text) <= most else text[: most - 1] + "…"


def _plain(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else printable(str(value))


def _is_plain(value: object) -> bool:
    return isinstance(value, (int, float, str)) and not isinstance(value, bool)
