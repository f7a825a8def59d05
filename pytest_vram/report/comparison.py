"""Two deployments, or two runs, compared: the document of ``vram compare --json``, whose schema is published."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from pytest_vram import in_force
from pytest_vram.differences import Change, Difference, between, ends_of
from pytest_vram.readings import Measured, Reading
from pytest_vram.report.deployments import HOST, Deployment, Side, aligned, changed, untold
from pytest_vram.tolerance import PEAK, Ends, Held, Tolerance

COMPARE_FORMAT = "pytest-vram/compare/1"

Basis = Literal["measured", "printed", "predicted"]


class SideRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One of the two. :ivar origin: as it was named. :ivar kind: ``run``, ``log``, ``boot`` or ``estimate``."""

    origin: str
    kind: str
    run: str | None = None
    started: str | None = None


class Total(msgspec.Struct, frozen=True, kw_only=True):
    """All buckets of one device: bytes, at least and (where it is a range) at most.

    :ivar least: difference, second minus first, at least, and ``most`` at most: the sum over the buckets.
    :ivar basis: what the totals are: ``measured``, ``printed`` by the engine, or ``predicted``.
    """

    device: str
    before: int | None
    after: int | None
    least: int
    most: int
    before_at_most: int | None = None
    after_at_most: int | None = None
    basis_before: Basis | None = None
    basis_after: Basis | None = None


class Pair(msgspec.Struct, frozen=True, kw_only=True):
    """One deployment before and after. ``differences`` of a device add up to that of its total exactly."""

    name: str
    engine_before: str
    engine_after: str
    totals: list[Total]
    differences: list[Difference]
    changes: list[Change]


class TestPair(msgspec.Struct, frozen=True, kw_only=True):
    """A test that both runs have. :ivar peaks: of devices that both measured, as in :class:`Total`."""

    __test__ = False  # not a test class

    nodeid: str
    outcome_before: str
    outcome_after: str
    peaks: list[Total]


class Judged(msgspec.Struct, frozen=True, kw_only=True):
    """One figure held against a tolerance. :ivar where: deployment or test, with the device.
    :ivar allowed: most bytes that are no growth, from the lower end of what was before. :ivar reason: why undecided.
    """

    what: str
    where: str
    before: int | None
    after: int | None
    allowed: int | None
    result: Held
    reason: str = ""


class CompareDocument(msgspec.Struct, frozen=True, kw_only=True):
    """``vram compare --json``.

    :ivar deployments: that both have, before and after. :ivar tests: that both runs have. :ivar only_before: what the
        second one does not have, and ``only_after`` what the first one does not. :ivar changes: of the run itself.
    :ivar fail_on: the expression, and ``judged`` what it was held against; ``verdict`` is null without one.
    """

    before: SideRecord
    after: SideRecord
    deployments: list[Pair]
    tests: list[TestPair]
    only_before: list[str]
    only_after: list[str]
    changes: list[Change]
    fail_on: str | None = None
    judged: list[Judged] = []
    verdict: Held | None = None
    format: str = COMPARE_FORMAT


def compare(
    before: Side, after: Side, *, tolerances: Sequence[Tolerance] = (), fail_on: str | None = None
) -> CompareDocument:
    """What differs between two sides; nothing is judged without tolerances."""
    found, alone, new = _matched(before.deployments, after.deployments)
    matched = [(aligned(first, second), second) for first, second in found]
    pairs = [_pair(first, second) for first, second in matched]
    tests = _tests(before, after)
    judged = [
        one
        for tolerance in tolerances
        for one in [
            *(held for pair, (x, y) in zip(pairs, matched, strict=True) for held in _judged(tolerance, pair, x, y)),
            *(_judged_tests(tolerance, tests, before, after) if tolerance.what == PEAK else ()),
        ]
    ]
    return CompareDocument(
        before=_record(before),
        after=_record(after),
        deployments=pairs,
        tests=tests,
        only_before=[*(f"backend {one.name}" for one in alone), *_missing(before, after)],
        only_after=[*(f"backend {one.name}" for one in new), *_missing(after, before)],
        changes=list(in_force.changes(before.versions, after.versions)),
        fail_on=fail_on,
        judged=judged,
        verdict=_verdict(judged) if tolerances else None,
    )


def _record(side: Side) -> SideRecord:
    return SideRecord(origin=side.origin, kind=side.kind, run=side.run, started=side.started)


def _matched(
    before: Sequence[Deployment], after: Sequence[Deployment]
) -> tuple[list[tuple[Deployment, Deployment]], list[Deployment], list[Deployment]]:
    """Deployments of one name; of several of one name first those of the same settings, then in their order. Two that
    stand alone belong together whatever they are called."""
    if len(before) == len(after) == 1:
        return [(before[0], after[0])], [], []
    left = list(after)
    pairs: dict[int, Deployment] = {}
    for same in (True, False):
        for index, one in enumerate(before):
            if index in pairs:
                continue
            found = next((x for x in left if x.name == one.name and (not same or x.settings == one.settings)), None)
            if found is not None:
                left.remove(found)
                pairs[index] = found
    matched = [(before[index], pairs[index]) for index in sorted(pairs)]
    return matched, [one for index, one in enumerate(before) if index not in pairs], left


def _pair(first: Deployment, second: Deployment) -> Pair:
    changes = changed(first, second)
    cells = (second.settings.get("ctx-size"), second.settings.get("parallel"))
    context, slots = (value if isinstance(value, int) else None for value in cells)
    differences = between(
        first.ledger,
        second.ledger,
        causes=second.causes,
        causes_before=first.causes,
        changes=changes,
        context=context,
        slots=slots or 1,
    )
    return Pair(
        name=second.name or first.name,
        engine_before=first.engine,
        engine_after=second.engine,
        totals=_totals(first, second, differences),
        differences=list(differences),
        changes=list(changes),
    )


def _totals(first: Deployment, second: Deployment, differences: Sequence[Difference]) -> list[Total]:
    one, other = ends_of(first.ledger), ends_of(second.ledger)
    found = []
    for label in sorted({**one, **other}, key=lambda label: (label == HOST, len(label), label)):
        made = _total(label, one.get(label), other.get(label), first.basis(label), second.basis(label))
        mine = [row for row in differences if row.device == label]
        least, most = sum(row.least for row in mine), sum(row.most for row in mine)
        found.append(msgspec.structs.replace(made, least=least, most=most))
    return found


def _total(
    label: str,
    before: tuple[int, int] | None,
    after: tuple[int, int] | None,
    basis_before: Basis | None,
    basis_after: Basis | None,
) -> Total:
    first, second = before or (0, 0), after or (0, 0)
    return Total(
        device=label,
        before=first[0] if before else None,
        after=second[0] if after else None,
        least=second[0] - first[1],
        most=second[1] - first[0],
        before_at_most=first[1] if first[1] != first[0] else None,
        after_at_most=second[1] if second[1] != second[0] else None,
        basis_before=basis_before if before else None,
        basis_after=basis_after if after else None,
    )


# ---------------------------------------------------------------- tests


def _tests(before: Side, after: Side) -> list[TestPair]:
    found = []
    for nodeid, one in before.tests.items():
        other = after.tests.get(nodeid)
        if other is None:
            continue
        peaks = []
        for label in dict.fromkeys([*one.peak, *other.peak]):
            first, second = _ends(one.peak.get(label)), _ends(other.peak.get(label))
            if first is not None or second is not None:
                peaks.append(_total(label, first, second, "measured", "measured"))
        found.append(TestPair(nodeid=nodeid, outcome_before=one.outcome, outcome_after=other.outcome, peaks=peaks))
    return found


def _missing(side: Side, other: Side) -> list[str]:
    if side.kind != "run" or other.kind != "run":
        return []
    return [nodeid for nodeid in side.tests if nodeid not in other.tests]


def _ends(figure: Measured | None) -> tuple[int, int] | None:
    return (figure.bytes, figure.upper) if isinstance(figure, Reading) else None


# ---------------------------------------------------------------- verdicts


def _judged(tolerance: Tolerance, pair: Pair, first: Deployment, second: Deployment) -> list[Judged]:
    """One tolerance over the devices of one deployment."""
    found = []
    name = pair.name or "deployment"
    strange = untold(first, second)
    if tolerance.what in (PEAK, HOST):
        for total in _cards(pair.totals) if tolerance.what == PEAK else pair.totals:
            if tolerance.what == HOST and total.device != HOST:
                continue
            doubts = [_lower_bound(side, None) or side.missed.get(total.device, "") for side in (first, second)]
            shared = _shared(pair, total.device)
            one = _open(total.before, total.before_at_most, doubts[0], shared)
            other = _open(total.after, total.after_at_most, doubts[1], shared)
            unlike = strange or _unlike(total.basis_before, total.basis_after, total.device)
            doubt = doubts[0] or doubts[1]
            measured = total.basis_before == total.basis_after == "measured"
            digits = 0 if measured else _digits(pair.differences, total.device)
            found.append(_held(tolerance, f"{name} {total.device}", one, other, doubt, unlike, digits=digits))
        return found
    rows = [one for one in pair.differences if one.bucket == tolerance.what]
    for label in dict.fromkeys(row.device for row in rows):
        doubts = [_lower_bound(side, tolerance.what) for side in (first, second)]
        one, other = (
            _bucket(side, tolerance.what, label, [row for row in rows if row.device == label], doubt, late=late)
            for side, doubt, late in ((first, doubts[0], False), (second, doubts[1], True))
        )
        # The rest is measured less what was printed, so that it is as open as all of that.
        digits = _digits(pair.differences, label, None if tolerance.what == "unattributed" else tolerance.what)
        found.append(_held(tolerance, f"{name} {label}", one, other, doubts[0] or doubts[1], strange, digits=digits))
    return found


def _digits(rows: Sequence[Difference], label: str, bucket: str | None = None) -> int:
    """Bytes that the printed digits leave open in one bucket, or in all: of figures that are not the same."""
    return sum(row.digits for row in rows if row.device == label and bucket in (None, row.bucket))


def _bucket(
    side: Deployment, bucket: str, label: str, rows: Sequence[Difference], doubt: str, *, late: bool
) -> Ends | None:
    """A bucket as the two sides were compared by it; one that a side does not have is nothing, except what no engine
    prints."""
    if bucket == "unattributed":
        ends = ends_of(side.ledger, "unattributed").get(label)
        return None if ends is None else _open(ends[0], ends[1], doubt)
    row = rows[0]
    low, high = (row.after, row.after_at_most) if late else (row.before, row.before_at_most)
    if low is None and bucket != "context":
        return _open(0, None, doubt)
    return _open(low, high, doubt)


def _cards(totals: Sequence[Total]) -> Sequence[Total]:
    """Totals of cards; of the host where there is no card, for which it stands."""
    return [total for total in totals if total.device != HOST] or totals


def _shared(pair: Pair, label: str) -> int:
    """Width of a range of which both sides know no more than that it is the same number."""
    rows = [row for row in pair.differences if (row.bucket, row.device) == ("context", label) and row.least == row.most]
    return sum((row.before_at_most or 0) - (row.before or 0) for row in rows if row.before_at_most is not None)


def _open(low: int | None, high: int | None, doubt: str, shared: int = 0) -> Ends | None:
    """The ends of a figure; with a doubt its upper one is not known."""
    if low is None:
        return None
    return low, None if doubt else low if high is None else high - shared


def _unlike(before: Basis | None, after: Basis | None, device: str) -> str:
    """Why two totals are not alike: engines print buffers alone, and an estimate of the host has no program in it."""
    if before is None or after is None or before == after:
        return ""
    if "printed" not in (before, after) and device != HOST:
        return ""
    return f"one total is {before} and the other {after}, which do not contain the same"


def _lower_bound(side: Deployment, bucket: str | None) -> str:
    unknown = [name for name in side.unknown if bucket in (None, name)]
    return f"the estimate is a lower bound: not all of {', '.join(unknown)} is known" if unknown else ""


def _judged_tests(tolerance: Tolerance, tests: Sequence[TestPair], before: Side, after: Side) -> list[Judged]:
    found = []
    for test in tests:
        one, other = before.tests[test.nodeid].peak, after.tests[test.nodeid].peak
        labels = list(dict.fromkeys([*one, *other]))
        for label in [label for label in labels if label != HOST] or labels:
            (first, doubt), (second, other_doubt) = _seen(one.get(label), "before"), _seen(other.get(label), "after")
            found.append(_held(tolerance, f"{test.nodeid} {label}", first, second, doubt or other_doubt, ""))
    return found


def _seen(figure: Measured | None, when: str) -> tuple[Ends | None, str]:
    """The ends of a test's peak, and why its upper one is not known."""
    if figure is None:
        return None, f"it was not measured {when}"
    if isinstance(figure, Reading):
        if figure.missed:
            return (figure.bytes, None), f"{when}: {figure.missed}"
        return (figure.bytes, figure.upper), ""
    return (None if figure.at_least is None else (figure.at_least, None)), f"{when}: {figure.reason}"


def _held(
    tolerance: Tolerance,
    where: str,
    before: Ends | None,
    after: Ends | None,
    doubt: str,
    unlike: str,
    *,
    digits: int = 0,
) -> Judged:
    result: Held = "undecided"
    reason = unlike or doubt
    if before is not None and after is not None and not unlike:
        result = tolerance.holds(before, after, digits=digits)
        reason = reason or "what is allowed lies within the range of the figures"
    elif not reason:
        reason = f"only the {'second' if before is None else 'first'} one has a figure"
    return Judged(
        what=tolerance.what,
        where=where,
        before=before[0] if before else None,
        after=after[0] if after else None,
        allowed=tolerance.allowed(before[0]) if before else None,
        result=result,
        reason=reason if result == "undecided" else "",
    )


def _verdict(judged: Sequence[Judged]) -> Held:
    results = {one.result for one in judged}
    if "grew" in results:
        return "grew"
    return "held" if results == {"held"} else "undecided"


def loud(document: CompareDocument) -> Mapping[str, list[Change]]:
    """Deployment → what makes its two sides ones of different models or devices."""
    found = {pair.name: [change for change in pair.changes if change.loud] for pair in document.deployments}
    return {name: changes for name, changes in found.items() if changes}
