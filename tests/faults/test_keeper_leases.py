"""Leases of real keepers: within a run, between runs, and when one of them dies, stops, or writes nonsense."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pytest_vram.errors import KeeperError
from pytest_vram.keeper.messages import Close, Finish, Leave
from pytest_vram.keeper.telling import waiting_lines
from pytest_vram.leases import FOLDER_VARIABLE, Gate
from pytest_vram.readings import Reading
from pytest_vram.spec import DeviceSpec, Limits
from pytest_vram.testing.fake_nvml import Card, FakeDriverUnavailable, Process, fake_nvml
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
from tests.faults.lease_kit import MB, Asking, host, waiting

BUDGET = Limits(text="1GB", each=1000 * MB)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of leases of this test's own."""
    made = tmp_path / "shared"
    monkeypatch.setenv(FOLDER_VARIABLE, str(made))
    return made


@pytest.fixture
def new_run(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    runs: list[Run] = []

    def make(**changes: Any) -> Run:
        path = tmp_path / str(len(runs))
        path.mkdir()
        runs.append(Run(path, **{"budget": BUDGET, **changes}))
        return runs[-1]

    yield make
    for run in runs:
        finish(run)


def finish(run: Run) -> None:
    """End a run in order, which takes less time than a controller that is gone."""
    with contextlib.suppress(KeeperError):
        run.client().call(Finish(outcome="0"), 10)
    run.close()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """One run for all tests that need no more than one."""
    path = tmp_path_factory.mktemp("shared")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(FOLDER_VARIABLE, str(path / "leases"))
        made = Run(path, budget=BUDGET).start()
    made.client()
    yield made
    finish(made)


@pytest.fixture
def run(shared: Run) -> Iterator[Run]:
    """That run; what a test opened in it is given back, and the journal begins with the test."""
    begin = time.monotonic_ns()
    one = Run(shared.folder, run=shared.id, socket=shared.launch.socket)
    one.journal = lambda kind: [line for line in shared.journal(kind) if line["t"] >= begin]  # type: ignore[method-assign]
    yield one
    for client in one.clients:
        client.close()
    assert until(lambda: not status(shared.clients[0]).windows)


def test_needs_of_one_run(run: Run) -> None:
    """A test waits while its need does not fit beside the others', and hears who held it."""
    client, second, third = run.client(), run.client("worker"), run.client("worker")
    first = opened(client, "first", need=host(600))
    fits = opened(second, "fits", need=host(400))
    waits = Asking(third, "waits", need=host(500))
    assert waits.waits()
    closed(second, fits)
    assert waiting(client)
    closed(client, first)
    window = waits.window
    assert waits.reply is not None
    assert waits.reply.waited > 0
    assert any(sentence.startswith("first") for sentence in waits.reply.waited_for)
    assert closed(third, window).waited == pytest.approx(waits.reply.waited, abs=1e-5)
    events = [(line["event"], line.get("name")) for line in run.journal("lease")]
    assert events.index(("wait", "waits")) < events.index(("released", "first")) < events.index(("granted", "waits"))


@pytest.mark.parametrize("alone", [False, True], ids=["need", "alone"])
@pytest.mark.parametrize("by", ["leave", "end"])
def test_a_lease_lasts_until_the_test_leaves(run: Run, alone: bool, by: str) -> None:
    """The window closes before the teardown; the lease is free when the test says so, or its connection ends."""
    client, worker, third = run.client(), run.client("worker"), run.client("worker")
    asked: dict[str, Any] = {"exclusive": True} if alone else {"need": host(600)}
    window = opened(worker, "first", **asked)
    waits = Asking(client, "waits", need=host(500))
    assert waits.waits()
    closed(worker, window, leave=False)
    third.send(Leave(window=window))  # of somebody else
    third.send(Leave(window=77))
    assert [row["name"] for row in status(third).waiting] == ["waits"]
    if by == "leave":
        worker.send(Leave(window=window))
    else:
        worker.close()
    closed(client, waits.window)


def test_a_need_beyond_everything_runs_alone(run: Run) -> None:
    """A need above the ceiling waits until nothing else is held, and is then let in to be judged."""
    client, second = run.client(), run.client("worker")
    first = opened(client, "first", need=host(100))
    large = Asking(second, "large", need=host(5000))
    assert large.waits()
    closed(client, first)
    closed(second, large.window)


def test_the_reserve_is_kept_free(new_run: Callable[..., Run]) -> None:
    """What must stay free of the device is not for tests: the ceiling is the usable capacity without it."""
    run = new_run(budget=None).start()
    capacity = run.client().welcome.devices[0].capacity
    run.clients[0].close()
    assert until(lambda: not of_run(run.id))
    assert isinstance(capacity, Reading)
    second = new_run(budget=None, reserve=capacity.bytes - 1000 * MB).start()
    client, worker = second.client(), second.client("worker")
    first = opened(client, "first", need=host(600))
    waits = Asking(worker, "waits", need=host(500))
    assert waits.waits()
    closed(client, first)
    closed(worker, waits.window)


def test_a_budget_for_the_sum(new_run: Callable[..., Run]) -> None:
    """A budget of the sum over devices holds for what tests may hold together, too."""
    run = new_run(budget=Limits(text="sum=1GB", total=1000 * MB)).start()
    client, worker = run.client(), run.client("worker")
    first = opened(client, "first", need=host(600))
    waits = Asking(worker, "waits", need=host(500))
    assert waits.waits()
    closed(client, first)
    closed(worker, waits.window)


def test_needs_between_runs(new_run: Callable[..., Run]) -> None:
    """Two runs share what the device has; the one that waits says which run holds it."""
    one, two = new_run().start(), new_run().start()
    mine, other = one.client(), two.client()
    first = opened(mine, "first", need=host(600))
    waits = Asking(other, "waits", need=host(500))
    assert until(lambda: any(row["for"] for row in waiting(other)))
    (row,) = waiting(other)
    assert f"keeper {mine.welcome.pid}) holds 572.2 MiB of host" in row["for"][0]
    (line,) = waiting_lines(waiting(other), after=0.0)
    assert line.startswith("vram: waits waits for 476.8 MiB of host")
    closed(mine, first)
    closed(other, waits.window)


def test_serial_tests_between_runs(new_run: Callable[..., Run]) -> None:
    """A serial test waits for the tests of other runs, with and without needs, and holds back those that come later."""
    one, two = new_run().start(), new_run().start()
    mine, worker, other = one.client(), one.client("worker"), two.client()
    plain, needy = opened(mine, "plain"), opened(worker, "needy", need=host(1))
    alone = Asking(other, "alone", exclusive=True)
    assert alone.waits()
    later_client = one.client("worker")
    later = Asking(later_client, "later")
    assert later.waits()
    closed(mine, plain)
    closed(worker, needy)
    window = alone.window
    assert later.reply is None
    closed(other, window)
    closed(later_client, later.window)


def test_a_process_at_its_gate_keeps_a_serial_test_waiting(run: Run) -> None:
    """Tests that ask nobody are seen by who wants the device alone, and find their gate closed meanwhile."""
    client = run.client()
    code = """
import os, sys
from pathlib import Path
from pytest_vram.leases import Gate
gate = Gate(Path(sys.argv[1]), "other", os.getpid(), sys.argv[2:])
print(gate.enter(), flush=True)
for line in sys.stdin:
    gate.leave()
    print(gate.enter(), flush=True)
"""
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", code, client.welcome.lease_folder, *client.welcome.lease_devices],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "True\n"
        alone = Asking(client, "alone", exclusive=True)
        assert until(lambda: any(f"process {process.pid} runs a test" in row["for"] for row in waiting(client)))
        process.stdin.write("again\n")
        assert process.stdout.readline() == "False\n"
        closed(client, alone.window)
        process.stdin.close()


def test_a_test_inside_its_own_gate_is_let_in(run: Run) -> None:
    """A test that entered its gate and then asks for a window does not wait for the one who waits for its gate."""
    client = run.client()
    code = """
import os, sys
from pathlib import Path
from pytest_vram.keeper import KeeperClient
from pytest_vram.keeper.messages import *
from pytest_vram.leases import Gate
client = KeeperClient(sys.argv[1], role="worker")
gate = Gate(Path(client.welcome.lease_folder), "", os.getpid(), client.welcome.lease_devices)
assert gate.enter()
print("up", flush=True)
sys.stdin.readline()
print(client.call(Open(kind="test", name="inner")).window, flush=True)
"""
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", code, run.launch.socket],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
    ) as process:
        wait_up(process)
        alone = Asking(client, "alone", exclusive=True)
        assert alone.waits()
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write("\n")
        assert int(process.stdout.readline()) > 0
        process.wait(10)
        closed(client, alone.window)


HOLDER = """
import sys
from pytest_vram.keeper import KeeperClient
from pytest_vram.keeper.messages import *
client = KeeperClient(sys.argv[1], role="worker", name="gw7")
client.call(Open(kind="test", name="lost", need={"host": 600_000_000}))
print("up", flush=True)
sys.stdin.read()
"""


def test_kill_of_a_worker_frees_its_lease(run: Run) -> None:
    """A killed worker's lease is free within 0.2 s, and the servers of the run live on."""
    client = run.client()
    running = acquire(client, plan())
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", HOLDER, run.launch.socket],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as worker:
        wait_up(worker)
        waits = Asking(client, "waits", need=host(500))
        assert waits.waits()
        before = time.monotonic_ns()
        worker.send_signal(signal.SIGKILL)
        window = waits.window
    grant = next(line for line in run.journal("lease") if (line["event"], line["name"]) == ("granted", "waits"))
    assert (grant["t"] - before) / 1e9 < 0.2
    closed(client, window)
    assert acquire(client, plan()).pid == running.pid


def test_kill_of_another_run_frees_its_leases(new_run: Callable[..., Run]) -> None:
    """When another run is killed, all that it held is free within 3 s."""
    one, two = new_run(), new_run().start()
    client = two.client()
    process = controller(
        one, "run = Run(run.folder, run=run.id, budget=None)\nopened(client, 'lost', need={'host': 10**12})"
    )
    wait_up(process)
    waits = Asking(client, "waits", need=host(500))
    assert waits.waits()
    before = time.monotonic()
    kill(process)
    window = waits.window
    assert time.monotonic() - before < 3.0
    closed(client, window)


def test_a_holder_that_is_stopped_is_named(new_run: Callable[..., Run]) -> None:
    """Whoever waits for a run whose keeper is stopped is told so, and goes on when it goes on."""
    one, two = new_run().start(), new_run().start()
    mine, other = one.client(), two.client()
    first = opened(mine, "first", need=host(600))
    waits = Asking(other, "waits", need=host(500))
    assert waits.waits()
    guard = next(pid for pid in of_run(one.id) if pid != mine.welcome.pid)
    os.kill(guard, signal.SIGSTOP)
    os.kill(mine.welcome.pid, signal.SIGSTOP)
    try:
        assert until(lambda: any("which is stopped, holds" in text for row in waiting(other) for text in row["for"]))
    finally:
        os.kill(mine.welcome.pid, signal.SIGCONT)
        os.kill(guard, signal.SIGCONT)
    closed(mine, first)
    closed(other, waits.window)


SMALL = Limits(text="100MB", each=100 * MB)

KEEPER_OF_A_CHILD = """
import subprocess, sys
from pytest_vram.keeper import KeeperClient
from pytest_vram.keeper.messages import *
client = KeeperClient(sys.argv[1], role="worker", name="gw7")
window = client.call(Open(kind="test", name="first", need={"host": 80_000_000})).window
child = "import sys; block = b'x' * 60_000_000; print(flush=True); sys.stdin.read()"
with subprocess.Popen([sys.executable, "-c", child], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
    process.stdout.readline()
    client.call(Close(window=window))
    client.send(Leave(window=window))
    client.call(Status())
    print("up", flush=True)
    sys.stdin.readline()
sys.stdin.readline()
"""


def test_what_a_worker_still_holds_is_no_room_for_others(new_run: Callable[..., Run]) -> None:
    """A child that a fixture keeps counts after its test, and the worker is named."""
    run = new_run(budget=SMALL).start()
    client = run.client()
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", KEEPER_OF_A_CHILD, run.launch.socket],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as worker:
        wait_up(worker)
        beside = Asking(client, "beside", need=host(45))
        # It may be let in after a while, when it is clear that the worker does nothing any more.
        assert until(lambda: any(line["event"] == "wait" for line in run.journal("lease")))
        worker.communicate("\n\n")
        closed(client, beside.window)
    assert beside.reply is not None
    assert any(text.startswith("worker gw7 holds") and "between its tests" in text for text in beside.reply.waited_for)


def test_idle_backends_make_room(new_run: Callable[..., Run]) -> None:
    """A backend that nobody uses is ended for a test that needs its room; one in use is not."""
    run = new_run(budget=SMALL).start()
    client, worker = run.client(), run.client("worker")
    used, idle = (plan(f"fill={25 * MB}", name=name) for name in ("used", "idle"))
    window = opened(client, "uses", uses=[used.key])
    kept, ended = acquire(client, used, window), acquire(client, idle)
    needy = Asking(worker, "needy", need=host(50))
    closed(worker, needy.window)
    assert gone(ended.pid)
    assert not gone(kept.pid)
    (line,) = [line for line in run.journal("backend") if line["state"] == "stopping"]
    assert line["reason"] == "needy needs its room, and nobody uses it"
    closed(client, window)


def test_idle_backends_make_room_for_other_runs(new_run: Callable[..., Run]) -> None:
    """A backend that nobody uses is ended for a test of another run as well."""
    one, two = new_run(budget=SMALL).start(), new_run(budget=SMALL).start()
    mine, other = one.client(), two.client()
    ended = acquire(mine, plan(f"fill={50 * MB}"))
    closed(other, opened(other, "fits", need=host(20)))
    assert not gone(ended.pid)
    window = opened(other, "needy", need=host(70))
    assert gone(ended.pid)
    closed(other, window)


def test_a_backend_outlives_the_teardown_of_its_test(run: Run) -> None:
    """Another variant that is started meanwhile does not end the backend of a test whose teardown is to come."""
    client, worker = run.client(), run.client("worker")
    one, two = plan(name="variants"), plan("other", name="variants")
    window = opened(client, "first", uses=[one.key])
    kept = acquire(client, one, window)
    closed(client, window, leave=False)
    second = acquire(worker, two)
    assert not gone(kept.pid)
    client.send(Leave(window=window))
    status(client)
    acquire(worker, plan("third", name="variants"))
    assert gone(kept.pid)
    assert gone(second.pid)


def test_a_need_covers_its_backend(new_run: Callable[..., Run]) -> None:
    """What the backend of a test holds is within its need; tests that share it need little more each."""
    run = new_run(budget=SMALL).start()
    client, worker = run.client(), run.client("worker")
    made = plan(f"fill={50 * MB}")
    first = opened(client, "first", need=host(75), uses=[made.key])
    second = Asking(worker, "second", need=host(75), uses=[made.key])
    assert second.waits()
    running = acquire(client, made, first)
    window = second.window
    assert acquire(worker, made, window).pid == running.pid
    closed(client, first)
    closed(worker, window)


def test_a_backend_alone(run: Run) -> None:
    """A test that needs its backend alone shares the device but not the backend."""
    client, worker, third = run.client(), run.client("worker"), run.client("worker")
    made = plan()
    first = opened(client, "first", uses=[made.key], alone=[made.key])
    closed(third, opened(third, "elsewhere", need=host(1)))
    second = Asking(worker, "second", uses=[made.key])
    assert second.waits()
    closed(client, first)
    closed(worker, second.window)


def test_without_leases(new_run: Callable[..., Run], folder: Path) -> None:
    """Without leases nobody waits for room or for other runs; serial tests of a run still do not overlap its others."""
    one, two = new_run(leases=False).start(), new_run(leases=False).start()
    mine, worker, other = one.client(), one.client("worker"), two.client()
    first, second = opened(mine, "first", need=host(900)), opened(worker, "second", need=host(900))
    closed(other, opened(other, "alone", exclusive=True))
    alone = Asking(one.client("worker"), "alone", exclusive=True)
    assert alone.waits()
    closed(mine, first)
    closed(worker, second)
    closed(alone.client, alone.window)
    assert not folder.exists()


@pytest.mark.parametrize("trouble", ["a file", "damaged", "other version"])
def test_what_is_wrong_with_the_folder_is_told(new_run: Callable[..., Run], folder: Path, trouble: str) -> None:
    """A folder that cannot be used, a damaged lease and one of another version: the run goes on, and one line says it."""
    held = None
    if trouble == "a file":
        folder.write_text("")
    else:
        folder.mkdir()
        import fcntl
        import zlib

        body = b'{"version":77}'
        held = open(folder / "strange.lease", "wb+", buffering=0)  # noqa: SIM115 - held over the run
        held.write(b"junk" if trouble == "damaged" else b"%08x " % zlib.crc32(body) + body)
        fcntl.lockf(held, fcntl.LOCK_EX, 1, 0)
    run = new_run().start()
    client, worker = run.client(), run.client("worker")
    for _ in range(3):
        closed(client, opened(client, "first", need=host(500)))
    first = opened(client, "first", need=host(900))
    waits = Asking(worker, "waits", need=host(500))
    assert waits.waits()
    expected = {"a file": "within this run only", "damaged": "is damaged", "other version": "of format 77"}[trouble]
    (note,) = [line for line in run.journal("note") if line.get("warning")]
    assert expected in note["text"]
    if trouble != "a file":
        reason = f"process {os.getpid()} holds leases that this version of pytest-vram cannot read"
        assert until(lambda: any(reason in row["for"] for row in waiting(worker)))
    closed(client, first)
    closed(worker, waits.window)
    if held is not None:
        held.close()


def test_a_run_within_a_test_does_not_wait_for_it(new_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that a test of another run started neither waits for that run nor counts what it holds."""
    outer = new_run().start()
    client = outer.client()
    window = opened(client, "outer", need=host(900), exclusive=True)
    monkeypatch.setenv("PYTEST_VRAM_MEMBER", outer.id)
    inner = new_run().start()
    monkeypatch.delenv("PYTEST_VRAM_MEMBER")
    within = inner.client()
    closed(within, opened(within, "inner", need=host(900), exclusive=True))
    closed(client, window)


def test_a_run_within_a_test_is_known_by_its_ancestors(new_run: Callable[..., Run]) -> None:
    """A run that a test of another run started without the mark in its environment does not wait for it either."""
    outer, inner = new_run().start(), new_run()
    client = outer.client()
    window = opened(client, "outer", need=host(900), exclusive=True)
    process = controller(inner, "opened(client, 'inner', need={'host': 10**12}, exclusive=True)")
    patience = threading.Timer(20, process.kill)
    patience.start()
    wait_up(process)
    patience.cancel()
    kill(process)
    closed(client, window)


def test_a_folder_that_is_removed_is_told(new_run: Callable[..., Run], folder: Path) -> None:
    """A folder that somebody removes while tests run holds nobody up, and is said at the end."""
    run = new_run().start()
    client, worker = run.client(), run.client("worker")
    window = opened(client, "first", need=host(600), exclusive=True)
    assert status(client).warnings == []
    shutil.rmtree(folder)
    (sentence,) = status(client).warnings
    assert sentence.endswith(f"not for other runs on this machine: {folder} was removed while they ran")
    waits = Asking(worker, "waits", exclusive=True)
    assert waits.waits()
    closed(client, window)
    closed(worker, waits.window)
    assert status(client).warnings == [sentence]
    assert client.welcome.lease_folder == str(folder)
    assert run.client("worker").welcome.lease_folder == ""


def test_the_end_of_a_run_leaves_nothing(new_run: Callable[..., Run], folder: Path) -> None:
    """A run that ended in order has removed its file; gates and mutex stay for others."""
    run = new_run().start()
    client = run.client()
    closed(client, opened(client, "first", need=host(1)))
    assert len(list(folder.glob("*.lease"))) == 1
    run.close()
    assert list(folder.glob("*.lease")) == []
    gate = Gate(folder, "next", os.getpid())
    assert gate.enter()
    gate.close()


def test_a_card_that_does_not_say_who_holds_what(new_run: Callable[..., Run], folder: Path) -> None:
    """A run of short tests has such a card for itself until it ends: the rise of the card stands for all that it does."""
    card = Card(total=4 << 30, hidden=64 << 20, processes=(Process(pid=os.getpid(), held=1 << 20, available=False),))
    device = {"devices": [DeviceSpec(kind="cuda", index=0, text="cuda:0")]}
    try:
        driver = fake_nvml([card])
        driver.__enter__()
    except FakeDriverUnavailable as error:
        pytest.skip(str(error))
    try:
        one, two = new_run(**device).start(), new_run(**device).start()
        client, other = one.client(), two.client()
        assert [info.per_process for info in client.welcome.devices] == [False]
        window = opened(client, "short", quick=True)
        waits = Asking(other, "waits")
        assert until(lambda: any(row["for"] for row in waiting(other)))
        (row,) = waiting(other)
        assert "has a device for itself until it ends" in row["for"][0]
        client.call(Close(window=window))
        one.close()
        closed(other, waits.window)
    finally:
        driver.__exit__(None, None, None)
