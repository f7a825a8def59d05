"""When the run held more than its budget, over its whole length: also where no test's window was open.

A window tells that its limit was broken, and when its peak was reached. Two things need more: tests that share a window
must be told apart, and what a teardown or a fixture of the session does is in no window at all. So each time that the
budget was broken is kept here, from the first read that was over it to the first that was not.
"""

from __future__ import annotations

from collections.abc import Iterable

from pytest_vram.keeper.messages import Over
from pytest_vram.measure import Sums
from pytest_vram.spec import Limits

SUM = "sum"
#: Times that are kept, and that are told in one message; the largest stay.
_MOST, _MOST_TOLD = 400, 50


class _Over:
    """One time; see :class:`~pytest_vram.keeper.messages.Over`."""

    __slots__ = ("after", "at", "before", "begin", "bytes", "device", "judged", "last", "limit", "since", "until")

    def __init__(self, device: str, limit: int, since: int, begin: int, at: int) -> None:
        self.device, self.limit = device, limit
        self.since, self.begin, self.at, self.last = since, begin, at, at
        self.until: int | None = None
        self.bytes = 0
        self.after = self.before = ""
        self.judged = False

    def told(self) -> Over:
        return Over(
            device=self.device,
            limit=self.limit,
            bytes=self.bytes,
            since=self.since,
            begin=self.begin,
            at=self.at,
            last=self.last,
            until=self.until,
            after=self.after,
            before=self.before,
            judged=self.judged,
        )


class Overs:
    """The account of one run.

    :param budget: what it may hold; ``None`` where there is none: then nothing is kept.
    """

    def __init__(self, budget: Limits | None) -> None:
        self.budget = budget
        self._known: list[_Over] = []
        self._on: dict[str, _Over] = {}
        self._read: dict[str, tuple[int, int]] = {}
        self._last_test = ""

    def look(self, found: Iterable[tuple[str, Sums]], now: int, at: int) -> None:
        """Take in one read of all devices, which began at ``now`` and was over at ``at``."""
        if self.budget is None:
            return
        total, whole = 0, True
        for label, sums in found:
            if sums.fault is not None:
                whole = False
                continue
            total += sums.held
            self._take(label, self.budget.of(label), sums.held, sums.top, now, at)
        if self.budget.total is not None and whole:
            self._take(SUM, self.budget.total, total, 0, now, at)

    def _take(self, label: str, limit: int | None, held: int, top: int, now: int, at: int) -> None:
        if limit is None:
            return
        since, mark = self._read.get(label, (now, 0))
        self._read[label] = (now, top)
        one = self._on.get(label)
        # A mark stays as high as it was until it is set back: only one that moved says that it was reached just now.
        if held <= limit and (top <= limit or top == mark):
            if one is not None:
                one.until = at
                del self._on[label]
            return
        if one is None:
            one = self._on[label] = _Over(label, limit, since, now if held > limit else since, at)
            one.after = self._last_test
            self._known.append(one)
            if len(self._known) > _MOST:
                self._shorten()
        one.last = at
        one.bytes = max(one.bytes, held, top)

    def _shorten(self) -> None:
        kept = sorted(self._known, key=lambda one: (one.until is None, not one.judged, one.bytes))[_MOST // 4 :]
        self._known = sorted(kept, key=lambda one: one.since)

    def began(self, test: str, now: int) -> None:
        """The window of a test is open."""
        for one in reversed(self._known):
            if one.before or one.begin > now:
                break
            one.before = test

    def ended(self, test: str, begin: int, end: int, *, judged: bool) -> None:
        """The window of a test is closed.

        :param judged: it was that test's alone, which so is judged by it, or that of a process that is gone, whose
            tests are errors.
        """
        self._last_test = test
        if judged:
            for one in self._known:
                if one.begin <= end and one.last >= begin:
                    one.judged = True

    def within(self, begin: int, end: int) -> list[Over]:
        """Those that a window saw."""
        return [one.told() for one in self._known if one.since < end and one.last >= begin][-_MOST_TOLD:]

    def all(self) -> list[Over]:
        """Those of the whole run, the largest where there were many."""
        return [one.told() for one in self._known]
