"""The one system call of measuring that Python has no function for. Linux only; imports everywhere."""

from __future__ import annotations

import ctypes
import functools
import platform

_KCMP = {"x86_64": 312, "aarch64": 272, "riscv64": 272, "loongarch64": 272, "ppc64le": 354, "s390x": 343}
_KCMP_VM = 1


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
