"""Settings that people turn where memory is missing and that would do nothing here, each with the reason."""

from __future__ import annotations

from collections.abc import Iterator

from pytest_vram.advice.goal import Goal
from pytest_vram.advice.knobs import flag
from pytest_vram.advice.records import Advice
from pytest_vram.sizing import kv
from pytest_vram.sizing.changes import Change
from pytest_vram.sizing.options import LlamaOptions
from pytest_vram.sizing.prediction import Estimate
from pytest_vram.sizing.shape import ModelShape
from pytest_vram.sizing.verdict import HOST
from pytest_vram.units import mib

_CACHE = "cache-type-k, cache-type-v"


def known(shape: ModelShape, options: LlamaOptions, goal: Goal) -> Iterator[Advice]:
    """What the model and its settings alone say, whatever an estimate would."""
    cached = any(layer.k_row for layer in shape.layers)
    if shape.encoder or not cached:
        none = "an encoder keeps no KV cache" if shape.encoder else "this model keeps no KV cache but a recurrent state"
        types = f"{none}" + ("" if shape.encoder else ", whose type is fixed")
        yield _nothing(_CACHE, options.cache_type_k, "q8_0", types, goal, "--cache-type-k q8_0 --cache-type-v q8_0")
        size = f"{none}: the context sizes nothing" + ("" if shape.encoder else " of it")
        now = options.ctx_size or shape.context
        yield _nothing("ctx-size", now, "a shorter one", size, goal, "--ctx-size")
    elif options.flash_attn == "off" or not kv.uses_flash_attention(shape, options):
        why = (
            "a quantised V cache needs flash attention, "
            + ("which is off here" if options.flash_attn == "off" else "which is off for this architecture")
            + ": the engine refuses to start"
        )
        yield _nothing("cache-type-v", options.cache_type_v, "q8_0", why, goal, "--cache-type-v q8_0")
    if not options.devices or goal.device == HOST:
        return
    if not shape.experts:
        why = "the model is dense: there are no experts to move"
        yield _nothing("n-cpu-moe", options.n_cpu_moe, "any", why, goal, "--n-cpu-moe N")
    elif shape.leading_dense and not options.cpu_moe and options.n_cpu_moe < shape.leading_dense:
        count = shape.leading_dense
        why = (
            f"it counts layers from 0, and the first {count} have no experts: nothing moves up to {count}, the first"
            f" experts do at {count + 1}"
        )
        yield _nothing("n-cpu-moe", options.n_cpu_moe, count, why, goal, f"--n-cpu-moe {count}")


def _reason(change: Change, shape: ModelShape, options: LlamaOptions, before: Estimate, goal: Goal) -> str:
    """Why a change that was tried saves nothing on the device."""
    if change.setting == "ubatch-size":
        return "the compute buffer is not sized by what a prompt takes at once here"
    if change.setting == "model":
        return f"nothing of the weights that it makes smaller is on {goal.device}"
    if change.setting == "n-cpu-moe":
        return f"the experts of these layers are not on {goal.device}"
    if change.setting in ("n-gpu-layers", "tensor-split"):
        return f"no layer that it moves is on {goal.device}"
    if change.setting == _CACHE:
        return f"nothing of the KV cache is on {goal.device}"
    if change.setting == "ctx-size" and not any(layer.k_row and not layer.window for layer in shape.layers):
        return "every layer keeps a window or a state, whose size does not depend on the context"
    return f"nothing of what it changes is on {goal.device}"


def tried(change: Change, shape: ModelShape, options: LlamaOptions, before: Estimate, goal: Goal, saves: int) -> Advice:
    """A change that saves nothing worth while, as advice."""
    if change.setting == "parallel" and any(layer.k_row for layer in shape.layers):
        way = "share" if options.unified else "divide"
        total = before.settings.get("ctx_size")
        why = f"the context is {total} tokens in all, which the slots {way}: fewer slots leave the KV cache as large"
        if saves > 0:
            why += f" (it saves {mib(saves)} elsewhere)"
    elif saves > 0:
        why = f"it saves {mib(saves)} on {goal.device}, where {mib(goal.missing)} are missing"
        largest = before.largest(goal.device)
        if largest is not None:
            why += f" and {largest[0]} take {mib(largest[1])}"
    else:
        why = _reason(change, shape, options, before, goal)
    if saves < 0:
        why += f" (it takes {mib(-saves)} more there)"
    return _nothing(change.setting, change.before, change.after, why, goal, flag(change))


def refused(change: Change, why: str, goal: Goal) -> Advice:
    """A change that the engine refuses, as advice."""
    text = f"the engine refuses it here: {why}"
    return _nothing(change.setting, change.before, change.after, text, goal, flag(change))


def _nothing(setting: str, before: object, after: object, why: str, goal: Goal, written: str) -> Advice:
    return Advice(
        setting=setting,
        before=str(before),
        after=str(after),
        effect="nothing",
        why=why,
        source="estimate",
        device=goal.device,
        flag=written,
        enough=False,
    )
