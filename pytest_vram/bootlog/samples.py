"""Samples of memory that somebody took beside a boot: what ``nvidia-smi`` printed, or the journal of a run."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from pytest_vram.bootlog.files import Log, log_of_text, opened, strange
from pytest_vram.bootlog.sample_lines import Row, Rows
from pytest_vram.errors import BadInput
from pytest_vram.journal import Journal
from pytest_vram.readings import Measured

#: What to type for samples that can be used.
COMMAND = "nvidia-smi --query-gpu=timestamp,index,uuid,memory.used,memory.total --format=csv -l 1"
#: Samples that are kept: three days of eight cards, each second.
MOST = 2_000_000
#: Seconds between two GPUs of one round of nvidia-smi, which reads them one after another.
_ROUND = 0.05
#: Lines that are none for each that is a sample, beyond which it is another kind of file.
_MOST_STRANGE = 4

#: More bytes than any device has.
_MOST_BYTES = 1 << 50

SampleClock = Literal["epoch", "local", "relative"]


class Series(msgspec.Struct, frozen=True, kw_only=True):
    """The samples of one device, or of one process, in their order.

    :ivar values: bytes; ``None`` where the figure could not be read, which is never 0.
    :ivar times: seconds on ``clock``, one for each value; empty where only the order is known.
    :ivar since: begin of the time that each value is the largest figure of; empty where each is of one moment.
    :ivar clock: ``epoch`` (1970, UTC), ``local`` (the same, of a zone that is not said), ``relative`` (the differences
        alone mean something), or ``None``.
    :ivar index: number or label of the device as written there. :ivar pid: of the process, where it is one of them.
    :ivar total: size of the device in bytes. :ivar scope: ``device`` or ``process``.
    """

    values: tuple[int | None, ...]
    times: tuple[float, ...] = ()
    since: tuple[float, ...] = ()
    clock: SampleClock | None = None
    index: str | None = None
    name: str | None = None
    uuid: str | None = None
    pid: str | None = None
    total: int | None = None
    source: str = "nvidia-smi"
    scope: str = "device"

    @property
    def interval(self) -> float | None:
        """Median seconds between two samples, ``None`` where they have no times."""
        gaps = [after - before for before, after in itertools.pairwise(self.times)]
        return statistics.median(gaps) if gaps else None


class JournalPhase(msgspec.Struct, frozen=True, kw_only=True):
    """A phase of a boot as a keeper saw it; times are seconds since 1970. ``peak``: device label → figure."""

    name: str
    start: float
    end: float
    peak: dict[str, Measured] = {}


class JournalBoot(msgspec.Struct, frozen=True, kw_only=True):
    """One boot in a journal: the backend, the name of its log, and its phases in order."""

    backend: str
    log: str
    phases: tuple[JournalPhase, ...] = ()


class Samples(msgspec.Struct, frozen=True, kw_only=True):
    """What was sampled. ``notes``: what a reader must know. ``boots``: those of a journal."""

    origin: str
    series: tuple[Series, ...]
    notes: tuple[str, ...] = ()
    boots: tuple[JournalBoot, ...] = ()


def read_samples(text_or_path: str | Path, *, process: str | int | None = None) -> Samples:
    """Read samples: CSV, tables or lists of ``nvidia-smi``, CSV of ``rocm-smi``, or the journal of a run.

    :param text_or_path: a path, or the text itself: a string with a newline in it.
    :param process: PID, or a part of the name, of the process that counts where each process has its own figures.
    :raises BadInput: there are no samples in it, or it does not say which figure is which.
    """
    if isinstance(text_or_path, str) and "\n" in text_or_path:
        return _of_log(log_of_text(text_or_path), process)
    path = Path(text_or_path)
    if path.is_dir() and (path / "journal.jsonl").is_file():
        path = path / "journal.jsonl"
    with opened(path) as log:
        head = log.beginning()
        if head.startswith(b'{"v":'):
            return _of_journal(path)
        return _of_log(log, process)


# ---------------------------------------------------------------- nvidia-smi


def _of_log(log: Log, process: str | int | None) -> Samples:
    head = log.beginning()
    if not head.strip():
        raise BadInput(f"{log.origin} is empty: there are no samples in it")
    if strange(head):
        raise BadInput(f"{log.origin} is not a text, so there are no samples in it")
    rows = Rows(log.origin, COMMAND)
    for line in _lines(log):
        rows.feed(line)
        if len(rows.found) > MOST:
            raise BadInput(f"{log.origin} has over {MOST:,} samples: cut it to the time of the boot")
    rows.finish()
    if not rows.found or rows.strange > _MOST_STRANGE * len(rows.found) + _MOST_STRANGE:
        raise BadInput(f"{log.origin} holds no samples of memory that are known here: take them with `{COMMAND}`")
    notes = [*log.notes, *rows.notes()]
    found = _of_process(rows.found, process, log.origin)
    series = tuple(_series(part, rows.source, notes) for part in _apart(found, notes))
    if all(value is None for one in series for value in one.values):
        raise BadInput(f"no sample in {log.origin} has a figure: the driver does not tell this memory")
    return Samples(origin=log.origin, series=series, notes=tuple(dict.fromkeys(notes)))


def _lines(log: Log) -> Iterator[str]:
    for block in log.blocks():
        for line in block.removesuffix(b"\n").split(b"\n"):
            yield line[:4096].decode("utf-8", "replace")


def _of_process(rows: list[Row], process: str | int | None, origin: str) -> list[Row]:
    """The rows of the process that was asked for; all of them where none was."""
    if process is None:
        return rows
    wanted = str(process)
    found = [row for row in rows if row.pid == wanted or (not wanted.isdigit() and wanted in (row.process or ""))]
    if not found:
        raise BadInput(f"no sample in {origin} is of process {wanted!r}")
    return found


def _apart(rows: list[Row], notes: list[str]) -> list[list[Row]]:
    """The rows of each device, or process, by itself."""
    parts: dict[tuple[str | None, str | None], list[Row]] = {}
    for row in rows:
        parts.setdefault((row.gpu or row.uuid or row.bus or row.name, row.pid), []).append(row)
    if len(parts) > 1 or rows[0].gpu or rows[0].uuid or rows[0].pid or rows[0].bus:
        return list(parts.values())
    rounds = _rounds(rows)
    size = len(rounds[0])
    if size > 1 and len(rounds) > 1 and all(len(one) == size for one in rounds[:-1]) and len(rounds[-1]) <= size:
        notes.append(f"the samples come {size} at a time, so they were taken for those of {size} GPUs, in this order")
        return [[one[place]._replace(gpu=str(place)) for one in rounds if place < len(one)] for place in range(size)]
    return [rows]


def _rounds(rows: list[Row]) -> list[list[Row]]:
    """Rows that were read at one moment, by their times."""
    rounds = [[rows[0]]]
    for before, row in itertools.pairwise(rows):
        if row.stamp is not None:
            same = row.stamp == before.stamp
        else:
            same = row.time is not None and before.time is not None and 0 <= row.time - before.time < _ROUND
        if same:
            rounds[-1].append(row)
        else:
            rounds.append([row])
    return rounds


def _series(rows: list[Row], source: str, notes: list[str]) -> Series:
    clock: SampleClock | None = None
    stamps = [row.stamp for row in rows if row.stamp is not None]
    if all(row.time is not None for row in rows):
        if len(set(stamps)) < len(stamps):
            notes.append("there are fewer times than samples, so that only the order of the samples is known")
        else:
            kinds = {row.clock for row in rows}
            clock = "epoch" if kinds == {"epoch"} else "relative" if "relative" in kinds else "local"
    elif any(row.time is not None for row in rows):
        notes.append("some samples have no time, so that only the order of the samples is known")
    times = [row.time for row in rows if row.time is not None] if clock is not None else []
    if clock == "relative":
        days = 0.0
        for place in range(1, len(times)):  # a time of day begins anew at midnight
            if times[place] + days < times[place - 1] - 43_200:
                days += 86_400.0
            times[place] += days
    last = rows[-1]
    rows, times, clock = _in_order(rows, times, clock, notes)
    values = tuple(_possible(row) for row in rows)
    if values.count(None) > sum(row.used is None for row in rows):
        notes.append("samples that are larger than the device itself were left out")
    return Series(
        values=values,
        times=tuple(times),
        clock=clock,
        index=last.gpu,
        name=last.name or last.process,
        uuid=last.uuid,
        pid=last.pid,
        total=next((row.total for row in reversed(rows) if row.total is not None), None),
        source=source,
        scope="process" if last.pid is not None else "device",
    )


def _possible(row: Row) -> int | None:
    """A figure that is no more than the device has, or than any has."""
    if row.used is None or row.used > (row.total or _MOST_BYTES):
        return None
    return row.used


def _in_order(
    rows: list[Row], times: list[float], clock: SampleClock | None, notes: list[str]
) -> tuple[list[Row], list[float], SampleClock | None]:
    """Samples in the order of their times; without times where two parts of the same time contradict each other."""
    falls = [place for place in range(1, len(times)) if times[place] < times[place - 1]]
    if not falls:
        return rows, times, clock
    if len(falls) == len(times) - 1:
        notes.append("the samples begin with the last one; they were turned round")
        return rows[::-1], times[::-1], clock
    ends = [0, *falls, len(times)]
    parts = sorted(itertools.pairwise(ends), key=lambda part: times[part[0]])
    if all(times[one[1] - 1] < times[two[0]] for one, two in itertools.pairwise(parts)):
        notes.append("the samples were not in the order of their times, and were sorted")
        order = [place for begin, end in parts for place in range(begin, end)]
        return [rows[place] for place in order], [times[place] for place in order], clock
    notes.append(
        "the times of the samples go back, as where two files are in one or a clock was set, so that only their order"
        " is known"
    )
    return rows, [], None


# ---------------------------------------------------------------- the journal of a run


class _Header(msgspec.Struct):
    t: int
    wall: float


class _Device(msgspec.Struct):
    label: str
    name: str = ""
    uuid: str | None = None
    capacity: Measured | None = None


class _Sample(msgspec.Struct):
    t: int
    device: str
    max: Annotated[int, msgspec.Meta(ge=0, le=_MOST_BYTES)]
    t0: int | None = None


class _Backend(msgspec.Struct):
    name: str
    state: str
    generation: int = 0
    log: str | None = None


class _Before(msgspec.Struct):
    name: str
    start: int
    end: int
    peak: dict[str, Measured] = {}


class _Phase(msgspec.Struct):
    backend: str | None = None
    generation: int = 0
    before: _Before | None = None


def _of_journal(path: Path) -> Samples:
    wall: float | None = None
    devices: dict[str, _Device] = {}
    blocks: dict[str, list[tuple[float, float, int]]] = {}
    logs: dict[tuple[str, int], str] = {}
    phases: dict[tuple[str, int], list[JournalPhase]] = {}
    journal = Journal(path)
    try:
        for line in journal:
            kind = line["kind"]
            if kind == "run" and wall is None:
                header = msgspec.convert(line, _Header)
                wall = header.wall - header.t / 1e9
            shift = wall or 0.0
            if kind == "device":
                device = msgspec.convert(line, _Device)
                devices[device.label] = device
            elif kind == "sample":
                sample = msgspec.convert(line, _Sample)
                begin = sample.t if sample.t0 is None else sample.t0
                kept = blocks.setdefault(sample.device, [])
                kept.append((begin / 1e9 + shift, sample.t / 1e9 + shift, sample.max))
                if len(kept) > MOST:
                    raise BadInput(f"{path} has over {MOST:,} samples, more than one boot can be of")
            elif kind == "backend":
                backend = msgspec.convert(line, _Backend)
                if backend.log is not None:
                    logs[backend.name, backend.generation] = backend.log
            elif kind == "phase":
                phase = msgspec.convert(line, _Phase)
                if phase.backend is not None and phase.before is not None:
                    one = phase.before
                    phases.setdefault((phase.backend, phase.generation), []).append(
                        JournalPhase(
                            name=one.name, start=one.start / 1e9 + shift, end=one.end / 1e9 + shift, peak=one.peak
                        )
                    )
    except (msgspec.ValidationError, OverflowError) as error:
        raise BadInput(f"{path} is a journal with a line that cannot be used: {error}") from None
    series = tuple(_of_blocks(label, found, devices.get(label), wall is not None) for label, found in blocks.items())
    boots = tuple(JournalBoot(backend=key[0], log=log, phases=tuple(phases.get(key, ()))) for key, log in logs.items())
    if not series and not any(phase.peak for boot in boots for phase in boot.phases):
        raise BadInput(f"the run of {path} measured nothing, so there are no samples in it")
    notes = (f"{journal.torn} lines of the journal were cut short",) if journal.torn else ()
    return Samples(origin=str(path), series=series, notes=notes, boots=boots)


def _of_blocks(label: str, blocks: list[tuple[float, float, int]], device: _Device | None, dated: bool) -> Series:
    capacity = device.capacity if device is not None else None
    return Series(
        values=tuple(block[2] for block in blocks),
        times=tuple(block[1] for block in blocks),
        since=tuple(block[0] for block in blocks),
        clock="epoch" if dated else "relative",
        index=label,
        name=device.name if device is not None else None,
        uuid=device.uuid if device is not None else None,
        total=getattr(capacity, "bytes", None),
        source="journal",
        scope="run",
    )
