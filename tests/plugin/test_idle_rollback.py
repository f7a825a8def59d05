"""``@idle_rollback`` and ``vram_session`` in a user's tests, against backends that hold memory for real."""

from __future__ import annotations

import itertools
import xml.etree.ElementTree as ElementTree

import pytest

from pytest_vram.sessions import load
from pytest_vram.testing.scripted import Fault, Script
from pytest_vram.units import MIB
from tests.conftest import Inner
from tests.plugin.session_kit import project, records


def test_idle_memory_that_stays_fails_the_test_once(pytester: pytest.Pytester, inner: Inner) -> None:
    """A server that keeps memory fails the test at its teardown, once; its boot is no growth, one that gives the memory
    back passes, and so does what the fixtures' finalisers free; a test that failed before gets no second failure."""
    project(pytester.path, {"leaky": Script(hold=80 * MIB), "late": Script(hold=80 * MIB, hold_idle=0.4)})
    pytester.makepyfile(
        """
        import mmap
        import subprocess, sys
        import pytest
        from pytest_vram import idle_rollback, vram_backend

        HOLD = "x = bytearray(100 << 20); x[::4096] = b'x' * len(x[::4096]); print('held', flush=True); input()"

        @pytest.fixture
        def child():
            process = subprocess.Popen([sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            process.stdout.readline()
            yield process
            process.communicate(b"\\n")

        @idle_rollback(settle=0.4)
        def test_leaks(vram_client):
            vram_client.chat("hello", max_tokens=4)

        @idle_rollback("100MiB", settle=1)
        def test_within_its_tolerance(vram_client):
            vram_client.chat("hello", max_tokens=4)

        @idle_rollback(settle=1)
        def test_failed_before(vram_client):
            vram_client.chat("hello", max_tokens=4)
            assert not "failed by itself"

        @pytest.mark.xfail(strict=True)
        @idle_rollback(settle=1)
        def test_expected_to_fail(vram_client):
            vram_client.chat("hello", max_tokens=4)
            assert False

        @idle_rollback()
        @vram_backend("late")
        def test_comes_back(vram_client):
            vram_client.chat("hello", max_tokens=4)

        @idle_rollback()
        def test_freed_by_a_finaliser(child):
            pass
        """
    )
    result = inner("--vram-device=cpu", "--vram-report=report.json", "--junitxml=junit.xml", "-rA", "-W", "error")
    result.assert_outcomes(passed=3, failed=2, xfailed=1)
    result.stdout.fnmatch_lines(
        [
            "*Idle memory on host grew by *MiB, more than the tolerance of 64.00 MiB.*",
            "*backend leaky on host: *MiB before, *MiB after*",
        ]
    )
    found = records(pytester.path)
    assert found["test_leaks"]["outcome"] == "failed"
    (finding,) = found["test_leaks"]["findings"]
    assert finding["check"] == "idle_rollback"
    assert finding["limit_from"] == "@idle_rollback('64MiB')"
    idle = found["test_leaks"]["idle"]
    grew = idle["after"]["host"]["bytes"] - idle["before"]["host"]["bytes"]
    assert 79 * MIB < grew < 100 * MIB
    assert found["test_comes_back"]["outcome"] == "passed"
    assert found["test_comes_back"]["idle"]["before"]["host"]["kind"] == "reading"
    assert found["test_failed_before"]["outcome"] == "failed"
    assert not found["test_failed_before"]["findings"]
    suite = ElementTree.parse(pytester.path / "junit.xml").getroot()[0]
    assert suite.get("tests") == "6"


def test_idle_memory_that_cannot_be_judged_never_passes(pytester: pytest.Pytester) -> None:
    """Where nothing is measured the test is skipped loudly, and with ``--vram-missing=fail`` fails; an estimate is no
    measurement; memory that never rests is inconclusive."""
    project(pytester.path, {"steady": Script()})
    pytester.makepyfile(
        """
        from pytest_vram import idle_rollback, max_vram

        @idle_rollback()
        def test_it(): pass
        """
    )
    for device in ("vulkan:0", "predicted"):
        # Nothing is started where nothing is measured, so that no process of its own is needed.
        result = pytester.runpytest_inprocess("-Werror", "-p", "no:cacheprovider", f"--vram-device={device}", "-rs")
        result.assert_outcomes(skipped=1)
        result.stdout.fnmatch_lines(["*SKIPPED*not measured:*"])
    result = pytester.runpytest_inprocess(
        "-Werror", "-p", "no:cacheprovider", "--vram-device=vulkan:0", "--vram-missing=fail"
    )
    result.assert_outcomes(failed=1)


@pytest.mark.parametrize(("missing", "outcome"), [("skip", "inconclusive"), ("fail", "failed")])
def test_memory_that_never_rests_is_undecided(
    pytester: pytest.Pytester, inner: Inner, missing: str, outcome: str
) -> None:
    """A process that goes on growing after the test gives no idle memory: undecided, or a failure where that is
    wished."""
    pytester.makepyfile(
        """
        import subprocess, sys
        import pytest
        from pytest_vram import idle_rollback

        GROW = '''
        import time
        held = []
        while len(held) < 400:
            held.append(bytearray(b"x" * (2 << 20)))
            time.sleep(0.02)
        '''

        @pytest.fixture(scope="session")
        def grower():
            started = []
            yield started
            for process in started:
                process.kill()
                process.wait()

        @idle_rollback("900MiB", settle=0.3)
        def test_moving(grower):
            grower.append(subprocess.Popen([sys.executable, "-c", GROW.replace("\\n        ", "\\n")]))

        def test_last(grower): pass
        """
    )
    result = inner("--vram-device=cpu", f"--vram-missing={missing}", "--vram-report=report.json", "-rA")
    found = records(pytester.path)["test_moving"]
    assert found["outcome"] == outcome
    assert "still moving" in found["findings"][0]["text"]
    result.stdout.fnmatch_lines([f"*1 {outcome}*"])


def test_wrong_arguments_are_errors_of_that_test(pytester: pytest.Pytester, inner: Inner) -> None:
    """Tolerance and wait are checked before anything starts."""
    pytester.makepyfile(
        """
        import pytest
        from pytest_vram import idle_rollback

        @pytest.mark.parametrize("one", [
            pytest.param(1, marks=idle_rollback("64m")),
            pytest.param(2, marks=idle_rollback(settle=0)),
            pytest.param(3, marks=idle_rollback(settle="5s")),
            pytest.param(4, marks=idle_rollback(wait=5)),
        ])
        def test_it(one): pass
        """
    )
    result = inner("-rE")
    result.assert_outcomes(errors=4)
    result.stdout.fnmatch_lines(["*@idle_rollback: tolerance: `64m` is ambiguous*", "*settle=0 is not a number*"])
    assert not (pytester.path / ".vram").exists()


def test_a_session_stands_in_the_report_turn_by_turn(pytester: pytest.Pytester, inner: Inner) -> None:
    """Each turn has tokens, peak, idle memory and its calls judged; a failing test shows the table; a warm-up moves the
    baseline; a restart begins a segment; a server that is lost is an error of the test."""
    conversation = load("cron-check")
    project(
        pytester.path,
        {
            "agent": Script(hold=2 * MIB, tokens_per_second=2000.0),
            "dying": Script(faults=[Fault(kind="dies", requests=[2])]),
        },
        conversation,
    )
    pytester.makepyfile(
        """
        import pytest
        from pytest_vram import idle_rollback, vram_backend

        @idle_rollback("20MiB", settle=1)
        def test_cycle(vram_session):
            session = vram_session("cron-check", settle=0.5)
            session.warm_up()
            session.run()
            session.restart()
            turn = session.turn()
            assert turn.cycle == 2 and turn.phase == 0 and turn.segment == 2 and turn.events == ["restarted"]
            assert [one.calls_right for one in session] == [1, 1, 1, 1, 1, 0, 1]
            assert session.turns[1].tokens_in > session.turns[0].tokens_in
            assert session.turns[6].tokens_in == session.turns[0].tokens_in

        def test_shows_its_turns(vram_session):
            session = vram_session(["cron-check"])
            session.run(2)
            assert session.turns[1].calls_right == 0

        def test_unknown(vram_session):
            vram_session("cron-chek")

        @vram_backend("dying")
        def test_lost(vram_session):
            vram_session().run()
        """
    )
    result = inner("--vram-device=cpu", "--vram-report=report.json", "-rA")
    result.assert_outcomes(passed=1, failed=2, errors=1)
    result.stdout.fnmatch_lines(
        [
            "*vram: turns*",
            " turn     in   cap   out      peak      idle    time  tok/s  calls*",
            "    1 * 1/1*",
            "*conversation='cron-chek' is neither a file nor one of this package (did you mean 'cron-check'?)*",
        ]
    )
    found = records(pytester.path)
    turns = found["test_cycle"]["turns"]
    assert [turn["number"] for turn in turns] == [1, 2, 3, 4, 5, 6, 7]
    idle = [turn["idle"]["host"]["bytes"] for turn in turns]
    # Two requests of 2 MiB a turn, one where an answer is all that is asked.
    assert all(1.5 * MIB < later - earlier < 6 * MIB for earlier, later in itertools.pairwise(idle[:6]))
    assert all(turn["peak"]["host"]["kind"] == "reading" for turn in turns)
    assert found["test_lost"]["outcome"] == "error"
    assert found["test_lost"]["turns"][-1]["result"] == "lost"


def test_workers_and_reruns_judge_each_attempt(pytester: pytest.Pytester, inner: Inner) -> None:
    """With xdist what other workers hold is not the test's, and verdicts travel; of reruns each attempt is judged by
    itself."""
    pytester.makepyfile(
        """
        import subprocess, sys, time
        import pytest
        from pytest_vram import idle_rollback

        HOLD = "x = bytearray({} << 20); x[::4096] = b'x' * len(x[::4096]); print('held', flush=True); input()"
        started = []  # each ends with this process, whose pipe it waits for

        def hold(amount):
            process = subprocess.Popen(
                [sys.executable, "-c", HOLD.format(amount)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
            process.stdout.readline()
            started.append(process)

        @pytest.mark.xdist_group("one")
        @idle_rollback(settle=0.3)
        def test_leaks():
            hold(100)

        @pytest.mark.xdist_group("one")
        @idle_rollback(settle=0.3)
        def test_leaks_once(request):
            if request.node.execution_count == 1:
                hold(100)

        @pytest.mark.xdist_group("two")
        @idle_rollback(settle=0.3)
        @pytest.mark.parametrize("number", range(3))
        def test_beside(number):
            time.sleep(0.2)
        """
    )
    arguments = ("-n", "2", "--dist=loadgroup", "--reruns=1", "--vram-report=report.json", "-rA")
    result = inner("--vram-device=cpu", *arguments)
    # Of the test that leaks at each attempt the second has the first one's memory in its baseline.
    result.stdout.fnmatch_lines(["*the tests' own processes on host: 1*MiB before, 2*MiB after*"])
    outcomes = result.parseoutcomes()
    assert {name: outcomes.get(name) for name in ("passed", "failed", "rerun")} == {
        "passed": 4,
        "failed": 1,
        "rerun": 2,
    }
    assert {name: test["outcome"] for name, test in records(pytester.path).items()} == {
        "test_leaks": "failed",
        "test_leaks_once": "passed",
        **{f"test_beside[{number}]": "passed" for number in range(3)},
    }
