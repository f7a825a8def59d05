"""Estimates of models of any size stand beside the engine's own dry run, bucket by bucket."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pytest_vram.backends import binary
from pytest_vram.backends.dry_run import Comparison, compare, dry_run
from pytest_vram.sizing import estimate
from pytest_vram.testing import recipes, software_gpu
from pytest_vram.testing.recipes import Recipe, Types
from pytest_vram.testing.software import SoftwareGpu

pytestmark = pytest.mark.engine

#: How far a compute buffer may be off, by the farther end of its range.
COMPUTE = 0.15
TYPES = Types(matrices="q4_k", output="q6_k")
SHAPES: dict[str, Recipe] = {
    "llama 70B": recipes.llama(
        layers=80,
        embedding=8192,
        heads=64,
        kv_heads=8,
        head_size=128,
        feed_forward=28672,
        vocabulary=128256,
        context=131072,
        types=TYPES,
    ),
    "deepseek 671B": recipes.deepseek2(
        layers=61,
        embedding=7168,
        heads=128,
        query_rank=1536,
        kv_rank=512,
        rope=64,
        nope=128,
        value=128,
        feed_forward=18432,
        leading_dense=3,
        experts=256,
        experts_used=8,
        expert_feed_forward=2048,
        vocabulary=129280,
        context=163840,
        types=TYPES,
    ),
    "gemma 27B": recipes.gemma(
        layers=62,
        embedding=5376,
        heads=32,
        kv_heads=16,
        head_size=128,
        feed_forward=21504,
        window=1024,
        vocabulary=262208,
        context=131072,
        types=TYPES,
    ),
}
SETTINGS: dict[str, dict[str, Any]] = {
    "automatic": {"ctx-size": 65536},
    "slots, q8_0": {"ctx-size": 32768, "parallel": 2, "cache-type-k": "q8_0", "cache-type-v": "q8_0"},
    "20 layers": {"ctx-size": 16384, "parallel": 1, "n-gpu-layers": 20, "ubatch-size": 256},
    "experts on the CPU": {"ctx-size": 65536, "parallel": 1, "n-cpu-moe": 40, "n-gpu-layers": 99},
}
CASES = [
    (shape, settings)
    for shape in SHAPES
    for settings in SETTINGS
    if ("experts" in settings) <= (shape == "deepseek 671B")
]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The models, which take some blocks of the disk each."""
    folder = tmp_path_factory.mktemp("shapes")
    return {name: recipe.write(folder / f"{name}.gguf") for name, recipe in SHAPES.items()}


@pytest.fixture
def gpu() -> Iterator[SoftwareGpu]:
    """A software GPU of the build that runs here."""
    with software_gpu() as (device,):
        yield device


def rows(model: Path, options: dict[str, Any], endpoints: list[str]) -> list[Comparison]:
    """The rules beside the engine."""
    engine = next(place.path for place in binary.places() if place.usable and place.path is not None)
    options = {**options, "mmap": False}  # a dry run maps nothing, whatever the boot would do
    dry = dry_run(engine, model, options, endpoints=endpoints)
    names = ",".join(f"RPC{index}" for index in range(len(endpoints)))
    rules = estimate(str(model), device=names, **{name.replace("-", "_"): value for name, value in options.items()})
    assert rules.unknown == ()
    return list(compare(rules, dry))


def check(found: list[Comparison]) -> None:
    """Weights and caches to the printed digit, compute within its share."""
    assert {(row.group, row.device) for row in found} >= {("weights", "gpu0"), ("kv", "gpu0"), ("compute", "gpu0")}
    wrong = [row for row in found if not row.agree and (row.group != "compute" or row.error > COMPUTE)]
    assert wrong == []


@pytest.mark.parametrize(("shape", "settings"), CASES)
def test_the_rules_agree_with_the_engine(files: dict[str, Path], gpu: SoftwareGpu, shape: str, settings: str) -> None:
    """A 70B, a 671B with latent attention and a 27B with windows: every bucket of every device."""
    check(rows(files[shape], SETTINGS[settings], [gpu.endpoint]))


def test_two_cards_agree_as_well(files: dict[str, Path]) -> None:
    """Layers that are divided by a given split, on two software GPUs."""
    with software_gpu(2) as devices:
        settings = {"ctx-size": 8192, "parallel": 1, "tensor-split": "3,1"}
        found = rows(files["llama 70B"], settings, [device.endpoint for device in devices])
    check(found)
    assert {row.device for row in found} == {"gpu0", "gpu1", "host"}
