"""Who may run a test now: in this run, and, over the board, beside the other runs of this machine."""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from pytest_vram.errors import LeaseError
from pytest_vram.keeper.idle import Idle
from pytest_vram.keeper.meeting import Meeting
from pytest_vram.keeper.room import Backends, Holding, Room
from pytest_vram.keeper.telling import amounts, in_the_way, named, of_a_worker, of_another_run, stopped, tables
from pytest_vram.keeper.tickets import Ask as Ask
from pytest_vram.keeper.tickets import Ticket as Ticket
from pytest_vram.keeper.tickets import boot_clock, foreign
from pytest_vram.keeper.workers import Workers
from pytest_vram.leases import MOST_PASSED, Decision, Lease, Sheet, Waiting, Want, World, compete, decide
from pytest_vram.text import printable

#: Seconds between two looks: while something may end without a word, the same once the wait is long, and while only
#: figures may change.
_SOON, _LONG, _FIGURES = 0.005, 0.02, 0.1
#: Seconds of waiting after which a few milliseconds more do not matter.
_PATIENT = 10.0
#: Seconds for which another process may be in the middle of a step at the board.
MOST_STEP = 10.0
_STEP_AGAIN = 0.001
_TELL_AGAIN = 0.5
_MOST_NAMED = 4


class Admission:
    """The queue of a run, and its part in the machine's.

    :param log: writes a journal line. :ivar backends: the servers, once there are any.
    """

    def __init__(self, room: Room | None = None, log: Callable[..., None] | None = None) -> None:
        self.room = room or Room()
        self.backends = Backends()
        self._log = log or (lambda line, /, **fields: None)
        self._meeting = Meeting(self.room, self._log)
        self._workers = Workers(self.room)
        self._inside: list[int] = []
        self._left = False
        self._running: dict[int, Ticket] = {}
        self._waiting: dict[int, Ticket] = {}
        self._idle = Idle(self.backends)
        self._passes: Counter[str] = Counter()
        self._whole = False
        self._next = 0
        self._timer: asyncio.TimerHandle | None = None
        self._late: float | None = None
        self._others: list[Sheet] = []

    @property
    def folder(self) -> str:
        """Folder of the gates, for :class:`pytest_vram.leases.Gate`; empty where there are none."""
        return self._meeting.gates

    @property
    def warnings(self) -> list[str]:
        """Sentences about folders and files of leases that cannot be used, for whoever reads the summary."""
        return self._meeting.looked_at()

    # ------------------------------------------------------------ tests

    async def enter(self, holder: int, exclusive: bool, ask: Ask | None = None) -> Ticket:
        """Wait for admission; returns the ticket for :meth:`leave`.

        Tests of the same connection never wait for each other, nor does a test for the gate that its own process is
        in: the outer one of two nested tests would wait for ever.

        :raises LeaseError: another process blocks the board.
        """
        ask = ask or Ask()
        self._next += 1
        ticket = Ticket(self._next, holder, exclusive, ask, self.room.keyed(ask.need) if self.room.ceilings else {})
        if self._at_once(ticket):
            return ticket
        self._waiting[ticket.number] = ticket
        ticket.future = asyncio.get_running_loop().create_future()
        self.wake()
        waits = ticket.number in self._waiting
        if waits:
            self._log("lease", event="wait", **self._fields(ticket))
        try:
            await ticket.future
        except BaseException:
            if self._waiting.pop(ticket.number, None) is not None:
                if waits:
                    self._log("lease", event="gave up", **self._fields(ticket))
                self.wake()
            else:
                self.leave(ticket)
            raise
        return ticket

    def leave(self, ticket: Ticket) -> None:
        """Give the admission back. Calling it twice is fine."""
        if self._running.pop(ticket.number, None) is None:
            return
        self._left = True
        if not self._running:
            self._meeting.turnstiles.leave()
        if ticket.exclusive and not any(other.exclusive for other in self._running.values()):
            self._meeting.turnstiles.reopen()
        if not ticket.plain:
            self._log("lease", event="released", ticket=ticket.number, name=ticket.ask.name)
        if self._waiting or not ticket.plain:
            self.wake()

    def claim(self) -> None:
        """Tests that do not ask run in this run: devices that do not say who holds what are its own from now on, where
        no other run has them."""
        if self.room.whole and not self._whole and self._taken_whole() is None:
            self._whole = True
            self.wake()

    def used(self, ticket: Ticket, plan: str) -> None:
        """The test of this ticket uses the backend of this plan from now on."""
        ticket.uses.add(plan)

    def keeps(self, plan: str) -> bool:
        """Whether a test that is not over, teardown included, was let in for the backend of this plan."""
        return any(plan in ticket.uses for ticket in self._running.values())

    def close(self) -> None:
        """The run is over: everything is given back."""
        self._disarm()
        self._running.clear()
        self._meeting.close()

    def _at_once(self, ticket: Ticket) -> bool:
        """Admit a test that nobody can have anything against, without a look at the board."""
        nested = any(other.holder == ticket.holder for other in self._running.values())
        easy = (
            ticket.plain
            and not self._waiting
            and not any(other.exclusive for other in self._running.values())
            and (self._whole or not self.room.whole)
        )
        stiles = self._meeting.turnstiles
        if nested:
            stiles.admitted()
        elif not easy or not (stiles.closed_by() is None if self._running else stiles.enter()):
            return False
        self._admit(ticket, {})
        return True

    def _admit(self, ticket: Ticket, takes: dict[str, int]) -> None:
        self._waiting.pop(ticket.number, None)
        self._running[ticket.number] = ticket
        ticket.took = takes
        ticket.waited = (boot_clock() - ticket.since) / 1e9 if ticket.future is not None else 0.0
        if ticket.future is not None and not ticket.future.done():
            ticket.future.set_result(None)

    # ------------------------------------------------------------ deciding

    def wake(self) -> None:
        """Something has changed: whoever can go now goes."""
        meeting = self._meeting
        if not meeting.begin():
            self._step_is_taken()
            return
        self._late = None
        try:
            self._others = [sheet for sheet in meeting.others() if sheet.run not in self.room.within]
            self._refresh()
            again = True
            while again:
                again = self._decide()
            meeting.write(self._sheet)
        finally:
            meeting.end()
        self._arm()

    def _refresh(self) -> None:
        """Read the devices again, where somebody must know what a test that has ended does not hold any more."""
        if self._left and (self._others or (self._waiting and self.backends.workers() > 1)):
            self._left = False
            self.room.look()

    def _look_at_workers(self) -> None:
        running = {ticket.ask.pid for ticket in self._running.values()}
        self._workers.look(running.union(self._inside), {ticket.ask.pid for ticket in self._waiting.values()})

    def _decide(self) -> bool:
        """One decision; whether another one is due at once."""
        holdings = self.backends.holdings()
        self._idle.stamp(holdings, {plan for ticket in self._running.values() for plan in ticket.uses})
        insiders = self._inside = self._insiders()
        self._at_their_own_gate(insiders)
        self._look_at_workers()
        world = self._world(holdings, insiders, hopeful=True)
        mine = {f"{self.room.run}/{ticket.number}": ticket for ticket in self._waiting.values()}
        wants = [self._want(key, ticket, holdings) for key, ticket in mine.items()]
        wants += self._foreign()
        decision = decide(wants, world)
        if not decision.admitted and any(worker.waits for worker in self._workers.seen):
            # Those who wait for each other give nothing back: then what they hold is no reason to wait.
            world = self._world(holdings, insiders, hopeful=False)
            decision = decide(wants, world)
        again = False
        for want in decision.admitted:
            ticket = mine[want.id]
            if not self._conflict(ticket) and self._alone(ticket):
                self._go(ticket, want)
                again = True
        for key, times in decision.passed.items():
            if key in mine:
                mine[key].passed += times
            else:
                self._passes[key] += times
        self._turnstile(wants, mine)
        self._idle.make_room(decision.stuck, world, holdings, self._uses, self._who)
        self._tell(decision, mine, holdings, insiders, wants)
        # Tests that were let in together may have made others fit that were looked at before.
        return again and bool(self._waiting)

    def _go(self, ticket: Ticket, want: Want) -> None:
        self._admit(ticket, dict(want.takes))
        if not ticket.exclusive:
            self._meeting.turnstiles.admitted()
        if self.room.whole:
            self._whole = True
        if not ticket.plain:
            self._log(
                "lease", event="granted", waited=round(ticket.waited, 6), **self._fields(ticket), takes=ticket.took
            )

    def _alone(self, ticket: Ticket) -> bool:
        """Close the gates for a test that wants its devices alone; whether nobody is left inside."""
        if not ticket.exclusive:
            return True
        return self._meeting.shut() and not self._insiders()

    def _turnstile(self, wants: list[Want], mine: Mapping[str, Ticket]) -> None:
        """Keep gates closed for the first who waits to be alone, so that those inside become fewer.

        It may be another run's, also one that could go now: closing the gates before it does would shut it out.
        """
        stiles = self._meeting.turnstiles
        if any(ticket.exclusive for ticket in self._running.values()):
            return
        waiting = [
            want for want in wants if want.exclusive and (not want.mine or mine[want.id].number in self._waiting)
        ]
        first = min(waiting, key=lambda want: (want.order, want.id), default=None)
        if first is not None and first.mine:
            stiles.close()
        elif stiles.closed:
            stiles.reopen()

    def _insiders(self) -> list[int]:
        """Processes of other runs, and workers of this one, that run tests; looked up only where somebody waits."""
        return self._meeting.insiders() if self._waiting else []

    def _at_their_own_gate(self, insiders: list[int]) -> None:
        """Whoever asks out of a test that its process is inside for is let in: everybody else may wait for that."""
        for ticket in list(self._waiting.values()):
            if ticket.ask.pid in insiders:
                self._meeting.turnstiles.admitted()
                self._admit(ticket, {})

    def _conflict(self, ticket: Ticket) -> bool:
        """Whether a running test has a backend alone that this one uses, or the other way round."""
        return any(
            not other.ask.alone.isdisjoint(ticket.uses) or not ticket.ask.alone.isdisjoint(other.uses)
            for other in self._running.values()
            if other.holder != ticket.holder
        )

    def _want(self, key: str, ticket: Ticket, holdings: list[Holding]) -> Want:
        gone = sum(times for run, times in ticket.passed_by.items())
        for sheet in self._others:
            times = sheet.passes.get(key, 0)
            if times:
                ticket.passed_by[sheet.run] = max(times, ticket.passed_by.get(sheet.run, 0))
                gone = sum(ticket.passed_by.values())
        covered = self._covered(ticket, holdings)
        # What its own process holds already is within its need, and held in any case.
        own = Counter(covered) + Counter(self._workers.of(ticket.ask.pid, single=self.backends.workers() < 2))
        return Want(
            id=key,
            order=ticket.since,
            devices=self.room.devices,
            takes={device: max(0, size - own[device]) for device, size in ticket.need.items()},
            ceiling=self.room.ceilings,
            covered=covered,
            exclusive=ticket.exclusive,
            passed=ticket.passed + gone,
            blocked=self._conflict(ticket) or self._taken_whole() is not None,
            competes=ticket.competes,
        )

    def _covered(self, ticket: Ticket, holdings: list[Holding]) -> dict[str, int]:
        found: Counter[str] = Counter()
        for holding in holdings:
            if holding.plan in ticket.uses:
                found.update(holding.holds)
        return dict(found)

    def _foreign(self) -> list[Want]:
        """Those who wait in other runs. A run within another one looks at those who run only: what waits may wait for
        the test that it is a part of. So it is with runs that are stopped."""
        if self.room.within:
            return []
        found = []
        for sheet in self._others:
            if not sheet.waiting or stopped(sheet.pid):
                continue
            devices = frozenset(sheet.devices)
            for waiting in sheet.waiting:
                passes = sum(other.passes.get(waiting.id, 0) for other in self._others)
                found.append(foreign(waiting, devices, passes + self._passes[waiting.id]))
        return found

    def _world(self, holdings: list[Holding], insiders: list[int], *, hopeful: bool) -> World:
        """What is held now. ``hopeful``: those who wait will soon run, and may give back what they hold."""
        held: Counter[str] = Counter()
        loose: Counter[str] = Counter()
        leases: Counter[str] = Counter()
        tests: Counter[str] = Counter()
        alone: set[str] = set()
        for holding in holdings:
            held.update(holding.holds)
            if not holding.attached:
                loose.update(holding.holds)
        takes = self._taken(holdings)
        for sizes in takes.values():
            held.update(sizes)
        for worker in self._workers.seen:
            more = worker.beyond(takes.get(worker.pid, {}))
            held.update(more)
            if not worker.rests and (hopeful or not worker.waits):
                leases.update(more.keys())
        for ticket in self._running.values():
            leases.update(ticket.need.keys())
            tests.update(self.room.devices)
            if ticket.exclusive:
                alone |= self.room.devices
        if insiders:
            tests.update(self.room.devices)
        for sheet in self._others:
            held.update(sheet.held)
            for lease in sheet.leases:
                if lease.exclusive:
                    alone.update(sheet.devices)
                if lease.kind == "test" or (lease.kind == "worker" and not lease.idle):
                    leases.update(lease.holds.keys())
                elif not lease.attached:
                    loose.update(lease.holds)
        return World(held=held, loose=loose, leases=leases, tests=tests, alone=alone)

    def _takes(self, ticket: Ticket, holdings: list[Holding]) -> dict[str, int]:
        """What a running test may hold beyond its backends, as they are now."""
        covered = self._covered(ticket, holdings)
        return {key: max(0, size - covered.get(key, 0)) for key, size in ticket.need.items()}

    def _taken(self, holdings: list[Holding]) -> dict[int, Counter[str]]:
        """What running tests may hold beyond their backends, by PID of their process."""
        found: dict[int, Counter[str]] = {}
        for ticket in self._running.values():
            found.setdefault(ticket.ask.pid, Counter()).update(self._takes(ticket, holdings))
        return found

    def _taken_whole(self) -> Sheet | None:
        """The run that has one of this run's devices for itself, where devices do not say who holds what."""
        if self._whole:
            return None
        wanted = self.room.whole
        return next((sheet for sheet in self._others if wanted and not wanted.isdisjoint(sheet.whole)), None)

    def _uses(self, want: Want) -> set[str]:
        ticket = self._of(want)
        return ticket.uses if ticket else set()

    def _of(self, want: Want) -> Ticket | None:
        return self._waiting.get(int(want.id.rpartition("/")[2])) if want.mine else None

    def _who(self, want: Want) -> str:
        ticket = self._of(want)
        if ticket is not None:
            return ticket.ask.name or "a test"
        return next(
            (
                f"{printable(one.name)} of another run"
                for sheet in self._others
                for one in sheet.waiting
                if one.id == want.id
            ),
            "a test of another run",
        )

    # ------------------------------------------------------------ telling

    def _sheet(self) -> Sheet:
        """What the other runs are told."""
        holdings = self.backends.holdings()
        held: Counter[str] = Counter()
        leases: list[Lease] = []
        for holding in holdings:
            held.update(holding.holds)
            idle = holding.label in self._idle.since
            leases.append(
                Lease(kind="server", name=holding.label, holds=holding.holds, idle=idle, attached=holding.attached)
            )
        for ticket in self._running.values():
            if ticket.plain:
                continue
            takes = self._takes(ticket, holdings)
            held.update(takes)
            leases.append(
                Lease(
                    kind="test",
                    name=ticket.ask.name,
                    worker=ticket.ask.worker,
                    holds=takes,
                    exclusive=ticket.exclusive,
                    since=ticket.since,
                )
            )
        self._look_at_workers()
        taken = self._taken(holdings)
        for worker in self._workers.seen:
            if more := worker.beyond(taken.get(worker.pid, {})):
                held.update(more)
                leases.append(Lease(kind="worker", name=worker.name, holds=more, idle=worker.rests, attached=True))
        known = {waiting.id for sheet in self._others for waiting in sheet.waiting}
        self._passes = Counter({key: times for key, times in self._passes.items() if key in known})
        return Sheet(
            version=1,
            run=self.room.run,
            pid=os.getpid(),
            uid=os.getuid(),
            place=self._meeting.place,
            pids=self._meeting.pids(),
            devices=sorted(self.room.keys.values()),
            whole=sorted(self.room.whole) if self._whole else [],
            held=dict(held),
            leases=leases,
            waiting=[self._written(ticket, holdings) for ticket in self._waiting.values()],
            passes=dict(self._passes),
        )

    def _written(self, ticket: Ticket, holdings: list[Holding]) -> Waiting:
        want = self._want(f"{self.room.run}/{ticket.number}", ticket, holdings)
        here = {sheet.run for sheet in self._others}
        return Waiting(
            id=want.id,
            name=ticket.ask.name,
            since=ticket.since,
            worker=ticket.ask.worker,
            takes=dict(want.takes),
            ceiling=dict(want.ceiling),
            covered=dict(want.covered),
            exclusive=want.exclusive,
            passed=ticket.passed + sum(times for run, times in ticket.passed_by.items() if run not in here),
            blocked=want.blocked,
            competes=want.competes,
        )

    def _fields(self, ticket: Ticket) -> dict[str, Any]:
        found: dict[str, Any] = {"ticket": ticket.number, "name": ticket.ask.name, "worker": ticket.ask.worker}
        if ticket.need:
            found["need"] = ticket.need
        if ticket.exclusive:
            found["exclusive"] = True
        if ticket.passed or ticket.passed_by:
            found["passed"] = ticket.passed + sum(ticket.passed_by.values())
        return found

    def _tell(
        self,
        decision: Decision,
        mine: Mapping[str, Ticket],
        holdings: list[Holding],
        insiders: list[int],
        wants: list[Want],
    ) -> None:
        now = time.monotonic()
        # Who could go and is still here waits for the gates.
        for want in [*decision.stuck, *decision.admitted]:
            ticket = mine.get(want.id)
            if ticket is None or ticket.number not in self._waiting or now - ticket.told < _TELL_AGAIN:
                continue
            ticket.told = now
            reasons = list(self._reasons(want, ticket, decision, holdings, insiders))
            ticket.waited_for = list(map(printable, (reasons or list(self._in_front(want, wants)))[:_MOST_NAMED]))

    def _in_front(self, want: Want, wants: list[Want]) -> Iterator[str]:
        """Who keeps a test waiting without holding anything."""
        for other in sorted(wants, key=lambda other: (other.order, other.id)):
            if (other.order, other.id) < (want.order, want.id) and compete(want, other):
                yield f"{self._who(other)} asked before it"
        if (pid := self._meeting.closed_by()) is not None:
            yield f"process {pid} keeps others out, for a test that has, or wants, the device to itself"

    def _reasons(
        self, want: Want, ticket: Ticket, decision: Decision, holdings: list[Holding], insiders: list[int]
    ) -> Iterator[str]:
        """Who keeps a test waiting, one sentence each."""
        whole = self._taken_whole()
        if whole is not None:
            yield f"{named(whole)} has a device for itself until it ends, for the device does not say who holds what"
        for other in self._running.values():
            yield from in_the_way(ticket, other, self._takes(other, holdings), self.room)
        if ticket.need:
            for holding in holdings:
                if holding.plan not in ticket.uses and (sizes := amounts(holding.holds, self.room)):
                    yield f"backend {holding.label} holds {sizes}"
        taken = self._taken(holdings)
        for worker in self._workers.seen if ticket.need else ():
            if worker.pid != ticket.ask.pid:
                yield from of_a_worker(worker, worker.beyond(taken.get(worker.pid, {})), self.room)
        for sheet in self._others:
            yield from of_another_run(sheet, ticket.need, self.room)
        for pid in insiders if ticket.exclusive else ():
            yield f"process {pid} runs a test"
        for earlier in decision.stuck:
            if earlier is want:
                break
            if earlier.exclusive or earlier.passed >= MOST_PASSED:
                yield f"{self._who(earlier)} asked before it"
        for pid in self._meeting.unknown:
            yield f"process {pid} holds leases that this version of pytest-vram cannot read"

    def tables(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Leases and waiting tests of all runs here, for ``Status``."""
        reasons = {f"{self.room.run}/{ticket.number}": ticket.waited_for for ticket in self._waiting.values()}
        return tables(self._sheet(), self._others, self.room, reasons)

    # ------------------------------------------------------------ time

    def _step_is_taken(self) -> None:
        """Another process is in the middle of a step; so it is for a moment, or it is stopped."""
        now = time.monotonic()
        self._late = self._late or now
        if now - self._late < MOST_STEP:
            if now - self._late >= _TELL_AGAIN:
                for ticket in self._waiting.values():
                    ticket.waited_for = [self._meeting.stepping()]
            self._again(_STEP_AGAIN if now - self._late < 0.1 else _LONG)
            return
        self._late = None
        sentence = self._meeting.stuck(MOST_STEP)
        for ticket in list(self._waiting.values()):
            del self._waiting[ticket.number]
            if ticket.future is not None and not ticket.future.done():
                ticket.future.set_exception(LeaseError(sentence))

    def _arm(self) -> None:
        """Look again after a while, where something may change without a word."""
        if self._waiting:
            alone = any(ticket.exclusive for ticket in self._waiting.values())
            long = boot_clock() - max(ticket.since for ticket in self._waiting.values()) > _PATIENT * 1e9
            self._again(_FIGURES if self._meeting.by_itself and not alone else _LONG if long else _SOON)
        elif self._idle.since or self._workers.seen:
            self._again(_FIGURES)
        else:
            self._disarm()

    def _again(self, seconds: float) -> None:
        self._disarm()
        self._timer = asyncio.get_running_loop().call_later(seconds, self._look)

    def _look(self) -> None:
        self._timer = None
        if self._waiting or not self._meeting.by_itself:
            self.wake()
        else:
            self._arm()

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
