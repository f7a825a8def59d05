"""From reads of a card to what a window says: who counts, strangers, spill, lost devices, and when the peak came."""

from __future__ import annotations

import pytest

from pytest_vram.measure import PYTEST, Span, Timeline
from pytest_vram.readings import Measured, Reading, Unmeasurable
from tests.unit.measure_kit import PaperCard, PaperMembers, PaperProbe

MB = 1_000_000
MIB = 1 << 20
TICK = 10_000_000


class Machine:
    def __init__(self, *, accounting: bool = False, oversubscribes: bool = False, capacity: int = 1 << 34) -> None:
        self.members = PaperMembers()
        self.card = PaperCard(accounting=accounting, oversubscribes=oversubscribes, capacity=capacity)
        self.host = PaperProbe()
        self.timeline = Timeline([self.card], self.host, self.members, interval=TICK, clock=lambda: self.t + 500)
        self.t = 0

    def start(self, pid: int, size: int, owner: str = "test") -> None:
        self.members.join(pid, owner)
        self.card.set(pid, size)
        self.host.set(pid, 5 * MB)

    def tick(self, *sizes: tuple[int, int]) -> None:
        for pid, size in sizes:
            self.card.set(pid, size)
        self.t += TICK
        self.timeline.tick(self.t)

    def open(self, owners: tuple[str, ...] = (), pid: int | None = None) -> Span:
        self.boundary()
        return self.timeline.open(self.t, owners, pid)

    def boundary(self) -> None:
        self.t += 1_000
        self.timeline.boundary(self.t)

    def peak(self, span: Span, scope: str = "run") -> Reading:
        return reading(self.timeline.peaks(span, scope)["gpu0"])


@pytest.fixture
def machine() -> Machine:
    return Machine()


def reading(found: Measured) -> Reading:
    assert isinstance(found, Reading), found
    return found


# ---------------------------------------------------------------- who counts


def test_pytest_counts_on_a_card(machine: Machine) -> None:
    """What pytest's own processes hold on a card is the run's, and the scope ``process`` is the test's own one."""
    machine.start(1, 3 * MB, PYTEST)
    machine.start(2, 4 * MB, PYTEST)
    machine.start(3, 10 * MB, "agent#1")
    span = machine.open(("agent#1",), pid=1)
    machine.tick()
    assert machine.peak(span).bytes == 17 * MB
    assert machine.peak(span, "process").bytes == 3 * MB
    assert machine.peak(span, "backend").bytes == 10 * MB
    assert {(held.pid, held.owner, held.bytes) for held in span.shares.values()} == {
        (1, PYTEST, 3 * MB),
        (2, PYTEST, 4 * MB),
        (3, "agent#1", 10 * MB),
    }
    assert reading(machine.timeline.held("run")["gpu0"]).bytes == 17 * MB


def test_a_parent_with_a_context_of_its_own(machine: Machine) -> None:
    """A server's parent that serves nothing counts with what it holds, and is named with it."""
    machine.start(1, 555 * MIB, "router#1")
    machine.start(2, 6000 * MIB, "router#1")
    span = machine.open(("router#1",))
    machine.tick()
    assert machine.peak(span, "backend").bytes == 6555 * MIB
    assert span.shares[("gpu0", 1)].bytes == 555 * MIB


def test_nobody_on_the_card(machine: Machine) -> None:
    """A run that never came onto the card held 0, which samples cannot prove; the note says that nobody was seen."""
    machine.start(1, 0)
    span = machine.open(pid=1)
    machine.tick()
    peak = machine.peak(span)
    assert (peak.bytes, peak.exact) == (0, False)
    assert "no process of this run was seen on it" in (peak.note or "")
    assert "this process was not seen on it" in (machine.peak(span, "process").note or "")


def test_samples_of_several_processes_do_not_add_up(machine: Machine) -> None:
    """Without marks the largest sum of one read is the peak; largest reads of different moments are not summed."""
    machine.start(1, MB)
    machine.start(2, MB)
    span = machine.open()
    machine.tick((1, 100 * MB))
    machine.tick((1, MB), (2, 90 * MB))
    peak = machine.peak(span)
    assert (peak.bytes, peak.at_most, peak.exact, peak.source) == (101 * MB, None, False, "nvml-process")
    assert peak.note == "the peak is the largest sample"
    assert peak.interval_ms == 10.0


def test_one_that_ended_elsewhere_is_not_the_cards_concern(machine: Machine) -> None:
    """A helper that never was on the card and ends does not make the card's figure doubtful."""
    machine.start(1, 10 * MB)
    machine.members.join(2)
    machine.host.set(2, MB)
    span = machine.open()
    machine.host.end(2)
    machine.card.over.add(2)
    machine.boundary()
    assert machine.members.get(2) is None
    assert machine.peak(span).note == "the peak is the largest sample"


def test_a_newcomer_is_looked_for_at_once(machine: Machine) -> None:
    """A process that comes onto the card between two looks for processes counts from the read that shows it."""
    machine.start(1, 10 * MB)
    span = machine.open()
    machine.tick()
    since = machine.t

    def scan(*, look: bool = True) -> None:
        if machine.members.get(2) is None:
            machine.members.join(2)

    machine.members.scan = scan  # type: ignore[method-assign]
    machine.tick((2, 70 * MB))
    assert machine.peak(span).bytes == 80 * MB
    assert not span.strangers
    assert span.run["gpu0"].since == since


# ---------------------------------------------------------------- marks that are true for longer


def test_accounting_is_exact_where_the_peak_rose() -> None:
    """A peak that the driver kept is exact, though no sample saw it."""
    machine = Machine(accounting=True)
    machine.start(1, 10 * MB)
    span = machine.open()
    machine.card.set(1, 900 * MB)
    machine.card.set(1, 10 * MB)
    machine.tick()
    peak = machine.peak(span)
    assert (peak.bytes, peak.at_most, peak.exact, peak.source) == (900 * MB, None, True, "nvml-accounting")


def test_helpers_that_never_were_on_the_card() -> None:
    """A process of the run that the driver never accounted for held nothing, and leaves the figure exact."""
    machine = Machine(accounting=True)
    machine.start(1, 10 * MB)
    machine.members.join(2)
    machine.host.set(2, MB)
    span = machine.open()
    machine.tick((1, 50 * MB))
    peak = machine.peak(span)
    assert (peak.bytes, peak.at_most, peak.exact) == (50 * MB, None, True)


def test_accounting_bounds_where_it_did_not() -> None:
    """A peak below that of the process's whole life lies between the largest sample and it."""
    machine = Machine(accounting=True)
    machine.start(1, 10 * MB)
    machine.card.set(1, 900 * MB)
    machine.card.set(1, 10 * MB)
    span = machine.open()
    machine.tick((1, 300 * MB))
    bounded = machine.peak(span)
    assert (bounded.bytes, bounded.at_most, bounded.exact, bounded.source) == (
        300 * MB,
        900 * MB,
        False,
        "nvml-process",
    )
    assert "whole lives" in (bounded.note or "")


def test_an_upper_end_that_is_reached_is_exact() -> None:
    """Where a process holds as much as it ever did, sample and upper end agree, and nothing is left open."""
    machine = Machine(accounting=True)
    machine.start(1, 500 * MB)
    machine.open()
    span = machine.open()
    # The baseline is of the read at which the marks were set back.
    assert reading(machine.timeline.held("run")["gpu0"]).bytes == 500 * MB
    machine.tick()
    peak = machine.peak(span)
    assert (peak.bytes, peak.at_most, peak.exact) == (500 * MB, None, True)


def test_the_exact_peak_of_one_that_ended() -> None:
    """The driver gives the peak of a process once more after its end, and the figure stays exact."""
    machine = Machine(accounting=True)
    machine.start(1, 10 * MB)
    span = machine.open()
    machine.tick()
    machine.card.set(1, 700 * MB)
    machine.card.end(1)
    machine.host.end(1)
    machine.tick()
    peak = machine.peak(span)
    assert (peak.bytes, peak.exact) == (700 * MB, True)


def test_the_last_word_of_one_that_was_missed_first_elsewhere() -> None:
    """The same where its end was noticed in host memory a read before the card's driver told."""
    machine = Machine(accounting=True)
    machine.start(1, 10 * MB, "agent#1")
    span = machine.open(("agent#1",))
    machine.tick()
    machine.host.end(1)
    machine.boundary()
    assert machine.members.get(1) is None
    machine.card.set(1, 700 * MB)
    machine.card.end(1)
    machine.tick()
    assert machine.peak(span).bytes == 700 * MB
    assert machine.peak(span, "backend").bytes == 700 * MB


# ---------------------------------------------------------------- where only the device is known


def test_figures_that_turn_out_not_to_be_by_process(machine: Machine) -> None:
    """When the driver stops saying who holds what, the peak goes on as a device's and says so, with the reason."""
    machine.start(1, 100 * MB)
    span = machine.open(pid=1)
    machine.tick()
    machine.card.distrust("N/A per process")
    machine.tick((1, 400 * MB))
    peak = machine.peak(span)
    assert (peak.bytes, peak.exact, peak.source) == (400 * MB, False, "device-delta")
    assert "N/A per process" in (peak.note or "")
    assert "for the rest of the whole device" in (peak.note or "")
    assert isinstance(machine.timeline.peaks(span, "process")["gpu0"], Unmeasurable)
    later = machine.open()
    machine.tick()
    rest = machine.peak(later)
    assert (rest.bytes, rest.source) == (400 * MB, "device-delta")
    assert "for the rest" not in (rest.note or "")
    baseline = reading(machine.timeline.held("run")["gpu0"])
    assert (baseline.source, baseline.exact, baseline.note) == ("device-delta", False, "N/A per process")


def test_another_backend_beside_one_that_is_a_device(machine: Machine) -> None:
    """Where only the device is known, a second backend makes the first one's figure unknown from its first moment,
    though no figure changed."""
    machine.start(1, 100 * MB, "agent#1")
    machine.card.distrust("N/A per process")
    span = machine.open(("agent#1",))
    machine.tick()
    machine.tick()
    assert machine.peak(span, "backend").bytes == 100 * MB
    machine.members.join(2, "other#1")
    machine.tick()
    assert isinstance(machine.timeline.peaks(span, "backend")["gpu0"], Unmeasurable)


def test_figures_by_process_that_come_back(machine: Machine) -> None:
    """A peak that was the device's for a while is called so, though figures by process came after it."""
    machine.start(1, 100 * MB)
    machine.card.distrust("N/A per process")
    span = machine.open()
    machine.tick()
    machine.card.per_process, machine.card.doubt = True, None
    machine.card.sources = PaperCard().sources
    machine.tick((1, 200 * MB))
    peak = machine.peak(span)
    assert (peak.bytes, peak.source) == (200 * MB, "device-delta")


# ---------------------------------------------------------------- strangers


def test_one_that_turns_out_to_be_of_the_run(machine: Machine) -> None:
    """A process that was taken for a stranger is none any more once it is known."""
    machine.start(1, 10 * MIB)
    span = machine.open()
    machine.tick((50, 500 * MIB))
    assert ("gpu0", 50) in span.strangers
    machine.members.join(50)
    machine.tick()
    assert span.strangers == {}
    assert machine.peak(span).bytes == 510 * MIB


def test_strangers_that_grow(machine: Machine) -> None:
    """Each stranger is known by what it held at the opening, most and last; growth is told once, when it is seen."""
    told: list[tuple[str, int]] = []
    machine.timeline.on_growth = lambda span, label, pid: told.append((label, pid))
    machine.card.set(50, 200 * MIB)
    machine.start(1, 10 * MIB)
    span = machine.open()
    machine.tick((50, 264 * MIB))
    assert told == []
    machine.tick((50, 265 * MIB))
    machine.tick((50, 300 * MIB))
    machine.tick((50, 100 * MIB))
    assert told == [("gpu0", 50)]
    machine.tick((60, 65 * MIB))
    assert told == [("gpu0", 50), ("gpu0", 60)]
    machine.card.end(60)
    machine.tick()
    old, new = span.strangers[("gpu0", 50)], span.strangers[("gpu0", 60)]
    assert (old.opening, old.most, old.held, old.grew) == (200 * MIB, 300 * MIB, 100 * MIB, 100 * MIB)
    assert (new.opening, new.most, new.held, new.grew) == (0, 65 * MIB, 0, 65 * MIB)
    assert machine.peak(span).bytes == 10 * MIB


def test_a_window_begins_with_what_strangers_hold(machine: Machine) -> None:
    """What a stranger took before a window is no growth within it."""
    machine.card.set(50, 20 * MIB)
    first = machine.open()
    machine.tick((50, 500 * MIB))
    second = machine.open()
    machine.tick()
    assert first.strangers[("gpu0", 50)].grew == 480 * MIB
    assert second.strangers[("gpu0", 50)].grew == 0


def test_memory_of_nobody(machine: Machine) -> None:
    """What no listed process holds is followed in the same way, and its growth told with PID 0; one read is not enough,
    because the list and the device's figure are read one after the other."""
    told: list[tuple[str, int]] = []
    machine.timeline.on_growth = lambda span, label, pid: told.append((label, pid))
    machine.card.hidden = 300 * MIB
    span = machine.open()
    machine.card.hidden = 900 * MIB
    machine.tick()
    machine.card.hidden = 400 * MIB
    machine.tick()
    machine.card.hidden = 300 * MIB
    machine.tick()
    assert span.unlisted["gpu0"].grew == 100 * MIB
    assert told == [("gpu0", 0)]
    machine.card.hidden = 500 * MIB
    machine.tick()
    machine.tick()
    assert span.unlisted["gpu0"].grew == 200 * MIB
    assert told == [("gpu0", 0)]


def test_many_strangers_are_forgotten_when_gone(machine: Machine) -> None:
    """Thousands of short strangers in one window leave a bounded table, which keeps those that are there."""
    machine.card.set(7, 90 * MIB)
    span = machine.open()
    for pid in range(1000, 4000):
        machine.card.set(pid, MIB)
        machine.tick()
        machine.card.end(pid)
    machine.tick()
    assert len(span.strangers) <= 257
    assert span.strangers[("gpu0", 7)].opening == 90 * MIB


# ---------------------------------------------------------------- spill


def test_spill_that_the_driver_tells(machine: Machine) -> None:
    """The most that lay in host memory at one read, summed over the run; nothing said where there was none."""
    machine.start(1, 900 * MIB)
    machine.start(2, 900 * MIB)
    quiet = machine.open()
    machine.tick()
    assert machine.timeline.spill(quiet) == {}
    machine.card.spill = {1: 30 * MIB, 2: 40 * MIB, 99: 500 * MIB}
    machine.tick()
    machine.card.spill = {1: 50 * MIB}
    machine.tick()
    found = reading(machine.timeline.spill(quiet)["gpu0"])
    assert (found.bytes, found.scope, found.exact) == (70 * MIB, "run", False)


def test_spill_is_what_lies_beyond_the_card() -> None:
    """On a device that oversubscribes, two processes of 6 GiB each on an 8 GiB card have 4 GiB elsewhere."""
    machine = Machine(oversubscribes=True, capacity=8 << 30)
    machine.start(1, 6 << 30)
    span = machine.open()
    machine.tick()
    assert machine.timeline.spill(span) == {}
    machine.start(2, 6 << 30)
    machine.tick()
    assert reading(machine.timeline.spill(span)["gpu0"]).bytes == 4 << 30
    assert machine.peak(span).bytes == 12 << 30


def test_the_same_is_impossible_elsewhere() -> None:
    """Where nothing can be allocated beyond the card, the figure is refused, and the window has none."""
    machine = Machine(capacity=8 << 30)
    machine.start(1, 12 << 30)
    span = machine.open()
    machine.tick()
    found = machine.timeline.peaks(span, "run")["gpu0"]
    assert isinstance(found, Unmeasurable)
    assert "refused" in found.reason


# ---------------------------------------------------------------- devices that go away


def test_a_lost_device_is_told(machine: Machine) -> None:
    """A card that falls off the bus leaves no figure, and a sentence that names it."""
    machine.start(1, 10 * MB)
    before = machine.open()
    machine.timeline.close(before)
    span = machine.open()
    machine.tick()
    machine.card.fault, machine.card.lost = "GPU is lost", True
    machine.tick()
    machine.tick()
    assert span.lost == ["gpu0 (paper card) was lost: GPU is lost"]
    assert before.lost == []
    for scope in ("run", "device"):
        found = machine.timeline.peaks(span, scope)["gpu0"]
        assert isinstance(found, Unmeasurable)
        assert found.reason == "GPU is lost"


def test_one_failed_read_is_no_lost_device(machine: Machine) -> None:
    """A read that failed once leaves the window without a figure, with the reason; the device is not lost."""
    machine.start(1, 10 * MB)
    span = machine.open()
    machine.card.fault = "unknown error"
    machine.tick()
    machine.card.fault = None
    machine.tick()
    assert (span.lost, span.faults) == ([], {"gpu0": "unknown error"})
    assert isinstance(machine.timeline.peaks(span, "run")["gpu0"], Unmeasurable)
    assert machine.peak(machine.open()).bytes == 10 * MB


# ---------------------------------------------------------------- when


def test_when_the_peak_came(machine: Machine) -> None:
    """The peak was reached after the read before the one that showed it began, and before that one was over."""
    machine.start(1, 10 * MB)
    span = machine.open()
    machine.tick()
    since = machine.t
    machine.tick((1, 90 * MB))
    at = machine.t
    machine.tick((1, 50 * MB))
    machine.tick((1, 90 * MB))
    assert (span.run["gpu0"].since, span.run["gpu0"].at) == (since, at + 500)


def test_gaps_are_counted(machine: Machine) -> None:
    """Intervals of more than three times the wanted one are gaps, of the window and of the run."""
    span = machine.open()
    machine.tick()
    machine.t += 2 * TICK
    machine.tick()
    assert machine.timeline.rate(span).gaps == 0
    machine.t += 3 * TICK
    machine.tick()
    late = machine.open()
    machine.tick()
    rate = machine.timeline.rate(span)
    assert (rate.gaps, rate.longest_gap_ms) == (1, 40.0)
    assert machine.timeline.rate(late).gaps == 0
    assert machine.timeline.rate().gaps == 1


def test_equal_reads_are_taken_in_by_a_new_window(machine: Machine) -> None:
    """A window that opens while nothing moves has its figures all the same, also of a backend that it gets later."""
    machine.start(1, 10 * MB, "agent#1")
    machine.open()
    machine.tick()
    span = machine.open()
    machine.tick()
    machine.tick()
    machine.timeline.use(span, ("agent#1",))
    machine.tick()
    assert machine.peak(span).bytes == machine.peak(span, "backend").bytes == 10 * MB


def test_the_host_is_read_seldom_beside_a_card(machine: Machine) -> None:
    """Host memory that is no judged device is read at boundaries and a few times a second, and misses nothing."""
    machine.start(1, 10 * MB, "agent#1")
    span = machine.open(("agent#1",))
    reads = 0
    read = machine.host.read

    def counted(pids: list[int]) -> object:
        nonlocal reads
        reads += 1
        return read(pids)

    machine.host.read = counted  # type: ignore[assignment, method-assign]
    machine.host.set(1, 800 * MB)
    machine.host.set(1, 5 * MB)
    for _ in range(100):
        machine.tick()
    machine.boundary()
    assert 4 <= reads <= 6
    found = machine.timeline.host_peak(span)
    assert isinstance(found, Reading)
    assert (found.bytes, found.exact) == (800 * MB, True)


def test_the_host_is_not_read_for_nobody(machine: Machine) -> None:
    """Without backends host memory says nothing; of one that starts, what it held before its first read counts."""
    reads: list[int] = []
    read = machine.host.read

    def counted(pids: list[int]) -> object:
        reads.append(len(pids))
        return read(pids)

    machine.host.read = counted  # type: ignore[assignment, method-assign]
    machine.start(1, 10 * MB)
    span = machine.open()
    for _ in range(100):
        machine.tick()
    machine.boundary()
    assert reads == []
    machine.start(2, 10 * MB, "agent#1")
    machine.host.set(2, 900 * MB)
    machine.host.set(2, 5 * MB)
    machine.boundary()
    machine.timeline.use(span, ("agent#1",))
    assert reads == [2]
    machine.members.forget(2)
    machine.boundary()
    assert len(reads) == 2, "it has ended since the read before"
    machine.boundary()
    assert len(reads) == 2


def test_the_host_says_who_has_ended(machine: Machine) -> None:
    """Where the card does not tell processes apart, host memory is read for who has ended."""
    machine.start(1, 10 * MB)
    machine.card.distrust("no figures")
    machine.boundary()
    machine.host.end(1)
    machine.boundary()
    machine.boundary()
    assert machine.members.get(1) is None
