"""What of a model decides its memory: dimensions, layers and tensors, read from its files by the readers beside this.

One :class:`ModelShape` serves every engine. Readers fill it in (:mod:`~pytest_vram.sizing.gguf_shape` from GGUF,
:mod:`~pytest_vram.sizing.hf_shape` from a Hugging Face folder), one function per rule computes bytes from it.
"""

from __future__ import annotations

from typing import Literal

import msgspec

NoteKind = Literal["unknown", "assumed", "rule", "warning"]


class Note(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Something a reader of an estimate must know.

    :ivar kind: ``unknown``: could not be known, so the figure of ``bucket`` is a lower bound; ``assumed``: a default
        stood in for a missing value; ``rule``: what a figure is based on; ``warning``: a setting that will not do what
        it seems to.
    :ivar bucket: the bucket it is about, or ``""`` for all of them.
    """

    kind: NoteKind
    text: str
    bucket: str = ""


class Tensor(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor of a model file.

    :ivar dims: elements along each dimension, the fastest first (ggml's order: a matrix of ``out`` rows and ``in``
        columns is ``(in, out)``).
    :ivar type: the format's own name in lower case: ``q4_k``, ``f16``, ``bf16``, ``i8``, ``f8_e4m3``…; a number in
        words (``type 99``) where it is unknown.
    :ivar bytes: size in the file; 0 where the type is unknown (then ``known`` is false).
    :ivar part: which file of the model it is in, from 0. :ivar offset: where it begins, from the first tensor there.
    """

    name: str
    dims: tuple[int, ...]
    type: str
    bytes: int
    known: bool = True
    part: int = 0
    offset: int = 0

    @property
    def elements(self) -> int:
        """Product of the dimensions."""
        count = 1
        for size in self.dims:
            count *= size
        return count


class Layer(msgspec.Struct, frozen=True, kw_only=True):
    """One block of the model (``blk.N`` in GGUF).

    :ivar heads: query heads; 0 in a block without attention. :ivar kv_heads: heads of K and V.
    :ivar key_length: elements of one K head. :ivar value_length: elements of one V head.
    :ivar k_row: elements that one cell takes in the K cache of this block; 0 where it keeps none (recurrent blocks,
        blocks that share another's cache, encoders).
    :ivar v_row: the same for V; 0 under MLA, whose latent K row serves for both.
    :ivar window: sliding window in tokens (also chunked attention); 0 for full attention.
    :ivar state_r: elements of convolution state (token shift) per sequence. :ivar state_s: elements of recurrent state
        per sequence.
    :ivar indexer_row: elements of one cell in the K cache of a sparse-attention indexer. :ivar indexer_v_row: the same
        for the V that an indexer without MLA keeps. :ivar compress: tokens that one compressed cell stands for
        (DeepSeek-V4), 0 without a compressed cache. :ivar empty_cache: whether it has a cache with rows of no width
        (DeciLM's blocks without attention), which the engine pads like the others.
    :ivar feed_forward: hidden size of a dense feed-forward, 0 where there is none. :ivar experts: of this block.
    """

    heads: int = 0
    kv_heads: int = 0
    key_length: int = 0
    value_length: int = 0
    k_row: int = 0
    v_row: int = 0
    window: int = 0
    state_r: int = 0
    state_s: int = 0
    indexer_row: int = 0
    indexer_v_row: int = 0
    compress: int = 0
    empty_cache: bool = False
    feed_forward: int = 0
    experts: int = 0

    @property
    def recurrent(self) -> bool:
        """Whether it keeps a recurrent state."""
        return self.state_r > 0 or self.state_s > 0


class Mla(msgspec.Struct, frozen=True, kw_only=True):
    """Multi-head latent attention (DeepSeek and its relatives), in elements.

    :ivar query_rank: of the query's low-rank projection, 0 without one. :ivar kv_rank: of the latent.
    :ivar rope: part of a head with positions. :ivar nope: part without. :ivar value: of one decompressed V head.
    """

    query_rank: int
    kv_rank: int
    rope: int
    nope: int
    value: int


class Ssm(msgspec.Struct, frozen=True, kw_only=True):
    """Dimensions of state-space and linear-attention blocks, in elements.

    :ivar kind: ``mamba``, ``mamba2``, ``gated-delta``, ``rwkv``, ``shortconv``, ``kda``, ``lightning`` …
    """

    kind: str
    inner: int = 0
    state: int = 0
    conv: int = 0
    groups: int = 0
    dt_rank: int = 0


class ModelShape(msgspec.Struct, frozen=True, kw_only=True):
    """Everything about a model that its memory depends on.

    :ivar source: path of the file or folder. :ivar format: ``gguf`` or ``safetensors`` or ``config`` (no weights here).
    :ivar architecture: the format's own name, such as ``qwen3moe`` or ``Qwen3MoeForCausalLM``.
    :ivar known: whether this architecture's rules are known; where not, caches and compute are bounds.
    :ivar layers: blocks that run in the main model, in order. Extra prediction blocks (MTP) follow in ``extra_layers``
        in the file but are not run unless speculative decoding asks for them; ``extra_blocks`` describes those.
    :ivar embedding: width of the residual stream. :ivar vocabulary: entries. :ivar context: trained context in tokens.
    :ivar experts: of a mixture, 0 when dense. :ivar experts_used: per token, without shared ones.
    :ivar expert_feed_forward: hidden size of one routed expert. :ivar shared_experts: always active.
    :ivar leading_dense: blocks before the first mixture. :ivar tied: the output matrix is the embedding table.
    :ivar encoder: runs without a cache (embedding and reranking models). :ivar causal: masks the future.
    :ivar swa_pattern: for people, such as ``5 of 6``. :ivar quantization: for people, such as ``awq int4 g128``.
    :ivar projectors: files that the store that it comes from loads with it, and ``adapters``.
    :ivar files: every file of the model. :ivar file_bytes: their sizes, summed.
    :ivar meta: values of single metadata keys that a rule may need and that have no field (lower-case words).
    """

    source: str
    format: Literal["gguf", "safetensors", "config"]
    architecture: str
    name: str = ""
    known: bool = True
    layers: tuple[Layer, ...] = ()
    extra_layers: int = 0
    extra_blocks: tuple[Layer, ...] = ()
    embedding: int = 0
    vocabulary: int = 0
    context: int = 0
    experts: int = 0
    experts_used: int = 0
    expert_feed_forward: int = 0
    shared_experts: int = 0
    leading_dense: int = 0
    tied: bool = False
    encoder: bool = False
    causal: bool = True
    mla: Mla | None = None
    ssm: Ssm | None = None
    swa_pattern: str = ""
    quantization: str = ""
    tensors: tuple[Tensor, ...] = ()
    projectors: tuple[str, ...] = ()
    adapters: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    file_bytes: int = 0
    meta: dict[str, int | float | str | bool] = {}
    notes: tuple[Note, ...] = ()

    @property
    def heads(self) -> int:
        """Query heads of the widest block."""
        return max((layer.heads for layer in self.layers), default=0)

    @property
    def kv_heads(self) -> int:
        """K heads of the widest block."""
        return max((layer.kv_heads for layer in self.layers), default=0)

    @property
    def head_size(self) -> int:
        """Elements of the largest K head."""
        return max((layer.key_length for layer in self.layers), default=0)

    @property
    def window(self) -> int:
        """The sliding window of its window layers, 0 without any."""
        return max((layer.window for layer in self.layers), default=0)
