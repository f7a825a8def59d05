"""What a scripted backend does, as data."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec

from pytest_vram.errors import BadInput
from pytest_vram.toolcalls.diagnosis import KINDS

#: Kinds of defects that a wrong answer can have. ``history_rejected`` is a fault, and ``arguments_as_object`` says how
#: the server puts it, not what the model wrote.
WRONG_KINDS = tuple(kind for kind in KINDS if kind not in ("valid", "history_rejected", "arguments_as_object"))

#: The mix of a script that names none.
USUAL = {"wrong_value": 2.0, "missing_bracket": 1.0, "no_call": 1.0}

FaultKind = Literal[
    "http_500_parse",
    "http_400_history",
    "http_500_history",
    "http_429",
    "http_500",
    "http_503",
    "disconnect",
    "disconnect_midway",
    "endless",
    "silent",
    "empty_body",
    "empty_content",
    "empty_choices",
    "huge",
    "invalid_utf8",
    "not_json",
    "wrong_content_type",
    "dies",
    "dies_midway",
]
#: ``http_500_parse``: the server could not parse what the model wrote. ``http_400_history`` and ``http_500_history``:
#: it refuses the conversation (llama.cpp answers either, by version). ``disconnect``: the connection is closed before
#: any answer; ``disconnect_midway``: within it. ``endless``: text without end. ``silent``: accepted, and nothing is
#: ever said. ``huge``: one answer of ``size`` bytes. ``dies``: the process ends with the request.
FAULTS: tuple[FaultKind, ...] = get_args(FaultKind)


class Fault(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What goes wrong, and at which requests: those of ``requests`` or ``cases``, or a ``share`` of the cases.

    :ivar requests: numbers of generations, the first is 0, in the order in which they arrive.
    :ivar cases: ids of cases. :ivar share: of all cases, drawn by the script's seed and the case's id.
    :ivar turn: ``first`` request of a case, its ``retry``, or ``any``.
    :ivar times: how often one case meets it before it is answered; ``None``: each time.
    :ivar retry_after: seconds, in the header of that name (HTTP 429 and 503). :ivar size: bytes of ``huge``.
    """

    kind: FaultKind
    requests: list[int] = []
    cases: list[str] = []
    share: float = 0.0
    turn: Literal["first", "retry", "any"] = "any"
    times: int | None = None
    retry_after: float | None = None
    size: int = 20_000_000


class Burst(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Memory that is taken for one generation only, and given back with its answer.

    :ivar size: bytes. :ivar said: only where the user's last words, which the last message has, begin so.
    :ivar after: so many with the same words come before the first that takes it; counted over all servers that write
        one ``record``.
    """

    size: int
    said: str = ""
    after: int = 0


class Script(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a scripted backend does; the same script gives the same answers in any order and in any process.

    :ivar accuracy: probability that a case is answered right; what is no case, such as a turn of a conversation, is
        answered with text and without a call. :ivar icc: correlation of the outcomes within a family
        of cases (beta-binomial); 0: each case by itself.
    :ivar defects: kind → weight of the wrong answers; a kind that a case has no room for gives way to another of them.
    :ivar recovery: probability that a retry is answered right.
    :ivar streamed_right: of the right answers, the share that is still right when it is streamed; the others have
        ``streamed_defect``: some servers break answers only then.
    :ivar wobble: share of the cases whose outcome is drawn anew for each ``draw``: what differs between two runs
        without any change.
    :ivar latency: seconds before the first token. :ivar tokens_per_second: ``None``: at once.
    :ivar recall: share of the facts in its prompt that it uses where a recall check asks for them.
    :ivar hold: bytes that each generation takes and keeps, up to ``hold_most`` in all; given back after ``hold_idle``
        seconds without a generation, ``None``: never.
    :ivar burst: memory that some generations take for themselves.
    :ivar record: file to which a line for each generation is appended, by all servers of this script; see
        :func:`read_record`.
    :ivar model: name that it answers with.
    """

    accuracy: float = 1.0
    icc: float = 0.0
    defects: dict[str, float] = msgspec.field(default_factory=lambda: dict(USUAL))
    recovery: float = 0.5
    streamed_right: float = 1.0
    streamed_defect: str = "missing_bracket"
    wobble: float = 0.0
    draw: int = 0
    seed: int = 0
    latency: float = 0.0
    tokens_per_second: float | None = None
    faults: list[Fault] = []
    recall: float = 1.0
    hold: int = 0
    hold_most: int = 1 << 30
    hold_idle: float | None = None
    burst: Burst | None = None
    record: str | None = None
    model: str = "scripted"

    def __post_init__(self) -> None:
        for name in ("accuracy", "icc", "recovery", "streamed_right", "wobble", "recall"):
            _share(name, getattr(self, name))
        for fault in self.faults:
            _share(f"share of the fault {fault.kind}", fault.share)
        for kind in (*self.defects, self.streamed_defect):
            if kind not in WRONG_KINDS:
                raise BadInput(f"{kind!r} is no kind of defect that an answer can have: {', '.join(WRONG_KINDS)}")
        weights = list(self.defects.values())
        if not weights or any(not math.isfinite(weight) or weight < 0 for weight in weights) or sum(weights) <= 0:
            raise BadInput("`defects` of a script are kinds with weights of which one is above 0")
        if self.tokens_per_second is not None and not self.tokens_per_second > 0:
            raise BadInput(f"`tokens_per_second` of a script is {self.tokens_per_second!r}: it must be above 0")
        if not 0 <= self.latency < math.inf:
            raise BadInput(f"`latency` of a script is {self.latency!r}: it is a number of seconds, 0 or more")
        if self.hold < 0 or self.hold_most < 0:
            raise BadInput("`hold` and `hold_most` of a script are bytes, 0 or more")
        if self.burst is not None and (self.burst.size <= 0 or self.burst.after < 0):
            raise BadInput("`burst` of a script has a `size` above 0, in bytes, and an `after` of 0 or more")


def _share(name: str, value: float) -> None:
    if not 0.0 <= value <= 1.0:
        raise BadInput(f"{name} of a script is {value!r}: it is a share between 0 and 1")


def read_script(path: str | Path) -> Script:
    """The script in a JSON file.

    :raises BadInput: it cannot be read, or is none; one sentence.
    """
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise BadInput(f"the script {path} cannot be read: {error.strerror}") from None
    try:
        return msgspec.json.decode(data, type=Script)
    except msgspec.DecodeError as error:
        raise BadInput(f"the script {path} is none: {error}") from None


def encoded(script: Script) -> bytes:
    """The script as JSON."""
    return msgspec.json.encode(script)


def described(script: Script) -> dict[str, Any]:
    """The script as built-in values."""
    found: dict[str, Any] = msgspec.to_builtins(script)
    return found
