"""What a test that does nothing costs under a budget, beside pytest-memray and pytest-monitor in the same run.

Makes an environment of its own with this project and both peers, then runs suites of no-op tests, interleaved, and
prints JSON, and with ``--table`` the table of docs/measuring.md::

    python ci/bench/overhead.py [--rounds 5] [--tests 1000] [--folder DIR] [--table]

A session costs something once (``start_ms``: this project starts its keeper) and something per test (``per_test_us``).
Two sizes of suite tell them apart: both are beyond pytest alone, which runs in every round as well. The median of the
rounds is given, and their span.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

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


def seconds(python: Path, folder: Path, count: int, arguments: tuple[str, ...]) -> float:
    """Wall-clock seconds of one pytest session of ``count`` tests."""
    suite = folder / f"suite_{count}"
    suite.mkdir(exist_ok=True)
    (suite / "test_noop.py").write_text(SUITE.format(count=count))
    (suite / "pytest.ini").write_text("[pytest]\n")
    command = [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += [argument.format(folder=folder) for argument in arguments]
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("PYTEST", "PYTHONPATH"))}
    start = time.perf_counter()
    done = subprocess.run(command, cwd=suite, env=clean, capture_output=True, text=True, timeout=600)
    took = time.perf_counter() - start
    if done.returncode or f"{count} passed" not in done.stdout:
        sys.exit(f"{' '.join(command)} did not pass: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    return took


def measure(python: Path, folder: Path, tests: int, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Name → start (ms) and cost per test (µs) of each round, pytest's own included."""
    found: dict[str, dict[str, list[float]]] = {name: {"start": [], "each": []} for name in RUNS}
    for number in range(rounds + 1):  # the first one fills caches
        for name, (arguments, most) in RUNS.items():
            many = min(tests, most)
            few_took = seconds(python, folder, min(FEW, many // 2), arguments)
            many_took = seconds(python, folder, many, arguments)
            each = (many_took - few_took) / (many - min(FEW, many // 2))
            if number:
                found[name]["each"].append(each * 1e6)
                found[name]["start"].append((few_took - each * min(FEW, many // 2)) * 1e3)
    return found


def rows(found: dict[str, dict[str, list[float]]]) -> dict[str, dict[str, object]]:
    """Medians beyond pytest alone, by round, so that a machine that slows down slows both."""
    alone = found["pytest alone"]
    table: dict[str, dict[str, object]] = {
        "pytest alone": {"per_test_us": round(statistics.median(alone["each"]), 1)},
    }
    for name, figures in found.items():
        if name == "pytest alone":
            continue
        each = [mine - plain for mine, plain in zip(figures["each"], alone["each"], strict=True)]
        start = [mine - plain for mine, plain in zip(figures["start"], alone["start"], strict=True)]
        table[name] = {
            "per_test_us": round(statistics.median(each), 1),
            "per_test_us_span": [round(min(each), 1), round(max(each), 1)],
            "start_ms": round(statistics.median(start), 1),
        }
    budget = table["pytest-vram, budget"]["per_test_us"]
    assert isinstance(budget, float)
    for name in PEERS:
        cost = table[name]["per_test_us"]
        assert isinstance(cost, float)
        # Below a microsecond the ratio says more of the clock than of the plugins.
        table[name]["times_pytest_vram"] = round(cost / max(budget, 1.0), 1)
    return table


def markdown(table: dict[str, dict[str, object]]) -> str:
    """The table of the documentation."""
    lines = [
        "| beyond pytest alone | µs per no-op test (median, span) | once per session, ms | times pytest-vram |",
        "|---|---|---|---|",
    ]
    for name, row in table.items():
        if name == "pytest alone":
            continue
        span = row["per_test_us_span"]
        assert isinstance(span, list)
        lines.append(
            f"| {name} | {row['per_test_us']} ({span[0]} to {span[1]}) | {row['start_ms']} |"
            f" {row.get('times_pytest_vram', '')} |"
        )
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
