"""Memory limits that a run puts on processes of others, and how they are lifted whatever happens to the run.

Before a limit is changed, the old one is written to a file beside the keeper's socket. The keeper lifts it at its end;
where it was killed, its guard does; where that was killed too, the next keeper or ``vram doctor --reap``. Imports the
standard library only, because the guard imports it. Linux only.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any, NamedTuple

SUFFIX = ".limits"


class Limit(NamedTuple):
    """The limit (``RLIMIT_DATA``) that a process had before: its PID, its start time, soft and hard bytes."""

    pid: int
    start: int
    soft: int
    hard: int


def path_of(socket: str) -> Path:
    """The file of the run whose keeper listens at this socket."""
    return Path(socket).with_suffix(SUFFIX)


def started(pid: int) -> int | None:
    """Start time of a process, field 22 of its ``stat``; ``None`` where it is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stream:
            fields = stream.read().rpartition(b")")[2].split()
        return int(fields[19]) if fields[0] not in (b"Z", b"X") else None
    except (OSError, ValueError, IndexError):
        return None


def put(path: Path, limits: list[Limit], sizes: list[int]) -> None:
    """Give each process its limit of ``sizes`` bytes, after the old ones were written down.

    :raises OSError: the file cannot be written, or a process does not belong to this user.
    """
    import resource

    own = os.getpid()
    record = {"keeper": [own, started(own)], "limits": limits}
    temporary = path.with_suffix(f".{own}.tmp")
    try:
        temporary.write_text(json.dumps(record), encoding="ascii")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    for limit, size in zip(limits, sizes, strict=True):
        resource.prlimit(limit.pid, resource.RLIMIT_DATA, (size, limit.hard))


def lift(path: Path) -> list[int]:
    """Give every process of the file its old limit back and remove the file; PIDs of those that still ran."""
    import resource

    lifted: list[int] = []
    for limit in _read(path)[1]:
        if started(limit.pid) != limit.start:
            continue  # it ended, and the number may be somebody else's now
        with contextlib.suppress(OSError, ValueError):
            resource.prlimit(limit.pid, resource.RLIMIT_DATA, (limit.soft, limit.hard))
            lifted.append(limit.pid)
    path.unlink(missing_ok=True)
    return lifted


def stale(folder: Path) -> list[Path]:
    """The files of keepers that are gone."""
    return [path for path, keeper, _ in _files(folder) if keeper is None or started(keeper[0]) != keeper[1]]


def holder(folder: Path, pid: int) -> int | None:
    """PID of the living keeper that has a limit on this process, of another run than this."""
    for _, keeper, limits in _files(folder):
        if keeper is None or keeper[0] == os.getpid() or started(keeper[0]) != keeper[1]:
            continue
        if any(limit.pid == pid and limit.start == started(pid) for limit in limits):
            return keeper[0]
    return None


def _files(folder: Path) -> list[tuple[Path, tuple[int, int] | None, list[Limit]]]:
    try:
        return [(path, *_read(path)) for path in sorted(folder.glob(f"*{SUFFIX}"))]
    except OSError:
        return []


def _read(path: Path) -> tuple[tuple[int, int] | None, list[Limit]]:
    """Keeper and limits of a file; nothing where it cannot be read or is not one of ours."""
    try:
        record: Any = json.loads(path.read_bytes())
        keeper = (int(record["keeper"][0]), int(record["keeper"][1]))
        return keeper, [Limit(*(int(number) for number in entry)) for entry in record["limits"]]
    except (OSError, ValueError, TypeError, KeyError, IndexError, RecursionError):
        return None, []
