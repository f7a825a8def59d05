"""Backends that nobody uses, and which of them are ended for a test that needs their room."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence

from pytest_vram.keeper.room import Backends, Holding
from pytest_vram.leases import MOST_PASSED, Want, World, deficit

#: Seconds for which a backend must have been idle before it is ended for another test: between two tests of the same
#: backend there is a moment in which nobody uses it.
LINGER = 0.2


class Idle:
    """The backends of a run that nobody uses. ``since``: label → when that began, on the monotonic clock."""

    def __init__(self, backends: Backends) -> None:
        self._backends = backends
        self._ending: set[str] = set()
        self.since: dict[str, float] = {}

    def stamp(self, holdings: Sequence[Holding], wanted: Collection[str]) -> None:
        """Note since when each backend is idle. ``wanted``: plans that running tests are about to use, or may again."""
        now = time.monotonic()
        idle = {
            holding.label
            for holding in holdings
            if holding.state == "ready" and not (holding.used or holding.attached or holding.plan in wanted)
        }
        self.since = {label: self.since.get(label, now) for label in idle}
        self._ending &= {holding.label for holding in holdings}

    def make_room(
        self,
        stuck: Sequence[Want],
        world: World,
        holdings: Sequence[Holding],
        uses: Callable[[Want], Collection[str]],
        who: Callable[[Want], str],
    ) -> None:
        """End idle backends for the first test that waits for their room: those idle longest, no more than it needs."""
        now = time.monotonic()
        for want in stuck:
            missing = {key: deficit(want, key, world.held) for key, size in want.takes.items() if size}
            missing = {key: size for key, size in missing.items() if size > 0}
            if not missing or want.blocked:
                continue
            kept = uses(want)
            ending = [holding for holding in holdings if holding.label in self._ending]
            hurry = want.passed >= MOST_PASSED or (want.mine and self._backends.workers() < 2)
            able = [
                holding
                for holding in holdings
                if holding.label in self.since
                and holding.plan not in kept
                and any(holding.holds.get(key) for key in missing)
            ]
            able = sorted((one for one in able if one not in ending), key=lambda one: self.since[one.label])
            chosen: list[Holding] = []
            for key, size in missing.items():
                size -= sum(holding.holds.get(key, 0) for holding in [*ending, *chosen])
                for holding in able:
                    if size > 0 and holding not in chosen and holding.holds.get(key):
                        chosen.append(holding)
                        size -= holding.holds[key]
                if size > 0 and world.leases.get(key):
                    return  # what runs there must end first in any case
            for holding in chosen:
                if hurry or now - self.since[holding.label] >= LINGER:
                    self._ending.add(holding.label)
                    self._backends.end(holding.label, f"{who(want)} needs its room, and nobody uses it")
            return
