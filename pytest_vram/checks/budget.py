"""Peak memory against a limit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple

import msgspec

from pytest_vram.checks.breakdown import ledger_table
from pytest_vram.checks.finding import Finding, Verdict
from pytest_vram.checks.leftovers import Left, left_in, words
from pytest_vram.checks.wording import amount, block, device, provenance, surroundings
from pytest_vram.differences import Beside, grown
from pytest_vram.keeper.messages import Closed
from pytest_vram.ledger import Ledger
from pytest_vram.readings import Measured, Reading, Unmeasurable, floor, larger, least, rise
from pytest_vram.spec import Limits
from pytest_vram.units import card_hint, mib, with_mib

#: Scope of a figure of the run without what other tests held at the same time.
OWN = "own"
Over = Literal["total", "baseline"]
SUM = "sum"
#: Bucket → what its size follows from, in llama.cpp's words. What each would save is not computed yet.
SETTINGS: dict[str, str] = {
    "weights": "the model's quantisation; layers on the device (n-gpu-layers, n-cpu-moe)",
    "kv": "ctx-size, cache-type-k and cache-type-v, parallel; where its layers are (n-gpu-layers)",
    "experts": "n-cpu-moe, cpu-moe; the quantisation of the model file",
    "compute": "ubatch-size, flash-attn, ctx-size",
    "recurrent": "parallel",
}
PREDICTED, NOT_MEASURED = "predicted", "nothing was measured"
_ORDER: tuple[Verdict, ...] = ("failed", "error", "inconclusive")
_SECTIONS: dict[Verdict, str] = {
    "failed": "VRAM over its limit",
    "error": "VRAM over its limit for what earlier tests left behind",
    "inconclusive": "VRAM limit undecided",
}
_NOT_AT_ONCE = "need not have fallen at the same moment"
_NOTHING = "no device was measured in this window"


def tightest(
    budget: Limits | None,
    budget_from: str,
    marker: Limits | None,
    marker_from: str,
    *,
    labels: Sequence[str] = (),
) -> tuple[Limits, str, str]:
    """The smaller of a budget and a marker's limit, device by device, with the check and the place to name.

    :param labels: devices that were measured.
    :returns: limits, check (``vram_budget`` or ``max_vram``) and where they were written; where each of the two is
        the smaller one somewhere, the place says which holds where and the check is ``max_vram``.
    :raises ValueError: when there is neither.
    """
    if budget is None or marker is None:
        if budget is not None:
            return budget, "vram_budget", budget_from
        if marker is not None:
            return marker, "max_vram", marker_from
        raise ValueError("neither a budget nor a marker's limit")
    known = dict.fromkeys((*labels, *budget.by_label, *marker.by_label))
    by_label: dict[str, int] = {}
    places: dict[str, str] = {}
    for label in known:
        found = _smaller(budget.of(label), budget_from, marker.of(label), marker_from)
        if found is not None:
            by_label[label], places[label] = found
    total = _smaller(budget.total, budget_from, marker.total, marker_from)
    if total is not None:
        places[SUM] = total[1]
    each = _smaller(budget.each, budget_from, marker.each, marker_from)
    limits = Limits(
        text=" and ".join(dict.fromkeys((marker.text, budget.text))),
        each=None if each is None else each[0],
        by_label=by_label,
        total=None if total is None else total[0],
    )
    winners = set(places.values()) or {marker_from}
    if winners == {budget_from}:
        return budget, "vram_budget", budget_from
    if winners == {marker_from}:
        return msgspec.structs.replace(limits, text=marker.text), "max_vram", marker_from
    return limits, "max_vram", "; ".join(f"{label}: {place}" for label, place in places.items())


def _smaller(budget: int | None, budget_from: str, marker: int | None, marker_from: str) -> tuple[int, str] | None:
    if marker is None:
        return None if budget is None else (budget, budget_from)
    return (marker, marker_from) if budget is None or marker <= budget else (budget, budget_from)


class _Case(NamedTuple):
    """One limit and the figure that it is for; the device is ``sum`` for the sum over devices."""

    device: str
    limit: int
    figure: Measured


def judge_peak(
    closed: Closed,
    *,
    check: str,
    limits: Limits,
    limit_from: str,
    scope: str = "run",
    over: str = "total",
    phase: str | None = None,
    ledger: Ledger | None = None,
    predicted: bool = False,
    beside: Callable[[], Beside | None] = lambda: None,
) -> Finding | None:
    """Hold the peak of a window against ``limits``.

    The limit holds on a device when the upper end of its peak is within it, and fails when the lower end is over it,
    also where only a lower end is known; anything else, a figure that could not be measured, one that may have missed
    something, or a window whose measurement had trouble, is inconclusive.
    The sum over devices is the sum of their peaks, which need not have fallen at the same moment: it is the memory
    that the cards must have together.

    :param scope: ``run``, ``own`` (the run without what other tests held at the same time), ``backend``, ``process``
        or ``device``. :param over: ``total``, or ``baseline`` for the rise over what was held when the window opened
        and what its backends held when it began to use them. :param phase: judge the peak of this phase alone.
    :param ledger: memory breakdown to explain the peak with. :param predicted: the figures are estimates.
    :param beside: makes the estimate beside the ledger; asked where a limit does not hold.
    :returns: ``None`` where every limit holds, else one finding for the gravest case whose text has all of them.
    """
    figures, problem = _figures(closed, scope, over, phase)
    found: list[tuple[Verdict, _Case]] = []
    for case in map(_broken, _cases(limits, figures, problem)):
        left = _left(closed, case, scope, over, phase)
        verdict = _verdict(case, closed, left)
        if verdict is not None:
            found.append((verdict, case))
    if not found:
        return None
    # What fails for the test's own memory comes first, then what fails only for what others left.
    found.sort(key=lambda item: (_ORDER.index(item[0]), -_excess(item[1])))
    verdict, worst = found[0]
    told = beside() if ledger is not None else None
    parts = [
        _case_text(
            v,
            case,
            _what(closed, case, scope, over, phase, predicted),
            limit_from,
            closed,
            ledger,
            _left(closed, case, scope, over, phase),
            told,
        )
        for v, case in found
    ]
    if ledger is not None:
        parts.append("\n".join(ledger_table(ledger, beside=told)))
    return Finding(
        check=check,
        verdict=verdict,
        section=("predicted " if predicted else "") + _SECTIONS[verdict],
        text="\n\n".join(parts),
        device=worst.device,
        measured=worst.figure,
        limit=worst.limit,
        limit_from=limit_from,
    )


def _excess(case: _Case) -> int:
    return case.figure.bytes - case.limit if isinstance(case.figure, Reading) else 0


# ---------------------------------------------------------------- figures


def _figures(closed: Closed, scope: str, over: str, phase: str | None) -> tuple[Mapping[str, Measured], str]:
    tables: dict[str, tuple[dict[str, Measured], dict[str, Measured] | None]] = {
        "run": (closed.run, closed.baseline),
        OWN: (own_of(closed), closed.baseline),
        "backend": (closed.backend, closed.baseline_backend),
        "process": (closed.process, None),
        "device": (closed.device, None),
    }
    if scope not in tables:
        raise ValueError(f"{scope!r} is not a scope")
    peaks, baselines = tables[scope]
    problem = _NOTHING if scope in ("run", OWN) else f"nothing was measured in scope {scope!r}"
    problem = "; ".join([problem, *closed.trouble])
    if phase is not None:
        if phase not in closed.phases:
            seen = ", ".join(closed.phases) or "none"
            return {}, f"phase {phase!r} did not occur in this window (phases seen: {seen})"
        peaks = closed.phases[phase]
        problem = f"nothing was measured in phase {phase!r}"
    if over == "total":
        return peaks, problem
    before: Mapping[str, Measured] = {}
    if phase is None:
        before = {"run": closed.risen, OWN: closed.risen, "backend": closed.risen_backend}.get(scope, {})
    rises = {label: _rise(label, peak, baselines, scope) for label, peak in peaks.items()}
    return {label: larger([rise, before[label]]) if label in before else rise for label, rise in rises.items()}, problem


def own_of(closed: Closed) -> dict[str, Measured]:
    """Label → peak of the test's own processes and backends, which is the run's where nothing else is known."""
    return {label: closed.own.get(label, figure) for label, figure in closed.run.items()}


def is_apart(closed: Closed) -> bool:
    """Whether the run's peaks contain memory of other tests that ran at the same time, which the test's own do not."""
    return any(_ends(figure) != _ends(closed.run[label]) for label, figure in own_of(closed).items())


def scope_of(closed: Closed, scope: str) -> str:
    """What a marker's scope is judged by: ``run`` is the test's own part of the run, where that is another figure."""
    return OWN if scope == "run" and is_apart(closed) else scope


def _ends(figure: Measured) -> tuple[int | None, int | None]:
    return (figure.bytes, figure.upper) if isinstance(figure, Reading) else (figure.at_least, None)


def _rise(label: str, peak: Measured, baselines: Mapping[str, Measured] | None, scope: str) -> Measured:
    """Peak minus baseline, as an interval."""
    if baselines is None:
        return Unmeasurable(reason=f"scope {scope!r} has no baseline: use over='total', or scope 'run' or 'backend'")
    base = baselines.get(label)
    if base is None:
        # A backend that did not run yet when the window opened held nothing.
        base = Reading(bytes=0, source="none", scope=scope, device=label, exact=True) if scope == "backend" else None
    if base is None:
        return Unmeasurable(reason=f"no baseline of {label} was read when the window opened", device=label)
    return rise(peak, base)


def _cases(limits: Limits, figures: Mapping[str, Measured], problem: str) -> list[_Case]:
    cases = [
        _Case(label, limit, figure) for label, figure in figures.items() if (limit := limits.of(label)) is not None
    ]
    for label, limit in limits.by_label.items():
        if label not in figures:
            known = ", ".join(figures) or "none"
            reason = f"{label} was not measured (measured devices: {known})" if figures else problem
            cases.append(_Case(label, limit, Unmeasurable(reason=reason, device=label)))
    if limits.each is not None and not figures and not limits.by_label:
        cases.append(_Case("every device", limits.each, Unmeasurable(reason=problem)))
    if limits.total is not None:
        cases.append(_Case(SUM, limits.total, _sum(figures, problem)))
    return cases


def _sum(figures: Mapping[str, Measured], problem: str) -> Measured:
    low = high = 0
    exact = True
    sources: dict[str, None] = {}
    if not figures:
        return Unmeasurable(reason=problem)
    scope = ""
    for label, figure in figures.items():
        if isinstance(figure, Unmeasurable):
            known = sum(least(one) or 0 for one in figures.values())
            reason = f"{label}: {figure.reason}"
            return Unmeasurable(reason=reason, scope=figure.scope, device=SUM, at_least=known or None)
        low, high, exact = low + figure.bytes, high + figure.upper, exact and figure.exact
        sources[figure.source] = None
        scope = figure.scope
    return Reading(
        bytes=low,
        at_most=high if high != low else None,
        source="+".join(sources),
        scope=scope,
        device=SUM,
        exact=exact,
        missed=next((one.missed for one in figures.values() if isinstance(one, Reading) and one.missed), None),
        note=f"sum of the peaks of {_and(list(figures))}, which {_NOT_AT_ONCE}" if len(figures) > 1 else None,
    )


def _broken(case: _Case) -> _Case:
    """A figure that could not be measured, and of which the lower end is over the limit all the same, as that end."""
    known = floor(case.figure)
    return case._replace(figure=known) if known is not None and known.bytes > case.limit else case


def _left(closed: Closed, case: _Case, scope: str, over: str, phase: str | None) -> Left:
    """What earlier tests had left on a device, as far as it is in this figure."""
    if isinstance(case.figure, Unmeasurable):
        return Left()
    return left_in(closed, case.device, case.figure, scope=scope, over=over, phase=phase)


def _verdict(case: _Case, closed: Closed, left: Left) -> Verdict | None:
    figure = case.figure
    if isinstance(figure, Unmeasurable):
        return "inconclusive"
    if figure.bytes > case.limit:
        # Without what others left it would, or might, have held: a victim does not fail for them.
        return "failed" if left.saves(figure, case.limit) is False else "error"
    if figure.upper > case.limit or figure.missed or closed.trouble:
        return "inconclusive"
    return None


# ---------------------------------------------------------------- words


def _and(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def _what(closed: Closed, case: _Case, scope: str, over: str, phase: str | None, predicted: bool) -> str:
    if predicted:
        return f"{PREDICTED} memory of the test's backends" + (f" in phase {phase!r}" if phase else "")
    words = "rise over the baseline" if over == "baseline" else "peak"
    labels = list(_figures(closed, scope, over, phase)[0]) if case.device == SUM else []
    if len(labels) > 1:
        words = "sum of the rises over the baseline" if over == "baseline" else "sum of the peaks"
    whose = {
        "run": "of this run",
        OWN: "of this test (its own processes and backends)",
        "backend": "of the test's backends",
        "process": "of the test's own process",
        "device": "of the whole device, everyone included",
    }[scope]
    where = f" on {_and(labels)}, which {_NOT_AT_ONCE}," if len(labels) > 1 else ""
    return f"{words} {whose}" + (f" in phase {phase!r}" if phase else "") + where


def _left_out(case: _Case, closed: Closed) -> str:
    """What a figure of the test's own does not contain."""
    whole = _sum(closed.run, _NOTHING) if case.device == SUM else closed.run.get(case.device)
    held = f"; the peak of the whole run is {amount(whole)}" if isinstance(whole, Reading) else ""
    return f"what other tests held at the same time in other workers and in backends of theirs{held}"


def _case_text(
    verdict: Verdict,
    case: _Case,
    what: str,
    limit_from: str,
    closed: Closed,
    ledger: Ledger | None,
    left: Left,
    told: Beside | None = None,
) -> str:
    figure, limit = case.figure, case.limit
    phase_seen = "in phase" not in what or any(repr(name) in what for name in closed.phases)
    rows: list[tuple[str, str]] = []
    if case.device not in (SUM, "every device"):
        rows.append(("device", device(case.device, ledger)))
    rows.append(("limit", f"{with_mib(limit)}, from {limit_from}"))
    predicted = what.startswith(PREDICTED)
    if isinstance(figure, Unmeasurable) and predicted:
        rows.append(("reason", figure.reason))
        return block(f"The {what} is not known, so the limit {with_mib(limit)} is undecided; {NOT_MEASURED}.", rows)
    if isinstance(figure, Unmeasurable):
        rows.append(("reason", figure.reason))
        if phase_seen:
            rows.append(("what settles it", "a device or source that can be read here: `vram doctor` says what can"))
        return block(f"The {what} could not be measured, so the limit {with_mib(limit)} is undecided.", rows)
    rows.append(("reading", provenance(figure)))
    if figure.scope == OWN:
        rows.append(("left out", _left_out(case, closed)))
    if verdict == "failed":
        more = "" if figure.upper == figure.bytes and not figure.missed else "at least "
        title = f"The {what} is {amount(figure)}, {more}{mib(figure.bytes - limit)} over the limit {with_mib(limit)}"
        title += f"; {NOT_MEASURED}." if predicted else "."
        hint = card_hint(figure.bytes, limit)
        if hint is not None:
            rows.append(("hint", hint))
    elif verdict == "error":
        end, beside = words(left, figure, limit)
        title = f"The {what} is {amount(figure)}, {mib(figure.bytes - limit)} over the limit {with_mib(limit)}{end}"
        rows.extend(beside)
    elif predicted and figure.upper > limit:
        title = (
            f"The {what} is {amount(figure)}, and the limit {with_mib(limit)} lies in between: undecided;"
            f" {NOT_MEASURED}."
        )
        rows.append(("what settles it", f"a limit of at least {mib(figure.upper)}, or a measurement on such a card"))
    elif predicted:
        title = f"The {what} is at least {mib(figure.bytes)}, within the limit {with_mib(limit)}; {NOT_MEASURED}."
        rows.append(("what settles it", "a measurement on such a card"))
    elif figure.upper > limit:
        title = f"The {what} is {amount(figure)}, and the limit {with_mib(limit)} lies in between: undecided."
        rows.append(
            (
                "what settles it",
                f"a limit of at least {mib(figure.upper)} or below {mib(figure.bytes)}, an exact source"
                " (`vram doctor` lists them), or a test that runs alone and with fewer processes",
            )
        )
    elif figure.missed:
        within = f"which is within the limit {with_mib(limit)}, but undecided"
        title = f"The {what} is {amount(figure)}, {within}: {figure.missed}."
        rows.append(("what settles it", "a run in which nothing stops the keeper, or an exact source (`vram doctor`)"))
    else:
        title = (
            f"The {what} read is {amount(figure)}, within the limit {with_mib(limit)}, but its measurement had trouble."
        )
        rows.append(("what settles it", "a run without that trouble"))
    rows.extend(_largest(case.device, ledger))
    rows.extend(_grew(case.device, told))
    rows.extend(surroundings(closed, None if case.device == SUM else case.device, own=figure.scope == OWN))
    return block(title, rows)


def _grew(label: str, told: Beside | None) -> list[tuple[str, str]]:
    """The bucket that grew most against the estimate."""
    if told is None or told.predicted is None:
        return []
    found = grown(told.differences, None if label == SUM else label)
    if found is None:
        return [("grew", "no bucket, beyond what was predicted of it")]
    where = f" on {found.device}" if label == SUM else ""
    if found.bucket == "unattributed":
        return [("grew", f"what is beside the buffers{where}, by {mib(found.least)} ({found.meaning}): {found.text}")]
    if found.meaning == "growth":
        return [("grew", f"{found.bucket}{where}: {found.text}, which no estimate of a boot contains")]
    why = f"{found.meaning}: {found.text}"
    return [("grew", f"{found.bucket}{where}, by {mib(found.least)} against the estimate ({why})")]


def _largest(label: str, ledger: Ledger | None) -> list[tuple[str, str]]:
    if ledger is None:
        return [("largest bucket", "unknown: no backend of this test printed its buffers")]
    if label == SUM:
        sums = {bucket: sum(row.values()) for bucket, row in ledger.buckets().items() if bucket != "unattributed"}
        best = max(sums.items(), key=lambda item: item[1], default=None)
        found = None if best is None else (str(best[0]), best[1])
    else:
        largest = ledger.largest(label)
        found = None if largest is None else (str(largest[0]), largest[1])
    if found is None:
        return [("largest bucket", "unknown: the engine's log has no buffer sizes for this device")]
    rows = [("largest bucket", f"{found[0]} with {mib(found[1])}")]
    if found[0] in SETTINGS:
        rows.append(("changed by", SETTINGS[found[0]]))
    return rows
