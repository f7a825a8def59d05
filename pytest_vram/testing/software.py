"""A GPU in software: llama.cpp's RPC device on loopback.

llama.cpp offloads to it as to a card: layers, KV cache and compute buffers live in a process of their own, whose
memory is the device's memory. It serves one llama-server at a time: a second one waits until the first has ended. The
protocol has no authentication, so it listens on loopback only. Linux only.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import psutil

from pytest_vram.backends import binary, smoke
from pytest_vram.errors import BackendError, EngineNotFound
from pytest_vram.units import mib, parse_size

#: Endpoints of the RPC devices of this machine, by commas, in the order of ``--vram-device=rpc:N``.
VARIABLE = "PYTEST_VRAM_RPC"
START_TIMEOUT = 20.0
_PR_SET_PDEATHSIG = 1
_TRIES = 3
#: What is freed goes back at once: a C library that keeps it for later makes the device smaller for the next client.
_MALLOC = {"MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072", "MALLOC_ARENA_MAX": "1"}


class SoftwareGpu(msgspec.Struct, frozen=True, kw_only=True):
    """One running software GPU.

    :ivar endpoint: ``host:port``, as llama.cpp's ``--rpc`` takes it. :ivar pid: the process that holds its memory.
    :ivar idle_bytes: anonymous memory and swap of that process before anything was put on it.
    :ivar memory: bytes at which its allocations fail, all of its process counted; ``None``: the machine's.
    """

    endpoint: str
    pid: int
    idle_bytes: int
    memory: int | None = None

    def used(self) -> int:
        """Bytes on the device now: anonymous memory and swap of its process beyond idle."""
        return _held(self.pid) - self.idle_bytes


def rpc_server() -> Path:
    """The ``ggml-rpc-server`` beside the llama-server that would be used here: both ends must be of one build.

    :raises EngineNotFound: there is none.
    """
    looked: list[str] = []
    for place in binary.places():
        if place.usable and place.path is not None:
            beside = place.path.resolve().parent
            for name in ("ggml-rpc-server", "rpc-server"):
                if os.access(beside / name, os.X_OK):
                    return beside / name
            looked.append(str(beside))
            break
    for name in ("ggml-rpc-server", "rpc-server"):
        found = shutil.which(name)
        if found is not None:
            return Path(found)
    raise EngineNotFound(
        f"no ggml-rpc-server was found (looked at {', '.join([*looked, 'PATH'])}): run `vram demo` once, which fetches"
        " a build that carries it"
    )


@contextlib.contextmanager
def software_gpu(count: int = 1, *, memory: str | int | None = None) -> Iterator[tuple[SoftwareGpu, ...]]:
    """Start ``count`` software GPUs; inside the block ``--vram-device=rpc`` finds them.

    :param memory: size of each device, such as ``"150MiB"`` or bytes: the data limit of its process
        (``RLIMIT_DATA``), so an allocation beyond it really fails. What the process needs for itself counts too.
    :raises EngineNotFound: no RPC server here. :raises BackendError: one did not start.
    """
    if count < 1:
        raise ValueError("count must be at least 1")
    limit = parse_size(memory) if isinstance(memory, str) else memory
    program = rpc_server()
    # The server computes as well; more threads than cores spin against each other and all but stand still.
    threads = max(1, (os.cpu_count() or 1) // (count + 1))
    before = os.environ.get(VARIABLE)
    with contextlib.ExitStack() as stack:
        devices = tuple(stack.enter_context(_device(program, limit, threads)) for _ in range(count))
        os.environ[VARIABLE] = ",".join(device.endpoint for device in devices)
        try:
            yield devices
        finally:
            if before is None:
                os.environ.pop(VARIABLE, None)
            else:
                os.environ[VARIABLE] = before


@contextlib.contextmanager
def _device(program: Path, limit: int | None, threads: int) -> Iterator[SoftwareGpu]:
    with tempfile.TemporaryFile() as log:
        for attempt in range(1, _TRIES + 1):
            port = smoke.free_port()
            process = subprocess.Popen(
                [str(program), "-d", "CPU", "-H", "127.0.0.1", "-p", str(port), "-t", str(threads)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **_MALLOC},
                start_new_session=True,
                preexec_fn=_before_exec(limit),
            )
            try:
                if _listens(process, port):
                    yield SoftwareGpu(
                        endpoint=f"127.0.0.1:{port}",
                        pid=process.pid,
                        idle_bytes=_held(process.pid),
                        memory=limit,
                    )
                    return
                code = process.poll()
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            if attempt == _TRIES or code is None:
                log.seek(0)
                said = " ".join(log.read().decode("utf-8", "replace").split())[-300:]
                size = f" with {mib(limit)} of memory" if limit is not None else ""
                raise BackendError(
                    f"{program} did not start{size} ({smoke.in_words(code)}); it said: {said or 'nothing'}"
                )


def _before_exec(limit: int | None) -> Callable[[], None]:
    """What the child does before it becomes the server: die with its parent, and keep to its limit."""
    import resource

    libc = ctypes.CDLL(None, use_errno=True)
    parent = os.getpid()

    def prepare() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it died in between, and the signal was missed
            os._exit(1)
        if limit is not None:
            resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))

    return prepare


def _listens(process: subprocess.Popen[bytes], port: int) -> bool:
    """Wait until the process listens on this port; false where it died or took too long."""
    deadline = time.monotonic() + START_TIMEOUT
    while process.poll() is None and time.monotonic() < deadline:
        for connection in psutil.net_connections("tcp"):
            listens = connection.status == psutil.CONN_LISTEN and connection.pid == process.pid
            if listens and tuple(connection.laddr)[1:2] == (port,):
                return True
        time.sleep(0.01)
    return False


def _held(pid: int) -> int:
    """``RssAnon`` + ``VmSwap`` of a process, in bytes.

    :raises BackendError: it is gone.
    """
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace")
    except OSError:
        raise BackendError(f"the software GPU (process {pid}) is gone") from None
    figures = dict(re.findall(r"^(RssAnon|VmSwap):\s+(\d+) kB", status, re.MULTILINE))
    if "RssAnon" not in figures:
        raise BackendError(f"the software GPU (process {pid}) is gone")
    return sum(int(value) * 1024 for value in figures.values())
