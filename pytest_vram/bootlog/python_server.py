"""What vLLM and SGLang have in common: one process for each card, Python's tracebacks, torch's refused allocations.

An engine that fails says so many times: where it happened, in the process above, in the server. The first line that
gives a reason counts; that something died counts only where nothing else is said.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, NamedTuple

import msgspec

from pytest_vram.bootlog import host_killer, torch_messages, tracebacks
from pytest_vram.bootlog.boot import Boot, Failure, Phase, PhaseSpan
from pytest_vram.bootlog.grammar import with_ends
from pytest_vram.bootlog.lines import Axis, Line, shown, size
from pytest_vram.bootlog.ranks import MAIN, Rank, Ranks
from pytest_vram.bootlog.records import lines_of
from pytest_vram.ledger import Bucket, Entry

#: A server that complains about every request must not fill the report.
_MOST_WARNINGS = 50
#: Processes whose tracebacks are kept apart.
_MOST_PROCESSES = 256
#: Lines after torch's message that may add to it.
_MORE = 12
#: Beginnings of lines of source in a traceback, which hold the words of an error that may not have happened.
_SOURCE = ("raise ", "assert ", "logger.", "return ", '"', "'", 'f"', "f'", "msg ")
_DIGITS = re.compile(r"\d+", re.ASCII)
#: Lines that any server in Python may have, and that say something here; for ``words``, which are plain phrases.
PHRASES = (
    *("Traceback", 'File "', "Error", "error", "ERROR", "WARNING", "CRITICAL", "NCCL", "nccl", "Errno"),
    *("ried to allocate", "allocate memory", "Unable to allocate", "_ALLOC_FAILED", "OUT_OF_DEVICE_MEMORY"),
    *("exceed allowed memory", "Invalid buffer size", "paging file", "Requested ", "Device limit", "according to CUDA"),
    *("Currently allocated", "ddress already in use", "one usage of each socket", "Segmentation fault", "Bus error"),
    *("Fatal Python", "access fault by GPU", "core dumped", "startup complete", "shutdown complete", "Shutting down"),
    *("Uvicorn running", "Invalid fraction", "emory utilization", "gpu_memory_utilization", "--mem-fraction"),
    *host_killer.NEEDLES,
)
_DIED = re.compile(
    r"Segmentation fault|Fatal Python error: .*|Memory access fault by GPU.*|core dumped|Bus error\b", re.ASCII
)
#: Kinds of failures that end a boot, and nothing else.
_OF_BOOT = ("load_error", "bad_option", "port_taken", "precheck")
_PORT = re.compile(
    r"\[Errno (?:98|48|10048)\].*|[Aa]ddress already in use.*|only one usage of each socket address.*", re.ASCII
)
#: ``torch.cuda.set_per_process_memory_fraction`` and the engines' own options for the share of a card.
_SHARE = re.compile(
    r"Invalid fraction value: .*|GPU memory utilization must be less than 1\.0\..*|--mem-fraction-static must be .*"
    r"|gpu_memory_utilization.{0,40}(?:should be (?:less|greater) than|must be in).*",
    re.ASCII,
)
_ERROR = re.compile(r"(?:\w{1,60}\.){0,8}\w{0,60}(?:Error|Exception): \S", re.ASCII)
_NCCL = re.compile(r"\bNCCL error\b.*|\bncclUnhandledCudaError\b.*|\bncclSystemError\b.*|\bncclInternalError\b.*")


class Figure(NamedTuple):
    """A size of the log: bytes, half of its last digit, and the engine's name for it."""

    bytes: int
    resolution: int
    detail: str


class Reason(NamedTuple):
    """A line that gives the reason of a failure, and what is known from the kind of line alone.

    :ivar guess: it only says that something died, and any other line knows more.
    """

    kind: str
    pattern: re.Pattern[str]
    phase: Phase | None = None
    bucket: Bucket | None = None
    certainty: str = "certain"
    note: str | None = None
    guess: bool = False


class Place(NamedTuple):
    """What was going on: phase, bucket, how sure that is, and what a reader must know besides."""

    phase: Phase
    bucket: Bucket | None
    certainty: str
    note: str | None = None


class PythonServer(ABC):
    """Reads one log of an inference server in Python, line by line.

    :cvar engine: its name. :cvar frames: function of a traceback → what it is busy with; of several, the outermost
        counts. :cvar callers: the same for functions that only say so where no other does.
    :cvar reasons: what else ends it; the first that is in a line counts.
    """

    engine: ClassVar[str]
    reasons: ClassVar[tuple[Reason, ...]]
    frames: ClassVar[Mapping[str, tuple[Phase, Bucket | None]]]
    callers: ClassVar[Mapping[str, tuple[Phase, Bucket | None]]]
    words: re.Pattern[str] | None = None
    noise: re.Pattern[str] | None = None

    def __init__(self, engine: str, patterns: Mapping[str, str]) -> None:
        self._line = 0
        self._axis = Axis()
        self._last_time: float | None = None
        self._spans: list[PhaseSpan] = []
        self._ranks = Ranks()
        self._facts: dict[str, Any] = {}
        self._warnings: list[str] = []
        self._complaints: set[str] = set()
        self._failure: Failure | None = None
        self._failed_rank: Rank | None = None
        self._failed_index: int | None = None
        self._guess = False  # the failure is only that something died
        self._named = False  # and its text is the error that it died of
        self._message: torch_messages.TorchMessage | None = None
        self._message_ends = 0
        self._tracebacks: dict[str | None, tracebacks.Frames] = {}
        self._ready = False
        self._prefixed = False
        self._died = False  # a process of the engine did, so that a server that is ready after that is another

    # ------------------------------------------------------------ lines

    def skip(self, lines: int) -> None:
        """Count lines that were left out."""
        self._line += lines

    def feed(self, raw: str) -> Phase | None:
        """Take the next line; the phase that it begins, or ``None``."""
        self._line += 1
        if self._spans and self.noise is not None and self.noise.match(raw):
            return None
        lines = lines_of(raw)
        first = lines[0]
        before = self._spans[-1].name if self._spans else None
        if before is None:
            self._begin("start", first)
            self._prefixed = first.prefix is not None
        if (time := self._axis.time(first)) is not None and (self.words is None or self.words.search(raw)):
            self._last_time = time  # not of lines that may be left out
        if not self._of_requests(first.text):
            for line in lines:
                rank = self._ranks.of(line.process)
                self._trace(line)
                self._troubles(line, rank)
                self._read(line, rank)
        now = self._spans[-1].name
        return now if now != before else None

    @abstractmethod
    def _of_requests(self, text: str) -> bool:
        """Whether a line repeats what users sent or got: nothing in it is the engine's word."""

    @abstractmethod
    def _read(self, line: Line, rank: Rank) -> None:
        """Take what a line says of memory and progress."""

    @property
    def _phase(self) -> Phase:
        return self._spans[-1].name if self._spans else "start"

    def _begin(self, phase: Phase, line: Line) -> None:
        if self._spans and self._spans[-1].name == phase:
            return
        time = self._axis.time(line)
        # Lines of the web server in the same process have no time: theirs is that of the line before.
        start = self._last_time if time is None and self._spans else time
        self._spans.append(PhaseSpan(name=phase, line=self._line, start=start))

    def _advance(self, phase: Phase, line: Line) -> None:
        """Begin a phase of the boot; a slower process that says the same later does not go back to it."""
        order: tuple[Phase, ...] = ("start", "weights", "reserve", "kv", "graph-capture", "warm-up", "ready")
        if self._phase in order and order.index(phase) > order.index(self._phase):
            self._begin(phase, line)

    def _become_ready(self, line: Line) -> None:
        if self._phase in ("stop", "ready"):
            return
        self._ready = True
        if self._failure is not None:
            fatal = self._guess or self._died
            what = "another process failed before this one was ready" if fatal else "recovered"
            self._warn(f"{what}: {self._failure.text}")
            self._failure = None
            self._failed_rank = None
        self._begin("ready", line)

    def _warn(self, text: str) -> None:
        text = shown(text)
        kind = _DIGITS.sub("#", text)
        if len(self._warnings) < _MOST_WARNINGS and kind not in self._complaints:
            self._complaints.add(kind)
            self._warnings.append(text)

    # ------------------------------------------------------------ failures

    def _trace(self, line: Line) -> None:
        if tracebacks.BEGINS in line.text:
            if line.process in self._tracebacks or len(self._tracebacks) < _MOST_PROCESSES:
                self._tracebacks[line.process] = tracebacks.Frames()
        elif (frames := self._tracebacks.get(line.process)) is not None and 'File "' in line.text:
            frames.feed(line.text)

    def _troubles(self, line: Line, rank: Rank) -> None:
        text = line.text
        if self._message is not None and self._line <= self._message_ends:
            self._learn_more(text)
        if line.level is not None and line.level in "DI":
            return
        if line.level != "W" and (message := torch_messages.read_message(text)) is not None:
            if self._ready and self._prefixed and line.prefix is None and not self._tracebacks.get(line.process):
                self._warn(f"looks like a refused allocation, and may be somebody's text: {text}")
            else:
                self._refused(message, line, rank)
        elif (kill := host_killer.read_kill(text, python=True)) is not None:
            if not kill.ours:
                self._warn(kill.warning())
                return
            known, failure = self._failure, kill.failure(phase=self._phase, line=self._line)
            if self._guess and known is not None:
                known = msgspec.structs.replace(known, certainty="unknown")
            self._failure = host_killer.with_kill(known, failure)
            self._guess = self._guess and self._failure is known
        elif line.level != "W" and not text.lstrip().startswith(_SOURCE):
            self._reasons(line, rank)

    def _refused(self, message: torch_messages.TorchMessage, line: Line, rank: Rank) -> None:
        if self._failure is not None and not self._guess:
            return
        if message.backend and message.backend != "CPU":
            self._ranks.are(message.backend)
        place = self._place(line)
        self._message, self._message_ends = message, self._line + _MORE
        self._facts.update(message.facts())
        if (doubt := message.doubt()) is not None:
            self._warn(doubt)
        device = "host" if message.kind == "host_out_of_memory" else None
        failure = message.failure(
            phase=place.phase, bucket=place.bucket, certainty=place.certainty, line=self._line, note=place.note
        )
        self._fail(msgspec.structs.replace(failure, device=device), rank)
        self._failed_index = message.index

    def _learn_more(self, text: str) -> None:
        message, failure = self._message, self._failure
        if message is None or failure is None or not message.parts:
            return
        more = torch_messages.with_more(message, text)
        if more != message:
            self._message = more
            self._failure = msgspec.structs.replace(
                failure, bytes=more.asked, free=more.free, total=more.total, absurd=more.absurd
            )

    def _reasons(self, line: Line, rank: Rank) -> None:
        """What else ends an engine in Python."""
        text = line.text
        for reason in self.reasons:
            if (match := reason.pattern.search(text)) is not None:
                found = self._failure_of(reason.kind, match[0], phase=reason.phase, note=reason.note)
                found = msgspec.structs.replace(found, bucket=reason.bucket, certainty=reason.certainty)
                self._died = self._died or reason.guess
                self._fail(found, rank, guess=reason.guess)
                return
        if match := _PORT.search(text):
            self._fail(self._failure_of("port_taken", match[0]), rank)
        elif match := _SHARE.search(text):
            note = "the share of the card is none: one that was computed for several processes may come out below zero"
            self._fail(self._failure_of("bad_option", match[0], note=note), rank)
        elif match := _NCCL.search(text):
            note = "the processes of the cards could not talk to each other; memory may be the reason, or not"
            self._fail(self._failure_of("crash", match[0], certainty="likely", note=note), rank)
        elif match := _DIED.search(text):
            self._fail(self._failure_of("crash", match[0]), rank, guess=True)
        elif self._guess and not self._named and _ERROR.match(text) and self._failure is not None:
            # What it died of, in Python's words; the kind stays what it is.
            self._named = True
            self._failure = msgspec.structs.replace(self._failure, text=shown(text), line=self._line)

    def _failure_of(
        self, kind: str, text: str, *, certainty: str = "certain", phase: Phase | None = None, note: str | None = None
    ) -> Failure:
        return Failure(
            kind=kind,
            certainty=certainty,
            text=shown(text),
            phase=phase or self._phase,
            line=self._line,
            note=note,
        )

    def _fail(self, failure: Failure, rank: Rank, *, guess: bool = False) -> None:
        """Keep the first reason; one that only says that something died gives way to any other."""
        if self._failure is not None and (guess or not self._guess):
            return
        if self._ready and failure.kind in _OF_BOOT:
            return  # of a request, such as one for an adapter that is not there
        self._failure, self._failed_rank, self._guess = failure, rank, guess

    def _place(self, line: Line) -> Place:
        """What the process was busy with that had its allocation refused."""
        known = self._tracebacks.get(line.process)
        frames = [] if known is None else [frame.function for frame in reversed(known.innermost_first())]
        for table in (self.frames, self.callers):
            for frame in frames:
                if frame in table and table[frame][0] != "ready":
                    return Place(*table[frame], "certain")
        serving = any(frame in self.callers for frame in frames)
        phase = self._phase
        if phase == "ready" or (serving and self._ready):
            return Place("ready", "compute", "likely", "while serving requests, after the boot")
        if phase == "kv" and not self._cached:
            return Place("kv", "kv", "likely", "after the weights, while the cache was planned and made")
        if phase == "kv":
            note = (
                "the KV cache was planned, and nothing says what came next: this is the cache itself, graph capture, or"
                " later"
            )
            return Place("graph-capture", "compute", "likely", note)
        by_phase: dict[Phase, Bucket] = {
            "weights": "weights",
            "reserve": "compute",
            "graph-capture": "compute",
            "warm-up": "compute",
        }
        bucket = by_phase.get(phase)
        if phase == "graph-capture" and self._captured:
            return Place(phase, bucket, "likely", "graph capture, or later")
        return Place(phase, bucket, "unknown" if bucket is None else "certain")

    @property
    def _cached(self) -> bool:
        """Whether the cache was planned, or made, so that what comes next may be something else."""
        return True

    @property
    def _captured(self) -> bool:
        """Whether graph capture was said to be over."""
        return False

    # ------------------------------------------------------------ result

    def boot(self) -> Boot:
        """What the lines so far said."""
        entries = self._entries()
        warnings = list(self._warnings)
        evidence = self._evidence(entries)
        warnings.extend(self._gaps(entries, evidence))
        used = {entry.device for entry in entries}
        failure = self._labelled_failure()
        if failure is not None and failure.device is not None:
            used.add(failure.device)
        return Boot(
            engine=self.engine,
            era=self._era,
            evidence=evidence,
            phases=with_ends(self._spans),
            entries=entries,
            devices={label: name for label, name in self._names().items() if label in used},
            facts=self._all_facts(),
            failure=failure,
            warnings=tuple(warnings),
            ready=self._ready,
            clock=self._axis.clock,
        )

    @property
    @abstractmethod
    def _era(self) -> str:
        """The release, as far as the log tells it."""

    @abstractmethod
    def _entries(self) -> tuple[Entry, ...]:
        """The buffers, as printed."""

    @abstractmethod
    def _evidence(self, entries: tuple[Entry, ...]) -> Literal["complete", "partial", "none"]:
        """How much of the memory the log shows."""

    @abstractmethod
    def _gaps(self, entries: tuple[Entry, ...], evidence: str) -> list[str]:
        """Sentences on what the log does not show."""

    def _all_facts(self) -> dict[str, Any]:
        facts = dict(self._facts)
        ready = next((span for span in self._spans if span.name == "ready"), None)
        if ready is not None and ready.start is not None and self._spans[0].start is not None:
            facts["boot_seconds"] = round(ready.start - self._spans[0].start, 6)
        return facts

    def _names(self) -> dict[str, str]:
        names = self._ranks.names()
        names.setdefault("host", "CPU")
        if self._failed_rank is not None:
            label = self._ranks.label(self._failed_rank)
            names.setdefault(label, self._ranks.name(self._ranks.index(self._failed_rank)))
        if self._failed_index is not None:
            names.setdefault(f"gpu{self._failed_index}", self._ranks.name(self._failed_index))
        return names

    def _labelled_failure(self) -> Failure | None:
        failure = self._failure
        if failure is not None and failure.kind == "kv_planning" and failure.total is None:
            failure = msgspec.structs.replace(failure, total=self._facts.get("device_bytes"))
        if failure is None or failure.device is not None or self._failed_rank is None:
            return failure
        if failure.kind not in ("out_of_memory", "kv_planning", "precheck"):
            return failure
        rank = self._failed_rank
        if rank in (MAIN, MAIN._replace(dp=0)) and self._failed_index is not None:
            return msgspec.structs.replace(failure, device=f"gpu{self._failed_index}")
        above = rank._replace(dp=None) == MAIN
        if above and (self._ranks.world > 1 or (failure.kind != "precheck" and not self._ranks.told(rank))):
            return failure  # said by the process above those of the cards, or by nobody knows whom
        return msgspec.structs.replace(failure, device=self._ranks.label(rank))

    def _entry(self, bucket: Bucket, rank: Rank, figure: Figure) -> Entry:
        return Entry(
            bucket=bucket,
            device=self._ranks.label(rank),
            bytes=figure.bytes,
            source="engine-log",
            detail=figure.detail,
            resolution=figure.resolution,
        )


#: A request as the web server notes it, at the beginning of a line.
ACCESS = r"INFO:     [\d.:\[\]a-f]{3,60} - \""


def any_of(*phrases: str) -> re.Pattern[str]:
    """A pattern that finds one of these phrases."""
    return re.compile("|".join(re.escape(phrase) for phrase in dict.fromkeys(phrases)))


def gibibytes(number: str, detail: str) -> Figure | None:
    """A size in units of 2**30, printed with two digits or more; engines that round leave zeros out at the end.

    ``None`` where it is no usable number, negative ones among them.
    """
    whole, _, digits = number.partition(".")
    found = size(f"{whole}.{digits:0<2}", "GiB")
    return None if found is None else Figure(*found, detail)


def significant(number: str, unit: str, detail: str) -> Figure | None:
    """A size in ``unit`` that is printed with four significant digits, and without zeros at the end."""
    whole, _, digits = number.partition(".")
    found = size(f"{whole}.{digits:0<{max(0, 4 - len(whole))}}", unit)
    return None if found is None else Figure(*found, detail)


def negative(number: str) -> bool:
    """True for a printed number below zero."""
    return number.startswith("-") and any(digit in "123456789" for digit in number)


def difference(total: Figure, part: Figure, detail: str) -> Figure | None:
    """What is left of one size without another; ``None`` where nothing is."""
    left = total.bytes - part.bytes
    return Figure(left, total.resolution + part.resolution, detail) if left > 0 else None
