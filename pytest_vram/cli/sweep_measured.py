"""``vram sweep --measure``: each value is booted, probed, measured and ended, beside what was predicted for it."""

from __future__ import annotations

import argparse
import contextlib
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from pytest_vram import bootlog, settings, specfile
from pytest_vram.backends.growth import HOST, Growth
from pytest_vram.backends.labels import relabelled
from pytest_vram.backends.pool import RunningBackend
from pytest_vram.bootlog.boot import Boot
from pytest_vram.cli import asked as asking
from pytest_vram.cli import deployment, project
from pytest_vram.cli.output import BAD_USE, FAILS, HOLDS, Answer, progress
from pytest_vram.cli.runs import ending
from pytest_vram.errors import BackendError, BadInput, BootFailed, KeeperError, KeeperLost
from pytest_vram.keeper.messages import Closed
from pytest_vram.needs import Plan
from pytest_vram.predicting import options_of
from pytest_vram.report.measured import MeasuredPoint, MeasuredSweep, Way
from pytest_vram.report.measured_lines import measured_lines
from pytest_vram.report.predictions import PointRecord, SweepDocument, point_record, table
from pytest_vram.run import Run, new_identity, ways_on
from pytest_vram.settings import Settings
from pytest_vram.sizing import estimating, llama_options, sweep
from pytest_vram.sizing.llama_options import Given
from pytest_vram.sizing.options import Era, LlamaOptions
from pytest_vram.sizing.shape import ModelShape
from pytest_vram.spec import BackendSpec
from pytest_vram.units import mib

#: Seconds that one value may take, boot included.
SECONDS = 60.0
_MOST_SECONDS = 86_400.0
#: Values of a measured sweep where none are given: few, and small enough for the demo.
_CONTEXTS = (512, 1024, 2048, 4096, 8192)
_SLOTS = (1, 2, 4)
_TYPES = ("f16", "q8_0", "q4_0")
_STEPS = 2
#: Least seconds that are left for the probe once a server has booted.
_PROBE = 5.0
NAME = "sweep"


class Value(msgspec.Struct, frozen=True, kw_only=True):
    """One value to try. :ivar rounds: how many requests at once; ``None``: as many as there are slots."""

    text: str
    point: sweep.Point
    settings: dict[str, str | int]
    way: Way = ""
    rounds: list[int] | None = None


def run(options: argparse.Namespace, rest: Sequence[str]) -> Answer:
    """Measure every value; exit code 1 where none of them boots.

    :raises BadInput: what cannot be used, or nothing that can be measured here.
    :raises BackendError: no engine, or no model. :raises KeeperError: nothing can be measured any more.
    """
    device, rest = _device(options, rest)
    seconds = _seconds(options.seconds)
    wanted = asking.asked(options, rest)
    if wanted.engine != "llama-server":
        raise BadInput(f"sweep boots llama-server, and not {wanted.engine}")
    file = deployment.config(options)
    found = settings.resolve(
        settings.gather({"device": device}, os.environ, {}, file.values, file.path),
        config_path=Path(file.path) if file.path else None,
    )
    made = _run(found, file)
    shape = estimating.load(wanted.models[0])
    placed = _placed(made, wanted.options)
    era, given = asking.era(options, asking.llama_given(msgspec.structs.replace(wanted, options=placed)))
    given = _on_cards(made, given)
    values = _values(options, shape, given, era)
    spec = _spec(options, file, shape, placed, seconds)
    made.pool.plan(spec)  # what the engine refuses of the options is bad use, and not a row
    points = _measured(made, spec, values, seconds)
    records = [_labelled(point_record(value.point, point), made) for value, point in points]
    binary = made.pool.plan(spec).argv[0]
    about = MeasuredSweep(
        device=found.device_text,
        devices=list(made.measurable),
        folder=made.identity.folder,
        binary=binary,
    )
    document = SweepDocument(model=shape.source, over=options.over, points=records, measured=about)
    code = HOLDS if any(record.measured and record.measured.boot_peak for record in records) else FAILS
    if all(record.refused for record in records):
        code = BAD_USE
    return Answer(code=code, document=document, lines=tuple(measured_lines(document)))


def _labelled(record: PointRecord, made: Run) -> PointRecord:
    """The prediction under the labels of the devices that were measured: both count the cards in the same order."""
    cards = sorted({label for label in record.total if label != HOST}, key=lambda label: (len(label), label))
    measured = [device.label for device in made.measurable if device.label != HOST]
    if cards == measured or len(cards) != len(measured):
        return record
    new = dict(zip(cards, measured, strict=True))

    def renamed(row: dict[str, int]) -> dict[str, int]:
        return {new.get(label, label): size for label, size in row.items()}

    return msgspec.structs.replace(
        record,
        buckets={bucket: renamed(row) for bucket, row in record.buckets.items()},
        at_most={bucket: renamed(row) for bucket, row in record.at_most.items()},
        total=renamed(record.total),
        total_at_most=renamed(record.total_at_most),
    )


# ---------------------------------------------------------------- what to measure


def _device(options: argparse.Namespace, words: Sequence[str]) -> tuple[str | None, list[str]]:
    """The device to measure on: ``--vram-device``, or a ``--device`` that is no name of the engine's (``CUDA0``)."""
    found: str | None = options.vram_device
    kept: list[str] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        if name != "--device":
            kept.append(word)
            continue
        if not equals:
            if not rest:
                raise BadInput("option '--device' has no value: write cpu, auto, cuda:0, rpc:0 …")
            value = rest.pop(0)
        try:
            settings.parse_device(value)
        except ValueError:
            kept += [name, value]  # the engine's
            continue
        if found is not None and found != value:
            raise BadInput(f"--device {value} and --vram-device {found} are two devices to measure on: name one")
        found = value
    return found, kept


def _seconds(text: str | None) -> float:
    if text is None:
        return SECONDS
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 1 <= seconds <= _MOST_SECONDS:
        raise BadInput(f"--seconds {text}: write how long one value may take, from 1 to {_MOST_SECONDS:.0f} seconds")
    return seconds


def _run(found: Settings, file: specfile.SpecFile) -> Run:
    """A run of this process whose tests are the values; no budget is judged, and leases are kept.

    :raises BadInput: nothing can be measured with these settings.
    """
    free = msgspec.structs.replace(found, budget=None, reserve=0)
    made = Run(free, file, new_identity(project.find(Path.cwd()).root), role="controller", worker=None)
    if made.predicted:
        raise BadInput("--measure on device 'predicted' would measure nothing: leave --measure out")
    if not made.measurable:
        ways = ways_on(free).replace("--vram-device=predicted", "a sweep without --measure")
        raise BadInput(f"{made.why_unmeasurable()}. Ways on: {ways}")
    return made


def _placed(made: Run, options: dict[str, Any]) -> dict[str, Any]:
    """The engine's options with the device that is measured, where they name none of their own."""
    if "device" in options or "rpc" in options:
        return dict(options)
    kinds = {device.kind for device in made.measurable}
    if kinds == {"cpu"}:
        return {**options, "device": "none"}
    endpoints = made.pool.context.endpoints()
    return {**options, "rpc": ",".join(endpoints)} if endpoints else dict(options)


def _on_cards(made: Run, given: Given) -> Given:
    """What is predicted, predicted for the cards that are measured and not for one that is assumed."""
    if "device" in given.given or "rpc" in given.given:
        return given
    names = [device.engine_names[0] for device in made.measurable if device.engine_names]
    if len(names) != len(made.measurable):
        return given
    notes = tuple(note for note in given.notes if not note.text.startswith("no --device"))
    devices = llama_options.devices_named(names)
    return msgspec.structs.replace(given, options=msgspec.structs.replace(given.options, devices=devices), notes=notes)


def _values(options: argparse.Namespace, shape: ModelShape, given: Given, era: Era) -> list[Value]:
    over = options.over
    words = [value.strip() for value in options.values.split(",")] if options.values is not None else []
    if not all(words):
        raise BadInput(f"--values {options.values!r} has an empty value: write values with commas between them")
    texts = list(dict.fromkeys(words)) or _usual(shape, over)
    limits, reserve = asking.budget(options.budget), asking.size(options.reserve, "--reserve")
    found: list[Value] = []
    for in_all in (False, True) if over == "parallel" else (False,):
        points = sweep.sweep(shape, given, over, texts, budget=limits, reserve=reserve, era=era, in_all=in_all)
        for text, point in zip(texts, points, strict=True):
            changed = sweep.with_value(given, over, text, in_all=in_all)
            way: Way = "" if over != "parallel" else "context in all" if in_all else "context each"
            if in_all and any(one.settings == _changes(over, changed) for one in found):
                continue  # with one slot both ways are the same
            rounds = _rounds(changed.slots) if over == "parallel" else None
            found.append(Value(text=text, point=point, settings=_changes(over, changed), way=way, rounds=rounds))
    return found


def _usual(shape: ModelShape, over: str) -> list[str]:
    if over == "context":
        trained = shape.context
        found = [size for size in _CONTEXTS if not trained or size <= trained]
        return [str(size) for size in found or [trained or _CONTEXTS[0]]]
    if over == "parallel":
        return [str(count) for count in _SLOTS]
    if over == "cache-type":
        return list(_TYPES)
    blocks = len(shape.layers)
    return list(dict.fromkeys(str(blocks * step // _STEPS) for step in range(_STEPS + 1)))


def _changes(over: str, options: LlamaOptions) -> dict[str, str | int]:
    """The engine's options that are other than given, by full name."""
    if over == "context":
        return {"ctx-size": options.ctx_size}
    if over == "cache-type":
        return {"cache-type-k": options.cache_type_k, "cache-type-v": options.cache_type_v}
    if over == "n-cpu-moe":
        return {"n-cpu-moe": options.n_cpu_moe}
    found: dict[str, str | int] = {"parallel": options.slots}
    return {**found, "ctx-size": options.ctx_size} if options.ctx_size else found


def _rounds(slots: int) -> list[int]:
    """1, 2, 4 … requests at once, up to as many as there are slots."""
    found = [1]
    while found[-1] * 2 < slots:
        found.append(found[-1] * 2)
    return found if slots == 1 else [*found, slots]


def _spec(
    options: argparse.Namespace, file: specfile.SpecFile, shape: ModelShape, placed: dict[str, Any], seconds: float
) -> BackendSpec:
    """What is booted: the named backend, or the model alone, with the options of the command line.

    :raises BadInput: an option that a server under test cannot have.
    """
    made = BackendSpec(
        name=NAME,
        engine="llama-server",
        origin="the command line",
        base=str(Path.cwd()),
        model=str(Path(shape.source).absolute()),
        options={name: value for name, value in placed.items() if name != "model"},
        boot_timeout=seconds,
    )
    made = msgspec.structs.replace(made, options=options_of(made))  # paths of the command line start from here
    named = getattr(options, "backend", None)
    if named is None:
        return made
    base = file.backends[named]
    return msgspec.structs.replace(
        base,
        model=made.model,
        options=made.options,
        boot_timeout=min(base.boot_timeout, seconds),
        # How long a value may take is said here, and several prompts at once take longer than one.
        request_timeout=max(base.request_timeout, seconds),
    )


# ---------------------------------------------------------------- measuring


def _measured(
    made: Run, spec: BackendSpec, values: Sequence[Value], seconds: float
) -> list[tuple[Value, MeasuredPoint]]:
    """A point for each value, in order; whatever ends this, the keeper ends everything that was started."""
    found: list[tuple[Value, MeasuredPoint]] = []
    with ending(made, "sweep"):
        for number, value in enumerate(values, 1):
            name = f"{value.text}{f' ({value.way})' if value.way else ''}"
            progress(f"{number} of {len(values)}: {name}")
            if value.point.refused:
                found.append((value, MeasuredPoint(way=value.way, settings=value.settings)))
                continue
            found.append((value, _one(made, spec, value, name, seconds)))
            progress(f"  {_in_short(found[-1][1])}")
    return found


def _one(made: Run, spec: BackendSpec, value: Value, name: str, seconds: float) -> MeasuredPoint:
    """Boot, probe, end. What goes wrong with the deployment is in the point.

    :raises KeeperLost: nothing can be measured any more.
    """
    blank = MeasuredPoint(way=value.way, settings=value.settings)
    # Alone on the device: what others load meanwhile would be in device figures, and they would wait for room.
    attempt = made.begin(f"sweep: {name}", Plan(takes_part=True, serial=True), judged=True)
    if attempt.waited > 1:
        progress(f"  waited {attempt.waited:.0f} s: {'; '.join(attempt.waited_for)}")
    began = time.monotonic()  # what others took is not this value's time
    backend: RunningBackend | None = None
    before = _newest_log(Path(made.identity.folder), spec.name)
    try:
        try:
            changed = msgspec.structs.replace(spec, options={**spec.options, **value.settings})
            backend = _acquired(made, changed)
        except BackendError as error:
            return _not_booted(made, blank, spec, error, before)
        left = max(_PROBE, seconds - (time.monotonic() - began))
        growth = backend.probe(at_once=value.rounds, seconds=left)
        closed = made.end(attempt, {"value": value.text})
        if closed is None:
            raise KeeperLost(attempt.trouble or "the keeper was lost")
        return _point(blank, backend, growth, closed)
    finally:
        if backend is not None:
            with contextlib.suppress(BackendError, KeeperError):
                backend.stop()
        made.leave(attempt)


def _acquired(made: Run, spec: BackendSpec) -> RunningBackend:
    """A server of this spec; one that crashed before its log said why is asked once more.

    Some builds of llama.cpp crash on an allocation that failed, and now and then the line about it is lost with them.
    """
    try:
        return made.pool.acquire(spec)
    except BootFailed:
        log = _newest_log(Path(made.identity.folder), spec.name)
        if log is None or bootlog.read_own(log, engine=spec.engine).failure is not None:
            raise
        return made.pool.acquire(spec)


def _point(blank: MeasuredPoint, backend: RunningBackend, growth: Growth, closed: Closed) -> MeasuredPoint:
    boot, running = backend.boot, backend.running
    boot_peak = dict(running.boot_peak)
    if running.host_boot_peak is not None:
        boot_peak.setdefault("host", running.host_boot_peak)
    peak = dict(closed.backend)
    if closed.host is not None:
        peak.setdefault("host", closed.host)
    failed = growth.failed
    return msgspec.structs.replace(
        blank,
        printed=table(boot.entries),
        printed_total=boot.ledger().total(),
        facts=dict(boot.facts),
        boot_seconds=round((running.t_ready - running.t_start) / 1e9, 3),
        boot_peak=boot_peak,
        at_ready=dict(running.at_ready),
        peak=peak,
        growth=growth,
        error="" if failed is None else f"{failed.name}: {failed.outcome.replace('_', ' ')}: {failed.reason}",
        failure=failed.failure if failed is not None else boot.failure,
        log=Path(running.log).name,
    )


def _not_booted(
    made: Run, blank: MeasuredPoint, spec: BackendSpec, error: BackendError, before: Path | None
) -> MeasuredPoint:
    """What is known of a boot that failed: its log says how far it came. :param before: the newest log before it."""
    log = _newest_log(Path(made.identity.folder), spec.name)
    log = log if log != before else None
    boot: Boot | None = None
    if log is not None:
        boot = relabelled(bootlog.read_own(log, engine=spec.engine), made.pool.context, spec.env)
    return msgspec.structs.replace(
        blank,
        printed=table(boot.entries) if boot is not None else {},
        printed_total=boot.ledger().total() if boot is not None else {},
        facts=dict(boot.facts) if boot is not None else {},
        failure=boot.failure if boot is not None else None,
        error=str(error).split(" Last lines of ")[0].split("\n")[0],
        log=log.name if log is not None else "",
    )


def _newest_log(folder: Path, name: str) -> Path | None:
    logs = {path: path.name.split(".")[-2] for path in folder.glob(f"{name}.*.log")}
    numbered = {path: int(number) for path, number in logs.items() if number.isascii() and number.isdigit()}
    return max(numbered, key=lambda path: numbered[path], default=None)


def _in_short(point: MeasuredPoint) -> str:
    if point.error:
        return point.error[:300]
    parts = [f"{label} {mib(figure.bytes)}" for label, figure in point.peak.items() if hasattr(figure, "bytes")]
    return f"ready after {point.boot_seconds} s, peak {', '.join(parts)}"
