"""Why a load or a request of Ollama failed, by its own lines and by the errors that it passes on."""

from __future__ import annotations

import re

from pytest_vram.bootlog import host_killer, llama_failures
from pytest_vram.bootlog.boot import Failure
from pytest_vram.bootlog.devices import HOST, Labels
from pytest_vram.bootlog.lines import shown
from pytest_vram.bootlog.ollama_facts import size_of

_SYSTEM = re.compile(
    r"model requires more system memory \((?P<asked>[^()]{1,30})\) than is available(?: \((?P<free>[^()]{1,30})\))?",
    re.ASCII,
)
_OUT_OF_MEMORY = re.compile(
    r"out of (?:device )?memory|out-of-memory|cudaMalloc failed|hipMalloc failed|failed to allocate|allocation failed"
    r"|not enough memory|insufficient memory|erroroutof|out_of_device_memory|memory layout cannot be allocated",
    re.IGNORECASE,
)
_LOAD = re.compile(
    r"unable to load model|error loading model|unknown model|unsupported model|may be incompatible with your version"
    r"|not supported by your version|invalid file magic|failed to load model|no such file|invalid model"
    r"|llama-server binary not found|timed out waiting for llama|model failed to load",
    re.IGNORECASE,
)
_PORT = re.compile(r"address already in use|Only one usage of each socket address", re.IGNORECASE)
_CRASH = re.compile(
    r"process has terminated|no longer running|runner has unexpectedly stopped|exit status \d|SIGSEGV|SIGABRT"
    r"|error was encountered while running the model|GGML_ASSERT|segmentation",
    re.IGNORECASE,
)
#: Messages with an error in them that ends a load or a request.
ENDINGS = (
    "Load failed",
    "failed to create server",
    "error loading llama server",
    "llama runner terminated",
    "llama-server terminated",
    "unable to load any llama server",
    "failed to commit memory for model",
    "do load request",
    "post predict",
    "llama-server completion error",
    "llama-server chat error",
    "model request too large for system",
)
#: Of those, the ones of a load: said after a model was ready, they are about the next one.
OF_LOADS = (
    "Load failed",
    "failed to create server",
    "error loading llama server",
    "unable to load any llama server",
    "failed to commit memory for model",
    "do load request",
    "model request too large for system",
)
#: Messages of a load that is tried again.
RETRIES = (
    "retrying with projector CPU offload",
    "reducing automatic context and retrying",
    "evicting all other models and retrying",
    "applying backoff",
)


def of_error(error: str, *, phase: str | None, line: int, labels: Labels, bucket: str | None = None) -> Failure | None:
    """What an error that Ollama passes on says; its lines may be those of the engine. ``None``: no reason is in it.

    :param bucket: what was being allocated, where the place in the log tells.
    """
    if match := _SYSTEM.search(error):
        asked, free = size_of(match["asked"]), size_of(match["free"] or "")
        return Failure(
            kind="precheck",
            certainty="certain",
            text=shown(match[0]),
            phase="start",
            device=HOST,
            bytes=asked[0] if asked else None,
            line=line,
            free=free[0] if free else None,
            note="memory of the host: layers that do not fit a device are kept there",
        )
    signs = [sign for part in error.split("\n") if (sign := llama_failures.sign(part)) is not None]
    refused = [sign for sign in signs if sign.kind == "out_of_memory"]
    if refused or _OUT_OF_MEMORY.search(error):
        device = next((sign.device for sign in refused if sign.device is not None), None)
        known = next((sign.bucket for sign in refused if sign.bucket is not None), None) or bucket
        return Failure(
            kind="out_of_memory",
            certainty="likely" if known or phase else "unknown",
            text=shown(refused[0].text if refused else error),
            phase=phase,
            bucket=known,
            device=None if device is None else labels.of(device),
            bytes=next((sign.bytes for sign in refused if sign.bytes is not None), None),
            line=line,
        )
    kill = host_killer.read_kill(error)
    if kill is not None:
        return kill.failure(phase=phase, line=line)
    for kind, pattern in (("port_taken", _PORT), ("load_error", _LOAD), ("crash", _CRASH)):
        if pattern.search(error):
            certainty = "unknown" if kind == "crash" else "certain"
            return Failure(kind=kind, certainty=certainty, text=shown(error), phase=phase, line=line)
    return None
