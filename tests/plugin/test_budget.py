"""A budget in a project that has nothing to do with language models: child processes that hold memory."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.conftest import Inner

CHILD = """
import sys, time
size, seconds = int(sys.argv[1]), float(sys.argv[2])
block = bytearray(size)
block[::4096] = b"x" * len(block[::4096])
time.sleep(seconds)
for line in open("/proc/self/status"):
    if line.startswith("VmHWM"):
        print(int(line.split()[1]) * 1024)
"""

PROJECT = """
import subprocess, sys, pathlib

def child(megabytes, seconds=0.05):
    here = pathlib.Path(__file__).parent
    done = subprocess.run(
        [sys.executable, "-S", str(here / "child.py"), str(megabytes * 10**6), str(seconds)],
        check=True, capture_output=True, text=True,
    )
    (here / "mark").write_text(done.stdout)
"""


@pytest.fixture
def project(pytester: pytest.Pytester) -> pytest.Pytester:
    """A project whose tests can start a child that holds memory and reads its own high-water mark."""
    pytester.path.joinpath("child.py").write_text(CHILD)
    pytester.path.joinpath("children.py").write_text(PROJECT)
    pytester.makeini("[pytest]\npythonpath = .\n")
    return pytester


def report(pytester: pytest.Pytester) -> dict[str, Any]:
    """The JSON report of the inner run."""
    table: dict[str, Any] = json.loads((pytester.path / "out.json").read_text())
    return table


def test_a_child_over_the_budget_fails_its_test_with_an_exact_peak(project: pytest.Pytester, inner: Inner) -> None:
    """300 MB for 50 ms: over 200MB, and the peak is the child's own mark within 2 %."""
    project.makepyfile("from children import child\n\ndef test_it(): child(300)\n")
    result = inner("--vram-budget=200MB", "--vram-device=cpu", "--vram-report=out.json")
    result.assert_outcomes(failed=1)
    assert result.ret == 1
    result.stdout.fnmatch_lines(["*200MB*"])
    mark = int((project.path / "mark").read_text())
    (test,) = report(project)["tests"]
    peak = test["peak"]["host"]
    assert peak["kind"] == "reading"
    assert abs(peak["bytes"] - mark) <= 0.02 * mark
    assert test["outcome"] == "failed"
    assert test["limit"] == {"host": 200_000_000}
    (finding,) = test["findings"]
    assert finding["verdict"] == "failed"
    assert "200MB" in finding["text"]
    assert "--vram-budget" in finding["text"]
    assert peak["source"] in finding["text"]


def test_a_child_within_the_budget_passes(project: pytest.Pytester, inner: Inner) -> None:
    """The same child under 1GB passes, with the same peak in the report."""
    project.makepyfile("from children import child\n\ndef test_it(): child(300)\n")
    result = inner("--vram-budget=1GB", "--vram-device=cpu", "--vram-report=out.json")
    result.assert_outcomes(passed=1)
    mark = int((project.path / "mark").read_text())
    (test,) = report(project)["tests"]
    assert abs(test["peak"]["host"]["bytes"] - mark) <= 0.02 * mark


def test_each_test_has_its_own_peak(project: pytest.Pytester, inner: Inner) -> None:
    """A large test does not raise the peak of the small ones around it."""
    project.makepyfile(
        """
        from children import child

        def test_small(): child(60)
        def test_large(): child(400)
        def test_small_again(): child(60)
        def test_none(): pass
        """
    )
    result = inner("--vram-budget=200MB", "--vram-device=cpu", "--vram-report=out.json")
    result.assert_outcomes(passed=3, failed=1)
    peaks = [test["peak"]["host"]["bytes"] for test in report(project)["tests"]]
    assert 60e6 < peaks[0] < 100e6
    assert 400e6 < peaks[1] < 440e6
    assert 60e6 < peaks[2] < 100e6
    assert peaks[3] < 20e6


def test_the_smaller_of_budget_and_marker_holds_and_is_named(project: pytest.Pytester, inner: Inner) -> None:
    """A marker below the budget decides, and so does a budget below the marker."""
    project.makepyfile(
        """
        from children import child
        from pytest_vram import max_vram

        @max_vram("100MB")
        def test_marker(): child(150)

        @max_vram("2GB")
        def test_budget(): child(300)
        """
    )
    result = inner("--vram-budget=200MB", "--vram-device=cpu", "--vram-report=out.json")
    result.assert_outcomes(failed=2)
    first, second = report(project)["tests"]
    assert "@max_vram" in first["limit_from"]
    assert "--vram-budget" in second["limit_from"]


def test_a_marker_alone_is_judged(project: pytest.Pytester, inner: Inner) -> None:
    """Without a budget only the marked test is judged."""
    project.makepyfile(
        """
        from children import child
        from pytest_vram import max_vram

        @max_vram("100MB")
        def test_marked(): child(150)

        def test_unmarked(): child(150)
        """
    )
    result = inner("--vram-device=cpu", "--vram-report=out.json")
    result.assert_outcomes(passed=1, failed=1)
    assert len(report(project)["tests"]) == 1


def test_a_test_that_fails_by_itself_keeps_its_own_failure(project: pytest.Pytester, inner: Inner) -> None:
    """The assertion stays the failure; the memory finding stands beside it as a section."""
    project.makepyfile(
        """
        from children import child

        def test_it():
            child(300)
            assert 1 == 2, "its own reason"
        """
    )
    result = inner("--vram-budget=200MB", "--vram-device=cpu")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*its own reason*"])
    result.stdout.fnmatch_lines(["*200MB*"])


def test_an_expected_failure_may_be_the_budget(project: pytest.Pytester, inner: Inner) -> None:
    """A test marked xfail that passes but is over the budget counts as expected to fail."""
    project.makepyfile(
        """
        import pytest
        from children import child

        @pytest.mark.xfail
        def test_it(): child(300)
        """
    )
    inner("--vram-budget=200MB", "--vram-device=cpu").assert_outcomes(xfailed=1)


def test_the_meter_reads_phases_now_and_peak(project: pytest.Pytester, inner: Inner) -> None:
    """The `vram` fixture gives figures with their source, and a phase's limit can be set."""
    project.makepyfile(
        """
        from children import child
        from pytest_vram import max_vram

        def test_meter(vram):
            with vram.phase("large"):
                child(200)
            with vram.phase("small"):
                child(30)
            assert 200e6 < vram.peak.bytes < 240e6
            assert vram.peak.source
            assert vram.now().bytes < 20e6
            assert vram.idle(settle=2).bytes < 20e6
            assert len(vram.readings) >= 6

        @max_vram("100MB", phase="large")
        def test_phase(vram):
            with vram.phase("large"):
                child(200)

        @max_vram("100MB", phase="small")
        def test_other_phase(vram):
            child(200)
            with vram.phase("small"):
                child(30)

        @max_vram("100MB", phase="never")
        def test_no_such_phase(vram):
            child(30)
        """
    )
    result = inner("--vram-device=cpu", "--vram-report=out.json", "-rA")
    outcomes = {test["nodeid"].rpartition("::")[2]: test["outcome"] for test in report(project)["tests"]}
    assert outcomes == {
        "test_meter": "passed",
        "test_phase": "failed",
        "test_other_phase": "passed",
        "test_no_such_phase": "inconclusive",
    }
    result.stdout.fnmatch_lines(["*1 inconclusive*"])


def test_over_the_baseline_counts_what_the_test_added(project: pytest.Pytester, inner: Inner) -> None:
    """With over="baseline" what was held before the test is taken off."""
    project.makepyfile(
        """
        import subprocess, sys, pathlib, time
        import pytest
        from children import child
        from pytest_vram import max_vram

        @pytest.fixture(scope="module")
        def holder():
            here = pathlib.Path(__file__).parent
            process = subprocess.Popen([sys.executable, "-S", str(here / "child.py"), "200000000", "60"])
            deadline = time.monotonic() + 20
            while True:
                text = pathlib.Path(f"/proc/{process.pid}/status").read_text()
                held = int(text.partition("VmRSS:")[2].split()[0])
                if held > 200000:
                    break
                assert time.monotonic() < deadline
                time.sleep(0.01)
            yield
            process.kill()
            process.wait()

        def test_warm(holder): pass

        @max_vram("100MB", over="baseline")
        def test_added(holder): child(60)

        @max_vram("100MB")
        def test_total(holder): child(60)
        """
    )
    result = inner("--vram-device=cpu", "--vram-report=out.json")
    result.assert_outcomes(passed=2, failed=1)


def test_no_budget_no_marker_no_trace(project: pytest.Pytester, inner: Inner) -> None:
    """A project that uses nothing of the plugin gets no line and no folder."""
    project.makepyfile("from children import child\n\ndef test_it(): child(50)\n")
    result = inner()
    result.assert_outcomes(passed=1)
    assert "vram" not in result.stdout.str().replace("plugins:", "").partition("collected")[2]
    assert not (project.path / ".vram").exists()


@pytest.mark.parametrize("arguments", [["-q"], ["-qq"]])
def test_quiet_runs_get_one_line(project: pytest.Pytester, inner: Inner, arguments: list[str]) -> None:
    """With -q the summary is one line at most."""
    project.makepyfile("def test_it(): pass\n")
    result = inner("--vram-budget=1GB", "--vram-device=cpu", *arguments)
    lines = [line for line in result.stdout.lines if "vram" in line]
    assert len(lines) <= 1


def test_workers_share_one_keeper_and_one_report(project: pytest.Pytester, inner: Inner) -> None:
    """Under xdist the failing test fails in its worker and stands in the controller's report."""
    pytest.importorskip("xdist")
    project.makepyfile(
        """
        import pytest
        from children import child

        @pytest.mark.parametrize("n", range(6))
        def test_small(n): child(30)

        def test_large(): child(400)
        """
    )
    result = inner("--vram-budget=300MB", "--vram-device=cpu", "--vram-report=out.json", "-n2")
    table = report(project)
    outcomes = [test["outcome"] for test in table["tests"]]
    assert len(outcomes) == 7
    assert outcomes.count("failed") >= 1
    assert result.ret == 1
    large = next(test for test in table["tests"] if "large" in test["nodeid"])
    assert large["outcome"] == "failed"
    runs = list((project.path / ".vram" / "runs").iterdir())
    assert len(runs) == 1
    kinds = [json.loads(line)["kind"] for line in (runs[0] / "journal.jsonl").read_text().splitlines()]
    assert kinds.count("keeper") == 1
    assert kinds[-1] == "end"


def test_memory_of_pytest_itself_is_said_and_proves_nothing(project: pytest.Pytester, inner: Inner) -> None:
    """What a test loads into pytest's own process is not counted on cpu: the verdict is open and the summary warns."""
    project.makepyfile(
        """
        def test_it():
            block = bytearray(300_000_000)
            block[::4096] = b"x" * len(block[::4096])
        """
    )
    result = inner("--vram-budget=200MB", "--vram-device=cpu", "--vram-report=out.json")
    result.assert_outcomes(passed=1)
    assert report(project)["run"]["verdict"] == "inconclusive"
    text = " ".join(result.stdout.str().split())
    assert "pytest's own process, which --vram-device=cpu does not count, held" in text
    assert 'scope="process"' in text
    assert "nothing was seen that counts" in text


def test_memory_of_pytest_itself_can_be_judged(project: pytest.Pytester, inner: Inner) -> None:
    """scope="process" holds the limit against the test's own process."""
    project.makepyfile(
        """
        from pytest_vram import max_vram

        @max_vram("200MB", scope="process")
        def test_large():
            block = bytearray(300_000_000)
            block[::4096] = b"x" * len(block[::4096])

        @max_vram("1GB", scope="process")
        def test_small(): pass
        """
    )
    inner("--vram-device=cpu").assert_outcomes(failed=1, passed=1)


def test_an_undecided_test_says_why_in_every_mode(project: pytest.Pytester, inner: Inner) -> None:
    """With -q, by default and with -v the name and the reason are on the terminal."""
    project.makepyfile("from pytest_vram import max_vram\n\n@max_vram('1GB', phase='nosuch')\ndef test_open(): pass\n")
    for arguments in (["-q"], [], ["-v"]):
        text = " ".join(inner("--vram-device=cpu", *arguments).stdout.str().split())
        assert "test_open" in text
        assert "phase 'nosuch' did not occur in this window" in text


def test_the_closest_marker_holds(project: pytest.Pytester, inner: Inner) -> None:
    """A marker of the test takes the place of its class's and its module's; limits of other scopes stay."""
    project.makepyfile(
        """
        import pytest
        from children import child
        from pytest_vram import max_vram

        pytestmark = max_vram("50MB")

        @max_vram("100MB")
        class TestAll:
            @max_vram("1GB")
            def test_own(self): child(200)

            def test_of_the_class(self): child(70)

            @max_vram("10MB", scope="backend")
            def test_other_scope(self): child(200)

        def test_of_the_module(): child(70)
        """
    )
    result = inner("--vram-device=cpu", "--vram-report=out.json")
    outcomes = {test["nodeid"].rpartition("::")[2]: test for test in report(project)["tests"]}
    assert outcomes["test_own"]["outcome"] == "passed"
    assert outcomes["test_of_the_class"]["outcome"] == "passed"
    assert outcomes["test_other_scope"]["outcome"] == "failed"
    assert "100MB" in outcomes["test_other_scope"]["findings"][0]["text"]
    assert outcomes["test_of_the_module"]["outcome"] == "failed"
    assert result.ret == 1


def test_windows_close_where_no_call_is_made(project: pytest.Pytester, inner: Inner) -> None:
    """With --setup-only there is no call to judge; each test's window is closed before the next one's opens."""
    project.makepyfile("def test_a(vram): pass\n\ndef test_b(vram): pass\n")
    result = inner("--vram-device=cpu", "--vram-budget=1GB", "--setup-only")
    assert result.ret == 0
    (path,) = (project.path / ".vram" / "runs").glob("*/journal.jsonl")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    events = [line["event"] for line in lines if line["kind"] == "window" and line["what"] == "test"]
    assert events == ["open", "close", "open", "close"]
