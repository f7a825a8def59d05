"""What users of pytest's other options and plugins expect."""

from __future__ import annotations

import json

import pytest

from tests.conftest import Inner, plain
from tests.plugin.test_budget import CHILD, PROJECT


@pytest.fixture
def project(pytester: pytest.Pytester) -> pytest.Pytester:
    """A project whose tests can start a child that holds memory."""
    pytester.path.joinpath("child.py").write_text(CHILD)
    pytester.path.joinpath("children.py").write_text(PROJECT)
    pytester.makeini("[pytest]\npythonpath = .\n")
    return pytester


def test_collect_only_starts_nothing(project: pytest.Pytester, inner: Inner) -> None:
    """No keeper, no run folder, no server; and a budget that could not be held is no obstacle to listing."""
    project.makepyfile("def test_it(vram_backend): pass\n")
    for device in ("cpu", "vulkan:0"):
        result = inner("--collect-only", "-q", "--vram-budget=1GB", f"--vram-device={device}")
        assert result.ret == 0
        result.stdout.fnmatch_lines(["*::test_it"])
    assert not (project.path / ".vram").exists()


def test_each_attempt_of_a_rerun_is_judged_by_itself(project: pytest.Pytester, inner: Inner) -> None:
    """A first attempt over the budget and a second within it: rerun, then passed; both are in the report."""
    pytest.importorskip("pytest_rerunfailures")
    project.makepyfile(
        """
        import pathlib
        from children import child

        def test_it():
            seen = pathlib.Path(__file__).parent / "seen"
            first = not seen.exists()
            seen.touch()
            child(300 if first else 30)
        """
    )
    result = inner("--vram-budget=200MB", "--vram-device=cpu", "--vram-report=out.json", "--reruns=1")
    assert result.ret == 0
    result.stdout.fnmatch_lines(["*1 passed*1 rerun*"])
    tests = json.loads((project.path / "out.json").read_text())["tests"]
    assert [(test["attempt"], test["outcome"]) for test in tests] == [(1, "failed"), (2, "passed")]
    assert json.loads((project.path / "out.json").read_text())["run"]["verdict"] == "passed"
    assert tests[0]["peak"]["host"]["bytes"] > 300e6
    assert tests[1]["peak"]["host"]["bytes"] < 100e6


def test_a_timeout_of_pytest_timeout_is_an_ordinary_failure(project: pytest.Pytester, inner: Inner) -> None:
    """The test that was cut off fails, the next one is judged as usual."""
    pytest.importorskip("pytest_timeout")
    project.makepyfile(
        """
        import time
        from children import child

        def test_slow(): time.sleep(60)
        def test_next(): child(300)
        """
    )
    result = inner("--vram-budget=200MB", "--vram-device=cpu", "--timeout=1", "-o", "timeout_method=signal")
    result.assert_outcomes(failed=2)
    result.stdout.fnmatch_lines(["*Timeout*", "*200MB*"])


@pytest.mark.parametrize(
    ("mark", "outcome"),
    [
        ("xfail", "xfailed"),
        ("xfail(strict=True)", "xfailed"),
        ("xfail(raises=KeyError)", "failed"),
        ("xfail(strict=True, raises=KeyError)", "failed"),
    ],
)
def test_a_limit_may_be_the_expected_failure(project: pytest.Pytester, inner: Inner, mark: str, outcome: str) -> None:
    """A passing body over its limit is the expected failure, strict or not, unless other exceptions are expected."""
    project.makepyfile(
        f"""
        import pytest
        from children import child

        @pytest.mark.{mark}
        def test_it(): child(200)
        """
    )
    inner("--vram-budget=100MB", "--vram-device=cpu").assert_outcomes(**{outcome: 1})


def test_a_forked_copy_leaves_the_run_alone(project: pytest.Pytester, inner: Inner) -> None:
    """A child that a test forked and that ends like a pytest of its own neither ends the keeper nor reports."""
    project.makepyfile(
        """
        import os, sys

        def test_forks(vram):
            pid = os.fork()
            if pid == 0:
                sys.exit(0)
            assert os.waitpid(pid, 0)

        def test_after(vram):
            assert vram.now()
        """
    )
    result = inner("--vram-budget=1GB", "--vram-device=cpu")
    assert result.ret == 0
    result.stdout.fnmatch_lines(["verdict     *: 2 passed; *", "*2 passed in*"])
    assert "the keeper of this run died" not in result.stdout.str()


@pytest.mark.parametrize(
    "call", ["vram.phase(5).__enter__()", "vram.idle(settle=float('nan'))", "vram.idle(settle='x')"]
)
def test_a_wrong_argument_of_the_meter_is_its_own_error(project: pytest.Pytester, inner: Inner, call: str) -> None:
    """The message names the call, and the keeper goes on."""
    project.makepyfile(f"def test_it(vram):\n    {call}\n\ndef test_next(vram): assert vram.now()\n")
    result = inner("--vram-device=cpu", "--vram-budget=1GB")
    result.assert_outcomes(failed=1, passed=1)
    result.stdout.fnmatch_lines(["*BadInput: vram.*"])
    assert "died" not in result.stdout.str()


def test_a_defect_of_ours_does_not_lose_the_results(project: pytest.Pytester, inner: Inner) -> None:
    """When judging itself breaks, that test is an error that says so, and the others are reported as usual."""
    project.makepyfile(
        """
        import pytest_vram.judging

        def test_breaks(vram):
            from pytest_vram import activity
            def boom(*args, **kwargs): raise ZeroDivisionError("on purpose")
            activity.judge, kept = boom, activity.judge
            test_breaks.kept = kept

        def test_next(vram):
            from pytest_vram import activity
            activity.judge = test_breaks.kept
        """
    )
    result = inner("--vram-device=cpu", "--vram-budget=1GB")
    assert result.ret == 1
    result.assert_outcomes(errors=1, passed=1)
    result.stdout.fnmatch_lines(["*could not be judged: ZeroDivisionError: on purpose*defect of pytest-vram*"])


def test_junit_tells_inconclusive_from_passed(project: pytest.Pytester, inner: Inner) -> None:
    """An inconclusive test is skipped with its reason in JUnit's file, a failed one failed with the peak."""
    project.makepyfile(
        """
        from children import child
        from pytest_vram import max_vram

        @max_vram("100MB", phase="never")
        def test_open(): pass

        @max_vram("100MB")
        def test_large(): child(200)
        """
    )
    inner("--vram-device=cpu", "--junitxml=junit.xml")
    text = (project.path / "junit.xml").read_text()
    assert 'skipped="1"' in text
    assert 'failures="1"' in text
    assert "inconclusive" in text


def test_inconclusive_fails_where_missing_fails(project: pytest.Pytester, inner: Inner) -> None:
    """--vram-missing=fail makes an undecided check a failure."""
    project.makepyfile("from pytest_vram import max_vram\n\n@max_vram('100MB', phase='never')\ndef test_open(): pass\n")
    inner("--vram-device=cpu", "--vram-missing=fail").assert_outcomes(failed=1)


def test_a_test_may_say_that_it_cannot_decide(project: pytest.Pytester, inner: Inner) -> None:
    """`pytest_vram.inconclusive` gives the same letter and count as a check of the plugin's own."""
    project.makepyfile(
        """
        import pytest_vram

        def test_open(): pytest_vram.inconclusive("not enough turns")
        """
    )
    result = inner("--vram-budget=1GB", "--vram-device=cpu", "--vram-report=out.json", "-v")
    result.stdout.fnmatch_lines(["*test_open INCONCLUSIVE*", "*1 inconclusive*"])
    (test,) = json.loads((project.path / "out.json").read_text())["tests"]
    assert test["outcome"] == "inconclusive"
    assert "not enough turns" in test["reason"]
    inner("--vram-budget=1GB", "--vram-device=cpu", "--vram-missing=fail").assert_outcomes(failed=1)


def test_reports_are_written_whole_or_not_at_all(project: pytest.Pytester, inner: Inner) -> None:
    """A report path that cannot be written is said in one line and makes the run a usage error."""
    project.makepyfile("def test_it(): pass\n")
    project.path.joinpath("file").touch()
    result = inner("--vram-budget=1GB", "--vram-device=cpu", "--vram-report=file/out.json")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stdout.fnmatch_lines(["WARNING*"])
    assert "file/out.json" in "".join(line.strip() for line in result.stdout.lines)


def test_the_newest_ten_and_all_failed_runs_are_kept(project: pytest.Pytester, inner: Inner) -> None:
    """Older passed run folders go; failed ones stay."""
    runs = project.path / ".vram" / "runs"
    runs.mkdir(parents=True)
    for index in range(14):
        folder = runs / f"20200101T0000{index:02d}Z-abc{index:03d}"
        folder.mkdir()
        verdict = "failed" if index == 3 else "passed"
        (folder / "run.json").write_text(json.dumps({"exitstatus": int(index == 3), "run": {"verdict": verdict}}))
    project.makepyfile("from children import child\n\ndef test_it(): child(20)\n")
    inner("--vram-budget=1GB", "--vram-device=cpu").assert_outcomes(passed=1)
    kept = sorted(folder.name for folder in runs.iterdir())
    assert len(kept) == 11
    assert any("abc003" in name for name in kept)
    assert (project.path / ".vram" / ".gitignore").read_text() == "*\n"


def test_a_crashed_worker_leaves_an_error_in_the_report(project: pytest.Pytester, inner: Inner) -> None:
    """The test that took its worker down is an error of the report, and the others are there as well."""
    pytest.importorskip("xdist")
    project.makepyfile("import os\n\ndef test_dies(): os._exit(3)\n\ndef test_lives(): pass\n")
    result = inner("--vram-budget=1GB", "--vram-device=cpu", "--vram-report=out.json", "-n1")
    assert result.ret == 1
    table = json.loads((project.path / "out.json").read_text())
    outcomes = {test["nodeid"].rpartition("::")[2]: test["outcome"] for test in table["tests"]}
    assert outcomes == {"test_dies": "error", "test_lives": "passed"}
    assert table["run"]["verdict"] == "failed"


def test_a_backend_that_is_not_there_is_an_error_though_no_fixture_wants_it(
    project: pytest.Pytester, inner: Inner
) -> None:
    """`vram_backend("nope")` never passes in silence."""
    project.makepyfile("from pytest_vram import vram_backend\n\n@vram_backend('nope')\ndef test_it(): pass\n")
    result = inner("--vram-device=cpu")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*@vram_backend: 'nope' is not a backend of the config file*"])


def test_a_report_through_a_link_leaves_the_link(project: pytest.Pytester, inner: Inner) -> None:
    """The file that a link names is written; what is no file is refused."""
    project.makepyfile("def test_it(): pass\n")
    (project.path / "link.json").symlink_to("real.json")
    inner("--vram-budget=1GB", "--vram-device=cpu", "--vram-report=link.json")
    assert (project.path / "link.json").is_symlink()
    assert json.loads((project.path / "real.json").read_text())["format"] == "pytest-vram/report/1"


@pytest.mark.parametrize("workers", ["-n0", "-n2"])
def test_a_run_folder_that_a_test_removes(pytester: pytest.Pytester, inner: Inner, workers: str) -> None:
    """A test that cleans the project takes the journal with it: the tests are judged all the same, and it is said."""
    pytest.importorskip("xdist")
    pytester.makepyfile(
        """
        import shutil
        from pathlib import Path
        from pytest_vram import max_vram

        @max_vram("1GB")
        def test_cleans():
            shutil.rmtree(Path(__file__).parent / ".vram", ignore_errors=True)

        @max_vram("1GB")
        def test_after(): pass
        """
    )
    result = inner(workers, "--vram-device=cpu")
    result.assert_outcomes(passed=2)
    assert "journal.jsonl was removed while the run went on" in " ".join(plain(result.stdout.str()).split())
