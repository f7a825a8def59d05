"""Who may go next: one decision about everybody who waits, from what is held now. Pure; no files, no clock.

Those who wait are looked at in the order of asking. Whoever fits goes. Whoever does not is *stuck*, and later ones that
fit may pass it, :data:`MOST_PASSED` times; then it is a barrier to all who compete with it, so that what they give
back becomes free for it. A test that wants a device alone is a barrier from the beginning: passing it could only make
it wait longer. Nobody holds anything while waiting, so nobody waits in a circle.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

#: Later tests that may pass one test that competes with them.
MOST_PASSED = 8


class Want(NamedTuple):
    """One test that waits.

    :ivar order: when it asked; earlier ones go first. :ivar takes: device key → bytes, beyond what its backends hold.
    :ivar ceiling: device key → what all may hold there together, as its run sees it; no entry: no ceiling.
    :ivar covered: device key → bytes of its own backends. :ivar devices: keys of its run's devices.
    :ivar exclusive: whether it wants them alone. :ivar passed: how many have passed it.
    :ivar mine: whether this process decides about it; else its own will, and room is kept for it.
    :ivar blocked: something else keeps it out, whatever room there is. :ivar competes: it has an interest in room, its
        own or that of a backend which it keeps in use.
    """

    id: str
    order: int
    devices: frozenset[str]
    takes: Mapping[str, int] = {}
    ceiling: Mapping[str, int] = {}
    covered: Mapping[str, int] = {}
    exclusive: bool = False
    passed: int = 0
    mine: bool = True
    blocked: bool = False
    competes: bool = False


class World(NamedTuple):
    """What is held now, over all runs.

    :ivar held: device key → bytes. :ivar loose: of these, what backends hold that can be ended when nobody uses them.
    :ivar leases: device key → number of running tests that hold some of it.
    :ivar tests: device key → number of running tests of any kind. :ivar alone: devices that some test has alone.
    """

    held: Mapping[str, int] = {}
    loose: Mapping[str, int] = {}
    leases: Mapping[str, int] = {}
    tests: Mapping[str, int] = {}
    alone: Collection[str] = ()


class Decision(NamedTuple):
    """What follows.

    :ivar admitted: those of mine that go, in order. :ivar passed: id → by how many of them it was passed now.
    :ivar stuck: all who do not go, mine and others', in order.
    """

    admitted: list[Want]
    passed: dict[str, int]
    stuck: list[Want]


def decide(wants: Sequence[Want], world: World, most_passed: int = MOST_PASSED) -> Decision:
    """Decide about everybody who waits."""
    held = dict(world.held)
    leases, tests = dict(world.leases), dict(world.tests)
    alone = set(world.alone)
    decision = Decision([], {}, [])
    for want in sorted(wants, key=lambda want: (want.order, want.id)):
        rivals = [other for other in decision.stuck if compete(want, other)]
        barred = any(
            other.exclusive or want.exclusive or other.passed + decision.passed.get(other.id, 0) >= most_passed
            for other in rivals
        )
        if barred or want.blocked or not _fits(want, held, world.loose, leases, tests, alone):
            decision.stuck.append(want)
            continue
        for key, size in want.takes.items():
            held[key] = held.get(key, 0) + size
            leases[key] = leases.get(key, 0) + 1
        for key in want.devices:
            tests[key] = tests.get(key, 0) + 1
        if want.exclusive:
            alone |= want.devices
        if not want.mine:
            continue
        decision.admitted.append(want)
        for other in rivals:
            decision.passed[other.id] = decision.passed.get(other.id, 0) + 1
    return decision


def compete(one: Want, two: Want) -> bool:
    """Whether one of them, running, can keep the other waiting."""
    if one.exclusive or two.exclusive:
        return not one.devices.isdisjoint(two.devices)
    if not (one.competes and two.competes):
        return False
    return not _interests(one).isdisjoint(_interests(two))


def _interests(want: Want) -> frozenset[str]:
    return frozenset(want.takes) or want.devices


def _fits(
    want: Want,
    held: Mapping[str, int],
    loose: Mapping[str, int],
    leases: Mapping[str, int],
    tests: Mapping[str, int],
    alone: Collection[str],
) -> bool:
    if any(key in alone for key in want.devices):
        return False
    if want.exclusive and any(tests.get(key) for key in want.devices):
        return False
    return all(
        deficit(want, key, held) <= 0 or _nothing_else(want, key, loose, leases)
        for key in want.takes
        if want.takes[key]
    )


def deficit(want: Want, key: str, held: Mapping[str, int]) -> int:
    """Bytes that are missing for it on one device; 0 or less where it fits."""
    ceiling = want.ceiling.get(key)
    return 0 if ceiling is None else held.get(key, 0) + want.takes.get(key, 0) - ceiling


def _nothing_else(want: Want, key: str, loose: Mapping[str, int], leases: Mapping[str, int]) -> bool:
    """Whether nothing will ever be given back there: then it is no use to wait, and it is judged by what it does."""
    return not leases.get(key) and loose.get(key, 0) <= want.covered.get(key, 0)
