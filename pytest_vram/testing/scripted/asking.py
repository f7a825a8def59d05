"""A scripted backend in this process, behind the interface of a client."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from pytest_vram.backends.record import RequestRecord
from pytest_vram.backends.reply import Reply
from pytest_vram.errors import BackendDied, RequestFailed, RequestTimeout
from pytest_vram.testing.scripted import shapes
from pytest_vram.testing.scripted.answering import Answerer
from pytest_vram.testing.scripted.script import Script
from pytest_vram.testing.scripted.shapes import ScriptedReply
from pytest_vram.toolcalls.cases import Case, CaseSet

NAME = "scripted"
#: What an answer without end consists of.
_LONG = {"endless": " and so on and on", "huge": "0123456789abcdef"}


class ScriptedClient:
    """Asks a scripted backend that has no process and no port: thousands of cases in a second.

    It answers and raises as :class:`pytest_vram.backends.VramClient` does; latency is not waited for. Faults that only
    a connection can show end in the error that a client reports, and what does not end is a very long answer.
    """

    def __init__(self, script: Script, cases: CaseSet | Sequence[Case]) -> None:
        self.answerer = Answerer(script, cases)
        self._dead = False

    def chat(self, messages: Sequence[Mapping[str, Any]], *, max_tokens: int | None = None, **body: Any) -> Reply:
        """A chat completion.

        :raises RequestFailed: an error status, or an answer that is none. :raises RequestTimeout: it is never
            finished. :raises BackendDied: the connection was lost.
        """
        self._alive()
        limit = {} if max_tokens is None else {"max_tokens": max_tokens}
        answered = self.answerer.answer({"messages": list(messages), **limit, **body})
        self._dead = answered.fault in ("dies", "dies_midway")
        _raise(answered, streamed=bool(body.get("stream")))
        if answered.fault in _LONG:
            long = {"role": "assistant", "content": _LONG[answered.fault] * (max(answered.size, 16) // 16)}
            answered = msgspec.structs.replace(answered, message=long, finish_reason="length")
        content = answered.message.get("content")
        return Reply(
            text=content if isinstance(content, str) else "",
            message=answered.message,
            finish_reason=answered.finish_reason,
            tokens_in=answered.tokens_in,
            tokens_out=answered.tokens_out,
            record=RequestRecord(
                id=str(self.answerer.asked),
                backend=NAME,
                path="/v1/chat/completions",
                result="ok",
                t=0,
                latency=0.0,
                waited=0.0,
                tokens_in=answered.tokens_in,
                tokens_out=answered.tokens_out,
                status=200,
                finish_reason=answered.finish_reason,
                model=answered.model,
            ),
            raw=shapes.completion(answered),
        )

    def get(self, path: str) -> Any:
        """Whether it lives: the model's list, of any path. :raises BackendDied: the script let it die."""
        self._alive()
        return {"object": "list", "data": [{"id": self.answerer.script.model, "object": "model"}]}

    def _alive(self) -> None:
        if self._dead:
            raise BackendDied(f"backend {NAME!r} died, as its script says")

    def tokenize(self, text: str) -> list[int]:
        """Token ids of a text, as the server's ``/tokenize`` gives them."""
        return shapes.tokens(text)


def _raise(answered: ScriptedReply, *, streamed: bool) -> None:
    what = f"backend {NAME!r} answered HTTP {answered.status} to POST /v1/chat/completions"
    if answered.error is not None:
        body = json.dumps(answered.error)
        wait = f"{answered.retry_after:g}" if answered.retry_after is not None else None
        message = f"{what}: {answered.error['error']['message']}"
        raise RequestFailed(message, status=answered.status, body=body, retry_after=wait)
    fault = answered.fault
    if fault in ("disconnect", "disconnect_midway", "dies", "dies_midway"):
        raise BackendDied(f"backend {NAME!r} closed the connection during POST /v1/chat/completions")
    if fault == "silent":
        raise RequestTimeout(f"backend {NAME!r} did not answer POST /v1/chat/completions in time")
    if fault == "empty_choices":
        raise RequestFailed(f"{what}: the answer has no choices", status=200)
    if fault in ("empty_body", "invalid_utf8", "not_json") or (fault == "wrong_content_type" and streamed):
        raise RequestFailed(f"{what}: the answer is not JSON", status=200)
