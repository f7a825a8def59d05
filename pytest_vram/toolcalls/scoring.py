"""Whether calls are the right ones: names, arguments, types and values, calls in any order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from pytest_vram.toolcalls.cases import ExpectedCall, Tool
from pytest_vram.toolcalls.tolerant import Defect


class Match(NamedTuple):
    """Calls beside what was expected.

    :ivar pairs: (index of the call, index of the expected call), by the matching with the fewest defects.
    :ivar defects: per call, what is wrong with it; a missing or an extra call is a defect of its own at the end.
    """

    pairs: tuple[tuple[int, int], ...]
    defects: tuple[Defect, ...]


def against_schema(name: str | None, arguments: Any, tools: Sequence[Tool]) -> list[Defect]:
    """What is wrong with one call by its tool's schema alone.

    Kinds: ``invented_tool``, ``near_miss_tool``, ``missing_field``, ``extra_field``, ``misspelt_field``,
    ``wrong_type``, ``wrong_value`` (not in an ``enum``, outside of a range).
    """
    raise NotImplementedError  # frame


def match(calls: Sequence[tuple[str | None, Any]], expected: Sequence[ExpectedCall], tools: Sequence[Tool]) -> Match:
    """Pair (name, arguments) of calls with the expected ones, in any order (bipartite, minimal cost).

    Kinds besides those of :func:`against_schema`: ``no_call``, ``extra_call``, ``irrelevant_call``, ``wrong_value``.
    """
    raise NotImplementedError  # frame
