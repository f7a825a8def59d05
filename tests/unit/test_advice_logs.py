"""Advice from what an engine printed: exact where the figures allow it, a range or a rule where they do not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from pytest_vram.advice import Advice, Saving, of_boot
from pytest_vram.advice.words import words
from pytest_vram.bootlog.boot import Boot, Failure
from pytest_vram.ledger import Bucket, Entry
from pytest_vram.sizing import estimating, llama_cpp, llama_options
from pytest_vram.sizing.engine_options import pairs
from pytest_vram.testing import recipes
from pytest_vram.units import MIB

GIB = 1 << 30


def entry(bucket: Bucket, size: float, device: str = "gpu0", detail: str = "") -> Entry:
    """A buffer of so many MiB."""
    return Entry(bucket=bucket, device=device, bytes=round(size * MIB), source="engine-log", detail=detail)


def failed(bucket: str | None, size: float | None, **more: Any) -> Failure:
    """An allocation of so many MiB that a device refused."""
    told = {"kind": "out_of_memory", "certainty": "certain", "text": "refused", "device": "gpu0", "phase": None, **more}
    return Failure(bucket=bucket, bytes=None if size is None else round(size * MIB), **told)


def boot(*entries: Entry, failure: Failure | None, engine: str = "llama-server", **facts: Any) -> Boot:
    """A boot with these buffers and facts."""
    devices = {"gpu0": "CUDA0", "host": "CPU"}
    return Boot(
        engine=engine, era="2026", evidence="partial", entries=entries, devices=devices, facts=facts, failure=failure
    )


def saving(advice: tuple[Advice, ...]) -> dict[str, Advice]:
    """Advice that saves something, by setting."""
    return {one.setting: one for one in advice if one.effect == "saves"}


def nothing(advice: tuple[Advice, ...]) -> dict[str, Advice]:
    """Advice that would do nothing, by setting."""
    return {one.setting: one for one in advice if one.effect == "nothing"}


CACHE: dict[str, Any] = {
    "context": 32768,
    "slots": 1,
    "ubatch": 512,
    "cache_type_k": "f16",
    "cache_type_v": "f16",
    "flash_attention": "enabled",
}


def test_a_cache_scales_exactly() -> None:
    """By its type in blocks of 34 bytes for 32 elements, and by its length; the shortage is what the log leaves."""
    log = boot(
        entry("weights", 4200), failure=failed("kv", 4096, free=8000 * MIB, total=8192 * MIB, phase="kv"), **CACHE
    )
    found = saving(of_boot(log))
    types, context = found["cache-type-k, cache-type-v"], found["ctx-size"]
    assert types.saves_bytes is not None
    assert context.saves_bytes is not None
    assert types.saves_bytes.bytes == 4096 * MIB * 15 // 32
    # 296 MiB are missing, of 128 KiB for each token: 30,400 tokens are left, and 4,608 less where the compute buffers
    # that come after the cache get 512 MiB and libraries 64; in steps of 256.
    assert context.after == str((30400 - 4608) // 256 * 256)
    assert "576.0 MiB are left for the compute buffers" in context.why
    assert context.saves_bytes.bytes == 4096 * MIB * (32768 - int(context.after)) // 32768
    assert types.source == context.source == "engine-log"
    # What comes after the cache may be refused as well.
    assert (types.enough, context.enough) == (None, None)


def test_a_compute_buffer_that_is_refused_last_is_decided() -> None:
    """Everything else was allocated by then, so that what saves the shortage is enough; a ubatch has no lower end."""
    log = boot(
        entry("weights", 4200),
        entry("kv", 3500),
        failure=failed("compute", 600, free=8000 * MIB, phase="reserve"),
        **{**CACHE, "ubatch": 1024},
    )
    advice = of_boot(log)
    found = saving(advice)
    assert found["ctx-size"].enough is True
    ubatch = found["ubatch-size"]
    assert ubatch.saves_bytes is not None
    assert (ubatch.saves_bytes.bytes, ubatch.saves_bytes.at_most) == (0, 600 * MIB * 7 // 8)
    assert ubatch.enough is None
    assert advice[0] is ubatch


def test_savings_of_one_buffer_multiply() -> None:
    """A shorter context after a smaller type saves its share of what is left."""
    log = boot(entry("weights", 4200), failure=failed("kv", 4096, phase="kv"), **CACHE)
    advice = of_boot(log)
    found = saving(advice)
    types, context = found["cache-type-k, cache-type-v"], found["ctx-size"]
    assert [one.setting for one in advice[:2]] == ["cache-type-k, cache-type-v", "ctx-size"]
    assert types.saves_bytes_after == types.saves_bytes
    assert context.saves_bytes is not None
    assert context.saves_bytes_after is not None
    assert context.saves_bytes_after.bytes == pytest.approx(context.saves_bytes.bytes * 17 / 32, abs=2)


def test_weights_are_a_range_by_their_bits() -> None:
    """From 16 bits to something between 4.5 and 5; a file of four bits already is said to be one."""
    log = boot(failure=failed("weights", 15000, phase="weights"), parameters=8_000_000_000, model_bytes=16_000_000_000)
    model = saving(of_boot(log))["model"]
    assert model.saves_bytes is not None
    assert model.saves_bytes.bytes == pytest.approx(15000 * MIB * (1 - 5 / 16), abs=2)
    assert model.saves_bytes.at_most == pytest.approx(15000 * MIB * (1 - 4.5 / 16), abs=2)
    small = boot(failure=failed("weights", 4500, phase="weights"), parameters=8_000_000_000, model_bytes=4_900_000_000)
    assert "bits for each weight already" in nothing(of_boot(small))["model"].why
    # A little over five bits, as mixtures of four-bit types may have: 5.2 are no reason for another file, 5.5 are.
    for size, settings in ((5_200_000_000, nothing), (5_500_000_000, saving)):
        asked = failed("weights", 5000, phase="weights")
        assert "model" in settings(of_boot(boot(failure=asked, parameters=8_000_000_000, model_bytes=size)))


def test_slots_that_share_a_fixed_context_save_nothing() -> None:
    """The total is what was printed; states of recurrent blocks are each slot's own."""
    log = boot(failure=failed("kv", 4096, phase="kv"), **{**CACHE, "slots": 4}, kv_unified=True)
    assert "which the slots share" in nothing(of_boot(log))["parallel"].why
    states = boot(entry("recurrent", 400), failure=failed("compute", 400, phase="reserve"), **{**CACHE, "slots": 4})
    found = saving(of_boot(states))["parallel"].saves_bytes
    assert found is not None
    assert found.bytes == 300 * MIB


def test_a_cache_with_windows_is_a_range() -> None:
    """Which of two caches grows with the context is not known here, so that it may be the smaller one."""
    log = boot(
        entry("weights", 6000),
        entry("kv", 128),
        entry("kv", 1920),
        failure=failed("compute", 540, phase="reserve"),
        **{**CACHE, "context": 8192},
        sliding_window=1024,
    )
    found = saving(of_boot(log))["ctx-size"].saves_bytes
    assert found is not None
    assert found.at_most is not None
    assert found.bytes < found.at_most


def test_an_absurd_request_is_no_small_shortage() -> None:
    """More than the whole device: another way of computing helps, a shorter context does not."""
    asked = failed("compute", 279_356.51, total=24_576 * MIB, phase="reserve")
    advice = of_boot(boot(entry("kv", 1005.79), failure=asked, engine="ik_llama"))
    found = saving(advice)
    assert list(found)[:2] == ["flash-attn", "attention-max-batch"]
    assert "279,357 MiB were asked for at once of a device with 24,576 MiB" in found["flash-attn"].why
    for setting in ("ctx-size", "ubatch-size", "parallel"):
        assert nothing(advice)[setting].why.startswith("a smaller setting will not help")
    assert "ctx-size" not in found
    without = failed("compute", 279_356.51, absurd=True)
    assert "build" in saving(of_boot(boot(failure=without, flash_attention="enabled")))
    assert "flash-attn" not in saving(of_boot(boot(failure=without, flash_attention="enabled")))


def test_a_lone_line_promises_nothing() -> None:
    """One message stands for two buffers: both readings are named, and no saving is."""
    lone = boot(failure=failed(None, 8849.72, certainty="unknown"))
    advice = of_boot(lone)
    assert [one.setting for one in advice] == ["flash-attn", "ctx-size", "ubatch-size"]
    for one in advice:
        assert "the log does not say which buffer" in one.why
        assert (one.source, one.saves_bytes, one.enough) == ("rule", None, None)


def test_layers_by_their_mean() -> None:
    """Enough of them by the lower end of what one takes, where layers are alike; a mean promises nothing."""
    facts: dict[str, Any] = {"layers_offloaded": 30, "layers_offloadable": 33, "kv_layers": 32, **CACHE}
    asked = failed("compute", 500, free=6200 * MIB, phase="reserve")
    layers = saving(of_boot(boot(entry("weights", 6000), failure=asked, **facts)))["n-gpu-layers"]
    # 300 MiB are missing, and a layer takes 200 MiB on average, with an output matrix of half of it all 100.
    assert (layers.before, layers.after) == ("30", "27")
    assert layers.saves_bytes == Saving(bytes=300 * MIB, at_most=750 * MIB)
    assert layers.enough is None


@pytest.mark.parametrize(
    ("more", "rows"),
    [
        ({"kv_layers": 5}, ("kv",)),
        ({"kv_cells_sliding": 1536}, ("kv",)),
        ({"sliding_window": 1024}, ("kv",)),
        ({"recurrent_bytes": 1 << 20}, ("kv",)),
        ({}, ("recurrent",)),
        ({}, ("kv", "kv")),
        ({"experts": 64}, ("kv",)),
    ],
)
def test_layers_that_are_not_alike_have_no_mean(more: dict[str, Any], rows: tuple[Bucket, ...]) -> None:
    """Windows, recurrent states, leading dense layers: how much the next layer frees is not printed, and not said."""
    facts: dict[str, Any] = {"layers_offloaded": 30, "layers_offloadable": 33, "kv_layers": 32, **CACHE, **more}
    held = [entry(bucket, 200) for bucket in rows]
    asked = failed("compute", 500, free=6200 * MIB, phase="reserve")
    layers = saving(of_boot(boot(entry("weights", 6000), *held, failure=asked, **facts)))["n-gpu-layers"]
    assert (layers.source, layers.saves_bytes, layers.enough, layers.after) == ("rule", None, None, "fewer")


def test_pipeline_copies_can_go() -> None:
    """With several cards the inputs are kept in copies, and the share of the card that is full can be smaller."""
    found = saving(of_boot(boot(failure=failed("compute", 144), pipeline_copies=4)))
    assert found["override-tensor"].flag == "--override-tensor '^$=CPU'"
    assert "tensor-split" in found


@pytest.mark.parametrize(
    ("engine", "setting", "flag"),
    [
        ("ollama", "OLLAMA_KV_CACHE_TYPE", "OLLAMA_FLASH_ATTENTION=1 OLLAMA_KV_CACHE_TYPE=q8_0"),
        ("ollama", "num_ctx", "PARAMETER num_ctx"),
        ("ollama", "OLLAMA_NUM_PARALLEL", "OLLAMA_NUM_PARALLEL=1"),
        ("ollama", "num_gpu", "PARAMETER num_gpu"),
        ("koboldcpp", "quantkv", "--flashattention --quantkv 1"),
        ("koboldcpp", "contextsize", "--contextsize"),
        ("ik_llama", "ctx-size", "--ctx-size"),
    ],
)
def test_each_engine_in_its_own_words(engine: str, setting: str, flag: str) -> None:
    """Settings and how they are written are those of the engine that wrote the log."""
    log = boot(
        entry("weights", 4000),
        failure=failed("kv", 4096, phase="kv"),
        engine=engine,
        layers_offloaded=33,
        **{**CACHE, "slots": 4},
    )
    one = saving(of_boot(log))[setting]
    assert one.flag.startswith(flag)
    if setting == "OLLAMA_NUM_PARALLEL":
        assert one.saves_bytes is not None
        assert one.saves_bytes.bytes == 4096 * MIB * 3 // 4


def test_flags_of_llama_server_are_its_own() -> None:
    """Every flag that advice from a log may write is one that the engine takes."""
    for word in words("llama-server").values():
        if word.flag.startswith("--") and "FILE" not in word.flag:
            found, rest = pairs(word.flag.replace("{0}", "1").replace("{}", "1").replace("'", "").split())
            assert found
            assert not rest


def test_a_check_before_the_start_is_about_the_share_alone() -> None:
    """The largest share that is free, cut off to two digits; nothing of the model has a part in it."""
    asked = Failure(
        kind="precheck", certainty="certain", text="desired GPU memory utilization (0.9, 3.6 GiB)", phase="start",
        bytes=round(3.6 * GIB), free=round(3.22 * GIB), total=4 * GIB,
    )  # fmt: skip
    advice = of_boot(boot(failure=asked, engine="vllm"))
    share = advice[0]
    assert (share.setting, share.before, share.after, share.enough) == ("gpu-memory-utilization", "0.9", "0.8", True)
    assert share.flag == "--gpu-memory-utilization 0.8"
    more = msgspec.structs.replace(asked, free=round(0.809 * 4 * GIB))  # 0.81 would be refused again
    assert of_boot(boot(failure=more, engine="vllm"))[0].after == "0.8"
    assert {"max-model-len", "kv-cache-dtype", "max-num-seqs"} <= set(nothing(advice))


def test_planning_says_the_longest_request_itself() -> None:
    """vLLM's own estimate of the longest request is the value, and as an estimate it promises nothing."""
    text = "…larger than the available KV cache memory. Based on the available memory, the estimated maximum model length is 12304."
    planned = Failure(kind="kv_planning", certainty="certain", text=text, phase="kv", bucket="kv", device="gpu0")
    advice = of_boot(boot(entry("weights", 9000), failure=planned, engine="vllm", memory_share=0.9))
    assert (advice[0].setting, advice[0].after, advice[0].enough) == ("max-model-len", "12304", None)
    assert "likely enough" in advice[0].why
    found = saving(advice)
    assert {"kv-cache-dtype", "gpu-memory-utilization", "tensor-parallel-size", "enforce-eager"} <= set(found)


def test_a_negative_count_of_tokens_is_no_matter_of_the_context() -> None:
    """The weights left nothing: a shorter context or a smaller type helps as little as one token of cache would."""
    text = "The max_total_tokens=1024 is larger than the profiled value -561981"
    planned = Failure(kind="kv_planning", certainty="certain", text=text, phase="kv", bucket="kv", device="gpu0")
    advice = of_boot(boot(entry("weights", 170_588), failure=planned, engine="sglang", memory_share=0.95))
    assert {"context-length", "kv-cache-dtype"} <= set(nothing(advice))
    found = saving(advice)
    assert "mem-fraction-static" not in found  # there is no more of the card to take
    assert {"tp-size", "model"} <= set(found)


def test_weights_that_fill_the_card_are_no_matter_of_the_share() -> None:
    """Out of memory while weights are loaded comes before anything is planned."""
    advice = of_boot(boot(failure=failed("weights", 200, phase="weights"), engine="vllm"))
    assert list(saving(advice))[:2] == ["model", "tensor-parallel-size"]
    assert "gpu-memory-utilization" in nothing(advice)


def test_a_refused_allocation_beside_the_plan() -> None:
    """What is not planned needs room: fewer requests at once, no graphs, a smaller share of a known card."""
    log = boot(failure=failed("compute", 512, total=24 * GIB, phase="graph-capture"), engine="vllm", memory_share=0.9)
    found = saving(of_boot(log))
    share = found["gpu-memory-utilization"]
    assert share.after == "0.85"
    assert share.saves_bytes is not None
    assert share.saves_bytes.bytes == pytest.approx(0.05 * 24 * GIB, abs=2)
    assert share.enough is None  # the next graph needs memory as well


def test_torch_keeps_pieces() -> None:
    """Reserved and unused memory helps where it is more than was asked for, else it is said that it does not."""
    facts: dict[str, Any] = {"allocated_bytes": 6789 * MIB, "reserved_bytes": 7465 * MIB}
    log = boot(failure=failed("kv", 20, free=0, total=8 * GIB, phase="decode"), engine="transformers", **facts)
    advice = of_boot(log)
    assert (advice[0].setting, advice[0].after) == ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    assert advice[0].saves_bytes is not None
    assert advice[0].saves_bytes.at_most == 676 * MIB
    large = boot(failure=failed("kv", 2000, phase="decode"), engine="transformers", **facts)
    assert "PYTORCH_CUDA_ALLOC_CONF" in nothing(of_boot(large))
    weights = of_boot(boot(failure=failed("weights", 1000, phase="weights"), engine="transformers", **facts))
    assert weights[0].setting == "quantization_config"
    assert {"cache_implementation", "max_new_tokens"} <= set(nothing(weights))


def test_host_memory_has_settings_of_its_own() -> None:
    """Locked pages, the mapped file beside its reordered copy, the prompt cache; nothing about the card."""
    killed = Failure(kind="host_oom_killed", certainty="certain", text="Killed process 123 (llama-server)")
    log = boot(
        entry("weights", 4000, "host", "CPU_Mapped model buffer"),
        entry("weights", 3900, "host", "CPU_REPACK model buffer"),
        failure=killed,
        load_mode="mmap+mlock",
        layers_offloaded=10,
        layers_offloadable=33,
    )
    found = saving(of_boot(log))
    assert list(found)[:2] == ["mlock", "mmap"]
    assert found["mmap"].saves_bytes is not None
    assert found["mmap"].saves_bytes.at_most == 3900 * MIB
    assert {"model", "n-gpu-layers", "memory limit"} <= set(found)
    assert all(one.device == "host" for one in found.values())


@pytest.mark.parametrize("kind", ["load_error", "bad_option", "port_taken", "illegal_instruction", "crash"])
def test_other_failures_get_no_advice_about_memory(kind: str) -> None:
    """A damaged file does not become smaller by a shorter context."""
    log = boot(entry("weights", 10), failure=Failure(kind=kind, certainty="certain", text="no"))
    assert of_boot(log) == ()
    assert of_boot(boot(entry("weights", 10), failure=None)) == ()


def test_with_the_model_every_saving_is_computed(tmp_path: Path) -> None:
    """What the log leaves open stands in the file: the shortage is that of the whole boot, and enough is known."""
    model = recipes.llama(layers=8, embedding=512, heads=8, kv_heads=8, head_size=64).write(tmp_path / "model.gguf")
    shape = estimating.load(model)
    facts: dict[str, Any] = {
        "context": 16384,
        "slots": 1,
        "ubatch": 512,
        "cache_type_k": "f16",
        "cache_type_v": "f16",
        "flash_attention": "enabled",
    }
    options = {"device": "CUDA0", "ctx_size": 16384, "parallel": 1, "flash_attn": "on"}
    made = llama_cpp.predict(shape, llama_options.options_of(options))
    context = made.buckets()["context"]["gpu0"]
    needed = made.total()["gpu0"] - context
    log = boot(entry("weights", 20), failure=failed("kv", 256, free=needed - 50 * MIB, phase="kv"), **facts)
    advice = of_boot(log, shape=shape, options={})
    first = advice[0]
    assert (first.setting, first.source, first.enough) == ("cache-type-k, cache-type-v", "estimate", True)
    assert first.saves_by_bucket["kv"] == 256 * MIB * 15 // 32
    assert "of CUDA0 then is 136.00 MiB" in first.proof
    # Without a figure of what was free, all that was refused and all that comes after it is the most that is missing.
    unknown = boot(entry("weights", 20), failure=failed("kv", 256, phase="kv"), **facts)
    assert {one.enough for one in of_boot(unknown, shape=shape, options={}) if one.effect == "saves"} <= {None, True}
    # What is known from elsewhere counts.
    known = of_boot(unknown, shape=shape, options={}, free={"gpu0": needed - 50 * MIB})
    assert known[0].enough is True


def test_a_device_that_the_options_do_not_have(tmp_path: Path) -> None:
    """Where log and options are about different devices, the log's own figures are what counts."""
    shape = estimating.load(recipes.llama().write(tmp_path / "model.gguf"))
    log = boot(entry("weights", 20), failure=failed("kv", 256, phase="kv"), **CACHE)
    advice = of_boot(log, shape=shape, options={"device": "none"})
    assert advice
    assert {one.source for one in advice} <= {"engine-log", "rule"}


@pytest.mark.parametrize(("more", "fits"), [(0, True), (1, None)])
def test_enough_to_the_byte(more: int, fits: bool | None) -> None:
    """A saving of exactly what is missing and a margin is enough; of one byte less it is not known."""
    # 480 MiB less of cache, a copy of one layer of 32 in f16, and 64 MiB that are left.
    free = (1024 + 600 - 480 + 32 + 64) * MIB - more
    log = boot(entry("kv", 1024), failure=failed("compute", 600, free=free, phase="reserve"), kv_layers=32, **CACHE)
    types = saving(of_boot(log))["cache-type-k, cache-type-v"]
    assert types.saves_bytes == Saving(bytes=448 * MIB, at_most=480 * MIB)
    assert types.enough is fits


def test_too_little_is_known_to_be_so() -> None:
    """The most that a change can save is less than what is missing."""
    log = boot(entry("weights", 9000), failure=failed("kv", 1024, free=9050 * MIB, phase="kv"), **CACHE)
    found = saving(of_boot(log))
    assert found["cache-type-k, cache-type-v"].enough is False


def test_the_smallest_figure_of_what_was_free_decides() -> None:
    """Two lines of one log differ: what is enough by one only is not called so."""
    facts: dict[str, Any] = {"kv_layers": 32, **CACHE}
    refused = failed("compute", 600, free=(1024 + 600 - 300) * MIB, phase="reserve")
    assert saving(of_boot(boot(entry("kv", 1024), failure=refused, **facts)))["ctx-size"].enough is True
    less = boot(entry("kv", 1024), failure=refused, fit_free_bytes=(1024 + 600 - 400) * MIB, **facts)
    types, context = (saving(of_boot(less))[name] for name in ("cache-type-k, cache-type-v", "ctx-size"))
    assert types.enough is None  # 448 MiB at least, where 400 are missing and 64 should be left
    assert (context.enough, context.after) == (True, str(32768 * (1024 - 464) // 1024 // 256 * 256))
    listed = boot(entry("kv", 1024), failure=refused, devices_free_bytes=[(1024 + 600 - 500) * MIB], **facts)
    assert int(saving(of_boot(listed))["ctx-size"].after) < int(context.after)


def test_what_comes_later_keeps_a_change_from_being_enough() -> None:
    """Compute buffers of another card, a draft model, an encoder of images: they may be refused as well."""
    asked = failed("compute", 600, free=(1024 + 600 - 300) * MIB, phase="reserve")
    log = boot(entry("kv", 1024), failure=asked, **CACHE)
    assert saving(of_boot(log))["ctx-size"].enough is True
    two = msgspec.structs.replace(log, devices={"gpu0": "CUDA0", "gpu1": "CUDA1", "host": "CPU"})
    assert saving(of_boot(two))["ctx-size"].enough is None
    done = msgspec.structs.replace(two, entries=(*two.entries, entry("compute", 500, "gpu1")))
    assert saving(of_boot(done))["ctx-size"].enough is True
    drafts = msgspec.structs.replace(log, facts={**log.facts, "draft_kv_bytes": 5})
    assert saving(of_boot(drafts))["ctx-size"].enough is None


def test_a_shortage_that_cannot_be_is_none() -> None:
    """Free minus held exceeds the request: something else took it, and the whole request is what was not there."""
    log = boot(entry("kv", 1024), failure=failed("compute", 600, free=2000 * MIB, phase="reserve"), **CACHE)
    assert saving(of_boot(log))["ctx-size"].enough is None
    # More is held than was free at all, as where a boot log counts a device's buffers twice.
    log = boot(entry("kv", 4096), failure=failed("compute", 600, free=2000 * MIB, phase="reserve"), **CACHE)
    assert saving(of_boot(log))["ctx-size"].enough is None


def test_a_quantised_cache_turns_flash_attention_on() -> None:
    """The engine refuses it without, so that the flag has both; how the compute buffer changes then is not known."""
    facts: dict[str, Any] = {**CACHE, "flash_attention": "disabled", "kv_layers": 32}
    asked = failed("compute", 600, free=3000 * MIB, phase="reserve")
    one = saving(of_boot(boot(entry("kv", 2500), failure=asked, **facts)))["cache-type-k, cache-type-v"]
    assert one.flag == "--flash-attn on --cache-type-k q8_0 --cache-type-v q8_0"
    assert one.enough is None
    kobold = boot(entry("kv", 2500), failure=asked, engine="koboldcpp", **facts)
    assert saving(of_boot(kobold))["quantkv"].flag == "--flashattention --quantkv 1"


def test_a_smaller_type_comes_before_a_shorter_context() -> None:
    """What costs hardly any accuracy is advised before what costs conversations, where both are enough."""
    log = boot(
        entry("kv", 3584), failure=failed("compute", 1401, free=4300 * MIB, phase="reserve"), kv_layers=32, **CACHE
    )
    names = [one.setting for one in of_boot(log) if one.enough]
    assert names == ["cache-type-k, cache-type-v", "ctx-size"]


def test_a_window_cache_holds_a_ubatch_besides() -> None:
    """A smaller ubatch shrinks two buffers; what is short of the sum of both is not called too little."""
    facts: dict[str, Any] = {**CACHE, "kv_cells": 32768, "kv_cells_sliding": 1536}
    asked = failed("compute", 107.52, free=round((640 + 174 + 7.52) * MIB), phase="reserve")
    one = saving(of_boot(boot(entry("kv", 640), entry("kv", 174), failure=asked, **facts)))["ubatch-size"]
    assert one.saves_bytes is not None
    assert one.saves_bytes.upper >= 109.7 * MIB  # what the engine's dry run says
    assert one.enough is None
    assert "a cache of windows" in one.why


@pytest.mark.parametrize(
    "more", [{"note": "the driver limits the size of one buffer, and this one is larger, whatever is free"},
             {"free": 40_000 * MIB}],
)  # fmt: skip
def test_one_buffer_that_is_too_large_is_no_shortage(more: dict[str, Any]) -> None:
    """Only what makes that very buffer smaller is advised, and nothing is promised."""
    asked = failed("compute", 8348, phase="reserve", **more)
    facts: dict[str, Any] = {
        **CACHE,
        "ubatch": 4096,
        "flash_attention": "disabled",
        "layers_offloaded": 49,
        "kv_layers": 48,
    }
    advice = of_boot(boot(entry("weights", 3000), entry("kv", 6144), failure=asked, **facts))
    assert list(saving(advice)) == ["flash-attn", "ubatch-size", "ctx-size"]
    assert {one.enough for one in saving(advice).values()} == {None}
    assert {"n-gpu-layers", "model", "cache-type-k, cache-type-v"} <= set(nothing(advice))
    assert "this one buffer of 8,348 MiB" in nothing(advice)["n-gpu-layers"].why


def test_contexts_of_ollama_are_each_requests_own() -> None:
    """Four requests share the printed sum: a quarter of it is what its setting means."""
    facts: dict[str, Any] = {**CACHE, "slots": 4, "flash_attention": "disabled"}
    asked = failed("kv", 4096, free=8000 * MIB, phase="kv")
    context = saving(of_boot(boot(entry("weights", 4400), failure=asked, engine="ollama", **facts)))["num_ctx"]
    assert context.before == "8192"
    assert int(context.after) < 8192
    assert context.saves_bytes == Saving(bytes=4096 * MIB * (8192 - int(context.after)) // 8192)
    unknown: dict[str, Any] = {name: value for name, value in facts.items() if name != "slots"}
    asked = failed("kv", 4096, phase="kv")
    context = saving(of_boot(boot(entry("weights", 4400), failure=asked, engine="ollama", **unknown)))["num_ctx"]
    assert (context.before, context.after, context.saves_bytes) == ("not printed", "half of it", None)
    assert context.flag.startswith("PARAMETER num_ctx N")


def test_builds_that_lack_a_setting_are_not_told_to_turn_it() -> None:
    """A program of 2023 has neither flash attention nor quantised caches."""
    facts: dict[str, Any] = {**CACHE, "flash_attention": None, "build": "1.50.1", "layers_offloaded": 43}
    facts = {name: value for name, value in facts.items() if value is not None}
    log = boot(entry("weights", 18_788), failure=failed("kv", 2651), engine="koboldcpp", **facts)
    found = of_boot(log)
    assert {"contextsize", "gpulayers"} <= set(saving(found))
    assert not {"flashattention", "quantkv", "moecpu"} & {one.setting for one in found}
    newer = boot(
        entry("weights", 18_788), failure=failed("kv", 2651), engine="koboldcpp", **{**facts, "build": "1.99.4"}
    )
    assert "quantkv" in saving(of_boot(newer))
    old = boot(entry("weights", 900), failure=failed("weights", 20_000), build="488 (67c7779)")
    assert "n-cpu-moe" not in saving(of_boot(old))


def test_weights_that_are_refused_may_stay_on_the_host() -> None:
    """Fewer layers on the card, and experts on the CPU if there are any, even where nothing else was printed."""
    found = saving(of_boot(boot(failure=failed("weights", 144_817))))
    assert {"model", "n-cpu-moe", "n-gpu-layers"} <= set(found)
    assert "if the model is a mixture" in found["n-cpu-moe"].why


def test_states_and_projectors_have_settings_of_their_own() -> None:
    """Fewer slots for recurrent states, the encoder of images on the CPU; types and lengths of a cache come later."""
    facts: dict[str, Any] = {**CACHE, "slots": 4}
    states = of_boot(boot(entry("kv", 512), failure=failed("recurrent", 144), **facts))
    assert (states[0].setting, states[0].bucket) == ("parallel", "recurrent")
    images = of_boot(boot(entry("kv", 512), failure=failed("projector", 800), **facts))
    assert (images[0].setting, images[0].flag) == ("mmproj-offload", "--no-mmproj-offload")


def test_copies_of_a_pipeline_in_an_engine_that_is_built_for_them() -> None:
    """ik_llama has a number of its own, fixed when it is built."""
    log = boot(failure=failed("compute", 8900), engine="ik_llama", pipeline_copies=4)
    assert saving(of_boot(log))["GGML_SCHED_MAX_COPIES"].flag == "built with -DGGML_SCHED_MAX_COPIES=1"


def test_the_card_is_called_by_the_engines_name_too() -> None:
    """A share of a card is found in nvidia-smi by the engine's own number."""
    log = boot(failure=failed("compute", 144), pipeline_copies=4)
    assert "ran out on gpu0 (CUDA0)" in saving(of_boot(log))["tensor-split"].why
    log = boot(entry("kv", 100), failure=failed("kv", 144, device=None), pipeline_copies=4)
    assert "tensor-split" not in saving(of_boot(log))  # it does not say which card it was
