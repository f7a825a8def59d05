"""What is wrong with the JSON Schema of a tool, and whether values keep it. Nothing is fetched for a reference."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from typing import Any, NamedTuple, TypeAlias

import jsonschema
import jsonschema.validators
import referencing
import referencing.exceptions

from pytest_vram.toolcalls import patterns
from pytest_vram.toolcalls.wanted import meant

TYPES = ("string", "number", "integer", "boolean", "array", "object", "null")
#: Names of types in programming languages that find their way into schemas.
_MEANT = {"int": "integer", "float": "number", "double": "number", "str": "string", "text": "string", "bool": "boolean",
          "dict": "object", "map": "object", "list": "array", "tuple": "array", "none": "null"}  # fmt: skip
_PAIRS = (("minimum", "maximum"), ("minLength", "maxLength"), ("minItems", "maxItems"))
#: Keys whose value is a schema, a list of schemas, and an object of schemas.
_ONE, _LIST, _NAMED = ("items", "additionalProperties", "not", "contains"), ("anyOf", "oneOf", "allOf"), ("$defs",)


_Check: TypeAlias = Callable[[Any, Any, Any, Any], Iterable[Any] | None]


class Flaw(NamedTuple):
    """One thing that is wrong. :ivar error: whether cases that use the schema cannot be trusted."""

    text: str
    error: bool = True


def flaws(parameters: dict[str, Any]) -> list[Flaw]:
    """All that is wrong with the schema of a tool's parameters."""
    found = form(parameters)
    if not any(flaw.error for flaw in found):
        checker = Checker(parameters)
        found += [flaw for path, one in _schemas(parameters, "parameters") for flaw in _values(one, path, checker)]
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


class _State:
    """Of one check: steps that are left, and the texts of long enumerations, which a file may ask for again and again.

    A list is kept beside its texts, so that its identity is not given to another one.
    """

    def __init__(self) -> None:
        self.steps = 0
        self.texts: dict[int, tuple[list[Any], frozenset[str]]] = {}

    def texts_of(self, listed: list[Any]) -> frozenset[str]:
        if id(listed) not in self.texts:
            self.texts[id(listed)] = listed, frozenset(map(_canonical, listed))
        return self.texts[id(listed)][1]


class Checker:
    """Holds values against parts of one schema that has no flaws, in bounded time.

    A schema can be small and unfold to a billion branches by its references; what it costs shows only with a value.
    """

    def __init__(self, whole: dict[str, Any]) -> None:
        self._whole = whole
        self._validator = _Bounded(whole, registry=referencing.Registry())
        self._state = _State()
        self._endless = False

    def refused(self, name: str, value: Any) -> str | None:
        """Why a value is none of an argument; ``None`` where it is one. :param name: one of the ``properties``."""
        return self.broken(value, self._whole["properties"][name])

    def broken(self, value: Any, schema: Any) -> str | None:
        """Why a value breaks a part of the schema; ``None`` where it keeps it."""
        if self._endless:
            return _ENDLESS
        self._state.steps = _MOST_STEPS
        state = _STATE.set(self._state)
        try:
            error = next(self._validator.evolve(schema=schema).iter_errors(value), None)
        except _TooManySteps:
            self._endless = True  # one value took its time: the others are not tried
            return _ENDLESS
        except referencing.exceptions.Unresolvable as missing:
            reference = missing.ref if ":" in missing.ref else f"#{missing.ref.lstrip('#')}"
            return f"its schema refers to {reference!r}, which is not in it"
        except RecursionError:
            return "its schema refers to itself without an end"
        except OverflowError:
            return "the number is too large to be checked"
        finally:
            _STATE.reset(state)
        return None if error is None else error.message


def broken(value: Any, schema: Any, whole: dict[str, Any]) -> str | None:
    """Why a value breaks a schema inside of a whole one that has no flaws; ``None`` where it keeps it."""
    return Checker(whole).broken(value, schema)


class _TooManySteps(Exception):
    """A value took more steps than :data:`_MOST_STEPS`."""


def _counted(check: _Check) -> _Check:
    """A keyword of a schema, as one step of those that a value may take."""

    def counting(validator: Any, keyword: Any, instance: Any, schema: Any) -> Iterator[Any]:
        state = _STATE.get()
        state.steps -= 1
        if state.steps < 0:
            raise _TooManySteps
        yield from check(validator, keyword, instance, schema) or ()

    return counting


def _type(validator: Any, keyword: Any, instance: Any, schema: Any) -> Iterator[Any]:
    types = [keyword] if isinstance(keyword, str) else keyword
    if not any(validator.is_type(instance, one) for one in types):
        yield jsonschema.ValidationError(f"{_written(instance)} is not of type {', '.join(map(repr, types))}")


def _written(value: Any) -> str:
    """A value as a JSON file has it where Python writes it in another way."""
    return json.dumps(value) if value is None or isinstance(value, bool) else repr(value)


def _enum(validator: Any, keyword: Any, instance: Any, schema: Any) -> Iterator[Any]:
    """A long list is searched for a value once, not item by item for each value."""
    if _canonical(instance) not in _STATE.get().texts_of(keyword):
        shown = repr(keyword) if len(keyword) <= 20 else f"{repr(keyword[:20])[:-1]}, …]"
        yield jsonschema.ValidationError(f"{_written(instance)} is not one of {shown}")


def _canonical(value: Any) -> str:
    """The same text for values that JSON Schema calls equal: 1 and 1.0 are, 1 and true are not."""
    return json.dumps(_whole_numbers(value), sort_keys=True)


def _whole_numbers(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_whole_numbers(one) for one in value]
    return {key: _whole_numbers(one) for key, one in value.items()} if isinstance(value, dict) else value


def _pattern(validator: Any, pattern: str, instance: Any, schema: Any) -> Iterator[Any]:
    if isinstance(instance, str) and patterns.found(pattern, instance) is False:
        yield jsonschema.ValidationError(f"{instance!r} does not match {pattern!r}")


def _pattern_properties(validator: Any, keyword: Any, instance: Any, schema: Any) -> Iterator[Any]:
    for pattern, part in keyword.items() if isinstance(instance, dict) else ():
        for key, value in instance.items():
            if patterns.found(pattern, key):
                yield from validator.descend(value, part, path=key, schema_path=pattern)


def _additional_properties(validator: Any, keyword: Any, instance: Any, schema: Any) -> Iterator[Any]:
    """A key that may be one of ``patternProperties`` is none of the additional ones."""
    if not isinstance(instance, dict):
        return
    known, by_pattern = schema.get("properties", {}), schema.get("patternProperties", {})
    for key, value in instance.items():
        if key in known or any(patterns.found(pattern, key) is not False for pattern in by_pattern):
            continue
        if keyword is False:
            yield jsonschema.ValidationError(f"Additional properties are not allowed ({key!r} was unexpected)")
        elif isinstance(keyword, dict):
            yield from validator.descend(value, keyword, path=key)


def _unique_items(validator: Any, keyword: Any, instance: Any, schema: Any) -> Iterator[Any]:
    if keyword is not True or not isinstance(instance, list) or len(instance) > _LONGEST_UNIQUE:
        return
    if len({_canonical(one) for one in instance}) < len(instance):
        yield jsonschema.ValidationError(f"{instance!r} has non-unique elements")


#: A step is one keyword of a schema beside one value; so many take about a second.
_MOST_STEPS = 30_000
_LONGEST_UNIQUE = 10_000
_ENDLESS = f"its schema takes more than {_MOST_STEPS} steps to check a value"
_STATE: ContextVar[_State] = ContextVar("state")
_Bounded = jsonschema.validators.extend(  # type: ignore[no-untyped-call]  # has no types
    jsonschema.Draft202012Validator,
    {
        name: _counted(check)
        for name, check in {
            **jsonschema.Draft202012Validator.VALIDATORS,
            "pattern": _pattern,
            "patternProperties": _pattern_properties,
            "additionalProperties": _additional_properties,
            "uniqueItems": _unique_items,
            "enum": _enum,
            "type": _type,
        }.items()
        if not name.startswith("unevaluated")  # which search for patterns without a bound
    },
)


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
    for key in ("properties", "patternProperties", *_NAMED):
        if isinstance(schema.get(key), dict):
            for name, one in schema[key].items():
                yield from _schemas(one, f"{path}.{name}" if key == "properties" else f"{path}.{key}.{name}")


def _form(schema: dict[str, Any], path: str) -> Iterator[Flaw]:
    """What people get wrong in a schema, said in more words than the metaschema has."""
    for name in schema["type"] if isinstance(schema.get("type"), list) else [schema.get("type", "string")]:
        if name not in TYPES:
            near = _MEANT.get(str(name).lower()) or meant(str(name), TYPES)
            yield Flaw(f"{path}: type {name!r} is unknown" + (f": did you mean {near!r}?" if near else ""))
    reference = schema.get("$ref")
    if reference is not None and not str(reference).startswith("#"):
        yield Flaw(f"{path}: $ref {reference!r} leads out of the schema: models cannot follow it")
    yield from _required(schema, path)
    for low, high in _PAIRS:
        bounds = schema.get(low), schema.get(high)
        if all(isinstance(bound, int | float) for bound in bounds) and bounds[0] > bounds[1]:  # type: ignore[operator]  # numbers
            yield Flaw(f"{path}: {low} {bounds[0]} is above {high} {bounds[1]}")
    if isinstance(schema.get("pattern"), str):
        yield from _of_pattern(schema["pattern"], path)
    if isinstance(schema.get("patternProperties"), dict):
        for pattern in schema["patternProperties"]:
            yield from _of_pattern(pattern, f"{path}.patternProperties")
    if schema.get("type") == "array" and "items" not in schema and "prefixItems" not in schema:
        yield Flaw(f"{path}: an array without items: models cannot know what belongs in it", error=False)


def _of_pattern(pattern: str, path: str) -> Iterator[Flaw]:
    wrong = patterns.flaw(pattern)
    if wrong is not None:
        yield Flaw(f"{path}: pattern {pattern!r} is no regular expression: {wrong}")
    elif not patterns.bounded(pattern):
        why = "to match it can take time without a bound"
        yield Flaw(f"{path}: pattern {pattern!r} is not held against values: {why}", error=False)


def _values(schema: dict[str, Any], path: str, checker: Checker) -> Iterator[Flaw]:
    """Values in a schema that the rest of it refuses."""
    rest = {key: value for key, value in schema.items() if key not in ("enum", "default")}
    for value in schema.get("enum", ()):
        why = checker.broken(value, rest)
        if why is not None:
            yield Flaw(f"{path}: enum has a value that the rest of the schema refuses: {why}")
    if schema.get("default") is not None:
        why = checker.broken(schema["default"], schema)
        if why is not None:
            yield Flaw(f"{path}: the default is refused by the schema: {why}")


def _required(schema: dict[str, Any], path: str) -> Iterator[Flaw]:
    required, properties = schema.get("required", []), schema.get("properties", {})
    if not isinstance(required, list):
        yield Flaw(f"{path}.required is no list of names")
        return
    for name in required:
        if not isinstance(name, str):
            yield Flaw(f"{path}.required has {name!r}, which is no name")
        elif isinstance(properties, dict) and name not in properties:
            near = meant(str(name), properties)
            hint = f": did you mean {near!r}?" if near else ""
            yield Flaw(f"{path}: required names {name!r}, which is none of its properties{hint}")
