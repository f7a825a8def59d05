"""Processes that are not of the run and grow on its devices while a window is open.

A test that talks to a daemon (Ollama is the usual one) loads models into a process that this run did not start. Its
memory is in no figure of the run, so that a verdict on the test would be wrong.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import NamedTuple

from pytest_vram.keeper.messages import MEMBER_MARK, RUN_MARK, Stranger
from pytest_vram.measure import PYTEST, Members, Span, procfs, sockets
from pytest_vram.measure.probes import Probe
from pytest_vram.measure.probes.trust import exists
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
#: How far up from a process a pytest process of another run is looked for.
_MOST_ABOVE = 16
#: Nanoseconds to which the kernel tells when a process began.
_TICK = 10_000_000

#: Told processes of the run and a stranger; answers how they are connected, or ``None``.
Connection = Callable[[list[int], int], str | None]


class _Watched:
    """A stranger that has grown: looked at until a connection is seen.

    :ivar began: when it was forked (monotonic ns), where it may be a process that a test started and that hides it;
        else ``None``. :ivar seen: whether there was such a process in this PID namespace.
    """

    __slots__ = ("began", "due", "looks", "name", "seen")

    def __init__(self, name: str, now: int, *, seen: bool, began: int | None) -> None:
        self.name = name
        self.seen = seen
        self.began = began
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
        # Asked again each time: its number may be another process's by now.
        self._watched.pop(pid, None)
        while len(self._watched) >= _MOST_KNOWN:
            del self._watched[next(iter(self._watched))]
        self._watched[pid] = self._watch(pid, now)

    def _watch(self, pid: int, now: int) -> _Watched:
        began = self._began(pid, now)
        return _Watched(self._name(pid), now, seen=exists(pid, self._proc), began=began)

    def _began(self, pid: int, now: int) -> int | None:
        """When a process was forked, if a test may have started it: it is the same user's, in the control group of
        pytest, and of no other run."""
        stat = procfs.read_stat(pid, self._proc)
        if stat is None:
            return None
        group = _group(pid, self._proc)
        roots = [member.pid for member in self._members.all() if member.owner == PYTEST]
        if group is None or all(_group(root, self._proc) != group for root in roots):
            return None
        try:
            if os.stat(f"{self._proc}/{pid}").st_uid != os.getuid():
                return None
        except OSError:
            return None
        if self._of_a_run(stat):
            return None
        return now - round(procfs.age(stat) * 1e9)

    def _of_a_run(self, stat: procfs.Stat) -> bool:
        """Whether a process is marked as one of another run, or is a pytest process that has a keeper, or below one."""
        above: procfs.Stat | None = stat
        for _ in range(_MOST_ABOVE):
            if above is None or above.pid <= 1:
                return False
            if any(self._is_marked(pid) for pid in (above.pid, *(procfs.children(above.pid, self._proc) or ()))):
                return True
            above = procfs.read_stat(above.parent, self._proc)
        return False

    def _is_marked(self, pid: int) -> bool:
        return any(procfs.environment_value(pid, mark, self._proc) is not None for mark in (RUN_MARK, MEMBER_MARK))

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
            words, why = None, ""
            if seen.grew > DECISIVE:
                if watched is None:
                    watched = self._watch(pid, now)
                words = self._words(span, pid, now, look)
                why = _why(seen.grew, by_process.get(label, True), words, watched, span.t)
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


def _group(pid: int, proc: str) -> str | None:
    """The control groups of a process, as the kernel writes them."""
    try:
        with open(f"{proc}/{pid}/cgroup") as stream:
            return stream.read()
    except OSError:
        return None


def _why(grew: int, by_process: bool, words: str | None, watched: _Watched, opened: int) -> str:
    """For what reason a stranger that grew so much spoils the verdict on a window; empty where it does not.

    :param words: how the run is connected with it. :param opened: when the window was.
    """
    if words is not None:
        return f"it grew by {mib(grew)}, and process {words}: what the test made it load is in no figure of this run"
    if not by_process:
        # One that is not here may be of the run: the driver's PIDs are another namespace's then.
        return (
            f"it grew by {mib(grew)}, and the device does not say who holds its memory, so that the figures hold it"
            if watched.seen
            else ""
        )
    if watched.began is not None and watched.began + _TICK >= opened:
        return (
            f"it grew by {mib(grew)}, began during this test and may have been started by it in a way that hides it"
            f" (cleared environment, pipe); what it holds is in no figure of this run, unless {MEMBER_MARK} of the"
            " test's environment is in its own"
        )
    return ""
