"""What reading a long boot log costs: a server at full verbosity for a night.

    python ci/bench/bootlog.py [--size 200]

Writes a log of so many MB: a boot, then requests with every line that llama-server prints for each token at ``-v``, the
JSON bodies of requests and replies among them, some of which talk about memory. Reads it as ``vram boot`` does, in a
process of its own, and prints one line of JSON: seconds, MB/s, the peak of its resident memory, and beside it the
seconds of a plain ``grep -c`` of one phrase in the same file. Ends with 1 where it takes over 10 s or over 200 MB, or
reads anything but the boot.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
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
print(json.dumps([seconds, peak, boot.ready, boot.failure is None, boot.ledger().buckets(), boot.phases[-1].line]))
"""


def main() -> int:
    """Write, read, print; 1 where it is too slow, too large or wrong."""
    parser = argparse.ArgumentParser(description="Reading a long boot log.")
    parser.add_argument("--size", type=int, default=200, help="MB of the log")
    size = parser.parse_args().size * 1_000_000
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "server.log"
        lines = write(path, size)
        short = Path(name) / "boot.log"
        short.write_text("\n".join(boot()) + "\n", encoding="utf-8")
        expected = read(short)
        found = read(path)
        began = time.perf_counter()
        subprocess.run(["grep", "-c", "buffer size", path], check=False, stdout=subprocess.PIPE)
        grep = time.perf_counter() - began
        seconds, peak = found[0], found[1]
        right = found[2:5] == expected[2:5]
        row = {
            "bytes": path.stat().st_size,
            "lines": lines,
            "seconds": round(seconds, 2),
            "mb_per_second": round(path.stat().st_size / 1e6 / seconds, 1),
            "peak_rss_mb": round(peak / 1e6, 1),
            "peak_rss_of_the_boot_alone_mb": round(expected[1] / 1e6, 1),
            "grep_seconds": round(grep, 2),
            "right": right,
        }
    print(json.dumps(row))
    return 0 if right and seconds < MOST_SECONDS and peak < MOST_BYTES else 1


def read(path: Path) -> list[Any]:
    """The log as a fresh process reads it."""
    done = subprocess.run([sys.executable, "-c", READER, path], check=True, stdout=subprocess.PIPE)
    found: list[Any] = json.loads(done.stdout)
    return found


def boot() -> Iterator[str]:
    """The lines of a boot, to the first idle slot."""
    for line in BOOT.read_text(encoding="utf-8").split("\n"):
        yield line
        if READY in line:
            return


def write(path: Path, size: int) -> int:
    """Write a log of about ``size`` bytes; the number of its lines."""
    chance = random.Random(200)
    written, lines, task = 0, 0, 0
    with path.open("w", encoding="utf-8") as stream:
        for line in boot():
            written += stream.write(line + "\n")
            lines += 1
        while written < size:
            for line in request(task, chance):
                # with a time that goes on, as the server's own
                clock = 5_000_000 + lines * 700
                stamp = (
                    f"{clock // 60_000_000}.{clock // 1_000_000 % 60:02d}.{clock // 1000 % 1000:03d}.{clock % 1000:03d}"
                )
                text = f"{stamp} {line}\n"
                written += stream.write(text)
                lines += text.count("\n")
            task += TOKENS + 1
    return lines


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
