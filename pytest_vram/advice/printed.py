"""Advice from what llama.cpp (or an engine around it) printed, without the model's files.

What a cache saves follows exactly from its type and length. Weights follow from the bits of a weight, within a range; a
compute buffer follows its ubatch at most, and the least that it saves is not known. Where no figure can be given, the
advice is a rule, and says so by having none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from pytest_vram.advice.records import Advice, Saving
from pytest_vram.advice.words import KOBOLD_TYPES, words
from pytest_vram.bootlog.boot import Boot, Failure
from pytest_vram.sizing import ggml
from pytest_vram.sizing.changes import STEP
from pytest_vram.units import mib

#: Bits of a weight in files that are called by four bits: from a pure ``q4_k`` to mixtures with larger matrices.
FOUR_BITS = (4.5, 5.0)
#: How far blocks of one model may differ in size from their mean, in mixtures of types and with an output matrix.
_UNEVEN = 0.25
_UBATCH = 128
#: A compute buffer of this size is hardly ever one without attention scores.
_SCORES = 2 << 30
_LEAST_CONTEXT = 2048
#: In the order of what they cost the user; see :mod:`pytest_vram.advice.knobs`.
_COST = (
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
    "draft",
)
_ABOUT: dict[str, tuple[str, ...]] = {
    "flash": ("compute", "kv"),
    "attention": ("compute",),
    "ubatch": ("compute",),
    "parallel": ("kv", "recurrent"),
    "pipeline": ("compute",),
    "model": ("weights", "experts"),
    "cache": ("kv",),
    "context": ("kv", "compute"),
    "experts": ("weights", "experts"),
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
    "draft": "one `constructing llama_context` line, and no second one",
}


class _Log:
    """What a log says about the device on which memory ran out."""

    def __init__(self, boot: Boot, failure: Failure) -> None:
        self.boot, self.failure = boot, failure
        self.facts = boot.facts
        self.words = words(boot.engine)
        self.device = failure.device or (next((one for one in boot.devices if one != "host"), None))
        held: dict[str, list[int]] = {}
        for entry in boot.entries:
            if entry.device == self.device:
                held.setdefault(entry.bucket, []).append(entry.bytes)
        self.allocated = sum(map(sum, held.values()))
        if failure.bytes is not None and failure.bucket is not None:
            held.setdefault(failure.bucket, []).append(failure.bytes)
        self.held = held
        self.sure = failure.certainty == "certain"
        #: Whether nothing would be allocated after what was refused.
        self.last = failure.bucket == "compute" and self.sure

    def fact(self, name: str) -> int | None:
        """A whole number that the log printed."""
        value: Any = self.facts.get(name)
        return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None

    def missing(self) -> int | None:
        """Bytes that this allocation was short of; ``None`` where the log does not say what was free."""
        if self.failure.bytes is None or self.failure.free is None:
            return None
        short = self.failure.bytes - (self.failure.free - self.allocated)
        # Something else took memory meanwhile, or it was in pieces: the whole request is what was not there.
        return short if 0 < short <= self.failure.bytes else None

    def most_missing(self) -> int | None:
        """Bytes that this allocation was short of at most."""
        short = self.missing()
        return self.failure.bytes if short is None else short

    def enough(self, low: int, high: int) -> bool | None:
        """Whether a saving makes the boot succeed."""
        most = self.most_missing()
        if most is None:
            return None
        if low >= most:
            return True if self.last else None  # what comes after it may be refused as well
        return False if self.missing() is not None and high < most else None

    def advice(self, name: str, before: object, after: object, why: str, low: int | None, high: int | None) -> Advice:
        """A change; without a figure it is a rule."""
        word = self.words[name]
        saves = None if low is None or high is None else Saving(bytes=low, at_most=high if high != low else None)
        shown = "N" if " " in str(after) or after == "fewer" else after
        if self.boot.engine == "koboldcpp":
            shown = KOBOLD_TYPES.get(str(after), shown)
        return Advice(
            setting=word.setting,
            before=str(before),
            after=str(after),
            effect="saves",
            why=why,
            device=self.device,
            bucket=next(iter(_ABOUT.get(name, ("weights",)))),
            saves_bytes=saves,
            enough=None if saves is None else self.enough(saves.bytes, saves.upper),
            source="rule" if saves is None else "engine-log",
            cost=_COSTS[name],
            flag=word.flag.format(shown),
            proof=_PROOFS[name].format(shown),
        )

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
            flag=self.words[name].flag.format(after),
        )


def of_log(boot: Boot, failure: Failure) -> tuple[Advice, ...]:
    """Advice for an allocation that a device refused, best first."""
    log = _Log(boot, failure)
    if absurd(failure):
        return tuple(_absurd(log))
    if failure.bucket is None or (not boot.entries and not log.sure):
        return tuple(_unsure(log))
    makers: dict[str, Callable[[_Log], Advice | None]] = {
        "flash": _flash,
        "attention": _attention,
        "ubatch": _ubatch,
        "parallel": _parallel,
        "pipeline": _pipeline,
        "model": _model,
        "cache": _cache,
        "context": _context,
        "experts": _experts,
        "split": _split,
        "layers": _layers,
        "draft": _draft,
    }
    rows = {name: found for name, made in makers.items() if name in log.words and (found := made(log)) is not None}
    # Newer builds turn flash attention on by themselves: where nothing is known, it is what comes first only where the
    # buffer has the size of scores.
    late = log.facts.get("flash_attention") is None and (failure.bytes or 0) < _SCORES
    names = sorted(
        rows,
        key=lambda name: (
            failure.bucket not in _ABOUT.get(name, ()),
            name == "flash" and late,
            _COST.index(name),
        ),
    )
    saving = [rows[name] for name in names if rows[name].effect == "saves"]
    return (*_together(log, saving), *(rows[name] for name in names if rows[name].effect == "nothing"))


def absurd(failure: Failure) -> bool:
    """Whether more was asked for at once than the whole device has."""
    larger = failure.bytes is not None and failure.total is not None and failure.bytes > failure.total
    return failure.absurd or larger


def _together(log: _Log, advice: list[Advice]) -> Iterator[Advice]:
    """With what each saves after those before it, where they are about different buffers and so add up.

    Settings of one buffer multiply: each leaves a part, and the next saves its share of that.
    """
    left: dict[str, tuple[float, float]] = {}  # bucket → parts that are left at least and at most
    low = high = 0
    for one in advice:
        saves = one.saves_bytes
        if saves is None or one.bucket is None:
            yield one
            continue
        whole = sum(log.held.get(one.bucket, [0]))
        least, most = left.get(one.bucket, (1.0, 1.0))
        if one.setting == log.words["layers"].setting:  # with each layer goes its share of what is left of the cache
            least, most = min((low for low, _ in left.values()), default=1.0), 1.0
        smallest, largest = math.floor(saves.bytes * least), math.ceil(saves.upper * most)
        after = Saving(bytes=smallest, at_most=largest if saves.at_most is not None or largest > smallest + 1 else None)
        if whole:
            left[one.bucket] = least * (1 - saves.upper / whole), most * (1 - saves.bytes / whole)
        low, high = low + after.bytes, high + after.upper
        yield msgspec.structs.replace(one, saves_bytes_after=after, enough_after=log.enough(low, high))


def _flash(log: _Log) -> Advice | None:
    state = log.facts.get("flash_attention")
    if state == "enabled":
        return None
    compute = sum(log.held.get("compute", []))
    said = "is off" if state == "disabled" else "is not known to be on"
    why = f"flash attention {said}: without it the compute buffer holds the scores of every head for the whole context"
    if not compute and log.failure.bucket != "kv":
        return None
    return log.advice("flash", state or "not printed", "on", why, None, None)


def _attention(log: _Log) -> Advice | None:
    if log.boot.engine != "ik_llama" or "compute" not in log.held:
        return None
    why = "the scores of attention are computed in pieces of at most so many MiB"
    return log.advice("attention", "not printed", "512", why, None, None)


def _ubatch(log: _Log) -> Advice | None:
    now = log.fact("ubatch")
    compute = sum(log.held.get("compute", []))
    if not compute:
        return None
    if now is None:
        return log.advice("ubatch", "not printed", _UBATCH, "compute buffers grow with the ubatch", None, None)
    if now <= _UBATCH // 2:
        return None
    after = min(_UBATCH, now // 2)
    why = f"the compute buffer of {mib(compute)} shrinks with the ubatch, in proportion at most"
    return log.advice("ubatch", now, after, why, 0, compute * (now - after) // now)


def _parallel(log: _Log) -> Advice | None:
    slots = log.fact("slots")
    if slots is None or slots == 1:
        return None
    cache, state = sum(log.held.get("kv", [])), sum(log.held.get("recurrent", []))
    if log.boot.engine == "ollama" and cache:  # its context is that of one request, times their number
        why = f"the KV cache holds num_ctx tokens for each of {slots} requests at once"
        return log.advice(
            "parallel", slots, 1, why, (cache + state) * (slots - 1) // slots, (cache + state) * (slots - 1) // slots
        )
    if state:
        size = state * (slots - 1) // slots
        return log.advice("parallel", slots, 1, f"each of {slots} slots keeps a recurrent state", size, size)
    if cache and log.fact("context") is not None and not _sliding(log):
        way = "share" if log.facts.get("kv_unified") is True else "divide or share"
        why = f"the context is {log.fact('context')} tokens in all, which the slots {way}: the KV cache stays as large"
        return log.nothing("parallel", slots, 1, why)
    if cache and _sliding(log):
        why = "each slot keeps a window of its own in the layers with sliding windows; how large is not printed"
        return log.advice("parallel", slots, 1, why, None, None)
    return None


def _pipeline(log: _Log) -> Advice | None:
    copies = log.fact("pipeline_copies")
    if copies is None or copies < 2 or log.failure.bucket != "compute":
        return None
    why = f"the inputs are kept in {copies} copies, so that the cards can work on several batches at once"
    return log.advice("pipeline", copies, "1", why, None, None)


def _split(log: _Log) -> Advice | None:
    cards = [label for label in log.boot.devices if label != "host"]
    if len(cards) < 2 and (log.fact("pipeline_copies") or 1) < 2:  # which is for several devices only
        return None
    why = f"memory ran out on {log.device}, and on none of the other devices so far"
    return log.advice("split", "not printed", "a smaller share of it", why, None, None)


def _model(log: _Log) -> Advice | None:
    weights = sum(log.held.get("weights", [])) + sum(log.held.get("experts", []))
    size, parameters = log.fact("model_bytes"), log.fact("parameters")
    if not weights:
        return None
    before = log.facts.get("quantization") or "not printed"
    if size is None or parameters is None:
        return log.advice("model", before, "Q4_K_M", "a smaller quantisation of the same model", None, None)
    bits = 8 * size / parameters
    if bits <= FOUR_BITS[1] * 1.05:
        why = f"the file has {bits:.1f} bits for each weight already: below four bits the loss is no longer small"
        return log.nothing("model", before, "Q4_K_M", why)
    low, high = (weights * (1 - target / bits) for target in reversed(FOUR_BITS))
    why = f"{bits:.1f} bits for each weight become {FOUR_BITS[0]} to {FOUR_BITS[1]}"
    return log.advice("model", before, "Q4_K_M", why, math.floor(low), math.ceil(high))


def _cache(log: _Log) -> Advice | None:
    cache = sum(log.held.get("kv", []))
    if not cache:
        return None
    types = log.facts.get("cache_type_k"), log.facts.get("cache_type_v")
    known = [name for name in types if isinstance(name, str) and name in ggml.BY_NAME]
    if not known:
        return log.advice("cache", "not printed", "q8_0", "a KV cache of f16 becomes nearly half", None, None)
    for after in ("q8_0", "q4_0"):
        ratios = {_width(after) / _width(name) for name in known}
        if max(ratios) < 1:
            low, high = cache * (1 - max(ratios)), cache * (1 - min(ratios))
            before = known[0] if len(set(known)) == 1 else "/".join(known)
            why = f"a KV cache of {mib(cache)} in {before} becomes one in {after}"
            return log.advice("cache", before, after, why, math.floor(low), math.ceil(high))
    return None


def _width(name: str) -> float:
    return ggml.row_bytes(name, 256) / 256


def _sliding(log: _Log) -> bool:
    return log.fact("sliding_window") is not None or log.fact("kv_cells_sliding") is not None


def _context(log: _Log) -> Advice | None:
    now = log.fact("context")
    rows = log.held.get("kv", [])
    scores = log.facts.get("flash_attention") == "disabled" and log.failure.bucket == "compute"
    if not rows and not scores:
        return None
    if now is None:
        return log.advice("context", "not printed", "half of it", "the KV cache grows with the context", None, None)
    # Of two caches one keeps windows, and which line is whose is not known: either may be the one that shrinks.
    shrinks = (min(rows), max(rows)) if len(rows) > 1 and _sliding(log) else (sum(rows), sum(rows))
    if now <= STEP:
        return None
    after = _shorter(now, shrinks[0], log.most_missing())
    low, high = (size * (now - after) // now for size in shrinks)
    why = f"the KV cache of {mib(sum(rows))} holds {now} tokens" if rows else ""
    if scores:
        compute = sum(log.held.get("compute", []))
        high += compute * (now - after) // now
        why = " and ".join(filter(None, [why, f"the compute buffer of {mib(compute)} holds scores for as many"]))
    return log.advice("context", now, after, why, low, high)


def _shorter(now: int, cache: int, missing: int | None) -> int:
    """The longest context whose cache leaves what is missing, else half."""
    half = max(STEP, now // 2 // STEP * STEP)
    if missing is None or missing >= cache:
        return half
    after = int(now * (cache - missing) // cache) // STEP * STEP
    return after if after >= min(_LEAST_CONTEXT, half) else half


def _per_layer(log: _Log) -> tuple[int, int] | None:
    """Bytes of one layer's weights and caches on the device at least and at most, and how many are there."""
    layers = log.fact("layers_offloaded")
    weights = sum(log.held.get("weights", [])) + sum(log.held.get("experts", []))
    if layers is None or not weights or len([one for one in log.boot.devices if one != "host"]) > 1:
        return None
    return (weights + sum(log.held.get("kv", []))) // layers, layers


def _experts(log: _Log) -> Advice | None:
    if log.fact("experts") is None:
        return None
    each = _per_layer(log)
    missing = log.most_missing()
    why = "the experts of a layer are most of its weights; how much they are is not printed"
    if each is None or missing is None or not each[0]:
        return log.advice("experts", "not printed", "N", why, None, None)
    count = min(each[1], max(1, math.ceil(missing / (each[0] * (1 - _UNEVEN)))))
    most = math.ceil(count * each[0] * (1 + _UNEVEN))
    return log.advice("experts", "not printed", count, why, 0, most)


def _layers(log: _Log) -> Advice | None:
    each = _per_layer(log)
    missing = log.most_missing()
    if each is None or missing is None or not each[0]:
        if log.fact("layers_offloaded") is None or not log.held.get("weights"):
            return None
        return log.advice("layers", log.fact("layers_offloaded"), "fewer", "layers leave the device", None, None)
    size, layers = each
    count = min(layers, math.ceil(missing / (size * (1 - _UNEVEN))))
    low, high = math.floor(count * size * (1 - _UNEVEN)), math.ceil(count * size * (1 + _UNEVEN))
    why = f"a layer takes {mib(size)} there on average, its cache included"
    return log.advice("layers", layers, layers - count, why, low, high)


def _draft(log: _Log) -> Advice | None:
    size = sum(log.held.get("draft", []))
    if not size:
        return None
    return log.advice("draft", "on", "none", f"what drafts takes {mib(size)}", size, size)


def _absurd(log: _Log) -> Iterator[Advice]:
    size = mib(log.failure.bytes or 0)
    said = f"{size} were asked for at once"
    if log.failure.total is not None:
        said += f" of a device with {mib(log.failure.total)}"
    said += ": not a small shortage, but a way of computing that the device cannot take"
    for name in ("flash", "attention"):
        if name not in log.words or (name == "flash" and log.facts.get("flash_attention") == "enabled"):
            continue
        what = "flash attention" if name == "flash" else "attention in pieces"
        why = f"{said}; {what} never holds all the scores"
        before = log.facts.get("flash_attention") or "not printed" if name == "flash" else "not printed"
        yield log.advice(name, before, "on" if name == "flash" else "512", why, None, None)
    yield Advice(
        setting="build",
        before=str(log.facts.get("build") or "not printed"),
        after="another",
        effect="saves",
        why=f"{said}; another build of the engine may have the kernels that this one lacks for the model",
        device=log.device,
        bucket=log.failure.bucket,
        source="rule",
        cost="another build has to be installed",
        proof="no request of that size",
    )
    help_not = f"a smaller setting will not help: {said}"
    for name in ("context", "ubatch", "parallel", "cache"):
        if name in log.words:
            now = {"context": log.fact("context"), "ubatch": log.fact("ubatch"), "parallel": log.fact("slots")}.get(
                name
            )
            yield log.nothing(name, now or "not printed", "q8_0" if name == "cache" else "smaller", help_not)


def _unsure(log: _Log) -> Iterator[Advice]:
    """The line alone does not say which buffer it was: both readings, and nothing is promised."""
    size = f" of {mib(log.failure.bytes)}" if log.failure.bytes is not None else ""
    doubt = f"the log does not say which buffer{size} it was"
    state = log.facts.get("flash_attention")
    if state != "enabled":
        why = f"{doubt}; if it is the compute buffer, it holds scores of attention, which flash attention never holds"
        yield log.advice("flash", state or "not printed", "on", why, None, None)
    now = log.fact("context")
    why = f"{doubt}; both the KV cache and, without flash attention, the compute buffer shrink with the context"
    yield log.advice("context", now or "not printed", "half of it" if now is None else now // 2, why, None, None)
    now = log.fact("ubatch")
    why = f"{doubt}; if it is the compute buffer, it shrinks with the ubatch"
    if now is None or now > _UBATCH:
        yield log.advice("ubatch", now or "not printed", _UBATCH, why, None, None)
    if log.fact("layers_offloaded") is not None:
        yield log.advice(
            "layers", log.fact("layers_offloaded"), "fewer", f"{doubt}; either is smaller then", None, None
        )
