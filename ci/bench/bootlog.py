"""What reading a long boot log costs: a server at full verbosity for a night.

    python ci/bench/bootlog.py [--size 200] [--kind KIND]

Writes logs of so many MB: a boot, then what a server may print after it:

- ``requests``: every line that llama-server prints for each token at ``-v``, the JSON bodies of requests and replies
  among them, some of which talk about memory
- ``letters``: lines that hold nothing, of one letter (``letters-vllm`` and so on after a boot of that engine)
- ``prose``: lines of common words, as people and models write them
- ``phrases``: lines that each hold several of the phrases that a grammar looks for, thousands of them in a row

Reads each as ``vram boot`` does, in a process of its own, and prints a line of JSON: seconds, of the processor too,
MB/s, the peak of its resident memory, and beside it the seconds of a plain ``grep -c`` of one phrase in the same file.
Ends with 1 where one takes over 10 s or over 200 MB, or anything but the boot is read.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

LOGS = Path(__file__).resolve().parents[2] / "fixtures" / "bootlogs"
BOOT = LOGS / "llama-server" / "2026-b10068" / "rpc.log"
READY = "all slots are idle"
MOST_SECONDS, MOST_BYTES = 10.0, 200_000_000
TOKENS = 200
READER = """
import json, resource, sys, time
began = time.perf_counter()
from pytest_vram import bootlog
boot = bootlog.read(sys.argv[1])
seconds = time.perf_counter() - began
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(json.dumps([seconds, time.process_time(), peak, boot.ready, boot.failure is None, boot.ledger().buckets()]))
"""


def main() -> int:
    """Write, read, print; 1 where one is too slow, too large or wrong."""
    parser = argparse.ArgumentParser(description="Reading long boot logs.")
    parser.add_argument("--size", type=int, default=200, help="MB of each log")
    parser.add_argument("--kind", choices=list(KINDS), action="append", help="only this one; may be repeated")
    options = parser.parse_args()
    return max([measured(kind, options.size * 1_000_000) for kind in options.kind or KINDS])


def measured(kind: str, size: int) -> int:
    """Measure one kind of log, and print it."""
    log, rest = KINDS[kind]
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "server.log"
        lines = write(path, size, log, rest)
        short = Path(name) / "boot.log"
        short.write_text("\n".join(boot(log)) + "\n", encoding="utf-8")
        expected = read(short)
        found = read(path)
        began = time.perf_counter()
        subprocess.run(["grep", "-c", "buffer size", path], check=False, stdout=subprocess.PIPE)
        grep = time.perf_counter() - began
        seconds, processor, peak = found[:3]
        right = found[3:] == expected[3:]
        row = {
            "kind": kind,
            "bytes": path.stat().st_size,
            "lines": lines,
            "seconds": round(seconds, 2),
            "processor_seconds": round(processor, 2),
            "mb_per_second": round(path.stat().st_size / 1e6 / seconds, 1),
            "peak_rss_mb": round(peak / 1e6, 1),
            "peak_rss_of_the_boot_alone_mb": round(expected[2] / 1e6, 1),
            "grep_seconds": round(grep, 2),
            "right": right,
        }
    print(json.dumps(row), flush=True)
    return 0 if right and seconds < MOST_SECONDS and peak < MOST_BYTES else 1


def read(path: Path) -> list[Any]:
    """The log as a fresh process reads it."""
    done = subprocess.run([sys.executable, "-c", READER, path], check=True, stdout=subprocess.PIPE)
    found: list[Any] = json.loads(done.stdout)
    return found


def boot(log: Path) -> Iterator[str]:
    """The lines of a boot, to the first idle slot where the log has one."""
    for line in log.read_text(encoding="utf-8").rstrip("\n").split("\n"):
        yield line
        if READY in line:
            return


def write(path: Path, size: int, log: Path, rest: Callable[[int], Iterator[str]]) -> int:
    """Write a log of about ``size`` bytes; the number of its lines."""
    written, lines = 0, 0
    with path.open("w", encoding="utf-8") as stream:
        for line in boot(log):
            written += stream.write(line + "\n")
            lines += 1
        for text in rest(lines):
            written += stream.write(text)
            lines += text.count("\n")
            if written >= size:
                return lines
    return lines


def requests(lines: int) -> Iterator[str]:
    """Requests, one after another, with a time that goes on, as the server's own."""
    chance, task = random.Random(200), 0
    while True:
        for line in request(task, chance):
            clock = 5_000_000 + lines * 700
            stamp = f"{clock // 60_000_000}.{clock // 1_000_000 % 60:02d}.{clock // 1000 % 1000:03d}.{clock % 1000:03d}"
            text = f"{stamp} {line}\n"
            lines += text.count("\n")
            yield text
        task += TOKENS + 1


def letters(lines: int) -> Iterator[str]:
    """A letter with which a phrase begins."""
    while True:
        yield "x" * 100 + "\n"


def prose(lines: int) -> Iterator[str]:
    """What people write: few words are common, and most are not (Zipf)."""
    chance = random.Random(7)
    weights = [1 / rank for rank in range(1, len(COMMON) + 1)]
    some = [" ".join(chance.choices(COMMON, weights, k=chance.randint(1, 40))) + "\n" for _ in range(20_000)]
    while True:
        yield chance.choice(some)


def phrases(lines: int) -> Iterator[str]:
    """Lines of a server that seem to say something."""
    while True:
        yield (
            "0.00.026.362 I slot update_slots: id 0 | task 1 | prompt processing progress CUDA0 n_tokens = 2048"
            " llama_model_load\n"
        )


KINDS: dict[str, tuple[Path, Callable[[int], Iterator[str]]]] = {
    "requests": (BOOT, requests),
    "letters": (BOOT, letters),
    "prose": (BOOT, prose),
    "phrases": (BOOT, phrases),
    "letters-ollama": (LOGS / "ollama" / "2026-07" / "context-reduced.log", letters),
    "letters-vllm": (LOGS / "vllm" / "0.11" / "sleep.log", letters),
    "letters-sglang": (LOGS / "sglang" / "2026" / "two-cards.log", letters),
    "prose-vllm": (LOGS / "vllm" / "0.11" / "sleep.log", prose),
}
COMMONPLACE = (
    "when the first train of the day leaves there are always some people who run along it with their bags and coffee"
    " although everybody knows that another one goes in ten minutes; my brother found this very strange because where"
    " he lives you would wait for an hour, or walk home through the fields if it is warm enough and nobody is able to"
    " take you with them. We asked her what she wanted for dinner, but she said only that it should be quick, cheap and"
    " better than yesterday's soup, which was fair. Please write a function that sorts these numbers, explain each step"
    " and do not forget about empty lists! The answer was correct: forty-two, as far as I can see; however your second"
    " question requires more thought. It failed once before, during winter, after someone had left all windows open"
)
COMMON = COMMONPLACE.split(" ")

PROSE = "the memory of a model is its weights and what it keeps of a conversation while buffers size up"
WORDS = PROSE.split(" ")
QUESTION = "my server says CUDA error: out of memory and failed to allocate CUDA0 buffer of size 1073741824, why?"


def request(task: int, chance: random.Random) -> Iterator[str]:
    """What a server prints for one request and its answer; times are put before it by the caller."""
    history = [" ".join(chance.choices(WORDS, k=40)) for _ in range(20)]
    body = {"messages": [{"role": "user", "content": text} for text in [*history, QUESTION]], "stream": True}
    yield f"D srv  log_server_r: request:  {json.dumps(body)}"
    yield "I srv    operator(): chat format: peg-native"
    yield f"D res  add_waiting_: add task {task} to waiting list. current waiting = 0 (before add)"
    yield f"D que          post: new task, id = {task}/1, front = 0"
    yield f"I slot get_availabl: id  0 | task -1 | selected slot by LCP similarity, sim_best = {chance.random():.3f}"
    yield "I srv        update:  - cache state: 3 prompts, 61.250 MiB (limits: 8192.000 MiB, 4096 tokens)"
    yield f"I slot launch_slot_: id  0 | task {task} | processing task, is_child = 0"
    yield f"I slot   operator(): id  0 | task {task} | new prompt, n_ctx_slot = 4096, n_keep = 0, task.n_tokens = 834"
    for number in range(TOKENS):
        yield from token(task, number, chance)
    yield f"I slot print_timing: id  0 | task {task} |        eval time =     905.44 ms /   {TOKENS} tokens"
    yield f"I slot      release: id  0 | task {task} | stop processing: n_tokens = {834 + TOKENS}, truncated = 0"
    yield "I srv  log_server_r: done request: POST /v1/chat/completions 127.0.0.1 200"
    yield f"I srv  update_slots: {READY}"


def token(task: int, number: int, chance: random.Random) -> Iterator[str]:
    """What a server prints for one token."""
    word, one = chance.choice(WORDS), task + number
    chunk = {
        "choices": [{"finish_reason": None, "index": 0, "delta": {"content": f" {word}"}}],
        "created": 1_796_078_989,
        "id": "chatcmpl-3jDiV4mAxB4MtmcYki9ZRklDuiquZ93S",
        "model": "my-model.gguf",
        "system_fingerprint": "b10068-571d0d5",
        "object": "chat.completion.chunk",
    }
    yield "D que    start_loop: waiting for new tasks"
    yield "D que    start_loop: processing new tasks"
    yield f"D que    start_loop: processing task, id = {one}"
    yield "D que    start_loop: update slots"
    yield "D srv  update_slots: posting NEXT_RESPONSE"
    yield f"D que          post: new task, id = {one + 1}, front = 0"
    slot = f"id  0 | task {task} |"
    yield f"D slot handle_last_: {slot} slot decode token, id=816, n_ctx = 4096, n_tokens = {834 + number}"
    yield "D set_adapters_lora: adapters = (nil)"
    yield "D adapters_lora_are_same: adapters = (nil)"
    yield "D set_embeddings: value = 0"
    yield "D srv        decode: n_batch (effective) = 2048, off = 0"
    yield f"D srv    operator(): http: streamed chunk: data: {json.dumps(chunk)}\n\n\n"
    yield f"D res          send: sending result for task id = {task}"
    yield f"D res          send: task id = {task} pushed to result queue"
    left = f"n_decoded = {number}, n_remaining = {TOKENS - number}"
    yield f"D slot process_toke: {slot} {left}, next token:   816 ' {word}'"


if __name__ == "__main__":
    sys.exit(main())
