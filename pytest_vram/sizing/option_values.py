"""Values of options as Python, TOML or a command line holds them, whatever the option means."""

from __future__ import annotations

import csv
import re
from pathlib import Path
from typing import Any

from pytest_vram.errors import BadInput

#: Characters of a value that a message repeats.
_SHOWN = 200


def plain(key: str, value: object, origin: str) -> object:
    """A value as a command line can hold it: paths become text.

    :raises BadInput: anything but text, a number, true or false, a path, or a list of them.
    """
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, list | tuple):
        return [
            tuple(plain(key, part, origin) for part in one) if isinstance(one, tuple) else plain(key, one, origin)
            for one in value
        ]
    if not isinstance(value, str | int | float):
        raise BadInput(
            f"option {key!r} = {shown(value)}{origin} cannot be used: write text, a number, true or false, or a list"
            " of them"
        )
    return value


def items(value: Any) -> list[Any]:
    """The values of an option that may be given several times; empty where it was not given."""
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]


def row(text: str) -> list[str]:
    """Parts between commas; quotes keep a comma inside (``parse_csv_row`` of ``common/arg.cpp``)."""
    try:
        return next(csv.reader([text]), [""])
    except csv.Error:  # a line end, or longer than any option
        return [text]


def is_fraction(text: str) -> bool:
    """Whether ``text`` is a number with or without a fraction and an exponent."""
    return re.fullmatch(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?", text.strip(), re.ASCII) is not None


def shown(value: object) -> str:
    """A value for a message, cut short; a number of thousands of digits cannot even be written."""
    try:
        text = repr(value)
    except ValueError:
        return "a number that is too long to be written"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def integer(value: object) -> int | None:
    """A whole number, also one written as text; ``None`` for anything else, ``True`` included."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return value
    if isinstance(value, str) and re.fullmatch(r"[+-]?\d{1,12}", value.strip(), re.ASCII):
        return int(value)
    return None
