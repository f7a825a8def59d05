"""The keeper proper: its socket, its sampling loop, and how it ends."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import msgspec

from pytest_vram.errors import BackendError, KeeperError, VramError
from pytest_vram.journal import KINDS
from pytest_vram.keeper import limits, parents, wire
from pytest_vram.keeper.admission import Ask
from pytest_vram.keeper.conversation import Connection, converse, receive
from pytest_vram.keeper.core import Core, sampling
from pytest_vram.keeper.listening import listen, remove_stale
from pytest_vram.keeper.messages import (
    PROTOCOL,
    Abandon,
    Acquire,
    Close,
    Done,
    EndTurn,
    Failed,
    Finish,
    Granted,
    Hello,
    Launch,
    Leave,
    Note,
    Now,
    Open,
    Opened,
    Peek,
    Ping,
    Prepare,
    Reply,
    Request,
    Restart,
    State,
    Status,
    Stop,
    Turn,
    Welcome,
)
from pytest_vram.keeper.processes import Watch
from pytest_vram.keeper.pulse import Pulse
from pytest_vram.keeper.servers import Servers
from pytest_vram.keeper.ticker import Ticker
from pytest_vram.keeper.turns import Turns
from pytest_vram.keeper.windows import Window, Windows
from pytest_vram.measure import PYTEST, procfs

_ROLES = ("controller", "worker", "turn", "viewer")
_GREETING_SECONDS = 30.0
#: Seconds that servers and workers get after SIGTERM when the run is over; all must be gone within 3 s.
_END_GRACE = 1.0
#: Seconds of processor time that one step may take: a regular expression can take for ever.
_MOST_COMPUTING = 5.0
#: Nanoseconds between two samples while no window is open and nothing boots.
_IDLE_PERIOD = 100_000_000
#: Nanoseconds between two signs of life, a little less than between two slow samples.
_BEAT = 90_000_000
#: Intervals by which a sample may be late without a line in the journal.
_MOST_LATE = 3
_OWN_KINDS = frozenset({"run", "keeper", "device", "process", "sample", "gap", "backend", "window", "lease", "end"})


class Service:
    """Everything that a keeper does, in one thread."""

    def __init__(self, launch: Launch, guard: int, pulse: Pulse) -> None:
        self.launch = launch
        self.core = Core(launch, guard)
        self.windows = Windows(self.core)
        self.servers = Servers(self.core, self.windows)
        self._pulse = pulse
        self._connections: dict[int, Connection] = {}
        self._workers: dict[int, int] = {}
        self._next = 0
        self._ended = asyncio.Event()
        self._controller_gone = asyncio.Event()
        self._ending: asyncio.Task[None] | None = None
        self._outcome = ""
        self._beat = 0
        self._slow_down: Callable[[], None] = lambda: None

    # ------------------------------------------------------------ life

    async def run(self, listening: socket.socket, ready: Callable[[], None]) -> None:
        """Serve until the run ends."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._finish_soon, f"the keeper was told to end ({number.name})")
        for number in (signal.SIGINT, signal.SIGQUIT):
            # Ctrl-C is pytest's. A handler, and not "ignore", because servers would inherit that.
            loop.add_signal_handler(number, lambda: None)
        loop.add_signal_handler(signal.SIGCHLD, self.servers.reap)
        server = await asyncio.start_unix_server(self._serve, sock=listening, limit=1 << 20)
        pid, start = self.launch.controller
        self.core.members.adopt(pid, PYTEST)
        controller = Watch(pid, start, self._controller_ended)
        self.windows.settling.begin()
        # What was imported stays; without it a collection, which may come with any sample, has little to look at.
        gc.freeze()
        sampler = asyncio.ensure_future(self._sample())
        sampler.add_done_callback(self._sampler_ended)
        ready()
        try:
            await self._ended.wait()
        finally:
            sampler.cancel()
            controller.cancel()
            server.close()
            for connection in list(self._connections.values()):
                connection.writer.close()
            self.windows.admission.close()
            self.core.timeline.close_probes()
            self.core.ballast.end()
            self.core.journal.close()

    def _sampler_ended(self, task: asyncio.Task[None]) -> None:
        if task.cancelled() or task.exception() is None:
            return
        # Without sampling no figure can be trusted: better no keeper than a blind one.
        error = task.exception()
        self.core.log("note", text=f"sampling broke: {error!r}")
        sys.stderr.write(f"sampling broke: {error!r}\n")
        self._finish_soon(f"sampling broke: {error!r}")

    async def _sample(self) -> None:
        """Tick at the wanted interval; slowly while nothing is judged or boots.

        A figure begins at a boundary, when every mark is set back, so that slow ticks before it cost it nothing.
        """
        ticker = Ticker(self.core.interval, _IDLE_PERIOD, self._tick)
        timeline = self.core.timeline
        timeline.on_open = ticker.fast
        self._slow_down = ticker.slow
        if timeline.busy:
            ticker.fast()
        await ticker.run()

    def _tick(self, periods: int) -> None:
        timeline = self.core.timeline
        if periods > _MOST_LATE and timeline.busy:
            self.core.log("gap", late_ms=round((periods - 1) * self.core.interval / 1e6, 3))
        self.core.tick()
        self.servers.cut_logs()
        if not timeline.busy:
            self._slow_down()
        now = time.monotonic_ns()
        if now - self._beat >= _BEAT:
            self._beat = now
            self._pulse.beat()
            # The signal that ends this process if it computes for so long without coming here again, and servers with
            # it. Time in which it is stopped or frozen does not count.
            signal.setitimer(signal.ITIMER_PROF, _MOST_COMPUTING)

    def _controller_ended(self) -> None:
        self._controller_gone.set()
        self._finish_soon("the controller is gone")

    def _finish_soon(self, reason: str) -> None:
        if self._ending is None:
            self._ending = asyncio.ensure_future(self._finish(reason))

    async def _finish(self, reason: str) -> None:
        """End every server, and the workers of a controller that is gone; write the last line."""
        core = self.core
        try:
            ends = [asyncio.ensure_future(self.servers.end(_END_GRACE))]
            if not self._outcome:
                ends.append(asyncio.ensure_future(self._end_workers()))
            await asyncio.wait(ends)
            for connection in self._connections.values():
                for window in self.windows.of(connection.number):
                    self._abandon(window)
            self.windows.look_back()
            core.ballast.end()
            core.flush()
            core.log(
                "end",
                reason=reason,
                outcome=self._outcome,
                sampling=sampling(core.timeline.rate()),
                cpu_share=core.cpu_share(),
                lost=core.journal.lost,
            )
        finally:
            self._pulse.finish()
            try:
                os.unlink(self.launch.socket)
            except OSError:
                pass
            if self._outcome:
                # The reply to Finish goes out first; whoever asked may be gone already.
                asyncio.get_running_loop().call_later(0.5, self._ended.set)
            else:
                self._ended.set()

    async def _end_workers(self) -> None:
        """Workers of xdist outlive a killed controller by seconds; the run is over for them.

        A dying process closes its connections a moment before its death can be seen.
        """
        if not self._workers:
            return
        try:
            await asyncio.wait_for(self._controller_gone.wait(), 0.5)
        except TimeoutError:
            return
        for number in (signal.SIGTERM, signal.SIGKILL):
            deadline = time.monotonic() + _END_GRACE
            while time.monotonic() < deadline:
                left = [pid for pid, start in self._workers.items() if procfs.alive(pid, start)]
                if not left:
                    return
                for pid in left:
                    try:
                        os.kill(pid, number)
                        os.kill(pid, signal.SIGCONT)
                    except OSError:
                        continue
                await asyncio.sleep(0.05)

    # ------------------------------------------------------------ connections

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._next += 1
        connection = Connection(self._next, reader, writer)
        self._connections[connection.number] = connection
        try:
            first = await asyncio.wait_for(receive(connection), _GREETING_SECONDS)
            if not isinstance(first, Hello):
                raise wire.BadFrame("the first message was not a greeting")
            await self._answer(connection, first)
            if connection.role:
                await converse(connection, self._answer, self._undo)
        except (OSError, asyncio.IncompleteReadError):
            pass
        except wire.BadFrame as error:
            self.core.log("note", text=f"a connection was closed: {error}")
        except asyncio.CancelledError:
            pass
        finally:
            self._release(connection)
            writer.close()

    async def _answer(self, connection: Connection, request: Request | wire.NotARequest) -> None:
        reply: Reply | None
        try:
            if isinstance(request, wire.NotARequest):
                reply = self._refused(request)
            else:
                reply = await self._reply(connection, request)
        except VramError as error:
            reply = Failed(error=type(error).__name__, message=str(error))
        except Exception as error:  # noqa: BLE001 - a defect here must end neither the client nor the run
            traceback.print_exc()
            sys.stderr.flush()
            reply = Failed(error="KeeperError", message=f"The keeper failed at this request ({error!r}); see its log.")
        if reply is None:
            return
        connection.writer.write(wire.frame(msgspec.structs.replace(reply, number=request.number)))
        await asyncio.wait_for(connection.writer.drain(), _GREETING_SECONDS)
        if isinstance(request, Finish) and isinstance(reply, Done):
            self._ended.set()

    def _refused(self, request: wire.NotARequest) -> Failed | None:
        """The reply to a request that cannot be; a note has none."""
        if request.op == "note":
            self.core.log("note", text=f"a line for the journal was refused: {request}")
            return None
        return Failed(error="KeeperError", message=f"The keeper cannot do this ({request.op}): {request}.")

    def _release(self, connection: Connection) -> None:
        """Give back all that a connection held."""
        self._connections.pop(connection.number, None)
        if connection.watch is not None:
            connection.watch.cancel()
        if connection.turn is not None:
            window, turns = connection.turn
            connection.turn = None
            if turns is not None:
                turns.release()
            self._abandon(window)
        for window in self.windows.of(connection.number):
            self._abandon(window)
        self.windows.leave_all(connection.number)
        if connection.role == "controller" and not any(
            other.role == "controller" for other in self._connections.values()
        ):
            # Its end is the run's end; a moment later its process will be gone as well, or it is broken.
            self._finish_soon("the controller closed its connection")

    def _undo(self, connection: Connection, number: int) -> None:
        """Give back what a request opened whose reply nobody waits for any more."""
        for request, window in connection.opened:
            if request == number:
                if self.windows.is_open(window):
                    self._abandon(self.windows.get(window))
                self.windows.leave(window, connection.number)

    def _abandon(self, window: Window) -> None:
        try:
            self.windows.close(window.number, abandoned=True)
        except KeeperError:
            pass  # closed with the window around it

    # ------------------------------------------------------------ requests

    async def _reply(self, connection: Connection, request: Request) -> Reply | None:
        if connection.role == "viewer" and not isinstance(request, (Hello, Status)):
            raise KeeperError("A viewer may only look.")
        match request:
            case Hello():
                return self._hello(connection, request)
            case Open():
                return await self._open(connection, request)
            case Close():
                await self.servers.notice(self.windows.get(request.window))
                return self.windows.close(request.window, record=request.record, name=request.name)
            case Leave():
                self.windows.leave(request.window, connection.number)
                return None
            case Peek():
                return self.windows.peek(request.window)
            case Now():
                return await self.windows.now(
                    request.window,
                    min(request.settle, 600.0),
                    request.tolerance,
                    backends=request.backends,
                    pid=connection.pid,
                )
            case Acquire():
                return await self.servers.acquire(request.plan, self._window(request.window))
            case Restart():
                return await self.servers.restart(request.key, self._window(request.window))
            case Prepare():
                await self.servers.make_room(request.plan)
                return Done()
            case Stop():
                await self.servers.stop(request.key)
                return Done()
            case Turn():
                return await self._turn(connection, request)
            case EndTurn():
                return await self._end_turn(connection, request)
            case Note():
                self._note(request)
                return None
            case Status():
                return self._state(at_the_end=connection.role == "controller")
            case Abandon() | Ping():
                return None  # heeded by the conversation, before what waits
            case Finish():
                return await self._finish_now(connection, request)

    def _window(self, number: int | None) -> Window | None:
        return self.windows.get(number) if number is not None else None

    def _hello(self, connection: Connection, hello: Hello) -> Welcome:
        if hello.protocol != PROTOCOL:
            raise KeeperError(
                f"This keeper speaks protocol {PROTOCOL} and the client {hello.protocol}: two versions of pytest-vram"
                " are mixed in one run."
            )
        if hello.role not in _ROLES:
            raise KeeperError(f"{hello.role!r} is not a role: known are {', '.join(_ROLES)}.")
        if connection.role:
            raise KeeperError("This connection has greeted already.")
        if hello.role == "controller" and hello.pid != self.launch.controller[0]:
            raise KeeperError(
                f"Process {hello.pid} is not the controller of this run, which is {self.launch.controller[0]}; a forked"
                " copy of it has no part in the run."
            )
        if hello.role in ("controller", "worker"):
            if not procfs.alive(hello.pid, hello.start_time):
                raise KeeperError(f"There is no process {hello.pid} with that start time here.")
            self.core.members.adopt(hello.pid, PYTEST)
            if hello.role == "worker":
                self.core.members.workers.add(hello.pid)
                self._workers[hello.pid] = hello.start_time
                self.servers.workers = len(self._workers)
            self.core.boundary()
        connection.role, connection.pid, connection.name = hello.role, hello.pid, hello.name
        if hello.role == "worker":
            self.windows.admission.room.names[hello.pid] = hello.name
        if hello.role != "viewer":
            # A forked child may keep the socket open after the process that spoke is dead.
            connection.watch = Watch(hello.pid, hello.start_time, lambda: connection.writer.transport.abort())
        return Welcome(
            pid=self.core.pid,
            guard=self.core.guard,
            run=self.launch.run,
            folder=self.launch.folder,
            generation=self.core.generation,
            devices=self.core.devices,
            lease_folder=self.windows.admission.folder,
            lease_devices=sorted(self.windows.admission.room.keys.values()),
        )

    async def _open(self, connection: Connection, request: Open) -> Opened:
        if connection.role == "controller" and request.kind == "test":
            self.core.controller_tests = True
        window, waited = await self.windows.open(
            request.kind,
            request.name,
            connection.number,
            connection.pid,
            parent=request.parent,
            exclusive=request.exclusive,
            settle=request.settle,
            ask=Ask.of(request, connection.pid, connection.name),
            quick=request.quick,
        )
        connection.opened.append((request.number, window.number))
        return Opened(window=window.number, t=window.span.t, waited=round(waited, 6), waited_for=window.waited_for)

    async def _turn(self, connection: Connection, request: Turn) -> Granted:
        if connection.turn is not None:
            raise KeeperError("This connection has a turn already; end it first.")
        server = await self.servers.usable(request.key)
        before = time.monotonic()
        turns: Turns | None = None
        if request.serial:
            turns = self.servers.turns(server)
            await turns.take(request.timeout)
        try:
            # A thread may outlive its test while it waits for its turn; its request is then nobody's.
            parent = request.parent if self.windows.is_open(request.parent) else None
            window, _ = await self.windows.open(
                "request", request.request, connection.number, connection.pid, parent=parent
            )
            if server.label not in window.servers:
                self.windows.use(window, server)
        except BaseException:
            if turns is not None:
                turns.release()
            raise
        connection.turn = (window, turns)
        return Granted(window=window.number, waited=round(time.monotonic() - before, 6))

    async def _end_turn(self, connection: Connection, request: EndTurn) -> Reply:
        if connection.turn is None:
            raise KeeperError("This connection has no turn to end.")
        await self.servers.notice(connection.turn[0])
        window, turns = connection.turn
        connection.turn = None
        if request.record.get("result") == "timeout":
            for server in window.servers.values():
                server.timed_out = True
        try:
            closed = self.windows.close(window.number)
        finally:
            if turns is not None:
                turns.release()
        if request.record:
            own = {"window": window.number, "peaks": closed.own, "host_use": closed.host_use}
            self.core.log("request", **{**_plain(request.record), **own})
        return closed

    def _note(self, note: Note) -> None:
        kind = note.kind if note.kind in KINDS and note.kind not in _OWN_KINDS else "note"
        fields = _plain(note.fields)
        if kind != note.kind:
            fields["of_kind"] = note.kind
        self.core.log(kind, **fields)

    def _state(self, *, at_the_end: bool) -> State:
        core, windows = self.core, self.windows
        residues = windows.left() if at_the_end else []
        leases, waiting = self.windows.admission.tables()
        return State(
            pid=core.pid,
            run=self.launch.run,
            t=time.monotonic_ns(),
            devices=core.devices,
            backends=self.servers.table(),
            windows=self.windows.table(),
            sampling=sampling(core.timeline.rate()),
            own_cpu_share=core.cpu_share(),
            journal_trouble=core.journal_trouble or core.journal_removed,
            leases=leases,
            waiting=waiting,
            held=core.timeline.held("run"),
            over=windows.overs.all() if at_the_end else [],
            peak=windows.peak_of_run() if at_the_end else {},
            residues=residues,
            warnings=windows.admission.warnings,
        )

    async def _finish_now(self, connection: Connection, request: Finish) -> Done:
        if connection.role != "controller":
            raise KeeperError("Only the controller may finish the run.")
        self._outcome = request.outcome or "finished"
        self._finish_soon("the run is finished")
        if self._ending is None:
            raise BackendError("The run cannot be ended.")
        await asyncio.shield(self._ending)
        return Done()


def _plain(fields: dict[str, object]) -> dict[str, object]:
    """Fields of a client's line, without the keys that every line has of its own."""
    return {key: value for key, value in fields.items() if key not in ("v", "t", "kind")}


def run(text: bytes, guard: int, pulse: Pulse) -> None:
    """Be the keeper that ``text`` (a :class:`Launch` as JSON) describes. Never returns.

    Writes ``ready`` to standard output once it listens, or one sentence why it cannot; from then on both standard
    output and standard error are its log.
    """
    code = 1
    try:
        launch = msgspec.json.decode(text, type=Launch)
        parents.adopt_orphans()
        listening = listen(launch.socket)
        remove_stale(Path(launch.socket).parent)
        for path in limits.stale(Path(launch.socket).parent):
            limits.lift(path)
        asyncio.run(_main(launch, guard, pulse, listening))
        code = 0
    except (msgspec.MsgspecError, VramError, OSError) as error:
        _say(f"{error}.".encode())
        sys.stderr.write(f"the keeper ends: {error}\n")
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        if code:
            traceback.print_exc()
            sys.stderr.flush()
        os._exit(code)


async def _main(launch: Launch, guard: int, pulse: Pulse, listening: socket.socket) -> None:
    service = Service(launch, guard, pulse)
    await service.run(listening, lambda: _say(b"ready"))


def _say(words: bytes) -> None:
    """Tell whoever started the keeper, once; the pipe is given up for the log."""
    try:
        os.write(1, words + b"\n")
        os.dup2(2, 1)
    except OSError:
        pass
