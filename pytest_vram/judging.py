"""From a closed window to findings and a test record: which checks apply to a test, and what they found."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from pytest_vram import beside, checks, predicting
from pytest_vram.backends.pool import RunningBackend
from pytest_vram.checks.finding import Finding
from pytest_vram.checks.leftovers import unsettled
from pytest_vram.differences import Beside
from pytest_vram.keeper.messages import Closed
from pytest_vram.keeper.residue import BEFORE_TESTS
from pytest_vram.ledger import Ledger, combined
from pytest_vram.measure.torch_memory import bounded
from pytest_vram.readings import Measured, Reading
from pytest_vram.report import soaks
from pytest_vram.report.records import BackendRecord, Outcome, TestRecord
from pytest_vram.report.soaks import SoakDocument
from pytest_vram.report.toolcall_lines import failure_lines, verdict_lines
from pytest_vram.report.toolcalls import AskedRecord, ToolcallRecord, asked_record, worst_cases
from pytest_vram.run import Attempt, Run
from pytest_vram.spec import Limits, as_table, without_secrets

if TYPE_CHECKING:
    from pytest_vram.accuracy import Asked, ToolcallResult
    from pytest_vram.toolcalls.results import Results


class Judgement(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one attempt.

    :ivar verdict: ``failed``, ``inconclusive``, ``error`` or ``None`` where every check held.
    """

    record: TestRecord
    findings: list[Finding]
    backends: list[BackendRecord]

    @property
    def verdict(self) -> str | None:
        """The gravest verdict among the findings."""
        found = {finding.verdict for finding in self.findings}
        return next((verdict for verdict in ("error", "failed", "inconclusive") if verdict in found), None)


def budget_of(run: Run) -> Limits | None:
    """The budget that tests are held against: none where nothing can be measured or predicted."""
    return run.settings.budget if run.measurable or run.predicted else None


def judges_all(run: Run) -> bool:
    """Whether every test is judged, markers or not."""
    return budget_of(run) is not None or bool(run.settings.reserve and run.measurable)


def judge(run: Run, attempt: Attempt, closed: Closed | None, *, seconds: float, outcome: Outcome) -> Judgement:
    """Run every check that applies to this attempt.

    :param closed: the window's figures, or ``None`` where the test had no window or the keeper died.
    :param outcome: what pytest alone made of the test.
    """
    backends = list({id(backend): backend for backend in attempt.backends.values()}.values())
    requests = [record for backend in backends for record in backend.take_requests()]
    findings: list[Finding] = list(attempt.earlier)
    soak = attempt.soak.document if attempt.soak is not None else None
    if attempt.trouble:
        findings.append(
            Finding(
                check="keeper",
                verdict="error",
                section="keeper",
                text="the keeper of this run was lost during this test, so its memory cannot be judged:"
                f" {attempt.trouble}",
            )
        )
    ledger: Ledger | None = None
    told: Beside | None = None
    peak: dict[str, Measured] = {}
    limit: dict[str, int] = {}
    limit_from: str | None = None
    if run.predicted:
        closed, ledger = predicting.window(run, attempt, closed)
    if closed is not None:
        closed = unsettled(_with_torch(run, attempt, closed), closed)
        # What this test left behind itself, in an attempt before or before its window, excuses nothing; nor does what
        # no test has left behind.
        others = [residue for residue in closed.residues if residue.test not in (attempt.key, BEFORE_TESTS)]
        closed = msgspec.structs.replace(closed, residues=others)
        if backends and not run.predicted:
            ledger = combined(backend.explained for backend in backends).against(_totals(closed))
        findings.extend(
            Finding(check="backend", verdict="error", section="backend", text=sentence)
            for sentence in closed.deaths
            if soak is None or not _soaked_on(soak, sentence)
        )
        found = _Estimated(run, attempt, closed, ledger)
        findings.extend(_memory(run, attempt, closed, ledger, found))
        told = found.made
        if attempt.plan.host_limit is not None or attempt.plan.rate is not None:
            # What both are about: a model that is paged out shows less memory and waits for the disk.
            locked = (checks.judge_locked(one.asked, one.boot.facts, warnings=one.boot.warnings) for one in backends)
            findings.extend(finding for finding in locked if finding is not None)
        peak, limit, limit_from = _shown(run, attempt, closed)
    if attempt.plan.rate is not None and run.predicted:
        findings.append(predicting.no_rate(attempt.plan.rate))
    elif attempt.plan.rate is not None:
        rates = [request.tokens_per_second for request in requests]
        doubts = [request.doubt for request in requests]
        rate = checks.judge_rate(rates, attempt.plan.rate, limit_from="@min_tokens_per_second", doubts=doubts)
        if rate is not None:
            findings.append(rate)
    accuracy = attempt.toolcalls
    toolcalls = record_of(accuracy) if accuracy is not None else None
    if toolcalls is not None:
        findings.extend(finding_of(toolcalls))
    if soak is not None:
        findings.extend(finding_of_soak(soak))
    record = TestRecord(
        nodeid=attempt.key,
        outcome=outcome,
        seconds=round(seconds, 6),
        peak=peak,
        own=checks.own_of(closed) if closed else {},
        baseline=dict(closed.baseline) if closed else {},
        process=dict(closed.process) if closed else {},
        host=closed.host if closed else None,
        limit=limit,
        limit_from=limit_from,
        phases=dict(closed.phases) if closed else {},
        ledger=ledger,
        beside=told,
        findings=findings,
        shares=list(closed.shares) if closed else [],
        requests=requests,
        toolcalls=toolcalls,
        soak=soak,
        turns=[turn for session in attempt.sessions for turn in session.turns],
        backends=list(attempt.backends),
        overlapped=list(closed.overlapped) if closed else [],
        device=dict(closed.device) if closed and not run.predicted else {},
        allocators=attempt.allocators,
        strangers=list(closed.strangers) if closed else [],
        residues=list(closed.residues) if closed else [],
        spill=dict(closed.spill) if closed else {},
        host_use=closed.host_use if closed else None,
        waited=round(attempt.waited, 3),
        waited_for=attempt.waited_for,
        sampling=closed.sampling if closed else None,
        boot=closed.boot if closed else False,
        attempt=attempt.number,
        worker=run.worker,
    )
    records = _records(attempt, None if run.predicted else closed)
    records += [backend_record(backend, {}) for backend in attempt.before]
    if run.predicted:  # host memory is read all the same, and no limit is held against it
        records = [msgspec.structs.replace(one, boot_peak={}, at_ready={}, peak={}) for one in records]
    return Judgement(record=record, findings=findings, backends=records)


def record_of(found: ToolcallResult) -> ToolcallRecord:
    """What became of a test's cases, as its record in the report has it."""
    compared = found.compared
    return ToolcallRecord(
        verdict=found.verdict,
        asked=_asked(found.asked),
        baseline=_asked(compared, among=found.results) if compared is not None else None,
        worst=worst_cases(found.results, found.verdict.judge, baseline=found.baseline),
    )


def _asked(asked: Asked, *, among: Results | None = None) -> AskedRecord:
    return asked_record(
        asked.results,
        file=str(asked.path) if asked.path is not None else None,
        reused=asked.reused,
        notes=[asked.trouble] if asked.trouble is not None else [],
        among=among,
    )


def finding_of(record: ToolcallRecord) -> list[Finding]:
    """The finding of a test whose share of right tool calls does not hold; nothing where it does."""
    outcome = record.verdict.outcome
    if outcome == "passed":
        return []
    # What is undecided is shown like a skip, in one place and with its reason alone.
    lines = verdict_lines(record) if outcome == "inconclusive" else failure_lines(record)
    text = "\n".join(lines)
    return [
        Finding(
            check="toolcall_accuracy", verdict=outcome, section="tool calls", text=text, limit_from="@toolcall_accuracy"
        )
    ]


def _soaked_on(found: SoakDocument, death: str) -> bool:
    """Whether this death of a server is a loss that the soak has in its own verdict."""
    first = death.partition("\n")[0]
    return any(first in loss.error for loss in found.losses)


def finding_of_soak(found: SoakDocument) -> list[Finding]:
    """The finding of a test whose soak does not hold; nothing where it does."""
    outcome = found.verdict.outcome
    if outcome == "passed":
        return []
    # What is undecided is shown like a skip, in one place and with its reason alone.
    text = found.verdict.text if outcome == "inconclusive" else "\n".join(soaks.lines(found))
    breach = found.verdict.breach
    if breach is None:
        return [Finding(check="vram_soak", verdict=outcome, section="soak", text=text, limit_from="@vram_soak")]
    peak = found.peak.get(breach.device)
    source, exact = (peak.source, peak.exact) if isinstance(peak, Reading) else ("sum", False)
    measured = Reading(bytes=breach.bytes, source=source, scope="backend", device=breach.device, exact=exact)
    return [
        Finding(
            check="vram_soak",
            verdict=outcome,
            section="soak",
            text=text,
            device=breach.device,
            measured=measured,
            limit=breach.limit,
            limit_from="@vram_soak",
        )
    ]


def _with_torch(run: Run, attempt: Attempt, closed: Closed) -> Closed:
    """The window with what torch's allocator in the test's own process knows of it."""
    if not attempt.allocators:
        return closed
    devices = run.measurable
    spill = dict(closed.spill)
    for one in attempt.allocators:
        if one.spill is not None and one.device not in spill:
            spill[one.device] = one.spill
    return msgspec.structs.replace(
        closed,
        process=bounded(closed.process, attempt.allocators, devices, "process"),
        run=bounded(closed.run, attempt.allocators, devices, "run"),
        own=bounded(closed.own, attempt.allocators, devices, checks.OWN),
        spill=spill,
    )


def broken(run: Run, attempt: Attempt, error: Exception, *, seconds: float, outcome: Outcome) -> Judgement:
    """The judgement of a test that could not be judged because this package failed: an error, never a pass."""
    where = traceback.extract_tb(error.__traceback__)[-1]
    text = (
        f"this test could not be judged: {type(error).__name__}: {error} ({Path(where.filename).name}:{where.lineno});"
        " this is a defect of pytest-vram, please report it"
    )
    finding = Finding(check="vram", verdict="error", section="judging", text=text)
    record = TestRecord(
        nodeid=attempt.key,
        outcome=outcome,
        seconds=round(seconds, 6),
        findings=[finding],
        attempt=attempt.number,
        worker=run.worker,
    )
    return Judgement(record=record, findings=[finding], backends=[])


def with_outcome(judgement: Judgement, outcome: Outcome, reason: str | None = None) -> TestRecord:
    """The test's record with the outcome that came of judging it."""
    return msgspec.structs.replace(judgement.record, outcome=outcome, reason=reason)


def _totals(closed: Closed) -> dict[str, Reading]:
    """Label → measured total; host memory of the backends beside the cards, where ``host`` is no device of the run."""
    totals = {label: figure for label, figure in checks.own_of(closed).items() if isinstance(figure, Reading)}
    if isinstance(closed.host, Reading):
        totals.setdefault("host", closed.host)
    return totals


def _budget_on(run: Run, attempt: Attempt) -> Limits | None:
    """The budget that holds for this test: where nothing is measured, only for one that has a backend to predict."""
    return None if run.predicted and not predicting.concerned(attempt) else budget_of(run)


class _Estimated:
    """The estimates of a test's backends beside its ledger, made when a check that does not hold asks for them."""

    def __init__(self, run: Run, attempt: Attempt, closed: Closed, ledger: Ledger | None) -> None:
        self._run, self._attempt, self._closed, self._ledger = run, attempt, closed, ledger
        self.made: Beside | None = None

    def __call__(self) -> Beside | None:
        run, closed = self._run, self._closed
        if self.made is None and self._ledger is not None and not run.predicted:
            test = TestRecord(
                nodeid=self._attempt.key,
                outcome="failed",
                seconds=0.0,
                own=checks.own_of(closed),
                process=dict(closed.process),
                host=closed.host,
                ledger=self._ledger,
                strangers=list(closed.strangers),
            )
            self.made = beside.of_test(test, _records(self._attempt, closed), run.predictions)
        return self.made


def _memory(
    run: Run, attempt: Attempt, closed: Closed, ledger: Ledger | None, estimated: Callable[[], Beside | None]
) -> list[Finding]:
    budget = _budget_on(run, attempt)
    places = run.settings.places
    found: list[Finding | None] = []
    plain = next((m for m in attempt.plan.limits if _is_plain(m)), None)
    marker = Limits(text=plain["text"], each=plain["limit"]) if plain else None
    budget_from = places.get("budget", "budget")
    # What tests may hold together is one thing, and what this test may hold another, where others ran beside it.
    pairs = [(budget, marker)] if not checks.is_apart(closed) else [(budget, None), (None, marker)]
    for first, second in pairs:
        if first is None and second is None:
            continue
        limits, check, where = checks.tightest(first, budget_from, second, "@max_vram", labels=sorted(closed.run))
        scope = "run" if first is not None else checks.scope_of(closed, "run")
        found.append(
            checks.judge_peak(
                closed,
                check=check,
                limits=limits,
                limit_from=where,
                scope=scope,
                ledger=ledger,
                predicted=run.predicted,
                beside=estimated,
            )
        )
    for meaning in attempt.plan.limits:
        if meaning is plain:
            continue
        found.append(
            checks.judge_peak(
                closed,
                check="max_vram",
                limits=Limits(text=meaning["text"], each=meaning["limit"]),
                limit_from=_marker_text(meaning),
                scope=checks.scope_of(closed, meaning["scope"]),
                over=meaning["over"],
                phase=meaning["phase"],
                ledger=ledger,
                predicted=run.predicted,
                beside=estimated,
            )
        )
    if attempt.plan.host_limit is not None:
        host = attempt.plan.host_limit
        found.append(checks.judge_host(closed, host["limit"], limit_from="@max_host_memory", ledger=ledger))
    reserve = 0 if run.predicted else run.settings.reserve
    limited = budget is not None or bool(attempt.plan.limits) or bool(reserve)
    if reserve:
        found.extend(checks.judge_reserve(closed, reserve, run.measurable, limit_from=places.get("reserve", "reserve")))
    idle = attempt.plan.idle is not None
    if limited and not run.predicted:
        found.extend(checks.judge_spill(closed, run.measurable))
    if (limited or idle) and not run.predicted:
        found.append(checks.judge_strangers(closed))
    if limited or idle or attempt.plan.rate is not None:
        found.extend(checks.judge_lost(closed))
    return [finding for finding in found if finding is not None]


def _is_plain(meaning: dict[str, object]) -> bool:
    return (meaning["over"], meaning["scope"], meaning["phase"]) == ("total", "run", None)


def _marker_text(meaning: dict[str, object]) -> str:
    more = [
        f"{key}={meaning[key]!r}"
        for key, default in (("over", "total"), ("scope", "run"), ("phase", None))
        if meaning[key] != default
    ]
    return f"@max_vram({', '.join([repr(meaning['text']), *more])})"


def _shown(run: Run, attempt: Attempt, closed: Closed) -> tuple[dict[str, Measured], dict[str, int], str | None]:
    """Label → the peak that decides; label → the limit that it is held against; and where that was written.

    A budget is held against the whole run, a marker against the test's own part of it: of the two, the one that leaves
    less room.
    """
    budget = _budget_on(run, attempt)
    budget_from = run.settings.places.get("budget", "budget")
    plain = next((m for m in attempt.plan.limits if _is_plain(m)), None)
    marker = Limits(text=plain["text"], each=plain["limit"]) if plain else None
    own = checks.own_of(closed)
    if budget is None and marker is None:
        return own, {}, None
    if budget is None or marker is None or not checks.is_apart(closed):
        limits, _, where = checks.tightest(budget, budget_from, marker, "@max_vram", labels=sorted(closed.run))
        limit = {label: size for label in closed.run if (size := limits.of(label)) is not None}
        return dict(own if budget is None else closed.run), limit, where
    peak: dict[str, Measured] = dict(closed.run)
    limit, places = {}, {}
    for label, whole in closed.run.items():
        first, second = budget.of(label), marker.of(label)
        if second is not None and (first is None or second - _upper(own[label]) <= first - _upper(whole)):
            peak[label], limit[label], places[label] = own[label], second, "@max_vram"
        elif first is not None:
            limit[label], places[label] = first, budget_from
    different = set(places.values())
    if len(different) == 1:
        return peak, limit, different.pop()
    return peak, limit, "; ".join(f"{label}: {place}" for label, place in places.items())


def _upper(figure: Measured) -> int:
    return figure.upper if isinstance(figure, Reading) else figure.at_least or 0


def _records(attempt: Attempt, closed: Closed | None) -> list[BackendRecord]:
    """Records of the backends of this attempt; what the window saw counts where only one was used."""
    backends = list({id(backend): backend for backend in attempt.backends.values()}.values())
    seen: dict[str, Measured] = {}
    if closed is not None and len(attempt.backends) == 1:
        seen = dict(closed.backend)
        if closed.host is not None:
            seen.setdefault("host", closed.host)
    return [backend_record(backend, seen) for backend in backends]


def backend_record(backend: RunningBackend, peak: dict[str, Measured]) -> BackendRecord:
    """One generation of a backend as data; ``peak`` is what the judged window saw of it."""
    running = backend.running
    boot: dict[str, Measured] = dict(running.boot_peak)
    if running.host_boot_peak is not None:
        boot.setdefault("host", running.host_boot_peak)
    return BackendRecord(
        name=backend.name,
        engine=backend.engine,
        generation=running.generation,
        key=running.key,
        pid=running.pid,
        command=without_secrets(backend.command),
        spec=as_table(backend.spec),
        log=str(Path(running.log).name),
        ledger=backend.explained,
        facts=dict(backend.boot.facts),
        growth=backend.growth,
        phases=list(running.phases),
        boot_peak=boot,
        at_ready=dict(running.at_ready),
        peak=peak or boot,
        boot_seconds=round((running.t_ready - running.t_start) / 1e9, 3) if running.t_ready else None,
    )
