"""What became of cases, as data: one answer, one case, all of them. The JSON of a results file."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any, Literal

import msgspec

from pytest_vram.errors import BadCases
from pytest_vram.text import encoded
from pytest_vram.toolcalls.diagnosis import Call

FORMAT = "pytest-vram/toolcalls/1"
#: ``right``: the expected calls, well-formed. ``wrong``: the model's failure. ``infrastructure``: no answer that could
#: be judged (connection lost, HTTP 429, timeout …): in the completion rate and in no other.
Outcome = Literal["right", "wrong", "infrastructure"]
Protocol = Literal["tools", "json_schema", "few_shot"]


class Answer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One answer of a model to one case.

    :ivar kind: the kind that explains it, ``valid`` where there is none; "" for infrastructure trouble.
    :ivar raw: what was answered, as text, cut at 4,000 characters in the middle; ``raw_length`` is all of it.
    :ivar own_seconds: processor time of ours: making the request, diagnosis, scoring.
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
        been asked; fewer results: it was decided earlier (``stopped`` says why).
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
    started: str = ""
    seconds: float = 0.0
    notes: list[str] = []
    format: str = FORMAT

    def counted(self) -> list[CaseResult]:
        """The cases that have an answer to judge."""
        return [result for result in self.results if result.first.outcome != "infrastructure"]


def save(results: Results, path: str | Path) -> None:
    """Write results as JSON; a file that is there is replaced in one step.

    :raises BadCases: the file cannot be written.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(msgspec.json.format(encoded(results), indent=1))
        temporary.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise BadCases(f"the results cannot be written to {path}: {error.strerror or error}") from None


def read(path: str | Path) -> Results:
    """Read results that :func:`save` wrote.

    :raises BadCases: one line: there is no such file, or it is none of those, of another format, or torn.
    """
    path = Path(path)
    try:
        content = path.read_bytes()
    except OSError as error:
        raise BadCases(f"results file {path} cannot be read: {error.strerror or error}") from None
    except ValueError:
        raise BadCases(f"results file {str(path)!r} is no path of a file") from None
    try:
        stated = msgspec.json.decode(content, type=_Head).format
    except (msgspec.DecodeError, RecursionError) as error:
        raise BadCases(f"{path} is no results file: it is not the JSON that pytest-vram writes ({error})") from None
    if stated != FORMAT:
        raise BadCases(f"{path} has format {stated[:80]!r}; this version of pytest-vram reads {FORMAT!r}: make it anew")
    try:
        return msgspec.json.decode(content, type=Results)
    except (msgspec.DecodeError, RecursionError) as error:
        raise BadCases(f"{path} is a results file with something wrong in it: {error}") from None


class _Head(msgspec.Struct):
    format: str
