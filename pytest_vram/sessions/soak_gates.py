"""What a soak must hold: one outcome for each gate, and a verdict over all of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

from pytest_vram.checks.idle_series import IdleVerdict, judge_idle
from pytest_vram.readings import Measured, Reading, Unmeasurable
from pytest_vram.sessions.soak_journal import LossLine
from pytest_vram.sessions.soak_lines import first_line
from pytest_vram.sessions.soak_series import Breach, CallShare, Column, Series
from pytest_vram.spec import Limits
from pytest_vram.stats import clopper_pearson
from pytest_vram.units import mib, with_mib

Outcome = Literal["passed", "failed", "inconclusive", "not judged"]
#: Turns below which no gate on a trend is decided.
LEAST_TURNS = 120
#: Turns that warm up before rates are compared.
WARM_UP = 10
#: Turns at the end in which less than this share of the early rate stops a soak.
RECENT = 30
COLLAPSED = 0.5
#: Share of turns without an answer, or with nothing in it, above which a soak is undecided.
MOST_ERRORS = 0.01
CONFIDENCE = 0.95
#: Of each of two intervals that must not meet, so that both together are wrong in a hundredth.
APART = 0.995
PROVES = (
    "A pass holds for these conversations, lengths and settings on this device, for as long as it ran: a leak below"
    " what so many turns can show (docs/leaks.md), longer contexts, more requests at once, another driver or engine,"
    " and other programs on the card are not excluded by it."
)


class Gates(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a soak is held against; part of its fingerprint.

    :ivar limit: that no peak may be over; ``limit_from`` names where it was written.
    :ivar host_limit: bytes of host memory. :ivar accuracy: share of tool calls that must be right; ``None``: reported.
    :ivar retention: share of the early decode rate that must be left in the end.
    :ivar context: tokens that must be served at every turn; ``None``: nothing was asked for.
    :ivar caps: bytes up to which a known cache may grow; see :func:`pytest_vram.checks.judge_idle`.
    :ivar capacity: label → bytes of the device.
    """

    limit: Limits | None = None
    limit_from: str = ""
    host_limit: int | None = None
    accuracy: float | None = None
    retention: float = 0.8
    context: int | None = None
    caps: dict[str, int] = {}
    capacity: dict[str, int] = {}


class GateResult(msgspec.Struct, frozen=True, kw_only=True):
    """One gate. :ivar text: one sentence with the figures that decided."""

    name: str
    outcome: Outcome
    text: str


class SoakVerdict(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a soak showed.

    :ivar outcome: ``passed``, ``failed`` or ``inconclusive``. :ivar text: one sentence.
    :ivar idle: device label → what its idle memory does; ``host`` → that of host memory.
    :ivar by_turn: tool calls by quarter of the turns; ``by_fill``, by how full the context was.
    :ivar breach: the first peak over the limit.
    """

    outcome: Literal["passed", "failed", "inconclusive"]
    text: str
    gates: list[GateResult] = []
    idle: dict[str, IdleVerdict] = {}
    by_turn: list[CallShare] = []
    by_fill: list[CallShare] = []
    retention: float | None = None
    breach: Breach | None = None
    proves: str = PROVES


def judge(series: Series, gates: Gates, losses: list[LossLine], *, unfinished: str = "") -> SoakVerdict:
    """Hold what was measured against every gate.

    :param unfinished: why fewer turns were run than were asked for; "": all of them were.
    """
    idle = idle_of(series, gates)
    by_turn, by_fill = series.rate_by_turn(), series.rate_by_fill()
    results = [
        _peak(series, gates),
        _idle(series, {name: one for name, one in idle.items() if name != "host" or name in series.idle}),
        _host(series, gates, idle.get("host") if "host" not in series.idle else None),
        _tool_calls(series, gates, by_turn, by_fill),
        _throughput(series, gates),
        _context(series, gates),
        _answers(series, losses),
    ]
    failed = [gate for gate in results if gate.outcome == "failed"]
    unclear = [gate for gate in results if gate.outcome == "inconclusive"]
    counted = f"{series.turns:,} turn{'s' if series.turns != 1 else ''}"
    retained = series.retention(WARM_UP)
    outcome: Literal["passed", "failed", "inconclusive"]
    if failed:
        also = f"; also failed: {', '.join(gate.name for gate in failed[1:])}" if failed[1:] else ""
        outcome, text = "failed", f"after {counted}: {_first(failed[0].text)}{also}"
    elif unfinished:
        outcome, text = "inconclusive", unfinished if counted in unfinished else f"after {counted}: {unfinished}"
    elif unclear:
        also = f"; also open: {', '.join(gate.name for gate in unclear[1:])}" if unclear[1:] else ""
        outcome, text = "inconclusive", f"after {counted}: {unclear[0].text.removesuffix('.')}{also}"
    else:
        outcome, text = "passed", f"every gate held over {counted}"
    return SoakVerdict(
        outcome=outcome,
        text=text,
        gates=results,
        idle=idle,
        by_turn=by_turn,
        by_fill=by_fill,
        retention=retained.share if retained is not None else None,
        breach=series.breach,
    )


# ---------------------------------------------------------------- idle memory


def idle_of(series: Series, gates: Gates, **thresholds: float) -> dict[str, IdleVerdict]:
    """Device label → what its idle memory does, with the layers where there is one device; and ``host``.

    :param thresholds: of :func:`pytest_vram.checks.judge_idle`.
    """
    found: dict[str, IdleVerdict] = {}
    inner = {name: column for name, column in series.layers.items() if name != "host"}
    for label, column in series.idle.items():
        layers = {"host" if label == "host" else "process": column}
        if len(series.idle) == 1 and label != "host" and inner:
            layers = inner
        found[label] = _judged(series, gates, layers, label, thresholds)
    host = series.layers.get("host")
    if "host" not in found and host is not None:
        found["host"] = _judged(series, gates, {"host": host}, "host", thresholds)
    return found


def _judged(
    series: Series, gates: Gates, layers: dict[str, Column], label: str, thresholds: Mapping[str, float]
) -> IdleVerdict:
    limit = gates.limit.of(label) if gates.limit is not None else None
    if label == "host" and gates.host_limit is not None:
        limit = gates.host_limit
    return judge_idle(
        {name: column.figures() for name, column in layers.items()},
        cycle=series.period if series.period > 1 else None,
        events=list(series.events),
        segments=list(series.segments),
        limit=limit,
        seconds=list(series.seconds),
        tokens=list(series.tokens),
        capacity=gates.capacity.get(label),
        caps=gates.caps or None,
        engine=series.engine or None,
        # A card's number does not say what it is; who measures it does.
        device=next((column.source for column in layers.values() if column.source), None),
        **thresholds,
    )


def _idle(series: Series, verdicts: dict[str, IdleVerdict]) -> GateResult:
    if not verdicts:
        return GateResult(name="idle memory", outcome="inconclusive", text="idle memory was read after no turn")
    order = ("leak", "invalid", "inconclusive", "step", "warming", "flat")
    label, worst = min(verdicts.items(), key=lambda item: order.index(item[1].kind))
    said = f"idle memory of {label}: {worst.kind}: {_trend(worst)}"
    if series.turns < LEAST_TURNS and worst.kind != "invalid":
        said = f"idle memory is not judged on fewer than {LEAST_TURNS} turns: there are {series.turns:,}"
        return GateResult(name="idle memory", outcome="inconclusive", text=said)
    return GateResult(name="idle memory", outcome=_outcome_of(worst), text=said)


def _outcome_of(verdict: IdleVerdict) -> Outcome:
    if verdict.kind == "leak":
        return "failed"
    return "passed" if verdict.kind in ("flat", "warming", "step") else "inconclusive"


def _host(series: Series, gates: Gates, verdict: IdleVerdict | None) -> GateResult:
    name = "host memory"
    if gates.host_limit is not None:
        peak = series.host_peak
        if not isinstance(peak, Reading):
            why = peak.reason if isinstance(peak, Unmeasurable) else "it was read at no turn"
            return GateResult(name=name, outcome="inconclusive", text=f"host memory is not known: {why}")
        limit = with_mib(gates.host_limit)
        if peak.bytes > gates.host_limit:
            text = f"host memory peaked at {_figure(peak)}, over {limit}"
            return GateResult(name=name, outcome="failed", text=text)
        if peak.upper > gates.host_limit or peak.missed:
            text = f"host memory peaked at {_figure(peak)}, which may be over {limit}"
            return GateResult(name=name, outcome="inconclusive", text=text)
    if verdict is None:
        said = "it is the device that is measured" if "host" in series.idle else "it was read at no turn"
        return GateResult(name=name, outcome="not judged", text=f"host memory: {said}")
    if series.turns < LEAST_TURNS and verdict.kind != "invalid":
        text = f"host memory is not judged on fewer than {LEAST_TURNS} turns: there are {series.turns:,}"
        return GateResult(name=name, outcome="inconclusive", text=text)
    return GateResult(name=name, outcome=_outcome_of(verdict), text=f"host memory: {verdict.kind}: {_trend(verdict)}")


# ---------------------------------------------------------------- peaks


def _peak(series: Series, gates: Gates) -> GateResult:
    name = "peak"
    shown = ", ".join(
        f"{label} {_figure(figure)} at turn {series.peak_turn.get(label, 0)}"
        for label, figure in series.peak.items()
        if isinstance(figure, Reading)
    )
    if gates.limit is None:
        return GateResult(name=name, outcome="not judged", text=f"no budget was given; peak: {shown or 'not measured'}")
    breach = series.breach
    if breach is not None:
        text = (
            f"the peak of {breach.device} was {mib(breach.bytes)} at turn {breach.turn}, over"
            f" {with_mib(breach.limit)} ({gates.limit_from or gates.limit.text})"
        )
        return GateResult(name=name, outcome="failed", text=text)
    hole = next((figure for figure in series.peak.values() if isinstance(figure, Unmeasurable)), None)
    if hole is not None or series.unmeasured or not series.peak:
        why = hole.reason if hole is not None else "no device was read"
        text = f"the peak was not measured in {series.unmeasured or series.turns} turns: {why}"
        return GateResult(name=name, outcome="inconclusive", text=text)
    if series.unclear:
        text = (
            f"the peak may have been over {gates.limit.text} in {series.unclear} turns: its source gives an interval"
            f" that reaches over it ({shown})"
        )
        return GateResult(name=name, outcome="inconclusive", text=text)
    missed = next((one.missed for one in series.peak.values() if isinstance(one, Reading) and one.missed), None)
    if missed is not None:
        return GateResult(name=name, outcome="inconclusive", text=f"more may have been held than was seen: {missed}")
    return GateResult(name=name, outcome="passed", text=f"every peak is within {gates.limit.text}: {shown}")


def _figure(figure: Measured) -> str:
    if isinstance(figure, Unmeasurable):
        return f"unknown ({figure.reason})"
    ends = mib(figure.bytes) if figure.at_most is None else f"{mib(figure.bytes)} to {mib(figure.upper)}"
    return f"{ends} ({figure.source})"


# ---------------------------------------------------------------- tool calls, speed, context, answers


def _tool_calls(series: Series, gates: Gates, by_turn: list[CallShare], by_fill: list[CallShare]) -> GateResult:
    name = "tool calls"
    right, judged = sum(series.right), sum(series.calls)
    target = gates.accuracy
    if not judged:
        outcome: Outcome = "not judged" if target is None else "inconclusive"
        return GateResult(name=name, outcome=outcome, text="no tool call was judged")
    said = f"{right} of {judged} tool calls right ({right / judged:.1%})"
    if target is not None:
        parts = [CallShare(name="all turns", right=right, judged=judged), *by_turn, *by_fill]
        for part in parts:
            if not part.judged:
                continue
            # A part is one of several that are looked at: each must be below for certain at its share of the level.
            level = CONFIDENCE if part is parts[0] else 1 - (1 - CONFIDENCE) / (len(parts) - 1)
            high = clopper_pearson(part.right, part.judged, level, "upper")[1]
            if high < target:
                where = "" if part is parts[0] else f" in {part.name}: {part.right} of {part.judged}"
                text = f"{said}{where}, below {target:.0%} with {level:.1%} confidence"
                return GateResult(name=name, outcome="failed", text=text)
        if right / judged < target:
            text = f"{said}: below {target:.0%}, which so few calls do not prove"
            return GateResult(name=name, outcome="inconclusive", text=text)
    for parts in (by_turn, by_fill):
        kept = [part for part in parts if part.judged]
        if len(kept) > 1 and _dropped(kept[0], kept[-1]):
            text = (
                f"tool calls get worse: {_share(kept[0])}, {_share(kept[-1])}; their {APART:.1%} intervals do not meet"
            )
            return GateResult(name=name, outcome="failed", text=text)
    if target is None:
        return GateResult(name=name, outcome="not judged", text=f"{said}; no target was given to hold them against")
    return GateResult(name=name, outcome="passed", text=said)


def _share(part: CallShare) -> str:
    return f"{part.right} of {part.judged} right in {part.name}"


def _dropped(early: CallShare, late: CallShare) -> bool:
    return (
        clopper_pearson(late.right, late.judged, APART, "both")[1]
        < clopper_pearson(early.right, early.judged, APART, "both")[0]
    )


def _throughput(series: Series, gates: Gates) -> GateResult:
    name = "throughput"
    found = series.retention(WARM_UP)
    if found is None or series.turns < LEAST_TURNS:
        text = "the decode rate early and late is not known from so few turns with a rate"
        none = all(not rate > 0 for rate in series.rates)
        if none and series.turns >= LEAST_TURNS:
            return GateResult(name=name, outcome="not judged", text="the server tells no decode rate")
        return GateResult(name=name, outcome="inconclusive", text=text)
    recent = series.recent_retention(WARM_UP, max(RECENT, series.period))
    if recent is not None and recent.high < COLLAPSED:
        text = (
            f"the decode rate has collapsed: {recent.share:.0%} of the early rate is left in the last turns"
            f" ({recent.early:.1f} to {recent.late:.1f} tokens/s)"
        )
        return GateResult(name=name, outcome="failed", text=text)
    said = (
        f"{found.share:.0%} of the early decode rate is left ({found.early:.1f} to {found.late:.1f} tokens/s; 98 %"
        f" between {found.low:.0%} and {found.high:.0%})"
    )
    if found.high < gates.retention:
        return GateResult(name=name, outcome="failed", text=f"{said}, less than {gates.retention:.0%}")
    if found.low < gates.retention:
        text = f"{said}: the rate moves so much here that it may and may not be less than {gates.retention:.0%}"
        return GateResult(name=name, outcome="inconclusive", text=text)
    return GateResult(name=name, outcome="passed", text=said)


def _context(series: Series, gates: Gates) -> GateResult:
    name = "context"
    sizes = ", ".join(f"{size:,}" for size in sorted(series.contexts))
    if gates.context is None:
        served = f"; served: {sizes} tokens" if sizes else ""
        return GateResult(name=name, outcome="not judged", text=f"no context was asked for{served}")
    if series.truncated:
        text = (
            f"{series.truncated} turns were served with {sizes} tokens of context, and {gates.context:,} were asked for"
        )
        return GateResult(name=name, outcome="failed", text=text)
    known = sum(series.contexts.values())
    if not known or known < series.turns:
        text = (
            f"the server told its context at {known} of {series.turns} turns; {gates.context:,} tokens were asked for"
        )
        return GateResult(name=name, outcome="inconclusive", text=text)
    return GateResult(name=name, outcome="passed", text=f"{sizes} tokens of context served at every turn, as asked")


def _answers(series: Series, losses: list[LossLine]) -> GateResult:
    name = "answers"
    memory = next((loss for loss in losses if loss.memory), None)
    if memory is not None:
        text = f"the server ran out of memory in {memory.place}: {first_line(memory.error)}"
        return GateResult(name=name, outcome="failed", text=text)
    lacking = series.errors.total() + series.nothing.total()
    if losses:
        times = f"{len(losses)} times" if len(losses) > 1 else "once"
        first = f"first in {losses[0].place}: {first_line(losses[0].error)}"
        also = f"{lacking} of {series.turns} turns have no answer besides; " if lacking else ""
        text = f"{also}the server was lost or did not answer in time {times}, {first}"
        return GateResult(name=name, outcome="inconclusive", text=text)
    if not series.turns:
        return GateResult(name=name, outcome="inconclusive", text="no turn was answered")
    if lacking > MOST_ERRORS * series.turns:
        said = [
            f"{reasons.total()} of {series.turns} turns {what}, the first because: {first_line(next(iter(reasons)))}"
            for reasons, what in (
                (series.errors, "have no answer"),
                (series.nothing, "have an answer that is empty or that nobody could read"),
            )
            if reasons
        ]
        return GateResult(name=name, outcome="inconclusive", text="; ".join(said))
    return GateResult(
        name=name, outcome="passed", text=f"{series.turns - lacking} of {series.turns} turns were answered"
    )


def _first(text: str) -> str:
    """The first sentence; the gate has all of them."""
    head, _, rest = text.partition(". ")
    return head if rest else text.removesuffix(".")


def _trend(verdict: IdleVerdict) -> str:
    """What an idle verdict says; of a leak without what it may be and what would settle that: the report tells both."""
    text = verdict.text
    if verdict.kind != "leak":
        return text
    for words, listed in (("It looks like", verdict.alike), ("What would settle it", verdict.settles)):
        text = text.replace(f" {words}: {'; '.join(listed)}.", "")
    return text
