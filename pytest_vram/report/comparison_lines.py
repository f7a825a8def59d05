"""A comparison for a terminal: data in, lines out."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Callable, Sequence

from pytest_vram.checks.breakdown import difference
from pytest_vram.differences import MEANINGS, Change, Difference, grown
from pytest_vram.report.comparison import CompareDocument, Judged, Pair, SideRecord, TestPair, Total, loud
from pytest_vram.report.deployments import HOST_ONLY
from pytest_vram.text import printable
from pytest_vram.units import MIB, mib

_WIDTH = 80
_NARROWEST = 40
_NONE = "-"
_LISTED = 10
#: Bytes by which a peak must differ to be listed: less is between any two runs.
_WORTH = MIB
_KINDS = {"run": "a run", "log": "a boot log", "boot": "a boot log, read before", "estimate": "an estimate"}
_VERDICTS = {
    "held": "nothing grew beyond it",
    "grew": "GREW",
    "undecided": "undecided",
}


def compare_lines(document: CompareDocument) -> list[str]:
    """Everything that ``vram compare`` says."""
    lines = [*_side("before", document.before), *_side("after", document.after)]
    for name, changes in loud(document).items():
        what = "; ".join(_change(change) for change in changes)
        whose = f"{name}: " if name else ""
        lines += _wrapped(f"NOT ALIKE: {whose}{what}: other models or devices, whose figures differ anyway", indent="")
        if _for_a_card(document, changes):
            hint = "an estimate for a host without a card is made by: vram estimate … --device none"
            lines += _wrapped(hint)
    for pair in document.deployments:
        lines += ["", *_pair(pair)]
    if document.tests:
        lines += ["", *_tests(document.tests)]
    for title, names in (("only before", document.only_before), ("only after", document.only_after)):
        if names:
            lines += ["", *_list(title, names)]
    if document.changes:
        lines += ["", "versions that differ", *(f"  {_change(change)}" for change in document.changes)]
    if document.fail_on is not None:
        lines += ["", *_verdict(document)]
    return [printable(line) for line in lines]


def _for_a_card(document: CompareDocument, changes: Sequence[Change]) -> bool:
    """Whether an estimate for a card stands beside something that used none."""
    values = {"before": document.before.kind, "after": document.after.kind}
    return any(
        change.setting == "devices"
        and HOST_ONLY in (change.before, change.after)
        and any(kind == "estimate" and getattr(change, when) != HOST_ONLY for when, kind in values.items())
        for change in changes
    )


def _side(when: str, side: SideRecord) -> list[str]:
    more = f", {side.run}" if side.run else ""
    more += f", {side.started}" if side.started else ""
    return _wrapped(f"{when.ljust(8)}{side.origin} ({_KINDS[side.kind]}{more})", indent="", hang=" " * 8)


def _pair(pair: Pair) -> list[str]:
    engines = " → ".join(dict.fromkeys((pair.engine_before, pair.engine_after)))
    lines = [f"{pair.name}: {engines}" if pair.name else engines]
    for total in pair.totals:
        mine = [one for one in pair.differences if one.device == total.device]
        lines += _table(total, mine)
    most = grown(pair.differences)
    if most is not None and _worth_saying(most, pair.totals):
        where = "what is beside the buffers" if most.bucket == "unattributed" else most.bucket
        lines += _wrapped(
            f"grew most: {where} on {most.device}, by {mib(most.least)} ({most.meaning}: {most.text})", indent=""
        )
    if any(one.meaning not in ("equal", "rounding") for one in pair.differences):
        lines.append("what the differences mean")
        for one in pair.differences:
            if one.meaning not in ("equal", "rounding"):
                lines += _wrapped(difference(one) if one.text else f"{difference(one)} ({MEANINGS[one.meaning]})")
    if pair.changes:
        lines.append("settings and facts that differ")
        for change in pair.changes:
            lines += _wrapped(_change(change))
    return lines


def _worth_saying(most: Difference, totals: Sequence[Total]) -> bool:
    """Whether growth is more than any two runs differ by: where its device holds less in all, a hundredth of that."""
    total = next((total for total in totals if total.device == most.device), None)
    if total is None or total.least > 0:
        return most.least >= _WORTH
    return most.least >= max(_WORTH, (total.before or 0) // 100)


def _table(total: Total, mine: Sequence[Difference]) -> list[str]:
    rows: list[Sequence[str]] = [(f"ledger, MiB, {total.device}", "before", "after", "difference", "meaning")]
    buckets = [one for one in mine if one.bucket != "unattributed"]
    rows += [
        (
            one.bucket,
            _ends(one.before, one.before_at_most),
            _ends(one.after, one.after_at_most),
            _signed(one.least, one.most),
            one.meaning,
        )
        for one in buckets
    ]
    rest = [one for one in mine if one.bucket == "unattributed"]
    if rest:
        named = ", ".join(dict.fromkeys(one.meaning for one in rest))
        before = _left(total.before, total.before_at_most, [(one.before, one.before_at_most) for one in buckets])
        after = _left(total.after, total.after_at_most, [(one.after, one.after_at_most) for one in buckets])
        least, most = sum(one.least for one in rest), sum(one.most for one in rest)
        rows.append(("unattributed", before, after, _signed(least, most), named))
    kinds = list(dict.fromkeys(kind for kind in (total.basis_before, total.basis_after) if kind))
    rows.append(
        (
            "total",
            _ends(total.before, total.before_at_most),
            _ends(total.after, total.after_at_most),
            _signed(total.least, total.most),
            " → ".join(kinds),
        )
    )
    return _columns(rows)


def _columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """The first and the last column begin on the left, figures end on the right."""
    widths = [max(len(row[index]) for row in rows) for index in range(len(rows[0]))]
    lines = []
    for number, row in enumerate(rows):
        name = row[0] if number == 0 else f"  {row[0]}"
        cells = "  ".join(cell.rjust(width) for cell, width in zip(row[1:-1], widths[1:-1], strict=True))
        lines.append(f"{name.ljust(widths[0] + 2)}  {cells}  {row[-1]}".rstrip())
    return lines


def _left(total: int | None, at_most: int | None, parts: Sequence[tuple[int | None, int | None]]) -> str:
    """What the buckets leave of a total; nothing where the total is their sum."""
    if total is None:
        return _NONE
    low = total - sum(part or 0 for part, _ in parts)
    high = (total if at_most is None else at_most) - sum(part or 0 if top is None else top for part, top in parts)
    if low == high:
        return f"{low / MIB:+,.2f}" if low else _NONE
    return _ends(low, high)


def _ends(low: int | None, high: int | None) -> str:
    if low is None:
        return _NONE
    return f"{low / MIB:,.2f}" if high is None or high == low else f"{low / MIB:,.2f}–{high / MIB:,.2f}"


def _signed(least: int, most: int) -> str:
    if least == most:
        return f"{least / MIB:+,.2f}" if least else "0"
    return f"{least / MIB:+,.2f}…{most / MIB:+,.2f}"


def _change(change: Change) -> str:
    return f"{change.setting} {_value(change.before)} → {_value(change.after)}"


def _value(value: object) -> str:
    if value is None:
        return "not given"
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _tests(tests: Sequence[TestPair]) -> list[str]:
    """Tests whose outcome or peak differs, outcomes first, then the largest growth."""
    other = [test for test in tests if test.outcome_before != test.outcome_after]
    moved = [test for test in tests if test.outcome_before == test.outcome_after and _growth(test) >= _WORTH]
    moved.sort(key=_growth, reverse=True)
    same = len(tests) - len(other) - len(moved)
    lines = [f"tests: {len(tests)} in both, {same} with the same outcome and peak (within {mib(_WORTH)})"]
    for test in [*other, *moved][:_LISTED]:
        outcome = test.outcome_after
        if test.outcome_before != test.outcome_after:
            outcome = f"{test.outcome_before} → {test.outcome_after}"
        peaks = ", ".join(
            f"{peak.device} {_ends(peak.before, None)} → {_ends(peak.after, None)} ({_signed(peak.least, peak.most)})"
            for peak in test.peaks
        )
        lines += _wrapped(f"{test.nodeid}: {outcome}" + (f", peak MiB {peaks}" if peaks else ""))
    if len(other) + len(moved) > _LISTED:
        lines.append(f"  and {len(other) + len(moved) - _LISTED} more, which --json has")
    return lines


def _growth(test: TestPair) -> int:
    return max((max(abs(peak.least), abs(peak.most)) for peak in test.peaks), default=0)


def _list(title: str, names: Sequence[str]) -> list[str]:
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return _wrapped(f"{title}: {', '.join(names[:_LISTED])}{more}", indent="")


def _verdict(document: CompareDocument) -> list[str]:
    assert document.verdict is not None
    lines = [f"{document.fail_on}: {_VERDICTS[document.verdict]}"]
    if not document.judged:
        lines += _wrapped("there is nothing on both sides that could be held against it")
    order = {"grew": 0, "undecided": 1, "held": 2}
    for one in sorted(document.judged, key=lambda one: order[one.result])[:_LISTED]:
        if one.result != "held":
            lines += _wrapped(_judged(one))
    return lines


def _judged(one: Judged) -> str:
    before, after, limit = _told_apart(one.before, one.after, one.allowed)
    figures = f"{before} → {after}"
    allowed = f", allowed {limit}" if one.allowed is not None else ""
    return f"{one.what} of {one.where}: {figures}{allowed}: {one.result}" + (f" ({one.reason})" if one.reason else "")


def _told_apart(*sizes: int | None) -> list[str]:
    """Sizes with as many digits as tell different ones apart."""
    ways: tuple[Callable[[int], str], ...] = (mib, lambda size: f"{size / MIB:,.2f} MiB", lambda size: f"{size:,} B")
    known = {size for size in sizes if size is not None}
    way = next((way for way in ways if len({way(size) for size in known}) == len(known)), ways[-1])
    return ["unknown" if size is None else way(size) for size in sizes]


def _wrapped(text: str, *, indent: str = "  ", hang: str | None = None) -> list[str]:
    width = max(_NARROWEST, min(_WIDTH, shutil.get_terminal_size((_WIDTH, 24)).columns))
    return textwrap.wrap(
        text,
        width,
        initial_indent=indent,
        subsequent_indent=f"{indent}  " if hang is None else hang,
        break_long_words=False,
        break_on_hyphens=False,
    )
