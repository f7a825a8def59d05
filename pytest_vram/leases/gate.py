"""Gates: cheap admission of tests that need nothing, and how one test gets a device to itself.

One small file per device, of which single bytes are locked (POSIX record locks, which the kernel frees with the
process that holds them). Byte 0 is the *turnstile*: whoever enters holds it for a moment, and who wants the device
alone keeps it. Each process inside holds the byte of its own PID, so that who is inside can be asked without a list.

At the gate of those that have named no device several may keep others out, each for a device of its own: there the
turnstile is kept together, and whoever enters has it for a moment alone.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import struct
import sys
from collections.abc import Collection, Iterable
from pathlib import Path

with contextlib.suppress(ImportError):  # where there are no record locks, nobody asks for one
    import fcntl

_TURNSTILE = 0
_INSIDE = 1024
_MOST_INSIDE = 64
#: ``struct flock`` of 64-bit Linux: type, whence, start, length, PID.
_FLOCK = struct.Struct("hhqqi4x")
_ANY = ""


class _File:
    """A gate's file, once per process: closing any descriptor of it would drop every lock of this process on it."""

    def __init__(self, path: Path, fd: int) -> None:
        self.path = path
        self.fd = fd
        self.users = 0
        self.inside = 0


_FILES: dict[tuple[int, str], _File] = {}


def _file(path: Path) -> _File | None:
    key = (os.getpid(), str(path))
    found = _FILES.get(key)
    if found is None:
        fd = open_shared(path)
        if fd is None:
            return None
        found = _FILES[key] = _File(path, fd)
    found.users += 1
    return found


def _give_up(file: _File) -> None:
    file.users -= 1
    if not file.users:
        _FILES.pop((os.getpid(), str(file.path)), None)
        os.close(file.fd)


class Gate:
    """The way in for a process whose tests need no memory of their own. Every call takes a few microseconds.

    It is open unless somebody has, or waits for, one of the devices alone. It never raises: where its files cannot be
    used it is closed, and the caller asks the keeper instead.

    :param folder: the folder of the leases. :param run: id of the run. :param pid: PID of this process.
    :param devices: keys of the run's devices; without any, whoever has any device of this machine alone closes it.
    """

    def __init__(self, folder: Path, run: str, pid: int, devices: Iterable[str] = ()) -> None:
        self.run = run
        self._pid = pid
        self._files: list[_File] = []
        self._inside = False
        for name in sorted(set(devices)) or [_ANY]:
            file = _file(folder / file_name(name)) if str(folder) else None
            if file is None:
                self.close()
                return
            self._files.append(file)

    def enter(self) -> bool:
        """Go in, if nobody wants a device alone; then :meth:`leave` when the test is over."""
        if self._inside:
            return True
        if not self._files or os.getpid() != self._pid:
            return False
        done = 0
        for file in self._files:
            # A test within a test of the same process is inside already.
            if not file.inside and not _enter(file.fd, self._pid, any_device=file.path.name == file_name(_ANY)):
                break
            file.inside += 1
            done += 1
        self._inside = done == len(self._files)
        if not self._inside:
            self._out(self._files[:done])
        return self._inside

    def leave(self) -> None:
        """Go out. Calling it outside is fine."""
        if self._inside:
            self._inside = False
            self._out(self._files)

    def _out(self, files: list[_File]) -> None:
        if os.getpid() == self._pid:
            for file in files:
                file.inside -= 1
                if not file.inside:
                    unlock(file.fd, _INSIDE + self._pid)

    @property
    def inside(self) -> bool:
        """Whether this gate let this process in."""
        return self._inside

    def close(self) -> None:
        """Go out and give up the files. Calling it twice is fine."""
        self.leave()
        if os.getpid() == self._pid:
            for file in self._files:
                _give_up(file)
        self._files = []


class Turnstiles:
    """The gates of some devices as the keeper sees them, which goes in for others and may close them.

    Devices of no key stand for every process that did not name its own.

    :param folder: ``None`` for none. :ivar closed: whether this process keeps others out.
    """

    def __init__(self, folder: Path | None, devices: Iterable[str]) -> None:
        self._pid = os.getpid()
        self._fds: list[int] = []
        self.closed = False
        names = [_ANY, *sorted(set(devices))] if folder is not None else []
        for name in names:
            assert folder is not None
            fd = open_shared(folder / file_name(name))
            if fd is None:
                self.give_up()
                return
            self._fds.append(fd)

    @property
    def usable(self) -> bool:
        """Whether there are gates at all; without them nobody is kept out, and nobody is seen inside."""
        return bool(self._fds)

    @property
    def _own(self) -> list[int]:
        return self._fds[1:] or self._fds

    def enter(self) -> bool:
        """Go in on every device, if nobody wants one of them alone."""
        # With devices of its own, "any" is for those that have not named theirs.
        if all(_enter(fd, self._pid, any_device=fd == self._fds[0]) for fd in self._own):
            return True
        self.leave()
        return False

    def admitted(self) -> None:
        """Go in although somebody may wait for it, because that one came later."""
        for fd in self._own:
            try_lock(fd, _INSIDE + self._pid, exclusive=True)

    def leave(self) -> None:
        """Go out."""
        for fd in self._fds:
            unlock(fd, _INSIDE + self._pid)

    def close(self) -> bool:
        """Let nobody in any more, if nobody else does so; whether that is so now. Who is inside stays."""
        if not self.closed:
            self.closed = all(try_lock(fd, _TURNSTILE, exclusive=fd != self._fds[0]) for fd in self._fds)
            if not self.closed:
                self.reopen()
        return self.closed

    def reopen(self) -> None:
        """Let others in again."""
        self.closed = False
        for fd in self._fds:
            unlock(fd, _TURNSTILE)

    def closed_by(self) -> int | None:
        """PID of another process that keeps people out, or ``None``."""
        for fd in self._own:
            found = lock_holder(fd, _TURNSTILE, 1, exclusive=fd == self._fds[0])
            if found is not None:
                return found[1]
        return None

    def inside(self, ignored: Collection[int] = ()) -> list[int]:
        """PIDs of other processes that are inside, at most 64, without those ignored."""
        found: dict[int, None] = {}
        for fd in self._fds:
            start = _INSIDE
            while len(found) < _MOST_INSIDE:
                lock = lock_holder(fd, start, 0, exclusive=True)
                if lock is None:
                    break
                if (pid := lock[0] - _INSIDE) not in ignored:
                    found[pid] = None
                start = lock[0] + 1
        return list(found)

    def give_up(self) -> None:
        """Close the files; everything that was held is free."""
        for fd in self._fds:
            os.close(fd)
        self._fds = []
        self.closed = False


def file_name(device: str) -> str:
    """Name of the gate's file of a device."""
    return "gate-any" if device == _ANY else "gate-" + hashlib.sha256(device.encode()).hexdigest()[:16]


def open_shared(path: Path) -> int | None:
    """Open a file that every user of this machine may lock, made where it is missing; ``None`` where that fails.

    Never follows a link, and never waits for a pipe to be written to.
    """
    if sys.platform == "win32":
        return None
    flags = os.O_RDWR | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)
    try:
        try:
            # Opened without O_CREAT first: kernels refuse that for another user's file in a folder for all.
            fd = os.open(path, flags)
        except FileNotFoundError:
            fd = os.open(path, flags | os.O_CREAT, 0o666)
            if os.fstat(fd).st_uid == os.getuid():
                os.fchmod(fd, 0o666)
    except OSError:
        return None
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        return None
    return fd


def _enter(fd: int, pid: int, *, any_device: bool) -> bool:
    if not try_lock(fd, _TURNSTILE, exclusive=any_device):
        return False
    inside = try_lock(fd, _INSIDE + pid, exclusive=True)
    unlock(fd, _TURNSTILE)
    return inside


def try_lock(fd: int, byte: int, *, exclusive: bool) -> bool:
    """Lock one byte, without waiting; whether that was possible."""
    try:
        fcntl.lockf(fd, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB, 1, byte)
    except OSError:
        return False
    return True


def unlock(fd: int, byte: int) -> None:
    """Unlock one byte."""
    try:
        fcntl.lockf(fd, fcntl.LOCK_UN, 1, byte)
    except OSError:
        pass


def lock_holder(fd: int, start: int, length: int, *, exclusive: bool) -> tuple[int, int] | None:
    """First lock of another process that stands in the way of one here: its first byte and the PID that holds it."""
    kind = fcntl.F_WRLCK if exclusive else fcntl.F_RDLCK
    try:
        answer = fcntl.fcntl(fd, fcntl.F_GETLK, _FLOCK.pack(kind, os.SEEK_SET, start, length, 0))
    except OSError:
        return None
    found, _, byte, _, pid = _FLOCK.unpack(answer)
    return None if found == fcntl.F_UNLCK else (max(start, byte), pid)
