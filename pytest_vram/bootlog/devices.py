"""Engine's device names → labels: ``gpu0``, ``gpu1`` … in the order in which the log first uses them, and ``host``."""

from __future__ import annotations

import re

HOST = "host"
#: Buffer types that live in host memory whatever the backend: plain, mapped, repacked or pinned.
_HOST = re.compile(r"(?:CPU|AMX|BLAS|ACCEL|HBM|KLEIDIAI|ZDNN)(?:[_\d].*)?|.*_Host", re.ASCII)
_FLAVOUR = re.compile(r"_(?:Mapped|Private|Split|REPACK)$")
_REMOTE = re.compile(r"RPC(\d{0,9})\[(.+)\]", re.ASCII)
_ENDPOINT = re.compile(r"\S+:\d+", re.ASCII)


class Labels:
    """Gives each device of one log its label; :attr:`names` keeps label → the engine's own name."""

    def __init__(self) -> None:
        self.names: dict[str, str] = {}
        self._labels: dict[str, str] = {}
        self._remote: dict[str, str] = {}

    def of(self, name: str) -> str:
        """The label of the device behind the buffer type called ``name``.

        ``Metal`` and ``Metal_Mapped`` are one device. ``RPC0[a:1]`` and ``RPC0[b:1]`` are two: the number in a remote
        buffer's name counts the devices of that endpoint.
        """
        if _HOST.fullmatch(name):
            self.names.setdefault(HOST, "CPU")
            return HOST
        device = _FLAVOUR.sub("", name)
        remote = _REMOTE.fullmatch(device)
        key = f"{remote[2]}#{int(remote[1] or 0)}" if remote else device
        return self._label(key, device)

    def announced(self, name: str, description: str) -> str:
        """The label of a device that the log announces as in ``using device RPC1 (127.0.0.1:50052)``.

        Here the number counts all devices, so the endpoint in the description is what tells remote ones apart.
        """
        if not name.startswith("RPC") or not _ENDPOINT.fullmatch(description):
            return self.of(name)
        key = self._remote.get(name)
        if key is None:
            earlier = sum(known.rpartition("#")[0] == description for known in self._remote.values())
            key = self._remote[name] = f"{description}#{earlier}"
        return self._label(key, name if "[" in name else f"RPC{key.rpartition('#')[2]}[{description}]")

    def _label(self, key: str, name: str) -> str:
        label = self._labels.setdefault(key, f"gpu{len(self._labels)}")
        self.names.setdefault(label, name)
        return label
