"""Where the hooks of a test meet its ``vram_soak`` marker."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pytest_vram.markers import FIXTURES
from pytest_vram.stash import SOAKS
from pytest_vram.waiting import writer

if TYPE_CHECKING:
    from pytest_vram.needs import Plan
    from pytest_vram.run import Attempt, Run
    from pytest_vram.soaking import SoakResult, Wanted
    from pytest_vram.spec import Limits

FIXTURE = "vram_soak"
#: Seconds between two lines of a soak in a run of pytest; the structured log has one for each turn.
AGAIN = 10.0


def follow(item: pytest.Item, plan: Plan) -> None:
    """Let the set-up of a marked test soak, whether the test takes the fixture or not."""
    names: list[str] | None = getattr(item, "fixturenames", None)
    if plan.soak is None:
        return
    if names is None:
        plan.errors.append("@vram_soak: this kind of test has no fixtures, so that nothing is soaked")
        return
    if FIXTURE in names:
        return
    # The list is one for all parameters of a function, of which maybe not all are marked: it is replaced.
    first = next((index for index, name in enumerate(names) if name in FIXTURES), len(names))
    item.fixturenames = [*names[:first], FIXTURE, *names[first:]]  # type: ignore[attr-defined]


def of_config(config: pytest.Config, run: Run) -> Soaks:
    """The soaks of this run."""
    if SOAKS not in config.stash:
        config.stash[SOAKS] = Soaks(run, writer(config))
    return config.stash[SOAKS]


class Soaks:
    """The soaks of the tests of this process. :param write: tells a person how far one is."""

    def __init__(self, run: Run, write: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._run = run
        self._write = write
        self._clock = clock
        #: By test: an attempt after the first goes on in the same journal, so that no outcome is drawn twice.
        self._folders: dict[str, Path] = {}

    def result(self, attempt: Attempt) -> SoakResult:
        """Soak for a test, once per attempt.

        :raises BadInput: its folder has another soak. :raises KeyboardInterrupt: Ctrl-C; the journal has what was
            committed. :raises VramError: its backend could not be started.
        """
        from pytest_vram.soaking import SoakResult, run_soak

        if attempt.soak is None:
            wanted = self._wanted(attempt)
            found, end = run_soak(self._run, wanted, _Told(self._write, self._clock))
            if end.reason == "interrupted":
                self._write(f"vram: {attempt.key}: {end.text}; the same run goes on with it: {wanted.folder}")
                raise KeyboardInterrupt
            attempt.soak = SoakResult(found)
        return attempt.soak

    def _wanted(self, attempt: Attempt) -> Wanted:
        from pytest_vram import sessions, soaking
        from pytest_vram.sessions.soak_gates import Gates

        run, plan = self._run, attempt.plan
        assert plan.soak is not None
        settings = run.settings
        base = Path(run.identity.rootdir)
        base = base / settings.soak_dir if settings.soak_dir is not None else base / ".vram" / "soaks"
        if attempt.key not in self._folders or attempt.number == 1:
            self._folders[attempt.key] = soaking.to_go_on(base / soaking.folder_name(attempt.key))
        spec = run.pool.spec(plan.backend, **plan.overrides)
        limit, limit_from = _limit(run, plan)
        return soaking.Wanted(
            name=attempt.key,
            folder=self._folders[attempt.key],
            amount=settings.soak or plan.soak["amount"],
            spec=spec,
            conversations=tuple(sessions.load(name) for name in sessions.shipped()),
            gates=Gates(
                limit=limit,
                limit_from=limit_from,
                host_limit=plan.host_limit["limit"] if plan.host_limit is not None else None,
                accuracy=plan.toolcalls["target"] if plan.toolcalls is not None else None,
                context=soaking.context_of(spec),
                caps=soaking.caps_of(spec),
                capacity=soaking.capacity_of(run),
            ),
        )


def _limit(run: Run, plan: Plan) -> tuple[Limits | None, str]:
    """The smaller of the budget and the test's own limit on its whole peak, with the place it was written in."""
    from pytest_vram.checks import tightest
    from pytest_vram.spec import Limits

    whole = [
        meaning
        for meaning in plan.limits
        if meaning["over"] == "total" and meaning["scope"] in ("run", "backend") and meaning["phase"] is None
    ]
    least = min(whole, key=lambda meaning: int(meaning["limit"]), default=None)
    marker = Limits(text=str(least["text"]), each=least["limit"]) if least is not None else None
    budget = run.settings.budget
    if budget is None and marker is None:
        return None, ""
    labels = [device.label for device in run.measurable]
    limits, _, place = tightest(budget, run.settings.places.get("budget", "budget"), marker, "@max_vram", labels=labels)
    return limits, place


class _Told:
    """Passes on the line of a turn now and then, and every other one."""

    def __init__(self, write: Callable[[str], None], clock: Callable[[], float]) -> None:
        self._write = write
        self._clock = clock
        self._due = 0.0

    def __call__(self, line: str) -> None:
        now = self._clock()
        if line.startswith("soak="):
            if now < self._due:
                return
            self._due = now + AGAIN
        self._write(f"vram: {line}")
