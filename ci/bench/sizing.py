"""How exact the predicted weights, KV cache and recurrent state are: many drawn models, each booted by a real engine.

Run from a checkout; prints a table (the one in ``docs/sizing-accuracy.md``)::

    python ci/bench/sizing.py [--configurations 300] [--architecture llama] [--seed 0]

Every configuration draws a model and settings (slots, unified or not, cache types, flash attention, layers on the
device, experts on the host, overrides, one or two software GPUs), writes the model sparsely, boots llama-server on it
and compares each device's buffers with the prediction. An error is what lies outside of the printed digits (0.005 MiB
a line). Ends with 1 where any is above 0.01 MiB, or where the engine refused more than one in twenty of the draws.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.rehearsal import sizing_boots as boots

MIB = 1 << 20
BUCKETS = ("weights", "kv", "recurrent")
ALLOWED = 0.01


def measure(architecture: str, wanted: int, seed: int, executable: Path, folder: Path, gpus: boots.Gpus) -> list[str]:
    """One row of the table: its configurations, buffers and worst errors."""
    worst = dict.fromkeys(BUCKETS, 0.0)
    seen = dict.fromkeys(BUCKETS, 0)
    done = refused = 0
    began = time.monotonic()
    for number in range(wanted + wanted // 20):
        if done == wanted:
            break
        one = boots.draw(architecture, random.Random(f"{seed} {architecture} {number}"))
        try:
            rows = boots.compare(executable, folder, one, gpus)
        except AssertionError as error:
            refused += 1
            print(f"{architecture}, draw {number}: {error}", file=sys.stderr)
            continue
        done += 1
        for row in rows:
            seen[row.bucket] += 1
            worst[row.bucket] = max(worst[row.bucket], row.error / MIB)
            if row.error / MIB > ALLOWED:
                print(f"{architecture}, draw {number}: {row} with {' '.join(one.arguments)}", file=sys.stderr)
    errors = [f"{worst[bucket]:.2f}" if seen[bucket] else "none" for bucket in BUCKETS]
    print(f"{architecture}: {done} configurations in {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    return [architecture, str(done), str(sum(seen.values())), *errors, str(refused)]


def main() -> int:
    """Print the table; 1 where a prediction was wrong."""
    parser = argparse.ArgumentParser(description="Predicted against printed buffers over drawn configurations.")
    parser.add_argument("--configurations", type=int, default=300, help="for each architecture")
    parser.add_argument("--architecture", action="append", choices=list(boots.DRAWN), help="one of these only")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    executable = boots.first_engine()
    asked = given.architecture or list(boots.DRAWN)
    with tempfile.TemporaryDirectory() as folder, boots.Gpus(2) as gpus:
        rows = [
            measure(architecture, given.configurations, given.seed, executable, Path(folder), gpus)
            for architecture in asked
        ]
    print("| architecture | configurations | buffers | weights | KV | recurrent | refused |")
    print("|---|--:|--:|--:|--:|--:|--:|")
    for row in rows:
        print("| " + " | ".join(row) + " |")
    wrong = any(cell != "none" and float(cell) > ALLOWED for row in rows for cell in row[3:6])
    return 1 if wrong or any(int(row[1]) < given.configurations for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
