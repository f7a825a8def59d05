"""Blocks that mix tokens by something else than plain attention, as skeletons of steps and sizes."""

from __future__ import annotations

from collections.abc import Callable

from pytest_vram.sizing.compute_graph import F32, Skeleton
from pytest_vram.sizing.compute_replay import Node
from pytest_vram.sizing.shape import Mla, Ssm


def latent_attention(graph: Skeleton, index: int, node: Node, mla: Mla) -> Node:
    """MLA (``src/models/deepseek2.cpp``): absorbed into one wide K head, or decompressed where a file is not split."""
    heads, tokens, width = graph.shape.layers[index].heads, graph.tokens, graph.shape.embedding
    if mla.query_rank:
        q = graph.linear(index, "attn_q_a", node, width, mla.query_rank)
        q = graph.block_norm(index, "attn_q_a_norm", q)
        q = graph.linear(index, "attn_q_b", q, mla.query_rank, heads * (mla.nope + mla.rope))
    else:
        q = graph.linear(index, "attn_q", node, width, heads * (mla.nope + mla.rope))
    q = graph.view(q, mla.nope + mla.rope, heads, tokens)
    both = graph.linear(index, "attn_kv_a_mqa", node, width, mla.kv_rank + mla.rope)
    latent = graph.view(both, mla.kv_rank, tokens, packed=False)
    key_rope = graph.rope(graph.view(both, mla.rope, 1, tokens, packed=False))
    latent = graph.block_norm(index, "attn_kv_a_norm", latent)
    if graph.has(index, "attn_kv_b.weight") and not graph.has(index, "attn_k_b.weight"):
        return _decompressed(graph, index, mla, q, latent, key_rope)
    query_rope = graph.rope(graph.view(q, mla.rope, heads, tokens, packed=False))
    query = graph.view(graph.view(q, mla.nope, heads, tokens, packed=False), mla.nope, tokens, heads, packed=False)
    absorbed = graph.matmul(graph.need(index, "attn_k_b.weight", mla.nope, mla.kv_rank, heads), query)
    absorbed = graph.view(absorbed, mla.kv_rank, heads, tokens, packed=False)
    row = mla.kv_rank + mla.rope
    query = graph.step("concat", (row, heads, tokens), absorbed, query_rope)
    value = graph.view(latent, mla.kv_rank, 1, tokens)
    key = graph.step("concat", (row, 1, tokens), value, key_rope)
    graph.expand(query, value, key)
    cached = graph.cells.per_sequence
    cache = graph.cache(index, "K", row, cached)
    graph.expand(graph.store(cache, key))
    streams = graph.cells.streams
    keys = graph.view(cache, row, 1, cached, streams, packed=False)
    values = graph.view(keys, mla.kv_rank, 1, cached, streams, packed=False)
    decompress = graph.need(index, "attn_v_b.weight", mla.kv_rank, mla.value, heads)
    cur = graph.attend(index, query, keys, values, graph.mask(0, cached), decompress=decompress)
    return graph.linear(index, "attn_output", cur, heads * mla.value, width)


def _decompressed(graph: Skeleton, index: int, mla: Mla, q: Node, latent: Node, key_rope: Node) -> Node:
    heads, tokens = graph.shape.layers[index].heads, graph.tokens
    head = mla.nope + mla.rope
    both = graph.matmul(graph.need(index, "attn_kv_b.weight", mla.kv_rank, heads * (mla.nope + mla.value)), latent)
    part = graph.view(both, mla.nope, heads, tokens, packed=False)
    value = graph.step("cont", (mla.value, heads, tokens), graph.view(both, mla.value, heads, tokens, packed=False))
    query = graph.rope(q)
    repeated = graph.step("repeat", (mla.rope, heads, tokens), key_rope)
    key = graph.step("concat", (head, heads, tokens), part, repeated)
    graph.expand(query, value, key)
    cached, streams = graph.cells.per_sequence, graph.cells.streams
    k_cache = graph.cache(index, "K", heads * head, cached)
    v_cache = graph.cache(index, "V", heads * mla.value, cached)
    graph.expand(graph.store(k_cache, key), graph.store(v_cache, value, scattered=graph.scattered))
    keys = graph.view(k_cache, head, heads, cached, streams, packed=False)
    values = graph.view(v_cache, mla.value, heads, cached, streams, packed=False)
    cur = graph.attend(index, query, keys, values, graph.mask(0, cached))
    return graph.linear(index, "attn_output", cur, heads * mla.value, graph.shape.embedding)


def states(
    graph: Skeleton, index: int, which: str, size: int, read: Callable[[Node, Node], Node] | None = None
) -> Node:
    """``build_rs``: clear a state, read the states of this batch, keep the others."""
    sequences = graph.cells.slots
    label = graph.placement.layers[index] if graph.options.kv_offload else "host"
    state = graph.held(f"{which} {index}", F32, (size, sequences), 4 * size * sequences, label)
    main, extra = graph.state_ids()
    shown = graph.view(state, size, sequences)
    cleared = graph.view(shown, 0)
    graph.expand(Node("scale", F32, cleared.dims, 0, (cleared,), root=state))
    result = read(shown, main) if read else graph.step("get_rows", (size, sequences), shown, main)
    graph.expand(result)
    others = graph.step("get_rows", (size, 0), shown, extra)
    graph.expand(Node("cpy", F32, others.dims, 0, (others, graph.view(state, size, 0)), root=state))
    return result


def keep(graph: Skeleton, index: int, which: str, value: Node) -> None:
    """Copy the newest state back to where it is kept."""
    state = graph.held(f"{which} {index}", F32, (0,), 0, "host")
    graph.expand(Node("cpy", F32, value.dims, state.size, (value, graph.view(state, *value.dims)), root=state))


def mamba(graph: Skeleton, index: int, node: Node, ssm: Ssm) -> Node:
    """Mamba-1 (``src/models/mamba-base.cpp``, ``build_mamba_layer``)."""
    sequences = graph.cells.slots
    each, inner, state = graph.tokens // sequences, ssm.inner, ssm.state
    width = graph.shape.embedding
    held = states(graph, index, "conv", (ssm.conv - 1) * inner)
    held = graph.view(held, ssm.conv - 1, inner, sequences)
    node = graph.view(node, width, each, sequences)
    both = graph.linear(index, "ssm_in", node, width, 2 * inner)
    x = graph.view(both, inner, each, sequences, packed=False)
    z = graph.view(both, inner, each, sequences, packed=False)
    x = convolved(graph, index, held, graph.view(x, each, inner, sequences, packed=False), ssm.conv)
    x = graph.same("unary", x)
    mixed = graph.linear(index, "ssm_x", x, inner, ssm.dt_rank + 2 * state)
    dt = graph.view(mixed, ssm.dt_rank, each, sequences, packed=False)
    b, c = (graph.view(mixed, state, 1, each, sequences, packed=False) for _ in range(2))
    if graph.has(index, "ssm_dt_norm.weight") or graph.shape.meta.get("ssm_dt_b_c_rms"):
        dt, b, c = (
            graph.norm(one, graph.weight(index, f"ssm_{name}_norm.weight"), layer=index)
            for one, name in ((dt, "dt"), (b, "b"), (c, "c"))
        )
    dt = graph.linear(index, "ssm_dt", dt, ssm.dt_rank, inner)
    spread = graph.view(x, 1, inner, each, sequences)
    decay = graph.need(index, "ssm_a", state, inner)

    def scan(shown: Node, picked: Node) -> Node:
        size = graph.tokens * inner + state * inner * sequences
        return graph.step(
            "ssm_scan", (size,), graph.view(shown, state, 1, inner, sequences), spread, dt, decay, b, c, picked
        )

    y = states(graph, index, "state", state * inner, scan)
    keep(graph, index, "state", graph.view(y, state * inner * sequences))
    y = graph.view(y, inner, each, sequences)
    y = graph.step("add", y.dims, y, graph.same("mul", x, graph.need(index, "ssm_d", inner)))
    y = graph.step("glu", y.dims, graph.step("cont", z.dims, z), y)
    return graph.view(graph.linear(index, "ssm_out", y, inner, width), width, graph.tokens)


def convolved(graph: Skeleton, index: int, held: Node, x: Node, conv: int, name: str = "ssm_conv1d") -> Node:
    """A convolution over a few tokens that remembers the last of them."""
    each, channels, sequences = x.dims[0], x.dims[1], x.dims[2]
    window = graph.step("concat", (conv - 1 + each, channels, sequences), held, x)
    keep(graph, index, "conv", graph.view(window, conv - 1, channels, sequences, packed=False))
    result = graph.step(
        "ssm_conv", (channels, each, sequences), window, graph.need(index, f"{name}.weight", conv, channels)
    )
    bias = graph.weight(index, f"{name}.bias")
    return result if bias is None else graph.same("add", result, bias)


def mamba2(graph: Skeleton, index: int, node: Node, ssm: Ssm) -> Node:
    """Mamba-2 (``src/models/mamba-base.cpp``, ``build_mamba2_layer``)."""
    sequences, width = graph.cells.slots, graph.shape.embedding
    each, inner, state, groups = graph.tokens // sequences, ssm.inner, ssm.state, max(1, ssm.groups)
    heads = ssm.dt_rank or 1
    head, channels = inner // heads, inner + 2 * groups * state
    held = states(graph, index, "conv", (ssm.conv - 1) * channels)
    held = graph.view(held, ssm.conv - 1, channels, sequences)
    packed = graph.linear(index, "ssm_in", node, width, 2 * inner + 2 * groups * state + heads)
    packed = graph.view(packed, packed.dims[0], each, sequences)
    z = graph.view(packed, head, heads, each, sequences, packed=False)
    x = graph.view(packed, each, channels, sequences, packed=False)
    dt = graph.view(packed, heads, each, sequences, packed=False)
    mixed = graph.same("unary", convolved(graph, index, held, x, ssm.conv))
    x = graph.view(mixed, head, heads, each, sequences, packed=False)
    b, c = (graph.view(mixed, state, groups, each, sequences, packed=False) for _ in range(2))
    dt = graph.step("cont", dt.dims, dt)
    dt = graph.same("add", dt, graph.need(index, "ssm_dt.bias", heads))
    decay = graph.need(index, "ssm_a", 1, heads)

    def scan(shown: Node, picked: Node) -> Node:
        size = graph.tokens * inner + state * inner * sequences
        return graph.step(
            "ssm_scan", (size,), graph.view(shown, state, head, heads, sequences), x, dt, decay, b, c, picked
        )

    y = states(graph, index, "state", state * inner, scan)
    keep(graph, index, "state", graph.view(y, state * inner, sequences))
    y = graph.view(y, head, heads, each, sequences)
    skip = graph.step("mul", x.dims, x, graph.need(index, "ssm_d", 1, heads))
    y = graph.step("add", y.dims, y, skip)
    y = graph.step("glu", y.dims, graph.step("cont", z.dims, z), y)
    if graph.has(index, "ssm_norm.weight"):
        y = graph.view(y, inner // groups, groups, each, sequences)
        y = graph.norm(y, graph.weight(index, "ssm_norm.weight"), layer=index)
    result = graph.linear(index, "ssm_out", graph.view(y, inner, graph.tokens), inner, width)
    # Seen through a view, its memory cannot be taken over by the sum that follows: the residual's is.
    return result if graph.flat else graph.view(result, width, graph.tokens)
