"""Sessions: conversations that run for many turns, what each turn took, and the soak that runs them for hours."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pytest_vram.sessions.turns import Turn

if TYPE_CHECKING:
    from pytest_vram.sessions.conversations import Conversation, ScriptedTurn, load, shipped
    from pytest_vram.sessions.gauge import Gauge, KeeperGauge, NoGauge
    from pytest_vram.sessions.session import Session

__all__ = [
    "Conversation",
    "Gauge",
    "KeeperGauge",
    "NoGauge",
    "ScriptedTurn",
    "Session",
    "Turn",
    "load",
    "shipped",
]
_PLACES = {
    "conversations": ("Conversation", "ScriptedTurn", "load", "shipped"),
    "gauge": ("Gauge", "KeeperGauge", "NoGauge"),
    "session": ("Session",),
}


def __getattr__(name: str) -> Any:
    # On use: every run that takes part imports the rows of the turn table, and few run a session.
    for module, names in _PLACES.items():
        if name in names:
            import importlib

            return getattr(importlib.import_module(f"pytest_vram.sessions.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
