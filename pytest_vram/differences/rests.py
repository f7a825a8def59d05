"""What is left of a measured total beside its buffers, in parts by what is known of it."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from pytest_vram.differences.meanings import row
from pytest_vram.differences.records import MEASURED, Cause, Difference, Meaning
from pytest_vram.differences.sides import Ends, Side
from pytest_vram.units import mib


def causes_of(first: Side, second: Side) -> list[Cause]:
    """What the second side's rest holds more than the first one's.

    How a source counts is the same on both sides where both were measured: only what was measured of each is left
    then, meaning by meaning, and what leaves room on both sides is taken to be as far within it on the one as on the
    other.
    """
    if first.source is not None and second.source is not None:
        return [one for meaning in MEASURED if (one := _net(meaning, first, second)) is not None]
    found = list(second.causes)
    found += [
        msgspec.structs.replace(cause, least=-cause.most, most=-cause.least, text=f"before: {cause.text}")
        for cause in first.causes
    ]
    digits = first.digits() + second.digits()
    if digits:
        text = f"within the printed digits of all buffers ({mib(digits)})"
        found.append(Cause(meaning="rounding", least=-digits, most=digits, text=text))
    return found


def _net(meaning: Meaning, first: Side, second: Side) -> Cause | None:
    before, after = ([one for one in side.causes if one.meaning == meaning] for side in (first, second))
    if not before and not after:
        return None
    ends = (
        sum(one.least for one in after) - sum(one.least for one in before),
        sum(one.most for one in after) - sum(one.most for one in before),
    )
    texts = [f"before: {one.text}" for one in before] + [f"after: {one.text}" for one in after]
    return Cause(meaning=meaning, least=min(ends), most=max(ends), text="; ".join(texts))


def rest(
    label: str,
    one: Ends,
    other: Ends,
    causes: Sequence[Cause],
    *,
    alone: bool = False,
    context: bool = False,
) -> list[Difference]:
    """What is left of a device beside its buffers, in parts by what is known of it; what no cause holds is unknown."""
    low, high = other.low - one.high, other.high - one.low
    if low == high == 0:
        return [row("unattributed", label, one, other, "equal", "")]
    # Of a range the end that needs the least explanation: none, where that can be.
    usual = sum(min(max(0, cause.least), cause.most) for cause in causes)
    shares = _shares(causes, min(max(usual, low), high))
    parts = [(cause, share) for cause, share in zip(causes, shares, strict=True) if share]
    left = Ends(low - sum(shares), high - sum(shares))
    meaning, text = _left(left, one, other, alone=alone, context=context)
    if not parts:
        return [row("unattributed", label, one, other, meaning, text)]
    if len(parts) == 1 and left.low == left.high == 0:
        return [row("unattributed", label, one, other, parts[0][0].meaning, parts[0][0].text)]
    rows = [
        Difference(
            bucket="unattributed",
            device=label,
            before=None,
            after=None,
            least=share,
            most=share,
            meaning=cause.meaning,
            text=cause.text,
        )
        for cause, share in parts
    ]
    if left.low or left.high:
        rows.append(
            Difference(
                bucket="unattributed",
                device=label,
                before=None,
                after=None,
                least=left.low,
                most=left.high,
                meaning=meaning,
                text=text,
            )
        )
    return rows


def _left(left: Ends, one: Ends, other: Ends, *, alone: bool, context: bool) -> tuple[Meaning, str]:
    if left.low <= 0 <= left.high:
        if context:
            held = one if one.high > one.low else other
            return "context", f"in the range of what a driver holds, {mib(held.low)} to {mib(held.high)}"
        return "range", "the figures are ranges, which meet"
    if alone:
        return "unknown", "one of the two has the total alone, so that it cannot be said in which bucket"
    return "unknown", "no rule and no reading explains it"


def _shares(causes: Sequence[Cause], wanted: int) -> list[int]:
    """How much of ``wanted`` bytes each cause holds: as much as all of them can together, none beyond its bounds."""
    shares = [cause.least for cause in causes]
    left = wanted - sum(shares)
    # First nothing is missing, then what was measured, then what a rule allows.
    measured = [index for index, cause in enumerate(causes) if cause.meaning in MEASURED]
    for indices, most in ((reversed(range(len(causes))), 0), (iter(measured), None), (iter(range(len(causes))), None)):
        for index in indices:
            top = causes[index].most if most is None else min(most, causes[index].most)
            taken = max(0, min(left, top - shares[index]))
            shares[index] += taken
            left -= taken
    return shares
