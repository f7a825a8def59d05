"""Idle memory after work against idle memory before it."""

from __future__ import annotations

from pytest_vram.checks.finding import Finding
from pytest_vram.checks.wording import amount, block, provenance
from pytest_vram.readings import Measured, Reading, Unmeasurable
from pytest_vram.units import mib, with_mib


def judge_idle_rollback(
    before: Measured,
    after: Measured,
    tolerance: int,
    *,
    check: str = "idle_rollback",
    limit_from: str = "idle_rollback",
    settled: bool = True,
) -> Finding | None:
    """Hold ``after`` against ``before`` plus ``tolerance`` bytes.

    :param settled: false where the reads still disagreed when the wait ended; the rollback is then not proven.
    :returns: ``None`` where idle memory is back; inconclusive where the intervals, or an unmeasured figure, do not say.
    """
    for when, figure in (("before", before), ("after", after)):
        if isinstance(figure, Unmeasurable):
            return Finding(
                check=check,
                verdict="inconclusive",
                section="idle memory undecided",
                text=f"Idle memory {when} the work could not be measured: {figure.reason}.",
                device=figure.device,
                measured=figure,
                limit=tolerance,
                limit_from=limit_from,
            )
    assert isinstance(before, Reading)
    assert isinstance(after, Reading)
    least, most = after.bytes - before.upper, after.upper - before.bytes
    if most <= tolerance and settled:
        return None
    failed = least > tolerance
    rows = [
        ("before", f"{amount(before)} ({provenance(before)})"),
        ("after", f"{amount(after)} ({provenance(after)})"),
        ("tolerance", f"{with_mib(tolerance)}, from {limit_from}"),
    ]
    if failed:
        title = f"Idle memory on {after.device} grew by {mib(least)}, more than the tolerance of {mib(tolerance)}."
    elif most > tolerance:
        title = f"Idle memory on {after.device} grew by something between {mib(least)} and {mib(most)}: undecided."
    else:
        title = f"Idle memory on {after.device} was still moving when the wait ended: its rollback is undecided."
        rows.append(("what settles it", "a longer `settle`"))
    return Finding(
        check=check,
        verdict="failed" if failed else "inconclusive",
        section="idle memory did not come back" if failed else "idle memory undecided",
        text=block(title, rows),
        device=after.device,
        measured=after,
        limit=tolerance,
        limit_from=limit_from,
    )
