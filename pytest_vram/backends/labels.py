"""From the engine's device names to the labels of the run."""

from __future__ import annotations

import msgspec

from pytest_vram.backends.base import PlanContext
from pytest_vram.bootlog.boot import Boot


def relabelled(boot: Boot, context: PlanContext) -> Boot:
    """The boot with the run's labels in place of the reader's, which counts devices in the order of the log.

    A device of the log is one of the run when its name holds the run device's endpoint or name. One that the run
    does not measure keeps its label, or takes the engine's own name where the run gives that label to another. Sizes
    without a device (patterns of the ``command`` engine) are the host's where host memory is all that is measured.
    """
    run_labels = {device.label for device in context.devices}
    new: dict[str, str] = {}
    if {device.kind for device in context.devices} == {"cpu"}:
        new.update({entry.device: "host" for entry in boot.entries if entry.device not in boot.devices})
    for label, name in boot.devices.items():
        if label == "host":
            continue
        measured = _measured(name, context)
        if measured is not None:
            new[label] = measured
        elif label in run_labels:
            new[label] = name
    if all(old == label for old, label in new.items()):
        return boot
    entries = tuple(
        msgspec.structs.replace(entry, device=new.get(entry.device, entry.device)) for entry in boot.entries
    )
    failure = boot.failure
    if failure is not None and failure.device is not None:
        failure = msgspec.structs.replace(failure, device=new.get(failure.device, failure.device))
    devices = {new.get(label, label): name for label, name in boot.devices.items()}
    return msgspec.structs.replace(boot, entries=entries, devices=devices, failure=failure)


def _measured(name: str, context: PlanContext) -> str | None:
    """The label of the run's device that the log calls ``name``."""
    for endpoint, label in context.endpoints().items():
        if f"[{endpoint}]" in name or name == endpoint:
            return label
    for device in context.devices:
        if device.kind != "cpu" and device.name == name:
            return device.label
    return None
