"""From specs to running backends: plans them, asks the keeper for them, and hands out clients."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from pytest_vram import bootlog, specfile
from pytest_vram.backends import engine as engine_named
from pytest_vram.backends.base import CAPABILITIES, PlanContext, Properties
from pytest_vram.backends.client import AsyncVramClient, Target, VramClient
from pytest_vram.backends.frames import of_ours
from pytest_vram.backends.growth import Growth
from pytest_vram.backends.labels import relabelled
from pytest_vram.backends.record import RequestRecord
from pytest_vram.backends.turns import Caller, Connect, KeeperLike, ask, take
from pytest_vram.bootlog.boot import Boot
from pytest_vram.errors import BackendError, BadSpec, BootFailed, KeeperError, RequestFailed, VramError
from pytest_vram.keeper.messages import Acquire, Restart, Running, Stop, Turn
from pytest_vram.ledger import Ledger, combined
from pytest_vram.readings import Reading
from pytest_vram.spec import BackendSpec, LaunchPlan, OptionValue

if TYPE_CHECKING:
    from pytest_vram.backends.listening import Listening

__tracebackhide__ = of_ours

ANOTHER_BUILD = "Run `vram demo` once: it finds a build that runs on this CPU, and remembers those that do not."
#: Seconds that a lost connection waits for the keeper to notice the death of the server.
FATE_WAIT = 1.0


class Keeper(Caller, Protocol):
    """The connection that a pytest process has to the keeper."""

    @property
    def socket(self) -> str:
        """Path of the keeper's socket, which connections for turns are opened to."""


class RunningBackend:
    """A backend that is ready. :meth:`restart` changes this object in place."""

    def __init__(self, pool: Pool, spec: BackendSpec, plan: LaunchPlan, running: Running) -> None:
        self._pool = pool
        self.spec = spec
        self.plan = plan
        self.running = running
        self._boot: Boot | None = None
        #: What the last probe of this generation found; see :meth:`probe`.
        self.growth: Growth | None = None
        self._records: list[RequestRecord] = []
        self._target = Target(name=spec.name, url=running.url)
        self._refresh(running)
        self.client = pool.client_for(self)
        self.async_client = pool.async_client_for(self)

    def _refresh(self, running: Running) -> None:
        self.running = running
        self._boot = None
        self.growth = None
        target = self._target
        target.url, target.key = running.url, running.key
        target.api_key = running.api_key or self.plan.api_key
        target.model = self.spec.served_model
        target.log = running.log or None
        target.timeout = self.spec.request_timeout

    @property
    def name(self) -> str:
        """Key of its table in the spec file."""
        return self.spec.name

    @property
    def engine(self) -> str:
        """Name of its engine."""
        return self.spec.engine

    @property
    def url(self) -> str:
        """Root of the server, without ``/v1``."""
        return self.running.url

    @property
    def api_key(self) -> str | None:
        """The key that the server asks for."""
        return self._target.api_key

    @property
    def model(self) -> str | None:
        """The name that requests carry, else the model as the spec has it."""
        return self.spec.served_model or self.spec.model

    @property
    def pid(self) -> int:
        """PID of the server's first process."""
        return self.running.pid

    @property
    def pids(self) -> list[int]:
        """PIDs of the server's processes when it was acquired."""
        return list(self.running.pids)

    @property
    def generation(self) -> int:
        """1 for the first server of this plan in the run, 2 for the one after it died or was restarted …"""
        return self.running.generation

    @property
    def key(self) -> str:
        """Identity of the server at the keeper."""
        return self.running.key

    @property
    def log(self) -> Path | None:
        """Log file of this generation; ``None`` where this run did not start the server."""
        return Path(self.running.log) if self.running.log else None

    @property
    def command(self) -> list[str]:
        """The command that started it; empty where it was attached to."""
        return list(self.plan.argv)

    def keep(self, record: RequestRecord) -> None:
        """Take note of a finished request; every client of this backend reports here."""
        self._records.append(record)

    def take_requests(self) -> list[RequestRecord]:
        """The requests that finished since this was last called, over all clients of this backend."""
        taken, self._records = self._records, []
        return taken

    @property
    def target(self) -> Target:
        """What clients talk to; changed in place by :meth:`restart`."""
        return self._target

    @property
    def boot(self) -> Boot:
        """What the log says of this boot, with the device labels of the run; no evidence where there is no log."""
        if self._boot is None:
            self._boot = self.read_boot()
        return self._boot

    def read_boot(self) -> Boot:
        """As :attr:`boot`, of the log as it is now: what has failed since the server was ready is in it."""
        return relabelled(self._read_log(), self._pool.context, self.plan.env)

    def probe(self, *, at_once: Sequence[int] | None = None, seconds: float = 120.0, settle: float = 2.0) -> Growth:
        """Send what makes a deployment grow, and say what it took beyond its boot.

        Short prompts, one of more than a full ubatch, one that nearly fills the context, as many at once as there are
        slots, an image where a projector is loaded; each is a phase of the test (``serving: near-full context`` …),
        and what stays is in the ledger from then on. A step that failed is an outcome with its reason, not an error.

        :param at_once: how many requests to send at once, a round for each number, instead of one for each slot.
        :param seconds: for all of it; what does not fit is sent shorter or left out, and the step says so.
        :param settle: seconds that memory may take to come to rest after each step.
        :raises BadInput: a value that cannot be used. :raises KeeperError: the keeper is lost.
        """
        from pytest_vram.backends.probing import Probe

        self.growth = Probe(self, self._pool, at_once=at_once, seconds=seconds, settle=settle).run()
        return self.growth

    def _read_log(self) -> Boot:
        if self.log is None:
            return bootlog.without_evidence(self.engine, "this run has no log of a server that it did not start")
        boot = bootlog.read_own(self.log, engine=self.plan.grammar, patterns=self.plan.log_patterns)
        if not (kept := self.kept_from_it):
            return boot
        note = (
            f"kept from the server, whose settings are the spec's: {', '.join(kept)} of the environment (write what it"
            f" sets into `options` or `env` of [backend.{self.name}])"
        )
        return msgspec.structs.replace(boot, warnings=(note, *boot.warnings))

    @property
    def kept_from_it(self) -> list[str]:
        """Names of variables of the environment that its engine does not let it inherit; the spec's ``env`` counts."""
        plan = self.plan
        own = {*plan.env, plan.secret_env}
        return sorted(name for name in os.environ if name.startswith(tuple(plan.unset)) and name not in own)

    @property
    def ledger(self) -> Ledger:
        """The printed buckets held against the measured peak of the boot, the host's included."""
        peak = self.running.boot_peak
        measured = {label: figure for label, figure in peak.items() if isinstance(figure, Reading)}
        host = self.running.host_boot_peak
        if "host" not in measured and isinstance(host, Reading):
            measured["host"] = host
        return self.boot.ledger().against(measured)

    @property
    def explained(self) -> Ledger:
        """The printed buckets, and what a probe found to stay beyond them, without a measured total."""
        printed = self.boot.ledger()
        return printed if self.growth is None else combined([printed, Ledger(entries=self.growth.entries)])

    @property
    def capabilities(self) -> frozenset[str]:
        """What it can do, out of :data:`~pytest_vram.backends.base.CAPABILITIES`; where only host memory is measured,
        no layer is on a device.
        """
        found = engine_named(self.engine).capabilities(self.spec)
        return found - {"layers"} if self._off_devices else found

    @property
    def _off_devices(self) -> bool:
        """Whether it is on the host because of this run and not of its spec: where estimates are judged, no device is
        needed, and on a machine without one it runs without.
        """
        if self._pool.on_host:
            return True
        return self._pool.context.predicted and not set(self.boot.devices) - {"host"}

    @property
    def asked(self) -> Mapping[str, OptionValue]:
        """What the spec asks for, in the words of the boot log's facts; where only host memory is measured, the run
        itself keeps the model off every device, so layers are not asked for.
        """
        asked = dict(engine_named(self.engine).asked(self.spec))
        if self._off_devices:
            asked.pop("layers_offloaded", None)
        return asked

    def missing(self, *capabilities: str) -> list[str]:
        """Those of these capabilities that it has not.

        :raises ValueError: a name that is no capability.
        """
        for name in capabilities:
            if name not in CAPABILITIES:
                raise ValueError(f"{name!r} is not a capability: known are {', '.join(CAPABILITIES)}")
        have = self.capabilities
        return [name for name in capabilities if name not in have]

    def properties(self) -> Properties:
        """What the server says of itself now; figures that it does not give are ``None``."""
        engine = engine_named(self.engine)
        answers: dict[str, object] = {}
        for path in engine.property_paths():
            try:
                answers[path] = self.client.get(path)
            except RequestFailed as error:
                # Endpoints that a build lacks or has switched off; other programs answer them with a page of theirs.
                if error.status is None or (error.status >= 300 and error.status not in (400, 403, 404, 405, 501)):
                    raise
        return engine.properties(answers)

    def listening(self) -> Listening:
        """Who holds the socket that requests to it reach now, and whether that is this boot's; see ``judge_fresh``."""
        from pytest_vram.backends.listening import look

        return look(self.running, own_port=self.plan.own_port)

    def locked(self) -> int | None:
        """Bytes that its processes have locked in memory; ``None`` where the kernel does not say."""
        from pytest_vram.backends.listening import locked

        return locked(self.running)

    def restart(self) -> None:
        """Stop the server and start it again; this object then stands for the new generation."""
        request = Restart(key=self.key, window=self._pool.window())
        reply = ask(self._pool.keeper, request)
        self._refresh(_running(reply, "a restart"))
        self._pool.used(self)

    def stop(self) -> None:
        """Stop the server; the next :meth:`Pool.acquire` of its spec starts a fresh one."""
        ask(self._pool.keeper, Stop(key=self.key))


class Pool:
    """The backends that a pytest process may use.

    :param keeper: its connection to the keeper. :param context: devices of the run.
    :param specs: every backend of the spec file. :param default: the one to use where none is named.
    :param window: the window that is open now, or ``None``.
    :param connect: opens a connection for one turn; by default to the keeper's own socket.
    :param used: told of every backend that is acquired or restarted.
    """

    def __init__(
        self,
        keeper: Keeper,
        context: PlanContext,
        specs: Mapping[str, BackendSpec],
        default: str,
        window: Callable[[], int | None] = lambda: None,
        *,
        connect: Connect | None = None,
        used: Callable[[RunningBackend], object] = lambda backend: None,
    ) -> None:
        self.keeper = keeper
        self.context = context
        self.specs = dict(specs)
        self.default = default
        self.window = window
        self._connect = connect or self._connect_turn
        self.used = used
        self._plans: dict[bytes, LaunchPlan] = {}
        self._backends: dict[str, RunningBackend] = {}

    @property
    def on_host(self) -> bool:
        """Whether this run measures host memory in a card's place, and nothing else."""
        return {device.kind for device in self.context.devices} == {"cpu"}

    def spec(self, name: str | None = None, /, **overrides: Any) -> BackendSpec:
        """A backend's spec, with some of its keys changed for one use.

        :param overrides: keys of the table (``model``, ``boot_timeout`` …; its tables are merged key by
            key), or names of engine options with underscores (``ctx_size=2048``). ``None`` as the value
            of an option removes it.
        :raises BadSpec: an unknown backend, or a value of the wrong type.
        """
        wanted = self.default if name is None else name
        if not wanted:
            own = ", ".join(repr(known) for known in self.specs if known != "demo")
            raise BadSpec(
                f"the config file has several backends ({own}) and no default: write default = NAME in it, or choose"
                " one with --vram-backend=NAME or @vram_backend(NAME)"
            )
        if wanted not in self.specs:
            known = ", ".join(self.specs) or "none"
            raise BadSpec(f"backend {wanted!r} is not in the spec file: known are {known}")
        return overridden(self.specs[wanted], overrides)

    def plan(self, spec: BackendSpec) -> LaunchPlan:
        """The launch plan of this spec, made once per process.

        :raises BadSpec: what the engine refuses. :raises EngineNotFound: no binary. :raises ModelNotFound: no model.
        """
        identity = msgspec.json.encode(spec, order="sorted")
        if identity not in self._plans:
            try:
                engine = engine_named(spec.engine, origin=f"[backend.{spec.name}] in {spec.origin}")
                self._plans[identity] = engine.plan(spec, self.context)
            except VramError as error:  # its sentence names the place; the engine's own frames add nothing
                raise error.with_traceback(None) from None
        return self._plans[identity]

    def acquire(self, spec: BackendSpec) -> RunningBackend:
        """A running backend of this spec: the one that runs already, else a fresh one.

        :raises BackendError: it could not be planned, or did not boot.
        """
        plan = self.plan(spec)
        request = Acquire(plan=plan, window=self.window())
        try:
            running = _running(ask(self.keeper, request), "a request for a server")
        except BootFailed as error:
            if "SIGILL" in str(error) and spec.binary is None:
                error = BootFailed(f"{error}\n{ANOTHER_BUILD}")
            error.spec = spec
            raise error from None
        known = self._backends.get(running.key)
        if known is None:
            known = self._backends[running.key] = RunningBackend(self, spec, plan, running)
        elif known.generation != running.generation or known.running.pid != running.pid:
            known._refresh(running)
        self.used(known)
        return known

    def running(self) -> list[RunningBackend]:
        """Every backend that this process acquired, in the order in which it did."""
        return list(self._backends.values())

    def client_for(self, backend: RunningBackend, *, serial: bool = True) -> VramClient:
        """A new client of this backend, with its own list of requests."""
        return VramClient(backend.target, serial=serial, **self._links(backend))

    def async_client_for(self, backend: RunningBackend, *, serial: bool = True) -> AsyncVramClient:
        """A new client for async code."""
        return AsyncVramClient(backend.target, serial=serial, **self._links(backend))

    def client_of(self, target: Target, backend: RunningBackend, *, serial: bool = True) -> VramClient:
        """A new client of this backend with a target of its own, such as one with another timeout."""
        return VramClient(target, serial=serial, **self._links(backend))

    def _links(self, backend: RunningBackend) -> dict[str, Any]:
        return {"connect": self._connect, "window": self.window, "fate": self.fate, "keep": backend.keep}

    def fate(self, key: str) -> str | None:
        """One sentence on how the server with this key died, or ``None`` where it runs on.

        The keeper refuses turns at a dead backend with that sentence; it may take a moment to notice the death.
        """
        deadline = time.monotonic() + FATE_WAIT
        while True:
            keeper = self._connect("whether the server lives")
            try:
                take(keeper, Turn(key=key, request="whether the server lives", serial=False, timeout=FATE_WAIT))
            except BackendError as error:
                return str(error)
            finally:
                keeper.close()
            if time.monotonic() >= deadline:
                return None
            time.sleep(0.1)

    def _connect_turn(self, name: str) -> KeeperLike:
        from pytest_vram.keeper import KeeperClient

        return KeeperClient(self.keeper.socket, role="turn", name=name)


def _running(reply: object, what: str) -> Running:
    if not isinstance(reply, Running):
        raise KeeperError(f"the keeper answered {what} with {type(reply).__name__}")
    return reply


def overridden(spec: BackendSpec, overrides: Mapping[str, Any]) -> BackendSpec:
    """The spec with these keys changed; see :meth:`Pool.spec`."""
    if not overrides:
        return spec
    fixed = {"name", "origin", "base"}
    table: dict[str, Any] = msgspec.to_builtins(spec)
    options: dict[str, Any] = dict(spec.options)
    where = f"a change to [backend.{spec.name}]"
    for key, value in overrides.items():
        if key in fixed:
            raise BadSpec(f"{key!r} cannot be changed for one use ({where})")
        if key == "options":
            if not isinstance(value, Mapping):
                raise BadSpec(f"`options` must be a table of the engine's options ({where}), not {value!r}")
            for option, setting in value.items():
                _set(options, str(option), setting)
        elif key in ("env", "floors"):
            if not isinstance(value, Mapping):
                raise BadSpec(f"`{key}` must be a table ({where}), not {value!r}")
            table[key] = {**table[key], **value}
        elif key in ("sampling", "toolcalls"):
            if not isinstance(value, Mapping):
                raise BadSpec(f"`{key}` must be a table ({where}), not {value!r}")
            check = specfile.sampling if key == "sampling" else specfile.toolcalls
            table[key] = msgspec.to_builtins(check({**table[key], **value}, f"{where}: {key}"))
        elif key in BackendSpec.__struct_fields__:
            table[key] = value
        else:
            _set(options, key.replace("_", "-"), value)
    table["options"] = options
    try:
        return msgspec.convert(table, BackendSpec)
    except msgspec.ValidationError as error:
        raise BadSpec(f"{where} cannot be used: {error}") from None


def _set(options: dict[str, Any], name: str, value: object) -> None:
    if value is None:
        options.pop(name, None)
    else:
        options[name] = value
