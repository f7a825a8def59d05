"""Regular expressions that users give: compiled, and refused where looking for them could take for ever.

Python tries one way of matching after the other, and has no limit on it. What a pattern can cost on a name of 63 bytes
(ggml's longest) is bounded here from how it is written: a repetition of something that can match in several ways is
exponential and refused; repetitions side by side cost the ways of placing their ends; alternatives cost as many ways as
can match at one place.
"""

from __future__ import annotations

import math
import re

import msgspec

from pytest_vram.errors import BadInput

LONGEST = 4096  # characters of a pattern
_NAME = 63
_MOST_BITS = 28.0  # of the ways in which one name can be tried: some seconds at the very most
_MOST_DEPTH = 50
_COUNT = re.compile(r"\{([0-9]{0,9})(,?)([0-9]{0,9})\}")
_OPENING = re.compile(r"\((?:\?(?:[:=!>]|<[=!]|P?<\w{1,80}>|P=\w{1,80}|[a-zA-Z-]{1,10}[:)]))?")
_CLASS = re.compile(r"\[\^?\]?(?:\\.|[^\]\\])*\]", re.DOTALL)
_PLAIN = re.compile(r"(?:\w|\\[^\w]|[-_ ])*", re.ASCII)


class _Group(msgspec.Struct):
    """A group that is being read.

    :ivar repeats: in the alternative that is being read, and ``ways`` in bits of what else can differ there; ``most_…``
        of the alternatives before. :ivar start: where it begins. :ivar begun: where its alternative does.
    """

    start: int
    begun: int
    repeats: int = 0
    ways: float = 0.0
    most_repeats: int = 0
    most_ways: float = 0.0
    words: list[str] = []

    def next_alternative(self, text: str, at: int) -> None:
        self.words = [*self.words, text[self.begun : at]]
        self.most_repeats = max(self.most_repeats, self.repeats)
        self.most_ways = max(self.most_ways, self.ways)
        self.begun, self.repeats, self.ways = at + 1, 0, 0.0


def compiled(text: str, origin: str) -> re.Pattern[str]:
    """The pattern, where looking for it in a name takes a bounded time.

    :raises BadInput: it is no regular expression, or could take too long; ``origin`` is the option that it came from.
    """
    short = text if len(text) <= 80 else f"{text[:77]}…"
    try:
        if len(text) > LONGEST:
            raise BadInput(f"{origin}: {short!r} is {len(text)} characters long; {LONGEST} are the most")
        found = re.compile(text)
    except (re.error, RecursionError, OverflowError) as error:
        raise BadInput(f"{origin}: {short!r} is not a regular expression: {error}") from None
    if _bits(text) > _MOST_BITS:
        raise BadInput(
            f"{origin}: {short!r} could be tried in too many ways: write it without a repetition inside of a"
            " repetition, and with fewer of .* and the like"
        )
    return found


def _bits(text: str) -> float:
    """How many ways there are to try a name, as a power of two; infinite where it grows with each character."""
    stack = [_Group(start=0, begun=0)]
    at, last_repeats, last_ways = 0, 0, 0.0  # of what stands before ``at``: a quantifier is about it
    while at < len(text):
        group = stack[-1]
        letter = text[at]
        if letter == "|":
            group.next_alternative(text, at)
            at += 1
            last_repeats, last_ways = 0, 0.0
            continue
        if letter == "(":
            if len(stack) > _MOST_DEPTH:
                return math.inf
            opening = _OPENING.match(text, at)
            end = opening.end() if opening is not None else at + 1
            if text[end - 1] != ")":
                stack.append(_Group(start=at, begun=end))
            at = end
            continue
        if letter == ")" and len(stack) > 1:
            group.next_alternative(text, at)
            stack.pop()
            last_repeats = group.most_repeats
            last_ways = group.most_ways + math.log2(_chain(group.words))
            stack[-1].repeats += last_repeats
            stack[-1].ways += last_ways
            at += 1
            continue
        quantifier = _quantifier(text, at)
        if quantifier is None:
            at = _after_atom(text, at)
            last_repeats, last_ways = 0, 0.0
            continue
        varies, many, at = quantifier
        if many and (last_repeats or last_ways):
            return math.inf
        if varies:
            group.repeats += many
            group.ways += 0.0 if many else 1.0
            last_repeats, last_ways = last_repeats + many, last_ways + (not many)
    group = stack[0]
    group.next_alternative(text, len(text))
    ends = math.comb(_NAME + group.most_repeats + 1, group.most_repeats + 1)  # where it begins is one more
    return math.log2(ends) + group.most_ways + math.log2(_chain(group.words))


def _quantifier(text: str, at: int) -> tuple[bool, bool, int] | None:
    """Whether the number of repetitions can differ, whether it can be more than one, and where the quantifier ends."""
    if text[at] in "*+?":
        varies, many, end = True, text[at] != "?", at + 1
    elif (counted := _COUNT.match(text, at)) is not None and counted[0] not in ("{}", "{,}"):
        least, most = counted[1] or "0", counted[3] if counted[2] else counted[1]
        varies, many, end = least != most, not most or int(most) > 1, counted.end()
    elif text.startswith("{,}", at):
        varies, many, end = True, True, at + 3
    else:
        return None
    return varies, many, end + (text[end : end + 1] in ("?", "+"))


def _after_atom(text: str, at: int) -> int:
    if text[at] == "\\":
        return at + 2
    if text[at] == "[" and (found := _CLASS.match(text, at)) is not None:
        return found.end()
    return at + 1


def _chain(words: list[str]) -> int:
    """How many of the alternatives can match at one place: of plain words those that begin like one another."""
    if len(words) == 1 or not all(_PLAIN.fullmatch(word) for word in words):
        return len(words)
    return max(sum(word.startswith(other) for other in words) for word in words)
