"""Compute buffers as predicted, against what dry runs of b10068 and b10434 printed for settings that once were wrong."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pytest_vram.errors import BadInput
from pytest_vram.sizing import compute, eras, estimating, llama_cpp, llama_options, placement
from pytest_vram.sizing.options import CURRENT, Era, LlamaOptions
from pytest_vram.testing import attention_recipes, hybrid_recipes, recipes
from pytest_vram.testing.real_shapes import real
from pytest_vram.testing.recipes import Recipe, Types

MIB = 1 << 20
B10068, _ = eras.era_of(10068)
Q4 = Types(matrices="q4_k", output="q6_k")


def gpt_oss() -> Recipe:
    """Its 20 B: 24 blocks of 32 experts, attention sinks, biases."""
    return attention_recipes.gpt_oss(
        layers=24,
        embedding=2880,
        heads=64,
        kv_heads=8,
        head_size=64,
        experts=32,
        experts_used=4,
        expert_feed_forward=2880,
        vocabulary=201088,
        context=131072,
        types=Q4,
    )


def jamba() -> Recipe:
    """16 blocks of Mamba, two of them with attention, every other one with experts."""
    return hybrid_recipes.jamba(
        layers=16,
        embedding=4096,
        heads=32,
        kv_heads=(0, 0, 0, 0, 8, 0, 0, 0) * 2,
        feed_forward=14336,
        state=16,
        dt_rank=256,
        experts=16,
        experts_used=2,
        vocabulary=65536,
        context=262144,
        types=Q4,
    )


def qwen3next() -> Recipe:
    """24 blocks, three of four a gated delta net, 128 experts in each."""
    return hybrid_recipes.qwen3next(
        layers=24,
        embedding=2048,
        heads=16,
        kv_heads=2,
        head_size=256,
        state=128,
        key_heads=16,
        value_heads=32,
        experts=128,
        experts_used=10,
        expert_feed_forward=512,
        shared_feed_forward=512,
        vocabulary=151936,
        context=262144,
        types=Q4,
    )


def lfm2() -> Recipe:
    """16 blocks of short convolutions and attention in no regular order."""
    return hybrid_recipes.lfm2(
        layers=16,
        embedding=2048,
        heads=32,
        kv_heads=(0, 0, 8, 0, 0, 8, 0, 0, 8, 0, 8, 0, 8, 0, 8, 0),
        feed_forward=8192,
        vocabulary=65536,
        context=128000,
        types=Q4,
    )


def deci() -> Recipe:
    """8 blocks of DeciLM: some without attention, one without a feed-forward."""
    return attention_recipes.deci(
        layers=8,
        embedding=4096,
        heads=(32, 0, 32, 32, 0, 32, 32, 32),
        kv_heads=(8, 0, 0, 4, 0, 8, 8, 2),
        head_size=128,
        feed_forward=(14336, 2048, 14336, 0, 4096, 14336, 14336, 14336),
        vocabulary=128256,
        context=131072,
        types=Q4,
    )


def nomic() -> Recipe:
    """An encoder of 12 blocks."""
    return attention_recipes.bert(
        "nomic-bert",
        layers=12,
        embedding=768,
        heads=12,
        feed_forward=3072,
        vocabulary=30522,
        context=8192,
        types=Q4,
    )


def familiar(name: str) -> Callable[[], Recipe]:
    """The shape of a model of this name."""
    return lambda: real(name, types=Q4)


OF_44032 = {"ctx_size": 44032, "parallel": 4}
DEEP = {"ctx_size": 131072, "batch_size": 64, "ubatch_size": 64, "parallel": 2, "kv_unified": True, "kv_offload": False}
LONG = {"ctx_size": 524288, "batch_size": 1024, "ubatch_size": 1024, "parallel": 2, "tensor_split": "1,2"}
BLOCKS = {"ctx_size": 32768, "parallel": 1, "override_tensor": r"blk\.[0-3]\.=CPU"}

PRINTED: list[tuple[Callable[[], Recipe], Era, dict[str, Any], dict[str, float]]] = [
    # The weights of the chosen experts are not divided by their sum: what lay between was counted as room.
    (gpt_oss, CURRENT, {**OF_44032, "n_cpu_moe": 1}, {"gpu0": 98.26}),
    (gpt_oss, CURRENT, {**OF_44032, "n_cpu_moe": 12}, {"gpu0": 120.76, "host": 90.27}),
    (gpt_oss, B10068, {**OF_44032, "n_cpu_moe": 12}, {"gpu0": 120.76, "host": 90.27}),
    # All rows go through the last block, but not in b10068.
    (gpt_oss, CURRENT, {**OF_44032, "n_cpu_moe": 23}, {"gpu0": 78.88}),
    (gpt_oss, B10068, {**OF_44032, "n_cpu_moe": 23}, {"gpu0": 53.26}),
    # Sinks on the host turn flash attention off in b10068.
    (gpt_oss, CURRENT, BLOCKS, {"gpu0": 115.13, "host": 125.14}),
    (gpt_oss, B10068, BLOCKS, {"gpu0": 4223.63, "host": 4212.77}),
    (gpt_oss, B10068, {**BLOCKS, "flash_attn": "on"}, {"gpu0": 129.63, "host": 129.64}),
    # Flash attention that ends off finds a V that was laid out for it, and turns a copy of it.
    (jamba, CURRENT, DEEP, {"gpu0": 23.01, "host": 1314.50}),
    (jamba, B10068, DEEP, {"gpu0": 23.01, "host": 1314.50}),
    # Blocks of attention never follow each other.
    (lfm2, CURRENT, {"ctx_size": 81920, "parallel": 8, "kv_offload": False}, {"gpu0": 56.13, "host": 750.01}),
    # What tells states apart is copied once for all blocks.
    (jamba, CURRENT, {"ctx_size": 8192, "parallel": 1, "n_cpu_moe": 4}, {"gpu0": 192.07, "host": 192.04}),
    (jamba, CURRENT, {"ctx_size": 8192, "parallel": 1, "n_cpu_moe": 16}, {"gpu0": 108.10, "host": 192.04}),
    # The first norm is listed before the mixer.
    (qwen3next, CURRENT, {"ctx_size": 65536, "parallel": 2, "n_cpu_moe": 12}, {"gpu0": 120.03, "host": 110.26}),
    (qwen3next, CURRENT, {**LONG, "n_gpu_layers": 21, "n_cpu_moe": 24}, {"gpu0": 624.0, "host": 684.02}),
    # Pooling reserves the logits of all tokens, and embeddings those of tokens before these are rounded up.
    (familiar("Qwen3-4B"), CURRENT, {"ctx_size": 32768, "pooling": "last"}, {"gpu0": 301.75, "host": 42.01}),
    (familiar("Gemma3-4B"), B10068, {"ctx_size": 32768, "pooling": "mean"}, {"gpu0": 517.0, "host": 46.52}),
    (
        familiar("Llama-3-8B"),
        CURRENT,
        {"ctx_size": 8192, "parallel": 13, "batch_size": 33, "embeddings": True},
        {"gpu0": 16.66, "host": 1.28},
    ),
    (qwen3next, CURRENT, {"ctx_size": 131072, "ubatch_size": 100, "reranking": True}, {"gpu0": 83.74}),
    (qwen3next, CURRENT, {"ctx_size": 131072, "ubatch_size": 100, "embeddings": True}, {"gpu0": 59.52}),
    (nomic, CURRENT, {"ctx_size": 8192, "parallel": 1, "n_gpu_layers": 2}, {"gpu0": 7.25, "host": 21.50}),
    (nomic, CURRENT, {"ctx_size": 8192, "embeddings": True, "flash_attn": "off"}, {"gpu0": 22.01, "host": 4.01}),
    # An override of the embeddings takes their copy for the output as well.
    (
        familiar("Gemma3-4B"),
        CURRENT,
        {"ctx_size": 78848, "batch_size": 512, "parallel": 4, "override_tensor": "token_embd=CPU", "embeddings": True},
        {"gpu0": 94.77, "host": 522.0},
    ),
    # A block without a feed-forward hands on what came in.
    (
        deci,
        B10068,
        {"ctx_size": 16384, "n_gpu_layers": 1, "override_tensor": "norm=RPC0"},
        {"gpu0": 72.0, "host": 116.01},
    ),
    (
        deci,
        B10068,
        {"ctx_size": 16384, "n_gpu_layers": 0, "override_tensor": "attn=RPC0"},
        {"gpu0": 1184.0, "host": 1098.01},
    ),
]


@pytest.mark.parametrize(
    ("recipe", "era", "options", "printed"),
    PRINTED,
    ids=lambda value: ",".join(f"{name}={one}" for name, one in value.items()) if isinstance(value, dict) else None,
)
def test_printed_figures(
    recipe: Callable[[], Recipe],
    era: Era,
    options: Mapping[str, Any],
    printed: Mapping[str, float],
    tmp_path: Path,
) -> None:
    """Every figure is met to the digit that the engine printed."""
    devices = "RPC0,RPC1" if "tensor_split" in options else "RPC0"
    model = recipe().write(tmp_path / "model.gguf")
    given: dict[str, Any] = {"n_gpu_layers": 99, **options, "device": devices}
    made = llama_cpp.predict(estimating.load(model), llama_options.options_of(given), era, dry_run=True)
    for label, figure in printed.items():
        found = [
            entry
            for entry in made.entries
            if entry.bucket == "compute" and entry.device == label and entry.detail != "output buffer"
        ]
        assert [round(entry.bytes / MIB, 2) for entry in found] == [pytest.approx(figure, abs=0.0101)]
        assert [entry.at_most for entry in found] == [None]


@pytest.mark.parametrize(
    ("recipe", "era", "options", "said"),
    [
        (
            jamba,
            B10068,
            {"kv_offload": False, "cache_type_k": "q8_0", "cache_type_v": "q8_0"},
            "turns flash attention off",
        ),
        (familiar("Llama-3-8B"), CURRENT, {"batch_size": 2, "parallel": 4}, "--batch-size 2 with 4 slots"),
        (familiar("Llama-3-8B"), CURRENT, {"batch_size": 3}, "--batch-size 3 with 4 slots"),
        (nomic, CURRENT, {"ubatch_size": 3, "parallel": 4, "embeddings": True}, "--ubatch-size 3 with 4 slots"),
        (familiar("Llama-3-8B"), B10068, {"ctx_size": 1}, "--ctx-size 1"),
        (familiar("Llama-3-8B"), CURRENT, {"batch_size": 1, "parallel": 1}, "--batch-size 1"),
        (nomic, CURRENT, {"ubatch_size": 17, "embeddings": True}, "--pooling mean with a ubatch of 17 tokens"),
        (gpt_oss, CURRENT, {"parallel": 3, "embeddings": True, "pooling": "mean"}, "512 tokens and 3 slots"),
    ],
)
def test_what_the_engine_aborts_on(
    recipe: Callable[[], Recipe], era: Era, options: Mapping[str, Any], said: str, tmp_path: Path
) -> None:
    """Settings at which llama.cpp stops at an assertion, or refuses to start, are refused in one sentence."""
    model = recipe().write(tmp_path / "model.gguf")
    given: dict[str, Any] = {"ctx_size": 8192, **options, "device": "RPC0"}
    with pytest.raises(BadInput, match=said):
        estimating.estimate(model, era=era, **given)


@pytest.mark.parametrize(
    ("recipe", "era", "options"),
    [
        (jamba, CURRENT, {"kv_offload": False, "cache_type_k": "q8_0", "cache_type_v": "q8_0"}),
        (lfm2, B10068, {"kv_offload": False, "cache_type_k": "q8_0", "cache_type_v": "q8_0", "flash_attn": "on"}),
        (familiar("Llama-3-8B"), CURRENT, {"batch_size": 4, "parallel": 4}),
        (familiar("Llama-3-8B"), CURRENT, {"ctx_size": 16, "parallel": 32}),
        (familiar("Llama-3-8B"), CURRENT, {"ubatch_size": 1, "parallel": 1}),
        (nomic, CURRENT, {"ubatch_size": 17}),
        (nomic, CURRENT, {"ubatch_size": 18, "parallel": 3, "embeddings": True}),
    ],
)
def test_what_the_engine_takes(
    recipe: Callable[[], Recipe], era: Era, options: Mapping[str, Any], tmp_path: Path
) -> None:
    """Their neighbours, with which it starts, are predicted."""
    model = recipe().write(tmp_path / "model.gguf")
    given: dict[str, Any] = {"ctx_size": 8192, **options, "device": "RPC0"}
    assert estimating.estimate(model, era=era, **given).entries


def test_repeats_are_left_out(tmp_path: Path) -> None:
    """Of blocks that are all alike some stand for the others."""
    model = recipes.llama(layers=40, types=Q4).write(tmp_path / "model.gguf")
    shape = estimating.load(model)
    assert compute.representative(shape, placement.place(shape, LlamaOptions())) == [0, 1, 2, 3, 4, 5, 39]
    # A digit that is none to `int` numbers no block: a tensor of such a name belongs to none.
    other = msgspec.structs.replace(shape.tensors[0], name="blk.².attn_q.weight")
    strange = msgspec.structs.replace(shape, tensors=(*shape.tensors, other))
    assert compute.representative(strange, placement.place(strange, LlamaOptions())) == [0, 1, 2, 3, 4, 5, 39]
