"""Answers of the scripted backend are diagnosed as what was put into them, over the shipped cases."""

from __future__ import annotations

from collections import Counter

import pytest

from pytest_vram.testing.scripted import WRONG_KINDS, defects, drawing
from pytest_vram.toolcalls import CaseSet, diagnose, load
from pytest_vram.toolcalls.cases import stratified
from tests.unit.scripted_kit import PROTOCOLS

#: Kinds that a protocol has no form for.
WITHOUT = {
    "tools": {"text_around", "alias_key"},
    "json_schema": {"server_parse_error", "call_in_text", "wrapper_mismatch"},
    "few_shot": {"server_parse_error", "call_in_text", "wrapper_mismatch"},
}


@pytest.fixture(scope="module")
def shipped() -> CaseSet:
    """Some cases of each category."""
    cases = load("shipped")
    return CaseSet(name="some", cases=stratified(cases.cases, 66, seed=0), digest="0" * 16)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_right_answers_are_valid(shipped: CaseSet, protocol: str) -> None:
    """Whichever of the allowed values is answered, the answer is well-formed and right."""
    for case in shipped.cases:
        for number in range(3):
            words = defects.right_words(case, protocol, drawing.generator(case.id, number))
            found = diagnose(
                words.message,
                case.tools,
                expected=case.expect,
                finish_reason=words.finish_reason,
                protocol=protocol,
            )
            assert (found.kind, found.right, found.well_formed) == ("valid", True, True), (case.id, words, found)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_wrong_answers_have_the_kind_that_was_asked_for(shipped: CaseSet, protocol: str) -> None:
    """Of each kind that the protocol has a form for there are answers, and each is diagnosed as it."""
    made: Counter[str] = Counter()
    for case in shipped.cases:
        for kind in WRONG_KINDS:
            put, words = defects.wrong_words(case, protocol, [kind], drawing.generator(case.id, kind))
            if words.error is not None:
                made[put] += 1
                continue
            found = diagnose(
                words.message,
                case.tools,
                expected=case.expect,
                finish_reason=words.finish_reason,
                protocol=protocol,
            )
            assert (found.kind, found.right) == (put, False), (case.id, kind, words, found)
            made[put] += 1
    assert set(made) == set(WRONG_KINDS) - WITHOUT[protocol]
