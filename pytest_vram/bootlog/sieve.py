"""Where in a block of bytes one of many phrases stands, at a cost that hardly depends on how many they are.

A pattern of a hundred alternatives costs up to 200 ns for each byte, and ``bytes.find`` 1 ns for each byte and phrase.
Here every byte is looked up once for each of :data:`WIDTH` places, and all places of a block are joined at once, as one
large number: eight groups of phrases are eight bits of each byte, and a bit survives where every byte of the window may
belong to a phrase of its group. What survives is compared with the phrases of its group, so that the answer is exact.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

#: Bytes of a phrase that are looked up.
WIDTH = 5
#: Groups of one pass: the bits of a byte.
_GROUPS = 8
#: Share of places at which phrases are compared for nothing, as expected: above it a second pass is cheaper.
_MOST_EXPECTED = 0.02
#: More phrases than any grammar has.
_MOST_PHRASES = 2000
#: How often characters are in logs and in what people write, per thousand; a guess that decides speed alone.
_COMMON = {
    " ": 150, "e": 100, "t": 70, "a": 65, "o": 60, "i": 60, "n": 57, "s": 53, "r": 50, "h": 45, "l": 35, "d": 35,
    "c": 28, "u": 25, "m": 23, "f": 20, "p": 20, "g": 18, "w": 15, "y": 15, "b": 12, "v": 9, "k": 8, "\n": 10,
}  # fmt: skip
_FREQUENCY = tuple(
    _COMMON.get(chr(byte), 15 if chr(byte) in '_.,:="-/|' else 20 if 0x30 <= byte <= 0x39 else 4 if byte < 128 else 1)
    / 1000
    for byte in range(256)
)
_SET = bytes([0]) + bytes([1]) * 255
_TOKEN = re.compile(
    r"(?P<group>\(\?:)|(?P<bar>\|)|(?P<end>\))|\\(?P<escaped>[^\w])|(?P<plain>[^\\.^$*+?{}\[\]()|])",
    re.ASCII | re.DOTALL,
)


def phrases_of(pattern: re.Pattern[str]) -> tuple[bytes, ...] | None:
    """The phrases that a pattern of plain alternatives finds (``a|b(?:c|d)``), without those that hold another one.

    ``None`` where the pattern is more than that.
    """
    if pattern.flags & (re.IGNORECASE | re.VERBOSE):
        return None
    plain = _alternatives(pattern.pattern)
    if plain is None or "" in plain:
        return None
    least = [phrase for phrase in plain if not any(other != phrase and other in phrase for other in plain)]
    return tuple(phrase.encode("utf-8", "replace") for phrase in sorted(least))


def _alternatives(pattern: str) -> set[str] | None:
    levels: list[tuple[list[str], list[str]]] = [([], [""])]  # finished alternatives, and the one that is being read
    at = 0
    while at < len(pattern):
        token = _TOKEN.match(pattern, at)
        if token is None:
            return None
        at = token.end()
        done, reading = levels[-1]
        if token["group"]:
            levels.append(([], [""]))
        elif token["bar"]:
            levels[-1] = ([*done, *reading], [""])
        elif token["end"]:
            levels.pop()
            before, start = levels[-1]
            levels[-1] = (before, [first + rest for first in start for rest in (*done, *reading)])
        else:
            levels[-1] = (done, [text + (token["escaped"] or token["plain"]) for text in reading])
        if len(levels[-1][1]) > _MOST_PHRASES:
            return None
    done, reading = levels[0]
    return {*done, *reading}


class _Window(NamedTuple):
    """The bytes of a phrase that are looked up, and where in it they begin."""

    phrase: bytes
    offset: int
    bytes: bytes


class _Group:
    """Phrases that are looked up as one: at each place of the window, any of their bytes."""

    def __init__(self) -> None:
        self.windows: list[_Window] = []
        self.allowed: list[set[int] | None] = [set() for _ in range(WIDTH)]  # None: any byte
        self._share = [0.0] * WIDTH

    def expected(self, window: _Window | None = None) -> float:
        """How often a byte is the begin of a window of this group, with one more phrase, in texts of people."""
        product = 1.0
        for place, (allowed, share) in enumerate(zip(self.allowed, self._share, strict=True)):
            if window is not None and allowed is not None:
                byte = window.bytes[place] if place < len(window.bytes) else None
                share = 1.0 if byte is None else share if byte in allowed else share + _FREQUENCY[byte]
            product *= min(1.0, share)
        return product

    def add(self, window: _Window) -> None:
        """Take a phrase."""
        self.windows.append(window)
        for place, allowed in enumerate(self.allowed):
            if place >= len(window.bytes):
                self.allowed[place], self._share[place] = None, 1.0
            elif allowed is not None and window.bytes[place] not in allowed:
                allowed.add(window.bytes[place])
                self._share[place] += _FREQUENCY[window.bytes[place]]


class _Pass:
    """Up to eight groups, looked up at once."""

    def __init__(self, groups: list[_Group]) -> None:
        self._tables = [
            bytes(
                sum(1 << bit for bit, group in enumerate(groups) if _allows(group.allowed[place], byte))
                for byte in range(256)
            )
            for place in range(WIDTH)
        ]
        by_group = [_by_offset(group.windows) for group in groups]
        self._phrases = [
            [row for bit, rows in enumerate(by_group) if bits >> bit & 1 for row in rows] for bits in range(256)
        ]

    def lines(self, block: bytes, found: set[int]) -> None:
        """Add where the lines begin that hold a phrase."""
        padded = block + b"\n" * WIDTH  # the last window reaches beyond the end
        left = -1
        for place, table in enumerate(self._tables):
            left &= int.from_bytes(padded.translate(table), "little") >> 8 * place
        if not left:
            return
        bits = left.to_bytes(len(padded), "little")
        marks = bits.translate(_SET)
        at = marks.find(1)
        while at >= 0:
            after = at + 1
            for offset, phrases in self._phrases[bits[at]]:
                if at >= offset and block.startswith(phrases, at - offset):
                    found.add(block.rfind(b"\n", 0, at - offset + 1) + 1)
                    after = block.find(b"\n", at)  # one is enough for a line
                    break
            at = marks.find(1, after) if after >= 0 else -1


def _allows(allowed: set[int] | None, byte: int) -> bool:
    return allowed is None or byte in allowed


def _by_offset(windows: list[_Window]) -> list[tuple[int, tuple[bytes, ...]]]:
    rows: dict[int, list[bytes]] = {}
    for window in windows:
        rows.setdefault(window.offset, []).append(window.phrase)
    return [(offset, tuple(phrases)) for offset, phrases in rows.items()]


class Sieve:
    """Finds the lines that hold one of some phrases.

    :param phrases: none of them empty.
    """

    def __init__(self, phrases: Iterable[bytes]) -> None:
        windows = sorted(map(_rarest, phrases), key=lambda window: (-_rarity(window.bytes), window))
        groups = _grouped(windows, _GROUPS)
        if sum(group.expected() for group in groups) > _MOST_EXPECTED:
            groups = _grouped(windows, 2 * _GROUPS)
        self._passes = [_Pass(groups[at : at + _GROUPS]) for at in range(0, len(groups), _GROUPS)]

    def lines(self, block: bytes) -> list[int]:
        """Where the lines of a block begin that hold a phrase, in order."""
        found: set[int] = set()
        for one in self._passes:
            one.lines(block, found)
        return sorted(found)


def _rarity(window: bytes) -> float:
    product = 1.0
    for byte in window:
        product *= _FREQUENCY[byte]
    return product


def _rarest(phrase: bytes) -> _Window:
    offsets = range(max(1, len(phrase) - WIDTH + 1))
    offset = min(offsets, key=lambda offset: _rarity(phrase[offset : offset + WIDTH]))
    return _Window(phrase, offset, phrase[offset : offset + WIDTH])


def _grouped(windows: list[_Window], count: int) -> list[_Group]:
    """Each phrase in the group to which it adds least, the most common ones first."""
    groups = [_Group() for _ in range(count)]
    for window in windows:
        min(groups, key=lambda group: group.expected(window) - group.expected()).add(window)
    return groups
