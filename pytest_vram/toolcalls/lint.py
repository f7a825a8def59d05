"""Contradictions in a set of cases: what no model can answer right, and what makes a rate mean less than it says.

An *error* is a case that is wrong by itself or beside another; a *warning* is what a careful author looks at again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any, Literal

import msgspec

from pytest_vram.toolcalls import lint_schema
from pytest_vram.toolcalls.cases import Case, ExpectedCall, Tool
from pytest_vram.toolcalls.places import unoffered
from pytest_vram.toolcalls.values import same, shown

Level = Literal["error", "warning"]
#: Language tags as they are used: a language, then script and region.
_LANGUAGE = re.compile(r"[a-z]{2,3}(-[A-Z][a-z]{3})?(-([A-Z]{2}|[0-9]{3}))?", re.ASCII)
#: What OpenAI and the servers that follow it take.
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}", re.ASCII)
#: Categories in which a family may be about telling tools apart, so that other calls are right in other cases.
_CHOOSING = ("choice", "parallel", "multi_turn", "long_list")
#: One word with a digit or a sign in it, as names, ids, dates, addresses and paths are.
_NAME_LIKE = re.compile(r"(?=\S*[-_/.0-9])\S*\w\S*")
#: What chat templates of Mistral's models take as the id of a call.
_CALL_ID = re.compile(r"[A-Za-z0-9]{9}", re.ASCII)
#: Characters of one finding: it may quote a value.
_LONGEST = 1000
#: Least tools of ``long_list``.
LONG_LIST = 20


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that a case, or several together, have wrong.

    :ivar origin: file and line. :ivar case: its id; "" for a line that is no usable case. :ivar rule: a short name of
        what is checked.
    """

    level: Level
    origin: str
    case: str
    rule: str
    text: str


class LintDocument(msgspec.Struct, frozen=True, kw_only=True):
    """What ``vram toolcalls lint --json`` prints.

    :ivar sets: the names of what was read. :ivar categories: name → cases, with ``languages``.
    :ivar detectable: the drop below ``target``, as a share, that all these cases detect with 80 % power where the
        cases of a family are independent; ``None``: none.
    """

    sets: list[str]
    digest: str
    cases: int
    families: int
    categories: dict[str, int]
    languages: dict[str, int]
    target: float
    detectable: float | None
    errors: int
    warnings: int
    findings: list[Finding]
    format: str = "pytest-vram/toolcalls-lint/1"


def lint(cases: Sequence[Case]) -> list[Finding]:
    """All findings, in the order of the cases."""
    found = [finding for case in cases for finding in _of_case(case)]
    found += _of_tools(cases)
    found += _inexact(cases)
    found += _alike(cases)
    found += _of_families(cases)
    places = {case.id: position for position, case in enumerate(cases)}
    return sorted(found, key=lambda finding: places[finding.case])


def _finding(case: Case, rule: str, text: str, *, level: Level = "error") -> Finding:
    told = text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"
    return Finding(level=level, origin=case.origin, case=case.id, rule=rule, text=told)


def _of_case(case: Case) -> Iterator[Finding]:
    if not _LANGUAGE.fullmatch(case.language):
        text = f"language {case.language!r} is no tag such as en, de or zh-Hant"
        yield _finding(case, "language", text, level="warning")
    if not case.tools:
        yield _finding(case, "no-tools", "no tool is offered: nothing is decided")
    for text in _misfits(case):
        yield _finding(case, "category", text)
    yield from _of_history(case)
    offered = {tool.name: tool for tool in case.tools}
    for position, call in enumerate(case.expect):
        if call.name not in offered:
            yield _finding(case, "not-offered", f"expect[{position}]: {unoffered(call.name, list(offered))}")
            continue
        if not _unusable(offered[call.name]):  # else its schema is a finding, and says nothing of values
            yield from _of_call(case, f"expect[{position}]", call, offered[call.name])
    yield from _twins(case)


def _misfits(case: Case) -> Iterator[str]:
    """Sentences: why the case is not what its category says."""
    calls, values = len(case.expect), [value for call in case.expect for value in _values(call)]
    counts = {"single": (1, 1), "choice": (1, 1), "parallel": (2, 99), "irrelevance": (0, 0), "missing": (0, 0)}
    least, most = counts.get(case.category, (0, 99))
    if not least <= calls <= most:
        wanted = {0: "none", 1: "one"}.get(least, "two or more")
        yield f"category {case.category} expects {calls} {'call' if calls == 1 else 'calls'}: {wanted} belong there"
    if case.category == "choice" and len(case.tools) < 2:
        yield "category choice offers one tool: there is nothing to choose"
    if case.category == "long_list" and len(case.tools) < LONG_LIST:
        yield f"category long_list offers {len(case.tools)} tools: at least {LONG_LIST} belong there"
    if case.category == "multi_turn" and not any(message["role"] == "tool" for message in case.messages):
        yield "category multi_turn has no tool result among its messages"
    if case.category == "missing" and not any(tool.parameters.get("required") for tool in case.tools):
        yield "category missing offers no tool that requires anything"
    if case.category == "nested" and not any(_has(value, dict) for value in values):
        yield "category nested expects no argument that is an object"
    if case.category == "array" and not any(isinstance(value, list) for value in values):
        yield "category array expects no argument that is a list"
    if case.category == "units" and not any(_has(value, int | float) for value in values):
        yield "category units expects no argument that is a number"
    if case.category == "enum" and not any(_enumerated(case, call) for call in case.expect):
        yield "category enum expects no argument that its schema enumerates"


def _values(call: ExpectedCall) -> Iterator[Any]:
    for allowed in call.arguments.values():
        yield from allowed


def _has(value: Any, kind: Any) -> bool:
    """Whether a value, or one in it, is of a kind; a truth value is no number."""
    if isinstance(value, kind) and not (isinstance(value, bool) and kind is not bool):
        return True
    inside: Iterable[Any] = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return any(_has(one, kind) for one in inside)


def _enumerated(case: Case, call: ExpectedCall) -> bool:
    schema = next((tool.parameters for tool in case.tools if tool.name == call.name), {})
    properties = schema.get("properties", {})
    return any('"enum"' in json.dumps(properties.get(name)) for name in call.arguments)


def _of_call(case: Case, where: str, call: ExpectedCall, tool: Tool) -> Iterator[Finding]:
    properties = tool.parameters.get("properties")
    properties = properties if isinstance(properties, dict) else {}
    required = tool.parameters.get("required")
    required = required if isinstance(required, list) else []
    checker = _checker(json.dumps(tool.parameters))
    for name, allowed in call.arguments.items():
        path = f"{where}.arguments.{name}"
        if name not in properties:
            yield _finding(case, "unknown-argument", f"{path}: {call.name} has no such argument")
            continue
        for value in allowed:
            why = checker.refused(name, value)
            if why is not None:
                yield _finding(case, "refused-value", f"{path}: the schema of {call.name} refuses a value: {why}")
        if len({json.dumps(value, sort_keys=True) for value in allowed}) < len(allowed):
            yield _finding(case, "repeated-value", f"{path}: a value stands twice", level="warning")
        yield from _of_default(case, path, call, name, properties[name], required)
    for name in required:
        if name not in call.arguments:
            yield _finding(case, "required", f"{where}: argument {name!r} of {call.name} is required and not expected")
    for name in call.omittable:
        if name not in call.arguments:
            text = f"{where}.omittable: {name!r} is none of the expected arguments"
            yield _finding(case, "omittable", text)
        elif name in required:
            text = f"{where}.omittable: {name!r} may be left out, but {call.name} requires it"
            yield _finding(case, "omittable", text)
    for name in call.exact:
        if name not in call.arguments:
            yield _finding(case, "exact", f"{where}.exact: {name!r} is none of the expected arguments")
        elif not any(_has(value, str) for value in call.arguments[name]):
            text = f"{where}.exact: {name!r} has no text: only text is compared by characters"
            yield _finding(case, "exact", text)


def _of_default(
    case: Case, path: str, call: ExpectedCall, name: str, schema: Any, required: list[Any]
) -> Iterator[Finding]:
    """To leave an optional argument out is to say its default: both are right, or neither is."""
    if name in required or not isinstance(schema, dict) or "default" not in schema:
        return
    default, exact = schema["default"], name in call.exact
    right = any(same(default, value) and (not exact or default == value) for value in call.arguments[name])
    shown = json.dumps(default, ensure_ascii=False)
    if name in call.omittable and not right:
        text = f"{path} may be left out, which says its default {shown}, but that is not among the values"
        yield _finding(case, "default", text, level="warning")
    if name not in call.omittable and right:
        text = f"{path} has its default {shown} among the values, but may not be left out: make it omittable"
        yield _finding(case, "default", text, level="warning")


def _of_history(case: Case) -> Iterator[Finding]:
    """Whether the conversation is one that a server takes."""
    offered = {tool.name: tool for tool in case.tools}
    open_calls: list[str] = []
    known: set[str] = set()
    before = ""
    for position, message in enumerate(case.messages):
        where, role = f"messages[{position}]", message["role"]
        if role == "tool":
            if message["tool_call_id"] in open_calls:
                open_calls.remove(message["tool_call_id"])
            else:
                wrong = "was answered already" if message["tool_call_id"] in known else "is not there"
                text = f"{where}: a result of call {message['tool_call_id']!r}, which {wrong}"
                yield _finding(case, "history", text)
        elif open_calls:
            yield _finding(case, "history", f"{where}: call {open_calls[0]!r} has no result before it")
            open_calls = []
        if role == "user" and before == "user":
            yield _finding(case, "history", f"{where}: two messages of the user in a row", level="warning")
        if role in ("system", "developer") and position and before not in ("system", "developer"):
            yield _finding(case, "history", f"{where}: a {role} message after the beginning", level="warning")
        if role == "user" and isinstance(message.get("content"), str) and not message["content"].strip():
            yield _finding(case, "history", f"{where}: the message of the user is empty")
        for number, call in enumerate(message.get("tool_calls") or ()):
            if call["id"] in known:
                yield _finding(case, "history", f"{where}: two calls have the id {call['id']!r}")
            if not _CALL_ID.fullmatch(call["id"]):
                text = f"{where}: call id {call['id']!r} is not nine letters and digits: Mistral's templates refuse it"
                yield _finding(case, "call-id", text, level="warning")
            known.add(call["id"])
            open_calls.append(call["id"])
            yield from _of_past_call(case, f"{where}.tool_calls[{number}]", call["function"], offered)
        before = role
    if before not in ("user", "tool"):
        text = f"the last message is of the {before}: it is the turn of the user or of a tool's result"
        yield _finding(case, "history", text)
    if open_calls and before == "tool":
        yield _finding(case, "history", f"call {open_calls[0]!r} has no result")


def _of_past_call(case: Case, where: str, function: dict[str, Any], offered: dict[str, Tool]) -> Iterator[Finding]:
    try:
        arguments = json.loads(function["arguments"])
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        yield _finding(case, "history", f"{where}: the arguments are no JSON object: servers refuse such a history")
    elif function["name"] not in offered:
        text = f"{where}: {unoffered(function['name'], list(offered))}"
        yield _finding(case, "history", text, level="warning")
    elif not _unusable(offered[function["name"]]):
        parameters = offered[function["name"]].parameters
        why = _checker(json.dumps(parameters)).broken(arguments, parameters)
        if why is not None:
            text = f"{where}: the schema of {function['name']} refuses its arguments: {why}"
            yield _finding(case, "history", text, level="warning")


def _twins(case: Case) -> Iterator[Finding]:
    """An expected tool beside one that differs in nothing: who could tell which is right?"""
    wanted = {call.name for call in case.expect}
    for tool in (one for one in case.tools if one.name in wanted):
        for other in case.tools:
            if other.name == tool.name:
                continue
            alike = _folded(tool.name) == _folded(other.name) or tool.description == other.description
            if alike and tool.parameters == other.parameters:
                text = f"tool {other.name!r} is offered beside {tool.name!r} and does the same by name and schema"
                yield _finding(case, "twins", text, level="warning")


def _folded(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower(), flags=re.ASCII).removesuffix("s")


def _of_tools(cases: Sequence[Case]) -> Iterator[Finding]:
    """Each tool once, at the first case that offers it."""
    seen: set[str] = set()
    for case in cases:
        for tool in case.tools:
            key = _canonical(tool)
            if key in seen:
                continue
            seen.add(key)
            if not _NAME.fullmatch(tool.name):
                text = f"tool {tool.name!r}: servers take names of up to 64 letters, digits, _ and -"
                yield _finding(case, "tool-name", text, level="warning")
            if not tool.description.strip():
                text = f"tool {tool.name!r} has no description: models choose by it"
                yield _finding(case, "description", text, level="warning")
            for flaw in _flaws(json.dumps(tool.parameters)):
                level: Level = "error" if flaw.error else "warning"
                yield _finding(case, "schema", f"tool {tool.name!r}: {flaw.text}", level=level)


def _inexact(cases: Sequence[Case]) -> Iterator[Finding]:
    """Names that are compared as if they were words; each argument of a tool once, at the first case that has one."""
    seen: set[tuple[str, str]] = set()
    for case in cases:
        offered = {tool.name: tool.parameters.get("properties") for tool in case.tools}
        for position, call in enumerate(case.expect):
            properties = offered.get(call.name)
            for name, allowed in call.arguments.items():
                schema = properties.get(name) if isinstance(properties, dict) else None
                if (call.name, name) in seen or name in call.exact:
                    continue
                like = next((one for one in _texts(allowed, {"items": schema}) if _NAME_LIKE.fullmatch(one)), None)
                if like is not None:
                    seen.add((call.name, name))
                    text = f"expect[{position}].arguments.{name}: {shown(like)} is compared without regard to capitals:"
                    yield _finding(case, "inexact", f"{text} if it is a name, put {name!r} into exact", level="warning")


def _texts(value: Any, schema: Any) -> Iterator[str]:
    """The texts in a value that its schema does not enumerate: those it does are compared to the letter anyway."""
    schema = schema if isinstance(schema, dict) else {}
    if isinstance(value, str) and "enum" not in schema and "const" not in schema and len(value) <= _LONGEST:
        yield value
    elif isinstance(value, list):
        for one in value:
            yield from _texts(one, schema.get("items"))
    elif isinstance(value, dict):
        properties = schema.get("properties")
        for key, one in value.items():
            yield from _texts(one, properties.get(key) if isinstance(properties, dict) else None)


def _alike(cases: Sequence[Case]) -> Iterator[Finding]:
    """Cases that ask the same: they contradict each other, or count twice."""
    seen: dict[str, Case] = {}
    for case in cases:
        key = _canonical((case.messages, sorted(_canonical(tool) for tool in case.tools)))
        first = seen.setdefault(key, case)
        if first is case:
            continue
        if sorted(map(_canonical, first.expect)) == sorted(map(_canonical, case.expect)):
            yield _finding(case, "duplicate", f"the same as case {first.id!r} ({first.origin}): it would count twice")
        else:
            text = f"the same request as case {first.id!r} ({first.origin}), and another answer is right"
            yield _finding(case, "contradiction", text)


def _unusable(tool: Tool) -> bool:
    return _formless(json.dumps(tool.parameters))


@lru_cache(maxsize=1024)
def _formless(parameters: str) -> bool:
    return any(flaw.error for flaw in lint_schema.form(json.loads(parameters)))


@lru_cache(maxsize=1024)
def _checker(parameters: str) -> lint_schema.Checker:
    return lint_schema.Checker(json.loads(parameters))


@lru_cache(maxsize=1024)
def _flaws(parameters: str) -> tuple[lint_schema.Flaw, ...]:
    """By the text of a schema: the same tools come in many cases, and schemas are slow to check."""
    return tuple(lint_schema.flaws(json.loads(parameters)))


def _of_families(cases: Sequence[Case]) -> Iterator[Finding]:
    families: dict[str, list[Case]] = {}
    for case in cases:
        families.setdefault(case.family, []).append(case)
    for family, members in families.items():
        if len(members) == 1 and len(cases) > 1:
            text = f"family {family!r} has this case only: other words and values tell chance from ability"
            yield _finding(members[0], "family", text, level="warning")
        calling = [case for case in members if case.expect and case.category not in _CHOOSING]
        for case in calling[1:]:
            first, now = ({call.name for call in one.expect} for one in (calling[0], case))
            if first != now:
                text = (
                    f"family {family!r} expects {', '.join(sorted(first))} in case {calling[0].id!r} and"
                    f" {', '.join(sorted(now))} here: a family has one intent"
                )
                yield _finding(case, "family", text, level="warning")


def _canonical(value: Any) -> str:
    return json.dumps(msgspec.to_builtins(value), sort_keys=True, ensure_ascii=False)
