"""What settings count: layers with prediction blocks among them, tokens of each slot, and buffers of remote devices."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_vram.errors import BadInput
from pytest_vram.sizing import estimating, llama_options, planning, sweep, turns
from pytest_vram.sizing.placement import place
from pytest_vram.testing import recipes
from pytest_vram.testing.recipes import Recipe
from tests.unit import sizing_models


def with_prediction_block(path: Path) -> Path:
    """Six blocks of GLM-4.5's kind, of which the last one only predicts."""
    plain = recipes.qwen3moe(
        layers=6, embedding=512, heads=8, kv_heads=2, head_size=64, experts=8, expert_feed_forward=256
    )
    metadata = {key.replace("qwen3moe.", "glm4moe."): value for key, value in plain.metadata.items()}
    metadata |= {
        "general.architecture": "glm4moe",
        "glm4moe.nextn_predict_layers": 1,
        "glm4moe.expert_shared_count": 1,
        "glm4moe.leading_dense_block_count": 0,
    }
    return Recipe(architecture="glm4moe", metadata=metadata, tensors=plain.tensors).write(path)


def test_plans_count_prediction_blocks(tmp_path: Path) -> None:
    """n-gpu-layers counts the prediction block, which comes last: five blocks, it and the output are seven."""
    model = with_prediction_block(tmp_path / "model.gguf")
    assert estimating.load(model).extra_layers == 1
    (best, *_) = planning.plan(model, "1GB", device="RPC0")
    words = list(best.command)
    assert words[words.index("--n-gpu-layers") + 1] == "7"
    assert (best.layers_on_gpu, best.layers) == (5, 5)
    assert not [
        entry for entry in best.estimate.entries if entry.device == "host" and entry.bucket in ("kv", "experts")
    ]


def test_six_layers_leave_a_block_on_the_host(tmp_path: Path) -> None:
    """One less than all puts the first block on the CPU, and that is what the settings in force say."""
    model = with_prediction_block(tmp_path / "model.gguf")
    made = estimating.estimate(model, device="RPC0", ctx_size=4096, n_gpu_layers=6)
    assert made.settings["layers_on_gpu"] == 4
    assert [entry for entry in made.entries if entry.device == "host" and entry.bucket == "kv"]


def test_turns_count_prediction_blocks(tmp_path: Path) -> None:
    """From all layers the first that leaves the card is one of seven, not of six: six still have the output there."""
    shape = estimating.load(with_prediction_block(tmp_path / "model.gguf"))
    options = llama_options.options_of({"device": "RPC0", "ctx_size": 256, "n_gpu_layers": 7})
    changes = turns._changes(shape, options, "gpu0", lambda _, changed: changed.n_gpu_layers != 7)
    assert [(one.before, one.after) for one in changes if one.setting == "n-gpu-layers"] == [("7", "6")]


def test_sweeps_keep_the_tokens_of_each_slot(tmp_path: Path) -> None:
    """Slots of 1000 tokens each: the cache of four is four times that of one, and what the estimate alone says."""
    shape = estimating.load(sizing_models.dense_8b(tmp_path / "model.gguf"))
    given = {"kv_unified_per_slot": 1000, "kv_unified": True, "device": "RPC0"}
    points = sweep.sweep(shape, llama_options.read(given), "parallel", ("1", "2", "4"))
    for point in points:
        alone = estimating.of_shape(shape, engine="llama-server", options={**given, "parallel": int(point.value)})
        assert point.estimate is not None
        assert [entry.bytes for entry in point.estimate.entries if entry.bucket == "kv"] == [
            entry.bytes for entry in alone.entries if entry.bucket == "kv"
        ]


def test_plans_search_the_tokens_of_each_slot(tmp_path: Path) -> None:
    """They cannot be given beside it: the refusal says what to write instead."""
    model = sizing_models.dense_8b(tmp_path / "model.gguf")
    with pytest.raises(BadInput, match="'kv-unified-per-slot' is what plan searches: say minimum_context"):
        planning.plan(model, "8GB", device="RPC0", kv_unified_per_slot=1000)


SERVERS = "127.0.0.1:50052,127.0.0.1:50053"


@pytest.mark.parametrize(
    ("buffer", "label"), [("RPC0[127.0.0.1:50052]", "gpu0"), ("RPC0[127.0.0.1:50053]", "gpu1"), ("CPU", "host")]
)
def test_remote_buffers_go_by_their_server(buffer: str, label: str, tmp_path: Path) -> None:
    """The number counts the devices of one server, so that every server's first is number 0."""
    shape = estimating.load(sizing_models.dense_8b(tmp_path / "model.gguf"))
    options = llama_options.options_of({"rpc": SERVERS, "override_tensor": f"ffn_down={buffer}"})
    where = place(shape, options)
    found = {to for tensor, to in zip(shape.tensors, where.tensors, strict=True) if "ffn_down" in tensor.name}
    assert found == {label}


@pytest.mark.parametrize("buffer", ["RPC1[127.0.0.1:50053]", "RPC1", "RPC0", "RPC0[127.0.0.1:1]"])
def test_remote_buffers_that_the_engine_does_not_know(buffer: str, tmp_path: Path) -> None:
    """llama-server calls them an unknown buffer type; the refusal names those that there are."""
    shape = estimating.load(sizing_models.dense_8b(tmp_path / "model.gguf"))
    options = llama_options.options_of({"rpc": SERVERS, "override_tensor": f"ffn_down={buffer}"})
    with pytest.raises(BadInput, match=r"known are CPU, RPC0\[127.0.0.1:50052\], RPC0\[127.0.0.1:50053\]"):
        place(shape, options)
