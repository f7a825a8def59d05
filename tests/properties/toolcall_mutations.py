"""Calls with one thing wrong in them, by the kind of it: a second hand beside the scripted backend's own defects."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any

from pytest_vram.toolcalls.cases import Tool

Call = dict[str, Any]
#: Makes the text of a call with something wrong in it; ``None`` where the call has no room for that.
Mutation = Callable[[Call, Sequence[Tool], random.Random], str | None]

_PART = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\]:,]|[^\s{}\[\]:,"]+', re.DOTALL)
TOKENS = (
    "<|im_end|>",
    "<|eot_id|>",
    "</s>",
    "<|endoftext|>",
    "<eos>",
    "<end_of_turn>",
    "<｜end▁of▁sentence｜>",
    "<|end_of_text|>",
    "<pad>",
)
#: Kind → mutations that make it.
MUTATIONS: dict[str, list[Mutation]] = {}


def makes(kind: str) -> Callable[[Mutation], Mutation]:
    def noted(mutation: Mutation) -> Mutation:
        MUTATIONS.setdefault(kind, []).append(mutation)
        return mutation

    return noted


def written(call: Call, chance: random.Random) -> str:
    """A call as models write it: on one line, without spaces, or indented."""
    style: dict[str, Any] = chance.choice(({}, {}, {"separators": (",", ":")}, {"indent": 2}, {"indent": 4}))
    return json.dumps(call, ensure_ascii=chance.random() < 0.3, **style)


def parts(text: str, wanted: str) -> list[re.Match[str]]:
    """Pieces that begin with one of the characters, outside of strings (strings themselves begin with a quote)."""
    return [part for part in _PART.finditer(text) if part[0][0] in wanted]


def keys(text: str) -> list[re.Match[str]]:
    return [part for part in parts(text, '"') if re.match(r"\s*:", text[part.end() :])]


def strings(text: str) -> list[re.Match[str]]:
    return [part for part in parts(text, '"') if not re.match(r"\s*:", text[part.end() :])]


def numbers(text: str) -> list[re.Match[str]]:
    return parts(text, "-0123456789")


def put(text: str, start: int, end: int, piece: str) -> str:
    return text[:start] + piece + text[end:]


def one(found: list[re.Match[str]], chance: random.Random) -> re.Match[str] | None:
    return chance.choice(found) if found else None


# ---------------------------------------------------------------------------------------------------------- brackets


@makes("missing_bracket")
def last_closer_missing(call: Call, tools: Sequence[Tool], chance: random.Random) -> str | None:
    return written(call, chance)[:-1].rstrip()


@makes("missing_bracket")
def all_last_closers_missing(call: Call, tools: Sequence[Tool], chance: random.Random) -> str | None:
    return written(call, chance).rstrip("}]\n ")


@makes("missing_bracket")
def inner_closer_missing(call: Call, tools: Sequence[Tool], chance: random.Random) -> str | None:
    text = written(call, chance)
    found = one(parts(text, "}]")[:-1], chance)
    return put(text, found.start(), found.end(), "") if found else None


@makes("missing_bracket")
def other_closer(call: Call, tools: Sequence[Tool], chance: random.Random) -> str | None:
    text = written(call, chance)
    found = one(parts(text, "]"), chance)
    return put(text, found.start(), found.end(), "}") if found else None


@makes("extra_bracket")
def last_closer_doubled(call: Call, tools: Sequence[Tool], chance: random.Random) -> str | None:
    return written(call, chance) + chance.choice(("}", "\n}", "]", "}}"))


@makes("extra_bracket")
def inner_closer_doubled(call: Call, tools: Sequence[Tool], chance: random.Random) -> str | None:
    text = written(call, chance)
    found = one(parts(text, "}]")[:-1], chance)
    return put(text, found.start(), found.end(), found[0] * 2) if found else None


@makes("extra_bracket")
def opener_doubled(call: Call, tools: Sequence[Tool], chance: random.Random) -> str | None:
    text = written(call, chance)
    found = parts(text, "{")
    return put(text, found[0].start(), found[0].end(), "{{") + chance.choice(("", "}"))


# ----------------------------------------------------------------------------------------------------------- strings


@makes("unterminated_string")
def cut_in_a_string(call: Call, tools: Sequence[Tool], chance: random.Random) -> str | None:
    text = written(call, chance)
    found = one([part for part in strings(text) if len(part[0]) > 3], chance)
    return text[: chance.randrange(found.start() + 1, found.end() - 1)] if found else None


@makes("unterminated_string")
def closing_quote_missing(call: Call, tools: Sequence[Tool], chance: random.Random) -> str | None:
    text = written(call, chance)
    found = one([part for part in strings(text) if len(part[0]) > 3], chance)
    return put(text, found.end() - 1, found.end(), "") if found else None


@makes("unterminated_string")
def raw_line_break(call: Call, tools: Sequence[Tool], chance: random.Random) -> str | None:
    text = written(call, chance)
    found = one([part for part in strings(text) if "\\n" in part[0] and "\\\\" not in part[0]], chance)
    return put(text, found.start(), found.end(), found[0].replace("\\n", "\n")) if found else None


@makes("unterminated_string")
def quotes_inside_not_escaped(call: Call, tools: Sequence[Tool], chance: random.Random) -> str | None:
    text = written(call, chance)
    found = one([part for part in strings(text) if re.fullmatch(r'"\w+ \w+ [\w ]+"', part[0])], chance)
    if found is None:
        return None
    words = found[0].split(" ")
    words[1] = f'"{words[1]}"'
    return put(text, found.start(), found.end(), " ".join(words))


@makes("single_quotes")
def all_quotes_single(call: Call, tools: Sequence[Tool], chance: random.Random) -> str | None:
    text = written(call, chance)
    if "'" in text or "\\" in text:
        return None
    return _PART.sub(lambda part: f"'{part[0][1:-1]}'" if part[0][0] == '"' else part[0], text)


@makes("single_quotes")
def one_string_in_other_quotes(call: Call, tools: Sequence[Tool], chance: random.Random) -> str | None:
    text = written(call, chance)
    found = one([part for part in parts(text, '"') if not set(part[0]) & set("'\\“”")], chance)
    pair = chance.choice(("''", "“”", "„“", "‘’"))
    return put(text, found.start(), found.end(), pair[0] + found[0][1:-1] + pair[1]) if found else None


@makes("over_escaped")
def everything_escaped(call: Call, tools: Sequence[Tool], chance: random.Random) -> str | None:
    return json.dumps(written(call, chance))[1:-1]


@makes("over_escaped")
def one_string_escaped(call: Call, tools: Sequence[Tool], chance: random.Random) -> str | None:
    text = written(call, chance)
    found = one([part for part in strings(text) if "\\" not in part[0]], chance)
    quote = "\\" * chance.choice((1, 2, 3)) + '"'
    return put(text, found.start(), found.end(), quote + found[0][1:-1] + quote) if found else None


@makes("over_escaped")
def no_such_escape(call: Call, tools: Sequence[Tool], chance: random.Random) -> str | None:
    text = written(call, chance)
    found = one([part for part in strings(text) if "\\" not in part[0]], chance)
    escape = chance.choice(("\\d", "\\_", "\\x41", "\\u12", "\\ud83d ", "\\'"))
    return put(text, found.start() + 1, found.start() + 1, escape) if found else None


# ------------------------------------------------------------------------------------------- commas, keys and numbers


@makes("missing_comma")
def comma_dropped(call: Call, tools: Sequence[Tool], chance: random.Random) -> str | None:
    text = written(call, chance)
    found = one(parts(text, ","), chance)
    # 1,2 without the comma is another number, not a defect.
    if found is None or (re.search(r"[\w.]$", text[: found.start()]) and re.match(r"[\w.-]", text[found.end() :])):
        return None
    return put(text, found.start(), found.end(), "")


@makes("missing_comma")
def colon_dropped(call: Call, tools: Sequence[Tool], chance: random.Random) -> str | None:
    text = written(call, chance)
    found = one(parts(text, ":"), chance)
    return put(text, found.start(), found.end(), chance.choice((" ", " =", " =>"))) if found else None


@makes("trailing_comma")
def comma_before_a_closer(call: Call, tools: Sequence[Tool], chance: random.Random) -> str | None:
    text = written(call, chance)
    found = one([part for part in parts(text, "}]") if text[: part.start()].rstrip()[-1] not in "{["], chance)
    return put(text, found.start(), found.start(), chance.choice((",", ", ", ",\n"))) if found else None


@makes("trailing_comma")
def comma_doubled(call: Call, tools: Sequence[Tool], chance: random.Random) -> str | None:
    text = written(call, chance)
    found = one(parts(text, ","), chance)
    return put(text, found.start(), found.end(), chance.choice((",,", ", ,"))) if found else None


@makes("trailing_comma")
def comma_first(call: Call, tools: Sequence[Tool], chance: random.Random) -> str | None:
    text = written(call, chance)
    found = one([part for part in parts(text, "{[") if text[part.end() :].lstrip()[0] not in "}]"], chance)
    return put(text, found.end(), found.end(), ",") if found else None


@makes("unquoted_key")
def one_key_unquoted(call: Call, tools: Sequence[Tool], chance: random.Random) -> str | None:
    text = written(call, chance)
    found = one([key for key in keys(text) if re.fullmatch(r'"\w+"', key[0])], chance)
    return put(text, found.start(), found.end(), found[0][1:-1]) if found else None


@makes("unquoted_key")
def all_keys_unquoted(call: Call, tools: Sequence[Tool], chance: random.Random) -> str | None:
    text = written(call, chance)
    for found in reversed(keys(text)):
        if not re.fullmatch(r'"\w+"', found[0]):
            return None
        text = put(text, found.start(), found.end(), found[0][1:-1])
    return text


@makes("unquoted_key")
def value_unquoted(call: Call, tools: Sequence[Tool], chance: random.Random) -> str | None:
    text = written(call, chance)
    found = one([part for part in strings(text) if re.fullmatch(r'"[A-Za-z][\w ./-]+"', part[0])], chance)
    if (
        found is None
        or found[0][1:-1] in ("true", "false", "null")
        or found[0][1:-1].lower() in ("nan", "inf", "infinity")
    ):
        return None
    return put(text, found.start(), found.end(), found[0][1:-1])


@makes("unquoted_key")
def words_of_python(call: Call, tools: Sequence[Tool], chance: random.Random) -> str | None:
    text = written(call, chance)
    found = one([part for part in _PART.finditer(text) if part[0] in ("true", "false", "null")], chance)
    words = {"true": "True", "false": "False", "null": "None"}
    return put(text, found.start(), found.end(), words[found[0]]) if found else None


@makes("unquoted_key")
def comments(call: Call, tools: Sequence[Tool], chance: random.Random) -> str | None:
    text = written(call, chance)
    found = one(parts(text, ",{["), chance)
    return (
        put(text, found.end(), found.end(), chance.choice((" // as asked\n", " /* as asked */ ", " # as asked\n")))
        if found
        else None
    )


@makes("unquoted_key")
def number_not_of_json(call: Call, tools: Sequence[Tool], chance: random.Random) -> str | None:
    text = written(call, chance)
    found = one([part for part in numbers(text) if part[0].isdigit()], chance)
    return put(text, found.start(), found.end(), chance.choice(("0", "+", "0x")) + found[0]) if found else None


@makes("non_finite_number")
def not_finite(call: Call, tools: Sequence[Tool], chance: random.Random) -> str | None:
    text = written(call, chance)
    found = one(numbers(text), chance)
    other = chance.choice(("NaN", "Infinity", "-Infinity", "nan", "inf", "1e400", "-1e999", "9" * 400))
    return put(text, found.start(), found.end(), other) if found else None


@makes("duplicate_key")
def argument_twice(call: Call, tools: Sequence[Tool], chance: random.Random) -> str | None:
    text = written(call, chance)
    inside = keys(text)[2:]
    if not inside:
        return None
    found = chance.choice(inside)
    value = chance.choice(("null", "7", '"other"'))
    return put(text, found.start(), found.start(), f"{found[0]}: {value}, ")


@makes("double_encoded")
def arguments_are_a_string(call: Call, tools: Sequence[Tool], chance: random.Random) -> str | None:
    inner = written(call["arguments"], chance)
    return written({"name": call["name"], "arguments": inner}, chance) if call["arguments"] else None


@makes("double_encoded")
def call_is_a_string(call: Call, tools: Sequence[Tool], chance: random.Random) -> str | None:
    return json.dumps(written(call, chance))


# ------------------------------------------------------------------------------------------------ tokens, repetition


@makes("leaked_token")
def token_inside(call: Call, tools: Sequence[Tool], chance: random.Random) -> str | None:
    text = written(call, chance)
    found = one(parts(text, ",:{["), chance)
    return put(text, found.end(), found.end(), chance.choice(TOKENS)) if found else None


@makes("leaked_token")
def token_behind(call: Call, tools: Sequence[Tool], chance: random.Random) -> str | None:
    return written(call, chance) + chance.choice(("", "\n")) + chance.choice(TOKENS)


@makes("runaway")
def white_space_without_end(call: Call, tools: Sequence[Tool], chance: random.Random) -> str | None:
    text = written(call, chance)
    found = one(parts(text, ",:{["), chance)
    return (
        text[: found.end()] + chance.choice(("\t", " ", "\n", "\n\t", " \n")) * chance.randrange(70, 4000)
        if found
        else None
    )


@makes("runaway")
def words_without_end(call: Call, tools: Sequence[Tool], chance: random.Random) -> str | None:
    text = written(call, chance)
    found = one([part for part in strings(text) if "\\" not in part[0]], chance)
    cycle = chance.choice(("0", "ha", "the error, ", "- [ ] check the log of the job again\\n", "]", "}", "<pad>"))
    return text[: found.end() - 1] + cycle * chance.randrange(250, 400) if found else None


@makes("runaway")
def brackets_without_end(call: Call, tools: Sequence[Tool], chance: random.Random) -> str | None:
    text = written(call, chance)
    found = one(parts(text, ":"), chance)
    return text[: found.end()] + chance.choice(("[", '{"a":', "[{", "0.0, 0.0, ")) * 300 if found else None


@makes("truncated")
def cut_anywhere(call: Call, tools: Sequence[Tool], chance: random.Random) -> str | None:
    text = written(call, chance)
    return text[: chance.randrange(len(call["name"]) + 14, len(text))]


# ---------------------------------------------------------------------------------------------------------- envelope


@makes("text_around")
def words_around(call: Call, tools: Sequence[Tool], chance: random.Random) -> str | None:
    before, after = chance.choice(
        (("Sure, I will look it up:\n", ""), ("", "\n\nThis should help."), ("I call this:\n\n", "\nDone."))
    )
    return before + written(call, chance) + after


@makes("alias_key")
def other_keys(call: Call, tools: Sequence[Tool], chance: random.Random) -> str | None:
    name, arguments = chance.choice(
        (("name", "parameters"), ("tool", "args"), ("method", "params"), ("function", "arguments"), ("name", "input"))
    )
    return written({name: call["name"], arguments: call["arguments"]}, chance)


# ------------------------------------------------------------------------------------------- the tool, its arguments


def _slip(name: str, chance: random.Random) -> str:
    """A name with one letter left out, doubled, or another."""
    at = chance.randrange(1, len(name))
    return chance.choice(
        (
            name[:at] + name[at + 1 :],
            name[:at] + name[at] + name[at:],
            name[:at] + chance.choice("aeiou") + name[at + 1 :],
        )
    )


def _tool(call: Call, tools: Sequence[Tool]) -> Tool:
    return next(tool for tool in tools if tool.name == call["name"])


def _changed(call: Call, chance: random.Random, change: Callable[[dict[str, Any]], bool]) -> str | None:
    other = deepcopy(call)
    return written(other, chance) if change(other["arguments"]) and other != call else None


@makes("near_miss_tool")
def tool_misspelt(call: Call, tools: Sequence[Tool], chance: random.Random) -> str | None:
    name = _slip(call["name"], chance)
    return None if name in {tool.name for tool in tools} else written({**call, "name": name}, chance)


@makes("invented_tool")
def no_such_tool(call: Call, tools: Sequence[Tool], chance: random.Random) -> str | None:
    name = chance.choice(("perform_requested_action", "browser", "search_the_web", "execute_python", "ask_human", "zx"))
    return written({**call, "name": name}, chance)


@makes("misspelt_field")
def field_misspelt(call: Call, tools: Sequence[Tool], chance: random.Random) -> str | None:
    properties = _tool(call, tools).parameters["properties"]

    def change(arguments: dict[str, Any]) -> bool:
        name = chance.choice([*arguments, ""])
        other = _slip(name, chance) if len(name) > 3 else ""
        if not other or other in properties:
            return False
        arguments[other] = arguments.pop(name)
        return True

    return _changed(call, chance, change)


@makes("missing_field")
def field_missing(call: Call, tools: Sequence[Tool], chance: random.Random) -> str | None:
    required = _tool(call, tools).parameters.get("required", [])
    return _changed(
        call, chance, lambda arguments: bool(required) and arguments.pop(chance.choice(required), None) is not None
    )


@makes("extra_field")
def field_added(call: Call, tools: Sequence[Tool], chance: random.Random) -> str | None:
    name = chance.choice(("zz_debug", "woof", "quietly", "xtrace_options"))
    return _changed(call, chance, lambda arguments: arguments.setdefault(name, True) is True)


@makes("wrong_type")
def type_changed(call: Call, tools: Sequence[Tool], chance: random.Random) -> str | None:
    properties = _tool(call, tools).parameters["properties"]

    def change(arguments: dict[str, Any]) -> bool:
        name = chance.choice([*arguments, ""])
        type_ = properties.get(name, {}).get("type")
        if type_ in ("integer", "number"):
            arguments[name] = str(arguments[name])
        elif type_ == "boolean":
            arguments[name] = chance.choice(("true", 1, 0))
        elif type_ == "array":
            arguments[name] = chance.choice((",".join(map(str, arguments[name])), {"items": arguments[name]}, None))
        elif type_ == "object":
            arguments[name] = list(arguments[name].values())
        elif type_ == "string":
            arguments[name] = chance.choice((17, [arguments[name]], {"value": arguments[name]}, None, True))
        else:
            return False
        return True

    return _changed(call, chance, change)


@makes("wrong_value")
def value_changed(call: Call, tools: Sequence[Tool], chance: random.Random) -> str | None:
    properties = _tool(call, tools).parameters["properties"]

    def change(arguments: dict[str, Any]) -> bool:
        name = chance.choice([*arguments, ""])
        type_ = properties.get(name, {}).get("type")
        if type_ in ("integer", "number"):
            arguments[name] += 1
        elif type_ == "boolean":
            arguments[name] = not arguments[name]
        elif type_ == "array":
            arguments[name] = arguments[name][1:] if arguments[name] else [7]
        elif type_ == "string":
            arguments[name] = "something else altogether"
        else:
            return False
        return True

    return _changed(call, chance, change)
