"""Windows: what is open, and what each of them saw."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection
from typing import Any

import msgspec

from pytest_vram.errors import KeeperError
from pytest_vram.keeper.admission import Admission, Ask, Ticket
from pytest_vram.keeper.baselines import Baseline
from pytest_vram.keeper.core import Core, sampling
from pytest_vram.keeper.figures import agree, boot_is_more, doubted, larger_of, merge, shares, spilled, when, with_boot
from pytest_vram.keeper.holders import held_by, played
from pytest_vram.keeper.host_use import Counted, HostUses
from pytest_vram.keeper.messages import Closed, Figures, PeakTime, Residue
from pytest_vram.keeper.overs import Overs
from pytest_vram.keeper.residue import Held, Look, Residues, floors, residues
from pytest_vram.keeper.room import Room
from pytest_vram.keeper.server import Server
from pytest_vram.keeper.settling import TOLERANCE, Settling
from pytest_vram.keeper.strangers import Strangers
from pytest_vram.measure import PYTEST, TEST, UNKNOWN, Span
from pytest_vram.readings import Measured
from pytest_vram.units import mib

_KINDS = ("test", "phase", "request")
_MOST_OVERLAPPED = 200
_BETWEEN_READS = 0.1
#: Seconds that a test may ask to wait for agreeing reads before its baseline.
_LONGEST_SETTLE = 60.0


class Window:
    """An open window. ``holder`` is the connection that opened it.

    :ivar holding: who held what had come during earlier tests when it was opened, and ``running`` which of them still
        ran. :ivar counted: its count of page faults and swap of its backends. :ivar awaits: keys of backends that it
        waits for. :ivar waited: seconds before it was opened, for what ``waited_for`` says. :ivar quick: short tests
        share it; ``follows`` is the name of the one before in that process, whose tests' memory may have been seen
        late.
    """

    def __init__(
        self, number: int, kind: str, name: str, holder: int, parent: Window | None, span: Span, counted: Counted
    ) -> None:
        self.number = number
        self.kind = kind
        self.name = name
        self.holder = holder
        self.parent = parent
        self.span = span
        self.exclusive = False
        self.servers: dict[str, Server] = dict(parent.servers) if parent else {}
        self.baseline = Baseline({})
        self.baseline_backend = Baseline({})
        self.awaits: set[str] = set()
        self.phases: dict[str, dict[str, Measured]] = {}
        self.overlapped: dict[str, None] = {}
        self.deaths: list[str] = []
        self.holding: tuple[Held, ...] = ()
        self.running: frozenset[str] = frozenset()
        self.counted = counted
        self.waited = 0.0
        self.waited_for: list[str] = []
        self.quick = False
        self.follows = ""


class Windows:
    """All open windows."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._open: dict[int, Window] = {}
        self._tickets: dict[int, Ticket] = {}
        self.admission = Admission(Room(core), core.log)
        self._next = 0
        self.settling = Settling(core)
        self.residues = Residues(core.members)
        self.host_uses = HostUses(core.members)
        self.strangers = Strangers(core.members, self._ignored)
        core.timeline.on_growth = self._grew
        self.overs = Overs(core.launch.budget)
        if core.launch.budget is not None:
            core.timeline.on_read = lambda now, at: self.overs.look(core.timeline.run_sums(), now, at)
        #: Span of the whole run, where there is a budget: it must be sampled between tests as well.
        self._whole = core.timeline.open(core.started) if core.launch.budget is not None else None
        self._turned: dict[int, str] = {}
        core.holders = self._held_by
        core.on_tick = self._tick

    def get(self, number: int) -> Window:
        """The open window with this number.

        :raises KeeperError: there is none.
        """
        window = self._open.get(number)
        if window is None:
            raise KeeperError(f"There is no open window {number}; it was closed, or opened at an earlier keeper.")
        return window

    def is_open(self, number: int | None) -> bool:
        """Whether there is an open window with this number."""
        return number in self._open

    def using(self, server: Server) -> list[Window]:
        """Open windows that use this server."""
        return [window for window in self._open.values() if server.label in window.servers]

    def of(self, holder: int) -> list[Window]:
        """Open windows of one connection, innermost first."""
        return [window for window in reversed(self._open.values()) if window.holder == holder]

    def table(self) -> list[dict[str, Any]]:
        """What ``Status`` says about them."""
        return [
            {
                "window": window.number,
                "kind": window.kind,
                "name": window.name,
                "t": window.span.t,
                "backends": sorted(window.servers),
                "exclusive": window.exclusive,
            }
            for window in self._open.values()
        ]

    def _ignored(self) -> set[int]:
        """Processes that are neither of the run nor strangers to it."""
        core = self._core
        return {core.pid, core.guard, *core.ballast.pids}

    def _grew(self, span: Span, label: str, pid: int) -> None:
        if pid:
            self.strangers.grew(pid, time.monotonic_ns())

    def _held_by(self, but: str) -> str:
        """Who holds the memory of the run's cards, for a person; the backend ``but`` is not told of itself."""
        self._core.boundary()
        held = held_by(self.settling.cards(), self._core.members, self.residues.held(), but)
        return " ".join(filter(None, [played(self._core.timeline.snapshots()), held]))

    def _tick(self) -> None:
        """What is to be looked at now and then, after each sample."""
        if self._open:
            now = time.monotonic_ns()
            self.strangers.tick(now)
            self.host_uses.tick(now)

    def _look_for_residues(self) -> None:
        """Bring the account of what tests leave behind up to date. Call at a boundary."""
        core = self._core
        backends = any(member.owner not in (PYTEST, TEST) for member in core.members.all())
        self.residues.look(
            Look(probe.info, snapshot, probe.counts_pytest, probe.per_process, backends)
            for probe, snapshot in core.timeline.snapshots()
        )

    def left(self) -> list[Residue]:
        """What tests have left behind until now."""
        self._core.boundary()
        self._look_for_residues()
        return self.residues.held({window.name for window in self._open.values() if window.kind == "test"})

    def peak_of_run(self) -> dict[str, Measured]:
        """The peak of the whole run, whatever was open; empty where there is no budget."""
        return self._core.timeline.peaks(self._whole, "run") if self._whole is not None else {}

    def look_back(self) -> None:
        """The run ends: write down what tests have left behind until now."""
        for left in self.left():
            who = ", ".join(f"process {pid} ({name})" for pid, name in left.pids[:8])
            text = f"{left.test} left {mib(left.bytes)} on {left.device} behind until the end{who and ': '}{who}"
            self._core.log("note", text=text, device=left.device, residue=left)

    async def open(
        self,
        kind: str,
        name: str,
        holder: int,
        pid: int,
        *,
        parent: int | None = None,
        exclusive: bool = False,
        settle: float = 0.0,
        ask: Ask | None = None,
        quick: bool = False,
    ) -> tuple[Window, float]:
        """Open a window; returns it and the seconds waited.

        :param settle: seconds to wait at most for two agreeing reads before the baseline.
        :param ask: what a test asks for. :param quick: the gate of its process speaks for it.

        :raises KeeperError: an unknown kind or parent.
        """
        if kind not in _KINDS:
            raise KeeperError(f"{kind!r} is not a kind of window: known are {', '.join(_KINDS)}.")
        above = self.get(parent) if parent is not None else None
        waited = 0.0
        ticket: Ticket | None = None
        if kind == "test":
            await self.settling.baseline()
        if quick:
            self.admission.claim()
        elif kind == "test":
            ticket = await self.admission.enter(holder, exclusive, ask)
            waited = ticket.waited
            if settle > 0:
                try:
                    await self.now(None, min(settle, _LONGEST_SETTLE), TOLERANCE)
                except BaseException:
                    self.admission.leave(ticket)
                    raise
        core = self._core
        t = core.boundary()
        self._next += 1
        span = core.timeline.open(t, above.span.owners if above else (), pid)
        counted = self.host_uses.begin(span.owners)
        window = Window(self._next, kind, name, holder, above, span, counted)
        window.waited = waited
        window.waited_for = ticket.waited_for if ticket is not None else []
        window.exclusive = exclusive
        window.quick = quick
        parts = self._parts(span) if kind == "test" and not quick else {}
        window.baseline = Baseline(core.timeline.held_own(span), parts)
        if span.owners:
            window.baseline_backend = Baseline(core.timeline.held("backend", span.owners))
        if kind == "test":
            if ticket is not None:
                self._tickets[window.number] = ticket
            self._overlap(window)
            self._look_for_residues()
            window.follows = self._turned.get(holder, "")
            window.running = frozenset(
                name
                for other in self._open.values()
                if other.kind == "test"
                for name in (other.name, other.follows)
                if name
            )
            window.holding = self.residues.holding()
            span.floors = floors(window.holding)
            self.residues.began(name, pid)
            self.overs.began(name, t)
        self._open[window.number] = window
        core.log("window", event="open", window=window.number, name=name, what=kind, parent=parent)
        if kind == "phase":
            core.log("phase", name=name, window=parent)
        return window, waited

    def _overlap(self, new: Window) -> None:
        for other in self._open.values():
            if other.kind != "test":
                continue
            for one, two in ((new, other), (other, new)):
                if len(one.overlapped) < _MOST_OVERLAPPED:
                    one.overlapped[two.name] = None

    def _parts(self, span: Span) -> dict[str, dict[str, Measured]]:
        """Backend → what it holds now, of those that count for this span."""
        timeline = self._core.timeline
        backends = self._living() - timeline.apart(span)
        return {label: timeline.held("backend", frozenset({label})) for label in backends}

    def _living(self) -> set[str]:
        """Backends that have processes."""
        return {member.owner for member in self._core.members.all()} - {PYTEST, TEST, UNKNOWN}

    def expect(self, window: Window, server: Server) -> None:
        """A server starts for a window, and what is open inside it. Call before it has a process."""
        self._core.boundary()
        for inner in self._open.values():
            if self._within(inner, window) and server.label not in inner.span.boots:
                self._moves(inner)
                inner.span.boots |= {server.label}

    def starts(self, server: Server) -> None:
        """A server is about to start: for every window that waits for one with its key."""
        for window in [window for window in self._open.values() if server.key in window.awaits]:
            self.expect(window, server)

    def _moves(self, window: Window) -> None:
        """The baselines of a window are about to move."""
        timeline = self._core.timeline
        if window.kind != "test" or (window.span.boots - window.servers.keys()) & self._living():
            # While a backend starts, the peaks are those of its boot.
            return
        window.baseline.moves(timeline.peaks(window.span, "own"))
        window.baseline_backend.moves(timeline.peaks(window.span, "backend"))

    def use(self, window: Window, server: Server) -> None:
        """Let a window, and what is open inside it, use a server from now on. Call at a boundary."""
        for inner in self._open.values():
            if self._within(inner, window) and server.label not in inner.servers:
                inner.servers[server.label] = server
                if (ticket := self._tickets.get(inner.number)) is not None:
                    self.admission.used(ticket, server.key)
                timeline = self._core.timeline
                if server.label not in inner.span.boots:
                    # Of one that started for it, the peaks until now are those of the boot.
                    self._moves(inner)
                timeline.use(inner.span, (server.label,))
                self.host_uses.use(inner.counted, inner.span.owners)
                holds, living = timeline.held("backend", frozenset({server.label})), self._living()
                inner.baseline.use(server.label, holds, living)
                inner.baseline_backend.use(server.label, holds, living)

    @staticmethod
    def _within(inner: Window | None, window: Window) -> bool:
        while inner is not None:
            if inner is window:
                return True
            inner = inner.parent
        return False

    def died(self, server: Server, sentence: str) -> None:
        """A server died: every window that uses it says so."""
        for window in self.using(server):
            window.deaths.append(sentence)

    def mark(self, server: Server) -> int | None:
        """The most that the server's main process held in the windows that use it, in bytes, where known."""
        shares = [held for window in self.using(server) for held in window.span.shares.values()]
        return max((held.bytes for held in shares if held.pid == server.pid and held.device == "host"), default=None)

    def leave(self, number: int, holder: int) -> None:
        """The test of this window is over, its teardown included: what it was admitted for is given back."""
        ticket = self._tickets.get(number)
        if ticket is not None and ticket.holder == holder:
            del self._tickets[number]
            self.admission.leave(ticket)

    def leave_all(self, holder: int) -> None:
        """A connection is gone: what its tests were admitted for is given back."""
        for number in [number for number, ticket in self._tickets.items() if ticket.holder == holder]:
            self.leave(number, holder)

    def peek(self, number: int) -> Closed:
        """Figures of an open window so far."""
        window = self.get(number)
        t = self._core.boundary()
        return self._closed(window, t)

    def close(
        self, number: int, *, record: dict[str, Any] | None = None, abandoned: bool = False, name: str = ""
    ) -> Closed:
        """Close a window, and whatever is still open inside it.

        :param name: what it is called from now on; which of several tests it is about is known at its end.
        :raises KeeperError: there is no such window.
        """
        window = self.get(number)
        if name and name != window.name:
            self.residues.renamed(window.name, name)
            window.name = name
            if window.kind == "test" and window.span.pid is not None:
                self.residues.began(name, window.span.pid)
        inner = [other for other in self._open.values() if other is not window and self._within(other, window)]
        t = self._core.boundary()
        for other in reversed(inner):
            self._end(other, t, record=None, abandoned=abandoned)
        return self._end(window, t, record=record, abandoned=abandoned)

    def _end(self, window: Window, t: int, *, record: dict[str, Any] | None, abandoned: bool) -> Closed:
        core = self._core
        core.timeline.close(window.span)
        del self._open[window.number]
        if abandoned:  # nobody will say that its test is over
            self.leave(window.number, window.holder)
        if window.kind == "test":
            self._look_for_residues()
            self.overs.ended(window.name, window.span.t, t, judged=abandoned or not window.quick)
            self._turned[window.holder] = window.name if window.quick else ""
        closed = self._closed(window, t)
        self.host_uses.end(window.counted)
        if not self._open:
            self.strangers.forget()
        if window.kind == "phase" and window.parent is not None:
            merge(window.parent.phases, window.name, closed.own)
        fields: dict[str, Any] = {
            "event": "close",
            "window": window.number,
            "name": window.name,
            "what": window.kind,
            "backends": sorted(window.servers),
            "closed": closed,
        }
        if record:
            fields["record"] = record
        if abandoned:
            fields["abandoned"] = True
        core.log("window", **fields)
        return closed

    async def now(
        self,
        number: int | None,
        settle: float,
        tolerance: int,
        *,
        backends: Collection[str] | None = None,
        pid: int | None = None,
    ) -> Figures:
        """Current figures, after two reads that agree where ``settle`` seconds may be waited.

        :param backends: of a test that has no window any more, in process ``pid``.
        :raises KeeperError: there is no such window.
        """
        core = self._core
        owners = self.get(number).span.owners if number is not None else frozenset[str]()
        owners |= frozenset(backends or ())
        asks = pid if backends is not None else None
        deadline = time.monotonic() + settle
        figures = self._figures(owners, asks)
        while settle > 0:
            before = figures
            await asyncio.sleep(_BETWEEN_READS)
            figures = self._figures(owners, asks)
            if agree(before, figures, tolerance):
                break
            if time.monotonic() >= deadline:
                return msgspec.structs.replace(figures, settled=False)
        core.flush()
        return figures

    def _figures(self, owners: frozenset[str], pid: int | None) -> Figures:
        t = self._core.boundary()
        timeline = self._core.timeline
        return Figures(
            t=t,
            run=timeline.now("run"),
            backend=timeline.now("backend", owners) if owners else {},
            host=timeline.host_now(owners) if owners else None,
            own=timeline.own_now(pid, owners) if pid is not None else {},
            rest=timeline.rest_now(pid) if pid is not None else {},
        )

    def _closed(self, window: Window, t: int) -> Closed:
        timeline = self._core.timeline
        span = window.span
        run, own = timeline.peaks(span, "run"), timeline.peaks(span, "own")
        backend = timeline.peaks(span, "backend")
        host = timeline.host_peak(span)
        phases = {name: dict(peaks) for name, peaks in window.phases.items()}
        boot = False
        boots: dict[str, list[str]] = {}
        peak_at = when(span)
        if window.kind == "test":
            for server in window.servers.values():
                for label, peak in server.boot_peak.items():
                    backend[label] = larger_of(backend[label], peak) if label in backend else peak
                    for scope, figures in (("run", run), ("own", own)):
                        if boot_is_more(figures.get(label), peak):
                            boots.setdefault(scope, []).append(label)
                    decided, figure = with_boot(run.get(label), peak, server.label)
                    run[label] = figure
                    own[label] = with_boot(own.get(label), peak, server.label)[1]
                    boot = boot or decided
                    if decided:
                        peak_at[label] = PeakTime(since=server.t_start, at=server.t_ready)
                if server.host_boot_peak is not None:
                    host = larger_of(host, server.host_boot_peak) if host is not None else server.host_boot_peak
                for phase in server.phases:
                    if phase.peak:
                        merge(phases, phase.name, phase.peak)
        doubts = [server.doubt for server in window.servers.values() if server.doubt is not None]
        if doubts:
            run, own, backend = (doubted(figures, doubts) for figures in (run, own, backend))
            phases = {name: doubted(peaks, doubts) for name, peaks in phases.items()}
        booted = boots.get("run", [])
        trouble = [*doubts, *(sentence for sentence in (self._core.journal_trouble,) if sentence is not None)]
        lost = span.lost
        trouble += [] if lost else [f"{label}: {reason}" for label, reason in span.faults.items()]
        trouble += [] if run else self._core.missing
        return Closed(
            t0=span.t,
            t1=t,
            run=run,
            own=own,
            backend=backend,
            process=timeline.peaks(span, "process"),
            device=timeline.peaks(span, "device"),
            baseline=window.baseline.held,
            baseline_backend=window.baseline_backend.held,
            risen=window.baseline.risen,
            risen_backend=window.baseline_backend.risen,
            host=host,
            phases=phases,
            boot=boot,
            overlapped=list(window.overlapped),
            shares=shares(span, timeline.is_own),
            deaths=list(window.deaths),
            trouble=trouble,
            sampling=sampling(timeline.rate(span)),
            peak_at=peak_at,
            strangers=self.strangers.of(span, timeline.probes, t, look=window.kind == "test"),
            residues=residues(window.holding, window.running, span.floors, root=span.pid, elsewhere=booted),
            boots=boots,
            spill=spilled(span, timeline.probes),
            host_use=self.host_uses.of(window.counted),
            waited=round(window.waited, 6),
            waited_for=list(window.waited_for),
            lost=lost,
            over=self.overs.within(span.t, t) if window.quick else [],
        )
