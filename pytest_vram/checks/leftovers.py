"""How much of a peak is what earlier tests left behind, and what that means for a verdict."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from pytest_vram.checks.wording import WORTH_A_WORD
from pytest_vram.keeper.messages import Closed
from pytest_vram.readings import Reading
from pytest_vram.units import mib

_SUM = "sum"


class Left(NamedTuple):
    """What of a peak earlier tests had left, without a driver's context: between ``least`` and ``most`` bytes.

    :ivar names: the tests, those that left most first.
    """

    least: int = 0
    most: int = 0
    names: tuple[str, ...] = ()

    def saves(self, figure: Reading, limit: int) -> bool | None:
        """Whether the limit would hold without it; ``None`` where that cannot be told."""
        if not self.most or figure.bytes - self.most > limit:
            return False
        # More may have been held than a figure says that missed something.
        return True if figure.upper - self.least <= limit and not figure.missed else None


def left_in(closed: Closed, label: str, figure: Reading, *, scope: str, over: str, phase: str | None) -> Left:
    """What a figure of this window contains of what earlier tests left on a device (``sum`` for all of them).

    At the peak of the run, it is what was still held then. Of the peak of anything else, whose moment is not kept, it
    is at least what was held all along, and at most what was there at the opening.
    """
    if scope not in ("run", "own", "device") or over != "total" or figure.scope == "backend":
        return Left()  # a boot's phase is of its backend alone, whichever scope it is judged in
    # What the window's own processes held has nothing of what is left below other workers.
    run = closed.run.get(label)
    another = label != _SUM and isinstance(run, Reading) and run.bytes != figure.bytes
    mine = scope == "own" or (scope == "run" and phase is None and another)
    booted = closed.boots.get("own" if mine else scope, ())
    found = [
        one
        for one in closed.residues
        if label in (_SUM, one.device) and one.device not in booted and (one.own or not mine)
    ]
    of_run = scope == "run" and phase is None and not mine
    pairs = [
        (one, one.at_peak, one.at_peak_most) if of_run else (one, one.lasted, one.bytes - one.context) for one in found
    ]
    counted = sorted(((most, one.test) for one, _, most in pairs if most), key=lambda item: -item[0])
    names = [test for most, test in counted if most >= WORTH_A_WORD or most == counted[0][0]]
    return Left(sum(least for _, least, _ in pairs), sum(most for _, _, most in pairs), tuple(dict.fromkeys(names)))


def words(left: Left, figure: Reading, limit: int) -> tuple[str, list[tuple[str, str]]]:
    """The end of the sentence about a limit that broke for what others left, and rows below it."""
    names = ", ".join(left.names[:8]) + (f" and {len(left.names) - 8} more" if len(left.names) > 8 else "")
    mend = (
        "to mend it",
        "free the memory in a teardown that also runs when the test fails, or give what holds it a process of its own"
        " that ends with the test; where both tests share a fixture that holds it on purpose, the limit must have room"
        " for it",
    )
    if left.saves(figure, limit):
        blame = "that is the test" if len(left.names) == 1 else "those are the tests"
        end = f", but only because {names} left {mib(left.least)} behind: {blame} to mend, and not this one."
        return end, [("without it", f"{mib(max(0, figure.upper - left.least))}, within the limit"), mend]
    if left.least == left.most:
        held = f"{mib(left.most)}, which {names} left behind, were held then"
    else:
        held = f"{names} had left {mib(left.most)} behind, of which at least {mib(left.least)} were still held then"
    end = f", and {held}: whether this test would be over it without that cannot be told."
    low, high = max(0, figure.bytes - left.most), max(0, figure.upper - left.least)
    return end, [("without it", f"between {mib(low)} and {mib(high)}"), mend]


def unsettled(closed: Closed, before: Closed) -> Closed:
    """The window whose peaks of the run were raised since ``before`` by a source that does not say when: what was left
    may be in such a peak, and may be in none of it."""
    if closed is before or not closed.residues:
        return closed
    raised = {label for label, figure in closed.run.items() if figure != before.run.get(label)}
    residues = [
        msgspec.structs.replace(one, at_peak=0, at_peak_most=one.bytes - one.context) if one.device in raised else one
        for one in closed.residues
    ]
    return msgspec.structs.replace(closed, residues=residues)
