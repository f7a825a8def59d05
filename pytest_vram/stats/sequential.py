"""Wald's sequential probability ratio test for a rate, ended at a greatest number of cases, with exact errors.

Wald's limits (1945) promise their errors only for a test without an end. Here the errors and the average number of
cases are computed exactly, going through all numbers of failures after each case, and the limits are drawn as tight
as the errors allow.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Literal, NamedTuple

Decision = Literal["passed", "failed"]

#: Limits wider than Wald's by more than a tenth cost more cases than the few runs are worth that they decide.
_LOOSEST, _TIGHTEST = 1.1, 0.5
#: Numbers of cases times numbers of failures that a walk goes through; beyond it the limits go on as they are.
_MOST_WORK = 200_000


class OperatingCharacteristic(NamedTuple):
    """What the test does where the true rate is ``p``.

    :ivar passed: probability; with ``failed`` and ``inconclusive`` 1. :ivar average: number of cases.
    """

    p: float
    passed: float
    failed: float
    inconclusive: float
    average: float


class _Ending(NamedTuple):
    """At this many cases: pass with at most ``passing`` failures, fail with at least ``failing``."""

    passing: int
    failing: int


class _Step(NamedTuple):
    """After one case: what was decided up to now, and the probabilities of the numbers of failures from ``first``."""

    passed: float
    failed: float
    first: int
    going: tuple[float, ...]


class TruncatedSprt:
    """The test of rate ``p0`` against the lower ``p1``, ended after ``most`` cases.

    :ivar alpha: probability to fail at ``p0``, at most; ``beta``: to pass at ``p1``, at most. Both hold exactly.
    :ivar scale: of Wald's limits ln((1 − β) ÷ α) and ln(β ÷ (1 − α)); the least with which both errors hold at the
        end without a doubt left; 1 where ``most`` is too small for that with one up to 1.1.
    :ivar complete: whether every run of ``most`` cases ends in a decision. Where not, some end inconclusive.

    :raises ValueError: not 0 < p1 < p0 ≤ 1, or errors that are none.
    """

    def __init__(self, p0: float, p1: float, alpha: float = 0.05, beta: float = 0.05, most: int = 400) -> None:
        if not 0 < p1 < p0 <= 1:
            raise ValueError(f"a sequential test is of a rate against a lower one over 0, not {p0!r} against {p1!r}")
        if not (0 < alpha < 0.5 and 0 < beta < 0.5):
            raise ValueError(f"errors are between 0 and 0.5, not {alpha!r} and {beta!r}")
        self.p0, self.p1, self.alpha, self.beta = p0, p1, alpha, beta
        self._right = math.log(p1 / p0)
        self._wrong = math.log((1 - p1) / (1 - p0)) if p0 < 1 else math.inf
        self._fail, self._pass = math.log((1 - beta) / alpha), math.log(beta / (1 - alpha))
        width = 2 + (self._fail - self._pass) / (self._wrong - self._right)
        self.most = max(1, min(most, int(_MOST_WORK / width)))
        self.scale = 1.0
        self._endings: list[_Ending] = []
        self._fit()

    def log_likelihood_ratio(self, right: float, n: float) -> float:
        """Of ``p1`` to ``p0``; counts may be real, divided by a design effect."""
        wrong = n - right
        return right * self._right + (wrong * self._wrong if wrong > 0 else 0.0)

    def decide(self, right: float, n: float) -> Decision | None:
        """The decision after ``n`` cases, ``None``: go on."""
        ratio = self.log_likelihood_ratio(right, n)
        if ratio >= self._fail * self.scale:
            return "failed"
        return "passed" if ratio <= self._pass * self.scale else None

    def final(self, right: float, n: float) -> Decision | None:
        """The decision where ``n`` cases are all there are, ``None``: inconclusive."""
        early = self.decide(right, n)
        whole = min(int(n + 1e-9), self.most)
        if early is not None or whole < 1:
            return early
        ending = self._endings[whole]
        wrong = (n - right) * whole / n
        if wrong >= ending.failing - 1e-9:
            return "failed"
        return "passed" if wrong <= ending.passing + 1e-9 else None

    def operating_characteristic(self, p: float) -> OperatingCharacteristic:
        """What the test does where the true rate is ``p``, exactly."""
        steps = self._walk(p)
        average = sum(sum(step.going) for step in steps[:-1])  # a case is asked whenever there was no decision before
        end, ending = steps[-1], self._endings[self.most]
        passed = end.passed + sum(w for f, w in enumerate(end.going, end.first) if f <= ending.passing)
        failed = end.failed + sum(w for f, w in enumerate(end.going, end.first) if f >= ending.failing)
        return OperatingCharacteristic(p, passed, failed, max(0.0, 1 - passed - failed), average)

    def least_to_pass(self) -> int:
        """After how many cases a run without a failure passes."""
        return min(self.most, math.ceil(self._pass * self.scale / self._right - 1e-12))

    def _fit(self) -> None:
        """Find the tightest limits with which both errors hold at the end."""
        if self._complete(1.0):
            loose, tight = 1.0, _TIGHTEST
        elif self._complete(_LOOSEST):
            loose, tight = _LOOSEST, 1.0
        else:
            self._complete(1.0)
            self.complete = False
            return
        for _ in range(12):
            middle = (loose + tight) / 2
            if self._complete(middle):
                loose = middle
            else:
                tight = middle
        self.complete = self._complete(loose)

    def _complete(self, scale: float) -> bool:
        """Take limits of this scale, and say whether they leave no doubt at the end and keep both errors."""
        self.scale = scale
        at_p0, at_p1 = self._walk(self.p0), self._walk(self.p1)
        self._endings = [self._ending(high, low) for high, low in zip(at_p0, at_p1, strict=True)]
        ending = self._endings[self.most]
        kept = at_p0[-1].failed <= self.alpha and at_p1[-1].passed <= self.beta
        return kept and ending.failing <= ending.passing + 1

    def _ending(self, at_p0: _Step, at_p1: _Step) -> _Ending:
        """The numbers of failures that decide where a step is the last one, so that the errors hold."""
        first, last = at_p0.first, at_p0.first + len(at_p0.going) - 1
        error, failing = at_p0.failed, last + 1
        while failing > first and error + at_p0.going[failing - 1 - first] <= self.alpha:
            failing -= 1
            error += at_p0.going[failing - first]
        error, passing = at_p1.passed, first - 1
        while passing < last and error + at_p1.going[passing + 1 - first] <= self.beta:
            passing += 1
            error += at_p1.going[passing - first]
        if failing <= passing:  # both errors leave room: the middle of it
            failing = (failing + passing + 2) // 2
            passing = failing - 1
        return _Ending(passing, failing)

    def _walk(self, p: float) -> list[_Step]:
        """After each number of cases: the probability of each decision so far, and of each number of failures."""
        q = 1 - p
        passed = failed = 0.0
        first, going = 0, [1.0]
        steps = [_Step(0.0, 0.0, 0, (1.0,))]
        for n in range(1, self.most + 1):
            following = [0.0] * (len(going) + 1)
            for index, weight in enumerate(going):
                following[index] += weight * p
                following[index + 1] += weight * q
            # Decisions lie at the ends: few failures pass, many fail.
            start, stop = 0, len(following)
            while start < stop and self.decide(n - first - start, n) == "passed":
                passed += following[start]
                start += 1
            while stop > start and self.decide(n - first - stop + 1, n) == "failed":
                stop -= 1
                failed += following[stop]
            first, going = first + start, following[start:stop]
            steps.append(_Step(passed, failed, first, tuple(going)))
        return steps


@lru_cache(maxsize=64)
def sprt(p0: float, p1: float, alpha: float = 0.05, beta: float = 0.05, most: int = 400) -> TruncatedSprt:
    """The truncated test of these figures, computed once."""
    return TruncatedSprt(p0, p1, alpha, beta, most)


def average_sample_number(
    p: float, p0: float, p1: float, alpha: float = 0.05, beta: float = 0.05, most: int = 400
) -> float:
    """How many cases the truncated test asks on average where the true rate is ``p``."""
    return sprt(p0, p1, alpha, beta, most).operating_characteristic(p).average
