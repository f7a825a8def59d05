"""`pytest --vram-emulate` as a user runs it, on a software GPU and on a card of the fake driver."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf  # noqa: F401  (loaded before pytester's snapshot of modules: numpy cannot be loaded twice)
import pytest

from pytest_vram.backends import binary
from pytest_vram.testing import SoftwareGpu, software_gpu, weights_as_buffers, write_llama
from pytest_vram.testing.building import FakeDriverUnavailable
from pytest_vram.testing.fake_nvml import Card, FakeDriver, Memory, fake_nvml
from pytest_vram.units import GIB, MIB
from tests.conftest import Inner

pytestmark = pytest.mark.engine

TESTS = """
from pytest_vram import vram_backend

@vram_backend("small")
def test_small(vram_client):
    assert vram_client.complete("a b c", max_tokens=4).tokens_out

@vram_backend("large")
def test_large(vram_client):
    pass
"""
#: 300,000 tokens of the small model's cache take 293 MiB, 2048 take 2.
LARGE = 300_032


@pytest.fixture(scope="module")
def gpu() -> Iterator[SoftwareGpu]:
    """One software GPU for this module."""
    with software_gpu() as (found,):
        yield found


@pytest.fixture
def driver() -> Iterator[FakeDriver]:
    """A card of 4 GiB of the fake driver."""
    try:
        with fake_nvml([Card(total=4 * GIB, context=100 * MIB)]) as made:
            yield made
    except FakeDriverUnavailable as error:
        pytest.skip(str(error))


@pytest.fixture
def project(pytester: pytest.Pytester, gpu: SoftwareGpu) -> Path:
    """A small and a large deployment, and a test of each."""
    model = pytester.path / "tiny.gguf"
    write_llama(model)
    executable = next(place.path for place in binary.places() if place.usable and place.path)
    lines = ["default = 'small'"]
    for name, context in (("small", 2048), ("large", LARGE)):
        options = {
            "ctx-size": context,
            "n-gpu-layers": 99,
            "parallel": 1,
            "fit": "off",
            "rpc": gpu.endpoint,
            **weights_as_buffers(executable),
        }
        lines += [f"[backend.{name}]", "engine = 'llama-server'", f"model = {json.dumps(str(model))}"]
        lines += [f"[backend.{name}.options]", *(f"{key} = {json.dumps(value)}" for key, value in options.items())]
    pytester.path.joinpath("vram.toml").write_text("\n".join(lines) + "\n")
    pytester.makepyfile(TESTS)
    return pytester.path


def report(project: Path) -> dict[str, dict[str, Any]]:
    tests = json.loads((project / "out.json").read_text())["tests"]
    return {test["nodeid"].rpartition("::")[2]: test for test in tests}


@pytest.mark.parametrize("device", ["rpc", "rpc:0,cuda:0"])
def test_a_large_deployment_fails_to_load(
    project: Path,
    inner: Inner,
    gpu: SoftwareGpu,
    driver: FakeDriver,
    device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a played card of 150MB the small deployment answers, and the large one fails naming device and bytes; so too
    where a card of the fake driver is played beside it."""
    monkeypatch.setenv("PYTEST_VRAM_RPC", gpu.endpoint)
    for _ in range(5):  # at times the engine crashes on the failed allocation before a line of it is written
        result = inner(f"--vram-device={device}", "--vram-emulate=150MB", "--vram-report=out.json")
        result.assert_outcomes(passed=1, errors=1)
        found = report(project)
        assert found["test_small"]["outcome"] == "passed"
        text = result.stdout.str()
        if "Out of memory" in text:
            break
    # Or before it names the KV cache, which is no more than likely then.
    unsure = r"( \(likely\))?" if "SIGSEGV" in text else ""
    assert re.search(rf"Out of memory{unsure}: 293\.0 MiB of kv could not be allocated on gpu0", text), text
    assert "gpu0 is played as a card of 143.1 MiB (--vram-emulate)" in text
    assert f"RPC0[{gpu.endpoint}] buffer of size {LARGE * 1024}" in text
    run = json.loads((project / "out.json").read_text())["run"]
    assert {entry["limit_from"] for entry in run["devices"]} == {"emulated"}
    assert {entry["capacity"]["bytes"] for entry in run["devices"]} == {150_000_000}


def test_a_card_alone_is_played(project: Path, inner: Inner, gpu: SoftwareGpu, driver: FakeDriver) -> None:
    """On a card of the fake driver the rest is occupied, and no test is charged for it."""
    # It says that llama-server holds what the software GPU holds for it.
    driver.process(command=f"--model {project / 'tiny.gguf'}", held=Memory(gpu.pid, gpu.idle_bytes))
    result = inner("--vram-device=cuda:0", "--vram-emulate=1GB", "--vram-report=out.json", "-k", "small")
    result.assert_outcomes(passed=1, deselected=1)
    (test,) = report(project).values()
    peak = test["peak"]["gpu0"]
    assert 0 < peak["bytes"] < 60 * MIB
    (line,) = [
        record
        for path in project.glob(".vram/runs/*/journal.jsonl")
        for record in map(json.loads, path.read_text().splitlines())
        if record["kind"] == "device"
    ]
    assert line["limit_from"] == "emulated"
    assert "called vram-ballast" in line["notes"][-1]


@pytest.mark.parametrize(
    ("device", "size", "reason"),
    [
        ("cpu", "1GB", "host memory has no rest that could be occupied"),
        ("cuda:0", "5GiB", "it has only 4,096 MiB; name a size that is smaller"),
        ("predicted", "1GB", "nothing is measured"),
    ],
)
def test_what_cannot_be_played_is_a_usage_error(
    project: Path, inner: Inner, driver: FakeDriver, device: str, size: str, reason: str
) -> None:
    """A smaller card that cannot be played ends the run before any test, in one sentence that names the option."""
    result = inner(f"--vram-device={device}", f"--vram-emulate={size}")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    text = result.stderr.str()
    assert reason in text
    assert "(from --vram-emulate)" in text
