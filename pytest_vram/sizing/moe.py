"""What of a model works on each token, and what of a deployment will press: weights or the KV cache.

Parameters are counted as publishers count them: embedding and output matrix both (once where they are tied), router
and shared experts among the active ones, blocks for multi-token prediction left out. Qwen3-30B-A3B comes to 30.5
billion in all and 3.35 active (published as 3.3).
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from pytest_vram.ledger import Entry
from pytest_vram.sizing.prediction import ModelFacts
from pytest_vram.sizing.shape import ModelShape, Tensor

# Routed experts: stacked in GGUF (``blk.3.ffn_up_exps.weight``), stacked or single in safetensors
# (``model.layers.3.mlp.experts.17.up_proj.weight``, ``…block_sparse_moe.experts.0.w1.weight``).
_EXPERT = re.compile(r"ffn_(up|down|gate|gate_up)_(ch)?exps\b|\.experts\.|(?<!shared)\.experts_")
_SHARED = re.compile(r"shexp|shared_?expert|shared_mlp")
_BLOCK = re.compile(r"(?:^|\.)(?:blk|layers|h)\.(\d+)\.")
# What quantisation adds beside the weights.
_BESIDE = re.compile(
    r"\.(qzeros|scales|g_idx|absmax|nested_absmax|quant_map|nested_quant_map|SCB|weight_scale|weight_scale_2|"
    r"weight_scale_inv|weight_zero_point|weight_shape|weight_g_idx|input_scale|output_scale|k_scale|v_scale|"
    r"weight_global_scale|input_global_scale|weight_format|bias_format)$"
    r"|\.quant_state\.|_scales$|_scale_inv$"
)
_GIB = 1 << 30


def is_expert(name: str) -> bool:
    """Whether a tensor belongs to the routed experts, by its name in a GGUF or safetensors file."""
    return _EXPERT.search(name) is not None and _SHARED.search(name) is None


def parameters(tensor: Tensor, shape: ModelShape) -> int:
    """Parameters that a tensor stands for: its elements, more where several are packed in one, none for scales.

    Packing: AWQ, GPTQ and compressed-tensors keep ``32 / bits`` weights in an ``i32``; bitsandbytes' 4-bit, MXFP4 and
    NVFP4 keep two in a byte.
    """
    if _BESIDE.search(tensor.name):
        return 0
    bits = shape.meta.get("quant_bits")
    if not isinstance(bits, int) or bits <= 0 or shape.format != "safetensors":
        return tensor.elements
    if tensor.type == "i32" and tensor.name.endswith((".qweight", ".weight_packed", "_packed")):
        return tensor.elements * 32 // bits
    if tensor.type == "u8" and bits == 4:
        return tensor.elements * 2
    return tensor.elements


def facts(shape: ModelShape) -> ModelFacts:
    """Parameters of a model: all, all but routed experts, and those that one token passes through."""
    total = experts = 0
    for tensor in shape.tensors:
        block = _BLOCK.search(tensor.name)
        # Blocks behind the last one predict further tokens; they are not counted, as publishers do not.
        if block is not None and shape.layers and int(block[1]) >= len(shape.layers) and shape.extra_layers:
            continue
        count = parameters(tensor, shape)
        total += count
        if shape.experts and is_expert(tensor.name):
            experts += count
    used = experts * shape.experts_used // shape.experts if shape.experts else 0
    return ModelFacts(
        architecture=shape.architecture,
        parameters=total,
        active_parameters=total - experts + used,
        non_expert_parameters=total - experts,
        layers=len(shape.layers),
        experts=shape.experts,
        experts_used=shape.experts_used,
        trained_context=shape.context,
        file_bytes=shape.file_bytes,
        quantization=shape.quantization,
        name=shape.name,
        source=shape.source,
    )


def pressure(model: ModelFacts, entries: Iterable[Entry]) -> str:
    """One plain sentence: whether weights or KV cache and concurrency will press, and where the experts are.

    Figures are those of the devices, and of the host where nothing of either is on a device; what the host holds of
    both, beside a device, is named where it is more than the embedding table usually is.
    """
    rows = list(entries)
    cards = [entry for entry in rows if entry.device != "host"]
    on_device = cards if sum(_both(cards)) else rows
    weights, kept = _both(on_device)
    said = f"{_gib(weights)} of weights against {_gib(kept)} of KV cache and state"
    if on_device is cards:
        others, cached = _both([entry for entry in rows if entry.device == "host"])
        if cached or 5 * others > weights:
            said += f" on the device; {_gib(others)} and {_gib(cached)} are on the host"
    if weights >= kept:
        verdict = f"weights press first ({said}): a smaller quantisation gains more than a shorter context"
    else:
        verdict = f"KV cache and concurrency press first ({said}): context, slots and cache type decide"
    if not model.experts:
        return f"{verdict[0].upper()}{verdict[1:]}."
    host = sum(entry.bytes for entry in rows if entry.bucket == "experts" and entry.device == "host")
    share = 100 * model.active_parameters / model.parameters if model.parameters else 0.0
    loaded = (
        f"all {model.experts} experts of each mixture are loaded unless offloaded, although a token uses "
        f"{model.experts_used} ({share:.0f} % of the parameters are active)"
    )
    if host and on_device is not rows:
        loaded += f"; {_gib(host)} of experts are on the host"
    return f"{verdict[0].upper()}{verdict[1:]}; {loaded}."


def _both(entries: Iterable[Entry]) -> tuple[int, int]:
    """Bytes of weights, and of caches and state."""
    weights = kept = 0
    for entry in entries:
        if entry.bucket in ("weights", "experts"):
            weights += entry.bytes
        elif entry.bucket in ("kv", "recurrent"):
            kept += entry.bytes
    return weights, kept


def _gib(count: int) -> str:
    return f"{count / _GIB:.2f} GiB"
