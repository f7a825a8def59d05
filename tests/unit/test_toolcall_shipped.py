"""The shipped cases of tool calls: how many there are of what, and that each of them can be answered right and wrong."""

from __future__ import annotations

import itertools
import json
import re
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from pytest_vram.toolcalls import CATEGORIES, Case, ExpectedCall, load
from pytest_vram.toolcalls.lint import lint
from pytest_vram.toolcalls.scoring import against_schema, match

#: Words that name a day only beside a date.
RELATIVE = re.compile(r"\b(today|yesterday|tomorrow|this week|last month|this month|heute|gestern)\b", re.IGNORECASE)
DATE = re.compile(r"\b20\d\d-\d\d-\d\d\b", re.ASCII)
#: Arguments that are words for people; all other texts are names, paths, patterns, times: to the letter or wrong.
WORDED = {("incident_open", "title")}
#: Arguments that name days.
DATED = ("period",)


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    return load().cases


def as_expected(case: Case, *, last: bool = False, short: bool = False) -> list[tuple[str, dict[str, Any]]]:
    """The calls that answer a case right.

    :param last: with the last of the values that are right, not the first. :param short: without what may be left out.
    """
    return [
        (
            call.name,
            {
                name: allowed[-1 if last else 0]
                for name, allowed in call.arguments.items()
                if not short or name not in call.omittable
            },
        )
        for call in case.expect
    ]


def other_than(value: Any) -> Iterator[Any]:
    """Values of the same type that are not the same."""
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int | float):
        yield from (value + 1, value * 60 + 7, -value - 1)
    elif isinstance(value, str):
        yield from (value + "x", value[1:] + "0", "")
    elif isinstance(value, list):
        yield from (value[:-1], [*value, value[0]], [])
        for index, item in enumerate(value):
            yield from ([*value[:index], other, *value[index + 1 :]] for other in other_than(item))
    elif isinstance(value, dict):
        for key, item in value.items():
            yield {name: kept for name, kept in value.items() if name != key}
            yield from ({**value, key: other} for other in other_than(item))


def changed(case: Case) -> Iterator[list[tuple[str, dict[str, Any]]]]:
    """The right calls with one argument that is not right."""
    right = as_expected(case)
    for index, call in enumerate(case.expect):
        name, arguments = right[index]
        for key, value in arguments.items():
            for other in other_than(value):
                if other not in call.arguments[key]:
                    yield [*right[:index], (name, {**arguments, key: other}), *right[index + 1 :]]


def test_there_are_enough(cases: list[Case]) -> None:
    """There are at least 300 cases out of at least 60 families, and no family makes up more than a fiftieth of them."""
    families = defaultdict(list)
    for case in cases:
        families[case.family].append(case)
    assert len(cases) >= 300
    assert len(families) >= 60
    assert max(map(len, families.values())) <= len(cases) / 50
    assert min(map(len, families.values())) >= 3


@pytest.mark.parametrize("category", CATEGORIES)
def test_every_category_has_families(cases: list[Case], category: str) -> None:
    """At least 25 cases out of at least 8 families are of each category."""
    members = [case for case in cases if case.category == category]
    assert len(members) >= 25
    assert len({case.family for case in members}) >= 8


@pytest.mark.parametrize("category", ["multi_turn", "irrelevance"])
def test_what_small_models_fail_at_is_frequent(cases: list[Case], category: str) -> None:
    """Conversations with results of tools, and requests that no tool serves, are at least 15 % of the cases each."""
    assert sum(case.category == category for case in cases) >= 0.15 * len(cases)


def test_languages(cases: list[Case]) -> None:
    """Requests come in at least 12 languages, and an eighth of them or more is not in English."""
    assert len({case.language for case in cases}) >= 12
    assert sum(case.language != "en" for case in cases) >= len(cases) / 8


@pytest.mark.parametrize("count", [5, 20, 40])
def test_lists_of_tools_of_each_length(cases: list[Case], count: int) -> None:
    """Lists of exactly 5, 20 and 40 tools are offered."""
    assert any(len(case.tools) == count for case in cases)


def test_nothing_to_find_for_the_lint(cases: list[Case]) -> None:
    """The lint finds neither an error nor a warning."""
    assert lint(cases) == []


def test_requests_differ_in_words(cases: list[Case]) -> None:
    """No two cases of a family are one sentence with other numbers."""
    for family, members in itertools.groupby(sorted(cases, key=lambda case: case.family), lambda case: case.family):
        asked = [
            (re.sub(r"\d+", "#", json.dumps(case.messages, ensure_ascii=False)), frozenset(t.name for t in case.tools))
            for case in members
        ]
        assert len(set(asked)) == len(asked), family


def test_days_need_a_date(cases: list[Case]) -> None:
    """Where days are expected and the request names a day by its distance, a date stands in the conversation."""
    for case in cases:
        text = json.dumps(case.messages, ensure_ascii=False)
        if RELATIVE.search(text) and any(key in call.arguments for call in case.expect for key in DATED):
            assert DATE.search(text), case.id


def test_history_suits_strict_templates(cases: list[Case]) -> None:
    """Earlier calls have ids of nine letters and digits and come one in a message: some chat templates refuse others.

    Those of Mistral's models demand such ids, that of Llama 3.1 one call in a message.
    """
    for case in cases:
        for message in case.messages:
            made = message.get("tool_calls") or []
            assert len(made) <= 1, case.id
            assert all(re.fullmatch(r"[A-Za-z0-9]{9}", call["id"]) for call in made), case.id


def free_text(schema: dict[str, Any]) -> bool:
    """Whether values of a schema have text that the schema does not enumerate."""
    if schema.get("type") == "string":
        return "enum" not in schema
    inner = [schema.get("items", {}), *schema.get("properties", {}).values()]
    return any(free_text(one) for one in inner if one)


def test_names_are_compared_to_the_letter(cases: list[Case]) -> None:
    """Names, ids, paths, patterns, addresses and times are ``exact``: ``web_1`` is no host where there is ``web-1``."""
    for case in cases:
        schemas = {tool.name: tool.parameters["properties"] for tool in case.tools}
        for call in case.expect:
            wanted = {
                name
                for name in call.arguments
                if free_text(schemas[call.name][name]) and (call.name, name) not in WORDED
            }
            assert set(call.exact) == wanted, case.id


def damaged(value: Any) -> Iterator[Any]:
    """Values with one separator, one capital, a full stop, quotes or a space changed somewhere."""
    if isinstance(value, str):
        changed = (value.replace("-", "_"), value.replace("_", "-"), value.replace("-", " "), value.upper())
        yield from (other for other in (*changed, f"{value}.", f"'{value}'", f" {value}") if other != value)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from ([*value[:index], other, *value[index + 1 :]] for other in damaged(item))
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from ({**value, key: other} for other in damaged(item))


def test_damaged_names_are_wrong(cases: list[Case]) -> None:
    """A right call whose name, path or time has another separator, capitals, quotes or a full stop is wrong."""
    for case in cases:
        right = as_expected(case)
        for index, call in enumerate(case.expect):
            name, arguments = right[index]
            for key in call.exact:
                for other in damaged(arguments[key]):
                    calls = [*right[:index], (name, {**arguments, key: other}), *right[index + 1 :]]
                    assert match(calls, case.expect, case.tools).defects, (case.id, other)


@pytest.mark.parametrize("last", [False, True], ids=["first", "last"])
@pytest.mark.parametrize("short", [False, True], ids=["whole", "short"])
def test_the_expected_answer_is_right(cases: list[Case], last: bool, short: bool) -> None:
    """Answered as expected, with the first or the last value, with or without what may be left out, a case is right."""
    for case in cases:
        calls = as_expected(case, last=last, short=short)
        assert match(calls, case.expect, case.tools).defects == (), case.id
        assert match(calls[::-1], case.expect, case.tools).defects == (), case.id
        schemas = {tool.name: tool.parameters for tool in case.tools}
        for name, arguments in calls:
            assert against_schema(name, arguments, case.tools) == [], case.id
            jsonschema.validate(arguments, schemas[name])


def test_one_changed_argument_is_wrong(cases: list[Case]) -> None:
    """With one argument changed no case is right."""
    for case in cases:
        for calls in changed(case):
            assert match(calls, case.expect, case.tools).defects, (case.id, calls)


def test_other_numbers_of_calls_are_wrong(cases: list[Case]) -> None:
    """A call too few, a call twice, and another tool's call are wrong."""
    for case in cases:
        right = as_expected(case)
        for index in range(len(right)):
            assert match(right[:index] + right[index + 1 :], case.expect, case.tools).defects, case.id
            assert match([*right, right[index]], case.expect, case.tools).defects, case.id
        wanted = {call.name for call in case.expect}
        for tool in case.tools:
            if tool.name not in wanted:
                assert match([(tool.name, {})], case.expect, case.tools).defects, case.id


def test_a_changed_value_is_noticed_here() -> None:
    """The changes of these tests reach into lists and objects."""
    values = [*other_than({"a": [1]})]
    assert {"a": [2]} in values
    assert {} in values
    assert [*other_than(True)] == [False]
    call = ExpectedCall(name="f", arguments={"a": [3]})
    case = Case(id="x", family="x", category="single", messages=[], tools=[], expect=[call])
    assert [("f", {"a": 4})] in [*changed(case)]
