"""Conversations as data: what a user says turn by turn, the calls that are right, and what the tools answer.

A conversation is one JSON file. Tool results and answers stand in it, so that every run of it has prompts of the same
lengths, whatever the model answers::

    {"name": "cron-check", "system": "You look after …", "tools": ["cron_failures"],
     "turns": [{"user": "Did anything fail in the last 6 hours?", "length": "short", "output_cap": 48,
                "expect": [{"name": "cron_failures", "arguments": {"hours": [6]}}],
                "results": ["backup-db failed at 02:10 with exit code 1"],
                "answer": "Yes: backup-db failed at 02:10."}]}

Where a text belongs there may be ``{"text": …, "lines": [TEMPLATE, …], "count": N, "after": …}``: the templates in
turn, N lines in all, ``{n}`` being the number of the line.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib.resources
import json
import os
import re
from collections.abc import Iterable
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, Literal

import msgspec

from pytest_vram.errors import BadInput
from pytest_vram.text import printable
from pytest_vram.toolcalls.cases import Case, ExpectedCall, Tool
from pytest_vram.toolcalls.files import read_file
from pytest_vram.toolcalls.lines import case_of
from pytest_vram.toolcalls.places import unoffered
from pytest_vram.toolcalls.strictly import decoded
from pytest_vram.toolcalls.toolbox import Toolbox
from pytest_vram.toolcalls.wanted import list_of, meant, object_of, optional, text_of

LENGTHS = ("short", "medium", "long")
SUFFIX = ".json"
#: Turns of one conversation, lines of one text, characters of one text and of all of them.
MOST_TURNS = 2000
MOST_LINES = 20_000
LONGEST_TEXT = 4 << 20
LONGEST = 32 << 20
MOST_OUTPUT = 1 << 20
_KEYS = ("name", "description", "language", "system", "summary", "tools", "turns")
_TURN = ("user", "length", "output_cap", "expect", "results", "answer")
_TEXT = ("text", "lines", "count", "after")
#: What looks like the number of a line and is none.
_PLACEHOLDER = re.compile(r"\{(?!n\})[A-Za-z]\}")
_FILE = 'a conversation is one JSON object with "name", "system", "tools" and "turns"'

Length = Literal["short", "medium", "long"]


class ScriptedTurn(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One turn of a conversation.

    :ivar output_cap: most tokens that each answer of the turn may have.
    :ivar expect: the calls that are right; empty: an answer without a call is right.
    :ivar results: what each of them gives, in their order. :ivar answer: what the assistant says in the end; "": the
        conversation goes on with what the model said.
    """

    user: str
    length: Length = "short"
    output_cap: int = 128
    expect: list[ExpectedCall] = []
    results: list[str] = []
    answer: str = ""


class Conversation(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A conversation that is run in cycles.

    :ivar summary: what an agent that keeps a summary would have in it; pinned where a window evicts.
    :ivar origin: its file, for messages.
    """

    name: str
    turns: list[ScriptedTurn]
    system: str = ""
    tools: list[Tool] = []
    summary: str = ""
    description: str = ""
    language: str = "en"
    origin: str = ""

    @property
    def digest(self) -> str:
        """SHA-256 of its contents without their origin, 16 hexadecimal digits: sessions with the same one compare."""
        fields = {**msgspec.to_builtins(self), "origin": "", "description": ""}
        canonical = json.dumps(fields, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode("ascii")).hexdigest()[:16]

    @property
    def largest(self) -> int:
        """Phase of the turn with the longest prompt in a cycle: what a session warms up with."""
        total = 0
        sizes: list[tuple[int, int]] = []
        for turn in self.turns:
            total += len(turn.user) + sum(map(len, turn.results))
            sizes.append((total + turn.output_cap * 4, len(sizes)))
            total += len(turn.answer)
        return max(sizes)[1]

    def opening(self) -> list[dict[str, Any]]:
        """The messages before the first turn: the system prompt, where there is one."""
        return [{"role": "system", "content": self.system}] if self.system else []

    def calls(self, phase: int, number: int) -> dict[str, Any] | None:
        """The assistant's message with the calls that are right in a turn; ``None`` where an answer is right.

        :param number: of the turn in the session, so that ids of calls differ.
        """
        turn = self.turns[phase]
        if not turn.expect:
            return None
        return {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {
                    "id": call_id(number, position),
                    "type": "function",
                    "function": {"name": call.name, "arguments": _arguments(call)},
                }
                for position, call in enumerate(turn.expect)
            ],
        }

    def results(self, phase: int, number: int) -> list[dict[str, Any]]:
        """The messages of the tools in a turn."""
        turn = self.turns[phase]
        return [
            {"role": "tool", "tool_call_id": call_id(number, position), "name": call.name, "content": result}
            for position, (call, result) in enumerate(zip(turn.expect, turn.results, strict=True))
        ]

    def scripted(self, phase: int, number: int) -> list[dict[str, Any]]:
        """A whole turn as the script has it: request, calls, results, answer (where the script has one)."""
        turn = self.turns[phase]
        found: list[dict[str, Any]] = [{"role": "user", "content": turn.user}]
        calls = self.calls(phase, number)
        if calls is not None:
            found += [calls, *self.results(phase, number)]
        if turn.answer:
            found.append({"role": "assistant", "content": turn.answer})
        return found

    def cases(self) -> list[Case]:
        """Every decision of one cycle as a case of tool calls, for a scripted backend and for ``evaluate``."""
        found: list[Case] = []
        history = self.opening()
        for phase, turn in enumerate(self.turns):
            asked = [*history, {"role": "user", "content": turn.user}]
            found.append(self._case(f"{phase}", asked, turn.expect))
            calls = self.calls(phase, phase + 1)
            if calls is not None:
                asked = [*asked, calls, *self.results(phase, phase + 1)]
                found.append(self._case(f"{phase}-answer", asked, []))
            history += self.scripted(phase, phase + 1)
        return found

    def _case(self, part: str, messages: list[dict[str, Any]], expect: list[ExpectedCall]) -> Case:
        return Case(
            id=f"{self.name}-{part}",
            family=f"{self.name}-{part}",
            category="multi_turn" if any(message["role"] == "tool" for message in messages) else "choice",
            language=self.language,
            messages=messages,
            tools=self.tools,
            expect=expect,
            origin=self.origin,
        )


def call_id(number: int, position: int) -> str:
    """Id of a call that the script makes: nine letters and digits, which is what the strictest template takes."""
    return f"c{number % 1_000_000:06}{position % 100:02}"


def _arguments(call: ExpectedCall) -> str:
    """The arguments of a call as JSON: of each the first value that is right, without those that may be left out."""
    chosen = {name: values[0] for name, values in call.arguments.items() if name not in call.omittable}
    return json.dumps(chosen, ensure_ascii=False)


# ---------------------------------------------------------------- reading


def shipped() -> list[str]:
    """Names of the conversations of this package."""
    return sorted(entry.name.removesuffix(SUFFIX) for entry in _folder().iterdir() if entry.name.endswith(SUFFIX))


def load(wanted: str | os.PathLike[str] | Conversation, *, base: Path | None = None) -> Conversation:
    """A conversation by name (:func:`shipped`) or from a file.

    :param base: folder that a relative path starts from.
    :raises BadInput: one sentence that names file, path in it and what is accepted.
    """
    if isinstance(wanted, Conversation):
        return wanted
    given: object = wanted  # tests are rarely type-checked
    if not isinstance(given, str | os.PathLike):
        raise BadInput(f"conversation={printable(repr(given)[:80])} is not the name of a conversation or a JSON file")
    text = os.fspath(given)
    if not isinstance(text, str) or not text.strip() or "\0" in text:
        raise BadInput(f"conversation={text!r} is not the name of a conversation or a JSON file")
    names = shipped()
    if text in names:
        return _read(_folder().joinpath(text + SUFFIX), f"conversations/{text}{SUFFIX}", _shipped_tools())
    try:
        path = (base or Path()) / Path(text).expanduser()
    except RuntimeError as error:  # of a ~ that leads nowhere
        raise BadInput(f"conversation={text!r} cannot be used: {error}") from None
    if not os.path.lexists(path):
        near = difflib.get_close_matches(text, names, n=1, cutoff=0.6)
        meant = f" (did you mean {near[0]!r}?)" if near else ""
        raise BadInput(
            printable(
                f"conversation={text!r} is neither a file nor one of this package{meant}: there are {', '.join(names)}"
            )
        )
    return _read(path, text, list(_tools_beside(path.parent)) or _shipped_tools())


def _folder() -> Traversable:
    return importlib.resources.files("pytest_vram_fixtures").joinpath("conversations")


def _shipped_tools() -> list[tuple[str, bytes]]:
    folder = importlib.resources.files("pytest_vram_fixtures").joinpath("toolcalls", "tools")
    entries = sorted((one for one in folder.iterdir() if one.name.endswith(SUFFIX)), key=lambda one: one.name)
    return [(f"toolcalls/tools/{entry.name}", entry.read_bytes()) for entry in entries]


def _tools_beside(folder: Path) -> Iterable[tuple[str, bytes]]:
    single, several = folder / "tools.json", folder / "tools"
    if single.is_file():
        yield str(single), read_file(single, str(single))
    if several.is_dir():
        for entry in sorted(several.glob("*.json")):
            yield str(entry), read_file(entry, str(entry))


def _read(entry: Traversable, label: str, tools: list[tuple[str, bytes]]) -> Conversation:
    data = read_file(entry, label, _FILE)
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadInput(printable(f"{label} is not UTF-8 at byte {error.start}: save it as UTF-8")) from None
    return conversation_of(decoded(text, label, _FILE), label, Toolbox(tools))


def conversation_of(value: Any, label: str, tools: Toolbox) -> Conversation:
    """A decoded file as a conversation.

    :raises BadInput: naming its path in the file and what is accepted.
    """
    fields = object_of(value, label, _KEYS)
    for key in ("name", "turns"):
        if key not in fields:
            raise BadInput(printable(f"{label} has no {key!r}: {_FILE}"))
    name = text_of(fields["name"], f"{label}: name")
    if not name.isprintable() or len(name) > 80:
        raise BadInput(printable(f"{label}: name is not a name: give up to 80 printable characters"))
    offered = list_of(optional(fields, "tools", []), f"{label}: tools", "tools")
    named = [one if isinstance(one, str) else one.get("name") for one in offered if isinstance(one, str | dict)]
    twice = next((one for one in named if isinstance(one, str) and named.count(one) > 1), None)
    if twice is not None:
        raise BadInput(printable(f"{label}: tools has {twice!r} twice: a tool is offered once"))
    listed = list_of(fields["turns"], f"{label}: turns", "turns")
    if not 1 <= len(listed) <= MOST_TURNS:
        raise BadInput(printable(f"{label}: turns has {len(listed)}: a conversation has 1 to {MOST_TURNS:,} of them"))
    turns: list[ScriptedTurn] = []
    resolved: list[Tool] = []
    room = LONGEST
    for position, one in enumerate(listed):
        where = f"{label}: turns[{position}]"
        turn, resolved = _turn(one, where, offered, tools)
        room -= len(turn.user) + len(turn.answer) + sum(map(len, turn.results))
        if room < 0:
            raise BadInput(printable(f"{where}: the texts up to here have more than {LONGEST >> 20} MiB: shorten them"))
        turns.append(turn)
    return Conversation(
        name=name,
        description=text_of(optional(fields, "description", ""), f"{label}: description", empty=True),
        language=text_of(optional(fields, "language", "en"), f"{label}: language"),
        system=_text(optional(fields, "system", ""), f"{label}: system", empty=True),
        summary=_text(optional(fields, "summary", ""), f"{label}: summary", empty=True),
        tools=resolved,
        turns=turns,
        origin=label,
    )


def _turn(value: Any, where: str, offered: list[Any], tools: Toolbox) -> tuple[ScriptedTurn, list[Tool]]:
    fields = object_of(value, where, _TURN)
    user = _text(fields.get("user"), f"{where}.user")
    # One turn is what a case of tool calls is: its calls and the names of its tools are checked as those are.
    case = case_of(
        {
            "id": "turn",
            "family": "turn",
            "category": "multi_turn",
            "messages": [{"role": "user", "content": user}],
            "tools": offered,
            "expect": optional(fields, "expect", []),
        },
        where,
        tools,
    )
    names = [tool.name for tool in case.tools]
    for number, call in enumerate(case.expect):
        if call.name not in names:
            said = unoffered(call.name, names).replace("the case's tools", "the conversation's tools")
            raise BadInput(printable(f"{where}: expect[{number}].name: {said}"))
        _check_arguments(
            call, next(tool for tool in case.tools if tool.name == call.name), f"{where}: expect[{number}]"
        )
    results = [
        _text(one, f"{where}.results[{number}]", empty=True)
        for number, one in enumerate(list_of(optional(fields, "results", []), f"{where}.results", "texts"))
    ]
    if len(results) != len(case.expect):
        raise BadInput(
            f"{where}: `expect` has {len(case.expect)} and `results` {len(results)}: each call has one result, in the"
            " same order"
        )
    length = optional(fields, "length", "short")
    if length not in LENGTHS:
        raise BadInput(printable(f"{where}.length is {length!r:.60}: write one of {', '.join(LENGTHS)}"))
    return (
        ScriptedTurn(
            user=user,
            length=length,
            output_cap=_whole(optional(fields, "output_cap", 128), f"{where}.output_cap", MOST_OUTPUT),
            expect=case.expect,
            results=results,
            answer=_text(optional(fields, "answer", ""), f"{where}.answer", empty=True),
        ),
        case.tools,
    )


def _check_arguments(call: ExpectedCall, tool: Tool, where: str) -> None:
    """:raises BadInput: an argument that the tool does not have: no call could ever be right."""
    schema = tool.parameters
    properties = schema.get("properties")
    if not isinstance(properties, dict) or schema.get("additionalProperties") or schema.get("patternProperties"):
        return
    for name in call.arguments:
        if name not in properties:
            near = meant(name, properties)
            hint = f" (did you mean {near!r}?)" if near else ""
            raise BadInput(
                printable(
                    f"{where}.arguments: {call.name} has no argument {name!r:.60}{hint}: it has "
                    f"{', '.join(list(properties)[:8]) or 'none'}"
                )
            )


def _whole(value: Any, where: str, most: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise BadInput(printable(f"{where} is {value!r:.40}: write a whole number from 1 to {most:,}"))
    return value


def _text(value: Any, where: str, *, empty: bool = False) -> str:
    """A text, or one that is written as repeated lines."""
    if not isinstance(value, dict):
        found = text_of(value, where, empty=empty)
    else:
        fields = object_of(value, where, _TEXT)
        templates = list_of(fields.get("lines"), f"{where}.lines", "lines")
        if not templates:
            raise BadInput(printable(f"{where}.lines is empty: give the lines that are repeated"))
        lines = [text_of(one, f"{where}.lines[{number}]", empty=True) for number, one in enumerate(templates)]
        wrong = next((one[0] for line in lines if (one := _PLACEHOLDER.search(line))), None)
        if wrong is not None:
            raise BadInput(f"{where}.lines has {wrong}, which is no placeholder: the number of a line is {{n}}")
        count = _whole(fields.get("count"), f"{where}.count", MOST_LINES)
        if count * max(map(len, lines)) > LONGEST_TEXT:
            raise BadInput(printable(f"{where} has more than {LONGEST_TEXT >> 20} MiB: give fewer or shorter lines"))
        head = text_of(optional(fields, "text", ""), f"{where}.text", empty=True)
        tail = text_of(optional(fields, "after", ""), f"{where}.after", empty=True)
        repeated = (lines[number % len(lines)].replace("{n}", str(number + 1)) for number in range(count))
        found = "\n".join([*([head] if head else []), *repeated, *([tail] if tail else [])])
    if len(found) > LONGEST_TEXT:
        raise BadInput(printable(f"{where} has more than {LONGEST_TEXT >> 20} MiB: shorten it"))
    return found
