"""What of the devices that a user named can be measured on this machine."""

from __future__ import annotations

import ctypes.util
import os
import sys
from collections.abc import Callable, Sequence

from pytest_vram.measure import procfs
from pytest_vram.measure.device import DeviceInfo
from pytest_vram.measure.probes import HostProbe, Probe, RpcProbe
from pytest_vram.measure.probes.rpc import served_by
from pytest_vram.readings import Measured, Reading, Unmeasurable
from pytest_vram.spec import DeviceSpec

_Found = tuple[DeviceInfo, Callable[[], Probe]]
_GPU_KINDS = {"cuda": "cuda", "uuid": "a GPU by UUID", "drm": "drm", "vulkan": "vulkan"}
HOST = "host"


def survey(
    devices: Sequence[DeviceSpec], rpc: Sequence[str] = (), *, proc: str = "/proc"
) -> list[DeviceInfo | Unmeasurable]:
    """Say of each device whether it can be measured here; nothing is started and nothing is changed.

    ``cpu`` is the device ``host``; ``rpc:N`` is ``gpuN``, and a bare ``rpc`` is every endpoint of ``rpc``
    (``host:port`` each). ``auto`` never falls back to ``cpu``. A device that is named twice appears once.
    """
    return [found if isinstance(found, Unmeasurable) else found[0] for found in _find(devices, rpc, proc)]


def open_probes(
    devices: Sequence[DeviceSpec], rpc: Sequence[str] = (), *, proc: str = "/proc"
) -> list[Probe | Unmeasurable]:
    """Probes of the devices of :func:`survey`, in its order."""
    return [found if isinstance(found, Unmeasurable) else found[1]() for found in _find(devices, rpc, proc)]


def host_probe(proc: str = "/proc") -> HostProbe:
    """A probe of host memory, whether or not ``cpu`` is among the devices.

    :raises OSError: where there is no ``/proc``.
    """
    return HostProbe(_host(proc), proc)


def _find(devices: Sequence[DeviceSpec], rpc: Sequence[str], proc: str) -> list[_Found | Unmeasurable]:
    found: list[_Found | Unmeasurable] = []
    labels: set[str] = set()
    for device in devices:
        for one in _one(device, rpc, proc):
            if not isinstance(one, Unmeasurable):
                if one[0].label in labels:
                    continue
                labels.add(one[0].label)
            found.append(one)
    return found


def _one(device: DeviceSpec, rpc: Sequence[str], proc: str) -> list[_Found | Unmeasurable]:
    text = device.text or device.kind
    if device.kind == "predicted":
        return [Unmeasurable(reason=f"{text}: nothing is measured, estimates stand in for it", device=text)]
    if not sys.platform.startswith("linux"):
        return [
            Unmeasurable(reason=f"{text}: this version measures on Linux only, and this is {sys.platform}", device=text)
        ]
    if device.kind == "cpu":
        if procfs.machine_memory(proc) is None:
            return [Unmeasurable(reason=f"{text}: {proc}/meminfo cannot be read", device=HOST)]
        info = _host(proc)
        return [(info, lambda: HostProbe(info, proc))]
    if device.kind == "rpc":
        return _rpc(device, rpc, proc, text)
    return [Unmeasurable(reason=f"{text}: {_no_probe(device)}; {_looked_for()}", device=text)]


def _rpc(device: DeviceSpec, rpc: Sequence[str], proc: str, text: str) -> list[_Found | Unmeasurable]:
    if not rpc:
        return [
            Unmeasurable(
                reason=f"{text}: no RPC endpoint is configured; name them in PYTEST_VRAM_RPC=host:port,…", device=text
            )
        ]
    if device.index is not None and device.index >= len(rpc):
        known = ", ".join(f"rpc:{index}" for index in range(len(rpc)))
        return [Unmeasurable(reason=f"{text}: there is no such RPC endpoint; there is {known}", device=text)]
    found: list[_Found | Unmeasurable] = []
    for index in range(len(rpc)) if device.index is None else (device.index,):
        endpoint, label = rpc[index], f"gpu{index}"
        pid = served_by(endpoint, proc)
        if isinstance(pid, str):
            found.append(Unmeasurable(reason=f"rpc:{index}: {pid}", device=label))
            continue
        info = DeviceInfo(
            label=label,
            kind="rpc",
            name=f"RPC{index}[{endpoint}]",
            capacity=_rpc_capacity(label, pid, proc),
            source=f"memory of process {pid}, which serves {endpoint}",
        )
        found.append((info, _rpc_factory(info, endpoint, pid, proc)))
    return found


def _rpc_factory(info: DeviceInfo, endpoint: str, pid: int, proc: str) -> Callable[[], Probe]:
    return lambda: RpcProbe(info, endpoint, pid, proc)


def _rpc_capacity(label: str, pid: int, proc: str) -> Measured:
    limit = procfs.data_limit(pid, proc)
    if limit is not None:
        return Reading(bytes=limit, source="rlimit-data", scope="device", device=label, exact=True)
    return _machine_capacity(label, proc)


def _host(proc: str) -> DeviceInfo:
    return DeviceInfo(
        label=HOST,
        kind="cpu",
        name="host memory (stands in for VRAM)",
        capacity=_machine_capacity(HOST, proc),
        source="/proc/PID/status",
    )


def _machine_capacity(label: str, proc: str) -> Measured:
    memory = procfs.machine_memory(proc)
    if memory is None:
        return Unmeasurable(reason=f"{proc}/meminfo cannot be read", scope="device", device=label)
    limit = procfs.control_group_limit(proc)
    if limit is not None and limit < memory[0]:
        return Reading(bytes=limit, source="cgroup", scope="device", device=label, exact=True)
    return Reading(bytes=memory[0], source="host-meminfo", scope="device", device=label, exact=True)


def _no_probe(device: DeviceSpec) -> str:
    if device.kind == "auto":
        return "no GPU can be measured by this version (it measures `cpu` and `rpc` devices)"
    kind = _GPU_KINDS.get(device.kind, device.kind)
    return f"this version has no probe for {kind} devices (it measures `cpu` and `rpc`)"


def _looked_for() -> str:
    """What of a GPU there is on this machine, so that the user sees whether hardware or software is missing."""
    driver = ctypes.util.find_library("nvidia-ml") or _loadable("libnvidia-ml.so.1")
    nodes = [name for name in ("/dev/nvidia0", "/dev/dri", "/dev/kfd") if os.path.exists(name)]
    return (
        f"NVIDIA's libnvidia-ml.so.1 is {'present' if driver else 'not present'}, "
        f"device files: {', '.join(nodes) if nodes else 'none of /dev/nvidia0, /dev/dri, /dev/kfd'}"
    )


def _loadable(name: str) -> bool:
    folders = [*os.environ.get("LD_LIBRARY_PATH", "").split(":"), "/usr/lib/x86_64-linux-gnu", "/usr/lib64", "/usr/lib"]
    return any(folder and os.path.exists(os.path.join(folder, name)) for folder in folders)
