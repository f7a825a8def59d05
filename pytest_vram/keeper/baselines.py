"""What was held before a test did anything of its own, and how far the test rose above it."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import msgspec

from pytest_vram.readings import Measured, Reading, Unmeasurable, larger, rise


class Baseline:
    """The baseline of one window in one scope, by device label.

    A backend is no rise of the test that happens to start it: what it holds when the test first uses it belongs to the
    baseline, as it would have if another test had started it. What ends meanwhile belongs to it no more. As the
    baseline moves, the rise over it is kept from each time before.

    :ivar held: label → baseline now. :ivar risen: label → largest rise over what the baseline was before it moved.
    """

    def __init__(self, held: Mapping[str, Measured], parts: Mapping[str, Mapping[str, Measured]] | None = None) -> None:
        """
        :param held: what was held when the window opened. :param parts: backend → its part of that.
        """
        self.held = dict(held)
        self.risen: dict[str, Measured] = {}
        self._parts = {backend: dict(part) for backend, part in (parts or {}).items()}

    def moves(self, peaks: Mapping[str, Measured]) -> None:
        """The baseline is about to move: keep how far the peaks so far are above what it is now."""
        for label, peak in peaks.items():
            base = self.held.get(label)
            if base is not None:
                before = self.risen.get(label)
                found = rise(peak, base)
                self.risen[label] = found if before is None else larger([before, found])

    def use(self, backend: str, holds: Mapping[str, Measured], living: Collection[str]) -> None:
        """The window uses a backend from now on, which holds this now. :param living: backends that still run."""
        for gone in [name for name in self._parts if name not in living and name != backend]:
            for label, figure in self._parts.pop(gone).items():
                self._move(label, None, figure)
        before = self._parts.get(backend, {})
        for label, figure in holds.items():
            self._move(label, figure, before.get(label))
        self._parts[backend] = dict(holds)

    def _move(self, label: str, more: Measured | None, less: Measured | None) -> None:
        base = self.held.get(label)
        if base is None:
            if more is not None:
                self.held[label] = more
            return
        for figure in (more, less):
            if isinstance(figure, Unmeasurable) and isinstance(base, Reading):
                self.held[label] = base = figure
        if isinstance(base, Reading):
            plus, minus = (figure.bytes if isinstance(figure, Reading) else 0 for figure in (more, less))
            self.held[label] = msgspec.structs.replace(base, bytes=max(0, base.bytes + plus - minus))
