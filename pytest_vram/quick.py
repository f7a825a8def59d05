"""Short tests that ask for nothing share one window, so that each of them costs next to nothing.

A window costs two round trips to the keeper. Tests without a marker or fixture of this package that follow each other
share one: it is opened before the first of them, and closed as soon as it is two sampling intervals old, or before a
test that has a window of its own. A test that lasts an interval or longer closes it at its own end, before its report
is made, and so is judged as ever; so does every test of a process in which torch uses CUDA, whose allocator knows peaks
that no sample sees, but not when they were. Where several tests shared a window that broke a limit,
:mod:`pytest_vram.blame` says which of them it can have been; for those whose reports are out already, another follows.
"""

from __future__ import annotations

import contextlib
import os
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from pytest_vram.blame import Blamed, Location, Outside, Quick, blamed, everyone
from pytest_vram.checks.finding import Finding
from pytest_vram.errors import KeeperError, KeeperLost, KeeperUnavailable
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
#: Intervals after which a shared window is closed. A window costs as much as 20 of its tests, and the times over the
#: budget tell them apart in a longer one as well.
_DUE = 2
#: Intervals after which that is done also where that has to wait for a keeper that is behind.
_OLDEST = 20
#: Node id, outcome, seconds, attempt, reason, and whether the findings are about this test.
Row = tuple[str, Outcome, float, int, str | None, bool]


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
    :ivar begins: times over the budget for which some test answers (``begin`` of the keeper's
        :class:`~pytest_vram.keeper.messages.Over`). :ivar outside: those at which no test of the window ran.
    """

    record: TestRecord
    tests: list[Row]
    late: list[Late] = []
    begins: list[int] = []
    outside: list[Outside] = []

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
    """A window that short tests share. ``opened`` says when, and ``ahead`` is the keeper's word that it is open.

    :ivar closing: the keeper's word on what it saw; ``closed`` is that word, with ``trouble`` where there is none.
    :ivar judgement: on what its tests did; ``as_found`` the same with what tests of the window before may have left,
        which may be their own.
    """

    def __init__(self, opened: int, ahead: Promise) -> None:
        self.opened = opened
        self.ahead = ahead
        self.tests: list[Quick] = []
        self.allocators: list[Allocator] = []
        self.closing: Promise | None = None
        self.closed: Closed | None = None
        self.trouble: str | None = None
        self.judgement: Judgement | None = None
        self.as_found: Judgement | None = None


class Shared:
    """The window that short tests share, in one pytest process.

    :param interval: nanoseconds after which it is closed. :param clock: monotonic nanoseconds.
    :ivar pending: batches that no report has carried yet. :ivar serial: whether some test of the run wants to be alone.
    """

    def __init__(self, run: Run, interval: int, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self.run = run
        self.interval = interval
        self.pending: list[Batch] = []
        self._clock = clock
        self._window: _Window | None = None
        self._before: _Window | None = None
        #: Its limit was broken, and the window after it may tell more.
        self._held: _Window | None = None
        #: Of the window judged last: its tests, its name and when it was closed.
        self._recent: list[Quick] = []
        self._last = ("", 0)
        self._gate: Gate | None = None
        self._whole = False
        self.serial: Callable[[], bool] = lambda: False

    # ------------------------------------------------------------ gate

    def enter(self, *, judged: bool) -> bool:
        """Let a test begin without asking the keeper; false where it must wait there.

        :param judged: whether the test has a window, so that there is a keeper in any case.
        :raises KeeperUnavailable: there is none, and none can be started.
        """
        if judged and not self._whole and self._wants_whole():
            return False  # the keeper waits until no other run has the device, and keeps it
        if self._gate is None:
            place = self._place(judged)
            if place is None:
                return True
            from pytest_vram.leases import Gate  # needs record locks, which not every platform has

            self._gate = Gate(place[0], self.run.identity.id, os.getpid(), place[1])
        return self._gate.enter()

    def _wants_whole(self) -> bool:
        """Whether a device does not say who holds what, so that the run must have it for itself; asked once."""
        self._whole = True
        return self.run.settings.leases and not all(one.per_process for one in self.run.keeper().welcome.devices)

    def _place(self, judged: bool) -> tuple[Path, list[str]] | None:
        """Folder of the gates and keys of the devices; ``None`` where nobody can have a device alone."""
        run = self.run
        devices = [device.key for device in run.measurable]
        if not devices and not self.serial():
            return None
        if judged or run.connected or not devices:
            try:
                welcome = run.keeper().welcome
            except KeeperUnavailable:
                if judged:
                    raise
                return None  # whoever wants to be alone hears of it
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
        """Whether the shared window is old enough, and the keeper has time for the next one.

        A busy machine is no reason to wait for it after each test; but no window grows older than a few intervals.
        """
        if self._window is None:
            return False
        age = self._clock() - self._window.opened
        return age >= self.interval * _DUE and (age >= self.interval * _OLDEST or self.run.caught_up())

    def lasted(self, test: Quick) -> bool:
        """Whether a test lasted an interval or longer, so that its own report must carry its verdict."""
        return test.end is not None and test.end - test.start >= self.interval

    def is_alone(self, test: Quick) -> bool:
        """Whether the window must be closed at the end of this test, before its report is made."""
        return self.lasted(test) or self.run.torch.in_use

    def begin(self, attempt: Attempt, nodeid: str, location: Location) -> Quick:
        """A test begins; opens a window where there is none.

        :raises KeeperError: when no window can be opened.
        """
        if self._window is not None and self.run.torch.in_use:
            self.close(unheard=True)
        elif self.is_due():
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
            ahead: Promise | None = None
            try:
                (ahead,) = self.run.ahead(request)
                self.run.result(ahead)
            except KeeperLost:
                if not again:
                    raise
                continue
            except BaseException:  # of a signal handler: nobody would know of the window
                if ahead is not None:
                    ahead.client.abandon(ahead.number)
                raise
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
            window.trouble = str(error)
            self._learn(window)
            self._settle(window, None, None)
            return
        self._before, self._window = window, _Window(self._clock(), ahead)

    def close(self, present: Quick | None = None, *, name: str = "", unheard: bool = False) -> Judgement | None:
        """Close the window and judge it: every test of it but ``present`` is dealt with.

        :param present: the test whose report is being made. :param name: what the window is about, where that is known.
        :param unheard: torch came into use after the last test: what it knows is of no test of the window.
        :returns: the judgement on ``present``; ``None`` where it is not among the tests of the window.
        """
        window, self._window = self._window, None
        self._catch_up()
        if window is None:
            held, self._held = self._held, None
            return self._settle(held, None, present) if held is not None else None
        window.allocators = [] if unheard else self.run.torch.end(self.run.measurable)
        try:
            (window.closing,) = self.run.ahead(self._closing(window, name))
        except KeeperError as error:
            window.trouble = str(error)
        self._learn(window)
        held, self._held = self._held, None
        earlier = self._settle(held, window, present) if held is not None else None
        mine = self._settle(window, None, present)
        if mine is None or earlier is None or mine.findings:
            return mine
        return msgspec.structs.replace(
            mine,
            findings=earlier.findings,
            record=msgspec.structs.replace(mine.record, findings=earlier.findings),
        )

    def _closing(self, window: _Window, name: str = "") -> Close:
        """What closes a window, which is called after the test that lasted, else after all of them.

        :raises KeeperError: it was never opened.
        """
        opened = self.run.result(window.ahead)
        assert isinstance(opened, Opened)
        tests = window.tests
        return Close(
            window=opened.window,
            name=name or self._named(window),
            record={"tests": {test.attempt.key: test.outcome for test in tests if test.end is not None}},
        )

    def _named(self, window: _Window) -> str:
        """What a window is called once it is closed: after the test that lasted, else after all of them."""
        tests = window.tests
        named = [test for test in tests if len(tests) == 1 or self.lasted(test)]
        if named or not tests:
            return named[-1].attempt.key if named else ""
        return f"one of {len(tests)} short tests from {tests[0].attempt.key} to {tests[-1].attempt.key}"

    def _catch_up(self) -> None:
        """Judge the window before, whose figures are there by now.

        Where its limit was broken that waits for the window after it: whose memory it was may be seen there only.
        """
        window, self._before = self._before, None
        if window is None:
            return
        self._learn(window)
        held, self._held = self._held, None
        if held is not None:
            self._settle(held, window, None)
        assert window.judgement is not None
        if window.judgement.findings and window.closed is not None:
            self._held = window
        else:
            self._settle(window, None, None)

    def _learn(self, window: _Window) -> None:
        """Take in what the keeper saw of a window that is closed."""
        if window.closing is not None:
            try:
                answer = self.run.result(window.closing)
                assert isinstance(answer, Closed)
                window.closed = answer
            except KeeperError as error:
                window.trouble = str(error)
        closed = window.closed
        name, until = self._last
        window.judgement = self._judge(window, closed)
        if closed is None:
            return
        self._last = (self._named(window), closed.t1)
        # Seen when a test of this window had begun already, it may be that test's own, and is no leftover.
        others = [one for one in closed.residues if one.test != name]
        if window.tests and window.tests[0].start < until and len(others) < len(closed.residues):
            window.as_found = window.judgement
            window.judgement = self._judge(window, msgspec.structs.replace(closed, residues=others))

    def _judge(self, window: _Window, closed: Closed | None) -> Judgement:
        tests = window.tests
        outline = Attempt(tests[0].attempt.key if tests else "", Plan(), 1)
        outline.trouble, outline.allocators = window.trouble, window.allocators
        try:
            return judge(self.run, outline, closed, seconds=0.0, outcome="passed")
        except Exception as error:  # noqa: BLE001 - the results of the other tests must not be lost for a defect here
            return broken(self.run, outline, error, seconds=0.0, outcome="passed")

    # ------------------------------------------------------------ verdicts

    def _settle(self, window: _Window, following: _Window | None, present: Quick | None) -> Judgement | None:
        """Give every test of a window its verdict, and those of the next one that it saw.

        :returns: the judgement on ``present``, whose report is being made, where that is among them.
        """
        assert window.judgement is not None
        tests, judgement = window.tests, window.judgement
        after = following.tests if following is not None else []
        whom = everyone([])
        if judgement.findings and tests:
            whom = blamed(
                judgement.findings,
                window.closed,
                tests,
                before=self._recent,
                after=after,
                following=following.closed if following is not None else None,
            )
        self._recent = tests
        verdicts = self._verdicts(window, whom, len(tests) + len([test for test in after if test in whom.sure]))
        record = msgspec.structs.replace(judgement.record, findings=[])
        if len(tests) > 1:
            record = msgspec.structs.replace(record, peak=_shared_by(record.peak, len(tests)))
        late: list[Late] = []
        rows: list[tuple[Quick, list[Finding]]] = []
        mine: Judgement | None = None
        for test in [*tests, *(test for test in after if test in verdicts)]:
            about = verdicts.get(test)
            findings = about.findings if about is not None else test.findings
            if test is present:
                own = msgspec.structs.replace(
                    record,
                    nodeid=test.attempt.key,
                    attempt=test.attempt.number,
                    seconds=test.seconds,
                    findings=findings,
                    outcome=test.outcome,
                )
                mine = Judgement(record=own, findings=findings, backends=[])
                continue
            if test.end is None:  # interrupted: it never became anything
                continue
            if about is not None and about.verdict is not None and test.outcome == "passed" and not test.told:
                told = self._late(test, about, about.verdict)
                late.append(told)
                test.outcome, test.reason, test.told = told.category, told.text.splitlines()[0][:300], True
                test.findings = findings
                self.run.note(
                    "test",
                    nodeid=test.attempt.key,
                    outcome=test.outcome,
                    earlier="passed",
                    attempt=test.attempt.number,
                    worker=self.run.worker,
                )
            if test in tests:
                rows.append((test, findings))
        self.pending.extend(_batches(record, rows, late, whom))
        return mine

    def _verdicts(self, window: _Window, whom: Blamed, count: int) -> Mapping[Quick, Judgement]:
        """The judgement on each test that is blamed, with words on why it is."""
        assert window.judgement is not None
        now = self._clock()
        verdicts: dict[Quick, Judgement] = {}
        for found, sure in ((whom.sure, True), (whom.unsure, False)):
            if found:
                judgement = window.judgement
                if count > 1 or not sure:
                    judgement = _explained(judgement, _which(found, count, now, sure), sure)
                verdicts.update(dict.fromkeys(found, judgement))
        verdicts.update(dict.fromkeys(whom.victims, window.as_found or window.judgement))
        return verdicts

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


def _batches(
    record: TestRecord, rows: Sequence[tuple[Quick, list[Finding]]], late: list[Late], whom: Blamed
) -> list[Batch]:
    """The records of one window's tests: in one batch, but for those with findings of another kind."""
    kinds: list[list[Finding]] = []
    for _, findings in rows:
        if findings and not any(findings is kind for kind in kinds):
            kinds.append(findings)
    made: list[Batch] = []
    for kind in kinds or [[]]:
        first = not made
        batch = Batch(
            record=msgspec.structs.replace(record, findings=kind),
            tests=[_row(test, findings) for test, findings in rows if findings is kind or (first and not findings)],
            late=late if first else [],
            begins=whom.begins if first else [],
            outside=whom.outside if first else [],
        )
        if batch.tests or batch.late or batch.begins or batch.outside:
            made.append(batch)
    return made


def _row(test: Quick, findings: list[Finding]) -> Row:
    seconds = round(test.seconds, 6)
    return test.attempt.key, test.outcome, seconds, test.attempt.number, test.reason, bool(findings)


def _shared_by(peaks: dict[str, Measured], count: int) -> dict[str, Measured]:
    note = f"shared by {count} tests that ran within a few sampling intervals"
    return {
        label: msgspec.structs.replace(peak, note="; ".join(filter(None, (peak.note, note))))
        if isinstance(peak, Reading)
        else peak
        for label, peak in peaks.items()
    }


def _which(found: list[Quick], count: int, now: int, sure: bool) -> str:
    begin = min(test.start for test in found)
    end = max(now if test.end is None else test.end for test in found)
    names = ", ".join(test.nodeid for test in found[:5]) + (f" and {len(found) - 5} more" if len(found) > 5 else "")
    within = f"which ran within {(end - begin) / 1e6:.1f} ms"
    how = "--vram-interval=1 or a max_vram marker gives each its own window"
    if not sure:
        which = f"one of these {len(found)} tests, {within}" if len(found) > 1 else "this test"
        return (
            f"The peak was seen when {which}, was over, before another began: {names}. It may be of the test, freed in"
            f" its teardown, or of the teardown alone; {how}."
        )
    if len(found) == 1:
        return f"It was {names}, one of {count} short tests that shared a window."
    return f"It was one of these {len(found)} tests, {within}: {names}. To tell them apart: {how}."


def _explained(judgement: Judgement, text: str, sure: bool) -> Judgement:
    findings: list[Finding] = []
    lines = textwrap.fill(text, 80, break_long_words=False, break_on_hyphens=False)
    for finding in judgement.findings:
        changed = msgspec.structs.replace(finding, text=f"{finding.text}\n{lines}")
        if not sure and finding.verdict == "failed":
            changed = msgspec.structs.replace(changed, verdict="inconclusive")
        findings.append(changed)
    return msgspec.structs.replace(judgement, findings=findings)
