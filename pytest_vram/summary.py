"""The controller's side of a run: gathers what tests report, shows it, writes the reports and ends the keeper."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import shutil
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest

from pytest_vram import outside
from pytest_vram import report as reports
from pytest_vram.blame import Outside
from pytest_vram.checks.finding import Finding
from pytest_vram.checks.wording import WORTH_A_WORD, residue, size_of
from pytest_vram.errors import KeeperError, VramError
from pytest_vram.keeper import KeeperClient
from pytest_vram.keeper.messages import DeviceInfo, Finish, Residue, State, Status
from pytest_vram.keeper.residue import BEFORE_TESTS
from pytest_vram.quick import Batch, Late
from pytest_vram.readings import Measured, Reading, larger
from pytest_vram.report.records import BackendRecord, IdleRecord, OutsideRecord, RunInfo, RunReport, TestRecord
from pytest_vram.report.toolcalls import defect_tables
from pytest_vram.run import Identity, Run, versions, ways_on
from pytest_vram.stash import RUN
from pytest_vram.units import mib

KEPT = 10
_MOST_LEFT = 5
#: A read of all devices takes 0.1 to 30 ms; between windows one is made every 100 ms.
_SLOW_MS = 250.0
RUN_FILE = "run.json"
REPORT_FILE = "report.json"
_WORDS = {
    "error": ("error", "E", "ERROR"),
    "failed": ("failed", "F", "FAILED"),
    "inconclusive": ("inconclusive", "I", "INCONCLUSIVE"),
}


class Collector:
    """Gathers the records of every test and backend of a run and presents them."""

    NAME = "vram-collector"
    UNMEASURED = "not measured:"

    def __init__(self, config: pytest.Config, identity: Identity) -> None:
        self.config = config
        self.identity = identity
        self.tests: list[TestRecord] = []
        self.backends: dict[str, BackendRecord] = {}
        self.unmeasured = 0
        self.started = time.time()
        self.report: RunReport | None = None
        self.trouble: list[str] = []
        self._state: State | None = None
        self._latest: dict[str, int] = {}
        self._torn: set[str] = set()
        self._answered: set[int] = set()
        self._outside: list[Outside] = []
        self.defect: str | None = None
        self._pid = os.getpid()

    @property
    def run(self) -> Run | None:
        """The run, where this process takes part itself."""
        return self.config.stash.get(RUN, None)

    # ------------------------------------------------------------ gathering

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep what came with a report; teardown trouble makes the test an error."""
        data: dict[str, Any] | None = getattr(report, "vram", None)
        if report.when == "setup" and report.skipped and self.UNMEASURED in str(report.longrepr):
            self.unmeasured += 1
        if data is not None and "batches" in data:
            self.take(data["batches"], node=getattr(report, "node", None))
        if data is not None and "record" in data:
            self._latest[report.nodeid] = len(self.tests)
            self.tests.append(msgspec.convert(data["record"], TestRecord))
            for table in data["backends"]:
                self._backend(msgspec.convert(table, BackendRecord))
        if data is not None and "idle" in data:
            self._idle(report, data)
        elif report.when == "teardown" and report.failed:
            self._teardown_failed(report)
        if data is not None:
            # pytest keeps every report until the end: what was taken from this one need not be kept twice.
            report.vram = {"category": data["category"]}  # type: ignore[attr-defined]  # pytest keeps it

    def take(self, batches: Sequence[Batch | dict[str, Any]], node: object = None) -> None:
        """Keep the records of tests that shared a window, and report what is known of them by now.

        :param node: the xdist worker that they ran on.
        """
        for table in batches:
            batch = table if isinstance(table, Batch) else msgspec.convert(table, Batch)
            for record in batch.records():
                self._latest[record.nodeid] = len(self.tests)
                self.tests.append(record)
                if record.nodeid in self._torn:
                    self._torn.discard(record.nodeid)
                    self._torn_down(record.nodeid)
            self._answered.update(batch.begins)
            self._outside.extend(batch.outside)
            for late in batch.late:
                self._uncount(late.nodeid)
                report = _late_report(late)
                if node is not None:
                    report.node = node  # type: ignore[attr-defined]  # pytest keeps it
                self.config.hook.pytest_runtest_logreport(report=report)

    def _uncount(self, nodeid: str) -> None:
        """A test that was counted as passed is about to be counted as what it is: the terminal counts it once."""
        terminal = self.config.pluginmanager.get_plugin("terminalreporter")
        passed = getattr(terminal, "stats", {}).get("passed", [])
        for index in range(len(passed) - 1, -1, -1):
            if passed[index].nodeid == nodeid and passed[index].when == "call":
                del passed[index]
                return

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """What a worker's last reports could not carry comes with its end."""
        batches = getattr(node, "workeroutput", {}).get(self.NAME)
        if batches:
            self.take(msgspec.json.decode(batches), node)

    @pytest.hookimpl(optionalhook=True)
    def pytest_handlecrashitem(self, crashitem: str, report: pytest.TestReport) -> None:
        """A test whose xdist worker died is an error of the report as well: its window was never judged."""
        if self.run is None and not self.tests:
            return
        reason = report.longreprtext.strip().splitlines()
        self.tests.append(
            TestRecord(
                nodeid=crashitem,
                outcome="error",
                seconds=0.0,
                reason=reason[0][:300] if reason else "its worker crashed",
            )
        )

    def _idle(self, report: pytest.TestReport, data: dict[str, Any]) -> None:
        """Idle memory was judged after a teardown: a test that does not hold is counted as that, and once."""
        index = self._latest.get(report.nodeid)
        outcome = data.get("outcome")
        if outcome is not None:
            self._uncount(report.nodeid)
        if index is None:
            return
        known = self.tests[index]
        self.tests[index] = msgspec.structs.replace(
            known,
            idle=msgspec.convert(data["idle"], IdleRecord),
            findings=[*known.findings, *(msgspec.convert(one, Finding) for one in data["findings"])],
            outcome=outcome or known.outcome,
            reason=data.get("reason") or known.reason,
        )

    def _teardown_failed(self, report: pytest.TestReport) -> None:
        if report.nodeid not in self._latest:
            self._torn.add(report.nodeid)
        self._torn_down(report.nodeid)

    def _torn_down(self, nodeid: str) -> None:
        index = self._latest.get(nodeid)
        if index is not None and self.tests[index].outcome == "passed":
            self.tests[index] = msgspec.structs.replace(self.tests[index], outcome="error", reason="error at teardown")

    def _backend(self, record: BackendRecord) -> None:
        key = f"{record.name}#{record.generation}#{record.key}"
        known = self.backends.get(key)
        if known is None:
            self.backends[key] = record
            return
        peaks: dict[str, Measured] = dict(known.peak)
        for label, figure in record.peak.items():
            peaks[label] = larger([peaks[label], figure]) if label in peaks else figure
        known = msgspec.structs.replace(known, peak=peaks)
        if record.growth is not None:
            known = msgspec.structs.replace(known, growth=record.growth, ledger=record.ledger)
        self.backends[key] = known

    def pytest_report_teststatus(self, report: pytest.TestReport) -> tuple[str, str, str] | None:
        """Give ``inconclusive`` its own letter and count, and infrastructure trouble the name error."""
        data = getattr(report, "vram", None)
        outcome: str = report.outcome
        if outcome == "rerun":  # of pytest-rerunfailures: another attempt follows
            return None
        return _WORDS.get(data.get("category")) if data else None

    def pytest_report_header(self) -> list[str] | None:
        """Say what is judged, where something is."""
        run = self.run
        if run is None or not (run.settings.budget or run.settings.reserve or run.warnings):
            return None
        lines = [f"vram: warning: {text}" for text in run.warnings]
        if run.settings.budget and run.predicted:
            lines.append(
                f"vram: budget {run.settings.budget.text} on the estimate of each backend: nothing is measured"
            )
        elif run.measurable:
            names = ", ".join(f"{device.label} = {device.name}, {size_of(device)}" for device in run.measurable)
            if run.host_only:
                names = "host memory of servers and other child processes (not pytest's own), which stands in for VRAM"
            held = [f"budget {run.settings.budget.text}"] if run.settings.budget else []
            if run.settings.reserve:
                held.append(f"reserve {mib(run.settings.reserve)}")
            if held:
                lines.append(f"vram: {', '.join(held)} on {names}")
        return lines or None

    # ------------------------------------------------------------ the end

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """End the keeper, then make and write the reports; a forked copy of this process does neither."""
        if os.getpid() != self._pid:
            return
        try:
            self._finish(session, exitstatus)
        except Exception as error:  # noqa: BLE001 - pytest's own results must not be lost for a defect here
            where = traceback.extract_tb(error.__traceback__)[-1]
            self.defect = f"vram: WARNING: the report could not be made: {error}"
            if not isinstance(error, OSError):  # such as too many open files, which a test may have brought about
                self.defect += (
                    f" ({type(error).__name__}, {Path(where.filename).name}:{where.lineno});"
                    " this is a defect of pytest-vram, please report it"
                )
            if not session.exitstatus:
                session.exitstatus = pytest.ExitCode.INTERNAL_ERROR

    def _finish(self, session: pytest.Session, exitstatus: int) -> None:
        run = self.run
        folder = Path(self.identity.folder)
        if (run is not None and run.connected) or (folder / "journal.jsonl").exists() or self._listens():
            self._end_keeper(run, int(exitstatus))
        if run is None and not self.tests:
            return
        found = outside.records(self._state, self._answered, self._outside) if run is not None else []
        if found and exitstatus == pytest.ExitCode.OK:
            exitstatus = session.exitstatus = pytest.ExitCode.TESTS_FAILED
        self.report = self._make(run, int(exitstatus), found)
        if folder.is_dir():
            self._write(folder / REPORT_FILE)
            self._write_run_file(folder, int(exitstatus))
            prune(folder.parent, keep=folder)
        for path in run.settings.reports if run else ():
            if not self._write(Path(self.config.invocation_params.dir, path)):
                session.exitstatus = pytest.ExitCode.USAGE_ERROR
        warnings = list(dict.fromkeys([*self.report.run.warnings, *self.trouble]))
        self.report = msgspec.structs.replace(
            self.report, run=msgspec.structs.replace(self.report.run, warnings=warnings)
        )

    def _write(self, path: Path) -> bool:
        assert self.report is not None
        try:
            reports.write(self.report, path)
        except VramError as error:
            self.trouble.append(str(error))
            return False
        return True

    def _listens(self) -> bool:
        """Whether there is a keeper though its journal is gone."""
        return bool(self.identity.socket) and os.path.exists(self.identity.socket)

    def _end_keeper(self, run: Run | None, exitstatus: int) -> None:
        client: KeeperClient | None = None
        try:
            client = run.keeper() if run and run.connected else KeeperClient(self.identity.socket, role="controller")
            state = client.call(Status(), 10)
            self._state = state if isinstance(state, State) else None
            client.call(Finish(outcome=str(exitstatus)), 30)
            client.close()
        except KeeperError as error:
            self.trouble.append(f"the keeper did not end in order: {error}")
            if client is not None:
                client.dismiss()

    def _make(self, run: Run | None, exitstatus: int, found: list[OutsideRecord]) -> RunReport:
        last = {test.nodeid: test for test in self.tests}  # of several attempts the last one counts
        counts: dict[str, int] = {}
        for test in last.values():
            counts[test.outcome] = counts.get(test.outcome, 0) + 1
        devices = self._state.devices if self._state else []
        if not devices and run is not None:
            devices = [device for device in run.devices if isinstance(device, DeviceInfo)]
        warnings = [*(run.warnings if run else []), *self.trouble]
        if self.unmeasured:
            why = "no device could be measured"
            if run and run.predicted:
                why = "there is no estimate that they could be held against"
            elif run and not run.measurable:
                why = run.why_unmeasurable()
            tests = f"{self.unmeasured} test{'' if self.unmeasured == 1 else 's'}"
            warnings.append(f"{tests} with VRAM markers SKIPPED, not judged: {why}")
        elif run is not None and self._says_nothing_measured(run):
            warnings.append(f"nothing was measured: {run.why_unmeasurable()}. Ways on: {ways_on(run.settings)}.")
        budget = run.settings.budget if run is not None else None
        warnings.extend(outside.sentences(found, budget))
        if not found:
            warnings.extend(outside.undecided(self._state, budget, self.tests))
        warnings.extend(self._uncounted(run))
        warnings.extend(self._left_behind())
        warnings.extend(self._spilled())
        warnings.extend(self._state.warnings if self._state else ())
        warnings.extend(_slow(self._state))
        if self._state and self._state.journal_trouble:
            warnings.append(f"the journal is incomplete: {self._state.journal_trouble}")
        folder = Path(self.identity.folder)
        info = RunInfo(
            id=self.identity.id,
            started=datetime.datetime.fromtimestamp(self.started, datetime.UTC).isoformat(timespec="seconds"),
            seconds=round(time.time() - self.started, 3),
            verdict=self._verdict(counts, exitstatus),
            device=run.settings.device_text if run else "auto",
            devices=devices,
            settings=run.settings.as_table() if run else {},
            versions=versions(),
            counts=counts,
            command=list(sys.argv),
            sampling=self._state.sampling if self._state else None,
            keeper_cpu_share=self._state.own_cpu_share if self._state else None,
            warnings=warnings,
            folder=str(folder) if folder.is_dir() else None,
            outside=found,
        )
        backends = [
            msgspec.structs.replace(record, ledger=record.ledger.against(_readings(record.peak)))
            for record in self.backends.values()
        ]
        if run is not None and not run.predicted and (run.settings.reports or info.verdict != "passed"):
            backends = [self._estimated(record, run) for record in backends]
        journal = folder / "journal.jsonl"
        return RunReport(
            run=info,
            tests=self.tests,
            backends=backends,
            journal=str(journal) if journal.exists() else None,
            defects=defect_tables(
                (test.toolcalls.baseline, test.toolcalls.asked) for test in self.tests if test.toolcalls is not None
            ),
        )

    @staticmethod
    def _estimated(record: BackendRecord, run: Run) -> BackendRecord:
        """The backend with its estimate beside its ledger: where somebody reads it, because it takes a moment."""
        from pytest_vram import beside

        return msgspec.structs.replace(record, beside=beside.of_backend(record, run.predictions))

    def _says_nothing_measured(self, run: Run) -> bool:
        """Whether somebody might think that something was measured: not where estimates were asked for."""
        return not run.measurable and not run.predicted and not run.warnings and bool(self.tests or self.backends)

    def _uncounted(self, run: Run | None) -> list[str]:
        """Where pytest's own process, which ``cpu`` leaves out, would have broken the limit: that is said."""
        if run is None or not run.host_only:
            return []
        over = [
            (figure.bytes, test)
            for test in self.tests
            for label, figure in test.process.items()
            if isinstance(figure, Reading) and figure.bytes > test.limit.get(label, figure.bytes)
        ]
        if not over:
            return []
        most, test = max(over, key=lambda item: item[0])
        return [
            f"pytest's own process, which --vram-device=cpu does not count, held {mib(most)} in {test.nodeid}, more"
            ' than the limit: what a test loads into pytest itself is judged by max_vram(..., scope="process")'
        ]

    def _left_behind(self) -> list[str]:
        """Tests that left memory behind, as the tests after them found it, or nobody but the end of the run."""
        left: dict[tuple[str, str], tuple[str, Residue]] = {}
        found = [(one, "for the tests that followed") for test in self.tests for one in test.residues]
        found += [(one, "until the end of the run") for one in (self._state.residues if self._state else ())]
        for one, how in found:
            # A driver's context nobody can give back, and a page or two are worth no word.
            if one.test == BEFORE_TESTS or one.bytes - one.context < WORTH_A_WORD:
                continue
            known = left.get((one.test, one.device))
            if known is None or one.bytes > known[1].bytes:
                left[one.test, one.device] = (how, one)
        shown = sorted(left.values(), key=lambda item: -item[1].bytes)
        lines = [f"memory was left behind {how}: {residue(one)}" for how, one in shown[:_MOST_LEFT]]
        if len(shown) > _MOST_LEFT:
            lines.append(f"{len(shown) - _MOST_LEFT} more tests left memory behind; the report has them")
        return lines

    def _spilled(self) -> list[str]:
        """Spill of tests that no limit was held against: for the others it is a failure."""
        found = [
            (figure.bytes, label, test)
            for test in self.tests
            for label, figure in test.spill.items()
            if isinstance(figure, Reading) and not any(finding.check == "spill" for finding in test.findings)
        ]
        if not found:
            return []
        most, label, test = max(found, key=lambda item: item[0])
        return [
            f"{mib(most)} that were given on {label} lay in host memory in {test.nodeid}, which makes it several times"
            " slower; a test with a limit fails for that"
        ]

    def _verdict(self, counts: Mapping[str, int], exitstatus: int) -> Literal["passed", "failed", "inconclusive"]:
        if counts.get("failed") or counts.get("error") or exitstatus == pytest.ExitCode.TESTS_FAILED:
            return "failed"
        if exitstatus not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):  # interrupted: not all ran
            return "inconclusive"
        # A peak of no process at all judges nothing, though no limit was broken; tool calls need no peak.
        judged = any(
            test.toolcalls is not None or any(isinstance(f, Reading) and f.upper for f in test.peak.values())
            for test in self.tests
        )
        if counts.get("inconclusive") or self.unmeasured or not judged:
            return "inconclusive"
        return "passed"

    def _write_run_file(self, folder: Path, exitstatus: int) -> None:
        assert self.report is not None
        table = {
            "format": "pytest-vram/run/1",
            "run": msgspec.to_builtins(self.report.run),
            "exitstatus": exitstatus,
            "pid": os.getpid(),
        }
        with contextlib.suppress(OSError):
            temporary = folder / f".{RUN_FILE}.{os.getpid()}"
            temporary.write_text(json.dumps(table, indent=1), encoding="utf-8")
            temporary.replace(folder / RUN_FILE)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print the summary, where there is something to say."""
        if self.defect is not None:
            terminalreporter.write_line(self.defect)
        if self.report is None:
            return
        verbosity = terminalreporter.verbosity
        width = self.config.get_terminal_writer().fullwidth
        lines = reports.summary(self.report, verbosity=verbosity, width=width, unicode=_is_unicode())
        if not lines:
            return
        terminalreporter.ensure_newline()
        if verbosity >= 0:
            terminalreporter.section("vram")
        colour = {"passed": "green", "failed": "red", "inconclusive": "yellow"}[self.report.run.verdict]
        for line in lines:
            mark = colour if line.startswith("verdict") else "red" if line.startswith("WARNING") else None
            terminalreporter.write_line(line, **({mark: True} if mark else {}))


def _late_report(late: Late) -> pytest.TestReport:
    """The report of a verdict on a test that was reported before it was known."""
    path, line, _ = late.location
    undecided = late.category == "inconclusive"
    report = pytest.TestReport(
        nodeid=late.nodeid,
        location=late.location,
        keywords={},
        outcome="skipped" if undecided else "failed",
        longrepr=(path, (line or 0) + 1, late.text) if undecided else late.text,
        when="call",
        sections=late.sections,
    )
    if late.category in ("inconclusive", "error"):
        report.vram = {"category": late.category}  # type: ignore[attr-defined]  # pytest keeps it
    return report


def _is_unicode() -> bool:
    return (sys.stdout.encoding or "ascii").lower().replace("-", "").startswith("utf")


def _slow(state: State | None) -> list[str]:
    """That reading the devices takes so long that it holds up the tests; nothing on a machine in order."""
    interval = state.sampling.interval_ms if state is not None and state.sampling is not None else None
    if interval is None or interval < _SLOW_MS:
        return []
    return [
        f"the driver is slow: it was read only every {interval / 1e3:.1f} s, each test waits for some of these reads,"
        " and of what was held between two of them nothing is known; `nvidia-smi` shows whether it is slow for others"
    ]


def _readings(figures: Mapping[str, Measured]) -> dict[str, Reading]:
    return {label: figure for label, figure in figures.items() if isinstance(figure, Reading)}


def prune(runs: Path, *, keep: Path) -> None:
    """Keep the newest ten run folders and every failed or unfinished one; remove the others."""
    with contextlib.suppress(OSError):
        folders = sorted((entry for entry in runs.iterdir() if entry.is_dir()), reverse=True)
        for folder in folders[KEPT:]:
            if folder != keep and _passed(folder):
                shutil.rmtree(folder, ignore_errors=True)


def _passed(folder: Path) -> bool:
    try:
        table = json.loads((folder / RUN_FILE).read_text(encoding="utf-8"))
        return bool(table["exitstatus"] == 0 and table["run"]["verdict"] == "passed")
    except (OSError, ValueError, KeyError, TypeError):
        return False
