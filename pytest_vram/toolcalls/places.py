"""Where cases are kept: the package's own, a user's file or folder, BFCL; and how their files are opened.

A file may be anything that a path can name, so that nothing is opened that could block and nothing is read that is
larger than cases can be.
"""

from __future__ import annotations

import difflib
import importlib.resources
import os
import stat
from collections.abc import Iterable, Sequence
from importlib.resources.abc import Traversable
from pathlib import Path

from pytest_vram.errors import BadCases
from pytest_vram.toolcalls.cases import Case, CaseSet, digest_of
from pytest_vram.toolcalls.lines import case_of
from pytest_vram.toolcalls.strictly import decoded
from pytest_vram.toolcalls.toolbox import Toolbox

SHIPPED = "shipped"
BFCL = "bfcl:"
#: Bytes of one file, and of one line of it. A conversation that fills 128 K tokens has about 600 KB.
LARGEST_FILE = 64 << 20
LONGEST_LINE = 8 << 20


def read(place: str | None, *, base: Path | None = None) -> CaseSet:
    """The cases of a place, each of them valid by itself. :raises BadCases: saying what cannot be used, and where."""
    wanted = SHIPPED if place is None else place.strip()
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
    """Refuse a case that expects a tool which it does not offer: no model could be right. :raises BadCases: naming it."""
    for case in cases.cases:
        offered = [tool.name for tool in case.tools]
        for number, call in enumerate(case.expect):
            if call.name not in offered:
                raise BadCases(f"{case.origin}: expect[{number}].name: {unoffered(call.name, offered)}")


def unoffered(name: str, offered: Sequence[str]) -> str:
    """A clause: this tool is not among those of the case."""
    near = difflib.get_close_matches(name, offered, n=1, cutoff=0.6)
    meant = f" (did you mean {near[0]!r}?)" if near else ""
    return f"tool {name!r} is not one of the case's tools{meant}: it offers {', '.join(offered[:8]) or 'none'}"


def read_file(entry: Traversable, label: str) -> bytes:
    """All of a file that is a file. :raises BadCases: it is none, cannot be read, is too large, or no UTF-8."""
    try:
        data = _bytes_of(entry, label) if isinstance(entry, Path) else entry.read_bytes()
    except OSError as error:
        raise BadCases(f"{label} cannot be read: {error.strerror or error}") from None
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise BadCases(f"{label} is UTF-16 by its first bytes: save it as UTF-8")
    return data.removeprefix(b"\xef\xbb\xbf")


def text_lines(data: bytes, label: str) -> Iterable[tuple[int, str]]:
    """(number, text) of the lines that are not blank. :raises BadCases: a line that is no text, or is too long."""
    for number, line in enumerate(data.split(b"\n"), 1):
        if len(line) > LONGEST_LINE:
            raise BadCases(f"{label}:{number} is longer than {LONGEST_LINE >> 20} MiB: no case is")
        if b"\0" in line:
            raise BadCases(f"{label}:{number} holds a NUL byte: this is no text file")
        try:
            text = line.decode("utf-8").strip()
        except UnicodeDecodeError as error:
            raise BadCases(
                f"{label}:{number} is not UTF-8 at byte {error.start} of the line: save it as UTF-8"
            ) from None
        if text:
            yield number, text


def _bytes_of(path: Path, label: str) -> bytes:
    """Without waiting: opening a named pipe would, for a writer that may never come."""
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    with open(handle, "rb") as file:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise BadCases(f"{label} is not a file: cases are read from JSONL files and folders of them")
        data = file.read(LARGEST_FILE + 1)
    if len(data) > LARGEST_FILE:
        raise BadCases(f"{label} is larger than {LARGEST_FILE >> 20} MiB: split it, and name the folder")
    return data


def _shipped(one: str) -> list[Case]:
    folder = importlib.resources.files("pytest_vram_fixtures").joinpath("toolcalls")
    names = sorted(entry.name.removesuffix(".jsonl") for entry in folder.iterdir() if entry.name.endswith(".jsonl"))
    if one and one not in names:
        near = difflib.get_close_matches(one, names, n=1, cutoff=0.6)
        meant = f" (did you mean {near[0]!r}?)" if near else ""
        raise BadCases(f"there are no shipped cases {one!r}{meant}: there are {', '.join(names)}")
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
    near = difflib.get_close_matches(path.name, files, n=1, cutoff=0.6)
    return f" in {here.resolve()}" + (f" (did you mean {near[0]!r}?)" if near else "")


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
