"""Decoding JSON that people wrote for us, to the letter: what most readers let pass is refused with its place."""

from __future__ import annotations

import json
import math
from typing import Any

from pytest_vram.errors import BadCases

#: Levels of lists and objects. Whoever handles a case walks it by recursion, so that this keeps all of them safe.
DEEPEST = 64


def decoded(text: str, origin: str, what: str) -> Any:
    """The value of a text that is JSON by RFC 8259, without NaN, duplicate keys and halves of surrogate pairs.

    :param origin: file and line, for messages. :param what: a clause saying what should be there.
    :raises BadCases: naming what is wrong.
    """
    try:
        value = json.loads(text, object_pairs_hook=_object, parse_constant=_constant, parse_float=_finite)
    except json.JSONDecodeError as error:
        place = f"character {error.pos + 1}" if error.lineno == 1 else f"line {error.lineno} character {error.colno}"
        raise BadCases(f"{origin} is not JSON: {error.msg} at {place}: {what}") from None
    except RecursionError:
        raise BadCases(f"{origin} is nested too deeply to be read: {what}") from None
    except ValueError as error:  # of the hooks below, or an integer of more digits than Python converts
        why = "an integer has too many digits" if "integer string conversion" in str(error) else error
        raise BadCases(f"{origin} cannot be used: {why}") from None
    if _deeper_than(DEEPEST, value):
        raise BadCases(f"{origin} is nested too deeply: at most {DEEPEST} levels are read")
    if "\\u" in text:  # only an escape can write one
        try:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError:
            raise BadCases(f"{origin} holds half of a surrogate pair, which is no character") from None
    return value


def _deeper_than(limit: int, value: Any) -> bool:
    level = [value]
    for _ in range(limit + 1):
        level = [
            inside
            for one in level
            if isinstance(one, dict | list)
            for inside in (one.values() if isinstance(one, dict) else one)
        ]
        if not level:
            return False
    return True


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]  # add says None
        raise ValueError(f"key {twice!r} stands twice in one object")
    return found


def _constant(name: str) -> Any:
    raise ValueError(f"{name} is not a number of JSON")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"number {text[:40]} is too large")
    return number
