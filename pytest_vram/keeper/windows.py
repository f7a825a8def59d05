"""Windows: what is open, and what each of them saw."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import msgspec

from pytest_vram.errors import KeeperError
from pytest_vram.keeper.admission import Admission
from pytest_vram.keeper.core import Core, sampling
from pytest_vram.keeper.figures import agree, doubted, larger_of, merge, shares, with_boot
from pytest_vram.keeper.messages import Closed, Figures
from pytest_vram.keeper.server import Server
from pytest_vram.measure import Span
from pytest_vram.readings import Measured, Reading

_KINDS = ("test", "phase", "request")
_MOST_OVERLAPPED = 200
_BETWEEN_READS = 0.1


class Window:
    """An open window. ``holder`` is the connection that opened it."""

    def __init__(self, number: int, kind: str, name: str, holder: int, parent: Window | None, span: Span) -> None:
        self.number = number
        self.kind = kind
        self.name = name
        self.holder = holder
        self.parent = parent
        self.span = span
        self.exclusive = False
        self.servers: dict[str, Server] = dict(parent.servers) if parent else {}
        self.baseline: dict[str, Measured] = {}
        self.baseline_backend: dict[str, Measured] = {}
        self.phases: dict[str, dict[str, Measured]] = {}
        self.overlapped: dict[str, None] = {}
        self.deaths: list[str] = []


class Windows:
    """All open windows."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._open: dict[int, Window] = {}
        self._tickets: dict[int, int] = {}
        self._admission = Admission()
        self._next = 0

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

    async def open(
        self, kind: str, name: str, holder: int, pid: int, *, parent: int | None = None, exclusive: bool = False
    ) -> tuple[Window, float]:
        """Open a window; returns it and the seconds waited.

        :raises KeeperError: an unknown kind or parent.
        """
        if kind not in _KINDS:
            raise KeeperError(f"{kind!r} is not a kind of window: known are {', '.join(_KINDS)}.")
        above = self.get(parent) if parent is not None else None
        waited = 0.0
        ticket: int | None = None
        if kind == "test":
            before = time.monotonic()
            ticket = await self._admission.enter(holder, exclusive)
            waited = time.monotonic() - before
        core = self._core
        t = core.boundary()
        self._next += 1
        span = core.timeline.open(t, above.span.owners if above else (), pid)
        window = Window(self._next, kind, name, holder, above, span)
        window.exclusive = exclusive
        window.baseline = core.timeline.held("run")
        if span.owners:
            window.baseline_backend = core.timeline.held("backend", span.owners)
        if kind == "test":
            assert ticket is not None
            self._tickets[window.number] = ticket
            self._overlap(window)
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

    def use(self, window: Window, server: Server) -> None:
        """Let a window, and what is open inside it, use a server from now on. Call at a boundary."""
        for inner in self._open.values():
            if self._within(inner, window) and server.label not in inner.servers:
                inner.servers[server.label] = server
                timeline = self._core.timeline
                timeline.use(inner.span, (server.label,))
                for label, figure in timeline.held("backend", frozenset({server.label})).items():
                    before = inner.baseline_backend.get(label)
                    if isinstance(before, Reading) and isinstance(figure, Reading):
                        figure = msgspec.structs.replace(before, bytes=before.bytes + figure.bytes)
                    inner.baseline_backend[label] = figure

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

    def peek(self, number: int) -> Closed:
        """Figures of an open window so far."""
        window = self.get(number)
        t = self._core.boundary()
        return self._closed(window, t)

    def close(self, number: int, *, record: dict[str, Any] | None = None, abandoned: bool = False) -> Closed:
        """Close a window, and whatever is still open inside it.

        :raises KeeperError: there is no such window.
        """
        window = self.get(number)
        inner = [other for other in self._open.values() if other is not window and self._within(other, window)]
        t = self._core.boundary()
        for other in reversed(inner):
            self._end(other, t, record=None, abandoned=abandoned)
        return self._end(window, t, record=record, abandoned=abandoned)

    def _end(self, window: Window, t: int, *, record: dict[str, Any] | None, abandoned: bool) -> Closed:
        core = self._core
        core.timeline.close(window.span)
        del self._open[window.number]
        ticket = self._tickets.pop(window.number, None)
        if ticket is not None:
            self._admission.leave(ticket)
        closed = self._closed(window, t)
        if window.kind == "phase" and window.parent is not None:
            merge(window.parent.phases, window.name, closed.run)
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

    async def now(self, number: int | None, settle: float, tolerance: int) -> Figures:
        """Current figures, after two reads that agree where ``settle`` seconds may be waited.

        :raises KeeperError: there is no such window.
        """
        core = self._core
        owners = self.get(number).span.owners if number is not None else frozenset[str]()
        deadline = time.monotonic() + settle
        figures = self._figures(owners)
        while settle > 0:
            before = figures
            await asyncio.sleep(_BETWEEN_READS)
            figures = self._figures(owners)
            if agree(before, figures, tolerance):
                break
            if time.monotonic() >= deadline:
                return msgspec.structs.replace(figures, settled=False)
        core.flush()
        return figures

    def _figures(self, owners: frozenset[str]) -> Figures:
        t = self._core.boundary()
        timeline = self._core.timeline
        return Figures(t=t, run=timeline.now("run"), backend=timeline.now("backend", owners) if owners else {})

    def _closed(self, window: Window, t: int) -> Closed:
        timeline = self._core.timeline
        span = window.span
        run = timeline.peaks(span, "run")
        backend = timeline.peaks(span, "backend")
        host = timeline.host_peak(span)
        phases = {name: dict(peaks) for name, peaks in window.phases.items()}
        boot = False
        if window.kind == "test":
            for server in window.servers.values():
                for label, peak in server.boot_peak.items():
                    backend[label] = larger_of(backend[label], peak) if label in backend else peak
                    decided, figure = with_boot(run.get(label), peak, server.label)
                    run[label] = figure
                    boot = boot or decided
                if server.host_boot_peak is not None:
                    host = larger_of(host, server.host_boot_peak) if host is not None else server.host_boot_peak
                for phase in server.phases:
                    if phase.peak:
                        merge(phases, phase.name, phase.peak)
        doubts = [server.doubt for server in window.servers.values() if server.doubt is not None]
        if doubts:
            run, backend = doubted(run, doubts), doubted(backend, doubts)
            phases = {name: doubted(peaks, doubts) for name, peaks in phases.items()}
        trouble = [*doubts, *(sentence for sentence in (self._core.journal_trouble,) if sentence is not None)]
        return Closed(
            t0=span.t,
            t1=t,
            run=run,
            backend=backend,
            process=timeline.peaks(span, "process"),
            device=timeline.peaks(span, "device"),
            baseline=window.baseline,
            baseline_backend=window.baseline_backend,
            host=host,
            phases=phases,
            boot=boot,
            overlapped=list(window.overlapped),
            shares=shares(span),
            deaths=list(window.deaths),
            trouble=trouble,
            sampling=sampling(timeline.rate(span)),
        )
