"""Two deployments on the same cases: which answers changed, and whether the rate did."""

from __future__ import annotations

from typing import Literal

import msgspec

from pytest_vram.errors import BadCases
from pytest_vram.stats import (
    ClusterTally,
    cluster_robust_interval,
    mcnemar_exact,
    normal_quantile,
    pairs_needed,
    tango_bound,
)
from pytest_vram.toolcalls.counting import answered, design_effect, percent, points
from pytest_vram.toolcalls.results import Results
from pytest_vram.toolcalls.verdict_terms import COMPLETION, FEW, Judge

#: Lost cases that are listed, and won ones.
LISTED = 100


class Paired(msgspec.Struct, frozen=True, kw_only=True):
    """Two deployments on the same cases.

    :ivar baseline: name. :ivar pairs: cases that both answered. :ivar lost: right before and wrong now; ``won``: the
        other way round. :ivar difference: rate now minus rate before, as a share, with one-sided bounds ``low`` and
        ``high``: the wider of Tango's on n ÷ design effect and of those from the variance
        between families.
    :ivar lost_ids: the lost cases, the first hundred of them; ``won_ids`` the won ones.
    :ivar p_value: McNemar's exact test, for display.
    :ivar outcome: ``passed`` (not worse by more than the margin), ``failed`` (significantly worse, and by more than the
        margin), ``inconclusive``.
    """

    baseline: str
    margin: float
    pairs: int
    lost: int
    won: int
    difference: float
    low: float
    high: float
    p_value: float
    outcome: Literal["passed", "failed", "inconclusive"]
    text: str
    lost_ids: list[str] = []
    won_ids: list[str] = []
    families_lost: int = 0
    families_won: int = 0
    design_effect: float = 1.0
    notes: list[str] = []


def compare(
    results: Results,
    baseline: Results,
    *,
    judge: Judge,
    confidence: float = 0.95,
    margin: float = 0.05,
    repeated: Results | None = None,
) -> Paired:
    """Compare with earlier results, or with another backend's, on the cases that both answered.

    :param confidence: of each bound alone. :param repeated: the baseline asked a second time.
    :raises BadCases: they are results of other cases.
    """
    for other in (baseline, repeated):
        if other is not None and other.digest != results.digest:
            raise BadCases(
                f"The results of {results.backend} are of the cases {results.cases} (digest {results.digest}), those "
                f"of {other.backend} of {other.cases} (digest {other.digest}): they cannot be compared case by case. "
                "Run both on the same cases."
            )
    changes = _changes(results, baseline, judge)
    notes = _differences(results, baseline, judge)
    notes += _left_out(results, baseline, changes.n, judge)
    thin = [
        f"only {percent(share, beside=COMPLETION)} of the cases of {side.backend} have an answer"
        for side in (results, baseline)
        if (share := len(answered(side.results, judge)) / max(1, side.due)) < COMPLETION
    ]
    if not changes.n:
        return _none(baseline.backend, margin, notes)
    lost, won = changes.lost, changes.won
    n = changes.n
    difference = (won - lost) / n
    effect = design_effect(changes.counts, confidence, few=lost + won < FEW)
    z = normal_quantile(confidence)
    scaled = (lost / effect, won / effect, n / effect)
    low, high = tango_bound(*scaled, z), tango_bound(*scaled, -z)
    if 1 < changes.counts.clusters < n:
        robust = cluster_robust_interval(changes.counts.pairs, confidence)
        low, high = min(low, robust[0]), max(high, robust[1])
    outcome: Literal["passed", "failed", "inconclusive"]
    if thin:
        outcome = "inconclusive"
    elif low > -margin:
        outcome = "passed"
    else:
        outcome = "failed" if high < 0 and difference < -margin else "inconclusive"
    if repeated is not None:
        notes += _floor(baseline, repeated, changes, judge, significant=high < 0 or low > 0)
    sums = list(changes.counts.sums.values())
    return Paired(
        baseline=baseline.backend,
        margin=margin,
        pairs=n,
        lost=lost,
        won=won,
        difference=difference,
        low=low,
        high=high,
        p_value=mcnemar_exact(lost, won),
        outcome=outcome,
        text=_text(baseline.backend, changes, low, high, outcome, margin, confidence, effect, thin),
        lost_ids=changes.lost_ids[:LISTED],
        won_ids=changes.won_ids[:LISTED],
        families_lost=sum(value < 0 for value in sums),
        families_won=sum(value > 0 for value in sums),
        design_effect=effect,
        notes=notes,
    )


class _Changes:
    """Pairs of answers to the same cases: +1 won, -1 lost, 0 as before, by family."""

    def __init__(self) -> None:
        self.counts = ClusterTally()
        self.lost = self.won = 0
        self.lost_ids: list[str] = []
        self.won_ids: list[str] = []

    @property
    def n(self) -> int:
        return self.counts.n

    @property
    def discordance(self) -> float:
        return (self.lost + self.won) / self.n if self.n else 0.0


def _changes(results: Results, baseline: Results, judge: Judge) -> _Changes:
    before = {result.id: result.judged(judge).outcome == "right" for result in answered(baseline.results, judge)}
    changes = _Changes()
    for result in answered(results.results, judge):
        if result.id in before:
            change = (result.judged(judge).outcome == "right") - before[result.id]
            changes.counts.add(result.family, float(change))
            changes.lost += change < 0
            if change:
                (changes.lost_ids if change < 0 else changes.won_ids).append(result.id)
            changes.won += change > 0
    return changes


def _none(baseline: str, margin: float, notes: list[str]) -> Paired:
    return Paired(
        baseline=baseline,
        margin=margin,
        pairs=0,
        lost=0,
        won=0,
        difference=0.0,
        low=-1.0,
        high=1.0,
        p_value=1.0,
        outcome="inconclusive",
        text=f"Compared with {baseline}: no case was answered by both.",
        notes=notes,
    )


def _text(
    baseline: str,
    changes: _Changes,
    low: float,
    high: float,
    outcome: str,
    margin: float,
    confidence: float,
    effect: float,
    thin: list[str],
) -> str:
    n, difference = changes.n, (changes.won - changes.lost) / changes.n
    begin = (
        f"Compared with {baseline} on {n} cases: {changes.lost} were right before and are wrong now, {changes.won} the "
        f"other way round: {100 * difference:+.1f} points (at {percent(confidence)} confidence no less than "
        f"{100 * low:+.1f} and no more than {100 * high:+.1f})"
    )
    if thin:
        return f"{begin}; no verdict, since {' and '.join(thin)}."
    if outcome == "passed":
        return f"{begin}: not worse by more than {points(margin)}."
    if outcome == "failed":
        return f"{begin}: worse, and by more than {points(margin)}."
    worse = "worse, but maybe by less than" if high < 0 else "it may or may not be worse by more than"
    return f"{begin}: {worse} {points(margin)}. {_needed(changes, margin, confidence, effect)}"


def _needed(changes: _Changes, margin: float, confidence: float, effect: float) -> str:
    """How many pairs would decide."""
    n, discordance = changes.n, changes.discordance
    needed = pairs_needed(discordance, margin, confidence)
    if needed is not None and needed * effect > n:
        return (
            f"With {percent(discordance)} of the answers changed, about {round(needed * effect)} cases show that "
            "nothing was lost, if so it is."
        )
    difference = (changes.won - changes.lost) / n
    needed = pairs_needed(discordance, margin, confidence, difference=min(0.0, difference))
    if needed is None:
        return "The difference that was measured is beyond the margin: more cases would rather show a loss."
    return f"If the difference is the one measured, about {round(max(needed * effect, n + 1))} cases show it."


def _differences(results: Results, baseline: Results, judge: Judge) -> list[str]:
    """What else differs between two results beside the deployment."""
    notes = []
    if results.protocol != baseline.protocol:
        notes.append(f"the protocol is {results.protocol}, and was {baseline.protocol}")
    if results.stream != baseline.stream:
        words = {True: "streamed", False: "not streamed"}
        notes.append(f"answers are {words[results.stream]}, and were {words[baseline.stream]}")
    for key in sorted(results.sampling.keys() | baseline.sampling.keys()):
        now, then = results.sampling.get(key), baseline.sampling.get(key)
        if now != then:
            notes.append(f"sampling: {key} is {now!r}, and was {then!r}")
    if judge == "after_retry" and results.retries != baseline.retries:
        notes.append(f"{results.retries} retries are allowed, and were {baseline.retries}")
    if results.stopped or baseline.stopped:
        names = [side.backend for side in (results, baseline) if side.stopped]
        notes.append(f"asking {' and '.join(names)} stopped early: only cases that both were asked are compared")
    return notes


def _left_out(results: Results, baseline: Results, pairs: int, judge: Judge) -> list[str]:
    """Cases that only one of the two answered."""
    notes = []
    for side, other in ((results, baseline), (baseline, results)):
        n = len(answered(side.results, judge))
        if pairs < n:
            asked = {result.id for result in other.results}
            missing = sum(result.id not in asked for result in side.results)
            why = " (another seed or limit, or it stopped early)" if missing else ""
            notes.append(
                f"{pairs} of the {n} cases that {side.backend} answered are compared: {other.backend} has no answer to "
                f"the others{why}"
            )
    return notes


def _floor(baseline: Results, repeated: Results, changes: _Changes, judge: Judge, *, significant: bool) -> list[str]:
    """How many answers change without any change, beside those that changed with it."""
    again = _changes(repeated, baseline, judge)
    if not again.n:
        return [f"{baseline.backend} was asked twice, and no case was answered both times"]
    note = (
        f"asked twice, {baseline.backend} itself changed {again.lost + again.won} of {again.n} answers "
        f"({percent(again.discordance)}); in the comparison {changes.lost + changes.won} of {changes.n} changed "
        f"({percent(changes.discordance)})"
    )
    if again.discordance >= changes.discordance and changes.discordance > 0 and not significant:
        note += ": as many change without any change, so that these are not the setting's"
    return [note]
