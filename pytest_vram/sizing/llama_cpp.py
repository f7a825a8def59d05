"""What a deployment of llama.cpp takes: every rule joined into one ledger, with its notes and its command line."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import msgspec

from pytest_vram.errors import BadInput
from pytest_vram.ledger import Entry
from pytest_vram.paths import expanded
from pytest_vram.sizing import compute, defaults, kv, moe, placement, recurrent, textbook, weights
from pytest_vram.sizing.compute_graph import quantized
from pytest_vram.sizing.llama_options import Given, command
from pytest_vram.sizing.options import CURRENT, Cells, Era, LlamaOptions, Placement, cells
from pytest_vram.sizing.prediction import Estimate, ModelFacts
from pytest_vram.sizing.shape import ModelShape, Note
from pytest_vram.units import MIB

ENGINE = "llama-server"
#: Least and most that reports name for a CUDA context of llama-server: 107 MiB on an RTX 4060 Ti and 555 MiB on an
#: RTX PRO 6000 (ggml-org/llama.cpp pull request 23604). No rule gives the figure of one card.
CONTEXT_RANGE = (107 * MIB, 555 * MIB)
#: Bytes per element that the textbook formula puts in for a cache type.
_TEXTBOOK = {"f32": 4.0, "f16": 2.0, "bf16": 2.0, "q8_0": 1.0}
#: What ``--fit`` keeps free on each card (``common/arg.cpp``: ``fit-target``).
_MARGIN = "1024 MiB"


def predict(
    shape: ModelShape,
    options: LlamaOptions,
    era: Era = CURRENT,
    *,
    given: Given | None = None,
    facts: ModelFacts | None = None,
    dry_run: bool = False,
) -> Estimate:
    """The predicted ledger of a model under these options.

    :param given: the options as they were read, for the command line and for what defaults stood in for.
    :param facts: of the model, where they were counted before.
    :param dry_run: predict what the engine's dry run prints, which differs from a boot in some compute buffers.
    :raises BadInput: a combination that llama.cpp refuses.
    """
    asked, company = _with_company(shape, options, given.given if given else ())
    options, chosen = defaults.in_force(asked, era, given.given if given else ())
    _no_gguf(shape)
    kv.check_cache_types(shape, options)
    where = placement.place(shape, options)
    layout = cells(options, shape.context, causal=shape.causal)
    _refused(shape, options, layout, where, era)
    notes = [*shape.notes, *(given.notes if given else ()), *company, *chosen]
    entries = [
        *weights.weights(shape, options, where, era, dry_run=dry_run),
        *kv.kv_cache(shape, options, where, era),
        *recurrent.states(shape, options, where),
        *compute.compute_buffers(shape, options, where, era, dry_run=dry_run),
    ]
    for more, said in _extras(shape, options, era):
        entries.extend(more)
        notes.extend(said)
    context, said = driver_context(options)
    entries.extend(context)
    notes.extend(said)
    notes.extend(placement.notes(shape, options))
    notes.extend(weights.notes(shape, options, era, entries))
    notes.extend(kv.notes(shape, options))
    notes.extend(compute.notes(shape, options, where))
    notes.extend(_notes(shape, options, layout, given, era))
    textbook_kv = textbook.kv(shape, layout.context, _textbook_bytes(options)) if shape.layers else None
    if facts is None:
        facts = moe.facts(shape)
    settled = tuple(entry for entry in entries if entry.bytes or entry.at_most)
    return Estimate(
        engine=ENGINE,
        model=facts,
        entries=settled,
        devices={device.label: device.name or "a CUDA card" for device in options.devices},
        settings=settings(shape, options, layout, where),
        notes=_once(notes),
        command=command(asked, shape.source, given.kept if given else ()),
        unknown=tuple(dict.fromkeys(note.bucket or "other" for note in notes if note.kind == "unknown")),
        textbook_kv=textbook_kv,
        pressure=moe.pressure(facts, settled),
    )


def _with_company(shape: ModelShape, options: LlamaOptions, given: Collection[str]) -> tuple[LlamaOptions, list[Note]]:
    """The options with what the model's store loads beside it, unless they say otherwise."""
    notes: list[Note] = []
    if shape.projectors and options.mmproj is None and not {"mmproj", "mmproj-auto"} & set(given):
        options = msgspec.structs.replace(options, mmproj=shape.projectors[0])
        text = "the store keeps a projector with the model, and loads it: it is counted, as with --mmproj"
        notes.append(Note(kind="rule", bucket="projector", text=text))
        if len(shape.projectors) > 1:
            text = f"{len(shape.projectors) - 1} more projectors of the model are not counted"
            notes.append(Note(kind="unknown", bucket="projector", text=text))
    if shape.adapters and not options.lora:
        options = msgspec.structs.replace(options, lora=shape.adapters)
        text = f"the store keeps {len(shape.adapters)} adapter(s) with the model, and loads them: they are counted"
        notes.append(Note(kind="rule", bucket="lora", text=text))
    return options, notes


def settings(
    shape: ModelShape, options: LlamaOptions, layout: Cells, where: Placement
) -> dict[str, int | float | str | bool | None]:
    """The settings in force, defaults included, under the engine's long names with underscores."""
    return {
        "ctx_size": layout.context,
        "n_gpu_layers": "all" if options.n_gpu_layers is None else options.n_gpu_layers,
        "layers_on_gpu": sum(label != placement.HOST for label in where.layers[: len(shape.layers)]),
        "n_cpu_moe": options.n_cpu_moe,
        "cpu_moe": options.cpu_moe,
        "override_tensor": ",".join(f"{pattern}={buffer}" for pattern, buffer in options.override_tensor),
        "parallel": layout.slots,
        "kv_unified": options.unified,
        "flash_attn": options.flash_attn,
        "cache_type_k": options.cache_type_k,
        "cache_type_v": options.cache_type_v,
        "swa_full": options.swa_full,
        "kv_offload": options.kv_offload,
        "op_offload": options.op_offload,
        "batch_size": layout.batch,
        "ubatch_size": layout.ubatch,
        "device": ",".join(device.name or device.label for device in options.devices) or "none",
        "split_mode": options.split_mode,
        "mmap": options.mmap,
        "mlock": options.mlock,
        "cache_ram": options.cache_ram,
        "ctx_checkpoints": options.ctx_checkpoints,
        "mmproj": options.mmproj,
        "lora": ",".join(options.lora),
        "model_draft": options.draft.model if options.draft else None,
    }


def driver_context(options: LlamaOptions) -> tuple[list[Entry], list[Note]]:
    """What the driver itself takes on each card: a range from reports under CUDA and ROCm, a note elsewhere.

    Sources: reports of llama.cpp's own CUDA context of 107 to 555 MiB by card (ggml-org/llama.cpp issues 21692 and
    23120, pull requests 23137 and 23604). Not confirmed here by any GPU, and borrowed for ROCm.
    """
    entries: list[Entry] = []
    notes: list[Note] = []
    for device in options.devices:
        if device.kind in ("cuda", "rocm"):
            lower, upper = CONTEXT_RANGE
            detail = "driver context, as reported for other cards"
            entries.append(
                Entry(
                    bucket="context", device=device.label, bytes=lower, at_most=upper, source="estimate", detail=detail
                )
            )
        elif device.kind != "rpc":
            notes.append(
                Note(
                    kind="warning",
                    bucket="context",
                    text=f"what the driver itself takes on {device.name or device.label} is not in the sum: no figures"
                    " of it are known for this kind of device",
                )
            )
    if entries:
        notes.append(
            Note(
                kind="assumed",
                bucket="context",
                text="the driver's context depends on the card: 107 to 555 MiB were reported for llama.cpp; libraries"
                " that are loaded at the first request (cuBLAS) come on top",
            )
        )
    return entries, notes


def _extras(shape: ModelShape, options: LlamaOptions, era: Era) -> Iterable[tuple[list[Entry], list[Note]]]:
    """What comes on top of the model; each reads a file of its own."""
    if options.mmproj is not None:
        from pytest_vram.sizing import projector

        yield projector.projector(expanded(options.mmproj, "option mmproj"), options)
    if options.lora:
        from pytest_vram.sizing import lora

        yield lora.adapters([expanded(path, "option lora") for path in options.lora], shape, options)
    if options.draft is not None:
        from pytest_vram.sizing import draft

        yield draft.draft(shape, options, era)


def _no_gguf(shape: ModelShape) -> None:
    if shape.format != "gguf":
        raise BadInput(f"{shape.source} is no GGUF file: llama.cpp runs GGUF files only")


def _refused(shape: ModelShape, options: LlamaOptions, layout: Cells, where: Placement, era: Era) -> None:
    """Combinations at which the engine stops, or aborts in an assertion, as b10068 and b10434 were seen to.

    ``src/llama-context.cpp``: ``output_reserve`` (a row of results for each slot), ``graph_reserve`` (a ubatch is
    rounded up to a multiple of the slots), ``resolve_fused_ops``; ``llama-graph.cpp``, ``build_pooling``.
    """
    probed = not era.quant_v_settles and quantized(options.cache_type_v) and options.flash_attn == "auto"
    if probed and not compute.flash_attention(shape, options, where, era, layout):
        raise BadInput(
            f"--cache-type-v {options.cache_type_v}: this build turns flash attention off here, because it would run on"
            " another device than its block, and a quantized V cache needs it: give --flash-attn on"
        )
    if not era.outputs_per_slot:
        return
    embeds = options.embeddings or options.reranking
    if options.batch_size < layout.slots:
        option = "ubatch-size" if embeds and options.batch_size == options.ubatch_size else "batch-size"
        raise BadInput(
            f"--{option} {options.batch_size} with {layout.slots} slots: llama.cpp aborts unless a batch has a token "
            f"for each slot: give --parallel {options.batch_size} or less, or a larger {option}"
        )
    if layout.batch == 1 and not shape.encoder:
        option = "batch-size" if options.batch_size == 1 else "ctx-size"
        raise BadInput(f"--{option} 1: llama-server tries two tokens at once at its start, and aborts: give 2 or more")
    tokens = min(layout.context, layout.ubatch)
    if embeds and compute.pooling(shape, options) == "mean" and tokens % layout.slots:
        raise BadInput(
            f"--pooling mean with a ubatch of {tokens} tokens and {layout.slots} slots: llama.cpp aborts unless the"
            " slots divide the ubatch: change --parallel or --ubatch-size"
        )


def _notes(shape: ModelShape, options: LlamaOptions, layout: Cells, given: Given | None, era: Era) -> Iterable[Note]:
    asked = set(given.given) if given else set()
    fits = era.defaults.fit and _fit_is_on(given)
    trained = shape.context
    if not options.ctx_size and not shape.encoder:
        text = f"ctx-size is not given: the trained context of {trained} tokens is counted"
        if "ctx-size" not in asked and fits:
            text += f"; llama-server lowers it by itself (--fit) where it does not leave {_MARGIN} of the card free"
        yield Note(kind="assumed", bucket="kv", text=text)
    elif trained and layout.per_sequence > trained and not shape.encoder:
        yield Note(
            kind="warning",
            bucket="kv",
            text=f"a context of {layout.per_sequence} tokens is longer than the trained one of {trained}",
        )
    if options.ctx_size and layout.context != options.ctx_size:
        yield Note(
            kind="rule",
            bucket="kv",
            text=f"llama.cpp makes ctx-size {options.ctx_size} into {layout.context}: {layout.slots} slots, each"
            " rounded up to 256 tokens"
            if layout.streams > 1
            else f"llama.cpp rounds ctx-size {options.ctx_size} up to {layout.context}",
        )
    if options.parallel is None and not shape.encoder:
        yield Note(
            kind="assumed",
            bucket="kv",
            text=f"parallel is not given: {layout.slots} slots that share one cache, as llama-server chooses by itself",
        )
    if options.cpu_moe and not shape.experts:
        text = "--cpu-moe moves nothing: the model has no experts"
        yield Note(kind="warning", bucket="experts", text=text)
    moved = options.n_cpu_moe or options.cpu_moe or options.override_tensor
    if moved and fits and options.devices and not options.n_gpu_layers:
        yield Note(
            kind="warning",
            text="with tensors overridden, llama-server's --fit gives up: write n-gpu-layers as well",
        )
    if options.n_gpu_layers is None and options.devices:
        yield Note(kind="assumed", text="n-gpu-layers is not given: all layers are counted on the device")
    if options.cache_ram and not shape.encoder:
        limit = "without limit" if options.cache_ram < 0 else f"up to {options.cache_ram} MiB"
        yield Note(
            kind="rule",
            bucket="kv",
            text=f"not in the sum: the prompt cache, which grows in host memory {limit} as requests come (cache-ram)",
        )


def _fit_is_on(given: Given | None) -> bool:
    kept = given.kept if given else ()
    return "--fit" not in kept or kept[kept.index("--fit") + 1] not in ("off", "0", "false", "disabled")


def _textbook_bytes(options: LlamaOptions) -> float:
    """Bytes per element that a textbook puts in for the cache types: the mean of K and V."""
    return (_TEXTBOOK.get(options.cache_type_k, 0.5) + _TEXTBOOK.get(options.cache_type_v, 0.5)) / 2


def _once(notes: Iterable[Note]) -> tuple[Note, ...]:
    return tuple(dict.fromkeys(notes))
