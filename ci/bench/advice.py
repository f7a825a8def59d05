"""Whether advice helps: many deployments that do not fit, each changed as advised and asked of a real engine again.

Run from a checkout; prints a table (the one in ``docs/advice.md``)::

    python ci/bench/advice.py [--deployments 12] [--kind dense] [--seed 0]

Every deployment draws a model and settings for one or two software GPUs and a limit that it is over. The engine's dry
run gives the exact buffers before, with each change that is advised alone, and with the change (or changes) that are
said to be enough. Then small deployments are booted on software GPUs that are too small for them, until the engine
really runs out of memory, and again as the advice from that boot's log says. Ends with 1 where following the advice did
not make a deployment fit, or where a saving of weights or KV cache is off by more than 2 % and 4 MiB.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from pytest_vram.errors import EngineRefused
from tests.rehearsal import advice_trials as trials
from tests.rehearsal.sizing_boots import Gpus, first_engine

MIB = 1 << 20


def measure(kind: str, wanted: int, seed: int, bench: trials.Bench) -> tuple[list[str], int]:
    """One row of the table, and how many deployments went wrong."""
    outcomes: list[trials.Outcome] = []
    wrong = refused = 0
    began = time.monotonic()
    for number in range(2 * wanted):
        if len(outcomes) == wanted:
            break
        case = trials.draw(kind, random.Random(f"{seed} {kind} {number}"))
        try:
            outcome = bench.tried(case, every=True)
        except EngineRefused as error:
            refused += 1
            print(f"{kind}, draw {number}: {error}", file=sys.stderr)
            continue
        outcomes.append(outcome)
        bad = trials.over(outcome)
        if not outcome.fits or bad:
            wrong += 1
            print(f"{kind}, draw {number}: {case.options} {outcome.limit=} {outcome.after=} {bad}", file=sys.stderr)
    rows = [row for outcome in outcomes for row in outcome.rows]
    worst = {
        group: max((row.error for row in rows if row.group == group), default=0) / MIB for group in ("weights", "kv")
    }
    together = [outcome.together for outcome in outcomes if outcome.together is not None]
    compute = sorted(100 * row.error / row.held for row in rows if row.group == "compute" and row.held >= 64 << 10)
    print(
        f"{kind}: {len(outcomes)} in {time.monotonic() - began:.0f} s, {refused} refused", file=sys.stderr, flush=True
    )
    return [
        kind,
        str(len(outcomes)),
        str(sum(outcome.fits for outcome in outcomes)),
        str(len({(id(outcome), row.setting) for outcome in outcomes for row in outcome.rows})),
        f"{worst['weights']:.2f}",
        f"{worst['kv']:.2f}",
        str(len(together)),
        f"{max((row.error for row in together), default=0) / MIB:.2f}",
        *(f"{compute[int(part * (len(compute) - 1))]:.2f}" if compute else "none" for part in (0.5, 0.95, 1.0)),
    ], wrong + (len(outcomes) < wanted)


def main() -> int:
    """Print the table; 1 where advice was wrong."""
    parser = argparse.ArgumentParser(description="Advice followed, and what a real engine says then.")
    parser.add_argument("--deployments", type=int, default=12, help="of each kind of model")
    parser.add_argument("--kind", action="append", choices=list(trials.KINDS), help="one of these only")
    parser.add_argument("--booted", type=int, default=12, help="deployments that really run out of memory")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    executable = first_engine()
    wrong = 0
    rows = []
    with tempfile.TemporaryDirectory() as folder, Gpus(2) as gpus:
        bench = trials.Bench(executable, Path(folder), gpus)
        for kind in given.kind or trials.KINDS:
            row, bad = measure(kind, given.deployments, given.seed, bench)
            rows.append(row)
            wrong += bad
    print(
        "| model | deployments | fit as advised | changes | weights, MiB | KV, MiB | several at once | all, MiB |"
        " compute: median % | 95 % | worst % |"
    )
    print("|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|")
    for row in rows:
        print("| " + " | ".join(row) + " |")
    booted: list[trials.Booted] = []
    for number in range(3 * given.booted):
        if len(booted) == given.booted:
            break
        one = trials.booted(executable, random.Random(f"{given.seed} boot {number}"))
        booted.extend([] if one is None else [one])
    helped = [one for one in booted if one.after is None]
    print(f"\nreally out of memory: {len(booted)} boots, {len(helped)} of which start as advised")
    for one in booted:
        if one.after is not None:
            print(f"{one.flags}: {one.after}", file=sys.stderr)
    return 1 if wrong or len(helped) < len(booted) else 0


if __name__ == "__main__":
    raise SystemExit(main())
