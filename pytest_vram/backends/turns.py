"""A turn of one request at a backend: who may ask now, and what the request cost in memory.

Every generation request has a short connection of its own to the keeper. Its end releases the turn whatever ends
it: an answer, an exception, a cancelled task, a killed process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from pytest_vram.backends.frames import of_ours
from pytest_vram.errors import KeeperError, VramError
from pytest_vram.keeper.messages import Closed, EndTurn, Granted, Reply, Request, Turn

__tracebackhide__ = of_ours


class Caller(Protocol):
    """Somebody who speaks to the keeper."""

    def call(self, request: Request, timeout: float | None = None) -> Reply:
        """Send a request and wait for its reply; a failure is raised as the exception that it names."""


class KeeperLike(Caller, Protocol):
    """A connection to the keeper of one's own."""

    def close(self) -> None:
        """End the connection; everything that it held is released."""


#: Opens a new connection with the role ``turn``; the argument names its purpose.
Connect = Callable[[str], KeeperLike]


def ask(keeper: Caller, request: Request, timeout: float | None = None) -> Reply:
    """``keeper.call``; its errors come without the frames of the connection, which are not the user's concern."""
    try:
        return keeper.call(request, timeout)
    except VramError as error:
        raise error.with_traceback(None) from None


class Held:
    """A turn that was granted. :ivar waited: seconds until it was."""

    def __init__(self, keeper: KeeperLike, waited: float) -> None:
        self._keeper = keeper
        self.waited = waited

    def end(self, record: Mapping[str, Any]) -> Closed:
        """Give the turn back with the request's record; the answer is what the request's window saw."""
        reply = ask(self._keeper, EndTurn(record=dict(record)), 30.0)
        if not isinstance(reply, Closed):
            raise KeeperError(f"the keeper answered the end of a request with {type(reply).__name__}")
        return reply


def take(keeper: KeeperLike, turn: Turn) -> Held:
    """Wait on this connection until the keeper grants the turn."""
    reply = ask(keeper, turn)  # it knows how long this one may take
    if not isinstance(reply, Granted):
        raise KeeperError(f"the keeper answered a request for a turn with {type(reply).__name__}")
    return Held(keeper, reply.waited)
