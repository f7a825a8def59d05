"""Deployments that really run out of memory, safely: a limit on one process, never the machine's own memory."""

from __future__ import annotations

import contextlib
import shlex
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec

from pytest_vram.backends import binary, flags
from pytest_vram.errors import EngineNotFound
from pytest_vram.spec import BackendSpec
from pytest_vram.testing import models
from pytest_vram.testing.software import SoftwareGpu, software_gpu
from pytest_vram.units import MIB

#: Memory of the process that runs out; it needs some tens of MiB for itself.
LIMIT = 192 * MIB
_CONTEXT = 65_536


class OutOfMemory(msgspec.Struct, frozen=True, kw_only=True):
    """A deployment that cannot boot.

    :ivar spec: what to start. :ivar bucket: what does not fit, ``kv`` or ``weights``, of ``needs`` bytes.
    :ivar limit: bytes that the process may have. :ivar gpus: the software GPUs that run out; empty on the host.
    """

    spec: BackendSpec
    bucket: Literal["kv", "weights"]
    needs: int
    limit: int
    gpus: tuple[SoftwareGpu, ...] = ()


@contextlib.contextmanager
def out_of_memory(
    *, where: Literal["device", "host"] = "device", bucket: Literal["kv", "weights"] = "kv"
) -> Iterator[OutOfMemory]:
    """A deployment whose boot really runs out of memory while it allocates ``bucket``.

    On ``device`` a software GPU of 192 MiB is too small for a KV cache or for weights of over 256 MiB; on ``host`` the
    server itself runs under that limit. The model is written anew and removed at the end.

    :raises EngineNotFound: no llama-server here. :raises BadInput: the packages that write models are missing.
    """
    with tempfile.TemporaryDirectory(prefix="vram-oom-") as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        model = folder / "model.gguf"
        if bucket == "kv":
            shape = models.write_llama(model, models.Shape(layers=8, context=_CONTEXT))
            needs, context = shape.kv_bytes(_CONTEXT), _CONTEXT
        else:
            shape = models.write_llama(model, models.Shape(layers=3, embedding=1024, feed_forward=16384))
            needs, context = model.stat().st_size, 256
        gpus = stack.enter_context(software_gpu(memory=LIMIT)) if where == "device" else ()
        executable = _first_binary()
        # Without these the server would shrink the context, or map the file, until everything fits.
        options: dict[str, str | int | float | bool | list[str | int | float | bool]] = {
            "ctx-size": context,
            "parallel": 1,
            **_whole(executable),
        }
        if where == "device":
            options["n-gpu-layers"] = 99
        spec = BackendSpec(
            name="oom",
            engine="llama-server",
            origin="pytest_vram.testing.out_of_memory",
            base=name,
            model=str(model),
            binary=str(_limited(executable, folder) if where == "host" else executable),
            options=options,
            boot_timeout=60.0,
        )
        yield OutOfMemory(spec=spec, bucket=bucket, needs=needs, limit=LIMIT, gpus=gpus)


def weights_as_buffers(executable: Path) -> dict[str, str | bool]:
    """The option by which this build reads weights into buffers and not from a mapped file."""
    known = flags.help_of(executable)
    return {"load-mode": "none"} if known.knows("load-mode") else {"mmap": False}


def _whole(executable: Path) -> dict[str, str | bool]:
    """Nothing mapped, nothing shrunk to fit."""
    options = weights_as_buffers(executable)
    if flags.help_of(executable).knows("fit"):
        options["fit"] = "off"
    return options


def _first_binary() -> Path:
    for place in binary.places():
        if place.usable and place.path is not None:
            return place.path
    raise EngineNotFound("no llama-server was found for the out-of-memory harness: run `vram demo` once")


def _limited(executable: Path, folder: Path) -> Path:
    """A program that is the server under a limit on its data (``ulimit -d`` counts KiB)."""
    wrapper = folder / "llama-server"
    wrapper.write_text(f'#!/bin/sh\nulimit -d {LIMIT // 1024}\nexec {shlex.quote(str(executable))} "$@"\n')
    wrapper.chmod(0o755)
    return wrapper
