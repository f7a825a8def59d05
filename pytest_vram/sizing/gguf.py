"""Reads the header of GGUF files: metadata and the tensor table, never a tensor's data.

Layout and limits follow llama.cpp's own reader (``ggml/src/gguf.cpp`` and ``src/llama-model-loader.cpp``). No length in
the file is trusted: each is checked against what is left of the file before anything is read or allocated, and counts
that no model has are refused, so that any file at all ends soon in a result or in one :class:`BadModel`.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
import struct
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn, TypeAlias

import msgspec

from pytest_vram.errors import BadModel
from pytest_vram.sizing import ggml
from pytest_vram.sizing.shape import Tensor

Value: TypeAlias = "int | float | bool | str | tuple[int, ...] | tuple[float, ...] | tuple[bool, ...]"

MAGIC = b"GGUF"
SPLIT_NAME = re.compile(r"(?P<stem>.+)-(?P<part>\d{5})-of-(?P<parts>\d{5})\.gguf")

_VERSIONS = (2, 3)
_DECODED = 4096  # entries of a numeric array that is decoded at once
_LONG_STRING = 1 << 20  # bytes; a longer text is left out of the metadata
_NAME_LENGTH = 64  # bytes of a tensor's name (ggml.h, GGML_MAX_NAME), its end mark included
_READ_AT_ONCE = 1 << 20
_READ_AFTER_JUMP = 1 << 12
_KEY_LENGTH = 65535  # bytes (GGUF specification)
_DIMENSIONS = 4

# Far above any model, and reached in a second: what bounds the time that a hostile file of many GB can take.
_MOST_KEYS = 1 << 16
_MOST_TENSORS = 1 << 17
_MOST_STRINGS = 1 << 22

_U32 = struct.Struct("<I").unpack_from
_U64 = struct.Struct("<Q").unpack_from
_SMALLEST_KEY = 8 + 1 + 4 + 1
_SMALLEST_TENSOR = 8 + 4 + 4 + 8
_STRING, _ARRAY, _BOOL = 8, 9, 7
_FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_SIZES = {number: struct.calcsize(f"<{code}") for number, code in _FORMATS.items()}
_SCALARS: dict[int, Callable[..., tuple[Any, ...]]] = {
    number: struct.Struct(f"<{code}").unpack_from for number, code in _FORMATS.items()
}
_LARGEST = (1 << 63) - 1


class Array(msgspec.Struct, frozen=True, kw_only=True):
    """Where an array of the metadata is. :ivar type: of its entries, GGUF's number."""

    file: Path
    offset: int
    type: int
    count: int


class Gguf(msgspec.Struct, frozen=True, kw_only=True):
    """The header of a GGUF model.

    :ivar path: the file that was asked for. :ivar version: of the format.
    :ivar metadata: single values and texts (up to 1 MiB), and arrays of numbers of up to 4096 entries as tuples.
    :ivar arrays: where every array is; see :meth:`length` and :meth:`array`.
    :ivar tensors: of all parts, in the order of the files. :ivar files: every part. :ivar file_bytes: their lengths,
        summed.
    """

    path: Path
    version: int
    metadata: Mapping[str, Value]
    arrays: Mapping[str, Array]
    tensors: tuple[Tensor, ...]
    files: tuple[Path, ...]
    file_bytes: int

    def length(self, key: str) -> int:
        """Entries of an array; 0 where there is no such array."""
        found = self.arrays.get(key)
        return 0 if found is None else found.count

    def array(self, key: str) -> tuple[Any, ...]:
        """All entries of an array, numbers or texts; read from the file now. Empty where there is no such array.

        :raises BadModel: the file has changed since, or cannot be read any more.
        """
        found = self.arrays.get(key)
        if found is None:
            return ()
        with _opened(found.file) as data:
            cursor = _Cursor(found.file, data)
            cursor.at = min(found.offset, cursor.size)
            if found.type == _STRING:
                return tuple(cursor.text(f"entry {index} of {key!r}") for index in range(found.count))
            return cursor.numbers(found.type, found.count, key)


def read(path: Path | str) -> Gguf:
    """The header of the GGUF model at ``path``, all parts of a split one.

    :raises BadModel: missing, unreadable, not a GGUF file, damaged, cut short or of a version that is not supported;
        one sentence that names the file and, for damage, the byte.
    """
    path = Path(path)
    first = _read_part(path)
    count = first.metadata.get("split.count", 1)
    if type(count) is not int or count < 0:
        raise BadModel(f"{path} is damaged: its split.count is {str(count)[:40]!r}, not a number of parts")
    if count <= 1:
        return first
    others = _other_parts(path, first, count)
    tensors, size = list(first.tensors), first.file_bytes
    for index, other in enumerate(others, start=1):
        part = _read_part(other)
        if part.metadata.get("split.no") != index:
            number = part.metadata.get("split.no")
            raise BadModel(f"{other} says it is part {number!r} (from 0) of its model, but by its name it is {index}")
        tensors.extend(msgspec.structs.replace(one, part=index) for one in part.tensors)
        size += part.file_bytes
    names = {one.name for one in tensors}
    if len(names) != len(tensors):
        raise BadModel(f"two parts of {path} hold a tensor of the same name: they are not of one model")
    total = first.metadata.get("split.tensors.count", len(tensors))
    if total != len(tensors):
        raise BadModel(
            f"the {count} parts of {path} hold {len(tensors)} tensors, but the first promises {total}: a part is of"
            " another model, or damaged"
        )
    return msgspec.structs.replace(
        first,
        tensors=tuple(tensors),
        files=(path, *others),
        file_bytes=size,
    )


def looks_like(start: bytes) -> str:
    """What a file that begins so is, where it is not a GGUF file: ``it starts with 'version ' (a Git LFS…)``."""
    head = start[:8]
    text = head.decode("ascii", "replace")
    return f"it starts with {repr(text) if text.isascii() and text.isprintable() else head.hex(' ')}{_guess(start)}"


def _guess(start: bytes) -> str:
    if start.startswith(b"version "):
        return " (a Git LFS pointer: run `git lfs pull`)"
    if start.startswith(b"PK"):
        return " (a zip archive, such as a torch checkpoint)"
    if start.lstrip()[:1] in (b"<", b"{"):
        return " (a web page or JSON: the download failed?)"
    if start[:4] in (b"ggml", b"lmgg", b"tjgg", b"fmgg"):
        return " (the format before GGUF: convert it again)"
    if start[:4] == MAGIC[::-1]:
        return " (GGUF with its bytes swapped: convert it again)"
    if start[8:9] == b"{":
        return " (safetensors: convert it to GGUF, or name its folder)"
    if not start.strip(b"\0"):
        return " (nothing but zeros: the download failed?)"
    return ""


def _other_parts(path: Path, first: Gguf, count: int) -> list[Path]:
    """Paths of the second part on (``llama_get_list_splits`` in llama-model-loader.cpp), each of which exists."""
    number = first.metadata.get("split.no", 0)
    name = SPLIT_NAME.fullmatch(path.name)
    if number != 0:
        first_name = f": name {name['stem']}-00001-of-{name['parts']}.gguf" if name else ""
        raise BadModel(f"{path} is part {number} (from 0) of {count} of a split model{first_name}")
    if name is None or int(name["part"]) != 1 or int(name["parts"]) != count:
        raise BadModel(
            f"{path} is the first of {count} parts, so its name must end in -00001-of-{count:05d}.gguf: the others are"
            " found by name"
        )
    others: list[Path] = []
    for part in range(2, count + 1):
        other = path.with_name(f"{name['stem']}-{part:05d}-of-{count:05d}.gguf")
        others.append(other)
        if not os.path.lexists(other):
            raise BadModel(f"{other} is missing: {path} is a model in {count} parts, fetch all of them")
    return others


class _File:
    """Bytes of a file, read where they are asked for. (A mapping would end this process where the file shrinks.)"""

    def __init__(self, path: Path, handle: int, size: int) -> None:
        self.path, self.handle, self.size = path, handle, size

    def read(self, count: int, at: int) -> bytes:
        """:raises BadModel: the file ends before that by now, or cannot be read."""
        found = b""
        try:
            while len(found) < count and (more := _pread(self.handle, count - len(found), at + len(found))):
                found = found + more if found else more
        except OSError as error:
            raise BadModel(f"{self.path} cannot be read: {error.strerror or error}") from None
        if len(found) < count:
            raise BadModel(f"{self.path} became shorter while it was read: try again when it is written")
        return found


def _pread(handle: int, count: int, at: int) -> bytes:
    if hasattr(os, "pread"):
        return os.pread(handle, count, at)
    os.lseek(handle, at, os.SEEK_SET)
    return os.read(handle, count)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[_File]:
    """A regular file, open for reading and closed at the end."""
    try:
        # Asked before it is opened: opening a pipe waits for a writer, opening a device may do something.
        _check_kind(path, path.stat().st_mode)
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    except FileNotFoundError:
        raise BadModel(f"{path} does not exist: correct the path of the model") from None
    except OSError as error:
        raise BadModel(f"{path} cannot be read: {error.strerror or error}") from None
    except ValueError as error:
        raise BadModel(f"{str(path)!r} is not a path: {error}") from None
    try:
        status = os.fstat(handle)
        _check_kind(path, status.st_mode)
        if status.st_size == 0:
            raise BadModel(f"{path} is empty: a download may have been cut short")
        yield _File(path, handle, status.st_size)
    finally:
        os.close(handle)


def _check_kind(path: Path, mode: int) -> None:
    if stat.S_ISDIR(mode):
        inside = sorted(entry.name for entry in path.glob("*.gguf"))[:3]
        hint = f"; it holds {', '.join(inside)}: name the file" if inside else ""
        raise BadModel(f"{path} is a folder, not a GGUF file{hint}")
    if not stat.S_ISREG(mode):
        raise BadModel(f"{path} is not a regular file: name a GGUF file on a disk")


class _Cursor:
    """A place in a file, that refuses to go past its end; a part of the file around it is in memory."""

    def __init__(self, path: Path, data: _File | bytes) -> None:
        self.path = path
        self.file = data if isinstance(data, _File) else None
        self.part = b"" if isinstance(data, _File) else data
        self.begin = 0  # of the part
        self.size = data.size if isinstance(data, _File) else len(data)
        self.at = 0
        self.strings_left = _MOST_STRINGS

    def here(self, count: int) -> int:
        """Where the cursor is in the part that is in memory, after ``count`` bytes from here on, or all up to the end
        of the file, have been read into it."""
        place = self.at - self.begin
        if self.file is None or 0 <= place <= len(self.part) - count:
            return place
        # After a jump over something long, the next thing to look at may be as far away again.
        ahead = _READ_AT_ONCE if place <= len(self.part) else _READ_AFTER_JUMP
        wanted = min(max(count, ahead), self.size - self.at)
        if not (0 <= place <= len(self.part) and len(self.part) - place == wanted):
            self.part, self.begin = self.file.read(wanted, self.at), self.at
            place = 0
        return place

    def fail(self, what: str, at: int | None = None) -> NoReturn:
        raise BadModel(f"{self.path} is damaged at byte {self.at if at is None else at}: {what}")

    def need(self, count: int, what: str) -> None:
        if count > self.size - self.at:
            self.fail(f"{what} takes {count} bytes, but only {self.size - self.at} are left of the file (cut short?)")

    def u32(self, what: str) -> int:
        self.need(4, what)
        place = self.here(4)
        value: int = _U32(self.part, place)[0]
        self.at += 4
        return value

    def u64(self, what: str) -> int:
        self.need(8, what)
        place = self.here(8)
        value: int = _U64(self.part, place)[0]
        self.at += 8
        return value

    def string(self, what: str, most: int | None = None) -> bytes:
        start = self.at
        length = self.u64(f"the length of {what}")
        if most is not None and length > most:
            self.fail(f"{what} is {length} bytes long; {most} is the most", start)
        self.need(length, what)
        place = self.here(length)
        value = self.part[place : place + length]
        self.at += length
        return value

    def text(self, what: str) -> str:
        # Tokens are bytes, and may be halves of a character.
        return self.string(what).decode("utf-8", "backslashreplace")

    def number(self, type_: int, what: str) -> Any:
        self.need(_SIZES[type_], what)
        place = self.here(_SIZES[type_])
        value = _SCALARS[type_](self.part, place)[0]
        self.at += _SIZES[type_]
        return value

    def numbers(self, type_: int, count: int, key: str) -> tuple[Any, ...]:
        self.need(_SIZES[type_] * count, f"the array {_short(key)}")
        place = self.here(_SIZES[type_] * count)
        values = struct.unpack_from(f"<{count}{_FORMATS[type_]}", self.part, place)
        self.at += _SIZES[type_] * count
        return values

    def skip_strings(self, count: int, key: str) -> None:
        """Go past an array of texts.

        Each length says where the next one is, so that every one must be looked at: a vocabulary has 262 144, its
        merges twice that. Most are short, and for these a regular expression takes the steps, 256 at a time, each of
        them exactly as the slow way would; a block with a longer text in it goes the slow way.
        """
        if count > (self.size - self.at) // 8:
            self.fail(
                f"the array {_short(key)} has {count} texts, more than the rest of the file can hold (cut short?)"
            )
        if count > self.strings_left:
            self.fail(f"over {_MOST_STRINGS} texts in the metadata, at {_short(key)}: no model has so many")
        self.strings_left -= count
        last = self.size - 8
        match = _short_strings().match
        left = count
        while left > 0:
            block = min(left, _BLOCK)
            place = self.here(_LONGEST_BLOCK)
            found = match(self.part, place) if block == _BLOCK else None
            if found is not None:
                self.at += found.end() - place
            else:
                for index in range(block):
                    if self.at > last:
                        self.fail(f"the array {_short(key)} ends after {count - left + index} of {count} texts")
                    place = self.here(8)
                    self.at += 8 + _U64(self.part, place)[0]
            left -= block
            if self.at > self.size:
                self.fail(f"a text of the array {_short(key)} is longer than the rest of the file (cut short?)")


_BLOCK = 256
_LONGEST_BLOCK = _BLOCK * (8 + 96)


@cache
def _short_strings() -> re.Pattern[bytes]:
    """Matches 256 texts of up to 96 bytes, each a little-endian length of 8 bytes and as many bytes of anything.

    One way only can match, and the repetition is possessive: it never goes back. Frequent lengths come first.
    """
    lengths = [9, 8, 10, 7, 11, 6, 12, 13, 5, 14, 4, 3, 0, 2, *range(15, 97), 1]
    texts = (b"\\x%02x\\0\\0\\0\\0\\0\\0\\0.{%d}" % (length, length) for length in lengths)
    return re.compile(b"(?s:" + b"|".join(texts) + b"){%d}+" % _BLOCK)


def _read_part(path: Path) -> Gguf:
    """The header of one file."""
    with _opened(path) as data:
        return parse(path, data)


def parse(path: Path, data: _File | bytes) -> Gguf:
    """The header of one file, from its bytes; ``path`` names it in messages. A split model's other parts are not read.

    :raises BadModel: as :func:`read`.
    """
    cursor = _Cursor(path, data)
    version = _version(cursor)
    tensor_count = cursor.u64("the number of tensors")
    key_count = cursor.u64("the number of metadata keys")
    if key_count > min(_MOST_KEYS, (cursor.size - cursor.at) // _SMALLEST_KEY):
        cursor.fail(f"{key_count} metadata keys are more than the file can hold, or than any model has", 16)
    if tensor_count > min(_MOST_TENSORS, (cursor.size - cursor.at) // _SMALLEST_TENSOR):
        cursor.fail(f"{tensor_count} tensors are more than the file can hold, or than any model has", 8)
    metadata, arrays = _metadata(cursor, key_count)
    tensors = _tensors(cursor, tensor_count, _alignment(cursor, metadata, arrays))
    return Gguf(
        path=path,
        version=version,
        metadata=MappingProxyType(metadata),
        arrays=MappingProxyType(arrays),
        tensors=tensors,
        files=(path,),
        file_bytes=cursor.size,
    )


def _version(cursor: _Cursor) -> int:
    place = cursor.here(16)
    start = cursor.part[place : place + 16]
    if start[:4] != MAGIC:
        raise BadModel(f"{cursor.path} is not a GGUF file: {looks_like(start)}")
    cursor.at = 4
    version = cursor.u32("the version")
    if version & 0xFFFF == 0:
        raise BadModel(
            f"{cursor.path} is a big-endian GGUF file (its version reads as {version:#x}), which runs on big-endian"
            " machines only: convert it with gguf's `gguf-convert-endian`"
        )
    if version == 1:
        raise BadModel(f"{cursor.path} is a GGUF file of version 1, which llama.cpp has dropped: convert it again")
    if version not in _VERSIONS:
        raise BadModel(
            f"{cursor.path} says it is a GGUF file of version {version}; known are 2 and 3: it is damaged, or newer"
            " than this program"
        )
    return version


def _metadata(cursor: _Cursor, count: int) -> tuple[dict[str, Value], dict[str, Array]]:
    metadata: dict[str, Value] = {}
    arrays: dict[str, Array] = {}
    for index in range(count):
        start = cursor.at
        raw = cursor.string(f"metadata key {index}", _KEY_LENGTH)
        key = raw.decode("utf-8", "backslashreplace")
        if not key:
            cursor.fail(f"metadata key {index} is empty", start)
        if key in metadata or key in arrays:
            cursor.fail(f"the metadata key {_short(key)} comes twice", start)
        type_ = cursor.u32(f"the type of {_short(key)}")
        if type_ == _ARRAY:
            arrays[key] = found = _skip_array(cursor, key)
            if found.type != _STRING and found.count <= _DECODED:
                after, cursor.at = cursor.at, found.offset
                metadata[key] = cursor.numbers(found.type, found.count, key)
                cursor.at = after
        elif type_ == _STRING:
            length = cursor.u64(f"the length of the text of {_short(key)}")
            cursor.need(length, f"the text of {_short(key)}")
            if length <= _LONG_STRING:
                cursor.at -= 8
                metadata[key] = cursor.text(f"the text of {_short(key)}")
            else:
                cursor.at += length
        elif type_ in _FORMATS:
            metadata[key] = cursor.number(type_, f"the value of {_short(key)}")
        else:
            cursor.fail(f"the metadata key {_short(key)} has the unknown type {type_}", cursor.at - 4)
    return metadata, arrays


def _skip_array(cursor: _Cursor, key: str) -> Array:
    entry = cursor.u32(f"the entry type of {_short(key)}")
    count = cursor.u64(f"the length of {_short(key)}")
    start = cursor.at
    if entry == _STRING:
        cursor.skip_strings(count, key)
    elif entry in _FORMATS:
        cursor.need(count * _SIZES[entry], f"the array {_short(key)}")
        cursor.at += count * _SIZES[entry]
    elif entry == _ARRAY:
        cursor.fail(f"the array {_short(key)} holds arrays, which llama.cpp does not read", start - 12)
    else:
        cursor.fail(f"the array {_short(key)} has the unknown entry type {entry}", start - 12)
    return Array(file=cursor.path, offset=start, type=entry, count=count)


def _alignment(cursor: _Cursor, metadata: Mapping[str, Value], arrays: Mapping[str, Array]) -> int:
    value = metadata.get("general.alignment", 32)
    if "general.alignment" in arrays or type(value) is not int or value <= 0 or value & (value - 1):
        raise BadModel(f"{cursor.path} is damaged: its general.alignment is {value!r}, not a power of two")
    return value


def _tensors(cursor: _Cursor, count: int, alignment: int) -> tuple[Tensor, ...]:
    """The tensor table, each entry checked as llama.cpp does (``gguf_init_from_reader`` in gguf.cpp)."""
    tensors: list[Tensor] = []
    names: set[str] = set()
    offsets: list[tuple[int, int]] = []
    for index in range(count):
        start = cursor.at
        name = cursor.string(f"the name of tensor {index}", _NAME_LENGTH - 1).decode("utf-8", "backslashreplace")
        if name in names:
            cursor.fail(f"the tensor {name!r} comes twice", start)
        names.add(name)
        dims = _dimensions(cursor, name)
        where = cursor.at
        number = cursor.u32(f"the type of tensor {name!r}")
        offset = cursor.u64(f"the place of tensor {name!r}")
        type_ = ggml.TYPES.get(number)
        if type_ is None:
            tensors.append(Tensor(name=name, dims=dims, type=f"type {number}", bytes=0, known=False, offset=offset))
        else:
            if dims[0] % type_.block:
                cursor.fail(
                    f"a row of tensor {name!r} has {dims[0]} elements, not a multiple of {type_.name}'s {type_.block}",
                    where,
                )
            size = dims[0] // type_.block * type_.bytes
            for more in dims[1:]:
                size *= more
            tensors.append(Tensor(name=name, dims=dims, type=type_.name, bytes=size, offset=offset))
        offsets.append((where + 4, offset))
    _check_places(cursor, tensors, offsets, alignment)
    return tuple(tensors)


def _dimensions(cursor: _Cursor, name: str) -> tuple[int, ...]:
    start = cursor.at
    count = cursor.u32(f"the number of dimensions of tensor {name!r}")
    if count > _DIMENSIONS:
        cursor.fail(f"tensor {name!r} has {count} dimensions; {_DIMENSIONS} is the most", start)
    cursor.need(8 * count, f"the dimensions of tensor {name!r}")
    place = cursor.here(8 * count)  # before the part is taken, which it may replace
    dims: tuple[int, ...] = struct.unpack_from(f"<{count}Q", cursor.part, place)
    elements = 1
    for size in dims:
        elements *= size
    if elements > _LARGEST or any(size > _LARGEST for size in dims):
        cursor.fail(f"tensor {name!r} has {' × '.join(map(str, dims))} elements, more than can be counted")
    cursor.at += 8 * count
    return dims or (1,)


def _check_places(cursor: _Cursor, tensors: list[Tensor], offsets: list[tuple[int, int]], alignment: int) -> None:
    """Tensors follow one another without gaps, each on a multiple of the alignment, and end within the file."""
    if not tensors:
        return
    begin = -(-cursor.at // alignment) * alignment
    expected: int | None = 0
    end = 0
    for tensor, (where, offset) in zip(tensors, offsets, strict=True):
        # After a tensor whose type, and with it size, is unknown, the next one's place is taken on trust.
        if offset != expected and (expected is not None or offset % alignment or offset < end):
            cursor.fail(f"tensor {tensor.name!r} is said to be at {offset}, but belongs at {expected or end}", where)
        end = offset + tensor.bytes
        expected = -(-end // alignment) * alignment if tensor.known else None
    if begin + end > cursor.size:
        raise BadModel(
            f"{cursor.path} is {cursor.size} bytes long, its tensors end at {begin + end}: the download was cut short?"
        )


def _short(key: str) -> str:
    """A key as it can be shown in a message."""
    return repr(key if len(key) <= 80 else key[:77] + "…")
