"""What a verb gives back, and how it reaches the terminal."""

from __future__ import annotations

import sys
from typing import Any

import msgspec

HOLDS, FAILS, BAD_USE, INCONCLUSIVE, INTERRUPTED = 0, 1, 2, 3, 130


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a verb.

    :ivar code: exit code: 0 holds, 1 does not, 2 bad use, 3 inconclusive, 130 interrupted.
    :ivar document: the JSON document of ``--json``. :ivar lines: the same for people.
    """

    code: int
    document: Any
    lines: tuple[str, ...] = ()


def show(answer: Answer, *, as_json: bool) -> None:
    """Print an answer: the JSON document alone, or the lines."""
    if as_json:
        raw = msgspec.json.format(msgspec.json.encode(answer.document), indent=2)
        print(raw.decode())
        return
    for line in answer.lines:
        print(line)


def refusal(message: str, *, code: int, verb: str) -> Answer:
    """The answer of a verb that could not do its work; the sentence itself goes to the standard error stream."""
    return Answer(code=code, document={"format": "pytest-vram/error/1", "verb": verb, "error": message, "exit": code})


def progress(text: str) -> None:
    """Tell a person what is going on; never on standard output, which may be a document."""
    print(text, file=sys.stderr, flush=True)
