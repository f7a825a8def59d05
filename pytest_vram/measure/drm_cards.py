"""The graphics cards that Linux' DRM knows, as devices that can be measured."""

from __future__ import annotations

import os
import re
from typing import NamedTuple

from pytest_vram.measure.device import DeviceInfo
from pytest_vram.measure.probes.drm import number
from pytest_vram.readings import Measured, Reading, Unmeasurable
from pytest_vram.units import GIB

AMD, INTEL, NVIDIA = 0x1002, 0x8086, 0x10DE
_MAKERS = {AMD: "AMD", INTEL: "Intel", NVIDIA: "NVIDIA"}
_CARD = re.compile(r"card\d{1,3}")
_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
#: AMD's processors set aside at most this much of host memory as the memory of their graphics without being told so;
#: cards with less of their own have not been made for years.
_CARVED = GIB
#: PCI class 0x03: display controllers; the kernel prints 24 bits.
_DISPLAY = 0x03


class DrmCard(NamedTuple):
    """A card. :ivar name: such as ``card0``. :ivar address: on the PCI bus. :ivar folder: in ``/sys``.

    :ivar integrated: it has no memory of its own. :ivar driver: of the kernel, such as ``amdgpu``.
    """

    name: str
    vendor: int
    model: int | None
    address: str
    folder: str
    driver: str
    integrated: bool

    @property
    def measurable(self) -> bool:
        """Whether the driver tells what processes hold, as AMD's and Intel's do."""
        return self.vendor in (AMD, INTEL)

    @property
    def title(self) -> str:
        """For people."""
        given = _text(f"{self.folder}/product_name")
        if given:
            return given
        kind = "integrated graphics" if self.integrated else "graphics card"
        model = f" {self.vendor:04x}:{self.model:04x}" if self.model is not None else ""
        return f"{_MAKERS.get(self.vendor, 'unknown')} {kind}{model}"


def cards(sysfs: str = "/sys") -> list[DrmCard]:
    """Every card with a PCI address, in the order of their numbers; consoles without a GPU are left out."""
    try:
        names = [name for name in os.listdir(f"{sysfs}/class/drm") if _CARD.fullmatch(name)]
    except OSError:
        return []
    found = []
    for name in sorted(names, key=lambda name: int(name[4:])):
        folder = os.path.realpath(f"{sysfs}/class/drm/{name}/device")
        vendor = number(f"{folder}/vendor")
        address = _address(folder)
        if vendor not in _MAKERS or address is None:
            continue
        driver = os.path.basename(os.path.realpath(f"{folder}/driver"))
        integrated = _integrated(vendor, folder, address)
        found.append(DrmCard(name, vendor, number(f"{folder}/device"), address, folder, driver, integrated))
    return found


def _address(folder: str) -> str | None:
    for line in _text(f"{folder}/uevent").splitlines():
        key, _, value = line.partition("=")
        if key == "PCI_SLOT_NAME":
            return value.strip().lower()
    name = os.path.basename(folder).lower()
    return name if _ADDRESS.fullmatch(name) else None


def _integrated(vendor: int, folder: str, address: str) -> bool:
    if vendor == AMD:
        total = number(f"{folder}/mem_info_vram_total")
        return (total is not None and total <= _CARVED) or _on_chip(folder)
    # Intel's integrated graphics have been device 2 of the first bus ever since.
    return vendor == INTEL and address.endswith(":00:02.0")


def _on_chip(folder: str) -> bool:
    """Whether AMD's driver shows a part of a processor: it measures those in tables of formats 2 and 3, cards in 1."""
    try:
        with open(f"{folder}/gpu_metrics", "rb") as stream:
            header = stream.read(4)
    except OSError:
        header = b""
    return (len(header) == 4 and header[2] in (2, 3)) or os.path.exists(f"{folder}/apu_thermal_cap")


def device(card: DrmCard, label: str, engine_names: tuple[str, ...] = ()) -> DeviceInfo | Unmeasurable:
    """A card as a device, or why it cannot be measured."""
    if not card.measurable:
        way = "; measure it with --vram-device=cuda" if card.vendor == NVIDIA else ""
        return Unmeasurable(reason=f"{card.name} is {card.title}, of which DRM tells no memory{way}", device=label)
    notes = []
    if card.vendor == INTEL:
        notes.append("Intel's driver does not tell what of the card's memory lies in host memory (spill)")
    if card.integrated:
        notes.append("its memory is the host's: what it has set aside and what it shares count together")
    own = number(f"{card.folder}/mem_info_vram_total")
    capacity: Measured
    if card.integrated:
        shared = number(f"{card.folder}/mem_info_gtt_total")
        own = own + shared if own is not None and shared is not None else None
    if own is not None:
        capacity = Reading(bytes=own, source="drm-sysfs", scope="device", device=label, exact=True)
    else:
        reason = f"the driver {card.driver} does not tell how much memory {card.title} has"
        capacity = Unmeasurable(reason=reason, scope="device", device=label)
        notes.append("the driver has no figure of the whole device")
    return DeviceInfo(
        label=label,
        kind="unified" if card.integrated else "drm",
        name=card.title,
        uuid=f"pci-{card.address}",
        capacity=capacity,
        limit_from="machine" if card.integrated else "card",
        source=f"/proc/PID/fdinfo of {card.name} ({card.driver}, {card.address})",
        oversubscribes=not card.integrated,
        notes=tuple(notes),
        engine_names=engine_names,
    )


def rocm_nodes(sysfs: str = "/sys") -> dict[str, tuple[int, int]]:
    """PCI address → place in ROCm's order, and the number by which its kernel driver knows the card."""
    folder = f"{sysfs}/class/kfd/kfd/topology/nodes"
    try:
        nodes = sorted((name for name in os.listdir(folder) if name.isdigit()), key=int)
    except OSError:
        return {}
    found: dict[str, tuple[int, int]] = {}
    for node in nodes:
        gpu = number(f"{folder}/{node}/gpu_id")
        if not gpu:
            continue  # a processor
        values = dict(
            line.split(maxsplit=1) for line in _text(f"{folder}/{node}/properties").splitlines() if " " in line
        )
        try:
            place, domain = int(values["location_id"]), int(values.get("domain", "0"))
        except (KeyError, ValueError):
            continue
        address = f"{domain:04x}:{place >> 8:02x}:{place >> 3 & 31:02x}.{place & 7}"
        found[address] = (len(found), gpu)
    return found


def _text(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as stream:
            return stream.read(65536).strip()
    except OSError:
        return ""
