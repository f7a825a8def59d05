"""What a grammar is, and which engine has which."""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from pytest_vram.bootlog.boot import Boot, Phase, PhaseSpan


class Grammar(Protocol):
    """Reads one log, line by line.

    :ivar words: finds something in every line that this grammar may learn from; ``None``: all lines must be fed. A
        reader of long logs leaves the other lines out, and tells their number to :meth:`skip`. An alternation of plain
        phrases (``a phrase|an(?:other|d)``) is looked for several times faster than any other pattern; the fewer lines
        hold one, the better.

    A grammar may also have ``noise``: a pattern of the beginnings of lines of which there are very many, and of which
    the first one in a row says all that :meth:`feed` learns from them, whatever else they hold (ASCII, nothing
    captured). The others are passed over at once.
    """

    words: re.Pattern[str] | None

    def skip(self, lines: int) -> None:
        """Count lines that were left out, because :attr:`words` is not in them."""

    def feed(self, raw: str) -> Phase | None:
        """Take the next line; the phase that it begins, or ``None``. Never raises, whatever the line is."""

    def boot(self) -> Boot:
        """What the lines so far said."""


def with_ends(spans: Sequence[PhaseSpan]) -> tuple[PhaseSpan, ...]:
    """The phases with their ends: each ends where the next one begins, the last one is open."""
    starts: list[float | None] = [span.start for span in spans[1:]]
    return tuple(
        PhaseSpan(name=span.name, line=span.line, start=span.start, end=end)
        for span, end in zip(spans, [*starts, None], strict=False)
    )


#: Engine → ``module:class``, resolved on use. Engines that are not listed are read with the user's own patterns.
GRAMMARS: dict[str, str] = {
    "llama-server": "pytest_vram.bootlog.llama_cpp:LlamaCpp",
    "llama.cpp": "pytest_vram.bootlog.llama_cpp:LlamaCpp",
    "ik_llama": "pytest_vram.bootlog.llama_cpp:LlamaCpp",
    "koboldcpp": "pytest_vram.bootlog.llama_cpp:LlamaCpp",
    "ollama": "pytest_vram.bootlog.ollama:Ollama",
    "vllm": "pytest_vram.bootlog.vllm:Vllm",
    "sglang": "pytest_vram.bootlog.sglang:Sglang",
    "transformers": "pytest_vram.bootlog.transformers:Transformers",
}
GENERIC = "pytest_vram.bootlog.generic:Generic"


def grammar(engine: str, patterns: Mapping[str, str]) -> Grammar:
    """The grammar of ``engine``; user's ``patterns`` (phase → regular expression) are for engines without one.

    :raises BadInput: a pattern that is not a regular expression, or of an unknown phase.
    """
    module, _, name = GRAMMARS.get(engine, GENERIC).partition(":")
    found: Grammar = getattr(importlib.import_module(module), name)(engine, patterns)
    return found


#: Phrases that give an engine away, for logs of unknown origin. The more specific engines come first: Ollama carries
#: llama.cpp's lines in its own log, and torch's traceback may stand in any engine's.
_SIGNS: dict[str, tuple[str, ...]] = {
    "ollama": (
        *(f"source={name}.go:" for name in ("routes", "sched", "server", "runner", "ggml", "device", "memory", "gpu")),
        *(f"source={name}.go:" for name in ("dyn_ext_server", "llama_server", "images", "types", "payload_common")),
        'msg="model weights"',
        'msg="kv cache"',
        'msg="compute graph"',
        'msg="inference compute"',
        'msg="starting runner"',
        'msg="starting llama server"',
        'msg="loading model via llama-server"',
        'msg="runtime OOM detected',
        'msg="offload to ',
        "gpu VRAM usage didn't recover",
        "ollama_llama_server",
        "starting ollama engine",
        " ollama[",
        "llama runner process",
        "llama runner started",
    ),
    "sglang": (
        "server_args=ServerArgs(",
        "Load weight begin.",
        "Load weight end.",
        "KV Cache is allocated.",
        "Mamba Cache is allocated.",
        "Memory pool end.",
        "Capture cuda graph begin.",
        "Capture cuda graph end.",
        "The server is fired up and ready to roll!",
        "--mem-fraction-static",
        "max_total_num_tokens=",
        "sglang/srt",
    ),
    "vllm": (
        "vLLM API server",
        "vLLM server",
        "vLLM engine",
        "LLM engine (v",
        "vllm/",
        "(EngineCore",
        "(VllmWorker",
        "gpu_model_runner.py:",
        "gpu_worker.py:",
        "kv_cache_utils.py:",
        "gpu_memory_utilization",
        "gpu-memory-utilization",
        "GPU KV cache size:",
        "Available KV cache memory:",
        "larger than the available KV cache memory",
        "No available memory for the cache blocks",
        "# GPU blocks: ",
        "the current vLLM instance",
        "desired GPU memory utilization",
        "Maximum concurrency for ",
    ),
    "llama-server": (
        "llama_model_load",
        "llama_context",
        "llama_load_model",
        "llama_kv_cache",
        "llama_new_context",
        "llama_init_from",
        "llama_params_fit",
        "llama_server",
        "llama_decode",
        "llama.cpp",
        "llm_load_",
        "load_tensors:",
        "loading model tensors",
        "common_param",
        "common_init",
        "sched_reserve",
        "memory breakdown [MiB]",
        "system_info: n_threads",
        "main: build = ",
        "ggml_",
        "KoboldCpp",
        "kv self size",
        "KV self size",
        "total VRAM used",
        "exiting due to model loading error",
        "couldn't bind HTTP server socket",
        "error: invalid argument: ",
        'error while handling argument "',
    ),
    "transformers": (
        "torch.OutOfMemoryError",
        "torch.cuda.OutOfMemoryError",
        "out of memory. Tried to allocate",
        "MPS backend out of memory",
        "DefaultCPUAllocator",
        "Loading checkpoint shards",
        "Loading weights: ",
        "parameters are on the meta device",
        "site-packages/transformers/",
        "site-packages/torch/",
    ),
}
#: llama.cpp's own prefix, with a wrapper's before it: no other engine has such times.
_LLAMA_PREFIX = re.compile(r"^.{0,200}?\b\d{1,4}\.\d\d\.\d{3}\.\d{3} [DIWE] ", re.ASCII | re.MULTILINE)


def recognise(text: str) -> str | None:
    """The engine whose phrases are in ``text``; ``None`` where none is known."""
    if _LLAMA_PREFIX.match(text.lstrip()):
        return "llama-server"  # whatever its requests talk about
    found = next((engine for engine, signs in _SIGNS.items() if any(sign in text for sign in signs)), None)
    if (found is None or found == "transformers") and _LLAMA_PREFIX.search(text):
        return "llama-server"
    return found


class Start(NamedTuple):
    """The line with which a process of an engine begins; another one after a boot is the next boot.

    :ivar words: one of them is in such a line. :ivar pattern: what it is, without its prefix.
    :ivar again: what each of several processes of one boot says at its beginning, so that it begins another boot only
        after one that was ready or failed.
    """

    words: tuple[str, ...]
    pattern: re.Pattern[str]
    again: re.Pattern[str] | None = None


#: Engine → its first lines, where it has some that it prints once.
STARTS: dict[str, Start] = {
    "llama-server": Start(
        ("build", "KoboldCpp", "verbosity = "),
        re.compile(
            r"^(?:\w+ +)?(?:\w+: )*build(?: =|:|) \d+ \([0-9a-f]{5,40}\)|^(?:INFO )?\[ *main\] build info\b"
            r"|^Welcome to KoboldCpp|\bverbosity = \d{1,2} \(adjust with ",  # the first words at the default verbosity
            re.ASCII,
        ),
    ),
    "vllm": Start(
        ("vLLM API server version", "LLM engine (v"),
        re.compile("vLLM API server version"),
        re.compile(r"Initializing an? (?:V\d )?LLM engine \(v"),
    ),
    "ollama": Start(
        ("server config", "Listening on "),
        re.compile(r"^msg=\"server config\"|\bListening on \S+ \(version ", re.ASCII),
    ),
    "sglang": Start(("server_args=",), re.compile(r"^server_args=", re.ASCII)),
}
STARTS.update(dict.fromkeys(("llama.cpp", "ik_llama", "koboldcpp"), STARTS["llama-server"]))
