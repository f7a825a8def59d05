"""Calls written in every format that is read, as a model that was trained with it writes them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pytest_vram.toolcalls import Tool

Calls = Sequence[tuple[str, Mapping[str, Any]]]


def tool(name: str, required: Sequence[str] = (), /, **types: str) -> Tool:
    """A tool whose parameters have these types."""
    parameters = {
        "type": "object",
        "properties": {key: {"type": kind} for key, kind in types.items()},
        "required": list(required),
    }
    return Tool(name=name, description=f"Does {name}.", parameters=parameters)


def dumped(name: str, arguments: Mapping[str, Any], key: str = "arguments") -> str:
    """A call as JSON."""
    return json.dumps({"name": name, key: arguments}, ensure_ascii=False)


def _listed(calls: Calls) -> str:
    return "[" + ", ".join(dumped(*call) for call in calls) + "]"


def hermes(calls: Calls) -> str:
    return "\n".join(f"<tool_call>\n{dumped(*call)}\n</tool_call>" for call in calls)


def granite(calls: Calls) -> str:
    return "<|tool_call|>" + _listed(calls)


def mistral(calls: Calls) -> str:
    return "[TOOL_CALLS]" + _listed(calls) + "</s>"


def mistral_named(calls: Calls) -> str:
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{json.dumps(arguments)}" for name, arguments in calls)


def llama(calls: Calls) -> str:
    return "<|python_tag|>" + "; ".join(dumped(*call, "parameters") for call in calls) + "<|eom_id|>"


def llama_tag(calls: Calls) -> str:
    return "\n".join(f"<function={name}>{json.dumps(arguments)}</function>" for name, arguments in calls)


def _python(calls: Calls) -> str:
    written = (
        f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})" for name, arguments in calls
    )
    return "[" + ", ".join(written) + "]"


def llama4(calls: Calls) -> str:
    return f"<|python_start|>{_python(calls)}<|python_end|>"


def lfm2(calls: Calls) -> str:
    return f"<|tool_call_start|>{_python(calls)}<|tool_call_end|>"


def gemma3(calls: Calls) -> str:
    return "```tool_code\n" + "\n".join(_python([call])[1:-1] for call in calls) + "\n```"


def _gemma_value(value: Any) -> str:
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{_gemma_value(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_gemma_value, value)) + "]"
    return json.dumps(value)


def gemma(calls: Calls) -> str:
    return "".join(f"<|tool_call>call:{name}{_gemma_value(arguments)}<tool_call|>" for name, arguments in calls)


def function_gemma(calls: Calls) -> str:
    return "".join(
        f"<start_function_call>call:{name}{_gemma_value(arguments)}<end_function_call>" for name, arguments in calls
    ).replace('<|"|>', "<escape>")


def command(calls: Calls) -> str:
    listed = [
        {"tool_call_id": str(index), "tool_name": name, "parameters": arguments}
        for index, (name, arguments) in enumerate(calls)
    ]
    return f"<|START_ACTION|>{json.dumps(listed)}<|END_ACTION|>"


def deepseek(calls: Calls) -> str:
    inner = "".join(
        f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{json.dumps(arguments)}<｜tool▁call▁end｜>"
        for name, arguments in calls
    )
    return f"<｜tool▁calls▁begin｜>{inner}<｜tool▁calls▁end｜><｜end▁of▁sentence｜>"


def deepseek_fenced(calls: Calls) -> str:
    inner = "\n".join(
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{json.dumps(arguments)}\n```<｜tool▁call▁end｜>"
        for name, arguments in calls
    )
    return f"<｜tool▁calls▁begin｜>{inner}<｜tool▁calls▁end｜>"


def kimi(calls: Calls) -> str:
    inner = "".join(
        f"<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>{json.dumps(arguments)}<|tool_call_end|>"
        for index, (name, arguments) in enumerate(calls)
    )
    return f"<|tool_calls_section_begin|>{inner}<|tool_calls_section_end|>"


def harmony(calls: Calls) -> str:
    return "<|start|>assistant".join(
        f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{json.dumps(arguments)}<|call|>"
        for name, arguments in calls
    )


def functionary(calls: Calls) -> str:
    return "\n".join(f">>>{name}\n{json.dumps(arguments)}" for name, arguments in calls)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def qwen_coder(calls: Calls) -> str:
    return "\n".join(
        f"<tool_call>\n<function={name}>\n"
        + "".join(f"<parameter={key}>\n{_text(value)}\n</parameter>\n" for key, value in arguments.items())
        + "</function>\n</tool_call>"
        for name, arguments in calls
    )


def glm(calls: Calls) -> str:
    return "\n".join(
        f"<tool_call>{name}\n"
        + "".join(
            f"<arg_key>{key}</arg_key>\n<arg_value>{_text(value)}</arg_value>\n" for key, value in arguments.items()
        )
        + "</tool_call>"
        for name, arguments in calls
    )


def invoke(calls: Calls) -> str:
    inner = "\n".join(
        f'<invoke name="{name}">\n'
        + "".join(f'<parameter name="{key}">{_text(value)}</parameter>\n' for key, value in arguments.items())
        + "</invoke>"
        for name, arguments in calls
    )
    return f"<minimax:tool_call>\n{inner}\n</minimax:tool_call>"


def bare(calls: Calls) -> str:
    return "\n".join(dumped(*call) for call in calls)


def bare_list(calls: Calls) -> str:
    return _listed(calls)


def asked_for(calls: Calls) -> str:
    return json.dumps({"calls": [{"name": name, "arguments": arguments} for name, arguments in calls]})


def fenced(calls: Calls) -> str:
    return f"```json\n{_listed(calls)}\n```"


#: Wrappers of chat templates whose arguments are JSON, so that any text can be a value.
JSON_INSIDE: dict[str, Callable[[Calls], str]] = {
    one.__name__: one
    for one in (
        hermes, granite, mistral, mistral_named, llama, llama_tag, deepseek, deepseek_fenced, kimi, harmony, functionary,
        command,
    )
}  # fmt: skip
#: Wrappers with Python inside.
PYTHON_INSIDE: dict[str, Callable[[Calls], str]] = {one.__name__: one for one in (llama4, lfm2, gemma3)}
#: Wrappers that escape nothing, so that their own closers cannot be part of a value.
NOTHING_ESCAPED: dict[str, Callable[[Calls], str]] = {
    one.__name__: one for one in (gemma, function_gemma, qwen_coder, glm, invoke)
}
#: Without any wrapper.
UNWRAPPED: dict[str, Callable[[Calls], str]] = {one.__name__: one for one in (bare, bare_list, asked_for, fenced)}
EVERY = JSON_INSIDE | PYTHON_INSIDE | NOTHING_ESCAPED | UNWRAPPED
