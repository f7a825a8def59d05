"""What can be given to the boot-log reader, and logs of engines without a grammar."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_vram.bootlog import Follower, read
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
    """Text that no file could be named after is read, or refused, but never crashes."""
    if "\0" in junk or not junk.strip():
        with pytest.raises(BadInput):
            read(junk)
    else:
        assert read(junk).evidence == "none"


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
