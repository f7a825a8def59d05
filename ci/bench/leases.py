"""How parallel tests share a device: nothing beyond capacity, no deadlock, how near to the best packing.

Runs, from the project's folder, ``pytest -n 4`` over 40 tests with needs against a capacity for two, in random orders,
one after the other or two runs at the same time, and prints a table as JSON::

    python ci/bench/leases.py [--orders 50] [--kind equal|mixed|serial|plain] [--pair]

- ``most_held``: most bytes of leases at one moment, over all orders and both runs of a pair, of ``capacity``.
- ``to_best_median``, ``to_best_worst``: wall time from the moment when all workers had asked, divided by what no
  packing of the same leases can beat (area, tests that fit beside no other, number of workers).
- ``passed``: most later tests that went before a test; ``serial_overlaps``: tests that ran beside one that is alone.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from pytest_vram.leases import MOST_PASSED
from tests.plugin import lease_suites as suites

_WORKERS = 4
_DEADLOCK = 120.0


def run(folder: Path, shared: Path) -> subprocess.Popen[str]:
    """Start pytest in this folder."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST")}
    environment["PYTEST_VRAM_LEASE_FOLDER"] = str(shared)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", str(_WORKERS)]
    command += ["--vram-device=cpu", f"--vram-budget={suites.CAPACITY // 10**6}MB", "."]
    return subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True)


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--orders", type=int, default=50)
    parser.add_argument("--kind", choices=["equal", "mixed", "serial", "plain"], default="equal")
    parser.add_argument("--pair", action="store_true", help="two runs at the same time")
    parser.add_argument("--tests", type=int, default=40)
    parser.add_argument("--first", type=int, default=0, help="seed of the first order")
    chosen = parser.parse_args()
    ratios: list[float] = []
    held = passed = overlapping = deadlocks = failures = wide = 0
    for order in range(chosen.first, chosen.first + chosen.orders):
        with tempfile.TemporaryDirectory() as base:
            folders = [Path(base, str(number)) for number in range(2 if chosen.pair else 1)]
            logs = []
            for number, folder in enumerate(folders):
                folder.mkdir()
                logs.append(
                    suites.write(folder / "test_needs.py", 1000 * number + order, chosen.kind, tests=chosen.tests)
                )
            runs = [run(folder, Path(base, "leases")) for folder in folders]
            deadline = time.monotonic() + _DEADLOCK
            for one in runs:
                try:
                    output, _ = one.communicate(timeout=max(1.0, deadline - time.monotonic()))
                    if f"{chosen.tests} passed" not in output:
                        failures += 1
                        print(output, file=sys.stderr)
                except subprocess.TimeoutExpired:
                    deadlocks += 1
                    one.kill()
                    one.communicate()
            found = [suites.leases(suites.journal(folder)) for folder in folders]
            together = [lease for leases in found for lease in leases]
            held = max(held, suites.most_held(together))
            wide = max(wide, *(suites.widest(log) for log in logs))
            if together:
                passed = max(passed, *(lease.passed for lease in together), suites.most_passed(together))
                workers = _WORKERS * len(folders)
                ratios.append(suites.to_best(sorted(together, key=lambda lease: lease.granted), workers))
            for folder, log in zip(folders, logs, strict=True):
                overlapping += len(suites.overlaps(log, suites.serial(folder / "test_needs.py")))
    print(
        json.dumps(
            {
                "kind": chosen.kind,
                "orders": chosen.orders,
                "runs_at_once": 2 if chosen.pair else 1,
                "deadlocks": deadlocks,
                "failed_runs": failures,
                "most_held": held,
                "capacity": suites.CAPACITY,
                "to_best_median": round(statistics.median(ratios), 3) if ratios else None,
                "to_best_worst": round(max(ratios), 3) if ratios else None,
                "passed": passed,
                "passed_promise": MOST_PASSED,
                "serial_overlaps": overlapping,
                "widest": wide,
            },
            indent=2,
        )
    )


if __name__ == "__main__":
    main()
