"""The journal of a soak: one line for each turn that was answered, on the disk before the next one is asked.

Its folder has ``manifest.json``, which says what was soaked, and ``soak.jsonl``. Every line of that begins with a
checksum of the rest and has its number, so that a line which was changed, lost or moved is noticed::

    {"crc":"1c291ca3","n":7,"kind":"turn","turn":{…},"spent":12.5}

A kill leaves at most one line without its end: it was never committed, is dropped, and that is said. Anything else that
cannot be read is damage, and no soak goes on upon it.
"""

from __future__ import annotations

import contextlib
import datetime
import math
import os
import stat
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from pytest_vram.errors import BadInput, VramError
from pytest_vram.sessions.soak_lines import JSON, LOGFMT
from pytest_vram.sessions.soak_lock import FolderLock
from pytest_vram.sessions.turns import Turn
from pytest_vram.text import printable

FORMAT = "pytest-vram/soak-journal/1"
FILE_NAME = "soak.jsonl"
MANIFEST = "manifest.json"
#: The report that is saved beside the journal.
REPORT = "report.json"
#: Reasons of an end behind which no turn is asked.
KEPT = frozenset({"budget", "leak", "throughput"})
#: Bytes at the end of the structured log in which its last turn is looked for.
_TAIL = 1 << 20
#: No line is longer: a turn with its figures is some thousand bytes.
LONGEST_LINE = 16 << 20
#: Tokens or calls of one turn above which a line was made up.
_MOST_COUNTED = 1 << 40
#: `{"crc":"` … `",` around eight digits.
_BEFORE, _AFTER, _REST = 8, 16, 18


class DiskTrouble(VramError):
    """A line could not be brought to the disk; what was committed before is kept, and the soak cannot go on."""


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What is soaked. :ivar fingerprint: what must be the same for a soak to go on, as nested tables."""

    name: str
    fingerprint: dict[str, Any]
    created: str
    format: str = FORMAT


class _Line(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", omit_defaults=True):
    n: int = 0


class TurnLine(_Line, frozen=True, kw_only=True, tag="turn", omit_defaults=True):
    """A turn that is committed.

    :ivar spent: seconds of soaking so far, over all processes that took part.
    """

    turn: Turn
    spent: float


class SegmentLine(_Line, frozen=True, kw_only=True, tag="segment", omit_defaults=True):
    """A server began to serve.

    :ivar segment: from 1. :ivar first: number of the turn that is asked first. :ivar why: ``start``, ``resumed`` (the
        soak itself had ended), ``died`` (the server had).
    """

    segment: int
    first: int
    why: str
    pid: int | None = None
    build: str | None = None
    at: str = ""


class LossLine(_Line, frozen=True, kw_only=True, tag="loss", omit_defaults=True):
    """A server died, or an answer did not come, in a turn that is asked again.

    :ivar memory: it ran out of it. :ivar warm_up: it was before the turn, in its start or its warm-up.
    """

    number: int
    segment: int
    error: str
    memory: bool = False
    warm_up: bool = False
    at: str = ""

    @property
    def place(self) -> str:
        """Where it was, in words."""
        return f"the warm-up before turn {self.number}" if self.warm_up else f"turn {self.number}"


class SessionLine(_Line, frozen=True, kw_only=True, tag="session", omit_defaults=True):
    """A process takes the soak up. :ivar dropped: bytes of a line without its end that were dropped."""

    pid: int
    amount: str
    at: str = ""
    dropped: int = 0


class EndLine(_Line, frozen=True, kw_only=True, tag="end", omit_defaults=True):
    """A process leaves the soak. :ivar reason: one of :data:`pytest_vram.sessions.soak.REASONS`."""

    reason: str
    text: str
    at: str = ""


Line = TurnLine | SegmentLine | LossLine | SessionLine | EndLine


class Contents(msgspec.Struct, kw_only=True):
    """What a journal says, its turns left out. :ivar size: bytes of whole lines; ``torn``: bytes after them.

    :ivar turns: number of the last turn. :ivar spent: seconds of soaking. :ivar segment: the last one.
    """

    lines: int = 0
    size: int = 0
    torn: int = 0
    turns: int = 0
    spent: float = 0.0
    segment: int = 0
    segments: list[SegmentLine] = []
    losses: list[LossLine] = []
    sessions: list[SessionLine] = []
    ends: list[EndLine] = []
    end: EndLine | None = None


def now() -> str:
    """The wall clock as ISO 8601."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def exists(folder: Path) -> bool:
    """Whether a soak was begun in this folder."""
    return os.path.lexists(folder / MANIFEST) or os.path.lexists(folder / FILE_NAME)


# ---------------------------------------------------------------- reading


def read_manifest(folder: Path) -> Manifest:
    """:raises BadInput: it cannot be read, is none, or is of another version."""
    path = folder / MANIFEST
    _refuse_pipe(path)
    try:
        found = msgspec.json.decode(path.read_bytes(), type=Manifest)
    except OSError as error:
        raise BadInput(f"{path} cannot be read: {error.strerror}; a soak has one beside its journal") from None
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadInput(f"{path} is not the manifest of a soak: {printable(str(error))}") from None
    if found.format != FORMAT:
        raise BadInput(f"{path} has format {printable(repr(found.format))}; this version reads {FORMAT!r}")
    return found


def read(folder: Path, told: Callable[[TurnLine], None] = lambda line: None) -> Contents:
    """Read the journal in a folder, turn by turn.

    :param told: is given every turn; none is held here.
    :raises BadInput: damage other than a last line without its end; the message names the line.
    """
    path = folder / FILE_NAME
    found = Contents()
    _refuse_pipe(path)
    try:
        with path.open("rb") as stream:
            for line in _lines(stream, path, found):
                _take(line, found, path, told)
    except FileNotFoundError:
        return found  # the manifest was written, and nothing was asked yet
    except OSError as error:
        raise BadInput(f"{path} cannot be read: {error.strerror}") from None
    return found


def _refuse_pipe(path: Path) -> None:
    """Refuse what is no file: a pipe would be waited for without end. What is not there is no matter of this."""
    with contextlib.suppress(OSError):
        if not stat.S_ISREG(path.stat().st_mode):
            raise BadInput(f"{path} cannot be read: it is no file; a soak has one there")


def refuse_lost(folder: Path, contents: Contents) -> None:
    """Refuse a journal that lacks what the files beside it have: they are written after it.

    :raises BadInput: the log or the report has a later turn, or an end that no later turn may undo.
    """
    if not contents.lines:
        for name in (LOGFMT, JSON):
            with contextlib.suppress(OSError):
                if (folder / name).stat().st_size:
                    raise BadInput(
                        f"{folder} has the log of a soak and no turns of it: {FILE_NAME} was removed or emptied, and"
                        " the soak cannot go on; begin a new one in another folder"
                    )
    told, reason = _reported(folder)
    told = max(told, _logged(folder))
    beyond = ""
    if told > contents.turns:
        beyond = f"turn {told:,}"
    elif reason in KEPT and all(line.reason != reason for line in contents.ends):
        beyond = f"its end ({reason})"
    if beyond:
        raise BadInput(
            f"{folder / FILE_NAME} ends after turn {contents.turns:,}, and the log or the report beside it has"
            f" {beyond}: lines of the journal were lost, and the soak cannot go on; restore the whole folder, or move"
            " it away and begin anew"
        )


class _Reported(msgspec.Struct, frozen=True):
    turn_count: int
    reason: str


class _Logged(msgspec.Struct, frozen=True):
    group: str = ""
    turn: int = 0


def _reported(folder: Path) -> tuple[int, str]:
    """Turns, and why it ended, of the report beside a journal; nothing where it cannot be read."""
    try:
        _refuse_pipe(folder / REPORT)
        found = msgspec.json.decode((folder / REPORT).read_bytes(), type=_Reported)
    except (BadInput, OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return 0, ""
    return found.turn_count, found.reason


def _logged(folder: Path) -> int:
    """The last turn of the structured log; 0 where there is none, or its end cannot be read."""
    try:
        _refuse_pipe(folder / JSON)
        with (folder / JSON).open("rb") as stream:
            stream.seek(max(0, stream.seek(0, os.SEEK_END) - _TAIL))
            tail = stream.read(_TAIL)
    except (BadInput, OSError):
        return 0
    for raw in reversed(tail.splitlines()):
        with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            line = msgspec.json.decode(raw, type=_Logged)
            if line.group == "brain.step":
                return line.turn
    return 0


def _lines(stream: BinaryIO, path: Path, found: Contents) -> Iterator[Line]:
    decoder = msgspec.json.Decoder(Line)
    while raw := stream.readline(LONGEST_LINE + 1):
        if not raw.endswith(b"\n"):
            if len(raw) > LONGEST_LINE:
                raise _damaged(path, found.lines + 1, "is longer than any line of a soak")
            found.torn = len(raw)
            return
        number = found.lines + 1
        if raw[:_BEFORE] != b'{"crc":"' or raw[_AFTER:_REST] != b'",':
            raise _damaged(path, number, "is no line of a soak")
        if raw[_BEFORE:_AFTER] != _checksum(raw[_REST:-1]):
            raise _damaged(path, number, "does not have its checksum")
        try:
            line = decoder.decode(b"{" + raw[_REST:-1])
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise _damaged(path, number, f"cannot be read: {error}") from None
        if line.n != number:
            raise _damaged(path, number, f"is line {line.n} of the soak: one was lost, doubled or moved")
        found.lines = number
        found.size += len(raw)
        yield line


def _take(line: Line, found: Contents, path: Path, told: Callable[[TurnLine], None]) -> None:
    match line:
        case TurnLine():
            if line.turn.number != found.turns + 1:
                raise _damaged(path, line.n, f"has turn {line.turn.number}, and turn {found.turns + 1} comes next")
            wrong = _wrong(line, found)
            if wrong:
                raise _damaged(path, line.n, wrong)
            found.turns = line.turn.number
            found.spent = line.spent
            told(line)
        case SegmentLine():
            if line.segment != found.segment + 1:
                raise _damaged(path, line.n, f"begins segment {line.segment}, and {found.segment + 1} comes next")
            found.segment = line.segment
            found.segments.append(line)
        case LossLine():
            found.losses.append(line)
        case SessionLine():
            found.sessions.append(line)
        case EndLine():
            found.ends.append(line)
    found.end = line if isinstance(line, EndLine) else None


def _wrong(line: TurnLine, found: Contents) -> str:
    """What no soak writes of a turn; ""."""
    turn = line.turn
    counts = (turn.tokens_in, turn.tokens_out, turn.context, turn.context_size, turn.calls, turn.calls_right)
    if any(count is not None and not 0 <= count <= _MOST_COUNTED for count in (*counts, turn.repeated)):
        return "counts what no turn has"
    if turn.calls_right is not None and turn.calls_right > (turn.calls or 0):
        return f"has {turn.calls_right} right calls of {turn.calls or 0}"
    if not (math.isfinite(line.spent) and line.spent >= found.spent):
        return f"has a time of {line.spent:g} s behind one of {found.spent:g} s"
    if found.segment and turn.segment != found.segment:
        return f"has segment {turn.segment} within segment {found.segment}"
    return ""


def _damaged(path: Path, number: int, what: str) -> BadInput:
    return BadInput(
        f"{path}, line {number} {printable(what)}: the journal is damaged, and no soak goes on upon it;"
        " begin a new one in another folder"
    )


def _checksum(body: bytes) -> bytes:
    return b"%08x" % zlib.crc32(body)


def encode(line: Line) -> bytes:
    """One line with its checksum and its line feed."""
    body = msgspec.json.encode(line)[1:]
    return b'{"crc":"' + _checksum(body) + b'",' + body + b"\n"


# ---------------------------------------------------------------- writing


class SoakJournal:
    """The journal of a soak that is being run; made by :meth:`open`.

    :ivar manifest: what is soaked. :ivar contents: what had been committed when it was opened; ``turns``, ``spent`` and
        ``segment`` go on with what is.
    """

    def __init__(self, folder: Path, lock: FolderLock, manifest: Manifest, contents: Contents, fd: int) -> None:
        self.folder = folder
        self.manifest = manifest
        self.contents = contents
        self._lock = lock
        self._fd = fd
        #: Bytes and lines that are committed. They change in one step: a signal may come between any two.
        self._committed = (contents.size, contents.lines)
        #: Whether the rest of a line is behind them: it stays until a line that says so is there in its place.
        self._torn = contents.torn > 0

    @classmethod
    def open(
        cls,
        folder: Path,
        fingerprint: dict[str, Any],
        *,
        name: str,
        told: Callable[[TurnLine], None] = lambda line: None,
        lock: FolderLock | None = None,
    ) -> SoakJournal:
        """Begin a soak in this folder, or take up the one that was begun there.

        :param told: is given the turns that are committed already.
        :param lock: of this folder, where it is held already; it is the journal's from here on.
        :raises BadInput: another soak runs there, what was soaked there is something else, or its journal is damaged.
        :raises DiskTrouble: nothing can be written there.
        """
        lock = FolderLock(folder) if lock is None else lock
        try:
            wanted = msgspec.json.decode(msgspec.json.encode(fingerprint, order="sorted"))
            if exists(folder):
                manifest = read_manifest(folder)
                differing = differences(manifest.fingerprint, wanted)
                if differing:
                    raise BadInput(refusal(folder, differing))
                contents = read(folder, told)
                refuse_lost(folder, contents)
            else:
                refuse_lost(folder, Contents())
                manifest = Manifest(name=name, fingerprint=wanted, created=now())
                _write_manifest(folder, manifest)
                contents = Contents()
            fd = _opened(folder / FILE_NAME)
        except BaseException:
            lock.release()
            raise
        return cls(folder, lock, manifest, contents, fd)

    def commit(self, line: Line) -> None:
        """Bring one line to the disk; its number is set here.

        :raises DiskTrouble: it is not there, and nothing of it is left in the journal, but for the rest of a line that
            was found there and is not dropped unsaid.
        """
        size, count = self._committed
        if not self._in_place():
            raise DiskTrouble(
                f"{self.folder / FILE_NAME} was removed, moved or replaced while the soak ran; put it back and go"
                " on with it, or begin a new soak"
            )
        data = encode(msgspec.structs.replace(line, n=count + 1))
        if len(data) > LONGEST_LINE:
            raise DiskTrouble(f"a line of {len(data):,} bytes is too long for the journal of a soak")
        torn, self._torn = self._torn, False
        try:
            if not torn:
                os.ftruncate(self._fd, size)  # of a line that an interrupt left uncommitted
            _write_all(self._fd, size, data)
            if torn:  # what was longer than this line has no end, wherever a kill comes
                os.ftruncate(self._fd, size + len(data))
            os.fsync(self._fd)
        except OSError as error:
            self._torn = torn
            if not torn:
                with contextlib.suppress(OSError):  # else the next reader drops it: it has no end
                    os.ftruncate(self._fd, size)
            raise DiskTrouble(
                f"{self.folder / FILE_NAME}: {error.strerror or error}; what was committed is kept, and the soak goes"
                " on behind it once this can be written"
            ) from None
        self._committed = (size + len(data), count + 1)
        self.contents.lines = count + 1
        if isinstance(line, TurnLine):
            self.contents.turns, self.contents.spent = line.turn.number, line.spent
        elif isinstance(line, SegmentLine):
            self.contents.segment = line.segment
            self.contents.segments.append(line)
        elif isinstance(line, LossLine):
            self.contents.losses.append(line)
        elif isinstance(line, SessionLine):
            self.contents.sessions.append(line)
        else:
            self.contents.ends.append(line)
        self.contents.end = line if isinstance(line, EndLine) else None

    def _in_place(self) -> bool:
        """Whether what is written to is what will be found there: a file that was removed takes lines all the same."""
        try:
            held, there = os.fstat(self._fd), os.stat(self.folder / FILE_NAME)
        except OSError:
            return False
        return os.path.samestat(held, there)

    def close(self) -> None:
        """Close the file and let others in. Calling it twice is fine."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        self._lock.release()


def _opened(path: Path) -> int:
    """The journal, ready to be written to."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0), 0o644)
    except OSError as error:
        raise DiskTrouble(f"{path}: {error.strerror}") from None
    try:
        _sync_folder(path.parent)
    except OSError as error:
        os.close(fd)
        raise DiskTrouble(f"{path}: {error.strerror}") from None
    return fd


def _write_all(fd: int, at: int, data: bytes) -> None:
    os.lseek(fd, at, os.SEEK_SET)
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _write_manifest(folder: Path, manifest: Manifest) -> None:
    temporary = folder / f".{MANIFEST}.{os.getpid()}"
    try:
        with temporary.open("wb") as stream:
            stream.write(msgspec.json.format(msgspec.json.encode(manifest), indent=1) + b"\n")
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, folder / MANIFEST)
        _sync_folder(folder)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise DiskTrouble(f"{folder / MANIFEST}: {error.strerror}") from None


def _sync_folder(folder: Path) -> None:
    if os.name == "nt":  # a folder cannot be opened there
        return
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


# ---------------------------------------------------------------- fingerprints


def differences(before: object, after: object, name: str = "") -> list[str]:
    """What differs between two fingerprints, one phrase each: ``options.ctx-size was 4096 and is 8192``."""
    if isinstance(before, dict) and isinstance(after, dict):
        found: list[str] = []
        for key in sorted({*before, *after}):
            inner = f"{name}.{key}" if name else str(key)
            found += differences(before.get(key), after.get(key), inner)
        return found
    return [] if before == after else [printable(f"{name} was {_shown(before)} and is {_shown(after)}")]


def refusal(folder: Path, differing: list[str]) -> str:
    """Why a soak cannot go on with another configuration."""
    return (
        f"{folder} has a soak of something else, which cannot go on with this: {'; '.join(differing[:6])}"
        f"{' …' if len(differing) > 6 else ''}. Restore what has changed, or begin a new soak in another folder"
    )


def _shown(value: object) -> str:
    if value is None:
        return "not set"
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= 60 else f"{text[:57]}…"
