"""llama.cpp before 2024, which printed sums in place of buffers, and by what the eras are told apart.

All figures are in units of 2**20 bytes, also where they are called MB. Sources: ``llama.cpp`` of the time
(``llama_model_load_internal`` of June to August 2023, ``llm_load_tensors``, ``llama_new_context_with_model`` and
``llama_kv_cache_init`` of August to December 2023).

- to August: ``total VRAM used: 5869 MB`` is weights + scratch + the offloaded halves of the cache, rounded up.
- August and September: ``VRAM used: 5869 MB`` is weights + the offloaded halves of the cache, rounded up.
- from October: ``VRAM used: 3820.93 MB`` is the weights alone; ``total VRAM used: … (model: …, context: …)`` the sum.
- the cache's V and K half count as two more "layers", to be offloaded after all others; from December on each
  layer's cache is where the layer is.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from pytest_vram.bootlog.devices import HOST
from pytest_vram.bootlog.llama_lines import mebi
from pytest_vram.ledger import Bucket

_MIB = 1 << 20
_SIZE = r"(\d{1,12}(?:\.\d{1,4})?) ([KMG]i?B)"
_RULES: tuple[tuple[str, re.Pattern[str]], ...] = tuple(
    (name, re.compile(pattern, re.ASCII))
    for name, pattern in (
        ("required", r"\b(?:mem required|system memory used) *= +" + _SIZE),
        ("per_state", r"\bmem required [^()]{1,60}\(\+ +" + _SIZE + " per state"),
        ("weights", r"(?<!total )\bVRAM used *[:=] +" + _SIZE),
        ("total", r"\btotal VRAM used: +" + _SIZE),
        ("model", r"\btotal VRAM used: [^()]{1,60}\(model: +" + _SIZE),
        ("context", r"\btotal VRAM used: [^()]{1,60}\(model: [^()]{1,60}, context: +" + _SIZE),
        ("scratch", r"\bVRAM scratch buffer: +" + _SIZE),
        ("scratch", r"= +" + _SIZE + " VRAM for the scratch buffer"),
        ("cache", r"\b[kK][vV] self size *= +" + _SIZE),
        ("cache_vram", r"\bVRAM kv self = +" + _SIZE),
        ("compute", r"\bcompute buffer total size *= +" + _SIZE),
    )
)
_NEEDLES = ("VRAM used", "VRAM scratch", "VRAM for the", "VRAM kv", "mem required", "system memory used")
_MORE_NEEDLES = ("kv self size", "KV self size", "buffer total size", "cache to GPU")
_HALF = re.compile(r"\boffloading ([vk]) cache to GPU", re.ASCII)
_DEVICES = re.compile(r"\bfound (\d{1,3}) (CUDA|ROCm|MUSA) devices", re.ASCII)


class Figure(NamedTuple):
    """Bytes of one printed or derived size, known to ± ``resolution``; ``whole``: printed without decimals."""

    bytes: int
    resolution: int
    whole: bool = False


class Part(NamedTuple):
    """What the sums say of one bucket on one device (the engine's own name, or ``host``)."""

    bucket: Bucket
    device: str
    figure: Figure
    detail: str


class Sums:
    """The sums of one load."""

    def __init__(self, device: str = "VRAM") -> None:
        self._found: dict[str, Figure] = {}
        self._halves: set[str] = set()
        self._of_old_loader = False
        self._device = device

    def read(self, text: str) -> None:
        """Take a line."""
        if match := _HALF.search(text):
            self._halves.add(match[1])
        if "load_internal: mem required" in text:
            self._of_old_loader = True
        for name, pattern in _RULES:
            found = pattern.search(text)
            size = None if found is None else mebi(found[1], found[2])
            if found is not None and size is not None:
                whole = "." not in found[1]
                # whole figures are rounded up, others to the nearest
                self._found[name] = Figure(size[0], _MIB if whole else size[1], whole)

    @property
    def era(self) -> str | None:
        """``2023-06``, ``2023-09``, ``2023-11``, or ``None`` where no sum of 2023 was printed."""
        total = self._found.get("total")
        if self._of_old_loader or (total is not None and total.whole):
            return "2023-06"
        if "per_state" in self._found:
            return "2023-09"
        return "2023-11" if self._of_2023 else None

    @property
    def cache(self) -> Figure | None:
        """The whole KV cache, whatever it lies on."""
        return self._found.get("cache") or (self._found.get("per_state") if self._of_2023 else None)

    @property
    def complete(self) -> bool:
        """Whether weights, cache and scratch were all said."""
        kinds = {part.bucket for part in self.parts()}
        return {"weights", "kv", "compute"} <= kinds

    @property
    def _of_2023(self) -> bool:
        # "KV self size" alone is printed until 2025, beside the buffers themselves
        return not self._found.keys() <= {"cache"}

    def parts(self) -> list[Part]:
        """The sums taken apart as far as that is certain."""
        if not self._of_2023:
            return []
        parts = [*self._weights(), *self._caches(), *self._compute()]
        return [part for part in parts if part.figure.bytes > 0]

    # ------------------------------------------------------------ weights

    def _weights(self) -> list[Part]:
        parts = []
        required = self._found.get("required")
        if required is not None:
            # until August the sum has the scratch of the host in it, which cannot be told from the weights
            mixed = self._of_old_loader and "compute" not in self._found
            bucket: Bucket = "other" if mixed else "weights"
            what = "weights and scratch" if mixed else "weights"
            parts.append(Part(bucket, HOST, required, f"mem required: {what} on the host"))
        on_device = self._weights_on_device()
        if on_device is not None:
            parts.append(Part("weights", self._device, on_device, "VRAM used by weights"))
        return parts

    def _weights_on_device(self) -> Figure | None:
        found = self._found
        if "model" in found:
            return found["model"]
        if "weights" in found:
            used = found["weights"]
            return _less(used, self._offloaded_as_planned()) if used.whole else used
        total = found.get("total")
        if total is None:
            return None
        return _less(total, found.get("scratch", Figure(0, 0)), self._offloaded_as_planned())

    def _offloaded_as_planned(self) -> Figure:
        """The part of the cache that the sums of the loader count, which goes by the planned size."""
        planned = self._found.get("per_state") or self._found.get("cache")
        return Figure(0, 0) if planned is None else _halves(planned, len(self._halves))

    # ------------------------------------------------------------ cache and compute

    def _caches(self) -> list[Part]:
        whole = self.cache
        on_device = self._found.get("cache_vram")
        context, scratch = self._found.get("context"), self._found.get("scratch")
        if on_device is None and context is not None and scratch is not None:
            on_device = _less(context, scratch)
        if on_device is None and self._halves and whole is not None:
            on_device = _halves(whole, len(self._halves))
        parts = [] if on_device is None else [Part("kv", self._device, on_device, "KV cache on the device")]
        if whole is None or (on_device is None and context is not None):
            return parts  # a context of which nobody said how much is cache
        left = whole if on_device is None else _less(whole, on_device)
        if left.bytes > left.resolution:
            parts.append(Part("kv", HOST, left, "KV cache on the host"))
        return parts

    def _compute(self) -> list[Part]:
        parts = []
        scratch, context = self._found.get("scratch"), self._found.get("context")
        if scratch is not None:
            parts.append(Part("compute", self._device, scratch, "VRAM scratch buffer"))
        elif context is not None:
            known = self._found.get("cache_vram") or (_halves(self.cache, len(self._halves)) if self.cache else None)
            if known is not None:
                rest = _less(context, known)
                parts.append(Part("compute", self._device, rest, "context without the KV cache"))
            else:
                parts.append(Part("other", self._device, context, "context: KV cache and compute buffers together"))
        if "compute" in self._found:
            parts.append(Part("compute", HOST, self._found["compute"], "compute buffer total"))
        return parts


def _halves(cache: Figure, number: int) -> Figure:
    return Figure(cache.bytes * number // 2, cache.resolution if number else 0)


def _less(figure: Figure, *others: Figure) -> Figure:
    rest = figure.bytes - sum(other.bytes for other in others)
    return Figure(max(0, rest), figure.resolution + sum(other.resolution for other in others))


def is_sum(text: str) -> bool:
    """Whether a line may be one of the sums of 2023."""
    return any(needle in text for needle in _NEEDLES) or any(needle in text for needle in _MORE_NEEDLES)


def device_of_sums(text: str) -> str | None:
    """What the sums of 2023 are about, by the line that counts the devices: they are never told apart."""
    match = _DEVICES.search(text) if "evices" in text else None
    if match is None:
        return None
    number = int(match[1])
    return f"{match[2]}0" if number == 1 else f"{match[2]} ({number} devices together)"


#: Phrase → the era that began with it, latest first.
_ERAS: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("2026", re.compile(r"\bn_ctx_seq\b|\bsched_reserve:|\bsched copies\b|\bdirect_io = |\bload_mode = ")),
    ("2025", re.compile(r"\bn_ctx_per_seq\b|\bmodel buffer size\b|\bkv_cache_unified|\bcells,[^()]{1,80}\bseqs\)")),
    (
        "2024",
        re.compile(r"\b(?:KV self|KV buffer|compute buffer|output buffer) size\b|\bllm_load_tensors: +\S+ buffer size"),
    ),
)


def era(text: str) -> str:
    """The era whose phrase this line has, ``""`` where it has none."""
    return next((name for name, pattern in _ERAS if pattern.search(text)), "")
