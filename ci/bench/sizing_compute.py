"""How exact the predicted compute buffers are: the table of dry runs, and many drawn models booted by a real engine.

Run from a checkout; prints two tables (those in ``docs/sizing-accuracy.md``)::

    python ci/bench/sizing_compute.py [--configurations 100] [--architecture llama] [--seed 0] [--no-table]

The first takes every row of ``tests/data/compute-buffers.csv.gz`` that is not marked as an exception; a range counts by
its farther end. The second draws models and settings, boots llama-server on each and compares each device's compute
and output buffers. Ends with 1 where a bound of the tests is broken over the full count.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from pytest_vram.sizing import compute_devices
from tests.rehearsal import compute_boots
from tests.rehearsal import sizing_boots as boots
from tests.unit import compute_rows

#: Name, device kind, columns, column of exceptions, largest buffer in MiB, bounds of the median and of 19 in 20.
BACKENDS = (
    ("CUDA (simulated)", "cuda", "cuda_sim", "excluded_cuda", float("inf"), 0.01, 0.13),
    ("Vulkan, up to 1 GiB", "vulkan", "vk1g", "excluded_vk", 1024.0, 0.035, 0.15),
    ("Vulkan in one piece", "vulkan", "vk", "excluded_vk", float("inf"), 0.035, 0.15),
)
MEDIAN = 0.08  # over drawn models, on software GPUs


def quantiles(errors: Sequence[float]) -> tuple[float, float, float]:
    """Median, 95th percentile and maximum."""
    ordered = sorted(errors)
    return ordered[len(ordered) // 2], ordered[min(len(ordered) - 1, len(ordered) * 95 // 100)], ordered[-1]


def percent(*errors: float) -> list[str]:
    """In per cent."""
    return [f"{100 * error:.2f}" for error in errors]


def table() -> bool:
    """Print the table of dry runs; whether all bounds hold."""
    print("| backend | rows | device: median % | 95 % | worst % | host: median % | 95 % | worst % |")
    print("|---|--:|--:|--:|--:|--:|--:|--:|")
    good = True
    piece = compute_devices.VULKAN_PIECE
    for name, kind, columns, excluded, most, median, high in BACKENDS:
        compute_devices.VULKAN_PIECE = 1 << 62 if columns == "vk" else piece
        found: dict[str, list[tuple[float, float]]] = {}
        for row in compute_rows.rows():
            if row[f"{columns}_gpu"] and not row[excluded] and float(row[f"{columns}_gpu"]) <= most:
                errors = compute_rows.errors(row, kind, columns)
                for group in ("", row["kind"].partition(" ")[2], row["arch"]):
                    found.setdefault(group, []).append(errors)
        for group, rows in sorted(found.items()):
            gpu, host = (quantiles([errors[side] for errors in rows]) for side in (0, 1))
            label = f"{name}: {group}" if group else f"**{name}**"
            print("| " + " | ".join([label, str(len(rows)), *percent(*gpu, *host)]) + " |", flush=True)
        gpu = quantiles([errors[0] for errors in found[""]])
        good = good and gpu[0] <= median and gpu[1] <= high
    compute_devices.VULKAN_PIECE = piece
    return good


def drawn(architecture: str, wanted: int, seed: int, executable: Path, folder: Path, gpus: boots.Gpus) -> list[float]:
    """Errors of one architecture's buffers; prints its row."""
    found: list[float] = []
    refused = 0
    began = time.monotonic()
    for number in range(wanted):
        one = boots.draw(architecture, random.Random(f"{seed} {architecture} {number}"))
        try:
            found += [row.error for row in compute_boots.compare(executable, folder, one, gpus)]
        except AssertionError as error:
            refused += 1
            print(f"{architecture}, draw {number}: {error}", file=sys.stderr)
    exact = 100 * sum(error <= 0.001 for error in found) / max(1, len(found))
    cells = [architecture, str(wanted - refused), str(len(found)), f"{exact:.0f}", *percent(*quantiles(found))]
    print("| " + " | ".join(cells) + " |", flush=True)
    print(f"{architecture}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    return found


def main() -> int:
    """Print the tables; 1 where a bound is broken."""
    parser = argparse.ArgumentParser(description="Predicted against printed compute buffers.")
    parser.add_argument("--configurations", type=int, default=100, help="drawn for each architecture (default: 100)")
    parser.add_argument("--architecture", action="append", choices=sorted(boots.DRAWN), help="may be repeated")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-table", action="store_true", help="leave out the table of dry runs")
    given = parser.parse_args()
    good = given.no_table or table()
    print()
    print("| architecture | configurations | buffers | exact % | median % | 95 % | worst % |")
    print("|---|--:|--:|--:|--:|--:|--:|")
    executable = boots.first_engine()
    errors: list[float] = []
    with tempfile.TemporaryDirectory() as folder, boots.Gpus(2) as gpus:
        for architecture in given.architecture or boots.DRAWN:
            errors += drawn(architecture, given.configurations, given.seed, executable, Path(folder), gpus)
    return 0 if good and quantiles(errors)[0] <= MEDIAN else 1


if __name__ == "__main__":
    raise SystemExit(main())
