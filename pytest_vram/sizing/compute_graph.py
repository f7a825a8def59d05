"""The skeleton of the graph that llama.cpp reserves memory for: steps, sizes and order, no arithmetic.

Follows ``llama-graph.cpp`` and ``src/models`` (October 2026). What a block contains is read off its tensors: biases,
norms of Q and K, gates, shared experts. The blocks without plain attention are in
:mod:`~pytest_vram.sizing.compute_mixers`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from pytest_vram.sizing import ggml, kv
from pytest_vram.sizing.compute_replay import Dims, Graph, Node
from pytest_vram.sizing.options import Cells, Era, LlamaOptions, Placement
from pytest_vram.sizing.placement import overrides
from pytest_vram.sizing.shape import Layer, ModelShape, Tensor

F16, F32, I32, I64 = "f16", "f32", "i32", "i64"
_WIDTH = {F16: 2, "bf16": 2, F32: 4, I32: 4, I64: 8}
LateRows = Literal["before norm", "after norm"]
MASK_ROWS = 64  # GGML_KQ_MASK_PAD, until #17910


def row_bytes(type: str, elements: int) -> int:
    """Bytes of ``elements`` of one type; types that are not known count as f16."""
    known = ggml.BY_NAME.get(type)
    if known is None:
        return elements * 2
    return elements * known.bytes // known.block


def quantized(type: str) -> bool:
    """Whether rows of this type are blocks."""
    known = ggml.BY_NAME.get(type)
    return known is not None and known.block > 1


def _dims(sizes: Sequence[int]) -> Dims:
    filled = [*sizes, 1, 1, 1, 1]
    return filled[0], filled[1], filled[2], filled[3]


class Skeleton:
    """Builds the graph of one ubatch.

    :ivar tokens: of the ubatch, a multiple of the sequences. :ivar outputs: rows of logits.
    :ivar flash: flash attention. :ivar scattered: V is kept transposed, which is settled when the cache is made, before
        ``auto`` flash attention is found to be on or off. :ivar flat: Mamba-2's matrices work on rows of all sequences.
    :ivar graph: the steps so far.
    """

    def __init__(
        self,
        shape: ModelShape,
        options: LlamaOptions,
        placement: Placement,
        era: Era,
        cells: Cells,
        *,
        tokens: int,
        outputs: int,
        flash: bool,
        labels: Sequence[str],
        pinned: bool = True,
        flat: bool = True,
    ) -> None:
        self.shape, self.options, self.placement, self.era, self.cells = shape, options, placement, era, cells
        self.tokens, self.outputs, self.flash = tokens, outputs, flash
        self.scattered = not kv.uses_flash_attention(shape, options)
        self.graph = Graph(sinks_decide=not era.sinks_ignored)
        self.result: Node | None = None  # of the output norm
        self.fused: list[tuple[int, Node]] = []  # flash attention and the block that it is of
        self.host = len(labels)
        self._places = {label: index for index, label in enumerate(labels)}
        self.tensors: dict[str, tuple[int, Tensor]] = {
            tensor.name: (index, tensor) for index, tensor in enumerate(shape.tensors)
        }
        self._weights: dict[str, Node] = {}
        self._inputs: dict[str, Node] = {}
        self._state_ids: tuple[Node, Node] | None = None
        whole = placement.output != "host" and "host" not in placement.layers
        self.pinned, self.flat = pinned, flat
        self.pins = pinned and (whole or tokens < 32)  # llama-context.cpp, graph_get_cb

    # Tensors that exist beforehand

    def place(self, label: str) -> int:
        """Position of a device in the scheduler's list, the host last."""
        return self._places.get(label, self.host)

    def has(self, layer: int, name: str) -> bool:
        """Whether the file has this tensor."""
        return f"blk.{layer}.{name}" in self.tensors

    def weight(self, layer: int, name: str, *sizes: int) -> Node | None:
        """A tensor of a block. Without a file, the one that ``sizes`` describe (as f16), ``None`` without sizes."""
        full = f"blk.{layer}.{name}"
        node = self._weights.get(full)
        if node is None and full in self.tensors:
            index, tensor = self.tensors[full]
            label = self.placement.tensors[index] if self.placement.tensors else self.placement.layers[layer]
            node = self._weight(tensor.type, tensor.dims, tensor.bytes, label, full)
        elif node is None and sizes and not self.tensors:
            node = self._imagined(layer, name, sizes)
        return node

    def _imagined(self, layer: int, name: str, sizes: Sequence[int]) -> Node:
        """A tensor that is only known by its sizes: f16, experts on the host where their block's are."""
        moved = "_exps." in name and layer in self.placement.experts_on_host
        label = "host" if moved else self.placement.layers[layer]
        return self._weight(F16, sizes, 2 * math.prod(sizes), label, f"blk.{layer}.{name}")

    def _weight(self, type: str, dims: Sequence[int], size: int, label: str, name: str) -> Node:
        node = Node("none", type, _dims(dims), size, place=self.place(label), weight=True, name=name)
        self._weights[name] = node
        return node

    def need(self, layer: int, name: str, *sizes: int) -> Node:
        """Like :meth:`weight`, made up from ``sizes`` where the file names it otherwise."""
        node = self.weight(layer, name, *sizes)
        return self._imagined(layer, name, sizes) if node is None else node

    def top(self, name: str, label: str, *sizes: int) -> Node:
        """A tensor outside of the blocks, on the device ``label``."""
        key = f"{name}@{label}"
        node = self._weights.get(key)
        if node is None:
            if name in self.tensors:
                tensor = self.tensors[name][1]
                node = self._weight(tensor.type, tensor.dims, tensor.bytes, label, key)
            else:
                node = self._weight(F16, sizes, 2 * math.prod(sizes), label, key)
        return node

    def named(self, name: str) -> bool:
        """Whether the file has this tensor outside of the blocks."""
        return name in self.tensors

    def held(self, name: str, type: str, dims: Sequence[int], size: int, label: str) -> Node:
        """A cache or state."""
        key = f"{name} held"
        node = self._weights.get(key)
        if node is None:
            node = Node("none", type, _dims(dims), size, place=self.place(label), name=name)
            self._weights[key] = node
        return node

    def input(self, name: str, type: str, *sizes: int) -> Node:
        """Something that is written anew for each batch."""
        node = self._inputs.get(name)
        if node is None:
            node = Node("none", type, _dims(sizes), _WIDTH[type] * math.prod(sizes), input=True, name=name)
            self._inputs[name] = node
        return node

    def state_ids(self) -> tuple[Node, Node]:
        """Which states belong to this batch and which are only kept: two views that all blocks share
        (``build_rs_inp_impl``), so that what has no state copies them once."""
        if self._state_ids is None:
            picked = self.input("states", I32, self.cells.slots)
            self._state_ids = self.view(picked, self.cells.slots), self.view(picked, 0)
        return self._state_ids

    # Steps

    def step(self, op: str, sizes: Sequence[int], *sources: Node, type: str = F32) -> Node:
        """A step whose result has these sizes."""
        return Node(op, type, _dims(sizes), _WIDTH[type] * math.prod(sizes), sources)

    def same(self, op: str, node: Node, *others: Node) -> Node:
        """A step whose result is like its first source."""
        size = _WIDTH.get(node.type, 4) * math.prod(node.dims)
        return Node(op, node.type, node.dims, size, (node, *others))

    def view(self, node: Node, *sizes: int, packed: bool = True) -> Node:
        """Another look at a tensor; ``packed`` where its rows still follow each other without gaps.

        Its size is what a copy of it takes, which keeps the gaps: from its first to its last element.
        """
        shown, whole, rows = math.prod(sizes), math.prod(node.dims) or 1, math.prod(node.dims[1:]) or 1
        if packed and node.packed:
            size = node.size * shown // whole
        else:
            size = node.size - node.size * (node.dims[0] * rows - shown) // rows // whole
        return Node(
            "view", node.type, _dims(sizes), size, (node,), root=node.root or node, packed=packed and node.packed
        )

    def matmul(self, weight: Node, node: Node) -> Node:
        """``ggml_mul_mat``: f32, rows of the weight by columns of the other."""
        return self.step("mul_mat", (weight.dims[1], node.dims[1], node.dims[2], node.dims[3]), weight, node)

    def linear(self, layer: int, name: str, node: Node, *sizes: int) -> Node:
        """A projection, its scale and its bias."""
        result = self.matmul(self.need(layer, f"{name}.weight", *sizes), node)
        scale = self.weight(layer, f"{name}.scale")
        if scale is not None:
            result = self.same("mul", result, scale)
        bias = self.weight(layer, f"{name}.bias")
        return result if bias is None else self.same("add", result, bias)

    def norm(self, node: Node, weight: Node | None, bias: Node | None = None, *, layer: int = -1) -> Node:
        """``build_norm``: kept on its block's device by name when everything is on GPUs."""
        plain = bias is not None
        result = self.same("norm" if plain else "rms_norm", node)
        if weight is not None:
            if layer >= 0 and self.pins:
                result.pin = self.place(self.placement.layers[layer])
            result = self.same("mul", result, weight)
        return result if bias is None else self.same("add", result, bias)

    def block_norm(self, layer: int, name: str, node: Node) -> Node:
        """The norm of a block, nothing where it has none."""
        weight = self.weight(layer, f"{name}.weight", node.dims[0])
        if weight is None:
            return node
        return self.norm(node, weight, self.weight(layer, f"{name}.bias"), layer=layer)

    def rope(self, node: Node) -> Node:
        """Positions."""
        return self.same("rope", node, self.input("positions", I32, self.tokens))

    def rows(self, node: Node) -> Node:
        """Only the rows that are asked for (``inp_out_ids``)."""
        wanted = self.input("wanted", I32, self.outputs)
        return self.step("get_rows", (node.dims[0], self.outputs), node, wanted)

    def expand(self, *nodes: Node) -> None:
        """List these steps now."""
        for node in nodes:
            self.graph.expand(node)

    # The whole

    def embed(self) -> Node:
        """``build_inp_embd``: a lookup on the host, beside room for embeddings that come from outside."""
        width = self.shape.embedding
        table = self.top("token_embd.weight", self._label("token_embd.weight", "host"), width, self.shape.vocabulary)
        looked_up = self.step("get_rows", (width, self.tokens), table, self.input("tokens", I32, self.tokens))
        self.expand(looked_up, self.input("embeddings", F32, width, self.tokens))
        if not self.shape.encoder and self.shape.architecture not in ("rwkv6", "rwkv7"):
            return looked_up
        node = looked_up
        if self.named("token_types.weight"):
            kinds = self.top("token_types.weight", "host", width, 1)
            node = self.same("add", node, self.view(kinds, width))
        if self.named("position_embd.weight"):
            places = self.top("position_embd.weight", "host", width, self.shape.context)
            node = self.same(
                "add",
                self.step("get_rows", (width, self.tokens), places, self.input("positions", I32, self.tokens)),
                node,
            )
        if self.named("token_embd_norm.weight"):
            label = self._label("token_embd_norm.weight", "host")
            bias = self.top("token_embd_norm.bias", label, width)
            node = self.norm(node, self.top("token_embd_norm.weight", label, width), bias)
        return node

    def _label(self, name: str, otherwise: str) -> str:
        """The device of a tensor outside of the blocks, overrides applied."""
        found = self.tensors.get(name)
        return self.placement.tensors[found[0]] if found and self.placement.tensors else otherwise

    def layer_inputs(self, node: Node) -> Node | None:
        """Embeddings of their own for each block (``gemma4.cpp``, ``project_per_layer_inputs``)."""
        if not self.named("per_layer_token_embd.weight"):
            return None
        count = len(self.shape.layers)
        table = self.top("per_layer_token_embd.weight", self._label("per_layer_token_embd.weight", "host"), 1, 1)
        each = table.dims[0] // count
        tokens = self.input("tokens of blocks", I32, self.tokens)
        selected = self.step("get_rows", (table.dims[0], self.tokens), table, tokens)
        selected = self.same("scale", self.view(selected, each, count, self.tokens))
        self.expand(selected)
        label = self._label("per_layer_model_proj.weight", self.placement.layers[0])
        projected = self.matmul(self.top("per_layer_model_proj.weight", label, 1, 1), node)
        projected = self.view(self.same("scale", projected), each, count, self.tokens)
        label = self._label("per_layer_proj_norm.weight", self.placement.layers[0])
        projected = self.norm(projected, self.top("per_layer_proj_norm.weight", label, each))
        both = self.same("scale", self.same("add", projected, selected))
        return self.step("cont", (each, self.tokens, count), self.view(both, each, self.tokens, count, packed=False))

    def with_layer_input(self, index: int, node: Node, inputs: Node, *, last: bool) -> Node:
        """What a block adds from its own embeddings."""
        each, rows = inputs.dims[0], node.dims[1]
        inner = self.same("unary", self.linear(index, "inp_gate", node, node.dims[0], each))
        own = self.view(inputs, each, self.tokens)
        inner = self.same("mul", inner, self.rows(own) if last else own)
        del rows
        out = self.block_norm(index, "post_norm", self.linear(index, "proj", inner, each, node.dims[0]))
        return self.same("add", node, out)

    def cells_of(self, layer: Layer) -> int:
        """Cells of one stream that a block looks at when the cache is full."""
        if layer.window:
            return self.cells.window(layer.window, full=self.options.swa_full)
        return self.cells.per_sequence

    def mask(self, window: int, cached: int) -> Node:
        """``build_attn_inp_kq_mask``: f16 with flash attention since #23764, before as f32 with an f16 copy."""
        name = "window mask" if window else "mask"
        streams = self.cells.streams if self.cells.context and not self.shape.encoder else 1
        rows = self.tokens // streams
        if self.era.mask_padded:
            rows = -(-rows // MASK_ROWS) * MASK_ROWS
        if not self.flash or self.era.mask_f16:
            return self.input(name, F16 if self.flash else F32, cached, rows, 1, streams)
        cast = self._inputs.get(f"{name} as f16")
        if cast is None:
            wide = self.input(name, F32, cached, rows, 1, streams)
            cast = self.step("cpy", wide.dims, wide, type=F16)
            self._inputs[f"{name} as f16"] = cast
        return cast

    def rotation(self, which: str, type: str, head: int, *, window: bool = False) -> Node | None:
        """The Hadamard matrix that spreads outliers before a cache is quantised (``attn_rot_k``, ``attn_rot_v``)."""
        if not quantized(type) or head <= 0 or head % 64 or self.shape.mla is not None:
            return None
        size = 64
        while which == "K" and head % (size * 2) == 0:
            size *= 2
        return self.input(f"{'window ' if window else ''}rotation of {which}", F32, size, size)

    def rotated(self, node: Node, matrix: Node | None) -> Node:
        """``llama_mul_mat_hadamard``."""
        if matrix is None:
            return node
        count = math.prod(node.dims)
        sizes = matrix.dims[0], count // matrix.dims[0]
        flat = self.view(node, *sizes) if node.packed else self.step("cont", sizes, node)
        return self.view(self.matmul(matrix, flat), *node.dims)

    def cache(self, index: int, which: str, row: int, cached: int) -> Node:
        """K or V of one block."""
        kind = self.options.cache_type_k if which == "K" else self.options.cache_type_v
        label = self.placement.layers[index] if self.options.kv_offload else "host"
        streams = self.cells.streams
        return self.held(
            f"{which} {index}",
            kind,
            (row, cached, streams),
            row_bytes(kind, row) * cached * streams,
            label,
        )

    def store(self, cache: Node, value: Node, *, scattered: bool = False, window: bool = False) -> Node:
        """``cpy_k`` and ``cpy_v``; without flash attention V is stored element by element."""
        where = "window " if window else ""
        if scattered:
            widest = max(layer.v_row for layer in self.shape.layers)
            if value.packed:
                flat = self.view(self.view(value, cache.dims[0], self.tokens), 1, math.prod(value.dims))
            else:
                copied = self.step("cont", (value.dims[0] * value.dims[1], self.tokens), value)
                flat = self.view(copied, 1, math.prod(value.dims))
            target = self.view(cache, 1, math.prod(cache.dims))
            indices = self.input(f"{where}V cells", I64, self.tokens * widest)
        else:
            flat = self.view(value, value.dims[0] * value.dims[1], self.tokens, packed=value.packed)
            target = cache if self.cells.streams == 1 else self.view(cache, cache.dims[0], math.prod(cache.dims[1:]))
            which = "V" if cache.name.startswith("V") else "K"
            indices = self.input(f"{where}{which} cells", I64, self.tokens)
        return Node("set_rows", cache.type, target.dims, cache.size, (flat, indices, target), root=cache)

    def attend(
        self,
        index: int,
        q: Node,
        k: Node,
        v: Node,
        mask: Node,
        *,
        decompress: Node | None = None,
        sinks: Node | None = None,
        softcap: bool = False,
    ) -> Node:
        """``build_attn_mha``. ``k`` and ``v`` are (head, heads, cells, streams); V may be shown transposed."""
        head, heads = q.dims[0], q.dims[1]
        cached, kv_heads, streams = k.dims[2], k.dims[1], k.dims[3]
        each = self.tokens // streams
        width = v.dims[0]
        q = self.view(self.view(q, head, heads, each, streams), head, each, heads, streams, packed=False)
        k = self.view(k, head, cached, kv_heads, streams, packed=False)
        v = self.view(v, width, cached, v.dims[1], streams, packed=False)
        if self.flash:
            keys, values = (self.step("cpy", one.dims, one, type=F16) if one.type == F32 else one for one in (k, v))
            extra = () if sinks is None else (sinks,)
            cur = self.step("flash", (width, heads, each, streams), q, keys, values, mask, *extra)
            self.fused.append((index, cur))
            if decompress is not None:
                cur = self.view(cur, width, each, heads, streams, packed=False)
                cur = self.step("mul_mat", (decompress.dims[1], each, heads, streams), decompress, cur)
                cur = self.view(cur, decompress.dims[1], heads, each, streams, packed=False)
                cur = self.step("cont", cur.dims, cur)
            cur = self.view(cur, cur.dims[0] * heads, self.tokens)
        else:
            scores = self.step("mul_mat", (cached, each, heads, streams), k, q)
            if softcap:
                scores = self.same("scale", self.same("unary", self.same("scale", scores)))
            scores = self.same("soft_max", scores, mask, *(() if sinks is None else (sinks,)))
            transposed = self.view(v, cached, width, v.dims[2], streams, packed=False)
            # MLA shows K as V; without a cache V is as it was computed; a cache made for flash attention has rows
            if k.root is v.root or self.shape.encoder or not self.scattered:
                transposed = self.step("cont", transposed.dims, transposed, type=v.type if v.type in _WIDTH else F16)
            cur = self.step("mul_mat", (width, each, heads, streams), transposed, scores)
            if decompress is not None:
                cur = self.step("mul_mat", (decompress.dims[1], each, heads, streams), decompress, cur)
            width = cur.dims[0]
            cur = self.step(
                "cont", (width * heads, self.tokens), self.view(cur, width, heads, each, streams, packed=False)
            )
            if not self.options.kv_offload and self.pinned:
                cur.pin = self.host
        self.expand(cur)
        return cur

    def attention(self, index: int, node: Node) -> Node:
        """Plain attention of one block (``build_qkv``, ``build_attn``), from the normed input to its output matrix."""
        layer = self.shape.layers[index]
        head, heads, kv_heads, value = layer.key_length, layer.heads, layer.kv_heads, layer.value_length
        width, tokens = self.shape.embedding, self.tokens
        gate: Node | None = None
        v: Node | None
        if self.has(index, "attn_qkv.weight"):
            packed = self.linear(index, "attn_qkv", node)
            q = self.view(packed, head, heads, tokens, packed=False)
            k: Node | None = self.view(packed, head, kv_heads, tokens, packed=False)
            v = self.view(packed, value, kv_heads, tokens, packed=False)
        else:
            q = self.linear(index, "attn_q", node, width, heads * head)
            if q.dims[0] == 2 * heads * head:  # gated attention keeps the gate in the other half of Q
                gate = self.step("cont", (heads * head, tokens), self.view(q, head, heads, tokens, packed=False))
                q = self.view(q, head, heads, tokens, packed=False)
            else:
                q = self.view(q, head, heads, tokens)
            owns = not self.tensors or self.has(index, "attn_k.weight")
            k = (
                self.view(self.linear(index, "attn_k", node, width, kv_heads * head), head, kv_heads, tokens)
                if owns
                else None
            )
            v = k
            if owns and (not self.tensors or self.has(index, "attn_v.weight")):
                v = self.view(self.linear(index, "attn_v", node, width, kv_heads * value), value, kv_heads, tokens)
        ropes = self.ropes()
        q = self.block_norm_if(index, "attn_q_norm", q)
        q = self.rope(q) if ropes else q
        if k is not None:
            k = self.block_norm_if(index, "attn_k_norm", k)
            k = self.rope(k) if ropes else k
            if self.shape.architecture in ("gemma3n", "gemma4") and v is not None:
                v = self.same("rms_norm", v)
        if self.shape.architecture in ("gemma", "gemma2", "gemma3", "gemma-embedding"):
            q = self.same("scale", q)
        cur = self._cached(index, layer, q, k, v) if not self.shape.encoder else self._uncached(index, layer, q, k, v)
        if gate is not None:
            cur = self.same("mul", cur, self.same("unary", gate))
        return self.linear(index, "attn_output", cur, heads * value, width)

    def ropes(self) -> bool:
        """Whether Q and K get positions; some hybrids leave order to their recurrent blocks."""
        if self.shape.architecture in ("jamba", "nemotron_h", "nemotron_h_moe"):
            return False
        finetuned = self.shape.meta.get("rope.scaling.finetuned", True)
        return not self.named("position_embd.weight") and (
            bool(finetuned) or not self.shape.architecture.startswith("granite")
        )

    def block_norm_if(self, index: int, name: str, node: Node) -> Node:
        """A norm that only some models have."""
        return self.block_norm(index, name, node) if self.has(index, f"{name}.weight") else node

    def _cached(self, index: int, layer: Layer, q: Node, k: Node | None, v: Node | None) -> Node:
        options, window = self.options, bool(layer.window)
        cached = self.cells_of(layer)
        source = index
        if not layer.k_row:  # shows the cache of an earlier block of its kind
            alike = [
                i for i, other in enumerate(self.shape.layers[:index]) if other.k_row and bool(other.window) == window
            ]
            source = alike[-1] if alike else index
        owner = self.shape.layers[source]
        v_row = max(other.v_row for other in self.shape.layers) if self.scattered else owner.v_row
        k_rotation = self.rotation("K", options.cache_type_k, owner.key_length, window=window)
        v_rotation = self.rotation("V", options.cache_type_v, owner.value_length, window=window)
        q = self.rotated(q, k_rotation)
        if k is not None and v is not None and layer.k_row:
            k, v = self.rotated(k, k_rotation), self.rotated(v, v_rotation)
            # llama-graph.cpp, build_attn: K comes last, but not with a window cache beside the full one
            self.expand(q, *((k, v) if any(other.window for other in self.shape.layers) else (v, k)))
            self.expand(self.store(self.cache(index, "K", owner.k_row, cached), k, window=window))
            self.expand(self.store(self.cache(index, "V", v_row, cached), v, scattered=self.scattered, window=window))
        else:
            self.expand(q)
        streams = self.cells.streams
        kv_heads = owner.kv_heads or 1
        keys = self.view(
            self.cache(source, "K", owner.k_row, cached),
            owner.k_row // kv_heads,
            kv_heads,
            cached,
            streams,
            packed=False,
        )
        values = self.view(
            self.cache(source, "V", v_row, cached), owner.v_row // kv_heads, kv_heads, cached, streams, packed=False
        )
        cur = self.attend(
            index,
            q,
            keys,
            values,
            self.mask(layer.window, cached),
            sinks=self.weight(index, "attn_sinks.weight"),
            softcap="attn_logit_softcapping" in self.shape.meta,
        )
        return self.rotated(cur, v_rotation)

    def _uncached(self, index: int, layer: Layer, q: Node, k: Node | None, v: Node | None) -> Node:
        if k is None or v is None:
            k = v = q
        self.expand(q, k, v)
        return self.attend(index, q, k, v, self.mask(layer.window, self.tokens))

    def finish(self, node: Node, *, late: LateRows | None = None) -> None:
        """Output norm and logits, which stay in memory to be read; encoders end with their embeddings.

        :param late: the rows that are asked for are picked only here, before or after the norm.
        """
        if late == "before norm":
            node.kept = True
            node = self.rows(node)
        label, width = self.placement.output, self.shape.embedding
        norm = "token_embd_norm" if self.shape.architecture in ("lfm2", "lfm2moe") else "output_norm"
        if self.named(f"{norm}.weight") or not self.tensors:
            bias = self.top(f"{norm}.bias", label, width) if self.named(f"{norm}.bias") else None
            node = self.norm(node, self.top(f"{norm}.weight", label, width), bias)
        node.kept = True
        if late == "after norm":
            node = self.rows(node)
            node.kept = True
        self.result = node
        wordless = self.options.embeddings and self.shape.architecture in ("lfm2", "lfm2moe")
        if not self.shape.encoder and not wordless:
            name = "output.weight" if self.named("output.weight") else "token_embd.weight"
            # An override takes the copy of tied embeddings by the name of what it copies.
            moved = next((to for pattern, to in overrides(self.options) if pattern.search(name)), label)
            where = self._label(name, label) if name == "output.weight" else moved
            node = self.matmul(self.top(name, where, width, self.shape.vocabulary), node)
            if "final_logit_softcapping" in self.shape.meta:
                node = self.same("scale", self.same("unary", self.same("scale", node)))
            node.kept = True
        self.expand(node)
