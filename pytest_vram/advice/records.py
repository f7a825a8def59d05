"""Advice as data, which reports hold."""

from __future__ import annotations

from typing import Literal

import msgspec


class Saving(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Bytes that a change saves on one device; ``at_most`` is the upper end where it is a range."""

    bytes: int
    at_most: int | None = None

    @property
    def upper(self) -> int:
        """The upper end."""
        return self.bytes if self.at_most is None else self.at_most


class Advice(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, rename={"before": "from", "after": "to"}):
    """One change of one setting.

    :ivar setting: the engine's own long option (``model`` for another file). :ivar before: its value now.
    :ivar after: the value to try. :ivar device: label of the device that it is about. :ivar bucket: what shrinks most.
    :ivar saves_bytes: saving on that device by this change alone. :ivar saves_bytes_after: saving once those ranked
        before it are made as well (savings of a maximum do not add); ``None``: it contradicts one of them.
    :ivar saves_by_bucket: the saving of this change alone, bucket by bucket, at the lower ends; negative: it grows.
    :ivar takes: other device → bytes by which the deployment grows there, at the upper ends.
    :ivar source: who says so: ``estimate`` (the model's files), ``engine-log`` (computed from what was printed) or
        ``rule`` (no figure: both savings are ``None``).
    :ivar enough: whether the deployment fits with this change alone; ``None``: not known. :ivar enough_after: the same
        with those before it.
    :ivar effect: ``saves``, or ``nothing``: a setting that people try here and that would do nothing, with the reason
        in ``why``. :ivar cost: what it costs the user, in a sentence. :ivar flag: as written for this engine.
    :ivar proof: the line of the log, or other sign, that shows that it took effect.
    """

    setting: str
    before: str
    after: str
    effect: Literal["saves", "nothing"]
    why: str
    source: Literal["estimate", "engine-log", "rule"]
    device: str | None = None
    bucket: str | None = None
    saves_bytes: Saving | None = None
    saves_bytes_after: Saving | None = None
    saves_by_bucket: dict[str, int] = {}
    takes: dict[str, int] = {}
    enough: bool | None = None
    enough_after: bool | None = None
    cost: str = ""
    flag: str = ""
    proof: str = ""


def first_sufficient(advice: tuple[Advice, ...] | list[Advice]) -> tuple[Advice, ...]:
    """The changes to make: the first that is enough alone, else all up to the first that is enough after the others.

    :returns: nothing where no advice is known to be enough.
    """
    saving = [one for one in advice if one.effect == "saves"]
    for one in saving:
        if one.enough:
            return (one,)
    for position, one in enumerate(saving):
        if one.enough_after:
            return (*(other for other in saving[:position] if joins(other)), one)
    return ()


def joins(one: Advice) -> bool:
    """Whether what comes after this change counts on it: it saves something beside those before it."""
    return one.effect == "saves" and one.saves_bytes_after is not None and one.saves_bytes_after.upper > 0
