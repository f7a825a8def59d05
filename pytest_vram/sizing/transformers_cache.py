"""Caches of transformers by class, batch and length, and the estimate for a model that runs in transformers.

Rules from ``cache_utils.py`` of transformers 5.24; ``tests/rehearsal/test_sizing_transformers.py`` sums the tensors of
real caches against them. No GPU is involved in that: tensor sizes do not depend on the device, what PyTorch's
allocator rounds them to does (blocks of 512 bytes, segments of 2 or 20 MiB and more), and is not counted.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from pytest_vram.errors import BadInput
from pytest_vram.ledger import Entry
from pytest_vram.sizing import moe, serving, textbook
from pytest_vram.sizing.prediction import Estimate
from pytest_vram.sizing.shape import Layer, ModelShape, Note

ENGINE = "transformers"
Count = Annotated[int, msgspec.Meta(ge=1, le=1 << 40)]
Cache = Literal["dynamic", "static", "quantized", "offloaded", "offloaded_static", "sliding_window", "hybrid"]
#: Tokens that a quantised cache keeps whole before it quantises them, and elements that share a scale.
RESIDUAL, GROUP = 128, 64
# Families whose recurrent state is kept in 32 bits whatever the model's own format.
_FLOAT_STATE = ("mamba", "mamba2", "gated-delta", "kda", "rg-lru")


class Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of ``generate`` that decide memory, by its own names.

    :ivar max_length: tokens in the cache, prompt and answer together; 0: the trained context. :ivar batch_size:
        sequences side by side (times ``num_beams``). :ivar cache_implementation: transformers' own names.
    :ivar nbits: of a quantised cache. :ivar backend: that quantises it: ``quanto``, ``hqq`` or ``fp8``.
    :ivar q_group_size: elements that share a scale there. :ivar residual_length: tokens it keeps whole.
    :ivar dtype: number format to load in, ``auto``: the checkpoint's own.
    """

    max_length: Annotated[int, msgspec.Meta(ge=0, le=1 << 40)] = 0
    batch_size: Count = 1
    num_beams: Count = 1
    cache_implementation: Cache = "dynamic"
    nbits: Literal[1, 2, 3, 4, 8] = 4
    backend: Literal["quanto", "hqq", "fp8"] = "quanto"
    q_group_size: Count = GROUP
    residual_length: Count = RESIDUAL
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"


def dynamic_layer(layer: Layer, batch: int, length: int, element: int) -> int:
    """Bytes of keys and values that ``DynamicCache`` holds for one block between two steps.

    A full block holds every token, a window block the last ``sliding_window − 1`` (``DynamicSlidingWindowLayer``);
    latent attention keeps its latent and the rotary part (``DeepseekV3Attention``); a block that shares another's
    cache holds nothing.
    """
    tokens = min(length, layer.window - 1) if layer.window else length
    return batch * max(tokens, 0) * (layer.k_row + layer.v_row + layer.indexer_row) * element


def static_layer(layer: Layer, batch: int, length: int, element: int) -> int:
    """Bytes that ``StaticCache`` takes for one block at its first forward, for ``max_cache_len = length``.

    A window block takes ``min(sliding_window, max_cache_len)`` tokens (``StaticSlidingWindowLayer``).
    """
    tokens = min(length, layer.window) if layer.window else length
    return batch * tokens * (layer.k_row + layer.v_row + layer.indexer_row) * element


def quantized_side(elements: int, bits: int, group: int, element: int, backend: str) -> int:
    """Bytes of quantised keys (or values) with their scales.

    quanto packs ``8 / bits`` numbers in a byte and keeps a scale and a shift in the model's format for each group
    (``MaxOptimizer``, ``WeightQBitsTensor``); HQQ keeps a scale and a zero point for each group (``Quantizer``), and
    packs ten groups of 3 bits in 32; FP8 keeps one byte each and one f32 scale (``Fp8QuantizedLayer``).
    """
    if backend == "fp8":
        return elements + 4
    groups = -(-elements // group)
    packed = 4 * group * -(-groups // 10) if bits == 3 else -(-elements * bits // 8)
    return packed + 2 * groups * element


def quantized_tokens(length: int, residual: int) -> tuple[int, int]:
    """Tokens that are quantised and tokens kept whole after a prompt of one token grew to ``length`` one by one.

    ``QuantizedLayer.update``: the first call quantises all it gets; later tokens are kept whole until there would be
    ``residual`` of them, then everything is quantised again. A longer prompt shifts the boundary: at most
    ``residual − 1`` tokens are ever whole.
    """
    if length <= 0:
        return 0, 0
    whole = (length - 1) % residual
    return length - whole, whole


def quantized_layer(layer: Layer, batch: int, length: int, element: int, options: Options, prompt: int = 1) -> int:
    """Bytes of one block of ``QuantizedCache`` after a prompt of ``prompt`` tokens grew to ``length``."""
    if options.backend == "fp8":
        # No residual: each token is appended in 8 bits.
        quantised, whole = length, 0
    else:
        quantised, whole = quantized_tokens(length - prompt + 1, options.residual_length)
        quantised += prompt - 1
    rows = (layer.k_row, layer.v_row)
    total = batch * whole * sum(rows) * element
    for row in rows:
        total += quantized_side(batch * quantised * row, options.nbits, options.q_group_size, element, options.backend)
    return total


def state_bytes(shape: ModelShape, layer: Layer, batch: int, element: int) -> int:
    """Bytes of a block's convolution and recurrent state (``LinearAttentionLayer``).

    The convolution keeps as many columns as its kernel has, one more than other engines, in the model's format. The
    recurrent state is in f32 for the families whose code computes it so.
    """
    found = shape.ssm
    if found is None or not layer.recurrent:
        return 0
    columns = max(found.conv - 1, 1)
    # Recurrent Gemma keeps its states in its modules instead of the cache, and one column less.
    kept = columns if found.kind == "rg-lru" else found.conv
    convolution = layer.state_r // columns * kept * element
    return batch * (convolution + layer.state_s * state_element(shape, element))


def state_element(shape: ModelShape, element: int) -> int:
    """Bytes of one element of recurrent state."""
    kind = shape.ssm.kind if shape.ssm is not None else ""
    return 4 if kind in _FLOAT_STATE else element


def predict(shape: ModelShape, **options: object) -> Estimate:
    """What a model takes in transformers: weights, its cache at full length, and what cannot be known beside them.

    :raises BadInput: an option that transformers' ``generate`` would refuse or that is not known here.
    """
    given = serving.read_options(ENGINE, options, Options)
    element = serving.loaded_element(shape, given.dtype)
    batch = given.batch_size * given.num_beams
    length = given.max_length or shape.context
    notes = list(shape.notes)
    if not shape.encoder and not length:
        raise BadInput(f"{shape.source} states no trained context: give max_length.")
    if given.max_length == 0 and not shape.encoder:
        text = f"max_length is not given: a cache filled to the trained context of {length} tokens is counted."
        notes.append(Note(kind="assumed", bucket="kv", text=text))
    device = "host" if given.cache_implementation.startswith("offloaded") else "gpu0"
    entries = serving.weight_entries(shape, serving.Split(), element)
    entries.extend(_cache_entries(shape, given, batch, length, element, device))
    notes.extend(_notes(shape, given, length, device))
    settled = tuple(entry for entry in entries if entry.bytes)
    facts = moe.facts(shape)
    return Estimate(
        engine=ENGINE,
        model=facts,
        entries=settled,
        devices={"gpu0": "a CUDA card"},
        settings={**msgspec.structs.asdict(given), "max_length": length},
        notes=tuple(dict.fromkeys(notes)),
        unknown=serving.unknown(notes),
        textbook_kv=textbook.kv(shape, length, element) * batch if length else None,
        pressure=moe.pressure(facts, settled),
    )


def _cache_entries(
    shape: ModelShape, given: Options, batch: int, length: int, element: int, device: str
) -> list[Entry]:
    """The cache and the states of every block, as one line each."""
    if shape.encoder:
        return []
    kind = given.cache_implementation
    at_most: int | None = None
    if kind == "quantized":
        special = next((layer for layer in shape.layers if layer.window or layer.recurrent or layer.indexer_row), None)
        if special is not None:
            raise BadInput(
                "cache_implementation quantized serves models whose blocks all have full attention; this one has "
                "windows or recurrent blocks: use dynamic or static."
            )
        size = sum(quantized_layer(layer, batch, length, element, given) for layer in shape.layers)
        name = "QuantizedCache"
        # How many of the last tokens are still whole depends on the prompt's length.
        most = max(length - given.residual_length + 1, 1)
        upper = sum(quantized_layer(layer, batch, length, element, given, prompt=most) for layer in shape.layers)
        at_most = max(size, upper) if given.backend != "fp8" else None
    elif kind in ("static", "offloaded_static", "sliding_window", "hybrid"):
        size = sum(static_layer(layer, batch, length, element) for layer in shape.layers)
        name = "StaticCache"
    else:
        size = sum(dynamic_layer(layer, batch, length, element) for layer in shape.layers)
        name = "DynamicCache"
    state = sum(state_bytes(shape, layer, batch, element) for layer in shape.layers)
    detail = f"{name}, {length} tokens × {batch}"
    return [
        Entry(bucket="kv", device=device, bytes=size, at_most=at_most, source="estimate", detail=detail),
        Entry(bucket="recurrent", device="gpu0", bytes=state, source="estimate", detail=f"states × {batch}"),
    ]


def _notes(shape: ModelShape, given: Options, length: int, device: str) -> list[Note]:
    notes = [
        Note(
            kind="unknown",
            bucket="compute",
            text="activations and PyTorch's allocator depend on prompt, attention kernels and card; a run tells.",
        ),
        Note(
            kind="unknown",
            bucket="context",
            text="the CUDA context and loaded kernels depend on driver, card and packages; a run tells.",
        ),
    ]
    if any(layer.window for layer in shape.layers) and given.cache_implementation == "dynamic":
        text = (
            "right after a prompt the window blocks of DynamicCache still hold the whole prompt, because what they "
            "keep is a view of it; the next token frees the rest."
        )
        notes.append(Note(kind="rule", bucket="kv", text=text))
    if given.cache_implementation == "dynamic" and not shape.encoder:
        text = "DynamicCache grows with use by copying: while a token is added, one block's cache exists twice."
        notes.append(Note(kind="rule", bucket="kv", text=text))
    if shape.mla is not None:
        text = "latent attention is cached compressed, as transformers 5.24 does; older versions cache whole heads."
        notes.append(Note(kind="rule", bucket="kv", text=text))
    if device == "host":
        text = "an offloaded cache is on the host; two blocks of it are on the card at a time, which is not counted."
        notes.append(Note(kind="rule", bucket="kv", text=text))
    if shape.context and length > shape.context:
        text = f"max_length {length} is longer than the trained context of {shape.context} tokens."
        notes.append(Note(kind="warning", bucket="kv", text=text))
    return notes
