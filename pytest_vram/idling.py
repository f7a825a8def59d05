"""What a test with ``idle_rollback`` held before it and holds after it: its baseline, and the verdict.

The baseline is what the test's own part of the run holds before its first fixture, and of each backend what that holds
once it is ready: a boot is no growth. After the teardown the same is read again until it is back within the tolerance,
for as long as the marker says.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from pytest_vram import checks
from pytest_vram.backends import engine
from pytest_vram.checks.finding import Finding
from pytest_vram.errors import VramError
from pytest_vram.keeper.messages import Figures, Now
from pytest_vram.readings import Measured, Reading, Unmeasurable
from pytest_vram.report.records import IdleRecord
from pytest_vram.units import mib

if TYPE_CHECKING:
    from pytest_vram.backends.pool import RunningBackend
    from pytest_vram.run import Run

CHECK = "idle_rollback"
#: Seconds beyond the wait itself until the keeper is taken for lost.
_PATIENCE = 30.0
#: The least time for two reads, where the wait is nearly over.
_TWO_READS = 0.15


class Idle:
    """The idle memory of one test.

    :param meaning: of its marker: ``tolerance`` in bytes, ``text`` as written, ``settle`` in seconds.
    """

    def __init__(self, run: Run, meaning: Mapping[str, Any], clock: Callable[[], float] = time.monotonic) -> None:
        self._run = run
        self._meaning = meaning
        self._clock = clock
        self._rest: dict[str, Measured] = {}
        self._whole: dict[str, Measured] = {}
        self._parts: dict[str, dict[str, Measured]] = {}
        self._backends: dict[str, RunningBackend] = {}
        self._unsettled: str | None = None

    def begin(self) -> None:
        """The test begins: read what is held before its first fixture.

        :raises KeeperError: the keeper is lost.
        """
        figures = self._now([], self._meaning["settle"])
        self._rest, self._whole = figures.rest, figures.own
        self._note(figures, "before the test")

    def uses(self, backend: RunningBackend) -> None:
        """A backend is ready for the test: what it holds from now on counts.

        :raises KeeperError: the keeper is lost.
        """
        label = _label(backend)
        for earlier, known in list(self._backends.items()):
            # Of a server that was started again the one before is gone.
            if earlier != label and known.key == backend.key:
                del self._backends[earlier]
                self._parts.pop(earlier, None)
        if self._backends.get(label) is not None and label in self._parts:
            return
        self._backends[label] = backend
        self._read(label)

    def rebase(self) -> None:
        """Its backends were warmed up: what they hold now is the baseline."""
        for label in self._backends:
            self._read(label)

    def _read(self, label: str) -> None:
        figures = self._now([label], self._meaning["settle"])
        self._parts[label] = figures.backend
        # Where a device does not say who holds its memory, a backend cannot be told from the rest.
        self._whole = figures.own
        self._note(figures, f"when backend {label.rpartition('#')[0]!r} was ready")

    def judge(self) -> tuple[IdleRecord, list[Finding]]:
        """Hold what is held now against the baseline; to be asked after the teardown."""
        if self._run.predicted:
            reason = "nothing is measured with --vram-device=predicted, and an estimate says nothing of idle memory"
            return self._record({}, {}, True), [self._undecided(reason)]
        try:
            return self._judged()
        except VramError as error:
            finding = Finding(check=CHECK, verdict="error", section="idle memory", text=str(error))
            return self._record({}, {}, False), [finding]

    def _judged(self) -> tuple[IdleRecord, list[Finding]]:
        deadline = self._clock() + self._meaning["settle"]
        living = [label for label in self._parts if self._lives(label)]
        while True:
            left = deadline - self._clock()
            figures = self._now(living, max(left, _TWO_READS))
            before, after = self._both(figures, living)
            findings = self._compared(before, after, settled=figures.settled)
            if not findings or left <= _TWO_READS:
                break
        if findings:
            parts = self._told(figures, living)
            findings = [msgspec.structs.replace(one, text="\n".join([one.text, *parts])) for one in findings]
        elif not before:
            findings = [self._undecided(self._run.why_unmeasurable())]
        elif self._unsettled is not None:
            findings = [self._undecided(self._unsettled)]
        return self._record(before, after, figures.settled), findings

    def _lives(self, label: str) -> bool:
        """Whether the server still holds anything: one that ended in the test has no part in its baseline."""
        held = self._now([label], 0.0).backend.values()
        return any(not isinstance(figure, Reading) or figure.bytes > 0 for figure in held)

    def _both(self, figures: Figures, living: Iterable[str]) -> tuple[dict[str, Measured], dict[str, Measured]]:
        """Device label → before and after, of the test's own part of the run."""
        before: dict[str, Measured] = {}
        after: dict[str, Measured] = {}
        for label, whole in figures.own.items():
            rest = figures.rest.get(label)
            if rest is None:
                before[label], after[label] = self._whole.get(label, _unread(label)), whole
                continue
            parts = [self._parts[one].get(label, _unread(label)) for one in living]
            before[label] = _sum([self._rest.get(label, _unread(label)), *parts])
            after[label] = _sum([rest, *([figures.backend.get(label, _unread(label))] if parts else [])])
        return before, after

    def _compared(
        self, before: Mapping[str, Measured], after: Mapping[str, Measured], *, settled: bool
    ) -> list[Finding]:
        found = (
            checks.judge_idle_rollback(
                before[label],
                after[label],
                self._meaning["tolerance"],
                check=CHECK,
                limit_from=self._place,
                settled=settled,
            )
            for label in after
        )
        return [finding for finding in found if finding is not None]

    def _told(self, figures: Figures, living: list[str]) -> list[str]:
        """Which part grew, and what is known to look like it."""
        lines: list[str] = []
        for label, rest in figures.rest.items():
            rows: list[tuple[str, Measured | None, Measured | None]] = [
                ("the tests' own processes", self._rest.get(label), rest)
            ]
            for one in living:
                name = f"backend {one.rpartition('#')[0]}"
                rows.append((name, self._parts[one].get(label), self._now([one], 0.0).backend.get(label)))
            for name, first, last in rows:
                if isinstance(first, Reading) and isinstance(last, Reading) and max(first.bytes, last.bytes):
                    lines.append(f"{name} on {label}: {mib(first.bytes)} before, {mib(last.bytes)} after")
        for one in living:
            spec = self._backends[one].spec
            if "host" in figures.own and engine(spec.engine).without_host_caches(spec) != spec:
                lines.append(
                    f"Backend {spec.name!r} may keep prompts and checkpoints in host memory, which looks like this up"
                    " to its cap: switch them off (cache-ram = 0, ctx-checkpoints = 0), or give a tolerance above it."
                )
        return lines

    def _note(self, figures: Figures, when: str) -> None:
        if not figures.settled and self._unsettled is None:
            wait = self._meaning["settle"]
            self._unsettled = f"memory was still changing {when}, after {wait:g} s, so that there is no baseline"

    def _undecided(self, reason: str) -> Finding:
        return Finding(
            check=CHECK,
            verdict="inconclusive",
            section="idle memory undecided",
            text=f"Whether idle memory came back is undecided: {reason}.",
            limit=self._meaning["tolerance"],
            limit_from=self._place,
        )

    def _record(self, before: dict[str, Measured], after: dict[str, Measured], settled: bool) -> IdleRecord:
        return IdleRecord(
            before=before, after=after, tolerance=self._meaning["tolerance"], limit_from=self._place, settled=settled
        )

    @property
    def _place(self) -> str:
        return f"@idle_rollback({self._meaning['text']!r})"

    def _now(self, backends: list[str], settle: float) -> Figures:
        figures = self._run.call(Now(settle=settle, backends=backends), settle + _PATIENCE)
        assert isinstance(figures, Figures)
        return figures


def _label(backend: RunningBackend) -> str:
    return f"{backend.running.name}#{backend.generation}"


def _unread(label: str) -> Measured:
    return Unmeasurable(reason=f"{label} was not read", device=label)


def _sum(figures: list[Measured]) -> Measured:
    """The sum of figures of one device; unmeasurable where one of them is."""
    total: Reading | None = None
    for figure in figures:
        if isinstance(figure, Unmeasurable):
            return figure
        if total is None:
            total = figure
            continue
        low, high = total.bytes + figure.bytes, total.upper + figure.upper
        total = msgspec.structs.replace(
            total,
            bytes=low,
            at_most=high if high != low else None,
            exact=total.exact and figure.exact,
            note=None,
            missed=total.missed or figure.missed,
        )
    assert total is not None
    return total
