"""A scripted backend as a process of its own, and as a table of a config file."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from pytest_vram.errors import BackendError
from pytest_vram.testing.scripted.script import Script, encoded

_MODULE = "pytest_vram.testing.scripted"
#: Seconds that it may take to end by itself.
_PATIENCE = 5.0


class ScriptedBackend(msgspec.Struct, frozen=True, kw_only=True):
    """A scripted backend that runs. :ivar url: its root. :ivar pid: of its process. :ivar process: it."""

    url: str
    pid: int
    process: Any

    def told(self) -> dict[str, Any]:
        """What it did so far: ``asked``, ``unknown``, ``faults``, bytes ``written`` by fault, ``held``, ``seconds``."""
        import httpx

        with httpx.Client(trust_env=False, timeout=10.0) as http:
            answer: dict[str, Any] = http.get(f"{self.url}/scripted").json()
        return answer


@contextlib.contextmanager
def scripted_backend(script: Script | None = None, cases: str = "shipped") -> Iterator[ScriptedBackend]:
    """A scripted backend in a process of its own, ended with the block, or with this process if that is killed.

    :param cases: what it knows, as :func:`pytest_vram.toolcalls.load` takes it.
    :raises BackendError: it did not start; the message has its own words.
    """
    with tempfile.TemporaryDirectory(prefix="vram-scripted-") as name:
        path = Path(name, "script.json")
        path.write_bytes(encoded(script if script is not None else Script()))
        command = [*_command(path, cases), "--port", "0", "--with-parent"]
        with Path(name, "log.txt").open("w+b") as log:
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log)
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                line = process.stdout.readline().decode(errors="replace").strip()
                if not line.startswith("listening on "):
                    process.wait(_PATIENCE)
                    log.seek(0)
                    words = log.read().decode(errors="replace").strip() or "it said nothing"
                    raise BackendError(f"the scripted backend did not start: {words}")
                yield ScriptedBackend(url=line.removeprefix("listening on "), pid=process.pid, process=process)
            finally:
                _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    assert process.stdout is not None
    with contextlib.suppress(OSError):
        process.stdin.close()
    try:
        process.wait(_PATIENCE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    process.stdout.close()


def _command(script: Path, cases: str) -> list[str]:
    return [sys.executable, "-m", _MODULE, "--script", str(script), "--cases", cases]


def backend_table(script: Script, folder: Path, *, name: str = "scripted", cases: str = "shipped", **keys: Any) -> str:
    """A ``[backend.NAME]`` table that starts a scripted backend, for a ``vram.toml`` in ``folder``.

    Its script is written beside it, as ``NAME.json``. :param keys: other keys of the table, tables too, such as
    ``request_timeout=2`` or ``toolcalls={"protocol": "few_shot"}``.
    """
    path = folder / f"{name}.json"
    path.write_bytes(encoded(script))
    values = {
        "engine": "command",
        "argv": [*_command(path, cases), "--port", "{port}"],
        "health": "/health",
        "boot_timeout": 60,
        **keys,
    }
    lines = [f"[backend.{name}]"]
    lines += [f"{key} = {_value(value)}" for key, value in values.items()]
    return "\n".join(lines) + "\n"


def _value(value: Any) -> str:
    """A value as TOML; text of JSON is text of TOML, but for what neither has."""
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{json.dumps(key)} = {_value(one)}" for key, one in value.items()) + " }"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_value, value)) + "]"
    return json.dumps(value)
