"""What is read out of malformed JSON, and what is said to be wrong with it."""

from __future__ import annotations

import math
from typing import Any

import pytest

from pytest_vram.toolcalls.tolerant import MISSING, double_encoded, parse, runaway, strict

#: Text → what it means, and every kind of defect in it.
TABLE: list[tuple[str, Any, str]] = [
    # brackets
    ('{"job": "backup"', {"job": "backup"}, "missing_bracket"),
    ('{\n  "answer": "Tuesday"\n', {"answer": "Tuesday"}, "missing_bracket"),
    ('{"a": {"b": [1, 2}}', {"a": {"b": [1, 2]}}, "missing_bracket"),
    ('{"a": [1, 2}, "b": 3}', {"a": [1, 2], "b": 3}, "missing_bracket"),
    ('{"a": [1, 2, "b": 3}', {"a": [1, 2], "b": 3}, "missing_bracket"),
    ('{"a": [["x"], ["y", "b": 3}', {"a": [["x"], ["y"]], "b": 3}, "missing_bracket"),
    ('{"a": 1]', {"a": 1}, "missing_bracket"),
    ('[{"a": {"b": 1}, {"a": {}}]', [{"a": {"b": 1}}, {"a": {}}], "missing_bracket"),
    ('{"arguments": "job": "backup"}', {"job": "backup"}, "missing_bracket"),
    ('{"a": 1', {"a": 1}, "missing_bracket"),
    ('{"a":', {}, "missing_bracket"),
    ('{"a": tru', {"a": None}, "missing_bracket"),
    ('{"a": 1.', {"a": None}, "missing_bracket"),
    ('{"a": 1e+', {"a": None}, "missing_bracket"),
    ('[{"a": 1 {"a": 2}]', [{"a": 1}, {"a": 2}], "missing_bracket missing_comma"),
    ('{"a": -', {"a": None}, "missing_bracket"),
    ('{"a": [1, 2,', {"a": [1, 2]}, "missing_bracket"),
    ('{"a": {"b": 1}</tool_call>', {"a": {"b": 1}}, "missing_bracket"),
    ('{"a": 1}}', {"a": 1}, "extra_bracket"),
    ('{"a": 1}\n ] }', {"a": 1}, "extra_bracket"),
    ('{"a": {"b": 1}}, "c": 2}', {"a": {"b": 1}, "c": 2}, "extra_bracket"),
    ('{"a": [{"b": [1]]}]}', {"a": [{"b": [1]}]}, "extra_bracket"),
    ('{"a": 1]}', {"a": 1}, "extra_bracket"),
    ('[["a"]], ["b"]]', [["a"], ["b"]], "extra_bracket"),
    ('{{"a": 1}}', {"a": 1}, "extra_bracket"),
    ('{{"a": 1}', {"a": 1}, "extra_bracket"),
    # commas and colons
    ('{"a": 1 "b": 2}', {"a": 1, "b": 2}, "missing_comma"),
    ('{"a": "x" "b": "y"}', {"a": "x", "b": "y"}, "missing_comma"),
    ('{"a": """b": "y"}', {"a": "", "b": "y"}, "missing_comma"),
    ('["a" "b" 1 2 null true {} []]', ["a", "b", 1, 2, None, True, {}, []], "missing_comma"),
    ('{"a" 1, "b" = 2, "c" => 3, "d"}', {"a": 1, "b": 2, "c": 3, "d": None}, "missing_comma"),
    ('{"a": , "b": }', {"a": None, "b": None}, "missing_comma"),
    ('["a" true, "b" null]', ["a", True, "b", None], "missing_comma"),
    ('{"a": "b" c: 1, "d": "e"}', {"a": "b", "c": 1, "d": "e"}, "missing_comma unquoted_key"),
    ('[{"b": "c"}: ["d"]]', [{"b": "c"}, ["d"]], "missing_comma"),
    ('{"a": "b"; "c": 2}', {"a": "b", "c": 2}, "missing_comma"),
    ('{"a":: 1}', {"a": 1}, "missing_comma"),
    ('["a": 1]', ["a", 1], "missing_comma"),
    ('{"a": 1,}', {"a": 1}, "trailing_comma"),
    ('{"a": [1, 2, ], }', {"a": [1, 2]}, "trailing_comma"),
    ('{"a": 1,, "b": 2}', {"a": 1, "b": 2}, "trailing_comma"),
    ("[, 1]", [1], "trailing_comma"),
    # quotes
    ("{'a': 'b', 'c': 'it\\'s'}", {"a": "b", "c": "it's"}, "single_quotes"),
    ("{'a': 'say \"no\"'}", {"a": 'say "no"'}, "single_quotes"),
    ("{“a”: “b”, „c“: ‘d’, `e`: «f»}", {"a": "b", "c": "d", "e": "f"}, "single_quotes"),
    ('{"a": """b\n"c" d"""}', {"a": 'b\n"c" d'}, "single_quotes"),
    ("{'a': 'it's here'}", {"a": "it's here"}, "single_quotes unterminated_string"),
    ("{a: 1, b_2: 2, 3: 4}", {"a": 1, "b_2": 2, "3": 4}, "unquoted_key"),
    ("{city: New York, when: now}", {"city": "New York", "when": "now"}, "unquoted_key"),
    ('{"a": 5 MB, "b": [x, y z]}', {"a": "5 MB", "b": ["x", "y z"]}, "unquoted_key"),
    ('{"a": True, "b": False, "c": None, "d": undefined}', {"a": True, "b": False, "c": None, "d": None}, "unquoted_key"),
    ('{"a": 01, "b": +1, "c": .5, "d": 2., "e": 0x1F, "f": 1_000}', {"a": 1, "b": 1, "c": 0.5, "d": 2.0, "e": 31, "f": 1000}, "unquoted_key"),
    ('{"a": /* why */ 1, // because\n "b": 2 # so\n}', {"a": 1, "b": 2}, "unquoted_key"),
    ('{"day": 2024-01-31, "at": 10:30, "to": <path>, "at": 50%}', {"day": "2024-01-31", "at": "50%", "to": "<path>"}, "unquoted_key duplicate_key"),
    ('{"a": http://x.y/z?q=1, "b": 1.2.3}', {"a": "http://x.y/z?q=1", "b": "1.2.3"}, "unquoted_key"),
    # strings
    ('{"a": "cut he', {"a": "cut he"}, "unterminated_string missing_bracket"),
    ('{"code": "import os\\n\\ndef f():\\n    \\"\\"', {"code": 'import os\n\ndef f():\n    ""'}, "unterminated_string missing_bracket"),
    ('{"a": "cut \\', {"a": "cut "}, "unterminated_string missing_bracket"),
    ('{"a": "cut \\u00', {"a": "cut "}, "unterminated_string missing_bracket"),
    ('{"a": {"b": "lost}}', {"a": {"b": "lost"}}, "unterminated_string"),
    ('{"a": {"b": "lost}}\n</tool_call>', {"a": {"b": "lost"}}, "unterminated_string"),
    ('{"a": "lost, "b": 1}', {"a": "lost", "b": 1}, "unterminated_string"),
    ('{"a": "lost,\n  "b": "found"}', {"a": "lost", "b": "found"}, "unterminated_string"),
    ('{"a": "he said "no" to it", "b": 1}', {"a": 'he said "no" to it', "b": 1}, "unterminated_string"),
    ('{"a": "he said "no""}', {"a": 'he said "no"'}, "unterminated_string"),
    ('{"a": "one\ntwo\tthree"}', {"a": "one\ntwo\tthree"}, "unterminated_string"),
    ('{"a": "he said "no", and left", "b": 1}', {"a": 'he said "no", and left', "b": 1}, "unterminated_string"),
    ('["he said "no", and left", 2]', ['he said "no", and left', 2], "unterminated_string"),
    ('{"q": "SELECT "id", "name" FROM "t" WHERE "x" = 1", "n": 2}', {"q": 'SELECT "id", "name" FROM "t" WHERE "x" = 1', "n": 2}, "unterminated_string"),
    ('{"a": "<a href="x">y</a>"}', {"a": '<a href="x">y</a>'}, "unterminated_string"),
    ('{"a": "x" - "y" + "z"}', {"a": 'x" - "y" + "z'}, "unterminated_string"),
    ('{"name": "f", "arguments": "{"path": "x", "n": [1]}", "id": 1}', {"name": "f", "arguments": {"path": "x", "n": [1]}, "id": 1}, "double_encoded"),
    ('{"calls": "[{"name": "f"}]"}', {"calls": [{"name": "f"}]}, "double_encoded"),
    # escapes
    ('{"query": \\\\"disk full\\\\"}', {"query": "disk full"}, "over_escaped"),
    ('{\\"a\\": \\"say \\\\\\"no\\\\\\"\\", \\"b\\": 2}', {"a": 'say "no"', "b": 2}, "over_escaped"),
    ('{\\n  \\"a\\": \\"C:\\\\\\\\x\\"\\n}', {"a": "C:\\x"}, "over_escaped"),
    ('{\\"a\\": \\"cut \\\\\\"he', {"a": 'cut "he'}, "over_escaped unterminated_string missing_bracket"),
    ('{"a": \\"b"}', {"a": "b"}, "over_escaped"),
    ('{"a": "^\\d+$"}', {"a": "^\\d+$"}, "over_escaped"),
    ('{"a": "it\\\'s \\x41"}', {"a": "it's A"}, "over_escaped"),
    ('{"a": "\\ud83d\\ude00 \\ud83d"}', {"a": "\U0001f600 \ufffd"}, "over_escaped"),
    # keys and numbers
    ('{"a": 1, "b": 2, "a": 3}', {"a": 3, "b": 2}, "duplicate_key"),
    ('{"a": {"x": 1, "x": 1}}', {"a": {"x": 1}}, "duplicate_key"),
    ('{"a": Infinity, "b": -Infinity, "c": 1e400, "d": inf}', {"a": math.inf, "b": -math.inf, "c": math.inf, "d": math.inf}, "non_finite_number"),
    ('{"a": ' + "9" * 400 + "}", {"a": math.inf}, "non_finite_number"),
    # what is none of it
    ('{"a": 1<|im_end|>}', {"a": 1}, "leaked_token"),
    ('{</s>"a": <|eot_id|>[1, <end_of_turn>2]}', {"a": [1, 2]}, "leaked_token"),
    ('{"a": "b<|im_end|>', {"a": "b"}, "leaked_token unterminated_string missing_bracket"),
    ('{"a": <|"|>b<|"|>}', {"a": "b"}, "leaked_token"),
    ('\ufeff{"a":\u00a01}', {"a": 1}, "leaked_token"),
    ('{"a": 1,' + "\t" * 100, {"a": 1}, "runaway missing_bracket"),
    ('{"a": "x' + " no" * 100, {"a": "x" + " no" * 100}, "runaway unterminated_string missing_bracket"),
    ('{"a": 1}' + "}" * 300, {"a": 1}, "runaway extra_bracket"),
    # several at once
    ("{'a': True, b: 'c',}", {"a": True, "b": "c"}, "single_quotes unquoted_key trailing_comma"),
    ('{"a": [1 2, "b": NaN1', {"a": [1, 2], "b": "NaN1"}, "missing_bracket missing_comma unquoted_key"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "value", "kinds"), TABLE)
def test_what_is_meant_and_what_is_wrong(text: str, value: Any, kinds: str) -> None:
    """A malformed text means what a person reads in it, and has exactly these defects."""
    parsed = parse(text)
    assert parsed is not None
    assert parsed.value == value
    assert {defect.kind for defect in parsed.defects} == set(kinds.split())
    assert list(parsed.defects) == sorted(parsed.defects, key=lambda defect: defect.at)
    with pytest.raises(ValueError):
        strict(text)


@pytest.mark.parametrize(
    ("text", "end"),
    [
        ('{"a": 1} and more', 8), ('{"a": 1}\n</tool_call>', 8), ('{"a": 1} {"b": 2}', 8), ('{"a": 1}, {"b": 2}', 8), ('{"a": 1}]', 9), ('{"a": 1} }\n}', 12),
        ('{"a": 1}```', 8), ('{"a": 1```', 7), ('{"a": "b</tool_call>', 8), ("[1], and", 3), ("[1], [2]", 8), ("[1], [2", 3), ('"a" is', 3), ("12, 13", 2), ('{"a": 1,\n', 9),
    ],
)  # fmt: skip
def test_text_after_the_value_is_left_alone(text: str, end: int) -> None:
    """The end of a value is where it was closed, with brackets that are too many, or where what holds it ends."""
    parsed = parse(text)
    assert parsed is not None
    assert parsed.end == end


def test_brackets_of_what_the_value_stands_in_are_left_alone() -> None:
    """Within something else that has brackets, those after the value are no defect of it."""
    for text in ('{"a": 1}]}', '{"a": 1}, "b": 2}'):
        assert parse(text, within=True) == ({"a": 1}, (), 8)
    parsed = parse("call({'a': 1})]", 5, within=True)
    assert parsed is not None
    assert (parsed.value, parsed.end) == ({"a": 1}, 13)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "  \n",
        "Hello",
        "}",
        "]",
        ",",
        ":",
        "<tool_call>",
        "```json",
        "- item",
        "nullify",
        "Truest",
        "infinitely",
        "# no",
        "(1)",
    ],
)
def test_where_no_value_begins_there_is_none(text: str) -> None:
    """Prose, tags and stray punctuation are no value, and nothing is said about them."""
    assert parse(text) is None
    with pytest.raises(ValueError, match="no JSON|empty"):
        strict(text)


def test_details_name_what_a_person_looks_for() -> None:
    """A detail names the place, the key or the text, on one line."""

    def detail(text: str) -> str:
        parsed = parse(text)
        assert parsed is not None
        return parsed.defects[0].detail

    assert detail('{"a": {"b": 1}') == "the object that begins at character 1 is never closed"
    assert detail('{"a": [1}') == "the array that begins at character 7 is not closed before }"
    assert detail('{"job": 1, "job": 2}') == 'the key "job" is there twice'
    assert detail('{"job": "x\x1b[2Jy') == "the object that begins at character 1 is never closed"
    assert detail("{\x1b[2Jab: 1}").isprintable()
    assert detail('{"a": "^\\d"}') == 'JSON has no escape "\\d"; a backslash itself is written twice'
    assert len(detail('{"a": ' + "x" * 10_000 + "}")) < 120


def test_only_the_first_ten_of_a_kind_are_told() -> None:
    """A text with the same defect everywhere has ten of them, and still the others."""
    parsed = parse("[" + "'x', " * 50 + "]")
    assert parsed is not None
    assert [defect.kind for defect in parsed.defects] == ["single_quotes"] * 10 + ["trailing_comma"]
    assert parsed.value == ["x"] * 50


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ('{"a": NaN}', "NaN"), ('{"a": 1, "a": 2}', "twice"), ('{"a": 1} x', "after the JSON"), ('{"a": "\\ud800"}', "surrogate"), ("[" * 5000, "nested"),
        ("1e999", "larger"), ('"open', "never closed"), ("hello", "no JSON"), (" ", "empty"), ('{"a": 1}}', "too many"),
    ],
)  # fmt: skip
def test_strict_names_what_is_wrong(text: str, word: str) -> None:
    """What most readers let pass is refused, with what is wrong."""
    with pytest.raises(ValueError, match=word):
        strict(text)


def test_strict_reads_what_is_json() -> None:
    """Scalars, white space around the value and long integers are JSON."""
    assert strict(' {"a": [1, -0.5e3, "\\ud83d\\ude00"]}\r\n') == {"a": [1, -500.0, "\U0001f600"]}
    assert [strict(text) for text in ("true", "null", '""', "-0", "0.0")] == [True, None, "", 0, 0.0]
    assert strict("1" * 300) == int("1" * 300)


@pytest.mark.parametrize(
    ("value", "inner"),
    [
        ('{"a": 1}', {"a": 1}), (' [1, {"a": "}"}]\n', [1, {"a": "}"}]), ('"{\\"a\\": 1}"', {"a": 1}), ("{'a': 1}", {"a": 1}), ('{"a": 1', {"a": 1}), ("[]", []),
        ('{"a": 1} and', MISSING), ("plain", MISSING), ("", MISSING), ('"plain"', MISSING), (7, MISSING), (None, MISSING), ({"a": 1}, MISSING),
    ],
)  # fmt: skip
def test_what_a_string_holds_as_json(value: Any, inner: Any) -> None:
    """An object or a list that was encoded once more is found, well-formed or not; other strings are themselves."""
    assert double_encoded(value) == inner if inner is not MISSING else double_encoded(value) is MISSING


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("a" + " " * 64, False), ("a" + " " * 65, True), ("a" + "\n\t" * 40, True), ("-" * 200, False), ("-" * 201, True), ("ab" * 100, False), ("ab" * 101, True),
        ("no more " * 20, False), ("no more " * 30, True), ("x" * 10 + "0123456789" * 20, False), ("0123456789" * 21, True), ("".join(map(str, range(500))), False),
        ("the same long sentence again, of some sixty characters or so. " * 21, True), ("the same long sentence again, of some sixty characters or so. " * 20, False), ("", False),
    ],
)  # fmt: skip
def test_repetition_at_the_end(text: str, found: bool) -> None:
    """More than 64 characters of white space, or a cycle more than 20 times and of more than 200 characters."""
    assert (runaway(text) is not None) == found


def test_where_a_repetition_begins() -> None:
    """The offset of the first cycle, not before where it was asked from."""
    text = "an answer: " + "ha" * 500
    found = runaway(text)
    assert found is not None
    assert (found.at, found.detail) == (11, 'the text ends in "ha", 500 times in a row')
    spaces = runaway("an answer: " + "\n\t" * 500)
    assert spaces is not None
    assert (spaces.at, spaces.detail) == (10, "the text ends in 1,001 characters of white space")
    later = runaway(text, 100)
    assert later is not None
    assert later.at in (100, 101)
    assert runaway(text, len(text) - 100) is None


def test_pieces_of_a_text_stand_in_quotes_that_they_do_not_have() -> None:
    """What is quoted from an answer can be told from the quotes around it, and a foreign word from the one of JSON."""
    parsed = parse('{"a": 1 "b": None}')
    assert parsed is not None
    assert [defect.detail for defect in parsed.defects] == [
        "a comma is missing before '\"b\": None}'",
        "None is no word of JSON, which has null",
    ]
