"""What the estimates for transformers, vLLM and SGLang share: their options by name, and weights split over cards."""

from __future__ import annotations

import difflib
import functools
import importlib
import re
from collections.abc import Iterable, Mapping
from typing import TypeVar

import msgspec

from pytest_vram.errors import BadInput
from pytest_vram.ledger import Bucket, Entry
from pytest_vram.sizing import moe
from pytest_vram.sizing.shape import ModelShape, Note, Tensor

_HOMES = {"transformers": "transformers_cache", "vllm": "vllm", "sglang": "sglang"}
_ELEMENTS = {"float32": 4, "float16": 2, "bfloat16": 2, "float": 4, "half": 2}
_FLOATS = {"f32": 4, "f16": 2, "bf16": 2, "f64": 8}
#: Bytes that a card's memory may be stated as, at most (16 TiB).
LARGEST = 1 << 44
# Parts of a model that see or hear, by the names that released checkpoints give them.
_PROJECTOR = re.compile(
    r"(^|\.)(vision_tower|vision_model|visual|vision_encoder|multi_modal_projector|mm_projector|vision_embed_tokens|"
    r"image_newline|audio_tower|audio_encoder|embed_vision|embed_audio|patch_merger|mlp1|vit|connector|"
    r"vision_language_adapter)(\.|$)"
)
_BLOCK = re.compile(r"(?:^|\.)(?:layers|h|blk)\.(\d+)\.")
_EMBEDDING = re.compile(r"embed_tokens(_per_layer)?\.|\bwte\.|word_embeddings\.|tok_embeddings\.")
_OUTPUT = re.compile(r"(^|\.)(lm_head|output)\.")
_KV_PROJECTION = re.compile(r"\.(k_proj|v_proj|key|value)\.")
# Matrices that every card of a tensor-parallel group holds whole.
_WHOLE = re.compile(
    r"norm|router|\.gate\.(weight|bias)$|shared_expert_gate|q_a_proj|kv_a_proj|fused_qkv_a|per_layer|embed_positions"
    r"|indexer|\.g_idx$|o_proj\.bias$|down_proj\.bias$"
)

Wanted = TypeVar("Wanted", bound=msgspec.Struct)


class Split(msgspec.Struct, frozen=True, kw_only=True):
    """How a model is divided over cards.

    :ivar tensor: cards that share each block. :ivar stages: blocks of each pipeline stage; empty: one stage.
    """

    tensor: int = 1
    stages: tuple[int, ...] = ()


@functools.cache
def engine_options(engine: str) -> tuple[str, ...]:
    """Names of the options that an engine's estimate understands, with underscores.

    :raises BadInput: an engine that this is not about.
    """
    if engine not in _HOMES:
        raise BadInput(f"engine {engine!r} has no options here: write one of {', '.join(_HOMES)}.")
    home = importlib.import_module(f"pytest_vram.sizing.{_HOMES[engine]}")
    return tuple(home.Options.__struct_fields__)


def read_options(engine: str, given: Mapping[str, object], wanted: type[Wanted]) -> Wanted:
    """Options as written by a user, checked; text from a command line is converted.

    :raises BadInput: an unknown name (with a near one), or a value that its option does not take.
    """
    names = engine_options(engine)
    found: dict[str, object] = {}
    for written, value in given.items():
        name = written.lstrip("-").replace("-", "_")
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
            hint = f"did you mean {near[0]!r}?" if near else f"known here are {', '.join(names)}."
            raise BadInput(f"{engine} has no option {written!r} that its estimate understands: {hint}")
        if name in found:
            raise BadInput(f"{engine}'s option {name!r} is given twice.")
        if value is not None:
            found[name] = value
    for name, value in found.items():
        try:
            msgspec.convert({name: value}, wanted, strict=False)
        except msgspec.ValidationError as error:
            trouble = re.sub(r" - at `.*`$", "", str(error))
            raise BadInput(
                f"{engine}'s option {name!r} cannot be {value!r}: {trouble[:1].lower()}{trouble[1:]}."
            ) from None
    return msgspec.convert(found, wanted, strict=False)


def loaded_element(shape: ModelShape, dtype: str) -> int:
    """Bytes of one element in the number format that a model is loaded in (``auto``: the checkpoint's own)."""
    if dtype in _ELEMENTS:
        return _ELEMENTS[dtype]
    found = shape.meta.get("dtype_bytes", 2)
    return found if isinstance(found, int) else 2


def as_loaded(tensor: Tensor, element: int, *, convert: bool = True) -> int:
    """Bytes of a tensor after loading: plain matrices are converted to the loaded format, packed ones are not."""
    width = _FLOATS.get(tensor.type)
    if not convert or width is None:
        return tensor.bytes
    return tensor.elements * element


def stage_of(shape: ModelShape, split: Split, tensor: Tensor) -> tuple[int, ...]:
    """Pipeline stages that hold a tensor: a block's own, the first for embeddings, the last for the output.

    A tied embedding table is on both ends. Blocks behind the last one (multi-token prediction) are on none.
    """
    stages = split.stages or (len(shape.layers),)
    last = len(stages) - 1
    block = None if _PROJECTOR.search(tensor.name) else _BLOCK.search(tensor.name)
    if block is None:
        if _EMBEDDING.search(tensor.name):
            return (0, last) if shape.tied and last else (0,)
        if _OUTPUT.search(tensor.name) or ".norm." in tensor.name or tensor.name.startswith("norm."):
            return (last,)
        return (0,)
    index = int(block[1])
    for stage, count in enumerate(stages):
        if index < count:
            return (stage,)
        index -= count
    return ()


def share(shape: ModelShape, tensor: Tensor, tensor_parallel: int, size: int) -> int:
    """Bytes of a tensor on one card of a tensor-parallel group.

    Matrices are divided, K and V projections into no more parts than there are K and V heads; norms, routers and the
    low-rank parts of latent attention are whole on every card (vLLM and SGLang: ``ReplicatedLinear``).
    """
    if tensor_parallel == 1 or _WHOLE.search(tensor.name):
        return size
    if len(tensor.dims) < 2 and not tensor.name.endswith(".bias"):
        return size
    parts = tensor_parallel
    if _KV_PROJECTION.search(tensor.name) and shape.mla is None and shape.kv_heads:
        parts = min(parts, shape.kv_heads)
    return -(-size // parts)


def weight_entries(shape: ModelShape, split: Split, element: int, *, convert: bool = True) -> list[Entry]:
    """Weights, experts and encoders on each card, as loaded in ``element`` bytes."""
    stages = len(split.stages) or 1
    sums: dict[tuple[int, Bucket], int] = {}
    for tensor in shape.tensors:
        size = share(shape, tensor, split.tensor, as_loaded(tensor, element, convert=convert))
        bucket: Bucket = "weights"
        if _PROJECTOR.search(tensor.name):
            bucket = "projector"
        elif shape.experts and moe.is_expert(tensor.name):
            bucket = "experts"
        if _skipped(shape, tensor):
            continue
        for stage in stage_of(shape, split, tensor):
            sums[stage, bucket] = sums.get((stage, bucket), 0) + size
    order: tuple[Bucket, ...] = ("weights", "experts", "projector")
    entries: list[Entry] = []
    for stage in range(stages):
        for rank in range(split.tensor):
            label = f"gpu{stage * split.tensor + rank}"
            entries.extend(
                Entry(bucket=bucket, device=label, bytes=sums[stage, bucket], source="estimate", detail=shape.format)
                for bucket in order
                if sums.get((stage, bucket))
            )
    return entries


def _skipped(shape: ModelShape, tensor: Tensor) -> bool:
    """A copy of the embedding table in the file that tied models do not load."""
    return shape.tied and _OUTPUT.search(tensor.name) is not None and tensor.name.endswith("lm_head.weight")


def unknown(notes: Iterable[Note]) -> tuple[str, ...]:
    """Buckets of which only a lower bound is known."""
    return tuple(dict.fromkeys(note.bucket or "other" for note in notes if note.kind == "unknown"))
