"""Why a llama.cpp server did not start, or stopped: phrase → kind."""

from __future__ import annotations

import re
from typing import NamedTuple

from pytest_vram.bootlog.lines import size


class Sign(NamedTuple):
    """What one line says about a failure; device is the engine's own name."""

    kind: str
    text: str
    certain: bool = True
    bucket: str | None = None
    device: str | None = None
    bytes: int | None = None
    final: bool = False


_OOM = (
    # buffer type and size to the byte: the best of them
    (re.compile(r"failed to allocate (?P<device>\S+) buffer of size (?P<bytes>\d+)", re.ASCII), None),
    (
        re.compile(r"allocating (?P<number>[\d.]+) (?P<unit>MiB) on device (?P<cuda>\d+): .*out of memory", re.ASCII),
        None,
    ),
    (re.compile(r"failed to allocate buffer for (?:kv|rs) cache"), "kv"),
    (re.compile(r"failed to allocate compute (?:\w+ )?buffers?"), "compute"),
    (re.compile(r"failed to allocate output buffer of size (?P<number>[\d.]+) (?P<unit>MiB)"), "compute"),
    (re.compile(r"unable to allocate (?P<device>\S+) buffer"), "weights"),
    (re.compile(r"failed to allocate buffer of size (?P<bytes>\d+)", re.ASCII), None),
    (re.compile(r"insufficient memory \(attempted to allocate\s+(?P<number>[\d.]+) (?P<unit>MB)\)"), None),
    (re.compile(r"Device memory allocation of size (?P<bytes>\d+) failed", re.ASCII), None),
    (re.compile(r"(?:CUDA|HIP|ROCm|MUSA) error: out of memory"), None),
    (re.compile(r"ErrorOutOf(?:Device|Host)Memory|OUT_OF_DEVICE_MEMORY|std::bad_alloc"), None),
)
_OOM_NEEDLES = ("alloc", "out of memory", "insufficient memory", "OutOf", "OUT_OF")

_PORT = re.compile(r"couldn't bind\b.*|address already in use", re.IGNORECASE)
_OPTION = re.compile(
    r"error: invalid argument: (?P<what>.*)|error while handling argument \"(?P<name>[^\"]*)\": (?P<why>.*)"
    r"|error while handling environment variable .*|error: unknown (?:argument|option|value)\b.*"
)
_LOAD = re.compile(
    r"failed to open GGUF file .*|invalid magic characters.*"
    r"|error loading model:(?! llama_model_loader: failed to load).*"
    r"|unknown model architecture.*|V cache quantization requires .*|requires flash_attn.*"
    r"|failed to initialize the context: .*|failed to load model.*|error loading model.*|failed to create context.*"
    r"|failed to load (?:draft model|LoRA adapter|multimodal model|CLIP model).*|failed to apply lora adapter.*"
    r"|failed to load mmproj.*|failed to create MTP context.*|model is corrupted or incomplete.*"
    r"|failed to read key-value pairs.*|failed to read tensor (?:info|data).*"
)
_CRASH = re.compile(
    r"GGML_ASSERT\(.*|Remote RPC server crashed.*|terminate called .*"
    r"|(?:CUDA|HIP|ROCm) error: .*|ggml_abort.*|Segmentation fault.*"
)
_EXIT = re.compile(r"exiting due to .*")
RECOVERED = "retrying without pipeline parallelism"


def sign(text: str) -> Sign | None:
    """What this line says about a failure, or ``None``."""
    if any(needle in text for needle in _OOM_NEEDLES):
        for pattern, bucket in _OOM:
            match = pattern.search(text)
            if match is not None:
                return _out_of_memory(match, bucket, text)
    if match := _PORT.search(text):
        return Sign("port_taken", match[0])
    if match := _OPTION.search(text):
        return Sign("bad_option", match[0])
    if "exiting due to" in text and (match := _EXIT.search(text)):
        return Sign("load_error", match[0], certain=False, final=True)
    if match := _CRASH.search(text):
        return Sign("crash", match[0])
    if match := _LOAD.search(text):
        return Sign("load_error", match[0])
    return None


def _out_of_memory(match: re.Match[str], bucket: str | None, text: str) -> Sign:
    groups = match.groupdict()
    number, unit, whole = groups.get("number"), groups.get("unit"), groups.get("bytes")
    amount: int | None = None
    if whole is not None:
        figure = size(whole, "B")
        amount = figure[0] if figure else None
    elif number is not None and unit is not None:
        # ggml prints "MB" for 2**20 bytes here
        figure = size(number, "MiB")
        amount = figure[0] if figure else None
    device = groups.get("device")
    if groups.get("cuda") is not None:
        device = f"CUDA{groups['cuda']}"
    return Sign("out_of_memory", text.strip(), bucket=bucket, device=device, bytes=amount)
