"""What a multimodal projector (``--mmproj``) costs: its tensors exactly, its compute buffer as a range.

Sources: ``tools/mtmd/clip.cpp`` (all tensors in one buffer on the first GPU, or on the host with
``--no-mmproj-offload``; the size of the image that is tried at start, by kind of projector; the buffer grows when a
larger image comes). The compute range is that of a plain vision transformer; real boots on the CPU confirmed its lower
end, no GPU did.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import isqrt
from pathlib import Path

from pytest_vram.errors import BadModel
from pytest_vram.ledger import Entry
from pytest_vram.sizing import gguf
from pytest_vram.sizing.buffers import held, kind_of
from pytest_vram.sizing.options import LlamaOptions
from pytest_vram.sizing.placement import HOST
from pytest_vram.sizing.shape import Note

_FLOAT = 4
# Kind of projector → tokens along one side of the image tried at start, and patches that one token stands for along a
# side where the file does not say (clip.cpp, set_warmup_n_tokens and n_merge). Kinds that are not here try the image
# size of the file.
_TRIED = {
    "dots3note_v": (46, 1),
    "dots_ocr": (46, 1),
    "exaone4_5": (46, 2),
    "gemma4uv": (16, 3),
    "gemma4v": (16, 3),
    "glm4v": (46, 2),
    "hunyuanvl": (32, 2),
    "kimivl": (16, 1),
    "lightonocr": (16, 1),
    "mimovl": (46, 2),
    "minimax_m3": (16, 2),
    "muse-glimmer": (32, 2),
    "paddleocr": (28, 2),
    "phi4": (16, 1),
    "pixtral": (16, 1),
    "qwen2.5vl_merger": (46, 2),
    "qwen2vl_merger": (46, 2),
    "qwen3vl_merger": (46, 2),
    "youtuvl": (16, 2),
}


def projector(path: Path, options: LlamaOptions) -> tuple[list[Entry], list[Note]]:
    """Entries of the bucket ``projector``: weights, and the compute buffer of the image encoder.

    :raises BadModel: the file is no projector, or cannot be read.
    """
    read = gguf.read(path)
    if read.metadata.get("general.architecture") != "clip":
        raise BadModel(f"{path} is not a projector: --mmproj takes the file that conversion names mmproj-…gguf")
    label = options.devices[0].label if options.mmproj_offload and options.devices else HOST
    kind = kind_of(label, options)
    size = sum(held(one.bytes, one.dims[0] if one.dims else 1, one.type, one.elements, kind) for one in read.tensors)
    notes = []
    entries = [
        Entry(
            bucket="projector",
            device=label,
            bytes=size,
            source="estimate",
            detail=f"{len(read.tensors)} tensors of {path.name}",
        )
    ]
    unknown = [one for one in read.tensors if not one.known]
    if unknown:
        text = f"{path.name}: {len(unknown)} tensors have a type that is not known here and are not counted"
        notes.append(Note(kind="unknown", bucket="projector", text=text))
    patches = image_patches(read.metadata, options.image_max_tokens)
    if patches:
        low, high = compute(read.metadata, patches, flash=options.flash_attn != "off")
        detail = f"image encoder at {patches} patches"
        entries.append(
            Entry(
                bucket="projector",
                device=label,
                bytes=low,
                at_most=high if high > low else None,
                source="estimate",
                detail=detail,
            )
        )
        text = (
            f"the image encoder's buffer is a range for the image of {patches} patches that llama.cpp tries at start; "
            "a larger image makes it grow later (--image-max-tokens bounds that)"
        )
        notes.append(Note(kind="rule", bucket="projector", text=text))
    if read.metadata.get("clip.has_audio_encoder") or not patches:
        text = f"{path.name}: the compute buffer of its encoder{' for sound' if patches else ''} is not counted"
        notes.append(Note(kind="unknown", bucket="projector", text=text))
    return entries, notes


def _number(metadata: Mapping[str, object], key: str, default: int = 0) -> int:
    value = metadata.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 1 << 20 else default


def image_patches(metadata: Mapping[str, object], most_tokens: int | None = None) -> int:
    """Patches of the image that the encoder is tried with at start, 0 where the file has no image encoder.

    :param most_tokens: ``--image-max-tokens``; the image at start does not depend on it, but larger ones cannot come
        where it is lower, so nothing above it is counted.
    """
    patch = _number(metadata, "clip.vision.patch_size")
    if not metadata.get("clip.has_vision_encoder", True) or not patch:
        return 0
    name = metadata.get("clip.projector_type") or metadata.get("clip.vision.projector_type")
    tried = _TRIED.get(name) if isinstance(name, str) else None
    if tried is None:
        return (_number(metadata, "clip.vision.image_size") // patch) ** 2
    side, merge = tried
    merge = _number(
        metadata, "clip.vision.spatial_merge_size", _number(metadata, "clip.vision.projector.scale_factor", merge)
    )
    if most_tokens is not None and most_tokens > 0:
        side = max(side, isqrt(most_tokens))
    return (side * merge) ** 2


def compute(metadata: Mapping[str, object], patches: int, *, flash: bool) -> tuple[int, int]:
    """Least and most bytes of the encoder's compute buffer, all in f32: its largest stage, not their sum.

    Real boots of Gemma 3's encoder on the CPU printed, exactly: with flash attention five rows of the width, or three
    and a hidden layer; without, six rows and the whole matrix of scores. Whether a GPU has flash attention for the
    encoder's head size is not known here, so the upper end is without it, and with a gate in the feed-forward.

    :param flash: whether flash attention is allowed.
    """
    width = _number(metadata, "clip.vision.embedding_length")
    hidden = _number(metadata, "clip.vision.feed_forward_length", 4 * width)
    heads = _number(metadata, "clip.vision.attention.head_count", 1)
    row = _FLOAT * patches
    whole = 6 * width + heads * patches
    least = max(5 * width if flash else whole, 3 * width + hidden)
    return row * least, row * max(whole, 3 * width + 2 * hidden)
