"""llama.cpp from 2024 on, ik_llama.cpp and koboldcpp: one line for each buffer."""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal
from random import Random
from typing import Any

import msgspec

from pytest_vram.ledger import Bucket
from pytest_vram.testing.bootlogs import Written, llama_2023
from pytest_vram.testing.bootlogs.llama_kit import MIB, Log, split

_CARDS = {"CUDA": "NVIDIA GeForce RTX 3060", "ROCm": "AMD Radeon RX 6800", "Vulkan": "AMD Radeon RX 6800 (RADV)"}
_TYPES = ("f16", "q8_0", "q4_0")


class _Plan:
    """A random deployment: its devices, layers and what fails."""

    def __init__(self, rng: Random, families: tuple[str, ...] = ("CUDA", "CUDA", "ROCm", "Vulkan")) -> None:
        self.family = rng.choice(families)
        self.devices = [f"{self.family}{number}" for number in range(rng.choice((1, 1, 2, 3, 12)))]
        self.layers = rng.randrange(16, 80)
        self.offloaded = rng.choice((self.layers + 1, rng.randrange(len(self.devices), self.layers)))
        self.context = rng.choice((2048, 4096, 8192, 131072))
        self.type = rng.choice(_TYPES)
        self.fails: str | None = rng.choice((None, None, "weights", "kv", "compute"))
        self.partial = self.offloaded <= self.layers
        self.host = "CUDA_Host" if self.family == "CUDA" else f"{self.family}_Host"

    @property
    def placement(self) -> list[str]:
        """Where caches lie: on the devices, and on the host where layers stayed there."""
        return [*(["CPU"] if self.partial else []), *self.devices]


def _offloaded(log: Log, plan: _Plan, function: str, *, output: str = "non-repeating layers") -> None:
    repeating = min(plan.offloaded, plan.layers)
    if output == "output layer":
        log.say(f"{function}: offloading output layer to GPU")
    log.say(f"{function}: offloading {repeating} repeating layers to GPU")
    if output != "output layer" and not plan.partial:
        log.say(f"{function}: offloading {output} to GPU")
    log.say(f"{function}: offloaded {plan.offloaded}/{plan.layers + 1} layers to GPU")


def _refuse(log: Log, plan: _Plan, phase: str) -> None:
    """Lines of a refused allocation on the last device."""
    number = len(plan.devices) - 1
    device, size = plan.devices[number], log.rng.randrange(1 << 24, 20 << 30)
    log.label(device)
    log.refused(device, number, size, family=plan.family)
    if plan.family == "Vulkan":
        log.say(f"ggml_vulkan: Device memory allocation of size {size} failed.", level="E")
    if phase == "weights":
        log.say(f"alloc_tensor_range: failed to allocate {device} buffer of size {size}", level="E")
        log.say(f"llama_model_load: error loading model: unable to allocate {device} buffer", level="E")
        log.say("llama_model_load_from_file_impl: failed to load model", level="E")
    elif phase == "kv":
        log.say(f"alloc_tensor_range: failed to allocate {device} buffer of size {size}", level="E")
        log.say(
            "llama_init_from_model: failed to initialize the context: failed to allocate buffer for kv cache", level="E"
        )
    else:
        log.say(f"ggml_gallocr_reserve_n: failed to allocate {device} buffer of size {size}", level="E")
        log.say(
            "llama_init_from_model: failed to initialize the context: failed to allocate compute pp buffers", level="E"
        )
    log.say("main: exiting due to model loading error", level="E")


def _caches(log: Log, plan: _Plan, function: str, sizes: dict[str, Decimal], bucket: Bucket = "kv") -> Decimal:
    total = Decimal(0)
    for device, size in sizes.items():
        log.buffer(function, device, "RS" if bucket == "recurrent" else "KV", bucket, size=size)
        total += size
    return total


def _dealt(log: Log, plan: _Plan, each: Decimal) -> dict[str, Decimal]:
    """A cache of ``each`` MiB a layer, dealt out."""
    layers = split(log.rng, plan.layers, len(plan.placement))
    return {device: each * number for device, number in zip(plan.placement, layers, strict=True)}


def _facts(plan: _Plan) -> dict[str, Any]:
    return {
        "layers_offloaded": plan.offloaded,
        "layers_offloadable": plan.layers + 1,
        "context": plan.context,
        "cache_type_k": plan.type,
    }


# ---------------------------------------------------------------- 2024 and the forks of that time


def _loaded_2024(log: Log, plan: _Plan, cards: str = "ggml_cuda_init") -> None:
    """From the devices to the weights, as printed in 2024."""
    if plan.family != "Vulkan":
        log.say(f"{cards}: found {len(plan.devices)} {plan.family} devices:")
        for number, _ in enumerate(plan.devices):
            log.say(f"  Device {number}: {_CARDS[plan.family]}, compute capability 8.6, VMM: yes")
    log.say(
        "llama_model_loader: loaded meta data with 26 key-value pairs and 291 tensors from models/model.gguf"
        " (version GGUF V3 (latest))",
        f"llm_load_print_meta: n_layer          = {plan.layers}",
        "llm_load_print_meta: model ftype      = Q4_K - Medium",
        "llm_load_print_meta: model size       = 4.58 GiB (4.89 BPW) ",
        "llm_load_tensors: ggml ctx size =    0.27 MiB",
    )
    _offloaded(log, plan, "llm_load_tensors")
    for device in ("CPU", *plan.devices):
        log.buffer("llm_load_tensors", device, "", "weights")
    log.say("..................................................................................")


def _context_2024(log: Log, plan: _Plan, cache: str) -> None:
    """The context as printed in 2024; ``cache``: how the sum of the cache is told."""
    name = "llama_new_context_with_model"
    log.say(f"{name}: n_ctx      = {plan.context}", f"{name}: n_batch    = 2048", f"{name}: n_ubatch   = 512")
    log.say(f"{name}: flash_attn = 0", f"{name}: freq_base  = 500000.0")
    if plan.fails == "kv":
        _refuse(log, plan, "kv")
        return
    total = _caches(log, plan, "llama_kv_cache_init", _dealt(log, plan, log.figure(200)))
    half = total / 2
    log.say(f"{name}: " + cache.format(total=f"{total:7.2f}", half=f"{half:7.2f}", type=plan.type))
    log.buffer(name, "CUDA_Host" if plan.family == "CUDA" else "CPU", "output", "compute", size=log.figure(4))
    if len(plan.devices) > 1 and plan.family == "CUDA" and not plan.partial:
        log.say(f"{name}: pipeline parallelism enabled (n_copies=4)")
    if plan.fails == "compute":
        _refuse(log, plan, "compute")
        return
    for device in (*plan.devices, plan.host):
        log.buffer(name, device, "compute", "compute", size=log.figure(1500))
    log.say(f"{name}: graph nodes  = 1030", f"{name}: graph splits = 2")


_CACHE_2024 = "KV self size  = {total} MiB, K ({type}): {half} MiB, V ({type}): {half} MiB"


def year_2024(rng: Random) -> Written:
    """The server of 2024."""
    log, plan = Log(rng), _Plan(rng, ("CUDA", "CUDA", "ROCm"))
    plan.fails = None if plan.fails == "weights" else plan.fails
    log.say(f"build: {rng.randrange(3000, 4000)} (a1b2c3d) with cc 11.4.0 for x86_64-linux-gnu")
    _loaded_2024(log, plan)
    _context_2024(log, plan, _CACHE_2024)
    return _served(log, plan, "llama-server", "main: model loaded")


def _served(log: Log, plan: _Plan, engine: str, ready: str, facts: dict[str, Any] | None = None) -> Written:
    known = _facts(plan) | (facts or {})
    if plan.fails is not None:
        told = {"weights": (), "kv": ("layers_offloaded", "context"), "compute": tuple(known)}[plan.fails]
        known = {name: known[name] for name in told}
        return log.written(engine, known, ready=False, failure="out_of_memory")
    log.say(ready, "srv  update_slots: all slots are idle")
    return log.written(engine, known)


def ik_llama(rng: Random) -> Written:
    """ik_llama.cpp, whose cache of latents has no V beside it."""
    log, plan = Log(rng), _Plan(rng, ("CUDA",))
    plan.fails = None if plan.fails == "weights" else plan.fails
    log.say(
        f'INFO [                    main] build info | tid="1" timestamp=1740668683 build={rng.randrange(3500, 4900)}'
    )
    _loaded_2024(log, plan)
    name = "llama_new_context_with_model"
    log.say(f"{name}: mla_attn      = 2", f"{name}: attn_max_b    = 512", f"{name}: fused_moe     = 1")
    told = rng.choice(
        (
            "KV self size  = {total} MiB, c^KV ({type}): {total} MiB, kv^T: not used",
            "KV self size  = {total} MiB, c^KV ({type}): {half} MiB, kv^T (f16): {half} MiB",
        )
    )
    _context_2024(log, plan, told)
    ready = 'INFO [                    main] model loaded | tid="1" timestamp=1740668700'
    return _served(log, plan, "ik_llama", ready, {"mla": 2})


def kobold_2024(rng: Random) -> Written:
    """koboldcpp of 2024."""
    log, plan = Log(rng), _Plan(rng, ("CUDA",))
    plan.fails = None
    log.say("***", "Welcome to KoboldCpp - Version 1.76", "==========", "Loading model: /models/model.gguf")
    _loaded_2024(log, plan)
    _context_2024(log, plan, _CACHE_2024)
    log.say("Load Text Model OK: True", "Embedded KoboldAI Lite loaded.")
    log.say("Please connect to custom endpoint at http://localhost:5001")
    return log.written("koboldcpp", _facts(plan) | {"build": "1.76"})


# ---------------------------------------------------------------- 2025 and 2026


def _loaded(log: Log, plan: _Plan, *, year: int) -> bool:
    """From the devices to the weights; false where they are refused."""
    name = "llama_model_load_from_file_impl" if year == 2025 else "llama_prepare_model_devices"
    for number, device in enumerate(plan.devices):
        bus = "" if year == 2025 else f" (0000:0{number % 10}:00.0)"
        log.say(
            f"{name}: using device {device} ({_CARDS[plan.family]}){bus} - {log.rng.randrange(4000, 24000)} MiB free"
        )
        log.label(device)
    log.say(
        "llama_model_loader: loaded meta data with 29 key-value pairs and 292 tensors from models/model.gguf"
        " (version GGUF V3 (latest))",
        "print_info: file type   = Q4_K - Medium",
        "print_info: file size   = 4.58 GiB (4.89 BPW) ",
        f"print_info: n_layer               = {plan.layers}",
    )
    how = "(mmap = true)" if year == 2025 else "(mmap = true, direct_io = false)"
    log.say(f"load_tensors: loading model tensors, this can take a while... {how}")
    if plan.fails == "weights":
        _refuse(log, plan, "weights")
        return False
    _offloaded(log, plan, "load_tensors", output="output layer")
    for device in ("CPU_Mapped", *plan.devices):
        log.buffer("load_tensors", device, "model", "weights", width=12)
    return True


def _context(log: Log, plan: _Plan, *, year: int, bucket: Bucket = "kv", compute: bool = True) -> bool:
    """The context; false where something is refused. Of one for a draft, all is in the bucket ``draft``."""
    draft = bucket == "draft"
    cache = "llama_kv_cache_unified" if year == 2025 else "llama_kv_cache"
    log.say("llama_context: constructing llama_context")
    log.say("llama_context: n_seq_max     = 1", f"llama_context: n_ctx         = {plan.context}")
    per = "n_ctx_per_seq" if year == 2025 else "n_ctx_seq    "
    log.say(
        f"llama_context: {per} = {plan.context}",
        "llama_context: n_batch       = 2048",
        "llama_context: n_ubatch      = 512",
    )
    log.buffer("llama_context", plan.host, "output", "draft" if draft else "compute", size=log.figure(4))
    if plan.fails == "kv":
        _refuse(log, plan, "kv")
        return False
    kinds = log.rng.choice((("",), ("non-SWA", "    SWA"), ("main", "indexer")))
    for kind in kinds if not draft else ("",):
        cells = plan.context if kind in ("", "non-SWA", "main") else 1024
        if kind:
            log.say(f"{cache}_iswa: creating {kind} KV cache, size = {cells} cells")
        total = _caches(log, plan, cache, _dealt(log, plan, log.figure(100)), bucket)
        seqs = "1 seqs" if year == 2025 else "1/1 seqs"
        log.say(
            f"{cache}: size = {total:7.2f} MiB ({cells:6d} cells, {plan.layers:3d} layers, {seqs}),"
            f" K ({plan.type}): {total / 2:7.2f} MiB, V ({plan.type}): {total / 2:7.2f} MiB"
        )
    if not draft and log.rng.random() < 0.3:
        total = _caches(log, plan, "llama_memory_recurrent", _dealt(log, plan, log.figure(3)), "recurrent")
        log.say(
            f"llama_memory_recurrent: size = {total:7.2f} MiB (     1 cells, {plan.layers:3d} layers,  1 seqs),"
            f" R (f32): {total / 2:7.2f} MiB, S (f32): {total / 2:7.2f} MiB"
        )
    name = "llama_context" if year == 2025 else "sched_reserve"
    if year == 2026:
        log.say("sched_reserve: reserving ...")
    if plan.fails == "compute":
        _refuse(log, plan, "compute")
        return False
    for device in (*plan.devices, plan.host):
        log.buffer(name, device, "compute", "draft" if draft else "compute", size=log.figure(1500))
    log.say(f"{name}: graph nodes  = 1094", f"{name}: graph splits = 2")
    if year == 2026:
        log.say("sched_reserve: reserve took 26.68 ms, sched copies = 1")
    return True


def year_2025(rng: Random) -> Written:
    """The server of 2025."""
    log, plan = Log(rng), _Plan(rng)
    log.say(f"build: {rng.randrange(5000, 6800)} (aa50ba462) with cc (Ubuntu 11.4.0) for x86_64-linux-gnu")
    log.say("main: HTTP server is listening, hostname: 127.0.0.1, port: 8080, http threads: 15", "main: loading model")
    log.say("srv    load_model: loading model 'models/model.gguf'")
    if _loaded(log, plan, year=2025) and _context(log, plan, year=2025):
        log.say("common_init_from_params: warming up the model with an empty run - please wait ...")
        log.say("main: model loaded")
    return _served(
        log, plan, "llama-server", "main: server is listening on http://127.0.0.1:8080 - starting the main loop"
    )


def year_2026(rng: Random) -> Written:
    """The server of 2026 at verbosity 4: its own prefix, a trial run, a draft's context, a projector, a request."""
    log, plan = Log(rng, prefix=True), _Plan(rng)
    log.say("cmn  common_param: common_params_print_info: build 1 (571d0d5) with GNU 11.4.0 for Linux x86_64")
    log.say("srv    load_model: loading model 'models/model.gguf'")
    _trial(log, plan)
    ready = "srv  llama_server: model loaded"
    if not (_loaded(log, plan, year=2026) and _context(log, plan, year=2026)):
        return _served(log, plan, "llama-server", ready)
    log.say("cmn  common_init_: warming up the model with an empty run - please wait ... (--no-warmup to disable)")
    if rng.random() < 0.3:
        _projector(log, plan)
    if rng.random() < 0.3:
        log.say("srv    load_model: creating MTP draft context against the target model 'models/model.gguf'")
        _context(log, plan, year=2026, bucket="draft")
    log.say("srv    load_model: initializing, n_slots = 1, n_ctx_slot = 4096, kv_unified = 'false'")
    log.say("srv          init: init: chat template, example_format: '<|im_start|>system")
    log.raw("CUDA7 compute buffer size = 9999.00 MiB, said the template", "<|im_end|>", "'")
    written = _served(log, plan, "llama-server", ready)
    _request(log)
    return log.written("llama-server", written.facts)


def _trial(log: Log, plan: _Plan) -> None:
    log.say("cmn  common_init_: fitting params to device memory ...")
    if log.rng.random() < 0.5:  # at full verbosity
        log.say(
            "print_info: no_alloc              = 1", "load_tensors: loading model tensors, this can take a while..."
        )
        log.say(f"load_tensors: {plan.devices[0]:>12} model buffer size =     0.00 MiB")
        log.say(
            "llama_context: constructing llama_context",
            f"llama_kv_cache: {plan.devices[0]:>10} KV buffer size =     0.00 MiB",
        )
        log.say(f"sched_reserve: {plan.devices[0]:>10} compute buffer size =   304.00 MiB")
    name = "common_memory_breakdown_print"
    log.say(f"{name}: | memory breakdown [MiB] | total   free     self   model   context   compute    unaccounted |")
    log.say(f"{name}: |   - Host               |                  34 =    28 +       0 +       6                |")
    log.say("common_fit_params: fitting params to free memory took 0.32 seconds")
    log.say("print_info: no_alloc              = 0")


def _projector(log: Log, plan: _Plan) -> None:
    log.say(f"clip_ctx: CLIP using {plan.devices[0]} backend")
    size = log.figure(2000)
    log.say(f"load_hparams: model size:         {size:.2f} MiB")
    log.entry("projector", plan.devices[0], round(size * MIB), MIB // 200)
    for device in (plan.devices[0], "CPU"):
        log.buffer("alloc_compute_meta", device, "compute", "projector", size=log.figure(300))


def _request(log: Log) -> None:
    log.say("slot launch_slot_: id  0 | task 1 | processing task, is_child = 0")
    body = (
        '{"messages":[{"role":"user","content":"CUDA0 KV buffer size = 3.00 MiB, cudaMalloc failed: out of memory"}]}'
    )
    log.say(f"srv  log_server_r: request:  {body}", level="D")
    log.say(
        "slot print_timing: id  0 | task 1 |    graphs reused =         59", "srv  update_slots: all slots are idle"
    )


def table_2026(rng: Random) -> Written:
    """The end of a log only: the table of whole MiB."""
    log = Log(rng, prefix=True)
    name = "common_memory_breakdown_print"
    log.say("srv  llama_server: model loaded", "srv  update_slots: all slots are idle")
    log.say("srv    operator(): operator(): cleaning up before exit...")
    log.say(f"{name}: | memory breakdown [MiB] | total   free     self   model   context   compute    unaccounted |")
    columns: tuple[Bucket, ...] = ("weights", "kv", "compute")
    for number in range(rng.choice((1, 2))):
        sizes = [rng.randrange(1, 9000) for _ in columns]
        total, free = sum(sizes) + rng.randrange(2000), rng.randrange(100)
        log.say(
            f"{name}: |   - CUDA{number} (RTX 3060)   | {total:5d} = {free:4d} + ({sum(sizes):5d} = {sizes[0]:5d} +"
            f" {sizes[1]:7d} + {sizes[2]:7d}) + {total - free - sum(sizes):11d} |"
        )
        for bucket, size in zip(columns, sizes, strict=True):
            log.entry(bucket, f"CUDA{number}", size * MIB, MIB)
    sizes = [rng.randrange(1, 9000) for _ in columns]
    log.say(
        f"{name}: |   - Host               |                 {sum(sizes):5d} = {sizes[0]:5d} + {sizes[1]:7d} +"
        f" {sizes[2]:7d}                |"
    )
    for bucket, size in zip(columns, sizes, strict=True):
        log.entry(bucket, "CPU", size * MIB, MIB)
    return log.written("llama-server", {})


def router(rng: Random) -> Written:
    """A router, whose child's lines carry its process number."""
    child, pid = year_2025(rng), rng.randrange(10_000, 60_000)
    lines = [f"[{pid}] {line}" for line in child.text.splitlines()]
    parent = ("main: starting router server, no model will be loaded in this process", "srv   proxy_reques: proxying")
    text = "\n".join((parent[0], *lines[:1], parent[1], *lines[1:], ""))
    return msgspec.structs.replace(child, text=text)


WRITERS: dict[str, Callable[[Random], Written]] = {
    **llama_2023.WRITERS,
    "2024": year_2024,
    "2025": year_2025,
    "2026": year_2026,
    "2026-table": table_2026,
    "ik_llama": ik_llama,
    "koboldcpp-2024": kobold_2024,
    "router": router,
}
