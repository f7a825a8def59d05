"""The documents of ``vram estimate``, ``plan`` and ``sweep`` with ``--json``; their schemas are published."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from pytest_vram.ledger import BUCKETS, Entry
from pytest_vram.report.measured import MeasuredPoint, MeasuredSweep
from pytest_vram.sizing.plans import Impossible, Plan, Relaxed, Search, Wishes
from pytest_vram.sizing.prediction import Estimate, ModelFacts, Verdict
from pytest_vram.sizing.shape import Note
from pytest_vram.sizing.sweep import Point

ESTIMATE_FORMAT = "pytest-vram/estimate/1"
PLAN_FORMAT = "pytest-vram/plan/1"
SWEEP_FORMAT = "pytest-vram/sweep/1"

Table = dict[str, dict[str, int]]
Setting = int | float | str | bool | None


class Compared(msgspec.Struct, frozen=True, kw_only=True):
    """One group of buckets on one device: the rules beside the engine's own dry run, in bytes.

    :ivar group: ``weights`` (experts too), ``kv`` (recurrent state too) or ``compute``.
    :ivar rule: by the rules, ``rule_at_most`` its upper end. :ivar engine: what the engine printed, from
        ``engine_low`` to ``engine_high`` where it printed whole MiB. :ivar agree: whether both can be true.
    :ivar error: of the farther end of the rule, relative to the engine's figure; ``None`` where that is 0.
    """

    group: str
    device: str
    rule: int
    rule_at_most: int
    engine: int
    engine_low: int
    engine_high: int
    agree: bool
    error: float | None


class Exact(msgspec.Struct, frozen=True, kw_only=True):
    """The engine's own dry run. :ivar seconds: that it took. :ivar fits: the engine's own word for this machine."""

    binary: str
    argv: list[str]
    seconds: float
    fits: bool | None
    compared: list[Compared]


class EstimateDocument(msgspec.Struct, frozen=True, kw_only=True):
    """``vram estimate --json``.

    :ivar buckets: bucket → device label → bytes; the lower end where a figure is a range. :ivar at_most: the same for
        the upper end. :ivar total: device label → bytes, the sum of the buckets; ``total_at_most`` of the upper ends.
    :ivar entries: what the buckets are made of. :ivar unknown: buckets that are lower bounds only.
    :ivar textbook_kv: bytes of the textbook formula, a cross-check. :ivar verdict: with a budget.
    :ivar exact: with ``--exact``; the buckets are then the engine's.
    """

    engine: str
    model: ModelFacts
    settings: dict[str, Setting]
    buckets: Table
    at_most: Table
    total: dict[str, int]
    total_at_most: dict[str, int]
    devices: dict[str, str]
    entries: list[Entry]
    notes: list[Note]
    command: list[str]
    unknown: list[str]
    textbook_kv: int | None
    pressure: str
    verdict: Verdict | None = None
    exact: Exact | None = None
    format: str = ESTIMATE_FORMAT


class PlanRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One plan. :ivar confirmed: by the engine's dry run; ``None`` where it was not asked."""

    model: str
    context: int
    slots: int
    cache_type: str
    experts_on_cpu: int
    layers_on_gpu: int
    layers: int
    gives_up: list[str]
    buckets: Table
    at_most: Table
    total: dict[str, int]
    total_at_most: dict[str, int]
    verdict: Verdict
    settings: dict[str, Setting]
    notes: list[Note]
    command: list[str]
    confirmed: bool | None = None


class ImpossibleRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Why nothing fits. :ivar missing: bytes over the limit in the cheapest configuration, whose command it has."""

    missing: int
    device: str
    reason: str
    unknown: list[str]
    relaxed: list[Relaxed]
    total: dict[str, int]
    total_at_most: dict[str, int]
    command: list[str]


class SearchRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The plans under one budget, best first, or why there is none.

    :ivar minimum_context: tokens of each slot that the search kept, asked for or not.
    """

    budget: str
    minimum_context: int
    plans: list[PlanRecord]
    impossible: ImpossibleRecord | None = None


class PlanDocument(msgspec.Struct, frozen=True, kw_only=True):
    """``vram plan --json``: one search, with ``--tiers`` one for each."""

    models: list[str]
    wishes: Wishes
    searches: list[SearchRecord]
    format: str = PLAN_FORMAT


class PointRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One value of a sweep. :ivar refused: why the engine does not start with it.

    :ivar measured: with ``--measure``; over ``parallel`` a value may have a point for each of two ways to share.
    """

    value: str
    buckets: Table
    at_most: Table
    total: dict[str, int]
    total_at_most: dict[str, int]
    command: list[str]
    unknown: list[str]
    verdict: Verdict | None = None
    refused: str = ""
    measured: MeasuredPoint | None = None


class SweepDocument(msgspec.Struct, frozen=True, kw_only=True):
    """``vram sweep --json``: ``over`` is what was swept. :ivar measured: with ``--measure``."""

    model: str
    over: str
    points: list[PointRecord]
    measured: MeasuredSweep | None = None
    format: str = SWEEP_FORMAT


#: Name of the schema in ``report/schema/`` → document.
DOCUMENTS: dict[str, type[msgspec.Struct]] = {
    "estimate.json": EstimateDocument,
    "plan.json": PlanDocument,
    "sweep.json": SweepDocument,
}


def table(entries: Iterable[Entry], *, upper: bool = False) -> Table:
    """Bucket → device label → bytes, of the lower or upper ends."""
    found: Table = {}
    for entry in entries:
        size = entry.at_most if upper and entry.at_most is not None else entry.bytes
        row = found.setdefault(entry.bucket, {})
        row[entry.device] = row.get(entry.device, 0) + size
    return {bucket: found[bucket] for bucket in BUCKETS if bucket in found}


def estimate_document(
    estimate: Estimate, *, verdict: Verdict | None = None, exact: Exact | None = None
) -> EstimateDocument:
    """An estimate as a document."""
    return EstimateDocument(
        engine=estimate.engine,
        model=estimate.model,
        settings=estimate.settings,
        buckets=table(estimate.entries),
        at_most=table(estimate.entries, upper=True),
        total=estimate.total(),
        total_at_most=estimate.at_most(),
        devices=estimate.devices,
        entries=list(estimate.entries),
        notes=list(estimate.notes),
        command=list(estimate.command),
        unknown=list(estimate.unknown),
        textbook_kv=estimate.textbook_kv,
        pressure=estimate.pressure,
        verdict=verdict,
        exact=exact,
    )


def plan_record(plan: Plan, *, confirmed: bool | None = None) -> PlanRecord:
    """A plan as it is in a document."""
    made = plan.estimate
    return PlanRecord(
        model=plan.model,
        context=plan.context,
        slots=plan.slots,
        cache_type=plan.cache_type,
        experts_on_cpu=plan.experts_on_cpu,
        layers_on_gpu=plan.layers_on_gpu,
        layers=plan.layers,
        gives_up=list(plan.gives_up),
        buckets=table(made.entries),
        at_most=table(made.entries, upper=True),
        total=made.total(),
        total_at_most=made.at_most(),
        verdict=plan.verdict,
        settings=made.settings,
        notes=list(made.notes),
        command=list(made.command),
        confirmed=confirmed,
    )


def search_record(search: Search, confirmed: dict[int, bool] | None = None) -> SearchRecord:
    """A search as it is in a document. :param confirmed: position of a plan → what the dry run said."""
    told = confirmed or {}
    return SearchRecord(
        budget=search.budget.text,
        minimum_context=search.wishes.minimum_context or 0,
        plans=[plan_record(plan, confirmed=told.get(index)) for index, plan in enumerate(search.plans)],
        impossible=_impossible(search.impossible) if search.impossible is not None else None,
    )


def _impossible(found: Impossible) -> ImpossibleRecord:
    return ImpossibleRecord(
        missing=found.missing,
        device=found.device,
        reason=found.reason,
        unknown=list(found.unknown),
        relaxed=list(found.relaxed),
        total=found.cheapest.total(),
        total_at_most=found.cheapest.at_most(),
        command=list(found.cheapest.command),
    )


def point_record(point: Point, measured: MeasuredPoint | None = None) -> PointRecord:
    """A value of a sweep as it is in a document."""
    made = point.estimate
    entries = made.entries if made is not None else ()
    return PointRecord(
        value=point.value,
        buckets=table(entries),
        at_most=table(entries, upper=True),
        total=made.total() if made is not None else {},
        total_at_most=made.at_most() if made is not None else {},
        command=list(made.command) if made is not None else [],
        unknown=list(made.unknown) if made is not None else [],
        verdict=point.verdict,
        refused=point.refused,
        measured=measured,
    )
