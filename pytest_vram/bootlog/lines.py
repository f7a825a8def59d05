"""One line of a log, and the numbers that engines print in it."""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation
from typing import NamedTuple

_ANSI = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")
#: ``0.00.026.362 I `` is minutes, seconds, milliseconds, microseconds and the level.
_PREFIX = re.compile(r"(\d{1,9})\.(\d{2})\.(\d{3})\.(\d{3}) ([A-Z]) ", re.ASCII)
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
_UNPRINTABLE = re.compile(r"[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")


class Line(NamedTuple):
    """A line without its prefix. ``time`` is in seconds on the log's clock, ``level`` its letter, where printed."""

    text: str
    time: float | None = None
    level: str | None = None


def split(raw: str) -> Line:
    """Take the prefix and terminal colours off a line; other control characters become ``?``, the end is cut."""
    text = _ANSI.sub("", raw[:LONGEST]) if "\x1b" in raw else raw[:LONGEST]
    text = text.rstrip("\r\n")
    if not text.isprintable():
        text = _UNPRINTABLE.sub("?", text)
    match = _PREFIX.match(text)
    if match is None:
        return Line(text)
    minutes, seconds, milli, micro, level = match.groups()
    micros = ((int(minutes) * 60 + int(seconds)) * 1000 + int(milli)) * 1000 + int(micro)
    return Line(text[match.end() :], micros / 1e6, level)


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
