"""Where cases are kept: the package's own, a user's file or folder, BFCL."""

from __future__ import annotations

import importlib.resources
import os
from collections.abc import Iterable, Sequence
from importlib.resources.abc import Traversable
from pathlib import Path

from pytest_vram.errors import BadCases
from pytest_vram.toolcalls.cases import Case, CaseSet, digest_of
from pytest_vram.toolcalls.files import read_file, text_lines
from pytest_vram.toolcalls.lines import case_of
from pytest_vram.toolcalls.strictly import decoded
from pytest_vram.toolcalls.toolbox import Toolbox
from pytest_vram.toolcalls.wanted import meant

SHIPPED = "shipped"
BFCL = "bfcl:"


def read(place: str | None, *, base: Path | None = None) -> CaseSet:
    """The cases of a place, each of them valid by itself. :raises BadCases: saying what cannot be used, and where."""
    try:
        return _read(SHIPPED if place is None else place.strip(), base)
    except OSError as error:  # of a folder: what goes wrong with a file is said with its name
        raise BadCases(f"cases cannot be read: {error.filename or place}: {error.strerror or error}") from None
    except RuntimeError as error:  # of a ~ that leads nowhere
        raise BadCases(f"the place {place!r} of the cases cannot be used: {error}") from None


def _read(wanted: str, base: Path | None) -> CaseSet:
    if not wanted:
        raise BadCases(f'the place of the cases is empty: give a JSONL file, a folder of them, or "{SHIPPED}"')
    if wanted == SHIPPED or wanted.startswith(f"{SHIPPED}:"):
        cases = _shipped(wanted.removeprefix(SHIPPED).removeprefix(":"))
    elif wanted.startswith(BFCL):
        from pytest_vram.toolcalls import bfcl  # few need it

        cases = bfcl.read(wanted.removeprefix(BFCL), base=base)
    else:
        cases = _written(Path(wanted).expanduser(), base or Path())
    return case_set(wanted if wanted.startswith((SHIPPED, BFCL)) else Path(wanted).name or wanted, cases)


def case_set(name: str, cases: list[Case]) -> CaseSet:
    """Cases as a set. :raises BadCases: two have the same id."""
    seen: dict[str, str] = {}
    for case in cases:
        if case.id in seen:
            raise BadCases(f"{case.origin}: id {case.id!r} is that of {seen[case.id]} too: give each case its own")
        seen[case.id] = case.origin
    return CaseSet(name=name, cases=cases, digest=digest_of(cases))


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


def _shipped(one: str) -> list[Case]:
    folder = importlib.resources.files("pytest_vram_fixtures").joinpath("toolcalls")
    names = sorted(entry.name.removesuffix(".jsonl") for entry in folder.iterdir() if entry.name.endswith(".jsonl"))
    if one and one not in names:
        near = meant(one, names)
        hint = f" (did you mean {near!r}?)" if near else ""
        raise BadCases(f"there are no shipped cases {one!r}{hint}: there are {', '.join(names)}")
    tools = Toolbox(_definitions(folder, "toolcalls"))
    return [
        case
        for name in ([one] if one else names)
        for case in _cases(folder.joinpath(f"{name}.jsonl"), f"toolcalls/{name}.jsonl", tools)
    ]


def _written(path: Path, base: Path) -> list[Case]:
    place, label = base / path, str(path)
    if place.is_dir():
        files = sorted(entry for entry in place.iterdir() if entry.suffix == ".jsonl")
        if not files:
            raise BadCases(f"folder {label} has no *.jsonl file: each line of one is a case")
        tools = Toolbox(_definitions(place, label))
        return [case for file in files for case in _cases(file, str(path / file.name), tools)]
    if not os.path.lexists(place):
        raise BadCases(f"there is no case file {label}{_meant(place)}")
    return _cases(place, label, Toolbox(_definitions(place.parent, str(path.parent))))


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


def _cases(entry: Traversable, label: str, tools: Toolbox) -> list[Case]:
    cases = []
    for number, text in text_lines(read_file(entry, label), label):
        origin = f"{label}:{number}"
        cases.append(case_of(decoded(text, origin, JSONL), origin, tools))
    if not cases:
        raise BadCases(f"{label} has no case: each line is one, as a JSON object")
    return cases


JSONL = "each line is one case, a whole JSON object"
