"""What a window says when nobody looked for a while, when a read failed, and when nobody knows whose memory it is."""

from __future__ import annotations

import pytest

from pytest_vram.measure import Timeline
from pytest_vram.readings import Unmeasurable
from tests.unit.test_measure_cards import MB, MIB, TICK, Machine


@pytest.fixture
def machine() -> Machine:
    return Machine()


@pytest.mark.parametrize(("gap", "missed"), [(499, False), (500, True), (1500, True)])
@pytest.mark.parametrize("way", ["between samples", "within a read", "before the end"])
def test_a_long_gap_leaves_a_lower_end(gap: int, missed: bool, way: str) -> None:
    """Where nobody looked for half a second samples say nothing of that time, however the gap came about."""
    machine = Machine()
    late = [500]
    machine.timeline = Timeline(
        [machine.card], machine.host, machine.members, interval=TICK, clock=lambda: machine.t + late[0]
    )
    machine.start(1, 10 * MB)
    span = machine.open()
    machine.tick()
    if way == "within a read":
        late[0] += gap * 1_000_000
        machine.tick()
        machine.t += gap * 1_000_000
        late[0] -= gap * 1_000_000
        gap += 10
        missed = gap >= 500
    elif way == "between samples":
        machine.t += gap * 1_000_000 - TICK
        machine.tick()
    else:
        machine.t += gap * 1_000_000 - 1_000
    machine.boundary()
    machine.timeline.close(span)
    peak = machine.peak(span)
    assert peak.bytes == 10 * MB
    assert (f"for {gap:,} ms nobody looked" in (peak.missed or "")) == missed
    late_span = machine.open()
    machine.tick()
    assert machine.peak(late_span).missed is None, "a gap before the window is not of it"


def test_slow_samples_have_longer_gaps() -> None:
    """A gap is long only where it is fifty of the wanted intervals as well."""
    machine = Machine()
    machine.timeline = Timeline([machine.card], machine.host, machine.members, interval=100_000_000)
    machine.start(1, 10 * MB)
    span = machine.open()
    machine.t += 4_980_000_000
    machine.tick()
    assert machine.peak(span).missed is None
    machine.t += 5_000_000_000
    machine.tick()
    assert machine.peak(span).missed is not None


def test_what_is_no_gap() -> None:
    """Slow reads one after another leave no gap of their sum, and time before the window is none of it."""
    machine = Machine()
    late = 400_000_000
    machine.timeline = Timeline(
        [machine.card], machine.host, machine.members, interval=TICK, clock=lambda: machine.t + late
    )
    machine.start(1, 10 * MB)
    machine.tick()
    machine.t += 1_500_000_000
    span = machine.timeline.open(machine.t)
    machine.tick()
    for _ in range(4):
        machine.t += late
        machine.tick()
    assert machine.peak(span).missed is None


def test_a_gap_takes_nothing_from_marks() -> None:
    """An exact source misses nothing while nobody looks; neither do upper ends, which hold for whole lives."""
    machine = Machine(accounting=True)
    machine.start(1, 10 * MB)
    span = machine.open()
    machine.t += 1_500_000_000
    machine.tick((1, 90 * MB))
    assert (machine.peak(span).exact, machine.peak(span).missed) == (True, None)
    machine.tick((1, MB))
    late = machine.open()
    machine.t += 1_500_000_000
    machine.tick()
    peak = machine.peak(late)
    assert (peak.bytes, peak.at_most, peak.missed) == (MB, 90 * MB, None)


def test_nobody_seen_with_a_gap_is_not_nothing(machine: Machine) -> None:
    """A card on which nobody was seen may have been used while nobody looked."""
    span = machine.open()
    machine.t += 600_000_000
    machine.tick()
    assert machine.peak(span).missed is not None


def test_one_failed_read_leaves_what_was_seen(machine: Machine) -> None:
    """A read that fails leaves no figure, and what was held before and after it is known."""
    machine.start(1, 10 * MB)
    span = machine.open()
    machine.tick((1, 70 * MB))
    machine.card.fault = "Unknown Error"
    machine.tick()
    machine.card.fault = None
    machine.tick((1, 80 * MB))
    found = machine.timeline.peaks(span, "run")["gpu0"]
    assert isinstance(found, Unmeasurable)
    assert (found.reason, found.at_least, found.source) == ("Unknown Error", 80 * MB, "nvml-process")
    fresh = machine.open()
    machine.tick()
    assert machine.peak(fresh).bytes == 80 * MB


def test_figures_refused_together_leave_nothing(machine: Machine) -> None:
    """Figures that several reads speak against are no lower end either: those before were as wrong."""
    machine.start(1, 10 * MB)
    machine.tick()
    span = machine.open()
    for _ in range(2):
        machine.tick()
    machine.card.hidden = 100 * MIB
    for _ in range(8):
        machine.tick()
    found = machine.timeline.peaks(span, "run")["gpu0"]
    assert isinstance(found, Unmeasurable)
    assert "frozen" in found.reason
    assert found.at_least is None
    late = machine.open()
    machine.tick()
    assert machine.peak(late).bytes == 10 * MB, "a step that is over spoils no later window"
    assert "frozen" in (machine.peak(late).note or "")


def test_a_baseline_that_may_hold_the_runs_own_memory(machine: Machine) -> None:
    """The rise is then the lower end, and all that is in use the upper one: two gigabytes are not under one."""
    machine.start(1, 2000 * MB)
    machine.card.distrust("N/A")
    machine.card.quiet = 2000 * MB
    machine.card.early = True
    span = machine.open()
    machine.tick((1, 2100 * MB))
    peak = machine.peak(span)
    assert (peak.bytes, peak.at_most, peak.source, peak.exact) == (100 * MB, 2100 * MB, "device-delta", False)
    machine.t += 600_000_000
    machine.tick()
    assert machine.peak(span).missed is not None, "its upper end is of the reads"
