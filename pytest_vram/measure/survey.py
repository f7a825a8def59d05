"""What of the devices that a user named can be measured on this machine."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType

import msgspec

from pytest_vram.measure import drm_cards, procfs
from pytest_vram.measure.device import DeviceInfo
from pytest_vram.measure.drm_cards import DrmCard
from pytest_vram.measure.hanging import Hanging, hangs, in_time
from pytest_vram.measure.nvidia import Driver, on_wsl
from pytest_vram.measure.probes import HostProbe, Probe, RpcProbe
from pytest_vram.measure.probes.drm import DrmProbe
from pytest_vram.measure.probes.nvml import NvmlProbe
from pytest_vram.measure.probes.nvml_library import NAME, VARIABLE, DriverFault, Library
from pytest_vram.measure.probes.rpc import served_by
from pytest_vram.measure.probes.unified import DOUBT, UnifiedProbe
from pytest_vram.readings import Measured, Reading, Unmeasurable
from pytest_vram.spec import DeviceSpec

_Found = tuple[DeviceInfo, Callable[[], Probe]]
_Answer = list[_Found | Unmeasurable]
HOST = "host"
#: Variables that make ROCm count its cards in another way than the kernel does.
_ROCM_ORDER = ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL", "CUDA_VISIBLE_DEVICES")
#: Variables that choose among the devices of Vulkan and SYCL.
_VULKAN_ORDER = ("GGML_VK_VISIBLE_DEVICES",)
_SYCL_ORDER = ("ONEAPI_DEVICE_SELECTOR", "ZE_AFFINITY_MASK")


def survey(
    devices: Sequence[DeviceSpec], rpc: Sequence[str] = (), *, proc: str = "/proc", sysfs: str = "/sys"
) -> list[DeviceInfo | Unmeasurable]:
    """Say of each device whether it can be measured here; nothing is started and nothing is changed.

    ``cpu`` is the device ``host``; cards and RPC devices are ``gpu0``, ``gpu1`` … in the order measured, where
    ``rpc:N`` keeps its own number when it is free. ``cuda:N`` is the N-th card that CUDA programs see here, a UUID any
    card or MIG slice, seen or not. A bare kind is all of it: a bare ``rpc`` every endpoint of ``rpc`` (``host:port``
    each). ``auto`` is the NVIDIA cards that are seen, else the AMD and Intel cards with memory of their own; it never
    falls back to ``cpu``. A device that is named twice appears once. NVIDIA's driver is opened for the time of the
    call and given up again; that makes no CUDA context. A driver that hangs is left to itself, and its devices cannot
    be measured.
    """
    with _Survey(rpc, proc, sysfs) as look:
        return [found if isinstance(found, Unmeasurable) else found[0] for found in look.find(devices)]


def open_probes(
    devices: Sequence[DeviceSpec], rpc: Sequence[str] = (), *, proc: str = "/proc", sysfs: str = "/sys"
) -> list[Probe | Unmeasurable]:
    """Probes of the devices of :func:`survey`, in its order."""
    probes: list[Probe | Unmeasurable] = []
    with _Survey(rpc, proc, sysfs) as look:
        for found in look.find(devices):
            if isinstance(found, Unmeasurable):
                probes.append(found)
                continue
            info, make = found
            try:
                probes.append(in_time(make))
            except (DriverFault, Hanging, OSError) as error:
                probes.append(Unmeasurable(reason=f"{info.name}: {error}", device=info.label))
    return probes


def host_probe(proc: str = "/proc") -> HostProbe:
    """A probe of host memory, whether or not ``cpu`` is among the devices.

    :raises OSError: where there is no ``/proc``.
    """
    return HostProbe(_host(proc), proc)


class _Survey:
    """One look around, for the time of which NVIDIA's driver may be open."""

    def __init__(self, rpc: Sequence[str], proc: str, sysfs: str, environment: Mapping[str, str] = os.environ) -> None:
        self._rpc = rpc
        self._proc = proc
        self._sysfs = sysfs
        self._environment = environment
        self._labels: dict[str, str] = {}
        self._opened: Driver | str | None = None
        self._listed: list[DrmCard] | None = None

    def __enter__(self) -> _Survey:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(self._opened, Driver) and not hangs():
            self._opened.close()

    def find(self, devices: Sequence[DeviceSpec]) -> _Answer:
        """Every device of the specs, each once."""
        return [found for device in devices for found in self._in_time(device)]

    def _in_time(self, device: DeviceSpec) -> _Answer:
        if device.kind in ("cpu", "rpc", "predicted"):
            return self._one(device)
        text = device.text or device.kind
        try:
            return in_time(lambda: self._one(device))
        except Hanging as error:
            return [Unmeasurable(reason=f"{text}: {error}", device=text)]

    def _label(self, key: str, wish: int | None = None) -> str | None:
        """A label for the device, kept for it; ``None`` where it has one already."""
        if key in self._labels.values():
            return None
        label = HOST if key == "cpu" else f"gpu{wish}" if wish is not None else "gpu0"
        number = 0
        while label in self._labels:
            number += 1
            label = f"gpu{number}"
        self._labels[label] = key
        return label

    @property
    def _driver(self) -> Driver | str:
        """NVIDIA's driver, or why there is none."""
        if self._opened is None:
            try:
                self._opened = Driver(self._environment, self._proc)
            except DriverFault as fault:
                self._opened = fault.text
        return self._opened

    @property
    def _cards(self) -> list[DrmCard]:
        """Cards of makers whose drivers tell their memory through DRM."""
        if self._listed is None:
            self._listed = drm_cards.cards(self._sysfs)
        return self._listed

    def _one(self, device: DeviceSpec) -> _Answer:
        text = device.text or device.kind
        if device.kind == "predicted":
            return [Unmeasurable(reason=f"{text}: nothing is measured, estimates stand in for it", device=text)]
        if not sys.platform.startswith("linux"):
            reason = f"{text}: this version measures on Linux only, and this is {sys.platform}"
            return [Unmeasurable(reason=reason, device=text)]
        if device.kind == "cpu":
            return self._cpu(text)
        if device.kind == "rpc":
            return self._remote(device, text)
        if device.kind == "cuda":
            return self._cuda(device, text)
        if device.kind == "uuid":
            return self._by_uuid(device.name or text, text)
        if device.kind == "drm":
            return self._drm(device, text)
        if device.kind == "vulkan":
            return self._vulkan(device, text)
        return self._auto(text)

    # ------------------------------------------------------------ host and RPC

    def _cpu(self, text: str) -> _Answer:
        if procfs.machine_memory(self._proc) is None:
            return [Unmeasurable(reason=f"{text}: {self._proc}/meminfo cannot be read", device=HOST)]
        info = _host(self._proc)
        if self._label(info.key) is None:
            return []
        return [(info, lambda: HostProbe(info, self._proc))]

    def _remote(self, device: DeviceSpec, text: str) -> _Answer:
        rpc = self._rpc
        if not rpc:
            reason = f"{text}: no RPC endpoint is configured; name them in PYTEST_VRAM_RPC=host:port,…"
            return [Unmeasurable(reason=reason, device=text)]
        if device.index is not None and device.index >= len(rpc):
            known = ", ".join(f"rpc:{index}" for index in range(len(rpc)))
            return [Unmeasurable(reason=f"{text}: there is no such RPC endpoint; there is {known}", device=text)]
        found: _Answer = []
        for index in range(len(rpc)) if device.index is None else (device.index,):
            endpoint = rpc[index]
            pid = served_by(endpoint, self._proc)
            if isinstance(pid, str):
                found.append(Unmeasurable(reason=f"rpc:{index}: {pid}", device=f"gpu{index}"))
                continue
            name = f"RPC{index}[{endpoint}]"
            label = self._label(name, index)
            if label is not None:
                found.append(self._rpc_device(label, name, endpoint, pid))
        return found

    def _rpc_device(self, label: str, name: str, endpoint: str, pid: int) -> _Found:
        capacity, limit_from = _machine_capacity(label, self._proc)
        limit = procfs.data_limit(pid, self._proc)
        if limit is not None:
            capacity = Reading(bytes=limit, source="rlimit-data", scope="device", device=label, exact=True)
            limit_from = "rlimit"
        info = DeviceInfo(
            label=label,
            kind="rpc",
            name=name,
            capacity=capacity,
            limit_from=limit_from,
            source=f"memory of process {pid}, which serves {endpoint}",
            per_process=False,
            exact=True,
        )
        return info, lambda: RpcProbe(info, endpoint, pid, self._proc)

    # ------------------------------------------------------------ NVIDIA

    def _cuda(self, device: DeviceSpec, text: str) -> _Answer:
        driver = self._driver
        if isinstance(driver, str):
            return [Unmeasurable(reason=f"{text}: {driver}; {self._looked_for()}", device=text)]
        seen = driver.visible
        if not seen.uuids:
            reason = f"{text}: {seen.reason}{_unread(driver)}"
            if driver.cards:
                reason += "; a UUID in --vram-device names a card whether it is visible or not"
            return [Unmeasurable(reason=reason, device=text)]
        if device.index is None:
            return [one for uuid in seen.uuids for one in self._nvidia(driver, uuid, text)]
        if device.index >= len(seen.uuids):
            known = ", ".join(f"cuda:{index}" for index in range(len(seen.uuids)))
            reason = f"{text}: there is no such card among those visible here; there is {known}{_unread(driver)}"
            if seen.note:
                reason += f" ({seen.note})"
            return [Unmeasurable(reason=reason, device=text)]
        return self._nvidia(driver, seen.uuids[device.index], text)

    def _by_uuid(self, name: str, text: str) -> _Answer:
        driver = self._driver
        if isinstance(driver, str):
            return [Unmeasurable(reason=f"{text}: {driver}; {self._looked_for()}", device=text)]
        uuid = driver.named(name)
        if uuid is None:
            known = [card.uuid for card in driver.cards] + [one.uuid for card in driver.cards for one in card.slices]
            reason = f"{text}: no card, or several, have this UUID; there is {', '.join(known) or 'none'}"
            return [Unmeasurable(reason=f"{reason}{_unread(driver)}", device=text)]
        return self._nvidia(driver, uuid, text)

    def _nvidia(self, driver: Driver, uuid: str, text: str) -> _Answer:
        label = self._label(uuid)
        if label is None:
            return []
        info = driver.device(uuid, label)
        if isinstance(info, Unmeasurable):
            del self._labels[label]
            return [Unmeasurable(reason=f"{text}: {info.reason}", device=text)]
        if self._only_gpu():
            info = msgspec.structs.replace(
                info, engine_names=(*info.engine_names, *self._chosen(_VULKAN_ORDER, "Vulkan0"))
            )
        if info.kind == "unified":
            return self._host_as_card(info)
        return [(info, lambda: _with_library(lambda library: NvmlProbe(info, library, proc=self._proc)))]

    def _host_as_card(self, info: DeviceInfo) -> _Answer:
        capacity, limit_from = _machine_capacity(info.label, self._proc)
        info = msgspec.structs.replace(
            info,
            capacity=capacity,
            limit_from=limit_from,
            source="/proc/meminfo",
            per_process=False,
            notes=(f"{DOUBT}: the rise of the machine's memory in use stands for the run",),
        )
        return [(info, lambda: _with_library(lambda library: UnifiedProbe(info, library, proc=self._proc)))]

    # ------------------------------------------------------------ AMD and Intel

    def _drm(self, device: DeviceSpec, text: str) -> _Answer:
        cards = self._cards
        chosen = [card for card in cards if (card.name == device.name if device.name else card.measurable)]
        if not chosen:
            known = ", ".join(f"drm:{card.name} ({card.title})" for card in cards)
            what = "there is no such card" if device.name else "there is no AMD or Intel card"
            reason = f"{text}: {what}; there is {known}" if known else f"{text}: {what}; {self._looked_for()}"
            return [Unmeasurable(reason=reason, device=text)]
        return [one for card in chosen for one in self._amd_or_intel(card, text)]

    def _amd_or_intel(self, card: DrmCard, text: str) -> _Answer:
        if not card.measurable:
            refused = drm_cards.device(card, text)
            assert isinstance(refused, Unmeasurable)
            return [Unmeasurable(reason=f"{text}: {refused.reason}", device=text)]
        label = self._label(f"pci-{card.address}")
        if label is None:
            return []
        node = drm_cards.rocm_nodes(self._sysfs).get(card.address)
        info = drm_cards.device(card, label, self._engine_names(card, node))
        assert isinstance(info, DeviceInfo)
        kfd = node[1] if node is not None else None

        def make() -> Probe:
            return DrmProbe(
                info, card.address, card.folder, unified=card.integrated, kfd=kfd, proc=self._proc, sysfs=self._sysfs
            )

        return [(info, make)]

    def _engine_names(self, card: DrmCard, node: tuple[int, int] | None) -> tuple[str, ...]:
        names: list[str] = []
        if card.vendor == drm_cards.AMD and node is not None:
            names += self._chosen(_ROCM_ORDER, f"ROCm{node[0]}")
        if self._only_gpu():
            names += self._chosen(_VULKAN_ORDER, "Vulkan0")
            if card.vendor == drm_cards.INTEL:
                names += self._chosen(_SYCL_ORDER, "SYCL0")
        return tuple(names)

    def _chosen(self, variables: Sequence[str], name: str) -> list[str]:
        """The name, unless the environment makes the engine count otherwise."""
        return [] if any(self._environment.get(variable) for variable in variables) else [name]

    # ------------------------------------------------------------ whatever there is

    def _gpus(self) -> int:
        """How many GPUs this machine has, of any maker."""
        driver = self._driver
        others = [card for card in self._cards if card.vendor != drm_cards.NVIDIA]
        nvidia = len(self._cards) - len(others)
        if isinstance(driver, Driver):
            nvidia = max(nvidia, len(driver.cards) + len(driver.unread))
        return nvidia + len(others)

    def _only_gpu(self) -> bool:
        return self._gpus() == 1

    def _vulkan(self, device: DeviceSpec, text: str) -> _Answer:
        count = self._gpus()
        if count == 1 and not device.index:
            driver = self._driver
            if isinstance(driver, Driver) and driver.cards:
                return self._nvidia(driver, driver.cards[0].uuid, text)
            return self._amd_or_intel(self._cards[0], text)
        if not count:
            return [Unmeasurable(reason=f"{text}: there is no GPU; {self._looked_for()}", device=text)]
        reason = (
            f"{text}: this machine has {count} GPUs, and which of them Vulkan calls this is not certain;"
            f" name it as {self._ways()}"
        )
        return [Unmeasurable(reason=reason, device=text)]

    def _ways(self) -> str:
        driver = self._driver
        ways = []
        if isinstance(driver, Driver):
            ways += [f"cuda:{index}" for index in range(len(driver.visible.uuids))]
            ways += [card.uuid for card in driver.cards if card.uuid not in driver.visible.uuids]
        ways += [f"drm:{card.name}" for card in self._cards if card.measurable]
        return ", ".join(ways) or "cuda:N or drm:cardN"

    def _auto(self, text: str) -> _Answer:
        driver = self._driver
        if isinstance(driver, Driver) and driver.visible.uuids:
            return [one for uuid in driver.visible.uuids for one in self._nvidia(driver, uuid, text)]
        cards = [card for card in self._cards if card.measurable]
        own = [card for card in cards if not card.integrated]
        if own:
            return [one for card in own for one in self._amd_or_intel(card, text)]
        why = driver if isinstance(driver, str) else f"{driver.visible.reason}{_unread(driver)}"
        reason = f"{text}: no GPU can be measured: {why}; {self._looked_for()}"
        if cards:
            named = ", ".join(f"drm:{card.name} ({card.title})" for card in cards)
            reason += f"; graphics without memory of their own are measured only where they are named: {named}"
        return [Unmeasurable(reason=reason, device=text)]

    def _looked_for(self) -> str:
        """What of a GPU there is on this machine, so that the user sees whether hardware or software is missing."""
        named = os.environ.get(VARIABLE)
        driver = bool(named) or _loadable(NAME)
        names = ("/dev/nvidia0", "/dev/dri", "/dev/kfd", "/dev/dxg")
        nodes = [name for name in names if os.path.exists(name)]
        library = f"named by {VARIABLE}" if named else "present" if driver else "not present"
        files = ", ".join(nodes) if nodes else f"none of {', '.join(names[:3])}"
        found = f"device files: {files}"
        if not (isinstance(self._driver, str) and NAME in self._driver):
            found = f"NVIDIA's {NAME} is {library}, {found}"
        if on_wsl(self._proc) and not driver:
            found += "; under WSL NVIDIA's driver for Windows brings /usr/lib/wsl/lib/libnvidia-ml.so.1"
        return found


def _with_library(make: Callable[[Library], Probe]) -> Probe:
    """A probe that owns a connection to NVIDIA's driver; given up where the probe cannot be made."""
    library = Library()
    try:
        return make(library)
    except (DriverFault, OSError):
        library.close()
        raise


def _unread(driver: Driver) -> str:
    return f" ({'; '.join(driver.unread)})" if driver.unread else ""


def _host(proc: str) -> DeviceInfo:
    capacity, limit_from = _machine_capacity(HOST, proc)
    return DeviceInfo(
        label=HOST,
        kind="cpu",
        name="host memory (stands in for VRAM)",
        capacity=capacity,
        limit_from=limit_from,
        source="/proc/PID/status",
        exact=True,
    )


def _machine_capacity(label: str, proc: str) -> tuple[Measured, str | None]:
    """How much memory there is, and what sets it: the machine or the control group."""
    memory = procfs.machine_memory(proc)
    if memory is None:
        return Unmeasurable(reason=f"{proc}/meminfo cannot be read", scope="device", device=label), None
    limit = procfs.control_group_limit(proc)
    if limit is not None and limit < memory[0]:
        return Reading(bytes=limit, source="cgroup", scope="device", device=label, exact=True), "cgroup"
    return Reading(bytes=memory[0], source="host-meminfo", scope="device", device=label, exact=True), "machine"


def _loadable(name: str) -> bool:
    """Whether the loader finds it, or it is in a place where one would look for it."""
    try:
        ctypes.CDLL(name)
        return True
    except OSError:
        pass
    folders = [
        *os.environ.get("LD_LIBRARY_PATH", "").split(":"),
        "/usr/lib/x86_64-linux-gnu",
        "/usr/lib/aarch64-linux-gnu",
        "/usr/lib64",
        "/usr/lib",
        "/usr/lib/wsl/lib",
    ]
    return any(folder and os.path.exists(os.path.join(folder, name)) for folder in folders)
