"""What must be the same for results to be repeatable."""

from __future__ import annotations

import hashlib
import importlib.metadata
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from pytest_vram.errors import BadInput
from pytest_vram.paths import expanded
from pytest_vram.spec import BackendSpec, Sampling, ToolCalling
from pytest_vram.toolcalls.cases import CaseSet

#: Bytes at each end of a model file that are read: the whole of it would take minutes.
_END = 1 << 20


def of_run(
    cases: CaseSet,
    sampling: Sampling,
    calling: ToolCalling,
    *,
    retries: int,
    spec: BackendSpec | None,
    model: str | None,
    build: str | None,
    more: Mapping[str, Any],
) -> dict[str, Any]:
    """The fingerprint of results: cases, sampling, protocol, engine and model, as far as they are known.

    :param model: the name that the server answered with. :param build: what the server calls itself
        (``system_fingerprint``).
    """
    found: dict[str, Any] = {
        "cases": cases.name,
        "digest": cases.digest,
        "protocol": calling.protocol,
        "stream": calling.stream,
        "toolcalls": msgspec.to_builtins(calling),
        "sampling": msgspec.structs.asdict(sampling),
        "retries": retries,
        "pytest_vram": importlib.metadata.version("pytest-vram"),
    }
    if spec is not None:
        found["engine"] = spec.engine
        found["options"] = msgspec.to_builtins(spec.options)
        found |= of_model(spec)
    if model is not None:
        found["served_model"] = Path(model).name
    if build is not None:
        found["build"] = build
    return found | dict(more)


def of_model(spec: BackendSpec) -> dict[str, Any]:
    """Name of the model, and size and digest of its file where it is one.

    The digest is SHA-256 of its first and its last MiB, which hold names, types and settings of a GGUF file.
    """
    if spec.model is None:
        return {}
    found: dict[str, Any] = {"model": Path(spec.model).name}
    try:
        path = Path(spec.base) / expanded(spec.model, f"[backend.{spec.name}] model")
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(0)
            hashed = hashlib.sha256(file.read(_END))
            file.seek(max(_END, size - _END))
            hashed.update(file.read(_END))
    except (OSError, BadInput):
        return found  # a name at a hub, or a folder
    return found | {"model_size": size, "model_digest": hashed.hexdigest()[:16]}
