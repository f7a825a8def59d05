"""Servers that die, hang, lie, or do not want to go."""

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

import httpx
import pytest

from pytest_vram.errors import BackendDied, BackendError, BootFailed, BootTimeout
from pytest_vram.keeper import KeeperClient
from pytest_vram.keeper.logs import MOST
from pytest_vram.keeper.messages import (
    Closed,
    EndTurn,
    Figures,
    Finish,
    Granted,
    Now,
    Restart,
    Running,
    Stop,
    Turn,
)
from pytest_vram.readings import Reading
from pytest_vram.spec import LaunchPlan
from tests.faults.keeper_kit import Run, acquire, closed, gone, of_run, opened, plan, status, until


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    made = Run(tmp_path).start()
    yield made
    made.close()


@pytest.fixture
def client(run: Run) -> KeeperClient:
    return run.client()


def test_a_server_is_started_once_and_shared(run: Run, client: KeeperClient) -> None:
    """Equal plans share one server over processes; only the first to ask gets it fresh."""
    first = acquire(client, plan())
    other = run.client("worker")
    second = acquire(other, plan())
    assert (first.fresh, second.fresh) == (True, False)
    assert first.pid == second.pid
    assert second.generation == 1
    assert httpx.get(first.url + "/health").status_code == 200


def test_waiting_for_the_same_boot(run: Run, client: KeeperClient) -> None:
    """Two that ask at the same time wait for one boot."""
    found: list[Running] = []
    others = [run.client("worker") for _ in range(2)]
    threads = [threading.Thread(target=lambda c=c: found.append(acquire(c, plan()))) for c in others]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len({running.pid for running in found}) == 1
    assert len(found) == 2


def test_another_variant_replaces_an_unused_one(run: Run, client: KeeperClient) -> None:
    """A new variant of a backend ends the old one, unless an open window uses it."""
    window = opened(client)
    first = acquire(client, plan(), window)
    second = acquire(client, plan("variant"))
    assert not gone(first.pid)
    closed(client, window)
    third = acquire(client, plan("another"))
    assert gone(first.pid)
    assert gone(second.pid)
    assert third.generation == 3
    assert [backend["pid"] for backend in status(client).backends] == [third.pid]


def test_death_in_boot(run: Run, client: KeeperClient) -> None:
    """A server that dies while it starts is an error with its exit code and last words."""
    with pytest.raises(BootFailed, match=r"exited with code 7") as caught:
        acquire(client, plan("die"))
    assert "cannot do it" in str(caught.value)
    assert status(client).backends == []


def test_illegal_instruction(run: Run, client: KeeperClient) -> None:
    """A build for another CPU is told in words."""
    with pytest.raises(BootFailed, match=r"SIGILL: this build uses CPU instructions that this machine lacks"):
        acquire(client, plan("crash"))


def test_hang_in_boot(run: Run, client: KeeperClient) -> None:
    """A server that hangs is ended at its boot timeout, with the phase it reached; the next one starts."""
    with pytest.raises(BootTimeout, match=r"not ready within 0.5 s .* its log named no port"):
        acquire(client, plan("hang", boot_timeout=0.5))
    assert until(lambda: len(of_run(run.id)) == 2)  # keeper and guard
    assert acquire(client, plan()).generation == 2


def test_health_that_never_comes(run: Run, client: KeeperClient) -> None:
    """What the health check said last is in the message."""
    with pytest.raises(BootTimeout, match=r"its health check said: HTTP status 503"):
        acquire(client, plan("loading", boot_timeout=1.0))


def test_no_such_program(run: Run, client: KeeperClient) -> None:
    """A program that does not exist is named."""
    with pytest.raises(BootFailed, match=r"/no/such/server: No such file or directory"):
        acquire(client, LaunchPlan(name="x", engine="command", argv=["/no/such/server"], url="http://127.0.0.1:1"))


def test_port_of_a_stranger(run: Run, client: KeeperClient) -> None:
    """A fixed port that somebody else holds is refused before anything starts, naming the holder."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(BootFailed, match=rf"port {port} is held by process {os.getpid()} \("):
            acquire(client, plan(port=port))


def test_a_port_that_is_not_its_own(run: Run, client: KeeperClient) -> None:
    """A server that names a stranger's port is not believed."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(BootFailed, match=rf"says that it listens on port {port}, .* held by process {os.getpid()}"):
            acquire(client, plan("lie", str(port)))


def test_the_key_is_secret(run: Run, client: KeeperClient) -> None:
    """The random key reaches the server and the client, and neither message nor journal."""
    with pytest.raises(BootFailed, match=r"my key is \*\*\*"):
        acquire(client, plan("secret", secret_env="KEY"))
    running = acquire(client, plan(secret_env="KEY"))
    assert running.api_key is not None
    assert len(running.api_key) >= 32
    assert running.api_key not in (run.folder / "journal.jsonl").read_text()


def test_death_in_use(run: Run, client: KeeperClient) -> None:
    """A server that dies under a test is told to that test; the next one gets a fresh server."""
    window = opened(client)
    first = acquire(client, plan(), window)
    with pytest.raises(httpx.TransportError):
        httpx.get(first.url + "/crash")
    # Its connections are closed a moment before it is gone.
    assert until(lambda: bool(status(client).backends) is False)
    figures = closed(client, window)
    assert len(figures.deaths) == 1
    assert f"agent#1 (PID {first.pid}) was killed by SIGSEGV after" in figures.deaths[0]
    with pytest.raises(BackendDied, match="SIGSEGV"):
        run.client("turn").call(Turn(key=first.key, request="r"))
    second = acquire(client, plan())
    assert (second.generation, second.fresh) == (2, True)
    assert [line["state"] for line in run.journal("backend")][:3] == ["starting", "ready", "died"]


def test_a_failed_assertion_is_in_the_sentence(client: KeeperClient) -> None:
    """A server that ends itself long after its boot is quoted with its reason, not with a debugger's backtrace."""
    window = opened(client)
    running = acquire(client, plan(), window)
    with pytest.raises(httpx.TransportError):
        httpx.get(running.url + "/assert")
    assert until(lambda: bool(status(client).backends) is False)
    (death,) = closed(client, window).deaths
    assert "was killed by SIGABRT" in death
    assert "It says: /src/vocab.cpp:7: GGML_ASSERT(tokenizer) failed." in death
    assert "libc.so" not in death


def test_whoever_waits_for_a_turn_hears_of_a_death(run: Run, client: KeeperClient) -> None:
    """A death wakes those who wait for a turn."""
    running = acquire(client, plan())
    holder = run.client("turn")
    assert isinstance(holder.call(Turn(key=running.key, request="one")), Granted)
    caught: list[BaseException] = []

    def wait() -> None:
        try:
            run.client("turn").call(Turn(key=running.key, request="two"))
        except BackendError as error:
            caught.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    os.kill(running.pid, signal.SIGKILL)
    thread.join(10)
    assert len(caught) == 1
    assert "SIGKILL" in str(caught[0])


def test_turns_are_serial_over_connections(run: Run, client: KeeperClient) -> None:
    """Requests have their turn in the order of asking; a connection that ends gives its turn back."""
    running = acquire(client, plan())
    one, two, three = (run.client("turn") for _ in range(3))
    assert isinstance(one.call(Turn(key=running.key, request="one")), Granted)
    order: list[str] = []

    def wait(who: KeeperClient, name: str) -> None:
        who.call(Turn(key=running.key, request=name))
        order.append(name)
        who.call(EndTurn(record={"id": name}))

    second = threading.Thread(target=wait, args=(two, "two"))
    second.start()
    assert until(lambda: True)
    assert run.client("turn").call(Turn(key=running.key, request="free", serial=False)) is not None
    one.close()
    second.join(10)
    wait(three, "three")
    assert order == ["two", "three"]
    assert [line["id"] for line in run.journal("request")] == ["two", "three"]


def test_restart_is_the_next_generation(run: Run, client: KeeperClient) -> None:
    """A restart ends the server and starts its next generation, which the windows go on with."""
    window = opened(client)
    first = acquire(client, plan(), window)
    second = client.call(Restart(key=first.key, window=window))
    assert isinstance(second, Running)
    assert gone(first.pid)
    assert (second.generation, second.fresh) == (2, True)
    assert closed(client, window).deaths == []


def test_a_stubborn_server_is_killed(run: Run, client: KeeperClient) -> None:
    """What ignores SIGTERM gets SIGKILL after its grace."""
    running = acquire(client, plan("stubborn", stop_grace=0.2))
    client.call(Stop(key=running.key))
    assert gone(running.pid)
    assert run.journal("backend")[-1]["exit_code"] == -9


def test_a_stopped_server_does_not_hold_the_keeper(run: Run, client: KeeperClient) -> None:
    """SIGSTOP to a server: figures keep coming, and it can be ended."""
    running = acquire(client, plan())
    os.kill(running.pid, signal.SIGSTOP)
    samples = status(client).sampling
    assert samples is not None
    before = samples.samples
    assert until(lambda: (status(client).sampling or samples).samples > before + 5)
    client.call(Stop(key=running.key))
    assert gone(running.pid)


@pytest.mark.parametrize("how", ["daemon", "bare"])
def test_helpers_that_leave_their_parent_go_too(run: Run, client: KeeperClient, how: str) -> None:
    """A helper that forked twice, with a session of its own or without its environment, ends with its server."""
    running = acquire(client, plan(how))
    assert until(lambda: len(status(client).backends[0]["pids"]) == 2)
    backend = status(client).backends[0]
    helpers = set(backend["pids"]) - {running.pid}
    assert len(helpers) == 1
    client.call(Stop(key=running.key))
    assert all(gone(pid) for pid in helpers)


def test_helpers_of_a_server_that_died(run: Run, client: KeeperClient) -> None:
    """When the server is killed, its helpers do not survive it."""
    running = acquire(client, plan("daemon"))
    helpers = set(status(client).backends[0]["pids"])
    os.kill(running.pid, signal.SIGKILL)
    assert until(lambda: all(gone(pid) for pid in helpers))


def test_boot_peak_counts_for_every_test(run: Run, client: KeeperClient) -> None:
    """What a server held only while it started counts for a test that came after the boot."""
    made = plan(f"burst={200 << 20}")
    acquire(client, made)
    window = opened(client)
    running = acquire(client, made, window)
    assert not running.fresh
    figures = closed(client, window)
    for peak in (figures.run["host"], figures.backend["host"], figures.host):
        assert isinstance(peak, Reading)
        assert peak.bytes >= 200 << 20
    assert figures.boot
    assert "boot of agent#1" in (figures.run["host"].note or "")  # type: ignore[union-attr]
    assert isinstance(figures.phases["start"]["host"], Reading)
    assert figures.phases["start"]["host"].bytes >= 200 << 20
    other = closed(client, opened(client))
    assert not other.boot
    assert isinstance(other.run["host"], Reading)
    assert other.run["host"].upper < 100 << 20


def test_ready_is_more_than_start(run: Run, client: KeeperClient) -> None:
    """What a server holds when it is ready is told beside what it held at its start."""
    running = acquire(client, plan(f"hold={200 << 20}"))
    ready, start = running.at_ready["host"], running.at_start["host"]
    assert isinstance(ready, Reading)
    assert isinstance(start, Reading)
    assert ready.bytes - start.bytes >= 200 << 20


def test_attaching_by_pid_and_name(run: Run, client: KeeperClient) -> None:
    """A server that already runs is watched, and never ended."""
    from tests.faults.keeper_kit import SERVER

    daemon = subprocess.Popen(
        [sys.executable, "-S", "-c", SERVER, "0", f"hold={64 << 20}"], stdout=subprocess.PIPE, text=True
    )
    try:
        assert daemon.stdout is not None
        line = ""
        while "listening" not in line:
            line = daemon.stdout.readline()
        url = line.split(" on ")[1].strip()
        attach = LaunchPlan(name="d", engine="attach", url=url, health="/", pid=daemon.pid, own_port=False)
        window = opened(client)
        running = acquire(client, attach, window)
        assert running.pid == daemon.pid
        now = client.call(Now(window=window))
        assert isinstance(now, Figures)
        figure = now.backend["host"]
        assert isinstance(figure, Reading)
        assert figure.bytes >= 64 << 20
        with pytest.raises(BackendError, match="attached"):
            client.call(Restart(key=running.key))
        client.call(Stop(key=running.key))
        assert daemon.poll() is None
        acquire(client, attach, window)
        daemon.kill()
        daemon.wait()
        assert until(lambda: status(client).backends == [])
        assert "ended after" in closed(client, window).deaths[0]
        with pytest.raises(BootFailed, match="no process with PID"):
            acquire(client, attach)
        with pytest.raises(BootFailed, match="no process is called 'no-such-daemon'"):
            acquire(client, LaunchPlan(name="d", engine="attach", url=url, process="no-such-daemon"))
    finally:
        daemon.kill()
        daemon.wait()
        assert daemon.stdout is not None
        daemon.stdout.close()


def test_attaching_to_one_that_does_not_answer(run: Run, client: KeeperClient) -> None:
    """Figures of a process that is not the one that answers are in doubt; nobody at the address is an error, soon."""
    running = acquire(client, plan(), opened(client, "other"))
    port = int(running.url.rpartition(":")[2])
    with subprocess.Popen(["sleep", "60"]) as sleeper:
        attach = LaunchPlan(name="d", engine="attach", url=running.url, health="/", pid=sleeper.pid, own_port=False)
        window = opened(client)
        acquire(client, attach, window)
        figures = closed(client, window)
        for table in (figures.run, figures.backend):
            peak = table["host"]
            assert isinstance(peak, Reading)
            assert not peak.exact
            assert f"port {port} of d#1 is answered by process {running.pid} (python" in (peak.note or "")
        with socket.socket() as closed_port:
            closed_port.bind(("127.0.0.1", 0))
            url = f"http://127.0.0.1:{closed_port.getsockname()[1]}"
            with pytest.raises(BootFailed, match="cannot be attached: nothing answers at http"):
                acquire(client, LaunchPlan(name="e", engine="attach", url=url, health="/", pid=sleeper.pid))
        sleeper.kill()


def test_finish_ends_everything(run: Run, client: KeeperClient) -> None:
    """After Finish nothing of the run is alive, and the journal says how it ended."""
    acquire(client, plan("daemon"))
    acquire(
        client,
        plan(
            "hang",
            name="slow",
            boot_timeout=0.3,
            health=None,
            url="",
            port_pattern=None,
            log_patterns={"ready": "starting"},
        ),
    )
    before = time.monotonic()
    client.call(Finish(outcome="passed"))
    assert time.monotonic() - before < 3
    assert until(lambda: not of_run(run.id))
    end = run.journal("end")
    assert [line["outcome"] for line in end] == ["passed"]


def test_log_of_a_named_engine(run: Run, client: KeeperClient) -> None:
    """A command whose log is that of a known engine is ready, and goes through its phases, by that engine's lines."""
    words = (
        "INFO 03-08 16:44:20 [gpu_model_runner.py:4979] Starting to load model m...",
        "INFO 03-08 16:44:29 [gpu_worker.py:772] Available KV cache memory: 2.5 GiB",
        "INFO:     Application startup complete.",
    )
    script = f"print({chr(10).join(words)!r}, flush=True); import time; time.sleep(60)"
    argv = [sys.executable, "-S", "-c", script]
    acquire(client, LaunchPlan(name="v", engine="command", log="vllm", argv=argv, boot_timeout=20.0))
    client.call(Finish(outcome="passed"))
    assert [line["name"] for line in run.journal("phase")] == ["start", "weights", "kv", "ready"]


def test_finish_while_a_server_boots(run: Run, client: KeeperClient) -> None:
    """A run that ends while a server boots does not wait for it."""
    caught: list[BaseException] = []

    def boot() -> None:
        try:
            acquire(run.client("worker"), plan("hang", boot_timeout=60.0))
        except (BackendError, Exception) as error:  # noqa: BLE001
            caught.append(error)

    thread = threading.Thread(target=boot)
    thread.start()
    assert until(lambda: bool(status(client).backends))
    client.call(Finish(outcome="interrupted"))
    thread.join(10)
    assert len(caught) == 1
    assert until(lambda: not of_run(run.id))


def test_peek_leaves_the_window_open(run: Run, client: KeeperClient) -> None:
    """A look at an open window gives figures so far and closes nothing."""
    from pytest_vram.keeper.messages import Peek

    window = opened(client)
    acquire(client, plan(f"hold={32 << 20}"), window)
    assert isinstance(client.call(Peek(window=window)), Closed)
    assert isinstance(closed(client, window), Closed)


def test_a_flood_of_words(run: Run, client: KeeperClient) -> None:
    """A server that writes without end fills neither the disk nor the message about its death."""
    running = acquire(client, plan("flood=700"))
    window = opened(client)
    acquire(client, plan("flood=700"), window)
    log = Path(running.log)
    assert until(lambda: log.stat().st_size <= MOST)
    assert log.read_bytes()[:20] == b"starting\n000000 xxxx"
    os.kill(running.pid, signal.SIGSEGV)
    assert until(lambda: bool(status(client).backends) is False)
    (death,) = closed(client, window).deaths
    assert "MiB in the middle of it are left out):" in death
    assert "\n  the last words\n" in death
    notes = [line["text"] for line in run.journal("note")]
    assert [note for note in notes if "is over 256 MiB" in note or "256.0 MiB" in note]
    assert [note for note in notes if "were left out" in note]
