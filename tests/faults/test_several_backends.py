"""Two backends in one run: a test is charged for its own server."""

from __future__ import annotations

import json
from pathlib import Path

import gguf  # noqa: F401  (loaded before pytester's snapshot of modules: numpy cannot be loaded twice)
import pytest

from pytest_vram.testing import Shape, write_llama
from tests.conftest import Inner

pytestmark = pytest.mark.engine

SPEC = """
default = "small"
[backend.small]
engine = "llama-server"
model = "tiny.gguf"
options = { ctx-size = 512, parallel = 1 }

[backend.large]
engine = "llama-server"
model = "tiny.gguf"
options = { ctx-size = 131072, parallel = 1, fit = "off" }
"""

TESTS = """
from pytest_vram import vram_backend as use

@use("large")
def test_large(vram_backend): assert vram_backend.name == "large"

def test_small(vram_backend): assert vram_backend.name == "small"

@use("small", ctx_size=1024)
def test_variant(vram_backend): assert vram_backend.asked["context"] == 1024

def test_both(vram_backends):
    vram_backends.acquire(vram_backends.spec("small"))
    vram_backends.acquire(vram_backends.spec("large"))
"""


def test_each_test_is_charged_for_its_own_backend(pytester: pytest.Pytester, inner: Inner) -> None:
    """An idle server of another backend is stopped before a new one starts; a test that uses two holds two."""
    write_llama(Path(pytester.path / "tiny.gguf"), Shape(layers=4, context=131072))
    pytester.path.joinpath("vram.toml").write_text(SPEC)
    pytester.makepyfile(TESTS)
    result = inner("--vram-device=cpu", "--vram-budget=8GB", "--vram-report=out.json")
    result.assert_outcomes(passed=4)
    table = json.loads((pytester.path / "out.json").read_text())
    tests = {test["nodeid"].rpartition("::")[2]: test for test in table["tests"]}
    kv = 2 * 4 * 131072 * 128 * 2  # 2 · layers · context · row · bytes per element
    peaks = {name: test["peak"]["host"]["bytes"] for name, test in tests.items()}
    assert peaks["test_large"] > kv
    assert peaks["test_small"] < kv / 2
    assert peaks["test_variant"] < kv / 2
    assert peaks["test_both"] > kv
    assert len(tests["test_small"]["backends"]) == 1
    buckets = {(entry["bucket"], entry["device"]) for entry in tests["test_small"]["ledger"]["entries"]}
    assert ("kv", "host") in buckets
    both = sum(entry["bytes"] for entry in tests["test_both"]["ledger"]["entries"] if entry["bucket"] == "kv")
    assert both > kv
