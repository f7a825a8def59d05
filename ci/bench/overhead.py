"""What a test that does nothing costs under a budget, beside pytest-memray and pytest-monitor in the same run.

Makes an environment of its own with this project and both peers, then runs suites of no-op tests, interleaved, and
prints JSON, and with ``--table`` the table of docs/measuring.md::

    python ci/bench/overhead.py [--rounds 5] [--tests 1000] [--folder DIR] [--table]

A session costs something once (``start_ms``: this project starts its keeper) and something per test (``per_test_us``).
Two sizes of suite tell them apart, and the shortest of all rounds counts for each, as whatever else a machine does only
adds time. Both are beyond pytest alone, which runs in every round as well. ``cpu_per_test_us`` is processor time of the
pytest process alone; the keeper of this project works beside it, and its share of a core stands in each report.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PEERS = ("pytest-memray", "pytest-monitor")
#: The newest on which all of them work: pytest-monitor 1.6.6 breaks at the end of each module on pytest 9.
PYTEST = "pytest==8.4.*"
FEW = 100
#: Name → (arguments, most tests that it gets: slower ones need no thousand to be measured).
RUNS: dict[str, tuple[tuple[str, ...], int]] = {
    "pytest alone": (("-p", "no:vram", "-p", "no:monitor"), 1 << 30),
    "pytest-vram, budget": (("-p", "no:monitor", "--vram-device=cpu", "--vram-budget=4GB"), 1 << 30),
    "pytest-vram, no budget": (("-p", "no:monitor", "--vram-device=cpu"), 1 << 30),
    "pytest-memray": (("-p", "no:vram", "-p", "no:monitor", "--memray"), 400),
    "pytest-monitor": (("-p", "no:vram", "--db", "{folder}/monitor.db"), 40),
}
SUITE = "import pytest\n\n\n@pytest.mark.parametrize('number', range({count}))\ndef test_noop(number):\n    pass\n"


def environment(folder: Path) -> Path:
    """An environment with this project and its peers; gives its interpreter."""
    place = folder / "venv"
    python = place / "bin" / "python"
    if not python.exists():
        venv.create(place, with_pip=True)
        subprocess.run(
            [str(python), "-m", "pip", "install", "-q", str(ROOT), PYTEST, *PEERS], check=True, timeout=600, cwd=folder
        )
    return python


def seconds(python: Path, folder: Path, count: int, arguments: tuple[str, ...]) -> tuple[float, float]:
    """Wall-clock seconds and processor time of one pytest session of ``count`` tests."""
    suite = folder / f"suite_{count}"
    suite.mkdir(exist_ok=True)
    (suite / "test_noop.py").write_text(SUITE.format(count=count))
    (suite / "pytest.ini").write_text("[pytest]\n")
    command = [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += [argument.format(folder=folder) for argument in arguments]
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("PYTEST", "PYTHONPATH"))}
    before = _processor_time()
    start = time.perf_counter()
    done = subprocess.run(command, cwd=suite, env=clean, capture_output=True, text=True, timeout=600)
    took = time.perf_counter() - start
    if done.returncode or f"{count} passed" not in done.stdout:
        sys.exit(f"{' '.join(command)} did not pass: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    return took, _processor_time() - before


def _processor_time() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


class Cost(NamedTuple):
    """Seconds of the shortest sessions of few and of many tests: wall clock and processor time."""

    few: int
    many: int
    wall: tuple[float, float]
    worked: tuple[float, float]

    @property
    def each(self) -> float:
        """Microseconds per test."""
        return (self.wall[1] - self.wall[0]) / (self.many - self.few) * 1e6

    @property
    def cpu(self) -> float:
        """Microseconds of processor time per test."""
        return (self.worked[1] - self.worked[0]) / (self.many - self.few) * 1e6

    @property
    def start(self) -> float:
        """Milliseconds of a session without tests."""
        return self.wall[0] * 1e3 - self.each * self.few / 1e3


def measure(python: Path, folder: Path, tests: int, rounds: int) -> dict[str, Cost]:
    """Name → what it costs, pytest's own part included."""
    took: dict[tuple[str, int], list[tuple[float, float]]] = {}
    sizes = {name: (min(FEW, min(tests, most) // 2), min(tests, most)) for name, (_, most) in RUNS.items()}
    for _ in range(rounds + 1):  # the first one fills caches
        for name, (arguments, _most) in RUNS.items():
            for count in sizes[name]:
                took.setdefault((name, count), []).append(seconds(python, folder, count, arguments))
    found: dict[str, Cost] = {}
    for name, (few, many) in sizes.items():
        wall = tuple(min(wall for wall, _ in took[name, count]) for count in (few, many))
        worked = tuple(min(cpu for _, cpu in took[name, count]) for count in (few, many))
        found[name] = Cost(few, many, (wall[0], wall[1]), (worked[0], worked[1]))
    return found


def rows(found: dict[str, Cost]) -> dict[str, dict[str, float]]:
    """What each costs beyond pytest alone."""
    alone = found["pytest alone"]
    table = {"pytest alone": {"per_test_us": round(alone.each, 1), "cpu_per_test_us": round(alone.cpu, 1)}}
    for name, cost in found.items():
        if name != "pytest alone":
            table[name] = {
                "per_test_us": round(cost.each - alone.each, 1),
                "cpu_per_test_us": round(cost.cpu - alone.cpu, 1),
                "start_ms": round(cost.start - alone.start, 1),
            }
    budget = table["pytest-vram, budget"]["per_test_us"]
    for name in PEERS:
        # Below a microsecond the ratio says more of the clock than of the plugins.
        table[name]["times_pytest_vram"] = round(table[name]["per_test_us"] / max(budget, 1.0), 1)
    return table


def markdown(table: dict[str, dict[str, float]]) -> str:
    """The table of the documentation."""
    lines = [
        "| beyond pytest alone | µs per no-op test | of it processor time | once per session, ms | times pytest-vram |",
        "|---|---|---|---|---|",
    ]
    for name, row in table.items():
        if name != "pytest alone":
            cells = [row["per_test_us"], row["cpu_per_test_us"], row["start_ms"], row.get("times_pytest_vram", "")]
            lines.append(f"| {name} | {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tests", type=int, default=1000)
    parser.add_argument("--folder", type=Path, help="keep the environment here, for the next time")
    parser.add_argument("--table", action="store_true", help="print the table of the documentation instead of JSON")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = (asked.folder or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        table = rows(measure(environment(folder), folder, asked.tests, asked.rounds))
    if asked.table:
        print(markdown(table))
        return
    about = {"rounds": asked.rounds, "tests": asked.tests, "python": platform.python_version(), "cores": os.cpu_count()}
    print(json.dumps({**about, "rows": table}, indent=1))


if __name__ == "__main__":
    main()
