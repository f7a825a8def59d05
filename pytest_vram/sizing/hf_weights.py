"""Tensors of a Hugging Face model computed from its dimensions, where its folder holds a ``config.json`` only.

Each family's blocks differ in few things (biases, norms, gates), which :class:`Family` states. For the families listed
here the parameters equal those of transformers' own classes to the last one (``tests/rehearsal``); for others the
shape of Llama stands in, and a note says so.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from pytest_vram.sizing.hf_config import Config
from pytest_vram.sizing.hf_layers import is_encoder, kinds
from pytest_vram.sizing.hf_quant import Quant
from pytest_vram.sizing.shape import Layer, Mla, Note, Ssm, Tensor


class Family(msgspec.Struct, frozen=True, kw_only=True):
    """How a family's blocks differ from Llama's.

    :ivar qkv_bias: ``""``: as ``attention_bias`` says; ``always``, ``never``. :ivar out_bias: the same for the output
        projection. :ivar mlp_bias: the same for the feed-forward. :ivar gated: three matrices, else two.
    :ivar norms: of width ``hidden_size`` in each block. :ivar norm_bias: norms have a bias. :ivar qk_norm: ``""``,
        ``head`` (one weight per element of a head), ``full`` (per element of all heads), ``heads`` (per head and
        element, Cohere). :ivar final_norm: after the last block. :ivar shared_gate: shared experts have a gate of
        one output. :ivar shared_width: how the width of shared experts is found. :ivar query_gate: the query
        projection also gives a gate. :ivar sinks: one number per head. :ivar expert_bias: of router and experts.
    :ivar router_bias: one number per expert. :ivar head_bias: of the output matrix. :ivar positions: a table of
        positions with this many extra rows, -1: none. :ivar extras: weights per block that no rule has.
    """

    qkv_bias: str = ""
    out_bias: str = ""
    mlp_bias: str = ""
    gated: bool = True
    norms: int = 2
    norm_bias: bool = False
    qk_norm: str = ""
    final_norm: bool = True
    shared_gate: bool = False
    query_gate: bool = False
    sinks: bool = False
    expert_bias: bool = False
    router_bias: bool = False
    head_bias: bool = False
    positions: int = -1


_QWEN2 = Family(qkv_bias="always", out_bias="never", mlp_bias="never")
_QWEN3 = Family(qk_norm="head", mlp_bias="never")
_GEMMA = Family(norms=4, qk_norm="head", mlp_bias="never")
_DEEPSEEK = Family(router_bias=True, mlp_bias="never")
FAMILIES: dict[str, Family] = {
    "llama": Family(),
    "mistral": Family(qkv_bias="never", out_bias="never", mlp_bias="never"),
    "ministral": Family(qkv_bias="never", out_bias="never", mlp_bias="never"),
    "ministral3": Family(qkv_bias="never", out_bias="never", mlp_bias="never"),
    "mixtral": Family(qkv_bias="never", out_bias="never", mlp_bias="never"),
    "qwen2": _QWEN2,
    "qwen2_vl_text": _QWEN2,
    "qwen2_5_vl_text": _QWEN2,
    "qwen2_moe": Family(qkv_bias="always", out_bias="never", mlp_bias="never", shared_gate=True),
    "qwen3": _QWEN3,
    "qwen3_moe": _QWEN3,
    "qwen3_vl_text": _QWEN3,
    "qwen3_vl_moe_text": _QWEN3,
    "qwen3_next": Family(qk_norm="head", mlp_bias="never", shared_gate=True, query_gate=True),
    "qwen3_5_text": Family(qk_norm="head", mlp_bias="never", query_gate=True),
    "qwen3_5_moe_text": Family(qk_norm="head", mlp_bias="never", shared_gate=True, query_gate=True),
    "gemma": Family(mlp_bias="never"),
    "gemma2": Family(norms=4, mlp_bias="never"),
    "gemma3_text": _GEMMA,
    "phi": Family(
        qkv_bias="always",
        out_bias="always",
        mlp_bias="always",
        gated=False,
        norms=1,
        norm_bias=True,
        head_bias=True,
    ),
    "phi3": Family(qkv_bias="never", out_bias="never", mlp_bias="never"),
    "gpt_oss": Family(sinks=True, expert_bias=True),
    "cohere": Family(norms=1, mlp_bias="never"),
    "cohere2": Family(norms=1, mlp_bias="never"),
    "olmo": Family(norms=0, final_norm=False, mlp_bias="never"),
    "olmo2": Family(qk_norm="full", mlp_bias="never"),
    "olmo3": Family(qk_norm="full", mlp_bias="never"),
    "olmoe": Family(qk_norm="full", mlp_bias="never"),
    "granite": Family(),
    "granitemoe": Family(mlp_bias="never"),
    "smollm3": Family(),
    "seed_oss": Family(out_bias="never"),
    "arcee": Family(gated=False),
    "glm": Family(out_bias="never", mlp_bias="never"),
    "glm4": Family(out_bias="never", mlp_bias="never", norms=4),
    "glm4_moe": Family(out_bias="never", mlp_bias="never", router_bias=True),
    "exaone4": Family(qk_norm="head", qkv_bias="never", out_bias="never", mlp_bias="never"),
    "ernie4_5": Family(qkv_bias="never", out_bias="never", mlp_bias="never"),
    "hunyuan_v1_dense": Family(qk_norm="head", mlp_bias="never"),
    "internlm3": Family(qkv_bias="never", out_bias="never", mlp_bias="never"),
    "helium": Family(out_bias="never"),
    "deepseek_v2": Family(mlp_bias="never"),
    "deepseek_v3": _DEEPSEEK,
    "dots1": Family(qk_norm="head", mlp_bias="never", router_bias=True),
    "minimax_m2": Family(qk_norm="full", qkv_bias="never", out_bias="never", mlp_bias="never", router_bias=True),
    "starcoder2": Family(qkv_bias="always", out_bias="always", mlp_bias="always", gated=False, norm_bias=True),
    "stablelm": Family(qkv_bias="never", out_bias="never", mlp_bias="never", norm_bias=True),
    "mamba": Family(norms=1),
    "falcon_mamba": Family(norms=1),
    "mamba2": Family(norms=1),
    "lfm2": Family(qk_norm="head", qkv_bias="never", out_bias="never", mlp_bias="never"),
    "llama4_text": Family(mlp_bias="never"),
    "cwm": Family(),
    "minicpm3": Family(),
    "youtu": _DEEPSEEK,
    "glm4_moe_lite": _DEEPSEEK,
    "hy_v3": Family(qk_norm="head", router_bias=True),
    "exaone_moe": Family(qk_norm="head", qkv_bias="never", out_bias="never", mlp_bias="never", router_bias=True),
    "ernie4_5_moe": Family(qkv_bias="never", out_bias="never", mlp_bias="never", router_bias=True),
    "granitemoeshared": Family(mlp_bias="never"),
    "granitemoehybrid": Family(mlp_bias="never"),
    "bamba": Family(mlp_bias="never"),
    "gemma4_text": _GEMMA,
    "gpt2": Family(qkv_bias="always", out_bias="always", mlp_bias="always", gated=False, norm_bias=True, positions=0),
}
_ENCODER = Family(
    qkv_bias="always",
    out_bias="always",
    mlp_bias="always",
    gated=False,
    norm_bias=True,
    final_norm=False,
    positions=0,
)
FAMILIES |= {"bert": _ENCODER, "roberta": _ENCODER, "xlm-roberta": _ENCODER}


class _Writer:
    """Collects tensors; a linear layer is stored whole or quantised, as its module's name decides."""

    def __init__(self, element: int, dtype: str, quant: Quant | None) -> None:
        self.element, self.dtype, self.quant = element, dtype, quant
        self.tensors: list[Tensor] = []

    def plain(self, name: str, *dims: int, element: int | None = None) -> None:
        """A tensor that is never quantised, dimensions fastest first."""
        size = self.element if element is None else element
        tensor = Tensor(name=name, dims=dims, type=self.dtype, bytes=0)
        self.tensors.append(msgspec.structs.replace(tensor, bytes=tensor.elements * size))

    def linear(self, module: str, columns: int, rows: int, *, bias: bool = False, copies: int = 1) -> None:
        """A linear layer of ``rows`` outputs, or a stack of them (experts)."""
        dims = (columns, rows) if copies == 1 else (columns, rows, copies)
        quant = self.quant
        if quant is None or quant.skips(module):
            self.plain(f"{module}.weight", *dims)
        elif not quant.known:
            self.tensors.append(Tensor(name=f"{module}.weight", dims=dims, type=quant.method, bytes=0, known=False))
        elif quant.method == "mxfp4" and copies == 1:
            # Only stacks of experts are stored in MXFP4.
            self.plain(f"{module}.weight", *dims)
        else:
            size = copies * quant.matrix(rows, columns)
            self.tensors.append(Tensor(name=f"{module}.weight", dims=dims, type=quant.label, bytes=size))
        if bias:
            self.plain(f"{module}.bias", *((rows,) if copies == 1 else (rows, copies)))


def compute(
    config: Config, layers: tuple[Layer, ...], latent: Mla | None, recurrent: Ssm | None, quant: Quant | None
) -> tuple[Tensor, ...]:
    """Every tensor of the language model, in the order of its blocks.

    Formula: the shapes of the families' ``__init__`` in transformers 5.24's modeling files.
    """
    family = FAMILIES.get(config.model_type)
    if family is None:
        text = f"{config.path}: the weights of {config.model_type!r} are computed as if its blocks were Llama's."
        config.notes.append(Note(kind="unknown", bucket="weights", text=text))
        family = Family()
    hidden = config.positive("hidden_size", "n_embd", "d_model")
    vocabulary = config.positive("vocab_size")
    writer = _Writer(config.dtype_bytes, config.dtype or "bfloat16", quant)
    embedding = quant.embeddings if quant is not None and quant.embeddings else None
    writer.plain("model.embed_tokens.weight", hidden, vocabulary, element=embedding)
    if family.positions >= 0:
        writer.plain("model.embed_positions.weight", hidden, config.positive("max_position_embeddings", "n_positions"))
    if is_encoder(config):
        writer.plain("model.token_type_embeddings.weight", hidden, config.integer("type_vocab_size", default=2))
        _norm(writer, "model.embed_norm", hidden, family)
    found = kinds(config)
    for index, (layer, kind) in enumerate(zip(layers, found, strict=True)):
        prefix = f"model.layers.{index}"
        for number in range(family.norms):
            _norm(writer, f"{prefix}.norm{number}", hidden, family)
        if layer.heads:
            _attention(writer, f"{prefix}.self_attn", config, layer, latent, hidden, family)
        if kind in ("linear", "conv", "hybrid", "hybrid_window") and recurrent is not None:
            _recurrent(writer, f"{prefix}.mixer", config, recurrent, hidden)
        if layer.experts:
            _experts(writer, f"{prefix}.mlp", config, layer, hidden, family)
        if layer.feed_forward:
            bias = _bias(config, family.mlp_bias, "mlp_bias")
            _feed_forward(writer, f"{prefix}.mlp", hidden, layer.feed_forward, family.gated, bias)
        if config.model_type == "gemma4_text":
            _gemma4_block(writer, prefix, config, layer, hidden)
    if family.final_norm:
        _norm(writer, "model.norm", hidden, family)
    if config.model_type == "gemma4_text":
        _gemma4_inputs(writer, config, len(layers), hidden)
    if is_encoder(config):
        writer.linear("pooler.dense", hidden, hidden, bias=True)
    elif not tied(config):
        if embedding is not None:
            writer.plain("lm_head.weight", hidden, vocabulary, element=embedding)
        else:
            skipping = msgspec.structs.replace(quant, skipped=(*quant.skipped, "lm_head")) if quant else None
            writer.quant = skipping if quant is None or quant.method in ("awq", "mxfp4", "fp8") else quant
            writer.linear("lm_head", hidden, vocabulary, bias=family.head_bias)
    return tuple(writer.tensors)


def _gemma4_inputs(writer: _Writer, config: Config, layers: int, hidden: int) -> None:
    """Gemma 4's second embedding table, which feeds every block."""
    width = config.integer("hidden_size_per_layer_input", default=0)
    if width:
        rows = config.positive("vocab_size_per_layer_input")
        writer.plain("model.embed_tokens_per_layer.weight", layers * width, rows)
        writer.linear("model.per_layer_model_projection", hidden, layers * width)
        writer.plain("model.per_layer_projection_norm.weight", width)


def _gemma4_block(writer: _Writer, prefix: str, config: Config, layer: Layer, hidden: int) -> None:
    width = config.integer("hidden_size_per_layer_input", default=0)
    if width:
        writer.linear(f"{prefix}.per_layer_input_gate", hidden, width)
        writer.linear(f"{prefix}.per_layer_projection", width, hidden)
        writer.plain(f"{prefix}.post_per_layer_input_norm.weight", hidden)
    if layer.experts:
        writer.plain(f"{prefix}.router.scale", hidden)
        writer.plain(f"{prefix}.router.per_expert_scale", layer.experts)
        writer.plain(f"{prefix}.moe_norms", hidden, 3)


def tied(config: Config) -> bool:
    """Whether the output matrix is the embedding table; encoders have none."""
    for fields in (config.fields, config.outer):
        found = fields.get("tie_word_embeddings", fields.get("tie_embedding"))
        if isinstance(found, bool):
            return found
    return config.flag("tie_word_embeddings")


def _norm(writer: _Writer, name: str, width: int, family: Family) -> None:
    writer.plain(f"{name}.weight", width)
    if family.norm_bias:
        writer.plain(f"{name}.bias", width)


def _bias(config: Config, rule: str, key: str) -> bool:
    return rule == "always" or (rule == "" and config.flag(key))


def _attention(
    writer: _Writer, prefix: str, config: Config, layer: Layer, latent: Mla | None, hidden: int, family: Family
) -> None:
    bias = _bias(config, family.qkv_bias, "attention_bias")
    out_bias = _bias(config, family.out_bias, "attention_bias")
    if latent is not None:
        heads, key = layer.heads, latent.nope + latent.rope
        if latent.query_rank:
            writer.linear(f"{prefix}.q_a_proj", hidden, latent.query_rank, bias=bias)
            writer.plain(f"{prefix}.q_a_layernorm.weight", latent.query_rank)
            writer.linear(f"{prefix}.q_b_proj", latent.query_rank, heads * key)
        else:
            writer.linear(f"{prefix}.q_proj", hidden, heads * key)
        writer.linear(f"{prefix}.kv_a_proj_with_mqa", hidden, latent.kv_rank + latent.rope, bias=bias)
        writer.plain(f"{prefix}.kv_a_layernorm.weight", latent.kv_rank)
        writer.linear(f"{prefix}.kv_b_proj", latent.kv_rank, heads * (latent.nope + latent.value))
        writer.linear(f"{prefix}.o_proj", heads * latent.value, hidden, bias=bias)
        return
    query = layer.heads * layer.key_length
    writer.linear(f"{prefix}.q_proj", hidden, query * (2 if family.query_gate else 1), bias=bias)
    if layer.k_row or is_encoder(config):
        writer.linear(f"{prefix}.k_proj", hidden, layer.kv_heads * layer.key_length, bias=bias)
        # Gemma 4's full blocks may take their keys for values.
        if layer.window or not (config.model_type == "gemma4_text" and config.flag("attention_k_eq_v")):
            writer.linear(f"{prefix}.v_proj", hidden, layer.kv_heads * layer.value_length, bias=bias)
    writer.linear(f"{prefix}.o_proj", layer.heads * layer.value_length, hidden, bias=out_bias)
    norm = family.qk_norm
    if config.model_type in ("cohere", "glm4_moe", "minimax_m2") and not config.flag("use_qk_norm"):
        norm = "full" if config.model_type == "minimax_m2" else ""
    elif config.model_type in ("cohere", "glm4_moe"):
        norm = "heads" if config.model_type == "cohere" else "head"
    if norm == "head":
        writer.plain(f"{prefix}.q_norm.weight", layer.key_length)
        if layer.k_row:
            writer.plain(f"{prefix}.k_norm.weight", layer.key_length)
    elif norm in ("full", "heads"):
        writer.plain(f"{prefix}.q_norm.weight", query)
        writer.plain(f"{prefix}.k_norm.weight", layer.kv_heads * layer.key_length)
    if family.sinks:
        writer.plain(f"{prefix}.sinks", layer.heads)


def _feed_forward(writer: _Writer, prefix: str, hidden: int, width: int, gated: bool, bias: bool) -> None:
    if gated:
        writer.linear(f"{prefix}.gate_proj", hidden, width, bias=bias)
    writer.linear(f"{prefix}.up_proj", hidden, width, bias=bias)
    writer.linear(f"{prefix}.down_proj", width, hidden, bias=bias)


def expert_width(config: Config) -> int:
    """Hidden size of one routed expert."""
    if config.has("moe_intermediate_size"):
        found = config.given("moe_intermediate_size")
        if isinstance(found, list) and found:
            return config.per_layer(len(found), "moe_intermediate_size")[0]
        return config.positive("moe_intermediate_size")
    return config.positive("intermediate_size")


def shared_width(config: Config) -> int:
    """Hidden size of all experts that every token passes through, 0 without any."""
    if config.has("shared_expert_intermediate_size"):
        return config.integer("shared_expert_intermediate_size")
    if config.model_type == "llama4_text":
        return expert_width(config)
    if config.has("shared_intermediate_size"):
        return config.integer("shared_intermediate_size")
    count = config.integer("n_shared_experts", "num_shared_experts", "moe_num_shared_experts", default=0)
    return count * expert_width(config)


def _experts(writer: _Writer, prefix: str, config: Config, layer: Layer, hidden: int, family: Family) -> None:
    width, count = expert_width(config), layer.experts
    writer.plain(f"{prefix}.gate.weight", hidden, count)
    if family.expert_bias or family.router_bias:
        writer.plain(f"{prefix}.gate.bias", count)
    writer.linear(f"{prefix}.experts.gate_up_proj", hidden, 2 * width, bias=family.expert_bias, copies=count)
    writer.linear(f"{prefix}.experts.down_proj", width, hidden, bias=family.expert_bias, copies=count)
    shared = shared_width(config)
    if shared:
        _feed_forward(writer, f"{prefix}.shared_expert", hidden, shared, True, False)
        if family.shared_gate:
            writer.plain(f"{prefix}.shared_expert_gate.weight", hidden, 1)


def _recurrent(writer: _Writer, prefix: str, config: Config, found: Ssm, hidden: int) -> None:
    """The recurrent part of a block: its projections, convolution and decay parameters."""
    for module, columns, rows in _projections(config, found, hidden):
        writer.linear(f"{prefix}.{module}", columns, rows)
    inner, state = found.inner, found.state
    if found.kind == "mamba":
        writer.plain(f"{prefix}.conv1d.weight", found.conv, inner)
        writer.plain(f"{prefix}.conv1d.bias", inner)
        writer.plain(f"{prefix}.dt_proj.bias", inner)
        writer.plain(f"{prefix}.A_log", state, inner)
        writer.plain(f"{prefix}.D", inner)
    elif found.kind == "mamba2":
        channels = inner + 2 * found.groups * state
        writer.plain(f"{prefix}.conv1d.weight", found.conv, channels)
        writer.plain(f"{prefix}.conv1d.bias", channels)
        writer.plain(f"{prefix}.decay", found.dt_rank, 3)
        writer.plain(f"{prefix}.norm.weight", inner)
    elif found.kind == "gated-delta":
        writer.plain(f"{prefix}.conv1d.weight", found.conv, inner + 2 * found.groups * state)
        writer.plain(f"{prefix}.decay", found.dt_rank, 2)
        writer.plain(f"{prefix}.norm.weight", inner // found.dt_rank)
    elif found.kind == "shortconv":
        writer.plain(f"{prefix}.conv.weight", found.conv, hidden)


def _projections(config: Config, found: Ssm, hidden: int) -> Iterator[tuple[str, int, int]]:
    """The linear layers of a recurrent block: name, inputs, outputs."""
    inner, state = found.inner, found.state
    if found.kind == "mamba":
        yield "in_proj", hidden, 2 * inner
        yield "x_proj", inner, found.dt_rank + 2 * state
        yield "dt_proj", found.dt_rank, inner
    elif found.kind == "mamba2":
        yield "in_proj", hidden, 2 * inner + 2 * found.groups * state + found.dt_rank
    elif found.kind == "gated-delta":
        yield "in_proj_qkvz", hidden, 2 * found.groups * state + 2 * inner
        yield "in_proj_ba", hidden, 2 * found.dt_rank
    elif found.kind == "shortconv":
        yield "in_proj", hidden, 3 * hidden
    else:
        yield "qkv_proj", hidden, 3 * inner
    yield "out_proj", inner, hidden
