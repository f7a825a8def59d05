"""`vram watch` beside a keeper that lives: what it says now, and how the run ends, is seen."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pytest_vram.keeper.messages import Finish, Note
from tests.faults.keeper_kit import Run, acquire, closed, opened, plan, status, until

COMMAND = [sys.executable, "-c", "from pytest_vram.cli.entry import main; raise SystemExit(main())", "watch"]
NAME = "20300101T000000Z-"


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    """A run in the project's folder."""
    made = Run(tmp_path / ".vram" / "runs" / f"{NAME}one")
    yield made
    made.close()


def watch(folder: Path, *arguments: str) -> tuple[int, str]:
    done = subprocess.run([*COMMAND, *arguments], cwd=folder, capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr
    return done.returncode, done.stdout


def document(folder: Path) -> dict[str, Any]:
    code, text = watch(folder, "--json")
    assert code == 0
    found: dict[str, Any] = json.loads(text)
    return found


def test_a_run_that_goes_on(run: Run, tmp_path: Path) -> None:
    """While the keeper answers, the document has its figures, the test that runs and the server that it uses."""
    client = run.start().client()
    window = opened(client, "test_a.py::test_one")
    server = acquire(client, plan(f"hold={50 << 20}"), window)
    found = document(tmp_path)
    assert (found["state"], found["live"], found["run"]) == ("running", True, run.id)
    assert found["keeper"] == status(client).pid
    (device,) = found["devices"]
    assert device["held"] > 50 << 20
    assert [(one["name"], one["state"], one["pid"]) for one in found["backends"]] == [("agent", "ready", server.pid)]
    assert [one["name"] for one in found["tests"]] == ["test_a.py::test_one"]
    assert server.pid in [one["pid"] for one in found["processes"]]
    closed(client, window)
    assert document(tmp_path)["tests"] == []


def test_followed_to_its_end_and_to_the_next(run: Run, tmp_path: Path) -> None:
    """Into a pipe the changes of a run come as they happen; with --follow the next run is picked up, until Ctrl-C."""
    client = run.start().client()
    with subprocess.Popen([*COMMAND, "--follow"], cwd=tmp_path, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        patience = threading.Timer(60, process.kill)  # a line that does not come is a failure and not a hang
        patience.start()
        assert run.id in process.stdout.readline()
        window = opened(client, "test_one")
        assert process.stdout.readline().endswith("test test_one began\n")
        closed(client, window)
        client.send(Note(kind="test", fields={"nodeid": "test_one", "outcome": "passed"}))
        assert process.stdout.readline().endswith("test test_one passed\n")
        client.call(Finish(outcome="0"))
        (run.folder / "run.json").write_text('{"run": {"verdict": "passed"}}')
        lines = iter(process.stdout.readline, "")
        assert any("the run ended: the run is finished" in line for line in lines)
        other = Run(tmp_path / ".vram" / "runs" / f"{NAME}two").start()
        other.client()
        assert any(f"{NAME}two" in line for line in lines)
        other.close()
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == 130
        patience.cancel()


def test_a_run_whose_keeper_was_killed(run: Run, tmp_path: Path) -> None:
    """A keeper that does not answer is said; the run is not called lost while its controller lives."""
    client = run.start().client()
    opened(client, "test_one")
    os.kill(status(client).pid, signal.SIGKILL)
    client.close()
    assert until(lambda: not document(tmp_path)["live"])
    code, text = watch(tmp_path, "--once")
    assert code == 0
    assert "its keeper does not answer" in text
    Path(run.launch.socket).unlink()
