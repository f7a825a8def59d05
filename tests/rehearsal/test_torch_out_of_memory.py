"""Real torch runs out of host memory under a limit; its own words are read. Needs the ``transformers`` extra."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_vram.bootlog import read

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="the program reads /proc"),
    # Not importorskip: the program imports them, and they take long.
    pytest.mark.skipif(
        not (importlib.util.find_spec("torch") and importlib.util.find_spec("transformers")),
        reason="torch or transformers is not installed: pip install 'pytest-vram[transformers]'",
    ),
]

#: What runs out: a step of a small random model, under a limit that is set once what comes before it is done.
PROGRAM = """
import os, resource, sys
import torch
from transformers import LlamaConfig, LlamaForCausalLM

torch.set_num_threads(1)


def configuration(width):
    found = LlamaConfig(
        vocab_size=512, hidden_size=width, intermediate_size=width, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=1 << 20,
    )
    found._attn_implementation = "eager"
    return found


def limit(more):
    held = next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith("VmSize"))
    resource.setrlimit(resource.RLIMIT_AS, (held + more, held + more))


def run(step, folder):
    if step == "weights":
        LlamaForCausalLM(configuration(2048)).to(torch.bfloat16).save_pretrained(folder)
        limit(60 << 20)
        LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
        return
    model = LlamaForCausalLM(configuration(256))
    prompt = torch.ones(1, 8000 if step == "prefill" else 50, dtype=torch.long)
    limit(150 << 20)
    if step == "prefill":
        model.generate(prompt, max_new_tokens=2, do_sample=False)
    else:
        model.generate(prompt, max_new_tokens=400_000, do_sample=False, cache_implementation="static")


folder = sys.argv[1]
for step in ("weights", "prefill", "cache"):
    child = os.fork()  # one import of torch for all of them
    if child:
        os.waitpid(child, 0)
        continue
    log = os.open(os.path.join(folder, step + ".log"), os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    run(step, os.path.join(folder, step))
    break
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where each step left its log."""
    made = tmp_path_factory.mktemp("torch")
    subprocess.run([sys.executable, "-c", PROGRAM, str(made)], capture_output=True, timeout=300, check=False)
    return made


@pytest.mark.parametrize(
    ("step", "phase", "bucket"),
    [("weights", "weights", "weights"), ("prefill", "prefill", "compute"), ("cache", "kv", "kv")],
)
def test_real_words_are_read(step: str, phase: str, bucket: str, folder: Path) -> None:
    """What torch and transformers print when a step finds no memory is read as that step's failure, on the host."""
    boot = read(folder / f"{step}.log")
    assert boot.engine == "transformers"
    assert boot.failure is not None
    assert (boot.failure.kind, boot.failure.device) == ("host_out_of_memory", "host")
    assert (boot.failure.phase, boot.failure.bucket, boot.failure.certainty) == (phase, bucket, "certain")
    if step == "prefill":
        assert boot.failure.bytes is not None
        assert boot.failure.bytes >= 8000 * 8000  # scores of every token with every other
