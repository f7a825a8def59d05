"""Vulkan's own order of the steps that it runs (``ggml-vulkan.cpp``, ``ggml_vk_graph_optimize``).

To let independent steps overlap, steps are drawn forward past those that they do not depend on, up to 20 at a time.
More results are then alive together, so the buffer changes, mostly by less than a tenth. Order as of October 2026; dry
runs on a software Vulkan device confirmed it.
"""

from __future__ import annotations

from pytest_vram.sizing.compute_replay import EMPTY, Node

AHEAD = 20  # how far it looks
NEAR = 15  # how far it looks for the rest of a fused group
# Choosing experts is fused, so these runs stay together.
TOGETHER = (
    ["soft_max", "view", "argsort", "view", "get_rows", "view", "sum_rows", "clamp", "div", "view"],
    ["unary", "view", "add", "argsort", "view", "get_rows", "view", "sum_rows", "clamp", "div", "view"],
    ["soft_max", "view", "argsort", "view", "get_rows"],
    ["argsort", "view", "get_rows", "view", "soft_max", "view"],
)
# A step that directly follows its source may come along with it, because the two run as one.
FUSED = frozenset(
    {
        ("rms_norm", "mul"),
        ("mul_mat", "add"),
        ("mul_mat_id", "add_id"),
        ("mul_mat_id", "mul"),
        ("add", "add"),
        ("ssm_conv", "add"),
        ("ssm_conv", "unary"),
    }
)


def reorder(nodes: list[Node]) -> list[Node]:
    """The steps of one run in the order in which they are laid out."""
    return _Order(nodes).result()


def _base(node: Node) -> Node:
    return node if node.root is None else node.root


def _needs(later: Node, earlier: Node) -> bool:
    """Whether ``later`` must stay behind ``earlier``."""
    if earlier in later.src:
        return True
    if later.op not in EMPTY and earlier.op not in EMPTY:
        base, own = _base(earlier), _base(later)
        if any(_base(source) is base for source in later.src) or any(_base(source) is own for source in earlier.src):
            return True
    return _base(later) is _base(earlier)


class _Order:
    def __init__(self, nodes: list[Node]) -> None:
        self.nodes = nodes
        self.used = [False] * len(nodes)
        self.placed: set[Node] = set()
        self.order: list[Node] = []
        self.first = 0

    def result(self) -> list[Node]:
        while self.first < len(self.nodes):
            group = self._kept() or self._drawn()
            for index in group:
                self.order.append(self.nodes[index])
                self.placed.add(self.nodes[index])
                self.used[index] = True
            while self.first < len(self.nodes) and self.used[self.first]:
                self.first += 1
        return self.order

    def _matches(self, start: int) -> int:
        """Length of the run of steps from here that stays together, 0 without one."""
        for pattern in TOGETHER:
            part = self.nodes[start : start + len(pattern)]
            if len(part) == len(pattern) and all(
                node.op == op and not self.used[start + offset]
                for offset, (node, op) in enumerate(zip(part, pattern, strict=True))
            ):
                return len(pattern)
        return 0

    def _kept(self) -> list[int]:
        return list(range(self.first, self.first + self._matches(self.first)))

    def _drawn(self) -> list[int]:
        nodes, used, first = self.nodes, self.used, self.first
        group = [first]
        end = min(first + AHEAD, len(nodes))
        for index in range(first + 1, end):
            if used[index] or nodes[index].op in EMPTY or self._matches(index):
                continue
            if all(used[other] or self._may_pass(index, other, group) for other in range(first, index)):
                group.append(index)
                group += self._companions(index)
        if nodes[group[-1]].op == "add":
            return group
        for index in range(first + 1, end):
            if used[index] or nodes[index].op not in EMPTY:
                continue
            if all(
                used[other] or other in group or not _needs(nodes[index], nodes[other]) for other in range(first, index)
            ):
                group.append(index)
        return group

    def _may_pass(self, index: int, other: int, group: list[int]) -> bool:
        if not _needs(self.nodes[index], self.nodes[other]):
            return True
        pair = (self.nodes[other].op, self.nodes[index].op)
        return index == other + 1 and other == group[-1] and pair in FUSED

    def _companions(self, index: int) -> list[int]:
        """What is drawn along because it is fused with this step: a rope and the store of its result, and so on."""
        nodes = self.nodes
        node, before = nodes[index], nodes[index - 1] if index else None
        found: list[int] = []
        rope = index
        if node.op == "mul" and before is not None and before.op == "rms_norm":
            for other in self._near(index, NEAR):
                if nodes[other].op == "rope" and nodes[other].src[0] is node:
                    found.append(other)
                    self.used[other] = True
                    rope = other
                    break
        if nodes[rope].op == "rope":
            found += self._stored(rope)
        if before is not None and (before.op, node.op) in (("mul_mat_id", "add_id"), ("mul_mat", "add")):
            wanted = "mul" if node.op == "add_id" else "add"
            for other in self._near(index, NEAR):
                last = nodes[other]
                if (
                    last.op == wanted
                    and last.src[0] is node
                    and (last.src[1].op == "none" or last.src[1] in self.placed)
                ):
                    found.append(other)
                    self.used[other] = True
                    break
        if before is not None and (before.op, node.op) == ("ssm_conv", "add"):
            for other in self._near(index, NEAR):
                if nodes[other].op == "unary" and nodes[other].src[0] is node:
                    found.append(other)
                    self.used[other] = True
                    break
        return found

    def _near(self, index: int, reach: int) -> range:
        return range(index + 1, min(index + reach, len(self.nodes)))

    def _stored(self, rope: int) -> list[int]:
        shown = -1
        for other in self._near(rope, 10):
            node = self.nodes[other]
            if shown == -1 and node.op == "view" and node.src[0] is self.nodes[rope]:
                shown = other
            elif shown != -1 and node.op == "set_rows" and node.src[0] is self.nodes[shown]:
                self.used[shown] = self.used[other] = True
                return [shown, other]
        return []
