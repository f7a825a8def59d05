"""Servers that do not answer, and processes that may not be looked into: no figure is wrong."""

from __future__ import annotations

import ctypes
import os
import pwd
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from pytest_vram.keeper.messages import Closed, EndTurn, Granted, Turn
from pytest_vram.measure import procfs
from pytest_vram.readings import Reading
from tests.faults.keeper_kit import Run, acquire, closed, controller, kill, opened, plan, wait_up

MIB = 1 << 20


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    made = Run(tmp_path).start()
    yield made
    made.close()


def test_a_server_that_is_stopped_in_mid_request(run: Run) -> None:
    """SIGSTOP in the middle of a request: the request times out, and every figure is what the server really holds."""
    client, turn = run.client(), run.client("turn")
    window = opened(client)
    running = acquire(client, plan(f"hold={50 * MIB}"), window)
    assert isinstance(turn.call(Turn(key=running.key, request="r1", parent=window)), Granted)
    os.kill(running.pid, signal.SIGSTOP)
    port = int(running.url.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port)) as asking:
        asking.settimeout(0.1)
        asking.sendall(b"GET / HTTP/1.1\r\n\r\n")
        with pytest.raises(TimeoutError):
            asking.recv(1)
    request = turn.call(EndTurn(record={"result": "timeout"}))
    assert isinstance(request, Closed)
    memory = procfs.read_memory(running.pid)
    assert memory is not None
    test = closed(client, window)
    for figures in (request, test):
        peak = figures.backend["host"]
        assert isinstance(peak, Reading)
        assert peak.exact
        assert memory.resident - MIB <= peak.upper < memory.resident + 8 * MIB
        assert figures.deaths == figures.lost == figures.trouble == []
        assert figures.host_use is not None
        assert isinstance(figures.host_use.swap_grew, Reading)
        assert figures.host_use.major_fault_count is not None
    line = run.journal("request")[-1]
    assert line["result"] == "timeout"
    assert line["host_use"]["major_faults"]["source"] == "host-faults"


def _as_other_user() -> None:
    """Give up root's rights over the processes of others, for good."""
    libc = ctypes.CDLL(None, use_errno=True)
    for right in (1, 2, 19):  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH, CAP_SYS_PTRACE
        if libc.prctl(24, right, 0, 0, 0):  # PR_CAPBSET_DROP
            raise OSError(ctypes.get_errno(), "the right cannot be given up")


@pytest.fixture
def foreign() -> Iterator[int]:
    """A process of another user, whose marks this one may not set back."""
    if os.getuid() != 0:
        stat = procfs.read_memory(1)
        if stat is None or os.stat("/proc/1").st_uid == os.getuid():
            pytest.skip("no process of another user can be seen here, and only root can start one")
        yield 1
        return
    try:
        nobody = pwd.getpwnam("nobody").pw_uid
    except KeyError:
        pytest.skip("there is no user nobody here")
    # It had held far more than it holds now; a shell, because this Python may not be for everybody.
    code = "x=$(head -c 30000000 /dev/zero | tr '\\0' x); x=; echo ready; read x"
    with subprocess.Popen(
        ["/bin/sh", "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, user=nobody, extra_groups=[]
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        yield process.pid
        process.kill()


def test_marks_that_may_not_be_set_back(tmp_path: Path, foreign: int) -> None:
    """Without permission on /proc/PID/clear_refs a peak is the largest sample: labelled so, and not the mark of a
    whole life."""
    run = Run(tmp_path)
    code = f"""
web = acquire(client, plan(name="web"), opened(client, "other"))
window = opened(client)
attach = LaunchPlan(name="d", engine="attach", url=web.url, health="/", pid={foreign}, own_port=False)
acquire(client, attach, window)
seen = (status(client).sampling or None)
until(lambda: status(client).sampling.samples > seen.samples + 3)
print(msgspec.json.encode(closed(client, window)).decode())
"""
    process = controller(run, code, first=_as_other_user if os.getuid() == 0 else None)
    try:
        figures = msgspec.json.decode(wait_up(process)[-1], type=Closed)
    finally:
        kill(process)
    peak = figures.backend["host"]
    assert isinstance(peak, Reading)
    assert (peak.exact, peak.source) == (False, "host-rss")
    assert "may not be set back by this user" in (peak.note or "")
    memory = procfs.read_memory(foreign)
    assert memory is not None
    assert abs(peak.bytes - memory.resident) < 4 * MIB
    if os.getuid() == 0:
        assert memory.mark > memory.resident + 10 * MIB
    assert peak.samples
    run.close()
