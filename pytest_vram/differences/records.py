"""What differs between two ledgers, as data."""

from __future__ import annotations

from typing import Literal

import msgspec

from pytest_vram.ledger import Bucket, Ledger

Meaning = Literal[
    "equal",
    "range",
    "rounding",
    "padding",
    "pages",
    "context",
    "foreign",
    "boot",
    "growth",
    "setting",
    "unknown",
]
#: What each meaning says, and what bounds it.
MEANINGS: dict[Meaning, str] = {
    "equal": "the same number of bytes",
    "range": "one is a range, and the other lies in it or meets it",
    "rounding": "within the digits that were printed",
    "padding": "whole blocks: 256 cells of each slot in a KV cache; 2 MiB of each buffer in an NVIDIA driver, else a"
    " page of 4 KiB",
    "pages": "a source that counts a page once it is touched: buffers that were not written yet, and pages of the"
    " mapped model file",
    "context": "what driver and runtime hold besides buffers, as measured before anything was loaded, or in the range"
    " of the estimate",
    "foreign": "other processes in the figure, as measured",
    "boot": "held while the engine started and given back before it was ready, as measured",
    "growth": "above what was held when the engine was ready, as measured",
    "setting": "a setting that decides this bucket differs",
    "unknown": "no rule explains it",
}
#: Meanings of causes that were measured: what one run measured and another did not is a difference.
MEASURED: tuple[Meaning, ...] = ("context", "foreign", "boot", "growth")


class Difference(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One bucket on one device, in two ledgers; of ``unattributed`` there is one for each part with its own meaning.

    :ivar before: bytes in the first ledger (a prediction, or an earlier run), ``None`` where it has none; with
        ``before_at_most`` its upper end where it is a range. :ivar after: the same in the second one. Both are ``None``
        in the parts of ``unattributed``, where there are several.
    :ivar least: difference in bytes, second minus first, at least, and ``most`` at most: equal where both are points,
        and 0 for a driver's context of which both sides know the same range only.
    :ivar meaning: why; ``unknown`` where no rule explains it. :ivar text: the meaning as a sentence.
    :ivar digits: bytes of it that the printed digits of both leave open; 0 where the figures are the same.
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
    digits: int = 0


class Cause(msgspec.Struct, frozen=True, kw_only=True):
    """Something known that a measured total contains besides the buffers: from ``least`` to ``most`` bytes."""

    meaning: Meaning
    least: int
    most: int
    text: str


class Change(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A setting, or another fact, that differs.

    :ivar setting: the engine's own long option, or the name of the fact. :ivar before: ``None``: not given.
    :ivar buckets: what it decides; empty where it decides no memory. :ivar loud: it makes the two deployments ones of
        different models or devices, whose figures should not be judged against each other.
    """

    setting: str
    before: int | float | str | bool | None
    after: int | float | str | bool | None
    buckets: tuple[Bucket, ...] = ()
    loud: bool = False


class Beside(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What was predicted of a deployment, beside its ledger.

    :ivar predicted: the estimate; ``None`` where there is none, with the ``reason``.
    :ivar differences: from the estimate to the ledger. :ivar changes: settings that the engine has otherwise than the
        estimate took them.
    """

    predicted: Ledger | None = None
    differences: tuple[Difference, ...] = ()
    changes: tuple[Change, ...] = ()
    reason: str = ""
