"""Advice from a model's files: its order, its savings, and what would do nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pytest_vram.advice import Advice, Goal, Saving, advise
from pytest_vram.advice.deployed import enough
from pytest_vram.advice.goal import missing, of_limits
from pytest_vram.advice.knobs import KNOBS, ranked
from pytest_vram.advice.records import first_sufficient, joins
from pytest_vram.errors import BadInput
from pytest_vram.settings import parse_budget
from pytest_vram.sizing import changes, estimating, llama_cpp, llama_options
from pytest_vram.sizing.prediction import Estimate
from pytest_vram.sizing.shape import Layer, ModelShape
from pytest_vram.sizing.verdict import verdict
from pytest_vram.testing import attention_recipes, hybrid_recipes, recipes
from pytest_vram.units import MIB
from tests.unit import sizing_models

Shapes = Callable[[str], ModelShape]


@pytest.fixture(scope="module")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> Shapes:
    """Models by name, read once."""
    folder = tmp_path_factory.mktemp("models")
    made: dict[str, Callable[[Path], Path]] = {
        "f16": lambda path: sizing_models.dense_8b(path, sizing_models.F16),
        "q4": sizing_models.dense_8b,
        "moe": sizing_models.moe_30b,
        "leading": recipes.deepseek2(layers=12, leading_dense=3, kv_rank=512, rope=64, nope=128, value=128).write,
        "windows": attention_recipes.gpt_oss().write,
        "recurrent": hybrid_recipes.mamba2().write,
        "encoder": attention_recipes.bert().write,
    }
    known: dict[str, ModelShape] = {}

    def shape(name: str) -> ModelShape:
        if name not in known:
            known[name] = estimating.load(made[name](folder / f"{name}.gguf"))
        return known[name]

    return shape


def under(shape: ModelShape, budget: str, bucket: str | None = None, **options: Any) -> tuple[Advice, ...]:
    """Advice for a deployment under a budget, of which this bucket grew (the largest one where none is named)."""
    limits = parse_budget(budget)

    def goal(made: Estimate) -> Goal:
        return of_limits(made, verdict(made, limits), limits, bucket=bucket)

    return advise(shape, {"device": "RPC0", **options}, goal)


def by_setting(advice: tuple[Advice, ...], effect: str = "saves") -> dict[str, Advice]:
    """The first advice about each setting."""
    found: dict[str, Advice] = {}
    for one in advice:
        if one.effect == effect:
            found.setdefault(one.setting, one)
    return found


@pytest.mark.parametrize(
    ("bucket", "first"),
    [
        ("kv", "parallel"),
        ("compute", "flash-attn"),
        ("weights", "model"),
        ("experts", "model"),
        ("projector", "mmproj-offload"),
        ("draft", "cache-type-k-draft"),
    ],
)
def test_settings_of_the_bucket_that_failed_come_first(bucket: str, first: str) -> None:
    """Then all others in the order of what they cost; no bucket brings layers, or a cache of four bits, forward."""
    order = ranked(bucket)
    own = [knob for knob in order if bucket in knob.buckets]
    assert order[: len(own)] == own
    assert [knob for knob in order if knob not in own] == [knob for knob in KNOBS if knob not in own]
    assert {knob.name for knob in own} & {"n-gpu-layers", "cache-4", "kv-offload", "spec-type"} <= {"spec-type"}
    names = {"parallel": "flash-attn", "cache-type-k-draft": "draft-cache", "model": own[0].name}
    assert own[0].name == names.get(first, first)


def test_a_failing_cache_leads_to_the_cache(shapes: Shapes) -> None:
    """Its type, then the context, before anything that costs speed; each with what it saves on the device."""
    advice = under(shapes("q4"), "8GB", "kv", ctx_size=32768, parallel=1)
    assert [one.setting for one in advice[:2]] == ["cache-type-k, cache-type-v", "ctx-size"]
    assert advice[0].flag == "--cache-type-k q8_0 --cache-type-v q8_0"
    assert advice[0].bucket == "kv"
    assert advice[0].saves_by_bucket["kv"] == (4096 - 2176) * MIB
    assert "`K (q8_0)`" in advice[0].proof
    assert "2,176.00 MiB" in advice[0].proof
    assert (advice[0].enough, advice[0].source) == (True, "estimate")


def test_savings_are_those_of_the_whole_deployment(shapes: Shapes) -> None:
    """Alone and after the others each is a difference of two predictions, so that the later ones add up to the whole."""
    shape, options = shapes("q4"), {"ctx_size": 32768, "parallel": 1, "device": "RPC0"}
    advice = under(shape, "3GB", **options)
    saving = [one for one in advice if one.effect == "saves"]
    start = llama_cpp.predict(shape, llama_options.options_of(options)).total()["gpu0"]
    assert all(one.saves_bytes is not None and one.saves_bytes_after is not None for one in saving)
    cache = by_setting(advice)["cache-type-k, cache-type-v"]
    context = by_setting(advice)["ctx-size"]
    assert context.saves_bytes is not None
    assert context.saves_bytes_after is not None
    assert cache.saves_bytes is not None
    # Half of the context saves half of what is left of the cache, not half of what there was.
    assert context.saves_bytes_after.bytes < context.saves_bytes.bytes
    upto = saving[: saving.index(context) + 1]
    changed = {**options, "ctx_size": int(context.after), "cache_type_k": "q8_0", "cache_type_v": "q8_0"}
    ubatch = next((one for one in upto if one.setting == "ubatch-size"), None)
    if ubatch is not None:
        changed["ubatch_size"] = int(ubatch.after)
    together = llama_cpp.predict(shape, llama_options.options_of(changed)).total()["gpu0"]
    assert start - sum(one.saves_bytes_after.bytes for one in upto if one.saves_bytes_after) == together


def test_enough_is_what_the_verdict_says(shapes: Shapes) -> None:
    """What is said to be enough holds the limit, to the step: the next longer context does not."""
    limits = parse_budget("7GB")
    advice = under(shapes("q4"), "7GB", ctx_size=32768, parallel=1)
    context = by_setting(advice)["ctx-size"]
    assert context.enough
    for more, fits in ((0, "yes"), (changes.STEP, "no")):
        options = {"device": "RPC0", "ctx_size": int(context.after) + more, "parallel": 1}
        made = llama_cpp.predict(shapes("q4"), llama_options.options_of(options))
        assert verdict(made, limits).fits == fits


def test_where_no_change_is_enough_alone_several_are(shapes: Shapes) -> None:
    """Values later in the list are then those that are enough together with what comes before."""
    advice = under(shapes("q4"), "3GB", ctx_size=32768, parallel=1)
    chosen = first_sufficient(advice)
    assert chosen
    assert chosen[-1].enough or chosen[-1].enough_after
    for one in chosen[:-1]:
        assert joins(one)


def test_a_short_context_is_no_advice(shapes: Shapes) -> None:
    """Tokens that nobody can work with are not proposed, whatever they would save."""
    advice = under(shapes("q4"), "4.6GB", ctx_size=32768, parallel=1)
    assert int(by_setting(advice)["ctx-size"].after) >= 2048


def test_experts_first_where_weights_are_too_much(shapes: Shapes) -> None:
    """The fewest layers of experts that are enough go to the CPU; what they take of the host is said."""
    advice = under(shapes("moe"), "8GB", ctx_size=4096, parallel=1, n_gpu_layers=99)
    moved = by_setting(advice)["n-cpu-moe"]
    assert advice[0] is moved
    assert moved.enough
    assert moved.takes["host"] >= moved.saves_by_bucket["experts"] > 0
    assert "host memory takes" in moved.cost
    assert "stays as it is" in moved.proof


@pytest.mark.parametrize(
    ("name", "options", "setting", "reason"),
    [
        ("q4", {"parallel": 4, "kv_unified": True}, "parallel", "tokens in all, which the slots share"),
        ("q4", {"parallel": 4}, "parallel", "tokens in all, which the slots divide"),
        ("q4", {"parallel": 1}, "n-cpu-moe", "the model is dense"),
        ("leading", {"parallel": 1}, "n-cpu-moe", "the first 3 have no experts"),
        ("q4", {"parallel": 1, "flash_attn": "off"}, "cache-type-v", "needs flash attention"),
        ("encoder", {"embeddings": True}, "cache-type-k, cache-type-v", "an encoder keeps no KV cache"),
        ("encoder", {"embeddings": True}, "ctx-size", "the context sizes nothing"),
        ("recurrent", {"parallel": 1}, "ctx-size", "no KV cache but a recurrent state"),
        ("recurrent", {"parallel": 1}, "cache-type-k, cache-type-v", "whose type is fixed"),
    ],
)  # fmt: skip
def test_what_would_do_nothing_is_named(
    shapes: Shapes, name: str, options: dict[str, Any], setting: str, reason: str
) -> None:
    """Settings that people turn in such a place, with the reason why it does not help."""
    given = {"ctx_size": 8192, "n_gpu_layers": 99, **options}
    made = llama_cpp.predict(shapes(name), llama_options.options_of({"device": "RPC0", **given}))
    advice = under(shapes(name), f"{made.total()['gpu0'] * 3 // 4}B", **given)
    one = by_setting(advice, "nothing")[setting]
    assert reason in one.why
    assert one.saves_bytes is None
    assert one.enough is False
    assert setting == "n-cpu-moe" or setting not in by_setting(advice)


def test_experts_beyond_the_dense_layers_do_move(shapes: Shapes) -> None:
    """Beside the numbers that do nothing stands the one that helps."""
    shape = shapes("leading")
    given = {"ctx_size": 512, "n_gpu_layers": 99, "parallel": 1}
    made = llama_cpp.predict(shape, llama_options.options_of({"device": "RPC0", **given}))
    advice = under(shape, f"{made.total()['gpu0'] * 9 // 10}B", **given)
    assert int(by_setting(advice)["n-cpu-moe"].after) > shape.leading_dense
    assert by_setting(advice, "nothing")["n-cpu-moe"].after == str(shape.leading_dense)


def test_a_ubatch_is_of_no_use_where_weights_fill_the_card(shapes: Shapes) -> None:
    """What it saves is too little beside what is missing, and that is said with both figures."""
    advice = under(shapes("moe"), "4GB", ctx_size=4096, parallel=1, n_gpu_layers=99)
    one = by_setting(advice, "nothing")["ubatch-size"]
    assert "are missing" in one.why
    assert "experts take" in one.why


def test_windows_are_not_kept_whole(shapes: Shapes) -> None:
    """Where all tokens of every window were asked for, giving that up comes before the cache's type."""
    shape = shapes("windows")
    given = {"ctx_size": 32768, "parallel": 1, "swa_full": True, "n_gpu_layers": 99}
    made = llama_cpp.predict(shape, llama_options.options_of({"device": "RPC0", **given}))
    advice = under(shape, f"{made.total()['gpu0'] * 3 // 4}B", "kv", **given)
    assert advice[0].setting == "swa-full"
    assert advice[0].flag == "without --swa-full"


def test_several_cards(shapes: Shapes) -> None:
    """Layers move to the card that has room, without any override; copies for a pipeline can go."""
    advice = under(
        shapes("moe"), "gpu0=9GB,gpu1=14GB", ctx_size=8192, parallel=1, device="CUDA0,CUDA1", n_gpu_layers=99
    )
    found = by_setting(advice)
    assert found["tensor-split"].enough
    assert found["tensor-split"].takes["gpu1"] > 0
    assert found["override-tensor"].flag == "--override-tensor '^$=CPU'"
    assert found["override-tensor"].saves_by_bucket["compute"] > 0
    full = under(shapes("moe"), "gpu0=9GB,gpu1=10GB", ctx_size=8192, parallel=1, device="CUDA0,CUDA1", n_gpu_layers=99)
    assert "tensor-split" not in by_setting(full) or not by_setting(full)["tensor-split"].enough


def test_on_the_host_the_mapping_goes_first(shapes: Shapes) -> None:
    """It costs nothing but the file's pages."""
    advice = under(shapes("q4"), "8GB", ctx_size=8192, parallel=1, device="none")
    assert (advice[0].setting, advice[0].flag, advice[0].device) == ("mmap", "--no-mmap", "host")
    assert "n-gpu-layers" not in by_setting(advice)


def test_a_measured_shortage_counts_the_least_that_is_saved(shapes: Shapes) -> None:
    """With a range on either side only a saving that is certain is enough."""
    shape = shapes("q4")
    options = {"ctx_size": 16384, "parallel": 1, "device": "CUDA0"}
    advice = advise(shape, options, missing("gpu0", 500 * MIB, bucket="kv"))
    for one in advice:
        if one.enough:
            assert one.saves_bytes is not None
            assert one.saves_bytes.bytes >= 500 * MIB
    assert advice[0].setting == "cache-type-k, cache-type-v"


def test_what_is_not_all_is_never_enough(shapes: Shapes) -> None:
    """A boot that broke off may be refused more later on; a shortage that is an upper end may need less."""
    shape, options = shapes("q4"), {"ctx_size": 16384, "parallel": 1, "device": "RPC0"}
    part = Goal(device="gpu0", rooms={"gpu0": -MIB}, measured=True, complete=False)
    assert {one.enough for one in advise(shape, options, part) if one.effect == "saves"} == {None}
    start = llama_cpp.predict(shape, llama_options.options_of(options))
    most = Goal(device="gpu0", rooms={"gpu0": -(1 << 50)}, measured=True, at_most=True)
    assert enough(start, start, most) is None
    assert enough(start, start, msgspec.structs.replace(most, at_most=False)) is False


def test_first_sufficient_leaves_out_what_did_not_join() -> None:
    """A change that contradicts those before it, or saves nothing after them, is not made on the way to the end."""

    def one(setting: str, after: int | None, **more: Any) -> Advice:
        saves = None if after is None else Saving(bytes=after)
        return Advice(
            setting=setting, before="", after="", effect="saves", why="", source="rule", saves_bytes_after=saves, **more
        )

    rows = [one("a", 5), one("b", None), one("c", 0), one("d", 7, enough_after=True), one("e", 1, enough=False)]
    assert [row.setting for row in first_sufficient(rows)] == ["a", "d"]
    assert first_sufficient(rows[:3]) == ()
    assert [row.setting for row in first_sufficient([*rows, one("f", 1, enough=True)])] == ["f"]


def test_options_of_another_engine_are_refused(shapes: Shapes) -> None:
    """Checked options of llama-server are no options of vLLM."""
    with pytest.raises(BadInput, match="options of llama-server"):
        advise(shapes("q4"), llama_options.read({}), missing("gpu0", 1), engine="vllm")


def hf_model() -> ModelShape:
    """The caches of Llama-3-8B, without its weights."""
    layer = Layer(heads=32, kv_heads=8, key_length=128, value_length=128, k_row=1024, v_row=1024)
    return ModelShape(source="m", format="config", architecture="x", context=131072, layers=(layer,) * 32)


def test_a_cache_of_transformers_by_its_kind() -> None:
    """Every row is one more estimate: a quarter of the sequences saves three quarters."""
    options = {"max_length": 32768, "batch_size": 4}
    advice = advise(hf_model(), options, missing("gpu0", 3 << 30), engine="transformers")
    found = by_setting(advice)
    assert found["batch_size"].saves_bytes == Saving(bytes=3 * 32768 * 131072)
    assert found["batch_size"].flag == "batch_size=1"
    assert found["max_length"].after == str(32768 * 13 // 16)
    assert found["max_length"].enough
    assert "dtype" in by_setting(advice, "nothing")


def test_vllm_fills_its_share_whatever_a_token_takes() -> None:
    """On a card of a known size only the share saves device memory; without one nobody can say how much that is."""
    card = {"max_model_len": 32768, "device_memory": 24 << 30, "gpu_memory_utilization": 0.9}
    advice = advise(hf_model(), card, missing("gpu0", 1 << 30), engine="vllm")
    share = by_setting(advice)["gpu-memory-utilization"]
    assert share.after == "0.85"
    assert share.saves_bytes is not None
    assert share.saves_bytes.bytes == pytest.approx(0.05 * (24 << 30), abs=4 * MIB)
    assert "filled with more cache" in by_setting(advice, "nothing")["kv-cache-dtype"].why
    unknown = advise(hf_model(), {"max_model_len": 32768}, missing("gpu0", 1 << 30), engine="vllm")
    share = by_setting(unknown)["gpu-memory-utilization"]
    assert (share.source, share.saves_bytes) == ("rule", None)
    assert by_setting(unknown)["kv-cache-dtype"].saves_bytes == Saving(bytes=2 << 30)
    assert by_setting(unknown)["enforce-eager"].source == "rule"


def test_sglang_in_its_own_words() -> None:
    """The same with its names."""
    card = {"context_length": 32768, "device_memory": 24 << 30, "mem_fraction_static": 0.9}
    advice = advise(hf_model(), card, missing("gpu0", 1 << 30), engine="sglang")
    assert by_setting(advice)["mem-fraction-static"].flag == "--mem-fraction-static 0.85"
    assert "tp-size" in {one.setting for one in advice}
