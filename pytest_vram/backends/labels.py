"""From the engine's device names to the labels of the run."""

from __future__ import annotations

import re
from collections.abc import Mapping

from pytest_vram.backends.base import PlanContext
from pytest_vram.bootlog.boot import Boot
from pytest_vram.bootlog.numbering import relabel
from pytest_vram.measure import DeviceInfo

#: Variables that change which card an engine gives which number.
_CHOOSE = (
    "CUDA_VISIBLE_DEVICES",
    "CUDA_DEVICE_ORDER",
    "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "GPU_DEVICE_ORDINAL",
    "GGML_VK_VISIBLE_DEVICES",
    "ONEAPI_DEVICE_SELECTOR",
    "ZE_AFFINITY_MASK",
)
_CARDS = ("nvml", "drm", "unified")
#: An RPC device that is served on this machine.
_LOCAL_RPC = re.compile(r"RPC\d{0,9}\[(?:127\.0\.0\.1|localhost|\[?::1\]?):\d+\]", re.ASCII)
#: A device of a kind that the log of a server in Python does not say.
_UNNAMED = re.compile(r"GPU(\d{1,4})", re.ASCII)


def relabelled(boot: Boot, context: PlanContext, env: Mapping[str, str] | None = None) -> Boot:
    """The boot with the run's labels in place of the reader's, which go by the engine's own numbers.

    A device of the log is one of the run when its name holds the run device's endpoint, or is the run device's name, or
    one that engines give it (``CUDA0``); where the run measures one card and the engine's only device is served by a
    process of this machine, that device is the card: the software GPU of a rehearsal. One that the run does not measure
    keeps its label, or takes the engine's own name where the run gives that label to another. Sizes without a device
    (patterns of the ``command`` engine) are the host's where host memory is all that is measured.

    :param env: the server's own additions to the environment, which may make its engine count cards in another way.
    """
    run_labels = {device.label for device in context.devices}
    new: dict[str, str] = {}
    if {device.kind for device in context.devices} == {"cpu"}:
        new.update({entry.device: "host" for entry in boot.entries if entry.device not in boot.devices})
    names = dict(boot.devices)
    cards = [label for label in names if label != "host"]
    counted = not any(name in (env or {}) for name in _CHOOSE)
    for label in cards:
        name = names[label]
        measured = _measured(name, context, counted=counted)
        if measured is None and len(cards) == 1 and (card := _rehearsed(name, context)) is not None:
            measured, names[label] = card.label, f"{name} (stands for {card.name})"
        if measured is not None:
            new[label] = measured
        elif label in run_labels:
            new[label] = name
    return relabel(boot, new, names)


def _measured(name: str, context: PlanContext, *, counted: bool) -> str | None:
    """The label of the run's device that the log calls ``name``.

    :param counted: whether the engine counts cards as the environment of the run does.
    """
    for endpoint, label in context.endpoints().items():
        if f"[{endpoint}]" in name or name == endpoint:
            return label
    for device in context.devices:
        if device.kind != "cpu" and (device.name == name or (counted and _is_one_of(name, device.engine_names))):
            return device.label
    return None


def _is_one_of(name: str, engine_names: tuple[str, ...]) -> bool:
    """Whether an engine's name of a device is one of these; of a kind that its log does not say, the number counts."""
    unnamed = _UNNAMED.fullmatch(name)
    names = (name,) if unnamed is None else (f"CUDA{unnamed[1]}", f"ROCm{unnamed[1]}")
    return any(one in engine_names for one in names)


def _rehearsed(name: str, context: PlanContext) -> DeviceInfo | None:
    """The run's only card, where ``name`` is a device that a process of this machine serves, which may stand for it."""
    if len(context.devices) != 1 or context.devices[0].kind not in _CARDS or not _LOCAL_RPC.fullmatch(name):
        return None
    return context.devices[0]
