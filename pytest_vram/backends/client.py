"""OpenAI-compatible clients of a running backend, one blocking and one for async code.

Generation requests take turns at a backend through the keeper, over all workers of a run, unless ``serial=False``;
each leaves a :class:`~pytest_vram.backends.record.RequestRecord` and one line on the logger
``pytest_vram.requests``.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import socket
import ssl
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from pytest_vram.backends import reply as replies
from pytest_vram.backends import turns
from pytest_vram.backends.counting import counts, most_asked
from pytest_vram.backends.frames import of_ours
from pytest_vram.backends.record import RequestRecord
from pytest_vram.backends.reply import Reply
from pytest_vram.backends.words import said
from pytest_vram.errors import BackendDied, RequestFailed, RequestTimeout, VramError
from pytest_vram.keeper.messages import Closed, Turn

if TYPE_CHECKING:
    import httpx

__tracebackhide__ = of_ours

T = TypeVar("T")
Messages = str | Sequence[Mapping[str, Any]]
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
logger = logging.getLogger("pytest_vram.requests")


class Target(msgspec.Struct, kw_only=True):
    """The server that a client talks to; changed in place when it is restarted.

    :ivar url: its root, or ``…/v1``. :ivar key: its identity at the keeper.
    :ivar model: the name to send as ``model``, where the server wants one.
    :ivar log: its log file, for messages.
    """

    name: str
    url: str
    key: str = ""
    api_key: str | None = None
    model: str | None = None
    log: str | None = None
    timeout: float = 300.0

    def address(self, path: str) -> str:
        """The URL of a path; ``/v1`` stands in it once."""
        root = self.url.rstrip("/").removesuffix("/v1")
        return f"{root}/{path.lstrip('/')}"


class _Client:
    """What both clients share: everything but waiting."""

    def __init__(
        self,
        target: Target,
        *,
        connect: turns.Connect | None = None,
        window: Callable[[], int | None] = lambda: None,
        fate: Callable[[str], str | None] = lambda key: None,
        serial: bool = True,
        keep: Callable[[RequestRecord], None] = lambda record: None,
    ) -> None:
        """
        :param connect: opens a connection to the keeper for one turn; ``None`` asks nobody and measures nothing.
        :param window: the test window that requests belong to.
        :param fate: one sentence on how the server with this key died; ``None`` while it runs.
        :param serial: one request at a time at this backend.
        :param keep: told of every finished request, besides :attr:`requests`.
        """
        self.target = target
        self.serial = serial
        self.requests: list[RequestRecord] = []
        self._connect = connect
        self._window = window
        self._fate = fate
        self._keep = keep

    def _call(self, path: str, body: Mapping[str, Any], task: str | None, guard: replies.Guard | None = None) -> _Call:
        whole = dict(body)
        if self.target.model is not None:
            whole.setdefault("model", self.target.model)
        if whole.get("stream"):
            whole.setdefault("stream_options", {"include_usage": True})
        call = _Call(self.target, path, whole, task)
        call.guard = guard
        return call

    def _turn(self, call: _Call) -> Turn:
        return Turn(
            key=self.target.key,
            request=call.id,
            serial=self.serial,
            parent=self._window(),
            timeout=self.target.timeout,
        )

    def _lost(self, failure: VramError, what: str) -> VramError:
        """The failure, of a lost server with how it died where the keeper knows."""
        death = self._fate(self.target.key) if isinstance(failure, BackendDied) else None
        return failure if death is None else BackendDied(f"The connection was lost during {what}. {death}")

    def _ask_fate(self, call: _Call, closed: Closed | None) -> bool:
        """Whether the server was lost and its request's window does not say how."""
        if not isinstance(call.failure, BackendDied):
            return False
        if closed is not None and closed.deaths:
            call.died(closed.deaths[-1])
            return False
        return True

    def _finish(self, call: _Call, closed: Closed | None, death: str | None) -> Reply:
        """Keep the record, write the line, then answer or raise."""
        if death is not None:
            call.died(death)
        record = call.record(closed)
        self.requests.append(record)
        self._keep(record)
        logger.info("%s", replies.log_line(record))
        return call.outcome(record)


class _Call:
    """One request from its sending to its end."""

    def __init__(
        self, target: Target, path: str, body: dict[str, Any] | None, task: str | None, method: str = "POST"
    ) -> None:
        self.id = uuid.uuid4().hex[:12]
        self.target = target
        self.method = method
        self.path = path
        self.what = f"{method} {path}"
        self.body = body
        self.task = task
        self.waited = 0.0
        self.answer: Any = {}
        self.failure: VramError | None = None
        self.latency = 0.0
        self.first: float | None = None
        self.arrivals = 0
        self.status: int | None = None
        self.guard: replies.Guard | None = None
        self.t = time.monotonic_ns()

    def start(self, waited: float) -> None:
        """It is sent now."""
        self.waited = waited
        self.t = time.monotonic_ns()

    def elapsed(self) -> float:
        """Seconds since it was sent."""
        return (time.monotonic_ns() - self.t) / 1e9

    def remaining(self) -> float:
        """Seconds until its timeout.

        :raises RequestTimeout: none is left.
        """
        left = self.target.timeout - self.elapsed()
        if left <= 0:
            raise _timeout(self.target, self.what)
        return left

    def collector(self, response: httpx.Response) -> replies.Collector:
        """What takes the bytes of this answer."""
        self.status = response.status_code
        return replies.Collector(
            backend=self.target.name,
            path=self.what,
            status=response.status_code,
            content_type=response.headers.get("content-type", ""),
            nameless=self.target.model is None,
            guard=self.guard,
            retry_after=response.headers.get("retry-after"),
        )

    def done(self, collector: replies.Collector) -> None:
        """The last byte came."""
        self.latency, self.first, self.arrivals = self.elapsed(), collector.first, collector.arrivals
        answer = collector.decoded()
        if not isinstance(answer, dict):
            raise collector.failure(f"the answer is not a JSON object but {type(answer).__name__}")
        self.answer = answer
        if self.path in (CHAT, COMPLETIONS) and replies.choice_of(answer) is None:
            raise collector.failure("the answer has no choices")
        if self.path == CHAT and not replies.has_message(answer):
            raise collector.failure("the answer has no message")

    def failed(self, failure: VramError) -> None:
        """It ended in this error, which is raised after the turn was given back."""
        self.latency = self.latency or self.elapsed()
        self.failure = failure

    def died(self, sentence: str) -> None:
        """It ended with the server, in this way."""
        self.failure = BackendDied(f"The connection was lost during {self.what}. {sentence}")

    def record(self, closed: Closed | None) -> RequestRecord:
        """The record; its peak is what the request's window saw."""
        figures = counts(
            self.answer, self.latency, self.first, arrivals=self.arrivals, most=most_asked(self.body or {})
        )
        choice = replies.choice_of(self.answer)
        served = self.answer.get("model")
        result = "ok"
        if self.failure is not None:
            result = "timeout" if isinstance(self.failure, RequestTimeout) else "error"
        return RequestRecord(
            id=self.id,
            backend=self.target.name,
            path=self.path,
            result=result,
            t=self.t,
            latency=self.latency,
            waited=self.waited,
            tokens_in=figures.tokens_in,
            tokens_out=figures.tokens_out,
            tokens_per_second=figures.rate,
            rate_from=figures.rate_from,
            prompt_tokens_per_second=figures.prompt_rate,
            time_to_first_token=self.first,
            status=self.status,
            finish_reason=said(choice[2]) if choice is not None and choice[2] is not None else None,
            model=said(served) if isinstance(served, str) else self.target.model,
            task=self.task,
            peak=dict(closed.own or closed.run) if closed is not None else {},
            host_use=closed.host_use if closed is not None else None,
            error=str(self.failure) if self.failure is not None else None,
            doubt=figures.doubt,
        )

    def outcome(self, record: RequestRecord) -> Reply:
        """The reply, or the error that the request ended in."""
        if self.failure is not None:
            raise self.failure
        text, message, finish = replies.choice_of(self.answer) or ("", {}, None)
        return Reply(
            text=text,
            message=message,
            finish_reason=finish,
            tokens_in=record.tokens_in,
            tokens_out=record.tokens_out,
            record=record,
            raw=self.answer,
        )


class _Question(_Call):
    """A request that is no generation: it takes no turn, leaves no record, and may be answered with any JSON."""

    def done(self, collector: replies.Collector) -> None:
        """The last byte came."""
        self.answer = collector.decoded()


class VramClient(_Client):
    """The blocking client."""

    def chat(
        self,
        messages: Messages,
        *,
        max_tokens: int | None = None,
        task: str | None = None,
        guard: replies.Guard | None = None,
        **body: Any,
    ) -> Reply:
        """A chat completion; ``messages`` may be one user message as text.

        :param task: a label for the log line. :param guard: ends the request where its answer does not end.
        :param body: any other field of the request; ``stream=True`` collects a streamed answer and times its first
            token.
        :raises RequestFailed: an error status or an answer that is no completion. :raises RequestTimeout: none in
            time. :raises BackendDied: the connection was lost.
        """
        return self._generate(CHAT, _chat_body(messages, max_tokens, body), task, guard)

    def complete(self, prompt: str, *, max_tokens: int | None = None, task: str | None = None, **body: Any) -> Reply:
        """A text completion; parameters and errors as for :meth:`chat`."""
        return self._generate(COMPLETIONS, _completion_body(prompt, max_tokens, body), task)

    def post(self, path: str, body: Mapping[str, Any], *, task: str | None = None) -> dict[str, Any]:
        """POST any path and decode the JSON object of the answer; takes a turn as a generation does."""
        return self._generate(path, body, task).raw

    def get(self, path: str) -> Any:
        """GET a path and decode the JSON of the answer; takes no turn."""
        return self._ask("GET", path, None)

    def tokenize(self, text: str) -> list[int]:
        """Token ids of a text, as the server's own tokenizer has them (llama.cpp's ``/tokenize``)."""
        return _token_ids(self.target, self._ask("POST", "/tokenize", {"content": text}))

    def _ask(self, method: str, path: str, body: Mapping[str, Any] | None) -> Any:
        question = _Question(self.target, path, dict(body) if body is not None else None, None, method)
        self._exchange(question)
        if question.failure is not None:
            raise self._lost(question.failure, question.what)
        return question.answer

    def _generate(
        self, path: str, body: Mapping[str, Any], task: str | None, guard: replies.Guard | None = None
    ) -> Reply:
        call = self._call(path, body, task, guard)
        if self._connect is None:
            call.start(0.0)
            self._exchange(call)
            return self._end(call, None)
        keeper = self._connect(f"request {call.id}")
        try:
            held = turns.take(keeper, self._turn(call))
            call.start(held.waited)
            self._exchange(call)
            closed = held.end(msgspec.to_builtins(call.record(None)))
        finally:
            keeper.close()
        return self._end(call, closed)

    def _end(self, call: _Call, closed: Closed | None) -> Reply:
        death = self._fate(self.target.key) if self._ask_fate(call, closed) else None
        return self._finish(call, closed, death)

    def _exchange(self, call: _Call) -> None:
        try:
            with _http(call.target, call.remaining()) as http:
                call.start(call.waited)  # making a client takes its time, which is not the server's
                with (
                    _Deadline(call.remaining()) as deadline,
                    http.stream(
                        call.method,
                        call.target.address(call.path),
                        json=call.body,
                        extensions={"trace": deadline.trace},
                    ) as response,
                ):
                    collector = call.collector(response)
                    for chunk in response.iter_bytes():
                        collector.feed(chunk, call.elapsed())
                        call.remaining()
                    call.remaining()  # an answer that was ended by its deadline looks like a whole one
                    call.done(collector)
        except VramError as error:
            call.failed(error)
        except _transport_errors() as error:
            late = call.elapsed() >= call.target.timeout
            call.failed(_timeout(call.target, call.what) if late else _mapped(error, call.target, call.what))


class _Deadline:
    """Shuts the connection of a request down when its time is over.

    The time-outs of a transport are those of one read: an answer whose headers come byte by byte meets none of them.
    """

    def __init__(self, seconds: float) -> None:
        self._lock = threading.Lock()
        self._over = False
        self._socket: socket.socket | None = None
        self._timer = threading.Timer(seconds, self._end)
        self._timer.daemon = True

    def trace(self, event: str, info: Mapping[str, Any]) -> None:
        """Told by the transport of what it does."""
        if event in ("connection.connect_tcp.complete", "connection.start_tls.complete"):
            with self._lock:
                self._socket = info["return_value"].get_extra_info("socket")
            if self._over:
                self._end()

    def _end(self) -> None:
        with self._lock:
            self._over = True
            if self._socket is not None:
                with contextlib.suppress(OSError):
                    # Not that of a TLS socket, which also takes away what another thread reads with.
                    socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def __enter__(self) -> _Deadline:
        self._timer.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._timer.cancel()
        with self._lock:
            self._socket = None


class AsyncVramClient(_Client):
    """The client for async code, on asyncio and trio alike; a cancelled request gives its turn back."""

    async def chat(
        self, messages: Messages, *, max_tokens: int | None = None, task: str | None = None, **body: Any
    ) -> Reply:
        """As :meth:`VramClient.chat`."""
        return await self._generate(CHAT, _chat_body(messages, max_tokens, body), task)

    async def complete(
        self, prompt: str, *, max_tokens: int | None = None, task: str | None = None, **body: Any
    ) -> Reply:
        """As :meth:`VramClient.complete`."""
        return await self._generate(COMPLETIONS, _completion_body(prompt, max_tokens, body), task)

    async def post(self, path: str, body: Mapping[str, Any], *, task: str | None = None) -> dict[str, Any]:
        """As :meth:`VramClient.post`."""
        return (await self._generate(path, body, task)).raw

    async def get(self, path: str) -> Any:
        """As :meth:`VramClient.get`."""
        return await self._ask("GET", path, None)

    async def tokenize(self, text: str) -> list[int]:
        """As :meth:`VramClient.tokenize`."""
        return _token_ids(self.target, await self._ask("POST", "/tokenize", {"content": text}))

    async def _ask(self, method: str, path: str, body: Mapping[str, Any] | None) -> Any:
        question = _Question(self.target, path, dict(body) if body is not None else None, None, method)
        await self._exchange(question)
        if question.failure is not None:
            raise await _in_thread(self._lost, question.failure, question.what)
        return question.answer

    async def _generate(self, path: str, body: Mapping[str, Any], task: str | None) -> Reply:
        call = self._call(path, body, task)
        if self._connect is None:
            call.start(0.0)
            await self._exchange(call)
            return await self._end(call, None)
        keeper = await _in_thread(self._connect, f"request {call.id}", abandon=False)
        try:
            held = await _in_thread(turns.take, keeper, self._turn(call))
            call.start(held.waited)
            await self._exchange(call)
            closed = await _in_thread(held.end, msgspec.to_builtins(call.record(None)))
        finally:
            keeper.close()  # also ends the wait of a thread that a cancelled task left behind
        return await self._end(call, closed)

    async def _end(self, call: _Call, closed: Closed | None) -> Reply:
        death = await _in_thread(self._fate, self.target.key) if self._ask_fate(call, closed) else None
        return self._finish(call, closed, death)

    async def _exchange(self, call: _Call) -> None:
        import anyio

        try:
            async with _async_http(call.target, call.remaining()) as http:
                call.start(call.waited)  # making a client takes its time, which is not the server's
                with anyio.fail_after(call.remaining()):
                    await self._stream(http, call)
        except TimeoutError:
            call.failed(_timeout(call.target, call.what))
        except VramError as error:
            call.failed(error)
        except _transport_errors() as error:
            call.failed(_mapped(error, call.target, call.what))

    @staticmethod
    async def _stream(http: httpx.AsyncClient, call: _Call) -> None:
        address = call.target.address(call.path)
        async with http.stream(call.method, address, json=call.body) as response:
            collector = call.collector(response)
            async for chunk in response.aiter_bytes():
                collector.feed(chunk, call.elapsed())
            call.done(collector)


async def _in_thread(function: Callable[..., T], *arguments: Any, abandon: bool = True) -> T:
    """Run a blocking call in a thread of its own.

    :param abandon: a cancelled task does not wait for it; false where the result would be lost with it.
    """
    import anyio
    import anyio.to_thread

    # A limiter for each call: turns that wait must not use up the threads that turns need to end.
    return await anyio.to_thread.run_sync(
        functools.partial(function, *arguments), abandon_on_cancel=abandon, limiter=anyio.CapacityLimiter(1)
    )


def _chat_body(messages: Messages, max_tokens: int | None, body: Mapping[str, Any]) -> dict[str, Any]:
    listed = [{"role": "user", "content": messages}] if isinstance(messages, str) else list(messages)
    return {"messages": listed, **_limit(max_tokens), **body}


def _completion_body(prompt: str, max_tokens: int | None, body: Mapping[str, Any]) -> dict[str, Any]:
    return {"prompt": prompt, **_limit(max_tokens), **body}


def _limit(max_tokens: int | None) -> dict[str, Any]:
    return {} if max_tokens is None else {"max_tokens": max_tokens}


@functools.cache
def _tls() -> ssl.SSLContext:
    return ssl.create_default_context()


def _settings(target: Target, timeout: float) -> dict[str, Any]:
    """Settings of an httpx client for one request.

    One connection per request: a kept one that the server has just closed would look like a dead server. No proxy
    from the environment: servers under test are on this machine.
    """
    return {
        "headers": {"Authorization": f"Bearer {target.api_key}"} if target.api_key else {},
        "timeout": timeout,
        "trust_env": False,
        "verify": _tls() if target.url.startswith("https") else False,
    }


def _http(target: Target, timeout: float) -> httpx.Client:
    import httpx

    return httpx.Client(**_settings(target, timeout))


def _async_http(target: Target, timeout: float) -> httpx.AsyncClient:
    import httpx

    return httpx.AsyncClient(**_settings(target, timeout))


def _transport_errors() -> tuple[type[Exception], ...]:
    import httpx

    return httpx.HTTPError, httpx.InvalidURL, httpx.StreamError, OSError


def _mapped(error: Exception, target: Target, what: str) -> VramError:
    """The error of this package for one of the transport."""
    import httpx

    if isinstance(error, httpx.TimeoutException | TimeoutError):
        return _timeout(target, what)
    if isinstance(error, httpx.NetworkError | httpx.RemoteProtocolError | OSError):
        log = f"; its log is {target.log}" if target.log else ""
        reason = said(str(error)) or type(error).__name__
        return BackendDied(f"the connection to backend {target.name!r} was lost during {what}: {reason}{log}")
    if isinstance(error, httpx.DecodingError):
        return RequestFailed(f"the answer of backend {target.name!r} to {what} cannot be read: {said(str(error))}")
    return RequestFailed(f"{what} could not be sent to backend {target.name!r} at {target.url}: {said(str(error))}")


def _timeout(target: Target, what: str) -> RequestTimeout:
    log = f"; its log is {target.log}" if target.log else ""
    return RequestTimeout(
        f"backend {target.name!r} did not answer {what} within {target.timeout:g} s"
        f" (request_timeout of [backend.{target.name}]): raise it where the server is at work and only slow{log}"
    )


def _token_ids(target: Target, answer: Any) -> list[int]:
    tokens = answer.get("tokens") if isinstance(answer, dict) else None
    if not isinstance(tokens, list) or not all(isinstance(token, int) for token in tokens):
        raise RequestFailed(f"backend {target.name!r} answered POST /tokenize without a list of token ids")
    return tokens
