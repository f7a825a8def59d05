"""Which figures cannot be, and which can though they look as if they could not.

A figure is refused with a reason, and never corrected. Above the capacity it is impossible only where allocations
beyond the card fail; where they succeed in host memory (Windows, managed memory, AMD's GTT) the same figure is true,
and what is beyond the capacity is *spill*. Sources: vllm#33625 (198.68 GB "reserved" on a 140 GB card), a training run
that reserved 13.6 GiB of an 8 GiB laptop card under WDDM.
"""

from __future__ import annotations

from typing import NamedTuple

from pytest_vram.measure.device import DeviceInfo
from pytest_vram.measure.probes.base import Figure, Snapshot
from pytest_vram.readings import Reading

#: A figure from here on is no size but a sentinel or an underflow (2^64 less something), in bytes: no machine has it.
NO_SIZE = 1 << 50
#: Share of the capacity by which a figure may lie above it: sizes are rounded, and what the driver keeps is or is not
#: a part of them (a "24 GB" card shows 24135 of 24576 MB).
SLACK = 1 / 64
#: Bytes by which figures by process may together exceed the device's: they are not read at the same moment, and
#: memory that processes share counts for each.
FAR = 256 << 20
#: A device's figure that moves by more than this has moved, in bytes.
MOVED = 64 << 20
#: Reads in a row that must agree before figures by process are refused: one read may fall into a moment between two.
READS = 5
#: What capacities are of the device itself, and not of a part of it or of the run.
_WHOLE = (None, "card", "MIG slice")
_CARDS = ("nvml", "drm")


def refuse(size: int, *, capacity: int | None, oversubscribes: bool, source: str) -> str | None:
    """Why a figure cannot be, or ``None``.

    :param size: bytes. :param capacity: bytes of the device; ``None`` where that is not known.
    :param oversubscribes: whether allocations beyond the capacity succeed here. :param source: names the figure.
    """
    if size < 0:
        return f"{source} says {size:,} bytes, which is negative: refused"
    if size >= NO_SIZE:
        if size >= (1 << 64) - NO_SIZE:
            return f"{source} says {size:,} bytes, a negative number in 64 bits or the sign for no figure: refused"
        return f"{source} says {size:,} bytes, more than any machine has: refused"
    if capacity is not None and not oversubscribes and size > capacity * (1 + SLACK):
        return (
            f"{source} says {size:,} bytes on a device of {capacity:,}, where nothing can be allocated beyond it:"
            " refused"
        )
    return None


def beyond(size: int, capacity: int | None) -> int:
    """Bytes of a figure that lie beyond the capacity: spill, where the device can be oversubscribed."""
    return 0 if capacity is None else max(0, size - capacity)


def capacity_of(info: DeviceInfo) -> int | None:
    """Bytes of the device itself, where ``info.capacity`` is that and not a limit on a part of it."""
    capacity = info.capacity
    return capacity.bytes if isinstance(capacity, Reading) and info.limit_from in _WHOLE else None


class Checked(NamedTuple):
    """A snapshot with what cannot be taken out of it.

    :ivar device_fault: why the device's own figure was refused. :ivar suspect: figures by process were refused for what
        several reads said, so that those before are in doubt as well.
    """

    snapshot: Snapshot
    device_fault: str | None = None
    suspect: bool = False


class Judge:
    """Looks at every snapshot of one device; host memory, which the kernel counts, is let through.

    Besides single figures it refuses figures by process that together lie far above the device's, over :data:`READS`
    reads in a row, and those that stand still while the device's moves for as many reads and nobody listed explains it.
    That refuses the one read, and with it the windows that were open while the device moved; until the figures move
    again a doubt is left. It is only a doubt from the beginning where somebody else explains it: a process that is
    listed without a figure, or one that the driver does not list and that was seen to come and go before.
    """

    def __init__(self, info: DeviceInfo) -> None:
        self._info = info
        self._card = info.kind in _CARDS
        self._capacity = capacity_of(info)
        limit = NO_SIZE - 1
        if self._capacity is not None and not info.oversubscribes:
            limit = min(limit, int(self._capacity * (1 + SLACK)))
        self._limit = limit
        self._above = 0
        self._held: dict[int, int] = {}
        self._still = 0
        self._unexplained = 0
        #: What the device held beyond all listed processes when the figures by process came to a stand.
        self._reference = 0
        self._frozen: str | None = None
        #: What nobody listed held while nothing of this run was on the device, and how often it was far from that.
        self._quiet: int | None = None
        self._quiet_moved = 0
        #: The last read, where one that is equal to it only adds to the count of those that stood still.
        self._steady: Checked | None = None

    def check(self, snapshot: Snapshot) -> Checked:
        """The snapshot as evidence: the same one where there is nothing to say against it."""
        steady = self._steady
        if steady is not None and snapshot is steady.snapshot:
            self._still += 1 if self._still else 0
            return steady
        checked = self._check(snapshot)
        counting = self._above or self._unexplained or self._quiet_moved or self._frozen is not None
        # The first read at which figures stand still is the one that the next are compared to.
        first = self._held and not self._still
        self._steady = None if counting or first or checked.snapshot is not snapshot else checked
        return checked

    def _check(self, snapshot: Snapshot) -> Checked:
        if not self._card or snapshot.fault is not None:
            return Checked(snapshot)
        limit = self._limit
        listed = 0
        device = snapshot.device
        possible = device is None or 0 <= device.held <= limit
        for figure in snapshot.processes.values():
            held = figure.held
            listed += held
            if not 0 <= held <= limit or not 0 <= figure.now <= limit or not 0 <= (figure.mark or 0) <= limit:
                possible = False
        if not possible:
            self._forget()
            return self._without_impossible(snapshot)
        if device is None or not snapshot.processes or not listed:
            self._rest(snapshot, device)
            return Checked(snapshot)
        reason = self._too_much(listed, device.held)
        if reason is not None:
            return self._refused(snapshot, reason)
        # Of strangers only their movement counts: desktops share buffers, which are listed for each of them.
        stopped = self._stopped(snapshot, device.held - listed - sum(snapshot.others.values()))
        if stopped and snapshot.unlisted is not None and not self._hidden():
            assert self._frozen is not None
            return self._refused(snapshot, f"{self._frozen}: refused")
        if self._frozen is not None:
            return Checked(snapshot._replace(doubt="; ".join(filter(None, [snapshot.doubt, self._frozen]))))
        return Checked(snapshot)

    def _refused(self, snapshot: Snapshot, reason: str) -> Checked:
        faults = dict.fromkeys(snapshot.processes, reason)
        return Checked(snapshot._replace(processes={}, faults=faults), suspect=True)

    def _without_impossible(self, snapshot: Snapshot) -> Checked:
        """The snapshot without the figures that cannot be, and with reasons in their place."""
        good: dict[int, Figure] = {}
        faults = dict(snapshot.faults)
        for pid, figure in snapshot.processes.items():
            reason = self._of_figure(figure, f"the driver's figure of process {pid}")
            if reason is None:
                good[pid] = figure
            else:
                faults[pid] = reason
        device, device_fault = snapshot.device, None
        if device is not None:
            device_fault = self._of_figure(device, "the driver's figure of the device")
        changed = snapshot._replace(processes=good, faults=faults)
        if device_fault is not None:
            # What stands for the run where nobody says who holds what is made of the same figure.
            changed = changed._replace(device=None, rise=None, unlisted=None)
        return Checked(changed, device_fault)

    def _of_figure(self, figure: Figure, source: str) -> str | None:
        for size in (figure.held, figure.now, figure.mark):
            if size is not None:
                reason = refuse(size, capacity=self._capacity, oversubscribes=self._info.oversubscribes, source=source)
                if reason is not None:
                    return reason
        return None

    def _too_much(self, listed: int, used: int) -> str | None:
        """Processes that together hold far more than is used; possible where memory lies elsewhere."""
        if self._info.oversubscribes or listed <= used + FAR:
            self._above = 0
            return None
        self._above += 1
        if self._above < READS:
            return None
        return (
            f"the figures of this run's processes add up to {listed:,} bytes, and only {used:,} are in use on"
            f" {self._info.label}: refused"
        )

    def _stopped(self, snapshot: Snapshot, unlisted: int) -> bool:
        """Whether figures by process have just been seen to stand still while the device's moved, and no listed
        process explains it."""
        held = {pid: figure.held for pid, figure in snapshot.processes.items()}
        if held != self._held:
            self._forget()
            self._held = held
            return False
        self._still += 1
        if self._still == 1:
            # Not the read in which they changed: its figures may be of two moments.
            self._reference = unlisted
            return False
        moved = unlisted - self._reference
        self._unexplained = self._unexplained + 1 if abs(moved) > MOVED else 0
        if self._unexplained < READS:
            return False
        self._frozen = (
            f"the figures by process stood still for {self._still + 1} reads while what is in use on"
            f" {self._info.label} moved by {moved:+,} bytes that no listed process explains: they are frozen, or a"
            " process that the driver does not list, or lists without a figure, is on the device"
        )
        # What has moved is told; another step is another reason.
        self._reference, self._unexplained = unlisted, 0
        return True

    def _rest(self, snapshot: Snapshot, device: Figure | None) -> None:
        """Nothing of this run is on the device: what moves now is of others."""
        self._forget()
        self._above = 0
        if device is None or self._hidden():
            return
        hidden = device.held - sum(snapshot.others.values())
        if self._quiet is None:
            self._quiet = hidden
        self._quiet_moved = self._quiet_moved + 1 if abs(hidden - self._quiet) > MOVED else 0

    def _hidden(self) -> bool:
        """Whether a process that the driver does not list was seen to come or go."""
        return self._quiet_moved >= READS

    def _forget(self) -> None:
        self._held = {}
        self._still = self._unexplained = 0
        self._frozen = None
