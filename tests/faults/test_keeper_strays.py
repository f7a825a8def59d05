"""Processes that leave the tree: daemons of servers and of tests, and runs within runs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pytest_vram.keeper import KeeperClient, mark_environment
from pytest_vram.keeper.messages import MEMBER_MARK
from pytest_vram.measure import procfs
from pytest_vram.readings import Measured, Reading
from tests.faults.keeper_kit import Run, acquire, closed, opened, plan, until

MIB = 1 << 20

#: Forks twice, leaves its session, and holds memory. Arguments: bytes, a file for the PID, words.
DAEMON = r"""
import os, sys, time
size, path, words = int(sys.argv[1]), sys.argv[2], sys.argv[3:]
if os.fork() == 0:
    os.setsid()
    if os.fork():
        # What has no marker is known by its parents, so that they must live until the keeper has looked once.
        time.sleep(0.5 if "forked" in words else 0)
        os._exit(0)
    drop = "del block; " if "drop" in words else ""
    hold = (
        "import os, sys, time; block = bytearray(%d); %sopen(%r, 'w').write(str(os.getpid())); time.sleep(600)"
        % (size, drop, path)
    )
    if "forked" in words:
        exec(hold)
    os.execve(sys.executable, [sys.executable, "-S", "-c", hold], {} if "bare" in words else dict(os.environ))
os.wait()
"""


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    made = Run(tmp_path).start()
    yield made
    made.close()


@pytest.fixture
def client(run: Run) -> KeeperClient:
    return run.client()


@pytest.fixture
def pids(tmp_path: Path) -> Iterator[Path]:
    """A folder where daemons leave their PIDs; they are ended after the test."""
    folder = tmp_path / "pids"
    folder.mkdir()
    yield folder
    for path in folder.iterdir():
        try:
            os.kill(int(path.read_text()), signal.SIGKILL)
        except (OSError, ValueError):
            continue


def reading(found: Measured) -> Reading:
    assert isinstance(found, Reading)
    return found


def daemon(pids: Path, size: int, *words: str, run: Run | None = None) -> int:
    path = pids / f"pid{len(list(pids.iterdir()))}"
    env = dict(os.environ) | ({MEMBER_MARK: f"outer:{run.id}"} if run else {})
    subprocess.run([sys.executable, "-S", "-c", DAEMON, str(size), str(path), *words], check=True, env=env)
    assert until(lambda: path.exists() and path.read_text() != "")
    return int(path.read_text())


@pytest.mark.parametrize("servers", [1, 2])
def test_a_servers_daemon_without_environment(client: KeeperClient, pids: Path, servers: int) -> None:
    """A server's daemon that cleared its environment counts for the only server, else for the run alone."""
    for number in range(1, servers):
        acquire(client, plan(name=f"other{number}"))
    path = pids / "pid"
    words = ["python", "-S", "-c", DAEMON, str(150 * MIB), str(path), "bare"]
    code = f"import subprocess, sys; subprocess.run([sys.executable, *{words[1:]!r}], check=True)\n"
    made = plan()
    made.argv[3] = code + made.argv[3]
    window = opened(client)
    acquire(client, made, window)
    assert until(lambda: path.exists() and path.read_text() != "")
    figures = closed(client, window)
    peak = reading(figures.run["host"])
    assert peak.bytes > 150 * MIB
    backend = reading(figures.backend["host"])
    if backend.bytes < 150 * MIB:
        # Seen only after its parents had ended; then it may be of either server.
        assert servers == 2
        assert not backend.exact
        assert "is of some backend, unknown which" in (backend.note or "")
        assert (figures.shares[0].pid, figures.shares[0].backend) == (int(path.read_text()), None)


@pytest.mark.parametrize("word", ["marked", "forked"])
def test_a_daemon_of_a_test(run: Run, client: KeeperClient, pids: Path, word: str) -> None:
    """A test's daemon counts, be it known by the marker in its environment or as a fork of a process of the run."""
    window = opened(client)
    pid = daemon(pids, 150 * MIB, word, run=run if word == "marked" else None)
    stat = procfs.read_stat(pid)
    assert stat is not None
    assert stat.parent not in (os.getpid(), client.welcome.pid)
    figures = closed(client, window)
    assert pid in {share.pid for share in figures.shares}
    assert reading(figures.run["host"]).upper > 150 * MIB
    later = reading(closed(client, opened(client)).run["host"])
    assert later.bytes > 150 * MIB
    assert later.exact


def test_a_stranger_is_not_counted(client: KeeperClient, pids: Path) -> None:
    """A daemon with the marker of another run, and one without any, are not of this run."""
    window = opened(client)
    other = subprocess.run(
        [
            "/usr/bin/env",
            f"{MEMBER_MARK}=somebody",
            "setsid",
            "--fork",
            sys.executable,
            "-S",
            "-c",
            f"import os, time; x = bytearray({100 * MIB}); open({str(pids / 'pid')!r}, 'w').write(str(os.getpid()));"
            "time.sleep(600)",
        ],
        check=True,
    )
    assert other.returncode == 0
    assert until(lambda: (pids / "pid").exists() and (pids / "pid").read_text() != "")
    pid = int((pids / "pid").read_text())
    closed(client, window)
    again = closed(client, opened(client))
    assert pid not in {share.pid for share in again.shares}
    assert reading(again.run["host"]).bytes < 50 * MIB


def test_a_daemon_that_an_earlier_keeper_missed(tmp_path: Path, pids: Path) -> None:
    """A daemon from before the keeper counts with what it holds, not with what it once held."""
    made = Run(tmp_path)
    pid = daemon(pids, 150 * MIB, "drop", run=made)
    client = made.start().client()
    figures = closed(client, opened(client))
    assert pid in {share.pid for share in figures.shares}
    assert reading(figures.run["host"]).upper < 60 * MIB
    made.close()


def test_a_run_within_a_run(run: Run, client: KeeperClient, pids: Path) -> None:
    """Where a test runs a keeper of its own, which sets marks back as well, the figures around it are not exact."""
    window = opened(client)
    with subprocess.Popen(["sleep", "600"], env={**os.environ, "PYTEST_VRAM_RUN": "inner"}) as inner:
        assert until(lambda: procfs.environment_value(inner.pid, "PYTEST_VRAM_RUN") == "inner")
        figures = closed(client, window)
        inner.kill()
    peak = reading(figures.run["host"])
    assert not peak.exact
    assert "another run of this plugin" in (peak.note or "")
    closed(client, opened(client))
    with subprocess.Popen(["sleep", "600"]) as plain:
        after = closed(client, opened(client))
        plain.kill()
    assert reading(after.run["host"]).exact


def test_the_mark_of_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs within runs add to the marker, once each; the outermost stay."""
    monkeypatch.setenv(MEMBER_MARK, "outer")
    mark_environment("inner")
    mark_environment("inner")
    assert os.environ[MEMBER_MARK] == "outer:inner"
    for number in range(20):
        mark_environment(f"r{number}")
    runs = os.environ[MEMBER_MARK].split(":")
    assert (runs[0], runs[-1], len(runs)) == ("outer", "r19", 8)


def test_a_child_that_ended_before(client: KeeperClient) -> None:
    """A process that ended before a window opened does not make the window's figure inexact."""
    with subprocess.Popen(["sleep", "600"]) as sleeper:
        closed(client, opened(client))
        for _ in range(10):
            subprocess.run([sys.executable, "-S", "-c", "import time; time.sleep(0.03)"], check=True)
            peak = reading(closed(client, opened(client)).run["host"])
            assert (peak.exact, peak.note) == (True, None)
        sleeper.kill()
