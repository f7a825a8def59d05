"""What advice must reach: how much a deployment may take more, or must take less, on each device."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from pytest_vram.sizing.prediction import Estimate, Verdict
from pytest_vram.sizing.verdict import HOST, cards_of, on
from pytest_vram.spec import Limits


class Goal(msgspec.Struct, frozen=True, kw_only=True):
    """Where memory is missing, and what other devices can still take.

    :ivar device: label of the device where it is missing (``sum``: all cards together).
    :ivar rooms: label → bytes by which the deployment may grow there; negative: by which it must shrink. A device
        without an entry may grow without limit.
    :ivar measured: whether the rooms come from a measured total or a refused allocation, so that a change counts by
        the least that it may save; else both ends of a range are predictions, and the upper one decides, as in
        :func:`pytest_vram.sizing.verdict.verdict`.
    :ivar bucket: the bucket that failed, or grew; its settings come first.
    :ivar complete: whether what is missing is all that is missing. Where a boot broke off before everything was
        allocated it is the least, and nothing is known to be enough.
    :ivar at_most: what is missing is at most this, because it is not known what was free: less may be enough.
    """

    device: str
    rooms: dict[str, int]
    measured: bool = False
    bucket: str | None = None
    complete: bool = True
    at_most: bool = False

    @property
    def missing(self) -> int:
        """Bytes that must be saved on :attr:`device`."""
        return max(0, -self.rooms.get(self.device, 0))


def missing(device: str, size: int, *, bucket: str | None = None, complete: bool = True) -> Goal:
    """The goal of saving ``size`` bytes on one device, as measured or as refused."""
    return Goal(device=device, rooms={device: -size}, measured=True, bucket=bucket, complete=complete)


def of_limits(
    estimate: Estimate, judged: Verdict, limits: Limits, *, reserve: int = 0, bucket: str | None = None
) -> Goal:
    """The goal of getting an estimate under limits that its upper end is over."""
    cards = cards_of(estimate) or [HOST]
    rooms: dict[str, int] = {}
    for label in dict.fromkeys([*cards, *limits.by_label]):
        limit = limits.of(label)
        if limit is not None:
            rooms[label] = limit - (reserve if label in cards else 0) - on(estimate, label)
    if limits.total is not None:
        rooms["sum"] = limits.total - reserve - on(estimate, "sum")
    return Goal(device=judged.device, rooms=rooms, bucket=bucket)


def grown(rooms: Mapping[str, int], before: Estimate, after: Estimate, *, measured: bool) -> dict[str, tuple[int, int]]:
    """Label → bytes by which a deployment grows at least and at most, for each label that has a room.

    Only the upper ends count where nothing is measured.
    """
    found: dict[str, tuple[int, int]] = {}
    for label in rooms:
        upper = on(after, label) - on(before, label)
        lower = least_on(after, label) - least_on(before, label) if measured else upper
        found[label] = (min(lower, upper), max(lower, upper))
    return found


def least_on(estimate: Estimate, device: str) -> int:
    """Bytes at the lower end of an estimate on a device, or on all cards together (``sum``)."""
    lower = estimate.total()
    if device == "sum":
        return sum(size for label, size in lower.items() if label != HOST)
    return lower.get(device, 0)
