"""The words of a verdict, and which arguments make sense."""

from __future__ import annotations

from typing import Literal

Mode = Literal["not_below", "proven", "sprt", "point"]
Judge = Literal["first_try", "after_retry"]
MODES = ("not_below", "proven", "sprt", "point")
JUDGES = ("first_try", "after_retry")
#: Least share of cases that must have an answer.
COMPLETION = 0.95
#: With fewer failures (or changes) than this nothing can be said about how far the cases of a family go together, and
#: some of it is assumed where a proof rests on it.
FEW = 10
ASSUMED_ICC = 0.1


def problem(
    *, target: float, mode: str, confidence: float, margin: float, judge: str, compared: bool = False
) -> str | None:
    """What is wrong with arguments of a verdict, as a clause that names the argument; ``None``: nothing.

    :param compared: whether a baseline is given, which the margin is for.
    """
    if mode not in MODES:
        return f"mode {mode!r} is none of {', '.join(MODES)}"
    if judge not in JUDGES:
        return f"judge {judge!r} is none of {', '.join(JUDGES)}"
    if not 0 < target <= 1:
        return f"target {target!r} is not a share over 0 and up to 1"
    if not 0.5 < confidence < 1:
        return f"confidence {confidence!r} is not between 0.5 and 1"
    if (mode == "sprt" or compared) and not 0 < margin < 1:
        return f"margin {margin!r} is not between 0 and 1"
    if mode == "sprt" and margin >= target:
        return (
            f"margin {margin!r} is not below the target {target!r}, and sprt tests the target against target - margin"
        )
    return None
