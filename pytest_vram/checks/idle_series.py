"""Whether idle memory over many turns leaks: flat, warming, a step, a leak, or not enough to say."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from numbers import Real
from typing import Any, Literal

import msgspec

from pytest_vram.checks import idle_engines, idle_layers, idle_words
from pytest_vram.checks.idle_readings import USAGE, Cleaned, clean, contradiction, too_small
from pytest_vram.checks.idle_trend import SHORTEST, Thresholds, Trend, trend_of
from pytest_vram.errors import BadInput
from pytest_vram.readings import Measured

Kind = Literal["flat", "warming", "step", "leak", "inconclusive", "invalid"]

#: A pool's usage is judged as a share; this much of it stands for the floor in bytes.
USAGE_FLOOR = 0.05


class IdleVerdict(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a series of idle readings is.

    :ivar kind: ``flat``; ``warming`` (grows, ever more slowly); ``step`` (one jump explains it); ``leak``;
        ``inconclusive`` (``text`` says what would settle it); ``invalid`` (readings that cannot be true).
    :ivar slope: bytes per turn (Theil–Sen), with its 95 % interval ``low``, ``high``; ``None`` where there is none.
    :ivar growth: bytes that the slope adds over the judged turns. :ivar turns: judged; ``warm_up`` are left out.
    :ivar p_value: of Mann–Kendall's test for a rise.
    :ivar layer: which source grows, where several are given; "" where it cannot be told.
    :ivar layers: layer → what it does by itself, in words.
    :ivar per_1000_tokens: bytes per 1000 tokens. :ivar hours_left: until ``limit`` at this slope: at the upper and at
        the lower end of its interval; the latter ``None`` where the slope may be 0.
    :ivar steps: (index of the turn, bytes) of jumps that no event explains.
    :ivar alike: known causes that look like this, such as llama.cpp's prompt cache below its cap; ``settles``: what
        would tell them apart.
    :ivar cause: ``unknown`` unless the layers say.
    """

    kind: Kind
    text: str
    turns: int = 0
    warm_up: int = 0
    slope: float | None = None
    low: float | None = None
    high: float | None = None
    growth: float | None = None
    p_value: float | None = None
    layer: str = ""
    layers: dict[str, str] = {}
    per_1000_tokens: float | None = None
    hours_left: tuple[float, float | None] | None = None
    steps: list[tuple[int, int]] = []
    alike: list[str] = []
    settles: list[str] = []
    cause: str = "unknown"


def judge_idle(
    readings: Sequence[Measured | int | None] | Mapping[str, Sequence[Measured | int | None]],
    *,
    cycle: int | None = None,
    events: Sequence[int] = (),
    segments: Sequence[int] = (),
    limit: int | None = None,
    seconds: Sequence[float] | None = None,
    tokens: Sequence[int] | None = None,
    capacity: int | None = None,
    caps: Mapping[str, int] | None = None,
    engine: str | None = None,
    device: str | None = None,
    **thresholds: Any,
) -> IdleVerdict:
    """Judge idle memory turn by turn.

    Mann–Kendall's test and the slope of Theil and Sen over medians of blocks, after each segment's warm-up; a cycle's
    phases are taken out first, and so is a lasting jump, which is a ``step`` if nothing rises without it. Figures are
    bytes; a turn that could not be read is left out, and too many of them leave the verdict open.

    :param readings: one figure per turn, in bytes, ``None`` where it could not be read; or several sources by layer
        name: ``torch-allocated``, ``torch-reserved``, ``torch-inactive-split``, ``process``, ``rpc``, ``device``,
        ``host``, ``kv-usage`` (bytes or a share of one), or any other, which counts as ``process`` does.
    :param cycle: turns after which the lengths repeat; one that stands out is found where
        neither it nor events are given.
    :param events: indices of turns at which a step is explained.
    :param segments: indices of turns that begin a new segment (the server was restarted), each once.
    :param limit: bytes, for the hours that are left. :param seconds: when each turn ended.
    :param tokens: tokens so far. :param capacity: bytes of the device; a figure above it is ``invalid``.
    :param caps: bytes up to which a known cache may grow, by name: ``prompt-cache`` and ``context-checkpoints`` of
        llama.cpp (host), ``allocator-cache``, ``graphs``, ``workspaces``. A rise below its cap is never a leak.
        Another name may explain any layer, which is said.
    :param engine: whose memory it is (``llama-server``, ``vllm``, ``transformers`` …), and ``device``, its label
        (``cuda:0``, ``vulkan:0`` …): ``alike`` and ``settles`` name what can be there; no verdict depends on them.
    :param thresholds: see :class:`pytest_vram.checks.idle_trend.Thresholds`.
    :raises BadInput: a threshold that is unknown or out of range, lists of different lengths, or labels of turns
        where their indices belong.
    """
    rule = _thresholds(thresholds)
    named = _named(readings)
    _check_caps(caps)
    count = _check(named, cycle, seconds, tokens, {"limit": limit, "capacity": capacity, **(caps or {})})
    unused = [
        *_check_indices("events", events, count),
        *_check_indices("segments", segments, count),
        *(
            f"`{name}` is none of the known caches ({', '.join(idle_layers.CAP_LAYER)}): it was taken for part of any "
            "layer."
            for name in caps or {}
            if name not in idle_layers.CAP_LAYER
        ),
    ]
    # A budget is no capacity: what torch reserved may be above it, unless nothing else says what there is.
    beyond = None if named.keys() & {"process", "device"} else limit
    cleaned = {layer: clean(layer, series, capacity, beyond) for layer, series in named.items()}
    impossible = next((one.impossible for one in cleaned.values() if one.impossible), None)
    impossible = impossible or too_small(named, rule.floor) or contradiction(cleaned)
    if impossible is not None:
        return IdleVerdict(kind="invalid", text=impossible, settles=[idle_words.READ_AGAIN])
    trends: dict[str, Trend] = {}
    for layer, one in cleaned.items():
        judged = rule
        if layer == USAGE and max((value for value in one.values if value is not None), default=0.0) <= 1:
            judged = msgspec.structs.replace(rule, floor=USAGE_FLOOR)
        trends[layer] = trend_of(one.values, thresholds=judged, cycle=cycle, events=events, segments=segments)
    outside = idle_layers.outside_torch(cleaned)
    if outside is not None:
        trends[idle_layers.OUTSIDE] = trend_of(outside, thresholds=rule, cycle=cycle, events=events, segments=segments)
    found = idle_layers.combine(trends, cleaned, rule, dict(caps or {}), idle_engines.about(engine, device))
    trend = trends.get(found.of) or next(iter(trends.values()), Trend(kind="inconclusive", reason="short"))
    shown = cleaned.get(found.layer or found.of)
    level = _level(shown)
    hours = _hours_left(trend, level, limit, seconds)
    per_1000 = _per_1000_tokens(trend, tokens, count)
    return IdleVerdict(
        kind=found.kind,
        text=" ".join(
            [idle_words.sentence(found, trend, rule, hours=hours, per_1000_tokens=per_1000, cleaned=shown), *unused]
        ),
        turns=trend.turns,
        warm_up=trend.warm_up,
        slope=trend.slope,
        low=trend.low,
        high=trend.high,
        growth=trend.growth,
        p_value=trend.p_value,
        layer=found.layer,
        layers={
            layer: idle_words.brief(layer, one)
            for layer, one in trends.items()
            if layer not in ("", idle_layers.OUTSIDE)
        },
        per_1000_tokens=per_1000,
        hours_left=hours,
        steps=list(trend.steps),
        alike=found.alike,
        settles=found.settles,
        cause=found.cause,
    )


def _thresholds(given: Mapping[str, Any]) -> Thresholds:
    names = Thresholds.__struct_fields__
    for name, value in given.items():
        if name not in names:
            raise BadInput(f"`{name}` is not a threshold of judge_idle; there are: {', '.join(names)}.")
        whole = name in ("minimum", "warm_up", "blocks", "floor")
        kinds = (int,) if whole else (int, float)
        if isinstance(value, bool) or not isinstance(value, kinds) or not 0 <= value < 1 << 62:
            accepted = "a whole number, 0 or more" if whole else "a number, 0 or more"
            raise BadInput(f"The threshold `{name}` of judge_idle is {value!r}; write {accepted}.")
    if given.get("minimum", 60) < SHORTEST:
        raise BadInput(
            f"The threshold `minimum` of judge_idle is {given['minimum']!r}; a verdict needs {SHORTEST} turns or more."
        )
    if given.get("blocks", 12) < 4:
        raise BadInput(f"The threshold `blocks` of judge_idle is {given['blocks']!r}; a trend needs 4 or more.")
    for name in ("p_value", "warm_up_share", "missing"):
        if given.get(name, 0) >= 1:
            raise BadInput(f"The threshold `{name}` of judge_idle is {given[name]!r}; write a share below 1.")
    return Thresholds(**given)


def _named(readings: object) -> dict[str, Sequence[Any]]:
    """The lists by layer; a single one under "".

    :raises BadInput: something else than lists of figures.
    """
    if isinstance(readings, Mapping):
        for name in readings:
            if not isinstance(name, str):
                raise BadInput(f"judge_idle takes sources by the names of layers, and {name!r:.60} is no name.")
        return {name: _list(f"`{name}`", series) for name, series in readings.items()}
    return {"": _list("readings", readings)}


def _list(name: str, given: object) -> list[Any]:
    if isinstance(given, str | bytes | Mapping) or not isinstance(given, Iterable):
        raise BadInput(f"{name} of judge_idle is {given!r:.60}; write a list with one figure per turn.")
    return list(given)


def _check_caps(caps: object) -> None:
    if caps is not None and not (isinstance(caps, Mapping) and all(isinstance(name, str) for name in caps)):
        raise BadInput(f"`caps` of judge_idle is {caps!r:.60}; write bytes by the names of caches.")
    for name, size in (caps or {}).items() if isinstance(caps, Mapping) else ():
        if size is None:
            raise BadInput(f"`{name}` of judge_idle is None; write a whole number of bytes.")


def _check(
    named: Mapping[str, Sequence[object]],
    cycle: object,
    seconds: Sequence[float] | None,
    tokens: Sequence[int] | None,
    sizes: Mapping[str, object],
) -> int:
    """The number of turns.

    :raises BadInput: lists that do not belong together, a cycle or a size that is none.
    """
    for name, figures in (("seconds", seconds), ("tokens", tokens)):
        if figures is None:
            continue
        for figure in _list(f"`{name}`", figures):
            if isinstance(figure, bool) or not isinstance(figure, Real) or not math.isfinite(figure):
                raise BadInput(f"`{name}` of judge_idle has {figure!r:.60}; write a number for every turn.")
    lengths = {f"`{name}`" if name else "readings": len(series) for name, series in named.items()}
    lengths |= {name: len(series) for name, series in (("seconds", seconds), ("tokens", tokens)) if series is not None}
    if len(set(lengths.values())) > 1:
        said = ", ".join(f"{name} {length}" for name, length in lengths.items())
        raise BadInput(f"judge_idle takes one figure per turn in every list, but the lengths differ: {said}.")
    if cycle is not None and (isinstance(cycle, bool) or not isinstance(cycle, int) or cycle < 1):
        raise BadInput(f"The cycle of judge_idle is {cycle!r}; write a number of turns, 1 or more.")
    for name, size in sizes.items():
        if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 0):
            raise BadInput(f"`{name}` of judge_idle is {size!r}; write a whole number of bytes.")
    return next(iter(lengths.values()), 0)


def _check_indices(name: str, given: object, count: int) -> list[str]:
    """Sentences about those that no turn has.

    :raises BadInput: one label for each turn instead of the indices of some.
    """
    places = _list(f"`{name}`", given)
    for place in places:
        if isinstance(place, bool) or not isinstance(place, int):
            raise BadInput(f"`{name}` of judge_idle has {place!r:.60}; write the indices of turns, from 0.")
    if len(set(places)) < len(places):
        raise BadInput(
            f"`{name}` of judge_idle has an index twice; write the indices of turns, from 0, each once, and not a "
            "label for every turn."
        )
    beyond = [place for place in places if not 0 <= place < count]
    if not beyond:
        return []
    shown = ", ".join(str(place) for place in beyond[:3]) + (" …" if len(beyond) > 3 else "")
    return [f"`{name}` has {shown}, which is the index of none of the {count} turns: not used."]


def _level(cleaned: Cleaned | None) -> float | None:
    """The highest of the last few readings: what the next turn starts from."""
    known = [value for value in cleaned.values if value is not None] if cleaned else []
    return max(known[-5:], default=None)


def _hours_left(
    trend: Trend, level: float | None, limit: int | None, seconds: Sequence[float] | None
) -> tuple[float, float | None] | None:
    if limit is None or level is None or not seconds or trend.high is None or trend.low is None or trend.high <= 0:
        return None
    gaps = sorted(later - earlier for earlier, later in itertools.pairwise(seconds) if later > earlier)
    if not gaps:
        return None
    # The mean of the middle nine tenths: a night's pause between two turns is not how long a turn takes.
    kept = gaps[len(gaps) // 20 : len(gaps) - len(gaps) // 20]
    hours = max(0.0, limit - level) * (sum(kept) / len(kept)) / 3600
    return hours / trend.high, hours / trend.low if trend.low > 0 else None


def _per_1000_tokens(trend: Trend, tokens: Sequence[int] | None, count: int) -> float | None:
    if trend.slope is None or not tokens or count < 2:
        return None
    # A count that starts again (a new conversation, a restart) is not a negative number of tokens.
    taken = [later - earlier for earlier, later in itertools.pairwise(tokens) if later >= earlier]
    per_turn = sum(taken) / len(taken) if taken else 0
    return 1000 * trend.slope / per_turn if per_turn > 0 else None
