"""Where the plugin keeps its state on pytest's objects, and how it ends a test in its own words."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pytest_vram.errors import VramError

if TYPE_CHECKING:
    from pytest_vram.run import Attempt, Run

#: The run of a session, on its config; absent until the plugin takes part.
RUN: pytest.StashKey[Run] = pytest.StashKey()
#: The present attempt at a test, on its item.
ATTEMPT: pytest.StashKey[Attempt] = pytest.StashKey()


def failure(error: VramError) -> BaseException:
    """The end of a set-up with the message of our own error and no traceback: the message says it all."""
    found: BaseException = pytest.fail.Exception(str(error), pytrace=False)
    return found
