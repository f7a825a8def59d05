"""Bytes of a model's tensors per device, as llama.cpp's model buffers hold them.

Sources: ``llama-model-loader.cpp:create_tensor`` (skipped and duplicated tensors), ``src/models/*.cpp``
(``load_arch_tensors``). Confirmed by real boots on the CPU and on software GPUs; what CUDA adds per tensor
(:func:`pytest_vram.sizing.buffers.held`) no GPU confirmed.
"""

from __future__ import annotations

from collections.abc import Iterator

from pytest_vram.ledger import Bucket, Entry
from pytest_vram.sizing.buffers import held, kind_of
from pytest_vram.sizing.options import CURRENT, Era, LlamaOptions, Placement
from pytest_vram.sizing.placement import EXPERT, HOST, block_of, overrides
from pytest_vram.sizing.shape import ModelShape, Note, Tensor

_ROPE = ("rope_freqs.", "rope_factors_long.", "rope_factors_short.")
_MTP = ("draft-mtp", "mtp")
# Types whose matrices the CPU backend may keep in an order of its own (ggml-cpu/repack.cpp); which, depends on the CPU.
_REPACKED = ("q4_0", "q4_k", "q2_k", "q5_k", "q6_k", "iq4_nl", "mxfp4", "q8_0")
_OUTPUT_FIRST = ("gemma3n", "gemma4")


def weights(shape: ModelShape, options: LlamaOptions, placement: Placement, era: Era = CURRENT) -> list[Entry]:
    """Entries of the buckets ``weights`` and ``experts``, one for each device that holds any."""
    sums: dict[tuple[Bucket, str], list[int]] = {}
    for tensor, label, extra in _held(shape, options, placement, era):
        bucket: Bucket = "experts" if EXPERT.search(tensor.name) else "weights"
        row = sums.setdefault((bucket, label), [0, 0, 0])
        size = held(
            tensor.bytes, tensor.dims[0] if tensor.dims else 1, tensor.type, tensor.elements, kind_of(label, options)
        )
        if extra:
            row[1] += size
        else:
            row[0] += size
        row[2] += 1
    return [
        Entry(
            bucket=bucket,
            device=label,
            bytes=sure,
            source="estimate",
            detail=f"{count} tensors" + (", mapped from the file" if label == HOST and options.mmap else ""),
            at_most=sure + perhaps if perhaps else None,
        )
        for (bucket, label), (sure, perhaps, count) in sums.items()
    ]


def _held(
    shape: ModelShape, options: LlamaOptions, placement: Placement, era: Era
) -> Iterator[tuple[Tensor, str, bool]]:
    """Every tensor in memory with its device; true where it depends on the CPU whether it is there."""
    left_out = not_loaded(shape, options, era)
    for position, tensor in enumerate(shape.tensors):
        if position in left_out:
            continue
        if tensor.name.startswith(_ROPE):
            # One copy for each device with blocks that use it (TENSOR_DUPLICATED in the models' block loops).
            for label in _rope_homes(shape, placement):
                yield tensor, label, False
            continue
        yield tensor, placement.tensors[position], False
        if tensor.name == "token_embd.weight" and shape.tied:
            yield from _copy(shape, options, tensor, placement.tensors[position], placement)
    if shape.architecture == "codeshell" and not any(one.name == "token_embd.weight" for one in shape.tensors):
        yield from ((one, placement.output, False) for one in shape.tensors if one.name == "output.weight")


def _rope_homes(shape: ModelShape, placement: Placement) -> list[str]:
    blocks = range(len(shape.layers))
    if shape.architecture == "gemma4":
        blocks_used = [block for block in blocks if not shape.layers[block].window]
    else:
        blocks_used = list(blocks)
    return sorted({placement.layers[block] for block in blocks_used})


def _copy(
    shape: ModelShape, options: LlamaOptions, table: Tensor, home: str, placement: Placement
) -> Iterator[tuple[Tensor, str, bool]]:
    """The embedding table's copy that serves as output matrix.

    It is made where the output layer is, unless the table is in that very buffer already. An override of the table
    goes for the copy too, which has its name. On the host both share a buffer, except that the CPU backend may reorder
    the copy (``CPU_REPACK``), and that Gemma 3n and 4 create the copy first and the table again.
    """
    overridden = (label for pattern, label in overrides(options) if pattern.search(table.name))
    target = next(overridden, placement.output)
    if target != home or shape.architecture in _OUTPUT_FIRST:
        yield table, target, False
    elif home == HOST and options.repack and table.type in _REPACKED and len(table.dims) == 2:
        yield table, target, True


def not_loaded(shape: ModelShape, options: LlamaOptions, era: Era = CURRENT) -> frozenset[int]:
    """Positions of tensors that the engine leaves in the file: extra prediction blocks (MTP) that nobody asked for, and
    the few that no operation uses (``GGML_OP_NONE`` in ``llama-arch.cpp``)."""
    rule = shape.meta.get("extra_loaded", "always")
    asked = options.draft is not None and options.draft.model is None and options.draft.kind in _MTP
    skip = rule == "never" or (rule == "asked" and not asked and era.extra_blocks_skipped)
    first = len(shape.layers)
    return frozenset(
        position
        for position, tensor in enumerate(shape.tensors)
        if (skip and shape.extra_layers and (block_of(tensor.name) or 0) >= first)
        or ".cross_attn_rel_b." in tensor.name
        or tensor.name.startswith("masked_embd_")
    )


def notes(shape: ModelShape, options: LlamaOptions, era: Era = CURRENT) -> tuple[Note, ...]:
    """What of the weights could not be known, and what was left out of them."""
    found = []
    unknown = [tensor for tensor in shape.tensors if not tensor.known]
    if unknown:
        experts = any(EXPERT.search(tensor.name) for tensor in unknown)
        text = (
            f"{len(unknown)} tensor(s), such as {unknown[0].name}, have the unknown {unknown[0].type}: they are not "
            "counted, so the weights are a lower bound"
        )
        found.append(Note(kind="unknown", bucket="experts" if experts else "weights", text=text))
    left = not_loaded(shape, options, era)
    if left:
        size = sum(shape.tensors[position].bytes for position in left)
        text = (
            f"{len(left)} tensors of {size} bytes stay in the file: blocks for prediction (MTP) that nobody asked for"
        )
        found.append(Note(kind="rule", bucket="weights", text=text))
    if any(device.kind in ("cuda", "rocm", "sycl") for device in options.devices):
        text = "padding of quantised rows on the GPU follows llama.cpp's source; no GPU confirmed it"
        found.append(Note(kind="rule", bucket="weights", text=text))
    return tuple(found)
