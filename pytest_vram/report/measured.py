"""What ``vram sweep --measure`` found for each value, as data: printed by the engine, and measured."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from pytest_vram.backends.growth import Growth
from pytest_vram.bootlog.boot import Failure
from pytest_vram.keeper.messages import DeviceInfo
from pytest_vram.readings import Measured

#: How slots and context belong together in a sweep over ``parallel``: ``context each`` keeps that of each slot, so that
#: ``ctx-size`` grows with their number; ``context in all`` keeps ``ctx-size``, which the engine divides.
Way = Literal["", "context each", "context in all"]


class MeasuredPoint(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One value that was tried; every table is device label → bytes or figure.

    :ivar way: for ``parallel``. :ivar settings: the options that were set for it.
    :ivar printed: bucket → label → bytes, of the engine's own lines; ``printed_total`` their sum.
    :ivar facts: what the boot log says: context, slots, cache types …
    :ivar boot_peak: of the boot alone. :ivar at_ready: idle memory when it was ready.
    :ivar peak: the most of boot and probe. :ivar growth: the probe, step by step.
    :ivar error: why there are no figures, or why they end early. :ivar failure: what the log says of that.
    :ivar log: file of the server's log in the run folder.
    """

    way: Way = ""
    settings: dict[str, str | int] = {}
    printed: dict[str, dict[str, int]] = {}
    printed_total: dict[str, int] = {}
    facts: dict[str, Any] = {}
    boot_seconds: float | None = None
    boot_peak: dict[str, Measured] = {}
    at_ready: dict[str, Measured] = {}
    peak: dict[str, Measured] = {}
    growth: Growth | None = None
    error: str = ""
    failure: Failure | None = None
    log: str = ""


class MeasuredSweep(msgspec.Struct, frozen=True, kw_only=True):
    """What all values have in common. :ivar folder: the run folder, with journal and logs. :ivar binary: the engine."""

    device: str
    devices: list[DeviceInfo]
    folder: str
    binary: str
