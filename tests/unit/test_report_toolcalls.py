"""Tool calls in reports: rates, kinds, worst cases, defects beside settings, and lines that hold their width."""

from __future__ import annotations

from typing import Any

import pytest

from pytest_vram.report.toolcall_lines import case_lines, defect_lines, failure_lines, rate_line
from pytest_vram.report.toolcalls import (
    AskedRecord,
    ToolcallRecord,
    asked_record,
    defect_tables,
    worst_cases,
)
from pytest_vram.toolcalls.results import Answer, CaseResult, Results
from pytest_vram.toolcalls.verdict import judge

HOSTILE = "\x1b[2J\r\x07" + "x" * 5000 + "\u202e}"


def answer(kind: str = "valid", **more: Any) -> Answer:
    """An answer; wrong unless it is valid."""
    outcome = "right" if kind == "valid" else "infrastructure" if not kind else "wrong"
    return Answer(outcome=outcome, kind=kind, kinds=(kind,) if outcome == "wrong" else (), **more)  # type: ignore[arg-type]


def result(number: int, first: Answer, *retries: Answer, category: str = "single", language: str = "en") -> CaseResult:
    """A case of a family of its own."""
    return CaseResult(
        id=f"case-{number}",
        family=f"family-{number}",
        category=category,
        language=language,
        first=first,
        retries=list(retries),
        expect=[{"name": "log_tail", "arguments": {"path": ["/a", "/b", "/c", "/d"]}}],
        request={"messages": [{"role": "user", "content": HOSTILE}]},
    )


def results(found: list[CaseResult], **more: Any) -> Results:
    """Results of these cases."""
    fields: dict[str, Any] = {
        "backend": "agent",
        "protocol": "tools",
        "stream": False,
        "cases": "shipped",
        "digest": "0" * 16,
        "seed": 0,
        "planned": len(found),
        "results": found,
        "retries": 1,
    }
    return Results(**(fields | more))


def record(found: Results, target: float = 0.94) -> ToolcallRecord:
    """The record of a test with these results."""
    return ToolcallRecord(
        verdict=judge(found, target=target), asked=asked_record(found), worst=worst_cases(found, "first_try")
    )


def test_infrastructure_is_in_no_rate_and_both_tries_are_counted() -> None:
    """A retry that got no answer leaves the case as it was before."""
    found = asked_record(
        results(
            [
                result(1, answer()),
                result(2, answer("missing_bracket"), answer(), category="nested"),
                result(3, answer("missing_bracket"), answer("wrong_value"), language="de"),
                result(4, answer("no_call"), answer("")),
                result(5, answer("")),
            ]
        )
    )
    assert (found.n, found.right, found.after_retry, found.infrastructure) == (4, 1, 2, 1)
    assert [(row.kind, row.first, row.after_retry) for row in found.kinds] == [
        ("missing_bracket", 2, 0),
        ("no_call", 1, 0),
        ("wrong_value", 0, 1),
    ]
    assert [(row.name, row.n, row.right, row.after_retry) for row in found.categories] == [
        ("nested", 1, 0, 1),
        ("single", 3, 1, 1),
    ]
    assert [(row.name, row.n) for row in found.languages] == [("de", 1), ("en", 3)]
    assert found.sampling == {"temperature": 0.0, "seed": 0, "max_tokens": 512}


def test_worst_cases_show_each_kind_before_a_second_of_one() -> None:
    """The most frequent kind first; ten at most; an answer that is right is none of them."""
    kinds = ["wrong_value"] * 9 + ["no_call"] * 5 + ["truncated"]
    found = results([result(number, answer(kind)) for number, kind in enumerate(kinds)] + [result(99, answer())])
    worst = worst_cases(found, "first_try")
    assert [case.kind for case in worst[:5]] == ["wrong_value", "no_call", "truncated", "wrong_value", "no_call"]
    assert len(worst) == 10


def test_worst_cases_of_a_comparison_are_those_that_were_lost() -> None:
    """However frequent the kinds of the others are; and the column of the baseline has what both answered."""
    kinds = ["wrong_value"] * 20 + ["no_call"] * 2 + ["truncated"]
    found = results([result(number, answer(kind)) for number, kind in enumerate(kinds)])
    before = results(
        [result(number, answer("wrong_value" if number < 20 else "valid")) for number in range(3, 23)]
        + [result(number, answer()) for number in range(100, 140)]
    )
    worst = worst_cases(found, "first_try", baseline=before)
    assert [case.kind for case in worst[:3]] == ["no_call", "truncated", "no_call"]
    assert {case.kind for case in worst[3:]} == {"wrong_value"}
    assert len({case.id for case in worst}) == len(worst) == 10
    column = asked_record(before, among=found)
    assert (column.n, column.right) == (20, 3)


@pytest.mark.parametrize("width", [60, 80, 120])
def test_lines_hold_their_width_and_command_no_terminal(width: int) -> None:
    """Whatever a model wrote: cut in lines and in number, and nothing of it is obeyed."""
    found = results([result(number, answer("wrong_value", raw=HOSTILE, raw_length=9000)) for number in range(60)])
    lines = failure_lines(record(found), width)
    assert all(len(line) <= width for line in lines[2:])  # above are the sentences of the verdict, which are not cut
    text = "\n".join(lines)
    assert text.isprintable() or not any(ord(letter) < 32 and letter != "\n" for letter in text)
    assert "\u202e" not in text
    assert len(lines) < 60
    assert any("…" in line for line in lines)
    assert 'log_tail(path="/a" or "/b" or "/c" or …)' in text


def test_a_share_that_is_not_all_is_not_shown_as_all() -> None:
    """999 of 1000 are 99 %, 1 of 1000 is 1 %, and none is 0 %."""
    whole = [result(number, answer()) for number in range(999)]
    assert rate_line(asked_record(results([*whole, result(999, answer("empty"))]))).startswith("999/1000  99% right")
    wrong = [result(number, answer("empty")) for number in range(999)]
    assert rate_line(asked_record(results([*wrong, result(999, answer())]))).startswith("1/1000   1% right")
    assert rate_line(asked_record(results(wrong))).startswith("0/999   0% right")
    assert rate_line(asked_record(results([result(1, answer(""))]))).startswith("no case has an answer")


def test_an_answer_without_anything_and_no_call_expected_are_said() -> None:
    """Neither is left blank."""
    case = worst_cases(results([result(1, answer("empty"))]), "first_try")[0]
    lines = case_lines(case)
    assert any(line.startswith("  answered: (nothing)") for line in lines)


def columns(*asked: AskedRecord) -> list[list[AskedRecord | None]]:
    return [[one, None] for one in asked]


def asked_of(backend: str, kinds: list[str], settings: dict[str, Any], **more: Any) -> AskedRecord:
    """What one backend was asked: as many cases as there are kinds."""
    found = [result(number, answer(kind)) for number, kind in enumerate(kinds)]
    return asked_record(results(found, backend=backend, settings=settings, **more))


def test_defects_stand_beside_the_settings_that_differ() -> None:
    """Only those; a secret never; backends of other cases in a table of their own, and none alone."""
    f16 = asked_of("f16", ["valid", "no_call"], {"name": "f16", "model": "m", "options": {"cache-type-k": "f16"}})
    q4 = asked_of(
        "q4",
        ["missing_bracket", "no_call"],
        {"name": "q4", "model": "m", "api_key": "***", "options": {"cache-type-k": "q4_0"}},
    )
    (table,) = defect_tables(columns(f16, q4, f16, asked_of("x", ["valid"], {}, digest="1" * 16)))
    assert [column.settings for column in table.columns] == [{"cache-type-k": "f16"}, {"cache-type-k": "q4_0"}]
    assert [(row.kind, row.counts) for row in table.rows] == [("missing_bracket", [0, 1]), ("no_call", [1, 1])]
    lines = defect_lines(table)
    assert lines[1].split() == ["cache-type-k", "f16", "q4_0"]
    assert all(len(line) <= 80 for line in lines)
    assert defect_tables(columns(f16)) == []


def test_many_backends_are_listed_and_long_settings_begin_where_they_differ() -> None:
    """Columns that have no room beside each other become a list."""
    prefix = "/models/" + "very-long/" * 6
    asked = [asked_of(f"backend-{n}", ["no_call"], {"model": f"{prefix}{n}.gguf"}) for n in range(9)]
    (table,) = defect_tables(columns(*asked))
    lines = defect_lines(table)
    assert lines[0] == "defects by setting"
    assert sum("right; no_call 1" in " ".join(lines[n : n + 3]) for n in range(len(lines))) >= 9
    (table,) = defect_tables(columns(*asked[:2]))
    assert "…0.gguf" in defect_lines(table)[1]
    assert "…1.gguf" in defect_lines(table)[1]
