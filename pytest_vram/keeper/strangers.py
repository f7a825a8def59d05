"""Processes that are not of the run and grow on its devices while a window is open.

A test that talks to a daemon (Ollama is the usual one) loads models into a process that this run did not start. Its
memory is in no figure of the run, so that a verdict on the test would be wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from pytest_vram.keeper.messages import Stranger
from pytest_vram.measure import Members, Span, procfs, sockets
from pytest_vram.measure.probes import Probe
from pytest_vram.units import mib

#: Growth above which a stranger spoils a verdict: bytes (contract, "What is counted").
DECISIVE = 64 << 20
#: What is not worth a line: bytes.
_WORTH_A_LINE = 1 << 20
_MOST = 20
#: Nanoseconds from one look for connections to the next; each look doubles it. One look takes 10 to 20 ms.
_FIRST_PAUSE = 250_000_000
_MOST_LOOKS = 8
_MOST_KNOWN = 1024

#: Told processes of the run and a stranger; answers how they are connected, or ``None``.
Connection = Callable[[list[int], int], str | None]


class _Watched:
    """A stranger that has grown: looked at until a connection is seen."""

    __slots__ = ("due", "looks", "name")

    def __init__(self, name: str, now: int) -> None:
        self.name = name
        self.looks = 0
        self.due = now


class _Contact(NamedTuple):
    at: int
    words: str


class Strangers:
    """What is known of strangers. Costs nothing while none grows.

    :param ignored: PIDs that are neither of the run nor strangers: the keeper and what it started for itself.
    """

    def __init__(
        self,
        members: Members,
        ignored: Callable[[], set[int]] = set,
        connection: Connection = sockets.connection,
        proc: str = "/proc",
    ) -> None:
        self._members = members
        self._ignored = ignored
        self._connection = connection
        self._proc = proc
        self._watched: dict[int, _Watched] = {}
        self._contacts: dict[int, _Contact] = {}

    def grew(self, pid: int, now: int) -> None:
        """A stranger has grown by more than :data:`DECISIVE` in some span: the next tick looks who talks to it."""
        if pid in self._ignored():
            return
        if pid not in self._watched:
            while len(self._watched) >= _MOST_KNOWN:
                del self._watched[next(iter(self._watched))]
            self._watched[pid] = _Watched(self._name(pid), now)
        watched = self._watched[pid]
        watched.looks, watched.due = 0, now

    def tick(self, now: int) -> None:
        """Look again at those that grew and were not talked to, ever more rarely."""
        for pid, watched in self._watched.items():
            if now >= watched.due and watched.looks < _MOST_LOOKS:
                watched.due = now + (_FIRST_PAUSE << watched.looks)
                watched.looks += 1
                if self._look(pid, now):
                    watched.looks = _MOST_LOOKS

    def _look(self, pid: int, now: int) -> bool:
        words = self._connection([member.pid for member in self._members.all()], pid)
        if words is not None:
            self._contacts[pid] = _Contact(now, words)
            while len(self._contacts) > _MOST_KNOWN:
                del self._contacts[next(iter(self._contacts))]
        return words is not None

    def _name(self, pid: int) -> str:
        """Program of a process, with its script or its verb; not all its arguments, which may hold secrets."""
        found = procfs.program(pid, self._proc)
        if found is not None:
            return found
        stat = procfs.read_stat(pid, self._proc)
        return stat.name if stat is not None else "a process that cannot be seen"

    def of(self, span: Span, probes: list[Probe], now: int, *, look: bool = True) -> list[Stranger]:
        """Strangers of a span, those that grew most first.

        :param look: whether to look for connections of those of whom none is known; one look takes 10 to 20 ms.
        """
        if not span.strangers and not span.unlisted:
            return []
        found: list[Stranger] = []
        by_process = {probe.info.label: probe.per_process for probe in probes}
        ignored = self._ignored()
        for (label, pid), seen in span.strangers.items():
            # The driver may list a process of the run for a moment after it has ended.
            ours = self._members.get(pid) is not None or (label, pid) in span.shares
            if pid in ignored or ours or seen.grew < _WORTH_A_LINE:
                continue
            watched = self._watched.get(pid)
            words = self._words(span, pid, now, look) if seen.grew > DECISIVE else None
            why = _why(seen.grew, by_process.get(label, True), words)
            found.append(
                Stranger(
                    pid=pid,
                    name=watched.name if watched is not None else self._name(pid),
                    device=label,
                    held=seen.held,
                    grew=seen.grew,
                    talked_to=words is not None,
                    decisive=bool(why),
                    why=why,
                )
            )
        for label, seen in span.unlisted.items():
            # Where only a device figure exists, what is not listed is the run's own memory as well.
            if by_process.get(label, True) and seen.grew > DECISIVE:
                name = "processes that the driver does not list"
                found.append(Stranger(pid=0, name=name, device=label, held=seen.held, grew=seen.grew))
        return sorted(found, key=lambda stranger: -stranger.grew)[:_MOST]

    def _words(self, span: Span, pid: int, now: int, look: bool) -> str | None:
        contact = self._contacts.get(pid)
        if look and (contact is None or contact.at < span.t) and self._look(pid, now):
            contact = self._contacts[pid]
        return contact.words if contact is not None and contact.at >= span.t else None

    def forget(self) -> None:
        """No window is open: nothing is watched any more."""
        self._watched.clear()


def _why(grew: int, by_process: bool, words: str | None) -> str:
    if grew <= DECISIVE:
        return ""
    if words is not None:
        return f"it grew by {mib(grew)}, and process {words}: what the test made it load is in no figure of this run"
    if not by_process:
        return f"it grew by {mib(grew)}, and the device does not say who holds its memory, so that the figures hold it"
    return ""
