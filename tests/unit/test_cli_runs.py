"""Runs that commands make outside of pytest end in any case."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pytest_vram.cli.runs import ending
from pytest_vram.errors import KeeperLost
from pytest_vram.keeper import KeeperClient
from pytest_vram.keeper.messages import Finish, State, Status
from pytest_vram.run import Run


def run(folder: Path, call: Any, done: list[str]) -> Any:
    """What stands for a run whose keeper answers with ``call``."""
    client = SimpleNamespace(call=call, dismiss=lambda: done.append("dismissed"))
    return SimpleNamespace(
        connected=True,
        keeper=lambda: client,
        close=lambda: done.append("closed"),
        identity=SimpleNamespace(folder=str(folder / "runs" / "one")),
    )


def test_a_journal_that_was_not_written_whole_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A disk that filled up in the middle is told on the standard error stream when the command ends."""
    asked: list[object] = []

    def call(request: object, timeout: float) -> object:
        asked.append(request)
        return State(pid=1, run="r", t=0, journal_trouble="journal.jsonl: No space left on device")

    done: list[str] = []
    with ending(run(tmp_path, call, done), "sweep"):
        pass
    assert [type(one) for one in asked] == [Status, Finish]
    assert isinstance(asked[1], Finish)
    assert asked[1].outcome == "0"
    assert done == ["closed"]
    told = capsys.readouterr().err
    assert "vram sweep: the journal is incomplete: journal.jsonl: No space left on device" in told


def test_an_interrupt_goes_on_after_the_end(tmp_path: Path) -> None:
    """The keeper is told that the run was interrupted; one that is gone is let go."""
    asked: list[object] = []

    def call(request: object, timeout: float) -> object:
        asked.append(request)
        return State(pid=1, run="r", t=0)

    def gone(request: object, timeout: float) -> object:
        raise KeeperLost("it is gone")

    done: list[str] = []
    for answer in (call, gone):
        with pytest.raises(KeyboardInterrupt), ending(run(tmp_path, answer, done), "soak"):
            raise KeyboardInterrupt
    assert isinstance(asked[-1], Finish)
    assert asked[-1].outcome == "interrupted"
    assert done == ["closed", "dismissed", "closed"]


@pytest.mark.parametrize(
    ("stopped", "worker", "wanted"),
    [(True, None, ["closed", "dismissed"]), (True, "gw0", ["closed"]), (False, None, ["closed"])],
)
def test_a_keeper_that_somebody_stopped_is_ended_by_who_gives_up_on_it(
    stopped: bool, worker: str | None, wanted: list[str]
) -> None:
    """By the controller, since others of the run may still have it; what hangs is ended by its guard."""
    done: list[str] = []

    def lost(*_: object, **__: object) -> None:
        raise KeeperLost("it did not answer")

    made = Run.__new__(Run)
    made.worker, made._pool = worker, None
    made._client = cast(
        KeeperClient,
        SimpleNamespace(
            call=lost, stopped=stopped, close=lambda: done.append("closed"), dismiss=lambda: done.append("dismissed")
        ),
    )
    with pytest.raises(KeeperLost):
        made.call(Status())
    assert done == wanted
    assert not made.connected
