"""What torch says when an allocation is refused, in the words of all its releases.

vLLM, SGLang, transformers and everything else on torch end with the same sentences; each grammar decides what a
message means in its place. Sizes are printed with two digits in units of 1024, on Apple devices as ``GB`` too.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from pytest_vram.bootlog.boot import Failure
from pytest_vram.bootlog.lines import shown, size

#: Characters of a message that are looked at.
_LONGEST = 4000
_SIZE = r"(\d{1,20}(?:\.\d{1,6})?) (bytes|[KMGTkmgt]i?[Bb])\b"
_NEEDLES = (
    "out of memory",
    "tried to allocate",
    "allocate memory",
    "Unable to allocate",
    "_ALLOC_FAILED",
    "OUT_OF_DEVICE_MEMORY",
    "would exceed allowed memory",
    "Allocation on device",
    "MemoryError",
    "Invalid buffer size",
    "paging file is too small",
    "Errno 12",
)
#: ``CUDA out of memory. Tried to allocate 20.00 MiB``, of any device that torch has.
_REFUSED = re.compile(
    r"\b(?P<backend>CUDA|HIP|ROCm|XPU|NPU|MUSA|MLU|HPU|PrivateUse1|MPS backend) out of memory(?P<rest>[. (].*|$)",
    re.ASCII,
)
#: A sentence about running out, and not the message itself.
_SENTENCE = re.compile(r"^\. (?:Tried to allocate|Allocation was preemptively rejected)", re.ASCII)
#: The number of the device is printed as a character, which for device 0 ends the message.
_CUT = re.compile(r"(?:OutOfMemoryError: |!!! )Allocation on device ?[?]? ?$", re.ASCII)
_ASYNC = re.compile(r"\bAllocation on device(?: (\d{1,4}))?\b.{0,40}would exceed allowed memory", re.ASCII)
_ERROR = re.compile(
    r"\b(?P<backend>CUDA|HIP|ROCm|MUSA|XPU) (?:error|driver error): out of memory\b"
    r"|\bTriton Error \[(?P<triton>CUDA|HIP)\]: out of memory"
    r"|\bCuda failure (?:\d+ )?'out of memory'"
    r"|\bUR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY\b",
    re.ASCII,
)
_LIBRARY = re.compile(r"\b(?:CUBLAS|HIPBLAS|CUDNN|CUSOLVER|CUSPARSE|CUFFT)_STATUS_ALLOC_FAILED\b", re.ASCII)
_INVALID = re.compile(r"\bInvalid buffer size: " + _SIZE, re.ASCII)
_HOST = (
    re.compile(
        r"DefaultCPUAllocator: (?:can't allocate memory|not enough memory): you tried to allocate (?P<bytes>\d{1,19})"
        r" bytes",
        re.ASCII,
    ),
    re.compile(r"\bunable to mmap (?P<bytes>\d{1,19}) bytes from file .{0,300}Cannot allocate memory", re.ASCII),
    re.compile(r"MemoryError: Unable to allocate (?P<number>[\d.]{1,20}) (?P<unit>[KMGT]iB)", re.ASCII),
    re.compile(
        r"^\s*MemoryError:?\s*$|\[Errno 12\] Cannot allocate memory|Cannot allocate memory \(os error 12\)"
        r"|paging file is too small",
        re.ASCII,
    ),
)
_INDEX = re.compile(r"\b(?:GPU|NPU|XPU|MLU|HPU) (\d{1,4})(?: has a total capac|;)", re.ASCII)
#: Figure → where it stands. ``allocated`` and ``reserved`` are the allocator's own, by this process.
_FIGURES: tuple[tuple[str, re.Pattern[str]], ...] = tuple(
    (name, re.compile(pattern.replace("SIZE", _SIZE), re.ASCII))
    for name, pattern in (
        ("asked", r"\bTried to allocate SIZE"),
        ("asked", r"\bRequested size: SIZE"),
        ("asked", r"^\s*Requested\s*: SIZE"),
        ("total", r"\btotal capaci?ty of SIZE"),
        ("total", r"; SIZE total capacity"),
        ("total", r"^\s*Device limit\s*: SIZE"),
        ("free", r"\bof which SIZE is free"),
        ("free", r"; SIZE free"),
        ("free", r"^\s*Free \(according to CUDA\)\s*: SIZE"),
        ("allocated", r"\bOf the allocated memory SIZE is allocated by PyTorch"),
        ("allocated", r"; SIZE already allocated"),
        ("allocated", r"\(MPS allocated: SIZE"),
        ("allocated", r"^\s*Currently allocated\s*: SIZE"),
        ("reserved", r"; SIZE (?:reserved in total by PyTorch|cached)"),
        ("unallocated", r"\band SIZE is reserved by PyTorch but unallocated"),
        ("in_use", r"\bthis process has SIZE memory in use"),
        ("allowed", r"; SIZE allowed|\bmax allowed: SIZE"),
        ("allowed", r"\. SIZE allowed;"),
        ("pools", r"\bwith SIZE allocated in private pools"),
    )
)
_OTHERS = re.compile(r"\bProcess \d{1,10} has " + _SIZE + " memory in use", re.ASCII)
_SHORT_OF_ADDRESSES = re.compile(r"\[ExpandableSegmentVA\] Failed to reserve", re.ASCII)


class TorchMessage(msgspec.Struct, frozen=True):
    """A refused allocation in torch's words; sizes are bytes, ``None`` where the message has none.

    :ivar backend: ``CUDA``, ``HIP``, ``XPU``, ``MPS`` …, or ``CPU`` where the host refused.
    :ivar index: the number that this process gives the device.
    :ivar certain: false where a library gave up for want of memory as it seems, and torch itself did not say so.
    :ivar reserved: what torch's allocator took from the driver; ``allocated`` is the part that tensors use.
    :ivar in_use: what the driver counts for this process. :ivar others: what it counts for processes that the message
        names by a number: other ones, or, inside a container, this one under its outer number.
    :ivar allowed: the limit that was set for this process.
    :ivar pools: the part of ``allocated`` that is in pools of CUDA graphs.
    :ivar absurd: more was asked for than the whole device has. :ivar parts: lines with figures follow.
    :ivar listed: processes that ``others`` is the sum of.
    """

    text: str
    kind: str = "out_of_memory"
    certain: bool = True
    backend: str = ""
    index: int | None = None
    asked: int | None = None
    total: int | None = None
    free: int | None = None
    allocated: int | None = None
    reserved: int | None = None
    in_use: int | None = None
    others: int | None = None
    allowed: int | None = None
    pools: int | None = None
    absurd: bool = False
    parts: bool = False
    listed: int = 0

    @property
    def device(self) -> str | None:
        """The device as the message calls it, such as ``cuda:1``; ``None`` where it does not say which."""
        if self.backend == "MPS":
            return "mps"
        if self.index is None or not self.backend:
            return None
        return f"{self.backend.lower()}:{self.index}"

    def facts(self) -> dict[str, Any]:
        """Figures of the message as facts of a boot: they belong to no bucket."""
        in_use, others = self.in_use, self.others
        if others is not None and in_use is None and self.total is not None:
            own = self.reserved if self.reserved is not None else self.allocated or 0
            if own + others > self.total:
                in_use, others = (others if self.listed == 1 else None), None  # this process, by its outer number
        named = {
            "allocated_bytes": self.allocated,
            "reserved_bytes": self.reserved,
            "process_bytes": in_use,
            "other_processes_bytes": others,
            "allowed_bytes": self.allowed,
            "graph_pools_bytes": self.pools,
        }
        return {name: figure for name, figure in named.items() if figure is not None}

    def doubt(self) -> str | None:
        """Why a figure of the message cannot be all in the card's own memory; ``None`` where it can."""
        if self.reserved is None or self.total is None or self.reserved <= self.total:
            return None
        what = "allocated and reserved" if (self.allocated or 0) > self.total else "reserved"
        return (
            f"torch {what} more ({self.reserved:,} bytes) than the card has ({self.total:,} bytes): on Windows and WSL"
            " the driver moved the rest to host memory, which makes everything slow; elsewhere the counter is wrong,"
            " so measure the device itself"
        )

    def failure(
        self,
        *,
        phase: str | None,
        bucket: str | None,
        certainty: str,
        line: int | None = None,
        device: str | None = None,
        note: str | None = None,
    ) -> Failure:
        """The failure that this message is; what it belongs to, and how sure that is, only its place in the log tells.

        :param device: the label of the device. :param certainty: of ``phase`` and ``bucket``.
        """
        return Failure(
            kind=self.kind,
            certainty=certainty,
            text=shown(self.text),
            phase=phase,
            bucket=bucket,
            device=device,
            bytes=self.asked,
            line=line,
            free=self.free,
            total=self.total,
            absurd=self.absurd,
            note=note or self.note(),
        )

    def note(self) -> str | None:
        """What a reader must know besides, in a sentence; ``None`` where there is nothing."""
        if self.absurd:
            return "more was asked for than the whole device has: no smaller setting of the same kind helps"
        if self.kind == "out_of_memory" and not self.certain:
            return "a library of the driver could not get memory; torch itself does not say how much is free"
        if self.asked is not None and self.free is not None and self.asked <= self.free:
            if self.allowed is not None:
                return "enough was free on the device: the limit that was set for this process is what refused it"
            return "enough was free on the device, but not in one piece, or it was taken in the meantime"
        if self.others is not None and self.in_use is not None:
            return f"other processes hold {self.others:,} bytes of the device"
        return None


def read_message(text: str) -> TorchMessage | None:
    """The refused allocation in one line of a log without its prefix, or ``None``."""
    if not any(needle in text for needle in _NEEDLES):
        return None
    text = text[:_LONGEST]
    found = _device(text) or _host(text)
    return None if found is None else _judged(found)


def with_more(message: TorchMessage, text: str) -> TorchMessage:
    """The message with the figures of a line that follows it, where it has such lines (:attr:`TorchMessage.parts`)."""
    if not message.parts:
        return message
    figures = _figures(text[:_LONGEST])
    return _judged(msgspec.structs.replace(message, **figures)) if figures else message


def _device(text: str) -> TorchMessage | None:
    if match := _REFUSED.search(text):
        backend = match["backend"].removesuffix(" backend")
        rest = match["rest"]
        if backend == "MPS" or _SENTENCE.match(rest):
            index = _INDEX.search(rest)
            message = TorchMessage(
                text, backend=backend, index=int(index[1]) if index else None, absurd="more than 1EB" in rest
            )
            return msgspec.structs.replace(message, **_figures(text[match.start() :]))
        # Wrappers end the sentence here; a hint, or a person's own words, have no name of an error before it.
        bare = rest.strip() in ("", ".") and text[: match.start()].endswith("Error: ")
        return TorchMessage(text, backend=backend) if bare else None
    if match := _ASYNC.search(text):
        index_text = match[1]
        message = TorchMessage(text, backend="CUDA", index=int(index_text) if index_text else None, parts=True)
        for part in text.split("\\n")[1:]:  # the lines that follow it, in words between quotation marks
            message = with_more(message, part)
        return message
    if _CUT.search(text):
        return TorchMessage(text.rstrip(), backend="CUDA")
    if match := _ERROR.search(text):
        backend = match["backend"] or match["triton"] or ("XPU" if "UR_RESULT" in match[0] else "CUDA")
        return TorchMessage(text, backend=backend)
    if match := _LIBRARY.search(text):
        return TorchMessage(text, backend="HIP" if "HIP" in match[0] else "CUDA", certain=False)
    if match := _INVALID.search(text):
        return TorchMessage(text, backend="MPS", asked=_bytes(match[1], match[2]))
    return None


def _host(text: str) -> TorchMessage | None:
    if _SHORT_OF_ADDRESSES.search(text):
        return None  # virtual addresses ran out, no memory did
    for pattern in _HOST:
        match = pattern.search(text)
        if match is None:
            continue
        groups = match.groupdict()
        asked = int(groups["bytes"]) if groups.get("bytes") else None
        if groups.get("number"):
            asked = _bytes(groups["number"], groups["unit"])
        return TorchMessage(text, kind="host_out_of_memory", backend="CPU", asked=asked)
    return None


def _figures(text: str) -> dict[str, int]:
    found: dict[str, int] = {}
    for name, pattern in _FIGURES:
        match = None if name in found else pattern.search(text)
        if match is None:
            continue
        groups = [group for group in match.groups() if group is not None]
        amount = _bytes(groups[0], groups[1])
        if amount is not None:
            found[name] = amount
    others = [amount for match in _OTHERS.finditer(text) if (amount := _bytes(match[1], match[2])) is not None]
    if others:
        found["others"] = sum(others)
        found["listed"] = len(others)
    unallocated = found.pop("unallocated", None)
    if unallocated is not None and "allocated" in found:
        found["reserved"] = found["allocated"] + unallocated
    return found


def _judged(message: TorchMessage) -> TorchMessage:
    """With the judgement on what was asked for."""
    if message.asked is None or not message.total or message.asked <= message.total:
        return message
    return msgspec.structs.replace(message, absurd=True)


def _bytes(number: str, unit: str) -> int | None:
    """Bytes; every unit is one of 1024, however it is spelled.

    ``None`` for figures that no device has, such as 2**64, which stands for "not known".
    """
    figure = size(number, "B" if unit == "bytes" else f"{unit[0].upper()}iB")
    return None if figure is None else figure[0]
