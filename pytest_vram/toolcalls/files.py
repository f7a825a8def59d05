"""Opening files of cases: a path may name anything, so that nothing may block and nothing is read without a limit."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from importlib.resources.abc import Traversable
from pathlib import Path

from pytest_vram.errors import BadCases

#: Bytes of one file, and of one line of it. A conversation that fills 128 K tokens has about 600 KB.
LARGEST_FILE = 64 << 20
LONGEST_LINE = 8 << 20
CASES = "cases are read from JSONL files of at most 64 MiB and from folders of them"


def read_file(entry: Traversable, label: str, wanted: str = CASES) -> bytes:
    """All of a file that is a file.

    :param wanted: what is read here, as a clause.
    :raises BadCases: it is none, cannot be read, is too large, or UTF-16.
    """
    try:
        data = _bytes_of(entry, label, wanted) if isinstance(entry, Path) else entry.read_bytes()
    except OSError as error:
        raise BadCases(f"{label} cannot be read: {error.strerror or error}") from None
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise BadCases(f"{label} is UTF-16 by its first bytes: save it as UTF-8")
    return data.removeprefix(b"\xef\xbb\xbf")


def text_lines(data: bytes, label: str) -> Iterable[tuple[int, str]]:
    """(number, text) of the lines that are not blank. :raises BadCases: a line that is no text, or is too long."""
    for number, line in enumerate(data.split(b"\n"), 1):
        if len(line) > LONGEST_LINE:
            raise BadCases(f"{label}:{number} is longer than {LONGEST_LINE >> 20} MiB: no case is")
        if b"\0" in line:
            raise BadCases(f"{label}:{number} holds a NUL byte: this is no text file")
        try:
            text = line.decode("utf-8").strip()
        except UnicodeDecodeError as error:
            raise BadCases(
                f"{label}:{number} is not UTF-8 at byte {error.start} of the line: save it as UTF-8"
            ) from None
        if text:
            yield number, text


def _bytes_of(path: Path, label: str, wanted: str) -> bytes:
    """Without waiting: opening a named pipe would, for a writer that may never come."""
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    with open(handle, "rb") as file:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise BadCases(f"{label} is not a file: {wanted}")
        data = file.read(LARGEST_FILE + 1)
    if len(data) > LARGEST_FILE:
        raise BadCases(f"{label} is larger than {LARGEST_FILE >> 20} MiB: {wanted}")
    return data
