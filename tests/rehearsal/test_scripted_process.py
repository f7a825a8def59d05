"""The scripted backend as a process: it ends always, a keeper runs it, and what it holds is really held."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from pytest_vram.backends.client import Target, VramClient
from pytest_vram.errors import BackendError
from pytest_vram.specfile import read
from pytest_vram.testing import backend_table, scripted_backend
from pytest_vram.testing.scripted import Answerer, Burst, Script, read_record, serving
from pytest_vram.toolcalls import load
from tests.unit import scripted_kit as kit

MIB = 1 << 20


def client_of(url: str) -> VramClient:
    return VramClient(Target(name="scripted", url=url, timeout=30.0))


def test_it_serves_and_ends_with_its_block() -> None:
    """A process answers, tells what it did, and is gone after the block."""
    with scripted_backend(Script(model="played")) as backend:
        client = client_of(backend.url)
        assert client.chat("hello").raw["model"] == "played"
        assert client.chat("hello", stream=True).text.startswith("This is a scripted backend")
        assert client.get("/health") == {"status": "ok"}
        assert client.tokenize("one two one")[0] == client.tokenize("one")[0]
        told = backend.told()
        assert (told["asked"], told["unknown"]) == (2, 2)
    assert backend.process.returncode == 0
    assert not psutil.pid_exists(backend.pid)


def test_it_ends_where_its_block_raises() -> None:
    """An error in the block, such as a failed assertion, ends it too."""
    started = []

    def fails() -> None:
        with scripted_backend() as backend:
            started.append(backend)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    assert started[0].process.returncode == 0


@pytest.mark.parametrize("stream", [False, True])
def test_it_takes_the_time_that_its_script_says(stream: bool) -> None:
    """No answer is sooner than latency and rate allow, and a streamed one comes in pieces."""
    script = Script(latency=0.1, tokens_per_second=100.0)
    with serving(Answerer(script, kit.cases(1))) as server:
        client = client_of(server.url)
        reply = client.chat("hello", stream=stream)
    assert reply.tokens_out is not None
    assert reply.record.latency >= 0.1 + 0.9 * reply.tokens_out / 100.0
    if stream:
        first = reply.record.time_to_first_token
        assert first is not None
        assert 0.1 <= first < reply.record.latency


def test_the_same_answers_in_another_process() -> None:
    """What a case is answered does not depend on the process."""
    cases = load("shipped")
    script = Script(accuracy=0.5, seed=3)
    body = kit.bodies(cases)[7]
    messages, rest = body["messages"], {key: value for key, value in body.items() if key != "messages"}
    answers = []
    for _ in range(2):
        with scripted_backend(script) as backend:
            answers.append(client_of(backend.url).chat(messages, **rest).message)
    assert answers[0] == answers[1]


def test_it_dies_with_the_process_that_started_it(tmp_path: Path) -> None:
    """A test run that is killed leaves no backend behind."""
    code = (
        "import sys\nfrom pytest_vram.testing import scripted_backend\n"
        "with scripted_backend() as backend:\n    print(backend.pid, flush=True)\n    sys.stdin.read()\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert parent.stdout is not None
    assert parent.stdin is not None
    child = psutil.Process(int(parent.stdout.readline()))
    parent.send_signal(signal.SIGKILL)
    parent.wait(30)
    gone, _ = psutil.wait_procs([child], timeout=30)
    assert gone == [child]
    parent.stdout.close()
    parent.stdin.close()


@pytest.mark.parametrize(
    ("script", "cases", "words"),
    [("{}", "no-such-file.jsonl", "no-such-file.jsonl"), ('{"accuracy": 7}', "shipped", "accuracy")],
)
def test_what_it_cannot_use_is_one_sentence(tmp_path: Path, script: str, cases: str, words: str) -> None:
    """Bad cases or a bad script: exit status 2, a sentence and no traceback."""
    path = tmp_path / "script.json"
    path.write_text(script)
    command = [sys.executable, "-m", "pytest_vram.testing.scripted", "--script", str(path), "--cases", cases]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_a_backend_that_does_not_start_says_why() -> None:
    """The block is not entered, and the error has the server's own words."""
    with pytest.raises(BackendError, match="no-such"), scripted_backend(cases="no-such.jsonl"):
        pytest.fail("it started")


def test_what_it_holds_is_resident_until_it_is_idle() -> None:
    """Each generation takes real memory up to the cap, and an idle server gives it back."""
    script = Script(hold=16 * MIB, hold_most=40 * MIB, hold_idle=0.3)
    with scripted_backend(script) as backend:
        process, client = psutil.Process(backend.pid), client_of(backend.url)
        before = process.memory_info().rss
        for _ in range(4):
            client.chat("hello")
        if backend.told()["held"] == 40 * MIB:  # a loaded machine may have been idle between two of them
            assert process.memory_info().rss - before > 36 * MIB
        deadline = time.monotonic() + 30
        while backend.told()["held"]:
            assert time.monotonic() < deadline
        assert process.memory_info().rss - before < 12 * MIB


def test_a_burst_is_held_while_one_answer_is_given_and_counted_over_servers(tmp_path: Path) -> None:
    """It comes with the third request of these words, though that is another server's, and is gone with the answer."""
    record = tmp_path / "record.jsonl"
    script = Script(burst=Burst(size=64 * MIB, said="hel", after=2), record=str(record), latency=0.2)
    grown = []
    for words in (("hello", "other"), ("hello", "hello")):
        with scripted_backend(script) as backend:
            process, client = psutil.Process(backend.pid), client_of(backend.url)
            idle = process.memory_info().rss
            for word in words:
                before, most = process.memory_info().rss, 0
                with ThreadPoolExecutor(1) as pool:
                    answer = pool.submit(client.chat, word)
                    while not answer.done():
                        most = max(most, process.memory_info().rss - before)
                        time.sleep(0.002)
                answer.result()
                grown.append(most > 56 * MIB)
            deadline = time.monotonic() + 30  # it is given back once the answer is out
            while process.memory_info().rss - idle > 24 * MIB:
                assert time.monotonic() < deadline
    assert grown == [False, False, False, True]
    lines = read_record(record)
    assert [(line.said, line.before, line.role) for line in lines] == [
        ("hello", 0, "user"),
        ("other", 0, "user"),
        ("hello", 1, "user"),
        ("hello", 2, "user"),
    ]
    assert len({line.pid for line in lines}) == 2


def test_a_record_whose_server_was_killed_in_a_line_goes_on_in_a_line_of_its_own(tmp_path: Path) -> None:
    """The rest of a line is not read, and the next server drops it."""
    record = tmp_path / "record.jsonl"
    whole = b'{"pid":1,"said":"hello","role":"user","messages":1,"before":0}\n'
    record.write_bytes(whole + whole[:20])
    assert [line.pid for line in read_record(record)] == [1]
    with scripted_backend(Script(record=str(record))) as backend:
        client_of(backend.url).chat("hello")
        assert [line.pid for line in read_record(record)] == [1, backend.pid]
    assert record.read_bytes().startswith(whole)


@pytest.mark.parametrize("text", ["{}", "nothing", '{"pid": "x"}'])
def test_a_record_of_something_else_is_refused(tmp_path: Path, text: str) -> None:
    """The backend does not start upon it, and says which file it is."""
    (tmp_path / "other.jsonl").write_text(text + "\n", encoding="utf-8")
    with (
        pytest.raises(BackendError, match=r"other\.jsonl, is none"),
        scripted_backend(Script(record=str(tmp_path / "other.jsonl"))),
    ):
        pytest.fail("it started")


def test_a_keeper_runs_it_from_a_table(rehearse: Callable[..., Any], tmp_path: Path) -> None:
    """The table is a backend of a config file: it starts, is healthy, answers a case, and is ended with the run."""
    table = backend_table(Script(model="played"), tmp_path, name="played", request_timeout=20.0)
    (tmp_path / "vram.toml").write_text(table)
    found = read(tmp_path / "vram.toml")
    run = rehearse(found.backends["played"])
    backend = run.pool.acquire(run.pool.spec())
    case = load("shipped").cases[0]
    body = kit.bodies(load("shipped"))[0]
    reply = backend.client.chat(body.pop("messages"), **body)
    assert reply.raw["model"] == "played"
    assert json.dumps(reply.message)
    assert reply.message.get("tool_calls") or not case.expect
    assert backend.pid > 0
