"""Sessions: conversations that run for many turns, what each turn took, and the soak that runs them for hours."""

from __future__ import annotations

from pytest_vram.sessions.turns import Turn

__all__ = ["Turn"]
