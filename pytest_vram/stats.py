"""Statistics under their textbook names, in plain Python."""

from __future__ import annotations
