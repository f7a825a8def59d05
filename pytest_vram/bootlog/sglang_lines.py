"""The lines of SGLang's log that give figures, facts and reasons, in the words of its releases from 0.3 to 0.5.23.

``GB`` is 2**30 bytes for devices, and 10**9 for the host's part of a hierarchical cache.
"""

from __future__ import annotations

import re

from pytest_vram.bootlog import python_server
from pytest_vram.bootlog.boot import Phase
from pytest_vram.bootlog.python_server import Reason
from pytest_vram.ledger import Bucket


def _line(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern.replace("NUM", r"(-?\d{1,9}(?:\.\d{1,6})?)"), re.ASCII)


AVAILABLE = _line(r"avail mem=NUM GB")
USAGE = _line(r"mem usage=NUM GB")
BASE = _line(r"(?:Init torch distributed ends|Memory baseline taken)\..{0,80}?mem usage=NUM GB")
LOADED = _line(r"Load weight end\.(?: elapsed=NUM s,)? type=(\w{1,200})")
LOADED_TYPE = _line(r"\bdtype=torch\.(\w{1,40})")
QUANTISED = _line(r"\bquant=([\w.-]{1,60})")
#: ``VA upper bound`` is a reservation of addresses; what is taken is printed after the graphs.
CACHE = _line(
    r"\bKV Cache is allocated\.(?: dtype: (?:torch\.)?(\w{1,40}),)? #tokens: (-?\d{1,15}),"
    r" (?:K size: NUM GB, V size: NUM GB|KV size: NUM GB)"
)
CACHE_LATE = _line(
    r"Post-capture KV sizing: (draft )?KV cache allocated\. dtype: (?:torch\.)?(\w{1,40}), #tokens: (\d{1,15}),"
    r" KV size: NUM GB"
)
#: One pool for all kinds of caches, to the byte.
UNIFIED = _line(r"UnifiedKVPool allocated: total_bytes=NUM GB \(=(\d{1,18}) B\)")
STATE = _line(r"(\w{1,60}) size: NUM ?GB")
REPLAY = _line(r"\b(d|k|g|rawv|rawk|beta)=NUM ?GB")
HOST = _line(r"Allocating .{0,120}?\bNUM GB host memory|host memory for .{0,120}?: NUM GB")
TOKENS = _line(r"\bmax_total_num_tokens=(\d{1,15}), ")
SUMMARY: dict[str, re.Pattern[str]] = {
    "batch_tokens": _line(r"\bchunked_prefill_size=(\d{1,12})"),
    "slots": _line(r"\bmax_running_requests=(\d{1,12})"),
    "context": _line(r"\bcontext_len=(\d{1,12})"),
}
LEFT = _line(r"\bavailable_gpu_mem=NUM GB")
PROFILED = _line(r"is larger than the profiled value (-?\d{1,15})\b")
CAPTURE = re.compile(
    r"Capture (?P<name>[\w -]{0,60}?)\b(?:(?P<kind>cuda|CUDA|cpu|CPU|NPU|XPU|npu|xpu) graph|draft extend)\b"
    r" (?P<what>begin|end)",
    re.ASCII,
)
LISTENING = _line(r"Uvicorn running on (http\S{1,200})")
SHORT = _line(r"KV pool holds (\d{1,15}) tokens, fewer than --context-length (\d{1,15})")

_ARGUMENT = r"['\s(,{{]{}['\"]{{0,1}} ?[=:] ?['\"]?([\w./:@-]{{1,300}})"
#: Fact → the argument's name; the words of a dataclass and of a dictionary.
ARGUMENTS: dict[str, re.Pattern[str]] = {
    fact: re.compile(_ARGUMENT.format(name), re.ASCII)
    for fact, name in (
        ("model_name", "model_path"),
        ("context", "context_length"),
        ("tensor_parallel", "tp_size"),
        ("pipeline_parallel", "pp_size"),
        ("data_parallel", "dp_size"),
        ("memory_share", "mem_fraction_static"),
        ("cache_type", "kv_cache_dtype"),
        ("dtype", "dtype"),
        ("quantization", "quantization"),
        ("slots", "max_running_requests"),
        ("batch_tokens", "chunked_prefill_size"),
        ("block_size", "page_size"),
        ("device_kind", "device"),
        ("attention_shares_ranks", "enable_dp_attention"),
        ("graphs_off", "disable_cuda_graph"),
    )
}

#: What a line must hold to be a warning about memory or a setting; SGLang prints no levels.
WARNS = re.compile(
    r"Automatically (?:reduce|turn off|adjust)|is larger than the profiled value|KV pool holds \d+ tokens, fewer"
    r"|max_running_requests was reduced|Decode out of memory happened|KV cache pool is full\. Retract"
    r"|memory capacity is unbalanced|Disable \S{1,40} (?:draft )?cuda graph because only|Setting KV cache dtype"
    r"|is forced as chunk cache|max_running_requests \d+ -> \d+|pool leak detected|[Ff]alling back to|[Ff]allback to"
    r"|Truncated\b",
    re.ASCII,
)
#: Of those, the ones that say that something else happened than a refused allocation.
RECOVERED = ("Decode out of memory happened", "KV cache pool is full")

_POOL = "the engine's own pool of tokens ran out while it served; the card refused nothing"
REASONS: tuple[Reason, ...] = (
    Reason("kv_planning", re.compile(r"Not enough memory\. Please try to increase --mem-.*"), "kv", "kv"),
    Reason("kv_planning", re.compile(r"Loaded weights leave no GPU memory for the KV cache.*"), "kv", "kv"),
    Reason("kv_planning", re.compile(r"Not enough GPU memory for hybrid .{0,80}state cache.*"), "kv", "recurrent"),
    Reason("kv_planning", re.compile(r"SWA pool cap .{1,200}leaves no room for the full KV pool.*"), "kv", "kv"),
    Reason("kv_planning", re.compile(r"byte budget \d{1,18} cannot fit ONE worst-case request.*"), "kv", "kv"),
    Reason("kv_planning", re.compile(r"Prefill out of memory\. Try to lower.*"), "prefill", "kv", note=_POOL),
    Reason("kv_planning", re.compile(r"Decode out of memory\. Try to lower.*"), "decode", "kv", note=_POOL),
    Reason("kv_planning", re.compile(r"alloc_req_slots runs out of memory.*"), "prefill", "other", note=_POOL),
    Reason("host_out_of_memory", re.compile(r"Not enough host memory .{0,300}Requesting .*"), "kv", "kv"),
    Reason(
        "precheck",
        re.compile(r"(?:RuntimeError|ValueError): The memory capacity is unbalanced.*"),
        "start",
        note="another process holds memory of one of the cards, so that the cards have not the same room",
    ),
    Reason("out_of_memory", re.compile(r"memory allocation failed with OOM on device.*"), certainty="likely"),
    Reason(
        "load_error",
        re.compile(
            r"[Qq]uantization method \S{1,80} is not supported for the current GPU.*|Unknown quantization method.*"
            r"|no kernel image is available for execution.*|Minimum capability: .*|Unrecognized model in .*"
            r"|Model architectures .{1,200} are not supported.*|Unsupported architectures: .*|SafetensorError.*"
            r"|is not a local folder and is not a valid model identifier.*|Cannot find any model weights with .*"
            r"|does not recognize this architecture.*|does not appear to have a file named.*"
        ),
    ),
    Reason(
        "bad_option",
        re.compile(
            r"error: (?:unrecognized arguments|argument \S{1,80}:|the following arguments are required).*"
            r"|User-specified context_length .{0,100}is greater than the derived.*|must be divisible by tp_size.*"
        ),
        "start",
    ),
    Reason(
        "crash",
        re.compile(r"\w{1,60} hit an exception.*|Received sigquit from a child.*|Rank \d{1,5} scheduler is dead.*"),
        certainty="unknown",
        note="the log says that a process died, and not why: the lines below it, or those of the host's killer, may",
        guess=True,
    ),
)
FRAMES: dict[str, tuple[Phase, Bucket | None]] = {
    "load_model": ("weights", "weights"),
    "init_memory_pool": ("kv", "kv"),
    "init_memory_pools": ("kv", "kv"),
    "_init_pools": ("kv", "kv"),
    "init_cuda_graphs": ("graph-capture", "compute"),
    "init_device_graphs": ("graph-capture", "compute"),
    "capture_decode_graph": ("graph-capture", "compute"),
    "capture_prefill_graph": ("graph-capture", "compute"),
    "capture": ("graph-capture", "compute"),
    "capture_one_batch_size": ("graph-capture", "compute"),
    "init_attention_backend": ("reserve", "compute"),
    "kernel_warmup": ("warm-up", "compute"),
}
CALLERS: dict[str, tuple[Phase, Bucket | None]] = {
    "event_loop_normal": ("ready", "compute"),
    "event_loop_overlap": ("ready", "compute"),
    "run_batch": ("ready", "compute"),
    "forward_batch_generation": ("ready", "compute"),
}

#: What the server says of each request and batch.
NOISE = re.compile(
    r"(?:\[\d{4}-\d\d-\d\d [\d:]{8}[^\]\n]{0,40}\] )?(?:"
    + python_server.ACCESS
    + r"|Prefill batch|Decode batch|Receive: obj=|Finish: obj=)",
    re.ASCII,
)
WORDS = python_server.any_of(
    *("server_args=", "avail mem=", "mem usage=", "KV Cache is", "KV cache allocated", "UnifiedKVPool", "Mamba Cache"),
    *("ring buffers allocated", "host memory", "max_total_num_tokens=", "profiled value", "apture ", "fired up"),
    *("Automatically ", "KV pool", "was reduced", "pool is full", "unbalanced", "KV cache dtype", "chunk cache"),
    *(
        "max_running_requests",
        "leak detected",
        "alling back",
        "allback",
        "Truncated",
        "cuda graph because",
        "not enough",
    ),
    *("Not enough", "leave no GPU memory", "leaves no room", "byte budget", "runs out of memory", "OOM on device"),
    *("uantization method", "no kernel image", "apability", "Unrecognized model", "rchitectures", "model identifier"),
    *("model weights", "does not recognize", "does not appear", "divisible by", "is greater than", "hit an exception"),
    *("sigquit", "scheduler is dead", "not enough"),
    *python_server.PHRASES,
)
