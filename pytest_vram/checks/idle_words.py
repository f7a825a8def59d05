"""Sentences of verdicts on idle memory."""

from __future__ import annotations

from pytest_vram.checks.idle_layers import Found
from pytest_vram.checks.idle_readings import USAGE, Cleaned
from pytest_vram.checks.idle_trend import Thresholds, Trend, per_turn
from pytest_vram.units import MIB, mib

READ_AGAIN = "another source of the same memory, such as the driver's figure of the process"

#: Turns after a jump below which its level is told as seen on few.
FEW = 5


def brief(layer: str, trend: Trend) -> str:
    """What one layer does by itself, in a few words."""
    if trend.kind == "inconclusive" and trend.reason in ("short", "cycle"):
        return "too few turns"
    words = {
        "flat": "does not grow",
        "warming": "grows ever more slowly",
        "step": "one jump",
        "leak": "grows",
        "inconclusive": "open",
    }[trend.kind]
    if _creeps(trend):
        words = "grows by less than the floor"
    if layer == USAGE or trend.slope is None:
        return words
    return f"{words} ({trend.slope_words()} a turn)"


def sentence(
    found: Found,
    trend: Trend,
    rule: Thresholds,
    *,
    hours: tuple[float, float | None] | None,
    per_1000_tokens: float | None,
    cleaned: Cleaned | None,
) -> str:
    """The verdict in a few sentences."""
    parts = [] if found.unread else [_head(found, trend, rule)]
    if found.said:
        parts.append(found.said)
    if trend.slope is not None and found.of != USAGE and found.kind in ("leak", "inconclusive", "warming"):
        if per_1000_tokens is not None and found.kind == "leak":
            parts.append(f"That is {per_turn(per_1000_tokens)} per 1000 tokens.")
        if hours is not None and found.kind == "leak":
            parts.append(_lasts(*hours))
    if trend.explained and trend.reason not in ("events", "drops"):
        rises = ", ".join(f"{mib(size)} at turn {turn + 1}" for turn, size in trend.explained[:3])
        more = f" and {len(trend.explained) - 3} more" if len(trend.explained) > 3 else ""
        parts.append(f"Explained by events: {rises}{more}.")
    if cleaned is not None:
        gone = len(cleaned.values) - cleaned.known
        if gone and not found.unread:
            parts.append(f"{gone} of {len(cleaned.values)} turns could not be read and are left out.")
        if cleaned.lower_ends:
            parts.append(f"{cleaned.lower_ends} readings are lower ends: more may have been held.")
    if trend.left_out and trend.left_out + trend.segments > 1:
        parts.append(
            f"Too short to judge and left out: {trend.left_out} of {trend.left_out + trend.segments} segments."
        )
    if trend.segments > 1 and trend.turns:
        parts.append(f"{trend.segments} segments were pooled; no slope goes across a restart.")
        if trend.climb > rule.floor and found.kind != "leak":
            parts.append(
                f"Each stands above the one before, the last by {mib(trend.climb)} above the first: look for what a "
                "restart leaves behind."
            )
    if found.kind in ("leak", "inconclusive", "step") and found.alike:
        parts.append(f"It looks like: {'; '.join(found.alike)}.")
    if found.kind in ("leak", "inconclusive") and found.settles:
        parts.append(f"What would settle it: {'; '.join(found.settles)}.")
    return " ".join(parts)


def _lasts(soonest: float, latest: float | None) -> str:
    """How long memory lasts: in hours, below two of them in minutes."""
    ends = [soonest] if latest is None else [soonest, latest]
    if not ends[-1]:
        return "Its limit is reached."
    factor, unit = (1, "hours") if ends[-1] >= 2 else (60, "minutes")
    left = " to ".join(dict.fromkeys(f"{factor * one:,.1f}" for one in ends))
    return f"At this slope memory lasts for {left} more {unit}."


def _head(found: Found, trend: Trend, rule: Thresholds) -> str:
    what = f"`{found.of}`" if found.of else "Idle memory"
    over = f"over {trend.turns} judged turns ({trend.warm_up} of warm-up are left out)"
    if found.of == USAGE:
        return f"{what} was judged {over}."
    if found.kind == "leak":
        return f"{what} leaks {trend.slope_words()} a turn, {_growth(trend)} {over}."
    if found.kind == "step":
        turn, size = trend.steps[0] if trend.steps else (0, 0)
        seen = max(0, trend.until - turn)
        few = f" It stands on the last {seen} turns alone." if trend.until and seen <= FEW else ""
        return f"{what} jumped by {mib(size)} at turn {turn + 1} and does not grow otherwise, {over}.{few}"
    if found.kind == "warming":
        tail = trend.tail or 0.0
        went = f"grew by {per_turn(tail)}" if tail > 0 else f"fell by {per_turn(-tail)}"
        last = "" if trend.tail is None else f" In the last third it {went} a turn."
        return f"{what} grew by {_growth(trend)}, ever more slowly, {over}.{last}"
    if found.kind == "flat" and _creeps(trend):
        ahead = f"; 1000 turns of it would be {mib(round(1000 * (trend.slope or 0.0)))}" if (trend.low or 0) > 0 else ""
        how = f"grows by {trend.slope_words()} a turn, {_growth(trend)}" if ahead else f"grew by about {_growth(trend)}"
        return (
            f"{what} {how} {over}, which is less than the floor of "
            f"{mib(round(rule.floor))} that a verdict needs{ahead}."
        )
    if found.kind == "flat":
        return f"{what} does not grow {over}; a leak of {per_turn(smallest(trend, rule))} a turn or more is excluded."
    return _open(what, over, trend, rule)


def _open(what: str, over: str, trend: Trend, rule: Thresholds) -> str:
    match trend.reason:
        case "short":
            read = trend.turns + trend.warm_up
            return f"{read} turns were read, {trend.turns} of them after the warm-up; a verdict needs {rule.minimum}."
        case "cycle":
            return f"{trend.turns} judged turns are under three cycles of {trend.cycle}."
        case "steps":
            rises = ", ".join(f"{mib(size)} at turn {turn + 1}" for turn, size in trend.steps)
            return f"{what} grows in jumps ({rises}) and not between them, {over}."
        case "events":
            total = sum(size for _, size in trend.explained)
            return f"{what} grows by {mib(total)} at {len(trend.explained)} events and not between them, {over}."
        case "eases":
            return f"{what} grows more slowly in the second half, but still grows, {over}."
        case "wanders":
            late = f" Nearly all of it came after turn {trend.since + 1}." if trend.since is not None else ""
            return f"{what} grew by {_growth(trend)} {over}, but so unevenly that this may be chance.{late}"
        case "drops":
            turn, size = trend.explained[0] if trend.explained else (0, 0)
            return (
                f"{what} grows by {trend.slope_words()} a turn before and after it dropped by {mib(-size)} at turn "
                f"{turn + 1}, {over}: what was let go may be all that had piled up, or not."
            )
        case "weak":
            return f"{what} seems to grow, {trend.slope_words()} a turn, {over}, but too few blocks agree."
        case "late":
            turn, size = trend.ending or (0, 0)
            return (
                f"{what} ends {mib(size)} above what it was before turn {turn + 1}, and rose from there on, {over}: a "
                "leak that begins late, or a rise that ends."
            )
        case "noisy":
            reach = per_turn(trend.high or 0.0)
            return f"{what} varies so much that a leak of {reach} a turn would not be seen {over}."
        case "pieces":
            return (
                f"{what} grew by {_growth(trend)}, ever more slowly or in one jump, {over}. That is told of "
                f"{trend.pieces} servers together, and a leak that is cut into pieces can look like it."
            )
        case "phase" | "tops" | "last":
            return _hidden(what, over, trend)
        case _:
            return (
                f"{what} grows by {trend.slope_words()} a turn {over}." if trend.kind == "leak" else f"{what} is open."
            )


def _hidden(what: str, over: str, trend: Trend) -> str:
    hidden = trend.hidden
    assert hidden is not None
    size, turn = mib(hidden.bytes), hidden.turn + 1
    match hidden.reason:
        case "phase":
            again = f"turns {turn}, {turn + hidden.count}, {turn + 2 * hidden.count} …"
            return f"{what} rises by {size} at one turn of each cycle of {hidden.count} ({again}), {over}."
        case "tops":
            return f"The highest readings of {what} rise by {size}, most of its turns do not, {over}."
        case _:
            last = "The last turn stands" if hidden.count == 1 else f"The last {hidden.count} turns stand"
            return f"{last} {size} above every one before, {over}: a spike, or a jump."


def _creeps(trend: Trend) -> bool:
    """Whether a series that is flat by the rule is known to grow all the same, by less than the floor."""
    return trend.kind == "flat" and (trend.growth or 0) > MIB / 2 and trend.p_value is not None and trend.p_value < 0.01


def smallest(trend: Trend, rule: Thresholds) -> float:
    """The slope, in bytes a turn, that is excluded: the interval's upper end, or what adds up to the floor if more."""
    return max(trend.high or 0.0, rule.floor / max(1, trend.span))


def _growth(trend: Trend) -> str:
    return mib(round(trend.growth or 0.0))
