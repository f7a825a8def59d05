"""How often verdicts on idle memory are wrong, on simulated series of known shape.

    python ci/bench/leaks.py [--runs 500] [--seed 1] [--markdown] [--only WORDS]

Every shape is drawn ``--runs`` times for each number of turns and judged by ``pytest_vram.checks.judge_idle``. The
table says how often each kind came out. Exits with 1 where a bound does not hold.

All in MiB, on a base of 3000. *Noise* is an AR(1) process, φ = 0.6, standard deviation 8 in all. Shapes:

- flat: white noise of sd 2; noise; noise with 5 % of turns 200 higher
- random walk: steps of sd 0.5 or 1 a turn, and the latter with noise
- warm-up: 500, or 100, × (1 − exp(−turn/τ)) with τ = n/5 or n/10, and noise
- step: 100 at a turn drawn among the judged ones but the last three, and noise
- five steps: 20 each at drawn turns, in what the allocator reserved; with the split, live tensors are flat and the
  driver's figure of the process is the reserved one with noise
- saw-tooth: 0 to 120 in cycles of 15 turns, and noise; the cycle given or to be found
- leak: 0.25 to 8 a turn in noise; in the saw-tooth; on a warm-up; in live tensors, with the split
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from pytest_vram.checks import judge_idle
from pytest_vram.stats import clopper_pearson

MIB = 1 << 20
BASE = 3000.0
PERIOD = 15
TURNS = (60, 120, 300)
Series = list[float]


class Shape(NamedTuple):
    """A shape: how it is drawn, how it is judged, and which share of which kind is at most or at least right."""

    name: str
    draw: Callable[[random.Random, int], Series | dict[str, Series]]
    kind: str = "leak"
    most: float | None = None
    least: float | None = None
    judged: Mapping[str, Any] = {}
    #: The number of turns from which the bound holds.
    since: int = 60


def noise(source: random.Random, turns: int, spread: float = 8.0, phi: float = 0.6) -> Series:
    """A stationary AR(1) process of the standard deviation ``spread``."""
    fresh = spread * math.sqrt(1 - phi * phi)
    value = source.gauss(0, spread)
    values = []
    for _ in range(turns):
        values.append(value)
        value = phi * value + source.gauss(0, fresh)
    return values


def flat(source: random.Random, turns: int) -> Series:
    """White noise."""
    return [source.gauss(0, 2) for _ in range(turns)]


def spikes(source: random.Random, turns: int) -> Series:
    """Noise, and one turn in twenty 200 higher."""
    return [value + 200 * (source.random() < 0.05) for value in noise(source, turns)]


def walk(spread: float, beside: float = 0.0) -> Callable[[random.Random, int], Series]:
    """A random walk."""

    def draw(source: random.Random, turns: int) -> Series:
        level, values = 0.0, []
        for other in noise(source, turns, beside) if beside else [0.0] * turns:
            level += source.gauss(0, spread)
            values.append(level + other)
        return values

    return draw


def warm_up(share: float, height: float = 500, rate: float = 0.0) -> Callable[[random.Random, int], Series]:
    """A curve towards a level, with a leak below it."""
    return lambda source, turns: [
        value + height * (1 - math.exp(-turn / (turns / share))) + rate * turn
        for turn, value in enumerate(noise(source, turns))
    ]


def step(source: random.Random, turns: int) -> Series:
    """One jump of 100."""
    at = source.randrange(max(10, math.ceil(turns / 5)), turns - 3)
    return [value + 100 * (turn >= at) for turn, value in enumerate(noise(source, turns))]


def five_steps(split: bool) -> Callable[[random.Random, int], Series | dict[str, Series]]:
    """Five segments of 20 that the allocator takes one after another and keeps."""

    def draw(source: random.Random, turns: int) -> Series | dict[str, Series]:
        places = sorted(source.randrange(turns) for _ in range(5))
        reserved = [20.0 * sum(turn >= at for at in places) for turn in range(turns)]
        process = [value + other + 300 for value, other in zip(reserved, noise(source, turns), strict=True)]
        if not split:
            return process
        live = [value - 200 for value in flat(source, turns)]
        return {"torch-allocated": live, "torch-reserved": reserved, "process": process}

    return draw


def saw(rate: float = 0.0) -> Callable[[random.Random, int], Series]:
    """A ramp that repeats, with a floor that rises by ``rate`` a turn."""
    return lambda source, turns: [
        value + 120 * (turn % PERIOD) / (PERIOD - 1) + rate * turn for turn, value in enumerate(noise(source, turns))
    ]


def leak(rate: float) -> Callable[[random.Random, int], Series]:
    """A straight rise."""
    return lambda source, turns: [value + rate * turn for turn, value in enumerate(noise(source, turns))]


def live_leak(rate: float) -> Callable[[random.Random, int], dict[str, Series]]:
    """A straight rise of live tensors, which the allocator follows in segments of 20, and the driver with it."""

    def draw(source: random.Random, turns: int) -> dict[str, Series]:
        live = [value + rate * turn for turn, value in enumerate(flat(source, turns))]
        reserved = [220 + 20 * math.ceil(max(live[: turn + 1]) / 20) for turn in range(turns)]
        process = [value + other + 300 for value, other in zip(reserved, noise(source, turns), strict=True)]
        return {"torch-allocated": live, "torch-reserved": [float(value) for value in reserved], "process": process}

    return draw


CYCLE = {"cycle": PERIOD}
SHAPES = [
    Shape("flat, white noise", flat, most=0.01),
    Shape("flat, noise", noise, most=0.01),
    Shape("flat, noise and spikes", spikes, most=0.01),
    Shape("random walk, sd 0.5", walk(0.5), most=0.03),
    Shape("random walk, sd 1", walk(1), most=0.03),
    Shape("random walk, sd 1, and noise", walk(1, 8), most=0.03),
    Shape("random walk, sd 4", walk(4)),
    Shape("warm-up, τ = n/5", warm_up(5), most=0.01),
    Shape("warm-up, τ = n/10", warm_up(10), most=0.01),
    Shape("warm-up of 100, τ = n/5", warm_up(5, 100), most=0.01, since=120),
    Shape("warm-up, τ = n/2", warm_up(2)),
    Shape("one step of 100", step, most=0.01),
    Shape("one step of 100, called so", step, "step", least=0.95),
    Shape("five steps of 20, one figure", five_steps(False)),
    Shape("five steps of 20, with the split", five_steps(True), most=0.05),
    Shape("saw-tooth, cycle given", saw(), most=0.01, judged=CYCLE),
    Shape("saw-tooth, cycle not given", saw(), most=0.01),
    *(Shape(f"leak of {rate}", leak(rate)) for rate in (0.25, 0.5)),
    *(Shape(f"leak of {rate}", leak(rate), least=0.95, since=120) for rate in (1, 2, 4, 8)),
    *(Shape(f"leak of {rate} in the saw-tooth", saw(rate), judged=CYCLE) for rate in (0.25, 0.5)),
    *(Shape(f"leak of {rate} in the saw-tooth", saw(rate), least=0.95, judged=CYCLE, since=120) for rate in (1, 4)),
    Shape("leak of 1 in the saw-tooth, cycle not given", saw(1), least=0.95, since=120),
    *(Shape(f"leak of {rate} in live tensors, with the split", live_leak(rate)) for rate in (0.25, 0.5)),
    *(
        Shape(f"leak of {rate} in live tensors, with the split", live_leak(rate), least=0.95, since=120)
        for rate in (1, 4)
    ),
    *(Shape(f"leak of {rate} on a warm-up, τ = n/10", warm_up(10, rate=rate)) for rate in (1, 4)),
]


def in_bytes(series: Sequence[float]) -> list[int]:
    """MiB about the base, as bytes."""
    return [round((BASE + value) * MIB) for value in series]


def rates(shape: Shape, turns: int, runs: int, seed: int) -> Counter[str]:
    """How often each kind came out of ``runs`` draws."""
    source = random.Random(f"{seed} {shape.name} {turns}")
    found: Counter[str] = Counter()
    for _ in range(runs):
        drawn = shape.draw(source, turns)
        readings = {n: in_bytes(s) for n, s in drawn.items()} if isinstance(drawn, dict) else in_bytes(drawn)
        found[judge_idle(readings, **shape.judged).kind] += 1
    return found


def row_of(shape: Shape, turns: int, runs: int, seed: int) -> dict[str, Any]:
    """One line of the table: shares of the kinds, and whether the bound holds."""
    found = rates(shape, turns, runs, seed)
    share = found[shape.kind] / runs
    bound = turns >= shape.since
    held = not bound or ((shape.most is None or share <= shape.most) and (shape.least is None or share >= shape.least))
    low, high = clopper_pearson(found[shape.kind], runs)
    return {
        "shape": shape.name,
        "turns": turns,
        "runs": runs,
        "kinds": {kind: count / runs for kind, count in sorted(found.items())},
        "kind": shape.kind,
        "share": share,
        "interval": [round(low, 4), round(high, 4)],
        "most": shape.most if bound else None,
        "least": shape.least if bound else None,
        "held": held,
    }


KINDS = ("leak", "step", "warming", "flat", "inconclusive")


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The shares in per cent, as Markdown."""
    lines = [f"| shape | turns | {' | '.join(KINDS)} | bound |", f"|---|--:|{'--:|' * len(KINDS)}---|"]
    for row in rows:
        shares = " | ".join(f"{100 * row['kinds'].get(kind, 0):.1f}" for kind in KINDS)
        bound = ""
        if row["most"] is not None:
            bound = f"{row['kind']} ≤ {100 * row['most']:.0f} %"
        elif row["least"] is not None:
            bound = f"{row['kind']} ≥ {100 * row['least']:.0f} %"
        lines.append(
            f"| {row['shape']} | {row['turns']} | {shares} | {bound}{'' if row['held'] else ' **not held**'} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Draw, judge and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=500, help="series of each shape and length")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--turns", type=int, nargs="*", default=TURNS)
    parser.add_argument("--only", default="", help="shapes whose name has this in it")
    parser.add_argument("--markdown", action="store_true", help="print a table")
    asked = parser.parse_args()
    begun = time.process_time()
    shapes = [shape for shape in SHAPES if asked.only in shape.name]
    rows = [row_of(shape, turns, asked.runs, asked.seed) for shape in shapes for turns in asked.turns]
    if asked.markdown:
        print(table(rows))
    else:
        print(json.dumps({"seconds": round(time.process_time() - begun, 1), "rows": rows}, indent=1))
    if not all(row["held"] for row in rows):
        sys.exit(1)


if __name__ == "__main__":
    main()
