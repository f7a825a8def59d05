"""Exceptions of signal handlers in the middle of a request: no reply goes to the wrong caller, nothing stays held."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import pytest

from pytest_vram.errors import KeeperError, KeeperLost
from pytest_vram.journal import Journal
from pytest_vram.keeper import KeeperClient, start_time, wire
from pytest_vram.keeper.messages import Closed, Figures, Hello, Note, Now, Open, Opened, Peek, Status, Welcome
from tests.conftest import Inner
from tests.faults.keeper_kit import Run, closed, opened, status, until


class Interrupt(BaseException):
    """What the handler of the alarm raises."""


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    made = Run(tmp_path)
    yield made
    made.close()


@pytest.fixture
def alarm() -> Iterator[Callable[[float], None]]:
    """Sets the alarm; 0 stops it."""

    def ring(number: int, frame: FrameType | None) -> None:
        raise Interrupt

    before = signal.signal(signal.SIGALRM, ring)
    yield lambda seconds: signal.setitimer(signal.ITIMER_REAL, seconds) and None
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def interrupted(alarm: Callable[[float], None], seconds: float, work: Callable[[], object]) -> bool:
    """Do this with the alarm set; whether it rang."""
    try:
        alarm(seconds)
        work()
        alarm(0)
    except Interrupt:
        return True
    return False


def test_a_wait_that_is_interrupted_is_given_up(run: Run, alarm: Callable[[float], None]) -> None:
    """A test whose wait for its lease ends with an exception holds nothing, and the next request gets its own reply."""
    run.start()
    holder, client = run.client(), run.client("worker")
    window = opened(holder, "holder", exclusive=True)
    assert interrupted(alarm, 0.2, lambda: opened(client, "gave up", exclusive=True))
    assert until(lambda: not status(holder).waiting)
    assert isinstance(client.call(Now()), Figures)
    closed(holder, window)
    closed(client, opened(client, "next", exclusive=True))
    assert [table["name"] for table in status(holder).windows] == []


def test_a_window_that_nobody_knows_of_is_closed(run: Run) -> None:
    """Where the exception comes after the window was opened, the window and its lease are given back all the same."""
    run.start()
    client, other = run.client(), run.client("worker")
    number = client.number()
    assert isinstance(client.call(Open(kind="test", name="lost", exclusive=True), number=number), Opened)
    client.abandon(number)
    closed(other, opened(other, "next", exclusive=True))
    assert not status(client).windows


def test_every_request_gets_its_own_reply(run: Run, alarm: Callable[[float], None]) -> None:
    """Requests that are interrupted at any moment leave the connection in step."""
    run.start()
    client = run.client()
    window = opened(client)
    draw = random.Random(4)
    rang = 0
    for _ in range(300):
        rang += interrupted(alarm, draw.uniform(2e-5, 1.5e-3), lambda: client.call(Now(window=window)))
        assert isinstance(client.call(Peek(window=window)), Closed)
    assert rang > 30
    (promise,) = client.ahead(Status())
    interrupted(alarm, 0.001, lambda: client.call(Now(settle=5.0)))
    assert isinstance(client.call(Now()), Figures)
    assert promise.result().number == promise.number
    closed(client, window)
    assert not status(client).windows


class Puppet:
    """A keeper that says what it is told to."""

    def __init__(self, path: Path) -> None:
        self.path = str(path / "s")
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.bind(self.path)
        self._listening.listen(1)
        threading.Thread(target=self._greet, daemon=True).start()
        self.client = KeeperClient(self.path, role="controller")

    def _greet(self) -> None:
        self.end, _ = self._listening.accept()
        hello = self.hear()
        self.say(Welcome(number=hello.number, pid=os.getpid(), run="r", folder="/", generation=1))

    def hear(self) -> wire.Request:
        size = wire.length(self.end.recv(4, socket.MSG_WAITALL))
        return wire.request(self.end.recv(size, socket.MSG_WAITALL))

    def say(self, *replies: wire.Reply) -> None:
        self.end.sendall(b"".join(map(wire.frame, replies)))

    def close(self) -> None:
        self.client.close()
        self.end.close()
        self._listening.close()


@pytest.fixture
def puppet(tmp_path: Path) -> Iterator[Puppet]:
    made = Puppet(tmp_path)
    yield made
    made.close()


def test_half_a_reply(puppet: Puppet, alarm: Callable[[float], None]) -> None:
    """What had come of a reply when the exception came is not lost."""
    half = wire.frame(Figures(number=2, t=7))
    puppet.end.sendall(half[:9])
    assert interrupted(alarm, 0.1, lambda: puppet.client.call(Now()))
    puppet.end.sendall(half[9:])
    puppet.say(Figures(number=3, t=8))
    reply = puppet.client.call(Now())
    assert isinstance(reply, Figures)
    assert reply.t == 8
    heard = [puppet.hear() for _ in range(3)]
    assert [type(one).__name__ for one in heard] == ["Now", "Abandon", "Now"]


def test_half_a_request(puppet: Puppet, alarm: Callable[[float], None]) -> None:
    """A message that was cut off in the middle goes out whole before the next one."""
    note = Note(kind="note", fields={"text": "x" * 4_000_000})
    assert interrupted(alarm, 0.3, lambda: puppet.client.send(note))
    heard: list[wire.Request] = []

    def hear() -> None:
        heard.extend(puppet.hear() for _ in range(2))
        puppet.say(Figures(number=heard[-1].number, t=7))

    hears = threading.Thread(target=hear)
    hears.start()
    assert isinstance(puppet.client.call(Now()), Figures)
    hears.join()
    assert heard[0] == note


def test_a_keeper_of_an_older_version(tmp_path: Path) -> None:
    """A keeper that numbers nothing refuses the greeting, and its reason is what the user reads."""
    with socket.socket(socket.AF_UNIX) as old:
        old.bind(str(tmp_path / "s"))
        old.listen(1)

        def refuse() -> None:
            end, _ = old.accept()
            with end:
                end.recv(65536)
                body = b'{"op":"failed","error":"KeeperError","message":"This keeper speaks protocol 1."}'
                end.sendall(len(body).to_bytes(4, "big") + body)

        answers = threading.Thread(target=refuse)
        answers.start()
        with pytest.raises(KeeperError, match="protocol 1"):
            KeeperClient(str(tmp_path / "s"), role="viewer")
        answers.join()


def test_a_client_of_an_older_version(run: Run) -> None:
    """A client that speaks the protocol of old is told that two versions are mixed."""
    run.start()
    run.client()
    with socket.socket(socket.AF_UNIX) as raw:
        raw.settimeout(10)
        raw.connect(run.launch.socket)
        raw.sendall(wire.frame(Hello(role="viewer", pid=os.getpid(), start_time=start_time(os.getpid()), protocol=1)))
        assert b"two versions" in raw.recv(65536)


def test_a_descriptor_that_means_something_else(run: Run) -> None:
    """A test that closes the connection's descriptor and opens its own there: said so at once, its own is left alone."""
    run.start()
    run.client()
    client = run.client("worker")
    mine, other = socket.socketpair()
    descriptor = client._socket.fileno()
    os.dup2(mine.fileno(), descriptor)
    other.setblocking(False)
    try:
        for ask in (lambda: client.call(Now()), lambda: client.send(Note(kind="note"))):
            with pytest.raises(KeeperLost, match="closed the descriptor"):
                ask()
            client._socket = socket.socket(fileno=descriptor)
        with pytest.raises(BlockingIOError):
            other.recv(1)
    finally:
        client._socket.detach()
        os.close(descriptor)
        mine.close()
        other.close()


SUITE = """
import time, signal, pytest
from pytest_vram import max_vram, serial_only

@serial_only()
@pytest.mark.timeout(1)
def test_waits(): pass

@serial_only()
def test_after(vram):
    assert vram.peak.bytes >= 0

@max_vram("1GB")
def test_last(vram):
    assert vram.now().bytes <= vram.peak.bytes
"""


HOLDER = """
import time
from pathlib import Path
from pytest_vram import serial_only

@serial_only()
def test_holds():
    Path("held").touch()
    while not Path("go").exists():
        time.sleep(0.02)
"""


@pytest.fixture
def holder(pytester: pytest.Pytester) -> Iterator[Path]:
    """The folder of another run whose test has the device to itself until there is a file ``go``."""
    folder = pytester.mkdir("holder")
    (folder / "test_holder.py").write_text(HOLDER)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--vram-device=cpu", "--vram-budget=1GB"]
    process = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL)
    assert until((folder / "held").exists, 30)
    yield folder
    (folder / "go").touch()
    process.wait(30)


@pytest.mark.parametrize("method", ["signal", "thread"])
def test_time_limits_of_tests(pytester: pytest.Pytester, inner: Inner, holder: Path, method: str) -> None:
    """A test whose time is over while it waits for its lease fails; the tests after it go on, or the run ends."""
    pytest.importorskip("pytest_timeout")
    suite = pytester.makepyfile(test_waiting=SUITE)
    threading.Timer(4.0, (holder / "go").touch).start()
    result = inner("--vram-device=cpu", "--vram-budget=1GB", f"--timeout-method={method}", str(suite))
    text = result.stdout.str() + result.stderr.str()
    assert "INTERNALERROR" not in text
    if method == "signal":
        result.assert_outcomes(passed=2, errors=1)
        assert "Timeout (>1.0s)" in text
    else:
        assert "Timeout" in text


def test_a_keeper_that_is_killed_while_a_test_waits(pytester: pytest.Pytester, holder: Path) -> None:
    """A test that only waits for its lease has not begun: it waits at the next keeper, and passes."""
    pytest.importorskip("xdist")
    suite = pytester.makepyfile(test_waiting=SUITE.replace("@pytest.mark.timeout(1)\n", ""))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--vram-device=cpu", "--vram-budget=1GB"]
    process = subprocess.Popen([*command, "-n2", str(suite)], cwd=pytester.path, stdout=subprocess.PIPE, text=True)

    def waiting() -> list[int]:
        for path in (pytester.path / ".vram" / "runs").glob("*/journal.jsonl"):
            lines = list(Journal(path))
            if any(line["kind"] == "lease" for line in lines):
                return [line["pid"] for line in lines if line["kind"] == "keeper"]
        return []

    assert until(lambda: bool(waiting()), 30)
    os.kill(waiting()[-1], signal.SIGKILL)
    assert until(lambda: len(waiting()) == 2, 30)
    (holder / "go").touch()
    text, _ = process.communicate(timeout=60)
    assert "3 passed" in text


def test_a_time_limit_while_the_test_is_judged(pytester: pytest.Pytester, inner: Inner) -> None:
    """An exception that comes while the figures of a test are waited for is that test's failure, and no internal error."""
    pytester.makeconftest(
        "import pytest\nfrom pytest_vram.keeper import KeeperClient\nfrom pytest_vram.keeper.messages import Close\n"
        "wait, rung = KeeperClient._wait, []\n"
        "def ring(self, promise):\n"
        "    if isinstance(promise.request, Close) and not rung:\n"
        "        rung.append(1)\n        pytest.fail('Timeout (>1.0s)')\n"
        "    wait(self, promise)\n"
        "KeeperClient._wait = ring\n"
    )
    pytester.makepyfile(
        "from pytest_vram import max_vram\n@max_vram('1GB')\ndef test_one(): pass\n@max_vram('1GB')\ndef test_two(): pass\n"
    )
    result = inner("--vram-device=cpu", "--vram-budget=1GB")
    result.assert_outcomes(passed=1, failed=1)
    assert "Timeout (>1.0s)" in result.stdout.str()


def test_pings_are_answered_at_once(run: Run) -> None:
    """A sign of life comes while the connection waits for a lease."""
    run.start()
    holder, client = run.client(), run.client("worker")
    window = opened(holder, exclusive=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pytest_vram.keeper.client._SILENCE_SECONDS", 0.05)
        patch.setattr("pytest_vram.keeper.client._ANSWER_SECONDS", 0.5)
        patch.setattr("pytest_vram.keeper.client._MEANWHILE_SECONDS", 0.05)
        waits = threading.Thread(target=lambda: closed(client, opened(client, "next", exclusive=True)))
        waits.start()
        waits.join(1.2)
        assert waits.is_alive()  # for longer than a keeper may be silent
        closed(holder, window)
        waits.join(10)
        assert not waits.is_alive()


def test_a_keeper_that_gives_no_sign_of_life(puppet: Puppet, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wait for a lease ends when the keeper is silent, with its PID, and without the claim that it is dead."""
    monkeypatch.setattr("pytest_vram.keeper.client._SILENCE_SECONDS", 0.05)
    monkeypatch.setattr("pytest_vram.keeper.client._ANSWER_SECONDS", 0.3)
    monkeypatch.setattr("pytest_vram.keeper.client._MEANWHILE_SECONDS", 0.05)
    began = time.monotonic()
    with pytest.raises(KeeperLost, match=rf"\(PID {os.getpid()}\) did not answer for 0.3 s and is alive: it hangs"):
        puppet.client.call(Open(kind="test", name="t"))
    assert time.monotonic() - began < 5
    puppet_heard = [puppet.hear() for _ in range(2)]
    assert [type(one).__name__ for one in puppet_heard] == ["Open", "Ping"]
