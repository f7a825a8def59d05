"""Sizes: what is read, what is refused, and how figures are printed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_vram import units
from pytest_vram.errors import BadSize


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("3GB", 3_000_000_000),
        ("3GiB", 3_221_225_472),
        ("4 gb", 4_000_000_000),
        ("0.5GiB", 536_870_912),
        (".5gib", 536_870_912),
        ("1b", 1),
        ("1.5kb", 1500),
        ("512MiB", 536_870_912),
        ("2TB", 2 * 10**12),
    ],
)
def test_a_size_means_its_exact_number_of_bytes(text: str, size: int) -> None:
    """Decimal and binary units are told apart, in any case, with at most one space."""
    assert units.parse_size(text) == size


@pytest.mark.parametrize(
    "value",
    ["", " ", "GB", "-3GB", "+3GB", "nan", "inf", "nanGB", "1e3GB", "3GB ", " 3GB", "3  GB", "3GBx", "3,5GB", "0GB",
     "0.0000000001GB", "٣GB", "3ＧＢ", "3 gigabytes", "3\nGB", "9" * 400 + "TB", None, True, False, 3, 3.5, b"3GB", [], float("nan")],
)  # fmt: skip
def test_everything_else_is_refused_with_what_is_accepted(value: object) -> None:
    """A value that is not plainly a size is a BadSize whose message shows a size that would do."""
    with pytest.raises(BadSize, match=r"GB|one byte"):
        units.parse_size(value)


@pytest.mark.parametrize("text", ["3g", "3G", "3gi", "512m", "1k", "2T"])
def test_a_one_letter_unit_is_ambiguous_and_both_readings_are_shown(text: str) -> None:
    """The message for ``3g`` names 3GB and 3GiB with their bytes."""
    with pytest.raises(BadSize, match=r"ambiguous: .*[KMGT]B \([\d,]+ bytes\) or .*iB \([\d,]+ bytes\)"):
        units.parse_size(text)


def test_the_message_for_3g_is_the_documented_one() -> None:
    """The wording that the documentation promises."""
    with pytest.raises(BadSize) as caught:
        units.parse_size("3g")
    assert str(caught.value) == "`3g` is ambiguous: 3GB (3,000,000,000 bytes) or 3GiB (3,221,225,472 bytes)"


@given(st.integers(1, 10**6), st.sampled_from(["MB", "MiB", "GB", "GiB"]))
def test_written_and_parse_are_inverse(number: int, unit: str) -> None:
    """A size that was printed in a user's unit reads back to the same bytes."""
    size = units.parse_size(f"{number}{unit}")
    text = units.written(size)
    if not text.startswith(("0", "-")) and "," not in text and "." not in text:
        assert units.parse_size(text) == size


@given(st.text(max_size=12))
def test_no_text_makes_the_reader_crash(text: str) -> None:
    """Any text gives a positive size or a BadSize."""
    try:
        assert units.parse_size(text) >= 1
    except BadSize:
        pass


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0.00 MiB"), (94_371_840, "90.00 MiB"), (1, "1 bytes"), (-1_048_576, "-1.00 MiB"), (4_000_000_000, "3,815 MiB"),
     (524_288_000, "500.0 MiB")],
)  # fmt: skip
def test_figures_are_printed_in_mib(size: int, text: str) -> None:
    """MiB with the digits an engine prints; a small size never becomes zero."""
    assert units.mib(size) == text


def test_a_peak_between_gb_and_gib_gets_the_hint_about_cards() -> None:
    """7,900 MiB is over 8GB but under 8GiB; the hint says to write 8GiB."""
    assert units.card_hint(7900 * units.MIB, 8 * 10**9) == (
        "7,900 MiB is over 8GB (7,629 MiB) but under 8GiB; write 8GiB if you mean the card"
    )


@pytest.mark.parametrize(
    ("peak", "limit"), [(8 * 10**9, 8 * 10**9), (9 * units.GIB, 8 * 10**9), (7900 * units.MIB, 8 * units.GIB)]
)
def test_no_hint_where_gib_would_not_help(peak: int, limit: int) -> None:
    """Within the limit, over both, or already in GiB: no hint."""
    assert units.card_hint(peak, limit) is None
