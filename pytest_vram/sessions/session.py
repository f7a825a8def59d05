"""A session: conversations that run turn by turn on a running backend, and what each turn took."""

from __future__ import annotations

import contextlib
import datetime
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import msgspec

from pytest_vram.backends.record import RequestRecord
from pytest_vram.errors import BackendDied, BackendError, BadInput, RequestFailed, WindowFull
from pytest_vram.sessions import table
from pytest_vram.sessions.conversations import Conversation, ScriptedTurn
from pytest_vram.sessions.gauge import Gauge, NoGauge, Peaks, Rest
from pytest_vram.sessions.history import SPARE, Counter, History
from pytest_vram.sessions.turns import Turn
from pytest_vram.spec import BackendSpec
from pytest_vram.toolcalls import asking
from pytest_vram.toolcalls.cases import Case
from pytest_vram.toolcalls.diagnosis import Call, Diagnosis, diagnose
from pytest_vram.toolcalls.protocols import request_of

if TYPE_CHECKING:
    from pytest_vram.backends.base import Properties

#: Seconds that memory may take to come to rest after a turn.
SETTLE = 2.0
#: Turns before the one where a session is resumed whose messages are put back; what is older has left by then.
_PUT_BACK = 200
#: Keys of a message that hold what was generated, besides its text.
_GENERATED = ("tool_calls", "function_call", "reasoning_content", "reasoning", "thinking", "refusal", "audio")
#: Identical calls that are remembered of one conversation.
_REMEMBERED = 10_000


class Backend(Protocol):
    """What a session needs of a backend; :class:`pytest_vram.backends.RunningBackend` is one."""

    @property
    def name(self) -> str: ...

    @property
    def spec(self) -> BackendSpec: ...

    @property
    def generation(self) -> int: ...

    @property
    def client(self) -> asking.Asker: ...

    def properties(self) -> Properties: ...

    def restart(self) -> None: ...


class Step(NamedTuple):
    """Which turn of which conversation comes. ``phase`` counts over all conversations of a cycle."""

    conversation: Conversation
    cycle: int
    phase: int
    own: int

    @property
    def turn(self) -> ScriptedTurn:
        """The scripted turn."""
        return self.conversation.turns[self.own]


class Session:
    """Conversations on a running backend, in cycles.

    It is for one thread at a time. Each turn sends what the user says; where the script expects calls, their
    results follow in a second request. The conversation goes on as the script has it, not with what the model
    answered, so that turns of one phase have prompts of one length; what the model answered is judged. With each
    cycle the conversation begins anew, unless ``carry``.

    :param backend: it must be ready. :param conversations: one or several; a cycle runs each of them once.
    :param gauge: reads memory; without one nothing is measured.
    :param spec: how is asked (sampling, protocol of tool calls); by default the backend's own.
    :param context: tokens of the server's context; by default what it says. Where that is known, messages are evicted,
        oldest first, before a prompt would overflow it.
    :param carry: a cycle goes on in the conversation of the one before.
    :param summary: the conversation's summary is pinned when messages are evicted.
    :param forced: false lets the model's own answers, and those calls of it that are right, stay in the conversation.
    :param settle: seconds that memory may take to come to rest after a turn.
    :param warmed: called after each warm-up.
    :param start: number of the first turn, and ``segment`` its segment, where a session is resumed.
    """

    def __init__(
        self,
        backend: Backend,
        conversations: Conversation | Sequence[Conversation],
        *,
        gauge: Gauge | None = None,
        spec: BackendSpec | None = None,
        context: int | None = None,
        carry: bool = False,
        summary: bool = True,
        forced: bool = True,
        settle: float = SETTLE,
        start: int = 1,
        segment: int = 1,
        warmed: Callable[[], None] = lambda: None,
        clock: Callable[[], int] = time.monotonic_ns,
        wall: Callable[[], datetime.datetime] = lambda: datetime.datetime.now(datetime.UTC),
    ) -> None:
        self.backend = backend
        self.conversations = (conversations,) if isinstance(conversations, Conversation) else tuple(conversations)
        if not self.conversations:
            raise BadInput("a session needs a conversation: name one, or give a JSON file")
        _check(settle, context, {"carry": carry, "summary": summary, "forced": forced})
        self.spec = spec if spec is not None else backend.spec
        self.carry, self.settle, self.segment = carry, settle, segment
        self.turns: list[Turn] = []
        #: Of the largest prompt, which is asked first so that what grows with lengths has grown; they are no turns.
        self.warm_ups: list[Turn] = []
        self._gauge: Gauge = gauge if gauge is not None else NoGauge("nothing was asked to be measured")
        self._summary, self._forced = summary, forced
        self._clock, self._wall, self._warmed = clock, wall, warmed
        self._number = start - 1
        self._generation = backend.generation
        self._steps = [(one, own) for one in self.conversations for own in range(len(one.turns))]
        self._told = context is None
        self._context_size = context if context is not None else self._told_context()
        self._count: Counter | None = None
        if self._context_size is not None:
            self._count = Counter(getattr(backend.client, "tokenize", None))
        self._history: History | None = None
        self._seen: set[tuple[str, bytes]] = set()
        self._events: list[str] = []
        self._busy = threading.Lock()

    # ------------------------------------------------------------ where it is

    @property
    def cycle(self) -> int:
        """Turns after which lengths repeat."""
        return len(self._steps)

    @property
    def context_size(self) -> int | None:
        """Tokens of the server's context; ``None``: not known, and nothing is evicted."""
        return self._context_size

    @property
    def unmeasured(self) -> str | None:
        """Why there are no figures of memory; ``None`` where they are read."""
        return self._gauge.reason if isinstance(self._gauge, NoGauge) else None

    def step(self, number: int) -> Step:
        """What the turn with this number, from 1, is."""
        cycle, phase = divmod(number - 1, self.cycle)
        conversation, own = self._steps[phase]
        return Step(conversation, cycle + 1, phase, own)

    def _told_context(self) -> int | None:
        """What the server says of its context, for one conversation."""
        try:
            told = self.backend.properties()
        except BackendDied:
            raise
        except BackendError:  # it has no such endpoint
            return None
        return told.context_per_slot or told.context

    # ------------------------------------------------------------ turns

    def warm_up(self) -> Turn:
        """Ask the longest prompt of the cycle once, before the first turn: memory that grows with lengths grows here.

        :raises BackendError: the server did not answer.
        """
        with self._alone():
            return self._warm_up()

    def _warm_up(self) -> Turn:
        sizes = [sum(len(turn.user) + sum(map(len, turn.results)) for turn in one.turns) for one in self.conversations]
        conversation = self.conversations[sizes.index(max(sizes))]
        own = conversation.largest
        history = self._begun(conversation)
        for phase in range(own):
            for message in conversation.scripted(phase, phase + 1):
                history.append(message)
        history.take_events()
        self._notice_restart()
        step = Step(conversation, 0, own, own)
        turn = self._taken(0, step, history, judged=False)
        self.warm_ups.append(turn)
        self._raise(turn)
        self._warmed()
        return turn

    def turn(self) -> Turn:
        """Take the next turn.

        :raises BackendError: the server did not answer, or died; the turn stands in :attr:`turns` all the same.
        """
        turn = self.take()
        self._raise(turn)
        return turn

    def run(self, turns: int | None = None) -> list[Turn]:
        """Take so many turns, by default one cycle.

        :raises BadInput: a number below 1. :raises BackendError: as :meth:`turn`.
        """
        given: object = turns  # tests are rarely type-checked
        if given is not None and (isinstance(given, bool) or not isinstance(given, int) or given < 1):
            raise BadInput(f"turns={given!r:.60} of a session: write a whole number, 1 or more")
        return [self.turn() for _ in range(self.cycle if turns is None else turns)]

    def take(self) -> Turn:
        """Take the next turn; what went wrong with the server is in its ``result`` and ``error``.

        :raises BadInput: a message does not fit into the context. :raises KeeperError: nothing can be measured now.
        """
        with self._alone():
            return self._take()

    def _take(self) -> Turn:
        number = self._number + 1
        step = self.step(number)
        if self._history is None and (self.carry or step.own):
            self._history = self._put_back(number)
        if self._history is None or (step.own == 0 and (not self.carry or len(self.conversations) > 1)):
            self._history = self._begun(step.conversation)
            self._seen.clear()
        self._notice_restart()
        turn = self._taken(number, step, self._history, judged=True)
        self._number = number
        self.turns.append(turn)
        return turn

    def restart(self) -> None:
        """Stop the server and start it again: a new segment begins. The conversation goes on."""
        self.backend.restart()
        self._notice_restart()

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """One turn at a time: turns that overlap would share figures, numbers and messages.

        :raises BadInput: another thread takes a turn, or the conversation does not fit into the context.
        """
        if not self._busy.acquire(blocking=False):
            raise BadInput("a turn of this session is being taken by another thread: give each thread its own session")
        try:
            yield
        except WindowFull as error:
            told = "the server's" if self._told else "`context`"
            raise BadInput(
                f"turn {self._number + 1} of conversation {self.step(self._number + 1).conversation.name!r} does not"
                f" fit into the context of {self._context_size} tokens ({told}), of which an answer takes up to"
                f" {max(turn.output_cap for one in self.conversations for turn in one.turns)} and {SPARE} are spare:"
                f" {error}"
            ) from None
        finally:
            self._busy.release()

    def _notice_restart(self) -> None:
        if self.backend.generation != self._generation:
            self._generation = self.backend.generation
            self.segment += 1
            self._events.append("restarted")

    def _raise(self, turn: Turn) -> None:
        if turn.result == "lost":
            raise BackendDied(turn.error or "the server was lost")
        if turn.result == "error":
            raise RequestFailed(turn.error or "the request failed")

    def _begun(self, conversation: Conversation) -> History:
        limit = None
        if self._context_size is not None:
            limit = self._context_size - max(turn.output_cap for turn in conversation.turns) - SPARE
            if limit < 1:
                raise BadInput(
                    f"conversation {conversation.name!r} asks for answers that leave no room for a prompt in the"
                    f" server's context of {self._context_size} tokens: lower `output_cap` or raise the context"
                )
        return History(
            conversation.opening(),
            limit=limit,
            count=self._count,
            tools=[tool.as_openai() for tool in conversation.tools],
            summary=conversation.summary if self._summary else "",
        )

    def _put_back(self, number: int) -> History:
        """The messages before a turn in which a session is resumed, as the script has them."""
        step = self.step(number)
        history = self._begun(step.conversation)
        first = number - step.own
        if self.carry and len(self.conversations) == 1:
            first = max(1, number - _PUT_BACK)
        for earlier in range(first, number):
            for message in step.conversation.scripted(self.step(earlier).own, self._identity(earlier)):
                history.append(message)
        history.take_events()
        return history

    def _identity(self, number: int) -> int:
        """What ids of calls are made from: the same in each cycle that begins anew."""
        return number if self.carry else self.step(number).own + 1

    def _taken(self, number: int, step: Step, history: History, *, judged: bool) -> Turn:
        script, conversation = step.turn, step.conversation
        t, at = self._clock(), self._wall().isoformat(timespec="milliseconds")
        begun = self._gauge.begin()
        said = _Said()
        try:
            history.append({"role": "user", "content": script.user})
            identity = self._identity(number) if number else step.own + 1
            calls = conversation.calls(step.own, identity)
            if judged or calls is None:
                self._request(said, step, history.messages, judged=judged, expecting=True)
            if calls is not None:
                own = said.own_calls if not self._forced else None
                history.append(own or calls)
                for result in _renamed(conversation.results(step.own, identity), own):
                    history.append(result)
                if not said.failed:
                    self._request(said, step, history.messages, judged=judged, expecting=False)
            answer = script.answer if self._forced or not said.text else said.text
            history.append({"role": "assistant", "content": answer or said.text or "(no answer)"})
        finally:
            seen = self._gauge.end(begun)
        rest = Rest() if said.result == "lost" else self._gauge.idle(self.settle)
        turn = self._record(number, step, said, seen, rest, history)
        return msgspec.structs.replace(turn, t=t, at=at)

    def _request(
        self, said: _Said, step: Step, messages: list[dict[str, Any]], *, judged: bool, expecting: bool
    ) -> None:
        """Ask once, and judge what is answered."""
        case = Case(
            id=step.conversation.name,
            family=step.conversation.name,
            category="multi_turn",
            messages=messages,
            tools=step.conversation.tools,
        )
        sent, body = request_of(case, sampling=self.spec.sampling, calling=self.spec.toolcalls)
        body["max_tokens"] = step.turn.output_cap
        client = self.backend.client
        records: list[RequestRecord] | None = getattr(client, "requests", None)
        before = len(records) if records is not None else 0
        heard = asking.ask(client, sent, body, retry=False)
        said.heard(heard, records[before:] if records is not None else [])
        if self._count is not None:
            self._count.learn(messages, [tool.as_openai() for tool in case.tools], heard.tokens_in)
        if said.failed or not judged:
            return
        expect = step.turn.expect if expecting else []
        if heard.message is None:
            said.kinds.append(heard.kind)
            said.asked += len(expect)
            return
        found = diagnose(
            heard.message,
            step.conversation.tools,
            expected=expect,
            finish_reason=heard.finish_reason if expect else None,
            protocol=self.spec.toolcalls.protocol,
        )
        said.repeated += self._repeats(found)
        if not expecting:
            said.text = heard.text
            return
        said.judged(found, len(expect))
        if found.right and expect:
            said.own_calls = heard.message if heard.message.get("tool_calls") else None
        else:
            said.text = heard.text

    def _repeats(self, found: Diagnosis) -> int:
        """Calls that are identical to one before in this conversation, where they are not the right ones."""
        repeated = 0
        for call in found.calls:
            key = _key(call)
            if key in self._seen and not found.right:
                repeated += 1
            elif len(self._seen) < _REMEMBERED:
                self._seen.add(key)
        return repeated

    def _record(self, number: int, step: Step, said: _Said, seen: Peaks, rest: Rest, history: History) -> Turn:
        context = None
        if said.tokens_in is not None and said.tokens_out_last is not None:
            context = said.tokens_in + said.tokens_out_last
        events, self._events = [*self._events, *history.take_events()], []
        return Turn(
            number=number,
            conversation=step.conversation.name,
            cycle=step.cycle,
            phase=step.phase,
            segment=self.segment,
            tokens_in=said.tokens_in,
            output_cap=step.turn.output_cap,
            tokens_out=said.tokens_out,
            context=context,
            context_size=self._context_size,
            peak=seen.peak,
            idle=rest.idle,
            layers=rest.layers,
            host=seen.host,
            latency=said.latency,
            tokens_per_second=said.rate,
            time_to_first_token=said.first,
            calls=said.asked if number else None,
            calls_right=said.right if number else None,
            kinds=said.kinds,
            repeated=said.repeated,
            events=events,
            result=said.result,
            error=said.error,
            nothing=said.nothing,
        )

    # ------------------------------------------------------------ reading it

    def table(self, width: int = 80) -> list[str]:
        """The turn table, as lines of ``width`` columns."""
        return table.lines(self.turns, width=width, unmeasured=self.unmeasured)

    def __iter__(self) -> Iterator[Turn]:
        return iter(self.turns)

    def __str__(self) -> str:
        return "\n".join(self.table())

    def __repr__(self) -> str:
        names = ", ".join(one.name for one in self.conversations)
        return f"<session {names} on {self.backend.name}: {_turns(len(self.turns))}, segment {self.segment}>"


def _turns(count: int) -> str:
    return f"{count} turn{'s' if count != 1 else ''}"


class _Said:
    """What was answered in one turn, over its requests."""

    def __init__(self) -> None:
        self.tokens_in: int | None = None
        self.tokens_out: int | None = 0
        self.tokens_out_last: int | None = None
        self.latency = 0.0
        self.first: float | None = None
        self.kinds: list[str] = []
        self.asked = 0
        self.right = 0
        self.repeated = 0
        self.text = ""
        self.own_calls: Mapping[str, Any] | None = None
        self.result: Literal["ok", "error", "lost"] = "ok"
        self.error: str | None = None
        #: Why an answer was none that can be read; and of each other one whether it had anything in it.
        self._unread: str | None = None
        self._filled: list[bool] = []
        self._decoded: list[tuple[int, float]] = []

    @property
    def failed(self) -> bool:
        """Whether the server let the turn down."""
        return self.result != "ok"

    @property
    def nothing(self) -> str | None:
        """Why there is no answer, though no request failed: one that nobody could read, or nothing in any of them."""
        if self.failed or not (self._unread or self._filled):
            return None
        return self._unread or (None if any(self._filled) else "the answer has neither text nor a call")

    @property
    def rate(self) -> float | None:
        """Tokens per second of the decode phases of all its requests together."""
        seconds = sum(tokens / rate for tokens, rate in self._decoded)
        return sum(tokens for tokens, _ in self._decoded) / seconds if seconds > 0 else None

    def heard(self, heard: asking.Heard, records: Sequence[RequestRecord]) -> None:
        """One request is over."""
        self.latency += records[-1].latency if records else heard.latency
        if heard.lost is not None or heard.unsure:
            self.result, self.error = "lost", heard.detail
        elif heard.message is None and not heard.kind:
            self.result, self.error = "error", heard.detail
        elif heard.message is None:
            self._unread = self._unread or heard.detail
        else:
            self._filled.append(_has_something(heard, heard.message))
        if heard.tokens_in is not None:
            self.tokens_in = heard.tokens_in  # the last request's has all before it
        # An answer that was cut off has no count: the turn's is not known then, and not what is left of it.
        known = self.tokens_out is not None and heard.tokens_out is not None
        self.tokens_out = (self.tokens_out or 0) + (heard.tokens_out or 0) if known else None
        self.tokens_out_last = heard.tokens_out
        if records:
            record = records[-1]
            if record.tokens_out and record.tokens_per_second:
                self._decoded.append((record.tokens_out, record.tokens_per_second))
            if self.first is None:
                self.first = record.time_to_first_token

    def judged(self, found: Diagnosis, expected: int) -> None:
        """What the calls of the turn are: those that the script expects, or that were made where none was right."""
        self.asked += expected or len(found.calls)
        self.right += expected if found.right else 0
        self.kinds += [kind for kind in found.kinds if kind not in self.kinds]


def _has_something(heard: asking.Heard, message: Mapping[str, Any]) -> bool:
    """Whether anything that was generated came with an answer.

    Text that a server leaves out (thoughts, for one) is known by its count of tokens: the end alone is one.
    """
    content = message.get("content")
    said = heard.text.strip() or (content and not isinstance(content, str)) or (heard.tokens_out or 0) > 1
    return bool(said) or any(message.get(name) for name in _GENERATED)


def _key(call: Call) -> tuple[str, bytes]:
    try:
        return str(call.name), msgspec.json.encode(call.arguments, order="sorted")
    except (TypeError, ValueError, OverflowError, RecursionError):
        return str(call.name), repr(call.text[:2000]).encode()


def _renamed(results: list[dict[str, Any]], own: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """The results under the ids of the model's own calls, where those stay in the conversation."""
    listed = own.get("tool_calls") if own is not None else None
    if not isinstance(listed, list):
        return results
    left = [(one.get("id"), one.get("function", {}).get("name")) for one in listed if isinstance(one, Mapping)]
    found = []
    for result in results:
        match = next((one for one in left if one[1] == result["name"]), None)
        if match is not None:
            left.remove(match)
        found.append({**result, "tool_call_id": match[0] if match else result["tool_call_id"]})
    return found


def _check(settle: object, context: object, switches: Mapping[str, object]) -> None:
    """:raises BadInput: values that cannot be used; tests are rarely type-checked."""
    if isinstance(settle, bool) or not isinstance(settle, int | float) or not 0 <= settle <= 600:
        raise BadInput(f"settle={settle!r} of a session: write a number of seconds from 0 to 600")
    for name, value in switches.items():
        if not isinstance(value, bool):
            raise BadInput(f"{name}={value!r:.60} of a session: write True or False")
    if context is not None and (isinstance(context, bool) or not isinstance(context, int) or context < 1):
        raise BadInput(f"context={context!r} of a session: write a number of tokens, 1 or more")
