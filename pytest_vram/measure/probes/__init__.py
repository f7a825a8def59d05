"""Sources of device memory, one module each, behind one interface."""

from __future__ import annotations

from pytest_vram.measure.probes.base import Figure, Probe, Snapshot, Sources
from pytest_vram.measure.probes.host import HostProbe
from pytest_vram.measure.probes.rpc import RpcProbe

__all__ = ["Figure", "HostProbe", "Probe", "RpcProbe", "Snapshot", "Sources"]
