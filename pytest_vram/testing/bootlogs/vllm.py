"""Logs of vLLM in the line shapes of its releases, made of random figures."""

from __future__ import annotations

from random import Random
from typing import Any, NamedTuple

from pytest_vram.ledger import Bucket, Entry
from pytest_vram.testing.bootlogs import Writer, Written

_GIB = 1 << 30
_CARD = 7999
_BLOCK = 16


def _bytes(hundredths: int) -> int:
    """Bytes of a figure that is printed in hundredths of 2**30 bytes."""
    return round(hundredths * _GIB / 100)


def _two(hundredths: int) -> str:
    return f"{hundredths / 100:.2f}"


def _short(hundredths: int) -> str:
    """As Python's ``round`` prints it: without zeros at the end, but for one."""
    return str(hundredths / 100)


class _Model(NamedTuple):
    """Figures of one boot, in hundredths of 2**30 bytes for each card."""

    weights: int
    other: int
    activation: int
    graphs: int
    cache: int
    context: int
    tokens: int

    @property
    def concurrency(self) -> str:
        return f"{self.tokens / self.context:.2f}"


def _random(random: Random) -> _Model:
    context = random.choice([2048, 4096, 8192, 32768])
    blocks = random.randrange(max(200, context // _BLOCK), 20_000)
    return _Model(
        weights=random.randrange(50, 2500),
        other=random.randrange(5, 90),
        activation=random.randrange(101, 400),
        graphs=random.randrange(10, 100),
        cache=random.randrange(60, 3000),
        context=context,
        tokens=blocks * _BLOCK,
    )


class _Log:
    """Lines with the prefixes of a release. ``bracketed``: the place in the source stands between brackets."""

    def __init__(self, random: Random, *, bracketed: bool) -> None:
        self.lines: list[str] = []
        self._seconds = random.randrange(0, 40_000)
        self._random = random
        self._bracketed = bracketed

    def say(self, process: str, place: str, text: str, level: str = "INFO") -> None:
        """A line of the engine; ``process`` is empty for one that has no name in the log."""
        self._seconds += self._random.randrange(0, 4)
        at = f"{self._seconds // 3600:02}:{self._seconds // 60 % 60:02}:{self._seconds % 60:02}"
        where = f"[{place}]" if self._bracketed else f"{place}]"
        before = f"({process}) " if process else ""
        self.lines += [f"{before}{level} 03-08 {at} {where} {line}" for line in text.split("\n")]

    def bare(self, text: str) -> None:
        """A line of something else in the same process."""
        self.lines.append(text)

    def serving(self) -> None:
        """Two requests, and what the engine says of its rates."""
        self.bare("INFO:     Started server process [1]")
        self.bare("INFO:     Waiting for application startup.")
        self.bare("INFO:     Application startup complete.")
        self.bare('INFO:     127.0.0.1:57894 - "POST /v1/chat/completions HTTP/1.1" 200 OK')
        self.say(
            "",
            "logger.py:42",
            "Received request chatcmpl-1: prompt: 'CUDA out of memory. Tried to allocate 9.00 GiB'",
        )

    @property
    def text(self) -> str:
        return "\n".join(self.lines) + "\n"


def _entry(bucket: Bucket, device: str, size: int) -> Entry:
    return Entry(bucket=bucket, device=device, bytes=size, source="engine-log")


def _facts(model: _Model, version: str, tensor: int = 1) -> dict[str, Any]:
    return {
        "context": model.context,
        "kv_tokens": model.tokens,
        "max_concurrency": float(model.concurrency),
        "tensor_parallel": tensor,
        "pipeline_parallel": 1,
        "dtype": "bfloat16",
        "cache_type": "fp8",
        "build": version,
    }


def _config(model: _Model, tensor: int = 1, data: int | None = None) -> str:
    parallel = "" if data is None else f" data_parallel_size={data},"
    return (
        f"model='someone/some-model', speculative_config=None, tokenizer='someone/some-model',"
        f" trust_remote_code=False, dtype=torch.bfloat16, max_seq_len={model.context}, download_dir=None,"
        f" load_format=auto, tensor_parallel_size={tensor}, pipeline_parallel_size=1,{parallel}"
        " disable_custom_all_reduce=False, quantization=None, enforce_eager=False, kv_cache_dtype=fp8,"
        " device_config=cuda, seed=0, served_model_name=some, enable_prefix_caching=True"
    )


def _first_engine(random: Random, cards: int) -> Written:
    """0.6.6 with one card or several; the process of the first one has no name in the log."""
    model, log = _random(random), _Log(random, bracketed=False)
    version = "0.6.6.post1"
    workers = [""] + [f"VllmWorkerProcess pid={100 + 7 * i}" for i in range(1, cards)]
    log.say("", "api_server.py:712", f"vLLM API server version {version}")
    log.say("", "llm_engine.py:234", f"Initializing an LLM engine (v{version}) with config: {_config(model, cards)}")
    weights = [random.randrange(1_000, 300_000) for _ in workers]
    random.shuffle(order := list(range(cards)))
    for i in order:
        log.say(workers[i], "model_runner.py:1094", "Starting to load model someone/some-model...")
        log.say(workers[i], "model_runner.py:1099", f"Loading model weights took {weights[i] / 10_000:.4f} GB")
    entries: list[Entry] = []
    for i in order:
        shift = random.randrange(0, 5)
        profile = (
            "Memory profiling takes 2.41 seconds\n"
            f"the current vLLM instance can use total_gpu_memory ({_two(_CARD)}GiB) x gpu_memory_utilization (0.90)"
            f" = {_two(_CARD * 9 // 10)}GiB\n"
            f"model weights take {weights[i] / 10_000:.2f}GiB; non_torch_memory takes {_two(model.other + shift)}GiB;"
            f" PyTorch activation peak memory takes {_two(model.activation)}GiB; the rest of the memory reserved for"
            f" KV Cache is {_two(model.cache - shift)}GiB."
        )
        log.say(workers[i], "worker.py:241", profile)
        device = f"gpu{i}"
        entries += [
            _entry("weights", device, round(weights[i] * _GIB / 10_000)),
            _entry("context", device, _bytes(model.other + shift)),
            _entry("compute", device, _bytes(model.activation)),
            _entry("kv", device, _bytes(model.cache - shift)),
        ]
    log.say("", "gpu_executor.py:76", f"# GPU blocks: {model.tokens // _BLOCK}, # CPU blocks: 2048")
    log.say(
        "",
        "gpu_executor.py:80",
        f"Maximum concurrency for {model.context} tokens per request: {model.concurrency}x",
    )
    hint = "Capturing cudagraphs for decoding. If out-of-memory error occurs during cudagraph capture, consider less."
    for i in order:
        log.say(workers[i], "model_runner.py:1415", hint)
    for i in order:
        log.say(
            workers[i], "model_runner.py:1535", f"Graph capturing finished in 12 secs, took {_two(model.graphs)} GiB"
        )
        entries.append(_entry("compute", f"gpu{i}", _bytes(model.graphs)))
    log.say("", "llm_engine.py:431", "init engine (profile, create kv cache, warmup model) took 17.90 seconds")
    log.serving()
    # The size of a block follows from the tokens only where the rounded figure leaves one choice.
    facts = _facts(model, version, cards) | {"blocks": model.tokens // _BLOCK, "memory_share": 0.9}
    if _ambiguous(model):
        facts.pop("kv_tokens")
    return Written(
        engine="vllm",
        text=log.text,
        entries=tuple(entries),
        devices={f"gpu{i}": f"CUDA{i}" for i in range(cards)},
        facts=facts,
    )


def _ambiguous(model: _Model) -> bool:
    blocks, printed = model.tokens // _BLOCK, float(model.concurrency)
    sizes = [size for size in (8, 16, 32) if abs(blocks * size / model.context - printed) <= 0.0051]
    return sizes != [_BLOCK]


def _one_card_2024(random: Random) -> Written:
    return _first_engine(random, 1)


def _two_cards_2024(random: Random) -> Written:
    return _first_engine(random, random.choice([2, 4]))


def _second_engine(random: Random) -> Written:
    """0.8: weights, tokens and graphs only."""
    model, log = _random(random), _Log(random, bracketed=True)
    version = "0.8.5"
    log.say("", "api_server.py:1043", f"vLLM API server version {version}")
    log.say("", "core.py:58", f"Initializing a V1 LLM engine (v{version}) with config: {_config(model)}")
    log.say("", "gpu_model_runner.py:1329", "Starting to load model someone/some-model...")
    log.bare("Loading safetensors checkpoint shards: 100% Completed | 2/2 [00:01<00:00,  1.31it/s]")
    log.say("", "loader.py:458", "Loading weights took 1.50 seconds")
    weights = random.randrange(1_000, 300_000)
    log.say("", "gpu_model_runner.py:1347", f"Model loading took {weights / 10_000:.4f} GiB and 2.078159 seconds")
    log.say("", "monitor.py:33", "torch.compile takes 5.55 s in total")
    log.say("", "kv_cache_utils.py:634", f"GPU KV cache size: {model.tokens:,} tokens")
    log.say(
        "",
        "kv_cache_utils.py:637",
        f"Maximum concurrency for {model.context:,} tokens per request: {model.concurrency}x",
    )
    log.say("", "gpu_model_runner.py:1686", f"Graph capturing finished in 22 secs, took {_two(model.graphs)} GiB")
    log.say("", "core.py:159", "init engine (profile, create kv cache, warmup model) took 41.10 seconds")
    log.say("", "api_server.py:1090", "Starting vLLM API server on http://0.0.0.0:8000")
    log.serving()
    entries = (
        _entry("weights", "gpu0", round(weights * _GIB / 10_000)),
        _entry("compute", "gpu0", _bytes(model.graphs)),
    )
    return Written(
        engine="vllm",
        text=log.text,
        entries=entries,
        devices={"gpu0": "CUDA0"},
        facts=_facts(model, version) | {"url": "http://0.0.0.0:8000"},
    )


def _two_cards_2025(random: Random) -> Written:
    """0.10 with two cards: each process prints its figures, the one above them the tokens of each."""
    model, log = _random(random), _Log(random, bracketed=True)
    version = "0.10.2"
    core, workers = "EngineCore_0 pid=412", ["VllmWorker TP0 pid=419", "VllmWorker TP1 pid=420"]
    log.say("APIServer pid=301", "api_server.py:1796", f"vLLM API server version {version}")
    log.say(core, "core.py:72", f"Initializing a V1 LLM engine (v{version}) with config: {_config(model, 2)}")
    entries: list[Entry] = []
    for i, worker in enumerate(workers):
        weights = random.randrange(1_000, 300_000)
        log.say(worker, "gpu_model_runner.py:1953", "Starting to load model someone/some-model...")
        log.say(worker, "gpu_model_runner.py:2007", f"Model loading took {weights / 10_000:.4f} GiB and 2.1 seconds")
        entries.append(_entry("weights", f"gpu{i}", round(weights * _GIB / 10_000)))
    for i, worker in enumerate(reversed(workers)):
        cache = model.cache + i
        log.say(worker, "gpu_worker.py:276", f"Available KV cache memory: {_two(cache)} GiB")
        entries.append(_entry("kv", f"gpu{1 - i}", _bytes(cache)))
    for tokens in (model.tokens + 64, model.tokens):
        log.say(core, "kv_cache_utils.py:849", f"GPU KV cache size: {tokens:,} tokens")
        more = f"{tokens / model.context:.2f}"
        log.say(core, "kv_cache_utils.py:853", f"Maximum concurrency for {model.context:,} tokens per request: {more}x")
    for i, worker in enumerate(workers):
        log.say(
            worker, "gpu_model_runner.py:2708", f"Graph capturing finished in 9 secs, took {_two(model.graphs)} GiB"
        )
        entries.append(_entry("compute", f"gpu{i}", _bytes(model.graphs)))
    log.say(core, "core.py:214", "init engine (profile, create kv cache, warmup model) took 33.32 seconds")
    log.serving()
    return Written(
        engine="vllm",
        text=log.text,
        entries=tuple(entries),
        devices={"gpu0": "CUDA0", "gpu1": "CUDA1"},
        facts=_facts(model, version, 2),
    )


def _summary(model: _Model, planned: int, cache: int) -> str:
    return (
        f"Free memory on device ({_short(_CARD - 60)}/{_short(_CARD)} GiB) on startup. Desired GPU memory utilization"
        f" is (0.92, {_short(_CARD * 92 // 100)} GiB). Actual usage is {_short(model.weights + model.other)} GiB for"
        f" consumed memory (weights + non-torch), {_short(model.activation + planned)} GiB for peak activation, and"
        f" {_short(model.graphs)} GiB for CUDAGraph memory. Replace gpu_memory_utilization config with"
        " `--kv-cache-memory=20064085607` (18.69 GiB) to fit into requested memory, or `--kv-cache-memory=26927570944`"
        f" (25.08 GiB) to fully utilize gpu memory. Current kv cache memory in use is {_short(cache)} GiB."
    )


def _profiled(log: _Log, process: str, model: _Model, planned: int) -> None:
    log.say(process, "gpu_model_runner.py:6409", f"Estimated CUDA graph memory: {_two(planned)} GiB total")
    log.say(process, "gpu_worker.py:772", f"Available KV cache memory: {_short(model.cache)} GiB")
    log.say(
        process,
        "gpu_worker.py:787",
        "CUDA graph memory profiling is enabled (default since v0.21.0). The current --gpu-memory-utilization=0.9200 is"
        " equivalent to --gpu-memory-utilization=0.9038 without CUDA graph memory profiling. To disable, set"
        " VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS=0.",
    )


def _captured(log: _Log, process: str, model: _Model, planned: int) -> None:
    log.say(process, "gpu_model_runner.py:6516", f"Graph capturing finished in 9 secs, took {_two(model.graphs)} GiB")
    log.say(
        process,
        "gpu_worker.py:1003",
        f"CUDA graph pool memory: {_short(model.graphs)} GiB (actual), {_short(planned)} GiB (estimated), difference:"
        f" {_short(abs(model.graphs - planned))} GiB (12.3%).",
    )


def _of_card_2026(model: _Model, device: str) -> list[Entry]:
    return [
        _entry("weights", device, _bytes(model.weights)),
        _entry("context", device, _bytes(model.weights + model.other) - _bytes(model.weights)),
        _entry("kv", device, _bytes(model.cache)),
        _entry("compute", device, _bytes(model.graphs)),
    ]


def _latest(random: Random, engines: int) -> Written:
    """0.33 with one card for each of some engines in parallel."""
    version = "0.33.0"
    model, log = _random(random), _Log(random, bracketed=True)
    log.say("APIServer pid=1", "entry.py:40", f"vLLM API server version {version}")
    names = ["EngineCore pid=326"] if engines == 1 else [f"EngineCore_DP{i} pid={326 + i}" for i in range(engines)]
    entries: list[Entry] = []
    tokens: list[int] = []
    start = f"Initializing a V1 LLM engine (v{version}) with config: {_config(model, 1, engines)}"
    for i, name in enumerate(names):
        one = _random(random)._replace(context=model.context)
        planned = random.randrange(5, 100)
        log.say(name, "core.py:140", start)
        log.say(name, "gpu_model_runner.py:4979", "Starting to load model someone/some-model...")
        log.say(
            name,
            "gpu_model_runner.py:5088",
            f"Model loading took {_short(one.weights)} GiB memory and 5.420225 seconds",
        )
        _profiled(log, name, one, planned)
        log.say(
            name,
            "kv_cache_utils.py:1147",
            f"GPU KV cache size: {one.tokens:,} tokens, Maximum concurrency for {one.context:,} tokens per request:"
            f" {one.concurrency}x",
        )
        log.bare("Capturing CUDA graphs (decode, FULL): 100%|##########| 35/35 [00:02<00:00, 14.41it/s]")
        _captured(log, name, one, planned)
        log.say(name, "gpu_worker.py:1070", _summary(one, planned, one.cache))
        log.say(name, "core.py:405", "init engine (profile, create kv cache, warmup model) took 97.1 s")
        entries += _of_card_2026(one, f"gpu{i}")
        activation = _bytes(one.activation + planned) - _bytes(planned)
        entries.append(_entry("compute", f"gpu{i}", activation))
        tokens.append(one.tokens)
        model = one if one.tokens <= min(tokens) else model
    log.say("APIServer pid=1", "entry.py:139", "Starting vLLM server on http://0.0.0.0:8000")
    log.serving()
    facts = _facts(model, version) | {"kv_tokens": min(tokens), "data_parallel": engines, "memory_share": 0.92}
    if engines > 1:
        facts["kv_tokens_by_engine"] = {f"DP{i}": count for i, count in enumerate(tokens)}
    return Written(
        engine="vllm",
        text=log.text,
        entries=tuple(entries),
        devices={f"gpu{i}": f"CUDA{i}" for i in range(engines)},
        facts=facts,
    )


def _one_card_2026(random: Random) -> Written:
    return _latest(random, 1)


def _two_engines_2026(random: Random) -> Written:
    return _latest(random, 2)


def _too_little(random: Random) -> Written:
    """0.33: the cache of one request does not fit."""
    model, log = _random(random), _Log(random, bracketed=True)
    version, core = "0.33.0", "EngineCore pid=326"
    log.say("APIServer pid=1", "entry.py:40", f"vLLM API server version {version}")
    log.say(core, "core.py:140", f"Initializing a V1 LLM engine (v{version}) with config: {_config(model)}")
    log.say(core, "gpu_model_runner.py:4979", "Starting to load model someone/some-model...")
    log.say(core, "gpu_model_runner.py:5088", f"Model loading took {_short(model.weights)} GiB memory and 5.4 seconds")
    _profiled(log, core, model, 20)
    need = (
        f"ValueError: To serve at least one request with the model's max seq len ({model.context}),"
        f" ({_short(model.cache * 3)} GiB KV cache is needed, which is larger than the available KV cache memory"
        f" ({_short(model.cache)} GiB). Based on the available memory, the estimated maximum model length is"
        f" {model.context // 3}. Try increasing `gpu_memory_utilization` or decreasing `max_model_len`."
    )
    log.say(core, "core.py:1584", "EngineCore failed to start.\nTraceback (most recent call last):\n" + need, "ERROR")
    log.bare("(APIServer pid=1) RuntimeError: Engine core initialization failed. See root cause above.")
    return Written(
        engine="vllm",
        text=log.text,
        entries=(_entry("weights", "gpu0", _bytes(model.weights)), _entry("kv", "gpu0", _bytes(model.cache))),
        devices={"gpu0": "CUDA0"},
        facts={"context": model.context, "estimated_context": model.context // 3, "build": version},
        ready=False,
        failure="kv_planning",
    )


WRITERS: dict[str, Writer] = {
    "0.6": _one_card_2024,
    "0.6-cards": _two_cards_2024,
    "0.8-v1": _second_engine,
    "0.10-cards": _two_cards_2025,
    "0.33": _one_card_2026,
    "0.33-engines": _two_engines_2026,
    "0.33-too-little": _too_little,
}
