"""The meter of a test: what the run holds, asked from within the test."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from pytest_vram.errors import BadInput
from pytest_vram.keeper.messages import Close, Closed, Figures, Now, Open, Opened, Peek
from pytest_vram.readings import Measured, Unmeasurable

if TYPE_CHECKING:
    from pytest_vram.run import Attempt, Run


class Meter:
    """What the current test holds; the ``vram`` fixture.

    Every figure is a :class:`~pytest_vram.readings.Reading` in bytes, or
    :class:`~pytest_vram.readings.Unmeasurable` with the reason. With one device ``peak``, ``now()`` and ``idle()`` give
    its figure; with several, :attr:`peaks` has them all and the others give the first device's.
    """

    def __init__(self, run: Run, attempt: Attempt) -> None:
        self._run = run
        self._attempt = attempt
        self._readings: list[Measured] = []

    @property
    def readings(self) -> Sequence[Measured]:
        """Every figure that this meter gave out, in order."""
        return tuple(self._readings)

    @property
    def peaks(self) -> dict[str, Measured]:
        """Device label → peak of this test so far, boot of its backends included."""
        assert self._attempt.window is not None
        seen = self._run.call(Peek(window=self._attempt.window))
        assert isinstance(seen, Closed)
        return {label: seen.own.get(label, figure) for label, figure in seen.run.items()}

    @property
    def peak(self) -> Measured:
        """Peak of this test so far on the first device."""
        return self._keep(self.peaks)

    def now(self) -> Measured:
        """What the run holds at this moment on the first device; not a peak."""
        return self._keep(self._figures(0.0).run)

    def idle(self, settle: float = 5.0) -> Measured:
        """What the run holds once two reads 100 ms apart agree, waited for ``settle`` seconds at most.

        Reads that never agree give ``Unmeasurable``: a figure still in motion is not idle memory.

        :raises BadInput: for a wait that is not a number of seconds from 0 to 600.
        """
        given: object = settle  # tests are rarely type-checked
        if isinstance(given, bool) or not isinstance(given, (int, float)) or not 0 <= given <= 600:
            raise BadInput(f"vram.idle(settle={settle!r}): write a number of seconds from 0 to 600")
        figures = self._figures(settle)
        if not figures.settled:
            figure: Measured = Unmeasurable(reason=f"memory was still changing after {settle:g} s", scope="run")
            self._readings.append(figure)
            return figure
        return self._keep(figures.run)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Name a part of the test, so that its peak is reported and can be limited by ``max_vram(phase=name)``.

        :raises BadInput: for a name that is not a string with something in it.
        """
        given: object = name  # tests are rarely type-checked
        if not isinstance(given, str) or not given.isprintable() or not 0 < len(given) <= 80:
            raise BadInput(
                f"vram.phase({name!r:.90}): the name of a phase is a string of up to 80 printable characters, such as"
                " 'warm-up'"
            )
        assert self._attempt.window is not None
        opened = self._run.call(Open(kind="phase", name=name, parent=self._attempt.window))
        assert isinstance(opened, Opened)
        try:
            yield
        finally:
            closed = self._run.call(Close(window=opened.window))
            assert isinstance(closed, Closed)
            self._readings.extend((closed.own or closed.run).values())

    def _figures(self, settle: float) -> Figures:
        figures = self._run.call(Now(window=self._attempt.window, settle=settle), settle + 30)
        assert isinstance(figures, Figures)
        return figures

    def _keep(self, figures: Mapping[str, Measured]) -> Measured:
        figure = next(iter(figures.values()), None)
        if figure is None:
            figure = Unmeasurable(reason=self._run.why_unmeasurable())
        self._readings.append(figure)
        return figure
