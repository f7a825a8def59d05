"""Requests of the three protocols."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema
import msgspec
import pytest

from pytest_vram.errors import BackendDied, BadSpec, RequestFailed
from pytest_vram.spec import Sampling, ToolCalling
from pytest_vram.toolcalls import biases
from pytest_vram.toolcalls.cases import Case, Tool
from pytest_vram.toolcalls.diagnosis import Diagnosis
from pytest_vram.toolcalls.evaluation import request_of
from pytest_vram.toolcalls.protocols import answer_schema, call_id, signature
from pytest_vram.toolcalls.retrying import answered_with, continued

DISK = Tool(
    name="disk_usage",
    description="How full a disk is.",
    parameters={
        "type": "object",
        "properties": {
            "mount": {"type": "string", "description": "mount point"},
            "unit": {"type": "string", "enum": ["GB", "percent"]},
            "window": {
                "type": "object",
                "properties": {"hours": {"type": "integer"}, "zones": {"type": "array", "items": {"type": "string"}}},
                "required": ["hours"],
            },
            "label": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        },
        "required": ["mount"],
    },
)
UPTIME = Tool(name="uptime", description="Since when a host runs.", parameters={"type": "object", "properties": {}})
CASE = Case(
    id="disk-1",
    family="disk",
    category="multi_turn",
    tools=[DISK, UPTIME],
    messages=[
        {"role": "system", "content": "You watch servers."},
        {"role": "user", "content": "Since when does it run?"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "uptime", "arguments": "{}"}}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "41 days"},
        {"role": "user", "content": "And how full is /srv?"},
    ],
)


def asked(
    protocol: str = "tools", sampling: Sampling | None = None, **calling: Any
) -> tuple[list[Any], dict[str, Any]]:
    return request_of(CASE, sampling=sampling or Sampling(), calling=ToolCalling(protocol=protocol, **calling))


def test_tools_are_sent_as_openai_has_them_and_the_conversation_as_it_is() -> None:
    """Nothing is added to what the case says but ids that every template takes; what is not set is the engine's choice."""
    messages, body = asked()
    (call,) = messages[2]["tool_calls"]
    assert re.fullmatch("[A-Za-z0-9]{9}", call["id"])
    assert messages[3]["tool_call_id"] == call["id"]
    assert (call["function"], messages[3]["content"]) == ({"name": "uptime", "arguments": "{}"}, "41 days")
    assert [messages[index] for index in (0, 1, 4)] == [CASE.messages[index] for index in (0, 1, 4)]
    assert CASE.messages[3]["tool_call_id"] == "c1"  # the case is not changed
    assert body == {"temperature": 0.0, "seed": 0, "max_tokens": 512, "tools": [DISK.as_openai(), UPTIME.as_openai()]}


def test_ids_of_nine_letters_and_digits_are_kept() -> None:
    """Others are made so: the same always the same, different ones different, whatever they are."""
    assert call_id("aB3dE5g71") == "aB3dE5g71"
    made = [call_id(one) for one in ("c1", "c2", "call_0123456789abcdef", "", None, 7, "\ud800", "id mit ß und Wort")]
    assert all(re.fullmatch("[A-Za-z0-9]{9}", one) for one in made)
    assert len(set(made)) == len(made)
    assert call_id("c1") == made[0]


@pytest.mark.parametrize("protocol", ["json_schema", "few_shot"])
@pytest.mark.parametrize(
    "roles",
    [
        "u",
        "su",
        "a u",
        "s a u",
        "u a u",
        "u u a a u",
        "u s u",
        "u c t u",
        "u c t",
        "u c c t t",
        "c t u",
        "u a",
        "d u",
        "u c t t a u",
    ],
)
def test_turns_alternate_and_the_user_begins(protocol: str, roles: str) -> None:
    """Gemma's and other templates refuse any other conversation; also after a retry."""
    call = {"id": "x", "type": "function", "function": {"name": "uptime", "arguments": "{}"}}
    of: dict[str, dict[str, Any]] = {
        "s": {"role": "system", "content": "Be short."},
        "d": {"role": "developer", "content": "Be short."},
        "u": {"role": "user", "content": "And now?"},
        "a": {"role": "assistant", "content": "Well."},
        "c": {"role": "assistant", "content": None, "tool_calls": [call]},
        "t": {"role": "tool", "tool_call_id": "x", "content": "41 days"},
    }
    case = msgspec.structs.replace(CASE, messages=[of[letter] for letter in roles.replace(" ", "")])
    messages, _ = request_of(case, sampling=Sampling(), calling=ToolCalling(protocol=protocol))
    broken = Diagnosis(well_formed=False, kind="missing_bracket", knowable="A bracket is missing.")
    answers: list[dict[str, Any] | None] = [
        {"role": "assistant", "content": '{"calls": ['},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        None,
    ]
    for answer in answers:
        whole = continued(messages, answer, broken, case.tools, protocol)
        turns = [message["role"] for message in whole]
        assert turns == ["system", *("user", "assistant") * len(turns)][: len(turns)]
        assert turns[-1] == "user"
        assert "A bracket is missing." in whole[-1]["content"]
        assert all(set(message) == {"role", "content"} for message in whole)
        assert whole[: len(messages) - 1] == messages[:-1]


def test_calls_that_go_back_have_ids_of_their_own_that_every_template_takes() -> None:
    """Those of the answer are often longer, missing or twice the same."""
    function = {"name": "uptime", "arguments": "{}"}
    calls = [
        {"id": one, "function": function}
        for one in ("chatcmpl-tool-0123456789abcdef", "x", "x", "x", None, "abcdefghi")
    ]
    broken = Diagnosis(well_formed=True, kind="missing_field", knowable="Something is missing.")
    answer, *told = answered_with({"content": "", "tool_calls": calls}, broken, CASE.tools)
    ids = [call["id"] for call in answer["tool_calls"]]
    assert all(re.fullmatch("[A-Za-z0-9]{9}", one) for one in ids)
    assert len(set(ids)) == len(ids) == 6
    assert [one["tool_call_id"] for one in told] == ids
    assert ids[-1] == "abcdefghi"


def test_every_setting_reaches_the_request() -> None:
    """Sampling, its extra fields, streaming, tool choice and parallel calls."""
    sampling = Sampling(temperature=0.2, seed=7, top_p=0.9, top_k=40, max_tokens=64, extra={"min_p": 0.1})
    _, body = asked(sampling=sampling, stream=True, tool_choice="required", parallel=False)
    del body["tools"]
    assert body == {
        "temperature": 0.2, "seed": 7, "top_p": 0.9, "top_k": 40, "max_tokens": 64, "min_p": 0.1, "stream": True,
        "tool_choice": "required", "parallel_tool_calls": False,
    }  # fmt: skip


@pytest.mark.parametrize("protocol", ["json_schema", "few_shot"])
def test_a_conversation_without_a_tool_template_is_text_in_turns(protocol: str) -> None:
    """One system message that begins with the case's own, then user and assistant in turn; results are the user's."""
    messages, body = asked(protocol)
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "user"]
    assert messages[0]["content"].startswith("You watch servers.\n\nYou can call these tools:\n\n- disk_usage(")
    assert json.loads(messages[2]["content"]) == {"calls": [{"name": "uptime", "arguments": {}}]}
    assert messages[3]["content"] == "Result of uptime:\n41 days\n\nAnd how full is /srv?"
    assert "tools" not in body
    assert ("response_format" in body) is (protocol == "json_schema")
    assert ("Examples" in messages[0]["content"]) is (protocol == "few_shot")


def test_signatures_say_types_and_what_may_be_left_out() -> None:
    """Enumerations, objects, lists and alternatives are written out."""
    assert signature(DISK) == (
        '- disk_usage(mount: string, unit?: "GB" | "percent", window?: {hours: integer, zones?: array of string},'
        " label?: string | null): How full a disk is.\n    mount: mount point"
    )


@pytest.mark.parametrize(
    ("answer", "fits"),
    [
        ({"calls": []}, True),
        ({"calls": [], "answer": "None of them."}, True),
        (
            {"calls": [{"name": "disk_usage", "arguments": {"mount": "/srv"}}, {"name": "uptime", "arguments": {}}]},
            True,
        ),
        ({"calls": [{"name": "disk_usage", "arguments": {"mount": 3}}]}, False),
        ({"calls": [{"name": "uptimes", "arguments": {}}]}, False),
        ({"calls": [{"name": "uptime"}]}, False),
        ({"answer": "x"}, False),
        ([], False),
    ],
)
def test_the_schema_of_an_answer_takes_calls_and_none(answer: Any, fits: bool) -> None:
    """It is a valid JSON Schema, and a call is held to its own tool's parameters."""
    schema = answer_schema([DISK, UPTIME])
    jsonschema.Draft202012Validator.check_schema(schema)
    assert jsonschema.Draft202012Validator(schema).is_valid(answer) is fits


def test_without_tools_only_an_empty_list_of_calls_fits() -> None:
    """As in a case where the model has none."""
    validator = jsonschema.Draft202012Validator(answer_schema([]))
    assert validator.is_valid({"calls": []})
    assert not validator.is_valid({"calls": [{}]})


def test_references_inside_of_a_tool_keep_their_meaning() -> None:
    """Definitions of two tools with one name stay apart."""
    tools = [
        Tool(name=name, description="", parameters={
            "type": "object", "properties": {"x": {"$ref": "#/$defs/x"}}, "$defs": {"x": {"type": kind}}})
        for name, kind in (("a", "integer"), ("b", "string"))
    ]  # fmt: skip
    validator = jsonschema.Draft202012Validator(answer_schema(tools))
    assert validator.is_valid({"calls": [{"name": "a", "arguments": {"x": 1}}, {"name": "b", "arguments": {"x": "1"}}]})
    assert not validator.is_valid({"calls": [{"name": "a", "arguments": {"x": "1"}}]})


class Tokens:
    def __init__(self, error: Exception | None = None) -> None:
        self.error = error

    def tokenize(self, text: str) -> list[int]:
        if self.error is not None:
            raise self.error
        return [ord(character) for character in text[:2]]


def test_a_bias_is_on_every_token_of_a_name() -> None:
    """What two names share has the sum, within OpenAI's limits."""
    other = Case(
        id="x", family="x", category="single", messages=[], tools=[Tool(name="dusk", description="", parameters={})]
    )
    found = biases.of_tools(Tokens(), {"disk_usage": 60, "dusk": 60, "uptime": -5}, [CASE, other], where="w")
    assert found == {"100": 100.0, "105": 60.0, "117": 55.0, "112": -5.0}


@pytest.mark.parametrize(
    ("client", "names", "part"),
    [
        (Tokens(), {"disk_usag": 1}, "w.logit_bias: no case offers a tool 'disk_usag': did you mean 'disk_usage'?"),
        (Tokens(RequestFailed("HTTP 404", status=404)), {"uptime": 1}, "w.logit_bias cannot be used with this engine"),
        (object(), {"uptime": 1}, "w.logit_bias cannot be used here"),
    ],
)
def test_a_bias_that_cannot_be_used_is_one_sentence(client: object, names: dict[str, float], part: str) -> None:
    """It names the table and what is wrong."""
    with pytest.raises(BadSpec) as caught:
        biases.of_tools(client, names, [CASE], where="w")
    assert str(caught.value).startswith(part)
    assert "\n" not in str(caught.value)


def test_a_server_that_is_gone_is_no_matter_of_the_bias() -> None:
    """Its error is the client's."""
    with pytest.raises(BackendDied):
        biases.of_tools(Tokens(BackendDied("gone")), {"uptime": 1}, [CASE], where="w")
