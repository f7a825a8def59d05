"""Compute buffers as predicted, against what a real engine prints for the same file."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from pytest_vram.backends.dry_run import dry_run, find_binary
from pytest_vram.sizing import gguf, gguf_shape, placement
from pytest_vram.sizing.compute import compute_buffers
from pytest_vram.sizing.options import Device, LlamaOptions
from pytest_vram.testing import software_gpu
from pytest_vram.testing.real_shapes import real
from tests.rehearsal import compute_boots
from tests.rehearsal import sizing_boots as boots

pytestmark = pytest.mark.engine

MIB = 1 << 20
EXACT = ("llama", "qwen3moe", "gemma2", "gemma3", "deepseek2", "mamba")


@pytest.fixture(scope="module")
def executable() -> Path:
    """The engine that is used here."""
    return boots.first_engine()


@pytest.fixture(scope="module")
def gpus(executable: Path) -> Iterator[boots.Gpus]:
    """Two software GPUs."""
    with boots.Gpus(2) as running:
        yield running


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for models."""
    return tmp_path_factory.mktemp("models")


def errors(architecture: str, count: int, executable: Path, gpus: boots.Gpus, folder: Path) -> list[float]:
    """Relative errors of every device's buffers over drawn models and settings, the largest last."""
    numbers = random.Random(architecture)
    found: list[float] = []
    for _ in range(count):
        one = boots.draw(architecture, numbers)
        found += [row.error for row in compute_boots.compare(executable, folder, one, gpus)]
    return sorted(found)


@pytest.mark.parametrize("architecture", EXACT)
def test_drawn_models(architecture: str, executable: Path, gpus: boots.Gpus, folder: Path) -> None:
    """Real boots of drawn models on the host and on software GPUs print what is predicted: nine in ten to 1 %."""
    found = errors(architecture, 7, executable, gpus, folder)
    assert found[len(found) // 2] <= 0.001
    assert found[int(len(found) * 0.9)] <= 0.01


@pytest.mark.parametrize("architecture", sorted(set(boots.DRAWN) - set(EXACT)))
def test_other_drawn_models(architecture: str, executable: Path, gpus: boots.Gpus, folder: Path) -> None:
    """Hybrids, encoders and the like: half of the buffers to 0.1 %, four of five to 1 %."""
    found = errors(architecture, 4, executable, gpus, folder)
    assert found[len(found) // 2] <= 0.001
    assert found[int(len(found) * 0.8)] <= 0.01


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("Llama-3-70B", {"ctx_size": 16384}),
        ("Llama-3-70B", {"ctx_size": 8192, "n_gpu_layers": 40}),
        ("DeepSeek-V3", {"ctx_size": 8192}),
        ("DeepSeek-V3", {"ctx_size": 32768, "n_cpu_moe": 61}),
        ("DeepSeek-V3", {"ctx_size": 8192, "flash_attn": "off"}),
        ("Gemma3-27B", {"ctx_size": 32768}),
        ("Gemma3-27B", {"ctx_size": 32768, "ubatch_size": 2048, "swa_full": True}),
        ("Qwen3-235B-A22B", {"ctx_size": 32768, "n_cpu_moe": 94}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(f"{key}={one}" for key, one in value.items()),
)
def test_large_models(name: str, more: dict[str, int | str], folder: Path) -> None:
    """Sparse files of 27 to 671 billion parameters: the dry run's column ``compute``, within 1 MiB and 2 %."""
    model = real(name).write(folder / f"{name}.gguf")
    given = {"flash_attn": "on", "parallel": 1, "kv_unified": False, **more}
    options = LlamaOptions(devices=(Device(label="gpu0", kind="rpc", name="RPC0"),), **given)  # type: ignore[arg-type]
    shape = gguf_shape.shape_of(gguf.read(model))
    where = placement.place(shape, options)
    said: dict[str, int] = {}
    for entry in compute_buffers(shape, options, where, dry_run=True):
        if entry.detail != "output buffer":
            said[entry.device] = said.get(entry.device, 0) + entry.bytes
    words = {key.replace("_", "-"): value for key, value in given.items()}
    with software_gpu() as (gpu,):
        run = dry_run(find_binary(), model, words, endpoints=[gpu.endpoint])
    for label in ("gpu0", "host"):
        assert said[label] == pytest.approx(run.of(label, "compute").bytes, rel=0.02, abs=MIB), label
