"""A window of messages for users of HTTP servers: what to send so that a conversation stays under its limit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from typing import Any, Protocol, runtime_checkable

import msgspec

from pytest_vram.errors import BadInput
from pytest_vram.windows.leaving import Part, Unit, leaving, unanswerable, units, without
from pytest_vram.windows.protocol import WindowFull, checked_limit

Message = Mapping[str, Any]
#: Messages and tool definitions, as they would be sent → tokens.
Count = Callable[[Sequence[Message], Sequence[Message]], int]
_SYSTEM = ("system", "developer")
_RESULT = ("tool", "function")


@runtime_checkable
class Additive(Protocol):
    """A :data:`Count` that is a sum: a window asks it for each message once, and not for all of them at each step."""

    def __call__(self, messages: Sequence[Message], tools: Sequence[Message]) -> int: ...

    def of_message(self, message: Message) -> int:
        """Tokens of one message."""

    def beside(self, tools: Sequence[Message]) -> int:
        """Tokens of the tools and of what stands around all messages."""


class Templated(Protocol):
    """A client of a server that renders its chat template and tokenizes: ``vram_client`` with llama-server."""

    def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]: ...

    def tokenize(self, text: str) -> Sequence[int]: ...


def counted_by_text(tokenize: Callable[[str], Sequence[Any]], *, per_message: int = 8) -> Additive:
    """Count by the text of messages and the JSON of calls and tools, plus what a template adds around each message.

    Not exact: a template writes calls and tools in its own form. ``per_message`` should err on the large side. Pictures
    and sounds cannot be counted so: a message that has any is refused.

    :param tokenize: text → tokens, such as ``vram_client.tokenize``. :param per_message: tokens around each message.
    """
    given: object = per_message  # tests are rarely type-checked
    if isinstance(given, bool) or not isinstance(given, int) or given < 0:
        raise BadInput(f"per_message={_short(given)} of counted_by_text: write a number of tokens, 0 or more.")
    return _ByText(tokenize, per_message)


class _ByText:
    """A count that is a sum over messages: what was counted once is not counted again with each message."""

    def __init__(self, tokenize: Callable[[str], Sequence[Any]], per_message: int) -> None:
        self._tokenize = tokenize
        self._per_message = per_message
        self._known: dict[str, int] = {}

    def __call__(self, messages: Sequence[Message], tools: Sequence[Message]) -> int:
        return self.beside(tools) + sum(map(self.of_message, messages))

    def of_message(self, message: Message) -> int:
        return self._per_message + self._length(_text(message))

    def beside(self, tools: Sequence[Message]) -> int:
        opening = self._per_message  # of the answer
        return opening + (self._length(_json(list(tools))) if tools else 0)

    def _length(self, text: str) -> int:
        if text not in self._known:
            tokens: object = self._tokenize(text)
            if not isinstance(tokens, Sized):
                raise BadInput(
                    f"The tokenizer of counted_by_text gave {_short(tokens)}: it must give a list of tokens."
                )
            if len(self._known) >= 4096:
                self._known.clear()
            self._known[text] = len(tokens)
        return self._known[text]


def counted_by_template(client: Templated) -> Count:
    """Count exactly what the server would: its own template (``/apply-template``), then its own tokenizer.

    Two requests for each count; llama-server has both paths.
    """

    def count(messages: Sequence[Message], tools: Sequence[Message]) -> int:
        body: dict[str, Any] = {"messages": list(messages)}
        if tools:
            body["tools"] = list(tools)
        prompt = client.post("/apply-template", body).get("prompt")
        if not isinstance(prompt, str):
            raise BadInput(
                "The server's answer to /apply-template has no prompt in it: count with counted_by_text instead."
            )
        return len(client.tokenize(prompt))

    return count


class MessageWindow:
    """Messages of a conversation under a limit of tokens, oldest out first.

    The leading system messages, the tool definitions and the pinned summary never leave. An assistant's tool calls
    and their results leave together, and not while a result is awaited: until all results are there, or a message that
    is neither a result nor a system message shows that the conversation went on without them.

    :param limit: tokens that messages and tool definitions may take: the server's context less what an answer may take.
    :param count: tokens of messages and tools; :func:`counted_by_text`, :func:`counted_by_template` or your own.
    :param tools: tool definitions that are sent with every request. :param heading: stands before the pinned summary.
    :param user_first: after an eviction, more leaves until the oldest message left is a user's, where one is left:
        templates such as Mistral's and Gemma's refuse others.
    :raises BadInput: a limit below 1. :raises WindowFull: the tools alone are over it.
    """

    def __init__(
        self,
        limit: int,
        *,
        count: Count,
        tools: Iterable[Message] = (),
        heading: str = "Summary of the conversation so far:",
        user_first: bool = False,
    ) -> None:
        self.limit = checked_limit(limit, "MessageWindow")
        self.tools: tuple[Message, ...] = tuple(_copied(tool) for tool in _tools(tools))
        self._count = count
        self._heading = heading
        self._user_first = user_first
        self._held: list[_Held] = []
        self._summary: str | None = None
        if self.tools:
            self._fit([], None, None)

    @property
    def messages(self) -> list[dict[str, Any]]:
        """What to send: copies, parts and calls included, with the summary in the system message."""
        return [_copied(message) for message in _rendered(self._held, self._summary, self._heading)]

    @property
    def summary(self) -> str | None:
        """The pinned summary."""
        return self._summary

    @property
    def count(self) -> int:
        """Tokens that messages and tools take."""
        return self._counted(self._held, self._summary)

    def append(self, message: Message, *, pinned: bool = False) -> list[dict[str, Any]]:
        """Take a message in; gives the messages that left for it, oldest first, for instance to summarise them.

        :param pinned: it never leaves. :raises WindowFull: it cannot fit beside what must stay; nothing has changed.
        :raises BadInput: not a message, or a tool's result whose call is not in the window; nothing has changed.
        """
        held = self._read(message, pinned=pinned)
        return self._keep(self._fit([*self._held, held], self._summary, len(self._held)), self._summary)

    def extend(self, messages: Iterable[Message]) -> list[dict[str, Any]]:
        """Take messages in one after another; gives those that left.

        :raises WindowFull: as :meth:`append`. :raises BadInput: the same; none of the messages is taken in then.
        """
        before = self._held, self._summary
        try:
            return [gone for message in messages for gone in self.append(message)]
        except BaseException:
            self._held, self._summary = before  # what left for the first of them is back
            raise

    def pin_summary(self, text: str | None) -> list[dict[str, Any]]:
        """Put a summary in the place of the one before (``None``: none); gives the messages that left for it.

        :raises WindowFull: it cannot fit beside what must stay; the one before is kept.
        """
        summary = text or None
        return self._keep(self._fit(self._held, summary, None), summary)

    def evict(self, to: int) -> list[dict[str, Any]]:
        """Let the oldest leave until at most ``to`` tokens are held or only what must stay is left; gives what left."""
        given: object = to  # tests are rarely type-checked
        if isinstance(given, bool) or not isinstance(given, int) or given < 0:
            raise BadInput(f"evict takes the number of tokens that may stay, 0 or more; {_short(given)} is none.")
        kept, _ = self._shrunk(self._held, self._summary, None, to)
        return self._keep(kept, self._summary)

    def _read(self, message: Message, *, pinned: bool) -> _Held:
        role = _role(message)
        if role is None:
            raise BadInput(f"A message is an object with a role; {_short(message)} is none.")
        _check_calls(message)
        calls = _calls(message)
        leading = role in _SYSTEM and all(held.role in _SYSTEM for held in self._held)
        answers = None
        if role in _RESULT:
            answers = _answers(message, role)
            wrong = unanswerable([held.part for held in self._held], answers)
            if wrong:
                raise BadInput(
                    f"The tool result for call {answers or '(no id)'} {wrong}: append the assistant's message with its "
                    "tool_calls first, then one result of each."
                )
        part = Part(pinned=pinned or leading, calls=calls, answers=answers, user=role == "user", aside=role in _SYSTEM)
        own = _copied(message)
        tokens = self._count.of_message(own) if isinstance(self._count, Additive) else 0
        return _Held(message=own, role=role, part=part, tokens=tokens)

    def _fit(self, held: list[_Held], summary: str | None, keep: int | None) -> list[_Held]:
        kept, tokens = self._shrunk(held, summary, keep, self.limit)
        if tokens > self.limit:
            raise WindowFull(
                f"What must stay in the window takes {tokens} tokens, its limit is {self.limit}: shorten the message, "
                "the system prompt, the tools or the summary, or raise the limit."
            )
        return kept

    def _shrunk(self, held: list[_Held], summary: str | None, keep: int | None, to: int) -> tuple[list[_Held], int]:
        kept = held
        tokens = self._counted(kept, summary)
        if tokens <= to:
            return kept, tokens
        may_leave = leaving([one.part for one in held], keep=keep)
        gone: list[int] = []
        while tokens > to or (gone and self._user_first and self._headless(kept)):
            unit = next(may_leave, None)
            if unit is None:
                break
            gone.extend(unit.members)
            kept = [held[place] for place in without(gone, len(held))]
            tokens = self._counted(kept, summary)
        return kept, tokens

    @staticmethod
    def _headless(held: list[_Held]) -> bool:
        """Whether the oldest that may leave is not a user's although a user's comes later."""
        rest: list[Unit] = [unit for unit in units([one.part for one in held]) if not unit.pinned]
        return bool(rest) and not rest[0].user and any(unit.user for unit in rest)

    def _counted(self, held: list[_Held], summary: str | None) -> int:
        if isinstance(self._count, Additive):
            counted = self._count.beside(self.tools) + sum(one.tokens for one in held)
            if summary is not None:
                place, message, replaces = _with_summary(held, summary, self._heading)
                counted += self._count.of_message(message) - (held[place].tokens if replaces else 0)
        else:
            counted = self._count(_rendered(held, summary, self._heading), self.tools)
        found: object = counted
        if isinstance(found, bool) or not isinstance(found, int) or found < 0:
            raise BadInput(
                f"The count of MessageWindow gave {_short(found)}: it must give a number of tokens, 0 or more."
            )
        return found

    def _keep(self, kept: list[_Held], summary: str | None) -> list[dict[str, Any]]:
        staying = {id(one) for one in kept}
        gone = [] if kept is self._held else [dict(one.message) for one in self._held if id(one) not in staying]
        self._held, self._summary = list(kept), summary
        return gone


class _Held(msgspec.Struct, frozen=True):
    message: dict[str, Any]
    role: str
    part: Part
    tokens: int = 0


def _rendered(held: Sequence[_Held], summary: str | None, heading: str) -> list[dict[str, Any]]:
    """The messages, the summary among them."""
    messages = [dict(one.message) for one in held]
    if summary is not None:
        place, message, replaces = _with_summary(held, summary, heading)
        messages[place : place + replaces] = [message]
    return messages


def _with_summary(held: Sequence[_Held], summary: str, heading: str) -> tuple[int, dict[str, Any], bool]:
    """The message that has the summary, its place, and whether it stands for the one that is there.

    That is the last leading system message if it is text: many templates take one system message, and only at the
    start. Else it is one of its own.
    """
    text = f"{heading}\n{summary}"
    leading = next((place for place, one in enumerate(held) if one.role not in _SYSTEM), len(held))
    if leading and isinstance(held[leading - 1].message.get("content"), str):
        last = held[leading - 1].message
        return leading - 1, {**last, "content": f"{last['content']}\n\n{text}"}, True
    return leading, {"role": "system", "content": text}, False


def _tools(tools: object) -> list[Message]:
    """:raises BadInput: something else than tool definitions."""
    if not isinstance(tools, Iterable) or isinstance(tools, str | bytes | Mapping):
        raise BadInput(f"The tools of MessageWindow are a list of objects; {_short(tools)} is none.")
    listed = list(tools)
    for tool in listed:
        if not isinstance(tool, Mapping):
            raise BadInput(f"The tools of MessageWindow are a list of objects; {_short(tool)} is none.")
    return listed


def _copied(message: Message) -> dict[str, Any]:
    """The message with lists and objects of its own: what the caller does to his later is not counted.

    :raises BadInput: it is nested too deeply.
    """
    try:
        return {key: _copy(value) for key, value in message.items()}
    except RecursionError:
        raise BadInput("A message is nested too deeply to be sent.") from None


def _copy(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _copy(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(_copy, value)) if type(value) in (list, tuple) else list(map(_copy, value))
    return value


def _check_calls(message: Message) -> None:
    """:raises BadInput: tool calls that are none, whose results could not be told to be theirs."""
    found = message.get("tool_calls")
    if found is not None and not (isinstance(found, list | tuple) and all(isinstance(one, Mapping) for one in found)):
        raise BadInput(f"The tool_calls of a message are a list of objects; {_short(found)} is none.")


def _role(message: object) -> str | None:
    role = message.get("role") if isinstance(message, Mapping) else None
    return role if isinstance(role, str) else None


def _calls(message: Message) -> tuple[str, ...]:
    """Ids of the calls that an assistant's message asks for; the old single function call counts by its name."""
    found = message.get("tool_calls")
    calls = [call for call in found if isinstance(call, Mapping)] if isinstance(found, list | tuple) else []
    names = [str(call.get("id") or f"(call {place})") for place, call in enumerate(calls)]
    old = message.get("function_call")
    if isinstance(old, Mapping):
        names.append(f"(function {old.get('name')})")
    return tuple(names)


def _answers(message: Message, role: str) -> str:
    if role == "function":
        return f"(function {message.get('name')})"
    return str(message.get("tool_call_id") or "")


def _text(message: Message) -> str:
    content = message.get("content")
    texts = [content] if isinstance(content, str) else []
    if isinstance(content, list):
        for part in content:
            if not isinstance(part, Mapping) or not isinstance(part.get("text"), str):
                raise BadInput(
                    f"A message has a part that is not text ({_short(part)}), which cannot be counted by its text: "
                    "give MessageWindow a count of your own."
                )
            texts.append(part["text"])
    texts.extend(_json(message[key]) for key in ("tool_calls", "function_call") if message.get(key))
    texts.extend(str(message[key]) for key in ("name", "reasoning_content") if message.get(key))
    return "\n".join(texts)


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}…"
