"""A request ends in its time, however little and however often the server sends."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from pytest_vram.backends.client import Target, VramClient
from pytest_vram.backends.reply import Collector
from pytest_vram.errors import BackendDied, RequestTimeout

#: The head of a gzip file with a name, which decodes to nothing while the name goes on.
GZIP = b"\x1f\x8b\x08\x08\x00\x00\x00\x00\x00\x03"
JSON = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"


@pytest.fixture
def dripping() -> Iterator[Callable[[bytes, bytes], Target]]:
    """Starts a server that sends a head, and then a piece again and again until its client has gone."""
    over = threading.Event()
    threads: list[threading.Thread] = []
    listeners: list[socket.socket] = []

    def drip(listener: socket.socket, head: bytes, piece: bytes) -> None:
        with contextlib.suppress(OSError):
            connection, _ = listener.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(head)
                while piece and not over.wait(0.01):
                    connection.sendall(piece)

    def start(head: bytes, piece: bytes) -> Target:
        listener = socket.create_server(("127.0.0.1", 0))
        listeners.append(listener)
        threads.append(threading.Thread(target=drip, args=(listener, head, piece)))
        threads[-1].start()
        return Target(name="agent", url=f"http://127.0.0.1:{listener.getsockname()[1]}", timeout=0.2)

    yield start
    over.set()
    for listener in listeners:
        listener.close()
    for thread in threads:
        thread.join()


@pytest.mark.parametrize(
    ("head", "piece"),
    [
        (b"HTTP/1.1 200 OK\r\nX-Slow: ", b"x"),
        (b"HTTP/1.1 200 OK\r\n", b"X: y\r\n"),
        (JSON + b"Content-Encoding: gzip\r\n\r\n" + GZIP, b"n"),
        (JSON + b"\r\n{", b" "),
        (b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n", b":\n"),
    ],
    ids=["header", "headers", "gzip", "body", "comments"],
)
def test_a_request_ends_in_its_time_whatever_drips(
    dripping: Callable[[bytes, bytes], Target], head: bytes, piece: bytes
) -> None:
    """Each read brings something at once, and the whole does not end."""
    client = VramClient(dripping(head, piece))
    with pytest.raises(RequestTimeout, match=r"within 0\.2 s"):
        client.chat("hi")
    assert client.requests[0].result == "timeout"


def test_a_connection_that_is_lost_in_time_is_no_timeout(dripping: Callable[[bytes, bytes], Target]) -> None:
    """The server closed it."""
    target = dripping(b"HTTP/1.1 200 OK\r\nX-Slow: ", b"")
    target.timeout = 30.0
    with pytest.raises(BackendDied, match="the connection to backend 'agent' was lost"):
        VramClient(target).chat("hi")


@pytest.mark.parametrize("end", [b"\r", b"\n", b"\r\n"])
@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_lines_of_a_stream_end_as_events_may(end: bytes, size: int) -> None:
    """CR, LF or both, wherever the chunks are cut."""
    pieces = [{"choices": [{"delta": {"content": text}}]} for text in ("one ", "two\r\n", "three")]
    lines = [b": hello", b"event: message", *(b"data: " + json.dumps(piece).encode() for piece in pieces)]
    stream = b"".join(line + end + end for line in [*lines, b"data: [DONE]"])
    collector = Collector(backend="b", path="POST /", status=200, content_type="text/event-stream")
    for start in range(0, len(stream), size):
        collector.feed(stream[start : start + size], 0.0)
    assert collector.decoded()["choices"][0]["message"]["content"] == "one two\r\nthree"
