"""ggml's types: sizes as the format has them."""

from __future__ import annotations

import gguf
import pytest

from pytest_vram.errors import BadInput
from pytest_vram.sizing import ggml

# Its package still gives q8_1 two 32-bit fields beside its values; ggml.h made them 16-bit ones.
STALE = {gguf.GGMLQuantizationType.Q8_1}


@pytest.mark.parametrize(
    "type_", [one for one in gguf.GGMLQuantizationType if one not in STALE], ids=lambda one: one.name
)
def test_types_are_those_of_the_gguf_package(type_: gguf.GGMLQuantizationType) -> None:
    """Number, name, block and bytes of every type agree with the package of the format's own makers."""
    one = ggml.TYPES[int(type_)]
    assert (one.block, one.bytes) == gguf.GGML_QUANT_SIZES[type_]
    assert one.name == type_.name.lower()


@pytest.mark.parametrize(
    ("name", "elements", "size"),
    [
        ("f16", 128, 256),
        ("q8_0", 1024, 1088),
        ("q4_0", 1024, 576),
        ("iq4_nl", 32, 18),
        ("q4_K", 256, 144),
        ("q8_1", 32, 36),
    ],
)
def test_row_bytes(name: str, elements: int, size: int) -> None:
    """A row is a whole number of blocks; names are taken in any case."""
    assert ggml.row_bytes(name, elements) == size


def test_a_part_of_a_block_is_refused() -> None:
    """A row of 33 elements cannot be q8_0."""
    with pytest.raises(BadInput, match=r"33 elements cannot be q8_0: its blocks have 32"):
        ggml.row_bytes("q8_0", 33)


def test_an_unknown_type_is_refused() -> None:
    """The message lists what is known."""
    with pytest.raises(BadInput, match=r"'q9_0' is not a tensor type of ggml: known are .*q8_0"):
        ggml.row_bytes("q9_0", 32)


def test_every_cache_type_is_a_type() -> None:
    """What the engine takes for K and V has a size."""
    assert all(name in ggml.BY_NAME for name in ggml.CACHE_TYPES)


@pytest.mark.parametrize(
    ("number", "name"), [(15, "Q4_K_M"), (7, "Q8_0"), (1024 + 15, "Q4_K_M (guessed)"), (99, "file type 99")]
)
def test_file_types_have_the_names_people_use(number: int, name: str) -> None:
    """An unknown one is said to be unknown."""
    assert ggml.file_type_name(number) == name


def test_file_types_are_those_of_the_gguf_package() -> None:
    """Every file type of the package is known."""
    assert {int(one) for one in gguf.LlamaFileType} - {1024} <= set(ggml.FILE_TYPES)
