"""Headers of safetensors files: names, types, dimensions and exact bytes of every tensor, without reading a weight.

A file begins with the length of its header as a little-endian 64-bit number, then a JSON object, then the data
(https://github.com/huggingface/safetensors, "Format"). Nothing in a header is believed before it is checked against
the file's size and against itself.
"""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import Any

import msgspec

from pytest_vram.errors import BadModel
from pytest_vram.sizing.hf_config import load_json, regular
from pytest_vram.sizing.shape import Tensor

#: The format's own limit on a header.
LARGEST_HEADER = 100_000_000
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_LARGEST_INDEX = 64 << 20
_MOST_DIMENSIONS = 64
# Bits of one element (safetensors 0.8, ``tensor.rs``: ``Dtype::bitsize``), and four-bit integers that tools write.
BITS = {
    "BOOL": 8,
    "F4": 4,
    "I4": 4,
    "U4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "I64": 64,
    "U64": 64,
    "F64": 64,
    "C64": 64,
}
# Files that lie beside a model's weights and are not part of what is loaded.
_NOT_WEIGHTS = ("consolidated", "adapter_model", "optimizer", "training_args", "original")


class Weights(msgspec.Struct, frozen=True, kw_only=True):
    """The weights of a folder.

    :ivar tensors: of all files, each file's in the order of its data. :ivar files: paths. :ivar file_bytes: summed.
    """

    tensors: tuple[Tensor, ...] = ()
    files: tuple[str, ...] = ()
    file_bytes: int = 0


def read_header(path: Path) -> tuple[Tensor, ...]:
    """The tensors of one file.

    :raises BadModel: a file that is truncated, is not of this format, or contradicts itself.
    """
    try:
        size = regular(path).st_size
        with path.open("rb") as file:
            start = file.read(8)
            if len(start) < 8:
                raise _bad(path, f"has {size} bytes, too few for a header")
            length = int.from_bytes(start, "little")
            if length > size - 8 or length > LARGEST_HEADER:
                hint = " (it is a Git LFS pointer: fetch the real file)" if start == b"version " else ""
                raise _bad(path, f"states a header of {length} bytes at offset 0, and {size - 8} follow{hint}")
            raw = file.read(length)
    except OSError as error:
        raise BadModel(f"{path} cannot be read: {error.strerror or error}.") from None
    if len(raw) < length:
        raise _bad(path, f"ends at offset {8 + len(raw)} inside its header")
    try:
        header = msgspec.json.decode(raw)
    except (msgspec.DecodeError, RecursionError, ValueError) as error:
        raise _bad(path, f"has a header at offset 8 that is not JSON: {error}") from None
    if not isinstance(header, dict):
        raise _bad(path, "has a header at offset 8 that is not an object")
    header.pop("__metadata__", None)
    placed = [_entry(path, name, entry, size - 8 - length) for name, entry in header.items()]
    placed.sort(key=lambda item: item[0])
    end = 0
    for begin, tensor in placed:
        if begin < end:
            raise _bad(path, f"lets tensor {tensor.name!r} overlap the one before it at offset {begin}")
        if begin > end:  # as tensor.rs: Metadata::validate; also what a name that comes twice leaves
            raise _bad(path, f"leaves {begin - end} bytes before tensor {tensor.name!r} to no tensor")
        end = begin + tensor.bytes
    if end != size - 8 - length:
        raise _bad(path, f"holds {size - 8 - length} bytes of data, and its tensors take {end}")
    return tuple(tensor for _, tensor in placed)


def _entry(path: Path, name: str, entry: Any, available: int) -> tuple[int, Tensor]:
    """One tensor of a header with the offset of its data."""
    if not isinstance(entry, dict):
        raise _bad(path, f"describes tensor {name[:80]!r} by something that is not an object")
    shape, offsets, dtype = entry.get("shape"), entry.get("data_offsets"), entry.get("dtype")
    if not isinstance(dtype, str):
        raise _bad(path, f"gives tensor {name[:80]!r} no dtype")
    if not isinstance(shape, list) or len(shape) > _MOST_DIMENSIONS or not all(_is_size(item) for item in shape):
        raise _bad(path, f"gives tensor {name[:80]!r} a shape that is not a list of sizes")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_is_size(item) for item in offsets):
        raise _bad(path, f"gives tensor {name[:80]!r} data_offsets that are not two offsets")
    begin, end = offsets
    if not begin <= end <= available:
        raise _bad(path, f"places tensor {name[:80]!r} at {begin} to {end} of {available} bytes of data: truncated?")
    bits = BITS.get(dtype)
    tensor = Tensor(
        name=name,
        dims=tuple(reversed(shape)),
        type=dtype.lower(),
        bytes=end - begin,
        known=bits is not None,
    )
    if bits is not None and tensor.elements * bits != 8 * (end - begin):
        raise _bad(
            path, f"gives tensor {name[:80]!r} {end - begin} bytes, and its shape {shape} of {dtype} needs others"
        )
    return begin, tensor


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 62


def _bad(path: Path, trouble: str) -> BadModel:
    return BadModel(f"{path} {trouble}; it is damaged or not a safetensors file.")


def read_folder(folder: Path) -> Weights | None:
    """The weights of a model folder; ``None`` where it holds no safetensors at all.

    :raises BadModel: several files without an index, a file that the index names and that is missing, an index that
        points out of the folder or names tensors that are not there.
    """
    index = folder / INDEX
    if index.exists():
        return _indexed(folder, index)
    found = sorted(path for path in folder.glob("*.safetensors") if not path.name.startswith(_NOT_WEIGHTS))
    single = folder / SINGLE
    if single.exists():
        found = [single]
    if not found:
        return None
    if len(found) > 1:
        raise BadModel(
            f"{folder} holds {len(found)} safetensors files ({found[0].name}, {found[1].name}, …) and no {INDEX} that "
            "says what belongs to the model: fetch the index as well."
        )
    return _of_files(found, None, folder)


def _indexed(folder: Path, index: Path) -> Weights:
    content = load_json(index, _LARGEST_INDEX)
    weight_map = content.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise BadModel(f"{index} has no weight_map, so it does not say where any tensor is.")
    names: dict[str, Path] = {}
    for tensor, name in weight_map.items():
        if not isinstance(name, str):
            raise BadModel(f"{index} maps {tensor[:80]!r} to something that is not a file name.")
        if name not in names:
            names[name] = folder / _inside(index, name)
    missing = [name for name, path in names.items() if not path.exists()]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise BadModel(f"{index} names {missing[0]}{more}, which {folder} does not hold: fetch it.")
    return _of_files([names[name] for name in sorted(names)], weight_map, folder)


def _inside(index: Path, name: str) -> PurePosixPath:
    """A file name of an index, refused where it points out of the folder."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "\\" in name or "\0" in name or not path.parts or len(name) > 512:
        raise BadModel(f"{index} names {name[:80]!r}, which is not a file of its folder.")
    return path


def _of_files(files: list[Path], weight_map: dict[str, Any] | None, folder: Path) -> Weights:
    tensors: list[Tensor] = []
    for path in files:
        found = read_header(path)
        if weight_map is not None:
            name = path.relative_to(folder).as_posix()
            # A shard may hold tensors that the index does not use; those are not loaded.
            here = {tensor.name for tensor in found}
            lacking = next((key for key, file in weight_map.items() if file == name and key not in here), None)
            if lacking is not None:
                raise BadModel(f"{folder / INDEX} places {lacking[:80]!r} in {name}, which does not hold it.")
            found = tuple(tensor for tensor in found if tensor.name in weight_map)
        tensors.extend(found)
    return Weights(
        tensors=tuple(tensors),
        files=tuple(str(path) for path in files),
        file_bytes=sum(path.stat().st_size for path in files),
    )
