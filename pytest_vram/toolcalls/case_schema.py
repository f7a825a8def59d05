"""JSON Schemas of case files, of files that define tools and of what the lint prints, for editors and programs.

They say what a reader can say of one line or file by itself; that names are defined and ids differ, only reading can.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from pytest_vram.toolcalls.cases import CATEGORIES
from pytest_vram.toolcalls.lines import ROLES
from pytest_vram.toolcalls.lint import LintDocument

_DIALECT = "https://json-schema.org/draft/2020-12/schema"
_TEXT = {"type": "string", "pattern": r"\S"}
_TEXTS = {"type": "array", "items": _TEXT}
_ANY_TEXT = {"type": ["string", "null"]}
_PARAMETERS = {"type": ["object", "null"], "description": "a JSON Schema of type object"}


def schemas() -> dict[str, dict[str, Any]]:
    """File name → schema."""
    return {
        "case.json": {"$schema": _DIALECT, "title": "One line of a case file", **_case()},
        "lint.json": {"$schema": _DIALECT, "title": "vram toolcalls lint --json", **msgspec.json.schema(LintDocument)},
        "tools.json": {"$schema": _DIALECT, "title": "Tools and sets of them, tools.json or tools/*.json", **_tools()},
    }


def write_schemas(folder: Path) -> None:
    """Bring the published schemas up to date; a test proves that they are."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, schema in schemas().items():
        text = msgspec.json.format(msgspec.json.encode(schema, order="sorted"), indent=1)
        (folder / name).write_bytes(text + b"\n")


def _object(properties: dict[str, Any], required: tuple[str, ...] = (), **more: Any) -> dict[str, Any]:
    found = {"type": "object", "properties": properties, "additionalProperties": False, **more}
    return {**found, "required": list(required)} if required else found


def _case() -> dict[str, Any]:
    expected = _object(
        {
            "name": _TEXT,
            "arguments": {
                "type": ["object", "null"],
                "additionalProperties": {"type": "array", "minItems": 1},
                "description": "argument: every value that is right",
            },
            "omittable": {**_TEXTS, "type": ["array", "null"], "description": "arguments that may be left out"},
            "exact": {
                **_TEXTS,
                "type": ["array", "null"],
                "description": "arguments whose text is compared character by character",
            },
        },
        ("name",),
    )
    return _object(
        {
            "id": {**_TEXT, "description": "differs from that of every other case"},
            "family": {**_TEXT, "description": "cases that ask for the same with other words, values or distractors"},
            "category": {"enum": list(CATEGORIES)},
            "language": {**_TEXT, "description": "BCP 47, of the request; en where it is left out"},
            "messages": {"type": "array", "items": _message(), "minItems": 1},
            "tools": {
                "type": "array",
                "items": {"anyOf": [_TEXT, _tool(), _openai_tool()]},
                "description": "names, @ and the name of a set, or whole tools",
            },
            "expect": {
                "type": "array",
                "items": expected,
                "description": "the calls that are right, in any order; []: an answer without a call is right",
            },
        },
        ("id", "family", "category", "messages", "tools", "expect"),
    )


def _message() -> dict[str, Any]:
    function = _object({"name": _TEXT, "arguments": {"type": "string"}}, ("name", "arguments"))
    call = _object({"id": _TEXT, "type": {"const": "function"}, "function": function}, ("id", "type", "function"))
    part = {"type": "object", "properties": {"type": _TEXT}, "required": ["type"]}
    calling = {"properties": {"tool_calls": {"type": "array", "minItems": 1}}, "required": ["tool_calls"]}
    saying = {"properties": {"content": {"type": ["string", "array"]}}, "required": ["content"]}
    return _object(
        {
            "role": {"enum": list(ROLES)},
            "content": {"type": ["string", "array", "null"], "items": part},
            "name": {},
            "tool_calls": {"type": ["array", "null"], "items": call},
            "tool_call_id": {},
            "reasoning_content": {},
        },
        ("role",),
        anyOf=[calling, saying],
        allOf=[
            {
                "if": {"properties": {"role": {"const": "tool"}}, "required": ["role"]},
                "then": {"properties": {"tool_call_id": _TEXT}, "required": ["tool_call_id"]},
            },
            {
                "if": {"properties": {"role": {"const": "assistant"}}, "required": ["role"]},
                "else": {"properties": {"tool_calls": {"type": "null"}}},
            },
        ],
    )


def _tool() -> dict[str, Any]:
    return _object(
        {"name": _TEXT, "description": _ANY_TEXT, "parameters": _PARAMETERS, "strict": {}},
        ("name",),
    )


def _openai_tool() -> dict[str, Any]:
    return _object({"type": {"const": "function"}, "function": _tool()}, ("function",))


def _tools() -> dict[str, Any]:
    return _object(
        {
            "tools": {
                "type": "object",
                "propertyNames": {"pattern": r"\S"},
                "additionalProperties": _object({"description": _ANY_TEXT, "parameters": _PARAMETERS}),
            },
            "sets": {"type": "object", "additionalProperties": _TEXTS, "description": "name: names of tools"},
        }
    )
