"""The journal of a run: append-only JSON lines on one clock, written by the keeper alone.

Every line has ``v`` (format version), ``t`` (``CLOCK_MONOTONIC`` in nanoseconds) and ``kind``; the other keys
depend on the kind and are listed in ``docs/formats.md``. A torn last line (a kill in mid-write) is tolerated by the
reader and counted; any other unreadable line is an error that names its number.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from pytest_vram.errors import BadInput

VERSION = 1
FILE_NAME = "journal.jsonl"
#: Bytes at the end of a journal that hold its last line, where that is an ``end``.
_LAST = 4096

#: The kinds of line, and what each says.
KINDS: dict[str, str] = {
    "run": "first line: run id, wall clock, versions, settings",
    "keeper": "a keeper took over: its PID and its generation in this run",
    "device": "a device that is measured, with its name, capacity and sources",
    "process": "a process came into, or left, the measured set",
    "sample": "a block of at most a second of samples of one device: min, max, last, count",
    "gap": "the sampler was late by more than three intervals",
    "backend": "a backend changed state: starting, ready, failed, died, stopping, stopped, adopted",
    "phase": "a phase of a backend's boot, or a phase that a test named, began",
    "window": "a window (test, phase, request) was opened or closed; closed ones carry their readings",
    "lease": "a test began to wait for room, got its lease, gave it back, or gave up",
    "request": "one request of the client, with tokens, latency, rate and result",
    "test": "outcome of a test as pytest reported it",
    "note": "anything else worth keeping",
    "end": "last line: how the run ended",
}


class Writer:
    """Appends lines to a journal.

    Each line is one ``write`` of a whole line to a descriptor opened with ``O_APPEND``, so a kill leaves at most one
    torn line at the end. A full disk does not stop the run: the lines that could not be written are counted in
    :attr:`lost` with the first reason in :attr:`trouble`, and later lines are tried again.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lost = 0
        self.trouble: str | None = None
        self._encoder = msgspec.json.Encoder()
        self._torn = False
        self._ended = False
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | getattr(os, "O_CLOEXEC", 0), 0o644)

    def write(self, t: int, kind: str, fields: Mapping[str, Any]) -> None:
        """Append one line; ``fields`` may hold msgspec structs. After ``end`` nothing is written any more."""
        if kind not in KINDS:
            raise ValueError(f"{kind!r} is not a kind of journal line")
        if self._ended:
            return
        self._ended = kind == "end"
        body = b'{"v":%d,"t":%d,"kind":"%s"' % (VERSION, t, kind.encode())
        rest = self._encoder.encode(dict(fields))
        line = body + (b"," + rest[1:] if len(rest) > 2 else b"}") + b"\n"
        if self._torn:
            line = b"\n" + line
        try:
            written = os.write(self._fd, line)
        except OSError as error:
            self.lost += 1
            self.trouble = self.trouble or f"{self.path}: {error.strerror}"
            return
        self._torn = written != len(line)
        if self._torn:
            self.lost += 1
            self.trouble = self.trouble or f"{self.path}: only part of a line could be written (is the disk full?)"

    @property
    def removed(self) -> bool:
        """Whether somebody removed the file, or the folder it lies in, so that what is written is lost."""
        try:
            return self._fd >= 0 and os.fstat(self._fd).st_nlink == 0
        except OSError:
            return False

    def close(self) -> None:
        """Close the file. Calling it twice is fine."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def ended_in_order(path: Path) -> bool:
    """Whether the last line says that the controller has ended the run; only the end of the file is read."""
    try:
        if not path.is_file():  # a pipe has no end, nor has a device
            return False
        with path.open("rb") as stream:
            stream.seek(0, os.SEEK_END)
            stream.seek(max(0, stream.tell() - _LAST))
            lines = stream.read(_LAST).rstrip(b"\n").rsplit(b"\n", 1)
        line = msgspec.json.decode(lines[-1], type=_End)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return False
    return line.kind == "end" and bool(line.outcome)


class _End(msgspec.Struct):
    kind: str
    outcome: Any = None


class Journal:
    """Reads a journal, also one that is still being written.

    :ivar torn: number of lines that a kill or a full disk cut short; they are skipped.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.torn = 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield every line as a dictionary.

        :raises BadInput: when the file cannot be read, is of another version, or is not a journal.
        """
        self.torn = 0
        decoder = msgspec.json.Decoder(dict[str, Any])
        try:
            with self.path.open("rb") as stream:
                for number, line in enumerate(stream, 1):
                    if line == b"\n":
                        continue
                    try:
                        record = decoder.decode(line)
                    except (msgspec.DecodeError, RecursionError):  # the latter: nested without end
                        self.torn += 1
                        if number == 1:
                            raise BadInput(f"{self.path} is not a journal: its first line is not JSON") from None
                        continue
                    if record.get("v") != VERSION:
                        raise BadInput(
                            f"{self.path}, line {number}: not a line of journal format {VERSION}"
                            f" (found v={record.get('v')!r})"
                        )
                    if type(record.get("t")) is not int or not isinstance(record.get("kind"), str):
                        raise BadInput(f"{self.path}, line {number}: no line of a journal: it lacks `t` or `kind`")
                    yield record
        except OSError as error:
            raise BadInput(f"{self.path} cannot be read: {error.strerror}") from None
