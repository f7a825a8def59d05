"""What a test asks for, from its markers and fixtures: its plan, and what it must have before it may start."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from pytest_vram import markers
from pytest_vram.errors import BadMarker
from pytest_vram.spec import Limits

#: Seconds that a test with a limit on its rise waits, at most, for a baseline that does not move.
BASELINE_SETTLES = 2.0


class Plan(msgspec.Struct, kw_only=True):
    """What one test asks for, read from its markers and fixtures.

    :ivar errors: one message for each marker that cannot be used; the test is an error with the first.
    :ivar limits: meanings of its ``max_vram`` markers, the closest of each (over, scope, phase).
    :ivar toolcalls: meaning of its ``toolcall_accuracy`` marker. :ivar idle: of its ``idle_rollback`` marker.
    :ivar soak: of its ``vram_soak`` marker.
    :ivar takes_part: whether the test has anything to do with this plugin.
    :ivar wants_backend: whether its fixtures start its backend. :ivar names_backend: whether that, its marker or its
        estimate says which backend it is about. :ivar may_use_backends: whether a fixture lets it start others.
    :ivar may_fail: whether it is expected to fail.
    """

    errors: list[str] = []
    limits: list[dict[str, Any]] = []
    host_limit: dict[str, Any] | None = None
    serial: bool = False
    backend: str | None = None
    overrides: dict[str, Any] = {}
    requires: list[dict[str, Any]] = []
    rate: float | None = None
    toolcalls: dict[str, Any] | None = None
    idle: dict[str, Any] | None = None
    soak: dict[str, Any] | None = None
    takes_part: bool = False
    wants_backend: bool = False
    names_backend: bool = False
    may_use_backends: bool = False
    may_fail: bool = False

    @property
    def needs_device(self) -> bool:
        """Whether a marker of this test can only be judged with a measurable device."""
        return bool(self.limits) or self.idle is not None or self.soak is not None


def plan_of(marks: Iterable[tuple[str, tuple[object, ...], Mapping[str, object]]], fixtures: Iterable[str]) -> Plan:
    """The plan of a test from its markers, closest first, and the names of its fixtures."""
    names = set(fixtures)
    plan = Plan(
        takes_part=not markers.FIXTURES.isdisjoint(names - {"vram_estimate"}),  # which starts nothing
        wants_backend=not names.isdisjoint(("vram_backend", "vram_client", "vram_async_client", "vram_session")),
        may_use_backends="vram_backends" in names,
    )
    plan.names_backend = plan.wants_backend or "vram_estimate" in names
    seen: set[object] = set()
    for name, args, kwargs in marks:
        plan.may_fail = plan.may_fail or name == "xfail"
        if name not in markers.MARKERS:
            continue
        # Beside its estimate the marker only says which backend is meant.
        plan.takes_part = plan.takes_part or name != "vram_backend" or "vram_estimate" not in names
        try:
            meaning = markers.read(name, args, kwargs)
        except BadMarker as error:
            plan.errors.append(str(error))
            continue
        key = (name, meaning["over"], meaning["scope"], meaning["phase"]) if name == "max_vram" else name
        if key in seen and name != "requires_vram":
            continue
        seen.add(key)
        match name:
            case "max_vram":
                plan.limits.append(meaning)
            case "max_host_memory":
                plan.host_limit = meaning
            case "serial_only":
                plan.serial = True
            case "vram_backend":
                plan.backend, plan.overrides = meaning["name"], meaning["overrides"]
                plan.names_backend = True
            case "requires_vram":
                plan.requires.append(meaning)
            case "vram_soak":
                plan.soak = meaning
                # It is run in the set-up, whether the test takes what it showed or not.
                plan.wants_backend = plan.names_backend = True
            case "idle_rollback":
                plan.idle = meaning
            case "min_tokens_per_second":
                plan.rate = meaning["rate"]
            case "toolcall_accuracy":
                plan.toolcalls = meaning
                # Its cases are asked in the set-up, whether the test takes their results or not.
                plan.wants_backend = plan.names_backend = True
    return plan


def need_of(limits: Iterable[Mapping[str, Any]], budget: Limits | None, labels: Sequence[str]) -> dict[str, int]:
    """Device label → bytes that a test with these ``max_vram`` markers may hold, its backends included.

    A marker counts where it limits the whole peak of the run or of the backends: one on a phase, on the rise over the
    baseline, on the test's own process or on the device says nothing of what the test may hold in all. With a budget
    the smaller of both counts; a budget alone is no need, and neither is ``sum=`` alone.

    :param limits: meanings of the markers, as :func:`pytest_vram.markers.read` gives them.
    :param labels: devices that are measured.
    """
    whole = [
        meaning["limit"]
        for meaning in limits
        if meaning["over"] == "total" and meaning["scope"] in ("run", "backend") and meaning["phase"] is None
    ]
    if not whole:
        return {}
    smallest = min(whole)
    found: dict[str, int] = {}
    for label in labels:
        ceilings = [smallest]
        if budget is not None:
            ceilings += [size for size in (budget.of(label), budget.total) if size is not None]
        found[label] = min(ceilings)
    return found


def settling_of(limits: Iterable[Mapping[str, Any]]) -> float:
    """Seconds that the baseline of a test may be waited for: none unless a limit is on the rise over it."""
    return BASELINE_SETTLES if any(meaning["over"] == "baseline" for meaning in limits) else 0.0
