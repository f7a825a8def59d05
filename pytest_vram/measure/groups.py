"""Control groups of other processes: which one accounts for their memory, who else is in it, and its peak."""

from __future__ import annotations


def memory_group(pid: int | str, proc: str = "/proc", cgroup: str = "/sys/fs/cgroup") -> str | None:
    """Folder of the control group that accounts for the memory of a process (both versions), or ``None``."""
    try:
        with open(f"{proc}/{pid}/cgroup") as stream:
            lines = stream.read().splitlines()
    except OSError:
        return None
    unified = None
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        # Mixed systems account for memory in version 1 where it has that controller.
        if "memory" in controllers.split(","):
            return f"{cgroup}/memory{path}".rstrip("/")
        if controllers == "":
            unified = f"{cgroup}{path}".rstrip("/")
    return unified


def processes(group: str) -> set[int] | None:
    """PIDs in a control group; ``None`` when they cannot be read."""
    try:
        with open(f"{group}/cgroup.procs") as stream:
            return {int(line) for line in stream}
    except (OSError, ValueError):
        return None


def peak(group: str) -> int | None:
    """Most bytes that a control group was charged with since it was made, where the kernel keeps that."""
    for name in ("memory.peak", "memory.max_usage_in_bytes"):
        try:
            with open(f"{group}/{name}") as stream:
                text = stream.read().strip()
        except OSError:
            continue
        if text.isdigit():
            return int(text)
    return None
