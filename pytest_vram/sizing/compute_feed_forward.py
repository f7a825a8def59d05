"""Feed-forwards as skeletons of steps and sizes: dense ones and mixtures of experts (``llama-graph.cpp``)."""

from __future__ import annotations

from pytest_vram.sizing.compute_graph import F32, I32, Skeleton
from pytest_vram.sizing.compute_replay import Node
from pytest_vram.sizing.shape import ModelShape

# Whether the weights of the chosen experts are divided by their sum is written into most models' source (``norm_w``).
# Where it follows the file, a file that does not say means no.
NEVER_NORMED = frozenset(("deepseek", "gpt-oss", "jamba", "llada-moe", "llama4", "nomic-bert-moe", "olmoe", "qwen2moe"))
NORMED_BY_FILE = frozenset(
    (
        "afmoe",
        "bailingmoe",
        "bailingmoe2",
        "cohere2moe",
        "deepseek2",
        "deepseek32",
        "dots1",
        "exaone-moe",
        "glm-dsa",
        "glm4moe",
        "hy-v3",
        "laguna",
        "minimax-m3",
        "nemotron_h",
        "nemotron_h_moe",
        "step35",
    )
)


def normed(shape: ModelShape) -> bool:
    """Whether the chosen experts' weights are made to sum to one (``src/models``)."""
    if shape.architecture in NEVER_NORMED:
        return False
    return shape.architecture not in NORMED_BY_FILE or bool(shape.meta.get("expert_weights_norm", False))


def feed_forward(graph: Skeleton, index: int, node: Node, *, suffix: str = "", hidden: int = 0) -> Node:
    """``build_ffn``: with a gate, with gate and up in one matrix, or plain."""
    width = graph.shape.embedding
    hidden = hidden or graph.shape.layers[index].feed_forward
    gated = graph.has(index, f"ffn_gate{suffix}.weight") or not graph.tensors
    up = graph.linear(index, f"ffn_up{suffix}", node, width, hidden)
    if gated:
        gate = graph.linear(index, f"ffn_gate{suffix}", node, width, hidden)
        inner = graph.step("glu", gate.dims, gate, up)
    else:
        down = graph.weight(index, f"ffn_down{suffix}.weight")
        if down is not None and up.dims[0] == 2 * down.dims[0]:
            inner = graph.step("glu", (down.dims[0], up.dims[1]), up)
        else:
            inner = graph.same("unary", up)
    return graph.linear(index, f"ffn_down{suffix}", inner, hidden, width)


def experts(graph: Skeleton, index: int, node: Node) -> Node:
    """``build_moe_ffn`` and the shared expert beside it."""
    shape = graph.shape
    width, rows = shape.embedding, node.dims[1]
    count = shape.layers[index].experts or shape.experts
    used, hidden = shape.experts_used, shape.expert_feed_forward
    logits = graph.linear(index, "ffn_gate_inp", node, width, count)
    bias = graph.weight(index, "exp_probs_b.bias")
    late = shape.architecture == "gpt-oss"  # its softmax is over the chosen experts alone
    probabilities = logits if late else graph.same("soft_max" if bias is None else "unary", logits)
    chosen_by = probabilities if bias is None else graph.same("add", probabilities, bias)
    groups = shape.meta.get("expert_group_count", 0)
    if isinstance(groups, int) and groups > 1:
        chosen_by = _grouped(graph, chosen_by, count, groups, rows)
    order = graph.step("argsort", chosen_by.dims, chosen_by, type=I32)
    chosen = graph.view(order, used, rows, packed=False)
    weights = graph.step("get_rows", (1, used, rows), graph.view(probabilities, 1, count, rows), chosen)
    if late:
        weights = graph.view(graph.same("soft_max", graph.view(weights, used, rows)), 1, used, rows)
    if normed(shape):
        flat = graph.view(weights, used, rows)
        total = graph.same("clamp", graph.step("sum_rows", (1, rows), flat))
        weights = graph.view(graph.same("div", flat, total), 1, used, rows)
    scale = shape.meta.get("expert_weights_scale", 0.0)
    if isinstance(scale, float) and scale not in (0.0, 1.0):
        weights = graph.same("scale", weights)
    graph.expand(weights)
    spread = graph.view(node, width, 1, rows)
    inner = _inner(graph, index, spread, chosen, used, hidden, rows)
    outputs = _expert(graph, index, "ffn_down_exps", inner, chosen, (hidden, width, count), used, rows)
    outputs = graph.same("mul", outputs, weights)
    graph.expand(outputs)
    parts = [graph.view(outputs, width, rows, packed=False) for _ in range(used)]
    graph.expand(*parts)
    total_out = parts[0]
    for part in parts[1:]:
        total_out = graph.step("add", (width, rows), total_out, part)
        graph.expand(total_out)
    if used == 1:
        total_out = graph.step("cont", (width, rows), total_out)
    return _shared(graph, index, node, total_out)


def _grouped(graph: Skeleton, scores: Node, count: int, groups: int, rows: int) -> Node:
    """Choosing among groups of experts first (DeepSeek V3)."""
    used = graph.shape.meta.get("expert_group_used_count", 1)
    used = used if isinstance(used, int) else 1
    each = count // groups
    by_group = graph.view(scores, each, groups, rows)
    best = graph.view(graph.step("argsort", by_group.dims, by_group, type=I32), 2, groups, rows, packed=False)
    tops = graph.step("get_rows", (1, 2, groups, rows), graph.view(by_group, 1, each, groups, rows), best)
    totals = graph.view(graph.step("sum_rows", (1, groups, rows), graph.view(tops, 2, groups, rows)), groups, rows)
    picked = graph.view(graph.step("argsort", totals.dims, totals, type=I32), used, rows, packed=False)
    kept = graph.step("get_rows", (each, used, rows), by_group, picked)
    empty = graph.same("fill", by_group)
    result = Node("set_rows", F32, empty.dims, empty.size, (kept, picked, empty), root=empty)
    return graph.view(result, count, rows)


def _expert(
    graph: Skeleton, index: int, name: str, node: Node, chosen: Node, sizes: tuple[int, int, int], used: int, rows: int
) -> Node:
    weight = graph.need(index, f"{name}.weight", *sizes)
    result = graph.step("mul_mat_id", (weight.dims[1], used, rows), weight, node, chosen)
    bias = graph.weight(index, f"{name}.bias")
    return result if bias is None else graph.same("add_id", result, bias, chosen)


def _inner(graph: Skeleton, index: int, node: Node, chosen: Node, used: int, hidden: int, rows: int) -> Node:
    count = graph.shape.layers[index].experts or graph.shape.experts
    sizes = graph.shape.embedding, hidden, count
    if graph.has(index, "ffn_gate_up_exps.weight"):
        both = _expert(graph, index, "ffn_gate_up_exps", node, chosen, sizes, used, rows)
        half = both.dims[0] // 2
        gate, up = (graph.view(both, half, used, rows, packed=False) for _ in range(2))
        return graph.step("glu", (half, used, rows), gate, up)
    up = _expert(graph, index, "ffn_up_exps", node, chosen, sizes, used, rows)
    if graph.tensors and not graph.has(index, "ffn_gate_exps.weight"):
        return graph.same("unary", up)
    gate = _expert(graph, index, "ffn_gate_exps", node, chosen, sizes, used, rows)
    return graph.step("glu", gate.dims, gate, up)


def _shared(graph: Skeleton, index: int, node: Node, routed: Node) -> Node:
    shape = graph.shape
    hidden = shape.shared_experts * shape.expert_feed_forward
    if not (graph.has(index, "ffn_up_shexp.weight") or (not graph.tensors and hidden)):
        return routed
    shared = feed_forward(graph, index, node, suffix="_shexp", hidden=hidden)
    gate = graph.weight(index, "ffn_gate_inp_shexp.weight")
    if gate is not None:
        shared = graph.same("mul", shared, graph.same("unary", graph.matmul(gate, node)))
    return graph.same("add", routed, shared)
