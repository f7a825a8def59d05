"""JSON Schema of a conversation file, for editors and for other programs.

It says what can be said of one file by itself; that names of tools are defined, only reading can.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from pytest_vram.sessions.conversations import LENGTHS, MOST_LINES, MOST_OUTPUT, MOST_TURNS

_DIALECT = "https://json-schema.org/draft/2020-12/schema"
_PLAIN = {"type": "string"}


def schemas() -> dict[str, dict[str, Any]]:
    """File name → schema."""
    return {"conversation.json": {"$schema": _DIALECT, "title": "A conversation of many turns", **_conversation()}}


def write_schemas(folder: Path) -> None:
    """Bring the published schema up to date; a test proves that it is."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, schema in schemas().items():
        text = msgspec.json.format(msgspec.json.encode(schema, order="sorted"), indent=1)
        (folder / name).write_bytes(text + b"\n")


def _object(properties: dict[str, Any], required: tuple[str, ...]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "additionalProperties": False,
        "required": list(required),
    }


def _whole(most: int) -> dict[str, Any]:
    return {"type": "integer", "minimum": 1, "maximum": most}


def _text() -> dict[str, Any]:
    lines = _object(
        {
            "text": _PLAIN,
            "lines": {"type": "array", "items": _PLAIN, "minItems": 1, "description": "taken in turn; {n}: the number"},
            "count": _whole(MOST_LINES),
            "after": _PLAIN,
        },
        ("lines", "count"),
    )
    return {"anyOf": [_PLAIN, lines]}


def _expected() -> dict[str, Any]:
    values = {"type": "array", "minItems": 1, "description": "every value that is right"}
    names = {"type": "array", "items": _PLAIN}
    return _object(
        {
            "name": _PLAIN,
            "arguments": {"type": "object", "additionalProperties": values},
            "omittable": names,
            "exact": names,
        },
        ("name",),
    )


def _conversation() -> dict[str, Any]:
    turn = _object(
        {
            "user": _text(),
            "length": {"enum": list(LENGTHS)},
            "output_cap": {**_whole(MOST_OUTPUT), "description": "most tokens of each answer"},
            "expect": {"type": "array", "items": _expected(), "description": "the calls that are right"},
            "results": {"type": "array", "items": _text(), "description": "what each of them gives, in their order"},
            "answer": {**_text(), "description": "what the assistant says in the end"},
        },
        ("user",),
    )
    return _object(
        {
            "name": {"type": "string", "minLength": 1, "maxLength": 80},
            "description": _PLAIN,
            "language": {**_PLAIN, "description": "BCP 47"},
            "system": _text(),
            "summary": {**_text(), "description": "pinned where messages leave the window"},
            "tools": {"type": "array", "items": {"type": ["string", "object"]}, "description": "names, or whole tools"},
            "turns": {"type": "array", "items": turn, "minItems": 1, "maxItems": MOST_TURNS},
        },
        ("name", "turns"),
    )
