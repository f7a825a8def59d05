"""Measures how much of short memory spikes samplers see, and what the looking costs; prints a table.

    python ci/bench/sampler.py [--spikes 150] [--peers nvitop gmprof gpu_tracker] [--markdown]

All tools look at the same scripted card of the fake driver: five processes, one of which spikes for 2, 5, 20 or 100 ms
at random moments, seen from a process that sleeps or that holds Python's interpreter lock meanwhile. Each peer is
installed from the package index into an environment of its own; one that cannot be is left out with the reason. The
fake driver answers from memory: nothing here says what a call costs on a real driver. Exits with 1 where a promise is
broken: at least 99 % of 20 ms spikes at the default interval, also under the lock, all of them with an exact source,
and less than 6 % of one core.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import ctypes
import importlib
import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
import uuid
import venv
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

MIB = 1 << 20
BASE = 1000 * MIB
LENGTHS = (2, 5, 20, 100)
DEFAULT = 10.0
#: Nothing happens for this long between two spikes, in ms: a window closes, and the next one opens.
QUIET = (50.0, 90.0)
#: A window opens this long before its spike at most, in ms.
LEAD = (10.0, 35.0)
PEERS = ("nvitop", "gmprof", "gpu_tracker")
#: What the four processes beside the spiking one hold together.
REST = 4 * MIB
#: They are children of the process that spikes.
CHILDREN: list[subprocess.Popen[bytes]] = []


class Spike(NamedTuple):
    """:ivar start: ms after the beginning. :ivar height: bytes, another for each, so that a sample names its spike."""

    start: float
    length: float
    height: int


class Case(NamedTuple):
    """One row of the table."""

    tool: str
    interval: float
    lock: bool = False
    exact: bool = False


def spikes(count: int, seed: int = 7) -> list[Spike]:
    """``count`` of each length, mixed."""
    chance = random.Random(seed)
    lengths = [length for length in LENGTHS for _ in range(count)]
    chance.shuffle(lengths)
    made, at = [], 100.0
    for number, length in enumerate(lengths):
        at += chance.uniform(*QUIET)
        made.append(Spike(at, length, (500 + number) * MIB))
        at += length
    return made


# ---------------------------------------------------------------- what runs beside the tool


class Seen:
    """What a tool saw: highest figure by spike, when it looked, and spikes that do not count."""

    def __init__(self, planned: list[Spike]) -> None:
        self.planned = planned
        self.most = [0] * len(planned)
        self.times: list[float] = []
        self.void: list[int] = []

    def sample(self, figure: float) -> None:
        """One look: a figure above the base names the spike that it is of."""
        number = round((figure - BASE) / MIB) - 500
        if 0 <= number < len(self.most):
            self.most[number] = max(self.most[number], int(figure))


def sleep_until(at: float) -> None:
    """Sleep to a moment of the monotonic clock."""
    left = at - time.monotonic()
    if left > 0:
        time.sleep(left)


def hold_until(at: float) -> None:
    """Hold the interpreter lock to a moment, as an extension does that does not give it up."""
    left = at - time.monotonic()
    if left > 0:
        ctypes.PyDLL(None).usleep(ctypes.c_uint(int(left * 1e6)))


def play(seen: Seen, lock: bool, begin: float, before: Callable[[int], None], after: Callable[[int], None]) -> None:
    """Live through the spikes: ``before`` each, whatever the test does, ``after`` each.

    A spike that began before ``before`` was over, because the machine had something else to do, is no test of anyone.
    """
    chance = random.Random(11)
    wait = hold_until if lock else sleep_until
    for number, spike in enumerate(seen.planned):
        sleep_until(begin + (spike.start - chance.uniform(*LEAD)) / 1000)
        before(number)
        if time.monotonic() > begin + spike.start / 1000:
            seen.void.append(number)
        wait(begin + (spike.start + spike.length) / 1000 + 0.001)
        after(number)


def told() -> float:
    """Say that the tool is ready and which processes there are, and read when it begins."""
    print(json.dumps([os.getpid(), *(child.pid for child in CHILDREN)]), flush=True)
    return float(sys.stdin.readline())


def cpu_seconds(pid: int) -> float:
    """Processor time of a process and of its children that ended."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def gaps(times: list[float], interval: float) -> int:
    """How often more than three intervals went by without a look."""
    return sum(second - first > 3 * interval / 1000 for first, second in itertools.pairwise(times))


def report(seen: Seen, cpu: float, wall: float, late: int, version: str) -> None:
    """Hand the result over."""
    result = {"most": seen.most, "void": seen.void, "cpu": cpu / wall, "late": late, "version": version}
    print(json.dumps(result), flush=True)


# ---------------------------------------------------------------- our own sampler


def run_ours(case: Case, planned: list[Spike]) -> None:
    """A keeper as a run has it; each spike is within a test window of its own."""
    from pytest_vram.journal import FILE_NAME, Journal
    from pytest_vram.keeper import KeeperClient, ensure, socket_path, start_time
    from pytest_vram.keeper.messages import Close, Closed, Finish, Launch, Open, Opened
    from pytest_vram.readings import Reading
    from pytest_vram.spec import DeviceSpec

    with tempfile.TemporaryDirectory(prefix="vram-bench-") as folder:
        run, me = f"bench-{uuid.uuid4().hex[:12]}", os.getpid()
        ensure(
            Launch(
                run=run,
                folder=folder,
                socket=socket_path(run),
                controller=(me, start_time(me)),
                devices=[DeviceSpec(kind="cuda", index=0, text="cuda:0")],
                interval_ms=case.interval,
            )
        )
        client = KeeperClient(socket_path(run), role="controller")
        keeper = client.welcome.pid
        seen, window = Seen(planned), 0

        def before(number: int) -> None:
            nonlocal window
            opened = client.call(Open(kind="test", name=f"spike {number}"))
            assert isinstance(opened, Opened)
            window = opened.window

        def after(number: int) -> None:
            closed = client.call(Close(window=window))
            assert isinstance(closed, Closed)
            peak = closed.run["gpu0"]
            assert isinstance(peak, Reading), peak
            if case.exact:
                # No sample decides: the lower end is the largest process's own peak, the upper end that of all.
                whole = BASE + planned[number].height + REST
                assert peak.exact or peak.at_most is not None, peak
                assert peak.bytes <= whole <= (peak.at_most or peak.bytes), peak
            seen.most[number] = peak.bytes - REST

        began, wall = cpu_seconds(keeper), time.monotonic()
        play(seen, case.lock, told(), before, after)
        cpu, wall = cpu_seconds(keeper) - began, time.monotonic() - wall
        client.call(Finish(outcome="done"))
        client.close()
        late = sum(line["kind"] == "gap" for line in Journal(Path(folder) / FILE_NAME))
        report(seen, cpu, wall, late, f"pytest-vram {version('pytest-vram')}")


# ---------------------------------------------------------------- peers


def run_gmprof(case: Case, planned: list[Spike]) -> None:
    """Its context manager around each spike, as its documentation shows; its looks are counted on the way."""
    gmprof: Any = importlib.import_module("gmprof.context")
    monitor = importlib.import_module("gmprof.monitoring").VRAMMonitor
    seen = Seen(planned)
    sample, context = monitor.sample, None

    def counted(self: Any) -> Any:
        seen.times.append(time.monotonic())
        return sample(self)

    monitor.sample = counted
    late = 0

    def before(number: int) -> None:
        nonlocal context
        del number
        seen.times.clear()
        context = gmprof.VRAMOverview(interval=case.interval / 1000)
        context.__enter__()

    def after(number: int) -> None:
        nonlocal late
        assert context is not None
        with contextlib.redirect_stdout(None):
            context.__exit__(None, None, None)
        seen.most[number] = context.stats.peak_used - REST
        late += gaps(seen.times, case.interval)

    begin = told()
    began, wall = time.process_time(), time.monotonic()
    play(seen, case.lock, begin, before, after)
    cpu, wall = time.process_time() - began, time.monotonic() - wall
    report(seen, cpu, wall, late, f"gmprof {version('gmprof')}")


def run_nvitop(case: Case, planned: list[Spike]) -> None:
    """Its collector in the background, at the interval that it was given; each of its looks is kept."""
    nvitop: Any = importlib.import_module("nvitop")
    seen = Seen(planned)
    # The collector keeps the root of its processes by a weak reference only, and forgets it otherwise.
    root = nvitop.HostProcess(os.getpid())
    collector = nvitop.ResourceMetricCollector(nvitop.Device.all(), interval=case.interval / 1000)
    stop = threading.Event()

    def on_collect(metrics: dict[str, float]) -> bool:
        seen.times.append(time.monotonic())
        found = [value for name, value in metrics.items() if name.endswith("/gpu_memory (MiB)/last")]
        if found:
            seen.sample(sum(found) * MIB - REST)
        return not stop.is_set()

    begin = told()
    began, wall = time.process_time(), time.monotonic()
    thread = collector.daemonize(on_collect, interval=case.interval / 1000)
    play(seen, case.lock, begin, lambda number: None, lambda number: None)
    stop.set()
    thread.join(10)
    del root
    cpu, wall = time.process_time() - began, time.monotonic() - wall
    report(seen, cpu, wall, gaps(seen.times, case.interval), f"nvitop {version('nvitop')}")


def run_gpu_tracker(case: Case, planned: list[Spike]) -> None:
    """Its tracker, which is a process of its own that starts nvidia-smi twice for every look."""
    gpu_tracker: Any = importlib.import_module("gpu_tracker")
    seen = Seen(planned)
    with tempfile.TemporaryDirectory(prefix="vram-bench-") as folder:
        file = Path(folder) / "points.csv"
        tracker = gpu_tracker.Tracker(
            sleep_time=case.interval / 1000, gpu_ram_unit="megabytes", tracking_file=str(file), disable_logs=True
        )
        begin = told()
        began, wall = sum(os.times()[:4]), time.monotonic()
        with tracker:
            play(seen, case.lock, begin, lambda number: None, lambda number: None)
        cpu, wall = sum(os.times()[:4]) - began, time.monotonic() - wall
        with file.open(encoding="utf-8", newline="") as stream:
            rows = list(csv.DictReader(stream.readlines()[2:]))
    for row in rows:
        seen.sample(round(float(row["combined_gpu_ram"])) * MIB - REST)
    seen.times = [float(row["timestamp"]) for row in rows]
    report(seen, cpu, wall, gaps(seen.times, case.interval), f"gpu_tracker {version('gpu-tracker')}")


WORKERS = {"pytest-vram": run_ours, "gmprof": run_gmprof, "nvitop": run_nvitop, "gpu_tracker": run_gpu_tracker}


# ---------------------------------------------------------------- the bench


@contextlib.contextmanager
def environment(package: str) -> Iterator[Path | str]:
    """Python of an environment that has this package; a sentence where it cannot be had."""
    with tempfile.TemporaryDirectory(prefix="vram-peer-") as folder:
        try:
            venv.create(folder, with_pip=True, symlinks=True)
            python = Path(folder) / "bin" / "python"
            done = subprocess.run(
                [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", package.replace("_", "-")],
                capture_output=True,
                text=True,
                timeout=600,
                check=False,
            )
        except (OSError, subprocess.SubprocessError) as error:
            yield f"no environment for {package}: {error}"
            return
        if done.returncode != 0:
            yield f"{package} could not be installed: {' '.join(done.stderr.split())[-200:]}"
        else:
            yield python


def measure(case: Case, count: int, python: Path) -> dict[str, Any]:
    """Play the spikes to one tool."""
    from pytest_vram.testing import Card, Script, fake_nvml

    planned = spikes(count)
    with fake_nvml([Card(total=16 << 30, accounting=case.exact)]) as driver, contextlib.ExitStack() as stack:
        tools = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="vram-smi-")))
        driver.write_nvidia_smi(tools)
        worker = subprocess.Popen(
            [python, __file__, "--worker", json.dumps(case), "--spikes", str(count)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            # Tools that load the library by its name find it as well.
            env={
                **os.environ,
                "PATH": f"{tools}:{os.environ['PATH']}",
                "LD_LIBRARY_PATH": str(driver.library.parent),
                "PYTHONWARNINGS": "ignore",
            },
        )
        stack.callback(worker.kill)
        assert worker.stdin is not None
        assert worker.stdout is not None
        line = worker.stdout.readline()
        if not line:
            raise RuntimeError(f"{case.tool} did not start: {worker.communicate(timeout=30)[1][-2000:]}")
        pids = json.loads(line)
        begin = time.monotonic() + 0.5
        steps = [(0.0, BASE)]
        for spike in planned:
            steps += [(spike.start, BASE + spike.height), (spike.start + spike.length, BASE)]
        driver.process(pids[0], Script(tuple(steps), start=int(begin * 1e9)))
        for pid in pids[1:]:
            driver.process(pid, REST // 4)
        out, said = worker.communicate(f"{begin!r}\n", timeout=planned[-1].start / 1000 + 120)
        if worker.returncode != 0:
            raise RuntimeError(f"{case.tool} failed: {said[-2000:]}")
    found: dict[str, Any] = json.loads(out.splitlines()[-1])
    return found


def row(case: Case, count: int, found: dict[str, Any]) -> dict[str, Any]:
    """Shares of a result, in percent."""
    planned, void = spikes(count), set(found["void"])
    captured: dict[int, float] = {}
    share: dict[int, float] = {}
    for length in LENGTHS:
        pairs = [
            (most, BASE + spike.height)
            for number, (most, spike) in enumerate(zip(found["most"], planned, strict=True))
            if spike.length == length and number not in void
        ]
        # A lower end may leave out what the other processes hold.
        captured[length] = 100 * sum(most + REST + MIB >= peak for most, peak in pairs) / len(pairs)
        share[length] = 100 * sum(max(most, BASE) / peak for most, peak in pairs) / len(pairs)
    return {
        "tool": found["version"],
        "interval_ms": case.interval,
        "lock": case.lock,
        "exact": case.exact,
        "captured": captured,
        "peak": share,
        "cpu_percent": 100 * found["cpu"],
        "late": found["late"],
        "void": len(void),
    }


def broken(case: Case, made: dict[str, Any]) -> list[str]:
    """Promises that this row does not keep."""
    if case.tool != "pytest-vram" or case.interval != DEFAULT:
        return []
    least = 100.0 if case.exact else 99.0
    wrong = [
        f"{made['captured'][length]:.1f} % of {length} ms spikes, not {least:.0f} %: {case}"
        for length in (LENGTHS if case.exact else (20, 100))
        if made["captured"][length] < least
    ]
    if made["cpu_percent"] >= 6.0:
        wrong.append(f"{made['cpu_percent']:.1f} % of a core, not under 6 %: {case}")
    return wrong


def table(rows: list[dict[str, Any]], count: int) -> Iterator[str]:
    """The rows in Markdown."""
    yield f"{count} spikes of each length, five processes, fake driver (says nothing of a real driver's call cost):"
    yield ""
    heads = [f"{length} ms" for length in LENGTHS]
    yield f"| tool | interval | {' | '.join(heads)} | share of peak | CPU | gaps |"
    yield f"|---|---|{'---|' * len(heads)}---|---|---|"
    for made in rows:
        if "reason" in made:
            yield f"| {made['tool']} | – |{' – |' * len(heads)} – | – | {made['reason']} |"
            continue
        notes = [text for text, is_so in (("lock held", made["lock"]), ("accounting", made["exact"])) if is_so]
        name = f"{made['tool']}{' (' + ', '.join(notes) + ')' if notes else ''}"
        cells = [f"{made['captured'][length]:.1f} %" for length in LENGTHS]
        peaks = " / ".join(f"{made['peak'][length]:.0f}" for length in LENGTHS)
        yield (
            f"| {name} | {made['interval_ms']:g} ms | {' | '.join(cells)} | {peaks} % |"
            f" {made['cpu_percent']:.1f} % | {made['late']} |"
        )


def cases(peers: list[str]) -> Iterator[tuple[str, list[Case]]]:
    """What is measured, by the package that it needs."""
    own = "pytest-vram"
    yield (
        own,
        [
            Case(own, 1.0),
            Case(own, 5.0),
            Case(own, DEFAULT),
            Case(own, DEFAULT, lock=True),
            Case(own, DEFAULT, exact=True),
        ],
    )
    known = {
        "gmprof": [Case("gmprof", 10.0), Case("gmprof", 10.0, lock=True)],
        "nvitop": [Case("nvitop", 1000.0), Case("nvitop", 10.0), Case("nvitop", 10.0, lock=True)],
        # Less than 100 ms is refused by it.
        "gpu_tracker": [Case("gpu_tracker", 1000.0), Case("gpu_tracker", 100.0)],
    }
    for peer in peers:
        yield peer, known[peer]


def main() -> int:
    """Measure everything and print it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--spikes", type=int, default=150, help="of each length (default: 150)")
    parser.add_argument("--peers", nargs="*", default=list(PEERS), choices=PEERS, help="beside which (default: all)")
    parser.add_argument("--markdown", action="store_true", help="print a table and not JSON")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.worker:
        case = Case(*json.loads(asked.worker))
        CHILDREN.extend(subprocess.Popen(["sleep", "3600"]) for _ in range(4))
        try:
            WORKERS[case.tool](case, spikes(asked.spikes))
        finally:
            for child in CHILDREN:
                child.kill()
        return 0
    rows: list[dict[str, Any]] = []
    wrong: list[str] = []
    for package, made in cases(asked.peers):
        own = package == "pytest-vram"
        with contextlib.nullcontext(Path(sys.executable)) if own else environment(package) as python:
            if isinstance(python, str):
                rows.append({"tool": package, "reason": python})
                continue
            for case in made:
                try:
                    rows.append(row(case, asked.spikes, measure(case, asked.spikes, python)))
                except RuntimeError as error:
                    if own:
                        raise
                    rows.append({"tool": package, "reason": " ".join(str(error).split())[:200]})
                    continue
                wrong += broken(case, rows[-1])
                print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    print("\n".join(table(rows, asked.spikes)) if asked.markdown else json.dumps({"rows": rows, "broken": wrong}))
    for text in wrong:
        print(text, file=sys.stderr)
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
