"""What the metadata of a GGUF file says about blocks, windows, states and tensors, and what is refused or noted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from pytest_vram.errors import BadInput, BadModel
from pytest_vram.sizing import buffers, gguf, gguf_shape, kv, placement, recurrent, weights
from pytest_vram.sizing.gguf_architectures import ARCHITECTURES
from pytest_vram.sizing.options import CURRENT, Device, Draft, Era, LlamaOptions
from pytest_vram.sizing.shape import Layer, ModelShape
from pytest_vram.testing import hybrid_recipes, recipes
from pytest_vram.testing.recipes import Recipe
from pytest_vram.testing.sparse import Planned

TWO = (Device(label="gpu0", name="CUDA0"), Device(label="gpu1", name="CUDA1"))


def shape_of(folder: Path, recipe: Recipe, *, drop: tuple[str, ...] = (), **keys: Any) -> ModelShape:
    """The shape of a recipe's file with other keys under its architecture; double underscores stand for dots."""
    metadata = {key: value for key, value in recipe.metadata.items() if key.partition(".")[2] not in drop}
    name = keys.pop("architecture", recipe.architecture)
    if name != recipe.architecture:
        prefix = f"{recipe.architecture}."
        metadata = {
            key.replace(prefix, f"{name}.", 1) if key.startswith(prefix) else key: value
            for key, value in metadata.items()
        }
        metadata["general.architecture"] = name
    metadata |= {f"{name}.{key.replace('__', '.')}": value for key, value in keys.items()}
    path = msgspec.structs.replace(recipe, metadata=metadata).write(folder / "model.gguf")
    return gguf_shape.shape_of(gguf.read(path))


def windows(shape: ModelShape) -> str:
    """One letter for each block: w with a window, f for full attention, r for recurrent."""
    return "".join("r" if layer.recurrent else "w" if layer.window else "f" for layer in shape.layers)


@pytest.mark.parametrize(
    ("architecture", "keys", "expected"),
    [
        ("gemma3", {"attention__sliding_window": 512}, "wwwwwfww"),
        ("gemma3", {}, "ffffffff"),
        ("gemma3", {"attention__sliding_window": 512, "attention__sliding_window_pattern": 2}, "wfwfwfwf"),
        # An array is not read where the architecture has a period: the engine keeps its own.
        ("gemma3", {"attention__sliding_window": 9, "attention__sliding_window_pattern": [True] * 8}, "wwwwwfww"),
        ("gemma2", {}, "wfwfwfwf"),
        ("gpt-oss", {"attention__sliding_window": 128}, "wfwfwfwf"),
        ("cohere2", {"attention__sliding_window": 4096}, "wwwfwwwf"),
        ("llama4", {}, "wwwfwwwf"),
        ("llama4", {"attention__sliding_window": 0}, "ffffffff"),
        ("smallthinker", {"attention__sliding_window": 1}, "fwwwfwww"),
        ("laguna", {"attention__sliding_window": 512}, "fwwwfwww"),
        ("exaone4", {"attention__sliding_window": 4096}, "ffffffff"),
        ("phi3", {"attention__sliding_window": 2047}, "ffffffff"),
        ("mimo2", {"attention__sliding_window": 128, "attention__sliding_window_pattern": [False, True] * 4}, "fwfwfwfw"),
        ("qwen35", {"ssm__conv_kernel": 4, "ssm__inner_size": 64, "ssm__state_size": 16}, "rrrfrrrf"),
        ("jamba", {"attention__head_count_kv": [0, 0, 2, 0, 0, 0, 2, 0], "ssm__conv_kernel": 4, "ssm__inner_size": 64}, "rrfrrrfr"),
    ],
)  # fmt: skip
def test_which_blocks_have_windows(architecture: str, keys: dict[str, Any], expected: str, tmp_path: Path) -> None:
    """Each architecture's own rule decides, as llama.cpp has it, and the file only where that rule reads it."""
    shape = shape_of(tmp_path, recipes.llama(layers=8), architecture=architecture, **keys)
    assert windows(shape) == expected


def test_windows_whose_size_the_architecture_fixes(tmp_path: Path) -> None:
    """llama4 chunks by 8192 and smallthinker sees 4096 whatever the file says; gemma2's 4096 is only a default."""
    sizes = {}
    for name, tokens in (("llama4", 1), ("smallthinker", 1), ("gemma2", 77)):
        keys: dict[str, Any] = {"attention__sliding_window": tokens}
        sizes[name] = shape_of(tmp_path, recipes.llama(layers=8), architecture=name, **keys).window
    assert sizes == {"llama4": 8192, "smallthinker": 4096, "gemma2": 77}


def test_a_missing_size_is_said_to_be_assumed(tmp_path: Path) -> None:
    """A default that stands in for a missing key is a note."""
    drop = ("attention.key_length", "attention.value_length")
    shape = shape_of(tmp_path, recipes.llama(layers=8), drop=drop, architecture="gemma2")
    assert {note.kind for note in shape.notes} == {"assumed"}
    assert [note.bucket for note in shape.notes] == ["kv", "kv"]


def test_an_unknown_architecture_is_a_lower_bound(tmp_path: Path) -> None:
    """Caches of an architecture that nobody knows follow from the common keys, and are said to be unknown."""
    shape = shape_of(tmp_path, recipes.llama(layers=2), architecture="llama9000")
    assert not shape.known
    assert {note.bucket for note in shape.notes if note.kind == "unknown"} == {"kv", "recurrent", "compute"}
    assert shape.layers[0].k_row == 128


@pytest.mark.parametrize("key", ["block_count", "embedding_length", "context_length"])
def test_keys_that_the_engine_insists_on(key: str, tmp_path: Path) -> None:
    """Without them the file is refused in one sentence that names the key."""
    with pytest.raises(BadModel, match=rf"llama\.{key} is missing"):
        shape_of(tmp_path, recipes.llama(), drop=(key,))


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"attention__head_count_kv": [1, 2, 3]}, "3 values for 2 blocks"),
        ({"block_count": 100000}, "cannot be"),
        ({"block_count": "two"}, "a whole number"),
        ({"nextn_predict_layers": 3}, "3 for prediction cannot be"),
    ],
)
def test_contradictions_are_refused(keys: dict[str, Any], words: str, tmp_path: Path) -> None:
    """Lengths that do not fit and values of the wrong kind end in one sentence."""
    with pytest.raises(BadModel, match=words):
        shape_of(tmp_path, recipes.llama(), **keys)


def test_additions_to_models_are_no_models(tmp_path: Path) -> None:
    """A projector or adapter says which option takes it."""
    with pytest.raises(BadModel, match="--mmproj"):
        shape_of(tmp_path, recipes.llama(), architecture="clip")


def test_every_architecture_has_a_row() -> None:
    """All names that llama.cpp's sources of October 2026 know have a rule, and the drafting ones say so."""
    assert len(ARCHITECTURES) == 147
    assert {name for name, rule in ARCHITECTURES.items() if rule.draft} == {"dflash", "eagle3", "gemma4-assistant"}


def test_shared_caches_and_prediction_blocks(tmp_path: Path) -> None:
    """gemma3n's first 20 blocks have caches; a prediction block of deepseek32 has none in the main model."""
    keys: dict[str, Any] = {"attention__sliding_window": 512}
    shared = shape_of(tmp_path, recipes.llama(layers=30), architecture="gemma3n", **keys)
    assert [layer.k_row > 0 for layer in shared.layers] == [True] * 20 + [False] * 10
    extra = shape_of(tmp_path, recipes.llama(layers=4), architecture="deepseek32", nextn_predict_layers=1)
    options = LlamaOptions(ctx_size=256, parallel=1, devices=())
    entries = kv.kv_cache(extra, options, placement.place(extra, options), CURRENT)
    assert (len(extra.layers), extra.extra_layers) == (3, 1)
    assert sum(entry.bytes for entry in entries) == 3 * 256 * 2 * 128 * 2


def test_prediction_tensors_by_build(tmp_path: Path) -> None:
    """Today's builds leave them in the file unless asked; older ones load them always."""
    shape = shape_of(tmp_path, hybrid_recipes.qwen3next(layers=8), nextn_predict_layers=1)
    plain = LlamaOptions(devices=())
    left = weights.not_loaded(shape, plain)
    assert {placement.block_of(shape.tensors[position].name) for position in left} == {7}
    assert not weights.not_loaded(shape, plain, Era(extra_blocks_skipped=False))
    assert not weights.not_loaded(shape, msgspec.structs.replace(plain, draft=Draft(kind="draft-mtp")))
    assert [note.kind for note in weights.notes(shape, plain)] == ["rule"]


def test_drafts_that_can_be_taken_back_need_more_states(tmp_path: Path) -> None:
    """Speculation with a prediction head multiplies the states of architectures that can roll back."""
    layer = Layer(state_r=8, state_s=8)
    shape = ModelShape(source="m", format="gguf", architecture="qwen35", layers=(layer,), meta={"rollback": True})
    plain = LlamaOptions(devices=(), parallel=2)
    drafting = msgspec.structs.replace(plain, draft=Draft(kind="draft-mtp", n_max=3))
    sizes = [
        sum(one.bytes for one in recurrent.states(shape, each, placement.place(shape, each)))
        for each in (plain, drafting)
    ]
    assert sizes == [16 * 4 * 2, 16 * 4 * 2 * 4]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"cache_type_v": "q8_0", "flash_attn": "off"}, "needs flash attention"),
        ({"cache_type_k": "q9_9"}, "there is no such type"),
        ({"override_tensor": (("attn", "ROCm7"),)}, "not a buffer type"),
        ({"override_tensor": (("(", "CPU"),)}, "not a regular expression"),
        ({"split_mode": "none", "main_gpu": 5}, "counted from 0"),
    ],
)
def test_what_the_engine_refuses(values: dict[str, Any], words: str, tmp_path: Path) -> None:
    """Settings that the engine refuses are refused with its reason."""
    shape = shape_of(tmp_path, recipes.llama())
    options = LlamaOptions(ctx_size=256, parallel=1, devices=TWO, **values)
    with pytest.raises(BadInput, match=words):
        kv.kv_cache(shape, options, placement.place(shape, options), CURRENT)


def test_types_that_do_not_fit_the_heads(tmp_path: Path) -> None:
    """A head of 48 elements is no whole number of blocks, and latent attention has one type for both."""
    options = LlamaOptions(ctx_size=256, parallel=1, devices=(), cache_type_k="q8_0")
    with pytest.raises(BadInput, match="K head of 48"):
        kv.check_cache_types(shape_of(tmp_path, recipes.llama(head_size=48)), options)
    with pytest.raises(BadInput, match="the same type twice"):
        kv.check_cache_types(shape_of(tmp_path, recipes.deepseek2()), options)


def test_overrides_and_splits(tmp_path: Path) -> None:
    """The first override that matches wins; blocks are split by shares, the output after them."""
    shape = shape_of(tmp_path, recipes.qwen3moe(layers=4, tied=True))
    rules = (("blk\\.0\\.ffn_up_exps", "CUDA1"), ("exps", "CPU"))
    options = LlamaOptions(devices=TWO, tensor_split=(2.0, 3.0), override_tensor=rules)
    where = placement.place(shape, options)
    assert (where.layers, where.output) == (("gpu0", "gpu0", "gpu1", "gpu1"), "gpu1")
    homes = dict(zip((tensor.name for tensor in shape.tensors), where.tensors, strict=True))
    assert homes["blk.0.ffn_up_exps.weight"] == "gpu1"
    assert homes["blk.0.ffn_down_exps.weight"] == "host"
    assert homes["token_embd.weight"] == "host"
    assert where.experts_on_host == (0, 1, 2, 3)
    assert where.overridden
    held = {(entry.bucket, entry.device) for entry in weights.weights(shape, options, where)}
    assert held == {
        ("weights", "host"),
        ("weights", "gpu0"),
        ("weights", "gpu1"),
        ("experts", "host"),
        ("experts", "gpu1"),
    }


def test_settings_that_move_nothing(tmp_path: Path) -> None:
    """--n-cpu-moe says how many of its layers have no experts, and several GPUs that their split is assumed."""
    options = LlamaOptions(devices=TWO, n_cpu_moe=2)
    dense = placement.notes(shape_of(tmp_path, recipes.llama()), options)
    assert [note.kind for note in dense] == ["assumed", "warning"]
    leading = placement.notes(shape_of(tmp_path, recipes.deepseek2(leading_dense=1)), options)
    assert "1 move" in leading[1].text


def test_an_unknown_tensor_type_bounds_the_weights(tmp_path: Path) -> None:
    """Tensors of a type that is not known are not counted, and the bucket is said to be unknown."""
    shape = shape_of(tmp_path, recipes.llama())
    first, *others = shape.tensors
    odd = msgspec.structs.replace(first, type="type 99", bytes=0, known=False)
    noted = weights.notes(msgspec.structs.replace(shape, tensors=(odd, *others)), LlamaOptions(devices=()))
    assert [(note.kind, note.bucket) for note in noted] == [("unknown", "weights")]


def test_rope_factors_are_copied_to_every_device(tmp_path: Path) -> None:
    """Each device with blocks gets its own copy of the rope factors."""
    recipe = recipes.llama(layers=4)
    factors = Planned("rope_freqs.weight", (4096,), "f32")
    shapes = [
        shape_of(tmp_path, recipe),
        shape_of(tmp_path, msgspec.structs.replace(recipe, tensors=(*recipe.tensors, factors))),
    ]
    options = LlamaOptions(devices=TWO, tensor_split=(1.0, 1.0), n_gpu_layers=4, mmap=False)
    sums = []
    for shape in shapes:
        entries = weights.weights(shape, options, placement.place(shape, options))
        sums.append({entry.device: entry.bytes for entry in entries})
    more = {label: sums[1][label] - sums[0][label] for label in sums[1]}
    assert more == {"host": 16384, "gpu0": 16384, "gpu1": 16384}


def test_what_a_buffer_adds_to_a_tensor() -> None:
    """Tensors are aligned to 32 bytes, on CUDA to 128; CUDA completes quantised rows to 512 elements, once a tensor."""
    assert buffers.held(33, 33, "i8", 33, None) == 64
    assert buffers.held(33, 33, "i8", 33, "cuda") == 128
    row = 320 // 32 * 34
    assert buffers.held(row * 64, 320, "q8_0", 320 * 64, "rpc") == row * 64
    assert buffers.held(row * 64, 320, "q8_0", 320 * 64, "cuda") == -(-(row * 64 + 192 // 32 * 34) // 128) * 128
    assert buffers.held(1024 * 34, 512, "q8_0", 1 << 15, "cuda") == 1024 * 34
