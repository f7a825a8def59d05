"""What became of cases of tool calls, as a report has it: rates by category, language and kind of defect, and the worst
cases. The whole of it is in the results file.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from pytest_vram.spec import Sampling
from pytest_vram.toolcalls.diagnosis import KINDS
from pytest_vram.toolcalls.results import CaseResult, Results
from pytest_vram.toolcalls.verdict import Paired, Verdict

FORMAT = "pytest-vram/toolcalls-run/1"
#: Cases that a report shows in full.
WORST = 10
#: Most characters of an answer that a report shows of one case.
RAW = 1000


class RateRow(msgspec.Struct, frozen=True, kw_only=True):
    """Cases that have something in common. :ivar n: with an answer. :ivar right: at first try."""

    name: str
    n: int
    right: int
    after_retry: int


class KindRow(msgspec.Struct, frozen=True, kw_only=True):
    """A kind of defect. :ivar first: cases whose first answer it explains. :ivar after_retry: of the last answer."""

    kind: str
    first: int
    after_retry: int


class WorstCase(msgspec.Struct, frozen=True, kw_only=True):
    """A case that was answered wrong.

    :ivar kind: of the answer that is judged, with all ``kinds`` and its ``detail``. :ivar request: the body that was
        sent, where it was kept. :ivar raw: what was answered; ``raw_length`` is all of it. :ivar tries: answers in all.
    """

    id: str
    family: str
    category: str
    language: str
    kind: str
    kinds: list[str]
    detail: str
    raw: str
    raw_length: int
    tries: int
    expect: list[dict[str, Any]]
    request: dict[str, Any] | None = None


class AskedRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The cases that one backend was asked.

    :ivar n: cases with an answer, of ``planned``; ``infrastructure`` have none. :ivar right: at first try.
    :ivar settings: its spec, secrets left out. :ivar file: the results file. :ivar reused: whether an earlier test of
        this run had asked them. :ivar stopped: why fewer were asked than planned.
    """

    backend: str
    protocol: str
    stream: bool
    cases: str
    digest: str
    seed: int
    planned: int
    n: int
    right: int
    after_retry: int
    infrastructure: int
    retries: int
    seconds: float
    categories: list[RateRow]
    languages: list[RateRow]
    kinds: list[KindRow]
    settings: dict[str, Any] = {}
    sampling: dict[str, Any] = {}
    fingerprint: dict[str, Any] = {}
    stopped: str | None = None
    file: str | None = None
    reused: bool = False
    notes: list[str] = []


class ToolcallRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What the cases of a test say. :ivar baseline: what it was compared with, where it was."""

    verdict: Verdict
    asked: AskedRecord
    baseline: AskedRecord | None = None
    worst: list[WorstCase] = []

    @property
    def paired(self) -> Paired | None:
        """The comparison with the baseline."""
        return self.verdict.paired


class ToolcallDocument(msgspec.Struct, frozen=True, kw_only=True):
    """What ``vram toolcalls run --json`` prints.

    :ivar verdict: on the target, where one was given. :ivar paired: the comparison with the baseline, where there is
        one.
    """

    asked: AskedRecord
    verdict: Verdict | None = None
    paired: Paired | None = None
    baseline: AskedRecord | None = None
    worst: list[WorstCase] = []
    defects: list[DefectTable] = []
    format: str = FORMAT


class DefectColumn(msgspec.Struct, frozen=True, kw_only=True):
    """A backend of a :class:`DefectTable`. :ivar settings: those that are not the same in all columns."""

    backend: str
    n: int
    right: int
    settings: dict[str, str]


class DefectRow(msgspec.Struct, frozen=True, kw_only=True):
    """A kind of defect. :ivar counts: cases that it explains at first try, column by column."""

    kind: str
    counts: list[int]


class DefectTable(msgspec.Struct, frozen=True, kw_only=True):
    """Kinds of defect beside settings, of backends that were asked the same cases."""

    cases: str
    digest: str
    columns: list[DefectColumn]
    rows: list[DefectRow]


def asked_record(
    results: Results,
    *,
    file: str | None = None,
    reused: bool = False,
    notes: Sequence[str] = (),
    among: Results | None = None,
) -> AskedRecord:
    """Rates and kinds of one backend's results.

    :param among: results that these are compared with: only cases that both answered are counted.
    """
    if among is not None:
        compared = {result.id for result in among.counted()}
        answered = [result for result in results.results if result.id in compared]
        results = msgspec.structs.replace(results, results=answered)
    counted = results.counted()
    return AskedRecord(
        backend=results.backend,
        protocol=results.protocol,
        stream=results.stream,
        cases=results.cases,
        digest=results.digest,
        seed=results.seed,
        planned=results.planned,
        n=len(counted),
        right=sum(result.first.outcome == "right" for result in counted),
        after_retry=sum(_right_in_the_end(result) for result in counted),
        infrastructure=len(results.results) - len(counted),
        retries=results.retries,
        seconds=round(results.seconds, 3),
        categories=_rates(counted, lambda result: result.category),
        languages=_rates(counted, lambda result: result.language),
        kinds=_kinds(counted),
        settings=dict(results.settings),
        sampling=_sampling(results.sampling),
        fingerprint=dict(results.fingerprint),
        stopped=results.stopped,
        file=file,
        reused=reused,
        notes=[*results.notes, *notes],
    )


def _sampling(own: Mapping[str, Any]) -> dict[str, Any]:
    """What was sent, with the defaults that a results file leaves out."""
    default = Sampling()
    found = {name: own.get(name, getattr(default, name)) for name in Sampling.__struct_fields__}
    return {name: value for name, value in found.items() if value not in (None, {})}


def _right_in_the_end(result: CaseResult) -> bool:
    """Whether a case was right after all retries; a retry that got no answer leaves what was before."""
    answers = [answer for answer in (result.first, *result.retries) if answer.outcome != "infrastructure"]
    return bool(answers) and answers[-1].outcome == "right"


def _rates(counted: Iterable[CaseResult], key: Callable[[CaseResult], str]) -> list[RateRow]:
    rows: dict[str, list[CaseResult]] = {}
    for result in counted:
        rows.setdefault(key(result), []).append(result)
    return [
        RateRow(
            name=name,
            n=len(rows[name]),
            right=sum(result.first.outcome == "right" for result in rows[name]),
            after_retry=sum(_right_in_the_end(result) for result in rows[name]),
        )
        for name in sorted(rows)
    ]


def _kinds(counted: Sequence[CaseResult]) -> list[KindRow]:
    first = Counter(result.first.kind for result in counted if result.first.outcome == "wrong")
    last = Counter(result.last.kind for result in counted if result.last.outcome == "wrong")
    kinds = sorted({*first, *last}, key=lambda kind: (-first[kind], -last[kind], _order(kind)))
    return [KindRow(kind=kind, first=first[kind], after_retry=last[kind]) for kind in kinds]


def _order(kind: str) -> int:
    return KINDS.index(kind) if kind in KINDS else len(KINDS)


def worst_cases(results: Results, judge: str, most: int = WORST, *, baseline: Results | None = None) -> list[WorstCase]:
    """The cases to look at first: one of each kind, the most frequent kind first, then the second of each …

    :param baseline: what they are compared with: cases that it has right come before all others.
    """
    wrong = [result for result in results.counted() if result.judged(judge).outcome == "wrong"]
    before: set[str] = set()
    if baseline is not None:
        before = {result.id for result in baseline.results if result.judged(judge).outcome == "right"}
    lost = _one_of_each_kind([result for result in wrong if result.id in before], judge, most)
    rest = _one_of_each_kind([result for result in wrong if result.id not in before], judge, most - len(lost))
    return [_worst(result, judge) for result in [*lost, *rest]]


def _one_of_each_kind(wrong: Iterable[CaseResult], judge: str, most: int) -> list[CaseResult]:
    by_kind: dict[str, list[CaseResult]] = {}
    for result in wrong:
        by_kind.setdefault(result.judged(judge).kind, []).append(result)
    kinds = sorted(by_kind, key=lambda kind: (-len(by_kind[kind]), _order(kind)))
    chosen: list[CaseResult] = []
    for place in range(max(map(len, by_kind.values()), default=0)):
        chosen += [by_kind[kind][place] for kind in kinds if place < len(by_kind[kind])]
        if len(chosen) >= most:
            break
    return chosen[: max(0, most)]


def _worst(result: CaseResult, judge: str) -> WorstCase:
    answer = result.judged(judge)
    return WorstCase(
        id=result.id,
        family=result.family,
        category=result.category,
        language=result.language,
        kind=answer.kind,
        kinds=list(answer.kinds),
        detail=answer.detail,
        raw=answer.raw[:RAW],
        raw_length=max(answer.raw_length, len(answer.raw)),
        tries=1 + len(result.retries),
        expect=list(result.expect),
        request=result.request,
    )


# ---------------------------------------------------------------- defects and settings


def defect_tables(asked_together: Iterable[Iterable[AskedRecord | None]]) -> list[DefectTable]:
    """A table for each set of cases that several backends, or several settings of one, were asked."""
    asked: dict[str, dict[str, AskedRecord]] = {}
    for group in asked_together:
        for one in group:
            if one is not None:
                key = msgspec.json.encode([one.backend, _told(one), one.retries], order="sorted").decode()
                known = asked.setdefault(one.digest, {})
                # Of one that was stopped early and one that was not, the latter says more.
                if key not in known or known[key].n < one.n:
                    known[key] = one
    return [_table(list(columns.values())) for columns in asked.values() if len(columns) > 1]


def _table(columns: Sequence[AskedRecord]) -> DefectTable:
    told = [_told(one) for one in columns]
    names = sorted({name for one in told for name in one})
    different = [name for name in names if len({one.get(name, "") for one in told}) > 1]
    kinds = sorted({row.kind for one in columns for row in one.kinds if row.first}, key=_order)
    counts = [{row.kind: row.first for row in one.kinds} for one in columns]
    return DefectTable(
        cases=columns[0].cases,
        digest=columns[0].digest,
        columns=[
            DefectColumn(
                backend=one.backend,
                n=one.n,
                right=one.right,
                settings={name: own.get(name, "") for name in different},
            )
            for one, own in zip(columns, told, strict=True)
        ],
        rows=[DefectRow(kind=kind, counts=[count.get(kind, 0) for count in counts]) for kind in kinds],
    )


#: Keys of a spec that say where it is and not what it does.
_PLACES = ("name", "origin", "base", "api_key", "url", "pid", "process", "boot_timeout", "request_timeout", "floors")


def _told(asked: AskedRecord) -> dict[str, str]:
    """The settings of a backend and how it was asked, by the names that users write."""
    found: dict[str, str] = {"protocol": asked.protocol, "stream": str(asked.stream).lower()}
    for name, value in asked.sampling.items():
        found[f"sampling.{name}"] = _value(value)
    for name, value in asked.settings.items():
        if name in _PLACES or value in (None, {}, []):
            continue
        if name == "options" and isinstance(value, Mapping):
            found.update({option: _value(setting) for option, setting in value.items()})
        elif name not in ("sampling", "toolcalls"):
            found[name] = _value(value)
    return found


def _value(value: Any) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value, order="sorted").decode()
