"""Sparse models of familiar sizes, for tests of what users see; a few kilobytes each on disk."""

from __future__ import annotations

from pathlib import Path

from pytest_vram.testing import recipes

Q4 = recipes.Types(matrices="q4_k", output="q6_k")
Q8 = recipes.Types(matrices="q8_0")
F16 = recipes.Types(matrices="f16")
WORDS = 128256


def dense_8b(path: Path, types: recipes.Types = Q4) -> Path:
    """The shape of Llama-3-8B: 8.03 B parameters, 131072 tokens; 4.16 GiB of the card at 4 bits."""
    return recipes.llama(
        layers=32,
        embedding=4096,
        heads=32,
        kv_heads=8,
        head_size=128,
        feed_forward=14336,
        vocabulary=WORDS,
        context=131072,
        types=types,
        tokenizer="none",
    ).write(path)


def moe_30b(path: Path, types: recipes.Types = Q4) -> Path:
    """The shape of Qwen3-30B-A3B: 128 experts in each of 48 layers."""
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
        context=262144,
        types=types,
        tokenizer="none",
    ).write(path)


def dense(path: Path, *, layers: int, embedding: int, kv_heads: int, feed_forward: int, types: recipes.Types) -> Path:
    """A dense model with heads of 128 and a trained context of 32768 tokens."""
    return recipes.llama(
        layers=layers,
        embedding=embedding,
        heads=embedding // 128,
        kv_heads=kv_heads,
        head_size=128,
        feed_forward=feed_forward,
        vocabulary=WORDS,
        context=32768,
        types=types,
        tokenizer="none",
    ).write(path)
