"""Why a llama.cpp server did not start, or stopped: phrase → kind."""

from __future__ import annotations

import re
from typing import NamedTuple

from pytest_vram.bootlog.devices import HOST, Labels
from pytest_vram.bootlog.lines import size
from pytest_vram.bootlog.llama_lines import mebi


class Sign(NamedTuple):
    """What one line says about a failure.

    :ivar device: the engine's own name; of code for CUDA, which ROCm builds share, ``CUDA`` and ``number``.
    :ivar exact: whether ``bytes`` was printed to the byte. :ivar graph: the refused one was a graph's buffer.
    :ivar limit: larger than the driver lets one buffer be, whatever is free.
    """

    kind: str
    text: str
    certain: bool = True
    bucket: str | None = None
    device: str | None = None
    number: int | None = None
    family: str = "CUDA"
    bytes: int | None = None
    exact: bool = False
    graph: bool = False
    limit: bool = False


class _Refusal(NamedTuple):
    pattern: re.Pattern[str]
    bucket: str | None = None
    host: bool = False


def _refusal(pattern: str, bucket: str | None = None, *, host: bool = False) -> _Refusal:
    return _Refusal(re.compile(pattern, re.ASCII), bucket, host)


_NUMBER = r"(?P<number>\d{1,12}(?:\.\d{1,4})?) (?P<unit>[KMG]i?B)"
_BYTES = r"(?P<bytes>\d{1,19})"
#: To the byte, unless the line was cut before it; a size in MiB is another message's.
_OF_SIZE = r"buffer of size(?: " + _BYTES + r"(?![\d.])(?! [KMG]i?B)| *$)"
_REFUSALS = (
    # buffer type and size to the byte: the best of them
    _refusal(r"failed to allocate (?!output )(?P<device>\S+) " + _OF_SIZE),
    _refusal(r"allocating " + _NUMBER + r" on device (?P<cuda>\d{1,4}): (?P<call>\w+) failed"),
    _refusal(r"failed to allocate (?P<device>\S+) buffer for layer \d+ \(" + _BYTES + " bytes"),
    _refusal(r"failed to allocate (?:(?:CSA/LID|HCA) )?buffers? for (?:kv|KV|DSV4|per-step|layer)\b", "kv"),
    _refusal(r"failed to allocate buffers? for (?:rs|recurrent)\b", "recurrent"),
    _refusal(r"failed to allocate memory for kv cache", "kv"),
    _refusal(r"failed to allocate buffer for lora adapter", "lora"),
    _refusal(r"failed to allocate (?:compute (?:\w+ )?buffers?|graph\b(?!,))", "compute"),
    _refusal(r"failed to allocate output buffer of size " + _NUMBER, "compute"),
    _refusal(r"failed to reserve initial output buffer", "compute"),
    _refusal(r"unable to allocate (?:backend |(?P<device>\S+) )buffer", "weights"),
    _refusal(r"Failed to allocate buffer type (?P<device>\S+)", "weights"),
    _refusal(r"failed to allocate Metal buffer of " + _BYTES + " bytes"),
    # only the host's own allocators name no buffer type
    _refusal(r"failed to allocate (?:HBM )?" + _OF_SIZE, host=True),
    _refusal(r"error: failed to allocate buffer, size = +" + _NUMBER),
    _refusal(r"insufficient memory \(attempted to allocate +" + _NUMBER, host=True),
    _refusal(r"can't allocate " + _BYTES + " Bytes of memory on host", host=True),
    _refusal(r"can't allocate " + _BYTES + " Bytes of memory on device"),
    _refusal(r"(?:Device m|M)emory allocation of size " + _BYTES + " failed"),
    _refusal(r"(?P<family>CUDA|HIP|ROCm|MUSA) error(?: 2 at [^ ]{1,300})?: out of memory"),
    _refusal(r"mmap failed: Cannot allocate memory", "weights", host=True),
    _refusal(
        r"ErrorOutOfDeviceMemory|OUT_OF_DEVICE_MEMORY|OutOfDeviceMemoryError|CommandBufferCallbackErrorOutOfMemory"
    ),
    _refusal(r"ErrorOutOfHostMemory|std::bad_alloc", host=True),
)
_REFUSAL_NEEDLES = ("alloc", "out of memory", "insufficient memory", "OutOf", "OUT_OF", "reserve initial")
#: Said of an allocation that something else takes the place of.
_HARMLESS = re.compile(
    r"pinned memory|memory for prompt cache state|reorder temp buffer|host buffer for async uploads|using host memory"
    r"|failed to allocate graph, reserving|failed to allocate context"
)
_CURRENT_DEVICE = re.compile(r"^ *current device: (\d{1,4})(?:, in function \S{1,200}| *$)", re.ASCII)

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
    r"|[Ff]ailed to load (?:draft model|LoRA adapter|multimodal model|CLIP model).*|failed to apply lora adapter.*"
    r"|failed to load mmproj.*|failed to create MTP context.*|model is corrupted or incomplete.*"
    r"|failed to read key-value pairs.*|failed to read tensor (?:info|data).*|unable to load model\b.*"
    r"|Could not load (?:text )?model: .*|error: unable to load model.*"
)
#: Whose part it was that could not be made.
_PARTS = (
    ("projector", re.compile(r"\bCLIP model\b|\bmultimodal model\b|\bmmproj\b")),
    ("draft", re.compile(r"\bdraft model\b|\bMTP context\b")),
)
_CRASH = re.compile(
    r"GGML_ASSERT(?:\(|: ).*|Remote RPC server crashed.*|terminate called .*"
    r"|(?:CUDA|HIP|ROCm|MUSA) error(?: \d{1,5} at [^ ]{1,300})?: .*|ggml_abort.*|Segmentation fault.*"
)
#: ``GGML_ABORT``: ``/build/ggml/src/ggml-backend.cpp:930: pre-allocated tensor …``.
_ABORT = re.compile(r"^\S{0,200}ggml\S{0,100}\.(?:cpp|cu|cuh|c|m|h):\d{1,6}: \S.*")
_EXIT = re.compile(r"exiting due to .*")
RECOVERED = "retrying without pipeline parallelism"


def sign(text: str) -> Sign | None:
    """What this line says about a failure, or ``None``."""
    if any(needle in text for needle in _REFUSAL_NEEDLES) and RECOVERED not in text:
        if _HARMLESS.search(text):
            return None
        for refusal in _REFUSALS:
            match = refusal.pattern.search(text)
            if match is not None:
                return _out_of_memory(match, refusal, text)
    if match := _PORT.search(text):
        return Sign("port_taken", match[0])
    if match := _OPTION.search(text):
        return Sign("bad_option", match[0])
    if "exiting due to" in text and (match := _EXIT.search(text)):
        return Sign("load_error", match[0], certain=False)
    if match := (_CRASH.search(text) or _ABORT.match(text)):
        return Sign("crash", match[0])
    if match := _LOAD.search(text):
        part = next((part for part, pattern in _PARTS if pattern.search(match[0])), None)
        return Sign("load_error", match[0], bucket=part)
    return None


def is_abort(text: str) -> bool:
    """True for the line with which ggml ends the process, whatever the log's prefix."""
    return "ggml" in text and _ABORT.match(text) is not None


def is_harmless(text: str) -> bool:
    """True for a refused allocation that something else takes the place of: a warning."""
    return ("alloc" in text or "fallback" in text) and _HARMLESS.search(text) is not None and "reserving" not in text


def current_device(text: str) -> int | None:
    """The device of a CUDA error, which is printed in the line after it."""
    match = _CURRENT_DEVICE.match(text)
    return None if match is None else int(match[1])


def _out_of_memory(match: re.Match[str], refusal: _Refusal, text: str) -> Sign:
    groups = match.groupdict()
    whole, number, unit = groups.get("bytes"), groups.get("number"), groups.get("unit")
    figure = None
    if whole is not None:
        figure = size(whole, "B")
    elif number is not None and unit is not None:
        figure = mebi(number, unit)  # ggml prints "MB" for 2**20 bytes
    device, cuda = groups.get("device"), groups.get("cuda")
    if cuda is not None and (groups.get("call") or "").startswith("aclrt"):
        device, cuda = f"CANN{cuda}", None
    elif cuda is not None:
        device = f"CUDA{cuda}"
    host = refusal.host or (device is not None and Labels().of(device) == HOST)
    return Sign(
        "host_out_of_memory" if host else "out_of_memory",
        text.strip(),
        bucket=refusal.bucket,
        device="CPU" if refusal.host else device,
        number=None if cuda is None else int(cuda),
        family=(groups.get("family") or "CUDA").replace("HIP", "ROCm"),
        bytes=figure[0] if figure else None,
        exact=whole is not None,
        graph="gallocr" in text,
        limit="exceeds device" in text,
    )
