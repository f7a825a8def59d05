"""Which settings to turn where memory ran out, best first: each with what it saves, what it costs, and its proof.

:func:`advise` computes it with the estimator, from the model's files and the engine's options; :func:`of_boot` from a
boot log, with the model's files where they are at hand, else from the figures that the log printed.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from pytest_vram.advice.records import Advice, Saving

if TYPE_CHECKING:
    from pytest_vram.advice.booted import doubts, of_boot, reason
    from pytest_vram.advice.deployed import advise
    from pytest_vram.advice.goal import Goal

__all__ = ["Advice", "Goal", "Saving", "advise", "doubts", "of_boot", "reason"]

# Sizing is loaded when advice is asked for: records of tests hold advice, and are made for every test.
_HOMES = {"Goal": "goal", "advise": "deployed", "of_boot": "booted", "doubts": "booted", "reason": "booted"}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
