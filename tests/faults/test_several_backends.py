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


RESTARTS = """
import pathlib, time

def test_uses(vram_client):
    pathlib.Path("in use").touch()
    deadline = time.monotonic() + 60
    while not pathlib.Path("refused").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert vram_client.complete("a b", max_tokens=2).tokens_out

def test_restarts(vram_backend):
    import pytest
    from pytest_vram.errors import BackendError
    while not pathlib.Path("in use").exists():
        time.sleep(0.02)
    with pytest.raises(BackendError, match="test_uses uses it.*serial_only"):
        vram_backend.restart()
    pathlib.Path("refused").touch()
"""


def test_a_restart_does_not_pull_the_server_from_under_another_test(pytester: pytest.Pytester, inner: Inner) -> None:
    """A backend that another worker's test uses is not restarted; the message says what to do."""
    write_llama(Path(pytester.path / "tiny.gguf"))
    pytester.path.joinpath("vram.toml").write_text(
        "[backend.x]\nengine = 'llama-server'\nmodel = 'tiny.gguf'\noptions = { ctx-size = 512, parallel = 1 }\n"
    )
    pytester.makepyfile(RESTARTS)
    result = inner("--vram-device=cpu", "--vram-budget=4GB", "-n2", "--dist=load", "--maxschedchunk=1")
    result.assert_outcomes(passed=2)


def test_a_dead_backend_can_be_restarted(pytester: pytest.Pytester, inner: Inner) -> None:
    """restart() of a server that died starts the next generation."""
    write_llama(Path(pytester.path / "tiny.gguf"))
    pytester.path.joinpath("vram.toml").write_text(
        "[backend.x]\nengine = 'llama-server'\nmodel = 'tiny.gguf'\noptions = { ctx-size = 512, parallel = 1 }\n"
    )
    pytester.makepyfile(
        """
        import os, signal, time

        def test_it(vram_backend, vram_client):
            pid = vram_backend.pid
            os.kill(pid, signal.SIGKILL)
            while os.path.exists(f"/proc/{pid}/exe"):
                time.sleep(0.01)
            vram_backend.restart()
            assert vram_backend.generation == 2
            assert vram_client.complete("a b", max_tokens=2).tokens_out
        """
    )
    result = inner("--vram-device=cpu", "--vram-budget=4GB", "--vram-report=out.json")
    assert result.ret == 1  # it died in the test, which is an error however well the test went on
    text = " ".join(result.stdout.str().split())
    assert "SIGKILL" in text
    assert json.loads((pytester.path / "out.json").read_text())["tests"][0]["backends"] == ["x#1", "x#2"]
