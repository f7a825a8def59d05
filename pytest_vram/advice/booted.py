"""Advice for a boot that failed, by its log."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from pytest_vram.advice import hosted, likeness, planned, printed, torched
from pytest_vram.advice.deployed import advise
from pytest_vram.advice.goal import Goal, least_on
from pytest_vram.advice.records import Advice
from pytest_vram.bootlog.boot import Boot, Failure
from pytest_vram.errors import BadInput
from pytest_vram.sizing import eras, llama_cpp, llama_options
from pytest_vram.sizing.engine_options import named
from pytest_vram.sizing.llama_options import Given
from pytest_vram.sizing.options import Era
from pytest_vram.sizing.prediction import Estimate
from pytest_vram.sizing.shape import ModelShape
from pytest_vram.sizing.verdict import HOST, on

#: Engines that run llama.cpp's code, whose lines its rules read.
LLAMA = ("llama-server", "llama.cpp", "ik_llama", "koboldcpp", "localai", "ollama")
_SIZED = ("llama-server", "llama.cpp")
_OF_HOST = ("host_out_of_memory", "host_oom_killed")
_OF_DEVICE = ("out_of_memory", "kv_planning", "precheck")
#: Fact of a log → option that it stands for where that is not given.
_FACTS = {
    "context": "ctx-size",
    "slots": "parallel",
    "ubatch": "ubatch-size",
    "batch": "batch-size",
    "cache_type_k": "cache-type-k",
    "cache_type_v": "cache-type-v",
    "kv_unified": "kv-unified",
}
#: Buckets in the order in which a boot allocates them.
_ORDER = ("weights", "experts", "lora", "projector", "kv", "recurrent", "compute", "draft")


def of_boot(
    boot: Boot,
    *,
    shape: ModelShape | None = None,
    options: Mapping[str, Any] | None = None,
    free: Mapping[str, int] | None = None,
    era: Era | None = None,
) -> tuple[Advice, ...]:
    """What to change so that a boot that failed for want of memory succeeds, best first.

    :param shape: the model, as :func:`pytest_vram.sizing.estimating.load` reads it; without it only the log's own
        figures count, and where it is not the model of the log (:func:`doubts`). :param options: the engine's own long
        options, for an engine that is sized; where the log shows another value, that one counts.
    :param free: device label → bytes that were free before the boot, where they are known from elsewhere than the log.
    :param era: which of llama.cpp's rules hold; by the build that the log names where it is not given.
    :returns: nothing where the log shows no failure, or one that is not about memory.
    :raises BadInput: options that the engine does not have.
    """
    failure = boot.failure
    if failure is None or failure.kind not in (*_OF_HOST, *_OF_DEVICE):
        return ()
    if shape is not None and boot.engine in _SIZED and not printed.absurd(failure):
        era = era or _era(boot)
        made = () if _unlike(boot, shape, options, era) else _by_model(boot, failure, shape, options or {}, free, era)
        if made:
            return made
    if failure.kind in _OF_HOST:
        return hosted.of_log(boot, failure)
    if boot.engine in LLAMA:
        return printed.of_log(boot, failure)
    if boot.engine in ("vllm", "sglang"):
        return planned.of_log(boot, failure)
    if boot.engine in ("transformers", "torch"):
        return torched.of_log(boot, failure)
    return ()


def doubts(
    boot: Boot, *, shape: ModelShape | None = None, options: Mapping[str, Any] | None = None, era: Era | None = None
) -> tuple[str, ...]:
    """What of a given model and given options contradicts the log, a sentence each; see :func:`of_boot`.

    :raises BadInput: options that the engine does not have.
    """
    if shape is None or boot.engine not in (*_SIZED, *LLAMA):
        return ()
    if boot.engine not in _SIZED:
        found = likeness.of_model(boot, shape)
        return () if found is None else (found,)
    unlike = _unlike(boot, shape, options, era or _era(boot))
    return unlike if unlike else tuple(likeness.of_options(boot, options or {}).values())


def _unlike(boot: Boot, shape: ModelShape, options: Mapping[str, Any] | None, era: Era) -> tuple[str, ...]:
    """Why a model is not the log's."""
    given, _ = _given(boot, options or {})
    try:
        made = llama_cpp.predict(shape, given.options, era, given=given)
    except BadInput:
        made = None
    found = likeness.of_model(boot, shape, made)
    return () if found is None else (found,)


def reason(boot: Boot) -> str | None:
    """Why there is no advice for a boot that failed; ``None`` where memory is not the matter."""
    failure = boot.failure
    if failure is None or failure.kind not in (*_OF_HOST, *_OF_DEVICE):
        return None
    return "none: the log has no figure of the device, and no setting that is known to matter"


def _era(boot: Boot) -> Era:
    number = re.match(r"b?(\d{4,6})\b", str(boot.facts.get("build", "")), re.ASCII)
    return eras.era_of(int(number[1]) if number else None)[0]


def _by_model(
    boot: Boot,
    failure: Failure,
    shape: ModelShape,
    options: Mapping[str, Any],
    free: Mapping[str, int] | None,
    era: Era,
) -> tuple[Advice, ...]:
    """Every saving from the model's own files; nothing where the log does not say which device it is about."""
    given, labels = _given(boot, options)
    device = HOST if failure.kind in _OF_HOST else failure.device
    if device is None:
        device = next((label for label in boot.devices if label != HOST), None)
    if device is None:
        return ()
    room = (free or {}).get(device, failure.free)
    device = labels.get(device, device)
    if device != HOST and device not in {one.label for one in given.options.devices}:
        return ()
    return advise(shape, given, lambda made: _goal(failure, device, room, made), era=era, names=_names(boot, labels))


def _given(boot: Boot, options: Mapping[str, Any]) -> tuple[Given, dict[str, str]]:
    """The options with what the log says where they are silent, and log's label → the estimate's."""
    contradicted = likeness.of_options(boot, options)
    merged: dict[str, Any] = {key: value for key, value in options.items() if named(key)[0].name not in contradicted}
    asked = {named(key)[0].name for key in merged}
    if "ctx-size" not in asked and "kv-unified-per-slot" in asked:
        asked.add("ctx-size")
    for fact, option in _FACTS.items():
        value = boot.facts.get(fact)
        if option not in asked and value is not None:
            merged[option] = value
    flash = boot.facts.get("flash_attention")
    if "flash-attn" not in asked and flash in ("enabled", "disabled"):
        merged["flash-attn"] = "on" if flash == "enabled" else "off"
    offloaded, all_layers = boot.facts.get("layers_offloaded"), boot.facts.get("layers_offloadable")
    if "n-gpu-layers" not in asked and offloaded is not None and offloaded != all_layers:
        merged["n-gpu-layers"] = offloaded
    cards = [label for label in boot.devices if label != HOST]
    labels: dict[str, str] = {}
    if "device" not in asked and "rpc" not in asked:
        merged["device"] = ",".join(boot.devices[label].partition("[")[0] for label in cards) or "none"
    try:
        given = llama_options.read(merged)
    except BadInput:
        # What a log calls a device may be none that the engine takes on its command line.
        given = llama_options.read(
            {name: value for name, value in merged.items() if name != "device" or "device" in asked}
        )
    if len(given.options.devices) == len(cards):
        labels = {label: one.label for label, one in zip(cards, given.options.devices, strict=True)}
    return given, labels


def _names(boot: Boot, labels: Mapping[str, str]) -> dict[str, str]:
    return {labels.get(label, label): name for label, name in boot.devices.items()}


def _goal(failure: Failure, device: str, free: int | None, made: Estimate) -> Goal:
    """How much is missing: of what the log says was free, by the whole prediction; else what was refused, and all that
    comes after it, at most."""
    bucket = failure.bucket
    if free is not None:
        # The driver's own memory is in use before an engine asks what is free.
        context = sum(
            entry.at_most or entry.bytes
            for entry in made.entries
            if (entry.bucket, entry.device) == ("context", device)
        )
        room = free - (on(made, device) - context)
        if room < 0:
            return Goal(device=device, rooms={device: room}, bucket=bucket)
    later = 0
    if bucket in _ORDER:
        rest = _ORDER[_ORDER.index(bucket) + 1 :]
        rows = made.buckets()
        later = sum(row.get(device, 0) for name, row in rows.items() if name in rest)
    size = failure.bytes if failure.bytes is not None else least_on(made, device) // 10
    return Goal(
        device=device,
        rooms={device: -(size + later)},
        measured=True,
        bucket=bucket,
        at_most=True,
        complete=failure.bytes is not None,
    )
