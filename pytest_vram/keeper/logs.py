"""Logs of servers: following one that grows, and keeping it from filling the disk."""

from __future__ import annotations

import os
from pathlib import Path

from pytest_vram.units import mib

#: Most bytes of a server's log, give or take what it writes between two looks.
MOST = 256 << 20
#: Bytes that stay when a log is cut: its beginning, where the boot is.
BEGINNING = 192 << 20
_END = 64 << 10
_ROUNDS = 8
_MOST_READ = 128 << 10
#: Bytes of the end of a log that are read when it grows faster than it is read, and when its server has ended.
_MOST_AT_END = 2 << 20
_MOST_BEHIND = 16 << 20
_LONGEST_LINE = 64 << 10


class CappedLog:
    """A log of a running server that is cut when it grows beyond ``most`` bytes.

    The server has a plain descriptor of the file, opened for appending, so that it never waits for a reader and goes
    on when there is none. A cut leaves the beginning and the last lines; the server appends after them. What it writes
    in the microseconds of the cut may be lost.

    :ivar left_out: bytes that are not in the file any more.
    """

    def __init__(self, path: Path, *, most: int = MOST, beginning: int = BEGINNING) -> None:
        self._most = most
        self._beginning = beginning
        self.left_out = 0
        self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)

    def look(self) -> bool:
        """Cut the log if it is too large; whether this was the first time.

        :raises OSError: it cannot be cut.
        """
        if self._fd < 0:
            return False
        size = os.fstat(self._fd).st_size
        if size <= self._most:
            return False
        first = not self.left_out
        end = os.pread(self._fd, _END, max(self._beginning, size - _END))
        end = end[end.find(b"\n") + 1 :]
        self.left_out += size - self._beginning - len(end)
        text = b"\n[pytest-vram left out %d bytes of this log here]\n" % self.left_out + end
        os.pwrite(self._fd, text, self._beginning)
        # In place and then cut. What is written meanwhile is taken along, until nothing more comes: a busy disk may
        # hold up each of these steps. A server that never pauses is not waited for.
        at = self._beginning + len(text)
        for _ in range(_ROUNDS):
            more = os.pread(self._fd, _END, size)
            if not more:
                break
            os.pwrite(self._fd, more, at)
            at, size = at + len(more), size + len(more)
        os.ftruncate(self._fd, at)
        return first

    def words(self) -> str:
        """What a reader must know, in parentheses after a space; empty while it is whole."""
        return f" ({mib(self.left_out)} in the middle of it are left out)" if self.left_out else ""

    def close(self) -> None:
        """Do not look any more."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class LogReader:
    """Complete lines of a file that grows. Lines that come faster than they are read are skipped, not waited for."""

    def __init__(self, path: Path, capped: CappedLog | None = None) -> None:
        self._path = path
        self._capped = capped
        self._left_out = 0
        self._fd = -1
        self._offset = 0
        self._rest = b""

    def lines(self) -> list[str]:
        """Lines that were completed since the last call, at most 128 KiB of them."""
        if not self._opened():
            return []
        self._keep_up(os.fstat(self._fd).st_size, _MOST_BEHIND)
        return self._lines(_MOST_READ)

    def all_lines(self) -> list[str]:
        """Everything up to the end, an unfinished last line included: for a process that has ended.

        Of more than 2 MiB the last ones, which say why it ended.
        """
        if not self._opened():
            return []
        # What its children may still write is not waited for.
        end = os.fstat(self._fd).st_size
        self._keep_up(end, _MOST_AT_END)
        found: list[str] = []
        while self._offset < end:
            before = self._offset
            found.extend(self._lines(min(_MOST_READ, end - before)))
            if self._offset == before:
                break
        if self._rest:
            found.append(self._rest.decode("utf-8", "replace"))
            self._rest = b""
        return found

    def _keep_up(self, size: int, most: int) -> None:
        """Go to the last lines when the log was cut, or when more than ``most`` bytes were not read yet."""
        left_out = self._capped.left_out if self._capped is not None else 0
        if self._offset <= size <= self._offset + most and left_out == self._left_out:
            return
        self._left_out = left_out
        self._offset, self._rest = max(0, size - _MOST_AT_END), b""
        try:
            data = os.pread(self._fd, _LONGEST_LINE, self._offset)
        except OSError:
            return
        # Part of a line may read as another.
        self._offset += data.find(b"\n") + 1

    def _lines(self, most: int) -> list[str]:
        try:
            data = os.pread(self._fd, most, self._offset)
        except OSError:
            return []
        if not data:
            return []
        self._offset += len(data)
        *complete, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > _LONGEST_LINE:
            complete.append(self._rest)
            self._rest = b""
        return [line.decode("utf-8", "replace").rstrip("\r") for line in complete]

    def _opened(self) -> bool:
        if self._fd < 0:
            try:
                self._fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError:
                return False
        return True

    def close(self) -> None:
        """Close the file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
