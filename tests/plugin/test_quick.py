"""Tests that ask for nothing share a window when they are short, and none of them gets away with it."""

from __future__ import annotations

import json
from xml.etree import ElementTree

import pytest

from tests.conftest import Inner
from tests.plugin.test_budget import project as plain_project
from tests.plugin.test_budget import report

assert plain_project
# An interval of seconds makes every test here a short one; what lives on is seen when the window closes.
SHORT = ("--vram-device=cpu", "--vram-interval=20000", "--vram-report=out.json")

LASTING = """
import atexit, pathlib, subprocess, sys, time

def lasting(megabytes):
    here = pathlib.Path(__file__).parent
    one = subprocess.Popen([sys.executable, "-S", str(here / "child.py"), str(megabytes * 10**6), "60"])
    atexit.register(one.wait)
    atexit.register(one.kill)
    while int(pathlib.Path(f"/proc/{one.pid}/statm").read_text().split()[1]) * 4096 < megabytes * 10**6:
        time.sleep(0.001)
    return one
"""
FOUR = """
from lasting import lasting

def test_first(): pass
def test_large(): lasting(300)
def test_third(): pass
def test_last(): pass
"""


@pytest.fixture
def project(plain_project: pytest.Pytester) -> pytest.Pytester:
    """A project whose tests can start a child that lives on and holds memory."""
    plain_project.path.joinpath("lasting.py").write_text(LASTING)
    return plain_project


@pytest.mark.parametrize("workers", ["0", "1"])
def test_those_that_may_have_broken_the_budget_fail_after_they_were_reported(
    project: pytest.Pytester, inner: Inner, workers: str
) -> None:
    """Four short tests share a window in which the limit was broken, nobody knows when: each of them fails, those
    whose reports are out by another report, in the terminal, in JUnit's file and in the exit code."""
    project.makepyfile(test_four=FOUR)
    result = inner(*SHORT, "--vram-budget=200MB", "-n", workers, "--junit-xml=junit.xml")
    assert result.ret == 1
    result.assert_outcomes(failed=4)
    result.stdout.fnmatch_lines(["It was one of these 4 tests, which ran within *"])
    result.stdout.fnmatch_lines(["*To tell them apart: --vram-interval=1 or a max_vram*"])
    result.stdout.fnmatch_lines(["FAILED test_four.py::test_first*", "FAILED test_four.py::test_last*"])
    tests = report(project)["tests"]
    assert [test["nodeid"].partition("::")[2] for test in tests] == [
        "test_first",
        "test_large",
        "test_third",
        "test_last",
    ]
    assert [test["outcome"] for test in tests] == ["failed"] * 4
    assert all("shared by 4 tests" in test["peak"]["host"]["note"] for test in tests)
    suite = ElementTree.parse(project.path / "junit.xml").getroot()[0]
    assert suite.get("failures") == "4"


def test_a_test_that_lasts_an_interval_is_judged_in_its_own_report(project: pytest.Pytester, inner: Inner) -> None:
    """With the usual interval a test with a child is no short one: it fails itself, and short ones around it pass."""
    project.makepyfile(
        """
        from children import child

        def test_first(): pass
        def test_large(): child(300)
        def test_third(): pass
        def test_last(): pass
        """
    )
    result = inner("--vram-device=cpu", "--vram-budget=200MB", "--vram-report=out.json")
    result.assert_outcomes(passed=3, failed=1)
    peaks = [test["peak"]["host"]["bytes"] for test in report(project)["tests"]]
    assert peaks[1] > 300e6
    assert max(peaks[2:]) < 100e6


def test_a_run_that_stops_early_judges_what_ran(project: pytest.Pytester, inner: Inner) -> None:
    """A session that ends in the middle of a window judges it all the same, and its exit code says so."""
    project.makepyfile(
        """
        from lasting import lasting

        def test_large(): lasting(300)
        def test_stops(request): request.session.shouldfail = "enough"
        def test_never(): pass
        """
    )
    for workers in ("0", "1"):
        result = inner(*SHORT, "--vram-budget=200MB", "-n", workers)
        assert result.ret != 0
        result.stdout.fnmatch_lines(["*The peak of this run is *over the limit 200MB*"])
        outcomes = {test["nodeid"].partition("::")[2]: test["outcome"] for test in report(project)["tests"]}
        assert outcomes["test_large"] == "failed"


def test_a_marked_test_among_short_ones_has_its_own_window(project: pytest.Pytester, inner: Inner) -> None:
    """The window of short tests ends before a test with a marker begins, so neither is charged for the other."""
    project.makepyfile(
        """
        from lasting import lasting
        from pytest_vram import max_vram

        def test_before(): pass

        @max_vram("100MB")
        def test_marked(vram):
            one = lasting(150)
            assert vram.peak.bytes > 150e6
            one.kill()
            one.wait()

        def test_after(): pass
        """
    )
    result = inner(*SHORT, "--vram-budget=1GB")
    result.assert_outcomes(passed=2, failed=1)
    outcomes = {test["nodeid"].partition("::")[2]: test["outcome"] for test in report(project)["tests"]}
    assert outcomes == {"test_before": "passed", "test_marked": "failed", "test_after": "passed"}


def test_a_short_test_that_asks_for_the_meter_gets_a_window(project: pytest.Pytester, inner: Inner) -> None:
    """A fixture that is asked for in the middle of a test opens its own window; what came before counts as well."""
    project.makepyfile(
        """
        from lasting import lasting

        def test_before(): pass

        def test_it(request):
            one = lasting(300)
            assert request.getfixturevalue("vram").peak.bytes > 280e6
            one.kill()
            one.wait()

        def test_after(): pass
        """
    )
    result = inner(*SHORT, "--vram-budget=200MB")
    result.assert_outcomes(passed=1, failed=2)
    tests = {test["nodeid"].partition("::")[2]: test for test in report(project)["tests"]}
    assert {name: test["outcome"] for name, test in tests.items()} == {
        "test_before": "failed",  # it shared the window, and may have been the one
        "test_it": "failed",
        "test_after": "passed",
    }
    assert len(tests["test_it"]["findings"]) == 2


def test_own_outcomes_of_short_tests_stand(project: pytest.Pytester, inner: Inner) -> None:
    """Failures, skips, errors at set-up and teardown, expected failures and undecided tests end as ever."""
    project.makepyfile(
        """
        import pytest
        from pytest_vram import inconclusive

        @pytest.fixture
        def bad(): raise ValueError("set-up")

        @pytest.fixture
        def worse():
            yield
            raise ValueError("teardown")

        def test_passes(): pass
        def test_fails(): assert 0
        def test_skips(): pytest.skip("no")
        def test_undecided(): inconclusive("who knows")
        def test_set_up(bad): pass
        def test_torn(worse): pass
        @pytest.mark.xfail
        def test_expected(): assert 0
        @pytest.mark.skip
        def test_marked(): pass
        """
    )
    result = inner(*SHORT, "--vram-budget=200MB", "-rA")
    assert result.parseoutcomes() == {
        "passed": 2,
        "failed": 1,
        "skipped": 2,
        "inconclusive": 1,
        "errors": 2,
        "xfailed": 1,
    }
    outcomes = {test["nodeid"].partition("::")[2]: test["outcome"] for test in report(project)["tests"]}
    assert outcomes == {
        "test_passes": "passed",
        "test_fails": "failed",
        "test_skips": "skipped",
        "test_undecided": "inconclusive",
        "test_set_up": "error",
        "test_torn": "error",
        "test_expected": "skipped",
    }


def test_a_passed_test_of_no_budget_costs_no_keeper(project: pytest.Pytester, inner: Inner) -> None:
    """Without a budget, unmarked tests of a run that takes part start nothing."""
    project.makepyfile("def test_it(): pass")
    inner("--vram-device=cpu").assert_outcomes(passed=1)
    assert not (project.path / ".vram").exists()


def test_subtests_do_not_end_the_window(project: pytest.Pytester, inner: Inner) -> None:
    """What a test does after its first subtest counts as well."""
    if pytest.version_tuple < (9, 0):
        pytest.skip("subtests came with pytest 9")
    project.makepyfile(
        """
        from children import child
        from pytest_vram import max_vram

        @max_vram("100MB")
        def test_marked(subtests):
            with subtests.test("nothing"): pass
            child(300)

        def test_short(subtests):
            with subtests.test("nothing"): pass
            child(300)
        """
    )
    result = inner("--vram-device=cpu", "--vram-budget=200MB", "--vram-report=out.json")
    assert result.ret == 1
    assert [test["outcome"] for test in report(project)["tests"]] == ["failed", "failed"]


def test_the_journal_names_the_tests_of_a_shared_window(project: pytest.Pytester, inner: Inner) -> None:
    """The line that closes a shared window has each of its tests with its outcome."""
    project.makepyfile(test_four=FOUR)
    inner(*SHORT, "--vram-budget=1GB")
    (path,) = (project.path / ".vram" / "runs").glob("*/journal.jsonl")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    (record,) = [line["record"] for line in lines if line["kind"] == "window" and line.get("event") == "close"]
    assert list(record["tests"].values()) == ["passed"] * 4
