"""Facts in Ollama's own lines: settings of a load, of the server, and what it planned before the load.

Beside those of llama.cpp: ``layers_requested`` (-1: as many as fit), ``layers_planned``, ``devices_free_bytes`` (in the
order of the log), ``host_total_bytes``, ``host_free_bytes``, ``reported_total_bytes`` (host and devices together),
``reported_device_bytes``; of releases until mid-2025 ``projected_device_bytes`` and ``planned_…_bytes`` (sums over all
devices); of the server ``build``, ``url``, ``keep_alive``, ``overhead_bytes``, and what its environment asks for:
``context_asked``, ``parallel_asked``, ``cache_type_asked``, ``flash_attention_asked``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from pytest_vram.bootlog.lines import count, size

_SIZE = re.compile(r"(\d{1,12}(?:\.\d{1,3})?) ?([KMGT]i?B|B)\b", re.ASCII)
_REQUEST = re.compile(
    r"\b(Operation|Parallel|BatchSize|FlashAttention|KvSize|KvCacheType|NumThreads|UseMmap):(\S*)", re.ASCII
)
_PLACED = re.compile(r"\bGPULayers:(\d{1,5})\[", re.ASCII)
_OPTION = re.compile(r"(?:^|\s)(--?[a-z][a-z-]{0,40})(?:[ =]([^\s-]\S*|-\d+))?(?=\s|$)", re.ASCII)
_SETTING = re.compile(r"\b(OLLAMA_[A-Z_]{1,40}):([^\s\]]*)", re.ASCII)
_OFFLOADED = re.compile(r"\boffloaded (\d{1,5})/(\d{1,5}) layers to GPU", re.ASCII)
_LISTENING = re.compile(r"\bListening on (?P<address>\S+) \(version (?P<version>[^)\s]{1,60})\)", re.ASCII)
_SECONDS = re.compile(r"(?:runner|llama-server) started in (\d{1,9}(?:\.\d{1,6})?) seconds", re.ASCII)
#: The engine's options in Ollama's command lines, in all spellings that it used.
_OPTIONS = {
    "--ctx-size": "context",
    "-c": "context",
    "--batch-size": "batch",
    "-b": "batch",
    "-ub": "ubatch",
    "--parallel": "slots",
    "-np": "slots",
    "--threads": "threads",
    "-t": "threads",
}
_SETTINGS = {"OLLAMA_KEEP_ALIVE": "keep_alive", "OLLAMA_KV_CACHE_TYPE": "cache_type_asked"}


def size_of(text: str) -> tuple[int, int] | None:
    """Bytes of a printed size and half of its last digit; ``None`` where it is none."""
    match = _SIZE.match(text)
    if match is None:
        return None
    return size(match[1], match[2])


def _bytes(text: str) -> int | None:
    found = size_of(text)
    return None if found is None else found[0]


def _flash(word: str) -> str | None:
    return {"true": "enabled", "enabled": "enabled", "false": "disabled", "disabled": "disabled"}.get(word.lower())


def of_request(text: str) -> tuple[str, dict[str, Any]]:
    """Operation of a load request (``fit``, ``alloc``, ``commit``, ``close``), and the settings in it."""
    pairs = dict(_REQUEST.findall(text))
    facts: dict[str, Any] = {}
    context, slots = count_of(pairs.get("KvSize")), count_of(pairs.get("Parallel"))
    if context:
        facts["context"] = context
        if slots:
            facts["context_per_slot"] = context // slots
    if slots:
        facts["slots"] = slots
    if batch := count_of(pairs.get("BatchSize")):
        facts["batch"] = batch
    if threads := count_of(pairs.get("NumThreads")):
        facts["threads"] = threads
    if (flash := _flash(pairs.get("FlashAttention", ""))) is not None:
        facts["flash_attention"] = flash
    if kind := pairs.get("KvCacheType"):
        facts["cache_type_k"] = facts["cache_type_v"] = kind
    mapped = pairs.get("UseMmap", "").rstrip("}")
    if mapped in ("true", "false"):
        facts["mmap"] = mapped == "true"
    if match := _PLACED.search(text):
        facts["layers_planned"] = int(match[1])
    return pairs.get("Operation", ""), facts


def count_of(text: str | None) -> int | None:
    """A whole number, or ``None``."""
    text = (text or "").rstrip("}")
    return count(text) if text.isascii() and text.isdigit() else None


def of_command(command: str) -> dict[str, Any]:
    """Settings in the command line of the runner."""
    facts: dict[str, Any] = {}
    for option, value in _OPTION.findall(command):
        name = _OPTIONS.get(option)
        number = count_of(value)
        if name is not None and number is not None:
            facts.setdefault(name, number)
        elif option == "--model" and value:
            facts.setdefault("model_path", value)
        elif option in ("--kv-cache-type", "--cache-type-k") and value:
            facts["cache_type_k"] = facts["cache_type_v"] = value
        elif option == "--flash-attn":
            facts["flash_attention"] = {"on": "enabled", "off": "disabled", "": "enabled"}.get(value, "")
        elif option == "--no-mmap":
            facts["mmap"] = False
        elif option == "--load-mode" and value:
            facts["load_mode"] = value
    if facts.get("flash_attention") == "":
        del facts["flash_attention"]  # left to the engine
    if facts.get("context") and facts.get("slots"):
        facts["context_per_slot"] = facts["context"] // facts["slots"]
    return facts


def of_plan(pairs: Mapping[str, str]) -> dict[str, Any]:
    """What Ollama predicted before a load, in its releases until mid-2025: sums over all devices, not buffers."""
    facts: dict[str, Any] = {}
    for key, name in (
        ("memory.required.full", "planned_whole_bytes"),
        ("memory.required.partial", "projected_device_bytes"),
        ("memory.required.kv", "planned_kv_bytes"),
        ("memory.weights.total", "planned_weights_bytes"),
        ("memory.graph.full", "planned_graph_bytes"),
        ("projector.weights", "planned_projector_bytes"),
    ):
        amount = _bytes(pairs.get(key, ""))
        if amount is not None:
            facts[name] = amount
    requested = pairs.get("layers.requested", pairs.get("layers.real", ""))
    if re.fullmatch(r"-?\d{1,5}", requested, re.ASCII):
        facts["layers_requested"] = int(requested)
    if (whole := count_of(pairs.get("layers.model"))) is not None:
        facts["layers_offloadable"] = whole
    planned = count_of(pairs.get("layers.offload", pairs.get("layers.estimate")))
    if planned is not None:
        facts["layers_planned"] = planned
    if available := pairs.get("memory.available"):
        free = [found[0] for match in _SIZE.finditer(available) if (found := size(match[1], match[2])) is not None]
        facts["devices_free_bytes"] = free
    return facts


def of_message(message: str, pairs: Mapping[str, str]) -> dict[str, Any]:
    """Facts of the other lines about one load."""
    facts: dict[str, Any] = {}
    if match := _OFFLOADED.search(message):
        facts["layers_offloaded"], facts["layers_offloadable"] = int(match[1]), int(match[2])
    elif match := _SECONDS.search(message):
        facts["boot_seconds"] = float(match[1])
    elif message == "system memory":
        for key, name in (("total", "host_total_bytes"), ("free", "host_free_bytes")):
            if (amount := _bytes(pairs.get(key, ""))) is not None:
                facts[name] = amount
    elif message == "loading model":
        if (whole := count_of(pairs.get("model layers"))) is not None:
            facts["layers_offloadable"] = whole
        if re.fullmatch(r"-?\d{1,5}", pairs.get("requested", ""), re.ASCII):
            facts["layers_requested"] = int(pairs["requested"])
    elif message == "enabling flash attention":
        facts["flash_attention"] = "enabled"
    elif "num_tensors" in pairs:
        if architecture := pairs.get("architecture"):
            facts["architecture"] = architecture
        if quantization := pairs.get("file_type"):
            facts["quantization"] = quantization
        if model := pairs.get("name"):
            facts["model_name"] = model
    elif message == "total memory":
        if (amount := _bytes(pairs.get("size", ""))) is not None:
            facts["reported_total_bytes"] = amount  # of the host and of all devices together
    elif (amount := _bytes(pairs.get("runner.vram", ""))) is not None:
        facts["reported_device_bytes"] = amount
    return facts


def of_server(message: str, pairs: Mapping[str, str]) -> dict[str, Any]:
    """Facts of the server, whichever model it loads."""
    if match := _LISTENING.search(message):
        return {"build": match["version"], "url": f"http://{match['address']}"}
    if message == "server config":
        found = dict(_SETTING.findall(pairs.get("env", "")))
        facts: dict[str, Any] = {name: found[key] for key, name in _SETTINGS.items() if found.get(key)}
        for key, name in (("OLLAMA_NUM_PARALLEL", "parallel_asked"), ("OLLAMA_CONTEXT_LENGTH", "context_asked")):
            if number := count_of(found.get(key)):
                facts[name] = number
        if found.get("OLLAMA_FLASH_ATTENTION") in ("true", "false", "1", "0"):
            facts["flash_attention_asked"] = found["OLLAMA_FLASH_ATTENTION"] in ("true", "1")
        if (overhead := count_of(found.get("OLLAMA_GPU_OVERHEAD"))) is not None and overhead:
            facts["overhead_bytes"] = overhead
        return facts
    return {}
