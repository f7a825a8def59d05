"""The answer of a scripted backend to a request, without any connection."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from pytest_vram.testing.scripted import drawing, shapes
from pytest_vram.testing.scripted.defects import PARSE_ERROR, Wording, right_words, wrong_words
from pytest_vram.testing.scripted.recalling import recalled
from pytest_vram.testing.scripted.recognising import Recognised, Recogniser
from pytest_vram.testing.scripted.script import Fault, Script
from pytest_vram.testing.scripted.shapes import ScriptedReply
from pytest_vram.toolcalls.cases import Case, CaseSet

#: What is said to a request that asks none of the cases.
UNKNOWN = "This is a scripted backend: the request asks none of its cases."

HISTORY_ERROR = (
    "Failed to parse tool call arguments as JSON: [json.exception.parse_error.101] parse error at line 1, column 10:"
    " syntax error while parsing value - unexpected end of input"
)


class Answerer:
    """Answers requests as a script says, for a set of cases; any thread may ask.

    :ivar asked: how many generations were asked. :ivar unknown: how many of them asked none of the cases.
    """

    def __init__(self, script: Script, cases: CaseSet | Sequence[Case]) -> None:
        self.script = script
        self.asked = 0
        self.unknown = 0
        self.faults: Counter[str] = Counter()
        self._recogniser = Recogniser(cases.cases if isinstance(cases, CaseSet) else cases)
        self._met: Counter[tuple[int, str | None]] = Counter()
        self._lock = threading.Lock()

    def answer(self, body: Mapping[str, Any]) -> ScriptedReply:
        """What is answered to the body of a chat completion."""
        with self._lock:  # one at a time: which request is which number must not depend on the scheduler
            found = self._recogniser.recognise(body)
            number, self.asked = self.asked, self.asked + 1
            self.unknown += found.case is None
            fault = self._fault(number, found)
            if fault is not None:
                self.faults[fault.kind] += 1
        answered = self._answered(body, found)
        return answered if fault is None else _with_fault(answered, fault)

    def _fault(self, number: int, found: Recognised) -> Fault | None:
        case = found.case.id if found.case is not None else None
        for index, fault in enumerate(self.script.faults):
            if fault.turn != "any" and (fault.turn == "retry") != (found.turn > 0):
                continue
            drawn = case is not None and drawing.uniform(self.script.seed, case, "fault", index) < fault.share
            if not (number in fault.requests or case in fault.cases or drawn):
                continue
            if fault.times is not None and self._met[index, case] >= fault.times:
                continue
            self._met[index, case] += 1
            return fault
        return None

    def _answered(self, body: Mapping[str, Any], found: Recognised) -> ScriptedReply:
        script, case = self.script, found.case
        asked = _asked_tokens(body)
        if case is None:
            message = recalled(script, body) or {"role": "assistant", "content": UNKNOWN}
            return _reply(found, Wording(message=message), asked, script, right=None, kind="valid")
        right = drawing.is_right(script, case.id, case.family, found.turn)
        kinds = drawing.kinds_in_turn(script.defects, drawing.generator(script.seed, case.id, "kinds", found.turn))
        if right and body.get("stream") and script.streamed_right < 1.0:
            right = drawing.uniform(script.seed, case.id, "streamed", found.turn) < script.streamed_right
            if not right:
                kinds = [script.streamed_defect]
        chance = drawing.generator(script.seed, case.id, "words", found.turn)
        if right:
            return _reply(found, right_words(case, found.protocol, chance), asked, script, right=True, kind="valid")
        kind, words = wrong_words(case, found.protocol, kinds, chance)
        return _reply(found, words, asked, script, right=False, kind=kind)


def answer(script: Script, cases: CaseSet | Sequence[Case], body: Mapping[str, Any]) -> ScriptedReply:
    """What a backend with this script answers to the body of one chat completion, as its first request.

    Whoever asks several keeps an :class:`Answerer`: it reads the cases once, and counts requests for the faults.
    """
    return Answerer(script, cases).answer(body)


def _asked_tokens(body: Mapping[str, Any]) -> int:
    # A count for the figures of a reply; a real template would add some.
    return len(json.dumps([body.get("messages"), body.get("tools")], ensure_ascii=False, default=str)) // 4


def _reply(
    found: Recognised, words: Wording, asked: int, script: Script, *, right: bool | None, kind: str
) -> ScriptedReply:
    return ScriptedReply(
        case=found.case.id if found.case is not None else None,
        turn=found.turn,
        protocol=found.protocol,
        right=right,
        kind=kind,
        status=words.status,
        error=words.error,
        message=words.message,
        finish_reason=words.finish_reason,
        tokens_in=asked,
        tokens_out=shapes.count(words.message),
        model=script.model,
    )


def _with_fault(reply: ScriptedReply, fault: Fault) -> ScriptedReply:
    """The same with what goes wrong; an answer that nobody gets is neither right nor wrong."""
    errors = {
        "http_500_parse": (500, PARSE_ERROR),
        "http_400_history": (400, HISTORY_ERROR),
        "http_500_history": (500, HISTORY_ERROR),
        "http_429": (429, "Rate limit reached: wait before the next request"),
        "http_500": (500, "internal error: the worker is in a bad state"),
        "http_503": (503, "Loading model"),
    }
    changes: dict[str, Any] = {"fault": fault.kind, "retry_after": fault.retry_after, "size": fault.size}
    if fault.kind != "wrong_content_type":
        changes |= {"right": None, "kind": ""}
    if fault.kind in errors:
        status, sentence = errors[fault.kind]
        changes |= {"status": status, "error": shapes.error(status, sentence), "message": {}}
    elif fault.kind == "empty_content":
        changes |= {"message": {"role": "assistant", "content": ""}, "error": None, "status": 200, "right": False}
        changes |= {"kind": "empty", "finish_reason": "stop", "tokens_out": 1}
    return msgspec.structs.replace(reply, **changes)
