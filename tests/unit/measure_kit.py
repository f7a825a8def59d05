"""A machine on paper: processes whose memory a test sets, with true high-water marks."""

from __future__ import annotations

from collections.abc import Collection

from pytest_vram.measure import TEST, DeviceInfo, Member, Members
from pytest_vram.measure.probes import Figure, Snapshot, Sources
from pytest_vram.measure.procfs import Stat
from pytest_vram.readings import Reading


class PaperMembers(Members):
    """Members that a test adds and removes by hand."""

    def scan(self, *, look: bool = True) -> None:
        """Nothing to look at."""

    def join(self, pid: int, owner: str = TEST, root: int | None = None) -> None:
        self._add(Member(Stat(pid, f"p{pid}", "S", 1, pid, 0, pid), owner, root=root))


class PaperProbe:
    """A probe of the processes in ``held``; marks follow every change until they are reset."""

    per_process = True
    counts_pytest = False
    sources = Sources(mark="host-hwm", sampled="host-rss", now="host-anon", device="host-meminfo")
    note: str | None = None

    def __init__(self, label: str = "host", *, marked: bool = True) -> None:
        capacity = Reading(bytes=1 << 34, source="paper", scope="device", device=label, exact=True)
        self.info = DeviceInfo(label=label, kind="cpu", name="paper", capacity=capacity, source="paper")
        self.held: dict[int, int] = {}
        self.marks: dict[int, int] = {}
        self.marked = marked
        self.disturbed = False
        self.fault: str | None = None
        self.closed = False

    def set(self, pid: int, size: int) -> None:
        self.held[pid] = size
        self.marks[pid] = max(self.marks.get(pid, 0), size)

    def end(self, pid: int) -> None:
        del self.held[pid]
        self.marks.pop(pid)

    def read(self, pids: Collection[int]) -> Snapshot:
        if self.fault is not None:
            return Snapshot({}, None, fault=self.fault)
        figures = {
            pid: Figure(
                now=self.held[pid] // 2,
                held=self.held[pid],
                mark=self.marks[pid] if self.marked else None,
                disturbed=self.disturbed,
            )
            for pid in pids
            if pid in self.held
        }
        total = sum(self.held.values())
        rise = None if self.per_process else Figure(total, total)
        return Snapshot(figures, Figure(total, total), tuple(pid for pid in pids if pid not in self.held), rise=rise)

    def reset(self) -> None:
        self.marks = dict(self.held)

    def settle(self) -> None:
        pass

    def close(self) -> None:
        self.closed = True


class PaperCard:
    """A card whose processes a test sets; it has no marks unless a test gives some.

    :ivar accounting: keeps the peak of each process's whole life, as NVML's accounting does: a mark where it rose since
        the last reset, else an upper end.
    :ivar over: processes that have ended, on it or elsewhere: told for as long as they are asked for.
    :ivar hidden: bytes in use by nobody who is listed. :ivar quiet: what counts as in use before, after
        :meth:`distrust`. :ivar early: whether the run may have been on it then.
    """

    counts_pytest = True
    note: str | None = None

    def __init__(
        self, label: str = "gpu0", *, capacity: int = 1 << 34, accounting: bool = False, oversubscribes: bool = False
    ) -> None:
        size = Reading(bytes=capacity, source="paper", scope="device", device=label, exact=True)
        self.info = DeviceInfo(
            label=label,
            kind="nvml",
            name="paper card",
            capacity=size,
            source="paper",
            oversubscribes=oversubscribes,
            accounting=accounting or None,
        )
        self.held: dict[int, int] = {}
        self.lives: dict[int, int] = {}
        self.bases: dict[int, int] = {}
        self.accounting = accounting
        self.hidden = 0
        self.quiet = 0
        self.early = False
        self.per_process = True
        mark = "nvml-accounting" if accounting else "nvml-process"
        self.sources = Sources(mark, "nvml-process", "nvml-process", "nvml-device")
        self.doubt: str | None = None
        self.fault: str | None = None
        self.lost = False
        self.spill: dict[int, int] = {}
        self._ended: dict[int, Figure] = {}
        self.over: set[int] = set()
        self.closed = False
        self.reads = 0

    def distrust(self, doubt: str) -> None:
        self.per_process, self.doubt = False, doubt
        self.sources = Sources("device-delta", "device-delta", "device-delta", "nvml-device")

    def set(self, pid: int, size: int) -> None:
        self.held[pid] = size
        self.over.discard(pid)
        self.lives[pid] = max(self.lives.get(pid, 0), size)

    def end(self, pid: int) -> None:
        if self.accounting:
            self._ended[pid] = self._figure(pid)._replace(now=0, held=0)
        del self.held[pid]
        self.lives.pop(pid)
        self.bases.pop(pid, None)
        self.over.add(pid)

    def _figure(self, pid: int) -> Figure:
        held = self.held[pid]
        if not self.accounting:
            return Figure(held, held)
        life = self.lives[pid]
        return Figure(held, held, mark=life) if life > self.bases.get(pid, 0) else Figure(held, held, most=life)

    def read(self, pids: Collection[int]) -> Snapshot:
        self.reads += 1
        if self.fault is not None:
            return Snapshot({}, None, fault=self.fault, lost=self.lost)
        used = sum(self.held.values()) + self.hidden
        device = Figure(used, used)
        if not self.per_process:
            rise = max(0, used - self.quiet)
            most = used if self.early else None
            return Snapshot({}, device, rise=Figure(rise, rise, most=most), doubt=self.doubt)
        living = [pid for pid in pids if pid not in self.over]
        figures = {pid: self._figure(pid) if pid in self.held else Figure(0, 0) for pid in living}
        figures.update(self._ended)
        gone = tuple(dict.fromkeys([*self._ended, *(pid for pid in pids if pid in self.over)]))
        self._ended = {}
        self.over.intersection_update(pids)
        return Snapshot(
            figures,
            device,
            gone,
            others={pid: size for pid, size in self.held.items() if pid not in pids},
            unlisted=self.hidden,
            spill={pid: size for pid, size in self.spill.items() if pid in pids},
            doubt=self.doubt,
        )

    def reset(self) -> None:
        self.bases = dict(self.lives)

    def settle(self) -> None:
        self.quiet = sum(self.held.values()) + self.hidden

    def close(self) -> None:
        self.closed = True
