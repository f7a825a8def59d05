"""Whether calls are the right ones: names, arguments, types and values, calls in any order.

How values are compared says :mod:`pytest_vram.toolcalls.values`, how a schema is read
:mod:`pytest_vram.toolcalls.schemas`. An argument may be left out only where the expected call says so; an argument that
is not expected must have its schema's default.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from pytest_vram.text import printable
from pytest_vram.toolcalls import schemas
from pytest_vram.toolcalls.cases import ExpectedCall, Tool
from pytest_vram.toolcalls.names import nearest
from pytest_vram.toolcalls.schemas import Flaw
from pytest_vram.toolcalls.tolerant import Defect
from pytest_vram.toolcalls.values import differences, same

#: Steps that an exact matching may take; beyond it calls take the first expected call that they fit best.
_STEPS = 300_000
#: Defects that are told of one answer, and characters of one.
_MOST, _LONGEST = 200, 1000


class Match(NamedTuple):
    """Calls beside what was expected.

    :ivar pairs: (index of the call, index of the expected call), by the matching with the fewest defects.
    :ivar defects: per call, what is wrong with it; a missing or an extra call is a defect of its own at the end.
    :ivar note: that the matching is not proven to have the fewest defects, where there are too many calls; else "".
    """

    pairs: tuple[tuple[int, int], ...]
    defects: tuple[Defect, ...]
    note: str = ""


def against_schema(name: str | None, arguments: Any, tools: Sequence[Tool]) -> list[Defect]:
    """What is wrong with one call by its tool's schema alone.

    Kinds: ``invented_tool``, ``near_miss_tool``, ``missing_field``, ``extra_field``, ``misspelt_field``,
    ``wrong_type``, ``wrong_value`` (not in an ``enum``, outside of a range). The arguments of a near miss are judged by
    the tool that was meant.
    """
    by_name = {tool.name: tool for tool in tools}
    naming, meant = _naming(name, by_name)
    flaws = schemas.inspect(arguments, by_name[meant].parameters)[0] if meant is not None else []
    return [*naming, *(_defect(flaw) for flaw in flaws)]


def match(calls: Sequence[tuple[str | None, Any]], expected: Sequence[ExpectedCall], tools: Sequence[Tool]) -> Match:
    """Pair (name, arguments) of calls with the expected ones, in any order (bipartite, minimal cost).

    Kinds besides those of :func:`against_schema`: ``no_call``, ``extra_call``, ``irrelevant_call``, ``wrong_value``. A
    call of another tool than the expected one is one ``extra_call``, which names what would have been right.
    """
    by_name = {tool.name: tool for tool in tools}
    named = [_naming(name, by_name) for name, _ in calls]
    paired, note = _paired(calls, [meant for _, meant in named], expected, by_name)
    taken = set(paired.values())
    missing = [one for index, one in enumerate(expected) if index not in taken]
    defects: list[Defect] = []
    surplus: list[Defect] = []
    for index, (name, arguments) in enumerate(calls):
        naming, meant = named[index]
        defects += naming
        if index in paired:
            wanted = expected[paired[index]]
            defects += map(_defect, _flaws(arguments, wanted, by_name.get(wanted.name)))
        elif not expected:
            surplus.append(Defect("irrelevant_call", -1, f"{_shown(name)} is called, where no tool fits"))
        elif missing:
            wanted = missing.pop(0)
            if not naming:
                detail = f"{_shown(name)} is called, right would be a call of {_shown(wanted.name)}"
                surplus.append(Defect("extra_call", -1, detail))
        elif not naming:
            known = any(meant == one.name for one in expected)
            detail = f"{_shown(name)} is called {'too often' if known else 'besides'}: no such call is right"
            surplus.append(Defect("extra_call", -1, detail))
        if len(defects) + len(surplus) > _MOST:
            break
    absent = [Defect("no_call", -1, f"a call of {_shown(one.name)} is missing") for one in missing]
    pairs = tuple(sorted(paired.items()))
    return Match(pairs=pairs, defects=(*defects[:_MOST], *surplus[:_MOST], *absent[:_MOST]), note=note)


def _shown(name: str | None) -> str:
    return "a tool without a name" if name is None else repr(printable(name[:80]))


def _defect(flaw: Flaw) -> Defect:
    detail = printable(flaw.detail[:_LONGEST])
    return Defect(flaw.kind, -1, detail)


def _naming(name: str | None, by_name: Mapping[str, Tool]) -> tuple[list[Defect], str | None]:
    """What is wrong with the name of a tool, and the tool that was meant."""
    if name is None:
        return [Defect("invented_tool", -1, "a call names no tool")], None
    if name in by_name:
        return [], name
    near = nearest(name, by_name)
    if near is not None:
        detail = f"{_shown(name)} is not offered; it is near to {_shown(near)}"
        return [Defect("near_miss_tool", -1, detail)], near
    return [Defect("invented_tool", -1, f"{_shown(name)} is not offered")], None


def _flaws(arguments: Any, expected: ExpectedCall, tool: Tool | None) -> list[Flaw]:
    """All that is wrong with arguments: by the schema, and beside the values that are right."""
    parameters = tool.parameters if tool is not None else {}
    flaws, renamed = schemas.inspect(arguments, parameters)
    if arguments is not None and not isinstance(arguments, Mapping):
        return flaws
    given: dict[str, Any] = {renamed.get(str(key), str(key)): value for key, value in (arguments or {}).items()}
    # What the schema refuses already is not told a second time.
    told = tuple(flaw.path for flaw in flaws if flaw.kind != "misspelt_field")
    for name, allowed in expected.arguments.items():
        if name in given:
            found = differences(given[name], allowed, name, exact=name in expected.exact)
            flaws += [Flaw(*one) for one in found if not _covered(one.path, told)]
        elif name not in expected.omittable and not _covered(name, told):
            flaws.append(Flaw("missing_field", name, f"{name} is missing"))
    for key, value in given.items():
        if len(flaws) > _MOST:
            break
        if key in expected.arguments or _covered(key, told):
            continue
        default = schemas.default_of(parameters, key)
        if default is None or not same(value, default[0]):
            flaws.append(Flaw("wrong_value", key, f"{printable(key[:80])} was not asked for"))
    return flaws


def _covered(path: str, told: Sequence[str]) -> bool:
    """Whether a path, one inside of it or one around it was told."""
    for other in told:
        longer, shorter = (path, other) if len(path) > len(other) else (other, path)
        if longer.startswith(shorter) and (len(longer) == len(shorter) or longer[len(shorter)] in ".["):
            return True
    return False


def _paired(
    calls: Sequence[tuple[str | None, Any]],
    meant: Sequence[str | None],
    expected: Sequence[ExpectedCall],
    by_name: Mapping[str, Tool],
) -> tuple[dict[int, int], str]:
    """Index of a call → index of the expected call that it is held against: always one of the same tool."""
    paired: dict[int, int] = {}
    note = ""
    for name in dict.fromkeys(one.name for one in expected):
        rows = [index for index, one in enumerate(expected) if one.name == name]
        columns = [
            index for index, tool in enumerate(meant) if tool == name or (tool is None and calls[index][0] == name)
        ]
        if not columns:
            continue
        costs = [
            [len(_flaws(calls[column][1], expected[row], by_name.get(name))) for column in columns] for row in rows
        ]
        small = min(len(rows), len(columns))
        if small * small * max(len(rows), len(columns)) <= _STEPS:
            chosen = assignment(costs)
        else:
            chosen = _greedy(costs)
            note = "there are too many calls to find the matching with the fewest defects: another may have fewer"
        paired |= {columns[column]: rows[row] for row, column in chosen}
    return paired, note


def assignment(costs: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    """The assignment of rows to columns with the least sum of costs; of the longer side some are left over.

    The Hungarian method with potentials, in the form of shortest augmenting paths (Jonker and Volgenant 1987).

    :returns: (row, column) pairs, as many as the shorter side has, in the order of rows.
    """
    if not costs or not costs[0]:
        return []
    if len(costs) > len(costs[0]):
        turned = assignment([list(column) for column in zip(*costs, strict=True)])
        return sorted((row, column) for column, row in turned)
    width = len(costs[0])
    row_price = [0] * len(costs)
    column_price = [0] * (width + 1)
    row_of = [-1] * (width + 1)  # the last column is where each search begins
    for start in range(len(costs)):
        row_of[width] = start
        column = width
        least: list[float] = [float("inf")] * width
        came_from = [width] * width
        used = [False] * (width + 1)
        while row_of[column] >= 0:
            used[column] = True
            row = row_of[column]
            step, following = float("inf"), -1
            for other in range(width):
                if used[other]:
                    continue
                price = costs[row][other] - row_price[row] - column_price[other]
                if price < least[other]:
                    least[other], came_from[other] = price, column
                if least[other] < step:
                    step, following = least[other], other
            moved = int(step)
            for other in range(width + 1):
                if used[other]:
                    row_price[row_of[other]] += moved
                    column_price[other] -= moved
                elif other < width:
                    least[other] -= moved
            column = following
        while column != width:
            row_of[column] = row_of[came_from[column]]
            column = came_from[column]
    return sorted((row_of[column], column) for column in range(width) if row_of[column] >= 0)


def _greedy(costs: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    """Each pair of least cost that is still free, in turn."""
    ordered = sorted((cost, row, column) for row, line in enumerate(costs) for column, cost in enumerate(line))
    rows: set[int] = set()
    columns: set[int] = set()
    chosen: list[tuple[int, int]] = []
    for _, row, column in ordered:
        if row not in rows and column not in columns:
            rows.add(row)
            columns.add(column)
            chosen.append((row, column))
    return sorted(chosen)
