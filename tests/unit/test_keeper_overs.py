"""The account of when a run was over its budget, whatever window was open."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pytest_vram.keeper.overs import Overs
from pytest_vram.measure import Sums
from pytest_vram.spec import Limits

LIMIT = 100


def account(reads: list[tuple[int, int]]) -> Overs:
    """An account that saw these reads (held, largest mark), each of 2 ns, one every 10 ns."""
    overs = Overs(Limits(text="100", each=LIMIT))
    for number, (held, top) in enumerate(reads):
        overs.look([("gpu0", Sums(held=held, top=top))], number * 10, number * 10 + 2)
    return overs


def test_a_time_is_told_from_the_read_before_to_the_first_read_within() -> None:
    """Its ends are the reads around it, so that a test that ran between two reads is not let off."""
    (one,) = account([(0, 0), (150, 150), (180, 180), (20, 20)]).all()
    assert (one.since, one.begin, one.at, one.last, one.until) == (0, 10, 12, 22, 32)
    assert (one.device, one.limit, one.bytes) == ("gpu0", LIMIT, 180)


def test_a_time_that_goes_on_has_no_end() -> None:
    """Nobody may be let off because it is over when it is not."""
    (one,) = account([(0, 0), (150, 150)]).all()
    assert one.until is None


def test_a_mark_may_have_been_reached_at_any_time_since_the_read_before() -> None:
    """A high-water mark has no moment: the time begins at the read before, and a mark that only stands ends it."""
    (one,) = account([(0, 0), (20, 150), (20, 150), (20, 150)]).all()
    assert (one.since, one.begin, one.at, one.until) == (0, 0, 12, 22)
    again = account([(0, 0), (20, 150), (20, 20), (20, 150)]).all()
    assert [(one.begin, one.at) for one in again] == [(0, 12), (20, 32)]


def test_a_sum_is_of_one_moment() -> None:
    """What two cards held one after the other is no sum; at the same read it is."""
    overs = Overs(Limits(text="sum=100", total=LIMIT))
    for now, (first, second) in enumerate([(80, 0), (0, 80), (60, 60)]):
        overs.look([("gpu0", Sums(held=first)), ("gpu1", Sums(held=second))], now, now)
    (one,) = overs.all()
    assert (one.device, one.bytes, one.begin) == ("sum", 120, 2)


def test_a_read_that_failed_ends_nothing() -> None:
    """While a device does not answer it is not known that its memory went away."""
    overs = account([(0, 0), (150, 150)])
    overs.look([("gpu0", Sums(fault="lost"))], 20, 22)
    overs.look([("gpu0", Sums(held=150))], 30, 32)
    (one,) = overs.all()
    assert (one.last, one.until) == (32, None)


def test_it_stands_between_the_tests_around_it() -> None:
    """What no window saw is named after the test before and the one after, and a window of one test judges it."""
    overs = account([(0, 0)])
    overs.ended("a", 1, 8, judged=True)
    overs.look([("gpu0", Sums(held=150))], 10, 12)
    overs.look([("gpu0", Sums(held=0))], 20, 22)
    overs.began("b", 25)
    overs.ended("b", 25, 30, judged=True)
    overs.began("c", 35)
    (one,) = overs.all()
    assert (one.after, one.before, one.judged) == ("a", "b", False)
    overs.look([("gpu0", Sums(held=150))], 40, 42)
    overs.ended("c", 35, 50, judged=True)
    assert [one.judged for one in overs.all()] == [False, True]
    assert [one.begin for one in overs.within(35, 50)] == [40]


def test_without_a_budget_nothing_is_kept() -> None:
    """A run without a ceiling cannot be over it."""
    overs = Overs(None)
    overs.look([("gpu0", Sums(held=1 << 40))], 0, 1)
    assert overs.all() == []


@given(st.lists(st.tuples(st.integers(0, 200), st.integers(0, 200)), max_size=60))
def test_every_read_over_the_budget_is_in_some_time(reads: list[tuple[int, int]]) -> None:
    """No read that was over the budget is lost, and no time holds a read that was within it."""
    told = account(reads).all()
    for number, (held, _) in enumerate(reads):
        inside = [one for one in told if one.begin <= number * 10 and number * 10 + 2 <= one.last]
        if held > LIMIT:
            assert len(inside) == 1
    assert all(one.since <= one.begin <= one.at <= one.last for one in told)
    assert all(one.bytes > LIMIT for one in told)


def test_a_long_run_keeps_the_largest() -> None:
    """Memory of the keeper is bounded; what goes on and the largest times stay."""
    reads = [(200 + number % 7 if number % 2 else 0, 0) for number in range(4000)] + [(999, 0)]
    told = account(reads).all()
    assert len(told) <= 400
    assert told[-1].bytes == 999
