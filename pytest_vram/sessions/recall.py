"""Recall: whether facts that a model read early are still used after they have left its window.

A window that is too small makes a goldfish: the agent reads the same file again and again. A summary that stays in the
window repairs it, if the model uses it. Facts are planted as results of ``file_read``, other messages follow until all
of them have left the window, and then each fact is asked for by itself: with a summary pinned in the window, and
without. Where the model has to read a file that it has read already, its call is identical to the one before.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from typing import Any, Literal

import msgspec

from pytest_vram.errors import BackendDied, BackendError, BadInput, RequestFailed
from pytest_vram.sessions.history import SPARE, Counter
from pytest_vram.sessions.session import Backend
from pytest_vram.spec import BackendSpec
from pytest_vram.stats import clopper_pearson, mcnemar_exact, required_n_proven, tango_interval
from pytest_vram.toolcalls import asking
from pytest_vram.toolcalls.cases import Case, Tool
from pytest_vram.toolcalls.diagnosis import diagnose
from pytest_vram.toolcalls.protocols import request_of
from pytest_vram.windows import MessageWindow

Outcome = Literal["recalled", "read_again", "wrong"]

#: Facts that are planted: with fewer than 29, even a model that recalls all of them has not proven 90 %.
FACTS = 30
MOST_FACTS = 200
TARGET, CONFIDENCE = 0.9, 0.95
#: Tokens of one answer, and those that a question takes in the window.
_ANSWER, _QUESTION = 32, 96
#: Messages between the facts and the questions at most; a window that still holds a fact then is not judged.
_MOST_FILLER = 20_000
_KEPT_TEXT = 200
_SYSTEM = "You look after a group of servers. Answer from what you know of them. Read a file only if you have to."
_PROPERTIES = (
    "port", "owner", "backup host", "log folder", "time zone", "pass phrase", "queue", "release", "contact", "rack",
)  # fmt: skip
_SERVICES = (
    "mail relay", "metrics collector", "print server", "build farm", "wiki", "ticket system", "image store",
    "search index", "payment gateway", "time server", "door control", "news feed", "map server", "archive",
    "chat server", "phone exchange", "staff directory", "weather station", "video recorder", "parcel tracker",
)  # fmt: skip
_WORDS = ("amber", "birch", "cobalt", "dune", "ember", "fjord", "grove", "harbor", "iris", "jasper", "kelp", "larch")
_FILLER = (
    "Nothing was changed on shelf {n}; the check of its {n} disks found no error and took {n} seconds.",
    "The delivery with number {n} came in, was counted twice, and stands in the store until further notice.",
    "Room {n} was aired, its temperature was 21 degrees in the morning and 22 degrees at noon.",
)
READ = Tool(
    name="file_read",
    description="Read a text file.",
    parameters={
        "type": "object",
        "properties": {"path": {"type": "string", "description": "absolute path of the file"}},
        "required": ["path"],
        "additionalProperties": False,
    },
)


class Fact(msgspec.Struct, frozen=True, kw_only=True):
    """Something that stands in a file. :ivar label: what it is, such as ``port of the wiki``."""

    label: str
    value: str
    path: str

    @property
    def sentence(self) -> str:
        """The fact as the file has it."""
        return f"The {self.label} is {self.value}."

    @property
    def question(self) -> str:
        """The question that is asked for it later."""
        return (
            f"What is the {self.label}? It is written in {self.path}. Answer with the value alone. If you do not know"
            " it any more, read the file."
        )


class RecallAnswer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What was answered to one question.

    :ivar outcome: ``recalled`` (the value, without a call), ``read_again`` (the identical call), ``wrong``.
    :ivar text: the beginning of the answer.
    """

    label: str
    outcome: Outcome
    text: str = ""


class RecallArm(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The answers with a summary in the window, or without.

    :ivar evicted: messages that left the window. :ivar forgotten: facts whose messages all left it.
    :ivar tokens_in: prompt of the longest question.
    """

    summary: bool
    answers: list[RecallAnswer]
    evicted: int
    forgotten: int
    tokens_in: int | None = None

    def count(self, outcome: Outcome) -> int:
        """Answers of this outcome."""
        return sum(answer.outcome == outcome for answer in self.answers)


class RecallVerdict(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the answers say.

    :ivar outcome: ``passed``: the rate with a summary is proven to be at least the target; ``failed``: it is proven to
        be below; else ``inconclusive``. :ivar text: sentences for a person.
    :ivar low, high: bounds of the rate with a summary, each of one side (Clopper–Pearson).
    :ivar difference: rate with a summary minus rate without, over the same facts, with its 95 % interval (Tango) and
        the p-value of McNemar's exact test. :ivar read_again: rates of identical calls, without and with a summary.
    """

    outcome: Literal["passed", "failed", "inconclusive"]
    text: str
    target: float
    facts: int
    rate: float | None = None
    low: float | None = None
    high: float | None = None
    rate_without: float | None = None
    difference: float | None = None
    difference_low: float | None = None
    difference_high: float | None = None
    p_value: float | None = None
    read_again: tuple[float, float] | None = None


def facts(count: int = FACTS, seed: int = 0) -> list[Fact]:
    """So many facts that nobody could guess; the same for a seed.

    :raises BadInput: a number that is not from 1 to :data:`MOST_FACTS`.
    """
    given: object = count  # tests are rarely type-checked
    if isinstance(given, bool) or not isinstance(given, int) or not 1 <= given <= MOST_FACTS:
        raise BadInput(f"facts={count!r} of a recall check: write a whole number from 1 to {MOST_FACTS}")
    draw = random.Random(seed)
    pairs = [(one, service) for service in _SERVICES for one in _PROPERTIES]
    draw.shuffle(pairs)
    numbers = draw.sample(range(1000, 10_000), count)
    return [
        Fact(
            label=f"{one} of the {service}",
            value=f"{draw.choice(_WORDS)}-{number}",
            path=f"/etc/{service.replace(' ', '-')}/{one.replace(' ', '-')}.conf",
        )
        for (one, service), number in zip(pairs, numbers, strict=False)
    ]


def summary_of(planted: Sequence[Fact]) -> str:
    """What an agent that keeps a summary would have written down."""
    return "\n".join(["Read so far:", *(f"- {fact.sentence}" for fact in planted)])


def ask(
    backend: Backend,
    *,
    context: int | None = None,
    count: int = FACTS,
    seed: int = 0,
    spec: BackendSpec | None = None,
    told: Callable[[RecallAnswer], None] = lambda answer: None,
) -> tuple[RecallArm, RecallArm]:
    """Ask for the same facts with a summary in the window, and without.

    :param context: tokens of the server's context; by default what it says.
    :param told: called after each answer.
    :returns: (with, without). :raises BadInput: no context is known, or facts and summary do not fit into it.
    :raises BackendError: the server did not answer.
    """
    planted = facts(count, seed)
    given: object = context  # tests are rarely type-checked
    if given is not None and (isinstance(given, bool) or not isinstance(given, int) or given < 1):
        raise BadInput(f"context={given!r:.60} of a recall check: write a number of tokens, 1 or more")
    asked_with = spec if spec is not None else backend.spec
    size = context if context is not None else _told(backend)
    count_tokens = Counter(getattr(backend.client, "tokenize", None))
    # One question beforehand: what the template and the protocol add to the texts is known from it.
    probe = [{"role": "system", "content": _SYSTEM}, {"role": "user", "content": planted[0].question}]
    count_tokens.learn(probe, [READ.as_openai()], _asked(backend, asked_with, probe).tokens_in)
    with_summary = _arm(backend, asked_with, planted, size, count_tokens, summary=True, told=told)
    return with_summary, _arm(backend, asked_with, planted, size, count_tokens, summary=False, told=told)


def _told(backend: Backend) -> int:
    try:
        properties = backend.properties()
    except BackendDied:
        raise
    except BackendError:
        properties = None
    size = (properties.context_per_slot or properties.context) if properties is not None else None
    if size is None:
        raise BadInput(
            f"backend {backend.name!r} does not say how many tokens its context has, so that it is not known when"
            " messages leave it: give `context`"
        )
    return size


def _arm(
    backend: Backend,
    spec: BackendSpec,
    planted: Sequence[Fact],
    size: int,
    count: Counter,
    *,
    summary: bool,
    told: Callable[[RecallAnswer], None],
) -> RecallArm:
    limit = size - _ANSWER - _QUESTION - SPARE
    if limit < 1:
        raise BadInput(f"a context of {size} tokens has no room for a question: raise it")
    window = MessageWindow(limit, count=count, tools=[READ.as_openai()], user_first=True)
    window.append({"role": "system", "content": _SYSTEM})
    if summary:
        window.pin_summary(summary_of(planted))
    evicted = 0
    for number, fact in enumerate(planted):
        for message in _planted(fact, number):
            evicted += len(window.append(message))
    held = {fact.path for fact in planted}
    filler = 0
    while held and filler < _MOST_FILLER:
        filler += 1
        for message in _filler(filler):
            evicted += len(window.append(message))
        # The system message has the summary, and is no place where a fact was read.
        text = "\n".join(_text(message) for message in window.messages if message["role"] != "system")
        held = {path for path in held if path in text}
    answers: list[RecallAnswer] = []
    longest: int | None = None
    for fact in planted:
        heard = _asked(backend, spec, [*window.messages, {"role": "user", "content": fact.question}])
        longest = max((tokens for tokens in (longest, heard.tokens_in) if tokens is not None), default=None)
        answers.append(_judged(fact, heard, spec))
        told(answers[-1])
    return RecallArm(
        summary=summary, answers=answers, evicted=evicted, forgotten=len(planted) - len(held), tokens_in=longest
    )


def _planted(fact: Fact, number: int) -> list[dict[str, Any]]:
    call = {"id": f"r{number:08}", "type": "function", "function": {"name": READ.name, "arguments": _arguments(fact)}}
    return [
        {"role": "user", "content": f"Read {fact.path}, we shall need it later."},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "name": READ.name, "content": f"# {fact.path}\n{fact.sentence}"},
        {"role": "assistant", "content": "I have read it."},
    ]


def _arguments(fact: Fact) -> str:
    return msgspec.json.encode({"path": fact.path}).decode()


def _filler(number: int) -> list[dict[str, Any]]:
    said = " ".join(_FILLER).replace("{n}", str(number))
    return [{"role": "user", "content": said}, {"role": "assistant", "content": f"Noted as entry {number}."}]


def _text(message: dict[str, Any]) -> str:
    return msgspec.json.encode([message.get("content"), message.get("tool_calls")]).decode()


def _asked(backend: Backend, spec: BackendSpec, messages: list[dict[str, Any]]) -> asking.Heard:
    case = Case(id="recall", family="recall", category="multi_turn", messages=messages, tools=[READ])
    sent, body = request_of(case, sampling=spec.sampling, calling=spec.toolcalls)
    # A call of the tool is longer than a value.
    body["max_tokens"] = _ANSWER * 2
    heard = asking.ask(backend.client, sent, body)
    if heard.lost is not None or heard.unsure:
        raise BackendDied(heard.detail)
    if heard.message is None and not heard.kind:
        raise RequestFailed(heard.detail, status=heard.status)
    return heard


def _judged(fact: Fact, heard: asking.Heard, spec: BackendSpec) -> RecallAnswer:
    text = heard.text[:_KEPT_TEXT]
    if heard.message is None:
        return RecallAnswer(label=fact.label, outcome="wrong", text=text)
    found = diagnose(heard.message, [READ], protocol=spec.toolcalls.protocol)
    paths = [call.arguments.get("path") for call in found.calls if isinstance(call.arguments, dict)]
    outcome: Outcome = "wrong"
    if fact.path in paths:
        outcome = "read_again"
    elif not found.calls and re.search(rf"(?<![\w-]){re.escape(fact.value)}(?![\w-])", heard.text, re.IGNORECASE):
        outcome = "recalled"
    return RecallAnswer(label=fact.label, outcome=outcome, text=text)


def judge(
    with_summary: RecallArm,
    without: RecallArm,
    *,
    target: float = TARGET,
    confidence: float = CONFIDENCE,
) -> RecallVerdict:
    """Hold the rate of recalled facts with a summary against the target, and compare both arms fact by fact.

    :raises BadInput: a target or a confidence that is none, or arms of different facts.
    """
    for arm in (with_summary, without):
        given: object = arm
        if not isinstance(given, RecallArm):
            raise BadInput(f"{given!r:.60} is no arm of a recall check: give both that `recall.ask` returned")
    shares: dict[str, object] = {"target": target, "confidence": confidence}
    for name, value in shares.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1:
            raise BadInput(f"{name}={value!r} of a recall check: write a share above 0 and below 1, such as 0.9")
    total = len(with_summary.answers)
    if not total or [one.label for one in with_summary.answers] != [one.label for one in without.answers]:
        raise BadInput("a recall check compares the same facts with a summary and without, at least one of them")
    right, right_without = with_summary.count("recalled"), without.count("recalled")
    pairs = list(zip(with_summary.answers, without.answers, strict=True))
    won = sum(one.outcome == "recalled" != other.outcome for one, other in pairs)
    lost = sum(other.outcome == "recalled" != one.outcome for one, other in pairs)
    low = clopper_pearson(right, total, confidence, "lower")[0]
    high = clopper_pearson(right, total, confidence, "upper")[1]
    difference_low, difference_high = tango_interval(lost, won, total, confidence)
    outcome: Literal["passed", "failed", "inconclusive"] = "inconclusive"
    kept = [arm for arm in (with_summary, without) if arm.forgotten < total]
    sentences = [
        f"With a summary in the window {right} of {total} facts were recalled ({right / total:.1%}; at least {low:.1%}"
        f" and at most {high:.1%}, each with {confidence:.0%} confidence), without one {right_without}."
    ]
    if kept:
        sentences.append(
            f"This decides nothing: {total - kept[0].forgotten} facts never left the window; give a smaller `context`."
        )
    elif low >= target:
        outcome = "passed"
        sentences.append(f"The target of {target:.0%} is proven.")
    elif high < target:
        outcome = "failed"
        sentences.append(
            f"That is below the target of {target:.0%}: the model does not use what stands in its summary."
        )
    else:
        needed = required_n_proven(total - right, target, confidence)
        sentences.append(f"The target of {target:.0%} is neither proven nor refuted; with {needed} facts it may be.")
    sentences.append(
        f"The summary changes the rate by {(won - lost) / total:+.1%} (from {difference_low:+.1%} to"
        f" {difference_high:+.1%})."
    )
    again, again_without = with_summary.count("read_again"), without.count("read_again")
    sentences.append(f"Files that had been read were read again for {again_without} facts without it, {again} with it.")
    return RecallVerdict(
        outcome=outcome,
        text=" ".join(sentences),
        target=target,
        facts=total,
        rate=right / total,
        low=low,
        high=high,
        rate_without=right_without / total,
        difference=(won - lost) / total,
        difference_low=difference_low,
        difference_high=difference_high,
        p_value=mcnemar_exact(lost, won),
        read_again=(again_without / total, again / total),
    )
