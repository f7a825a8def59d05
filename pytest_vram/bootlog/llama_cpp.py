"""The grammar of llama.cpp's server, from mid-2024 on.

Buffer lines are printed by the library at verbosity 4 (``-lv 4``). The trial loads of ``--fit``, and the estimate of a
draft model, allocate nothing: they are recognised (by the lines around them and by ``no_alloc``) and not counted. The
last real load of the target model wins; a draft model's buffers, and those of a second context of the same model, add
to it in the bucket ``draft``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from pytest_vram.bootlog import llama_facts, llama_failures
from pytest_vram.bootlog.boot import Boot, Failure, Phase, PhaseSpan
from pytest_vram.bootlog.devices import HOST, Labels
from pytest_vram.bootlog.grammar import with_ends
from pytest_vram.bootlog.lines import Line, shown, size, split
from pytest_vram.ledger import Bucket, Entry

_BUFFER = re.compile(
    r"(?:^|\s)(?P<device>[^\s:]\S*)\s+(?:(?P<kind>model|KV|RS|compute|output|LoRA|DSV4 \w+ state)\s+)?"
    r"buffer size\s*=\s*(?P<number>\d+(?:\.\d+)?) (?P<unit>[KMG]iB)",
    re.ASCII,
)
_BUCKETS: dict[str, Bucket] = {
    "model": "weights",
    "KV": "kv",
    "RS": "recurrent",
    "compute": "compute",
    "output": "compute",
    "LoRA": "lora",
}
_DEVICE = re.compile(r"\busing device (\S+) \((.*?)\)", re.ASCII)
_META = re.compile(r"\bloaded meta data with .* from (?P<path>.+?) \(version", re.ASCII)
_CLIP_ON = re.compile(r"\bCLIP using (\S+) backend", re.ASCII)
_CLIP_SIZE = re.compile(r"\bmodel size:\s+([\d.]+) (MiB)", re.ASCII)
#: Lines without a prefix that are the engine's even where all others have one.
_BARE = ("error", "warning", "CUDA error", "ROCm error", "HIP error", "GGML_ASSERT", "terminate called", "  what():")
#: A server that complains about every request must not fill the report.
_MOST_WARNINGS = 50
NO_EVIDENCE = (
    "no buffer sizes are in this log: start llama-server with `-lv 4` (or LLAMA_ARG_LOG_VERBOSITY=4), which prints them"
)


class _Buffer(NamedTuple):
    kind: str
    name: str
    label: str
    bytes: int
    resolution: int
    context: int


class _Load:
    """One real load of one model, with the contexts made for it."""

    def __init__(self, *, draft: bool, path: str | None, facts: dict[str, Any]) -> None:
        self.draft = draft
        self.path = path
        self.facts = facts
        self.contexts = 0
        self.draft_context = False
        self.buffers: list[_Buffer] = []
        self.projector: list[_Buffer] = []

    def add(self, buffer: _Buffer) -> None:
        """Add a buffer; a compute or output buffer that is allocated anew replaces the earlier one."""
        if buffer.kind in ("compute", "output"):
            same = (buffer.kind, buffer.name, buffer.context)
            self.buffers = [old for old in self.buffers if (old.kind, old.name, old.context) != same]
        self.buffers.append(buffer)

    def has(self, *kinds: str) -> bool:
        return any(buffer.kind in kinds for buffer in self.buffers)


class LlamaCpp:
    """Reads one log of ``llama-server``, line by line."""

    words: re.Pattern[str] | None = None

    def __init__(self, engine: str, patterns: Mapping[str, str]) -> None:
        self._engine = "llama-server"
        self._line = 0
        self._prefixed = False
        self._labels = Labels()
        self._spans: list[PhaseSpan] = []
        self._server_facts: dict[str, Any] = {}
        self._pending: dict[str, Any] = {}
        self._pending_path: str | None = None
        self._between = True  # before or between loads: facts are of the model that comes
        self._loads: list[_Load] = []
        self._warnings: list[str] = []
        self._failure: Failure | None = None
        self._failed_dry = False
        self._fitting = False
        self._no_alloc = False
        self._expect_draft: Literal["model", "context"] | None = None
        self._reload = True
        self._clip: str | None = None
        self._era = ""
        self._ready = False
        self._last_time: float | None = None

    # ------------------------------------------------------------ lines

    def skip(self, lines: int) -> None:
        """Count lines that were left out."""
        self._line += lines

    def feed(self, raw: str) -> Phase | None:
        """Take the next line; the phase that it begins, or ``None``."""
        self._line += 1
        line = split(raw)
        if line.level is not None:
            self._prefixed = True
            self._last_time = line.time
        elif self._prefixed and not line.text.startswith(_BARE):
            return None  # the rest of a message of several lines, such as a chat template: not the engine's words
        before = self._spans[-1].name if self._spans else None
        if before is None:
            self._begin("start", line)
        self._read(line)
        now = self._spans[-1].name
        return now if now != before else None

    @property
    def _phase(self) -> str:
        return self._spans[-1].name if self._spans else "start"

    @property
    def _dry(self) -> bool:
        return self._fitting or self._no_alloc

    @property
    def _load(self) -> _Load | None:
        return self._loads[-1] if self._loads else None

    def _begin(self, phase: Phase, line: Line) -> None:
        if self._spans and self._spans[-1].name == phase:
            return
        self._spans.append(PhaseSpan(name=phase, line=self._line, start=line.time))

    def _read(self, line: Line) -> None:
        text = line.text
        if text.startswith("slot "):
            return  # one slot's view of requests, not the boot
        self._dry_run(text)
        self._note_failure(line)
        self._server_facts.update(llama_facts.of_server(text))
        if self._dry:
            return
        if llama_facts.is_warning(text, line.level):
            self._warn(text)
        self._milestones(line)
        self._buffer(text)
        self._facts(text)

    def _dry_run(self, text: str) -> None:
        if "no_alloc" in text:
            words = text.split()
            if words[-2:] == ["=", "1"]:
                self._no_alloc = True
            elif words[-2:] == ["=", "0"]:
                self._no_alloc = self._fitting = False
        elif "fitting params to device memory" in text:
            self._fitting = True
        elif "fitting params to free memory took" in text:
            self._fitting = self._no_alloc = False
        if self._dry and llama_facts.is_about_fitting(text):
            self._warn(text)

    def _warn(self, text: str) -> None:
        text = shown(text)
        if len(self._warnings) < _MOST_WARNINGS and text not in self._warnings:
            self._warnings.append(text)

    def _milestones(self, line: Line) -> None:
        text = line.text
        if "loaded meta data with" in text:
            match = _META.search(text)
            self._pending = {}
            self._between = True
            self._pending_path = match["path"] if match else None
        elif "loading draft model" in text:
            self._expect_draft = "model"
        elif "creating MTP draft context" in text:
            self._expect_draft = "context"
        elif "loading model tensors" in text:
            self._start_load()
            self._begin("weights", line)
        elif "loading model '" in text or "exiting sleeping state" in text:
            self._reload = True
        elif "constructing llama_context" in text or "llama_new_context_with_model: n_ctx " in text:
            self._start_context()
            self._begin("kv", line)
        elif text.endswith("reserving ..."):
            self._clip = None
            self._begin("reserve", line)
        elif "warming up the model" in text:
            self._begin("warm-up", line)
        elif "CLIP using" in text and (match := _CLIP_ON.search(text)):
            self._clip = match[1]
        elif "entering sleeping state" in text:
            self._begin("sleep", line)
        elif text.endswith("model loaded") or "listening on http" in text:
            self._become_ready(line)
        elif self._ready and "all slots are idle" in text and self._phase not in ("sleep", "stop"):
            self._become_ready(line)  # awake again: only the first boot ends with "model loaded"
        elif "cleaning up before exit" in text:
            self._begin("stop", line)
        elif llama_failures.RECOVERED in text:
            self._recover(text)

    def _start_load(self) -> None:
        target = next((load for load in self._loads if not load.draft), None)
        draft = target is not None and (
            self._expect_draft == "model"
            or (not self._reload and self._pending_path is not None and self._pending_path != target.path)
        )
        load = _Load(draft=draft, path=self._pending_path, facts=self._pending)
        self._loads = [*self._loads, load] if draft else [load]
        self._pending = {}
        self._between = False
        self._expect_draft = None
        self._reload = False
        self._clip = None

    def _start_context(self) -> None:
        load = self._load
        self._clip = None
        if load is None:
            return
        load.contexts += 1
        # A second context of a model that was not loaded again is a draft's (multi-token prediction).
        load.draft_context = load.contexts > 1 or self._expect_draft == "context"
        self._expect_draft = None

    def _become_ready(self, line: Line) -> None:
        if self._phase in ("stop", "ready"):
            return
        self._ready = True
        self._clip = None
        if self._failure is not None:
            self._warn(f"recovered: {self._failure.text}")
            self._failure = None
        self._begin("ready", line)

    # ------------------------------------------------------------ failures

    def _note_failure(self, line: Line) -> None:
        if line.level is not None and line.level not in "WEF":
            return
        sign = llama_failures.sign(line.text)
        if sign is None:
            return
        known = self._failure
        if self._dry and sign.kind == "out_of_memory":
            return  # a trial load allocates nothing that counts
        first = known is None or (self._failed_dry and not self._dry)
        if known is None or first or (sign.kind == "out_of_memory" and known.kind != "out_of_memory"):
            self._failure = self._failure_of(sign)
            self._failed_dry = self._dry
        elif sign.kind == "out_of_memory":
            # Later lines of the same failure know what the first one did not.
            fresh = self._failure_of(sign)
            self._failure = Failure(
                kind=known.kind,
                certainty=known.certainty,
                text=known.text,
                phase=known.phase,
                bucket=(sign.bucket and fresh.bucket) or known.bucket,
                device=known.device or fresh.device,
                bytes=known.bytes or fresh.bytes,
            )

    def _failure_of(self, sign: llama_failures.Sign) -> Failure:
        certainty = "certain" if sign.certain else "unknown"
        if sign.kind != "out_of_memory":
            return Failure(kind=sign.kind, certainty=certainty, text=shown(sign.text), phase=self._phase)
        by_phase = {"weights": "weights", "kv": "kv", "reserve": "compute", "warm-up": "compute", "ready": "compute"}
        bucket = sign.bucket or by_phase.get(self._phase)
        load = self._load
        if load is not None and (load.draft or load.draft_context):
            bucket = "draft"
        return Failure(
            kind=sign.kind,
            certainty=certainty,
            text=shown(sign.text),
            phase=self._phase,
            bucket=bucket,
            device=None if sign.device is None else self._labels.of(sign.device),
            bytes=sign.bytes,
        )

    def _recover(self, text: str) -> None:
        if self._failure is not None and self._failure.kind == "out_of_memory":
            self._warn(f"recovered: {self._failure.text}")
            self._failure = None
        self._warn(text)

    # ------------------------------------------------------------ buffers and facts

    def _buffer(self, text: str) -> None:
        if match := _DEVICE.search(text):
            self._labels.announced(match[1], match[2])
        load = self._load
        if load is None:
            return
        if self._clip is not None and (match := _CLIP_SIZE.search(text)):
            self._project("projector weights", self._clip, match[1], match[2])
            return
        match = _BUFFER.search(text)
        if match is None:
            return
        kind = match["kind"]
        if kind is None:
            if self._phase != "weights":
                return
            kind = "model"  # 2024: "CUDA0 buffer size"
        if self._clip is not None and kind == "compute":
            self._project("projector compute", match["device"], match["number"], match["unit"])
            return
        figure = size(match["number"], match["unit"])
        if figure is None:
            return
        if kind in ("compute", "output", "KV", "RS") and load.contexts == 0:
            load.contexts = 1
        if kind == "compute" and self._phase == "kv":
            self._begin("reserve", Line(text, self._last_time))
        name = match["device"]
        context = 0 if kind == "model" else load.contexts
        load.add(_Buffer(kind, name, self._labels.of(name), *figure, context))

    def _project(self, kind: str, device: str, number: str, unit: str) -> None:
        load, figure = self._load, size(number, unit)
        if load is not None and figure is not None:
            load.projector.append(_Buffer(kind, device, self._labels.of(device), *figure, 0))

    def _facts(self, text: str) -> None:
        found = llama_facts.of_load(text)
        if "n_ctx_seq" in text:
            self._era = "2026"
        elif "n_ctx_per_seq" in text:
            self._era = self._era or "2025"
        elif "KV self size" in text:
            self._era = self._era or "2024"
        if not found:
            return
        load = self._load
        if "slots" in found and "n_slots" in text:
            self._server_facts.update(found)  # the server's slots, whatever was loaded last
        elif load is None or self._between:
            self._pending.update(found)
        else:
            self._place(load, found)

    def _place(self, load: _Load, found: dict[str, Any]) -> None:
        if load.draft_context:
            return
        if "kv_cells" in found and "kv_cells" in load.facts:
            # Two caches of one context (sliding window): the larger one is the context's.
            load.facts["kv_cells_sliding"] = min(load.facts["kv_cells"], found["kv_cells"])
            load.facts["kv_layers"] = load.facts["kv_layers"] + found["kv_layers"]
            load.facts["kv_cells"] = max(load.facts["kv_cells"], found["kv_cells"])
            return
        load.facts.update(found)

    # ------------------------------------------------------------ result

    def boot(self) -> Boot:
        """What the lines so far said."""
        entries = self._entries()
        evidence = self._evidence(entries)
        warnings = list(self._warnings)
        facts = self._all_facts()
        if evidence == "none" and self._failure is None:
            warnings.append(NO_EVIDENCE)
        offloaded = facts.get("layers_offloaded", 0)
        if offloaded and evidence != "none" and facts.get("layers_on_device_real") == 0:
            warnings.append(
                f"{offloaded}/{facts['layers_offloadable']} layers were said to be on the GPU,"
                " but no buffer of the model is on a device: everything runs on the CPU"
            )
        used = {entry.device for entry in entries}
        return Boot(
            engine=self._engine,
            era=self._era,
            evidence=evidence,
            phases=with_ends(self._spans),
            entries=entries,
            devices={label: name for label, name in self._labels.names.items() if label != HOST or HOST in used},
            facts=facts,
            failure=self._failure,
            warnings=tuple(warnings),
            ready=self._ready,
        )

    def _entries(self) -> tuple[Entry, ...]:
        entries = []
        for load in self._loads:
            for buffer in load.buffers:
                bucket: Bucket = _BUCKETS.get(buffer.kind, "kv")
                if load.draft or buffer.context > 1:
                    bucket = "draft"
                entries.append(self._entry(bucket, buffer, f"{buffer.name} {buffer.kind} buffer"))
            entries.extend(
                self._entry("projector", buffer, f"{buffer.name} {buffer.kind}") for buffer in load.projector
            )
        return tuple(entries)

    def _entry(self, bucket: Bucket, buffer: _Buffer, detail: str) -> Entry:
        return Entry(
            bucket=bucket,
            device=buffer.label,
            bytes=buffer.bytes,
            source="engine-log",
            detail=detail,
            resolution=buffer.resolution,
        )

    def _evidence(self, entries: tuple[Entry, ...]) -> Literal["complete", "partial", "none"]:
        if not entries:
            return "none"
        whole = self._ready and all(load.has("model") and load.has("compute") for load in self._loads)
        return "complete" if whole and self._failure is None else "partial"

    def _all_facts(self) -> dict[str, Any]:
        target = next((load for load in self._loads if not load.draft), None)
        facts: dict[str, Any] = dict(self._pending) if target is None else dict(target.facts)
        facts.update(self._server_facts)
        if target is not None:
            if target.path is not None:
                facts["model_path"] = target.path
            if target.has("model") and "layers_offloaded" in facts:
                on_device = any(b.kind == "model" and b.label != HOST for b in target.buffers)
                facts["layers_on_device_real"] = facts["layers_offloaded"] if on_device else 0
        for phase in with_ends(self._spans):
            if phase.name == "weights" and phase.start is not None and phase.end is not None:
                facts.setdefault("load_seconds", round(phase.end - phase.start, 6))
        if self._ready and self._spans[0].start is not None:
            ready = next(span for span in self._spans if span.name == "ready")
            if ready.start is not None:
                facts["boot_seconds"] = ready.start
        if any(load.draft or load.draft_context for load in self._loads):
            facts["draft"] = True
        return facts
