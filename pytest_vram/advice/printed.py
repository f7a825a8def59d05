"""Advice from what llama.cpp (or an engine around it) printed, without the model's files.

What a cache saves follows from its type and length. Weights follow from the bits of a weight, within a range; a compute
buffer follows its ubatch at most, and the least that it saves is not known. Where no figure can be given, the advice is
a rule, and says so by having none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import msgspec

from pytest_vram.advice.logged import ABOUT, COST, MARGIN, Log
from pytest_vram.advice.records import Advice, Saving
from pytest_vram.bootlog.boot import Boot, Failure
from pytest_vram.bootlog.devices import named
from pytest_vram.sizing import ggml
from pytest_vram.sizing.changes import STEP
from pytest_vram.units import MIB, mib

#: Bits of a weight in files that are called by four bits: from a pure ``q4_k`` to mixtures with larger matrices.
FOUR_BITS = (4.5, 5.0)
#: How far blocks of one model may differ in size from their mean. The mean counts the output matrix as a layer, which
#: may be as large as all the others together.
_UNEVEN = (0.5, 1.25)
_UBATCH = 128
#: A compute buffer of this size is hardly ever one without attention scores.
_SCORES = 2 << 30
_LEAST_CONTEXT = 2048
#: What is left for compute buffers where they would come after a cache that was refused.
_COMPUTE = 512 * MIB


def of_log(boot: Boot, failure: Failure) -> tuple[Advice, ...]:
    """Advice for an allocation that a device refused, best first."""
    log = Log(boot, failure)
    if absurd(failure):
        return tuple(_absurd(log))
    if failure.bucket is None or (not boot.entries and not log.sure):
        return tuple(_unsure(log))
    makers: dict[str, Callable[[Log], Advice | None]] = {
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
        "projector": _projector,
        "draft": _draft,
    }
    rows = {name: found for name, made in makers.items() if name in log.words and (found := made(log)) is not None}
    if log.single:
        return tuple(_of_one_buffer(log, rows))
    # Newer builds turn flash attention on by themselves: where nothing is known, it is what comes first only where the
    # buffer has the size of scores.
    late = log.facts.get("flash_attention") is None and (failure.bytes or 0) < _SCORES
    names = sorted(
        rows,
        key=lambda name: (
            not _is_about(log, name),
            name == "flash" and late,
            COST.index(name),
        ),
    )
    saving = [rows[name] for name in names if rows[name].effect == "saves"]
    return (*_driver(log), *_together(log, saving), *(rows[name] for name in names if rows[name].effect == "nothing"))


def _driver(log: Log) -> Iterator[Advice]:
    """Layers were said to go to a device, and nothing of the model is on one: the device itself is what is wrong."""
    if log.facts.get("layers_on_device_real") != 0 or not log.fact("layers_offloaded") or log.held.get("weights"):
        return
    if log.failure.bucket in ("weights", "experts"):
        return
    yield Advice(
        setting="driver",
        before="not in use",
        after="working",
        effect="saves",
        why="layers were said to be on the device, and no buffer of the model is: look first at why it did not start",
        device=log.device,
        bucket=log.failure.bucket,
        source="rule",
        proof="a `model buffer size` line of the device",
    )


def absurd(failure: Failure) -> bool:
    """Whether more was asked for at once than the whole device has."""
    larger = failure.bytes is not None and failure.total is not None and failure.bytes > failure.total
    return failure.absurd or larger


def _is_about(log: Log, name: str) -> bool:
    if name == "context" and log.failure.bucket == "compute":
        return _scores(log)
    return log.failure.bucket in ABOUT.get(name, ())


def _of_one_buffer(log: Log, rows: dict[str, Advice]) -> Iterator[Advice]:
    """One buffer is larger than the driver gives at once, or was refused for no want of memory: what makes that very
    buffer smaller may help, and nothing else does."""
    bucket = log.failure.bucket
    parts = {"layers", "split"} if bucket in ("kv", "weights", "recurrent") else set()
    helping = [name for name in COST if name in rows and (_is_about(log, name) or name in parts)]
    for name in helping:
        if rows[name].effect == "saves":
            yield msgspec.structs.replace(rows[name], enough=None)
    size = f" of {mib(log.failure.bytes)}" if log.failure.bytes is not None else ""
    why = f"it is this one buffer{size} that was refused, not the sum: it stays as large"
    for name in COST:
        if name in rows and (name not in helping or rows[name].effect == "nothing"):
            one = rows[name]
            yield one if one.effect == "nothing" else log.nothing(name, one.before, one.after, why)


def _together(log: Log, advice: list[Advice]) -> Iterator[Advice]:
    """With what each saves after those before it, where they are about different buffers and so add up.

    Settings of one buffer multiply: each leaves a part, and the next saves its share of that.
    """
    left: dict[str, tuple[float, float]] = {}  # bucket → parts that are left at least and at most
    high = proven = 0
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
            left[one.bucket] = max(0.0, least * (1 - saves.upper / whole)), max(0.0, most * (1 - saves.bytes / whole))
        high += after.upper
        if one.setting in log.proven:
            proven += after.bytes
        enough = log.enough(proven, high + _besides(log), proven=True)
        yield msgspec.structs.replace(one, saves_bytes_after=after, enough_after=enough)


def _besides(log: Log) -> int:
    """The most by which a compute buffer shrinks as well with a shorter context: its mask and its scores."""
    return log.sum("compute")


def _scores(log: Log) -> bool:
    return log.facts.get("flash_attention") == "disabled"


def _flash(log: Log) -> Advice | None:
    state = log.facts.get("flash_attention")
    if state == "enabled" or not log.held.get("compute"):
        return None
    said = "is off" if state == "disabled" else "is not known to be on"
    why = f"flash attention {said}: without it the compute buffer holds the scores of every head for the whole context"
    return log.advice("flash", state or "not printed", "on", why)


def _attention(log: Log) -> Advice | None:
    if log.boot.engine != "ik_llama" or "compute" not in log.held:
        return None
    why = "the scores of attention are computed in pieces of at most so many MiB"
    now = log.facts.get("attention_max_batch")
    return log.advice("attention", "not printed" if now is None else now, "512", why)


def _ubatch(log: Log) -> Advice | None:
    now = log.fact("ubatch")
    compute = log.sum("compute")
    if not compute:
        return None
    if now is None:
        return log.advice("ubatch", "not printed", _UBATCH, "compute buffers grow with the ubatch")
    if now <= _UBATCH // 2:
        return None
    after = min(_UBATCH, now // 2)
    why = f"the compute buffer of {mib(compute)} shrinks with the ubatch, in proportion at most"
    high = compute * (now - after) // now
    rows, cells = log.held.get("kv", []), log.fact("kv_cells_sliding")
    if rows and (log.sliding or len(rows) > 1):
        # A cache of windows holds a ubatch besides, in steps of so many cells; which of the rows it is is not said.
        part = 1.0 if cells is None else min(1.0, (now - after + STEP) / cells)
        high += math.ceil(max(rows) * part)
        why += ", and a cache of windows, which holds a ubatch besides"
    return log.advice("ubatch", now, after, why, 0, high)


def _parallel(log: Log) -> Advice | None:
    slots = log.fact("slots")
    if slots is None or slots == 1:
        return None
    cache, state = log.sum("kv"), log.sum("recurrent")
    if log.boot.engine == "ollama" and cache:  # its context is that of one request, times their number
        why = f"the KV cache holds num_ctx tokens for each of {slots} requests at once"
        size = (cache + state) * (slots - 1) // slots
        return log.advice("parallel", slots, 1, why, size, size, proven=not log.sliding, besides=log.sum("compute"))
    if state:
        size = state * (slots - 1) // slots
        why = f"each of {slots} slots keeps a recurrent state"
        return log.advice("parallel", slots, 1, why, size, size, proven=True, besides=cache, bucket="recurrent")
    if cache and log.fact("context") is not None and not log.sliding:
        way = "share" if log.facts.get("kv_unified") is True else "divide or share"
        why = f"the context is {log.fact('context')} tokens in all, which the slots {way}: the KV cache stays as large"
        return log.nothing("parallel", slots, 1, why)
    if cache and log.sliding:
        why = "each slot keeps a window of its own in the layers with sliding windows; how large is not printed"
        return log.advice("parallel", slots, 1, why)
    return None


def _pipeline(log: Log) -> Advice | None:
    copies = log.fact("pipeline_copies")
    if copies is None or copies < 2 or log.failure.bucket != "compute":
        return None
    why = f"the inputs are kept in {copies} copies, so that the cards can work on several batches at once"
    return log.advice("pipeline", f"{copies} pipeline copies", "1 copy", why)


def _split(log: Log) -> Advice | None:
    if log.failure.device is None:
        return None
    if len(log.cards) < 2 and (log.fact("pipeline_copies") or 1) < 2:  # which is for several devices only
        return None
    why = f"memory ran out on {named(log.failure.device, log.boot.devices)}, and on none of the other devices so far"
    return log.advice("split", "not printed", f"a smaller share for {log.failure.device}", why)


def _model(log: Log) -> Advice | None:
    weights = log.sum("weights", "experts")
    size, parameters = log.fact("model_bytes"), log.fact("parameters")
    if not weights:
        return None
    before = log.facts.get("quantization") or "not printed"
    if size is None or parameters is None:
        return log.advice("model", before, "Q4_K_M", "a smaller quantisation of the same model")
    bits = 8 * size / parameters
    if bits <= FOUR_BITS[1] * 1.05:
        why = f"the file has {bits:.1f} bits for each weight already: below four bits the loss is no longer small"
        return log.nothing("model", before, "Q4_K_M", why)
    low, high = (weights * (1 - target / bits) for target in reversed(FOUR_BITS))
    why = f"{bits:.1f} bits for each weight become {FOUR_BITS[0]} to {FOUR_BITS[1]}"
    return log.advice("model", before, "Q4_K_M", why, math.floor(low), math.ceil(high))


def _cache(log: Log) -> Advice | None:
    cache = log.sum("kv")
    if not cache:
        return None
    types = log.facts.get("cache_type_k"), log.facts.get("cache_type_v")
    known = [name for name in types if isinstance(name, str) and name in ggml.BY_NAME]
    flash = log.facts.get("flash_attention")
    # A quantised V cache needs flash attention, and the engine refuses to start without.
    flag = log.words["cache"].flag
    if flash == "disabled" and "flash" in log.words and log.words["flash"].flag not in flag:
        flag = f"{log.words['flash'].flag} {flag}"
    if not known:
        why = "a KV cache of f16 becomes nearly half"
        return log.advice("cache", "not printed", "q8_0", why, flag=flag)
    for after in ("q8_0", "q4_0"):
        ratios = {_width(after) / _width(name) for name in known}
        if max(ratios) < 1:
            low, high = (math.floor(cache * (1 - max(ratios))), math.ceil(cache * (1 - min(ratios))))
            before = known[0] if len(set(known)) == 1 else "/".join(known)
            why = f"a KV cache of {mib(cache)} in {before} becomes one in {after}"
            copy = _copied(log, known)
            if copy is not None:
                low = max(0, low - copy)
                why += f"; kernels of some devices keep a copy of one layer in f16 ({mib(copy)} at most)"
            proven = copy is not None and flash == "enabled"
            return log.advice(
                "cache", before, after, why, low, high, proven=proven, besides=log.sum("compute"), flag=flag
            )
    return None


def _copied(log: Log, types: list[str]) -> int | None:
    """Bytes of one layer's cache in f16 at most, which kernels for quantised caches may need; ``None``: not known."""
    layers = log.fact("kv_layers") or (log.layers if "recurrent" not in log.held else None)
    whole = max(log.fact("kv_bytes") or 0, log.sum("kv"))
    if not layers or log.sliding or len(log.held.get("kv", [])) > 1:
        return None
    return math.ceil(whole / layers * _width("f16") / min(_width(name) for name in types))


def _width(name: str) -> float:
    return ggml.row_bytes(name, 256) / 256


def _context(log: Log) -> Advice | None:
    rows = log.held.get("kv", [])
    compute = log.sum("compute")
    scores = log.facts.get("flash_attention") != "enabled" and log.failure.bucket == "compute"
    if not rows and not scores:
        return None
    requests = log.per_request
    now = log.fact("context")
    if now is not None and requests is not None:
        now //= requests
    each = f" for each of {requests} requests" if requests is not None and requests > 1 else ""
    grows = "the KV cache grows with the context" if rows else "without flash attention the compute buffer holds scores"
    if now is None or (not rows and not _scores(log)):
        return log.advice("context", now or "not printed", "half of it", grows)
    if requests is None:
        why = f"{grows}, and the log does not say how many requests share its {now} tokens"
        return log.advice("context", "not printed", "half of it", why)
    if now <= STEP:
        return None
    low, high = _shrinking(log, rows)
    step = STEP * (1 if requests > 1 or log.facts.get("kv_unified") is True else (log.fact("slots") or 1))
    after, room = _shorter(log, now, low, step)
    if after is None:
        return None
    spared = [size * (now - after) // now for size in (low, high)]
    besides = compute * (now - after) // now
    why = f"the KV cache of {mib(sum(rows))} holds {now} tokens{each}" if rows else ""
    if _scores(log) and compute:
        spared[1] += besides
        why = " and ".join(filter(None, [why, f"the compute buffer of {mib(compute)} holds scores for as many"]))
    if room:
        why += f"; {mib(room)} are left for the compute buffers, which come after it"
    # Layers that are missing from the printed cache have another one, unless they keep a state.
    every = None in (log.layers, log.fact("kv_layers")) or log.fact("kv_layers") == log.layers
    proven = low == high and (every or "recurrent" in log.held)
    return log.advice("context", now, after, why, spared[0], spared[1], proven=proven, besides=besides)


def _shrinking(log: Log, rows: list[int]) -> tuple[int, int]:
    """Bytes of the caches that follow the context, at least and at most."""
    if not log.sliding:
        return sum(rows), sum(rows)
    # Of two caches one keeps windows, and which line is whose is not known: either may be the one that shrinks.
    return (min(rows), max(rows)) if len(rows) > 1 else (0, sum(rows))


def _shorter(log: Log, now: int, cache: int, step: int) -> tuple[int | None, int]:
    """The longest context whose cache leaves what is missing, else half; and what it leaves for what comes later."""
    half = max(step, now // 2 // step * step)
    missing = log.missing()
    if missing is not None and cache:
        for room in (MARGIN,) if log.last else (MARGIN + _COMPUTE, MARGIN):
            after = int(now * (cache - missing - room) // cache) // step * step if missing + room < cache else 0
            if after >= min(_LEAST_CONTEXT, half):
                return after, 0 if log.last or "compute" in log.held else room
    return (half if half < now else None), 0


def _per_layer(log: Log) -> tuple[int, int] | None:
    """Bytes of one layer's weights and caches on the device by their mean, and how many are there."""
    layers = log.fact("layers_offloaded")
    weights = log.sum("weights", "experts")
    if layers is None or not weights or len(log.cards) > 1 or not log.alike:
        return None
    return (weights + log.sum("kv")) // layers, layers


def _experts(log: Log) -> Advice | None:
    known = log.fact("experts") is not None or "experts" in log.held
    if not known and not (log.failure.bucket == "weights" and log.facts.get("layers") is None):
        return None
    why = "the experts of a layer are most of its weights; how much they are is not printed"
    if not known:
        why = f"if the model is a mixture: {why}"
    return log.advice("experts", "not printed", "N layers", why)


def _layers(log: Log) -> Advice | None:
    each = _per_layer(log)
    missing = log.most_missing()
    now = log.fact("layers_offloaded")
    if each is None or missing is None or not each[0]:
        if log.failure.bucket == "compute" and now is None and log.held.get("kv"):
            return None
        why = "layers leave the device, with their caches; they are not known to be alike"
        return log.advice("layers", now or "not printed", "fewer", why)
    size, layers = each
    count = min(layers, math.ceil(missing / (size * _UNEVEN[0])))
    low, high = math.floor(count * size * _UNEVEN[0]), math.ceil(count * size * _UNEVEN[1])
    why = f"a layer takes {mib(size)} there on average, its cache included"
    return log.advice("layers", layers, layers - count, why, low, high, besides=log.sum("compute"))


def _projector(log: Log) -> Advice | None:
    size = log.sum("projector")
    if log.failure.bucket != "projector" and not size:
        return None
    why = f"the encoder of images or sound{f' ({mib(size)})' if size else ''} is on the device"
    if log.failure.bucket != "projector":
        return log.advice("projector", "on", "off", why, size, size, proven=True)
    return log.advice("projector", "on", "off", f"{why}: nothing of it is asked for then")


def _draft(log: Log) -> Advice | None:
    size = log.sum("draft")
    if not size:
        return None
    return log.advice("draft", "on", "none", f"what drafts takes {mib(size)}", size, size, proven=True)


def _absurd(log: Log) -> Iterator[Advice]:
    size = mib(log.failure.bytes or 0)
    said = f"{size} were asked for at once"
    if log.failure.total is not None:
        said += f" of a device with {mib(log.failure.total)}"
    whole = f"{said}: not a small shortage, but a way of computing that the device cannot take"
    for name in ("flash", "attention"):
        if name not in log.words or (name == "flash" and log.facts.get("flash_attention") == "enabled"):
            continue
        what = "flash attention" if name == "flash" else "attention in pieces"
        # Said once: every line that repeats it makes the list longer, and none clearer.
        why, whole = f"{whole}; {what} never holds all the scores", "the same request"
        now = log.facts.get("flash_attention" if name == "flash" else "attention_max_batch")
        yield log.advice(name, "not printed" if now is None else now, "on" if name == "flash" else "512", why)
    yield Advice(
        setting="build",
        before=str(log.facts.get("build") or "not printed"),
        after="another",
        effect="saves",
        why=f"{whole}; another build of the engine may have the kernels that this one lacks for the model",
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


def _unsure(log: Log) -> Iterator[Advice]:
    """The line alone does not say which buffer it was: both readings, and nothing is promised."""
    size = f" of {mib(log.failure.bytes)}" if log.failure.bytes is not None else ""
    doubt = f"the log does not say which buffer{size} it was"
    state = log.facts.get("flash_attention")
    if state != "enabled" and "flash" in log.words:
        why = f"{doubt}; if it is the compute buffer, it holds scores of attention, which flash attention never holds"
        yield log.advice("flash", state or "not printed", "on", why)
    now, requests = log.fact("context"), log.per_request
    now = None if now is None or requests is None else now // requests
    why = f"{doubt}; both the KV cache and, without flash attention, the compute buffer shrink with the context"
    yield log.advice("context", now or "not printed", "half of it" if now is None else now // 2, why)
    now = log.fact("ubatch")
    why = f"{doubt}; if it is the compute buffer, it shrinks with the ubatch"
    if "ubatch" in log.words and (now is None or now > _UBATCH):
        yield log.advice("ubatch", now or "not printed", _UBATCH, why)
    if log.fact("layers_offloaded") is not None:
        yield log.advice("layers", log.fact("layers_offloaded"), "fewer", f"{doubt}; either is smaller then")
