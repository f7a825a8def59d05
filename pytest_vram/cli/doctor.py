"""``vram doctor``: what can be measured here and why not, and which engines, models and leftovers are here."""

from __future__ import annotations

import argparse
import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import msgspec

from pytest_vram import measure, settings, specfile
from pytest_vram.backends import PlanContext, binary, engine, gguf_file, store
from pytest_vram.cli import project, reap
from pytest_vram.cli.output import FAILS, HOLDS, Answer
from pytest_vram.errors import VramError
from pytest_vram.keeper import leftovers
from pytest_vram.measure import drm_cards
from pytest_vram.readings import Reading, Unmeasurable
from pytest_vram.spec import DeviceSpec
from pytest_vram.units import mib

FORMAT = "pytest-vram/doctor/1"
RPC_VARIABLE = "PYTEST_VRAM_RPC"
KINDS = ("cpu", "cuda", "drm", "vulkan", "rpc")
VERSION_TIMEOUT = 10.0


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """A device, or a kind of which there is none. :ivar reason: why it cannot be measured, where it cannot.

    :ivar spec: what to write after ``--vram-device=``. :ivar capacity: bytes. :ivar usable: bytes that programs can
        have of it, where the driver says. :ivar limit_from: what sets the capacity. :ivar per_process: whether it says
        which process holds what; else its rise stands for the run. :ivar accounting: whether the driver keeps exact
        peaks; ``None`` where it cannot. :ivar engine_names: what engines call it. :ivar notes: what to know of figures.
    """

    kind: str
    measurable: bool
    label: str | None = None
    name: str | None = None
    source: str | None = None
    capacity: int | None = None
    reason: str | None = None
    spec: str | None = None
    uuid: str | None = None
    usable: int | None = None
    limit_from: str | None = None
    per_process: bool | None = None
    accounting: bool | None = None
    engine_names: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


class EngineFound(msgspec.Struct, frozen=True, kw_only=True):
    """A place where a llama-server was looked for. :ivar version: the line that it prints of itself."""

    place: str
    usable: bool
    note: str
    path: str | None = None
    version: str | None = None


class ModelFound(msgspec.Struct, frozen=True, kw_only=True):
    """The model of a backend. :ivar bytes: size of the file. :ivar reason: why it cannot be used."""

    backend: str
    usable: bool
    path: str | None = None
    bytes: int | None = None
    reason: str | None = None


class BackendFound(msgspec.Struct, frozen=True, kw_only=True):
    """A backend of the config file. :ivar reason: why it cannot be started, found without starting anything."""

    name: str
    engine: str
    usable: bool
    reason: str | None = None


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """The config file. :ivar path: ``None`` where there is none, which is valid."""

    valid: bool
    path: str | None = None
    default: str | None = None
    backends: list[str] = []
    error: str | None = None


class Leftover(msgspec.Struct, frozen=True, kw_only=True):
    """A process that a run started and that outlived it."""

    pid: int
    run: str
    command: str


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """The document of ``vram doctor --json``."""

    versions: dict[str, str]
    platform: str
    root: str
    cache: str
    devices: list[Device]
    engines: list[EngineFound]
    models: list[ModelFound]
    backends: list[BackendFound]
    config: Config
    leftovers: list[Leftover]
    trouble: list[str]
    format: str = FORMAT


def run(options: argparse.Namespace, _rest: list[str]) -> Answer:
    """Look around.

    Exit code 1 when nothing can be measured, the config file is bad, a backend of it cannot be
    started, or servers were left over.

    With ``--reap`` nothing is looked at but what earlier runs left behind, which is ended.
    """
    if options.reap:
        return reap.run()
    here = project.find(Path.cwd())
    config, specs = _config(here.root)
    backends = _backends(specs, here.root)
    devices = _devices()
    left = _leftovers()
    engines, models = _engines(), _models(specs)
    trouble = []
    if not any(device.measurable for device in devices):
        trouble.append("nothing can be measured on this machine")
    if not config.valid:
        trouble.append(f"the settings cannot be used: {config.error}")
    trouble += [
        f"backend {backend.name!r} cannot be started: {backend.reason}"
        for backend in backends
        if not backend.usable and (backend.name != specfile.DEMO or config.default == specfile.DEMO)
    ]
    if left:
        trouble.append(f"{len(left)} processes of earlier runs are still alive: `vram doctor --reap` ends them")
    health = Health(
        versions={"python": platform.python_version(), "pytest-vram": _own_version()},
        platform=f"{platform.system()} {platform.release()} {platform.machine()}",
        root=str(here.root),
        cache=str(store.cache_folder()),
        devices=devices,
        engines=engines,
        models=models,
        backends=backends,
        config=config,
        leftovers=left,
        trouble=trouble,
    )
    return Answer(code=FAILS if trouble else HOLDS, document=health, lines=tuple(_lines(health)))


def _backends(specs: specfile.SpecFile | None, root: Path) -> list[BackendFound]:
    """Plan every backend, which checks all that can be checked without starting one."""
    found = []
    for name, spec in sorted(specs.backends.items()) if specs else ():
        try:
            engine(spec.engine, origin=f"[backend.{name}] in {spec.origin}").plan(spec, PlanContext(rootdir=str(root)))
            found.append(BackendFound(name=name, engine=spec.engine, usable=True))
        except VramError as error:
            found.append(BackendFound(name=name, engine=spec.engine, usable=False, reason=str(error)))
    return found


def _own_version() -> str:
    from importlib.metadata import version

    return version("pytest-vram")


def _devices() -> list[Device]:
    rpc = [part.strip() for part in os.environ.get(RPC_VARIABLE, "").split(",") if part.strip()]
    found = []
    for kind in KINDS:
        if kind == "rpc" and not rpc:
            reason = f"no RPC device is named: {RPC_VARIABLE}=HOST:PORT names a running ggml-rpc-server"
            found.append(Device(kind=kind, measurable=False, reason=reason))
            continue
        for spec in _specs_of(kind):
            for index, device in enumerate(measure.survey([spec], rpc)):
                found.append(_device(kind, spec, index, device))
    return found


def _specs_of(kind: str) -> list[DeviceSpec]:
    """What to ask for so that every device of a kind is found; cards of DRM have names, not indices."""
    names = [card.name for card in drm_cards.cards() if card.measurable] if kind == "drm" else []
    return [DeviceSpec(kind=kind, name=name, text=f"{kind}:{name}") for name in names] or [
        DeviceSpec(kind=kind, text=kind)
    ]


def _device(kind: str, spec: DeviceSpec, index: int, device: measure.DeviceInfo | Unmeasurable) -> Device:
    if isinstance(device, Unmeasurable):
        return Device(kind=kind, measurable=False, reason=device.reason.removeprefix(f"{spec.text}: "))
    text = spec.text if spec.name or kind == "cpu" else f"{kind}:{index}"
    return Device(
        kind=kind,
        measurable=True,
        label=device.label,
        name=device.name,
        source=device.source,
        capacity=device.capacity.bytes if isinstance(device.capacity, Reading) else None,
        spec=text,
        uuid=device.uuid,
        usable=device.usable.bytes if isinstance(device.usable, Reading) else None,
        limit_from=device.limit_from,
        per_process=device.per_process,
        accounting=device.accounting,
        engine_names=device.engine_names,
        notes=device.notes,
    )


def _engines() -> list[EngineFound]:
    found = [
        EngineFound(
            place=place.where,
            usable=place.usable,
            note=place.reason,
            path=str(place.path) if place.path else None,
            version=_version_of(place.path) if place.path else None,
        )
        for place in binary.places()
    ]
    listed = {place.path for place in found}
    for path in sorted((store.cache_folder() / "engines" / "llama-server").glob("*/bin/llama-server")):
        # Builds that die on this CPU are no place to search, but the reason is what a person asks for here.
        result = store.smoke_result(path)
        if str(path) not in listed and result is not None and not result.ok:
            note = f"does not run here: {result.reason}"
            found.append(EngineFound(place="cache", usable=False, note=note, path=str(path)))
    return found


def _version_of(path: Path) -> str | None:
    try:
        done = subprocess.run(
            [str(path), "--version"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=VERSION_TIMEOUT,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    text = (done.stdout + done.stderr).decode("utf-8", "replace")
    return next((line.strip() for line in text.splitlines() if re.match(r"\s*version\b", line)), None)


def _config(root: Path) -> tuple[Config, specfile.SpecFile | None]:
    path: Path | None = None
    try:
        path = specfile.locate(root)
        specs = specfile.read(path)
        settings.resolve(settings.gather({}, os.environ, {}, specs.values, specs.path))
    except VramError as error:
        return Config(valid=False, path=str(path) if path else None, error=str(error)), None
    return Config(valid=True, path=specs.path, default=specs.default, backends=sorted(specs.backends)), specs


def _models(specs: specfile.SpecFile | None) -> list[ModelFound]:
    found = []
    for name, spec in sorted(specs.backends.items()) if specs else ():
        if spec.engine != "llama-server":
            continue
        try:
            path = gguf_file.resolve(spec)
            found.append(ModelFound(backend=name, usable=True, path=str(path), bytes=path.stat().st_size))
        except (VramError, OSError) as error:
            found.append(ModelFound(backend=name, usable=False, reason=str(error)))
    return found


def _leftovers() -> list[Leftover]:
    """Processes of this user of runs whose controller is gone."""
    return [Leftover(pid=one.pid, run=one.run, command=one.command) for one in leftovers.find()]


def _lines(health: Health) -> list[str]:
    lines = [
        f"pytest-vram {health.versions['pytest-vram']}, Python {health.versions['python']}"
        f" ({sys.executable}), {health.platform}",
        "",
        "What can be measured (--vram-device)",
    ]
    said: set[str] = set()
    for device in health.devices:
        if device.measurable:
            lines += _device_lines(device)
        else:
            # What was looked for is the same for several kinds: once is enough.
            parts = [part for part in str(device.reason).split("; ") if part not in said]
            said.update(parts)
            lines.append(f"  no   {device.kind:<10}{'; '.join(parts) or 'as above'}")
    lines += ["", "Engines (llama-server)"]
    for place in health.engines:
        version = f" [{place.version}]" if place.version else ""
        path = f"{place.path}{version}: " if place.path else ""
        lines.append(f"  {'yes' if place.usable else 'no ':<4} {place.place}: {path}{place.note}")
    lines += ["", "Models"]
    for model in health.models:
        what = f"{model.path} ({mib(model.bytes)})" if model.path and model.bytes is not None else str(model.reason)
        lines.append(f"  {'yes' if model.usable else 'no ':<4} {model.backend}: {what}")
    if not health.models:
        lines.append("  none is named by a backend of engine llama-server")
    lines += ["", "Config file"]
    config = health.config
    if not config.valid:
        lines.append(f"  no   {config.error}")
    else:
        found = f"  yes  {config.path}" if config.path else f"  none in {health.root} (vram.toml or [tool.vram])"
        lines.append(f"{found}; backends: {', '.join(config.backends)}; default: {config.default}")
        for backend in health.backends:
            if not backend.usable:
                lines.append(f"  no   backend {backend.name}: {backend.reason}")
    lines += ["", "Leftover servers of earlier runs"]
    lines += [f"  PID {process.pid} of run {process.run}: {process.command}" for process in health.leftovers]
    if not health.leftovers:
        lines.append("  none")
    lines += ["", "; ".join(health.trouble) if health.trouble else "All is well."]
    return lines


def _device_lines(device: Device) -> list[str]:
    facts = [mib(device.capacity) if device.capacity is not None else "size unknown"]
    if device.usable is not None:
        facts.append(f"{mib(device.usable)} of it usable")
    if device.limit_from not in (None, "card", "machine"):
        facts.append(f"as the {device.limit_from} sets it")
    facts.append(f"source {device.source}")
    if device.kind not in ("cpu", "rpc"):
        facts.append("by process" if device.per_process else "device-delta: the rise over what was in use before")
        if device.accounting is not None:
            facts.append("accounting on: exact peaks" if device.accounting else "accounting off: sampled peaks")
        if device.engine_names:
            facts.append(f"engines call it {', '.join(device.engine_names)}")
    lines = [f"  yes  {device.spec or device.kind:<10}{device.label}: {device.name}, {', '.join(facts)}"]
    return lines + [f"       {'':<10}{note}" for note in device.notes]
