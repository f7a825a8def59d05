"""Engine's device names → labels: ``gpu0``, ``gpu1`` … in the order in which the log first uses them, and ``host``."""

from __future__ import annotations

import re
from collections.abc import Mapping

HOST = "host"
#: Buffer types that live in host memory whatever the backend: plain, mapped, repacked or pinned.
_HOST = re.compile(r"(?:CPU|AMX|BLAS|ACCEL|HBM|KLEIDIAI|ZDNN)(?:[_\d].*)?|.*_Host", re.ASCII)
#: ``HTP0-REPACK`` and ``HTP0`` are one device, as are ``Metal``, ``Metal_Mapped`` and ``Metal_Private``.
FLAVOUR = re.compile(r"[_-](?:Mapped|Private|REPACK)$")
#: Rows of a matrix on several devices (``--split-mode row``): ``CUDA_Split``, in 2025 ``CUDA0_Split`` (the main one).
_SPLIT = re.compile(r"([A-Za-z]+)\d{0,4}_Split", re.ASCII)
#: Backends that share llama.cpp's code for CUDA, and print its messages: all say "cudaMalloc failed … on device 0".
_LIKE_CUDA = re.compile(r"(CUDA|ROCm|MUSA)(\d{1,4})", re.ASCII)
_NUMBERED = re.compile(r"([A-Za-z]+)\d{1,4}", re.ASCII)
_REMOTE = re.compile(r"RPC(\d{0,9})\[(.+)\]", re.ASCII)
_ENDPOINT = re.compile(r"\S+:\d+", re.ASCII)


def named(label: str, devices: Mapping[str, str]) -> str:
    """A label for people, with the engine's own name where it is known: ``gpu4 (CUDA4)``; ``GPU0`` says no more."""
    name = devices.get(label)
    return label if label == HOST or not name or name.lower() == label else f"{label} ({name})"


class Labels:
    """Gives each device of one log its label; :attr:`names` keeps label → the engine's own name."""

    def __init__(self) -> None:
        self.names: dict[str, str] = {}
        self._labels: dict[str, str] = {}
        self._remote: dict[str, str] = {}

    def copy(self) -> Labels:
        """The same labels so far, to which more may be given without a trace here."""
        twin = Labels()
        twin.names, twin._labels, twin._remote = dict(self.names), dict(self._labels), dict(self._remote)
        return twin

    def of(self, name: str) -> str:
        """The label of the device behind the buffer type called ``name``.

        ``Metal`` and ``Metal_Mapped`` are one device. ``RPC0[a:1]`` and ``RPC0[b:1]`` are two: the number in a remote
        buffer's name counts the devices of that endpoint. ``CUDA_Split``, which lies on several devices, has a label
        of its own, unless the log knows of one such device only.
        """
        if _HOST.fullmatch(name):
            self.names.setdefault(HOST, "CPU")
            return HOST
        device = FLAVOUR.sub("", name)
        if split := _SPLIT.fullmatch(device):
            alone = [known for known in self._labels if (n := _NUMBERED.fullmatch(known)) and n[1] == split[1]]
            if len(alone) == 1:
                return self._labels[alone[0]]
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

    def known(self, name: str) -> str | None:
        """The label that this device has already, ``None`` where it has none."""
        return self._labels.get(self._remote.get(name, name))

    def like_cuda(self, number: int, *, otherwise: str = "CUDA") -> str:
        """The name of the device that messages of the CUDA code call "device N": of a ROCm build it is ``ROCmN``."""
        families = {match[1] for known in self._labels if (match := _LIKE_CUDA.fullmatch(known))}
        return f"{families.pop() if len(families) == 1 else otherwise}{number}"

    def split_over_devices(self, label: str) -> bool:
        """True for the label of buffers that lie on several devices, of which nobody printed how much on which."""
        name = self.names.get(label, "")
        return _SPLIT.fullmatch(name) is not None or name.startswith("Meta(") or " together" in name

    def _label(self, key: str, name: str) -> str:
        label = self._labels.setdefault(key, f"gpu{len(self._labels)}")
        self.names.setdefault(label, name)
        return label
