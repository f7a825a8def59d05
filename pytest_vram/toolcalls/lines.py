"""One line of a case file as a :class:`~pytest_vram.toolcalls.cases.Case`, or what is wrong with it and where."""

from __future__ import annotations

from typing import Any

from pytest_vram.errors import BadCases
from pytest_vram.toolcalls.cases import CATEGORIES, Case, ExpectedCall
from pytest_vram.toolcalls.toolbox import Toolbox
from pytest_vram.toolcalls.wanted import each_text, kind_of, list_of, meant, object_of, optional, text_of

KEYS = ("id", "family", "category", "language", "messages", "tools", "expect")
ROLES = ("system", "developer", "user", "assistant", "tool")
_MESSAGE = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content")


def case_of(value: Any, origin: str, tools: Toolbox) -> Case:
    """A decoded line as a case.

    :param origin: file and line. :raises BadCases: naming line, path and what is accepted.
    """
    if not isinstance(value, dict):
        raise BadCases(f"{origin} is {kind_of(value)}: each line is one case, an object with {', '.join(KEYS)}")
    fields = object_of(value, origin, KEYS)
    for key in ("id", "family", "category", "messages", "tools", "expect"):
        if key not in fields:
            hint = ": [] says that an answer without a call is right" if key == "expect" else ""
            raise BadCases(f"{origin} has no {key!r}{hint}")
    return Case(
        id=text_of(fields["id"], f"{origin}: id"),
        family=text_of(fields["family"], f"{origin}: family"),
        category=_category(fields["category"], f"{origin}: category"),
        language=text_of(fields.get("language", "en"), f"{origin}: language"),
        messages=_messages(fields["messages"], f"{origin}: messages"),
        tools=tools.resolve(list_of(fields["tools"], f"{origin}: tools", "tools"), origin),
        expect=[
            _expected(call, f"{origin}: expect[{position}]")
            for position, call in enumerate(list_of(fields["expect"], f"{origin}: expect", "calls that are right"))
        ],
        origin=origin,
    )


def _category(value: Any, where: str) -> str:
    name = text_of(value, where)
    if name not in CATEGORIES:
        near = meant(name, CATEGORIES)
        hint = f"did you mean {near!r}?" if near else f"there are {', '.join(CATEGORIES)}"
        raise BadCases(f"{where} {name!r} is unknown: {hint}")
    return name


def _expected(value: Any, where: str) -> ExpectedCall:
    fields = object_of(value, where, ("name", "arguments", "omittable", "exact"))
    arguments = object_of(optional(fields, "arguments", {}), f"{where}.arguments")
    for name, allowed in arguments.items():
        if not isinstance(allowed, list):
            hint = "give every value that is right, as in " + _example(allowed)
            raise BadCases(f"{where}.arguments.{name} is not a list: {hint}")
        if not allowed:
            raise BadCases(f"{where}.arguments.{name} is an empty list: give every value that is right")
    return ExpectedCall(
        name=text_of(fields.get("name"), f"{where}.name"),
        arguments=arguments,
        omittable=each_text(optional(fields, "omittable", []), f"{where}.omittable", "names of arguments"),
        exact=each_text(optional(fields, "exact", []), f"{where}.exact", "names of arguments"),
    )


def _example(value: Any) -> str:
    import json

    text = json.dumps([value], ensure_ascii=False)
    return text if len(text) <= 60 else '["backup"]'


def _messages(value: Any, where: str) -> list[dict[str, Any]]:
    messages = list_of(value, where, "chat messages")
    if not messages:
        raise BadCases(f"{where} is empty: the request belongs there")
    for position, message in enumerate(messages):
        check_message(message, f"{where}[{position}]")
    return messages


def check_message(value: Any, where: str) -> None:
    """Refuse what is no chat message. :raises BadCases: naming its path."""
    message = object_of(value, where, _MESSAGE)
    role = text_of(message.get("role"), f"{where}.role")
    if role not in ROLES:
        raise BadCases(f"{where}.role {role!r} is unknown: there are {', '.join(ROLES)}")
    content, calls = message.get("content"), message.get("tool_calls")
    if calls is not None:
        if role != "assistant":
            raise BadCases(f"{where}.tool_calls: only the assistant calls tools, not {role!r}")
        for position, call in enumerate(list_of(calls, f"{where}.tool_calls", "calls")):
            _check_call(call, f"{where}.tool_calls[{position}]")
    if content is None:
        if not calls:
            raise BadCases(f"{where}.content is missing: text belongs there")
    elif isinstance(content, list):
        for position, part in enumerate(content):
            text_of(object_of(part, f"{where}.content[{position}]").get("type"), f"{where}.content[{position}].type")
    else:
        text_of(content, f"{where}.content", empty=True)
    if role == "tool":
        text_of(message.get("tool_call_id"), f"{where}.tool_call_id")


def _check_call(value: Any, where: str) -> None:
    call = object_of(value, where, ("id", "type", "function"))
    text_of(call.get("id"), f"{where}.id")
    if call.get("type") != "function":
        raise BadCases(f'{where}.type is not "function"')
    function = object_of(call.get("function"), f"{where}.function", ("name", "arguments"))
    text_of(function.get("name"), f"{where}.function.name")
    if not isinstance(function.get("arguments"), str):
        found = kind_of(function.get("arguments"))
        raise BadCases(f"{where}.function.arguments is {found}: in a request they are JSON written as text")
