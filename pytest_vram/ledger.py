"""The memory breakdown of a deployment, "ledger" for short: bytes by bucket, device and origin.

A ledger explains a measured total. Its buckets come from the engine's own lines (or, later, from an estimate);
``unattributed`` is what was measured minus what is explained. It is signed: mapped pages that were never touched
make it negative.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal, get_args

import msgspec

from pytest_vram.readings import Reading

Bucket = Literal[
    "weights",
    "experts",
    "kv",
    "recurrent",
    "compute",
    "projector",
    "draft",
    "lora",
    "context",
    "other",
    "unattributed",
]
BUCKETS: tuple[Bucket, ...] = get_args(Bucket)


class Entry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line of a ledger.

    :ivar bytes: size; signed only in ``unattributed``.
    :ivar source: ``engine-log``, ``estimate``, ``dry-run`` or the source of the measured total.
    :ivar detail: the engine's own name for it, such as ``CPU_Mapped model buffer``.
    :ivar resolution: half of the last printed digit, in bytes: the figure is known to ± this.
    :ivar at_most: upper end in bytes where a prediction is a range, ``bytes`` being the lower; ``None``: no range.
    """

    bucket: Bucket
    device: str
    bytes: int
    source: str
    detail: str = ""
    resolution: int = 0
    at_most: int | None = None


class Ledger(msgspec.Struct, frozen=True, kw_only=True):
    """Buckets of one deployment, as entries; sums are exact integers.

    :ivar entries: the lines, in the order in which they were found.
    :ivar measured: the measured total of each device where there is one.
    :ivar devices: label → name for people, such as ``gpu0`` → ``RPC0[127.0.0.1:50052]``.
    """

    entries: tuple[Entry, ...] = ()
    measured: dict[str, Reading] = {}
    devices: dict[str, str] = {}

    def buckets(self) -> dict[Bucket, dict[str, int]]:
        """Bucket → device label → bytes, in the contract's order, without empty buckets."""
        table: dict[Bucket, dict[str, int]] = {}
        for bucket in BUCKETS:
            row: dict[str, int] = {}
            for entry in self.entries:
                if entry.bucket == bucket:
                    row[entry.device] = row.get(entry.device, 0) + entry.bytes
            if row:
                table[bucket] = row
        return table

    def total(self) -> dict[str, int]:
        """Device label → bytes: the sum of every bucket, ``unattributed`` included."""
        sums: dict[str, int] = {}
        for entry in self.entries:
            sums[entry.device] = sums.get(entry.device, 0) + entry.bytes
        return sums

    def explained(self) -> dict[str, int]:
        """Device label → bytes of every bucket but ``unattributed``."""
        sums: dict[str, int] = {}
        for entry in self.entries:
            if entry.bucket != "unattributed":
                sums[entry.device] = sums.get(entry.device, 0) + entry.bytes
        return sums

    def largest(self, device: str) -> tuple[Bucket, int] | None:
        """The largest explained bucket on ``device`` and its bytes; ``None`` where nothing is explained."""
        rows = [
            (bucket, row[device])
            for bucket, row in self.buckets().items()
            if device in row and bucket != "unattributed"
        ]
        return max(rows, key=lambda row: row[1], default=None)

    def against(self, measured: Mapping[str, Reading]) -> Ledger:
        """This ledger held against measured totals: ``unattributed`` makes each device's sum equal its total.

        A device that was measured but has no explained bucket gets its whole total as ``unattributed``; one that
        is explained but was not measured keeps its sum and gets no ``unattributed``.
        """
        explained = self.explained()
        entries = [entry for entry in self.entries if entry.bucket != "unattributed"]
        for device, reading in measured.items():
            entries.append(
                Entry(
                    bucket="unattributed",
                    device=device,
                    bytes=reading.bytes - explained.get(device, 0),
                    source=reading.source,
                    detail="measured minus explained",
                )
            )
        return Ledger(entries=tuple(entries), measured=dict(measured), devices=self.devices)


def combined(ledgers: Iterable[Ledger]) -> Ledger:
    """One ledger of several deployments that run side by side; measured totals are left out."""
    entries: list[Entry] = []
    devices: dict[str, str] = {}
    for ledger in ledgers:
        entries.extend(entry for entry in ledger.entries if entry.bucket != "unattributed")
        devices.update(ledger.devices)
    return Ledger(entries=tuple(entries), devices=devices)
