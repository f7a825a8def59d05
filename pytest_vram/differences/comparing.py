"""Two ledgers, bucket by bucket and device by device."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from pytest_vram.differences.meanings import difference
from pytest_vram.differences.records import Cause, Change, Difference
from pytest_vram.differences.rests import causes_of, rest
from pytest_vram.differences.sides import HOST, NOTHING, Ends, Side, as_rest, comparable, side_of
from pytest_vram.ledger import BUCKETS, Bucket, Ledger

#: Meanings of differences that are no growth of the deployment.
_EXPECTED = ("equal", "range", "rounding", "padding", "pages", "context")


def between(
    before: Ledger,
    after: Ledger,
    *,
    causes: Mapping[str, Sequence[Cause]] = {},
    causes_before: Mapping[str, Sequence[Cause]] = {},
    changes: Sequence[Change] = (),
    context: int | None = None,
    slots: int = 1,
) -> tuple[Difference, ...]:
    """What differs, bucket by bucket and device by device, in the contract's order of buckets, devices before the host.

    Buckets that one side does not tell apart (an engine's log has experts among the weights) are compared together.
    Where one side has a figure for the driver's context and the other a measured rest, these two are compared.

    :param causes: device → what is known to be in the measured total of ``after`` besides its buffers, and
        ``causes_before`` the same of ``before``. :param changes: settings that differ.
    :param context: tokens of the KV cache over all ``slots``, which bounds its padding.
    """
    found: list[Difference] = []
    labels = {entry.device for entry in (*before.entries, *after.entries)}
    for label in sorted(labels, key=lambda label: (label == HOST, len(label), label)):
        sides = (side_of(before, label, causes_before.get(label, ())), side_of(after, label, causes.get(label, ())))
        found += _device(label, *comparable(*sides), changes, context, slots)
    order = {bucket: index for index, bucket in enumerate(BUCKETS)}
    return tuple(sorted(found, key=lambda one: order[one.bucket]))


def ends_of(ledger: Ledger, bucket: Bucket | None = None) -> dict[str, tuple[int, int]]:
    """Device label → bytes at least and at most, of one bucket or of all; what a reading leaves open included."""
    found: dict[str, tuple[int, int]] = {}
    for label in dict.fromkeys(entry.device for entry in ledger.entries if bucket in (None, entry.bucket)):
        table = side_of(ledger, label, ()).table()
        rows = table.values() if bucket is None else [table[bucket]]
        found[label] = (sum(row.low for row in rows), sum(row.high for row in rows))
    return found


def grown(differences: Iterable[Difference], device: str | None = None) -> Difference | None:
    """The bucket that grew most for certain, on one device or on any; ``None`` where none did beyond what is expected
    of any deployment: rounding, padding, ranges, pages, and what the engine itself holds."""
    rows = [
        one for one in differences if one.least > 0 and one.meaning not in _EXPECTED and device in (None, one.device)
    ]
    return max(rows, key=lambda one: one.least, default=None)


def _device(
    label: str,
    first: Side,
    second: Side,
    changes: Sequence[Change],
    context: int | None,
    slots: int,
) -> list[Difference]:
    one, other = first.table(), second.table()
    causes = causes_of(first, second)
    if one and other and (set(one) == {"unattributed"}) != (set(other) == {"unattributed"}):
        # One side knows the total alone, so that nothing can be said of a bucket.
        return rest(label, _sum(one), _sum(other), causes, alone=True)
    held: Bucket = "context"
    joined = (held in one) != (held in other) and "unattributed" in (other if held in one else one)
    if joined:
        one, other = as_rest(one), as_rest(other)
    found = [
        difference(
            bucket,
            label,
            one.get(bucket, NOTHING),
            other.get(bucket, NOTHING),
            first.digits(bucket) + second.digits(bucket),
            second.serving(bucket) - first.serving(bucket),
            changes,
            context,
            slots,
        )
        for bucket in BUCKETS
        if bucket != "unattributed" and (bucket in one or bucket in other)
    ]
    if "unattributed" in one or "unattributed" in other:
        ends = one.get("unattributed", NOTHING), other.get("unattributed", NOTHING)
        found += rest(label, *ends, causes, context=joined)
    return found


def _sum(table: Mapping[Bucket, Ends]) -> Ends:
    return Ends(sum(row.low for row in table.values()), sum(row.high for row in table.values()))
