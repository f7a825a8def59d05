"""The NVIDIA cards and MIG slices of this machine, as devices that can be measured."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Mapping
from typing import Any

from pytest_vram.measure.device import DeviceInfo
from pytest_vram.measure.probes import trust
from pytest_vram.measure.probes.accounting import Accounting
from pytest_vram.measure.probes.nvml_library import NO_PERMISSION, NOT_FOUND, NOT_SUPPORTED, DriverFault, Library
from pytest_vram.measure.probes.nvml_tables import MemoryTable, ProcessTable
from pytest_vram.measure.visible import Card, Slice, Visible, visible
from pytest_vram.readings import Measured, Reading, Unmeasurable

#: llama.cpp's switch to CUDA's managed memory, which may outgrow the card.
_MANAGED = "GGML_CUDA_ENABLE_UNIFIED_MEMORY"
_MOST_CARDS = 64


class Driver:
    """NVIDIA's driver for the time of a look around.

    :ivar cards: in NVML's order. :ivar unread: why some card is not among them.
    """

    def __init__(self, environment: Mapping[str, str] = os.environ, proc: str = "/proc") -> None:
        """:raises DriverFault: there is no driver, or it does not answer."""
        self._environment = environment
        self._proc = proc
        self.library = Library()
        self.cards: list[Card] = []
        self.unread: list[str] = []
        try:
            self._list()
        except DriverFault:
            self.library.close()
            raise
        self.visible: Visible = visible(self.cards, environment)

    def _list(self) -> None:
        ask = self.library.ask
        for index in range(min(_MOST_CARDS, int(ask("nvmlDeviceGetCount")))):
            try:
                handle = ask("nvmlDeviceGetHandleByIndex", index)
                uuid, name = str(ask("nvmlDeviceGetUUID", handle)), str(ask("nvmlDeviceGetName", handle))
            except DriverFault as fault:
                self.unread.append(f"card {index}: {fault.text}")
                continue
            self.cards.append(Card(uuid, name, tuple(self._slices(handle))))
        self._add_named_slice()

    def _slices(self, handle: Any) -> list[Slice]:
        ask = self.library.ask
        try:
            if not ask("nvmlDeviceGetMigMode", handle)[0]:
                return []
            most = int(ask("nvmlDeviceGetMaxMigDeviceCount", handle))
        except DriverFault:
            return []  # no such thing on this card or driver; or not for this user, who may still name a slice
        found = []
        for index in range(most):
            with contextlib.suppress(DriverFault):  # places without a slice answer "not found"
                part = ask("nvmlDeviceGetMigDeviceHandleByIndex", handle, index)
                numbers: list[int | None] = []
                for which in ("nvmlDeviceGetGpuInstanceId", "nvmlDeviceGetComputeInstanceId"):
                    try:
                        numbers.append(int(ask(which, part)))
                    except DriverFault:
                        numbers.append(None)
                found.append(Slice(str(ask("nvmlDeviceGetUUID", part)), *numbers))
        return found

    def _add_named_slice(self) -> None:
        """A slice that the environment names and that the listing of its card did not give."""
        first = self._environment.get("CUDA_VISIBLE_DEVICES", "").split(",")[0].strip()
        known = {part.uuid for card in self.cards for part in card.slices}
        if first.startswith("MIG-") and not any(uuid.startswith(first) for uuid in known) and self.has(first):
            self.cards.append(Card(f"card of {first}", "", (Slice(first),)))

    def has(self, uuid: str) -> bool:
        """Whether the driver knows a card or slice of this UUID."""
        try:
            self.library.ask("nvmlDeviceGetHandleByUUID", uuid)
        except DriverFault:
            return False
        return True

    def named(self, text: str) -> str | None:
        """The UUID that a user means: in full, or the beginning of one alone; case does not matter."""
        known = [card.uuid for card in self.cards] + [part.uuid for card in self.cards for part in card.slices]
        wanted = text.lower()
        matches = [uuid for uuid in known if uuid.lower() == wanted]
        matches = matches or [uuid for uuid in known if uuid.lower().startswith(wanted)]
        if len(matches) == 1:
            return matches[0]
        return text if not matches and self.has(text) else None

    def device(self, uuid: str, label: str) -> DeviceInfo | Unmeasurable:
        """A card or slice as a device, or why it cannot be measured.

        One whose memory is the host's is of kind ``unified``, without a capacity of its own.
        """
        ask = self.library.ask
        try:
            handle = ask("nvmlDeviceGetHandleByUUID", uuid)
            name = str(ask("nvmlDeviceGetName", handle))
        except DriverFault as fault:
            return Unmeasurable(reason=f"{uuid}: {fault.text}", device=label)
        is_slice = uuid.startswith("MIG-")
        try:
            table = MemoryTable(self.library, handle)
            memory = table.read()
        except DriverFault as fault:
            if fault.code == NOT_SUPPORTED:
                return self._unified(uuid, label, name)
            return Unmeasurable(reason=self._no_memory(name, uuid, fault), device=label)
        notes = [self.visible.note] if self.visible.note else []
        usable: Measured | None = None
        if memory.reserved is not None:
            usable = _size(memory.total - memory.reserved, "nvml-device", label)
        else:
            notes.append("this driver counts what it reserves for itself as in use")
        lists = ProcessTable(self.library, handle)
        doubt = self._doubt(lists)
        if doubt is not None:
            notes.append(f"{doubt}: the device's rise stands for the run")
        accounting = None if is_slice else Accounting.state(self.library, handle)
        wsl, managed = on_wsl(self._proc), self._environment.get(_MANAGED, "0") not in ("", "0")
        if wsl:
            notes.append(
                "under WSL the driver moves what does not fit into host memory, and its figures do not show it"
            )
        if managed:
            notes.append(f"with {_MANAGED} llama.cpp's memory may outgrow the card")
        return DeviceInfo(
            label=label,
            kind="nvml",
            name=name,
            uuid=uuid,
            capacity=_size(memory.total, "nvml-device", label),
            usable=usable,
            limit_from="MIG slice" if is_slice else "card",
            source=f"NVML (memory query v{table.version}, process lists v{lists.version})",
            per_process=doubt is None,
            oversubscribes=wsl or managed,
            exact=bool(accounting) and doubt is None,
            accounting=accounting,
            notes=tuple(notes),
            engine_names=self.engine_names(uuid),
        )

    def _doubt(self, lists: ProcessTable) -> str | None:
        """What speaks against figures by process before anything runs."""
        try:
            listed = lists.read()
        except DriverFault as fault:
            return f"the driver does not list processes here ({fault.text})"
        exists = functools.partial(trust.exists, proc=self._proc)
        return trust.Trust(container=trust.in_container(self._proc), exists=exists).doubt(listed, (), 0)

    def _no_memory(self, name: str, uuid: str, fault: DriverFault) -> str:
        reason = f"{name} ({uuid}): its memory cannot be read: {fault.text}"
        slices = [part.uuid for card in self.cards if card.uuid == uuid for part in card.slices]
        if slices:
            return f"{reason}; it is cut into MIG slices: name one, as in --vram-device={slices[0]}"
        if fault.code in (NO_PERMISSION, NOT_FOUND):
            return f"{reason}; where it is cut into MIG slices, name yours by its UUID (`nvidia-smi -L` lists them)"
        return reason

    def _unified(self, uuid: str, label: str, name: str) -> DeviceInfo:
        return DeviceInfo(
            label=label,
            kind="unified",
            name=name,
            uuid=uuid,
            capacity=Unmeasurable(reason="its memory is the host's", device=label),
            source="",
            engine_names=self.engine_names(uuid),
        )

    def engine_names(self, uuid: str) -> tuple[str, ...]:
        """What CUDA programs call a card or slice here, where that is certain."""
        if not self.visible.certain or uuid not in self.visible.uuids:
            return ()
        return (f"CUDA{self.visible.uuids.index(uuid)}",)

    def close(self) -> None:
        """Give up the driver."""
        self.library.close()


def on_wsl(proc: str = "/proc") -> bool:
    """Whether this is Windows' Subsystem for Linux."""
    try:
        with open(f"{proc}/sys/kernel/osrelease") as stream:
            return "microsoft" in stream.read().lower()
    except OSError:
        return False


def _size(size: int, source: str, label: str) -> Reading:
    return Reading(bytes=size, source=source, scope="device", device=label, exact=True)
