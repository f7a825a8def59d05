"""Offload to a software GPU: what the engine prints moves between device and host, byte for byte."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pytest_vram.backends import RunningBackend, binary, store
from pytest_vram.readings import Reading
from pytest_vram.testing import Shape, software_gpu, weights_as_buffers, write_qwen3moe
from pytest_vram.units import MIB

pytestmark = pytest.mark.engine

PRINTED = round(0.01 * MIB)
CONTEXT = 1024
Start = Callable[..., Any]


@pytest.fixture
def options() -> dict[str, Any]:
    """Weights read into buffers, one slot, nothing kept on the host between requests, no shrinking to fit."""
    executable = next(place.path for place in binary.places() if place.usable and place.path is not None)
    return {"ctx-size": CONTEXT, "parallel": 1, "cache-ram": 0, "fit": "off", **weights_as_buffers(executable)}


@pytest.fixture
def moe(tmp_path: Path) -> Shape:
    """A mixture of experts of 4 layers, in the test's folder."""
    return write_qwen3moe(tmp_path / "moe.gguf")


def weights(backend: RunningBackend) -> dict[str, int]:
    """Label → bytes of the weights as printed."""
    assert backend.boot.evidence == "complete"
    return backend.ledger.buckets()["weights"]


def test_layers_move_between_device_and_host(rehearse: Start, spec: Start, options: dict[str, Any], moe: Shape) -> None:
    """With every layer on the device its KV cache is there too; with none, all of it is on the host."""
    with software_gpu() as gpus:
        run = rehearse(spec("moe.gguf", options=options), kind="rpc", rpc=[gpus[0].endpoint])
        on = run.pool.acquire(run.pool.spec(n_gpu_layers=99))
        on_weights, on_kv = weights(on), on.ledger.buckets()["kv"]
        assert on.asked["layers_offloaded"] == 99
        on.stop()  # a device serves one server at a time
        off = run.pool.acquire(run.pool.spec(n_gpu_layers=0))
        off_weights, off_kv = weights(off), off.ledger.buckets()["kv"]
    assert on_kv == {"gpu0": moe.kv_bytes(CONTEXT)}
    assert off_kv == {"host": moe.kv_bytes(CONTEXT)}
    assert set(off_weights) == {"host"}
    # The token embeddings stay on the host whatever is offloaded.
    embeddings = moe.vocabulary * moe.embedding * 2
    assert on_weights["host"] == pytest.approx(embeddings, abs=PRINTED)
    assert sum(on_weights.values()) == pytest.approx(off_weights["host"], abs=2 * PRINTED)


def test_experts_of_n_layers_move_to_the_host(
    rehearse: Start, spec: Start, options: dict[str, Any], moe: Shape
) -> None:
    """`n-cpu-moe` 2 moves the experts of two layers, exactly, from the device's weights to the host's."""
    with software_gpu() as gpus:
        run = rehearse(spec("moe.gguf", options=options), kind="rpc", rpc=[gpus[0].endpoint])
        found = []
        for count in (0, 2):
            backend = run.pool.acquire(run.pool.spec(n_gpu_layers=99, n_cpu_moe=count))
            found.append(weights(backend))
            backend.stop()
    none, two = found
    moved = 2 * moe.expert_bytes
    assert none["gpu0"] - two["gpu0"] == pytest.approx(moved, abs=PRINTED)
    assert two["host"] - none["host"] == pytest.approx(moved, abs=PRINTED)


def test_two_devices_are_gpu0_and_gpu1_and_are_measured(
    rehearse: Start, spec: Start, options: dict[str, Any], moe: Shape
) -> None:
    """Two RPC devices share the layers under the run's labels, and each holds about what is printed for it."""
    with software_gpu(2) as gpus:
        run = rehearse(spec("moe.gguf", options=options), kind="rpc", rpc=[gpu.endpoint for gpu in gpus])
        backend = run.pool.acquire(run.pool.spec(n_gpu_layers=99))
        backend.client.complete("a" * (CONTEXT - 24), max_tokens=4)
        peaks = run.peaks().run
        ledger = backend.ledger
        assert backend.missing("layers", "chat", "properties") == []
    for label, gpu in zip(("gpu0", "gpu1"), gpus, strict=True):
        assert gpu.endpoint in ledger.devices[label]
        printed = ledger.explained()[label]
        figure = peaks[label]
        assert isinstance(figure, Reading)
        assert figure.bytes == pytest.approx(printed, abs=max(0.05 * printed, 8 * MIB))
    assert ledger.buckets()["kv"].keys() == {"gpu0", "gpu1"}
    assert sum(ledger.buckets()["kv"].values()) == moe.kv_bytes(CONTEXT)


@pytest.mark.skipif(store.find_model() is None, reason="the demo model is not in the cache: run `vram demo` once")
def test_device_holds_what_is_printed_after_a_near_full_context(
    rehearse: Start, spec: Start, options: dict[str, Any]
) -> None:
    """A real model's device memory after a near-full context agrees with its printed buffers."""
    with software_gpu() as gpus:
        run = rehearse(spec(store.DEMO_MODEL, options=options), kind="rpc", rpc=[gpus[0].endpoint])
        backend = run.pool.acquire(run.pool.spec(n_gpu_layers=99))
        reply = backend.client.complete(" hello" * (CONTEXT - 40), max_tokens=8)
        assert reply.tokens_in is not None
        assert reply.tokens_in > 0.9 * CONTEXT
        figure = run.peaks().run["gpu0"]
        printed = backend.ledger.explained()["gpu0"]
    assert isinstance(figure, Reading)
    assert backend.ledger.buckets()["kv"]["gpu0"] == 2 * 30 * 192 * 2 * CONTEXT
    assert figure.bytes == pytest.approx(printed, abs=max(0.05 * printed, 8 * MIB))
