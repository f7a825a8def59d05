"""Whether a llama-server build runs on this machine: a real boot and four tokens, asked once per build and CPU.

A prebuilt binary may use instructions that this CPU lacks and dies of them only while it computes, so neither
``--version`` nor ``--help`` proves anything. The result is kept in the cache folder under the binary's path, size and
time and the CPU's identity: another CPU that shares the folder asks anew.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import json
import os
import platform
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

SMOKE_TIMEOUT = 30.0
_TOKENS = 4


class Smoke(msgspec.Struct, frozen=True, kw_only=True):
    """Result of one smoke test. :ivar reason: why it failed, one clause; empty where it did not."""

    ok: bool
    reason: str
    binary: str
    cpu: str
    seconds: float


def cpu_identity() -> str:
    """The CPU's model and a hash of its instruction sets; equal on machines that run the same builds."""
    model, flags = "", ""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() in ("model name", "CPU part") and not model:
                model = value.strip()
            elif key.strip() in ("flags", "Features") and not flags:
                flags = " ".join(sorted(value.split()))
            elif not line and model and flags:
                break
    model = model or platform.processor() or platform.machine()
    return f"{model} {hashlib.sha256(flags.encode()).hexdigest()[:12]}"


def in_words(code: int | None) -> str:
    """An exit code of :mod:`subprocess` as a clause, such as ``killed by SIGILL: …`` or ``exit code 1``."""
    if code is None:
        return "still running"
    if code >= 0:
        return f"exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    meaning = {
        "SIGILL": ": this build uses CPU instructions that this machine lacks",
        "SIGKILL": ": killed from outside, perhaps by the kernel's out-of-memory killer",
        "SIGSEGV": ": a crash",
        "SIGABRT": ": it gave up",
    }.get(name, "")
    return f"killed by {name}{meaning}"


def _record(folder: Path, binary: Path) -> Path | None:
    try:
        real = binary.resolve(strict=True)
        status = real.stat()
    except OSError:
        return None
    identity = f"{real}|{status.st_size}|{status.st_mtime_ns}|{cpu_identity()}"
    return folder / f"{hashlib.sha256(identity.encode()).hexdigest()[:16]}.json"


def known(folder: Path, binary: Path) -> Smoke | None:
    """The kept result for this binary on this CPU, or ``None`` where it was never tried."""
    path = _record(folder, binary)
    if path is None:
        return None
    try:
        return msgspec.json.decode(path.read_bytes(), type=Smoke)
    except (OSError, msgspec.MsgspecError):
        return None


def attempt(folder: Path, binary: Path, model: Path, *, timeout: float = SMOKE_TIMEOUT) -> Smoke:
    """Boot ``binary`` with ``model``, generate four tokens, stop it, and keep the result in ``folder``.

    A timeout is not kept: it may be the machine's load.
    """
    started = time.monotonic()
    reason, lasting = _try(binary, model, timeout)
    result = Smoke(
        ok=not reason,
        reason=reason,
        binary=str(binary),
        cpu=cpu_identity(),
        seconds=round(time.monotonic() - started, 2),
    )
    path = _record(folder, binary)
    if path is not None and lasting:
        folder.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}")
        temporary.write_bytes(msgspec.json.format(msgspec.json.encode(result)) + b"\n")
        temporary.replace(path)
    return result


def _try(binary: Path, model: Path, timeout: float) -> tuple[str, bool]:
    """The reason of a failure (empty: none), and whether it would be the same next time."""
    deadline = time.monotonic() + timeout
    port = free_port()
    argv = [str(binary), "--model", str(model), "--host", "127.0.0.1", "--port", str(port)]
    argv += ["--ctx-size", "256", "--parallel", "1"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("LLAMA_")}
    with tempfile.TemporaryFile() as log:
        try:
            process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
        except OSError as error:
            return f"it cannot be started: {error.strerror}", True
        try:
            answered = any(_generates(port, deadline) for _ in _until(process, deadline))
        finally:
            code = process.poll()
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if answered:
            return "", True
        log.seek(0)
        lines = log.read()[-4096:].decode("utf-8", "replace").split("\n")
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    said = f"; its last line: {last[:200]}" if last else ""
    if code is None:
        return f"it did not answer within {timeout:g} s{said}", False
    # SIGKILL and SIGTERM come from outside and say nothing about the build.
    return f"{in_words(code)}{said}", code not in (-signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT)


def _until(process: subprocess.Popen[bytes], deadline: float) -> Iterator[None]:
    while process.poll() is None and time.monotonic() < deadline:
        yield
        time.sleep(0.05)


def _generates(port: int, deadline: float) -> bool:
    body = json.dumps({"prompt": "Once upon a time", "n_predict": _TOKENS, "cache_prompt": False})
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=max(0.1, deadline - time.monotonic()))
    try:
        connection.request("POST", "/completion", body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        return answer.status == 200 and "content" in json.loads(answer.read())
    except (OSError, http.client.HTTPException, ValueError):
        return False
    finally:
        connection.close()


def free_port() -> int:
    """A TCP port of the loopback interface that nobody listens on at this moment."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
