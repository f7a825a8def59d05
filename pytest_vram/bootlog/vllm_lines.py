"""The lines of vLLM's log that give figures, facts and reasons, in the words of its releases from 0.6 to 0.33.

Every size is in units of 2**30 bytes, also where old releases print ``GB``.
"""

from __future__ import annotations

import re

from pytest_vram.bootlog import python_server
from pytest_vram.bootlog.boot import Phase
from pytest_vram.bootlog.python_server import Reason
from pytest_vram.ledger import Bucket


def _line(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern.replace("NUM", r"(-?\d{1,9}(?:\.\d{1,6})?)"), re.ASCII)


#: ``Loading model weights took 14.9888 GB``, ``Model loading took 7.51 GiB memory and 3.2 seconds``.
WEIGHTS = _line(r"(?:Loading model weights|Model loading) took NUM Gi?B(?: memory)?(?: and NUM seconds)?")
#: 0.6.5 to 0.10, the first engine.
PROFILE = _line(
    r"model weights take NUM ?GiB; non_torch_memory takes NUM ?GiB; PyTorch activation peak memory takes NUM ?GiB;"
    r" the rest of the memory reserved for KV Cache is NUM ?GiB"
)
#: 0.6.4: everything in one line; the torch peak contains the weights.
RESULTS = _line(
    r"Memory profiling results: total_gpu_memory=NUM ?GiB initial_memory_usage=NUM ?GiB peak_torch_memory=NUM ?GiB"
    r" memory_usage_post_profile=NUM ?Gi?B non_torch_memory=NUM ?GiB kv_cache_size=NUM ?GiB"
    r"(?: gpu_memory_utilization=NUM)?"
)
BUDGET = _line(r"can use total_gpu_memory \(NUM ?GiB\) x gpu_memory_utilization \(NUM\) = NUM ?GiB")
AVAILABLE = _line(r"Available KV cache memory: NUM GiB")
#: The cache was given in bytes, and nothing was profiled.
RESERVED = _line(r"Initial free memory NUM GiB, reserved NUM ?GiB memory for KV Cache")
TOKENS = _line(r"\b(?:[A-Z]{2,8}(?: \+ host)?) KV cache size: ([\d,]{1,24}) tokens")
CONCURRENCY = _line(r"Maximum concurrency for ([\d,]{1,24}) tokens per request: NUMx")
BLOCKS = _line(r"(?:^|# )(\w{1,20}) blocks: (\d{1,12})(?:, # CPU blocks: (\d{1,12}))?")
OVERRIDE = _line(r"Overriding num_gpu_blocks=(\d{1,12}) with num_gpu_blocks_override=(\d{1,12})")
GRAPHS = _line(r"\bGraph capturing finished in (\d{1,9}) secs\.?(?:, took NUM GiB)?")
ENCODER_GRAPHS = _line(r"Encoder graph capturing finished in (\d{1,9}) secs, took NUM GiB")
#: 0.16 on: a trial before the cache is planned, and what came of it. What is planned for is in the activation peak.
GRAPHS_PLANNED = _line(r"Estimated CUDA graph memory: NUM GiB total")
GRAPHS_COMPARED = _line(r"CUDA graph pool memory: NUM GiB \(actual\), NUM GiB \(estimated\)")
#: 0.11 on (until 0.20 at level DEBUG), at the end of the boot.
SUMMARY = _line(
    r"Free memory on device (?:\S{1,40} )?\(NUM/NUM GiB\) on startup\."
    r" Desired GPU memory utilization is \(NUM, NUM GiB\)"
)
#: What is in use, each with its name; plugins have names of their own (``NPU graph memory``).
USED = re.compile(r"Actual usage(?: is|:) (.{1,800}?)(?:\. |\.?$)", re.ASCII)
USED_FOR = _line(r"\bNUM GiB for ([^,.\d][^,.]{0,60})")
IN_USE = _line(r"Current (?:kv|KV) cache memory(?: in use is|:) NUM GiB")
#: The plugin for Intel's cards until 0.13; ``MB`` are 2**20 bytes, and the peak is of the weights and the rest too.
XPU_BEFORE = _line(r"Before memory profiling run, total GPU memory: NUM MB, model load takes NUM MB")
XPU_AFTER = _line(
    r"After memory profiling run, peak memory usage is NUM MB, ?torch mem is NUM MB, non-torch mem is NUM MB"
)
#: Intel's Gaudi, with four significant digits.
HPU_PROFILED = _line(r"Model profiling run took NUM ([KMGT]?i?B) of device memory")
HPU_ROOM = _line(r"Free device memory: .{1,300}?\bNUM ([KMGT]?i?B) reserved for (?:usable )?KV cache$")
HPU_CACHE = _line(r"Initializing cache engine took NUM ([KMGT]?i?B) of device memory")
HPU_WARM = _line(r"Warmup finished in (?:\d{1,9}) secs, allocated NUM ([KMGT]?i?B) of device memory")
#: Plugins for other devices; 0.8 to 0.11 say so of built-in ones too.
PLATFORM = re.compile(r"Automatically detected platform (\w{1,16})|Platform plugin (\w{1,16}) is activated", re.ASCII)
SLEEP = _line(r"Sleep mode freed NUM GiB memory, NUM GiB memory is still in use")

PRECHECK = _line(
    r"Free memory on device ?(?:(\S{1,40}) )?\(NUM/NUM GiB\) on startup is less than (?:desired GPU memory utilization"
    r"|the engine's budget after excluding external process's weights) \(NUM, NUM GiB\)"
)
#: The bracket before the first size is closed nowhere in some releases.
NEEDED = _line(
    r"max seq len \((\d{1,12})\), \(?NUM GiB KV cache is needed, which is larger than the available KV cache memory"
    r" \(NUM GiB\)"
)
ESTIMATE = _line(r"estimated maximum model length is (\d{1,12})")
TOO_LONG = _line(
    r"max seq len \((\d{1,12})\) is larger than the maximum number of tokens that can be stored in KV cache"
    r" \((\d{1,12})\)"
)

_CONFIG = r"\b{}=([^,\s()]{{1,200}})"
#: Fact → its name in the line of the whole configuration.
CONFIG: dict[str, re.Pattern[str]] = {
    fact: re.compile(_CONFIG.format(name), re.ASCII)
    for fact, name in (
        ("dtype", "dtype"),
        ("context", "max_seq_len"),
        ("tensor_parallel", "tensor_parallel_size"),
        ("pipeline_parallel", "pipeline_parallel_size"),
        ("data_parallel", "data_parallel_size"),
        ("quantization", "quantization"),
        ("eager", "enforce_eager"),
        ("cache_type", "kv_cache_dtype"),
        ("device_kind", "device_config"),
        ("chunked_prefill", "(?:chunked_prefill_enabled|enable_chunked_prefill)"),
    )
}
MODEL = re.compile(r"with config: model=(?:'([^']{1,400})'|\"([^\"]{1,400})\")", re.ASCII)
VERSION = re.compile(r"(?:LLM engine \(v|API server version )(\d[\w.+]{0,60})", re.ASCII)
GENERATION = re.compile(r"Initializing a (V[01]) LLM engine", re.ASCII)
_ARGUMENT = r"['\s(,]{}['\s]{{0,2}}[=:] ?'?([\w.-]{{1,40}})"
#: The same of the arguments that were given.
ARGUMENTS: dict[str, re.Pattern[str]] = {
    fact: re.compile(_ARGUMENT.format(name), re.ASCII)
    for fact, name in (
        ("memory_share", "gpu_memory_utilization"),
        ("block_size", "block_size"),
        ("slots", "max_num_seqs"),
        ("batch_tokens", "max_num_batched_tokens"),
    )
}
MODEL_LENGTH = _line(r"Using max model len (\d{1,12})")
BATCH = _line(r"Chunked prefill is enabled with max_num_batched_tokens=(\d{1,12})")
REDUCED = _line(r"Auto-fit max_model_len: reduced from (\d{1,12}) to (\d{1,12})")
LISTENING = _line(r"Starting vLLM (?:API )?server(?: \d{1,4})? on (http\S{1,200})")
INITIALISED = _line(r"init engine \(profile, create kv cache, warmup model\) took NUM s")
LOADED = _line(r"Loading weights took NUM seconds")

#: What a warning of vLLM's must hold to be one about memory or a setting that did not take effect.
WARNS = re.compile(
    r"[Ff]alling back|[Ff]allback to|will be ignored|is ignored|[Dd]isabl(?:ed|ing)\b|Casting torch\.|Overriding"
    r"|forced to|not supported|does not support|is not compatible|preempted by|not enough KV cache|not enough kv cache"
    r"|may cause OOM|Capping|[Rr]educ(?:ed|ing)\b|Free memory grew"
)

PROFILED_WITH_THE_CONTEXT = (
    "the first engine measures the peak with a prompt of the whole context, unless prompts are processed in chunks,"
    " which it does by itself above 32768 tokens: a longer context may fit where this one does not, so try values"
    " instead of halving"
)
REASONS: tuple[Reason, ...] = (
    Reason("kv_planning", re.compile(r"No available memory for the cache blocks.*"), "kv", "kv"),
    Reason("kv_planning", re.compile(r"Cannot auto-fit max_model_len: not enough GPU memory.*"), "kv", "kv"),
    Reason("kv_planning", re.compile(r"The worker already uses .{1,300}\bthe KV cache.*"), "kv", "kv"),
    Reason("kv_planning", re.compile(r"Available memory on node .{1,200} on kv cache allocation.*"), "kv", "kv"),
    Reason("precheck", re.compile(r"Externally held weights on device .{1,200} exceed the desired .*"), "start"),
    Reason(
        "out_of_memory",
        re.compile(r"CUDA out of memory occurred when warming up .*"),
        "warm-up",
        "compute",
        note="fewer sequences at once (`max_num_seqs`) or a smaller share of the card make room for the sampler",
    ),
    Reason(
        "out_of_memory",
        re.compile(r"CUDA Error: out of memory at \S{0,200}cumem_allocator.*"),
        note="waking up from sleep: something else took the memory that was freed",
    ),
    Reason("out_of_memory", re.compile(r"memory allocation failed with OOM on device.*"), certainty="likely"),
    Reason(
        "crash",
        re.compile(r"Error in memory profiling\. Initial .*"),
        "reserve",
        note="another process freed memory of the card while the peak was measured, so that the measurement is void",
    ),
    Reason(
        "load_error",
        re.compile(
            r"[Qq]uantization method \S{1,80} is not supported for the current GPU.*|Unknown quantization method.*"
            r"|Quantization method specified in the model config .{0,200}does not match.*"
            r"|\S{1,40} is only supported on GPUs with compute capability.*"
            r"|no kernel image is available for execution.*"
            r"|Minimum capability: .*|FP8 KV cache is not supported by .*|bfloat16 KV cache is not supported .*"
            r"|Model architectures .{1,200} (?:are not supported|failed to be inspected).*|Unrecognized model in .*"
            r"|is not a local folder and is not a valid model identifier.*|Cannot find any model weights with .*"
            r"|Invalid repository ID or local directory.*|SafetensorError.*|Error while deserializing header.*"
            r"|does not recognize this architecture.*|does not appear to have a file named.*"
            r"|There is no module or parameter.*"
        ),
    ),
    Reason(
        "bad_option",
        re.compile(
            r"User-specified max_model_len .{0,100}is greater than.*|must be divisible by tensor parallel size.*"
            r"|error: (?:unrecognized arguments|argument \S{1,80}:|the following arguments are required).*"
            r"|World size \(\d{1,6}\) is larger than the number of available GPUs.*"
            r"|max_num_batched_tokens \(\d{1,12}\) (?:is smaller than|must be greater than).*"
        ),
        "start",
    ),
    Reason(
        "crash",
        re.compile(
            r"EngineCore failed to start.*|Engine core initialization failed.*|Engine process failed to start.*"
            r"|WorkerProc (?:failed to start|initialization failed).*|\bdied unexpectedly.*|EngineDeadError.*"
            r"|EngineCore encountered (?:a fatal error|an issue).*|Background loop (?:has errored|is stopped|died).*"
            r"|WorkerProc hit an exception.*"
        ),
        certainty="unknown",
        note="the log says that the engine died, and not why: the lines above it, or those of the host's killer, may",
        guess=True,
    ),
)
#: Functions of a traceback → what the engine is busy with; the outermost counts.
FRAMES: dict[str, tuple[Phase, Bucket | None]] = {
    "load_model": ("weights", "weights"),
    "determine_available_memory": ("reserve", "compute"),
    "determine_num_available_blocks": ("reserve", "compute"),
    "profile_run": ("reserve", "compute"),
    "initialize_kv_cache": ("kv", "kv"),
    "_allocate_kv_cache": ("kv", "kv"),
    "_init_cache_engine": ("kv", "kv"),
    "capture_model": ("graph-capture", "compute"),
    "_dummy_sampler_run": ("warm-up", "compute"),
    "_dummy_pooler_run": ("warm-up", "compute"),
    "kernel_warmup": ("warm-up", "compute"),
    "warmup_kernels": ("warm-up", "compute"),
    "wake_up": ("sleep", None),
}
CALLERS: dict[str, tuple[Phase, Bucket | None]] = {
    "compile_or_warm_up_model": ("warm-up", "compute"),
    "run_busy_loop": ("ready", "compute"),
    "run_engine_loop": ("ready", "compute"),
    "execute_model": ("ready", "compute"),
}

#: What the server says of each request, and every ten seconds.
NOISE = re.compile(
    r"(?:\(\w{1,40} pid=\d{1,10}\) )?(?:"
    + python_server.ACCESS
    + r"|INFO \d\d-\d\d [\d:]{8} \[?\w{0,20}(?:loggers|metrics|logger)\.py:\d{1,6}\]"
    r" (?:Engine \d|Avg |Received request|Added request|Generated response))",
    re.ASCII,
)
WORDS = python_server.any_of(
    *("LLM engine", "API server version", "non-default args", "args: Namespace", "max model len", "max_model_len"),
    *("max_num_batched_tokens", "to load model", "checkpoint shards", "eights took", "loading took", "weights take"),
    *("rofiling", "total_gpu_memory", "KV cache size", "KV cache memory", "KV Cache", "kv cache allocation"),
    *("KV cache is", "PU blocks: ", "pu blocks: ", "cuda blocks: ", "num_gpu_blocks", "Maximum concurrency"),
    *("apturing", "CUDA graph", "CUDAGraph", "Free memory", "Sleep mode", "fall asleep", "wake up", "Starting vLLM"),
    *("init engine", "EngineCore failed", "EngineCore encountered", "Engine core", "Engine process", "EngineDead"),
    *("died", "Background loop", "WorkerProc", "is larger than", "apability", "cache blocks", "Auto-fit"),
    *("not supported", "uantization method", "Externally held", "OOM", "Model architectures", "Unrecognized model"),
    *("model identifier", "model weights", "repository ID", "does not recognize", "does not appear", "divisible by"),
    *("latform plugin", "detected platform", "Free device memory", "cache engine took", "Warmup finished"),
    *("no kernel image", "no module or parameter", "is greater than", "across cluster", "warming up"),
    *python_server.PHRASES,
)
