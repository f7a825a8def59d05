"""The kind of what is wrong with a call is told for thousands of mutated calls."""

from __future__ import annotations

import json
import random
from collections import Counter
from typing import Any

import pytest

from pytest_vram.testing.scripted.garbled import GARBLED
from pytest_vram.toolcalls import Tool, diagnose
from pytest_vram.toolcalls.tolerant import MISSING, double_encoded, parse, runaway
from tests.properties.test_toolcall_tolerant import NASTY
from tests.properties.toolcall_mutations import MUTATIONS, Call, Mutation, written

EACH = 70
#: Kinds that the JSON alone shows.
OF_JSON = (
    "missing_bracket", "extra_bracket", "missing_comma", "trailing_comma", "single_quotes", "unquoted_key", "unterminated_string", "duplicate_key",
    "non_finite_number", "over_escaped", "runaway",
)  # fmt: skip


def tool(name: str, required: list[str], **properties: Any) -> Tool:
    return Tool(
        name=name,
        description=name,
        parameters={"type": "object", "properties": properties, "required": required, "additionalProperties": False},
    )


TEXT, WHOLE, SHARE, YES = {"type": "string"}, {"type": "integer"}, {"type": "number"}, {"type": "boolean"}
LIST = {"type": "array", "items": {"type": "string"}}
TOOLS = [
    tool("read_log", ["path", "lines"], path=TEXT, lines=WHOLE, pattern=TEXT, follow=YES),
    tool("write_report", ["title", "body"], title=TEXT, body=TEXT, sections={"type": "array", "items": {"type": "object"}}, draft=YES),
    tool("slow_queries", ["database", "threshold"], database=TEXT, threshold=SHARE, tables=LIST, limit=WHOLE),
    tool("cron_last_run", ["job"], job=TEXT, host=TEXT),
    tool("send_alert", ["channel", "message"], channel={"type": "string", "enum": ["mail", "pager", "chat"]}, message=TEXT, labels={"type": "object"}, targets=LIST),
    tool("list_files", [], folder=TEXT, depth=WHOLE, suffixes=LIST, hidden=YES),
    tool("disk_usage", ["mounts"], mounts=LIST, percent=SHARE),
]  # fmt: skip
WORDS = (
    "the nightly backup job",
    "/var/log/app/error.log",
    "prod",
    "ERROR timeout while reading",
    "Rechnung für März",
    "db-01.internal",
    "orders",
    "日次レポート",
    "line one\nline two",
    *NASTY,
)


def some_call(chance: random.Random) -> Call:
    """A call that is right: every required argument, and most of the others."""
    chosen = chance.choice(TOOLS)
    arguments: dict[str, Any] = {}
    for name, schema in chosen.parameters["properties"].items():
        if name in chosen.parameters["required"] or chance.random() < 0.6:
            arguments[name] = chance.choice(schema["enum"]) if "enum" in schema else _value(schema, chance)
    return {"name": chosen.name, "arguments": arguments}


def _value(schema: dict[str, Any], chance: random.Random) -> Any:
    type_ = schema["type"]
    if type_ == "string":
        return chance.choice(WORDS) if chance.random() < 0.7 else f"{chance.choice(WORDS[:6])} {chance.randrange(100)}"
    if type_ == "integer":
        return chance.randrange(1, 5000)
    if type_ == "number":
        return chance.choice((0.5, 12, 99.25, -1.5))
    if type_ == "boolean":
        return chance.random() < 0.5
    if type_ == "object":
        return {"team": chance.choice(WORDS), "severity": chance.randrange(5), "on_call": {"name": "Kim", "page": True}}
    inner = schema["items"]["type"]
    return [
        ({"heading": chance.choice(WORDS[:6]), "rows": [1, 2]} if inner == "object" else chance.choice(WORDS[:8]))
        for _ in range(chance.randrange(1, 4))
    ]


def mutated(mutation: Mutation, seed: str) -> list[tuple[Call, str]]:
    """Calls, and what the mutation makes of them."""
    chance = random.Random(seed)
    found: list[tuple[Call, str]] = []
    for _ in range(EACH * 20):
        call = some_call(chance)
        text = mutation(call, TOOLS, chance)
        if text is not None:
            found.append((call, text))
        if len(found) == EACH:
            break
    assert len(found) == EACH, f"{mutation.__name__} has room in too few calls"
    return found


def first(kinds: set[str]) -> str:
    """The kind that explains the others."""
    from pytest_vram.toolcalls import KINDS

    return min(kinds, key=KINDS.index) if kinds else "valid"


@pytest.mark.parametrize("kind", OF_JSON)
def test_what_is_wrong_with_the_json_is_told_of_the_text_alone(kind: str) -> None:
    """The reader finds what was done to the text of a call, whatever else that makes of it."""
    missed = []
    total = 0
    for mutation in MUTATIONS[kind]:
        for _, text in mutated(mutation, mutation.__name__):
            parsed = parse(text)
            total += 1
            if parsed is None or first({defect.kind for defect in parsed.defects}) != kind:
                missed.append((mutation.__name__, text[-160:], parsed and parsed.defects))
    assert len(missed) <= 0.03 * total, missed[:10]


def test_arguments_that_were_encoded_twice_are_found() -> None:
    """The helper gives the object that is meant, and nothing for strings that only look like JSON."""
    chance = random.Random(3)
    for _ in range(200):
        call = some_call(chance)
        assert double_encoded(written(call["arguments"], chance)) == call["arguments"]
    for other in ("", "plain", "[see above] and more", "{", 7, None, {"a": 1}, "{'a': 1} text", '"quoted"'):
        assert double_encoded(other) is MISSING or other == "{"


def told(kind: str, call: Call, answer: str | dict[str, Any], protocol: str = "few_shot") -> str:
    expected = [
        {
            "name": call["name"],
            "arguments": {name: [value] for name, value in call["arguments"].items()},
            "exact": list(call["arguments"]),
        }
    ]
    finish = "length" if kind in ("truncated", "runaway") else "stop"
    return diagnose(answer, TOOLS, expected=expected, finish_reason=finish, protocol=protocol).kind


def test_the_kind_of_thousands_of_mutated_calls_is_told() -> None:
    """Of more than 2000 calls that were mutated in some 40 ways, at least 97 % get the kind of the mutation."""
    wrong: Counter[str] = Counter()
    total = 0
    for kind, mutations in MUTATIONS.items():
        for mutation in mutations:
            for call, text in mutated(mutation, mutation.__name__):
                total += 1
                found = told(kind, call, text)
                if found != kind:
                    wrong[f"{mutation.__name__}: {found} instead of {kind}"] += 1
    assert total >= 2000
    # No one way of going wrong is mistaken as a rule, which a share of all could hide.
    assert max(wrong.values(), default=0) <= 0.1 * EACH, wrong.most_common(5)
    assert wrong.total() <= 0.03 * total, wrong.most_common(20)


@pytest.mark.parametrize("kind", GARBLED)
def test_the_kind_of_malformed_arguments_is_told(kind: str) -> None:
    """Arguments of an OpenAI message that the scripted backend garbled have that kind."""
    chance = random.Random(kind)
    wrong: Counter[str] = Counter()
    for _ in range(100):
        call = some_call(chance)
        text = GARBLED[kind](json.dumps(call["arguments"], ensure_ascii=False), chance) if call["arguments"] else None
        if text is None:
            continue
        made = {"id": "call_1", "type": "function", "function": {"name": call["name"], "arguments": text}}
        found = told(kind, call, {"role": "assistant", "content": None, "tool_calls": [made]}, "tools")
        # Cut inside of a string that is such a repetition itself, it ends in one.
        if found not in (kind, "runaway" if runaway(text) else kind):
            wrong[found] += 1
    assert wrong.total() <= 3, wrong


def test_thousands_of_right_calls_are_valid() -> None:
    """None of 2500 right calls, with code, tags and brackets inside of their strings, is called anything but valid."""
    chance = random.Random(9)
    for _ in range(2500):
        call = some_call(chance)
        assert told("valid", call, written(call, chance)) == "valid", call
