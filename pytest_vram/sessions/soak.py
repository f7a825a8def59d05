"""A soak: turn after turn until an amount is reached, each on the disk before the next one is asked.

A turn is committed once its line is there. A soak that is killed goes on behind the last committed turn; the one that
was being asked is asked anew under the same number. A committed turn is never asked again: no outcome is drawn twice.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Protocol

import msgspec

from pytest_vram.checks.idle_series import IdleVerdict
from pytest_vram.errors import BackendError, KeeperError
from pytest_vram.sessions.soak_gates import (
    COLLAPSED,
    LEAST_TURNS,
    RECENT,
    WARM_UP,
    Gates,
    SoakVerdict,
    idle_of,
    judge,
)
from pytest_vram.sessions.soak_journal import (
    KEPT,
    DiskTrouble,
    EndLine,
    LossLine,
    SegmentLine,
    SessionLine,
    SoakJournal,
    TurnLine,
    now,
)
from pytest_vram.sessions.soak_lines import StructuredLog, Value, duration, left_of, live_line
from pytest_vram.sessions.soak_series import Series
from pytest_vram.sessions.turns import Turn
from pytest_vram.spec import Amount

#: Why a soak ends.
REASONS = {
    "amount": "all of it was run",
    "budget": "a peak was over the limit",
    "leak": "idle memory leaks",
    "throughput": "the decode rate has collapsed",
    "server": "one turn had no answer, however often the server was asked",
    "silent": "no turn was answered any more",
    "disk": "the journal could not be written",
    "trouble": "nothing could be measured any more",
    "interrupted": "it was interrupted",
}
#: Those after which it does not go on: what was found stays found.
FINAL = KEPT
#: Times that a server may be lost in one turn.
MOST_LOSSES = 3
#: Turns in a row without an answer, or with nothing in it, after which no more are asked: one that hangs takes
#: `request_timeout` for each.
MOST_SILENT = 5
#: Turns between two looks at the trend; of a long soak this share of it.
LOOK, LOOK_SHARE = 10, 0.05
#: Of a look that may stop a soak: there are many of them, and one alone must hardly ever be wrong.
LOOK_P_VALUE = 0.001


class Began(msgspec.Struct, frozen=True, kw_only=True):
    """A server that is ready to be asked. :ivar build: what it calls itself."""

    engine: str = ""
    model: str | None = None
    pid: int | None = None
    build: str | None = None
    context: int | None = None


class Talker(Protocol):
    """Asks turns of a server; :class:`pytest_vram.soaking.SessionTalker` is one."""

    def begin(self, number: int, segment: int) -> Began:
        """Have the server run, warm it up, and stand before the turn with this number.

        :raises BackendError: it does not start.
        """

    def take(self) -> Turn:
        """Take the next turn; a lost server is its ``result``."""

    def fate(self) -> bool:
        """Whether the server that was lost ran out of memory, as its log has it."""


class End(msgspec.Struct, frozen=True, kw_only=True):
    """How a soak ended. :ivar reason: one of :data:`REASONS`."""

    reason: str
    text: str

    @property
    def unfinished(self) -> str:
        """Why not all of it was run; "": it was, or what stopped it is a verdict."""
        return "" if self.reason in ("amount", *FINAL) else self.text


class Soak:
    """One process's part of a soak.

    :param series: the turns that are committed already, folded in.
    :param told: is given a line for each turn. :param log: the structured log.
    :param clock: seconds that rise; injected in tests.
    """

    def __init__(
        self,
        journal: SoakJournal,
        talker: Talker,
        series: Series,
        gates: Gates,
        amount: Amount,
        *,
        told: Callable[[str], None] = lambda line: None,
        log: StructuredLog | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.journal = journal
        self.series = series
        self.gates = gates
        self.amount = amount
        self._talker = talker
        self._told = told
        self._log = log
        self._clock = clock
        self._began = clock()
        self._before = journal.contents.spent
        self._verdict: IdleVerdict | None = None
        self._look_at = 0
        self._suspected = ""
        self._serving = False
        self._losses = 0
        #: Turns in a row that this process asked in vain.
        self._unanswered = 0

    # ------------------------------------------------------------ the whole

    @property
    def going_on(self) -> str:
        """What is left to do of a soak that was begun before."""
        end = self.journal.contents.end
        if end is not None and end.reason in FINAL:
            return f"nothing is left to do: {end.text}"
        if self._reached():
            return "nothing is left to do: a larger amount makes it longer"
        return "going on behind them"

    def run(self) -> End:
        """Ask turn after turn, until something ends it; what was committed is kept, whatever that is."""
        contents = self.journal.contents
        found = contents.end if contents.end is not None and contents.end.reason in FINAL else None
        try:
            reached = found is not None or self._reached()
            if contents.torn or not reached:
                began = SessionLine(pid=os.getpid(), amount=self.amount.text, at=now(), dropped=contents.torn)
                self.journal.commit(began)
            if contents.torn:
                after = "" if reached else f": turn {contents.turns + 1} is asked anew"
                self._told(f"a line of {contents.torn} bytes without its end was dropped from the journal{after}")
            if found is not None:  # it stays the last word
                if contents.torn:
                    self.journal.commit(EndLine(reason=found.reason, text=found.text, at=now()))
                return End(reason=found.reason, text=found.text)
            if reached:  # nothing is asked, so nothing is begun
                return self._ended("amount", quiet=contents.end is not None)
            reason = ""
            while not reason:
                reason = self._turn() or self._enough()
            return self._ended(reason)
        except DiskTrouble as error:
            return End(reason="disk", text=f"the soak stopped, since {REASONS['disk']}: {error}")
        except KeyboardInterrupt:
            return self._ended("interrupted")

    def verdict(self, end: End) -> SoakVerdict:
        """What it showed."""
        return judge(self.series, self.gates, self.journal.contents.losses, unfinished=end.unfinished)

    def _ended(self, reason: str, *, quiet: bool = False) -> End:
        # The time of the last committed turn, which is what the next process goes on from.
        done = f"{self.series.turns:,} turn{'s' if self.series.turns != 1 else ''}"
        spent = duration(self.series.spent)
        text = f"{REASONS[reason]}, after {done} and {spent}"
        if reason == "amount":
            text = f"{REASONS[reason]}: {done} in {spent}"
        end = End(reason=reason, text=text)
        if not quiet:
            try:
                self.journal.commit(EndLine(reason=reason, text=text, at=now()))
            except DiskTrouble as error:
                if reason != "amount":
                    return End(reason="disk", text=f"{text}; and {REASONS['disk']}: {error}")
                self._told(f"all of it was run, and its end {REASONS['disk'].partition(' ')[2]}: {error}")
        return end

    # ------------------------------------------------------------ one turn

    def _turn(self) -> str:
        """Ask one turn; the reason to stop, or "" to go on."""
        number = self.journal.contents.turns + 1
        try:
            if not self._serving:
                self._begin(number)
            turn = self._talker.take()
        except KeeperError as error:
            self._told(f"turn {number}: {error}")
            return "trouble"
        except BackendError as error:
            return self._lost(number, str(error), warm_up=not self._serving)
        if turn.result == "lost":
            return self._lost(number, turn.error or "the server was lost")
        turn = msgspec.structs.replace(turn, number=number, segment=self.journal.contents.segment)
        spent = self._spent()
        self.journal.commit(TurnLine(turn=turn, spent=spent))
        self._losses = 0
        self.series.add(turn, spent)
        self._unanswered = self._unanswered + 1 if turn.unanswered is not None else 0
        self._look()
        left = left_of(turn, self.gates.limit)
        if self._log is not None:
            self._log.turn(turn, self._verdict, left)
        shown = self.amount.turns if self.amount.turns is not None else self.amount.text
        name = self.journal.manifest.name
        self._told(live_line(name, turn, self.series, self._verdict, left, str(shown), duration(self._eta())))
        return ""

    def _begin(self, number: int) -> None:
        """Have a server; it is a segment of its own once it serves."""
        contents = self.journal.contents
        segment = contents.segment + 1
        self._told(f"warming up with the longest prompt before turn {number}")
        began = self._talker.begin(number, segment)
        why = "start" if segment == 1 else "died" if self._losses else "resumed"
        at = now()
        self.journal.commit(
            SegmentLine(segment=segment, first=number, why=why, pid=began.pid, build=began.build, at=at)
        )
        self._serving = True
        if self._log is not None:
            fields: dict[str, Value] = {
                "segment": segment,
                "turn": number,
                "why": why,
                "engine": began.engine,
                "model": began.model,
                "build": began.build,
                "pid": began.pid,
                "context": began.context,
            }
            self._log.write("brain.model", at, fields)

    def _lost(self, number: int, error: str, *, warm_up: bool = False) -> str:
        self._serving = False
        self._losses += 1
        memory = self._talker.fate()
        segment = self.journal.contents.segment
        loss = LossLine(number=number, segment=segment, error=error, memory=memory, warm_up=warm_up, at=now())
        self.journal.commit(loss)
        self._told(f"{loss.place}: {error}")
        return "server" if memory or self._losses >= MOST_LOSSES else ""

    # ------------------------------------------------------------ when it is enough

    def _enough(self) -> str:
        if self.series.breach is not None:
            return "budget"
        if self._suspected.endswith("!"):
            return self._suspected.rstrip("!")
        if self._reached():
            return "amount"
        return "silent" if self._unanswered >= MOST_SILENT else ""

    def _reached(self) -> bool:
        if self.amount.turns is not None:
            return self.series.turns >= self.amount.turns
        return self.amount.seconds is not None and self._spent() >= self.amount.seconds

    def _spent(self) -> float:
        return round(self._before + self._clock() - self._began, 3)

    def _eta(self) -> float | None:
        """Seconds that are left."""
        if self.amount.turns is None:
            return (self.amount.seconds or 0.0) - self._spent()
        each = self.series.turn_seconds()
        return None if each is None else each * (self.amount.turns - self.series.turns)

    def _look(self) -> None:
        """Look at the trend now and then; a leak or a collapse that two looks see in turn stops the soak."""
        turns = self.series.turns
        if turns < self._look_at:
            return
        self._look_at = turns + max(LOOK, int(turns * LOOK_SHARE))
        verdicts = idle_of(self.series, self.gates, p_value=LOOK_P_VALUE)
        self._verdict = next(iter(verdicts.values()), None)
        if turns < LEAST_TURNS:
            return
        recent = self.series.recent_retention(WARM_UP, max(RECENT, self.series.period))
        seen = ""
        if any(one.kind == "leak" for one in verdicts.values()):
            seen = "leak"
        elif recent is not None and recent.high < COLLAPSED:
            seen = "throughput"
        self._suspected = f"{seen}!" if seen and self._suspected.rstrip("!") == seen else seen
