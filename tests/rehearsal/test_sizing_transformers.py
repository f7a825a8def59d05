"""Caches and parameters of real transformers models, summed; needs the ``transformers`` extra."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install 'pytest-vram[transformers]'")
pytest.importorskip("transformers", reason="transformers is not installed: pip install 'pytest-vram[transformers]'")
pytestmark = pytest.mark.filterwarnings("ignore")


def load() -> ModuleType:
    """The benchmark's own comparisons, so that both prove the same."""
    path = Path(__file__).parents[2] / "ci" / "bench" / "sizing_transformers.py"
    spec = importlib.util.spec_from_file_location("sizing_transformers", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


bench = load()


@pytest.mark.parametrize("name", sorted(bench.MODELS))
def test_caches_are_as_large_as_predicted(name: str) -> None:
    """Keys, values and states of a real cache take the predicted bytes, after a prompt and after one token more."""
    rows = list(bench.caches(name))
    assert rows
    assert [row for row in rows if not row.same] == []


@pytest.mark.parametrize(("backend", "bits", "package"), [("fp8", 8, ""), ("hqq", 4, "hqq"), ("quanto", 4, "optimum")])
def test_quantised_caches_are_as_large_as_predicted(backend: str, bits: int, package: str) -> None:
    """Packed numbers, their scales and the tokens kept whole take the predicted bytes."""
    if package:
        pytest.importorskip(package, reason=f"{package} is not installed")
    assert [row for row in bench.quantised(backend, bits) if not row.same] == []


@pytest.mark.parametrize(
    "name", ["llama", "qwen3_moe", "gemma3_text", "gemma4_text", "deepseek_v3", "qwen3_next", "mamba2"]
)
def test_parameters_are_those_of_the_real_model(name: str) -> None:
    """Parameters computed from ``config.json`` are those of the model that transformers makes of it."""
    computed, real = bench.parameters(name)
    assert computed == real
