"""Compute buffers as predicted, against the table of dry runs and figures that real machines printed."""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest

from pytest_vram.sizing import compute_devices, kv
from pytest_vram.sizing.compute import compute_buffers, notes
from pytest_vram.sizing.options import CURRENT, Device, Era, LlamaOptions, Placement
from pytest_vram.sizing.shape import Layer, ModelShape, Ssm, Tensor
from tests.unit import compute_rows as table

Errors = list[tuple[table.Row, float, float]]
STEP = 8  # of the table's rows; ci/bench/sizing_compute.py takes all


def buffers(
    shape: ModelShape, options: LlamaOptions, placement: Placement, era: Era = CURRENT, **more: Any
) -> dict[str, float]:
    """MiB of each device's compute buffer, of a range the upper end; ``output`` is the output buffer."""
    return {
        "output" if entry.detail == "output buffer" else entry.device: (entry.at_most or entry.bytes) / table.MIB
        for entry in compute_buffers(shape, options, placement, era, **more)
    }


def measured(kind: str, columns: str, excluded: str, step: int = STEP, most: float = float("inf")) -> Errors:
    """Relative errors, by the farther end of a range, on the device and on the host, of every ``step``-th row."""
    return [
        (row, *errors)
        for row in table.rows()[::step]
        if row[f"{columns}_gpu"] and not row[excluded] and float(row[f"{columns}_gpu"]) <= most
        for errors in [table.errors(row, kind, columns)]
    ]


@functools.cache
def cuda() -> Errors:
    """CUDA's rows."""
    return measured("cuda", "cuda_sim", "excluded_cuda")


@functools.cache
def vulkan() -> Errors:
    """Vulkan's rows with its default pieces, up to 1 GiB."""
    return measured("vulkan", "vk1g", "excluded_vk", most=1024)


def share(errors: Sequence[float], part: float) -> float:
    """The error that this part of all rows stays under."""
    return sorted(errors)[min(len(errors) - 1, int(part * len(errors)))]


@pytest.mark.parametrize(
    ("rows", "median", "most"), [(cuda, 0.001, 0.01), (vulkan, 0.001, 0.04)], ids=["cuda", "vulkan"]
)
def test_devices(rows: Callable[[], Errors], median: float, most: float) -> None:
    """Half of the buffers are exact to 0.1 %, and 19 of 20 within 1 % (CUDA) or 4 % (Vulkan)."""
    errors = [error for _, error, _ in rows()]
    assert len(errors) > 1200 / STEP
    assert share(errors, 0.5) <= median
    assert share(errors, 0.95) <= most


@pytest.mark.parametrize("rows", [cuda, vulkan], ids=["cuda", "vulkan"])
def test_hosts(rows: Callable[[], Errors]) -> None:
    """Host buffers: half exact to 0.1 %, 19 of 20 within 5.6 %."""
    errors = [error for _, _, error in rows()]
    assert share(errors, 0.5) <= 0.001
    assert share(errors, 0.95) <= 0.056


@pytest.mark.parametrize("rows", [cuda, vulkan], ids=["cuda", "vulkan"])
def test_no_kind_is_terrible(rows: Callable[[], Errors]) -> None:
    """In every architecture and way to place it, 9 of 10 buffers are within 15 %."""
    kinds: dict[tuple[str, str], list[float]] = defaultdict(list)
    for row, error, _ in rows():
        kinds[row["arch"], row["kind"]].append(error)
    worst = {kind: share(errors, 0.9) for kind, errors in kinds.items()}
    assert max(worst.values()) <= 0.15, sorted(worst.items(), key=lambda item: -item[1])[:5]


def test_vulkan_in_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without its limit of 1 GiB for one piece, Vulkan's buffers of any size are as exact."""
    monkeypatch.setattr(compute_devices, "VULKAN_PIECE", 1 << 62)
    errors = [error for _, error, _ in measured("vulkan", "vk", "excluded_vk", step=8 * STEP)]
    assert share(errors, 0.5) <= 0.001
    assert share(errors, 0.95) <= 0.04


def gold() -> list[table.Row]:
    """Real models."""
    return [row for row in table.rows() if row["split"] == "gold"]


@pytest.mark.parametrize("row", gold(), ids=lambda row: f"{row['name']}-c{row['c']}-ngl{row['ngl']}-ub{row['ub']}")
def test_real_models(row: table.Row) -> None:
    """Shapes of real models: the device within 1 % on CUDA and 6 % on Vulkan, the host within 1 %, as dry runs print."""
    shape, placement = table.shape_and_placement(row)
    for kind, columns, bound in (("cuda", "cuda_sim", 0.01), ("vulkan", "vk", 0.06)):
        if row["excluded_vk"] and kind == "vulkan":
            continue
        entries = compute_buffers(shape, table.options(row, kind), placement, dry_run=True)
        gpu, host = (next(entry for entry in entries if entry.device == device) for device in ("gpu0", "host"))
        low, high = gpu.bytes / table.MIB, (gpu.at_most or gpu.bytes) / table.MIB
        assert low * (1 - bound) <= float(row[f"{columns}_gpu"]) <= high * (1 + bound)
        # Mamba-1 scans on the host on Vulkan; its states travel there and back.
        assert host.bytes / table.MIB == pytest.approx(float(row[f"{columns}_host"]), rel=0.02)


def everywhere(layers: int, label: str = "gpu0") -> Placement:
    """All of a model on one device."""
    return Placement(layers=(label,) * layers, output=label)


def hybrid_mixture() -> ModelShape:
    """A 35B mixture of experts with gated delta nets in three of four blocks."""
    full = Layer(heads=16, kv_heads=2, key_length=256, value_length=256, k_row=512, v_row=512, experts=256)
    linear = Layer(state_r=3 * 8192, state_s=128 * 4096, experts=256)
    return ModelShape(
        source="",
        format="config",
        architecture="qwen35moe",
        layers=tuple(full if index % 4 == 3 else linear for index in range(40)),
        embedding=2048,
        vocabulary=248320,
        context=262144,
        experts=256,
        experts_used=8,
        expert_feed_forward=512,
        shared_experts=1,
        ssm=Ssm(kind="gated-delta", inner=4096, state=128, conv=4, groups=16, dt_rank=32),
    )


def test_savings_do_not_add() -> None:
    """Two changes of which one alone saves little and the other nothing save 2 GiB together (llama.cpp#23527).

    A 10 GB card printed 3976 MiB, 3892 with fewer outputs, 3976 with the smaller mask and 1982 with both; on the host
    2408, and 1236 with the smaller mask. The experts that were copied to the card there are left out here, which moves
    the gaps between blocks by 32 MiB.
    """
    shape, placement = hybrid_mixture(), everywhere(40)
    options = LlamaOptions(
        ctx_size=150000,
        batch_size=4096,
        ubatch_size=4096,
        parallel=1,
        flash_attn="on",
        cache_type_k="q8_0",
        cache_type_v="q8_0",
    )
    after = Era(quant_copies_reserved=False, extra_blocks_skipped=False)
    old = msgspec.structs.replace(after, mask_f16=False, outputs_per_slot=False)
    base = buffers(shape, options, placement, old)
    fewer = buffers(shape, options, placement, msgspec.structs.replace(old, outputs_per_slot=True))
    smaller = buffers(shape, options, placement, msgspec.structs.replace(old, mask_f16=True))
    both = buffers(shape, options, placement, after)
    assert base["gpu0"] == smaller["gpu0"] == pytest.approx(3976, rel=0.01)
    assert (round(base["host"]), round(smaller["host"])) == (2408, 1236)
    saved = base["gpu0"] - fewer["gpu0"], base["gpu0"] - smaller["gpu0"]
    assert base["gpu0"] - both["gpu0"] > sum(saved) + 1024
    assert both["gpu0"] == pytest.approx(1982, rel=0.15)
    assert round(both["host"]) == 1236


def test_layouts_of_older_builds_are_ranges() -> None:
    """The same card with its experts in host memory printed 3976 MiB; which gaps an older build leaves is not known."""
    shape = hybrid_mixture()
    tensors = tuple(
        Tensor(name=f"blk.{index}.ffn_{part}_exps.weight", dims=dims, type="q4_k", bytes=math.prod(dims) * 144 // 256)
        for index in range(40)
        for part, dims in (("gate", (2048, 512, 256)), ("up", (2048, 512, 256)), ("down", (512, 2048, 256)))
    )
    placement = msgspec.structs.replace(
        everywhere(40), tensors=("host",) * 120, experts_on_host=tuple(range(40)), overridden=True
    )
    options = LlamaOptions(
        ctx_size=150000,
        batch_size=4096,
        ubatch_size=4096,
        parallel=1,
        flash_attn="on",
        cache_type_k="q8_0",
        cache_type_v="q8_0",
        cpu_moe=True,
    )
    old = Era(quant_copies_reserved=False, extra_blocks_skipped=False, mask_f16=False, outputs_per_slot=False)
    entries = compute_buffers(msgspec.structs.replace(shape, tensors=tensors), options, placement, old)
    (card,) = (entry for entry in entries if entry.device == "gpu0")
    assert card.at_most is not None
    assert card.at_most > card.bytes
    assert card.bytes / table.MIB == pytest.approx(3976, rel=0.02)
    assert card.at_most / table.MIB == pytest.approx(3976, rel=0.02)


def encoder() -> ModelShape:
    """An embedding model of 137 M parameters."""
    layer = Layer(heads=12, kv_heads=12, key_length=64, value_length=64, feed_forward=3072)
    return ModelShape(
        source="",
        format="config",
        architecture="nomic-bert",
        layers=(layer,) * 12,
        embedding=768,
        vocabulary=30522,
        context=8192,
        encoder=True,
        causal=False,
    )


def test_encoders_have_square_scores() -> None:
    """12 heads over 8192 tokens at once are 3072 MiB of scores; a small ubatch takes them away, flash attention too."""
    options = LlamaOptions(
        ctx_size=8192, batch_size=8192, ubatch_size=8192, parallel=1, flash_attn="off", embeddings=True
    )
    scores = 12 * 8192 * 8192 * 4 / table.MIB
    whole = buffers(encoder(), options, everywhere(12))["gpu0"]
    assert scores == 3072
    assert scores < whole < scores * 1.2
    small = msgspec.structs.replace(options, ubatch_size=512)
    assert buffers(encoder(), small, everywhere(12))["gpu0"] < 32
    flash = msgspec.structs.replace(options, flash_attn="on")
    assert buffers(encoder(), flash, everywhere(12))["gpu0"] < scores / 4


def test_output_buffer() -> None:
    """Logits of one row for each slot, and embeddings where they are asked for, are copied to the host."""
    shape, placement = table.shape_and_placement(gold()[0])
    options = LlamaOptions(ctx_size=8192, parallel=3)
    assert buffers(shape, options, placement)["output"] == 3 * 128256 * 4 / table.MIB
    asked = msgspec.structs.replace(options, embeddings=True)
    assert buffers(shape, asked, placement)["output"] == 3 * (128256 + 4096) * 4 / table.MIB


def test_everything_on_the_host() -> None:
    """Without devices there is one compute buffer, of the host, and it holds what both would have held."""
    row = gold()[0]
    shape, placement = table.shape_and_placement(row)
    both = buffers(shape, table.options(row, "rpc"), placement)
    alone = msgspec.structs.replace(table.options(row, "rpc"), devices=())
    said = buffers(shape, alone, Placement(layers=("host",) * 32, output="host"))
    assert set(said) == {"host", "output"}
    assert max(both["gpu0"], both["host"]) <= said["host"] <= both["gpu0"] + both["host"]


def test_pipeline_copies() -> None:
    """Two CUDA devices keep inputs four times; a tensor override or a software GPU ends that."""
    row = gold()[0]
    shape, _ = table.shape_and_placement(row)
    placement = Placement(layers=("gpu0",) * 16 + ("gpu1",) * 16, output="gpu1")

    def two(kind: Any, where: Placement, *, dry_run: bool = False) -> dict[str, float]:
        devices = tuple(Device(label=label, kind=kind) for label in ("gpu0", "gpu1"))
        options = msgspec.structs.replace(table.options(row, "cuda"), devices=devices)
        return buffers(shape, options, where, dry_run=dry_run)

    alone = msgspec.structs.replace(placement, overridden=True)
    piped, plain = two("cuda", placement), two("cuda", alone)
    mask, width = 8192 * 512 * 2 / table.MIB, 4096 * 512 * 4 / table.MIB
    assert piped["gpu0"] - plain["gpu0"] == pytest.approx(3 * mask + 4 * width, rel=0.15)
    assert piped["gpu1"] - plain["gpu1"] == pytest.approx(3 * mask + 4 * width, rel=0.15)
    dry = two("cuda", placement, dry_run=True)["gpu1"] - two("cuda", alone, dry_run=True)["gpu1"]
    assert dry == pytest.approx(3 * mask + 8 * width, rel=0.15), (
        "where a norm runs on the device before, two are copied"
    )
    assert piped["host"] > plain["host"] + 3 * mask
    assert two("rpc", placement)["host"] == plain["host"]


@pytest.mark.parametrize(
    ("era", "host"),
    [
        (Era(), 24.01),
        (Era(mask_f16=False), 32.01),
        (Era(mask_f16=False, mask_padded=True), 32.01),
    ],
)
def test_eras_change_the_mask(era: Era, host: float) -> None:
    """Until May 2026 the mask was f32 on the host; rows were padded to 64 until December 2025."""
    row = gold()[0]
    shape, placement = table.shape_and_placement(row)
    assert buffers(shape, table.options(row, "cuda"), placement, era)["host"] == pytest.approx(host, abs=0.01)


def test_padded_masks_cost_small_batches_more() -> None:
    """A ubatch of one token had a mask of 64 rows."""
    row = gold()[0]
    shape, placement = table.shape_and_placement(row)
    options = msgspec.structs.replace(table.options(row, "cuda"), ubatch_size=1)
    padded = buffers(shape, options, placement, Era(mask_f16=False, mask_padded=True))["host"]
    plain = buffers(shape, options, placement, Era(mask_f16=False))["host"]
    assert padded - plain == pytest.approx(63 * 8192 * 4 / table.MIB, rel=0.01)


def test_quantised_caches_are_copied_for_cuda() -> None:
    """Since May 2026 the f16 copies of one block's quantised K and V are part of CUDA's compute buffer, not before."""
    row = next(row for row in gold() if row["ctk"] == "q8_0" and row["name"] == "llama3-8B")
    shape, placement = table.shape_and_placement(row)
    options = table.options(row, "cuda")
    now = buffers(shape, options, placement)["gpu0"]
    before = buffers(shape, options, placement, Era(quant_copies_reserved=False))["gpu0"]
    copies = 2 * 2 * 32768 * 1024 / table.MIB
    assert 0.4 * copies < now - before <= copies


def test_dry_runs_forget_what_boots_pin() -> None:
    """A cache on the host without flash attention: a boot computes the scores on the host, a dry run on the GPU."""
    row = next(row for row in table.rows() if row["arch"] == "llama" and row["kvo"] == "0" and row["fa"] == "0")
    shape, placement = table.shape_and_placement(row)
    options = msgspec.structs.replace(table.options(row, "cuda"), cache_type_k="f16", cache_type_v="f16")
    boot, dry = buffers(shape, options, placement), buffers(shape, options, placement, dry_run=True)
    assert boot["host"] > 2 * dry["host"]
    assert boot["gpu0"] < dry["gpu0"]


@pytest.mark.parametrize(
    ("sizes", "runs"),
    [
        ((128, 128, 4, "f16", "f16"), True),
        ((128, 128, 4, "q8_0", "f16"), False),
        ((128, 128, 4, "q8_0", "q8_0"), True),
        ((128, 128, 4, "bf16", "bf16"), True),
        ((128, 128, 4, "q5_0", "q5_0"), False),
        ((128, 128, 4, "q4_1", "q4_1"), False),
        ((128, 128, 4, "iq4_nl", "iq4_nl"), False),
        ((100, 100, 4, "f16", "f16"), False),
        ((192, 128, 8, "f16", "f16"), True),
        ((192, 128, 4, "f16", "f16"), False),
        ((320, 256, 32, "f16", "f16"), True),
        ((512, 512, 1, "f16", "f16"), False),
        ((576, 512, 128, "f16", "f16"), True),
    ],
)
def test_head_sizes_of_cuda(sizes: tuple[int, int, int, str, str], runs: bool) -> None:
    """CUDA has flash attention kernels for fixed head sizes, some only for certain groups of heads."""
    assert compute_devices.cuda_flash(*sizes) is runs


@pytest.mark.parametrize(
    ("types", "flash", "said"),
    [
        (("q8_0", "q4_0"), "auto", "on the CPU"),
        (("q5_1", "q5_1"), "auto", "on the CPU"),
        (("q4_0", "f16"), "on", "on the CPU"),
        (("q4_0", "f16"), "auto", "turns it off"),
        (("q8_0", "q8_0"), "auto", ""),
        (("q4_0", "f16"), "off", ""),
    ],
)
def test_types_without_a_kernel_are_told(types: tuple[str, str], flash: Any, said: str) -> None:
    """Where CUDA has no flash attention for the cache's types, what it does instead is a warning with the reason."""
    shape, _ = table.shape_and_placement(gold()[0])
    for kind in ("cuda", "vulkan"):
        options = LlamaOptions(
            ctx_size=4096,
            cache_type_k=types[0],
            cache_type_v=types[1],
            flash_attn=flash,
            devices=(Device(label="gpu0", kind=kind),),
        )
        found = [note.text for note in kv.notes(shape, options) if "GGML_CUDA_FA_ALL_QUANTS" in note.text]
        assert len(found) == bool(said and kind == "cuda")
        assert all(said in text for text in found)


def test_notes() -> None:
    """What no GPU confirmed, what stood in for something unknown and what is not counted is said."""
    shape, placement = table.shape_and_placement(gold()[0])

    def kinds(kind: Any, model: ModelShape = shape, **more: Any) -> list[str]:
        options = LlamaOptions(devices=(Device(label="gpu0", kind=kind),), **more)
        found = notes(model, options, placement)
        assert all(note.bucket == "compute" for note in found)
        return [note.kind for note in found]

    assert kinds("cuda") == ["rule"]
    assert kinds("rpc") == []
    assert kinds("metal") == ["assumed"]
    assert kinds("rpc", lora=("adapter.gguf",)) == ["assumed"]
    lightning = msgspec.structs.replace(hybrid_mixture(), ssm=Ssm(kind="lightning"))
    assert kinds("rpc", lightning) == ["unknown"]
    indexed = Layer(heads=4, kv_heads=1, key_length=64, value_length=64, k_row=64, indexer_row=128)
    assert kinds("rpc", msgspec.structs.replace(shape, layers=(indexed,))) == ["unknown"]


def test_flash_attention_that_cannot_run_is_off_under_auto() -> None:
    """``auto`` turns flash attention off where the device has no kernel for a head size; a quantised V keeps it on."""
    row = gold()[0]
    shape, placement = table.shape_and_placement(row)
    for kind, head, more, flash in (
        ("cuda", 128, {}, True),
        ("cuda", 100, {}, False),
        ("vulkan", 100, {}, False),
        ("rpc", 100, {}, True),
        ("cuda", 100, {"cache_type_k": "q8_0", "cache_type_v": "q8_0"}, True),
    ):
        layer = msgspec.structs.replace(
            shape.layers[0], key_length=head, value_length=head, k_row=8 * head, v_row=8 * head
        )
        model = msgspec.structs.replace(shape, layers=(layer,) * 32, tensors=())
        options = msgspec.structs.replace(table.options(row, kind), flash_attn="auto", **more)
        where = msgspec.structs.replace(placement, tensors=())
        details = {entry.detail for entry in compute_buffers(model, options, where)}
        assert f"graph of 512 tokens, flash attention {'on' if flash else 'off'}" in details, (kind, head, more)
