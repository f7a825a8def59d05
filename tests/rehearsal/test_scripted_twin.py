"""The scripted backend beside a real llama-server: the same requests are answered with messages of the same shape."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from pytest_vram.backends import store
from pytest_vram.testing import scripted_backend
from pytest_vram.testing.scripted import Fault, Script

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(store.find_model() is None, reason="the demo model is not in the cache: run `vram demo` once"),
]

Twins = tuple[httpx.Client, httpx.Client]
#: Calls as Hermes' templates have them. Results of tools are left out: this small model would repeat those instead.
TEMPLATE = """\
{%- if tools %}{{- '<|im_start|>system\\n# Tools\\n<tools>' }}
{%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
{{- '\\n</tools>\\nAnswer with <tool_call>\\n{"name": <function-name>, "arguments": <args-json-object>}\\n</tool_call>' }}
{{- '<|im_end|>\\n' }}{%- endif %}
{%- for message in messages %}{%- if message.role != 'tool' %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.content %}{{- message.content }}{%- endif %}
{%- if message.tool_calls %}{%- for call in message.tool_calls %}
{%- if call.function %}{%- set call = call.function %}{%- endif %}
{{- '<tool_call>\\n{"name": "' + call.name + '", "arguments": ' }}{{- call.arguments | tojson }}
{{- '}\\n</tool_call>' }}{%- endfor %}{%- endif %}
{{- '<|im_end|>\\n' }}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
#: What is llama.cpp's own and no other server has.
LEFT_OUT = frozenset({"timings"})
TOOL = {
    "type": "function",
    "function": {
        "name": "weather_now",
        "description": "The weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def turn(city: str, arguments: str | None = None) -> list[dict[str, Any]]:
    """A question with the call that answered it."""
    function = {"name": "weather_now", "arguments": arguments or json.dumps({"city": city})}
    call = {"id": f"call_{city}", "type": "function", "function": function}
    return [
        {"role": "user", "content": f"Weather in {city}?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": f"call_{city}", "content": "sunny"},
    ]


BEFORE = [message for city in ("Paris", "Oslo", "Madrid") for message in turn(city)]
QUESTION = {"role": "user", "content": "Weather in Rome?"}
WITH_CALL = {"messages": [*BEFORE, QUESTION], "tools": [TOOL], "temperature": 0, "max_tokens": 60}
IN_WORDS = {"messages": [{"role": "user", "content": "Say something short"}], "temperature": 0, "max_tokens": 5}
BAD_HISTORY = {**WITH_CALL, "messages": [*turn("Paris", '{"city": '), QUESTION]}
CASE = {
    "id": "weather",
    "family": "weather",
    "category": "multi_turn",
    "messages": WITH_CALL["messages"],
    "tools": ["weather_now"],
    "expect": [{"name": "weather_now", "arguments": {"city": ["Rome"]}}],
}


@pytest.fixture
def twins(rehearse: Callable[..., Any], spec: Callable[..., Any], tmp_path: Path) -> Iterator[Twins]:
    """Clients of a real and of a scripted server."""
    (tmp_path / "hermes.jinja").write_text(TEMPLATE)
    options = {
        "ctx-size": 1024,
        "threads": 1,
        "parallel": 1,
        "cache-ram": 0,
        "chat-template-file": str(tmp_path / "hermes.jinja"),
    }
    run = rehearse(spec(store.DEMO_MODEL, options=options))
    backend = run.pool.acquire(run.pool.spec())
    # A kept connection that the server has just closed would look like a dead one.
    once: dict[str, Any] = {"trust_env": False, "timeout": 60.0, "limits": httpx.Limits(max_keepalive_connections=0)}
    key = {"Authorization": f"Bearer {backend.api_key}"}
    function = TOOL["function"]
    assert isinstance(function, dict)
    described = {key: function[key] for key in ("description", "parameters")}
    (tmp_path / "tools.json").write_text(json.dumps({"tools": {"weather_now": described}}))
    (tmp_path / "cases.jsonl").write_text(json.dumps(CASE) + "\n")
    # Requests 4 and 5, counted from 0: whole and streamed, after the four good ones.
    script = Script(faults=[Fault(kind="http_500_history", requests=[4, 5])])
    with (
        scripted_backend(script, str(tmp_path / "cases.jsonl")) as scripted,
        httpx.Client(base_url=backend.url.removesuffix("/v1"), headers=key, **once) as real,
        httpx.Client(base_url=scripted.url, **once) as played,
    ):
        yield real, played


def shape(value: Any) -> Any:
    """Keys and types; of a list, the shapes that its members have."""
    if isinstance(value, dict):
        return {key: shape(one) for key, one in sorted(value.items()) if key not in LEFT_OUT}
    if isinstance(value, list):
        return sorted({json.dumps(shape(one)) for one in value})
    return {bool: "bool", int: "number", float: "number", str: "text"}.get(type(value), "null")


def asked(client: httpx.Client, path: str, body: dict[str, Any] | None) -> tuple[int, str, list[Any]]:
    """Status, type and the shapes of what was answered: of a stream, of its pieces without repetition."""
    answer = client.post(path, json=body) if body is not None else client.get(path)
    kind = answer.headers["content-type"].partition(";")[0]
    if kind != "text/event-stream":
        return answer.status_code, kind, [shape(answer.json())]
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    assert lines.pop() == "[DONE]"
    shapes = [json.dumps(shape(json.loads(line))) for line in lines]
    return answer.status_code, kind, [json.loads(one) for one in dict.fromkeys(shapes)]


def test_the_scripted_backend_answers_in_the_shape_of_a_real_one(twins: Twins) -> None:
    """Answers, pieces of streams and errors have the keys, types, statuses and order that llama-server gives them."""
    usage = {"stream": True, "stream_options": {"include_usage": True}}
    requests: list[tuple[str, dict[str, Any] | None]] = [
        ("/v1/chat/completions", WITH_CALL),
        ("/v1/chat/completions", {**WITH_CALL, **usage}),
        ("/v1/chat/completions", IN_WORDS),
        ("/v1/chat/completions", {**IN_WORDS, "stream": True}),
        ("/v1/chat/completions", BAD_HISTORY),
        ("/v1/chat/completions", {**BAD_HISTORY, "stream": True}),
        ("/v1/completions", {"prompt": "once", "max_tokens": 3}),
        ("/v1/completions", {"prompt": "once", "max_tokens": 3, **usage}),
        ("/v1/chat/completions", {"messages": 5}),
        ("/v1/nothing", {}),
        ("/tokenize", {"content": "hello world"}),
        ("/health", None),
    ]
    real, scripted = twins
    for path, body in requests:
        assert asked(scripted, path, body) == asked(real, path, body), (path, body)
    _list_their_models_alike(twins)
    _make_the_same_call(twins)


def _list_their_models_alike(twins: Twins) -> None:
    """What the scripted backend says of its model has the keys that a client reads of a real one."""
    real, scripted = (client.get("/v1/models").json() for client in twins)
    assert real["object"] == scripted["object"] == "list"
    assert scripted["data"][0].keys() <= real["data"][0].keys()


def _make_the_same_call(twins: Twins) -> None:
    """The call of both is the one that the case expects, in the same words."""
    for client in twins:
        choice = client.post("/v1/chat/completions", json=WITH_CALL).json()["choices"][0]
        assert choice["finish_reason"] == "tool_calls"
        calls = [call["function"] for call in choice["message"]["tool_calls"]]
        assert calls == [{"name": "weather_now", "arguments": '{"city": "Rome"}'}]
