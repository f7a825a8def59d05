"""SGLang's log: each card's own figures, draft models apart, and what was left for the cache."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from pytest_vram.bootlog import Boot, read
from pytest_vram.bootlog.grammar import grammar
from pytest_vram.testing.bootlogs import sglang as written
from pytest_vram.units import MIB

LOGS = Path(__file__).parents[2] / "fixtures" / "bootlogs" / "sglang"
GIB = 1 << 30


def log(name: str) -> Boot:
    return read(LOGS / f"{name}.log")


def boot(*lines: str) -> Boot:
    return read(
        "\n".join(f"[2026-06-08 07:20:{at:02}] {line}" for at, line in enumerate(lines)) + "\n", engine="sglang"
    )


def gib(number: str) -> int:
    return round(float(number) * GIB)


@pytest.mark.parametrize("era", sorted(written.WRITERS))
@pytest.mark.parametrize("seed", range(8))
def test_written_log_reads_back(era: str, seed: int) -> None:
    """A log of any release gives back the buffers, facts and failure that it was written from."""
    log = written.WRITERS[era](Random(seed))
    found = read(log.text)
    assert found.engine == "sglang"
    assert sorted((e.bucket, e.device, e.bytes) for e in found.entries) == sorted(
        (e.bucket, e.device, e.bytes) for e in log.entries
    )
    assert {name: found.facts.get(name) for name in log.facts} == log.facts
    assert found.devices == log.devices
    assert (found.ready, found.failure and found.failure.kind) == (log.ready, log.failure)


@pytest.mark.parametrize("path", sorted(LOGS.rglob("*.log")), ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_lines_that_may_be_left_out(path: Path) -> None:
    """A reader that leaves out the lines without a word of the grammar gets the same boot."""
    lines = path.read_text(encoding="utf-8").split("\n")
    every, some = grammar("sglang", {}), grammar("sglang", {})
    assert some.words is not None
    for number, line in enumerate(lines):
        every.feed(line)
        if number and not some.words.search(line):
            some.skip(1)
        else:
            some.feed(line)
    assert every.boot() == some.boot()


def test_keys_and_values_are_added_ranks_are_not() -> None:
    """K and V are two buffers of a card; the line of another rank is another card's."""
    found = log("2026/two-cards")
    assert found.buckets["kv"] == {"gpu0": 2 * gib("25.32"), "gpu1": 2 * gib("25.32")}
    assert found.facts["kv_tokens"] == 1106304
    assert found.evidence == "complete"
    four = log("2025/four-cards")
    assert set(four.buckets["kv"].values()) == {2 * gib("8.23")}
    assert len(four.buckets["kv"]) == 4


def test_sizes_that_only_follow_from_what_was_free() -> None:
    """The oldest releases print what was free; weights and cache are its differences, known less exactly."""
    found = log("2024/one-card")
    assert found.buckets == {
        "weights": {"gpu0": gib("78.80") - gib("63.71")},
        "kv": {"gpu0": gib("63.71") - gib("8.38")},
    }
    assert {entry.resolution for entry in found.entries} == {2 * round(GIB / 200)}
    assert found.failure is None  # requests that had to wait for memory are no failure
    assert found.warnings[0].startswith("Decode out of memory happened")


def test_tokens_below_zero() -> None:
    """A profiled number of tokens below zero is a failure of planning, with what the weights left."""
    failure = log("2025/negative-tokens").failure
    assert failure is not None
    assert (failure.kind, failure.phase, failure.bucket) == ("kv_planning", "kv", "kv")
    assert failure.free == gib("21.73")
    assert log("2025/negative-tokens").facts["profiled_tokens"] == -561981
    assert log("2025/negative-tokens").buckets == {"weights": {"gpu0": gib("166.59")}}


def test_refused_while_capturing() -> None:
    """A refused allocation inside the message of a failed capture has its phase, size and what was free."""
    failure = log("2025/oom-capture").failure
    assert failure is not None
    assert (failure.kind, failure.phase, failure.bucket) == ("out_of_memory", "graph-capture", "compute")
    assert (failure.bytes, failure.free, failure.certainty) == (448 * MIB, 250 * MIB, "certain")


def test_ranks_that_share_attention() -> None:
    """Where data-parallel ranks share the tensor-parallel ones, the card is that of the latter; else both count."""
    line = (
        "[2025-07-02 07:41:58 {}] Load weight end. type=M, dtype=torch.bfloat16, avail mem=2.00 GB, mem usage=1.00 GB."
    )
    shared = read("\n".join(line.format(rank) for rank in ("DP0 TP0", "DP7 TP7")) + "\n")
    assert list(shared.devices) == ["gpu0", "gpu7"]
    apart = read("\n".join(line.format(rank) for rank in ("DP0 TP0", "DP0 TP1", "DP1 TP0", "DP1 TP1")) + "\n")
    assert list(apart.devices) == ["gpu0", "gpu1", "gpu2", "gpu3"]


def test_host_part_of_the_cache_counts_in_decimal_units() -> None:
    """`GB` is 2**30 bytes for cards, and 10**9 for the host's part of a hierarchical cache."""
    found = boot(
        "KV Cache is allocated. #tokens: 1000, KV size: 2.00 GB",
        "Allocating 4.00 GB host memory for hierarchical KV cache.",
    )
    assert found.buckets["kv"] == {"gpu0": 2 * GIB, "host": 4 * 10**9}


def test_reservation_of_addresses_is_no_memory() -> None:
    """An upper bound of addresses is not counted; the size that was settled after the graphs replaces all before it."""
    found = boot(
        "KV Cache is allocated. dtype: torch.bfloat16, #tokens: 9000, KV size: 9.00 GB",
        "Full KV Cache VA upper bound. dtype: torch.bfloat16, #tokens: 9000, K size: 90.00 GB, V size: 90.00 GB",
        "Post-capture KV sizing: KV cache allocated. dtype: torch.bfloat16, #tokens: 4000, KV size: 3.50 GB, avail"
        " mem=1.00 GB",
    )
    assert found.buckets["kv"] == {"gpu0": gib("3.5")}
    assert found.facts["kv_tokens"] == 4000


def test_pool_for_all_caches_is_known_to_the_byte() -> None:
    """The line of a pool that holds all caches counts alone, to the byte."""
    found = boot(
        "[unified-memory-pool] UnifiedKVPool allocated: total_bytes=1.00 GB (=1073741999 B), 3 sub-pool(s)",
        "KV Cache is allocated. dtype: torch.bfloat16, #tokens: 1000, KV size: 0.75 GB",
    )
    assert found.buckets["kv"] == {"gpu0": 1073741999}


def test_memory_that_came_back_is_no_size() -> None:
    """A difference below zero, where another process gave memory up, is no buffer."""
    found = boot(
        "Load weight end. type=M, dtype=torch.bfloat16, avail mem=20.00 GB, mem usage=4.00 GB.",
        "Capture cuda graph end. Time elapsed: 2.20 s. mem usage=-0.31 GB. avail mem=20.31 GB.",
    )
    assert found.buckets == {"weights": {"gpu0": 4 * GIB}}


@pytest.mark.parametrize(
    ("line", "kind", "phase", "bucket"),
    [
        ("RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.", "kv_planning", "kv", "kv"),
        (
            "ValueError: Loaded weights leave no GPU memory for the KV cache under --mem-fraction-static=0.5.",
            "kv_planning",
            "kv",
            "kv",
        ),
        (
            "RuntimeError: Not enough GPU memory for hybrid (mamba/linear-attention) state cache. Computed 0",
            "kv_planning",
            "kv",
            "recurrent",
        ),
        ("Prefill out of memory. Try to lower your batch size.", "kv_planning", "prefill", "kv"),
        ("Decode out of memory. Try to lower your batch size.", "kv_planning", "decode", "kv"),
        (
            "RuntimeError: The memory capacity is unbalanced. Some GPUs may be occupied by other processes.",
            "precheck",
            "start",
            None,
        ),
        ("Scheduler hit an exception: Traceback (most recent call last):", "crash", "start", None),
    ],
)
def test_reasons(line: str, kind: str, phase: str, bucket: str | None) -> None:
    """What ends a boot, or a request, is told apart by the engine's own words."""
    failure = boot(line).failure
    assert failure is not None
    assert (failure.kind, failure.phase, failure.bucket) == (kind, phase, bucket)


def test_pool_that_ran_out_is_not_the_card() -> None:
    """Tokens that ran out while serving are no refused allocation of the card, and the note says so."""
    found = boot("The server is fired up and ready to roll!", "Prefill out of memory. Try to lower your batch size.")
    assert found.ready
    assert found.failure is not None
    assert "the card refused nothing" in (found.failure.note or "")


@pytest.mark.parametrize(
    "line",
    [
        "Receive: obj=GenerateReqInput(text='KV Cache is allocated. #tokens: 9, KV size: 9.00 GB')",
        "x - Receive: obj=GenerateReqInput(text='KV Cache is allocated. #tokens: 9, KV size: 9.00 GB')",
        "x - Finish: obj=GenerateReqInput(text='KV Cache is allocated. #tokens: 9, KV size: 9.00 GB')",
        "Decode batch. #running-req: 1, #token: 40, token usage: 0.00, gen throughput (token/s): 4.52",
        "1. set --mem-fraction-static to a smaller value (e.g., 0.8 or 0.7)",
        "KV cache pool is full. Retract requests. #retracted_reqs: 3",
    ],
)
def test_words_that_are_no_failure(line: str) -> None:
    """Users' words, rates, hints and what was recovered from are no failures, and no sizes."""
    found = boot("Load weight begin. avail mem=20.00 GB", line)
    assert (found.failure, found.entries) == (None, ())
