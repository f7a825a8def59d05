"""What holds for the layout of any graph in memory."""

from __future__ import annotations

import itertools

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_vram.sizing.compute import compute_buffers
from pytest_vram.sizing.compute_replay import NO_LIMIT, Arena, Backend, Graph, Node, replay
from pytest_vram.sizing.options import Device, LlamaOptions, Placement
from pytest_vram.sizing.shape import Layer, ModelShape

SIZES = st.integers(min_value=1, max_value=5000)  # llama.cpp does not join what it gives back of no bytes at all


@given(st.lists(st.tuples(SIZES, st.integers(0, 9))), st.sampled_from([NO_LIMIT, 8192]))
def test_results_never_share_memory(steps: list[tuple[int, int]], limit: int) -> None:
    """Whatever is taken and given back, what is held lies apart, and once all is given back each piece is whole."""
    arena = Arena(32, limit)
    held: list[tuple[tuple[int, int], int]] = []
    most = 0
    for size, back in steps:
        held.append((arena.take(size), size))
        most = max(most, sum(arena.round(one) for _, one in held))
        if back < 4:
            arena.give(*held.pop(back % len(held)))
        ends = sorted((*address, address[1] + arena.round(one)) for address, one in held)
        for before, after in itertools.pairwise(ends):
            assert before[0] != after[0] or before[2] <= after[1]
    assert sum(arena.tops) >= most
    for address, size in held:
        arena.give(address, size)
    for free, top in zip(arena.free, arena.tops, strict=True):
        (whole,) = free
        assert whole[0] == 0
        assert whole[1] >= top


@st.composite
def graphs(draw: st.DrawFn) -> tuple[Graph, list[int]]:
    """A graph of steps on one device, and the bytes that each of its steps needs at the least."""
    graph = Graph()
    nodes = [
        Node("none", "f32", (size, 1, 1, 1), 4 * size, input=True)
        for size in draw(st.lists(st.integers(1, 999), min_size=1, max_size=3))
    ]
    needs = []
    for _ in range(draw(st.integers(1, 20))):
        sources = draw(st.lists(st.sampled_from(nodes), min_size=1, max_size=3, unique=True))
        op = draw(st.sampled_from(["add", "mul_mat", "glu"]))
        size = sources[0].dims[0] if op == "add" else draw(st.integers(1, 999))
        nodes.append(Node(op, "f32", (size, 1, 1, 1), 4 * size, sources))
        shared = op == "add"
        needs.append(sum(4 * one.dims[0] for one in sources) + (0 if shared else 4 * size))
    for node in nodes:
        graph.expand(node)
    return graph, needs


@given(graphs())
def test_a_step_has_its_sources_and_its_result(one: tuple[Graph, list[int]]) -> None:
    """The buffer is never smaller than what one step needs at once, nor larger than all results together."""
    graph, needs = one
    everything = sum(node.size + 32 for node in (*graph.leaves, *graph.nodes))
    cpu = Backend("host", "cpu", supports=lambda node: True)
    ((size, live),) = replay(graph, [cpu], op_offload=True, pipeline=False)
    assert max(needs) <= live <= size <= everything


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 4),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 3]),
    st.integers(1, 9000),
    st.sampled_from([1, 64, 512, 3000]),
    st.booleans(),
    st.sampled_from(["cuda", "vulkan", "rpc"]),
    st.integers(0, 4),
)
def test_any_model_is_laid_out(
    layers: int, kv_heads: int, group: int, context: int, ubatch: int, flash: bool, kind: str, on_gpu: int
) -> None:
    """Any dense model and settings have buffers on every side that computes, and scores cost what they cost."""
    layer = Layer(
        heads=kv_heads * group,
        kv_heads=kv_heads,
        key_length=64,
        value_length=64,
        k_row=64 * kv_heads,
        v_row=64 * kv_heads,
        feed_forward=512,
    )
    shape = ModelShape(
        source="",
        format="config",
        architecture="llama",
        layers=(layer,) * layers,
        embedding=256,
        vocabulary=1000,
        context=4096,
    )
    options = LlamaOptions(
        ctx_size=context,
        ubatch_size=ubatch,
        parallel=1,
        flash_attn="on" if flash else "off",
        devices=(Device(label="gpu0", kind=kind),),  # type: ignore[arg-type]
    )
    count = min(on_gpu, layers)
    placement = Placement(layers=("host",) * (layers - count) + ("gpu0",) * count, output="gpu0" if count else "host")
    found = {entry.device: entry.bytes for entry in compute_buffers(shape, options, placement)}
    assert found["host"] > 0
    assert count == 0 or found["gpu0"] > 0
    slower = msgspec.structs.replace(options, flash_attn="off")
    scores = sum(entry.bytes for entry in compute_buffers(shape, slower, placement))
    assert scores >= 4 * min(context, ubatch, 2048) * kv_heads * group * context
