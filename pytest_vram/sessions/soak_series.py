"""The turns of a soak as columns of figures: what a verdict needs of 100,000 turns, in some megabytes."""

from __future__ import annotations

import itertools
import math
from array import array
from collections import Counter, deque
from collections.abc import Mapping
from statistics import median
from typing import NamedTuple

import msgspec

from pytest_vram.checks.idle_readings import LEAST
from pytest_vram.readings import Measured, Reading, Unmeasurable, larger
from pytest_vram.sessions.soak_rates import log_error
from pytest_vram.sessions.turns import Turn
from pytest_vram.spec import Limits

#: Rows of the turn table that are kept: the first, the last, the highest peaks, and the first without an answer.
FIRST, LAST, WORST, UNANSWERED = 5, 10, 5, 10
#: Names of defects, of conversations and of reasons that are told apart; others are "other".
MOST_NAMES = 64
#: Quarters of the turns, and of the context's fill.
PARTS = 4
#: In a column of bytes: no reading.
_NONE = -1


class Column:
    """Bytes by turn.

    :ivar reason: of the first turn without a reading. :ivar source: of the others, with ``scope``, ``device``
        and ``exact``.
    """

    def __init__(self, before: int) -> None:
        self.values = array("q", [_NONE]) * before
        self.reason = ""
        self.missing = before
        self.source = ""
        self.scope = ""
        self.device = ""
        self.exact = True

    def add(self, figure: Measured | None) -> None:
        """One more turn; of an interval the upper end, so that growth is not hidden in its width."""
        if isinstance(figure, Reading):
            self.values.append(min(figure.upper, (1 << 63) - 1))
            self.source = self.source or figure.source
            self.scope = self.scope or figure.scope
            self.device = self.device or figure.device
            self.exact = self.exact and figure.exact
            return
        self.values.append(_NONE)
        self.missing += 1
        self.reason = self.reason or (figure.reason if figure is not None else "it was not read")

    def figures(self) -> list[Measured | int]:
        """For :func:`pytest_vram.checks.judge_idle`: bytes, and one object for all turns without.

        What is small enough to be taken for another unit, or for nothing, is a reading of its source.
        """
        hole = Unmeasurable(reason=self.reason or "it was not read")
        small: dict[int, Reading] = {}
        return [self._figure(value, hole, small) for value in self.values]

    def _figure(self, value: int, hole: Unmeasurable, small: dict[int, Reading]) -> Measured | int:
        if value == _NONE:
            return hole
        if value >= LEAST:
            return value
        if value not in small:
            small[value] = Reading(
                bytes=value, source=self.source, scope=self.scope, device=self.device, exact=self.exact
            )
        return small[value]


class Breach(msgspec.Struct, frozen=True, kw_only=True):
    """The first turn over the limit. :ivar device: label, or ``sum``."""

    turn: int
    device: str
    bytes: int
    limit: int


class CallShare(msgspec.Struct, frozen=True, kw_only=True):
    """Right calls of those that were judged. :ivar name: of the part, such as ``turns 1-75`` or ``context 0-25 %``."""

    name: str
    right: int
    judged: int


class Retained(NamedTuple):
    """Decode rate late over early.

    :ivar share: between ``low`` and ``high`` with 98 % confidence, over what else moves this machine's rate.
    :ivar early: tokens/s, and ``late``.
    """

    share: float
    low: float
    high: float
    early: float
    late: float


class Series:
    """Folds turns in, one by one, in the order of their numbers.

    :param period: turns after which the lengths repeat. :param limit: that no peak may be over.
    :param context: tokens that each turn should find served; ``None``: nothing is asked.
    :ivar engine: whose memory it is, for the words alone; "": not known.
    :ivar breach: the first turn over the limit, for certain; ``unclear``: turns whose upper end is.
    :ivar errors: reason → turns whose requests failed; ``nothing``: of those whose answers are empty or cannot be
        read.
    """

    def __init__(self, *, period: int, limit: Limits | None = None, context: int | None = None) -> None:
        self.period = max(1, period)
        self.engine = ""
        self.limit = limit
        self.context = context
        self.turns = 0
        self.spent = 0.0
        self.idle: dict[str, Column] = {}
        self.layers: dict[str, Column] = {}
        self.seconds = array("d")
        self.tokens = array("q")
        self.rates = array("d")
        self.events = array("q")
        self.segments = array("q")
        self.calls = array("q")
        self.right = array("q")
        self.fill = array("d")
        self.peak: dict[str, Measured] = {}
        self.peak_turn: dict[str, int] = {}
        self.unmeasured = 0
        self.unclear = 0
        self.breach: Breach | None = None
        self.host_peak: Measured | None = None
        self.kinds: Counter[str] = Counter()
        self.conversations: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()
        self.nothing: Counter[str] = Counter()
        self.repeated = 0
        self.contexts: Counter[int] = Counter()
        self.truncated = 0
        self.first: list[Turn] = []
        self.last: deque[Turn] = deque(maxlen=LAST)
        self.worst: list[Turn] = []
        self.unanswered: list[Turn] = []
        self._segment: int | None = None
        self._tokens = 0

    def add(self, turn: Turn, spent: float) -> None:
        """One more committed turn."""
        index = self.turns
        self.turns = turn.number
        self.spent = spent
        if turn.segment != self._segment:
            if self._segment is not None:
                self.segments.append(index)
            self._segment = turn.segment
        if turn.events:
            self.events.append(index)
        _columns(self.idle, turn.idle, index)
        _columns(self.layers, turn.layers, index)
        self.seconds.append(spent)
        self._tokens += (turn.tokens_in or 0) + (turn.tokens_out or 0)
        self.tokens.append(self._tokens)
        self.rates.append(_rate(turn.tokens_per_second))
        self._add_calls(turn)
        self._add_peak(turn)
        if turn.host is not None:
            self.host_peak = turn.host if self.host_peak is None else larger([self.host_peak, turn.host])
        if turn.unanswered is not None:
            _count(self.errors if turn.result != "ok" else self.nothing, turn.unanswered)
        _count(self.conversations, turn.conversation)
        if turn.context_size is not None:
            if len(self.contexts) < MOST_NAMES or turn.context_size in self.contexts:
                self.contexts[turn.context_size] += 1
            if self.context is not None and turn.context_size < self.context:
                self.truncated += 1
        self._keep(turn)

    def _add_calls(self, turn: Turn) -> None:
        judged = turn.calls_right is not None and turn.calls is not None and turn.result == "ok"
        self.calls.append(turn.calls if judged and turn.calls is not None else 0)
        self.right.append(turn.calls_right if judged and turn.calls_right is not None else 0)
        full = turn.context / turn.context_size if turn.context is not None and turn.context_size else math.nan
        self.fill.append(full)
        if turn.result != "ok":  # half a turn: what it asked before it broke off is no call of those that are counted
            return
        for kind in turn.kinds:
            _count(self.kinds, kind)
        self.repeated += turn.repeated

    def _add_peak(self, turn: Turn) -> None:
        if not turn.peak:
            self.unmeasured += 1
        for label, figure in turn.peak.items():
            known = self.peak.get(label)
            if isinstance(figure, Unmeasurable):
                self.unmeasured += 1
            before = known.upper if isinstance(known, Reading) else -1
            if isinstance(figure, Reading) and figure.upper > before:
                self.peak_turn[label] = turn.number
            self.peak[label] = figure if known is None else larger([known, figure])
        if self.limit is not None:
            self._hold(turn, self.limit)

    def _hold(self, turn: Turn, limit: Limits) -> None:
        """Hold the peaks of one turn against the limit."""
        readings = {label: one for label, one in turn.peak.items() if isinstance(one, Reading)}
        ends = [(label, one.bytes, one.upper, limit.of(label)) for label, one in readings.items()]
        if limit.total is not None and readings:
            # Devices peak at different times: only the largest of them is held for certain.
            low, high = max(one.bytes for one in readings.values()), sum(one.upper for one in readings.values())
            ends.append(("sum", low if len(readings) > 1 else high, high, limit.total))
        for label, low, high, most in ends:
            if most is None:
                continue
            if low > most:
                self.breach = self.breach or Breach(turn=turn.number, device=label, bytes=low, limit=most)
            elif high > most:
                self.unclear += 1

    def _keep(self, turn: Turn) -> None:
        if turn.unanswered is not None and len(self.unanswered) < UNANSWERED:
            self.unanswered.append(turn)
        if len(self.first) < FIRST:
            self.first.append(turn)
            return
        self.last.append(turn)
        if len(self.worst) < WORST or _height(turn) > _height(self.worst[-1]):
            self.worst.append(turn)
            self.worst.sort(key=_height, reverse=True)
            del self.worst[WORST:]

    # ------------------------------------------------------------ what is read from it

    def table(self) -> list[Turn]:
        """The rows that are kept, in their order, each once: first, last, worst, and without an answer."""
        rows = {turn.number: turn for turn in (*self.first, *self.worst, *self.unanswered, *self.last)}
        return [rows[number] for number in sorted(rows)]

    def rate_by_turn(self) -> list[CallShare]:
        """Right calls by quarter of the turns; without turns nothing."""
        size = self.turns
        cuts = [round(part * size / PARTS) for part in range(PARTS + 1)]
        found = []
        for begin, end in itertools.pairwise(cuts):
            judged = sum(self.calls[begin:end])
            if end > begin:
                found.append(
                    CallShare(name=f"turns {begin + 1}-{end}", right=sum(self.right[begin:end]), judged=judged)
                )
        return found

    def rate_by_fill(self) -> list[CallShare]:
        """Right calls by how full the context was; nothing where that is not known."""
        right, judged = [0] * PARTS, [0] * PARTS
        for full, calls, good in zip(self.fill, self.calls, self.right, strict=True):
            if calls and not math.isnan(full):
                part = min(PARTS - 1, max(0, int(full * PARTS)))
                judged[part] += calls
                right[part] += good
        names = [f"context {100 * part // PARTS}-{100 * (part + 1) // PARTS} %" for part in range(PARTS)]
        return [
            CallShare(name=name, right=good, judged=calls)
            for name, good, calls in zip(names, right, judged, strict=True)
            if calls
        ]

    def retention(self, warm_up: int, least: int = 8) -> Retained | None:
        """Decode rate late over early.

        Turns of one phase are compared with each other, since longer prompts decode more slowly: of the turns after the
        warm-up the first and the last quarter, whole periods each. ``None`` where that is fewer than ``least`` turns
        with a rate.
        """
        return self._retained(warm_up, self.turns, least)

    def recent_retention(self, warm_up: int, window: int) -> Retained | None:
        """The same of the last ``window`` turns beside the first quarter after the warm-up."""
        return self._retained(warm_up, window, 8, recent=True)

    def _retained(self, warm_up: int, window: int, least: int, *, recent: bool = False) -> Retained | None:
        count = self.turns - warm_up
        quarter = max(self.period, count // 4 // self.period * self.period)
        late = window if recent else quarter
        if count < quarter + late:
            return None
        before, after = self._by_phase(warm_up, warm_up + quarter), self._by_phase(self.turns - late, self.turns)
        shares, early, later = [], [], []
        for phase, rates in before.items():
            if phase in after:
                early.append(median(rates))
                later.append(median(after[phase]))
                shares.append(later[-1] / early[-1])
        enough = min(sum(map(len, before.values())), sum(map(len, after.values()))) >= least
        if not shares or not enough:
            return None
        error = log_error(self.rates, period=self.period, begin=warm_up, early=quarter, late=late)
        share = median(shares)
        return Retained(share, share * math.exp(-error), share * math.exp(error), median(early), median(later))

    def _by_phase(self, begin: int, end: int) -> Mapping[int, list[float]]:
        found: dict[int, list[float]] = {}
        for index in range(max(0, begin), min(end, len(self.rates))):
            if self.rates[index] > 0:
                found.setdefault(index % self.period, []).append(self.rates[index])
        return found

    def turn_seconds(self) -> float | None:
        """Seconds that a turn takes, of the last whole period or the last ten turns; ``None`` before the second."""
        back = min(max(self.period, 10), len(self.seconds) - 1)
        if back < 1:
            return None
        return (self.seconds[-1] - self.seconds[-1 - back]) / back


def _columns(columns: dict[str, Column], figures: Mapping[str, Measured], before: int) -> None:
    for name in figures:
        if name not in columns and len(columns) < MOST_NAMES:
            columns[name] = Column(before)
    for name, column in columns.items():
        column.add(figures.get(name))


def _rate(value: float | None) -> float:
    return value if value is not None and math.isfinite(value) and value > 0 else math.nan


def _count(counter: Counter[str], name: str) -> None:
    counter[name if name in counter or len(counter) < MOST_NAMES else "other"] += 1


def _height(turn: Turn) -> int:
    return max((figure.upper for figure in turn.peak.values() if isinstance(figure, Reading)), default=0)
