"""What CUDA programs see of the NVIDIA cards of a machine."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_vram.measure.visible import Card, Slice, Visible, find, visible

A, B, C = "GPU-aaaaaaaa-0000-0000-0000-000000000001", "GPU-aabbbbbb-0000-0000-0000-000000000002", "GPU-cccccccc-3"
SAME = [Card(A, "L4"), Card(B, "L4"), Card(C, "L4")]
CUT = [Card(A, "H200", (Slice("MIG-1", 7, 0), Slice("MIG-2", 8, 0))), Card(B, "H200")]


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        (None, (A, B, C)),
        ("2,0", (C, A)),
        (" 1 , 2 ", (B, C)),
        ("0,7,1", (A,)),
        ("0,-1,1", (A,)),
        ("1,x,0", (B,)),
        ("1gpu,0card", (B, A)),
        ("+1", (B,)),
        (C, (C,)),
        (f"{C},{A}", (C, A)),
        ("GPU-cc,GPU-aaa", (C, A)),
        ("GPU-cc,GPU-aa,GPU-aab", (C,)),  # two begin so
        (f"{A},1", (A,)),
        (f"1,{A}", (B,)),
    ],
)
def test_what_is_visible(text: str | None, seen: tuple[str, ...]) -> None:
    """Indices and UUIDs choose and order the cards, up to the first entry that names none."""
    environment = {} if text is None else {"CUDA_VISIBLE_DEVICES": text}
    assert visible(SAME, environment) == Visible(seen)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "hides all cards"),
        ("-1", "hides all cards"),
        ("-1,0", "hides all cards"),
        ("7", "begins with no device"),
        ("none", "begins with no device"),
        ("GPU-", "begins with no device"),
        ("GPU-dead", "begins with no device"),
        ("MIG-1", "begins with no device"),
        ("0,1,0", "twice"),
        ("0,9,0", "twice"),
        (f"{A},GPU-aaaa", "twice"),
    ],
)
def test_nothing_is_visible(text: str, reason: str) -> None:
    """A value that hides every card says how it does."""
    found = visible(SAME, {"CUDA_VISIBLE_DEVICES": text})
    assert found.uuids == ()
    assert reason in (found.reason or "")
    assert f"CUDA_VISIBLE_DEVICES={text}" in (found.reason or "")


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        (None, "MIG-1"),
        ("0", "MIG-1"),
        ("1", B),
        (A, "MIG-1"),
        ("MIG-2", "MIG-2"),
        ("MIG-2,MIG-1", "MIG-2"),
        (f"MIG-{A}/8/0", "MIG-2"),
        ("1,0", "MIG-1"),  # a program that sees a slice sees no whole card
    ],
)
def test_one_slice_is_visible(text: str | None, seen: str) -> None:
    """Of MIG slices CUDA uses the first that it sees, and then no whole card."""
    found = visible(CUT, {} if text is None else {"CUDA_VISIBLE_DEVICES": text})
    assert found.uuids == (seen,)
    assert (found.note is not None) == (seen != B)


def test_the_only_slice_needs_no_note() -> None:
    """Where there is one slice of one card nothing else could be meant."""
    assert visible([Card(A, "H200", (Slice("MIG-1"),))], {}) == Visible(("MIG-1",))


@pytest.mark.parametrize(
    ("environment", "certain"),
    [
        ({}, False),
        ({"CUDA_VISIBLE_DEVICES": "1,0"}, False),
        ({"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}, False),
        ({"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, True),
        ({"CUDA_VISIBLE_DEVICES": f"{C},{A}"}, True),
    ],
)
def test_order_of_cards_that_differ(environment: dict[str, str], certain: bool) -> None:
    """CUDA counts cards that differ by their speed; then indices are not certain, and the note says so."""
    found = visible([Card(A, "L4"), Card(C, "H200")], environment)
    assert found.certain is certain
    assert ("PCI_BUS_ID" in (found.note or "")) is not certain


def test_no_cards() -> None:
    """No card is visible where there is none."""
    assert visible([], {}).reason == "NVIDIA's driver lists no card"


@pytest.mark.parametrize(
    ("entry", "found"),
    [(A, A), ("GPU-c", C), ("GPU-a", None), ("GPU-", None), ("GPU-d", None), (f"MIG-{A}/1/0", None)],
)
def test_find_by_uuid(entry: str, found: str | None) -> None:
    """The beginning of a UUID names a card when no other begins so."""
    assert find(entry, SAME) == found


@given(st.text(alphabet="012-,GPUMIabc x/+", max_size=24))
def test_any_value(text: str) -> None:
    """Whatever the variable holds, what is visible are cards or one slice of here, each once, or a reason."""
    for cards in (SAME, CUT):
        found = visible(cards, {"CUDA_VISIBLE_DEVICES": text})
        known = {card.uuid for card in cards} | {one.uuid for card in cards for one in card.slices}
        assert set(found.uuids) <= known
        assert len(set(found.uuids)) == len(found.uuids)
        assert bool(found.uuids) != bool(found.reason)
