"""Advice from logs of vLLM and SGLang goes by the settings that the log shows."""

from __future__ import annotations

from typing import Any

import pytest

from pytest_vram.advice import of_boot
from pytest_vram.bootlog.boot import Failure
from tests.unit.test_advice_logs import GIB, boot, entry, failed, nothing, saving

IN_FORCE: dict[str, Any] = {
    "tensor_parallel": 4,
    "cache_type": "fp8",
    "eager": True,
    "slots": 1,
    "batch_tokens": 2048,
    "quantization": "awq",
    "memory_share": 0.95,
    "context": 131072,
}


def planned(text: str = "too little", **more: Any) -> Failure:
    """A cache that did not fit beside the weights."""
    told = {"kind": "kv_planning", "certainty": "certain", "phase": "kv", "bucket": "kv", "device": "gpu0", **more}
    return Failure(text=text, **told)


@pytest.mark.parametrize("negative", [False, True])
def test_what_is_set_already_is_not_advised(negative: bool) -> None:
    """Cards double from what they are; a cache in fp8, weights in four bits, one request and no graphs stay."""
    left: dict[str, Any] = {"kv_available_bytes": -GIB} if negative else {"estimated_context": 36864}
    advice = of_boot(boot(entry("weights", 15_626), failure=planned(), engine="vllm", **IN_FORCE, **left))
    found = saving(advice)
    assert (found["tensor-parallel-size"].before, found["tensor-parallel-size"].after) == ("4", "8")
    assert found["tensor-parallel-size"].cost == "8 cards"
    assert not {"kv-cache-dtype", "model", "max-num-seqs", "enforce-eager"} & set(found)
    assert found["max-num-batched-tokens"].after == "1024"
    assert {"kv-cache-dtype", "model"} <= set(nothing(advice))
    assert [one.effect for one in advice] == sorted((one.effect for one in advice), reverse=True)


def test_an_unknown_number_of_cards_gets_no_value() -> None:
    """Two may be fewer than there are."""
    one = saving(of_boot(boot(failure=planned(), engine="vllm")))["tensor-parallel-size"]
    assert (one.before, one.after, one.flag) == ("not printed", "twice as many", "--tensor-parallel-size")


@pytest.mark.parametrize("facts", [{"estimated_context": 3664}, {"kv_tokens": 3664}])
def test_the_length_that_the_cache_holds_is_likely_enough(facts: dict[str, int]) -> None:
    """The engine's own number is a value to paste, and no promise."""
    first = of_boot(boot(failure=planned(), engine="vllm", context=4096, **facts))[0]
    assert (first.setting, first.before, first.after) == ("max-model-len", "4096", "3664")
    assert first.flag == "--max-model-len 3664"
    assert (first.enough, first.source) == (None, "engine-log")
    assert "likely enough" in first.why


@pytest.mark.parametrize(
    ("text", "facts", "free", "share", "after"),
    [
        # 66.18 of 78.58 GB are weights: over 0.8422.
        ("Not enough memory. Please try to increase --mem-fraction-static.",
         {"memory_share": 0.8, "free_bytes": round(78.58 * GIB)}, None, "0.8", "0.88"),
        # What is left beside the weights says what there was.
        ("Loaded weights leave no GPU memory for the KV cache under --mem-fraction-static=0.8.",
         {}, round(12.4 * GIB), "0.8", "0.88"),
    ],
)  # fmt: skip
def test_weights_over_the_share_of_sglang(
    text: str, facts: dict[str, Any], free: int | None, share: str, after: str
) -> None:
    """The share that the engine says to raise comes first, with a value; length and type of a cache do nothing."""
    weights = entry("weights", 66.18 * 1024)
    advice = of_boot(boot(weights, failure=planned(text, free=free), engine="sglang", **facts))
    assert (advice[0].setting, advice[0].before, advice[0].after) == ("mem-fraction-static", share, after)
    assert advice[0].flag == f"--mem-fraction-static {after}"
    assert "over 0.85" in advice[0].why
    assert {"context-length", "kv-cache-dtype"} <= set(nothing(advice))
    assert "max-running-requests" not in saving(advice)


def test_weights_over_every_share_of_sglang() -> None:
    """Where the weights alone take nearly the whole card, a larger share is of no use."""
    text = "Not enough memory. Please try to increase --mem-fraction-static."
    facts: dict[str, Any] = {"memory_share": 0.9, "free_bytes": 80 * GIB}
    advice = of_boot(boot(entry("weights", 78 * 1024), failure=planned(text), engine="sglang", **facts))
    assert "over 0.98" in nothing(advice)["mem-fraction-static"].why


def test_weights_over_the_share_of_vllm() -> None:
    """By how much they are over it says what the share must be."""
    facts: dict[str, Any] = {"memory_share": 0.8, "kv_available_bytes": -GIB, "device_bytes": 24 * GIB}
    one = saving(of_boot(boot(failure=planned(), engine="vllm", **facts)))["gpu-memory-utilization"]
    assert "over 0.85" in one.why  # 0.8 and 1/24
    assert one.after == "0.88"


def test_graphs_that_do_not_fit_beside_sglangs_pools() -> None:
    """What the engine itself says to turn comes first, the share with a value by what its pools take."""
    asked = failed("compute", 1147, total=80 * GIB, phase="graph-capture")
    held = entry("weights", 62_648), entry("kv", 9134)
    advice = of_boot(boot(*held, failure=asked, engine="sglang", free_bytes=round(78.58 * GIB)))
    assert [one.setting for one in advice[:2]] == ["mem-fraction-static", "cuda-graph-max-bs"]
    assert (advice[0].before, advice[0].after) == ("about 0.89", "0.84")
    assert advice[1].flag == "--cuda-graph-max-bs 16"


def test_a_sampler_is_warmed_up_with_as_many_requests_as_may_run() -> None:
    """The number stands in the message, and the settings that it names come first."""
    text = "CUDA out of memory occurred when warming up sampler with 256 dummy requests. Please try lowering `max_num_seqs` or `gpu_memory_utilization`"
    asked = Failure(kind="out_of_memory", certainty="certain", text=text, phase="warm-up", bucket="compute")
    advice = of_boot(boot(failure=asked, engine="vllm"))
    assert [one.setting for one in advice[:2]] == ["max-num-seqs", "gpu-memory-utilization"]
    assert (advice[0].before, advice[0].after) == ("256", "64")
