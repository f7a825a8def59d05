"""One ledger's part of one device, in the terms in which two can be compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from pytest_vram.differences.records import Cause
from pytest_vram.ledger import Bucket, Entry, Ledger
from pytest_vram.units import MIB, mib

HOST = "host"
PAGE = 4096


class Ends(NamedTuple):
    """Bytes at least and at most. ``known``: whether the ledger has them at all."""

    low: int
    high: int
    known: bool = True


NOTHING = Ends(0, 0, known=False)
#: Beginning of the detail of what a probe found to stay beyond the boot; each such entry was measured.
GROWTH = "growth while serving"


class Side(NamedTuple):
    """One ledger's part of one device. ``spread``: how far the measured total reaches above its lower end."""

    entries: tuple[Entry, ...]
    spread: int
    source: str | None
    causes: tuple[Cause, ...]

    def table(self) -> dict[Bucket, Ends]:
        found: dict[Bucket, Ends] = {}
        for entry in self.entries:
            known = found.get(entry.bucket, NOTHING)
            upper = entry.bytes if entry.at_most is None else max(entry.bytes, entry.at_most)
            found[entry.bucket] = Ends(known.low + entry.bytes, known.high + upper)
        if self.spread and "unattributed" in found:
            rest = found["unattributed"]
            found["unattributed"] = Ends(rest.low, rest.high + self.spread)
        return found

    def has(self, bucket: Bucket) -> bool:
        return any(entry.bucket == bucket for entry in self.entries)

    def serving(self, bucket: Bucket) -> int:
        """Bytes of a bucket that came after the boot."""
        return sum(one.bytes for one in self.entries if one.bucket == bucket and one.detail.startswith(GROWTH))

    def digits(self, *buckets: Bucket) -> int:
        return sum(entry.resolution for entry in self.entries if not buckets or entry.bucket in buckets)


def side_of(ledger: Ledger, label: str, causes: Sequence[Cause]) -> Side:
    entries = tuple(entry for entry in ledger.entries if entry.device == label)
    reading = ledger.measured.get(label)
    if reading is None or not any(entry.bucket == "unattributed" for entry in entries):
        return Side(entries, 0, None, tuple(causes))
    rules = _by_rule(ledger, entries, label, reading.source)
    return Side(entries, reading.upper - reading.bytes, reading.source, (*causes, *rules))


def _by_rule(ledger: Ledger, entries: Sequence[Entry], label: str, source: str) -> list[Cause]:
    """What a measured total may hold more, or less, than its buffers by how its source counts."""
    buffers = [entry for entry in entries if entry.bucket != "unattributed"]
    if not buffers:
        return []
    found = []
    block = 2 * MIB if source.startswith("nvml") else PAGE
    whose = "an NVIDIA driver gives" if block > PAGE else "memory comes in"
    text = (
        f"{whose} whole {'blocks' if block > PAGE else 'pages'}: up to {mib(block)} for each of {len(buffers)} buffers"
    )
    found.append(Cause(meaning="padding", least=0, most=block * len(buffers), text=text))
    if source.startswith(("host-", "rpc-")):
        late = [one for one in buffers if one.bucket in ("kv", "recurrent", "compute") or "Mapped" in one.detail]
        read = 0
        if label == HOST and any("Mapped" in one.detail for one in buffers):
            read = sum(
                one.bytes for one in ledger.entries if one.device != HOST and one.bucket in ("weights", "experts")
            )
        most = f", and up to {mib(read)} of the mapped file that were read on the way to a device" if read else ""
        text = f"{source} counts pages once they are touched: buffers not written yet do not show{most}"
        found.append(Cause(meaning="pages", least=-sum(one.bytes for one in late), most=read, text=text))
    return found


def comparable(first: Side, second: Side) -> tuple[Side, Side]:
    """Both sides with the same buckets, as far as one of them does not tell two apart."""
    first, second = _without(first, second), _without(second, first)
    return _with_context(first, second), _with_context(second, first)


def _without(side: Side, other: Side) -> Side:
    moved: dict[Bucket, Bucket] = {}
    if not other.has("experts") and any(e.bucket == "weights" and e.source != "estimate" for e in other.entries):
        moved["experts"] = "weights"
    if not other.has("recurrent") and any(e.bucket == "kv" and e.source == "dry-run" for e in other.entries):
        moved["recurrent"] = "kv"
    if not any(side.has(bucket) for bucket in moved):
        return side
    entries = (msgspec.structs.replace(one, bucket=moved.get(one.bucket, one.bucket)) for one in side.entries)
    return side._replace(entries=tuple(entries))


def _with_context(side: Side, other: Side) -> Side:
    """Where the other side has a figure for the context and this one a measured rest: what was measured of it is taken
    from the rest. Where nothing was, the rest is what stands for it."""
    if side.source is None or side.has("context") or not other.has("context"):
        return side
    base = next((one for one in side.causes if one.meaning == "context"), None)
    if base is None or base.least <= 0:
        return side
    entries = []
    for entry in side.entries:
        if entry.bucket == "unattributed":
            entries.append(
                Entry(bucket="context", device=entry.device, bytes=base.least, source=entry.source, detail=base.text)
            )
            entry = msgspec.structs.replace(entry, bytes=entry.bytes - base.least)
        entries.append(entry)
    left = msgspec.structs.replace(base, least=0, most=base.most - base.least)
    causes = [left if one is base else one for one in side.causes]
    return side._replace(entries=tuple(entries), causes=tuple(causes))


def as_rest(table: Mapping[Bucket, Ends]) -> dict[Bucket, Ends]:
    """The context counted into the rest."""
    found = dict(table)
    held = found.pop("context", None)
    if held is not None:
        rest = found.get("unattributed", NOTHING)
        found["unattributed"] = Ends(rest.low + held.low, rest.high + held.high)
    return found
