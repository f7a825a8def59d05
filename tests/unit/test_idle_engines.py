"""What looks like a leak is named only where the engine and the device can have it; the verdict is the same."""

from __future__ import annotations

import pytest

from pytest_vram.checks import judge_idle
from pytest_vram.checks.idle_engines import FAMILIES, WORKSPACE
from pytest_vram.sessions.soak_gates import Gates, idle_of
from pytest_vram.sessions.soak_series import Series
from tests.unit.soak_kit import a_turn, reading

MIB = 1 << 20
RISE = [(3000 + turn) * MIB for turn in range(120)]
LLAMA_ONLY = ("--cache-ram", "checkpoints", "llama.cpp")


def words(layer: str, engine: str | None, device: str | None = None, readings: list[int] = RISE) -> str:
    """What it looks like and what settles it, of a steady rise, which is a leak whoever has it."""
    found = judge_idle({layer: readings} if layer else readings, engine=engine, device=device)
    plain = judge_idle({layer: readings} if layer else readings)
    assert (found.kind, found.slope, found.layer) == ("leak", plain.slope, plain.layer)
    assert all(cause in found.text for cause in found.alike)
    return "; ".join([*found.alike, *found.settles])


@pytest.mark.parametrize("engine", ["llama-server", "ik_llama"])
def test_host_memory_of_llama_cpp_has_its_caches_with_their_options(engine: str) -> None:
    """Both caches, and the options that turn them off."""
    said = words("host", engine)
    assert "prompt cache (--cache-ram)" in said
    assert "--cache-ram 0 --ctx-checkpoints 0" in said
    assert "if the engine is" not in said


@pytest.mark.parametrize("engine", ["ollama", "koboldcpp", "llama-cpp-python"])
def test_what_is_built_on_llama_cpp_has_its_caches_and_not_its_options(engine: str) -> None:
    """They do not take llama-server's options."""
    said = words("host", engine)
    assert "prompt cache" in said
    assert "--" not in said


@pytest.mark.parametrize("engine", ["vllm", "sglang", "transformers"])
@pytest.mark.parametrize("layer", ["host", "process", "torch-allocated", ""])
def test_engines_on_torch_have_no_cache_of_llama_cpp(engine: str, layer: str) -> None:
    """In no layer."""
    said = words(layer, engine)
    assert not [word for word in LLAMA_ONLY if word in said]


def test_engines_on_torch_have_what_is_theirs() -> None:
    """A pool holds its prefix cache; transformers is given its cache by whoever calls it."""
    assert "caches of multi-modal inputs" in words("host", "vllm")
    assert "the prefix cache is inside of it" in words("torch-allocated", "sglang")
    assert "past_key_values that something keeps" in words("torch-allocated", "transformers")
    assert "prefix cache" not in words("torch-allocated", "transformers")
    assert "the allocator's cache" in words("", "vllm")
    assert "allocator" not in words("", "llama-server")


@pytest.mark.parametrize("engine", [None, "attach", "command", "of-my-own"])
def test_of_an_unknown_engine_llama_cpp_is_a_condition(engine: str | None) -> None:
    """Named, and not claimed."""
    assert engine not in FAMILIES
    said = words("host", engine)
    assert said.startswith("if the engine is llama.cpp: prompt cache (--cache-ram)")
    assert "a longer run: a cache reaches a level; if the engine is llama.cpp, a soak with" in said


def test_cuda_is_named_on_cuda_alone() -> None:
    """Where the device is not known it may be one."""
    for device in ("cuda:0", "GPU-0f3a", None):
        said = words("process", "llama-server", device)
        assert "CUDA graphs" in said
        assert "cuBLAS" in said
    vulkan = words("process", "llama-server", "vulkan:0")
    assert "Vulkan pipelines" in vulkan
    assert "CUDA" not in vulkan
    assert "cuBLAS" not in vulkan
    assert "RPC server's own library" in words("process", "llama-server", "rpc:127.0.0.1:50052")
    assert "CUDA" not in words("process", "llama-server", "drm:card0")


@pytest.mark.parametrize(
    ("source", "named"), [("nvml-process", "CUDA graphs"), ("vulkan", "Vulkan pipelines"), ("rpc-anon", "RPC server")]
)
def test_a_soak_names_what_its_engine_and_its_source_can_have(source: str, named: str) -> None:
    """The source of a figure says what kind of device a numbered card is."""
    series = Series(period=1)
    series.engine = "vllm"
    for number in range(120):
        figure = reading((3000 + number) * MIB, source=source)
        series.add(a_turn(number + 1, idle={"gpu0": figure}), 1.0)
    found = idle_of(series, Gates())["gpu0"]
    assert found.kind == "leak"
    assert named in found.text
    assert "llama.cpp" not in found.text


def test_multiples_of_a_workspace_are_none_on_vulkan() -> None:
    """A size alone makes no cuBLAS of what cannot have it."""
    rising = [3000 * MIB + WORKSPACE * (turn // 2) for turn in range(120)]
    assert "8,519,680" in words("process", "llama-server", "cuda:0", rising)
    assert "8,519,680" not in words("process", "llama-server", "vulkan:0", rising)
