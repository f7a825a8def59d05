"""Admission without a keeper around it: one queue, what its backends hold, and what cannot be waited for."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable

import msgspec
import pytest

from pytest_vram.errors import LeaseError
from pytest_vram.keeper import admission as module
from pytest_vram.keeper import idle, telling, workers
from pytest_vram.keeper.admission import Admission, Ask, Ticket
from pytest_vram.keeper.room import Holding, Room
from pytest_vram.keeper.telling import waiting_lines
from pytest_vram.leases import MOST_PASSED, Lease, Sheet, Waiting, Want, World, decide
from tests.faults.keeper_kit import until


class Small(Room):
    """A device of 100 bytes, and what the processes with these PIDs hold."""

    def __init__(self, holds: dict[int, int] | None = None) -> None:
        super().__init__()
        self.holds = holds or {}
        self.looks = 0
        self.keys = {"gpu0": "card"}
        self.devices = frozenset({"card", self.own})
        self.ceilings = {"card": 100}

    def workers(self) -> dict[int, dict[str, int]]:
        return {pid: {"card": size} for pid, size in self.holds.items()}

    def look(self) -> None:
        self.looks += 1


def run(work: Awaitable[None]) -> None:
    async def main() -> None:
        await asyncio.wait_for(work, 20)

    asyncio.run(main())


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def need(size: int, name: str = "t", *uses: str, pid: int = 0) -> Ask:
    return Ask(name=name, need={"gpu0": size}, uses=frozenset(uses), pid=pid)


Later = asyncio.Future[Ticket]


async def asked(admission: Admission, holder: int, ask: Ask, *, exclusive: bool = False) -> Later:
    later = asyncio.ensure_future(admission.enter(holder, exclusive, ask))
    await settle()
    return later


def test_nobody_is_passed_for_ever() -> None:
    """Small tests pass a large one a stated number of times; then they wait behind it."""

    async def work() -> None:
        admission = Admission(Small())
        held = await admission.enter(1, False, need(50))
        large = await asked(admission, 2, need(100))
        for _ in range(MOST_PASSED):
            admission.leave(await admission.enter(3, False, need(50)))
        late = await asked(admission, 3, need(50))
        assert not late.done()
        assert not large.done()
        admission.leave(held)
        await settle()
        assert large.done()
        assert not late.done()
        admission.leave(large.result())
        assert large.result().passed == MOST_PASSED
        await late

    run(work())


def test_a_plain_test_passes_those_who_need_room() -> None:
    """A test that needs nothing does not wait for those who need room."""

    async def work() -> None:
        admission = Admission(Small())
        await admission.enter(1, False, need(50))
        large = await asked(admission, 2, need(100))
        for holder in range(3, 3 + 2 * MOST_PASSED):
            await admission.enter(holder, False, Ask())
        assert not large.done()

    run(work())


def test_idle_backends_are_ended_longest_idle_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """No more backends are ended than the test needs, and none that is used, attached to, or the test's own."""
    monkeypatch.setattr(idle, "LINGER", 0.0)

    async def work() -> None:
        admission = Admission(Small())
        holdings = {
            name: Holding(f"{name}#1", name, {"card": 20}, attached=name == "attached", used=name == "used")
            for name in ("attached", "used", "own", "old", "new")
        }
        ended: list[str] = []
        admission.backends.holdings = lambda: list(holdings.values())
        admission.backends.end = lambda label, reason: ended.append(label)
        new = holdings.pop("new")
        admission.wake()
        holdings["new"] = new
        needy = await asked(admission, 1, need(40, "t", "own"))
        assert ended == ["old#1"]
        admission.wake()
        assert ended == ["old#1"]
        del holdings["old"]
        admission.wake()
        await needy
        admission.close()

    run(work())


def test_a_backend_that_a_running_test_may_use_is_not_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend that a test was let in for is kept, before it uses it and in its teardown, until it leaves."""
    monkeypatch.setattr(idle, "LINGER", 0.0)

    async def work() -> None:
        admission = Admission(Small())
        ended: list[str] = []
        admission.backends.holdings = lambda: [Holding("b#1", "b", {"card": 80})]
        admission.backends.end = lambda label, reason: ended.append(label)
        first = await admission.enter(1, False, Ask(uses=frozenset(["b"])))
        waits = await asked(admission, 2, need(50))
        assert ended == []
        admission.leave(first)
        assert ended == ["b#1"]
        waits.cancel()
        admission.close()

    run(work())


def test_a_budget_for_the_sum_is_for_the_needs_of_all_devices() -> None:
    """On several devices it is the sum of a test's needs that must fit."""

    async def work() -> None:
        room = Small()
        room.keys["gpu1"] = "second"
        room.ceilings = {f"sum {room.run}": 100}
        admission = Admission(room)
        both = Ask(need={"gpu0": 30, "gpu1": 30})
        first = await admission.enter(1, False, both)
        assert first.took[f"sum {room.run}"] == 60
        waits = await asked(admission, 2, both)
        assert not waits.done()
        admission.leave(first)
        await waits
        admission.close()

    run(work())


def test_a_serial_test_passes_nobody_who_waits() -> None:
    """One that could have the device alone at once waits behind an earlier one that waits for room."""
    devices = frozenset(["card"])
    first = Want(id="1", order=1, devices=devices, takes={"card": 50}, ceiling={"card": 100}, competes=True)
    alone = Want(id="2", order=2, devices=devices, exclusive=True)
    decision = decide([first, alone], World(held={"card": 80}, loose={"card": 80}))
    assert decision.admitted == []
    assert decide([alone], World(held={"card": 80}, loose={"card": 80})).admitted == [alone]


def test_a_backend_lingers_between_two_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """With several workers a backend that has just become idle is not ended at once: the next test may want it."""
    monkeypatch.setattr(idle, "LINGER", 3600.0)

    async def work() -> None:
        admission = Admission(Small())
        ended: list[str] = []
        admission.backends.holdings = lambda: [Holding("b#1", "b", {"card": 80})]
        admission.backends.end = lambda label, reason: ended.append(label)
        admission.backends.workers = lambda: 2
        waits = await asked(admission, 1, need(50))
        assert ended == []
        for _ in range(MOST_PASSED):
            admission.leave(await admission.enter(2, False, need(90, "t", "b")))
        admission.wake()
        assert ended == ["b#1"]
        waits.cancel()
        admission.close()

    run(work())


def test_what_a_worker_holds_between_its_tests_is_no_room_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a process goes on holding counts, its own tests take no more than their need, and nobody waits for ever."""
    monkeypatch.setattr(workers, "RESTS", 3600.0)
    monkeypatch.setattr(telling, "amounts", lambda holds, room: str(holds) if holds else "")

    async def work() -> None:
        room = Small({1: 60})
        room.names[1] = "gw0"
        admission = Admission(room)
        admission.backends.workers = lambda: 2
        first = await admission.enter(1, False, need(70, pid=1))
        beside = await admission.enter(2, False, need(30, pid=2))
        admission.leave(beside)
        admission.leave(first)
        waits = await asked(admission, 2, need(50, "waits", pid=2))
        assert not waits.done()
        assert room.looks == 1
        (row,) = admission.tables()[1]
        assert row["for"] == ["worker gw0 holds {'card': 60} between its tests"]
        again = await admission.enter(1, False, need(90, pid=1))
        assert again.took == {"card": 30}
        admission.leave(again)
        assert not waits.done()
        room.holds.clear()
        admission.wake()
        await settle()
        assert waits.done()
        admission.close()

    run(work())


@pytest.mark.parametrize("pid", [1, 0], ids=["worker", "unknown"])
def test_more_than_its_need_counts(pid: int) -> None:
    """A test that holds more than it needs, or whose processes nobody knows, leaves no room for what it holds."""

    async def work() -> None:
        room = Small({pid: 90})
        admission = Admission(room)
        first = await admission.enter(1, False, need(10, pid=1))
        admission.backends.workers = lambda: 2
        waits = await asked(admission, 2, need(30, pid=2))
        assert not waits.done()
        room.holds[pid] = 70
        admission.wake()
        await settle()
        assert waits.done() is (pid == 1)
        room.holds[pid] = 60
        admission.wake()
        await waits
        admission.leave(first)
        admission.close()

    run(work())


def test_what_workers_of_other_runs_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """What other runs hold between their tests is written for each other, and waited for while it may be given back."""

    async def work() -> None:
        monkeypatch.setattr(workers, "RESTS", 0.0)
        told = [Admission(Small({1: 60}))._sheet()]
        assert told[0].held == {"card": 60}
        (lease,) = told[0].leases
        assert (lease.kind, lease.name, lease.idle, lease.attached) == ("worker", "pytest (PID 1)", True, True)
        told = [
            msgspec.structs.replace(
                told[0], run="other", devices=["card"], leases=[msgspec.structs.replace(lease, idle=False)]
            )
        ]
        second = Admission(Small())
        monkeypatch.setattr(second._meeting, "others", lambda: told)
        waits = await asked(second, 1, need(50, pid=5))
        assert not waits.done()
        told = [msgspec.structs.replace(told[0], leases=[lease])]
        second.wake()
        await waits
        second.close()

    run(work())


def test_who_rests_or_waits_gives_nothing_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two that both hold something and want more do not wait for each other, nor anybody for one that does nothing."""

    async def work() -> None:
        monkeypatch.setattr(workers, "RESTS", 3600.0)
        admission = Admission(Small({1: 40, 2: 40}))
        held = await admission.enter(3, False, need(20, pid=3))
        one = await asked(admission, 1, need(80, pid=1))
        two = await asked(admission, 2, need(80, pid=2))
        assert not one.done()
        admission.leave(held)
        await settle()
        assert one.done()
        assert not two.done()
        admission.leave(one.result())
        await settle()
        assert not two.done()
        monkeypatch.setattr(workers, "RESTS", 0.0)
        admission.wake()
        await two
        admission.close()

    run(work())


def test_a_step_that_does_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """When another process does not end its step at the board, those who wait are told; it is never a hang."""
    monkeypatch.setattr(module, "MOST_STEP", 0.05)

    async def work() -> None:
        admission = Admission(Small())
        monkeypatch.setattr(admission._meeting, "begin", lambda: False)
        with pytest.raises(LeaseError, match=r"another process has held .*mutex.*--vram-leases=off"):
            await admission.enter(1, False, need(1))

    run(work())


def test_sheets_of_others_are_not_obeyed() -> None:
    """Names and places that another user wrote reach a terminal without control characters."""

    async def work() -> None:
        evil = "\x1b[2J\u202e\n"
        lease = Lease(kind="test", name=evil, worker=evil, holds={"card": 90}, exclusive=True)
        told = Sheet(
            version=1,
            run=evil,
            pid=os.getpid(),
            place=evil,
            devices=["card"],
            held={"card": 90},
            leases=[lease],
            waiting=[Waiting(id="x", name=evil, worker=evil, since=0, exclusive=True)],
        )
        admission = Admission(Small())
        admission._meeting.others = lambda: [told]  # type: ignore[method-assign]
        waits = await asked(admission, 1, need(50, pid=5))
        leases, waiting = admission.tables()
        (mine,) = [row for row in waiting if row["mine"]]
        assert len(mine["for"]) == 2
        texts = [*mine["for"], *(str(row[key]) for row in [*leases, *waiting] for key in ("name", "place", "run"))]
        assert [text for text in texts if not text.isprintable()] == []
        waits.cancel()
        admission.close()

    run(work())


def test_whoever_waits_is_told_for_what(monkeypatch: pytest.MonkeyPatch) -> None:
    """A closed gate, an earlier test of another run, and a step that goes on are reasons as well."""

    async def reasons(admission: Admission, holder: int) -> list[str]:
        waits = await asked(admission, holder, Ask(), exclusive=True)
        (row,) = [row for row in admission.tables()[1] if row["mine"]]
        waits.cancel()
        await settle()
        admission.close()
        found: list[str] = row["for"]
        return found

    async def work() -> None:
        admission = Admission(Small())
        monkeypatch.setattr(admission._meeting, "shut", lambda: False)
        monkeypatch.setattr(admission._meeting.turnstiles, "closed_by", lambda: 4242)
        (text,) = await reasons(admission, 1)
        assert text.startswith("process 4242 keeps others out")

        admission = Admission(Small())
        first = Waiting(id="x", name="t.py::first", since=0, exclusive=True)
        told = Sheet(version=1, run="o", pid=os.getpid(), devices=["card"], waiting=[first])
        monkeypatch.setattr(admission._meeting, "others", lambda: [told])
        assert await reasons(admission, 1) == ["t.py::first of another run asked before it"]

        admission = Admission(Small())
        monkeypatch.setattr(module, "_TELL_AGAIN", 0.0)
        monkeypatch.setattr(admission._meeting, "begin", lambda: False)
        assert await reasons(admission, 1) == ["another process looks at the leases of this machine"]

    run(work())


def test_a_run_that_is_stopped_is_called_so() -> None:
    """A run whose pytest is stopped is told from one that goes on."""
    with subprocess.Popen([sys.executable, "-S", "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE) as other:
        sheet = Sheet(version=1, run="o", pid=os.getpid(), place="/there", pids=[other.pid])
        assert telling.named(sheet) == f"the pytest run in /there (keeper {os.getpid()})"
        other.send_signal(signal.SIGSTOP)
        assert until(lambda: telling.stopped(other.pid))
        assert telling.named(sheet).endswith(f"), whose pytest (PID {other.pid}) is stopped,")
        other.kill()


def test_waiting_lines_tell_what_matters() -> None:
    """A line names the test, its worker, what it waits for, for how long, and who holds it."""
    row = {
        "mine": True,
        "name": "t.py::test",
        "worker": "gw1",
        "takes": {"gpu0": 1 << 30},
        "exclusive": False,
        "seconds": 7.4,
        "for": ["a holds it"],
    }
    expected = "vram: t.py::test (gw1) waits for 1,024 MiB of gpu0, 7 s so far: a holds it"
    assert waiting_lines([row]) == [expected]
    assert waiting_lines([{**row, "seconds": 1.0}, {**row, "mine": False}]) == []
    (line,) = waiting_lines([{**row, "exclusive": True, "worker": "", "for": []}])
    assert line == "vram: t.py::test waits for the device to itself, 7 s so far"
