"""The small process of a run that owns its servers, does all sampling and writes the journal.

Linux only; this side of it imports everywhere. Names are resolved on use, because the guard process imports this
package as well and must stay small.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pytest_vram.keeper.client import KeeperClient, Promise
    from pytest_vram.keeper.launch import ensure, mark_environment, socket_path
    from pytest_vram.keeper.telling import waiting_lines
    from pytest_vram.measure.procfs import start_time

__all__ = ["KeeperClient", "Promise", "ensure", "mark_environment", "socket_path", "start_time", "waiting_lines"]

_HOMES = {
    "KeeperClient": "pytest_vram.keeper.client",
    "Promise": "pytest_vram.keeper.client",
    "ensure": "pytest_vram.keeper.launch",
    "mark_environment": "pytest_vram.keeper.launch",
    "socket_path": "pytest_vram.keeper.launch",
    "start_time": "pytest_vram.measure.procfs",
    "waiting_lines": "pytest_vram.keeper.telling",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(home), name)
