"""From a launch plan to a server that answers, watched all the way."""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import signal
import subprocess
import time
from collections.abc import Mapping

from pytest_vram.bootlog import Failure, Follower
from pytest_vram.bootlog.devices import named
from pytest_vram.errors import BadInput, BootFailed, BootTimeout
from pytest_vram.keeper import health, processes, sole
from pytest_vram.keeper.core import Core
from pytest_vram.keeper.logs import CappedLog, LogReader
from pytest_vram.keeper.messages import BACKEND_MARK, RUN_MARK, BootPhase
from pytest_vram.keeper.server import Server
from pytest_vram.measure import Span, procfs
from pytest_vram.readings import Measured, Reading, Unmeasurable
from pytest_vram.units import mib

_ROUND = 0.01
_BETWEEN_CHECKS = 0.02
#: Seconds within which something must listen at the address of a server that runs already; it may still be loading.
_ATTACH_SECONDS = 3.0
#: Failures of a boot for which memory that others hold may be the reason.
_NO_ROOM = ("out_of_memory", "precheck", "kv_planning")
_SHORT = re.compile(
    r"out of memory|OutOfMemory|OUT_OF_DEVICE_MEMORY|[Ff]ree memory on device|[Nn]o available memory"
    r"|[Nn]ot enough (?:\w+ )?memory|insufficient (?:\w+ )?memory"
)
_INTERPRETER = re.compile(r"(python|pypy|node|ruby|perl|bash|sh|dash|java|deno|bun)[\d.]*")


class Boot:
    """One boot. :meth:`run` returns when the server is ready, else raises; what it started is then still there."""

    def __init__(self, core: Core, server: Server) -> None:
        self._core = core
        self._server = server
        self._plan = server.plan
        self._reader: LogReader | None = None
        self._follower: Follower | None = None
        self._span: Span | None = None
        self._phase_span: Span | None = None
        self._phase = "start"
        self._phase_start = 0
        self._port: int | None = None
        self._port_is_ours = not server.plan.own_port or server.attached
        self._said_ready = False
        self._check: asyncio.Task[int | str | bool] | None = None
        self._last_answer = ""
        self._unheard = False

    # ------------------------------------------------------------ the whole way

    async def run(self) -> None:
        """Start (or find) the server and wait until it is ready.

        :raises BootFailed: it died, or refused, or somebody else has its port. :raises BootTimeout: neither ready nor
            dead in its time.
        """
        deadline = time.monotonic() + self._plan.boot_timeout
        try:
            self._prepare()
            if self._server.attached:
                self._attach()
            else:
                self._start()
            self._begin()
            await self._until_ready(deadline)
            self._finish()
        finally:
            if self._check is not None:
                self._check.cancel()
            if self._reader is not None:
                self._reader.close()
            timeline = self._core.timeline
            for span in (self._span, self._phase_span):
                if span is not None:
                    timeline.close(span)

    def _prepare(self) -> None:
        plan, server = self._plan, self._server
        server.url = plan.url
        if "{port}" not in plan.url and plan.url:
            try:
                _, self._port, _ = health.address(plan.url)
            except ValueError as error:
                raise BootFailed(f"Backend {plan.name!r} cannot be used: {error}.") from None
        if plan.port_pattern is not None:
            self._compiled(plan.port_pattern, "port_pattern")
        if server.attached:
            return
        try:
            self._follower = server.follower = Follower(plan.grammar, patterns=plan.log_patterns)
        except BadInput as error:
            raise BootFailed(f"Backend {plan.name!r} cannot be started: {error}") from None
        if not plan.url and plan.health is None and plan.log is None and "ready" not in plan.log_patterns:
            raise BootFailed(
                f"Backend {plan.name!r} cannot be started: nothing would tell when it is ready. Give it a `url`, a"
                " `health` path or a `ready` log pattern."
            )
        if plan.own_port and self._port:
            stranger = self._stranger()
            if stranger is not None:
                raise BootFailed(
                    f"Backend {plan.name!r} was not started: its port {self._port} is held by {stranger}. End that"
                    " process or choose another port."
                )

    def _compiled(self, pattern: str, what: str) -> re.Pattern[str]:
        try:
            return re.compile(pattern)
        except re.error as error:
            raise BootFailed(
                f"Backend {self._plan.name!r} cannot be started: its {what} is not usable: {error}."
            ) from None

    def _start(self) -> None:
        plan, server, core = self._plan, self._server, self._core
        assert server.log is not None
        environment = {name: text for name, text in os.environ.items() if not name.startswith(tuple(plan.unset))}
        environment |= {**plan.env, RUN_MARK: core.launch.run, BACKEND_MARK: server.label}
        if plan.secret_env is not None:
            server.api_key = secrets.token_urlsafe(24)
            environment[plan.secret_env] = server.api_key
        server.t_start = time.monotonic_ns()
        server.kernel_kills = procfs.out_of_memory_kills()
        try:
            process = processes.spawn(plan.argv, cwd=plan.cwd, env=environment, log=server.log)
        except (OSError, subprocess.SubprocessError, ValueError) as error:
            where = getattr(error, "filename", None) or plan.argv[0]
            reason = getattr(error, "strerror", None) or str(error)
            raise BootFailed(f"Backend {plan.name!r} could not be started: {where}: {reason}.") from None
        server.process, server.pid = process, process.pid
        try:
            server.start = procfs.start_time(process.pid)
        except ProcessLookupError:
            server.start = 0
        core.members.adopt(process.pid, server.label)
        server.capped = CappedLog(server.log)
        self._reader = LogReader(server.log, server.capped)

    def _attach(self) -> None:
        plan, server, core = self._plan, self._server, self._core
        server.t_start = time.monotonic_ns()
        pids = self._wanted()
        server.pid = pids[0]
        try:
            server.start = procfs.start_time(server.pid)
        except ProcessLookupError:
            raise BootFailed(f"Backend {plan.name!r}: process {server.pid} ended while it was looked at.") from None
        for pid in pids:
            core.members.adopt(pid, server.label, history=False)

    def _wanted(self) -> list[int]:
        """PIDs of the processes to attach to, the lowest first."""
        plan = self._plan
        if plan.pid is not None:
            if procfs.read_stat(plan.pid) is None:
                raise BootFailed(f"Backend {plan.name!r} cannot be attached: there is no process with PID {plan.pid}.")
            return [plan.pid]
        if plan.process is not None:
            found = self._named(plan.process)
            if not found:
                raise BootFailed(
                    f"Backend {plan.name!r} cannot be attached: no process is called {plan.process!r} (neither by its"
                    " name, nor by the file name of its program or script). Start it, or correct `process`."
                )
            return found
        found = self._listening(self._port) if self._port else []
        if not found:
            raise BootFailed(
                f"Backend {plan.name!r} cannot be attached: neither `pid` nor `process` is given, and no process that"
                f" can be seen listens on port {self._port}."
            )
        return found

    def _named(self, name: str) -> list[int]:
        core = self._core
        pytest = {member.pid for member in core.members.of("pytest")} | {core.pid, core.guard}
        found: list[int] = []
        for pid in procfs.pids():
            if pid in pytest:
                continue
            stat = procfs.read_stat(pid)
            if stat is None or stat.state in "ZX":
                continue
            arguments = procfs.command_line(pid)
            # The kernel cuts names after 15 bytes.
            if stat.name == name[:15] or name in _program_names(arguments):
                found.append(pid)
        return sorted(found)

    def _begin(self) -> None:
        core, server = self._core, self._server
        server.watch_end()
        t = core.boundary()
        owners = (server.label,)
        self._span = core.timeline.open(t, owners)
        self._phase_span = core.timeline.open(t, owners)
        self._phase_start = server.t_start
        server.at_start = core.timeline.now("backend", frozenset(owners))
        core.log("backend", state="starting", **server.journal_fields())
        core.log("phase", backend=server.name, generation=server.generation, name="start")

    async def _until_ready(self, deadline: float) -> None:
        server = self._server
        gone = asyncio.ensure_future(server.gone.wait())
        patience = time.monotonic() + _ATTACH_SECONDS
        try:
            while True:
                self._follow()
                if server.gone.is_set():
                    self._follow(to_end=True)
                    raise BootFailed(self._died())
                if await self._is_ready():
                    return
                if time.monotonic() >= deadline:
                    self._follow()
                    raise BootTimeout(self._too_late())
                if self._unheard and time.monotonic() >= patience:
                    raise BootFailed(
                        f"Backend {self._plan.name!r} cannot be attached: nothing answers at {server.url}"
                        f" ({self._last_answer}). Start it, or correct `url`."
                    )
                await asyncio.wait({gone}, timeout=_ROUND)
        finally:
            gone.cancel()

    def _finish(self) -> None:
        core, server = self._core, self._server
        assert self._span is not None
        self._next_phase("ready")
        server.t_ready = self._phase_start
        server.phases.append(BootPhase(name="ready", start=server.t_ready))
        owners = frozenset({server.label})
        server.at_ready = core.timeline.now("backend", owners)
        server.boot_peak = core.timeline.peaks(self._span, "backend")
        server.host_boot_peak = core.timeline.host_peak(self._span)
        server.state = "ready"
        if server.attached and self._port is not None:
            server.doubt = self._answered_by_others(self._port)
            if server.doubt is not None:
                core.log("note", text=server.doubt)
        core.log(
            "backend",
            state="ready",
            seconds=round((server.t_ready - server.t_start) / 1e9, 3),
            boot_peak=server.boot_peak,
            at_ready=server.at_ready,
            **server.journal_fields(),
        )

    # ------------------------------------------------------------ the log

    def _follow(self, *, to_end: bool = False) -> None:
        """Take in new lines of the log: phases, and the port."""
        if self._reader is None or self._follower is None:
            return
        plan = self._plan
        for line in self._reader.all_lines() if to_end else self._reader.lines():
            phase = self._follower.feed(line)
            if phase == "ready":
                # What counts is that it answers; some servers say this before they load the model.
                self._said_ready = True
            elif phase is not None and phase != self._phase:
                self._next_phase(phase)
            if self._port is None and plan.port_pattern is not None:
                match = re.search(plan.port_pattern, line)
                if match and match[1] and match[1].isdigit() and 0 < int(match[1]) < 1 << 16:
                    self._port = int(match[1])
                    self._server.url = plan.url.replace("{port}", match[1])

    def _next_phase(self, name: str) -> None:
        """End the phase and begin the next, at a boundary, so that its peak is exact."""
        core, server = self._core, self._server
        assert self._phase_span is not None
        pss = self._proportional()
        t = core.boundary()
        core.timeline.close(self._phase_span)
        server.phases.append(
            BootPhase(
                name=self._phase,
                start=self._phase_start,
                end=t,
                peak=core.timeline.peaks(self._phase_span, "backend"),
                pss=pss,
            )
        )
        self._phase, self._phase_start = name, t
        self._phase_span = core.timeline.open(t, (server.label,))
        core.log("phase", backend=server.name, generation=server.generation, name=name, before=server.phases[-1])

    def _proportional(self) -> Measured:
        """Proportional set size of the server's processes."""
        total = 0
        for member in self._core.members.of(self._server.label):
            size = procfs.proportional(member.pid)
            if size is None:
                return Unmeasurable(
                    reason=f"smaps_rollup of process {member.pid} cannot be read",
                    source="host-pss",
                    scope="backend",
                    device="host",
                )
            total += size
        return Reading(bytes=total, source="host-pss", scope="backend", device="host", exact=True)

    # ------------------------------------------------------------ readiness

    async def _is_ready(self) -> bool:
        plan = self._plan
        if plan.url and self._port is None:
            return False
        if self._port is not None and not self._port_is_ours:
            stranger = self._stranger()
            if stranger is not None:
                raise BootFailed(
                    f"Backend {plan.name!r} says that it listens on port {self._port}, but that port is held by"
                    f" {stranger}. End that process or choose another port."
                )
            if not self._reachable(self._port):
                return False
            self._port_is_ours = True
        if plan.health is None and (plan.log is not None or "ready" in plan.log_patterns):
            return self._said_ready
        return await self._answers()

    async def _answers(self) -> bool:
        """The outcome of the health check in flight, once it is there; the next one starts a moment later."""
        if self._check is None:
            self._check = asyncio.ensure_future(self._ask())
        if not self._check.done():
            return False
        answer, self._check = self._check.result(), None
        self._last_answer = f"HTTP status {answer}" if type(answer) is int else str(answer)
        server = self._server
        # A server that runs already is not to be waited for when it refuses; one that is busy or loads is.
        self._unheard = server.attached and type(answer) is str and not answer.startswith(health.LATE)
        return answer is True or answer == 200

    async def _ask(self) -> int | str | bool:
        await asyncio.sleep(_BETWEEN_CHECKS if self._last_answer else 0)
        return await asked(self._server, self._port)

    def _reachable(self, port: int) -> set[int]:
        """Inodes of the sockets that a connection to the server's address would reach."""
        try:
            host, _, _ = health.address(self._server.url.replace("{port}", str(port)))
        except ValueError:
            host = "127.0.0.1"
        local = host in ("localhost", "::1") or host.startswith("127.")
        return {found.inode for found in procfs.listeners(port) if not local or procfs.loopback(found)}

    def _listening(self, port: int) -> list[int]:
        return procfs.socket_owners(self._reachable(port))

    def _stranger(self) -> str | None:
        """Who else holds the port, for a person; ``None`` when nobody does, or the server itself."""
        assert self._port is not None
        inodes = self._reachable(self._port)
        core = self._core
        own = [member.pid for member in core.members.of(self._server.label)]
        for inode in inodes:
            if any(procfs.holds_socket(pid, {inode}) for pid in own):
                continue
            owners = procfs.socket_owners({inode})
            if any(pid in own for pid in owners):
                continue
            # A helper that was started a moment ago may not be in the list yet.
            core.members.scan()
            own = [member.pid for member in core.members.of(self._server.label)]
            if any(pid in own for pid in owners):
                continue
            if not owners:
                if inode in self._reachable(self._port):
                    return "a process that this user cannot see"
                continue
            stat = procfs.read_stat(owners[0])
            arguments = " ".join(procfs.command_line(owners[0]))[:120]
            name = stat.name if stat is not None else "?"
            return f"process {owners[0]} ({arguments or name})"
        return None

    def _answered_by_others(self, port: int) -> str | None:
        """Why an attached process may not be the one that answers, for a person; a proxy may stand before it."""
        owners = self._listening(port)
        core = self._core
        core.members.scan()
        own = {member.pid for member in core.members.of(self._server.label)}
        if not owners or own.intersection(owners):
            return None
        for pid in own:
            # A router answers, and its child holds the memory.
            while (stat := procfs.read_stat(pid)) is not None and stat.parent > 1:
                pid = stat.parent
                if pid in owners:
                    return None
        stat = procfs.read_stat(owners[0])
        name = stat.name if stat is not None else "?"
        return (
            f"port {port} of {self._server.label} is answered by process {owners[0]} ({name}), which is none of those"
            " that are measured"
        )

    # ------------------------------------------------------------ what went wrong

    def _died(self) -> str:
        server, plan = self._server, self._plan
        if server.attached:
            return f"Backend {plan.name!r}: process {server.pid} ended before it answered."
        how = ending(server, self._mark())
        return with_evidence(
            f"Backend {plan.name!r} {how} while it started, in phase {self._phase!r}.", server, more=self._holders()
        )

    def _holders(self) -> str:
        """Who holds the memory of the cards, where the engine found too little of it."""
        failure = self._follower.boot().failure if self._follower is not None else None
        if failure is None:
            # An engine whose log is not understood says it in words.
            short = _SHORT.search(processes.tail(self._server.log)) is not None
        else:
            short = failure.kind in _NO_ROOM
        return self._core.holders(self._server.label) if short else ""

    def _too_late(self) -> str:
        plan = self._plan
        waited = f"{plan.boot_timeout:g} s"
        if plan.url and self._port is None:
            state = "its log named no port"
        elif self._port is not None and not self._port_is_ours:
            state = f"nothing of it listens on port {self._port}"
        elif plan.health is not None:
            state = f"its health check said: {self._last_answer or 'nothing yet'}"
        else:
            state = "it did not say that it was ready"
        core = self._core
        ours = {core.pid, *(member.pid for member in core.members.of(self._server.label))}
        others = "".join(f" {sentence}." for sentence in sole.clients(plan, ours))
        return self._with_evidence(
            f"Backend {plan.name!r} was not ready within {waited} (boot_timeout): it reached phase {self._phase!r},"
            f" {state}.{others}"
        )

    def _mark(self) -> int | None:
        shares = self._span.shares if self._span is not None else {}
        return max((held.bytes for held in shares.values() if held.pid == self._server.pid), default=None)

    def _with_evidence(self, text: str) -> str:
        return with_evidence(text, self._server)


def _program_names(arguments: list[str]) -> list[str]:
    """File names of the program in a command line, and of the script where the program is an interpreter."""
    if not arguments:
        return []
    names = [os.path.basename(arguments[0])]
    if _INTERPRETER.fullmatch(names[0]):
        names += [os.path.basename(argument) for argument in arguments[1:] if not argument.startswith("-")][:1]
    return names


def ending(server: Server, mark: int | None) -> str:
    """How a server's main process ended, for a person."""
    kills = procfs.out_of_memory_kills()
    counted = kills - server.kernel_kills if kills is not None and server.kernel_kills is not None else 0
    return f"(PID {server.pid}) {processes.exit_words(server.exit_code, mark=mark, kernel_kills=counted)}"


def with_evidence(text: str, server: Server, *, more: str = "") -> str:
    """``text``, what the log says about the failure, ``more``, and the log's last lines."""
    parts = [text]
    boot = server.follower.boot() if server.follower is not None else None
    failure = boot.failure if boot is not None else None
    if boot is not None and failure is not None:
        parts.append(_reason(failure, boot.devices) + failure.text.strip().rstrip(".") + ".")
    elif server.exit_code not in (None, 0, -signal.SIGKILL, -signal.SIGTERM):
        # After the boot, whose failures the follower reads; what others end has no say in it.
        said = processes.cause(server.log, secrets=server.secrets)
        parts.append(f"It says: {said.rstrip('.')}." if said else "")
    parts.append(more)
    last = processes.tail(server.log, secrets=server.secrets)
    message = " ".join(part for part in parts if part)
    if last:
        cut = server.capped.words() if server.capped is not None else ""
        return f"{message} Last lines of {server.log}{cut}:\n{last}"
    if server.log is None:
        return message
    full = " The disk has no space left." if processes.disk_full(server.log) else ""
    return f"{message} It wrote nothing to {server.log}.{full}"


def _reason(failure: Failure, devices: Mapping[str, str]) -> str:
    """The kind of a failure in words, where the engine's own sentence may not name it."""
    if failure.kind != "out_of_memory":
        return ""
    what = f"{mib(failure.bytes)} " if failure.bytes else ""
    what += f"of {failure.bucket} " if failure.bucket else ""
    where = f" on {named(failure.device, devices)}" if failure.device else ""
    unsure = "" if failure.certainty == "certain" else f" ({failure.certainty})"
    return f"Out of memory{unsure}: {what}could not be allocated{where}. The engine says: "


async def asked(server: Server, port: int | None) -> int | str | bool:
    """Status of the health check, ``True`` where a connection is all there is to check, or why there is none."""
    plan = server.plan
    if plan.health is None:
        return await health.connects(server.url) or "no connection"
    if plan.health.startswith(("http://", "https://")):
        url = plan.health.replace("{port}", str(port))
    else:
        url = server.url.rstrip("/") + "/" + plan.health.lstrip("/")
    # The key goes to the server itself and nowhere else.
    own = not plan.health.startswith(("http://", "https://")) or url.startswith(server.url)
    return await health.get(url, key=server.api_key if own else None)
