"""The clients against a small scripted server and a scripted keeper."""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import anyio
import pytest

from pytest_vram.backends import client as client_module
from pytest_vram.backends import reply as replies
from pytest_vram.backends.client import AsyncVramClient, Target, VramClient
from pytest_vram.backends.record import RequestRecord
from pytest_vram.errors import BackendDied, RequestFailed, RequestTimeout
from pytest_vram.keeper.messages import Closed, EndTurn, Granted, Reply, Request, Turn
from pytest_vram.readings import Reading, Unmeasurable

CHAT = {
    "object": "chat.completion",
    "model": "/models/tiny.gguf",
    "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "hello"}}],
    "usage": {"prompt_tokens": 7, "completion_tokens": 3},
    "timings": {"predicted_per_second": 50.0, "prompt_per_second": 700.0},
}
TEXT = {"object": "text_completion", "choices": [{"index": 0, "text": "abc", "finish_reason": "length"}]}


def answer(status: int, body: object, kind: str = "application/json") -> Callable[[BaseHTTPRequestHandler], None]:
    """A handler that sends this and closes."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()

    def handle(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        handler.send_header("Content-Type", kind)
        handler.send_header("Content-Length", str(len(data)))
        handler.end_headers()
        handler.wfile.write(data)

    return handle


def events(*pieces: object, done: bool = True) -> Callable[[BaseHTTPRequestHandler], None]:
    """A handler that streams these pieces."""
    lines = [": a comment", *(f"data: {json.dumps(piece)}" for piece in pieces), *(["data: [DONE]"] if done else [])]
    return answer(200, "".join(f"{line}\r\n\r\n" for line in lines).encode(), "text/event-stream; charset=utf-8")


def drop(handler: BaseHTTPRequestHandler) -> None:
    """Close the connection without an answer."""
    handler.connection.shutdown(socket.SHUT_RDWR)
    handler.close_connection = True


class Server:
    """Answers each path as it was told, and remembers what it was sent."""

    def __init__(self) -> None:
        self.script: dict[str, Callable[[BaseHTTPRequestHandler], None]] = {
            "/v1/chat/completions": answer(200, CHAT),
            "/v1/completions": answer(200, TEXT),
            "/tokenize": answer(200, {"tokens": [1, 2]}),
            "/props": answer(200, {"total_slots": 1}),
        }
        self.seen: list[tuple[str, dict[str, Any], str | None]] = []
        self.release = threading.Event()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                body = json.loads(self.rfile.read(length) or b"null")
                outer.seen.append((self.path, body, self.headers.get("Authorization")))
                outer.script.get(self.path, answer(404, {"error": {"message": "File Not Found"}}))(self)

            do_GET = do_POST  # noqa: N815

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        self.thread = threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.01})
        self.thread.start()

    def hang(self, handler: BaseHTTPRequestHandler) -> None:
        """Do not answer until the test is over."""
        self.release.wait(30)

    def close(self) -> None:
        self.release.set()
        self.http.shutdown()
        self.http.server_close()
        self.thread.join()


class Keeper:
    """Grants turns one at a time over all of its connections, as the real one does."""

    def __init__(self, closed: Closed | None = None) -> None:
        self.closed = closed or Closed(t0=0, t1=1)
        self.asked: list[Request] = []
        self.open = 0
        self._turn = threading.Lock()

    def connect(self, name: str) -> Link:
        self.open += 1
        return Link(self)


class Link:
    def __init__(self, keeper: Keeper) -> None:
        self._keeper = keeper
        self._holds = False
        self._gone = threading.Event()

    def call(self, request: Request, timeout: float | None = None) -> Reply:
        self._keeper.asked.append(request)
        if isinstance(request, Turn):
            while request.serial and not self._keeper._turn.acquire(timeout=0.01):
                if self._gone.is_set():
                    raise BackendDied("closed while it waited")
            self._holds = request.serial
            if self._gone.is_set():
                self._release()
            return Granted(window=1, waited=0.25)
        assert isinstance(request, EndTurn)
        self._release()
        return self._keeper.closed

    def _release(self) -> None:
        if self._holds:
            self._holds = False
            self._keeper._turn.release()

    def close(self) -> None:
        self._gone.set()
        self._keeper.open -= 1
        self._release()


@pytest.fixture
def server() -> Iterator[Server]:
    """The scripted server."""
    made = Server()
    yield made
    made.close()


@pytest.fixture
def target(server: Server) -> Target:
    """The scripted server as a client's target."""
    return Target(name="agent", url=server.url, key="k", api_key="sekrit", timeout=20.0, log="/runs/agent.1.log")


def peak(label: str, size: int) -> Closed:
    reading = Reading(bytes=size, source="host-hwm", scope="run", device=label, exact=True)
    return Closed(t0=0, t1=1, run={label: reading})


# ---------------------------------------------------------------- answers


def test_chat_gives_text_counts_rate_and_peak(server: Server, target: Target) -> None:
    """A chat's reply and record carry text, tokens, the server's own rate and the window's peak."""
    keeper = Keeper(peak("host", 1 << 20))
    client = VramClient(target, connect=keeper.connect, window=lambda: 5)
    reply = client.chat("hi", max_tokens=3, temperature=0)
    assert (reply.text, reply.finish_reason, reply.tokens_in, reply.tokens_out) == ("hello", "stop", 7, 3)
    record = reply.record
    assert (record.tokens_per_second, record.rate_from, record.prompt_tokens_per_second) == (50.0, "server", 700.0)
    assert record.result == "ok"
    assert record.waited == 0.25
    assert record.peak == keeper.closed.run
    assert client.requests == [record]
    path, body, key = server.seen[0]
    assert path == "/v1/chat/completions"
    assert body == {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "temperature": 0}
    assert key == "Bearer sekrit"
    turn, end = keeper.asked
    assert isinstance(turn, Turn)
    assert isinstance(end, EndTurn)
    assert (turn.key, turn.serial, turn.parent) == ("k", True, 5)
    assert end.record["tokens_out"] == 3
    assert keeper.open == 0


def test_root_and_v1_addresses_reach_the_same_paths(server: Server, target: Target) -> None:
    """A target that was written with /v1 is asked at the same addresses."""
    target.url += "/v1"
    client = VramClient(target)
    assert client.complete("x").text == "abc"
    assert client.get("/props") == {"total_slots": 1}
    assert client.tokenize("ab") == [1, 2]
    assert [path for path, _, _ in server.seen] == ["/v1/completions", "/props", "/tokenize"]


def test_served_model_is_sent_unless_the_request_names_one(server: Server, target: Target) -> None:
    """The spec's model name goes into each request; a request may carry its own."""
    target.model = "llama3"
    client = VramClient(target)
    client.chat("x")
    client.chat("x", model="other")
    assert [body["model"] for _, body, _ in server.seen] == ["llama3", "other"]


def test_stream_is_put_together_and_its_first_token_timed(server: Server, target: Target) -> None:
    """A streamed answer gives the same reply as a plain one, with the time to the first token."""
    server.script["/v1/chat/completions"] = events(
        {"choices": [{"index": 0, "delta": {"role": "assistant", "content": None}}], "object": "chat.completion.chunk"},
        {"choices": [{"index": 0, "delta": {"content": "Hel"}}]},
        {"choices": [{"index": 0, "delta": {"content": "lo"}}]},
        {"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]},
        {"choices": [], "usage": {"prompt_tokens": 2, "completion_tokens": 2}},
    )
    reply = VramClient(target).chat("hi", stream=True)
    assert reply.text == "Hello"
    assert reply.message == {"role": "assistant", "content": "Hello"}
    assert reply.finish_reason == "length"
    assert (reply.tokens_in, reply.tokens_out) == (2, 2)
    assert reply.record.time_to_first_token is not None
    assert server.seen[0][1]["stream_options"] == {"include_usage": True}


def test_streamed_tool_call_is_joined_by_index(server: Server, target: Target) -> None:
    """The pieces of a tool call become one call with whole arguments."""

    def part(**function: str) -> dict[str, Any]:
        return {"choices": [{"index": 0, "delta": {"tool_calls": [{"index": 0, "function": function}]}}]}

    server.script["/v1/chat/completions"] = events(
        {"choices": [{"index": 0, "delta": {"tool_calls": [{"index": 0, "id": "c1", "function": {"name": "f"}}]}}]},
        part(arguments='{"a"'),
        part(arguments=":1}"),
        {"choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]},
    )
    reply = VramClient(target).chat("hi", stream=True)
    assert reply.text == ""
    assert reply.message["tool_calls"] == [
        {"type": "function", "id": "c1", "function": {"name": "f", "arguments": '{"a":1}'}}
    ]


def test_more_tokens_than_asked_for_are_doubted(
    server: Server, target: Target, caplog: pytest.LogCaptureFixture
) -> None:
    """A count over the request's own limit is absent from reply, record and log line, with the reason."""
    told = {**CHAT, "usage": {"prompt_tokens": -1, "completion_tokens": 1_000_000}, "model": "\x1b[31mred\ud800"}
    server.script["/v1/chat/completions"] = answer(200, told)
    with caplog.at_level(logging.INFO, logger="pytest_vram.requests"):
        reply = VramClient(target).chat("hi", max_tokens=4)
    record = reply.record
    assert (reply.tokens_in, reply.tokens_out, record.tokens_per_second) == (None, None, None)
    assert record.doubt is not None
    assert record.doubt.endswith("the server says 1000000 generated tokens where at most 4 were asked for")
    assert record.model == "red?"
    assert record.doubt in caplog.messages[-1]


# ---------------------------------------------------------------- failures


@pytest.mark.parametrize(
    ("script", "status", "words"),
    [
        (answer(500, {"error": {"message": "Failed to parse tool call"}}), 500, "HTTP 500 to POST /v1/chat/comp"),
        (answer(400, {"error": {"message": "x" * 999}}), 400, "x" * 299 + "…"),
        (answer(401, {"error": {"message": "Invalid API Key"}}), 401, "set `api_key` in [backend.agent]"),
        (answer(302, b""), 302, "without a message; it sends the request elsewhere"),
        (answer(404, b"<html>no</html>", "text/html"), 404, "no such path"),
        (answer(400, {"error": {"message": "model is required"}}), 400, "set `served_model` in [backend.agent]"),
        (answer(200, b"<html>hello</html>", "text/html"), 200, "is not JSON: <html>hello"),
        (answer(200, b""), 200, "it is empty"),
        (answer(200, [1]), 200, "not a JSON object but list"),
        (answer(200, {"choices": []}), 200, "has no choices"),
        (answer(200, {"choices": [{}]}), 200, "has no message"),
        *((answer(200, {"choices": [{"message": one}]}), 200, "has no message") for one in (None, 7, "text", [], True)),
        (events({"choices": [{}]}, {"choices": [{"delta": None}]}), 200, "the answer has no choices"),
        (answer(200, {"error": {"message": "model loading"}}), 200, "model loading"),
        (events({"choices": [{"delta": {"content": "a"}}]}, done=False), 200, "in the middle of the answer"),
        (events({"error": {"message": "context is full"}}), 200, "context is full"),
        (answer(200, b'{"choices":' + b"[" * 100_000), 200, 'nested too deeply to be read: {"choices":[['),
        (answer(500, b'{"error":' + b"[" * 100_000), 500, 'to POST /v1/chat/completions: {"error":[['),
        (events({"choices": [3, {"delta": "x"}, {"delta": {"tool_calls": 5}}]}, done=False), 200, "in the middle of"),
        (answer(500, b'{"error": "\\u001b[31mred\\u0000\\ud800\\nnext"}'), 500, "completions: red?? next"),
        (answer(502, b"\x1b[31mbad\x00 gate\r\nway\xff"), 502, "completions: bad? gate way�"),
    ],
)
def test_answer_that_is_no_completion_is_a_failed_request(
    server: Server, target: Target, script: Callable[[BaseHTTPRequestHandler], None], status: int, words: str
) -> None:
    """Error statuses, foreign content and torn streams raise RequestFailed with the status and the server's words."""
    server.script["/v1/chat/completions"] = script
    keeper = Keeper()
    client = VramClient(target, connect=keeper.connect)
    with pytest.raises(RequestFailed, match="backend 'agent'") as caught:
        client.chat("hi")
    assert words in str(caught.value)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 600
    assert caught.value.status == status
    assert client.requests[0].result == "error"
    assert isinstance(keeper.asked[-1], EndTurn)
    assert keeper.asked[-1].record["error"] == str(caught.value)
    assert keeper.open == 0


def test_answer_without_end_is_not_kept(server: Server, target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that goes on sending is cut off at the largest answer, plain, streamed, or of a question."""
    monkeypatch.setattr(replies, "LARGEST", 1 << 16)

    def flood(kind: str, chunk: bytes) -> Callable[[BaseHTTPRequestHandler], None]:
        def handle(handler: BaseHTTPRequestHandler) -> None:
            handler.send_response(200)
            handler.send_header("Content-Type", kind)
            handler.end_headers()
            with contextlib.suppress(OSError):
                while not server.release.is_set():
                    handler.wfile.write(chunk)

        return handle

    client = VramClient(target)
    for kind, chunk in (("application/json", b" " * 4096), ("text/event-stream", b"x" * 4096)):
        server.script["/v1/chat/completions"] = flood(kind, chunk)
        with pytest.raises(RequestFailed, match=r"is larger than 0\.06 MiB: the rest was not read"):
            client.chat("hi")
    server.script["/props"] = flood("application/json", b" " * 4096)
    with pytest.raises(RequestFailed, match="POST|GET /props: the answer is larger"):
        client.get("/props")


def test_question_times_out_as_a_whole(server: Server, target: Target) -> None:
    """A question whose answer trickles in ends at request_timeout, as a generation does."""

    def trickle(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.end_headers()
        with contextlib.suppress(OSError):
            while not server.release.wait(0.02):
                handler.wfile.write(b" ")

    server.script["/props"] = trickle
    target.timeout = 0.2
    with pytest.raises(RequestTimeout, match="GET /props"):
        VramClient(target).get("/props")


def test_traceback_ends_at_the_users_line(server: Server, target: Target, pytester: pytest.Pytester) -> None:
    """A failed request in a test shows the test's own line and the sentence, none of this package's frames; a defect
    shows its frames.
    """
    server.script["/v1/chat/completions"] = answer(500, {"error": {"message": "boom" + "x" * 4000}})
    pytester.makepyfile(f"""
        from pytest_vram.backends.client import Target, VramClient
        client = VramClient(Target(name="agent", url={server.url!r}))
        gone = VramClient(Target(name="agent", url="http://127.0.0.1:9"))
        def test_refused(): client.chat("hi")
        def test_question(): client.get("/none")
        def test_gone(): gone.chat("hi")
        def test_defect(): client._generate(5, {{}}, None)
    """)
    run = pytester.runpytest_subprocess("-p", "no:cacheprovider", "-p", "no:vram")
    text = run.stdout.str()
    refused = text[text.index("test_refused _") : text.index("test_defect _")]
    assert "RequestFailed: backend 'agent' answered HTTP 500 to POST /v1/chat/completions: boomxx" in refused
    assert "pytest_vram/" not in refused.replace("pytest_vram.errors", "")
    assert "direct cause" not in refused
    assert refused.count("x" * 250) == 1
    assert "client.py" in text[text.index("test_defect _") :]


def test_silent_server_times_out(server: Server, target: Target) -> None:
    """No answer within request_timeout is RequestTimeout, and the turn is given back."""
    server.script["/v1/chat/completions"] = server.hang
    target.timeout = 0.2
    keeper = Keeper()
    client = VramClient(target, connect=keeper.connect)
    with pytest.raises(RequestTimeout, match=r"within 0\.2 s .*request_timeout.*/runs/agent\.1\.log"):
        client.chat("hi")
    assert client.requests[0].result == "timeout"
    assert keeper.open == 0


def test_trickling_answer_times_out_as_a_whole(server: Server, target: Target) -> None:
    """A server that keeps sending a little is cut off at request_timeout as well."""

    def trickle(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.send_header("Content-Type", "application/json")
        handler.end_headers()
        try:
            while not server.release.wait(0.01):
                handler.wfile.write(b" ")
        except OSError:
            pass

    server.script["/v1/chat/completions"] = trickle
    target.timeout = 0.2
    with pytest.raises(RequestTimeout):
        VramClient(target).chat("hi")
    with pytest.raises(RequestTimeout):
        anyio.run(AsyncVramClient(target).chat, "hi")


def test_lost_connection_says_how_the_server_died(server: Server, target: Target) -> None:
    """A dropped connection is BackendDied with the keeper's account of the death, else with the log's path."""
    server.script["/v1/chat/completions"] = drop
    with pytest.raises(BackendDied, match=r"lost during POST /v1/chat/completions.*agent\.1\.log"):
        VramClient(target).chat("hi")
    with pytest.raises(
        BackendDied, match=r"during POST /v1/chat/completions\. agent#1 with PID 7 was killed by SIGKILL"
    ):
        VramClient(target, fate=lambda key: "agent#1 with PID 7 was killed by SIGKILL").chat("hi")
    keeper = Keeper(Closed(t0=0, t1=1, deaths=["agent#1 ran out of memory"]))
    with pytest.raises(BackendDied, match="agent#1 ran out of memory"):
        VramClient(target, connect=keeper.connect).chat("hi")


def test_refused_connection_is_a_dead_backend(target: Target, server: Server) -> None:
    """Nobody listening is BackendDied for requests with and without a turn."""
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        target.url = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        with pytest.raises(BackendDied):
            VramClient(target).chat("hi")
        with pytest.raises(BackendDied):
            VramClient(target).get("/props")
        with pytest.raises(BackendDied, match=r"during GET /props\. It ran out"):
            VramClient(target, fate=lambda key: "It ran out of memory.").get("/props")


def test_interrupt_gives_the_turn_back(server: Server, target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever ends a request, Ctrl-C too, releases its turn."""
    keeper = Keeper()
    client = VramClient(target, connect=keeper.connect)

    def interrupted(call: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(client, "_exchange", interrupted)
    with pytest.raises(KeyboardInterrupt):
        client.chat("hi")
    assert keeper.open == 0


# ---------------------------------------------------------------- log line


def test_each_request_is_one_logfmt_line(server: Server, target: Target, caplog: pytest.LogCaptureFixture) -> None:
    """The line has the fields that log shippers of agents look for, with the card's peak."""
    keeper = Keeper(peak("gpu0", 2700 << 20))
    with caplog.at_level(logging.INFO, logger="pytest_vram.requests"):
        VramClient(target, connect=keeper.connect).chat("hi", task="sum up")
    line = caplog.records[-1].getMessage()
    assert line.startswith('task="sum up" model=tiny.gguf tokens_in=7 tokens_out=3 latency=')
    assert line.endswith("s tokens_per_second=50.0 gpu_peak=2700.0MiB result=ok")


def test_peak_that_was_not_measured_is_not_zero() -> None:
    """Host memory is labelled as such, several cards are listed, and no figure is ever a 0."""
    base = RequestRecord(id="i", backend="b", path="/", result="ok", t=0, latency=1.0)

    def line(**peaks: Any) -> str:
        record = RequestRecord(id="i", backend="b", path="/", result="ok", t=0, latency=1.0, peak=peaks)
        return replies.log_line(record)

    host = peak("host", 1 << 20).run["host"]
    lost = Unmeasurable(reason="gone")
    assert "gpu_peak=unmeasured" in replies.log_line(base)
    assert " peak=host:1.0MiB " in line(host=host)
    assert "gpu_peak=gpu0:1.0MiB,gpu1:unmeasured" in line(gpu0=host, gpu1=lost, host=host)


# ---------------------------------------------------------------- turns


def test_serial_requests_of_threads_do_not_overlap(server: Server, target: Target) -> None:
    """Two threads take turns at one backend; with serial=False both are inside at once."""
    inside = 0
    most = 0
    both = threading.Barrier(2)
    lock = threading.Lock()
    barrier = False

    def handle(handler: BaseHTTPRequestHandler) -> None:
        nonlocal inside, most
        with lock:
            inside += 1
            most = max(most, inside)
        if barrier:
            both.wait(10)
        answer(200, CHAT)(handler)
        with lock:
            inside -= 1

    server.script["/v1/chat/completions"] = handle
    keeper = Keeper()
    for serial in (True, False):
        barrier = not serial
        client = VramClient(target, connect=keeper.connect, serial=serial)
        threads = [threading.Thread(target=client.chat, args=("hi",)) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        assert most == (1 if serial else 2)


@pytest.mark.parametrize("loop", ["asyncio"])
def test_async_client_answers_as_the_blocking_one(server: Server, target: Target, loop: str) -> None:
    """Chat, stream, get, post and tokenize give the same in async code, and errors are the same classes."""
    keeper = Keeper(peak("host", 5))
    client = AsyncVramClient(target, connect=keeper.connect)

    async def run() -> None:
        reply = await client.chat("hi")
        assert (reply.text, reply.record.peak) == ("hello", keeper.closed.run)
        assert (await client.complete("x")).text == "abc"
        assert await client.get("/props") == {"total_slots": 1}
        assert await client.tokenize("ab") == [1, 2]
        assert await client.post("/props", {}) == {"total_slots": 1}
        with pytest.raises(RequestFailed, match="no such path"):
            await client.get("/nothing")
        server.script["/v1/completions"] = drop
        with pytest.raises(BackendDied):
            await client.complete("x")

    anyio.run(run, backend=loop)
    assert len(client.requests) == 4
    assert keeper.open == 0


def test_async_timeout_is_exact_over_the_whole_answer(server: Server, target: Target) -> None:
    """A hanging server ends in RequestTimeout in async code too."""
    server.script["/v1/chat/completions"] = server.hang
    target.timeout = 0.2
    with pytest.raises(RequestTimeout):
        anyio.run(AsyncVramClient(target).chat, "hi")


def test_cancelled_task_gives_its_turn_back(server: Server, target: Target) -> None:
    """Tasks cancelled while they wait for a turn, or for an answer, leave nothing held."""
    server.script["/v1/chat/completions"] = server.hang
    keeper = Keeper()
    client = AsyncVramClient(target, connect=keeper.connect)

    async def run() -> None:
        async with anyio.create_task_group() as tasks:
            for _ in range(3):
                tasks.start_soon(client.chat, "hi")
            while not server.seen or len(keeper.asked) < 3:
                await anyio.sleep(0.005)
            tasks.cancel_scope.cancel()

    anyio.run(run)
    assert len(server.seen) == 1
    assert keeper.open == 0
    server.script["/v1/chat/completions"] = answer(200, CHAT)
    assert VramClient(target, connect=keeper.connect).chat("hi").text == "hello"


def test_more_waiting_tasks_than_threads_do_not_block_each_other(server: Server, target: Target) -> None:
    """Sixty tasks, more than the thread pool holds, all get their turn."""
    keeper = Keeper()
    client = AsyncVramClient(target, connect=keeper.connect)

    async def run() -> None:
        async with anyio.create_task_group() as tasks:
            for _ in range(60):
                tasks.start_soon(client.chat, "hi")

    anyio.run(run)
    assert len(client.requests) == 60


def test_making_a_client_is_not_the_servers_time(
    server: Server, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Latency counts from the sending: what it takes to make an HTTP client before does not slow the rate."""
    made: list[int] = []
    real = client_module._http

    def slow(*arguments: Any) -> Any:
        http = real(*arguments)
        made.append(time.monotonic_ns())
        return http

    monkeypatch.setattr(client_module, "_http", slow)
    record = VramClient(target).complete("x").record
    assert record.t >= made[0]
