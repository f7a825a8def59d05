"""Deciding while cases are asked: the sequential test of a target, with families respected."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from pytest_vram.stats import ClusterTally, TruncatedSprt, sprt
from pytest_vram.toolcalls.counting import design_effect
from pytest_vram.toolcalls.results import CaseResult
from pytest_vram.toolcalls.verdict_terms import COMPLETION, Judge


class SequentialTest:
    """Wald's test of ``target`` against ``target - margin``, fed with one case after another.

    Cases are asked one of each family first, which are independent. From the second of a family on, counts are
    divided by the design effect that was estimated so far, and so is the number of cases at the end.
    """

    def __init__(self, target: float, margin: float, confidence: float, most: int) -> None:
        error = 1 - confidence
        self.test: TruncatedSprt = sprt(target, target - margin, error, error, most)
        self.confidence = confidence
        self.counts = ClusterTally()
        self.decision: Literal["passed", "failed"] | None = None
        self.decided_after = 0

    def add(self, family: str, right: bool) -> Literal["passed", "failed"] | None:
        """Count a case; the decision, which does not change once it is made."""
        if self.decision is None:
            self.counts.add(family, 1.0 if right else 0.0)
            k, n = self._effective()
            self.decision = self.test.decide(k, n)
            self.decided_after = self.counts.n
        return self.decision

    def final(self) -> Literal["passed", "failed"] | None:
        """The decision where no further case will come; ``None``: inconclusive."""
        if self.decision is None and self.counts.n:
            k, n = self._effective()
            return self.test.final(k, n)
        return self.decision

    def _effective(self) -> tuple[float, float]:
        effect = design_effect(self.counts, self.confidence)
        return self.counts.total / effect, self.counts.n / effect


def sequential(
    target: float, margin: float, confidence: float, most: int, judge: Judge = "first_try"
) -> Callable[[Sequence[CaseResult]], str | None]:
    """What ``evaluate`` asks after each case: why no more are needed, or ``None``.

    It looks only at what was added since it was asked last, and goes on where fewer than 95 % of the cases so far have
    an answer, since there would be no verdict. :param most: how many cases there are.
    """
    test = SequentialTest(target, margin, confidence, most)
    seen = lost = 0

    def enough(results: Sequence[CaseResult]) -> str | None:
        nonlocal test, seen, lost
        if len(results) < seen:  # another run
            test, seen, lost = SequentialTest(target, margin, confidence, most), 0, 0
        for index in range(seen, len(results)):
            result = results[index]
            answer = result.judged(judge)
            if "infrastructure" in (result.first.outcome, answer.outcome):
                lost += 1
            else:
                test.add(result.family, answer.outcome == "right")
        seen = len(results)
        if test.decision is None or seen - lost < COMPLETION * seen:
            return None
        return f"the sequential test {test.decision} after {test.decided_after} of {most} cases"

    return enough
