"""The view of a mixture of experts: parameters in all and active, what presses, and the textbook formula."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_vram.sizing import moe, textbook
from pytest_vram.sizing.prediction import ModelFacts
from pytest_vram.sizing.shape import Layer, ModelShape, Tensor
from tests.unit.test_sizing_hf import LLAMA_8B, QWEN3_30B, shape_of


def test_a_mixture_is_counted_as_its_publisher_counts_it(tmp_path: Path) -> None:
    """Qwen3-30B-A3B: 30.5 billion parameters, 3.3 active."""
    facts = moe.facts(shape_of(tmp_path, QWEN3_30B))
    assert facts.parameters == 30_532_122_624
    assert 3.3 <= facts.active_parameters / 1e9 < 3.4
    assert facts.non_expert_parameters == facts.parameters - 48 * 128 * 3 * 2048 * 768


@pytest.mark.parametrize(
    ("name", "expert"),
    [
        ("blk.3.ffn_up_exps.weight", True),
        ("blk.3.ffn_gate_up_exps.weight", True),
        ("blk.3.ffn_down_chexps.weight", True),
        ("blk.3.ffn_up_shexp.weight", False),
        ("blk.3.ffn_gate_inp.weight", False),
        ("model.layers.3.mlp.experts.17.up_proj.weight", True),
        ("model.layers.3.block_sparse_moe.experts.0.w1.weight", True),
        ("model.layers.3.mlp.experts.gate_up_proj_blocks", True),
        ("model.layers.3.mlp.shared_experts.up_proj.weight", False),
        ("model.layers.3.mlp.shared_expert_gate.weight", False),
        ("model.layers.3.mlp.gate.weight", False),
    ],
)
def test_experts_are_known_by_their_names(name: str, expert: bool) -> None:
    """Routed experts of both formats, and not the shared ones or the router."""
    assert moe.is_expert(name) is expert


def test_packed_tensors_count_as_the_parameters_in_them() -> None:
    """Eight 4-bit weights in an i32, two in a byte, and none in scales."""
    shape = ModelShape(
        source="x", format="safetensors", architecture="x", meta={"quant_bits": 4, "quant_method": "awq"}
    )
    assert moe.parameters(Tensor(name="q_proj.qweight", dims=(512, 4096), type="i32", bytes=0), shape) == 4096 * 4096
    assert moe.parameters(Tensor(name="up_proj.weight", dims=(1, 100), type="u8", bytes=0), shape) == 200
    for name in ("q_proj.scales", "q_proj.qzeros", "q_proj.g_idx", "q.weight_scale_inv", "experts.gate_up_proj_scales"):
        assert moe.parameters(Tensor(name=name, dims=(512,), type="f16", bytes=0), shape) == 0
    assert moe.parameters(Tensor(name="norm.weight", dims=(512,), type="f16", bytes=0), shape) == 512


def test_every_mixture_is_told_that_all_its_experts_are_loaded(tmp_path: Path) -> None:
    """The sentence says which presses, and that experts are loaded unless offloaded; a dense model hears nothing of it."""
    from pytest_vram.ledger import Entry

    def pressure(facts: ModelFacts, weights: int, kv: int) -> str:
        entries = [
            Entry(bucket="weights", device="gpu0", bytes=weights, source="estimate"),
            Entry(bucket="kv", device="gpu0", bytes=kv, source="estimate"),
            Entry(bucket="experts", device="host", bytes=3 << 30, source="estimate"),
        ]
        return moe.pressure(facts, entries)

    facts = moe.facts(shape_of(tmp_path, QWEN3_30B))
    said = pressure(facts, 8 << 30, 1 << 30)
    assert said.startswith("Weights press first (8.00 GiB of weights against 1.00 GiB")
    assert "all 128 experts of each mixture are loaded unless offloaded" in said
    assert "3.00 GiB of experts are on the host" in said
    dense = pressure(moe.facts(shape_of(tmp_path / "b", LLAMA_8B)), 1 << 30, 2 << 30)
    assert dense.startswith("KV cache and concurrency press first")
    assert "experts" not in dense


def test_pressure_counts_what_is_where(tmp_path: Path) -> None:
    """With nothing of either on the device, the host is compared; with a part of it there, both places are named."""
    from pytest_vram.ledger import Bucket, Entry

    facts = moe.facts(shape_of(tmp_path / "a", LLAMA_8B))

    def entry(bucket: Bucket, device: str, size: int) -> Entry:
        return Entry(bucket=bucket, device=device, bytes=size << 30, source="estimate")

    on_host = [entry("weights", "host", 4), entry("kv", "host", 1)]
    said = moe.pressure(facts, [*on_host, entry("compute", "gpu0", 1)])
    assert "4.00 GiB of weights against 1.00 GiB" in said
    assert "on the device" not in said
    said = moe.pressure(facts, [*on_host, entry("weights", "gpu0", 2), entry("kv", "gpu0", 3)])
    assert "2.00 GiB of weights against 3.00 GiB of KV cache and state on the device" in said
    assert "4.00 GiB and 1.00 GiB are on the host" in said


@pytest.mark.parametrize(
    ("layers", "kv_heads", "context", "width", "expected"),
    [(24, 8, 4096, 1, 192 << 20), (32, 1, 32768, 2, 536_870_912)],
)
def test_the_textbook_formula(layers: int, kv_heads: int, context: int, width: int, expected: int) -> None:
    """The two figures that every introduction works out."""
    layer = Layer(heads=8, kv_heads=kv_heads, key_length=128, value_length=128)
    shape = ModelShape(source="x", format="config", architecture="x", layers=(layer,) * layers)
    assert textbook.kv(shape, context, width) == expected
