"""A scripted backend as an HTTP server, faults of connections included."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

from pytest_vram.testing.scripted import shapes
from pytest_vram.testing.scripted.answering import Answerer
from pytest_vram.testing.scripted.holding import Holder
from pytest_vram.testing.scripted.recording import Record
from pytest_vram.testing.scripted.shapes import ScriptedReply

JSON, EVENTS = "application/json; charset=utf-8", "text/event-stream"
#: Bytes of one write of an endless answer, and pieces of a stream in it.
_BLOCK = 1 << 16
#: Exit status of a backend whose script says that it dies.
DEATH = 70


class ScriptedServer(ThreadingHTTPServer):
    """Serves one :class:`Answerer` on loopback.

    :ivar written: bytes of answers that were handed to the system, by fault ("" where there is none).
    :ivar seconds: that answers took from the end of the request to the last byte.
    :ivar talks: whether it says a line for each request on standard error.
    """

    daemon_threads = True
    # Hundreds of connections may come at once, as one is opened for each request.
    request_queue_size = 128

    def __init__(self, answerer: Answerer, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.answerer = answerer
        self.holder = Holder(answerer.script)
        self.record = Record(answerer.script.record, counting=answerer.script.burst is not None)
        self.written: dict[str, int] = {}
        self.seconds = 0.0
        self.talks = False
        self.closing = threading.Event()
        self._lock = threading.Lock()

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://127.0.0.1:{self.server_port}"

    def wrote(self, fault: str, count: int) -> None:
        """Bytes of an answer went out."""
        with self._lock:
            self.written[fault] = self.written.get(fault, 0) + count

    def took(self, seconds: float) -> None:
        """An answer is over."""
        with self._lock:
            self.seconds += seconds

    def told(self) -> dict[str, Any]:
        """What it did so far: ``GET /scripted``."""
        answerer = self.answerer
        with self._lock:
            return {
                "asked": answerer.asked,
                "unknown": answerer.unknown,
                "faults": dict(answerer.faults),
                "written": dict(self.written),
                "held": self.holder.held,
                "seconds": self.seconds,
            }

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away is no news; what else breaks is printed as usual."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)

    def server_close(self) -> None:
        """Close the socket, and give back what is held."""
        super().server_close()
        self.holder.close()

    def shutdown(self) -> None:
        """Stop, answers that are silent or endless included."""
        self.closing.set()
        super().shutdown()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_version = "scripted"
    sys_version = ""
    # Head and body are two writes: on a kept connection the second would wait for the first to be acknowledged.
    disable_nagle_algorithm = True
    server: ScriptedServer
    fault = ""

    def log_message(self, format: str, *args: Any) -> None:
        """One line for each request, where it was asked for."""
        if self.server.talks:
            print(f"scripted: {self.address_string()} {format % args}", file=sys.stderr)  # noqa: T201

    def do_GET(self) -> None:
        self.fault = ""
        path = _path(self.path)
        model = self.server.answerer.script.model
        if path == "/health":
            self._json(200, {"status": "ok"})
        elif path == "/models":
            listed = {"id": model, "object": "model", "created": 0, "owned_by": "scripted"}
            self._json(200, {"object": "list", "data": [listed]})
        elif path == "/scripted":
            self._json(200, self.server.told())
        else:
            self._json(404, shapes.error(404, "File Not Found"))

    def do_POST(self) -> None:
        self.fault = ""
        body = self._body()
        if body is None:
            return
        path = _path(self.path)
        if path == "/tokenize":
            content = body.get("content")
            self._json(200, {"tokens": shapes.tokens(content if isinstance(content, str) else "")})
        elif path == "/chat/completions":
            if not isinstance(body.get("messages"), list):
                self._json(400, shapes.error(400, "Expected 'messages' to be an array"))
                return
            self._timed(body, text=False)
        elif path == "/completions":
            self._timed({**body, "messages": [{"role": "user", "content": body.get("prompt")}]}, text=True)
        else:
            self._json(404, shapes.error(404, "File Not Found"))

    def _body(self) -> dict[str, Any] | None:
        data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        try:
            body = json.loads(data)
        except (ValueError, RecursionError) as error:
            self._json(500, shapes.error(500, f"parse error: {type(error).__name__}"))
            return None
        if not isinstance(body, dict):
            self._json(400, shapes.error(400, "Expected the body to be an object"))
            return None
        return body

    def _timed(self, body: dict[str, Any], *, text: bool) -> None:
        start = time.perf_counter()
        try:
            with self.server.holder.during(self.server.record.add(body)):
                self._generated(body, text=text)
        finally:
            self.server.took(time.perf_counter() - start)

    def _generated(self, body: dict[str, Any], *, text: bool) -> None:
        server = self.server
        reply = server.answerer.answer(body)
        self.fault = reply.fault or ""
        streamed = bool(body.get("stream"))
        server.holder.turn()
        self._wait(server.answerer.script.latency)
        fault = getattr(self, f"_{reply.fault}", None) if reply.fault is not None else None
        if fault is not None:
            fault(reply, streamed)
        elif reply.error is not None:
            headers = {"Retry-After": f"{reply.retry_after:g}"} if reply.retry_after is not None else {}
            self._json(reply.status, reply.error, **headers)
        elif streamed:
            options = body.get("stream_options")
            usage = isinstance(options, dict) and bool(options.get("include_usage"))
            made = shapes.text_chunks(reply) if text else shapes.chunks(reply, usage=usage)
            self._stream(made)
        else:
            self._wait(reply.tokens_out * self._pace())
            self._json(200, shapes.text_completion(reply) if text else shapes.completion(reply))

    def _pace(self) -> float:
        rate = self.server.answerer.script.tokens_per_second
        return 1.0 / rate if rate is not None else 0.0

    def _wait(self, seconds: float) -> None:
        if seconds > 0:
            self.server.closing.wait(seconds)

    def _json(self, status: int, answer: object, **headers: str) -> None:
        self._send(status, json.dumps(answer).encode(), JSON, **headers)

    def _send(self, status: int, data: bytes, kind: str, **headers: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self._write(data)

    def _write(self, data: bytes) -> None:
        # In blocks, so that what a client took before it went away is counted.
        for at in range(0, len(data), _BLOCK):
            block = data[at : at + _BLOCK]
            self.wfile.write(block)
            self.server.wrote(self.fault, len(block))

    def _open(self, kind: str) -> None:
        """Begin an answer whose length is not known."""
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()

    def _chunk(self, data: bytes) -> None:
        self._write(b"%x\r\n%s\r\n" % (len(data), data))

    def _stream(self, made: Iterator[dict[str, Any]]) -> None:
        self._open(EVENTS)
        pace = self._pace()
        block = bytearray()
        for piece in made:
            block += _event(piece)
            if pace:
                self._chunk(bytes(block))
                block.clear()
                self._wait(pace)
        self._chunk(bytes(block) + b"data: [DONE]\n\n")
        self._write(b"0\r\n\r\n")

    # Faults of a connection; each is named as in `script.FAULTS`.

    def _disconnect(self, reply: ScriptedReply, streamed: bool) -> None:
        self._cut()

    def _disconnect_midway(self, reply: ScriptedReply, streamed: bool) -> None:
        self._half(reply, streamed)
        self._cut()

    def _dies(self, reply: ScriptedReply, streamed: bool) -> None:
        os._exit(DEATH)

    def _dies_midway(self, reply: ScriptedReply, streamed: bool) -> None:
        self._half(reply, streamed)
        os._exit(DEATH)

    def _half(self, reply: ScriptedReply, streamed: bool) -> None:
        """The first half of the answer, of which more was promised."""
        if streamed:
            events = [_event(piece) for piece in shapes.chunks(reply)]
            self._open(EVENTS)
            self._chunk(b"".join(events[: max(1, len(events) // 2)]))
        else:
            data = json.dumps(shapes.completion(reply)).encode()
            self.send_response(200)
            self.send_header("Content-Type", JSON)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self._write(data[: len(data) // 2])

    def _cut(self) -> None:
        self.close_connection = True
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def _silent(self, reply: ScriptedReply, streamed: bool) -> None:
        self._until_gone()
        self._cut()

    def _until_gone(self) -> None:
        """Wait for the client to close, or for the server to end."""
        self.connection.settimeout(0.2)
        while not self.server.closing.is_set():
            try:
                if not self.connection.recv(1):
                    return
            except TimeoutError:
                continue
            except OSError:
                return

    def _endless(self, reply: ScriptedReply, streamed: bool) -> None:
        piece = {"choices": [{"index": 0, "finish_reason": None, "delta": {"content": " and so on"}}]}
        if streamed:
            self._open(EVENTS)
            event = _event({**piece, "object": "chat.completion.chunk", "model": reply.model})
            block = event if self._pace() else event * (_BLOCK // len(event))
        else:
            self._open(JSON)
            self._chunk(b'{"object": "chat.completion", "choices": [{"index": 0, "message": {"content": "')
            block = b" and so on" * (_BLOCK // 10)
        while not self.server.closing.is_set():
            self._chunk(block)
            self._wait(self._pace())
        self._cut()

    def _huge(self, reply: ScriptedReply, streamed: bool) -> None:
        text = "0123456789abcdef" * (max(reply.size, 16) // 16)
        large = {**reply.message, "content": text}
        if streamed:
            self._open(EVENTS)
            for at in range(0, len(text), _BLOCK):
                delta = {"content": text[at : at + _BLOCK]}
                self._chunk(_event({"choices": [{"index": 0, "finish_reason": None, "delta": delta}]}))
            self._chunk(_event({"choices": [{"index": 0, "finish_reason": "stop", "delta": {}}]}) + b"data: [DONE]\n\n")
            self._write(b"0\r\n\r\n")
        else:
            choice = {"index": 0, "finish_reason": "stop", "message": large}
            self._json(200, {"object": "chat.completion", "model": reply.model, "choices": [choice]})

    def _empty_body(self, reply: ScriptedReply, streamed: bool) -> None:
        self._send(200, b"", EVENTS if streamed else JSON)

    def _empty_choices(self, reply: ScriptedReply, streamed: bool) -> None:
        if streamed:
            self._stream(iter([{"object": "chat.completion.chunk", "model": reply.model, "choices": []}]))
        else:
            self._json(200, {"object": "chat.completion", "model": reply.model, "choices": []})

    def _invalid_utf8(self, reply: ScriptedReply, streamed: bool) -> None:
        """The answer with bytes in its text that are no UTF-8."""
        bad = b"\xff\xfe\xc3("
        if streamed:
            piece = _event({"choices": [{"index": 0, "finish_reason": None, "delta": {"content": "@"}}]})
            self._open(EVENTS)
            self._chunk(piece.replace(b"@", bad) + b"data: [DONE]\n\n")
            self._write(b"0\r\n\r\n")
        else:
            choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "@"}}
            data = json.dumps({"object": "chat.completion", "choices": [choice]}).encode()
            self._send(200, data.replace(b"@", bad), JSON)

    def _not_json(self, reply: ScriptedReply, streamed: bool) -> None:
        page = b"<html><head><title>502 Bad Gateway</title></head></html>"
        self._send(200, b"data: " + page + b"\n\n" if streamed else page, EVENTS if streamed else JSON)

    def _wrong_content_type(self, reply: ScriptedReply, streamed: bool) -> None:
        """A right answer under another type, as some proxies send it."""
        if streamed:
            data = b"".join(_event(piece) for piece in shapes.chunks(reply)) + b"data: [DONE]\n\n"
        else:
            data = json.dumps(shapes.completion(reply)).encode()
        self._send(200, data, "text/plain")


def _event(piece: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(piece).encode() + b"\n\n"


def _path(path: str) -> str:
    return "/" + urlsplit(path).path.strip("/").removeprefix("v1/")


@contextlib.contextmanager
def serving(answerer: Answerer, port: int = 0) -> Iterator[ScriptedServer]:
    """The server in a thread of this process, until the block ends; faults that end the process would end this one."""
    server = ScriptedServer(answerer, port)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
