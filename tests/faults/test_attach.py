"""Attaching to what already runs: its memory, or no verdict."""

from __future__ import annotations

import http.server
import json
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from tests.conftest import Inner

SERVER = """
import http.server, sys

block = bytearray(100_000_000)
block[::4096] = b"x" * len(block[::4096])

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, *args):
        pass

server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
print(server.server_address[1], flush=True)
server.serve_forever()
"""


@pytest.fixture
def daemon() -> Iterator[tuple[int, int]]:
    """A server of its own that holds 100 MB: its PID and port."""
    process = subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    yield process.pid, int(process.stdout.readline())
    process.kill()
    process.wait()
    process.stdout.close()


def spec(pytester: pytest.Pytester, **keys: object) -> None:
    """Write the spec file of the attached backend and a test that uses it."""
    lines = "\n".join(f"{key} = {json.dumps(value)}" for key, value in keys.items())
    pytester.path.joinpath("vram.toml").write_text(f"[backend.daemon]\nengine = 'attach'\nhealth = '/'\n{lines}\n")
    pytester.makepyfile("def test_it(vram_backend): pass\n")


def test_an_attached_server_is_measured_and_lives_on(
    pytester: pytest.Pytester, inner: Inner, daemon: tuple[int, int]
) -> None:
    """Its 100 MB count, and the end of the run is not its end."""
    pid, port = daemon
    spec(pytester, url=f"http://127.0.0.1:{port}", pid=pid)
    inner("--vram-device=cpu", "--vram-budget=1GB").assert_outcomes(passed=1)
    inner("--vram-device=cpu", "--vram-budget=80MB").assert_outcomes(failed=1)
    assert subprocess.run(["kill", "-0", str(pid)], check=False).returncode == 0


def test_a_process_that_does_not_answer_gives_no_verdict(
    pytester: pytest.Pytester, inner: Inner, daemon: tuple[int, int]
) -> None:
    """The memory of a stranger beside the address of another server is not judged: inconclusive, with both named."""
    _, port = daemon
    sleeper = subprocess.Popen(["sleep", "60"])
    try:
        spec(pytester, url=f"http://127.0.0.1:{port}", pid=sleeper.pid)
        result = inner("--vram-device=cpu", "--vram-budget=1GB", "--vram-report=out.json")
    finally:
        sleeper.kill()
        sleeper.wait()
    (test,) = json.loads((pytester.path / "out.json").read_text())["tests"]
    assert test["outcome"] == "inconclusive"
    text = " ".join(result.stdout.str().split())
    assert "none of those that are measured" in text


def test_an_address_that_refuses_is_given_up_soon(pytester: pytest.Pytester, inner: Inner) -> None:
    """What already runs is not waited for: one message with the address, within seconds."""
    with http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler) as other:
        port = other.server_address[1]
    sleeper = subprocess.Popen(["sleep", "60"])
    done = threading.Event()
    try:
        spec(pytester, url=f"http://127.0.0.1:{port}", pid=sleeper.pid, boot_timeout=60)
        timer = threading.Timer(40, done.set)
        timer.start()
        result = inner("--vram-device=cpu", "--vram-budget=1GB")
        timer.cancel()
    finally:
        sleeper.kill()
        sleeper.wait()
    assert not done.is_set()
    result.assert_outcomes(errors=1)
    assert str(port) in result.stdout.str()


@pytest.mark.parametrize("process", ["no-such-program-runs-here", "a\u00e9b"])
def test_no_such_process(pytester: pytest.Pytester, inner: Inner, daemon: tuple[int, int], process: str) -> None:
    """The message names what was looked for."""
    _, port = daemon
    spec(pytester, url=f"http://127.0.0.1:{port}", process=process)
    result = inner("--vram-device=cpu", "--vram-budget=1GB")
    result.assert_outcomes(errors=1)
    assert process in result.stdout.str()
