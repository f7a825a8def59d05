"""Answers of an OpenAI-compatible server as JSON: whole, in pieces, and errors. The keys are llama.cpp's."""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

#: What a stand-in for a tokenizer makes of text: a word with the space before it, or one other character.
_TOKEN = re.compile(r" ?\w{1,6}|\W", re.ASCII)


class ScriptedReply(msgspec.Struct, frozen=True, kw_only=True):
    """What a scripted backend answers to one request.

    :ivar case: id of the case that was recognised. :ivar turn: 0, or the number of the retry.
    :ivar right: whether the calls are the expected ones; ``None``: no case was recognised, or a fault stands in place
        of an answer. :ivar kind: of the defect that was put into it, ``valid`` where there is none.
    :ivar status: of HTTP. :ivar error: body of an error. :ivar message: of the assistant.
    :ivar fault: what goes wrong with it. :ivar retry_after: the header of that name. :ivar size: bytes of ``huge``.
    """

    case: str | None
    turn: int = 0
    protocol: str = "tools"
    right: bool | None = None
    kind: str = "valid"
    status: int = 200
    error: dict[str, Any] | None = None
    message: dict[str, Any] = {}
    finish_reason: str = "stop"
    fault: str | None = None
    retry_after: float | None = None
    size: int = 0
    tokens_in: int = 0
    tokens_out: int = 0
    model: str = "scripted"

    @property
    def body(self) -> dict[str, Any]:
        """The whole answer: a chat completion, or the error."""
        return self.error if self.error is not None else completion(self)


def tokens(text: str) -> list[int]:
    """Token ids of a text, by a stand-in for a tokenizer: equal pieces have equal ids."""
    return [int.from_bytes(hashlib.blake2s(piece.encode(), digest_size=2).digest(), "big") for piece in pieces(text)]


def pieces(text: str) -> list[str]:
    """The text in the pieces that it is streamed in."""
    return _TOKEN.findall(text)


def count(message: Mapping[str, Any]) -> int:
    """Tokens of a message."""
    return sum(len(pieces(text)) for text in _texts(message))


def _texts(message: Mapping[str, Any]) -> Iterator[str]:
    if isinstance(message.get("content"), str):
        yield message["content"]
    for call in message.get("tool_calls") or ():
        function = call.get("function", {}) if isinstance(call, Mapping) else {}
        yield from (value for value in function.values() if isinstance(value, str))


def error(status: int, message: str) -> dict[str, Any]:
    """An error as llama.cpp words it."""
    kinds = {400: "invalid_request_error", 404: "not_found_error", 429: "rate_limit_error", 503: "unavailable_error"}
    return {"error": {"code": status, "message": message, "type": kinds.get(status, "server_error")}}


def _head(reply: ScriptedReply, kind: str) -> dict[str, Any]:
    name = hashlib.blake2s(f"{reply.case}\0{reply.turn}".encode(), digest_size=12).hexdigest()
    return {
        "created": int(time.time()),
        "model": reply.model,
        "system_fingerprint": "scripted",
        "object": kind,
        "id": f"chatcmpl-{name}",
    }


def _usage(reply: ScriptedReply) -> dict[str, Any]:
    return {
        "completion_tokens": reply.tokens_out,
        "prompt_tokens": reply.tokens_in,
        "total_tokens": reply.tokens_in + reply.tokens_out,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def completion(reply: ScriptedReply) -> dict[str, Any]:
    """A ``chat.completion``."""
    choice = {"finish_reason": reply.finish_reason, "index": 0, "message": reply.message}
    return {"choices": [choice], **_head(reply, "chat.completion"), "usage": _usage(reply)}


def text_completion(reply: ScriptedReply) -> dict[str, Any]:
    """A ``text_completion`` of the message's text."""
    text = reply.message.get("content") or ""
    choice = {"text": text, "index": 0, "logprobs": None, "finish_reason": reply.finish_reason}
    return {"choices": [choice], **_head(reply, "text_completion"), "usage": _usage(reply)}


def chunks(reply: ScriptedReply, *, usage: bool = False) -> Iterator[dict[str, Any]]:
    """The ``chat.completion.chunk`` objects of a streamed answer."""
    head = _head(reply, "chat.completion.chunk")
    for delta in deltas(reply.message):
        yield {"choices": [{"finish_reason": None, "index": 0, "delta": delta}], **head}
    yield {"choices": [{"finish_reason": reply.finish_reason, "index": 0, "delta": {}}], **head}
    if usage:
        yield {"choices": [], **head, "usage": _usage(reply)}


def deltas(message: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """A message in pieces: its role, its text, then each call's name and its arguments bit by bit."""
    yield {"role": "assistant", "content": None}
    content = message.get("content")
    if isinstance(content, str):
        yield from ({"content": piece} for piece in pieces(content))
    for index, call in enumerate(message.get("tool_calls") or ()):
        function = call["function"]
        arguments = function.get("arguments")
        bits = pieces(arguments) if isinstance(arguments, str) else [arguments]
        opening = {"name": function["name"], "arguments": bits[0] if bits else ""}
        yield {"tool_calls": [{"index": index, "id": call["id"], "type": "function", "function": opening}]}
        for bit in bits[1:]:
            yield {"tool_calls": [{"index": index, "function": {"arguments": bit}}]}


def text_chunks(reply: ScriptedReply) -> Iterator[dict[str, Any]]:
    """The pieces of a streamed text completion; llama.cpp puts the usage into the last one, asked or not."""
    head = _head(reply, "text_completion")
    for piece in pieces(reply.message.get("content") or ""):
        yield {"choices": [{"text": piece, "index": 0, "logprobs": None, "finish_reason": None}], **head}
    last = {"text": "", "index": 0, "logprobs": None, "finish_reason": reply.finish_reason}
    yield {"choices": [last], **head, "usage": _usage(reply)}
