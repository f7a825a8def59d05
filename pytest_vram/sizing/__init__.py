"""What a deployment should cost, from files alone.

:func:`estimate` predicts the memory breakdown ("ledger") of a model under an engine's settings; :func:`plan` searches
for the settings that fit a budget, and :func:`search` says with them why nothing does. Nothing here starts an engine;
a dry run by an engine itself belongs to :mod:`pytest_vram.backends`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pytest_vram.sizing.estimating import estimate
    from pytest_vram.sizing.planning import plan, search
    from pytest_vram.sizing.plans import Plan, Search
    from pytest_vram.sizing.prediction import Estimate, Verdict

__all__ = ["Estimate", "Plan", "Search", "Verdict", "estimate", "plan", "search"]

# No module has the name of a function: once it is imported, it would stand in the function's place.
_HOMES = {
    "Estimate": "prediction",
    "Plan": "plans",
    "Search": "plans",
    "Verdict": "prediction",
    "estimate": "estimating",
    "plan": "planning",
    "search": "planning",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
