"""Which parts of a conversation leave a window, and in which order: a call with its results, oldest first."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import msgspec


class Part(msgspec.Struct, frozen=True):
    """What decides whether a part may leave.

    :ivar pinned: it never leaves. :ivar calls: ids of the tool calls that it asks for.
    :ivar answers: the call that it answers; an empty text answers the latest one that is open.
    :ivar user: a user's message.
    :ivar aside: not said in the conversation, such as a summary: it does not end the wait for results.
    """

    pinned: bool = False
    calls: tuple[str, ...] = ()
    answers: str | None = None
    user: bool = False
    aside: bool = False


class Unit(msgspec.Struct, frozen=True):
    """Parts that leave together.

    :ivar members: their places, rising. :ivar open: ids of calls in it that have no result yet.
    """

    members: tuple[int, ...]
    open: tuple[str, ...] = ()
    pinned: bool = False
    user: bool = False
    aside: bool = False


def units(parts: Sequence[Part]) -> list[Unit]:
    """The units of a conversation, by their first part.

    Servers that number calls anew in each reply use an id twice: a result belongs to the latest call of that id. A
    result without any call is a unit of its own.
    """
    members: dict[int, list[int]] = {}
    unanswered: dict[int, list[str]] = {}
    latest: dict[str, int] = {}
    for place, part in enumerate(parts):
        owner = place
        if part.answers is not None:
            found = latest.get(part.answers) if part.answers else _latest_open(unanswered)
            if found is not None:
                owner = found
                left = unanswered[owner]
                answered = part.answers or left[0]
                if answered in left:
                    left.remove(answered)
        members.setdefault(owner, []).append(place)
        if part.calls:
            unanswered[place] = list(part.calls)
            latest.update(dict.fromkeys(part.calls, place))
    return [
        Unit(
            members=tuple(places),
            open=tuple(unanswered.get(owner, ())),
            pinned=any(parts[place].pinned for place in places),
            user=parts[owner].user,
            aside=parts[owner].aside,
        )
        for owner, places in members.items()
    ]


def unanswerable(parts: Sequence[Part], answers: str) -> str:
    """Why a result with this id cannot be taken in: no call asks for it, or it is there already; "" where it can."""
    found = units(parts)
    if not answers:
        return "" if any(unit.open for unit in found) else "has no such call in the window"
    asking = [unit for unit in found if any(answers in parts[place].calls for place in unit.members)]
    if not asking:
        return "has no such call in the window"
    return "" if answers in asking[-1].open else "is there already"


def last_said(found: Sequence[Unit]) -> Unit | None:
    """The unit that the conversation goes on from."""
    return max((unit for unit in found if not unit.aside), key=lambda unit: unit.members[-1], default=None)


def leaving(parts: Sequence[Part], *, keep: int | None = None) -> Iterator[Unit]:
    """Units that may leave, oldest first.

    The last unit stays while calls in it wait for their results: they would come back to nothing. An older open call
    has been given up and leaves in its turn.

    :param keep: the place of a part that must stay, with all that leaves together with it.
    """
    found = units(parts)
    last = last_said(found)
    for unit in found:
        if unit.pinned or (unit is last and unit.open):
            continue
        if keep is not None and keep in unit.members:
            continue
        yield unit


def without(places: Iterable[int], count: int) -> list[int]:
    """The places of ``count`` parts that are left when these are gone."""
    gone = set(places)
    return [place for place in range(count) if place not in gone]


def _latest_open(unanswered: dict[int, list[str]]) -> int | None:
    return next((place for place in reversed(unanswered) if unanswered[place]), None)
