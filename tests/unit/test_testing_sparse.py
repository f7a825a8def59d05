"""Sparse models: real headers, the promised lengths, and nearly nothing on the disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf as package
import pytest

from pytest_vram.errors import BadInput
from pytest_vram.sizing import gguf
from pytest_vram.testing import attention_recipes, hybrid_recipes, recipes
from pytest_vram.testing.real_shapes import REAL, real
from pytest_vram.testing.sparse import Planned, Typed, write_sparse

RECIPES = {
    "llama": recipes.llama(),
    "qwen2": recipes.llama("qwen2"),
    "qwen3": recipes.llama("qwen3", tied=True),
    "qwen3moe": recipes.qwen3moe(types=recipes.Types(matrices="q8_0", experts="mxfp4")),
    "gemma2": recipes.gemma("gemma2"),
    "gemma3": recipes.gemma(pattern=[True, True, False, True, True, False]),
    "deepseek2": recipes.deepseek2(),
    "mamba": recipes.mamba(),
    "gpt-oss": attention_recipes.gpt_oss(),
    "gemma4": attention_recipes.gemma4(),
    "openelm": attention_recipes.openelm(),
    "deci": attention_recipes.deci(),
    "bert": attention_recipes.bert(),
    "nomic-bert": attention_recipes.bert("nomic-bert"),
    "mamba2": hybrid_recipes.mamba2(),
    "jamba": hybrid_recipes.jamba(),
    "granitehybrid": hybrid_recipes.granite_hybrid(),
    "nemotron_h": hybrid_recipes.nemotron_h(),
    "qwen3next": hybrid_recipes.qwen3next(),
    "lfm2": hybrid_recipes.lfm2(),
    "rwkv7": hybrid_recipes.rwkv7(),
}


@pytest.mark.parametrize("name", RECIPES)
def test_the_gguf_package_reads_what_was_written(tmp_path: Path, name: str) -> None:
    """Every recipe is a whole file to the format's own package, and to our reader the very tensors of the recipe."""
    recipe = RECIPES[name]
    path = recipe.write(tmp_path / "m.gguf")
    theirs = package.GGUFReader(path)
    assert [(one.name, tuple(int(size) for size in one.shape), int(one.n_bytes)) for one in theirs.tensors] == [
        (one.name, one.dims, one.bytes) for one in recipe.tensors
    ]
    assert recipe.architecture == name
    for key, value in recipe.metadata.items():
        found = theirs.fields[key].contents()
        assert found == (list(value) if isinstance(value, tuple | list) else pytest.approx(value))
    ours = gguf.read(path)
    assert [(one.name, one.dims, one.type) for one in ours.tensors] == [
        (one.name, one.dims, one.type) for one in recipe.tensors
    ]


@pytest.mark.parametrize("name", REAL)
def test_real_shapes_take_kilobytes(tmp_path: Path, name: str) -> None:
    """A file of hundreds of GB takes less than a megabyte of the disk."""
    recipe = real(name)
    path = recipe.write(tmp_path / "m.gguf")
    assert path.stat().st_size > recipe.bytes
    assert path.stat().st_blocks * 512 < 1 << 20
    assert sum(one.bytes for one in gguf.read(path).tensors) == recipe.bytes


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("SmolLM2-135M", 134_515_008),
        ("Llama-3-8B", 8_030_261_248),
        ("Llama-3-70B", 70_553_706_496),
        ("Qwen3-4B", 4_022_468_096),
        ("Qwen3-30B-A3B", 30_532_122_624),
        ("Qwen3-235B-A22B", 235_093_634_560),
        ("DeepSeek-V3", 671_026_419_200),
    ],
)
def test_real_shapes_have_the_published_parameters(name: str, parameters: int) -> None:
    """The tensors of a recipe are those of the model: their elements are its published number of parameters."""
    count = 0
    for one in real(name).tensors:
        elements = 1
        for size in one.dims:
            elements *= size
        count += elements
    assert count == parameters


def test_a_vocabulary_of_any_size_can_be_written(tmp_path: Path) -> None:
    """Tokens after the byte-level ones are unused; there are as many as the embedding has rows."""
    path = recipes.llama(vocabulary=1000).write(tmp_path / "m.gguf")
    assert gguf.read(path).length("tokenizer.ggml.tokens") == 1000
    with pytest.raises(BadInput, match="needs a vocabulary of 260 or more"):
        recipes.llama(vocabulary=259)


@pytest.mark.parametrize("alignment", [8, 32, 4096])
def test_alignment_is_obeyed(tmp_path: Path, alignment: int) -> None:
    """Each tensor begins on a multiple of it, to both readers."""
    tensors = [Planned(f"t{index}", (32, index + 1), "q8_0") for index in range(5)]
    write_sparse(tmp_path / "m.gguf", {"general.alignment": alignment}, tensors)
    assert len(gguf.read(tmp_path / "m.gguf").tensors) == 5
    theirs = package.GGUFReader(tmp_path / "m.gguf")
    assert all(int(one.data_offset) % alignment == 0 for one in theirs.tensors)


def test_types_fall_back_where_rows_are_no_whole_blocks() -> None:
    """As in real files: q4_k needs 256 elements in a row, q8_0 32, and f16 takes any."""
    types = recipes.Types(matrices="q4_k", embedding="q6_k", experts="mxfp4")
    assert types.of("blk.0.ffn_up.weight", (256, 5)) == "q4_k"
    assert types.of("blk.0.ffn_up.weight", (96, 5)) == "q8_0"
    assert types.of("blk.0.ffn_up.weight", (20, 5)) == "f16"
    assert types.of("token_embd.weight", (256, 5)) == "q6_k"
    assert types.of("blk.0.ffn_up_exps.weight", (96, 5, 2)) == "mxfp4"


@pytest.mark.parametrize("make", [lambda: Planned("t", (33,), "q8_0").bytes, lambda: Planned("t", (32,), "q9").bytes])
def test_impossible_tensors_are_refused(make: Any) -> None:
    """Half a block and an unknown type cannot be written."""
    with pytest.raises(BadInput):
        make()


def test_numbers_too_large_for_the_format_are_refused(tmp_path: Path) -> None:
    """Metadata has 64 bits."""
    with pytest.raises(BadInput, match="too large"):
        write_sparse(tmp_path / "m.gguf", {"k": 1 << 64}, [])
    write_sparse(tmp_path / "m.gguf", {"k": Typed((1, 2), "u8")}, [])
    assert gguf.read(tmp_path / "m.gguf").metadata["k"] == (1, 2)


def test_layers_and_values_must_match() -> None:
    """Per-layer lists have one value for each layer."""
    with pytest.raises(BadInput, match="3 values for 4 layers"):
        hybrid_recipes.lfm2(kv_heads=(0, 2, 0))
    with pytest.raises(BadInput, match="must be a multiple of 3"):
        attention_recipes.gemma4(shared_kv_layers=2)
    with pytest.raises(BadInput, match="known are SmolLM2-135M"):
        real("GPT-5")
