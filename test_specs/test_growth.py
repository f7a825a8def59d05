"""What a deployment takes beyond its boot once it serves: the budget must hold then as well."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_vram import serial_only
from pytest_vram.checks import judge_growth, judge_served

from . import prompts
from .requirements import hold, need, need_measurements

if TYPE_CHECKING:
    from pytest_vram.backends import Pool, RunningBackend


@serial_only("several requests at once are sent on purpose")
def test_budget_holds_while_it_serves(vram_backend: RunningBackend, vram_backends: Pool) -> None:
    """A full ubatch, a near-full context, a request for each slot and an image are served, and growth is reported.

    The plugin holds the peak of all of it against the budget. No step may take more than a quarter of the backend's
    `request_timeout`; a shorter prompt than was wanted is said in the report.
    """
    need_measurements(vram_backends, "growth while serving")
    need(vram_backend, "chat", "process")
    growth = vram_backend.probe(seconds=min(120.0, 2 * 2 * prompts.SHARE * vram_backend.spec.request_timeout))
    hold(judge_served(growth))
    hold(judge_growth(growth))
