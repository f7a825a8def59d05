"""From a Hugging Face configuration to the blocks of the model: what each keeps in a cache and in a state.

The kinds of blocks follow transformers' ``layer_types``; where a released config leaves them out, the rule of its
configuration class (``__post_init__`` in transformers 5.24) gives them.
"""

from __future__ import annotations

import functools
from typing import Any, Literal

import msgspec

from pytest_vram.sizing.hf_config import MOST_LAYERS, Config, shown
from pytest_vram.sizing.hf_feed_forward import feed_forwards
from pytest_vram.sizing.shape import Layer, Mla, Note, Ssm

Kind = Literal["full", "window", "chunked", "indexed", "linear", "conv", "hybrid", "hybrid_window", "none"]

_KINDS: dict[str, Kind] = {
    "full_attention": "full",
    "attention": "full",
    "global": "full",
    "full": "full",
    "sliding_attention": "window",
    "sliding": "window",
    "local": "window",
    "sliding_window": "window",
    "chunked_attention": "chunked",
    "indexed_attention": "indexed",
    "deepseek_sparse_attention": "indexed",
    "linear_attention": "linear",
    "mamba": "linear",
    "recurrent": "linear",
    "conv": "conv",
    "hybrid": "hybrid",
    "hybrid_sliding": "hybrid_window",
    "moe": "none",
    "mlp": "none",
    "dummy": "none",
}
_ENCODERS = {"bert", "roberta", "xlm-roberta", "modernbert", "nomic_bert", "electra", "camembert", "distilbert"}
# Blocks that are all of one kind although their classes have no list of kinds.
_ALL_LINEAR = {"mamba", "mamba2", "falcon_mamba"}
_MAMBA1 = {"mamba", "falcon_mamba", "jamba"}
_MAMBA2 = {"mamba2", "bamba", "falcon_h1", "granitemoehybrid", "nemotron_h", "zamba2"}
_GATED_DELTA = {"qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"}
# Sliding windows in every n-th block but the last of each group: the group's size where the config does not say.
_PERIODS = {
    "gemma2": 2,
    "gpt_oss": 2,
    "gemma3_text": 6,
    "gemma4_text": 6,
    "gemma3n_text": 5,
    "cohere2": 4,
    "olmo3": 4,
    "exaone4": 4,
    "exaone_moe": 4,
    "afmoe": 4,
}


def is_encoder(config: Config) -> bool:
    """Whether the model runs without a cache (embedding and reranking models)."""
    return config.model_type in _ENCODERS and not config.flag("is_decoder")


def block_words(config: Config) -> list[str]:
    """What each block is, in the words of ``layer_types``.

    Nemotron-H's class takes the number of blocks from its list or its pattern of letters and ignores
    ``num_hidden_layers`` beside them.
    """
    pattern = config.given("hybrid_override_pattern")
    listed = config.words("layer_types", "layers_block_type")
    if config.model_type == "nemotron_h":
        if listed:
            return listed
        if pattern is None:
            config.assumed["hybrid_override_pattern"] = pattern = "ME*-"
        letters = {"M": "linear_attention", "E": "moe", "*": "full_attention", "-": "mlp"}
        if (
            not isinstance(pattern, str)
            or not pattern
            or len(pattern) > MOST_LAYERS
            or not set(pattern) <= set(letters)
        ):
            raise config.bad("hybrid_override_pattern", f"is {shown(pattern)}; its letters are M, E, * and -")
        return [letters[letter] for letter in pattern]
    layers = config.positive("num_hidden_layers", "n_layer", "n_layers", "num_layers", most=MOST_LAYERS)
    if not listed:
        return _derived(config, layers)
    if len(listed) < layers:
        raise config.bad("layer_types", f"lists {len(listed)} kinds for {layers} layers")
    if len(listed) > layers + config.integer("num_nextn_predict_layers", default=0):
        text = f"{config.path}: layer_types lists {len(listed)} kinds for {layers} layers; the first ones are used."
        if not any(note.text == text for note in config.notes):
            config.notes.append(Note(kind="unknown", bucket="kv", text=text))
    words = listed[:layers]
    if config.model_type == "gemma4_text":
        # Its class forces the last block to full attention.
        words[-1] = "full_attention"
    return words


def kinds(config: Config) -> list[Kind]:
    """What kind of block each is."""
    return [_named(config, word) for word in block_words(config)]


def _named(config: Config, word: str) -> Kind:
    kind = _KINDS.get(word)
    if kind is None:
        text = f"{config.path}: blocks of kind {word!r} are not known; their cache is counted as full attention."
        if all(note.text != text for note in config.notes):
            config.notes.append(Note(kind="unknown", bucket="kv", text=text))
        return "full"
    return kind


def _derived(config: Config, layers: int) -> list[str]:
    """The rule of the model's own configuration class, where no list is given."""
    model, every = config.model_type, range(layers)
    if model in _ALL_LINEAR:
        return ["linear_attention"] * layers
    if model == "falcon_h1":
        return ["hybrid"] * layers
    if model == "jamba":
        period = config.positive("attn_layer_period", default=8)
        offset = config.integer("attn_layer_offset", default=4)
        return ["full_attention" if index % period == offset else "linear_attention" for index in every]
    if model == "bamba":
        chosen = set(config.indices("attn_layer_indices") or [])
        return ["full_attention" if index in chosen else "linear_attention" for index in every]
    if model == "granitemoehybrid":
        return ["linear_attention"] * layers
    if model == "zamba2":
        return _zamba2(config, layers)
    if model == "recurrent_gemma":
        words = config.words("block_types", "_block_types") or ["recurrent", "recurrent", "attention"]
        return [
            "linear_attention" if words[index % len(words)] == "recurrent" else "sliding_attention" for index in every
        ]
    if model in _GATED_DELTA:
        interval = config.positive("full_attention_interval", default=4)
        return ["linear_attention" if (index + 1) % interval else "full_attention" for index in every]
    if model == "minimax":
        return ["full_attention" if (index + 1) % 2 else "linear_attention" for index in every]
    if model in ("lfm2", "lfm2_moe"):
        chosen = set(config.indices("full_attn_idxs") or every)
        return ["full_attention" if index in chosen else "conv" for index in every]
    if model == "kimi_linear":
        return _kimi_linear(config, layers)
    if model == "llama4_text":
        return _rope_blocks(config, layers, rope="chunked_attention", other="full_attention")
    if model == "modernbert":
        every_n = config.positive("global_attn_every_n_layers", default=3)
        return ["sliding_attention" if index % every_n else "full_attention" for index in every]
    if model == "mimo_v2_flash":
        return ["full_attention" if index == 0 or (index + 1) % 6 == 0 else "sliding_attention" for index in every]
    if model == "smollm3":
        if config.flag("use_sliding_window") and config.integer("sliding_window", default=0):
            return _rope_blocks(config, layers, rope="full_attention", other="sliding_attention")
        return ["full_attention"] * layers
    if config.has("index_head_dim") and config.has("kv_lora_rank"):
        return ["indexed_attention"] * layers
    return _periodic(config, layers)


def _rope_blocks(config: Config, layers: int, *, rope: str, other: str) -> list[str]:
    """Kinds by whether a block has rotary positions: ``no_rope_layers`` lists 1 where it has them."""
    listed = config.indices("no_rope_layers")
    if not listed:
        interval = config.positive("no_rope_layer_interval", default=4)
        listed = [int((index + 1) % interval != 0) for index in range(layers)]
    if len(listed) < layers:
        raise config.bad("no_rope_layers", f"lists {len(listed)} values for {layers} layers")
    return [rope if has else other for has in listed[:layers]]


def _zamba2(config: Config, layers: int) -> list[str]:
    chosen = config.indices("hybrid_layer_ids")
    if chosen is None:
        # The class's default list of 54 blocks.
        chosen = [6, 12, 18, 24, 30, 36, 42, 47, 51]
        config.assumed["hybrid_layer_ids"] = chosen
    return ["hybrid" if index in set(chosen) else "linear_attention" for index in range(layers)]


def _kimi_linear(config: Config, layers: int) -> list[str]:
    section = config.section("linear_attn_config")
    if section is None:
        return ["full_attention" if index and index % 4 == 0 else "linear_attention" for index in range(layers)]
    chosen = section.get("full_attn_layers")
    if not isinstance(chosen, list):
        raise config.bad("linear_attn_config.full_attn_layers", "is not a list")
    # Counted from 1 in this family.
    return ["full_attention" if index + 1 in chosen else "linear_attention" for index in range(layers)]


def _periodic(config: Config, layers: int) -> list[str]:
    """Sliding windows: in all blocks, in all but every n-th, from one block on, or nowhere."""
    model = config.model_type
    if config.given("use_sliding_window") is not None or model.startswith("qwen"):
        if not config.flag("use_sliding_window") or not config.integer("sliding_window", default=0):
            return ["full_attention"] * layers
        first = config.integer("max_window_layers", default=0)
        return ["sliding_attention" if index >= first else "full_attention" for index in range(layers)]
    if not config.integer("sliding_window", default=0):
        return ["full_attention"] * layers
    pattern = config.given("sliding_window_pattern", "_sliding_window_pattern", "global_attn_every_n_layers")
    if isinstance(pattern, str) and pattern and set(pattern) <= {"L", "G"}:
        # EXAONE writes one letter per block of a group.
        return [
            "sliding_attention" if pattern[index % len(pattern)] == "L" else "full_attention" for index in range(layers)
        ]
    if pattern is None and model in _PERIODS:
        period = _PERIODS[model]
        config.assumed["sliding_window_pattern"] = period
    elif pattern is None:
        return ["sliding_attention"] * layers
    else:
        period = config.positive("sliding_window_pattern", "_sliding_window_pattern", "global_attn_every_n_layers")
    return ["sliding_attention" if (index + 1) % period else "full_attention" for index in range(layers)]


class Attention(msgspec.Struct, frozen=True, kw_only=True):
    """One block's attention, in elements."""

    heads: int
    kv_heads: int
    key: int
    value: int
    window: int = 0


def head_size(config: Config, heads: int) -> int:
    """Elements of one head: given, the class's default, or hidden size over heads."""
    if config.has("head_dim"):
        given = config.integer("head_dim")
        if given:
            return given
    hidden = config.positive("hidden_size", "n_embd", "d_model")
    if hidden < heads:
        raise config.bad("num_attention_heads", f"is {heads}, more than hidden_size {hidden}")
    return (2 * hidden if config.model_type == "zamba2" else hidden) // heads


def head_size_of_width(config: Config) -> int:
    """Hidden size over heads."""
    return config.positive("hidden_size", "d_model") // config.positive("num_attention_heads")


def _kv_heads(config: Config, layers: int, heads: list[int]) -> list[int]:
    """K and V heads of each block; falcon's old classes say it by ``multi_query``."""
    if config.model_type in ("falcon", "gpt_bigcode") and config.flag("multi_query", default=True):
        if config.flag("new_decoder_architecture"):
            return config.per_layer(layers, "num_kv_heads", default=heads[0])
        return [1] * layers
    if config.has("num_key_value_heads", "num_kv_heads"):
        found = config.per_layer(layers, "num_key_value_heads", "num_kv_heads")
        for value, count in zip(found, heads, strict=True):
            # One value for all can be meant for blocks of one kind only, so that each is looked at where it is used.
            if value > count or (
                value == 0 and not isinstance(config.given("num_key_value_heads", "num_kv_heads"), list)
            ):
                raise config.bad("num_key_value_heads", f"is {value} beside {count} heads, which cannot share them")
        return [value or count for value, count in zip(found, heads, strict=True)]
    return heads


@functools.cache
def _overridable() -> tuple[str, ...]:
    return ("num_attention_heads", "num_key_value_heads", "head_dim", "sliding_window")


def attention(config: Config, layers: int, found: list[Kind]) -> list[Attention]:
    """Heads and sizes of each block, with what differs between full and window blocks (Gemma 4, MiMo) and with
    ``per_layer_config``, transformers' way of saying that blocks differ."""
    if not any(kind not in ("linear", "conv", "none") for kind in found):
        return [Attention(heads=0, kv_heads=0, key=0, value=0)] * layers
    heads = config.per_layer(layers, "num_attention_heads", "n_head", "num_heads")
    if not all(heads):
        raise config.bad("num_attention_heads", "is 0, which leaves nothing of the model")
    kv_heads = _kv_heads(config, layers, heads)
    size = head_size(config, max(heads))
    value = config.integer("v_head_dim", default=size) or size
    chunk = config.integer("attention_chunk_size", default=0)
    window = window_of(config)
    overrides = _overrides(config)
    blocks: list[Attention] = []
    for index, kind in enumerate(found):
        block = {"heads": heads[index], "kv_heads": kv_heads[index], "key": size, "value": value, "window": 0}
        if kind in ("window", "hybrid_window"):
            block["window"] = window
            if config.model_type == "mimo_v2_flash":
                block["heads"] = config.integer("swa_num_attention_heads", default=heads[index])
                block["kv_heads"] = config.integer("swa_num_key_value_heads", default=kv_heads[index])
                block["key"] = config.integer("swa_head_dim", default=size)
                block["value"] = config.integer("swa_v_head_dim", default=value)
        elif kind == "chunked":
            block["window"] = chunk
        elif config.model_type == "gemma4_text":
            block["key"] = block["value"] = config.integer("global_head_dim", default=512)
            if config.flag("attention_k_eq_v"):
                block["kv_heads"] = config.integer("num_global_key_value_heads", default=kv_heads[index])
        for key, name in (
            ("num_attention_heads", "heads"),
            ("num_key_value_heads", "kv_heads"),
            ("head_dim", "key"),
            ("sliding_window", "window"),
        ):
            if key in overrides.get(index, {}):
                block[name] = overrides[index][key]
                if name == "key":
                    block["value"] = block["key"]
        blocks.append(Attention(**block))
    return blocks


def window_of(config: Config) -> int:
    """Tokens of a sliding window. ModernBERT counts both sides; recurrent Gemma has a name of its own."""
    if config.model_type == "modernbert":
        return config.integer("local_attention", default=128)
    if config.model_type == "recurrent_gemma":
        return config.integer("attention_window_size", "sliding_window", default=2048)
    if config.given("sliding_window_size") is not None and config.model_type == "mimo_v2_flash":
        return config.integer("sliding_window_size") + 1
    return config.integer("sliding_window", default=0)


def _overrides(config: Config) -> dict[int, dict[str, int]]:
    section = config.section("per_layer_config")
    found: dict[int, dict[str, int]] = {}
    for key, values in (section or {}).items():
        if not key.isdecimal() or not isinstance(values, dict):
            raise config.bad("per_layer_config", f"has an entry {key!r} that is not a layer's number with an object")
        row: dict[str, int] = {}
        for name, value in values.items():
            if name in _overridable() and value is not None:
                if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                    raise config.bad(f"per_layer_config.{key}.{name}", "is not a whole number")
                row[name] = value
        found[int(key)] = row
    return found


def mla(config: Config) -> Mla | None:
    """Latent attention, where the config has its ranks."""
    rank = config.integer("kv_lora_rank", default=0)
    if not rank:
        return None
    rope = config.positive("qk_rope_head_dim", default=64)
    return Mla(
        query_rank=config.integer("q_lora_rank", default=0),
        kv_rank=rank,
        rope=rope,
        nope=config.integer("qk_nope_head_dim", default=128),
        # MiniCPM3's class divides the width among the heads; the others' classes have a default.
        value=config.integer("v_head_dim", default=0) or head_size_of_width(config),
    )


def ssm(config: Config) -> Ssm | None:
    """Dimensions of its recurrent blocks, ``None`` without any or where the family is not known."""
    model = config.model_type
    hidden = config.integer("hidden_size", "d_model", default=0)
    if model in _MAMBA1:
        inner = config.integer("intermediate_size", default=0) if model != "jamba" else 0
        inner = inner or _times(config, hidden, "mamba_expand", "expand")
        rank = config.given("mamba_dt_rank", "time_step_rank")
        return Ssm(
            kind="mamba",
            inner=inner,
            state=config.positive("mamba_d_state", "state_size", default=16),
            conv=config.positive("mamba_d_conv", "conv_kernel", default=4),
            dt_rank=rank if isinstance(rank, int) and not isinstance(rank, bool) else -(-hidden // 16),
        )
    if model in _MAMBA2:
        heads = config.integer("mamba_n_heads", "mamba_num_heads", "n_mamba_heads", "num_heads", default=0)
        inner = config.integer("mamba_d_ssm", default=0)
        if not inner and model == "nemotron_h":
            inner = heads * config.positive("mamba_head_dim", default=64)
        return Ssm(
            kind="mamba2",
            inner=inner or _times(config, hidden, "mamba_expand", "expand"),
            state=config.positive("mamba_d_state", "ssm_state_size", "state_size", default=128),
            conv=config.positive("mamba_d_conv", "conv_kernel", default=4),
            groups=config.positive("mamba_n_groups", "mamba_ngroups", "n_groups", default=1),
            dt_rank=heads,
        )
    if model in _GATED_DELTA or config.has("linear_num_value_heads"):
        keys, values = config.positive("linear_num_key_heads"), config.positive("linear_num_value_heads")
        key_size, value_size = config.positive("linear_key_head_dim"), config.positive("linear_value_head_dim")
        if keys * key_size * values * value_size == 0:
            return None
        return Ssm(
            kind="gated-delta",
            inner=values * value_size,
            state=key_size,
            conv=config.positive("linear_conv_kernel_dim", default=4),
            groups=keys,
            dt_rank=values,
        )
    if model in ("lfm2", "lfm2_moe"):
        return Ssm(kind="shortconv", inner=hidden, conv=config.positive("conv_L_cache", default=3))
    if model == "minimax":
        heads = config.positive("num_attention_heads")
        return Ssm(kind="lightning", inner=heads * head_size(config, heads), state=head_size(config, heads))
    if model == "kimi_linear":
        section: dict[str, Any] = config.section("linear_attn_config") or {
            "num_heads": config.integer("linear_num_heads"),
            "head_dim": config.integer("linear_head_dim"),
            "short_conv_kernel_size": config.integer("linear_conv_kernel_dim"),
        }
        sizes = [section.get("num_heads"), section.get("head_dim"), section.get("short_conv_kernel_size", 4)]
        whole = [size for size in sizes if isinstance(size, int) and 0 < size < 1 << 20]
        if len(whole) < len(sizes):
            raise config.bad("linear_attn_config", "lacks num_heads, head_dim or short_conv_kernel_size")
        heads, size, conv = whole
        return Ssm(kind="kda", inner=heads * size, state=size, conv=conv, groups=heads)
    if model == "recurrent_gemma":
        inner = config.integer("lru_width", default=hidden) or hidden
        return Ssm(kind="rg-lru", inner=inner, state=1, conv=config.positive("conv1d_width", default=4))
    return None


def _times(config: Config, hidden: int, *names: str) -> int:
    """Inner size as a multiple of the hidden size; the factor may be a fraction."""
    factor = config.value(*names)
    if factor is None:
        factor = 2
    if isinstance(factor, bool) or not isinstance(factor, (int, float)) or not 0 < factor < 1000:
        raise config.bad(names[0], "is not a factor between 0 and 1000")
    return int(factor * hidden)


def states(found: Ssm) -> tuple[int, int]:
    """Elements of convolution state and of recurrent state per sequence and block.

    The convolution is counted as vLLM and llama.cpp keep it (kernel − 1 columns); transformers keeps all columns of
    the kernel. Sources: ``MambaStateShapeCalculator`` of vLLM, ``llama_hparams::n_embd_r/n_embd_s`` of llama.cpp and
    the modeling files of transformers 5.24.
    """
    columns = max(found.conv - 1, 0)
    if found.kind == "mamba":
        return columns * found.inner, found.inner * found.state
    if found.kind == "mamba2":
        return columns * (found.inner + 2 * found.groups * found.state), found.inner * found.state
    if found.kind == "gated-delta":
        return columns * (found.inner + 2 * found.groups * found.state), found.inner * found.state
    if found.kind == "kda":
        return columns * 3 * found.inner, found.inner * found.state
    if found.kind == "lightning":
        return 0, found.inner * found.state
    return columns * found.inner, found.inner * found.state


def build(config: Config) -> tuple[Layer, ...]:
    """Every block of the language model, with its feed-forward or experts."""
    words = block_words(config)
    layers, found = len(words), [_named(config, word) for word in words]
    blocks = attention(config, layers, found)
    latent, recurrent = mla(config), ssm(config)
    encoder = is_encoder(config)
    shared = config.integer("num_kv_shared_layers", default=0)
    if shared > layers:
        raise config.bad("num_kv_shared_layers", f"is {shared} for {layers} layers")
    indexer = config.integer("index_head_dim", default=0) if "indexed" in found else 0
    indexer_kinds = config.words("indexer_types") or []
    dense, experts = feed_forwards(config, words)
    if recurrent is None and any(kind in ("linear", "conv", "hybrid", "hybrid_window") for kind in found):
        text = f"{config.path}: the state of {config.model_type!r}'s recurrent blocks is not known and is not counted."
        config.notes.append(Note(kind="unknown", bucket="recurrent", text=text))
    result: list[Layer] = []
    for index, (kind, block) in enumerate(zip(found, blocks, strict=True)):
        row: dict[str, int] = {"feed_forward": dense[index], "experts": experts[index]}
        if kind not in ("linear", "conv", "none"):
            row |= {"heads": block.heads, "kv_heads": block.kv_heads, "window": block.window}
            row |= {"key_length": block.key, "value_length": block.value}
            row |= {"k_row": block.kv_heads * block.key, "v_row": block.kv_heads * block.value}
            if latent is not None:
                row |= {"key_length": latent.nope + latent.rope, "value_length": latent.value}
                row |= {"k_row": latent.kv_rank + latent.rope, "v_row": 0}
            if kind == "indexed" and (index >= len(indexer_kinds) or indexer_kinds[index] == "full"):
                row["indexer_row"] = indexer
            if encoder or index >= layers - shared:
                row |= {"k_row": 0, "v_row": 0, "indexer_row": 0}
        if kind in ("linear", "conv", "hybrid", "hybrid_window") and recurrent is not None:
            row["state_r"], row["state_s"] = states(recurrent)
            if kind == "conv":
                row["state_s"] = 0
        result.append(msgspec.convert(row, Layer))
    return tuple(result)
