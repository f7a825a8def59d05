"""Sessions: conversations that run for many turns, what each turn took, and the soak that runs them for hours."""

from __future__ import annotations

from pytest_vram.sessions.conversations import Conversation, ScriptedTurn, load, shipped
from pytest_vram.sessions.gauge import Gauge, KeeperGauge, NoGauge
from pytest_vram.sessions.session import Session
from pytest_vram.sessions.turns import Turn

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
