"""Weights on the host: mapped from the file, reordered for the CPU, or both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pytest_vram.backends import dry_run
from pytest_vram.ledger import Entry
from pytest_vram.sizing import estimating, gguf, gguf_shape, host_weights, placement, weights
from pytest_vram.sizing.options import Device, LlamaOptions
from pytest_vram.sizing.shape import ModelShape
from pytest_vram.testing import recipes
from pytest_vram.testing.recipes import Recipe, Types

CARD = Device(label="gpu0", kind="cuda", name="CUDA0")
REMOTE = Device(label="gpu0", kind="rpc", name="RPC0")


def shape_of(folder: Path, recipe: Recipe, split: int = 1) -> ModelShape:
    return gguf_shape.shape_of(gguf.read(recipe.write(folder / "m.gguf", split=split)))


def on_host(shape: ModelShape, *, dry: bool = False, **values: Any) -> tuple[int, int]:
    """Both ends of what the host holds, in bytes."""
    values.setdefault("devices", ())
    options = LlamaOptions(**values)
    found = weights.weights(shape, options, placement.place(shape, options), dry_run=dry)
    entries = [one for one in found if one.device == "host"]
    return sum(one.bytes for one in entries), sum(one.bytes if one.at_most is None else one.at_most for one in entries)


def of_type(type_name: str) -> Recipe:
    return recipes.llama(layers=4, types=Types(matrices=type_name, embedding="q6_k", output=type_name))


@pytest.mark.parametrize("type_name", ["q4_0", "q4_k", "q2_k", "q5_k", "q6_k", "iq4_nl", "mxfp4", "q8_0", "f16"])
def test_a_mapped_file_and_reordered_copies_add_up(type_name: str, tmp_path: Path) -> None:
    """With the file mapped, the upper end has every matrix that some CPU reorders a second time; the lower has none."""
    shape = shape_of(tmp_path, of_type(type_name))
    file = sum(one.bytes for one in shape.tensors)
    matrices = [one for one in shape.tensors if one.type == type_name and len(one.dims) == 2 and one.dims[1] % 32 == 0]
    others = [one for one in shape.tensors if one not in matrices]
    stretch = max(one.offset + one.bytes for one in others) - min(one.offset for one in others)
    low, high = on_host(shape)
    assert low == pytest.approx(file, abs=64)
    assert stretch + sum(one.bytes for one in matrices) <= high
    assert high <= file + 1.15 * sum(one.bytes for one in shape.tensors)


@pytest.mark.parametrize("type_name", ["f32", "q5_0", "q5_1", "q3_k"])
def test_types_that_no_cpu_reorders_are_exact(type_name: str, tmp_path: Path) -> None:
    """A mapped file of a type without an order of its own is one figure."""
    low, high = on_host(shape_of(tmp_path, of_type(type_name)))
    assert low == high


@pytest.mark.parametrize("devices", [(), (REMOTE,), (CARD,)])
def test_without_repacking_the_figure_is_exact(devices: tuple[Device, ...], tmp_path: Path) -> None:
    """--no-repack leaves the file's order, so that nothing is a range."""
    shape = shape_of(tmp_path, of_type("q4_k"))
    for mmap in (True, False):
        low, high = on_host(shape, devices=devices, n_gpu_layers=2, repack=False, mmap=mmap)
        assert low == high


def test_pinned_memory_goes_before_reordering(tmp_path: Path) -> None:
    """Beside a card whose backend has pinned memory the CPU reorders nothing, unless --no-host takes that away."""
    shape = shape_of(tmp_path, of_type("q4_k"))
    low, high = on_host(shape, devices=(CARD,), n_gpu_layers=2)
    assert low == high
    low, high = on_host(shape, devices=(CARD,), n_gpu_layers=2, no_host=True)
    assert low < high
    low, high = on_host(shape, devices=(REMOTE,), n_gpu_layers=2)
    assert low < high


def test_a_mapped_stretch_covers_what_lies_between(tmp_path: Path) -> None:
    """Experts on the host map the file from the first tensor on the host to the last, attention of a card included."""
    recipe = recipes.qwen3moe(layers=4, types=Types(matrices="q4_1", experts="q4_1", embedding="q4_1", output="q4_1"))
    shape = shape_of(tmp_path, recipe)
    mapped, _ = on_host(shape, devices=(CARD,), cpu_moe=True)
    held, _ = on_host(shape, devices=(CARD,), cpu_moe=True, mmap=False)
    here = [index for index, one in enumerate(shape.tensors) if "_exps" in one.name or one.name.startswith("token_")]
    stretch = sum(one.bytes for one in shape.tensors[min(here) : max(here) + 1])
    assert mapped == pytest.approx(stretch, abs=32 * len(shape.tensors))
    assert held < mapped


def test_parts_of_a_model_are_mapped_one_by_one(tmp_path: Path) -> None:
    """A model in several files takes no more on the host than one in a single file."""
    whole = on_host(shape_of(tmp_path, of_type("q4_1")))
    (tmp_path / "parts").mkdir()
    parts = shape_of(tmp_path / "parts", of_type("q4_1"), split=3)
    assert {tensor.part for tensor in parts.tensors} == {0, 1, 2}
    assert on_host(parts)[0] == pytest.approx(whole[0], abs=64)


def test_a_dry_run_leaves_the_mapped_file_out(tmp_path: Path) -> None:
    """As a dry run counts, weights are there once; the mapped file beside them is an entry that it leaves out."""
    shape = shape_of(tmp_path, of_type("q4_k"))
    options = LlamaOptions(devices=())
    found = weights.weights(shape, options, placement.place(shape, options), dry_run=True)
    beside = [one for one in found if dry_run.left_out(one)]
    once = [one for one in found if not dry_run.left_out(one)]
    assert sums(once) == on_host(shape, mmap=False)
    assert len(beside) == 1
    assert sums(found)[1] >= on_host(shape)[1]


def test_a_range_of_the_host_says_what_makes_it_one(tmp_path: Path) -> None:
    """A range of the host's weights comes with a note of what decides it, and of how to make it exact."""
    model = of_type("q4_k").write(tmp_path / "m.gguf")
    said = " ".join(note.text for note in estimating.estimate(model, device="none", ctx_size=512).notes)
    assert "CPU_REPACK" in said
    assert "--no-repack" in said
    exact = estimating.estimate(model, device="none", ctx_size=512, repack=False)
    assert "CPU_REPACK" not in " ".join(note.text for note in exact.notes)


def test_amx_tiles_are_larger_than_the_file(tmp_path: Path) -> None:
    """AMX keeps four bytes more for each block of Q8_0: 12 % on top of those matrices, mapped or not."""
    shape = shape_of(tmp_path, of_type("q8_0"))
    options = LlamaOptions(devices=(), mmap=False)
    made = host_weights.amounts(shape, options, [host_weights.Held(tensor) for tensor in shape.tensors])
    matrices = sum(one.bytes for one in shape.tensors if one.type == "q8_0" and one.dims[1:] and one.dims[1] % 32 == 0)
    assert sum(made.buffers[-1]) - sum(made.buffers[0]) == matrices * 4 // 34


def sums(entries: list[Entry]) -> tuple[int, int]:
    return sum(one.bytes for one in entries), sum(one.bytes if one.at_most is None else one.at_most for one in entries)
