"""Recipes of sparse models: a real llama-server takes each for the model that it says it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_vram.backends import dry_run
from pytest_vram.testing.real_shapes import REAL, real
from tests.unit.test_testing_sparse import RECIPES

pytestmark = pytest.mark.engine
MIB = 1 << 20


def weights(path: Path) -> int:
    """Bytes of weights on the host in the engine's dry run."""
    options = {"ctx-size": 512, "mmap": False, "repack": False}
    found = dry_run.dry_run(dry_run.find_binary(), path, options, device_none=True, timeout=30)
    return found.of("host", "model").bytes


@pytest.mark.parametrize("name", RECIPES)
def test_the_engine_accepts_every_recipe(tmp_path: Path, name: str) -> None:
    """It loads the header, finds all the tensors it asks for, and counts the bytes of the recipe as weights."""
    recipe = RECIPES[name]
    assert abs(weights(recipe.write(tmp_path / "m.gguf")) - recipe.bytes) <= MIB


@pytest.mark.parametrize("name", ["Llama-3-70B", "DeepSeek-V3", "Gemma3-27B"])
def test_the_engine_accepts_real_shapes(tmp_path: Path, name: str) -> None:
    """A sparse file of hundreds of GB is, to the dry run, the model itself."""
    assert name in REAL
    recipe = real(name)
    assert abs(weights(recipe.write(tmp_path / "m.gguf")) - recipe.bytes) <= MIB


def test_the_engine_follows_the_parts_of_a_split_model(tmp_path: Path) -> None:
    """Parts are named and numbered as gguf-split does it."""
    recipe = RECIPES["llama"]
    assert abs(weights(recipe.write(tmp_path / "m.gguf", split=3)) - recipe.bytes) <= MIB
