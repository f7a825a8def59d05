"""Verdicts on idle memory are as rarely wrong as promised, in a small seeded sample of ``ci/bench/leaks.py``.

Bounds are those that a kept promise breaks once in ten thousand samples, by the exact binomial distribution.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from scipy import stats as oracle

RUNS = 80
TURNS = 120


def _bench() -> ModuleType:
    path = Path(__file__).resolve().parents[2] / "ci" / "bench" / "leaks.py"
    spec = importlib.util.spec_from_file_location("leaks_bench", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


leaks = _bench()
PROMISED = [shape for shape in leaks.SHAPES if shape.most is not None or shape.least is not None]


@pytest.mark.parametrize("shape", PROMISED, ids=lambda shape: shape.name)
def test_a_shape_is_judged_as_promised(shape: Any) -> None:
    """False alarms stay under their bound and leaks of 1 MiB a turn are found, at 120 turns."""
    count = leaks.rates(shape, TURNS, RUNS, seed=20)[shape.kind]
    if shape.most is not None:
        assert count <= oracle.binom.ppf(0.9999, RUNS, shape.most)
    else:
        assert count >= oracle.binom.ppf(0.0001, RUNS, shape.least)


def test_long_random_walks_are_no_leaks() -> None:
    """Over 1500 turns a walk of 1 MiB a turn strays far beyond the floor, and is not called a leak more often."""
    shape = next(shape for shape in leaks.SHAPES if shape.name == "random walk, sd 1")
    assert leaks.rates(shape, 1500, RUNS, seed=20)["leak"] <= oracle.binom.ppf(0.9999, RUNS, shape.most)


def test_the_table_of_the_docs_has_every_promise() -> None:
    """Each shape with a bound stands in docs/leaks.md, and none there is broken."""
    text = (Path(__file__).resolve().parents[2] / "docs" / "leaks.md").read_text(encoding="utf-8")
    assert [shape.name for shape in PROMISED if f"| {shape.name} |" not in text] == []
    assert "not held" not in text
