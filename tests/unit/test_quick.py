"""Which of several short tests a broken limit is laid at, and what is said to whom."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_vram.blame import Quick
from pytest_vram.errors import KeeperLost
from pytest_vram.keeper.messages import Close, Closed, DeviceInfo, Open, Opened, PeakTime, Stranger, Welcome
from pytest_vram.needs import Plan
from pytest_vram.quick import Batch, Shared
from pytest_vram.readings import Reading, Unmeasurable
from pytest_vram.run import Attempt, Run, new_identity
from pytest_vram.settings import Origin, Settings, resolve
from pytest_vram.specfile import read

MS = 1_000_000


class _Promise:
    def __init__(self, reply: object) -> None:
        self.reply = reply


class FakeRun(Run):
    """A run whose keeper answers from a list."""

    def __init__(self, *replies: Closed | Exception, missing: str = "skip") -> None:
        found = {"budget": "100MB", "device": "cpu", "missing": missing}
        settings: Settings = resolve(
            {name: Origin(value=value, rank="command line", place=f"--vram-{name}") for name, value in found.items()}
        )
        super().__init__(settings, read(None), new_identity(Path.cwd()), role="controller", worker=None)
        self.replies = list(replies)
        self.sent: list[object] = []
        self.prompt = True

    def ahead(self, *requests: object) -> list[Any]:
        self.sent.extend(requests)
        return [_Promise(Opened(window=1, t=0) if isinstance(one, Open) else self.replies.pop(0)) for one in requests]

    def caught_up(self) -> bool:
        return self.prompt

    def result(self, promise: Any) -> Any:
        if isinstance(promise.reply, Exception):
            raise promise.reply
        return promise.reply


def closed(
    low: int, high: int | None = None, at: tuple[int, int] | None = None, t1: int = 10**12, **more: Any
) -> Closed:
    peak = Reading(bytes=low, at_most=high, source="host-hwm", scope="run", device="host", exact=True)
    return Closed(
        t0=0, t1=t1, run={"host": peak}, peak_at={"host": PeakTime(since=at[0], at=at[1])} if at else {}, **more
    )


class Clock:
    def __init__(self) -> None:
        self.now = 0

    def __call__(self) -> int:
        return self.now


def series(
    run: FakeRun, spans: list[tuple[int, int]], clock: Clock, interval: int = 10 * MS
) -> tuple[Shared, list[Quick]]:
    """A window with tests that began and ended at these times."""
    shared = Shared(run, interval, clock)
    tests = []
    for number, (start, end) in enumerate(spans):
        clock.now = start
        key = f"t.py::test_{number}"
        test = shared.begin(Attempt(key, Plan(), 1), key, ("t.py", number, f"test_{number}"))
        clock.now = end
        shared.end(test, "passed", (end - start) / 1e9, None)
        tests.append(test)
    return shared, tests


def outcomes(batches: list[Batch]) -> dict[str, str]:
    return {record.nodeid[-1]: record.outcome for batch in batches for record in batch.records()}


@pytest.mark.parametrize("leases", [True, False])
@pytest.mark.parametrize("per_process", [True, False])
def test_a_card_without_figures_by_process_is_asked_for_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, per_process: bool, leases: bool
) -> None:
    """The first judged test of a process asks the keeper, which waits until the run has such a card for itself."""
    info = DeviceInfo(
        label="gpu0",
        kind="nvml",
        name="card",
        capacity=Unmeasurable(reason="-"),
        source="test",
        per_process=per_process,
    )
    welcome = Welcome(
        pid=1, run="r", folder="", generation=1, devices=[info], lease_folder=str(tmp_path), lease_devices=[info.key]
    )
    run = FakeRun()
    run.settings = msgspec.structs.replace(run.settings, leases=leases)
    monkeypatch.setattr(run, "keeper", lambda: SimpleNamespace(welcome=welcome))
    monkeypatch.setattr(run, "_devices", [info])
    shared = Shared(run, 10 * MS)
    assert shared.enter(judged=False)
    shared.leave()
    assert shared.enter(judged=True) is (per_process or not leases)
    shared.leave()
    assert shared.enter(judged=True)
    shared.give_up()


SPANS = [(0, 2 * MS), (3 * MS, 5 * MS), (6 * MS, 8 * MS), (9 * MS, 9 * MS + 1)]


def test_the_time_of_the_peak_picks_the_test() -> None:
    """A peak that was reached while only the second test ran fails the second test, and the others pass."""
    run = FakeRun(closed(200_000_000, at=(3 * MS, 4 * MS)))
    shared, tests = series(run, SPANS, Clock())
    mine = shared.close(tests[-1])
    assert mine is not None
    assert mine.verdict is None
    (batch,) = shared.pending
    assert outcomes(shared.pending) == {"0": "passed", "1": "failed", "2": "passed"}
    (late,) = batch.late
    assert (late.nodeid, late.category) == ("t.py::test_1", "failed")
    assert "It was t.py::test_1, one of 4 short tests" in " ".join(late.text.split())


def test_a_peak_during_the_present_test_is_in_its_own_report() -> None:
    """The test whose report is being made needs no second one."""
    run = FakeRun(closed(200_000_000, at=(8 * MS, 9 * MS + 1)))
    shared, tests = series(run, SPANS, Clock())
    mine = shared.close(tests[-1])
    assert mine is not None
    assert mine.verdict == "failed"
    assert shared.pending[0].late == []


def test_without_a_time_all_of_them_are_suspects() -> None:
    """Nobody is let off because it is not known when the limit broke."""
    shared, tests = series(FakeRun(closed(200_000_000)), SPANS, Clock())
    mine = shared.close(tests[-1])
    assert mine is not None
    assert mine.verdict == "failed"
    assert [late.category for late in shared.pending[0].late] == ["failed"] * 3
    assert "one of these 4 tests" in shared.pending[0].late[0].text


def test_a_peak_between_two_tests_leaves_all_of_them_undecided() -> None:
    """No test ran when the highest peak was reached; a lower one over the limit may hide behind it."""
    shared, tests = series(FakeRun(closed(200_000_000, at=(5 * MS, 6 * MS - 1))), SPANS, Clock())
    mine = shared.close(tests[-1])
    assert mine is not None
    assert mine.verdict == "inconclusive"
    assert [late.category for late in shared.pending[0].late] == ["inconclusive"] * 3


@pytest.mark.parametrize(("missing", "category"), [("skip", "inconclusive"), ("fail", "failed")])
def test_an_interval_around_the_limit_is_inconclusive_for_all(missing: str, category: str) -> None:
    """When the upper end is over the limit it is not known when; with --vram-missing=fail it fails."""
    run = FakeRun(closed(50_000_000, 200_000_000, at=(3 * MS, 4 * MS)), missing=missing)
    shared, tests = series(run, SPANS, Clock())
    shared.close(tests[-1])
    assert [late.category for late in shared.pending[0].late] == [category] * 3


def test_a_dead_keeper_makes_errors_of_all() -> None:
    """What nobody measured is an error, and never a pass."""
    shared, tests = series(FakeRun(KeeperLost("gone")), SPANS, Clock())
    mine = shared.close(tests[-1])
    assert mine is not None
    assert mine.verdict == "error"
    assert [late.category for late in shared.pending[0].late] == ["error"] * 3


def test_a_decisive_stranger_makes_errors_of_all() -> None:
    """A daemon that grew spoils the judgement on every test of the window."""
    one = Stranger(
        pid=8, name="ollama", device="host", held=1 << 30, grew=1 << 30, decisive=True, why="it is talked to"
    )
    shared, tests = series(FakeRun(closed(1, strangers=[one])), SPANS, Clock())
    shared.close(tests[-1])
    assert [late.category for late in shared.pending[0].late] == ["error"] * 3


def test_an_unmeasured_peak_never_passes() -> None:
    """Missing evidence is inconclusive for each test of the window."""
    figure = Closed(t0=0, t1=1, run={"host": Unmeasurable(reason="unread")})
    shared, tests = series(FakeRun(figure), SPANS, Clock())
    shared.close(tests[-1])
    assert [late.category for late in shared.pending[0].late] == ["inconclusive"] * 3


def test_an_own_failure_is_not_failed_again() -> None:
    """A test that failed by itself keeps its outcome, and the finding stands in its record."""
    shared, tests = series(FakeRun(closed(200_000_000)), SPANS, Clock())
    tests[0].outcome = "failed"
    shared.close(tests[-1])
    (batch,) = shared.pending
    assert "t.py::test_0" not in [late.nodeid for late in batch.late]
    assert batch.records()[0].findings


def test_an_interrupted_test_is_in_no_record() -> None:
    """A test that never ended did not pass."""
    clock = Clock()
    shared, tests = series(FakeRun(closed(1)), SPANS, clock)
    tests[1].end = None
    shared.close()
    assert "1" not in outcomes(shared.pending)


def test_windows_turn_over_without_waiting_and_lose_nobody() -> None:
    """Each window is judged when the next one ends; a test that had begun before it was closed is a suspect too."""
    clock = Clock()
    run = FakeRun(closed(200_000_000, at=(9 * MS, 12 * MS), t1=12 * MS), closed(1))
    shared, _ = series(run, [(0, 2 * MS), (3 * MS, 10 * MS)], clock)
    shared.turn_over("t.py::test_2")
    assert shared.pending == []
    clock.now = 11 * MS
    key = "t.py::test_2"
    test = shared.begin(Attempt(key, Plan(), 1), key, ("t.py", 2, "test_2"))
    clock.now = 13 * MS
    shared.end(test, "passed", 0.002, None)
    shared.close()
    assert outcomes(shared.pending) == {"0": "passed", "1": "failed", "2": "failed"}
    assert sorted(late.nodeid[-1] for batch in shared.pending for late in batch.late) == ["1", "2"]


def test_a_keeper_that_is_behind_holds_up_nobody_for_long() -> None:
    """A window grows past its interval while the keeper is behind, but not for ever."""
    clock = Clock()
    run = FakeRun(closed(1))
    run.prompt = False
    shared, _ = series(run, [(0, MS)], clock)
    clock.now = 50 * MS
    assert not shared.is_due()
    run.prompt = True
    assert shared.is_due()
    run.prompt = False
    clock.now = 500 * MS
    assert shared.is_due()


def test_the_window_is_named_after_the_test_that_lasted() -> None:
    """What a window leaves behind is blamed by its name: that of the long test in it, else of all of them."""
    for spans, name in (
        ([(0, MS), (2 * MS, 40 * MS)], "t.py::test_1"),
        ([(0, MS)], "t.py::test_0"),
        ([(0, MS), (2 * MS, 3 * MS)], "one of 2 short tests from t.py::test_0 to t.py::test_1"),
    ):
        run = FakeRun(closed(1))
        shared, _ = series(run, spans, Clock())
        shared.close()
        (close,) = [request for request in run.sent if isinstance(request, Close)]
        assert close.name == name


@given(
    lengths=st.lists(st.tuples(st.integers(0, MS), st.integers(1, MS)), min_size=1, max_size=8),
    since=st.integers(0, 10 * MS),
    length=st.integers(1, 2 * MS),
)
def test_a_broken_limit_never_passes_everybody(lengths: list[tuple[int, int]], since: int, length: int) -> None:
    """Whenever the peak was reached, some test of the window does not pass; whoever ran then is among them."""
    spans, now = [], 0
    for pause, lasted in lengths:
        spans.append((now + pause, now + pause + lasted))
        now += pause + lasted
    shared, tests = series(FakeRun(closed(200_000_000, at=(since, since + length))), spans, Clock(), interval=10**12)
    mine = shared.close(tests[-1])
    assert mine is not None
    found = outcomes(shared.pending)
    found[str(len(spans) - 1)] = mine.verdict or "passed"
    assert set(found.values()) != {"passed"}
    for number, (start, end) in enumerate(spans):
        if start <= since + length and end > since:
            assert found[str(number)] == "failed"
