"""Which calls a JSON value is: the usual shape ``{"name", "arguments"}``, and the others that models write."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from pytest_vram.text import printable
from pytest_vram.toolcalls.cases import Tool
from pytest_vram.toolcalls.names import nearest
from pytest_vram.toolcalls.tolerant import Defect, parse

#: Keys for the name of a tool and for its arguments, the right one first.
_NAMES = ("name", "tool_name", "function_name", "tool", "function", "method", "action")
_ARGUMENTS = (
    "arguments", "parameters", "args", "params", "input", "tool_input", "action_input", "kwargs", "tool_args",
    "tool_arguments", "function_arguments",
)  # fmt: skip
_LISTS = ("calls", "tool_calls", "function_calls")
#: Keys that may stand beside name and arguments.
_BESIDE = frozenset({"id", "type", "tool_call_id", "jsonrpc", "index", "thought", "reasoning"})
#: A string of arguments is looked into up to this length.
_LONGEST_INNER = 1_000_000


class Shape(NamedTuple):
    """A call in a JSON value. :ivar defects: of its shape."""

    name: str | None
    arguments: Any
    defects: tuple[Defect, ...] = ()


def shapes(value: Any, tools: Mapping[str, Tool], *, native: bool = False) -> list[Shape] | None:
    """The calls that a value is; ``None``: it is none.

    :param native: the value stands in a wrapper of a chat template, where Llama's ``parameters`` is as good as
        ``arguments``.
    """
    if isinstance(value, Mapping):
        for key in _LISTS:
            inner = value.get(key)
            if isinstance(inner, list) and (inner or len(value) <= 2):
                return _listed(inner, tools, openai=key == "tool_calls", native=native) if inner else []
        one = _single(value, tools, openai=False, native=native)
        return [one] if one is not None else None
    if isinstance(value, list) and value:
        return _listed(value, tools, openai=False, native=native)
    return None


def _listed(values: list[Any], tools: Mapping[str, Tool], *, openai: bool, native: bool) -> list[Shape] | None:
    found: list[Shape] = []
    strangers: list[int] = []
    for index, value in enumerate(values, 1):
        one = _single(value, tools, openai=openai, native=native) if isinstance(value, Mapping) else None
        if one is None:
            strangers.append(index)
        else:
            found.append(one)
    if not found:
        return None
    if strangers:
        last = found[-1]
        defect = Defect("wrapper_mismatch", -1, f"element {strangers[0]} of the list of calls is not a call")
        found[-1] = last._replace(defects=(*last.defects, defect))
    return found


def _single(value: Mapping[str, Any], tools: Mapping[str, Tool], *, openai: bool, native: bool) -> Shape | None:
    nested = value.get("function")
    if isinstance(nested, Mapping) and isinstance(nested.get("name"), str):
        inner = _single(nested, tools, openai=True, native=native)
        if inner is None or openai:
            return inner
        detail = "the call is nested under 'function', where 'name' and 'arguments' belong to the object itself"
        return inner._replace(defects=(Defect("alias_key", -1, detail), *inner.defects))
    key = next((key for key in _NAMES if isinstance(value.get(key), str)), None)
    if key is None:
        return _keyed(value, tools)
    name: str = value[key]
    known = name in tools
    defects = []
    if key != "name":
        defects.append(Defect("alias_key", -1, f"the tool's name is under {key!r}, not under 'name'"))
    place = _place_of_arguments(value, key, known=known)
    if place is None:
        return _flat(value, key, name, tools, defects) if known else None
    if place != "arguments" and not (native and place == "parameters"):
        shown = printable(place[:60])
        defects.append(Defect("alias_key", -1, f"the arguments are under {shown!r}, not under 'arguments'"))
    arguments = value[place]
    if _is_definition(arguments, tools.get(name)):
        return None
    if isinstance(arguments, str):
        inner_value = encoded_object(arguments)
        if inner_value is not None:
            arguments = inner_value
            if not openai:
                detail = "the arguments are a string that holds JSON, where the object itself belongs"
                defects.append(Defect("double_encoded", -1, detail))
        elif not known:
            # {"action": "closed", "input": "none"}: words of something else than a call.
            return None
        elif openai and not arguments.strip():
            arguments = {}
    elif not isinstance(arguments, Mapping) and not known and (key != "name" or place != "arguments"):
        return None
    return Shape(name, arguments, tuple(defects))


def _place_of_arguments(value: Mapping[str, Any], name_key: str, *, known: bool) -> str | None:
    """The key of the arguments."""
    for key in _ARGUMENTS:
        if key in value and key != name_key:
            return key
    if not known:
        return None
    others = [key for key in value if key != name_key and key not in _BESIDE]
    if len(others) == 1 and isinstance(value[others[0]], Mapping) and nearest(others[0], _ARGUMENTS) is not None:
        return others[0]
    return None


def _flat(
    value: Mapping[str, Any], key: str, name: str, tools: Mapping[str, Tool], defects: list[Defect]
) -> Shape | None:
    """A call without a key for its arguments: they stand beside the name, or there are none."""
    arguments = {one: inner for one, inner in value.items() if one != key and one not in _BESIDE}
    if arguments:
        if not set(arguments) & set(_properties(tools[name])):
            return None
        defects.append(Defect("alias_key", -1, "the arguments stand beside the name, not under 'arguments'"))
    return Shape(name, arguments, tuple(defects))


def _keyed(value: Mapping[str, Any], tools: Mapping[str, Tool]) -> Shape | None:
    """``{"read_log": {"path": …}}``: the name of the tool is the key."""
    if len(value) != 1:
        return None
    ((name, arguments),) = value.items()
    if name not in tools or not isinstance(arguments, Mapping):
        return None
    detail = f"{printable(name[:60])!r} is the key of its arguments, where 'name' and 'arguments' belong"
    return Shape(name, arguments, (Defect("alias_key", -1, detail),))


def _is_definition(arguments: Any, tool: Tool | None) -> bool:
    """Whether these are the parameters of a definition of a tool that is being repeated, not arguments."""
    if not isinstance(arguments, Mapping) or not isinstance(arguments.get("properties"), Mapping):
        return False
    return arguments.get("type") == "object" and (tool is None or "properties" not in _properties(tool))


def _properties(tool: Tool) -> Mapping[str, Any]:
    properties = tool.parameters.get("properties")
    return properties if isinstance(properties, Mapping) else {}


def encoded_object(text: str) -> Any:
    """The object that a string holds as JSON, defective or not; ``None``: it holds none."""
    bare = text.strip()
    if not bare.startswith("{") or not bare.endswith("}") or len(bare) > _LONGEST_INNER:
        return None
    parsed = parse(bare)
    if parsed is None or not isinstance(parsed.value, dict) or parsed.end < len(bare):
        return None
    return parsed.value


def looks_like_arguments(value: Any, tool: Tool) -> bool:
    """Whether an object is the arguments of a tool: it shares a key with the tool's parameters, or both have none."""
    if not isinstance(value, Mapping):
        return False
    properties = _properties(tool)
    if not value:
        return not tool.parameters.get("required")
    return any(key in properties for key in value) or any(_near(value, properties))


def _near(value: Mapping[str, Any], properties: Mapping[str, Any]) -> Iterator[bool]:
    for key in list(value)[:50]:
        yield nearest(key, properties) is not None
