"""What ``vram watch`` sees of a run at one moment, as data. Its JSON schema is ``report/schema/watch.json``."""

from __future__ import annotations

from typing import Literal

import msgspec

FORMAT = "pytest-vram/watch/1"
State = Literal["waiting", "running", "finished", "lost"]


class WatchedDevice(msgspec.Struct, frozen=True, kw_only=True):
    """A device. Sizes are bytes of the run, in the terms of peaks.

    :ivar capacity: its size, and ``limit_from`` what sets it. :ivar held: at the last sample; ``None`` for a run
        that is over. :ivar peak: the most that any sample or any window showed.
    :ivar series: the largest figure of equal slices of the run's time so far, the oldest first.
    :ivar trouble: why it could not be read, at the last look.
    """

    label: str
    kind: str
    name: str
    capacity: int | None = None
    limit_from: str | None = None
    held: int | None = None
    peak: int | None = None
    series: list[int] = []
    trouble: str | None = None


class WatchedBackend(msgspec.Struct, frozen=True, kw_only=True):
    """A server. :ivar seconds: since it has been in this state. :ivar phase: of its boot."""

    name: str
    generation: int
    state: str
    engine: str | None = None
    pid: int | None = None
    phase: str | None = None
    seconds: float | None = None
    reason: str | None = None


class WatchedTest(msgspec.Struct, frozen=True, kw_only=True):
    """A test whose window is open. :ivar phase: that it named itself. :ivar requests: of it that are under way."""

    name: str
    seconds: float
    worker: str | None = None
    phase: str | None = None
    requests: int = 0
    backends: list[str] = []
    exclusive: bool = False


class WatchedLease(msgspec.Struct, frozen=True, kw_only=True):
    """What a test or a server holds. :ivar mine: of the run that is watched, and not of another on this machine."""

    kind: str
    name: str
    holds: dict[str, int] = {}
    worker: str | None = None
    exclusive: bool = False
    idle: bool = False
    mine: bool = True
    run: str | None = None


class WatchedWaiting(msgspec.Struct, frozen=True, kw_only=True):
    """A test that waits. :ivar takes: what it wants. :ivar reasons: who holds that, one sentence each."""

    name: str
    seconds: float
    worker: str | None = None
    takes: dict[str, int] = {}
    exclusive: bool = False
    mine: bool = True
    run: str | None = None
    reasons: list[str] = []


class WatchedProcess(msgspec.Struct, frozen=True, kw_only=True):
    """A process of the run. :ivar owner: a backend's ``name#generation``, ``test``, ``pytest`` or ``unknown``.
    :ivar host: its anonymous memory and swap now; ``None`` where it cannot be read.
    """

    pid: int
    name: str
    owner: str
    host: int | None = None


class Watched(msgspec.Struct, frozen=True, kw_only=True):
    """The document of ``vram watch --json``.

    :ivar state: ``waiting`` (nothing is written yet), ``running``, ``finished`` or ``lost`` (its journal has no end,
        and none of its processes lives).
    :ivar verdict: of a finished run: ``passed``, ``failed``, ``inconclusive``, or ``None`` where nothing says it.
    :ivar live: whether its keeper answered just now; leases of other runs and what tests wait for are known only then.
    :ivar counts: outcome → tests. :ivar processes: the first hundred, and ``process_count`` how many there are.
    :ivar torn: lines of the journal that were cut short. :ivar unreadable: lines that are not what they should be.
    """

    run: str
    folder: str
    state: State
    verdict: str | None = None
    outcome: str | None = None
    live: bool = False
    started: float | None = None
    seconds: float | None = None
    device: str | None = None
    interval_ms: float | None = None
    controller: int | None = None
    keeper: int | None = None
    devices: list[WatchedDevice] = []
    backends: list[WatchedBackend] = []
    tests: list[WatchedTest] = []
    waiting: list[WatchedWaiting] = []
    leases: list[WatchedLease] = []
    processes: list[WatchedProcess] = []
    process_count: int = 0
    counts: dict[str, int] = {}
    last_test: str | None = None
    last_outcome: str | None = None
    notes: list[str] = []
    gaps: int = 0
    torn: int = 0
    unreadable: int = 0
    format: str = FORMAT
