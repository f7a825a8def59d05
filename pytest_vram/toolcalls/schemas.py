"""What is wrong with the arguments of a call by its tool's JSON Schema alone.

Types are exact: a boolean is no integer, ``"5"`` is no number, ``3.0`` is no integer (JSON Schema would take it, a
consumer that reads 64-bit integers does not); an integer is a number. An argument that a tool with ``properties`` does
not have is wrong unless ``additionalProperties`` allows it. Types of other languages in a schema (``int``, ``dict`` …)
are read as what they mean. ``format`` is not judged; ``pattern`` is where its matching cannot take exponential time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from pytest_vram.text import printable
from pytest_vram.toolcalls.names import pairs
from pytest_vram.toolcalls.patterns import found as is_found
from pytest_vram.toolcalls.values import kind_of, same, shown, with_kind

#: Types that are no JSON Schema → what they mean; "" is any type.
TYPES = {
    "int": "integer", "integer": "integer", "long": "integer", "float": "number", "double": "number",
    "number": "number", "str": "string", "string": "string", "text": "string", "bool": "boolean",
    "boolean": "boolean", "dict": "object", "object": "object", "map": "object", "list": "array", "array": "array",
    "tuple": "array", "set": "array", "null": "null", "none": "null", "any": "",
}  # fmt: skip
_DEEPEST = 64
#: Values and branches that are looked at in one call, and flaws that are told.
_STEPS, _MOST = 50_000, 100


class Flaw(NamedTuple):
    """One thing that is wrong with arguments. :ivar path: such as ``filter.level``; "" is the arguments as such."""

    kind: str
    path: str
    detail: str


def inspect(arguments: Any, parameters: Any) -> tuple[list[Flaw], dict[str, str]]:
    """Flaws of arguments, and which of their fields are misspelt: name as written → name as meant."""
    judge = _Judge(parameters)
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, Mapping):
        return [Flaw("wrong_type", "", f"the arguments are {kind_of(arguments)}, not an object")], {}
    return judge.all(arguments), judge.renamed


def default_of(parameters: Any, field: str) -> tuple[Any] | None:
    """The default of a parameter, in a tuple; ``None`` where it has none."""
    properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
    schema = properties.get(field) if isinstance(properties, Mapping) else None
    return (schema["default"],) if isinstance(schema, Mapping) and "default" in schema else None


class _Judge:
    def __init__(self, root: Any) -> None:
        self.root = root
        self.renamed: dict[str, str] = {}
        self._steps = _STEPS

    def all(self, arguments: Mapping[str, Any]) -> list[Flaw]:
        schema = self._resolved(self.root)
        # Arguments are an object whatever the schema of the tool says of its type.
        return self._of({key: one for key, one in schema.items() if key != "type"}, arguments, "", 0)[:_MOST]

    def _of(self, schema: Any, value: Any, path: str, depth: int) -> list[Flaw]:
        self._steps -= 1
        schema = self._resolved(schema)
        if not schema or depth > _DEEPEST or self._steps < 0:
            return []
        wrong = self._type(schema, value, path)
        if wrong is not None:
            return [wrong]
        flaws = self._values(schema, value, path)
        if isinstance(value, Mapping):
            flaws += self._object(schema, value, path, depth)
        elif isinstance(value, list | tuple):
            flaws += self._array(schema, value, path, depth)
        return flaws + self._combined(schema, value, path, depth)

    def _resolved(self, schema: Any) -> Mapping[str, Any]:
        """The schema itself, local references followed; what is no schema judges nothing."""
        for _ in range(16):
            reference = schema.get("$ref") if isinstance(schema, Mapping) else None
            if not isinstance(reference, str) or not reference.startswith("#"):
                break
            found: Any = self.root
            for part in reference[1:].split("/")[1:]:
                found = found.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
            schema = found
        return schema if isinstance(schema, Mapping) else {}

    @staticmethod
    def _type(schema: Mapping[str, Any], value: Any, path: str) -> Flaw | None:
        stated = schema.get("type")
        listed = stated if isinstance(stated, list) else [stated]
        wanted = [TYPES.get(one.lower(), "") if isinstance(one, str) else "" for one in listed]
        if schema.get("nullable") is True:
            wanted.append("null")
        if "" in wanted or any(_is(value, one) for one in wanted):
            return None
        names = " or ".join(_ARTICLES[one] for one in wanted)
        return Flaw("wrong_type", path, f"{path or 'the value'} is {with_kind(value)}, not {names}")

    @staticmethod
    def _values(schema: Mapping[str, Any], value: Any, path: str) -> list[Flaw]:
        name = path or "the value"
        values = schema.get("enum")
        if "const" in schema:
            values = [schema["const"]]
        if isinstance(values, list) and values and not any(_literally(value, one) for one in values):
            listed = ", ".join(shown(one) for one in values[:8]) + (", …" if len(values) > 8 else "")
            return [Flaw("wrong_value", path, f"{name} is {shown(value)}, which is none of {listed}")]
        limit = _limit(schema, value)
        return [Flaw("wrong_value", path, f"{name} is {shown(value)}, {limit}")] if limit else []

    def _object(self, schema: Mapping[str, Any], value: Mapping[str, Any], path: str, depth: int) -> list[Flaw]:
        properties = schema.get("properties")
        known: Mapping[str, Any] = properties if isinstance(properties, Mapping) else {}
        required = schema.get("required")
        needed = [name for name in required if isinstance(name, str)] if isinstance(required, list) else []
        additional = schema.get("additionalProperties", not isinstance(properties, Mapping))
        unknown = [key for key in value if key not in known and not _by_pattern(schema, key)]
        missing = [name for name in needed if name not in value]
        # What a tool requires is looked for first: a slip of a required name is more likely than one of another.
        absent = missing + [name for name in known if name not in value and name not in missing]
        renamed = pairs(unknown, absent)
        if additional is True or isinstance(additional, Mapping):
            renamed = {key: meant for key, meant in renamed.items() if meant in missing}
        if not path:
            self.renamed = renamed
        flaws = [
            Flaw("misspelt_field", _at(path, meant), f"{_at(path, key)} is misspelt: the field is called {meant!r}")
            for key, meant in renamed.items()
        ]
        flaws += [
            Flaw("missing_field", _at(path, name), f"{_at(path, name)} is missing, which is required")
            for name in missing
            if name not in renamed.values()
        ]
        for key in unknown:
            if key in renamed:
                continue
            if isinstance(additional, Mapping):
                flaws += self._of(additional, value[key], _at(path, key), depth + 1)
            elif not additional:
                flaws.append(Flaw("extra_field", _at(path, key), f"{_at(path, key)} is no field of it"))
            if len(flaws) > _MOST:
                return flaws
        for key, one in value.items():
            name = renamed.get(key, key)
            if name in known:
                flaws += self._of(known[name], one, _at(path, name), depth + 1)
        return flaws

    def _array(self, schema: Mapping[str, Any], value: Sequence[Any], path: str, depth: int) -> list[Flaw]:
        items = schema.get("items")
        first = schema.get("prefixItems", items if isinstance(items, list) else [])
        first = first if isinstance(first, list) else []
        flaws: list[Flaw] = []
        for index, one in enumerate(value):
            inner = first[index] if index < len(first) else items
            flaws += self._of(inner, one, f"{path}[{index}]", depth + 1)
            if len(flaws) > _MOST or self._steps < 0 or not isinstance(inner, Mapping):
                break
        return flaws

    def _combined(self, schema: Mapping[str, Any], value: Any, path: str, depth: int) -> list[Flaw]:
        flaws: list[Flaw] = []
        together = schema.get("allOf")
        for part in together if isinstance(together, list) else []:
            flaws += self._of(part, value, path, depth + 1)
        for word in ("anyOf", "oneOf"):
            branches = schema.get(word)
            if isinstance(branches, list) and branches:
                flaws += self._nearest(branches, value, path, depth)
        return flaws

    def _nearest(self, branches: Sequence[Any], value: Any, path: str, depth: int) -> list[Flaw]:
        """The flaws by the branch that was most likely meant: none, else one whose type is right, else all types."""
        kept: list[list[Flaw]] = []
        for branch in branches:
            found = self._of(branch, value, path, depth + 1)
            if not found:
                return []
            kept.append(found)
        inside = [found for found in kept if not (found[0].kind == "wrong_type" and found[0].path == path)]
        if inside:
            return min(inside, key=len)
        name = path or "the value"
        return [Flaw("wrong_type", path, f"{name} is {with_kind(value)}, which fits none of its types")]


_ARTICLES = {
    "integer": "an integer", "number": "a number", "string": "a string", "boolean": "a boolean",
    "object": "an object", "array": "an array", "null": "null",
}  # fmt: skip


def _at(path: str, key: object) -> str:
    name = printable(str(key)[:80])
    return f"{path}.{name}" if path else name


def _is(value: object, wanted: str) -> bool:
    if wanted == "number":
        return isinstance(value, int | float) and not isinstance(value, bool)
    if wanted == "integer":
        return isinstance(value, int) and not isinstance(value, bool)
    if wanted == "array":
        return isinstance(value, list | tuple)
    plain = {"string": str, "boolean": bool, "object": Mapping, "null": type(None)}
    return isinstance(value, plain[wanted])


def _literally(value: Any, right: Any) -> bool:
    """Values of an ``enum`` are compared to the letter."""
    return same(value, right, exact=True)


def _by_pattern(schema: Mapping[str, Any], key: object) -> bool:
    patterns = schema.get("patternProperties")
    return isinstance(patterns, Mapping) and any(_matches(pattern, str(key)) for pattern in patterns)


def _matches(pattern: object, text: str) -> bool:
    """Whether a pattern is in a text; true where that cannot be told in bounded time."""
    return not isinstance(pattern, str) or is_found(pattern, text) is not False


def _number(schema: Mapping[str, Any], key: str) -> int | float | None:
    value = schema.get(key)
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def _limit(schema: Mapping[str, Any], value: Any) -> str:
    """Which limit of the schema a value breaks, as a clause; "" for none."""
    if isinstance(value, str):
        if not _matches(schema.get("pattern", ""), value):
            return f"which does not match {shown(schema['pattern'])}"
        return _size(schema, len(value), "Length", "characters")
    if isinstance(value, list | tuple):
        return _size(schema, len(value), "Items", "values")
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return ""
    least, most = _number(schema, "minimum"), _number(schema, "maximum")
    above, below = _number(schema, "exclusiveMinimum"), _number(schema, "exclusiveMaximum")
    if least is not None and value < least:
        return f"which is below the least value, {shown(least)}"
    if most is not None and value > most:
        return f"which is over the largest value, {shown(most)}"
    if above is not None and value <= above:
        return f"which is not above {shown(above)}"
    if below is not None and value >= below:
        return f"which is not below {shown(below)}"
    step = schema.get("multipleOf")
    if isinstance(step, int) and isinstance(value, int) and step > 0 and value % step:
        return f"which is no multiple of {shown(step)}"
    return ""


def _size(schema: Mapping[str, Any], size: int, word: str, unit: str) -> str:
    least, most = _number(schema, f"min{word}"), _number(schema, f"max{word}")
    if least is not None and size < least:
        return f"which has {size} {unit}: it needs {shown(least)}"
    if most is not None and size > most:
        return f"which has {size} {unit}: {shown(most)} are allowed"
    return ""
