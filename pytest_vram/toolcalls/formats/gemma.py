"""Gemma 4's own notation: ``<|tool_call>call:NAME{key:<|"|>text<|"|>,count:5}<tool_call|>``, and FunctionGemma's.

It is no JSON: strings stand between two ``<|"|>`` tokens and escape nothing, keys are bare.
"""

from __future__ import annotations

import re
from typing import Any

from pytest_vram.text import printable
from pytest_vram.toolcalls.tolerant import Defect

QUOTE = '<|"|>'
#: What FunctionGemma, the smaller and older one, writes around a string and around a call.
ESCAPE = "<escape>"
FUNCTION_OPENER = re.compile(r"<start_function_call>\s{0,20}(?:call:)?(?=[\w.:-]{1,200}\{)", re.ASCII)
FUNCTION_CLOSER = re.compile(r"<end_function_call>")
#: Opener as it should be, or collapsed into the name.
OPENER = re.compile(r"<\|tool_call>\s{0,20}call:|<\|tool_call>(?=[\w.-]+\{)|<\|?tool_call:(?:call:)?", re.ASCII)
CLOSER = re.compile(r"<tool_call\|>")
NAME = re.compile(r"[\w.:-]{1,200}(?=\{)")
#: Arguments without any call around them.
BARE = re.compile(r'\{?\s{0,20}[\w.-]{1,100}:<\|"\|>')
_SPACE = re.compile(r"\s*")
_KEY = re.compile(r'(?:<\|"\|>)?([^:{}\[\],<"]{1,200})(?:<\|"\|>)?:')
_PLAIN = re.compile(r"(-?\d{1,400}(?:\.\d{1,400})?(?:[eE][+-]?\d{1,5})?|true|false|null)(?=\s*(?:[,}\]]|$))", re.ASCII)
_NEXT = re.compile(r"\s*(?:[,}\]:]|<tool_call\||<end_function_call>|$)")
#: Where text without delimiters ends: before the next key, or where the object does.
_BARE_END = re.compile(r",\s*[\w.-]+:|\}|\]", re.ASCII)
_SWALLOWED = re.compile(r",\s*([\w.-]+):$", re.ASCII)
_LAST_BRACKET = re.compile(r"\}\s*$")
#: Longest text without an opening delimiter that is looked into.
_LONGEST_BARE = 20_000
_DEEPEST = 64


class _Reader:
    def __init__(self, text: str, end: int, mark: str) -> None:
        self.text = text
        self.mark = mark
        self.end = end
        self.defects: list[Defect] = []
        self._quote = 0

    def quote(self, at: int) -> int:
        """Offset of the next delimiter, -1 where there is none; looked for once."""
        if 0 <= self._quote < at or self._quote == 0:
            self._quote = self.text.find(self.mark, at, self.end)
        return self._quote

    def note(self, kind: str, at: int, detail: str) -> None:
        if len(self.defects) < 100:
            self.defects.append(Defect(kind, at, detail))

    def space(self, at: int) -> int:
        match = _SPACE.match(self.text, at, self.end)
        return match.end() if match is not None else at

    def object(self, at: int, depth: int, *, bare: bool = False) -> tuple[dict[str, Any], int]:
        """An object whose first key is at ``at``; ``bare``: it has no brackets."""
        opened = at
        found: dict[str, Any] = {}
        while True:
            at = self.space(at)
            if at >= self.end:
                if not bare:
                    self.note("missing_bracket", opened - 1, "this object is never closed")
                return found, self.end
            if self.text[at] == "}":
                return found, at + 1
            if self.text[at] == ",":
                at += 1
                continue
            match = _KEY.match(self.text, at, self.end)
            if match is None:
                self.note("unquoted_key", at, "a key and ':' are expected here")
                return found, self.skip(at)
            key = match[1].strip()
            if key in found:
                self.note("duplicate_key", at, f"the key {printable(key)!r} stands twice")
            found[key], at = self.value(match.end(), depth + 1, key)

    def skip(self, at: int) -> int:
        ended = self.text.find("}", at, self.end)
        return self.end if ended < 0 else ended + 1

    def value(self, at: int, depth: int, key: str) -> tuple[Any, int]:
        at = self.space(at)
        if self.text.startswith(self.mark, at, self.end):
            return self.string(at + len(self.mark), key)
        if depth > _DEEPEST:
            self.note("wrapper_mismatch", at, f"values are nested more than {_DEEPEST} deep")
            return None, self.end
        if self.text.startswith("{", at, self.end):
            return self.object(at + 1, depth)
        if self.text.startswith("[", at, self.end):
            return self.array(at + 1, depth, key)
        match = _PLAIN.match(self.text, at, self.end)
        if match is not None:
            return _number(match[1]), match.end()
        return self.bare_text(at, key)

    def array(self, at: int, depth: int, key: str) -> tuple[list[Any], int]:
        opened = at
        found: list[Any] = []
        while True:
            at = self.space(at)
            if at >= self.end:
                self.note("missing_bracket", opened - 1, f"the list of {printable(key)!r} is never closed")
                return found, self.end
            if self.text[at] == "]":
                return found, at + 1
            if self.text[at] == ",":
                at += 1
                continue
            if self.text[at] == "}":
                self.note("missing_bracket", opened - 1, f"the list of {printable(key)!r} is never closed")
                return found, at
            value, at = self.value(at, depth + 1, key)
            found.append(value)

    def string(self, at: int, key: str) -> tuple[str, int]:
        """Text after an opening delimiter."""
        shown = printable(key[:60])
        ended = self.quote(at)
        if ended >= 0 and _NEXT.match(self.text, ended + len(self.mark), self.end):
            return self.text[at:ended], ended + len(self.mark)
        if ended >= 0:
            swallowed = _SWALLOWED.search(self.text, max(at, ended - 200), ended)
            if swallowed is not None:
                self.note(
                    "unterminated_string",
                    swallowed.start(),
                    f"the text of {shown!r} has no closing delimiter {self.mark} before the next key",
                )
                return self.text[at : swallowed.start()], swallowed.start()
            self.note(
                "unterminated_string", at, f"the text of {shown!r} is followed by neither ',' nor a closing bracket"
            )
            return self.text[at:ended], ended + len(self.mark)
        self.note("unterminated_string", at, f"the text of {shown!r} has no closing delimiter {self.mark}")
        match = _LAST_BRACKET.search(self.text, max(at, self.end - 50), self.end)
        stop = match.start() if match is not None else self.end
        return self.text[at:stop], stop

    def bare_text(self, at: int, key: str) -> tuple[str, int]:
        """Text without an opening delimiter."""
        shown = printable(key[:60])
        ended = self.quote(at)
        if 0 <= ended < at + _LONGEST_BARE and _NEXT.match(self.text, ended + len(self.mark), self.end):
            self.note("unterminated_string", at, f"the text of {shown!r} has no opening delimiter {self.mark}")
            return self.text[at:ended], ended + len(self.mark)
        match = _BARE_END.search(self.text, at, self.end)
        stop = match.start() if match is not None else self.end
        self.note(
            "unterminated_string",
            at,
            f"the text of {shown!r} has neither an opening nor a closing delimiter {self.mark}",
        )
        return self.text[at:stop], max(stop, at)


def _number(word: str) -> Any:
    words = {"true": True, "false": False, "null": None}
    if word in words:
        return words[word]
    return int(word) if word.lstrip("-").isdigit() else float(word)


def arguments(
    text: str, start: int, end: int, *, bare: bool = False, mark: str = QUOTE
) -> tuple[dict[str, Any], int, list[Defect]]:
    """Arguments whose ``{`` is at ``start``: their value, where they end, what is wrong with them.

    :param bare: there is no ``{``. :param mark: the token on both sides of a string.
    """
    reader = _Reader(text, end, mark)
    found, stop = reader.object(start if bare else start + 1, 0, bare=bare)
    return found, stop, reader.defects
