"""What the sources show of a setting: the boot log's facts, the buffers that it prints, and the running server."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from pytest_vram.backends.base import Properties
from pytest_vram.ledger import Bucket, Entry
from pytest_vram.spec import OptionValue
from pytest_vram.units import mib

LOG, BUFFERS, SERVER = "the boot log", "the printed buffers", "the running server"
#: llama.cpp rounds a context up to a multiple of this many tokens.
CONTEXT_STEP = 256
#: Counts that may be asked for as "all", or as more than there are.
EVERYTHING = ("all", "max")
_SWITCHES = {"on": True, "true": True, "enabled": True, "off": False, "false": False, "disabled": False}
_PLACED: tuple[Bucket, ...] = ("weights", "experts", "kv", "recurrent")
#: A part of the layers, of the whole, by which a split over devices may differ from what was asked for.
_SPLIT = 0.15
UNLOCKED = (
    "the engine could not lock the model's memory, so the kernel may page it out when host memory is short, and"
    " requests then wait for the disk; raise the limit of the user (`ulimit -l`, RLIMIT_MEMLOCK) or remove the option"
)


class Shown(NamedTuple):
    """One source's word on a setting: ``problem`` is empty where it agrees with what was asked for."""

    source: str
    problem: str = ""


class Sources(NamedTuple):
    """Everything that can show a setting.

    :ivar entries: the boot's printed buffers. :ivar complete: every buffer was printed, so that one that is missing
        was not made. :ivar devices: label → the engine's name of the device.
    :ivar locked: bytes that the server's processes have locked; ``None``: not known.
    """

    facts: Mapping[str, Any]
    properties: Properties
    entries: Sequence[Entry] = ()
    complete: bool = False
    devices: Mapping[str, str] = {}
    warnings: Sequence[str] = ()
    locked: int | None = None

    def held(self, *buckets: Bucket) -> dict[str, int]:
        """Label → printed bytes of these buckets."""
        found: dict[str, int] = {}
        for entry in self.entries:
            if entry.bucket in buckets and entry.bytes:
                found[entry.device] = found.get(entry.device, 0) + entry.bytes
        return found


def of_setting(name: str, value: OptionValue, sources: Sources) -> list[Shown]:
    """What each source that speaks of a setting says of it; empty where none does."""
    special = _SPECIAL.get(name)
    if special is not None:
        return [shown for shown in special(value, sources) if shown is not None]
    found = []
    for source, values in ((LOG, sources.facts), (SERVER, sources.properties.settings)):
        if name in values:
            real = values[name]
            found.append(Shown(source, "" if same(value, real) else f"asked for {value}, got {real}"))
    return found


def context_holds(asked: int, served: int, slots: int | None = None, unified: object = None) -> bool:
    """Whether a context of so many tokens is the one asked for, rounded up at most.

    llama.cpp rounds the whole up, and then the share of each slot where slots do not share one cache
    (``llama_context`` in its ``src/llama-context.cpp``): 4,100 tokens for 8 slots become 6,144.

    :param slots: how many there are. :param unified: whether they share one cache; ``None``: not known.
    """
    if asked <= served < asked + CONTEXT_STEP:
        return True
    if not slots or slots < 2 or unified is True:
        return False
    return served == slots * _stepped(_stepped(asked) // slots)


def _stepped(tokens: int) -> int:
    return -(-tokens // CONTEXT_STEP) * CONTEXT_STEP


def sharing(facts: Mapping[str, Any], properties: Properties | None) -> tuple[int | None, object]:
    """How many slots there are, by the log or else the server, and whether they share one cache."""
    slots = facts.get("slots")
    settings: Mapping[str, object] = {}
    if properties is not None:
        slots = properties.slots if slots is None else slots
        settings = properties.settings
    return slots if isinstance(slots, int) else None, facts.get("kv_unified", settings.get("kv_unified"))


def same(asked: object, real: object) -> bool:
    """Whether two values say the same: ``on``, ``true``, ``enabled`` and 1, ``F16`` and ``f16``, 0.9 and 0.90."""
    first, second = plain(asked), plain(real)
    if isinstance(first, int | float) and isinstance(second, int | float):
        return math.isclose(first, second, rel_tol=1e-4)
    return first == second


def plain(value: object) -> object:
    """Values in one spelling."""
    if isinstance(value, str):
        word = value.strip().lower()
        return _SWITCHES.get(word, word)
    return value


# ---------------------------------------------------------------- settings that need more than a comparison

Answer = Iterable[Shown | None]


def _context(value: OptionValue, sources: Sources) -> Answer:
    real, served = sources.facts.get("context"), sources.properties.context
    shared = sharing(sources.facts, sources.properties)
    if isinstance(value, int) and isinstance(real, int):
        yield Shown(LOG, "" if context_holds(value, real, *shared) else f"asked for {value}, got {real}")
    if isinstance(value, int) and served is not None:
        text = f"asked for {value}, the running server serves {served}"
        yield Shown(SERVER, "" if context_holds(value, served, *shared) else text)


def _context_per_slot(value: OptionValue, sources: Sources) -> Answer:
    real, served = sources.facts.get("context_per_slot"), sources.properties.context_per_slot
    if isinstance(value, int) and isinstance(real, int):
        yield Shown(LOG, "" if context_holds(value, real) else f"asked for {value}, got {real}")
    if isinstance(value, int) and served is not None:
        text = f"asked for {value}, the running server serves {served}"
        yield Shown(SERVER, "" if context_holds(value, served) else text)


def _slots(value: OptionValue, sources: Sources) -> Answer:
    if "slots" in sources.facts:
        real = sources.facts["slots"]
        yield Shown(LOG, "" if same(value, real) else f"asked for {value}, got {real}")
    served = sources.properties.slots
    if served is not None:
        yield Shown(SERVER, "" if served == value else f"asked for {value}, the running server has {served}")


def _capped(name: str, cap: str, step: int) -> Callable[[OptionValue, Sources], Answer]:
    """A batch is never larger than what it is a part of; one that was cut to that is all that could be had.

    :param step: by how much less than that it may be, where that is rounded up afterwards.
    """

    def judge(value: OptionValue, sources: Sources) -> Answer:
        if name not in sources.facts:
            return
        real, most = sources.facts[name], sources.facts.get(cap)
        cut = False
        if isinstance(value, int) and isinstance(real, int) and isinstance(most, int):
            cut = real < value and most - step < real <= most
        yield Shown(LOG, "" if cut or same(value, real) else f"asked for {value}, got {real}")

    return judge


def _locked(value: OptionValue, sources: Sources) -> Answer:
    # The engine says only when it could not.
    yield Shown(LOG, UNLOCKED if sources.facts.get("mlock", value) != value else "")
    if sources.locked == 0 and sources.facts.get("mlock") is not False:
        yield Shown("the kernel", "the server's processes have locked no memory, and the log has no complaint of it")


def _mapped(value: OptionValue, sources: Sources) -> Answer:
    real = sources.facts.get("mmap")
    if real is None and isinstance(sources.facts.get("load_mode"), str):
        real = "mmap" in sources.facts["load_mode"]
    if real is not None:
        yield Shown(LOG, "" if same(value, real) else f"asked for {value}, got {real}")


def _layers(value: OptionValue, sources: Sources) -> Answer:
    facts = sources.facts
    if "layers_offloaded" not in facts:
        return
    total, real = facts.get("layers_offloadable"), facts["layers_offloaded"]
    want = total if value in EVERYTHING else value
    if isinstance(want, int) and isinstance(total, int):
        want = min(want, total)
    yield Shown(LOG, "" if want == real else f"asked for {value}, got {real} of {total}")
    if want and want == real and facts.get("layers_on_device_real") == 0:
        yield Shown(BUFFERS, f"the engine says {real} of {total}, but no buffer of the model is on a device")


def _prefixed(name: str) -> Callable[[OptionValue, Sources], Answer]:
    """A kind that the engine may name more exactly: ``awq`` runs as ``awq_marlin``, ``fp8`` is ``fp8_e4m3``."""

    def judge(value: OptionValue, sources: Sources) -> Answer:
        for source, values in ((LOG, sources.facts), (SERVER, sources.properties.settings)):
            if name in values:
                real = values[name]
                exact = isinstance(value, str) and isinstance(real, str) and real.lower().startswith(value.lower())
                yield Shown(source, "" if exact else f"asked for {value}, got {real}")

    return judge


def _prompt_cache(value: OptionValue, sources: Sources) -> Answer:
    limit, on = sources.facts.get("prompt_cache_limit_bytes"), sources.facts.get("prompt_cache")
    if on is False or (limit is None and on is None):
        if on is False:
            yield Shown(LOG, "" if value == 0 else "the prompt cache is disabled")
        return
    if limit is None:
        yield Shown(LOG, "the prompt cache is enabled") if value == 0 else None
        return
    yield Shown(LOG, "" if limit == value else f"asked for {value} bytes, got {limit}")


def _loaded(name: str, bucket: Bucket, said: Callable[[Properties], bool | None]) -> Callable[..., Answer]:
    """Something that is loaded beside the model: it has buffers of its own, or the server says that it has it."""

    def judge(value: OptionValue, sources: Sources) -> Answer:
        if sources.held(bucket) or sources.facts.get(f"{name}_kv_bytes"):
            yield Shown(BUFFERS)
        server = said(sources.properties)
        if server is not None:
            yield Shown(SERVER, "" if server else f"a {name} was given, the running server has none")

    return judge


def _experts(value: OptionValue, sources: Sources) -> Answer:
    facts = sources.facts
    if facts.get("experts") == 0:
        yield Shown(LOG, "the model has no experts, so nothing is kept on the host by it")
        return
    if set(sources.held(*_PLACED)) == {"host"} and sources.complete:
        yield Shown(BUFFERS)  # all of the model is on the host
        return
    moved = facts.get("tensor_overrides")
    if isinstance(moved, int):
        layers = facts.get("layers")
        want = min(value, layers) if type(value) is int and isinstance(layers, int) else 1
        yield Shown(
            LOG, "" if moved >= 1 and (moved >= want or value is True) else f"{moved} tensors were placed by it"
        )


def _overridden(value: OptionValue, sources: Sources) -> Answer:
    if sources.facts.get("tensor_overrides"):
        yield Shown(LOG)


def _cache_on_host(value: OptionValue, sources: Sources) -> Answer:
    held = sources.held("kv", "recurrent")
    if held:
        elsewhere = ", ".join(f"{mib(size)} on {label}" for label, size in held.items() if label != "host")
        yield Shown(BUFFERS, f"the KV cache is not on the host: {elsewhere}" if elsewhere else "")


def _whole_window(value: OptionValue, sources: Sources) -> Answer:
    facts = sources.facts
    if facts.get("sliding_window") == 0 or any("swa_full is not supported" in text for text in sources.warnings):
        yield Shown(LOG, "the model has no sliding window, so there is nothing to keep in full")
    elif isinstance(facts.get("kv_cells_sliding"), int) and isinstance(facts.get("kv_cells"), int):
        short, long = facts["kv_cells_sliding"], facts["kv_cells"]
        yield Shown(LOG, "" if short >= long else f"layers with a window have {short} cells, the others {long}")


def _device(value: OptionValue, sources: Sources) -> Answer:
    held = sources.held(*_PLACED)
    if not held or not sources.complete:
        return
    used = {sources.devices.get(label, label): label for label in held if label != "host"}
    if value == "none":
        yield Shown(BUFFERS, f"the model is on {', '.join(used)} all the same" if used else "")
        return
    wanted = [name.strip() for name in str(value).split(",")]
    strange = [name for name in used if not any(name.startswith(one) for one in wanted)]
    missing = [one for one in wanted if not any(name.startswith(one) for name in used)]
    text = "; ".join(
        [f"{name} is used, which was not asked for" for name in strange]
        + [f"nothing of the model is on {one}" for one in missing]
    )
    yield Shown(BUFFERS, text)


def _split(value: OptionValue, sources: Sources) -> Answer:
    held = {label: size for label, size in sources.held("kv", "recurrent").items() if label != "host"}
    labels = [label for label in sources.devices if label != "host"]
    try:
        shares = [float(part) for part in str(value).replace("/", ",").split(",")]
    except ValueError:
        return
    if not held or len(shares) < len(labels) or sum(shares) <= 0:
        return
    whole = sum(held.values())
    rows = []
    for label, share in zip(sorted(labels), shares, strict=False):
        want, real = share / sum(shares), held.get(label, 0) / whole
        if abs(want - real) > _SPLIT or (real > 0) != (want > 0):
            rows.append(f"{label} was to have {want:.0%}, and has {real:.0%} of the cache")
    yield Shown(BUFFERS, "; ".join(rows))


def _split_mode(value: OptionValue, sources: Sources) -> Answer:
    used = [label for label in sources.held(*_PLACED) if label != "host"]
    if value == "none" and sources.complete:
        yield Shown(BUFFERS, f"the model is on {len(used)} devices: {', '.join(used)}" if len(used) > 1 else "")
    elif value == "layer" and used:
        # On one device there is nothing to split.
        known = [label for label in sources.devices if label != "host"]
        yield Shown(BUFFERS, f"all of it is on {used[0]}" if len(used) == 1 < len(known) else "")


_SPECIAL: dict[str, Callable[[OptionValue, Sources], Answer]] = {
    "context": _context,
    "context_per_slot": _context_per_slot,
    "slots": _slots,
    "batch": _capped("batch", "context", CONTEXT_STEP),
    "ubatch": _capped("ubatch", "batch", 1),
    "mlock": _locked,
    "mmap": _mapped,
    "layers_offloaded": _layers,
    "quantization": _prefixed("quantization"),
    "cache_type": _prefixed("cache_type"),
    "prompt_cache_limit_bytes": _prompt_cache,
    "draft": _loaded("draft", "draft", lambda said: said.draft),
    "projector": _loaded("projector", "projector", lambda said: said.projector),
    "lora": _loaded("lora", "lora", lambda said: None if said.adapters is None else said.adapters > 0),
    "n_cpu_moe": _experts,
    "cpu_moe": _experts,
    "override_tensor": _overridden,
    "kv_offload": _cache_on_host,
    "swa_full": _whole_window,
    "device": _device,
    "tensor_split": _split,
    "split_mode": _split_mode,
}
