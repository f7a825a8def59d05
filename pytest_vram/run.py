"""One run, seen from a pytest process: its settings, its link to the keeper, its backends and its open test.

The hooks in :mod:`pytest_vram.plugin` and the fixtures delegate to this module; it knows nothing of pytest.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from pytest_vram import measure, specfile
from pytest_vram.backends.base import PlanContext
from pytest_vram.backends.pool import Pool, RunningBackend
from pytest_vram.errors import BackendError, BadInput, KeeperError, KeeperLost, KeeperUnavailable, VramError
from pytest_vram.keeper import KeeperClient, Promise, ensure, mark_environment, socket_path, start_time
from pytest_vram.keeper.messages import (
    Close,
    Closed,
    DeviceInfo,
    Launch,
    Leave,
    Note,
    Open,
    Opened,
    Prepare,
    Reply,
    Request,
    Welcome,
)
from pytest_vram.measure.torch_memory import Allocator, TorchMemory
from pytest_vram.meter import Meter
from pytest_vram.needs import Plan as Plan
from pytest_vram.needs import need_of, settling_of
from pytest_vram.needs import plan_of as plan_of
from pytest_vram.readings import Measured, Reading, Unmeasurable
from pytest_vram.settings import Settings

if TYPE_CHECKING:
    from pytest_vram.accuracy import ToolcallResult, Wanted
    from pytest_vram.advice.records import Advice
    from pytest_vram.checks.finding import Finding
    from pytest_vram.idling import Idle
    from pytest_vram.predicting import Predictions
    from pytest_vram.sessions import Session
    from pytest_vram.soaking import SoakResult

RPC_VARIABLE = "PYTEST_VRAM_RPC"
#: Among the versions of a run: that of NVIDIA's driver.
DRIVER = "nvidia-driver"


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """What every process of one run shares.

    :ivar folder: the run folder; made when the keeper is first needed. :ivar controller: PID and start time.
    """

    id: str
    folder: str
    socket: str
    controller: tuple[int, int]
    rootdir: str


def new_identity(rootdir: Path) -> Identity:
    """A fresh identity for a run whose controller is this process. Makes nothing on disk."""
    now = datetime.datetime.now(datetime.UTC)
    run = f"{now:%Y%m%dT%H%M%SZ}-{secrets.token_hex(3)}"
    base = rootdir / ".vram"
    pid = os.getpid()
    try:
        socket, controller = socket_path(run), (pid, start_time(pid))
        if not os.access(base if base.exists() else rootdir, os.W_OK):
            # The socket's folder is this user's alone, which a folder for all in the temporary one would not be.
            base = Path(socket).parent
    except (KeeperError, OSError):  # no keeper here: whoever needs one is told so when it is started
        socket, controller = "", (pid, 0)
    return Identity(id=run, folder=str(base / "runs" / run), socket=socket, controller=controller, rootdir=str(rootdir))


class Attempt:
    """One attempt at one test: its window and what it used.

    :ivar judged: whether it stands in the report and is held against limits. :ivar gated: whether it has entered the
        gate of this process. :ivar waited: seconds before it could begin, with ``waited_for`` what was wanted.
    :ivar earlier: findings on the part of it that came before its window. :ivar allocators: torch's, in its window.
    :ivar wanted: cases of tool calls that its marker asks for; ``toolcalls`` is what became of them.
    :ivar before: backends that were asked for it in a window of their own, before it began.
    :ivar idle: its idle memory, where its marker asks for it; ``passed``: its set-up and call are over, and passed.
    :ivar soak: what became of its soak. :ivar sessions: those of its ``vram_session`` fixture.
    :ivar admitted: its windows, with the keepers that opened them: until it leaves, others wait for what it holds.
    """

    def __init__(self, key: str, plan: Plan, number: int) -> None:
        self.key = key
        self.plan = plan
        self.number = number
        self.window: int | None = None
        self.backends: dict[str, RunningBackend] = {}
        self.meter: Meter | None = None
        self.trouble: str | None = None
        self.judged = True
        self.gated = False
        self.waited = 0.0
        self.waited_for: list[str] = []
        self.uses: list[str] = []
        self.earlier: list[Finding] = []
        self.allocators: list[Allocator] = []
        self.wanted: Wanted | None = None
        self.toolcalls: ToolcallResult | None = None
        self.before: list[RunningBackend] = []
        self.idle: Idle | None = None
        self.soak: SoakResult | None = None
        self.passed = False
        self.sessions: list[Session] = []
        self.admitted: list[tuple[KeeperClient, int]] = []


class Run:
    """The run in this process. Everything that costs something happens on use."""

    def __init__(
        self, settings: Settings, specs: specfile.SpecFile, identity: Identity, *, role: str, worker: str | None
    ) -> None:
        self.settings = settings
        self.specs = specs
        self.identity = identity
        self.role = role
        self.worker = worker
        self.attempt: Attempt | None = None
        self.warnings: list[str] = []
        self._pid = os.getpid()
        self._devices: list[DeviceInfo | Unmeasurable] | None = None
        self._measurable: tuple[list[DeviceInfo | Unmeasurable], tuple[DeviceInfo, ...]] | None = None
        #: Whether estimates stand in for everything that would be measured (``predicted``).
        self.predicted = any(device.kind == "predicted" for device in settings.device)
        #: Tests are listed and not run: no driver is asked for anything.
        self.only_lists = False
        self._client: KeeperClient | None = None
        self._meanwhile: Callable[[], None] | None = None
        self._pool: Pool | None = None
        self._predictions: Predictions | None = None
        self._attempts: dict[str, int] = {}
        #: Advice that was made, by what it was asked for: tests that share a backend often fail alike.
        self.advice: dict[bytes, tuple[Advice, ...]] = {}
        self.torch = TorchMemory()
        #: Called before a window of its own is opened for an attempt.
        self.opening: Callable[[Attempt], None] = lambda attempt: None

    @property
    def is_copy(self) -> bool:
        """Whether this is a forked copy of the process that the run belongs to: it must leave the run alone."""
        return os.getpid() != self._pid

    # ------------------------------------------------------------ devices

    @property
    def rpc(self) -> tuple[str, ...]:
        """Endpoints of RPC devices, in index order, from the environment."""
        text = os.environ.get(RPC_VARIABLE, "")
        return tuple(part.strip() for part in text.split(",") if part.strip())

    @property
    def devices(self) -> list[DeviceInfo | Unmeasurable]:
        """What was asked to be measured, each measurable or with the reason why not.

        :raises BadSetting: where ``--vram-emulate`` cannot be played on one.
        """
        if self.only_lists:
            return []
        if self._devices is None:
            size = self.settings.emulate
            self._devices = [
                measure.emulated(device, size) if size is not None and isinstance(device, DeviceInfo) else device
                for device in measure.survey(self.settings.device, self.rpc)
            ]
        return self._devices

    @property
    def measurable(self) -> tuple[DeviceInfo, ...]:
        """The devices that can be measured, when every device that was asked for can be."""
        devices = self.devices
        known = self._measurable
        if known is None or known[0] is not devices:  # asked several times by each test
            found = tuple(device for device in devices if isinstance(device, DeviceInfo))
            known = self._measurable = (devices, found if len(found) == len(devices) else ())
        return known[1]

    def why_unmeasurable(self) -> str:
        """One sentence: what was tried and why nothing can be measured."""
        text = self.settings.device_text
        reasons = [
            device.reason.removeprefix(f"{text}: ") for device in self.devices if isinstance(device, Unmeasurable)
        ]
        return f"nothing can be measured with --vram-device={self.settings.device_text}: " + "; ".join(reasons)

    @property
    def host_only(self) -> bool:
        """True on ``cpu``, where host memory stands in for VRAM."""
        return any(device.kind == "cpu" for device in self.settings.device)

    @property
    def predictions(self) -> Predictions:
        """The estimates of this run's backends."""
        if self._predictions is None:
            from pytest_vram.predicting import Predictions

            self._predictions = Predictions()
        return self._predictions

    # ------------------------------------------------------------ keeper

    def keeper(self) -> KeeperClient:
        """The link to the keeper of this run, which is started where none answers.

        :raises KeeperUnavailable: when none can be started here.
        """
        if self._client is None:
            self._make_folder()
            ensure(
                Launch(
                    run=self.identity.id,
                    folder=self.identity.folder,
                    socket=self.identity.socket,
                    controller=self.identity.controller,
                    devices=list(self.settings.device),
                    interval_ms=self.settings.interval_ms,
                    rpc=list(self.rpc),
                    settings=self.settings.as_table(),
                    budget=self.settings.budget,
                    reserve=self.settings.reserve,
                    emulate=self.settings.emulate,
                    leases=self.settings.leases,
                )
            )
            mark_environment(self.identity.id)
            role = "worker" if self.worker else self.role
            self._client = KeeperClient(self.identity.socket, role=role, name=self.worker or "")
            self._client.meanwhile = self._meanwhile
        return self._client

    def call(self, request: Request, timeout: float | None = None, *, number: int | None = None) -> Reply:
        """Ask the keeper; a dead keeper is forgotten, so that the next call starts a new one.

        :param number: of the request, where it was drawn before; see :meth:`KeeperClient.number`.
        :raises KeeperLost: when it died, or does not answer in time.
        """
        client = self.keeper()
        try:
            return client.call(request, timeout, number=number)
        except KeeperLost:
            self._forget()
            raise

    def meanwhile(self, work: Callable[[], None] | None) -> None:
        """Do this now and then while this process waits for other tests."""
        self._meanwhile = work
        if self._client is not None:
            self._client.meanwhile = work

    def ahead(self, *requests: Request) -> list[Promise]:
        """Send requests to the keeper without waiting; :meth:`result` gives the reply of each.

        :raises KeeperLost: when it died.
        """
        try:
            return self.keeper().ahead(*requests)
        except KeeperLost:
            self._forget()
            raise

    def caught_up(self) -> bool:
        """Whether the keeper has answered everything that was sent ahead."""
        return self._client is None or self._client.caught_up()

    def result(self, promise: Promise) -> Reply:
        """The reply to a request that was sent ahead.

        :raises KeeperLost: when it died, or does not answer in time.
        """
        try:
            return promise.result()
        except KeeperLost:
            if promise.client is self._client:
                self._forget()
            raise

    def note(self, kind: str, **fields: Any) -> None:
        """Append a journal line, where a keeper runs; without one there is no journal."""
        if self._client is not None:
            try:
                self._client.send(Note(kind=kind, fields=fields))
            except KeeperError:
                self._forget()

    @property
    def connected(self) -> bool:
        """Whether this process has a link to a keeper."""
        return self._client is not None

    def _forget(self) -> None:
        if self._client is not None:
            self._client.close()
            if self._client.stopped and self.worker is None:
                self._client.dismiss()  # nobody else would end it and what it started
        self._client = None
        self._pool = None

    def close(self) -> None:
        """Drop the link; windows of this process close with it."""
        self._forget()

    def _make_folder(self) -> None:
        folder = Path(self.identity.folder)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            ignore = folder.parent.parent / ".gitignore"
            if not ignore.exists():
                ignore.write_text("*\n", encoding="utf-8")
        except OSError as error:
            raise KeeperUnavailable(
                f"the run folder {folder} cannot be made: {error.strerror}; pytest-vram keeps its journal there"
            ) from None

    # ------------------------------------------------------------ backends

    @property
    def pool(self) -> Pool:
        """The backends of this run."""
        if self._pool is None:
            context = PlanContext(
                devices=self.measurable,
                rpc=self.rpc,
                rootdir=self.identity.rootdir,
                run=self.identity.id,
                predicted=self.predicted,
                emulate=self.settings.emulate,
            )
            self._pool = Pool(
                _Link(self),
                context,
                self.specs.backends,
                self.settings.backend or self.specs.default or "",
                self._window,
                used=self.use,
            )
        return self._pool

    def _window(self) -> int | None:
        return self.attempt.window if self.attempt else None

    def backend(self, name: str | None, overrides: Mapping[str, Any]) -> RunningBackend:
        """The running backend for the current test, started if need be."""
        return self.pool.acquire(self.pool.spec(name, **overrides))

    def use(self, backend: RunningBackend) -> None:
        """Remember that the current test uses this backend."""
        if self.attempt is not None:
            self.attempt.backends[f"{backend.name}#{backend.generation}"] = backend
            if self.attempt.idle is not None and not self.predicted:
                self.attempt.idle.uses(backend)
        for text in [*self._kept_from(backend), *self._unlocked(backend)]:
            if text not in self.warnings:
                self.warnings.append(text)

    @staticmethod
    def _unlocked(backend: RunningBackend) -> list[str]:
        if not backend.asked.get("mlock") or backend.boot.facts.get("mlock") is not False:
            return []
        return [
            f"backend {backend.name!r} was to lock its model in memory (mlock) and could not: when host memory is"
            " short it is paged out, and requests wait for the disk; raise the limit (`ulimit -l`) or remove the option"
        ]

    @staticmethod
    def _kept_from(backend: RunningBackend) -> list[str]:
        names = backend.kept_from_it
        if not names:
            return []
        return [f"kept from backend {backend.name!r}, whose settings are its spec's: {', '.join(sorted(names))}"]

    # ------------------------------------------------------------ tests

    def attempted(self, key: str, plan: Plan) -> Attempt:
        """A new attempt at a test, which is the present one now; it has no window yet."""
        number = self._attempts[key] = self._attempts.get(key, 0) + 1
        self.attempt = Attempt(key, plan, number)
        return self.attempt

    def begin(self, key: str, plan: Plan, *, judged: bool) -> Attempt:
        """Start an attempt at a test; opens a window where something is judged or used.

        :raises KeeperError: when no window can be opened.
        """
        attempt = self.attempted(key, plan)
        self.start(attempt, judged=judged)
        return attempt

    def start(self, attempt: Attempt, *, judged: bool) -> None:
        """Open the window of a new attempt, where something is judged or used.

        :raises KeeperError: when no window can be opened.
        """
        plan = attempt.plan
        # Where nothing is measured, a test needs a window only for what it starts; its fixtures open one on use.
        if plan.wants_backend if self.predicted else judged or plan.takes_part:
            if plan.wants_backend:
                self._prepare(attempt)
            self.open(attempt)

    def _prepare(self, attempt: Attempt) -> None:
        """End servers that nobody uses before the window opens, so that this test is not charged for them."""
        plan = attempt.plan
        try:
            launch = self.pool.plan(self.pool.spec(plan.backend, **plan.overrides))
            attempt.uses = [launch.key]
            self.call(Prepare(plan=launch))
        except (BackendError, BadInput, KeeperLost):
            pass  # the fixture will meet it again, and says it in the test's own set-up

    def open(self, attempt: Attempt) -> None:
        """Open the window of an attempt, once there is room for it; a keeper that died before this is replaced."""
        self.opening(attempt)
        plan = attempt.plan
        request = Open(
            kind="test",
            name=attempt.key,
            exclusive=plan.serial,
            need=need_of(plan.limits, self.settings.budget, [device.label for device in self.measurable]),
            uses=attempt.uses,
            alone=attempt.uses if (plan.rate, plan.idle, plan.soak) != (None, None, None) else [],
            settle=settling_of(plan.limits),
        )
        try:
            self._admit(attempt, request)
        except KeeperLost:
            self._admit(attempt, request)

    def _admit(self, attempt: Attempt, request: Open) -> None:
        client = self.keeper()
        number = client.number()
        try:
            opened = self.call(request, number=number)
            assert isinstance(opened, Opened)
            attempt.admitted.append((client, opened.window))
            attempt.window = opened.window
        except VramError:
            raise
        except BaseException:  # of a signal handler, in the moment after the reply: nobody would know of the window
            client.abandon(number)
            attempt.window = None
            raise
        self.torch.begin()
        attempt.waited, attempt.waited_for = opened.waited, list(opened.waited_for)

    def end(self, attempt: Attempt, record: Mapping[str, Any]) -> Closed | None:
        """Close the window of an attempt; ``None`` where it had none. Sets ``attempt.trouble`` when the keeper died."""
        if attempt.window is None:
            return None
        window, attempt.window = attempt.window, None
        attempt.allocators = self.torch.end(self.measurable)
        try:
            closed = self.call(Close(window=window, record=dict(record)))
        except KeeperError as error:
            attempt.trouble = str(error)
            return None
        assert isinstance(closed, Closed)
        return closed

    def leave(self, attempt: Attempt) -> None:
        """The attempt is over, teardown included: only now may others have the memory that it was admitted for."""
        if attempt.window is not None:
            with contextlib.suppress(KeeperError):
                self.end(attempt, {})
        for client, window in attempt.admitted:
            if client is self._client:
                try:
                    client.send(Leave(window=window))
                except KeeperError:
                    self._forget()
        attempt.admitted.clear()
        if self.attempt is attempt:
            self.attempt = None

    def meter(self) -> Meter:
        """The meter of the current test."""
        if self.attempt is None:
            self.attempt = Attempt("(outside a test)", Plan(takes_part=True), 1)
        if self.attempt.window is None:
            self.attempt.judged = True
            self.open(self.attempt)
        if self.attempt.meter is None:
            self.attempt.meter = Meter(self, self.attempt)
        return self.attempt.meter


class _Link:
    """What the pool sees of the keeper: always the present one."""

    def __init__(self, run: Run) -> None:
        self._run = run

    @property
    def socket(self) -> str:
        return self._run.identity.socket

    @property
    def welcome(self) -> Welcome:
        return self._run.keeper().welcome

    def call(self, request: Request, timeout: float | None = None) -> Reply:
        return self._run.call(request, timeout)

    def send(self, note: Note) -> None:
        self._run.keeper().send(note)


def versions() -> dict[str, str]:
    """Versions that a report needs to be read later."""
    import importlib.metadata

    found = {"python": sys.version.split()[0]}
    for name in ("pytest-vram", "pytest", "pytest-xdist", "httpx", "msgspec"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    with contextlib.suppress(OSError):  # on Linux with NVIDIA's kernel module
        found[DRIVER] = Path("/sys/module/nvidia/version").read_text(encoding="ascii", errors="replace").strip()
    return found


def ways_on(settings: Settings, *, measuring: bool = False) -> str:
    """What somebody can do where nothing can be measured with these settings.

    :param measuring: what was asked for cannot do without.
    """
    kinds = {device.kind for device in settings.device}
    ways = []
    if "cpu" not in kinds:
        ways.append("measure host memory instead with --vram-device=cpu")
    if "rpc" not in kinds:
        ways.append("a software GPU with --vram-device=rpc:0 (see the documentation)")
    ways.append("run on a machine with a GPU that this version can measure")
    if "predicted" not in kinds and not measuring:
        ways.append("hold each backend's estimate against the budget, measuring nothing, with --vram-device=predicted")
    return "; ".join(ways)


def capacity_of(devices: Sequence[DeviceInfo]) -> Measured:
    """The smallest capacity among devices; unmeasurable where one could not be read."""
    figures = [device.capacity for device in devices]
    for figure in figures:
        if isinstance(figure, Unmeasurable):
            return figure
    readings = [figure for figure in figures if isinstance(figure, Reading)]
    if not readings:
        return Unmeasurable(reason="no device is measured")
    return min(readings, key=lambda reading: reading.bytes)
