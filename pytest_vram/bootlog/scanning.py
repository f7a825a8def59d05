"""The lines of a log that matter, handed to its grammar; the others are counted.

Looking for a phrase in a block of bytes costs a hundredth of what splitting the block into lines costs, so that a night
at full verbosity is read in seconds.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable
from typing import Protocol

from pytest_vram.bootlog.boot import Phase
from pytest_vram.bootlog.files import LONGEST_LINE

#: Phrases that are looked for one after another; of more than these a single pattern is faster.
_MOST_PHRASES = 80
#: A phrase without any sign of a regular expression but escaped characters.
_PLAIN = re.compile(r"(?:[^\\.^$*+?{}\[\]()|]|\\[^\w])+", re.ASCII)


class Takes(Protocol):
    """What lines are handed to: a grammar."""

    words: re.Pattern[str] | None
    noise: re.Pattern[str] | None

    def skip(self, lines: int) -> None: ...

    def feed(self, raw: str) -> Phase | None: ...


def hand_over(blocks: Iterable[bytes], reader: Takes) -> None:
    """Feed the lines that hold one of the reader's words, and the first line, and tell it how many others there were.

    :param blocks: of whole lines, as UTF-8 (what is not UTF-8 is replaced).
    """
    find = None if reader.words is None else _finder(reader.words)
    if find is not None and reader.noise is not None:
        find = _without_noise(find, reader.noise)
    first = True
    for block in blocks:
        if find is None:
            _feed_all(block, reader)
        else:
            starts = find(block)
            _feed_some(block, [0, *starts] if first and starts[:1] != [0] else starts, reader)
        first = False


def _finder(words: re.Pattern[str]) -> Callable[[bytes], list[int]]:
    """What finds, in a block, where the lines begin that hold one of the words."""
    phrases = _phrases(words)
    if phrases is not None and len(phrases) <= _MOST_PHRASES:
        return functools.partial(_with_phrases, phrases=phrases)
    if words.flags & re.ASCII and words.pattern.isascii():
        pattern = re.compile(words.pattern.encode("ascii"), words.flags & ~(re.ASCII | re.UNICODE) | re.MULTILINE)
        return functools.partial(_with_pattern, pattern=pattern)
    return functools.partial(_line_by_line, words=words)


def _feed_all(block: bytes, reader: Takes) -> None:
    # Not splitlines(): form feeds and Unicode line separators inside a model's text are not ends of log lines.
    for line in block.removesuffix(b"\n").split(b"\n"):
        reader.feed(line[:LONGEST_LINE].decode("utf-8", "replace"))


def _feed_some(block: bytes, starts: list[int], reader: Takes) -> None:
    at = 0
    for start in starts:
        if left := block.count(b"\n", at, start):
            reader.skip(left)
        end = block.find(b"\n", start)
        end = len(block) if end < 0 else end
        reader.feed(block[start : min(end, start + LONGEST_LINE)].decode("utf-8", "replace"))
        at = end + 1
    left = block.count(b"\n", at) + (at < len(block) and not block.endswith(b"\n"))
    if left:
        reader.skip(left)


def _without_noise(find: Callable[[bytes], list[int]], noise: re.Pattern[str]) -> Callable[[bytes], list[int]]:
    """The same search, in what lies between the lines of noise: runs of these are passed over as a whole."""
    runs = re.compile(rb"(?:^(?:" + noise.pattern.encode("ascii") + rb")[^\n]*\n)++", re.MULTILINE)

    def between(block: bytes) -> list[int]:
        starts: list[int] = []
        at = 0
        for run in runs.finditer(block):
            if run.start() > at:
                starts += [at + start for start in find(block[at : run.start()])]
            at = run.end()
        return starts + [at + start for start in find(block[at:])]

    return between


def _with_phrases(block: bytes, phrases: tuple[bytes, ...]) -> list[int]:
    """Where the lines begin that hold one of these phrases, in order."""
    starts: set[int] = set()
    for phrase in phrases:
        at = block.find(phrase)
        while at >= 0:
            starts.add(block.rfind(b"\n", 0, at) + 1)
            end = block.find(b"\n", at)
            at = block.find(phrase, end) if end >= 0 else -1
    return sorted(starts)


def _with_pattern(block: bytes, pattern: re.Pattern[bytes]) -> list[int]:
    starts: list[int] = []
    match = pattern.search(block)
    while match is not None:
        start = match.start()
        starts.append(block.rfind(b"\n", 0, start) + 1)
        end = block.find(b"\n", start)
        match = pattern.search(block, end) if end >= 0 else None
    return starts


def _line_by_line(block: bytes, words: re.Pattern[str]) -> list[int]:
    starts: list[int] = []
    at = 0
    while at < len(block):
        end = block.find(b"\n", at)
        end = len(block) if end < 0 else end
        if words.search(block[at : min(end, at + LONGEST_LINE)].decode("utf-8", "replace")):
            starts.append(at)
        at = end + 1
    return starts


def _phrases(words: re.Pattern[str]) -> tuple[bytes, ...] | None:
    """The phrases of an alternation of plain ones; ``None`` where the pattern is more than that."""
    if words.flags & (re.IGNORECASE | re.VERBOSE):
        return None
    pieces = re.split(r"(?<!\\)\|", words.pattern)
    if not all(_PLAIN.fullmatch(piece) for piece in pieces):
        return None
    plain = {re.sub(r"\\(.)", r"\1", piece) for piece in pieces}
    # what is found with a shorter phrase need not be looked for again
    least = [phrase for phrase in plain if not any(other != phrase and other in phrase for other in plain)]
    return tuple(phrase.encode("utf-8", "replace") for phrase in sorted(least))
