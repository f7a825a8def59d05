"""The search for a plan against trying every combination, over drawn models and budgets."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_vram.settings import parse_budget
from pytest_vram.sizing import gguf, gguf_shape, llama_cpp, llama_options, planning
from pytest_vram.sizing.shape import ModelShape
from pytest_vram.sizing.verdict import HOST, on, verdict
from pytest_vram.testing import recipes

GIVEN = llama_options.read({"device": "RPC0"})
_shapes: dict[tuple[Any, ...], ModelShape] = {}


def shape(folder: Path, layers: int, experts: int, kv_heads: int, feed_forward: int) -> ModelShape:
    """A small model of these dimensions, read once."""
    key = (layers, experts, kv_heads, feed_forward)
    if key not in _shapes:
        common: dict[str, Any] = {"layers": layers, "kv_heads": kv_heads, "context": 1024, "tokenizer": "none"}
        if experts:
            recipe = recipes.qwen3moe(experts=experts, expert_feed_forward=feed_forward, **common)
        else:
            recipe = recipes.llama(feed_forward=feed_forward, **common)
        path = recipe.write(folder / f"{'-'.join(map(str, key))}.gguf")
        _shapes[key] = gguf_shape.shape_of(gguf.read(path))
    return _shapes[key]


@settings(max_examples=25, deadline=None)
@given(
    layers=st.integers(1, 4),
    experts=st.sampled_from([0, 4]),
    kv_heads=st.sampled_from([1, 4]),
    feed_forward=st.sampled_from([256, 1024]),
    share=st.floats(0.02, 1.1),
    host_share=st.none() | st.floats(0.3, 1.3),
    context=st.sampled_from([256, 1024]),
    slots=st.integers(1, 2),
)
def test_a_plan_is_found_where_one_exists(
    tmp_path_factory: Any,
    layers: int,
    experts: int,
    kv_heads: int,
    feed_forward: int,
    share: float,
    host_share: float | None,
    context: int,
    slots: int,
) -> None:
    """Whenever some combination of cache type, experts and layers fits the card, so does the best plan, and no other
    keeps more layers on the card; what is returned keeps every limit, the host's included.
    """
    folder = tmp_path_factory.getbasetemp() / "plans"
    folder.mkdir(exist_ok=True)
    model = shape(folder, layers, experts, kv_heads, feed_forward)

    def options(cache: str, moved: int, kept: int) -> llama_options.LlamaOptions:
        return msgspec.structs.replace(
            GIVEN.options,
            ctx_size=context * slots,
            parallel=slots,
            cache_type_k=cache,
            cache_type_v=cache,
            n_cpu_moe=moved,
            n_gpu_layers=kept,
        )

    whole = on(llama_cpp.predict(model, options("f16", 0, layers + 1)), "gpu0")
    budget = parse_budget(f"{max(1, round(whole * share))}B")
    on_host = on(llama_cpp.predict(model, options("f16", 0, 0)), HOST)
    host = None if host_share is None else max(1, round(on_host * host_share))
    wishes = planning.wishes_of(minimum_context=context, slots=slots, host_memory=host, reserve=0, prefer="speed")
    found = planning.search_shapes([model], budget, wishes, GIVEN)
    for plan in found.plans:
        made = llama_cpp.predict(model, plan.options)
        assert verdict(made, budget).fits == "yes"
        assert host is None or on(made, HOST) <= host
        assert plan.context >= context
        moved, kept = plan.options.n_cpu_moe, plan.options.n_gpu_layers or 0
        better = [(moved - 1, kept)] * (moved > 0) + [(moved, kept + 1)] * (kept <= layers)
        for moved, kept in better:
            other = msgspec.structs.replace(plan.options, n_cpu_moe=moved, n_gpu_layers=kept, cache_ram=0)
            made = llama_cpp.predict(model, other)
            held = verdict(made, budget).fits == "yes" and (host is None or on(made, HOST) <= host)
            assert not held, "with more on the card the same context fits as well"
    assert (found.impossible is None) == bool(found.plans)
    if host is not None:
        return
    fitting = [
        kept
        for cache, moved, kept in itertools.product(
            ("f16", "q8_0"), range(layers + 1 if experts else 1), range(layers + 2)
        )
        if verdict(llama_cpp.predict(model, options(cache, moved, kept)), budget).fits == "yes"
    ]
    if fitting:
        assert found.plans
        assert found.plans[0].layers_on_gpu >= min(max(fitting) - 1, layers)
