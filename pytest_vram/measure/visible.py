"""Which NVIDIA cards CUDA programs see, and in which order: the rules of ``CUDA_VISIBLE_DEVICES``.

Rules from the CUDA programming guide ("CUDA environment variables") and the MIG user guide ("Device enumeration"):

* entries are indices or the beginnings of UUIDs, and the first entry decides which; only what stands before the first
  entry that names no device counts; an index is read as C reads a number, so that ``1x`` is 1;
* a device that is named twice hides all of them; so does an empty value, or ``-1`` in front;
* CUDA uses one MIG slice only: the first that is visible. A program that sees a slice sees no whole card;
* indices count from the fastest card on unless ``CUDA_DEVICE_ORDER=PCI_BUS_ID``, while NVML counts by PCI address.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

_NUMBER = re.compile(r"[+-]?\d+", re.ASCII)
#: ``MIG-GPU-<uuid>/<GPU instance>/<compute instance>``: how drivers before 470 name slices.
_OLD_SLICE = re.compile(r"MIG-(GPU-[^/]+)/(\d+)/(\d+)", re.ASCII)
_ONE_SLICE = "CUDA uses one MIG slice only, the first that it sees: name others by their UUID"


class Slice(NamedTuple):
    """A MIG slice of a card. :ivar gi: number of its GPU instance. :ivar ci: of its compute instance."""

    uuid: str
    gi: int | None = None
    ci: int | None = None


class Card(NamedTuple):
    """A card in NVML's order, which is that of PCI addresses."""

    uuid: str
    name: str
    slices: tuple[Slice, ...] = ()


class Visible(NamedTuple):
    """What CUDA programs see.

    :ivar uuids: of cards and slices, in CUDA's order. :ivar certain: whether that order is known.
    :ivar note: what a user should know of it. :ivar reason: why nothing is visible, where nothing is.
    """

    uuids: tuple[str, ...]
    certain: bool = True
    note: str | None = None
    reason: str | None = None


def visible(cards: Sequence[Card], environment: Mapping[str, str]) -> Visible:
    """The cards and slices that a CUDA program with this environment sees."""
    text = environment.get("CUDA_VISIBLE_DEVICES")
    if not cards and not (text or "").startswith("MIG-"):
        return Visible((), reason="NVIDIA's driver lists no card")
    if text is None:
        uuids = tuple(card.uuid for card in cards)
        by_index = True
    else:
        entries = [entry.strip() for entry in text.split(",")]
        by_index = not entries[0].startswith(("GPU-", "MIG-"))
        numbers = _numbers(entries) if by_index else []
        named = [_at(number, cards) for number in numbers] if by_index else _by_uuid(entries, cards)
        valid = named[: named.index(None)] if None in named else named
        uuids = tuple(uuid for uuid in valid if uuid is not None)
        shown = f"CUDA_VISIBLE_DEVICES={text}"
        if len(set(uuids)) != len(uuids) or len(set(numbers)) != len(numbers):
            return Visible((), reason=f"{shown} names one device twice, so CUDA sees none")
        if not uuids:
            why = "hides all cards" if not entries[0] or entries[0].startswith("-") else "begins with no device of here"
            return Visible((), reason=f"{shown} {why}, so CUDA sees none")
    return _as_cuda_orders(_with_slices(uuids, cards), cards, environment, by_index=by_index)


def _numbers(entries: Sequence[str]) -> list[int]:
    """Indices up to the first entry that is none."""
    numbers: list[int] = []
    for entry in entries:
        found = _NUMBER.match(entry)
        if found is None or int(found[0]) < 0:
            break
        numbers.append(int(found[0]))
    return numbers


def _at(number: int, cards: Sequence[Card]) -> str | None:
    return cards[number].uuid if number < len(cards) else None


def _by_uuid(entries: Sequence[str], cards: Sequence[Card]) -> list[str | None]:
    kind = entries[0][:4]
    return [find(entry, cards) if entry.startswith(kind) else None for entry in entries]


def find(entry: str, cards: Sequence[Card]) -> str | None:
    """The UUID of the only card or slice whose UUID begins like this; ``None`` for none and for several."""
    old = _OLD_SLICE.fullmatch(entry)
    known = [card.uuid for card in cards] + [one.uuid for card in cards for one in card.slices]
    if entry in known:
        return entry
    if old is not None:
        slices = [one for card in cards if card.uuid == old[1] for one in card.slices]
        matches = [one.uuid for one in slices if (one.gi, one.ci) == (int(old[2]), int(old[3]))]
    else:
        matches = [uuid for uuid in known if uuid.startswith(entry)] if len(entry) > len("GPU-") else []
    return matches[0] if len(matches) == 1 else None


def _with_slices(uuids: tuple[str, ...], cards: Sequence[Card]) -> Visible:
    """A card that is cut up is seen as its first slice, and a program that sees a slice sees nothing else."""
    slices_of = {card.uuid: card.slices for card in cards}
    expanded = [slices_of[uuid][0].uuid if slices_of.get(uuid) else uuid for uuid in uuids]
    slices = [uuid for uuid in expanded if uuid not in slices_of]
    if not slices:
        return Visible(tuple(expanded))
    more = len(expanded) > 1 or any(len(card.slices) > 1 for card in cards)
    return Visible((slices[0],), note=_ONE_SLICE if more else None)


def _as_cuda_orders(
    found: Visible, cards: Sequence[Card], environment: Mapping[str, str], *, by_index: bool
) -> Visible:
    pci = environment.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
    if not by_index or pci or len(cards) < 2 or len({card.name for card in cards}) < 2:
        return found
    note = (
        "the cards differ, and without CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA counts from the fastest one on:"
        " here they are counted by PCI address"
    )
    return found._replace(certain=False, note=f"{found.note}; {note}" if found.note else note)
