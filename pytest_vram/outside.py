"""A budget that was broken outside of any test: in a teardown, between tests, or after the last.

A test is judged by its set-up and call. What is held beyond them is held all the same, and a card is full without
asking whose turn it was: so the run fails for it, and no test does.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from pytest_vram.blame import Outside
from pytest_vram.keeper.messages import State
from pytest_vram.readings import Reading
from pytest_vram.report.records import OutsideRecord, TestRecord
from pytest_vram.spec import Limits
from pytest_vram.units import mib, with_mib

_SHOWN = 5


def records(state: State | None, answered: Collection[int], known: Iterable[Outside]) -> list[OutsideRecord]:
    """Times over the budget for which no test answers.

    :param answered: ``begin`` of those for which one of several short tests does. :param known: between which tests
        others fell, where that is known better than to the keeper.
    """
    if state is None:
        return []
    places = {one.begin: one for one in known}
    found: list[OutsideRecord] = []
    for over in state.over:
        if over.judged or over.begin in answered:
            continue
        place = places.get(over.begin, Outside(over.begin, over.after, over.before))
        found.append(
            OutsideRecord(
                device=over.device,
                peak=over.bytes,
                limit=over.limit,
                seconds=round((over.last - over.begin) / 1e9, 3),
                after=place.after,
                before=place.before,
            )
        )
    return found


def sentences(found: Sequence[OutsideRecord], budget: Limits | None) -> list[str]:
    """What is said of them, the largest first."""
    shown = sorted(found, key=lambda one: one.limit - one.peak)
    text = budget.text if budget is not None else ""
    lines = [_sentence(one, text) for one in shown[:_SHOWN]]
    if len(shown) > _SHOWN:
        lines.append(f"the budget was broken outside of any test {len(shown) - _SHOWN} more times; the report has them")
    return lines


def _sentence(one: OutsideRecord, budget: str) -> str:
    if one.after and one.before:
        when = f"between the end of {one.after} and the beginning of {one.before} (the teardown of {one.after}?)"
    elif one.after:
        when = f"after {one.after}, the last test (its teardown, or that of a fixture of the whole run?)"
    else:
        when = f"before {one.before}, the first test" if one.before else "while no test ran"
    return (
        f"the budget {budget} was broken outside of any test: {mib(one.peak)} of {one.device},"
        f" {mib(one.peak - one.limit)} over the limit {with_mib(one.limit)}, {when}. This fails the run, and no test"
    )


def undecided(state: State | None, budget: Limits | None, tests: Sequence[TestRecord]) -> list[str]:
    """Where only the upper end of the whole run's peak is over the budget, and no test says so."""
    if state is None or budget is None:
        return []
    lines = []
    for label, figure in state.peak.items():
        limit = budget.of(label)
        if limit is None or not isinstance(figure, Reading) or not figure.bytes <= limit < figure.upper:
            continue
        if any(_is_over(test.peak, label, limit) for test in tests):
            continue
        lines.append(
            f"outside of any test the run held at least {mib(figure.bytes)} and at most {mib(figure.upper)} of {label}:"
            f" whether the budget {with_mib(limit)} held in teardowns and between tests is not known"
        )
    return lines


def _is_over(peaks: Mapping[str, object], label: str, limit: int) -> bool:
    figure = peaks.get(label)
    return isinstance(figure, Reading) and figure.upper > limit
