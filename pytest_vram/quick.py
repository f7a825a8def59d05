"""Short tests that ask for nothing share one window, so that each of them costs next to nothing.

A window costs two round trips to the keeper. Tests without a marker or fixture of this package that follow each other
share one: it is opened before the first of them, and closed as soon as it is one sampling interval old, or before a
test that has a window of its own. A test that lasts an interval or longer closes it at its own end, before its report
is made, and so is judged as ever. Where several tests shared a window that broke a limit, the time of its peak says
which of them it can have been; for those whose reports are out already, another report follows.
"""

from __future__ import annotations

import contextlib
import os
import textwrap
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from pytest_vram.checks.finding import Finding
from pytest_vram.errors import KeeperError, KeeperLost
from pytest_vram.judging import Judgement, broken, judge
from pytest_vram.keeper import Promise
from pytest_vram.keeper.messages import Close, Closed, Open, Opened
from pytest_vram.measure.torch_memory import Allocator
from pytest_vram.outcomes import INCONCLUSIVE
from pytest_vram.readings import Measured, Reading
from pytest_vram.report.records import Outcome, TestRecord
from pytest_vram.run import Attempt, Plan, Run

if TYPE_CHECKING:
    from pytest_vram.leases import Gate

#: Folder in the run's own, of its gates where runs do not share any (:mod:`pytest_vram.keeper.meeting`).
OWN_GATES = "leases"
#: Intervals after which a shared window is closed also where that has to wait for a keeper that is behind.
_OLDEST = 20
_GRAVEST = ("error", "failed", "inconclusive")
Location = tuple[str, int | None, str]


class Quick:
    """One test of a shared window. Times are monotonic nanoseconds; ``end`` is ``None`` while it runs."""

    __slots__ = ("attempt", "end", "location", "nodeid", "outcome", "reason", "seconds", "start")

    def __init__(self, attempt: Attempt, nodeid: str, location: Location, start: int) -> None:
        self.attempt = attempt
        self.nodeid = nodeid
        self.location = location
        self.start = start
        self.end: int | None = None
        self.outcome: Outcome = "passed"
        self.seconds = 0.0
        self.reason: str | None = None


class Late(msgspec.Struct, frozen=True, kw_only=True):
    """A verdict on a test whose report is out already.

    :ivar nodeid: as pytest has it. :ivar location: file, line and name. :ivar category: what the test became.
    """

    nodeid: str
    location: Location
    category: Outcome
    text: str
    sections: list[tuple[str, str]] = []


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """Records of the tests of one shared window, in little space, for the collector.

    :ivar record: what they have in common. :ivar tests: what differs: node id, outcome, seconds, attempt, reason, and
        whether the findings are about this one. :ivar late: verdicts that could not go into reports of their own.
    """

    record: TestRecord
    tests: list[tuple[str, Outcome, float, int, str | None, bool]]
    late: list[Late] = []

    def records(self) -> list[TestRecord]:
        """One record for each test."""
        return [
            msgspec.structs.replace(
                self.record,
                nodeid=nodeid,
                outcome=outcome,
                seconds=seconds,
                attempt=attempt,
                reason=reason,
                findings=self.record.findings if meant else [],
            )
            for nodeid, outcome, seconds, attempt, reason, meant in self.tests
        ]


class _Window:
    """A window that short tests share. ``opened`` says when, and ``ahead`` is the keeper's word that it is open."""

    def __init__(self, opened: int, ahead: Promise) -> None:
        self.opened = opened
        self.ahead = ahead
        self.tests: list[Quick] = []
        self.allocators: list[Allocator] = []
        self.closing: Promise | None = None


class Shared:
    """The window that short tests share, in one pytest process.

    :param interval: nanoseconds after which it is closed. :param clock: monotonic nanoseconds.
    :ivar pending: batches that no report has carried yet.
    """

    def __init__(self, run: Run, interval: int, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self.run = run
        self.interval = interval
        self.pending: list[Batch] = []
        self._clock = clock
        self._window: _Window | None = None
        self._before: _Window | None = None
        self._gate: Gate | None = None

    # ------------------------------------------------------------ gate

    def enter(self, *, judged: bool) -> bool:
        """Let a test begin without asking the keeper; false where it must wait there.

        :param judged: whether the test has a window, so that there is a keeper in any case.
        :raises KeeperUnavailable: there is none, and none can be started.
        """
        if self._gate is None:
            place = self._place(judged)
            if place is None:
                return True
            from pytest_vram.leases import Gate  # needs record locks, which not every platform has

            self._gate = Gate(place[0], self.run.identity.id, os.getpid(), place[1])
        return self._gate.enter()

    def _place(self, judged: bool) -> tuple[Path, list[str]] | None:
        """Folder of the gates and keys of the devices; ``None`` where nobody can have a device alone."""
        run = self.run
        devices = [device.key for device in run.measurable]
        if not devices:
            return None
        if judged or run.connected:
            welcome = run.keeper().welcome
            return Path(welcome.lease_folder or os.devnull), welcome.lease_devices
        if run.settings.leases:
            from pytest_vram.leases import BoardTrouble, shared_folder

            with contextlib.suppress(BoardTrouble):  # the keeper, once there is one, says so in the report
                return shared_folder(), devices
        own = Path(run.identity.folder, OWN_GATES)
        return (own, devices) if own.exists() else None

    def leave(self) -> None:
        """The test that entered is over, or goes on with a window of its own."""
        if self._gate is not None:
            self._gate.leave()

    def give_up(self) -> None:
        """No test will enter any more."""
        if self._gate is not None:
            self._gate.close()
            self._gate = None

    # ------------------------------------------------------------ tests

    def is_due(self) -> bool:
        """Whether the shared window is an interval old, and the keeper has time for the next one.

        A busy machine is no reason to wait for it after each test; but no window grows older than a few intervals.
        """
        if self._window is None:
            return False
        age = self._clock() - self._window.opened
        return age >= self.interval and (age >= self.interval * _OLDEST or self.run.caught_up())

    def lasted(self, test: Quick) -> bool:
        """Whether a test lasted an interval or longer, so that its own report must carry its verdict."""
        return test.end is not None and test.end - test.start >= self.interval

    def begin(self, attempt: Attempt, nodeid: str, location: Location) -> Quick:
        """A test begins; opens a window where there is none.

        :raises KeeperError: when no window can be opened.
        """
        if self.is_due():
            self.turn_over(attempt.key)
        if self._window is None:
            self._open(attempt.key)
        assert self._window is not None
        test = Quick(attempt, nodeid, location, self._clock())
        self._window.tests.append(test)
        return test

    def _open(self, name: str) -> None:
        """Open a window, and wait until it is: a keeper that died before this is replaced."""
        request = Open(kind="test", name=name, quick=True)
        for again in (True, False):
            try:
                (ahead,) = self.run.ahead(request)
                self.run.result(ahead)
            except KeeperLost:
                if not again:
                    raise
                continue
            self.run.torch.begin()
            self._window = _Window(self._clock(), ahead)
            return

    def end(self, test: Quick, outcome: Outcome, seconds: float, reason: str | None) -> None:
        """Its set-up and call are over."""
        test.end = self._clock()
        test.outcome, test.seconds, test.reason = outcome, seconds, reason

    def turn_over(self, name: str) -> None:
        """Close the window and open the next one without waiting for the keeper, which judges in time for the next.

        A round trip takes as long as some tests do. What the keeper has seen is looked at when the next window is
        closed; until then no test is held up.

        :param name: of the test that comes next.
        """
        window = self._window
        if window is None:
            return
        self._catch_up()
        self._window = None
        window.allocators = self.run.torch.end(self.run.measurable)
        self.run.torch.begin()
        try:
            following = Open(kind="test", name=name, quick=True)
            window.closing, ahead = self.run.ahead(self._closing(window), following)
        except KeeperError as error:
            self._judge(window, None, str(error), None)
            return
        self._before, self._window = window, _Window(self._clock(), ahead)

    def close(self, present: Quick | None = None, *, name: str = "") -> Judgement | None:
        """Close the window and judge it: every test of it but ``present`` is dealt with.

        :param present: the test whose report is being made. :param name: what the window is about, where that is known.
        :returns: the judgement on ``present``; ``None`` where it is not among the tests of the window.
        """
        window = self._window
        self._catch_up()
        if window is None:
            return None
        self._window = None
        window.allocators = self.run.torch.end(self.run.measurable)
        try:
            (window.closing,) = self.run.ahead(self._closing(window, name))
        except KeeperError as error:
            return self._judge(window, None, str(error), present)
        return self._finish(window, present, [])

    def _closing(self, window: _Window, name: str = "") -> Close:
        """What closes a window, which is called after the test that lasted, else after all of them.

        :raises KeeperError: it was never opened.
        """
        opened = self.run.result(window.ahead)
        assert isinstance(opened, Opened)
        tests = window.tests
        named = [test for test in tests if len(tests) == 1 or self.lasted(test)]
        name = name or (named[-1].attempt.key if named else "")
        if tests and not name:
            name = f"one of {len(tests)} short tests from {tests[0].attempt.key} to {tests[-1].attempt.key}"
        return Close(
            window=opened.window,
            name=name,
            record={"tests": {test.attempt.key: test.outcome for test in tests if test.end is not None}},
        )

    def _catch_up(self) -> None:
        """Judge the window before, whose figures are there by now."""
        if self._before is not None:
            window, self._before = self._before, None
            self._finish(window, None, self._window.tests if self._window is not None else [])

    def _finish(self, window: _Window, present: Quick | None, later: list[Quick]) -> Judgement | None:
        assert window.closing is not None
        try:
            closed = self.run.result(window.closing)
        except KeeperError as error:
            return self._judge(window, None, str(error), present)
        assert isinstance(closed, Closed)
        # It was closed a moment after the tests of the next one had begun.
        also = [test for test in later if test.start < closed.t1]
        return self._judge(window, closed, None, present, also)

    def _judge(
        self,
        window: _Window,
        closed: Closed | None,
        trouble: str | None,
        present: Quick | None,
        also: Sequence[Quick] = (),
    ) -> Judgement | None:
        tests = window.tests
        outline = Attempt(tests[0].attempt.key if tests else "", Plan(), 1)
        outline.trouble, outline.allocators = trouble, window.allocators
        try:
            judgement = judge(self.run, outline, closed, seconds=0.0, outcome="passed")
        except Exception as error:  # noqa: BLE001 - the results of the other tests must not be lost for a defect here
            judgement = broken(self.run, outline, error, seconds=0.0, outcome="passed")
        return self._share_out(tests, judgement, closed, present, also)

    # ------------------------------------------------------------ verdicts

    def _share_out(
        self,
        tests: list[Quick],
        judgement: Judgement,
        closed: Closed | None,
        present: Quick | None,
        also: Sequence[Quick],
    ) -> Judgement | None:
        now = self._clock()
        record = judgement.record
        if len(tests) > 1:
            record = msgspec.structs.replace(record, peak=_shared_by(record.peak, len(tests)))
        meant: set[Quick] = set()
        if judgement.findings and tests:
            suspects, sure = _suspects(judgement, closed, [*tests, *also], now)
            meant = set(suspects)
            if len(tests) + len(also) > 1:
                text = _which(suspects, len(tests) + len(also), now, sure)
                judgement = _explained(judgement, text, sure)
            record = msgspec.structs.replace(record, findings=judgement.findings)
        verdict = judgement.verdict
        late: list[Late] = []
        rows: list[tuple[str, Outcome, float, int, str | None, bool]] = []
        mine: Judgement | None = None
        for test in tests:
            outcome, reason = test.outcome, test.reason
            if test is present:
                own = msgspec.structs.replace(
                    record, nodeid=test.attempt.key, attempt=test.attempt.number, seconds=test.seconds
                )
                findings = judgement.findings if test in meant else []
                own = msgspec.structs.replace(own, findings=findings, outcome=outcome)
                mine = Judgement(record=own, findings=findings, backends=[])
                continue
            if test.end is None:  # interrupted: it never became anything
                continue
            if test in meant and outcome == "passed" and verdict is not None:
                told = self._late(test, judgement, verdict)
                late.append(told)
                outcome, reason = told.category, told.text.splitlines()[0][:300]
            rows.append((test.attempt.key, outcome, round(test.seconds, 6), test.attempt.number, reason, test in meant))
        for test in also:
            if test in meant and test.outcome == "passed" and verdict is not None:
                told = self._late(test, judgement, verdict)
                late.append(told)
                test.outcome, test.reason = told.category, told.text.splitlines()[0][:300]
        if rows or late:
            self.pending.append(Batch(record=record, tests=rows, late=late))
        return mine

    def _late(self, test: Quick, judgement: Judgement, verdict: str) -> Late:
        strict = verdict == "inconclusive" and self.run.settings.missing == "fail"
        first = next(finding for finding in judgement.findings if finding.verdict == verdict)
        category: Outcome = "failed" if strict or verdict == "failed" else "error"
        if verdict == "inconclusive" and not strict:
            category = "inconclusive"
        return Late(
            nodeid=test.nodeid,
            location=test.location,
            category=category,
            text=(INCONCLUSIVE if verdict == "inconclusive" else "") + first.text,
            sections=[(f"vram: {other.section}", other.text) for other in judgement.findings if other is not first],
        )


def _shared_by(peaks: dict[str, Measured], count: int) -> dict[str, Measured]:
    note = f"shared by {count} tests that ran within one sampling interval"
    return {
        label: msgspec.structs.replace(peak, note="; ".join(filter(None, (peak.note, note))))
        if isinstance(peak, Reading)
        else peak
        for label, peak in peaks.items()
    }


def _suspects(judgement: Judgement, closed: Closed | None, tests: list[Quick], now: int) -> tuple[list[Quick], bool]:
    """The tests that the findings may be about, and whether it was certainly one of them.

    Only for a lower end over its limit is it known when it was reached; everything else is about all of them.
    """
    if closed is None:
        return tests, True
    gravest = next(verdict for verdict in _GRAVEST if any(f.verdict == verdict for f in judgement.findings))
    found: set[Quick] = set()
    for finding in judgement.findings:
        if finding.verdict != gravest:
            continue
        moment = closed.peak_at.get(finding.device or "")
        figure = finding.measured
        broke = finding.limit is not None and isinstance(figure, Reading) and figure.bytes > finding.limit
        if moment is None or not broke:
            return tests, True
        found.update(
            test for test in tests if test.start <= moment.at and (now if test.end is None else test.end) > moment.since
        )
    if not found:  # between two tests: a lower peak during one of them would not show
        return tests, False
    return [test for test in tests if test in found], True


def _which(suspects: list[Quick], count: int, now: int, sure: bool) -> str:
    begin = min(test.start for test in suspects)
    end = max(now if test.end is None else test.end for test in suspects)
    names = ", ".join(test.nodeid for test in suspects[:5]) + (
        f" and {len(suspects) - 5} more" if len(suspects) > 5 else ""
    )
    within = f"which ran within {(end - begin) / 1e6:.1f} ms"
    how = "--vram-interval=1 or a max_vram marker gives each its own window"
    if not sure:
        return (
            f"The peak fell between two of these {count} tests, {within}, and none of them ran at that moment: {names}."
            f" Whether one of them was over the limit as well is not known; {how}."
        )
    if len(suspects) == 1:
        return f"It was {names}, one of {count} short tests that shared a window."
    return f"It was one of these {len(suspects)} tests, {within}: {names}. To tell them apart: {how}."


def _explained(judgement: Judgement, text: str, sure: bool) -> Judgement:
    findings: list[Finding] = []
    lines = textwrap.fill(text, 80, break_long_words=False, break_on_hyphens=False)
    for finding in judgement.findings:
        changed = msgspec.structs.replace(finding, text=f"{finding.text}\n{lines}")
        if not sure and finding.verdict == "failed":
            changed = msgspec.structs.replace(changed, verdict="inconclusive")
        findings.append(changed)
    return msgspec.structs.replace(judgement, findings=findings)
