"""Who inherits whom, and who dies with whom. Linux only; imports everywhere, and next to nothing."""

from __future__ import annotations

import ctypes
import os

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def die_with_parent(signal: int) -> None:
    """Ask the kernel to send this process ``signal`` when its parent dies; kept over ``exec``, not over ``fork``."""
    _prctl(_PR_SET_PDEATHSIG, signal)


def adopt_orphans() -> None:
    """Make orphaned descendants children of this process and not of PID 1 (``PR_SET_CHILD_SUBREAPER``)."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def descendants(root: int) -> list[int]:
    """PIDs of all that run below a process; nothing where there is no ``/proc``."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc") if os.path.isdir("/proc") else ():
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as stream:
                    state, parent = stream.read().rpartition(b")")[2].split()[:2]
            except (OSError, ValueError):
                continue
            if state not in (b"Z", b"X"):
                children.setdefault(int(parent), []).append(int(name))
    found: list[int] = []
    waiting = [root]
    while waiting:
        for pid in children.get(waiting.pop(), ()):
            found.append(pid)
            waiting.append(pid)
    return found
