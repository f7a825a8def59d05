"""One process of llama.cpp, read line by line: its loads, phases, facts and end.

Matching is by phrase. Lines of requests carry what users wrote, which is never believed: neither lines without the
prefix that the log has, nor the bodies of requests, nor the model's own texts.
"""

from __future__ import annotations

import re
from typing import Any, Literal

from pytest_vram.bootlog import host_killer, llama_eras, llama_facts, llama_failures
from pytest_vram.bootlog.boot import Phase, PhaseSpan
from pytest_vram.bootlog.devices import Labels
from pytest_vram.bootlog.lines import Axis, Line, shown
from pytest_vram.bootlog.llama_breakdown import Breakdown
from pytest_vram.bootlog.llama_lines import is_request, mebi, message, with_points
from pytest_vram.bootlog.llama_loads import (
    BUFFER,
    CACHE,
    OLD_CACHE,
    OLD_WEIGHTS,
    PER_DEVICE,
    Buffer,
    Load,
    buffer_of,
)
from pytest_vram.bootlog.llama_story import Story, Where

_META = re.compile(r"\bloaded meta data with [\w ,-]{1,60} tensors from (?P<path>.{1,1000})", re.ASCII)
_OLD_META = re.compile(r"\bllama\.cpp: loading model from (?P<path>.+)", re.ASCII)
_USING = re.compile(r"\busing device (\S{1,200}) \((.{0,200}?)\)", re.ASCII)
_CLIP_ON = re.compile(r"\bCLIP using (\S+) backend", re.ASCII)
_CLIP_SIZE = re.compile(
    r"\b(?P<what>model size|compute allocated memory): +(?P<number>\d{1,9}(?:\.\d{1,4})?) (?P<unit>Mi?B)", re.ASCII
)
_READY = re.compile(
    r"\bmodel loaded(?:$| \|)|\blistening (?:on|at) http|\bUvicorn running on|\bGRPC Service Ready\b"
    r"|\bconnect to custom endpoint at\b|\bLoad (?:Text )?Model OK: True|\bgenerate: n_ctx = "
)
_ENGINES: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("koboldcpp", re.compile(r"\bKoboldCpp\b")),
    ("ik_llama", re.compile(r"c\^KV \(|\bmla_attn +=|\battn_max_b +=|\bfused_(?:moe|up_gate|mmad) +=|\bK-only \(")),
)
#: Lines without a prefix that are the engine's even where all others have one.
_BARE = ("error", "warning", "CUDA error", "ROCm error", "HIP error", "MUSA error", "GGML_ASSERT", "terminate called")
_BARE_ENDS = ("  what():", "Killed", "Segmentation fault", "ggml_", "  current device:")
_IMAGE = re.compile(r"\b(?:encoding|processing) (?:image|audio|mtmd|\w{1,20} slice)\b")
_IMAGE_DONE = re.compile(r"\b(?:image|audio|slice|batch)\w* (?:encoded|processed|decoded|encoding done)\b")
#: Said of a real load only.
_BEYOND_TRIAL = re.compile(r"\bwarming up the model\b|\binitializing slots\b|\ball slots are idle\b")
#: Said before a model is loaded once more: by the server, or by another process, which first looks for its devices.
_ANNOUNCED = re.compile(
    r"\bloading model '|\bmain: loading model\b|\bexiting sleeping state\b"
    r"|\bfound \d{1,3} (?:CUDA|ROCm|MUSA|Vulkan|SYCL) devices|\bbuild info\b"
)
#: Said while a model is loaded, or a context is made for it.
_OF_LOAD = re.compile(
    r"(?P<clear>\bloaded meta data with\b|\bloading model (?:from|tensors)\b|\bconstructing llama_context\b"
    r"|\bbuffer size\b)"
    r"|\bKV self\b|\bsize =[^()]{1,40}\([^()]{1,40}\bcells\b|VRAM|\bmem required\b|\busing device\b|\bmodel size\b"
    r"|\boffload(?:ed|ing)\b|\bn_ctx\w* +=|\breserving \.\.\.|\bwarming up\b|\bCLIP using\b|\ballocated memory\b"
)
#: A server that complains about every request must not fill the report.
_MOST_WARNINGS = 50
#: A server that sleeps and wakes for weeks begins phases without end: the first and the last ones are kept.
_MOST_SPANS = 512
_ORDER: dict[str, int] = {name: rank for rank, name in enumerate(("start", "weights", "kv", "reserve", "warm-up"))}


class Process:
    """Reads the lines of one process."""

    def __init__(self) -> None:
        self.labels = Labels()
        self.spans: list[PhaseSpan] = []
        self.loads: list[Load] = []
        self.warnings: list[str] = []
        self.story = Story()
        self.table = Breakdown()
        self.sizes = llama_facts.DeviceSizes()
        self.axis = Axis()
        self.server_facts: dict[str, Any] = {}
        self.pending: dict[str, Any] = {}
        self.engine: str | None = None
        self.ready = False
        self.creating: dict[str, int] = {}
        self._era = ""
        self._line = 0
        self._time: float | None = None
        self._prefixed = False
        self._pending_path: str | None = None
        self._between = True  # before or between loads: facts are of the model that comes
        self._fitting = False
        self._no_alloc = False
        self._expect_draft: Literal["model", "context", "beside"] | None = None
        self._reload = True
        self._clip: str | None = None
        self._projector: list[Buffer] = []  # loaded before the model that it belongs to
        self._share_of: str | None = None
        self._cache_name = ""
        self._device_of_sums = "VRAM"
        self._request: Literal["prefill", "decode"] | None = None
        self._image = False
        self._doubted = False
        self._last: tuple[float | None, str] = (None, "")
        self._recovered: str | None = None  # the warning of a retry of which it is not known yet whether it helped

    # ------------------------------------------------------------ lines

    def said_again(self, line: Line) -> bool:
        """True for the report of a buffer that follows upon itself: a log to which two wrote.

        No engine lists one device twice in a row: a second cache of it comes after the sum of the first.
        """
        again = self._last == (line.time, line.text) and "buffer size" in line.text
        self._last = line.time, line.text
        return again

    def take(self, line: Line, number: int) -> Phase | None:
        """Take a line with its number; the phase that it begins, or ``None``."""
        prefixed = line.prefix == "llama.cpp"
        if prefixed:
            self._prefixed = True
        elif self._prefixed and not (line.text.startswith((*_BARE, *_BARE_ENDS)) or llama_failures.is_abort(line.text)):
            return None  # the rest of a message of several lines, such as a chat template: not the engine's words
        self._line = number
        self._time = self.axis.time(line)
        before = len(self.spans), self._phase
        text = with_points(line.text)
        if text.startswith('{"'):
            text = message(text) or ""  # anything else is a request's body
        self._read(text, line.level, prefixed=prefixed)
        if not self.spans:
            self._begin("start")
        return self.spans[-1].name if (len(self.spans), self.spans[-1].name) != before else None

    @property
    def _phase(self) -> str:
        return self.spans[-1].name if self.spans else "start"

    @property
    def _dry(self) -> bool:
        return self._fitting or self._no_alloc

    @property
    def load(self) -> Load | None:
        """The latest load."""
        return self.loads[-1] if self.loads else None

    @property
    def target(self) -> Load | None:
        """The load of the model itself, not of a draft for it."""
        return next((load for load in self.loads if not load.draft), None)

    @property
    def table_counts(self) -> bool:
        """Whether the table is that of the end: in a boot that is under way it is a trial's."""
        return bool(self.table.rows) and (self.ready or self._phase == "stop" or not self.server_facts)

    @property
    def era(self) -> str:
        """The era whose phrases the log has."""
        target = self.target
        if target is not None and not target.buffers and target.sums.era is not None:
            return target.sums.era
        return self._era

    def _begin(self, phase: Phase) -> None:
        if self.spans and self.spans[-1].name == phase:
            return
        if len(self.spans) >= _MOST_SPANS:
            del self.spans[_MOST_SPANS // 2 : _MOST_SPANS // 2 + 64]
        self.spans.append(PhaseSpan(name=phase, line=self._line, start=self._time))

    def _advance(self, phase: Phase) -> None:
        """Begin a phase that a line implies, unless the boot is beyond it."""
        if _ORDER.get(self._phase, len(_ORDER)) < _ORDER[phase]:
            self._begin(phase)

    def _read(self, text: str, level: str | None, *, prefixed: bool) -> None:
        if self._requests(text, prefixed=prefixed) or is_request(text):
            return
        if level == "D":
            self._overridden(text)
            return
        self._dry_run(text)
        self._note_failure(text, level, prefixed=prefixed)
        self.server_facts.update(llama_facts.of_server(text))
        self.sizes.read(text)
        self._device_of_sums = llama_eras.device_of_sums(text) or self._device_of_sums
        for name, pattern in _ENGINES:
            if self.engine != "koboldcpp" and pattern.search(text):
                self.engine = name
        if self._dry:
            return
        if llama_facts.is_warning(text, level) or llama_failures.is_harmless(text):
            self._warn(text)
        if not prefixed and self._unannounced(text):
            return
        self._milestones(text)
        self._memory(text)
        self._facts(text)

    def _unannounced(self, text: str) -> bool:
        """True for a line about a load after the boot that no line announced, where a user may have written it.

        A server that loads again says so first: it wakes up, or names the model that comes. Without prefixes nothing
        else tells its words from those of a request.
        """
        if self._reload or self._expect_draft is not None or not self.loads or self._phase not in ("ready", "sleep"):
            return False
        if _ANNOUNCED.search(text):
            self._reload = True
            return False
        if (match := _OF_LOAD.search(text)) is None:
            return False
        if match["clear"] and not self._doubted:
            self._doubted = True
            self._warn(f"looks like a load after the boot, but none was announced: what a user wrote? {shown(text)}")
        return True

    def _requests(self, text: str, *, prefixed: bool) -> bool:
        """Where the server is with a request; true for a line of one slot, which says nothing of the boot."""
        if not self.ready:
            return text.startswith("slot ")
        if "slots are idle" in text or "stop processing" in text:
            self._request, self._image = None, False
        elif "| processing" in text or "t is processing" in text or "new prompt" in text:
            self._request, self._image = "prefill", False
        elif "prompt done" in text or "prompt processing done" in text:
            self._request = "decode"
        elif _IMAGE.search(text):
            self._request, self._image = "prefill", True
        elif _IMAGE_DONE.search(text):
            self._image = False
        elif not prefixed:
            return text.startswith("slot ")
        looked = self.story.survived(certain=prefixed or not self._prefixed)
        if looked is not None:
            self._warn(f"looks like a failure, but the server went on, and may be what a user wrote: {looked}")
        return text.startswith("slot ")

    def _overridden(self, text: str) -> None:
        if "buffer type overridden to" in text and not self._dry:
            facts = self.load.facts if self.load is not None and not self._between else self.pending
            facts["tensor_overrides"] = facts.get("tensor_overrides", 0) + 1

    def _dry_run(self, text: str) -> None:
        if "no_alloc" in text:
            words = text.split()
            if words[-2:] == ["=", "1"]:
                self._no_alloc = True
            elif words[-2:] == ["=", "0"]:
                self._end_of_trial()
        elif "fitting params to device memory" in text:
            self._fitting = True
        elif "fitting params to free memory took" in text:
            self._end_of_trial()
        elif self._dry and (_BEYOND_TRIAL.search(text) or _READY.search(text)):
            self._end_of_trial()  # at the default verbosity nothing else says so
        if (self._dry or not self.loads) and llama_facts.is_about_fitting(text):
            self._warn(text)

    def _end_of_trial(self) -> None:
        self._fitting = self._no_alloc = False
        self.story.trial_is_over()

    def _warn(self, text: str) -> None:
        text = shown(text)
        if len(self.warnings) < _MOST_WARNINGS and text not in self.warnings:
            self.warnings.append(text)

    # ------------------------------------------------------------ milestones

    def _milestones(self, text: str) -> None:
        if "loaded meta data with" in text or "loading model from" in text:
            self._meta(text)
        elif "loading draft model" in text:
            self._expect_draft = "model"
        elif "Loading Embeddings Model" in text:
            self._expect_draft = "beside"
        elif "creating MTP draft context" in text:
            self._expect_draft = "context"
        elif "loading model tensors" in text:
            self._start_load()
        elif "loading model '" in text or "exiting sleeping state" in text:
            self._reload = True
        elif "constructing llama_context" in text:
            self._start_context()
        elif "initializing slots" in text and self.load is not None and self.load.draft:
            self.load.to_be_freed = True  # in 2025 each slot gets a draft context of its own instead
        elif text.endswith("reserving ..."):
            self._clip = None
            self._begin("reserve")
        elif "pipeline parallelism enabled" in text:
            self._advance("reserve")
        elif "warming up the model" in text:
            self._begin("warm-up")
        elif "CLIP using" in text and (match := _CLIP_ON.search(text)):
            self._clip = match[1]
        elif "entering sleeping state" in text:
            self._begin("sleep")
        elif _READY.search(text):
            self._become_ready()
        elif "all slots are idle" in text and self._phase not in ("start", "sleep", "stop"):
            self._become_ready()  # awake again, which is not said by "model loaded"
        elif "cleaning up before exit" in text:
            self._begin("stop")
        elif llama_failures.RECOVERED in text:
            self._recover(text)

    def _meta(self, text: str) -> None:
        match = _META.search(text) or _OLD_META.search(text)
        if match is None and "loaded meta data" not in text:
            return
        self.pending = {}
        self._between = True
        self._pending_path = match["path"].partition(" (version")[0].strip() if match else None

    def _start_load(self, *, weights: bool = True) -> None:
        """Begin a load; without ``weights`` for a log that begins only after them."""
        if weights:
            self._begin("weights")
        present = self.load
        if present is not None and not self._between and not (present.buffers or present.sums.parts()):
            return  # the same load, said twice
        target = self.target
        beside = target is not None and self._expect_draft == "beside"
        draft = (
            target is not None
            and not beside
            and (
                self._expect_draft == "model"
                or (not self._reload and self._pending_path is not None and self._pending_path != target.path)
            )
        )
        load = Load(draft=draft, path=self._pending_path, facts=self.pending, device_of_sums=self._device_of_sums)
        self.loads = [*self.loads, load] if draft or beside else [load]
        if not draft and not beside:
            load.projector, self._projector = self._projector, []
            self.creating = {}
        self.pending = {}
        self.table = Breakdown()  # one before the load was a trial's
        self._between = False
        if self._expect_draft != "context":
            self._expect_draft = None
        self._reload = False
        self._clip = None

    def _loading(self) -> Load:
        """The load that a line about weights belongs to: a new one where the line that begins it is missing."""
        load = self.load
        if load is None or self._between or (load.has("model") and load.context_is_whole):
            self._start_load()
        else:
            self._advance("weights")
        present = self.load
        assert present is not None
        return present

    def _start_context(self, phase: Phase = "kv") -> None:
        if self.load is None or self._between:
            self._start_load(weights=False)  # a log that begins here
        load = self.load
        assert load is not None
        self._clip = None
        load.start_context(draft=self._expect_draft == "context")
        self._expect_draft = None
        self._begin(phase)

    def _in_context(self, phase: Phase) -> Load:
        """The load whose context a line about caches or compute buffers belongs to; it is in this phase."""
        load = self.load
        if load is None or self._between or load.context == 0:
            self._start_context(phase)
        self._advance(phase)
        present = self.load
        assert present is not None
        return present

    def _become_ready(self) -> None:
        if self._phase in ("stop", "ready"):
            return
        self.ready = True
        self._clip = self._recovered = None
        if self.story.is_known:
            self._warn(f"recovered: {self.story.text}")
            self.story.forget()
        self._begin("ready")

    # ------------------------------------------------------------ failures

    def _where(self, *, bare: bool) -> Where:
        load = self.load
        known = load is not None or self._phase != "start" or not self._between
        return Where(
            phase=self._phase,
            known=known,
            cached=load is not None and load.cache_is_whole,
            draft=load is not None and (load.draft or load.draft_context),
            ready=self.ready and self._phase in ("ready", "stop"),
            request=self._request,
            image=self._image,
            dry=self._dry,
            projector=self._clip is not None,
            bare=bare,
        )

    def _note_failure(self, text: str, level: str | None, *, prefixed: bool) -> None:
        if level is not None and level not in "WEF":
            return
        if not prefixed and (kill := host_killer.read_kill(text)) is not None:
            self.kill(kill, self._line)
            return
        if (device := llama_failures.current_device(text)) is not None:
            self.story.at_device(device)
        sign = llama_failures.sign(text)
        if sign is None:
            return
        self.story.tell(sign, self._where(bare=not prefixed), self._line)
        if self._recovered is not None and self.story.is_refusal and not self._dry:
            again = self._recovered.replace("recovered: ", "refused, and again after a retry: ", 1)
            self.warnings = [again if warning == self._recovered else warning for warning in self.warnings]
            self._recovered = None
        if sign.bucket == "compute" and not self._dry and not self.ready:
            self._advance("reserve")

    def kill(self, kill: host_killer.Kill, line: int) -> None:
        """Take the news that the kernel, or somebody, ended a process."""
        if kill.ours:
            self.story.killed(kill, self._phase, line)
        else:
            self._warn(kill.warning())

    def _recover(self, text: str) -> None:
        if self.story.is_refusal:
            self._recovered = shown(f"recovered: {self.story.text}")
            self._warn(self._recovered)
            self.story.forget()
        self._warn(text)

    # ------------------------------------------------------------ memory

    def _memory(self, text: str) -> None:
        if match := _USING.search(text):
            self.labels.announced(match[1], match[2])
        if self.table.read(text, self.labels):
            return
        if self._clip is not None and (match := _CLIP_SIZE.search(text)):
            what = "weights" if match["what"] == "model size" else "compute"
            self._project(f"projector {what}", self._clip_device(), match["number"], match["unit"])
            return
        if self._share_of is not None and (match := PER_DEVICE.search(text)):
            self._share(match)
            return
        self._share_of = None
        if "evice" in text and self._of_devices(text):
            return
        if match := BUFFER.search(text):
            self._buffer(match, match["kind"])
        elif (match := OLD_WEIGHTS.search(text)) and self._phase in ("start", "weights", "ready"):
            self._buffer(match, "model")
        elif (match := CACHE.search(text)) or (match := OLD_CACHE.search(text)):
            self._cache(match, "RS" if "), R (" in text else "KV")
        if llama_eras.is_sum(text):
            self._sum(text)

    def _sum(self, text: str) -> None:
        """A sum as builds of 2023 printed them."""
        if self.load is None or self._between:
            self._start_load()
        load = self.load
        assert load is not None
        load.sums.read(text)
        if "self size" in text or "VRAM kv self" in text:
            self._advance("kv")
        elif "buffer total size" in text or "VRAM scratch buffer:" in text:
            self._advance("reserve")

    def _of_devices(self, text: str) -> bool:
        """The line before those that say how much of a split buffer is on which device."""
        if "model buffer size per device" in text:
            self._share_of = "model"
            self._loading().shares["model"] = []
        elif "KV cache size per device" in text and self.load is not None:
            self._share_of = "KV"
            self.load.shares["KV"] = []
        return self._share_of is not None

    def _share(self, match: re.Match[str]) -> None:
        figure = mebi(match["number"], match["unit"])
        if self.load is not None and self._share_of is not None and figure is not None:
            shares = self.load.shares.setdefault(self._share_of, [])
            if len(shares) < 256:
                shares.append((int(match["device"]), *figure))

    def _buffer(self, match: re.Match[str], kind: str) -> None:
        if self._clip is not None and kind == "compute":
            self._project("projector compute", match["device"], match["number"], match["unit"])
            return
        if kind == "model":
            load = self._loading()
        elif kind == "LoRA":
            load = self.load or self._loading()
        else:
            load = self._in_context("reserve" if kind == "compute" else "kv")
        buffer = buffer_of(match, kind, load, self.labels)
        if buffer is not None:
            load.add(buffer)

    def _cache(self, match: re.Match[str], kind: str) -> None:
        figure = mebi(match["number"], match["unit"])
        load = self._in_context("kv")
        if figure is not None and len(load.caches) < 256:
            load.caches.append((load.draft_context, kind, *figure))

    def _clip_device(self) -> str:
        """The projector's device; before 2025 its number, 0, was left out: ``CLIP using CUDA backend``."""
        name = self._clip or ""
        return f"{name}0" if name in ("CUDA", "ROCm", "MUSA", "Vulkan", "SYCL", "CANN") else name

    def _project(self, kind: str, device: str, number: str, unit: str) -> None:
        figure = mebi(number, unit)
        if figure is None:
            return
        buffer = Buffer(kind, device, self.labels.of(device), *figure, context=0, draft=False)
        target = self.target
        into = self._projector if target is None or self._between else target.projector
        if len(into) < 256:
            into.append(buffer)

    # ------------------------------------------------------------ facts

    def _facts(self, text: str) -> None:
        self._era = max(self._era, llama_eras.era(text))
        if made := llama_facts.creating(text):
            self._cache_name = made[0]
            if made[1] is not None and (self.load is None or not self.load.draft_context):
                self.creating[made[0]] = made[1]
        found = llama_facts.of_load(text)
        if not found:
            return
        load = self.load
        if "context" in found and load is not None and not self._between and load.context_is_whole:
            self._start_context()  # before 2025 nothing else begins one
        if "slots" in found and "n_slots" in text:
            self.server_facts.update(found)  # the server's slots, whatever was loaded last
        elif load is None or self._between:
            self.pending.update(found)
        else:
            self._place(load, found)

    def _place(self, load: Load, found: dict[str, Any]) -> None:
        if load.draft_context and not load.draft:
            return
        if "kv_cells" in found and ("compress" in self._cache_name or not found["kv_layers"]):
            return  # caches of summaries, whose cells are not tokens, and caches of no layer
        if "kv_cells" in found and "indexer" in self._cache_name:
            load.facts["indexer_cells"], load.facts["indexer_layers"] = found["kv_cells"], found["kv_layers"]
            return
        if "kv_cells" in found and "kv_cells" in load.facts:
            # Two caches of one context (sliding window): the larger one is the context's.
            load.facts["kv_cells_sliding"] = min(load.facts["kv_cells"], found["kv_cells"])
            load.facts["kv_layers"] = load.facts.get("kv_layers", 0) + found["kv_layers"]
            load.facts["kv_cells"] = max(load.facts["kv_cells"], found["kv_cells"])
            return
        load.facts.update(found)
