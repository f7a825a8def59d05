"""The grammar of transformers, and of other programs on torch that have none of their own.

Such programs print no sizes of what they load: progress, warnings and, when memory runs out, torch's message with the
frames around it. The message's figures are facts (they belong to no bucket); the frames tell phase and bucket.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

from pytest_vram.bootlog import host_killer, torch_messages, tracebacks, tracing
from pytest_vram.bootlog.boot import Boot, Failure, Phase, PhaseSpan
from pytest_vram.bootlog.devices import HOST, Labels
from pytest_vram.bootlog.grammar import with_ends
from pytest_vram.bootlog.lines import Line, shown
from pytest_vram.bootlog.numbering import numbered
from pytest_vram.bootlog.records import RECORD, lines_of
from pytest_vram.bootlog.torch_messages import TorchMessage

NO_EVIDENCE = (
    "no sizes are in this log, as transformers prints none: give samples of the device's memory beside it (--samples),"
    " or log torch.cuda.memory_allocated() and torch.cuda.max_memory_reserved() after the model is loaded"
)
_PROGRESS = re.compile(r"Loading (?:checkpoint shards|weights): +(\d{1,3})%", re.ASCII)
_SHARDS = re.compile(r"Loading checkpoint shards: .{0,300}\b\d{1,5}/(\d{1,5}) \[")
_READY = re.compile(
    r"Application startup complete|Uvicorn running on |Running on local URL:|^ \* Running on http|Running on http://",
    re.ASCII,
)
_OFFLOADED = re.compile(
    r"Some parameters are on the meta device (?:device )?because they were offloaded to the ([\w ]{2,20})", re.ASCII
)
_SIGNS = re.compile(
    r"\bfalling back\b|\bfallback to\b|will be ignored|is ignored\b|\bnot supported\b|newly initialized"
    r"|sequence length is longer than the specified maximum|exceed the model's predefined maximum length"
    r"|Input length of input_ids is \d|CUDA is not available|No GPU found|no CUDA-capable device|mps fallback"
    r"|CPU offload|offloaded to the (?:cpu|disk)",
    re.IGNORECASE,
)
_WARNS = re.compile(r"warn|^(?:Some|The|Token|This|You|Input|`|No|CUDA|Setting|Flash|Using)\b", re.IGNORECASE)
#: Where a message may begin: after the error's name, or a log's own words that end with a colon.
_BEFORE = re.compile(r'^(?:[^"\'{]{0,200}: ?)?$')
_ERROR_LINE = re.compile(
    r"^(?P<name>[A-Za-z_][\w.]{0,120}(?:Error|Exception|Exit|Interrupt))(?:: (?P<what>.*))?$", re.ASCII
)
_PRECHECK = re.compile(
    r"Some modules are dispatched on the CPU or the disk|not enough (?:GPU|CUDA) (?:RAM|memory) to fit"
    r"|model is too large to fit on",
    re.IGNORECASE,
)
_LOAD = re.compile(
    r"does not appear to have (?:a|any) files? named|no file named|SafetensorError|Unrecognized model in|"
    r"does not recognize this architecture|is not a local folder and is not a valid model identifier"
    r"|size mismatch for|Unable to load weights|Can't load (?:the configuration|tokenizer|the model)"
    r"|[Uu]sing `?(?:low_cpu_mem_usage|bitsandbytes|load_in_)\S{0,40} .{0,60}requires"
)
_PORT = re.compile(r"address already in use|\[Errno 98\]|\[WinError 10048\]", re.IGNORECASE)
_CRASH = re.compile(
    r"(?:CUDA|HIP) error: (?!out of memory)|Segmentation fault|Fatal Python error|illegal instruction", re.IGNORECASE
)
#: Levels of lines that repeat what users sent.
_QUIET = re.compile(r"^[^{]{0,200}?\b(?:TRACE|DEBUG|INFO)\b", re.ASCII)
_LOUD = re.compile(r"^[^{]{0,200}?\b(?:WARN(?:ING)?|ERROR|CRITICAL|FATAL)\b", re.ASCII)
#: Spans of text-generation-inference → phase and bucket of what it was at. While it warms up it also makes its cache.
_SPANS: dict[str, tuple[str, str | None]] = {
    "warmup": ("warm-up", None),
    "prefill": ("prefill", "compute"),
    "decode": ("decode", "compute"),
}
_MOST_WARNINGS = 50
#: Lines after a message in which a terminal's width may have put the rest of it.
_REST = 8


class Transformers:
    """Reads one log of a program that uses transformers, line by line."""

    words: re.Pattern[str] | None = None

    def __init__(self, engine: str, patterns: Mapping[str, str]) -> None:
        self._engine = engine
        self._line = 0
        self._labels = Labels()
        self._frames = tracebacks.Frames()
        self._spans: list[PhaseSpan] = []
        self._clock: Literal["start", "epoch"] | None = None
        self._facts: dict[str, Any] = {}
        self._warnings: list[str] = []
        self._failure: Failure | None = None
        self._message: TorchMessage | None = None
        self._rest = 0
        self._last_error: Failure | None = None
        self._ready = False
        self._era = ""

    def skip(self, lines: int) -> None:
        """Count lines that were left out."""
        self._line += lines

    def feed(self, raw: str) -> Phase | None:
        """Take the next line; the phase that it begins, or ``None``."""
        self._line += 1
        lines = lines_of(raw)
        before = self._spans[-1].name if self._spans else None
        if before is None:
            self._begin("start", lines[0])
        for number, line in enumerate(lines):
            if line.text and not line.text.isspace():
                self._read(line, raw, first=number == 0)
        now = self._spans[-1].name
        return now if now != before else None

    @property
    def _phase(self) -> Phase:
        return self._spans[-1].name

    def _begin(self, phase: Phase, line: Line) -> None:
        if self._spans and self._spans[-1].name == phase:
            return
        if self._spans and self._spans[-1].line == self._line:
            self._spans.pop()  # one line begins one phase
        if line.clock is not None and self._clock is None:
            self._clock = line.clock
        time = line.time if line.clock == self._clock else None
        self._spans.append(PhaseSpan(name=phase, line=self._line, start=time))

    # ------------------------------------------------------------ lines

    def _read(self, line: Line, raw: str, *, first: bool) -> None:
        """Take a line. ``raw``: with its prefix. ``first``: not one that follows in the message of a record."""
        text = line.text
        if self._frames.feed(text):
            self._rest = 0
            return
        if self._rest:
            self._rest -= 1
            self._add_rest(text)
        spans: tuple[str, ...] = ()
        if "{" in text and (traced := tracing.traced(text)) is not None:
            if _QUIET.match(raw):
                return  # it may be about a request
            spans, text = traced
        quoting = (line.prefix == RECORD and line.level is not None and line.level in "DI") or not first
        loose = not spans and line.level not in ("W", "E", "F") and not _LOUD.match(raw)
        if self._out_of_memory(text, spans, quoting=quoting, loose=loose) or self._other_failure(text):
            return
        self._last_error = None
        if (kill := host_killer.read_kill(text, python=True)) is not None:
            if kill.ours:
                self._failure = host_killer.with_kill(self._failure, kill.failure(phase=self._phase, line=self._line))
            else:
                self._warn(kill.warning())
            return
        self._progress(line)
        if _SIGNS.search(text) and (line.level == "W" or _WARNS.search(text)):
            self._warn(text)

    def _progress(self, line: Line) -> None:
        text = line.text
        if "Loading " in text and (found := _PROGRESS.findall(text)):
            if self._phase == "start":
                self._begin("weights", line)
            self._facts["weights_percent"] = min(int(found[-1]), 100)
            if match := _SHARDS.search(text):
                self._facts["shards"] = int(match[1])
        elif "meta device" in text and (match := _OFFLOADED.search(text)):
            self._facts["offloaded_to"] = match[1].strip()
        elif _READY.search(text):
            if not self._ready and self._failure is not None and self._failure.kind == "out_of_memory":
                self._warn(f"recovered: {self._failure.text}")  # caught, and tried again with less
                self._failure = None
            self._ready = True
            self._begin("ready", line)

    def _warn(self, text: str) -> None:
        text = shown(text)
        if len(self._warnings) < _MOST_WARNINGS and text not in self._warnings:
            self._warnings.append(text)

    # ------------------------------------------------------------ failures

    def _out_of_memory(self, text: str, spans: tuple[str, ...], *, quoting: bool, loose: bool) -> bool:
        """Take a refused allocation.

        :param quoting: the line may repeat what users sent, unless it is an error's own. :param loose: no logger wrote
            it as an error.
        """
        message = torch_messages.read_message(text)
        if message is None:
            return False
        if not (self._frames or _ERROR_LINE.match(text)):
            before = text[: _begins(text)]
            if quoting or not (_BEFORE.match(before) or tracing.ends_program(before)):
                return False  # somebody's text about such a message
            if self._ready and loose:
                self._warn(f"looks like a refused allocation, and may be somebody's text: {text}")
                return True
        blame = tracebacks.blame(self._frames) if self._frames else None
        if self._failure is not None and self._failure.kind.endswith("out_of_memory"):
            self._frames.clear()
            return True  # the same failure once more, as the outer errors repeat it
        phase, bucket, certain = (blame.phase, blame.bucket, blame.certain) if blame else (None, None, False)
        if phase is None and bucket is None:
            phase, bucket = self._by_spans(spans)
            certain = False
        certainty = "certain" if certain and message.certain else "likely" if bucket or phase else "unknown"
        device = HOST if message.kind == "host_out_of_memory" else None
        if message.device is not None:
            device = self._labels.of(message.device)
        elif device == HOST:
            self._labels.names.setdefault(HOST, "CPU")
        self._failure = message.failure(phase=phase, bucket=bucket, certainty=certainty, line=self._line, device=device)
        self._message, self._rest = message, _REST
        self._take_figures(message)
        self._frames.clear()
        return True

    def _by_spans(self, spans: tuple[str, ...]) -> tuple[str | None, str | None]:
        """What the message was about where no frames tell: what the spans say, or the weights while they are loaded."""
        for span in reversed(spans):
            if span in _SPANS:
                return _SPANS[span]
        if self._phase == "weights" and self._facts.get("weights_percent", 100) < 100:
            return "weights", "weights"
        return None, None

    def _add_rest(self, text: str) -> None:
        """Take figures of the message from a line that follows it."""
        old = self._message
        if old is None or self._failure is None or old.reserved is not None:
            self._rest = 0
            return
        joined = torch_messages.read_message(f"{old.text} {text.strip()}") if not old.parts else None
        new = torch_messages.with_more(old, text) if joined is None else joined
        if new == old:
            return
        device = self._failure.device or (self._labels.of(new.device) if new.device else None)
        self._failure = new.failure(
            phase=self._failure.phase,
            bucket=self._failure.bucket,
            certainty=self._failure.certainty,
            line=self._failure.line,
            device=device,
        )
        self._message = new
        self._take_figures(new)

    def _take_figures(self, message: TorchMessage) -> None:
        self._facts.update(message.facts())
        if (doubt := message.doubt()) is not None:
            self._warn(doubt)
        for era, sign in (("2026", "docs.pytorch.org"), ("2024", "total capacity of"), ("2023", "total capacty of")):
            if sign in message.text:
                self._era = era
                return
        if "total capacity;" in message.text:
            self._era = "2022"

    def _other_failure(self, text: str) -> bool:
        match = _ERROR_LINE.match(text)
        in_traceback = bool(self._frames)
        if match is None and not in_traceback and not _CRASH.search(text):
            return False
        kind = next(
            (
                kind
                for kind, pattern in (
                    ("precheck", _PRECHECK),
                    ("port_taken", _PORT),
                    ("load_error", _LOAD),
                    ("crash", _CRASH),
                )
                if pattern.search(text)
            ),
            None,
        )
        if kind is None and not (match and in_traceback):
            return False
        phase = self._phase
        if in_traceback and (blame := tracebacks.blame(self._frames)).phase == "weights":
            phase = "weights" if blame.certain else phase
        failure = Failure(
            kind=kind or ("load_error" if phase == "weights" else "crash"),
            certainty="certain" if kind else "likely",
            text=shown(text),
            phase=phase,
            line=self._line,
        )
        self._frames.clear()
        if kind is None:
            self._last_error = failure  # the end only where nothing follows: programs go on after many an error
        elif self._failure is None:
            self._failure = failure
        return True

    # ------------------------------------------------------------ result

    def boot(self) -> Boot:
        """What the lines so far said."""
        failure = self._failure or self._last_error
        figures = self._message is not None and bool(self._message.facts())
        warnings = list(self._warnings)
        if not figures and failure is None:
            warnings.append(NO_EVIDENCE)
        found = Boot(
            engine=self._engine,
            era=self._era,
            evidence="partial" if figures else "none",
            phases=with_ends(self._spans),
            devices=dict(self._labels.names),
            facts=dict(self._facts),
            failure=failure,
            warnings=tuple(warnings),
            ready=self._ready,
            clock=self._clock,
        )
        return numbered(found)


def _begins(text: str) -> int:
    """Where torch's own words begin in a line that holds them."""
    found = [at for word in _OWN_WORDS if (at := text.find(word)) >= 0]
    return min(found, default=0)


_OWN_WORDS = (
    "CUDA ",
    "HIP ",
    "XPU ",
    "NPU ",
    "MPS ",
    "MUSA ",
    "Allocation on device",
    "[enforce fail",
    "DefaultCPUAllocator",
    "unable to mmap",
    "Unable to allocate",
    "Cannot allocate memory",
    "[Errno 12]",
    "Triton Error",
)
