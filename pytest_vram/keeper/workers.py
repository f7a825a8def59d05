"""What the pytest processes of a run, and the processes that their tests started, hold besides all backends.

A fixture of a session, a caching allocator, a driver's context and a child that nobody ended stay when a test is over.
No test may be let in for room that they have.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

from pytest_vram.keeper.room import Room

#: Seconds without a test after which a pytest process is not expected to give anything back by itself.
RESTS = 5.0
#: In place of a PID: processes that came from some pytest process of the run, nobody knows from which.
NOBODY = 0


class Worker(NamedTuple):
    """One pytest process with what came from it.

    :ivar name: for a person. :ivar holds: device key → bytes. :ivar runs: whether a test runs in it; ``waits``: or is
        about to. :ivar rests: whether it has run no test for a while, and so is not expected to give anything back.
    """

    pid: int
    name: str
    holds: Mapping[str, int]
    runs: bool = False
    waits: bool = False
    rests: bool = False

    def beyond(self, takes: Mapping[str, int]) -> dict[str, int]:
        """What it holds besides what its running tests were let in for."""
        found = {key: size - takes.get(key, 0) for key, size in self.holds.items()}
        return {key: size for key, size in found.items() if size > 0}


class Workers:
    """All of them, as they were at the last look. ``seen`` lists those that hold something."""

    def __init__(self, room: Room, clock: Callable[[], float] = time.monotonic) -> None:
        self._room = room
        self._clock = clock
        self._since: dict[int, float] = {}
        self.seen: list[Worker] = []

    def look(self, running: Collection[int], waiting: Collection[int]) -> None:
        """Look what is held, given the PIDs in which tests run, and those in which one waits."""
        now = self._clock()
        held = {pid: sizes for pid, sizes in self._room.workers().items() if any(sizes.values())}
        at_work = {pid for pid in held if pid in running or (pid == NOBODY and running)}
        self._since = {pid: self._since.get(pid, now) for pid in held if pid not in at_work}
        self.seen = [
            Worker(
                pid,
                self._name(pid),
                sizes,
                runs=pid in at_work,
                waits=pid in waiting and pid not in at_work,
                rests=now - self._since.get(pid, now) >= RESTS,
            )
            for pid, sizes in held.items()
        ]

    def of(self, pid: int, *, single: bool) -> dict[str, int]:
        """What this process holds, with what came from it: device key → bytes.

        :param single: it is the only one that runs tests, so that what came from nobody knows where came from it.
        """
        found: dict[str, int] = {}
        for worker in self.seen:
            if worker.pid == pid or (single and worker.pid == NOBODY):
                for key, size in worker.holds.items():
                    found[key] = found.get(key, 0) + size
        return found

    def _name(self, pid: int) -> str:
        if pid == NOBODY:
            return "what tests started"
        name = self._room.names.get(pid)
        return f"worker {name}" if name else f"pytest (PID {pid})"
