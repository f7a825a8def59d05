"""Whether idle memory over many turns leaks: flat, warming, a step, a leak, or not enough to say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from pytest_vram.readings import Measured

Kind = Literal["flat", "warming", "step", "leak", "inconclusive", "invalid"]


class IdleVerdict(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a series of idle readings is.

    :ivar kind: ``flat``; ``warming`` (grows, ever more slowly); ``step`` (one jump explains it); ``leak``;
        ``inconclusive`` (``text`` says what would settle it); ``invalid`` (readings that cannot be true).
    :ivar slope: bytes per turn (Theil–Sen), with its 95 % interval ``low``, ``high``; ``None`` where there is none.
    :ivar growth: bytes that the slope adds over the judged turns. :ivar turns: judged; ``warm_up`` are left out.
    :ivar p_value: of Mann–Kendall's test for a rise.
    :ivar layer: which source grows, where several are given; "" where it cannot be told.
    :ivar per_1000_tokens: bytes per 1000 tokens. :ivar hours_left: until ``limit`` at this slope, with an interval.
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
    readings: Sequence[Measured | int] | Mapping[str, Sequence[Measured | int]],
    *,
    cycle: int | None = None,
    events: Sequence[int] = (),
    segments: Sequence[int] = (),
    limit: int | None = None,
    seconds: Sequence[float] | None = None,
    tokens: Sequence[int] | None = None,
    **thresholds: Any,
) -> IdleVerdict:
    """Judge idle memory turn by turn.

    :param readings: one figure per turn, in bytes; or several sources by layer name.
    :param cycle: turns after which the lengths repeat. :param events: indices of turns at which a step is explained.
    :param segments: indices of turns that begin a new segment (the server was restarted).
    :param limit: bytes, for the hours that are left. :param seconds: when each turn ended.
    :param tokens: tokens so far.
    """
    raise NotImplementedError  # frame
