"""Page faults of a real server, counted for the request and for the test that caused them."""

from __future__ import annotations

import mmap
import os
import sys
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path

import pytest

from pytest_vram.keeper.messages import Closed, EndTurn, Granted, HostUse, Turn
from pytest_vram.readings import Reading
from tests.faults.keeper_kit import Run, acquire, closed, opened, plan

PAGES = 256

#: A server that maps a file, and reads all its pages for each request but the health check.
SERVER = r"""
import mmap, os, socket, sys
file = open(sys.argv[1], "rb")
weights = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
weights.madvise(mmap.MADV_RANDOM)
listener = socket.create_server(("127.0.0.1", 0))
print(f"listening on http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
while True:
    connection, _ = listener.accept()
    if b"/health" not in connection.recv(4096):
        sum(weights[at] for at in range(0, len(weights), mmap.PAGESIZE))
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
    connection.close()
"""


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    made = Run(tmp_path).start()
    yield made
    made.close()


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    """A file that is on the disk and not in memory."""
    path = tmp_path / "weights"
    with path.open("wb") as file:
        file.write(os.urandom(PAGES * mmap.PAGESIZE))
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    with path.open("rb") as written, mmap.mmap(written.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        mapped.madvise(mmap.MADV_RANDOM)
        before = _faults()
        mapped[mmap.PAGESIZE]
        if _faults() == before:
            pytest.skip("files stay in memory here (tmpfs, or a sandbox), so that there are no major faults")
    return path


def _faults() -> int:
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_majflt


def test_faults_of_a_request(run: Run, weights: Path) -> None:
    """Pages that a request had to wait for are in the request's line, in its reply and in the test's figures; the next
    request, which finds them in memory, has none."""
    client, turn = run.client(), run.client("turn")
    window = opened(client)
    running = acquire(client, plan(argv=[sys.executable, "-S", "-c", SERVER, str(weights)]), window)
    found: list[HostUse] = []
    for number in range(2):
        assert isinstance(turn.call(Turn(key=running.key, request=f"r{number}", parent=window)), Granted)
        connection = HTTPConnection(running.url.removeprefix("http://"), timeout=10)
        connection.request("GET", "/complete")
        assert connection.getresponse().status == 200
        connection.close()
        reply = turn.call(EndTurn(record={"result": "ok"}))
        assert isinstance(reply, Closed)
        assert reply.host_use is not None
        found.append(reply.host_use)
    # One page was read by the look before.
    assert PAGES - 2 <= (found[0].major_fault_count or 0) <= PAGES + 64
    assert (found[1].major_fault_count or 0) <= 2
    test = closed(client, window).host_use
    assert test is not None
    assert test.major_fault_count is not None
    assert test.major_fault_count >= (found[0].major_fault_count or 0)
    assert isinstance(test.major_faults, Reading)
    assert test.major_faults.bytes == test.major_fault_count * mmap.PAGESIZE
    lines = run.journal("request")
    assert [line["host_use"]["major_fault_count"] for line in lines] == [one.major_fault_count for one in found]
    assert closed(client, opened(client, "without a backend")).host_use is None
