"""Recipes of models with recurrent layers, alone or among attention."""

from __future__ import annotations

from collections.abc import Sequence

from pytest_vram.testing.recipes import (
    F16,
    SMALLEST_VOCABULARY,
    Plan,
    Recipe,
    Tokenizer,
    Types,
    each,
    mamba2_block,
    mamba_block,
    ssm_keys,
)


def mamba2(
    *,
    layers: int = 2,
    embedding: int = 256,
    state: int = 32,
    conv: int = 4,
    heads: int = 8,
    groups: int = 1,
    vocabulary: int = SMALLEST_VOCABULARY,
    context: int = 4096,
    tied: bool = True,
    types: Types = F16,
    tokenizer: Tokenizer = "bytes",
) -> Recipe:
    """State-space blocks of the second kind, of twice the width."""
    plan = Plan(
        "mamba2",
        layers=layers,
        embedding=embedding,
        vocabulary=vocabulary,
        context=context,
        types=types,
        tokenizer=tokenizer,
    )
    inner = 2 * embedding
    plan.keys(feed_forward_length=0, attention__head_count=0, attention__layer_norm_rms_epsilon=1e-5)
    ssm_keys(plan, inner=inner, state=state, conv=conv, dt_rank=heads, groups=groups)
    plan.ends(tied=tied)
    for layer in range(layers):
        plan.norms(layer, "attn_norm")
        mamba2_block(plan, layer, inner=inner, state=state, conv=conv, heads=heads, groups=groups)
    return plan.recipe()


def jamba(
    *,
    layers: int = 4,
    embedding: int = 256,
    heads: int = 4,
    kv_heads: Sequence[int] = (0, 0, 2, 0),
    feed_forward: int = 512,
    state: int = 16,
    conv: int = 4,
    dt_rank: int = 16,
    experts: int = 4,
    experts_used: int = 2,
    expert_period: int = 2,
    vocabulary: int = SMALLEST_VOCABULARY,
    context: int = 4096,
    tied: bool = False,
    types: Types = F16,
    tokenizer: Tokenizer = "bytes",
) -> Recipe:
    """Mamba blocks, but attention where there are K heads; a mixture in one layer of ``expert_period``."""
    plan = Plan(
        "jamba",
        layers=layers,
        embedding=embedding,
        vocabulary=vocabulary,
        context=context,
        types=types,
        tokenizer=tokenizer,
    )
    plan.attention_keys(heads, each(kv_heads, layers), embedding // heads)
    plan.keys(feed_forward_length=feed_forward, expert_count=experts, expert_used_count=experts_used)
    ssm_keys(plan, inner=2 * embedding, state=state, conv=conv, dt_rank=dt_rank)
    plan.ends(tied=tied)
    for layer in range(layers):
        plan.norms(layer, "attn_norm", "ffn_norm")
        if kv_heads[layer]:
            plan.attention(layer, heads, kv_heads[layer], embedding // heads)
        else:
            mamba_block(plan, layer, state=state, conv=conv, dt_rank=dt_rank)
            for which, size in (("dt", dt_rank), ("b", state), ("c", state)):
                plan.add(f"blk.{layer}.ssm_{which}_norm.weight", size)
        if experts and layer % expert_period == expert_period - 1:
            plan.experts(layer, experts, feed_forward)
        else:
            plan.feed_forward(layer, feed_forward)
    return plan.recipe()


def granite_hybrid(
    *,
    layers: int = 4,
    embedding: int = 256,
    heads: int = 4,
    kv_heads: Sequence[int] = (0, 2, 0, 2),
    feed_forward: int = 512,
    state: int = 32,
    conv: int = 4,
    ssm_heads: int = 8,
    groups: int = 1,
    experts: int = 0,
    experts_used: int = 0,
    shared_feed_forward: int = 0,
    vocabulary: int = SMALLEST_VOCABULARY,
    context: int = 4096,
    tied: bool = True,
    types: Types = F16,
    tokenizer: Tokenizer = "bytes",
) -> Recipe:
    """Mamba-2 blocks, but attention where there are K heads; a mixture with ``experts``."""
    plan = Plan(
        "granitehybrid",
        layers=layers,
        embedding=embedding,
        vocabulary=vocabulary,
        context=context,
        types=types,
        tokenizer=tokenizer,
    )
    inner, size = 2 * embedding, embedding // heads
    plan.attention_keys(heads, each(kv_heads, layers), size)
    plan.keys(feed_forward_length=feed_forward)
    if experts:
        plan.keys(
            expert_count=experts,
            expert_used_count=experts_used,
            expert_shared_feed_forward_length=shared_feed_forward,
        )
    ssm_keys(plan, inner=inner, state=state, conv=conv, dt_rank=ssm_heads, groups=groups)
    plan.ends(tied=tied)
    for layer in range(layers):
        plan.norms(layer, "attn_norm", "ffn_norm")
        if kv_heads[layer]:
            plan.attention(layer, heads, kv_heads[layer], size)
        else:
            mamba2_block(plan, layer, inner=inner, state=state, conv=conv, heads=ssm_heads, groups=groups)
        if experts:
            plan.experts(layer, experts, feed_forward)
            if shared_feed_forward:
                plan.feed_forward(layer, shared_feed_forward, suffix="_shexp")
        else:
            plan.feed_forward(layer, feed_forward)
    return plan.recipe()


def nemotron_h(
    *,
    layers: int = 6,
    embedding: int = 256,
    heads: int = 4,
    kv_heads: Sequence[int] = (0, 0, 2, 0, 0, 1),
    head_size: int = 64,
    feed_forward: Sequence[int] = (0, 512, 0, 0, 256, 0),
    inner: int = 512,
    state: int = 32,
    conv: int = 4,
    ssm_heads: int = 8,
    groups: int = 2,
    vocabulary: int = SMALLEST_VOCABULARY,
    context: int = 4096,
    tied: bool = False,
    types: Types = F16,
    tokenizer: Tokenizer = "bytes",
) -> Recipe:
    """Each layer is one thing: attention (K heads), a feed-forward (a width), or a Mamba-2 block (neither)."""
    plan = Plan(
        "nemotron_h",
        layers=layers,
        embedding=embedding,
        vocabulary=vocabulary,
        context=context,
        types=types,
        tokenizer=tokenizer,
    )
    plan.attention_keys(heads, each(kv_heads, layers), head_size)
    plan.keys(feed_forward_length=each(feed_forward, layers), attention__layer_norm_epsilon=1e-5)
    ssm_keys(plan, inner=inner, state=state, conv=conv, dt_rank=ssm_heads, groups=groups)
    plan.ends(tied=tied)
    for layer in range(layers):
        plan.norms(layer, "attn_norm")
        if kv_heads[layer]:
            plan.attention(layer, heads, kv_heads[layer], head_size)
        elif feed_forward[layer]:
            plan.feed_forward(layer, feed_forward[layer], gate=False)
        else:
            mamba2_block(plan, layer, inner=inner, state=state, conv=conv, heads=ssm_heads, groups=groups)
    return plan.recipe()


def qwen3next(
    *,
    layers: int = 4,
    embedding: int = 256,
    heads: int = 4,
    kv_heads: int = 2,
    head_size: int = 64,
    interval: int = 4,
    state: int = 32,
    conv: int = 4,
    key_heads: int = 2,
    value_heads: int = 4,
    experts: int = 8,
    experts_used: int = 2,
    expert_feed_forward: int = 128,
    shared_feed_forward: int = 128,
    vocabulary: int = SMALLEST_VOCABULARY,
    context: int = 4096,
    tied: bool = False,
    types: Types = F16,
    tokenizer: Tokenizer = "bytes",
) -> Recipe:
    """Gated delta nets, with full attention in one layer of ``interval``; a mixture in every layer."""
    plan = Plan(
        "qwen3next",
        layers=layers,
        embedding=embedding,
        vocabulary=vocabulary,
        context=context,
        types=types,
        tokenizer=tokenizer,
    )
    keys, values = state * key_heads, state * value_heads
    plan.attention_keys(heads, kv_heads, head_size)
    plan.keys(
        feed_forward_length=expert_feed_forward * experts_used,
        expert_count=experts,
        expert_used_count=experts_used,
        expert_feed_forward_length=expert_feed_forward,
        expert_shared_feed_forward_length=shared_feed_forward,
        full_attention_interval=interval,
    )
    ssm_keys(plan, inner=values, state=state, conv=conv, dt_rank=value_heads, groups=key_heads)
    plan.ends(tied=tied)
    for layer in range(layers):
        name = f"blk.{layer}."
        plan.norms(layer, "attn_norm", "post_attention_norm")
        if (layer + 1) % interval == 0:
            plan.attention(layer, heads, kv_heads, head_size, head_norms=True, query_factor=2)
        else:
            plan.add(f"{name}attn_qkv.weight", embedding, 2 * keys + values)
            plan.add(f"{name}attn_gate.weight", embedding, values)
            plan.add(f"{name}ssm_conv1d.weight", conv, 2 * keys + values, type="f32")
            plan.add(f"{name}ssm_dt.bias", value_heads)
            plan.add(f"{name}ssm_a", value_heads)
            plan.add(f"{name}ssm_ba.weight", embedding, 2 * value_heads)
            plan.add(f"{name}ssm_norm.weight", state)
            plan.add(f"{name}ssm_out.weight", values, embedding)
        plan.experts(layer, experts, expert_feed_forward)
        plan.add(f"{name}ffn_gate_inp_shexp.weight", embedding)
        plan.feed_forward(layer, shared_feed_forward, suffix="_shexp")
    return plan.recipe()


def lfm2(
    *,
    layers: int = 4,
    embedding: int = 256,
    heads: int = 4,
    kv_heads: Sequence[int] = (0, 0, 2, 0),
    feed_forward: int = 512,
    cache: int = 3,
    vocabulary: int = SMALLEST_VOCABULARY,
    context: int = 4096,
    types: Types = F16,
    tokenizer: Tokenizer = "bytes",
) -> Recipe:
    """Short convolutions, but attention where there are K heads.

    :param cache: length of the convolution.
    """
    plan = Plan(
        "lfm2",
        layers=layers,
        embedding=embedding,
        vocabulary=vocabulary,
        context=context,
        types=types,
        tokenizer=tokenizer,
    )
    size = embedding // heads
    plan.attention_keys(heads, each(kv_heads, layers), size)
    plan.keys(feed_forward_length=feed_forward, shortconv__l_cache=cache)
    plan.ends(tied=True, output_norm="token_embd_norm")
    for layer in range(layers):
        name = f"blk.{layer}.shortconv."
        plan.norms(layer, "attn_norm", "ffn_norm")
        if kv_heads[layer]:
            plan.attention(layer, heads, kv_heads[layer], size, head_norms=True)
        else:
            plan.add(f"{name}conv.weight", cache, embedding, type="f32")
            plan.add(f"{name}in_proj.weight", embedding, 3 * embedding)
            plan.add(f"{name}out_proj.weight", embedding, embedding)
        plan.feed_forward(layer, feed_forward)
    return plan.recipe()


def rwkv7(
    *,
    layers: int = 2,
    embedding: int = 256,
    head_size: int = 64,
    feed_forward: int = 1024,
    decay_rank: int = 32,
    rate_rank: int = 32,
    value_rank: int = 32,
    gate_rank: int = 64,
    vocabulary: int = SMALLEST_VOCABULARY,
    context: int = 4096,
    types: Types = F16,
    tokenizer: Tokenizer = "bytes",
) -> Recipe:
    """Linear attention with a matrix of state for each head, and two shifted tokens."""
    plan = Plan(
        "rwkv7",
        layers=layers,
        embedding=embedding,
        vocabulary=vocabulary,
        context=context,
        types=types,
        tokenizer=tokenizer,
    )
    plan.keys(feed_forward_length=feed_forward, wkv__head_size=head_size)
    plan.keys(
        "attention.",
        head_count=0,
        layer_norm_epsilon=1e-5,
        decay_lora_rank=decay_rank,
        iclr_lora_rank=rate_rank,
        value_residual_mix_lora_rank=value_rank,
        gate_lora_rank=gate_rank,
    )
    plan.ends(tied=False)
    plan.add("output_norm.bias", embedding)
    for which in ("weight", "bias"):
        plan.add(f"token_embd_norm.{which}", embedding)
    for layer in range(layers):
        _rwkv7_block(plan, layer, feed_forward, (decay_rank, rate_rank, value_rank if layer else rate_rank, gate_rank))
    return plan.recipe()


def _rwkv7_block(plan: Plan, layer: int, feed_forward: int, ranks: tuple[int, int, int, int]) -> None:
    width, name = plan.embedding, f"blk.{layer}."
    for which in ("attn_norm", "attn_norm_2", "time_mix_ln"):
        plan.add(f"{name}{which}.weight", width)
        plan.add(f"{name}{which}.bias", width)
    for which, rank in zip("wavg", ranks, strict=True):
        if which != "g":
            plan.add(f"{name}time_mix_{which}0.weight", width)
        plan.add(f"{name}time_mix_{which}1.weight", width, rank)
        plan.add(f"{name}time_mix_{which}2.weight", rank, width)
    plan.add(f"{name}time_mix_lerp_fused.weight", width, 1, 1, 6, type="f32")
    for which in ("k_k", "k_a", "r_k"):
        plan.add(f"{name}time_mix_{which}.weight", width)
    for which in ("key", "value", "receptance", "output"):
        plan.add(f"{name}time_mix_{which}.weight", width, width)
    plan.add(f"{name}channel_mix_lerp_k.weight", width, 1, 1, type="f32")
    plan.add(f"{name}channel_mix_key.weight", width, feed_forward)
    plan.add(f"{name}channel_mix_value.weight", feed_forward, width)
