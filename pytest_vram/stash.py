"""Where the plugin keeps its state on pytest's objects."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pytest_vram.accuracy import Accuracy
    from pytest_vram.run import Attempt, Run
    from pytest_vram.soak_hooks import Soaks

#: The run of a session, on its config; absent until the plugin takes part.
RUN: pytest.StashKey[Run] = pytest.StashKey()
#: The cases of tool calls of a run and what was answered, on its config.
ACCURACY: pytest.StashKey[Accuracy] = pytest.StashKey()
#: The soaks of a run, on its config.
SOAKS: pytest.StashKey[Soaks] = pytest.StashKey()
#: The present attempt at a test, on its item.
ATTEMPT: pytest.StashKey[Attempt] = pytest.StashKey()
