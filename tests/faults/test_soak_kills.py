"""Soaks that are killed, whose server is killed, and whose disk is full: nothing committed is lost or asked again."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Callable
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
    said, _, log = found["losses"][0]["error"].partition(" Last lines of ")
    assert said in answers["text"]
    assert log
    assert "Last lines of" not in answers["text"]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_ctrl_c_sigterm_and_sighup_keep_everything_and_say_how_to_go_on(project: Path, number: int, code: int) -> None:
    """Exit codes 130, 143 and 129; no server is left, and the lock is free."""
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


def alive(mark: str) -> list[str]:
    """Command lines of the processes that have this text in their environment."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark.encode() in (folder / "environ").read_bytes() and b"Z" not in stat_of(folder):
                found.append((folder / "cmdline").read_bytes().decode(errors="replace"))
    return found


def stat_of(folder: Path) -> bytes:
    """What comes behind the name of a process: its state first."""
    return (folder / "stat").read_bytes().rpartition(b")")[2].split()[0]


def wait_until(true: Callable[[], Any], seconds: float = 20.0) -> None:
    """Fail where it does not come true."""
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("door", ["vram soak", "pytest"])
def test_several_ctrl_c_at_once_leave_no_process_and_a_whole_journal(project: Path, door: str) -> None:
    """A terminal sends it to the whole group, and people press it more than once."""
    mark = f"VRAM_TEST_SOAK={project}"
    if door == "pytest":
        (project / "test_night.py").write_text(
            "from pytest_vram import vram_soak\n\n@vram_soak(turns=500)\ndef test_night(): pass\n", encoding="utf-8"
        )
        (project / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
        words = ["-m", "pytest", "-q", "--vram-soak-dir=soaks", "--vram-device=cpu"]
        command = [sys.executable, *words]
    else:
        command = [*VRAM, "500turns", "--vram-device=cpu", "--dir", "soaks/test_night/1"]
    environment = {**os.environ, mark.partition("=")[0]: str(project)}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment, start_new_session=True
    )
    wait_until(lambda: any(path.read_bytes().count(b"\n") > 5 for path in project.glob("soaks/*/1/soak.jsonl")), 60)
    for _ in range(4):
        os.killpg(process.pid, signal.SIGINT)
        time.sleep(0.012)
    out, _ = process.communicate(timeout=60)
    assert b"INTERNALERROR" not in out, out.decode()
    if door == "vram soak":  # pytest's own machinery says where a second one met it
        assert process.returncode in (130, -signal.SIGINT), out.decode()  # of the last one, where all was done
        assert b"Traceback" not in out, out.decode()
        assert b"go on with: vram soak 500turns" in out
    wait_until(lambda: not alive(mark))
    (folder,) = project.glob("soaks/*/1")
    contents = read(folder)
    assert contents.torn == 0
    assert contents.turns >= 3
    assert contents.end is None or contents.end.reason == "interrupted"


def test_a_second_soak_in_a_folder_is_refused_and_the_first_one_is_not_disturbed(project: Path) -> None:
    """The second one says why, asks nothing and exits with 2; the first one has all its turns of one server."""
    first = begun(12)
    wait_for(first, 4)
    second = subprocess.run(
        [*VRAM, "12turns", "--vram-device=cpu", "--dir", "soak", "--resume"], capture_output=True, timeout=60
    )
    assert (second.returncode, second.stdout) == (2, b"")
    assert b"another soak is running in" in second.stderr
    assert b"wait for its end, or give this one a folder of its own" in second.stderr
    assert b"Traceback" not in second.stderr
    assert ended(first)[0] == 3
    contents = read(project / "soak")
    assert (contents.turns, len(contents.segments), len(contents.sessions), contents.losses) == (12, 1, 1, [])


def test_a_second_soak_is_refused_while_the_first_one_starts_its_server(project: Path) -> None:
    """A model that loads for minutes is not loaded twice: the folder is taken before there is a server."""
    first = begun(3)
    wait_until(lambda: Path("soak", "lock").exists(), 60)
    assert not Path("soak", FILE_NAME).exists()
    second = subprocess.run(
        [*VRAM, "3turns", "--vram-device=cpu", "--dir", "soak"], capture_output=True, text=True, timeout=60
    )
    assert second.returncode == 2, second.stdout + second.stderr
    assert "another soak is running in" in second.stderr or "has a soak already" in second.stderr
    assert "warming up" not in second.stderr
    assert ended(first)[0] == 3
    contents = read(project / "soak")
    assert (contents.turns, len(contents.segments), len(contents.sessions)) == (3, 1, 1)
    assert len(list(project.glob(".vram/runs/*/agent.*.log"))) == 1


def stopped_for_a_while(project: Path, seconds: float, *more: str) -> tuple[int, dict[str, Any], soak_journal.Contents]:
    """A soak whose server is stopped (SIGSTOP) in the middle: exit code, document and journal."""
    process = begun(10, "--json", *more)
    wait_for(process, 5)
    pid = read(project / "soak").segments[-1].pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    time.sleep(seconds)
    with contextlib.suppress(ProcessLookupError):  # it was replaced
        os.kill(pid, signal.SIGCONT)
    code, out = ended(process)
    return code, json.loads(out), read(project / "soak")


def test_a_server_that_stands_still_for_a_while_is_a_slow_turn(project: Path) -> None:
    """Within the patience of the deployment nothing is lost, and the turn has the time that it took."""
    turns: list[soak_journal.TurnLine] = []
    code, found, contents = stopped_for_a_while(project, 2.5)
    read(project / "soak", turns.append)
    assert (code, contents.turns, contents.losses, len(contents.segments)) == (3, 10, [], 1)
    slow = [line.turn for line in turns if (line.turn.latency or 0) > 1.5]
    settled = [two.spent - one.spent for one, two in itertools.pairwise(turns)]
    assert len(slow) <= 1
    assert max(settled) > 2
    assert {line.turn.result for line in turns} == {"ok"}
    assert next(gate for gate in found["verdict"]["gates"] if gate["name"] == "answers")["outcome"] == "passed"


def test_a_server_that_stands_still_longer_than_is_waited_has_turns_without_an_answer(project: Path) -> None:
    """They are committed as such and never asked again, and the verdict says how many there are."""
    (project / "vram.toml").write_text(
        backend_table(Script(latency=0.02), project, name="agent", request_timeout=1.0), encoding="utf-8"
    )
    code, found, contents = stopped_for_a_while(project, 4.0)
    turns: list[soak_journal.TurnLine] = []
    read(project / "soak", turns.append)
    assert (code, contents.turns, contents.losses, len(contents.segments)) == (3, 10, [], 1)
    missing = [line.turn for line in turns if line.turn.result == "error"]
    assert missing
    assert all("1 s" in (turn.error or "") for turn in missing)
    answers = next(gate for gate in found["verdict"]["gates"] if gate["name"] == "answers")
    assert answers["outcome"] == "inconclusive"
    assert f"{len(missing)} of 10" in answers["text"]


def test_a_clock_that_was_set_back_between_two_processes_changes_nothing(project: Path) -> None:
    """The times of the first process lie years ahead: the hours of the soak are not counted by them."""
    first = begun(5)
    wait_for(first, 4)
    first.send_signal(signal.SIGINT)
    ended(first)
    path = project / "soak" / FILE_NAME
    year = read(project / "soak").sessions[0].at[:4].encode()
    lines = []
    for line in path.read_bytes().splitlines():
        body = line[18:].replace(b'"at":"' + year, b'"at":"2100')
        lines.append(b'{"crc":"%08x",' % zlib.crc32(body) + body + b"\n")
    path.write_bytes(b"".join(lines))
    before = read(project / "soak")
    assert before.sessions[0].at.startswith("2100")
    code, out = ended(begun(8, "--resume", "--json"))
    found, contents = json.loads(out), read(project / "soak")
    assert (code, found["turn_count"], found["reason"]) == (3, 8, "amount")
    assert path.read_bytes().startswith(b"".join(lines))
    assert before.spent <= found["seconds"] == contents.spent < before.spent + 60


def test_half_a_dozen_real_soaks_that_are_killed(tmp_path: Path) -> None:
    """Through the command and through pytest: killed, without a server, on a full disk; see the benchmark."""
    command = [sys.executable, str(ROOT / "ci" / "bench" / "soak_kills.py"), "--soaks=6", "--turns=20", "--at-once=4"]
    command += ["--most-deaths=2", "--seed=3", f"--json={tmp_path / 'rows.json'}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "rows.json").read_text(encoding="utf-8"))[6:]
    assert [row["broken"] for row in rows] == [[]] * 6
    assert {row["kind"] for row in rows} <= {"same", "inconclusive"}
    assert sum(len(row["deaths"]) for row in rows) >= 6
    assert [row["outcome"] for row in rows if row["shape"] == "peak"] == ["failed", "failed"]
