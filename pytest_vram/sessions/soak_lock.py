"""The lock of a soak's folder: two soaks never write one journal."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_vram.errors import BadInput

if TYPE_CHECKING:
    from typing import BinaryIO

NAME = "lock"
#: Folders that this process holds: a lock of the system is the process's, and a second one of its own is no obstacle.
_HELD: set[Path] = set()


class FolderLock:
    """Held from the making to :meth:`release`, or to the death of the process. The folder is made where there is none.

    :raises BadInput: another soak runs in this folder, or it cannot be made or locked.
    """

    def __init__(self, folder: Path) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise BadInput(f"the folder of the soak cannot be made: {folder}: {error.strerror}") from None
        self._folder = folder.resolve()
        self._stream: BinaryIO | None = None
        if self._folder in _HELD:
            raise _taken(folder)
        try:
            stream = (self._folder / NAME).open("a+b")
        except OSError as error:
            raise BadInput(f"the folder of the soak cannot be written: {folder}: {error.strerror}") from None
        if not _locked(stream):
            stream.close()
            raise _taken(folder)
        self._stream = stream
        _HELD.add(self._folder)

    def release(self) -> None:
        """Let the next one in. Calling it twice is fine."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None
            _HELD.discard(self._folder)


def _taken(folder: Path) -> BadInput:
    return BadInput(f"another soak is running in {folder}: wait for its end, or give this one a folder of its own")


def _locked(stream: BinaryIO) -> bool:
    try:
        if os.name == "nt":
            import msvcrt

            msvcrt.locking(stream.fileno(), msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined, unused-ignore]
        else:
            import fcntl

            fcntl.lockf(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
