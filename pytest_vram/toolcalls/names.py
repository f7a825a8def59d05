"""Names that are nearly the same: a tool's or a field's name with a slip of one or two letters."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

#: Longer names are compared by their letters only, not by edit distance, which takes quadratic time.
_LONGEST = 200
_PREFIX = re.compile(r"^(?:functions?|tools?|api|default_api|namespace)[.:/](?=.)", re.ASCII | re.IGNORECASE)
_SEPARATORS = re.compile(r"[\s_\-.]+")


def plain(name: str) -> str:
    """A name without what models add or change most: ``functions.`` before it, capitals, ``_``, ``-`` and spaces."""
    return _SEPARATORS.sub("", _PREFIX.sub("", name.strip())).casefold()


def distance(left: str, right: str, most: int) -> int:
    """Damerau's and Levenshtein's distance (optimal string alignment): letters to insert, drop, change or swap.

    :param most: larger distances are told as ``most + 1``.
    """
    if abs(len(left) - len(right)) > most:
        return most + 1
    before: list[int] = []
    above = list(range(len(right) + 1))
    for row, letter in enumerate(left, 1):
        current = [row]
        for column, other in enumerate(right, 1):
            cost = min(above[column] + 1, current[column - 1] + 1, above[column - 1] + (letter != other))
            swapped = row > 1 and column > 1 and letter == right[column - 2] and left[row - 2] == other
            if swapped:
                cost = min(cost, before[column - 2] + 1)
            current.append(cost)
        if min(current) > most:
            return most + 1
        before, above = above, current
    return min(above[-1], most + 1)


def slips(name: str) -> int:
    """How many letters may differ for two names to be the same one misspelt: none below 3, 1 below 8, then 2."""
    return 0 if len(name) < 3 else 1 if len(name) < 8 else 2


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that ``name`` is a slip of; of several the nearest, then the first; ``None``: it is none's."""
    if len(name) > _LONGEST:
        return None
    bare = plain(name)
    best: tuple[int, str] | None = None
    for candidate in known:
        goal = plain(candidate)
        if goal == bare and goal:
            return candidate
        allowed = slips(max(bare, goal, key=len))
        if len(goal) > _LONGEST or not allowed:
            continue
        steps = distance(bare, goal, allowed)
        if steps <= allowed and (best is None or steps < best[0]):
            best = steps, candidate
    return best[1] if best is not None else None


def pairs(unknown: Sequence[str], absent: Sequence[str]) -> dict[str, str]:
    """Unknown names → absent names that they are slips of; each absent name is taken once."""
    found: dict[str, str] = {}
    left = list(absent)
    for name in unknown[:_LONGEST]:
        meant = nearest(name, left)
        if meant is not None:
            found[name] = meant
            left.remove(meant)
    return found
