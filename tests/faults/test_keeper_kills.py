"""kill -9 of everything, one at a time: nothing may be left, whatever dies first."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from pytest_vram.errors import KeeperError, KeeperLost, KeeperUnavailable
from pytest_vram.keeper import KeeperClient, ensure, socket_path, start_time
from pytest_vram.keeper.messages import Finish, Hello, Note, Now, Open, Status
from pytest_vram.keeper.wire import frame
from pytest_vram.measure.procfs import read_stat
from pytest_vram.spec import DeviceSpec
from tests.faults.keeper_kit import (
    Run,
    acquire,
    closed,
    controller,
    gone,
    kill,
    of_run,
    opened,
    plan,
    status,
    until,
    wait_up,
)

WITHIN = 3.0


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    made = Run(tmp_path)
    yield made
    made.close()


def test_kill_of_the_controller(run: Run) -> None:
    """When the controller is killed in the middle of a test, servers and keeper are gone within 3 s."""
    process = controller(run, "acquire(client, plan('daemon', 'stubborn'), opened(client)); print(len(of_run(run.id)))")
    assert wait_up(process) == ["4"]  # guard, keeper, server, helper
    kill(process)
    assert until(lambda: not of_run(run.id), WITHIN)
    (end,) = run.journal("end")
    assert end["reason"] in ("the controller is gone", "the controller closed its connection")
    window = run.journal("window")[-1]
    assert (window["event"], window["abandoned"]) == ("close", True)


def test_kill_of_the_controller_takes_the_workers(run: Run) -> None:
    """Workers outlive a killed controller by seconds; the keeper ends those that introduced themselves."""
    code = """
import subprocess
worker = subprocess.Popen([sys.executable, "-c", '''
import signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
from pytest_vram.keeper import KeeperClient
client = KeeperClient(sys.argv[1], role="worker")
print("hello", flush=True)
time.sleep(120)
''', run.launch.socket], stdout=subprocess.PIPE)
worker.stdout.readline()
print(worker.pid)
"""
    process = controller(run, code)
    (worker,) = wait_up(process)
    kill(process)
    assert until(lambda: gone(int(worker)) and not of_run(run.id), WITHIN)


def test_kill_of_the_keeper(run: Run) -> None:
    """When the keeper is killed the guard ends its servers, callers hear of it, and a new keeper goes on."""
    run.start()
    client = run.client()
    running = acquire(client, plan("daemon"))
    helpers = status(client).backends[0]["pids"]
    os.kill(client.welcome.pid, signal.SIGKILL)
    with pytest.raises(KeeperLost, match="keeper.log"):
        opened(client)
    assert until(lambda: all(gone(pid) for pid in [running.pid, *helpers]), WITHIN)
    run.start()
    second = run.client()
    assert second.welcome.generation == 2
    assert acquire(second, plan("daemon")).generation == 2
    assert [line["generation"] for line in run.journal("keeper")] == [1, 2]


def test_kill_of_the_guard(run: Run) -> None:
    """When the guard is killed, the keeper ends the run in order."""
    run.start()
    client = run.client()
    running = acquire(client, plan("daemon"))
    stat = read_stat(client.welcome.pid)
    assert stat is not None
    os.kill(stat.parent, signal.SIGKILL)
    assert until(lambda: not of_run(run.id), WITHIN)
    assert gone(running.pid)
    assert "SIGTERM" in run.journal("end")[0]["reason"]


def test_kill_of_keeper_and_guard(run: Run) -> None:
    """When both are killed at once the servers die with their parent."""
    run.start()
    client = run.client()
    running = acquire(client, plan())
    stat = read_stat(client.welcome.pid)
    assert stat is not None
    for pid in (stat.parent, client.welcome.pid):
        os.kill(pid, signal.SIGKILL)
    assert until(lambda: gone(running.pid), WITHIN)
    os.unlink(run.launch.socket)


def test_kill_of_a_worker(run: Run) -> None:
    """A worker that is killed in a test and in a turn leaves both; the server serves on."""
    run.start()
    client = run.client()
    running = acquire(client, plan())
    code = """
import os, sys
from pytest_vram.keeper import KeeperClient
from pytest_vram.keeper.messages import *
client = KeeperClient(sys.argv[1], role="worker")
window = client.call(Open(kind="test", name="lost", exclusive=True)).window
turn = KeeperClient(sys.argv[1], role="turn")
turn.call(Turn(key=sys.argv[2], request="r", parent=window))
heir = os.fork()
if heir == 0:
    os.close(1)
    import time; time.sleep(60)  # holds the sockets open after the worker's death
    os._exit(0)
print(heir)
print("up", flush=True)
sys.stdin.read()
"""
    worker = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", code, run.launch.socket, running.key],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    (heir,) = wait_up(worker)
    waits = threading.Thread(target=lambda: closed(client, opened(client, "next")))
    waits.start()
    kill(worker)
    assert worker.stdin is not None
    worker.stdin.close()
    waits.join(10)
    assert not waits.is_alive()
    os.kill(int(heir), signal.SIGKILL)
    assert acquire(client, plan()).pid == running.pid
    abandoned = [line["name"] for line in run.journal("window") if line.get("abandoned")]
    assert abandoned == ["r", "lost"]


def test_interrupt_is_not_for_the_keeper(run: Run) -> None:
    """SIGINT does not end keeper, guard or servers; SIGTERM to the keeper ends the run in order."""
    run.start()
    client = run.client()
    running = acquire(client, plan())
    stat = read_stat(client.welcome.pid)
    assert stat is not None
    for pid in (client.welcome.pid, stat.parent):
        os.kill(pid, signal.SIGINT)
    assert acquire(client, plan()).pid == running.pid
    os.kill(client.welcome.pid, signal.SIGTERM)
    assert until(lambda: not of_run(run.id), WITHIN)


def test_servers_get_the_usual_signals(run: Run) -> None:
    """A server does not inherit that the keeper and its guard ignore Ctrl-C."""
    run.start()
    running = acquire(run.client(), plan())
    text = Path(f"/proc/{running.pid}/status").read_text()
    ignored = int(text.split("SigIgn:")[1].split()[0], 16)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        assert not ignored & 1 << (number - 1)


def test_one_keeper_for_many_callers(run: Run) -> None:
    """Processes that ask for a keeper at the same time get one."""
    text = msgspec.json.encode(run.launch).decode()
    code = """
import sys, msgspec
from pytest_vram.keeper import KeeperClient, ensure
from pytest_vram.keeper.messages import Launch
launch = msgspec.json.decode(sys.argv[1], type=Launch)
ensure(launch)
print(KeeperClient(launch.socket, role="viewer").welcome.pid)
"""
    callers = [
        subprocess.Popen([sys.executable, "-c", code, text], stdout=subprocess.PIPE, text=True) for _ in range(4)
    ]
    found = {caller.communicate(timeout=60)[0].strip() for caller in callers}
    assert len(found) == 1
    assert found != {""}
    assert len(run.journal("keeper")) == 1
    run.client()


def test_ensure_leaves_no_child(run: Run) -> None:
    """The keeper is no child of pytest: nobody has to wait for it, and no test sees it among its children."""
    me = os.getpid()
    before = {pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if _parent(pid) == me}
    run.start()
    run.client()
    after = {pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if _parent(pid) == me}
    assert after <= before


def _parent(pid: int) -> int | None:
    stat = read_stat(pid)
    return stat.parent if stat is not None else None


def test_a_keeper_that_cannot_start_says_why(tmp_path: Path) -> None:
    """What stands in the way of a keeper is in the error."""
    run = Run(tmp_path)
    (tmp_path / "file").write_text("")
    broken = msgspec.structs.replace(run.launch, folder=str(tmp_path / "file"))
    with pytest.raises(KeeperUnavailable, match="File exists|Not a directory"):
        ensure(broken)
    (tmp_path / "journal.jsonl").mkdir()
    with pytest.raises(KeeperUnavailable, match="could not be started"):
        run.start()
    assert until(lambda: not of_run(run.id))


def test_a_stopped_keeper_is_not_joined_by_a_second(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A keeper that listens but does not answer is an error, not a reason for another one."""
    monkeypatch.setattr(KeeperClient.__init__, "__kwdefaults__", {"role": "", "name": "", "timeout": 0.3})
    with socket.socket(socket.AF_UNIX) as stuck:
        stuck.bind(run.launch.socket)
        stuck.listen(1)
        with pytest.raises(
            KeeperUnavailable, match=rf"PID {os.getpid()}\) did not answer for .* No other one is started beside it"
        ):
            ensure(run.launch)
    os.unlink(run.launch.socket)


def test_malformed_frames_close_their_connection_only(run: Run) -> None:
    """Garbage, an oversized frame or a message that is no request ends that connection; the others go on."""
    run.start()
    client = run.client()
    hello = frame(Hello(role="viewer", pid=os.getpid(), start_time=start_time(os.getpid())))
    for data in (
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff\xff\xff\xff",
        b"\x00\x00\x00\x02{}",
        hello + b"\x00\x00\x00\x05nope!",
        hello + b"\x7f\xff\xff\xff" + b"x" * 100,
    ):
        with socket.socket(socket.AF_UNIX) as raw:
            raw.settimeout(10)
            raw.connect(run.launch.socket)
            raw.sendall(data)
            while raw.recv(65536):
                pass
    assert closed(client, opened(client)).t1 > 0


def test_viewers_only_look(run: Run) -> None:
    """A viewer can neither end the run nor start a server."""
    run.start()
    run.client()
    viewer = run.client("viewer")
    with pytest.raises(KeeperError, match="only look"):
        viewer.call(Finish())
    with pytest.raises(KeeperError, match="only look"):
        acquire(viewer, plan())
    assert status(viewer).run == run.id


def test_a_full_disk_does_not_end_the_run(run: Run) -> None:
    """Journal lines that cannot be written are counted and told; measuring goes on."""
    os.symlink("/dev/full", run.folder / "journal.jsonl")
    run.start()
    client = run.client()
    client.send(Note(kind="note", fields={"text": "lost"}))
    figures = closed(client, opened(client))
    assert figures.run
    assert any("No space left" in sentence for sentence in figures.trouble)
    assert "No space left" in (status(client).journal_trouble or "")
    client.call(Finish())


def test_notes_reach_the_journal(run: Run) -> None:
    """Lines of clients are written by the keeper, which keeps its own kinds to itself."""
    run.start()
    client = run.client()
    client.send(Note(kind="test", fields={"nodeid": "t", "outcome": "passed"}))
    client.send(Note(kind="end", fields={"reason": "forged"}))
    status(client)
    assert run.journal("test")[0]["outcome"] == "passed"
    assert run.journal("end") == []
    assert run.journal("note")[0]["of_kind"] == "end"


def test_serial_only_over_connections(run: Run) -> None:
    """A test that wants the device alone waits for the others, and holds back those that come later."""
    run.start()
    run.client()
    one, alone, later = run.client("worker"), run.client("worker"), run.client("worker")
    first = opened(one, "one")
    order: list[str] = []

    def enter(client: KeeperClient, name: str, exclusive: bool) -> None:
        window = opened(client, name, exclusive=exclusive)
        order.append(name)
        closed(client, window)

    waits = threading.Thread(target=enter, args=(alone, "alone", True))
    waits.start()
    time.sleep(0.1)  # the order of asking is what is tested
    newcomer = threading.Thread(target=enter, args=(later, "later", False))
    newcomer.start()
    time.sleep(0.1)
    assert order == []
    closed(one, first)
    waits.join(10)
    newcomer.join(10)
    assert order == ["alone", "later"]


def test_overlapping_tests_know_each_other(run: Run) -> None:
    """Tests that were open at the same time are named in each other's figures."""
    run.start()
    one, two = run.client(), run.client("worker")
    first, second = opened(one, "first"), opened(two, "second")
    assert closed(one, first).overlapped == ["second"]
    assert closed(two, second).overlapped == ["first"]


def test_socket_path_is_short_and_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the folder for temporary files, the path fits and only this user can enter; links are not followed."""
    import tempfile

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    made = Path(socket_path("run"))
    if made.parent.parent == tmp_path:
        assert made.parent.stat().st_mode & 0o777 == 0o700
    assert len(os.fsencode(str(made))) < 100
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / ("x" * 90)))
    assert len(os.fsencode(socket_path("run" * 50))) < 100
    short = Path(tempfile.mkdtemp(dir="/tmp"))
    try:
        monkeypatch.setattr(tempfile, "tempdir", str(short))
        os.symlink(tmp_path, short / f"vram-{os.getuid()}")
        assert Path(socket_path("run")).parent.parent != short
    finally:
        (short / f"vram-{os.getuid()}").unlink()
        short.rmdir()


def test_an_unknown_run_has_no_keeper() -> None:
    """A client where nothing listens is an error of one sentence."""
    with pytest.raises(KeeperUnavailable, match="No keeper answers"):
        KeeperClient(socket_path("no such run"), role="viewer")


def test_a_device_that_cannot_be_measured_is_left_out(tmp_path: Path) -> None:
    """Devices without a probe are not in the greeting, and the journal says why."""
    run = Run(tmp_path, devices=[DeviceSpec(kind="auto", text="auto")]).start()
    client = run.client()
    assert client.welcome.devices == []
    assert closed(client, opened(client)).run == {}
    assert "no GPU can be measured" in run.journal("note")[0]["text"]
    run.close()


def test_a_stopped_keeper_goes_on(run: Run) -> None:
    """A keeper that somebody stops is told to go on by its guard, and the run ends as ever."""
    client = run.start().client()
    running = acquire(client, plan())
    os.kill(client.welcome.pid, signal.SIGSTOP)
    assert status(client).backends[0]["pid"] == running.pid
    run.close()
    assert b"the keeper was stopped (SIGSTOP); it goes on" in (run.folder / "keeper.log").read_bytes()


def test_a_run_whose_keeper_and_guard_are_stopped_leaves_nothing(run: Run) -> None:
    """Who gives up on them has them go on for as long as it takes to end what they started."""
    client = run.start().client()
    running = acquire(client, plan())
    for pid in (client.welcome.guard, client.welcome.pid):
        os.kill(pid, signal.SIGSTOP)
    with pytest.raises(KeeperError):
        client.call(Status(), 0.5)
    assert running.pid in of_run(run.id)
    assert client.stopped
    client.dismiss()
    assert until(lambda: of_run(run.id) == [])


def test_a_forked_copy_is_no_controller(run: Run) -> None:
    """A copy of the controller cannot take part in the run, and its end does not end the run."""
    client = run.start().client()
    pid = os.fork()
    if pid == 0:
        try:
            KeeperClient(run.launch.socket, role="controller")
        except KeeperError as error:
            os._exit(7 if "forked copy" in str(error) else 8)
        os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    assert closed(client, opened(client)).trouble == []


def test_a_request_that_cannot_be_is_refused(run: Run) -> None:
    """A wrong argument is an error of its request; the keeper and the connection are unharmed."""
    client = run.start().client()
    window = opened(client)
    for request in (Open(kind="phase", name=5, parent=window), Now(settle=float("nan"))):  # type: ignore[arg-type]
        with pytest.raises(KeeperError, match="The keeper cannot do this|It is not possible to wait"):
            client.call(request)
        with pytest.raises(KeeperError, match="The keeper cannot do this"):
            client.call(request, timeout=10)
    client.send(Note(kind=5))  # type: ignore[arg-type]
    closed(client, window)
    assert [line for line in run.journal("note") if "was refused" in line["text"]]


def test_a_keeper_that_computes_without_end(run: Run) -> None:
    """A pattern that takes for ever ends the keeper and all that it owns, and the client is told why."""
    client = run.start().client()
    made = msgspec.structs.replace(plan("flood=1"), port_pattern="x((x|xx)+)+$y(1)")
    with pytest.raises(KeeperLost, match="computed without a pause, perhaps in a regular expression"):
        acquire(client, made)
    assert until(lambda: not of_run(run.id), WITHIN)
    os.unlink(run.launch.socket)
