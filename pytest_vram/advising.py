"""Advice where a test broke a limit on memory, or its backend did not boot for want of it.

Made at a failure only, with what its backends are and where they run; where there is none, it says why. A failure here
never takes anything from the report of the test.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from pytest_vram.advice.records import Advice
from pytest_vram.checks.finding import Finding
from pytest_vram.errors import BootFailed, VramError
from pytest_vram.readings import Reading
from pytest_vram.report.advice_lines import advice_lines
from pytest_vram.report.records import BackendRecord, TestRecord
from pytest_vram.report.soaks import SoakDocument
from pytest_vram.spec import BackendSpec

if TYPE_CHECKING:
    from pytest_vram.bootlog.boot import Failure
    from pytest_vram.ledger import Ledger
    from pytest_vram.predicting import Sized
    from pytest_vram.run import Attempt, Run
    from pytest_vram.sizing.options import LlamaOptions

#: Checks of memory, whose failure a smaller setting of a backend may mend.
_CHECKS = ("vram_budget", "max_vram", "max_host_memory", "vram_reserve", "vram_soak")
#: Exceptions that are looked through for the one that began it.
_CHAIN = 8
#: Free host memory is asked for in steps: it changes all the time, and advice that differs by less is the same.
_STEP = 256 << 20
HOST = "host"
_SUM = "sum"


class Told(NamedTuple):
    """Advice, or why there is none; neither where nobody could expect any."""

    advice: tuple[Advice, ...] = ()
    reason: str | None = None


def advised(
    run: Run, attempt: Attempt, record: TestRecord, backends: Sequence[BackendRecord], error: BaseException | None
) -> tuple[TestRecord, list[tuple[str, str]]]:
    """The record of a failed test with advice, and the section that its report gets for it."""
    told = of_test(run, attempt, record, backends, error)
    if not told.advice and told.reason is None:
        return record, []
    lines = advice_lines(told.advice, told.reason)
    record = msgspec.structs.replace(record, advice=list(told.advice), no_advice=told.reason)
    return record, [("vram: advice", "\n".join(lines))]


def of_test(
    run: Run, attempt: Attempt, record: TestRecord, backends: Sequence[BackendRecord], error: BaseException | None
) -> Told:
    """What would let this test pass.

    :param backends: that it used. :param error: what the test or its set-up ended with.
    """
    try:
        booting = _boot_failure(error)
        if booting is not None:
            return _of_boot(run, booting)
        failed = next(
            (one for one in record.findings if one.verdict == "failed" and one.check in _CHECKS and one.device), None
        )
        return Told() if failed is None else _of_finding(run, attempt, record, backends, failed)
    except VramError as problem:
        return Told(reason=str(problem).splitlines()[0])
    except Exception as problem:  # noqa: BLE001 - the verdict on the test stands, whatever became of the advice
        return Told(reason=f"{type(problem).__name__}: {problem}; this is a defect of pytest-vram, please report it")


def of_soak(
    run: Run, attempt: Attempt, found: SoakDocument, finding: Finding | None, backends: Sequence[BackendRecord]
) -> SoakDocument:
    """A soak's report with what would have kept its peak within the limit, where that is what failed."""
    if finding is None or finding.device is None:
        return found
    record = TestRecord(
        nodeid=found.name, outcome="failed", seconds=found.seconds, peak=dict(found.peak), findings=[finding]
    )
    told = of_test(run, attempt, record, backends, None)
    return msgspec.structs.replace(found, advice=list(told.advice), no_advice=told.reason)


# ---------------------------------------------------------------- a limit


def _of_finding(
    run: Run, attempt: Attempt, record: TestRecord, backends: Sequence[BackendRecord], failed: Finding
) -> Told:
    device, limit = failed.device, failed.limit
    if device is None or limit is None or not isinstance(failed.measured, Reading):
        return Told()
    if failed.measured.scope == "process":
        return Told(reason="what the test's own process holds depends on no setting of a backend")
    from pytest_vram import advice, predicting
    from pytest_vram.advice.goal import Goal

    names: dict[str, str] = {}
    bucket: str | None = None
    if run.predicted:
        specs, _ = predicting.specs_of(run, attempt)
        if len(specs) != 1:
            return Told(reason=f"this test has {len(specs)} backends, and their estimates were added")
        sized = predicting.sized_on(specs[0], command=(), devices={})
        options = sized.given.options
    elif backends:
        largest = max(backends, key=lambda one: _held(one.ledger, device))
        spec = msgspec.convert(largest.spec, BackendSpec)
        names = largest.ledger.devices
        sized = predicting.sized_on(spec, command=largest.command, devices=names, facts=largest.facts)
        options = _in_force(sized, largest.facts)
        bucket = _grown(record, device) or _largest(largest.ledger, device)
    else:
        return Told(reason="this test used no backend, so that there is no setting to turn")
    goal = Goal(
        device=device,
        rooms={**_rooms(record, device), device: limit - failed.measured.upper},
        measured=not run.predicted,
        bucket=bucket,
    )
    given = msgspec.structs.replace(sized.given, options=options)
    asked = msgspec.json.encode((sized.shape.source, given, str(sized.era), goal, names))
    made = run.advice.get(asked)
    if made is None:
        made = run.advice[asked] = advice.advise(sized.shape, given, goal, era=sized.era, names=names or None)
    return Told(advice=made) if made else Told(reason=f"no setting of its backend would save anything on {device}")


def _in_force(sized: Sized, facts: Mapping[str, Any]) -> LlamaOptions:
    """The options with what the engine chose where nothing was given, by its log."""
    changes: dict[str, Any] = {}
    context = facts.get("context")
    if not {"ctx-size", "kv-unified-per-slot"} & set(sized.given.given) and isinstance(context, int):
        changes["ctx_size"] = context
    offloaded = facts.get("layers_offloaded")
    every = facts.get("layers_offloadable")
    if "n-gpu-layers" not in sized.given.given and isinstance(offloaded, int) and offloaded != every:
        changes["n_gpu_layers"] = offloaded
    return msgspec.structs.replace(sized.given.options, **changes)


def _rooms(record: TestRecord, device: str) -> dict[str, int]:
    """Label → bytes that the other devices still have under their limits, and host memory that is free."""
    rooms: dict[str, int] = {}
    for label, limit in record.limit.items():
        peak = record.peak.get(label)
        if label != device and isinstance(peak, Reading):
            rooms[label] = max(0, limit - peak.upper)
    if HOST not in (device, *rooms):
        import psutil

        with contextlib.suppress(OSError, RuntimeError):
            rooms[HOST] = psutil.virtual_memory().available // _STEP * _STEP
    return rooms


def _held(ledger: Ledger, device: str) -> int:
    held = ledger.explained()
    return sum(size for label, size in held.items() if label != HOST) if device == _SUM else held.get(device, 0)


def _grown(record: TestRecord, device: str) -> str | None:
    """The bucket that holds most beyond its prediction, for no reason that is known to be harmless."""
    if record.beside is None:
        return None
    rows = [
        one
        for one in record.beside.differences
        if one.device == device and one.meaning in ("unknown", "setting") and one.bucket != "unattributed"
    ]
    most = max(rows, key=lambda one: one.least, default=None)
    return most.bucket if most is not None and most.least > 0 else None


def _largest(ledger: Ledger, device: str) -> str | None:
    found = ledger.largest(device)
    return found[0] if found is not None else None


# ---------------------------------------------------------------- a boot


def _boot_failure(error: BaseException | None) -> BootFailed | None:
    """The failed boot that a test ended with; a set-up ends with its message only, raised where it was caught."""
    for _ in range(_CHAIN):
        if error is None or isinstance(error, BootFailed):
            return error
        error = error.__cause__ or error.__context__
    return None


def _of_boot(run: Run, error: BootFailed) -> Told:
    spec = error.spec
    if not isinstance(spec, BackendSpec):
        return Told()
    log = _log(run, str(error))
    if log is None:
        return Told()
    from pytest_vram import advice, predicting
    from pytest_vram.backends.labels import relabelled
    from pytest_vram.bootlog import reader

    plan = run.pool.plan(spec)
    boot = relabelled(reader.read_own(log, engine=spec.engine), run.pool.context, plan.env)
    if boot.failure is None:
        return Told()
    reason: str | None = None
    shape = options = None
    try:
        if spec.engine == "llama-server":
            options = predicting.options_of(spec)
            sized = predicting.sized_on(spec, command=plan.argv, devices=boot.devices, facts=boot.facts)
            shape = sized.shape
    except VramError as problem:
        reason = str(problem).splitlines()[0]
    free = _free(run, boot.failure)
    made = advice.of_boot(boot, shape=shape, options=options, free=free)
    return Told(advice=made, reason=None if made else reason or advice.reason(boot))


def _free(run: Run, failure: Failure) -> dict[str, int]:
    """Label → bytes that were free before the boot: by the log, but no more than programs can have of the device at
    all, which the engine may not know."""
    found: dict[str, int] = {}
    for device in run.measurable:
        size = device.usable if isinstance(device.usable, Reading) else device.capacity
        if isinstance(size, Reading) and device.label == failure.device:
            found[device.label] = size.bytes if failure.free is None else min(size.bytes, failure.free)
    return found


def _log(run: Run, message: str) -> Path | None:
    """The log of a server that did not boot, which the message names."""
    found = re.search(re.escape(run.identity.folder) + r"/[^\n/:]{1,200}\.\d{1,6}\.log", message, re.ASCII)
    return Path(found[0]) if found is not None else None
