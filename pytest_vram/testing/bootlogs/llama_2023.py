"""llama.cpp of 2023, and koboldcpp of that time: sums in place of buffers.

Line shapes: ``llama.cpp`` of June 2023 (``llama_model_load_internal``), September 2023 (``llm_load_tensors``), and
October to December 2023 (``llama_new_context_with_model``).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from decimal import Decimal
from random import Random

from pytest_vram.testing.bootlogs import Written
from pytest_vram.testing.bootlogs.llama_kit import MIB, Log

_CENT = round(Decimal(MIB) / 200)
_RESOLUTION = MIB


def _devices(log: Log, function: str = "ggml_init_cublas") -> str:
    count = log.rng.choice((1, 1, 2, 4))
    log.say(f"{function}: found {count} CUDA devices:")
    for number in range(count):
        log.say(f"  Device {number}: NVIDIA GeForce RTX 3060, compute capability 8.6")
    return "CUDA0" if count == 1 else f"CUDA ({count} devices together)"


def _offloading(log: Log, function: str, layers: int, *, caches: int) -> tuple[int, int]:
    """Lines about layers, with ``caches`` halves of the cache; (offloaded, all that can be)."""
    whole = caches > 0 or log.rng.random() < 0.5
    offloaded = layers + 1 + caches if whole else log.rng.randrange(1, layers)
    log.say(f"{function}: offloading {min(offloaded, layers)} repeating layers to GPU")
    if offloaded > layers:
        log.say(f"{function}: offloading non-repeating layers to GPU")
    return offloaded, layers + 3


def _halves(log: Log, function: str, caches: int) -> None:
    for half in ("v", "k")[:caches]:
        log.say(f"{function}: offloading {half} cache to GPU")


def june(rng: Random) -> Written:
    """June 2023: one whole number of MB for all VRAM."""
    log, name = Log(rng), "llama_model_load_internal"
    log.say(f"main: build = {rng.randrange(600, 800)} (a1b2c3d)")
    device = _devices(log)
    layers, batch, caches = rng.choice((26, 32, 40, 60)), rng.choice((128, 512)), rng.randrange(3)
    log.say(
        "llama.cpp: loading model from models/7B/ggml-model-q4_0.bin",
        f"{name}: format     = ggjt v3 (latest)",
        f"{name}: n_ctx      = 2048",
        f"{name}: n_layer    = {layers}",
        f"{name}: ftype      = 2 (mostly Q4_0)",
        f"{name}: ggml ctx size =    0.07 MB",
    )
    required, state = log.figure(), Decimal(rng.randrange(200, 3000))
    log.say(f"{name}: mem required  = {required:7.2f} MB (+ {state:7.2f} MB per state)")
    log.say(f"{name}: allocating batch_size x 1 MB = {batch} MB VRAM for the scratch buffer")
    offloaded, offloadable = _offloading(log, name, layers, caches=caches)
    _halves(log, name, caches)
    weights = rng.randrange(1 << 20, 12 << 30)
    planned = int(state) * MIB * caches // 2
    total = math.ceil((weights + batch * MIB + planned) / MIB)
    log.say(f"{name}: offloaded {offloaded}/{offloadable} layers to GPU")
    log.say(f"{name}: total VRAM used: {total} MB", "....................................................")
    log.say(f"llama_init_from_file: kv self size  = {state:7.2f} MB")
    log.say("system_info: n_threads = 8 / 16 | AVX = 1 |", "generate: n_ctx = 2048, n_batch = 512, n_predict = -1")
    log.entry("other", "CPU", round(required * MIB), _CENT)
    log.entry("weights", device, (total - batch) * MIB - planned, 3 * _RESOLUTION)
    log.entry("compute", device, batch * MIB, _RESOLUTION)
    _cache_entries(log, device, int(state) * MIB, caches)
    facts = {"layers_offloaded": offloaded, "layers_offloadable": offloadable, "context": 2048, "layers": layers}
    return log.written("llama-server", facts | {"quantization": "mostly Q4_0", "kv_bytes": int(state) * MIB})


def _cache_entries(log: Log, device: str, whole: int, caches: int) -> None:
    on_device = whole * caches // 2
    if on_device:
        log.entry("kv", device, on_device, _CENT)
    if whole - on_device:
        log.entry("kv", "CPU", whole - on_device, _CENT)


def september(rng: Random) -> Written:
    """August and September 2023: the whole number of MB holds weights and offloaded cache."""
    log, name = Log(rng), "llm_load_tensors"
    device = _devices(log)
    layers, caches = rng.choice((32, 40, 80)), rng.randrange(3)
    log.say(
        "llama_model_loader: loaded meta data with 19 key-value pairs and 291 tensors from models/llama.gguf"
        " (version GGUF V2 (latest))",
        f"llm_load_print_meta: n_layer        = {layers}",
        "llm_load_print_meta: model ftype    = mostly Q4_K - Medium",
        f"{name}: ggml ctx size =    0.09 MB",
    )
    required, state = log.figure(500), Decimal(rng.randrange(200, 6000))
    log.say(f"{name}: mem required  = {required:7.2f} MB (+ {state:7.2f} MB per state)")
    offloaded, offloadable = _offloading(log, name, layers, caches=caches)
    _halves(log, name, caches)
    planned = int(state) * MIB * caches // 2
    used = math.ceil((rng.randrange(1 << 20, 12 << 30) + planned) / MIB)
    log.say(f"{name}: offloaded {offloaded}/{offloadable} layers to GPU", f"{name}: VRAM used: {used} MB")
    compute, scratch = log.figure(900), log.figure(900)
    log.say(
        f"llama_new_context_with_model: kv self size  = {state:7.2f} MB",
        f"llama_new_context_with_model: compute buffer total size = {compute:7.2f} MB",
        f"llama_new_context_with_model: VRAM scratch buffer: {scratch:.2f} MB",
        "llama server listening at http://127.0.0.1:8080",
    )
    log.entry("weights", "CPU", round(required * MIB), _CENT)
    log.entry("weights", device, used * MIB - planned, _RESOLUTION)
    _cache_entries(log, device, int(state) * MIB, caches)
    log.entry("compute", device, round(scratch * MIB), _CENT)
    log.entry("compute", "CPU", round(compute * MIB), _CENT)
    return log.written("llama-server", {"layers_offloaded": offloaded, "kv_bytes": int(state) * MIB})


def _november(log: Log, *, unit: str, function: str = "llama_new_context_with_model") -> int:
    """October to December 2023: each sum by itself, with two digits; the number of offloaded layers."""
    rng, name = log.rng, "llm_load_tensors"
    layers, caches = rng.choice((32, 48, 62)), rng.randrange(3)
    log.say(f"llm_load_print_meta: n_layer          = {layers}", f"{name}: ggml ctx size =    0.20 {unit}")
    required, weights, scratch = log.figure(4000), log.figure(16000), log.figure(1200)
    half = log.figure(5000)
    log.say(f"{name}: mem required  = {required:7.2f} {unit}")
    offloaded, offloadable = _offloading(log, name, layers, caches=caches)
    log.say(f"{name}: offloaded {offloaded}/{offloadable} layers to GPU", f"{name}: VRAM used: {weights:.2f} {unit}")
    log.say(f"{function}: n_ctx      = 8192", f"{function}: freq_base  = 10000.0")
    _halves(log, "llama_kv_cache_init", caches)
    if caches:
        log.say(f"llama_kv_cache_init: VRAM kv self = {half * caches:.2f} {unit}")
        log.entry("kv", _device(log), round(half * caches * MIB), _CENT)
    if caches < 2:
        on_host = round(half * 2 * MIB) - (round(half * caches * MIB) if caches else 0)
        log.entry("kv", "CPU", on_host, 2 * _CENT)
    compute = scratch + Decimal("5.31")
    context = half * caches + scratch
    log.say(
        f"{function}: kv self size  = {half * 2:7.2f} {unit}",
        "llama_build_graph: non-view tensors processed: 740/740",
        f"{function}: compute buffer total size = {compute:.2f} {unit}",
        f"{function}: VRAM scratch buffer: {scratch:.2f} {unit}",
        f"{function}: total VRAM used: {weights + context:.2f} {unit} (model: {weights:.2f} {unit},"
        f" context: {context:.2f} {unit})",
    )
    log.entry("weights", "CPU", round(required * MIB), _CENT)
    log.entry("weights", _device(log), round(weights * MIB), _CENT)
    log.entry("compute", _device(log), round(scratch * MIB), _CENT)
    log.entry("compute", "CPU", round(compute * MIB), _CENT)
    return offloaded


def _device(log: Log) -> str:
    counted = next(line for line in log.lines if "found " in line).split("found ")[1].split()[0]
    return "CUDA0" if counted == "1" else f"CUDA ({counted} devices together)"


def november(rng: Random) -> Written:
    """The server of November 2023, whose own lines are JSON."""
    log = Log(rng)
    _devices(log)
    log.say('{"timestamp":1700000000,"level":"INFO","function":"main","line":1746,"message":"build info","build":1500}')
    log.say(
        "llama_model_loader: loaded meta data with 20 key-value pairs and 291 tensors from models/mistral.gguf"
        " (version GGUF V3 (latest))"
    )
    offloaded = _november(log, unit="MiB")
    log.say(
        "Available slots:",
        " -> Slot 0 - max context: 8192",
        "llama server listening at http://127.0.0.1:8080",
        '{"timestamp":1700000009,"level":"INFO","function":"main","line":2135,"message":"HTTP server listening"}',
    )
    return log.written("llama-server", {"layers_offloaded": offloaded, "context": 8192})


def december(rng: Random) -> Written:
    """The end of December 2023: each layer's cache is where the layer is, and its types are told."""
    log, name = Log(rng), "llm_load_tensors"
    device = _devices(log)
    log.say(
        "llama_model_loader: loaded meta data with 20 key-value pairs and 291 tensors from models/mistral.gguf"
        " (version GGUF V3 (latest))",
        f"{name}: ggml ctx size       =    0.14 MiB",
    )
    host, weights, compute, scratch = log.figure(6000), log.figure(9000), log.figure(900), log.figure(900)
    offloaded = rng.randrange(1, 42)
    log.say(f"{name}: system memory used  = {host:7.2f} MiB", f"{name}: VRAM used           = {weights:7.2f} MiB")
    log.say(f"{name}: offloading {min(offloaded, 40)} repeating layers to GPU")
    log.say(f"{name}: offloaded {offloaded}/41 layers to GPU", "llama_new_context_with_model: n_ctx      = 2048")
    cache = log.figure(3000) * 2
    on_device = cache if offloaded > 40 else Decimal(0) if rng.random() < 0.3 else cache / 4
    on_device = on_device.quantize(Decimal("0.01"))
    if on_device:
        log.say(f"llama_kv_cache_init: VRAM kv self = {on_device:.2f} MB")
        log.entry("kv", device, round(on_device * MIB), _CENT)
    if on_device < cache:
        log.entry("kv", "CPU", round(cache * MIB) - round(on_device * MIB), 2 * _CENT)
    half, new = cache / 2, "llama_new_context_with_model"
    log.say(
        f"{new}: KV self size  = {cache:7.2f} MiB, K (f16): {half:7.2f} MiB, V (f16): {half:7.2f} MiB",
        f"{new}: compute buffer total size = {compute:.2f} MiB",
        f"{new}: VRAM scratch buffer: {scratch:.2f} MiB",
        f"{new}: total VRAM used: {weights + on_device + scratch:.2f} MiB (model: {weights:.2f} MiB,"
        f" context: {on_device + scratch:.2f} MiB)",
        "INFO:     Uvicorn running on http://localhost:8000 (Press CTRL+C to quit)",
    )
    log.entry("weights", "CPU", round(host * MIB), _CENT)
    log.entry("weights", device, round(weights * MIB), _CENT)
    log.entry("compute", device, round(scratch * MIB), _CENT)
    log.entry("compute", "CPU", round(compute * MIB), _CENT)
    return log.written("llama-server", {"layers_offloaded": offloaded, "cache_type_k": "f16", "context": 2048})


def kobold(rng: Random) -> Written:
    """koboldcpp of October 2023, around llama.cpp's lines."""
    log = Log(rng)
    log.say("***", "Welcome to KoboldCpp - Version 1.46.1", "==========")
    log.say("Loading model: /models/mxlewd-l2-20b.Q4_K_M.gguf ", "[Threads: 7, BlasThreads: 7, SmartContext: False]")
    _devices(log)
    log.say(
        "llama_model_loader: loaded meta data with 19 key-value pairs and 561 tensors from /models/mxlewd-l2-20b"
        ".Q4_K_M.gguf (version GGUF V2 (latest))"
    )
    offloaded = _november(log, unit="MB")
    log.say("Load Model OK: True", "Starting Kobold HTTP Server on port 5001")
    log.say("Please connect to custom endpoint at http://localhost:5001")
    return log.written("koboldcpp", {"layers_offloaded": offloaded, "build": "1.46.1", "context": 8192})


WRITERS: dict[str, Callable[[Random], Written]] = {
    "2023-06": june,
    "2023-09": september,
    "2023-11": november,
    "2023-12": december,
    "koboldcpp-2023": kobold,
}
