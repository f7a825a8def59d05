"""Reading /proc, on machines laid out by the tests."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_vram.measure import PYTEST, Members, procfs
from pytest_vram.measure.probes import HostProbe

STATUS = b"""Name:\tx
VmHWM:\t    300 kB
VmRSS:\t    200 kB
RssAnon:\t    120 kB
RssFile:\t     80 kB
VmSwap:\t      7 kB
"""


class Machine:
    """A /proc of a few processes."""

    def __init__(self, root: Path, *, with_children: bool = False) -> None:
        self.root = root
        self.with_children = with_children
        self._children: dict[int, list[int]] = {}

    def add(self, pid: int, parent: int, *, name: str = "x", flags: int = 0, state: str = "S", start: int = 0) -> None:
        folder = self.root / str(pid)
        folder.mkdir(exist_ok=True)
        numbers = [parent, pid, pid, 0, 0, flags, *[0] * 12, start or pid * 10, 0]
        (folder / "stat").write_text(f"{pid} ({name}) {state} {' '.join(map(str, numbers))}")
        (folder / "status").write_bytes(STATUS)
        (folder / "cmdline").write_bytes(name.encode() + b"\0--flag\0")
        task = folder / "task" / str(pid)
        task.mkdir(parents=True, exist_ok=True)
        (task / "stat").write_text("")
        self._children.setdefault(parent, []).append(pid)
        self._write(pid)
        self._write(parent)

    def _write(self, pid: int) -> None:
        task = self.root / str(pid) / "task" / str(pid)
        if self.with_children and task.exists():
            task.joinpath("children").write_text(" ".join(map(str, self._children.get(pid, []))))

    def remove(self, pid: int) -> None:
        for path in sorted((self.root / str(pid)).rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        (self.root / str(pid)).rmdir()
        for parent, children in self._children.items():
            if pid in children:
                children.remove(pid)
                self._write(parent)


@pytest.fixture(params=[False, True], ids=["listing", "children files"])
def machine(request: pytest.FixtureRequest, tmp_path: Path) -> Machine:
    made = Machine(tmp_path, with_children=request.param)
    made.add(1, 0)
    made.add(50, 1)  # the keeper
    made.add(100, 1)  # pytest
    return made


def members(machine: Machine, **more: object) -> Members:
    return Members(excluded=(50,), reaper=50, proc=str(machine.root), **more)  # type: ignore[arg-type]


def test_names_may_hold_anything(tmp_path: Path) -> None:
    """A process may call itself `) S 1 (`; the last parenthesis counts."""
    Machine(tmp_path).add(7, 3, name=") R 9 (a b")
    stat = procfs.read_stat(7, str(tmp_path))
    assert stat is not None
    assert (stat.name, stat.state, stat.parent, stat.start) == (") R 9 (a b", "S", 3, 70)


def test_what_is_not_there_is_none(tmp_path: Path) -> None:
    """No process, no answer; never zeros."""
    root = str(tmp_path)
    assert procfs.read_stat(5, root) is None
    assert procfs.read_memory(5, root) is None
    assert procfs.machine_memory(root) is None
    assert procfs.proportional(5, root) is None
    assert procfs.command_line(5, root) == []
    assert procfs.environment_value(5, "X", root) is None
    assert procfs.control_group_limit(root, root) is None
    assert procfs.out_of_memory_kills(root, root) is None
    with pytest.raises(ProcessLookupError, match="no process 5"):
        procfs.start_time(5, root)


def test_memory_lines() -> None:
    """Lines are kB; a zombie has none of them."""
    assert procfs.parse_memory(STATUS) == procfs.Memory(300 << 10, 200 << 10, 120 << 10, 7 << 10)
    assert procfs.parse_memory(b"Name:\tx\nState:\tZ (zombie)\n") is None


@pytest.mark.parametrize(
    ("cgroup", "files", "limit"),
    [
        ("0::/a/b\n", {"a/memory.max": "1000", "a/b/memory.max": "max"}, 1000),
        ("0::/a/b\n", {"a/memory.max": "1000", "a/b/memory.max": "500"}, 500),
        ("4:memory:/j\n", {"memory/j/memory.limit_in_bytes": "9223372036854771712"}, None),
        ("4:cpu,memory:/j\n", {"memory/j/memory.limit_in_bytes": "4096"}, 4096),
        ("3:cpu:/j\n", {"memory/j/memory.limit_in_bytes": "4096"}, None),
    ],
)
def test_control_group_limit(tmp_path: Path, cgroup: str, files: dict[str, str], limit: int | None) -> None:
    """The smallest limit of the group and the groups around it, in both versions of control groups."""
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "cgroup").write_text(cgroup)
    for name, text in files.items():
        path = tmp_path / "fs" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    assert procfs.control_group_limit(str(tmp_path), str(tmp_path / "fs")) == limit


def test_out_of_memory_kills(tmp_path: Path) -> None:
    """The kernel's count of kills is read where it keeps one."""
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "cgroup").write_text("0::/a\n")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "memory.events").write_text("low 0\noom 3\noom_kill 2\noom_group_kill 0\n")
    assert procfs.out_of_memory_kills(str(tmp_path), str(tmp_path)) == 2


@pytest.mark.parametrize(
    ("address", "local"),
    [
        ("0100007F", True),
        ("0200007F", True),
        ("00000000", True),
        ("0101A8C0", False),
        ("00000000000000000000000001000000", True),
        ("00000000000000000000000000000000", True),
        ("0000000000000000FFFF00000100007F", True),
        ("B80D0120000000000000000001000000", False),
    ],
)
def test_loopback_addresses(address: str, local: bool) -> None:
    """Addresses as the kernel writes them: which can be reached by way of loopback."""
    listener = procfs.Listener(1, address, set(address) == {"0"})
    assert procfs.loopback(listener) is local


def test_the_owner_of_a_port() -> None:
    """A listening socket leads to the process that has it."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        (found,) = procfs.listeners(port)
        assert procfs.socket_owners({found.inode}) == [os.getpid()]
    assert procfs.listeners(port) == []
    assert procfs.socket_owners(set()) == []


def test_data_limit() -> None:
    """A limit on the data size is read; none is None."""
    with subprocess.Popen(["sleep", "30"]) as process:
        import resource

        assert procfs.data_limit(process.pid) is None
        resource.prlimit(process.pid, resource.RLIMIT_DATA, (1 << 30, 1 << 30))
        assert procfs.data_limit(process.pid) == 1 << 30
        process.kill()


def test_descendants_join(machine: Machine) -> None:
    """Children of pytest and theirs belong to the run, whatever the order in which they are seen."""
    found = members(machine)
    found.adopt(100, PYTEST)
    found.scan()
    assert found.run() == []
    machine.add(300, 200)
    machine.add(200, 100)
    machine.add(400, 1)
    found.scan()
    assert sorted(found.run()) == [200, 300]
    assert [member.pid for member in found.of(PYTEST)] == [100]


def test_orphans_stay(machine: Machine) -> None:
    """A process whose parent died is still of the run, and so are its later children."""
    found = members(machine)
    found.adopt(100, PYTEST)
    machine.add(200, 100)
    machine.add(300, 200)
    found.scan()
    machine.remove(200)
    machine.add(300, 1)
    machine.add(301, 300)
    found.scan()
    assert sorted(member.pid for member in found.all()) == [100, 300, 301]
    assert [member.pid for member in found.ended()] == [200]
    assert sorted(found.run()) == [200, 300, 301]
    found.clear_ended()
    assert sorted(found.run()) == [300, 301]


def test_orphans_of_servers_are_adopted(machine: Machine) -> None:
    """A child of the keeper that it did not start belongs to the server that is named for it."""
    found = members(machine, adopter=lambda stat: "agent#1" if stat.pid == 600 else None)
    machine.add(500, 50)
    found.adopt(500, "agent#1")
    machine.add(600, 50)
    machine.add(700, 50)
    machine.add(800, 600)
    found.scan()
    assert sorted(found.group(frozenset({"agent#1"}))) == [500, 600, 800]
    assert found.group(frozenset()) == []


def test_a_double_fork_within_one_look(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A daemon keeps the owner that it was first seen with, when its parents are gone at the next look."""
    monkeypatch.setattr(procfs, "shares_memory", lambda pid, parent: False)
    found = members(machine, adopter=lambda stat: None)
    machine.add(500, 50)
    found.adopt(500, "agent#1")
    for pid, parent in ((600, 500), (601, 600), (602, 601)):
        machine.add(pid, parent, flags=procfs.FORKED_NOT_EXECUTED)
    found.scan()
    machine.remove(600)
    machine.remove(601)
    machine.add(602, 50)
    found.scan()
    assert [member.pid for member in found.of("agent#1")] == [500, 602]


def test_a_child_whose_parent_ended_between_two_files(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process whose parent vanished during the look is no stranger; it is settled at the next look."""
    found = members(machine, adopter=lambda stat: "agent#1")
    machine.add(500, 50)
    found.adopt(500, "agent#1")
    machine.add(600, 500)
    machine.add(601, 600)
    real = procfs.read_stat
    monkeypatch.setattr(procfs, "read_stat", lambda pid, proc: None if pid == 600 else real(pid, proc))
    found.scan()
    assert found.get(601) is None
    assert found.has_young()
    monkeypatch.undo()
    machine.remove(600)
    machine.add(601, 50)
    found.scan()
    assert not found.has_young()
    assert [member.pid for member in found.of("agent#1")] == [500, 601]


def test_strays(machine: Machine) -> None:
    """What left the tree is found by its marker, when it is younger than the run; its children come with it."""
    marked = {300, 400}
    machine.add(400, 1, start=5)
    found = members(machine, marked=lambda stat: stat.pid in marked)
    found.adopt(100, PYTEST)
    machine.add(300, 1, start=2000)
    machine.add(301, 300, start=2000)
    machine.add(302, 1, start=2000)
    found.scan()
    assert sorted(member.pid for member in found.of("test")) == [300, 301]
    assert [member.pid for member in found.late] == [300]
    machine.add(303, 302)
    found.scan()
    assert sorted(found.run()) == [300, 301]
    machine.remove(300)
    found.scan()
    assert [member.pid for member in found.ended()] == [300]


def test_births_are_counted() -> None:
    """The kernel's counter moves with each new process, and a file that does not count is not believed."""
    births = procfs.Births()
    before = births.count()
    assert before is not None
    subprocess.run(["/bin/true"], check=True)
    assert births.count() != before
    births.distrust()
    assert births.count() is None


def test_a_counter_that_stands_still(tmp_path: Path) -> None:
    """Where the counter is a constant, as in sandboxes, there is none."""
    (tmp_path / "loadavg").write_text("0.00 0.00 0.00 0/0 0\n")
    assert procfs.Births(str(tmp_path)).count() is None


def test_no_birth_no_walk(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the kernel counts no birth nothing is looked for, but for a look four times a second at whether that is
    true: a counter that then missed a process is not believed any more."""
    found, clock, count = members(machine, marked=lambda stat: False), 1000.0, b"1"
    monkeypatch.setattr(procfs, "boot_clock", lambda: clock)
    monkeypatch.setattr(found._births, "count", lambda: count)
    distrusted: list[bool] = []
    monkeypatch.setattr(found._births, "distrust", lambda: distrusted.append(True))
    found.adopt(100, PYTEST)
    found.scan()
    machine.add(200, 100)
    count = b"2"
    found.scan()
    assert found.run() == [200], "there was a birth"
    machine.add(300, 200)
    clock += 0.1
    found.scan()
    assert found.run() == [200]
    clock += 0.2
    found.scan()
    assert sorted(found.run()) == [200, 300]
    assert distrusted or not machine.with_children


def test_a_stray_that_was_not_looked_for(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A birth that a scan within the tree has taken in is still looked for beyond the tree at the next look."""
    found, count = members(machine, marked=lambda stat: stat.pid == 300), b"1"
    monkeypatch.setattr(procfs, "boot_clock", lambda: 1000.0)
    monkeypatch.setattr(found._births, "count", lambda: count)
    found.adopt(100, PYTEST)
    found.scan()
    machine.add(300, 1, start=2000)
    count = b"2"
    found.scan(look=False)
    found.scan()
    assert found.run() == [300]


def test_a_worker_that_introduces_itself(machine: Machine) -> None:
    """A worker counted as a test's child becomes pytest's own; its children go on counting."""
    found = members(machine)
    found.adopt(100, PYTEST)
    machine.add(200, 100)
    machine.add(300, 200)
    found.scan()
    found.adopt(200, PYTEST)
    found.scan()
    assert found.run() == [300]


def test_a_worker_that_has_not_yet(machine: Machine) -> None:
    """What may be a worker is not counted until that is known."""
    undecided = {200}
    found = members(machine, undecided=lambda stat: stat.pid in undecided)
    found.adopt(100, PYTEST)
    machine.add(200, 100)
    machine.add(201, 100)
    found.scan()
    assert found.run() == [201]
    undecided.clear()
    found.scan()
    assert sorted(found.run()) == [200, 201]


def test_everything_has_its_root(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process keeps the pytest process that it came from, though all between them end; a stray has none."""
    monkeypatch.setattr(procfs, "shares_memory", lambda pid, parent: False)
    found = members(machine, marked=lambda stat: stat.pid == 400)
    found.adopt(100, PYTEST)
    machine.add(110, 100)
    found.adopt(110, PYTEST)
    for pid, parent in ((200, 100), (300, 110), (301, 300), (400, 1)):
        machine.add(pid, parent, start=2000)
    found.scan()
    machine.remove(300)
    machine.add(301, 1, start=2000)
    machine.add(302, 301, start=2000)
    machine.add(500, 301, flags=procfs.FORKED_NOT_EXECUTED, start=2000)
    found.scan()
    machine.add(500, 1, flags=procfs.FORKED_NOT_EXECUTED, start=2000)
    found.scan()
    roots = {member.pid: member.root for member in found.all()}
    assert roots == {100: 100, 110: 110, 200: 100, 301: 110, 302: 110, 400: None, 500: 110}


def test_a_child_of_one_that_has_ended(machine: Machine) -> None:
    """A process whose parent ended, and was not collected yet, is of its parent's root."""
    found = members(machine)
    found.adopt(100, PYTEST)
    machine.add(200, 100)
    found.scan()
    machine.add(200, 100, state="Z")
    found.forget(200)
    machine.add(201, 200)
    found.scan()
    assert [(member.pid, member.root) for member in found.of("test")] == [(201, 100)]


def test_a_worker_is_the_root_of_what_it_had_started(machine: Machine) -> None:
    """What a worker started before it introduced itself is its own, and not the controller's; a server is nobody's."""
    found = members(machine)
    found.adopt(100, PYTEST)
    machine.add(200, 100)
    machine.add(300, 200)
    machine.add(301, 300)
    machine.add(400, 100)
    machine.add(500, 50)
    found.adopt(500, "agent#1")
    found.scan()
    assert [member.root for member in found.all() if member.pid in (200, 300, 301)] == [100, 100, 100]
    found.adopt(200, PYTEST)
    roots = {member.pid: member.root for member in found.all()}
    assert roots == {100: 100, 200: 200, 300: 200, 301: 200, 400: 100, 500: None}


def test_a_late_root_brings_its_children(machine: Machine) -> None:
    """Processes that were strangers' join when their root does."""
    machine.add(200, 1)
    machine.add(300, 200)
    found = members(machine)
    found.scan()
    assert found.adopt(200, "daemon#1") is not None
    found.scan()
    assert sorted(found.run()) == [200, 300]
    found.release("daemon#1")
    found.scan()
    assert found.of("daemon#1") == []
    assert found.adopt(999, "x") is None


def test_zombies_do_not_come_back(machine: Machine) -> None:
    """An ended process keeps its PID until it is collected; it joins once and leaves once."""
    found = members(machine)
    found.adopt(100, PYTEST)
    machine.add(200, 100)
    found.scan()
    machine.add(200, 100, state="Z")
    found.forget(200)
    found.clear_ended()
    found.scan()
    found.adopt(100, PYTEST)
    machine.add(201, 100, state="Z")
    found.scan()
    assert found.run() == []
    assert found.ended() == []


def test_a_forked_child_waits_one_look(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between fork and exec a process shows its parent's memory; it joins later, or at once when it executes."""
    shared = {202}
    monkeypatch.setattr(procfs, "shares_memory", lambda pid, parent: pid in shared)
    found = members(machine)
    found.adopt(100, PYTEST)
    for pid in (200, 201, 202):
        machine.add(pid, 100, flags=procfs.FORKED_NOT_EXECUTED)
    found.scan()
    assert found.run() == []
    machine.add(201, 100)
    found.scan()
    assert sorted(found.run()) == [200, 201]
    shared.clear()
    found.scan()
    assert sorted(found.run()) == [200, 201, 202]


def test_a_vfork_child_shares_memory() -> None:
    """A process shares memory with itself, and not with a forked child."""
    pid = os.fork()
    if pid == 0:
        import signal

        signal.pause()
    try:
        assert procfs.shares_memory(os.getpid(), os.getpid())
        assert not procfs.shares_memory(os.getpid(), pid)
    finally:
        os.kill(pid, 9)
        os.waitpid(pid, 0)


def test_the_mark_is_the_kernels(tmp_path: Path) -> None:
    """After a reset the mark of a real process is its peak since then, which no sample has seen."""
    from pytest_vram.measure import host_probe

    code = (
        "import sys; x = bytearray(80 << 20); del x; print(flush=True); sys.stdin.readline()\n"
        "x = bytearray(40 << 20); del x; print(flush=True); sys.stdin.read()"
    )
    probe = host_probe()
    with subprocess.Popen([sys.executable, "-S", "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.readline()
        first = probe.read([process.pid]).processes[process.pid]
        assert first.mark is not None
        assert 80 << 20 < first.mark < 110 << 20
        assert first.held < 40 << 20
        probe.reset()
        assert (probe.read([process.pid]).processes[process.pid].mark or 0) < 40 << 20
        process.stdin.write(b"\n")
        process.stdin.flush()
        process.stdout.readline()
        second = probe.read([process.pid]).processes[process.pid]
        assert second.mark is not None
        assert 40 << 20 < second.mark < 70 << 20
        assert not second.disturbed
        Path(f"/proc/{process.pid}/clear_refs").write_text("5")  # another tool
        third = probe.read([process.pid]).processes[process.pid]
        assert third.disturbed
        probe.reset()
        assert not probe.read([process.pid]).processes[process.pid].disturbed
        process.kill()
        process.wait()
        assert probe.read([process.pid]).gone == (process.pid,)
        assert probe.read([process.pid]).gone == (process.pid,)
    probe.close()


def test_a_process_that_may_not_be_reset(tmp_path: Path) -> None:
    """Where the mark cannot be set back the figure has no mark, and the probe says why."""
    from pytest_vram.measure import host_probe

    machine = Machine(tmp_path)
    machine.add(5, 1)
    probe = HostProbe(host_probe().info, str(tmp_path))
    snapshot = probe.read([5, 6])
    assert snapshot.processes[5].mark is None
    assert snapshot.processes[5].now == 127 << 10
    assert snapshot.gone == (6,)
    assert snapshot.device is None
    assert "may not be set back" in (probe.unmarked() or "")
    probe.close()
