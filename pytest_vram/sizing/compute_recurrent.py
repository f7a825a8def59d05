"""Blocks of linear attention and short convolutions, and whole RWKV-7 blocks, as skeletons of steps and sizes."""

from __future__ import annotations

from pytest_vram.sizing.compute_graph import F32, Skeleton
from pytest_vram.sizing.compute_mixers import convolved, keep, states
from pytest_vram.sizing.compute_replay import Node
from pytest_vram.sizing.shape import Ssm


def gated_delta(graph: Skeleton, index: int, node: Node, ssm: Ssm) -> Node:
    """Gated delta nets of Qwen3-Next and Qwen3.5, run as one step (``delta-net-base.cpp``, ``qwen3next.cpp``)."""
    sequences, tokens, width = graph.cells.slots, graph.tokens, graph.shape.embedding
    each, value_heads, key_heads, head_k = tokens // sequences, ssm.dt_rank or 1, max(1, ssm.groups), ssm.state
    head_v = ssm.inner // value_heads
    channels = ssm.inner + 2 * key_heads * head_k
    mixed, z = _queries(graph, index, node, ssm)
    beta, gate = _gates(graph, index, node, value_heads)
    held = graph.view(states(graph, index, "conv", (ssm.conv - 1) * channels), ssm.conv - 1, channels, sequences)
    window = graph.step(
        "concat",
        (ssm.conv - 1 + each, channels, sequences),
        held,
        graph.view(mixed, each, channels, sequences, packed=False),
    )
    keep(graph, index, "conv", graph.view(window, ssm.conv - 1, channels, sequences, packed=False))
    state = graph.view(
        states(graph, index, "state", graph.shape.layers[index].state_s), head_v, head_v, value_heads, sequences
    )
    kernel = graph.need(index, "ssm_conv1d.weight", ssm.conv, channels)
    spread = graph.same("unary", graph.step("ssm_conv", (channels, each, sequences), window, kernel))
    q, k = (
        graph.step(
            "l2_norm",
            (head_k, key_heads, each, sequences),
            graph.view(spread, head_k, key_heads, each, sequences, packed=False),
        )
        for _ in range(2)
    )
    v = graph.view(spread, head_v, value_heads, each, sequences, packed=False)
    if key_heads != value_heads and graph.shape.architecture == "qwen3next":
        factor = value_heads // key_heads
        q, k = (
            graph.view(
                graph.step(
                    "repeat", (head_k, factor, key_heads, tokens), graph.view(one, head_k, 1, key_heads, tokens)
                ),
                head_k,
                value_heads,
                each,
                sequences,
            )
            for one in (q, k)
        )
    size = head_v * value_heads * tokens + head_v * head_v * value_heads * sequences
    result = graph.step("gated_delta", (size,), q, k, v, gate, beta, state)
    keep(graph, index, "state", graph.view(result, head_v, head_v, value_heads, sequences))
    output = graph.view(result, head_v, value_heads, each, sequences)
    normed = graph.norm(output, graph.weight(index, "ssm_norm.weight", head_v), layer=index)
    gated = graph.same("mul", normed, graph.same("unary", graph.view(z, head_v, value_heads, each, sequences)))
    final = graph.view(gated, head_v * value_heads, each, sequences)
    return graph.view(graph.linear(index, "ssm_out", final, ssm.inner, width), width, tokens)


def _queries(graph: Skeleton, index: int, node: Node, ssm: Ssm) -> tuple[Node, Node]:
    """Q, K and V in one row, and the gate of the output."""
    sequences, tokens, width = graph.cells.slots, graph.tokens, graph.shape.embedding
    each, key_heads, value_heads = tokens // sequences, max(1, ssm.groups), ssm.dt_rank or 1
    channels = ssm.inner + 2 * key_heads * ssm.state
    if not graph.has(index, "ssm_in.weight"):
        mixed = graph.linear(index, "attn_qkv", node, width, channels)
        z = graph.linear(index, "attn_gate", node, width, ssm.inner)
        return graph.view(mixed, channels, each, sequences), z
    packed = graph.linear(index, "ssm_in", node, width, channels + ssm.inner)  # files of the first weeks
    packed = graph.view(packed, packed.dims[0] // key_heads, key_heads, each, sequences)
    values = ssm.inner // key_heads
    z = graph.view(packed, values, key_heads, each, sequences, packed=False)
    z = graph.step("cont", z.dims, z)
    flat = [
        graph.step(
            "cont",
            (size * key_heads, each, sequences),
            graph.view(packed, size, key_heads, each, sequences, packed=False),
        )
        for size in (ssm.state, ssm.state, values)
    ]
    both = graph.step("concat", (2 * ssm.state * key_heads, each, sequences), flat[0], flat[1])
    del value_heads
    return graph.step("concat", (channels, each, sequences), both, flat[2]), z


def _gates(graph: Skeleton, index: int, node: Node, heads: int) -> tuple[Node, Node]:
    sequences, tokens, width = graph.cells.slots, graph.tokens, graph.shape.embedding
    each = tokens // sequences
    if graph.has(index, "ssm_ba.weight"):
        both = graph.linear(index, "ssm_ba", node, width, 2 * heads)
        part = graph.view(both, heads, each, sequences, packed=False)
        beta = graph.same("unary", graph.step("cont", part.dims, part))
        part = graph.view(both, heads, each, sequences, packed=False)
        alpha = graph.step("cont", part.dims, part)
    else:
        beta = graph.view(graph.linear(index, "ssm_beta", node, width, heads), 1, heads, each, sequences)
        beta = graph.same("unary", beta)
        alpha = graph.view(graph.linear(index, "ssm_alpha", node, width, heads), heads, each, sequences)
    alpha = graph.same("add", alpha, graph.need(index, "ssm_dt.bias", heads))
    gate = graph.same("mul", graph.same("unary", alpha), graph.need(index, "ssm_a", heads))
    shown = (1, heads, each, sequences)
    return graph.view(beta, *shown), graph.view(gate, *shown)


def short_convolution(graph: Skeleton, index: int, node: Node, ssm: Ssm) -> Node:
    """The gated convolutions of LFM2 (``lfm2.cpp``, ``build_shortconv_block``)."""
    sequences, width = graph.cells.slots, graph.shape.embedding
    each = graph.tokens // sequences
    node = graph.view(node, width, each, sequences)
    mixed = graph.linear(index, "shortconv.in_proj", node, width, 3 * width)
    b, c, x = (graph.view(mixed, width, each, sequences, packed=False) for _ in range(3))
    product = graph.step("mul", b.dims, b, x)
    held = graph.view(states(graph, index, "conv", (ssm.conv - 1) * width), ssm.conv - 1, width, sequences)
    shown = graph.view(product, each, width, sequences, packed=False)
    out = convolved(graph, index, held, shown, ssm.conv, "shortconv.conv")
    y = graph.step("mul", c.dims, c, out)
    return graph.view(graph.linear(index, "shortconv.out_proj", y, width, width), width, graph.tokens)


class Rwkv7:
    """RWKV-7 (``rwkv7-base.cpp``, ``rwkv7.cpp``): the values of the first block live through all others."""

    def __init__(self, graph: Skeleton) -> None:
        self.graph = graph
        self.first: Node | None = None

    def block(self, index: int, node: Node, *, last: bool) -> Node:
        graph = self.graph
        layer, width, tokens, sequences = (
            graph.shape.layers[index],
            graph.shape.embedding,
            graph.tokens,
            graph.cells.slots,
        )
        each = tokens // sequences
        node = graph.view(node, width, each, sequences)
        shift = graph.view(states(graph, index, "conv", layer.state_r), width, 2, sequences)
        normed = self._norm(index, "attn_norm", node)
        before = self._shifted(shift, normed)
        mixed = self._time_mix(index, normed, before)
        middle = graph.same("add", mixed, node)
        inner = self._norm(index, "attn_norm_2", middle)
        before = self._shifted(shift, inner)
        newest = graph.step(
            "concat",
            (width, 2, sequences),
            *(graph.view(one, width, 1, sequences, packed=False) for one in (normed, inner)),
        )
        keep(graph, index, "conv", graph.view(newest, width * 2 * sequences))
        middle, inner, before = (graph.view(one, width, tokens) for one in (middle, inner, before))
        if last:
            middle, inner, before = graph.rows(middle), graph.rows(inner), graph.rows(before)
        moved = graph.same("sub", before, inner)
        key = graph.same("add", graph.same("mul", moved, self._weight(index, "channel_mix_lerp_k", width)), inner)
        hidden = graph.linear(index, "channel_mix_key", key, width, layer.feed_forward)
        hidden = graph.same("sqr", graph.same("unary", hidden))
        return graph.same("add", graph.linear(index, "channel_mix_value", hidden, layer.feed_forward, width), middle)

    def _weight(self, index: int, name: str, *sizes: int) -> Node:
        return self.graph.need(index, f"{name}.weight", *sizes)

    def _norm(self, index: int, name: str, node: Node) -> Node:
        graph, width = self.graph, self.graph.shape.embedding
        return graph.norm(node, self._weight(index, name, width), graph.need(index, f"{name}.bias", width), layer=index)

    def _shifted(self, shift: Node, node: Node) -> Node:
        graph, width, sequences = self.graph, node.dims[0], node.dims[2]
        each = node.dims[1]
        first = graph.view(shift, width, 1, sequences, packed=False)
        return graph.step(
            "concat", (width, each, sequences), first, graph.view(node, width, each - 1, sequences, packed=False)
        )

    def _low_rank(self, index: int, which: str, node: Node, *, inner: bool) -> Node:
        graph = self.graph
        down = graph.matmul(self._weight(index, f"time_mix_{which}1", node.dims[0], 1), node)
        if inner:
            down = graph.same("unary", down)
        return graph.matmul(self._weight(index, f"time_mix_{which}2", down.dims[0], node.dims[0]), down)

    def _time_mix(self, index: int, node: Node, before: Node) -> Node:
        graph, width, tokens, sequences = self.graph, node.dims[0], self.graph.tokens, node.dims[2]
        each = tokens // sequences
        gated = graph.has(index, "time_mix_g1.weight")
        parts = 6 if gated else 5
        moved = graph.step("repeat", (width, each, sequences, parts), graph.same("sub", before, node))
        lerp = self._weight(index, "time_mix_lerp_fused", width)
        wide = graph.same("add", graph.same("mul", moved, lerp), node)
        r, w, k, v, a, *rest = (graph.view(wide, width, tokens) for _ in range(parts))
        receptance = graph.linear(index, "time_mix_receptance", r, width, width)
        decay = graph.same("add", self._low_rank(index, "w", w, inner=True), self._weight(index, "time_mix_w0", width))
        decay = graph.same("unary", graph.same("scale", graph.same("unary", decay)))
        key = graph.linear(index, "time_mix_key", k, width, width)
        value = graph.linear(index, "time_mix_value", v, width, width)
        if self.first is None:
            self.first = value
        else:
            difference = graph.same("sub", self.first, value)
            low = graph.same(
                "add", self._low_rank(index, "v", v, inner=False), self._weight(index, "time_mix_v0", width)
            )
            value = graph.same("add", value, graph.same("mul", difference, graph.same("unary", low)))
        gate = self._low_rank(index, "g", rest[0], inner=True) if gated else None
        rate = graph.same("add", self._low_rank(index, "a", a, inner=False), self._weight(index, "time_mix_a0", width))
        rate = graph.same("unary", rate)
        size = graph.shape.ssm.inner if graph.shape.ssm is not None and graph.shape.ssm.inner else 64
        heads = (size, width // size, tokens)
        plain = graph.same("mul", key, self._weight(index, "time_mix_k_k", width))
        unit = graph.step("l2_norm", heads, graph.view(plain, *heads))
        scaled = graph.same("mul", key, self._weight(index, "time_mix_k_a", width))
        key = graph.same("add", key, graph.same("sub", graph.same("mul", rate, scaled), scaled))
        receptance, decay, key, value, rate = (graph.view(one, *heads) for one in (receptance, decay, key, value, rate))
        state = states(graph, index, "state", graph.shape.layers[index].state_s)
        negative, product = graph.same("unary", unit), graph.same("mul", unit, rate)
        output = graph.step(
            "wkv", (width, tokens + size * sequences), receptance, decay, key, value, negative, product, state
        )
        keep(graph, index, "state", graph.view(output, width * size * sequences))
        cur = graph.view(output, width * tokens)
        if graph.has(index, "time_mix_ln.weight"):
            shown = graph.view(cur, *heads)
            cur = graph.view(Node("norm", F32, shown.dims, 4 * width * tokens, (shown,)), width, tokens)
            cur = graph.same("mul", cur, self._weight(index, "time_mix_ln", width))
            cur = graph.same("add", cur, graph.need(index, "time_mix_ln.bias", width))
        else:
            cur = graph.view(cur, width, tokens)
        bonus = self._weight(index, "time_mix_r_k", width)
        summed = graph.step(
            "sum_rows",
            (1, heads[1], tokens),
            graph.same("mul", graph.same("mul", key, receptance), graph.view(bonus, *heads[:2])),
        )
        cur = graph.same("add", cur, graph.view(graph.same("mul", value, summed), width, tokens))
        if gate is not None:
            cur = graph.same("mul", cur, gate)
        return graph.view(graph.linear(index, "time_mix_output", cur, width, width), width, each, sequences)
