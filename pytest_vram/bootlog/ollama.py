"""The grammar of Ollama's server log, of all its releases since 2023.

Ollama runs models in processes of its own and carries their lines in its log. Until mid-2025, and again since mid-2026,
these are llama.cpp's, which say what was allocated; in between Ollama's own engine sums up per device (``msg="model
weights" device=CUDA0``). Where both are there, its sums are a prediction of the same buffers: those of llama.cpp count,
and never both. Models come and go: the last load is the boot.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from pytest_vram.bootlog import host_killer, llama_failures, ollama_facts, ollama_failures
from pytest_vram.bootlog.boot import Boot, Failure, Phase, PhaseSpan
from pytest_vram.bootlog.devices import HOST, Labels
from pytest_vram.bootlog.grammar import with_ends
from pytest_vram.bootlog.lines import Axis, Line, shown
from pytest_vram.bootlog.llama_cpp import LlamaCpp
from pytest_vram.bootlog.numbering import numbered
from pytest_vram.bootlog.records import carried
from pytest_vram.bootlog.slog import attributes
from pytest_vram.ledger import Bucket, Entry

NO_EVIDENCE = (
    "no sizes of buffers are in this log: start the server with OLLAMA_DEBUG=1, which prints them, and load the model"
)
_BUCKETS: dict[str, Bucket] = {"model weights": "weights", "kv cache": "kv", "compute graph": "compute"}
#: A process for a model is started.
_STARTS = ("starting runner", "starting llama server", "starting llama-server", "starting llama runner")
#: Said before that.
_BEFORE = (
    "system memory",
    "gpu memory",
    "offload",
    "requested context size too large for model",
    "model request too large for system",
    "new model will fit in available VRAM",
    "loading model",
    "Loading Dynamic llm server",
)
_READY = ("llama runner started in", "llama-server started in", "Starting llama main loop")
#: Lines that are no warnings of their level, but say that something asked for does not happen.
_SIGNS = re.compile(
    r"gpu VRAM usage didn't recover|not enough vram available|insufficient VRAM to load any model layers"
    r"|[Ff]alling back to CPU|no compatible GPUs were discovered|model layout did not fit|too large for system memory"
    r"|requires more (?:gpu|system) memory than is currently available|disabling multimodal projector offload"
)
#: Warnings that say nothing about a model's settings or memory.
_CHATTER = re.compile(
    r"invalid option provided|deprecated|corrupt manifests|client connection closed|aborting|chat prompt|template"
)
_ERRORS = re.compile(r"terminated|[Ff]ailed|error", re.ASCII)
_SEEING = re.compile(
    r"encode_image_with_clip|\bclip_(?:image|encode)|image embedding created|encoding image|encoding mtmd|image decoded"
    r"|loaded image"
)
_CURRENT = re.compile(r"\bcurrent device: (\d{1,3})\b", re.ASCII)
#: What is said of every request, after the boot.
_NOISE = re.compile(
    r"\[GIN\]|slot +(?:update_slots|launch_slot_|get_availabl|process_toke|handle_last_|print_timing|release\b)"
    r"|srv +(?:update_slots|log_server_r|params_from_|get_availabl)"
    r"|time=\S{10,40} level=DEBUG source=\S{1,80} msg=\"(?:runner with (?:non-)?zero|context for request finished"
    r"|after processing request|evaluating already loaded|loading cache slot|timer expired|chat request)",
    re.ASCII,
)
_MOST_WARNINGS = 50
_WORDS = f"msg=|llama runner|{host_killer.WORDS}|current device|image|clip_"


class _Load:
    """One load of one model, or what leads to it."""

    def __init__(self, line: int) -> None:
        self.engine = LlamaCpp("llama-server", {})
        self.engine.skip(line)
        self.started = False
        self.ready = False
        self.sees = False
        self.facts: dict[str, Any] = {}
        self.failure: Failure | None = None
        self.recovered: Failure | None = None
        self.sums: dict[tuple[str, str], tuple[int, int]] = {}
        self._last = ""

    def add(self, kind: str, device: str, figure: tuple[int, int]) -> None:
        """Take a sum; a report of a later trial, or of the load itself, replaces the earlier one as a whole."""
        if kind == "model weights" and self._last not in ("", "model weights"):
            self.sums = {}
        self._last = kind
        self.sums[kind, device] = figure

    @property
    def is_nothing(self) -> bool:
        """Whether nothing of it but what Ollama looks at beforehand is in the log."""
        return not (self.started or self.ready or self.failure or self.sums or self.engine.boot().entries)

    @property
    def over(self) -> bool:
        """Whether it came to its end, good or bad."""
        return self.ready or self.failure is not None


class Ollama:
    """Reads one log of ``ollama serve``, line by line."""

    words: re.Pattern[str] | None = (
        None if LlamaCpp.words is None else re.compile(f"{LlamaCpp.words.pattern}|{_WORDS}", LlamaCpp.words.flags)
    )

    noise: re.Pattern[str] | None = _NOISE

    def __init__(self, engine: str, patterns: Mapping[str, str]) -> None:
        self._engine = engine
        self._line = 0
        self._labels = Labels()
        self._axis = Axis()
        self._spans: list[PhaseSpan] = []
        self._server: dict[str, Any] = {}
        self._warnings: dict[str, str] = {}
        self._loads = 1
        self._load = _Load(0)
        self._earlier: _Load | None = None
        self._era = ""

    # ------------------------------------------------------------ lines

    def skip(self, lines: int) -> None:
        """Count lines that were left out."""
        self._line += lines
        self._load.engine.skip(lines)

    def feed(self, raw: str) -> Phase | None:
        """Take the next line; the phase that it begins, or ``None``."""
        self._line += 1
        if self._spans and _NOISE.match(raw):
            self._load.engine.skip(1)
            return None
        before = self._spans[-1].name if self._spans else None
        for number, (own, line) in enumerate(carried(raw)):
            if not self._spans:
                self._begin("start", line)
            if number:
                self._load.engine.skip(-1)  # lines of one record have one number
            self._take(own, line)
        now = self._spans[-1].name
        return now if now != before else None

    def _take(self, raw: str, line: Line) -> None:
        if line.prefix in ("slog", "go") or line.text.startswith("msg="):
            self._load.engine.skip(1)
            self._own(line)
        elif _NOISE.match(line.text):  # behind a wrapper's prefix
            self._load.engine.skip(1)
        else:
            self._carried(raw, line)

    @property
    def _phase(self) -> Phase:
        return self._spans[-1].name

    def _begin(self, phase: Phase, line: Line) -> None:
        if self._spans and self._spans[-1].name == phase:
            return
        if self._spans and self._spans[-1].line == self._line:
            self._spans.pop()  # one line begins one phase
        self._spans.append(PhaseSpan(name=phase, line=self._line, start=self._axis.time(line)))

    def _is_of(self, era: str) -> None:
        """Take a sign of an era; the latest of them counts, as old lines live on."""
        self._era = max(self._era, era)

    def _warn(self, key: str, text: str) -> None:
        """Add a warning; of those with one key only the first."""
        if len(self._warnings) < _MOST_WARNINGS:
            self._warnings.setdefault(key, shown(text))

    # ------------------------------------------------------------ Ollama's own lines

    def _own(self, line: Line) -> None:
        if line.prefix == "go":
            message, pairs = line.text, dict[str, str]()
        else:
            pairs = attributes(line.text)
            message = pairs.get("msg", "")
        self._server.update(ollama_facts.of_server(message, pairs))
        self._steps(line, message, pairs)
        load = self._load
        if message.startswith("offload") and "memory.required.full" in pairs:
            load.facts.update(ollama_facts.of_plan(pairs))
            self._is_of("2024")
        elif message == "load" and "request" in pairs:
            self._request(line, pairs["request"])
        elif message in _BUCKETS:
            self._sum(line, message, pairs)
        elif message == "gpu memory" and (free := ollama_facts.size_of(pairs.get("free", ""))) is not None:
            load.facts["devices_free_bytes"] = [*load.facts.get("devices_free_bytes", ()), free[0]][:64]
        else:
            load.facts.update(ollama_facts.of_message(message, pairs))
        if pairs.get("images", "0") not in ("0", "") or pairs.get("media", "0") not in ("0", ""):
            load.sees = message.endswith("completion request") or load.sees
        self._ends(line, message, pairs)
        if _SIGNS.search(message) or (line.level == "W" and not _CHATTER.search(message)):
            details = " ".join(f"{key}={value}" for key, value in pairs.items() if key != "msg")
            self._warn(message, f"{message} ({details})" if details else message)

    def _steps(self, line: Line, message: str, pairs: Mapping[str, str]) -> None:
        """Steps of a load from its beginning to its end."""
        if message.startswith(_STARTS) or message.startswith(_BEFORE):
            starts = message.startswith(_STARTS)
            if self._load.over or (starts and self._load.started):
                self._next_load(line)
            self._load.started |= starts
        if message.startswith(_STARTS) and "cmd" in pairs:
            self._load.facts.update(ollama_facts.of_command(pairs["cmd"]))
            if message == "starting llama-server":
                self._is_of("2026")
        elif message.startswith(("Loading Dynamic llm server", "Starting llama main loop")):
            self._is_of("2024-02")
        if message.startswith(_READY) and not self._load.ready:
            self._become_ready(line)

    def _next_load(self, line: Line) -> None:
        old = self._load
        if old.is_nothing and self._earlier is not None:
            self._loads, old = self._loads - 1, self._earlier
        failure = old.failure or self._engine_failure(old)
        if failure is not None:
            self._warn(failure.text, f"an earlier load failed, or a request did: {failure.text}")
        self._loads += 1
        self._load, self._earlier = _Load(self._line), old
        self._begin("start", line)

    def _become_ready(self, line: Line) -> None:
        load = self._load
        failure = load.failure or self._engine_failure(load)
        if failure is not None:
            self._warn(failure.text, f"recovered: {failure.text}")
        load.failure, load.ready = None, True
        self._begin("ready", line)

    def _request(self, line: Line, request: str) -> None:
        operation, facts = ollama_facts.of_request(request)
        if operation in ("fit", "alloc", "commit"):
            self._load.facts.update(facts)
            self._is_of("2025-09")
        if operation == "alloc" and not self._load.over:
            self._begin("reserve", line)
        elif operation == "commit" and not self._load.over:
            self._begin("weights", line)

    def _sum(self, line: Line, message: str, pairs: Mapping[str, str]) -> None:
        figure = ollama_facts.size_of(pairs.get("size", ""))
        device = pairs.get("device") or pairs.get("buffer_type") or pairs.get("buffer") or pairs.get("backend")
        if figure is None or not device:
            return
        self._load.add(message, device, figure)
        if "buffer" in pairs and not self._load.over:
            self._begin("weights", line)  # said as they are loaded
        elif "buffer_type" in pairs and not self._load.over:
            self._begin("reserve", line)
        self._is_of("2025-09" if "device" in pairs else "2025-07")

    def _ends(self, line: Line, message: str, pairs: Mapping[str, str]) -> None:
        """A load or a request that failed, by an error that is passed on."""
        error = pairs.get("error", "")
        if any(retry in message for retry in ollama_failures.RETRIES):
            self._load.failure = None
            self._load.recovered = self._load.engine.boot().failure
            return
        runtime = message.startswith("runtime OOM detected")
        ends = runtime or message.startswith(ollama_failures.ENDINGS) or (line.level == "E" and _ERRORS.search(message))
        if not ends:
            return
        if self._load.ready and message.startswith(ollama_failures.OF_LOADS):
            self._next_load(line)
        if message.startswith("failed to commit memory"):
            error = error or "failed to allocate"
        failure = ollama_failures.of_error(
            error or message, phase=self._phase, line=self._line, labels=self._labels, bucket=self._by_phase()
        )
        if failure is not None:
            self._fail(failure)

    # ------------------------------------------------------------ lines of the model's process

    def _carried(self, raw: str, line: Line) -> None:
        load, text = self._load, line.text
        phase = load.engine.feed(raw)
        if load.ready:
            self._while_serving(text)
        elif phase is not None and phase not in ("start", "ready", "sleep"):
            self._begin(phase, line)
        kill = host_killer.read_kill(text)
        if kill is not None and kill.ours:
            self._fail(kill.failure(phase=self._phase, line=self._line))
        elif kill is not None:
            self._warn(kill.text, kill.warning())
        if "llm_load_tensors" in text:
            self._is_of("2024")

    def _while_serving(self, text: str) -> None:
        """A device that refuses an allocation for a request: everything of the boot had been allocated before."""
        load = self._load
        if _SEEING.search(text):
            load.sees = True
        known = load.failure
        if known is not None and known.device is None and (match := _CURRENT.search(text)):
            load.failure = msgspec.structs.replace(known, device=self._labels.of(f"CUDA{match[1]}"))
            return
        sign = llama_failures.sign(text)
        if sign is None or sign.kind not in ("out_of_memory", "crash"):
            return
        if sign.kind == "crash":
            self._fail(Failure(kind="crash", certainty="unknown", text=shown(text), phase=self._phase, line=self._line))
            return
        self._fail(
            Failure(
                kind="out_of_memory",
                certainty="likely",
                text=shown(sign.text),
                phase=self._phase,
                bucket=sign.bucket or self._by_phase(),
                device=None if sign.device is None else self._labels.of(sign.device),
                bytes=sign.bytes,
                line=self._line,
            )
        )

    def _by_phase(self) -> str | None:
        """The bucket that is being allocated; while the engine serves, what requests take."""
        if self._load.ready:
            return "projector" if self._load.sees else "compute"
        known: dict[str, str] = {"weights": "weights", "kv": "kv", "warm-up": "compute"}
        return known.get(self._phase)

    # ------------------------------------------------------------ failures

    def _fail(self, failure: Failure) -> None:
        """Take a failure of the present load: what was said first, or with more in it, stays."""
        load = self._load
        if load.ready and failure.kind == "out_of_memory":
            phase = "prefill" if load.sees else "ready"
            what = "an image" if load.sees else "a request"
            failure = msgspec.structs.replace(
                failure, phase=phase, note=f"the boot was through: {what} took more than was left"
            )
        known = load.failure
        if known is None or (known.kind == "crash" and failure.kind != "crash"):
            load.failure = failure
        elif failure.kind == "host_oom_killed":
            load.failure = host_killer.with_kill(known, failure)
        elif known.kind == failure.kind == "out_of_memory":
            load.failure = msgspec.structs.replace(
                known, bytes=_exact(known.bytes, failure.bytes), device=known.device or failure.device
            )

    def _engine_failure(self, load: _Load) -> Failure | None:
        """What the engine's own lines say about the load, apart from what it recovered from."""
        boot = load.engine.boot()
        if boot.failure is None or boot.failure == load.recovered or load.ready:
            return None
        failure, device = boot.failure, boot.failure.device
        return failure if device is None else msgspec.structs.replace(failure, device=self._ours(device, boot))

    def _ours(self, label: str, engine: Boot) -> str:
        """The label here of a device that the engine's lines were given another one for."""
        return self._labels.of("CPU" if label == HOST else engine.devices.get(label, label))

    def _failure(self, load: _Load) -> Failure | None:
        own, engine = load.failure, self._engine_failure(load)
        if engine is None or own is None:
            return own or engine
        if own.kind == "host_oom_killed":
            return own if engine.kind == own.kind else host_killer.with_kill(engine, own)
        # The engine's own line knows what it was allocating; what Ollama passes on repeats it.
        return own if engine.kind in ("crash", "load_error") and own.kind not in ("crash", "load_error") else engine

    # ------------------------------------------------------------ result

    def boot(self) -> Boot:
        """What the lines so far said of the last load."""
        load, loads = self._load, self._loads
        if load.is_nothing and self._earlier is not None:
            load, loads = self._earlier, loads - 1
        engine = load.engine.boot()
        entries = self._entries(load, engine)
        facts = self._facts(load, engine)
        failure = self._failure(load)
        evidence = _evidence(entries, facts, sound=load.ready and failure is None)
        warnings = [*self._warnings.values(), *(text for text in engine.warnings if not text.startswith("no "))]
        if loads > 1:
            warnings.insert(0, f"the log holds {loads} loads of models: this is the last one")
        offloaded, whole = facts.get("layers_offloaded"), facts.get("layers_offloadable")
        if offloaded is not None and whole and offloaded < whole and facts.get("layers_requested", -1) < 0:
            warnings.append(f"{offloaded} of {whole} layers are on devices, the others on the CPU: Ollama chose so")
        if evidence == "none" and failure is None:
            warnings.append(NO_EVIDENCE)
        used = {entry.device for entry in entries} | ({failure.device} if failure is not None else set())
        found = Boot(
            engine=self._engine,
            era=self._era,
            evidence=evidence,
            phases=with_ends(self._spans),
            entries=entries,
            devices={label: name for label, name in self._labels.names.items() if label != HOST or HOST in used},
            facts=facts,
            failure=failure,
            warnings=tuple(warnings[: _MOST_WARNINGS + 10]),
            ready=load.ready,
            clock=self._axis.clock,
        )
        return numbered(found)

    def _entries(self, load: _Load, engine: Boot) -> tuple[Entry, ...]:
        """Buffers by llama.cpp's lines; of a bucket that it did not print, Ollama's sums."""
        entries = [msgspec.structs.replace(entry, device=self._ours(entry.device, engine)) for entry in engine.entries]
        printed: set[str] = {"kv" if entry.bucket == "recurrent" else entry.bucket for entry in entries}
        whose = "Ollama's prediction" if engine.entries or "architecture" in engine.facts else "Ollama's sum"
        for (kind, device), (amount, resolution) in load.sums.items():
            bucket = _BUCKETS[kind]
            if bucket in printed or not amount:  # "0 B" is what trials print
                continue
            entries.append(
                Entry(
                    bucket=bucket,
                    device=self._labels.of(device),
                    bytes=amount,
                    source="engine-log",
                    detail=f"{device} {kind} ({whose})",
                    resolution=resolution,
                )
            )
        return tuple(entries)

    def _facts(self, load: _Load, engine: Boot) -> dict[str, Any]:
        facts = {**self._server, **engine.facts, **load.facts}
        for name in ("layers_offloaded", "context", "context_per_slot", "slots", "flash_attention", "cache_type_k"):
            if name in engine.facts:
                facts[name] = engine.facts[name]  # what it did, and not what it was asked
        if isinstance(free := facts.get("free_bytes"), dict):
            facts["free_bytes"] = {self._ours(label, engine): amount for label, amount in free.items()}
        if "layers_offloaded" not in facts and load.sums and "layers_planned" in facts:
            facts["layers_offloaded"] = facts["layers_planned"]
        if facts.get("layers_offloadable") and "layers" not in facts:
            facts["layers"] = facts["layers_offloadable"] - 1
        return facts


def _exact(known: int | None, later: int | None) -> int | None:
    """The size of one allocation, told twice: to the byte where the later line has the bytes that the first rounds."""
    if known is None or later is None:
        return known or later
    return later if abs(later - known) < 1 << 20 else known


def _evidence(
    entries: tuple[Entry, ...], facts: Mapping[str, Any], *, sound: bool
) -> Literal["complete", "partial", "none"]:
    if not entries:
        return "partial" if any(name.startswith("planned_") for name in facts) else "none"
    buckets = {entry.bucket for entry in entries}
    whole = {"weights", "compute"} <= buckets and bool(buckets & {"kv", "recurrent"})
    return "complete" if whole and sound else "partial"
