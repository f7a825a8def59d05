"""Files that no model is in: numbers that cannot be, and keys and tensors that contradict each other, are refused."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pytest_vram.errors import BadModel
from pytest_vram.sizing import estimating, gguf, gguf_shape, hf_shape, safetensors, sense
from pytest_vram.sizing.shape import Layer, ModelShape
from pytest_vram.testing import attention_recipes, hybrid_recipes, real_shapes, recipes
from pytest_vram.testing.recipes import Recipe
from pytest_vram.testing.sparse import Planned

RECIPES: list[Callable[[], Recipe]] = [
    recipes.llama,
    recipes.qwen3moe,
    recipes.gemma,
    recipes.deepseek2,
    recipes.mamba,
    attention_recipes.gpt_oss,
    attention_recipes.gemma4,
    attention_recipes.openelm,
    attention_recipes.deci,
    attention_recipes.bert,
    hybrid_recipes.mamba2,
    hybrid_recipes.jamba,
    hybrid_recipes.granite_hybrid,
    hybrid_recipes.nemotron_h,
    hybrid_recipes.qwen3next,
    hybrid_recipes.lfm2,
    hybrid_recipes.rwkv7,
]


def read(folder: Path, recipe: Recipe, keys: dict[str, Any], tensors: tuple[Planned, ...] | None = None) -> ModelShape:
    """The shape of a recipe's file with other keys under its architecture, and other tensors."""
    metadata = {**recipe.metadata, **{f"{recipe.architecture}.{key}": value for key, value in keys.items()}}
    changed = msgspec.structs.replace(recipe, metadata=metadata, tensors=recipe.tensors if tensors is None else tensors)
    return gguf_shape.shape_of(gguf.read(changed.write(folder / "model.gguf")))


@pytest.mark.parametrize("make", RECIPES, ids=lambda make: make.__name__)
def test_sound_models_pass(tmp_path: Path, make: Callable[[], Recipe]) -> None:
    """A file of each architecture as llama.cpp takes it is taken, without a word about its keys."""
    shape = read(tmp_path, make(), {})
    assert not any("the file says" in note.text for note in shape.notes)


@pytest.mark.parametrize("name", sorted(real_shapes.REAL))
def test_real_shapes_pass(tmp_path: Path, name: str) -> None:
    """The dimensions of published models are taken."""
    path = real_shapes.real(name).write(tmp_path / "model.gguf")
    assert gguf_shape.shape_of(gguf.read(path)).layers


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"block_count": 3}, "has 3 blocks by its keys, and no tensor of block 2"),
        ({"block_count": 1}, "of block 1, and 1 blocks by its keys"),
        ({"embedding_length": 0}, "embedding length"),
        ({"embedding_length": 1 << 31}, "more than any model has"),
        ({"attention.head_count": 0}, "its keys ask for 0"),
        ({"attention.head_count_kv": 3}, "cannot share them"),
        ({"attention.head_count_kv": 1 << 31}, "more than any model has"),
        ({"attention.head_count_kv": ["2", "2"]}, "a list of 2 texts"),
        ({"attention.key_length": 0}, "heads of no width"),
        ({"attention.key_length": 1 << 31}, "more than any model has"),
        ({"attention.value_length": 8}, "rows in its tensor 'blk.0.attn_v.weight'"),
        ({"rope.dimension_count": 2}, "rotates 2 elements of a head"),
        ({"expert_used_count": 3}, "3 of its 0 experts are used"),
        ({"expert_count": 1 << 31}, "more than any model has"),
        ({"vocab_size": (1 << 32) - 1}, "vocabulary"),
        ({"vocab_size": 7}, "has a vocabulary of 7, and a table of"),
    ],
    ids=lambda value: next(iter(value.items())).__str__() if isinstance(value, dict) else "",
)
def test_keys_that_contradict_the_tensors_are_refused(tmp_path: Path, keys: dict[str, Any], said: str) -> None:
    """Where llama.cpp would refuse the file, or end in an assertion, there are no figures for it."""
    with pytest.raises(BadModel, match=said) as caught:
        read(tmp_path, recipes.llama(layers=2, tokenizer="none"), keys)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"expert_used_count": 9}, "9 of its 8 experts are used"),
        ({"expert_used_count": 1 << 31}, "more than any model has"),
        ({"expert_used_count": 0}, "none of its 8 experts is used"),
        ({"expert_count": 4}, "4 experts by its keys, and 8 by its tensor"),
        ({"expert_count": 1025}, "llama.cpp takes up to 1024"),
    ],
)
def test_experts_that_cannot_be_are_refused(tmp_path: Path, keys: dict[str, Any], said: str) -> None:
    """No more experts are used than there are, and there are as many as the tensors hold."""
    with pytest.raises(BadModel, match=said):
        read(tmp_path, recipes.qwen3moe(experts=8, experts_used=2, tokenizer="none"), keys)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda tensors: (), "holds no tensors"),
        (lambda tensors: tensors[1:], "has no tensor 'token_embd.weight'"),
        (lambda tensors: tuple(Planned(f"x.{one.name}", one.dims, one.type) for one in tensors), "no tensor"),
        (lambda tensors: (*tensors, Planned("blk.99999999999999999999.attn_q.weight", (32,), "f32")), "of no block"),
        (lambda tensors: (*tensors, Planned("blk.-1.attn_q.weight", (32,), "f32")), "of no block"),
        (lambda tensors: (*tensors, Planned("rope_freqs.weight", (0,), "f32")), "a dimension of 0"),
    ],
    ids=["none", "no table", "other names", "huge block", "negative block", "empty tensor"],
)
def test_tensors_of_no_model_are_refused(
    tmp_path: Path, change: Callable[[tuple[Planned, ...]], tuple[Planned, ...]], said: str
) -> None:
    """A header alone, names that no engine asks for, and tensors of nothing are not sized as if they were a model."""
    recipe = recipes.llama(layers=2, tokenizer="none")
    assert recipe.tensors[0].name == "token_embd.weight"
    with pytest.raises(BadModel, match=said):
        read(tmp_path, recipe, {}, change(recipe.tensors))


def test_a_feed_forward_of_another_width_is_told(tmp_path: Path) -> None:
    """A width that the tensors do not have leaves compute unknown."""
    shape = read(tmp_path, recipes.llama(layers=2, tokenizer="none"), {"feed_forward_length": 1 << 20})
    assert [note.bucket for note in shape.notes if note.kind == "unknown"] == ["compute"]


def test_more_blocks_that_share_a_cache_than_there_are_is_refused(tmp_path: Path) -> None:
    """Shared caches cannot leave less than none."""
    recipe = attention_recipes.gemma4()
    with pytest.raises(BadModel, match="share a cache"):
        read(tmp_path, recipe, {"attention.shared_kv_layers": 1 << 31})


def test_a_state_beyond_counting_is_refused(tmp_path: Path) -> None:
    """Dimensions of a recurrent state that no model has are not multiplied into a figure."""
    with pytest.raises(BadModel, match="more than any model has"):
        read(tmp_path, recipes.mamba(tokenizer="none"), {"ssm.state_size": 1 << 31})
    with pytest.raises(BadModel, match="a cache of"):
        read(tmp_path, recipes.mamba(tokenizer="none"), {"ssm.state_size": 1 << 24})


def test_a_state_of_other_dimensions_is_refused(tmp_path: Path) -> None:
    """A recurrent state is as its tensors are."""
    with pytest.raises(BadModel, match="'blk.0.ssm_a', and its keys ask for"):
        read(tmp_path, recipes.mamba(tokenizer="none"), {"ssm.state_size": 1 << 12})
    with pytest.raises(BadModel, match="'blk.0.ssm_conv1d.weight', and its keys ask for"):
        read(tmp_path, hybrid_recipes.mamba2(tokenizer="none"), {"ssm.conv_kernel": 5})


@pytest.mark.parametrize("value", ["3", -3, 2.0])
def test_a_count_of_parts_that_is_none_is_refused(tmp_path: Path, value: object) -> None:
    """A split model's count is a number of parts, or the file is damaged."""
    recipe = recipes.llama(layers=2, tokenizer="none")
    path = msgspec.structs.replace(recipe, metadata={**recipe.metadata, "split.count": value}).write(
        tmp_path / "m.gguf"
    )
    with pytest.raises(BadModel, match=r"split\.count"):
        gguf.read(path)


def test_bounds_hold_for_every_format() -> None:
    """A shape of another reader is held to the same bounds."""
    sound = ModelShape(source="x", format="config", architecture="X", layers=(Layer(),), embedding=8)
    assert sense.checked(sound) is sound
    for changed in (
        msgspec.structs.replace(sound, layers=()),
        msgspec.structs.replace(sound, layers=(Layer(),) * 10_001),
        msgspec.structs.replace(sound, vocabulary=1 << 40),
        msgspec.structs.replace(sound, layers=(Layer(k_row=1 << 40),)),
    ):
        with pytest.raises(BadModel, match="^x "):
            sense.checked(changed)


# --- Hugging Face ---------------------------------------------------------------------------------------------------

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 320,
    "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
}


def folder(path: Path, config: dict[str, Any], entries: str | None = None, data: int = 0) -> Path:
    """A model folder, with a safetensors file of these entries."""
    (path / "config.json").write_text(json.dumps({**LLAMA, **config}))
    if entries is not None:
        header = entries.encode()
        (path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(data))
    return path


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"num_key_value_heads": 0}, "num_key_value_heads is 0 beside 4 heads"),
        ({"num_key_value_heads": 5}, "num_key_value_heads is 5 beside 4 heads"),
        ({"torch_dtype": "float7"}, "no number format of that name"),
        ({"hidden_size": 1 << 40}, "more than any model has"),
    ],
)
def test_configurations_that_cannot_be_are_refused(tmp_path: Path, config: dict[str, Any], said: str) -> None:
    """What transformers or PyTorch refuse is refused."""
    with pytest.raises(BadModel, match=said):
        hf_shape.read_shape(folder(tmp_path, config))


def test_kinds_of_more_blocks_than_there_are_leave_the_cache_unknown(tmp_path: Path) -> None:
    """A list of kinds that does not fit the number of blocks is told, once."""
    shape = hf_shape.read_shape(folder(tmp_path, {"layer_types": ["full_attention"] * 5}))
    assert [note.bucket for note in shape.notes if note.kind == "unknown"] == ["kv"]


def test_weights_hold_the_blocks_of_the_configuration(tmp_path: Path) -> None:
    """Blocks that no tensor is of are not multiplied into a cache."""
    table = '{"model.layers.1.x":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}'
    assert len(hf_shape.read_shape(folder(tmp_path, {}, table, 4)).layers) == 2
    with pytest.raises(BadModel, match="says 10000 blocks, and the weights hold 2"):
        hf_shape.read_shape(folder(tmp_path, {"num_hidden_layers": 10_000}, table, 4))
    with pytest.raises(BadModel, match="says 2 blocks, and the weights hold 0"):
        hf_shape.read_shape(folder(tmp_path, {}, table.replace("layers.1.", ""), 4))


def test_bytes_of_an_unknown_type_are_unknown(tmp_path: Path) -> None:
    """A type that safetensors does not have is not promised to load as it is stored."""
    entries = '{"model.layers.1.x":{"dtype":"ZZ","shape":[4],"data_offsets":[0,4]}}'
    shape = hf_shape.read_shape(folder(tmp_path, {}, entries, 4))
    assert [note.bucket for note in shape.notes if note.kind == "unknown"] == ["weights"]


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        (
            '{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"a":{"dtype":"U8","shape":[4],"data_offsets":[4,8]}}',
            "leaves 4 bytes before tensor 'a' to no tensor",
        ),
        ('{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}', "holds 8 bytes of data, and its tensors take 4"),
    ],
)
def test_data_of_no_tensor_is_refused(tmp_path: Path, entries: str, said: str) -> None:
    """As the safetensors library: tensors follow one another without a gap, to the end of the file."""
    with pytest.raises(BadModel, match=said):
        safetensors.read_folder(folder(tmp_path, {}, entries, 8))


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes with names here")
@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "model.safetensors.index.json"])
@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_pipes_and_devices_are_not_opened(tmp_path: Path, name: str, kind: str) -> None:
    """A pipe would wait for a writer, a device never end: both are refused by name, in every place."""
    folder(tmp_path, {})
    (tmp_path / name).unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(tmp_path / name)
    else:
        (tmp_path / name).symlink_to("/dev/zero")
    with pytest.raises(BadModel, match=f"{name} is not a regular file"):
        estimating.load(tmp_path, engine="vllm")
