"""``vram doctor --reap``: ends what runs that are over left behind, and nothing else."""

from __future__ import annotations

import sys

import msgspec

from pytest_vram.cli.output import FAILS, HOLDS, Answer
from pytest_vram.errors import BadInput
from pytest_vram.keeper import leftovers
from pytest_vram.keeper.leftovers import Left
from pytest_vram.text import printable

FORMAT = "pytest-vram/reap/1"


class Reaped(msgspec.Struct, frozen=True, kw_only=True):
    """A process that was ended, or could not be."""

    pid: int
    run: str
    command: str


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The document of ``vram doctor --reap --json``.

    :ivar ended: processes that were ended. :ivar removed: what else was removed, one sentence each.
    :ivar left: processes that are still there.
    """

    ended: list[Reaped]
    removed: list[str]
    left: list[Reaped]
    format: str = FORMAT


def run() -> Answer:
    """End leftovers; exit code 0 when nothing is left.

    :raises BadInput: elsewhere than on Linux, where no servers are started.
    """
    if not sys.platform.startswith("linux"):
        raise BadInput(f"--reap works on Linux only, and this is {sys.platform}: no server is started here")
    ended, left = leftovers.reap()
    removed = leftovers.clean({one.run for one in ended})
    report = Report(ended=[_told(one) for one in ended], removed=removed, left=[_told(one) for one in left])
    return Answer(code=FAILS if left else HOLDS, document=report, lines=tuple(_lines(report)))


def _told(one: Left) -> Reaped:
    return Reaped(pid=one.pid, run=one.run, command=one.command)


def _lines(report: Report) -> list[str]:
    lines = [f"ended    PID {one.pid} of run {one.run}: {one.command}" for one in report.ended]
    lines += [f"removed  {text}" for text in report.removed]
    lines += [f"left     PID {one.pid} of run {one.run} does not end: {one.command}" for one in report.left]
    # A mark or a command may hold line ends: each is one line all the same.
    return [printable(line) for line in lines] or ["No run that is over has left anything behind."]
