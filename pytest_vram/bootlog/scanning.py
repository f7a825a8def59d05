"""The lines of a log that matter, handed to its grammar; the others are counted.

Looking for phrases in a block of bytes costs a hundredth of what splitting the block into lines and reading each costs,
so that a night at full verbosity is read in seconds.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable
from typing import Protocol

from pytest_vram.bootlog.boot import Phase
from pytest_vram.bootlog.files import LONGEST_LINE
from pytest_vram.bootlog.sieve import Sieve, phrases_of

#: Lines of a block by which it is judged whether most of it is noise.
_SAMPLE = 32


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
    find = None if reader.words is None else _finder(reader.words, reader.noise)
    first = True
    for block in blocks:
        if find is None:
            _feed_all(block, reader)
        else:
            starts = find(block)
            _feed_some(block, [0, *starts] if first and starts[:1] != [0] else starts, reader)
        first = False


@functools.lru_cache(maxsize=16)
def _finder(words: re.Pattern[str], noise: re.Pattern[str] | None) -> Callable[[bytes], list[int]]:
    """What finds, in a block, where the lines begin that hold one of the words."""
    phrases = phrases_of(words)
    find = functools.partial(_line_by_line, words=words) if phrases is None else Sieve(phrases).lines
    return find if noise is None else _without_noise(find, noise.pattern.encode("ascii"))


def _without_noise(find: Callable[[bytes], list[int]], noise: bytes) -> Callable[[bytes], list[int]]:
    """The same search; where most lines are noise, the first one of each run of them, and in what lies between runs."""
    is_noise = re.compile(noise).match
    # Nothing follows a repeated group, so nothing is tried again; a possessive one is wrong in Python before 3.11.5.
    runs = re.compile(rb"(?P<other>(?:(?!(?:%b))[^\n]*+\n)+)|(?:(?:%b)[^\n]*+\n)+" % (noise, noise))

    def between(block: bytes) -> list[int]:
        begins = [block.find(b"\n", len(block) * number // _SAMPLE) + 1 for number in range(_SAMPLE)]
        if 2 * sum(is_noise(block, at) is not None for at in begins) < _SAMPLE:
            return find(block)
        starts: list[int] = []
        at = 0
        for run in runs.finditer(block):
            at = run.end()
            begin = run.start()
            starts += [begin] if run["other"] is None else [begin + start for start in find(run["other"])]
        return starts + [at + start for start in find(block[at:])]

    return between


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
