"""Where the hooks of a test meet its ``toolcall_accuracy`` marker."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pytest_vram.errors import BadInput
from pytest_vram.markers import FIXTURES
from pytest_vram.stash import ACCURACY
from pytest_vram.waiting import writer

if TYPE_CHECKING:
    from pytest_vram.accuracy import Accuracy, Wanted
    from pytest_vram.backends.pool import RunningBackend
    from pytest_vram.needs import Plan
    from pytest_vram.run import Run

FIXTURE = "vram_toolcalls"


class Cases:
    """The cases of a run, made on use: a run without such a marker imports nothing for them."""

    def __init__(self, run: Run, config: pytest.Config) -> None:
        self._run = run
        self._config = config

    @property
    def _accuracy(self) -> Accuracy:
        if ACCURACY not in self._config.stash:
            from pytest_vram.accuracy import Accuracy

            self._config.stash[ACCURACY] = Accuracy(self._run, writer(self._config))
        return self._config.stash[ACCURACY]

    @staticmethod
    def follow(item: pytest.Item, plan: Plan) -> None:
        """Let the set-up of a marked test ask its cases, whether the test takes the fixture or not."""
        names: list[str] | None = getattr(item, "fixturenames", None)
        if plan.toolcalls is None or names is None or FIXTURE in names:
            return
        # Before our own fixtures that would start its backend while the baseline is asked. The list is one for all
        # parameters of a function, of which maybe not all are marked: it is replaced, not changed.
        first = next((index for index, name in enumerate(names) if name in FIXTURES), len(names))
        item.fixturenames = [*names[:first], FIXTURE, *names[first:]]  # type: ignore[attr-defined]

    def wanted(self, item: pytest.Item, plan: Plan) -> Wanted | None:
        """What a test's marker asks for, with its files read; what is wrong with them is an error of its plan."""
        if plan.toolcalls is None or plan.errors:
            return None
        if not hasattr(item, "fixturenames"):
            plan.errors.append("@toolcall_accuracy: this kind of test has no fixtures, so that no cases are asked")
            return None
        try:
            return self._accuracy.wanted(plan, item.path.parent)
        except BadInput as error:
            plan.errors.append(f"@toolcall_accuracy: {error}")
            return None

    def ask_baseline(self, key: str, plan: Plan, wanted: Wanted | None) -> list[RunningBackend]:
        """Ask what a test is compared with, before its window opens; the backend, where one was asked.

        :raises VramError: it could not be started, or died.
        """
        return self._accuracy.ask_baseline(key, plan, wanted) if wanted is not None else []
