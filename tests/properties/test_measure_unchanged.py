"""A read that finds everything as it was before is not worked through again: no figure may tell the difference."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from pytest_vram.measure.probes import Figure, Snapshot
from pytest_vram.measure.probes.nvml import NvmlProbe
from pytest_vram.measure.sanity import Judge
from pytest_vram.testing import Card, FakeDriver, Process, fake_nvml
from tests.unit.nvml_kit import NOBODY, contained, needs_fake, sleepers
from tests.unit.test_measure_sanity import card, snapshot

MIB = 1 << 20
Kind = Literal["compute", "graphics", "both", "mps"]
KINDS: tuple[Kind, ...] = ("compute", "graphics", "both", "mps")
Step = tuple[str, int, int, Kind]


@pytest.fixture
def driver() -> Iterator[FakeDriver]:
    """One card."""
    with fake_nvml([Card(total=8 << 30)]) as found:
        yield found


@pytest.fixture(scope="module")
def pids() -> Iterator[list[int]]:
    """Processes that do nothing."""
    with sleepers(4) as found:
        yield found


def forget(probe: NvmlProbe) -> None:
    """Let a probe work through its next read, whatever it finds."""
    probe._before = None
    probe._memory._raw = b""
    probe._processes._raw = ()


WHICH = st.sampled_from([0, 0, 1, 3, 4])
STEP = st.one_of(
    st.just(("read", 0, 0, "both")),
    st.just(("read", 0, 0, "both")),
    st.tuples(st.just("set"), WHICH, st.integers(0, 200), st.sampled_from(KINDS)),
    st.tuples(st.just("spike"), WHICH, st.integers(1, 400), st.just("both")),
    st.tuples(st.just("hidden"), st.just(0), st.integers(0, 400), st.just("both")),
    st.tuples(st.just("ask"), st.integers(0, 4), st.just(0), st.just("both")),
    st.just(("reset", 0, 0, "both")),
    st.just(("settle", 0, 0, "both")),
)


@needs_fake
@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(accounting=st.booleans(), container=st.booleans(), steps=st.lists(STEP, min_size=5, max_size=25))
def test_a_card_that_stands_still(
    driver: FakeDriver, pids: list[int], accounting: bool, container: bool, steps: list[Step]
) -> None:
    """Whatever happens between two reads, one who works through each of them finds the same."""
    driver.update(hidden=0, accounting=accounting, processes=())
    held: dict[int, Process] = {}
    asked, hidden = pids[:2], 0
    with contained(container=container) as quick, contained(container=container) as thorough:
        for what, which, size, kind in [*steps, ("read", 0, 0, "both"), ("read", 0, 0, "both")]:
            pid = pids[which] if which < len(pids) else NOBODY
            if what == "set":
                before = held.pop(pid, None)
                if size:
                    most = max(size * MIB, before.peaked if before is not None else 0)
                    held[pid] = Process(pid=pid, held=size * MIB, kind=kind, peaked=most, began=1000)
            elif what == "spike" and pid in held:
                held[pid] = replace(held[pid], peaked=held[pid].peaked + size * MIB)
            elif what == "hidden":
                hidden = size * MIB
            elif what == "ask":
                asked = pids[:which]
            elif what in ("reset", "settle"):
                getattr(quick, what)()
                getattr(thorough, what)()
            driver.update(hidden=hidden, processes=tuple(held.values()))
            forget(thorough)
            assert quick.read(asked) == thorough.read(asked)
            assert (quick.per_process, quick.note) == (thorough.per_process, thorough.note)


@needs_fake
@pytest.mark.parametrize("accounting", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_it_is_known_by_its_snapshot(driver: FakeDriver, pids: list[int], accounting: bool, kind: Kind) -> None:
    """A card where nothing moves gives the very snapshot of the read before; one byte more makes another."""
    one = Process(pid=pids[0], held=MIB, kind=kind, began=1)
    driver.update(hidden=0, accounting=accounting, processes=(one,))
    with contained(container=False) as probe:
        first = probe.read(pids)
        assert probe.read(list(pids)) is first
        driver.update(processes=(replace(one, peaked=9 * MIB),))
        assert (probe.read(pids) is first) is not accounting, "its peak is what accounting tells"
        driver.update(hidden=1, processes=(replace(one, held=MIB - 1),))
        assert probe.read(pids).processes[pids[0]].held == MIB - 1, "though the device's figure is the same"
        driver.update(hidden=2)
        device = probe.read(pids).device
        assert device is not None
        assert device.held == MIB + 1


@needs_fake
def test_a_doubt_that_time_decides(driver: FakeDriver, pids: list[int]) -> None:
    """While it is open whose a listed process is, time goes on for a card where nothing moves."""
    driver.update(hidden=0, accounting=False, processes=(Process(pid=NOBODY, held=MIB),))
    with contained(container=False) as probe:
        now = 0
        probe._trust._clock = lambda: now
        for _ in range(3):
            probe.read(pids)
        assert probe.per_process
        now = 2_000_000_000
        assert f"PID {NOBODY}, which does not exist here" in (probe.read(pids).doubt or "")
        assert not probe.per_process


SNAPSHOTS = st.tuples(st.sampled_from([0, 100, 200]), st.sampled_from([0, 100, 400, 1000, 9000]), st.integers(0, 1))


@given(st.lists(st.tuples(SNAPSHOTS, st.integers(1, 12)), max_size=12))
@settings(max_examples=300, deadline=None)
def test_what_is_refused(reads: list[tuple[tuple[int, int, int], int]]) -> None:
    """A read that is the one before is judged like one that is only equal to it, and so are all that come after."""
    quick, thorough = Judge(card()), Judge(card())
    for (held, used, others), times in reads:
        given = snapshot({1: held * MIB} if held else {}, used * MIB, {2: 5 * MIB} if others else {})
        for _ in range(times):
            assert quick.check(given) == thorough.check(given._replace())


def test_equal_and_not_the_same() -> None:
    """What the two judges above are told is really equal, and not the same object."""
    one = Snapshot({1: Figure(1, 1)}, None)
    assert one._replace() == one
    assert one._replace() is not one
