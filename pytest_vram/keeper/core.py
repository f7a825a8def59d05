"""What every part of the keeper shares: the launch, the journal, the processes and the timeline."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pytest_vram.errors import BadInput
from pytest_vram.journal import FILE_NAME, Journal, Writer
from pytest_vram.keeper.ballast import Ballast
from pytest_vram.keeper.messages import BACKEND_MARK, MEMBER_MARK, RUN_MARK, DeviceInfo, Launch, Sampling
from pytest_vram.measure import UNKNOWN, Members, Rate, Timeline, host_probe, open_probes, procfs
from pytest_vram.readings import Unmeasurable

#: A sample block is written when its figures moved by more than this many bytes.
STEADY = 64 << 10
_BLOCK = 1_000_000_000
_EXECNET = "import sys;exec(eval(sys.stdin.readline()))"


class Core:
    """State of the keeper. Everything runs in one thread, so there are no locks.

    :ivar generation: 1 for the first keeper of a run. :ivar server_generations: backend name → its last generation.
    :ivar controller_tests: whether the controller itself runs tests (no xdist).
    """

    def __init__(self, launch: Launch, guard: int) -> None:
        self.launch = launch
        self.folder = Path(launch.folder)
        self.pid = os.getpid()
        self.guard = guard
        self.started = time.monotonic_ns()
        self.generation = 1
        self.server_generations: dict[str, int] = {}
        self.controller_tests = False
        self.known_label: Callable[[str], bool] = lambda label: False
        self.label_of_session: Callable[[int], str | None] = lambda session: None
        self.only_label: Callable[[], str | None] = lambda: None
        self.holders: Callable[[str], str] = lambda but: ""
        self.on_tick: Callable[[], None] = lambda: None
        probes = open_probes(launch.devices, launch.rpc)
        found = [probe for probe in probes if not isinstance(probe, Unmeasurable)]
        self.ballast = Ballast(launch.socket)
        if launch.emulate is not None:
            found = self.ballast.play(found, launch.emulate)
        new = self._read_journal()
        self.journal = Writer(self.folder / FILE_NAME)
        self.members = Members(
            excluded=(self.pid, guard, *self.ballast.pids),
            reaper=self.pid,
            adopter=self._orphan,
            undecided=self._may_be_worker,
            marked=self._marked,
            nested=self._nested,
        )
        host = next((probe for probe in found if probe.info.label == "host"), None)
        #: Wanted nanoseconds between two samples.
        self.interval = int(max(1.0, launch.interval_ms) * 1e6)
        self.timeline = Timeline(
            found, host or host_probe(), self.members, interval=self.interval, clock=time.monotonic_ns
        )
        self.devices: list[DeviceInfo] = [probe.info for probe in self.timeline.probes]
        # The process that serves a device holds the device's memory, which is not host memory of this run.
        for probe in self.timeline.probes:
            served_by = getattr(probe, "pid", None)
            if isinstance(served_by, int):
                self.members.exclude(served_by)
        self._blocks: dict[str, _Block] = {}
        missing = [probe for probe in probes if isinstance(probe, Unmeasurable)]
        estimated = any(device.kind == "predicted" for device in launch.devices)
        #: Why devices that were asked for are not measured.
        self.missing = [] if estimated else [f"not measured: {probe.reason}" for probe in missing]
        self._open_journal(new, missing)

    # ------------------------------------------------------------ journal

    def _read_journal(self) -> bool:
        """Learn the generations of earlier keepers of this run; true when there is no journal yet."""
        path = self.folder / FILE_NAME
        if not path.exists() or not path.stat().st_size:
            return True
        try:
            for line in Journal(path):
                if line["kind"] == "keeper" and isinstance(line.get("generation"), int):
                    self.generation = max(self.generation, line["generation"] + 1)
                elif line["kind"] == "backend" and isinstance(line.get("generation"), int):
                    name = str(line.get("name"))
                    self.server_generations[name] = max(self.server_generations.get(name, 0), line["generation"])
        except BadInput:
            # Somebody damaged it. The run goes on in the same file; its reader will name the line.
            self.generation += 1
        return False

    def _open_journal(self, new: bool, missing: list[Unmeasurable]) -> None:
        if new:
            self.log(
                "run",
                run=self.launch.run,
                wall=time.time(),
                controller=self.launch.controller[0],
                interval_ms=self.launch.interval_ms,
                versions=_versions(),
                settings=self.launch.settings,
            )
        self.log("keeper", pid=self.pid, guard=self.guard, generation=self.generation)
        for device in self.devices:
            self.log(
                "device",
                label=device.label,
                type=device.kind,
                name=device.name,
                capacity=device.capacity,
                source=device.source,
                uuid=device.uuid,
                limit_from=device.limit_from,
                notes=device.notes,
            )
        for reason in missing:
            self.log("note", text=f"not measured: {reason.reason}", device=reason.device)

    def log(self, line: str, /, **fields: Any) -> None:
        """Append a line to the journal, now."""
        self.journal.write(time.monotonic_ns(), line, fields)

    @property
    def journal_trouble(self) -> str | None:
        """Why lines of the journal were lost, with their number; ``None`` while none was."""
        if not self.journal.lost:
            return None
        return f"{self.journal.lost} journal lines were lost: {self.journal.trouble}"

    @property
    def journal_removed(self) -> str | None:
        """That somebody removed the journal; figures do not suffer by it, so that this is no trouble of a window."""
        return f"{self.journal.path} was removed while the run went on" if self.journal.removed else None

    # ------------------------------------------------------------ processes

    def _orphan(self, stat: procfs.Stat) -> str:
        """Owner of a child of the keeper that it did not start itself: an orphan of one of its servers.

        It may have cleared its environment and left its session; then it is the only server's, if there is only one.
        """
        label = procfs.environment_value(stat.pid, BACKEND_MARK)
        if label is not None:
            return label if self.known_label(label) else UNKNOWN
        return self.label_of_session(stat.session) or self.only_label() or UNKNOWN

    def _marked(self, stat: procfs.Stat) -> bool:
        """Whether a process outside the tree was started by a test of this run."""
        mark = procfs.environment_value(stat.pid, MEMBER_MARK)
        return mark is not None and self.launch.run in mark.split(":")

    def _nested(self, stat: procfs.Stat) -> bool:
        """Whether a test's process is of a run of its own: of that run's keeper and its servers."""
        return procfs.environment_value(stat.pid, RUN_MARK) not in (None, self.launch.run)

    def _may_be_worker(self, stat: procfs.Stat) -> bool:
        """Whether a child of the controller may be an xdist worker that has not introduced itself yet.

        A controller that runs tests itself has no workers; then the same command line is a test's own process.
        """
        if self.controller_tests or stat.parent != self.launch.controller[0]:
            return False
        return any(_EXECNET in part for part in procfs.command_line(stat.pid))

    # ------------------------------------------------------------ sampling

    def boundary(self) -> int:
        """Read everything, fold it into the open windows, set the marks back. Returns the time after it."""
        self.timeline.boundary(time.monotonic_ns())
        self._note_processes()
        return time.monotonic_ns()

    def tick(self) -> None:
        """One sample."""
        now = time.monotonic_ns()
        self.timeline.tick(now)
        self._note_processes()
        for label, sums in self.timeline.run_sums():
            if sums.fault is not None:
                continue
            block = self._blocks.get(label)
            if block is None:
                block = self._blocks[label] = _Block(now)
            block.add(sums.held, sums.now)
            if now - block.t0 >= _BLOCK:
                self._flush(label, block)
                block.begin(now)
        self.on_tick()

    def flush(self) -> None:
        """Write what the sample blocks hold."""
        for label, block in self._blocks.items():
            self._flush(label, block)
            block.begin(time.monotonic_ns())

    def _flush(self, label: str, block: _Block) -> None:
        if block.count and block.moved():
            self.log(
                "sample",
                device=label,
                t0=block.t0,
                min=block.low,
                max=block.high,
                last=block.last,
                now=block.now,
                count=block.count,
            )
            block.written = block.last

    def _note_processes(self) -> None:
        members = self.members
        for member in members.joined:
            self.log(
                "process", event="joined", pid=member.pid, name=member.name, owner=member.owner, parent=member.parent
            )
        for member in members.left:
            self.log("process", event="left", pid=member.pid, name=member.name, owner=member.owner)
        members.joined.clear()
        members.left.clear()

    def cpu_share(self) -> float:
        """Share of one core that the keeper itself has used since it started."""
        return round(time.process_time() / max(1e-9, (time.monotonic_ns() - self.started) / 1e9), 4)


class _Block:
    """Samples of one device over at most a second: bytes as in peaks, and what is held for good."""

    def __init__(self, t0: int) -> None:
        self.written: int | None = None
        self.begin(t0)

    def begin(self, t0: int) -> None:
        self.t0 = t0
        self.low = self.high = self.last = self.now = self.count = 0

    def add(self, held: int, now: int) -> None:
        self.low = held if not self.count else min(self.low, held)
        self.high = max(self.high, held)
        self.last, self.now = held, now
        self.count += 1

    def moved(self) -> bool:
        reference = self.written
        return reference is None or max(abs(self.high - reference), abs(self.low - reference)) > STEADY


def _versions() -> dict[str, str]:
    try:
        own = importlib.metadata.version("pytest-vram")
    except importlib.metadata.PackageNotFoundError:
        own = "not installed"
    return {"pytest-vram": own, "python": platform.python_version(), "kernel": platform.release()}


def sampling(rate: Rate) -> Sampling:
    """The timeline's rate as a message."""
    return Sampling(
        samples=rate.samples, interval_ms=rate.interval_ms, longest_gap_ms=rate.longest_gap_ms, gaps=rate.gaps
    )


def file_name(name: str) -> str:
    """A backend's name as a part of a file name."""
    return re.sub(r"[^A-Za-z0-9._-]", "_", name).lstrip(".") or "backend"
