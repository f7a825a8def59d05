"""One pass over a text in search of calls: what was found, what is left as plain text, how much work may be done."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from pytest_vram.text import behind
from pytest_vram.toolcalls.cases import Tool
from pytest_vram.toolcalls.tolerant import Defect, Parsed, parse

#: Calls that are read of one answer; more are a repetition.
MOST_CALLS = 1000
#: Attempts at reading bare JSON that turn out to be none, such as brackets in prose.
_MOST_TRIES = 5000
#: Offsets of a text are looked at this many times by attempts that had to be taken back.
_PASSES = 2
#: Copying so many characters takes as long as reading one.
_COPIED_AS_ONE = 100


class FoundCall(NamedTuple):
    """A call in a text.

    :ivar native: whether it stands in the wrapper of a chat template, which a server knows. :ivar defects: of this call
        alone.
    """

    name: str | None
    arguments: Any
    start: int
    end: int
    form: str
    native: bool
    defects: tuple[Defect, ...] = ()


class Step(NamedTuple):
    """What a reader did. :ivar end: where to go on. :ivar plain: whether the text up to there is plain text."""

    end: int
    plain: bool = False


Reader = Callable[["Scan", "re.Match[str]"], Step]


class Scan:
    """A text that is being read.

    :ivar asked: the protocol that asked for one object with ``calls``, ``json_schema`` or ``few_shot``; "": none did.
    :ivar answered: how many values of the text say in so many words that nothing is called.
    :ivar calls: in the order of the text. :ivar defects: those that belong to no call. :ivar plain: spans of text that
        belong to no call. :ivar thinking: spans of thinking. :ivar fences: spans of closed code fences without a call,
        which are plain text too.
    """

    def __init__(self, text: str, tools: Sequence[Tool], asked: str = "") -> None:
        self.text = text
        self.tools = {tool.name: tool for tool in tools}
        self.calls: list[FoundCall] = []
        self.defects: list[Defect] = []
        self.plain: list[tuple[int, int]] = []
        self.thinking: list[tuple[int, int]] = []
        self.fences: list[tuple[int, int]] = []
        self.tries = _MOST_TRIES
        self.before_is_blank = True
        self.asked = asked
        self.answered = 0
        self.last = len(text.rstrip())
        self._left = _PASSES * len(text) + 65_536

    def call(
        self,
        name: str | None,
        arguments: Any,
        span: tuple[int, int],
        form: str,
        *,
        native: bool = True,
        defects: Sequence[Defect] = (),
    ) -> None:
        """Note a call."""
        if len(self.calls) < MOST_CALLS:
            self.calls.append(FoundCall(name, arguments, span[0], span[1], form, native, tuple(defects)))

    def loose(self, kind: str, at: int, detail: str) -> None:
        """Note a defect of no call."""
        if len(self.defects) < MOST_CALLS:
            self.defects.append(Defect(kind, at, detail))

    def parse(self, start: int, closer: re.Pattern[str] | None = None) -> Parsed | None:
        """The JSON value that begins at ``start``.

        A closer inside of a string is part of the string. Where the value is malformed, so that its strings cannot be
        trusted, it is read up to the first closer as well, and the reading with fewer defects counts.
        """
        whole = parse(self.text, start)
        if whole is None or not whole.defects:
            return whole
        self._left -= whole.end - start
        if closer is None:
            return whole
        match = closer.search(self.text, start, whole.end)
        if match is None:
            return whole
        self._left -= match.start() // _COPIED_AS_ONE
        short = parse(self.text[: match.start()], start)
        return whole if short is None or len(whole.defects) < len(short.defects) else short

    @property
    def exhausted(self) -> bool:
        """Whether so much was read twice that the rest of the text is left alone."""
        return self._left <= 0

    def spend(self, characters: int) -> None:
        """Note that so many characters were read in vain."""
        self._left -= characters

    def may_try(self) -> bool:
        """Whether one more attempt at bare JSON is allowed."""
        self.tries -= 1
        return self.tries >= 0 and self._left > 0

    def blank(self, start: int, end: int) -> bool:
        """Whether there is only white space between two offsets."""
        return start >= end or behind(SPACE, self.text, start, end) == end

    def quoted(self, at: int) -> bool:
        """Whether what stands at an offset is being talked about: it follows a quotation mark or a back-tick."""
        return at > 0 and self.text[at - 1] in "`\"'“‘"


SPACE = re.compile(r"\s*")


def after(text: str, parsed: Parsed) -> tuple[int, list[Defect]]:
    """Offset after a value, and its defects: brackets that are too many belong to it already."""
    return parsed.end, list(parsed.defects)
