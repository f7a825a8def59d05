"""What a session reads of memory: the peak within a turn, and what is held once it has settled after it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import msgspec

from pytest_vram.keeper.messages import Close, Closed, Figures, Now, Open, Opened, Reply, Request
from pytest_vram.readings import Measured, Reading, Unmeasurable

#: Name of the phase that every turn is: in a test's record, its figures are the largest of all turns.
PHASE = "turn"


class Peaks(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one turn held at most. :ivar peak: device label → figure. :ivar host: of the backend's process tree."""

    peak: dict[str, Measured] = {}
    host: Measured | None = None


class Rest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What is held between two turns.

    :ivar idle: device label → figure; ``Unmeasurable`` where it did not come to rest in time.
    :ivar layers: ``process`` (the backend's on its device; with several devices ``process gpu1`` …) and ``host``, where
        both are read.
    """

    idle: dict[str, Measured] = {}
    layers: dict[str, Measured] = {}


class Gauge(Protocol):
    """What a session asks for its figures."""

    def begin(self) -> object:
        """A turn begins; the answer goes to :meth:`end`."""

    def end(self, begun: object) -> Peaks:
        """The turn is over."""

    def idle(self, settle: float) -> Rest:
        """What is held once it does not change, waited for ``settle`` seconds at most."""


class NoGauge:
    """Where nothing is measured: every table is empty, and ``reason`` says why."""

    def __init__(self, reason: str) -> None:
        self.reason = reason

    def begin(self) -> object:
        """Nothing begins."""
        return None

    def end(self, begun: object) -> Peaks:
        """Nothing was seen."""
        return Peaks()

    def idle(self, settle: float) -> Rest:
        """Nothing is known."""
        return Rest()


class KeeperGauge:
    """Figures of the keeper: each turn is a phase of the test's window.

    :param call: asks the keeper. :param window: the test's window, which uses the backend.
    """

    def __init__(self, call: Callable[[Request, float | None], Reply], window: Callable[[], int | None]) -> None:
        self._call = call
        self._window = window

    def begin(self) -> object:
        """Open the turn's window."""
        opened = self._call(Open(kind="phase", name=PHASE, parent=self._window()), None)
        assert isinstance(opened, Opened)
        return opened.window

    def end(self, begun: object) -> Peaks:
        """Close it."""
        assert isinstance(begun, int)
        closed = self._call(Close(window=begun), None)
        assert isinstance(closed, Closed)
        return Peaks(peak=_of_backend(closed.backend, closed.own or closed.run), host=closed.host)

    def idle(self, settle: float) -> Rest:
        """Two reads 100 ms apart that agree."""
        figures = self._call(Now(window=self._window(), settle=settle), settle + 30)
        assert isinstance(figures, Figures)
        idle = _of_backend(figures.backend, figures.run)
        if not figures.settled:
            idle = {label: _moving(figure, settle) for label, figure in idle.items()}
        layers: dict[str, Measured] = {}
        if figures.host is not None and "host" not in idle and idle:
            names = ["process"] if len(idle) == 1 else [f"process {label}" for label in idle]
            layers = dict(zip(names, idle.values(), strict=True))
            layers["host"] = figures.host if figures.settled else _moving(figures.host, settle)
        return Rest(idle=idle, layers=layers)


def _of_backend(backend: Mapping[str, Measured], run: Mapping[str, Measured]) -> dict[str, Measured]:
    """The backend's own figure; where a device does not say who holds its memory, that of the whole run."""
    return {
        label: figure if isinstance(figure := backend.get(label, whole), Reading) else whole
        for label, whole in run.items()
    }


def _moving(figure: Measured, settle: float) -> Measured:
    if isinstance(figure, Unmeasurable):
        return figure
    return Unmeasurable(
        reason=f"memory was still changing after {settle:g} s",
        source=figure.source,
        scope=figure.scope,
        device=figure.device,
    )
