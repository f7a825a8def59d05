"""A fake NVIDIA driver under the real bindings: cards, processes, scripts of memory over time, and faults.

``nvidia-ml-py`` loads ``libnvidia-ml.so.1``. Here a small C library of that name takes the driver's place, so that
struct layouts, versioned entry points and error codes are those of the bindings and nothing of the code under test is
replaced. Its figures come from constants, from scripts of steps, or from the memory of real processes. A fake CUDA
library beside it gives contexts and allocations on the same cards, which store nothing. It says nothing about what a
call costs on a real driver. Linux only, and a C compiler is needed once: what it built is kept.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec

from pytest_vram.measure import procfs
from pytest_vram.testing.building import FakeDriverUnavailable, build
from pytest_vram.units import GIB

__all__ = [
    "Card",
    "FakeDriver",
    "FakeDriverUnavailable",
    "Fault",
    "Memory",
    "Process",
    "Script",
    "Slice",
    "fake_nvml",
    "library",
]

#: Path of NVIDIA's NVML library where it is not on the loader's path; the product reads it as well.
NVML_VARIABLE = "PYTEST_VRAM_NVML"
#: Path of NVIDIA's CUDA driver library where it is not on the loader's path.
CUDA_VARIABLE = "PYTEST_VRAM_CUDA"
#: Path of the file that says what the fake driver shows.
STATE_VARIABLE = "PYTEST_VRAM_FAKE_NVML"
#: What the driver shows for a figure that it does not have.
NOT_AVAILABLE = 2**64 - 1

Entry = Literal[
    "all", "init", "driver", "count", "handle", "name", "uuid", "index", "pci", "memory", "bar1", "processes",
    "accounting", "mig", "utilization", "addressing", "mode", "cuda",
]  # fmt: skip
Kind = Literal["compute", "graphics", "both", "mps"]
_CODES = {
    "OK": 0, "UNINITIALIZED": 1, "INVALID_ARGUMENT": 2, "NOT_SUPPORTED": 3, "NO_PERMISSION": 4, "NOT_FOUND": 6,
    "INSUFFICIENT_SIZE": 7, "DRIVER_NOT_LOADED": 9, "TIMEOUT": 10, "GPU_IS_LOST": 15, "RESET_REQUIRED": 16,
    "LIB_RM_VERSION_MISMATCH": 18, "UNKNOWN": 999,
}  # fmt: skip
_KINDS = {"compute": 1, "graphics": 2, "both": 3, "mps": 4}
_ADDRESSING = {"none": 0, "HMM": 1, "ATS": 2}
_MOST = {"cards": 16, "slices": 8, "faults": 16, "processes": 256}


class Script(msgspec.Struct, frozen=True):
    """Memory over time.

    :ivar steps: pairs of milliseconds since the start, rising, and the bytes that are held from then on.
    :ivar repeat: milliseconds after which it begins anew; ``None``: the last step stays.
    :ivar start: when it begins, ns of ``CLOCK_MONOTONIC``; ``None``: when it is handed to the driver.
    """

    steps: tuple[tuple[float, int], ...]
    repeat: float | None = None
    start: int | None = None


class Memory(msgspec.Struct, frozen=True):
    """The anonymous memory and swap of a real process beyond ``base`` bytes, read whenever the driver is asked."""

    pid: int
    base: int = 0


class Process(msgspec.Struct, frozen=True, kw_only=True):
    """A process that holds memory of a card.

    :ivar pid: one that lives is listed until it ends; one that does not exist is listed for good.
    :ivar command: instead of ``pid``: whichever living process has these words in its command line, the youngest of
        several; it is looked for when the driver is asked.
    :ivar held: what it holds: bytes, a script, or a real process's memory.
    :ivar available: false: the driver lists it without a figure; what it holds counts for the card all the same.
    :ivar slice: index of the MIG slice that it runs on.
    :ivar ends: when it leaves the card, ns of ``CLOCK_MONOTONIC``; accounting remembers it.
    :ivar born: field 22 of ``/proc/PID/stat`` of the one that is meant, 0 for one that does not exist; ``None``: of
        the one with this PID when it is handed to the driver.
    :ivar began: when it came onto the card, µs since 1970, as accounting tells; ``None``: when it is handed over.
    :ivar peaked: the most that it held before ``held`` was so, for accounting.
    """

    pid: int | None = None
    command: str | None = None
    held: int | Script | Memory = 0
    kind: Kind = "compute"
    available: bool = True
    slice: int | None = None
    ends: int | None = None
    born: int | None = None
    began: int | None = None
    peaked: int = 0


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """Something that goes wrong.

    :ivar on: calls that it is about. :ivar error: name of the NVML error without ``NVML_ERROR_``; ``OK`` with a
        ``hang`` lets the call through late. :ivar start: from when on, ns of ``CLOCK_MONOTONIC``.
    :ivar hang: milliseconds that the call takes before it answers.
    """

    on: Entry
    error: str = "OK"
    start: int = 0
    hang: float = 0.0


class Slice(msgspec.Struct, frozen=True, kw_only=True):
    """A MIG slice. Sizes are in bytes."""

    uuid: str = ""
    name: str = "NVIDIA H200 MIG 1g.35gb"
    total: int = 32 * GIB
    reserved: int = 0
    hidden: int = 0
    gpu_instance: int | None = None
    compute_instance: int = 0
    faults: tuple[Fault, ...] = ()


class Card(msgspec.Struct, frozen=True, kw_only=True):
    """A card. Sizes are in bytes; what is left empty is made up from its index.

    :ivar reserved: what the driver keeps for itself: within ``used`` of the old memory query, apart in the new one.
    :ivar hidden: in use by nobody who is listed. :ivar context: what a CUDA context on it takes.
    :ivar unified: its memory is the host's: queries of memory answer "not supported".
    :ivar oversubscribes: allocations beyond it succeed, and its ``used`` ends at its size.
    :ivar accounting: the driver keeps the exact peak of each process.
    :ivar addressing: addressing mode that it tells.
    :ivar pid_offset: how far the PIDs that are listed lie above those seen here, as in a container.
    :ivar insufficient: how often a call for the processes says "insufficient size" before it answers.
    :ivar frozen: from when on the figures of processes stand still while the card's go on, ns.
    """

    name: str = "NVIDIA GeForce RTX 3050"
    total: int = 4 * GIB
    uuid: str = ""
    pci: str = ""
    minor: int | None = None
    reserved: int = 0
    hidden: int = 0
    context: int = 0
    slices: tuple[Slice, ...] = ()
    processes: tuple[Process, ...] = ()
    faults: tuple[Fault, ...] = ()
    unified: bool = False
    oversubscribes: bool = False
    accounting: bool = False
    addressing: Literal["none", "HMM", "ATS"] = "none"
    pid_offset: int = 0
    insufficient: int = 0
    frozen: int | None = None
    utilization: tuple[int, int] = (0, 0)


class FakeDriver:
    """The cards that programs of this block see; a change is seen by the next call of any of them.

    :ivar library: path of the NVML library. :ivar cards: what is shown now.
    """

    def __init__(
        self, library: Path, state: Path, cards: Sequence[Card], driver: str, faults: tuple[Fault, ...]
    ) -> None:
        self.library = library
        self.state = state
        self.driver = driver
        self.faults = faults
        self.cards = [_named(card, index) for index, card in enumerate(cards)]
        self._write()

    def uuid(self, card: int = 0) -> str:
        """UUID of a card."""
        return self._card(card).uuid

    def update(self, card: int = 0, **changes: object) -> Card:
        """Change fields of a card; returns it as it is now.

        :raises ValueError: no such card, or a description that makes no sense.
        """
        made: Card = msgspec.structs.replace(self._card(card), **changes)
        made = _named(made, card)
        for _ in _lines([made], self.driver, ()):
            pass  # a description that makes no sense changes nothing
        self.cards[card] = made
        self._write()
        return made

    def process(
        self,
        pid: int | None = None,
        held: int | Script | Memory = 0,
        *,
        card: int = 0,
        command: str | None = None,
        kind: Kind = "compute",
        available: bool = True,
        slice: int | None = None,
        ends: int | None = None,
    ) -> Process:
        """Put a process on a card, or give the one with this PID or command there something else to hold."""
        made = Process(pid=pid, command=command, held=held, kind=kind, available=available, slice=slice, ends=ends)
        others = []
        for one in self._card(card).processes:
            if (one.pid, one.command, one.slice) != (pid, command, slice):
                others.append(one)
            elif one.ends is None:
                made = msgspec.structs.replace(made, began=one.began, born=one.born, peaked=_peak(one))
        return self.update(card, processes=(*others, made)).processes[-1]

    def end(self, pid: int, *, card: int = 0) -> None:
        """The process with this PID leaves the card; accounting remembers it.

        :raises ValueError: there is none.
        """
        now = time.monotonic_ns()
        found = self._card(card).processes
        if not any(one.pid == pid for one in found):
            raise ValueError(f"there is no process {pid} on card {card} of the fake driver")
        self.update(
            card,
            processes=tuple(msgspec.structs.replace(one, ends=now) if one.pid == pid else one for one in found),
        )

    def fail(self, on: Entry, error: str = "UNKNOWN", *, card: int | None = 0, hang: float = 0.0) -> None:
        """From now on these calls fail, or hang; of one card, or with ``card=None`` of the driver as a whole."""
        fault = Fault(on=on, error=error, hang=hang)
        if card is None:
            self.faults = (*self.faults, fault)
            self._write()
        else:
            self.update(card, faults=(*self._card(card).faults, fault))

    def lose(self, card: int = 0, *, after: float = 0.0) -> None:
        """The card falls off the bus, now or ``after`` seconds: every call about it says "GPU is lost"."""
        fault = Fault(on="all", error="GPU_IS_LOST", start=time.monotonic_ns() + int(after * 1e9))
        self.update(card, faults=(*self._card(card).faults, fault))

    def heal(self, card: int = 0) -> None:
        """All faults of the card and of the driver are gone."""
        self.faults = ()
        self.update(card, faults=())

    def write_nvidia_smi(self, folder: Path) -> Path:
        """A program ``nvidia-smi`` in this folder that prints the same figures, for tools that start one."""
        target = folder / "nvidia-smi"
        folder.mkdir(parents=True, exist_ok=True)
        made = build("fake_smi.c", "nvidia-smi", driver=_major(self.driver))
        shutil.copy2(made, target)
        return target

    def _card(self, index: int) -> Card:
        if not 0 <= index < len(self.cards):
            raise ValueError(f"the fake driver has no card {index}; it has {len(self.cards)}")
        return self.cards[index]

    def _write(self) -> None:
        text = "\n".join(_lines(self.cards, self.driver, self.faults)) + "\n"
        scratch = self.state.with_name(f"{self.state.name}.{os.getpid()}.new")
        scratch.write_text(text, encoding="utf-8")
        scratch.replace(self.state)


@contextlib.contextmanager
def fake_nvml(
    cards: Sequence[Card] = (Card(),), *, driver: str = "550.54.15", faults: tuple[Fault, ...] = ()
) -> Iterator[FakeDriver]:
    """Inside the block this process and those that it starts find these cards.

    :param driver: version of the driver; entry points that came with later ones are not there.
    :param faults: what goes wrong with the driver as a whole.
    :raises FakeDriverUnavailable: it cannot be built here. :raises ValueError: a description that makes no sense.
    """
    path = library(driver)
    cuda = build("fake_cuda.c", "libcuda.so.1", driver=_major(driver))
    variables = {NVML_VARIABLE: str(path), CUDA_VARIABLE: str(cuda)}
    with tempfile.TemporaryDirectory(prefix="vram-driver-") as folder:
        state = Path(folder) / "state"
        made = FakeDriver(path, state, cards, driver, faults)
        variables[STATE_VARIABLE] = str(state)
        before = {name: os.environ.get(name) for name in variables}
        os.environ.update(variables)
        try:
            with _bound(path):
                yield made
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value


@contextlib.contextmanager
def _bound(path: Path) -> Iterator[None]:
    """Bindings that are imported already call this library, whichever of its name they found first."""
    bindings: Any = sys.modules.get("pynvml")
    if bindings is None:
        yield
        return
    before = bindings.nvmlLib
    bindings.nvmlLib = ctypes.CDLL(str(path))
    bindings._nvmlGetFunctionPointer_cache.clear()
    try:
        yield
    finally:
        bindings.nvmlLib = before
        bindings._nvmlGetFunctionPointer_cache.clear()


def library(driver: str = "550.54.15") -> Path:
    """The NVML library that plays this driver, built where it was not before.

    :raises FakeDriverUnavailable: it cannot be built here. :raises ValueError: not a version.
    """
    return build("fake_nvml.c", "libnvidia-ml.so.1", driver=_major(driver))


def _major(driver: str) -> int:
    found = re.match(r"(\d+)(\.\d+)*$", driver)
    if found is None:
        raise ValueError(f"not a driver version: {driver!r}; such as 550.54.15")
    return int(found.group(1))


def _named(card: Card, index: int) -> Card:
    """The card with everything filled in that was left empty."""
    serial = f"{index:04x}"
    slices = tuple(
        msgspec.structs.replace(
            part,
            uuid=part.uuid or f"MIG-5ca1ab1e-{serial}-4000-8000-{number:012x}",
            gpu_instance=part.gpu_instance if part.gpu_instance is not None else number + 1,
        )
        for number, part in enumerate(card.slices)
    )
    return msgspec.structs.replace(
        card,
        uuid=card.uuid or f"GPU-5ca1ab1e-{serial}-4000-8000-000000000000",
        pci=card.pci or f"00000000:{index + 1:02X}:00.0",
        minor=index if card.minor is None else card.minor,
        slices=slices,
        processes=tuple(_started(one) for one in card.processes),
    )


def _started(process: Process) -> Process:
    held, born = process.held, process.born
    if isinstance(held, Script) and held.start is None:
        held = msgspec.structs.replace(held, start=time.monotonic_ns())
    if born is None:
        stat = procfs.read_stat(process.pid) if process.pid is not None else None
        born = stat.start if stat is not None else 0
    began = time.time_ns() // 1000 if process.began is None else process.began
    return msgspec.structs.replace(process, held=held, born=born, began=began)


def _peak(process: Process) -> int:
    """The most that a process has held until now; of a real process's memory only what was known before."""
    held = process.held
    if isinstance(held, Memory):
        return process.peaked
    if isinstance(held, Script):
        since = (time.monotonic_ns() - (held.start or 0)) / 1e6
        whole = held.repeat is not None and since >= held.repeat
        return max([process.peaked, *(size for at, size in held.steps if whole or at <= since)])
    return max(process.peaked, held)


def _lines(cards: Sequence[Card], driver: str, faults: Sequence[Fault]) -> Iterator[str]:
    _few("cards", len(cards))
    yield _line("driver", driver, f"12.{driver}", 12040)
    yield from (_fault(fault) for fault in faults)
    for card in cards:
        _few("slices", len(card.slices))
        yield _line(
            "card", card.uuid, card.name, card.pci, card.minor or 0, card.total, card.reserved, card.hidden,
            card.context, int(card.accounting), int(card.oversubscribes), _ADDRESSING[card.addressing],
            card.pid_offset, card.insufficient, card.frozen or 0, *card.utilization,
        )  # fmt: skip
        own = [Fault(on="memory", error="NOT_SUPPORTED")] if card.unified else []
        _few("faults", len(own) + len(card.faults))
        yield from (_fault(fault) for fault in (*card.faults, *own))
        for part in card.slices:
            yield _line(
                "slice", part.uuid, part.name, part.gpu_instance or 0, part.compute_instance, part.total,
                part.reserved, part.hidden,
            )  # fmt: skip
            _few("faults", len(part.faults))
            yield from (_fault(fault) for fault in part.faults)
        for process in card.processes:
            yield _process(process, card)
    _few("processes", sum(len(card.processes) for card in cards))


def _process(process: Process, card: Card) -> str:
    if (process.pid is None) == (process.command is None):
        raise ValueError("a process of the fake driver has either a pid or a command")
    if process.slice is not None and not 0 <= process.slice < len(card.slices):
        raise ValueError(f"card {card.uuid} has no slice {process.slice}; it has {len(card.slices)}")
    held = process.held
    source: tuple[str | int, ...]
    if isinstance(held, Script):
        times = [at for at, _ in held.steps]
        if times != sorted(times) or any(at < 0 for at in times):
            raise ValueError("the steps of a script must be in order of time, from 0 on")
        steps = " ".join(f"{round(at * 1e6)}:{value}" for at, value in held.steps)
        source = ("script", held.start or 0, round((held.repeat or 0) * 1e6), steps)
    elif isinstance(held, Memory):
        source = ("memory", held.pid, held.base)
    else:
        source = ("constant", held)
    return _line(
        "process", -1 if process.slice is None else process.slice, _KINDS[process.kind], process.pid or 0,
        process.born or 0, process.ends or 0, process.began or 0, process.peaked,
        int(not process.available), process.command or "", *source,
    )  # fmt: skip


def _fault(fault: Fault) -> str:
    if fault.on not in get_args(Entry):
        raise ValueError(f"no such call: {fault.on!r}; there are {', '.join(get_args(Entry))}")
    if fault.error not in _CODES:
        raise ValueError(f"no such NVML error: {fault.error!r}; there are {', '.join(_CODES)}")
    return _line("fault", fault.on, _CODES[fault.error], fault.start, round(fault.hang * 1e6))


def _line(*fields: str | int) -> str:
    made = []
    for field in fields:
        text = str(field)
        if "\t" in text or "\n" in text:
            raise ValueError(f"tabs and line ends have no place in a description: {text!r}")
        if isinstance(field, int) and not -(2**63) <= field <= NOT_AVAILABLE:
            raise ValueError(f"not a figure of 64 bits: {field}")
        made.append(text)
    return "\t".join(made)


def _few(what: str, count: int) -> None:
    if count > _MOST[what]:
        raise ValueError(f"the fake driver has room for {_MOST[what]} {what}, not {count}")
