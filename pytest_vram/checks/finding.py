"""What a check found."""

from __future__ import annotations

from typing import Literal

import msgspec

from pytest_vram.readings import Measured

Verdict = Literal["failed", "inconclusive", "error"]


class Finding(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A check that did not hold, or could not be decided; a check that holds has none.

    :ivar check: the marker or setting that asked, such as ``max_vram`` or ``vram_budget``.
    :ivar verdict: ``failed``; ``inconclusive`` (evidence does not decide); ``error`` (infrastructure).
    :ivar section: heading for the report. :ivar text: sentences for a person, several lines allowed.
    :ivar limit: in bytes, where the check has one; ``limit_from`` says where it was written.
    """

    check: str
    verdict: Verdict
    section: str
    text: str
    device: str | None = None
    measured: Measured | None = None
    limit: int | None = None
    limit_from: str | None = None
