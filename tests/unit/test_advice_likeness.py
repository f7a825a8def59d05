"""A model that is not the log's lends it no figures, and options that the log contradicts give way to it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pytest_vram.advice import doubts, of_boot
from pytest_vram.cli.entry import main
from pytest_vram.sizing import estimating
from pytest_vram.sizing.shape import ModelShape
from pytest_vram.testing import recipes
from pytest_vram.units import MIB
from tests.unit.test_advice_logs import CACHE, boot, entry, failed, saving

FACTS: dict[str, Any] = {**CACHE, "context": 16384, "layers": 8, "layers_offloaded": 9, "layers_offloadable": 9}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of eight layers, whose cache takes 256 MiB for 16,384 tokens."""
    model = recipes.llama(layers=8, embedding=512, heads=8, kv_heads=8, head_size=64)
    return model.write(tmp_path_factory.mktemp("model") / "model.gguf")


@pytest.fixture(scope="module")
def shape(path: Path) -> ModelShape:
    """What is known of it."""
    return estimating.load(path)


def test_the_logs_own_model_is_not_doubted(shape: ModelShape) -> None:
    """Every figure agrees, and the advice is the estimate's."""
    size = sum(tensor.bytes for tensor in shape.tensors)
    facts = {**FACTS, "architecture": shape.architecture, "model_bytes": size + 10_000, "kv_bytes": 256 * MIB}
    log = boot(entry("weights", 20), failure=failed("compute", 100), **facts)
    assert doubts(log, shape=shape, options={"ctx-size": 16384}) == ()
    assert {one.source for one in of_boot(log, shape=shape, options={"ctx-size": 16384})} == {"estimate"}


@pytest.mark.parametrize(
    ("facts", "failure", "words"),
    [
        ({"layers": 64}, failed("compute", 100), "layers: 8, the log has 64"),
        ({"layers_offloadable": 65, "layers": None}, failed("compute", 100), "layers: 8, the log has 64"),
        ({"architecture": "qwen35"}, failed("compute", 100), "architecture: llama, the log has qwen35"),
        ({"kv_bytes": 3584 * MIB}, failed("compute", 100), "KV cache: 256.0 MiB, the log has 3,584 MiB"),
        ({"kv_bytes": 100 * MIB}, failed("compute", 100), "KV cache: 256.0 MiB, the log has 100.0 MiB"),
        ({}, failed("kv", 4096), "KV cache: 256.0 MiB, the log has one of 4,096 MiB"),
        ({"parameters": 27_000_000_000}, failed("compute", 100), "the log has 27 billion"),
        ({"model_bytes": 16 << 30}, failed("compute", 100), "the log has 16,384 MiB"),
        ({"model_name": "Another"}, failed("compute", 100), "the log has 'Another'"),
    ],
)
def test_another_model_is_said_and_not_used(facts: dict[str, Any], failure: Any, words: str, shape: ModelShape) -> None:
    """One contradiction is enough: no figure of the file counts, and nothing is called enough by it."""
    known = {name: value for name, value in {**FACTS, **facts}.items() if value is not None}
    log = boot(entry("weights", 20), failure=failure, **known)
    if shape.name == "":
        shape = msgspec.structs.replace(shape, name="model")
    (doubt,) = doubts(log, shape=shape, options={})
    assert "is not that of this log" in doubt
    assert words in doubt
    assert {one.source for one in of_boot(log, shape=shape, options={})} <= {"engine-log", "rule"}


def test_the_log_says_what_was_in_force(shape: ModelShape) -> None:
    """Options of another start do not count, and that is said."""
    asked = failed("kv", 256, free=100 * MIB)
    log = boot(entry("weights", 20), failure=asked, **FACTS)
    (doubt,) = doubts(log, shape=shape, options={"ctx-size": 4096, "n-gpu-layers": 99, "parallel": 1})
    assert doubt == "--ctx-size 4096 was given, and the log says 16384: the log's value counts"
    assert saving(of_boot(log, shape=shape, options={"ctx-size": 4096}))["ctx-size"].before == "16384"


@pytest.mark.parametrize(("asked", "slots"), [(16384, 1), (16200, 1), (0, 1), (16100, 2)])
def test_a_context_is_rounded_up(asked: int, slots: int, shape: ModelShape) -> None:
    """What an engine makes of a context is no contradiction."""
    log = boot(entry("weights", 20), failure=failed("compute", 100), **{**FACTS, "slots": slots})
    assert doubts(log, shape=shape, options={"ctx-size": asked, "parallel": slots}) == ()


def test_the_command_warns(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``vram boot --model`` with a file of eight layers and the log of 64 says so among its warnings."""
    log = tmp_path / "server.log"
    log.write_text(
        "load_tensors: loading model tensors, this can take a while... (mmap = true)\n"
        "load_tensors: offloaded 65/65 layers to GPU\n"
        "load_tensors:        CUDA0 model buffer size =  4095.05 MiB\n"
        "llama_context: constructing llama_context\n"
        "llama_context: n_ctx         = 32768\n"
        "ggml_backend_cuda_buffer_type_alloc_buffer: allocating 4096.00 MiB on device 0: cudaMalloc failed: "
        "out of memory\n"
        "alloc_tensor_range: failed to allocate CUDA0 buffer of size 4294967296\n"
        "llama_init_from_model: failed to initialize the context: failed to allocate buffer for kv cache\n",
        encoding="utf-8",
    )
    assert main(["boot", str(log), "--model", str(path), "--json"]) == 1
    warnings = json.loads(capsys.readouterr().out)["warnings"]
    assert "layers: 8, the log has 64" in warnings[0]
    assert main(["boot", str(log), "--model", str(path)]) == 1
    assert capsys.readouterr().out.startswith("warning: the model that was given is not that of this log (")
