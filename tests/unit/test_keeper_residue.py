"""Whose memory is still there when the next test begins."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from pytest_vram.keeper.figures import boot_is_more
from pytest_vram.keeper.messages import Residue
from pytest_vram.keeper.residue import BEFORE_TESTS, CONTEXT, NOISE, Look, Residues, floors, residues
from pytest_vram.measure import PYTEST, TEST, DeviceInfo
from pytest_vram.measure.probes import Figure, Snapshot
from pytest_vram.readings import Reading, Unmeasurable
from tests.unit.measure_kit import PaperMembers

MIB = 1 << 20
GIB = 1 << 30
CONTROLLER, WORKER = 10, 11


def device(label: str = "gpu0", kind: str = "nvml") -> DeviceInfo:
    capacity = Reading(bytes=44 * GIB, source="paper", scope="device", device=label, exact=True)
    return DeviceInfo(label=label, kind=kind, name="paper", capacity=capacity, source="paper")


class Machine:
    """A card with processes, whose tests come and go."""

    def __init__(self, *, counts_pytest: bool = True, per_process: bool = True) -> None:
        self.members = PaperMembers()
        self.residues = Residues(self.members)
        self.held: dict[int, int] = {}
        self.counts_pytest = counts_pytest
        self.per_process = per_process
        self.rise = 0
        self.backends = False
        self.fault: str | None = None
        self.clock = itertools.count()
        self.join(CONTROLLER, PYTEST)

    def join(self, pid: int, owner: str = TEST, held: int = 0, parent: int = 1) -> None:
        self.members.join(pid, owner)
        member = self.members.get(pid)
        assert member is not None
        member.parent, member.start = parent, next(self.clock)
        self.held[pid] = held

    def end(self, pid: int) -> None:
        self.members.forget(pid)
        del self.held[pid]

    def look(self) -> None:
        figures = {pid: Figure(held, held) for pid, held in self.held.items()}
        rise = None if self.per_process else Figure(self.rise, self.rise)
        snapshot = Snapshot({} if self.fault else figures, None, rise=rise, fault=self.fault)
        self.residues.look([Look(device(), snapshot, self.counts_pytest, self.per_process, self.backends)])

    def begin(self, test: str, pid: int = CONTROLLER, running: tuple[str, ...] = ()) -> list[Residue]:
        self.look()
        found = self.residues.held(running)
        self.residues.began(test, pid)
        return found


def told(residues: list[Residue]) -> list[tuple[str, int, list[int]]]:
    return [(one.test, one.bytes // MIB, [pid for pid, _ in one.pids]) for one in residues]


def test_two_culprits_and_a_victim() -> None:
    """Models that two tests left in pytest's own process are told when the third begins, each with its own test."""
    machine = Machine()
    assert machine.begin("test_cosmos") == []
    machine.held[CONTROLLER] = 20 * GIB
    machine.look()
    assert told(machine.begin("test_hunyuan")) == [("test_cosmos", 20 << 10, [CONTROLLER])]
    machine.held[CONTROLLER] = 42 * GIB
    machine.look()
    found = machine.begin("test_load_longcat")
    assert told(found) == [("test_hunyuan", 22 << 10, [CONTROLLER]), ("test_cosmos", 20 << 10, [CONTROLLER])]


def test_an_engine_in_process_that_is_not_freed() -> None:
    """What is freed partly after a test remains that test's with what is left of it; freed wholly, it is nobody's."""
    machine = Machine()
    machine.begin("test_one")
    machine.held[CONTROLLER] = 15 * GIB
    machine.look()
    machine.held[CONTROLLER] = 14 * GIB
    assert told(machine.begin("test_two")) == [("test_one", 14 << 10, [CONTROLLER])]
    machine.held[CONTROLLER] = 0
    assert machine.begin("test_three") == []


def test_only_the_first_failure_is_real() -> None:
    """What the first test left stays its own through any number of later tests that take and give back as much."""
    machine = Machine()
    machine.begin("test_first")
    machine.held[CONTROLLER] = 10 * GIB
    for name in ("test_second", "test_third", "test_fourth"):
        assert told(machine.begin(name)) == [("test_first", 10 << 10, [CONTROLLER])]
        machine.held[CONTROLLER] = 16 * GIB
        machine.look()
        machine.held[CONTROLLER] = 10 * GIB


def test_memory_of_pytest_from_before_the_tests() -> None:
    """A context that conftest made is nobody's leftover, and small growth is not worth a word until it adds up: then
    each part of it is of the test during which it came."""
    machine = Machine()
    machine.held[CONTROLLER] = 500 * MIB
    machine.begin("test_a")
    machine.held[CONTROLLER] = 500 * MIB + NOISE
    assert machine.begin("test_b") == []
    machine.held[CONTROLLER] += 2 * MIB
    found = machine.begin("test_c")
    assert sum(one.bytes for one in found) == NOISE + 2 * MIB
    assert told(found) == [("test_a", NOISE // MIB, [CONTROLLER]), ("test_b", 2, [CONTROLLER])]


def test_the_context_of_a_driver_is_told() -> None:
    """After a 61 MiB tensor was freed, 1,105 MiB remain: the context, made by the first test that used the card. That
    it is a part of what is left is said, and not of what later tests leave."""
    machine = Machine()
    machine.begin("test_tensor")
    machine.held[CONTROLLER] = 1167 * MIB
    machine.look()
    machine.held[CONTROLLER] = 1105 * MIB
    (found,) = machine.begin("test_next")
    assert (found.test, found.bytes // MIB, found.first_use) == ("test_tensor", 1105, True)
    machine.held[CONTROLLER] = 3 * GIB
    machine.join(20, held=GIB, parent=CONTROLLER)
    assert [one.first_use for one in machine.begin("test_last")] == [False, True]


def test_host_memory_of_pytest_is_not_counted() -> None:
    """Where pytest's own processes are no part of the run, what they hold is no leftover either."""
    machine = Machine(counts_pytest=False)
    machine.begin("test_a")
    machine.held[CONTROLLER] = GIB
    assert machine.begin("test_b") == []


def test_a_process_that_outlives_its_test() -> None:
    """A process that a test started and left is told with its PID until it ends, however little it holds."""
    machine = Machine()
    machine.begin("test_a")
    machine.join(20, held=3 * MIB, parent=CONTROLLER)
    machine.look()
    assert told(machine.begin("test_b")) == [("test_a", 3, [20])]
    machine.end(20)
    machine.join(20, held=5 * MIB, parent=CONTROLLER)
    machine.look()
    assert told(machine.begin("test_c")) == [("test_b", 5, [20])]


def test_of_a_session_before_the_tests() -> None:
    """What was started before any test is said to be from before the first test."""
    machine = Machine()
    machine.join(20, held=GIB, parent=CONTROLLER)
    assert told(machine.begin("test_a")) == [(BEFORE_TESTS, 1 << 10, [20])]


def test_workers_blame_their_own_tests() -> None:
    """Leftovers are the test's of the worker that they descend from; a test that still runs has left nothing."""
    machine = Machine()
    machine.join(WORKER, PYTEST)
    machine.begin("test_here", CONTROLLER)
    machine.begin("test_there", WORKER)
    machine.join(20, held=GIB, parent=WORKER)
    machine.join(21, held=GIB, parent=20)
    machine.held[CONTROLLER] = 2 * GIB
    assert told(machine.begin("test_next", WORKER, running=("test_here",))) == [("test_there", 2 << 10, [20, 21])]
    assert told(machine.begin("test_last", CONTROLLER)) == [
        ("test_here", 2 << 10, [CONTROLLER]),
        ("test_there", 2 << 10, [20, 21]),
    ]


def test_candidates_where_it_cannot_be_told() -> None:
    """A process whose parents are gone is one of the tests' that ran last, and all of them are named."""
    machine = Machine()
    machine.join(WORKER, PYTEST)
    machine.begin("test_here", CONTROLLER)
    machine.begin("test_there", WORKER)
    machine.join(20, held=GIB, parent=1)
    machine.look()
    assert machine.residues.held()[0].test == "one of test_here, test_there"


def test_a_card_that_does_not_say_who_holds() -> None:
    """Without figures by process, what is there while no backend runs is the last test's; with one nothing is said."""
    machine = Machine(per_process=False)
    machine.begin("test_a")
    machine.rise, machine.backends = 5 * GIB, True
    assert machine.begin("test_b") == []
    machine.rise, machine.backends = GIB, False
    machine.look()
    assert told(machine.residues.held()) == [("test_b", 1 << 10, [])]


def test_backends_are_no_leftover() -> None:
    """What a backend holds, used or idle, is not left behind by anybody."""
    machine = Machine()
    machine.begin("test_a")
    machine.join(30, "agent#1", held=4 * GIB, parent=1)
    assert machine.begin("test_b") == []


def test_a_read_that_failed_changes_nothing() -> None:
    """While a card cannot be read, nothing comes and nothing goes away."""
    machine = Machine()
    machine.begin("test_a")
    machine.held[CONTROLLER] = GIB
    machine.look()
    machine.fault = "GPU is lost"
    assert told(machine.begin("test_b")) == [("test_a", 1 << 10, [CONTROLLER])]


@given(st.lists(st.integers(0, 8 * GIB), min_size=1, max_size=30))
def test_leftovers_never_exceed_what_is_held(levels: list[int]) -> None:
    """Whatever a process takes and gives back, leftovers add up to no more than it holds, and miss no more than noise."""
    machine = Machine()
    machine.begin("test_0")
    for number, level in enumerate(levels, 1):
        machine.held[CONTROLLER] = level
        found = sum(one.bytes for one in machine.begin(f"test_{number}"))
        assert level - NOISE <= found <= level


def test_small_leaks_after_a_large_one_are_still_small() -> None:
    """A model, or a context, that was left before does not make 2 MiB by the next test worth a word."""
    machine = Machine()
    machine.begin("test_a")
    machine.held[CONTROLLER] = GIB
    machine.begin("test_b")
    machine.held[CONTROLLER] += 2 * MIB
    assert told(machine.begin("test_c")) == [("test_a", 1 << 10, [CONTROLLER])]


def test_a_process_that_grows_a_little_after_its_test() -> None:
    """20 KiB more in a child that a test left are not of the quiet test that runs then; a model loaded into it is."""
    machine = Machine()
    machine.begin("test_child")
    machine.join(20, held=300 * MIB, parent=CONTROLLER)
    machine.begin("test_quiet")
    machine.held[20] += 20 << 10
    assert [one.test for one in machine.begin("test_load")] == ["test_child"]
    machine.held[20] += GIB
    assert told(machine.begin("test_next")) == [("test_load", 1 << 10, [20]), ("test_child", 300, [20])]


def test_a_run_of_any_length_is_told_in_some_lines() -> None:
    """Thousands of small leaks are kept in bounded memory, add up to what is held, and name a few tests."""
    machine = Machine()
    found: list[Residue] = []
    for number in range(2000):
        machine.held[CONTROLLER] += (1 + number % 7) * MIB
        found = machine.begin(f"test_{number}")
    assert len(found) <= 21
    assert found[-1].test.endswith(" more tests")
    # What was there before the first test is of no test.
    assert sum(one.bytes for one in found) == machine.held[CONTROLLER] - MIB


# ---------------------------------------------------------------- what was still there at the peak


class Window:
    """A window on the machine's card, whose reads the test makes."""

    def __init__(self, machine: Machine, *, counted: bool = True, root: int | None = CONTROLLER) -> None:
        machine.look()
        self.machine, self.root = machine, root
        self.holding = machine.residues.holding()
        self.kept = floors(self.holding)
        self.top = 0

    def read(self, *, marks: dict[int, int] | None = None) -> None:
        machine = self.machine
        figures = {pid: Figure(held, held) for pid, held in machine.held.items()}
        rise = None if machine.per_process else Figure(machine.rise, machine.rise)
        snapshot = Snapshot({} if machine.fault else figures, None, rise=rise, fault=machine.fault)
        total = machine.rise if not machine.per_process else sum(machine.held.values())
        mark = max((marks or {}).values(), default=0)
        peak, self.top = max(total, mark) > self.top, max(total, mark, self.top)
        if self.kept is not None:
            self.kept.fold("gpu0", snapshot, peak=peak, mark=mark if mark > total else None, marks=marks or {})

    def close(self, **more: object) -> list[tuple[str, int, int, int, int]]:
        found = residues(self.holding, (), self.kept, root=self.root, **more)  # type: ignore[arg-type]
        return [
            (one.test, one.bytes // MIB, one.lasted // MIB, one.at_peak // MIB, one.at_peak_most // MIB)
            for one in found
        ]


def leaking(size: int = 2 * GIB) -> Machine:
    """A card on which a test has left so much in pytest's own process, beside a context from before."""
    machine = Machine()
    machine.held[CONTROLLER] = 600 * MIB
    machine.begin("test_a")
    machine.held[CONTROLLER] += size
    machine.begin("test_b")
    return machine


def test_a_leftover_that_stays_is_in_the_peak() -> None:
    """Nothing was freed: all of it was there all along, and at the peak."""
    machine = leaking()
    window = Window(machine)
    window.read()
    machine.held[CONTROLLER] += GIB
    window.read()
    assert window.close() == [("test_a", 2048, 2048, 2048, 2048)]


def test_a_leftover_that_went_before_the_peak() -> None:
    """The test frees it and then takes as much itself: nothing of it is in the peak."""
    machine = leaking()
    window = Window(machine)
    window.read()
    machine.held[CONTROLLER] -= 2 * GIB
    window.read()
    machine.held[CONTROLLER] += 3 * GIB
    window.read()
    assert window.close() == [("test_a", 2048, 0, 0, 0)]


def test_a_leftover_that_went_after_the_peak() -> None:
    """It was in the peak, though it is gone at the end."""
    machine = leaking()
    window = Window(machine)
    machine.held[CONTROLLER] += GIB
    window.read()
    machine.held[CONTROLLER] = 0
    window.read()
    assert window.close() == [("test_a", 2048, 0, 2048, 2048)]


def test_what_goes_first_is_the_youngest() -> None:
    """Of two leftovers in one process, the one that came last is taken to be the one that was freed."""
    machine = leaking()
    machine.held[CONTROLLER] += GIB
    machine.begin("test_c")
    window = Window(machine)
    window.read()
    machine.held[CONTROLLER] -= GIB
    window.read()
    machine.held[CONTROLLER] += 2 * GIB
    window.read()
    assert window.close() == [("test_a", 2048, 2048, 2048, 2048), ("test_b", 1024, 0, 0, 0)]


def test_a_peak_between_two_reads() -> None:
    """A mark between them may have been before or after what was freed meanwhile; of another process, it has nothing
    of it at all."""
    machine = leaking()
    machine.join(20, held=100 * MIB, parent=CONTROLLER)
    window = Window(machine)
    window.read()
    machine.held[CONTROLLER] -= 2 * GIB
    window.read(marks={CONTROLLER: 5 * GIB})
    assert window.close()[0] == ("test_a", 2048, 0, 0, 2048)
    window.read(marks={20: 6 * GIB})
    assert window.close()[0] == ("test_a", 2048, 0, 0, 0)


def test_a_peak_that_is_the_mark_of_another_process() -> None:
    """It has nothing of what still lies beside it."""
    machine = leaking()
    machine.join(20, held=100 * MIB, parent=CONTROLLER)
    window = Window(machine)
    window.read()
    window.read(marks={CONTROLLER: 3 * GIB, 20: 6 * GIB})
    assert window.close()[0] == ("test_a", 2048, 2048, 0, 0)


def test_a_process_that_was_left_and_ends() -> None:
    """What ended before the peak is in none of it, whatever has its PID by then."""
    machine = Machine()
    machine.begin("test_a")
    machine.join(20, held=GIB, parent=CONTROLLER)
    machine.begin("test_b")
    window = Window(machine)
    window.read()
    machine.end(20)
    window.read()
    machine.join(20, held=3 * GIB, parent=CONTROLLER)
    window.read()
    assert window.close() == [("test_a", 1024, 0, 0, 0)]


def test_a_card_that_does_not_say_who_holds_still_knows_what_went() -> None:
    """The rise of the whole card stands for what is left on it."""
    machine = Machine(per_process=False)
    machine.rise = GIB  # the context
    machine.begin("test_a")
    machine.begin("test_context")
    machine.rise = 4 * GIB
    machine.begin("test_b")
    window = Window(machine)
    machine.rise = 5 * GIB
    window.read()
    machine.rise = GIB
    window.read()
    assert window.close() == [("test_context", 3072, 0, 3072, 3072), ("before the first test", 1024, 0, 0, 0)]


def test_a_read_that_failed_says_nothing_of_what_is_left() -> None:
    """A card that could not be read has not lost anything."""
    machine = leaking()
    window = Window(machine)
    window.read()
    machine.fault = "GPU is lost"
    window.read()
    assert window.close() == [("test_a", 2048, 2048, 2048, 2048)]


def test_a_context_is_left_out_of_what_excuses() -> None:
    """What the first use of a card left counts as far as it is more than any driver's context."""
    machine = Machine()
    machine.begin("test_a")
    machine.held[CONTROLLER] = CONTEXT + GIB
    machine.begin("test_b")
    window = Window(machine)
    window.read()
    assert window.close() == [("test_a", 2304, 1024, 1024, 1024)]
    assert residues(window.holding, (), window.kept)[0].context == CONTEXT


def test_a_boot_before_the_window_has_nothing_of_what_was_left() -> None:
    """A peak that a backend reached while it started is of its processes alone."""
    machine = leaking()
    window = Window(machine)
    window.read()
    assert window.close(elsewhere={"gpu0"}) == [("test_a", 2048, 2048, 0, 0)]


def test_leftovers_of_other_workers_are_told_apart() -> None:
    """What is held below another worker is in the run's figure and not in that of the window's own processes."""
    machine = leaking()
    machine.join(WORKER, PYTEST)
    machine.begin("test_there", WORKER)
    machine.join(20, held=GIB, parent=WORKER)
    machine.begin("test_next", WORKER)
    window = Window(machine)
    assert [(one.test, one.own) for one in residues(window.holding, (), window.kept, root=CONTROLLER)] == [
        ("test_a", True),
        ("test_there", False),
    ]


def test_whether_a_boot_is_the_more() -> None:
    """It is where its lower end is the larger one, and where nothing else was measured."""

    def figure(size: int, high: int | None = None) -> Reading:
        return Reading(bytes=size, at_most=high, source="nvml-process", scope="run", device="gpu0", exact=False)

    assert boot_is_more(figure(1), figure(2))
    assert boot_is_more(None, figure(2))
    assert boot_is_more(Unmeasurable(reason="x"), figure(2))
    assert not boot_is_more(figure(2), figure(1, 9))
    assert not boot_is_more(figure(2), figure(2))
    assert not boot_is_more(figure(2), Unmeasurable(reason="x"))
