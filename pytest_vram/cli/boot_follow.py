"""``vram boot --follow``: the phases of a boot as its log grows."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from pytest_vram.bootlog import Boot, Follower
from pytest_vram.bootlog.grammar import recognise
from pytest_vram.bootlog.reader import unknown_engine
from pytest_vram.bootlog.tailing import Tail
from pytest_vram.report.boot_lines import moment
from pytest_vram.text import printable

#: Seconds between two looks at a file that did not grow.
LOOK = 0.1
#: Looks without growth after which a failure is taken for the last word: engines recover from some.
QUIET_LOOKS = 15
#: Characters in which some line must give the engine away.
_MOST_UNKNOWN = 4 << 20


def follow(
    path: Path,
    engine: str | None,
    *,
    quiet: bool = False,
    tell: Callable[[str], None] | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> Boot:
    """Read a log while it is written, until the server is ready or has failed.

    :param quiet: tell nothing on the way. :param tell: called with each line for people.
    :raises BadInput: no file, or the log of no engine that is known.
    """
    following = _Following(path, engine, (lambda text: None) if quiet else (tell or _tell))
    with Tail(path) as tail:
        still = 0
        while True:
            fresh = tail.fresh
            lines = tail.lines()
            if tail.fresh != fresh:
                following.say("  the log begins anew")
            if not lines:
                still += 1
                if still == QUIET_LOOKS:
                    lines = tail.rest()  # a last line without an end, such as that of a program that crashed
            if lines:
                boot = following.take(lines)
                if boot is not None:
                    return boot
            if still >= QUIET_LOOKS:
                boot = following.failed()
                if boot is not None:
                    return boot
            if lines:
                still = 0
            else:
                sleep(LOOK)


def _tell(text: str) -> None:
    print(printable(text), flush=True)


class _Following:
    """The grammar of a log, once some line says whose it is."""

    def __init__(self, path: Path, engine: str | None, say: Callable[[str], None]) -> None:
        self._path = path
        self.say = say
        self._follower = None if engine is None else Follower(engine)
        self._unknown: list[str] = []
        self._size = 0

    def take(self, lines: list[str]) -> Boot | None:
        """Feed lines; the boot, where the server is ready."""
        if self._follower is None:
            self._unknown += lines
            self._size += sum(map(len, lines)) + len(lines)
            found = recognise("\n".join(lines))  # what came before gave nobody away
            if found is None:
                if self._size > _MOST_UNKNOWN:
                    raise unknown_engine(str(self._path))
                return None
            self.say(f"{self._path}: {found}")
            self._follower = Follower(found)
            lines, self._unknown = self._unknown, []
        for line in lines:
            if self._follower.feed(line) is not None:
                boot = self._follower.boot()
                begun = boot.phases[-1]
                self.say(f"  {begun.name.ljust(14)} {moment(begun.start, boot.clock):>12}")
        boot = self._follower.boot()
        return boot if boot.ready else None

    def failed(self) -> Boot | None:
        """The boot, where it failed."""
        if self._follower is None:
            return None
        boot = self._follower.boot()
        return boot if boot.failure is not None else None
