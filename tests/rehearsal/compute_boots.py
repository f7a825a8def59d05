"""Compute buffers of drawn models, as a real boot prints them and as they are predicted."""

from __future__ import annotations

from pathlib import Path

import msgspec

from pytest_vram.backends import flags
from pytest_vram.ledger import Entry
from pytest_vram.sizing import eras, gguf, gguf_shape, placement
from pytest_vram.sizing.compute import compute_buffers
from tests.rehearsal import sizing_boots as boots


class Buffer(msgspec.Struct, frozen=True, kw_only=True):
    """One device's compute buffer (and output buffer) in bytes; ``resolution`` is what the print leaves open."""

    device: str
    predicted: int
    at_most: int
    printed: int
    resolution: int

    @property
    def error(self) -> float:
        """Distance of the farther end from what was printed, relative to it, beyond the printed digits.

        Buffers of less than 64 KiB count as 64 KiB: their errors are of no use to anybody.
        """
        distance = max(abs(self.predicted - self.printed), abs(self.at_most - self.printed)) - self.resolution
        return max(0, distance) / max(1 << 16, self.printed)


def compare(executable: Path, folder: Path, one: boots.Draw, gpus: boots.Gpus) -> list[Buffer]:
    """Boot one configuration; every device that has a compute buffer on either side.

    :raises AssertionError: the engine refused what was drawn.
    """
    model = one.recipe.write(folder / "model.gguf")
    shape = gguf_shape.shape_of(gguf.read(model))
    where = placement.place(shape, one.options)
    era, _ = eras.era_of(None, flags.help_of(executable).long_names())
    rows: dict[str, list[int]] = {}
    for entry in compute_buffers(shape, one.options, where, era):
        row = rows.setdefault(entry.device, [0, 0, 0, 0])
        row[0] += entry.bytes
        row[1] += entry.bytes if entry.at_most is None else entry.at_most
    printed: list[Entry] = []
    for left in (2, 1, 0):
        boot = boots.booted(executable, model, one, gpus.endpoints() if one.gpus else [])
        printed = [entry for entry in boot.entries if entry.bucket == "compute"]
        if printed and (not one.gpus or gpus.alive()):
            break
        # A device that died under the last boot shows in this one.
        assert left, f"the engine did not boot with {' '.join(one.arguments)}: {boot.failure}"
    for entry in printed:
        row = rows.setdefault(entry.device, [0, 0, 0, 0])
        row[2] += entry.bytes
        row[3] += entry.resolution
    return [
        Buffer(device=device, predicted=low, at_most=high, printed=seen, resolution=open_)
        for device, (low, high, seen, open_) in rows.items()
    ]
