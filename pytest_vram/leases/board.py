"""The board: one folder per machine, in which every run says what it holds and who waits.

Each run has one file, written and locked by its keeper alone, so that the kernel frees whatever a dead run held. A look
at the others and the change that follows from it are one step, under a lock on the file ``mutex``.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import tempfile
import time
from pathlib import Path

from pytest_vram.errors import BadInput
from pytest_vram.leases import sheet as sheets
from pytest_vram.leases.gate import lock_holder, open_shared, try_lock, unlock
from pytest_vram.leases.sheet import BadSheet, Sheet
from pytest_vram.paths import expanded
from pytest_vram.text import printable

#: Environment variable that names the folder, for those who must share one and have no common ``/tmp``.
FOLDER_VARIABLE = "PYTEST_VRAM_LEASE_FOLDER"
FOLDER_NAME = "pytest-vram-leases"
_SUFFIX = ".lease"
_MUTEX = "mutex"
#: Nanoseconds within which two changes of a folder may show the same time.
_TICK = 50_000_000
#: Reads of a sheet that is just being written.
_TRIES = 5


class BoardTrouble(Exception):
    """The folder cannot be used (any more), in words."""


def shared_folder() -> Path:
    """Where the runs of this machine meet: the folder named by ``PYTEST_VRAM_LEASE_FOLDER``, else one in ``/tmp``.

    :raises BoardTrouble: it cannot be used.
    """
    named = os.environ.get(FOLDER_VARIABLE)
    base = "/tmp" if os.path.isdir("/tmp") else tempfile.gettempdir()
    folder = _named(named) if named else Path(base, FOLDER_NAME)
    if not str(folder).isascii() and str(folder) != os.fsencode(folder).decode("utf-8", "replace"):
        raise BoardTrouble(f"the name of {printable(str(folder))} is not in UTF-8")
    try:
        try:
            folder.mkdir(parents=bool(named))
        except FileExistsError:
            pass
        else:
            folder.chmod(0o1777)
        found = folder.lstat()
    except OSError as error:
        raise BoardTrouble(f"{folder} cannot be made: {error.strerror}") from None
    if not stat.S_ISDIR(found.st_mode):
        raise BoardTrouble(f"{folder} is not a folder")
    if found.st_uid != os.getuid() and not found.st_mode & stat.S_ISVTX:
        raise BoardTrouble(f"{folder} belongs to another user, who lets others remove what is in it")
    if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        raise BoardTrouble(f"{folder} is not writable for this user")
    return folder


def _named(text: str) -> Path:
    try:
        folder = expanded(text, FOLDER_VARIABLE)
    except BadInput as error:
        raise BoardTrouble(str(error)) from None
    if not folder.is_absolute():
        # Each run would have one of its own, in whatever folder it was started.
        raise BoardTrouble(f"{FOLDER_VARIABLE} is {text!r}, which does not begin with a slash: write the whole path")
    return folder


class _Other:
    """The file of another run, kept open."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.sheet: Sheet | None = None
        self.problem: str | None = None


class Board:
    """The board of this machine, as one keeper sees it. Nothing here waits.

    :param folder: the folder. :param run: id of the run.
    :ivar warnings: sentences about files that cannot be used, each once. :ivar unknown: PIDs that hold files which
        cannot be read.
    """

    def __init__(self, folder: Path, run: str) -> None:
        self.folder = folder
        self.path = folder / f"{re.sub(r'[^A-Za-z0-9._-]', '_', run)[:64]}-{os.getpid()}{_SUFFIX}"
        self.warnings: list[str] = []
        self.unknown: list[int] = []
        self._said: set[str] = set()
        self._others: dict[str, _Other] = {}
        self._seen: int | None = None
        self._sure = False
        self._fd: int | None = None
        self._written = b""
        self._mutex = open_shared(folder / _MUTEX)
        if self._mutex is None:
            raise BoardTrouble(f"{folder / _MUTEX} cannot be opened for writing")
        if lock_holder(self._mutex, 0, 1, exclusive=True) is None and not self._lockable():
            raise BoardTrouble(f"{folder} is on a file system without record locks")

    def _lockable(self) -> bool:
        """Whether locks work at all there; a mutex that somebody has just taken shows that they do."""
        assert self._mutex is not None
        taken = try_lock(self._mutex, 1, exclusive=False)
        unlock(self._mutex, 1)
        return taken

    # ------------------------------------------------------------ one step

    def begin(self) -> bool:
        """Begin a step; false while another process is in one. End it with :meth:`end`."""
        return self._mutex is not None and try_lock(self._mutex, 0, exclusive=True)

    def end(self) -> None:
        """End the step."""
        if self._mutex is not None:
            unlock(self._mutex, 0)

    def stepping(self) -> int | None:
        """PID of the process that is within a step, or ``None``."""
        found = lock_holder(self._mutex, 0, 1, exclusive=True) if self._mutex is not None else None
        return found[1] if found else None

    def others(self) -> list[Sheet]:
        """What the other runs say, within a step. Files of the dead are removed; what is no sheet is told once."""
        self._find()
        self.unknown = []
        for name, other in list(self._others.items()):
            holder = lock_holder(other.fd, 0, 1, exclusive=True)
            if holder is None:
                self._forget(name)
                self._remove(name)
                continue
            other.sheet = self._read(name, other)
            if other.sheet is None:
                self.unknown.append(holder[1])
        return [other.sheet for other in self._others.values() if other.sheet is not None]

    @property
    def alone(self) -> bool:
        """Whether no other run was here at the last look, and none has come since."""
        return not self._others and self._sure and self._stamp() == self._seen

    @property
    def removed(self) -> bool:
        """Whether somebody has removed the folder, or what the runs meet at: those who come now meet elsewhere."""
        return any(fd is not None and os.fstat(fd).st_nlink == 0 for fd in (self._mutex, self._fd))

    def write(self, sheet: Sheet) -> None:
        """Say what this run holds; without a change nothing is written.

        :raises BoardTrouble: it cannot be said.
        """
        data = sheets.written(sheet)
        if data == self._written:
            return
        try:
            if self._fd is None:
                self._create()
            assert self._fd is not None
            done = os.pwrite(self._fd, data, 0)
            if done != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            if len(data) < len(self._written):
                os.ftruncate(self._fd, len(data))
        except OSError as error:
            raise BoardTrouble(f"{self.path}: {error.strerror}") from None
        self._written = data

    def close(self) -> None:
        """Remove this run's file, and give everything up."""
        if self._fd is not None:
            try:
                os.unlink(self.path)
            except OSError:
                pass
        for fd in [self._fd, self._mutex, *(other.fd for other in self._others.values())]:
            if fd is not None:
                os.close(fd)
        self._fd = self._mutex = None
        self._others.clear()

    # ------------------------------------------------------------ files

    def _create(self) -> None:
        """Make this run's file and lock it. Within a step: an unlocked file is taken for that of a dead run."""
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            self._fd = os.open(self.path, flags, 0o644)
        except FileExistsError:
            # Of a process that had the same PID and is dead: a living one would be this one.
            os.unlink(self.path)
            self._fd = os.open(self.path, flags, 0o644)
        os.fchmod(self._fd, 0o644)
        if not try_lock(self._fd, 0, exclusive=True):
            raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))
        self._sure = False

    def _stamp(self) -> int | None:
        try:
            return os.stat(self.folder).st_mtime_ns
        except OSError:
            return None

    def _find(self) -> None:
        """Open the files that are new."""
        stamp = self._stamp()
        if stamp == self._seen and self._sure:
            return
        # A change within the same tick of the file system's clock shows no new time.
        self._seen, self._sure = stamp, stamp is not None and abs(time.time_ns() - stamp) > _TICK
        try:
            names = [name for name in os.listdir(self.folder) if name.endswith(_SUFFIX) and name != self.path.name]
        except OSError as error:
            self._warn(f"{self.folder} cannot be read: {error.strerror}")
            return
        for name in names:
            if name not in self._others:
                self._open(name)
        for name in self._others.keys() - set(names):
            self._forget(name)

    def _open(self, name: str) -> None:
        path = self.folder / name
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            return
        except OSError as error:
            reason = "it is a link" if error.errno == errno.ELOOP else error.strerror
            self._warn(f"{path} is ignored: {reason}")
            return
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            self._warn(f"{path} is ignored: it is not a file")
            return
        self._others[name] = _Other(fd)

    def _read(self, name: str, other: _Other) -> Sheet | None:
        reason = "it is damaged"
        for _ in range(_TRIES):
            data = os.pread(other.fd, sheets.LARGEST + 1, 0)
            if len(data) > sheets.LARGEST:
                reason = "it is larger than what pytest-vram writes"
                break
            if not data:
                return None  # its run has nothing to say yet
            try:
                return sheets.read(data)
            except BadSheet as error:
                reason = str(error)
                if not error.torn:
                    break
        self._warn(f"{self.folder / name} is ignored, and what its run holds is not counted: {reason}")
        return None

    def _forget(self, name: str) -> None:
        other = self._others.pop(name, None)
        if other is not None:
            os.close(other.fd)

    def _remove(self, name: str) -> None:
        try:
            os.unlink(self.folder / name)
        except OSError:
            pass  # another user's, or removed by another

    def _warn(self, sentence: str) -> None:
        if sentence not in self._said:
            self._said.add(sentence)
            self.warnings.append(sentence)
