"""Reading a whole log, and following one that is being written."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pytest_vram.bootlog.boot import Boot
from pytest_vram.bootlog.grammar import grammar, recognise
from pytest_vram.errors import BadInput

_SNIFF = 1 << 18
_LARGEST = 1 << 30


def read(text_or_path: str | Path, *, engine: str | None = None, patterns: Mapping[str, str] = {}) -> Boot:
    """Read a boot log.

    :param text_or_path: a path, or the text itself: a string with a newline in it, or one that is no existing path.
    :param engine: name of the engine; recognised by its phrases where it is not given.
    :param patterns: phase → regular expression, for engines without a grammar of their own.
    :raises BadInput: nothing to read, a folder, or something that is not a text.
    """
    text, origin = _text(text_or_path)
    if not text.strip():
        raise BadInput(f"{origin} is empty: there is no log to read")
    if text.count("\0") or text.count("\ufffd") > len(text) // 20:
        raise BadInput(f"{origin} is not a text, so it is not a log")
    reader = grammar(engine or recognise(text[:_SNIFF]), patterns)
    # Not splitlines(): form feeds and Unicode line separators inside a model's text are not ends of log lines.
    for line in text.split("\n"):
        reader.feed(line)
    return reader.boot()


def _text(text_or_path: str | Path) -> tuple[str, str]:
    if isinstance(text_or_path, str):
        if "\n" in text_or_path or not _exists(text_or_path):
            return text_or_path, "the text"
        text_or_path = Path(text_or_path)
    try:
        if text_or_path.is_dir():
            raise BadInput(f"{text_or_path} is a folder: give the log file itself")
        if text_or_path.stat().st_size > _LARGEST:
            raise BadInput(f"{text_or_path} is larger than 1 GiB: cut it to the boot, which is at the beginning")
        return text_or_path.read_bytes().decode("utf-8", errors="replace"), str(text_or_path)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise BadInput(f"{text_or_path} cannot be read: {reason}") from None


def _exists(name: str) -> bool:
    try:
        return Path(name).exists()
    except (OSError, ValueError):  # too long for a path, or with a NUL in it
        return False


class Follower:
    """Follows a log as it is written, for the phases of a boot.

    :param engine: name of the engine; chooses the grammar.
    :param patterns: phase → regular expression, for engines without a grammar of their own.
    :raises BadInput: for a pattern that cannot be used.
    """

    def __init__(self, engine: str, patterns: Mapping[str, str] = {}) -> None:
        self._grammar = grammar(engine, patterns)

    def feed(self, line: str) -> str | None:
        """Take the next line; the phase that it begins, or ``None``. Never raises."""
        return self._grammar.feed(line)

    def boot(self) -> Boot:
        """What the lines so far said."""
        return self._grammar.boot()
