"""Checking cases comes to an end whatever their schemas and values are."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_vram.errors import BadCases
from pytest_vram.toolcalls import Case, ExpectedCall, Tool, load
from pytest_vram.toolcalls.lint import Finding, lint
from pytest_vram.toolcalls.lint_schema import Checker, broken, flaws
from pytest_vram.toolcalls.patterns import bounded, flaw, found
from pytest_vram.toolcalls.schemas import inspect
from pytest_vram.toolcalls.wanted import meant

#: Patterns that Python's matcher may try for longer than anybody waits.
ENDLESS = [
    r"^(a+)+$",
    r"(a|a)*b",
    r"^(?:a|b)+$",
    r"(a+){2,9}x",
    r"((a{1,2}){9}){99}x",
    r"(((a*)*)*)*x",
    r"(?P<x>a+)+$",
    r"(x+x+)+y",
    r"(a*)*\1",
    "a?" * 30 + "a" * 30,
    "a*a*a*a*a*a*b",
    "(a{1,4000000000})*b",
    r"^(\d{1,3}\d{1,3})+x$",
    r"^([a.]+\.)+x$",
    r"^(-[-a]+)*x$",
    r"(_\w+)+x",
]
#: Patterns as schemas have them.
USUAL = [
    (r"^[a-z-]+$", "nightly-backup", "Nightly"),
    (r"^[a-z]+(-[a-z0-9]+)*$", "nightly-backup-2", "nightly--backup"),
    (r"^(\d+\.)?\d+$", "4.12", "4.12.1"),
    (r"^([0-9]{1,3}\.){3}[0-9]{1,3}$", "10.0.0.15", "10.0.15"),
    (r"^([0-9a-f]{2})+$", "0a1b", "0a1"),
    (r"^(?:staging|production)$", "staging", "stage"),
    (r"^\d{4}-\d{2}-\d{2}(T\d\d:\d\d)?$", "2026-03-14T08:30", "2026-3-14"),
    (r"^[^@\s]+@[^@\s]+\.[a-z]+$", "ops@example.org", "ops@example"),
    (r"(?i)^r-[0-9]+$", "R-12", "R12"),
    (r"^/(?:[\w.-]+/?)?$", "/var", "var"),
    (r"\]\[", "a][b", "[]"),
    (r"^[]a]+$", "a]", "b"),
]


def schema(**job: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"job": {"type": "string", **job}}, "required": ["job"]}


def of(parameters: dict[str, Any], value: Any, **changes: Any) -> list[Finding]:
    fields: dict[str, Any] = {
        "id": "a-01",
        "family": "a",
        "category": "single",
        "messages": [{"role": "user", "content": "Which runs were there?"}],
        "tools": [Tool(name="job_runs", description="x", parameters=parameters)],
        "expect": [ExpectedCall(name="job_runs", arguments={"job": [value]}, exact=["job"])],
    }
    return lint([Case(**{**fields, **changes})])


@pytest.mark.parametrize("pattern", ENDLESS)
def test_a_pattern_without_a_bound_is_told_and_not_tried(pattern: str) -> None:
    """A pattern whose matching can take exponential time is a warning, and no value is held against it."""
    assert found(pattern, "a" * 60 + "!") is None
    findings = of(schema(pattern=pattern), "a" * 60 + "!")
    assert [(one.level, one.rule) for one in findings] == [("warning", "schema")]
    assert "is not held against values" in findings[0].text


def test_scoring_has_the_same_bound() -> None:
    """An answer that a pattern would be tried on for hours is scored without it; one that breaks a pattern is wrong."""
    for pattern in [*ENDLESS, "a*a*a*a*b"]:
        assert inspect({"job": "a" * 250 + "!"}, schema(pattern=pattern)) == ([], {})
    for pattern, right, wrong in USUAL:
        assert inspect({"job": right}, schema(pattern=pattern)) == ([], {})
        assert [one.kind for one in inspect({"job": wrong}, schema(pattern=pattern))[0]] == ["wrong_value"]


@pytest.mark.parametrize(("pattern", "right", "wrong"), USUAL)
def test_usual_patterns_are_held_against_values(pattern: str, right: str, wrong: str) -> None:
    """The patterns that schemas have are tried: a value that breaks one is found."""
    assert flaws(schema(pattern=pattern)) == []
    assert of(schema(pattern=pattern), right) == []
    assert [one.rule for one in of(schema(pattern=pattern), wrong)] == ["refused-value"]


@given(
    st.lists(
        st.sampled_from(
            ["a", "b", "-", "[ab]", "[^a]", ".", "(", "(?:", ")", "*", "+", "?", "|", "{2}", "{1,2}", "^", "$"]
        ),
        max_size=9,
    ),
    st.text("ab-", max_size=12),
)
def test_what_is_found_is_what_python_finds(parts: list[str], text: str) -> None:
    """Where a pattern is tried the answer is that of ``re.search``; no pattern at all is told as none."""
    pattern = "".join(parts)
    if flaw(pattern) is not None:
        assert found(pattern, text) is None
        return
    answer = found(pattern, text)
    assert answer is None or answer == (re.search(pattern, text) is not None)
    assert answer is not None or "(" in pattern or not bounded(pattern, len(text))


@pytest.mark.parametrize("pattern", ["(", "a{99999999999}", "(" * 300, r"\p{L}+", "*"])
def test_no_pattern_at_all_is_an_error(pattern: str) -> None:
    """What Python cannot read as a pattern is told, numbers that are too large included."""
    assert any("is no regular expression" in one.text for one in flaws(schema(pattern=pattern)))
    assert any("is no regular expression" in one.text for one in flaws({"patternProperties": {pattern: {}}}))


def unfolding(word: str, depth: int, width: int) -> dict[str, Any]:
    """A small schema that unfolds to ``width ** depth`` branches."""
    parts: dict[str, Any] = {f"n{level}": {word: [{"$ref": f"#/$defs/n{level + 1}"}] * width} for level in range(depth)}
    whole = schema()
    whole["properties"]["job"] = {"$ref": "#/$defs/n0"}
    return {**whole, "$defs": {**parts, f"n{depth}": {"type": "integer" if word == "anyOf" else "string"}}}


@pytest.mark.parametrize("word", ["anyOf", "allOf", "oneOf"])
def test_a_schema_that_unfolds_without_measure_is_told(word: str) -> None:
    """A schema of twenty lines that has a million millions of branches is an error in good time, value by value."""
    parameters = unfolding(word, 20, 4)
    call = ExpectedCall(name="job_runs", arguments={"job": [f"value {number}" for number in range(500)]})
    findings = of(parameters, "", expect=[call])
    assert {one.rule for one in findings} == {"refused-value"}
    assert len(findings) == 500
    assert "takes more than 30000 steps" in findings[0].text


def test_a_schema_that_unfolds_a_little_is_checked() -> None:
    """Some hundred branches are looked at: the value that fits none of them is told as such."""
    assert "is not valid under any of the given schemas" in (of(unfolding("anyOf", 3, 4), "x")[0].text)
    assert of(unfolding("allOf", 3, 4), "x") == []


def test_long_lists_are_checked() -> None:
    """A long list beside a long enumeration comes to an end, and lists of usual length are checked item by item."""
    zones = [f"zone-{number}" for number in range(600)]
    items = {"type": "array", "items": {"enum": zones}, "uniqueItems": True}
    assert broken(zones[:40], items, items) is None
    assert "non-unique" in str(broken(["zone-1", "zone-1"], items, items))
    assert "is not one of" in str(broken(["zone-601"], items, items))
    assert broken([1, 1.5, "1", [1], {"a": 1}], {"uniqueItems": True}, {}) is None
    assert "steps" in str(broken(list(range(40_000)), {"items": {"enum": list(range(40_000))}}, {}))
    assert "…]" in str(broken("zone-601", {"enum": zones}, {}))


def test_a_long_enumeration_beside_as_many_right_values() -> None:
    """Each right value is looked up in a long enumeration, not compared with all of it."""
    names = [f"name {number}" for number in range(20_000)]
    call = ExpectedCall(name="job_runs", arguments={"job": [*names, "nobody"]}, exact=["job"])
    findings = of(schema(enum=names), "", expect=[call])
    assert [one.rule for one in findings] == ["refused-value"]
    assert "'nobody' is not one of" in findings[0].text


def test_values_of_an_enumeration_are_those_of_json() -> None:
    """A value is one of an enumeration as JSON Schema has it: 1 is 1.0, and neither is true or "1"."""
    listed: dict[str, Any] = {"enum": [1, "a", None, [1.0, {"x": 2, "y": 3}], 1e300]}
    for value in (1, 1.0, "a", None, [1, {"y": 3.0, "x": 2}], 10**300 * 1.0):
        assert broken(value, listed, listed) is None, value
    for value in (True, "1", "A", 0, [1], [1, {"x": 2}], {}):
        assert "is not one of" in str(broken(value, listed, listed)), value


@pytest.mark.parametrize("name", [[], {}, 3, None, True])
def test_required_names_that_are_no_names(name: Any) -> None:
    """What stands among required names and is no text is told, whatever it is."""
    assert any("which is no name" in one.text for one in flaws(schema(required=[name])))
    assert any(
        "which is no name" in one.text for one in flaws({"type": "object", "properties": {}, "required": [name]})
    )


def test_objects_that_must_differ() -> None:
    """A list of thousands of objects is looked through once for two that are the same."""
    items: dict[str, Any] = {"uniqueItems": True}
    objects = [{"a": number, "b": [number]} for number in range(5000)]
    assert broken(objects, items, items) is None
    assert "non-unique" in str(broken([*objects, objects[7]], items, items))


def test_objects_keep_their_patterns() -> None:
    """``patternProperties`` beside ``additionalProperties``: a key by its pattern, others by the rest."""
    open_to_x = {"patternProperties": {"^x-": {"type": "integer"}}, "additionalProperties": False}
    assert broken({"x-a": 1}, open_to_x, open_to_x) is None
    assert "is not of type 'integer'" in str(broken({"x-a": "1"}, open_to_x, open_to_x))
    assert "'y' was unexpected" in str(broken({"y": 1}, open_to_x, open_to_x))
    endless = {"patternProperties": {"^(a+)+$": {}}, "additionalProperties": False}
    assert broken({"a" * 60 + "!": 1}, endless, endless) is None


def test_numbers_without_measure() -> None:
    """A number that no float can hold is told where it must be divided, and is no crash."""
    assert broken(10**400, {"multipleOf": 0.5}, {}) is not None
    assert broken(10**400, {"minimum": 1}, {}) is None


def test_steps_are_counted_anew_for_each_value() -> None:
    """Many values that each take few steps are all checked."""
    checker = Checker({})
    part = {"allOf": [{"type": "string"}] * 100}
    assert [checker.broken(str(number), part) for number in range(500)] == [None] * 500


def test_many_tools_are_compared_in_good_time() -> None:
    """An expected tool is held against the others, not every tool against every other."""
    nothing = {"type": "object"}
    tools = [Tool(name=f"tool_{number}", description=f"Tool {number}.", parameters=nothing) for number in range(8000)]
    call = ExpectedCall(name="tool_7")
    assert of({}, "", tools=tools, expect=[call]) == []


def test_a_finding_is_cut() -> None:
    """A value of any length is quoted by its beginning only."""
    findings = of(schema(enum=["a"]), "b" * 1_000_000)
    assert [len(one.text) for one in findings] == [1000]


def test_nearest_names() -> None:
    """The nearest name is found, and names that are too long to be compared are passed over."""
    assert meant("categroy", ["id", "category"]) == "category"
    assert meant("x" * 1_000_000, ["x" * 1_000_001]) is None
    assert meant("job", ["j" * 5000, "jobs"]) == "jobs"


def test_values_are_told_as_the_file_has_them() -> None:
    """A truth value and null are written as JSON has them, not as Python has."""
    assert broken(True, {"type": "integer"}, {}) == "true is not of type 'integer'"
    assert broken(None, {"type": ["string", "array"]}, {}) == "null is not of type 'string', 'array'"
    assert broken(None, {"enum": ["a"]}, {}) == "null is not one of ['a']"
    assert broken("a", {"type": "integer"}, {}) == "'a' is not of type 'integer'"


def test_an_integer_of_too_many_digits(tmp_path: Path) -> None:
    """A number that Python does not convert is told in our words."""
    path = tmp_path / "cases.jsonl"
    path.write_text('{"id": ' + "1" * 5000 + "}")
    with pytest.raises(BadCases, match=r"cases.jsonl:1 cannot be used: an integer has too many digits$"):
        load(str(path))
