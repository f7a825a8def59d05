"""ggml's tensor types: how many bytes a row takes, which types a KV cache may have, what file types are called."""

from __future__ import annotations

from types import MappingProxyType

import msgspec

from pytest_vram.errors import BadInput


class Type(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor type. Elements are stored in blocks; a row is a whole number of blocks.

    :ivar number: in files. :ivar name: in lower case. :ivar block: elements of a block. :ivar bytes: size of a block.
    :ivar removed: today's llama.cpp refuses files with it.
    """

    number: int
    name: str
    block: int
    bytes: int
    removed: bool = False


def _table(*rows: tuple[int, str, int, int], removed: bool = False) -> dict[int, Type]:
    return {row[0]: Type(number=row[0], name=row[1], block=row[2], bytes=row[3], removed=removed) for row in rows}


# Numbers: ggml.h, enum ggml_type. Blocks: ggml-common.h, the sizes that its static assertions state. The removed types
# are from the versions that had them: 4 and 5 halved the block of q4_0 and q4_1; 31 to 33 and 36 to 38 only reorder
# the blocks of q4_0 and iq4_nl.
TYPES = MappingProxyType(
    _table(
        (0, "f32", 1, 4),
        (1, "f16", 1, 2),
        (2, "q4_0", 32, 18),
        (3, "q4_1", 32, 20),
        (6, "q5_0", 32, 22),
        (7, "q5_1", 32, 24),
        (8, "q8_0", 32, 34),
        (9, "q8_1", 32, 36),
        (10, "q2_k", 256, 84),
        (11, "q3_k", 256, 110),
        (12, "q4_k", 256, 144),
        (13, "q5_k", 256, 176),
        (14, "q6_k", 256, 210),
        (15, "q8_k", 256, 292),
        (16, "iq2_xxs", 256, 66),
        (17, "iq2_xs", 256, 74),
        (18, "iq3_xxs", 256, 98),
        (19, "iq1_s", 256, 50),
        (20, "iq4_nl", 32, 18),
        (21, "iq3_s", 256, 110),
        (22, "iq2_s", 256, 82),
        (23, "iq4_xs", 256, 136),
        (24, "i8", 1, 1),
        (25, "i16", 1, 2),
        (26, "i32", 1, 4),
        (27, "i64", 1, 8),
        (28, "f64", 1, 8),
        (29, "iq1_m", 256, 56),
        (30, "bf16", 1, 2),
        (34, "tq1_0", 256, 54),
        (35, "tq2_0", 256, 66),
        (39, "mxfp4", 32, 17),
        (40, "nvfp4", 64, 36),
        (41, "q1_0", 128, 18),
        (42, "q2_0", 64, 18),
    )
    | _table(
        (4, "q4_2", 16, 10),
        (5, "q4_3", 16, 12),
        (31, "q4_0_4_4", 32, 18),
        (32, "q4_0_4_8", 32, 18),
        (33, "q4_0_8_8", 32, 18),
        (36, "iq4_nl_4_4", 32, 18),
        (37, "iq4_nl_4_8", 32, 18),
        (38, "iq4_nl_8_8", 32, 18),
        removed=True,
    )
)
BY_NAME = MappingProxyType({one.name: one for one in TYPES.values()})

# What --cache-type-k and --cache-type-v take: common/arg.cpp, kv_cache_types.
CACHE_TYPES = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1")

# general.file_type: llama.h, enum llama_ftype, under the names that people and file names use.
FILE_TYPES = MappingProxyType(
    {
        0: "F32",
        1: "F16",
        2: "Q4_0",
        3: "Q4_1",
        4: "Q4_1, some F16",
        5: "Q4_2",
        6: "Q4_3",
        7: "Q8_0",
        8: "Q5_0",
        9: "Q5_1",
        10: "Q2_K",
        11: "Q3_K_S",
        12: "Q3_K_M",
        13: "Q3_K_L",
        14: "Q4_K_S",
        15: "Q4_K_M",
        16: "Q5_K_S",
        17: "Q5_K_M",
        18: "Q6_K",
        19: "IQ2_XXS",
        20: "IQ2_XS",
        21: "Q2_K_S",
        22: "IQ3_XS",
        23: "IQ3_XXS",
        24: "IQ1_S",
        25: "IQ4_NL",
        26: "IQ3_S",
        27: "IQ3_M",
        28: "IQ2_S",
        29: "IQ2_M",
        30: "IQ4_XS",
        31: "IQ1_M",
        32: "BF16",
        33: "Q4_0_4_4",
        34: "Q4_0_4_8",
        35: "Q4_0_8_8",
        36: "TQ1_0",
        37: "TQ2_0",
        38: "MXFP4 MoE",
        39: "NVFP4",
        40: "Q1_0",
        41: "Q2_0",
    }
)
_GUESSED = 1024


def type_of(name: str) -> Type:
    """The type of this name, in any case.

    :raises BadInput: there is none.
    """
    found = BY_NAME.get(name.lower())
    if found is None:
        raise BadInput(f"{name!r} is not a tensor type of ggml: known are {', '.join(sorted(BY_NAME))}")
    return found


def row_bytes(name: str, elements: int) -> int:
    """Bytes of a row of so many elements (ggml.c, ``ggml_row_size``).

    :raises BadInput: no such type, or the row is not a whole number of its blocks.
    """
    one = type_of(name)
    blocks, rest = divmod(elements, one.block)
    if rest:
        raise BadInput(f"a row of {elements} elements cannot be {one.name}: its blocks have {one.block} elements each")
    return blocks * one.bytes


def tensor_bytes(name: str, dims: tuple[int, ...]) -> int:
    """Bytes of a whole tensor, fastest dimension first (ggml.c, ``ggml_nbytes`` of a contiguous tensor).

    :raises BadInput: no such type, or its rows are not a whole number of blocks.
    """
    size = row_bytes(name, dims[0] if dims else 1)
    for count in dims[1:]:
        size *= count
    return size


def file_type_name(number: int) -> str:
    """``general.file_type`` for people: ``Q4_K_M``; ``file type 99`` where it is unknown."""
    known = FILE_TYPES.get(number & ~_GUESSED)
    if known is None:
        return f"file type {number}"
    return f"{known} (guessed)" if number & _GUESSED else known
