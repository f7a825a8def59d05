"""Whom a time over the budget is laid at, and what adjacent windows know together."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from pytest_vram.blame import Quick, suspects
from pytest_vram.keeper.messages import Closed, Over, Residue
from pytest_vram.needs import Plan
from pytest_vram.readings import Reading
from pytest_vram.run import Attempt
from tests.unit.test_quick import MS, Clock, FakeRun, closed, outcomes, series

LIMIT, HELD = 100_000_000, 200_000_000


def over(since: int, begin: int, at: int, last: int, until: int | None) -> Over:
    """A time over the budget, in milliseconds."""
    return Over(
        device="host",
        limit=LIMIT,
        bytes=HELD,
        since=since * MS,
        begin=begin * MS,
        at=at * MS,
        last=last * MS,
        until=None if until is None else until * MS,
    )


def saw(*times: Over, t1: int = 10**6, **more: Any) -> Closed:
    """A window that was over its limit at these times."""
    one = times[0]
    return closed(HELD, at=(one.since, one.at), t1=t1 * MS, over=list(times), **more)


def quick(name: str, start: int, end: int | None) -> Quick:
    """A test that ran then, in milliseconds."""
    test = Quick(Attempt(name, Plan(), 1), name, ("t.py", 0, name), start * MS)
    test.end = None if end is None else end * MS
    return test


def names(found: tuple[list[Quick], bool]) -> tuple[str, bool]:
    """Their names in one word."""
    return "".join(test.nodeid for test in found[0]), found[1]


TESTS = [quick("a", 0, 4), quick("b", 5, 8), quick("c", 10, 300), quick("d", 302, 305)]


def test_what_came_and_went_with_one_test_is_its_own() -> None:
    """The reader was late: two tests ended after its last look, but the memory went away with the third."""
    assert names(suspects(over(1, 12, 13, 290, 301), TESTS)) == ("c", False)


def test_what_stayed_may_have_been_left_by_any_of_them() -> None:
    """Memory that outlived the test may be an earlier one's: nobody who ran since the last look is let off."""
    assert names(suspects(over(1, 12, 13, 290, None), TESTS)) == ("abc", False)
    assert names(suspects(over(1, 12, 13, 303, 309), TESTS)) == ("abc", False)


def test_what_was_seen_after_a_test_may_be_its_teardowns() -> None:
    """No test ran at the first read over the budget, and it was over before the next began: it may be nobody's."""
    assert names(suspects(over(6, 9, 9, 9, 10), TESTS[:2])) == ("b", True)
    assert names(suspects(over(8, 9, 9, 9, 10), TESTS[:2])) == ("", True)


def test_tests_that_ran_at_one_read_are_all_suspects() -> None:
    """A slow read ends in another test than it began in."""
    assert names(suspects(over(1, 3, 6, 6, 9), TESTS)) == ("ab", False)


@given(
    st.lists(st.tuples(st.integers(0, 20), st.integers(1, 40)), min_size=1, max_size=12),
    st.integers(0, 11),
    st.integers(1, 15),
    st.integers(0, 14),
    st.integers(1, 5),
)
def test_a_hog_that_was_seen_is_never_let_off(
    lengths: list[tuple[int, int]], which: int, interval: int, phase: int, lasts: int
) -> None:
    """Whoever really held the memory for the length of a test is among the suspects, whenever the reads came and
    however long each took; and where a read fell wholly into it and into no other test, nobody else is."""
    tests: list[Quick] = []
    now = 0
    for pause, length in lengths:
        tests.append(quick(str(len(tests)), now + pause, now + pause + length))
        now += pause + length
    hog = tests[which % len(tests)]
    assert hog.end is not None
    reads = [(t * MS, (t + lasts) * MS) for t in range(phase % interval, now + 200, max(interval, lasts + 1))]
    # The figure of a read is of some moment within it: here of its middle.
    seen = [(begin, end, hog.start <= (begin + end) // 2 <= hog.end) for begin, end in reads]
    held = [index for index, (*_, is_over) in enumerate(seen) if is_over]
    if not held:
        return
    first, last = held[0], held[-1]
    one = Over(
        device="host",
        limit=1,
        bytes=2,
        since=seen[first - 1][0] if first else seen[first][0],
        begin=seen[first][0],
        at=seen[first][1],
        last=seen[last][1],
        until=seen[last + 1][1] if last + 1 < len(seen) else None,
    )
    found, maybe = suspects(one, tests)
    assert hog in found
    assert not maybe
    within = all(hog.start <= seen[at][0] and seen[at][1] <= hog.end for at in (first, last))
    within = within and not any(test.ran(one.begin, one.last) for test in tests if test is not hog)
    if within and one.until is not None:
        assert found == [hog]


# ---------------------------------------------------------------- windows


def turned(*replies: Closed) -> tuple[Any, Clock, FakeRun]:
    """Two short tests whose window has just been closed without waiting."""
    clock = Clock()
    run = FakeRun(*replies)
    shared, _ = series(run, [(0, 4 * MS), (5 * MS, 9 * MS)], clock)
    clock.now = 10 * MS
    shared.turn_over("t.py::test_2")
    return shared, clock, run


def long_test(shared: Any, clock: Clock, start: int = 11, end: int = 300) -> Quick:
    """A test of the next window that lasts; its times in milliseconds."""
    clock.now = start * MS
    test: Quick = shared.begin(Attempt("t.py::test_2", Plan(), 1), "t.py::test_2", ("t.py", 2, "test_2"))
    clock.now = end * MS
    shared.end(test, "passed", (end - start) / 1e3, None)
    return test


def test_a_hog_after_a_window_fails_alone_and_once() -> None:
    """The window before was closed when the hog held its memory already: its tests pass, and the hog has one verdict,
    in its own report."""
    shared, clock, _ = turned(saw(over(3, 12, 13, 13, None), t1=13), saw(over(3, 12, 13, 290, 300), t1=301))
    mine = shared.close(long_test(shared, clock))
    assert mine.verdict == "failed"
    assert outcomes(shared.pending) == {"0": "passed", "1": "passed"}
    assert [late for batch in shared.pending for late in batch.late] == []
    assert all(not record.findings for batch in shared.pending for record in batch.records())
    assert {begin for batch in shared.pending for begin in batch.begins} == {12 * MS}


def test_a_hog_before_an_innocent_long_test_fails_alone() -> None:
    """A short test held the memory, and the window was closed when the next one ran: that one passes."""
    shared, clock, _ = turned(saw(over(3, 6, 7, 7, 13), t1=13), closed(1, t1=301 * MS))
    mine = shared.close(long_test(shared, clock))
    assert mine.verdict is None
    assert outcomes(shared.pending) == {"0": "passed", "1": "failed"}


def test_what_both_may_have_left_is_of_both() -> None:
    """The memory is there still when the long test ends: it, and those that ended after the last look, fail."""
    shared, clock, _ = turned(saw(over(3, 12, 13, 13, None), t1=13), saw(over(3, 12, 13, 300, None), t1=301))
    mine = shared.close(long_test(shared, clock))
    assert mine.verdict == "failed"
    assert outcomes(shared.pending) == {"0": "failed", "1": "failed"}


def test_a_leftover_that_was_seen_late_excuses_nobody() -> None:
    """The keeper booked the hog's memory to the window before it, which it closed late: the hog fails all the same."""
    name = "one of 2 short tests from t.py::test_0 to t.py::test_1"
    left = Residue(test=name, device="host", bytes=HELD, lasted=HELD, at_peak=HELD, at_peak_most=HELD)
    shared, clock, _ = turned(
        saw(over(3, 12, 13, 13, None), t1=13), saw(over(3, 12, 13, 290, 300), t1=301, residues=[left])
    )
    mine = shared.close(long_test(shared, clock))
    assert mine.verdict == "failed"
    assert "left" not in mine.findings[0].text.splitlines()[0]


def test_a_leftover_that_was_seen_in_time_excuses() -> None:
    """What was there before the long test began is not its own."""
    name = "one of 2 short tests from t.py::test_0 to t.py::test_1"
    left = Residue(test=name, device="host", bytes=HELD, lasted=HELD, at_peak=HELD, at_peak_most=HELD)
    shared, clock, _ = turned(
        saw(over(3, 6, 7, 10, None), t1=10), saw(over(3, 6, 7, 300, None), t1=301, residues=[left])
    )
    mine = shared.close(long_test(shared, clock))
    assert mine.verdict == "error"
    assert name in mine.findings[0].text.splitlines()[0]
    assert outcomes(shared.pending) == {"0": "failed", "1": "failed"}


def test_what_other_workers_hold_fails_nobody_here() -> None:
    """A worker whose processes held nothing did not break the budget, and does not answer for it either."""
    nothing = Reading(bytes=0, source="host-hwm", scope="own", device="host", exact=True)
    shared, _ = series(
        FakeRun(saw(over(1, 2, 3, 3, 9), t1=10, own={"host": nothing})), [(0, 4 * MS), (5 * MS, 6 * MS)], Clock()
    )
    shared.close()
    assert outcomes(shared.pending) == {"0": "passed", "1": "passed"}
    assert [begin for batch in shared.pending for begin in batch.begins] == []


def test_a_test_that_torch_knows_of_is_alone() -> None:
    """Torch's peak has no moment: the test at whose end it is asked answers for it."""
    clock = Clock()
    run = FakeRun(closed(1))
    shared, tests = series(run, [(0, 2 * MS)], clock)
    assert not shared.is_alone(tests[0])
    run.torch = type("Torch", (), {"in_use": True, "begin": lambda self: None, "end": lambda self, devices: []})()
    assert shared.is_alone(tests[0])
    clock.now = 3 * MS
    shared.begin(Attempt("t.py::test_1", Plan(), 1), "t.py::test_1", ("t.py", 1, "test_1"))
    assert outcomes(shared.pending) == {"0": "passed"}
    assert run.replies == []
