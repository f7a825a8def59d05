"""Writes sparse GGUF files: a header of some kilobytes, and then nothing but a length.

A model of hundreds of GB takes a few blocks of the disk, and llama.cpp's dry run, which looks at headers only, gives
its exact buffers. Small ones boot as well: their weights are zeros. Nothing but the standard library is needed.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, TypeAlias

import msgspec

from pytest_vram.errors import BadInput
from pytest_vram.sizing import ggml

NumberType = Literal["u8", "i8", "u16", "i16", "u32", "i32", "f32", "bool", "u64", "i64", "f64"]

_CODES: dict[str, tuple[int, str]] = {
    "u8": (0, "B"),
    "i8": (1, "b"),
    "u16": (2, "H"),
    "i16": (3, "h"),
    "u32": (4, "I"),
    "i32": (5, "i"),
    "f32": (6, "f"),
    "bool": (7, "?"),
    "u64": (10, "Q"),
    "i64": (11, "q"),
    "f64": (12, "d"),
}
_STRING, _ARRAY = 8, 9


class Typed(msgspec.Struct, frozen=True):
    """A number, or an array of them, of a type that would not be chosen by itself."""

    value: int | float | bool | tuple[int | float | bool, ...]
    type: NumberType


Value: TypeAlias = "int | float | bool | str | Typed | Sequence[int] | Sequence[float] | Sequence[bool] | Sequence[str]"


class Planned(msgspec.Struct, frozen=True):
    """A tensor to be written: its name, its dimensions (the fastest first) and its type."""

    name: str
    dims: tuple[int, ...]
    type: str

    @property
    def bytes(self) -> int:
        """Size of its data."""
        return ggml.tensor_bytes(self.type, self.dims)


def write_sparse(
    path: Path,
    metadata: Mapping[str, Value],
    tensors: Sequence[Planned],
    *,
    split: int = 1,
    version: int = 3,
) -> list[Path]:
    """Write a model whose tensors hold zeros and take no place on the disk.

    Numbers become ``u32`` (``i32`` where negative, ``u64`` where larger), fractions ``f32``, entries of arrays ``i32``
    and ``f32``, as converters write them; :class:`Typed` says otherwise. ``general.alignment`` is obeyed.

    :param split: parts to write, as ``gguf-split`` names them: then ``path`` gives the stem of their names.
    :returns: the files, the first of which is the one to name to an engine.
    :raises BadInput: a tensor's type is unknown, or its rows are not whole blocks.
    """
    align = metadata.get("general.alignment", 32)
    alignment = align if isinstance(align, int) else 32
    if split <= 1:
        _write(path, metadata, tensors, version, alignment)
        return [path]
    stem = path.name.removesuffix(".gguf")
    files = [path.with_name(f"{stem}-{part:05d}-of-{split:05d}.gguf") for part in range(1, split + 1)]
    share = -(-len(tensors) // split)
    for part, file in enumerate(files):
        about = dict(metadata) if part == 0 else {}
        about["split.no"] = Typed(part, "u16")
        about["split.count"] = Typed(split, "u16")
        about["split.tensors.count"] = Typed(len(tensors), "i32")
        if part and "general.alignment" in metadata:
            about["general.alignment"] = alignment
        _write(file, about, tensors[part * share : (part + 1) * share], version, alignment)
    return files


def header(
    metadata: Mapping[str, Value], tensors: Sequence[Planned], *, version: int = 3, alignment: int = 32
) -> tuple[bytes, int]:
    """The bytes before the data, and the length of the whole file."""
    parts = [struct.pack("<4sIQQ", b"GGUF", version, len(tensors), len(metadata))]
    for key, value in metadata.items():
        parts.append(_text(key))
        parts.append(_value(value))
    place = end = 0
    for tensor in tensors:
        number = ggml.type_of(tensor.type).number
        count = len(tensor.dims)
        parts.append(_text(tensor.name))
        parts.append(struct.pack(f"<I{count}QIQ", count, *tensor.dims, number, place))
        end = place + tensor.bytes
        place = -(-end // alignment) * alignment
    start = b"".join(parts)
    begin = -(-len(start) // alignment) * alignment
    return start, (begin + place if tensors else len(start))


def _write(path: Path, metadata: Mapping[str, Value], tensors: Sequence[Planned], version: int, alignment: int) -> None:
    start, length = header(metadata, tensors, version=version, alignment=alignment)
    with path.open("wb") as stream:
        stream.write(start)
        stream.truncate(length)


def _text(text: str) -> bytes:
    encoded = text.encode("utf-8")
    return struct.pack("<Q", len(encoded)) + encoded


def _value(value: Value) -> bytes:
    if isinstance(value, str):
        return struct.pack("<I", _STRING) + _text(value)
    if isinstance(value, Typed):
        number, code = _CODES[value.type]
        if isinstance(value.value, tuple):
            return struct.pack(f"<IIQ{len(value.value)}{code}", _ARRAY, number, len(value.value), *value.value)
        return struct.pack(f"<I{code}", number, value.value)
    if isinstance(value, bool | int | float):
        return _value(Typed(value, _number_type(value)))
    texts = [_text(one) for one in value if isinstance(one, str)]
    if texts:
        return struct.pack("<IIQ", _ARRAY, _STRING, len(texts)) + b"".join(texts)
    entries = tuple(one for one in value if not isinstance(one, str))
    kind: NumberType = "i32"
    if entries and all(isinstance(one, bool) for one in entries):
        kind = "bool"
    elif any(isinstance(one, float) for one in entries):
        kind = "f32"
    return _value(Typed(entries, kind))


def _number_type(value: int | float) -> NumberType:
    if isinstance(value, bool):
        return "bool"
    if isinstance(value, float):
        return "f32"
    if value < 0:
        return "i32" if value >= -(1 << 31) else "i64"
    if value >= 1 << 64:
        raise BadInput(f"{value} is too large for the metadata of a GGUF file")
    return "u32" if value < 1 << 32 else "u64"
