"""Trouble with the server: one clear message, the test is an error, the next test gets a fresh server, nothing is left."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

import gguf  # noqa: F401  (loaded before pytester's snapshot of modules: numpy cannot be loaded twice)
import pexpect
import pytest

from pytest_vram.backends import binary
from pytest_vram.testing import out_of_memory, write_llama
from tests.conftest import Inner

pytestmark = pytest.mark.engine

TWO = """
def test_first(vram_client):
    assert vram_client.complete("a b", max_tokens=2).tokens_out

def test_second(vram_client):
    assert vram_client.complete("a b", max_tokens=2).tokens_out
"""


def server() -> str:
    """The llama-server of this machine."""
    return str(next(place.path for place in binary.places() if place.usable and place.path))


@pytest.fixture
def model(pytester: pytest.Pytester) -> Path:
    """A tiny model."""
    path = pytester.path / "tiny.gguf"
    write_llama(path)
    return path


def spec(pytester: pytest.Pytester, *, options: str = "", **keys: object) -> None:
    """Write the spec file of one backend."""
    table = {"engine": "llama-server", "boot_timeout": 20, **keys}
    lines = "\n".join(f"{key} = {json.dumps(value)}" for key, value in table.items())
    text = f"[backend.x]\n{lines}\n[backend.x.options]\nctx-size = 512\nparallel = 1\n{options}\n"
    pytester.path.joinpath("vram.toml").write_text(text)


def outcome(pytester: pytest.Pytester, inner: Inner, *arguments: str, test: str = TWO) -> tuple[pytest.RunResult, str]:
    """Run the two tests; the result and its text without line breaks."""
    pytester.makepyfile(test)
    result = inner("--vram-device=cpu", "--vram-budget=4GB", "--vram-report=out.json", *arguments)
    return result, " ".join(result.stdout.str().split())


def records(pytester: pytest.Pytester) -> list[dict[str, Any]]:
    """The test records of the report."""
    found: list[dict[str, Any]] = json.loads((pytester.path / "out.json").read_text())["tests"]
    return found


def journal(pytester: pytest.Pytester) -> list[dict[str, Any]]:
    """The lines of the journal."""
    (path,) = (pytester.path / ".vram" / "runs").glob("*/journal.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_no_binary(pytester: pytest.Pytester, inner: Inner, model: Path) -> None:
    """The message names the path from the spec and the ways on."""
    spec(pytester, model=str(model), binary="/nowhere/llama-server")
    result, text = outcome(pytester, inner)
    result.assert_outcomes(errors=2)
    assert "/nowhere/llama-server" in text
    assert "backend.x" in text or "vram.toml" in text


def test_no_model(pytester: pytest.Pytester, inner: Inner) -> None:
    """The message names the model's path."""
    spec(pytester, model="/nowhere/model.gguf")
    result, text = outcome(pytester, inner)
    result.assert_outcomes(errors=2)
    assert "/nowhere/model.gguf" in text


def test_not_a_model(pytester: pytest.Pytester, inner: Inner) -> None:
    """A file of another kind is recognised before anything is started."""
    path = pytester.path / "model.gguf"
    path.write_bytes(b"PK\x03\x04 not a model")
    spec(pytester, model=str(path))
    result, text = outcome(pytester, inner)
    result.assert_outcomes(errors=2)
    assert "not a GGUF" in text


def test_a_torn_model(pytester: pytest.Pytester, inner: Inner, model: Path) -> None:
    """A model cut short is refused by the engine; its own sentence and its log's name are in the message."""
    model.write_bytes(model.read_bytes()[:200_000])
    spec(pytester, model=str(model))
    result, text = outcome(pytester, inner)
    result.assert_outcomes(errors=2)
    assert "x.1.log" in text
    assert re.search(r"failed to load|tensor|corrupt|not within", text)


def test_an_unknown_option(pytester: pytest.Pytester, inner: Inner, model: Path) -> None:
    """An option that the binary does not know is refused with the nearest it knows, before a start."""
    spec(pytester, model=str(model), options="ctx-sise = 512")
    result, text = outcome(pytester, inner)
    result.assert_outcomes(errors=2)
    assert "ctx-sise" in text
    assert "ctx-size" in text


def test_a_port_of_a_stranger(pytester: pytest.Pytester, inner: Inner, model: Path) -> None:
    """A fixed port that another program holds ends in a message that names the port."""
    with socket.socket() as stranger:
        stranger.bind(("127.0.0.1", 0))
        stranger.listen()
        port = stranger.getsockname()[1]
        spec(pytester, model=str(model), options=f"port = {port}")
        result, text = outcome(pytester, inner)
    result.assert_outcomes(errors=2)
    assert str(port) in text


def test_out_of_memory_during_load(pytester: pytest.Pytester, inner: Inner) -> None:
    """A device that really is too small: the message says out of memory and which part did not fit."""
    with out_of_memory(where="device", bucket="kv") as failing:
        spec(
            pytester,
            model=failing.spec.model,
            binary=failing.spec.binary,
            options="\n".join(f"{k} = {json.dumps(v)}" for k, v in failing.spec.options.items() if k not in ("ctx-size", "parallel")),
        )  # fmt: skip
        path = pytester.path / "vram.toml"
        path.write_text(path.read_text().replace("ctx-size = 512", f"ctx-size = {failing.spec.options['ctx-size']}"))
        pytester.makepyfile(TWO)
        result = inner("--vram-device=rpc:0", "--vram-budget=4GB")
    result.assert_outcomes(errors=2)
    text = " ".join(result.stdout.str().split())
    assert "Out of memory: 256.0 MiB of kv could not be allocated on gpu0" in text


def test_a_hang_in_load(pytester: pytest.Pytester, inner: Inner, model: Path) -> None:
    """A server that never gets ready is given up after its boot timeout, with the phase it hung in."""
    wrapper = pytester.path / "llama-server"
    wrapper.write_text(
        f'#!/bin/sh\ncase "$1" in --help|--version) exec {shlex.quote(server())} "$@";; esac\n'
        "echo '0.00.001.000 I load_tensors: loading model tensors, this can take a while...'\nsleep 600 & wait\n"
    )
    wrapper.chmod(0o755)
    spec(pytester, model=str(model), binary=str(wrapper), boot_timeout=2)
    started = time.monotonic()
    result, text = outcome(pytester, inner)
    assert time.monotonic() - started < 60
    result.assert_outcomes(errors=2)
    assert "2 s" in text or "2.0 s" in text
    assert "weights" in text


def test_a_start_that_fails_again_and_again_is_given_up(pytester: pytest.Pytester, inner: Inner, model: Path) -> None:
    """After three failed starts in a row the other tests get the last message at once, and no further server."""
    model.write_bytes(model.read_bytes()[:200_000])
    spec(pytester, model=str(model))
    test = "import pytest\n\n@pytest.mark.parametrize('n', range(6))\ndef test_it(n, vram_client): pass\n"
    result, text = outcome(pytester, inner, test=test)
    result.assert_outcomes(errors=6)
    assert text.count("Not tried again after 3 failed starts in this run.") >= 3
    states = [line["state"] for line in journal(pytester) if line["kind"] == "backend"]
    assert states.count("starting") == 3


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSEGV])
def test_death_in_a_request(pytester: pytest.Pytester, inner: Inner, model: Path, how: signal.Signals) -> None:
    """The test is an error that says how the server died; the next test has a fresh one, and the journal says so."""
    spec(pytester, model=str(model), options="context-shift = true")
    test = f"""
import os, threading, time

def test_first(vram_backend, vram_client):
    threading.Timer(0.3, os.kill, (vram_backend.pid, {int(how)})).start()
    vram_client.complete("a b " * 20, max_tokens=1000000, ignore_eos=True)

def test_second(vram_backend, vram_client):
    assert vram_backend.generation == 2
    assert vram_client.complete("a b", max_tokens=2).tokens_out
"""
    result, text = outcome(pytester, inner, "-rE", test=test)
    result.assert_outcomes(errors=1, passed=1)
    assert how.name in text
    assert [record["outcome"] for record in records(pytester)] == ["error", "passed"]
    states = [(line["state"], line.get("generation")) for line in journal(pytester) if line["kind"] == "backend"]
    assert ("died", 1) in states
    assert ("ready", 2) in states


def test_a_server_that_hangs_is_replaced(pytester: pytest.Pytester, inner: Inner, model: Path) -> None:
    """A stopped server makes its request time out; the next test gets a fresh one and does not wait again."""
    spec(pytester, model=str(model), request_timeout=3)
    test = """
import os, signal

def test_first(vram_backend, vram_client):
    os.kill(vram_backend.pid, signal.SIGSTOP)
    vram_client.complete("a b", max_tokens=2)

def test_second(vram_backend, vram_client):
    assert vram_backend.generation == 2
    assert vram_client.complete("a b", max_tokens=2).tokens_out
"""
    result, text = outcome(pytester, inner, test=test)
    result.assert_outcomes(errors=1, passed=1)
    assert "3 s" in text


def test_death_between_tests(pytester: pytest.Pytester, inner: Inner, model: Path) -> None:
    """A server that dies while nobody uses it is simply started again."""
    spec(pytester, model=str(model))
    test = """
import os, signal, time
import pytest

pid = []

def test_first(vram_backend, vram_client):
    vram_client.complete("a b", max_tokens=2)
    pid.append(vram_backend.pid)

def test_between():
    os.kill(pid[0], signal.SIGKILL)
    while os.path.exists(f"/proc/{pid[0]}/exe"):
        time.sleep(0.01)

def test_second(vram_backend, vram_client):
    assert vram_backend.pid != pid[0]
    vram_client.complete("a b", max_tokens=2)
"""
    result, _ = outcome(pytester, inner, test=test)
    result.assert_outcomes(passed=3)


def test_a_silent_death_fails_no_test_in_silence(pytester: pytest.Pytester, inner: Inner, model: Path) -> None:
    """A test that passes although its server died in it is an error, not a pass."""
    spec(pytester, model=str(model))
    test = """
import os, signal, time

def test_first(vram_backend):
    os.kill(vram_backend.pid, signal.SIGKILL)
    while os.path.exists(f"/proc/{vram_backend.pid}/exe"):
        time.sleep(0.01)
    time.sleep(0.1)
"""
    result, text = outcome(pytester, inner, test=test)
    assert result.ret == 1
    assert "SIGKILL" in text
    assert [record["outcome"] for record in records(pytester)] == ["error"]


def test_a_command_that_is_not_there(pytester: pytest.Pytester, inner: Inner) -> None:
    """The generic engine says which program it could not start."""
    pytester.path.joinpath("vram.toml").write_text(
        "[backend.x]\nengine='command'\nargv=['no-such-program-here','--port','{port}']\nhealth='/health'\n"
    )
    result, text = outcome(pytester, inner)
    result.assert_outcomes(errors=2)
    assert "no-such-program-here" in text


def test_a_restart_is_a_new_generation(pytester: pytest.Pytester, inner: Inner, model: Path) -> None:
    """restart() gives another process, which answers, and whose log is another file."""
    spec(pytester, model=str(model))
    test = """
def test_it(vram_backend, vram_client):
    first, log = vram_backend.pid, vram_backend.log
    vram_backend.restart()
    assert vram_backend.pid != first
    assert vram_backend.generation == 2
    assert vram_backend.log != log
    assert vram_client.complete("a b", max_tokens=2).tokens_out
"""
    result, _ = outcome(pytester, inner, test=test)
    result.assert_outcomes(passed=1)


def test_pdb_keeps_the_server(pytester: pytest.Pytester, inner: Inner, model: Path) -> None:
    """At the prompt of --pdb the server of the failed test still answers."""
    spec(pytester, model=str(model))
    pytester.makepyfile(
        """
        def test_it(vram_backend, vram_client):
            assert vram_client.complete("a b", max_tokens=2).text is None
        """
    )
    command = f"{sys.executable} -m pytest --pdb --vram-device=cpu -p no:cacheprovider"
    child = pexpect.spawn(command, cwd=str(pytester.path), timeout=60, encoding="utf-8", env=dict(os.environ))
    child.expect(r"\(Pdb\)")
    child.sendline("vram_client.complete('c d', max_tokens=3).tokens_out + 1000")
    child.expect("1003")
    child.sendline("q")
    child.expect(pexpect.EOF)
