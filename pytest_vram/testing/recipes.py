"""Recipes of GGUF models of many architectures, of any dimensions, for the sparse writer.

Names and dimensions of the tensors are those that llama.cpp asks for (``src/models/*.cpp``, ``load_arch_tensors``), so
that its dry run, and where a model is small a real boot, accepts them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec

from pytest_vram.errors import BadInput
from pytest_vram.sizing import ggml
from pytest_vram.testing.models import CHATML, SPECIAL, byte_letters
from pytest_vram.testing.sparse import Planned, Value, write_sparse

_NORMAL, _CONTROL, _UNUSED = 1, 3, 5
SMALLEST_VOCABULARY = 256 + 1 + len(SPECIAL)

Tokenizer = Literal["bytes", "none"]


class Types(msgspec.Struct, frozen=True, kw_only=True):
    """Which type each kind of tensor is; vectors, routers and the small parts of state-space blocks are ``f32``.

    A row that is not a whole number of blocks falls back, as in real quantised files: to ``fallback``, then ``f16``.

    :ivar matrices: all that is not said below. :ivar embedding: the token table. :ivar output: the output matrix.
    :ivar experts: routed experts. Empty means as ``matrices``.
    """

    matrices: str = "f16"
    embedding: str = ""
    output: str = ""
    experts: str = ""
    fallback: str = "q8_0"

    def of(self, name: str, dims: tuple[int, ...]) -> str:
        """The type of a matrix of this name."""
        wanted = self.matrices
        if name == "token_embd.weight":
            wanted = self.embedding or wanted
        elif name == "output.weight":
            wanted = self.output or wanted
        elif name.endswith("_exps.weight"):
            wanted = self.experts or wanted
        for one in (wanted, self.fallback):
            if dims[0] % ggml.type_of(one).block == 0:
                return one
        return "f16"


F16 = Types()


class Recipe(msgspec.Struct, frozen=True, kw_only=True):
    """A model that can be written."""

    architecture: str
    metadata: dict[str, Value]
    tensors: tuple[Planned, ...]

    @property
    def bytes(self) -> int:
        """All tensors' data, summed."""
        return sum(tensor.bytes for tensor in self.tensors)

    def write(self, path: Path, *, split: int = 1, version: int = 3) -> Path:
        """Write it sparsely; the file to name to an engine (the first part of a split one)."""
        return write_sparse(path, self.metadata, self.tensors, split=split, version=version)[0]


class Plan:
    """Collects the metadata and tensors of one model, with the parts that architectures share."""

    def __init__(
        self,
        architecture: str,
        *,
        layers: int,
        embedding: int,
        vocabulary: int,
        context: int,
        types: Types,
        tokenizer: Tokenizer,
    ) -> None:
        self.architecture = architecture
        self.layers = layers
        self.embedding = embedding
        self.vocabulary = vocabulary
        self.types = types
        self.tensors: list[Planned] = []
        self.metadata: dict[str, Value] = {
            "general.architecture": architecture,
            "general.name": f"sparse {architecture}",
        }
        self.keys(block_count=layers, embedding_length=embedding, context_length=context, vocab_size=vocabulary)
        self._tokenizer(tokenizer)

    def keys(self, prefix: str = "", /, **values: Value) -> None:
        """Metadata under the architecture's name; a double underscore stands for a dot."""
        for key, value in values.items():
            self.metadata[f"{self.architecture}.{prefix}{key.replace('__', '.')}"] = value

    def attention_keys(
        self, heads: int | Sequence[int], kv_heads: int | Sequence[int], head_size: int, value_size: int = 0
    ) -> None:
        self.keys(
            "attention.",
            head_count=heads,
            head_count_kv=kv_heads,
            key_length=head_size,
            value_length=value_size or head_size,
            layer_norm_rms_epsilon=1e-5,
        )
        self.keys(rope__dimension_count=head_size, rope__freq_base=10000.0)

    def add(self, name: str, *dims: int, type: str = "") -> None:
        """A tensor; ``f32`` when it is a vector."""
        self.tensors.append(Planned(name, dims, type or ("f32" if len(dims) == 1 else self.types.of(name, dims))))

    def ends(self, *, tied: bool, output_norm: str = "output_norm") -> None:
        self.add("token_embd.weight", self.embedding, self.vocabulary)
        self.add(f"{output_norm}.weight", self.embedding)
        if not tied:
            self.add("output.weight", self.embedding, self.vocabulary)

    def norms(self, layer: int, *names: str) -> None:
        for name in names:
            self.add(f"blk.{layer}.{name}.weight", self.embedding)

    def attention(
        self,
        layer: int,
        heads: int,
        kv_heads: int,
        head_size: int,
        *,
        bias: bool = False,
        head_norms: bool = False,
        query_factor: int = 1,
    ) -> None:
        name = f"blk.{layer}."
        rows = {
            "attn_q": heads * head_size * query_factor,
            "attn_k": kv_heads * head_size,
            "attn_v": kv_heads * head_size,
        }
        for which, size in rows.items():
            self.add(f"{name}{which}.weight", self.embedding, size)
            if bias:
                self.add(f"{name}{which}.bias", size)
        self.add(f"{name}attn_output.weight", heads * head_size, self.embedding)
        if head_norms:
            self.add(f"{name}attn_q_norm.weight", head_size)
            self.add(f"{name}attn_k_norm.weight", head_size)

    def feed_forward(self, layer: int, size: int, *, gate: bool = True, suffix: str = "") -> None:
        name = f"blk.{layer}.ffn_"
        if gate:
            self.add(f"{name}gate{suffix}.weight", self.embedding, size)
        self.add(f"{name}up{suffix}.weight", self.embedding, size)
        self.add(f"{name}down{suffix}.weight", size, self.embedding)

    def experts(self, layer: int, count: int, size: int) -> None:
        name = f"blk.{layer}.ffn_"
        self.add(f"{name}gate_inp.weight", self.embedding, count, type="f32")
        self.add(f"{name}gate_exps.weight", self.embedding, size, count)
        self.add(f"{name}up_exps.weight", self.embedding, size, count)
        self.add(f"{name}down_exps.weight", size, self.embedding, count)

    def recipe(self) -> Recipe:
        return Recipe(architecture=self.architecture, metadata=self.metadata, tensors=tuple(self.tensors))

    def _tokenizer(self, kind: Tokenizer) -> None:
        if kind == "none":
            self.metadata["tokenizer.ggml.model"] = "none"
            return
        spare = self.vocabulary - SMALLEST_VOCABULARY
        if spare < 0:
            raise BadInput(f"a byte-level tokenizer needs a vocabulary of {SMALLEST_VOCABULARY} or more")
        letters = byte_letters()
        # The engine insists on at least one merge, so one pair that texts hardly contain is merged: two NUL bytes.
        tokens = [*letters, letters[0] * 2, *SPECIAL, *(f"<unused{index}>" for index in range(spare))]
        self.metadata |= {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "gpt-2",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": [_NORMAL] * 257 + [_CONTROL] * len(SPECIAL) + [_UNUSED] * spare,
            "tokenizer.ggml.merges": [f"{letters[0]} {letters[0]}"],
            "tokenizer.ggml.bos_token_id": 257,
            "tokenizer.ggml.eos_token_id": 259,
            "tokenizer.ggml.add_bos_token": False,
            "tokenizer.chat_template": CHATML,
        }


def each(value: int | Sequence[int], layers: int) -> list[int]:
    """One value for each layer."""
    values = [value] * layers if isinstance(value, int) else list(value)
    if len(values) != layers:
        raise BadInput(f"{len(values)} values for {layers} layers")
    return values


def llama(
    architecture: Literal["llama", "qwen2", "qwen3"] = "llama",
    *,
    layers: int = 2,
    embedding: int = 256,
    heads: int = 4,
    kv_heads: int = 2,
    head_size: int = 64,
    feed_forward: int = 512,
    vocabulary: int = SMALLEST_VOCABULARY,
    context: int = 4096,
    tied: bool = False,
    types: Types = F16,
    tokenizer: Tokenizer = "bytes",
) -> Recipe:
    """A dense transformer: ``llama``; ``qwen2`` (biases, heads · head size = width); ``qwen3`` (norms of heads)."""
    plan = Plan(
        architecture,
        layers=layers,
        embedding=embedding,
        vocabulary=vocabulary,
        context=context,
        types=types,
        tokenizer=tokenizer,
    )
    plan.attention_keys(heads, kv_heads, head_size)
    plan.keys(feed_forward_length=feed_forward)
    plan.ends(tied=tied)
    for layer in range(layers):
        plan.norms(layer, "attn_norm", "ffn_norm")
        plan.attention(
            layer, heads, kv_heads, head_size, bias=architecture == "qwen2", head_norms=architecture == "qwen3"
        )
        plan.feed_forward(layer, feed_forward)
    return plan.recipe()


def qwen3moe(
    *,
    layers: int = 4,
    embedding: int = 256,
    heads: int = 4,
    kv_heads: int = 2,
    head_size: int = 64,
    experts: int = 8,
    experts_used: int = 2,
    expert_feed_forward: int = 128,
    vocabulary: int = SMALLEST_VOCABULARY,
    context: int = 4096,
    tied: bool = False,
    types: Types = F16,
    tokenizer: Tokenizer = "bytes",
) -> Recipe:
    """A mixture of experts in every layer."""
    plan = Plan(
        "qwen3moe",
        layers=layers,
        embedding=embedding,
        vocabulary=vocabulary,
        context=context,
        types=types,
        tokenizer=tokenizer,
    )
    plan.attention_keys(heads, kv_heads, head_size)
    plan.keys(
        feed_forward_length=expert_feed_forward * experts_used,
        expert_count=experts,
        expert_used_count=experts_used,
        expert_feed_forward_length=expert_feed_forward,
    )
    plan.ends(tied=tied)
    for layer in range(layers):
        plan.norms(layer, "attn_norm", "ffn_norm")
        plan.attention(layer, heads, kv_heads, head_size, head_norms=True)
        plan.experts(layer, experts, expert_feed_forward)
    return plan.recipe()


def gemma(
    architecture: Literal["gemma2", "gemma3"] = "gemma3",
    *,
    layers: int = 6,
    embedding: int = 256,
    heads: int = 4,
    kv_heads: int = 2,
    head_size: int = 64,
    feed_forward: int = 512,
    window: int = 512,
    pattern: int | Sequence[bool] | None = None,
    vocabulary: int = SMALLEST_VOCABULARY,
    context: int = 8192,
    tied: bool = True,
    types: Types = F16,
    tokenizer: Tokenizer = "bytes",
) -> Recipe:
    """Sliding windows in most layers: one of 2 full in ``gemma2``, one of 6 in ``gemma3``, unless ``pattern`` is given.

    :param window: tokens; 0, in ``gemma3`` only, for none at all. :param pattern: a period, or which layers have one.
    """
    plan = Plan(
        architecture,
        layers=layers,
        embedding=embedding,
        vocabulary=vocabulary,
        context=context,
        types=types,
        tokenizer=tokenizer,
    )
    plan.attention_keys(heads, kv_heads, head_size)
    plan.keys(feed_forward_length=feed_forward)
    if window:
        plan.keys(attention__sliding_window=window)
    if pattern is not None:
        plan.keys(attention__sliding_window_pattern=pattern)
    plan.ends(tied=tied or architecture == "gemma2")
    for layer in range(layers):
        plan.norms(layer, "attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm")
        plan.attention(layer, heads, kv_heads, head_size, head_norms=architecture == "gemma3")
        plan.feed_forward(layer, feed_forward)
    return plan.recipe()


def deepseek2(
    *,
    layers: int = 3,
    embedding: int = 256,
    heads: int = 4,
    query_rank: int = 64,
    kv_rank: int = 64,
    rope: int = 32,
    nope: int = 64,
    value: int = 64,
    feed_forward: int = 512,
    leading_dense: int = 1,
    experts: int = 8,
    experts_used: int = 2,
    expert_feed_forward: int = 128,
    shared_experts: int = 1,
    router_bias: bool = False,
    vocabulary: int = SMALLEST_VOCABULARY,
    context: int = 4096,
    tied: bool = False,
    types: Types = F16,
    tokenizer: Tokenizer = "bytes",
) -> Recipe:
    """Latent attention (MLA), dense layers first, then mixtures with shared experts.

    :param query_rank: of the query's projection; 0, as in the lite models, needs 26 or 27 layers (llama.cpp knows
        them by that). :param router_bias: a bias for choosing experts, as from the third version on.
    """
    plan = Plan(
        "deepseek2",
        layers=layers,
        embedding=embedding,
        vocabulary=vocabulary,
        context=context,
        types=types,
        tokenizer=tokenizer,
    )
    plan.attention_keys(heads, 1, kv_rank + rope, kv_rank)
    plan.keys(
        "attention.",
        key_length_mla=nope + rope,
        value_length_mla=value,
        kv_lora_rank=kv_rank,
        **({"q_lora_rank": query_rank} if query_rank else {}),
    )
    plan.keys(
        feed_forward_length=feed_forward,
        leading_dense_block_count=leading_dense,
        expert_count=experts,
        expert_used_count=experts_used,
        expert_feed_forward_length=expert_feed_forward,
        expert_shared_count=shared_experts,
        expert_weights_scale=1.0,
        expert_gating_func=2 if router_bias else 1,
        rope__dimension_count=rope,
    )
    plan.ends(tied=tied)
    for layer in range(layers):
        name = f"blk.{layer}."
        plan.norms(layer, "attn_norm", "ffn_norm")
        if query_rank:
            plan.add(f"{name}attn_q_a_norm.weight", query_rank)
            plan.add(f"{name}attn_q_a.weight", embedding, query_rank)
            plan.add(f"{name}attn_q_b.weight", query_rank, heads * (nope + rope))
        else:
            plan.add(f"{name}attn_q.weight", embedding, heads * (nope + rope))
        plan.add(f"{name}attn_kv_a_norm.weight", kv_rank)
        plan.add(f"{name}attn_kv_a_mqa.weight", embedding, kv_rank + rope)
        plan.add(f"{name}attn_k_b.weight", nope, kv_rank, heads)
        plan.add(f"{name}attn_v_b.weight", kv_rank, value, heads)
        plan.add(f"{name}attn_output.weight", heads * value, embedding)
        if layer < leading_dense:
            plan.feed_forward(layer, feed_forward)
        else:
            plan.experts(layer, experts, expert_feed_forward)
            if router_bias:
                plan.add(f"{name}exp_probs_b.bias", experts)
            plan.feed_forward(layer, expert_feed_forward * shared_experts, suffix="_shexp")
    return plan.recipe()


def mamba(
    *,
    layers: int = 2,
    embedding: int = 256,
    state: int = 16,
    conv: int = 4,
    dt_rank: int = 16,
    vocabulary: int = SMALLEST_VOCABULARY,
    context: int = 4096,
    tied: bool = True,
    types: Types = F16,
    tokenizer: Tokenizer = "bytes",
) -> Recipe:
    """State-space blocks only, of twice the width."""
    plan = Plan(
        "mamba",
        layers=layers,
        embedding=embedding,
        vocabulary=vocabulary,
        context=context,
        types=types,
        tokenizer=tokenizer,
    )
    plan.keys(feed_forward_length=0, attention__head_count=0, attention__layer_norm_rms_epsilon=1e-5)
    ssm_keys(plan, inner=2 * embedding, state=state, conv=conv, dt_rank=dt_rank)
    plan.ends(tied=tied)
    for layer in range(layers):
        plan.norms(layer, "attn_norm")
        mamba_block(plan, layer, state=state, conv=conv, dt_rank=dt_rank)
    return plan.recipe()


def ssm_keys(plan: Plan, *, inner: int, state: int, conv: int, dt_rank: int, groups: int = 0) -> None:
    """Metadata of state-space blocks."""
    plan.keys("ssm.", conv_kernel=conv, inner_size=inner, state_size=state, time_step_rank=dt_rank)
    if groups:
        plan.keys("ssm.", group_count=groups)


def mamba_block(plan: Plan, layer: int, *, state: int, conv: int, dt_rank: int) -> None:
    """The tensors of one Mamba-1 block, but for its norm."""
    inner, name = 2 * plan.embedding, f"blk.{layer}.ssm_"
    plan.add(f"{name}in.weight", plan.embedding, 2 * inner)
    plan.add(f"{name}conv1d.weight", conv, inner, type="f32")
    plan.add(f"{name}conv1d.bias", inner)
    plan.add(f"{name}x.weight", inner, dt_rank + 2 * state)
    plan.add(f"{name}dt.weight", dt_rank, inner)
    plan.add(f"{name}dt.bias", inner)
    plan.add(f"{name}a", state, inner, type="f32")
    plan.add(f"{name}d", inner)
    plan.add(f"{name}out.weight", inner, plan.embedding)


def mamba2_block(plan: Plan, layer: int, *, inner: int, state: int, conv: int, heads: int, groups: int) -> None:
    """The tensors of one Mamba-2 block, but for its norm."""
    name = f"blk.{layer}.ssm_"
    wide = inner + 2 * groups * state
    plan.add(f"{name}in.weight", plan.embedding, inner + wide + heads)
    plan.add(f"{name}conv1d.weight", conv, wide, type="f32")
    plan.add(f"{name}conv1d.bias", wide)
    plan.add(f"{name}dt.bias", heads)
    plan.add(f"{name}a", 1, heads, type="f32")
    plan.add(f"{name}d", 1, heads, type="f32")
    plan.add(f"{name}norm.weight", inner // groups, groups, type="f32")
    plan.add(f"{name}out.weight", inner, plan.embedding)
