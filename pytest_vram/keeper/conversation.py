"""What a client and the keeper say to each other on one connection."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from pytest_vram.keeper import wire
from pytest_vram.keeper.messages import Abandon, Acquire, Done, Now, Open, Ping, Request, Restart, Turn

if TYPE_CHECKING:
    from pytest_vram.keeper.processes import Watch
    from pytest_vram.keeper.turns import Turns
    from pytest_vram.keeper.windows import Window

#: Requests that may wait for others, or for long: they end when nobody waits for their reply.
_WAITS = (Open, Acquire, Now, Turn, Restart)
#: Requests that a client may send ahead before the keeper reads no more of them.
_MOST_AHEAD = 256
#: Windows opened last of which the request is remembered; a client gives up what it asked for last.
_REMEMBERED = 16

Answer = Callable[["Connection", Request | wire.NotARequest], Awaitable[None]]
Undo = Callable[["Connection", int], None]


class Connection:
    """One client. Its end releases all that it holds.

    :ivar opened: number of the request, and of the window that it opened; those of late.
    """

    def __init__(self, number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.number = number
        self.reader = reader
        self.writer = writer
        self.role = ""
        self.name = ""
        self.pid = 0
        self.watch: Watch | None = None
        self.turn: tuple[Window, Turns | None] | None = None
        self.opened: deque[tuple[int, int]] = deque(maxlen=_REMEMBERED)


async def receive(connection: Connection) -> Request | wire.NotARequest:
    """The next message. Raises :class:`asyncio.IncompleteReadError` at the end, and :class:`wire.BadFrame`."""
    header = await connection.reader.readexactly(wire.HEADER)
    body = await connection.reader.readexactly(wire.length(header))
    try:
        return wire.request(body)
    except wire.NotARequest as error:
        # The frame was whole, so the connection is still of use.
        return error


async def converse(connection: Connection, answer: Answer, undo: Undo) -> None:
    """Answer requests in order until the client goes away, which ends what it waits for.

    :param answer: carries a request out and replies. :param undo: gives back what a request of this number opened.
    """
    talk = _Talk(connection, answer, undo)
    working = asyncio.ensure_future(talk.work())
    # A reply that cannot be written ends the connection, and with it the wait for the next message.
    working.add_done_callback(talk.ended)
    try:
        while True:
            await talk.hear(await receive(connection))
    finally:
        working.cancel()
        await asyncio.wait({working})
        if not working.cancelled():
            working.result()


class _Talk:
    def __init__(self, connection: Connection, answer: Answer, undo: Undo) -> None:
        self._connection = connection
        self._answer = answer
        self._undo = undo
        self._requests: asyncio.Queue[Request | wire.NotARequest] = asyncio.Queue(_MOST_AHEAD)
        self._task: asyncio.Task[None] | None = None
        self._present: Request | wire.NotARequest | None = None
        self._taken: set[int] = set()
        self._given_up: set[int] = set()

    async def hear(self, request: Request | wire.NotARequest) -> None:
        """A message came: a word in between is heeded at once, the others in order."""
        if isinstance(request, Ping):
            self._connection.writer.write(wire.frame(Done(number=request.number)))
        elif not isinstance(request, Abandon):
            self._taken.add(request.number)
            await self._requests.put(request)
        elif request.request not in self._taken:
            self._undo(self._connection, request.request)
        else:
            self._given_up.add(request.request)
            present = self._present
            if isinstance(present, _WAITS) and present.number == request.request and self._task is not None:
                self._task.cancel()

    async def work(self) -> None:
        """Carry the requests out, one after the other."""
        while True:
            request = await self._requests.get()
            number = request.number
            if not (number in self._given_up and isinstance(request, _WAITS)):
                self._present = request
                task = self._task = asyncio.ensure_future(self._carry_out(request))
                try:
                    await asyncio.wait({task})
                finally:
                    if not task.done():
                        task.cancel()
                        await asyncio.wait({task})
                    self._present = None
                if not task.cancelled():
                    task.result()
            self._taken.discard(number)
            if number in self._given_up:
                self._given_up.discard(number)
                self._undo(self._connection, number)

    def ended(self, task: asyncio.Task[None]) -> None:
        """Nothing is answered any more."""
        if not task.cancelled():
            self._connection.writer.transport.abort()

    async def _carry_out(self, request: Request | wire.NotARequest) -> None:
        await self._answer(self._connection, request)
