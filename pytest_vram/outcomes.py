"""How a test ends in this package's words."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import pytest

from pytest_vram.errors import VramError

#: Reasons of skips that begin with this are shown and counted as inconclusive.
INCONCLUSIVE = "inconclusive: "


def inconclusive(reason: str) -> NoReturn:
    """End the test because its evidence does not decide: never among the passed, with its own letter and count.

    In JUnit files it is skipped with the reason; with ``--vram-missing=fail`` it is a failure.
    """
    pytest.skip(INCONCLUSIVE + reason)


def failure(error: VramError) -> BaseException:
    """The end of a set-up with the message of our own error and no traceback: the message says it all."""
    found: BaseException = pytest.fail.Exception(str(error), pytrace=False)
    return found


@contextmanager
def told() -> Iterator[None]:
    """End the set-up of a test with the message of an error of this package that is raised within."""
    try:
        yield
    except VramError as error:
        raise failure(error) from None
