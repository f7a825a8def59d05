"""The grammar of llama.cpp and its forks, from mid-2023 on: llama-server, ik_llama.cpp, koboldcpp, and what wraps them.

Buffer lines are printed by the library at verbosity 4 (``-lv 4``) since 2026, and always before. The trial loads of
``--fit``, and the estimate of a draft model, allocate nothing: they are recognised (by the lines around them and by
``no_alloc``) and not counted. The table at the end of a run counts only where no line of a buffer was printed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

from pytest_vram.bootlog import host_killer
from pytest_vram.bootlog.boot import Boot, Failure, Phase, PhaseSpan
from pytest_vram.bootlog.devices import HOST, Labels
from pytest_vram.bootlog.grammar import with_ends
from pytest_vram.bootlog.lines import split
from pytest_vram.bootlog.llama_lines import NOISE, REPEATED, WORDS
from pytest_vram.bootlog.llama_loads import of_table
from pytest_vram.bootlog.llama_process import Process
from pytest_vram.bootlog.numbering import numbered
from pytest_vram.ledger import Entry
from pytest_vram.units import mib

NO_EVIDENCE = (
    "no buffer sizes are in this log: start llama-server with `-lv 4` (or LLAMA_ARG_LOG_VERBOSITY=4), which prints them"
)
#: Processes of one log (the children of a router) that are kept apart.
_MOST_PROCESSES = 64


class LlamaCpp:
    """Reads one log of llama.cpp, line by line; of a router's children, that which began to load last counts."""

    words: re.Pattern[str] | None = WORDS
    noise: re.Pattern[str] | None = REPEATED

    def __init__(self, engine: str, patterns: Mapping[str, str]) -> None:
        self._line = 0
        self._processes: dict[str | None, Process] = {}
        self._current: str | None = None

    def skip(self, lines: int) -> None:
        """Count lines that were left out."""
        self._line += lines

    def feed(self, raw: str) -> Phase | None:
        """Take the next line; the phase that it begins, or ``None``."""
        self._line += 1
        if WORDS.search(raw) is None or (" D " in raw and NOISE.match(raw)):
            return None
        line = split(raw)
        if line.process == "kernel":
            kill = host_killer.read_kill(line.text)
            if kill is not None:
                self._process(self._current).kill(kill, self._line)
            return None
        process = self._process(line.process)
        if process.said_again(line):
            return None
        loads = process.loads
        phase = process.take(line, self._line)
        if process.loads is not loads or self._current not in self._processes:
            self._current = line.process
        return phase if self._current == line.process else None

    def _process(self, name: str | None) -> Process:
        process = self._processes.get(name)
        if process is None:
            if len(self._processes) >= _MOST_PROCESSES:
                del self._processes[next(key for key in self._processes if key != self._current)]
            process = self._processes[name] = Process()
        return process

    def boot(self) -> Boot:
        """What the lines so far said."""
        process = self._processes.get(self._current)
        if process is None:
            return _boot(Process())
        if not process.loads:
            # nothing was loaded: whoever failed, else whoever spoke first
            process = next((other for other in self._processes.values() if other.story.is_known), process)
        loaded = [other for other in self._processes.values() if other.loads]
        warnings = (
            f"{len(loaded)} processes loaded a model, the children of a router: this is the one that began last",
        )
        return _boot(process, warnings if len(loaded) > 1 else ())


def _boot(process: Process, notes: tuple[str, ...] = ()) -> Boot:
    labels = process.labels.copy()
    entries = _entries(process, labels)
    failure = process.story.failure(labels, process.sizes.free(labels), process.sizes.total(labels), _sums(entries))
    facts = _facts(process, labels, entries)
    evidence = _evidence(process, entries, facts, failure)
    used = {entry.device for entry in entries} | {failure.device if failure is not None else None}
    found = Boot(
        engine=process.engine or "llama-server",
        era=process.era,
        evidence=evidence,
        phases=with_ends(process.spans),
        entries=entries,
        devices={label: name for label, name in labels.names.items() if label != HOST or HOST in used},
        facts=facts,
        failure=failure,
        warnings=(*notes, *process.warnings, *_warnings(process, labels, entries, facts, evidence, failure)),
        ready=process.ready,
        clock=process.axis.clock,
    )
    return numbered(found)


def _sums(entries: tuple[Entry, ...]) -> dict[str, int]:
    sums: dict[str, int] = {}
    for entry in entries:
        sums[entry.device] = sums.get(entry.device, 0) + entry.bytes
    return sums


def _entries(process: Process, labels: Labels) -> tuple[Entry, ...]:
    entries = tuple(entry for load in process.loads for entry in load.entries(labels))
    if any(load.buffers for load in process.loads) or not process.table_counts:
        return entries
    return of_table(process.table)


def _evidence(
    process: Process, entries: tuple[Entry, ...], facts: dict[str, Any], failure: Failure | None
) -> Literal["complete", "partial", "none"]:
    if not entries:
        return "partial" if facts.keys() & {"kv_bytes", "recurrent_bytes"} else "none"
    printed = any(load.buffers for load in process.loads) or not process.table_counts
    whole = printed and process.ready and all(load.is_whole for load in process.loads)
    return "complete" if whole and failure is None else "partial"


# ---------------------------------------------------------------- facts


def _facts(process: Process, labels: Labels, entries: tuple[Entry, ...]) -> dict[str, Any]:
    target = process.target
    facts: dict[str, Any] = dict(process.pending) if target is None else dict(target.facts)
    facts.update(process.server_facts)
    if target is not None:
        if target.path is not None:
            facts["model_path"] = target.path
        for fact, kind in (("kv_bytes", "KV"), ("recurrent_bytes", "RS")):
            size = target.cache_bytes(kind)
            if size is not None:
                facts[fact] = size
        weights = [entry for entry in entries if entry.bucket == "weights"]
        repeating = facts.pop("layers_repeating", None)
        if weights and "layers_offloaded" in facts:
            on_device = any(entry.device != HOST for entry in weights)
            real = _layers_on_device(facts, repeating) if on_device else 0
            if real or not on_device:  # where only the output layer is there, nothing is said: 0 is for no buffer
                facts["layers_on_device_real"] = real
        draft = next((size for load in process.loads if (size := load.cache_bytes("KV", draft=True)) is not None), None)
        if draft is not None:
            facts["draft_kv_bytes"] = draft
    for name, fact in (("non-SWA", "kv_cells"), ("main", "kv_cells"), ("SWA", "kv_cells_sliding")):
        if name in process.creating:
            facts.setdefault(fact, process.creating[name])
    _add_devices(facts, process, labels)
    _add_times(facts, with_ends(process.spans), process)
    if any(load.draft or load.draft_context for load in process.loads):
        facts["draft"] = True
    return facts


def _layers_on_device(facts: Mapping[str, Any], repeating: int | None) -> int:
    """The model's own layers that were offloaded: the engine counts the output layer, and once the cache's halves."""
    offloaded: int = facts["layers_offloaded"]
    offloadable: int = facts["layers_offloadable"]
    own: int = facts.get("layers", offloadable - 1)
    if repeating is None:
        return max(0, min(own, offloaded))
    # builds of 2026 count one too few of the repeating layers where all of them are offloaded
    all_but_one = offloaded >= offloadable == repeating + 2
    return min(own, repeating + all_but_one)


def _add_devices(facts: dict[str, Any], process: Process, labels: Labels) -> None:
    rows = process.table.rows if process.table_counts else []
    figures = {
        "free_bytes": process.sizes.free(labels),
        "total_bytes": process.sizes.total(labels) | {row.label: row.total for row in rows if row.total is not None},
        # used by the driver, its pools, other processes and drafts, by the table of the engine's end: no buffer
        "unaccounted_bytes": {row.label: row.unaccounted for row in rows if row.unaccounted is not None},
    }
    facts.update({name: figure for name, figure in figures.items() if figure})


def _add_times(facts: dict[str, Any], spans: tuple[PhaseSpan, ...], process: Process) -> None:
    for phase in spans:
        if phase.name == "weights" and phase.start is not None and phase.end is not None:
            facts.setdefault("load_seconds", round(phase.end - phase.start, 6))
    ready = next((span for span in spans if span.name == "ready"), None)
    if ready is None or ready.start is None:
        return
    begun = 0.0 if process.axis.clock == "start" else spans[0].start
    if begun is not None:
        facts["boot_seconds"] = round(ready.start - begun, 6)


# ---------------------------------------------------------------- warnings


def _warnings(
    process: Process,
    labels: Labels,
    entries: tuple[Entry, ...],
    facts: dict[str, Any],
    evidence: str,
    failure: Failure | None,
) -> list[str]:
    warnings = []
    if evidence == "none" and failure is None:
        warnings.append(NO_EVIDENCE)
    warnings.extend(_of_offloading(entries, facts, evidence))
    warnings.extend(
        f"{labels.names[label]} lies on several devices, and the log does not say how much on which one"
        for label in sorted({entry.device for entry in entries})
        if labels.split_over_devices(label)
    )
    target = process.target
    for kind, what in (("KV", "KV cache"), ("RS", "recurrent state")):
        missing = None if target is None else target.missing_cache(kind)
        if missing is not None:
            whole, given = missing
            where = (
                f"but the buffers that it lists sum up to {mib(given)}" if given else "which does not say where it lies"
            )
            warnings.append(f"the {what} has {mib(whole)} by the log, {where}")
    return warnings


def _of_offloading(entries: tuple[Entry, ...], facts: dict[str, Any], evidence: str) -> list[str]:
    """Layers that were said to be on a device, while their weights are not."""
    offloaded, offloadable = facts.get("layers_offloaded", 0), facts.get("layers_offloadable", 0)
    if not offloaded or evidence == "none":
        return []
    if facts.get("layers_on_device_real") == 0:
        return [
            f"{offloaded}/{offloadable} layers were said to be on the GPU,"
            " but no buffer of the model is on a device: everything runs on the CPU"
        ]
    weights = [entry for entry in entries if entry.bucket == "weights"]
    on_host = [entry for entry in weights if entry.device == HOST]
    total, host = sum(entry.bytes for entry in weights), sum(entry.bytes for entry in on_host)
    if offloaded < offloadable or 2 * host <= total:
        return []
    names = ", ".join(sorted({entry.detail.removesuffix(" model buffer") for entry in on_host}))
    return [
        f"{offloaded}/{offloadable} layers were said to be on the GPU, while {mib(host)} of {mib(total)} of weights are"
        f" in host memory ({names}): --n-cpu-moe, --cpu-moe or --override-tensor keep them there, or the model's own"
        " embeddings for each layer do"
    ]
