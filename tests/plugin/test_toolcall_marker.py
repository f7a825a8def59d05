"""``@toolcall_accuracy`` in a user's tests, against backends that answer by a script."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

from pytest_vram.testing.scripted import Fault, Script
from tests.conftest import Inner
from tests.plugin.toolcall_kit import project, write_cases

#: Nothing is measurable there: rates need no figure of memory.
NOTHING = "--vram-device=vulkan:0"


def records(folder: Path, name: str = "report.json") -> dict[str, Any]:
    """Test function → its record in the report."""
    report = json.loads((folder / name).read_text(encoding="utf-8"))
    return {test["nodeid"].partition("::")[2]: test for test in report["tests"]} | {"report": report}


def test_rates_decide_over_tests(pytester: pytest.Pytester, inner: Inner) -> None:
    """A right deployment passes, one that is half right fails with its kinds, a dead one is an error, and too little
    evidence is inconclusive; also where the test asks for no fixture, and where nothing can be measured."""
    project(
        pytester.path,
        {
            "good": Script(),
            "half": Script(accuracy=0.5, recovery=1.0, defects={"missing_bracket": 20, "wrong_value": 1}),
            "dying": Script(faults=[Fault(kind="dies", requests=[7])]),
        },
    )
    pytester.makepyfile(
        """
        import unittest
        import pytest
        from pytest_vram import max_vram, toolcall_accuracy, vram_backend

        @toolcall_accuracy(0.94, cases="cases.jsonl")
        def test_right(vram_toolcalls, vram_client):
            assert vram_toolcalls.rate == 1.0
            assert vram_toolcalls.verdict.outcome == "passed"
            assert not vram_toolcalls.kinds
            assert vram_toolcalls.case("case-007").first.calls[0].name == "job_status"
            with pytest.raises(KeyError, match="no case 'nothing' was asked"):
                vram_toolcalls.case("nothing")
            assert vram_toolcalls.path.is_file()

        @toolcall_accuracy(0.94, cases="cases.jsonl")
        def test_without_the_fixture():
            pass

        def test_restarts(vram_backend):
            vram_backend.restart()

        @toolcall_accuracy(0.999, cases="cases.jsonl", mode="proven")
        def test_undecided():
            pass

        @toolcall_accuracy(0.94, cases="cases.jsonl", mode="sprt")
        def test_sequential(vram_toolcalls):
            assert len(vram_toolcalls.results.results) < 60
            assert vram_toolcalls.results.stopped

        @pytest.mark.parametrize("one", [pytest.param(1, marks=toolcall_accuracy(0.94, cases="cases.jsonl")), 2])
        def test_of_parameters(one):
            pass

        class TestOfUnittest(unittest.TestCase):
            @toolcall_accuracy(0.94, cases="cases.jsonl")
            def test_it(self):
                pass

        @vram_backend("half")
        @toolcall_accuracy(0.5)
        class TestOfClass:
            @toolcall_accuracy(0.94, cases="cases.jsonl")
            def test_the_closest_wins(self, vram_toolcalls):
                assert vram_toolcalls.verdict.target == 0.94

            @toolcall_accuracy(0.94, cases="cases.jsonl", judge="after_retry")
            def test_a_retry_makes_it_right(self, vram_toolcalls):
                # Of a wrong value no runtime would know; a missing bracket is given back.
                assert set(vram_toolcalls.kinds) == {"wrong_value"}

            @toolcall_accuracy(0.94, cases="cases.jsonl")
            def test_the_body_fails_too(self):
                assert False, "the body"

        @vram_backend("dying")
        @toolcall_accuracy(0.94, cases="cases.jsonl")
        def test_died():
            pass

        @toolcall_accuracy(0.94, cases="cases.jsonl")
        @max_vram("1GB")
        def test_also_needs_a_device():
            pass
        """
    )
    result = inner(NOTHING, "-rA", "--vram-report=report.json", "--junitxml=junit.xml", "-vv")
    result.assert_outcomes(passed=8, failed=2, errors=1, skipped=1)
    result.stdout.fnmatch_lines(
        [
            "* of 60 right (*target 94 %: below it:*",
            "backend 'half', cases *(60 answered), tools; temperature 0*",
            "category*first try*after retry",
            "all*/60 *",
            "kind of defect*",
            "missing_bracket*",
            "*expected: *job_status(job=*",
            "all answers: *toolcalls-half-*.json",
        ]
    )
    text = result.stdout.str()
    assert "vram: tool calls" in text  # beside the failure of the body
    assert "INCONCLUSIVE" in text
    assert "tool calls  60/60 100% right at first try" in text
    assert "an earlier test of this run had asked the same" in text
    found = records(pytester.path)
    assert found["test_right"]["toolcalls"]["verdict"]["outcome"] == "passed"
    assert found["test_without_the_fixture"]["toolcalls"]["asked"]["reused"]
    assert found["test_undecided"]["outcome"] == "inconclusive"
    assert not found["test_undecided"]["toolcalls"]["asked"]["reused"]  # another server was started in between
    assert "test_of_parameters[2]" not in found  # which is not marked
    assert found["TestOfUnittest::test_it"]["toolcalls"]["asked"]["right"] == 60
    half = found["TestOfClass::test_the_closest_wins"]
    assert half["findings"][0]["check"] == "toolcall_accuracy"
    kinds = {row["kind"]: row["first"] for row in half["toolcalls"]["asked"]["kinds"]}
    assert kinds["missing_bracket"] > kinds["wrong_value"] > 0
    assert half["toolcalls"]["worst"][0]["request"]["messages"]
    assert found["test_died"]["outcome"] == "error"
    assert found["test_died"]["toolcalls"] is None
    assert [row["backend"] for row in found["report"]["defects"][0]["columns"]] == ["good", "half"]
    suite = ElementTree.parse(pytester.path / "junit.xml").getroot()[0]
    assert (suite.attrib["failures"], suite.attrib["errors"], suite.attrib["skipped"]) == ("2", "1", "2")


def test_what_cannot_be_asked_is_an_error_of_that_test_alone(pytester: pytest.Pytester, inner: Inner) -> None:
    """Nothing is started for it, and the other tests run."""
    project(pytester.path, {"good": Script()}, count=4)
    (pytester.path / "invented.jsonl").write_text(
        '{"id": "a", "family": "a", "category": "single", "language": "en", "tools": ["job_restart"],'
        ' "messages": [{"role": "user", "content": "Restart it."}], "expect": []}\n'
    )
    (pytester.path / "earlier.json").write_text("{}")
    pytester.makepyfile(
        """
        import pytest
        from pytest_vram import toolcall_accuracy, vram_backend

        @pytest.fixture
        def loud():
            print("FIXTURE")

        @toolcall_accuracy(94)
        def test_percent(loud): pass

        @toolcall_accuracy("0.94")
        def test_string(loud): pass

        @toolcall_accuracy(0.94, mode="exactly")
        def test_mode(loud): pass

        @toolcall_accuracy(0.94, cases="nowhere.jsonl")
        def test_missing(loud): pass

        @toolcall_accuracy(0.94, cases="invented.jsonl")
        def test_invented(loud): pass

        @toolcall_accuracy(0.94, cases="cases.jsonl", baseline="nowhere")
        def test_baseline(loud): pass

        @toolcall_accuracy(0.94, cases="cases.jsonl", baseline="good")
        def test_itself(loud): pass

        @toolcall_accuracy(0.94, cases="cases.jsonl", baseline="earlier.json")
        def test_no_results(loud): pass

        def test_unmarked(vram_toolcalls): pass

        def test_other(): pass
        """
    )
    result = inner("-s", "-rE", "--tb=short")
    result.assert_outcomes(errors=9, passed=1)
    result.stdout.no_fnmatch_line("*FIXTURE*")
    result.stdout.fnmatch_lines(
        [
            "*@toolcall_accuracy: target=94 is not a share: write 0.94*",
            "*@toolcall_accuracy: target='0.94' is a string and not a number*",
            "*@toolcall_accuracy: mode='exactly' is not one of not_below, proven, sprt, point*",
            "*@toolcall_accuracy: *nowhere.jsonl*",
            "*@toolcall_accuracy: *invented.jsonl*job_restart*",
            "*@toolcall_accuracy: baseline='nowhere' is neither a backend*nor a results file*",
            "*@toolcall_accuracy: baseline='good' is this test's own backend*",
            "*@toolcall_accuracy: *earlier.json*",
            "*vram_toolcalls fixture*@toolcall_accuracy(0.94)*",
        ]
    )
    assert not list(pytester.path.glob(".vram/runs/*/good.*.log"))


def test_a_baseline_is_asked_first_and_compared_case_by_case(pytester: pytest.Pytester, inner: Inner) -> None:
    """A backend as the baseline is asked in a window of its own; a results file is read; two columns beside."""
    project(pytester.path, {"good": Script(), "worse": Script(accuracy=0.6)})
    pytester.makepyfile(
        """
        from pytest_vram import toolcall_accuracy, vram_backend

        @vram_backend("worse")
        @toolcall_accuracy(0.2, cases="cases.jsonl", baseline="good")
        def test_worse(vram_toolcalls, vram_client):
            assert vram_toolcalls.baseline.backend == "good"
            assert vram_toolcalls.verdict.paired.lost > 5
            vram_toolcalls.path.rename("earlier.json")

        @vram_backend("worse")
        @toolcall_accuracy(0.2, cases="cases.jsonl", baseline="earlier.json")
        def test_as_before(vram_toolcalls):
            assert vram_toolcalls.verdict.paired.lost == 0
        """
    )
    result = inner("--vram-device=cpu", "--vram-report=report.json")
    result.assert_outcomes(failed=1, passed=1)
    result.stdout.fnmatch_lines(
        [
            "Compared with good on 60 cases: *worse*",
            "category*baseline",
            "defects by setting*good*worse",
            "right*60/60*",
        ]
    )
    found = records(pytester.path)
    assert found["test_worse"]["toolcalls"]["baseline"]["right"] == 60
    # The baseline's memory is none of the test's, and its backend stands in the report.
    assert found["test_worse"]["backends"] == ["worse#1"]
    assert {backend["name"] for backend in found["report"]["backends"]} == {"good", "worse"}


def test_each_attempt_asks_anew_and_workers_agree(pytester: pytest.Pytester, inner: Inner) -> None:
    """A rerun is judged by what it was answered itself; with xdist the results files of workers have their names."""
    project(pytester.path, {"half": Script(accuracy=0.5)}, count=40)
    pytester.makepyfile(
        """
        from pytest_vram import toolcall_accuracy

        @toolcall_accuracy(0.94, cases="cases.jsonl")
        def test_half(): pass
        """
    )
    result = inner(
        NOTHING, "-n1", "--reruns=1", "--vram-report=report.json", "-o", "log_file=log.txt", "-o", "log_file_level=INFO"
    )
    assert "1 failed, 1 rerun" in result.stdout.str()
    report = json.loads((pytester.path / "report.json").read_text())
    assert [test["attempt"] for test in report["tests"]] == [1, 2]
    files = {Path(test["toolcalls"]["asked"]["file"]).name for test in report["tests"]}
    assert files == {"toolcalls-half-gw0-1.json", "toolcalls-half-gw0-2.json"}
    assert not any(test["toolcalls"]["asked"]["reused"] for test in report["tests"])


@pytest.mark.parametrize("option", ["--collect-only", "--setup-plan"])
def test_what_only_lists_asks_nothing(pytester: pytest.Pytester, inner: Inner, option: str) -> None:
    """No server is started, and no case is asked."""
    project(pytester.path, {"good": Script(faults=[Fault(kind="dies", requests=[0])])}, count=4)
    pytester.makepyfile(
        """
        from pytest_vram import toolcall_accuracy

        @toolcall_accuracy(0.94, cases="cases.jsonl")
        def test_it(): pass
        """
    )
    result = inner(option)
    assert result.ret == 0
    assert not list(pytester.path.glob(".vram/runs/*/good.*.log"))


def test_few_answers_are_no_verdict_and_every_case_is_logged(pytester: pytest.Pytester, inner: Inner) -> None:
    """Below 95 % completion the test is an error, whatever the rate of the others; in files beside the tests as well,
    and where estimates stand in for figures."""
    folder = pytester.mkpydir("below")
    project(
        pytester.path, {"busy": Script(faults=[Fault(kind="disconnect", cases=["case-003", "case-009"])])}, count=20
    )
    write_cases(folder, 20)
    (folder / "test_it.py").write_text(
        "from pytest_vram import toolcall_accuracy\n\n"
        "@toolcall_accuracy(0.5, cases='cases.jsonl', retries=0)\ndef test_it(): pass\n"
    )
    result = inner("--vram-device=predicted", "-o", "log_file=log.txt", "-o", "log_file_level=INFO", "-rE")
    assert "1 error" in result.stdout.str()
    result.stdout.fnmatch_lines(["2 of 20 cases have no answer that can be judged*see to the server*"])
    lines = [line for line in (pytester.path / "log.txt").read_text().splitlines() if "case=case-" in line]
    assert len(lines) == 20
    assert any("outcome=infrastructure kind=- latency=" in line for line in lines)
