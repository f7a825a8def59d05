"""Boot logs written from random figures, in the format of each era of each engine: what a reader must give back.

Each module of this package has ``WRITERS``: era → a function that writes one log.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from random import Random
from typing import Any

import msgspec

from pytest_vram.ledger import Entry


class Written(msgspec.Struct, frozen=True, kw_only=True):
    """A log, and what it says.

    :ivar text: the log. :ivar entries: its buffers with bytes as printed (rounded to the printed digits); ``detail``
        and the order do not matter. :ivar facts: facts that the reader must give back, at least.
    :ivar ready: whether the log ends with a running server. :ivar failure: kind of its failure.
    """

    engine: str
    text: str
    entries: tuple[Entry, ...]
    devices: dict[str, str] = {}
    facts: dict[str, Any] = {}
    ready: bool = True
    failure: str | None = None


Writer = Callable[[Random], Written]
_MODULES: tuple[str, ...] = ("llama", "vllm", "sglang", "ollama", "transformers")


def writers() -> dict[str, Writer]:
    """``engine/era`` → its writer, of all engines."""
    found: dict[str, Writer] = {}
    for module in _MODULES:
        table: dict[str, Writer] = importlib.import_module(f"{__name__}.{module}").WRITERS
        found.update({f"{module}/{era}": writer for era, writer in table.items()})
    return found
