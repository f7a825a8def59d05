"""Are transformers' caches and weights as large as the rules say? Sums the tensors of small random models.

Runs on a CPU in an environment with the project and its ``transformers`` extra (``pip install -e ".[transformers]"``;
``hqq`` and ``optimum-quanto`` as well for quantised caches). Prints a table in Markdown, or JSON with ``--json``, and
exits with 1 when a figure differs.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import logging
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from pytest_vram.sizing import hf_shape, hf_weights, transformers_cache
from pytest_vram.sizing.shape import Layer, ModelShape

SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 128,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
}
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_group": 1, "topk_group": 1}
DELTA: dict[str, Any] = {
    "head_dim": 16,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
HALVES = ["mamba", "attention"] * 3
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 16},
    "qwen2": {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 2},
    "qwen3_moe": {"head_dim": 16, "num_experts": 8, **EXPERTS},
    "gemma2": {"head_dim": 16, "sliding_window": 16},
    "gemma3_text": {"head_dim": 32, "sliding_window": 16},
    "gemma4_text": {
        "head_dim": 16,
        "global_head_dim": 32,
        "sliding_window": 16,
        "num_kv_shared_layers": 2,
        "vocab_size_per_layer_input": 128,
        "hidden_size_per_layer_input": 8,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
    },
    "gpt_oss": {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 16},
    "cohere2": {"head_dim": 16, "sliding_window": 16},
    "olmo3": {"sliding_window": 16},
    "exaone4": {"sliding_window": 16, "sliding_window_pattern": 4},
    "llama4_text": {"attention_chunk_size": 16, "head_dim": 16, "num_local_experts": 2, "intermediate_size_mlp": 96},
    "glm4_moe": {"n_routed_experts": 4, **EXPERTS},
    "deepseek_v3": {
        "kv_lora_rank": 16,
        "q_lora_rank": 24,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
        "n_routed_experts": 8,
        "first_k_dense_replace": 1,
        "num_key_value_heads": 4,
        **EXPERTS,
    },
    "mamba": {"intermediate_size": 128, "state_size": 8},
    "falcon_mamba": {"intermediate_size": 128, "state_size": 8},
    "mamba2": {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 2, "expand": 2},
    "jamba": {"num_experts": 2, "mamba_dt_rank": 8, "use_mamba_kernels": False},
    "bamba": {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "attn_layer_indices": [2]},
    "granitemoehybrid": {"mamba_n_heads": 8, "mamba_d_state": 16, "num_local_experts": 4, "layer_types": HALVES},
    "falcon_h1": {"mamba_d_ssm": 128, "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16},
    "nemotron_h": {
        "num_hidden_layers": None,
        "layers_block_type": ["mamba", "mlp", "attention", "moe", "mamba", "attention"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "ssm_state_size": 16,
        "n_groups": 2,
        "head_dim": 16,
        "n_routed_experts": 4,
        "moe_shared_expert_intermediate_size": 32,
        **EXPERTS,
    },
    "qwen3_next": {"num_experts": 4, "shared_expert_intermediate_size": 32, **DELTA, **EXPERTS},
    "qwen3_5_text": DELTA,
    "lfm2": {"layer_types": ["conv", "full_attention"] * 3},
    "minimax": {"num_local_experts": 2},
}
#: Models that make a cache of their own kind and take no other.
OWN = ("mamba", "mamba2", "falcon_mamba", "minimax")
LENGTHS = ((1, 5), (2, 40))


class Row(msgspec.Struct, frozen=True):
    """One comparison, in bytes."""

    model: str
    cache: str
    dtype: str
    batch: int
    length: int
    predicted_kv: int
    kv: int
    predicted_state: int
    state: int

    @property
    def same(self) -> bool:
        """Whether both figures agree to the byte."""
        return (self.predicted_kv, self.predicted_state) == (self.kv, self.state)


def _class(name: str) -> Any:
    mapping = importlib.import_module("transformers.models.auto.configuration_auto").CONFIG_MAPPING
    if name in mapping:
        return mapping[name]
    home = name.removesuffix("_text")
    module = importlib.import_module(f"transformers.models.{home}.configuration_{home}")
    return next(found for key in dir(module) if getattr(found := getattr(module, key), "model_type", None) == name)


def shape_of(config: Any) -> ModelShape:
    """The shape that is read from a configuration as transformers saves it."""
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        return hf_shape.read_shape(Path(folder))


def summed(cache: Any) -> tuple[int, int]:
    """Bytes of all keys and values in a cache, and of all states."""
    torch = importlib.import_module("torch")

    def size(found: object) -> int:
        if torch.is_tensor(found):
            return int(found.numel() * found.element_size())  # type: ignore[attr-defined]
        if isinstance(found, dict):
            return sum(map(size, found.values()))
        return 0

    kv = sum(size(getattr(layer, key, None)) for layer in cache.layers for key in ("keys", "values", "indexer_keys"))
    states = sum(
        size(getattr(layer, key, None)) for layer in cache.layers for key in ("conv_states", "recurrent_states")
    )
    return kv, states + sum(map(size, getattr(cache, "linear_cache", [])))


def caches(name: str) -> Iterator[Row]:
    """Dynamic and static caches of one small model, after a prompt and after one token more."""
    torch, transformers = importlib.import_module("torch"), importlib.import_module("transformers")
    settings = {key: value for key, value in {**SMALL, **MODELS[name]}.items() if value is not None}
    for dtype in ("float32", "bfloat16"):
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(_class(name)(**settings), dtype=getattr(torch, dtype))
        model.eval()
        shape = shape_of(model.config)
        element = getattr(torch, dtype).itemsize
        for batch, length in LENGTHS:
            tokens = torch.randint(1, 100, (batch, length))
            states = sum(transformers_cache.state_bytes(shape, layer, batch, element) for layer in shape.layers)
            with torch.no_grad():
                if name in OWN:
                    output = model(tokens, use_cache=True)
                    cache = next(value for key, value in output.items() if "cache" in key or "past" in key)
                else:
                    cache = transformers.DynamicCache(config=model.config)
                    model(tokens, past_key_values=cache, use_cache=True)
            for more in (0, 1):
                if more and name not in OWN:
                    with torch.no_grad():
                        model(tokens[:, :1], past_key_values=cache, use_cache=True)
                total = length + (0 if name in OWN else more)
                kv = sum(transformers_cache.dynamic_layer(layer, batch, total, element) for layer in shape.layers)
                yield Row(
                    name, type(cache).__name__, dtype, batch, total, kv, summed(cache)[0], states, summed(cache)[1]
                )
            if name in OWN or not any(layer.k_row for layer in shape.layers):
                continue
            cache = transformers.StaticCache(config=model.config, max_cache_len=64)
            with torch.no_grad():
                model(tokens, past_key_values=cache, use_cache=True)
            kv = sum(transformers_cache.static_layer(layer, batch, 64, element) for layer in shape.layers)
            yield Row(name, "StaticCache", dtype, batch, 64, kv, summed(cache)[0], states, summed(cache)[1])


def quantised(backend: str, bits: int) -> Iterator[Row]:
    """Quantised caches of a small Llama; only the prompt's for quanto, whose later steps compile an extension."""
    torch, transformers = importlib.import_module("torch"), importlib.import_module("transformers")
    config = _class("llama")(**{**SMALL, "num_hidden_layers": 2, "head_dim": 64})

    def size(found: object) -> int:
        if isinstance(found, (tuple, list)):
            return sum(map(size, found))
        if isinstance(found, dict):
            return sum(map(size, found.values()))
        if not torch.is_tensor(found):
            return 0
        if hasattr(found, "_data"):
            return sum(size(getattr(found, key, None)) for key in ("_data", "_scale", "_shift"))
        return int(found.numel() * found.element_size())  # type: ignore[attr-defined]

    steps = ((32, 0),) if backend == "quanto" else ((32, 0), (32, 5), (32, 140), (1, 300))
    layer = Layer(k_row=128, v_row=128)
    for dtype in ("float32", "bfloat16"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).eval()
        for prompt, more in steps:
            extra = {} if backend == "fp8" else {"nbits": bits}
            if backend == "hqq":
                extra |= {"axis_key": 1, "axis_value": 1}
            cache = transformers.QuantizedCache(backend=backend, config=config, **extra)
            with torch.no_grad():
                model(torch.ones(2, prompt, dtype=torch.long), past_key_values=cache, use_cache=True)
                for _ in range(more):
                    model(torch.ones(2, 1, dtype=torch.long), past_key_values=cache, use_cache=True)
            real = sum(
                size([kept.keys, kept.values, kept._quantized_keys, kept._quantized_values]) for kept in cache.layers
            )
            options = transformers_cache.Options(backend=backend, nbits=bits)  # type: ignore[arg-type]
            element = getattr(torch, dtype).itemsize
            predicted = 2 * transformers_cache.quantized_layer(layer, 2, prompt + more, element, options, prompt)
            yield Row("llama", f"QuantizedCache {backend} {bits} bit", dtype, 2, prompt + more, predicted, real, 0, 0)


def parameters(name: str) -> tuple[int, int]:
    """Parameters computed from a class's default configuration, and those of the real model (buffers that are loaded
    with them included), made without memory."""
    torch, transformers = importlib.import_module("torch"), importlib.import_module("transformers")
    config = _class(name)()
    with torch.device("meta"):
        maker = transformers.AutoModel if name in ("bert", "roberta", "xlm-roberta") else None
        maker = maker or transformers.AutoModelForCausalLM
        try:
            model = maker.from_config(config)
        except ValueError:
            model = transformers.AutoModel.from_config(config)
    loaded = sum(int(tensor.numel()) for tensor in model.parameters())
    loaded += sum(
        int(tensor.numel()) for key, tensor in model.named_buffers() if key.endswith("e_score_correction_bias")
    )
    tensors = shape_of(config).tensors
    computed = sum(tensor.elements for tensor in tensors)
    if type(model).__name__.endswith("TextModel"):
        # The text part of a composite has no output matrix of its own.
        computed -= sum(tensor.elements for tensor in tensors if tensor.name == "lm_head.weight")
    return computed, loaded


def quiet() -> None:
    """Silence what transformers says about kernels that a CPU does not have."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)


def main() -> int:
    """Run everything and print it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args()
    quiet()
    rows = [row for name in MODELS for row in caches(name)]
    schemes = [("fp8", 8)]
    if importlib.util.find_spec("hqq"):
        schemes += [("hqq", bits) for bits in (8, 4, 2)]
    if importlib.util.find_spec("optimum"):
        schemes += [("quanto", bits) for bits in (4, 2)]
    rows += [row for backend, bits in schemes for row in quantised(backend, bits)]
    counts: dict[str, tuple[int, int]] = {}
    refused: dict[str, str] = {}
    for name in hf_weights.FAMILIES:
        try:
            counts[name] = parameters(name)
        except (TypeError, ValueError, RuntimeError) as error:
            refused[name] = f"{type(error).__name__}: {error}".splitlines()[0]
    wrong = [row for row in rows if not row.same]
    wrong_counts = {name: pair for name, pair in counts.items() if pair[0] != pair[1]}
    if arguments.json:
        found = {"rows": rows, "parameters": counts, "refused_by_transformers": refused}
        print(json.dumps(msgspec.to_builtins(found), indent=1))
    else:
        print("| cache | models | comparisons | equal to the byte |\n|---|---|---|---|")
        for cache in sorted({row.cache for row in rows}):
            of = [row for row in rows if row.cache == cache]
            print(f"| {cache} | {len({row.model for row in of})} | {len(of)} | {sum(row.same for row in of)} |")
        equal = len(counts) - len(wrong_counts)
        print(f"\nParameters from `config.json` alone: {equal} of {len(counts)} families equal to the last one.")
        for name, reason in refused.items():
            print(f"{name}: transformers itself refuses its default configuration ({reason})")
    for row in wrong:
        print(f"differs: {row}", file=sys.stderr)
    for name, pair in wrong_counts.items():
        print(f"differs: {name} has {pair[1]} parameters, computed {pair[0]}", file=sys.stderr)
    return 1 if wrong or wrong_counts else 0


if __name__ == "__main__":
    sys.exit(main())
