"""Soaks that are killed, whose server is killed, and whose disk is full: nothing committed is lost or asked again."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from pytest_vram.sessions import soak_journal
from pytest_vram.sessions.soak_journal import FILE_NAME, read
from pytest_vram.testing.scripted import Script, backend_table

ROOT = Path(__file__).parents[2]
VRAM = [sys.executable, "-c", "import sys; from pytest_vram.cli import main; sys.exit(main())", "soak"]


def bench() -> Any:
    """The module `ci/bench/soaks.py`."""
    spec = importlib.util.spec_from_file_location("bench_of_soaks", ROOT / "ci" / "bench" / "soaks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_dozen_soaks_that_are_killed_at_random_moments_keep_their_turns_and_their_verdicts() -> None:
    """Killed, out of disk, out of a server: each ends with every turn once, and no verdict is turned round."""
    trial = bench().trial
    with ThreadPoolExecutor(2) as pool:
        rows = list(pool.map(lambda number: trial(random.Random(f"12 {number}"), 150, 2), range(12)))
    assert [row for row in rows if row["broken"]] == []
    assert sum(sum(row["deaths"].values()) for row in rows) >= 10
    assert {row["kind"] for row in rows} <= {"same", "inconclusive"}


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a scripted backend that takes a moment for each turn."""
    (tmp_path / "vram.toml").write_text(backend_table(Script(latency=0.02), tmp_path, name="agent"), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def begun(turns: int, *more: str) -> subprocess.Popen[bytes]:
    """A soak as users start it."""
    command = [*VRAM, f"{turns}turns", "--vram-device=cpu", "--dir", "soak", *more]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)


def wait_for(process: subprocess.Popen[bytes], count: int) -> None:
    """Until so many lines are in the journal, or the soak has ended."""
    path = Path("soak", FILE_NAME)
    while process.poll() is None and (not path.exists() or path.read_bytes().count(b"\n") < count):
        time.sleep(0.01)


def ended(process: subprocess.Popen[bytes]) -> tuple[int, str]:
    """Exit code and standard output."""
    assert process.stdout is not None
    out = process.stdout.read().decode()
    process.stdout.close()
    return process.wait(), out


def test_vram_soak_goes_on_after_a_kill_and_after_the_death_of_its_server(project: Path) -> None:
    """The journal of each process begins with that of the one before; a killed server is a segment and no pass."""
    first = begun(12)
    wait_for(first, 6)
    first.send_signal(signal.SIGKILL)
    assert ended(first)[0] == -signal.SIGKILL
    path = project / "soak" / FILE_NAME
    before = path.read_bytes()
    whole = before[: before.rindex(b"\n") + 1]
    committed = read(project / "soak").turns
    assert 0 < committed < 12

    second = begun(12, "--resume", "--json")
    wait_for(second, whole.count(b"\n") + 3)
    pid = read(project / "soak").segments[-1].pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    code, out = ended(second)
    assert code == 3
    found = json.loads(out)
    assert found["turn_count"] == 12
    assert path.read_bytes().startswith(whole)
    contents = read(project / "soak")
    assert contents.turns == 12
    assert [line.why for line in contents.segments] == ["start", "resumed", "died"]
    assert [line.first for line in contents.segments][:2] == [1, committed + 1]
    assert [loss.number for loss in contents.losses] == [contents.segments[2].first]
    answers = next(gate for gate in found["verdict"]["gates"] if gate["name"] == "answers")
    assert answers["outcome"] == "inconclusive"
    assert "lost or did not answer in time once" in answers["text"]
    assert found["losses"][0]["error"].splitlines()[0] in answers["text"]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_ctrl_c_and_sigterm_keep_everything_and_say_how_to_go_on(project: Path, number: int, code: int) -> None:
    """Exit codes 130 and 143; no server is left, and the lock is free."""
    process = subprocess.Popen(
        [*VRAM, "500turns", "--vram-device=cpu", "--dir", "soak"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    wait_for(process, 5)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (code, b"")
    assert b"go on with: vram soak 500turns" in err
    assert b"--resume --dir" in err
    assert b"Traceback" not in err
    contents = read(project / "soak")
    assert contents.end is not None
    assert contents.end.reason == "interrupted"
    assert contents.turns >= 1
    pid = contents.segments[-1].pid
    assert pid is not None
    while Path(f"/proc/{pid}").exists() and b"Z" not in Path(f"/proc/{pid}/stat").read_bytes().split(b")")[-1]:
        time.sleep(0.05)
    soak_journal.SoakJournal.open(
        project / "soak", soak_journal.read_manifest(project / "soak").fingerprint, name="x"
    ).close()
