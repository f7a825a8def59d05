"""Sizes in bytes: reading what users write and printing what was measured.

``3GB`` is 3·10⁹ bytes and ``3GiB`` is 3·2³⁰ bytes. Anything ambiguous is refused with both readings.
Uses the standard library only, because the plugin imports it at load.
"""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation

from pytest_vram.errors import BadSize

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30

_UNITS = {
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": KIB,
    "mib": MIB,
    "gib": GIB,
    "tib": 1 << 40,
}
_SPELLING = {name: name[:-1].upper().replace("I", "i") + "B" for name in _UNITS}
_AMBIGUOUS = {"k": "k", "m": "m", "g": "g", "t": "t", "ki": "ki", "mi": "mi", "gi": "gi", "ti": "ti"}
_SIZE = re.compile(r"(?P<number>\d+(?:\.\d+)?|\.\d+) ?(?P<unit>[A-Za-z]*)", re.ASCII)
_LARGEST = 1 << 62
ACCEPTED = "a size such as 4GB (4,000,000,000 bytes) or 4GiB (4,294,967,296 bytes)"


def parse_size(value: object) -> int:
    """Return the number of bytes that ``value`` says, such as ``"3GB"`` or ``"512 MiB"``.

    Case does not matter and one space may stand before the unit. Bare numbers, negative numbers, NaN, booleans,
    one-letter units and trailing text are refused. The result is at least 1.

    :raises BadSize: with what is accepted; the message does not name the place, the caller knows it.
    """
    if not isinstance(value, str):
        raise BadSize(f"{value!r} is not a size: write {ACCEPTED}")
    match = _SIZE.fullmatch(value)
    if match is None:
        raise BadSize(f"{value!r} is not a size: write {ACCEPTED}")
    number, unit = match["number"], match["unit"].lower()
    if unit == "":
        raise BadSize(f"{value!r} has no unit: {_both(number, 'g')}")
    if unit in _AMBIGUOUS:
        raise BadSize(f"`{value}` is ambiguous: {_both(number, unit[0])}")
    if unit not in _UNITS:
        raise BadSize(f"{value!r} has an unknown unit: write {ACCEPTED}")
    try:
        exact = Decimal(number) * _UNITS[unit]
    except InvalidOperation:
        raise BadSize(f"{value!r} is not a size: write {ACCEPTED}") from None
    if exact > _LARGEST:
        raise BadSize(f"{value!r} is larger than any device: write {ACCEPTED}")
    size = int(exact)
    if size < 1:
        raise BadSize(f"{value!r} is less than one byte: write {ACCEPTED}")
    return size


def _both(number: str, letter: str) -> str:
    decimal, binary = letter.upper() + "B", letter.upper() + "iB"
    low = Decimal(number) * _UNITS[decimal.lower()]
    high = Decimal(number) * _UNITS[binary.lower()]
    return f"{number}{decimal} ({int(low):,} bytes) or {number}{binary} ({int(high):,} bytes)"


def mib(size: int) -> str:
    """``size`` bytes in MiB, the unit of engines and drivers: two decimals below 100 MiB, none above 1000.

    Rounding alone never turns a non-zero size into ``0 MiB``: a smaller one is printed in bytes.
    """
    value = size / MIB
    if size and abs(value) < 0.01:
        return f"{size:,} bytes"
    if abs(value) < 100:
        return f"{value:,.2f} MiB"
    if abs(value) < 1000:
        return f"{value:,.1f} MiB"
    return f"{value:,.0f} MiB"


def written(size: int) -> str:
    """``size`` as a user would write it: ``4GB``, ``3GiB`` or, where neither is whole, in MiB."""
    for name in ("gb", "gib", "mb", "mib", "kb", "kib"):
        if size and size % _UNITS[name] == 0 and (name.endswith("ib") or size % (_UNITS[name] * 1024)):
            return f"{size // _UNITS[name]}{_SPELLING[name]}"
    return mib(size)


def with_mib(size: int) -> str:
    """A limit in the user's unit with the engine's beside it: ``4GB (3,815 MiB)``."""
    spelled = written(size)
    return spelled if spelled.endswith("MiB") or size < MIB else f"{spelled} ({mib(size)})"


def card_hint(peak: int, limit: int) -> str | None:
    """A sentence for a peak over ``limit`` that would fit under the same number of GiB, else ``None``.

    Cards are sold in GiB, so ``8GB`` (7,629 MiB) is less than what an "8 GB" card has.
    """
    if limit % 10**9 or not limit < peak <= limit // 10**9 * GIB:
        return None
    number = limit // 10**9
    return (
        f"{mib(peak)} is over {number}GB ({mib(limit)}) but under {number}GiB; write {number}GiB if you mean the card"
    )
