"""What speculative decoding costs: a second context beside the target's, and a second model where one drafts.

Sources: ``common/speculative.cpp`` (``common_base_params_to_speculative``: the target's settings, except for the cache
types and, with a model of its own, its layers on the GPU and its overrides; as many tokens as the target's context),
``llama-model.cpp:create_memory`` (which blocks the cache of a prediction context holds). A real report: 544 MiB for one
block at 262144 tokens (ggml-org/llama.cpp#23472). What a prediction head (MTP) needs to compute is a range here.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from pytest_vram.errors import BadInput
from pytest_vram.ledger import Entry
from pytest_vram.paths import expanded
from pytest_vram.sizing import compute, gguf, gguf_shape, kv, recurrent, stores, weights
from pytest_vram.sizing.options import CURRENT, Draft, Era, LlamaOptions, cells
from pytest_vram.sizing.placement import place
from pytest_vram.sizing.shape import ModelShape, Note

_SHARES_CACHE = ("gemma4-assistant",)  # its blocks read the target's cache (create_memory, layer_share)
_FLOAT = 4


def draft(shape: ModelShape, options: LlamaOptions, era: Era = CURRENT) -> tuple[list[Entry], list[Note]]:
    """Entries of the bucket ``draft``: weights, cache, state and buffers of what drafts. None without drafting.

    :param shape: of the target. :raises BadModel: the draft model cannot be read.
    :raises BadInput: the target has no prediction blocks, or cache types that the engine refuses.
    """
    asked = options.draft
    if asked is None:
        return [], []
    if asked.model is None:
        return _own_head(shape, options, asked, era) if asked.kind == "draft-mtp" else ([], [])
    return _second_model(shape, options, asked, expanded(asked.model, "option model-draft"), era)


def options_of(shape: ModelShape, options: LlamaOptions, asked: Draft) -> LlamaOptions:
    """The settings of the draft's context: the target's, with what is the draft's own."""
    own: dict[str, object] = {}
    if asked.model is not None:
        own = {"n_gpu_layers": asked.n_gpu_layers, "override_tensor": (), "n_cpu_moe": 0, "cpu_moe": False}
    return msgspec.structs.replace(
        options,
        ctx_size=options.ctx_size or cells(options, shape.context, causal=shape.causal).context,
        parallel=options.slots,
        kv_unified=options.unified,
        cache_type_k=asked.cache_type_k,
        cache_type_v=asked.cache_type_v,
        embeddings=False,
        reranking=False,
        pooling=None,
        mmproj=None,
        lora=(),
        draft=None,
        **own,
    )


def _second_model(
    shape: ModelShape, options: LlamaOptions, asked: Draft, path: Path, era: Era
) -> tuple[list[Entry], list[Note]]:
    found = path if path.exists() else stores.locate(str(asked.model))
    own = gguf_shape.shape_of(gguf.read(found))
    settings = options_of(shape, options, asked)
    where = place(own, settings)
    parts = [("weights", entry) for entry in weights.weights(own, settings, where, era)]
    notes = [note for note in (*own.notes, *weights.notes(own, settings, era)) if note.kind != "rule"]
    if own.architecture in _SHARES_CACHE:
        text = f"{own.architecture} reads the target's cache and keeps none of its own"
        notes.append(Note(kind="rule", bucket="draft", text=text))
    else:
        parts += [("cache", entry) for entry in kv.kv_cache(own, settings, where, era)]
        parts += [("state", entry) for entry in recurrent.states(own, settings, where)]
    parts += [("compute", entry) for entry in compute.compute_buffers(own, settings, where, era)]
    named = [_as_draft(entry, f"{what} of {found.name}") for what, entry in parts]
    if asked.ctx_size:
        text = "the draft's own context size is not used any more: it holds as many tokens as the target's"
        notes.append(Note(kind="warning", bucket="draft", text=text))
    return named, [msgspec.structs.replace(note, bucket="draft") for note in notes]


def _as_draft(entry: Entry, detail: str) -> Entry:
    return msgspec.structs.replace(
        entry, bucket="draft", detail=f"{detail}: {entry.detail}" if entry.detail else detail
    )


def _own_head(shape: ModelShape, options: LlamaOptions, asked: Draft, era: Era) -> tuple[list[Entry], list[Note]]:
    if not shape.extra_blocks or shape.architecture == "graniteswitch":
        raise BadInput(
            f"{shape.source} has no prediction blocks (MTP), so 'draft-mtp' cannot draft with it: give a draft model, "
            "or a file that was converted with them"
        )
    settings = options_of(shape, options, asked)
    where = place(shape, settings)
    first = len(shape.layers)
    blocks = [(first + position, layer) for position, layer in enumerate(shape.extra_blocks)]
    if not shape.meta.get("extra_alone"):
        blocks = [*enumerate(shape.layers), *blocks]
    entries = [
        _as_draft(entry, "cache of the prediction blocks") for entry in kv.cache_of(shape, blocks, settings, where, era)
    ]
    least = _FLOAT * (shape.vocabulary + shape.embedding) * options.slots
    for entry in compute.compute_buffers(shape, settings, where, era):
        upper = entry.bytes if entry.at_most is None else entry.at_most
        entries.append(
            Entry(
                bucket="draft",
                device=entry.device,
                bytes=min(least, upper) if entry.device == where.output else 0,
                at_most=upper,
                source="estimate",
                detail="buffers of the prediction context",
            )
        )
    text = "buffers of the prediction context are a range: at least its logits, at most what the whole model needs"
    return entries, [Note(kind="rule", bucket="draft", text=text)]
