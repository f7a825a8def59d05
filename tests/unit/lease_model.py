"""A model of several runs that share devices: workers, a clock that jumps, and the policy between them."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from pytest_vram.leases import MOST_PASSED, Want, World, compete, decide


class Trial(NamedTuple):
    """One test: what it takes, for how long it runs, and whether it wants the devices alone."""

    takes: dict[str, int]
    seconds: float
    exclusive: bool = False


class Result(NamedTuple):
    """What happened.

    :ivar end: when the last test ended. :ivar passed: most later tests that passed one that competes with them.
    :ivar left: tests that never ran: a deadlock. :ivar over: sentences about what was held beyond a ceiling.
    """

    end: float
    passed: int
    left: int
    over: list[str]


class _Run:
    def __init__(self, number: int, tests: Sequence[Trial], workers: int) -> None:
        self.number = number
        self.todo = list(reversed(tests))
        self.idle = workers
        self.passes: Counter[str] = Counter()


def simulate(
    runs: Sequence[Sequence[Trial]], ceiling: dict[str, int], *, workers: int = 4, most_passed: int = MOST_PASSED
) -> Result:
    """Let every run's workers take its tests in order; each run decides for itself, on what the others show."""
    now, counter = 0.0, 0
    parts = [_Run(number, tests, workers) for number, tests in enumerate(runs)]
    waiting: dict[str, tuple[int, int, Trial]] = {}
    running: dict[str, tuple[int, Trial]] = {}
    overtaken: Counter[str] = Counter()
    ends: list[tuple[float, str]] = []
    over: list[str] = []
    devices = frozenset(ceiling)

    def want(name: str, of: int) -> Want:
        run, order, test = waiting[name]
        return Want(
            id=name,
            order=order,
            devices=devices,
            takes=test.takes,
            ceiling=ceiling,
            exclusive=test.exclusive,
            passed=overtaken[name],
            mine=run == of,
            competes=bool(test.takes),
        )

    def world() -> World:
        held: Counter[str] = Counter()
        leases: Counter[str] = Counter()
        alone: set[str] = set()
        for _, test in running.values():
            held.update(test.takes)
            leases.update(test.takes.keys())
            if test.exclusive:
                alone |= devices
        return World(held=held, leases=leases, tests=Counter(dict.fromkeys(devices, len(running))), alone=alone)

    def check() -> None:
        held: Counter[str] = Counter()
        for _, test in running.values():
            held.update(test.takes)
        for key, size in held.items():
            holders = [name for name, (_, test) in running.items() if test.takes.get(key)]
            if size > ceiling[key] and len(holders) > 1:
                over.append(f"{size} of {ceiling[key]} on {key} held by {holders}")
        if len(running) > 1 and any(test.exclusive for _, test in running.values()):
            over.append(f"a test that wants to be alone is not: {sorted(running)}")

    while True:
        for part in parts:
            while part.idle and part.todo:
                counter += 1
                waiting[f"{part.number}/{counter}"] = (part.number, counter, part.todo.pop())
                part.idle -= 1
        moved = True
        while moved:
            moved = False
            for part in parts:
                wants = [want(name, part.number) for name in waiting]
                decision = decide(wants, world(), most_passed)
                for admitted in decision.admitted:
                    moved = True
                    for other in wants:
                        if other.order < admitted.order and other.id in waiting and compete(other, admitted):
                            overtaken[other.id] += other.id in {one.id for one in decision.stuck}
                    _, _, test = waiting.pop(admitted.id)
                    running[admitted.id] = (part.number, test)
                    heapq.heappush(ends, (now + test.seconds, admitted.id))
                    check()
        if not ends:
            return Result(now, max(overtaken.values(), default=0), len(waiting), over)
        now, name = heapq.heappop(ends)
        number, _ = running.pop(name)
        parts[number].idle += 1
