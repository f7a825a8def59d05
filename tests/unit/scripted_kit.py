"""Cases for tests of the scripted backend, of every shape that an answer can have."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from pytest_vram.spec import Sampling, ToolCalling
from pytest_vram.toolcalls import Case, CaseSet, ExpectedCall, Tool
from pytest_vram.toolcalls.protocols import request_of

PROTOCOLS = ("tools", "json_schema", "few_shot")


def tool(name: str, required: list[str], **properties: dict[str, Any]) -> Tool:
    """A tool with these arguments and no others."""
    schema = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    return Tool(name=name, description=f"Does what {name} says", parameters=schema)


READ = tool(
    "read_log",
    ["path", "lines"],
    path={"type": "string"},
    lines={"type": "integer"},
    level={"type": "string", "enum": ["error", "warning", "info"]},
)
RESTART = tool("restart_job", ["job", "now"], job={"type": "string"}, now={"type": "boolean"})
TAGS = tool(
    "tag_report",
    ["tags", "owner"],
    tags={"type": "array", "items": {"type": "string"}},
    owner={"type": "object", "properties": {"floor": {"type": "integer"}}, "required": ["floor"]},
)
TOOLS = [READ, RESTART, TAGS]


def _expected(number: int) -> list[ExpectedCall]:
    read = ExpectedCall(
        name="read_log",
        arguments={"path": [f"/var/log/app{number}.log"], "lines": [40 + number], "level": ["error"]},
        omittable=["level"],
        exact=["path"],
    )
    restart = ExpectedCall(name="restart_job", arguments={"job": [f"backup {number}", "backup"], "now": [True]})
    tags = ExpectedCall(
        name="tag_report", arguments={"tags": [["weekly", f"team {number}"]], "owner": [{"floor": number}]}
    )
    return [[read], [restart], [tags], [read, restart], []][number % 5]


def cases(count: int, *, family_size: int = 5) -> CaseSet:
    """So many cases, in families of equal size."""
    made = [
        Case(
            id=f"case-{number:04}",
            family=f"family-{number // family_size:03}",
            category="single",
            messages=[
                {"role": "system", "content": "You look after servers."},
                {"role": "user", "content": f"Request number {number}: see to it."},
            ],
            tools=TOOLS,
            expect=_expected(number),
        )
        for number in range(count)
    ]
    return CaseSet(name="kit", cases=made, digest="0" * 16)


def bodies(cases: CaseSet, protocol: str = "tools", *, stream: bool = False) -> list[dict[str, Any]]:
    """The body of the first request of each case."""
    calling = ToolCalling(protocol=protocol, stream=stream)
    made = []
    for case in cases.cases:
        messages, fields = request_of(case, sampling=Sampling(), calling=calling)
        made.append({"messages": messages, **fields})
    return made


def retried(body: dict[str, Any]) -> dict[str, Any]:
    """The request after an error was given back, as the protocol ``tools`` has it."""
    call = {"id": "call_1", "type": "function", "function": {"name": "read_log", "arguments": "{}"}}
    messages = [
        *body["messages"],
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "The arguments were no JSON object."},
    ]
    return {**body, "messages": messages}


def shuffled(listed: list[dict[str, Any]], seed: int) -> Iterator[tuple[int, dict[str, Any]]]:
    """The bodies with their index, in another order."""
    order = list(range(len(listed)))
    random.Random(seed).shuffle(order)
    for index in order:
        yield index, listed[index]
