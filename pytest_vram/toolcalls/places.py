"""Where cases are kept: the package's own, a user's file or folder, BFCL."""

from __future__ import annotations

import importlib.resources
import os
from collections.abc import Iterable, Sequence
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import NamedTuple

from pytest_vram.errors import BadCases
from pytest_vram.toolcalls.cases import Case, CaseSet, digest_of
from pytest_vram.toolcalls.files import read_file, text_lines
from pytest_vram.toolcalls.lines import case_of
from pytest_vram.toolcalls.strictly import decoded
from pytest_vram.toolcalls.toolbox import Toolbox
from pytest_vram.toolcalls.wanted import meant

SHIPPED = "shipped"
BFCL = "bfcl:"
#: Lines without a usable case that are told of a place; where there are more it is no file of cases.
MOST_BAD = 100


class BadLine(NamedTuple):
    """A line that is no usable case. :ivar origin: file and line. :ivar why: a clause without them."""

    origin: str
    why: str


def read(place: str | None, *, base: Path | None = None, bad: list[BadLine] | None = None) -> CaseSet:
    """The cases of a place, each of them valid by itself.

    :param bad: takes the lines that cannot be used, in place of an error at the first of them.
    :raises BadCases: saying what cannot be used, and where.
    """
    try:
        return _read(SHIPPED if place is None else place.strip(), base, bad)
    except OSError as error:  # of a folder: what goes wrong with a file is said with its name
        raise BadCases(f"cases cannot be read: {error.filename or place}: {error.strerror or error}") from None
    except RuntimeError as error:  # of a ~ that leads nowhere
        raise BadCases(f"the place {place!r} of the cases cannot be used: {error}") from None


def _read(wanted: str, base: Path | None, bad: list[BadLine] | None) -> CaseSet:
    if not wanted:
        raise BadCases(f'the place of the cases is empty: give a JSONL file, a folder of them, or "{SHIPPED}"')
    if wanted == SHIPPED or wanted.startswith(f"{SHIPPED}:"):
        cases = _shipped(wanted.removeprefix(SHIPPED).removeprefix(":"), bad)
    elif wanted.startswith(BFCL):
        from pytest_vram.toolcalls import bfcl  # few need it

        cases = bfcl.read(wanted.removeprefix(BFCL), base=base)
    else:
        cases = _written(Path(wanted).expanduser(), base or Path(), bad)
    return case_set(wanted if wanted.startswith((SHIPPED, BFCL)) else Path(wanted).name or wanted, cases, bad)


def case_set(name: str, cases: list[Case], bad: list[BadLine] | None = None) -> CaseSet:
    """Cases as a set.

    :param bad: takes those whose id another has, in place of an error at the first of them.
    :raises BadCases: two have the same id.
    """
    seen: dict[str, Case] = {}
    for case in cases:
        first = seen.setdefault(case.id, case)
        if first is not case:
            _refuse(
                BadCases(f"{case.origin}: id {case.id!r} is that of {first.origin} too: give each case its own"),
                case.origin,
                bad,
            )
    return CaseSet(name=name, cases=list(seen.values()), digest=digest_of(list(seen.values())))


def _refuse(error: BadCases, origin: str, bad: list[BadLine] | None) -> None:
    """Raise an error about a line, or note it. :raises BadCases: it is not to be noted, or there are too many."""
    if bad is None:
        raise error
    said = str(error)
    why = said.removeprefix(f"{origin}: ") if said.startswith(f"{origin}: ") else f"the line{said.removeprefix(origin)}"
    bad.append(BadLine(origin, why))
    if len(bad) > MOST_BAD:
        raise BadCases(f"more than {MOST_BAD} lines are no usable cases; the last that was read: {said}")


def require_offered(cases: CaseSet) -> None:
    """Refuse cases that expect a tool which they do not offer. :raises BadCases: naming the first."""
    for case in cases.cases:
        offered = [tool.name for tool in case.tools]
        for number, call in enumerate(case.expect):
            if call.name not in offered:
                raise BadCases(f"{case.origin}: expect[{number}].name: {unoffered(call.name, offered)}")


def unoffered(name: str, offered: Sequence[str]) -> str:
    """A clause: this tool is not among those of the case."""
    near = meant(name, offered)
    hint = f" (did you mean {near!r}?)" if near else ""
    return f"tool {name!r} is not one of the case's tools{hint}: it offers {', '.join(offered[:8]) or 'none'}"


def _shipped(wanted: str, bad: list[BadLine] | None) -> list[Case]:
    folder = importlib.resources.files("pytest_vram_fixtures").joinpath("toolcalls")
    names = sorted(entry.name.removesuffix(".jsonl") for entry in folder.iterdir() if entry.name.endswith(".jsonl"))
    asked = list(dict.fromkeys(name.strip() for name in wanted.split(","))) if wanted else names
    for one in asked:
        if one not in names:
            near = meant(one, names)
            hint = f" (did you mean {near!r}?)" if near else ""
            raise BadCases(f"there are no shipped cases {one!r}{hint}: there are {', '.join(names)}")
    tools = Toolbox(_definitions(folder, "toolcalls"))
    return [
        case
        for name in asked
        for case in _cases(folder.joinpath(f"{name}.jsonl"), f"toolcalls/{name}.jsonl", tools, bad)
    ]


def _written(path: Path, base: Path, bad: list[BadLine] | None) -> list[Case]:
    place, label = base / path, str(path)
    if place.is_dir():
        files = sorted(entry for entry in place.iterdir() if entry.suffix == ".jsonl")
        if not files:
            raise BadCases(f"folder {label} has no *.jsonl file: each line of one is a case")
        tools = Toolbox(_definitions(place, label))
        return [case for file in files for case in _cases(file, str(path / file.name), tools, bad)]
    if not os.path.lexists(place):
        raise BadCases(f"there is no case file {label}{_meant(place)}")
    return _cases(place, label, Toolbox(_definitions(place.parent, str(path.parent))), bad)


def _meant(path: Path) -> str:
    here = path.parent
    if not here.is_dir():
        return f": folder {here} does not exist"
    files = [entry.name for entry in here.iterdir() if entry.suffix == ".jsonl"]
    near = meant(path.name, files)
    return f" in {here.resolve()}" + (f" (did you mean {near!r}?)" if near else "")


def _definitions(folder: Traversable, label: str) -> Iterable[tuple[str, bytes]]:
    """(label, content) of the files that define tools: ``tools.json``, then ``tools/*.json``."""
    single, several = folder.joinpath("tools.json"), folder.joinpath("tools")
    if single.is_file():
        yield f"{label}/tools.json", read_file(single, f"{label}/tools.json")
    if several.is_dir():
        for entry in sorted(several.iterdir(), key=lambda entry: entry.name):
            if entry.name.endswith(".json"):
                yield f"{label}/tools/{entry.name}", read_file(entry, f"{label}/tools/{entry.name}")


def _cases(entry: Traversable, label: str, tools: Toolbox, bad: list[BadLine] | None) -> list[Case]:
    cases, number = [], 0
    for number, text in text_lines(read_file(entry, label), label):
        origin = f"{label}:{number}"
        try:
            cases.append(case_of(decoded(text, origin, JSONL), origin, tools))
        except BadCases as error:
            _refuse(error, origin, bad)
    if not number:
        raise BadCases(f"{label} has no case: each line is one, as a JSON object")
    return cases


JSONL = "each line is one case, a whole JSON object"
