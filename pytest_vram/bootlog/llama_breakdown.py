"""The table of memory by device that llama.cpp prints when it ends, and in its trial of ``--fit``.

Figures are whole MiB, cut off and not rounded. Source: ``common_memory_breakdown_print`` in ``common/fit.cpp``, before
2026 ``llama_memory_breakdown_print``.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from pytest_vram.bootlog.devices import HOST, Labels

MIB = 1 << 20
HEADER = re.compile(r"\|\s*memory breakdown \[MiB\]\s*\|")
ROW = re.compile(
    r"\|\s++- (?P<name>\S{1,200})(?: \((?P<description>[^|]{0,200}?)\))?\s*+\|[^|]*?"
    r"\d{1,12} = +(?P<model>\d{1,12}) \+ +(?P<context>\d{1,12}) \+ +(?P<compute>\d{1,12})\b[^|]*\|",
    re.ASCII,
)
#: A line that is one of a table, in whatever form.
LIKE_ROW = re.compile(r"\|\s+- \S")
GPU = re.compile(r"(?P<total>\d{1,12}) = +(?P<free>\d{1,12}) \+ +\(", re.ASCII)
_UNACCOUNTED = re.compile(r"\) \+ +(-?\d{1,12}) *\|", re.ASCII)
MOST_ROWS = 256  # of one table: a machine has fewer devices


class Share(NamedTuple):
    """One row: bytes by column, cut off to MiB. ``unaccounted`` is signed: used by the driver but by no buffer."""

    name: str
    label: str
    model: int
    context: int
    compute: int
    total: int | None
    free: int | None
    unaccounted: int | None


class Breakdown:
    """The last table of a log."""

    def __init__(self) -> None:
        self.rows: list[Share] = []

    def read(self, text: str, labels: Labels) -> bool:
        """Take a line; false where it is none of a table."""
        if HEADER.search(text):
            self.rows = []
            return True
        if LIKE_ROW.search(text) is None:
            return False
        match = ROW.search(text)
        if match is not None and len(self.rows) < MOST_ROWS:
            self._add(match, labels)
        return True

    def _add(self, match: re.Match[str], labels: Labels) -> None:
        name, description = match["name"], match["description"]
        if name == "Host":
            labels.names.setdefault(HOST, "CPU")
            label = HOST
        else:
            label = labels.of(name) if description is None else labels.announced(name, description)
        gpu = GPU.search(match[0])
        rest = _UNACCOUNTED.search(match[0])
        self.rows.append(
            Share(
                name,
                label,
                model=int(match["model"]) * MIB,
                context=int(match["context"]) * MIB,
                compute=int(match["compute"]) * MIB,
                total=None if gpu is None else int(gpu["total"]) * MIB,
                free=None if gpu is None else int(gpu["free"]) * MIB,
                unaccounted=None if rest is None else int(rest[1]) * MIB,
            )
        )
