"""The three ways in which a model is offered tools, as requests of chat completions.

``tools``: OpenAI's ``tools``; the server puts them into its chat template and reads the calls. ``json_schema``: the
tools stand in the system prompt, and the server holds the model to a JSON Schema of the answer. ``few_shot``: the same
prompt with examples, and nothing holds the model to it. In the last two the answer is one object,
``{"calls": [{"name": …, "arguments": {…}}]}``; no call is ``{"calls": []}``, with or without a text as ``answer``.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pytest_vram.spec import Sampling, ToolCalling
from pytest_vram.toolcalls.cases import Case, Tool

PROTOCOLS = ("tools", "json_schema", "few_shot")
#: Characters of one earlier answer that go back to the model.
QUOTED = 4000
#: What a user says where a conversation begins with the assistant.
_BEGIN = "(The conversation begins.)"
_RULES = """\
You can call these tools:

{tools}

Answer with one JSON object and nothing else:
{{"calls": [{{"name": "tool_name", "arguments": {{"argument": "value"}}}}]}}

Rules:
- Use only tools and arguments that are listed above; arguments marked with ? may be left out.
- Values have the types that are given. Take them from the conversation and do not make any up.
- If several calls are needed, put all of them into "calls".
- If no tool fits, or something that a tool needs was not said, answer {{"calls": [], "answer": "your text"}}."""
# The tools of the examples are no case's, so that no example gives an answer away.
_EXAMPLES = """

Examples, with other tools: lamp_set(room: string, on: boolean, brightness?: integer), door_state(door: string)
User: Switch the lamp in the hall on, at 40 percent.
Answer: {"calls": [{"name": "lamp_set", "arguments": {"room": "hall", "on": true, "brightness": 40}}]}
User: Are the garage door and the back door closed?
Answer: {"calls": [{"name": "door_state", "arguments": {"door": "garage"}}, \
{"name": "door_state", "arguments": {"door": "back"}}]}
User: Who wrote Middlemarch?
Answer: {"calls": [], "answer": "George Eliot."}"""


def request_of(case: Case, *, sampling: Sampling, calling: ToolCalling) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Messages and the other fields of the request's body that ask a case.

    ``logit_bias`` is no part of it: token ids are the server's (:mod:`pytest_vram.toolcalls.biases`).
    """
    body = _sampled(sampling)
    if calling.stream:
        body["stream"] = True
    if calling.protocol == "tools":
        if case.tools:
            body["tools"] = [tool.as_openai() for tool in case.tools]
            if calling.tool_choice is not None:
                body["tool_choice"] = calling.tool_choice
            if calling.parallel is not None:
                body["parallel_tool_calls"] = calling.parallel
        return named_calls(case.messages), body
    prompt = _RULES.format(tools="\n".join(map(signature, case.tools)) or "(none)")
    if calling.protocol == "few_shot":
        prompt += _EXAMPLES
    else:
        schema = {"name": "calls", "schema": answer_schema(case.tools)}
        body["response_format"] = {"type": "json_schema", "json_schema": schema}
    return _as_text(case.messages, prompt), body


def _sampled(sampling: Sampling) -> dict[str, Any]:
    body: dict[str, Any] = {"temperature": sampling.temperature, "seed": sampling.seed}
    if sampling.top_p is not None:
        body["top_p"] = sampling.top_p
    if sampling.top_k is not None:
        body["top_k"] = sampling.top_k
    return body | {"max_tokens": sampling.max_tokens} | sampling.extra


def answer_schema(tools: Sequence[Tool]) -> dict[str, Any]:
    """The JSON Schema of an answer: calls of these tools, none of them perhaps, and a text."""
    shared: dict[str, Any] = {}
    kinds = [_call_schema(tool, shared) for tool in tools]
    calls: dict[str, Any] = {"type": "array", "items": kinds[0] if len(kinds) == 1 else {"anyOf": kinds}}
    if not kinds:
        calls = {"type": "array", "items": {"type": "object"}, "maxItems": 0}
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {"calls": calls, "answer": {"type": "string"}},
        "required": ["calls"],
        "additionalProperties": False,
    }
    return schema | ({"$defs": shared} if shared else {})


def _call_schema(tool: Tool, shared: dict[str, Any]) -> dict[str, Any]:
    parameters: dict[str, Any] = tool.parameters or {"type": "object"}
    if "$ref" in json.dumps(parameters):
        # References inside of it are by their place in the whole document.
        shared[tool.name] = _moved(parameters, f"#/$defs/{tool.name}")
        parameters = {"$ref": f"#/$defs/{tool.name}"}
    return {
        "type": "object",
        "properties": {"name": {"type": "string", "enum": [tool.name]}, "arguments": parameters},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _moved(schema: Any, place: str) -> Any:
    if isinstance(schema, list):
        return [_moved(one, place) for one in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {key: _moved(one, place) for key, one in schema.items()}
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        moved["$ref"] = place + reference[1:]
    return moved


def signature(tool: Tool) -> str:
    """A tool as the prompt shows it: ``name(argument: type, argument?: type)`` and what it and its arguments do."""
    properties = tool.parameters.get("properties")
    fields: Mapping[str, Any] = properties if isinstance(properties, Mapping) else {}
    lines = [f"- {tool.name}({_fields(tool.parameters, 0)}): {tool.description}"]
    for name, schema in fields.items():
        described = schema.get("description") if isinstance(schema, Mapping) else None
        if isinstance(described, str) and described:
            lines.append(f"    {name}: {described}")
    return "\n".join(lines)


def _fields(schema: Mapping[str, Any], depth: int) -> str:
    properties = schema.get("properties")
    if not isinstance(properties, Mapping):
        return ""
    required = schema.get("required")
    needed = required if isinstance(required, list) else []
    return ", ".join(
        f"{name}{'' if name in needed else '?'}: {_type(one, depth + 1)}" for name, one in properties.items()
    )


def _type(schema: Any, depth: int) -> str:
    if not isinstance(schema, Mapping) or depth > 8:
        return "any"
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list) and values:
        return " | ".join(json.dumps(value, ensure_ascii=False) for value in values)
    for word in ("anyOf", "oneOf"):
        branches = schema.get(word)
        if isinstance(branches, list) and branches:
            return " | ".join(dict.fromkeys(_type(branch, depth + 1) for branch in branches))
    stated = schema.get("type", "any")
    if isinstance(stated, list):
        return " | ".join(map(str, stated))
    if stated == "object" and isinstance(schema.get("properties"), Mapping):
        return "{" + _fields(schema, depth) + "}"
    return f"array of {_type(schema.get('items'), depth + 1)}" if stated == "array" else str(stated)


def call_id(stated: object) -> str:
    """The id of a call as every chat template takes it: nine letters and digits, which Mistral's insist on.

    An id that is so is kept; of another one, always the same is made.
    """
    text = stated if isinstance(stated, str) else repr(stated)
    if re.fullmatch(r"[A-Za-z0-9]{9}", text):
        return text
    return hashlib.sha256(text.encode("utf-8", "backslashreplace")).hexdigest()[:9]


def named_calls(messages: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages with the ids of their calls, and of the results of these, as :func:`call_id` has them."""
    named: list[dict[str, Any]] = []
    for message in messages:
        one = dict(message)
        if isinstance(one.get("tool_calls"), list):
            one["tool_calls"] = [
                {**call, "id": call_id(call["id"])} if isinstance(call, Mapping) and "id" in call else call
                for call in one["tool_calls"]
            ]
        if one.get("role") == "tool" and "tool_call_id" in one:
            one["tool_call_id"] = call_id(one["tool_call_id"])
        named.append(one)
    return named


def _as_text(messages: Iterable[Mapping[str, Any]], prompt: str) -> list[dict[str, Any]]:
    """A conversation without tool calls: calls as the JSON that the prompt asks for, their results as user messages.

    Chat templates want one system message first, then turns of user and assistant by turns, the user's first:
    neighbours of one role are joined.
    """
    turns: list[dict[str, Any]] = []
    system = [prompt]
    names: dict[str, str] = {}
    for message in messages:
        role, text = message.get("role"), _content(message.get("content"))
        if role in ("system", "developer"):
            system.insert(len(system) - 1, text)
            continue
        if role == "assistant" and message.get("tool_calls"):
            text = _calls_as_text(message["tool_calls"], names, text)
        elif role == "tool":
            name = message.get("name") or names.get(str(message.get("tool_call_id")), "the tool")
            role, text = "user", f"Result of {name}:\n{text}"
        if not turns and role == "assistant":
            turns.append({"role": "user", "content": _BEGIN})
        join(turns, {"role": role, "content": text})
    return [{"role": "system", "content": "\n\n".join(part for part in system if part)}, *turns]


def join(turns: list[dict[str, Any]], message: Mapping[str, Any]) -> None:
    """Add a message of text to turns, to the last where that is of the same role."""
    if turns and turns[-1]["role"] == message["role"]:
        turns[-1] = {**turns[-1], "content": f"{turns[-1]['content']}\n\n{message['content']}"}
    else:
        turns.append(dict(message))


def _content(content: Any) -> str:
    if isinstance(content, list):
        parts = (part.get("text") for part in content if isinstance(part, Mapping))
        return "\n".join(part for part in parts if isinstance(part, str))
    return content if isinstance(content, str) else ""


def _calls_as_text(listed: Any, names: dict[str, str], text: str) -> str:
    calls: list[dict[str, Any]] = []
    for call in listed:
        function = call["function"]
        names[str(call.get("id"))] = function["name"]
        arguments = function.get("arguments") or "{}"
        calls.append(
            {"name": function["name"], "arguments": json.loads(arguments) if isinstance(arguments, str) else arguments}
        )
    whole: dict[str, Any] = {"calls": calls} | ({"answer": text} if text else {})
    return json.dumps(whole, ensure_ascii=False)
