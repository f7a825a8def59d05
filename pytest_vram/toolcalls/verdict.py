"""Whether a rate of right tool calls holds: four modes, a paired comparison, and when there is no verdict.

The cases of a family succeed and fail together. Where families have several cases, counts are divided by the design
effect before exact bounds are taken (:mod:`pytest_vram.toolcalls.counting`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from pytest_vram.stats import (
    critical_count,
    detectable_drop,
    false_alarm_of_point_rule,
    fixed_sample_size,
    least_count_of_point_rule,
    more_without_failure,
)
from pytest_vram.toolcalls import contexts
from pytest_vram.toolcalls.counting import Sample, answered, percent, percent_range, points, sample, troubles
from pytest_vram.toolcalls.paired import Paired, compare
from pytest_vram.toolcalls.results import CaseResult, Results
from pytest_vram.toolcalls.sequential import SequentialTest, sequential
from pytest_vram.toolcalls.verdict_terms import ASSUMED_ICC, COMPLETION, FEW, JUDGES, MODES, Judge, Mode, problem

__all__ = [
    "COMPLETION",
    "JUDGES",
    "MODES",
    "Judge",
    "Mode",
    "Paired",
    "Verdict",
    "compare",
    "judge",
    "problem",
    "sequential",
]

#: A drop that takes more than this to be found is no realistic regression: there are too few cases.
REALISTIC_DROP = 0.10
_GRAVITY = {"passed": 0, "inconclusive": 1, "failed": 2, "error": 3}

Outcome = Literal["passed", "failed", "inconclusive", "error"]


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What the cases say about a target.

    :ivar outcome: ``error``: refused, fewer than 95 % of the cases have an answer. With a baseline the graver of the
        target's and the comparison's. :ivar right: of ``n`` cases.
    :ivar low: one-sided Clopper–Pearson bounds at ``confidence`` on n ÷ design effect, with ``high``.
    :ivar wilson: two-sided interval for display. :ivar design_effect: 1 where the cases of a family are independent.
    :ivar detectable: the drop below the target, as a share, that this n detects with 80 % power; ``None``: none.
    :ivar false_alarm: mode ``point``: how often a deployment that is truly at the target fails this rule.
    :ivar other_rate: of the answers that are not judged: after a retry, or of the first try.
    :ivar decided_after: mode ``sprt``: the number of answers that decided; ``None``: the end was reached.
    :ivar text: sentences for a person, about the target; those about a baseline are ``paired.text``.
    :ivar warnings: such as too few cases to fail anything realistic.
    """

    outcome: Outcome
    mode: Mode
    judge: Judge
    target: float
    confidence: float
    right: int
    n: int
    families: int
    rate: float | None
    completion: float
    planned: int
    low: float | None = None
    high: float | None = None
    wilson: tuple[float, float] | None = None
    design_effect: float = 1.0
    detectable: float | None = None
    false_alarm: float | None = None
    other_rate: float | None = None
    decided_after: int | None = None
    paired: Paired | None = None
    text: str = ""
    warnings: list[str] = []


def judge(
    results: Results,
    *,
    target: float,
    mode: Mode = "not_below",
    confidence: float = 0.95,
    margin: float = 0.05,
    judge: Judge = "first_try",
    baseline: Results | None = None,
    repeated: Results | None = None,
) -> Verdict:
    """Hold results against a target.

    :param target: a share over 0 and up to 1. :param confidence: of a one-sided bound.
    :param margin: the drop that ``sprt`` and a comparison with ``baseline`` are about, as a share.
    :param repeated: the baseline asked a second time (an A/A pair): what changes without any change.
    :raises ValueError: arguments that make no sense (:func:`problem` says so beforehand).
    :raises BadCases: a baseline of other cases.
    """
    wrong = problem(
        target=target, mode=mode, confidence=confidence, margin=margin, judge=judge, compared=baseline is not None
    )
    if wrong is not None:
        raise ValueError(wrong)
    paired = None
    if baseline is not None:
        paired = compare(results, baseline, judge=judge, confidence=confidence, margin=margin, repeated=repeated)
    counted = answered(results.results, judge)
    due = results.due
    common: dict[str, Any] = {
        "mode": mode,
        "judge": judge,
        "target": target,
        "confidence": confidence,
        "completion": len(counted) / due if due else 0.0,
        "planned": results.planned,
        "paired": paired,
    }
    if not counted or len(counted) < COMPLETION * due:
        right = sum(result.judged(judge).outcome == "right" for result in counted)
        return Verdict(
            outcome="error",
            right=right,
            n=len(counted),
            families=len({result.family for result in counted}),
            rate=right / len(counted) if counted else None,
            text=_refused(results, len(counted), judge),
            **common,
        )
    found = sample(counted, judge, confidence)
    decided = _decided(found, counted, results, target, mode, confidence, margin, judge)
    outcome = decided.outcome
    if paired is not None and _GRAVITY[paired.outcome] > _GRAVITY[outcome]:
        outcome = paired.outcome
    other = "after_retry" if judge == "first_try" else "first_try"
    others = answered(results.results, other)
    return Verdict(
        outcome=outcome,
        right=found.right,
        n=found.n,
        families=found.families,
        rate=found.rate,
        low=_proof(found, counted, judge, confidence).lower(confidence),
        high=found.upper(confidence),
        wilson=found.wilson(confidence),
        design_effect=found.design_effect,
        detectable=detectable_drop(found.n, target, confidence, design_effect=found.design_effect),
        false_alarm=decided.false_alarm,
        other_rate=sum(result.judged(other).outcome == "right" for result in others) / len(others) if others else None,
        decided_after=decided.decided_after,
        text=f"{_begin(found, target, confidence, judge)}{decided.text}{_together(decided.counted or found)}",
        warnings=[*decided.warnings, *_unjudged(results, judge)],
        **common,
    )


def _unjudged(results: Results, judge: Judge) -> list[str]:
    """What to say of cases that were too long, where there are few enough for a verdict."""
    needed = contexts.needed(results, judge)
    if needed is None:
        return []
    count = len(contexts.unfit(results.results, judge))
    are = "case is longer than the context and is" if count == 1 else "cases are longer than the context and are"
    return [f"{count} {are} not judged: {needed}."]


class _Decided(NamedTuple):
    """What one mode makes of the answers."""

    outcome: Outcome
    text: str
    warnings: tuple[str, ...] = ()
    false_alarm: float | None = None
    decided_after: int | None = None
    counted: Sample | None = None  #: what the bound was computed from, where it is not the sample itself


def _decided(
    found: Sample,
    counted: Sequence[CaseResult],
    results: Results,
    target: float,
    mode: Mode,
    confidence: float,
    margin: float,
    judge: Judge,
) -> _Decided:
    if mode == "not_below":
        return _not_below(found, target, confidence)
    if mode == "proven":
        return _proven(found, _proof(found, counted, judge, confidence), target, confidence)
    if mode == "sprt":
        return _sprt(counted, results, target, confidence, margin, judge)
    return _point(found, target, confidence)


def _not_below(found: Sample, target: float, confidence: float) -> _Decided:
    """Failed where the target is out of reach of the upper bound, inconclusive where it never can be."""
    high = found.upper(confidence)
    if high < target:
        most = percent(high, beside=target)
        text = f"below it: at {percent(confidence)} confidence the true rate is at most {most}."
        return _Decided("failed", text)
    critical = critical_count(found.n, target, confidence, design_effect=found.design_effect)
    if critical < 0:
        return _Decided("inconclusive", "so few cases can fail nothing, not even with none of them right.")
    detectable = detectable_drop(found.n, target, confidence, design_effect=found.design_effect)
    chance = " (the difference is within chance)" if found.rate < target else ""
    text = f"not shown to be below it{chance}."
    if detectable is not None:
        text += f" A drop of {points(detectable)} would be found 8 times of 10."
    if detectable is not None and detectable <= REALISTIC_DROP:
        return _Decided("passed", text)
    worth = f"{found.n} cases" if found.design_effect < 1.05 else f"{found.n} cases, worth {found.worth},"
    drop = "no drop" if detectable is None else f"only a drop of {points(detectable)}"
    warning = (
        f"{worth} are too few to hold {percent(target)}: only {critical} right of {found.n} "
        f"({percent(critical / found.n)}) or fewer fail, and {drop} would be found 8 times of 10. Ask more cases of "
        "more families."
    )
    return _Decided("passed", text, (warning,))


def _proof(found: Sample, counted: Sequence[CaseResult], judge: Judge, confidence: float) -> Sample:
    """The sample as a proof may count it: where failures are few, families are assumed to fail together somewhat."""
    if found.n - found.right >= FEW:
        return found
    return sample(counted, judge, confidence, few=True)


def _proven(found: Sample, proof: Sample, target: float, confidence: float) -> _Decided:
    """Passed where the lower bound reaches the target, failed where the upper bound does not."""
    low, high = proof.lower(confidence), found.upper(confidence)
    if low >= target:
        text = f"proven: at {percent(confidence)} confidence the true rate is at least {percent(low)}."
        return _Decided("passed", text, counted=proof)
    if high < target:
        most = percent(high, beside=target)
        text = f"refuted: at {percent(confidence)} confidence the true rate is at most {most}."
        return _Decided("failed", text)
    text = f"neither proven nor refuted: the true rate may be as low as {percent(low, beside=target)}."
    more = more_without_failure(found.right, found.n, target, confidence, design_effect=proof.design_effect)
    if more is None:
        return _Decided("inconclusive", f"{text} No number of cases proves {percent(target)}.", counted=proof)
    cases = "case" if more == 1 else "cases"
    return _Decided(
        "inconclusive", f"{text} It would take {more} more {cases} without a failure to prove it.", counted=proof
    )


def _sprt(
    counted: Sequence[CaseResult],
    results: Results,
    target: float,
    confidence: float,
    margin: float,
    judge: Judge,
) -> _Decided:
    """The sequential test, in the order in which the cases were asked."""
    test = SequentialTest(target, margin, confidence, max(results.planned, len(counted)))
    for result in counted:
        if test.add(result.family, result.judged(judge).outcome == "right") is not None:
            break
    decision = test.final()
    lower = percent(target - margin)
    if test.decision is not None:
        when = f"decided after {test.decided_after} of {test.test.most} cases"
    else:
        when = f"decided with the last of {len(counted)} cases"
    after = None if test.decision is None else test.decided_after
    if decision == "passed":
        text = f"not below it, in a sequential test against {lower} ({when})."
        return _Decided("passed", text, decided_after=after)
    if decision == "failed":
        return _Decided("failed", f"below it, in a sequential test against {lower} ({when}).", decided_after=after)
    fixed = fixed_sample_size(target, target - margin, 1 - confidence, 1 - confidence)
    text = (
        f"the sequential test cannot tell it from {lower} with {len(counted)} cases; {fixed} independent ones are "
        "enough for a test without an early end."
    )
    return _Decided("inconclusive", text)


def _point(found: Sample, target: float, confidence: float) -> _Decided:
    """The literal rule: as many right as the target says."""
    false_alarm = false_alarm_of_point_rule(found.n, target)
    needed = least_count_of_point_rule(found.n, target)
    held = found.right >= needed
    text = (
        f"{needed} right are needed. This rule fails a deployment that is truly at {percent(target)} "
        f"{percent(false_alarm)} of the time; mode not_below does so in at most {percent(1 - confidence)}."
    )
    return _Decided("passed" if held else "failed", text, false_alarm=false_alarm)


def _begin(found: Sample, target: float, confidence: float, judge: Judge) -> str:
    low, high = found.wilson(confidence)
    when = " after a retry" if judge == "after_retry" else ""
    return (
        f"{found.right} of {found.n} right{when} ({percent(found.rate, beside=target)}, {percent(confidence)} interval "
        f"{percent_range(low, high)}); target {percent(target)}: "
    )


def _together(found: Sample) -> str:
    """What families make of the number of cases."""
    if found.families == 1 and found.n > 1:
        return f" All {found.n} cases are of one family and count as one."
    if found.design_effect < 1.05:
        return ""
    why = (
        f", with a correlation of {ASSUMED_ICC:g} that is assumed where fewer than {FEW} are wrong"
        if found.assumed
        else ""
    )
    return (
        f" Cases of a family are not independent: {found.n} of {found.families} families count as {found.worth}{why}."
    )


def _refused(results: Results, counted: int, judge: Judge) -> str:
    asked = len(results.results)
    if not asked:
        return "No case was asked: there is nothing to judge."
    due = results.due
    lost, unasked = due - counted, due - asked
    have = "has" if lost == 1 else "have"
    why = troubles(results.results, judge)
    if unasked:
        why = ", ".join(part for part in (why, f"not asked ({unasked})") if part)
        if results.stopped:
            why += f", since {results.stopped}" if unasked == lost else f"; {results.stopped}"
    return (
        f"{lost} of {due} cases {have} no answer that can be judged: {why}. "
        f"{percent(counted / due, beside=COMPLETION)} were answered, and a verdict takes {percent(COMPLETION)}: "
        f"{_remedy(results, judge, lost)}."
    )


def _remedy(results: Results, judge: Judge, lost: int) -> str:
    """What to do about answers that are missing."""
    needed = contexts.needed(results, judge)
    if needed is None:
        return "see to the server, and ask again"
    others = lost > len(contexts.unfit(results.results, judge))
    return f"{needed}{'. See to the server, too' if others else ''}, and ask again"
