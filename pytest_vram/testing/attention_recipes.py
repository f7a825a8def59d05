"""Recipes of models with unusual attention: sinks, layers that share a cache, heads per layer, encoders."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pytest_vram.errors import BadInput
from pytest_vram.testing.recipes import F16, SMALLEST_VOCABULARY, Plan, Recipe, Tokenizer, Types, each


def gpt_oss(
    *,
    layers: int = 4,
    embedding: int = 256,
    heads: int = 4,
    kv_heads: int = 2,
    head_size: int = 64,
    experts: int = 8,
    experts_used: int = 2,
    expert_feed_forward: int = 128,
    window: int = 128,
    vocabulary: int = SMALLEST_VOCABULARY,
    context: int = 8192,
    types: Types = F16,
    tokenizer: Tokenizer = "bytes",
) -> Recipe:
    """A mixture with attention sinks, biases everywhere, and a sliding window in every second layer."""
    plan = Plan(
        "gpt-oss",
        layers=layers,
        embedding=embedding,
        vocabulary=vocabulary,
        context=context,
        types=types,
        tokenizer=tokenizer,
    )
    plan.attention_keys(heads, kv_heads, head_size)
    plan.keys(
        feed_forward_length=expert_feed_forward,
        expert_count=experts,
        expert_used_count=experts_used,
        expert_feed_forward_length=expert_feed_forward,
        attention__sliding_window=window,
    )
    plan.ends(tied=False)
    for layer in range(layers):
        name = f"blk.{layer}."
        plan.norms(layer, "attn_norm", "post_attention_norm")
        plan.attention(layer, heads, kv_heads, head_size, bias=True)
        plan.add(f"{name}attn_output.bias", embedding)
        plan.add(f"{name}attn_sinks.weight", heads)
        plan.experts(layer, experts, expert_feed_forward)
        plan.add(f"{name}ffn_gate_inp.bias", experts)
        for which, size in (("gate", expert_feed_forward), ("up", expert_feed_forward), ("down", embedding)):
            plan.add(f"{name}ffn_{which}_exps.bias", size, experts, type="f32")
    return plan.recipe()


def gemma4(
    *,
    layers: int = 6,
    embedding: int = 256,
    heads: int = 4,
    kv_heads: int | Sequence[int] = 2,
    head_size: int = 128,
    window_head_size: int = 64,
    feed_forward: int = 512,
    window: int = 512,
    period: int = 3,
    shared_kv_layers: int = 3,
    per_layer: int = 64,
    vocabulary: int = SMALLEST_VOCABULARY,
    context: int = 8192,
    types: Types = F16,
    tokenizer: Tokenizer = "bytes",
) -> Recipe:
    """Window layers with smaller heads, last layers that use the cache of earlier ones, embeddings for each layer.

    :param period: one layer of so many, 2 at least, has full attention, the last of them. :param shared_kv_layers: the
        layer before them must have full attention, as the engine looks for the shared caches in that layer and in the
        one before it. :param per_layer: width of the embeddings for each layer; 0 for none.
    """
    if shared_kv_layers and (period < 2 or (layers - shared_kv_layers) % period):
        raise BadInput(f"{layers} layers with {shared_kv_layers} sharing: the others must be a multiple of {period}")
    plan = Plan(
        "gemma4",
        layers=layers,
        embedding=embedding,
        vocabulary=vocabulary,
        context=context,
        types=types,
        tokenizer=tokenizer,
    )
    windowed = [(layer + 1) % period != 0 for layer in range(layers)]
    kv = each(kv_heads, layers)
    plan.attention_keys(heads, kv_heads if isinstance(kv_heads, int) else kv, head_size)
    plan.keys(
        "attention.",
        key_length_swa=window_head_size,
        value_length_swa=window_head_size,
        sliding_window=window,
        sliding_window_pattern=windowed,
        shared_kv_layers=shared_kv_layers,
    )
    plan.keys(
        feed_forward_length=feed_forward,
        embedding_length_per_layer_input=per_layer,
        rope__dimension_count_swa=window_head_size,
    )
    plan.ends(tied=True)
    if per_layer:
        plan.add("per_layer_token_embd.weight", per_layer * layers, vocabulary)
        plan.add("per_layer_model_proj.weight", embedding, per_layer * layers)
        plan.add("per_layer_proj_norm.weight", per_layer)
    if not all(windowed):
        plan.add("rope_freqs.weight", head_size // 2)
    for layer in range(layers):
        name = f"blk.{layer}."
        size = window_head_size if windowed[layer] else head_size
        plan.norms(layer, "attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm")
        plan.attention(layer, heads, kv[layer], size, head_norms=True)
        plan.feed_forward(layer, feed_forward)
        if per_layer:
            plan.add(f"{name}inp_gate.weight", embedding, per_layer)
            plan.add(f"{name}proj.weight", per_layer, embedding)
            plan.norms(layer, "post_norm")
    return plan.recipe()


def openelm(
    *,
    layers: int = 4,
    embedding: int = 256,
    heads: Sequence[int] = (4, 4, 8, 8),
    kv_heads: Sequence[int] = (1, 1, 2, 2),
    head_size: int = 64,
    feed_forward: Sequence[int] = (256, 384, 512, 768),
    vocabulary: int = SMALLEST_VOCABULARY,
    context: int = 2048,
    types: Types = F16,
    tokenizer: Tokenizer = "bytes",
) -> Recipe:
    """Other numbers of heads and other widths in each layer; one tensor for Q, K and V."""
    plan = Plan(
        "openelm",
        layers=layers,
        embedding=embedding,
        vocabulary=vocabulary,
        context=context,
        types=types,
        tokenizer=tokenizer,
    )
    plan.attention_keys(each(heads, layers), each(kv_heads, layers), head_size)
    plan.keys(feed_forward_length=each(feed_forward, layers))
    plan.ends(tied=True)
    for layer in range(layers):
        name = f"blk.{layer}."
        plan.norms(layer, "attn_norm", "ffn_norm")
        plan.add(f"{name}attn_qkv.weight", embedding, (heads[layer] + 2 * kv_heads[layer]) * head_size)
        plan.add(f"{name}attn_q_norm.weight", head_size)
        plan.add(f"{name}attn_k_norm.weight", head_size)
        plan.add(f"{name}attn_output.weight", heads[layer] * head_size, embedding)
        plan.feed_forward(layer, feed_forward[layer])
    return plan.recipe()


def deci(
    *,
    layers: int = 4,
    embedding: int = 256,
    heads: Sequence[int] = (4, 0, 4, 4),
    kv_heads: Sequence[int] = (2, 0, 0, 1),
    head_size: int = 64,
    feed_forward: Sequence[int] = (512, 256, 512, 0),
    vocabulary: int = SMALLEST_VOCABULARY,
    context: int = 4096,
    tied: bool = False,
    types: Types = F16,
    tokenizer: Tokenizer = "bytes",
) -> Recipe:
    """Pruned layers: some without attention (no heads), some with a matrix in its place (no K heads), some without
    feed-forward. The first layer needs heads."""
    plan = Plan(
        "deci",
        layers=layers,
        embedding=embedding,
        vocabulary=vocabulary,
        context=context,
        types=types,
        tokenizer=tokenizer,
    )
    plan.attention_keys(each(heads, layers), each(kv_heads, layers), head_size)
    plan.keys(feed_forward_length=each(feed_forward, layers))
    plan.ends(tied=tied)
    for layer in range(layers):
        if heads[layer]:
            plan.norms(layer, "attn_norm")
        if kv_heads[layer]:
            plan.attention(layer, heads[layer], kv_heads[layer], head_size)
        elif heads[layer]:
            plan.add(f"blk.{layer}.attn_output.weight", embedding, embedding)
        if feed_forward[layer]:
            plan.norms(layer, "ffn_norm")
            plan.feed_forward(layer, feed_forward[layer])
    return plan.recipe()


def bert(
    architecture: Literal["bert", "nomic-bert"] = "bert",
    *,
    layers: int = 2,
    embedding: int = 256,
    heads: int = 4,
    feed_forward: int = 512,
    vocabulary: int = SMALLEST_VOCABULARY,
    context: int = 512,
    types: Types = F16,
    tokenizer: Tokenizer = "bytes",
) -> Recipe:
    """An encoder: no cache, attention in both directions."""
    plan = Plan(
        architecture,
        layers=layers,
        embedding=embedding,
        vocabulary=vocabulary,
        context=context,
        types=types,
        tokenizer=tokenizer,
    )
    plan.keys(
        feed_forward_length=feed_forward,
        attention__head_count=heads,
        attention__layer_norm_epsilon=1e-12,
        attention__causal=False,
        pooling_type=1,
    )
    if architecture == "nomic-bert":
        plan.keys(rope__freq_base=1000.0)
    plan.metadata["tokenizer.ggml.token_type_count"] = 2
    plan.add("token_embd.weight", embedding, vocabulary)
    if architecture == "bert":
        plan.add("position_embd.weight", embedding, context, type="f32")
    plan.add("token_types.weight", embedding, 2, type="f32")
    for which in ("weight", "bias"):
        plan.add(f"token_embd_norm.{which}", embedding)
    for layer in range(layers):
        name = f"blk.{layer}."
        plan.attention(layer, heads, heads, embedding // heads, bias=architecture == "bert")
        plan.feed_forward(layer, feed_forward, gate=architecture == "nomic-bert")
        for which in ("weight", "bias"):
            plan.add(f"{name}attn_output_norm.{which}", embedding)
            plan.add(f"{name}layer_output_norm.{which}", embedding)
        if architecture == "bert":
            plan.add(f"{name}attn_output.bias", embedding)
            plan.add(f"{name}ffn_up.bias", feed_forward)
            plan.add(f"{name}ffn_down.bias", embedding)
    return plan.recipe()
