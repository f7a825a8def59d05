"""The pytest side of the keeper's socket.

A signal handler may raise in the middle of everything here: pytest-timeout does, and so does Ctrl-C. Requests and
replies therefore carry numbers, what was read or written stays in step with the socket whatever is raised, and a
request whose caller does not wait any more is given up at the keeper, with all that it would have opened.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import signal
import socket as sockets
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from math import isfinite
from pathlib import Path

import msgspec

from pytest_vram import errors
from pytest_vram.errors import KeeperError, KeeperLost, KeeperUnavailable, VramError
from pytest_vram.keeper import wire
from pytest_vram.keeper.messages import (
    RUN_MARK,
    Abandon,
    Acquire,
    Failed,
    Hello,
    Now,
    Open,
    Opened,
    Ping,
    Reply,
    Request,
    Restart,
    Turn,
    Welcome,
)
from pytest_vram.measure.procfs import environment_value, read_stat, start_time

LOG_NAME = "keeper.log"
_GREETING_SECONDS = 10.0
_ANSWER_SECONDS = 60.0
#: A wait may be long; a sign of life is asked for after this much silence.
_SILENCE_SECONDS = 15.0
_LAST_WORDS_SECONDS = 0.5
_MEANWHILE_SECONDS = 1.0
_PIECE = 1 << 18
#: ``struct ucred``: PID, UID and GID of whoever listens at the other end.
_PEER = struct.Struct("3i")


class KeeperSilent(KeeperLost):
    """The keeper is there and does not answer."""


class Promise:
    """The reply to a request, which may be there already; see :meth:`KeeperClient.ahead`."""

    __slots__ = ("client", "error", "number", "patience", "reply", "request")

    def __init__(self, client: KeeperClient, request: Request, number: int, patience: float | None) -> None:
        self.client = client
        self.request = request
        self.number = number
        self.patience = patience
        self.reply: Reply | None = None
        self.error: VramError | None = None

    @property
    def kept(self) -> bool:
        """Whether the reply, or the reason why there is none, is there."""
        return self.reply is not None or self.error is not None

    def result(self) -> Reply:
        """The reply, waited for where it is not there yet.

        :raises VramError: as :meth:`KeeperClient.call`.
        """
        if not self.kept:
            self.client.collect(self)
        if self.error is not None:
            raise self.error
        assert self.reply is not None
        return self.reply


class _Outgoing:
    """Bytes on their way, and how many of them went with each call: an exception between two calls loses no count."""

    def __init__(self, data: bytes) -> None:
        self.data = memoryview(data)
        self.sent: deque[int] = deque()

    def left(self) -> memoryview:
        return self.data[sum(self.sent) :]


class KeeperClient:
    """One connection to the keeper of a run.

    Threads may share it: one call waits for the other. Everything that was opened on it is released when it is
    closed, or when the process ends in whatever way.

    :param role: ``controller``, ``worker``, ``turn`` or ``viewer``; see :class:`~pytest_vram.keeper.messages.Hello`.
    :ivar meanwhile: called now and then while a request waits for other tests.
    :ivar welcome: the keeper's greeting, with the devices that it measures.
    :ivar stopped: the keeper did not answer, and somebody has stopped it.
    :raises KeeperUnavailable: nothing answers there. :raises KeeperLost: it ended while it greeted.
    """

    def __init__(self, socket: str, *, role: str, name: str = "", timeout: float = _GREETING_SECONDS) -> None:
        self._path = socket
        self._log: Path | None = None
        self._pid = os.getpid()
        # Taken again by the same thread where a signal handler raised in the middle of taking it.
        self._asking = threading.RLock()
        self._writing = threading.RLock()
        self._numbers = itertools.count(1)
        self.stopped = False
        self._owed: dict[int, Promise] = {}
        self._incoming: deque[bytes] = deque()
        self._outgoing = _Outgoing(b"")
        self.meanwhile: Callable[[], None] | None = None
        #: PID of the process that listens at the other end, 0 where that is not known.
        self.keeper = 0
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
            self._socket.setblocking(False)
            self.keeper = self._listener()
            self._place = self._where()
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

    # ------------------------------------------------------------ asking

    def number(self) -> int:
        """A number for :meth:`call`, so that whoever made it can give the request up (:meth:`abandon`)."""
        return next(self._numbers)

    def call(self, request: Request, timeout: float | None = None, *, number: int | None = None) -> Reply:
        """Send a request and wait for its reply. One that is interrupted by an exception is given up at the keeper.

        :param timeout: seconds; by default as long as the request itself may take, and a minute.
        :param number: of :meth:`number`.
        :raises VramError: the class that the keeper names, with its message.
        :raises KeeperLost: it died, or did not answer in time; the connection is closed then.
        """
        patience = _patience(request) if timeout is None else timeout
        if patience is not None and not isfinite(patience):
            raise KeeperError(f"It is not possible to wait for {patience} s: give a number of seconds.")
        promise = Promise(self, request, self.number() if number is None else number, patience)
        try:
            with self._asking:
                self._owed[promise.number] = promise
                self._write(_numbered(promise))
                self._wait(promise)
        except VramError:
            raise
        except BaseException:
            self.abandon(promise.number)
            raise
        return promise.result()

    def ahead(self, *requests: Request) -> list[Promise]:
        """Send requests and go on; the keeper answers them in order, while this process does other things.

        :raises KeeperLost: the keeper is gone.
        """
        promises = [Promise(self, request, self.number(), _patience(request)) for request in requests]
        try:
            with self._asking:
                self._owed.update((promise.number, promise) for promise in promises)
                self._write(*map(_numbered, promises))
        except VramError:
            raise
        except BaseException:
            for promise in promises:
                self.abandon(promise.number)
            raise
        return promises

    def collect(self, promise: Promise) -> None:
        """Wait for the reply of a promise, and of those before it."""
        try:
            with self._asking:
                self._wait(promise)
        except VramError as error:
            promise.error = error

    def abandon(self, number: int) -> None:
        """Nobody waits for the reply to this request any more: what it opens, or has opened, is given back.

        For what is left to do after an exception; raises nothing of its own.
        """
        self._owed.pop(number, None)
        with contextlib.suppress(KeeperError):
            self._write(Abandon(request=number), patience=0.0)

    def caught_up(self) -> bool:
        """Whether every request that was sent ahead has its reply by now; waits for none."""
        with self._asking:
            with contextlib.suppress(KeeperLost):  # those who are owed a reply are told
                while self._owed and self._readable(0.0):
                    self._take()
            return not self._owed

    def send(self, note: Request) -> None:
        """Send a request that has no reply.

        :raises KeeperLost: the keeper is gone.
        """
        self._write(note)

    def close(self) -> None:
        """Close the connection; what was opened on it is released. Calling it twice is fine."""
        if not self._is_ours():
            self._socket.detach()
            return
        try:
            # Wakes a thread that waits in `call`, and reaches the keeper even while a forked child has the socket.
            if os.getpid() == self._pid:
                self._socket.shutdown(sockets.SHUT_RDWR)
        except OSError:
            pass
        self._socket.close()

    def dismiss(self) -> None:
        """The run is over: the guard of a keeper that does not answer ends it, with all that it started.

        A guard that is stopped is told to go on, and tells its keeper: else servers would stay behind them.
        """
        welcome = self.welcome
        if welcome.guard and environment_value(welcome.guard, RUN_MARK) == welcome.run:
            with contextlib.suppress(OSError):
                os.kill(welcome.guard, signal.SIGTERM)
                os.kill(welcome.guard, signal.SIGCONT)

    # ------------------------------------------------------------ waiting

    def _wait(self, promise: Promise) -> None:
        """Read replies until that of ``promise`` is there.

        The keeper answers in order. The time of a request begins when it is the first that is owed.
        """
        first: Promise | None = None
        began = heard = asked = 0.0
        while not promise.kept:
            if promise.number not in self._owed:
                raise self._lost(None)
            front = next(iter(self._owed.values()))
            now = time.monotonic()
            if front is not first:
                first, began, heard, asked = front, now, now, now
            if front.patience is None:
                # How long it waits depends on others; that the keeper is there to grant it does not.
                left = heard + _ANSWER_SECONDS - now
                if now - max(heard, asked) > _SILENCE_SECONDS:
                    self._write(Ping(number=self.number()))
                    asked = now
            else:
                left = began + front.patience - now
            if left <= 0:
                raise self._silent(_ANSWER_SECONDS if front.patience is None else front.patience)
            if self._readable(min(left, _MEANWHILE_SECONDS)):
                self._take()
                heard = time.monotonic()
            elif front.patience is None and self.meanwhile is not None:
                self.meanwhile()

    def _readable(self, seconds: float) -> bool:
        if not self._is_ours():
            raise self._taken()
        poll = select.poll()
        try:
            poll.register(self._socket, select.POLLIN)
        except (OSError, ValueError):
            return True  # closed; whoever reads is told
        return bool(poll.poll(seconds * 1e3))

    def _take(self) -> None:
        """Take what has come, and hand each whole reply to whoever it is owed to.

        :raises KeeperLost: the end has come.
        """
        try:
            # In one step: an exception of a signal handler comes before something is read, or after it was kept.
            self._incoming.extend(map(self._socket.recv, (_PIECE,)))
        except BlockingIOError:
            return
        except OSError as error:
            raise self._over(self._lost(error)) from None
        ended = not self._incoming[-1]
        try:
            while (end := self._frame()) is not None:
                data = b"".join(self._incoming)
                self._keep(wire.reply(data[wire.HEADER : end]))
                self._incoming = deque((data[end:],))
        except wire.BadFrame as error:
            words = f"The keeper sent something that is not a message ({error}).{self._see_log()}"
            raise self._over(KeeperLost(words)) from None
        if ended:
            raise self._over(self._lost(None))

    def _frame(self) -> int | None:
        """Length of the first message that has come as a whole, header included; ``None`` where none has."""
        come = sum(map(len, self._incoming))
        if come < wire.HEADER:
            return None
        end = wire.HEADER + wire.length(b"".join(itertools.islice(self._incoming, wire.HEADER + 1))[: wire.HEADER])
        return end if come >= end else None

    def _keep(self, reply: Reply) -> None:
        promise = self._owed.get(reply.number)
        if promise is None and not reply.number and not hasattr(self, "welcome"):
            promise = next(iter(self._owed.values()), None)  # a keeper of old, which numbers nothing
        if promise is None:
            # Its caller does not wait any more, and may have had no time to say so.
            if isinstance(reply, Opened):
                self.abandon(reply.number)
            return
        if isinstance(reply, Failed):
            promise.error = _exception(reply)
        else:
            promise.reply = reply
        self._owed.pop(promise.number, None)

    # ------------------------------------------------------------ writing

    def _write(self, *messages: Request, patience: float = _ANSWER_SECONDS) -> None:
        """Send messages whole, after the rest of what an exception cut off before.

        :param patience: seconds for a keeper that does not read; what is left then goes with the next message.
        """
        if os.getpid() != self._pid:
            raise KeeperLost("This connection to the keeper belongs to the parent process; open one of your own.")
        try:
            data = b"".join(map(wire.frame, messages))
        except wire.BadFrame as error:
            raise KeeperError(f"A message to the keeper could not be sent: {error}.") from None
        if not self._is_ours():
            raise self._taken()
        with self._writing:
            self._outgoing = _Outgoing(bytes(self._outgoing.left()) + data)
            deadline = time.monotonic() + patience
            while left := self._outgoing.left():
                try:
                    self._outgoing.sent.extend(map(self._socket.send, (left,)))
                except BlockingIOError:
                    wait = deadline - time.monotonic()
                    if wait > 0:
                        self._writable(wait)
                    elif patience:
                        # A keeper that does not read for this long is stopped or stuck.
                        raise self._silent(patience) from None
                    else:
                        return
                except OSError as error:
                    raise self._over(self._lost(error)) from None

    def _writable(self, seconds: float) -> None:
        poll = select.poll()
        with contextlib.suppress(OSError, ValueError):  # closed; whoever writes is told
            poll.register(self._socket, select.POLLOUT)
            poll.poll(seconds * 1e3)

    # ------------------------------------------------------------ the other end

    def _listener(self) -> int:
        try:
            peer = self._socket.getsockopt(sockets.SOL_SOCKET, sockets.SO_PEERCRED, _PEER.size)
        except (OSError, AttributeError):
            return 0
        return int(_PEER.unpack(peer)[0])

    def _where(self) -> tuple[int, int] | None:
        """Which file the descriptor of the socket means; ``None`` where it is closed."""
        try:
            found = os.fstat(self._socket.fileno())
        except OSError:
            return None
        return found.st_dev, found.st_ino

    def _is_ours(self) -> bool:
        """Whether the descriptor is still the socket's: a test may have closed it, and opened its own there."""
        return self._socket.fileno() < 0 or self._where() == self._place

    def _taken(self) -> KeeperLost:
        return self._over(
            KeeperLost(
                "Something in this process closed the descriptor of the connection to the keeper (does a test close all"
                " descriptors?); what was measured since cannot be judged."
            )
        )

    def _over(self, error: KeeperLost) -> KeeperLost:
        """Close the connection, and tell all who are owed a reply."""
        self.close()
        for number, promise in list(self._owed.items()):
            promise.error = promise.error or error
            self._owed.pop(number, None)
        return error

    def _lost(self, error: OSError | None) -> KeeperLost:
        reason = f" ({error.strerror})" if error is not None and error.strerror else ""
        return KeeperLost(
            f"The keeper of this run is gone{reason}; what it measured cannot be judged.{self._see_log()}"
        )

    def _silent(self, seconds: float) -> KeeperLost:
        """What is to be said of a keeper that does not answer; the connection is closed."""
        stat = read_stat(self.keeper) if self.keeper else None
        who = f"The keeper of this run (PID {self.keeper})" if self.keeper else "The keeper of this run"
        if stat is not None and stat.state in "Tt":
            self.stopped = True
            why = " and is stopped"
        elif stat is not None and stat.state not in "ZX":
            why = " and is alive: it hangs, most likely in a call of the graphics driver that does not return"
        else:
            why = ""
        return self._over(KeeperSilent(f"{who} did not answer for {seconds:g} s{why}.{self._see_log()}"))

    def _see_log(self) -> str:
        if self._log is None:
            return ""
        from pytest_vram.keeper.processes import tail

        # Its guard says why it ended a moment after its end was seen here.
        patience = time.monotonic() + _LAST_WORDS_SECONDS
        while not (last := tail(self._log, 1).strip()) and time.monotonic() < patience:
            time.sleep(0.02)
        return f" Its log is {self._log}; it ends with: {last.rstrip('.')}." if last else f" Its log is {self._log}."


def _numbered(promise: Promise) -> Request:
    return msgspec.structs.replace(promise.request, number=promise.number)


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
