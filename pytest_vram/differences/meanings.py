"""What a difference of one bucket means: rules with bounds; what lies beyond them is unknown."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from pytest_vram.differences.records import Change, Difference, Meaning
from pytest_vram.differences.sides import HOST, Ends
from pytest_vram.ledger import Bucket
from pytest_vram.units import mib

#: Cells that llama.cpp rounds a context up to (``llama-context.cpp``); blocks of vLLM and SGLang are smaller.
_CELLS = 256
#: Bytes of 32 elements of a KV cache (``ggml.c``), and the names that other engines have for the same.
_CACHE_BYTES = {
    "f32": 128,
    "f16": 64,
    "bf16": 64,
    "q8_0": 34,
    "q5_1": 24,
    "q5_0": 22,
    "q4_1": 20,
    "q4_0": 18,
    "iq4_nl": 18,
}
_CACHE_TYPES = ("cache-type-k", "cache-type-v")


def difference(
    bucket: Bucket,
    label: str,
    one: Ends,
    other: Ends,
    digits: int,
    serving: int,
    changes: Sequence[Change],
    context: int | None,
    slots: int,
) -> Difference:
    if bucket == "context" and one == other and one.high > one.low and not any(bucket in c.buckets for c in changes):
        # No rule tells it, and it is one and the same number on both sides.
        same = row(bucket, label, one, other, "equal", "the same range on both sides")
        return msgspec.structs.replace(same, least=0, most=0)
    meaning, text = _meaning(bucket, label, one, other, digits, serving, changes, context, slots)
    found = row(bucket, label, one, other, meaning, text)
    return found if meaning == "equal" else msgspec.structs.replace(found, digits=digits)


def row(bucket: Bucket, label: str, one: Ends, other: Ends, meaning: Meaning, text: str) -> Difference:
    return Difference(
        bucket=bucket,
        device=label,
        before=one.low if one.known else None,
        after=other.low if other.known else None,
        least=other.low - one.high,
        most=other.high - one.low,
        meaning=meaning,
        text=text,
        before_at_most=one.high if one.known and one.high != one.low else None,
        after_at_most=other.high if other.known and other.high != other.low else None,
    )


def _meaning(
    bucket: Bucket,
    label: str,
    one: Ends,
    other: Ends,
    digits: int,
    serving: int,
    changes: Sequence[Change],
    context: int | None,
    slots: int,
) -> tuple[Meaning, str]:
    least, most = other.low - one.high, other.high - one.low
    if least == most == 0:
        return "equal", ""
    if one.known and other.known and least <= 0 <= most:
        return "range", "the one lies in the range of the other, or both ranges meet"
    gap = least if least > 0 else -most
    if one.known and other.known and gap <= digits:
        return "rounding", f"within the printed digits ({mib(digits)})"
    if serving and least - digits <= serving <= most + digits:
        return "growth", f"{mib(abs(serving))} stayed after requests, as a probe measured"
    if bucket == "context" and not (one.known and other.known):
        return "context", "an engine's log has no figure for what the driver holds"
    decided = [change for change in changes if bucket in change.buckets]
    if decided:
        names = ", ".join(f"{one.setting} {_shown(one.before)} → {_shown(one.after)}" for one in decided)
        wrong = _against(bucket, label, one, other, digits, decided, slots)
        return ("unknown", f"{names}, and yet {wrong}") if wrong else ("setting", names)
    if bucket == "kv" and context and one.known and other.known:
        block = max(one.high, other.high) * _CELLS * max(1, slots) // context
        if gap <= block + digits:
            return "padding", f"whole blocks of {_CELLS} cells for each slot: up to {mib(block)}"
    return "unknown", "no rule explains it" if one.known and other.known else "the other one has no such bucket"


def _shown(value: object) -> str:
    if value is None:
        return "not given"
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _against(
    bucket: Bucket, label: str, one: Ends, other: Ends, digits: int, changes: Sequence[Change], slots: int
) -> str | None:
    """Why these changes cannot be all of it; ``None`` where they can be."""
    ways = {_direction(bucket, label, change) for change in changes}
    if len(ways) == 1:
        way = ways.pop()
        if way > 0 and other.high + digits < one.low:
            return "it shrank, which that does not do"
        if way < 0 and other.low - digits > one.high:
            return "it grew, which that does not do"
    if bucket == "kv" and one.known and other.known and {one.setting for one in changes} <= {"ctx-size", *_CACHE_TYPES}:
        least, most = _kv_factors(changes, slots)
        if other.high + digits < one.low * least or other.low - digits > one.high * most:
            return f"it is {other.low / max(1, one.high):.2f} times as large, where {least:.2f} to {most:.2f} can be"
    return None


def _kv_factors(changes: Sequence[Change], slots: int) -> tuple[float, float]:
    """How much larger a KV cache can be after these changes: with the context at most in proportion, a window not at
    all; with the types of K and V by their bytes, of which a model may keep one."""
    least = most = 1.0
    for change in changes:
        if change.setting == "ctx-size":
            before, after = (value if isinstance(value, int) else 0 for value in (change.before, change.after))
            if before <= 0 or after <= 0:
                return 0.0, float("inf")
            slack = _CELLS * max(1, slots)
            least, most = least * min(1.0, after / (before + slack)), most * max(1.0, (after + slack) / before)
    kinds = [change for change in changes if change.setting in _CACHE_TYPES]
    ratios = [1.0] if len(kinds) == 1 else []
    for change in kinds:
        sizes = [_CACHE_BYTES.get(str(value)) for value in (change.before, change.after)]
        if sizes[0] is None or sizes[1] is None:
            return 0.0, float("inf")
        ratios.append(sizes[1] / sizes[0])
    return least * min(ratios, default=1.0), most * max(ratios, default=1.0)


#: Settings of which more is more, bucket by bucket. "on a device" and "on the host" go opposite ways for placement.
_MORE: dict[str, tuple[Bucket, ...]] = {
    "ctx-size": ("kv", "compute"),
    "ubatch-size": ("compute",),
    "parallel": ("recurrent",),
}


def _direction(bucket: Bucket, label: str, change: Change) -> int:
    """1 where a change can only make a bucket larger, -1 where it can only make it smaller, 0 where it can do both."""
    before, after = change.before, change.after
    if isinstance(before, bool) or isinstance(after, bool):
        return 0
    if not isinstance(before, int) or not isinstance(after, int) or before == after:
        return 0
    way = 1 if after > before else -1
    if bucket in _MORE.get(change.setting, ()):
        return way
    if bucket in ("weights", "experts"):
        if change.setting == "layers-on-gpu" and label != HOST:
            return way
        if change.setting == "n-cpu-moe":
            return way if label == HOST else -way
    return 0
