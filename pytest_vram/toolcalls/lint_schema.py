"""What is wrong with the JSON Schema of a tool, and whether values keep it. Nothing is fetched for a reference."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import jsonschema
import referencing
import referencing.exceptions

TYPES = ("string", "number", "integer", "boolean", "array", "object", "null")
#: Names of types in programming languages that find their way into schemas.
_MEANT = {"int": "integer", "float": "number", "double": "number", "str": "string", "text": "string", "bool": "boolean",
          "dict": "object", "map": "object", "list": "array", "tuple": "array", "none": "null"}  # fmt: skip
_PAIRS = (("minimum", "maximum"), ("minLength", "maxLength"), ("minItems", "maxItems"))
#: Keys whose value is a schema, a list of schemas, and an object of schemas.
_ONE, _LIST, _NAMED = ("items", "additionalProperties", "not", "contains"), ("anyOf", "oneOf", "allOf"), ("$defs",)


class Flaw(NamedTuple):
    """One thing that is wrong. :ivar error: whether cases that use the schema cannot be trusted."""

    text: str
    error: bool = True


def flaws(parameters: dict[str, Any]) -> list[Flaw]:
    """All that is wrong with the schema of a tool's parameters."""
    found = form(parameters)
    if not any(flaw.error for flaw in found):
        found += [flaw for path, one in _schemas(parameters, "parameters") for flaw in _values(one, path, parameters)]
    return found


def form(parameters: dict[str, Any]) -> list[Flaw]:
    """What keeps it from being a schema: without an error here values can be held against it."""
    found: list[Flaw] = []
    if parameters.get("type") in (*TYPES, None) and parameters.get("type") != "object":
        found.append(Flaw(f"parameters have type {parameters.get('type')!r}: a tool takes an object"))
    try:
        found += [flaw for path, schema in _schemas(parameters, "parameters") for flaw in _form(schema, path)]
        if not any(flaw.error for flaw in found):  # what jsonschema can read, and says in fewer words
            found += _against_metaschema(parameters)
    except RecursionError:  # of tools that were made by a program: files are not read so deep
        found.append(Flaw("the schema is nested too deeply to be checked"))
    return found


def broken(value: Any, schema: Any, whole: dict[str, Any]) -> str | None:
    """Why a value breaks a schema inside of a whole one that has no flaws; ``None`` where it keeps it."""
    validator = jsonschema.Draft202012Validator(whole, registry=referencing.Registry())
    try:
        error = next(validator.evolve(schema=schema).iter_errors(value), None)
    except referencing.exceptions.Unresolvable as missing:
        reference = missing.ref if ":" in missing.ref else f"#{missing.ref.lstrip('#')}"
        return f"its schema refers to {reference!r}, which is not in it"
    except RecursionError:
        return "its schema refers to itself without an end"
    return None if error is None else error.message


def _against_metaschema(parameters: dict[str, Any]) -> Iterator[Flaw]:
    metaschema = jsonschema.Draft202012Validator(jsonschema.Draft202012Validator.META_SCHEMA)
    for error in metaschema.iter_errors(parameters):
        path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in error.absolute_path)
        yield Flaw(f"parameters{path}: {error.message}")


def _schemas(schema: Any, path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """(path, schema) of a schema and of all in it."""
    if not isinstance(schema, dict):
        return
    yield path, schema
    for key in _ONE:
        yield from _schemas(schema.get(key), f"{path}.{key}")
    for key in _LIST:
        if isinstance(schema.get(key), list):
            for position, one in enumerate(schema[key]):
                yield from _schemas(one, f"{path}.{key}[{position}]")
    for key in ("properties", *_NAMED):
        if isinstance(schema.get(key), dict):
            for name, one in schema[key].items():
                yield from _schemas(one, f"{path}.{name}" if key == "properties" else f"{path}.{key}.{name}")


def _form(schema: dict[str, Any], path: str) -> Iterator[Flaw]:
    """What people get wrong in a schema, said in more words than the metaschema has."""
    for name in schema["type"] if isinstance(schema.get("type"), list) else [schema.get("type", "string")]:
        if name not in TYPES:
            near = difflib.get_close_matches(str(name), TYPES, n=1, cutoff=0.6)
            meant = _MEANT.get(str(name).lower()) or (near[0] if near else None)
            yield Flaw(f"{path}: type {name!r} is unknown" + (f": did you mean {meant!r}?" if meant else ""))
    reference = schema.get("$ref")
    if reference is not None and not str(reference).startswith("#"):
        yield Flaw(f"{path}: $ref {reference!r} leads out of the schema: models cannot follow it")
    yield from _required(schema, path)
    for low, high in _PAIRS:
        bounds = schema.get(low), schema.get(high)
        if all(isinstance(bound, int | float) for bound in bounds) and bounds[0] > bounds[1]:  # type: ignore[operator]
            yield Flaw(f"{path}: {low} {bounds[0]} is above {high} {bounds[1]}")
    if isinstance(schema.get("pattern"), str):
        try:
            re.compile(schema["pattern"])
        except re.error as error:
            yield Flaw(f"{path}: pattern {schema['pattern']!r} is no regular expression: {error}")
    if schema.get("type") == "array" and "items" not in schema and "prefixItems" not in schema:
        yield Flaw(f"{path}: an array without items: models cannot know what belongs in it", error=False)


def _values(schema: dict[str, Any], path: str, whole: dict[str, Any]) -> Iterator[Flaw]:
    """Values in a schema that the rest of it refuses."""
    rest = {key: value for key, value in schema.items() if key not in ("enum", "default")}
    for value in schema.get("enum", ()):
        why = broken(value, rest, whole)
        if why is not None:
            yield Flaw(f"{path}: enum has a value that the rest of the schema refuses: {why}")
    if schema.get("default") is not None:
        why = broken(schema["default"], schema, whole)
        if why is not None:
            yield Flaw(f"{path}: the default is refused by the schema: {why}")


def _required(schema: dict[str, Any], path: str) -> Iterator[Flaw]:
    required, properties = schema.get("required", []), schema.get("properties", {})
    if not isinstance(required, list):
        yield Flaw(f"{path}.required is no list of names")
        return
    for name in required:
        if isinstance(properties, dict) and name not in properties:
            near = difflib.get_close_matches(str(name), properties, n=1, cutoff=0.6)
            meant = f": did you mean {near[0]!r}?" if near else ""
            yield Flaw(f"{path}: required names {name!r}, which is none of its properties{meant}")
