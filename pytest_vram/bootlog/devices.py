"""Engine's device names → labels: ``gpu0``, ``gpu1`` … in the order in which the log first uses them, and ``host``."""

from __future__ import annotations

import re

HOST = "host"
#: Buffer types that live in host memory whatever the backend: plain, mapped, repacked or pinned.
_HOST = re.compile(r"(?:CPU|AMX|BLAS|ACCEL|HBM|KLEIDIAI|ZDNN)(?:[_\d].*)?|.*_Host", re.ASCII)
_FLAVOUR = re.compile(r"_(?:Mapped|Private|Split|REPACK)$")
_ENDPOINT = re.compile(r"(.*\d)\[.*\]", re.ASCII)


class Labels:
    """Gives each device of one log its label."""

    def __init__(self) -> None:
        self._labels: dict[str, str] = {}
        self.names: dict[str, str] = {}

    def of(self, name: str) -> str:
        """The label of the device behind the buffer type or device called ``name``.

        ``RPC0[127.0.0.1:50052]`` and ``RPC0`` are one device, and so are ``Metal`` and ``Metal_Mapped``.
        """
        if _HOST.fullmatch(name):
            self.names.setdefault(HOST, "CPU")
            return HOST
        device = _FLAVOUR.sub("", name)
        endpoint = _ENDPOINT.fullmatch(device)
        key = endpoint[1] if endpoint else device
        label = self._labels.setdefault(key, f"gpu{len(self._labels)}")
        if len(device) > len(self.names.get(label, "")):
            self.names[label] = device
        return label
