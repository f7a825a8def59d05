"""The ballast: a process that occupies what of a CUDA device shall not be there, until its standard input ends.

Run by the keeper as ``python -m pytest_vram.keeper.occupy UUID BYTES``, with the device alone in
``CUDA_VISIBLE_DEVICES``. It says one line of JSON, ``{"held": …, "free": …}`` or ``{"error": …}``. Talks to CUDA's
driver through ctypes; :data:`VARIABLE` names another library than ``libcuda.so.1``. Standard library only.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys

VARIABLE = "PYTEST_VRAM_CUDA"
NAME = b"vram-ballast"
_PR_SET_NAME = 15
_OUT_OF_MEMORY = 2
_LARGEST = 1 << 30
#: Drivers give memory in pieces of 2 MiB; less than one piece more than was asked to be left is as near as it gets.
_SMALLEST = 2 << 20


class Trouble(Exception):
    """Why the device cannot be occupied, as the end of a sentence."""


class Driver:
    """The few calls of CUDA's driver that are needed."""

    def __init__(self, path: str) -> None:
        try:
            self._library = ctypes.CDLL(path)
        except OSError as error:
            raise Trouble(f"CUDA's driver library cannot be loaded ({error})") from None

    def call(self, name: str, *arguments: object) -> None:
        """Call a function that returns a status.

        :raises Trouble: it failed, with CUDA's name for it.
        """
        status = self.status(name, *arguments)
        if status != 0:
            raise Trouble(f"{name} failed: {self._words(status)}")

    def status(self, name: str, *arguments: object) -> int:
        """Status of a call."""
        try:
            function = getattr(self._library, name)
        except AttributeError:
            raise Trouble(f"CUDA's driver library has no {name}") from None
        return int(function(*arguments))

    def _words(self, status: int) -> str:
        name = ctypes.c_char_p()
        try:
            self._library.cuGetErrorName(status, ctypes.byref(name))
        except AttributeError:
            return f"status {status}"
        return name.value.decode("ascii", "replace") if name.value else f"status {status}"


def occupy(driver: Driver, uuid: str, leave: int) -> tuple[int, int]:
    """Allocate until ``leave`` bytes are free; bytes allocated, and bytes free then (less than 2 MiB over ``leave``).

    :raises Trouble: the device is not there, or less is free already.
    """
    driver.call("cuInit", 0)
    device = ctypes.c_int()
    driver.call("cuDeviceGet", ctypes.byref(device), 0)
    found = _uuid(driver, device)
    if not uuid.endswith(found):  # "GPU-…" and "MIG-…"
        raise Trouble(f"CUDA shows the device {found} where {uuid} was asked for")
    context = ctypes.c_void_p()
    driver.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    driver.call("cuCtxSetCurrent", context)
    free = _free(driver)
    if free < leave:
        raise Trouble(f"others hold so much of it that only {free:,} bytes are free")
    held, piece = 0, _LARGEST
    pointer = ctypes.c_uint64()
    while free - leave >= _SMALLEST and piece >= _SMALLEST:
        size = min(piece, (free - leave) // _SMALLEST * _SMALLEST)
        status = driver.status("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(size))
        if status == _OUT_OF_MEMORY:
            piece = size // 2 // _SMALLEST * _SMALLEST
            continue
        if status != 0:
            raise Trouble(f"an allocation of {size:,} bytes failed with status {status}")
        held += size
        free = _free(driver)
    if free < leave:
        raise Trouble(f"others took memory meanwhile: {free:,} bytes are free, {leave:,} were to be left")
    if free - leave >= _SMALLEST:
        raise Trouble(f"{free - leave:,} bytes more than wanted stay free, and CUDA gives no more of them")
    return held, free


def _free(driver: Driver) -> int:
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    driver.call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
    return free.value


def _uuid(driver: Driver, device: ctypes.c_int) -> str:
    raw = (ctypes.c_ubyte * 16)()
    try:
        driver.call("cuDeviceGetUuid_v2", ctypes.byref(raw), device)
    except Trouble:
        driver.call("cuDeviceGetUuid", ctypes.byref(raw), device)
    text = bytes(raw).hex()
    return "-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:]))


def main() -> None:
    """Occupy, say so, and wait for the end of standard input."""
    from pytest_vram.keeper import parents

    parents.die_with_parent(signal.SIGKILL)
    ctypes.CDLL(None).prctl(_PR_SET_NAME, NAME, 0, 0, 0)
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    answer: dict[str, object]
    try:
        driver = Driver(os.environ.get(VARIABLE) or "libcuda.so.1")
        held, free = occupy(driver, sys.argv[1], int(sys.argv[2]))
        answer = {"held": held, "free": free}
    except Trouble as error:
        answer = {"error": str(error)}
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()
    if "error" not in answer:
        sys.stdin.buffer.read()


if __name__ == "__main__":
    main()
