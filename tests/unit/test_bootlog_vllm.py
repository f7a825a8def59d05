"""vLLM's log: each buffer once and on its own card, reasons told apart, nothing believed that users wrote."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from pytest_vram.bootlog import Boot, read
from pytest_vram.bootlog.grammar import grammar
from pytest_vram.testing.bootlogs import vllm as written
from pytest_vram.units import MIB

LOGS = Path(__file__).parents[2] / "fixtures" / "bootlogs" / "vllm"
GIB = 1 << 30
CONFIG = (
    "INFO 03-08 16:44:10 [core.py:140] Initializing a V1 LLM engine (v0.33.0) with config: model='m',"
    " dtype=torch.bfloat16, max_seq_len=4096, tensor_parallel_size={tp}, pipeline_parallel_size={pp},"
    " data_parallel_size=1, quantization=None, enforce_eager={eager}, kv_cache_dtype=auto, device_config=cuda"
)


def log(name: str) -> Boot:
    return read(LOGS / f"{name}.log")


def boot(*lines: str) -> Boot:
    return read("\n".join(lines) + "\n", engine="vllm")


def gib(number: str) -> int:
    return round(float(number) * GIB)


@pytest.mark.parametrize("era", sorted(written.WRITERS))
@pytest.mark.parametrize("seed", range(8))
def test_written_log_reads_back(era: str, seed: int) -> None:
    """A log of any release gives back the buffers, facts and failure that it was written from."""
    log = written.WRITERS[era](Random(seed))
    found = read(log.text)
    assert found.engine == "vllm"
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
    every, some = grammar("vllm", {}), grammar("vllm", {})
    assert some.words is not None
    for number, line in enumerate(lines):
        every.feed(line)
        if number and not some.words.search(line):
            some.skip(1)
        else:
            some.feed(line)
    assert every.boot() == some.boot()


def test_one_buffer_in_three_lines_counts_once() -> None:
    """The cache, the graphs and the weights stand in several lines of a boot of 2026, and count once."""
    found = log("0.33/one-card")
    assert found.buckets["weights"] == {"gpu0": gib("15.0")}
    assert found.buckets["kv"] == {"gpu0": gib("56.21")}
    assert found.buckets["context"] == {"gpu0": gib("15.26") - gib("15.0")}
    # 1.44 GiB of activations hold the 0.32 GiB that were planned for graphs, which took 0.23 GiB in the end.
    assert found.buckets["compute"] == {"gpu0": gib("1.44") - gib("0.32") + gib("0.23")}
    assert found.evidence == "complete"


def test_graphs_that_were_not_planned_for_are_not_taken_off() -> None:
    """Where the trial of graphs is not counted in the plan, the activation peak does not hold it."""
    lines = (LOGS / "0.33" / "one-card.log").read_text(encoding="utf-8")
    other = lines.replace("CUDA graph memory profiling is enabled (default since v0.21.0).", "It will be in v0.19:")
    assert read(other).buckets["compute"] == {"gpu0": gib("1.44") + gib("0.23")}


def test_figures_without_zeros_at_the_end_are_hundredths() -> None:
    """`15.0 GiB` is rounded to hundredths like all others, and known to half of one."""
    entry = next(entry for entry in log("0.33/one-card").entries if entry.bucket == "weights")
    assert (entry.bytes, entry.resolution) == (15 * GIB, round(GIB / 200))


def test_each_rank_has_its_own_card() -> None:
    """The same line of several processes is a figure of each card, and never summed on one."""
    found = log("0.10/four-cards")
    assert found.buckets["kv"] == {"gpu0": gib("8.11"), "gpu1": gib("8.14"), "gpu2": gib("8.14"), "gpu3": gib("8.14")}
    assert found.devices == {f"gpu{i}": f"CUDA{i}" for i in range(4)}
    assert found.facts["kv_tokens"] == 178880  # the smallest of the cards is what holds


def test_worker_without_a_rank_is_the_next_card() -> None:
    """The first engine's process is the first card, and its workers are told apart by their process."""
    found = log("0.6/two-cards")
    assert found.buckets["kv"] == {"gpu0": gib("3.76"), "gpu1": gib("3.74")}
    assert (found.facts["kv_tokens"], found.facts["block_size"], found.facts["blocks"]) == (61632, 16, 3852)


def test_line_that_is_printed_once_for_all_cards() -> None:
    """A figure that one process prints for all is not copied to the others, and the log says what is missing."""
    found = boot(
        CONFIG.format(tp=2, pp=1, eager="True"),
        "(Worker_TP0 pid=7) INFO 03-08 16:44:20 [gpu_model_runner.py:4339] Model loading took 8.5 GiB memory and 3.0"
        " seconds",
        "(Worker_TP0 pid=7) INFO 03-08 16:44:24 [gpu_worker.py:456] Available KV cache memory: 10.0 GiB",
        "INFO:     Application startup complete.",
    )
    assert found.buckets == {"weights": {"gpu0": gib("8.5")}, "kv": {"gpu0": 10 * GIB}}
    assert found.evidence == "partial"
    assert any("figures of 1 of 2 cards are in this log" in warning for warning in found.warnings)


def test_engines_in_parallel_are_told_apart() -> None:
    """Data-parallel engines have a card and a cache each; the smallest cache is the fact."""
    found = boot(
        "(EngineCore_DP1 pid=2) INFO 03-08 16:44:24 [gpu_worker.py:456] Available KV cache memory: 4.0 GiB",
        "(EngineCore_DP0 pid=1) INFO 03-08 16:44:24 [gpu_worker.py:456] Available KV cache memory: 9.0 GiB",
        "(EngineCore_DP0 pid=1) INFO 03-08 16:44:24 [kv_cache_utils.py:1] GPU KV cache size: 9,000 tokens",
        "(EngineCore_DP1 pid=2) INFO 03-08 16:44:24 [kv_cache_utils.py:1] GPU KV cache size: 4,000 tokens",
    )
    assert found.buckets["kv"] == {"gpu0": 9 * GIB, "gpu1": 4 * GIB}
    assert found.facts["kv_tokens"] == 4000
    assert found.facts["kv_tokens_by_engine"] == {"DP0": 9000, "DP1": 4000}


def test_blocks_that_were_set_by_hand() -> None:
    """A number of blocks that is set by hand makes the cache smaller than what was left for it."""
    found = boot(
        "INFO 03-08 16:44:24 [gpu_worker.py:456] Available KV cache memory: 10.0 GiB",
        "INFO 03-08 16:44:24 [kv_cache_utils.py:1] Overriding num_gpu_blocks=1000 with num_gpu_blocks_override=100",
    )
    assert found.buckets["kv"] == {"gpu0": GIB}
    assert found.facts["blocks"] == 100


def test_small_cache_of_the_trial_of_graphs() -> None:
    """The trial of graphs takes a few blocks for itself, before anything is planned: these are no setting."""
    found = boot(
        "(Worker_TP1 pid=3) INFO 03-08 16:44:23 [kv_cache_utils.py:829] Overriding num_gpu_blocks=0 with"
        " num_gpu_blocks_override=512",
        "(Worker_TP0 pid=2) INFO 03-08 16:44:24 [gpu_worker.py:436] Available KV cache memory: 5.11 GiB",
    )
    assert found.buckets["kv"] == {"gpu0": gib("5.11")}
    assert "blocks" not in found.facts


def test_block_size_is_derived_or_left_out() -> None:
    """Tokens follow from blocks only where the printed figures leave one size of a block."""
    blocks = "INFO 03-08 16:44:24 gpu_executor.py:76] # GPU blocks: 3852, # CPU blocks: 4096"
    known = boot(blocks, "INFO 03-08 16:44:24 e.py:80] Maximum concurrency for 40000 tokens per request: 1.54x")
    assert (known.facts["block_size"], known.facts["kv_tokens"]) == (16, 61632)
    assert "kv_tokens" not in boot(blocks).facts


def test_longer_context_may_fit_where_a_shorter_one_does_not() -> None:
    """The room for the cache shrinks with the context, and the advice of the engine is not taken for a bound."""
    short, long = log("0.6/context-20k"), log("0.6/context-29k")
    assert short.failure is None
    assert (short.facts["kv_tokens"], long.facts["kv_tokens"]) == (31232, 23648)
    assert long.failure is not None
    assert (long.failure.kind, long.failure.phase, long.failure.bucket) == ("kv_planning", "kv", "kv")
    assert "a longer context may fit" in (long.failure.note or "")


def test_room_below_zero() -> None:
    """Less than nothing left for the cache is a failure of planning, and no cache of two GiB."""
    found = log("0.10/negative-room")
    assert "kv" not in found.buckets
    assert found.facts["kv_available_bytes"] == -round(2.14 * GIB)
    assert found.failure is not None
    assert (found.failure.kind, found.failure.device, found.failure.certainty) == ("kv_planning", "gpu0", "certain")


@pytest.mark.parametrize(
    ("name", "free", "total", "wanted", "share"),
    [
        ("0.10/precheck", "3.22", "4.0", "3.6", 0.80),
        ("0.14/leftover-of-another-test", "19.77", "22.05", "19.84", 0.89),
    ],
)
def test_precheck(name: str, free: str, total: str, wanted: str, share: float) -> None:
    """A check before anything is loaded is no out-of-memory, and the largest share that passes is said."""
    failure = log(name).failure
    assert failure is not None
    assert (failure.kind, failure.phase, failure.device) == ("precheck", "start", "gpu0")
    assert (failure.free, failure.total, failure.bytes) == (gib(free), gib(total), gib(wanted))
    assert log(name).facts["largest_memory_share"] == share


def test_largest_share_is_surely_below_what_was_free() -> None:
    """Printed figures are rounded: a share that only their upper ends allow is not promised."""
    found = boot(
        "ValueError: Free memory on device (3.6/4.0 GiB) on startup is less than desired GPU memory utilization (0.9,"
        " 3.6 GiB)."
    )
    assert found.facts["largest_memory_share"] == 0.89


def test_cache_of_one_request_does_not_fit() -> None:
    """What the cache needs and what there is are said to the digit, with a bracket that is closed nowhere."""
    first, second = log("0.8/no-room-for-one-request"), log("0.14/no-room-in-a-stage")
    for found, room in ((first, "9.97"), (second, "3.18")):
        assert found.failure is not None
        assert (found.failure.kind, found.failure.bytes, found.failure.free) == ("kv_planning", 24 * GIB, gib(room))
    assert second.facts["estimated_context"] == 34736
    assert second.failure is not None
    assert "the layers are divided among cards" in (second.failure.note or "")


@pytest.mark.parametrize(
    ("name", "phase", "bucket", "certainty", "asked"),
    [
        ("oom-weights", "weights", "weights", "certain", 170 * MIB),
        ("oom-profile", "reserve", "compute", "certain", gib("4.64")),
        ("oom-capture", "graph-capture", "compute", "certain", 48 * MIB),
        ("oom-capture-or-later", "graph-capture", "compute", "likely", 48 * MIB),
        ("oom-while-serving", "ready", "compute", "likely", 594 * MIB),
    ],
)
def test_phase_of_a_refused_allocation(name: str, phase: str, bucket: str, certainty: str, asked: int) -> None:
    """Frames and milestones tell the phase; where neither does, it stays "capture or later"."""
    failure = log(f"0.11/{name}").failure
    assert failure is not None
    assert (failure.kind, failure.phase, failure.bucket) == ("out_of_memory", phase, bucket)
    assert (failure.certainty, failure.bytes, failure.device) == (certainty, asked, "gpu0")


def test_death_gives_way_to_its_reason() -> None:
    """That a process died is said before and after the reason; the reason counts, wherever it stands."""
    died = "(EngineCore pid=1) ERROR 03-08 16:44:24 [core.py:1584] EngineCore failed to start."
    reason = (
        "(EngineCore pid=1) ERROR 03-08 16:44:24 [core.py:1584] ValueError: No available memory for the cache blocks."
    )
    alone = boot(died).failure
    assert alone is not None
    assert (alone.kind, alone.certainty) == ("crash", "unknown")
    for lines in ((died, reason), (reason, died)):
        failure = boot(*lines).failure
        assert failure is not None
        assert failure.kind == "kv_planning"


def test_killed_by_the_host() -> None:
    """An engine that the kernel ended is not taken for one that a card refused something."""
    failure = boot(
        "INFO 03-08 16:44:20 [gpu_model_runner.py:4979] Starting to load model m...",
        "[Sun Mar  8 16:44:30 2026] Out of memory: Killed process 71 (VLLM::EngineCor) anon-rss:31000000kB",
        "ERROR 03-08 16:44:31 [core_client.py:600] Engine core proc EngineCore died unexpectedly, shutting down client.",
    ).failure
    assert failure is not None
    assert (failure.kind, failure.phase, failure.certainty) == ("host_oom_killed", "weights", "certain")


def test_error_that_nothing_is_known_of() -> None:
    """A process that died of an error that says nothing here is a crash, and its text is that error."""
    failure = boot(
        "(EngineCore pid=1) ERROR 03-08 16:44:24 [core.py:1584] EngineCore failed to start.",
        "(EngineCore pid=1) ERROR 03-08 16:44:24 [core.py:1584] IndexError: index 1 is out of bounds",
        "(APIServer pid=2) RuntimeError: Engine core initialization failed. See root cause above.",
    ).failure
    assert failure is not None
    assert (failure.kind, failure.certainty) == ("crash", "unknown")
    assert failure.text == "IndexError: index 1 is out of bounds"


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ("ValueError: User-specified max_model_len (65536) is greater than the derived max_model_len", "bad_option"),
        ("api_server.py: error: unrecognized arguments: --max-modellen 4096", "bad_option"),
        (
            "ValueError: Total number of attention heads (14) must be divisible by tensor parallel size (4).",
            "bad_option",
        ),
        ("ValueError: Invalid fraction value: -0.02. Allowed range: 0~1", "bad_option"),
        ("OSError: [Errno 98] Address already in use", "port_taken"),
        ("ValueError: Bfloat16 is only supported on GPUs with compute capability of at least 8.0.", "load_error"),
        ("ValueError: Model architectures ['FooForCausalLM'] are not supported for now.", "load_error"),
        ("torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:268, unhandled cuda error", "crash"),
        ("RuntimeError: CUDA out of memory occurred when warming up sampler with 256 dummy requests.", "out_of_memory"),
        ("ValueError: No available memory for the cache blocks. Try increasing it.", "kv_planning"),
        ("ValueError: Cannot auto-fit max_model_len: not enough GPU memory available", "kv_planning"),
        ("AssertionError: Error in memory profiling. Initial free memory 3.2 GiB, current free memory", "crash"),
    ],
)
def test_reasons(line: str, kind: str) -> None:
    """What ends a boot is told apart by the engine's own words."""
    found = boot("INFO 03-08 16:44:20 [gpu_model_runner.py:4979] Starting to load model m...", line)
    assert found.failure is not None
    assert found.failure.kind == kind


@pytest.mark.parametrize(
    "line",
    [
        "INFO 03-08 16:44:20 m.py:1415] If out-of-memory error occurs during cudagraph capture, consider less.",
        "INFO 03-08 16:44:20 [logger.py:42] Received request c-1: prompt: 'CUDA out of memory. Tried to allocate 3 GiB'",
        "vllm-1  | INFO 03-08 16:44:20 [logger.py:42] Received request c: 'Available KV cache memory: 3.00 GiB'",
        "INFO 03-08 16:44:20 x.py:1] Added request c-1 Available KV cache memory: 3.00 GiB",
        "WARNING 03-08 16:44:20 [x.py:1] CUDA out of memory. Tried to allocate 2.00 GiB, so a smaller one is taken",
        '    raise ValueError("No available memory for the cache blocks. "',
        'INFO:     127.0.0.1:1 - "POST /v1/chat/completions?q=ncclSystemError HTTP/1.1" 500 Internal Server Error',
    ],
)
def test_words_that_are_no_failure(line: str) -> None:
    """Hints, users' words, source lines and what was recovered from are no failures, and no sizes."""
    found = boot("INFO 03-08 16:44:20 [m.py:1] Starting to load model m...", line)
    assert (found.failure, found.entries) == (None, ())


def test_ready_after_a_failure_is_a_recovery() -> None:
    """A boot that ends with a running server did not fail; what looked like it is a warning."""
    found = boot("ValueError: No available memory for the cache blocks.", "INFO:     Application startup complete.")
    assert (found.failure, found.ready) == (None, True)
    assert found.warnings[0].startswith("recovered: No available memory")


def test_adapter_that_is_not_there_is_no_failed_boot() -> None:
    """A request that cannot be served, long after the boot, does not make the boot a failure."""
    found = boot(
        "INFO:     Application startup complete.",
        "ERROR 03-08 16:50:00 [serving.py:1] OSError: org/adapter does not appear to have a file named adapter.json",
    )
    assert found.failure is None


def test_memory_that_stays_while_asleep() -> None:
    """What stays in use while the engine sleeps is said, and that it grew; whose it is, is not claimed."""
    found = log("0.11/sleep")
    assert found.facts["sleep_in_use_bytes"] == {"gpu0": gib("5.06")}
    assert [span.name for span in found.phases][-4:] == ["ready", "sleep", "ready", "sleep"]
    assert any("at the first of 2 times" in text and "other processes with it" in text for text in found.warnings)


def test_quiet_log_is_no_evidence() -> None:
    """A log at a higher level has no sizes, and the way to get them is named."""
    found = boot("WARNING 03-08 16:44:20 [x.py:1] something", "INFO:     Application startup complete.")
    assert (found.evidence, found.entries, found.ready) == ("none", (), True)
    assert "VLLM_LOGGING_LEVEL=INFO" in found.warnings[-1]


def test_context_that_was_made_to_fit() -> None:
    """A context that the engine made smaller by itself is a fact and a warning."""
    found = boot(
        "INFO 03-08 16:44:20 [k.py:1404] Auto-fit max_model_len: reduced from 131072 to 36000 to fit in available KV"
        " cache memory (3.18 GiB GPU)"
    )
    assert (found.facts["context"], found.facts["context_reduced_from"]) == (36000, 131072)
    assert "reduced from 131072 to 36000" in found.warnings[0]


def test_digits_that_are_none() -> None:
    """Characters that are digits to Unicode alone are no numbers, wherever the engine prints one."""
    config = "INFO 09-28 15:47:24 [core.py:58] Initializing a V1 LLM engine (v0.9.0) with config: model='m'"
    text = f"{config}, max_seq_len=\u00b2, tensor_parallel_size=\u00b2, max_num_seqs=\u0663\nreserved: \u00b2\n"
    boot = read(text, engine="vllm")
    assert not {"tensor_parallel", "slots", "context"} & set(boot.facts)
