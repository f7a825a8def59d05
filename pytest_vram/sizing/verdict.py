"""Whether an estimate is within a budget. Which setting to turn first is in :mod:`~pytest_vram.sizing.turns`."""

from __future__ import annotations

from typing import Literal

from pytest_vram.sizing.prediction import Estimate, Verdict
from pytest_vram.spec import Limits

HOST = "host"
SUM = "sum"


def verdict(estimate: Estimate, limits: Limits, *, reserve: int = 0) -> Verdict:
    """Hold every device of an estimate that has a limit against it; the one with the least room decides.

    An estimate fits when its upper end does, and does not when even its lower end is over the limit; in between, or
    where a part of it is unknown, it is inconclusive. Without any device the host stands in for one.

    :param reserve: bytes that must stay free on each device.
    """
    lower, upper = estimate.total(), estimate.at_most()
    labels = [label for label in {**estimate.devices, **lower} if label != HOST] or [HOST]
    if limits.total is not None:
        whole = sum(lower.get(label, 0) for label in labels), sum(upper.get(label, 0) for label in labels)
        rows = [(SUM, limits.total, *whole)]
    else:
        rows = []
        for label in labels:
            limit = limits.of(label)
            if limit is not None:
                rows.append((label, limit, lower.get(label, 0), upper.get(label, 0)))
    if not rows:  # limits of devices that this deployment does not use
        label, limit = next(iter(limits.by_label.items()))
        rows = [(label, limit, 0, 0)]
    judged = [
        Verdict(
            fits=_fits(predicted, at_most, limit - reserve, known=not estimate.unknown),
            device=label,
            limit=limit,
            predicted=predicted,
            at_most=at_most,
            spare=limit - reserve - at_most,
            reserve=reserve,
        )
        for label, limit, predicted, at_most in rows
    ]
    return min(judged, key=lambda one: (("no", "inconclusive", "yes").index(one.fits), one.spare))


def _fits(predicted: int, at_most: int, limit: int, *, known: bool) -> Literal["yes", "no", "inconclusive"]:
    if predicted > limit:
        return "no"
    return "yes" if known and at_most <= limit else "inconclusive"


def on(estimate: Estimate, device: str) -> int:
    """Bytes at the upper end of an estimate on a device, or on all cards together (``sum``)."""
    upper = estimate.at_most()
    if device == SUM:
        return sum(size for label, size in upper.items() if label != HOST)
    return upper.get(device, 0)
