"""A limit on the processor time of a regular expression that somebody else wrote.

An expression that backtracks, such as ``(a+)+$``, may take longer on one line than the machine will live. Python's
matcher looks for signals while it works, so a timer can end it; the timer counts this process's own processor time,
so that a machine under load costs nobody his pattern.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

#: Seconds of processor time for one line; a usable pattern takes a millionth of it.
PATIENCE = 0.5
_TIMER: Any = getattr(signal, "ITIMER_VIRTUAL", None)


class OutOfPatience(Exception):
    """The time is over."""


class Limited:
    """A block that raises :class:`OutOfPatience` when it has used so much processor time.

    Without a limit where there is no such timer: other threads than the main one, other platforms than Unix, and
    where somebody else (a profiler) uses it. A class, since it is entered for every line of a log.
    """

    def __init__(self, seconds: float = PATIENCE) -> None:
        self._seconds = seconds
        self._armed = False
        self._before: Any = None

    def __enter__(self) -> None:
        self._armed = (
            _TIMER is not None
            and threading.get_ident() == threading.main_thread().ident
            and signal.getitimer(_TIMER)[0] == 0
        )
        if self._armed:
            self._before = signal.signal(signal.SIGVTALRM, _give_up)
            signal.setitimer(_TIMER, self._seconds)

    def __exit__(self, *failure: object) -> None:
        if self._armed:
            signal.setitimer(_TIMER, 0)
            signal.signal(signal.SIGVTALRM, self._before)


def _give_up(number: int, frame: FrameType | None) -> None:
    raise OutOfPatience
