"""Weights, KV cache and recurrent state as predicted, against what a real engine prints for the same file."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pytest_vram.backends import dry_run
from pytest_vram.cli import asked
from pytest_vram.ledger import Entry, Ledger
from pytest_vram.sizing import draft, ggml, gguf, gguf_shape, host_weights, llama_options, lora, placement, projector
from pytest_vram.sizing.options import Device, Draft, Era, LlamaOptions
from pytest_vram.testing import attention_recipes, hybrid_recipes, real_shapes, recipes
from pytest_vram.testing.recipes import Recipe, Types
from pytest_vram.testing.sparse import Planned, Value, write_sparse
from tests.rehearsal import sizing_boots as boots

pytestmark = pytest.mark.engine

GPU = Device(label="gpu0", kind="rpc", name="RPC0")


@pytest.fixture(scope="module")
def executable() -> Path:
    """The engine that is used here."""
    return boots.first_engine()


@pytest.fixture(scope="module")
def gpus(executable: Path) -> Iterator[boots.Gpus]:
    """Two software GPUs."""
    with boots.Gpus(2) as running:
        yield running


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for models."""
    return tmp_path_factory.mktemp("models")


def wrong(found: Sequence[boots.Difference]) -> list[boots.Difference]:
    """Those that differ by more than the last printed digit leaves open."""
    return [row for row in found if row.error]


def given_as(recipe: Recipe, gpus: int, words: str, **values: Any) -> boots.Draw:
    """A configuration that is not drawn: the engine's words, and the same as options."""
    devices = () if not gpus else (GPU,)
    options = LlamaOptions(devices=devices, **{"mmap": False, **values})
    more = () if gpus else ("--device", "none")
    return boots.Draw(recipe=recipe, options=options, arguments=(*words.split(), *more), gpus=gpus)


@pytest.mark.parametrize("architecture", boots.DRAWN)
def test_drawn_models_cost_what_is_predicted(
    architecture: str, executable: Path, gpus: boots.Gpus, folder: Path
) -> None:
    """Any model and settings of this architecture: every device's weights, cache and state to the printed digit."""

    @settings(max_examples=6, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(st.randoms(use_true_random=False))
    def check(numbers: random.Random) -> None:
        one = boots.draw(architecture, numbers)
        assert not wrong(boots.compare(executable, folder, one, gpus)), " ".join(one.arguments)

    check()


@pytest.mark.parametrize("layers", range(7))
def test_layers_on_the_gpu_count_the_output_first(
    layers: int, executable: Path, gpus: boots.Gpus, folder: Path
) -> None:
    """-ngl N puts the output and the last N - 1 blocks on the GPU, for every N."""
    words = f"--ctx-size 1024 --parallel 1 --n-gpu-layers {layers}"
    one = given_as(recipes.llama(layers=5), 1, words, ctx_size=1024, parallel=1, n_gpu_layers=layers)
    assert not wrong(boots.compare(executable, folder, one, gpus))


@pytest.mark.parametrize("moved", range(6))
def test_experts_move_layer_by_layer(moved: int, executable: Path, gpus: boots.Gpus, folder: Path) -> None:
    """--n-cpu-moe N moves the experts of N layers from layer 0 on, of which leading dense layers have none."""
    words = f"--ctx-size 512 --parallel 1 --n-cpu-moe {moved}"
    recipe = recipes.deepseek2(layers=4, leading_dense=2)
    one = given_as(recipe, 1, words, ctx_size=512, parallel=1, n_cpu_moe=moved)
    found = boots.compare(executable, folder, one, gpus)
    assert not wrong(found)
    where = placement.place(gguf_shape.shape_of(gguf.read(recipe.write(folder / "moe.gguf"))), one.options)
    assert where.experts_on_host == tuple(range(2, min(moved, 4)))


@pytest.mark.parametrize("slots", range(1, 5))
@pytest.mark.parametrize("unified", [True, False])
@pytest.mark.parametrize("architecture", ["gemma3", "qwen3next"])
def test_slots_and_streams(
    architecture: str, unified: bool, slots: int, executable: Path, gpus: boots.Gpus, folder: Path
) -> None:
    """Windows and states grow with the slots, streams round the context up, for 1 to 4 slots, unified and not."""
    recipe = recipes.gemma() if architecture == "gemma3" else hybrid_recipes.qwen3next()
    words = f"--ctx-size 5000 --parallel {slots} --{'' if unified else 'no-'}kv-unified"
    one = given_as(recipe, 0, words, ctx_size=5000, parallel=slots, kv_unified=unified)
    assert not wrong(boots.compare(executable, folder, one, gpus))


@pytest.mark.parametrize("type_name", ggml.CACHE_TYPES)
def test_every_cache_type(type_name: str, executable: Path, gpus: boots.Gpus, folder: Path) -> None:
    """K and V of each type that the engine takes, mixed with f16 on the other side."""
    for k_type, v_type in ((type_name, "f16"), ("f16", type_name)):
        words = f"--ctx-size 2048 --parallel 1 -fa on --cache-type-k {k_type} --cache-type-v {v_type}"
        values = {"ctx_size": 2048, "parallel": 1, "cache_type_k": k_type, "cache_type_v": v_type, "flash_attn": "on"}
        one = given_as(recipes.llama(), 0, words, **values)
        assert not wrong(boots.compare(executable, folder, one, gpus))


def test_encoders_have_no_cache(executable: Path, gpus: boots.Gpus, folder: Path) -> None:
    """An encoder's boot prints no KV line, and none is predicted."""
    one = given_as(attention_recipes.bert(), 1, "--ctx-size 512 --embeddings", ctx_size=512, embeddings=True)
    found = boots.compare(executable, folder, one, gpus)
    assert not wrong(found)
    assert {row.bucket for row in found} == {"weights"}


def test_adapters_are_where_their_tensors_are(executable: Path, gpus: boots.Gpus, folder: Path) -> None:
    """Each pair of a LoRA adapter is on the device of the tensor that it changes."""
    recipe = recipes.llama(layers=4)
    pairs: list[Planned] = []
    for tensor in recipe.tensors:
        if tensor.name.endswith(("attn_q.weight", "ffn_down.weight")) or tensor.name == "output.weight":
            pairs.append(Planned(f"{tensor.name}.lora_a", (tensor.dims[0], 64), "f16"))
            pairs.append(Planned(f"{tensor.name}.lora_b", (64, tensor.dims[1]), "f32"))
    about: dict[str, Value] = {
        "general.architecture": "llama",
        "general.type": "adapter",
        "adapter.type": "lora",
        "adapter.lora.alpha": 16.0,
    }
    adapter = write_sparse(folder / "lora.gguf", about, pairs)[0]
    words = f"--ctx-size 512 --parallel 1 --n-gpu-layers 3 --lora {adapter}"
    one = given_as(recipe, 1, words, ctx_size=512, parallel=1, n_gpu_layers=3)
    model = recipe.write(folder / "base.gguf")
    said, notes = lora.adapters([adapter], gguf_shape.shape_of(gguf.read(model)), one.options)
    boot = boots.booted(executable, model, one, gpus.endpoints(), until=(b"tensors from lora file", 1))
    assert not notes
    assert close(said, [entry for entry in boot.entries if entry.bucket == "lora"])


def test_a_draft_model_is_a_second_context(executable: Path, gpus: boots.Gpus, folder: Path) -> None:
    """A draft model has its own weights and a cache as long as the target's, of its own types and layers on the GPU."""
    model = recipes.llama(layers=4).write(folder / "target.gguf")
    small = recipes.llama(layers=2, embedding=128, feed_forward=256).write(folder / "draft.gguf")
    words = (
        f"--ctx-size 1000 --parallel 2 --n-gpu-layers 3 --spec-type draft-simple --model-draft {small} -ngld 2 "
        "-ctkd q8_0 -ctvd q4_0"
    )
    asked = Draft(model=str(small), n_gpu_layers=2, cache_type_k="q8_0", cache_type_v="q4_0")
    one = given_as(recipes.llama(), 1, words, ctx_size=1000, parallel=2, n_gpu_layers=3, draft=asked)
    said, _ = draft.draft(gguf_shape.shape_of(gguf.read(model)), one.options)
    boot = boots.booted(executable, model, one, gpus.endpoints(), until=(b"graph nodes", 2))
    printed = [entry for entry in boot.entries if entry.bucket == "draft" and "compute" not in entry.detail]
    assert close([entry for entry in said if not entry.detail.startswith("compute")], printed)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("Llama-3-70B", {"ctx_size": 131072, "parallel": 1, "n_gpu_layers": 30, "cache_type_k": "q8_0"}),
        ("DeepSeek-V3", {"ctx_size": 65536, "parallel": 1, "n_cpu_moe": 50}),
        ("Gemma3-27B", {"ctx_size": 32768}),
        ("Mamba-2.8B", {"ctx_size": 4096, "parallel": 3}),
    ],
)
def test_models_of_any_size(
    name: str, options: dict[str, Any], executable: Path, gpus: boots.Gpus, folder: Path
) -> None:
    """A 70B, a 671B mixture with latent attention, a 27B with windows and a Mamba: the engine's own dry run agrees."""
    model = real_shapes.real(name, tokenizer="bytes").write(folder / "real.gguf")
    trial = dry_run.exact(model, options, binary=executable, endpoints=gpus.endpoints()[:1])
    said = boots.predicted(gguf_shape.shape_of(gguf.read(model)), LlamaOptions(devices=(GPU,), mmap=False, **options))
    rows = [row for row in dry_run.compare(Ledger(entries=tuple(said)), trial) if row.group != "compute"]
    assert len(rows) >= 3
    assert [row for row in rows if not row.agree] == []


@pytest.mark.parametrize("layers", [None, 3])
@pytest.mark.parametrize("type_name", ["q4_0", "q4_k", "q6_k", "q8_0", "iq4_nl", "q2_k", "mxfp4"])
def test_mapped_weights_and_the_order_of_this_cpu(
    type_name: str, layers: int | None, executable: Path, gpus: boots.Gpus, folder: Path
) -> None:
    """With the file mapped, a boot prints what one family of CPUs is predicted to take, to the digit: the mapped
    stretch of the file, and beside it what this CPU reorders."""
    types = Types(matrices=type_name, embedding="q6_k", output=type_name, experts=type_name)
    words = "--ctx-size 512 --parallel 1" + ("" if layers is None else f" --n-gpu-layers {layers}")
    values = {"ctx_size": 512, "parallel": 1, "mmap": True, "n_gpu_layers": layers}
    one = given_as(recipes.qwen3moe(layers=4, types=types), 0 if layers is None else 1, words, **values)
    assert not wrong(boots.compare(executable, folder, one, gpus))
    shape = gguf_shape.shape_of(gguf.read(folder / "model.gguf"))
    where = placement.place(shape, one.options)
    boot = boots.booted(executable, folder / "model.gguf", one, gpus.endpoints() if one.gpus else [])
    lines = [entry for entry in boot.entries if entry.bucket in ("weights", "experts") and entry.device == "host"]
    printed, resolution = sum(line.bytes for line in lines), sum(line.resolution for line in lines)
    on_host = [
        host_weights.Held(tensor) for tensor, label in zip(shape.tensors, where.tensors, strict=True) if label == "host"
    ]
    families = [sum(family) for family in host_weights.amounts(shape, one.options, on_host).mapped]
    assert any(abs(family - printed) <= resolution for family in families)


def test_a_dry_run_does_not_promise_less_than_a_boot_takes(executable: Path, gpus: boots.Gpus, folder: Path) -> None:
    """A dry run allocates nothing and maps nothing: what a boot's mapped file takes beside the CPU's own order is in
    the range of --exact."""
    one = given_as(recipes.llama(types=Types(matrices="q4_k", output="q4_0")), 0, "--ctx-size 512", mmap=True)
    model = one.recipe.write(folder / "exact.gguf")
    boot = boots.booted(executable, model, one, [])
    printed = sum(entry.bytes - entry.resolution for entry in boot.entries if entry.bucket == "weights")
    options = {"device": "none", "ctx_size": 512}
    shape = gguf_shape.shape_of(gguf.read(model))
    made, exact = asked.by_dry_run(shape, llama_options.read(options), options)
    assert all(row.agree for row in exact.compared)
    weights = [entry for entry in made.entries if entry.bucket == "weights"]
    assert sum(entry.bytes if entry.at_most is None else entry.at_most for entry in weights) >= printed


@pytest.mark.parametrize("flash", ["on", "off"])
def test_a_projector_is_within_its_range(flash: Any, executable: Path, gpus: boots.Gpus, folder: Path) -> None:
    """An image encoder's buffer is at its lower end on the CPU, which has flash attention for all head sizes; without
    flash attention it is no range."""
    images = image_encoder(folder / "mmproj.gguf", width=256, hidden=1024, heads=4, side=32)
    model = recipes.gemma("gemma3").write(folder / "gemma3.gguf")
    words = f"--ctx-size 512 --parallel 1 --flash-attn {flash} --mmproj {images} --no-mmproj-offload"
    one = given_as(recipes.llama(), 0, words, ctx_size=512, parallel=1, flash_attn=flash)
    said, notes = projector.projector(images, one.options)
    boot = boots.booted(executable, model, one, [], until=(b"compute buffer size", 2), warm=True)
    printed = [entry for entry in boot.entries if entry.bucket == "projector" and "compute" in entry.detail]
    assert close(said[1:], printed)
    assert (said[1].at_most is None) == (flash == "off")
    assert {note.kind for note in notes} == {"rule"}


def image_encoder(path: Path, *, width: int, hidden: int, heads: int, side: int) -> Path:
    """Gemma 3's image encoder with three blocks."""
    patch, blocks = 14, [f"v.blk.{block}." for block in range(3)]
    matrices = {"v.patch_embd": (patch, patch, 3, width), "mm.input_projection": (256, width)}
    matrices |= {f"{block}attn_{part}": (width, width) for block in blocks for part in ("q", "k", "v", "out")}
    matrices |= {f"{block}ffn_up": (width, hidden) for block in blocks}
    matrices |= {f"{block}ffn_down": (hidden, width) for block in blocks}
    vectors = ["v.post_ln.weight", "v.post_ln.bias", "mm.soft_emb_norm.weight", "v.patch_embd.bias"]
    for block in blocks:
        vectors += [f"{block}{norm}.{part}" for norm in ("ln1", "ln2") for part in ("weight", "bias")]
        vectors += [f"{block}{part}.bias" for part in ("attn_q", "attn_k", "attn_v", "attn_out", "ffn_down")]
    tensors = [Planned(f"{name}.weight", dims, "f16") for name, dims in matrices.items()]
    tensors += [Planned(name, (width,), "f32") for name in vectors]
    tensors += [Planned(f"{block}ffn_up.bias", (hidden,), "f32") for block in blocks]
    tensors += [Planned("v.position_embd.weight", (width, side * side), "f32")]
    about: dict[str, Value] = {
        "general.architecture": "clip",
        "general.type": "mmproj",
        "clip.has_vision_encoder": True,
        "clip.projector_type": "gemma3",
        "clip.use_gelu": True,
        "clip.vision.image_size": side * patch,
        "clip.vision.patch_size": patch,
        "clip.vision.embedding_length": width,
        "clip.vision.feed_forward_length": hidden,
        "clip.vision.block_count": len(blocks),
        "clip.vision.attention.head_count": heads,
        "clip.vision.attention.layer_norm_epsilon": 1e-6,
        "clip.vision.projection_dim": 256,
        "clip.vision.image_mean": [0.5, 0.5, 0.5],
        "clip.vision.image_std": [0.5, 0.5, 0.5],
    }
    return write_sparse(path, about, tensors)[0]


@pytest.mark.parametrize("asked", [None, Draft(kind="draft-mtp")])
def test_a_prediction_head_is_a_cache_of_its_own_block(
    asked: Draft | None, executable: Path, gpus: boots.Gpus, folder: Path
) -> None:
    """A prediction block (MTP) adds a cache of one block, and states to take drafts back, when it is asked for; its
    tensors are loaded then, or always by older builds."""
    recipe = with_prediction_block()
    words = "--ctx-size 1000 --parallel 2" + (" --spec-type draft-mtp" if asked else "")
    one = given_as(recipe, 1, words, ctx_size=1000, parallel=2, draft=asked)
    model = recipe.write(folder / "mtp.gguf")
    shape = gguf_shape.shape_of(gguf.read(model))
    boot = boots.booted(executable, model, one, gpus.endpoints(), until=(b"graph nodes", 2 if asked else 1))
    printed = [entry for entry in boot.entries if entry.bucket == "draft" and "KV" in entry.detail]
    said = [entry for entry in draft.draft(shape, one.options)[0] if entry.detail.startswith("cache")]
    assert close(said, printed)
    assert [entry.device for entry in said] == (["gpu0"] if asked else [])
    rules = (Era(extra_blocks_skipped=skipped) for skipped in (True, False))
    found = [boots.differences(boots.predicted(shape, one.options, era), boot.entries) for era in rules]
    assert any(not wrong(rows) for rows in found)


def with_prediction_block() -> Recipe:
    """A qwen35moe: seven blocks that run, and one for prediction."""
    plain = hybrid_recipes.qwen3next(layers=8)
    metadata: dict[str, Any] = {
        key.replace("qwen3next", "qwen35moe"): "qwen35moe" if value == "qwen3next" else value
        for key, value in plain.metadata.items()
    }
    metadata |= {"qwen35moe.nextn_predict_layers": 1, "qwen35moe.rope.dimension_sections": [8, 8, 16, 0]}
    tensors: list[Planned] = []
    for tensor in plain.tensors:
        if tensor.name.endswith(".ssm_ba.weight"):
            half = (tensor.dims[0], tensor.dims[1] // 2)
            tensors += [Planned(tensor.name.replace("ssm_ba", name), half, tensor.type) for name in _HALVES]
        else:
            tensors.append(tensor)
    tensors.append(Planned("blk.7.nextn.eh_proj.weight", (512, 256), "f16"))
    tensors += [Planned(f"blk.7.nextn.{name}.weight", (256,), "f32") for name in ("enorm", "hnorm", "shared_head_norm")]
    return Recipe(architecture="qwen35moe", metadata=metadata, tensors=tuple(tensors))


_HALVES = ("ssm_alpha", "ssm_beta")


def close(said: Sequence[Entry], printed: Sequence[Entry]) -> bool:
    """Whether each device's sum is what was printed, to half of its last digit per line."""
    rows: dict[str, list[int]] = {}
    for entries, sign in ((said, 1), (printed, -1)):
        for entry in entries:
            row = rows.setdefault(entry.device, [0, 0])
            row[0] += sign * entry.bytes
            row[1] += entry.resolution
    return all(abs(difference) <= resolution for difference, resolution in rows.values())
