"""What a log of llama.cpp says about the device on which memory ran out, and what follows for a change.

A saving is called enough only where it is known by what was printed, what was free is the smallest figure that the log
names, and :data:`MARGIN` is left for what a boot takes after its last buffer.
"""

from __future__ import annotations

import re
from typing import Any

from pytest_vram.advice.records import Advice, Saving
from pytest_vram.advice.words import KOBOLD_TYPES, Word, words
from pytest_vram.bootlog.boot import Boot, Failure
from pytest_vram.units import MIB

#: Libraries and pools take this at most where a graph runs for the first time, which nothing prints.
MARGIN = 64 * MIB
#: A refusal with so many times as much free as was asked for is no shortage.
_FAR = 2
#: In the order of what they cost the user; see :mod:`pytest_vram.advice.knobs`.
COST = (
    "flash",
    "attention",
    "ubatch",
    "parallel",
    "pipeline",
    "model",
    "cache",
    "context",
    "experts",
    "split",
    "layers",
    "projector",
    "draft",
)
ABOUT: dict[str, tuple[str, ...]] = {
    "flash": ("compute",),
    "attention": ("compute",),
    "ubatch": ("compute",),
    "parallel": ("kv", "recurrent"),
    "pipeline": ("compute",),
    "model": ("weights", "experts"),
    "cache": ("kv",),
    "context": ("kv",),
    "experts": ("weights", "experts"),
    "projector": ("projector",),
    "draft": ("draft",),
}
_COSTS = {
    "flash": "nothing where the device has kernels for it",
    "attention": "long prompts are read a little more slowly",
    "ubatch": "prompts are read more slowly; answers are written as fast as before",
    "parallel": "requests wait for each other; nothing for one user at a time",
    "pipeline": "long prompts are read more slowly, because the cards no longer work on several batches at once",
    "split": "the other cards hold more",
    "model": "a little accuracy, and another file of the same model",
    "cache": "hardly any accuracy with q8_0; it needs flash attention",
    "context": "shorter conversations and documents",
    "experts": "answers are written more slowly, the more experts are on the CPU",
    "layers": "every layer on the CPU makes prompts and answers slower",
    "projector": "images and sound are encoded on the CPU, which takes seconds each",
    "draft": "answers are written one token at a time",
}
_PROOFS = {
    "flash": "`flash_attn = enabled`",
    "attention": "a smaller `compute buffer size`",
    "ubatch": "`n_ubatch = {}`",
    "parallel": "`n_seq_max = {}`",
    "pipeline": "no `pipeline parallelism enabled` line",
    "split": "a smaller `model buffer size` of the device, and larger ones of the others",
    "model": "`file type` and a smaller `model buffer size`",
    "cache": "`K ({})` in the line of the KV cache's size",
    "context": "`n_ctx = {}` and a smaller `KV buffer size`",
    "experts": "a smaller `model buffer size` of the device; the line `offloaded N/N layers` stays as it is",
    "layers": "`offloaded {}/` in the line about layers",
    "projector": "`CLIP using CPU backend`",
    "draft": "one `constructing llama_context` line, and no second one",
}
#: Setting → build of llama.cpp, and of koboldcpp, that has it first.
_SINCE = {
    "flash": (2781, (1, 64)),
    "ubatch": (2405, (0,)),
    "cache": (1614, (1, 67)),
    "experts": (6083, (1, 97)),
    "pipeline": (4935, (0,)),
    "draft": (1500, (0,)),
}
_LONG_AGO = ("flash", "ubatch", "cache", "experts", "pipeline", "draft")


class Log:
    """One refused allocation, with everything that the log says of the device.

    :ivar held: bucket → bytes of each buffer on the device, the one that was refused among them.
    :ivar sure: whether the log says beyond doubt which buffer it was. :ivar last: whether nothing that is known of
        would be allocated after it. :ivar single: whether it is one buffer that is too large, whatever is free.
    """

    def __init__(self, boot: Boot, failure: Failure) -> None:
        self.boot, self.failure = boot, failure
        self.facts = boot.facts
        self.cards = [label for label in boot.devices if label != "host"]
        self.words = _known(boot)
        self.device = failure.device or (self.cards[0] if len(self.cards) == 1 else None)
        held: dict[str, list[int]] = {}
        for entry in boot.entries:
            # Where the log does not say which of several cards it was, all of them together have to do.
            if entry.device == self.device or (self.device is None and entry.device in self.cards):
                held.setdefault(entry.bucket, []).append(entry.bytes)
        self.allocated = sum(map(sum, held.values()))
        if failure.bytes is not None and failure.bucket is not None:
            held.setdefault(failure.bucket, []).append(failure.bytes)
        self.held = held
        self.sure = failure.certainty == "certain"
        later = "draft" in held or any(name.startswith(("draft", "mmproj", "projector")) for name in boot.facts)
        done = {entry.device for entry in boot.entries if entry.bucket == "compute"}
        others = [label for label in self.cards if label != self.device and label not in done]
        self.last = failure.bucket == "compute" and self.sure and not later and not others
        self.free = self._free()
        #: Settings whose least saving is known by what was printed.
        self.proven: set[str] = set()
        size, free = failure.bytes, failure.free
        left = None if free is None else free - self.allocated
        far = size is not None and left is not None and left >= _FAR * size
        self.single = far or "limits the size of one buffer" in (failure.note or "")

    def _free(self) -> int | None:
        """The smallest figure of what was free on the device before the load."""
        found = [self.failure.free, _of_label(self.facts.get("free_bytes"), self.device)]
        listed = self.facts.get("devices_free_bytes")
        if len(self.cards) == 1:
            found.append(self.fact("fit_free_bytes"))
            if isinstance(listed, list | tuple) and len(listed) == 1:
                found.append(listed[0])
        return min((one for one in found if isinstance(one, int)), default=None)

    def fact(self, name: str) -> int | None:
        """A whole number that the log printed."""
        value: Any = self.facts.get(name)
        return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None

    def sum(self, *buckets: str) -> int:
        """Bytes of these buckets on the device."""
        return sum(sum(self.held.get(name, [])) for name in buckets)

    def missing(self) -> int | None:
        """Bytes that this allocation was short of; ``None`` where the log does not say what was free."""
        if self.failure.bytes is None or self.free is None:
            return None
        short = self.failure.bytes - (self.free - self.allocated)
        # Something else took memory meanwhile, or it was in pieces: the whole request is what was not there.
        return short if 0 < short <= self.failure.bytes else None

    def most_missing(self) -> int | None:
        """Bytes that this allocation was short of at most."""
        short = self.missing()
        return self.failure.bytes if short is None else short

    @property
    def sliding(self) -> bool:
        """Whether a cache keeps windows, as far as the log says."""
        return self.fact("sliding_window") is not None or self.fact("kv_cells_sliding") is not None

    @property
    def alike(self) -> bool:
        """Whether every layer is known to be as large as the others, with a cache of the same length.

        Windows, recurrent states, experts (whose first layers may be dense) and layers without a cache say that they
        are not; the number of layers with a cache, or the model's description, that they are.
        """
        if self.sliding or self.fact("experts") is not None or "experts" in self.held:
            return False
        if "recurrent" in self.held or self.fact("recurrent_bytes") is not None or len(self.held.get("kv", [])) > 1:
            return False
        layers, cached = self.layers, self.fact("kv_layers")
        if cached is not None:
            return cached == layers
        return self.fact("layers") is not None

    @property
    def layers(self) -> int | None:
        """Layers of the model; one more can be offloaded."""
        offloadable = self.fact("layers_offloadable")
        return offloadable - 1 if offloadable is not None else self.fact("layers")

    @property
    def per_request(self) -> int | None:
        """Requests that each have the context that the engine is told: Ollama's is that of one of them."""
        return (self.fact("slots") or None) if self.boot.engine == "ollama" else 1

    def enough(self, low: int, high: int, *, proven: bool) -> bool | None:
        """Whether a saving makes the boot succeed.

        :param proven: whether it saves ``low`` by what was printed alone, whatever the model is.
        """
        missing, most = self.missing(), self.most_missing()
        if missing is not None and missing + MARGIN <= low and self.last and proven and not self.single:
            return True  # else what comes after it may be refused as well
        return False if missing is not None and most is not None and high < most and not self.single else None

    def advice(
        self,
        name: str,
        before: object,
        after: object,
        why: str,
        low: int | None = None,
        high: int | None = None,
        *,
        proven: bool = False,
        besides: int = 0,
        bucket: str | None = None,
        flag: str | None = None,
    ) -> Advice:
        """A change; without a figure it is a rule.

        :param proven: see :meth:`enough`. :param besides: bytes by which other buffers may shrink at most as well.
        """
        word = self.words[name]
        if proven:
            self.proven.add(word.setting)
        saves = None if low is None or high is None else Saving(bytes=low, at_most=high if high != low else None)
        return Advice(
            setting=word.setting,
            before=str(before),
            after=str(after),
            effect="saves",
            why=why,
            device=self.device,
            bucket=bucket or next(iter(ABOUT.get(name, ("weights",)))),
            saves_bytes=saves,
            enough=None if saves is None else self.enough(saves.bytes, saves.upper + besides, proven=proven),
            source="rule" if saves is None else "engine-log",
            cost=_COSTS[name],
            flag=(word.flag if flag is None else flag).format(self._shown(after)),
            proof=_PROOFS[name].format(self._shown(after)),
        )

    def _shown(self, after: object) -> object:
        if self.boot.engine == "koboldcpp" and str(after) in KOBOLD_TYPES:
            return KOBOLD_TYPES[str(after)]
        return "N" if " " in str(after) or after in ("fewer", "smaller") else after

    def nothing(self, name: str, before: object, after: object, why: str) -> Advice:
        """A change that does nothing here."""
        return Advice(
            setting=self.words[name].setting,
            before=str(before),
            after=str(after),
            effect="nothing",
            why=why,
            device=self.device,
            enough=False,
            source="engine-log",
            flag=self.words[name].flag.format(self._shown(after)),
        )


def _of_label(table: Any, label: str | None) -> Any:
    return table.get(label) if isinstance(table, dict) else None


def _known(boot: Boot) -> dict[str, Word]:
    """The settings that this build of the engine has."""
    found = words(boot.engine)
    build = str(boot.facts.get("build", ""))
    if boot.engine == "koboldcpp":
        digits = re.match(r"v?(\d{1,4})\.(\d{1,4})", build, re.ASCII)
        version = None if digits is None else (int(digits[1]), int(digits[2]))
        late = [name for name, (_, first) in _SINCE.items() if version is not None and version < first]
    elif boot.engine in ("llama-server", "llama.cpp"):
        number = re.match(r"b?(\d{3,6})\b", build, re.ASCII)
        late = [name for name, (first, _) in _SINCE.items() if number is not None and int(number[1]) < first]
    else:
        late = []
    if boot.era.startswith(("2022", "2023")) and not late:
        late = list(_LONG_AGO)
    return {name: word for name, word in found.items() if name not in late}
