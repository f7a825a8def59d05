"""Compute and output buffers of llama.cpp, predicted by laying out the graph that it reserves memory for.

``llama-context.cpp`` (``sched_reserve``) builds the graph of one full ubatch over a full cache and reserves, on each
device, what its steps need. The same graph is built here as a skeleton (:mod:`~pytest_vram.sizing.compute_graph`) and
laid out by the same rules (:mod:`~pytest_vram.sizing.compute_replay`).
"""

from __future__ import annotations

from collections.abc import Sequence

from pytest_vram.ledger import Entry
from pytest_vram.sizing import compute_feed_forward as feed
from pytest_vram.sizing import compute_mixers as mixers
from pytest_vram.sizing import compute_recurrent as recurrent
from pytest_vram.sizing import kv
from pytest_vram.sizing.compute_devices import backends
from pytest_vram.sizing.compute_graph import F32, I32, LateRows, Skeleton, quantized
from pytest_vram.sizing.compute_replay import Backend, Laid, Node, assign, replay
from pytest_vram.sizing.options import CURRENT, Cells, Era, LlamaOptions, Placement, cells
from pytest_vram.sizing.placement import used_devices
from pytest_vram.sizing.shape import ModelShape, Note, NoteKind


def compute_buffers(
    shape: ModelShape,
    options: LlamaOptions,
    placement: Placement,
    era: Era = CURRENT,
    *,
    dry_run: bool = False,
) -> list[Entry]:
    """The compute buffer of every device and of the host, and the buffer that outputs are copied to.

    :param dry_run: predict what the engine's dry run prints instead of what a boot reserves. They differ where steps
        were put on a device by name (the attention of ``--no-kv-offload`` without flash attention): a dry run forgets
        that before it divides the graph (``ggml-backend.cpp``, ``ggml_backend_sched_reserve_size``).
    """
    laid = cells(options, shape.context, causal=shape.causal)
    devices = backends(options, era)
    flat = bool(era.mamba2_flat)
    graph, sizes = _sizes(shape, options, placement, era, laid, devices, pinned=not dry_run, flat=flat)
    answers = [sizes]
    if any(device.limit < size.size for device, size in zip(devices, sizes, strict=True)):
        whole = [device.without_limit() for device in devices]
        answers.append(_sizes(shape, options, placement, era, laid, whole, pinned=not dry_run, flat=flat)[1])
    if era.mamba2_flat is None and mixer_kind(shape) == "mamba2":
        answers.append(_sizes(shape, options, placement, era, laid, devices, pinned=not dry_run, flat=True)[1])
    ranges = [
        # Which gaps a layout leaves hangs on the order of steps, and no graph of an older build was held against it.
        _between(*(size.size for size in each), *((each[0].live,) if outdated(era) else ()))
        for each in zip(*answers, strict=True)
    ]
    gap = 4 * shape.embedding * graph.tokens if _gapped(shape, placement, era) else 0
    ranges = [(low, high + (gap if number < len(devices) - 1 else 0)) for number, (low, high) in enumerate(ranges)]
    entries = [
        Entry(
            bucket="compute",
            device=device.label,
            bytes=low,
            at_most=high if high != low else None,
            source="estimate",
            detail=_detail(graph),
        )
        for device, (low, high) in zip(devices, ranges, strict=True)
        if high
    ]
    entries.append(
        Entry(
            bucket="compute",
            device="host",
            bytes=output_buffer(shape, options, laid),
            source="estimate",
            detail="output buffer",
        )
    )
    return entries


def outdated(era: Era) -> bool:
    """Whether a build lays out its graph by rules that no dry run confirmed."""
    return era.mask_padded or not (era.mask_f16 and era.outputs_per_slot and era.quant_copies_reserved)


def _gapped(shape: ModelShape, placement: Placement, era: Era) -> bool:
    """Whether a GPU's buffer may be larger by the rows of one ubatch: b10068 printed that for gated delta nets that are
    on a GPU as a whole, and not where they are split, on the host or in b10434; why is not known."""
    whole = not placement.experts_on_host and not {"host"} & {*placement.layers, placement.output}
    return whole and not placement.overridden and not era.extra_blocks_skipped and mixer_kind(shape) == "gated-delta"


def _between(*sizes: int) -> tuple[int, int]:
    return min(sizes), max(sizes)


def _sizes(
    shape: ModelShape,
    options: LlamaOptions,
    placement: Placement,
    era: Era,
    laid: Cells,
    devices: Sequence[Backend],
    *,
    pinned: bool,
    flat: bool,
) -> tuple[Skeleton, list[Laid]]:
    """The graph, and each device's buffer.

    Vulkan cuts what is over 1 GiB into pieces. Which piece a result goes to hangs on the order of steps that are
    almost of one size, so beyond that size the answer is the range between one piece and many.
    """
    graph = build(shape, options, placement, era, laid, pinned=pinned, flat=flat)
    pipeline = _pipeline(options, placement)
    return graph, replay(graph.graph, devices, op_offload=options.op_offload, pipeline=pipeline)


def _detail(graph: Skeleton) -> str:
    return f"graph of {graph.tokens} tokens, flash attention {'on' if graph.flash else 'off'}"


def build(
    shape: ModelShape,
    options: LlamaOptions,
    placement: Placement,
    era: Era,
    laid: Cells,
    *,
    pinned: bool = True,
    flat: bool = True,
) -> Skeleton:
    """The skeleton of the graph of one full ubatch over a full cache."""
    tokens = min(laid.context, laid.ubatch)
    tokens = -(-tokens // laid.slots) * laid.slots
    graph = Skeleton(
        shape,
        options,
        placement,
        era,
        laid,
        tokens=tokens,
        outputs=outputs(shape, options, era, laid, tokens),
        flash=flash_attention(shape, options, placement, era, laid),
        labels=[device.label for device in used_devices(options)],
        pinned=pinned,
        flat=flat,
    )
    return _filled(graph)


def _filled(graph: Skeleton) -> Skeleton:
    shape = graph.shape
    node = graph.embed()
    if scaled(shape):
        node = graph.same("scale", node)
    inputs = graph.layer_inputs(node)
    chosen = representative(shape, graph.placement)
    late = late_rows(shape, graph.era)
    rwkv = recurrent.Rwkv7(graph) if shape.architecture == "rwkv7" else None
    for index in chosen:
        last = index == chosen[-1] and late is None
        node = _block(graph, index, node, last=last) if rwkv is None else rwkv.block(index, node, last=last)
        if inputs is not None:
            node = graph.with_layer_input(index, node, inputs, last=last)
        scale = graph.weight(index, "layer_output_scale.weight")
        node = node if scale is None else graph.same("mul", node, scale)
    graph.finish(node, late=late)
    _pool(graph)
    return graph


def flash_attention(shape: ModelShape, options: LlamaOptions, placement: Placement, era: Era, laid: Cells) -> bool:
    """Whether flash attention is in force.

    ``auto`` is on, unless its step would not run on the device of its block (``llama-context.cpp``,
    ``resolve_fused_ops``), because that has no kernel for it. A quantised V asks for it in any case, but older builds
    look first, and refuse to start where it cannot run.
    """
    if not kv.uses_flash_attention(shape, options):
        return False
    if options.flash_attn == "on" or (quantized(options.cache_type_v) and era.quant_v_settles):
        return True
    probe = Skeleton(
        shape,
        options,
        placement,
        era,
        laid,
        tokens=laid.slots,
        outputs=laid.slots,
        flash=True,
        labels=[device.label for device in used_devices(options)],
    )
    _filled(probe)
    assign(probe.graph, backends(options, era), op_offload=options.op_offload)
    return all(node.device == probe.place(placement.layers[index]) for index, node in probe.fused)


def scaled(shape: ModelShape) -> bool:
    """Whether embeddings are multiplied by a constant before the first block."""
    return shape.architecture.startswith("gemma") or "embedding_scale" in shape.meta


def pooling(shape: ModelShape, options: LlamaOptions) -> str:
    """How the rows of a sequence become one: as asked for, else as the file says."""
    if options.reranking:
        return "rank"
    by_file = shape.meta.get("pooling_type", 0)
    return options.pooling or POOLINGS[by_file if isinstance(by_file, int) and 0 <= by_file < len(POOLINGS) else 0]


POOLINGS = ("none", "mean", "cls", "last", "rank")  # enum llama_pooling_type


def _pool(graph: Skeleton) -> None:
    """``build_pooling``, for embeddings alone: one row for each sequence, from the result of the output norm."""
    shape, options, result = graph.shape, graph.options, graph.result
    kind = pooling(shape, options)
    if not (options.embeddings or options.reranking) or result is None or kind == "none":
        return
    slots = graph.cells.slots
    if kind == "mean":
        turned = graph.step("cont", (result.dims[1], result.dims[0]), graph.view(result, *result.dims, packed=False))
        pooled = graph.matmul(turned, graph.input("mean", F32, graph.tokens, slots))
    else:
        pooled = graph.step("get_rows", (result.dims[0], slots), result, graph.input("pooled", I32, slots))
    pooled.kept = True
    graph.expand(pooled)


def outputs(shape: ModelShape, options: LlamaOptions, era: Era, laid: Cells, tokens: int) -> int:
    """Rows of logits that are reserved (``n_outputs_max``, since #23861; before that as many as tokens).

    Embeddings, and any pooling that is asked for, reserve them for all tokens (``tools/server/server-context.cpp``,
    ``server_output_limits``), counted before these are rounded up to a multiple of the slots.
    """
    if not era.outputs_per_slot:
        return tokens
    if options.embeddings or options.reranking or options.pooling not in (None, "none"):
        return min(laid.context, laid.ubatch, laid.batch)
    drafted = options.draft.n_max if options.draft is not None else 0
    return min(tokens, laid.batch, laid.slots * (1 + drafted))


def output_buffer(shape: ModelShape, options: LlamaOptions, laid: Cells) -> int:
    """Where results are copied for the caller (``llama-context.cpp``, ``output_reserve``): logits, and embeddings."""
    floats = shape.vocabulary
    if options.embeddings or options.reranking or shape.encoder:
        floats += shape.embedding
    return 4 * floats * laid.slots


def _pipeline(options: LlamaOptions, placement: Placement) -> bool:
    """Whether inputs are kept in several copies so that GPUs can work on several batches at once."""
    devices = used_devices(options)
    return (
        len(devices) > 1
        and placement.output != "host"
        and "host" not in placement.layers
        and options.split_mode == "layer"
        and options.kv_offload
        and not placement.overridden
        and all(device.kind in ("cuda", "rocm", "vulkan") for device in devices)
    )


def representative(shape: ModelShape, placement: Placement) -> list[int]:
    """Blocks that stand for all: of a run that repeats itself, what lies between adds nothing to the maximum.

    Blocks that never follow each other must not do so here, or their steps would be put on another device. States make
    gaps that grow from block to block, so no recurrent block is left out.
    """
    if any(layer.recurrent for layer in shape.layers):
        return list(range(len(shape.layers)))
    away: dict[int, list[tuple[str, str, int]]] = {}
    for tensor, label in zip(shape.tensors, placement.tensors, strict=False):
        if tensor.name.startswith("blk."):
            number, _, rest = tensor.name[4:].partition(".")
            if not (number.isascii() and number.isdigit() and len(number) < 8):
                continue
            layer = int(number)
            if label == "host" or (layer < len(placement.layers) and label != placement.layers[layer]):
                away.setdefault(layer, []).append((rest, label, tensor.bytes))
    signs: list[object] = [
        (layer, placement.layers[index], tuple(away.get(index, ())), index == len(shape.layers) - 1)
        for index, layer in enumerate(shape.layers)
    ]
    return _unrepeated([tuple(signs[max(0, index - 3) : index + 1]) for index in range(len(signs))])


OFTEN = 3  # how many times a window stays


def _unrepeated(windows: Sequence[tuple[object, ...]]) -> list[int]:
    """Positions without what repeats itself: every window stays some times, and what follows another has followed its
    like.

    After one block it goes on behind a later one with the same window, if each window between was seen that often.
    """
    numbers = {window: number for number, window in enumerate(dict.fromkeys(windows))}
    kinds = [numbers[window] for window in windows]
    seen = [0] * len(numbers)
    chosen, index = [], 0
    while index < len(windows):
        chosen.append(index)
        seen[kinds[index]] += 1
        after = index
        for later in range(index + 1, len(windows)):
            if seen[kinds[later]] < OFTEN:
                break
            if kinds[later] == kinds[index]:
                after = later
        index = after + 1
    return chosen


# Models whose graph is ready for a prediction head: all rows go through the last block and are kept for that head
# (``cparams.embeddings_nextn_masked``, off by default), some after the output norm and some before it. Seen in the
# builds that leave such heads in the file, and before them only in gemma4.
LATE_ROWS: dict[str, LateRows] = {
    **dict.fromkeys(("gemma4", "qwen3next", "qwen35", "qwen35moe", "nemotron_h", "nemotron_h_moe"), "after norm"),
    **dict.fromkeys(("bailingmoe3", "cohere2moe", "hy-v3"), "after norm"),
    **dict.fromkeys(("gpt-oss", "step35"), "before norm"),
}


def late_rows(shape: ModelShape, era: Era) -> LateRows | None:
    """Where the rows that are asked for are picked, if not in the last block."""
    kept = era.extra_blocks_skipped or shape.architecture == "gemma4"
    return LATE_ROWS.get(shape.architecture) if kept else None


# A sum takes over the memory of its first term, so the order in which a model's source adds matters.
RESIDUAL_FIRST = frozenset(("jamba", "lfm2", "lfm2moe", "openelm", "phi3"))
# Here a block's first norm is listed before anything of its mixer.
NORM_FIRST = frozenset(("kimi-linear", "qwen3next", "qwen35", "qwen35moe"))
MIDDLE_FIRST = frozenset(("arctic", "jamba", "lfm2", "lfm2moe"))


def _block(graph: Skeleton, index: int, node: Node, *, last: bool) -> Node:
    """One block: mixer, residual, feed-forward, residual, as the models in ``src/models`` have it."""
    layer = graph.shape.layers[index]
    residual = node
    normed = (
        graph.block_norm(index, "attn_norm", node)
        if graph.has(index, "attn_norm.weight") or not graph.shape.tensors
        else node
    )
    if graph.shape.architecture in NORM_FIRST:
        graph.expand(normed)
    alone = (
        graph.shape.tensors and not graph.has(index, "attn_output.weight") and not graph.has(index, "ffn_norm.weight")
    )
    if alone and not layer.recurrent:
        return _only_feed_forward(graph, index, node, normed, last=last)
    cur = _mixer(graph, index, normed)
    if graph.shape.architecture == "deci" and not layer.feed_forward:
        return node  # ``deci.cpp`` goes on with what came in, and drops what attention made of it
    unmixed = cur is residual  # DeciLM has blocks without a mixer
    if last:
        cur, residual = graph.rows(cur), graph.rows(residual)
        if normed is not node:
            normed = graph.rows(normed) if not graph.has(index, "ffn_norm.weight") else normed
    before = "ffn_norm"
    if graph.has(index, "post_attention_norm.weight"):
        if graph.has(index, "ffn_norm.weight"):
            cur = graph.block_norm(index, "post_attention_norm", cur)
        else:
            before = "post_attention_norm"
    architecture = graph.shape.architecture
    if unmixed:
        middle = cur
    else:
        first, second = (residual, cur) if architecture in RESIDUAL_FIRST else (cur, residual)
        middle = graph.same("add", first, second)
    middle = graph.block_norm_if(index, "attn_output_norm", middle)
    if not layer.feed_forward and not layer.experts:
        return middle
    if graph.has(index, f"{before}.weight") or not graph.shape.tensors:
        cur = graph.block_norm(index, before, middle)
    else:
        cur = middle if graph.has(index, "attn_output_norm.weight") else normed
    cur = feed.experts(graph, index, cur) if layer.experts else feed.feed_forward(graph, index, cur)
    cur = graph.block_norm_if(index, "post_ffw_norm", cur)
    first, second = (middle, cur) if architecture in MIDDLE_FIRST else (cur, middle)
    return graph.block_norm_if(index, "layer_output_norm", graph.same("add", first, second))


def _only_feed_forward(graph: Skeleton, index: int, node: Node, normed: Node, *, last: bool) -> Node:
    """A block that is nothing but a feed-forward (``nemotron-h.cpp``)."""
    cur = (
        feed.experts(graph, index, normed)
        if graph.shape.layers[index].experts
        else feed.feed_forward(graph, index, normed)
    )
    if last:
        cur, node = graph.rows(cur), graph.rows(node)
    return graph.same("add", cur, node)


def _mixer(graph: Skeleton, index: int, node: Node) -> Node:
    shape = graph.shape
    layer = shape.layers[index]
    if not layer.recurrent:
        if not layer.heads:
            return node
        if not layer.kv_heads:  # DeciLM's linear blocks
            return graph.linear(index, "attn_output", node, graph.shape.embedding, graph.shape.embedding)
        return (
            graph.attention(index, node)
            if shape.mla is None
            else mixers.latent_attention(graph, index, node, shape.mla)
        )
    kind = mixer_kind(shape)
    if shape.ssm is None or kind not in MIXERS:
        return node
    if layer.heads and layer.k_row:  # both side by side (Falcon-H1)
        return graph.same("add", graph.attention(index, node), MIXERS[kind](graph, index, node, shape.ssm))
    return MIXERS[kind](graph, index, node, shape.ssm)


MIXERS = {
    "mamba": mixers.mamba,
    "mamba2": mixers.mamba2,
    "gated-delta": recurrent.gated_delta,
    "shortconv": recurrent.short_convolution,
}


def mixer_kind(shape: ModelShape) -> str:
    """The kind of a model's recurrent blocks."""
    return shape.ssm.kind if shape.ssm is not None else ""


def notes(shape: ModelShape, options: LlamaOptions, placement: Placement) -> tuple[Note, ...]:
    """What a reader of these figures must know."""
    found = []

    def say(kind: NoteKind, text: str) -> None:
        found.append(Note(kind=kind, bucket="compute", text=text))

    kinds = {device.kind for device in used_devices(options)}
    if kinds & {"cuda", "rocm"}:
        text = (
            "compute buffers of CUDA follow from its source and from dry runs of its rules: no GPU confirmed them, and "
        )
        say("rule", text + "its context, its pools and cuBLAS come on top")
    others = sorted(kinds - {"cuda", "vulkan", "rpc"})
    if others:
        say("assumed", f"compute buffers on {', '.join(others)} are taken to be as on CUDA, which nothing confirmed")
    if (
        any(layer.recurrent for layer in shape.layers)
        and mixer_kind(shape) not in MIXERS
        and shape.architecture != "rwkv7"
    ):
        text = f"the steps of {shape.architecture}'s recurrent blocks are not known here: compute is a lower bound"
        say("unknown", text)
    if any(layer.indexer_row for layer in shape.layers):
        say("unknown", "the scores of sparse attention's indexer are not counted: compute is a lower bound")
    if options.split_mode in ("row", "tensor") and len(kinds) and len(used_devices(options)) > 1:
        say("unknown", f"compute under --split-mode {options.split_mode} is counted as if layers were split")
    if options.lora:
        say("assumed", "the steps that adapters add to the graph are not counted in compute")
    if not shape.tensors and (placement.experts_on_host or "host" in placement.layers):
        say("assumed", "without a file, weights that are copied to the device for large batches are taken to be f16")
    return tuple(found)


__all__: Sequence[str] = ("build", "compute_buffers", "notes", "output_buffer", "outputs")
