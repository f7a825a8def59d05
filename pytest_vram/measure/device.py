"""A device that is measured, as data."""

from __future__ import annotations

import msgspec

from pytest_vram.readings import Measured


class DeviceInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A device that is measured. ``capacity`` is its nominal size as the user's limit sees it.

    :ivar label: ``host``, ``gpu0`` …; every table of figures is keyed by it.
    :ivar kind: ``cpu``, ``rpc``, ``nvml`` (NVIDIA, MIG slices too), ``drm`` (AMD, Intel) or ``unified`` (a GPU whose
        memory is the host's).
    :ivar name: for people, such as ``RPC0[127.0.0.1:50052]`` or ``NVIDIA GeForce RTX 3050``.
    :ivar source: where its figures come from, such as ``/proc/PID/status``.
    :ivar limit_from: what sets ``capacity``: ``card``, ``MIG slice``, ``cgroup``, ``rlimit``, ``machine`` or
        ``emulated``.
    :ivar usable: bytes that programs can have of it: ``capacity`` less what the driver keeps for itself.
    :ivar oversubscribes: whether allocations beyond the card succeed in host memory here, so that a figure above the
        capacity is spill and not impossible. :ivar per_process: whether it says which process holds what.
    :ivar exact: whether its source cannot miss a peak. :ivar notes: what a reader of its figures must know.
    :ivar engine_names: what engines that run in the environment of this run call it, such as ``CUDA0``; empty where
        that is not certain. :ivar accounting: whether the driver's accounting is on; ``None`` where there is none.
    """

    label: str
    kind: str
    name: str
    capacity: Measured
    source: str
    uuid: str | None = None
    limit_from: str | None = None
    usable: Measured | None = None
    oversubscribes: bool = False
    per_process: bool = True
    exact: bool = False
    notes: tuple[str, ...] = ()
    engine_names: tuple[str, ...] = ()
    accounting: bool | None = None

    @property
    def key(self) -> str:
        """What every run on this machine calls the device, whatever label it has in one of them."""
        return self.uuid or (self.name if self.kind == "rpc" else self.kind)
