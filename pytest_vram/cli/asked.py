"""What the verbs that predict share: the model and the engine's options among their words, sizes, and the dry run."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from pytest_vram.backends import dry_run, flags
from pytest_vram.cli import deployment, pasted
from pytest_vram.errors import BackendError, BadInput, BadSize
from pytest_vram.ledger import BUCKETS, Bucket, Entry
from pytest_vram.report.predictions import Compared, Exact
from pytest_vram.settings import parse_budget
from pytest_vram.sizing import engine_options, eras, estimating, llama_cpp, llama_options
from pytest_vram.sizing.llama_options import Given
from pytest_vram.sizing.options import CURRENT, Device, Era, LlamaOptions
from pytest_vram.sizing.prediction import Estimate
from pytest_vram.sizing.shape import ModelShape, Note
from pytest_vram.spec import Limits
from pytest_vram.units import parse_size

#: Buckets that the engine's trial leaves out, wholly or by what their detail says.
_LEFT_OUT = ("context", "lora")


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """The models and the engine's options of a command line, by full name.

    :ivar kept: words of a pasted command line for what decides no memory (engines in Python). :ivar notes: how the
        command line was understood.
    """

    models: tuple[str, ...]
    engine: str
    options: dict[str, Any]
    kept: tuple[str, ...] = ()
    notes: tuple[Note, ...] = ()


def asked(options: argparse.Namespace, words: Sequence[str], *, most: int = 1) -> Asked:
    """Models and engine options among the words that are not the command's own.

    :param most: models that the verb takes.
    :raises BadInput: an unknown option, no model, or more than the verb takes.
    """
    line = pasted.line(words)
    engine = options.engine or line.engine or "llama-server"
    estimating.check_engine(engine)
    if line.engine is not None and line.engine != engine:
        raise BadInput(f"--engine {engine}, and the command line is one of {line.engine}: leave one of the two out")
    found: dict[str, Any]
    kept: list[str] = []
    if engine == "llama-server":
        found, models = engine_options.pairs(line.words)
        in_store = pasted.from_store(found)
        models += [] if in_store is None else [in_store]
    else:
        found, models, kept = pasted.pairs(line.words, engine)
    named = found.pop("model", None)
    if isinstance(named, str):
        models.append(named)
    if getattr(options, "backend", None) is not None:
        model, found = deployment.merged(deployment.backend(options), found)
        models = models or [model]
    if not models:
        raise BadInput(
            f"no model is named: write `vram {options.verb} MODEL`, with a GGUF file, a folder with config.json, or a"
            " name in the local Hugging Face or Ollama store"
        )
    if len(models) > most:
        raise BadInput(
            f"{'one model' if most == 1 else f'up to {most} models'} can be named, and each of these words names one,"
            f" for it belongs to no option: {', '.join(models)}"
        )
    return Asked(models=tuple(models), engine=engine, options=found, kept=tuple(kept), notes=line.notes)


def llama_given(wanted: Asked) -> Given:
    """The options of llama-server, checked, with what there is to say about the command line."""
    given = llama_options.read(wanted.options)
    return msgspec.structs.replace(given, notes=(*wanted.notes, *given.notes))


def budget(text: str | None) -> Limits | None:
    """:raises BadInput: not a budget."""
    if text is None:
        return None
    try:
        return parse_budget(text)
    except (BadSize, ValueError) as error:
        raise BadInput(f"{error} (from --budget)") from None


def size(text: str | None, option: str) -> int:
    """Bytes, 0 where nothing was given. :raises BadInput: not a size."""
    if text is None:
        return 0
    try:
        return parse_size(text)
    except BadSize as error:
        raise BadInput(f"{error} (from {option})") from None


def era(options: argparse.Namespace, given: Given) -> tuple[Era, Given]:
    """The rules of ``--build``, and what is not certain about them among the notes.

    :raises BadInput: no number of a build.
    """
    if options.build is None:
        return CURRENT, given
    found, notes = eras.era_of(eras.read_build(options.build))
    return found, msgspec.structs.replace(given, notes=(*given.notes, *notes))


def by_dry_run(shape: ModelShape, given: Given, options: dict[str, Any]) -> tuple[Estimate, Exact]:
    """The engine's own figures for a deployment, the rules beside them.

    Where no device was named, the engine takes those of this machine, and the rules follow it, as they do its build.
    What the engine's trial leaves out (the driver's context, adapters, output buffers) is taken from the rules.

    :raises BackendError: no engine here, or it has no dry run, or it refuses the model or a setting.
    """
    bare = {name: value for name, value in options.items() if name != "model"}
    dry = dry_run.exact(Path(shape.source), bare)
    chosen = given.options
    notes = list(given.notes)
    found = {row.label for row in dry.rows}
    missing = [device.name for device in chosen.devices if device.label not in found]
    if {"device", "rpc"} & set(given.given):
        if missing and len(missing) == len(chosen.devices):
            raise BackendError(
                f"{dry.binary} found none of the devices {', '.join(missing)}, and put all of the model on the host:"
                " see its --list-devices, or start the RPC server"
            )
    else:
        chosen = msgspec.structs.replace(chosen, devices=_devices(dry))
        notes = [note for note in notes if not note.text.startswith("no --device")]
        names = ", ".join(device.name for device in chosen.devices) or "none, so that all of it is on the host"
        notes.append(Note(kind="rule", text=f"devices that the engine found on this machine: {names}"))
    build = re.match(r"\d+", str(dry.facts.get("build", "")))
    held_by, unsure = eras.era_of(int(build[0]) if build else None, flags.help_of(Path(dry.binary)).long_names())
    notes.extend(unsure)
    as_asked = msgspec.structs.replace(given, notes=tuple(notes), options=chosen)
    rules = llama_cpp.predict(shape, chosen, held_by, given=as_asked, dry_run=True)
    printed = dry_run.ledger_of(dry)
    held = {entry.bucket for entry in printed.entries}
    beside = [
        entry
        for entry in rules.entries
        if entry.bucket in _LEFT_OUT
        or dry_run.left_out(entry)
        or (entry.bucket in ("projector", "draft") and entry.bucket not in held)
    ]
    # Weights, caches and compute are the engine's own figures, so that they are known whatever the rules know.
    unknown = tuple(bucket for bucket in rules.unknown if bucket in {entry.bucket for entry in beside})
    booted = llama_cpp.predict(shape, chosen, held_by, given=as_asked)
    beside_it = dry_run.compare(rules, dry)
    doubted = sorted(dry_run.contradicted(beside_it)) if shape.known else []
    unknown = (*unknown, *(bucket for bucket in BUCKETS if bucket in doubted and bucket not in unknown))
    doubts = tuple(
        Note(
            kind="unknown",
            bucket=group,
            text=f"the engine's dry run printed less than half of what the rules count for {group}: one is wrong",
        )
        for group in doubted
    )
    joined = msgspec.structs.replace(
        rules,
        entries=(*printed.entries, *beside, *_beyond(rules, booted)),
        notes=(*booted.notes, *doubts),
        devices={**rules.devices, **printed.devices},
        unknown=unknown,
    )
    compared = [
        Compared(
            group=one.group,
            device=one.device,
            rule=one.rule,
            rule_at_most=one.rule_at_most,
            engine=one.engine.bytes,
            engine_low=one.engine.low,
            engine_high=one.engine.high,
            agree=one.agree,
            error=None if one.error == float("inf") else one.error,
        )
        for one in beside_it
    ]
    exact = Exact(binary=dry.binary, argv=list(dry.argv), seconds=dry.seconds, fits=dry.fits, compared=compared)
    return joined, exact


def _beyond(trial: Estimate, booted: Estimate) -> list[Entry]:
    """What a boot takes more than its dry run prints, by the rules: a trial allocates nothing, so that it prints
    neither the pages of a mapped file nor what the CPU keeps beside them in an order of its own."""
    found: list[Entry] = []
    for group, buckets in dry_run.GROUPS.items():
        for label in booted.total():
            ends: list[int] = []
            for one in (trial, booted):
                mine = [entry for entry in one.entries if entry.device == label and entry.bucket in buckets]
                ends += [sum(entry.bytes for entry in mine)]
                ends += [sum(entry.bytes if entry.at_most is None else entry.at_most for entry in mine)]
            low, high = max(0, ends[2] - ends[0]), max(0, ends[3] - ends[1], ends[2] - ends[0])
            if high:
                bucket: Bucket = next(bucket for bucket in BUCKETS if bucket == group)
                detail = "more in a boot than in a dry run, by the rules"
                found.append(
                    Entry(bucket=bucket, device=label, bytes=low, at_most=high, source="estimate", detail=detail)
                )
    return found


def narrowed(estimate: Estimate, exact: Exact) -> Estimate:
    """An estimate by dry run whose figures, printed in whole MiB, are narrowed by the rules where both agree."""
    held = [entry for entry in estimate.entries if entry.source != dry_run.SOURCE or entry.bucket not in dry_run.GROUPS]
    for one in exact.compared:
        low, high = one.engine_low, one.engine_high
        if one.agree:
            low, high = max(low, one.rule), min(high, one.rule_at_most)
        bucket: Bucket = next(bucket for bucket in BUCKETS if bucket == one.group)
        held.append(Entry(bucket=bucket, device=one.device, bytes=low, at_most=high, source=dry_run.SOURCE))
    return msgspec.structs.replace(estimate, entries=tuple(held))


def _devices(dry: dry_run.DryRun) -> tuple[Device, ...]:
    names = {row.label: row.name for row in dry.rows if row.label != "host"}
    return llama_options.devices_named(name.partition("[")[0] for _, name in sorted(names.items()))


def as_mapping(options: LlamaOptions, kept: Sequence[str] = ()) -> dict[str, Any]:
    """Options as the mapping that a dry run takes: full names with dashes → values."""
    found, _ = engine_options.pairs(llama_options.command(options, "model", kept)[3:])
    return dict(found)
