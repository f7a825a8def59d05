"""Differences of two ledgers add up, whatever these are, and no cause holds more than its bounds."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_vram import tolerance
from pytest_vram.differences import Cause, Change, between, ends_of
from pytest_vram.differences.rests import _shares
from pytest_vram.ledger import BUCKETS, Entry, Ledger
from pytest_vram.readings import Reading

LABELS = ("gpu0", "gpu1", "host")
SIZES = st.integers(0, 1 << 36)
SETTINGS = ("ctx-size", "cache-type-k", "cache-type-v", "n-cpu-moe", "ubatch-size", "anything")
VALUES: st.SearchStrategy[Any] = st.one_of(
    st.none(), st.integers(-5, 1 << 20), st.sampled_from(["f16", "q8_0", "x"]), st.booleans()
)


@st.composite
def entries(draw: st.DrawFn) -> Entry:
    """Any line that a ledger may have besides the rest."""
    size = draw(SIZES)
    return Entry(
        bucket=draw(st.sampled_from([bucket for bucket in BUCKETS if bucket != "unattributed"])),
        device=draw(st.sampled_from(LABELS)),
        bytes=size,
        source=draw(st.sampled_from(["estimate", "engine-log", "dry-run"])),
        detail=draw(st.sampled_from(["", "CPU_Mapped model buffer", "growth while serving: image"])),
        resolution=draw(st.integers(0, 1 << 20)),
        at_most=draw(st.one_of(st.none(), st.integers(size, 1 << 37))),
    )


@st.composite
def ledgers(draw: st.DrawFn) -> Ledger:
    """A ledger, some of whose devices were measured."""
    made = Ledger(entries=tuple(draw(st.lists(entries(), max_size=6))))
    measured = {}
    for label in draw(st.lists(st.sampled_from(LABELS), unique=True)):
        size = draw(SIZES)
        source = draw(st.sampled_from(["nvml-process", "rpc-hwm", "host-hwm", "device-delta"]))
        most = draw(st.one_of(st.none(), st.integers(size, 1 << 37)))
        measured[label] = Reading(bytes=size, at_most=most, source=source, scope="run", device=label, exact=True)
    return made.against(measured) if measured else made


@st.composite
def causes(draw: st.DrawFn) -> Cause:
    """Anything that may be known of a rest."""
    low, high = sorted((draw(st.integers(-(1 << 36), 1 << 36)), draw(st.integers(-(1 << 36), 1 << 36))))
    meaning = draw(st.sampled_from(["context", "foreign", "boot", "growth", "pages", "padding"]))
    return Cause(meaning=meaning, least=low, most=high, text="drawn")


KNOWN = st.dictionaries(st.sampled_from(LABELS), st.lists(causes(), max_size=3))
CHANGES = st.lists(
    st.builds(
        Change,
        setting=st.sampled_from(SETTINGS),
        before=VALUES,
        after=VALUES,
        buckets=st.lists(st.sampled_from(BUCKETS), max_size=4).map(tuple),
    ),
    max_size=4,
)


@settings(max_examples=150, deadline=None)
@given(ledgers(), ledgers(), KNOWN, KNOWN, CHANGES, st.integers(0, 1 << 20), st.integers(0, 64))
def test_differences_of_a_device_add_up_to_that_of_its_totals(
    before: Ledger, after: Ledger, known: Any, earlier: Any, changes: list[Change], context: int, slots: int
) -> None:
    """To the byte and at both ends, whatever is compared together and however a rest falls apart."""
    found = between(before, after, causes=known, causes_before=earlier, changes=changes, context=context, slots=slots)
    one, other = ends_of(before), ends_of(after)
    for label in {*one, *other}:
        mine = [row for row in found if row.device == label]
        low, high = one.get(label, (0, 0))
        least, most = other.get(label, (0, 0))
        # A context of which both know the same range is one number.
        shared = sum(
            (row.before_at_most or row.before or 0) - (row.before or 0)
            for row in mine
            if row.bucket == "context" and row.least == row.most
        )
        assert sum(row.least for row in mine) == least - high + shared
        assert sum(row.most for row in mine) == most - low - shared
        assert all(row.least <= row.most for row in mine)


@settings(max_examples=100, deadline=None)
@given(ledgers(), KNOWN)
def test_a_ledger_does_not_differ_from_itself(ledger: Ledger, known: Any) -> None:
    """Every figure that is a point is equal to itself; no change is made up."""
    for row in between(ledger, ledger, causes=known, causes_before=known):
        assert row.meaning in ("equal", "range"), row


@settings(max_examples=100, deadline=None)
@given(st.lists(causes(), max_size=5), st.integers(-(1 << 38), 1 << 38))
def test_no_cause_holds_more_than_it_can(known: list[Cause], wanted: int) -> None:
    """Each share is within its bounds, and nothing is left over while one of them has room."""
    shares = _shares(known, wanted)
    for cause, share in zip(known, shares, strict=True):
        assert cause.least <= share <= cause.most
    low, high = sum(cause.least for cause in known), sum(cause.most for cause in known)
    assert sum(shares) == min(max(wanted, low), high)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 1 << 50), st.integers(0, 1 << 50), st.integers(0, 99), st.integers(0, 1 << 30))
def test_a_tolerance_divides_growth_from_none(before: int, more: int, percent: int, size: int) -> None:
    """The largest size that is allowed holds, one byte more has grown."""
    (found,) = tolerance.parse(f"peak:{percent}%" + (f"+{size}B" if size else ""), (), origin="test")
    top = found.allowed(before)
    assert found.holds((before, before), (top, top)) == "held"
    assert found.holds((before, before), (top + 1 + more, top + 1 + more)) == "grew"
    assert top == before + before * percent // 100 + size
