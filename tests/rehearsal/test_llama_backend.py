"""A real llama-server through plan, keeper and client: it serves, it restarts, and its failures are said plainly."""

from __future__ import annotations

import itertools
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import psutil
import pytest

from pytest_vram.errors import BackendDied, BootFailed, RequestFailed, RequestTimeout
from pytest_vram.readings import Reading
from pytest_vram.testing import Shape, out_of_memory, write_llama

pytestmark = pytest.mark.engine

Start = Callable[..., Any]


@pytest.fixture
def tiny(tmp_path: Path) -> Shape:
    """A dense model of 3 MB in the test's folder."""
    return write_llama(tmp_path / "tiny.gguf")


@pytest.fixture
def run(rehearse: Start, spec: Start, tiny: Shape) -> Any:
    """A run on host memory with the tiny model."""
    return rehearse(spec("tiny.gguf", options={"ctx-size": 512, "parallel": 1, "cache-ram": 0}))


def test_backend_serves_and_explains_itself(run: Any, tiny: Shape) -> None:
    """One acquired backend chats, streams, tokenizes and states its context; its ledger's sum is the measured total."""
    backend = run.pool.acquire(run.pool.spec())
    assert run.pool.acquire(run.pool.spec()) is backend
    reply = backend.client.chat("hello", max_tokens=5)
    assert (reply.tokens_out, len(reply.text), reply.finish_reason) == (5, 5, "length")
    streamed = backend.client.complete("x" * 40, max_tokens=6, stream=True)
    assert (streamed.tokens_in, streamed.tokens_out) == (40, 6)
    assert streamed.record.rate_from == "server"
    assert streamed.record.time_to_first_token is not None
    assert backend.client.tokenize("abc") == [97, 98, 99]
    properties = backend.properties()
    assert (properties.context, properties.slots) == (512, 1)
    assert backend.boot.facts["context"] == backend.asked["context"]
    peak = reply.record.peak["host"]
    assert isinstance(peak, Reading)
    assert peak.bytes > 4 << 20
    ledger = backend.ledger
    assert ledger.buckets()["kv"] == {"host": tiny.kv_bytes(512)}
    assert ledger.total()["host"] == ledger.measured["host"].bytes
    assert backend.missing("layers") == ["layers"]
    assert [record.id for record in backend.take_requests()] == [reply.record.id, streamed.record.id]
    assert backend.take_requests() == []


def test_stranger_without_the_key_is_refused(run: Any) -> None:
    """The server asks for a random key that is not in its arguments."""
    backend = run.pool.acquire(run.pool.spec())
    assert backend.api_key
    command = Path(f"/proc/{backend.pid}/cmdline").read_text()
    assert backend.api_key not in command
    client = run.pool.client_for(backend)
    backend.target.api_key = "wrong"
    with pytest.raises(RequestFailed, match=r"401.*API key was refused"):
        client.chat("hi", max_tokens=1)


def test_users_shell_does_not_change_the_deployment(
    monkeypatch: pytest.MonkeyPatch, rehearse: Start, spec: Start, tiny: Shape
) -> None:
    """A setting in the environment is kept from the server and named; the same variable in the spec's `env` counts."""
    monkeypatch.setenv("LLAMA_ARG_UBATCH", "32")
    monkeypatch.setenv("LLAMA_API_KEY", "of-the-user")
    run = rehearse(spec("tiny.gguf", options={"ctx-size": 512}))
    backend = run.pool.acquire(run.pool.spec())
    assert backend.boot.facts["ubatch"] == 512
    assert backend.kept_from_it == ["LLAMA_ARG_UBATCH"]
    assert "LLAMA_ARG_UBATCH" in backend.boot.warnings[0]
    assert backend.api_key != "of-the-user"
    meant = run.pool.acquire(run.pool.spec(env={"LLAMA_ARG_UBATCH": "64"}))
    assert meant.boot.facts["ubatch"] == 64
    assert meant.kept_from_it == []


def test_prompt_over_the_context_is_refused_in_the_servers_words(run: Any) -> None:
    """A prompt longer than the context is an error with the server's own sentence, never a silent cut."""
    backend = run.pool.acquire(run.pool.spec())
    with pytest.raises(RequestFailed, match="exceeds the available context size") as caught:
        backend.client.complete("x" * 600, max_tokens=1)
    assert caught.value.status == 400


def test_restart_and_death_lead_to_fresh_generations(run: Any) -> None:
    """A restart changes the backend in place; a killed server is told apart from an error and is started anew."""
    backend = run.pool.acquire(run.pool.spec())
    first = backend.pid
    backend.restart()
    assert backend.pid != first
    assert backend.generation == 2
    assert backend.client.chat("hi", max_tokens=2).tokens_out == 2
    os.kill(backend.pid, signal.SIGKILL)
    with pytest.raises(BackendDied, match="SIGKILL"):
        backend.client.chat("hi", max_tokens=2)
    with pytest.raises(BackendDied, match="SIGKILL"):
        backend.client.get("/props")
    again = run.pool.acquire(run.pool.spec())
    assert again is backend
    assert again.generation == 3
    assert again.client.chat("hi", max_tokens=2).tokens_out == 2


def test_server_that_hangs_or_dies_within_a_request_is_told_apart(run: Any) -> None:
    """A stopped server is a timeout and serves on afterwards; one killed in the middle of a request died."""
    backend = run.pool.acquire(run.pool.spec(request_timeout=0.5))
    os.kill(backend.pid, signal.SIGSTOP)
    try:
        with pytest.raises(RequestTimeout, match=r"within 0\.5 s"):
            backend.client.chat("hi", max_tokens=2)
    finally:
        os.kill(backend.pid, signal.SIGCONT)
    backend.target.timeout = 60.0
    assert backend.client.chat("hi", max_tokens=2).tokens_out == 2
    os.kill(backend.pid, signal.SIGSTOP)
    errors: list[BaseException] = []

    def ask() -> None:
        try:
            backend.client.chat("hi", max_tokens=2)
        except BackendDied as error:
            errors.append(error)

    asking = threading.Thread(target=ask)
    asking.start()
    while not _sent(backend.url):
        time.sleep(0.01)
    os.kill(backend.pid, signal.SIGKILL)
    asking.join(20)
    assert "SIGKILL" in str(errors[0])
    assert backend.client.requests[-1].result == "error"


def _sent(url: str) -> bool:
    """Whether this process has a connection to the server."""
    port = int(url.rpartition(":")[2])
    connections = psutil.Process().net_connections("tcp")
    return any(one.status == psutil.CONN_ESTABLISHED and tuple(one.raddr)[1:2] == (port,) for one in connections)


def test_changed_option_is_another_server(run: Any) -> None:
    """An override makes a server of its own, whose log shows the new setting."""
    backend = run.pool.acquire(run.pool.spec())
    other = run.pool.acquire(run.pool.spec(ctx_size=1024))
    assert other.pid != backend.pid
    assert other.boot.facts["context"] == 1024
    assert other.properties().context == 1024


def test_async_tasks_take_turns(run: Any) -> None:
    """Several tasks of an event loop are served one after another."""
    backend = run.pool.acquire(run.pool.spec())
    client = backend.async_client

    async def ask() -> None:
        async with anyio.create_task_group() as tasks:
            for _ in range(4):
                tasks.start_soon(lambda: client.chat("hi", max_tokens=8))

    anyio.run(ask)
    spans = sorted((record.t, record.t + round(record.latency * 1e9)) for record in client.requests)
    assert len(spans) == 4
    assert all(ended <= began for (_, ended), (began, _) in itertools.pairwise(spans))


def test_cancelled_tasks_leave_the_backend_free(run: Any) -> None:
    """Tasks cancelled in their request, and in the queue for one, give their turns back to the keeper."""
    backend = run.pool.acquire(run.pool.spec())
    client = backend.async_client
    os.kill(backend.pid, signal.SIGSTOP)

    async def ask() -> None:
        async with anyio.create_task_group() as tasks:
            for _ in range(3):
                tasks.start_soon(lambda: client.chat("hi", max_tokens=8))
            while not _sent(backend.url):
                await anyio.sleep(0.01)
            tasks.cancel_scope.cancel()

    try:
        anyio.run(ask)
    finally:
        os.kill(backend.pid, signal.SIGCONT)
    backend.target.timeout = 20.0
    assert backend.client.chat("hi", max_tokens=2).tokens_out == 2


def test_setting_that_kills_the_boot_is_said(run: Any) -> None:
    """A server that refuses its settings is BootFailed with its own words."""
    with pytest.raises(BootFailed, match=r"unsupported|invalid|error"):
        run.pool.acquire(run.pool.spec(cache_type_k="q9_9"))
    assert run.pool.acquire(run.pool.spec()).client.chat("hi", max_tokens=1).tokens_out == 1


@pytest.mark.parametrize("bucket", ["kv", "weights"])
@pytest.mark.parametrize("where", ["device", "host"])
def test_real_out_of_memory_names_the_bucket(rehearse: Start, where: Any, bucket: Any) -> None:
    """A boot that really runs out of memory is BootFailed and says so, on a device and on the host."""
    with out_of_memory(where=where, bucket=bucket) as oom:
        rpc = [gpu.endpoint for gpu in oom.gpus]
        said = r"(?i)out of memory|insufficient memory|failed to allocate"
        if bucket == "kv":
            # The engine goes on without its cache and crashes, at times before its log's thread has written why.
            said += r"|SIGSEGV.*in phase 'kv'"
        for _ in range(5):
            run = rehearse(oom.spec, kind="rpc" if rpc else "cpu", rpc=rpc)
            with pytest.raises(BootFailed) as caught:
                run.pool.acquire(run.pool.spec())
            run.close()
            text = str(caught.value)
            # Once in hundreds of boots it has not even written that the weights were loaded.
            if bucket != "kv" or "SIGSEGV while it started, in phase 'weights'" not in text:
                break
        assert re.search(said, text), text
