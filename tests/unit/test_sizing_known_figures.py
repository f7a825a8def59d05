"""Figures that real engines printed for real models, and textbook figures, from the shapes alone."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from pytest_vram.ledger import Entry
from pytest_vram.sizing import draft, kv, placement, recurrent, textbook
from pytest_vram.sizing.options import CURRENT, Device, Draft, Era, LlamaOptions
from pytest_vram.sizing.shape import Layer, Mla, ModelShape

MIB = 1 << 20
HOST = LlamaOptions(devices=(), parallel=1)


def attention(row: int, *, window: int = 0, heads: int = 8, indexer: int = 0) -> Layer:
    """A block whose K and V rows have ``row`` elements each."""
    return Layer(
        heads=heads,
        kv_heads=heads,
        key_length=row // heads,
        value_length=row // heads,
        k_row=row,
        v_row=row,
        window=window,
        indexer_row=indexer,
    )


def latent(indexer: int = 0) -> Layer:
    """A block of DeepSeek's attention: 512 latent elements and 64 with positions for all heads."""
    return Layer(heads=128, kv_heads=1, key_length=576, value_length=512, k_row=576, indexer_row=indexer)


DEEPSEEK = Mla(query_rank=1536, kv_rank=512, rope=64, nope=128, value=128)


def model(
    *layers: Layer, mla: Mla | None = None, extra: Sequence[Layer] = (), **meta: int | float | str | bool
) -> ModelShape:
    """A model of these blocks, without tensors."""
    windowed = sum(layer.window > 0 for layer in layers)
    return ModelShape(
        source="model.gguf",
        format="gguf",
        architecture="llama",
        layers=layers,
        extra_layers=len(extra),
        extra_blocks=tuple(extra),
        context=131072,
        mla=mla,
        swa_pattern=f"{windowed} of {len(layers)}" if windowed else "",
        meta=dict(meta),
    )


def cache(shape: ModelShape, options: LlamaOptions, era: Era = CURRENT) -> list[Entry]:
    """The predicted cache."""
    return kv.kv_cache(shape, options, placement.place(shape, options), era)


def mib(entries: Sequence[Entry]) -> float:
    """Their sum in MiB."""
    return sum(entry.bytes for entry in entries) / MIB


def of_kind(entries: Sequence[Entry], kind: str) -> list[Entry]:
    """Entries of one kind of cache."""
    return [entry for entry in entries if entry.detail.startswith(kind)]


def configured(context: int, **values: object) -> LlamaOptions:
    """Options on the host, one slot unless said otherwise."""
    return LlamaOptions(**{"devices": (), "parallel": 1, "ctx_size": context, **values})  # type: ignore[arg-type]


GPT_OSS = model(*(attention(512, window=128 if block % 2 == 0 else 0) for block in range(24)))


@pytest.mark.parametrize(
    ("ubatch", "cells", "windows", "total"), [(512, 768, 18.0, 3090.0), (2048, 2304, 54.0, 3126.0)]
)
def test_the_ubatch_widens_the_window(ubatch: int, cells: int, windows: float, total: float) -> None:
    """gpt-oss-20b at 131072 tokens printed 18 and 54 MiB of window cells for a ubatch of 512 and 2048."""
    found = cache(GPT_OSS, configured(131072, ubatch_size=ubatch))
    assert mib(found) == total
    assert mib(of_kind(found, "window")) == windows
    assert f" of {cells} cells" in of_kind(found, "window")[0].detail


def test_four_devices_with_a_tiny_window() -> None:
    """gpt-oss-20b at 8192 tokens of q8_0 with a ubatch of 128 printed 102 and 3.19 MiB."""
    options = configured(8192, ubatch_size=128, cache_type_k="q8_0", cache_type_v="q8_0")
    found = cache(GPT_OSS, options)
    assert mib(of_kind(found, "all tokens")) == 102.0
    assert mib(of_kind(found, "window")) == 3.1875
    assert " of 256 cells" in of_kind(found, "window")[0].detail


def test_a_window_is_never_longer_than_the_context() -> None:
    """Gemma-2-2B with four slots at 8192 tokens: the windows of 4096 are cut to 8192 cells, 832 MiB in all."""
    shape = model(*(attention(1024, window=4096 if block % 2 == 0 else 0) for block in range(26)))
    found = cache(shape, configured(8192, parallel=None))
    assert mib(found) == 832.0
    assert " of 8192 cells" in of_kind(found, "window")[0].detail


@pytest.mark.parametrize(
    ("context", "slots", "cells", "states"),
    [(1 << 20, 4, 17408.0, 201.0), (262144, 2, 4352.0, 100.5), (262144, 1, 4352.0, 50.25)],
)
def test_a_hybrid_with_a_million_tokens(context: int, slots: int, cells: float, states: float) -> None:
    """A 9B hybrid with 8 attention blocks of q8_0 printed 17408 MiB for a million tokens, and states per slot."""
    # 24 gated delta nets, states of 50.25 MiB for one slot: 548864 f32 elements each.
    delta = Layer(state_r=24576, state_s=524288)
    blocks = [attention(1024, heads=4) if block % 4 == 3 else delta for block in range(32)]
    options = configured(context, parallel=slots, kv_unified=True, cache_type_k="q8_0", cache_type_v="q8_0")
    shape = model(*blocks)
    assert mib(cache(shape, options)) == cells
    assert mib(recurrent.states(shape, options, placement.place(shape, options))) == states


@pytest.mark.parametrize(
    ("context", "k_type", "v_type", "total"),
    [
        (65536, "q8_0", "q8_0", 8432.0),
        (65536, "q8_0", "q4_0", 6448.0),
        (196608, "q8_0", "q4_0", 19344.0),
        (65536, "q4_0", "q4_0", 4464.0),
        (131072, "q8_0", "q8_0", 16864.0),
    ],
)
def test_k_and_v_of_different_types(context: int, k_type: str, v_type: str, total: float) -> None:
    """A model of 62 blocks printed five sizes for types and contexts, mixed types among them."""
    shape = model(*[attention(1024)] * 62)
    assert mib(cache(shape, configured(context, cache_type_k=k_type, cache_type_v=v_type))) == total


@pytest.mark.parametrize(
    ("layers", "cells", "k_type", "v_type", "printed"),
    [
        (40, 6656, "f16", "f16", "1040.00"),
        (40, 6656, "q8_0", "q8_0", "552.50"),
        (40, 6656, "q4_0", "q4_0", "292.50"),
        (40, 6656, "q4_0", "q1_0", "182.81"),
        (36, 2560, "f16", "f16", "360.00"),
        (36, 2560, "q8_0", "q8_0", "191.25"),
        (36, 2560, "q8_0", "q1_0", "108.28"),
        (36, 2560, "q4_0", "q4_0", "101.25"),
        (36, 2560, "q4_0", "q1_0", "63.28"),
        (36, 2560, "iq4_nl", "iq4_nl", "101.25"),
    ],
)
def test_every_cache_type_has_its_own_block(layers: int, cells: int, k_type: str, v_type: str, printed: str) -> None:
    """A 24B and an 8B model: the sizes that a change request for q1_0 lists, to the digit."""
    shape = model(*[attention(1024)] * layers)
    assert f"{mib(cache(shape, configured(cells, cache_type_k=k_type, cache_type_v=v_type))):.2f}" == printed


def test_a_million_tokens_of_q4_0_with_windows() -> None:
    """12 whole blocks and 36 with a window of 512: 13824 and 40.5 MiB, 1152 bytes for each cell and block."""
    shape = model(*(attention(1024, window=512 if block % 4 else 0) for block in range(48)))
    found = cache(shape, configured(1 << 20, cache_type_k="q4_0", cache_type_v="q4_0"))
    assert mib(of_kind(found, "all tokens")) == 13824.0
    assert mib(of_kind(found, "window")) == 40.5
    assert of_kind(found, "all tokens")[0].bytes == 12 * 1152 * (1 << 20)


def test_gemma_3_12b() -> None:
    """48 blocks, 8 KV heads of 256, windows of 1024 in five of six: 512 + 480 MiB at 8192 tokens."""
    shape = model(*(attention(2048, window=1024 if block % 6 < 5 else 0) for block in range(48)))
    found = cache(shape, configured(8192))
    assert (mib(of_kind(found, "all tokens")), mib(of_kind(found, "window"))) == (512.0, 480.0)


def test_latent_attention_keeps_one_row() -> None:
    """40 blocks of 576 latent elements at 4096 tokens: 180 MiB, not 360; older builds kept 512 more for V."""
    shape = model(*[latent()] * 40, mla=DEEPSEEK)
    assert mib(cache(shape, configured(4096, cache_type_k="bf16", cache_type_v="bf16"))) == 180.0
    before = Era(mla_latent_only=False)
    v3 = model(*[latent()] * 61, mla=DEEPSEEK)
    assert mib(cache(v3, configured(32768))) == pytest.approx(2196.0, abs=0.5)
    assert mib(cache(v3, configured(32768), before)) == pytest.approx(4148.0, abs=0.5)


@pytest.mark.parametrize(("context", "main", "indexer"), [(768000, 65812.5, 3937.5), (524288, 44928.0, 2688.0)])
def test_sparse_attention_has_a_second_cache(context: int, main: float, indexer: float) -> None:
    """78 latent blocks, 21 of them with an indexer of 128: 65812.5 + 3937.5 MiB at 768000 tokens."""
    shape = model(*(latent(128 if block < 2 or (block - 2) % 4 == 0 else 0) for block in range(78)), mla=DEEPSEEK)
    found = cache(shape, configured(context))
    assert (mib(of_kind(found, "all tokens")), mib(of_kind(found, "indexer"))) == (main, indexer)


def test_the_main_cache_follows_its_layers_over_four_devices() -> None:
    """55, 9, 8 and 6 blocks on four devices: the first has 46406.25 MiB of the main cache at 768000 tokens."""
    shape = model(*[latent()] * 78, mla=DEEPSEEK)
    devices = tuple(Device(label=f"gpu{index}") for index in range(4))
    options = configured(768000, devices=devices, tensor_split=(55.0, 9.0, 8.0, 7.0))
    found = {entry.device: entry.bytes for entry in cache(shape, options)}
    block = 576 * 2 * 768000
    assert [found[f"gpu{index}"] // block for index in range(4)] == [55, 9, 8, 6]
    assert found["gpu0"] / MIB == 46406.25


def test_a_70b_at_16384_tokens() -> None:
    """80 blocks of 8 KV heads of 128 in f16: 5120 MiB."""
    assert mib(cache(model(*[attention(1024)] * 80), configured(16384))) == 5120.0


@pytest.mark.parametrize(
    ("row", "context", "type_name", "total"), [(1024, 262144, "q8_0", 544.0), (512, 4096, "f16", 8.0)]
)
def test_a_prediction_head_adds_one_block(row: int, context: int, type_name: str, total: float) -> None:
    """A built-in prediction head added 544 MiB of q8_0 for one block of 262144 tokens, and 8 MiB of f16 in another."""
    shape = model(*[attention(row)] * 4, extra=[attention(row)], extra_cached=False, extra_alone=True)
    asked = Draft(kind="draft-mtp", cache_type_k=type_name, cache_type_v=type_name)
    options = configured(context, draft=asked, cache_type_k=type_name, cache_type_v=type_name)
    settings = draft.options_of(shape, options, asked)
    blocks = [(4, shape.extra_blocks[0])]
    where = placement.place(shape, settings)
    assert mib(kv.cache_of(shape, blocks, settings, where, CURRENT)) == total
    assert mib(cache(shape, options)) == 4 * total


def test_the_textbook_figures() -> None:
    """24 layers of 8 KV heads of 128 at 4096 in bytes are 192 MiB, and 32 of 128 at 32768 in f16 are 536 870 912 bytes;
    what q8_0 really takes is 204 MiB."""
    small = model(*[attention(1024)] * 24)
    assert textbook.kv(small, 4096, 1) == 192 * MIB
    narrow = model(*[attention(128, heads=1)] * 32)
    assert textbook.kv(narrow, 32768, 2) == 536_870_912
    assert mib(cache(small, configured(4096, cache_type_k="q8_0", cache_type_v="q8_0"))) == 204.0
