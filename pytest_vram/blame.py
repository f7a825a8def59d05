"""Whom a broken limit is laid at where several short tests shared a window, by the times at which they ran.

A window is closed a moment after its last test, when the first tests of the next one may have begun, so what it saw may
be theirs. The keeper tells when the budget was broken: from the read before to the first read that was over it, and on
to the last. A test that ran then is a suspect. One that was over before the first such read can only have left its
memory behind; where that memory went away while one later test ran, it was that test's own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from pytest_vram.checks.finding import Finding
from pytest_vram.keeper.messages import Closed, Over
from pytest_vram.readings import Reading
from pytest_vram.report.records import Outcome
from pytest_vram.run import Attempt

Location = tuple[str, int | None, str]
_GRAVEST = ("error", "failed", "inconclusive")


class Quick:
    """One test of a shared window. Times are monotonic nanoseconds; ``end`` is ``None`` while it runs.

    :ivar told: a verdict on it was given already, after its own report, with these ``findings``.
    """

    __slots__ = ("attempt", "end", "findings", "location", "nodeid", "outcome", "reason", "seconds", "start", "told")

    def __init__(self, attempt: Attempt, nodeid: str, location: Location, start: int) -> None:
        self.attempt = attempt
        self.nodeid = nodeid
        self.location = location
        self.start = start
        self.end: int | None = None
        self.outcome: Outcome = "passed"
        self.seconds = 0.0
        self.reason: str | None = None
        self.told = False
        self.findings: list[Finding] = []

    def ran(self, since: int, until: int) -> bool:
        """Whether it ran at some time after ``since`` and not after ``until``."""
        return self.start <= until and (self.end is None or self.end > since)


class Outside(NamedTuple):
    """The budget was broken while no test ran: when (the keeper's ``begin`` of it), after and before which tests."""

    begin: int
    after: str
    before: str


class Blamed(NamedTuple):
    """Whom the findings on one window are about.

    :ivar sure: it was one of these. :ivar unsure: it may have been one of these, or none.
    :ivar victims: they met what earlier tests, not of their window, had left. :ivar begins: times that ``sure`` and
        ``victims`` account for. :ivar outside: times when no test ran.
    """

    sure: list[Quick]
    unsure: list[Quick]
    victims: list[Quick]
    begins: list[int]
    outside: list[Outside]


def everyone(tests: Sequence[Quick], closed: Closed | None = None) -> Blamed:
    """Nobody is let off."""
    return Blamed(list(tests), [], [], [over.begin for over in closed.over] if closed is not None else [], [])


def blamed(
    findings: Sequence[Finding],
    closed: Closed | None,
    tests: Sequence[Quick],
    *,
    before: Sequence[Quick] = (),
    after: Sequence[Quick] = (),
    following: Closed | None = None,
) -> Blamed:
    """Whom these findings on a window are about.

    :param closed: what the window saw; ``None`` where nothing is known. :param tests: those of the window.
    :param before: tests of the window before. :param after: tests of the next one, whose figures are ``following``.
    """
    if closed is None:
        return everyone(tests)
    gravest = next(verdict for verdict in _GRAVEST if any(one.verdict == verdict for one in findings))
    moved = {(over.device, over.begin): over for over in (following.over if following is not None else ())}
    # What the next window saw as well is judged there where it is about tests of that one.
    neighbours = [*tests, *after]
    sure: dict[Quick, None] = {}
    unsure: dict[Quick, None] = {}
    victims: dict[Quick, None] = {}
    begins: list[int] = []
    outside: list[Outside] = []
    for finding in findings:
        if finding.verdict != gravest:
            continue
        label, figure, limit = finding.device or "", finding.measured, finding.limit
        if limit is None or not isinstance(figure, Reading) or figure.bytes <= limit:
            return everyone(tests, closed)
        raw = closed.run.get(label)
        if isinstance(raw, Reading) and raw.bytes <= limit:
            # Torch's allocator knows of it, and is asked at the end of each test that it is loaded in.
            sure[tests[-1]] = None
            continue
        own = closed.own.get(label)
        if isinstance(own, Reading) and own.upper == 0:
            continue  # all of it is of tests of other workers, whose own windows saw it as well
        overs = [over for over in closed.over if over.device == label and over.limit == limit]
        if not overs:
            moment = closed.peak_at.get(label)
            if moment is None:
                return everyone(tests, closed)
            found = [test for test in neighbours if test.ran(moment.since, moment.at)]
            # Between two tests: a lower peak during one of them would not show.
            (sure if found else unsure).update(dict.fromkeys(found or tests))
            continue
        for over in overs:
            last = moved.get((label, over.begin), over)
            here, maybe = suspects(last, [*before, *neighbours])
            mine = [test for test in here if test in tests or (test in after and (label, over.begin) not in moved)]
            met = [
                test for test in tests if test not in here and test.start > last.at and test.ran(over.begin, last.last)
            ]
            if here:
                (unsure if maybe else sure).update(dict.fromkeys(mine))
                if any(test in before for test in here):
                    victims.update(dict.fromkeys(met))
            else:
                sure.update(dict.fromkeys(met))
            if (here and not maybe) or met:
                begins.append(over.begin)
            else:
                outside.append(_between(over, [*before, *neighbours]))
    kept = {} if sure or victims else unsure
    return Blamed(list(sure), list(kept), [test for test in victims if test not in sure], begins, outside)


def suspects(over: Over, tests: Iterable[Quick]) -> tuple[list[Quick], bool]:
    """Tests that may have broken the budget at this time, and whether it may have been none of them."""
    tests = list(tests)
    early = [test for test in tests if test.ran(over.since, over.at)]
    if over.until is None or any(over.at < test.start <= over.last for test in tests):
        return early, False  # it is there still, or was while others ran: who left it is one of them
    live = [test for test in early if test.ran(over.begin, over.at)]
    if not live:
        return early, True  # seen after they had ended: a teardown's, or what their teardown freed
    return (live if len(live) == 1 else early), False


def _between(over: Over, tests: Sequence[Quick]) -> Outside:
    """Where a time lies among tests that did not run then."""
    ended = [test for test in tests if test.end is not None and test.end <= over.begin]
    begun = [test for test in tests if test.start >= over.begin]
    first = min(begun, key=lambda test: test.start, default=None)
    last = max(ended, key=lambda test: test.end or 0, default=None)
    return Outside(
        over.begin, last.attempt.key if last is not None else over.after, first.attempt.key if first else over.before
    )
