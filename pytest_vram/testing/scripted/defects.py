"""Answers in words: the right one of a case, and one with a defect of a given kind."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from pytest_vram.testing.scripted import calls, shapes
from pytest_vram.testing.scripted.calls import Call, Site
from pytest_vram.testing.scripted.garbled import GARBLED
from pytest_vram.toolcalls.cases import Case

NOTHING_FITS = "None of the tools that I have does that. What else can I do for you?"
WITHOUT_CALL = "I have looked into it and everything seems to be in order."
PARSE_ERROR = "The model produced output that does not match the expected Hermes 2 Pro format"


class Wording(msgspec.Struct, frozen=True, kw_only=True):
    """How an answer is put. :ivar status: of HTTP, with ``error`` where it is none of 200."""

    message: dict[str, Any]
    finish_reason: str = "stop"
    status: int = 200
    error: dict[str, Any] | None = None


def right_words(case: Case, protocol: str, chance: random.Random) -> Wording:
    """The expected calls, or text where none is expected."""
    right = calls.right_calls(case, chance)
    return _words(right, protocol) if right else _without_call(NOTHING_FITS, protocol)


def wrong_words(case: Case, protocol: str, kinds: Sequence[str], chance: random.Random) -> tuple[str, Wording]:
    """An answer with the first of these kinds that the case has room for, and that kind.

    Where it has room for none of them, no call stands where one is right, and the other way round.
    """
    last = "no_call" if case.expect else ("irrelevant_call" if case.tools else "empty")
    for kind in (*kinds, last):
        words = _defective(kind, case, protocol, chance)
        if words is not None:
            return kind, words
    raise AssertionError(f"{last} has room in every case")


def _defective(kind: str, case: Case, protocol: str, chance: random.Random) -> Wording | None:
    if kind == "server_parse_error":
        return Wording(message={}, status=500, error=shapes.error(500, PARSE_ERROR)) if protocol == "tools" else None
    if kind == "empty":
        return _text("")
    if kind == "irrelevant_call":
        if case.expect or not case.tools:
            return None
        return _words([calls.any_call(chance.choice(case.tools), chance)], protocol)
    right = calls.right_calls(case, chance)
    if not right:
        return None
    if kind == "no_call":
        return _without_call(WITHOUT_CALL, protocol)
    if kind == "extra_call":
        return _words([*right, calls.any_call(chance.choice(case.tools), chance)], protocol)
    if kind in calls.WRONG:
        return _with_wrong_call(kind, case, right, protocol, chance)
    envelope = _ENVELOPES.get(kind)
    if envelope is not None:
        return envelope(right, protocol)
    return _garbled(kind, right, protocol, chance)


def _with_wrong_call(kind: str, case: Case, right: list[Call], protocol: str, chance: random.Random) -> Wording | None:
    for index in chance.sample(range(len(right)), len(right)):
        wrong = calls.WRONG[kind](Site(case, right[index], case.expect[index], chance))
        if wrong is not None:
            return _words([*right[:index], wrong, *right[index + 1 :]], protocol)
    return None


def _garbled(kind: str, right: list[Call], protocol: str, chance: random.Random) -> Wording | None:
    """Calls whose JSON has a defect: the arguments of one of them, or the whole text where there is only text."""
    garble = GARBLED[kind]
    finish = "length" if kind in ("truncated", "runaway") else None
    if protocol != "tools":
        text = garble(answer_text(right), chance)
        return None if text is None else _text(text, finish or "stop")
    for index in chance.sample(range(len(right)), len(right)):
        arguments = right[index]["arguments"]
        text = garble(_json(arguments), chance) if arguments else None
        if text is not None:
            whole = [_openai(call, at) for at, call in enumerate(right)]
            whole[index]["function"]["arguments"] = text
            if finish is not None:
                whole = whole[: index + 1]  # nothing came after it
            message = {"role": "assistant", "content": "", "tool_calls": whole}
            return Wording(message=message, finish_reason=finish or "tool_calls")
    return None


def _call_in_text(right: list[Call], protocol: str) -> Wording | None:
    text = "\n".join(f"<tool_call>\n{_json(call)}\n</tool_call>" for call in right)
    return _text(text) if protocol == "tools" else None


def _wrapper_mismatch(right: list[Call], protocol: str) -> Wording | None:
    return _text(f"<tool_call>\n{_json(right[0])}\n</function>") if protocol == "tools" else None


def _text_around(right: list[Call], protocol: str) -> Wording | None:
    if protocol == "tools":
        return None  # a call in text and text beside a call are no defects of the text around it
    return _text(f"Here is what I would do.\n{answer_text(right)}\nThat should answer it.")


def _alias_key(right: list[Call], protocol: str) -> Wording | None:
    if protocol == "tools":
        return None
    renamed = [{"name": call["name"], "parameters": call["arguments"]} for call in right]
    return _text(answer_text(renamed))


_ENVELOPES: dict[str, Callable[[list[Call], str], Wording | None]] = {
    "call_in_text": _call_in_text,
    "wrapper_mismatch": _wrapper_mismatch,
    "text_around": _text_around,
    "alias_key": _alias_key,
}


def _words(made: list[Call], protocol: str) -> Wording:
    if protocol != "tools":
        return _text(answer_text(made))
    listed = [_openai(call, index) for index, call in enumerate(made)]
    message = {"role": "assistant", "content": "", "tool_calls": listed}
    return Wording(message=message, finish_reason="tool_calls")


def _without_call(sentence: str, protocol: str) -> Wording:
    if protocol == "tools":
        return _text(sentence)
    return _text(_json({"calls": [], "answer": sentence}))


def _text(text: str, finish_reason: str = "stop") -> Wording:
    return Wording(message={"role": "assistant", "content": text}, finish_reason=finish_reason)


def answer_text(made: Sequence[Call]) -> str:
    """Calls as the text of the protocols that have no ``tools``."""
    return _json({"calls": list(made)})


def _openai(call: Call, index: int) -> dict[str, Any]:
    text = _json(call["arguments"])
    name = hashlib.blake2s(f"{index}\0{call['name']}\0{text}".encode("utf-8", "replace"), digest_size=8).hexdigest()
    return {"id": f"call_{name}", "type": "function", "function": {"name": call["name"], "arguments": text}}


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
