"""Waiting on cards, before the run and after a stop, on a machine on paper."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

import msgspec
import pytest

from pytest_vram.keeper.core import Core
from pytest_vram.keeper.holders import held_by, played
from pytest_vram.keeper.messages import Residue
from pytest_vram.keeper.settling import Settling
from pytest_vram.measure import PYTEST, TEST, DeviceInfo
from pytest_vram.measure.probes import Figure, Probe, Snapshot
from pytest_vram.readings import Reading
from tests.unit.measure_kit import PaperMembers, PaperProbe

MIB = 1 << 20


class Card(PaperProbe):
    """A card whose whole figure follows ``steps``, one at each read; the last one stays."""

    def __init__(self, *steps: int, kind: str = "nvml") -> None:
        super().__init__("gpu0")
        capacity = Reading(bytes=1000 * MIB, source="paper", scope="device", device="gpu0", exact=True)
        self.info = DeviceInfo(label="gpu0", kind=kind, name="paper", capacity=capacity, source="paper")
        self.steps = list(steps)
        self.others: dict[int, int] = {}
        self.reads = 0
        self.settled: list[int] = []

    def current(self) -> int:
        return self.steps[min(self.reads, len(self.steps)) - 1] * MIB

    def settle(self) -> None:
        self.settled.append(self.current() // MIB)


class PaperCore:
    """As much of a keeper as waiting needs: its timeline and its journal."""

    def __init__(self, *cards: Card) -> None:
        self.cards = cards
        self.timeline = self
        self.lines: list[dict[str, Any]] = []
        self.on_read: Callable[[int], None] = lambda read: None

    def boundary(self) -> int:
        for card in self.cards:
            card.reads += 1
            self.on_read(card.reads)
        return 0

    def snapshots(self) -> list[tuple[Probe, Snapshot]]:
        return [
            (
                cast(Probe, card),
                Snapshot({}, Figure(card.current(), card.current()), others=dict(card.others), fault=card.fault),
            )
            for card in self.cards
        ]

    def log(self, line: str, **fields: Any) -> None:
        self.lines.append({"kind": line, **fields})

    def texts(self) -> list[str]:
        return [line["text"] for line in self.lines]


def settling(core: PaperCore, *, longest: float = 5.0) -> Settling:
    return Settling(cast(Core, core), pause=0.0, longest=longest)


def test_the_baseline_is_the_first_that_agrees() -> None:
    """The baseline of a card is taken when two reads agree, once in a run, and written down."""
    card = Card(900, 600, 300, 300, 700)
    core = PaperCore(card)

    async def go() -> None:
        found = settling(core)
        await asyncio.gather(found.baseline(), found.baseline())
        await found.baseline()

    asyncio.run(go())
    assert card.settled == [300]
    # One more read, so that figures over the baseline are right at once.
    assert card.reads == 5
    assert core.lines[0]["device"] == "gpu0"
    assert "in use, at rest" in core.texts()[0]


def test_a_card_that_never_rests() -> None:
    """A card that keeps changing is waited for no longer than it may take, and the note says so."""
    card = Card(*(100 + 50 * (step % 2) for step in range(100_000)))
    core = PaperCore(card)
    asyncio.run(settling(core, longest=0.02).baseline())
    assert len(card.settled) == 1
    assert core.texts()[0].endswith("in use, still changing after 0.02 s")


@pytest.mark.parametrize("kind", ["cpu", "rpc"])
def test_without_a_card_nothing_waits(kind: str) -> None:
    """Runs on host memory and on RPC devices are not delayed: nothing is read."""
    card = Card(5, kind=kind)
    core = PaperCore(card)

    async def go() -> None:
        found = settling(core)
        await found.baseline()
        await found.after_stop("backend a#1", {7})
        assert await found.quiet(5.0) == []

    asyncio.run(go())
    assert (card.reads, core.lines) == (0, [])


def test_after_a_stop_the_card_falls() -> None:
    """A stop waits until nothing falls any more and no stopped process is listed; a boot meanwhile waits as well."""
    card = Card(900, 500, 200, 200, 200, 200)
    card.others = {7: 100 * MIB, 8: MIB}
    core = PaperCore(card)

    def read(number: int) -> None:
        if number == 5:
            del card.others[7]

    core.on_read = read

    async def go() -> None:
        found = settling(core)
        stop = asyncio.ensure_future(found.after_stop("backend a#1", {7}))
        await asyncio.sleep(0)
        await found.stopped()
        assert card.reads == 5
        assert 7 not in card.others
        await stop
        await found.stopped()

    asyncio.run(go())
    assert core.lines == []


def test_what_still_falls_is_waited_for() -> None:
    """Memory that the driver gives back late, listed under nobody any more, is waited for as well."""
    card = Card(900, 700, 500, 300, 300)
    core = PaperCore(card)
    asyncio.run(settling(core).after_stop("backend a#1", {7}))
    assert card.reads == 5


def test_who_rises_is_not_waited_for() -> None:
    """Somebody else who takes memory after a stop does not hold up the next boot."""
    card = Card(*range(100, 900, 50))
    core = PaperCore(card)
    asyncio.run(settling(core).after_stop("backend a#1", {7}))
    assert (card.reads, core.lines) == (2, [])


def test_a_process_that_holds_on() -> None:
    """What still holds memory at the end of the wait is named with PID and bytes; what still falls, too."""
    card = Card(*range(900_000, 0, -2))
    card.others = {7: 100 * MIB}
    core = PaperCore(card)
    asyncio.run(settling(core, longest=0.02).after_stop("backend a#1", {7}))
    held, falls = core.lines
    assert "0.02 s after backend a#1 was stopped, gpu0 is still held by process 7 (" in held["text"]
    assert "100.0 MiB" in held["text"]
    assert held["pids"] == [7]
    assert falls["text"].endswith("the memory in use on gpu0 still falls")


def test_a_card_that_cannot_be_read() -> None:
    """A card that does not answer is not waited for, and nothing is said of it in figures."""
    card = Card(5)
    card.fault = "GPU is lost"
    core = PaperCore(card)
    asyncio.run(settling(core).baseline())
    asyncio.run(settling(core).after_stop("backend a#1", {7}))
    assert core.lines == []


def test_holders_in_words() -> None:
    """Everybody who holds memory of a card is named, the largest first; the backend itself is not."""
    members = PaperMembers()
    for pid, owner in ((1, PYTEST), (2, TEST), (3, TEST), (4, "other#1"), (5, "agent#2")):
        members.join(pid, owner)
    processes = {pid: Figure(size * MIB, size * MIB) for pid, size in ((1, 50), (2, 40), (3, 30), (4, 20), (5, 90))}
    snapshot = Snapshot(processes, Figure(800 * MIB, 800 * MIB), others={99999999: 60 * MIB}, unlisted=10 * MIB)
    residues = [Residue(test="test_old", device="gpu0", bytes=40 * MIB, pids=[(2, "p2")])]
    text = held_by([(cast(Probe, Card(1)), snapshot)], members, residues, "agent#2")
    assert text == (
        "gpu0 (200.0 MiB of 1,000 MiB free, held by: process 99999999 (it has ended, not of this run) 60.00 MiB;"
        " process 1 (p1, pytest itself) 50.00 MiB; process 2 (p2, left behind by test_old) 40.00 MiB;"
        " process 3 (p3, of a test) 30.00 MiB; process 4 (p4, backend other#1) 20.00 MiB;"
        " the driver and processes that it does not list 10.00 MiB)."
    )
    assert held_by([(cast(Probe, Card(1)), Snapshot({}, None))], members, [], "agent#2") == ""


def test_the_largest_leftover_of_a_process_names_it() -> None:
    """One process may hold what several tests left: the one that left most is told."""
    members = PaperMembers()
    members.join(2, TEST)
    snapshot = Snapshot({2: Figure(40 * MIB, 40 * MIB)}, Figure(800 * MIB, 800 * MIB))
    residues = [
        Residue(test=test, device="gpu0", bytes=size * MIB, pids=[(2, "p2")])
        for test, size in (("much", 30), ("little", 9))
    ]
    assert "process 2 (p2, left behind by much) 40.00 MiB" in held_by(
        [(cast(Probe, Card(1)), snapshot)], members, residues, "agent#2"
    )


def test_a_played_card_says_so() -> None:
    """A backend that found too little of it failed on a smaller card than the machine has."""
    card = Card(1)
    snapshot = Snapshot({}, Figure(800 * MIB, 800 * MIB))
    assert played([(cast(Probe, card), snapshot)]) == ""
    card.info = msgspec.structs.replace(card.info, limit_from="emulated")
    assert played([(cast(Probe, card), snapshot)]) == (
        "gpu0 is played as a card of 1,000 MiB (--vram-emulate): 200.0 MiB of 1,000 MiB free."
    )
    assert played([(cast(Probe, card), Snapshot({}, None, fault="lost"))]).endswith("(--vram-emulate).")
