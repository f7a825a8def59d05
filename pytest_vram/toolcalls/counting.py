"""What answers count, and how many independent ones they are worth: the cases of a family go together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from pytest_vram.stats import ClusterTally, clopper_pearson, korn_graubard_factor, wilson
from pytest_vram.text import printable
from pytest_vram.toolcalls.results import Answer, CaseResult
from pytest_vram.toolcalls.verdict_terms import ASSUMED_ICC


def answered(results: Iterable[CaseResult], judge: str) -> list[CaseResult]:
    """The cases whose answer of this turn can be judged: neither it nor the first was lost to infrastructure."""
    return [
        result
        for result in results
        if result.first.outcome != "infrastructure" and result.judged(judge).outcome != "infrastructure"
    ]


def tally(results: Iterable[CaseResult], judge: str) -> ClusterTally:
    """Right answers by family."""
    counts = ClusterTally()
    for result in results:
        counts.add(result.family, 1.0 if result.judged(judge).outcome == "right" else 0.0)
    return counts


def design_effect(counts: ClusterTally, confidence: float, *, few: bool = False) -> float:
    """What the number of cases is divided by; 1 where each family has one case.

    Kish's design effect with the estimated intraclass correlation, times Korn and Graubard's factor for the number of
    families; at most the number of cases.

    :param few: there are too few failures to estimate a correlation from: at least ``ASSUMED_ICC`` is taken.
    """
    if counts.n == counts.clusters:
        return 1.0
    effect = counts.design_effect(least_icc=ASSUMED_ICC if few else 0.0)
    return min(float(counts.n), effect * korn_graubard_factor(counts.clusters, counts.n, confidence))


class Sample(NamedTuple):
    """Right answers of ``n``, and what they are worth.

    :ivar assumed: some correlation within families was assumed, since too few are wrong to estimate one.
    """

    right: int
    n: int
    families: int
    design_effect: float
    assumed: bool = False

    @property
    def rate(self) -> float:
        """Share of right answers."""
        return self.right / self.n

    @property
    def worth(self) -> int:
        """How many independent cases these are worth."""
        return max(1, round(self.n / self.design_effect))

    def lower(self, confidence: float) -> float:
        """The exact one-sided lower bound of the rate."""
        return clopper_pearson(self.right / self.design_effect, self.n / self.design_effect, confidence, "lower")[0]

    def upper(self, confidence: float) -> float:
        """The exact one-sided upper bound of the rate."""
        return clopper_pearson(self.right / self.design_effect, self.n / self.design_effect, confidence, "upper")[1]

    def wilson(self, confidence: float) -> tuple[float, float]:
        """The interval for display."""
        return wilson(self.right / self.design_effect, self.n / self.design_effect, confidence)


def sample(results: Sequence[CaseResult], judge: str, confidence: float, *, few: bool = False) -> Sample:
    """Count answers that can be judged; there must be one."""
    counts = tally(results, judge)
    return Sample(
        right=round(counts.total),
        n=counts.n,
        families=counts.clusters,
        design_effect=design_effect(counts, confidence, few=few),
        assumed=few,
    )


def troubles(results: Iterable[CaseResult], judge: str) -> str:
    """What became of the cases without an answer, the most frequent first: ``HTTP 429 (20), timed out (3)``."""
    found: Counter[str] = Counter()
    for result in results:
        for answer in (result.first, result.judged(judge)):
            if answer.outcome == "infrastructure":
                found[_trouble(answer)] += 1
                break
    shown = [f"{name} ({count})" for name, count in found.most_common(3)]
    rest = sum(found.values()) - sum(count for _, count in found.most_common(3))
    return ", ".join([*shown, f"other ({rest})"] if rest else shown)


def _trouble(answer: Answer) -> str:
    if answer.unfit:
        return "longer than the context"
    if answer.status is not None and answer.status >= 400:
        return f"HTTP {answer.status}"
    # Where a server's log is stands in each answer's detail.
    first = printable(answer.detail.strip().split("\n", 1)[0]).partition("; its log is ")[0].rstrip(".")
    return (first[:159] + "…" if len(first) > 160 else first) or "no answer"


def percent(share: float, *, beside: float | None = None) -> str:
    """``94 %`` or ``90.3 %``; with more digits where it would else be the same as another share ``beside`` it."""
    digits = 1
    if beside is not None and share != beside:
        while digits < 9 and _figure(share, digits) == _figure(beside, digits):
            digits += 1
    return f"{_figure(share, digits)} %"


def points(share: float) -> str:
    """A difference of rates in points: ``5 points``, ``-4.7 points``."""
    figure = _figure(share)
    return f"{figure} point{'' if figure in ('1', '-1') else 's'}"


def percent_range(low: float, high: float) -> str:
    """``86.5–93.2 %``."""
    return f"{100 * low:.1f}–{100 * high:.1f} %"


def _figure(share: float, digits: int = 1) -> str:
    # A rate that was measured needs no more than one digit.
    figure = f"{100 * share:.{digits}f}".rstrip("0").removesuffix(".")
    return "0" if figure == "-0" else figure
