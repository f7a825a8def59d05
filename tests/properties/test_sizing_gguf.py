"""The GGUF header reader against files that nobody wrote, and files that were damaged."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from pytest_vram.errors import BadModel
from pytest_vram.sizing import ggml, gguf
from pytest_vram.testing import attention_recipes, hybrid_recipes, recipes
from pytest_vram.testing.sparse import Planned, Typed, header

MOST_ALLOCATED = 64 << 20
NAME = Path("model.gguf")

SEEDS = [
    header(one.metadata, one.tensors)[0]
    for one in (recipes.llama(), attention_recipes.gpt_oss(layers=1), hybrid_recipes.jamba(tokenizer="none"))
]

numbers = st.one_of(
    st.tuples(st.sampled_from(["u8", "u16", "u32", "u64"]), st.integers(0, 255)),
    st.tuples(st.sampled_from(["i8", "i16", "i32", "i64"]), st.integers(-128, 127)),
    st.tuples(st.sampled_from(["f32", "f64"]), st.integers(-9, 9).map(float)),
    st.tuples(st.just("bool"), st.booleans()),
).map(lambda pair: Typed(pair[1], pair[0]))
texts = st.text(st.characters(codec="utf-8"), max_size=60)
values = st.one_of(
    numbers,
    texts,
    st.lists(texts, max_size=80),
    st.lists(st.integers(-(1 << 31), (1 << 31) - 1), max_size=20),
    st.lists(st.booleans(), max_size=20),
)
keys = st.text(st.characters(codec="ascii", exclude_categories=["Cc"]), min_size=1, max_size=30).filter(
    lambda key: key not in ("general.alignment", "split.count")
)
types = st.sampled_from(sorted(ggml.BY_NAME))


@st.composite
def planned(draw: st.DrawFn) -> list[Planned]:
    tensors = []
    for index in range(draw(st.integers(0, 12))):
        type_ = draw(types)
        blocks = draw(st.integers(1, 6))
        more = draw(st.lists(st.integers(1, 5), max_size=3))
        tensors.append(Planned(f"t{index}", (blocks * ggml.BY_NAME[type_].block, *more), type_))
    return tensors


def read_or_refuse(data: bytes) -> gguf.Gguf | None:
    """The result, or none where the reader said in one sentence what is wrong."""
    try:
        return gguf.parse(NAME, data)
    except BadModel as error:
        assert str(error).startswith(str(NAME))
        assert "\n" not in str(error)
        return None


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(keys, values, max_size=12), planned(), st.sampled_from([2, 3]), st.sampled_from([8, 32, 256]))
def test_what_is_written_is_read(
    metadata: dict[str, Any], tensors: list[Planned], version: int, alignment: int
) -> None:
    """Any metadata and any tensors come back as they were written."""
    metadata = {**metadata, "general.alignment": alignment}
    start, length = header(metadata, tensors, version=version, alignment=alignment)
    found = gguf.parse(NAME, start.ljust(length, b"\0"))
    assert [(one.name, one.dims, one.type, one.bytes) for one in found.tensors] == [
        (one.name, one.dims, one.type, one.bytes) for one in tensors
    ]
    for key, value in metadata.items():
        wanted = value.value if isinstance(value, Typed) else value
        if isinstance(wanted, list):
            assert found.length(key) == len(wanted)
            if not wanted or not isinstance(wanted[0], str):
                assert found.metadata[key] == tuple(wanted)
        else:
            assert found.metadata[key] == wanted


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=4096), st.booleans())
@example(b"", False)
def test_random_bytes_are_refused(data: bytes, dressed: bool) -> None:
    """Noise, also behind a right beginning, ends in a result or in one sentence."""
    read_or_refuse(b"GGUF\x03\x00\x00\x00" + data if dressed else data)


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_damaged_headers_are_refused(data: st.DataObject) -> None:
    """Bytes changed, removed or added, and lengths made huge, end in a result or in one sentence; memory stays bounded."""
    changed = bytearray(data.draw(st.sampled_from(SEEDS)))
    for _ in range(data.draw(st.integers(1, 6))):
        place = data.draw(st.integers(0, max(0, len(changed) - 1)))
        kind = data.draw(st.sampled_from(["byte", "huge", "cut", "insert", "remove", "copy"]))
        if kind == "byte":
            changed[place : place + 1] = data.draw(st.binary(min_size=1, max_size=1))
        elif kind == "huge":
            changed[place : place + 8] = data.draw(
                st.sampled_from([1 << 31, 1 << 32, 1 << 62, (1 << 64) - 1])
            ).to_bytes(8, "little")
        elif kind == "cut":
            del changed[place:]
        elif kind == "insert":
            changed[place:place] = data.draw(st.binary(max_size=40))
        elif kind == "remove":
            del changed[place : place + data.draw(st.integers(1, 40))]
        else:
            changed[place:place] = changed[place : place + data.draw(st.integers(1, 200))]
    tracemalloc.start()
    try:
        read_or_refuse(bytes(changed))
        assert tracemalloc.get_traced_memory()[1] < MOST_ALLOCATED
    finally:
        tracemalloc.stop()


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(0, 96) | st.integers(90, 400), max_size=150).map(lambda some: some * 5), st.integers(0, 255)
)
def test_texts_are_passed_one_by_one(lengths: list[int], filler: int) -> None:
    """The quick way past an array of texts and the plain one end at the same byte, whatever the texts are made of."""
    array = b"".join(size.to_bytes(8, "little") + bytes([filler]) * size for size in lengths)
    begin = b"GGUF" + (3).to_bytes(4, "little") + (0).to_bytes(8, "little") + (2).to_bytes(8, "little")
    first = (1).to_bytes(8, "little") + b"a" + (9).to_bytes(4, "little") + (8).to_bytes(4, "little")
    second = (1).to_bytes(8, "little") + b"b" + (4).to_bytes(4, "little") + (4711).to_bytes(4, "little")
    found = gguf.parse(NAME, begin + first + len(lengths).to_bytes(8, "little") + array + second)
    assert found.metadata["b"] == 4711
    assert found.length("a") == len(lengths)
