"""Recipes with the dimensions of well-known models, as their published files have them; no weights, no vocabulary.

A vocabulary is a number only here (``tokenizer="none"``), so that a file takes kilobytes; llama.cpp sizes it all the
same. ``tokenizer="bytes"`` writes one of the right length.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType

from pytest_vram.errors import BadInput
from pytest_vram.testing import recipes
from pytest_vram.testing.recipes import Recipe, Tokenizer, Types

# Q4_K_M, roughly: what matters is that embedding, output and the rest differ.
Q4 = Types(matrices="q4_k", output="q6_k")


def _smollm2_135m(types: Types, tokenizer: Tokenizer) -> Recipe:
    return recipes.llama(
        layers=30,
        embedding=576,
        heads=9,
        kv_heads=3,
        head_size=64,
        feed_forward=1536,
        vocabulary=49152,
        context=8192,
        tied=True,
        types=types,
        tokenizer=tokenizer,
    )


def _llama3_8b(types: Types, tokenizer: Tokenizer) -> Recipe:
    return recipes.llama(
        layers=32,
        embedding=4096,
        heads=32,
        kv_heads=8,
        head_size=128,
        feed_forward=14336,
        vocabulary=128256,
        context=131072,
        types=types,
        tokenizer=tokenizer,
    )


def _llama3_70b(types: Types, tokenizer: Tokenizer) -> Recipe:
    return recipes.llama(
        layers=80,
        embedding=8192,
        heads=64,
        kv_heads=8,
        head_size=128,
        feed_forward=28672,
        vocabulary=128256,
        context=131072,
        types=types,
        tokenizer=tokenizer,
    )


def _qwen3_4b(types: Types, tokenizer: Tokenizer) -> Recipe:
    return recipes.llama(
        "qwen3",
        layers=36,
        embedding=2560,
        heads=32,
        kv_heads=8,
        head_size=128,
        feed_forward=9728,
        vocabulary=151936,
        context=40960,
        tied=True,
        types=types,
        tokenizer=tokenizer,
    )


def _qwen3_30b_a3b(types: Types, tokenizer: Tokenizer) -> Recipe:
    return recipes.qwen3moe(
        layers=48,
        embedding=2048,
        heads=32,
        kv_heads=4,
        head_size=128,
        experts=128,
        experts_used=8,
        expert_feed_forward=768,
        vocabulary=151936,
        context=40960,
        types=types,
        tokenizer=tokenizer,
    )


def _qwen3_235b_a22b(types: Types, tokenizer: Tokenizer) -> Recipe:
    return recipes.qwen3moe(
        layers=94,
        embedding=4096,
        heads=64,
        kv_heads=4,
        head_size=128,
        experts=128,
        experts_used=8,
        expert_feed_forward=1536,
        vocabulary=151936,
        context=40960,
        types=types,
        tokenizer=tokenizer,
    )


def _gemma3_4b(types: Types, tokenizer: Tokenizer) -> Recipe:
    return recipes.gemma(
        layers=34,
        embedding=2560,
        heads=8,
        kv_heads=4,
        head_size=256,
        feed_forward=10240,
        window=1024,
        vocabulary=262144,
        context=131072,
        types=types,
        tokenizer=tokenizer,
    )


def _gemma3_12b(types: Types, tokenizer: Tokenizer) -> Recipe:
    return recipes.gemma(
        layers=48,
        embedding=3840,
        heads=16,
        kv_heads=8,
        head_size=256,
        feed_forward=15360,
        window=1024,
        vocabulary=262144,
        context=131072,
        types=types,
        tokenizer=tokenizer,
    )


def _gemma3_27b(types: Types, tokenizer: Tokenizer) -> Recipe:
    return recipes.gemma(
        layers=62,
        embedding=5376,
        heads=32,
        kv_heads=16,
        head_size=128,
        feed_forward=21504,
        window=1024,
        vocabulary=262144,
        context=131072,
        types=types,
        tokenizer=tokenizer,
    )


def _deepseek_v3(types: Types, tokenizer: Tokenizer) -> Recipe:
    return recipes.deepseek2(
        layers=61,
        embedding=7168,
        heads=128,
        query_rank=1536,
        kv_rank=512,
        rope=64,
        nope=128,
        value=128,
        feed_forward=18432,
        leading_dense=3,
        experts=256,
        experts_used=8,
        expert_feed_forward=2048,
        shared_experts=1,
        router_bias=True,
        vocabulary=129280,
        context=163840,
        types=types,
        tokenizer=tokenizer,
    )


def _mamba_2_8b(types: Types, tokenizer: Tokenizer) -> Recipe:
    return recipes.mamba(
        layers=64,
        embedding=2560,
        state=16,
        conv=4,
        dt_rank=160,
        vocabulary=50280,
        context=1048576,
        types=types,
        tokenizer=tokenizer,
    )


REAL: MappingProxyType[str, Callable[[Types, Tokenizer], Recipe]] = MappingProxyType(
    {
        "SmolLM2-135M": _smollm2_135m,
        "Llama-3-8B": _llama3_8b,
        "Llama-3-70B": _llama3_70b,
        "Qwen3-4B": _qwen3_4b,
        "Qwen3-30B-A3B": _qwen3_30b_a3b,
        "Qwen3-235B-A22B": _qwen3_235b_a22b,
        "Gemma3-4B": _gemma3_4b,
        "Gemma3-12B": _gemma3_12b,
        "Gemma3-27B": _gemma3_27b,
        "DeepSeek-V3": _deepseek_v3,
        "Mamba-2.8B": _mamba_2_8b,
    }
)


def real(name: str, *, types: Types = Q4, tokenizer: Tokenizer = "none") -> Recipe:
    """The recipe of a model by its name, one of ``REAL``.

    :raises BadInput: it is none of them.
    """
    make = REAL.get(name)
    if make is None:
        raise BadInput(f"{name!r} is not a shape with a name: known are {', '.join(REAL)}")
    return make(types, tokenizer)
