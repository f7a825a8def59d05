"""What a build of llama.cpp chooses for options that nobody gave, and which options it does not have yet.

Sources are change descriptions: #10136 (November 2024: a context of 4096 tokens), #14363 (July 2025: slots may have
caches of their own), #15434 (August 2025: flash attention and all layers), #16391 (October 2025: prompt cache), #16736
(November 2025: four slots that share a cache), #16653 (December 2025: the trained context, ``--fit``), #17997 (December
2025: ``--parallel 1`` is one slot again). Their builds are known by date, and so to some dozens; none was run here.
"""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from pytest_vram.sizing.options import Defaults, Era, LlamaOptions
from pytest_vram.sizing.shape import Note

STREAMS, FLASH, PROMPT_CACHE, SLOTS, FIT = 5913, 6325, 6720, 6929, 7410
#: The newest build whose source was read, and the oldest whose rules are followed.
NEWEST, OLDEST = 10773, STREAMS
#: Ranges of builds in which a default may or may not hold, as in :data:`pytest_vram.sizing.eras._UNSURE`.
UNSURE = (
    (FLASH - 20, FLASH + 20, "what is the default of flash attention and of the layers on the device"),
    (SLOTS - 30, SLOTS + 30, "how many slots there are by default"),
    (FIT - 50, FIT + 50, "the default context, and whether there is --fit"),
)
#: Option → first build with it, and when that was.
_SINCE = {
    "swa-full": (5439, "May 2025"),
    "kv-unified": (STREAMS, "July 2025"),
    "cpu-moe": (6085, "August 2025"),
    "n-cpu-moe": (6085, "August 2025"),
    "cache-ram": (PROMPT_CACHE, "October 2025"),
    "ctx-checkpoints": (PROMPT_CACHE, "October 2025"),
    "fit": (FIT, "December 2025"),
    "fit-target": (FIT, "December 2025"),
    "fit-ctx": (FIT, "December 2025"),
    "load-mode": (10069, "between b10068 and b10434"),
    "lazy-mode": (10069, "after b10068"),
    "n-cpu-ffn": (10069, "after b10068"),
    "kv-unified-per-slot": (10069, "after b10068"),
}


def of_build(build: int) -> Defaults:
    """The defaults of a build by its number."""
    return Defaults(
        flash=build >= FLASH,
        all_layers=build >= FLASH,
        context=0 if build >= FIT else 4096,
        slots=4 if build >= SLOTS else 1,
        one_slot_is_auto=SLOTS <= build < FIT,
        streams=build >= STREAMS,
        fit=build >= FIT,
        prompt_cache=build >= PROMPT_CACHE,
        mlock_maps=build < 10069,
    )


def of_options(options: Collection[str]) -> Defaults:
    """The defaults of a build whose number says nothing, by the long options of its ``--help``."""
    build = next((first for name, first in _SHOWN if name in options), STREAMS - 1)
    return of_build(build)


#: Options that came with a default, the newest first.
_SHOWN = (("load-mode", NEWEST), ("fit", 10068), ("cache-ram", PROMPT_CACHE), ("kv-unified", STREAMS))


def in_force(options: LlamaOptions, era: Era, given: Collection[str] = ()) -> tuple[LlamaOptions, tuple[Note, ...]]:
    """The options as a build takes them: its own defaults for what was left open.

    :param given: full names of the options that were given.
    """
    rules = era.defaults
    if rules == Defaults():
        return options, _missing(era, given)
    changed: dict[str, object] = {}
    said: list[tuple[str, str]] = []
    build = f"b{era.build}" if era.build else "this build"
    if options.flash_attn == "auto" and not rules.flash:
        changed["flash_attn"] = "off"
        said.append(("compute", f"flash attention is off in {build} unless it is asked for (before August 2025)"))
    if options.n_gpu_layers is None and not rules.all_layers and options.devices and "n-gpu-layers" not in given:
        changed["n_gpu_layers"] = 0
        said.append(("weights", f"n-gpu-layers is not given: no layer is on a device in {build} (before August 2025)"))
    if not options.ctx_size and rules.context and "ctx-size" not in given:
        changed["ctx_size"] = rules.context
        said.append(("kv", f"ctx-size is not given: {rules.context} tokens in {build} (before December 2025)"))
    if options.parallel is None and rules.slots == 1:
        changed["parallel"] = 1
        said.append(("kv", f"parallel is not given: one slot in {build} (before November 2025)"))
    elif options.parallel == 1 and rules.one_slot_is_auto and not options.kv_unified and options.draft is None:
        changed["parallel"] = None
        said.append(("kv", f"{build} makes one slot into four that share one cache (November and December 2025)"))
    if not rules.streams and options.parallel not in (None, 1):
        changed["kv_unified"] = True
        said.append(("kv", f"slots share one cache in {build} (before July 2025)"))
    if not rules.prompt_cache:
        changed["cache_ram"] = 0
    if options.mlock and not options.mmap and rules.mlock_maps and "mlock" in given and "mmap" not in given:
        changed["mmap"] = True
    notes = [Note(kind="assumed", bucket=bucket, text=text) for bucket, text in said]
    return msgspec.structs.replace(options, **changed), (*notes, *_missing(era, given))


def _missing(era: Era, given: Collection[str]) -> tuple[Note, ...]:
    """What was asked for of a build that is older than the option."""
    if era.build is None:
        return ()
    return tuple(
        Note(kind="warning", text=f"b{era.build} has no --{name}, which came later ({when}), and would refuse it")
        for name, (first, when) in _SINCE.items()
        if name in given and era.build < first
    )


def bounds(build: int) -> tuple[Note, ...]:
    """What to say of a build that is newer than what was read, or older than what is followed."""
    if build > NEWEST:
        text = f"b{build} is newer than b{NEWEST}, the newest build whose source was read: its rules are used"
        return (Note(kind="assumed", text=text),)
    if build < OLDEST:
        text = (
            f"b{build} is older than b{OLDEST} (July 2025), the oldest whose rules are followed: caches of windows "
            "and buffers were larger before"
        )
        return tuple(Note(kind="unknown", bucket=bucket, text=text) for bucket in ("kv", "compute"))
    return ()
