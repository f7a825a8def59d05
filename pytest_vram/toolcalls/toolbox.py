"""Tools by name: the files that define them, sets of them, and tools that a case writes out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from pytest_vram.errors import BadCases
from pytest_vram.toolcalls.cases import Tool
from pytest_vram.toolcalls.strictly import decoded
from pytest_vram.toolcalls.wanted import each_text, meant, object_of, optional, text_of

_FILE = 'a file of tools is {"tools": {NAME: {"description": …, "parameters": …}}, "sets": {NAME: [NAME, …]}}'


class Toolbox:
    """Tools and sets that were defined in files, and the tools that a case's list means."""

    def __init__(self, files: Iterable[tuple[str, bytes]] = ()) -> None:
        """:param files: (label, content). :raises BadCases: a file that cannot be used, or a name defined twice."""
        self._tools: dict[str, tuple[Tool, str]] = {}
        self._sets: dict[str, tuple[list[str], str]] = {}
        for label, data in files:
            self._add(label, data)
        for name, (members, label) in self._sets.items():
            for position, member in enumerate(members):
                if member not in self._tools:
                    where = f"{label}: sets.{name}[{position}]"
                    raise BadCases(f"{where}: tool {member!r} is not defined{_meant(member, self._tools)}")

    def _add(self, label: str, data: bytes) -> None:
        try:
            text = data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise BadCases(f"{label} is not UTF-8 at byte {error.start}: save it as UTF-8") from None
        content = object_of(decoded(text, label, _FILE), label, ("tools", "sets"))
        for name, value in object_of(content.get("tools", {}), f"{label}: tools").items():
            if name in self._tools:
                raise BadCases(f"{label}: tools.{name} is defined in {self._tools[name][1]} too: keep one of them")
            fields = object_of(value, f"{label}: tools.{name}", ("description", "parameters"))
            self._tools[name] = tool_of({"name": name, **fields}, f"{label}: tools.{name}"), label
        for name, value in object_of(content.get("sets", {}), f"{label}: sets").items():
            if name in self._sets:
                raise BadCases(f"{label}: sets.{name} is defined in {self._sets[name][1]} too: keep one of them")
            self._sets[name] = each_text(value, f"{label}: sets.{name}", "names of tools"), label

    def resolve(self, wanted: Sequence[Any], origin: str) -> list[Tool]:
        """The tools of a case's list; one that comes twice, by name and by a set, is offered once.

        :raises BadCases: a name that is not defined, with the nearest one, or two different tools of one name.
        """
        found: dict[str, Tool] = {}
        for position, entry in enumerate(wanted):
            where = f"{origin}: tools[{position}]"
            for tool in self._of(entry, where):
                if found.setdefault(tool.name, tool) != tool:
                    raise BadCases(f"{where}: another tool of the case is called {tool.name!r} too")
        return list(found.values())

    def _of(self, entry: Any, where: str) -> list[Tool]:
        if isinstance(entry, dict):
            return [tool_of(entry, where)]
        if not isinstance(entry, str):
            raise BadCases(f'{where} is not a tool: give its name, "@" and the name of a set, or the whole tool')
        if entry.startswith("@"):
            name = entry.removeprefix("@")
            if name not in self._sets:
                raise BadCases(f"{where}: set {name!r} is not defined{_meant(name, self._sets)}")
            return [self._tools[member][0] for member in self._sets[name][0]]
        if entry not in self._tools:
            raise BadCases(f"{where}: tool {entry!r} is not defined{_meant(entry, self._tools)}")
        return [self._tools[entry][0]]


def tool_of(value: Any, where: str) -> Tool:
    """A whole tool, bare or as a chat completion request carries it. :raises BadCases: it is none."""
    fields = object_of(value, where)
    if "function" in fields:
        object_of(fields, where, ("type", "function"))
        if fields.get("type", "function") != "function":
            raise BadCases(f'{where}.type is not "function"')
        fields, where = object_of(fields["function"], f"{where}.function"), f"{where}.function"
    object_of(fields, where, ("name", "description", "parameters", "strict"))
    parameters = object_of(optional(fields, "parameters", {"type": "object", "properties": {}}), f"{where}.parameters")
    return Tool(
        name=text_of(fields.get("name"), f"{where}.name"),
        description=text_of(optional(fields, "description", ""), f"{where}.description", empty=True),
        parameters=parameters,
    )


def _meant(name: str, known: Iterable[str]) -> str:
    names = list(known)
    near = meant(name, names)
    if near:
        return f" (did you mean {near!r}?)"
    return ": define it in tools.json or tools/*.json beside the cases" + (
        f", which have {names[0]!r}" if names else ""
    )
