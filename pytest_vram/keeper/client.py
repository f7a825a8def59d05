"""The pytest side of the keeper's socket."""

from __future__ import annotations

import os
import select
import socket as sockets
import threading
import time
from collections import deque
from collections.abc import Callable
from math import isfinite
from pathlib import Path

from pytest_vram import errors
from pytest_vram.errors import KeeperError, KeeperLost, KeeperUnavailable, VramError
from pytest_vram.keeper import wire
from pytest_vram.keeper.messages import (
    Acquire,
    Failed,
    Hello,
    Now,
    Open,
    Reply,
    Request,
    Restart,
    Turn,
    Welcome,
)
from pytest_vram.measure.procfs import start_time

LOG_NAME = "keeper.log"
_GREETING_SECONDS = 10.0
_ANSWER_SECONDS = 60.0
_LAST_WORDS_SECONDS = 0.5
_MEANWHILE_SECONDS = 1.0


class Promise:
    """The reply to a request that was sent ahead; see :meth:`KeeperClient.ahead`."""

    __slots__ = ("client", "error", "reply", "request")

    def __init__(self, client: KeeperClient, request: Request) -> None:
        self.client = client
        self.request = request
        self.reply: Reply | None = None
        self.error: VramError | None = None

    def result(self) -> Reply:
        """The reply, waited for where it is not there yet.

        :raises VramError: as :meth:`KeeperClient.call`.
        """
        if self.reply is None and self.error is None:
            self.client.collect(self)
        if self.error is not None:
            raise self.error
        assert self.reply is not None
        return self.reply


class KeeperClient:
    """One connection to the keeper of a run.

    Threads may share it: one call waits for the other. Everything that was opened on it is released when it is
    closed, or when the process ends in whatever way.

    :param role: ``controller``, ``worker``, ``turn`` or ``viewer``; see :class:`~pytest_vram.keeper.messages.Hello`.
    :ivar meanwhile: called now and then while a request waits for other tests.
    :ivar welcome: the keeper's greeting, with the devices that it measures.
    :raises KeeperUnavailable: nothing answers there. :raises KeeperLost: it ended while it greeted.
    """

    def __init__(self, socket: str, *, role: str, name: str = "", timeout: float = _GREETING_SECONDS) -> None:
        self._path = socket
        self._log: Path | None = None
        self._pid = os.getpid()
        self._asking = threading.Lock()
        self._writing = threading.Lock()
        self._owed: deque[Promise] = deque()
        self.meanwhile: Callable[[], None] | None = None
        if not hasattr(sockets, "AF_UNIX"):
            raise KeeperUnavailable("The keeper needs Unix sockets, which this platform does not have.")
        try:
            self._socket = sockets.socket(sockets.AF_UNIX, sockets.SOCK_STREAM)
        except OSError as error:
            raise KeeperUnavailable(f"No socket could be made to reach the keeper: {error.strerror}.") from None
        try:
            self._socket.settimeout(timeout)
            try:
                self._socket.connect(socket)
            except OSError as error:
                raise KeeperUnavailable(
                    f"No keeper answers at {socket}: {error.strerror or 'it did not answer in time'}."
                ) from None
            hello = Hello(role=role, pid=self._pid, start_time=start_time(self._pid), name=name)
            welcome = self.call(hello, timeout)
        except BaseException:
            self._socket.close()
            raise
        if not isinstance(welcome, Welcome):
            self._socket.close()
            raise KeeperLost(f"The keeper at {socket} did not greet; it is of another version. Start the run again.")
        self.welcome: Welcome = welcome
        self._log = Path(welcome.folder) / LOG_NAME

    def call(self, request: Request, timeout: float | None = None) -> Reply:
        """Send a request and wait for its reply.

        :param timeout: seconds; by default as long as the request itself may take, and a minute.
        :raises VramError: the class that the keeper names, with its message.
        :raises KeeperLost: it died, or did not answer in time; the connection is closed then.
        """
        patience = _patience(request) if timeout is None else timeout
        if patience is not None and not isfinite(patience):
            raise KeeperError(f"It is not possible to wait for {patience} s: give a number of seconds.")
        with self._asking:
            deadline = None if patience is None else time.monotonic() + patience
            self._write(request)
            self._settle_debts()
            if deadline is None and self.meanwhile is not None:
                self._wait_with(self.meanwhile)
            reply = self._receive(deadline)
        if isinstance(reply, Failed):
            raise _exception(reply)
        return reply

    def ahead(self, *requests: Request) -> list[Promise]:
        """Send requests and go on; the keeper answers them in order, while this process does other things.

        :raises KeeperLost: the keeper is gone.
        """
        with self._asking:
            promises = [Promise(self, request) for request in requests]
            self._write(*requests)
            self._owed.extend(promises)
        return promises

    def collect(self, promise: Promise) -> None:
        """Wait for the reply of a promise, and of those before it."""
        with self._asking:
            while promise.reply is None and promise.error is None:
                if not self._owed:
                    promise.error = self._lost(None)
                    return
                self._settle_one()

    def _wait_with(self, meanwhile: Callable[[], None]) -> None:
        """Wait until something comes, and do something else now and then."""
        poll = select.poll()
        try:
            poll.register(self._socket, select.POLLIN)
        except (OSError, ValueError):
            return  # it was closed; whoever reads is told
        while not poll.poll(_MEANWHILE_SECONDS * 1e3):
            meanwhile()

    def caught_up(self) -> bool:
        """Whether every request that was sent ahead has its reply by now; waits for none."""
        with self._asking:
            while self._owed and self._readable():
                self._settle_one()
            return not self._owed

    def _readable(self) -> bool:
        try:
            return bool(select.select([self._socket], [], [], 0)[0])
        except (OSError, ValueError):  # closed; or a number beyond what select takes: then the wait tells
            return True

    def _settle_debts(self) -> None:
        while self._owed:
            self._settle_one()

    def _settle_one(self) -> None:
        promise = self._owed[0]
        patience = _patience(promise.request)
        try:
            reply = self._receive(None if patience is None else time.monotonic() + patience)
        except VramError as error:
            while self._owed:
                self._owed.popleft().error = error
            return
        self._owed.popleft()
        if isinstance(reply, Failed):
            promise.error = _exception(reply)
        else:
            promise.reply = reply

    def _receive(self, deadline: float | None) -> Reply:
        header = self._read(wire.HEADER, deadline)
        try:
            return wire.reply(self._read(wire.length(header), deadline))
        except wire.BadFrame as error:
            self.close()
            raise KeeperLost(f"The keeper sent something that is not a message ({error}).{self._see_log()}") from None

    def send(self, note: Request) -> None:
        """Send a request that has no reply.

        :raises KeeperLost: the keeper is gone.
        """
        self._write(note)

    def close(self) -> None:
        """Close the connection; what was opened on it is released. Calling it twice is fine."""
        try:
            # Wakes a thread that waits in `call`, and reaches the keeper even while a forked child has the socket.
            if os.getpid() == self._pid:
                self._socket.shutdown(sockets.SHUT_RDWR)
        except OSError:
            pass
        self._socket.close()

    def _write(self, *messages: Request) -> None:
        if os.getpid() != self._pid:
            raise KeeperLost("This connection to the keeper belongs to the parent process; open one of your own.")
        try:
            data = b"".join(map(wire.frame, messages))
        except wire.BadFrame as error:
            raise KeeperError(f"A message to the keeper could not be sent: {error}.") from None
        with self._writing:
            try:
                # A keeper that does not read for this long is stopped or stuck.
                self._socket.settimeout(_ANSWER_SECONDS)
                self._socket.sendall(data)
            except OSError as error:
                self.close()
                raise self._lost(error) from None

    def _read(self, size: int, deadline: float | None) -> bytes:
        data = bytearray()
        while len(data) < size:
            try:
                if deadline is None:
                    self._socket.settimeout(None)
                else:
                    left = deadline - time.monotonic()
                    if left <= 0:
                        raise TimeoutError
                    self._socket.settimeout(left)
                piece = self._socket.recv(min(size - len(data), 1 << 20))
            except TimeoutError:
                self.close()
                raise KeeperLost(f"The keeper did not answer in time.{self._see_log()}") from None
            except OSError as error:
                self.close()
                raise self._lost(error) from None
            if not piece:
                self.close()
                raise self._lost(None)
            data += piece
        return bytes(data)

    def _lost(self, error: OSError | None) -> KeeperLost:
        reason = f" ({error.strerror})" if error is not None and error.strerror else ""
        return KeeperLost(
            f"The keeper of this run is gone{reason}; what it measured cannot be judged.{self._see_log()}"
        )

    def _see_log(self) -> str:
        if self._log is None:
            return ""
        from pytest_vram.keeper.processes import tail

        # Its guard says why it ended a moment after its end was seen here.
        patience = time.monotonic() + _LAST_WORDS_SECONDS
        while not (last := tail(self._log, 1).strip()) and time.monotonic() < patience:
            time.sleep(0.02)
        return f" Its log is {self._log}; it ends with: {last.rstrip('.')}." if last else f" Its log is {self._log}."


def _patience(request: Request) -> float | None:
    """Seconds to wait for the reply; ``None`` where the wait depends on other tests only."""
    if isinstance(request, Open):
        return None
    if isinstance(request, Acquire):
        return request.plan.boot_timeout + request.plan.stop_grace + _ANSWER_SECONDS
    if isinstance(request, Restart):
        return None
    if isinstance(request, Turn):
        return request.timeout + _ANSWER_SECONDS
    if isinstance(request, Now):
        return request.settle + _ANSWER_SECONDS
    return _ANSWER_SECONDS


def _exception(reply: Failed) -> VramError:
    kind = getattr(errors, reply.error, None)
    if isinstance(kind, type) and issubclass(kind, VramError):
        return kind(reply.message)
    return KeeperError(reply.message)
