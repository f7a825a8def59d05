"""Settings in force, under the engine's own long options, from whoever says them: a spec, a boot log or an estimate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pytest_vram.differences import Change
from pytest_vram.ledger import Bucket

Value = int | float | str | bool

_WEIGHTS: tuple[Bucket, ...] = ("weights", "experts")
_CACHES: tuple[Bucket, ...] = ("kv", "recurrent")
_PLACED: tuple[Bucket, ...] = (*_WEIGHTS, *_CACHES, "compute")
_ALL: tuple[Bucket, ...] = (*_PLACED, "projector", "draft", "lora")
#: Setting → buckets that it decides.
DECIDES: dict[str, tuple[Bucket, ...]] = {
    "model": _ALL,
    "quantization": (*_WEIGHTS, "compute"),
    # llama.cpp, ik_llama, koboldcpp
    "ctx-size": ("kv", "compute", "draft"),
    "parallel": (*_CACHES, "compute", "draft"),
    "kv-unified": (*_CACHES, "compute", "draft"),
    "ubatch-size": ("compute", "kv", "draft"),
    "batch-size": ("compute", "kv"),
    "cache-type-k": ("kv", "compute"),
    "cache-type-v": ("kv", "compute"),
    "swa-full": ("kv", "compute"),
    "flash-attn": ("compute", "kv"),
    "kv-offload": (*_CACHES, "compute"),
    "op-offload": ("compute",),
    "n-gpu-layers": _PLACED,
    "layers-on-gpu": _PLACED,
    "n-cpu-moe": (*_WEIGHTS, "compute"),
    "cpu-moe": (*_WEIGHTS, "compute"),
    "override-tensor": (*_WEIGHTS, "compute"),
    "split-mode": _PLACED,
    "tensor-split": _PLACED,
    "main-gpu": _PLACED,
    "device": _ALL,
    "mmap": _WEIGHTS,
    "no-mmap": _WEIGHTS,
    "load-mode": _WEIGHTS,
    "mlock": _WEIGHTS,
    "repack": _WEIGHTS,
    "cache-ram": ("kv",),
    "ctx-checkpoints": ("kv",),
    "mmproj": ("projector",),
    "mmproj-offload": ("projector",),
    "lora": ("lora",),
    "model-draft": ("draft",),
    "spec-draft-model": ("draft",),
    "embeddings": ("compute",),
    "pooling": ("compute",),
    # vLLM and SGLang: the pool of the cache takes what the rest leaves of their share
    "max-model-len": ("kv", "compute"),
    "context-length": ("kv", "compute"),
    "gpu-memory-utilization": ("kv",),
    "mem-fraction-static": ("kv",),
    "max-num-seqs": ("kv", "compute"),
    "max-num-batched-tokens": ("kv", "compute"),
    "max-running-requests": ("kv", "compute"),
    "kv-cache-dtype": ("kv", "compute"),
    "enforce-eager": ("kv", "compute"),
    "tensor-parallel-size": _PLACED,
    "pipeline-parallel-size": _PLACED,
    "dtype": (*_WEIGHTS, "kv", "compute"),
    # transformers and Ollama
    "max-length": ("kv", "compute"),
    "num-beams": ("kv", "compute"),
    "cache-implementation": ("kv",),
    "nbits": ("kv",),
    "backend": ("kv",),
    "num-ctx": ("kv", "compute"),
    "num-gpu": _PLACED,
    "num-parallel": (*_CACHES, "compute"),
    # not settings, and they decide memory all the same
    "engine": _ALL,
    "nvidia-driver": ("context",),
    "build": ("compute", "kv"),
}
#: Fact of a boot log → option, by engine.
_FACTS: dict[str, dict[str, str]] = {
    "vllm": {
        "context": "max-model-len",
        "slots": "max-num-seqs",
        "memory_share": "gpu-memory-utilization",
        "tensor_parallel": "tensor-parallel-size",
        "pipeline_parallel": "pipeline-parallel-size",
    },
    "sglang": {
        "context": "context-length",
        "slots": "max-running-requests",
        "memory_share": "mem-fraction-static",
        "tensor_parallel": "tensor-parallel-size",
        "pipeline_parallel": "pipeline-parallel-size",
    },
    "transformers": {"context": "max-length"},
}
_LLAMA_FACTS = {
    "context": "ctx-size",
    "slots": "parallel",
    "batch": "batch-size",
    "ubatch": "ubatch-size",
    "cache_type_k": "cache-type-k",
    "cache_type_v": "cache-type-v",
    "kv_unified": "kv-unified",
    "mmap": "mmap",
    "mlock": "mlock",
}
#: Options of which the log says what became of them, so that what was asked for is not a second setting.
_SAID = {"n-gpu-layers": "layers-on-gpu", "gpu-layers": "layers-on-gpu", "no-mmap": "mmap", "load-mode": "mmap"}
#: Options that decide nothing of a breakdown: names, places, sampling.
_SILENT = (
    "alias",
    "api-key",
    "host",
    "log-",
    "metrics",
    "min-p",
    "no-ui",
    "no-webui",
    "port",
    "rpc",
    "seed",
    "slots",
    "temp",
    "threads",
    "timeout",
    "top-",
    "ui",
    "verbos",
    "webui",
)


def of_facts(engine: str, facts: Mapping[str, Any]) -> dict[str, Value]:
    """What a boot log says of the settings; what was not printed is absent."""
    names = _FACTS.get(engine, _LLAMA_FACTS)
    found: dict[str, Value] = {}
    for fact, option in names.items():
        value = facts.get(fact)
        if isinstance(value, Value):
            found[option] = value
    if names is not _LLAMA_FACTS:
        return found
    flash = facts.get("flash_attention")
    if flash in ("enabled", "disabled"):
        found["flash-attn"] = "on" if flash == "enabled" else "off"
    layers, offloaded = facts.get("layers"), facts.get("layers_offloaded")
    if isinstance(layers, int) and isinstance(offloaded, int):
        # The output layer is counted with those offloaded, and goes first.
        real = facts.get("layers_on_device_real", offloaded - 1)
        found["layers-on-gpu"] = max(0, min(layers, real))
    return found


def of_options(options: Mapping[str, Any], known: Mapping[str, Value] = {}) -> dict[str, Value]:
    """Options as they were written, and what a log says became of them, which holds where both speak of one."""
    found: dict[str, Value] = {}
    for name, value in options.items():
        option = name.replace("_", "-")
        if option.startswith(_SILENT) or _SAID.get(option) in known:
            continue
        if isinstance(value, list | tuple):
            value = ",".join(str(one) for one in value)
        if isinstance(value, Value):
            found[option] = value
    return {**found, **known}


def of_estimate(settings: Mapping[str, Any]) -> dict[str, Value]:
    """The settings of an estimate; what the engine chooses itself is left out, and so is what is not set."""
    found: dict[str, Value] = {}
    for name, value in settings.items():
        option = name.replace("_", "-")
        if value is None or value == "" or option == "n-gpu-layers" or (option == "flash-attn" and value == "auto"):
            continue
        found[option] = value
    return found


def changes(before: Mapping[str, Value], after: Mapping[str, Value], *, everything: bool = False) -> tuple[Change, ...]:
    """Settings that differ, those that decide memory first.

    :param everything: both sides tell all of their settings, so that what only one of them has differs too; else only
        what both speak of is compared.
    """
    found = []
    for name in dict.fromkeys([*before, *after]):
        one, other = before.get(name), after.get(name)
        if one == other or (not everything and (one is None or other is None)):
            continue
        found.append(Change(setting=name, before=one, after=other, buckets=DECIDES.get(name, ())))
    return tuple(sorted(found, key=lambda one: not one.buckets))
