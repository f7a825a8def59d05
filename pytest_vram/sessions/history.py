"""The messages that a session sends: all of them, or those that a window of tokens keeps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pytest_vram.errors import RequestFailed
from pytest_vram.windows.messages import Additive, MessageWindow, counted_by_text

#: Characters of a token where a server has no tokenizer to ask; few, so that the count errs on the large side.
CHARACTERS_OF_TOKEN = 3
#: Tokens between the window's limit and the server's: what a template adds that a count of texts does not see.
SPARE = 32


class Counter:
    """Counts the tokens of messages, and learns from what the server says of prompts that were sent.

    A chat template writes calls and tools in its own form, and some protocols add a prompt of their own: what a prompt
    had beyond the count of its texts is added from then on.

    :ivar beyond: tokens that are added.
    """

    def __init__(self, tokenize: Callable[[str], Sequence[int]] | None) -> None:
        """:param tokenize: of the server; where it has none, characters are counted."""
        self.beyond = 0
        self._count = _counter(tokenize)

    def __call__(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> int:
        """Tokens of messages and tools."""
        return self._count(messages, tools) + self.beyond

    def of_message(self, message: Mapping[str, Any]) -> int:
        """Tokens of one message."""
        return self._count.of_message(message)

    def beside(self, tools: Sequence[Mapping[str, Any]]) -> int:
        """Tokens of the tools and of what a template adds."""
        return self._count.beside(tools) + self.beyond

    def learn(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], tokens: int | None
    ) -> None:
        """The server counted so many tokens in this prompt."""
        if tokens is not None:
            self.beyond = max(self.beyond, tokens - self._count(messages, tools))


def _counter(tokenize: Callable[[str], Sequence[int]] | None) -> Additive:
    if tokenize is not None:
        try:
            tokenize("a")
        except RequestFailed:
            tokenize = None
    return counted_by_text(tokenize if tokenize is not None else _by_characters)


def _by_characters(text: str) -> Sequence[int]:
    return range(-(-len(text) // CHARACTERS_OF_TOKEN))


class History:
    """Messages of one conversation.

    :param opening: its system prompt. :param limit: tokens that messages and tools may take; ``None``: no window.
    :param summary: pinned when the first messages leave; "": none is kept.
    """

    def __init__(
        self,
        opening: Sequence[Mapping[str, Any]],
        *,
        limit: int | None,
        count: Counter | None,
        tools: Sequence[Mapping[str, Any]] = (),
        summary: str = "",
    ) -> None:
        self.events: list[str] = []
        self._summary = summary
        self._listed: list[dict[str, Any]] = []
        self._window: MessageWindow | None = None
        if limit is not None and count is not None:
            # Templates such as Mistral's and Gemma's take a user's message first.
            self._window = MessageWindow(limit, count=count, tools=tools, user_first=True)
        for message in opening:
            self.append(message)
        self.events.clear()

    @property
    def messages(self) -> list[dict[str, Any]]:
        """What to send."""
        return self._window.messages if self._window is not None else list(self._listed)

    def append(self, message: Mapping[str, Any]) -> None:
        """Take a message in; what leaves for it is an event.

        :raises BadInput: it does not fit beside what must stay.
        """
        if self._window is None:
            self._listed.append(dict(message))
            return
        gone = len(self._window.append(message))
        if gone and self._summary and self._window.summary is None:
            gone += len(self._window.pin_summary(self._summary))
            self._note(gone)
            self.events.append("summarised")
        else:
            self._note(gone)

    def _note(self, gone: int) -> None:
        if not gone:
            return
        for index, event in enumerate(self.events):
            if event.startswith("evicted "):
                gone += int(event.split()[1])
                self.events[index] = _evicted(gone)
                return
        self.events.append(_evicted(gone))

    def take_events(self) -> list[str]:
        """What happened since this was last called."""
        events, self.events = self.events, []
        return events


def _evicted(count: int) -> str:
    return f"evicted {count} message{'s' if count > 1 else ''}"
