"""llama.cpp's KV cache, exact to the byte: one function for all architectures, over the rows that the shape names.

Sources: ``llama-kv-cache.cpp`` (one K and one V tensor for each block, V padded to the widest without flash attention),
``llama-kv-cache-iswa.cpp`` (a second, shorter cache for window blocks), ``llama-kv-cache-dsa.cpp``, ``-msa.cpp`` and
``llama-memory-hybrid-idx.cpp`` (indexers), ``llama-kv-cache-dsv4.cpp`` (DeepSeek-V4), ``llama-context.cpp`` (padding,
streams). Confirmed by real boots on the CPU and on software GPUs, except for DeepSeek-V4, MSA and qwen4exp, which no
installed engine runs.
"""

from __future__ import annotations

from pytest_vram.errors import BadInput
from pytest_vram.ledger import Entry
from pytest_vram.sizing import ggml
from pytest_vram.sizing.buffers import held, kind_of
from pytest_vram.sizing.options import Cells, Era, LlamaOptions, Placement, cells, padded
from pytest_vram.sizing.placement import HOST
from pytest_vram.sizing.shape import Layer, ModelShape, Note

_QUANTISED = ("f32", "f16", "bf16")
_CSA, _HCA = 4, 128  # tokens per compressed cell (llama-kv-cache-dsv4.cpp)


def kv_cache(shape: ModelShape, options: LlamaOptions, placement: Placement, era: Era) -> list[Entry]:
    """Entries of the bucket ``kv``, one for each device and kind of cache; none for encoders and recurrent models.

    :raises BadInput: cache types that the engine refuses.
    """
    check_cache_types(shape, options)
    blocks = list(enumerate(shape.layers))
    if shape.meta.get("extra_cached", True):
        blocks += [(len(shape.layers) + position, layer) for position, layer in enumerate(shape.extra_blocks)]
    return cache_of(shape, blocks, options, placement, era)


def cache_of(
    shape: ModelShape, blocks: list[tuple[int, Layer]], options: LlamaOptions, placement: Placement, era: Era
) -> list[Entry]:
    """Entries for these blocks alone, such as a prediction context's."""
    laid = cells(options, shape.context, causal=shape.causal)
    found = _Sums(options)
    widest = _widest_v(shape) if not uses_flash_attention(shape, options) else 0
    compressed = shape.meta.get("cache") == "compressed"
    latent = shape.mla is not None or compressed
    streams = laid.slots if compressed else laid.streams
    for position, layer in blocks:
        label = placement.layers[position] if options.kv_offload else HOST
        if layer.k_row or (layer.empty_cache and widest):
            v_row = layer.v_row
            if latent:
                v_row = 0 if compressed or era.mla_latent_only else layer.value_length * layer.kv_heads
            elif widest:
                v_row = widest
            kind, count = _count(layer, laid, options, compressed=compressed)
            found.add(label, kind, count, streams, layer.k_row, v_row)
        if layer.indexer_row and not compressed and (era.glm_indexer or shape.architecture != "glm-dsa"):
            v_row = 0 if latent and era.mla_latent_only else layer.indexer_v_row
            found.add(label, "indexer", laid.per_sequence, streams, layer.indexer_row, v_row)
        if compressed and layer.compress in (_CSA, _HCA):
            count = padded(max(1, -(-laid.per_sequence // layer.compress)))
            found.add(label, f"compressed {layer.compress}", count, streams, layer.k_row, 0)
            if layer.compress == _CSA:
                found.add(label, "compressed indexer", count, streams, layer.indexer_row, 0)
    return found.entries()


def _count(layer: Layer, laid: Cells, options: LlamaOptions, *, compressed: bool) -> tuple[str, int]:
    """Kind of cache and cells of one stream."""
    if not layer.window:
        return "all tokens", laid.per_sequence
    if compressed and not options.swa_full:
        # DeepSeek-V4 keeps a stream for each slot even when the cache is unified.
        return "window", padded(min(laid.per_sequence, layer.window + laid.ubatch))
    return "window", laid.window(layer.window, full=options.swa_full)


def _widest_v(shape: ModelShape) -> int:
    """Elements of the widest V row of any block, to which all are padded without flash attention."""
    return max((layer.value_length * layer.kv_heads for layer in (*shape.layers, *shape.extra_blocks)), default=0)


class _Sums:
    """Bytes by device and kind of cache."""

    def __init__(self, options: LlamaOptions) -> None:
        self._options = options
        self._rows: dict[tuple[str, str, int], list[int]] = {}
        self._streams = 1

    def add(self, label: str, kind: str, count: int, streams: int, k_row: int, v_row: int) -> None:
        row = self._rows.setdefault((label, kind, count), [0, 0])
        self._streams = streams
        device = kind_of(label, self._options)
        for elements, type_name in ((k_row, self._options.cache_type_k), (v_row, self._options.cache_type_v)):
            if elements:
                size = ggml.row_bytes(type_name, elements) * count * streams
                row[0] += held(size, elements, type_name, elements * count * streams, device)
        row[1] += 1

    def entries(self) -> list[Entry]:
        types = f"K {self._options.cache_type_k}, V {self._options.cache_type_v}"
        return [
            Entry(
                bucket="kv",
                device=label,
                bytes=size,
                source="estimate",
                detail=f"{kind}: {blocks} blocks of {count} cells"
                + (f" times {self._streams}" if self._streams > 1 else "")
                + f", {types}",
            )
            for (label, kind, count), (size, blocks) in self._rows.items()
        ]


def uses_flash_attention(shape: ModelShape, options: LlamaOptions) -> bool:
    """Whether the cache is laid out for flash attention; ``auto`` counts as on when the cache is made
    (``llama-context.cpp``), and Grok forces it off (``llama_init_from_model``)."""
    return options.flash_attn != "off" and shape.architecture != "grok"


def is_quantised(type_name: str) -> bool:
    """Whether a cache type stores blocks with scales."""
    return type_name not in _QUANTISED


def check_cache_types(shape: ModelShape, options: LlamaOptions) -> None:
    """Refuse what the engine refuses (``llama-context.cpp:llama_init_from_model``, ``common/arg.cpp``).

    :raises BadInput: with the engine's own reason.
    """
    for option, name in (("--cache-type-k", options.cache_type_k), ("--cache-type-v", options.cache_type_v)):
        if name not in ggml.BY_NAME:
            raise BadInput(f"{option} {name}: there is no such type; llama.cpp takes {', '.join(ggml.CACHE_TYPES)}")
    if not any(layer.k_row for layer in (*shape.layers, *shape.extra_blocks)):
        return
    latent = shape.mla is not None or shape.architecture == "deepseek4"
    if latent and options.cache_type_k != options.cache_type_v:
        raise BadInput(
            f"--cache-type-k {options.cache_type_k} with --cache-type-v {options.cache_type_v}: a model with latent "
            "attention keeps one row for both, so llama.cpp wants the same type twice"
        )
    flash = uses_flash_attention(shape, options)
    if is_quantised(options.cache_type_v) and not flash:
        reason = "it is off for Grok" if options.flash_attn != "off" else "give --flash-attn on"
        raise BadInput(f"--cache-type-v {options.cache_type_v}: a quantized V cache needs flash attention: {reason}")
    for side, name in (("K", options.cache_type_k), ("V", options.cache_type_v)):
        block = ggml.type_of(name).block
        for layer in shape.layers:
            length, row = (layer.key_length, layer.k_row) if side == "K" else (layer.value_length, layer.v_row)
            if (flash and length % block) or row % block:
                raise BadInput(
                    f"--cache-type-{side.lower()} {name}: its blocks of {block} elements do not divide the model's "
                    f"{side} head of {length}: take f16 (or another type with blocks that fit)"
                )


def cuda_takes(type_k: str, type_v: str, *, all_quants: bool = False) -> bool:
    """Whether CUDA's flash attention takes a cache of these types (``ggml_cuda_fattn_kv_type_supported``).

    :param all_quants: a build with ``GGML_CUDA_FA_ALL_QUANTS``, as none is unless it was asked for.
    """
    if all_quants:
        return {type_k, type_v} <= {"f32", "f16", "bf16", "q4_0", "q4_1", "q5_0", "q5_1", "q8_0"}
    return type_k == type_v and type_k in ("f32", "f16", "bf16", "q4_0", "q8_0")


def _on_cuda(shape: ModelShape, options: LlamaOptions) -> Note | None:
    """What becomes of flash attention where CUDA has no kernel for the cache's types."""
    cards = any(device.kind in ("cuda", "rocm") for device in options.devices)
    type_k, type_v = options.cache_type_k, options.cache_type_v
    cached = any(layer.k_row for layer in shape.layers) and options.n_gpu_layers != 0 and options.kv_offload
    if not cards or not cached or not uses_flash_attention(shape, options) or cuda_takes(type_k, type_v):
        return None
    text = (
        f"CUDA has flash attention for K and V of one type of f32, f16, bf16, q4_0 and q8_0, and not for {type_k} and "
        f"{type_v}, unless it was built with GGML_CUDA_FA_ALL_QUANTS: "
    )
    if options.flash_attn == "on" or is_quantised(type_v):
        text += "attention is computed on the CPU, which is slow and takes a buffer there"
    else:
        text += "auto turns it off, which makes the compute buffer larger"
    return Note(kind="warning", bucket="compute", text=text)


def notes(shape: ModelShape, options: LlamaOptions) -> tuple[Note, ...]:
    """What is special about the cache of this model under these settings."""
    found = []
    jump = _on_cuda(shape, options)
    if jump is not None:
        found.append(jump)
    for name in sorted({options.cache_type_k, options.cache_type_v} - set(ggml.CACHE_TYPES)):
        text = f"cache type {name} is not among those that today's llama.cpp takes ({', '.join(ggml.CACHE_TYPES)})"
        found.append(Note(kind="warning", bucket="kv", text=text))
    if any(layer.window for layer in shape.layers) and any(layer.k_row for layer in shape.layers):
        laid = cells(options, shape.context, causal=shape.causal)
        window = laid.window(shape.window, full=options.swa_full)
        text = (
            f"{shape.swa_pattern} blocks see a window of {shape.window} tokens: {window} cells each for {laid.slots} "
            f"slot(s) and a ubatch of {laid.ubatch}, the others {laid.per_sequence}"
        )
        found.append(Note(kind="rule", bucket="kv", text=text))
    return tuple(found)
