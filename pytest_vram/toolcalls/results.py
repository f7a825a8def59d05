"""What became of cases, as data: one answer, one case, all of them. The JSON of a results file."""

from __future__ import annotations

import contextlib
import os
import stat
import threading
from pathlib import Path
from typing import Any, Literal

import msgspec

from pytest_vram.errors import BadCases
from pytest_vram.text import encoded, printable
from pytest_vram.toolcalls.diagnosis import Call

FORMAT = "pytest-vram/toolcalls/1"
#: Bytes of a results file; a thousand cases have a few MiB.
LARGEST = 256 << 20
#: ``right``: the expected calls, well-formed. ``wrong``: the model's failure. ``infrastructure``: no answer that could
#: be judged (connection lost, HTTP 429, timeout …): in the completion rate and in no other.
Outcome = Literal["right", "wrong", "infrastructure"]
Protocol = Literal["tools", "json_schema", "few_shot"]


class Answer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One answer of a model to one case.

    :ivar kind: the kind that explains it, ``valid`` where there is none; "" for infrastructure trouble.
    :ivar raw: what was answered, as text, cut at 4,000 characters in the middle; ``raw_length`` is all of it.
    :ivar own_seconds: processor time of ours: making the request, diagnosis, scoring.
    :ivar unfit: infrastructure trouble: the request does not fit the server's context.
    """

    outcome: Outcome
    kind: str
    kinds: tuple[str, ...] = ()
    detail: str = ""
    calls: list[Call] = []
    raw: str = ""
    raw_length: int = 0
    finish_reason: str | None = None
    status: int | None = None
    latency: float = 0.0
    tokens_in: int | None = None
    tokens_out: int | None = None
    own_seconds: float = 0.0
    unfit: bool = False


class CaseResult(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What became of one case.

    :ivar first: the answer to the request. :ivar retries: answers after the errors were given back, if any.
    :ivar request: the body that was sent first, where it is kept (the worst cases).
    """

    id: str
    family: str
    category: str
    language: str
    first: Answer
    retries: list[Answer] = []
    expect: list[dict[str, Any]] = []
    request: dict[str, Any] | None = None

    @property
    def last(self) -> Answer:
        """The answer after all retries."""
        return self.retries[-1] if self.retries else self.first

    def judged(self, judge: str) -> Answer:
        """The answer that counts for ``judge``: ``first_try`` or ``after_retry``."""
        return self.first if judge == "first_try" else self.last


class Results(msgspec.Struct, frozen=True, kw_only=True):
    """All cases of one backend, in the order in which they were asked.

    :ivar backend: its name. :ivar settings: its spec, without secrets. :ivar fingerprint: what must be the same for
        results to be repeatable: model, engine and its build, options, protocol, stream, sampling, cases.
    :ivar cases: name of the set, with ``digest``. :ivar seed: of the order. :ivar planned: how many cases would have
        been asked; fewer results: ``stopped`` says why. :ivar decided: the answers so far decided, so that no more were
        needed; else those that were not asked are missing.
    """

    backend: str
    protocol: Protocol
    stream: bool
    cases: str
    digest: str
    seed: int
    planned: int
    results: list[CaseResult]
    settings: dict[str, Any] = {}
    sampling: dict[str, Any] = {}
    fingerprint: dict[str, Any] = {}
    retries: int = 0
    stopped: str | None = None
    decided: bool = False
    started: str = ""
    seconds: float = 0.0
    notes: list[str] = []
    format: str = FORMAT

    @property
    def due(self) -> int:
        """How many cases must have an answer: all that were planned, unless fewer decided."""
        return len(self.results) if self.decided else max(self.planned, len(self.results))

    def counted(self) -> list[CaseResult]:
        """The cases that have an answer to judge."""
        return [result for result in self.results if result.first.outcome != "infrastructure"]


def save(results: Results, path: str | Path) -> None:
    """Write results as JSON; a file that is there is replaced in one step, the target of a link and not the link.

    :raises BadCases: the file cannot be written, or what is there is no file.
    """
    _write(Path(path), msgspec.json.format(encoded(results), indent=1), keep=True)


def check_place(path: str | Path) -> None:
    """Whether results can be written to a file, before there are any.

    :raises BadCases: they cannot.
    """
    _write(Path(path), b"", keep=False)


def _write(path: Path, content: bytes, *, keep: bool) -> None:
    """:param keep: put it in its place; else what was written is removed again."""
    temporary: Path | None = None
    try:
        place = Path(os.path.realpath(path))
        if _is_sink(path):
            if keep:
                path.write_bytes(content)
            return
        place.parent.mkdir(parents=True, exist_ok=True)
        temporary = place.with_name(f".toolcalls-{os.getpid()}-{threading.get_ident()}.tmp")
        temporary.write_bytes(content)
        if keep:
            temporary.replace(place)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise BadCases(f"the results cannot be written to {printable(str(path))}: {reason}") from None
    finally:
        if temporary is not None:
            with contextlib.suppress(OSError):
                temporary.unlink()


def _status(path: Path) -> os.stat_result:
    return path.stat()


def _is_sink(path: Path) -> bool:
    """Whether it is a device that takes what is written, such as ``/dev/null``.

    :raises BadCases: something is there that is neither that nor a file.
    """
    try:
        mode = _status(path).st_mode
    except FileNotFoundError:
        return False
    if stat.S_ISCHR(mode):
        return True
    if not stat.S_ISREG(mode):
        kind = "a folder" if stat.S_ISDIR(mode) else "no file"
        raise BadCases(f"the results cannot be written to {printable(str(path))}: it is {kind}; name a file")
    return False


def read(path: str | Path) -> Results:
    """Read results that :func:`save` wrote.

    :raises BadCases: one line: there is no such file, or it is none of those, of another format, or torn.
    """
    path = Path(path)
    shown = printable(str(path))
    try:
        content = _content(path)
    except OSError as error:
        raise BadCases(f"results file {shown} cannot be read: {error.strerror or error}") from None
    except ValueError:
        raise BadCases(f"results file {str(path)!r} is no path of a file") from None
    try:
        stated = msgspec.json.decode(content, type=_Head).format
    except (msgspec.DecodeError, RecursionError) as error:
        raise BadCases(f"{shown} is no results file: it is not the JSON that pytest-vram writes ({error})") from None
    if stated != FORMAT:
        raise BadCases(
            f"{shown} has format {stated[:80]!r}; this version of pytest-vram reads {FORMAT!r}: make it anew"
        )
    try:
        return msgspec.json.decode(content, type=Results)
    except (msgspec.DecodeError, RecursionError) as error:
        raise BadCases(f"{shown} is a results file with something wrong in it: {error}") from None


def _content(path: Path) -> bytes:
    """All of a file, and nothing of what is none: opening a named pipe would wait for a writer."""
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    with open(handle, "rb") as file:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise BadCases(f"{printable(str(path))} is no results file: it is no file at all")
        content = file.read(LARGEST + 1)
    if len(content) > LARGEST:
        raise BadCases(f"{printable(str(path))} is no results file: it is larger than {LARGEST >> 20} MiB")
    return content


class _Head(msgspec.Struct):
    format: str
