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
#: What models write in place of them, capitals left out.
_NEAR_LISTS = frozenset({*_LISTS, "call", "tool_call", "function_call", "toolcalls", "functioncalls"})
#: Keys that a chat template writes in place of ``name`` and ``arguments``, by the form of its wrapper.
TEMPLATES = {"llama": frozenset({"parameters"}), "command": frozenset({"tool_name", "parameters"})}
#: Keys that may stand beside name and arguments.
_BESIDE = frozenset({"id", "type", "tool_call_id", "jsonrpc", "index", "thought", "reasoning"})
#: A string of arguments is looked into up to this length.
_LONGEST_INNER = 1_000_000


class Shape(NamedTuple):
    """A call in a JSON value. :ivar defects: of its shape."""

    name: str | None
    arguments: Any
    defects: tuple[Defect, ...] = ()


def shapes(
    value: Any, tools: Mapping[str, Tool], *, template: frozenset[str] = frozenset(), asked: bool = False
) -> list[Shape] | None:
    """The calls that a value is; ``None``: it is none.

    :param template: keys that are as good as ``name`` and ``arguments`` where the value stands: those of
        :data:`TEMPLATES`. :param asked: an object with ``calls`` was asked for, so that another key is an alias.
    """
    if isinstance(value, Mapping):
        for key in _LISTS:
            inner = value.get(key)
            if isinstance(inner, list) and (inner or len(value) <= 2 or asked):
                if not inner:
                    return None if asked and key != "calls" else []
                found = _listed(inner, tools, openai=key == "tool_calls", template=template)
                if found is None:
                    found = _nested(value, tools, template)
                elif asked and key != "calls":
                    found = _also(found, "alias_key", f"the calls are under {key!r}, not under 'calls'")
                return found
        one = _single(value, tools, openai=False, template=template)
        return [one] if one is not None else _nested(value, tools, template)
    if isinstance(value, list) and value:
        return _listed(value, tools, openai=False, template=template)
    return None


def _nested(value: Mapping[str, Any], tools: Mapping[str, Tool], template: frozenset[str]) -> list[Shape] | None:
    """Calls of offered tools under a key that is nearly ``calls``, or in something else than a list there."""
    for key in list(value)[:10]:
        if key.casefold() not in _NEAR_LISTS:
            continue
        inner = value[key]
        within = inner
        if isinstance(inner, list) and inner and all(isinstance(one, list) for one in inner):
            within = [one for many in inner for one in many]
        listed = within if isinstance(within, list) else [within]
        found = _listed(listed, tools, openai=key.casefold() != "calls", template=template) if listed else None
        if not found or not any(shape.name in tools for shape in found):
            continue
        if key not in _LISTS:
            found = _also(found, "alias_key", f"the calls are under {printable(key)!r}, not under 'calls'")
        if within is not inner:
            found = _also(found, "wrong_type", f"{printable(key)!r} is a list of lists, where a list of calls belongs")
        elif not isinstance(inner, list):
            found = _also(found, "wrong_type", f"{printable(key)!r} is an object, where a list of calls belongs")
        return found
    return None


def _also(found: list[Shape], kind: str, detail: str) -> list[Shape]:
    """Calls with a defect of what they stand in, told of the first."""
    first = found[0]
    return [first._replace(defects=(Defect(kind, -1, detail), *first.defects)), *found[1:]]


def _listed(
    values: list[Any], tools: Mapping[str, Tool], *, openai: bool, template: frozenset[str]
) -> list[Shape] | None:
    found: list[Shape] = []
    strangers: list[int] = []
    for index, value in enumerate(values, 1):
        one = _single(value, tools, openai=openai, template=template) if isinstance(value, Mapping) else None
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


def _single(
    value: Mapping[str, Any], tools: Mapping[str, Tool], *, openai: bool, template: frozenset[str]
) -> Shape | None:
    nested = value.get("function")
    if isinstance(nested, Mapping) and isinstance(nested.get("name"), str):
        inner = _single(nested, tools, openai=True, template=template)
        if inner is None or openai:
            return inner
        detail = "the call is nested under 'function', where 'name' and 'arguments' belong to the object itself"
        return inner._replace(defects=(Defect("alias_key", -1, detail), *inner.defects))
    key = next((key for key in _NAMES if isinstance(value.get(key), str)), None)
    if key is None:
        cased = (one for one in list(value)[:10] if one.casefold() in _NAMES and isinstance(value[one], str))
        key = next((one for one in cased if value[one] in tools), None)
    if key is None:
        unnamed = set(value) - _BESIDE == {"name", "arguments"}
        return Shape(None, value["arguments"]) if unnamed else _keyed(value, tools)
    name: str = value[key]
    known = name in tools
    defects = []
    if key != "name" and key not in template:
        defects.append(Defect("alias_key", -1, f"the tool's name is under {printable(key)!r}, not under 'name'"))
    place = _place_of_arguments(value, key, known=known)
    if place is None:
        return _flat(value, key, name, tools, defects) if known else None
    if place != "arguments" and place not in template:
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
    cased = [key for key in others[:20] if key.casefold() in _ARGUMENTS]
    if len(cased) == 1:
        return cased[0]
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
