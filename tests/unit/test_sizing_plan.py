"""Plans: what fits, in which order, and what is said where nothing does; sweeps beside them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from pytest_vram import sizing, specfile
from pytest_vram.errors import BadInput
from pytest_vram.settings import parse_budget
from pytest_vram.sizing import estimating, llama_cpp, llama_options, planning, sweep, turns
from pytest_vram.sizing.plans import Preference, Search
from pytest_vram.sizing.shape import ModelShape, Note
from pytest_vram.sizing.verdict import HOST, on, verdict
from pytest_vram.units import MIB
from tests.unit import sizing_models

Shapes = Callable[..., list[ModelShape]]


@pytest.fixture(scope="module")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> Shapes:
    """Models by name, read once."""
    folder = tmp_path_factory.mktemp("models")
    made = {
        "f16": sizing_models.dense_8b(folder / "f16.gguf", sizing_models.F16),
        "q8": sizing_models.dense_8b(folder / "q8.gguf", sizing_models.Q8),
        "q4": sizing_models.dense_8b(folder / "q4.gguf"),
        "moe": sizing_models.moe_30b(folder / "moe.gguf"),
    }
    read = {name: estimating.load(path) for name, path in made.items()}
    return lambda *names: [read[name] for name in names]


def search(
    models: list[ModelShape],
    budget: str,
    *,
    prefer: Preference = "speed",
    options: dict[str, Any] | None = None,
    **wishes: Any,
) -> Search:
    """A search on a device without a driver context of unknown size."""
    asked = {"minimum_context": None, "slots": 1, "host_memory": None, "reserve": 0, **wishes}
    given = llama_options.read({"device": "RPC0", **(options or {})})
    return planning.search_shapes(models, parse_budget(budget), planning.wishes_of(prefer=prefer, **asked), given)


CASES = [
    (("q4",), "8GB", {}),
    (("q4",), "4GB", {"minimum_context": 8192}),
    (("f16", "q8", "q4"), "8GB", {"minimum_context": 8192, "slots": 2, "host_memory": "16GB"}),
    (("moe",), "8GB", {"minimum_context": 16384}),
    (("moe",), "6GB", {"prefer": "context", "minimum_context": 4096}),
    (("q4",), "6GB", {"reserve": "500MB", "options": {"cache_type_k": "q5_1", "cache_type_v": "q5_1"}}),
]


@pytest.mark.parametrize(("names", "budget", "wishes"), CASES)
def test_every_plan_fits_and_keeps_the_wishes(
    shapes: Shapes, names: tuple[str, ...], budget: str, wishes: dict[str, Any]
) -> None:
    """A plan's own options, predicted again as one combination, are within every limit."""
    found = search(shapes(*names), budget, **wishes)
    assert found.plans
    for plan in found.plans:
        shape = next(one for one in shapes(*names) if one.source == plan.model)
        made = llama_cpp.predict(shape, plan.options)
        judged = verdict(made, found.budget, reserve=found.wishes.reserve)
        assert judged.fits == "yes"
        assert judged == plan.verdict
        assert made.at_most() == plan.estimate.at_most()
        assert plan.context >= (found.wishes.minimum_context or planning.LEAST_CONTEXT)
        assert plan.slots == found.wishes.slots
        assert made.settings["ctx_size"] == plan.context * plan.slots
        assert plan.command[:3] == ("llama-server", "--model", plan.model)
        if found.wishes.host_memory is not None:
            assert on(made, HOST) + plan.options.cache_ram * MIB <= found.wishes.host_memory


@pytest.mark.parametrize(("names", "budget", "wishes"), CASES)
def test_no_plan_could_have_a_longer_context(
    shapes: Shapes, names: tuple[str, ...], budget: str, wishes: dict[str, Any]
) -> None:
    """One step more of context is over a limit, or beyond what the model was trained with."""
    found = search(shapes(*names), budget, **wishes)
    for plan in found.plans:
        shape = next(one for one in shapes(*names) if one.source == plan.model)
        longer = msgspec.structs.replace(plan.options, ctx_size=(plan.context + turns.STEP) * plan.slots)
        made = llama_cpp.predict(shape, longer)
        over = verdict(made, found.budget, reserve=found.wishes.reserve).fits != "yes"
        host = found.wishes.host_memory is not None and on(made, HOST) > found.wishes.host_memory
        assert over or host or plan.context >= shape.context


def test_what_is_given_up_first_depends_on_the_preference(shapes: Shapes) -> None:
    """For speed the card keeps every layer at the price of the weights; for quality the largest file stays."""
    models = shapes("f16", "q8", "q4")
    speed = search(models, "8GB", minimum_context=8192).plans
    assert speed[0].model.endswith("q4.gguf")
    assert speed[0].cache_type == "f16"
    assert speed[0].layers_on_gpu == 32
    quality = search(models, "8GB", prefer="quality", minimum_context=8192).plans
    assert quality[0].model.endswith("f16.gguf")
    assert quality[0].cache_type == "f16"
    context = search(models, "8GB", prefer="context", minimum_context=8192).plans
    assert context[0].context == 131072


def test_experts_go_before_layers(shapes: Shapes) -> None:
    """A mixture that is too large keeps its layers on the card and gives up as few experts as it can."""
    best = search(shapes("moe"), "8GB", minimum_context=16384).plans[0]
    assert best.layers_on_gpu == best.layers == 48
    assert 0 < best.experts_on_cpu < 48
    fewer = llama_options.options_of(
        {
            "device": "RPC0",
            "ctx_size": 16384,
            "parallel": 1,
            "cache_type_k": best.cache_type,
            "cache_type_v": best.cache_type,
            "n_gpu_layers": 49,
            "n_cpu_moe": best.experts_on_cpu - 1,
        }
    )
    assert verdict(llama_cpp.predict(shapes("moe")[0], fewer), parse_budget("8GB")).fits == "no"


@pytest.mark.parametrize(
    ("names", "budget", "host"), [(("q8",), "8GB", "8GB"), (("q8", "q4"), "8GB", "12GB"), (("moe",), "6GB", "16GB")]
)
@pytest.mark.parametrize("slots", [1, 2])
def test_no_plan_leaves_room_on_the_card_for_more_of_itself(
    shapes: Shapes, names: tuple[str, ...], budget: str, host: str, slots: int
) -> None:
    """Where the host is the limit, the same context with one layer more on the card is over a limit, for every plan;
    so it is with the experts of one layer more."""
    found = search(shapes(*names), budget, host_memory=host, slots=slots)
    assert found.plans
    for plan in found.plans:
        shape = next(one for one in shapes(*names) if one.source == plan.model)
        more: dict[str, int] = {}
        if plan.options.n_gpu_layers is not None and plan.options.n_gpu_layers <= plan.layers:
            more["n_gpu_layers"] = plan.options.n_gpu_layers + 1
        elif plan.options.n_cpu_moe:
            more["n_cpu_moe"] = plan.options.n_cpu_moe - 1
        if more:
            made = llama_cpp.predict(shape, msgspec.structs.replace(plan.options, cache_ram=0, **more))
            over = verdict(made, found.budget).fits != "yes"
            assert over or on(made, HOST) > (found.wishes.host_memory or 0), (plan.command, more)


def test_no_minimum_means_4096(shapes: Shapes) -> None:
    """No wish is the wish for 4096 tokens: the same plans, and the number is in the result."""
    for name, budget in (("q4", "8GB"), ("q4", "4GB")):
        without, given = search(shapes(name), budget), search(shapes(name), budget, minimum_context=4096)
        assert without == given
        assert without.wishes.minimum_context == 4096


def test_a_limit_for_a_device_that_is_not_there_is_bad_use(shapes: Shapes) -> None:
    """The sentence names it and the devices that there are; the host is always one of them."""
    with pytest.raises(BadInput, match="limits gpu1, which this deployment does not have: its devices are gpu0, host"):
        search(shapes("q4"), "gpu0=8GB,gpu1=8GB")
    with pytest.raises(BadInput, match="limits gpu0.*its devices are host"):
        search(shapes("q4"), "gpu0=8GB", options={"device": "none"})


def test_a_budget_can_limit_the_host_too(shapes: Shapes) -> None:
    """`host=` is kept as `--host-memory` is, and alone it leaves the card free."""
    both = search(shapes("q8"), "gpu0=4GB,host=10GB")
    assert [plan.options for plan in both.plans] == [
        plan.options for plan in search(shapes("q8"), "4GB", host_memory="10GB").plans
    ]
    assert both.plans
    for plan in both.plans:
        assert plan.verdict.fits == "yes"
        assert on(plan.estimate, HOST) <= 10 * 10**9
    alone = search(shapes("q4"), "host=8GB").plans[0]
    assert alone.layers_on_gpu == alone.layers
    nothing = search(shapes("q4"), "gpu0=2GB,host=1GB")
    assert nothing.impossible is not None
    assert {one.wish for one in nothing.impossible.relaxed} <= {"minimum_context", "budget"}
    assert on(nothing.impossible.cheapest, HOST) + on(nothing.impossible.cheapest, "gpu0") > 3 * 10**9


def test_without_a_device_nothing_is_put_on_one(shapes: Shapes) -> None:
    """All of it is on the host: no layers are given up, and none are asked for."""
    for plan in search(shapes("q4"), "16GB", options={"device": "none"}).plans:
        assert "--n-gpu-layers" not in plan.command
        assert not any("layers" in lost for lost in plan.gives_up)
    assert search(shapes("moe"), "100GB", options={"device": "none"}).plans[0].experts_on_cpu == 0


def test_the_last_resort_gives_up_the_speed_of_prompts(shapes: Shapes) -> None:
    """A card too small for the staging of weights gets smaller batches and no op-offload, and it is said."""
    model = shapes("moe")[0]
    fixed: dict[str, Any] = {"n_gpu_layers": 49, "device": "RPC0"}
    asked = {"ctx_size": 4096, "parallel": 1, "n_cpu_moe": 48, "cache_type_k": "q4_0", "cache_type_v": "q4_0"}
    least = llama_cpp.predict(model, llama_options.options_of({**fixed, **asked})).at_most()["gpu0"]
    found = search([model], f"{least - MIB}B", options=fixed)
    assert found.plans
    for plan in found.plans:
        assert not plan.options.op_offload
        assert plan.options.ubatch_size < 512
        assert sum("speed of prompts" in lost for lost in plan.gives_up) == 2
    kept = search([model], f"{least - MIB}B", options={**fixed, "op_offload": True, "ubatch_size": 512})
    assert not kept.plans


def test_the_reasons_are_there_in_python(shapes: Shapes) -> None:
    """`sizing.search` says what `sizing.plan` leaves out where nothing fits."""
    path = shapes("q4")[0].source
    arguments: dict[str, Any] = {"minimum_context": 65536, "n_gpu_layers": 99, "device": "RPC0"}
    assert sizing.plan(path, "6GB", **arguments) == []
    found = sizing.search(path, "6GB", **arguments)
    assert isinstance(found, sizing.Search)
    assert found.impossible is not None
    assert found.impossible.missing > 0
    assert found.impossible.relaxed


def test_four_bits_of_cache_are_the_last_resort(shapes: Shapes) -> None:
    """They appear only where nothing else fits."""
    roomy = search(shapes("q4"), "8GB", minimum_context=32768)
    assert {plan.cache_type for plan in roomy.plans} <= {"f16", "q8_0"}
    tight = search(shapes("q4"), "8GB", minimum_context=131072, options={"n_gpu_layers": 99, "op_offload": False})
    assert {plan.cache_type for plan in tight.plans} <= {"q4_0"}


def test_given_settings_are_kept(shapes: Shapes) -> None:
    """What the user fixed is not searched."""
    options = {"cache_type_k": "q5_0", "cache_type_v": "q5_0", "n_gpu_layers": 10}
    for plan in search(shapes("q4"), "8GB", options=options).plans:
        assert plan.cache_type == "q5_0"
        assert plan.options.n_gpu_layers == 10
    for plan in search(shapes("moe"), "8GB", options={"n_cpu_moe": 40}).plans:
        assert plan.experts_on_cpu == 40


@pytest.mark.parametrize(
    ("names", "budget", "wishes", "relaxed"),
    [
        (("q4",), "2GB", {"minimum_context": 65536, "host_memory": "4GB"}, {"minimum_context", "host_memory"}),
        (("q4",), "6GB", {"minimum_context": 8192, "slots": 64, "options": {"n_gpu_layers": 99}}, {"minimum_context", "slots", "budget"}),
        (("q4",), "50MB", {"minimum_context": 4096, "options": {"n_gpu_layers": 99}}, {"budget"}),
        (("q4",), "5GB", {"reserve": "4.9GB", "options": {"n_gpu_layers": 99}}, {"reserve", "budget"}),
    ],
)  # fmt: skip
def test_the_impossible_says_what_is_missing(
    shapes: Shapes, names: tuple[str, ...], budget: str, wishes: dict[str, Any], relaxed: set[str]
) -> None:
    """Bytes that are missing in the cheapest configuration, and single wishes that make it fit when relaxed."""
    found = search(shapes(*names), budget, **wishes)
    assert not found.plans
    assert found.impossible is not None
    assert found.impossible.missing > 0
    assert f"{found.impossible.missing:,} bytes" in found.impossible.reason
    assert {one.wish for one in found.impossible.relaxed} == relaxed
    for one in found.impossible.relaxed:
        if one.wish == "budget":
            again = search(shapes(*names), one.after.replace(",", ""), **wishes)
        else:
            value: Any = int(one.after) if one.wish in ("minimum_context", "slots") else one.after.replace(",", "")
            again = search(shapes(*names), budget, **{**wishes, one.wish: 0 if one.wish == "reserve" else value})
        assert again.plans, one


def test_a_relaxed_context_is_the_longest(shapes: Shapes) -> None:
    """One step more than what is named does not fit either."""
    options = {"n_gpu_layers": 99}
    found = search(shapes("q4"), "6GB", minimum_context=65536, options=options)
    assert found.impossible is not None
    longest = next(int(one.after) for one in found.impossible.relaxed if one.wish == "minimum_context")
    assert search(shapes("q4"), "6GB", minimum_context=longest, options=options).plans
    assert not search(shapes("q4"), "6GB", minimum_context=longest + 256, options=options).plans


def test_what_is_unknown_is_never_promised(shapes: Shapes) -> None:
    """A model with a part of unknown size has no plans, and the reason says why."""
    shape = msgspec.structs.replace(shapes("q4")[0], notes=(Note(kind="unknown", bucket="kv", text="something new"),))
    found = search([shape], "80GB")
    assert found.plans == ()
    assert found.impossible is not None
    assert "kv" in found.impossible.reason


@pytest.mark.parametrize(
    ("wishes", "says"),
    [
        ({"minimum_context": 0}, "minimum_context = 0"),
        ({"slots": 0}, "slots = 0"),
        ({"slots": 1000}, "slots = 1000"),
        ({"prefer": "fast"}, "speed, quality or context"),
        ({"host_memory": "3g"}, "host_memory"),
        ({"reserve": -1}, "reserve = -1"),
        ({"options": {"ctx_size": 1}}, "say minimum_context"),
        ({"options": {"parallel": 1}}, "say slots"),
    ],
)
def test_bad_wishes_are_named(shapes: Shapes, wishes: dict[str, Any], says: str) -> None:
    """One sentence each."""
    with pytest.raises(BadInput, match=says):
        search(shapes("q4"), "8GB", **wishes)


def test_only_llama_server_is_planned() -> None:
    """Another engine is referred to estimate."""
    with pytest.raises(BadInput, match="use estimate with --budget"):
        planning.plan("x", "8GB", engine="vllm")
    with pytest.raises(BadInput, match="not known"):
        planning.plan("x", "8GB", engine="magic")


TIERS = [
    ("tier-4gb", "4GB", {"layers": 28, "embedding": 2048, "kv_heads": 8, "feed_forward": 6144, "types": sizing_models.Q4}),
    ("tier-6gb", "6GB", {"layers": 32, "embedding": 2560, "kv_heads": 5, "feed_forward": 8960, "types": sizing_models.Q8}),
    ("tier-8gb", "8GB", {"layers": 32, "embedding": 4096, "kv_heads": 8, "feed_forward": 11008, "types": sizing_models.Q4}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "budget", "dimensions"), TIERS)
def test_tier_profiles_fit_their_cards(tmp_path: Any, name: str, budget: str, dimensions: dict[str, Any]) -> None:
    """A usual model of the size that the profile is for fits the card, the driver's memory included."""
    spec = specfile.backend("x", {"profile": name}, origin="test", base=".")
    shape = estimating.load(sizing_models.dense(tmp_path / "m.gguf", **dimensions))
    made = estimating.of_shape(shape, engine="llama-server", options=dict(spec.options))
    judged = verdict(made, parse_budget(budget))
    assert judged.fits == "yes"
    assert "context" in made.buckets()


@pytest.mark.parametrize("name", specfile.profiles())
def test_profiles_have_options_that_are_known(name: str) -> None:
    """Every option of a profile for llama-server is one of its own."""
    spec = specfile.backend("x", {"profile": name}, origin="test", base=".")
    if spec.engine == "llama-server":
        llama_options.read(spec.options)


@pytest.mark.parametrize(
    ("over", "first", "last", "count"),
    [("context", "1024", "131072", 8), ("parallel", "1", "16", 5), ("cache-type", "f16", "q5_1", 7)],
)
def test_sweeps_have_usual_values(shapes: Shapes, over: str, first: str, last: str, count: int) -> None:
    """Up to what the model has, and each predicted by itself."""
    given = llama_options.read({"device": "RPC0", "ctx_size": 4096})
    points = sweep.sweep(shapes("q4")[0], given, over, budget=parse_budget("8GB"))
    assert (points[0].value, points[-1].value, len(points)) == (first, last, count)
    for point in points:
        assert point.estimate is not None
        assert point.verdict is not None
    if over == "context":
        sizes = [point.estimate.total()["gpu0"] for point in points if point.estimate is not None]
        assert sizes == sorted(sizes)


def test_a_sweep_over_experts(shapes: Shapes) -> None:
    """From none to all blocks; a dense model has nothing to sweep."""
    given = llama_options.read({"device": "RPC0", "ctx_size": 4096})
    points = sweep.sweep(shapes("moe")[0], given, "n-cpu-moe")
    assert [point.value for point in points] == ["0", "6", "12", "18", "24", "30", "36", "42", "48"]
    with pytest.raises(BadInput, match="no experts"):
        sweep.sweep(shapes("q4")[0], given, "n-cpu-moe")


def test_a_refused_value_has_its_reason(shapes: Shapes) -> None:
    """A combination that the engine does not start with is a row with the reason, not the end of the sweep."""
    given = llama_options.read({"device": "RPC0", "ctx_size": 4096, "flash_attn": "off"})
    points = sweep.sweep(shapes("q4")[0], given, "cache-type", ["f16", "q8_0"])
    assert points[0].estimate is not None
    assert points[1].estimate is None
    assert "flash attention" in points[1].refused


@pytest.mark.parametrize(
    ("over", "values", "says"),
    [
        ("magic", [], "context, parallel, cache-type, n-cpu-moe"),
        ("context", ["0"], "'0' cannot be a value of context"),
        ("context", ["8k"], "'8k'"),
        ("parallel", ["1000"], "from 1 to 256"),
        ("cache-type", ["q3"], "one of f32"),
    ],
)
def test_bad_sweeps_are_named(shapes: Shapes, over: str, values: list[str], says: str) -> None:
    """One sentence each."""
    with pytest.raises(BadInput, match=says):
        sweep.sweep(shapes("q4")[0], llama_options.read({"device": "RPC0"}), over, values)
