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

    def join(self, pid: int, owner: str = TEST) -> None:
        self._add(Member(Stat(pid, f"p{pid}", "S", 1, pid, 0, pid), owner))


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
