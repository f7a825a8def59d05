"""Whether a value is one that is right, and how values are shown to a person.

Rules (those of the Berkeley function-calling leaderboard, stricter where its checker is lax):

- Numbers are compared as numbers: ``5`` is ``5.0``, ``1.5`` is not ``15``. Neither ``true`` nor ``"5"`` is a number.
- Texts are folded: capitals, runs of white space and how an accent is encoded (NFC) do not count, nor does the full
  stop at the end of a sentence, which holds a space. All other characters count: ``web-6`` is not ``web_6``. Texts
  named ``exact`` are compared to the letter.
- Lists are compared in order, objects key by key.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from pytest_vram.text import printable

#: Characters of one value that a message shows.
_SHOWN = 60
#: Values inside one another that are compared; what is deeper differs.
_DEEPEST = 64


class Difference(NamedTuple):
    """Where a value is not the right one. :ivar path: such as ``filter.levels[1]``."""

    kind: str
    path: str
    detail: str


def with_kind(value: object) -> str:
    """A value and what JSON calls its type, where it does not say so itself: ``5, an integer``."""
    return "null" if value is None else f"{shown(value)}, {kind_of(value)}"


def kind_of(value: object) -> str:
    """The name that JSON has for the type of a value, with its article."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a boolean"
    if isinstance(value, int):
        return "an integer"
    if isinstance(value, float):
        return "a number"
    if isinstance(value, str):
        return "a string"
    return "an array" if isinstance(value, list | tuple) else "an object"


def shown(value: object, room: int = _SHOWN) -> str:
    """A value as a message shows it: one printable line, cut where it is long."""
    if isinstance(value, str):
        cut = value if len(value) <= room else value[: room - 1] + "…"
        return "'" + printable(cut) + "'"
    if isinstance(value, Mapping):
        parts = (f"{printable(str(key)[:room])}: {shown(one, room // 3)}" for key, one in _first(value.items(), room))
        return "{" + ", ".join(parts) + (", …}" if len(value) > _items(room) else "}")
    if isinstance(value, list | tuple):
        parts = (shown(one, room // 3) for one in _first(value, room))
        return "[" + ", ".join(parts) + (", …]" if len(value) > _items(room) else "]")
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, int) and value.bit_length() > 200:
        return f"a number of {value.bit_length()} bits"  # writing it out takes quadratic time
    return str(value)


def _items(room: int) -> int:
    return max(0, room // 10)


def _first(values: Any, room: int) -> list[Any]:
    kept: list[Any] = []
    for value in values:
        if len(kept) >= _items(room):
            break
        kept.append(value)
    return kept


def folded(text: str) -> str:
    """A text without what does not count."""
    text = " ".join(unicodedata.normalize("NFC", text).casefold().split())
    return text.removesuffix(".") if " " in text and text[-2:-1].isalpha() else text


def same(value: Any, right: Any, *, exact: bool = False) -> bool:
    """Whether a value is the right one."""
    return next(iter(differences(value, [right], "", exact=exact)), None) is None


def differences(value: Any, allowed: Sequence[Any], path: str, *, exact: bool = False) -> list[Difference]:
    """What keeps a value from being one of those that are right; of several, those from the nearest.

    Kinds: ``wrong_value``, ``wrong_type``, and inside of objects ``missing_field`` and ``extra_field``.
    """
    nearest: list[Difference] | None = None
    for right in allowed:
        found: list[Difference] = []
        _compare(value, right, path, exact, found, 0)
        if not found:
            return []
        if nearest is None or len(found) < len(nearest):
            nearest = found
    if nearest is not None and (len(allowed) == 1 or any(one.path != path for one in nearest)):
        return nearest
    alike = [right for right in allowed if _type(right) == _type(value)]
    kind = "wrong_value" if alike or not allowed else "wrong_type"
    return [Difference(kind, path, f"{path} is {shown(value)}, {_would(allowed)}")]


def _would(allowed: Sequence[Any]) -> str:
    if not allowed:
        return "and no value is right"
    listed = [shown(right) for right in allowed[:3]]
    more = f" or one of {len(allowed) - 3} others" if len(allowed) > 3 else ""
    return "right would be " + " or ".join(listed) + more


def _type(value: object) -> str:
    """What must be the same before values are compared: any number is a number."""
    if isinstance(value, float) or (isinstance(value, int) and not isinstance(value, bool)):
        return "a number"
    return kind_of(value)


def _compare(value: Any, right: Any, path: str, exact: bool, found: list[Difference], depth: int) -> None:
    if _type(value) != _type(right):
        detail = f"{path} is {with_kind(value)}; right would be {shown(right)}"
        found.append(Difference("wrong_type", path, detail))
    elif depth >= _DEEPEST:
        found.append(Difference("wrong_value", path, f"{path} is nested too deeply to be compared"))
    elif isinstance(right, Mapping):
        _compare_objects(value, right, path, exact, found, depth)
    elif isinstance(right, list | tuple) and len(value) == len(right):
        for index, (one, other) in enumerate(zip(value, right, strict=True)):
            _compare(one, other, f"{path}[{index}]", exact, found, depth + 1)
    elif not _equal(value, right, exact):
        found.append(Difference("wrong_value", path, f"{path} is {shown(value)}, {_would([right])}"))


def _compare_objects(
    value: Mapping[str, Any], right: Mapping[str, Any], path: str, exact: bool, found: list[Difference], depth: int
) -> None:
    for key, other in right.items():
        inner = f"{path}.{key}"
        if key in value:
            _compare(value[key], other, inner, exact, found, depth + 1)
        else:
            found.append(Difference("missing_field", inner, f"{inner} is missing, {_would([other])}"))
    extra = [key for key in value if key not in right]
    found += [
        Difference("extra_field", f"{path}.{key}", f"{path}.{printable(str(key)[:_SHOWN])} was not asked for")
        for key in extra[:20]
    ]


def _equal(value: Any, right: Any, exact: bool) -> bool:
    if not isinstance(right, str):
        return bool(value == right)
    if value == right or exact:
        return bool(value == right)
    # Nothing that does not count makes a text many times as long; folding twenty megabytes would take seconds.
    if len(value) > 4 * len(right) + 200:
        return False
    # White space does not count beside something; an empty text is its own.
    return bool(value and right) and folded(value) == folded(right)
