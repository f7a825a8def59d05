"""Readings of idle memory as plain numbers, and those that cannot be true."""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import SupportsIndex

import msgspec

from pytest_vram.readings import Measured, Reading, Unmeasurable
from pytest_vram.units import MIB, mib

#: A counter of 64 bits that ran over or was never filled.
IMPOSSIBLE = 1 << 62
#: The layer whose figures may be shares of one instead of bytes.
USAGE = "kv-usage"
#: What torch's counter may show beyond the driver's figure: they are not read at one moment.
SLACK = 64 * MIB
SHARE = 1.05
#: No process that serves a model holds less while it idles; plain figures below are in another unit.
LEAST = MIB
#: Layers that are never so small: plain figures, a process, a device, and host memory.
HELD = ("", "process", "rpc", "device", "host")
#: Share of turns at which two layers contradict each other before they are not believed.
OFTEN = 0.1

LAYER_OF_SOURCE = {
    "torch-allocated": "torch-allocated",
    "torch-reserved": "torch-reserved",
    "nvml-process": "process",
    "drm-fdinfo": "process",
    "nvml-device": "device",
    "device-delta": "device",
}


class Cleaned(msgspec.Struct, frozen=True, kw_only=True):
    """One layer's figures.

    :ivar values: per turn; ``None`` where it could not be read, for the ``reasons`` (with how often).
    :ivar wide: the widest interval among the readings, in bytes. :ivar lower_ends: readings that are lower ends only.
    :ivar impossible: a sentence, where a figure cannot be true. :ivar source: the layer that the readings name.
    """

    values: list[float | None]
    reasons: dict[str, int]
    wide: int = 0
    lower_ends: int = 0
    impossible: str | None = None
    source: str = ""

    @property
    def known(self) -> int:
        """How many turns were read."""
        return sum(value is not None for value in self.values)


def clean(layer: str, readings: Sequence[Measured | int | None], capacity: int | None, limit: int | None) -> Cleaned:
    """The figures of one layer, and why they cannot be true, if so.

    :param capacity: bytes of the device; no figure is above. :param limit: stands for it in what torch reserved, where
        the capacity is not known and no driver's figure is there to compare with (``None``: it is).
    """
    values: list[float | None] = []
    reasons: Counter[str] = Counter()
    sources: Counter[str] = Counter()
    wide = lower_ends = 0
    impossible: str | None = None
    for place, reading in enumerate(readings):
        if reading is None or isinstance(reading, Unmeasurable):
            reasons["no reason was given" if reading is None else reading.reason] += 1
            values.append(None)
            continue
        value: object = reading
        source = layer
        if isinstance(reading, Reading):
            value = reading.bytes
            source = LAYER_OF_SOURCE.get(reading.source, reading.device if reading.device == "host" else "process")
            sources[source] += 1
            wide = max(wide, reading.upper - reading.bytes)
            lower_ends += reading.missed is not None
        figure, wrong = _number(value, share=layer == USAGE)
        if wrong is None:
            wrong = _beyond(figure, layer if layer.startswith("torch") else source, capacity, limit)
        if wrong is not None and impossible is None:
            where = f" of `{layer}`" if layer else ""
            impossible = f"The reading{where} at turn {place + 1} {wrong}"
        values.append(figure)
    return Cleaned(
        values=values,
        reasons=dict(reasons),
        wide=wide,
        lower_ends=lower_ends,
        impossible=impossible,
        source=sources.most_common(1)[0][0] if sources else "",
    )


def too_small(named: Mapping[str, Sequence[object]], floor: float) -> str | None:
    """A sentence where plain figures are all so small that their unit cannot be bytes, else ``None``.

    Of torch's sources, which may be small, and of a pool, which may be empty, that cannot be said; a
    :class:`pytest_vram.readings.Reading` says itself what it is.

    :param floor: of the verdict, in bytes; who sets it below :data:`LEAST` means such figures.
    """
    if floor < LEAST:
        return None
    for layer in HELD:
        readings = named.get(layer, ())
        plain = [reading for reading in readings if isinstance(reading, int | float) and not isinstance(reading, bool)]
        highest = max(plain, default=LEAST)
        if len(plain) < 2 or len(plain) < len(readings) / 2 or not 0 <= highest < LEAST:
            continue
        which = f"All readings of `{layer}`" if layer else "All readings"
        if highest == 0:
            return (
                f"{which} are 0: nothing that serves a model holds no memory; a counter that cannot be read is "
                "written as None."
            )
        return (
            f"{which} are below 1 MiB (the highest is {highest:,}), so that no leak could be seen in them: "
            "judge_idle takes bytes; multiply figures in MiB by 1048576."
        )
    return None


def _number(value: object, *, share: bool) -> tuple[float, str | None]:
    if isinstance(value, bool):
        return 0.0, f"is {value}, not a number of bytes."
    if isinstance(value, float):
        if not math.isfinite(value):
            return 0.0, f"is {value}, which no counter holds: the read failed and its result was kept."
        if not share and not value.is_integer():
            return 0.0, f"is {value!r}, not a whole number of bytes."
        size = value
    else:
        try:
            exact = operator.index(value) if isinstance(value, SupportsIndex) else None
        except TypeError:  # an array of several, or of other numbers
            exact = None
        if exact is None:
            return 0.0, f"is a {type(value).__name__}, not a number of bytes."
        size = float(max(-IMPOSSIBLE, min(exact, IMPOSSIBLE)))
    if size < 0:
        return 0.0, f"is negative ({size:,.0f} bytes): a difference of two counters, or an overflow."
    if size >= IMPOSSIBLE:
        return 0.0, "is beyond any memory (2^62 bytes or more): an unset or overflown counter of 64 bits."
    return size, None


def _beyond(size: float, layer: str, capacity: int | None, limit: int | None) -> str | None:
    if layer in (USAGE, "host"):
        return None
    if capacity is not None and size > capacity:
        return f"is {mib(int(size))}, more than the {mib(capacity)} of the device: the counter is not to be believed."
    if capacity is None and limit is not None and layer == "torch-reserved" and size > limit:
        return (
            f"says that torch reserved {mib(int(size))}, more than the {mib(limit)} that are there: it counts memory "
            "that is no longer mapped. Judge the driver's figure instead."
        )
    return None


def contradiction(layers: Mapping[str, Cleaned]) -> str | None:
    """A sentence where two layers cannot both be true, else ``None``."""
    for inner, outer, said in (
        ("torch-allocated", "torch-reserved", "torch's live tensors are more than what it reserved"),
        ("torch-reserved", "process", "torch reserved more than the driver says that the process holds"),
        ("torch-reserved", "device", "torch reserved more than is used on the whole device"),
        ("torch-allocated", "process", "torch's live tensors are more than the driver says that the process holds"),
    ):
        if inner not in layers or outer not in layers:
            continue
        pairs = [
            (one, other)
            for one, other in zip(layers[inner].values, layers[outer].values, strict=True)
            if one is not None and other is not None
        ]
        wrong = [(one, other) for one, other in pairs if one > SHARE * other + SLACK]
        if pairs and len(wrong) > max(1, OFTEN * len(pairs)):
            one, other = max(wrong, key=lambda pair: pair[0] - pair[1])
            return (
                f"At {len(wrong)} of {len(pairs)} turns {said} ({mib(int(one))} against {mib(int(other))} at worst): "
                "one of the two counters is not to be believed."
            )
    return _stuck(layers)


def _stuck(layers: Mapping[str, Cleaned]) -> str | None:
    """A driver's figure that never moves while what torch reserved inside of it does."""
    for outer in ("process", "device"):
        if outer not in layers or "torch-reserved" not in layers:
            continue
        held = [value for value in layers[outer].values if value is not None]
        inner = [value for value in layers["torch-reserved"].values if value is not None]
        if len(held) > 2 and inner and min(held) == max(held) and max(inner) - min(inner) > SLACK:
            return (
                f"The figure of `{outer}` is {mib(int(held[0]))} at every turn while what torch reserved moved by "
                f"{mib(int(max(inner) - min(inner)))}: the source of `{outer}` is stuck."
            )
    return None
