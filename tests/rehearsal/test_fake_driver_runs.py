"""Whole runs on a card of the fake driver whose memory is a software GPU's: real offload, listed by NVML."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf  # noqa: F401  (loaded before pytester's snapshot of modules: numpy cannot be loaded twice)
import pytest

from pytest_vram.backends import binary
from pytest_vram.testing import (
    Card,
    FakeDriver,
    FakeDriverUnavailable,
    Memory,
    Shape,
    SoftwareGpu,
    fake_nvml,
    software_gpu,
    weights_as_buffers,
    write_llama,
    write_qwen3moe,
)
from pytest_vram.units import GIB, MIB
from tests.conftest import Inner, plain

pytestmark = pytest.mark.engine

CONTEXT = 256
#: What is in use before the run, by nobody who is listed.
BEFORE = 300 * MIB
NEAR_FULL = """
def test_near_full(vram_backend, vram_client):
    prompt = "a " * (vram_backend.asked["context"] // 2 - 20)
    assert vram_client.complete(prompt, max_tokens=4).tokens_in > 150
"""
#: Changes what the fake driver shows, from within a test.
CHANGE = """
import os
from pathlib import Path

def change(old, new):
    path = Path(os.environ["PYTEST_VRAM_FAKE_NVML"])
    text = path.read_text()
    assert old in text
    scratch = path.with_name("changed")
    scratch.write_text(text.replace(old, new))
    scratch.replace(path)
"""


@pytest.fixture(scope="module")
def gpu() -> Iterator[SoftwareGpu]:
    """The software GPU whose memory is the card's."""
    with software_gpu() as (found,):
        yield found


@pytest.fixture
def driver(gpu: SoftwareGpu) -> Iterator[FakeDriver]:
    """A card of 4 GiB, on which whatever llama-server uses the software GPU holds that one's memory."""
    card = Card(name="NVIDIA GeForce RTX 3050 Laptop GPU", total=4 * GIB, reserved=200 * MIB, hidden=BEFORE)
    try:
        with fake_nvml([card]) as made:
            made.process(command=f"--rpc {gpu.endpoint}", held=Memory(gpu.pid, base=gpu.idle_bytes))
            yield made
    except FakeDriverUnavailable as reason:
        pytest.skip(str(reason))


def write_spec(folder: Path, gpu: SoftwareGpu, **options: object) -> None:
    """A config file whose backend is served by the software GPU, its weights in buffers."""
    executable = next(place.path for place in binary.places() if place.usable and place.path)
    table: dict[str, object] = {
        "rpc": gpu.endpoint,
        "ctx-size": CONTEXT,
        "ubatch-size": 64,
        "parallel": 1,
        "cache-ram": 0,
        "ctx-checkpoints": 0,
        "fit": "off",
        "n-gpu-layers": 99,
        **weights_as_buffers(executable),
        **options,
    }
    lines = "\n".join(f"{key} = {json.dumps(value)}" for key, value in table.items())
    text = f"[backend.tiny]\nengine = 'llama-server'\nmodel = 'm.gguf'\n[backend.tiny.options]\n{lines}\n"
    folder.joinpath("vram.toml").write_text(text)


def report(folder: Path) -> dict[str, Any]:
    """The report of the run."""
    found: dict[str, Any] = json.loads((folder / "out.json").read_text())
    return found


def near_full(pytester: pytest.Pytester, inner: Inner, gpu: SoftwareGpu, **options: object) -> dict[str, Any]:
    """Run the near-full test on a deployment with these options; the backend's record."""
    write_spec(pytester.path, gpu, **options)
    pytester.makepyfile(NEAR_FULL)
    result = inner("--vram-device=cuda:0", "--vram-budget=3GB", "--vram-report=out.json")
    result.assert_outcomes(passed=1)
    (backend,) = report(pytester.path)["backends"]
    return dict(backend)


def explained(backend: dict[str, Any], label: str = "gpu0") -> int:
    """Bytes of a device that the engine's own log explains."""
    entries = backend["ledger"]["entries"]
    return sum(one["bytes"] for one in entries if one["device"] == label and one["bucket"] != "unattributed")


def check(backend: dict[str, Any], source: str) -> int:
    """The card's figure is of this source and agrees with the ledger within max(5 %, 8 MiB); that figure."""
    peak = backend["peak"]["gpu0"]
    assert peak["kind"] == "reading"
    assert peak["source"] == source
    assert abs(peak["bytes"] - explained(backend)) <= max(0.05 * explained(backend), 8 * MIB), peak
    return int(peak["bytes"])


def test_layers_change_the_figure_of_the_process(
    pytester: pytest.Pytester, inner: Inner, gpu: SoftwareGpu, driver: FakeDriver
) -> None:
    """`-ngl` moves what NVML lists under llama-server's PID, by what the ledger says of each setting."""
    shape = Shape(layers=6, embedding=512, heads=8, kv_heads=4, feed_forward=2048)
    write_llama(pytester.path / "m.gguf", shape)
    figures, ledgers = [], []
    for layers in (99, 3):
        backend = near_full(pytester, inner, gpu, **{"n-gpu-layers": layers})
        figures.append(check(backend, "nvml-process"))
        ledgers.append(explained(backend))
    assert figures[0] - figures[1] == pytest.approx(ledgers[0] - ledgers[1], abs=8 * MIB)
    assert figures[0] - figures[1] > 30 * MIB
    assert driver.uuid() in json.dumps(report(pytester.path))


def test_experts_on_the_host_leave_the_figure_of_the_process(
    pytester: pytest.Pytester, inner: Inner, gpu: SoftwareGpu, driver: FakeDriver
) -> None:
    """`n-cpu-moe` takes the experts of as many layers off the card, as NVML's figure of the process shows."""
    shape = write_qwen3moe(
        pytester.path / "m.gguf", Shape(layers=4, embedding=512, feed_forward=1024, experts=8, experts_used=2)
    )
    figures = []
    for count in (0, 3):
        backend = near_full(pytester, inner, gpu, **{"n-cpu-moe": count})
        figures.append(check(backend, "nvml-process"))
    assert figures[0] - figures[1] == pytest.approx(3 * shape.expert_bytes, abs=8 * MIB)


def test_without_figures_by_process_the_rise_of_the_card_stands(
    pytester: pytest.Pytester, inner: Inner, gpu: SoftwareGpu, driver: FakeDriver
) -> None:
    """Where the driver lists processes without figures, the card's rise over its quiet state is the figure, labelled."""
    write_llama(pytester.path / "m.gguf", Shape(layers=6, embedding=512, heads=8, kv_heads=4, feed_forward=2048))
    driver.process(command=f"--rpc {gpu.endpoint}", held=Memory(gpu.pid, base=gpu.idle_bytes), available=False)
    backend = near_full(pytester, inner, gpu)
    check(backend, "device-delta")
    note = backend["peak"]["gpu0"]["note"]
    assert "less the 300.0 MiB" in note
    assert "N/A" in note


def test_a_card_lost_in_the_middle_of_a_test_is_an_error(
    pytester: pytest.Pytester, inner: Inner, gpu: SoftwareGpu, driver: FakeDriver
) -> None:
    """When the card falls off the bus during a test, that test is an error that says so, and no later one passes."""
    write_llama(pytester.path / "m.gguf")
    write_spec(pytester.path, gpu)
    pytester.makepyfile(
        CHANGE
        + """
def test_before(vram_client):
    vram_client.complete("a", max_tokens=4)

def test_lost(vram_client):
    vram_client.complete("a", max_tokens=4)
    change("\\nprocess", "\\nfault\\tall\\t15\\t0\\t0\\nprocess")
    vram_client.complete("a", max_tokens=4)

def test_after(vram_client):
    vram_client.complete("a", max_tokens=4)
"""
    )
    result = inner("--vram-device=cuda:0", "--vram-budget=3GB", "--vram-report=out.json")
    text = plain(result.stdout.str())
    outcomes = result.parseoutcomes()
    assert result.ret != 0
    assert "GPU is lost" in text
    assert outcomes.get("errors", 0) + outcomes.get("failed", 0) >= 1, text
    assert outcomes["passed"] == 1, text


GROWS = (
    CHANGE
    + """
def test_grows(vram_client, vram):
    vram_client.complete("a", max_tokens=4)
    change(f"\\tconstant\\t{100 << 20}", f"\\tconstant\\t{700 << 20}")
    vram.now()
    vram.now()
    vram_client.complete("a", max_tokens=4)
"""
)


@pytest.fixture
def stranger(driver: FakeDriver) -> Iterator[int]:
    """PID of a process of somebody else that holds 100 MiB of the card."""
    command = [sys.executable, "-S", "-c", "import sys; sys.stdin.read()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, env={}) as process:
        assert process.stdin is not None
        driver.process(process.pid, 100 * MIB)
        yield process.pid
        process.stdin.close()


def test_a_stranger_that_grows_is_named(
    pytester: pytest.Pytester, inner: Inner, gpu: SoftwareGpu, stranger: int
) -> None:
    """A process of somebody else that grows on the card during a test is told, with its PID, and is in no figure."""
    write_llama(pytester.path / "m.gguf")
    write_spec(pytester.path, gpu)
    pytester.makepyfile(GROWS)
    result = inner("--vram-device=cuda:0", "--vram-budget=200MB", "--vram-report=out.json")
    result.assert_outcomes(passed=1)
    (test,) = report(pytester.path)["tests"]
    (told,) = test["strangers"]
    assert (told["pid"], told["held"], told["grew"]) == (stranger, 700 * MIB, 600 * MIB)
    assert told["name"].startswith("python")
    assert not told.get("decisive")
    assert test["peak"]["gpu0"]["bytes"] < 100 * MIB


def test_a_stranger_within_the_figure_is_an_error(
    pytester: pytest.Pytester, inner: Inner, gpu: SoftwareGpu, driver: FakeDriver, stranger: int
) -> None:
    """Where the card's rise stands for the run, a stranger's growth is within it: an error that names the PID."""
    driver.process(command=f"--rpc {gpu.endpoint}", held=Memory(gpu.pid, base=gpu.idle_bytes), available=False)
    write_llama(pytester.path / "m.gguf")
    write_spec(pytester.path, gpu)
    pytester.makepyfile(GROWS)
    result = inner("--vram-device=cuda:0", "--vram-budget=200MB", "--vram-report=out.json")
    result.assert_outcomes(errors=1)
    text = plain(result.stdout.str())
    assert f"{stranger}" in text, text
    assert "attach" in text, text
