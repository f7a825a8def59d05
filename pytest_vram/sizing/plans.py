"""What a search for settings asks for and finds, and which of what it finds is better."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from pytest_vram.sizing.options import LlamaOptions
from pytest_vram.sizing.prediction import Estimate, Verdict
from pytest_vram.spec import Limits

Preference = Literal["speed", "quality", "context"]
#: From the best. Four bits are tried only where nothing else fits: they cost accuracy.
CACHE_LADDER = ("f16", "q8_0")
LAST_RESORT = "q4_0"


class Wishes(msgspec.Struct, frozen=True, kw_only=True):
    """What a plan must keep.

    :ivar minimum_context: tokens that each slot can hold; ``None``: as if 4096 were given. A search
        says which number it took.
    :ivar slots: requests at once. :ivar host_memory: bytes that the host has for it; ``None``: no limit.
    :ivar reserve: bytes that stay free on each card. :ivar prefer: what is given up last.
    """

    minimum_context: int | None = None
    slots: int = 1
    host_memory: int | None = None
    reserve: int = 0
    prefer: Preference = "speed"


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Settings that fit, with what they are predicted to take.

    :ivar context: tokens of each slot. :ivar cache_type: of K and V. :ivar experts_on_cpu: blocks whose experts are in
        host memory. :ivar layers_on_gpu: of ``layers`` blocks. :ivar gives_up: sentences, empty for the best case.
    """

    model: str
    context: int
    slots: int
    cache_type: str
    experts_on_cpu: int
    layers_on_gpu: int
    layers: int
    options: LlamaOptions
    estimate: Estimate
    verdict: Verdict
    gives_up: tuple[str, ...] = ()

    @property
    def command(self) -> tuple[str, ...]:
        """The engine's command line."""
        return self.estimate.command


class Relaxed(msgspec.Struct, frozen=True, kw_only=True):
    """One wish, and what it must become so that something fits with all others kept."""

    wish: str
    before: str
    after: str


class Impossible(msgspec.Struct, frozen=True, kw_only=True):
    """Nothing fits.

    :ivar missing: bytes over the limit in the cheapest configuration. :ivar device: where they are missing.
    :ivar cheapest: what that configuration is predicted to take. :ivar relaxed: single wishes that would make it fit,
        the smallest step first. :ivar reason: one sentence.
    :ivar unknown: buckets because of which nothing can be promised, although nothing known is missing.
    """

    missing: int
    device: str
    cheapest: Estimate
    relaxed: tuple[Relaxed, ...]
    reason: str
    unknown: tuple[str, ...] = ()


class Search(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a search: plans, best first, or why there is none. :ivar wishes: with what stood in for none."""

    budget: Limits
    wishes: Wishes
    plans: tuple[Plan, ...] = ()
    impossible: Impossible | None = None


def cpu_layers(one: Plan) -> int:
    """Layers that left the card; none where there is no card."""
    return one.layers - one.layers_on_gpu if one.options.devices else 0


def _cache_rank(one: Plan) -> int:
    order = (*CACHE_LADDER, LAST_RESORT)
    return order.index(one.cache_type) if one.cache_type in order else len(order)


def rank(one: Plan, wishes: Wishes, files: dict[str, int]) -> tuple[int, ...]:
    """What sorts first is kept longest."""
    speed = (cpu_layers(one), one.experts_on_cpu)
    quality = (_cache_rank(one), -files[one.model])
    wanted = wishes.minimum_context or one.estimate.model.trained_context
    short = max(0, wanted - one.context)
    if wishes.prefer == "quality":
        return (-files[one.model], _cache_rank(one), *speed, -one.context)
    if wishes.prefer == "context":
        return (-one.context, *speed, *quality)
    return (*speed, short, *quality, -one.context)


def undominated(found: Sequence[Plan], files: dict[str, int]) -> list[Plan]:
    """Without plans that another one beats or equals in everything."""

    def figures(one: Plan) -> tuple[int, ...]:
        return (cpu_layers(one), one.experts_on_cpu, -one.context, _cache_rank(one), -files[one.model])

    kept: list[Plan] = []
    for one in sorted(found, key=figures):
        mine = figures(one)
        if not any(all(a <= b for a, b in zip(figures(other), mine, strict=True)) for other in kept):
            kept.append(one)
    return kept


def with_losses(one: Plan, files: dict[str, int], largest_file: int, base: LlamaOptions) -> Plan:
    lost: list[str] = []
    if files[one.model] < largest_file:
        lost.append("a smaller file of the model")
    if one.cache_type != CACHE_LADDER[0]:
        lost.append(f"a {one.cache_type} KV cache")
    trained = one.estimate.model.trained_context
    if trained and one.context < trained:
        lost.append(f"context beyond {one.context} of {trained} tokens")
    if one.experts_on_cpu:
        lost.append(f"experts of {one.experts_on_cpu} of {one.layers} layers computed on the CPU")
    if cpu_layers(one):
        lost.append(f"{cpu_layers(one)} of {one.layers} layers on the CPU")
    if base.mmap and not one.options.mmap:
        lost.append("a mapped file, whose pages the system can drop (no-mmap)")
    if one.options.ubatch_size < base.ubatch_size:
        lost.append(f"speed of prompts: {one.options.ubatch_size} tokens at once instead of {base.ubatch_size}")
    if base.op_offload and not one.options.op_offload:
        lost.append("speed of prompts: what is on the CPU is computed there")
    return msgspec.structs.replace(one, gives_up=tuple(lost))
