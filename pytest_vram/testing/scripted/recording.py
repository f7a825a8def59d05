"""What a scripted backend was asked, on the disk: its servers may be killed, and one file is all of theirs."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from pytest_vram.errors import BadInput


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """One generation, as its line in the record has it.

    :ivar pid: of the server. :ivar said: the last thing that the user said. :ivar role: of the last message.
    :ivar messages: how many there were. :ivar before: how often a last message of a user said the same before.
    """

    pid: int
    said: str
    role: str
    messages: int
    before: int


class Record:
    """The generations of all servers that name this file.

    :param path: ``None``: nothing is written, and ``before`` counts this server alone.
    :param counting: whether it counts: it remembers every word to do so.
    :raises BadInput: the file cannot be read or written, or has a line of something else.
    """

    def __init__(self, path: str | None, *, counting: bool = True) -> None:
        self._path = path
        self._counting = counting
        self._lock = threading.Lock()
        self._said: Counter[str] = Counter()
        if path is not None:
            for line in read_record(path):
                self._count(line)
            _end_lines(path)

    def add(self, body: Mapping[str, Any]) -> Asked:
        """One more generation, written before it is answered.

        :raises OSError: it cannot be written.
        """
        listed = body.get("messages")
        messages = [one for one in listed if isinstance(one, Mapping)] if isinstance(listed, list) else []
        said = next((str(one.get("content")) for one in reversed(messages) if one.get("role") == "user"), "")
        role = str(messages[-1].get("role")) if messages else ""
        with self._lock:
            line = Asked(pid=os.getpid(), said=said, role=role, messages=len(messages), before=self._said.get(said, 0))
            self._count(line)
            if self._path is not None:
                with Path(self._path).open("ab") as stream:
                    stream.write(msgspec.json.encode(line) + b"\n")
        return line

    def _count(self, line: Asked) -> None:
        if self._counting and line.role == "user":
            self._said[line.said] += 1


def _end_lines(path: str) -> None:
    """Drop a last line without its end, of a server that was killed in it: the next one is a line of its own."""
    with contextlib.suppress(FileNotFoundError), Path(path).open("rb+") as stream:
        data = stream.read()
        stream.truncate(data.rfind(b"\n") + 1)


def read_record(path: str | Path) -> list[Asked]:
    """The generations in a record, in their order; none where there is no such file. A last line without its end is not
    read: its server was killed before it answered.

    :raises BadInput: it cannot be read, or has a line of something else.
    """
    try:
        *lines, _unended = Path(path).read_bytes().split(b"\n")
    except FileNotFoundError:
        return []
    except OSError as error:
        raise BadInput(f"the record of a scripted backend, {path}, cannot be read: {error.strerror}") from None
    try:
        return [msgspec.json.decode(line, type=Asked) for line in lines]
    except msgspec.MsgspecError as error:
        raise BadInput(f"the record of a scripted backend, {path}, is none: {error}") from None
