"""Figures that cannot be, and figures that can though they look as if they could not."""

from __future__ import annotations

import pytest

from pytest_vram.measure import DeviceInfo
from pytest_vram.measure.probes import Figure, Snapshot
from pytest_vram.measure.sanity import FAR, MOVED, READS, Judge, beyond, capacity_of, refuse
from pytest_vram.readings import Reading, Unmeasurable

MIB = 1 << 20
GIB = 1 << 30


def card(capacity: int = 8 * GIB, *, oversubscribes: bool = False, limit_from: str = "card") -> DeviceInfo:
    size = Reading(bytes=capacity, source="nvml-device", scope="device", device="gpu0", exact=True)
    return DeviceInfo(
        label="gpu0",
        kind="nvml",
        name="a card",
        capacity=size,
        source="nvml",
        limit_from=limit_from,
        oversubscribes=oversubscribes,
    )


def snapshot(processes: dict[int, int], device: int | None, others: dict[int, int] | None = None) -> Snapshot:
    listed = sum(processes.values()) + sum((others or {}).values())
    return Snapshot(
        {pid: Figure(held, held) for pid, held in processes.items()},
        Figure(device, device) if device is not None else None,
        others=others or {},
        unlisted=max(0, device - listed) if device is not None else None,
    )


# ---------------------------------------------------------------- single figures


def test_reserved_beyond_a_server_card_is_refused() -> None:
    """198.68 GB reserved on a 140 GB card under Linux is impossible: refused, with figure, size and source."""
    reason = refuse(198_680_000_000, capacity=140_000_000_000, oversubscribes=False, source="torch's reserved figure")
    assert reason is not None
    assert "torch's reserved figure says 198,680,000,000 bytes on a device of 140,000,000,000" in reason


def test_reserved_beyond_a_laptop_card_is_spill() -> None:
    """Where the driver oversubscribes, figures above the card are true, and what is beyond it is spill: six training
    runs on an 8 GiB laptop card under Windows, of which none ended for lack of memory."""
    reserved = [8.172, 10.184, 11.998, 13.641, 8.592, 10.184]
    allocated = [7.406, 9.155, 10.465, 11.773, 7.850, 9.155]
    capacity = 8 * GIB
    for figure in reserved + allocated:
        assert refuse(round(figure * GIB), capacity=capacity, oversubscribes=True, source="torch") is None
    spilled = [beyond(round(figure * GIB), capacity) for figure in reserved]
    assert all(spilled)
    assert round(max(spilled) / GIB, 3) == 5.641
    assert sum(beyond(round(figure * GIB), capacity) > 0 for figure in allocated) == 4


def test_a_context_that_stays_is_no_fault() -> None:
    """After a tensor is freed 62 MiB are released and 1105 MiB of context stay: both figures are evidence."""
    judge = Judge(card())
    for held in (1167 * MIB, 1105 * MIB):
        given = snapshot({1: held}, held + 20 * MIB)
        assert judge.check(given).snapshot is given


@pytest.mark.parametrize("size", [2**64 - 1, 2**64 - 4096, 2**63, 1 << 50, -1])
def test_no_size_at_all(size: int) -> None:
    """Sentinels, underflows and negative numbers are refused wherever allocations may lie."""
    assert refuse(size, capacity=None, oversubscribes=True, source="the driver") is not None


def test_the_edge_of_the_capacity() -> None:
    """A size that is rounded may lie a sixty-fourth above the capacity; one more is refused."""
    edge = 8 * GIB + 8 * GIB // 64
    assert refuse(edge, capacity=8 * GIB, oversubscribes=False, source="it") is None
    assert refuse(edge + 1, capacity=8 * GIB, oversubscribes=False, source="it") is not None
    assert refuse(edge + 1, capacity=None, oversubscribes=False, source="it") is None
    assert beyond(8 * GIB, 8 * GIB) == beyond(1, None) == 0


def test_a_limit_on_a_part_is_no_capacity() -> None:
    """An emulated card, or a control group, bounds what the run should hold, not what the device can show."""
    assert capacity_of(card(limit_from="emulated")) is None
    assert capacity_of(card(limit_from="MIG slice")) == 8 * GIB
    assert capacity_of(
        DeviceInfo(label="gpu0", kind="nvml", name="x", capacity=Unmeasurable(reason="?"), source="")
    ) is (None)


# ---------------------------------------------------------------- snapshots


def test_an_impossible_process_is_a_fault_of_that_process() -> None:
    """The process loses its figure with the reason; the others keep theirs."""
    given = snapshot({1: 2**64 - 1, 2: GIB}, 2 * GIB)
    checked = Judge(card()).check(given).snapshot
    assert set(checked.processes) == {2}
    assert "process 1" in checked.faults[1]
    assert checked.device == given.device


def test_an_impossible_device_is_a_fault_of_the_device() -> None:
    """Figures by process stand; what is made of the device's figure goes with it."""
    given = snapshot({1: GIB}, 2**64 - 7)._replace(rise=Figure(5, 5), unlisted=3)
    checked = Judge(card()).check(given)
    assert checked.snapshot.processes == given.processes
    assert (checked.snapshot.device, checked.snapshot.rise, checked.snapshot.unlisted) == (None, None, None)
    assert "negative number" in (checked.device_fault or "")


def test_beyond_the_card_is_possible_where_it_oversubscribes() -> None:
    """The same snapshot is refused on one platform and evidence on the other."""
    given = snapshot({1: 12 * GIB}, 8 * GIB)
    assert Judge(card(oversubscribes=True)).check(given).snapshot is given
    assert 1 in Judge(card()).check(given).snapshot.faults


def test_processes_that_hold_more_than_the_device() -> None:
    """Figures that add up to far more than is in use are refused when they do so in a row; once is a moment."""
    judge = Judge(card())
    good, bad = snapshot({1: GIB}, GIB), snapshot({1: 2 * GIB, 2: GIB}, 3 * GIB - FAR - 1)
    for _ in range(READS - 1):
        assert judge.check(bad).snapshot is bad
    assert judge.check(good).snapshot is good
    for _ in range(READS - 1):
        assert judge.check(bad).snapshot is bad
    checked = judge.check(bad).snapshot
    assert not checked.processes
    assert "add up to 3,221,225,472 bytes" in checked.faults[1]
    assert judge.check(good).snapshot is good


def test_strangers_that_share_buffers() -> None:
    """Programs of a desktop are listed with the same buffers each; that says nothing against this run's figures."""
    judge = Judge(card())
    given = snapshot({1: GIB}, 2 * GIB, {8: 2 * GIB, 9: 2 * GIB})
    for _ in range(3 * READS):
        assert judge.check(given).snapshot is given


def test_frozen_figures_are_refused() -> None:
    """Figures by process that stand still while the device's moves, and nobody explains it, are no evidence."""
    judge = Judge(card())
    still = snapshot({1: GIB}, GIB)
    moved = snapshot({1: GIB}, GIB + MOVED + 1)
    judge.check(still)
    judge.check(still)
    for _ in range(READS - 1):
        assert judge.check(moved).snapshot is moved
    checked = judge.check(moved).snapshot
    assert not checked.processes
    assert "frozen" in checked.faults[1]
    assert "+67,108,865" in checked.faults[1]
    # It is over when they move again.
    assert judge.check(snapshot({1: GIB + 1}, GIB + MOVED)).snapshot.processes
    assert judge.check(moved).snapshot.processes


@pytest.mark.parametrize("change", [MOVED, -MOVED])
def test_a_little_movement_is_not_frozen(change: int) -> None:
    """Up to 64 MiB may come and go unexplained."""
    judge = Judge(card())
    judge.check(snapshot({1: GIB}, 2 * GIB))
    judge.check(snapshot({1: GIB}, 2 * GIB))
    for _ in range(3 * READS):
        assert judge.check(snapshot({1: GIB}, 2 * GIB + change)).snapshot.processes


def test_a_listed_stranger_explains_movement() -> None:
    """A process that is listed and grows is why the device moves."""
    judge = Judge(card())
    judge.check(snapshot({1: GIB}, 2 * GIB, {9: GIB}))
    judge.check(snapshot({1: GIB}, 2 * GIB, {9: GIB}))
    for _ in range(3 * READS):
        assert judge.check(snapshot({1: GIB}, 4 * GIB, {9: 3 * GIB})).snapshot.processes


def test_an_allocation_between_two_calls_is_not_frozen() -> None:
    """The figures of one read are of two moments: where the device's was read first, it follows one read later."""
    judge = Judge(card())
    judge.check(snapshot({1: 0}, 0))
    judge.check(snapshot({1: 3 * GIB}, 0))
    for _ in range(3 * READS):
        assert judge.check(snapshot({1: 3 * GIB}, 3 * GIB)).snapshot.processes


def test_hidden_processes_make_it_a_doubt() -> None:
    """Where a process that is not listed came or went while nothing of this run was there, standing still is a doubt."""
    judge = Judge(card())
    judge.check(snapshot({}, GIB))
    for _ in range(READS):
        judge.check(snapshot({}, 2 * GIB))
    judge.check(snapshot({1: GIB}, 3 * GIB))
    judge.check(snapshot({1: GIB}, 3 * GIB))
    for _ in range(READS - 1):
        assert judge.check(snapshot({1: GIB}, 4 * GIB)).snapshot.doubt is None
    checked = judge.check(snapshot({1: GIB}, 4 * GIB)).snapshot
    assert checked.processes
    assert "a process that the driver does not list" in (checked.doubt or "")


def test_hidden_processes_explain_no_sum() -> None:
    """That others are not listed explains a device that moves, and not processes that hold more than it."""
    judge = Judge(card())
    judge.check(snapshot({}, GIB))
    for _ in range(READS):
        judge.check(snapshot({}, 2 * GIB))
    for _ in range(READS - 1):
        assert judge.check(snapshot({1: 4 * GIB}, GIB)).snapshot.processes
    assert not judge.check(snapshot({1: 4 * GIB}, GIB)).snapshot.processes


def test_host_memory_is_let_through() -> None:
    """The kernel's figures of host memory add up to more than is in use, because pages are shared."""
    info = DeviceInfo(label="host", kind="cpu", name="RAM", capacity=card().capacity, source="/proc")
    given = snapshot({1: 7 * GIB, 2: 7 * GIB}, GIB)
    judge = Judge(info)
    for _ in range(2 * READS):
        assert judge.check(given).snapshot is given


# ---------------------------------------------------------------- who explains a device that moves


def stand_still(judge: Judge, given: Snapshot) -> None:
    """Let the figures by process come to a stand."""
    judge.check(given)
    judge.check(given)


def test_a_step_is_of_the_reads_in_which_it_came() -> None:
    """A device that moved and stands still again spoils what was read then, and leaves a doubt, not a refusal."""
    judge = Judge(card())
    stand_still(judge, snapshot({1: GIB}, GIB))
    moved = snapshot({1: GIB}, GIB + 600 * MIB)
    checked = [judge.check(moved) for _ in range(READS)]
    assert [one.suspect for one in checked] == [False] * (READS - 1) + [True]
    for _ in range(10 * READS):
        later = judge.check(moved)
        assert later.snapshot.processes == moved.processes
        assert "stood still" in (later.snapshot.doubt or "")
        assert not later.suspect
    assert judge.check(snapshot({1: GIB + 1}, GIB + 600 * MIB)).snapshot.doubt is None, "they move, so they are alive"


def test_each_step_is_refused() -> None:
    """Counters that stand still while the device goes up again and again are refused each time."""
    judge = Judge(card())
    stand_still(judge, snapshot({1: GIB}, GIB))
    for step in range(1, 4):
        moved = snapshot({1: GIB}, GIB + step * 100 * MIB)
        assert sum(judge.check(moved).suspect for _ in range(3 * READS)) == 1


@pytest.mark.parametrize("change", [MOVED + 1, -MOVED - 1])
def test_a_device_that_rises_or_falls_has_moved(change: int) -> None:
    """Counters that stand still are as wrong when the device falls."""
    judge = Judge(card())
    stand_still(judge, snapshot({1: GIB}, 2 * GIB))
    moved = snapshot({1: GIB}, 2 * GIB + change)
    assert [judge.check(moved).suspect for _ in range(READS)] == [False] * (READS - 1) + [True]


def test_a_listed_process_without_a_figure_explains_movement() -> None:
    """A stranger that the driver lists without saying what it holds may be why the device moves: a doubt at most."""
    judge = Judge(card())
    stand_still(judge, snapshot({1: GIB}, GIB)._replace(unlisted=None))
    moved = snapshot({1: GIB}, 4 * GIB)._replace(unlisted=None)
    for _ in range(3 * READS):
        checked = judge.check(moved)
        assert checked.snapshot.processes == moved.processes
        assert not checked.suspect
    assert "lists without a figure" in (checked.snapshot.doubt or "")


def test_an_impossible_figure_of_any_kind() -> None:
    """A figure is refused for each of its parts: what is held for good, at the moment, and at most."""
    for size in (9 * GIB, -1):
        for figure in (Figure(size, GIB), Figure(GIB, size), Figure(GIB, GIB, mark=size)):
            given = Snapshot({1: figure, 2: Figure(GIB, GIB)}, Figure(3 * GIB, 3 * GIB), unlisted=GIB)
            checked = Judge(card()).check(given)
            assert list(checked.snapshot.processes) == [2], figure
            assert list(checked.snapshot.faults) == [1]
            assert not checked.suspect, "what was read before is not in doubt"
