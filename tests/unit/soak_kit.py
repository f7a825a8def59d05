"""A soak without a server: turns whose memory, speed and answers are given by formulas, and a clock that is told."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pytest_vram.errors import BackendDied
from pytest_vram.readings import Reading
from pytest_vram.sessions.soak import Began, Soak
from pytest_vram.sessions.soak_gates import Gates
from pytest_vram.sessions.soak_journal import SoakJournal, TurnLine
from pytest_vram.sessions.soak_series import Series
from pytest_vram.sessions.turns import Turn
from pytest_vram.spec import Amount, Limits
from pytest_vram.units import MIB

PERIOD = 6
FINGERPRINT: dict[str, Any] = {"backend": {"engine": "scripted", "options": {"ctx-size": 4096}}, "device": "cuda:0"}


class ManualClock:
    """Seconds that pass when they are told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def reading(size: float, *, source: str = "nvml-process", device: str = "gpu0", upper: float | None = None) -> Reading:
    """A figure of the device."""
    most = None if upper is None else int(upper)
    return Reading(bytes=int(size), source=source, scope="backend", device=device, exact=True, at_most=most)


def a_turn(number: int, *, leak: float = 0.0, rate: float = 30.0, seed: int = 0, **fields: Any) -> Turn:
    """The turn with this number of a server that holds 900 MiB and leaks so many MiB a turn."""
    noise = random.Random(f"{seed} {number}").gauss(0, 2)
    phase = (number - 1) % PERIOD
    idle = (900 + leak * number + noise) * MIB
    values: dict[str, Any] = {
        "number": number,
        "conversation": "nightly",
        "cycle": (number - 1) // PERIOD + 1,
        "phase": phase,
        "tokens_in": 200 * (phase + 1),
        "output_cap": 64,
        "tokens_out": 40,
        "context": 240 + 200 * phase,
        "context_size": 4096,
        "peak": {"gpu0": reading(idle + 60 * MIB)},
        "idle": {"gpu0": reading(idle)},
        "latency": 1.5,
        "tokens_per_second": rate / (1 + phase / 10),
        "calls": 1,
        "calls_right": 1,
        "at": "2026-03-01T00:00:00+00:00",
    }
    return Turn(**{**values, **fields})


class ScriptedTalker:
    """Gives the turns of a formula. ``asked`` has the number of every turn that was asked, in order.

    :param dies: numbers of turns in which the server dies once. :param before: called before each turn is answered.
    """

    def __init__(
        self,
        make: Callable[[int], Turn] = a_turn,
        *,
        clock: ManualClock | None = None,
        dies: tuple[int, ...] = (),
        always: tuple[int, ...] = (),
        memory: bool = False,
        before: Callable[[int], None] = lambda number: None,
    ) -> None:
        self.asked: list[int] = []
        self.begun: list[tuple[int, int]] = []
        self._make, self._clock, self._dies, self._always = make, clock, set(dies), always
        self._memory, self._before = memory, before
        self._number = 0

    def begin(self, number: int, segment: int) -> Began:
        self.begun.append((number, segment))
        self._number = number
        return Began(engine="scripted", model="m", pid=7, build="b1")

    def take(self) -> Turn:
        number = self._number
        self._before(number)
        if self._clock is not None:
            self._clock.now += 2.0
        if number in self._always or number in self._dies:
            self._dies.discard(number)
            raise BackendDied("The server was ended by signal 9.")
        self.asked.append(number)
        self._number += 1
        return self._make(number)

    def fate(self) -> bool:
        return self._memory


def soaking(
    folder: Path,
    talker: ScriptedTalker,
    amount: Amount,
    *,
    gates: Gates | None = None,
    clock: ManualClock | None = None,
    told: Callable[[str], None] = lambda line: None,
    fingerprint: dict[str, Any] | None = None,
    **more: Any,
) -> Soak:
    """A soak in this folder, taken up where one is there."""
    gates = gates or Gates(limit=Limits(text="2GiB", each=2 << 30), limit_from="--vram-budget", context=4096)
    series = Series(period=PERIOD, limit=gates.limit, context=gates.context)

    def fold(line: TurnLine) -> None:
        series.add(line.turn, line.spent)

    journal = SoakJournal.open(folder, fingerprint or FINGERPRINT, name="nightly", told=fold)
    return Soak(journal, talker, series, gates, amount, told=told, clock=clock or ManualClock(), **more)


def turns(count: int) -> Amount:
    """So many turns."""
    return Amount(text=f"{count}turns", turns=count)
