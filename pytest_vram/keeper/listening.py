"""The place in the file system where a keeper listens, and those that dead keepers left behind."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

_STALE_SECONDS = 60.0


def listen(path: str) -> socket.socket:
    """A socket at this path, for this user alone; what was there is removed."""
    Path(path).unlink(missing_ok=True)
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    mask = os.umask(0o077)
    try:
        listening.bind(path)
    finally:
        os.umask(mask)
    listening.listen(128)
    return listening


def remove_stale(folder: Path, *, older: float = _STALE_SECONDS) -> int:
    """Remove sockets of keepers that are gone from their folder; how many.

    :param older: seconds since a socket was made before it is tried; a keeper that is just starting does not answer.
    """
    removed = 0
    try:
        paths = list(folder.glob("*.sock"))
    except OSError:
        return 0
    for path in paths:
        try:
            if time.time() - path.lstat().st_mtime < older:
                continue
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
                client.setblocking(False)
                client.connect(str(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
            removed += 1
        except OSError:
            continue  # it is busy, not ours, or removed by another
    return removed
