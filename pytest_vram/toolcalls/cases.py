"""Cases of tool calls as data, and reading them from JSONL.

One line of a case file is one case::

    {"id": "cron-last-run-01", "family": "cron-last-run", "category": "single", "language": "en",
     "messages": [{"role": "user", "content": "When did the backup job last run?"}],
     "tools": ["cron_last_run", "cron_list"],
     "expect": [{"name": "cron_last_run", "arguments": {"job": ["backup"]}}]}

``tools`` has names of tools, ``@NAME`` of a set of them, or whole tools. Names are defined beside the file, in
``tools.json`` or ``tools/*.json``::

    {"tools": {NAME: {"description": …, "parameters": …}}, "sets": {NAME: [NAME, …]}}
"""

from __future__ import annotations

import hashlib
import heapq
import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

#: What a case is about. ``single``: one tool, one call. ``choice``: the right one among several tools. ``parallel``:
#: several calls in one answer. ``multi_turn``: tool results are in the conversation. ``irrelevance``: no tool fits.
#: ``nested``: an argument is an object. ``enum``: one value of a list. ``array``: an argument is a list. ``units``:
#: numbers with units. ``long_list``: 20 or 40 tools. ``missing``: what a tool requires was not said, so that no call
#: can be right yet.
CATEGORIES = (
    "single",
    "choice",
    "parallel",
    "multi_turn",
    "irrelevance",
    "nested",
    "enum",
    "array",
    "units",
    "long_list",
    "missing",
)


class Tool(msgspec.Struct, frozen=True, kw_only=True):
    """A tool that a model may call. :ivar parameters: a JSON Schema of type ``object``."""

    name: str
    description: str
    parameters: dict[str, Any]

    def as_openai(self) -> dict[str, Any]:
        """The tool as a chat completion request carries it."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}


class ExpectedCall(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A call that is right.

    :ivar arguments: argument → every value that is right. :ivar omittable: those that may be left out.
    :ivar exact: those whose text is compared character by character (paths, patterns, queries); the others are
        compared as :mod:`pytest_vram.toolcalls.scoring` says.
    """

    name: str
    arguments: dict[str, list[Any]] = {}
    omittable: list[str] = []
    exact: list[str] = []


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """One decision of a model.

    :ivar family: the cases of a family ask for the same with other words, values or distractors: they succeed and fail
        together, so that statistics count families. :ivar language: BCP 47, of the request.
    :ivar messages: chat messages up to the decision; earlier calls and tool results in OpenAI's form.
    :ivar expect: the calls that are right, in any order; empty: an answer without a call is right.
    :ivar origin: file and line, for messages.
    """

    id: str
    family: str
    category: str
    messages: list[dict[str, Any]]
    tools: list[Tool]
    expect: list[ExpectedCall] = []
    language: str = "en"
    origin: str = ""


class CaseSet(msgspec.Struct, frozen=True, kw_only=True):
    """Cases that are asked together.

    :ivar name: ``shipped``, a file's name, or ``bfcl:simple_python``. :ivar digest: SHA-256 of the cases, 16
        hexadecimal digits; results are compared case by case where it is the same.
    """

    name: str
    cases: list[Case]
    digest: str

    def __iter__(self) -> Iterator[Case]:
        return iter(self.cases)

    def __len__(self) -> int:
        return len(self.cases)


def load(place: str | None = None, *, base: Path | None = None) -> CaseSet:
    """Read a set of cases.

    :param place: ``None`` or ``shipped``: the cases of this package; ``shipped:cron``: one file of them, several by
        commas; a JSONL file or a folder of them, relative to ``base``; ``bfcl:simple_python`` where ``bfcl-eval`` is
        installed.
    :raises BadCases: one message naming file, line, key and what is accepted.
    """
    from pytest_vram.toolcalls import places  # which needs the classes above

    found = places.read(place, base=base)
    places.require_offered(found)
    return found


def digest_of(cases: Sequence[Case]) -> str:
    """SHA-256 of cases without their origins, in the order of their ids, 16 hexadecimal digits."""
    ordered = sorted(cases, key=lambda case: case.id)
    fields = [{**msgspec.to_builtins(case), "origin": ""} for case in ordered]
    canonical = json.dumps(fields, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(canonical.encode("ascii")).hexdigest()[:16]


def stratified(cases: Sequence[Case], limit: int, *, seed: int) -> list[Case]:
    """``limit`` of the cases, the categories in turn, families before second cases of a family; the same for a seed.

    Neither the order of the files nor that of their lines matters. A family that has cases of several categories is
    taken last in each while others were asked less often.
    """
    shuffle = random.Random(seed)
    grouped: dict[str, dict[str, list[Case]]] = {}
    for case in sorted(cases, key=lambda case: case.id):
        grouped.setdefault(case.category, {}).setdefault(case.family, []).append(case)
    turns = sorted(grouped)
    shuffle.shuffle(turns)
    asked: dict[str, int] = {}
    # Per category, a heap of (how often the family was asked when this was written, its place by lot, family).
    waiting: dict[str, list[tuple[int, int, str]]] = {}
    for category in turns:
        families = sorted(grouped[category])
        shuffle.shuffle(families)
        waiting[category] = [(0, place, family) for place, family in enumerate(families)]
        for family in families:
            shuffle.shuffle(grouped[category][family])
    chosen: list[Case] = []
    while turns and len(chosen) < limit:
        for category in turns[: limit - len(chosen)]:
            family = _least_asked(waiting[category], asked)
            left = grouped[category][family]
            chosen.append(left.pop())
            asked[family] = asked.get(family, 0) + 1
            if not left:
                heapq.heappop(waiting[category])
        turns = [category for category in turns if waiting[category]]
    return chosen


def _least_asked(heap: list[tuple[int, int, str]], asked: dict[str, int]) -> str:
    """The family at the top of the heap after entries that were overtaken are put where they belong now."""
    while heap[0][0] != asked.get(heap[0][2], 0):
        _, place, family = heap[0]
        heapq.heapreplace(heap, (asked[family], place, family))
    return heap[0][2]
