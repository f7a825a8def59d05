"""The result of an estimate: a ledger of predicted bytes with what is behind them."""

from __future__ import annotations

from typing import Literal

import msgspec

from pytest_vram.ledger import Ledger
from pytest_vram.sizing.shape import Note


class ModelFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The model of an estimate.

    :ivar parameters: all of them. :ivar active_parameters: those that one token passes through: everything but the
        experts that are not chosen. :ivar non_expert_parameters: everything but routed experts.
    """

    architecture: str
    parameters: int
    active_parameters: int
    non_expert_parameters: int
    layers: int
    experts: int
    experts_used: int
    trained_context: int
    file_bytes: int
    quantization: str = ""
    name: str = ""
    source: str = ""


class Verdict(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Whether an estimate is within a budget.

    :ivar fits: ``yes``, ``no`` or ``inconclusive`` (the range of the estimate reaches over the limit, or a part of it
        is unknown). :ivar limit: bytes. :ivar spare: bytes left under the limit by the upper end, negative when they
        are missing. :ivar device: the device that decides (``sum`` for a limit on the sum).
    :ivar first: the setting to turn first, its new value and the bytes that it saves, when it does not fit.
    """

    fits: Literal["yes", "no", "inconclusive"]
    device: str
    limit: int
    predicted: int
    at_most: int
    spare: int
    reserve: int = 0
    first: Turn | None = None


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """One change of a setting.

    :ivar setting: the engine's own long option. :ivar saves: bytes on the deciding device, computed for this change
        alone. :ivar enough: whether the deployment fits with this change alone. :ivar command: the engine's command
        line with it; empty where it is another file of the model.
    """

    setting: str
    before: str
    after: str
    saves: int
    enough: bool
    command: tuple[str, ...] = ()


class Estimate(Ledger, frozen=True, kw_only=True):
    """A predicted :class:`~pytest_vram.ledger.Ledger`; every entry's source is ``estimate`` (or ``dry-run``).

    :ivar engine: whose rules were used. :ivar settings: the settings in force, defaults included.
    :ivar notes: what the figures are based on and what could not be known. :ivar command: the engine's command line.
    :ivar unknown: buckets of which only a lower bound is known.
    :ivar textbook_kv: bytes of the textbook formula ``2 · layers · KV heads · head size · context · bytes``, to be
        compared with, never used. :ivar pressure: one plain sentence: weights or KV/concurrency.
    """

    engine: str
    model: ModelFacts
    settings: dict[str, int | float | str | bool | None] = {}
    notes: tuple[Note, ...] = ()
    command: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    textbook_kv: int | None = None
    pressure: str = ""

    @property
    def exact(self) -> bool:
        """Whether nothing in it is unknown and no entry is a range."""
        return not self.unknown and all(entry.at_most is None for entry in self.entries)

    def at_most(self) -> dict[str, int]:
        """Device label → bytes at the upper end of every range (buckets in ``unknown`` have none: lower bounds)."""
        sums: dict[str, int] = {}
        for entry in self.entries:
            upper = entry.bytes if entry.at_most is None else entry.at_most
            sums[entry.device] = sums.get(entry.device, 0) + upper
        return sums
