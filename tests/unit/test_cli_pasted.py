"""Command lines as people paste them, for every engine, and the ones that are printed here."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pytest_vram.cli import main
from pytest_vram.testing import recipes
from tests.unit import sizing_models

Cli = Callable[..., tuple[int, Any, str]]
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 2048,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 5632,
    "vocab_size": 32000,
    "max_position_embeddings": 32768,
    "torch_dtype": "float16",
}


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with m.gguf and the Hugging Face folder hf."""
    sizing_models.dense_8b(tmp_path / "m.gguf")
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text(json.dumps(CONFIG))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    """Run `vram estimate --json`: exit code, document, standard error."""

    def run(*arguments: str) -> tuple[int, Any, str]:
        code = main(["estimate", "--json", *arguments])
        out, err = capsys.readouterr()
        return code, json.loads(out), err

    return run


LLAMA = "llama-server -m m.gguf -c 8192 -ngl 99 --device CUDA0"


@pytest.mark.parametrize(
    "text",
    [
        LLAMA,
        f"/opt/llama.cpp/build/bin/{LLAMA}",
        f"CUDA_VISIBLE_DEVICES=0 GGML_CUDA_ENABLE_UNIFIED_MEMORY=1 ./{LLAMA}",
        f"sudo env A=1 nohup {LLAMA}",
        LLAMA.replace("llama-server", "llama-server.exe"),
        LLAMA.replace("llama-server", "llama-server-vulkan"),
    ],
)
@pytest.mark.parametrize("quoted", [False, True])
def test_llama_server_lines(places: Path, cli: Cli, text: str, quoted: bool) -> None:
    """With environment, with a path, as words and as one quoted word, they mean the same."""
    code, found, err = cli("--", *([text] if quoted else shlex.split(text)))
    _, plain, _ = cli(*shlex.split(LLAMA)[1:])
    assert (code, err) == (0, "")
    assert found == plain


def test_variables_of_vllm_that_are_options(places: Path, cli: Cli) -> None:
    """A context beyond the trained one is refused, as vLLM does, unless its variable allows it."""
    line = ["vllm", "serve", "hf", "--max-model-len", "65536"]
    code, _, _ = cli("--", *line)
    assert code == 2
    code, found, _ = cli("--", "VLLM_ALLOW_LONG_MAX_MODEL_LEN=1", *line)
    assert code == 0
    assert found["settings"]["max_model_len"] == 65536
    assert cli("--", "VLLM_ALLOW_LONG_MAX_MODEL_LEN=0", *line)[0] == 2
    _, found, _ = cli("--", "VLLM_PP_LAYER_PARTITION=8,16", "vllm", "serve", "hf", "-pp", "2")
    assert found["settings"]["pp_layer_partition"] == "8,16"


@pytest.mark.parametrize("program", ["llama-cli", "/usr/bin/llama-cli", "llama-completion", "llama-mtmd-cli"])
def test_programs_for_one_sequence(places: Path, cli: Cli, program: str) -> None:
    """They read the same options, their own for the prompt decide nothing, and there is one slot."""
    words = [program, "-m", "m.gguf", "-c", "8192", "-p", "hello there", "-no-cnv", "--color", "on", "-n", "16"]
    code, found, _ = cli("--", *words)
    _, plain, _ = cli("m.gguf", "-c", "8192", "-np", "1")
    assert code == 0
    assert found["total"] == plain["total"]
    assert any("one slot" in note["text"] for note in found["notes"])


@pytest.mark.parametrize(
    ("text", "engine", "setting", "value"),
    [
        ("vllm serve hf --max-model-len 16384", "vllm", "max_model_len", 16384),
        ("VLLM_USE_V1=1 vllm serve ./hf --max-model-len=16k --port 8000 --trust-remote-code", "vllm", "max_model_len", 16000),
        ("vllm serve --model hf -tp 2 --max-model-len 8K --no-enable-prefix-caching", "vllm", "tensor_parallel_size", 2),
        ("python3 -m vllm.entrypoints.openai.api_server --model hf --max-model-len 4096", "vllm", "max_model_len", 4096),
        ("uv run vllm serve hf --gpu-memory-utilization 0.8 -q awq", "vllm", "gpu_memory_utilization", 0.8),
        ("vllm serve hf --device-memory 24GiB --activation-memory 512MB", "vllm", "device_memory", 24 << 30),
        ("python -m sglang.launch_server --model-path hf --context-length 8192", "sglang", "context_length", 8192),
        ("/v/bin/python3.12 -m sglang.launch_server --model hf --tp 2 --host 0.0.0.0", "sglang", "tp_size", 2),
    ],
)  # fmt: skip
def test_lines_of_engines_in_python(
    places: Path, cli: Cli, text: str, engine: str, setting: str, value: object
) -> None:
    """The program names the engine; other spellings, sizes and counts are read; what decides nothing is kept."""
    code, found, err = cli("--", *shlex.split(text))
    assert (code, err) == (0, "")
    assert found["engine"] == engine
    assert found["settings"][setting] == value
    for kept in ("--port", "--host", "--trust-remote-code", "awq"):
        assert (kept in found["command"]) == (kept in text.split())


@pytest.mark.parametrize(
    ("engine", "words"),
    [
        ("llama-server", ["m.gguf", "-c", "4096", "-ctk", "q8_0", "-ctv", "q8_0", "-np", "2", "--device", "none"]),
        ("vllm", ["hf", "--max-model-len", "4096", "--kv-cache-dtype", "fp8", "--enforce-eager"]),
        ("vllm", ["hf", "--no-enable-prefix-caching", "--port", "8000", "--trust-remote-code"]),
        ("sglang", ["hf", "--context-length", "4096", "--tp-size", "2"]),
    ],
)
def test_printed_lines_can_be_pasted(places: Path, cli: Cli, engine: str, words: list[str]) -> None:
    """What is printed means what was asked for."""
    _, found, _ = cli("--engine", engine, *words)
    assert found["command"]
    code, again, _ = cli("--", *found["command"])
    assert code == 0
    assert again == found


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["docker", "run", "--gpus", "all", "image", "-m", "m.gguf"], "a container (docker) is not read"),
        (["LLAMA_ARG_CTX_SIZE=8192", "llama-server", "-m", "m.gguf"], "is an option in the environment"),
        (["llama-run", "m.gguf"], "llama-run has options and defaults of its own"),
        (["vllm", "bench", "hf"], "only `vllm serve …` is sized"),
        (["python", "-m", "http.server"], "`python -m http.server` is not sized"),
        (["--engine", "vllm", "llama-server", "-m", "m.gguf"], "leave one of the two out"),
        (["llama-server -m 'm.gguf"], "no command line that can be read"),
        (["vllm", "serve", "hf", "--quantization", "fp8"], "'quantization'"),
        (["vllm", "serve", "hf", "--device-memory", "24g"], "ambiguous"),
        (["vllm", "serve", "hf", "-c", "9"], "write long names, such as --tensor-parallel-size N"),
        (["hf", "--engine", "transformers", "-c", "9"], "write long names, such as --max-length N"),
        (["-hf", "nobody/nothing-GGUF"], "-hf nobody/nothing-GGUF is looked for in the local stores only"),
        (["-hff", "x.gguf"], "add -hf OWNER/NAME"),
        (["m.gguf", "--ctx", "3"], "did you mean 'ctx-size'?"),
    ],
)
def test_what_cannot_be_pasted_is_one_sentence(places: Path, cli: Cli, words: list[str], says: str) -> None:
    """Exit code 2, and what to do."""
    code, found, err = cli(*words)
    assert code == 2
    assert says in found["error"]
    assert err.count("\n") == 1


def test_hf_is_found_in_the_local_store(places: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """With its quantisation, or llama.cpp's own choice of Q4_K_M, and with the projector that is loaded beside it."""
    monkeypatch.setenv("HF_HUB_CACHE", str(places / "hub"))
    snapshot = places / "hub" / "models--org--name-GGUF" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    small = recipes.llama(tokenizer="none")
    for name in ("model-Q4_K_M.gguf", "model-Q8_0.gguf"):
        small.write(snapshot / name)
    for words, file in (
        (["-hf", "org/name-GGUF"], "model-Q4_K_M.gguf"),
        (["-hf", "org/name-GGUF:Q8_0"], "model-Q8_0.gguf"),
        (["-hf", "org/name-GGUF", "-hff", "model-Q8_0.gguf"], "model-Q8_0.gguf"),
    ):
        code, found, _ = cli("--", "llama-server", *words, "-c", "512")
        assert code == 0
        assert Path(found["model"]["source"]).name == file
