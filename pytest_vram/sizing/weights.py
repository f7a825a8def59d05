"""Bytes of a model's tensors per device, as llama.cpp's model buffers hold them.

Sources: ``llama-model-loader.cpp:create_tensor`` (skipped and duplicated tensors), ``src/models/*.cpp``
(``load_arch_tensors``). Confirmed by real boots on the CPU and on software GPUs; what CUDA adds per tensor
(:func:`pytest_vram.sizing.buffers.held`) no GPU confirmed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pytest_vram.ledger import Bucket, Entry
from pytest_vram.sizing import host_weights
from pytest_vram.sizing.buffers import held, kind_of
from pytest_vram.sizing.options import CURRENT, Era, LlamaOptions, Placement
from pytest_vram.sizing.placement import EXPERT, HOST, block_of, overrides
from pytest_vram.sizing.shape import ModelShape, Note, Tensor
from pytest_vram.units import MIB

_ROPE = ("rope_freqs.", "rope_factors_long.", "rope_factors_short.")
_MTP = ("draft-mtp", "mtp")
#: Begins the detail of what a mapped file adds to the figures of a dry run.
MAPPED = "mapped beside the buffers"
_OUTPUT_FIRST = ("gemma3n", "gemma4")


def weights(
    shape: ModelShape, options: LlamaOptions, placement: Placement, era: Era = CURRENT, *, dry_run: bool = False
) -> list[Entry]:
    """Entries of the buckets ``weights`` and ``experts``, one for each device that holds any.

    :param dry_run: as the engine's dry run counts them, which maps nothing; what a boot with a mapped file takes on
        top is an entry of its own then, marked :data:`MAPPED`.
    """
    sums: dict[tuple[Bucket, str], list[int]] = {}
    on_host: list[host_weights.Held] = []
    for one, label in _held(shape, options, placement, era):
        tensor = one.tensor
        if one.shared and label != HOST:
            continue
        bucket: Bucket = "experts" if EXPERT.search(tensor.name) else "weights"
        row = sums.setdefault((bucket, label), [0, 0])
        row[1] += 1
        if label == HOST:
            on_host.append(one)
        else:
            kind = kind_of(label, options)
            row[0] += held(tensor.bytes, tensor.dims[0] if tensor.dims else 1, tensor.type, tensor.elements, kind)
    host = host_weights.amounts(shape, options, on_host)
    mapped = options.mmap and not dry_run
    found: list[Entry] = []
    for (bucket, label), (size, count) in sums.items():
        low = high = size
        detail = f"{count} tensors"
        if label == HOST:
            column = host_weights.EXPERTS if bucket == "experts" else host_weights.WEIGHTS
            # What lies between in the file may be of a bucket that has nothing on the host: it is this one's then.
            alone = len({other for other, where in sums if where == HOST}) == 1
            choices = [sum(family) if alone else family[column] for family in (host.mapped if mapped else host.buffers)]
            low, high = min(choices), max(choices)
            detail += _on_host(mapped, low < high, low > host.buffers[0][column] + MIB)
        found.append(_entry(bucket, label, low, high, detail))
    if options.mmap and dry_run and on_host:
        more = [sum(with_) - sum(without) for with_, without in zip(host.mapped, host.buffers, strict=True)]
        low, high = max(min(more), 0), max(*more, 0)
        if high:
            found.append(_entry("weights", HOST, low, high, f"{MAPPED}: a boot has what the CPU reorders twice"))
    return found


def _on_host(mapped: bool, reordered: bool, between: bool) -> str:
    if mapped:
        found = ", mapped from the file" + (" with what lies between them" if between else "")
        return found + ("; again what the CPU reorders" if reordered else "")
    return ", in an order that is the CPU's choice" if reordered else ""


def _entry(bucket: Bucket, label: str, low: int, high: int, detail: str) -> Entry:
    return Entry(
        bucket=bucket,
        device=label,
        bytes=low,
        source="estimate",
        detail=detail,
        at_most=high if high > low else None,
    )


def _held(
    shape: ModelShape, options: LlamaOptions, placement: Placement, era: Era
) -> Iterator[tuple[host_weights.Held, str]]:
    """Every tensor in memory with its device."""
    left_out = not_loaded(shape, options, era)
    for position, tensor in enumerate(shape.tensors):
        if position in left_out:
            continue
        if tensor.name.startswith(_ROPE):
            # One copy for each device with blocks that use it (TENSOR_DUPLICATED in the models' block loops).
            for label in _rope_homes(shape, placement):
                yield host_weights.Held(tensor), label
            continue
        yield host_weights.Held(tensor), placement.tensors[position]
        if tensor.name == "token_embd.weight" and shape.tied:
            yield _copy(shape, options, tensor, placement.tensors[position], placement)
    if shape.architecture == "codeshell" and not any(one.name == "token_embd.weight" for one in shape.tensors):
        output = (one for one in shape.tensors if one.name == "output.weight")
        yield from ((host_weights.Held(one), placement.output) for one in output)


def _rope_homes(shape: ModelShape, placement: Placement) -> list[str]:
    blocks = range(len(shape.layers))
    if shape.architecture == "gemma4":
        blocks_used = [block for block in blocks if not shape.layers[block].window]
    else:
        blocks_used = list(blocks)
    return sorted({placement.layers[block] for block in blocks_used})


def _copy(
    shape: ModelShape, options: LlamaOptions, table: Tensor, home: str, placement: Placement
) -> tuple[host_weights.Held, str]:
    """The embedding table's copy that serves as output matrix.

    It is made where the output layer is, unless the table is in that very buffer already. An override of the table
    goes for the copy too, which has its name. On the host both share a buffer, except that the CPU backend may reorder
    the copy (``CPU_REPACK``), and that Gemma 3n and 4 create the copy first and the table again.
    """
    overridden = (label for pattern, label in overrides(options) if pattern.search(table.name))
    target = next(overridden, placement.output)
    apart = target != home or shape.architecture in _OUTPUT_FIRST
    return host_weights.Held(table, output=True, shared=not apart), target


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


def notes(
    shape: ModelShape, options: LlamaOptions, era: Era = CURRENT, entries: Sequence[Entry] = ()
) -> tuple[Note, ...]:
    """What of the weights could not be known, and what was left out of them.

    :param entries: what :func:`weights` found, for what to say of the host's.
    """
    found = []
    if any(one.device == HOST and one.bucket in ("weights", "experts") and one.at_most is not None for one in entries):
        text = (
            "the CPU may keep matrices on the host in an order of its own (CPU_REPACK, AMX), which ones depends on it"
        )
        text += ": beside the mapped file, that is a second copy; --no-mmap keeps one" if options.mmap else ""
        text += "; --no-repack makes the figure exact"
        found.append(Note(kind="rule", bucket="weights", text=text))
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
