"""The message window: what is pinned, what leaves together, what is refused, and how tokens are counted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import pytest

from pytest_vram.errors import BadInput, WindowFull
from pytest_vram.windows import MessageWindow, counted_by_template, counted_by_text
from tests.unit.window_kit import words


def say(role: str, content: str, **more: Any) -> dict[str, Any]:
    """A message."""
    return {"role": role, "content": content, **more}


def test_a_result_without_its_call_is_refused() -> None:
    """A tool's result whose call is not held is refused, and nothing has changed."""
    window = MessageWindow(50, count=words)
    window.append(say("user", "one"))
    with pytest.raises(BadInput, match="call c9 has no such call"):
        window.append(say("tool", "two", tool_call_id="c9"))
    assert window.messages == [say("user", "one")]


def test_ids_that_repeat_belong_to_the_latest_call() -> None:
    """Two rounds that both use call_0: the first leaves with its own result only."""
    window = MessageWindow(50, count=words)
    for number in range(2):
        window.append(say("assistant", f"ask {number}", tool_calls=[{"id": "call_0"}]))
        window.append(say("tool", f"told {number}", tool_call_id="call_0"))
    assert [message["content"] for message in window.evict(4)] == ["ask 0", "told 0"]


def test_what_cannot_fit_leaves_the_window_as_it_was() -> None:
    """A message larger than the room beside what is pinned is refused."""
    window = MessageWindow(6, count=words)
    window.extend([say("system", "a b c"), say("user", "d e")])
    with pytest.raises(WindowFull, match="takes 7 tokens, its limit is 6"):
        window.append(say("user", "f g h i"))
    assert window.count == 5


def test_the_oldest_message_left_is_a_users() -> None:
    """With user_first an answer does not stay without its question."""
    window = MessageWindow(6, count=words, user_first=True)
    window.extend([say("user", "a b"), say("assistant", "c d"), say("user", "e f")])
    assert [message["content"] for message in window.append(say("assistant", "g"))] == ["a b", "c d"]


def test_parts_that_are_no_text_are_not_counted_as_nothing() -> None:
    """A picture is refused by the count of texts."""
    window = MessageWindow(50, count=counted_by_text(str.split))
    with pytest.raises(BadInput, match="part that is not text"):
        window.append({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]})


def test_the_servers_template_counts() -> None:
    """Messages and tools go to the template, and its text to the tokenizer."""

    class Server:
        def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
            assert path == "/apply-template"
            return {"prompt": " ".join(message["content"] for message in body["messages"]) + " end"}

        def tokenize(self, text: str) -> list[str]:
            return text.split()

    window = MessageWindow(4, count=counted_by_template(Server()))
    window.extend([say("user", "a b"), say("user", "c d")])
    assert window.messages == [say("user", "c d")]


def test_each_message_is_counted_once() -> None:
    """A long conversation does not tokenize, nor even look at, all its messages again with each new one."""
    asked: list[str] = []

    def split(text: str) -> list[str]:
        asked.append(text)
        return text.split()

    count = counted_by_text(split, per_message=1)
    looked: list[Mapping[str, Any]] = []
    of_message = count.of_message

    def look(message: Mapping[str, Any]) -> int:
        looked.append(message)
        return of_message(message)

    count.of_message = look  # type: ignore[method-assign]
    window = MessageWindow(100_000, count=count, tools=[say("tool", "x")])
    window.append(say("system", "be brief"))
    window.pin_summary("all is well")
    for number in range(300):
        window.append(say("user", f"line {number}"))
    assert len(asked) == len(set(asked)) == 303  # the tools, and the system prompt with the summary and without it
    assert len([message for message in looked if message["role"] == "user"]) == 300
    whole = count(window.messages, window.tools)
    assert window.count == whole
    assert len(window.evict(200)) > 200
    assert window.count == count(window.messages, window.tools) <= 200


@pytest.mark.parametrize(
    ("does", "said"),
    [
        (lambda window: window.evict(None), "evict takes the number of tokens that may stay"),
        (lambda window: window.evict(-1), "0 or more; -1 is none"),
        (lambda window: window.append(say("assistant", "x", tool_calls="xx")), "tool_calls of a message are a list"),
        (lambda window: window.append(say("assistant", "x", tool_calls=[None])), "tool_calls of a message are a list"),
        (
            lambda window: MessageWindow(9, count=cast(Any, lambda *_: float("nan"))).count,
            "The count of MessageWindow gave nan",
        ),
        (lambda window: MessageWindow(9, count=lambda *_: -1).count, "The count of MessageWindow gave -1"),
        (
            lambda window: MessageWindow(9, count=counted_by_text(cast(Any, lambda text: None))).append(
                say("user", "x")
            ),
            "The tokenizer of counted_by_text gave None",
        ),
    ],
)
def test_what_is_no_number_or_no_call_is_told(does: Any, said: str) -> None:
    """One sentence instead of a TypeError from inside, and nothing has changed."""
    window = MessageWindow(50, count=words)
    window.append(say("user", "one"))
    with pytest.raises(BadInput, match=said):
        does(window)
    assert window.messages == [say("user", "one")]


def test_what_the_caller_changes_later_is_not_in_the_window() -> None:
    """Parts and calls are copied in and out, so that the count is that of what is sent."""
    message: dict[str, Any] = {"role": "user", "content": [{"type": "text", "text": "a b"}]}
    tool: dict[str, Any] = {"type": "function", "function": {"name": "read", "parameters": {}}}
    count = counted_by_text(str.split, per_message=4)
    window = MessageWindow(60, count=count, tools=[tool])
    window.append(message)
    before = window.count
    message["content"][0]["text"] = "y " * 500
    window.messages[0]["content"][0]["text"] = "y " * 500
    tool["function"]["parameters"]["x"] = "y " * 500
    assert window.count == before == count(window.messages, window.tools)
    assert window.messages[0]["content"][0]["text"] == "a b"
    deep: Any = "x"
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(BadInput, match="nested too deeply"):
        window.append({"role": "user", "content": deep})


def test_a_call_has_one_result() -> None:
    """A second one is refused, unless a later reply numbers its calls anew."""
    window = MessageWindow(200, count=counted_by_text(str.split, per_message=1))
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    asked = {"role": "assistant", "content": None, "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "a", "content": "done"}
    for _ in range(2):
        window.append(asked)
        window.append(result)
        with pytest.raises(BadInput, match="result for call a is there already"):
            window.append(result)
    assert len(window.messages) == 4


def test_extend_takes_all_or_none() -> None:
    """What had left for the first of them is back where a later one is refused."""
    window = MessageWindow(20, count=counted_by_text(str.split, per_message=2))
    window.append({"role": "user", "content": "one two three four five six"})
    before = window.messages
    long = {"role": "user", "content": "word " * 30}
    with pytest.raises(WindowFull):
        window.extend([{"role": "user", "content": "seven eight nine ten eleven"}, long])
    assert window.messages == before
    gone = window.extend([{"role": "user", "content": "seven eight nine ten eleven twelve thirteen fourteen"}] * 2)
    assert len(gone) == 2


@pytest.mark.parametrize("tools", [[1], "abc", {"a": 1}, 5, None])
def test_tools_that_are_none_are_told(tools: Any) -> None:
    """A list of objects, or a sentence."""
    with pytest.raises(BadInput, match="The tools of MessageWindow are a list of objects"):
        MessageWindow(60, count=counted_by_text(str.split), tools=tools)


@pytest.mark.parametrize("tokens", [-1, 1.5, True, "8"])
def test_tokens_around_a_message_are_none_below_nothing(tokens: Any) -> None:
    """A negative number would let everything in."""
    with pytest.raises(BadInput, match=r"per_message=.* of counted_by_text"):
        counted_by_text(str.split, per_message=tokens)
