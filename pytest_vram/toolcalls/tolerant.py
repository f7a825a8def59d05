"""Reading JSON that a model wrote: what it means, and everything that is wrong with it.

Nothing here repairs a score: a text with a defect is malformed, whatever was read out of it.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Defect(NamedTuple):
    """One thing that is wrong.

    :ivar kind: of :data:`pytest_vram.toolcalls.diagnosis.KINDS`. :ivar at: character offset in the text, -1 where
        it has none.
    :ivar detail: a clause for a person, such as ``the object that begins at character 3 is never closed``.
    """

    kind: str
    at: int
    detail: str


class Parsed(NamedTuple):
    """A value read tolerantly.

    :ivar value: what was meant, as far as it can be told. :ivar defects: in the order of the text.
    :ivar end: offset after it.
    """

    value: Any
    defects: tuple[Defect, ...]
    end: int


def parse(text: str, start: int = 0) -> Parsed | None:
    """Read one JSON value that begins at or after ``start`` (white space is skipped); ``None``: none begins there.

    A well-formed value (RFC 8259, without NaN and duplicate keys) has no defects and reads as :func:`json.loads` reads
    it. Text after the value is left alone. Linear in time and memory for any input.
    """
    raise NotImplementedError  # frame


def strict(text: str) -> Any:
    """The value of a whole text that is JSON to the letter: no NaN or Infinity, no duplicate key, nothing around it.

    :raises ValueError: naming what is wrong.
    """
    raise NotImplementedError  # frame
