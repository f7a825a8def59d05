"""What `vram check` makes of pytest's exit codes, and which tests it picks."""

from __future__ import annotations

from typing import Literal

import pytest

from pytest_vram.cli import check
from pytest_vram.cli.output import BAD_USE, FAILS, HOLDS, INCONCLUSIVE, INTERRUPTED
from pytest_vram.readings import Measured, Reading, Unmeasurable
from pytest_vram.report.records import RunInfo, RunReport, TestRecord

READ = Reading(bytes=1, source="host-hwm", scope="run", device="host", exact=True)
HOLE = Unmeasurable(reason="nothing there")


def report(*peaks: Measured, verdict: Literal["passed", "failed", "inconclusive"] = "passed") -> RunReport:
    """A report whose tests have these peaks."""
    info = RunInfo(
        id="1",
        started="",
        seconds=1.0,
        verdict=verdict,
        device="cpu",
        devices=[],
        settings={},
        versions={},
        counts={},
        command=[],
    )
    tests = [TestRecord(nodeid="t", outcome="passed", seconds=1.0, peak={"host": peak}) for peak in peaks]
    return RunReport(run=info, tests=tests, backends=[])


def ended(code: int, found: RunReport | None, *, collected: bool = False, interrupted: bool = False) -> int:
    """The command's exit code for this end of pytest."""
    watcher = check._Watcher([])
    watcher.report, watcher.only_collected, watcher.interrupted = found, collected, interrupted
    return check._answer(code, watcher).code


@pytest.mark.parametrize(
    ("code", "expected"),
    [(0, HOLDS), (1, FAILS), (2, BAD_USE), (3, FAILS), (4, BAD_USE), (5, BAD_USE), (99, BAD_USE)],
)
def test_exit_codes_are_mapped(code: int, expected: int) -> None:
    """Each of pytest's exit codes becomes the command's."""
    assert ended(code, report(READ)) == expected


@pytest.mark.parametrize("found", [None, report(verdict="inconclusive"), report(HOLE, verdict="inconclusive")])
def test_passing_without_proof_is_inconclusive(found: RunReport | None) -> None:
    """Tests that passed while nothing was measured, or while one could not decide, prove nothing: 3, not 0."""
    assert ended(0, found) == INCONCLUSIVE


def test_a_run_that_passed_holds() -> None:
    """The run's own verdict decides."""
    assert ended(0, report(HOLE, READ)) == HOLDS


def test_listing_tests_is_no_verdict() -> None:
    """With --collect-only there is nothing to measure, and nothing to complain of."""
    assert ended(0, None, collected=True) == HOLDS


def test_control_c_is_130() -> None:
    """Ctrl-C is told apart from pytest's other uses of its exit code 2."""
    assert ended(2, report(READ), interrupted=True) == INTERRUPTED


@pytest.mark.parametrize(
    ("argument", "chosen"),
    [
        ("pytest_vram_specs.test_idle", [("test_idle", "")]),
        ("pytest_vram_specs.test_idle::test_x", [("test_idle", "test_x")]),
        ("test_idle.py::test_x", [("test_idle", "test_x")]),
        ("test_idle", [("test_idle", "")]),
        ("test_of_mine", []),
        ("tests/test_idle.py", []),
        ("--test_idle", []),
    ],
)
def test_keys_of_the_suite_are_recognised(argument: str, chosen: list[tuple[str, str]]) -> None:
    """A key as reports write it picks a module or a test; everything else is left to pytest."""
    found, others = check._chosen(["-v", argument])
    assert found == chosen
    assert others == (["-v"] if chosen else ["-v", argument])
