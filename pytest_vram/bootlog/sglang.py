"""The grammar of SGLang, from 0.3 to 0.5.23.

Weights, graphs and the base of a process are differences of what was free on the card before and after, so that what
another process took or gave up meanwhile is in them; the caches are sizes of tensors. Releases before 0.4 print only
what was free: sizes are then differences made here. Every process prints its own card's figures.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from pytest_vram.bootlog import sglang_lines as lines
from pytest_vram.bootlog.boot import Failure
from pytest_vram.bootlog.lines import Line, size
from pytest_vram.bootlog.python_server import Figure, PythonServer, difference, gibibytes
from pytest_vram.bootlog.ranks import MAIN, Rank
from pytest_vram.ledger import Bucket, Entry

NO_EVIDENCE = "no sizes are in this log: SGLang prints them at log level info, which is the default (--log-level info)"
_COUNTS = ("context", "tensor_parallel", "pipeline_parallel", "data_parallel", "slots", "batch_tokens", "block_size")
_SIZES = {"tensor_parallel": "tp", "pipeline_parallel": "pp", "data_parallel": "dp"}
#: Figures that are kept of one kind and card; a log with more is none of SGLang's.
_MOST = 64


class _Card:
    """What the process of one card told.

    :ivar free: ``begin``, ``loaded``, ``pools``, ``capture``: what was free then.
    :ivar loads: models that were loaded, of which the second is a draft model. :ivar pools: caches that are whole.
    """

    def __init__(self) -> None:
        self.weights: Figure | None = None
        self.base: Figure | None = None
        self.caches: list[Figure] = []
        self.states: list[Figure] = []
        self.graphs: list[Figure] = []
        self.drafts: list[Figure] = []
        self.draft_caches: list[Figure] = []
        self.host: list[Figure] = []
        self.unified: Figure | None = None
        self.free: dict[str, Figure] = {}
        self.tokens: int | None = None
        self.loads = 0
        self.loading = False
        self.pools = 0

    @property
    def draft(self) -> bool:
        return self.loads > 1

    def loaded(self) -> Figure | None:
        """The weights: as printed, else by what was free before and after."""
        if self.weights is not None or "begin" not in self.free or "loaded" not in self.free:
            return self.weights
        return difference(self.free["begin"], self.free["loaded"], "Load weight, by what was free")

    def held(self) -> list[Figure]:
        """The caches: as printed, else by what was free before and after."""
        printed = [self.unified] if self.unified is not None else self.caches
        if printed or self.states or "loaded" not in self.free or "pools" not in self.free:
            return printed
        found = difference(self.free["loaded"], self.free["pools"], "Memory pool, by what was free")
        return [] if found is None else [found]


class Sglang(PythonServer):
    """Reads one log of SGLang, line by line."""

    engine = "sglang"
    frames = lines.FRAMES
    callers = lines.CALLERS
    reasons = lines.REASONS
    words = lines.WORDS
    noise = lines.NOISE

    def __init__(self, engine: str, patterns: Mapping[str, str]) -> None:
        super().__init__(engine, patterns)
        self._ranks.shared = None
        self._cards: dict[Rank, _Card] = {}
        self._eras: set[str] = set()
        self._pools_done = False
        self._graphs_done = False
        self._total_tokens: int | None = None

    # ------------------------------------------------------------ lines

    def _of_requests(self, text: str) -> bool:
        return "Receive: obj=" in text or "Finish: obj=" in text or "Received request" in text

    def _read(self, line: Line, rank: Rank) -> None:
        text = line.text
        if text.startswith("server_args="):
            self._arguments(text)
            return
        if " GB" in text or "GB " in text or "GB," in text or text.endswith("GB"):
            self._figures(line, rank)
        if "apture " in text:
            self._capture(line, rank)
        self._milestones(line)
        if "max_total_num_tokens=" in text and (match := lines.TOKENS.search(text)):
            self._summary(text, int(match[1]))
        if "profiled value" in text and (match := lines.PROFILED.search(text)):
            self._profiled(line, rank, int(match[1]))
        if lines.WARNS.search(text) and not text.lstrip().startswith(("File ", "raise ")):
            self._warn(text)

    def _milestones(self, line: Line) -> None:
        text = line.text
        if "The server is fired up and ready to roll" in text:
            self._become_ready(line)
        elif "Uvicorn running on" in text and (match := lines.LISTENING.search(text)):
            self._facts["url"] = match[1]
        elif "Shutting down" in text and self._ready:
            self._begin("stop", line)

    def _arguments(self, text: str) -> None:
        for fact, pattern in lines.ARGUMENTS.items():
            match = pattern.search(text)
            if match is None or match[1] == "None":
                continue
            word = match[1]
            if fact == "attention_shares_ranks":
                self._ranks.shared = word == "True"
            elif fact == "graphs_off":
                if word in ("True", "False"):
                    self._facts["eager"] = word == "True"
            elif fact == "device_kind":
                self._ranks.are(word)
            elif fact == "memory_share":
                self._share(word)
            elif fact in _COUNTS:
                if word.isascii() and word.isdigit() and len(word) <= 12:
                    self._facts[fact] = int(word)
                    if fact in _SIZES:
                        self._ranks.sizes[_SIZES[fact]] = int(word)
            elif fact == "model_name" or word != "auto":
                self._facts[fact] = word

    def _share(self, word: str) -> None:
        try:
            share = float(word)
        except ValueError:
            return
        if 0 < share <= 1:
            self._facts["memory_share"] = share

    def _summary(self, text: str, tokens: int) -> None:
        """The line at the end of the boot; processes of one group say the same."""
        self._total_tokens = tokens if self._total_tokens is None else min(tokens, self._total_tokens)
        for fact, pattern in lines.SUMMARY.items():
            if found := pattern.search(text):
                self._facts[fact] = int(found[1])
        if (left := lines.LEFT.search(text)) and (figure := gibibytes(left[1], "")) is not None:
            self._facts["free_after_bytes"] = min(figure.bytes, self._facts.get("free_after_bytes", figure.bytes))

    # ------------------------------------------------------------ sizes

    def _card(self, rank: Rank) -> _Card:
        self._ranks.used(rank)
        return self._cards.setdefault(rank, _Card())

    def _figures(self, line: Line, rank: Rank) -> None:
        text = line.text
        if "Load weight begin" in text:
            self._load_begins(line, rank)
        elif "Load weight end" in text:
            self._load_ends(line, rank)
        elif "Memory pool end" in text:
            card = self._card(rank)
            card.pools += 1
            self._pools_done = True
            self._free(card, "pools", text)
            self._advance("kv", line)
        elif match := lines.CACHE.search(text):
            self._cache(line, rank, match)
        elif match := lines.CACHE_LATE.search(text):
            self._late(rank, match)
        elif match := lines.UNIFIED.search(text):
            if (exact := size(match[2], "B")) is not None:
                self._card(rank).unified = Figure(exact[0], 0, "UnifiedKVPool")
        elif "Mamba Cache is allocated" in text:
            self._eras.add("2025")
            self._states(line, rank, lines.STATE, text)
        elif "ring buffers allocated" in text:
            self._states(line, rank, lines.REPLAY, text)
        elif "host memory" in text and "Allocating" in text and (match := lines.HOST.search(text)):
            found = size(match[1] or match[2], "GB")
            card = self._card(rank)
            if found is not None and found[0] and len(card.host) < _MOST:
                card.host.append(Figure(*found, "hierarchical cache"))
        elif match := lines.BASE.search(text):
            base = gibibytes(match[1], "before the weights (contexts, communication)")
            if base is not None:
                self._card(rank).base = base

    def _load_begins(self, line: Line, rank: Rank) -> None:
        card = self._card(rank)
        card.loads += not card.loading  # the same line again begins no other model
        card.loading = True
        self._advance("weights", line)
        if not card.draft:
            free = self._free(card, "begin", line.text)
            if free is not None:
                self._facts["free_bytes"] = min(free.bytes, self._facts.get("free_bytes", free.bytes))

    def _load_ends(self, line: Line, rank: Rank) -> None:
        text = line.text
        card = self._card(rank)
        card.loads, card.loading = max(card.loads, 1), False
        self._advance("weights" if self._phase == "start" else "kv", line)
        usage = lines.USAGE.search(text)
        figure = None if usage is None else gibibytes(usage[1], "Load weight")
        if card.draft:
            if figure is not None and len(card.drafts) < _MOST:
                card.drafts.append(figure._replace(detail="draft weights"))
            return
        self._free(card, "loaded", text)
        card.weights = figure
        self._eras.add("2025" if usage is not None else "2024")
        if match := lines.LOADED.search(text):
            self._facts["architecture"] = match[2]
            if match[1] is not None:
                self._eras.add("2026")
                self._facts["load_seconds"] = float(match[1])
        if match := lines.LOADED_TYPE.search(text):
            self._facts["dtype"] = match[1]
        if match := lines.QUANTISED.search(text):
            self._facts.setdefault("quantization", match[1])

    def _free(self, card: _Card, when: str, text: str) -> Figure | None:
        match = lines.AVAILABLE.search(text)
        figure = None if match is None else gibibytes(match[1], "")
        if figure is not None:
            card.free.setdefault(when, figure)
        return figure

    def _cache(self, line: Line, rank: Rank, match: re.Match[str]) -> None:
        kind, tokens, *numbers = match.groups()
        self._eras.add("2025" if kind is None else "2026")
        self._advance("kv", line)
        card = self._card(rank)
        draft = card.draft and card.pools > 0
        names = ("K cache", "V cache", "KV cache")
        into = card.draft_caches if draft else card.caches
        for name, number in zip(names, numbers, strict=True):
            figure = None if number is None else gibibytes(number, f"draft {name}" if draft else name)
            if figure is not None and len(into) < _MOST:
                into.append(figure)
        if kind is not None and not draft:
            self._facts["cache_type"] = kind
        if not draft and int(tokens) > 0:
            # Of two caches the one without a sliding window is the longer.
            card.tokens = max(int(tokens), card.tokens or 0)

    def _late(self, rank: Rank, match: re.Match[str]) -> None:
        """Sizes that were settled after the graphs: they replace what was planned."""
        draft, kind, tokens, number = match.groups()
        card = self._card(rank)
        figure = gibibytes(number, "draft KV cache" if draft else "KV cache")
        if figure is None:
            return
        self._eras.add("2026")
        if draft:
            card.draft_caches = [figure]
            return
        card.caches, card.tokens = [figure], int(tokens)
        self._facts["cache_type"] = kind

    def _states(self, line: Line, rank: Rank, pattern: re.Pattern[str], text: str) -> None:
        self._advance("kv", line)
        card = self._card(rank)
        for match in pattern.finditer(text):
            figure = gibibytes(match[2], match[1])
            if figure is not None and figure.bytes and len(card.states) < _MOST:
                card.states.append(figure)

    def _capture(self, line: Line, rank: Rank) -> None:
        match = lines.CAPTURE.search(line.text)
        if match is None:
            if "Capture cuda graph failed" in line.text or "Capturing batches" in line.text:
                self._advance("graph-capture", line)
            return
        self._advance("graph-capture", line)
        if match["kind"] is not None and match["kind"].lower() != "cpu":
            self._ranks.are(match["kind"])
        name = match["name"].strip()
        card = self._card(rank)
        if name.startswith("target"):
            self._eras.add("2026")
        if match["what"] == "begin":
            if not name:
                self._free(card, "capture", line.text)
            return
        self._graphs_done = True
        draft = "draft" in match[0]
        usage = lines.USAGE.search(line.text)
        detail = " ".join(part for part in (name if not draft else name or "draft", "CUDA graphs") if part)
        figure = None if usage is None else gibibytes(usage[1], detail)
        if figure is None and usage is None and not draft and "capture" in card.free:
            after = lines.AVAILABLE.search(line.text)
            left = None if after is None else gibibytes(after[1], "")
            figure = None if left is None else difference(card.free["capture"], left, "CUDA graphs, by what was free")
        into = card.drafts if draft else card.graphs
        if figure is not None and len(into) < _MOST:
            into.append(figure)

    # ------------------------------------------------------------ failures

    def _profiled(self, line: Line, rank: Rank, tokens: int) -> None:
        self._facts["profiled_tokens"] = tokens
        if tokens > 0:
            return
        note = (
            f"the room for the cache that was computed is {tokens:,} tokens: the weights leave nothing of the engine's"
            " share of the card"
        )
        found = self._failure_of("kv_planning", line.text, phase="kv", note=note)
        self._fail(msgspec.structs.replace(found, bucket="kv"), rank)

    def _reasons(self, line: Line, rank: Rank) -> None:
        if not any(phrase in line.text for phrase in lines.RECOVERED):
            super()._reasons(line, rank)

    def _labelled_failure(self) -> Failure | None:
        failure = super()._labelled_failure()
        if failure is None or failure.kind != "kv_planning" or failure.free is not None or failure.phase != "kv":
            return failure
        card = None if self._failed_rank is None else self._cards.get(self._failed_rank)
        left = None if card is None else card.free.get("loaded")
        return failure if left is None else msgspec.structs.replace(failure, free=left.bytes)

    @property
    def _cached(self) -> bool:
        return self._pools_done

    @property
    def _captured(self) -> bool:
        return self._graphs_done

    # ------------------------------------------------------------ result

    @property
    def _era(self) -> str:
        return max(self._eras, default="")

    def _entries(self) -> tuple[Entry, ...]:
        found: list[Entry] = []
        for rank in sorted(self._cards, key=self._ranks.index):
            card = self._cards[rank]
            found.extend(self._entry(bucket, rank, figure) for bucket, figure in _of_card(card))
            on_host = (self._entry("kv", MAIN, figure) for figure in card.host)
            found.extend(msgspec.structs.replace(entry, device="host") for entry in on_host)
        return tuple(found)

    def _evidence(self, entries: tuple[Entry, ...]) -> Literal["complete", "partial", "none"]:
        if not entries:
            return "none"
        eager = bool(self._facts.get("eager"))
        whole = {
            self._ranks.index(rank)
            for rank, card in self._cards.items()
            if card.loaded() is not None and card.held() and (card.graphs or eager)
        }
        return "complete" if self._ready and self._failure is None and len(whole) >= self._ranks.world else "partial"

    def _gaps(self, entries: tuple[Entry, ...], evidence: str) -> list[str]:
        if evidence == "none":
            return [NO_EVIDENCE] if self._failure is None else []
        loaded = {self._ranks.index(rank) for rank, card in self._cards.items() if card.loaded() is not None}
        if self._ready and 0 < len(loaded) < self._ranks.world:
            return [f"figures of {len(loaded)} of {self._ranks.world} cards are in this log"]
        return []

    def _all_facts(self) -> dict[str, Any]:
        facts = super()._all_facts()
        tokens = [card.tokens for card in self._cards.values() if card.tokens]
        if self._total_tokens is not None:
            facts["kv_tokens"] = self._total_tokens
        elif tokens:
            facts["kv_tokens"] = min(tokens)
        return facts


def _of_card(card: _Card) -> list[tuple[Bucket, Figure]]:
    """The buffers of one card, each once."""
    found: list[tuple[Bucket, Figure]] = []
    if card.base is not None:
        found.append(("context", card.base))
    if (weights := card.loaded()) is not None:
        found.append(("weights", weights))
    found.extend(("kv", figure) for figure in card.held())
    if card.unified is None:
        found.extend(("recurrent", figure) for figure in card.states)
    found.extend(("compute", figure) for figure in card.graphs)
    found.extend(("draft", figure) for figure in (*card.drafts, *card.draft_caches))
    return [(bucket, figure) for bucket, figure in found if figure.bytes or bucket == "weights"]
