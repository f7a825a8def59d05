"""llama.cpp's recurrent state: convolution and state rows of Mamba, RWKV, delta nets and their relatives.

Sources: ``llama-memory-recurrent.cpp`` (always f32, one row per sequence and, for speculation that rolls back, one per
drafted token), ``llama-hparams.cpp`` (``n_embd_r``, ``n_embd_s``), ``llama-kv-cache-dsv4.cpp`` (compressor states of
DeepSeek-V4, which no engine here confirmed). The engine's own line counts all blocks, not only those with a state.
"""

from __future__ import annotations

from pytest_vram.ledger import Entry
from pytest_vram.sizing.buffers import held, kind_of
from pytest_vram.sizing.options import LlamaOptions, Placement
from pytest_vram.sizing.placement import HOST
from pytest_vram.sizing.shape import Layer, ModelShape

_FLOAT = 4
_ROLLS_BACK = ("draft-mtp", "draft-eagle3", "draft-dflash", "draft-dspark")
_CSA, _HCA = 4, 128


def states(shape: ModelShape, options: LlamaOptions, placement: Placement) -> list[Entry]:
    """Entries of the bucket ``recurrent``, one for each device with blocks that keep a state."""
    rows = max(1, options.slots) * (1 + rollback(shape, options))
    sums: dict[str, list[int]] = {}
    for position, layer in enumerate(shape.layers):
        label = placement.layers[position] if options.kv_offload else HOST
        for elements in (layer.state_r, layer.state_s, *_compressors(shape, layer)):
            if elements:
                row = sums.setdefault(label, [0, 0])
                size = _FLOAT * elements * rows
                row[0] += held(size, elements, "f32", elements * rows, kind_of(label, options))
        if label in sums and (layer.recurrent or layer.compress):
            sums[label][1] += 1
    return [
        Entry(
            bucket="recurrent",
            device=label,
            bytes=size,
            source="estimate",
            detail=f"{blocks} blocks, {rows} rows each, f32",
        )
        for label, (size, blocks) in sums.items()
    ]


def rollback(shape: ModelShape, options: LlamaOptions) -> int:
    """Extra rows per sequence for speculation that takes drafted tokens back (``n_rs_seq``, ``common/common.h``)."""
    if options.draft is None or options.draft.kind not in _ROLLS_BACK or not shape.meta.get("rollback"):
        return 0
    return options.draft.n_max


def _compressors(shape: ModelShape, layer: Layer) -> tuple[int, ...]:
    """Elements of DeepSeek-V4's compressor states, one set for each sequence: values and scores."""
    if shape.meta.get("cache") != "compressed":
        return ()
    if layer.compress == _CSA:
        own, indexer = 2 * _CSA * 2 * layer.key_length, 2 * _CSA * 2 * layer.indexer_row
        return own, own, indexer, indexer
    if layer.compress == _HCA:
        return _HCA * layer.key_length, _HCA * layer.key_length
    return ()
