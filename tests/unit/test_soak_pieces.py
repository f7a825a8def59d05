"""A leak that restarts cut into pieces is never a pass; what one long piece shows is one all the same."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection

import pytest

from pytest_vram.sessions.soak_gates import Gates, SoakVerdict, judge
from pytest_vram.sessions.soak_series import Series
from pytest_vram.units import MIB
from tests.unit.soak_kit import a_turn, reading

#: Turns of a cycle, of which every sixth takes half as much.
CYCLE = 24


def leaks(turn: int, own: int) -> float:
    """MiB that a server holds which leaks 1.64 MiB in most turns, 0.82 MiB in every sixth."""
    return 25 + sum(0.82 if (number - 1) % 6 == 5 else 1.64 for number in range(turn - own, turn + 1))


def warms(turn: int, own: int) -> float:
    """MiB that a server holds which grows ever more slowly."""
    return 25 + 60 * (1 - math.exp(-own / 20))


def soaked(turns: int, begins: Collection[int], held: Callable[[int, int], float]) -> SoakVerdict:
    """The verdict on so many turns, with a server anew before each of ``begins``."""
    series = Series(period=CYCLE)
    segment, own = 1, 0
    for number in range(1, turns + 1):
        segment, own = (segment + 1, 0) if number in begins else (segment, own + 1)
        size = reading(held(number, own) * MIB, source="host-anon", device="host")
        turn = a_turn(number, idle={"host": size}, peak={"host": size}, phase=(number - 1) % CYCLE, segment=segment)
        series.add(turn, 1.0 * number)
    return judge(series, Gates(), [])


def idle(verdict: SoakVerdict) -> tuple[str, str]:
    """Outcome and words of the gate on idle memory."""
    return next((gate.outcome, gate.text) for gate in verdict.gates if gate.name == "idle memory")


@pytest.mark.parametrize(
    "begins", [(37, 86), (54, 82, 103), (41, 48, 98), (31, 47, 59, 99), (6, 33, 54, 105), (26, 42, 70, 122)]
)
def test_a_leak_that_was_cut_into_these_pieces_is_no_pass(begins: tuple[int, ...]) -> None:
    """Pieces of a leak that together look like growth that eases, or like one jump."""
    assert idle(soaked(130, (), leaks))[0] == "failed"
    outcome, text = idle(soaked(130, begins, leaks))
    assert outcome in ("failed", "inconclusive"), text


def test_a_leak_is_no_pass_wherever_it_is_cut() -> None:
    """Restarts at random turns, one to four of them."""
    for seed in range(60):
        chance = random.Random(seed)
        begins = chance.sample(range(2, 131), chance.randint(1, 4))
        outcome, text = idle(soaked(130, begins, leaks))
        assert outcome in ("failed", "inconclusive"), (sorted(begins), text)


def test_where_only_pieces_were_judged_it_is_said_what_would_settle_it() -> None:
    """Neither of the pieces is long enough by itself."""
    outcome, text = idle(soaked(130, (37, 86), leaks))
    assert outcome == "inconclusive"
    assert "told of 3 servers together" in text
    assert "120 turns or more on one server" in text


def test_what_one_long_piece_shows_stands() -> None:
    """A night that was taken up once in its first minutes passes as the undisturbed one."""
    assert idle(soaked(260, (), warms))[0] == "passed"
    assert idle(soaked(260, (9,), warms))[0] == "passed"
