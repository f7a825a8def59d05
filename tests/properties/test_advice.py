"""Advice for drawn deployments: whatever the model and its settings, figures and answers are those of the estimator."""

from __future__ import annotations

import random
import shlex
from pathlib import Path
from typing import Any

import msgspec
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pytest_vram.advice import advise
from pytest_vram.advice.booted import of_boot
from pytest_vram.advice.goal import missing, of_limits
from pytest_vram.advice.records import first_sufficient, joins
from pytest_vram.bootlog.boot import Boot, Failure
from pytest_vram.errors import BadInput
from pytest_vram.ledger import BUCKETS, Entry
from pytest_vram.sizing import engine_options, estimating, llama_cpp, llama_options
from pytest_vram.sizing.changes import requantised
from pytest_vram.sizing.verdict import verdict
from pytest_vram.spec import Limits
from tests.rehearsal import sizing_boots

ARCHITECTURES = ("llama", "qwen3moe", "gemma3", "deepseek2", "mamba", "bert", "jamba", "gpt-oss")


def applied(options: dict[str, object], flag: str) -> dict[str, object]:
    """Options with a flag as advice writes it."""
    kept, _, gone = flag.partition("without ")
    found, rest = engine_options.pairs(shlex.split(kept))
    assert not rest, flag
    changed = {**options, **found}
    for name in shlex.split(gone):
        if name.startswith("--"):
            del changed[name.removeprefix("--")]
    return changed


@given(seed=st.integers(0, 1 << 20), architecture=st.sampled_from(ARCHITECTURES), part=st.floats(0.2, 0.99))
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_saving_is_that_of_the_changed_deployment(
    tmp_path: Path, seed: int, architecture: str, part: float
) -> None:
    """Read back from its flag, each change saves what it says, and what is enough holds the limit."""
    one = sizing_boots.draw(architecture, random.Random(f"{seed}"))
    shape = estimating.load(one.recipe.write(tmp_path / "model.gguf"))
    words = [word for word in one.arguments if "RPC0" not in word] if "--override-tensor" not in one.arguments else []
    options: dict[str, object] = dict(engine_options.pairs(words)[0])
    options["device"] = "none" if not one.gpus else ",".join(f"RPC{index}" for index in range(one.gpus))
    options["mmap"] = False
    asked = llama_options.read(options)
    try:
        start = llama_cpp.predict(shape, asked.options, given=asked)
    except BadInput:
        return
    device = max(start.at_most(), key=lambda label: start.at_most()[label])
    if device == "host" and start.devices:
        return
    limits = Limits(text="", by_label={device: max(1, round(start.at_most()[device] * part))})
    judged = verdict(start, limits)
    if judged.fits == "yes":
        return
    advice = advise(shape, asked, of_limits(start, judged, limits))
    for row in advice:
        if row.effect != "saves":
            assert row.why
            assert not row.enough
            continue
        changed = requantised(shape, row.after) if row.setting == "model" else shape
        flags = options if row.setting == "model" else applied(options, row.flag)
        new = llama_options.read(flags)
        made = llama_cpp.predict(changed, new.options, given=new)
        assert row.saves_bytes is not None
        ends = (
            start.total().get(device, 0) - made.total().get(device, 0),
            judged.at_most - made.at_most().get(device, 0),
        )
        assert (row.saves_bytes.bytes, row.saves_bytes.upper) == (min(ends), max(ends))
        assert sum(row.saves_by_bucket.values()) == ends[0]
        if row.enough:
            assert verdict(made, limits).fits == "yes"
        elif row.enough is False:
            assert verdict(made, limits).fits != "yes"
    chosen = first_sufficient(advice)
    assert all(joins(row) for row in chosen[:-1])


@given(
    entries=st.lists(
        st.tuples(st.sampled_from(BUCKETS), st.sampled_from(["gpu0", "gpu1", "host"]), st.integers(0, 1 << 42)), max_size=8
    ),
    facts=st.dictionaries(
        st.sampled_from(
            ["context", "slots", "ubatch", "layers_offloaded", "layers_offloadable", "cache_type_k", "cache_type_v",
             "flash_attention", "parameters", "model_bytes", "experts", "sliding_window", "pipeline_copies", "kv_unified",
             "memory_share", "kv_available_bytes", "allocated_bytes", "reserved_bytes", "quantization", "mlock"]
        ),
        st.one_of(st.integers(-(1 << 40), 1 << 45), st.booleans(), st.sampled_from(["f16", "q8_0", "q4_0", "disabled", "x"]), st.floats()),
    ),
    failure=st.builds(
        Failure,
        kind=st.sampled_from(["out_of_memory", "host_out_of_memory", "host_oom_killed", "kv_planning", "precheck", "crash"]),
        certainty=st.sampled_from(["certain", "likely", "unknown"]),
        text=st.text(max_size=40),
        phase=st.sampled_from([None, "weights", "kv", "reserve", "decode"]),
        bucket=st.sampled_from([None, *BUCKETS]),
        device=st.sampled_from([None, "gpu0", "gpu1", "host"]),
        bytes=st.one_of(st.none(), st.integers(0, 1 << 45)),
        free=st.one_of(st.none(), st.integers(0, 1 << 45)),
        total=st.one_of(st.none(), st.integers(0, 1 << 45)),
        absurd=st.booleans(),
    ),
    engine=st.sampled_from(["llama-server", "ik_llama", "koboldcpp", "ollama", "vllm", "sglang", "transformers", "other"]),
)  # fmt: skip
@settings(max_examples=300, deadline=None)
def test_no_log_breaks_it(
    entries: list[tuple[str, str, int]], facts: dict[str, object], failure: Failure, engine: str
) -> None:
    """Whatever a grammar made of a log: no exception, no saving beyond what is there, no range upside down."""
    rows = tuple(
        Entry(bucket=bucket, device=device, bytes=size, source="engine-log", detail="model")  # type: ignore[arg-type]
        for bucket, device, size in entries
    )
    log = Boot(
        engine=engine, era="", evidence="partial", entries=rows, facts=facts, failure=failure,
        devices={"gpu0": "CUDA0", "gpu1": "CUDA1", "host": "CPU"},
    )  # fmt: skip
    held = sum(size for _, _, size in entries) + (failure.bytes or 0) + (failure.total or 0)
    for one in of_boot(log):
        msgspec.json.encode(one)
        assert one.why
        for saves in (one.saves_bytes, one.saves_bytes_after):
            if saves is not None:
                assert saves.bytes <= saves.upper
                assert one.effect == "saves"
                assert saves.bytes <= held or "allocated_bytes" in facts
        if one.source == "rule":
            assert one.saves_bytes is None
        if one.enough and one.saves_bytes is not None and failure.bytes is not None:
            assert failure.certainty == "certain"


def test_a_goal_of_nothing_is_reached_by_everything(tmp_path: Path) -> None:
    """Where nothing is missing, no change is needed and each one is enough."""
    one = sizing_boots.draw("llama", random.Random("goal"))
    shape = estimating.load(one.recipe.write(tmp_path / "model.gguf"))
    advice = advise(shape, {"device": "RPC0", "ctx-size": 4096}, missing("gpu0", 0))
    assert {row.enough for row in advice if row.effect == "saves"} == {True}


_FACTS = st.fixed_dictionaries(
    {},
    optional={
        "context": st.integers(0, 1 << 20),
        "slots": st.integers(0, 64),
        "ubatch": st.integers(0, 8192),
        "layers": st.integers(0, 100),
        "layers_offloaded": st.integers(0, 101),
        "layers_offloadable": st.integers(0, 101),
        "kv_layers": st.integers(0, 100),
        "kv_cells_sliding": st.integers(0, 4096),
        "kv_bytes": st.integers(0, 1 << 36),
        "experts": st.integers(0, 256),
        "pipeline_copies": st.integers(0, 4),
        "cache_type_k": st.sampled_from(["f16", "f32", "q8_0", "q4_0", "unheard_of"]),
        "flash_attention": st.sampled_from(["enabled", "disabled"]),
        "fit_free_bytes": st.integers(0, 1 << 37),
        "devices_free_bytes": st.lists(st.integers(0, 1 << 37), max_size=2),
        "free_bytes": st.just({"gpu0": 1 << 33}),
        "parameters": st.integers(0, 1 << 40),
        "model_bytes": st.integers(0, 1 << 40),
    },
)
_BUCKETS = st.sampled_from(["weights", "kv", "recurrent", "compute", "projector", "draft"])


@given(
    facts=_FACTS,
    held=st.lists(st.tuples(_BUCKETS, st.integers(0, 1 << 35)), max_size=5),
    bucket=st.none() | _BUCKETS,
    asked=st.none() | st.integers(0, 1 << 36),
    free=st.none() | st.integers(0, 1 << 37),
    engine=st.sampled_from(["llama-server", "ollama", "koboldcpp", "ik_llama"]),
)
@settings(max_examples=150)
def test_enough_is_only_what_the_log_proves(
    facts: dict[str, Any], held: list[Any], bucket: Any, asked: int | None, free: int | None, engine: str
) -> None:
    """Whatever a log says, no change is called enough that leaves less than 64 MiB by its smallest figure."""
    entries = tuple(Entry(bucket=name, device="gpu0", bytes=size, source="engine-log") for name, size in held)
    refused = Failure(
        kind="out_of_memory", certainty="certain", text="", bucket=bucket, device="gpu0", bytes=asked, free=free
    )
    log = Boot(
        engine=engine, era="2026", evidence="partial", entries=entries, devices={"gpu0": "CUDA0"}, facts=facts,
        failure=refused,
    )  # fmt: skip
    listed = facts.get("devices_free_bytes", ())
    named = [free, facts.get("fit_free_bytes") or None, facts.get("free_bytes", {}).get("gpu0")]
    smallest = min((one for one in (*named, *listed[: len(listed) == 1]) if one is not None), default=None)
    for one in of_boot(log):
        if one.saves_bytes is not None:
            assert 0 <= one.saves_bytes.bytes <= one.saves_bytes.upper
        if one.enough or one.enough_after:
            assert bucket == "compute"
            assert asked is not None
            assert smallest is not None
        if one.enough:
            assert one.saves_bytes is not None
            allocated = sum(size for _, size in held)
            assert allocated + asked - one.saves_bytes.bytes + (64 << 20) <= smallest
