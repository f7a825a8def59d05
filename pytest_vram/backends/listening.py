"""Who listens at a server's address, and since when: the evidence that a boot is a fresh one. Linux only."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from pytest_vram.keeper.messages import BACKEND_MARK, RUN_MARK, Running
from pytest_vram.measure import procfs


class Holder(msgspec.Struct, frozen=True, kw_only=True):
    """A process that has the listening socket open.

    :ivar ours: it belongs to this boot: by its ancestors, or by the mark that every process of it inherits.
    :ivar older_by: seconds by which it is older than the server's first process; 0 for a younger one.
    """

    pid: int
    program: str
    ours: bool
    older_by: float = 0.0


class Listening(msgspec.Struct, frozen=True, kw_only=True):
    """The listener at a server's address, held against its boot.

    :ivar holders: processes that can be seen to hold the socket; of one that is inherited, all.
    :ivar reason: why there are none. :ivar age: seconds since the server was started.
    :ivar log_older_by: seconds by which the log's last line was written before that; ``None``: no log, 0: after it.
    :ivar reads_port: the log's port is the one that requests go to, with nothing between them.
    """

    port: int
    holders: tuple[Holder, ...] = ()
    reason: str = ""
    age: float = 0.0
    log_older_by: float | None = None
    reads_port: bool = True


def look(running: Running, *, own_port: bool = True, proc: str = "/proc") -> Listening:
    """Who holds the socket that requests to this server reach now.

    :param own_port: the server itself listens there, and no proxy for it.
    """
    split = urlsplit(running.url)
    try:
        port = split.port or (443 if split.scheme == "https" else 80)
    except ValueError:
        port = 0
    age = max(0.0, (time.monotonic_ns() - running.t_start) / 1e9)
    log = _log_older_by(running.log, age)
    if not sys.platform.startswith("linux"):
        return Listening(port=port, reason="only Linux says who it is", age=age, log_older_by=log, reads_port=own_port)
    local = split.hostname in ("localhost", "::1") or (split.hostname or "").startswith("127.")
    inodes = {one.inode for one in procfs.listeners(port, proc) if not local or procfs.loopback(one)}
    owners = procfs.socket_owners(inodes, proc)
    reason = "" if owners else "its process belongs to another user" if inodes else "nothing listens on this machine"
    first = procfs.read_stat(running.pid, proc)
    holders = tuple(_holder(pid, running, first, proc) for pid in owners)
    return Listening(port=port, holders=holders, reason=reason, age=age, log_older_by=log, reads_port=own_port)


def _holder(pid: int, running: Running, first: procfs.Stat | None, proc: str) -> Holder:
    stat = procfs.read_stat(pid, proc)
    older = 0.0
    if stat is not None and first is not None and stat.start < first.start:
        older = (first.start - stat.start) / os.sysconf("SC_CLK_TCK")
    ours = pid in running.pids or _descends(pid, {running.pid, *running.pids}, proc)
    # A server that another run left behind has the same name, and another run's mark.
    marked = procfs.environment_value(pid, BACKEND_MARK, proc) == f"{running.name}#{running.generation}"
    run = procfs.environment_value(running.pid, RUN_MARK, proc)
    marked = marked and (run is None or run == procfs.environment_value(pid, RUN_MARK, proc))
    return Holder(
        pid=pid,
        program=procfs.program(pid, proc) or "?",
        ours=ours or marked,
        older_by=older,
    )


def _descends(pid: int, roots: Sequence[int] | set[int], proc: str) -> bool:
    for _ in range(64):
        stat = procfs.read_stat(pid, proc)
        if stat is None or stat.parent <= 1:
            return False
        pid = stat.parent
        if pid in roots:
            return True
    return False


def _log_older_by(log: str, age: float) -> float | None:
    """Seconds by which the log's last line came before the start of the server."""
    if not log:
        return None
    try:
        written = Path(log).stat().st_mtime
    except OSError:
        return None
    return max(0.0, time.time() - age - written)


def locked(running: Running, proc: str = "/proc") -> int | None:
    """Bytes that the processes of a server have locked (``VmLck``); ``None`` where none of them says."""
    found: list[int] = []
    for pid in {running.pid, *running.pids}:
        try:
            text = Path(f"{proc}/{pid}/status").read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
        if match := re.search(r"^VmLck:\s+(\d{1,18}) kB$", text, re.ASCII | re.MULTILINE):
            found.append(int(match[1]) * 1024)
    return sum(found) if found else None
