"""Whether a rate of right tool calls holds: four modes, a paired comparison, and when there is no verdict."""

from __future__ import annotations

from typing import Literal

import msgspec

from pytest_vram.toolcalls.results import Results

Mode = Literal["not_below", "proven", "sprt", "point"]
Judge = Literal["first_try", "after_retry"]
MODES = ("not_below", "proven", "sprt", "point")
JUDGES = ("first_try", "after_retry")
#: Least share of cases that must have an answer.
COMPLETION = 0.95


class Paired(msgspec.Struct, frozen=True, kw_only=True):
    """Two deployments on the same cases.

    :ivar baseline: name. :ivar pairs: cases that both answered. :ivar lost: right before and wrong now; ``won``: the
        other way round. :ivar difference: rate now minus rate before, with its interval ``low``, ``high`` (Tango).
    :ivar p_value: McNemar's exact test, for display. :ivar outcome: ``passed`` (not worse by more than the margin),
        ``failed`` (significantly worse, and by more than the margin), ``inconclusive``.
    """

    baseline: str
    margin: float
    pairs: int
    lost: int
    won: int
    difference: float
    low: float
    high: float
    p_value: float
    outcome: Literal["passed", "failed", "inconclusive"]
    text: str
    families_lost: int = 0
    families_won: int = 0
    notes: list[str] = []


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What the cases say about a target.

    :ivar outcome: ``error``: refused, fewer than 95 % of the cases have an answer. :ivar right: of ``n`` cases.
    :ivar low: one-sided Clopper–Pearson bounds at ``confidence`` on n ÷ design effect, with ``high``.
    :ivar wilson: two-sided interval for display. :ivar design_effect: 1 where the cases of a family are independent.
    :ivar detectable: the drop below the target, as a share, that this n detects with 80 % power; ``None``: none.
    :ivar false_alarm: mode ``point``: how often a deployment that is truly at the target fails this rule.
    :ivar text: sentences for a person. :ivar warnings: such as too few cases to fail anything realistic.
    """

    outcome: Literal["passed", "failed", "inconclusive", "error"]
    mode: Mode
    judge: Judge
    target: float
    confidence: float
    right: int
    n: int
    families: int
    rate: float | None
    completion: float
    planned: int
    low: float | None = None
    high: float | None = None
    wilson: tuple[float, float] | None = None
    design_effect: float = 1.0
    detectable: float | None = None
    false_alarm: float | None = None
    other_rate: float | None = None
    paired: Paired | None = None
    text: str = ""
    warnings: list[str] = []


def judge(
    results: Results,
    *,
    target: float,
    mode: Mode = "not_below",
    confidence: float = 0.95,
    margin: float = 0.05,
    judge: Judge = "first_try",
    baseline: Results | None = None,
    repeated: Results | None = None,
) -> Verdict:
    """Hold results against a target.

    :param margin: the drop that ``sprt`` and a comparison with ``baseline`` are about, as a share.
    :param repeated: the baseline asked a second time (an A/A pair): what changes without any change.
    """
    raise NotImplementedError  # frame
