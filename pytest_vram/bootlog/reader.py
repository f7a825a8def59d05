"""Reading a whole log, and following one that is being written."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from pytest_vram.bootlog.boot import Boot
from pytest_vram.bootlog.grammar import grammar, recognise
from pytest_vram.errors import BadInput
from pytest_vram.units import mib

_SNIFF = 1 << 18
#: Bytes of a file that are read. The boot is at the beginning; requests, which may go on for days, come after it.
READ = 64 << 20


def read(text_or_path: str | Path, *, engine: str | None = None, patterns: Mapping[str, str] = {}) -> Boot:
    """Read a boot log; of a file, the first :data:`READ` bytes, which a warning then says.

    :param text_or_path: a path, or the text itself: a string with a newline in it, or one that is no existing path.
    :param engine: name of the engine; recognised by its phrases where it is not given.
    :param patterns: phase → regular expression, for engines without a grammar of their own.
    :raises BadInput: nothing to read, a folder, or something that is not a text.
    """
    if isinstance(text_or_path, str) and ("\n" in text_or_path or not _exists(text_or_path)):
        text, origin, cut = text_or_path, "the text", None
    else:
        path = Path(text_or_path)
        text, cut = _beginning(path)
        origin = str(path)
    if not text.strip():
        raise BadInput(f"{origin} is empty: there is no log to read")
    if text.count("\0") or text.count("\ufffd") > len(text) // 20:
        raise BadInput(f"{origin} is not a text, so it is not a log")
    return _read(text, engine or recognise(text[:_SNIFF]), patterns, cut)


def read_own(path: Path, *, engine: str, patterns: Mapping[str, str] = {}) -> Boot:
    """Read the log of a server that this run started. Never raises for what the log is or holds.

    A log that is missing, empty or unreadable is no evidence, with the reason as its warning. Stray bytes between
    lines of text do not hide the lines.
    """
    try:
        text, cut = _beginning(path)
        if not text.strip():
            return without_evidence(engine, "the server has written nothing to its log")
        boot = _read(text, engine, patterns, cut)
    except BadInput as error:
        return without_evidence(engine, str(error))
    if boot.entries or text.count("\0") + text.count("\ufffd") <= len(text) // 20:
        return boot
    strange = f"the log {path} is mostly not text, so little of it could be read"
    return msgspec.structs.replace(boot, warnings=(strange, *boot.warnings))


def without_evidence(engine: str, reason: str) -> Boot:
    """A boot of which nothing is known, for this reason."""
    return Boot(engine=engine, era="", evidence="none", warnings=(reason,))


def _read(text: str, engine: str, patterns: Mapping[str, str], cut: str | None) -> Boot:
    reader = grammar(engine, patterns)
    # Not splitlines(): form feeds and Unicode line separators inside a model's text are not ends of log lines.
    for line in text.split("\n"):
        reader.feed(line)
    boot = reader.boot()
    return boot if cut is None else msgspec.structs.replace(boot, warnings=(cut, *boot.warnings))


def _beginning(path: Path) -> tuple[str, str | None]:
    """The text of a file, at most :data:`READ` bytes of it, and a sentence where that is not all.

    :raises BadInput: it cannot be read.
    """
    try:
        if path.is_dir():
            raise BadInput(f"{path} is a folder: give the log file itself")
        with path.open("rb") as stream:
            found = stream.read(READ + 1)
            size = stream.seek(0, 2) if stream.seekable() else len(found)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise BadInput(f"{path} cannot be read: {reason}") from None
    if len(found) <= READ:
        return found.decode("utf-8", "replace"), None
    whole = found[: found.rfind(b"\n", 0, READ) + 1] or found[:READ]  # a line that was cut may read as another
    cut = f"the log {path} has {mib(size)}: only its first {mib(READ)}, where the boot is, were read"
    return whole.decode("utf-8", "replace"), cut


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
