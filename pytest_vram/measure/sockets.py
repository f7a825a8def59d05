"""Who is connected with whom on this machine, from the kernel's own tables.

TCP from ``/proc/net/tcp`` and ``tcp6``, Unix sockets from the kernel's socket diagnosis (``NETLINK_SOCK_DIAG``):
``/proc/net/unix`` does not name the other end. Costs some milliseconds: for the moment when something has happened.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Collection, Iterator
from typing import NamedTuple

from pytest_vram.measure import procfs

_LISTEN, _ESTABLISHED = "0A", "01"
#: A TCP socket that speaks IPv4 may appear in the table of IPv6.
_MAPPED = "0000000000000000FFFF0000"
_LOOPBACK_6 = "00000000000000000000000001000000"
_SOCK_DIAG, _BY_FAMILY, _DUMP, _DONE, _ERROR = 4, 20, 0x301, 3, 2
_SHOW_PEER, _PEER = 4, 2
_HEADER = struct.Struct("=IHHII")
_TIMEOUT = 1.0
_MOST_GENERATIONS = 64


class TcpSocket(NamedTuple):
    """A line of the table: addresses as the kernel's hexadecimal, IPv4 within IPv6 as IPv4."""

    address: str
    port: int
    remote_address: str
    remote_port: int
    state: str
    uid: int
    inode: int


def tcp(proc: str = "/proc") -> list[TcpSocket]:
    """Every listening and every established TCP socket of this network namespace."""
    found: list[TcpSocket] = []
    for fields in procfs.tcp_lines((_LISTEN, _ESTABLISHED), proc):
        address, port = _end(fields[1])
        remote, remote_port = _end(fields[2])
        found.append(TcpSocket(address, port, remote, remote_port, fields[3], int(fields[7]), int(fields[9])))
    return found


def _end(text: str) -> tuple[str, int]:
    address, _, port = text.rpartition(":")
    return address.removeprefix(_MAPPED), int(port, 16)


def unix_peers() -> dict[int, int]:
    """Inode → inode of the other end, of every connected Unix socket; empty where the kernel does not say."""
    found: dict[int, int] = {}
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _SOCK_DIAG) as kernel:
            kernel.settimeout(_TIMEOUT)
            request = struct.pack("=BBHIIIII", socket.AF_UNIX, 0, 0, 0xFFFFFFFF, 0, _SHOW_PEER, 0, 0)
            kernel.send(_HEADER.pack(_HEADER.size + len(request), _BY_FAMILY, _DUMP, 1, 0) + request)
            while True:
                for kind, body in _messages(kernel.recv(1 << 18)):
                    if kind in (_DONE, _ERROR):
                        return found
                    _peer(body, found)
    except (OSError, AttributeError, struct.error):
        return found


def _messages(data: bytes) -> Iterator[tuple[int, bytes]]:
    while len(data) >= _HEADER.size:
        length, kind = _HEADER.unpack_from(data)[:2]
        if length < _HEADER.size:
            return
        yield kind, data[_HEADER.size : length]
        data = data[length + 3 & ~3 :]


def _peer(body: bytes, found: dict[int, int]) -> None:
    inode = struct.unpack_from("=4xI", body)[0]
    at = 16
    while at + 4 <= len(body):
        length, kind = struct.unpack_from("=HH", body, at)
        if length < 4:
            return
        if kind == _PEER and length >= 8:
            found[inode] = struct.unpack_from("=I", body, at + 4)[0]
        at += length + 3 & ~3


def inodes(pid: int, proc: str = "/proc") -> set[int] | None:
    """Inodes of a process's sockets; ``None`` when its descriptors may not be read."""
    found: set[int] = set()
    try:
        names = os.listdir(f"{proc}/{pid}/fd")
    except PermissionError:
        return None
    except OSError:
        return found
    for name in names:
        try:
            target = os.readlink(f"{proc}/{pid}/fd/{name}")
        except OSError:
            continue
        if target.startswith("socket:["):
            found.add(int(target[8:-1]))
    return found


def family(pid: int, ours: Collection[int], proc: str = "/proc") -> set[int]:
    """A process with its ancestors, its descendants and all of its session, but nothing that pytest descends from.

    A server may load a model in a child process, and listen in the parent (Ollama).

    :param ours: processes of the run: neither they nor their ancestors and sessions are of the family.
    """
    stats = {stat.pid: stat for one in procfs.pids(proc) if (stat := procfs.read_stat(one, proc)) is not None}

    def above(one: int) -> Iterator[int]:
        for _ in range(_MOST_GENERATIONS):
            stat = stats.get(one)
            if stat is None or stat.parent <= 1:
                return
            one = stat.parent
            yield one

    own = {*ours, *(parent for one in ours for parent in above(one))}
    sessions = {stats[one].session for one in own if one in stats}
    found = {pid}
    for parent in above(pid):
        # The user's service manager is everybody's ancestor.
        if stats[parent].name in ("systemd", "init"):
            break
        found.add(parent)
    me = stats.get(pid)
    session = me.session if me is not None and me.session > 0 and me.session not in sessions else None
    for other in stats.values():
        if other.session == session or pid in above(other.pid):
            found.add(other.pid)
    return found - own


def connection(ours: Collection[int], pid: int, proc: str = "/proc") -> str | None:
    """How a process of ``ours`` is connected with the family of ``pid`` now, for a person after "process"; or ``None``.

    Where the descriptors of the family may not be read (a service of another user), a port of that user counts, if no
    process that can be seen is known to own it.
    """
    theirs = family(pid, ours, proc)
    sockets: set[int] = set()
    hidden: set[int] = set()
    for one in theirs:
        read = inodes(one, proc)
        if read is not None:
            sockets |= read
            continue
        try:
            hidden.add(os.stat(f"{proc}/{one}").st_uid)
        except OSError:
            continue
    table = tcp(proc)
    ports = {one.port: False for one in table if one.state == _LISTEN and one.inode in sockets}
    for line in table:
        if line.state == _LISTEN and line.uid in hidden and line.port not in ports:
            ports[line.port] = True
    clients = {
        one.inode: one
        for one in table
        if one.state == _ESTABLISHED and one.inode and one.remote_port in ports and is_here(one)
    }
    peers = unix_peers() if sockets and proc == "/proc" else {}
    for mine in ours:
        if mine in theirs:
            continue
        for inode in inodes(mine, proc) or ():
            client = clients.get(inode)
            if client is not None and not (ports[client.remote_port] and _known(client.remote_port, table, proc)):
                return f"{mine} has a connection to its port {client.remote_port}"
            if peers.get(inode) in sockets:
                return f"{mine} has a connection to a Unix socket of it"
    return None


def is_here(one: TcpSocket) -> bool:
    """Whether the other end is this machine: whoever connects to an address of it comes from the same address."""
    remote = one.remote_address
    return remote == one.address or (len(remote) == 8 and remote.endswith("7F")) or remote == _LOOPBACK_6


def _known(port: int, table: list[TcpSocket], proc: str) -> bool:
    """Whether a listener of this port belongs to a process that can be seen, which is then not the hidden one."""
    listening = {one.inode for one in table if one.state == _LISTEN and one.port == port}
    return bool(procfs.socket_owners(listening, proc))
