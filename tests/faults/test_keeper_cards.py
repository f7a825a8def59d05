"""What windows say of cards: who else is on them, what was left behind, and who holds what. On the fake driver."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pytest_vram.errors import BootFailed
from pytest_vram.keeper import KeeperClient
from pytest_vram.keeper.messages import Closed, Finish, Stop
from pytest_vram.readings import Reading, Unmeasurable
from pytest_vram.spec import DeviceSpec
from pytest_vram.testing.fake_nvml import Card, FakeDriver, FakeDriverUnavailable, Process, Script, fake_nvml
from tests.faults.keeper_kit import Run, acquire, closed, gone, opened, plan, status, until

MIB = 1 << 20
GIB = 1 << 30
#: What is in use before the run, by nobody who is listed.
BEFORE = 300 * MIB

#: Something that runs already, with a parent that is gone; prints its PID and port.
DAEMON = r"""
import os, socket, sys, time
if os.fork():
    os._exit(0)
os.setsid()
listening = socket.create_server(("127.0.0.1", 0))
print(os.getpid(), listening.getsockname()[1], flush=True)
sys.stdout.close()
os.close(1)
kept = []
while True:
    kept.append(listening.accept())
"""


@pytest.fixture
def driver() -> Iterator[FakeDriver]:
    card = Card(name="NVIDIA L4", total=24 * GIB, hidden=BEFORE)
    try:
        with fake_nvml([card, msgspec.structs.replace(card, name="NVIDIA L4 b")]) as made:
            yield made
    except FakeDriverUnavailable as reason:
        pytest.skip(str(reason))


#: Begins another process for each line that it gets, and tells its PID.
FORKER = """
import os, sys
for line in sys.stdin:
    pid = os.fork()
    if not pid:
        os.execve("/bin/sleep", ["sleep", "60"], {})
    print(pid, flush=True)
"""


@pytest.fixture
def forker() -> Iterator[Callable[[], int]]:
    """Begins a process that is not of the run, while it goes on; answers its PID. It runs before the run begins."""
    started: list[int] = []
    parent = subprocess.Popen(
        ["setsid", "--fork", sys.executable, "-S", "-c", FORKER],
        env={},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )

    def begin() -> int:
        assert parent.stdin is not None
        assert parent.stdout is not None
        parent.stdin.write("go\n")
        parent.stdin.flush()
        started.append(int(parent.stdout.readline()))
        return started[-1]

    yield begin
    for pid in started:
        os.kill(pid, signal.SIGKILL)
    parent.communicate()


@pytest.fixture
def daemon() -> Iterator[tuple[int, int]]:
    """PID and port of a process that is not of the run. It runs before the run begins."""
    done = subprocess.run(
        [sys.executable, "-S", "-c", DAEMON], env={}, stdout=subprocess.PIPE, text=True, check=True, timeout=10
    )
    pid, port = map(int, done.stdout.split())
    yield pid, port
    os.kill(pid, 9)


@pytest.fixture
def run(tmp_path: Path, driver: FakeDriver, daemon: tuple[int, int]) -> Iterator[Run]:
    made = Run(tmp_path, devices=[DeviceSpec(kind="cuda", text="cuda")], interval_ms=5.0).start()
    yield made
    made.close()


@pytest.fixture
def client(run: Run) -> KeeperClient:
    return run.client()


def sampled(client: KeeperClient, count: int = 3) -> None:
    """Wait until the keeper has read the cards a few times more."""

    def samples() -> int:
        found = status(client).sampling
        return found.samples if found is not None else 0

    before = samples()
    assert until(lambda: samples() >= before + count)


def held(figures: Closed, table: str, label: str = "gpu0") -> int:
    figure = getattr(figures, table)[label]
    assert isinstance(figure, Reading), figure
    return figure.bytes


def notes(run: Run) -> list[str]:
    return [line["text"] for line in run.journal("note") if "text" in line]


# ---------------------------------------------------------------- strangers


def test_a_daemon_that_the_test_talks_to(client: KeeperClient, driver: FakeDriver, daemon: tuple[int, int]) -> None:
    """A daemon that loads a model for the test spoils the verdict, by name and PID; its memory is in no figure."""
    pid, port = daemon
    driver.process(pid, 200 * MIB)
    sampled(client)
    window = opened(client)
    with socket.create_connection(("127.0.0.1", port)):
        driver.process(pid, 5 * GIB)
        sampled(client, 8)
    figures = closed(client, window)
    (found,) = figures.strangers
    assert (found.pid, found.device, found.held) == (pid, "gpu0", 5 * GIB)
    assert found.grew == 5 * GIB - 200 * MIB
    assert found.decisive
    assert found.talked_to
    assert f"process {os.getpid()} has a connection to its port {port}" in found.why
    assert found.name.startswith("python")
    assert held(figures, "run") == 0
    assert held(figures, "device") == BEFORE + 5 * GIB


def test_a_stranger_on_its_own(client: KeeperClient, driver: FakeDriver, daemon: tuple[int, int]) -> None:
    """Somebody else's growth is named and decides nothing, as long as figures are by process and nobody talks to it."""
    pid, _ = daemon
    window = opened(client)
    driver.process(pid, 2 * GIB)
    sampled(client)
    driver.update(processes=())
    sampled(client)
    (found,) = closed(client, window).strangers
    assert (found.pid, found.grew, found.held, found.decisive, found.why) == (pid, 2 * GIB, 0, False, "")
    assert closed(client, opened(client)).strangers == []


def test_a_child_of_a_test_is_no_stranger(client: KeeperClient, driver: FakeDriver) -> None:
    """What a test starts is of the run from its first sample on."""
    window = opened(client)
    with subprocess.Popen(["sleep", "60"]) as sleeper:
        driver.process(sleeper.pid, 3 * GIB)
        sampled(client)
        figures = closed(client, window)
        sleeper.kill()
    assert figures.strangers == []
    assert held(figures, "run") == 3 * GIB
    assert figures.t0 < figures.peak_at["gpu0"].at <= figures.t1
    assert figures.peak_at["gpu0"].since < figures.peak_at["gpu0"].at


# ---------------------------------------------------------------- whose bytes


def test_a_router_parent_with_a_context_of_its_own(client: KeeperClient, driver: FakeDriver) -> None:
    """The whole tree of a server counts on every card: a parent that only routes shows up with its PID and its bytes,
    and what the child holds is the same with and without it."""
    seen = []
    for context in (0, 500 * MIB):
        window = opened(client)
        running = acquire(client, plan("daemon", name=f"router{context}"), window)
        assert until(lambda: len(status(client).backends[0]["pids"]) == 2)
        (child,) = set(status(client).backends[0]["pids"]) - {running.pid}
        for card in (0, 1):
            driver.process(child, 5 * GIB, card=card)
            if context:
                driver.process(running.pid, context, card=card)
        sampled(client)
        figures = closed(client, window)
        shares = {(one.device, one.pid): one for one in figures.shares}
        for label in ("gpu0", "gpu1"):
            assert held(figures, "backend", label) == held(figures, "run", label) == 5 * GIB + context
            assert shares[(label, child)].bytes == 5 * GIB
            if context:
                assert shares[(label, running.pid)].bytes == context
                assert shares[(label, running.pid)].backend == f"router{context}#1"
        seen.append(figures)
        client.call(Stop(key=running.key))
    assert held(seen[1], "run") - held(seen[0], "run") == 500 * MIB


def test_replicas_share_a_card(client: KeeperClient, driver: FakeDriver) -> None:
    """Three backends of one test are told apart, each with what it holds, and add up."""
    sizes = {"a": 30 * MIB, "b": 20 * MIB, "c": 10 * MIB}
    window = opened(client)
    for name, size in sizes.items():
        driver.process(acquire(client, plan(name=name), window).pid, size)
    sampled(client)
    figures = closed(client, window)
    assert [(one.backend, one.bytes) for one in figures.shares] == [(f"{name}#1", size) for name, size in sizes.items()]
    assert held(figures, "run") == sum(sizes.values())


# ---------------------------------------------------------------- left behind


def test_the_test_that_left_memory_behind_is_named(client: KeeperClient, driver: FakeDriver) -> None:
    """Memory in pytest's own process and in a process that outlived its test is told at the next test's window, each
    with the test that left it; what was freed is not."""
    me = os.getpid()
    driver.process(me, 400 * MIB)  # a context from before the tests
    assert closed(client, opened(client, "test_before")).residues == []
    window = opened(client, "test_cosmos")
    driver.process(me, 20 * GIB)
    assert held(closed(client, window), "run") == 20 * GIB
    with subprocess.Popen(["sleep", "60"]) as sleeper:
        window = opened(client, "test_hunyuan")
        driver.process(sleeper.pid, 2 * GIB)
        closed(client, window)
        figures = closed(client, opened(client, "test_longcat"))
        assert [(one.test, one.device, one.bytes, [pid for pid, _ in one.pids]) for one in figures.residues] == [
            ("test_cosmos", "gpu0", 20 * GIB - 400 * MIB, [me]),
            ("test_hunyuan", "gpu0", 2 * GIB, [sleeper.pid]),
        ]
        assert figures.residues[1].pids == [(sleeper.pid, "sleep 60")]
        sleeper.kill()
    driver.process(me, 400 * MIB)
    assert closed(client, opened(client, "test_last")).residues == []


def test_what_of_a_leftover_is_in_the_peak(client: KeeperClient, driver: FakeDriver) -> None:
    """A test that frees what the one before left, and then takes as much itself, has none of it in its peak; one that
    frees it after its own peak has all of it."""
    me = os.getpid()
    driver.process(me, 400 * MIB)
    closed(client, opened(client, "test_before"))
    for order in ("frees first", "frees last"):
        window = opened(client, "test_leaks")
        driver.process(me, 3 * GIB)
        closed(client, window)
        window = opened(client, "test_victim")
        for size in (400 * MIB, 4 * GIB) if order == "frees first" else (4 * GIB, 400 * MIB):
            driver.process(me, size)
            sampled(client)
        figures = closed(client, window)
        assert held(figures, "run") == 4 * GIB
        (left,) = figures.residues
        there = 0 if order == "frees first" else 3 * GIB - 400 * MIB
        assert (left.test, left.lasted, left.at_peak, left.at_peak_most) == ("test_leaks", 0, there, there)
        driver.process(me, 400 * MIB)


def test_a_process_that_hides_who_started_it(
    forker: Callable[[], int], client: KeeperClient, driver: FakeDriver
) -> None:
    """What a test has started through a pipe to something with an environment of its own is no process of the run, and
    nobody is seen to talk to it: that it began during the test, as the same user and in the same control group, is
    enough to refuse a verdict. The next test did not start it."""
    window = opened(client, "test_daemon")
    pid = forker()
    driver.process(pid, 5 * GIB)
    sampled(client)
    (found,) = closed(client, window).strangers
    assert (found.pid, found.grew, found.decisive) == (pid, 5 * GIB, True)
    assert "may have been started by it in a way that hides it" in found.why
    window = opened(client, "test_after")
    driver.process(pid, 6 * GIB)
    sampled(client)
    assert [(one.pid, one.decisive) for one in closed(client, window).strangers] == [(pid, False)]


def test_what_is_left_at_the_end(run: Run, client: KeeperClient, driver: FakeDriver) -> None:
    """What the last test left behind has no later test to tell of it: the journal's last lines do."""
    with subprocess.Popen(["sleep", "60"]) as sleeper:
        window = opened(client, "test_last")
        driver.process(sleeper.pid, 2 * GIB)
        closed(client, window)
        client.call(Finish())
        sleeper.kill()
    (text,) = [text for text in notes(run) if "behind" in text]
    assert text == f"test_last left 2,048 MiB on gpu0 behind until the end: process {sleeper.pid} (sleep 60)"


def test_a_boot_without_room_says_who_has_it(run: Run, client: KeeperClient, driver: FakeDriver) -> None:
    """An engine that finds too little of the card fails with the names of those who hold it: the leftover with its
    test, and the stranger."""
    said = (
        "ValueError: Free memory on device cuda:0 (19.77/22.05 GiB) on startup is less than desired GPU memory"
        " utilization (0.9, 19.84 GiB)."
    )
    made = plan(engine="vllm", argv=[sys.executable, "-S", "-c", f"print({said!r}); raise SystemExit(1)"])
    with subprocess.Popen(["sleep", "60"]) as sleeper:
        window = opened(client, "test_earlier")
        driver.process(sleeper.pid, int(2.28 * GIB))
        closed(client, window)
        with pytest.raises(BootFailed) as failed:
            acquire(client, made, opened(client, "test_innocent"))
        sleeper.kill()
    text = str(failed.value)
    assert f"process {sleeper.pid} (sleep, left behind by test_earlier) 2,335 MiB" in text
    assert "gpu0 (21,941 MiB of 24,576 MiB free, held by: " in text
    assert text.index("held by") < text.index("Last lines of")


# ---------------------------------------------------------------- before and after


def test_the_baseline_is_taken_before_anything_starts(run: Run, client: KeeperClient, driver: FakeDriver) -> None:
    """What is in use before the run is read at rest and written down for every card, before the first window."""
    closed(client, opened(client))
    found = [text for text in notes(run) if "before the run" in text]
    assert found == [f"gpu{index} before the run: 300.0 MiB in use, at rest" for index in (0, 1)]


def test_a_window_that_waits_for_rest(client: KeeperClient, driver: FakeDriver) -> None:
    """A test that asks for it has its baseline taken when what the run holds has come to rest."""
    steps = tuple((50.0 * step, (step + 1) * GIB) for step in range(8))
    driver.process(os.getpid(), Script(steps))
    window = opened(client, settle=20.0)
    figures = closed(client, window)
    assert held(figures, "baseline") == held(figures, "run") == 8 * GIB


def test_a_stop_waits_for_the_card(run: Run, client: KeeperClient, driver: FakeDriver) -> None:
    """A stopped server's memory that the driver gives back late is waited for, and nothing is said of it."""
    window = opened(client)
    running = acquire(client, plan(), window)
    # Listed for good, whether or not it lives.
    driver.update(processes=(Process(pid=running.pid, held=4 * GIB, born=0),))
    closed(client, window)
    back = threading.Event()

    def give_back() -> None:
        assert until(lambda: gone(running.pid))
        driver.update(processes=())
        back.set()

    thread = threading.Thread(target=give_back)
    thread.start()
    client.call(Stop(key=running.key))
    assert back.is_set()
    thread.join()
    assert not [text for text in notes(run) if "was stopped" in text]


def test_a_card_that_is_lost(client: KeeperClient, driver: FakeDriver) -> None:
    """A card that falls off the bus ends its figures with a sentence; the other card's go on."""
    window = opened(client)
    running = acquire(client, plan(), window)
    driver.process(running.pid, GIB)
    driver.process(running.pid, GIB, card=1)
    sampled(client)
    driver.lose()
    sampled(client)
    figures = closed(client, window)
    (lost,) = figures.lost
    assert lost.startswith("gpu0 (NVIDIA L4)")
    assert "lost" in lost.lower()
    assert isinstance(figures.run["gpu0"], Unmeasurable)
    assert held(figures, "run", "gpu1") == GIB


def test_a_card_that_does_not_say_who(client: KeeperClient, driver: FakeDriver) -> None:
    """Without figures by process the rise over the quiet baseline stands for the run, labelled; leftovers without a
    PID are the last test's."""
    window = opened(client, "test_a")
    driver.update(processes=(Process(pid=os.getpid(), held=2 * GIB, available=False),))
    sampled(client)
    figures = closed(client, window)
    peak: Any = figures.run["gpu0"]
    assert (peak.bytes, peak.source) == (2 * GIB, "device-delta")
    assert "N/A" in peak.note
    (left,) = closed(client, opened(client, "test_b")).residues
    assert (left.test, left.bytes, left.pids) == ("test_a", 2 * GIB, [])
