"""Two deployments on the same cases: what changed, and whether the rate did."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from pytest_vram.errors import BadCases
from pytest_vram.toolcalls.results import Results
from pytest_vram.toolcalls.verdict import Paired, compare, judge
from tests.unit.test_toolcalls_verdict import BUSY, RIGHT, WRONG, made


def changed(n: int, lost: int, won: int, *, wrong: int = 0, per_family: int = 1, **now: Any) -> tuple[Results, Results]:
    """Results now and before: ``lost`` pairs first, then ``won``, then ``wrong`` ones of both, the rest right."""
    rest = n - lost - won - wrong
    before = [RIGHT] * lost + [WRONG] * (won + wrong) + [RIGHT] * rest
    after = [WRONG] * lost + [RIGHT] * won + [WRONG] * wrong + [RIGHT] * rest
    return made(after, per_family=per_family, backend="q4", **now), made(before, per_family=per_family, backend="f16")


def paired(n: int, lost: int, won: int, **more: Any) -> Paired:
    """Their comparison."""
    return compare(*changed(n, lost, won, **more), judge="first_try")


def test_non_inferiority_is_shown_or_not() -> None:
    """300 cases, 4 % changed both ways: not worse by 5 points; 27 lost: worse; between, nothing is shown."""
    assert paired(300, 6, 6).outcome == "passed"
    assert paired(300, 27, 0).outcome == "failed"
    assert paired(300, 12, 3).outcome == "inconclusive"
    assert paired(300, 0, 30).outcome == "passed"


def test_nothing_changed_still_takes_cases() -> None:
    """52 pairs without a change show 5 points, 51 do not."""
    assert paired(52, 0, 0).outcome == "passed"
    few = paired(51, 0, 0)
    assert few.outcome == "inconclusive"
    assert "about 52 cases" in few.text


def test_figures_and_words_of_a_comparison() -> None:
    """Counts, difference with its bounds, McNemar's p, families, a sentence."""
    found = paired(300, 20, 4, per_family=3, wrong=10)
    assert (found.baseline, found.pairs, found.lost, found.won, found.margin) == ("f16", 300, 20, 4, 0.05)
    assert found.difference == pytest.approx(-16 / 300)
    assert found.low < found.difference < found.high < 0
    assert found.p_value == pytest.approx(0.00154, abs=1e-5)
    # Cases 0 to 19 were lost and 20 to 23 won: of the family of 18 to 20 two were lost and one was won.
    assert (found.families_lost, found.families_won) == (7, 1)
    assert found.text.startswith(
        "Compared with f16 on 300 cases: 20 were right before and are wrong now, 4 the other way round: -5.3 points"
    )


def test_worse_by_less_than_the_margin_is_no_failure() -> None:
    """Significant, and the difference is 4 points: neither failed nor passed."""
    found = paired(300, 12, 0)
    assert found.high < 0
    assert found.outcome == "inconclusive"
    assert "worse, but maybe by less than 5 points" in found.text


def test_families_widen_the_interval() -> None:
    """12 losses of one family of 12 say less than 12 of as many."""
    alone, together = paired(300, 12, 0), paired(300, 12, 0, per_family=12)
    assert together.design_effect > 3
    assert together.low < alone.low
    assert together.high > alone.high
    assert (alone.families_lost, together.families_lost) == (12, 1)


def test_one_large_family_among_single_cases_widens_the_interval() -> None:
    """24 lost of 100, 15 of them of one family of 40: the variance between families says more than the correlation."""
    before = made([RIGHT] * 100)
    now = made([WRONG] * 15 + [RIGHT] * 25 + [WRONG] * 9 + [RIGHT] * 51)
    lopsided = [
        Results(
            backend=side.backend,
            protocol="tools",
            stream=False,
            cases="c",
            digest="d",
            seed=0,
            planned=100,
            results=[
                msgspec.structs.replace(result, family="large" if i < 40 else result.family)
                for i, result in enumerate(side.results)
            ],
        )
        for side in (now, before)
    ]
    even, wide = (compare(*pair, judge="first_try") for pair in ((now, before), lopsided))
    assert wide.design_effect < 1.05
    assert (wide.low, wide.high) == pytest.approx((-0.3429, -0.1371), abs=1e-4)
    assert wide.low < even.low < even.high < wide.high


def test_only_cases_that_both_answered_are_pairs() -> None:
    """Unanswered ones of either side, and ids that one side has not, are left out."""
    now, before = made([RIGHT] * 97 + [BUSY] * 3), made([BUSY] * 2 + [RIGHT] * 58)
    assert compare(now, before, judge="first_try").pairs == 58
    none = compare(made([RIGHT] * 5), made([]), judge="first_try")
    assert (none.pairs, none.outcome) == (0, "inconclusive")
    assert "no case was answered by both" in none.text


@pytest.mark.parametrize("side", [0, 1])
def test_a_side_with_too_many_unanswered_cases_is_not_compared(side: int) -> None:
    """Below 95 %: inconclusive, though every pair is the same; in a verdict its own shortage is an error."""
    whole, thin = made([RIGHT] * 100, backend="whole"), made([RIGHT] * 90 + [BUSY] * 10, backend="thin")
    now, before = (thin, whole) if side == 0 else (whole, thin)
    found = compare(now, before, judge="first_try")
    assert found.outcome == "inconclusive"
    assert "only 90 % of the cases of thin have an answer" in found.text
    assert judge(now, target=0.5, baseline=before).outcome == ("error" if side == 0 else "inconclusive")


def test_other_cases_are_refused() -> None:
    """A baseline, or a repeated one, of another digest: both are named."""
    now, before = changed(50, 1, 1)
    for other in (
        {"baseline": made([RIGHT], digest="ffff", cases="mine")},
        {"baseline": before, "repeated": made([RIGHT], digest="ffff")},
    ):
        with pytest.raises(BadCases, match=r"0123456789abcdef.*ffff"):
            judge(now, target=0.9, **other)


def test_what_else_differs_is_noted() -> None:
    """Protocol, streaming, sampling and early stops; retries where they are judged."""
    now, before = changed(50, 0, 0, sampling={"temperature": 0.2, "seed": 0}, stopped="enough", retries=2)
    other = Results(
        backend="f16",
        protocol="few_shot",
        stream=True,
        cases="shipped",
        digest=now.digest,
        seed=1,
        planned=50,
        results=before.results,
        sampling={"temperature": 0.0, "seed": 0},
        retries=1,
    )
    notes = compare(now, other, judge="after_retry").notes
    assert notes == [
        "the protocol is tools, and was few_shot",
        "answers are not streamed, and were streamed",
        "sampling: temperature is 0.2, and was 0.0",
        "2 retries are allowed, and were 1",
        "asking q4 stopped early: only cases that both were asked are compared",
    ]
    assert compare(now, now, judge="first_try").notes == [notes[-1].replace("q4", "q4 and q4")]


@pytest.mark.parametrize(
    ("again", "lost", "won", "same"),
    [(24, 10, 10, True), (6, 10, 10, False), (42, 30, 0, False)],
)
def test_the_baseline_asked_twice_is_told_beside(again: int, lost: int, won: int, same: bool) -> None:
    """Where as many answers change without a change, the setting did not change them, unless one side won clearly."""
    now, before = changed(300, lost, won)
    answers: Sequence[Any] = [result.first for result in before.results]
    flipped = [WRONG if answer is RIGHT else RIGHT for answer in answers[-again:]]
    repeated = made([*answers[:-again], *flipped], backend="f16")
    note = compare(now, before, judge="first_try", repeated=repeated).notes[-1]
    assert f"itself changed {again} of 300 answers ({again / 3:.0f} %)" in note
    assert f"{lost + won} of 300 changed" in note
    assert ("these are not the setting's" in note) == same


def test_the_graver_outcome_is_the_verdict() -> None:
    """Error, failed, inconclusive, passed, of the target and of the comparison."""
    for right_now, target, lost, outcome, of_pair in (
        (300, 0.94, 0, "passed", "passed"),
        (300, 0.5, 27, "failed", "failed"),
        (300, 0.5, 12, "inconclusive", "inconclusive"),
        (300, 1.0, 12, "failed", "inconclusive"),
    ):
        now, before = changed(right_now, lost, 0)
        verdict = judge(now, target=target, baseline=before)
        assert verdict.paired is not None
        assert (verdict.outcome, verdict.paired.outcome) == (outcome, of_pair)


@pytest.mark.parametrize("margin", [0.02, 0.05, 0.1])
def test_the_margin_decides(margin: float) -> None:
    """9 of 300 lost, none won: 3 points are within 10, and not shown to be within 5."""
    found = compare(*changed(300, 9, 0), judge="first_try", margin=margin)
    assert found.outcome == {0.02: "failed", 0.05: "inconclusive", 0.1: "passed"}[margin]
