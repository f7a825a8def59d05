"""The document of ``vram boot --json``; its schema is published."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from pytest_vram.advice.records import Advice
from pytest_vram.bootlog.boot import Boot, Failure, Peak, PhaseSpan
from pytest_vram.ledger import Entry

BOOT_FORMAT = "pytest-vram/boot/1"


class BootDocument(msgspec.Struct, frozen=True, kw_only=True):
    """``vram boot --json``: sizes are bytes, times are seconds on ``clock``.

    :ivar log: where it was read from. :ivar engine: whose log it is, ``era`` the age of its lines.
    :ivar evidence: ``complete``, ``partial``, or ``none``: no memory lines, which never stands for zero bytes.
    :ivar phases: with their times and, where samples were given, the peak of each device.
    :ivar buckets: bucket → device label → bytes, as the engine printed them; ``total`` their sums.
    :ivar entries: what the buckets are made of. :ivar devices: label → the engine's own name.
    :ivar facts: what else was printed. :ivar failure: why the boot failed, or a request after it; or null.
    :ivar warnings: recovered allocations, settings that did not take effect, and what is wrong with the log.
    :ivar clock: ``start`` (of the process), ``epoch`` (1970, UTC) or null. :ivar boots: that the log holds; this is
        the last one. :ivar peaks: where the memory of each device peaked: weights, or later?
    :ivar advice: what to change, best first; ``no_advice`` says why there is none where one could be expected.
    """

    log: str
    engine: str
    era: str
    evidence: Literal["complete", "partial", "none"]
    ready: bool
    phases: list[PhaseSpan]
    buckets: dict[str, dict[str, int]]
    total: dict[str, int]
    entries: list[Entry]
    devices: dict[str, str]
    facts: dict[str, Any]
    failure: Failure | None
    warnings: list[str]
    clock: Literal["start", "epoch"] | None
    boots: int
    peaks: list[Peak]
    advice: list[Advice]
    no_advice: str | None = None
    format: str = BOOT_FORMAT


def boot_document(boot: Boot, log: str, advice: Sequence[Advice] = (), no_advice: str | None = None) -> BootDocument:
    """A boot as it is in a document."""
    ledger = boot.ledger()
    return BootDocument(
        log=log,
        engine=boot.engine,
        era=boot.era,
        evidence=boot.evidence,
        ready=boot.ready,
        phases=list(boot.phases),
        buckets={str(bucket): row for bucket, row in ledger.buckets().items()},
        total=ledger.total(),
        entries=list(boot.entries),
        devices=boot.devices,
        facts=boot.facts,
        failure=boot.failure,
        warnings=list(boot.warnings),
        clock=boot.clock,
        boots=boot.boots,
        peaks=list(boot.peaks),
        advice=list(advice),
        no_advice=no_advice,
    )
