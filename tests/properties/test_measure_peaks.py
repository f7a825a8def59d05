"""Whatever processes do between reads, the interval holds the true peak."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_vram.measure import Timeline
from pytest_vram.readings import Reading
from tests.unit.measure_kit import PaperMembers, PaperProbe

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
