"""Any text can be read, and has a defect exactly where it is not JSON to the letter."""

from __future__ import annotations

import json
import math
import random
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pytest_vram.toolcalls.diagnosis import KINDS
from pytest_vram.toolcalls.scalars import MAX_DEPTH, MAX_VALUES
from pytest_vram.toolcalls.tolerant import parse, read_tolerantly, strict

NASTY = (
    "def f(x):\n    return {'a': [1, 2}, \"b\")", 'if (a[0] == "}") { b("]"); }', "</tool_call>", "<tool_call>{", '<|"|>', "<|im_end|>",
    "</s>", "<think>no</think>", '{"name": "x", "arguments": {}}', '{"a": [1, 2', "```json\n{}\n```", "C:\\new\\temp\\", "\\", '\\"', '"', "'",
    "it's", "“quoted”", "NaN", "[TOOL_CALLS]", "a,b,,c,", ",}", "{{}}", "\ud83d\ude00".encode("utf-16", "surrogatepass").decode("utf-16"), "\u2028",
    "\t\n\r\b\f", "\x00", "// no comment", "/* nor this */", "# nor that", "true", "ÿ" * 50, " " * 300, "ab" * 300, "}" * 300, "<｜end▁of▁sentence｜>", "\\u12",
    "SELECT * FROM t WHERE a = \"b\" AND c LIKE '%d%';", '<a href="x">y</a>', "^\\d+(\\.\\d+)?$", "[INST]", "\ufeff", "1e999", "", " ",
)  # fmt: skip

texts = st.one_of(
    st.text(max_size=30), st.sampled_from(NASTY), st.text(alphabet="{}[]\",:'\\ \n<|>`/#nut01", max_size=40)
)
scalars = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), texts)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=5) | st.dictionaries(texts, inner, max_size=5), max_leaves=20
)
styles = st.sampled_from(
    ({}, {"indent": 2}, {"indent": "\t"}, {"separators": (",", ":")}, {"ensure_ascii": False}, {"indent": 120})
)
#: Pieces of JSON and of what goes wrong in it, so that random texts are near to JSON.
pieces = st.sampled_from((
    "{", "}", "[", "]", ",", ":", '"', "'", "\\", '\\"', "\\\\", "\n", " ", "a", "1", "-", ".", "e", "0", "true", "null", "None", "NaN", '"a"', '"b":', "'c'", "d:",
    '"""', "“", "”", "`", "```", "<|im_end|>", "</s>", "</tool_call>", '<|"|>', "//", "/*", "*/", "#", "=", "\\n", "\\u00", "\\ud800", "\x00", "\u00a0", "\ud800", "1e999", "é",
))  # fmt: skip


def letter(text: str) -> Any:
    """The value of a text that is JSON to the letter, by the standard library alone; :raises ValueError:."""

    def pairs(found: list[tuple[str, Any]]) -> dict[str, Any]:
        if len({key for key, _ in found}) != len(found):
            raise ValueError("a key is there twice")
        return dict(found)

    def number(digits: str) -> float:
        if math.isinf(float(digits)):
            raise ValueError("too large")
        return float(digits) if set(digits) & set(".eE") else int(digits)

    def constant(name: str) -> Any:
        raise ValueError(name)

    value = json.loads(text, object_pairs_hook=pairs, parse_constant=constant, parse_float=number, parse_int=number)
    json.dumps(value, ensure_ascii=False).encode()  # UnicodeEncodeError is a ValueError
    return value


def same(left: Any, right: Any) -> bool:
    return json.dumps(left, sort_keys=True) == json.dumps(right, sort_keys=True)


def sound(text: str) -> None:
    """Both readers read the text, agree with the standard library on whether it is JSON, and name known kinds."""
    try:
        expected, is_json = letter(text), True
    except ValueError:
        expected, is_json = None, False
    parsed = parse(text)
    if parsed is None:
        assert not is_json
        return
    assert 0 < parsed.end <= len(text)
    assert {defect.kind for defect in parsed.defects} <= set(KINDS[1:])
    assert all(0 <= defect.at <= len(text) and 0 < len(defect.detail) < 400 for defect in parsed.defects)
    assert all(defect.detail.isprintable() for defect in parsed.defects)
    json.dumps(parsed.value, ensure_ascii=False).encode()
    whole = not parsed.defects and not text[parsed.end :].strip(" \t\n\r")
    assert whole == is_json
    begin = len(text) - len(text.lstrip(" \t\n\r"))
    slowly = read_tolerantly(text, begin)
    if text[begin] in "{[":  # what follows a number or a word on its own is read with it by one of them
        assert bool(slowly.defects) == bool(parsed.defects)
        assert slowly.end == parsed.end
        assert same(slowly.value, parsed.value)
    if is_json:
        assert same(parsed.value, expected)
        assert same(strict(text), expected)
    else:
        with pytest.raises(ValueError, match="."):
            strict(text)


def made(chance: random.Random, depth: int = 0) -> Any:
    """A value of arguments as agents have them, with what nasty strings there are."""
    kind = chance.randrange(9 if depth < 4 else 6)
    if kind > 6:
        return {made_text(chance): made(chance, depth + 1) for _ in range(chance.randrange(5))}
    if kind == 6:
        return [made(chance, depth + 1) for _ in range(chance.randrange(5))]
    if kind > 2:
        return made_text(chance)
    return chance.choice(
        (
            None,
            True,
            False,
            chance.randrange(-5000, 10 ** chance.randrange(1, 300)),
            chance.uniform(-1e6, 1e6),
            1e-300,
            0,
            -1.5,
        )
    )


def made_text(chance: random.Random) -> str:
    return "".join(
        chance.choice((chance.choice(NASTY), "".join(chance.choices("{}[]\",:'\\ \n<|>ab", k=5)), "plain"))
        for _ in range(chance.randrange(4))
    )


def test_thousands_of_valid_calls_have_no_defect() -> None:
    """Of 3000 calls with brackets, quotes, tags, code and backslashes in their strings none is called malformed."""
    chance = random.Random(6)
    for index in range(3000):
        value = {"name": "f", "arguments": made(chance)}
        text = json.dumps(value, indent=(None, 2, "\t")[index % 3], ensure_ascii=index % 2 == 0)
        assert parse(text) == read_tolerantly(text, 0) == (value, (), len(text))
        if index % 10 == 0:
            assert same(letter(text), strict(text))


@settings(max_examples=200, deadline=None)
@given(values, styles)
def test_valid_json_has_no_defect_and_reads_as_the_standard_library_reads_it(value: Any, style: dict[str, Any]) -> None:
    """Values with brackets, quotes, tags, code and backslashes in their strings are never called malformed."""
    text = json.dumps(value, **style)
    for parsed in (parse(text), read_tolerantly(text, 0)):
        assert parsed is not None
        assert parsed.defects == ()
        assert parsed.end == len(text)
        assert same(parsed.value, value)
    assert same(strict(text), value)


@pytest.mark.parametrize("nasty", NASTY)
def test_what_is_in_a_string_is_no_defect(nasty: str) -> None:
    """Whatever a string holds, as a key, a value or an item, the JSON around it is well-formed."""
    value = {"name": "write", "arguments": {nasty: nasty, "list": [nasty, {"deep": nasty}], "last": nasty}}
    for text in (json.dumps(value), json.dumps(value, ensure_ascii=False, indent=2)):
        sound(text)
        assert parse(text) == (value, (), len(text))
        assert parse(text + "\n</tool_call>") == (value, (), len(text))


@settings(max_examples=400, deadline=None)
@given(st.lists(pieces, max_size=25).map("".join))
@example('{"a": "b" "c": 1}')
@example("{{")
@example('{"a": "{", ":": 1}')
@example('{"a": "{"}b":1}')
@example('{<|im_end\\x00|>"n": 1}')
@example('{"":"""":0}')
def test_any_text_is_read_and_has_a_defect_exactly_where_it_is_no_json(text: str) -> None:
    """Pieces of JSON in any order are read without an error, by both readers alike."""
    sound(text)
    sound("{" + text + "}")
    sound('{"a":' + text)


@settings(max_examples=200, deadline=None)
@given(st.one_of(st.text(max_size=60), st.binary(max_size=60).map(lambda raw: raw.decode("utf-8", "surrogateescape"))))
def test_random_text_and_bytes_are_read(text: str) -> None:
    """No text makes the reader fail, whatever it starts with."""
    for before in ("", "[", '{"', "{'a': "):
        sound(before + text)


@settings(max_examples=20, deadline=None)
@given(values, styles, st.randoms(use_true_random=False))
def test_every_cut_and_every_single_change_is_read(value: Any, style: dict[str, Any], chance: random.Random) -> None:
    """A valid text cut at any character, with one left out, put in or replaced, has a defect where it is no JSON."""
    text = json.dumps({"name": "f", "arguments": value}, **style)
    for at in range(len(text)) if len(text) < 40 else sorted(chance.sample(range(len(text)), 40)):
        sound(text[:at])
        sound(text[:at] + text[at + 1 :])
        sound(text[:at] + chance.choice("{}[],:\"'\\ a1\n<") + text[at:])
        sound(text[:at] + chance.choice("{}[],:\"'\\ a1\n<") + text[at + 1 :])


HUGE = {
    "brackets": "[" * 1_000_000, "objects": '{"a":' * 200_000, "ghosts": "{" * 1_000_000, "closed": "[" * 500_000 + "]" * 500_000,
    "closers": "{" + "]" * 1_000_000, "pairs": "[}" * 500_000, "commas": "[" + "," * 1_000_000, "colons": "{" + ":" * 1_000_000,
    "quotes": "{" + '"' * 1_000_000, "single": "{" + "'a" * 500_000, "backslashes": '{"a": "' + "\\" * 1_000_000, "escaped": '{\\"a' + '\\\\\\"b' * 200_000,
    "escapes": '{"a": "' + "\\n" * 500_000 + '", }', "odd escapes": '{"a": "' + "\\d" * 200_000 + '"}', "digits": '{"a": ' + "7" * 1_000_000 + "}",
    "fraction": '{"a": 0.' + "7" * 1_000_000 + "}", "words": "[" + "word " * 200_000, "keys": "{" + '"a" ' * 200_000, "spaces": "{" + " " * 1_000_000,
    "odd spaces": "{" + "\u00a0 " * 300_000, "tokens": "[" + "<|im_end|>" * 100_000, "comments": "[" + "/**/" * 200_000, "open comment": "[/*" + "*" * 1_000_000,
    "inner quotes": '{"a": "' + 'b "c" ' * 100_000 + '"}', "resplit": "{" + '"a": "b, ' * 100_000, "triple": "[" + '"""' * 300_000, "less": "[" + "<" * 1_000_000,
    "many": "[" + "0," * (MAX_VALUES + 10) + "0]", "surrogates": '{"a": "' + "\\ud800" * 100_000 + '"}', "raw": '{"a": "' + "\n" * 1_000_000 + '"}',
    "arrows": '{"a" ' + "=> " * 300_000, "sharp": "[" + "#\n" * 300_000, "nested keys": "[" + '{"a",' * 200_000, "colon items": '{"a": [' + '"b": ' * 200_000,
}  # fmt: skip


@pytest.mark.parametrize("name", HUGE)
def test_the_largest_texts_are_read_or_given_up(name: str) -> None:
    """A million brackets, quotes, commas or digits are read in bounded time and depth, and have a defect."""
    parsed = parse(HUGE[name])
    assert parsed is not None
    assert name == "fraction" or parsed.defects
    assert len(parsed.defects) <= 10 * len(KINDS)
    json.dumps(parsed.value)  # not too deep for whoever reads it next


def test_depth_has_a_limit_that_readers_share() -> None:
    """256 levels are read, one more is said to be too deep, whether the brackets are closed or not."""
    deep = "[" * MAX_DEPTH + "]" * MAX_DEPTH
    assert same(strict(deep), letter(deep))
    with pytest.raises(ValueError, match="nested more than 256 levels deep"):
        strict(f"[{deep}]")
    with pytest.raises(ValueError, match="nested more than 256 levels deep"):
        strict('{"a":' * 257 + "1" + "}" * 257)
