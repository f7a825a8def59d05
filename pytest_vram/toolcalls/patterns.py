"""Patterns of schemas held against texts, in bounded time: a schema comes from outside, and may never come to an end.

Python's matcher tries one way after another. How many ways there are can be said of a pattern before it is used: each
repetition stops at any place of the text, each option and each alternative doubles them, and a repetition of something
that can itself be repeated or chosen has exponentially many. Those are not tried.
"""

from __future__ import annotations

import re
import warnings
from functools import lru_cache
from typing import NamedTuple

#: Ways that are tried; a million take some hundredths of a second.
_MOST_WAYS = 10_000_000
_LONGEST_PATTERN, _LONGEST_TEXT = 1000, 10_000
_ESCAPED = re.compile(r"\\(?:[xu][0-9A-Fa-f]+|.)", re.DOTALL)
_CLASS = re.compile(r"\[\^?\]?[^\]]*\]")
_REFERENCE = re.compile(r"\\[1-9]|\(\?P=|\(\?\(")
#: How a group begins that is no plain one: without a number, with a name, looking ahead and back, with flags.
_OPENING = re.compile(r"\((?:\?(?::|P<\w{1,60}>|<?[=!]|>|[aimsux]{1,6}(?=\))))?", re.ASCII)
_AGAIN = re.compile(r"[*+]|\{[0-9]*,[0-9]*\}", re.ASCII)
_COUNT = re.compile(r"\{[0-9]+\}", re.ASCII)
#: Lazy and possessive forms repeat as often.
_MANNER = re.compile(r"(?<=[*+?}])[?+]")
_GROUP = re.compile(r"\(([^()]*)\)([*+?]|\{[0-9]*,?[0-9]*\})?", re.ASCII)
#: ``(-[a-z]+)*``: a repeated group whose first character cannot stand in the rest of it divides a text in one way.
_DIVIDED = re.compile(
    r"\((?:\?:)?(?P<mark>\\?[-.,:;/_@ ])(?P<class>\[[^\]\\^]+\]|\\[dw])"
    r"(?:[*+]|\{[0-9,]{1,9}\})?\)(?:[*+]|\{[0-9,]{1,9}\})",
    re.ASCII,
)


class _Shape(NamedTuple):
    """How many ways a pattern has.

    :ivar repeats: repetitions that may stop anywhere. :ivar choices: the ways by all others, options and alternatives.
    """

    repeats: int
    choices: int


def found(pattern: str, text: str) -> bool | None:
    """Whether a pattern is in a text (``re.search``); ``None`` where that cannot be told in bounded time, or at all."""
    if len(text) > _LONGEST_TEXT or not bounded(pattern, len(text)):
        return None
    compiled = _compiled(pattern)
    return None if compiled is None else compiled.search(text) is not None


def bounded(pattern: str, length: int = 64) -> bool:
    """Whether the ways in which a pattern can be in a text of this length are few enough to be tried."""
    shape = _shape(pattern)
    return shape is not None and (length + 1) ** min(shape.repeats, 20) * shape.choices <= _MOST_WAYS


def flaw(pattern: str) -> str | None:
    """Why a text is no regular expression, by Python's words; ``None``: it is one."""
    try:
        _compile(pattern)
    except (re.error, OverflowError) as error:
        return str(error)
    except RecursionError:
        return "it is nested too deeply"
    return None


@lru_cache(maxsize=1024)
def _compiled(pattern: str) -> re.Pattern[str] | None:
    return _compile(pattern) if flaw(pattern) is None else None


def _compile(pattern: str) -> re.Pattern[str]:
    with warnings.catch_warnings():  # of what later versions of Python may read in another way
        warnings.simplefilter("ignore")
        return re.compile(pattern)


@lru_cache(maxsize=1024)
def _shape(pattern: str) -> _Shape | None:
    """``None``: exponentially many ways, or a form that is not understood."""
    if len(pattern) > _LONGEST_PATTERN or _REFERENCE.search(pattern):
        return None
    # A search begins anywhere in the text, unless the pattern holds on to its beginning.
    anchored = pattern.startswith(("^", r"\A")) and "|" not in pattern
    rest = _DIVIDED.sub(lambda match: "a*b*" if _divides(match["mark"], match["class"]) else match[0], pattern)
    rest = _MANNER.sub("", _OPENING.sub("(", _CLASS.sub("a", _ESCAPED.sub("a", rest))))
    flat = _flat(rest)
    if flat is None or "(" in flat or ")" in flat:
        return None
    repeats, choices = int(not anchored), 2 ** min(flat.count("?") + flat.count("|"), 64)
    for times in _AGAIN.findall(flat):
        least, _, most = times.strip("{}").partition(",")
        if most:
            choices = min(choices * max(1, int(most) - int(least or 0) + 1), _MOST_WAYS + 1)
        else:
            repeats += 1
    return _Shape(repeats, choices)


def _divides(mark: str, allowed: str) -> bool:
    return re.fullmatch(allowed, mark.removeprefix("\\")) is None


def _flat(pattern: str) -> str | None:
    """The pattern without groups, from the innermost outwards; ``None``: one is repeated that has several ways."""
    while len(pattern) <= _LONGEST_PATTERN * 4:
        match = _GROUP.search(pattern)
        if match is None:
            return _COUNT.sub("", pattern)
        body, times = match[1], match[2] or ""
        if _AGAIN.search(body) or "?" in body or "|" in body:
            count = _COUNT.fullmatch(times)
            if count and len(times) <= 4:
                body, times = body * int(times.strip("{}")), ""
            if times not in ("", "?"):
                return None
        elif times:
            body = "a"
        pattern = pattern[: match.start()] + body + times + pattern[match.end() :]
    return None
