"""Calls are held against schemas and against the calls that are right."""

from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_vram.toolcalls.cases import ExpectedCall, Tool
from pytest_vram.toolcalls.names import distance, nearest
from pytest_vram.toolcalls.scoring import against_schema, assignment, match
from pytest_vram.toolcalls.values import folded, same, shown

ROTATE = Tool(
    name="rotate_archive",
    description="Rotates an archive.",
    parameters={
        "type": "object",
        "properties": {
            "archive": {"type": "string"},
            "keep": {"type": "integer", "minimum": 1, "maximum": 90},
            "ratio": {"type": "number"},
            "mode": {"type": "string", "enum": ["copy", "move"]},
            "dry_run": {"type": "boolean", "default": False},
            "hosts": {"type": "array", "items": {"type": "string"}},
            "filter": {
                "type": "object",
                "properties": {"level": {"type": "string"}, "since": {"type": "string"}},
                "required": ["level"],
            },
        },
        "required": ["archive"],
    },
)
LIST = Tool(name="archives", description="Lists archives.", parameters={"type": "object", "properties": {}})
TOOLS = [ROTATE, LIST]


def kinds(arguments: Any, name: str | None = "rotate_archive", tools: list[Tool] = TOOLS) -> list[str]:
    return [defect.kind for defect in against_schema(name, arguments, tools)]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"archive": "a"}, []),
        ({"archive": "a", "keep": 3, "ratio": 2, "mode": "copy", "dry_run": True, "hosts": ["x"], "filter": {"level": "x"}}, []),
        ({}, ["missing_field"]),
        (None, ["missing_field"]),
        ([1], ["wrong_type"]),
        ("archive", ["wrong_type"]),
        ({"archive": 3}, ["wrong_type"]),
        ({"archive": None}, ["wrong_type"]),
        ({"archive": "a", "keep": "3"}, ["wrong_type"]),
        ({"archive": "a", "keep": True}, ["wrong_type"]),
        ({"archive": "a", "keep": 3.0}, ["wrong_type"]),
        ({"archive": "a", "dry_run": 1}, ["wrong_type"]),
        ({"archive": "a", "dry_run": "true"}, ["wrong_type"]),
        ({"archive": "a", "keep": 0}, ["wrong_value"]),
        ({"archive": "a", "keep": 91}, ["wrong_value"]),
        ({"archive": "a", "mode": "Copy"}, ["wrong_value"]),
        ({"archive": "a", "mode": 3}, ["wrong_type"]),
        ({"archive": "a", "hosts": ["x", 3]}, ["wrong_type"]),
        ({"archive": "a", "hosts": "x"}, ["wrong_type"]),
        ({"archive": "a", "filter": {}}, ["missing_field"]),
        ({"archive": "a", "filter": {"levle": "x"}}, ["misspelt_field"]),
        ({"archive": "a", "filter": {"level": "x", "colour": "red"}}, ["extra_field"]),
        ({"archive": "a", "colour": "red"}, ["extra_field"]),
        ({"archvie": "a"}, ["misspelt_field"]),
        ({"archiv": "a"}, ["misspelt_field"]),
        ({"Archive": "a"}, ["misspelt_field"]),
        ({"archive": "a", "dryRun": True}, ["misspelt_field"]),
        ({"archive": "a", "dry-run": True}, ["misspelt_field"]),
        ({"archive": "a", "archvie": "b"}, ["extra_field"]),
        ({"path": "a"}, ["missing_field", "extra_field"]),
        ({"archvie": 3}, ["misspelt_field", "wrong_type"]),
    ],
)  # fmt: skip
def test_arguments_are_held_against_their_schema(arguments: Any, expected: list[str]) -> None:
    """Types are exact, a slip of a name is neither a missing nor an extra field, and nested objects count."""
    assert kinds(arguments) == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("rotate_archive", []),
        ("rotate_archiv", ["near_miss_tool"]),
        ("rotate_arhcive", ["near_miss_tool"]),
        ("rotate_archives", ["near_miss_tool"]),
        ("rotateArchive", ["near_miss_tool"]),
        ("rotate-archive", ["near_miss_tool"]),
        ("functions.rotate_archive", ["near_miss_tool"]),
        ("ROTATE_ARCHIVE", ["near_miss_tool"]),
        ("rotate", ["invented_tool"]),
        ("delete_archive", ["invented_tool"]),
        ("", ["invented_tool"]),
        (None, ["invented_tool"]),
        ("x" * 100_000, ["invented_tool"]),
    ],
)
def test_a_name_that_is_not_offered_is_a_slip_or_invented(name: str | None, expected: list[str]) -> None:
    """One or two letters, capitals, separators and a prefix make a slip; other words make an invented tool."""
    assert kinds({"archive": "a"}, name) == expected


def test_arguments_of_a_slip_are_judged_by_the_tool_that_was_meant() -> None:
    """Both are told at once."""
    assert kinds({"archive": 3}, "rotate_archiv") == ["near_miss_tool", "wrong_type"]
    assert kinds({"archive": 3}, "delete_archive") == ["invented_tool"]


def test_details_name_the_place_and_the_value() -> None:
    """A message is enough to know what the model did."""
    (defect,) = against_schema("rotate_archive", {"archive": "a", "filter": {"level": 3}}, TOOLS)
    assert defect.detail == "filter.level is 3, an integer, not a string"
    (defect,) = against_schema("rotate_archive", {"archive": "a", "mode": "swap\x1b[2J"}, TOOLS)
    assert defect.detail == "mode is 'swap\\x1b[2J', which is none of 'copy', 'move'"


@pytest.mark.parametrize(
    ("schema", "value", "expected"),
    [
        ({"type": "int"}, 3, []),
        ({"type": "int"}, "3", ["wrong_type"]),
        ({"type": "float"}, 3, []),
        ({"type": "dict"}, {"x": 1}, []),
        ({"type": "dict"}, [], ["wrong_type"]),
        ({"type": "tuple"}, [1], []),
        ({"type": "any"}, [1], []),
        ({"type": "STRING"}, 3, ["wrong_type"]),
        ({"type": 7}, 3, []),
        ("string", 3, []),
        (None, 3, []),
        ({"type": ["string", "null"]}, None, []),
        ({"type": ["string", "null"]}, 3, ["wrong_type"]),
        ({"type": "string", "nullable": True}, None, []),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, None, []),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, 3, ["wrong_type"]),
        ({"oneOf": [{"type": "string"}, {"type": "object", "required": ["a"]}]}, {}, ["missing_field"]),
        ({"allOf": [{"minimum": 1}, {"maximum": 3}]}, 4, ["wrong_value"]),
        ({"$ref": "#/$defs/count"}, "x", ["wrong_type"]),
        ({"$ref": "#/$defs/loop"}, {"inner": {"inner": {"inner": 3}}}, ["wrong_type"]),
        ({"$ref": "#/$defs/itself"}, 3, []),
        ({"$ref": "#/nowhere"}, 3, []),
        ({"const": "x"}, "y", ["wrong_value"]),
        ({"enum": [1, 2]}, 1.0, []),
        ({"enum": [1, 2]}, True, ["wrong_value"]),
        ({"type": "string", "pattern": "^[a-z]+$"}, "A", ["wrong_value"]),
        ({"type": "string", "pattern": "^(a+)+$"}, "a" * 200 + "!", []),
        ({"type": "string", "pattern": "("}, "A", []),
        ({"type": "string", "minLength": 2}, "A", ["wrong_value"]),
        ({"type": "array", "maxItems": 1}, [1, 2], ["wrong_value"]),
        ({"type": "array", "prefixItems": [{"type": "string"}], "items": {"type": "integer"}}, ["a", 1, "b"], ["wrong_type"]),
        ({"type": "integer", "multipleOf": 5}, 7, ["wrong_value"]),
        ({"type": "integer", "exclusiveMinimum": 5}, 5, ["wrong_value"]),
        ({"type": "object"}, {"free": 1}, []),
        ({"type": "object", "additionalProperties": {"type": "integer"}}, {"free": "x"}, ["wrong_type"]),
        ({"type": "object", "properties": {}, "additionalProperties": True}, {"free": "x"}, []),
        ({"type": "object", "properties": {}, "patternProperties": {"^x-": {}}}, {"x-a": 1, "y": 1}, ["extra_field"]),
        ({"type": "object", "additionalProperties": False}, {"free": "x"}, ["extra_field"]),
    ],
)  # fmt: skip
def test_schemas_of_every_shape_are_judged_and_none_raises(schema: Any, value: Any, expected: list[str]) -> None:
    """Types of other languages are read as meant; what is no schema, or cannot be told in time, judges nothing."""
    defs = {
        "count": {"type": "integer"},
        "loop": {"type": "object", "properties": {"inner": {"$ref": "#/$defs/loop"}}},
        "itself": {"$ref": "#/$defs/itself"},
    }
    tool = Tool(name="t", description="", parameters={"type": "object", "properties": {"v": schema}, "$defs": defs})
    assert kinds({"v": value}, "t", [tool]) == expected


def test_a_schema_that_branches_without_end_is_judged_in_bounded_time() -> None:
    """Branches that refer to themselves twice would be looked at 2^60 times."""
    branch = {"type": "object", "properties": {"a": {"$ref": "#/$defs/t"}}, "required": ["b"]}
    parameters = {"properties": {"v": {"$ref": "#/$defs/t"}}, "$defs": {"t": {"anyOf": [branch, branch, branch]}}}
    value: Any = {}
    for _ in range(60):
        value = {"a": value}
    started = time.process_time()
    kinds({"v": value}, "t", [Tool(name="t", description="", parameters=parameters)])
    assert time.process_time() - started < 20


@pytest.mark.parametrize(
    ("left", "right", "equal"),
    [
        ("Backup", "backup", True),
        ("  backup\n job ", "backup job", True),
        ("backup_job", "backup-job", False),
        ("backup_job", "backup job", False),
        ("'backup'", "backup", False),
        ("“backup”", "backup", False),
        ("backup.", "backup", False),
        ("The backup is done.", "the backup is done", True),
        ("kept 2.", "kept 2", False),
        ("UTC-5", "UTC 5", False),
        ("rm -rf", "rm rf", False),
        ("", "", True),
        (" ", "", False),
        ("", "\n", False),
        ("10²", "102", False),
        (" ", "x", False),
        (".", "", False),
        ("u\u0308ber", "über", True),
        ("ﬁle", "file", True),
        ("１０", "10", False),
        ("STRASSE", "straße", True),
        ("1.5", "15", False),
        ("a,b", "ab", False),
        ("-5", "5", False),
        ("--force", "force", False),
        ("job-1", "job1", False),
        ("5.0", "5", False),
        ("backup!", "backup", False),
        ("", "backup", False),
        ("backup" * 100_000, "backup", False),
        (5, 5.0, True),
        (1.5, 15, False),
        (True, 1, False),
        (0, False, False),
        ("5", 5, False),
        (None, None, True),
        (None, "", False),
        ([1, 2], [1, 2], True),
        ([2, 1], [1, 2], False),
        ([1], [1, 1], False),
        (["A"], ["a"], True),
        ({"a": [1, {"b": "X"}]}, {"a": [1, {"b": "x"}]}, True),
        ({"a": 1, "b": 2}, {"a": 1}, False),
        ({"a": 1}, {"a": 1, "b": 2}, False),
        (float("nan"), 5, False),
        (10**400, 10**400, True),
    ],
)  # fmt: skip
def test_values_are_compared_by_what_they_mean(left: Any, right: Any, equal: bool) -> None:
    """Numbers as numbers, texts folded but for their inner punctuation, lists in order, objects by key."""
    assert same(left, right) is equal


def test_an_argument_may_be_left_out_only_where_the_case_says_so() -> None:
    """Also one that the tool itself does not require."""
    expected = ExpectedCall(name="rotate_archive", arguments={"archive": ["mail"], "keep": [7]})
    (defect,) = match([("rotate_archive", {"archive": "mail"})], [expected], TOOLS).defects
    assert (defect.kind, defect.detail) == ("missing_field", "keep is missing")


def test_exact_texts_are_compared_to_the_letter() -> None:
    """Paths, patterns and queries are named so by their case."""
    expected = ExpectedCall(name="rotate_archive", arguments={"archive": ["/srv/A_b.tar"]}, exact=["archive"])
    assert not match([("rotate_archive", {"archive": "/srv/A_b.tar"})], [expected], TOOLS).defects
    assert match([("rotate_archive", {"archive": "/srv/a-b.tar"})], [expected], TOOLS).defects


RIGHT = ExpectedCall(
    name="rotate_archive",
    arguments={"archive": ["mail", "mailbox"], "keep": [7], "filter": [{"level": "full"}]},
    omittable=["keep", "filter"],
)


@pytest.mark.parametrize(
    ("calls", "expected"),
    [
        ([("rotate_archive", {"archive": "Mail"})], []),
        ([("rotate_archive", {"archive": "mail", "keep": 7})], []),
        ([("rotate_archive", {"archive": "mail", "keep": 8})], ["wrong_value"]),
        ([("rotate_archive", {"archive": "mail", "keep": "7"})], ["wrong_type"]),
        ([("rotate_archive", {"archive": "post"})], ["wrong_value"]),
        ([("rotate_archive", {"keep": 7})], ["missing_field"]),
        ([("rotate_archive", {"archive": "mail", "dry_run": False})], []),
        ([("rotate_archive", {"archive": "mail", "dry_run": True})], ["wrong_value"]),
        ([("rotate_archive", {"archive": "mail", "filter": {"level": "FULL"}})], []),
        ([("rotate_archive", {"archive": "mail", "filter": {"level": "part"}})], ["wrong_value"]),
        ([("rotate_archive", {"archvie": "mail"})], ["misspelt_field"]),
        ([("rotate_archive", {"archvie": "post"})], ["misspelt_field", "wrong_value"]),
        ([("rotate_archiv", {"archive": "mail"})], ["near_miss_tool"]),
        ([("remove", {"archive": "mail"})], ["invented_tool"]),
        ([("archives", {})], ["extra_call"]),
        ([], ["no_call"]),
        ([("rotate_archive", {"archive": "mail"})] * 2, ["extra_call"]),
        ([("rotate_archive", {"archive": "mail"}), ("archives", {})], ["extra_call"]),
        ([("rotate_archive", {"archive": "mail"}), ("remove", {})], ["invented_tool"]),
    ],
)  # fmt: skip
def test_one_expected_call(calls: list[tuple[str, Any]], expected: list[str]) -> None:
    """Every listed value is right, an optional argument may be left out where the case says so, and nothing is added."""
    assert [defect.kind for defect in match(calls, [RIGHT], TOOLS).defects] == expected


def test_a_detail_says_what_would_be_right() -> None:
    """As do those of nested values and of another tool."""
    said = [
        match([call], [RIGHT], TOOLS).defects[0].detail
        for call in [
            ("rotate_archive", {"archive": "post"}),
            ("rotate_archive", {"archive": "mail", "filter": {"level": "part"}}),
            ("archives", {}),
        ]
    ]
    assert said == [
        "archive is 'post', right would be 'mail' or 'mailbox'",
        "filter.level is 'part', right would be 'full'",
        "'archives' is called, right would be a call of 'rotate_archive'",
    ]


def test_where_no_tool_fits_every_call_is_irrelevant() -> None:
    """Also one of a tool that is not offered; no call is right."""
    assert [one.kind for one in match([("archives", {})], [], TOOLS).defects] == ["irrelevant_call"]
    assert [one.kind for one in match([("remove", {})], [], TOOLS).defects] == ["invented_tool", "irrelevant_call"]
    assert match([], [], TOOLS).defects == ()


def test_calls_may_come_in_any_order_and_each_takes_the_one_that_it_fits() -> None:
    """A greedy matching would give the first call to the first expected one and find two defects."""
    expected = [
        ExpectedCall(name="rotate_archive", arguments={"archive": ["a", "b"], "keep": [1, 2]}, omittable=["keep"]),
        ExpectedCall(name="rotate_archive", arguments={"archive": ["a"], "keep": [1]}),
    ]
    calls = [("rotate_archive", {"archive": "a", "keep": 1}), ("rotate_archive", {"archive": "b", "keep": 2})]
    for ordered in (calls, calls[::-1]):
        found = match(ordered, expected, TOOLS)
        assert found.defects == ()
        assert (
            sorted(found.pairs) == [(0, ordered.index(calls[1])), (1, ordered.index(calls[0]))] or len(found.pairs) == 2
        )


def test_thousands_of_calls_are_matched_in_bounded_time() -> None:
    """Beyond what an exact matching can do in time it is greedy, and says so."""
    expected = [ExpectedCall(name="rotate_archive", arguments={"archive": [f"a{i}"]}) for i in range(100)]
    calls = [("rotate_archive", {"archive": f"a{i}"}) for i in reversed(range(300))]
    found = match(calls, expected, TOOLS)
    assert len(found.pairs) == 100
    assert "too many calls" in found.note
    assert {defect.kind for defect in found.defects} == {"extra_call"}


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 7).flatmap(lambda wide: st.lists(st.lists(st.integers(0, 9), min_size=wide, max_size=wide), min_size=1, max_size=7)))  # fmt: skip
def test_the_assignment_is_the_cheapest(costs: list[list[int]]) -> None:
    """It costs what scipy's costs, and pairs as many as there can be."""
    from scipy.optimize import linear_sum_assignment

    found = assignment(costs)
    rows, columns = linear_sum_assignment(costs)
    assert len({row for row, _ in found}) == len({column for _, column in found}) == len(rows)
    assert sum(costs[r][c] for r, c in found) == sum(costs[r][c] for r, c in zip(rows, columns, strict=True))


def test_distances_are_those_of_the_textbook() -> None:
    """A swap is one step; what is farther than asked is not computed."""
    assert [
        distance(*pair, 3) for pair in [("ab", "ba"), ("kitten", "sitting"), ("a", ""), ("", ""), ("abcd", "wxyz")]
    ] == [1, 3, 1, 0, 4]
    assert nearest("ab", ["ax"]) is None  # of two letters one is half of the name
    assert nearest("lines", ["lanes", "line"]) == "lanes"


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=12,
)


@given(json_values, json_values)
def test_nothing_that_a_model_writes_or_a_schema_says_raises(value: Any, schema: Any) -> None:
    """Arguments and schemas of any shape give defects, with one printable line each."""
    tool = Tool(name="t", description="", parameters={"properties": {"v": schema}})
    for arguments in (value, {"v": value}):
        for defect in [
            *against_schema("t", arguments, [tool]),
            *match([("t", arguments)], [ExpectedCall(name="t", arguments={"v": [schema]})], [tool]).defects,
        ]:
            assert defect.detail.isprintable()
            assert len(defect.detail) < 4500


@given(st.text())
def test_folding_a_folded_text_changes_nothing_more_than_its_end(text: str) -> None:
    """A text is always equal to itself, and what is shown of it is one bounded line."""
    assert same(text, text)
    assert folded(text) == folded(text.strip())
    assert len(shown(text)) < 700


def test_null_is_told_once() -> None:
    """A value that is its own type is not told twice."""
    tool = Tool(name="t", description="", parameters={"type": "object", "properties": {"days": {"type": "integer"}}})
    details = [one.detail for one in against_schema("t", {"days": None}, [tool])]
    assert details == ["days is null, not an integer"]
