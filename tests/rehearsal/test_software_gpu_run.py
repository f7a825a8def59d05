"""The whole plugin on a software GPU: real offload, real buffers, measured by the device's own process."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf  # noqa: F401  (loaded before pytester's snapshot of modules: numpy cannot be loaded twice)
import pytest

from pytest_vram.backends import binary
from pytest_vram.testing import Shape, SoftwareGpu, software_gpu, weights_as_buffers, write_llama, write_qwen3moe
from pytest_vram.units import MIB
from tests.conftest import Inner

pytestmark = pytest.mark.engine

PRINTED = round(0.01 * MIB)
NEAR_FULL = """
def test_near_full(vram_backend, vram_client):
    asked = vram_backend.asked["context"]
    prompt = "a " * (asked // 2 - 40)
    reply = vram_client.complete(prompt, max_tokens=16)
    assert reply.tokens_in > asked * 0.85
    print("LOG", vram_backend.log)
"""


@pytest.fixture(scope="module")
def gpus() -> Iterator[tuple[SoftwareGpu, ...]]:
    """Two software GPUs for this module; a run names those that it uses."""
    with software_gpu(2) as found:
        yield found


def spec(model: Path, *, context: int = 2048, **options: object) -> str:
    """A spec file for a model, its weights loaded into buffers."""
    executable = next(place.path for place in binary.places() if place.usable and place.path)
    table: dict[str, object] = {
        "ctx-size": context,
        "parallel": 1,
        "cache-ram": 0,
        "ctx-checkpoints": 0,
        "fit": "off",
        **weights_as_buffers(executable),
        **options,
    }
    lines = "\n".join(f"{key} = {json.dumps(value)}" for key, value in table.items())
    return (
        f"[backend.tiny]\nengine = 'llama-server'\nmodel = {json.dumps(str(model))}\n[backend.tiny.options]\n{lines}\n"
    )


def run(pytester: pytest.Pytester, inner: Inner, text: str, device: str) -> tuple[dict[str, Any], str]:
    """Run the near-full test on this deployment; the backend's record and its log."""
    pytester.path.joinpath("vram.toml").write_text(text)
    pytester.makepyfile(NEAR_FULL)
    result = inner(f"--vram-device={device}", "--vram-budget=8GB", "--vram-report=out.json", "-s")
    result.assert_outcomes(passed=1)
    table = json.loads((pytester.path / "out.json").read_text())
    (backend,) = table["backends"]
    log = re.search(r"LOG (\S+)", result.stdout.str())
    assert log is not None
    return backend, Path(log[1]).read_text()


def buckets(backend: dict[str, Any]) -> dict[tuple[str, str], int]:
    """(bucket, device) → bytes of a backend's ledger."""
    found: dict[tuple[str, str], int] = {}
    for entry in backend["ledger"]["entries"]:
        key = (entry["bucket"], entry["device"])
        found[key] = found.get(key, 0) + entry["bytes"]
    return found


def printed(log: str, pattern: str) -> int:
    """Sum of the buffers that the engine printed, read here by other means than the product's."""
    return sum(round(float(size) * MIB) for size in re.findall(pattern, log))


def check_measured(backend: dict[str, Any], labels: tuple[str, ...]) -> None:
    """Each device's measured peak agrees with its explained bytes within max(5 %, 8 MiB), and sums are exact."""
    table = buckets(backend)
    for label in labels:
        explained = sum(
            size for (bucket, device), size in table.items() if device == label and bucket != "unattributed"
        )
        measured = backend["peak"][label]
        assert measured["kind"] == "reading"
        assert abs(measured["bytes"] - explained) <= max(0.05 * explained, 8 * MIB), (label, measured, explained)
        assert explained + table["unattributed", label] == measured["bytes"]


def test_layers_move_from_the_host_to_the_device(
    pytester: pytest.Pytester, inner: Inner, gpus: tuple[SoftwareGpu, ...]
) -> None:
    """-ngl 0 against 99: weights and KV cache of every layer are on the other side, as printed."""
    model = pytester.path / "m.gguf"
    shape = Shape(layers=6, embedding=512, heads=8, kv_heads=4, feed_forward=2048)
    write_llama(model, shape)
    context = 4096
    on, on_log = run(pytester, inner, spec(model, context=context, **{"n-gpu-layers": 99}), "rpc:0")
    off, off_log = run(pytester, inner, spec(model, context=context, **{"n-gpu-layers": 0}), "rpc:0")
    on_table, off_table = buckets(on), buckets(off)
    for log, table in ((on_log, on_table), (off_log, off_table)):
        device = r"RPC0\[[^\]]+\]\s+{}\s+buffer size\s*=\s*([\d.]+) MiB"
        for bucket, word in (("weights", "model"), ("kv", "KV")):
            assert abs(table.get((bucket, "gpu0"), 0) - printed(log, device.format(word))) <= PRINTED
            host = rf"\bCPU(?:_\w+)?\s+{word}\s+buffer size\s*=\s*([\d.]+) MiB"
            assert abs(table.get((bucket, "host"), 0) - printed(log, host)) <= PRINTED
    assert abs(on_table["kv", "gpu0"] - shape.kv_bytes(context)) <= PRINTED
    assert ("kv", "host") not in on_table
    assert abs(off_table["kv", "host"] - shape.kv_bytes(context)) <= PRINTED
    assert ("kv", "gpu0") not in off_table
    assert off_table["weights", "host"] > on_table.get(("weights", "host"), 0)
    check_measured(on, ("gpu0",))


def test_experts_on_the_cpu_move_exactly_their_layers(
    pytester: pytest.Pytester, inner: Inner, gpus: tuple[SoftwareGpu, ...]
) -> None:
    """--n-cpu-moe 2 moves the expert matrices of two layers from the device to the host, within weights."""
    model = pytester.path / "moe.gguf"
    shape = write_qwen3moe(model)
    tables = {}
    for count in (0, 2):
        backend, _ = run(pytester, inner, spec(model, **{"n-gpu-layers": 99, "n-cpu-moe": count}), "rpc:0")
        tables[count] = buckets(backend)
        check_measured(backend, ("gpu0",))
    moved = 2 * shape.expert_bytes
    assert abs(tables[0]["weights", "gpu0"] - tables[2]["weights", "gpu0"] - moved) <= PRINTED
    assert abs(tables[2]["weights", "host"] - tables[0].get(("weights", "host"), 0) - moved) <= PRINTED
    assert tables[0]["kv", "gpu0"] == tables[2]["kv", "gpu0"]


def test_two_devices_are_gpu0_and_gpu1(pytester: pytest.Pytester, inner: Inner, gpus: tuple[SoftwareGpu, ...]) -> None:
    """Two RPC devices share the layers and are measured each by its own process."""
    model = pytester.path / "m.gguf"
    write_llama(model, Shape(layers=6, embedding=512, heads=8, kv_heads=4, feed_forward=2048))
    backend, log = run(pytester, inner, spec(model, context=4096, **{"n-gpu-layers": 99}), "rpc")
    table = buckets(backend)
    for index, gpu in enumerate(gpus):  # the engine calls both RPC0, and tells them apart by their address
        label = f"gpu{index}"
        for bucket, word in (("weights", "model"), ("kv", "KV")):
            pattern = rf"RPC\d\[{re.escape(gpu.endpoint)}\]\s+{word}\s+buffer size\s*=\s*([\d.]+) MiB"
            assert printed(log, pattern) > 0
            assert abs(table[bucket, label] - printed(log, pattern)) <= PRINTED
        # Several copies of the compute buffers are allocated for pipelining, and most are never touched.
        held = backend["peak"][label]["bytes"]
        assert held >= table["weights", label] + 0.85 * table["kv", label]
        printed_here = sum(size for (b, d), size in table.items() if d == label and b != "unattributed")
        assert held <= printed_here + max(0.05 * printed_here, 8 * MIB)
    names = backend["ledger"]["devices"]
    assert gpus[0].endpoint in names["gpu0"]
    assert gpus[1].endpoint in names["gpu1"]


def test_a_budget_on_the_device_fails_with_its_largest_bucket(
    pytester: pytest.Pytester, inner: Inner, gpus: tuple[SoftwareGpu, ...]
) -> None:
    """The finding names gpu0, the bucket and the source of the reading."""
    model = pytester.path / "m.gguf"
    write_llama(model, Shape(layers=6, embedding=512, heads=8, kv_heads=4, feed_forward=2048))
    pytester.path.joinpath("vram.toml").write_text(spec(model, context=4096, **{"n-gpu-layers": 99}))
    pytester.makepyfile("def test_it(vram_client): vram_client.complete('a b', max_tokens=4)\n")
    result = inner("--vram-device=rpc:0", "--vram-budget=20MB", "--vram-report=out.json")
    result.assert_outcomes(failed=1)
    (test,) = json.loads((pytester.path / "out.json").read_text())["tests"]
    text = test["findings"][0]["text"]
    assert "gpu0" in text
    assert "rpc-hwm" in text
    assert "weights" in text


def test_a_device_that_serves_one_server_at_a_time(
    pytester: pytest.Pytester, inner: Inner, gpus: tuple[SoftwareGpu, ...]
) -> None:
    """Two variants of a backend on one RPC device, asked for by two workers, run one after the other; a test that wants
    both at once is told why it cannot have them."""
    write_llama(pytester.path / "m.gguf", Shape())
    text = spec(pytester.path / "m.gguf", context=256, rpc=gpus[0].endpoint, **{"n-gpu-layers": 99})
    pytester.path.joinpath("vram.toml").write_text(text)
    pytester.makepyfile(
        """
import pytest

@pytest.mark.parametrize("turn", range(3))
@pytest.mark.parametrize("context", [256, 512])
def test_variant(context, turn, vram_backends):
    backend = vram_backends.acquire(vram_backends.spec("tiny", ctx_size=context))
    assert backend.client.complete("a b", max_tokens=2).tokens_out

def test_both(vram_backends):
    vram_backends.acquire(vram_backends.spec("tiny", ctx_size=256))
    vram_backends.acquire(vram_backends.spec("tiny", ctx_size=512))
"""
    )
    result = inner("--vram-device=cpu", "-n2")
    result.assert_outcomes(passed=6, errors=1)
    result.stdout.fnmatch_lines(["*cannot be started beside backend tiny#*serves one server at a time*"])
