"""Whether a model and options that were given are those of a boot log, before their figures count for it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from pytest_vram.bootlog.boot import Boot
from pytest_vram.sizing.engine_options import named
from pytest_vram.sizing.prediction import Estimate
from pytest_vram.sizing.shape import ModelShape
from pytest_vram.units import MIB, mib

#: Sizes and numbers of parameters are printed with three digits, and differ by what a build counts.
_DIGITS = 0.01
_STEP = 256
#: Fact of a log → option whose value it shows.
_SHOWN = {
    "context": "ctx-size",
    "slots": "parallel",
    "ubatch": "ubatch-size",
    "cache_type_k": "cache-type-k",
    "cache_type_v": "cache-type-v",
}


def of_model(boot: Boot, shape: ModelShape, made: Estimate | None = None) -> str | None:
    """What says that a model is not the log's, as a sentence; ``None`` where nothing does.

    :param made: its estimate by the settings of the log, whose caches are held against the printed ones.
    """
    found = [*_described(boot, shape), *(_cached(boot, made) if made is not None else ())]
    if not found:
        return None
    rows = "; ".join(f"{what}: {here}, the log has {there}" for what, here, there in found)
    return f"the model that was given is not that of this log ({rows}): its figures are not used"


def _described(boot: Boot, shape: ModelShape) -> Iterator[tuple[str, str, str]]:
    facts = boot.facts
    architecture = facts.get("architecture")
    if shape.format == "gguf" and isinstance(architecture, str) and architecture.lower() != shape.architecture.lower():
        yield "architecture", shape.architecture, architecture
    layers = _whole(facts.get("layers"))
    if layers is None and not boot.era.startswith("2023"):  # when caches were counted as layers of their own
        offloadable = _whole(facts.get("layers_offloadable"))
        layers = None if offloadable is None else offloadable - 1
    blocks = len(shape.layers)
    if layers is not None and not blocks <= layers <= blocks + shape.extra_layers:
        yield "layers", str(blocks), str(layers)
    if shape.format != "gguf" or not shape.tensors:
        return
    size, printed = sum(tensor.bytes for tensor in shape.tensors), _whole(facts.get("model_bytes"))
    if printed is not None and abs(size - printed) > _DIGITS * printed + MIB:
        yield "size", mib(size), mib(printed)
    count, printed = sum(math.prod(tensor.dims) for tensor in shape.tensors), _whole(facts.get("parameters"))
    if printed is not None and abs(count - printed) > _DIGITS * printed:
        yield "parameters", f"{count / 1e9:.3g} billion", f"{printed / 1e9:.3g} billion"
    name = facts.get("model_name")
    if isinstance(name, str) and name and shape.name and name.strip().casefold() != shape.name.strip().casefold():
        yield "name", repr(shape.name), repr(name)


def _cached(boot: Boot, made: Estimate) -> Iterator[tuple[str, str, str]]:
    """Caches that the log printed whole, or that were refused, against the predicted ones."""
    row = made.buckets().get("kv", {})
    upper = sum((one.bytes if one.at_most is None else one.at_most) for one in made.entries if one.bucket == "kv")
    failure, printed = boot.failure, _whole(boot.facts.get("kv_bytes"))
    if failure is not None and failure.bucket == "kv":
        asked = failure.bytes if failure.certainty == "certain" else None
        if asked is not None and asked > upper + _DIGITS * upper + MIB:
            yield "KV cache", mib(upper), f"one of {mib(asked)}"
    elif printed is not None:
        lower = sum(row.values())
        if printed < lower - _DIGITS * lower - MIB or printed > upper + _DIGITS * upper + MIB:
            yield "KV cache", mib(lower), mib(printed)


def of_options(boot: Boot, options: Mapping[str, Any]) -> dict[str, str]:
    """Option that was given → a sentence, where the log shows another value than it asks for."""
    given = {named(key)[0].name: value for key, value in options.items() if value is not None}
    found: dict[str, str] = {}
    for fact, option in _SHOWN.items():
        asked, shown = given.get(option), boot.facts.get(fact)
        if asked is None or shown is None or _same(boot, option, str(asked), shown):
            continue
        found[option] = f"--{option} {asked} was given, and the log says {shown}: the log's value counts"
    return found


def _same(boot: Boot, option: str, asked: str, shown: Any) -> bool:
    if not (asked.isascii() and asked.isdigit() and isinstance(shown, int)):
        return str(shown) == asked or isinstance(shown, int)
    if option == "ctx-size":
        # Rounded up to cells, for each slot; 0 stands for the model's own length.
        slots = _whole(boot.facts.get("slots")) or 1
        return int(asked) == 0 or int(asked) <= shown < int(asked) + _STEP * (slots + 1)
    if option == "ubatch-size":  # no larger than a batch or a context
        return shown == int(asked) or shown in (boot.facts.get("batch"), boot.facts.get("context"))
    return shown == int(asked)


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None
