"""Who is connected with whom: real sockets of real processes, and tables that are laid out."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pytest_vram.measure import sockets
from pytest_vram.measure.sockets import connection, family, inodes, tcp, unix_peers

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")

#: A daemon that listens in the parent and has a child that does the work (as Ollama); prints port, path and child.
DAEMON = r"""
import os, socket, sys
listening = socket.create_server(("127.0.0.1", 0))
unix = socket.socket(socket.AF_UNIX)
unix.bind(sys.argv[1])
unix.listen()
until, alive = os.pipe()
child = os.fork()
if child == 0:
    listening.close(); unix.close()
    os.close(alive)
    os.read(until, 1)
    os._exit(0)
print(listening.getsockname()[1], child, flush=True)
kept = []
for line in sys.stdin:
    kept.append((listening if line.strip() == "tcp" else unix).accept())
    print("accepted", flush=True)
"""


class Daemon:
    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self.process = subprocess.Popen(
            [sys.executable, "-S", "-c", DAEMON, self.path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self.process.stdout is not None
        self.port, self.child = map(int, self.process.stdout.readline().split())

    def accept(self, how: str) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(how + "\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "accepted\n"


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    made = Daemon(tmp_path / "s")
    yield made
    made.process.communicate()


def test_a_connection_to_the_parent_of_who_holds_the_memory(daemon: Daemon) -> None:
    """Whoever talks to the listening parent talks to the child that holds the memory; not before, and not after."""
    me = os.getpid()
    assert connection([me], daemon.child) is None
    with socket.create_connection(("127.0.0.1", daemon.port)):
        # Also while the daemon is too busy to accept it.
        assert connection([me], daemon.child) == f"{me} has a connection to its port {daemon.port}"
        daemon.accept("tcp")
        assert connection([me], daemon.process.pid) == f"{me} has a connection to its port {daemon.port}"
        assert connection([], daemon.child) is None
    assert connection([me], daemon.child) is None


def test_a_connection_over_a_unix_socket(daemon: Daemon) -> None:
    """A Unix socket counts like a port."""
    me = os.getpid()
    with socket.socket(socket.AF_UNIX) as mine:
        mine.connect(daemon.path)
        daemon.accept("unix")
        assert connection([me], daemon.child) == f"{me} has a connection to a Unix socket of it"


def test_ports_of_others_do_not_count(daemon: Daemon) -> None:
    """A connection to somebody else says nothing of the stranger."""
    me = os.getpid()
    with socket.create_server(("127.0.0.1", 0)) as other, socket.create_connection(other.getsockname()):
        assert connection([me], daemon.child) is None


def test_a_family_does_not_reach_pytest(daemon: Daemon) -> None:
    """Parent, child and session are one family; pytest, its parents and what they started are not."""
    me = os.getpid()
    assert family(daemon.child, [me]) == family(daemon.process.pid, [me]) == {daemon.process.pid, daemon.child}
    # Two that share pytest's session are strangers to each other.
    with subprocess.Popen(["sleep", "60"]) as one, subprocess.Popen(["sleep", "60"]) as two:
        found = family(one.pid, [me])
        one.kill()
        two.kill()
    assert found == {one.pid}


def test_a_family_ends_at_the_service_manager(tmp_path: Path) -> None:
    """Services of one user are not of one family, though one process has started them all."""
    process(tmp_path, 50, name="systemd")
    process(tmp_path, 60, parent=50, name="serve")
    process(tmp_path, 61, parent=60)
    process(tmp_path, 70, parent=50)
    assert family(61, [1], str(tmp_path)) == {60, 61}


def test_the_kernel_names_peers() -> None:
    """Both ends of a Unix socket know each other."""
    with contextlib.ExitStack() as stack:
        one, two = (stack.enter_context(end) for end in socket.socketpair())
        first, second = (os.fstat(end.fileno()).st_ino for end in (one, two))
        peers = unix_peers()
        if not peers:
            pytest.skip("this kernel (or sandbox) does not answer about Unix sockets")
        assert (peers[first], peers[second]) == (second, first)


HEAD = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
LINE = "   {n}: {local} {remote} {state} 00000000:00000000 00:00000000 00000000  {uid}        0 {inode} 1\n"


def laid_out(root: Path, *lines: tuple[str, str, str, int, int], name: str = "tcp") -> None:
    (root / "net").mkdir(exist_ok=True)
    text = "".join(
        LINE.format(n=n, local=local, remote=remote, state=state, uid=uid, inode=inode)
        for n, (local, remote, state, uid, inode) in enumerate(lines)
    )
    (root / "net" / name).write_text(HEAD + text)


def process(root: Path, pid: int, *found: int, parent: int = 1, name: str = "p") -> None:
    (root / str(pid) / "fd").mkdir(parents=True)
    fields = f"{pid} ({name}) S {parent} {pid} {pid} 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0 {pid} 0 0"
    (root / str(pid) / "stat").write_text(fields)
    for number, inode in enumerate(found):
        (root / str(pid) / "fd" / str(number)).symlink_to(f"socket:[{inode}]")


def test_ipv4_within_ipv6(tmp_path: Path) -> None:
    """A client of IPv4 is found at a server that listens for both; broken lines and other states are left out."""
    laid_out(tmp_path, ("0100007F:CE3E", "0100007F:2CAA", "01", 0, 7), ("0100007F:CE3E", "0100007F:2CAA", "06", 0, 8))
    mapped = "0000000000000000FFFF00000100007F"
    laid_out(
        tmp_path,
        ("0" * 32 + ":2CAA", "0" * 32 + ":0000", "0A", 0, 9),
        (f"{mapped}:2CAA", f"{mapped}:CE3E", "01", 0, 10),
        name="tcp6",
    )
    found = tcp(str(tmp_path))
    assert [(one.address, one.port, one.state, one.inode) for one in found] == [
        ("0100007F", 0xCE3E, "01", 7),
        ("0" * 32, 11434, "0A", 9),
        ("0100007F", 11434, "01", 10),
    ]
    process(tmp_path, 100, 7)
    process(tmp_path, 200, 9, 10)
    assert connection([100], 200, str(tmp_path)) == "100 has a connection to its port 11434"
    assert inodes(200, str(tmp_path)) == {9, 10}


def test_a_connection_to_another_machine(tmp_path: Path) -> None:
    """The same port at another machine is not the stranger's."""
    laid_out(tmp_path, ("0A00000A:CE3E", "0B00000A:2CAA", "01", 0, 7), ("00000000:2CAA", "00000000:0000", "0A", 0, 9))
    process(tmp_path, 100, 7)
    process(tmp_path, 200, 9)
    assert connection([100], 200, str(tmp_path)) is None


@pytest.mark.parametrize("known", [False, True])
def test_a_service_of_another_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, known: bool) -> None:
    """Where a stranger's descriptors may not be read, a port of its user counts, unless somebody else is seen to own
    it."""
    mine = os.getuid()
    laid_out(
        tmp_path, ("0100007F:CE3E", "0100007F:2CAA", "01", 5, 7), ("0100007F:2CAA", "00000000:0000", "0A", mine, 9)
    )
    process(tmp_path, 100, 7)
    process(tmp_path, 200)
    process(tmp_path, 300, *([9] if known else []))
    read = sockets.inodes
    monkeypatch.setattr(sockets, "inodes", lambda pid, proc: None if pid == 200 else read(pid, proc))
    words = connection([100], 200, str(tmp_path))
    assert words == (None if known else "100 has a connection to its port 11434")


def test_nothing_to_read(tmp_path: Path) -> None:
    """Without tables and without the process nobody is connected."""
    assert tcp(str(tmp_path)) == []
    assert connection([1], 2, str(tmp_path)) is None
