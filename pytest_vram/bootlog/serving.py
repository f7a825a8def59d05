"""What llama-server prints while it serves: the prompt cache and the context checkpoints that it keeps on the host.

The lines are those of ``tools/server`` from October 2025 on, at the verbosity at which buffers are printed.
"""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

from pytest_vram.units import MIB

#: Bytes of a log that are read, from its end: the last lines are the ones that count.
MOST = 8 << 20
_STATE = re.compile(r"cache state: (\d{1,9}) prompts, ([\d.]{1,15}) MiB", re.ASCII)
_CREATED = re.compile(r"id +(\d{1,5}) \|.{0,80}created context checkpoint .{0,160}size = ([\d.]{1,15}) MiB", re.ASCII)
_ERASED = re.compile(r"id +(\d{1,5}) \|.{0,80}eras\w+ .{0,40}checkpoint .{0,160}size = ([\d.]{1,15}) MiB", re.ASCII)
_NEW = re.compile(r"id +(\d{1,5}) \|.{0,80}new prompt, n_ctx_slot", re.ASCII)


class Caches(msgspec.Struct, frozen=True, kw_only=True):
    """Host memory that the engine says it keeps for prompts to come, in bytes.

    :ivar prompts: the prompt cache by its last line, ``None`` where no line says. :ivar checkpoints: made and not
        erased since then, slot by slot; what a slot's new prompt does with older ones is not printed.
    """

    prompts: int | None = None
    checkpoints: int = 0


def caches(text: str) -> Caches:
    """Read the lines that were written while requests were served; lines about anything else do not matter."""
    prompts: int | None = None
    by_slot: dict[str, int] = {}
    for line in text.split("\n"):
        if "checkpoint" in line:
            if (made := _CREATED.search(line)) is not None:
                by_slot[made[1]] = by_slot.get(made[1], 0) + _bytes(made[2])
            elif (gone := _ERASED.search(line)) is not None:
                by_slot[gone[1]] = max(0, by_slot.get(gone[1], 0) - _bytes(gone[2]))
        elif "cache state" in line and (state := _STATE.search(line)) is not None:
            prompts = _bytes(state[2])
        elif "new prompt" in line and (new := _NEW.search(line)) is not None:
            # Those of the prompt before went into the prompt cache, or are gone.
            by_slot.pop(new[1], None)
    return Caches(prompts=prompts, checkpoints=sum(by_slot.values()))


def caches_of(log: Path | None) -> Caches:
    """The same of a log file, of its last :data:`MOST` bytes; nothing where it cannot be read."""
    if log is None:
        return Caches()
    try:
        with log.open("rb") as stream:
            size = stream.seek(0, 2)
            stream.seek(max(0, size - MOST))
            return caches(stream.read(MOST).decode("utf-8", "replace"))
    except OSError:
        return Caches()


def _bytes(number: str) -> int:
    try:
        return round(float(number) * MIB)
    except (ValueError, OverflowError):  # several points in it, or more than a float has
        return 0
