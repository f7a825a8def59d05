"""What a test that does nothing costs under a budget, beside pytest-memray and pytest-monitor in the same run.

Makes an environment of its own with this project and both peers, then runs suites of no-op tests, interleaved, and
prints JSON, and with ``--table`` the table of docs/measuring.md::

    python ci/bench/overhead.py [--rounds 7] [--tests 1000] [--folder DIR] [--table]

A session costs something once (``start_ms``: this project starts its keeper) and something per test. Two sizes of suite
tell them apart: in each round the larger less the smaller, and from that the same of pytest alone in the same round.
The median of the rounds counts, with the middle half of them beside it. ``cpu_per_test_us`` is processor time of the
pytest process, user and system; a loaded machine makes it longer only by what caches and clock rates do, while
``per_test_us``, wall-clock time, has what other processes take as well. Differences of whole sessions are no better
than a machine is quiet; ``inside_us``, processor time within the hooks of this project, is taken in one session and
holds on a loaded machine too (the timing itself, about 5 µs, is in it). The keeper of this project works beside pytest;
its share of a core stands in each report.
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
from typing import Any, NamedTuple

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
    "pytest-memray": (("-p", "no:vram", "-p", "no:monitor", "--memray"), 100),
    "pytest-monitor": (("-p", "no:vram", "--db", "{folder}/monitor.db"), 20),
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


#: A pytest plugin that times every hook of this project that is called for each test.
TIMED = """
import time
import pytest

spent = [0]
clock = time.thread_time_ns

def plain(function):
    def timed(*arguments):
        start = clock()
        try:
            return function(*arguments)
        finally:
            spent[0] += clock() - start
    return timed

def wrapper(function):
    def timed(*arguments):
        start = clock()
        inner = function(*arguments)
        next(inner)
        spent[0] += clock() - start
        result = yield
        start = clock()
        try:
            inner.send(result)
        except StopIteration as end:
            return end.value
        finally:
            spent[0] += clock() - start
    return timed

@pytest.hookimpl(trylast=True)
def pytest_collection_finish(session):
    manager = session.config.pluginmanager
    for plugin in manager.get_plugins():
        if type(plugin).__module__.startswith("pytest_vram"):
            for caller in manager.get_hookcallers(plugin):
                for hook in caller.get_hookimpls():
                    if hook.plugin is plugin and caller.name.startswith("pytest_runtest"):
                        hook.function = (wrapper if hook.wrapper else plain)(hook.function)

@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter):
    terminalreporter.write_line(f"inside: {spent[0]} ns")
"""


class Took(NamedTuple):
    """Seconds of one session: on the clock, and of processor time. ``said`` is its output."""

    wall: float
    worked: float
    said: str


def inside(python: Path, folder: Path, tests: int, rounds: int) -> list[float]:
    """Microseconds of processor time within this project's hooks per test, in each of several sessions."""
    arguments = ("-p", "vram_timed", *RUNS["pytest-vram, budget"][0])
    found = []
    for _ in range(rounds):
        said = seconds(python, folder, tests, arguments).said
        found.append(int(said.rpartition("inside: ")[2].split()[0]) / tests / 1e3)
    return found


def seconds(python: Path, folder: Path, count: int, arguments: tuple[str, ...]) -> Took:
    """How long one pytest session of ``count`` tests takes."""
    suite = folder / f"suite_{count}"
    suite.mkdir(exist_ok=True)
    (suite / "vram_timed.py").write_text(TIMED)
    (suite / "test_noop.py").write_text(SUITE.format(count=count))
    (suite / "pytest.ini").write_text("[pytest]\n")
    command = [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += [argument.format(folder=folder) for argument in arguments]
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("PYTEST", "PYTHONPATH"))}
    with tempfile.TemporaryFile("w+") as output:
        start = time.perf_counter()
        process = subprocess.Popen(command, cwd=suite, env=clean, stdout=output, stderr=subprocess.STDOUT)
        _, status, used = os.wait4(process.pid, 0)
        took = time.perf_counter() - start
        process.returncode = os.waitstatus_to_exitcode(status)
        output.seek(0)
        text = output.read()
    if process.returncode or f"{count} passed" not in text:
        sys.exit(f"{' '.join(command)} did not pass: {text[-3000:]}")
    return Took(took, used.ru_utime + used.ru_stime, text)


class Cost(NamedTuple):
    """What one round says: microseconds per test, on the clock and worked, and seconds of a session without tests."""

    each: float
    worked: float
    start: float


def one(python: Path, folder: Path, name: str, tests: int) -> Cost:
    """One round of one of the runs, pytest's own part included."""
    arguments, most = RUNS[name]
    many = min(tests, most)
    few = min(FEW, many // 2)
    small, large = (seconds(python, folder, count, arguments) for count in (few, many))
    each = (large.wall - small.wall) / (many - few)
    return Cost(each * 1e6, (large.worked - small.worked) / (many - few) * 1e6, small.wall - each * few)


def measure(python: Path, folder: Path, tests: int, rounds: int) -> dict[str, list[Cost]]:
    """Name → what each round says."""
    found: dict[str, list[Cost]] = {name: [] for name in RUNS}
    for number in range(rounds + 1):
        for name in RUNS:
            cost = one(python, folder, name, tests)
            if number:  # the first one fills caches
                found[name].append(cost)
    return found


def rows(found: dict[str, list[Cost]]) -> dict[str, dict[str, Any]]:
    """What each costs beyond pytest alone in the same round."""
    alone = found["pytest alone"]
    table: dict[str, dict[str, Any]] = {}
    for name, costs in found.items():
        if name == "pytest alone":
            beyond = [Cost(cost.each, cost.worked, cost.start) for cost in costs]
        else:
            beyond = [
                Cost(cost.each - base.each, cost.worked - base.worked, cost.start - base.start)
                for cost, base in zip(costs, alone, strict=True)
            ]
        table[name] = {
            "per_test_us": round(statistics.median(cost.each for cost in beyond), 1),
            "per_test_us_middle_half": _middle_half([cost.each for cost in beyond]),
            "cpu_per_test_us": round(statistics.median(cost.worked for cost in beyond), 1),
            "cpu_per_test_us_middle_half": _middle_half([cost.worked for cost in beyond]),
            "start_ms": round(statistics.median(cost.start for cost in beyond) * 1e3, 1),
        }
    budget = table["pytest-vram, budget"]["cpu_per_test_us"]
    for name in PEERS:
        # Below a microsecond the ratio says more of the clock than of the plugins.
        table[name]["times_pytest_vram"] = round(table[name]["cpu_per_test_us"] / max(budget, 1.0), 1)
    return table


def _middle_half(values: list[float]) -> list[float]:
    if len(values) < 3:
        return [round(min(values), 1), round(max(values), 1)]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return [round(low, 1), round(high, 1)]


def markdown(table: dict[str, dict[str, Any]]) -> str:
    """The table of the documentation."""
    lines = [
        "| beyond pytest alone | µs of processor time per no-op test (middle half of the rounds) | µs on the clock |"
        " within the hooks, µs | once per session, ms | times pytest-vram |",
        "|---|---|---|---|---|---|",
    ]
    for name, row in table.items():
        if name != "pytest alone":
            low, high = row["cpu_per_test_us_middle_half"]
            cells = [
                f"{row['cpu_per_test_us']} ({low} to {high})",
                row["per_test_us"],
                row.get("inside_us", ""),
                row["start_ms"],
                row.get("times_pytest_vram", ""),
            ]
            lines.append(f"| {name} | {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tests", type=int, default=1000)
    parser.add_argument("--folder", type=Path, help="keep the environment here, for the next time")
    parser.add_argument("--table", action="store_true", help="print the table of the documentation instead of JSON")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = (asked.folder or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        python = environment(folder)
        table = rows(measure(python, folder, asked.tests, asked.rounds))
        spent = inside(python, folder, asked.tests, asked.rounds)
        table["pytest-vram, budget"]["inside_us"] = round(statistics.median(spent), 1)
        table["pytest-vram, budget"]["inside_us_middle_half"] = _middle_half(spent)
    if asked.table:
        print(markdown(table))
        return
    about = {"rounds": asked.rounds, "tests": asked.tests, "python": platform.python_version(), "cores": os.cpu_count()}
    print(json.dumps({**about, "rows": table}, indent=1))


if __name__ == "__main__":
    main()
