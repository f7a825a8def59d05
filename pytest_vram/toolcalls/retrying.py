"""The turn after a failure: what the model is told, and a history that a server takes.

A model is told only what a runtime would know: that its JSON is malformed, that there is no such tool, that arguments
break the tool's schema, that a call stands in the text. A call that is well-formed and fits its schema, and is not the
right one, gets no second try: nobody who runs the model could tell it so.

Servers refuse a history whose calls have malformed arguments (llama.cpp with HTTP 500 or 400, vLLM with 400), so that
the conversation is stuck: such arguments become ``{}``, and the text of them is quoted in the feedback.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from pytest_vram.backends.words import said
from pytest_vram.toolcalls.cases import Tool
from pytest_vram.toolcalls.diagnosis import Diagnosis, feedback
from pytest_vram.toolcalls.protocols import QUOTED, call_id, join
from pytest_vram.toolcalls.tolerant import strict

#: Calls of one answer that go back.
_MOST = 20
_UNREAD = "(an answer that the server could not read)"


def worth_it(found: Diagnosis) -> bool:
    """Whether a runtime would know that something is wrong with an answer, and the model can help it."""
    # Arguments as an object are the server's deviation: the model wrote no string that it could write otherwise.
    return bool(found.knowable) and set(found.kinds) != {"arguments_as_object"}


def unread(kind: str, detail: str, body: str) -> Diagnosis:
    """What is wrong with an answer that the server did not give out.

    :param kind: ``server_parse_error`` or ``runaway``. :param body: of the server's error.
    """
    if kind == "runaway":
        told = "The answer did not end."
    else:
        words = said(_message(body))
        told = "The answer could not be read as a call" + (f": {words}" if words else ".")
    return Diagnosis(well_formed=False, kind=kind, kinds=(kind,), detail=detail, knowable=told)


def _message(body: str) -> str:
    try:
        error = json.loads(body)["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, KeyError, TypeError, RecursionError):
        return ""


def continued(
    history: Sequence[Mapping[str, Any]],
    message: Mapping[str, Any] | None,
    found: Diagnosis,
    tools: Sequence[Tool],
    protocol: str = "tools",
) -> list[dict[str, Any]]:
    """A conversation with a failed answer, and what is wrong with it.

    :param message: ``None``: the server did not give it out. :param protocol: of those without ``tools`` the history
        has text only, of user and assistant by turns.
    """
    turns = [dict(one) for one in history]
    following = answered_with(message, found, tools, calls=protocol == "tools")
    if protocol == "tools":
        return [*turns, *following]
    for one in following:
        join(turns, one)
    return turns


def answered_with(
    message: Mapping[str, Any] | None, found: Diagnosis, tools: Sequence[Tool], *, calls: bool = True
) -> list[dict[str, Any]]:
    """The messages that follow a failed answer: itself, and what is wrong with it.

    :param message: ``None``: the server did not give it out. :param calls: calls go back as such, else as text.
    """
    told = feedback(found, tools)
    stated = message.get("tool_calls") if message is not None else None
    listed = [call for call in stated if isinstance(call, Mapping)][:_MOST] if isinstance(stated, list) else []
    text = _bounded(message.get("content")) if message is not None else _UNREAD
    if listed and not calls:
        written = _bounded("\n".join(one.text for one in found.calls[:_MOST]))
        text, listed = "\n".join(part for part in (text, written) if part), []
    if not listed:
        return [{"role": "assistant", "content": text or "(empty)"}, {"role": "user", "content": told}]
    kept: list[dict[str, Any]] = []
    for index, call in enumerate(listed):
        one = _call(call, index)
        if any(one["id"] == other["id"] for other in kept):
            one["id"] = call_id(f"{one['id']} {index}")
        kept.append(one)
    results = [
        {"role": "tool", "tool_call_id": call["id"], "name": call["function"]["name"], "content": told} for call in kept
    ]
    return [{"role": "assistant", "content": text or None, "tool_calls": kept}, *results]


def _call(call: Mapping[str, Any], index: int) -> dict[str, Any]:
    stated = call.get("function")
    function: Mapping[str, Any] = stated if isinstance(stated, Mapping) else {}
    name, identity, arguments = function.get("name"), call.get("id"), function.get("arguments")
    return {
        "id": call_id(identity) if isinstance(identity, str) and identity else f"call{index:05d}",
        "type": "function",
        "function": {
            "name": name[:200] if isinstance(name, str) and name else "unknown",
            "arguments": arguments if isinstance(arguments, str) and _is_object(arguments) else "{}",
        },
    }


def _is_object(text: str) -> bool:
    if len(text) > QUOTED:
        return False
    try:
        return isinstance(strict(text), dict)
    except ValueError:
        return False


def _bounded(content: object) -> str:
    text = content if isinstance(content, str) else ""
    return text if len(text) <= QUOTED else f"{text[: QUOTED // 2]} … {text[-QUOTED // 2 :]}"
