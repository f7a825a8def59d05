"""The servers of a run: started once per plan, shared, watched, ended."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from pytest_vram.errors import BackendDied, BackendError, BootFailed, BootTimeout, KeeperError, VramError
from pytest_vram.keeper import health, processes, sole
from pytest_vram.keeper.booting import Boot, asked, ending, with_evidence
from pytest_vram.keeper.core import Core, file_name
from pytest_vram.keeper.logs import MOST
from pytest_vram.keeper.messages import Running
from pytest_vram.keeper.room import Holding
from pytest_vram.keeper.server import Server
from pytest_vram.keeper.turns import Turns
from pytest_vram.keeper.windows import Window, Windows
from pytest_vram.measure import procfs
from pytest_vram.spec import LaunchPlan
from pytest_vram.units import mib

#: Starts of one plan that may fail in a row: a suite must not wait for the same boot timeout in every test.
MOST_FAILURES = 3
#: Seconds between two looks at a device that another server has.
_LOOK_AGAIN = 0.05


class Servers:
    """All servers. ``reap`` collects ended children of the keeper.

    :ivar workers: xdist workers that this run has, 0 without xdist.
    """

    def __init__(self, core: Core, windows: Windows) -> None:
        self._core = core
        self._windows = windows
        self._by_key: dict[str, Server] = {}
        self._booting: dict[str, asyncio.Task[Server]] = {}
        self._stopping: dict[str, asyncio.Task[None]] = {}
        self._starting: dict[str, Server] = {}
        self._last_deaths: dict[str, str] = {}
        self._failures: dict[str, list[VramError]] = {}
        self._plans: dict[str, LaunchPlan] = {}
        self._turns: dict[str, Turns] = {}
        self.workers = 0
        self._closed = False
        self._most_grace: float | None = None
        core.known_label = self._knows
        core.label_of_session = self._of_session
        core.only_label = self._only
        admission = windows.admission
        admission.backends.holdings = self._holdings
        admission.backends.end = self._end_idle
        admission.backends.workers = lambda: self.workers
        self._changed = admission.wake

    # ------------------------------------------------------------ looking

    def _all(self) -> list[Server]:
        return [*self._by_key.values(), *self._starting.values()]

    def _knows(self, label: str) -> bool:
        return any(server.label == label for server in self._all())

    def _of_session(self, session: int) -> str | None:
        return next((server.label for server in self._all() if server.process and server.pid == session), None)

    def _only(self) -> str | None:
        """Label of the only server whose orphans come to the keeper."""
        labels = [server.label for server in self._all() if not server.attached]
        return labels[0] if len(labels) == 1 else None

    def table(self) -> list[dict[str, Any]]:
        """What ``Status`` says about them."""
        return [server.table(self._pids(server)) for server in self._all()]

    def _holdings(self) -> list[Holding]:
        """What each server holds now, or, once it is ready, has held at most when somebody asked."""
        timeline, room = self._core.timeline, self._windows.admission.room
        found = []
        for server in self._all():
            now = room.measured(timeline.held("backend", frozenset({server.label})), server.at_ready)
            if server.state == "ready":
                now = server.most_held = {key: max(size, server.most_held.get(key, 0)) for key, size in now.items()}
            used = bool(self._windows.using(server))
            found.append(Holding(server.label, server.key, now, server.state, server.attached, used))
        return found

    def _end_idle(self, label: str, reason: str) -> None:
        """Stop a backend that nobody uses; admission goes on when it is gone."""
        server = next((server for server in self._by_key.values() if server.label == label), None)
        if server is not None:
            asyncio.ensure_future(self._stop(server, reason)).add_done_callback(
                lambda task: task.cancelled() or task.exception()
            )

    def _pids(self, server: Server) -> list[int]:
        return [member.pid for member in self._core.members.of(server.label)]

    def get(self, key: str) -> Server:
        """The running server with this key.

        :raises BackendDied: it has died. :raises BackendError: there is none.
        """
        server = self._by_key.get(key)
        if server is not None and server.state == "ready":
            return server
        if key in self._last_deaths:
            raise BackendDied(self._last_deaths[key])
        raise BackendError("That backend does not run; it was stopped, or never started by this keeper.")

    async def usable(self, key: str) -> Server:
        """As :meth:`get`, once a death that was only just noticed is told in full.

        :raises BackendDied: it has died. :raises BackendError: there is none.
        """
        server = self._by_key.get(key)
        if server is not None and server.burial is not None:
            await asyncio.shield(server.burial)
        return self.get(key)

    def turns(self, server: Server) -> Turns:
        """The queue of a server."""
        return self._turns.setdefault(server.label, Turns())

    def reap(self) -> None:
        """Collect ended children."""
        processes.reap_orphans({server.pid: server.process for server in self._all() if server.process is not None})

    def cut_logs(self) -> None:
        """Keep the servers' logs from filling the disk."""
        for server in self._all():
            self._cut(server)

    def _cut(self, server: Server) -> None:
        log = server.capped
        if log is None:
            return
        try:
            first = log.look()
        except OSError as error:
            self._core.log("note", text=f"the log of backend {server.label} cannot be cut: {error.strerror}")
            log.close()
            server.capped = None
            return
        if first:
            text = f"the log of backend {server.label} is over {mib(MOST)}: its beginning and its end are kept"
            self._core.log("note", text=text, log=server.log.name if server.log else None)

    # ------------------------------------------------------------ starting

    async def acquire(self, plan: LaunchPlan, window: Window | None) -> Running:
        """The running server of this plan, started if need be. Everybody who asks while it boots shares the outcome.

        :raises BootFailed, BootTimeout: with all that is known.
        """
        key = plan.key
        fresh = False
        server = self._by_key.get(key)
        if server is not None and server.timed_out:
            await self._look_after(server)
            server = self._by_key.get(key)
        if server is None or server.state != "ready" or not server.alive():
            self._refuse_both(plan, window)
            self._expect(key, window)
            task = self._booting.get(key)
            if task is None:
                fresh = True
                task = asyncio.ensure_future(self._boot(plan))
                self._booting[key] = task
                task.add_done_callback(lambda done: self._booted(key, done))
            try:
                # A client that goes away does not take the boot with it: others may wait for it too.
                server = await asyncio.shield(task)
            except asyncio.CancelledError:
                if task.cancelled():
                    raise BootFailed(f"Backend {plan.name!r} was stopped before it started.") from None
                raise
            finally:
                if window is not None:
                    window.awaits.discard(key)
        if window is not None and server.label not in window.servers:
            self._core.boundary()
            self._windows.use(window, server)
        return server.running(self._pids(server), fresh)

    def _expect(self, key: str, window: Window | None) -> None:
        """A window waits for the start of the server with this key: what starts for it is its own."""
        if window is not None:
            window.awaits.add(key)
            for server in self._starting.values():
                if server.key == key:
                    self._windows.expect(window, server)

    async def _look_after(self, server: Server) -> None:
        """A server that let a request time out is asked how it is; one that hangs is ended and a fresh one starts."""
        port = health.address(server.url)[1] if server.url else None
        answer = await asked(server, port)
        if answer is True or answer == 200 or server.attached:
            server.timed_out = False
            return
        self._core.log(
            "note", text=f"backend {server.label} hangs: after a request timed out its health check said: {answer}"
        )
        await self._stop(server, "it hangs: a request timed out, and its health check is not answered")

    def _booted(self, key: str, task: asyncio.Task[Server]) -> None:
        self._booting.pop(key, None)
        if not task.cancelled():
            task.exception()  # somebody has it already, or nobody waits any more

    async def _boot(self, plan: LaunchPlan) -> Server:
        if self._closed:
            raise KeeperError("The run is ending; no backend is started any more.")
        failures = self._failures.get(plan.key, [])
        if len(failures) >= MOST_FAILURES:
            raise type(failures[-1])(f"Not tried again after {len(failures)} failed starts in this run. {failures[-1]}")
        await self._windows.settling.baseline()
        await self.make_room(plan)
        await self._windows.settling.stopped()
        await self._until_free(plan)
        core = self._core
        server = self._new(plan)
        self._starting[server.label] = server
        self._windows.starts(server)
        try:
            await Boot(core, server).run()
        except VramError as error:
            self._failures.setdefault(plan.key, []).append(error)
            await self._clear(server, "failed", reason=str(error).splitlines()[0])
            raise
        except asyncio.CancelledError:
            await self._clear(server, "stopped", reason="stopped while it started")
            raise BootFailed(f"Backend {plan.name!r} was stopped while it started.") from None
        except OSError as error:
            await self._clear(server, "failed", reason=str(error))
            raise BootFailed(f"Backend {plan.name!r} could not be started: {error}.") from None
        finally:
            self._starting.pop(server.label, None)
        self._by_key[plan.key] = server
        self._plans[plan.key] = plan
        self._failures.pop(plan.key, None)
        self._last_deaths.pop(plan.key, None)
        self._changed()
        asyncio.ensure_future(self._guard(server)).add_done_callback(lambda task: task.cancelled() or task.exception())
        return server

    def _refuse_both(self, plan: LaunchPlan, window: Window | None) -> None:
        """Refuse a test that would wait for itself.

        :raises BootFailed: what this plan needs for itself is held by a backend that the same test uses.
        """
        other = sole.holder(plan, self._all())
        if other is None or window is None:
            return
        if any(user.holder == window.holder for user in self._windows.using(other)):
            raise BootFailed(
                f"Backend {plan.name!r} cannot be started beside backend {other.label}, which the same test uses:"
                f" RPC device {sole.shared(plan, other)} serves one server at a time. Give each of them a device of its"
                " own."
            )

    async def _until_free(self, plan: LaunchPlan) -> None:
        """Wait until no other server has what this plan needs for itself; one that nobody uses is ended.

        :raises BootTimeout: others use it for too long.
        """
        deadline = time.monotonic() + plan.boot_timeout
        while (other := sole.holder(plan, self._all())) is not None:
            what = f"{sole.shared(plan, other)} serves one server at a time"
            users = self._windows.using(other)
            if other.state == "ready" and not users:
                await self._stop(other, f"{what}, and backend {plan.name!r} is started")
                continue
            if time.monotonic() >= deadline:
                by = f", used by {users[0].name}" if users else ""
                raise BootTimeout(
                    f"Backend {plan.name!r} was not started within {plan.boot_timeout:g} s (boot_timeout): RPC device"
                    f" {what}, and backend {other.label} has it{by}."
                )
            await asyncio.sleep(_LOOK_AGAIN)

    def _new(self, plan: LaunchPlan) -> Server:
        core = self._core
        generation = core.server_generations.get(plan.name, 0) + 1
        log = None
        if plan.argv:
            log = core.folder / f"{file_name(plan.name)}.{generation}.log"
            while log.exists():
                # Of an earlier keeper whose journal lines were lost.
                generation += 1
                log = core.folder / f"{file_name(plan.name)}.{generation}.log"
        core.server_generations[plan.name] = generation
        return Server(plan, generation, log)

    async def make_room(self, plan: LaunchPlan) -> None:
        """End what stands in the way: the dead predecessor, unused variants of the same backend, and other unused ones.

        A small card holds one deployment, and a test is not to be charged for the server of another. With several
        workers those of other names stay: they may be wanted again the next moment.
        """
        for task in list(self._stopping.values()):
            await asyncio.shield(task)
        for server in list(self._by_key.values()):
            if server.key == plan.key:
                if server.alive() and server.state == "ready":
                    continue
                # Its end may be so recent that it was not noticed yet.
                await self._lost(server)
            elif self._windows.using(server) or self._windows.admission.keeps(server.key):
                continue
            elif server.name == plan.name:
                await self._stop(server, "another variant of the backend is started")
            elif self.workers < 2 and not server.attached:
                await self._stop(server, f"backend {plan.name!r} is started, and nobody uses this one")

    # ------------------------------------------------------------ ending

    async def _guard(self, server: Server) -> None:
        """Wait for the end of a ready server; unless it was stopped, that is its death."""
        await server.gone.wait()
        await self._lost(server)

    async def _lost(self, server: Server) -> None:
        """A ready server ended; returns when nothing of it is left. Whoever notices first does the work."""
        if server.state == "ready":
            server.state = "died"
            server.burial = asyncio.ensure_future(self._bury(server))
        if server.burial is not None:
            await asyncio.shield(server.burial)

    async def _bury(self, server: Server) -> None:
        seconds = (time.monotonic_ns() - server.t_ready) / 1e9
        if server.process is not None:
            server.exit_code = server.process.poll()
        self._core.boundary()
        if server.attached:
            who = f"Backend {server.label} (PID {server.pid}), which this run had attached to,"
            sentence = f"{who} ended after {seconds:.1f} s."
        else:
            how = ending(server, self._windows.mark(server))
            sentence = with_evidence(f"Backend {server.label} {how} after {seconds:.1f} s.", server)
        server.death = sentence
        self._last_deaths[server.key] = sentence
        self._windows.died(server, sentence)
        self.turns(server).died(sentence)
        await self._clear(server, "died", reason=sentence)

    async def notice(self, window: Window) -> None:
        """Notice the death of a server that this window uses, before the window closes.

        A client hears of it first: a dying process closes its connections a moment before its end can be seen.
        """
        for server in list(window.servers.values()):
            if server.state != "ready":
                continue
            stat = procfs.read_stat(server.pid)
            if stat is None or stat.state in "ZX" or stat.flags & procfs.EXITING:
                try:
                    await asyncio.wait_for(server.gone.wait(), 2.0)
                except TimeoutError:
                    continue
                await self._lost(server)

    async def stop(self, key: str, reason: str = "asked for") -> None:
        """Stop the server with this key; it is gone when this returns. Nothing to do when there is none."""
        task = self._booting.get(key)
        if task is not None:
            task.cancel()
            await asyncio.wait({task})
        server = self._by_key.get(key)
        if server is not None:
            await self._stop(server, reason)

    async def _stop(self, server: Server, reason: str) -> None:
        task = self._stopping.get(server.label)
        if task is None:
            if server.state != "ready":
                return
            server.state = "stopping"
            self._core.log("backend", state="stopping", reason=reason, **server.journal_fields())
            self._core.boundary()
            self.turns(server).died(f"Backend {server.label} was stopped: {reason}.")
            task = asyncio.ensure_future(self._clear(server, "stopped", reason=reason))
            self._stopping[server.label] = task
            task.add_done_callback(lambda _: self._stopping.pop(server.label, None))
        await asyncio.shield(task)

    async def _clear(self, server: Server, state: str, *, reason: str) -> None:
        """End whatever is left of a server, and forget it."""
        core = self._core
        left: list[int] = []
        pids = {server.pid, *self._pids(server)}
        if server.attached:
            core.members.release(server.label)
        else:
            # What died has no claim to grace for its helpers.
            given = 0.0 if state in ("failed", "died") else server.plan.stop_grace
            if self._most_grace is not None:
                given = min(given, self._most_grace)
            left = await processes.end_tree(core.members, server.label, grace=given, reap=self.reap)
            self.reap()
        if server.watch is not None:
            server.unwatch()
        if server.process is not None:
            server.exit_code = server.process.poll()
        server.state = state
        server.gone.set()
        if self._by_key.get(server.key) is server:
            del self._by_key[server.key]
        self._turns.pop(server.label, None)
        capped = server.capped
        if capped is not None:
            self._cut(server)
            capped.close()
            if capped.left_out:
                text = f"{mib(capped.left_out)} of the log of backend {server.label} were left out"
                core.log("note", text=text, log=server.log.name if server.log else None)
        fields = server.journal_fields()
        if left:
            core.log("note", text=f"processes {left} of backend {server.label} did not end after SIGKILL")
        core.log("backend", state=state, reason=reason, exit_code=server.exit_code, **fields)
        core.boundary()
        if not self._closed:
            self._changed()
        if not server.attached and not self._closed:
            await self._windows.settling.after_stop(f"backend {server.label}", pids)

    async def restart(self, key: str, window: Window | None) -> Running:
        """Stop the server with this key and start it again, as the next generation.

        :raises BackendError: there is none, it is not this run's to restart, or another test uses it. :raises
            BootFailed, BootTimeout: as in :meth:`acquire`.
        """
        if window is not None:
            await self.notice(window)
        if self._by_key.get(key) is None and key in self._plans:
            return await self.acquire(self._plans[key], window)  # it died: starting it is what is wanted
        server = self.get(key)
        if server.attached:
            raise BackendError(f"Backend {server.name!r} is attached; what this run did not start it does not restart.")
        users = self._windows.using(server)
        others = [user.name for user in users if user.kind == "test" and user is not window]
        if window is not None and others:
            raise BackendError(
                f"Backend {server.name!r} cannot be restarted now: {others[0]} uses it. A restart needs its backend"
                " alone: mark the test that restarts it with @serial_only."
            )
        await self._stop(server, "restart")
        return await self.acquire(server.plan, window)

    async def end(self, grace: float) -> None:
        """Stop everything at the same time, with at most ``grace`` seconds each; nothing is started after this."""
        self._closed = True
        self._most_grace = grace
        boots = list(self._booting.values())
        for task in boots:
            task.cancel()
        tasks: list[asyncio.Future[Any]] = [asyncio.ensure_future(asyncio.wait(boots))] if boots else []
        tasks += [asyncio.ensure_future(self._stop(server, "the run ended")) for server in list(self._by_key.values())]
        if tasks:
            await asyncio.wait(tasks)
