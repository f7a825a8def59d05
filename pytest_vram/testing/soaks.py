"""A soak of a server that is a formula, as a process that can be killed at any moment.

``python -m pytest_vram.testing.soaks FOLDER SHAPE TURNS`` runs or resumes it: journal, lock, gates and verdict are
those of ``vram soak``; only the turns come from a formula instead of a server. The last line that it prints is one JSON
object with ``reason``, ``outcome``, ``turns`` and ``asked``, the number of the turn that it asked first.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any, Literal

from pytest_vram.errors import BackendDied
from pytest_vram.readings import Reading
from pytest_vram.sessions.soak import Began, Soak
from pytest_vram.sessions.soak_gates import Gates
from pytest_vram.sessions.soak_journal import SoakJournal, TurnLine, now
from pytest_vram.sessions.soak_series import Series
from pytest_vram.sessions.turns import Turn
from pytest_vram.spec import Amount, Limits
from pytest_vram.units import MIB

Shape = Literal["flat", "leak", "peak"]
SHAPES: tuple[Shape, ...] = ("flat", "leak", "peak")
#: Turns after which lengths repeat.
PERIOD = 6
#: Where the peak of the shape ``peak`` is over the limit.
OVER_AT = 140
LIMIT = Limits(text="2GiB", each=2 << 30)
GATES = Gates(limit=LIMIT, limit_from="--budget", context=4096)


class FormulaTalker:
    """A server that holds 900 MiB with some noise: flat, leaking 1.5 MiB a turn, or with one peak over the limit.

    The same turn has the same figures whenever it is asked. A server that is started anew has given back what it held.

    :param dies: numbers of turns in which the server is lost once. :param pause: seconds that a turn takes.
    :ivar asked: the number of every turn that was asked, in order.
    """

    def __init__(self, shape: Shape, *, seed: int = 0, dies: tuple[int, ...] = (), pause: float = 0.0) -> None:
        self.asked: list[int] = []
        self._shape, self._seed, self._pause = shape, seed, pause
        self._dies = set(dies)
        self._number = self._first = 1

    def begin(self, number: int, segment: int) -> Began:
        """Stand before the turn with this number."""
        self._number = self._first = number
        return Began(engine="formula", model="formula", pid=os.getpid(), build="1")

    def take(self) -> Turn:
        """The next turn.

        :raises BackendDied: the server is lost in it.
        """
        number = self._number
        self.asked.append(number)
        if self._pause:
            time.sleep(self._pause)
        if number in self._dies:
            self._dies.discard(number)
            raise BackendDied("The server was ended by signal 9.")
        self._number += 1
        return self.turn(number)

    def turn(self, number: int) -> Turn:
        """The turn with this number."""
        phase = (number - 1) % PERIOD
        noise = random.Random(f"{self._seed} {number}").gauss(0, 2)
        held = 900 + noise + (1.5 * (number - self._first) if self._shape == "leak" else 0)
        peak = held + 60 + (2000 if self._shape == "peak" and number == OVER_AT else 0)
        return Turn(
            number=number,
            conversation="formula",
            cycle=(number - 1) // PERIOD + 1,
            phase=phase,
            tokens_in=200 * (phase + 1),
            output_cap=64,
            tokens_out=40,
            context=240 + 200 * phase,
            context_size=4096,
            peak={"gpu0": _reading(peak)},
            idle={"gpu0": _reading(held)},
            latency=1.0,
            tokens_per_second=30 / (1 + phase / 10),
            calls=1,
            calls_right=1,
            at=now(),
        )

    def fate(self) -> bool:
        """It never runs out of memory."""
        return False


def _reading(mebibytes: float) -> Reading:
    return Reading(bytes=int(mebibytes * MIB), source="formula", scope="backend", device="gpu0", exact=True)


def soak(folder: Path, talker: FormulaTalker, turns: int) -> dict[str, Any]:
    """Run or resume the soak in a folder; what it showed.

    :raises BadInput: as :meth:`SoakJournal.open`.
    """
    series = Series(period=PERIOD, limit=GATES.limit, context=GATES.context)

    def fold(line: TurnLine) -> None:
        series.add(line.turn, line.spent)

    journal = SoakJournal.open(folder, {"formula": True}, name="formula", told=fold)
    try:
        made = Soak(journal, talker, series, GATES, Amount(text=f"{turns}turns", turns=turns))
        end = made.run()
        verdict = made.verdict(end)
    finally:
        journal.close()
    return {
        "reason": end.reason,
        "outcome": verdict.outcome,
        "text": verdict.text,
        "turns": series.turns,
        "asked": talker.asked[0] if talker.asked else None,
    }


def main(arguments: list[str]) -> int:
    """Soak as the command line says: FOLDER SHAPE TURNS [PAUSE [ROOM [DIES …]]].

    :param arguments: ROOM is the most bytes that the journal may have, 0 without a limit, so that its disk is full.
    """
    folder, shape, turns, pause, room, *dies = [*arguments, *["0"] * max(0, 5 - len(arguments))]
    if int(room):
        import resource

        resource.setrlimit(resource.RLIMIT_FSIZE, (int(room), int(room)))
    talker = FormulaTalker(next(one for one in SHAPES if one == shape), dies=tuple(map(int, dies)), pause=float(pause))
    sys.stdout.write(json.dumps(soak(Path(folder), talker, int(turns))) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
