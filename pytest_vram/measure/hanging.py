"""Calls of a device's driver that may never come back."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from pytest_vram.measure.probes.nvml_library import Library

#: Seconds that a driver gets for one answer; one that wakes eight cards needs longer for all of them.
LONGEST = 10.0

_T = TypeVar("_T")
#: The thread that hangs. Nobody can end it; while it lives, nobody asks a driver again in this process.
_hanging: threading.Thread | None = None


class Hanging(Exception):
    """A driver does not come back; the text is a reason for people."""

    def __init__(self) -> None:
        super().__init__(
            f"the driver did not answer within {LONGEST:g} s and hangs; others that ask it will hang as well, and"
            " `dmesg` may say why"
        )


def hangs() -> bool:
    """Whether a driver hangs at this moment that was asked in this process."""
    return _hanging is not None and _hanging.is_alive()


def in_time(work: Callable[[], _T]) -> _T:
    """Do something that asks drivers, and what it returns or raises; in a thread, which is gone afterwards.

    :raises Hanging: nothing came back for :data:`LONGEST` seconds, or something before hangs still.
    """
    global _hanging
    if hangs():
        raise Hanging
    found: list[_T] = []
    raised: list[BaseException] = []

    def look() -> None:
        try:
            found.append(work())
        except BaseException as error:  # noqa: BLE001 - it is raised where it was asked for
            raised.append(error)

    thread = threading.Thread(target=look, daemon=True, name="vram-survey")
    thread.start()
    answers = -1
    while thread.is_alive():
        if answers == Library.answers:
            _hanging = thread
            raise Hanging
        answers = Library.answers
        thread.join(LONGEST)
    if raised:
        raise raised[0]
    return found[0]
