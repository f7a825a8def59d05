"""Reading a whole log, and following one that is being written."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

import msgspec

from pytest_vram.bootlog.boot import Boot
from pytest_vram.bootlog.boots import Boots
from pytest_vram.bootlog.files import Log, log_of_text, opened, spooled, strange
from pytest_vram.bootlog.grammar import GRAMMARS, recognise
from pytest_vram.bootlog.peaks import with_peaks
from pytest_vram.bootlog.samples import Samples, read_samples
from pytest_vram.bootlog.scanning import hand_over
from pytest_vram.errors import BadInput


def read(
    text_or_path: str | Path,
    *,
    engine: str | None = None,
    samples: str | Path | Samples | None = None,
    patterns: Mapping[str, str] = {},
) -> Boot:
    """Read a boot log of any size; of a log with several boots, the last one.

    :param text_or_path: a path (a file may be packed by gzip, or in UTF-16), or the text itself: a string with a
        newline in it, or one that is no existing path.
    :param engine: name of the engine; recognised by its phrases where it is not given.
    :param samples: of the memory meanwhile, as a file, a text or read already: :func:`read_samples`. Each phase gets
        its peak then.
    :param patterns: phase → regular expression, for engines without a grammar of their own.
    :raises BadInput: nothing to read, a folder, something that is not a text, or a log of no known engine; or samples
        that are none.
    """
    if isinstance(text_or_path, str) and ("\n" in text_or_path or not _exists(text_or_path)):
        return sampled(_judged(log_of_text(text_or_path), engine, patterns), samples)
    with opened(Path(text_or_path)) as log:
        return sampled(_judged(log, engine, patterns), samples, str(text_or_path))


def read_stream(
    stream: BinaryIO,
    origin: str,
    *,
    engine: str | None = None,
    samples: str | Path | Samples | None = None,
    patterns: Mapping[str, str] = {},
) -> Boot:
    """Read a boot log from a stream, such as standard input, to its end; otherwise as :func:`read`."""
    with spooled(stream, origin) as log:
        return sampled(_judged(log, engine, patterns), samples)


def sampled(boot: Boot, samples: str | Path | Samples | None, log: str = "") -> Boot:
    """A boot with the peaks of its phases, where there are samples.

    :param log: path of the log, by whose name the journal of a run knows it.

    :raises BadInput: the samples are none.
    """
    if samples is None:
        return boot
    return with_peaks(boot, samples if isinstance(samples, Samples) else read_samples(samples), log)


def read_own(path: Path, *, engine: str, patterns: Mapping[str, str] = {}) -> Boot:
    """Read the log of a server that this run started. Never raises for what the log is or holds.

    A log that is missing, empty or unreadable is no evidence, with the reason as its warning. Stray bytes between
    lines of text do not hide the lines.
    """
    try:
        with opened(path) as log:
            head = log.beginning()
            if not log.zeros and not head.strip():
                return without_evidence(engine, "the server has written nothing to its log")
            boot = _read(log, engine, patterns)
    except BadInput as error:
        return without_evidence(engine, str(error))
    if boot.entries or (head and not strange(head)):
        return boot
    return msgspec.structs.replace(boot, warnings=(_strange(path), *boot.warnings))


def without_evidence(engine: str, reason: str) -> Boot:
    """A boot of which nothing is known, for this reason."""
    return Boot(engine=engine, era="", evidence="none", warnings=(reason,))


def _strange(path: Path) -> str:
    return f"the log {path} is mostly not text, so little of it could be read"


def _judged(log: Log, engine: str | None, patterns: Mapping[str, str]) -> Boot:
    head = log.beginning()
    if not log.zeros and not head.strip() and not any(block.strip() for block in log.blocks()):
        raise BadInput(log.notes[0] if log.notes else f"{log.origin} is empty: there is no log to read")
    if strange(head) or not head:
        raise BadInput(f"{log.origin} is not a text, so it is not a log")
    return _read(log, engine or ("command" if patterns else _recognised(log)), patterns)


def _recognised(log: Log) -> str:
    blocks = log.blocks()
    for block in blocks:
        # With the next one: a last line without an end comes by itself, and may say more than all before it.
        engine = recognise((block + next(blocks, b"")).decode("utf-8", "replace"))
        if engine is not None:
            return engine
    raise unknown_engine(log.origin)


def unknown_engine(origin: str) -> BadInput:
    """What is said of a log that gives no engine away."""
    return BadInput(
        f"{origin} is the log of no engine that is known here ({', '.join(engines())}): where it is one of theirs,"
        " name it with --engine"
    )


def engines() -> tuple[str, ...]:
    """The engines whose logs are read, by the names that ``--engine`` takes."""
    return tuple(name for name in GRAMMARS if name != "llama.cpp")


def _read(log: Log, engine: str, patterns: Mapping[str, str]) -> Boot:
    reader = Boots(engine, patterns)
    hand_over(log.blocks(), reader)
    boot = with_peaks(reader.boot())
    return msgspec.structs.replace(boot, warnings=(*log.notes, *boot.warnings)) if log.notes else boot


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
        self._boots = Boots(engine, patterns)

    def feed(self, line: str) -> str | None:
        """Take the next line; the phase that it begins, or ``None``. Never raises."""
        return self._boots.feed(line)

    def boot(self) -> Boot:
        """What the lines so far said."""
        return with_peaks(self._boots.boot())
