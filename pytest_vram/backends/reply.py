"""What a server answered: reading it, judging its status, and the record and log line of one request."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

import msgspec

from pytest_vram.backends.frames import of_ours
from pytest_vram.backends.record import RequestRecord
from pytest_vram.backends.words import said
from pytest_vram.errors import RequestFailed
from pytest_vram.readings import Measured, Reading
from pytest_vram.units import MIB, mib

__tracebackhide__ = of_ours

#: Bytes of one answer that are read; a generation has a thousandth of it.
LARGEST = 64 << 20
#: Bytes of a failed answer's body that its error keeps.
_KEPT = 1 << 16
_LINE_END = re.compile(rb"[\r\n]")


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


class Guard:
    """Watches an answer while it arrives, and ends a request whose answer is longer than any can be.

    :ivar pieces: of a stream that brought generated text. :ivar taken: bytes. :ivar stopped: why the request was
        ended; "" where it was not. :ivar text: the beginning of what was generated, of an answer that is no stream the
        beginning of its body.
    """

    #: Characters of the answer that are kept.
    KEPT = 20_000

    def __init__(self, *, pieces: int, size: int) -> None:
        """:param pieces: pieces of a stream, and ``size`` bytes, beyond which it is ended."""
        self.pieces = 0
        self.taken = 0
        self.stopped = ""
        self._most_pieces = pieces
        self._most_bytes = size
        self._texts: list[str] = []
        self._room = self.KEPT

    @property
    def text(self) -> str:
        """What was kept of it."""
        return "".join(self._texts)

    def took(self, count: int) -> None:
        """So many bytes came."""
        self.taken += count
        if self.taken > self._most_bytes:
            self.stopped = f"the answer did not end: it was stopped after {mib(self.taken)}"

    def generated(self, text: str) -> None:
        """A piece of a stream brought this."""
        self.pieces += 1
        self.keep(text)
        if self.pieces > self._most_pieces:
            self.stopped = f"the answer did not end: it was stopped after {self.pieces:,} pieces"

    def keep(self, text: str) -> None:
        """Keep it, as far as there is room."""
        if self._room > 0:
            self._texts.append(text[: self._room])
            self._room -= len(text)


class Collector:
    """Takes the bytes of one answer, plain JSON or a stream of server-sent events, and decodes them."""

    def __init__(
        self,
        *,
        backend: str,
        path: str,
        status: int,
        content_type: str,
        nameless: bool = False,
        guard: Guard | None = None,
        retry_after: str | None = None,
    ) -> None:
        """
        :param nameless: the request named no model, which some servers ask for.
        :param guard: may end it early. :param retry_after: the header of that name.
        :ivar first: seconds to the first generated text of a stream.
        :ivar arrivals: in how many of the chunks given to :meth:`feed` generated text came.
        """
        self.nameless = nameless
        self.guard = guard
        self.retry_after = retry_after
        self.backend = backend
        self.path = path
        self.status = status
        self.first: float | None = None
        self.arrivals = 0
        self._taken = 0
        self._carried = 0
        self._events = status < 300 and content_type.startswith("text/event-stream")
        self._buffer = bytearray()
        self._pieces: list[dict[str, Any]] = []
        self._ended = False

    def feed(self, chunk: bytes, elapsed: float) -> None:
        """Take some bytes that came ``elapsed`` seconds after the request was sent.

        :raises RequestFailed: there are more than :data:`LARGEST` of them, a stream brings an error, or the guard ends
            it.
        """
        self._taken += len(chunk)
        if self.guard is not None:
            self.guard.took(len(chunk))
            if not self._events and self._taken - len(chunk) < Guard.KEPT:
                self.guard.keep(chunk[: Guard.KEPT].decode("utf-8", "replace"))
            if self.guard.stopped:
                if self._events and not self.guard.pieces:  # all of it is one event that has not ended
                    self.guard.keep(
                        bytes((self._buffer[: Guard.KEPT] + chunk)[: Guard.KEPT]).decode("utf-8", "replace")
                    )
                self._buffer.clear()
                raise self.failure(self.guard.stopped)
        if self._taken > LARGEST:
            self._buffer.clear()
            raise self.failure(f"the answer is larger than {mib(LARGEST)}: the rest was not read")
        seen = len(self._buffer)
        self._buffer += chunk
        if not self._events:
            return
        carried = self._carried
        # A line ends in CR, LF or both: what is between the two is a blank line, which says nothing.
        while (end := _LINE_END.search(self._buffer, seen)) is not None:
            line = bytes(self._buffer[: end.start()]).strip()
            del self._buffer[: end.end()]
            seen = 0
            self._line(line, elapsed)
        self.arrivals += self._carried > carried

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
            raise self.failure(f"a piece of the stream is not an object: {said(value)}")
        if "error" in piece:
            raise self.failure(_message_of(value))
        if _carries(piece):
            self._carried += 1
            self.first = elapsed if self.first is None else self.first
            if self.guard is not None:
                self.guard.generated(_generated(piece))
                if self.guard.stopped:
                    raise self.failure(self.guard.stopped)
        self._pieces.append(piece)

    def decoded(self) -> Any:
        """The whole answer, decoded.

        :raises RequestFailed: an error status, an error object, a stream without its end, or no JSON.
        """
        body = bytes(self._buffer)
        if self.status >= 300:  # redirects are not followed: a server under test has one address
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
            raise self.failure(f"the answer is not JSON: {said(body) or 'it is empty'}", body) from None
        except RecursionError:
            raise self.failure(f"the answer is nested too deeply to be read: {said(body, 60)}", body) from None

    def failure(self, message: str, body: bytes = b"") -> RequestFailed:
        """A :class:`RequestFailed` for this answer."""
        hint = ""
        if self.status in (401, 403):
            hint = f"; the API key was refused: set `api_key` in [backend.{self.backend}]"
        elif 300 <= self.status < 400:
            hint = "; it sends the request elsewhere, which is not followed: name the right address"
        elif self.status == 404 and "model" not in message.lower():
            hint = "; the server has no such path"
        elif self.status in (400, 404, 422) and self.nameless and "model" in message.lower():
            hint = f"; if it wants the name of a model, set `served_model` in [backend.{self.backend}]"
        what = f"backend {self.backend!r} answered HTTP {self.status} to {self.path}"
        text = body[:_KEPT].decode("utf-8", "replace")
        return RequestFailed(f"{what}: {message}{hint}", status=self.status, body=text, retry_after=self.retry_after)


def _message_of(body: bytes) -> str:
    """The server's own words out of an error answer."""
    try:
        answer: Any = json.loads(body)
        for key in ("error", "message", "detail"):
            if isinstance(answer, dict) and answer.get(key):
                answer = answer[key]
        return said(answer if isinstance(answer, str) else json.dumps(answer, ensure_ascii=False))
    except (ValueError, RecursionError):
        return said(body) or "without a message"


def _objects(values: object) -> list[dict[str, Any]]:
    """The objects of a list; whatever else a server put there is left out."""
    return [value for value in values if isinstance(value, dict)] if isinstance(values, list) else []


def _object(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


def _carries(piece: Mapping[str, Any]) -> bool:
    """Whether a piece of a stream holds generated text or a tool call."""
    for choice in _objects(piece.get("choices")):
        delta = _object(choice.get("delta"))
        if choice.get("text") or any(delta.get(key) for key in ("content", "reasoning_content", "tool_calls")):
            return True
    return False


def _generated(piece: Mapping[str, Any]) -> str:
    """The generated text of a piece, arguments of calls included."""
    texts: list[str] = []
    for choice in _objects(piece.get("choices")):
        delta = _object(choice.get("delta"))
        texts += [_text(choice.get("text")), _text(delta.get("reasoning_content")), _text(delta.get("content"))]
        for call in _objects(delta.get("tool_calls")):
            function = _object(call.get("function"))
            texts += [_text(function.get("name")), _text(function.get("arguments"))]
    return "".join(texts)


def _joined(pieces: list[dict[str, Any]]) -> dict[str, Any]:
    """One answer out of the pieces of a stream; of several choices, the first."""
    whole: dict[str, Any] = {}
    texts: list[str] = []
    said_by: dict[str, list[str]] = {}
    finish, chosen = None, False
    calls: dict[int, dict[str, Any]] = {}
    for piece in pieces:
        whole.update({key: value for key, value in piece.items() if key != "choices" and value is not None})
        for choice in _objects(piece.get("choices")):
            if choice.get("index", 0) != 0:
                continue
            if not _tells(choice):
                continue
            chosen = True
            finish = choice.get("finish_reason") or finish
            texts.append(_text(choice.get("text")))
            for key, value in _object(choice.get("delta")).items():
                if key == "tool_calls":
                    for part in _objects(value):
                        _add_call(calls, part)
                elif isinstance(value, str) and key != "role":
                    said_by.setdefault(key, []).append(value)
    if not chosen:
        return whole  # as an answer that is no stream and has no choices
    message: dict[str, Any] = {"role": "assistant", "content": None}
    message.update({key: "".join(parts) for key, parts in said_by.items()})
    if calls:
        message["tool_calls"] = [calls[index] for index in sorted(calls)]
    choice = {"index": 0, "finish_reason": finish}
    is_text = _text(whole.get("object")).startswith("text_completion")
    whole["choices"] = [choice | ({"text": "".join(texts)} if is_text else {"message": message})]
    return whole


def _tells(choice: Mapping[str, Any]) -> bool:
    """Whether a choice in a stream has what makes it one: a part of a message or of a text, or why it ended."""
    return isinstance(choice.get("delta"), dict) or any(
        isinstance(choice.get(key), str) for key in ("text", "finish_reason")
    )


def _add_call(calls: dict[int, dict[str, Any]], part: Mapping[str, Any]) -> None:
    index = part.get("index", 0)
    call = calls.setdefault(
        index if isinstance(index, int) else 0, {"type": "function", "function": {"name": "", "arguments": ""}}
    )
    if part.get("id"):
        call["id"] = part["id"]
    for key, value in _object(part.get("function")).items():
        call["function"][key] = call["function"].get(key, "") + _text(value)


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


def has_message(answer: Mapping[str, Any]) -> bool:
    """Whether the first choice of a chat completion has a message, whatever is in it."""
    choices = answer.get("choices")
    first = choices[0] if isinstance(choices, list) and choices else None
    return isinstance(first, dict) and isinstance(first.get("message"), dict)


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
        **({"doubt": record.doubt} if record.doubt is not None else {}),
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
