"""What a deployment was asked for, from options, arguments and variables; and what servers answer of themselves."""

from __future__ import annotations

from typing import Any

import pytest

from pytest_vram.backends import engine
from pytest_vram.backends.answers import read
from pytest_vram.backends.asked import of_command, of_llama, program_of
from pytest_vram.backends.base import Properties
from pytest_vram.backends.flags import parse
from pytest_vram.spec import BackendSpec
from pytest_vram.units import MIB

HELP = parse(
    "llama-server",
    """
-c,    --ctx-size N                     size of the prompt context (default: 0, 0 = loaded from model)
                                        (env: LLAMA_ARG_CTX_SIZE)
-np,   --parallel N                     number of server slots
-zz,   --gpu-layers, --layers-in-vram N max. number of layers to store in VRAM
-kvu,  --kv-unified, -no-kvu, --no-kv-unified
                                        use single unified KV buffer
--mmap, --no-mmap                       whether to memory-map model (default: enabled)
""",
)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"ctx-size": 4096, "parallel": "2"}, {"context": 4096, "slots": 2}),
        ({"ctx-size": 0, "parallel": -1, "flash-attn": "auto"}, {}),
        ({"layers-in-vram": 9}, {"layers_offloaded": 9}),
        ({"zz": "all"}, {"layers_offloaded": "all"}),
        ({"no-mmap": True}, {"mmap": False}),
        ({"mmap": False}, {"mmap": False}),
        ({"mmap": True}, {}),
        ({"no-kv-unified": True}, {"kv_unified": False}),
        ({"no-kvu": True}, {"kv_unified": False}),
        ({"kvu": True}, {"kv_unified": True}),
        ({"load-mode": "mmap+mlock"}, {"load_mode": "mmap+mlock", "mlock": True}),
        ({"rope-scale": 4}, {"rope_freq_scale": 0.25}),
        ({"cache-ram": 16, "ctx-checkpoints": 0}, {"prompt_cache_limit_bytes": 16 * MIB, "checkpoints": 0}),
        (
            {"mmproj": "p.gguf", "spec-draft-model": "d.gguf", "lora": ["a", "b"]},
            dict.fromkeys(("projector", "draft", "lora"), True),
        ),
        ({"temp": 0.1, "seed": 7, "alias": "x", "port": 1}, {}),
    ],
)
def test_options_under_any_of_their_names(options: dict[str, Any], expected: dict[str, Any]) -> None:
    """Other names, short ones and negatives are understood, by the help first; automatic values ask for nothing."""
    assert of_llama(options, HELP) == expected


def test_variables_that_the_help_names_count_where_the_option_is_not_given() -> None:
    """A variable is as good as its option, which is stronger."""
    variables = {"LLAMA_ARG_CTX_SIZE": "512"}
    assert of_llama({}, HELP, variables) == {"context": 512}
    assert of_llama({"ctx-size": 1024}, HELP, variables) == {"context": 1024}
    assert of_llama({}, None, variables) == {}


@pytest.mark.parametrize(
    ("argv", "log", "expected"),
    [
        (["vllm", "serve", "m", "--max-model-len=4k", "-tp", "2"], "vllm", {"context": 4000, "tensor_parallel": 2}),
        (["vllm", "serve", "m", "--max_model_len", "4K"], "vllm", {"context": 4096}),
        (["vllm", "serve", "m", "--max-model-len", "auto", "--kv-cache-dtype", "auto"], "vllm", {}),
        (
            ["docker", "run", "-q", "x", "vllm/vllm-openai:v0", "--dtype", "half", "--enforce-eager"],
            "vllm",
            {"dtype": "float16", "eager": True},
        ),
        (
            ["python", "-m", "sglang.launch_server", "--context-length", "8192", "--tp", "2"],
            "sglang",
            {"context": 8192, "tensor_parallel": 2},
        ),
        (["taskset", "-c", "3", "llama-server", "-c", "512", "-np", "2"], "llama-server", {"context": 512, "slots": 2}),
        (["bash", "-lc", "exec llama-server -ngl 5 -c 256"], "llama-server", {"layers_offloaded": 5, "context": 256}),
        (["bash", "-lc", "exec 'broken"], "llama-server", {}),
        (["taskset", "-c", "3", "wrapper"], "llama-server", {}),
        (["llama-server", "-c", "512", "-c", "1024"], "llama-server", {"context": 1024}),
        (["koboldcpp", "--contextsize", "2048"], "koboldcpp", {"context": 2048}),
        (["vllm", "serve", "--max-model-len", "512"], None, {}),
    ],
)
def test_a_command_line_is_read_after_the_engines_program(
    argv: list[str], log: str | None, expected: dict[str, Any]
) -> None:
    """Arguments of a wrapper are not the engine's; without a named engine nothing is known."""
    assert of_command(argv, log) == expected


def test_the_engines_program_in_a_command_line() -> None:
    """Its own `--help` can be asked only where the program itself is named."""
    assert program_of(["nice", "/opt/llama-server", "-c", "1"], "llama-server") == "/opt/llama-server"
    assert program_of(["docker", "run", "ghcr.io/x/llama.cpp:server"], "llama-server") is None


def test_variables_of_ollama() -> None:
    """Its context is that of one request."""
    spec = BackendSpec(
        name="o", engine="command", origin="t", base=".", argv=["ollama", "serve"], log="ollama",
        env={"OLLAMA_CONTEXT_LENGTH": "8192", "OLLAMA_NUM_PARALLEL": "0", "OLLAMA_KV_CACHE_TYPE": "q8_0"},
    )  # fmt: skip
    expected = {"context_per_slot": 8192, "cache_type_k": "q8_0", "cache_type_v": "q8_0"}
    assert engine("command").asked(spec) == expected


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ({}, Properties()),
        ({"/props": ["x"], "/slots": ["x"], "/v1/models": ["x"], "/api/ps": ["x"]}, Properties()),
        (
            {"/v1/models": {"data": [{"id": "m", "max_model_len": 4096}, {"id": "lora", "max_model_len": 4096}]}},
            Properties(models=("m", "lora"), context=4096, context_per_slot=4096),
        ),
        (
            {"/v1/models": {"data": [{"id": "m", "max_model_len": 4096}, {"id": "n", "max_model_len": 512}]}},
            Properties(models=("m", "n")),
        ),
        (
            {"/v1/models": {"data": [{"id": "m", "meta": {"n_ctx_train": 8192, "n_params": 9, "size": 5}}]}},
            Properties(models=("m",), context_trained=8192, parameters=9, model_bytes=5),
        ),
        (
            {"/slots": [{"n_ctx": 256, "speculative": False}, {"n_ctx": 128, "speculative": True}]},
            Properties(slots=2, context_per_slot=256, slot_contexts=(256, 128), draft=True),
        ),
        (
            {"/api/ps": {"models": [{"name": "q", "context_length": 4096, "size": 9, "size_vram": 4}]}},
            Properties(loaded=("q",), context_per_slot=4096, held_bytes=9, device_bytes=4),
        ),
        (
            {"/api/ps": {"models": [{"name": "q", "context_length": 4096}, {"name": "r", "context_length": 2}]}},
            Properties(loaded=("q", "r")),
        ),
        ({"/get_server_info": {"tp_size": 2, "port": 1}}, Properties(settings={"tensor_parallel": 2})),
    ],
)
def test_what_servers_say(answers: dict[str, Any], expected: Properties) -> None:
    """Each engine's endpoints are read; what is missing, or of several models at once, is not said."""
    assert read(answers) == expected
