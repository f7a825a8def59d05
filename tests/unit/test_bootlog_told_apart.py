"""Servers in Python and Ollama: one boot told from another, a load from a request, what was caught from what was not."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pytest_vram.bootlog import Boot, read
from pytest_vram.bootlog.lines import Axis, split

LOGS = Path(__file__).parents[2] / "fixtures" / "bootlogs"
GIB = 1 << 30
REFUSED = (
    "CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has a total capacity of 22.00 GiB of which 1.00 GiB is free."
)
CAUGHT = f'Traceback (most recent call last):\n  File "/app/a.py", line 1, in x\n    y()\ntorch.OutOfMemoryError: {REFUSED}\n'
ENGINE = (
    "INFO 07-25 {hour}:42:10 [core.py:58] Initializing a V1 LLM engine (v0.9.0) with config: model='m', max_seq_len={length}\n"
    "INFO 07-25 {hour}:42:16 [gpu_model_runner.py:1347] Model loading took 15.25 GiB and 23.10 seconds\n"
    "INFO 07-25 {hour}:42:30 [gpu_worker.py:227] Available KV cache memory: 4.50 GiB\n"
)
BAD = ENGINE.format(hour=13, length=131072) + (
    "ERROR 07-25 13:42:31 [core.py:396] EngineCore failed to start.\n"
    "ERROR 07-25 13:42:31 [core.py:396] ValueError: To serve at least one request with the models's max seq len (131072),"
    " (16.00 GiB KV cache is needed, which is larger than the available KV cache memory (4.50 GiB). Based on the available"
    " memory, the estimated maximum model length is 36864.\n"
)
GOOD = ENGINE.format(hour=14, length=32768) + (
    "INFO 07-25 14:42:31 [kv_cache_utils.py:634] GPU KV cache size: 37,680 tokens\n"
    "INFO 07-25 14:42:35 [gpu_model_runner.py:1933] Graph capturing finished in 20 secs, took 0.50 GiB\n"
    "INFO:     Application startup complete.\n"
)


def without_numbers(boot: Boot) -> tuple[object, ...]:
    failure = boot.failure
    return boot.buckets, boot.facts, failure and failure.kind, boot.ready, [span.name for span in boot.phases]


@pytest.mark.parametrize(("first", "last"), [(BAD, GOOD), (GOOD, BAD)], ids=["bad-good", "good-bad"])
def test_engines_without_a_server_line(first: str, last: str) -> None:
    """Of two engines in one log, without the line of a server between them, the last one counts, with nothing of the first."""
    found = read(first + last, engine="vllm")
    assert found.boots == 2
    assert without_numbers(found) == without_numbers(read(last, engine="vllm"))


def test_engines_side_by_side() -> None:
    """Data-parallel engines that begin one after another are one boot."""
    one = ENGINE.format(hour=13, length=4096)
    lines = "".join(f"(EngineCore_DP{rank} pid={rank + 7}) {line}\n" for rank in (0, 1) for line in one.splitlines())
    found = read(lines, engine="vllm")
    assert (found.boots, found.buckets["weights"]) == (1, {"gpu0": round(15.25 * GIB), "gpu1": round(15.25 * GIB)})


def test_death_is_no_recovery() -> None:
    """A server that is ready after an engine died, with nothing to tell where it began, did not recover."""
    found = read(BAD + GOOD.split("\n", 1)[1], engine="vllm")
    assert (found.ready, found.failure) == (True, None)
    assert any(warning.startswith("another process failed before this one was ready") for warning in found.warnings)
    assert not any(warning.startswith("recovered") for warning in found.warnings)


@pytest.mark.parametrize("length", ["0", "0,000"])
def test_requests_of_no_length(length: str) -> None:
    """A context of nothing gives no size of blocks, and no error."""
    lines = f"# GPU blocks: 5, # CPU blocks: 1\nMaximum concurrency for {length} tokens per request: 1.54x\n"
    found = read(lines, engine="vllm")
    assert (found.facts["blocks"], "block_size" in found.facts) == (5, False)


def test_text_after_a_server_is_ready() -> None:
    """A message without its prefix in a log of lines with prefixes may be somebody's, once the server is ready."""
    found = read(f"{GOOD}RuntimeError: {REFUSED}\nplease help\n", engine="vllm")
    assert (found.failure, found.ready) == (None, True)
    assert any("looks like a refused allocation" in warning for warning in found.warnings)
    assert read(GOOD + CAUGHT, engine="vllm").failure is not None
    assert read(f"{GOOD}ERROR 07-25 14:50:00 [core.py:9] RuntimeError: {REFUSED}\n", engine="vllm").failure is not None


def test_text_after_a_program_is_ready() -> None:
    """The same for programs without a grammar of their own: a line that no logger wrote as an error."""
    ready = "INFO:     Uvicorn running on http://0.0.0.0:8000\n"
    found = read(f"{ready}User: RuntimeError: {REFUSED}\n", engine="transformers")
    assert found.failure is None
    assert any("looks like a refused allocation" in warning for warning in found.warnings)
    for line in (
        f"ERROR:    failed: {REFUSED}\n",
        f"2026-03-08 16:44:10,250 - app - ERROR - failed: {REFUSED}\n",
        CAUGHT,
    ):
        assert read(ready + line, engine="transformers").failure is not None


def test_allocation_that_was_tried_again() -> None:
    """A refused allocation that the program caught before it was ready is a warning."""
    found = read(
        f"{CAUGHT}trying a smaller batch\nINFO:     Uvicorn running on http://0.0.0.0:8000\n", engine="transformers"
    )
    assert (found.failure, found.ready) == (None, True)
    assert any(warning.startswith("recovered: ") for warning in found.warnings)


def test_encoder_of_images() -> None:
    """What encodes images, or sound, is the projector, also where its own file has no telling name."""
    frames = '  File "/x/modeling_some.py", line 9, in forward\n    image = self.visual(pixels)\n  File "/x/a.py", line 2, in forward\n    y\n'
    failure = read(f"Traceback (most recent call last):\n{frames}torch.OutOfMemoryError: {REFUSED}\n").failure
    assert failure is not None
    assert (failure.phase, failure.bucket) == ("prefill", "projector")


def test_message_of_apple_gives_the_engine_away() -> None:
    """A lone message of a device of Apple's is one of torch, as those of others are."""
    line = "RuntimeError: MPS backend out of memory (MPS allocated: 17.25 GB, max allowed: 18.13 GB). Tried to allocate 1.25 GB\n"
    assert read(line).engine == "transformers"


def test_process_that_can_only_be_this_one() -> None:
    """Where the card has no room for both, the process that torch names by a number is its own."""
    text = (
        REFUSED + " Process 1 has {used} GiB memory in use. Of the allocated memory 20.00 GiB is allocated by PyTorch."
    )
    own = read(f"torch.OutOfMemoryError: {text.format(used='20.50')}\n").facts
    assert (own["process_bytes"], "other_processes_bytes" in own) == (round(20.5 * GIB), False)
    other = read(f"torch.OutOfMemoryError: {text.format(used='1.00')}\n").facts
    assert (other["other_processes_bytes"], "process_bytes" in other) == (GIB, False)


def test_second_load_that_failed() -> None:
    """An error of a load after a model was ready is about the next load, and no request."""
    text = (LOGS / "ollama" / "2025-10" / "split.log").read_text(encoding="utf-8")
    boot = read(text)
    assert boot.ready
    found = read(
        text
        + 'time=2025-12-01T10:00:00.000Z level=INFO source=sched.go:446 msg="Load failed" model=/x error="llama runner'
        ' process has terminated: cudaMalloc failed: out of memory"\n'
    )
    assert found.failure is not None
    assert (found.failure.kind, found.failure.phase, found.ready) == ("out_of_memory", "start", False)
    assert "a request took" not in str(found.failure.note)


def test_journal_in_another_zone() -> None:
    """Times of a journal without zone and year, and those with them, are brought onto one clock by lines that have both."""
    axis = Axis()
    own = "Mar 15 11:39:07 host ollama[7]: time=2024-03-15T11:39:07.250+01:00 level=INFO msg=x"
    times = [axis.time(split(line)) for line in (own, "Mar 15 11:39:12 host ollama[7]: x", own)]
    assert times[0] is not None
    assert times == [times[0], times[0] + 4.75, times[0]]
    other = Axis()
    begun = other.time(split("Mar 15 11:39:02 host ollama[7]: x"))
    assert begun is not None
    assert other.time(split(own)) == begun + 5.25


def test_stamps_of_a_wrapper_are_taken_in_any_order() -> None:
    """A wrapper's time with a zone is on the same clock as the engine's own without one."""
    text = (LOGS / "vllm" / "0.33" / "one-card.log").read_text(encoding="utf-8")
    assert re.search(r"^INFO|^\(", text)
    stamped = "".join(
        f"2026-03-08T16:44:{number % 60:02}.000000Z {line}\n" for number, line in enumerate(text.splitlines())
    )
    assert read(stamped).buckets == read(text).buckets
