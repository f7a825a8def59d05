"""What a server answered: reading it, judging its status, and the record and log line of one request."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

import msgspec

from pytest_vram.backends.record import RequestRecord
from pytest_vram.errors import RequestFailed
from pytest_vram.readings import Measured, Reading
from pytest_vram.units import MIB

#: Characters of a server's own message that are repeated in ours.
SHOWN = 300


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """A finished answer.

    :ivar text: the generated text; empty where the answer is a tool call only.
    :ivar message: the assistant message (chat), or ``{}`` (text completion).
    :ivar tokens_in: tokens of the prompt, from ``usage``. :ivar tokens_out: generated tokens; ``None``: not told.
    :ivar raw: the whole decoded answer; of a stream, an equivalent of it put together from its pieces.
    """

    text: str
    message: dict[str, Any]
    finish_reason: str | None
    tokens_in: int | None
    tokens_out: int | None
    record: RequestRecord
    raw: dict[str, Any]


class Collector:
    """Takes the bytes of one answer, plain JSON or a stream of server-sent events, and decodes them."""

    def __init__(self, *, backend: str, path: str, status: int, content_type: str, nameless: bool = False) -> None:
        """:param nameless: the request named no model, which some servers ask for."""
        self.nameless = nameless
        self.backend = backend
        self.path = path
        self.status = status
        self.first: float | None = None
        self._events = status < 400 and content_type.startswith("text/event-stream")
        self._buffer = bytearray()
        self._pieces: list[dict[str, Any]] = []
        self._ended = False

    def feed(self, chunk: bytes, elapsed: float) -> None:
        """Take some bytes that came ``elapsed`` seconds after the request was sent."""
        self._buffer += chunk
        if not self._events:
            return
        while (end := self._buffer.find(b"\n")) >= 0:
            line = bytes(self._buffer[:end]).strip()
            del self._buffer[: end + 1]
            self._line(line, elapsed)

    def _line(self, line: bytes, elapsed: float) -> None:
        field, _, value = line.partition(b":")
        value = value.strip()
        if field == b"error":
            raise self.failure(_message_of(value))
        if field != b"data" or self._ended:
            return  # comments, event names, blank lines
        if value == b"[DONE]":
            self._ended = True
            return
        piece = self._decoded(value)
        if not isinstance(piece, dict):
            raise self.failure(f"a piece of the stream is not an object: {_short(value)}")
        if "error" in piece:
            raise self.failure(_message_of(value))
        if self.first is None and _carries(piece):
            self.first = elapsed
        self._pieces.append(piece)

    def decoded(self) -> Any:
        """The whole answer, decoded.

        :raises RequestFailed: an error status, an error object, a stream without its end, or no JSON.
        """
        body = bytes(self._buffer)
        if self.status >= 400:
            raise self.failure(_message_of(body), body)
        if self._events:
            if not self._ended:
                raise self.failure("the stream ended in the middle of the answer")
            return _joined(self._pieces)
        answer = self._decoded(body)
        if isinstance(answer, dict) and answer.get("error"):
            raise self.failure(_message_of(body), body)
        return answer

    def _decoded(self, body: bytes) -> Any:
        try:
            return json.loads(body)
        except ValueError:
            raise self.failure(f"the answer is not JSON: {_short(body) or 'it is empty'}", body) from None

    def failure(self, message: str, body: bytes = b"") -> RequestFailed:
        """A :class:`RequestFailed` for this answer."""
        hint = ""
        if self.status in (401, 403):
            hint = f"; the API key was refused: set `api_key` in [backend.{self.backend}]"
        elif self.status == 404 and "model" not in message.lower():
            hint = "; the server has no such path"
        elif self.status in (400, 404, 422) and self.nameless and "model" in message.lower():
            hint = f"; if it wants the name of a model, set `served_model` in [backend.{self.backend}]"
        what = f"backend {self.backend!r} answered HTTP {self.status} to {self.path}"
        text = body.decode("utf-8", "replace")
        return RequestFailed(f"{what}: {message}{hint}", status=self.status, body=text)


def _short(body: bytes) -> str:
    text = body.decode("utf-8", "replace").strip()
    return text if len(text) <= SHOWN else text[: SHOWN - 1] + "…"


def _message_of(body: bytes) -> str:
    """The server's own words out of an error answer, at most :data:`SHOWN` characters."""
    try:
        answer: Any = json.loads(body)
    except ValueError:
        return _short(body) or "without a message"
    for key in ("error", "message", "detail"):
        if isinstance(answer, dict) and answer.get(key):
            answer = answer[key]
    return _short((answer if isinstance(answer, str) else json.dumps(answer)).encode())


def _carries(piece: Mapping[str, Any]) -> bool:
    """Whether a piece of a stream holds generated text or a tool call."""
    for choice in piece.get("choices") or ():
        delta = choice.get("delta") or {}
        if choice.get("text") or any(delta.get(key) for key in ("content", "reasoning_content", "tool_calls")):
            return True
    return False


def _joined(pieces: list[dict[str, Any]]) -> dict[str, Any]:
    """One answer out of the pieces of a stream; of several choices, the first."""
    whole: dict[str, Any] = {}
    message: dict[str, Any] = {"role": "assistant", "content": None}
    text = ""
    finish = None
    calls: dict[int, dict[str, Any]] = {}
    for piece in pieces:
        whole.update({key: value for key, value in piece.items() if key != "choices" and value is not None})
        for choice in piece.get("choices") or ():
            if choice.get("index", 0) != 0:
                continue
            finish = choice.get("finish_reason") or finish
            text += choice.get("text") or ""
            for key, value in (choice.get("delta") or {}).items():
                if key == "tool_calls":
                    for part in value or ():
                        _add_call(calls, part)
                elif isinstance(value, str) and key != "role":
                    message[key] = (message.get(key) or "") + value
    if calls:
        message["tool_calls"] = [calls[index] for index in sorted(calls)]
    choice = {"index": 0, "finish_reason": finish}
    is_text = str(whole.get("object", "")).startswith("text_completion")
    whole["choices"] = [choice | ({"text": text} if is_text else {"message": message})]
    return whole


def _add_call(calls: dict[int, dict[str, Any]], part: Mapping[str, Any]) -> None:
    call = calls.setdefault(part.get("index", 0), {"type": "function", "function": {"name": "", "arguments": ""}})
    if part.get("id"):
        call["id"] = part["id"]
    for key, value in (part.get("function") or {}).items():
        call["function"][key] = call["function"].get(key, "") + (value or "")


class Counts(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of one answer. :ivar rate_from: ``server``, ``stream`` or ``latency``."""

    tokens_in: int | None = None
    tokens_out: int | None = None
    rate: float | None = None
    rate_from: str | None = None
    prompt_rate: float | None = None


def counts(answer: Mapping[str, Any], latency: float, first: float | None) -> Counts:
    """Tokens and decode rate of an answer.

    The server's own timing of its decode phase comes first; else tokens after the first over the time after the
    first piece of a stream; else tokens over the whole latency, which includes the prompt. One token has no rate.
    """
    usage = answer.get("usage") if isinstance(answer.get("usage"), dict) else {}
    timings = answer.get("timings") if isinstance(answer.get("timings"), dict) else {}
    assert isinstance(usage, dict)
    assert isinstance(timings, dict)
    tokens_in, tokens_out = _integer(usage.get("prompt_tokens")), _integer(usage.get("completion_tokens"))
    rate, rate_from = None, None
    if tokens_out is not None and tokens_out > 1:
        if (served := _positive(timings.get("predicted_per_second"))) is not None:
            rate, rate_from = served, "server"
        elif first is not None and latency > first:
            rate, rate_from = (tokens_out - 1) / (latency - first), "stream"
        elif latency > 0:
            rate, rate_from = tokens_out / latency, "latency"
    return Counts(
        tokens_in=tokens_in,
        tokens_out=tokens_out,
        rate=rate,
        rate_from=rate_from,
        prompt_rate=_positive(timings.get("prompt_per_second")),
    )


def _integer(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _positive(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) and value > 0 else None


def choice_of(answer: Mapping[str, Any]) -> tuple[str, dict[str, Any], str | None] | None:
    """Text, message and finish reason of the first choice; ``None`` where the answer has none."""
    choices = answer.get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        return None
    choice = choices[0]
    message = choice.get("message") if isinstance(choice.get("message"), dict) else {}
    assert isinstance(message, dict)
    text = choice.get("text") if isinstance(choice.get("text"), str) else message.get("content")
    finish = choice.get("finish_reason")
    return text if isinstance(text, str) else "", message, finish if isinstance(finish, str) else None


def log_line(record: RequestRecord) -> str:
    """The request as one logfmt line: ``task= model= tokens_in= … gpu_peak= result=``."""
    fields: dict[str, str | None] = {
        "task": record.task or record.id,
        "model": PurePath(record.model).name if record.model else None,
        "tokens_in": _plain(record.tokens_in),
        "tokens_out": _plain(record.tokens_out),
        "latency": f"{record.latency:.3f}s",
        "tokens_per_second": f"{record.tokens_per_second:.1f}" if record.tokens_per_second is not None else None,
        **_peaks(record.peak),
        "result": record.result,
    }
    return " ".join(f"{key}={_quoted(value)}" for key, value in fields.items())


def _plain(value: int | None) -> str | None:
    return None if value is None else str(value)


def _peaks(peak: Mapping[str, Measured]) -> dict[str, str]:
    """``gpu_peak`` for cards; ``peak`` with the device's label where host memory stands in for one."""
    cards = {label: figure for label, figure in peak.items() if label != "host"}
    if cards:
        values = {label: _figure(figure) for label, figure in cards.items()}
        only = next(iter(values.values()))
        joined = ",".join(f"{label}:{value}" for label, value in values.items())
        return {"gpu_peak": only if len(values) == 1 else joined}
    if "host" in peak:
        return {"peak": f"host:{_figure(peak['host'])}"}
    return {"gpu_peak": "unmeasured"}


def _figure(figure: Measured) -> str:
    return f"{figure.upper / MIB:.1f}MiB" if isinstance(figure, Reading) else "unmeasured"


def _quoted(value: str | None) -> str:
    if value is None:
        return "-"
    if value and all(character.isprintable() and character not in ' "=' for character in value):
        return value
    return json.dumps(value, ensure_ascii=False)
