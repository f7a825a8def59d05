"""Playing a smaller card: what a device looks like whose rest is occupied (``--vram-emulate``)."""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from pytest_vram.errors import BadSetting
from pytest_vram.measure.device import DeviceInfo
from pytest_vram.measure.probes.base import Probe, Snapshot, Sources
from pytest_vram.readings import Reading
from pytest_vram.units import mib, written

EMULATED = "emulated"
_NO_MEANS = {
    "cpu": "host memory has no rest that could be occupied without taking it from everything else on this machine;"
    " limit the tests with --vram-budget instead",
    "unified": "its memory is the host's, and occupying that would take it from everything else on this machine;"
    " limit the tests with --vram-budget instead",
    "drm": "this version occupies the memory of NVIDIA cards and of llama.cpp's RPC devices only; limit the tests"
    " with --vram-budget instead",
}


def emulated(info: DeviceInfo, size: int) -> DeviceInfo:
    """The device as a card of ``size`` bytes. Only says how it looks; the keeper makes it so.

    :raises BadSetting: it cannot be played on this device, and why.
    """
    what = f"--vram-emulate={written(size)} cannot be played on {info.label} ({info.name}): "
    reason = _NO_MEANS.get(info.kind)
    if reason is not None:
        raise BadSetting(what + reason)
    if info.kind not in ("rpc", "nvml"):
        raise BadSetting(f"{what}there is no means for devices of kind {info.kind!r}")
    if info.oversubscribes:
        raise BadSetting(
            f"{what}here allocations beyond the card succeed in host memory, so nothing would fail for want of room;"
            " limit the tests with --vram-budget instead"
        )
    real = info.usable if isinstance(info.usable, Reading) else info.capacity
    if not isinstance(real, Reading):
        raise BadSetting(f"{what}its own size is not known: {real.reason}")
    if info.limit_from == EMULATED:
        return info
    if real.bytes < size:
        raise BadSetting(f"{what}it has only {mib(real.bytes)}; name a size that is smaller")
    card = Reading(bytes=size, source=EMULATED, scope="device", device=info.label, exact=True)
    how = (
        "its server may not allocate more"
        if info.kind == "rpc"
        else "the rest is occupied by a process called vram-ballast, which is not counted"
    )
    return msgspec.structs.replace(
        info,
        capacity=card,
        usable=card,
        limit_from=EMULATED,
        notes=(*info.notes, f"plays a card of {written(size)} ({how}); really it has {mib(real.bytes)}"),
    )


class PlayedProbe:
    """A probe of a card whose rest is occupied by a ballast: the ballast is in none of its figures.

    :param ballast: PID of the process that occupies the rest, and the bytes that it allocated; ``None`` where nothing
        is occupied (an RPC device, whose server has a limit instead).
    """

    def __init__(self, probe: Probe, info: DeviceInfo, ballast: tuple[int, int] | None) -> None:
        self.inner = probe
        self.info = info
        self._ballast = ballast
        self._server = self.pid
        self.per_process: bool = probe.per_process
        self.counts_pytest: bool = probe.counts_pytest
        self.sources: Sources = probe.sources
        self.note: str | None = probe.note

    @property
    def pid(self) -> int | None:
        """The process that serves the device, where there is one."""
        return getattr(self.inner, "pid", None)

    def _follow(self) -> None:
        """Take over what the real probe says of itself, which may change with a read."""
        inner = self.inner
        self.per_process, self.counts_pytest = inner.per_process, inner.counts_pytest
        self.sources, self.note = inner.sources, inner.note

    def read(self, pids: Collection[int]) -> Snapshot:
        """The real read, without the ballast."""
        snapshot = self.inner.read(pids)
        self._follow()
        if self.pid != self._server:
            reason = f"the server of {self.info.name} was started anew, and this one has no limit for --vram-emulate"
            return Snapshot({}, None, fault=reason)
        if self._ballast is None or snapshot.device is None:
            return snapshot
        pid, allocated = self._ballast
        others = dict(snapshot.others)
        held = others.pop(pid, allocated)
        device = snapshot.device
        device = device._replace(
            now=max(0, device.now - held),
            held=max(0, device.held - held),
            mark=None if device.mark is None else max(0, device.mark - held),
            most=None if device.most is None else max(0, device.most - held),
        )
        return snapshot._replace(device=device, others=others)

    def reset(self) -> None:
        """Set every mark back."""
        self.inner.reset()

    def settle(self) -> None:
        """Take the present figure as the baseline."""
        self.inner.settle()

    def close(self) -> None:
        """Give up descriptors and handles."""
        self.inner.close()
