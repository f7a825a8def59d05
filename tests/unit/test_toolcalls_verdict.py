"""Verdicts on a rate: four modes at their exact limits, and when there is none."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import Any

import pytest

from pytest_vram.stats import clopper_pearson
from pytest_vram.toolcalls.counting import percent
from pytest_vram.toolcalls.results import Answer, CaseResult, Results
from pytest_vram.toolcalls.verdict import MODES, Mode, judge, problem, sequential

RIGHT = Answer(outcome="right", kind="valid")
WRONG = Answer(outcome="wrong", kind="missing_bracket", kinds=("missing_bracket",))
BUSY = Answer(outcome="infrastructure", kind="", status=429, detail="too many requests")
GONE = Answer(outcome="infrastructure", kind="", detail="The connection was lost in mid-answer.\nmore")


def made(answers: Sequence[Answer], *, per_family: int = 1, planned: int | None = None, **fields: Any) -> Results:
    """Results with these first answers, families of ``per_family`` neighbours."""
    results = [
        CaseResult(id=f"case-{i}", family=f"family-{i // per_family}", category="single", language="en", first=answer)
        for i, answer in enumerate(answers)
    ]
    known: dict[str, Any] = {"backend": "agent", "cases": "shipped", "digest": "0123456789abcdef", "seed": 0}
    return Results(
        protocol="tools",
        stream=False,
        planned=len(results) if planned is None else planned,
        results=results,
        **known | fields,
    )


def rate(right: int, n: int, **more: Any) -> Results:
    """``right`` of ``n`` cases, the wrong ones last."""
    return made([RIGHT] * right + [WRONG] * (n - right), **more)


@pytest.mark.parametrize(("n", "most"), [(50, 43), (100, 89), (200, 181), (400, 367)])
def test_not_below_fails_at_its_limit(n: int, most: int) -> None:
    """With so many right of n the upper bound is below 94 %; with one more it is not."""
    failed, passed = judge(rate(most, n), target=0.94), judge(rate(most + 1, n), target=0.94)
    assert (failed.outcome, passed.outcome) == ("failed", "passed")
    assert failed.high is not None
    assert passed.high is not None
    assert failed.high < 0.94 <= passed.high
    assert "below it" in failed.text
    assert "within chance" in passed.text


def test_a_verdict_in_figures_and_words() -> None:
    """Counts, rate, intervals, and a sentence with all of them."""
    verdict = judge(rate(271, 300), target=0.94)
    assert (verdict.outcome, verdict.right, verdict.n, verdict.families, verdict.planned) == (
        "failed",
        271,
        300,
        300,
        300,
    )
    assert (verdict.mode, verdict.judge, verdict.target, verdict.confidence) == ("not_below", "first_try", 0.94, 0.95)
    assert verdict.completion == verdict.design_effect == 1.0
    assert verdict.rate == pytest.approx(271 / 300)
    assert verdict.detectable == pytest.approx(0.0397, abs=1e-4)
    assert verdict.low == pytest.approx(0.8704, abs=1e-3)
    assert verdict.text == (
        "271 of 300 right (90.3 %, 95 % interval 86.5–93.2 %); target 94 %: below it: at 95 % confidence the true rate is "
        "at most 93 %."
    )
    assert verdict.warnings == []


def test_too_few_cases_are_said_to_be() -> None:
    """50 cases fail nothing realistic, 12 hardly anything; 100 are enough for 10 points; 2 cannot fail and do not pass."""
    assert "only 43 right of 50 (86 %) or fewer fail" in judge(rate(50, 50), target=0.94).warnings[0]
    assert "12 cases are too few" in judge(rate(12, 12), target=0.94).warnings[0]
    for right in (0, 2):
        verdict = judge(rate(right, 2), target=0.5)
        assert verdict.outcome == "inconclusive"
        assert "so few cases can fail nothing" in verdict.text
    assert judge(rate(100, 100), target=0.94).warnings == []


@pytest.mark.parametrize(("failures", "n"), [(0, 49), (1, 78), (5, 173), (10, 280)])
def test_proven_passes_at_its_limit(failures: int, n: int) -> None:
    """The lower bound reaches 94 % with n independent cases; with one less it would take one more."""
    assert judge(rate(n - failures, n), target=0.94, mode="proven").outcome == "passed"
    open_ = judge(rate(n - 1 - failures, n - 1), target=0.94, mode="proven")
    assert open_.outcome == "inconclusive"
    assert "1 more case without a failure" in open_.text


def test_proven_fails_what_is_refuted() -> None:
    """Where the upper bound is below the target, as in not_below."""
    assert judge(rate(89, 100), target=0.94, mode="proven").outcome == "failed"
    assert judge(rate(90, 100), target=0.94, mode="proven").outcome == "inconclusive"


def test_point_is_the_literal_rule_and_tells_its_false_alarms() -> None:
    """94 of 100 pass, 93 fail, and 39 % of the deployments at 94 % would."""
    passed, failed = (judge(rate(k, 100), target=0.94, mode="point") for k in (94, 93))
    assert (passed.outcome, failed.outcome) == ("passed", "failed")
    assert failed.false_alarm == pytest.approx(0.394, abs=1e-3)
    assert "39.4 % of the time" in failed.text


@pytest.mark.parametrize("mode", MODES)
def test_a_target_of_all_promises_nothing_false(mode: Mode) -> None:
    """One wrong answer fails 100 % in every mode; no number of right ones proves it."""
    assert judge(made([WRONG] + [RIGHT] * 299), target=1.0, mode=mode).outcome == "failed"
    whole = judge(rate(300, 300), target=1.0, mode=mode)
    assert whole.outcome == ("inconclusive" if mode == "proven" else "passed")
    if mode == "proven":
        assert "No number of cases proves 100 %" in whole.text


@pytest.mark.parametrize("mode", MODES)
def test_too_many_unanswered_cases_refuse_the_verdict(mode: Mode) -> None:
    """Below 95 % of answers: an error with the troubles, whatever the rate; at 95 % a verdict on the rest."""
    refused = judge(made([RIGHT] * 94 + [BUSY] * 4 + [GONE] * 2), target=0.5, mode=mode)
    assert (refused.outcome, refused.n, refused.completion) == ("error", 94, 0.94)
    assert refused.low is None
    assert "6 of 100 cases have no answer" in refused.text
    assert "HTTP 429 (4), The connection was lost in mid-answer (2)" in refused.text
    taken = judge(made([RIGHT] * 95 + [BUSY] * 5), target=0.5, mode=mode)
    assert (taken.outcome, taken.n, taken.rate) == ("passed", 95, 1.0)


@pytest.mark.parametrize("mode", MODES)
def test_nothing_asked_and_nothing_answered_are_errors(mode: Mode) -> None:
    """Never a pass, never a failure, never a rate."""
    for results in (made([]), made([GONE]), made([BUSY] * 40)):
        verdict = judge(results, target=0.94, mode=mode)
        assert (verdict.outcome, verdict.rate, verdict.completion) == ("error", None, 0.0)
        assert verdict.text


def test_which_answer_counts() -> None:
    """First tries and answers after a retry are two rates; a retry lost to infrastructure has no answer."""
    results = made([RIGHT] * 80 + [WRONG] * 20)
    mended = [
        CaseResult(id=f"m{i}", family=f"m{i}", category="single", language="en", first=WRONG, retries=[retry])
        for i, retry in enumerate([RIGHT] * 16 + [WRONG] * 3 + [BUSY])
    ]
    both = Results(
        backend="agent",
        protocol="tools",
        stream=False,
        cases="c",
        digest="d",
        seed=0,
        planned=100,
        retries=1,
        results=results.results[:80] + mended,
    )
    first, after = (judge(both, target=0.94, judge=which) for which in ("first_try", "after_retry"))  # type: ignore[arg-type]
    assert (first.right, first.n, first.outcome) == (80, 100, "failed")
    assert first.other_rate == pytest.approx(96 / 99)
    assert (after.right, after.n, after.outcome, after.completion) == (96, 99, "passed", 0.99)
    assert after.other_rate == 0.8


def test_families_that_fail_as_one_count_as_one() -> None:
    """10 wrong in two families of 5 say less than 10 wrong by themselves."""
    alone, together = rate(89, 100), rate(89, 100, per_family=10)
    assert judge(alone, target=0.94).outcome == "failed"
    verdict = judge(together, target=0.94)
    assert verdict.outcome == "passed"
    assert verdict.design_effect > 5
    assert verdict.families == 10
    assert "100 of 10 families count as" in verdict.text
    assert verdict.warnings


def test_one_family_is_one_observation() -> None:
    """However many cases it has, and however they went."""
    for mode in ("not_below", "proven", "sprt"):
        verdict = judge(rate(300, 300, per_family=300), target=0.94, mode=mode)  # type: ignore[arg-type]
        assert verdict.outcome == "inconclusive"
        assert "of one family and count as one" in verdict.text


def test_a_proof_assumes_what_cannot_be_estimated() -> None:
    """60 right of 12 families of 5 do not prove what 60 independent ones do: some correlation is taken for granted."""
    assert judge(rate(60, 60), target=0.94, mode="proven").outcome == "passed"
    verdict = judge(rate(60, 60, per_family=5), target=0.94, mode="proven")
    assert 60 / verdict.design_effect > 49  # what was estimated alone would prove it
    assert verdict.outcome == "inconclusive"
    assert verdict.low is not None
    assert verdict.low < 0.94


def test_the_sequential_test_decides_in_the_order_asked() -> None:
    """A perfect run of 300 after 54 cases, a dead one after 5, and what it did not need is not looked at."""
    perfect = judge(rate(300, 300), target=0.94, mode="sprt")
    assert (perfect.outcome, perfect.decided_after) == ("passed", 54)
    assert "decided after 54 of 300 cases" in perfect.text
    dead = judge(rate(0, 300), target=0.94, mode="sprt")
    assert (dead.outcome, dead.decided_after) == ("failed", 5)
    of_400 = judge(rate(54, 54, planned=400), target=0.94, mode="sprt")  # with more at hand its limits are others
    assert of_400.decided_after is None
    late = judge(made([RIGHT] * 54 + [WRONG] * 246), target=0.94, mode="sprt")
    assert (late.outcome, late.decided_after) == ("passed", 54)
    early = judge(made([WRONG] * 246 + [RIGHT] * 54), target=0.94, mode="sprt")
    assert early.outcome == "failed"


def test_the_sequential_test_may_run_out() -> None:
    """Between the hypotheses 100 cases say nothing; how many would is said."""
    answers = ([RIGHT] * 11 + [WRONG]) * 9
    verdict = judge(made(answers[:100]), target=0.94, mode="sprt")
    assert (verdict.outcome, verdict.decided_after) == ("inconclusive", None)
    assert "cannot tell it from 89 % with 100 cases; 334 independent ones" in verdict.text


def test_stopping_while_asking_is_the_verdict_afterwards() -> None:
    """What ``sequential`` stops is judged the same, with the same number of cases, for many orders."""
    rng = random.Random(7)
    for accuracy in (1.0, 0.97, 0.94, 0.89, 0.6, 0.0):
        for per_family in (1, 3):
            answers = [RIGHT if rng.random() < accuracy else WRONG for _ in range(300)]
            whole = made(answers, per_family=per_family)
            enough = sequential(0.94, 0.05, 0.95, 300)
            seen: list[CaseResult] = []
            why = None
            for result in whole.results:
                seen.append(result)
                why = enough(seen)
                if why is not None:
                    break
            fields: dict[str, Any] = {"planned": 300, "stopped": why, "decided": why is not None}
            stopped = made(answers[: len(seen)], per_family=per_family, **fields)
            verdict = judge(stopped, target=0.94, mode="sprt")
            assert verdict.outcome == judge(whole, target=0.94, mode="sprt").outcome
            if why is not None:
                assert why == f"the sequential test {verdict.outcome} after {len(seen)} of 300 cases"
                assert verdict.decided_after == len(seen)
            else:
                assert verdict.decided_after is None


def test_asking_goes_on_while_answers_are_missing() -> None:
    """A decision with one of six unanswered would be refused: it waits for 95 %; another run starts anew."""
    enough = sequential(0.94, 0.05, 0.95, 300)
    results = made([WRONG] * 5 + [BUSY] + [WRONG] * 14).results
    told = [enough(results[: n + 1]) for n in range(20)]
    assert told[:4] == [None] * 4
    assert told[4] == "the sequential test failed after 5 of 300 cases"
    assert told[5:19] == [None] * 14
    assert told[19] == told[4]
    assert enough(results[:1]) is None


@pytest.mark.parametrize(
    ("changed", "part"),
    [
        ({"mode": "strict"}, "mode 'strict' is none of not_below, proven, sprt, point"),
        ({"judge": "last"}, "judge 'last' is none of"),
        ({"target": 0.0}, "target 0.0"),
        ({"target": 94}, "target 94"),
        ({"target": float("nan")}, "target nan"),
        ({"confidence": 1.0}, "confidence 1.0"),
        ({"confidence": 0.5}, "confidence 0.5"),
        ({"mode": "sprt", "margin": 0.0}, "margin 0.0"),
        ({"mode": "sprt", "target": 0.05}, "margin 0.05 is not below the target 0.05"),
        ({"margin": -1.0, "compared": True}, "margin -1.0"),
        ({"margin": -1.0}, None),
    ],
)
def test_arguments_that_make_no_sense_are_named(changed: dict[str, Any], part: str | None) -> None:
    """By ``problem``, beforehand, and by ``judge`` as an error."""
    usual: dict[str, Any] = {
        "target": 0.94,
        "mode": "not_below",
        "confidence": 0.95,
        "margin": 0.05,
        "judge": "first_try",
    }
    found = problem(**usual | changed)
    assert (found is None) == (part is None)
    if part is not None and "compared" not in changed:
        assert part in str(found)
        with pytest.raises(ValueError, match=r"."):
            judge(rate(9, 10), **usual | changed)


@pytest.mark.parametrize("mode", MODES)
def test_cases_that_were_given_up_are_missing(mode: Mode) -> None:
    """Whether all that were asked have an answer or nearly so: of those planned a third has none, and nothing passes."""
    why = "the last 5 cases got no answer that could be judged: the other 95 were not asked"
    gave_up = made([RIGHT] * 195 + [GONE] * 5, planned=300, stopped=why)
    verdict = judge(gave_up, target=0.94, mode=mode)
    assert (verdict.outcome, verdict.completion) == ("error", 0.65)
    assert verdict.text == (
        "105 of 300 cases have no answer that can be judged: The connection was lost in mid-answer (5), not asked (100); "
        f"{why}. 65 % were answered, and a verdict takes 95 %: see to the server, and ask again."
    )
    interrupted = judge(made([RIGHT] * 250, planned=300, stopped="interrupted"), target=0.94, mode=mode)
    assert (interrupted.outcome, interrupted.rate) == ("error", 1.0)
    assert "50 of 300 cases have no answer that can be judged: not asked (50), since interrupted." in interrupted.text


def test_a_sequential_decision_needs_no_more_cases() -> None:
    """What decided is all that had to be asked."""
    decided = made([RIGHT] * 54, planned=300, stopped="the sequential test passed after 54 of 300 cases", decided=True)
    verdict = judge(decided, target=0.94, mode="sprt")
    assert (verdict.outcome, verdict.completion, verdict.planned) == ("passed", 1.0, 300)


@pytest.mark.parametrize(
    ("right", "n", "target", "part"),
    [
        (299, 300, 1.0, "at most 99.98 %."),
        (299, 300, 1.0, "299 of 300 right (99.7 %"),
        (2999, 3000, 1.0, "2999 of 3000 right (99.97 %"),
        (47, 50, 0.94, "47 of 50 right (94 %"),
        (9399, 10000, 0.94, "9399 of 10000 right (93.99 %"),
    ],
)
def test_rounding_contradicts_no_verdict(right: int, n: int, target: float, part: str) -> None:
    """A figure that differs from the target is not printed as the target."""
    assert part in judge(rate(right, n), target=target).text


def test_a_share_beside_another_has_digits_enough() -> None:
    """One digit, unless two that differ would be the same."""
    assert percent(0.9998, beside=1.0) == "99.98 %"
    assert percent(0.94000004, beside=0.94) == "94.000004 %"
    assert percent(0.94, beside=0.94) == "94 %"
    assert percent(0.9031) == "90.3 %"
    assert percent(-0.0001) == "0 %"
    assert percent(0.1) == "10 %"


def test_a_proof_says_what_its_cases_count_as() -> None:
    """The bound is that of the count that is printed, also where a correlation was assumed."""
    verdict = judge(made([RIGHT] * 71 + [WRONG], per_family=6), target=0.99, mode="proven")
    count = re.search(r"72 of 12 families count as (\d+), with a correlation of 0.1 that is assumed", verdict.text)
    assert count is not None
    assert verdict.low is not None
    worth = int(count[1])
    assert worth < 60
    assert clopper_pearson(71 / 72 * worth, worth, 0.95, "lower")[0] == pytest.approx(verdict.low, abs=0.005)
    assert "assumed" not in judge(made([RIGHT] * 71 + [WRONG], per_family=6), target=0.9).text


def test_it_is_said_which_answer_is_judged() -> None:
    """A rate after retries is called so."""
    assert judge(rate(90, 100), target=0.94, judge="after_retry").text.startswith("90 of 100 right after a retry (90 %")
