"""Whether an estimate is within a budget. Which setting to turn first is in :mod:`~pytest_vram.sizing.turns`."""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

from pytest_vram.errors import BadInput
from pytest_vram.sizing.prediction import Estimate, Verdict
from pytest_vram.spec import Limits
from pytest_vram.units import with_mib

HOST = "host"
SUM = "sum"


def verdict(estimate: Estimate, limits: Limits, *, reserve: int = 0) -> Verdict:
    """Hold every limit against its part of an estimate; the one with the least room decides.

    An estimate fits when its upper end does, and does not when even its lower end is over the limit; in between, or
    where a part of it is unknown, it is inconclusive. Without any card the host stands in for one; beside a card it has
    no limit but one of its own.

    :param reserve: bytes that must stay free on each device that stands for a card.
    :raises BadInput: a limit for a device that this deployment does not have.
    """
    lower, upper = estimate.total(), estimate.at_most()
    cards = cards_of(estimate)
    check_labels({*cards, *(label for label in lower if label == HOST)}, limits)
    check_reserve(limits, reserve, cards=bool(cards))
    kept = dict.fromkeys(cards or [HOST], reserve)
    rows: list[tuple[str, int, int, int]] = []
    if limits.total is not None:
        summed = cards or [HOST]
        whole = sum(lower.get(label, 0) for label in summed), sum(upper.get(label, 0) for label in summed)
        rows.append((SUM, limits.total, *whole))
        kept[SUM] = reserve
    for label in dict.fromkeys([*(cards or [HOST]), *limits.by_label]):
        limit = limits.of(label)
        if limit is not None:
            rows.append((label, limit, lower.get(label, 0), upper.get(label, 0)))
    judged = [
        Verdict(
            fits=_fits(predicted, at_most, limit - kept.get(label, 0), known=not estimate.unknown),
            device=label,
            limit=limit,
            predicted=predicted,
            at_most=at_most,
            spare=limit - kept.get(label, 0) - at_most,
            reserve=kept.get(label, 0),
        )
        for label, limit, predicted, at_most in rows
    ]
    return min(judged, key=lambda one: (("no", "inconclusive", "yes").index(one.fits), one.spare))


def cards_of(estimate: Estimate) -> list[str]:
    """Labels of the cards of an estimate, in order; none where all of it is on the host."""
    labels = {**estimate.devices, **estimate.total()}
    return sorted((label for label in labels if label != HOST), key=lambda label: (len(label), label))


def check_labels(labels: Collection[str], limits: Limits) -> None:
    """A limit for a device that is not there would hold whatever happens.

    :raises BadInput: naming the device and those that there are.
    """
    strange = [label for label in limits.by_label if label not in labels]
    if strange:
        there = ", ".join(sorted(labels, key=lambda label: (label == HOST, len(label), label))) or "none"
        raise BadInput(
            f"budget {limits.text!r} limits {', '.join(strange)}, which this deployment does not have: its devices are"
            f" {there}"
        )


def check_reserve(limits: Limits, reserve: int, *, cards: bool) -> None:
    """What must stay free on a card cannot be all that there may be used of it.

    :param cards: whether the deployment has any; without one the host stands in for it.
    :raises BadInput: naming the reserve and the limit.
    """
    named = [size for label, size in limits.by_label.items() if label != HOST or not cards]
    sizes = [limits.each, limits.total, *named]
    least = min((size for size in sizes if size is not None), default=None)
    if reserve and least is not None and reserve >= least:
        raise BadInput(
            f"a reserve of {with_mib(reserve)} leaves nothing of the budget {limits.text!r}: write a smaller one"
            " (--reserve), it is what must stay free on each card"
        )


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
