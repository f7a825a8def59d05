"""Page faults, swap and control groups of backends, on a machine that is laid out."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pytest_vram.keeper.host_use import Counted, HostUses
from pytest_vram.keeper.messages import HostUse
from pytest_vram.measure import groups
from pytest_vram.readings import Reading, Unmeasurable
from tests.unit.measure_kit import PaperMembers

MIB = 1 << 20
AGENT = frozenset({"agent#1"})


class Machine:
    def __init__(self, root: Path) -> None:
        self.root = root
        self.group(7, "/user")
        self.members = PaperMembers()
        self.uses = HostUses(self.members, str(root), str(root / "cgroup"), me=7)

    def group(self, pid: int, path: str, *, peak: int | None = None) -> None:
        (self.root / str(pid)).mkdir(exist_ok=True)
        (self.root / str(pid) / "cgroup").write_text(f"0::{path}\n")
        folder = self.root / "cgroup" / path.lstrip("/")
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "cgroup.procs").open("a") as stream:
            stream.write(f"{pid}\n")
        if peak is not None:
            (folder / "memory.peak").write_text(f"{peak}\n")

    def set(self, pid: int, faults: int, *, waited: int = 0, swap: int = 0, parent: int = 1) -> None:
        folder = self.root / str(pid)
        folder.mkdir(exist_ok=True)
        numbers = f"{pid} (llama server) S {parent} {pid} {pid} 0 -1 0 0 0 {faults} {waited} 0 0 0 0 20 0 1 0 {pid} 0 0"
        (folder / "stat").write_text(numbers)
        (folder / "status").write_text(f"VmHWM: 10 kB\nVmRSS: 10 kB\nRssAnon: 5 kB\nVmSwap: {swap // 1024} kB\n")

    def join(self, pid: int, owner: str = "agent#1", parent: int = 1) -> None:
        self.members.join(pid, owner)
        member = self.members.get(pid)
        assert member is not None
        member.parent = parent

    def of(self, counted: Counted) -> HostUse:
        found = self.uses.of(counted)
        assert found is not None
        return found


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def swap(use: HostUse) -> int:
    assert isinstance(use.swap_grew, Reading)
    return use.swap_grew.bytes


def test_faults_of_a_window(machine: Machine) -> None:
    """A window counts the major faults of its backends while it is open, in pages and in bytes."""
    machine.set(100, 40)
    machine.join(100)
    counted = machine.uses.begin(AGENT)
    machine.set(100, 43)
    found = machine.of(counted)
    assert found.major_fault_count == 3
    assert isinstance(found.major_faults, Reading)
    assert found.major_faults.bytes == 3 * os.sysconf("SC_PAGESIZE")
    assert (found.major_faults.source, found.major_faults.exact) == ("host-faults", True)
    assert "3 major faults" in (found.major_faults.note or "")
    assert found.group_peak is None


def test_without_a_backend(machine: Machine) -> None:
    """A window that uses no backend says nothing; other backends than its own are not counted."""
    machine.set(100, 40)
    machine.join(100, "other#1")
    assert machine.uses.of(machine.uses.begin(frozenset())) is None
    counted = machine.uses.begin(AGENT)
    machine.set(100, 90)
    assert machine.of(counted).major_fault_count == 0


def test_a_backend_that_is_used_later(machine: Machine) -> None:
    """A backend counts from the moment at which the window uses it, boot and all before left out."""
    counted = machine.uses.begin(frozenset())
    machine.set(100, 500)
    machine.join(100)
    machine.uses.use(counted, AGENT)
    machine.set(100, 502)
    assert machine.of(counted).major_fault_count == 2


def test_ended_processes_keep_their_count(machine: Machine) -> None:
    """What a process of a backend did before it ended stays counted, whether or not its parent waits for it."""
    machine.set(100, 10)
    machine.set(101, 5, parent=100)
    machine.set(102, 1)
    machine.join(100)
    machine.join(101, parent=100)
    machine.join(102)
    counted = machine.uses.begin(AGENT)
    machine.set(101, 8, parent=100)
    machine.set(102, 3)
    machine.uses.tick(10**12)
    machine.members.forget(101)
    machine.members.forget(102)
    # Nobody has waited for the child yet; then its parent does, and its last faults come to light.
    assert machine.of(counted).major_fault_count == 5
    machine.set(100, 10, waited=9)
    assert machine.of(counted).major_fault_count == 6


def test_a_server_that_died(machine: Machine) -> None:
    """The count of a dead backend stays what it was."""
    machine.set(100, 10)
    machine.join(100)
    counted = machine.uses.begin(AGENT)
    machine.set(100, 14)
    machine.uses.tick(10**12)
    machine.members.forget(100)
    assert machine.of(counted).major_fault_count == 4
    assert machine.of(counted).major_fault_count == 4


def test_swap_that_grew_and_came_back(machine: Machine) -> None:
    """The most that went to swap above the opening counts, and what was there before does not."""
    machine.set(100, 0, swap=50 * MIB)
    machine.join(100)
    counted = machine.uses.begin(AGENT)
    machine.set(100, 0, swap=350 * MIB)
    machine.uses.tick(10**12)
    machine.set(100, 0, swap=0)
    assert swap(machine.of(counted)) == 300 * MIB
    assert swap(machine.of(machine.uses.begin(AGENT))) == 0


def test_looks_are_rare(machine: Machine) -> None:
    """A tick looks twice a second at most, and not at all when no window is open."""
    machine.set(100, 0)
    machine.join(100)
    machine.uses.tick(1)
    counted = machine.uses.begin(AGENT)
    machine.uses.tick(10**12)
    machine.set(100, 0, swap=MIB)
    machine.uses.tick(10**12 + 499_000_000)
    machine.set(100, 0)
    assert swap(machine.of(counted)) == 0
    machine.uses.end(counted)


def test_faults_that_cannot_be_read(machine: Machine) -> None:
    """Where the count of a living process cannot be read, there is a reason in its place, and never 0."""
    (machine.root / "100").mkdir()
    machine.join(100)
    found = machine.of(machine.uses.begin(AGENT))
    assert found.major_fault_count is None
    assert isinstance(found.major_faults, Unmeasurable)
    assert "/proc/100/stat" in found.major_faults.reason


def test_a_group_of_its_own(machine: Machine) -> None:
    """The peak of a control group counts where the backend has it to itself."""
    machine.set(100, 0)
    machine.join(100)
    machine.group(100, "/system.slice/ollama.service", peak=5 * MIB)
    found = machine.of(machine.uses.begin(AGENT)).group_peak
    assert isinstance(found, Reading)
    assert (found.bytes, found.source) == (5 * MIB, "cgroup-peak")
    assert "/system.slice/ollama.service" in (found.note or "")


def test_a_shared_group(machine: Machine) -> None:
    """A group with other processes in it is not the backend's, and says so; pytest's own group is left out."""
    machine.set(100, 0)
    machine.join(100)
    machine.group(100, "/system.slice", peak=5 * MIB)
    machine.group(55, "/system.slice")
    found = machine.of(machine.uses.begin(AGENT)).group_peak
    assert isinstance(found, Unmeasurable)
    assert "other processes" in found.reason
    machine.set(101, 0)
    machine.group(101, "/user")
    machine.join(101, "other#1")
    assert machine.of(machine.uses.begin(frozenset({"other#1"}))).group_peak is None


def test_groups_of_both_versions(tmp_path: Path) -> None:
    """The memory controller of version 1 decides where there is one; what cannot be read is None."""
    (tmp_path / "5").mkdir()
    (tmp_path / "5" / "cgroup").write_text("4:memory:/a/b\n0::/c\n")
    assert groups.memory_group(5, str(tmp_path), "/cg") == "/cg/memory/a/b"
    (tmp_path / "5" / "cgroup").write_text("1:cpu:/a\n0::/\n")
    assert groups.memory_group(5, str(tmp_path), "/cg") == "/cg"
    assert groups.memory_group(6, str(tmp_path), "/cg") is None
    assert groups.processes(str(tmp_path)) is None
    assert groups.peak(str(tmp_path)) is None
    (tmp_path / "memory.max_usage_in_bytes").write_text("77\n")
    assert groups.peak(str(tmp_path)) == 77


def test_without_swap(machine: Machine) -> None:
    """On a machine without swap nothing is read to know that none of it was used."""
    (machine.root / "swaps").write_text("Filename Type Size Used Priority\n")
    machine.uses = HostUses(machine.members, str(machine.root), str(machine.root / "cgroup"), me=7)
    machine.set(100, 0, swap=MIB)
    machine.join(100)
    found = machine.of(machine.uses.begin(AGENT)).swap_grew
    assert isinstance(found, Reading)
    assert (found.bytes, found.exact, found.note) == (0, True, "there is no swap on this machine")


def test_nothing_is_kept_of_backends_that_are_gone(machine: Machine) -> None:
    """When a backend is gone and its windows are closed, its descriptors are given up."""
    before = len(os.listdir("/proc/self/fd"))
    machine.set(100, 5)
    machine.join(100)
    counted, later = machine.uses.begin(AGENT), machine.uses.begin(AGENT)
    machine.uses.end(counted)
    assert len(os.listdir("/proc/self/fd")) == before + 1
    machine.members.forget(100)
    assert machine.of(later).major_fault_count == 0
    machine.uses.end(later)
    assert len(os.listdir("/proc/self/fd")) == before
