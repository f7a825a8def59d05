"""The page on verdicts says what is so: its tables are computed anew, and its promises are kept by its own figures."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from pytest_vram import stats
from pytest_vram.toolcalls.verdict import MODES

PAGE = Path(__file__).resolve().parents[2] / "docs" / "toolcall-statistics.md"
TEXT = PAGE.read_text(encoding="utf-8")


def table(head: str) -> list[list[str]]:
    """The rows of the table whose first row begins like this."""
    after = TEXT[TEXT.index(head) :].splitlines()[2:]
    rows = []
    for line in after:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


def test_every_mode_is_on_the_page() -> None:
    """In the order of the code, the default first."""
    assert tuple(row[0].split("`")[1] for row in table("| mode |")) == MODES


def test_how_many_cases_find_what() -> None:
    """Counts that fail, drops that are found, and false alarms of the literal rule."""
    rows = table("| cases | `not_below`")
    assert len(rows) > 5
    for row in rows:
        n = int(row[0])
        fails, drop = stats.critical_count(n, 0.94), stats.detectable_drop(n, 0.94)
        assert drop is not None
        assert row[1:] == [
            f"{fails} ({100 * fails / n:.1f} %)",
            f"{100 * drop:.1f} points",
            f"{100 * stats.power_of_not_below(n, 0.94, 0.89):.0f} %",
            f"{100 * stats.false_alarm_of_point_rule(n, 0.94):.0f} %",
        ]


def test_cases_of_a_proof() -> None:
    """For each target and number of wrong answers."""
    for row in table("| target | 0 wrong"):
        target = float(row[0].removesuffix(" %")) / 100
        assert [int(cell) for cell in row[1:]] == [stats.required_n_proven(f, target) for f in (0, 1, 2, 3, 5, 10)]


def test_cases_of_the_sequential_test() -> None:
    """Averages at each true rate, and what stays undecided."""
    for row in table("| cases at hand |"):
        test = stats.sprt(0.94, 0.89, most=int(row[0]))
        found = [test.operating_characteristic(rate) for rate in (1.0, 0.97, 0.94, 0.915, 0.89, 0.8, 0.0)]
        assert row[1:8] == [f"{each.average:.0f}" for each in found]
        assert row[8:] == [f"{100 * found[at].inconclusive:.0f} %" for at in (2, 4)]


def test_cases_of_a_comparison() -> None:
    """For each share of changed answers and margin."""
    for row in table("| answers that change |"):
        share = float(row[0].removesuffix(" %")) / 100
        assert [int(cell) for cell in row[1:]] == [stats.pairs_needed(share, margin) for margin in (0.03, 0.05, 0.1)]


@pytest.mark.parametrize("part", [*MODES, "paired", "pipeline"])
def test_measured_figures_keep_what_is_promised(part: str) -> None:
    """Each row with a promise, of each part of the bench."""
    measured = TEXT[TEXT.index("<!-- gates: begin -->") : TEXT.index("<!-- gates: end -->")]
    section = re.search(rf"^`{part}`:\n\n(.*?)(?:\n\n|\Z)", measured, re.MULTILINE | re.DOTALL)
    assert section is not None
    promises = 0
    for line in section[1].splitlines()[2:]:
        found = re.search(r"\| ([\d.]+) % \| (at most|at least) ([\d.]+) % \|", line)
        if found is not None:
            promises += 1
            figure, limit = float(found[1]), float(found[3])
            # 2000 runs of an error of exactly 5 % show up to 6.1 % once in a hundred rows.
            chance = 100 * 2.33 * math.sqrt(limit / 100 * (1 - limit / 100) / 2000)
            assert figure <= limit + chance if found[2] == "at most" else figure >= limit, line
    assert promises or part == "point"
