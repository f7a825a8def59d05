"""Asking once: what came back, and whose failure it is where nothing did.

The model's: the server could not read what it generated (an error that says so), or it did not end. The run's: the
connection was lost, HTTP 429, another error of the server, no answer in time, an answer that is no chat completion.
"""

from __future__ import annotations

import email.utils
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from pytest_vram.backends.client import VramClient
from pytest_vram.backends.reply import LARGEST, Guard, Reply
from pytest_vram.errors import BackendDied, RequestFailed, RequestTimeout
from pytest_vram.toolcalls import contexts

#: Times that a server which is busy (HTTP 429 or 503) is asked again, and seconds that it may ask to wait for.
AGAIN, LONGEST_WAIT = 3, 60.0
#: Seconds between looks at a server that closed a connection, and how often it is looked at.
_LOOKS, _BETWEEN = 3, 0.5
#: Beginnings of errors that servers answer with where their parser of tool calls refused the generated text: llama.cpp
#: (newer, of March 2026, streaming), Ollama, SGLang, vLLM with a required call, others. In small letters.
_UNREADABLE = (
    "the model produced output that does not match the expected",
    "failed to parse input at pos",
    "invalid diff:",
    "error parsing tool call",
    "failed to parse fc related info",
    "validation error for list[functiondefinition]",
    "failed to parse tool call",
    "failed to parse the tool call",
)
#: What llama.cpp says (as HTTP 500 or 400) of a call in the *history*; it begins as another server's words of an
#: answer do.
_HISTORY = "failed to parse tool call arguments as json"
#: What errors say of the messages that were sent, whatever their status: llama.cpp, Jinja, chat templates, vLLM.
_ABOUT_MESSAGES = (
    _HISTORY,
    "failed to parse messages",
    "invalid tool call arguments",
    "jinja",
    "template",
    "roles must alternate",
    "unterminated string",
    "expecting value",
    "jsondecodeerror",
)


class Asker(Protocol):
    """What answers: :class:`pytest_vram.backends.VramClient` is one."""

    def chat(self, messages: Sequence[Mapping[str, Any]], *, max_tokens: int | None = None, **body: Any) -> Reply:
        """A chat completion; raises as the client does."""


class Heard(NamedTuple):
    """What became of one request.

    :ivar message: the assistant's; ``None``: there is none that could be judged. :ivar kind: the model's failure
        (``server_parse_error``, ``history_rejected``, ``runaway``) in place of a message; "" where there is a message,
        and for infrastructure trouble. :ivar detail: in words. :ivar text: what was generated, as far as it is known.
    :ivar lost: the error, where the server is gone. :ivar unsure: the client cannot tell whether it is.
    :ivar unfit: the request does not fit the server's context. :ivar unfinished: the time of the request was over while
        text was generated. :ivar build: what the server calls itself.
    """

    message: dict[str, Any] | None = None
    kind: str = ""
    detail: str = ""
    text: str = ""
    finish_reason: str | None = None
    status: int | None = None
    latency: float = 0.0
    tokens_in: int | None = None
    tokens_out: int | None = None
    lost: BackendDied | None = None
    unsure: bool = False
    unfinished: bool = False
    unfit: bool = False
    model: str | None = None
    build: str | None = None


def guard_of(max_tokens: int) -> Guard:
    """A guard that lets every answer of so many tokens pass, however a server cuts and wraps it."""
    return Guard(pieces=4 * max_tokens + 64, size=min(LARGEST // 2, (1 << 20) + (max_tokens << 12)))


def ask(
    client: Asker,
    messages: Sequence[Mapping[str, Any]],
    body: Mapping[str, Any],
    *,
    retry: bool = False,
    sleep: Callable[[float], None] = time.sleep,
) -> Heard:
    """Ask, and again where the server is busy.

    :param retry: the messages have an answer of the model in them.
    """
    for wait in (1.0, 2.0, 4.0, None):
        guard = guard_of(int(body.get("max_tokens", 512)))
        started = time.perf_counter()
        try:
            if isinstance(client, VramClient):
                reply = client.chat(messages, guard=guard, **body)
            else:
                reply = client.chat(messages, **body)
        except RequestTimeout as error:
            return _late(error, guard, int(body.get("max_tokens", 512)), time.perf_counter() - started)
        except RequestFailed as error:
            asked_wait = _wait(error, wait)
            if asked_wait is not None:
                sleep(asked_wait)
                continue
            latency = time.perf_counter() - started
            return _refused(error, guard, int(body.get("max_tokens", 512)), retry=retry, latency=latency)
        except BackendDied as error:
            return _lost(client, error, sleep, time.perf_counter() - started)
        return _answered(reply)
    raise AssertionError("the last round returns")


def _answered(reply: Reply) -> Heard:
    message = {"role": "assistant", "content": "", **reply.message}
    model, build = reply.raw.get("model"), reply.raw.get("system_fingerprint")
    return Heard(
        message=message,
        text=reply.text,
        finish_reason=reply.finish_reason,
        status=reply.record.status,
        latency=reply.record.latency,
        tokens_in=reply.tokens_in,
        tokens_out=reply.tokens_out,
        model=model if isinstance(model, str) else None,
        build=build if isinstance(build, str) else None,
    )


def _wait(error: RequestFailed, otherwise: float | None) -> float | None:
    """Seconds to wait before asking again; ``None``: do not."""
    if error.status not in (429, 503) or otherwise is None:
        return None
    told = error.retry_after
    if told is None:
        return otherwise
    try:
        seconds = float(told)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(told).timestamp() - time.time()
        except (ValueError, OverflowError):
            return otherwise
    # Not a number, or longer than a run can wait for each case.
    return max(0.0, seconds) if seconds <= LONGEST_WAIT else None


def _late(error: RequestTimeout, guard: Guard, max_tokens: int, latency: float) -> Heard:
    # A slow server has its own limit of tokens; one that generates beyond it does not end.
    if guard.pieces > max_tokens:
        came = f"{guard.pieces:,} pieces came in the time of the request, where {max_tokens:,} tokens are the limit"
        detail = f"the answer did not end: {came}"
        return Heard(kind="runaway", detail=detail, text=guard.text, latency=latency)
    return Heard(detail=str(error), text=guard.text, latency=latency, unfinished=guard.pieces > 0)


def _refused(error: RequestFailed, guard: Guard, max_tokens: int, *, retry: bool, latency: float) -> Heard:
    words = f"{error}\n{error.body}".casefold()
    heard = Heard(
        detail=str(error), text=guard.text if guard.stopped else error.body, status=error.status, latency=latency
    )
    if guard.stopped and (guard.pieces or _begins_an_answer(guard.text)):
        return heard._replace(kind="runaway", detail=guard.stopped)
    if guard.stopped:
        return heard._replace(detail=f"{guard.stopped}, and nothing was generated")
    failed = error.status is not None and (error.status >= 400 or error.status == 200)
    if failed and _HISTORY not in words and any(phrase in words for phrase in _UNREADABLE):
        return heard._replace(kind="server_parse_error")
    unfit = contexts.refused(words) if failed else None
    if unfit is not None:
        detail = f"{unfit.sentence(max_tokens)} ({error})"
        return heard._replace(unfit=True, tokens_in=unfit.prompt, detail=detail)
    about_messages = (error.status or 0) >= 500 and any(phrase in words for phrase in _ABOUT_MESSAGES)
    if retry and (error.status in (400, 422) or about_messages):
        return heard._replace(kind="history_rejected")
    return heard


def _begins_an_answer(text: str) -> bool:
    """Whether a body that is no stream has something in it that was generated."""
    return '"content"' in text or '"arguments"' in text


def _lost(client: Asker, error: BackendDied, sleep: Callable[[float], None], latency: float) -> Heard:
    """A lost connection: the server may be gone, or only have closed it."""
    get = getattr(client, "get", None)
    heard = Heard(detail=str(error), latency=latency)
    if not callable(get):
        return heard._replace(unsure=True, lost=error)
    last = error
    for look in range(_LOOKS):
        if look:
            sleep(_BETWEEN)
        try:
            get("/v1/models")
        except (RequestFailed, RequestTimeout):
            return heard
        except BackendDied as gone:
            last = gone
        else:
            return heard
    # How it died may be known only now; it was lost while the case was asked, and not while it was looked at.
    death = str(last).partition(". ")[2] if "died" in str(last) and "died" not in str(error) else ""
    return heard._replace(lost=BackendDied(f"{str(error).rstrip('.')}. {death}") if death else error)
