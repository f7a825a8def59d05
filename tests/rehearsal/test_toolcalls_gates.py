"""Error rates of verdicts, in a small seeded sample of what ``ci/bench/gates.py`` measures in thousands of runs.

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

RUNS = 200


def _bench() -> ModuleType:
    path = Path(__file__).resolve().parents[2] / "ci" / "bench" / "gates.py"
    spec = importlib.util.spec_from_file_location("gates_bench", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


gates = _bench()


@pytest.fixture(scope="module")
def bench() -> Any:
    """Of the shipped families, with few runs."""
    return gates.Bench(RUNS, 20, gates.shipped_families(0)[1])


def at_most(share: float) -> float:
    """The share of the sample that a true share of this size exceeds once in ten thousand times."""
    return float(oracle.binom.ppf(1 - 1e-4, RUNS, share)) / RUNS


def at_least(share: float) -> float:
    """The share of the sample that a true share of this size falls short of once in ten thousand times."""
    return float(oracle.binom.ppf(1e-4, RUNS, share)) / RUNS


@pytest.mark.parametrize("correlation", [0.0, 0.3])
def test_a_deployment_at_its_target_is_left_alone(bench: Any, correlation: float) -> None:
    """300 cases at a true rate of 94 %: not_below fails 1 run of 20 at most, families correlated or not."""
    assert bench.share("not_below", bench.first_300, 0.94, correlation, "failed") <= at_most(0.05)


def test_a_drop_of_five_points_is_found(bench: Any) -> None:
    """300 cases at a true rate of 89 %: at least 85 % of the runs fail."""
    assert bench.share("not_below", bench.first_300, 0.89, 0.0, "failed") >= at_least(0.85)


@pytest.mark.parametrize("correlation", [0.0, 0.1])
def test_nothing_false_is_proven(bench: Any, correlation: float) -> None:
    """Just below the target, of many families and of few."""
    for cases in (bench.first_300, gates.made_up([5] * 14)):
        assert bench.share("proven", cases, 0.94 - 1e-9, correlation, "passed") <= at_most(0.05)


@pytest.mark.parametrize(("rate", "wrong"), [(0.94, "failed"), (0.89, "passed")])
def test_the_sequential_test_errs_seldom_and_saves_much(bench: Any, rate: float, wrong: str) -> None:
    """At both hypotheses: 1 run of 20 at most is decided wrongly, with three fifths of 334 cases at most."""
    verdicts = list(bench.verdicts("sprt", bench.first_300, rate, 0.0))
    assert sum(verdict.outcome == wrong for verdict in verdicts) / RUNS <= at_most(0.05)
    needed = sum(verdict.decided_after or verdict.n for verdict in verdicts) / RUNS
    assert needed <= 0.6 * gates.fixed_sample_size(0.94, 0.89)


@pytest.mark.parametrize("correlation", [0.0, 0.1])
def test_a_comparison_holds_its_level(bench: Any, correlation: float) -> None:
    """A loss of the whole margin is seldom taken for none, and no loss seldom for one."""
    lost = list(bench.pairs(bench.first_300, 0.065, 0.015, correlation))
    assert sum(pair.outcome == "passed" for pair in lost) / RUNS <= at_most(0.05)
    even = list(bench.pairs(bench.first_300, 0.04, 0.04, correlation))
    assert sum(pair.high < 0 for pair in even) / RUNS <= at_most(0.05)
    assert sum(pair.outcome == "failed" for pair in even) / RUNS <= at_most(0.05)
    assert sum(pair.outcome == "passed" for pair in even) / RUNS >= at_least(0.75)


def test_a_sample_notices_a_gate_that_cries_wolf(bench: Any) -> None:
    """The literal rule fails two of five runs at the target: far beyond what this sample lets pass."""
    assert bench.share("point", bench.first_300, 0.94, 0.0, "failed") > at_most(0.05)
