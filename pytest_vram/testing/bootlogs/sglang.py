"""Logs of SGLang in the line shapes of its releases, made of random figures."""

from __future__ import annotations

from random import Random
from typing import Any

from pytest_vram.ledger import Bucket, Entry
from pytest_vram.testing.bootlogs import Writer, Written

_GIB = 1 << 30


def _bytes(hundredths: int) -> int:
    """Bytes of a figure that is printed in hundredths of 2**30 bytes, which SGLang calls GB."""
    return round(hundredths * _GIB / 100)


def _gb(hundredths: int) -> str:
    return f"{hundredths / 100:.2f}"


def _entry(bucket: Bucket, device: str, size: int) -> Entry:
    return Entry(bucket=bucket, device=device, bytes=size, source="engine-log")


class _Log:
    """Lines with SGLang's prefix: the time, and the rank where there are several."""

    def __init__(self, random: Random) -> None:
        self.lines: list[str] = []
        self.entries: list[Entry] = []
        self._seconds = random.randrange(0, 40_000)
        self._random = random

    def say(self, text: str, rank: str = "") -> None:
        """A line of the engine."""
        self._seconds += self._random.randrange(0, 3)
        at = f"{self._seconds // 3600:02}:{self._seconds // 60 % 60:02}:{self._seconds % 60:02}"
        self.lines += f"[2026-06-08 {at}{' ' * bool(rank)}{rank}] {text}".split("\n")

    def found(self, bucket: Bucket, device: str, hundredths: int) -> None:
        """A figure that the reader must find."""
        self.entries.append(_entry(bucket, device, _bytes(hundredths)))

    def serving(self) -> None:
        """The last lines of a boot and the first requests."""
        self.lines.append("INFO:     Application startup complete.")
        self.lines.append("INFO:     Uvicorn running on http://127.0.0.1:30000 (Press CTRL+C to quit)")
        self.say("Prefill batch. #new-seq: 1, #new-token: 6, #cached-token: 0, token usage: 0.00, #running-req: 0")
        self.say("The server is fired up and ready to roll!")
        self.say("Receive: obj=GenerateReqInput(text='CUDA out of memory. Tried to allocate 9.00 GiB', id='x')")
        self.say("Decode batch. #running-req: 1, #token: 40, token usage: 0.00, gen throughput (token/s): 4.52")

    def written(self, cards: int, facts: dict[str, Any], **more: Any) -> Written:
        """The log and what it says."""
        return Written(
            engine="sglang",
            text="\n".join(self.lines) + "\n",
            entries=tuple(self.entries),
            devices={f"gpu{i}": f"CUDA{i}" for i in range(cards)},
            facts=facts,
            **more,
        )


def _arguments(tensor: int, share: float, *, dictionary: bool = False, data: int = 1, sharing: bool = False) -> str:
    values: dict[str, Any] = {
        "model_path": "someone/some-model",
        "device": "cuda",
        "kv_cache_dtype": "auto",
        "dtype": "auto",
        "quantization": None,
        "context_length": None,
        "mem_fraction_static": share,
        "max_running_requests": None,
        "tp_size": tensor,
        "pp_size": 1,
        "dp_size": data,
        "enable_dp_attention": sharing,
        "disable_cuda_graph": False,
    }
    if dictionary:
        return f"server_args={values}"
    return f"server_args=ServerArgs({', '.join(f'{name}={value!r}' for name, value in values.items())})"


def _facts(tokens: int, context: int, share: float, tensor: int = 1) -> dict[str, Any]:
    return {
        "kv_tokens": tokens,
        "context": context,
        "memory_share": share,
        "tensor_parallel": tensor,
        "pipeline_parallel": 1,
        "dtype": "bfloat16",
        "architecture": "Qwen3ForCausalLM",
        "model_name": "someone/some-model",
        "url": "http://127.0.0.1:30000",
    }


def _total(tokens: int, context: int, free: int) -> str:
    return (
        f"max_total_num_tokens={tokens}, chunked_prefill_size=2048, max_prefill_tokens=16384,"
        f" max_running_requests=48, context_len={context}, available_gpu_mem={_gb(free)} GB"
    )


def _oldest(random: Random) -> Written:
    """0.3: what was free is printed, and no size."""
    log, share = _Log(random), 0.83
    free, weights, pool = random.randrange(4000, 8000), random.randrange(50, 1500), random.randrange(60, 2000)
    tokens, context = random.randrange(1000, 400_000), random.choice([4096, 32768])
    log.say(_arguments(1, share))
    log.say(f"Load weight begin. avail mem={_gb(free)} GB")
    loaded = free - weights
    log.say(f"Load weight end. type=Qwen3ForCausalLM, dtype=torch.bfloat16, avail mem={_gb(loaded)} GB")
    left = loaded - pool
    log.say(f"Memory pool end. avail mem={_gb(left)} GB")
    log.say("Capture cuda graph begin. This can take up to several minutes.")
    log.say(
        f"max_total_num_tokens={tokens}, max_prefill_tokens=16384, max_running_requests=4097, context_len={context}"
    )
    log.serving()
    log.entries = [
        _entry("weights", "gpu0", _bytes(free) - _bytes(loaded)),
        _entry("kv", "gpu0", _bytes(loaded) - _bytes(left)),
    ]
    return log.written(1, _facts(tokens, context, share))


def _cards_2025(random: Random) -> Written:
    """0.4 and 0.5 with several cards, each with its own figures."""
    log, share = _Log(random), 0.75
    cards = random.choice([1, 2, 4])
    tokens, context = random.randrange(1000, 400_000), 32768
    names = [f"TP{i}" for i in range(cards)] if cards > 1 else [""]
    order = random.sample(range(cards), cards)
    log.say(_arguments(cards, share))
    for i in order:
        log.say("Init torch distributed begin.", names[i])
    base, weights, keys = random.randrange(1, 90), random.randrange(50, 1500), random.randrange(10, 900)
    for i in order:
        log.say(f"Init torch distributed ends. mem usage={_gb(base)} GB", names[i])
        log.say(f"Load weight begin. avail mem={_gb(7900)} GB", names[i])
        log.found("context", f"gpu{i}", base)
    for i in order:
        one = weights + i
        end = f"Load weight end. type=Qwen3ForCausalLM, dtype=torch.bfloat16, avail mem={_gb(7900 - one)} GB"
        log.say(f"{end}, mem usage={_gb(one)} GB.", names[i])
        log.found("weights", f"gpu{i}", one)
    for i in order:
        log.say(f"KV Cache is allocated. #tokens: {tokens}, K size: {_gb(keys)} GB, V size: {_gb(keys)} GB", names[i])
        log.found("kv", f"gpu{i}", keys)
        log.found("kv", f"gpu{i}", keys)
        log.say("Memory pool end. avail mem=12.05 GB", names[i])
    for i in order:
        log.say("Capture cuda graph begin. This can take up to several minutes. avail mem=12.07 GB", names[i])
    log.say("Capture cuda graph bs [1, 2, 4, 8, 10]", names[0])
    for i in order:
        graphs = random.randrange(1, 200)
        log.say(
            f"Capture cuda graph end. Time elapsed: 3.11 s. mem usage={_gb(graphs)} GB. avail mem=11.10 GB.", names[i]
        )
        log.found("compute", f"gpu{i}", graphs)
    log.say(_total(tokens, context, 1110), names[0])
    log.serving()
    facts = _facts(tokens, context, share, cards) | {"slots": 48, "free_after_bytes": _bytes(1110)}
    return log.written(cards, facts)


def _draft(random: Random) -> Written:
    """0.5 with a model that drafts: its own weights, cache and graphs."""
    log, share = _Log(random), 0.7
    tokens, context = random.randrange(1000, 400_000), 8192
    target, second = random.randrange(300, 1500), random.randrange(10, 200)
    log.say(_arguments(1, share))
    for bucket, weights, cache in (("weights", target, random.randrange(50, 800)), ("draft", second, 25)):
        log.say("Load weight begin. avail mem=78.51 GB")
        end = "Load weight end. type=Qwen3ForCausalLM, dtype=torch.bfloat16, avail mem=70.00 GB"
        log.say(f"{end}, mem usage={_gb(weights)} GB.")
        log.found("weights" if bucket == "weights" else "draft", "gpu0", weights)
        log.say(f"KV Cache is allocated. #tokens: {tokens}, KV size: {_gb(cache)} GB")
        log.found("kv" if bucket == "weights" else "draft", "gpu0", cache)
        log.say("Memory pool end. avail mem=12.05 GB")
        which = "" if bucket == "weights" else "draft "
        graphs = random.randrange(1, 90)
        log.say(f"Capture {which}cuda graph begin. This can take up to several minutes. avail mem=11.51 GB")
        log.say(f"Capture {which}cuda graph end. Time elapsed: 2.20 s. mem usage={_gb(graphs)} GB. avail mem=11.01 GB.")
        log.found("compute" if bucket == "weights" else "draft", "gpu0", graphs)
    log.say(_total(tokens, context, 1101))
    log.serving()
    return log.written(1, _facts(tokens, context, share))


def _hybrid_2026(random: Random) -> Written:
    """0.5.23 with a sliding window or recurrent layers, and ranks that share attention."""
    log, share = _Log(random), 0.8
    cards = random.choice([1, 2])
    names = [f"DP{i} TP{i}" for i in range(cards)] if cards > 1 else [""]
    tokens, context = random.randrange(1000, 400_000), 131072
    log.say(_arguments(cards, share, dictionary=True, data=cards, sharing=cards > 1))
    windowed = random.random() < 0.5
    for i, name in enumerate(names):
        weights, keys = random.randrange(50, 1500), random.randrange(10, 900)
        log.say(f"Load weight begin. avail mem={_gb(7900)} GB", name)
        end = "Load weight end. elapsed=5.20 s, type=Qwen3ForCausalLM, quant=fp8, fmt=e4m3"
        log.say(f"{end}, avail mem={_gb(7900 - weights)} GB, mem usage={_gb(weights)} GB.", name)
        log.found("weights", f"gpu{i}", weights)
        kind = "dtype: torch.bfloat16, "
        if windowed:
            for label, share_of in (("Full ", 1), ("SWA ", 4)):
                size = max(1, keys // share_of)
                log.say(
                    f"{label}KV Cache is allocated. {kind}#tokens: {tokens // share_of}, K size: {_gb(size)} GB,"
                    f" V size: {_gb(size)} GB",
                    name,
                )
                log.found("kv", f"gpu{i}", size)
                log.found("kv", f"gpu{i}", size)
            log.say(f"SWAKVPool mem usage: {_gb(2 * keys)} GB, swa size: {tokens // 4}, full size: {tokens}", name)
        else:
            state = random.randrange(10, 300)
            log.say(
                f"Mamba Cache is allocated. max_mamba_cache_size: 48, conv_state size: 0.07GB, ssm_state size:"
                f" {_gb(state)}GB ",
                name,
            )
            log.found("recurrent", f"gpu{i}", 7)
            log.found("recurrent", f"gpu{i}", state)
            log.say(f"KV Cache is allocated. {kind}#tokens: {tokens}, KV size: {_gb(keys)} GB", name)
            log.found("kv", f"gpu{i}", keys)
        log.say("Memory pool end. avail mem=12.05 GB", name)
        for graph in ("prefill", "decode"):
            size = random.randrange(1, 90)
            log.say(f"Capture target {graph} CUDA graph begin. backend=full, num_tokens=8, avail mem=11.99 GB", name)
            log.say(
                f"Capture target {graph} CUDA graph end. bs=[1, 2, 4], elapsed=1.31 s, mem usage={_gb(size)} GB,"
                " avail mem=11.03 GB.",
                name,
            )
            log.found("compute", f"gpu{i}", size)
    log.say(_total(tokens, context, 1103), names[0])
    log.serving()
    facts = _facts(tokens, context, share, cards)
    facts.pop("dtype")  # this release does not print it where the model is quantised
    return log.written(cards, facts | {"quantization": "fp8", "cache_type": "bfloat16", "load_seconds": 5.2})


def _nothing_left(random: Random) -> Written:
    """The weights leave no room for a cache."""
    log, share = _Log(random), 0.5
    weights, tokens = random.randrange(3000, 7000), random.randrange(10, 900_000)
    log.say(_arguments(1, share))
    log.say(f"Load weight begin. avail mem={_gb(7900)} GB")
    end = f"Load weight end. type=Qwen3ForCausalLM, dtype=torch.bfloat16, avail mem={_gb(7900 - weights)} GB"
    log.say(f"{end}, mem usage={_gb(weights)} GB.")
    log.say(f"max_total_tokens=131072 is larger than the profiled value -{tokens}. Use the profiled value instead.")
    trace = (
        "Scheduler hit an exception: Traceback (most recent call last):\n"
        '  File "/opt/sglang/srt/managers/scheduler.py", line 2546, in run_scheduler_process\n'
        "    scheduler = Scheduler(server_args, port_args, gpu_id, tp_rank, pp_rank, dp_rank)\n"
        "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static."
    )
    log.say(trace)
    log.say("Received sigquit from a child process. It usually means the child failed.")
    log.found("weights", "gpu0", weights)
    return log.written(1, {"profiled_tokens": -tokens, "memory_share": share}, ready=False, failure="kv_planning")


WRITERS: dict[str, Writer] = {
    "2024": _oldest,
    "2025-cards": _cards_2025,
    "2025-draft": _draft,
    "2026": _hybrid_2026,
    "2025-nothing-left": _nothing_left,
}
