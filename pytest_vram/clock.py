"""Time as an argument, so that tests do not sleep.

All figures of a run share ``CLOCK_MONOTONIC``, which every process of one machine reads alike.
"""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """What the package needs of time."""

    def now(self) -> int:
        """Monotonic time in nanoseconds."""

    def sleep(self, seconds: float) -> None:
        """Wait."""


class SystemClock:
    """The machine's own clock."""

    def now(self) -> int:
        """``time.monotonic_ns()``."""
        return time.monotonic_ns()

    def sleep(self, seconds: float) -> None:
        """``time.sleep``."""
        time.sleep(seconds)
