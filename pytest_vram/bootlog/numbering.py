"""The numbers of labels: a device that the engine calls ``CUDA11`` is ``gpu11``, in whatever order a log names them.

Grammars label devices as they meet them, since nobody knows which are still to come; the numbers are given to what they
have read in the end.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from typing import Any

import msgspec

from pytest_vram.bootlog.boot import Boot
from pytest_vram.bootlog.devices import FLAVOUR, HOST

#: A name that bears the engine's own number of the device (torch writes ``cuda:3``). Those of remote devices, as in
#: ``RPC0[192.0.2.1:50052]``, count the devices of one endpoint.
_OWN = re.compile(r"(?!RPC)[A-Za-z]+:?(\d{1,4})", re.ASCII)


def numbers(devices: Mapping[str, str]) -> dict[str, str]:
    """Label → the label that it should have, for all labels of ``devices`` (label → the engine's own name).

    The number is the engine's own. A device without one (``Metal``, ``CUDA_Split``, a remote one), and one of a second
    family whose number is taken, has the smallest that is free, in the order of ``devices``.
    """
    cards = {label: name for label, name in devices.items() if label != HOST}
    found: dict[str, str] = {}
    taken: set[str] = set()
    for label, name in cards.items():
        own = _OWN.fullmatch(FLAVOUR.sub("", name))
        wanted = None if own is None else f"gpu{int(own[1])}"
        if wanted is not None and wanted not in taken:
            found[label] = wanted
            taken.add(wanted)
    free = (number for count in itertools.count() if (number := f"gpu{count}") not in taken)
    return {label: found.get(label) or next(free) for label in cards}


def numbered(boot: Boot) -> Boot:
    """The boot with each device under the engine's own number, its devices in the order of their numbers."""
    return relabel(boot, numbers(boot.devices))


def relabel(boot: Boot, new: Mapping[str, str], names: Mapping[str, str] | None = None) -> Boot:
    """The boot with other labels, wherever it has any; one that ``new`` does not know stays.

    :param names: label → the engine's own name, in place of the boot's, by the labels that it has so far.
    """
    named = {new.get(label, label): name for label, name in (boot.devices if names is None else names).items()}
    devices = {label: named[label] for label in sorted(named, key=rank)}
    if list(devices.items()) == list(boot.devices.items()) and all(old == label for old, label in new.items()):
        return boot
    failure = boot.failure
    if failure is not None and failure.device is not None:
        failure = msgspec.structs.replace(failure, device=new.get(failure.device, failure.device))
    return msgspec.structs.replace(
        boot,
        entries=tuple(
            msgspec.structs.replace(entry, device=new.get(entry.device, entry.device)) for entry in boot.entries
        ),
        devices=devices,
        facts={name: _by_label(value, boot.devices, new) for name, value in boot.facts.items()},
        failure=failure,
    )


def _by_label(value: Any, devices: Mapping[str, str], new: Mapping[str, str]) -> Any:
    """A fact with the new labels, where it is one by device."""
    if not isinstance(value, dict) or not value or not value.keys() <= devices.keys():
        return value
    return {new.get(label, label): each for label, each in value.items()}


def rank(label: str) -> tuple[bool, int, str]:
    """What labels are sorted by: ``gpu2`` before ``gpu10``, the host last."""
    return label == HOST, len(label), label
