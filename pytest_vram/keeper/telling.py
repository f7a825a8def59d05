"""Who holds what, and who waits for whom, in words and in tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pytest_vram.keeper.room import Room
from pytest_vram.keeper.tickets import Ticket, boot_clock
from pytest_vram.keeper.workers import Worker
from pytest_vram.leases import Lease, Sheet, Waiting
from pytest_vram.measure import procfs
from pytest_vram.text import printable
from pytest_vram.units import mib

_MOST_PIDS = 64


def stopped(pid: int) -> bool:
    """Whether somebody has stopped this process (``SIGSTOP``)."""
    stat = procfs.read_stat(pid)
    return stat is not None and stat.state == "T"


def named(sheet: Sheet) -> str:
    """A run, for people of another one."""
    state = ", which is stopped," if stopped(sheet.pid) else ""
    halted = next((pid for pid in sheet.pids[:_MOST_PIDS] if stopped(pid)), None)
    if halted is not None and not state:
        state = f", whose pytest (PID {halted}) is stopped,"
    return f"the pytest run in {sheet.place} (keeper {sheet.pid}){state}"


def amounts(holds: Mapping[str, int], room: Room) -> str:
    """``2861 MiB of gpu0``, with "and"; empty for nothing."""
    return " and ".join(f"{mib(size)} of {room.label(key)}" for key, size in holds.items() if size)


def in_the_way(ticket: Ticket, other: Ticket, takes: Mapping[str, int], room: Room) -> Iterator[str]:
    """Why a running test of the same run may be in the way of one that waits."""
    who = other.ask.name + (f" ({other.ask.worker})" if other.ask.worker else "")
    if other.exclusive:
        yield f"{who} has the device to itself"
    elif ticket.exclusive:
        yield f"{who} runs"
    elif not other.ask.alone.isdisjoint(ticket.uses) or not ticket.ask.alone.isdisjoint(other.uses):
        yield f"{who} uses the same backend, which one of the two needs alone"
    elif ticket.need and (sizes := amounts(takes, room)):
        yield f"{who} holds {sizes}"


def of_a_worker(worker: Worker, more: Mapping[str, int], room: Room) -> Iterator[str]:
    """Why what a process of the same run holds, besides what its tests were let in for, may be in the way."""
    if sizes := amounts(more, room):
        yield f"{worker.name} holds {sizes}{' beyond its test' if worker.runs else ' between its tests'}"


def of_another_run(sheet: Sheet, need: Mapping[str, int], room: Room) -> Iterator[str]:
    """Why another run may be in the way of a test with this need."""
    alone = [lease.name for lease in sheet.leases if lease.exclusive]
    if alone and not set(sheet.devices).isdisjoint(room.devices):
        yield f"{alone[0]} of {named(sheet)} has the device to itself"
    elif sizes := amounts({key: sheet.held.get(key, 0) for key in need}, room):
        yield f"{named(sheet)} holds {sizes}"


def tables(
    own: Sheet, others: Sequence[Sheet], room: Room, reasons: Mapping[str, list[str]]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Rows of leases and of waiting tests, of all runs; bytes by device label where this run has one.

    Any user of this machine may have written the sheets of the others: nothing in a row is obeyed by a terminal.
    """
    leases: list[dict[str, Any]] = []
    waiting: list[dict[str, Any]] = []
    for sheet in [own, *others]:
        place = printable(sheet.place)
        run = {"run": printable(sheet.run), "pid": sheet.pid, "place": place, "mine": sheet is own}
        leases += [{**run, **_lease(lease, room)} for lease in sheet.leases]
        waiting += [{**run, **_waiting(one, room), "for": reasons.get(one.id, [])} for one in sheet.waiting]
    return leases, waiting


def _lease(lease: Lease, room: Room) -> dict[str, Any]:
    return {
        "kind": lease.kind,
        "name": printable(lease.name),
        "worker": printable(lease.worker),
        "holds": {room.label(key): size for key, size in lease.holds.items()},
        "exclusive": lease.exclusive,
        "idle": lease.idle,
    }


def _waiting(waiting: Waiting, room: Room) -> dict[str, Any]:
    return {
        "name": printable(waiting.name),
        "worker": printable(waiting.worker),
        "takes": {room.label(key): size for key, size in waiting.takes.items()},
        "exclusive": waiting.exclusive,
        "seconds": round((boot_clock() - waiting.since) / 1e9, 3),
    }


def waiting_lines(waiting: Sequence[Mapping[str, Any]], after: float = 2.0) -> list[str]:
    """One line for each test of this run that waits longer than ``after`` seconds, out of ``State.waiting``."""
    lines = []
    for row in waiting:
        if row.get("mine") and row["seconds"] >= after:
            wants = " and ".join(f"{mib(size)} of {label}" for label, size in row["takes"].items())
            what = "the device to itself" if row["exclusive"] else wants or "its turn"
            worker = f" ({row['worker']})" if row["worker"] else ""
            reasons = "; ".join(row["for"])
            lines.append(
                f"vram: {row['name']}{worker} waits for {what}, {row['seconds']:.0f} s so far"
                + (f": {reasons}" if reasons else "")
            )
    return lines
