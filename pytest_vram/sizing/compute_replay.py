"""How llama.cpp turns a graph into compute buffers: which device runs each step, what is copied, what memory is reused.

A compute buffer has no formula of its own: it is what is left when the steps of one evaluation are laid into memory
one after another, each freed after its last reader. So its size is found by doing the same with the sizes alone. Three
rules are replayed here, all from ggml (October 2026):

* ``ggml-backend.cpp`` (``ggml_backend_sched_split_graph``): a step runs where its weights are, large batches of weights
  in host memory on the first GPU that takes them, everything between on its neighbour's device; what a device lacks is
  copied to it, once for each run of steps, several times under pipeline parallelism;
* ``ggml-alloc.c`` (``ggml_gallocr_alloc_graph_impl``): steps that can work in place take over a parent's memory;
* ``ggml-alloc.c`` (``ggml_dyn_tallocr_alloc``): of the free blocks, the tightest, and the end of the buffer last.

Dry runs of real engines confirmed it for CPU and RPC devices, and dry runs of a CUDA backend that was simulated on a
machine without a GPU; no GPU did.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

INPLACE = frozenset(
    [
        "fill",
        "scale",
        "add",
        "add_id",
        "sub",
        "mul",
        "div",
        "sqr",
        "sqrt",
        "unary",
        "rope",
        "rms_norm",
        "clamp",
        "soft_max",
    ]
)  # ggml-alloc.c, ggml_op_can_inplace
EMPTY = frozenset(("none", "view"))
COPIES = 4  # GGML_SCHED_MAX_COPIES
MAX_CHUNKS = 16  # GGML_VBUFFER_MAX_CHUNKS
NO_LIMIT = 1 << 62

Dims = tuple[int, int, int, int]


class Node:
    """One tensor of a graph: a step, an input, a weight or a view of one of them.

    :ivar op: the step, ``view`` for every way to look at another tensor, ``none`` for inputs and weights.
    :ivar size: bytes. :ivar src: what it reads.
    :ivar root: the tensor whose memory it shows. :ivar place: device that already holds it (weights, caches).
    :ivar packed: rows follow each other without gaps. :ivar pin: device it was put on by name.
    :ivar kept: an output: never freed, never taken over.
    """

    __slots__ = (
        "address",
        "children",
        "device",
        "dims",
        "input",
        "kept",
        "live",
        "name",
        "op",
        "packed",
        "pin",
        "place",
        "root",
        "size",
        "src",
        "type",
        "views",
        "weight",
    )

    def __init__(
        self,
        op: str,
        type: str,
        dims: Dims,
        size: int,
        src: Sequence[Node] = (),
        *,
        root: Node | None = None,
        place: int | None = None,
        packed: bool = True,
        weight: bool = False,
        input: bool = False,
        name: str = "",
    ) -> None:
        self.op, self.type, self.dims, self.size, self.name = op, type, dims, size, name
        self.src = list(src)
        self.root, self.place, self.packed, self.weight, self.input = root, place, packed, weight, input
        self.pin: int | None = None
        self.device = -1
        self.children = self.views = 0
        self.live = self.kept = False
        self.address: tuple[int, int] = (0, 0)

    @property
    def held(self) -> int | None:
        """The device whose memory it is in before the graph runs."""
        return self.place if self.root is None else self.root.place

    def rows(self) -> int:
        """How many rows decide whether a step is worth moving to a GPU (``get_op_batch_size`` of CUDA and Vulkan)."""
        if self.op == "get_rows":
            return 0
        if self.op == "mul_mat":
            return self.dims[1]
        if self.op in ("mul_mat_id", "rope"):
            return self.dims[2]
        return self.dims[1] * self.dims[2] * self.dims[3]


class Backend:
    """One device as the scheduler sees it.

    :param supports: whether it can run a step. :param offload_rows: rows from which it takes steps whose weights are in
        host memory; ``None``: never. :param limit: bytes of one piece of its buffer. :param extra: what
        it allocates for a step beside the result. :param reorder: its own order of the steps of one run.
    """

    def __init__(
        self,
        label: str,
        kind: str,
        *,
        supports: Callable[[Node], bool],
        alignment: int = 32,
        limit: int = NO_LIMIT,
        offload_rows: int | None = None,
        extra: Callable[[Node], int] | None = None,
        reorder: Callable[[list[Node]], list[Node]] | None = None,
    ) -> None:
        self.label, self.kind, self.supports = label, kind, supports
        self.alignment, self.limit, self.offload_rows = alignment, limit, offload_rows
        self.extra, self.reorder = extra, reorder

    def without_limit(self) -> Backend:
        """The same with a buffer in one piece."""
        return Backend(
            self.label,
            self.kind,
            supports=self.supports,
            alignment=self.alignment,
            offload_rows=self.offload_rows,
            extra=self.extra,
            reorder=self.reorder,
        )


class Graph:
    """Steps in the order in which llama.cpp lists them: parents before children, left before right.

    :ivar sinks_decide: flash attention runs where its sinks are, as any step runs where its weights are.
    """

    def __init__(self, *, sinks_decide: bool = False) -> None:
        self.sinks_decide = sinks_decide
        self.nodes: list[Node] = []
        self.leaves: list[Node] = []
        self._seen: set[Node] = set()

    def expand(self, node: Node) -> Node:
        """Add a step and everything that it needs (``ggml_build_forward_expand``)."""
        stack: list[tuple[Node, int]] = [(node, 0)]
        seen = self._seen
        if node in seen:
            return node
        seen.add(node)
        while stack:
            current, position = stack.pop()
            if position < len(current.src):
                stack.append((current, position + 1))
                child = current.src[position]
                if child not in seen:
                    seen.add(child)
                    stack.append((child, 0))
            elif current.op == "none":
                self.leaves.append(current)
            else:
                self.nodes.append(current)
        return node


class _Split:
    __slots__ = ("device", "inputs", "nodes")

    def __init__(self, device: int) -> None:
        self.device = device
        self.inputs: list[tuple[Node, Node]] = []
        self.nodes: list[Node] = []


class Laid(NamedTuple):
    """A device's compute buffer in bytes.

    :ivar size: as laid out. :ivar live: the most that was in use at once, which no layout can go below.
    """

    size: int
    live: int


def replay(graph: Graph, backends: Sequence[Backend], *, op_offload: bool, pipeline: bool) -> list[Laid]:
    """The compute buffer of each device; the last of ``backends`` is the CPU. The graph is used up by it."""
    assign(graph, backends, op_offload=op_offload)
    splits, early = _split(graph, backends, COPIES if pipeline else 1)
    return _lay_out(graph, splits, early, backends)


def _home(node: Node, op: Node, backends: Sequence[Backend]) -> int:
    held = node.held
    return held if held is not None and backends[held].supports(op) else -1


def _first_choice(node: Node, backends: Sequence[Backend], op_offload: bool, sinks_decide: bool) -> int:
    if node.pin is not None:
        return node.pin
    home = _home(node, node, backends)
    if home != -1:
        return home
    cpu = len(backends) - 1
    if node.input:
        return cpu
    if node.op == "rope" or (node.op == "flash" and not sinks_decide):  # their only weights are too small to decide
        return -1
    for source in node.src:
        if not source.weight:
            continue
        home = _home(source, node, backends)
        if op_offload and home == cpu:
            for index, backend in enumerate(backends[:-1]):
                if backend.offload_rows is not None and node.rows() >= backend.offload_rows and backend.supports(node):
                    return index
        return home
    return -1


def assign(graph: Graph, backends: Sequence[Backend], *, op_offload: bool) -> None:
    """Set the device of every node."""
    cpu = len(backends) - 1
    for node in (*graph.leaves, *graph.nodes):
        node.device = _first_choice(node, backends, op_offload, graph.sinks_decide)
    steps = [node for node in graph.nodes if node.op not in EMPTY]
    for skip_cpu in (True, False):
        for ordered in (steps, steps[::-1]):
            current = -1
            for node in ordered:
                if node.device != -1:
                    current = -1 if skip_cpu and node.device == cpu else node.device
                elif current != -1 and backends[current].supports(node):
                    node.device = current
    for node in steps:
        if node.device == -1:
            node.device = _most_at_hand(node, backends)
    for node in graph.nodes:
        if node.device == -1 and node.root is not None:
            node.device = node.root.device
        for source in node.src:
            if source.device == -1:
                source.device = node.device if source.root is None else source.root.device
        if node.device == -1:
            node.device = next(index for index, backend in enumerate(backends) if backend.supports(node))


def _most_at_hand(node: Node, backends: Sequence[Backend]) -> int:
    best, choice = -1, -1
    for index, backend in enumerate(backends):
        if backend.supports(node):
            count = sum(_at_hand(source, index) for source in node.src)
            if count > best:
                best, choice = count, index
    return choice


def _at_hand(node: Node, device: int) -> bool:
    held = node.held
    if held is not None:
        return held == device
    if node.device == -1 and node.root is not None:
        return node.root.device == device
    return node.device == device


def _split(graph: Graph, backends: Sequence[Backend], copies: int) -> tuple[list[_Split], list[Node]]:
    """Runs of steps on one device, and the tensors that exist from the start because of pipeline copies."""
    del backends
    splits: list[_Split] = []
    twins: dict[tuple[Node, int], Node] = {}
    graph_inputs: dict[Node, list[Node]] = {}
    input_twins: list[Node] = []
    waiting: list[Node] = []
    current: _Split | None = None
    for node in graph.nodes:
        if node.op in EMPTY:
            (waiting if current is None else current.nodes).append(node)
            continue
        device = node.device
        fresh = current is None or current.device != device
        if not fresh and current is not None and current.inputs:
            fresh = any(s.weight and s.device != device and not _at_hand(s, device) for s in node.src)
        if fresh or current is None:
            current = _Split(device)
            current.nodes, waiting = waiting, []
            splits.append(current)
        for position, source in enumerate(node.src):
            if source.input and copies > 1 and source not in graph_inputs:
                graph_inputs[source] = [source, *(_twin(source, source.device) for _ in range(copies - 1))]
            if source.device == device or _at_hand(source, device):
                continue
            twin = twins.get((source, device))
            if twin is None:
                twin = twins[source, device] = _twin(source, device)
                if copies > 1:
                    input_twins += [twin, *(_twin(source, device) for _ in range(copies - 1))]
                current.inputs.append((source, twin))
            node.src[position] = twin
        current.nodes.append(node)
    early = [node for group in graph_inputs.values() for node in group] + input_twins
    for node in early:
        node.kept = True
    return splits, early


def _twin(node: Node, device: int) -> Node:
    copy = Node("copy", node.type, node.dims, node.size, packed=node.packed)
    copy.device = device
    return copy


class Arena:
    """Free blocks of one buffer, in pieces of at most ``limit`` bytes where the device has such a limit."""

    def __init__(self, alignment: int, limit: int) -> None:
        self.alignment, self.limit = alignment, limit
        self.free: list[list[list[int]]] = []
        self.tops: list[int] = []
        self.live = self.most_live = 0

    def round(self, size: int) -> int:
        return -(-size // self.alignment) * self.alignment

    def take(self, size: int) -> tuple[int, int]:
        size = self.round(size)
        piece, block, tightest = -1, -1, NO_LIMIT * 2
        for number, free in enumerate(self.free):
            tightest_here = NO_LIMIT * 2
            for index in range(len(free) - 1):
                room = free[index][1]
                if size <= room <= tightest_here:
                    piece, block, tightest_here = number, index, room
        if block == -1:
            reuse = -NO_LIMIT * 2
            for number, free in enumerate(self.free):
                if free and free[-1][1] >= size:
                    spare = self.tops[number] - free[-1][0] - size
                    if (reuse < 0 and spare > reuse) or (0 <= spare < reuse):
                        piece, block, reuse = number, len(free) - 1, spare
        del tightest
        if block == -1:
            room = NO_LIMIT if len(self.free) == MAX_CHUNKS - 1 else max(size, self.limit)
            self.free.append([[0, room]])
            self.tops.append(0)
            piece, block = len(self.free) - 1, 0
        free = self.free[piece]
        offset = free[block][0]
        free[block][0] += size
        free[block][1] -= size
        if not free[block][1]:
            del free[block]
        self.tops[piece] = max(self.tops[piece], offset + size)
        self.live += size
        self.most_live = max(self.most_live, self.live)
        return piece, offset

    def give(self, address: tuple[int, int], size: int) -> None:
        size = self.round(size)
        self.live -= size
        piece, offset = address
        free = self.free[piece]
        for index, block in enumerate(free):
            if block[0] + block[1] == offset:
                block[1] += size
                if index + 1 < len(free) and block[0] + block[1] == free[index + 1][0]:
                    block[1] += free[index + 1][1]
                    del free[index + 1]
                return
            if offset + size == block[0]:
                block[0] = offset
                block[1] += size
                return
        place = sum(block[0] < offset for block in free)
        free.insert(place, [offset, size])


class _Layout:
    """Memory of every device while the steps pass by."""

    def __init__(self, backends: Sequence[Backend]) -> None:
        self.backends = backends
        self.arenas = [Arena(backend.alignment, backend.limit) for backend in backends]

    def bytes_of(self, node: Node) -> int:
        extra = self.backends[node.device].extra
        return node.size if extra is None else node.size + extra(node)

    def place(self, node: Node) -> None:
        if node.live or node.root is not None or node.place is not None:
            return
        node.live = True
        if node.op in INPLACE and self._take_over(node):
            return
        node.address = self.arenas[node.device].take(self.bytes_of(node))

    def _take_over(self, node: Node) -> bool:
        for parent in node.src:
            if not (
                parent.packed
                and parent.type == node.type
                and parent.dims == node.dims
                and parent.children == 1
                and parent.views == 0
            ):
                continue
            if not parent.live or parent.kept:  # views are never live: nothing takes over what is seen through them
                continue
            whole, part = self.bytes_of(parent), self.bytes_of(node)
            node.device, node.address = parent.device, parent.address
            parent.live = False
            arena = self.arenas[parent.device]
            whole, part = arena.round(whole), arena.round(part)
            if whole > part:
                arena.give((node.address[0], node.address[1] + part), whole - part)
            return True
        return False

    def release(self, node: Node) -> None:
        node.children -= 1
        if node.children or node.views:
            return
        if node.root is not None:
            root = node.root
            root.views -= 1
            if root.views == 0 and root.children == 0 and root.live:
                self._free(root)
        elif node.live:
            self._free(node)

    def _free(self, node: Node) -> None:
        if node.kept:
            return
        self.arenas[node.device].give(node.address, self.bytes_of(node))
        node.live = False


def _lay_out(graph: Graph, splits: Iterable[_Split], early: Iterable[Node], backends: Sequence[Backend]) -> list[Laid]:
    order: list[tuple[Node, Sequence[Node]]] = []
    for split in splits:
        for source, twin in split.inputs:
            keep = Node("none", source.type, source.dims, source.size, (source,), root=source.root or source)
            order += [(keep, keep.src), (twin, ())]
        reorder = backends[split.device].reorder
        nodes = split.nodes if reorder is None else reorder(split.nodes)
        order += [(node, node.src) for node in nodes]
    layout = _Layout(backends)
    for node in (*early, *graph.leaves):
        layout.place(node)
    for node, sources in order:
        if node.root is not None and node.op != "none":
            node.root.views += 1
        for source in sources:
            source.children += 1
    for node, sources in order:
        for source in sources:
            layout.place(source)
        layout.place(node)
        for source in sources:
            layout.release(source)
    return [Laid(sum(arena.tops), arena.most_live) for arena in layout.arenas]
