"""`vram doctor --reap` ends what runs that are over left behind, and never anything else."""

from __future__ import annotations

import fcntl
import json
import os
import resource
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pytest_vram.cli.entry import main
from pytest_vram.cli.reap import Reaped, Report, _lines
from pytest_vram.keeper import leftovers, limits, socket_path
from pytest_vram.measure import procfs
from tests.faults.keeper_kit import Run, acquire, gone, of_run, opened, plan, status, until

#: Sleeps; ``stubborn`` ignores SIGTERM, ``fork`` has a child in a bare environment, ``session`` one beside it.
SLEEPER = """
import os, signal, sys, time
words = sys.argv[1:]
if "stubborn" in words:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if "child" in words and os.fork() == 0:
    os.execve("/bin/sleep", ["sleep", "600"], {})
print("up", flush=True)
time.sleep(600)
"""
Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def run() -> str:
    return f"reap-{uuid.uuid4().hex[:12]}"


@pytest.fixture(autouse=True)
def _only_ours(run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests of others on this machine leave things behind as well, and look at them."""
    real = leftovers._ours

    def ours() -> list[int]:
        own = set(of_run(run))
        stats = [stat for pid in real() if (stat := procfs.read_stat(pid)) is not None]
        below = {stat.pid for stat in stats if stat.parent in own}
        return sorted({*own, *below, os.getpid()})

    monkeypatch.setattr(leftovers, "_ours", ours)


@pytest.fixture
def start(run: str) -> Iterator[Start]:
    """Starts a process that carries the run's mark."""
    started: list[subprocess.Popen[str]] = []

    def begin(*words: str, controller: str | None = None, **environment: str) -> subprocess.Popen[str]:
        marks = {"PYTEST_VRAM_RUN": run, **({"PYTEST_VRAM_CONTROLLER": controller} if controller else {})}
        process = subprocess.Popen(
            [sys.executable, "-S", "-c", SLEEPER, *words],
            env={**marks, **environment},
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        return process

    yield begin
    for process in started:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.communicate()


def dead() -> str:
    """A controller that has ended."""
    with subprocess.Popen(["true"]) as process:
        start = limits.started(process.pid) or 0
    return f"{process.pid}:{start}"


def alive() -> str:
    return f"{os.getpid()}:{limits.started(os.getpid())}"


def reap(capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any]]:
    code = main(["doctor", "--reap", "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_a_server_of_a_dead_controller_is_ended(
    start: Start, run: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """It is ended with the child below it that carries no mark, and both are named."""
    process = start("child", controller=dead())
    assert until(lambda: len(leftovers.find()) == 2)
    code, found = reap(capsys)
    assert process.wait(5) == -signal.SIGTERM
    assert code == 0
    assert [one["run"] for one in found["ended"]] == [run, run]
    assert found["ended"][0]["command"] == "sleep 600"  # the lower one first
    assert found["left"] == []
    assert leftovers.find() == []


def test_one_that_does_not_hear_is_killed(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    """A process that ignores SIGTERM, and one that is stopped, are ended all the same."""
    stubborn, stopped = start("stubborn", controller=dead()), start(controller=dead())
    stopped.send_signal(signal.SIGSTOP)
    code, found = reap(capsys)
    assert code == 0
    assert {one["pid"] for one in found["ended"]} == {stubborn.pid, stopped.pid}
    assert (stubborn.wait(5), stopped.wait(5)) == (-signal.SIGKILL, -signal.SIGTERM)


def test_descriptors_of_any_number_are_waited_for(
    start: Start, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that has more than a thousand files open reaps as well as any other."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 4096:
        pytest.skip(f"this process may not have descriptors above {hard}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 4096), hard))
    real = os.pidfd_open

    def high(pid: int) -> int:
        low = real(pid)
        try:
            return fcntl.fcntl(low, fcntl.F_DUPFD_CLOEXEC, 2048)
        finally:
            os.close(low)

    monkeypatch.setattr(os, "pidfd_open", high)
    try:
        process = start(controller=dead())
        code, found = reap(capsys)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert (code, [one["pid"] for one in found["ended"]]) == (0, [process.pid])


def test_each_process_is_one_line() -> None:
    """Marks and commands of others may hold line ends and escapes: they are shown, not obeyed."""
    found = Report(
        ended=[Reaped(pid=7, run="evil\x1b[31m\nended    PID 1 of run x", command="sleep\r613")], removed=[], left=[]
    )
    assert _lines(found) == ["ended    PID 7 of run evil\\x1b[31m\\nended    PID 1 of run x: sleep\\r613"]


def test_a_run_that_lives_is_never_touched(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    """As long as its controller lives nothing of a run is ended, whether or not a keeper answers."""
    process = start(controller=alive())
    assert leftovers.find() == []
    code, found = reap(capsys)
    assert (code, found["ended"], process.poll()) == (0, [], None)


def test_a_reused_pid_is_no_controller(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    """A process that has the controller's number and not its start time does not keep a run alive."""
    process = start(controller=f"{os.getpid()}:1")
    assert reap(capsys)[0] == 0
    assert process.wait(5) == -signal.SIGTERM


def test_without_a_controller_the_keeper_decides(start: Start, run: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A process whose controller is not known is a leftover only where nobody answers for its run."""
    import socket

    process = start()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening:
        listening.bind(socket_path(run))
        listening.listen()
        assert leftovers.find() == []
    assert reap(capsys)[0] == 0
    assert process.wait(5) == -signal.SIGTERM
    assert not Path(socket_path(run)).exists()


def test_what_turned_out_to_live_is_spared(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the look and the signal it is checked again: another process of that number is left alone."""
    process = start(controller=dead())
    (one,) = leftovers.find()
    assert leftovers._handle(one._replace(start=one.start + 1)) is None
    assert leftovers._handle(one._replace(run="another")) is None
    monkeypatch.setattr(leftovers, "_is_over", lambda *_, **__: False)
    assert leftovers._handle(one) is None
    assert process.poll() is None


def test_reap_does_not_end_itself(run: str, tmp_path: Path) -> None:
    """A command that runs inside a leftover, such as in a shell of it, ends neither itself nor what is above it."""
    code = "from pytest_vram.keeper import leftovers; print(leftovers.reap())"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTEST_VRAM_RUN": run, "PYTEST_VRAM_CONTROLLER": dead()},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert str(done.stdout).strip().endswith(")")


def test_what_a_killed_keeper_and_guard_left(tmp_path: Path, run: str, capsys: pytest.CaptureFixture[str]) -> None:
    """After keeper, guard and controller were killed at once the server that stays is ended, and its socket removed."""
    with subprocess.Popen(["sleep", "600"]) as controller:
        begun = limits.started(controller.pid) or 0
        made = Run(tmp_path, run=run, socket=socket_path(run), controller=(controller.pid, begun))
        made.start()
        client = made.client("worker")
        server = acquire(client, plan("daemon"), opened(client))
        # Servers die with their keeper; a helper that left its server does not.
        assert until(lambda: len(of_run(run)) == 4)
        keeper = status(client).pid
        stat = procfs.read_stat(keeper)
        assert stat is not None
        first = [keeper, stat.parent]
        for pid in first:
            os.kill(pid, signal.SIGSTOP)
        for pid in first:
            os.kill(pid, signal.SIGKILL)
        client.close()
        assert leftovers.find() == []  # its controller lives, and may start another keeper
        controller.kill()
    assert until(lambda: gone(server.pid) and len(of_run(run)) == 1)
    (helper,) = of_run(run)
    code, found = reap(capsys)
    assert code == 0
    assert [one["pid"] for one in found["ended"]] == [helper]
    assert gone(helper)
    assert not os.path.exists(socket_path(run))
