"""What reading and sizing a GGUF header costs, and what other estimators say about the same models.

    python ci/bench/gguf_header.py [--tools PYTHON] [--vocabulary FILE]

First part, one line of JSON for each file: milliseconds of process time, median of 9, to read the header and make its
shape, after import; and once, because it takes seconds, for the ``gguf`` package's own reader. The files are made here:
a vocabulary of 262 144 tokens with scores and types, the same with 514 906 merges, and sparse real shapes;
``--vocabulary`` adds a file of your own.

Second part, one line for each tool and model: the KV cache at 32 768 tokens, f16, one sequence, beside what llama.cpp's
dry run prints. PYTHON is an interpreter with the other tools installed (``pip install oldiron ggufit hf-vram-calc
vramscout vramcalc ridgepoint``); each is asked in a process of its own, from the GGUF file where it reads these, else
from a ``config.json`` with the model's published values, else by the model's name.
"""

from __future__ import annotations

import argparse
import importlib
import json
import random
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pytest_vram.backends import dry_run
from pytest_vram.errors import VramError
from pytest_vram.sizing import estimate, gguf, textbook
from pytest_vram.sizing.gguf_shape import shape_of
from pytest_vram.testing.real_shapes import real
from pytest_vram.testing.sparse import Value, write_sparse

ROUNDS = 9
CONTEXT = 32768
MIB = 1 << 20
MODELS = ("Llama-3-8B", "Gemma3-4B", "DeepSeek-V3")

# As published, but for what no estimator reads.
CONFIGS: dict[str, dict[str, Any]] = {
    "Llama-3-8B": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "torch_dtype": "bfloat16",
        "tie_word_embeddings": False,
    },
    "Gemma3-4B": {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "torch_dtype": "bfloat16",
        "text_config": {
            "model_type": "gemma3_text",
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "num_hidden_layers": 34,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "sliding_window": 1024,
            "sliding_window_pattern": 6,
            "vocab_size": 262208,
            "max_position_embeddings": 131072,
            "torch_dtype": "bfloat16",
        },
    },
    "DeepSeek-V3": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 3,
        "moe_layer_freq": 1,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "vocab_size": 129280,
        "max_position_embeddings": 163840,
        "torch_dtype": "bfloat16",
        "tie_word_embeddings": False,
    },
}
NAMES = {
    "ggufit": {"Llama-3-8B": "llama3-8b", "Gemma3-4B": "gemma3-4b", "DeepSeek-V3": "deepseek-v3-671b"},
    "ridgepoint": {"Llama-3-8B": "llama-3-8b"},
}

# Each prints bytes, by the tool's own public function or command. {file}, {config} and {name} are filled in.
ASK = {
    "oldiron": """
from oldiron import gguf_meta, memory
print(memory.kv_cache_bytes(gguf_meta.read_gguf({file!r}), {context}))
""",
    "ggufit": """
import json, pathlib, ggufit
from ggufit import calculator
models = json.loads((pathlib.Path(ggufit.__file__).parent / "models.json").read_text())["models"]
model = models[{name!r}]
print(round(calculator.kv_cache_gb(model, {context}) * 2**30))
""",
    "hf-vram-calc": """
import json, pathlib, subprocess, sys
folder = str(pathlib.Path({config!r}).parent)
command = [str(pathlib.Path(sys.executable).with_name("hf-vram-calc")), "--model", "x", "--model_path", folder]
command += ["--max_seq_len", str({context}), "--dtype", "bf16", "--output_json", folder + "/out.json"]
subprocess.run(command, capture_output=True, check=True, timeout=100)
def find(value):
    if isinstance(value, dict):
        for key, inner in value.items():
            if "kv" in key.lower() and isinstance(inner, (int, float)):
                return inner
            found = find(inner)
            if found is not None:
                return found
    if isinstance(value, list):
        for inner in value:
            found = find(inner)
            if found is not None:
                return found
    return None
print(round(find(json.load(open(folder + "/out.json"))) * 2**30))
""",
    "vramscout": """
import json, pathlib, subprocess, sys
command = [str(pathlib.Path(sys.executable).with_name("vramscout")), str(pathlib.Path({config!r}).parent), "--json"]
command += ["--context", str({context}), "--vram-gib", "9999", "--kv-dtype", "fp16"]
out = json.loads(subprocess.run(command, capture_output=True, timeout=100).stdout)
parts = out.get("parts_gib", dict())
print(out.get("error") or round(sum(size for key, size in parts.items() if "cache" in key.lower()) * 2**30))
""",
    "vramcalc": """
import json, pathlib, subprocess, sys
command = [str(pathlib.Path(sys.executable).with_name("vramcalc")), {config!r}, "--seq", str({context}), "--json"]
out = subprocess.run(command, capture_output=True, text=True, timeout=100)
print(json.loads(out.stdout)["estimate"]["kv_cache"] if out.returncode == 0 else out.stderr.strip()[:60])
""",
    "ridgepoint": """
import json, pathlib, subprocess, sys
command = [str(pathlib.Path(sys.executable).with_name("ridgepoint")), "fit", {name!r}, "--engine", "llamacpp"]
out = subprocess.run([*command, "--ctx", str({context}), "--json"], capture_output=True, text=True, timeout=100)
print(json.loads(out.stdout)["capacity"]["bytes_per_seq"] if out.returncode == 0 else out.stderr.strip()[:60])
""",
}


def vocabulary(path: Path, *, merges: int) -> None:
    """A sparse model with a vocabulary of 262 144 tokens, as long as those of real models on average."""
    drawn = random.Random(0)
    lengths = [min(60, int(drawn.lognormvariate(1.8, 0.5)) + 1) for _ in range(8192)]
    words = ["".join(drawn.choices("abcdefghijklmnop", k=length)) for length in lengths]
    metadata: dict[str, Value] = {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": [words[index % 8192] for index in range(262144)],
        "tokenizer.ggml.scores": [0.0] * 262144,
        "tokenizer.ggml.token_type": [1] * 262144,
    }
    if merges:
        metadata["tokenizer.ggml.merges"] = [f"{words[index % 8191]} {words[index % 4093]}" for index in range(merges)]
    recipe = real("Gemma3-4B")
    write_sparse(path, {**recipe.metadata, **metadata, "general.architecture": "gemma3"}, recipe.tensors)


def median_ms(work: Callable[[], object]) -> float:
    """Process time of one round."""
    times = []
    for _ in range(ROUNDS):
        began = time.process_time()
        work()
        times.append(time.process_time() - began)
    return round(statistics.median(times) * 1000, 2)


def cost(path: Path, name: str) -> dict[str, object]:
    """Our reader and the package's, on one file."""
    line: dict[str, object] = {"file": name, "tensors": len(gguf.read(path).tensors)}
    line["read_ms"] = median_ms(lambda: gguf.read(path))
    line["read_and_shape_ms"] = median_ms(lambda: shape_of(gguf.read(path)))
    began = time.process_time()
    importlib.import_module("gguf").GGUFReader(path)
    line["gguf_package_ms"] = round((time.process_time() - began) * 1000, 1)
    return line


def answers(path: Path, name: str, tools: Path | None, folder: Path) -> dict[str, int | str]:
    """KV cache in bytes by everyone; a sentence where there is none."""
    config = folder / name / "config.json"
    config.parent.mkdir()
    config.write_text(json.dumps(CONFIGS[name]), encoding="utf-8")
    options: dict[str, Any] = {"ctx-size": CONTEXT, "parallel": 1}
    said: dict[str, int | str] = {}
    try:
        found = dry_run.dry_run(dry_run.find_binary(), path, options, device_none=True)
        said["llama.cpp"] = found.of("host", "context").bytes
    except VramError as error:
        said["llama.cpp"] = str(error)[:60]
    ours = estimate(path, ctx_size=CONTEXT, parallel=1)
    said["pytest-vram"] = sum(entry.bytes for entry in ours.entries if entry.bucket == "kv")
    said["textbook formula"] = textbook.kv(shape_of(gguf.read(path)), CONTEXT, 2)
    for tool, code in ASK.items():
        known = NAMES.get(tool, {}).get(name, name)
        if tools is not None:
            said[tool] = ask(tools, code.format(file=str(path), config=str(config), name=known, context=CONTEXT))
    return said


def ask(python: Path, code: str) -> int | str:
    done = subprocess.run([str(python), "-c", code], capture_output=True, text=True, timeout=120, check=False)
    last = (done.stdout.strip() or done.stderr.strip() or "no answer").splitlines()[-1]
    return int(last) if last.isdigit() else last[:80]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tools", type=Path)
    parser.add_argument("--vocabulary", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        files = {"262k tokens": folder / "a.gguf", "262k tokens, 515k merges": folder / "b.gguf"}
        vocabulary(files["262k tokens"], merges=0)
        vocabulary(files["262k tokens, 515k merges"], merges=514_906)
        for name in MODELS:
            files[name] = real(name).write(folder / f"{name}.gguf")
        if arguments.vocabulary:
            files[arguments.vocabulary.name] = arguments.vocabulary
        for name, path in files.items():
            print(json.dumps(cost(path, name)), flush=True)
        for name in MODELS:
            said = answers(files[name], name, arguments.tools, folder)
            truth = said["llama.cpp"]
            for tool, value in said.items():
                line: dict[str, object] = {"model": name, "tool": tool}
                if isinstance(value, int):
                    line["kv_mib"] = round(value / MIB, 2)
                    if isinstance(truth, int):
                        line["error_percent"] = round((value - truth) / truth * 100, 1)
                else:
                    line["answer"] = value
                print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
