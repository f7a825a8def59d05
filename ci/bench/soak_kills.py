"""Real soaks that are killed at random moments: nothing committed is lost or asked again, no verdict is turned round.

    python ci/bench/soak_kills.py [--soaks 100] [--turns 130] [--at-once 5] [--seed 0] [--json FILE]

Each soak is a real one of a scripted server that holds memory for real (steady, leaking 1.5 MiB a turn, or once over
the budget), one half through ``vram soak``, the other through ``pytest`` with a test that is marked ``@vram_soak``. It
meets up to four deaths at random moments, drawn by the size of its journal, by time (so that start, warm-up and the
writing of reports are hit as well) and at its end: SIGKILL of ``vram soak`` or of pytest, SIGKILL of the server, a full
disk. That is a small tmpfs of its own, for the soak's folder or for the whole project, which is filled and freed again;
where nothing can be mounted it is a limit on the size of files. Some find the rest of a line behind their journal,
which is what a crash of the machine leaves.

After each death the journal begins with what was whole in it before, every turn stands in it once and in order, and
every process of the soak is gone; the server's own record says that no committed turn was asked again; a line that was
dropped is said. The verdict must be that of the undisturbed soak, which is run as well, or inconclusive. ``soaks.py``
does the same with formulas for servers, many more in less time.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from pytest_vram import sessions
from pytest_vram.errors import VramError
from pytest_vram.sessions.soak import FINAL
from pytest_vram.sessions.soak_journal import FILE_NAME, Contents, read
from pytest_vram.testing.scripted import Burst, Script, backend_table, read_record
from pytest_vram.units import MIB

VRAM = [sys.executable, "-c", "import sys; from pytest_vram.cli import main; sys.exit(main())", "soak"]
SHAPES = ("steady", "leak", "peak")
DOORS = ("vram soak", "pytest")
WAYS = ("kill", "server", "disk")
MOMENTS = {"size": 8, "early": 5, "time": 4, "end": 3}
BUDGET = "300MiB"
CYCLE = 24
#: Taken by each of the 44 requests of the turns of a cycle: 1.5 MiB a turn.
HELD = 209 * 4096
#: Taken in one turn of each cycle, the tenth, from some cycle on; the first of them ends the soak.
PEAK, PEAK_AT = Burst(size=320 * MIB, said="When did rotate-logs"), 10
SERVER = b"pytest_vram.testing.scripted"
MARK = "VRAM_BENCH_SOAK"
#: Bytes of a turn in the journal, and seconds of it, of which moments are drawn: some lie behind the end.
EACH, LASTS = 460, 0.2
#: Seconds in which everything of a killed process must be gone, on a machine with more to do.
GONE = 10.0
#: Seconds of one process, after which it hangs.
LONGEST = 240.0
ENDED = ("amount", *FINAL)


def main() -> int:
    """Run them; 1 where one breaks a promise."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--soaks", type=int, default=100)
    parser.add_argument("--turns", type=int, default=130)
    parser.add_argument("--at-once", type=int, default=5)
    parser.add_argument("--most-deaths", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first soak")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--keep", type=Path, help="folder for what is left of soaks that break a promise")
    options = parser.parse_args()
    if "VRAM_BENCH_MOUNTS" not in os.environ:
        _where_mounts_are_own(sys.argv[1:])
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _leave)
    begun = time.monotonic()
    with ThreadPoolExecutor(options.at_once) as pool:
        plain = list(
            pool.map(
                lambda one: Trial(random.Random(0), one[0], one[1], options.turns, 0, options.keep).run(),
                [(shape, door) for shape in SHAPES for door in DOORS],
            )
        )
        wanted = {(row["shape"], row["door"]): row["outcome"] for row in plain}
        print(f"undisturbed, {time.monotonic() - begun:.0f} s: {wanted}", flush=True)

        def one(number: int) -> dict[str, Any]:
            chance = random.Random(f"{options.seed} {number}")
            shape, door = SHAPES[number // 2 % len(SHAPES)], DOORS[number % 2]
            row: dict[str, Any] = {"deaths": [], "broken": []}
            while not row["deaths"] and not row["broken"]:  # one that ended before anything happened to it is no trial
                trial = Trial(chance, shape, door, options.turns, options.most_deaths, options.keep)
                row = trial.run(wanted[shape, door])
            row |= {"number": number, "wanted": wanted[shape, door]}
            row["kind"] = "same" if row["outcome"] == row["wanted"] else row["outcome"]
            print(json.dumps(row), flush=True)
            return row

        rows = list(pool.map(one, range(options.first, options.first + options.soaks)))
    _tell(rows, wanted, options, time.monotonic() - begun)
    if options.json is not None:
        options.json.write_text(json.dumps([*plain, *rows], indent=1) + "\n", encoding="utf-8")
    return 1 if any(row["broken"] for row in [*plain, *rows]) else 0


def _leave(number: int, _: object) -> None:
    """Leave no soak behind: its keeper and its server end with it."""
    _LEAVING.set()
    for _again in range(3):  # one that was just being started is found the next time
        for base in list(_FOLDERS):
            for pid, _start in _alive(base):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.2)
    for base in list(_FOLDERS):
        shutil.rmtree(base, ignore_errors=True)
    os._exit(128 + number)


def _where_mounts_are_own(arguments: list[str]) -> NoReturn:
    """The same in a mount namespace, where that is allowed: what it mounts is gone with it, however it ends."""
    inside = {**os.environ, "VRAM_BENCH_MOUNTS": ""}
    command = [sys.executable, __file__, *arguments]
    for words in (["unshare", "-m"], ["unshare", "-rm"]):
        with contextlib.suppress(OSError):
            folder = tempfile.gettempdir()
            if subprocess.run([*words, "mount", "-t", "tmpfs", "none", folder], capture_output=True).returncode == 0:
                os.execvpe(words[0], [*words, *command], {**inside, "VRAM_BENCH_MOUNTS": "yes"})
    os.execve(command[0], command, inside)


def _tell(rows: list[dict[str, Any]], wanted: dict[tuple[str, str], str], options: Any, seconds: float) -> None:
    print(
        f"{len(rows)} soaks of {options.turns} turns, {options.at_once} at once, seed {options.seed}, {seconds:.0f} s"
    )
    print(
        "| what the server did | through | undisturbed | soaks | deaths | same verdict | inconclusive | turned round |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for (shape, door), verdict in wanted.items():
        own = [row for row in rows if (row["shape"], row["door"]) == (shape, door)]
        kinds = Counter(row["kind"] for row in own)
        turned = len(own) - kinds["same"] - kinds["inconclusive"]
        met = sum(len(row["deaths"]) for row in own)
        cells = (shape, door, verdict, len(own), met, kinds["same"], kinds["inconclusive"], turned)
        print(f"| {' | '.join(map(str, cells))} |")
    deaths = [death for row in rows for death in row["deaths"]]
    for index, name in enumerate(("deaths", "moments")):
        counts = Counter(death[index] for death in deaths)
        print(f"{name}: " + ", ".join(f"{key} {count}" for key, count in sorted(counts.items())))
    totals = {name: sum(row[name] for row in rows) for name in ("processes", "turns", "torn")}
    print(", ".join(f"{name} {total}" for name, total in totals.items()))
    print(f"all processes of one that had ended were gone after at most {max(row['gone_after'] for row in rows)} s")
    for row in rows:
        if row["broken"]:
            print(f"BROKEN: {row}")


class Trial:
    """One soak, from its begin to its end.

    :param deaths: the most that it meets. :param keep: folder for what is left of it where it breaks a promise.
    """

    def __init__(
        self, chance: random.Random, shape: str, door: str, turns: int, deaths: int, keep: Path | None
    ) -> None:
        self.chance, self.shape, self.door, self.turns, self.keep = chance, shape, door, turns, keep
        self.wanted_deaths = chance.randint(1, deaths) if deaths else 0
        self.disk = chance.choice(("soak", "project")) if os.environ["VRAM_BENCH_MOUNTS"] else "fsize"
        self.deaths: list[tuple[str, str]] = []
        self.broken: list[str] = []
        self.torn = 0
        self.runs = 0
        self.slowest = 0.0

    def run(self, wanted: str | None = None) -> dict[str, Any]:
        """Soak until it ends.

        :param wanted: the undisturbed verdict. :returns: what it met and showed, and which promise it broke.
        """
        self.base = Path(tempfile.mkdtemp(prefix="vram-soak-kills-"))
        _FOLDERS.add(self.base)
        self.project, self.room = self.base / "project", self.base / "disk"
        self.record = self.base / "record.jsonl"
        for folder in (self.project, self.room, self.base / "leases"):
            folder.mkdir()
        found: dict[str, Any] = {}
        small = {"soak": self.room, "project": self.project}.get(self.disk) if self.wanted_deaths else None
        if self.disk == "project":
            self.room = self.project / "soaks"
        self.small = small
        try:
            if small is not None:
                subprocess.run(["mount", "-t", "tmpfs", "-o", "size=48m", "none", str(small)], check=True)
            self._write_project()
            found = self._until_it_ends()
            self._hold_against_the_record()
            outcome = found.get("verdict", {}).get("outcome", "none")
            if wanted is not None and outcome not in (wanted, "inconclusive"):
                self._break(f"{outcome} instead of {wanted}")
        except VramError as error:  # a journal that is damaged, above all
            self._break(str(error))
        finally:
            for pid, _ in _alive(self.base):
                self.broken.append(f"process {pid} was left behind")
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if self.broken and self.keep is not None:
                shutil.copytree(self.base, self.keep / self.base.name, dirs_exist_ok=True)
            if small is not None:
                subprocess.run(["umount", "-l", str(small)], check=True)
            shutil.rmtree(self.base)
            _FOLDERS.discard(self.base)
        return {
            "shape": self.shape,
            "door": self.door,
            "disk": self.disk,
            "outcome": found.get("verdict", {}).get("outcome", "none"),
            "text": found.get("verdict", {}).get("text", ""),
            "turns": found.get("turn_count", 0),
            "deaths": self.deaths,
            "torn": self.torn,
            "processes": self.runs,
            "gone_after": round(self.slowest, 2),
            "folder": self.base.name,
            "broken": self.broken,
        }

    # ------------------------------------------------------------ what is soaked

    def _write_project(self) -> None:
        after = max(0, (self.turns - PEAK_AT) // CYCLE - 1)
        script = Script(
            latency=0.05,
            hold=HELD if self.shape == "leak" else 0,
            burst=msgspec.structs.replace(PEAK, after=after) if self.shape == "peak" else None,
            record=str(self.record),
        )
        (self.project / "vram.toml").write_text(backend_table(script, self.project, name="agent"), encoding="utf-8")
        (self.project / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
        (self.project / "test_night.py").write_text(
            f"from pytest_vram import vram_soak\n\n@vram_soak(turns={self.turns})\ndef test_night(): pass\n",
            encoding="utf-8",
        )

    def _folder(self) -> Path:
        if self.door == "vram soak":
            return self.room / "soak"
        found = sorted(self.room.glob("*test_night*/*"))
        if len(found) > 1:
            self._break(f"a second soak was begun: {[path.name for path in found]}")
        return found[0] if found else self.room / "none"

    def _command(self, begun: bool) -> list[str]:
        if self.door == "vram soak":
            command = [*VRAM, f"{self.turns}turns", "--vram-device=cpu", f"--budget={BUDGET}", "--json"]
            return [*command, "--dir", str(self.room / "soak"), *(["--resume"] if begun else [])]
        command = [sys.executable, "-m", "pytest", "-q", "-W", "error", "-p", "no:cacheprovider", "--vram-device=cpu"]
        command += [f"--vram-budget={BUDGET}", f"--vram-soak-dir={self.room}"]
        return [*command, f"--vram-report={self.base / 'report.json'}"]

    # ------------------------------------------------------------ one process after the other

    def _until_it_ends(self) -> dict[str, Any]:
        while self.runs < 3 * self.wanted_deaths + 3:
            found = self._one_process()
            if found is not None:
                self._gone(_alive(self.base))
                return found
        self._break(f"it did not end in {self.runs} processes")
        return {}

    def _one_process(self) -> dict[str, Any] | None:
        """One process of the soak. :returns: its document, where the soak has ended."""
        folder = self._folder()
        journal = folder / FILE_NAME
        self._tear(journal)
        before = _bytes(journal)
        earlier = read(folder) if before else Contents()
        whole = before[: len(before) - earlier.torn]
        self.runs += 1
        way = self.chance.choice(WAYS) if len(self.deaths) < self.wanted_deaths else ""
        moment = self.chance.choices(list(MOMENTS), list(MOMENTS.values()))[0]
        out = self.base / f"out-{self.runs}.txt"
        environment = {name: text for name, text in os.environ.items() if not name.startswith(("PYTEST", "VRAM_BENCH"))}
        environment |= {"PYTEST_VRAM_LEASE_FOLDER": str(self.base / "leases"), MARK: str(self.base)}
        while _LEAVING.is_set():
            time.sleep(1)
        begun = (folder / "manifest.json").exists() or journal.exists()
        with out.open("wb") as stream, (self.base / f"err-{self.runs}.txt").open("wb") as errors:
            process = subprocess.Popen(
                self._command(begun), cwd=self.project, env=environment, stdout=stream, stderr=errors
            )
        met = self._meet(process, way, moment, len(before)) if way else ""
        code = self._end_of(process)
        old = _alive(self.base)
        if self.chance.random() < 0.5:
            self._gone(old)
        else:  # the next one starts beside what is left of this one
            pending: Future[None] = _BESIDE.submit(self._gone, old)
            pending.add_done_callback(lambda done: done.result())
        (self.base / "ballast").unlink(missing_ok=True)
        if self.small is not None:
            (self.small / "ballast").unlink(missing_ok=True)
        said = out.read_text(errors="replace") + (self.base / f"err-{self.runs}.txt").read_text(errors="replace")
        with (self.base / "story.txt").open("a") as story:
            story.write(f"{self.runs}: {way} {moment} met={met!r} code={code} before={earlier.turns}\n")
        return self._looked_at(whole, earlier, met, moment, code, said, out)

    def _looked_at(
        self, whole: bytes, earlier: Contents, met: str, moment: str, code: int, said: str, out: Path
    ) -> dict[str, Any] | None:
        folder = self._folder()
        after = _bytes(folder / FILE_NAME)
        if not after.startswith(whole):
            self._break("what was committed is gone")
        contents = read(folder)  # numbers that are missing, doubled or out of order are refused by it
        if "Traceback" in said or "INTERNALERROR" in said:
            self._break(f"a traceback or internal error was shown: {said[-600:]}")
        new = contents.sessions[len(earlier.sessions) :]
        if earlier.torn and new:
            if new[0].dropped != earlier.torn:
                self._break(f"{earlier.torn} torn bytes were dropped as {new[0].dropped}")
            if met != "kill" and "without its end was dropped" not in said:
                self._break("a torn line was dropped and that was not said")
        elif earlier.torn and not after[len(whole) :]:
            self._break("a torn line is gone and that stands nowhere")
        for segment in contents.segments[len(earlier.segments) :][:1]:
            if segment.first != earlier.turns + 1:
                self._break(f"turn {segment.first} was asked behind turn {earlier.turns}")
        ended = contents.end is not None and contents.end.reason in ENDED
        if met and (met != "server" or len(contents.losses) > len(earlier.losses) or not ended):
            self.deaths.append((met, moment))
        if not ended:
            if not met:
                self._break(f"it stopped with {code} though nothing happened to it: {said[-600:]}")
            return None
        found = self._document(met, code, out, folder)
        if found is None:
            return None
        if found["turn_count"] != contents.turns or found["reason"] not in (contents.end.reason, "disk"):  # type: ignore[union-attr]
            self._break(f"the report has {found['turn_count']} turns, the journal {contents.turns}")
        if self.torn and not any("dropped from the journal" in note for note in found["notes"]):
            self._break("the report does not say that a torn line was dropped")
        return found

    def _document(self, met: str, code: int, out: Path, folder: Path) -> dict[str, Any] | None:
        """What the last process said of the soak; ``None``: it was killed before it could."""
        saved = folder / "report.json"
        if self.door == "vram soak":
            text = out.read_text()
            if not text.endswith("}\n"):
                if not met:
                    self._break("nothing was said of a soak that has ended")
                return None
            found: dict[str, Any] = json.loads(text)
            if met != "kill" and code != {"passed": 0, "failed": 1, "inconclusive": 3}[found["verdict"]["outcome"]]:
                self._break(f"exit code {code} for {found['verdict']['outcome']}")
            return found
        written = self.base / "report.json"
        if not written.exists():  # killed before: the soak's own report is what there is
            found = json.loads(saved.read_text()) if saved.exists() else {}
            told = bool(found) and found["reason"] in ENDED
            return found if told else None
        test = json.loads(written.read_text())["tests"][0]
        written.unlink()
        found = test.get("soak") or {}
        if not found:
            if not met:
                self._break(f"the record of the test has no soak: {test}"[:600])
            return None
        if test["outcome"] != found["verdict"]["outcome"]:
            self._break(f"the test is {test['outcome']} and its soak {found['verdict']['outcome']}")
        return found

    # ------------------------------------------------------------ what happens to it

    def _tear(self, journal: Path) -> None:
        """Behind some journals, the rest of a line: what a crash of the machine leaves."""
        if self.deaths and journal.exists() and self.chance.random() < 0.25:
            end = read(journal.parent).end
            if end is not None and end.reason in ENDED:
                return
            data = journal.read_bytes()
            last = data[data.rfind(b"\n", 0, -1) + 1 : -1]
            if data.endswith(b"\n") and len(last) > 2:
                with journal.open("ab") as stream:
                    stream.write(last[: self.chance.randrange(1, len(last))])
                self.torn += 1

    def _meet(self, process: subprocess.Popen[bytes], way: str, moment: str, size: int) -> str:
        """Wait for the moment, and let it happen. :returns: what happened; "": it had ended before."""
        folder = self._folder()
        more = size + self.chance.randrange(1, EACH * self.turns)
        wait = self.chance.uniform(0, {"early": 3.0, "end": 0.5}.get(moment, LASTS * self.turns))
        start = time.monotonic()
        while process.poll() is None:
            if not (folder / FILE_NAME).exists():
                folder = self._folder()
            data = _bytes(folder / FILE_NAME)
            if moment == "size" and len(data) >= more:
                break
            if moment == "end" and b'"kind":"end"' in data[-400:] and len(data) > size:
                time.sleep(wait)
                break
            if moment in ("early", "time") and time.monotonic() - start >= wait:
                break
            if time.monotonic() - start > LONGEST:
                return ""
            time.sleep(0.01)
        if way == "kill" and process.poll() is None:
            process.kill()
            return "kill"
        if way == "server":
            return self._kill_server(process)
        if way == "disk" and process.poll() is None:
            return self._fill(process, folder)
        return ""

    def _kill_server(self, process: subprocess.Popen[bytes]) -> str:
        while process.poll() is None:
            for pid, _ in _alive(self.base, SERVER):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                    return "server"
            time.sleep(0.01)
        return ""

    def _fill(self, process: subprocess.Popen[bytes], folder: Path) -> str:
        if self.small is None:
            import resource

            while process.poll() is None and not _alive(self.base, SERVER):
                time.sleep(0.01)  # its keeper and its server are not limited
            most = len(_bytes(folder / FILE_NAME)) + self.chance.randrange(0, 4000)
            with contextlib.suppress(ProcessLookupError):
                resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (most, most))
            return "disk (limit on the size of files)"
        ballast = self.small / "ballast"
        with ballast.open("wb", buffering=0) as stream, contextlib.suppress(OSError):
            while stream.write(bytes(1 << 16)):
                pass
        with contextlib.suppress(OSError):
            os.truncate(ballast, ballast.stat().st_size - 4096 * self.chance.randrange(0, 5))
        return f"disk (tmpfs of the {'whole project' if self.disk == 'project' else 'soak'})"

    def _end_of(self, process: subprocess.Popen[bytes]) -> int:
        try:
            return process.wait(LONGEST)
        except subprocess.TimeoutExpired:
            self._break(f"it did not end in {LONGEST:.0f} s")
            process.kill()
            return process.wait()

    def _gone(self, old: set[tuple[int, str]]) -> None:
        """Every one of these processes ends."""
        begun = time.monotonic()
        while left := old & _alive(self.base):
            if time.monotonic() - begun > GONE:
                self._break(f"{GONE:.0f} s later there are still {sorted(left)}")
                return
            time.sleep(0.05)
        self.slowest = max(self.slowest, time.monotonic() - begun)

    # ------------------------------------------------------------ what the servers say

    def _hold_against_the_record(self) -> None:
        """No server was asked a turn that was committed before it, and each was asked its turns in their order."""
        texts = [turn.user for name in sessions.shipped() for turn in sessions.load(name).turns]
        asked: dict[int, list[str]] = {}
        for line in read_record(self.record):
            if line.role == "user":
                asked.setdefault(line.pid, []).append(line.said)
        contents = read(self._folder())
        firsts = [*(segment.first for segment in contents.segments), contents.turns + 1]
        for index, segment in enumerate(contents.segments):
            said = asked.pop(segment.pid or 0, [])[1:]  # the warm-up comes first
            committed = firsts[index + 1] - segment.first
            for turn, text in enumerate(said, segment.first):
                if text != texts[(turn - 1) % len(texts)]:
                    self._break(f"server {segment.segment} was asked {text!r} where turn {turn} comes")
                    break
            if not committed <= len(said) <= committed + 1:
                self._break(f"server {segment.segment} was asked {len(said)} turns, and {committed} are committed")
        for pid, said in asked.items():
            if len(said) > 1:
                self._break(f"server {pid} was asked {len(said) - 1} turns and is in no journal")

    def _break(self, text: str) -> None:
        self.broken.append(f"process {self.runs}: {text}")


#: Set once nothing more may be started.
_LEAVING = threading.Event()
#: Of the soaks that run.
_FOLDERS: set[Path] = set()
#: Waits for what is left of a process while the next one runs.
_BESIDE = ThreadPoolExecutor(16)


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return b""


def _alive(base: Path, word: bytes = b"") -> set[tuple[int, str]]:
    """Pid and start of every process that a soak started, zombies left out."""
    mark = f"{MARK}={base}".encode()
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark in (folder / "environ").read_bytes().split(b"\0") and word in (folder / "cmdline").read_bytes():
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
                if fields[0] not in "ZX":
                    found.add((int(folder.name), fields[19]))
    return found


if __name__ == "__main__":
    sys.exit(main())
