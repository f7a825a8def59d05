"""A llama.cpp log that is being written, with what it says: the parts that all eras share."""

from __future__ import annotations

from decimal import Decimal
from random import Random
from typing import Any

from pytest_vram.ledger import Bucket, Entry
from pytest_vram.testing.bootlogs import Written

MIB = 1 << 20


class Log:
    """Lines and the ledger that they print.

    :ivar prefix: whether each line gets the engine's own prefix: its clock and a level.
    """

    def __init__(self, rng: Random, *, prefix: bool = False) -> None:
        self.rng = rng
        self.prefix = prefix
        self.lines: list[str] = []
        self.entries: list[Entry] = []
        self.devices: dict[str, str] = {}
        self._micros = rng.randrange(10**3, 10**5)

    def say(self, *texts: str, level: str = "I") -> None:
        """Lines of the engine."""
        for text in texts:
            self.lines.append(self._clock(level) + text if self.prefix else text)

    def raw(self, *texts: str) -> None:
        """The rest of a message of several lines, which has no prefix."""
        self.lines.extend(texts)

    def _clock(self, level: str) -> str:
        self._micros += self.rng.randrange(10, 900_000)
        seconds, micros = divmod(self._micros, 10**6)
        return f"{seconds // 60}.{seconds % 60:02d}.{micros // 1000:03d}.{micros % 1000:03d} {level} "

    def label(self, name: str) -> str:
        """The label of the device of a buffer: they count in the order in which the log uses them."""
        if name.startswith(("CPU", "BLAS", "AMX")) or name.endswith("_Host"):
            self.devices.setdefault("host", "CPU")
            return "host"
        device = name
        for flavour in ("_Mapped", "_Private", "_REPACK", "-REPACK"):
            device = device.removesuffix(flavour)
        known = {other: label for label, other in self.devices.items()}
        if device not in known:
            self.devices[f"gpu{sum(label != 'host' for label in self.devices)}"] = device
        return {other: label for label, other in self.devices.items()}[device]

    def entry(self, bucket: Bucket, device: str, size: int, resolution: int) -> None:
        """A figure that the reader must give back."""
        self.entries.append(
            Entry(bucket=bucket, device=self.label(device), bytes=size, source="engine-log", resolution=resolution)
        )

    def figure(self, largest: float = 9000.0) -> Decimal:
        """A random size in MiB, with two digits."""
        return Decimal(self.rng.randrange(1, int(largest * 100))) / 100

    def buffer(
        self, function: str, device: str, kind: str, bucket: Bucket, *, size: Decimal | None = None, width: int = 10
    ) -> Decimal:
        """One line of a buffer, and its entry; the printed size in MiB."""
        number = self.figure() if size is None else size
        what = f"{kind} " if kind else ""
        space = " " if kind == "output" else ""
        self.say(f"{function}: {device:>{width}} {space}{what}buffer size = {number:8.2f} MiB")
        self.entry(bucket, device, round(number * MIB), round(Decimal(MIB) / 200))
        return number

    def refused(self, device: str, number: int, size: int, *, family: str = "CUDA") -> None:
        """A refused allocation in CUDA's code, which ROCm builds share: by the driver's wrapper, then the allocator."""
        if family in ("CUDA", "ROCm"):
            self.say(
                f"ggml_backend_cuda_buffer_type_alloc_buffer: allocating {size / MIB:.2f} MiB on device {number}:"
                " cudaMalloc failed: out of memory",
                level="E",
            )

    def written(self, engine: str, facts: dict[str, Any], *, ready: bool = True, failure: str | None = None) -> Written:
        """The log so far."""
        return Written(
            engine=engine,
            text="\n".join(self.lines) + "\n",
            entries=tuple(self.entries),
            devices=self.devices,
            facts=facts,
            ready=ready,
            failure=failure,
        )


def split(rng: Random, number: int, parts: int) -> list[int]:
    """``number`` layers dealt out to ``parts`` devices, at least one for each."""
    marks = sorted(rng.sample(range(1, number), parts - 1)) if parts > 1 else []
    return [b - a for a, b in zip([0, *marks], [*marks, number], strict=True)]
