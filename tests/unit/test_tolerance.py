"""How much may grow: the expression of --fail-on."""

from __future__ import annotations

import pytest

from pytest_vram.errors import BadInput
from pytest_vram.tolerance import parse
from pytest_vram.units import MIB

NAMES = ("weights", "kv")


@pytest.mark.parametrize(
    ("text", "before", "allowed"),
    [
        ("peak", 1000, 1000),
        ("peak:5%", 1000, 1050),
        ("peak:5 %", 1000, 1050),
        ("peak:0.1%", 10_000, 10_010),
        ("peak:64MiB", 1000, 1000 + 64 * MIB),
        ("peak:5%+64MiB", 1000, 1050 + 64 * MIB),
        ("peak: 64 MiB + 5%", 1000, 1050 + 64 * MIB),
        ("kv:33.333333%", 3_000_000, 3_999_999),
        ("peak:5%", 1 << 52, (1 << 52) + (1 << 52) // 20),
    ],
)
def test_what_is_allowed_is_exact(text: str, before: int, allowed: int) -> None:
    """Percent of what was before, and bytes on top, rounded down."""
    (found,) = parse(text, NAMES, origin="--fail-on")
    assert found.allowed(before) == allowed


def test_several_are_joined_by_commas() -> None:
    """Each figure has a tolerance of its own."""
    found = parse("peak:5%+64MiB, kv, weights:1MiB", NAMES, origin="--fail-on")
    assert [(one.what, one.percent, one.size) for one in found] == [
        ("peak", "5", 64 * MIB),
        ("kv", "0", 0),
        ("weights", "0", MIB),
    ]


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "WHAT:TOLERANCE"),
        ("peak,,kv", "WHAT:TOLERANCE"),
        ("speed:5%", "peak, weights, kv"),
        ("peak:", "names no tolerance"),
        ("peak:5", "unit"),
        ("peak:-5%", "--fail-on"),
        ("peak:nan%", "--fail-on"),
        ("peak:5%+6%", "two of the same kind"),
        ("peak:5%+", "--fail-on"),
        ("peak:3g", "ambiguous"),
        ("peak,peak:5%", "twice"),
        ("peak:1e9999999%", "--fail-on"),
        ("peak:٥%", "--fail-on"),
        ("x" * 5000, "--fail-on"),
    ],
)
def test_what_cannot_be_read_is_refused(text: str, part: str) -> None:
    """The message says what is wrong and where it was written."""
    with pytest.raises(BadInput) as caught:
        parse(text, NAMES, origin="--fail-on")
    assert part in str(caught.value)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("before", "after", "result"),
    [
        ((100, 100), (105, 105), "held"),
        ((100, 100), (106, 106), "grew"),
        ((100, 110), (106, 106), "undecided"),
        ((100, 100), (90, 120), "undecided"),
        ((100, 100), (106, None), "grew"),
        ((100, 100), (90, None), "undecided"),
        ((100, None), (200, 200), "undecided"),
        ((100, None), (104, 104), "held"),
    ],
)
def test_ends_decide_for_certain_only(
    before: tuple[int, int | None], after: tuple[int, int | None], result: str
) -> None:
    """Grown is what did by the ends that favour it least, held what did not by those that favour it most."""
    (found,) = parse("peak:5%", NAMES, origin="--fail-on")
    assert found.holds(before, after) == result
