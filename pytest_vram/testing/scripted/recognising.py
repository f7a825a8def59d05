"""Which case a request asks, in which protocol, and how many retries came before it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha256
from typing import Any, Literal, NamedTuple

from pytest_vram.spec import Sampling, ToolCalling
from pytest_vram.toolcalls.cases import Case
from pytest_vram.toolcalls.protocols import request_of

ProtocolName = Literal["tools", "json_schema", "few_shot"]
PROTOCOLS: tuple[ProtocolName, ...] = ("tools", "json_schema", "few_shot")


class Recognised(NamedTuple):
    """What a request is. :ivar turn: 0 for the first request of a case, then the number of the retry."""

    case: Case | None
    protocol: ProtocolName
    turn: int


def protocol_of(body: Mapping[str, Any]) -> ProtocolName:
    """The protocol of a request: by its ``response_format`` or the form of the answer that its prompt asks for."""
    if isinstance(body.get("response_format"), Mapping):
        return "json_schema"
    messages = body.get("messages")
    first = messages[0] if isinstance(messages, list) and messages and isinstance(messages[0], Mapping) else {}
    # A case without tools sends none: what the system prompt says tells its request from one with examples.
    asks = first.get("role") == "system" and '{"calls":' in str(first.get("content"))
    return "few_shot" if asks and not body.get("tools") else "tools"


class Recogniser:
    """Knows the requests of a set of cases.

    A request is a case's where its messages begin with those that ask the case; what follows is retries. Requests that
    others put together are known by what the user says in them and by the names of their tools.
    """

    def __init__(self, cases: Sequence[Case]) -> None:
        self._cases = cases
        self._exact: dict[ProtocolName, dict[bytes, Case]] = {}
        self._said: dict[bytes, list[Case]] = {}
        for case in cases:
            for key in (_said(case.messages, [tool.name for tool in case.tools]), _said(case.messages, None)):
                self._said.setdefault(key, []).append(case)

    def recognise(self, body: Mapping[str, Any]) -> Recognised:
        """What this body of a chat completion asks."""
        protocol = protocol_of(body)
        listed = body.get("messages")
        messages = [one for one in listed if isinstance(one, Mapping)] if isinstance(listed, list) else []
        known = self._known(protocol)
        # The longest beginning counts: the messages of one case may be how another's begin.
        for end, key in reversed(list(_beginnings(messages, body))):
            if (case := known.get(key)) is not None:
                return Recognised(case, protocol, _answers(messages[end:]))
        names = _names(body.get("tools"))
        for end in range(len(messages), 0, -1):
            if messages[end - 1].get("role") not in ("user", "tool"):
                continue
            for key in (_said(messages[:end], names), _said(messages[:end], None)):
                found = self._said.get(key, [])
                if len(found) == 1:
                    return Recognised(found[0], protocol, _answers(messages[end:]))
        return Recognised(None, protocol, 0)

    def _known(self, protocol: ProtocolName) -> dict[bytes, Case]:
        known = self._exact.get(protocol)
        if known is None:
            calling = ToolCalling(protocol=protocol)
            known = {}
            for case in self._cases:
                messages, fields = request_of(case, sampling=Sampling(), calling=calling)
                *_, (_, key) = _beginnings(messages, fields)
                known.setdefault(key, case)
            self._exact[protocol] = known
        return known


def _answers(messages: Sequence[Mapping[str, Any]]) -> int:
    return sum(message.get("role") == "assistant" for message in messages)


def _canonical(value: object) -> bytes:
    # Whether a message without text says so by null or by nothing is its sender's taste.
    return json.dumps(value, sort_keys=True, ensure_ascii=True, separators=(",", ":"), default=str).encode()


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in message.items() if value is not None and value != ""}


def _beginnings(messages: Sequence[Mapping[str, Any]], body: Mapping[str, Any]) -> Iterator[tuple[int, bytes]]:
    """Number of messages and a key of each beginning of the conversation, with the tools and format that were sent."""
    hashed = sha256(_canonical([body.get("tools"), body.get("response_format")]))
    for end, message in enumerate(messages, 1):
        hashed.update(_canonical(_plain(message)))
        yield end, hashed.copy().digest()


def _said(messages: Sequence[Mapping[str, Any]], names: Sequence[str] | None) -> bytes:
    told = [message.get("content") for message in messages if message.get("role") in ("user", "tool")]
    return _canonical([told, sorted(names) if names is not None else None])


def _names(tools: object) -> list[str]:
    found = []
    for tool in tools if isinstance(tools, list) else []:
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if isinstance(function, Mapping):
            found.append(str(function.get("name")))
    return found
