"""Who holds the memory of a card, for the message of a backend that found too little of it."""

from __future__ import annotations

from collections.abc import Sequence

from pytest_vram.keeper.messages import Residue
from pytest_vram.keeper.settling import name_of, room
from pytest_vram.measure import PYTEST, TEST, UNKNOWN, Members
from pytest_vram.measure.emulated import EMULATED
from pytest_vram.measure.probes import Probe, Snapshot
from pytest_vram.readings import Reading
from pytest_vram.units import mib

#: What is not worth a word: bytes.
_WORTH_A_WORD = 1 << 20
_MOST = 6


def held_by(cards: Sequence[tuple[Probe, Snapshot]], members: Members, residues: Sequence[Residue], but: str) -> str:
    """One sentence for each card: what is free of it, and who holds the rest. Empty where nobody is known.

    :param but: backend (``name#generation``) that is not told of itself.
    """
    return " ".join(filter(None, (_card(probe, snapshot, members, residues, but) for probe, snapshot in cards)))


def played(devices: Sequence[tuple[Probe, Snapshot]]) -> str:
    """One sentence for each device that is played smaller than it is: what was asked for is then not what there is."""
    sentences = []
    for probe, snapshot in devices:
        info = probe.info
        if info.limit_from != EMULATED or not isinstance(info.capacity, Reading):
            continue
        free = room(probe, snapshot)
        rest = f": {free}" if free else ""
        sentences.append(f"{info.label} is played as a card of {mib(info.capacity.bytes)} (--vram-emulate){rest}.")
    return " ".join(sentences)


def _card(probe: Probe, snapshot: Snapshot, members: Members, residues: Sequence[Residue], but: str) -> str:
    label = probe.info.label
    left: dict[int, str] = {}
    for residue in residues:  # the largest first
        for pid, _ in residue.pids if residue.device == label else ():
            left.setdefault(pid, residue.test)
    found: list[tuple[int, str]] = []
    for pid, figure in snapshot.processes.items():
        member = members.get(pid)
        if member is None or member.owner == but:
            continue
        found.append((figure.held, f"process {pid} ({member.name}, {_whose(member.owner, left.get(pid))})"))
    found += [(held, f"process {pid} ({name_of(pid)}, not of this run)") for pid, held in snapshot.others.items()]
    if not probe.per_process:
        found += [(one.bytes, f"what was left by {one.test}") for one in residues if one.device == label]
    if snapshot.unlisted is not None:
        found.append((snapshot.unlisted, "the driver and processes that it does not list"))
    told = sorted((one for one in found if one[0] >= _WORTH_A_WORD), reverse=True)
    if not told:
        return ""
    who = "; ".join(f"{words} {mib(size)}" for size, words in told[:_MOST])
    more = f"; and {len(told) - _MOST} more" if len(told) > _MOST else ""
    free = room(probe, snapshot)
    return f"{label} ({f'{free}, ' if free else ''}held by: {who}{more})."


def _whose(owner: str, test: str | None) -> str:
    if owner == PYTEST:
        return "pytest itself" + (f", left behind by {test}" if test else "")
    if owner == TEST:
        return f"left behind by {test}" if test else "of a test"
    return "of some backend" if owner == UNKNOWN else f"backend {owner}"
