"""Pieces of case and tool files, each checked where it is read, so that a message names its path."""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

from pytest_vram.errors import BadCases

_KINDS = {bool: "true or false", int: "a number", float: "a number", str: "text", list: "a list", dict: "an object"}


#: Names that are looked at for a nearest one, and characters of each: the comparison takes quadratic time.
_MOST_NAMES, _LONGEST_NAME = 2000, 100


def meant(name: str, known: Iterable[str]) -> str | None:
    """The known name that is most like another; ``None``: none is."""
    if len(name) > _LONGEST_NAME:
        return None
    likely = [one for one in itertools.islice(known, _MOST_NAMES) if len(one) <= _LONGEST_NAME]
    return next(iter(difflib.get_close_matches(name, likely, n=1, cutoff=0.6)), None)


def kind_of(value: Any) -> str:
    """What a JSON value is, in words."""
    return "null" if value is None else _KINDS[type(value)]


def object_of(value: Any, where: str, known: Sequence[str] = ()) -> dict[str, Any]:
    """An object that has no key but the known ones (any where none is given). :raises BadCases: it is not."""
    if not isinstance(value, dict):
        raise BadCases(f"{where} is {kind_of(value)}: an object belongs there")
    for key in value if known else ():
        if key not in known:
            near = meant(key, known)
            hint = f"did you mean {near!r}?" if near else f"it takes {', '.join(known)}"
            raise BadCases(f"{where} has an unknown key {key!r}: {hint}")
    return value


def list_of(value: Any, where: str, what: str) -> list[Any]:
    """A list. :raises BadCases: it is not."""
    if not isinstance(value, list):
        raise BadCases(f"{where} is {kind_of(value)}: a list of {what} belongs there")
    return value


def text_of(value: Any, where: str, *, empty: bool = False) -> str:
    """A text, not blank unless it may be. :raises BadCases: it is not."""
    if not isinstance(value, str):
        raise BadCases(f"{where} is {'missing' if value is None else kind_of(value)}: text belongs there")
    if not empty and not value.strip():
        raise BadCases(f"{where} is empty")
    return value


def each_text(value: Any, where: str, what: str) -> list[str]:
    """A list of texts, none of them blank. :raises BadCases: it is not."""
    return [text_of(one, f"{where}[{position}]") for position, one in enumerate(list_of(value, where, what))]


def optional(fields: dict[str, Any], key: str, default: Any) -> Any:
    """The value of a key that may be left out or be null."""
    found = fields.get(key)
    return default if found is None else found
