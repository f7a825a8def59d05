"""What serves one server at a time: llama.cpp's RPC devices, where a second one waits for the first without a word."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from pytest_vram.keeper.server import Server
from pytest_vram.measure import procfs, sockets
from pytest_vram.spec import LaunchPlan


def holder(plan: LaunchPlan, servers: Iterable[Server]) -> Server | None:
    """The server of another plan that has what ``plan`` needs for itself."""
    wanted = set(plan.sole)
    if not wanted:
        return None
    return next((one for one in servers if one.key != plan.key and not wanted.isdisjoint(one.plan.sole)), None)


def shared(plan: LaunchPlan, other: Server) -> str:
    """What the two cannot have together, for a person."""
    return ", ".join(one for one in plan.sole if one in other.plan.sole)


def clients(plan: LaunchPlan, ours: Collection[int], proc: str = "/proc") -> list[str]:
    """One sentence for each of these devices that serves a process which is not of ``ours``."""
    table = sockets.tcp(proc)
    found: list[str] = []
    for endpoint in plan.sole:
        port = int(endpoint.rpartition(":")[2])
        ends = {one.inode for one in table if one.remote_port == port and sockets.is_here(one)}
        pids = [pid for pid in procfs.socket_owners(ends, proc) if pid not in ours]
        names = ", ".join(
            f"{stat.name} (PID {pid})" if (stat := procfs.read_stat(pid, proc)) else f"PID {pid}" for pid in pids
        )
        if names:
            found.append(f"RPC device {endpoint} serves one server at a time, and is connected with {names}")
    return found
