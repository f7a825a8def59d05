"""What torch's allocator says of the process that the tests run in. torch is never imported here.

Only where a test has imported torch and used CUDA already is it asked; then its high-water marks are set back when a
window opens and read when it closes. The figures are exact for what the allocator sees: not the CUDA context, not the
libraries, not other processes. So they are a lower bound of what the process holds.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from pytest_vram.measure.device import DeviceInfo
from pytest_vram.measure.sanity import beyond, refuse
from pytest_vram.readings import Measured, Reading, Unmeasurable

ALLOCATED, RESERVED = "torch-allocated", "torch-reserved"
_SEEN = "what torch's allocator sees: no CUDA context, no libraries, no other process"
_KEYS = {ALLOCATED: "allocated_bytes.all.peak", RESERVED: "reserved_bytes.all.peak"}


class Allocator(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """torch's allocator on one device over one window.

    :ivar device: label of the device, or torch's own name of it where the run does not measure it.
    :ivar allocated: peak of live tensors. :ivar reserved: peak of what the allocator took from the driver.
    :ivar inactive_split: peak bytes that lay between live blocks and could not be given back (fragmentation).
    :ivar retries: allocations that succeeded only after the cache was emptied. :ivar ooms: that failed.
    :ivar spill: bytes of ``reserved`` beyond the card, where such allocations succeed in host memory.
    """

    device: str
    name: str
    allocated: Measured
    reserved: Measured
    inactive_split: int = 0
    retries: int = 0
    ooms: int = 0
    spill: Measured | None = None


class TorchMemory:
    """The allocator of this process.

    :param modules: loaded modules by name; a stand-in for tests.
    """

    def __init__(self, modules: Mapping[str, Any] = sys.modules, platform: str = sys.platform) -> None:
        self._modules = modules
        self._oversubscribes = platform == "win32"
        self._counts: dict[int, tuple[int, int]] = {}

    def _cuda(self) -> Any | None:
        torch = self._modules.get("torch")
        cuda = getattr(torch, "cuda", None) if torch is not None else None
        try:
            return cuda if cuda is not None and cuda.is_initialized() else None
        except (AttributeError, RuntimeError):  # half imported, or broken
            return None

    @property
    def in_use(self) -> bool:
        """Whether torch uses CUDA in this process."""
        return self._cuda() is not None

    def begin(self) -> None:
        """A window opens: set the marks back. Does nothing where torch has not used CUDA."""
        self._counts = {}
        cuda = self._cuda()
        if cuda is None:
            return
        try:
            for index in range(cuda.device_count()):
                stats = cuda.memory_stats(index)
                self._counts[index] = (stats.get("num_alloc_retries", 0), stats.get("num_ooms", 0))
                cuda.reset_peak_memory_stats(index)
        except (AttributeError, RuntimeError, AssertionError, ValueError):
            self._counts = {}

    def end(self, devices: Sequence[DeviceInfo]) -> list[Allocator]:
        """The window closes: what the allocator held at most since :meth:`begin`, on each device that it used.

        Where CUDA came into use within the window, its marks are those of its whole life, which is the same.
        """
        cuda = self._cuda()
        if cuda is None:
            return []
        found: list[Allocator] = []
        try:
            for index in range(cuda.device_count()):
                stats = cuda.memory_stats(index)
                if stats.get(_KEYS[RESERVED], 0) or stats.get("num_ooms", 0):
                    found.append(self._one(index, stats, cuda.get_device_properties(index), devices))
        except (AttributeError, RuntimeError, AssertionError, ValueError) as error:
            reason = f"torch's allocator could not be read: {type(error).__name__}: {error}"
            missing = Unmeasurable(reason=reason, source=RESERVED, scope="process")
            return [Allocator(device="cuda", name="CUDA", allocated=missing, reserved=missing)]
        return found

    def _one(self, index: int, stats: Mapping[str, int], properties: Any, devices: Sequence[DeviceInfo]) -> Allocator:
        info = _same(index, properties, devices)
        label = info.label if info is not None else f"cuda:{index}"
        capacity = int(properties.total_memory)
        oversubscribes = self._oversubscribes or (info is not None and info.oversubscribes)
        figures = {
            source: _reading(stats.get(key, 0), source, label, capacity, oversubscribes)
            for source, key in _KEYS.items()
        }
        reserved = figures[RESERVED]
        spilled = beyond(reserved.bytes, capacity) if oversubscribes and isinstance(reserved, Reading) else 0
        retries, ooms = self._counts.get(index, (0, 0))
        return Allocator(
            device=label,
            name=str(properties.name),
            allocated=figures[ALLOCATED],
            reserved=reserved,
            inactive_split=stats.get("inactive_split_bytes.all.peak", 0),
            retries=stats.get("num_alloc_retries", 0) - retries,
            ooms=stats.get("num_ooms", 0) - ooms,
            spill=Reading(
                bytes=spilled,
                source=RESERVED,
                scope="process",
                device=label,
                exact=True,
                note=f"reserved beyond the {capacity:,} bytes of the card",
            )
            if spilled
            else None,
        )


def _reading(size: int, source: str, label: str, capacity: int, oversubscribes: bool) -> Measured:
    reason = refuse(size, capacity=capacity, oversubscribes=oversubscribes, source=source)
    if reason is not None:
        return Unmeasurable(reason=reason, source=source, scope="process", device=label)
    return Reading(bytes=size, source=source, scope="process", device=label, exact=True, note=_SEEN)


def _same(index: int, properties: Any, devices: Iterable[DeviceInfo]) -> DeviceInfo | None:
    """The device of the run that torch calls ``cuda:index``: by its UUID; by name where there is one of that name."""
    cards = [device for device in devices if device.kind in ("nvml", "drm", "unified")]
    uuid = str(getattr(properties, "uuid", "") or "").lower()
    if uuid:
        for device in cards:
            if device.uuid is not None and uuid in device.uuid.lower():
                return device
    named = [device for device in cards if device.name == properties.name]
    if len(named) == 1 and (not uuid or named[0].uuid is None):
        return named[0]
    return None


def bounded(
    figures: Mapping[str, Measured], allocators: Iterable[Allocator], devices: Iterable[DeviceInfo], scope: str
) -> dict[str, Measured]:
    """Figures of the test's process, or of the run that it belongs to, that are no less than the allocator's own.

    A sampled figure may have missed what the allocator knows exactly. Where the device has no figure by process, the
    peak is at least the allocator's and at most the card.
    """
    found = dict(figures)
    known = {device.label: device for device in devices}
    for one in allocators:
        reserved, label = one.reserved, one.device
        if not isinstance(reserved, Reading) or label not in known:
            continue
        figure = found.get(label)
        if isinstance(figure, Reading):
            if figure.bytes < reserved.bytes:
                note = (
                    f"at least what torch's allocator reserved ({RESERVED}), which the reads of {figure.source} missed"
                )
                high = figure.upper if figure.upper > reserved.bytes else None
                found[label] = msgspec.structs.replace(
                    figure,
                    bytes=reserved.bytes,
                    at_most=high,
                    exact=False,
                    note="; ".join(filter(None, (figure.note, note))),
                )
        elif isinstance(figure, Unmeasurable) and scope == "process":
            capacity = known[label].capacity
            if isinstance(capacity, Reading) and capacity.bytes > reserved.bytes:
                found[label] = Reading(
                    bytes=reserved.bytes,
                    at_most=capacity.bytes,
                    source=RESERVED,
                    scope=scope,
                    device=label,
                    exact=False,
                    note=f"at most the card: {figure.reason}",
                )
    return found
