"""Token windows over a KV cache: what leaves when the limit is reached, and what must never leave."""

from pytest_vram.windows.cached import CachedWindow
from pytest_vram.windows.messages import MessageWindow, counted_by_template, counted_by_text
from pytest_vram.windows.protocol import Cell, Piece, Window, WindowFull
from pytest_vram.windows.spec import INVARIANTS, WindowSpec

__all__ = [
    "INVARIANTS",
    "CachedWindow",
    "Cell",
    "MessageWindow",
    "Piece",
    "Window",
    "WindowFull",
    "WindowSpec",
    "counted_by_template",
    "counted_by_text",
]
