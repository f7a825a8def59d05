"""Estimates of backends that were started, beside what their engines printed and what was measured.

Made where somebody reads them only: at a test that failed, and in a report that was asked for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from pytest_vram import in_force
from pytest_vram.differences import Beside, Cause, Change, between
from pytest_vram.ledger import Ledger, combined
from pytest_vram.predicting import Predictions
from pytest_vram.readings import Unmeasurable
from pytest_vram.report import rests
from pytest_vram.report.records import BackendRecord, TestRecord
from pytest_vram.spec import BackendSpec

if TYPE_CHECKING:
    from pytest_vram.sizing.prediction import Estimate


def of_backend(backend: BackendRecord, predictions: Predictions) -> Beside:
    """One backend's ledger beside its estimate; where there is none, the reason."""
    return _beside(backend.ledger, [backend], predictions, rests.of_backend(backend))


def of_test(test: TestRecord, backends: Sequence[BackendRecord], predictions: Predictions) -> Beside:
    """The ledger of a test beside the estimates of its backends together."""
    if test.ledger is None or not backends:
        return Beside(reason="this test used no backend, so that nothing was predicted")
    return _beside(test.ledger, backends, predictions, rests.of_test(test, backends))


def _beside(
    ledger: Ledger, backends: Sequence[BackendRecord], predictions: Predictions, causes: Mapping[str, list[Cause]]
) -> Beside:
    made: list[Estimate] = []
    changes: list[Change] = []
    for backend in backends:
        found = _estimate(backend, predictions)
        if isinstance(found, Unmeasurable):
            return Beside(reason=found.reason)
        made.append(found)
        said = in_force.of_facts(backend.engine, backend.facts)
        changes += in_force.changes(in_force.of_estimate(found.settings), said)
    predicted = combined(made)
    facts = backends[0].facts if len(backends) == 1 else {}
    context, slots = facts.get("context"), facts.get("slots")
    differences = between(
        predicted,
        ledger,
        causes=causes,
        changes=changes,
        context=context if isinstance(context, int) else None,
        slots=slots if isinstance(slots, int) else 1,
    )
    unknown = sorted({bucket for one in made for bucket in one.unknown})
    reason = f"lower bounds only, because something of it is unknown: {', '.join(unknown)}" if unknown else ""
    return Beside(predicted=predicted, differences=differences, changes=tuple(changes), reason=reason)


def _estimate(backend: BackendRecord, predictions: Predictions) -> Estimate | Unmeasurable:
    try:
        spec = msgspec.convert(backend.spec, BackendSpec)
    except msgspec.ValidationError as error:
        return Unmeasurable(reason=f"the spec of backend {backend.name!r} cannot be read back: {error}")
    return predictions.on(spec, command=backend.command, devices=backend.ledger.devices, facts=backend.facts)
