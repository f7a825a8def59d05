"""Calls that are right for a case, and the same calls with something wrong in what they say."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import Any

from pytest_vram.toolcalls.cases import Case, ExpectedCall, Tool

#: A call as data: ``name`` and ``arguments``.
Call = dict[str, Any]

_INVENTED = ("perform_requested_action", "universal_lookup", "quickly_solve_everything", "zx_helper")
_STRANGE_FIELDS = ("zz_debug_level", "quietly", "xtrace_options", "woof")


def right_calls(case: Case, chance: random.Random) -> list[Call]:
    """The expected calls: of each argument one of the values that are right, of those that may be omitted some."""
    return [_right_call(one, chance) for one in case.expect]


def _right_call(expected: ExpectedCall, chance: random.Random) -> Call:
    arguments = {}
    for name, allowed in expected.arguments.items():
        omitted = name in expected.omittable and chance.random() < 0.5
        if allowed and not omitted:
            arguments[name] = deepcopy(chance.choice(allowed))
    return {"name": expected.name, "arguments": arguments}


class Site:
    """One call of an answer, where something is to go wrong."""

    def __init__(self, case: Case, call: Call, expected: ExpectedCall, chance: random.Random) -> None:
        self.case = case
        self.call = call
        self.expected = expected
        self.chance = chance
        self.tool = next((tool for tool in case.tools if tool.name == expected.name), None)
        schema: Mapping[str, Any] = self.tool.parameters if self.tool is not None else {}
        properties = schema.get("properties")
        self.properties: Mapping[str, Any] = properties if isinstance(properties, Mapping) else {}
        required = schema.get("required")
        self.required: Sequence[str] = required if isinstance(required, list) else []

    def shuffled(self, names: Sequence[str]) -> list[str]:
        """The names in an order of chance."""
        return self.chance.sample(list(names), len(names))

    def with_arguments(self, arguments: Mapping[str, Any]) -> Call:
        """The call with other arguments."""
        return {"name": self.call["name"], "arguments": dict(arguments)}


def wrong_value(site: Site) -> Call | None:
    """An argument of the right type with a value that is not right."""
    arguments = site.call["arguments"]
    for name in site.shuffled(list(arguments)):
        allowed = site.expected.arguments.get(name, [])
        listed = _schema_of(site, name).get("enum")
        values = listed if isinstance(listed, list) else list(_others(arguments[name]))
        same = {_key(one) for one in allowed}
        others = [value for value in values if _key(value) not in same]
        if others:
            return site.with_arguments({**arguments, name: deepcopy(site.chance.choice(others))})
    return None


def _others(value: Any) -> list[Any]:
    """Values of the same type that mean something else."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 17, value + 101]
    if isinstance(value, float):
        return [value + 17.5, value * 10 + 1]
    if isinstance(value, str):
        return [f"unrelated {value}", f"{value} elsewhere"]
    if isinstance(value, list):
        return [[*value, value[-1]]] if value else []
    if isinstance(value, dict):
        return [
            {**value, name: other}
            for name, inner in value.items()
            for other in ([not inner] if isinstance(inner, bool) else [])
            + ([inner + 17] if isinstance(inner, int) and not isinstance(inner, bool) else [])
        ]
    return []


def _key(value: Any) -> str:
    return json.dumps(value, sort_keys=True).casefold()


def _schema_of(site: Site, name: str) -> Mapping[str, Any]:
    schema = site.properties.get(name)
    return schema if isinstance(schema, Mapping) else {}


def wrong_type(site: Site) -> Call | None:
    """An argument of another type than the schema's: often the value as text, or text where a list belongs."""
    arguments = site.call["arguments"]
    for name in site.shuffled(list(arguments)):
        schema = _schema_of(site, name)
        kind = schema.get("type")
        value = arguments[name]
        if kind in ("integer", "number", "boolean"):
            return site.with_arguments({**arguments, name: json.dumps(value)})
        if kind == "string":
            return site.with_arguments({**arguments, name: [value]})
        if kind in ("array", "object"):
            return site.with_arguments({**arguments, name: json.dumps(value)})
    return None


def missing_field(site: Site) -> Call | None:
    """A required argument is left out."""
    arguments = site.call["arguments"]
    for name in site.shuffled(list(arguments)):
        if name in site.required and name not in site.expected.omittable:
            return site.with_arguments({key: value for key, value in arguments.items() if key != name})
    return None


def extra_field(site: Site) -> Call | None:
    """An argument that the tool does not have."""
    name = site.chance.choice(_STRANGE_FIELDS)
    if name in site.properties:
        return None
    return site.with_arguments({**site.call["arguments"], name: True})


def misspelt_field(site: Site) -> Call | None:
    """An argument's name is off by one letter."""
    arguments = site.call["arguments"]
    for name in site.shuffled(list(arguments)):
        changed = _misspelt(name, site.chance)
        if changed is not None and changed not in site.properties:
            return site.with_arguments({changed if key == name else key: one for key, one in arguments.items()})
    return None


def near_miss_tool(site: Site) -> Call | None:
    """The tool's name is off by one letter."""
    changed = _misspelt(site.call["name"], site.chance)
    if changed is None or any(tool.name == changed for tool in site.case.tools):
        return None
    return {"name": changed, "arguments": site.call["arguments"]}


def _misspelt(name: str, chance: random.Random) -> str | None:
    """The name with a letter doubled or left out; of a short one too little would be left."""
    if len(name) < 3:
        return None
    at = chance.randrange(1, len(name) - 1)
    doubled = len(name) < 6 or chance.random() < 0.5
    return name[:at] + name[at] + name[at:] if doubled else name[:at] + name[at + 1 :]


def invented_tool(site: Site) -> Call | None:
    """A tool that there is not."""
    names = {tool.name for tool in site.case.tools}
    free = [name for name in _INVENTED if name not in names]
    return {"name": site.chance.choice(free), "arguments": site.call["arguments"]} if free else None


#: Kind → what makes one call wrong in this way; ``None`` where it has no room for it.
WRONG: dict[str, Callable[[Site], Call | None]] = {
    "wrong_value": wrong_value,
    "wrong_type": wrong_type,
    "missing_field": missing_field,
    "extra_field": extra_field,
    "misspelt_field": misspelt_field,
    "near_miss_tool": near_miss_tool,
    "invented_tool": invented_tool,
}


def any_call(tool: Tool, chance: random.Random) -> Call:
    """Some call of a tool that its schema allows, for an answer where no call is right."""
    schema = tool.parameters
    properties = schema.get("properties") or {}
    return {
        "name": tool.name,
        "arguments": {name: _some(properties.get(name, {}), chance, 0) for name in schema.get("required") or ()},
    }


def _some(schema: Any, chance: random.Random, depth: int) -> Any:
    if not isinstance(schema, Mapping) or depth > 8:
        return "something"
    if isinstance(schema.get("enum"), list) and schema["enum"]:
        return deepcopy(chance.choice(schema["enum"]))
    kind = schema.get("type")
    if isinstance(kind, list):
        kind = next((one for one in kind if one != "null"), None)
    if kind in ("integer", "number"):
        least = schema.get("minimum")
        return least if isinstance(least, int) else 5
    if kind == "boolean":
        return True
    if kind == "array":
        fewest = schema.get("minItems")
        items = schema.get("items", {})
        return [_some(items, chance, depth + 1) for _ in range(fewest if isinstance(fewest, int) else 1)]
    if kind == "object":
        properties = schema.get("properties") or {}
        return {name: _some(properties.get(name), chance, depth + 1) for name in schema.get("required") or ()}
    return "something"
