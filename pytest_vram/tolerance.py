"""How much of what may grow from one run to the next: ``peak:5%+64MiB``, several joined by commas."""

from __future__ import annotations

import re
from collections.abc import Collection
from fractions import Fraction
from typing import Literal

import msgspec

from pytest_vram.errors import BadInput, BadSize
from pytest_vram.units import parse_size

#: What is held against a tolerance besides single buckets: the total of each device.
PEAK = "peak"
ACCEPTED = "WHAT:TOLERANCE, such as peak:5%, peak:64MiB or peak:5%+64MiB (several joined by commas)"
_PERCENT = re.compile(r"(\d{1,6}(?:\.\d{1,6})?) ?%", re.ASCII)
_LONGEST = 1000

Held = Literal["held", "grew", "undecided"]
#: Bytes at least and at most; ``None``: only the lower end is known.
Ends = tuple[int, int | None]


class Tolerance(msgspec.Struct, frozen=True, kw_only=True):
    """What one figure may grow to.

    :ivar what: ``peak``, or a bucket. :ivar percent: of the earlier figure, as it was written. :ivar size: more bytes.
    """

    what: str
    percent: str = "0"
    size: int = 0
    text: str = ""

    def allowed(self, before: int) -> int:
        """The largest number of bytes that is no growth beyond what is tolerated."""
        return before + int(Fraction(self.percent) * max(0, before) / 100) + self.size

    def holds(self, before: Ends, after: Ends, *, digits: int = 0) -> Held:
        """Whether a figure grew beyond it, both given by their ends.

        :param digits: bytes by which the two may differ and yet be printed as they are: less is no growth.
        """
        if before[1] is not None and after[0] > self.allowed(before[1] + digits):
            return "grew"
        return "held" if after[1] is not None and after[1] <= self.allowed(before[0] + digits) else "undecided"


def parse(text: str, names: Collection[str], *, origin: str) -> tuple[Tolerance, ...]:
    """Read an expression.

    :param names: what can be held against a tolerance besides ``peak``. :param origin: option, for messages.
    :raises BadInput: it cannot be used, with what is accepted.
    """
    found: dict[str, Tolerance] = {}
    parts = [part.strip() for part in text[:_LONGEST].split(",")]
    if len(text) > _LONGEST or not all(parts):
        raise BadInput(f"{text[:60]!r} (from {origin}) cannot be used: write {ACCEPTED}")
    for part in parts:
        what, colon, rest = (word.strip() for word in part.partition(":"))
        if what != PEAK and what not in names:
            known = ", ".join([PEAK, *names])
            raise BadInput(
                f"{what[:60]!r} in {part[:60]!r} (from {origin}) is nothing that grows: write one of {known}"
            )
        if what in found:
            raise BadInput(f"{what!r} stands twice in {text!r} (from {origin}): leave one of them out")
        if colon and not rest:
            raise BadInput(f"{part!r} (from {origin}) names no tolerance: write {ACCEPTED}")
        found[what] = _tolerance(what, rest, part, origin)
    return tuple(found.values())


def _tolerance(what: str, rest: str, part: str, origin: str) -> Tolerance:
    percent, size = "0", 0
    terms = [term.strip() for term in rest.split("+")] if rest else []
    seen: set[str] = set()
    for term in terms:
        match = _PERCENT.fullmatch(term)
        kind = "percent" if match else "size"
        if kind in seen:
            raise BadInput(f"{part[:80]!r} (from {origin}) has two of the same kind: write {ACCEPTED}")
        seen.add(kind)
        if match:
            percent = match[1]
            continue
        try:
            size = parse_size(term)
        except BadSize as error:
            raise BadInput(f"{part[:80]!r} (from {origin}): {error}; a tolerance is {ACCEPTED}") from None
    return Tolerance(what=what, percent=percent, size=size, text=part)
