"""Whatever processes do between reads, the interval holds the true peak."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_vram.measure import PYTEST, TEST, Timeline
from pytest_vram.readings import Reading
from tests.unit.measure_kit import PaperCard, PaperMembers, PaperProbe

MIB = 1 << 20
STEP = st.one_of(
    st.tuples(st.just("set"), st.integers(1, 4), st.integers(0, 400)),
    st.tuples(st.just("tick"), st.just(0), st.just(0)),
    st.tuples(st.just("boundary"), st.just(0), st.just(0)),
    st.tuples(st.just("join"), st.integers(5, 9), st.integers(0, 100)),
)


@given(st.integers(1, 4), st.lists(STEP, max_size=60))
@settings(max_examples=300, deadline=None)
def test_the_interval_holds_the_peak(count: int, steps: list[tuple[str, int, int]]) -> None:
    """Lower end ≤ true peak of the sum ≤ upper end; for a single process both are the peak."""
    members, probe = PaperMembers(), PaperProbe()
    timeline = Timeline([probe], probe, members)
    for pid in range(1, count + 1):
        members.join(pid)
        probe.set(pid, 10 * MIB)
    timeline.boundary(0)
    span = timeline.open(0)
    truth = sum(probe.held.values())
    for now, (what, pid, size) in enumerate(steps, 1):
        if what == "set" and pid in probe.held:
            probe.set(pid, size * MIB)
        elif what == "join" and pid not in probe.held:
            members.join(pid)
            probe.set(pid, size * MIB)
        elif what == "tick":
            timeline.tick(now)
        elif what == "boundary":
            timeline.boundary(now)
        truth = max(truth, sum(probe.held.values()))
    timeline.boundary(len(steps) + 1)
    peak = timeline.peaks(span, "run")["host"]
    assert isinstance(peak, Reading)
    assert peak.bytes <= truth <= peak.upper
    assert peak.exact
    if len(probe.held) == 1:
        assert peak.at_most is None
        assert peak.bytes == truth


ON_A_CARD = st.one_of(
    st.tuples(st.just("set"), st.integers(1, 9), st.integers(0, 400)),
    st.tuples(st.just("stranger"), st.integers(50, 53), st.integers(0, 400)),
    st.tuples(st.just("tick"), st.just(0), st.just(0)),
    st.tuples(st.just("boundary"), st.just(0), st.just(0)),
    st.tuples(st.just("join"), st.integers(5, 9), st.integers(0, 100)),
    st.tuples(st.just("end"), st.integers(1, 9), st.just(0)),
)


class Card:
    """A card with three processes of the run, one of them pytest's, and the truth about it."""

    def __init__(self, *, accounting: bool) -> None:
        self.members, self.card, self.host = PaperMembers(), PaperCard(accounting=accounting), PaperProbe()
        self.timeline = Timeline([self.card], self.host, self.members)
        self.now = 0
        for pid in (1, 2, 3):
            self.join(pid, 10)
        self.boundary()
        self.span = self.timeline.open(self.now)
        self.truth = self.sum()
        self.strangers: dict[int, list[int]] = {}

    def join(self, pid: int, size: int) -> None:
        self.members.join(pid, PYTEST if pid == 1 else TEST)
        self.card.set(pid, size * MIB)
        self.host.set(pid, MIB)

    def boundary(self) -> None:
        self.now += 1
        self.timeline.boundary(self.now)

    def sum(self) -> int:
        return sum(size for pid, size in self.card.held.items() if pid < 50)

    def do(self, what: str, pid: int, size: int) -> None:
        mine = self.members.get(pid) is not None and pid in self.card.held
        if (what == "set" and mine) or what == "stranger":
            self.card.set(pid, size * MIB)
        elif what == "join" and self.members.get(pid) is None and pid not in self.host.held:
            self.join(pid, size)
        elif what == "end" and mine:
            self.card.end(pid)
            self.host.end(pid)
        elif what in ("tick", "boundary"):
            self.now += 1
            (self.timeline.tick if what == "tick" else self.timeline.boundary)(self.now)
            for other, held in self.card.held.items():
                if other >= 50:
                    self.strangers.setdefault(other, []).append(held)
        self.truth = max(self.truth, self.sum())


@given(st.booleans(), st.lists(ON_A_CARD, max_size=60))
@settings(max_examples=300, deadline=None)
def test_the_interval_holds_the_peak_on_a_card(accounting: bool, steps: list[tuple[str, int, int]]) -> None:
    """With the driver's accounting the interval holds the true peak whatever comes and goes, though the driver keeps
    peaks of whole lives; without it the figure is never above the truth, and is not called exact. What strangers do
    changes nothing, and is known as it was read."""
    machine = Card(accounting=accounting)
    for step in steps:
        machine.do(*step)
    machine.do("boundary", 0, 0)
    peak = machine.timeline.peaks(machine.span, "run")["gpu0"]
    assert isinstance(peak, Reading)
    assert peak.bytes <= machine.truth
    if accounting:
        assert machine.truth <= peak.upper
        if peak.exact:
            assert peak.source == "nvml-accounting"
    else:
        assert not peak.exact
        assert peak.at_most is None
    for pid, sizes in machine.strangers.items():
        seen = machine.span.strangers[("gpu0", pid)]
        assert (seen.opening, seen.most, seen.held) == (0, max(sizes), sizes[-1])


@given(st.lists(ON_A_CARD, max_size=25), st.lists(ON_A_CARD, max_size=25))
@settings(max_examples=200, deadline=None)
def test_switching_to_the_whole_device(before: list[tuple[str, int, int]], after: list[tuple[str, int, int]]) -> None:
    """When figures by process turn out not to be, the peak goes on: not above the truth while no stranger moves, at
    least what was there at the last read, labelled, and never exact."""
    machine = Card(accounting=False)
    for step in before:
        if step[0] != "stranger":
            machine.do(*step)
    machine.card.distrust("the driver says N/A")
    for step in after:
        if step[0] != "stranger":
            machine.do(*step)
    machine.do("boundary", 0, 0)
    peak = machine.timeline.peaks(machine.span, "run")["gpu0"]
    assert isinstance(peak, Reading)
    assert machine.sum() <= peak.bytes <= machine.truth
    assert not peak.exact
    if peak.bytes:
        assert peak.source == "device-delta"
        assert "the driver says N/A" in (peak.note or "")
