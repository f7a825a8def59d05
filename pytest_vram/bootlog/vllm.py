"""The grammar of vLLM, from 0.6 to 0.33, in both of its engines.

What is printed differs by release. The first engine (V0, until 0.10) prints weights, non-torch memory, activation peak
and cache of each card in a line; the second (V1) prints the weights and the cache, from 0.21 on also a summary, where
weights and non-torch memory are one figure and the activation peak contains the graphs that were planned for. Each
buffer counts once, by its most exact figure. The cache is a pool that is taken whole: its size says what was left, not
what is needed.

Many lines are printed once for all cards of an engine. Figures of the others are not guessed: a warning says that they
are missing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from pytest_vram.bootlog import vllm_lines as lines
from pytest_vram.bootlog.boot import Failure
from pytest_vram.bootlog.lines import Line, shown, size
from pytest_vram.bootlog.python_server import Figure, PythonServer, difference, gibibytes, negative, significant
from pytest_vram.bootlog.ranks import Rank
from pytest_vram.ledger import Bucket, Entry
from pytest_vram.units import mib

NO_EVIDENCE = "no sizes are in this log: vLLM prints them at level INFO, which is the default (VLLM_LOGGING_LEVEL=INFO)"
_COUNTS = ("context", "tensor_parallel", "pipeline_parallel", "data_parallel", "block_size", "slots")
_SIZES = {"tensor_parallel": "tp", "pipeline_parallel": "pp", "data_parallel": "dp"}
#: Figures that the weights of a card are in.
_LOADED = {"weights", "consumed"}
#: And those that the peak of activations is in.
_ACTIVE = {"activation", "torch peak"}
#: Beginnings of the names in the list of what is in use.
_USES = {
    "weight": "weights",
    "consumed memory": "consumed",
    "peak activation": "activation",
    "non-torch memory": "context",
}
_HPU = (
    ("activation", lines.HPU_PROFILED, "model profiling run"),
    ("kv", lines.HPU_CACHE, "cache engine"),
    ("graphs", lines.HPU_WARM, "warm-up"),
)
#: Memory in use while asleep may differ by this from one time to another.
_GROWN = 64 << 20
_BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


class Vllm(PythonServer):
    """Reads one log of vLLM, line by line."""

    engine = "vllm"
    frames = lines.FRAMES
    callers = lines.CALLERS
    reasons = lines.REASONS
    words = lines.WORDS
    noise = lines.NOISE

    def __init__(self, engine: str, patterns: Mapping[str, str]) -> None:
        super().__init__(engine, patterns)
        self._sizes: dict[Rank, dict[str, Figure]] = {}
        self._tokens: dict[Rank, int] = {}
        self._concurrency: dict[Rank, str] = {}
        self._generation = ""
        self._override: tuple[int, int] | None = None
        #: freed and in use at the last sleep, in use at the first one, and how many there were
        self._sleeps: dict[Rank, tuple[int, int, int, int]] = {}
        self._planned_graphs_counted = True
        self._graphs_done = False
        self._repeated = False

    # ------------------------------------------------------------ lines

    def _of_requests(self, text: str) -> bool:
        return "Received request " in text or "Added request " in text or "Generated response " in text

    def _read(self, line: Line, rank: Rank) -> None:
        text = line.text
        self._milestones(line)
        self._settings(text)
        if "GiB" in text or " GB" in text:
            self._figures(line, rank)
        if "profiling run" in text or "device memory" in text:
            self._of_plugins(line, rank)
        self._cache(line, rank)
        if "[repeated " in text and "across cluster" in text:
            self._repeated = True
        if line.level == "W" and lines.WARNS.search(text):
            self._warn(text)

    def _milestones(self, line: Line) -> None:
        text = line.text
        if "Starting to load model" in text or "Loading safetensors checkpoint shards" in text:
            self._advance("weights", line)
        elif "Capturing " in text and ("graph" in text or "Graph" in text):
            if not self._graphs_done:
                self._advance("graph-capture", line)
        elif "Application startup complete" in text or "Uvicorn running on http" in text:
            self._become_ready(line)
        elif "to fall asleep" in text or "Sleep mode freed" in text:
            self._begin("sleep", line)
        elif "to wake up tags" in text and self._phase == "sleep":
            self._begin("ready", line)
        elif ("Shutting down" in text or "Application shutdown complete" in text) and self._ready:
            self._begin("stop", line)

    def _settings(self, text: str) -> None:
        if "LLM engine (v" in text:
            self._configuration(text)
        elif "non-default args" in text or "args: Namespace" in text:
            self._arguments(text)
        elif "max model len" in text and (match := lines.MODEL_LENGTH.search(text)):
            self._facts["context"] = int(match[1])
        elif "Chunked prefill is enabled" in text and (match := lines.BATCH.search(text)):
            self._facts["batch_tokens"] = int(match[1])
        elif "Auto-fit" in text and (match := lines.REDUCED.search(text)):
            self._facts["context_reduced_from"] = int(match[1])
            self._facts["context"] = int(match[2])
            self._warn(text)
        elif "Starting vLLM" in text and (match := lines.LISTENING.search(text)):
            self._facts["url"] = match[1]
        elif "init engine" in text and (match := lines.INITIALISED.search(text)):
            self._facts["init_seconds"] = float(match[1])
        elif "weights took" in text and (match := lines.LOADED.search(text)):
            self._facts["load_seconds"] = float(match[1])
        if "latform" in text and (match := lines.PLATFORM.search(text)):
            self._ranks.are(match[1] or match[2])
        if "version" in text and (match := lines.VERSION.search(text)):
            self._facts.setdefault("build", match[1])

    def _configuration(self, text: str) -> None:
        if match := lines.VERSION.search(text):
            self._facts["build"] = match[1]
        if match := lines.GENERATION.search(text):
            self._generation = match[1]
        if match := lines.MODEL.search(text):
            self._facts["model_name"] = match[1] or match[2]
        for fact, pattern in lines.CONFIG.items():
            match = pattern.search(text)
            if match is not None and match[1] != "None":
                self._set(fact, match[1])

    def _arguments(self, text: str) -> None:
        for fact, pattern in lines.ARGUMENTS.items():
            match = pattern.search(text)
            if match is not None and match[1] != "None":
                self._set(fact, match[1])

    def _set(self, fact: str, word: str) -> None:
        """A fact of the configuration, where the word is one for it."""
        if fact in ("eager", "chunked_prefill"):
            if word in ("True", "False"):
                self._facts[fact] = word == "True"
        elif fact == "device_kind":
            self._ranks.are(word)
        elif fact == "memory_share":
            self._share(word)
        elif fact == "dtype":
            self._facts[fact] = word.removeprefix("torch.")
        elif fact in _COUNTS or fact == "batch_tokens":
            if word.isascii() and word.isdigit() and len(word) <= 12:
                self._facts[fact] = int(word)
                if fact in _SIZES:
                    self._ranks.sizes[_SIZES[fact]] = int(word)
        else:
            self._facts[fact] = word

    def _share(self, number: str) -> None:
        try:
            share = float(number)
        except ValueError:
            return
        if 0 < share <= 1:
            self._facts["memory_share"] = share

    # ------------------------------------------------------------ sizes

    def _figures(self, line: Line, rank: Rank) -> None:
        text = line.text
        if match := lines.WEIGHTS.search(text):
            self._keep(rank, "weights", match[1], match[0].partition(" took")[0])
            if match[2] is not None:
                self._facts.setdefault("load_seconds", float(match[2]))
            self._advance("reserve", line)
        elif match := lines.PROFILE.search(text):
            self._generation = self._generation or "V0"
            weights, other, activation, cache = match.groups()
            if "weights" not in self._sizes.get(rank, {}):
                self._keep(rank, "weights", weights, "model weights")
            self._keep(rank, "context", other, "non_torch_memory")
            self._keep(rank, "activation", activation, "PyTorch activation peak memory")
            self._room(line, rank, cache, "memory reserved for KV Cache")
        elif match := lines.RESULTS.search(text):
            self._results(match, line, rank)
        elif match := lines.BUDGET.search(text):
            self._card(match[1], match[2], match[3])
        elif match := lines.AVAILABLE.search(text):
            self._generation = self._generation or "V1"
            self._room(line, rank, match[1], "Available KV cache memory")
        elif match := lines.RESERVED.search(text):
            self._room(line, rank, match[2], "reserved for KV Cache by kv_cache_memory_bytes")
        elif match := lines.GRAPHS.search(text):
            self._capture_ends(line, rank, match[2])
        elif match := lines.ENCODER_GRAPHS.search(text):
            self._keep(rank, "encoder graphs", match[2], "encoder CUDA graphs")
        elif match := lines.GRAPHS_PLANNED.search(text):
            self._keep(rank, "planned graphs", match[1], "estimated CUDA graph memory")
        elif match := lines.GRAPHS_COMPARED.search(text):
            self._keep(rank, "graphs", match[1], "CUDA graph pool memory")
            self._keep(rank, "planned graphs", match[2], "estimated CUDA graph memory")
        elif match := lines.SLEEP.search(text):
            self._asleep(rank, match)
        elif "Free memory on device" in text:
            self._summary(line, rank)

    def _results(self, match: re.Match[str], line: Line, rank: Rank) -> None:
        total, _, peak, _, other, cache, share = match.groups()
        self._generation = "V0"
        self._card(total, share, None)
        self._keep(rank, "context", other, "non_torch_memory")
        self._keep(rank, "torch peak", peak, "peak_torch_memory")
        self._room(line, rank, cache, "kv_cache_size")

    def _summary(self, line: Line, rank: Rank) -> None:
        """The line at the end of the boot; other lines gave some of its figures before."""
        text = line.text
        if match := lines.SUMMARY.search(text):
            self._facts["free_bytes"] = _whole(match[1])
            self._card(match[2], match[3], match[4])
        if match := lines.USED.search(text):
            self._used(match[1], rank)
        if (match := lines.IN_USE.search(text)) and "kv" not in self._sizes.get(rank, {}):
            self._keep(rank, "kv", match[1], "kv cache memory in use")

    def _used(self, listed: str, rank: Rank) -> None:
        """What is in use by what; where a more exact line said so before, that one counts."""
        known = self._sizes.get(rank, {})
        for match in lines.USED_FOR.finditer(listed):
            number, name = match[1], match[2].strip()
            kind = next((kind for begin, kind in _USES.items() if name.startswith(begin)), None)
            if kind is None and name.lower().endswith("graph memory"):
                kind = "graphs"
                if (platform := name.partition(" ")[0]) in ("NPU", "XPU", "HPU", "MUSA"):
                    self._ranks.are(platform)
            if kind is None:
                self._warn(f"{number} GiB for {name} are in this log, and belong to no bucket that is known here")
            elif kind not in ("weights", "graphs") or kind not in known:
                self._keep(rank, kind, number, name)

    def _of_plugins(self, line: Line, rank: Rank) -> None:
        """Figures in the words of plugins for devices that are no GPUs of NVIDIA or AMD."""
        text = line.text
        if match := lines.XPU_BEFORE.search(text):
            self._ranks.are("XPU")
            if (total := size(match[1], "MiB")) is not None:
                self._facts["device_bytes"] = total[0]
        elif match := lines.XPU_AFTER.search(text):
            self._ranks.are("XPU")
            names = ("peak memory usage", "torch mem", "non-torch mem")
            found = [size(number, "MiB") for number in match.groups()]
            peak, torch, other = (
                None if one is None else Figure(*one, name) for one, name in zip(found, names, strict=True)
            )
            self._take(rank, "context", other)
            if peak is not None and torch is not None and other is not None:
                held = Figure(torch.bytes + other.bytes, torch.resolution + other.resolution, "")
                self._take(rank, "activation", difference(peak, held, "peak memory usage without the rest"))
        elif match := lines.HPU_ROOM.search(text):
            self._ranks.are("HPU")
            self._advance("kv", line)
            self._take(rank, "kv", significant(match[1], match[2], "reserved for KV cache"))
        else:
            for what, pattern, detail in _HPU:
                if match := pattern.search(text):
                    self._ranks.are("HPU")
                    self._take(rank, what, significant(match[1], match[2], detail))

    def _keep(self, rank: Rank, what: str, number: str, detail: str) -> None:
        self._take(rank, what, gibibytes(number, detail))

    def _take(self, rank: Rank, what: str, figure: Figure | None) -> None:
        if figure is not None:
            self._ranks.used(rank)
            self._sizes.setdefault(rank, {})[what] = figure

    def _card(self, total: str, share: str | None, budget: str | None) -> None:
        self._facts["device_bytes"] = _whole(total)
        if budget is not None:
            self._facts["budget_bytes"] = _whole(budget)
        if share is not None and "memory_share" not in self._facts:
            self._share(share)

    def _capture_ends(self, line: Line, rank: Rank, number: str | None) -> None:
        self._advance("graph-capture", line)
        self._graphs_done = True
        if number is not None:
            self._keep(rank, "graphs", number, "CUDA graphs")

    def _asleep(self, rank: Rank, match: re.Match[str]) -> None:
        freed, left = gibibytes(match[1], ""), gibibytes(match[2], "")
        if freed is not None and left is not None:
            self._ranks.used(rank)
            first, times = self._sleeps[rank][2:] if rank in self._sleeps else (left.bytes, 0)
            self._sleeps[rank] = (freed.bytes, left.bytes, first, times + 1)

    # ------------------------------------------------------------ the cache

    def _room(self, line: Line, rank: Rank, number: str, detail: str) -> None:
        """What is left for the cache; less than nothing is why the engine does not start."""
        self._advance("kv", line)
        if not negative(number):
            self._keep(rank, "kv", number, detail)
            return
        missing = gibibytes(number.removeprefix("-"), detail)
        self._ranks.used(rank)
        if missing is not None:
            self._facts["kv_available_bytes"] = -missing.bytes
            note = (
                f"the weights and the peak that was measured exceed the engine's share of the card by"
                f" {number.removeprefix('-')} GiB before any cache"
            )
            found = self._failure_of("kv_planning", line.text, phase="kv", note=note)
            self._fail(msgspec.structs.replace(found, bucket="kv"), rank)

    def _cache(self, line: Line, rank: Rank) -> None:
        text = line.text
        if "KV cache size" in text and (match := lines.TOKENS.search(text)):
            self._generation = self._generation or "V1"
            self._advance("kv", line)
            if (tokens := _count(match[1])) is not None:
                # Older releases print a line for each card; the smallest is the one that holds.
                self._tokens[rank] = min(tokens, self._tokens.get(rank, tokens))
        if "Maximum concurrency" in text and (match := lines.CONCURRENCY.search(text)):
            if (context := _count(match[1])) is not None:
                self._facts["context"] = context
            self._concurrency[rank] = min(match[2], self._concurrency.get(rank, match[2]), key=float)
        elif "blocks: " in text and (match := lines.BLOCKS.search(text)):
            if match[1] != "CPU":
                self._advance("kv", line)
                self._facts["blocks"] = int(match[2])
                if match[3] is not None:
                    self._generation = self._generation or "V0"
                    self._facts["cpu_blocks"] = int(match[3])
        elif "num_gpu_blocks_override" in text and (match := lines.OVERRIDE.search(text)):
            # The trial of graphs makes a small cache for itself, of none that was left.
            if int(match[1]):
                self._override = (int(match[1]), int(match[2]))
                self._facts["blocks"] = int(match[2])
        elif "VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS" in text:
            # "is enabled" counts what was planned for; "is disabled", and "will be enabled" before 0.21, do not.
            self._planned_graphs_counted = "profiling is enabled" in text

    # ------------------------------------------------------------ failures

    def _reasons(self, line: Line, rank: Rank) -> None:
        text = line.text
        if match := lines.PRECHECK.search(text):
            self._fail(self._precheck(match, text), rank)
        elif match := lines.NEEDED.search(text):
            self._fail(self._too_little(match, text), rank)
        elif match := lines.TOO_LONG.search(text):
            self._facts["context"] = int(match[1])
            self._facts["kv_tokens"] = int(match[2])
            found = self._failure_of("kv_planning", text, phase="kv", note=lines.PROFILED_WITH_THE_CONTEXT)
            self._fail(msgspec.structs.replace(found, bucket="kv"), rank)
        else:
            super()._reasons(line, rank)

    def _precheck(self, match: re.Match[str], text: str) -> Failure:
        device, free, total, share, wanted = match.groups()
        if device is not None and (index := _count(device.rpartition(":")[2])) is not None and index < 10_000:
            self._failed_index = index
            self._ranks.are(device)
        self._card(total, share, wanted)
        self._facts["free_bytes"] = _whole(free)
        note = f"nothing was loaded yet: {free} GiB of {total} GiB were free, and the rest is held by other processes"
        largest = _largest_share(free, total)
        if largest is not None:
            self._facts["largest_memory_share"] = largest
            note += f"; with as much free as then, the largest share that passes is {largest:.2f}"
        return Failure(
            kind="precheck",
            certainty="certain",
            text=shown(text),
            phase="start",
            bytes=_whole(wanted),
            line=self._line,
            free=_whole(free),
            total=_whole(total),
            note=note,
        )

    def _too_little(self, match: re.Match[str], text: str) -> Failure:
        context, needed, available = match.groups()
        self._generation = self._generation or "V1"
        self._facts["context"] = int(context)
        note = None
        if estimate := lines.ESTIMATE.search(text):
            self._facts["estimated_context"] = int(estimate[1])
            note = (
                f"{estimate[1]} tokens is the engine's own estimate for this share of the card: what is left for the"
                " cache changes with the context in some releases, so boot with it before you rely on it"
            )
        if self._ranks.sizes.get("pp", 1) > 1:
            note = (
                f"{note + '; ' if note else ''}the layers are divided among cards, and some releases hold the need of"
                " all layers against the room of one card"
            )
        return Failure(
            kind="kv_planning",
            certainty="certain",
            text=shown(text),
            phase="kv",
            bucket="kv",
            bytes=_whole(needed),
            line=self._line,
            free=_whole(available),
            note=note,
        )

    @property
    def _captured(self) -> bool:
        return self._graphs_done

    # ------------------------------------------------------------ result

    @property
    def _era(self) -> str:
        return self._generation

    def _entries(self) -> tuple[Entry, ...]:
        found: list[Entry] = []
        for rank in sorted(self._sizes, key=self._ranks.index):
            found.extend(self._entry(bucket, rank, figure) for bucket, figure in self._of_card(self._sizes[rank]))
        return tuple(found)

    def _of_card(self, sizes: dict[str, Figure]) -> list[tuple[Bucket, Figure]]:
        """The buffers of one card, each once."""
        found: list[tuple[Bucket, Figure | None]] = []
        weights, consumed, peak = sizes.get("weights"), sizes.get("consumed"), sizes.get("torch peak")
        if weights is not None:
            found.append(("weights", weights))
            if consumed is not None:
                found.append(("context", difference(consumed, weights, "consumed memory without the weights")))
        elif consumed is not None:
            found.append(("weights", consumed))
        found.append(("context", sizes.get("context")))
        activation, planned = sizes.get("activation"), sizes.get("planned graphs")
        if activation is None and peak is not None and weights is not None:
            activation = difference(peak, weights, "peak_torch_memory without the weights")
        if consumed is not None and activation is not None and planned is not None and self._planned_graphs_counted:
            activation = difference(activation, planned, "peak activation without the graphs planned for")
        found.append(("compute", activation))
        found.append(("compute", sizes.get("graphs")))
        found.append(("compute", sizes.get("encoder graphs")))
        found.append(("kv", self._overridden(sizes.get("kv"))))
        return [(bucket, figure) for bucket, figure in found if figure is not None]

    def _overridden(self, cache: Figure | None) -> Figure | None:
        if cache is None or self._override is None or not self._override[0]:
            return cache
        old, new = self._override
        resolution = -(-cache.resolution * new // old)
        return Figure(cache.bytes * new // old, resolution, f"{cache.detail}, {new} of {old} blocks")

    def _evidence(self, entries: tuple[Entry, ...]) -> Literal["complete", "partial", "none"]:
        if not entries:
            return "none"
        whole = [rank for rank, sizes in self._sizes.items() if self._is_whole(sizes)]
        cards = {self._ranks.index(rank) for rank in whole}
        return "complete" if self._ready and self._failure is None and len(cards) >= self._ranks.world else "partial"

    def _is_whole(self, sizes: dict[str, Figure]) -> bool:
        activation = "activation" in sizes or ("torch peak" in sizes and "weights" in sizes)
        graphs = "graphs" in sizes or bool(self._facts.get("eager"))
        return activation and graphs and "kv" in sizes and ("weights" in sizes or "consumed" in sizes)

    def _gaps(self, entries: tuple[Entry, ...], evidence: str) -> list[str]:
        found: list[str] = []
        if evidence == "none":
            return [NO_EVIDENCE] if self._failure is None else []
        loaded = {self._ranks.index(rank) for rank, sizes in self._sizes.items() if _LOADED.intersection(sizes)}
        if self._ready and len(loaded) < self._ranks.world:
            found.append(
                f"figures of {len(loaded)} of {self._ranks.world} cards are in this log: this release prints them once"
                " for all cards of a machine; the others hold about as much each"
            )
        elif self._repeated:
            found.append("Ray prints lines that many workers share once: figures of some cards are not in this log")
        for rank, (_, last, first, times) in self._sleeps.items():
            if last - first > _GROWN:
                found.append(
                    f"asleep, {self._ranks.label(rank)} had {mib(first)} in use at the first of {times} times and"
                    f" {mib(last)} at the last; that is the whole card, other processes with it"
                )
        if any("consumed" in sizes and "weights" not in sizes for sizes in self._sizes.values()):
            found.append("the weights of some cards are one figure with what is allocated outside of torch")
        if self._ready and not any(_ACTIVE.intersection(sizes) for sizes in self._sizes.values()):
            found.append(
                "the peak of activations and the memory outside of torch are not in this log: VLLM_LOGGING_LEVEL=DEBUG"
                " prints them from 0.11 on, and from 0.21 on they are printed by default"
            )
        return found

    def _all_facts(self) -> dict[str, Any]:
        facts = super()._all_facts()
        facts.update(self._capacity(facts))
        if self._sleeps:
            label = self._ranks.label
            facts["sleep_freed_bytes"] = {label(rank): sizes[0] for rank, sizes in self._sleeps.items()}
            # What was in use on the whole card, other processes with it.
            facts["sleep_in_use_bytes"] = {label(rank): sizes[1] for rank, sizes in self._sleeps.items()}
        return facts

    def _capacity(self, facts: dict[str, Any]) -> dict[str, Any]:
        """Tokens that the cache holds and what follows from it. Engines in parallel have a cache each."""
        found: dict[str, Any] = {}
        if self._concurrency:
            found["max_concurrency"] = min(float(number) for number in self._concurrency.values())
        if self._tokens:
            found["kv_tokens"] = min(self._tokens.values())
            if len(self._tokens) > 1:
                names = {rank: f"DP{rank.dp}" for rank in self._tokens if rank.dp is not None}
                by_engine = {names[rank]: tokens for rank, tokens in self._tokens.items() if rank in names}
                found["kv_tokens_by_engine"] = by_engine
        blocks, known = facts.get("blocks"), facts.get("kv_tokens", found.get("kv_tokens"))
        if not blocks:
            return found
        size = facts.get("block_size") or self._block_size(blocks, known, facts.get("context"))
        if size is not None:
            found["block_size"] = size
            found.setdefault("kv_tokens", known or blocks * size)
        return found

    def _block_size(self, blocks: int, tokens: int | None, context: int | None) -> int | None:
        """Tokens of a block, where the figures printed leave one choice."""
        if tokens is not None:
            return tokens // blocks if tokens % blocks == 0 and tokens // blocks in _BLOCK_SIZES else None
        if not context or not self._concurrency:
            return None
        printed = min(float(number) for number in self._concurrency.values())
        fitting = [size for size in _BLOCK_SIZES if abs(blocks * size / context - printed) <= 0.0051]
        return fitting[0] if len(fitting) == 1 else None


def _whole(number: str) -> int:
    figure = gibibytes(number, "")
    return 0 if figure is None else figure.bytes


def _count(number: str) -> int | None:
    digits = number.replace(",", "")
    return int(digits) if digits.isascii() and digits.isdigit() and len(digits) <= 18 else None


def _largest_share(free: str, total: str) -> float | None:
    """The largest share of the card, in hundredths, that is surely below what was free."""
    have, card = gibibytes(free, ""), gibibytes(total, "")
    if have is None or card is None or not card.bytes:
        return None
    hundredths = (have.bytes - have.resolution) * 100 // (card.bytes + card.resolution)
    return max(0, min(100, hundredths)) / 100
