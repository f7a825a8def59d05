"""Two ledgers beside each other: what differs, by how much, and what the difference means."""

from __future__ import annotations

from typing import Literal

import msgspec

from pytest_vram.ledger import Bucket

Meaning = Literal["equal", "rounding", "padding", "context", "foreign", "setting", "growth", "unknown"]


class Difference(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One bucket on one device, in two ledgers.

    :ivar before: bytes in the first ledger (a prediction, or an earlier run), ``None`` where it has none; with
        ``before_at_most`` its upper end where it is a range. :ivar after: the same in the second one.
    :ivar least: difference in bytes, second minus first, at least, and ``most`` at most: equal where both are points.
    :ivar meaning: why; ``unknown`` where no rule explains it. :ivar text: the meaning as a sentence.
    """

    bucket: Bucket
    device: str
    before: int | None
    after: int | None
    least: int
    most: int
    meaning: Meaning
    text: str = ""
    before_at_most: int | None = None
    after_at_most: int | None = None
