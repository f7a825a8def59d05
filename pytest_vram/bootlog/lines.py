"""One line of a log, and the numbers that engines print in it."""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation
from typing import NamedTuple

from pytest_vram.bootlog.prefixes import BY_FIRST, DEEPEST, FROM_START, LONGEST_JSON, Clock, Taken

_ANSI = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")
_UNITS = {
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "KiB": 1 << 10,
    "MiB": 1 << 20,
    "GiB": 1 << 30,
    "TiB": 1 << 40,
}
_LARGEST = 1 << 62
#: Characters of a line that are looked at: patterns search it, and a line without an end may be very long.
LONGEST = 8192
#: Characters of a line that are repeated to people.
SHOWN = 300
_UNPRINTABLE = re.compile(r"[\x00-\x08\x0a-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


class Line(NamedTuple):
    """A line without its prefixes, however many there are; a line whose prefix is not known keeps it in ``text``.

    :ivar text: the engine's own words. :ivar time: seconds on ``clock``, where printed.
    :ivar level: letter of the level (``D I W E F``) that the engine itself gave the line; not that of a wrapper.
    :ivar clock: what ``time`` counts from: ``start`` (of the process), or ``epoch`` (1970, UTC; a time without a zone
        is read as UTC). Of several times the one that says most: a whole date before one without zone or year, and
        those before seconds since the start.
    :ivar process: who printed it, as the innermost prefix that says so spells it: ``EngineCore_DP0 pid=123``,
        ``VllmWorker rank=0 pid=1``, ``TP0``, ``41234`` (the child of a router), ``ollama[123]``, ``server-1``,
        ``kernel``. :ivar prefix: kind of the innermost prefix (:data:`pytest_vram.bootlog.prefixes.KINDS`):
        ``llama.cpp``, ``vllm``, ``slog`` (Ollama), ``brackets`` (SGLang), …
    :ivar rank: how much ``time`` says (:data:`pytest_vram.bootlog.prefixes.WHOLE` …). :ivar behind: rank and seconds of
        a time of the same line that says less.
    """

    text: str
    time: float | None = None
    level: str | None = None
    clock: Clock | None = None
    process: str | None = None
    prefix: str | None = None
    rank: int = -1
    behind: tuple[int, float] | None = None


def split(raw: str) -> Line:
    """Take prefixes and terminal colours off a line; other control characters become ``?``, the end is cut."""
    text = raw[: LONGEST_JSON + 1] if raw.startswith("{") else raw[:LONGEST]  # JSON is cut after it was unpacked
    text = _printable(text.rstrip("\r\n"))
    if text[:1] not in BY_FIRST:
        return Line(text[:LONGEST])
    return _without_prefixes(text)


def _printable(text: str) -> str:
    if "\x1b" in text:
        text = _ANSI.sub("", text)
    return text if text.isprintable() else _UNPRINTABLE.sub("?", text)


def _without_prefixes(text: str) -> Line:
    time: float | None = None
    rank = -1
    behind: tuple[int, float] | None = None
    level = process = prefix = None
    for _ in range(DEEPEST):
        found = _prefix(text)
        if found is None:
            break
        name, own, taken, text = found
        if taken.time is not None:
            if taken.rank >= rank:
                behind = None if time is None or rank in (FROM_START, taken.rank) else (rank, time)
                time, rank = taken.time, taken.rank
            elif taken.rank != FROM_START:
                behind = (taken.rank, taken.time)
        level = taken.level if own else level
        process = taken.process or process
        prefix = name
    clock: Clock | None = None if time is None else "start" if rank == FROM_START else "epoch"
    return Line(text[:LONGEST], time, level, clock, process, prefix, rank, behind)


def _prefix(text: str) -> tuple[str, bool, Taken, str] | None:
    """The first prefix of a line, and what follows it."""
    for kind in BY_FIRST.get(text[:1], ()):
        match = kind.pattern.match(text) if kind.needs in text else None
        taken = kind.take(match) if match is not None else None
        if match is not None and taken is not None:
            rest = text[match.end() :] if taken.text is None else _printable(taken.text)
            return kind.name, kind.own, taken, rest
    return None


#: Zones differ by multiples of this, in seconds, and so do years.
_ZONES = 900


class Axis:
    """One clock for a whole log: that of the first line with a time. Times of other clocks are left out.

    A log may mix them: Ollama's own lines tell the time of day, those of the engine inside it count from its start.

    :ivar clock: that clock, ``None`` until a line had a time: :attr:`pytest_vram.bootlog.Boot.clock`.
    """

    def __init__(self) -> None:
        self.clock: Clock | None = None
        self._rank = -1
        self._offsets: dict[tuple[int, int], float] = {}

    def time(self, line: Line) -> float | None:
        """The time of this line on the log's clock; ``None`` where it has none."""
        if line.time is None:
            return None
        if self.clock is None:
            self.clock, self._rank = line.clock, line.rank
        if line.behind is not None and (line.rank, line.behind[0]) not in self._offsets:
            offset = round((line.time - line.behind[1]) / _ZONES) * _ZONES
            self._offsets[line.rank, line.behind[0]] = offset
            self._offsets[line.behind[0], line.rank] = -offset
        if line.clock != self.clock:
            return None
        if line.rank == self._rank:
            return line.time
        # One of the two has no zone or no year: a line that has both tells how far apart they are.
        return line.time - self._offsets.get((line.rank, self._rank), 0.0)


def shown(text: str) -> str:
    """A line as messages repeat it: at most :data:`SHOWN` characters."""
    text = text.strip()
    return text if len(text) <= SHOWN else text[: SHOWN - 1] + "…"


def size(number: str, unit: str) -> tuple[int, int] | None:
    """Bytes of a printed size, and half of its last digit in bytes; ``None`` where it is not a usable number."""
    try:
        value = Decimal(number)
    except InvalidOperation:
        return None
    factor = _UNITS.get(unit)
    if factor is None or not value.is_finite() or value < 0:
        return None
    if value * factor > _LARGEST:
        return None
    exponent = value.as_tuple().exponent
    digits = -exponent if isinstance(exponent, int) else 0
    return round(value * factor), round(Decimal(factor) / 2 / 10**digits)


def count(number: str) -> int | None:
    """A printed counter, or ``None`` where it is absurdly long."""
    return int(number) if len(number) <= 18 else None
