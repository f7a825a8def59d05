"""What a test asks for, and the ticket that it gets."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import NamedTuple

from pytest_vram.keeper.messages import Open
from pytest_vram.leases import Waiting, Want


class Ask(NamedTuple):
    """What a test asks for; the fields are those of :class:`~pytest_vram.keeper.messages.Open`."""

    name: str = ""
    pid: int = 0
    worker: str = ""
    need: Mapping[str, int] = {}
    uses: frozenset[str] = frozenset()
    alone: frozenset[str] = frozenset()

    @classmethod
    def of(cls, request: Open, pid: int, worker: str) -> Ask:
        """What a request of this process asks for."""
        return cls(request.name, pid, worker, request.need, frozenset(request.uses), frozenset(request.alone))


class Ticket:
    """A test that waits or runs. ``need`` is by device key, ``since`` on the boot clock in nanoseconds.

    :ivar waited: seconds. :ivar waited_for: sentences. :ivar passed: tests of this run that passed it, ``passed_by``
        those of others by run. :ivar took: device key → bytes, when it was admitted.
    """

    def __init__(self, number: int, holder: int, exclusive: bool, ask: Ask, need: dict[str, int]) -> None:
        self.number = number
        self.holder = holder
        self.exclusive = exclusive
        self.ask = ask
        self.need = need
        self.uses = set(ask.uses | ask.alone)
        self.since = boot_clock()
        self.waited = 0.0
        self.waited_for: list[str] = []
        self.told = 0.0
        self.passed = 0
        self.passed_by: dict[str, int] = {}
        self.took: dict[str, int] = {}
        self.future: asyncio.Future[None] | None = None

    @property
    def competes(self) -> bool:
        """Whether it holds room, or keeps a backend in use that does."""
        return bool(self.need or self.uses)

    @property
    def plain(self) -> bool:
        """Whether it asks for nothing but to run."""
        return not (self.exclusive or self.competes)


def foreign(waiting: Waiting, devices: frozenset[str], passed: int) -> Want:
    """What a test of another run waits for; ``passed``: how often it was passed beyond what that run knows itself."""
    return Want(
        id=waiting.id,
        order=waiting.since,
        devices=devices,
        takes=waiting.takes,
        ceiling=waiting.ceiling,
        covered=waiting.covered,
        exclusive=waiting.exclusive,
        passed=waiting.passed + passed,
        mine=False,
        blocked=waiting.blocked,
        competes=waiting.competes,
    )


def boot_clock() -> int:
    """Nanoseconds since the machine was started: one clock for all runs on it."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)
