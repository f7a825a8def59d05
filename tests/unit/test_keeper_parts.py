"""Parts of the keeper that need no keeper."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
from collections.abc import Awaitable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_vram.errors import BackendDied, RequestTimeout
from pytest_vram.journal import Journal, Writer, ended_in_order
from pytest_vram.keeper import health, wire
from pytest_vram.keeper.admission import Admission
from pytest_vram.keeper.booting import _program_names
from pytest_vram.keeper.core import file_name
from pytest_vram.keeper.listening import remove_stale
from pytest_vram.keeper.logs import CappedLog, LogReader
from pytest_vram.keeper.messages import LARGEST, Acquire, Done, Failed, Hello, Note, Status
from pytest_vram.keeper.processes import Watch, cause, disk_full, exit_words, tail
from pytest_vram.keeper.turns import Turns
from pytest_vram.measure import procfs
from pytest_vram.spec import LaunchPlan


def test_frames_travel() -> None:
    """A message comes out of its frame as it went in."""
    message = Acquire(plan=LaunchPlan(name="a", engine="command", argv=["x"]))
    data = wire.frame(message)
    assert wire.length(data[:4]) == len(data) - 4
    assert wire.request(data[4:]) == message
    assert wire.reply(wire.frame(Done())[4:]) == Done()


def test_a_frame_has_a_largest_size() -> None:
    """Nothing longer than allowed is sent or awaited."""
    with pytest.raises(wire.BadFrame, match="16,777,217"):
        wire.length((LARGEST + 1).to_bytes(4, "big"))
    with pytest.raises(wire.BadFrame, match="largest allowed"):
        wire.frame(Note(kind="note", fields={"text": "x" * LARGEST}))
    with pytest.raises(wire.BadFrame, match="cannot be written"):
        wire.frame(Note(kind="note", fields={"text": object()}))


@given(st.binary(max_size=200))
def test_no_bytes_break_the_decoder(data: bytes) -> None:
    """Any bytes are a message, or an error of the two that are expected."""
    for decode in (wire.request, wire.reply):
        try:
            decode(data)
        except (wire.BadFrame, wire.NotARequest):
            pass


def test_requests_are_told_from_replies() -> None:
    """A reply is no request, and a request lacks nothing."""
    with pytest.raises(wire.NotARequest):
        wire.request(wire.frame(Failed(error="X", message="y"))[4:])
    with pytest.raises(wire.NotARequest, match="missing required field") as missing:
        wire.request(b'{"op":"hello"}')
    assert missing.value.op == "hello"
    assert isinstance(wire.request(b'{"op":"status"}'), Status)
    assert isinstance(wire.request(wire.frame(Hello(role="viewer", pid=1, start_time=2))[4:]), Hello)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (0, "exited with code 0"),
        (7, "exited with code 7"),
        (-signal.SIGILL, "was killed by SIGILL: this build uses CPU instructions that this machine lacks"),
        (-signal.SIGSEGV, "was killed by SIGSEGV"),
        (-200, "was killed by signal 200"),
        (None, "ended"),
    ],
)
def test_exit_words(code: int | None, words: str) -> None:
    """Exit codes and signals in words."""
    assert exit_words(code) == words


def test_exit_words_of_a_kill() -> None:
    """SIGKILL may be the kernel's: certain where it counted a kill, else a possibility; with what was held."""
    assert "somebody or by the kernel" in exit_words(-9)
    certain = exit_words(-9, mark=100 << 20, kernel_kills=1)
    assert "the kernel ran out of memory and killed it" in certain
    assert "100.0 MiB" in certain
    # A shell in between turns the signal into an exit code.
    assert "somebody, or the kernel for lack of memory" in exit_words(137)
    assert "the kernel ran out of memory" in exit_words(137, kernel_kills=1)


def test_tail(tmp_path: Path) -> None:
    """The last lines of a log: no secrets, no control characters, no endless lines."""
    log = tmp_path / "log"
    log.write_bytes(b"".join(b"line %d\n" % number for number in range(100)))
    assert tail(log, 2) == "  line 98\n  line 99"
    log.write_bytes(b"key s3cret \x1b[31m\xff\n\n" + "turned \u202e\u2066\u200f\n".encode() + b"y" * 1000)
    text = tail(log, secrets=("s3cret",))
    assert "key *** ?[31m\ufffd" in text
    assert "turned ???" in text
    assert len(text.splitlines()[-1]) == 402
    assert tail(tmp_path / "none") == ""
    assert tail(None) == ""


def test_tail_ends_with_what_the_program_said(tmp_path: Path) -> None:
    """A failed assertion is shown and not the debugger's backtrace after it, and can be had alone, without secrets."""
    log = tmp_path / "log"
    said = '/src/llama-vocab.cpp:3295: GGML_ASSERT(tokenizer && "s3cret") failed'
    trace = ["[New LWP 6740]", "[Thread debugging using libthread_db enabled]", "57\tin ./nptl/futex-internal.c"]
    trace += [f"#{number}  0x00007fe0a54a3f7b in wait () from libc.so" for number in range(99)]
    log.write_text("\n".join([*(f"line {number}" for number in range(50)), said, *trace, "[Inferior 1 detached]", ""]))
    assert tail(log, 2, secrets=("s3cret",)) == f"  line 49\n  {said.replace('s3cret', '***')}"
    assert cause(log, secrets=("s3cret",)) == said.replace("s3cret", "***")
    log.write_text("CUDA error, tried again\n" + "\n".join(f"line {number}" for number in range(50)))
    assert tail(log, 1) == "  line 49"
    log.write_text("line 1\nline 2\n")
    assert cause(log) == cause(None) == ""


def test_log_reader(tmp_path: Path) -> None:
    """Lines come when they are complete; what was left unfinished at the end comes then."""
    path = tmp_path / "log"
    reader = LogReader(path)
    assert reader.lines() == []
    with path.open("ab", buffering=0) as log:
        log.write(b"one\r\ntw")
        assert reader.lines() == ["one"]
        log.write(b"o\nthr\xffee")
        assert reader.lines() == ["two"]
        assert reader.all_lines() == ["thr\ufffdee"]
        assert reader.all_lines() == []
        log.write(b"x" * (65 << 10))
        assert [len(line) for line in reader.lines()] == [65 << 10]
    reader.close()
    reader.close()


def test_log_reader_of_a_flood(tmp_path: Path) -> None:
    """A log is followed in pieces; where it runs ahead, or was cut, its last lines are what counts."""
    path = tmp_path / "log"
    text = b"".join(b"%07d\n" % number for number in range(500_000)) + b"last"
    path.write_bytes(text)
    reader = LogReader(path)
    assert len(reader.lines()) == 16 << 10
    assert reader.lines()[0] == "0016384"
    lines = reader.all_lines()
    assert len(lines) < 300_000
    assert lines[-2:] == ["0499999", "last"]
    assert reader.all_lines() == []
    with path.open("ab") as log:
        log.write(text * 5)
    ahead = reader.lines()
    assert len(ahead[0]) == 7
    assert int(ahead[0]) > 200_000
    path.write_bytes(b"cut\nport\n")
    assert reader.lines() == ["port"]
    reader.close()


def test_a_log_is_cut(tmp_path: Path) -> None:
    """Of a log that grows too large the beginning and the last lines stay, and the writer goes on after them."""
    path = tmp_path / "log"
    with path.open("ab", buffering=0) as writer:
        writer.write(b"first\n" + b"y" * 194 + b"\n")
        log = CappedLog(path, most=1000, beginning=200)
        assert not log.look()
        assert log.words() == ""
        for number in range(200):
            writer.write(b"line %04d\n" % number)
        assert log.look()
        writer.write(b"more\n")
        lines = path.read_bytes().split(b"\n")
        assert lines[0] == b"first"
        assert lines[-3:] == [b"line 0199", b"more", b""]
        writer.write(b"z" * 200_000)
        assert not log.look()
        assert path.stat().st_size < 70_000
        text = path.read_bytes()
        assert b"[pytest-vram left out %d bytes of this log here]" % log.left_out in text
        assert text.count(b"left out") == 1
        assert text.endswith(b"z")
        reader = LogReader(path, log)
        assert reader.lines()
        for _ in range(100):
            writer.write(b"y" * 1000)
        writer.write(b"\nport\n")
        assert not log.look()
        assert reader.lines()[-1] == "port"
        reader.close()
        assert log.words().endswith(" MiB in the middle of it are left out)")
        log.close()
        writer.write(b"z" * 2000)
        assert not log.look()


@pytest.mark.parametrize(
    ("name", "expected"), [("agent", "agent"), ("a/b c", "a_b_c"), ("../x", "_x"), ("..", "backend"), ("ä.1", "_.1")]
)
def test_file_names(name: str, expected: str) -> None:
    """A backend's name cannot lead out of the run folder."""
    assert file_name(name) == expected


def run(work: Awaitable[None]) -> None:
    async def main() -> None:
        await asyncio.wait_for(work, 20)

    asyncio.run(main())


async def _settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_admission_is_fair() -> None:
    """Shared tests run together; one that is alone waits for them, and those that come later wait for it."""

    async def work() -> None:
        admission = Admission()
        one, two = await admission.enter(1, False), await admission.enter(2, False)
        alone = asyncio.ensure_future(admission.enter(3, True))
        later = asyncio.ensure_future(admission.enter(4, False))
        await _settle()
        admission.leave(one)
        await _settle()
        assert not alone.done()
        admission.leave(two)
        await _settle()
        assert alone.done()
        assert not later.done()
        admission.leave(alone.result())
        await _settle()
        assert later.done()

    run(work())


def test_admission_of_those_who_give_up() -> None:
    """Whoever goes away while it waits, or as it is admitted, does not hold up the others."""

    async def work() -> None:
        admission = Admission()
        first = await admission.enter(1, True)
        waiting = asyncio.ensure_future(admission.enter(2, True))
        later = asyncio.ensure_future(admission.enter(3, False))
        await _settle()
        waiting.cancel()
        admission.leave(first)
        await _settle()
        assert later.done()
        admission.leave(later.result())
        held = await admission.enter(4, True)
        admitted = asyncio.ensure_future(admission.enter(5, True))
        await _settle()
        admission.leave(held)  # admits it, and in the same moment it gives up
        admitted.cancel()
        await _settle()
        assert await admission.enter(6, True)

    run(work())


def test_admission_of_nested_tests() -> None:
    """A test inside a test of the same process does not wait for the outer one."""

    async def work() -> None:
        admission = Admission()
        await admission.enter(1, True)
        await asyncio.wait_for(admission.enter(1, False), 5)

    run(work())


def test_turns_in_order() -> None:
    """Turns come in the order of asking; one that waits too long gives up and is passed over."""

    async def work() -> None:
        turns = Turns()
        await turns.take(5)
        impatient = asyncio.ensure_future(turns.take(0.01))
        second = asyncio.ensure_future(turns.take(5))
        third = asyncio.ensure_future(turns.take(5))
        with pytest.raises(RequestTimeout, match=r"did not come within 0.01 s"):
            await impatient
        turns.release()
        await second
        assert not third.done()
        third.cancel()
        await _settle()
        turns.release()
        await turns.take(5)
        waiting = asyncio.ensure_future(turns.take(5))
        await _settle()
        turns.died("it died")
        with pytest.raises(BackendDied, match="it died"):
            await waiting
        with pytest.raises(BackendDied, match="it died"):
            await turns.take(5)

    run(work())


@pytest.mark.parametrize("with_pidfd", [True, False])
def test_watching_a_process(with_pidfd: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of a process is noticed once, also on kernels without pidfd; a reused PID is not taken for it."""

    def refused(pid: int, flags: int = 0) -> int:
        raise OSError(38, "Function not implemented")

    if not with_pidfd:
        monkeypatch.setattr(os, "pidfd_open", refused)

    async def work() -> None:
        ended = asyncio.Event()
        with subprocess.Popen(["sleep", "60"]) as process:
            start = procfs.start_time(process.pid)
            Watch(process.pid, start, ended.set)
            cancelled = Watch(process.pid, start, lambda: pytest.fail("it was cancelled"))
            cancelled.cancel()
            other = asyncio.Event()
            Watch(process.pid, start + 1, other.set)
            await asyncio.wait_for(other.wait(), 10)
            assert not ended.is_set()
            process.kill()
            await asyncio.wait_for(ended.wait(), 10)

    run(work())


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (b"HTTP/1.1 200 OK\r\n\r\n", 200),
        (b"HTTP/1.0 503 \r\n\r\n", 503),
        (b"SSH-2.0\r\n", "the answer is not HTTP"),
        (b"", "the connection was closed without an answer"),
    ],
)
def test_health(answer: bytes, expected: int | str) -> None:
    """A status code, or why there is none."""
    heads: list[bytes] = []

    answered: list[asyncio.Task[None] | None] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answered.append(asyncio.current_task())
        try:
            heads.append(await reader.readuntil(b"\r\n\r\n"))
            writer.write(answer)
            await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # somebody who only wanted to know whether anybody is there
        finally:
            writer.close()

    async def work() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        assert await health.get(url + "/health?x=1", key="abc") == expected
        assert await health.connects(url)
        server.close()
        await server.wait_closed()
        refused = await health.get(url)
        assert isinstance(refused, str)
        assert not await health.connects(url)
        await asyncio.wait_for(asyncio.gather(*(task for task in answered if task is not None)), 10)

    run(work())
    assert heads[0].startswith(b"GET /health?x=1 HTTP/1.1\r\n")
    assert b"Authorization: Bearer abc\r\n" in heads[0]


def test_health_without_an_answer() -> None:
    """A server that never answers is given up."""

    async def work() -> None:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read()
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        assert await health.get(url, timeout=0.05) == "no answer within 0.05 s"
        await _settle()
        server.close()
        await server.wait_closed()

    run(work())


@pytest.mark.parametrize("url", ["ftp://x", "http://", "127.0.0.1:80", ""])
def test_addresses_that_are_none(url: str) -> None:
    """What is no http URL is refused."""
    with pytest.raises(ValueError, match="is not an http"):
        health.address(url)


def test_the_package_is_light() -> None:
    """Importing the keeper's package imports neither msgspec nor asyncio, because the guard does so too."""
    import sys

    code = "import pytest_vram.keeper.parents, sys; print([m for m in ('msgspec', 'asyncio', 'httpx') if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ)
    assert found.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("command", "names"),
    [
        ("/usr/bin/python3.11 -u /srv/serve.py --port 1", ["python3.11", "serve.py"]),
        ("/opt/ollama serve", ["ollama"]),
        ("vim serve.py", ["vim"]),
        ("bash -c", ["bash"]),
        ("", []),
    ],
)
def test_names_of_a_program(command: str, names: list[str]) -> None:
    """A process goes by its program's file name, and by its script's; a file that an editor has open is no name."""
    assert _program_names(command.split()) == names


def test_sockets_of_dead_keepers_are_removed(tmp_path: Path) -> None:
    """A socket that nobody listens on is removed once it is old; a busy one, a young one and other files stay."""
    for name in ("dead", "young", "busy"):
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(str(tmp_path / f"{name}.sock"))
    (tmp_path / "other").write_text("")
    (tmp_path / "file.sock").write_text("")
    (tmp_path / "busy.sock").unlink()
    with socket.socket(socket.AF_UNIX) as busy:
        busy.bind(str(tmp_path / "busy.sock"))
        busy.listen(1)
        for name in ("dead", "busy", "file"):
            os.utime(tmp_path / f"{name}.sock", (1, 1))
        assert remove_stale(tmp_path) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["busy.sock", "other", "young.sock"]
    assert remove_stale(tmp_path / "none") == 0


def test_a_full_disk_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk without space is told from one with it, and from a file that is not there."""
    assert not disk_full(tmp_path)
    assert not disk_full(tmp_path / "none")
    real = os.statvfs(tmp_path)
    full = os.statvfs_result([*real[:3], 0, 0, *real[5:]])
    monkeypatch.setattr(os, "statvfs", lambda path: full)
    assert disk_full(tmp_path)


def test_equal_plans_have_one_key() -> None:
    """A plan is the same server before and after it travelled, whole numbers of seconds included."""
    plan = LaunchPlan(name="a", engine="command", argv=["x"], boot_timeout=30, stop_grace=5)
    there = wire.request(wire.frame(Acquire(plan=plan))[4:])
    assert isinstance(there, Acquire)
    assert there.plan.key == plan.key == LaunchPlan(name="a", engine="command", argv=["x"], boot_timeout=30.0).key
    assert plan.key != LaunchPlan(name="a", engine="command", argv=["x"], boot_timeout=31).key


def test_the_end_of_a_journal(tmp_path: Path) -> None:
    """Nothing comes after the line that ends it, which says whether the controller has ended the run."""
    path = tmp_path / "journal.jsonl"
    assert not ended_in_order(path)
    for outcome, in_order in (("", False), ("0", True)):
        writer = Writer(path)
        writer.write(1, "note", {"text": "x" * 9000})
        writer.write(2, "end", {"outcome": outcome, "reason": "r"})
        writer.write(3, "sample", {"device": "gpu0"})
        writer.close()
        assert [line["kind"] for line in Journal(path)][-1] == "end"
        assert ended_in_order(path) is in_order
    path.unlink()
    path.symlink_to("/dev/zero")
    assert not ended_in_order(path)
