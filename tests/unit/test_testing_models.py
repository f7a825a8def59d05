"""Tiny models: their files say what their shapes promise."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest

from pytest_vram.errors import BadInput
from pytest_vram.testing import Shape, write_llama, write_qwen3moe


def test_file_is_as_large_as_its_shape(tmp_path: Path) -> None:
    """Tensor sizes follow from the shape, and the same seed writes the same bytes."""
    shape = write_qwen3moe(tmp_path / "a.gguf", seed=3)
    write_qwen3moe(tmp_path / "b.gguf", seed=3)
    write_qwen3moe(tmp_path / "c.gguf", seed=4)
    assert (tmp_path / "a.gguf").read_bytes() == (tmp_path / "b.gguf").read_bytes()
    assert (tmp_path / "a.gguf").read_bytes() != (tmp_path / "c.gguf").read_bytes()
    tensors = gguf.GGUFReader(tmp_path / "a.gguf").tensors
    experts = sum(int(tensor.n_bytes) for tensor in tensors if "_exps" in tensor.name)
    assert experts == shape.layers * shape.expert_bytes


def test_kv_size_follows_the_textbook_formula() -> None:
    """24 layers of 8 heads of 128 at 4096 tokens are 192 MiB in one byte, and 204 MiB in q8_0."""
    shape = Shape(layers=24, heads=8, kv_heads=8, head_size=128)
    assert shape.kv_bytes(4096, 1) == 192 << 20
    assert shape.kv_bytes(4096, 34 / 32) == 204 << 20


def test_each_byte_is_a_token(tmp_path: Path) -> None:
    """The vocabulary is one token per byte, one merged pair and three special tokens."""
    shape = write_llama(tmp_path / "a.gguf")
    field = gguf.GGUFReader(tmp_path / "a.gguf").fields["tokenizer.ggml.tokens"]
    tokens = [bytes(field.parts[index]).decode() for index in field.data]
    assert len(tokens) == len(set(tokens)) == shape.vocabulary == 260
    assert tokens[ord("a")] == "a"
    assert tokens[ord(" ")] == "Ġ"


def test_mixture_without_experts_is_refused(tmp_path: Path) -> None:
    """A shape that cannot be a mixture of experts is bad input."""
    with pytest.raises(BadInput, match="experts"):
        write_qwen3moe(tmp_path / "a.gguf", Shape())
