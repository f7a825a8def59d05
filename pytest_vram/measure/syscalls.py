"""System calls of measuring that Python, or Python 3.11, has no function for. Linux only; imports everywhere."""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import sys
import time

_KCMP = {"x86_64": 312, "aarch64": 272, "riscv64": 272, "loongarch64": 272, "ppc64le": 354, "s390x": 343}
_KCMP_VM = 1


class _Setting(ctypes.Structure):
    """``struct itimerspec``: seconds and nanoseconds of the interval, and of the first time."""

    _fields_ = [(name, ctypes.c_long) for name in ("every_s", "every_ns", "first_s", "first_ns")]


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def same_memory(first: int, second: int) -> bool | None:
    """Whether two processes share one address space; ``None`` where the kernel does not tell."""
    number = _KCMP.get(platform.machine())
    if number is None:
        return None
    answer = _libc().syscall(number, first, second, _KCMP_VM, 0, 0)
    return None if answer < 0 else answer == 0


def timer() -> int:
    """A descriptor that becomes readable at the times of :func:`set_timer`, or -1 where the kernel has none."""
    if sys.platform != "linux":
        return -1
    try:
        return int(_libc().timerfd_create(time.CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC))
    except AttributeError:
        return -1


def set_timer(timer: int, nanoseconds: int) -> None:
    """Let it run out every so many nanoseconds, first that long from now. Reading it gives how often it did.

    :raises OSError: not a timer, or no such time.
    """
    whole, rest = divmod(nanoseconds, 1_000_000_000)
    setting = _Setting(whole, rest, whole, rest)
    if _libc().timerfd_settime(timer, 0, ctypes.byref(setting), None) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
