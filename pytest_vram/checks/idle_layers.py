"""Which layer of idle memory grows, what that means, and what only looks like a leak."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from pytest_vram.checks.idle_engines import CACHES_OFF, UNKNOWN, WORKSPACE, About
from pytest_vram.checks.idle_readings import USAGE, Cleaned
from pytest_vram.checks.idle_trend import Thresholds, Trend
from pytest_vram.units import MIB, mib

ALLOCATED, RESERVED, SPLIT = "torch-allocated", "torch-reserved", "torch-inactive-split"
PROCESS, DEVICE, HOST = "process", "device", "host"
TORCH = (ALLOCATED, RESERVED, SPLIT)
#: The driver's figure of the process less what torch reserved of it: no layer that is given, but one that is judged.
OUTSIDE = "process - torch-reserved"
#: A counter of the driver is whole pages, and other allocations come between.
NEAR = 64 << 10
MOST_WORKSPACES = 16
#: What a cache may hold beyond its cap: entries are written before older ones go.
OVER_CAP = 1.05

#: Cap → the layer that it is part of; others may be part of any.
CAP_LAYER = {
    "prompt-cache": HOST,
    "context-checkpoints": HOST,
    "allocator-cache": RESERVED,
    "graphs": PROCESS,
    "workspaces": PROCESS,
}
CAP_WORDS = {
    "prompt-cache": "llama.cpp's prompt cache (--cache-ram)",
    "context-checkpoints": "llama.cpp's context checkpoints (--ctx-checkpoints)",
    "allocator-cache": "the allocator's cache",
    "graphs": "CUDA graphs",
    "workspaces": "workspaces of cuBLAS",
}

EMPTY_CACHE = "torch.cuda.empty_cache() after a turn: what falls was the allocator's cache"
LONGER = "a longer run"


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """The verdict over all layers: ``of`` names the trend whose figures it quotes, ``layer`` the one that grows.

    :ivar said: what it means, in a sentence. :ivar unread: true where ``said`` is that nothing could be read.
    """

    kind: Literal["flat", "warming", "step", "leak", "inconclusive"]
    of: str
    layer: str = ""
    said: str = ""
    cause: str = "unknown"
    alike: list[str] = []
    settles: list[str] = []
    unread: bool = False


def outside_torch(layers: Mapping[str, Cleaned]) -> list[float | None] | None:
    """What the process holds beside what torch reserved, turn by turn; ``None`` where the two are not given."""
    if PROCESS not in layers or RESERVED not in layers:
        return None
    pairs = zip(layers[PROCESS].values, layers[RESERVED].values, strict=True)
    return [None if one is None or other is None else one - other for one, other in pairs]


def combine(
    trends: Mapping[str, Trend],
    cleaned: Mapping[str, Cleaned],
    rule: Thresholds,
    caps: Mapping[str, int],
    about: About = UNKNOWN,
) -> Found:
    """One verdict of all layers: the innermost leak, else what is open, else a step, a warm-up, or nothing.

    :param about: whose memory it is: it chooses words, and never the verdict.
    """
    unread = _unread(cleaned, rule)
    said = [
        _of_layer(layer, trends, cleaned, rule, caps, about)
        for layer in trends
        if layer not in unread and layer != OUTSIDE
    ]
    found = [one for one in said if one is not None]
    for kind in ("leak", "inconclusive"):
        first = next((one for one in sorted(found, key=_inner) if one.kind == kind), None)
        if first is not None:
            return first
    # A figure that could not be read is covered by one that holds it.
    open_layers = [layer for layer in unread if not _covered(layer, cleaned, unread)]
    if open_layers or not found:
        layer = (open_layers or list(cleaned) or [""])[0]
        return _open_for_unread(layer, cleaned.get(layer))
    for kind in ("step", "warming", "flat"):
        alike = sorted((one for one in found if one.kind == kind), key=_shown)
        if alike:
            # Of two that say the same of one layer, the one that explains it.
            return next((one for one in alike if one.of == alike[0].of and one.said), alike[0])
    raise AssertionError("every kind is one of the five")


def _inner(found: Found) -> int:
    order = [ALLOCATED, PROCESS, RESERVED, SPLIT]
    return order.index(found.of) if found.of in order else {HOST: 8, DEVICE: 9}.get(found.of, 5)


def _shown(found: Found) -> int:
    """Which flat layer's figures stand for all: the driver's before torch's."""
    order = [PROCESS, ALLOCATED, RESERVED, SPLIT]
    return order.index(found.of) if found.of in order else {HOST: 8, DEVICE: 7, USAGE: 9}.get(found.of, -1)


def _unread(cleaned: Mapping[str, Cleaned], rule: Thresholds) -> set[str]:
    return {
        layer
        for layer, one in cleaned.items()
        if one.values and len(one.values) - one.known > max(1, rule.missing * len(one.values))
    }


def _covered(layer: str, cleaned: Mapping[str, Cleaned], unread: set[str]) -> bool:
    read = set(cleaned) - unread
    if layer in TORCH or layer == USAGE:
        return PROCESS in read or (DEVICE in read and PROCESS not in cleaned)
    return layer == DEVICE and PROCESS in read


def _open_for_unread(layer: str, one: Cleaned | None) -> Found:
    if one is None or not one.values:
        return Found(kind="inconclusive", of=layer, said="There are no readings.", settles=[LONGER], unread=True)
    gone = len(one.values) - one.known
    why = max(one.reasons, key=lambda reason: one.reasons[reason]) if one.reasons else "no reason is known"
    what = f" of `{layer}`" if layer else ""
    return Found(
        kind="inconclusive",
        of=layer,
        said=(
            f"{gone} of {len(one.values)} readings{what} could not be taken ({why.rstrip('.')}): too many to judge by."
        ),
        settles=["a source that can be read at every turn"],
        unread=True,
    )


def _of_layer(
    layer: str,
    trends: Mapping[str, Trend],
    cleaned: Mapping[str, Cleaned],
    rule: Thresholds,
    caps: Mapping[str, int],
    about: About,
) -> Found | None:
    """What one layer says; ``None`` where another layer speaks for it."""
    trend = trends[layer]
    single = layer == ""
    meant = cleaned[layer].source if single else layer
    rises = trend.kind == "leak"
    if layer in (DEVICE, USAGE) and not rises:
        # The whole device, or a pool inside of it, decides only where nothing else is there.
        alone = all(other in (DEVICE, USAGE) for other in cleaned)
        return _plain(layer, meant, trend, cleaned[layer], about) if alone else None
    if layer == USAGE:
        return _usage(trends, trend)
    if layer == DEVICE and len(cleaned) > 1:
        return _device(trends, trend)
    if layer == SPLIT:
        return None
    if meant == RESERVED:
        return _reserved(layer, trends, cleaned, trend, caps, about)
    if layer == PROCESS and OUTSIDE in trends:
        return _process(trends, cleaned, about)
    if rises:
        return _capped(layer, meant, trend, cleaned[layer], rule, caps) or _leak(layer, meant, trends, cleaned, about)
    return _plain(layer, meant, trend, cleaned[layer], about)


def _plain(layer: str, meant: str, trend: Trend, cleaned: Cleaned, about: About) -> Found:
    """A layer that is no leak, as it stands."""
    alike: list[str] = []
    settles: list[str] = []
    if trend.kind in ("step", "warming", "inconclusive") and trend.reason not in ("short", "cycle", "noisy"):
        alike = _alike(meant, cleaned, about)
    if trend.kind == "inconclusive":
        settles = [_settles(trend)]
    grows = trend.kind in ("step", "warming") or trend.reason in (
        "steps",
        "eases",
        "wanders",
        "weak",
        "late",
        "events",
        "drops",
        "phase",
        "tops",
        "last",
        "pieces",
    )
    return Found(kind=trend.kind, of=layer, layer=layer if grows else "", alike=alike, settles=settles)


def _settles(trend: Trend) -> str:
    if trend.reason == "noisy":
        return "a longer run, or a longer wait until idle memory has settled after each turn"
    if trend.reason == "drops":
        return "a run that is long enough for several such drops: the level after each of them says it"
    if trend.reason == "cycle":
        return f"a run of at least {math.ceil(3.75 * trend.cycle)} turns: three cycles after the warm-up"
    if trend.reason == "events":
        return "a run without these events: if nothing rises then, what they leave behind is the leak"
    if trend.reason == "pieces":
        return f"{trend.needs} turns or more on one server"
    if trend.reason == "phase":
        return "a run of that turn alone, again and again"
    return LONGER


def _leak(layer: str, meant: str, trends: Mapping[str, Trend], cleaned: Mapping[str, Cleaned], about: About) -> Found:
    alike, settles = _alike(meant, cleaned[layer], about), []
    cause, said = "unknown", ""
    if meant == ALLOCATED:
        cause = "live tensors"
        said = "Live tensors grow: something keeps references to them."
        settles = [about.settles_torch()]
    elif meant == HOST:
        said = "Host memory grows."
        settles = [about.settles_host()]
    elif meant == DEVICE:
        said = "The whole device's figure grows; it does not say whose."
        settles = ["a figure of the process, or a device that nobody else uses"]
    elif layer == "":
        settles = [about.settles_one_figure()]
    elif ALLOCATED in trends and trends[ALLOCATED].kind in ("flat", "step", "warming"):
        cause = "outside torch"
        said = "Live tensors do not grow, the process does: the growth is outside torch."
        settles = [about.settles_process()]
    return Found(kind="leak", of=layer, layer=layer, said=said, cause=cause, alike=alike, settles=settles)


def _process(trends: Mapping[str, Trend], cleaned: Mapping[str, Cleaned], about: About) -> Found | None:
    """The process's figure where torch's share of it is known: what is left without that share."""
    outside, whole = trends[OUTSIDE], trends[PROCESS]
    if outside.kind == "leak" and whole.kind != "leak":
        # What torch gives back while something else grows is no growth of the process.
        return Found(kind=whole.kind, of=PROCESS, settles=[LONGER] if whole.kind == "inconclusive" else [])
    if outside.kind == "leak":
        return Found(
            kind="leak",
            of=PROCESS,
            layer=PROCESS,
            cause="outside torch",
            said="What torch reserved does not account for it: the growth is outside torch.",
            alike=_alike(PROCESS, cleaned[PROCESS], about),
            settles=[about.settles_process()],
        )
    if whole.kind == "leak":
        return None
    return _plain(PROCESS, PROCESS, whole, cleaned[PROCESS], about)


def _reserved(
    layer: str,
    trends: Mapping[str, Trend],
    cleaned: Mapping[str, Cleaned],
    trend: Trend,
    caps: Mapping[str, int],
    about: About,
) -> Found | None:
    """What torch reserved: a cache that it gives back on request, unless live tensors fill it."""
    rises = trend.kind == "leak" or trend.reason in ("steps", "eases", "wanders", "weak")
    if not rises:
        return _plain(layer, RESERVED, trend, cleaned[layer], about)
    live = trends.get(ALLOCATED)
    if live is not None and live.kind == "leak":
        return None
    if "allocator-cache" in caps and trend.rise <= OVER_CAP * caps["allocator-cache"]:
        return Found(
            kind="inconclusive",
            of=layer,
            layer=layer,
            cause="allocator cache",
            said=f"It grew by {mib(int(trend.rise))}, within its cap of {mib(caps['allocator-cache'])}.",
            alike=[CAP_WORDS["allocator-cache"]],
            settles=[EMPTY_CACHE],
        )
    broken = SPLIT in trends and trends[SPLIT].kind in ("leak", "step", "inconclusive") and trends[SPLIT].rise > 0
    if live is None:
        said = "What torch reserved grows; without its live tensors nobody knows whether they fill it."
        alike = ["the allocator's cache", "fragmentation", "live tensors"]
    elif broken:
        said = (
            "Live tensors do not grow, what torch reserved does, and with it the unused parts of split segments: "
            "fragmentation."
        )
        alike = ["fragmentation"]
    else:
        said = "Live tensors do not grow, what torch reserved does: the allocator's cache, not a leak of tensors."
        alike = ["the allocator's cache", "fragmentation"]
    settles = [EMPTY_CACHE] if live is not None else ["torch-allocated beside it", EMPTY_CACHE]
    if broken or live is None:
        settles.append("PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True: fragmentation goes with it")
    cause = "unknown" if live is None else "fragmentation" if broken else "allocator cache"
    return Found(kind="inconclusive", of=layer, layer=layer, cause=cause, said=said, alike=alike, settles=settles)


def _device(trends: Mapping[str, Trend], trend: Trend) -> Found | None:
    """The whole device grows: somebody else's memory where the process's own figure does not."""
    own = trends.get(PROCESS)
    if own is not None:
        if own.kind in ("leak", "inconclusive"):
            return None
        return Found(
            kind=own.kind,
            of=PROCESS,
            layer=DEVICE,
            cause="another process",
            said=(
                f"The device's figure grows by {trend.slope_words()} a turn, the process's own does not: another "
                "process on the device."
            ),
        )
    if trends.keys() & set(TORCH) and not any(trends[name].kind == "leak" for name in TORCH if name in trends):
        return Found(
            kind="inconclusive",
            of=DEVICE,
            layer=DEVICE,
            said="The device's figure grows, torch's do not: outside torch in this process, or another process.",
            alike=["another process", "CUDA graphs and workspaces outside torch"],
            settles=["the driver's figure of the process"],
        )
    return None


def _usage(trends: Mapping[str, Trend], trend: Trend) -> Found:
    others = [one for layer, one in trends.items() if layer not in (USAGE, OUTSIDE)]
    still = bool(others) and all(one.kind == "flat" for one in others)
    return Found(
        kind="flat" if still else "inconclusive",
        of=next((layer for layer in (PROCESS, DEVICE, ALLOCATED) if layer in trends), USAGE) if still else USAGE,
        layer=USAGE,
        cause="the pool fills" if still else "unknown",
        said=(
            "The cache's usage grows inside of a pool that does not: the pool fills, which is no leak of memory."
            if still
            else "The cache's usage grows: the pool fills."
        ),
        alike=["a prefix cache that fills", "blocks that are not given back"],
        settles=["usage while no request runs, after the prefix cache was reset: blocks that stay are lost"],
    )


def _capped(
    layer: str, meant: str, trend: Trend, cleaned: Cleaned, rule: Thresholds, caps: Mapping[str, int]
) -> Found | None:
    """A rise that a known cache may explain; ``None`` where no cap is part of this layer."""
    # One figure of unknown origin may hold any of them; one that says that it is a device's holds no host cache.
    mine = {name: cap for name, cap in caps.items() if not meant or CAP_LAYER.get(name, meant) == meant}
    if not mine:
        return None
    total = sum(mine.values())
    words = " and ".join(CAP_WORDS.get(name, name) for name in mine)
    settle = CACHES_OFF if mine.keys() & {"prompt-cache", "context-checkpoints"} else "a run that fills it to its cap"
    fills = Found(kind="inconclusive", of=layer, layer=layer, alike=[words], settles=[settle])
    if trend.rise <= max(OVER_CAP * total, total + rule.floor):
        return msgspec.structs.replace(
            fills,
            said=f"It grew by {mib(int(trend.rise))} and may grow by {mib(total)}: {words} is below its cap.",
        )
    if trend.tail is None or trend.slope is None or trend.tail < rule.easing * trend.slope:
        return msgspec.structs.replace(
            fills,
            said=f"It grew by {mib(int(trend.rise))}, past the cap of {mib(total)} of {words}, and has eased since.",
        )
    return Found(
        kind="leak",
        of=layer,
        layer=layer,
        said=(
            f"It grew by {mib(int(trend.rise))}, past the cap of {mib(total)} of {words}, and grows on: "
            "the limit is not enforced, or something else leaks."
        ),
        alike=[f"{words} that does not keep to its cap"],
        settles=["the server's own count of its cache: what it does not count is not the cache"],
    )


def _alike(meant: str, cleaned: Cleaned, about: About) -> list[str]:
    """Known causes that look like this in this layer."""
    counted = workspaces(cleaned.values)
    if meant == HOST:
        return about.in_host()
    if meant == ALLOCATED:
        return about.in_torch()
    if meant == RESERVED:
        return ["the allocator's cache"]
    if meant == DEVICE:
        return ["another process"]
    if meant == PROCESS:
        return about.in_process(counted=counted)
    if meant == "rpc":
        return msgspec.structs.replace(about, library="rpc").in_process(counted=counted)
    if meant == "":
        return [*about.in_process(counted=counted), *about.in_one_figure()]
    return about.in_process(counted=True) if counted else []


def workspaces(values: Sequence[float | None]) -> bool:
    """Whether the figure goes up by whole workspaces of cuBLAS, and hardly by anything else."""
    known = [value for value in values if value is not None]
    rises = [later - earlier for earlier, later in itertools.pairwise(known) if later - earlier > MIB]
    whole = [
        rise
        for rise in rises
        if (count := round(rise / WORKSPACE)) and count <= MOST_WORKSPACES and abs(rise - count * WORKSPACE) <= NEAR
    ]
    # One rise of a noisy series may come near by chance.
    return len(whole) >= 2 and len(whole) >= 0.8 * len(rises)
