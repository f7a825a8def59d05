"""What can be given to the boot-log reader, and logs of engines without a grammar."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from pytest_vram.bootlog import Boot, Follower, generic, patience, read, read_own
from pytest_vram.errors import BadInput

MIB = 1 << 20


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty"),
        (b" \n\n", "is empty"),
        (b"GGUF\x00\x00\x03", "is not a text"),
        (bytes(range(128, 256)) * 20, "is not a text"),
    ],
)
def test_not_a_log(tmp_path: Path, content: bytes, words: str) -> None:
    """An empty or binary file is refused with its name."""
    path = tmp_path / "boot.log"
    path.write_bytes(content)
    with pytest.raises(BadInput, match=words) as caught:
        read(path)
    assert str(path) in str(caught.value)


def test_folder(tmp_path: Path) -> None:
    """A folder is refused as such."""
    with pytest.raises(BadInput, match="is a folder"):
        read(tmp_path)
    with pytest.raises(BadInput, match="is a folder"):
        read(str(tmp_path))


def test_missing_file(tmp_path: Path) -> None:
    """A path that does not exist says so; a string that is no path is text."""
    with pytest.raises(BadInput, match="cannot be read: No such file"):
        read(tmp_path / "none.log")
    assert read("error: invalid argument: --foo").failure is not None


@pytest.mark.parametrize("junk", ["x" * 10_000, "a\0b", "\n" * 3])
def test_text_that_is_no_path(junk: str) -> None:
    """Text that no file could be named after is read where its engine is named, or refused, but never crashes."""
    if "\0" in junk or not junk.strip():
        with pytest.raises(BadInput):
            read(junk)
    else:
        with pytest.raises(BadInput, match="log of no engine that is known here"):
            read(junk)
        assert read(junk, engine="llama-server").evidence == "none"


def test_windows_line_ends(tmp_path: Path) -> None:
    """Carriage returns do not hide lines."""
    path = tmp_path / "boot.log"
    path.write_bytes(b"loading model tensors\r\nload_tensors: CUDA0 model buffer size = 1.00 MiB\r\n")
    assert read(path).ledger().buckets() == {"weights": {"gpu0": MIB}}


PATTERNS = {
    "weights": r"weights on (?P<device>\S+): (?P<weights_gib>[\d.]+) GiB",
    "kv": r"cache: (?P<kv_mib>\d+)",
    "ready": r"up and running",
}


def test_user_patterns() -> None:
    """An engine without a grammar is read with the user's patterns and named groups."""
    boot = read("boot\nweights on CUDA0: 1.5 GiB\ncache: 64\nup and running\n", engine="command", patterns=PATTERNS)
    assert [span.name for span in boot.phases] == ["start", "weights", "kv", "ready"]
    assert boot.ledger().buckets() == {"weights": {"gpu0": 1536 * MIB}, "kv": {"gpu0": 64 * MIB}}
    assert boot.devices == {"gpu0": "CUDA0"}
    assert (boot.evidence, boot.ready) == ("partial", True)


def test_without_patterns() -> None:
    """An engine without a grammar and without patterns is no evidence."""
    boot = read("hello\nworld\n", engine="other")
    assert (boot.engine, boot.evidence, boot.entries) == ("other", "none", ())


def test_follower_with_patterns() -> None:
    """A phase begins at the first line that its pattern matches, once."""
    follower = Follower("command", PATTERNS)
    lines = ["boot", "cache: 1", "cache: 2", "up and running", "up and running"]
    assert [follower.feed(line) for line in lines] == ["start", "kv", None, "ready", None]


@pytest.mark.parametrize(
    ("phase", "pattern", "words"), [("kv", "(", "not a regular expression"), ("boot", "x", "unknown phase")]
)
def test_bad_pattern(phase: str, pattern: str, words: str) -> None:
    """A pattern that cannot be used names its phase."""
    with pytest.raises(BadInput, match=words) as caught:
        Follower("command", {phase: pattern})
    assert repr(phase) in str(caught.value)


def test_first_line_can_begin_a_phase() -> None:
    """Where the very first line begins a phase, that phase is announced."""
    assert Follower("command", {"ready": "up"}).feed("up") == "ready"


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Less patience than a test has."""
    monkeypatch.setattr(generic, "Limited", lambda: patience.Limited(0.02))


@pytest.mark.usefixtures("impatient")
def test_pattern_that_backtracks_is_given_up() -> None:
    """A pattern that would take years on one line ends within its limit, is named, and the others go on."""
    before = signal.getsignal(signal.SIGVTALRM)
    follower = Follower("command", {"kv": "(a+)+$", "weights": "w", "ready": "up"})
    lines = ["hello", "a" * 60 + "!", "w", "aaa", "a" * 60 + "!"]
    assert [follower.feed(line) for line in lines] == ["start", None, "weights", None, None]
    failure = follower.boot().failure
    assert failure is not None
    assert failure.kind == "bad_pattern"
    assert "'(a+)+$' for 'kv' in `log_patterns`" in failure.text
    assert follower.feed("up") == "ready"
    boot = follower.boot()
    assert (boot.failure, boot.ready) == (None, True)
    assert "(a+)+$" in boot.warnings[0]
    assert signal.getsignal(signal.SIGVTALRM) is before
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0, 0)


def test_patience_leaves_other_threads_and_timers_alone() -> None:
    """Where the timer cannot be had, or is somebody else's, patterns are matched without a limit."""
    seen: list[str | None] = []
    thread = threading.Thread(target=lambda: seen.append(Follower("command", {"ready": "up"}).feed("up")))
    thread.start()
    thread.join(10)
    assert seen == ["ready"]
    signal.setitimer(signal.ITIMER_VIRTUAL, 1000.0)
    try:
        assert Follower("command", {"ready": "up"}).feed("up") == "ready"
        assert signal.getitimer(signal.ITIMER_VIRTUAL)[0] > 0
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)


# ---------------------------------------------------------------- logs of this run's own servers

BUFFERS = b"loading model tensors\nload_tensors: CUDA0 model buffer size = 1.00 MiB\n"


@pytest.mark.parametrize("reader", [read, read_own])
def test_holes_of_a_huge_log_are_no_lines(tmp_path: Path, reader: Callable[..., Boot]) -> None:
    """Zeros before, between and after lines, as in a log that was emptied under its server, hide nothing."""
    path = tmp_path / "boot.log"
    with path.open("wb") as stream:
        stream.truncate(200 << 20)
        stream.seek(0, 2)
        stream.write(BUFFERS)
        stream.truncate(stream.tell() + (100 << 20))
        stream.seek(0, 2)
        stream.write(b"\nload_tensors: CUDA1 model buffer size = 10.00 MiB")
    boot = reader(path, engine="llama-server")
    assert boot.ledger().buckets() == {"weights": {"gpu0": MIB, "gpu1": 10 * MIB}}
    assert boot.warnings == ()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "has written nothing"),
        (b" \n\n", "has written nothing"),
        (bytes(range(256)) * 400, "is mostly not text"),
        (b"\0" * 4096, "is mostly not text"),
        (None, "cannot be read: No such file"),
    ],
)
def test_own_log_without_a_word_is_no_evidence(tmp_path: Path, content: bytes | None, words: str) -> None:
    """A silent, binary or vanished log of a server is no evidence and says why; it never raises."""
    path = tmp_path / "a.1.log"
    if content is not None:
        path.write_bytes(content)
    for engine in ("llama-server", "command"):
        boot = read_own(path, engine=engine)
        assert (boot.evidence, boot.entries) == ("none", ())
        assert words in boot.warnings[0]


def test_own_log_that_is_a_folder_or_a_secret(tmp_path: Path) -> None:
    """What cannot be opened is no evidence and says why."""
    assert "is a folder" in read_own(tmp_path, engine="command").warnings[0]
    assert "cannot be read" in read_own(Path("a\0b"), engine="command").warnings[0]


def test_stray_bytes_do_not_hide_buffers(tmp_path: Path) -> None:
    """Control characters and broken UTF-8 among the lines leave the buffers readable, and stay out of the report."""
    path = tmp_path / "a.1.log"
    path.write_bytes(b"\0\xff\x1b]0;title\x07\n" + BUFFERS + b"E failed to load model \0\x1b[31m\x9bred\x07\n")
    boot = read_own(path, engine="llama-server")
    assert boot.ledger().buckets() == {"weights": {"gpu0": MIB}}
    assert boot.failure is not None
    assert boot.failure.text.isprintable()


def test_texts_for_people_are_bounded() -> None:
    """A failure that fills a screen is cut, and a thousand warnings become fifty."""
    lines = [f"warning: no usable GPU found {number}" for number in range(1000)]
    boot = read(
        "\n".join(["loading model tensors", *lines, "failed to load model " + "x" * 99_999]), engine="llama.cpp"
    )
    assert len([text for text in boot.warnings if "no usable GPU" in text]) == 50
    assert boot.failure is not None
    assert len(boot.failure.text) == 300


@pytest.mark.parametrize(
    "line", ["9" * 5000 + ".00.000.000 I hello", f"load_tensors: RPC{'9' * 5000}[h:1] model buffer size = 1.00 MiB"]
)
def test_absurd_numbers_are_no_crash(line: str) -> None:
    """A number of thousands of digits, which Python refuses to convert, is read past."""
    assert read(f"loading model tensors\n{line}\n", engine="llama-server").engine == "llama-server"
