"""Who listens at an address, by the kernel's own tables."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pytest_vram.backends.listening import look
from pytest_vram.checks import judge_fresh
from pytest_vram.keeper.messages import BACKEND_MARK, RUN_MARK, Running

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux says who listens")
SERVER = "import socket, sys; s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1], flush=True); sys.stdin.read()"


def running(pid: int, port: int, **changes: Any) -> Running:
    keys: dict[str, Any] = {"log": "", "pids": [pid], "t_start": time.monotonic_ns(), **changes}
    return Running(key="k", name="agent", generation=2, pid=pid, url=f"http://127.0.0.1:{port}", fresh=True, **keys)


@pytest.fixture
def server() -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A process that listens, with the mark of this boot's first generation."""
    environment = {**os.environ, BACKEND_MARK: "agent#1"}
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, "-c", SERVER], stdin=pipe, stdout=pipe, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        yield process, int(process.stdout.readline())
        process.kill()


def test_the_servers_own_process_is_found(server: tuple[subprocess.Popen[str], int]) -> None:
    """The process that was started holds the socket."""
    process, port = server
    seen = look(running(process.pid, port))
    assert [(one.pid, one.ours, one.older_by) for one in seen.holders] == [(process.pid, True, 0.0)]
    assert judge_fresh(seen) is None


def test_a_child_of_the_server_is_its_own(server: tuple[subprocess.Popen[str], int]) -> None:
    """A command that forks its engine is this boot's all the same."""
    process, port = server
    assert [one.ours for one in look(running(os.getpid(), port)).holders] == [True]
    assert [one.pid for one in look(running(os.getpid(), port)).holders] == [process.pid]


def test_an_old_server_on_the_port_is_not_this_boot(server: tuple[subprocess.Popen[str], int]) -> None:
    """A process of another generation that holds the port fails, whatever it answers."""
    process, port = server
    with subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE) as young:
        seen = look(running(young.pid, port))
        young.kill()
    assert [(one.pid, one.ours) for one in seen.holders] == [(process.pid, False)]
    found = judge_fresh(seen)
    assert found is not None
    assert found.verdict == "failed"
    assert f"process {process.pid}" in found.text


@pytest.mark.parametrize(("run", "ours"), [("this", True), ("another", False)])
def test_a_daemon_of_this_boot_is_known_by_its_marks(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, run: str, ours: bool
) -> None:
    """A process that left the tree keeps the marks that it inherited; what another run left behind has that run's."""
    monkeypatch.setenv(RUN_MARK, run)
    _, port = request.getfixturevalue("server")
    monkeypatch.setenv(RUN_MARK, "this")
    with subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE) as young:
        mine = Running(
            key="k", name="agent", generation=1, pid=young.pid, pids=[young.pid], log="", fresh=True,
            url=f"http://127.0.0.1:{port}", t_start=time.monotonic_ns(),
        )  # fmt: skip
        assert [one.ours for one in look(mine).holders] == [ours]
        young.kill()


def test_nobody_listens_and_an_old_log(tmp_path: Path) -> None:
    """Without a listener nothing is proved; a log that ends before the boot began is another boot's."""
    with socket.create_server(("127.0.0.1", 0)) as one:
        port = one.getsockname()[1]
    log = tmp_path / "agent.log"
    log.write_text("old\n", encoding="utf-8")
    os.utime(log, (time.time() - 500, time.time() - 500))
    seen = look(running(os.getpid(), port, log=str(log)))
    assert seen.holders == ()
    assert seen.log_older_by == pytest.approx(500, abs=5)
    assert look(running(os.getpid(), port)).log_older_by is None
    finding = judge_fresh(look(running(os.getpid(), port)))
    assert finding is not None
    assert finding.verdict == "inconclusive"
