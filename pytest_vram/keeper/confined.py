"""A guard around one program that must not outlive who asked for it: ``python -m pytest_vram.keeper.confined``.

It starts the program, adopts everything that the program leaves behind (a *subreaper*: also what forked twice or has a
session of its own) and, as soon as its standard input ends, kills all of it. That input is a pipe whose other end only
the asker has, so that it ends with the asker however that one dies; where it did not say ``end`` before, its temporary
folder is removed as well. What is reported goes to a second pipe, one line each: ``started PID`` or ``failed REASON``,
then ``ended CODE``.

It has nothing else to do and imports next to nothing. Without ``/proc`` it kills the program's process group.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from pytest_vram.keeper import parents

_SECONDS_TO_KILL = 10.0
_ORDER_BYTES = 1 << 22


def main() -> None:
    """Read an order, do it, and end with nothing left."""
    order, rest = _order()
    report: int = order["report"]
    for name in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM):
        # Not SIG_IGN, which the program would inherit.
        signal.signal(name, lambda *_: None)
    wake, woken = os.pipe()
    os.set_blocking(woken, False)
    signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    if sys.platform.startswith("linux"):
        parents.adopt_orphans()
    try:
        program = subprocess.Popen(
            order["argv"],
            stdin=subprocess.DEVNULL,
            stderr=subprocess.STDOUT,
            env=order["environment"],
            cwd=order["folder"],
            start_new_session=True,
            preexec_fn=_prepare(order["most_data"]),
        )
    except (OSError, subprocess.SubprocessError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        os.write(report, f"failed {reason}\n".encode())
        return
    # The asker waits for the end of this pipe, and only the program's copies are to count.
    os.dup2(2, 1)
    os.write(report, f"started {program.pid}\n".encode())
    found = _until_told(program.pid, report, wake, rest)
    ended = _end_all(program.pid, report)
    if not found:
        _remove(order["remove"])
    os._exit(0 if ended else 1)


def _order() -> tuple[dict[str, Any], bytes]:
    """The first line of the input, and what came with it."""
    text = b""
    while b"\n" not in text and len(text) < _ORDER_BYTES:
        more = os.read(0, 1 << 16)
        if not more:
            os._exit(1)
        text += more
    line, _, rest = text.partition(b"\n")
    return json.loads(line), rest


def _prepare(most_data: int | None) -> Callable[[], None]:
    """What the child does before it becomes the program: die with the guard, leave no core file, keep to its limit."""
    import resource

    guard = os.getpid()

    def prepare() -> None:
        if sys.platform.startswith("linux"):
            parents.die_with_parent(signal.SIGKILL)
            if os.getppid() != guard:  # it died in between, and the signal was missed
                os._exit(1)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if most_data is not None:
            _, hard = resource.getrlimit(resource.RLIMIT_DATA)
            most = most_data if hard == resource.RLIM_INFINITY else min(most_data, hard)
            resource.setrlimit(resource.RLIMIT_DATA, (most, most))

    return prepare


def _until_told(pid: int, report: int, wake: int, said: bytes) -> bool:
    """Wait until the asker says ``end`` (true) or is gone; what ends meanwhile is collected."""
    while True:
        if b"end" in said:
            return True
        ready, _, _ = select.select([0, wake], [], [])
        if wake in ready:
            os.read(wake, 512)
            _collect(pid, report)
        if 0 in ready:
            more = os.read(0, 512)
            if not more:
                return False
            said += more


def _collect(pid: int, report: int) -> None:
    """Take the status of what has ended, and report the program's own."""
    while True:
        try:
            ended, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not ended:
            return
        if ended == pid:
            _tell(report, f"ended {os.waitstatus_to_exitcode(status)}\n")


def _tell(report: int, text: str) -> None:
    try:
        os.write(report, text.encode())
    except OSError:  # nobody is there to read it
        pass


def _end_all(pid: int, report: int) -> bool:
    """Kill everything until nothing is left; a process may fork between the look and the kill."""
    quiet, deadline = 0, time.monotonic() + _SECONDS_TO_KILL
    while quiet < 2 and time.monotonic() < deadline:
        found = parents.descendants(os.getpid()) if os.path.isdir("/proc") else _group(pid)
        for one in found:
            try:
                os.kill(one, signal.SIGKILL)
            except OSError:
                pass
        _collect(pid, report)
        quiet = 0 if found else quiet + 1
        if found:
            time.sleep(0.002)
    return quiet == 2


def _group(pid: int) -> list[int]:
    """Where descendants cannot be listed: kill the program's process group, empty when it is gone."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except OSError:
        return []
    return [pid]


def _remove(folder: str) -> None:
    """Remove a folder of links and pipes."""
    try:
        for name in os.listdir(folder):
            os.unlink(os.path.join(folder, name))
        os.rmdir(folder)
    except OSError:
        pass


if __name__ == "__main__":
    main()
