"""Rows of the Berkeley Function Calling Leaderboard as cases: opt-in, from an installed ``bfcl-eval`` or a folder.

``bfcl:simple_python`` reads the data of the installed package, which is not imported: it has about thirty
pinned dependencies, and only its files are wanted. ``bfcl:simple_python,multiple@/path/to/data`` reads a folder.

A row is ``{id, question: [[messages]], function: [{name, description, parameters}]}``, its answer ``{id, ground_truth:
[{function: {argument: [allowed, …]}}]}``, where ``""`` among the allowed says that the argument may be left out.
"""

from __future__ import annotations

import hashlib
import importlib.util
import itertools
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from pytest_vram.errors import BadCases
from pytest_vram.toolcalls.cases import Case, ExpectedCall, Tool
from pytest_vram.toolcalls.files import read_file, text_lines
from pytest_vram.toolcalls.lines import check_message
from pytest_vram.toolcalls.lint_schema import Checker, form
from pytest_vram.toolcalls.strictly import decoded
from pytest_vram.toolcalls.wanted import list_of, meant, object_of, text_of

#: Files of the leaderboard whose rows are one decision each → our category.
SUBJECTS = {
    "simple_python": "single",
    "multiple": "choice",
    "parallel": "parallel",
    "parallel_multiple": "parallel",
    "irrelevance": "irrelevance",
    "live_simple": "single",
    "live_multiple": "choice",
    "live_parallel": "parallel",
    "live_parallel_multiple": "parallel",
    "live_irrelevance": "irrelevance",
}
#: Rows whose published answer is wrong or not the only right one. All were reported to the leaderboard (issues 1133,
#: 1169 and 1171 of ShishirPatil/gorilla), were read again beside their requests, and are still so in bfcl-eval
#: 2026.3.23; what was reported and mended since is not here. Rows whose answer breaks the row's own schema need no
#: entry: :func:`_expected` finds them.
DENIED = {
    "live_multiple_17-4-9": "expects Italian cuisine, or none, of a Korean dish",
    "live_multiple_8-4-0": "takes no keyword but 'steak' for a steak in Indian style",
    "live_multiple_59-22-6": "takes 'S' alone for small sizes; the schema takes any text",
    "parallel_155": "refuses an argument to be left out whose default says the same",
}
#: JSON Schema types of the leaderboard's own; ``any`` has none.
_TYPES = {"dict": "object", "float": "number", "tuple": "array", "list": "array", "bool": "boolean", "any": None}
#: A nested answer may allow several values in each place; more combinations than this are no answer one can list.
_MOST_COMBINATIONS = 256
_HOW = (
    "`pip install bfcl-eval --no-deps` installs its data, or name a folder that has them, as in"
    " bfcl:simple_python@/path/to/bfcl_eval/data"
)


def read(wanted: str, *, base: Path | None = None) -> list[Case]:
    """The cases of ``simple_python``, of several subjects by commas, of the folder after ``@``.

    Rows of :data:`DENIED` and rows whose answer breaks their own schema are left out.

    :raises BadCases: an unknown subject, no data, or data of another shape.
    """
    names, _, place = wanted.partition("@")
    subjects = [name.strip() for name in names.split(",")]
    for name in subjects:
        if name not in SUBJECTS:
            near = meant(name, SUBJECTS)
            hint = f"did you mean {near!r}? " if near else ""
            raise BadCases(f"bfcl:{name} is not read: {hint}there are {', '.join(SUBJECTS)}")
    folder = _folder((base or Path()) / Path(place).expanduser() if place else None)
    return [case for name in dict.fromkeys(subjects) for case in _subject(name, folder)]


def _folder(named: Path | None) -> Path:
    if named is None:
        found = importlib.util.find_spec("bfcl_eval")
        places = list(found.submodule_search_locations or []) if found else []
        if not places:
            raise BadCases(f"cases of BFCL need the package bfcl-eval, which is not installed here: {_HOW}")
        named = Path(places[0])
    for folder in (named, named / "data"):
        if folder.is_dir() and any(folder.glob("BFCL_v*.json")):
            return folder
    raise BadCases(f"{named} has no file BFCL_v*.json: {_HOW}")


def _subject(name: str, folder: Path) -> Iterator[Case]:
    rows = _newest(name, folder)
    answers: dict[str, Any] = {}
    if SUBJECTS[name] != "irrelevance":
        file = folder / "possible_answer" / rows.name
        for origin, row in _rows(file):
            answers[text_of(row.get("id"), f"{origin}: id")] = row.get("ground_truth")
    for origin, row in _rows(rows):
        row_id = text_of(row.get("id"), f"{origin}: id")
        if row_id in DENIED:
            continue
        if SUBJECTS[name] != "irrelevance" and row_id not in answers:
            raise BadCases(f"{origin}: row {row_id!r} has no answer in {folder / 'possible_answer' / rows.name}")
        case = _case(name, row_id, row, answers.get(row_id, []), origin)
        if case is not None:
            yield case


def _newest(name: str, folder: Path) -> Path:
    found = []
    for path in folder.glob(f"BFCL_v*_{name}.json"):
        version = re.fullmatch(rf"BFCL_v(\d{{1,6}})_{name}\.json", path.name, re.ASCII)
        if version:
            found.append((int(version[1]), path))
    if not found:
        raise BadCases(f"{folder} has no file BFCL_v*_{name}.json: {_HOW}")
    return max(found)[1]


def _rows(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    for number, text in text_lines(read_file(file, str(file)), str(file)):
        origin = f"{file}:{number}"
        yield origin, object_of(decoded(text, origin, "each line is one row of the leaderboard"), origin)


def _case(subject: str, row_id: str, row: dict[str, Any], answer: Any, origin: str) -> Case | None:
    """The row as a case; ``None`` where its answer breaks the row's own schema."""
    turns = list_of(row.get("question"), f"{origin}: question", "turns")
    if len(turns) != 1:
        raise BadCases(f"{origin}: question has {len(turns)} turns: rows of one decision are read")
    tools = [
        _tool(object_of(function, f"{origin}: function[{position}]"), f"{origin}: function[{position}]")
        for position, function in enumerate(list_of(row.get("function"), f"{origin}: function", "functions"))
    ]
    expected = []
    for position, call in enumerate(list_of(answer, f"{origin}: ground_truth", "calls")):
        where = f"{origin}: ground_truth[{position}]"
        one = object_of(call, where)
        if len(one) != 1:
            raise BadCases(f"{where} names {len(one)} functions: one belongs there")
        name, arguments = next(iter(one.items()))
        found = _expected(_named(name), object_of(arguments, where), tools)
        if found is None:
            return None
        expected.append(found)
    messages = list_of(turns[0], f"{origin}: question[0]", "messages")
    for position, message in enumerate(messages):
        check_message(message, f"{origin}: question[0][{position}]")
    names = "+".join(sorted(tool.name for tool in tools))
    return Case(
        id=row_id,
        # Rows with the same tools ask for much the same.
        family=f"{subject}-{hashlib.sha256(names.encode()).hexdigest()[:12]}",
        category=SUBJECTS[subject],
        messages=messages,
        tools=tools,
        expect=expected,
        origin=origin,
    )


def _named(name: str) -> str:
    """A name that servers accept: they take letters, digits, ``_`` and ``-``."""
    return re.sub(r"[^A-Za-z0-9_-]", "_", name)


def _tool(function: dict[str, Any], where: str) -> Tool:
    return Tool(
        name=_named(text_of(function.get("name"), f"{where}.name")),
        description=text_of(function.get("description", ""), f"{where}.description", empty=True),
        parameters=_schema(object_of(function.get("parameters"), f"{where}.parameters")),
    )


def _schema(schema: Any) -> Any:
    """The leaderboard's schema as JSON Schema."""
    if not isinstance(schema, dict):
        return schema
    found: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "properties" and isinstance(value, dict):
            found[key] = {name: _schema(one) for name, one in value.items()}
        elif key in ("items", "additionalProperties"):
            found[key] = _schema(value)
        elif key == "type" and isinstance(value, str):
            named = _TYPES.get(value, value)
            if named is not None:
                found[key] = named
        elif key != "optional":  # which stands beside `required` and says the same
            found[key] = value
    return found


def _expected(name: str, arguments: dict[str, Any], tools: list[Tool]) -> ExpectedCall | None:
    """The call that is right; ``None``: the row contradicts its own schema, so that nothing can be right."""
    schema = next((tool.parameters for tool in tools if tool.name == name), None)
    if schema is None or any(flaw.error for flaw in form(schema)):
        return None
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if any(key not in arguments for key in required) or any(key not in properties for key in arguments):
        return None
    found: dict[str, list[Any]] = {}
    checker = Checker(schema)
    omittable = []
    for key, allowed in arguments.items():
        if not isinstance(allowed, list):
            return None
        if key not in required and ("" in allowed or None in allowed):
            omittable.append(key)
        values: list[Any] = []
        for value in _combinations(allowed):
            blank = value is None or (value == "" and key not in required)
            if not blank and value not in values and checker.refused(key, value) is None:
                values.append(value)
        if not values and key not in omittable:
            return None
        if values:
            found[key] = values
    return ExpectedCall(name=name, arguments=found, omittable=[key for key in omittable if key in found])


def _combinations(allowed: Iterable[Any]) -> Iterator[Any]:
    """Every whole value: inside of an object each member has a list of the allowed ones, as an argument has."""
    for value in allowed:
        yield from itertools.islice(_whole(value), _MOST_COMBINATIONS)


def _whole(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        choices = [list(_members(key, allowed)) for key, allowed in value.items()]
        for chosen in itertools.product(*choices):
            yield {key: one for pair in chosen for key, one in pair}
    elif isinstance(value, list) and any(isinstance(one, dict | list) for one in value):
        for items in itertools.product(*(list(itertools.islice(_whole(one), _MOST_COMBINATIONS)) for one in value)):
            yield list(items)
    else:
        yield value


def _members(key: str, allowed: Any) -> Iterator[tuple[tuple[str, Any], ...]]:
    """What a member of an object may be: (key, value) alone in a tuple, or nothing where it may be left out."""
    for value in allowed if isinstance(allowed, list) else [allowed]:
        if value in ("", None):
            yield ()
        else:
            for one in itertools.islice(_whole(value), _MOST_COMBINATIONS):
                yield ((key, one),)
