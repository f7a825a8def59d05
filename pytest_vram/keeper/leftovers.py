"""What runs that are over have left on this machine: processes, sockets, limits and lease files. Linux only.

A process belongs to a run by the mark in its environment; it is a leftover when the run's controller is gone. Only
processes of this user, and of the PID namespace that this process is in, are looked at: elsewhere numbers mean others.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from pytest_vram.errors import VramError
from pytest_vram.keeper import limits
from pytest_vram.keeper.launch import socket_path
from pytest_vram.keeper.messages import CONTROLLER_MARK, RUN_MARK
from pytest_vram.measure import procfs

#: Seconds in which a keeper whose controller has gone ends everything itself.
GRACE = 4.0
#: Seconds between SIGTERM and SIGKILL, and for the kernel to end what was killed.
_TERM, _KILL = 2.0, 2.0
_ROUNDS = 3
_KEEPER = "pytest_vram.keeper"
#: Seconds for which a new socket is left alone: its keeper may not listen yet.
_NEW = 5.0


class Left(NamedTuple):
    """A process of a run that is over. :ivar marked: it carries the run's mark itself, and is not only below or beside
    one that does. :ivar depth: how many leftovers are above it.
    """

    pid: int
    start: int
    run: str
    command: str
    marked: bool
    depth: int = 0

    @property
    def keeper(self) -> bool:
        """Whether it is a keeper, or its guard."""
        return _KEEPER in self.command


def find() -> list[Left]:
    """Every leftover, those without others below them first."""
    stats = {pid: stat for pid in _ours() if (stat := procfs.read_stat(pid)) is not None and stat.state not in "ZX"}
    spared = _above(stats, os.getpid())
    runs: dict[int, str] = {}
    controllers: dict[str, str | None] = {}
    keepers: set[str] = set()
    for pid in stats:
        run = procfs.environment_value(pid, RUN_MARK)
        if run is None:
            continue
        runs[pid] = run
        controllers[run] = procfs.environment_value(pid, CONTROLLER_MARK) or controllers.get(run)
        if _KEEPER in _command(pid):
            keepers.add(run)
    over = {run: _is_over(run, controller, kept=run in keepers) for run, controller in controllers.items()}
    marked = {pid for pid, run in runs.items() if over[run] and pid not in spared}
    children: dict[int, list[int]] = {}
    for stat in stats.values():
        children.setdefault(stat.parent, []).append(stat.pid)
        if stat.session != stat.pid and stat.session in marked:
            children.setdefault(stat.session, []).append(stat.pid)
    found: dict[int, Left] = {}
    waiting = [(pid, runs[pid], 0) for pid in marked]
    while waiting:
        pid, run, depth = waiting.pop()
        known = found.get(pid)
        alive = pid in runs and not over[runs[pid]]
        if pid in spared or alive or (known is not None and known.depth >= depth) or depth > len(stats):
            continue
        own = runs.get(pid, run)
        found[pid] = Left(pid, stats[pid].start, own, _command(pid)[:200], pid in marked, depth)
        waiting += [(child, own, depth + 1) for child in children.get(pid, ())]
    return sorted(found.values(), key=lambda one: (-one.depth, one.pid))


def reap(*, grace: float = GRACE) -> tuple[list[Left], list[Left]]:
    """End every leftover; those that were ended, and those that are still there.

    :param grace: seconds that keepers whose controller is gone get to do it themselves.
    """
    ended: dict[tuple[int, int], Left] = {}
    deadline = time.monotonic() + grace
    while any(one.keeper for one in find()) and time.monotonic() < deadline:
        time.sleep(0.1)
    for _ in range(_ROUNDS):
        found = find()
        if not found:
            break
        for one in _end(found):
            ended[one.pid, one.start] = one
    return list(ended.values()), find()


def clean(runs: Iterable[str] = ()) -> list[str]:
    """Remove sockets, limits and lease files of runs that are over; one sentence for each that there was."""
    from pytest_vram.keeper.listening import remove_stale

    done: list[str] = []
    try:
        folder = Path(socket_path("any")).parent
        paths = [Path(socket_path(run)) for run in runs]
    except VramError:
        return done
    removed = remove_stale(folder, older=_NEW)
    for path in paths:
        if path.exists() and not answers(str(path)):
            path.unlink(missing_ok=True)
            removed += 1
    if removed:
        done.append(f"{removed} socket{'s' if removed > 1 else ''} of keepers that are gone")
    for path in limits.stale(folder):
        lifted = limits.lift(path)
        done.append(f"the limit of a played card on {', '.join(f'process {pid}' for pid in lifted) or 'no process'}")
    gone = _clean_board()
    if gone:
        done.append(f"{gone} lease file{'s' if gone > 1 else ''} of runs that are gone")
    return done


def answers(path: str) -> bool:
    """Whether somebody listens at this socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(path)
        except OSError as error:
            return isinstance(error, TimeoutError | BlockingIOError)  # somebody is there, and busy
    return True


# ------------------------------------------------------------ looking


def _ours() -> list[int]:
    """PIDs of this user's processes in this PID namespace; none where there is no ``/proc``."""
    if not os.path.isdir("/proc/self/ns"):
        return []
    me, space = os.getuid(), _namespace("self")
    found = []
    for pid in procfs.pids():
        with contextlib.suppress(OSError):
            if os.stat(f"/proc/{pid}").st_uid == me and _namespace(str(pid)) == space:
                found.append(pid)
    return found


def _namespace(pid: str) -> str:
    return os.readlink(f"/proc/{pid}/ns/pid")


def _above(stats: dict[int, procfs.Stat], pid: int) -> set[int]:
    """A process and all above it, which must never be ended from below."""
    found: set[int] = set()
    while pid in stats and pid not in found:
        found.add(pid)
        pid = stats[pid].parent
    return found


def _command(pid: int) -> str:
    return " ".join(procfs.command_line(pid))


def _is_over(run: str, controller: str | None, *, kept: bool) -> bool:
    """Whether a run has ended: its controller is gone, or, where nothing names that, nobody keeps it."""
    pid, _, start = (controller or "").partition(":")
    if pid.isdigit() and start.isdigit():
        return not procfs.alive(int(pid), int(start))
    if kept:
        return False
    try:
        return not answers(socket_path(run))
    except VramError:
        return True


# ------------------------------------------------------------ ending


def _end(found: list[Left]) -> list[Left]:
    """SIGTERM, then SIGKILL; those that ended."""
    handles = [(one, handle) for one in found if (handle := _handle(one)) is not None]
    try:
        waiting = {handle: one for one, handle in handles}
        ended = select.poll()
        for handle in waiting:
            ended.register(handle, select.POLLIN)
        for number, seconds in ((signal.SIGTERM, _TERM), (signal.SIGKILL, _KILL)):
            for handle in waiting:
                for send in (number, signal.SIGCONT):  # one that is stopped would not hear the first
                    with contextlib.suppress(OSError):
                        signal.pidfd_send_signal(handle, send)
            deadline = time.monotonic() + seconds
            while waiting and (left := deadline - time.monotonic()) > 0:
                # Not select(): a process with many open files has descriptors that it refuses.
                for handle, _ in ended.poll(left * 1000):
                    ended.unregister(handle)
                    del waiting[handle]
        return [one for one, handle in handles if handle not in waiting]
    finally:
        for _, handle in handles:
            os.close(handle)


def _handle(one: Left) -> int | None:
    """A descriptor of the process, once it is certain that it is the one that was found, and that its run is over.

    What is sent to it later reaches this process or none, whoever has its number by then.
    """
    try:
        handle = os.pidfd_open(one.pid)
    except OSError:
        return None
    run = procfs.environment_value(one.pid, RUN_MARK)
    controller = procfs.environment_value(one.pid, CONTROLLER_MARK)
    same = procfs.alive(one.pid, one.start) and (not one.marked or run == one.run)
    if same and (not one.marked or _is_over(one.run, controller, kept=False)):
        return handle
    os.close(handle)
    return None


def _clean_board() -> int:
    """Remove the lease files of dead runs; how many."""
    from pytest_vram.leases import Board, BoardTrouble, shared_folder

    try:
        folder = shared_folder()
        before = {path.name for path in folder.glob("*.lease")}
        if not before:
            return 0
        board = Board(folder, "reap")
    except (BoardTrouble, OSError):
        return 0
    try:
        if not board.begin():
            return 0
        try:
            board.others()
        finally:
            board.end()
        return len(before - {path.name for path in folder.glob("*.lease")})
    except OSError:
        return 0
    finally:
        board.close()
