"""What a verb gives back, and how it reaches the terminal."""

from __future__ import annotations

import contextlib
import io
import json
import re
import sys
from typing import Any, TextIO

import msgspec

from pytest_vram.text import encoded, printable

HOLDS, FAILS, BAD_USE, INCONCLUSIVE, INTERRUPTED = 0, 1, 2, 3, 130
#: Signs of our own tables that ASCII has no sign for.
_ASCII = str.maketrans({"–": "-", "…": "...", "·": "-", "×": "x"})
_NOT_ASCII = re.compile(r"[^\n -~]")


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a verb.

    :ivar code: exit code: 0 holds, 1 does not, 2 bad use, 3 inconclusive, 130 interrupted.
    :ivar document: the JSON document of ``--json``. :ivar lines: the same for people.
    """

    code: int
    document: Any
    lines: tuple[str, ...] = ()


def prepare() -> None:
    """Let the standard streams write what their encoding lacks as escapes, whatever the environment chose."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def show(answer: Answer, *, as_json: bool) -> None:
    """Print an answer: the JSON document alone, or the lines. Nothing of it can command the terminal."""
    if as_json:
        print(_document(answer.document))
        return
    for line in answer.lines:
        text = "\n".join(printable(part) for part in line.split("\n"))
        print(text if sys.stdout is None or speaks_unicode(sys.stdout) else text.translate(_ASCII))


def refusal(message: str, *, code: int, verb: str) -> Answer:
    """The answer of a verb that could not do its work; the sentence itself goes to the standard error stream."""
    return Answer(code=code, document={"format": "pytest-vram/error/1", "verb": verb, "error": message, "exit": code})


def progress(text: str) -> None:
    """Tell a person what is going on; never on standard output, which may be a document."""
    if sys.stderr is None:  # closed by the caller; print would take standard output instead
        return
    with contextlib.suppress(OSError):  # there is nowhere left to say that it cannot be said
        print("\n".join(printable(part) for part in text.split("\n")), file=sys.stderr, flush=True)


def _document(document: Any) -> str:
    # Outside of ASCII there are only texts, where an escape means the same, and every encoding has it.
    return _NOT_ASCII.sub(_json_escape, msgspec.json.format(encoded(document), indent=2).decode())


def _json_escape(match: re.Match[str]) -> str:
    character = match[0]
    if character.isprintable() and (sys.stdout is None or speaks_unicode(sys.stdout)):
        return character
    return json.dumps(character)[1:-1]


def speaks_unicode(stream: TextIO) -> bool:
    """Whether a stream takes more than ASCII."""
    return (stream.encoding or "ascii").lower().replace("-", "").startswith("utf")
