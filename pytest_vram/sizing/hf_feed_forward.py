"""Dense feed-forwards and mixtures of experts of a Hugging Face model: how wide each is, in which blocks."""

from __future__ import annotations

from collections.abc import Sequence

from pytest_vram.sizing.hf_config import Config

# Families whose first block alone is dense where the config does not say.
_ONE_DENSE = ("glm4_moe_lite", "hy_v3", "mimo_v2_flash", "kimi_linear")


def expert_count(config: Config) -> int:
    """Routed experts of one mixture, 0 when dense; families name the key differently."""
    if config.model_type == "gemma4_text" and not config.flag("enable_moe_block"):
        return 0
    most = 1_000_000
    found = config.integer(
        "num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", default=0, most=most
    )
    # One "expert" is how dense members of mixture families are written.
    return found if found > 1 else 0


def feed_forwards(config: Config, words: Sequence[str]) -> tuple[list[int], list[int]]:
    """Hidden size of each dense feed-forward (0 where there is none), and experts of each block (0 where dense).

    :param words: what each block is, in the words of the config (``mlp`` and ``moe`` are kinds of their own in
        Nemotron-H; Zamba 2 has a feed-forward in its hybrid blocks only).
    """
    layers = len(words)
    model, every = config.model_type, range(layers)
    width: list[int]
    if model in ("mamba", "mamba2", "falcon_mamba"):
        return [0] * layers, [0] * layers
    if model == "llama4_text":
        width = [config.integer("intermediate_size_mlp", "intermediate_size")] * layers
    elif config.has("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size"):
        width = config.per_layer(layers, "intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size")
    else:
        width = [4 * config.positive("hidden_size", "n_embd", "d_model")] * layers
    if model == "lfm2" and config.flag("block_auto_adjust_ff_dim", default=True):
        width = [_lfm2_width(config, width[0])] * layers
    if model == "gemma4_text" and config.flag("use_double_wide_mlp"):
        first = layers - config.integer("num_kv_shared_layers", default=0)
        width = [2 * size if index >= first else size for index, size in enumerate(width)]
    total = expert_count(config)
    if model == "nemotron_h":
        dense = [size if word == "mlp" else 0 for word, size in zip(words, width, strict=True)]
        return dense, [total if word == "moe" else 0 for word in words]
    if model == "zamba2":
        return [size if word == "hybrid" else 0 for word, size in zip(words, width, strict=True)], [0] * layers
    if not total:
        return width, [0] * layers
    sparse = _sparse(config, layers)
    if model == "gemma4_text":
        # A dense feed-forward runs beside the experts.
        return width, [total if chosen else 0 for chosen in sparse]
    return (
        [0 if sparse[index] else width[index] for index in every],
        [total if sparse[index] else 0 for index in every],
    )


def _lfm2_width(config: Config, width: int) -> int:
    """LFM2 takes two thirds of the stated width, times a factor, rounded up (``Lfm2MLP`` of transformers 5.24)."""
    multiplier = config.value("block_ffn_dim_multiplier")
    adjusted = int(2 * width / 3)
    if isinstance(multiplier, (int, float)) and not isinstance(multiplier, bool):
        adjusted = int(multiplier * adjusted)
    step = config.positive("block_multiple_of", default=256)
    return step * (-(-adjusted // step))


def _sparse(config: Config, layers: int) -> list[bool]:
    """Which blocks are mixtures, by the key that the family uses for it."""
    every = range(layers)
    listed = config.words("mlp_layer_types")
    if listed:
        return [index < len(listed) and listed[index] == "sparse" for index in every]
    if (
        config.model_type in ("glm4_moe_lite", "hy_v3", "mimo_v2_flash", "kimi_linear")
        and config.given("moe_layer_freq") is None
    ):
        leading = config.given("first_k_dense_replace")
        return [index >= (leading if isinstance(leading, int) else 1) for index in every]
    if config.model_type == "llama4_text":
        chosen = config.indices("moe_layers")
        step = config.positive("interleave_moe_layer_step", default=1)
        return [index in chosen if chosen is not None else (index + 1) % step == 0 for index in every]
    if config.model_type == "jamba":
        period, offset = (
            config.positive("expert_layer_period", default=2),
            config.integer("expert_layer_offset", default=1),
        )
        return [index % period == offset for index in every]
    if config.has("moe_layer_start_index"):
        start = config.integer("moe_layer_start_index", default=0)
        interval = config.positive("moe_layer_interval", default=1)
        end = config.given("moe_layer_end_index")
        last = end if isinstance(end, int) and end >= 0 else layers - 1
        return [start <= index <= last and (index + 1) % interval == 0 for index in every]
    if config.has("decoder_sparse_step", "mlp_only_layers"):
        step = config.positive("decoder_sparse_step", default=1)
        only = set(config.indices("mlp_only_layers") or [])
        return [index not in only and (index + 1) % step == 0 for index in every]
    frequency = config.given("moe_layer_freq")
    if isinstance(frequency, list):
        marks = config.indices("moe_layer_freq") or []
        return [index < len(marks) and bool(marks[index]) for index in every]
    step = config.positive("moe_layer_freq", default=1)
    leading = config.integer("first_k_dense_replace", "num_dense_layers", default=0)
    return [index >= leading and index % step == 0 for index in every]
