"""What the verbs that predict share: the model and the engine's options among their words, sizes, and the dry run."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from pytest_vram.backends import dry_run, flags
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
    """The models and the engine's options of a command line, by full name."""

    models: tuple[str, ...]
    engine: str
    options: dict[str, Any]


def asked(options: argparse.Namespace, words: Sequence[str], *, most: int = 1) -> Asked:
    """Models and engine options among the words that are not the command's own.

    :param most: models that the verb takes.
    :raises BadInput: an unknown option, no model, or more than the verb takes.
    """
    engine = options.engine or "llama-server"
    estimating.check_engine(engine)
    found, models = engine_options.pairs(words) if engine == "llama-server" else _pairs(words, engine)
    named = found.pop("model", None)
    if isinstance(named, str):
        models.append(named)
    if not models:
        raise BadInput(
            f"no model is named: write `vram {options.verb} MODEL`, with a GGUF file, a folder with config.json, or a"
            " name in the local Hugging Face or Ollama store"
        )
    if len(models) > most:
        raise BadInput(
            f"{'one model' if most == 1 else f'up to {most} models'} can be named, and these words are no options:"
            f" {', '.join(models)}"
        )
    return Asked(models=tuple(models), engine=engine, options=dict(found))


def _pairs(words: Sequence[str], engine: str) -> tuple[dict[str, engine_options.Value], list[str]]:
    """Options of engines in Python: ``--name value``, ``--name=value``, and switches."""
    fields = msgspec.structs.fields(estimating.rules_of(engine).Options)
    switches = {field.name for field in fields if isinstance(field.default, bool)}
    found: dict[str, engine_options.Value] = {}
    models: list[str] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--"):
            if word.startswith("-") and len(word) > 1:
                raise BadInput(f"option {word!r} is not known: write long names, such as --max-model-len 8192")
            models.append(word)
            continue
        written, equals, value = word[2:].partition("=")
        name = written.replace("-", "_")
        if not equals and name not in switches:
            if not rest:
                raise BadInput(f"option {word!r} has no value: write {word} VALUE")
            value, equals = rest.pop(0), "="
        found[name] = value if equals else True
    return found, models


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
    joined = msgspec.structs.replace(
        rules,
        entries=(*printed.entries, *beside),
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
        for one in dry_run.compare(rules, dry)
    ]
    exact = Exact(binary=dry.binary, argv=list(dry.argv), seconds=dry.seconds, fits=dry.fits, compared=compared)
    return joined, exact


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
