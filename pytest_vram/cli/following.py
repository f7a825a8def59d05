"""Follows the journal of a run that may still be written: lines in, the picture of the run out.

Whatever the file holds, memory stays bounded and nothing raises: lines that are cut short, too long or not what they
should be are counted and passed over.
"""

from __future__ import annotations

import os
import stat
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from pytest_vram.journal import FILE_NAME, VERSION
from pytest_vram.measure import procfs
from pytest_vram.measure.series import Series
from pytest_vram.readings import Measured, Reading
from pytest_vram.report.watched import (
    Watched,
    WatchedBackend,
    WatchedDevice,
    WatchedLease,
    WatchedProcess,
    WatchedTest,
    WatchedWaiting,
)

#: Longest line that is looked at; the keeper's own are of some kilobytes.
LONGEST = 16 << 20
_PIECE = 1 << 20
#: Most things of one kind that are kept of a journal, however many it names.
_MOST = 4096
_MOST_NOTES = 5
_SLICES = 240
_SHOWN_PROCESSES = 100


_LONGEST_TEXT = 500

_Number = Annotated[int, Meta(ge=0, le=1 << 62)]


class _Head(msgspec.Struct):
    v: int
    t: _Number
    kind: str


class _Line(msgspec.Struct, kw_only=True):
    t: _Number
    event: str = ""


class _Run(_Line, kw_only=True):
    run: str = ""
    wall: float | None = None
    controller: _Number | None = None
    interval_ms: float | None = None
    settings: dict[str, Any] = {}


class _Keeper(_Line, kw_only=True):
    pid: _Number | None = None


class _Device(_Line, kw_only=True):
    label: str
    type: str = ""
    name: str = ""
    capacity: Measured | None = None
    limit_from: str | None = None


class _Process(_Line, kw_only=True):
    pid: _Number
    name: str = ""
    owner: str = ""


class _Sample(_Line, kw_only=True):
    device: str
    max: _Number
    last: _Number


class _Backend(_Line, kw_only=True):
    name: str
    generation: _Number = 0
    state: str
    engine: str | None = None
    pid: _Number | None = None
    reason: str | None = None


class _Phase(_Line, kw_only=True):
    name: str
    backend: str | None = None
    generation: _Number = 0
    window: _Number | None = None


class _Figures(msgspec.Struct):
    run: dict[str, Measured] = {}


class _Record(msgspec.Struct):
    tests: dict[str, str] = {}


class _Window(_Line, kw_only=True):
    window: _Number
    name: str = ""
    what: str = ""
    parent: _Number | None = None
    backends: list[str] = []
    closed: _Figures | None = None
    record: _Record | None = None


class _Test(_Line, kw_only=True):
    nodeid: str = ""
    outcome: str = ""
    earlier: str = ""
    worker: str | None = None


class _Lease(_Line, kw_only=True):
    ticket: _Number = 0
    name: str = ""
    worker: str = ""
    need: dict[str, _Number] = {}
    takes: dict[str, _Number] = {}
    exclusive: bool = False


class _Note(_Line, kw_only=True):
    text: str = ""


class _End(_Line, kw_only=True):
    reason: str = ""
    outcome: str = ""


_LINES: dict[str, type[_Line]] = {
    "run": _Run,
    "keeper": _Keeper,
    "device": _Device,
    "process": _Process,
    "sample": _Sample,
    "backend": _Backend,
    "phase": _Phase,
    "window": _Window,
    "test": _Test,
    "lease": _Lease,
    "note": _Note,
    "gap": _Line,
    "end": _End,
}


def open_regular(path: Path) -> int:
    """A descriptor of a file, which reading cannot wait for.

    :raises OSError: it cannot be opened, or is no file (a pipe that somebody put there).
    """
    found = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0))
    try:
        if not stat.S_ISREG(os.fstat(found).st_mode):
            raise OSError(f"{path} is no regular file")
    except OSError:
        os.close(found)
        raise
    return found


class Tail:
    """New whole lines of a file that grows, also one that does not exist yet or is replaced by a shorter one.

    :ivar dropped: lines that were longer than :data:`LONGEST`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.dropped = 0
        self._fd = -1
        self._rest = bytearray()
        self._skipping = False

    def lines(self) -> Iterator[bytes]:
        """What has come since the last call; a line without its end waits for the rest of it."""
        if self._fd < 0:
            try:
                self._fd = open_regular(self.path)
            except OSError:
                return
        try:
            if os.lseek(self._fd, 0, os.SEEK_CUR) > os.fstat(self._fd).st_size:
                os.lseek(self._fd, 0, os.SEEK_SET)
                self._rest.clear()
        except OSError:
            return  # not a file that one can go back in
        while True:
            try:
                piece = os.read(self._fd, _PIECE)
            except OSError:
                return
            if not piece:
                return
            *whole, rest = piece.split(b"\n")
            for part in whole:
                if self._skipping:
                    self._skipping = False
                    continue
                line = bytes(self._rest) + part
                self._rest.clear()
                yield line
            if self._skipping:
                continue
            self._rest += rest
            if len(self._rest) > LONGEST:
                self._rest.clear()
                self._skipping = True
                self.dropped += 1

    @property
    def cut(self) -> bool:
        """Whether the file ends in a line without its end."""
        return bool(self._rest) or self._skipping

    def close(self) -> None:
        """Close the file. Calling it twice is fine."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class _Gauge:
    def __init__(self, line: _Device) -> None:
        self.line = line
        self.held: int | None = None
        self.peak: int | None = None
        self.trouble: str | None = None
        self.series = Series(_SLICES)

    def saw(self, peak: int) -> None:
        self.peak = peak if self.peak is None else max(self.peak, peak)


#: Told, for everything that a person may want to know, the seconds since the run began and one sentence.
Teller = Callable[[float, str], None]


class Picture:
    """What is known of a run from its journal so far, and from its keeper where that answers.

    :param tell: told of every change.
    """

    def __init__(self, folder: Path, tell: Teller | None = None) -> None:
        self.folder = folder
        self.run = _Run(t=0, run=folder.name)
        self.keeper: int | None = None
        self.end: _End | None = None
        self.first: int | None = None
        self.last = 0
        self.torn = self.unreadable = self.gaps = 0
        self._tail = Tail(folder / FILE_NAME)
        self._teller = tell
        self._devices: dict[str, _Gauge] = {}
        self._backends: dict[tuple[str, int], _Backend] = {}
        self._boot_phases: dict[tuple[str, int], str] = {}
        self._windows: dict[int, _Window] = {}
        self._phases: dict[int, str] = {}
        self._processes: dict[int, _Process] = {}
        self._leases: dict[int, _Lease] = {}
        self._waits: dict[int, _Lease] = {}
        self._counts: Counter[str] = Counter()
        self._last_test: _Test | None = None
        self._notes: list[str] = []

    @property
    def begun(self) -> bool:
        """Whether the journal has a line."""
        return self.first is not None

    def read(self) -> bool:
        """Take in what has come; whether anything has."""
        came = False
        for line in self._tail.lines():
            came = True
            if line:
                self._take(line)
        return came

    def close(self) -> None:
        """Close the journal."""
        self._tail.close()

    def _take(self, raw: bytes) -> None:
        try:
            head = msgspec.json.decode(raw, type=_Head)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            self.torn += 1
            return
        kind = _LINES.get(head.kind)
        if head.v != VERSION:
            self.unreadable += 1
            return
        self.first = head.t if self.first is None else self.first
        self.last = max(self.last, head.t)
        if kind is None:
            return  # a kind that another version writes
        try:
            line = msgspec.json.decode(raw, type=kind)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            self.unreadable += 1
            return
        _shorten(line)
        getattr(self, f"_{head.kind}")(line)

    def _tell(self, t: int, text: str) -> None:
        if self._teller is not None:
            self._teller(_since(self.first or 0, t), text)

    # ------------------------------------------------------------ lines

    def _run(self, line: _Run) -> None:
        self.run = line

    def _keeper(self, line: _Keeper) -> None:
        self.keeper = line.pid
        self.end = None  # a keeper that follows another takes up the run
        self._windows.clear()
        self._leases.clear()
        self._waits.clear()
        self._processes.clear()

    def _device(self, line: _Device) -> None:
        if len(self._devices) < _MOST and line.label not in self._devices:
            self._devices[line.label] = _Gauge(line)

    def _process(self, line: _Process) -> None:
        if line.event == "left":
            self._processes.pop(line.pid, None)
        elif len(self._processes) < _MOST:
            self._processes[line.pid] = line

    def _sample(self, line: _Sample) -> None:
        device = self._devices.get(line.device)
        if device is not None:
            device.held = line.last
            device.saw(line.max)
            device.series.add(line.t, line.last, line.max, last=line.last)

    def _backend(self, line: _Backend) -> None:
        key = (line.name, line.generation)
        self._backends.pop(key, None)
        self._backends[key] = line
        while len(self._backends) > _MOST:
            del self._backends[next(iter(self._backends))]
        self._boot_phases.pop(key, None)
        why = f": {line.reason}" if line.reason else ""
        self._tell(line.t, f"backend {line.name}#{line.generation} {line.state}{why}")

    def _phase(self, line: _Phase) -> None:
        if line.backend is not None:
            if (line.backend, line.generation) in self._backends:
                self._boot_phases[line.backend, line.generation] = line.name
        elif line.window in self._windows:
            self._phases[line.window] = line.name

    def _window(self, line: _Window) -> None:
        if line.event == "open":
            if len(self._windows) < _MOST:
                self._windows[line.window] = line
            if line.what == "test":
                self._tell(line.t, f"test {line.name} began")
            return
        opened = self._windows.pop(line.window, None)
        self._phases.pop(line.window, None)
        if opened is not None and opened.what == "phase" and opened.parent is not None:
            self._phases.pop(opened.parent, None)
        for nodeid, outcome in (line.record.tests if line.record is not None else {}).items():
            self._count(outcome)  # short tests have no lines of their own, but where they became something else
            self._last_test = _Test(t=line.t, nodeid=nodeid, outcome=outcome)
        figures = line.closed.run if line.closed is not None else {}
        for label, figure in figures.items():
            device = self._devices.get(label)
            size = _size(figure)
            if device is not None and size is not None:
                device.saw(size)

    def _test(self, line: _Test) -> None:
        if line.earlier and self._counts[line.earlier] > 0:
            self._counts -= Counter({line.earlier: 1})
        self._count(line.outcome)
        self._last_test = line
        self._tell(line.t, f"test {line.nodeid} {line.outcome}")

    def _count(self, outcome: str) -> None:
        if len(self._counts) < _MOST or outcome in self._counts:
            self._counts[outcome] += 1

    def _lease(self, line: _Lease) -> None:
        self._waits.pop(line.ticket, None)
        self._leases.pop(line.ticket, None)
        if line.event == "wait" and len(self._waits) < _MOST:
            self._waits[line.ticket] = line
            self._tell(line.t, f"test {line.name} waits")
        elif line.event == "granted" and len(self._leases) < _MOST:
            self._leases[line.ticket] = line

    def _gap(self, line: _Line) -> None:
        self.gaps += 1

    def _note(self, line: _Note) -> None:
        self._notes = [*self._notes[1 - _MOST_NOTES :], line.text]
        self._tell(line.t, line.text)

    def _end(self, line: _End) -> None:
        self.end = line
        self._tell(line.t, f"the run ended: {line.reason}")

    # ------------------------------------------------------------ the picture

    def show(self, state: Any, **fields: Any) -> Watched:
        """The run as it is now, from the journal alone.

        :param state: how it is with the run as a whole; ``fields`` are those that the journal cannot know.
        """
        now = time.monotonic_ns() if state == "running" else self.last
        device = self.run.settings.get("device")
        text = device.get("value") if isinstance(device, dict) else None
        return Watched(
            run=self.run.run or self.folder.name,
            folder=str(self.folder),
            state=state,
            started=self.run.wall,
            seconds=_since(self.first, now) if self.first is not None else None,
            device=text if isinstance(text, str) else None,
            interval_ms=self.run.interval_ms,
            controller=self.run.controller,
            keeper=self.keeper,
            devices=[self._device_now(one, now, over=state != "running") for one in self._devices.values()],
            backends=[self._backend_now(key, one, now) for key, one in self._backends.items()],
            tests=[self._test_now(one, now) for one in self._windows.values() if one.what == "test"],
            waiting=[
                WatchedWaiting(
                    name=one.name,
                    seconds=_since(one.t, now),
                    worker=one.worker or None,
                    takes=one.takes or one.need,
                    exclusive=one.exclusive,
                )
                for one in self._waits.values()
            ],
            leases=[
                WatchedLease(
                    kind="test",
                    name=one.name,
                    holds=one.takes or one.need,
                    worker=one.worker or None,
                    exclusive=one.exclusive,
                )
                for one in self._leases.values()
                if one.takes or one.need or one.exclusive
            ],
            processes=self._processes_now(alive=state == "running"),
            process_count=len(self._processes) if state == "running" else 0,
            counts=dict(self._counts),
            last_test=self._last_test.nodeid if self._last_test else None,
            last_outcome=self._last_test.outcome if self._last_test else None,
            notes=list(self._notes),
            gaps=self.gaps,
            torn=self.torn + self._tail.dropped + int(self._tail.cut and state != "running"),
            unreadable=self.unreadable,
            outcome=self.end.outcome or self.end.reason if self.end else None,
            **fields,
        )

    @staticmethod
    def _device_now(device: _Gauge, now: int, *, over: bool) -> WatchedDevice:
        line = device.line
        return WatchedDevice(
            label=line.label,
            kind=line.type,
            name=line.name,
            capacity=_size(line.capacity),
            limit_from=line.limit_from,
            # The last sample of a run that is over is from before its end.
            held=None if over else device.held,
            peak=device.peak,
            series=device.series.levels(_SLICES, now),
        )

    def _backend_now(self, key: tuple[str, int], line: _Backend, now: int) -> WatchedBackend:
        return WatchedBackend(
            name=line.name,
            generation=line.generation,
            state=line.state,
            engine=line.engine,
            pid=line.pid,
            phase=self._boot_phases.get(key) if line.state == "starting" else None,
            seconds=_since(line.t, now),
            reason=line.reason,
        )

    def _test_now(self, line: _Window, now: int) -> WatchedTest:
        requests = sum(one.what == "request" and one.parent == line.window for one in self._windows.values())
        return WatchedTest(
            name=line.name,
            seconds=_since(line.t, now),
            phase=self._phases.get(line.window),
            requests=requests,
            backends=line.backends,
        )

    def _processes_now(self, *, alive: bool) -> list[WatchedProcess]:
        found = []
        for line in list(self._processes.values())[:_SHOWN_PROCESSES] if alive else []:
            memory = procfs.read_memory(line.pid)
            host = memory.anonymous + memory.swap if memory is not None else None
            found.append(WatchedProcess(pid=line.pid, name=line.name, owner=line.owner, host=host))
        return found


def _size(figure: Measured | None) -> int | None:
    """Bytes of a figure that was measured and can be one."""
    return figure.bytes if isinstance(figure, Reading) and 0 <= figure.bytes <= 1 << 62 else None


def _shorten(line: _Line) -> None:
    """Cut what is longer than a person reads, so that thousands of lines can be kept."""
    for name in line.__struct_fields__:
        value = getattr(line, name)
        if isinstance(value, str) and len(value) > _LONGEST_TEXT:
            setattr(line, name, value[:_LONGEST_TEXT] + "…")
        elif isinstance(value, dict) and name in ("need", "takes"):
            setattr(line, name, {key[:_LONGEST_TEXT]: value[key] for key in list(value)[:16]})
        elif isinstance(value, list):
            setattr(line, name, [text[:_LONGEST_TEXT] for text in value[:16]])


def _since(t: int, now: int) -> float:
    return round(max(0, now - t) / 1e9, 3)
