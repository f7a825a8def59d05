"""Loads of models in one llama.cpp process: which buffer belongs to which load and context, and what counts.

The last real load of the target model counts. A draft model's buffers, and those of a second context of the same model
(multi-token prediction), add to it in the bucket ``draft``. A compute or output buffer that is allocated anew replaces
the earlier one of the same context; caches and weights of one name are genuine second buffers, and add up.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from pytest_vram.bootlog.devices import HOST, Labels
from pytest_vram.bootlog.llama_breakdown import MIB, Breakdown
from pytest_vram.bootlog.llama_eras import Sums
from pytest_vram.bootlog.llama_lines import mebi
from pytest_vram.ledger import Bucket, Entry

BUFFER = re.compile(
    r"(?:^|[:\s])(?P<device>[^\s:]\S{0,200})\s+"
    r"(?P<kind>model|KV|RS|compute|output|input|LoRA|DSV4 [\w -]{1,30}? state)\s+"
    r"buffer size\s*=\s*(?P<number>\d{1,12}(?:\.\d{1,4})?) (?P<unit>[KMG]i?B)",
    re.ASCII,
)
#: Weights before the end of 2024, and in ik_llama.cpp: ``llm_load_tensors:      CUDA0 buffer size =  5434.38 MiB``.
OLD_WEIGHTS = re.compile(
    r"(?:^|:)\s+(?P<device>[A-Z][\w.\[\]:-]{0,200})\s+buffer size\s*="
    r"\s*(?P<number>\d{1,12}(?:\.\d{1,4})?) (?P<unit>[KMG]i?B)",
    re.ASCII,
)
#: ik_llama.cpp with its own ways of splitting: which device has how much of a buffer that is called CUDA_Split.
PER_DEVICE = re.compile(r"^\s+Device (?P<device>\d{1,3}):\s+(?P<number>\d{1,12}(?:\.\d{1,6})?) (?P<unit>MiB)", re.ASCII)
#: Totals of a cache over all devices: ``size = 102.00 MiB (  8192 cells``, ``KV self size  = 5120.00 MiB``.
CACHE = re.compile(r"\bsize =\s*(?P<number>\d{1,12}(?:\.\d{1,4})?) (?P<unit>MiB) \(\s*\d{1,18} cells", re.ASCII)
OLD_CACHE = re.compile(
    r"\bKV self (?:indexer )?size\s*=\s*(?P<number>\d{1,12}(?:\.\d{1,4})?) (?P<unit>[KMG]iB)", re.ASCII
)
_BUCKETS: dict[str, Bucket] = {
    "model": "weights",
    "KV": "kv",
    "RS": "recurrent",
    "compute": "compute",
    "output": "compute",
    "input": "compute",
    "LoRA": "lora",
}
#: Kinds that are allocated anew in place of the one before.
_ANEW = ("compute", "output", "input")
_MOST_BUFFERS = 4096  # of one load: a machine has fewer devices, and a context fewer caches


class Buffer(NamedTuple):
    """One printed buffer. ``context``: number of the context that it was made for, 0 for the model itself."""

    kind: str
    name: str
    label: str
    bytes: int
    resolution: int
    context: int
    draft: bool


class Load:
    """One real load of one model, with the contexts made for it."""

    def __init__(self, *, draft: bool, path: str | None, facts: dict[str, Any], device_of_sums: str = "VRAM") -> None:
        self.draft = draft
        self.path = path
        self.facts = facts
        self.sums = Sums(device_of_sums)
        self.context = 0
        self.draft_context = False
        self.to_be_freed = False  # the contexts so far, when another one is made
        self.buffers: list[Buffer] = []
        self.projector: list[Buffer] = []
        self.caches: list[tuple[bool, str, int, int]] = []  # draft?, KV or RS, bytes, resolution
        self.shares: dict[str, list[tuple[int, int, int]]] = {}  # kind → device number, bytes, resolution

    def start_context(self, *, draft: bool) -> None:
        """Begin a context. One that was begun and has no buffers yet is the same one, said in another line."""
        if self.to_be_freed:
            self.buffers = [buffer for buffer in self.buffers if buffer.context == 0]
            self.caches = []
            self.to_be_freed = False
        if self.context == 0 or any(buffer.context == self.context for buffer in self.buffers):
            self.context += 1
        # A second context of a model that was not loaded again is a draft's (multi-token prediction).
        self.draft_context = self.draft or draft or self.context > 1

    @property
    def context_is_whole(self) -> bool:
        """Whether the present context has its compute buffers: what follows is another one."""
        return any(buffer.context == self.context and buffer.kind == "compute" for buffer in self.buffers)

    @property
    def cache_is_whole(self) -> bool:
        """Whether the present context's cache was summed up, so that the next allocation is another one's."""
        return any(draft == self.draft_context for draft, *_ in self.caches)

    def add(self, buffer: Buffer) -> None:
        """Add a buffer."""
        if buffer.kind in _ANEW:
            same = (buffer.kind, buffer.name, buffer.context)
            self.buffers = [old for old in self.buffers if (old.kind, old.name, old.context) != same]
        if len(self.buffers) < _MOST_BUFFERS:
            self.buffers.append(buffer)

    def has(self, *kinds: str) -> bool:
        """Whether a buffer of one of these kinds was printed."""
        return any(buffer.kind in kinds for buffer in self.buffers)

    # ------------------------------------------------------------ what it says

    def entries(self, labels: Labels) -> list[Entry]:
        """The buffers, or what the sums of 2023 say in their place."""
        if not self.buffers:
            return [
                Entry(
                    bucket="draft" if self.draft else part.bucket,
                    device=labels.of("CPU" if part.device == HOST else part.device),
                    bytes=part.figure.bytes,
                    source="engine-log",
                    detail=part.detail,
                    resolution=part.figure.resolution,
                )
                for part in self.sums.parts()
            ]
        entries = []
        for buffer in self.buffers:
            bucket: Bucket = _BUCKETS.get(buffer.kind, "kv")
            bucket = "draft" if self.draft or buffer.draft else bucket
            entries.extend(self._split(bucket, buffer, labels))
        entries.extend(_entry("projector", buffer, f"{buffer.name} {buffer.kind}") for buffer in self.projector)
        return entries

    def _split(self, bucket: Bucket, buffer: Buffer, labels: Labels) -> list[Entry]:
        detail = f"{buffer.name} {buffer.kind} buffer"
        shares = self.shares.get(buffer.kind)
        if not shares or not labels.split_over_devices(buffer.label):
            return [_entry(bucket, buffer, detail)]
        family = buffer.name.partition("_")[0].rstrip("0123456789")
        return [
            Entry(
                bucket=bucket,
                device=labels.of(f"{family}{number}"),
                bytes=size,
                source="engine-log",
                detail=f"{detail}, share of device {number}",
                resolution=resolution,
            )
            for number, size, resolution in shares
        ]

    def cache_bytes(self, kind: str, *, draft: bool = False) -> int | None:
        """The whole KV cache (``KV``) or recurrent state (``RS``), over all devices; ``None`` where not printed."""
        sizes = [size for is_draft, which, size, _ in self.caches if which == kind and is_draft == draft]
        if sizes:
            return sum(sizes)
        if kind == "KV" and not draft and self.sums.cache is not None:
            return self.sums.cache.bytes
        return None

    def missing_cache(self, kind: str) -> tuple[int, int] | None:
        """(the whole cache, the part of it whose buffers were printed) where they differ by more than rounding."""
        whole = self.cache_bytes(kind)
        printed = [buffer for buffer in self.buffers if buffer.kind == kind and not buffer.draft]
        if whole is None or not self.caches or (not self.buffers and self.sums.parts()):
            return None
        given = sum(buffer.bytes for buffer in printed)
        slack = sum(buffer.resolution for buffer in printed) + sum(entry[3] for entry in self.caches) + 1
        # buffers are padded, by far less than a part of a percent
        return None if abs(whole - given) <= slack + whole // 500 else (whole, given)

    @property
    def is_whole(self) -> bool:
        """Whether the log printed everything that this load takes."""
        if not self.buffers:
            return self.sums.complete
        return self.has("model") and self.has("compute") and not (self.missing_cache("KV") or self.missing_cache("RS"))


def _entry(bucket: Bucket, buffer: Buffer, detail: str) -> Entry:
    return Entry(
        bucket=bucket,
        device=buffer.label,
        bytes=buffer.bytes,
        source="engine-log",
        detail=detail,
        resolution=buffer.resolution,
    )


def of_table(table: Breakdown) -> tuple[Entry, ...]:
    """The table of the engine's end as entries, for a log without lines of buffers.

    A figure is cut off to MiB: it is known to within one. ``unaccounted`` is no buffer of the engine, and left out.
    """
    entries = []
    columns: tuple[tuple[str, Bucket, str], ...] = (
        ("model", "weights", "model"),
        ("context", "kv", "context (KV cache and recurrent state)"),
        ("compute", "compute", "compute"),
    )
    for row in table.rows:
        for column, bucket, what in columns:
            size: int = getattr(row, column)
            if size:
                detail = f"{row.name} {what}, of the table at the end"
                entries.append(
                    Entry(
                        bucket=bucket,
                        device=row.label,
                        bytes=size,
                        source="engine-log",
                        detail=detail,
                        resolution=MIB,
                    )
                )
    return tuple(entries)


def buffer_of(match: re.Match[str], kind: str, load: Load, labels: Labels) -> Buffer | None:
    """The buffer of a line; ``None`` for a size that is no number of bytes."""
    figure = mebi(match["number"], match["unit"])
    if figure is None:
        return None
    name = match["device"]
    of_model = kind in ("model", "LoRA")
    return Buffer(
        kind,
        name,
        labels.of(name),
        *figure,
        context=0 if of_model else load.context,
        draft=load.draft if of_model else load.draft_context,
    )
