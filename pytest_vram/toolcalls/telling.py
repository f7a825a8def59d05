"""Defects as sentences for a person, and as the message that is given back to a model."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pytest_vram.text import printable
from pytest_vram.toolcalls.cases import Tool
from pytest_vram.toolcalls.tolerant import Defect

#: Sentences, and characters, that are told of one answer.
_SENTENCES, _LONGEST = 12, 1600
_LONGEST_SENTENCE = 300
#: What JSON Schema calls types.
_TYPES = frozenset({"string", "number", "integer", "boolean", "object", "array", "null"})
_DEEPEST, _MOST = 8, 200
#: Words that begin a clause and are no field's name there ("text is 5, an integer" is about a field).
_WORDS = re.compile(
    r"there (?:is|are)|half of|call \d|(?:the|an?|this|what|one|text|element|nothing) (?!is |was |are )"
)


def sentences(defects: Iterable[Defect], text: str) -> str:
    """Defects as sentences. :param text: what their offsets refer to; "": they are left out."""
    told: dict[str, None] = {}
    length = more = 0
    for defect in defects:
        if len(told) >= _SENTENCES or length > _LONGEST:
            more += 1
            continue
        clause = printable(defect.detail[: 4 * _LONGEST_SENTENCE])
        if len(clause) > _LONGEST_SENTENCE:
            clause = clause[: _LONGEST_SENTENCE - 1] + "…"
        if defect.at >= 0 and text and "character" not in clause:
            clause += f" ({place(text, defect.at)})"
        one = sentence(clause)
        if one not in told:
            told[one] = None
            length += len(one)
    return " ".join([*told, f"{more:,} more."] if more else told)


def sentence(clause: str) -> str:
    """A clause as a sentence; a name at its beginning keeps its letters."""
    if _WORDS.match(clause):
        clause = clause[0].upper() + clause[1:]
    return f"{clause.rstrip('.')}."


def place(text: str, at: int) -> str:
    """Where an offset is: the line where there are several, and the character in it, both from 1."""
    line = text.count("\n", 0, at) + 1
    column = at - text.rfind("\n", 0, at)
    return f"line {line}, character {column}" if "\n" in text else f"character {column}"


def odd_types(tools: Iterable[Tool]) -> list[str]:
    """Types in the schemas of tools that JSON Schema does not have, as clauses."""
    found: list[str] = []
    for tool in tools:
        left: list[tuple[str, Any, int]] = [("", tool.parameters, 0)]
        for path, schema, depth in left:
            if not isinstance(schema, Mapping) or len(left) > _MOST:
                continue
            kind = schema.get("type")
            for one in kind if isinstance(kind, list) else [kind]:
                if isinstance(one, str) and one not in _TYPES:
                    where = f"{path!r} of {tool.name}" if path else f"the parameters of {tool.name}"
                    found.append(f"the schema gives {where} the type {one!r}, which JSON Schema does not have")
            if depth < _DEEPEST:
                properties = schema.get("properties")
                if isinstance(properties, Mapping):
                    left += [(f"{path}.{key}".lstrip("."), one, depth + 1) for key, one in properties.items()]
                left.append((f"{path}[]", schema.get("items"), depth + 1))
    return found[:5]


def example(tools: Sequence[Tool], name: str | None) -> str:
    """How a call of a tool looks, with types for values; "" where there is no tool."""
    tool = next((tool for tool in tools if tool.name == name), tools[0] if len(tools) == 1 else None)
    if tool is None:
        return '{"name": "TOOL", "arguments": {"ARGUMENT": "VALUE"}}' if tools else ""
    properties = tool.parameters.get("properties")
    required = tool.parameters.get("required")
    arguments: dict[str, str] = {}
    if isinstance(properties, Mapping):
        for key, schema in list(properties.items())[:20]:
            kind = schema.get("type", "any") if isinstance(schema, Mapping) else "any"
            optional = isinstance(required, list) and key not in required
            arguments[key] = f"<{kind}{', may be left out' if optional else ''}>"
    return json.dumps({"name": tool.name, "arguments": arguments}, ensure_ascii=False)
