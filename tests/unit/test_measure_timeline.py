"""From reads to peaks, on paper."""

from __future__ import annotations

import pytest

from pytest_vram.measure import PYTEST, UNKNOWN, Timeline
from pytest_vram.measure.timeline import STALE
from pytest_vram.readings import Measured, Reading, Unmeasurable
from tests.unit.measure_kit import PaperMembers, PaperProbe

MB = 1_000_000


class Machine:
    def __init__(self, *, marked: bool = True) -> None:
        self.members = PaperMembers()
        self.probe = PaperProbe(marked=marked)
        self.timeline = Timeline([self.probe], self.probe, self.members)
        self.t = 0

    def start(self, pid: int, size: int, owner: str = "test") -> None:
        self.members.join(pid, owner)
        self.probe.set(pid, size)

    def tick(self) -> None:
        self.t += 10_000_000
        self.timeline.tick(self.t)

    def boundary(self) -> int:
        self.t += 1_000
        self.timeline.boundary(self.t)
        return self.t


@pytest.fixture
def machine() -> Machine:
    return Machine()


def reading(found: Measured) -> Reading:
    assert isinstance(found, Reading)
    return found


def test_one_process_is_exact(machine: Machine) -> None:
    """The peak of one process is its mark: a point, exact, whatever the samples missed."""
    machine.start(1, 10 * MB)
    span = machine.timeline.open(machine.boundary())
    machine.probe.set(1, 90 * MB)
    machine.probe.set(1, 20 * MB)
    machine.tick()
    machine.boundary()
    peak = reading(machine.timeline.peaks(span, "run")["host"])
    assert (peak.bytes, peak.at_most, peak.exact, peak.source) == (90 * MB, None, True, "host-hwm")
    assert (peak.samples, peak.interval_ms) == (None, None)


def test_a_window_does_not_see_what_was_before(machine: Machine) -> None:
    """A peak before the window opened is not the window's."""
    machine.start(1, 10 * MB)
    machine.probe.set(1, 500 * MB)
    machine.probe.set(1, 10 * MB)
    first = machine.timeline.open(0)
    span = machine.timeline.open(machine.boundary())
    machine.boundary()
    assert reading(machine.timeline.peaks(span, "run")["host"]).bytes == 10 * MB
    assert reading(machine.timeline.peaks(first, "run")["host"]).bytes == 500 * MB


def test_two_processes_are_an_interval(machine: Machine) -> None:
    """Peaks of two processes that may not have met: at least the largest, at most their sum."""
    machine.start(1, 10 * MB)
    machine.start(2, 10 * MB)
    span = machine.timeline.open(machine.boundary())
    machine.probe.set(1, 100 * MB)
    machine.probe.set(1, 10 * MB)
    machine.probe.set(2, 80 * MB)
    machine.probe.set(2, 10 * MB)
    machine.boundary()
    peak = reading(machine.timeline.peaks(span, "run")["host"])
    assert (peak.bytes, peak.at_most) == (100 * MB, 180 * MB)


def test_stale_marks_are_reset_at_a_tick(machine: Machine) -> None:
    """With several processes a tick sets stale marks back, so that peaks of different moments do not add up."""
    machine.start(1, 10 * MB)
    machine.start(2, 10 * MB)
    span = machine.timeline.open(machine.boundary())
    machine.probe.set(1, 100 * MB)
    machine.probe.set(1, 10 * MB)
    machine.tick()
    machine.probe.set(2, 80 * MB)
    machine.probe.set(2, 10 * MB)
    machine.boundary()
    peak = reading(machine.timeline.peaks(span, "run")["host"])
    assert (peak.bytes, peak.at_most) == (100 * MB, 110 * MB)


def test_marks_within_the_slack_stay(machine: Machine) -> None:
    """Marks that exceed the sum by no more than the slack are left alone."""
    machine.start(1, 10 * MB)
    machine.start(2, 10 * MB)
    machine.boundary()
    machine.probe.set(1, 10 * MB + STALE)
    machine.probe.set(1, 10 * MB)
    machine.tick()
    assert machine.probe.marks[1] == 10 * MB + STALE
    machine.probe.set(1, 10 * MB + STALE + 1)
    machine.probe.set(1, 10 * MB)
    machine.tick()
    assert machine.probe.marks[1] == 10 * MB


def test_an_ended_process_makes_it_inexact(machine: Machine) -> None:
    """What a process held between its last sample and its end is unknown, and the figure says so."""
    machine.start(1, 10 * MB)
    span = machine.timeline.open(machine.boundary())
    machine.probe.set(1, 70 * MB)
    machine.tick()
    machine.probe.end(1)
    machine.tick()
    later = machine.timeline.open(machine.boundary())
    machine.start(2, 5 * MB)
    machine.boundary()
    peak = reading(machine.timeline.peaks(span, "run")["host"])
    assert (peak.bytes, peak.exact, peak.samples) == (70 * MB, False, 2)
    assert "p1, PID 1" in (peak.note or "")
    fresh = reading(machine.timeline.peaks(later, "run")["host"])
    assert (fresh.bytes, fresh.exact, fresh.note) == (5 * MB, True, None)


def test_processes_one_after_the_other_do_not_add_up(machine: Machine) -> None:
    """A hundred short processes in turn peak at the largest, not at their sum."""
    span = machine.timeline.open(machine.boundary())
    for pid in range(1, 101):
        machine.start(pid, 30 * MB)
        machine.tick()
        machine.probe.end(pid)
        machine.tick()
    peak = reading(machine.timeline.peaks(span, "run")["host"])
    assert peak.bytes == 30 * MB
    assert peak.upper == 30 * MB


def test_nothing_but_pytest(machine: Machine) -> None:
    """Without any process the run held nothing, which is no exact statement; pytest's own is apart."""
    machine.start(1, 90 * MB, PYTEST)
    span = machine.timeline.open(machine.boundary(), pid=1)
    machine.probe.set(1, 120 * MB)
    machine.boundary()
    peak = reading(machine.timeline.peaks(span, "run")["host"])
    assert (peak.bytes, peak.exact) == (0, False)
    assert "no process of this run besides pytest" in (peak.note or "")
    assert reading(machine.timeline.peaks(span, "process")["host"]).bytes == 120 * MB


def test_a_window_without_a_read_still_has_a_figure(machine: Machine) -> None:
    """A window that closed before anything was read reads 0 with the reason, and is not exact."""
    span = machine.timeline.open(0)
    peak = reading(machine.timeline.peaks(span, "run")["host"])
    assert (peak.bytes, peak.exact) == (0, False)


def test_backends_are_told_apart(machine: Machine) -> None:
    """A window's backend figure has its own backends and no others; the run has all."""
    machine.start(1, 10 * MB, "agent#1")
    machine.start(2, 20 * MB, "other#1")
    machine.start(3, 5 * MB)
    span = machine.timeline.open(machine.boundary(), ["agent#1"])
    machine.boundary()
    assert reading(machine.timeline.peaks(span, "backend")["host"]).bytes == 10 * MB
    assert reading(machine.timeline.peaks(span, "run")["host"]).bytes == 35 * MB
    host = machine.timeline.host_peak(span)
    assert isinstance(host, Reading)
    assert host.bytes == 10 * MB
    machine.timeline.use(span, ["other#1"])
    machine.boundary()
    assert reading(machine.timeline.peaks(span, "backend")["host"]).bytes == 30 * MB


def test_without_marks_the_samples_count() -> None:
    """Where marks cannot be set back, the peak is the largest sample and says so."""
    machine = Machine(marked=False)
    machine.start(1, 10 * MB)
    span = machine.timeline.open(machine.boundary())
    machine.probe.set(1, 60 * MB)
    machine.tick()
    machine.probe.set(1, 90 * MB)
    machine.probe.set(1, 10 * MB)
    machine.tick()
    peak = reading(machine.timeline.peaks(span, "run")["host"])
    assert (peak.bytes, peak.exact, peak.source, peak.samples) == (60 * MB, False, "host-rss", 2)
    assert peak.interval_ms == 10.0


def test_a_fault_is_never_a_figure(machine: Machine) -> None:
    """A device that could not be read once in a window has no figure for it, only the reason."""
    machine.start(1, 10 * MB)
    span = machine.timeline.open(machine.boundary())
    machine.tick()
    machine.probe.fault = "the device is gone"
    machine.tick()
    machine.probe.fault = None
    machine.tick()
    peak = machine.timeline.peaks(span, "run")["host"]
    assert isinstance(peak, Unmeasurable)
    assert peak.reason == "the device is gone"


def test_a_mark_that_fell_is_told(machine: Machine) -> None:
    """When another tool sets marks back as well, the figure is what was seen, and not exact."""
    machine.start(1, 10 * MB)
    span = machine.timeline.open(machine.boundary())
    machine.probe.set(1, 60 * MB)
    machine.tick()
    machine.probe.disturbed = True
    machine.tick()
    peak = reading(machine.timeline.peaks(span, "run")["host"])
    assert (peak.bytes, peak.exact) == (60 * MB, False)
    assert "another tool sets marks back" in (peak.note or "")


def test_an_orphan_of_an_unknown_backend(machine: Machine) -> None:
    """It counts for the run; a backend's figure may miss it, and says so."""
    machine.start(1, 10 * MB, "agent#1")
    span = machine.timeline.open(machine.boundary(), ["agent#1"])
    machine.start(2, 90 * MB, UNKNOWN)
    machine.boundary()
    run = reading(machine.timeline.peaks(span, "run")["host"])
    assert (run.bytes, run.exact, run.note) == (100 * MB, True, None)
    backend = reading(machine.timeline.peaks(span, "backend")["host"])
    assert (backend.bytes, backend.exact) == (10 * MB, False)
    assert backend.note == "p2, PID 2 is of some backend, unknown which, and not counted here"


def test_a_process_that_was_found_late(machine: Machine) -> None:
    """The window in which it was found is not exact; the next one is."""
    span = machine.timeline.open(machine.boundary())
    machine.start(2, 90 * MB)
    machine.members.late.extend(machine.members.all())
    machine.tick()
    later = machine.timeline.open(machine.boundary())
    machine.boundary()
    found = reading(machine.timeline.peaks(span, "run")["host"])
    assert (found.bytes, found.exact) == (90 * MB, False)
    assert "p2, PID 2 had left the process tree and was found late" in (found.note or "")
    assert reading(machine.timeline.peaks(later, "run")["host"]).exact


def test_now_and_held(machine: Machine) -> None:
    """Current figures are of the last read: what is held for good, and what compares with peaks."""
    machine.start(1, 10 * MB, "agent#1")
    machine.start(2, 20 * MB)
    machine.boundary()
    timeline = machine.timeline
    assert reading(timeline.now("run")["host"]).bytes == 15 * MB
    assert reading(timeline.held("run")["host"]).bytes == 30 * MB
    assert reading(timeline.held("backend", frozenset({"agent#1"}))["host"]).bytes == 10 * MB
    assert reading(timeline.held("backend")["host"]).bytes == 0


def test_shares_name_the_holders(machine: Machine) -> None:
    """Every process's own mark within the window is kept, pytest's left out."""
    machine.start(1, 10 * MB, "agent#1")
    machine.start(2, 20 * MB)
    machine.start(3, 99 * MB, PYTEST)
    span = machine.timeline.open(machine.boundary())
    machine.probe.set(1, 50 * MB)
    machine.boundary()
    assert {(held.pid, held.owner, held.bytes) for held in span.shares.values()} == {
        (1, "agent#1", 50 * MB),
        (2, "test", 20 * MB),
    }


def test_rate_of_a_window(machine: Machine) -> None:
    """The real interval and the longest gap are those of the window."""
    machine.tick()
    span = machine.timeline.open(machine.t)
    for _ in range(5):
        machine.tick()
    machine.t += 40_000_000
    machine.tick()
    rate = machine.timeline.rate(span)
    assert (rate.samples, rate.interval_ms, rate.longest_gap_ms) == (6, 10.0, 50.0)
    machine.timeline.close_probes()
    assert machine.probe.closed


def test_samples_without_a_window_have_no_rate(machine: Machine) -> None:
    """While nothing is open samples may come slowly; a window that opens then has the rate of its own samples."""
    told: list[bool] = []
    machine.timeline.on_open = lambda: told.append(machine.timeline.busy)
    machine.tick()
    machine.t += 100_000_000
    machine.tick()
    span = machine.timeline.open(machine.boundary())
    assert told == [True]
    for _ in range(3):
        machine.tick()
    assert machine.timeline.rate(span) == (3, 10.0, 10.0, 0, None)
    assert machine.timeline.rate() == (5, 10.0, 10.0, 0, None)
    machine.timeline.close(span)
    assert not machine.timeline.busy


def test_a_device_without_processes_is_its_only_backends(machine: Machine) -> None:
    """A device that does not say who holds its memory stands for one backend, not for one of two."""
    machine.probe.per_process = False
    machine.members.join(1, "agent#1")
    machine.probe.set(1, 10 * MB)
    span = machine.timeline.open(machine.boundary(), ["agent#1"], pid=1)
    machine.boundary()
    assert reading(machine.timeline.peaks(span, "backend")["host"]).bytes == 10 * MB
    assert reading(machine.timeline.peaks(span, "run")["host"]).bytes == 10 * MB
    machine.members.join(2, "other#1")
    machine.boundary()
    shared = machine.timeline.peaks(span, "backend")["host"]
    assert isinstance(shared, Unmeasurable)
    assert "other#1" in shared.reason
