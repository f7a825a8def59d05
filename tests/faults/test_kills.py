"""kill -9 at any place: where the run is over nothing is left after 3 s, where it goes on it goes on honestly."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf  # noqa: F401  (loaded before pytester's snapshot of modules: numpy cannot be loaded twice)
import pytest

from pytest_vram.testing import write_llama
from tests.conftest import ours

pytestmark = pytest.mark.engine

GONE = 3.0
REQUEST = """
import os, pathlib

def test_before(): pass

def test_first(vram_backend, vram_client):
    pathlib.Path("pids").write_text(f"{os.getpid()} {vram_backend.pid}")
    vram_client.complete("a b " * 50, max_tokens=1000000, ignore_eos=True)

def test_second(vram_backend, vram_client):
    pathlib.Path("second").write_text(str(vram_backend.generation))
    assert vram_client.complete("a b", max_tokens=2).tokens_out
"""


class Outer:
    """A pytest run of its own that a test may kill."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.folder = folder
        self.log = folder / "output"
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--vram-device=cpu", "--vram-budget=4GB"]
        with self.log.open("wb") as stream:
            self.process = subprocess.Popen(
                [*command, *arguments], cwd=folder, stdout=stream, stderr=stream, start_new_session=True
            )

    def until(self, condition: Callable[[], Any], seconds: float = 40.0) -> Any:
        """Wait until the condition gives something true."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            found = condition()
            if found:
                return found
            time.sleep(0.02)
        raise AssertionError(f"did not happen within {seconds} s:\n{self.log.read_text()}")

    def in_request(self) -> tuple[int, int]:
        """PIDs of the pytest process and of the server once a request is under way."""
        path = self.folder / "pids"
        pids = self.until(lambda: path.exists() and path.read_text())
        self.until(
            lambda: any(line.get("name", "").startswith("req") or line["kind"] == "window" for line in self.journal())
        )
        time.sleep(0.3)
        first, second = pids.split()
        return int(first), int(second)

    def journal(self) -> list[dict[str, Any]]:
        """Whole lines of the journal so far."""
        found: list[dict[str, Any]] = []
        for path in (self.folder / ".vram" / "runs").glob("*/journal.jsonl"):
            found.extend(json.loads(line) for line in path.read_bytes().split(b"\n")[:-1])
        return found

    def run_id(self) -> str:
        """Name of the run folder."""
        (folder,) = (self.folder / ".vram" / "runs").iterdir()
        return folder.name

    def keeper(self) -> int:
        """PID of the latest keeper."""
        return int([line for line in self.journal() if line["kind"] == "keeper"][-1]["pid"])

    def assert_gone(self, *pids: int) -> None:
        """Nothing of the run is alive three seconds from now, nor any of these processes."""
        deadline = time.monotonic() + GONE
        run = self.run_id()
        while time.monotonic() < deadline:
            if not ours(run) and not any(alive(pid) for pid in pids):
                return
            time.sleep(0.02)
        left = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in [*ours(run), *pids] if alive(pid)}
        raise AssertionError(f"still alive: {left}")

    def outcomes(self) -> str:
        """The output once the run is over."""
        self.process.wait(60)
        return self.log.read_text()


def alive(pid: int) -> bool:
    """Whether this process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def children(pid: int) -> list[int]:
    """PIDs of the children of a process."""
    found: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        found.extend(map(int, path.read_text().split()))
    return found


@pytest.fixture
def outer(tmp_path: Path) -> Iterator[Callable[..., Outer]]:
    """Start a run in an empty folder; it is killed in any case at the end."""
    write_llama(tmp_path / "tiny.gguf")
    (tmp_path / "vram.toml").write_text(
        "[backend.x]\nengine='llama-server'\nmodel='tiny.gguf'\n[backend.x.options]\nctx-size=512\nparallel=1\n"
        "context-shift=true\n"
    )
    (tmp_path / "test_it.py").write_text(REQUEST)
    runs: list[Outer] = []

    def start(*arguments: str) -> Outer:
        runs.append(Outer(tmp_path, *arguments))
        return runs[-1]

    yield start
    for run in runs:
        if run.process.poll() is None:
            os.killpg(run.process.pid, signal.SIGKILL)
            run.process.wait()


def test_kill_of_pytest_during_a_request(outer: Callable[..., Outer]) -> None:
    """Keeper and server are gone within 3 s, and the journal has its last line."""
    run = outer()
    _, server = run.in_request()
    keeper = run.keeper()
    run.process.kill()
    run.process.wait()
    run.assert_gone(keeper, server)
    assert run.journal()[-1]["kind"] == "end"


def test_kill_of_the_keeper_during_a_request(outer: Callable[..., Outer]) -> None:
    """The test at hand is an error, the next one has a fresh server, and the journal shows the second keeper."""
    run = outer("-rE")
    _, server = run.in_request()
    os.kill(run.keeper(), signal.SIGKILL)
    text = run.outcomes()
    assert "2 passed, 1 error" in text
    assert "keeper" in text
    assert not alive(server)
    lines = run.journal()
    assert [line["generation"] for line in lines if line["kind"] == "keeper"] == [1, 2]
    assert lines[-1]["kind"] == "end"
    run.assert_gone()


def test_kill_of_a_worker_during_a_request(outer: Callable[..., Outer]) -> None:
    """xdist reports the crash and replaces the worker; the same server serves on."""
    run = outer("-n2", "--dist=load")
    worker, server = run.in_request()
    os.kill(worker, signal.SIGKILL)
    text = run.outcomes()
    assert "crashed" in text
    assert "1 failed, 2 passed" in text
    states = [(line["state"], line["generation"]) for line in run.journal() if line["kind"] == "backend"]
    assert ("ready", 1) in states
    assert ("died", 1) not in states
    assert (run.folder / "second").read_text() == "1"
    assert not alive(server)
    run.assert_gone()


def test_kill_of_the_controller(outer: Callable[..., Outer]) -> None:
    """With xdist: workers, keeper and server are gone within 3 s of the controller."""
    run = outer("-n2")
    worker, server = run.in_request()
    workers = children(run.process.pid)
    assert worker in workers
    keeper = run.keeper()
    run.process.kill()
    run.process.wait()
    run.assert_gone(keeper, server, *workers)


def test_an_interrupt_ends_everything_in_order(outer: Callable[..., Outer]) -> None:
    """Ctrl-C: pytest ends as usual, the report says nothing passed, nothing is left."""
    run = outer("--vram-report=out.json")
    _, server = run.in_request()
    os.kill(run.process.pid, signal.SIGINT)
    text = run.outcomes()
    assert "KeyboardInterrupt" in text
    run.assert_gone(server)
    table = json.loads((run.folder / "out.json").read_text())
    assert table["run"]["verdict"] != "passed"


def test_a_terminated_run_leaves_nothing(outer: Callable[..., Outer]) -> None:
    """SIGTERM to pytest, as a CI runner sends it, leaves no process."""
    run = outer()
    _, server = run.in_request()
    keeper = run.keeper()
    run.process.terminate()
    run.process.wait(30)
    run.assert_gone(keeper, server)
