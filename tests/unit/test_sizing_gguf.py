"""The GGUF header reader: whole files are read as they are, all others end in one message that names the byte."""

from __future__ import annotations

import os
import re
import struct
from pathlib import Path
from typing import Any

import pytest

from pytest_vram.errors import BadModel
from pytest_vram.sizing import gguf
from pytest_vram.testing import recipes, write_qwen3moe
from pytest_vram.testing.sparse import Planned, Typed, header, write_sparse

F32 = Planned("a.weight", (32, 2), "f32")


def start(*, version: int = 3, tensors: int = 0, keys: int = 0) -> bytes:
    return struct.pack("<4sIQQ", b"GGUF", version, tensors, keys)


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def tensor(name: bytes = b"t", dims: tuple[int, ...] = (32,), type_: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, type_, offset)


def parsed(data: bytes) -> gguf.Gguf:
    return gguf.parse(Path("model.gguf"), data)


def message(data: bytes) -> str:
    with pytest.raises(BadModel) as caught:
        parsed(data)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_reads_what_the_gguf_package_reads(tmp_path: Path) -> None:
    """Metadata, arrays and tensors of a whole model agree with the format's own package, field by field."""
    import gguf as package

    path = tmp_path / "m.gguf"
    write_qwen3moe(path)
    theirs, ours = package.GGUFReader(path), gguf.read(path)
    assert [(one.name, one.dims, one.bytes) for one in ours.tensors] == [
        (one.name, tuple(int(size) for size in one.shape), int(one.n_bytes)) for one in theirs.tensors
    ]
    for key, field in theirs.fields.items():
        if key.startswith("GGUF."):
            continue
        value = field.contents()
        if isinstance(value, list):
            assert ours.length(key) == len(value)
            assert list(ours.array(key)) == value
        else:
            assert ours.metadata[key] == value
    assert ours.file_bytes == path.stat().st_size
    assert ours.files == (path,)


def test_every_kind_of_value_is_read(tmp_path: Path) -> None:
    """Numbers of all widths, booleans, texts; short arrays of numbers at once, others when asked for."""
    values: dict[str, Any] = {
        "u8": Typed(255, "u8"),
        "i8": Typed(-1, "i8"),
        "u16": Typed(65535, "u16"),
        "i16": Typed(-2, "i16"),
        "u32": 7,
        "i32": -7,
        "u64": 1 << 40,
        "i64": -(1 << 40),
        "f32": 0.5,
        "f64": Typed(0.25, "f64"),
        "yes": True,
        "text": "grüße",
        "numbers": [1, -2, 3],
        "fractions": [0.5, 0.25],
        "flags": [True, False],
        "long": list(range(5000)),
        "texts": ["a", "", "c" * 300],
        "nothing": [],
    }
    write_sparse(tmp_path / "m.gguf", values, [])
    found = gguf.read(tmp_path / "m.gguf")
    for key, value in values.items():
        wanted = value.value if isinstance(value, Typed) else value
        if key in ("long", "texts"):
            assert key not in found.metadata
            assert found.array(key) == tuple(wanted)
            assert found.length(key) == len(wanted)
        else:
            assert found.metadata[key] == (tuple(wanted) if isinstance(wanted, list) else wanted)
    assert found.length("absent") == 0
    assert found.array("absent") == ()


@pytest.mark.parametrize(
    "lengths", [[0] * 300, [96, 97] * 200, [96] * 300, [255, 256, 257, 70000], [*range(97)] * 6, [5] * 1000]
)
def test_arrays_of_texts_are_passed_exactly(tmp_path: Path, lengths: list[int]) -> None:
    """What follows an array of texts is found, whatever their lengths: short, long, none."""
    texts = ["ä"[: size % 2] + "x" * (size - 2 * (size % 2)) if size > 2 else "x" * size for size in lengths]
    write_sparse(tmp_path / "m.gguf", {"texts": texts, "after": 42}, [F32])
    found = gguf.read(tmp_path / "m.gguf")
    assert found.metadata["after"] == 42
    assert found.length("texts") == len(lengths)
    assert found.array("texts") == tuple(texts)


def test_the_last_text_of_a_step_may_have_any_length(tmp_path: Path) -> None:
    """What comes after a step of 256 texts is found whatever the length of the last of them."""
    for size in range(100):
        texts = ["x" * length for length in (*[5] * 255, size, 7)]
        write_sparse(tmp_path / "m.gguf", {"texts": texts, "after": size}, [])
        assert gguf.read(tmp_path / "m.gguf").metadata["after"] == size


@pytest.mark.parametrize("place", [0, 255, 256, 511])
def test_a_text_longer_than_any_file_ends_the_reading(place: int) -> None:
    """A length of 2 to the power of 63 among many short ones is damage, wherever it stands."""
    lengths = [1 << 63 if index == place else 0 for index in range(600)]
    data = start(keys=1) + text(b"k") + struct.pack("<IIQ600Q", 9, 8, 600, *lengths)
    assert "damaged at byte" in message(data)


def test_short_arrays_of_numbers_are_decoded_at_once(tmp_path: Path) -> None:
    """4096 entries are, one more is not."""
    write_sparse(tmp_path / "m.gguf", {"short": [7] * 4096, "long": [7] * 4097}, [])
    found = gguf.read(tmp_path / "m.gguf")
    assert found.metadata["short"] == (7,) * 4096
    assert "long" not in found.metadata
    assert found.array("long") == (7,) * 4097


def test_texts_full_of_what_looks_like_lengths_are_passed_exactly(tmp_path: Path) -> None:
    """Zeros and small bytes within texts are text."""
    texts = ["\0" * 8 + chr(size) + "\0" * 20 for size in range(1, 100)]
    write_sparse(tmp_path / "m.gguf", {"texts": texts, "after": 42}, [])
    assert gguf.read(tmp_path / "m.gguf").metadata["after"] == 42


@pytest.mark.parametrize("version", [2, 3])
def test_versions_2_and_3_are_read(tmp_path: Path, version: int) -> None:
    """The two versions in use differ in nothing that matters here."""
    path = recipes.llama().write(tmp_path / "m.gguf", version=version)
    assert gguf.read(path).version == version


def test_parts_of_a_split_model_are_followed(tmp_path: Path) -> None:
    """All tensors, in order, and all files count."""
    whole = recipes.llama()
    path = whole.write(tmp_path / "m.gguf", split=3)
    found = gguf.read(path)
    assert [one.name for one in found.tensors] == [one.name for one in whole.tensors]
    assert [file.name for file in found.files] == [f"m-0000{part}-of-00003.gguf" for part in (1, 2, 3)]
    assert found.file_bytes == sum(file.stat().st_size for file in found.files)
    assert found.metadata["general.architecture"] == "llama"


def test_a_missing_part_is_named(tmp_path: Path) -> None:
    """Half a download says what to fetch."""
    path = recipes.llama().write(tmp_path / "m.gguf", split=3)
    (tmp_path / "m-00002-of-00003.gguf").unlink()
    with pytest.raises(BadModel, match=r"m-00002-of-00003\.gguf is missing: .* is a model in 3 parts"):
        gguf.read(path)


def test_a_later_part_names_the_first(tmp_path: Path) -> None:
    """The metadata is in the first part only."""
    recipes.llama().write(tmp_path / "m.gguf", split=2)
    with pytest.raises(BadModel, match=r"part 1 \(from 0\) of 2 of a split model: name m-00001-of-00002\.gguf"):
        gguf.read(tmp_path / "m-00002-of-00002.gguf")


def test_a_renamed_first_part_cannot_be_followed(tmp_path: Path) -> None:
    """The other parts are found by name, so the name matters."""
    path = recipes.llama().write(tmp_path / "m.gguf", split=2)
    path.rename(tmp_path / "renamed.gguf")
    with pytest.raises(BadModel, match=r"its name must end in -00001-of-00002\.gguf"):
        gguf.read(tmp_path / "renamed.gguf")


def test_a_part_of_another_model_is_noticed(tmp_path: Path) -> None:
    """Two models whose parts were mixed up hold too many or too few tensors, or the same twice."""
    path = recipes.llama(layers=3).write(tmp_path / "m.gguf", split=2)
    other = recipes.llama(layers=6).write(tmp_path / "o.gguf", split=2).with_name("o-00002-of-00002.gguf")
    other.rename(tmp_path / "m-00002-of-00002.gguf")
    with pytest.raises(BadModel, match="hold a tensor of the same name|but the first promises"):
        gguf.read(path)


def test_a_tensor_in_two_parts_is_noticed(tmp_path: Path) -> None:
    """A copy of the first part under the second's name and number holds the same tensors."""
    about: dict[str, Any] = {"split.count": Typed(2, "u16"), "split.tensors.count": Typed(2, "i32")}
    for part in (0, 1):
        path = tmp_path / f"m-0000{part + 1}-of-00002.gguf"
        write_sparse(path, {**about, "split.no": Typed(part, "u16")}, [F32])
    with pytest.raises(BadModel, match="hold a tensor of the same name: they are not of one model"):
        gguf.read(tmp_path / "m-00001-of-00002.gguf")


def test_parts_that_changed_places_are_noticed(tmp_path: Path) -> None:
    """A part says which one it is."""
    path = recipes.llama().write(tmp_path / "m.gguf", split=3)
    second, third = (tmp_path / f"m-0000{part}-of-00003.gguf" for part in (2, 3))
    second.rename(tmp_path / "aside")
    third.rename(second)
    (tmp_path / "aside").rename(third)
    with pytest.raises(BadModel, match=r"says it is part 2 \(from 0\) of its model, but by its name it is 1"):
        gguf.read(path)


def test_a_download_that_was_cut_short_is_said_to_be(tmp_path: Path) -> None:
    """Both lengths are in the message; one byte less is enough, and a sparse file of full length is whole."""
    path = recipes.llama().write(tmp_path / "m.gguf")
    size = path.stat().st_size
    gguf.read(path)
    os.truncate(path, size - 1)
    with pytest.raises(
        BadModel, match=rf"is {size - 1} bytes long, its tensors end at {size}: the download was cut short"
    ):
        gguf.read(path)


def test_every_shorter_file_is_refused_with_a_place() -> None:
    """Cut anywhere, a header ends in one message with the place, or the two lengths."""
    data, length = header({"a": 1, "t": ["x", "yy"], "n": [1, 2], "s": "text"}, [F32])
    data = data.ljust(length, b"\0")
    parsed(data)
    for size in range(4, length):
        assert "byte" in message(data[:size])


def test_an_unknown_type_is_not_guessed(tmp_path: Path) -> None:
    """Its number is kept in words, its size is not known, and the tensors after it are."""
    data = start(tensors=2) + tensor(b"new", (64,), 99) + tensor(b"old", (32,), 0, 96)
    found = parsed(data.ljust(4096, b"\0"))
    assert [(one.type, one.known, one.bytes) for one in found.tensors] == [("type 99", False, 0), ("f32", True, 128)]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (start(version=1), "version 1, which llama.cpp has dropped"),
        (start(version=4), "version 4; known are 2 and 3"),
        (struct.pack(">4sIQQ", b"GGUF", 3, 0, 0), "big-endian GGUF file"),
        (start()[:3], "is not a GGUF file"),
        (start()[:6], "damaged at byte 4: the version takes 4 bytes, but only 2 are left"),
        (start(keys=1 << 62), "damaged at byte 16: 4611686018427387904 metadata keys"),
        (start(tensors=1 << 62), "damaged at byte 8: 4611686018427387904 tensors"),
        (start(keys=1) + struct.pack("<Q", 1 << 63) + bytes(9), "metadata key 0 is 9223372036854775808 bytes long"),
        (start(keys=1) + text(b"") + bytes(9), "byte 24: metadata key 0 is empty"),
        (start(keys=2) + 2 * (text(b"k") + struct.pack("<IB", 0, 1)), "byte 38: the metadata key 'k' comes twice"),
        (
            start(keys=1) + text(b"k") + struct.pack("<I", 13) + bytes(9),
            "byte 33: the metadata key 'k' has the unknown type 13",
        ),
        (start(keys=2) + 2 * (text(b"k") + struct.pack("<IIQ", 9, 8, 0)), "byte 49: the metadata key 'k' comes twice"),
        (start(keys=1) + text(b"k") + struct.pack("<IIQ", 9, 9, 0), "byte 37: the array 'k' holds arrays"),
        (
            start(keys=1) + text(b"k") + struct.pack("<IIQ", 9, 77, 0),
            "byte 37: the array 'k' has the unknown entry type 77",
        ),
        (start(keys=1) + text(b"k") + struct.pack("<IIQ", 9, 4, 1 << 61), "byte 49: the array 'k' takes"),
        (
            start(keys=1) + text(b"k") + struct.pack("<IIQ", 9, 8, 1 << 61),
            "byte 49: the array 'k' has 2305843009213693952 texts",
        ),
        (
            start(keys=1) + text(b"k") + struct.pack("<IIQQQ", 9, 8, 2, 1 << 63, 0),
            "a text of the array 'k' is longer than the rest|ends after 1 of 2 texts",
        ),
        (start(keys=1) + text(b"k") + struct.pack("<IQ", 8, 1 << 63), "byte 45: the text of 'k' takes"),
        (
            start(keys=1) + text(b"general.alignment") + struct.pack("<II", 4, 48),
            "general.alignment is 48, not a power",
        ),
        (start(keys=1) + text(b"general.alignment") + struct.pack("<II", 4, 0), "general.alignment is 0, not a power"),
        (
            start(keys=1) + text(b"general.alignment") + struct.pack("<IB", 7, 1),
            "general.alignment is True, not a power",
        ),
        (
            start(tensors=1) + text(b"n" * 64) + bytes(32),
            "byte 24: the name of tensor 0 is 64 bytes long; 63 is the most",
        ),
        (start(tensors=1) + tensor(dims=(1, 1, 1, 1, 1)), "byte 33: tensor 't' has 5 dimensions; 4 is the most"),
        (start(tensors=1) + tensor(dims=(1 << 62, 4)), "more than can be counted"),
        (start(tensors=1) + tensor(dims=(1 << 63,)), "more than can be counted"),
        (
            start(tensors=1) + tensor(dims=(33,), type_=8),
            "a row of tensor 't' has 33 elements, not a multiple of q8_0's 32",
        ),
        (
            start(tensors=1) + tensor(offset=32) + bytes(999),
            "byte 49: tensor 't' is said to be at 32, but belongs at 0",
        ),
        (start(tensors=2) + tensor(b"a") + tensor(b"a", offset=128) + bytes(999), "the tensor 'a' comes twice"),
        (start(tensors=1) + tensor(), "is 57 bytes long, its tensors end at 192"),
        (start(tensors=1) + tensor(dims=(1 << 60,)), "its tensors end at 4611686018427387968"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else str(len(value)),
)
def test_damage_is_named_with_its_place(data: bytes, words: str) -> None:
    """Each kind of damage has one message of one sentence."""
    assert re.search(words, message(data))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty: a download may have been cut short"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "a Git LFS pointer: run `git lfs pull`"),
        (b"PK\x03\x04" + bytes(40), "a zip archive, such as a torch checkpoint"),
        (b"<!DOCTYPE html><html>", "a web page or JSON: the download failed"),
        (b'{"error": "not found"}', "a web page or JSON: the download failed"),
        (b"ggml" + bytes(20), "the format before GGUF"),
        (b"FUGG" + bytes(20), "its bytes swapped"),
        (struct.pack("<Q", 20) + b'{"a": {"dtype": "F32"}}', "safetensors: convert it to GGUF"),
        (bytes(4096), "nothing but zeros"),
        (b"\xff\xd8\xff\xe0" + bytes(20), "it starts with ff d8 ff e0"),
    ],
)
def test_what_is_no_model_is_said_to_be(tmp_path: Path, content: bytes, words: str) -> None:
    """The first bytes tell what was downloaded instead."""
    (tmp_path / "m.gguf").write_bytes(content)
    with pytest.raises(BadModel) as caught:
        gguf.read(tmp_path / "m.gguf")
    assert words in str(caught.value)


def test_no_file_no_folder_no_pipe(tmp_path: Path) -> None:
    """A missing file, a folder, a pipe, a device and a path that cannot be are refused at once."""
    (tmp_path / "in.gguf").touch()
    os.mkfifo(tmp_path / "pipe")
    for path, words in (
        (tmp_path / "absent.gguf", "does not exist"),
        (tmp_path, "is a folder, not a GGUF file; it holds in.gguf: name the file"),
        (tmp_path / "pipe", "is not a regular file"),
        (Path("/dev/null"), "is not a regular file"),
        (Path("/proc/self/mem"), "cannot be read|is empty"),
        (Path("a\0b"), "is not a path"),
        (tmp_path / "in.gguf" / "x", "cannot be read: Not a directory"),
    ):
        with pytest.raises(BadModel, match=words):
            gguf.read(path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read(tmp_path: Path) -> None:
    """The reason of the system is in the message."""
    path = recipes.llama().write(tmp_path / "m.gguf")
    path.chmod(0)
    with pytest.raises(BadModel, match="cannot be read: Permission denied"):
        gguf.read(path)


def test_an_array_of_a_file_that_changed_since(tmp_path: Path) -> None:
    """Asking for an array of a file that was replaced ends in a message, too."""
    path = recipes.llama().write(tmp_path / "m.gguf")
    found = gguf.read(path)
    path.write_bytes(start())
    with pytest.raises(BadModel):
        found.array("tokenizer.ggml.tokens")
    path.unlink()
    with pytest.raises(BadModel, match="does not exist"):
        found.array("tokenizer.ggml.tokens")


def test_texts_that_are_no_utf_8_are_shown() -> None:
    """A token may be half a character: it is read, and shown with its bytes."""
    data = start(keys=1) + text(b"k\xff") + struct.pack("<I", 8) + text(b"a\xfe")
    assert dict(parsed(data).metadata) == {"k\\xff": "a\\xfe"}


def test_a_tensor_without_elements_takes_nothing() -> None:
    """llama.cpp accepts one; so does this."""
    found = parsed(start(tensors=1) + tensor(dims=(0, 5)) + bytes(64))
    assert found.tensors[0].bytes == 0


def test_a_huge_sparse_file_of_empty_texts_is_refused_soon(tmp_path: Path) -> None:
    """A file of many GB may claim texts without end; counting stops at what no model has."""
    path = tmp_path / "m.gguf"
    path.write_bytes(start(keys=1) + text(b"k") + struct.pack("<IIQ", 9, 8, 1 << 32))
    os.truncate(path, 1 << 36)
    with pytest.raises(BadModel, match="no model has so many"):
        gguf.read(path)


@pytest.mark.parametrize("at_once", [1, 7, 64, 4096])
def test_a_file_is_read_the_same_in_pieces_of_any_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    """What lies across the end of a piece is read whole; texts, long and short, are passed exactly."""
    words = ["x" * (index % 130) for index in range(1500)]
    values: dict[str, Any] = {"words": words, "numbers": list(range(3000)), "long": "y" * 9000, "last": 7}
    path = write_sparse(tmp_path / "m.gguf", values, [F32])[0]
    monkeypatch.setattr(gguf, "_READ_AT_ONCE", at_once)
    monkeypatch.setattr(gguf, "_READ_AFTER_JUMP", at_once)
    found, wanted = gguf.read(path), gguf.parse(path, path.read_bytes())
    assert found == wanted
    assert found.array("words") == tuple(words)
    assert found.metadata["last"] == 7


def test_a_file_that_shrinks_while_it_is_read_ends_in_a_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A download that starts anew under the reader is an error of the file, and no signal that ends the process."""
    path = write_sparse(tmp_path / "m.gguf", {"words": ["x" * 40] * 50_000}, [F32])[0]
    assert path.stat().st_size > 2 << 20
    read = gguf._pread

    def shrinking(handle: int, count: int, at: int) -> bytes:
        found = read(handle, count, at)
        os.truncate(path, 5000)
        return found

    monkeypatch.setattr(gguf, "_pread", shrinking)
    with pytest.raises(BadModel, match="became shorter while it was read"):
        gguf.read(path)


def test_what_is_passed_over_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrays of numbers and data of tensors, however long, cost nothing."""
    path = write_sparse(tmp_path / "m.gguf", {"scores": [0.5] * 2_000_000}, [Planned("a", (1 << 30,), "f32")])[0]
    read, counts = gguf._pread, []

    def counting(handle: int, count: int, at: int) -> bytes:
        counts.append(count)
        return read(handle, count, at)

    monkeypatch.setattr(gguf, "_pread", counting)
    assert gguf.read(path).length("scores") == 2_000_000
    assert sum(counts) < 2 << 20
