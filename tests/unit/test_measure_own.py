"""What a test is charged with beside tests of other workers, and what is held when a window opens; on paper."""

from __future__ import annotations

import pytest

from pytest_vram.measure import PYTEST, UNKNOWN, Span, Timeline
from pytest_vram.readings import Measured, Reading
from tests.unit.measure_kit import PaperCard, PaperMembers, PaperProbe

MB = 1_000_000
TICK = 10_000_000
#: PIDs of the controller and of its workers.
CONTROLLER, GW0, GW1 = 100, 200, 300


class Machine:
    """A card, and the pytest processes of a run with two workers."""

    def __init__(self, workers: tuple[int, ...] = (GW0, GW1)) -> None:
        self.members, self.card, self.host = PaperMembers(), PaperCard(), PaperProbe()
        self.timeline = Timeline([self.card], self.host, self.members, interval=TICK, clock=lambda: self.t + 500)
        self.t = 0
        for pid in (CONTROLLER, *workers):
            self.start(pid, 0, PYTEST)
        self.members.workers.update(workers)

    def start(self, pid: int, size: int, owner: str = "test", root: int | None = None) -> None:
        self.members.join(pid, owner, root)
        self.card.set(pid, size)
        self.host.set(pid, 5 * MB)

    def end(self, pid: int) -> None:
        self.card.end(pid)
        self.host.end(pid)
        self.members.forget(pid)

    def tick(self) -> None:
        self.t += TICK
        self.timeline.tick(self.t)

    def open(self, pid: int | None = GW0, owners: tuple[str, ...] = ()) -> Span:
        self.t += 1_000
        self.timeline.boundary(self.t)
        return self.timeline.open(self.t, owners, pid)

    def peak(self, span: Span, scope: str = "own") -> int:
        return reading(self.timeline.peaks(span, scope)["gpu0"]).bytes


def reading(found: Measured) -> Reading:
    assert isinstance(found, Reading), found
    return found


def test_what_other_workers_hold_is_left_out() -> None:
    """Another worker, what it started, and backends that only others use do not count; everything else does."""
    machine = Machine()
    span, other = machine.open(GW0, ("mine#1",)), machine.open(GW1, ("theirs#1",))
    machine.card.set(CONTROLLER, 1 * MB)
    machine.card.set(GW0, 2 * MB)
    machine.card.set(GW1, 400 * MB)
    machine.start(1, 4 * MB, root=GW0)
    machine.start(2, 800 * MB, root=GW1)
    machine.start(3, 8 * MB)  # a stray: it may be anybody's
    machine.start(4, 16 * MB, "mine#1")
    machine.start(5, 1_600 * MB, "theirs#1")
    machine.start(6, 32 * MB, UNKNOWN)
    machine.start(7, 3_200 * MB, "idle#1")
    machine.tick()
    shared = (1 + 8 + 32) * MB
    assert machine.peak(span) == shared + (2 + 4 + 16) * MB
    assert machine.peak(other) == shared + (400 + 800 + 1_600) * MB
    everything = shared + (2 + 4 + 16 + 400 + 800 + 1_600 + 3_200) * MB
    assert machine.peak(span, "run") == machine.peak(other, "run") == everything
    assert reading(machine.timeline.held_own(span)["gpu0"]).bytes == machine.peak(span)
    assert reading(machine.timeline.peaks(span, "own")["gpu0"]).scope == "own"


def test_one_process_is_the_run() -> None:
    """Where one pytest process runs the tests, its own figure is the run's, idle backends and all."""
    for workers in ((), (GW0,)):
        machine = Machine(workers)
        span = machine.open(workers[0] if workers else CONTROLLER)
        machine.start(1, 4 * MB)
        machine.start(2, 8 * MB, "idle#1")
        machine.card.set(CONTROLLER, 1 * MB)
        machine.tick()
        assert machine.timeline.peaks(span, "own") == machine.timeline.peaks(span, "run")
        assert machine.timeline.held_own(span) == machine.timeline.held("run")
        assert machine.peak(span) == 13 * MB


def test_a_backend_that_starts_for_a_test_is_its_own() -> None:
    """While a backend boots for a window it counts there, though it is used only once it is ready."""
    machine = Machine()
    span, other = machine.open(GW0), machine.open(GW1)
    span.boots = frozenset({"mine#1"})
    machine.start(1, 900 * MB, "mine#1")
    machine.tick()
    machine.card.set(1, 100 * MB)
    machine.timeline.use(span, ("mine#1",))
    machine.tick()
    assert (machine.peak(span), machine.peak(other)) == (900 * MB, 0)


def test_ended_processes_keep_their_root() -> None:
    """The last figures of a process that ended are its worker's."""
    machine = Machine()
    machine.card.accounting = True
    machine.start(1, 10 * MB, root=GW0)
    machine.start(2, 10 * MB, root=GW1)
    span, other = machine.open(GW0), machine.open(GW1)
    machine.card.set(1, 100 * MB)
    machine.card.set(2, 500 * MB)
    machine.end(1)
    machine.end(2)
    machine.tick()
    assert (machine.peak(span), machine.peak(other)) == (100 * MB, 500 * MB)


def test_a_worker_that_comes_later() -> None:
    """What was seen before another worker was known stays in the figure, and what that one holds then does not."""
    machine = Machine((GW0,))
    span = machine.open(GW0)
    machine.card.set(GW0, 50 * MB)
    machine.tick()
    machine.card.set(GW0, 5 * MB)
    machine.start(GW1, 700 * MB, PYTEST)
    machine.members.workers.add(GW1)
    machine.tick()
    assert (machine.peak(span), machine.peak(span, "run")) == (50 * MB, 705 * MB)


def test_a_card_that_does_not_say() -> None:
    """Where a card does not say who holds what, the figure is the run's and says that others' memory is in it."""
    machine = Machine()
    machine.card.distrust("no figures by process")
    span = machine.open()
    machine.card.set(GW1, 700 * MB)
    machine.tick()
    own, run = (reading(machine.timeline.peaks(span, scope)["gpu0"]) for scope in ("own", "run"))
    assert (own.bytes, own.scope) == (run.bytes, "run")
    assert "what other tests held at the same time is in it" in (own.note or "")
    assert reading(machine.timeline.held_own(span)["gpu0"]).bytes == 700 * MB


def test_doubts_are_of_those_who_count() -> None:
    """A process that was found late makes the figures of its own worker inexact, and of no other."""
    machine = Machine()
    span, other = machine.open(GW0), machine.open(GW1)
    machine.start(2, 10 * MB, root=GW1)
    found = machine.members.get(2)
    assert found is not None
    machine.members.late.append(found)
    machine.tick()
    assert "found late" in (reading(machine.timeline.peaks(other, "own")["gpu0"]).note or "")
    assert "found late" not in (reading(machine.timeline.peaks(span, "own")["gpu0"]).note or "")


@pytest.mark.parametrize("scope", ["run", "own", "process", "backend", "device"])
def test_what_is_held_at_the_opening_counts(scope: str) -> None:
    """A process that is there when a window opens, and gone at its first read, held what it held."""
    machine = Machine()
    owner = {"process": PYTEST, "backend": "mine#1"}.get(scope, "test")
    pid = GW0 if scope == "process" else 1
    machine.start(pid, 70 * MB, owner, root=GW0)
    span = machine.open(GW0, ("mine#1",))
    machine.end(pid)
    machine.tick()
    figure = reading(machine.timeline.peaks(span, scope)["gpu0"])
    assert (figure.bytes, figure.exact) == (70 * MB, False)
    table: dict[str, object] = getattr(span, scope)
    assert table["gpu0"].at == 0  # type: ignore[attr-defined]
    assert [held.bytes for held in span.shares.values()] == [70 * MB]


def test_a_backend_that_ends_before_it_is_read_again() -> None:
    """The same where a window begins to use a backend that is gone a moment later; its host memory too."""
    machine = Machine()
    machine.start(1, 70 * MB, "mine#1")
    span = machine.open()
    machine.t += 1_000
    machine.timeline.boundary(machine.t)
    machine.timeline.use(span, ("mine#1",))
    machine.end(1)
    machine.tick()
    assert machine.peak(span, "backend") == 70 * MB
    assert reading(machine.timeline.host_peak(span) or machine.timeline.peaks(span, "run")["gpu0"]).bytes == 5 * MB


def test_the_moment_is_of_a_read_within_the_window() -> None:
    """Where a read in the window is as large as what was held at its opening, that read is the peak's moment."""
    machine = Machine()
    machine.start(1, 70 * MB, root=GW0)
    span = machine.open()
    machine.tick()
    assert (span.run["gpu0"].since, span.run["gpu0"].at) == (1_000, machine.t + 500)
    fresh = Machine()
    nothing = fresh.open()
    fresh.tick()
    assert nothing.run["gpu0"].at == 0
