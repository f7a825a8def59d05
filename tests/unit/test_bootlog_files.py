"""Boot logs as they lie on disk: packed, in UTF-16, without an end, growing, of several boots, and of other programs."""

from __future__ import annotations

import gzip
import io
import os
import re
import shutil
import stat
import tempfile
import tracemalloc
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_vram.bootlog import Boot, Follower, files, read, read_stream
from pytest_vram.bootlog.boot import Phase
from pytest_vram.bootlog.boots import Boots
from pytest_vram.bootlog.files import log_of_text, opened
from pytest_vram.bootlog.grammar import recognise
from pytest_vram.bootlog.scanning import hand_over
from pytest_vram.bootlog.sieve import Sieve, phrases_of
from pytest_vram.bootlog.tailing import Tail
from pytest_vram.errors import BadInput

MIB = 1 << 20
BOOT = """build: 6100 (abcdef0) with cc 13 for x86_64-linux-gnu
load_tensors: loading model tensors, this can take a while... (mmap = true)
load_tensors:        CUDA0 model buffer size =    64.00 MiB
llama_context: constructing llama_context
llama_kv_cache:      CUDA0 KV buffer size =    32.00 MiB
sched_reserve: reserving ...
sched_reserve:      CUDA0 compute buffer size =    16.00 MiB
main: model loaded
main: server is listening on http://127.0.0.1:8080 - starting the main loop
"""
LEDGER = {"weights": {"gpu0": 64 * MIB}, "kv": {"gpu0": 32 * MIB}, "compute": {"gpu0": 16 * MIB}}
SMALLER = BOOT.replace("   64.00", "   48.00")


def as_file(tmp_path: Path, content: bytes) -> Path:
    path = tmp_path / "boot.log"
    path.write_bytes(content)
    return path


# ---------------------------------------------------------------- how it is written


@pytest.mark.parametrize(
    "written",
    [
        lambda text: text.encode(),
        lambda text: b"\xef\xbb\xbf" + text.encode(),
        lambda text: text.encode("utf-16"),
        lambda text: b"\xfe\xff" + text.encode("utf-16-be"),
        lambda text: text.encode("utf-16-le"),
        lambda text: text.encode("utf-16-be"),
        lambda text: text.encode("utf-16-le")[1:],
        lambda text: text.encode("utf-32"),
        lambda text: b"\0\0\xfe\xff" + text.encode("utf-32-be"),
        lambda text: text.encode("utf-32-le"),
        lambda text: text.encode("utf-32-be"),
        lambda text: text.replace("\n", "\r").encode(),
        lambda text: text.replace("\n", "\r").encode("utf-16"),
        lambda text: text.replace("\n", "\r\n").encode("utf-16"),
        lambda text: gzip.compress(text.encode()),
        lambda text: gzip.compress(text.encode("utf-16")),
        lambda text: text.rstrip("\n").encode(),
        lambda text: b"\0" * 5000 + text.encode() + b"\0" * 5000,
        lambda text: b"\xfd\xc3\0\n" + text.encode() + b"\xc3\n",
    ],
)
def test_encodings(tmp_path: Path, written: Callable[[str], bytes]) -> None:
    """A log in UTF-8, UTF-16 or UTF-32, with or without a mark, packed, with carriage returns alone, without a last line
    end or with stray bytes reads the same; also from a pipe."""
    content = written(BOOT)
    assert read(as_file(tmp_path, content)).ledger().buckets() == LEDGER
    assert read_stream(io.BytesIO(content), "standard input").ledger().buckets() == LEDGER


def test_packed_log_that_was_cut(tmp_path: Path) -> None:
    """A packed log without its end is read up to there, and a warning says so; one without a line is refused."""
    text = BOOT + "".join(f"{number} {os.urandom(8).hex()}\n" for number in range(2000))
    content = gzip.compress(text.encode())
    boot = read(as_file(tmp_path, content[: len(content) // 2]))
    assert boot.ledger().buckets() == LEDGER
    assert "was cut after it was packed" in boot.warnings[0]
    with pytest.raises(BadInput, match="was cut after it was packed"):
        read(as_file(tmp_path, content[:12]))


def test_packed_log_has_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A few KB that unpack to very much are read up to a limit, which a warning says."""
    monkeypatch.setattr(files, "MOST_UNPACKED", 3 << 20)
    content = gzip.compress((BOOT + "x\n" * (4 << 20)).encode())
    boot = read(as_file(tmp_path, content))
    assert boot.ledger().buckets() == LEDGER
    assert "unpacks to over 3.00 MiB" in boot.warnings[0]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"\x28\xb5\x2f\xfd1234", "is packed by zstd: unpack it first"),
        (b"\xfd7zXZ\x001234", "is packed by xz"),
        (b"BZh91AY", "is packed by bzip2"),
        (b"PK\x03\x04abc", "is packed by zip"),
        (b"\x7fELF\x02\x01\x01" + b"\0" * 400, "is not a text"),
        (b"\0" * 4096, "is not a text"),
        (b"\0\xff" * 5000, "is not a text"),
        (os.urandom(4096), "is not a text"),
        (b"", "is empty"),
        (b"\r\n \t\n", "is empty"),
        (gzip.compress(b"", mtime=0), "is empty"),
    ],
)
def test_what_is_no_log(tmp_path: Path, content: bytes, words: str) -> None:
    """Junk, archives and empty files are refused in one sentence that names the file."""
    path = as_file(tmp_path, content)
    with pytest.raises(BadInput, match=words) as caught:
        read(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no FIFO here")
def test_pipes_and_devices_are_no_files(tmp_path: Path) -> None:
    """A FIFO would block for ever and a device never end: both are refused, with the way on."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    for path in (fifo, Path("/dev/zero")):
        with pytest.raises(BadInput, match="device or a pipe.*reads standard input"):
            read(path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no FIFO here")
def test_files_that_wait_are_read_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some files of the kernel have no size, wait for what comes next, and are read once only: nothing is waited for."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    monkeypatch.setattr(stat, "S_ISREG", lambda mode: True)  # as /proc/kmsg says of itself
    held = os.open(fifo, os.O_RDWR)
    try:
        with pytest.raises(BadInput, match="is empty"):
            read(fifo)
        os.write(held, BOOT.encode())
        assert read(fifo).ledger().buckets() == LEDGER
        with pytest.raises(BadInput, match="cannot be read: .* not seekable"):
            Tail(fifo)
    finally:
        os.close(held)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="no files of a kernel here")
def test_files_of_the_kernel() -> None:
    """What has no size is read, or refused in one sentence."""
    with pytest.raises(BadInput, match="no engine that is known"):
        read(Path("/proc/self/status"))
    with pytest.raises(BadInput, match="/proc/self/mem cannot be read: "):
        read(Path("/proc/self/mem"))


def test_stream_without_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a stream that never ends, a part is read, which a warning says."""

    given = 0

    class Endless(io.RawIOBase):
        def readable(self) -> bool:
            return True

        def read(self, size: int = -1) -> bytes:
            nonlocal given
            given += size
            return (BOOT.encode() if given == size else b"").ljust(size, b"\n")

    monkeypatch.setattr(files, "BLOCK", 4096)
    with files.spooled(Endless(), "standard input", 10_000) as log:  # type: ignore[arg-type]
        assert sum(map(len, log.blocks())) == given == 10_000
        assert log.notes == ["standard input goes on after 10,000 bytes, of which no more was read"]


def test_stream_leaves_half_of_the_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream without an end never fills the disk."""
    room = shutil.disk_usage(tempfile.gettempdir())._replace(free=4 << 20)
    monkeypatch.setattr(shutil, "disk_usage", lambda where: room)
    boot = read_stream(io.BytesIO(BOOT.encode() + b"\n" * (5 << 20)), "standard input")
    assert boot.ledger().buckets() == LEDGER
    assert boot.warnings == ("standard input goes on after 2.00 MiB, of which no more was read",)


def test_stream_that_cannot_be_kept_or_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """No room for a stream, or an error in it, is one sentence."""

    class Broken(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            raise OSError(5, "Input/output error")

    with pytest.raises(BadInput, match="^standard input cannot be read: Input/output error$"):
        read_stream(Broken(), "standard input")

    def full() -> io.BytesIO:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    with pytest.raises(BadInput, match="kept in .* while it is read: No space left on device; .*TMPDIR"):
        read_stream(io.BytesIO(BOOT.encode()), "standard input")


NGINX = '10.0.0.1 - - [30/Nov/2026:10:00:00 +0000] "GET /v1/models HTTP/1.1" 200 12 "-" "curl/8"\n' * 50
DMESG = "[    0.000000] Linux version 6.1.0\n[    1.234567] nvidia: loading out-of-tree module taints kernel.\n"
PROGRAM = 'INFO:root:hello\nTraceback (most recent call last):\n  File "a.py", line 1\nMemoryError\n'


@pytest.mark.parametrize("text", [NGINX, DMESG, PROGRAM, "hello\n"])
def test_logs_of_other_programs(text: str) -> None:
    """A log of another program is refused; the message names the engines that are known, and the option."""
    with pytest.raises(BadInput, match=r"no engine that is known here \(llama-server, .*vllm.*name it with --engine"):
        read(text)
    assert read(text, engine="llama-server").evidence == "none"


def test_engine_that_shows_late(tmp_path: Path) -> None:
    """An engine that is only recognised after megabytes of other lines is found all the same."""
    boot = read(as_file(tmp_path, (NGINX * 800 + BOOT).encode()))
    assert boot.engine == "llama-server"
    assert boot.ledger().buckets() == LEDGER


@pytest.mark.parametrize(
    ("line", "engine"),
    [
        ('time=2026-05-05T01:30:33.796+08:00 level=INFO source=device.go:240 msg="model weights" device=CUDA0', "ollama"),
        ("Oct 13 12:00:00 host ollama[123]: llama_kv_cache: CUDA0 KV buffer size = 1.00 MiB", "ollama"),
        ("llama_model_loader: - kv 0: general.name str = vllm", "llama-server"),
        ("print_info: file = /root/.ollama/models/blobs/sha256-12", None),
        ("0.00.026.362 I srv  log_server_r: request: what does source=sched.go:12 in Ollama mean?", "llama-server"),
        ("(EngineCore_DP0 pid=1) INFO 11-20 10:00:00 [gpu_worker.py:12] Available KV cache memory: 1 GiB", "vllm"),
        ("[2026-06-08 12:00:00 TP0] Load weight begin. avail mem=20.00 GB", "sglang"),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB", "transformers"),
        ("[rank0]: ggml_cuda_init: found 1 CUDA devices", "llama-server"),
    ],
)  # fmt: skip
def test_recognition(line: str, engine: str | None) -> None:
    """The more specific engine is recognised, by its own words and not by what others say of it."""
    assert recognise(line) == engine


# ---------------------------------------------------------------- several boots


def test_last_boot_counts(tmp_path: Path) -> None:
    """Of a log with several boots the last one is read, their number is said, and lines keep their numbers."""
    boot = read(as_file(tmp_path, (BOOT * 3 + SMALLER).encode()))
    assert boot.boots == 4
    assert boot.warnings[0] == "the log holds 4 boots: this is the last one"
    assert boot.ledger().buckets() == {**LEDGER, "weights": {"gpu0": 48 * MIB}}
    assert boot.phases[0].line == 28


def test_boot_that_was_begun_again_at_once() -> None:
    """A process that ended before it said anything is no boot of its own."""
    first = BOOT.splitlines()[0]
    assert read(f"{first}\n{first}\n{BOOT}").boots == 1


def test_failure_of_an_earlier_boot_is_over() -> None:
    """A server that ran out of memory, and was started again with less, did not fail."""
    failed = "\n".join([*BOOT.splitlines()[:4], "failed to allocate buffer for kv cache"])
    boot = read(f"{failed}\n{BOOT}")
    assert (boot.failure, boot.ready, boot.boots) == (None, True, 2)
    assert read(f"{BOOT}{failed}\n").failure is not None


def test_first_line_inside_of_a_request_is_no_boot() -> None:
    """In a log with prefixes a first line without one is somebody's text."""
    lines = [f"0.00.00{number}.000 I {line}" for number, line in enumerate(BOOT.splitlines())]
    boot = read("\n".join([*lines, BOOT.splitlines()[0], "hello"]))
    assert (boot.boots, boot.ready) == (1, True)


def test_follower_sees_the_next_boot() -> None:
    """Whoever follows a log is told that a boot begins anew."""
    follower = Follower("llama-server")
    begun = [phase for line in (BOOT * 2).splitlines() if (phase := follower.feed(line))]
    assert begun == ["start", "weights", "kv", "reserve", "ready"] * 2 or begun.count("weights") == 2
    assert follower.boot().boots == 2


# ---------------------------------------------------------------- lines that matter


class Recorded:
    """Takes lines, and keeps them."""

    def __init__(self, words: re.Pattern[str] | None, noise: re.Pattern[str] | None = None) -> None:
        self.words, self.noise = words, noise
        self.lines: list[tuple[int, str]] = []
        self.count = 0

    def skip(self, lines: int) -> None:
        assert lines > 0
        self.count += lines

    def feed(self, raw: str) -> Phase | None:
        self.count += 1
        self.lines.append((self.count, raw))
        return None


PHRASES = ["buffer size", "ab", "a.b", "x|y", "é", "(c)"]
PATTERNS = [
    re.compile("|".join(map(re.escape, PHRASES))),
    re.compile("buffer size|ab|é"),
    re.compile(r"b(?:uffer\ size|\ )|x(?:\||b)|é"),
    re.compile(r"buffer (?:size|of)|a.b", re.ASCII),
    re.compile(r"^a|b$|\bx", re.ASCII),
    re.compile(r"BUFFER|é+", re.IGNORECASE),
    None,
]
PARTS = ["buffer size", "ab", "a.b", "xb", "x|y", "é", "(c)", " ", "\r", "\0"]
LINES = st.lists(st.lists(st.sampled_from(PARTS), max_size=3).map("".join), max_size=12)


@settings(max_examples=200, deadline=None)
@given(
    lines=LINES,
    words=st.sampled_from(PATTERNS),
    noise=st.sampled_from([None, re.compile("a|[xy]b", re.ASCII)]),
    cut=st.integers(1, 40),
    end=st.booleans(),
)
def test_lines_that_are_fed(
    lines: list[str], words: re.Pattern[str] | None, noise: re.Pattern[str] | None, cut: int, end: bool
) -> None:
    """Each line with a word is fed, once, in order and under its number, however the blocks fall, and so is the first;
    of lines of noise in a row, the first one is enough."""
    text = "\n".join(lines) + "\n" * end
    taken, every = Recorded(words, noise), Recorded(None)
    hand_over(in_blocks(text.encode(), cut), taken)
    hand_over(in_blocks(text.encode(), cut), every)
    wanted = [(n, line) for n, line in every.lines if n == 1 or words is None or words.search(line)]
    if words is not None and noise is not None:
        repeated = [n + 1 for n, line in every.lines if noise.match(line)]
        wanted = [(n, line) for n, line in wanted if not (n in repeated and noise.match(line))]
    assert [row for row in taken.lines if row in wanted] == wanted
    assert all(row in every.lines for row in taken.lines)
    assert taken.count == every.count


SMALL = st.text("aeé MB\\n", min_size=1, max_size=7).map(str.encode)


@settings(max_examples=60, deadline=None)
@given(phrases=st.sets(SMALL, min_size=1, max_size=40), parts=st.lists(SMALL, max_size=40), end=st.booleans())
def test_sieve(phrases: set[bytes], parts: list[bytes], end: bool) -> None:
    """However many phrases there are, and however much they have in common, the lines with one are found, and no other."""
    block = b"".join(parts) + b"\n" * end
    wanted, at = [], 0
    for line in block.split(b"\n"):
        if any(phrase in line for phrase in phrases):
            wanted.append(at)
        at += len(line) + 1
    assert Sieve(phrases).lines(block) == wanted


@pytest.mark.parametrize(
    ("pattern", "phrases"),
    [
        ("a|bc|é", ["a", "bc", "é"]),
        (r"a(?:b|c\ d)|\(e", ["(e", "ab", "ac d"]),
        ("x(?:a(?:b|c)|d)y|xaby|z xdy", ["xaby", "xacy", "xdy"]),
        ("a|b?", None),
        ("a|", None),
        (r"a\d", None),
        ("(?i:a)", None),
        ("(?:a|b)" * 40, None),
    ],
)
def test_phrases_of_a_pattern(pattern: str, phrases: list[str] | None) -> None:
    """Of a pattern of plain alternatives all phrases are known, without those that hold another; of others none."""
    found = phrases_of(re.compile(pattern))
    assert found == (None if phrases is None else tuple(phrase.encode() for phrase in phrases))


def test_engines_have_plain_phrases() -> None:
    """The words of engines with long logs are plain phrases, since other patterns cost ten times as much."""
    for engine in ("llama-server", "ik_llama", "koboldcpp", "ollama", "vllm", "sglang"):
        words = Boots(engine, {}).words
        assert words is not None
        assert phrases_of(words) is not None, engine


def in_blocks(data: bytes, lines: int) -> Iterable[bytes]:
    parts = data.split(b"\n")
    rows = [part + b"\n" for part in parts[:-1]] + ([parts[-1]] if parts[-1] else [])
    for at in range(0, len(rows), lines):
        yield b"".join(rows[at : at + lines])


def test_words_leave_most_lines_out() -> None:
    """Lines without a word never reach a grammar that has words."""
    taken = Recorded(re.compile("buffer size"))
    hand_over([b"first\n" + b"nothing\n" * 1000 + b"a buffer size\n" + b"nothing\n" * 1000], taken)
    assert taken.lines == [(1, "first"), (1002, "a buffer size")]
    assert taken.count == 2002


def test_rows_of_noise_say_once_what_they_say() -> None:
    """A server that goes on with a long prompt did not fail, however many lines of a row are left out."""
    lines = [f"0.00.00{number}.000 I {line}" for number, line in enumerate(BOOT.splitlines())]
    progress = "0.03.041.783 I slot update_slots: id  0 | task 0 | prompt processing progress, n_tokens = 2048"
    asked = ["0.02.000.000 I slot launch_slot_: id  0 | task 0 | processing task", "CUDA error: out of memory"]
    text = "\n".join([*lines, *asked, *[progress] * 2000])
    boots, every = Boots("llama-server", {}), Boots("llama-server", {})
    every.words = None
    for reader in (boots, every):
        hand_over(log_of_text(text).blocks(), reader)
    assert boots.boot() == every.boot()
    assert boots.boot().failure is None
    taken = Recorded(boots.words, boots.noise)
    hand_over(log_of_text(text).blocks(), taken)
    assert len(taken.lines) < 20


def test_huge_lines_take_little_memory(tmp_path: Path) -> None:
    """A line of 60 MB is no more than its beginning, and the lines after it are read."""
    path = tmp_path / "boot.log"
    with path.open("w", encoding="utf-8") as stream:
        stream.write(BOOT.splitlines()[0] + "\nhuge: ")
        for _ in range(60):
            stream.write("x" * (1 << 20))
        stream.write("\n" + BOOT)
    tracemalloc.start()
    try:
        boot = read(path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert boot.ledger().buckets() == LEDGER
    assert peak < 12 << 20


def test_blocks_are_whole_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However small the blocks are, a log reads the same."""
    monkeypatch.setattr(files, "BLOCK", 7)
    with opened(as_file(tmp_path, BOOT.encode())) as log:
        blocks = list(log.blocks())
    assert all(block.endswith(b"\n") for block in blocks)
    assert b"".join(blocks) == BOOT.encode()


def test_boots_count_lines_that_were_left_out() -> None:
    """The number of a line is its number in the file, whatever was left out before it."""
    boots = Boots("llama-server", {})
    boots.skip(100)
    hand_over(log_of_text(BOOT).blocks(), boots)
    assert [span.line for span in boots.boot().phases[:2]] == [101, 102]


# ---------------------------------------------------------------- growing


def test_tail_gives_finished_lines(tmp_path: Path) -> None:
    """A line is given once it is whole."""
    path = as_file(tmp_path, b"one\ntw")
    with Tail(path) as tail, path.open("ab") as stream:
        assert tail.lines() == ["one"]
        assert tail.lines() == []
        stream.write(b"o\nthree\n\xc3")
        stream.flush()
        assert tail.lines() == ["two", "three"]
        stream.write(b"\xa9")
        stream.flush()
        assert tail.lines() == []
        assert tail.rest() == ["é"]
        assert tail.rest() == []


def test_tail_survives_truncation_and_rotation(tmp_path: Path) -> None:
    """A file that was emptied, or whose name went to another one, is read from its beginning."""
    path = as_file(tmp_path, b"one\ntwo\n")
    with Tail(path) as tail:
        assert tail.lines() == ["one", "two"]
        path.write_bytes(b"3\n")
        assert tail.lines() == ["3"]
        path.rename(tmp_path / "boot.log.1")
        assert tail.lines() == []
        path.write_bytes(b"four\n")
        assert tail.lines() == ["four"]
        assert tail.fresh == 2
        (tmp_path / "boot.log.1").write_bytes(b"old\nolder\n")
        assert tail.lines() == []


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no FIFO here")
@pytest.mark.parametrize(("become", "words"), [("mkdir", "is a folder"), ("mkfifo", "device or a pipe")])
def test_tail_of_what_is_no_file_any_more(tmp_path: Path, become: str, words: str) -> None:
    """A folder or a pipe in the place of a log is no log that begins anew, and nothing to wait for."""
    path = as_file(tmp_path, b"one\n")
    with Tail(path) as tail:
        assert tail.lines() == ["one"]
        path.unlink()
        assert tail.lines() == []
        getattr(os, become)(path)
        with pytest.raises(BadInput, match=words):
            tail.lines()


def test_tail_reads_what_powershell_writes(tmp_path: Path) -> None:
    """UTF-16 is told by the file's first bytes, and halves of characters wait for the rest."""
    path = as_file(tmp_path, "one\ntwo\n".encode("utf-16")[:-1])
    with Tail(path) as tail:
        assert tail.lines() == ["one"]
        with path.open("ab") as stream:
            stream.write(b"\0")
        assert tail.lines() == ["two"]


def test_tail_of_lines_that_end_with_carriage_returns(tmp_path: Path) -> None:
    """Carriage returns end lines as long as a file has no other ends; one before a line feed is none of its own."""
    path = as_file(tmp_path, b"one\rtwo\rthr")
    with Tail(path) as tail, path.open("ab", buffering=0) as stream:
        assert tail.lines() == ["one", "two"]
        stream.write(b"ee\r")
        assert tail.lines() == []
        stream.write(b"\nfour\rfive\n")
        assert tail.lines() == ["three\r", "four\rfive"]


@pytest.mark.parametrize(
    ("content", "words"), [(gzip.compress(b"x", mtime=0), "packed by gzip.*leave out --follow"), (None, "No such file")]
)
def test_tail_of_what_does_not_grow(tmp_path: Path, content: bytes | None, words: str) -> None:
    """A packed file is not being written, and a missing one has nothing to follow."""
    path = tmp_path / "boot.log"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(BadInput, match=words):
        Tail(path)


def test_tail_keeps_little_of_a_line_without_end(tmp_path: Path) -> None:
    """A line that never ends fills no memory."""
    path = as_file(tmp_path, b"x" * (5 << 20))
    with Tail(path) as tail:
        assert [tail.lines() for _ in range(6)] == [[]] * 6
        assert len(tail.rest()[0]) == files.LONGEST_LINE


def test_result_is_a_boot() -> None:
    """A stream is read as a file is."""
    assert isinstance(read_stream(io.BytesIO(BOOT.encode()), "standard input", engine="llama-server"), Boot)
    with pytest.raises(BadInput, match="standard input is empty"):
        read_stream(io.BytesIO(b""), "standard input")
