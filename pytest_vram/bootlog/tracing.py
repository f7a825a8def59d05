"""Lines of Rust programs, such as text-generation-inference.

``warmup{max_input_length=4095}:warmup: text_generation_client: router/client/src/lib.rs:33: Server error: …``: spans
with their fields, then the module, the place in its source, and the message. Fields may hold what users sent, so that
nothing in them is the program's word. An error that ends such a program is printed as Rust's ``Debug`` writes it, in
quotation marks.
"""

from __future__ import annotations

import re
from typing import NamedTuple

_NAME = re.compile(r"[A-Za-z_][\w.-]{0,80}", re.ASCII)
#: What matters inside the fields of a span: braces, and words in quotation marks, in which braces do not count.
_PIECE = re.compile(r'[{}]|"(?:[^"\\]|\\.)*(?:"|$)')
_MODULE = re.compile(r"[a-z_][\w:]{0,120}: ", re.ASCII)
#: Spans of one line that are looked at.
_MOST = 32
#: What stands between the beginning of such a line and the words in quotation marks.
_ENDS = re.compile(
    r"^(?:Error: |thread '[^'\"]{0,80}' (?:\(\d{1,10}\) )?panicked at |called `Result::unwrap\(\)` on an `Err` value: )"
    r"[^\"{}]{0,200}\(\"$",
    re.ASCII,
)


class Traced(NamedTuple):
    """A line with spans: their names, and what comes after them."""

    spans: tuple[str, ...]
    text: str


def traced(text: str) -> Traced | None:
    """A line without its spans; ``None`` where it has none with fields, or where they do not end."""
    names: list[str] = []
    at = 0
    fields = False
    while len(names) < _MOST:
        name = _NAME.match(text, at)
        if name is None:
            break
        end = name.end()
        if text[end : end + 1] == "{":
            end = _closed(text, end)
            if end < 0:
                return None
            fields = True
        if text[end : end + 1] != ":":
            break
        names.append(name[0])
        at = end + 1
        if text[at : at + 1] == " ":
            at += 1
            break  # after the last span
    return Traced(tuple(names), text[at:]) if fields and _MODULE.match(text, at) else None


def ends_program(before: str) -> bool:
    """Whether this is what stands before the message of an error that ends a program, which is in quotation marks."""
    return _ENDS.match(before) is not None


def _closed(text: str, at: int) -> int:
    """Where the fields end that begin here; -1 where they do not."""
    depth = 0
    for piece in _PIECE.finditer(text, at):
        if piece[0] == "{":
            depth += 1
        elif piece[0] == "}":
            depth -= 1
            if depth == 0:
                return piece.end()
    return -1
