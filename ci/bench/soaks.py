"""Soaks that are killed at random moments: what is committed stays, and the verdict is never turned round.

    python ci/bench/soaks.py [--soaks 100] [--turns 240] [--seed 0] [--json FILE]

Each soak runs in a process of its own, on turns of a formula (``pytest_vram.testing.soaks``: flat, leaking, or with
one peak over the limit), with the journal of ``vram soak``. It is killed (SIGKILL), finds its disk full, or loses its
server, at random moments, until it ends. After each death the journal must begin with what was in it before, have every
turn once and in order, and the next process must ask the turn after the last committed one. The verdict must be that of
the undisturbed soak, or inconclusive.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from pytest_vram.sessions.soak_journal import FILE_NAME, read
from pytest_vram.testing.soaks import SHAPES, FormulaTalker, soak

#: Seconds of one turn, so that a kill can fall between two of them.
PAUSE = 0.001
#: Deaths of one soak, after which it is left alone.
MOST_DEATHS = 4
WAYS = ("kill", "disk", "server")


def main() -> int:
    """Run them; 1 where one breaks a promise."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--soaks", type=int, default=100)
    parser.add_argument("--turns", type=int, default=240)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    begun = time.monotonic()
    rows = [trial(random.Random(f"{options.seed} {number}"), options.turns) for number in range(options.soaks)]
    broken = [row for row in rows if row["broken"]]
    print(f"{len(rows)} soaks of {options.turns} turns, seed {options.seed}, {time.monotonic() - begun:.0f} s")
    print("| shape | undisturbed | soaks | deaths | same verdict | inconclusive | turned round |")
    print("|---|---|---|---|---|---|---|")
    for shape in SHAPES:
        own = [row for row in rows if row["shape"] == shape]
        kinds = Counter(row["kind"] for row in own)
        wanted = own[0]["wanted"] if own else "-"
        deaths = sum(sum(row["deaths"].values()) for row in own)
        print(
            f"| {shape} | {wanted} | {len(own)} | {deaths} | {kinds['same']} | {kinds['inconclusive']} |"
            f" {kinds['turned']} |"
        )
    ways: Counter[str] = Counter()
    for row in rows:
        ways.update(row["deaths"])
    print("deaths: " + ", ".join(f"{way} {ways[way]}" for way in WAYS))
    for row in broken:
        print(f"BROKEN: {row}")
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return 1 if broken else 0


def trial(chance: random.Random, turns: int, most_deaths: int = MOST_DEATHS) -> dict[str, Any]:
    """One soak, killed until it ends. :returns: its shape, deaths, verdicts, and which promise it broke."""
    shape = chance.choice(SHAPES)
    with tempfile.TemporaryDirectory(prefix="vram-soak-") as name:
        wanted = soak(Path(name, "undisturbed"), FormulaTalker(shape), turns)["outcome"]
        folder = Path(name, "killed")
        deaths: Counter[str] = Counter()
        broken: list[str] = []
        found: dict[str, Any] = {}
        while not found:
            way = chance.choice(WAYS) if sum(deaths.values()) < most_deaths else ""
            before = _bytes(folder)
            committed = read(folder).turns if before else 0
            whole = before[: len(before) - read(folder).torn] if before else b""
            answer = _run(folder, shape, turns, way, committed, len(before), chance)
            after = _bytes(folder)
            if not after.startswith(whole):
                broken.append(f"what was committed before death {sum(deaths.values())} is gone")
            contents = read(folder)  # numbers that are missing, doubled or out of order are refused by it
            if answer is None or answer["reason"] == "disk":
                deaths[way] += 1
            else:
                found = answer
                deaths["server"] += len(contents.losses) - deaths["server"]
            if answer is not None and answer["asked"] not in (None, committed + 1):
                broken.append(f"turn {answer['asked']} was asked behind turn {committed}")
    outcome = found["outcome"]
    kind = "same" if outcome == wanted else "inconclusive" if outcome == "inconclusive" else "turned"
    if kind == "turned":
        broken.append(f"{outcome} instead of {wanted}")
    return {
        "shape": shape,
        "wanted": wanted,
        "outcome": outcome,
        "kind": kind,
        "deaths": dict(deaths),
        "broken": broken,
    }


def _bytes(folder: Path) -> bytes:
    try:
        return (folder / FILE_NAME).read_bytes()
    except FileNotFoundError:
        return b""


def _run(
    folder: Path, shape: str, turns: int, way: str, committed: int, size: int, chance: random.Random
) -> dict[str, Any] | None:
    """One process of a soak; what it said, or ``None`` where it was killed."""
    room = size + chance.randrange(1, 40_000) if way == "disk" else 0
    dies = [str(committed + chance.randrange(1, turns))] if way == "server" else []
    command = [sys.executable, "-m", "pytest_vram.testing.soaks", str(folder), shape, str(turns), str(PAUSE), str(room)]
    with subprocess.Popen([*command, *dies], stdout=subprocess.PIPE) as process:
        if way == "kill":
            _wait_for(folder, size + chance.randrange(1, 150_000), process)
            process.kill()
        assert process.stdout is not None
        said = process.stdout.read()
    if not said.endswith(b"\n"):
        return None
    answer: dict[str, Any] = json.loads(said)
    return answer


def _wait_for(folder: Path, size: int, process: subprocess.Popen[bytes]) -> None:
    """Wait until the journal is so large, or the process has ended."""
    while process.poll() is None and len(_bytes(folder)) < size:
        time.sleep(0.002)


if __name__ == "__main__":
    sys.exit(main())
