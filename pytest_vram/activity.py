"""The hooks of a run that takes part, registered only then; they delegate to :mod:`pytest_vram.run` and the checks."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from pytest_vram import advising, idle_hooks, predicting, soak_hooks, specfile, units
from pytest_vram import settings as settings_module
from pytest_vram.accuracy_hooks import Cases
from pytest_vram.blame import Quick
from pytest_vram.errors import BadInput, VramError
from pytest_vram.judging import Judgement, broken, judge, judges_all, with_outcome
from pytest_vram.outcomes import INCONCLUSIVE, failure
from pytest_vram.quick import Shared
from pytest_vram.readings import Reading
from pytest_vram.report.records import Outcome, TestRecord
from pytest_vram.run import Attempt, Identity, Plan, Run, capacity_of, new_identity, plan_of
from pytest_vram.settings import Settings
from pytest_vram.stash import ATTEMPT, RUN
from pytest_vram.summary import Collector
from pytest_vram.usage import check_usage
from pytest_vram.waiting import Teller

if TYPE_CHECKING:
    from xdist.workermanage import WorkerController

PLUGIN = "vram-activity"
PLAN = pytest.StashKey[Plan]()
IDENTITY = pytest.StashKey[Identity]()
#: A card never shows all of its nominal size: a "24 GB" card shows 24135 of 24576 MiB.
NOMINAL_TOLERANCE = 0.03


class Introduction(msgspec.Struct, frozen=True, kw_only=True):
    """What an xdist controller tells its workers."""

    identity: Identity
    settings: Settings | None


def activate(config: pytest.Config) -> None:
    """Resolve the settings, make the run, register its hooks.

    :raises pytest.UsageError: for anything the user wrote that cannot be used.
    """
    if RUN in config.stash:
        return
    worker = getattr(config, "workerinput", None)
    told = worker.get("vram") if worker else None
    try:
        shared = msgspec.json.decode(told, type=Introduction) if told else None
        path = _config_path(config)
        specs = specfile.read(path)
        settings = (shared.settings if shared else None) or _resolve(config, specs)
        if settings.backend and settings.backend not in specs.backends:
            place = settings.places.get("backend", "")
            known = specfile.known(specs.backends, settings.backend)
            raise BadInput(
                f"backend {settings.backend!r} is not in {specs.path or 'any config file'}: {known} (from {place})"
            )
    except BadInput as error:
        raise pytest.UsageError(f"pytest-vram: {error}") from None
    identity = shared.identity if shared else _identity(config)
    name = worker.get("workerid") if worker else None
    run = config.stash[RUN] = Run(settings, specs, identity, role="controller", worker=name)
    run.only_lists = _only_lists(config)
    if worker is None and not run.only_lists:
        check_usage(run)
    if worker is None:
        _collector(config)
        config.pluginmanager.register(Teller(config, identity.socket, run.meanwhile), Teller.NAME)
    config.pluginmanager.register(Activity(run, config), PLUGIN)


def introduce(node: WorkerController) -> None:
    """Give an xdist worker the identity and settings of this run."""
    config = node.config
    run = config.stash.get(RUN, None)
    shared = Introduction(identity=run.identity if run else _identity(config), settings=run.settings if run else None)
    # A worker of a run that nothing has asked for yet learns the identity only; it may take part for a marker.
    key = "vram" if run else "vram_identity"
    node.workerinput[key] = msgspec.json.encode(shared).decode()
    _collector(config)


def _identity(config: pytest.Config) -> Identity:
    if IDENTITY not in config.stash:
        told = getattr(config, "workerinput", {}).get("vram_identity")
        if told:
            config.stash[IDENTITY] = msgspec.json.decode(told, type=Introduction).identity
        else:
            config.stash[IDENTITY] = new_identity(config.rootpath)
    return config.stash[IDENTITY]


def _collector(config: pytest.Config) -> None:
    if not config.pluginmanager.has_plugin(Collector.NAME):
        config.pluginmanager.register(Collector(config, _identity(config)), Collector.NAME)


def _only_lists(config: pytest.Config) -> bool:
    names = ("collectonly", "help", "version", "markers", "showfixtures", "show_fixtures_per_test", "cacheshow")
    return any(getattr(config.option, name, False) for name in names)


def _config_path(config: pytest.Config) -> Path | None:
    given = config.option.vram_config
    if given is not None:
        return specfile.locate(config.invocation_params.dir, str(Path(config.invocation_params.dir, given)))
    variable = settings_module.variable("config")
    if os.environ.get(variable):
        return specfile.locate(config.rootpath, os.environ[variable], variable)
    ini = _ini(config).get("config")
    if ini:
        return specfile.locate(config.rootpath, str(config.rootpath / str(ini[0])), ini[1])
    return specfile.locate(config.rootpath)


def _ini(config: pytest.Config) -> dict[str, tuple[object, str]]:
    place = config.inipath.name if config.inipath else "ini file"
    found: dict[str, tuple[object, str]] = {}
    for name in settings_module.NAMES:
        try:
            value = config.getini(f"vram_{name}")
        except (TypeError, ValueError) as error:
            raise BadInput(f"{error} (from vram_{name} in {place})") from None
        if value:
            found[name] = (value, f"vram_{name} in {place}")
    return found


def _resolve(config: pytest.Config, specs: specfile.SpecFile) -> Settings:
    _refuse_ignored_table(config)
    options = {name: getattr(config.option, f"vram_{name}", None) for name in settings_module.NAMES}
    found = settings_module.gather(options, os.environ, _ini(config), specs.values, specs.path)
    return settings_module.resolve(found, config_path=Path(specs.path) if specs.path else None)


def _refuse_ignored_table(config: pytest.Config) -> None:
    """Pytest 8 ignores ``[tool.pytest]``: a budget there would silently be off."""
    if pytest.version_tuple >= (9, 0):
        return
    path = config.rootpath / "pyproject.toml"
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8")).get("tool", {}).get("pytest", {})
    except (OSError, ValueError, RecursionError):
        return
    ignored = sorted(key for key in table if key.startswith("vram_"))
    if ignored:
        raise BadInput(
            f"pytest {pytest.__version__} ignores [tool.pytest] in {path.name}, so {ignored[0]} there would be off:"
            " move it to [tool.pytest.ini_options], or upgrade to pytest 9"
        )


class Activity:
    """Hooks around each test."""

    def __init__(self, run: Run, config: pytest.Config) -> None:
        self.run = run
        self.config = config
        self.shared = Shared(run, int(run.settings.interval_ms * 1e6))
        self.cases = Cases(run, config)
        self._missing: str | None = None
        self._next: pytest.Item | None = None
        self._ends: bool | None = None
        self._all: bool | None = None
        self._present: Quick | None = None
        self._calling = False
        self._session: pytest.Session | None = None
        self._serial: bool | None = None
        self.shared.serial = self._some_are_serial
        run.opening = self._own_window

    # ------------------------------------------------------------ collection

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Read the markers of every test once."""
        for item in items:
            self._plan(item)

    def _plan(self, item: pytest.Item) -> Plan:
        plan = item.stash.get(PLAN, None)
        if plan is None:
            marks = [(mark.name, mark.args, mark.kwargs) for mark in item.iter_markers()]
            plan = item.stash[PLAN] = plan_of(marks, getattr(item, "fixturenames", ()))
            self.cases.follow(item, plan)
            soak_hooks.follow(item, plan)
        return plan

    # ------------------------------------------------------------ one test

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, nextitem: pytest.Item | None) -> None:
        """Remember what comes next: the window that short tests share must not outlive the last of them."""
        self._next = nextitem
        self._ends = None

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self) -> Generator[None, object, object]:
        """While a test runs, the reports that are made are those of its subtests; the window goes on."""
        self._calling = True
        try:
            return (yield)
        finally:
            self._calling = False

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Refuse what cannot run, and open the test's window before its first fixture.

        An ordinary implementation: within the wrappers of other plugins, whose tear-down expects their set-up, after
        skip marks are evaluated, and before pytest's own, which sets the fixtures up.
        """
        if self.run.is_copy:
            return
        self._session = item.session
        # Of an attempt before, of whose teardown nobody made a report.
        self._leave(item)
        plan = self._plan(item)
        if plan.backend is not None and plan.backend not in self.run.specs.backends:
            known = specfile.known(self.run.specs.backends, plan.backend)
            plan.errors.append(f"@vram_backend: {plan.backend!r} is not a backend of the config file: {known}")
        wanted = self.cases.wanted(item, plan)
        if plan.errors:
            pytest.fail("\n".join(dict.fromkeys(plan.errors)), pytrace=False)
        self._admit(plan)
        try:
            if self._is_quick(plan):
                self._begin(item, plan)
            else:
                self.shared.close()
                before = self.cases.ask_baseline(key_of(item), plan, wanted)
                attempt = self.run.attempted(key_of(item), plan)
                attempt.wanted, attempt.before = wanted, before
                self.run.start(attempt, judged=self._judges)
                item.stash[ATTEMPT] = attempt
                idle_hooks.begin(self.run, attempt)
                if self.run.predicted and attempt.window is None:
                    self._unmeasured(attempt)
        except VramError as error:
            raise failure(error) from None

    @property
    def _judges(self) -> bool:
        """Whether tests that ask for nothing are judged."""
        if self._all is None:
            self._all = judges_all(self.run)
        return self._all

    def _is_quick(self, plan: Plan) -> bool:
        """Whether a test asks for nothing, so that it needs no window of its own."""
        return not (plan.takes_part or plan.errors or (plan.may_fail and self._judges) or self.run.predicted)

    def _begin(self, item: pytest.Item, plan: Plan) -> None:
        """A test that asks for nothing begins: in the shared window where it is judged, at the gate in any case."""
        attempt = item.stash[ATTEMPT] = self.run.attempted(key_of(item), plan)
        attempt.judged = self._judges
        attempt.gated = self.shared.enter(judged=attempt.judged)
        if not attempt.gated:
            self.run.open(attempt)
        elif attempt.judged:
            self._present = self.shared.begin(attempt, item.nodeid, item.location)

    def _unmeasured(self, attempt: Attempt) -> None:
        """A test without a window begins, beside no test of this run that wants to be alone."""
        if not self._some_are_serial():
            return
        if not attempt.plan.serial:
            attempt.gated = self.shared.enter(judged=False)
        if not attempt.gated:
            self.run.open(attempt)
            self.run.end(attempt, {})  # it needs the admission, which lasts, and no figures

    def _some_are_serial(self) -> bool:
        """Whether some test of this run wants to be alone; every process of it sees all of them."""
        if self._serial is None:
            items = self._session.items if self._session is not None else []
            self._serial = any(self._plan(item).serial for item in items)
        return self._serial

    def _own_window(self, attempt: Attempt) -> None:
        """An attempt is about to get a window of its own, maybe in the middle of a test that had none."""
        test = self._present
        if test is not None and test.attempt is attempt:
            self.shared.end(test, "passed", 0.0, None)
            self._present = None
            judgement = self.shared.close(test, name=attempt.key)
            if judgement is not None:
                attempt.earlier = judgement.findings
        else:
            self.shared.close()
        if attempt.gated:
            attempt.gated = False
            self.shared.leave()

    def _admit(self, plan: Plan) -> None:
        for wanted in plan.requires:
            capacity = capacity_of(self.run.measurable)
            if isinstance(capacity, Reading) and capacity.bytes * (1 + NOMINAL_TOLERANCE) < wanted["size"]:
                pytest.skip(
                    f"@requires_vram({wanted['text']!r}): the device has {units.mib(capacity.bytes)},"
                    f" less than {units.with_mib(wanted['size'])}"
                )
        reason = self._unjudgeable(plan)
        if reason is not None:
            reason = f"{Collector.UNMEASURED} {reason}"
            if self.run.settings.missing == "fail":
                # Raised before the set-up, yet a failure and no error: the collector shows it so.
                self._missing = f"{reason} (--vram-missing=fail makes this a failure)"
                pytest.fail(self._missing, pytrace=False)
            pytest.skip(reason)

    def _unjudgeable(self, plan: Plan) -> str | None:
        """Why none of this test's markers can be judged in this run; ``None`` where one can, or there is none."""
        if self.run.predicted:
            return predicting.unjudgeable(plan)
        if not plan.needs_device or self.run.measurable:
            return None
        hint = "" if self.run.host_only else " (--vram-device=cpu measures host memory instead)"
        return f"{self.run.why_unmeasurable()}{hint}"

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Judge the window in the call's report, or in the set-up's where that failed."""
        report = yield
        if self._calling or self.run.is_copy:
            return report
        if call.when == "setup":
            if self._missing is not None:
                report.vram = {"category": "failed"}  # type: ignore[attr-defined]  # pytest keeps it
                self._missing = None
            if report.passed:
                return report
        try:
            return self._concluded(item, call, report)
        except (KeyboardInterrupt, pytest.exit.Exception):
            raise
        except BaseException as error:  # noqa: BLE001 - a signal handler's, such as pytest-timeout's, is the test's
            report.outcome = "failed"
            report.longrepr = _representation(item, str(error) or repr(error))
            return report

    def _concluded(
        self, item: pytest.Item, call: pytest.CallInfo[None], report: pytest.TestReport
    ) -> pytest.TestReport:
        """The report with what became of the test's memory."""
        if call.when == "teardown":
            if (attempt := item.stash.get(ATTEMPT, None)) is not None:
                idle_hooks.conclude(self.run, item, attempt, report, _representation)
            self._leave(item)
            return report
        if self._present is not None:
            report = self._end(self._present, item, call, report)
        else:
            report = self._judged(item, call, report)
        if self._is_last:
            self.shared.close()
        self._hand_over(report)
        return report

    @property
    def _is_last(self) -> bool:
        """Whether no test follows that could share the window, as far as this process knows."""
        if self._ends is None:
            self._ends = self._next is None or not self._is_quick(self._plan(self._next))
        return self._ends

    def _leave(self, item: pytest.Item) -> None:
        """The test is over, teardown included."""
        attempt = item.stash.get(ATTEMPT, None)
        if attempt is not None:
            del item.stash[ATTEMPT]
            if attempt.gated:
                attempt.gated = False
                self.shared.leave()
            self.run.leave(attempt)

    def _end(
        self, test: Quick, item: pytest.Item, call: pytest.CallInfo[None], report: pytest.TestReport
    ) -> pytest.TestReport:
        """A test of the shared window is over; where that is due, it is closed and judged."""
        self._present = None
        before = self._before(item, call, report)
        self.shared.end(test, before, call.duration, _first_line(report))
        if before != "passed" or self._is_last or self.shared.is_alone(test):
            judgement = self.shared.close(test)
            if judgement is not None:
                self._deliver(item, call, report, judgement, before, earlier=before)
        elif self._next is not None and self.shared.is_due():
            self.shared.turn_over(key_of(self._next))
        return report

    def _hand_over(self, report: pytest.TestReport) -> None:
        """Let a report carry what is known of tests whose reports are out."""
        if self.shared.pending:
            data: dict[str, Any] = getattr(report, "vram", {"category": None})
            # From a worker of xdist they travel.
            pending = self.shared.pending
            data["batches"] = [msgspec.to_builtins(batch) for batch in pending] if self.run.worker else list(pending)
            report.vram = data  # type: ignore[attr-defined]  # pytest keeps it
            self.shared.pending.clear()

    def _judged(self, item: pytest.Item, call: pytest.CallInfo[None], report: pytest.TestReport) -> pytest.TestReport:
        attempt = item.stash.get(ATTEMPT, None)
        if attempt is None:
            if call.when == "setup" and self._plan(item).takes_part:
                self._refused(item, call, report)
            return report
        predicted = self.run.predicted and predicting.applies(self.run, attempt)
        if attempt.window is None and not attempt.trouble and not predicted:
            return report
        closed = self.run.end(attempt, {"outcome": report.outcome})
        if not attempt.judged:
            return report
        before = self._before(item, call, report)
        try:
            judgement = judge(self.run, attempt, closed, seconds=call.duration, outcome=before)
        except Exception as error:  # noqa: BLE001 - the results of the other tests must not be lost for a defect here
            judgement = broken(self.run, attempt, error, seconds=call.duration, outcome=before)
        self._deliver(item, call, report, judgement, before)
        return report

    def _before(self, item: pytest.Item, call: pytest.CallInfo[None], report: pytest.TestReport) -> Outcome:
        """What became of the test before it is judged."""
        if report.passed:
            return "passed"
        if report.failed:
            if call.when == "setup":
                return "error"
            error = call.excinfo.value if call.excinfo is not None else None
            return "error" if isinstance(error, VramError) and not isinstance(error, BadInput) else "failed"
        if call.excinfo is not None and str(call.excinfo.value).startswith(INCONCLUSIVE):
            return self._undecided(item, report, str(call.excinfo.value))
        return "skipped"

    def _deliver(
        self,
        item: pytest.Item,
        call: pytest.CallInfo[None],
        report: pytest.TestReport,
        judgement: Judgement,
        before: Outcome,
        **noted: str,
    ) -> None:
        """Put a judgement on the report of its test. ``noted``: what the journal's line has besides."""
        outcome = self._apply(item, call, report, judgement, before)
        record = with_outcome(judgement, outcome, _first_line(report))
        attempt = item.stash.get(ATTEMPT, None)
        if attempt is not None:
            idle_hooks.called(attempt, report)
        if report.failed and attempt is not None:
            error = call.excinfo.value if call.excinfo is not None else None
            record, said = advising.advised(self.run, attempt, record, judgement.backends, error)
            report.sections.extend(said)
        data = {
            "category": outcome if outcome in ("error", "inconclusive") and call.when == "call" else None,
            "record": msgspec.to_builtins(record),
            "backends": [msgspec.to_builtins(backend) for backend in judgement.backends],
        }
        report.vram = data  # type: ignore[attr-defined]  # pytest keeps it
        self.run.note(
            "test", nodeid=record.nodeid, outcome=outcome, attempt=record.attempt, worker=self.run.worker, **noted
        )

    def _refused(self, item: pytest.Item, call: pytest.CallInfo[None], report: pytest.TestReport) -> None:
        """A test of ours that ended before its window was opened stands in the report as well."""
        data: dict[str, Any] = getattr(report, "vram", {"category": None})
        outcome: Outcome = "skipped" if report.skipped else "failed" if data["category"] == "failed" else "error"
        if isinstance(report.longrepr, tuple):  # a skip of ours is the test's, not this file's
            path, line, _ = item.location
            report.longrepr = (path, (line or 0) + 1, report.longrepr[2])
        record = TestRecord(
            nodeid=key_of(item),
            outcome=outcome,
            seconds=round(call.duration, 6),
            reason=_first_line(report),
            worker=self.run.worker,
        )
        report.vram = {**data, "record": msgspec.to_builtins(record), "backends": []}  # type: ignore[attr-defined]  # pytest keeps it

    def _undecided(self, item: pytest.Item, report: pytest.TestReport, reason: str) -> Outcome:
        """The test itself could not decide."""
        if self.run.settings.missing != "fail":
            return "inconclusive"
        report.outcome = "failed"
        report.longrepr = _representation(item, f"{reason} (--vram-missing=fail makes this a failure)")
        return "failed"

    def _apply(
        self,
        item: pytest.Item,
        call: pytest.CallInfo[None],
        report: pytest.TestReport,
        judgement: Judgement,
        before: Outcome,
    ) -> Outcome:
        """Put the findings on the report, and return the outcome of the test."""
        if not judgement.findings:
            return before
        for finding in judgement.findings:
            report.sections.append((f"vram: {finding.section}", finding.text))
        strict = call.excinfo is None and report.failed and report.longreprtext.startswith("[XPASS(strict)]")
        if before != "passed" and not strict:
            return before
        verdict = judgement.verdict
        if verdict == "inconclusive" and self.run.settings.missing == "fail":
            verdict = "failed"
        first = next((f for f in judgement.findings if f.verdict == verdict), judgement.findings[0])
        message = first.text if verdict != "failed" or first.verdict == "failed" else INCONCLUSIVE + first.text
        if verdict == "inconclusive":
            path, line, _ = item.location
            report.outcome = "skipped"
            report.longrepr = (path, (line or 0) + 1, INCONCLUSIVE + message)
            return "inconclusive"
        if (strict or hasattr(report, "wasxfail")) and verdict == "failed" and _expects(item):
            report.wasxfail = getattr(report, "wasxfail", "") or message.splitlines()[0]
            report.outcome = "skipped"
            report.longrepr = None
            return "skipped"
        if hasattr(report, "wasxfail"):
            del report.wasxfail
        report.outcome = "failed"
        report.longrepr = _representation(item, message)
        del report.sections[-len(judgement.findings) :]
        report.sections.extend(
            (f"vram: {finding.section}", finding.text) for finding in judgement.findings if finding is not first
        )
        return "error" if verdict == "error" else "failed"

    # ------------------------------------------------------------ the end

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """What no report could carry any more is handed over; a worker says good-bye.

        The controller's end is the collector's work.
        """
        if self.run.is_copy:
            return
        self.shared.close()
        self.shared.give_up()
        if self.shared.pending:
            batches = [msgspec.to_builtins(batch) for batch in self.shared.pending]
            self.shared.pending.clear()
            output = getattr(self.config, "workeroutput", None)
            collector = self.config.pluginmanager.get_plugin(Collector.NAME)
            if output is not None:
                output[Collector.NAME] = msgspec.json.encode(batches).decode()
            elif collector is not None:
                collector.take(batches)
                if session.testsfailed and session.exitstatus == pytest.ExitCode.OK:
                    session.exitstatus = pytest.ExitCode.TESTS_FAILED
        if self.run.worker:
            self.run.close()


def _expects(item: pytest.Item) -> bool:
    """Whether an expected failure of this test may be a failed check: not where ``raises`` names other exceptions."""
    raises = next((mark.kwargs.get("raises") for mark in item.iter_markers("xfail") if mark.kwargs.get("raises")), None)
    return raises is None or issubclass(pytest.fail.Exception, raises)


def _representation(item: pytest.Item, message: str) -> Any:
    """The message as pytest shows a failure, so that its first line stands in the short summary and in JUnit."""
    try:
        pytest.fail(message, pytrace=False)
    except pytest.fail.Exception:
        return item.repr_failure(pytest.ExceptionInfo.from_current())


def _first_line(report: pytest.TestReport) -> str | None:
    if report.outcome == "passed":
        return None
    if isinstance(report.longrepr, tuple):
        return str(report.longrepr[2])
    crash = getattr(report.longrepr, "reprcrash", None)
    text = (crash.message if crash is not None else report.longreprtext).strip()
    return text.splitlines()[0][:300] if text else None


def key_of(item: pytest.Item) -> str:
    """Key of a test in reports: its node id, and for the shipped suite one that is the same wherever it runs from."""
    module = getattr(getattr(item, "module", None), "__name__", "")
    for package in ("pytest_vram_specs.", "test_specs."):
        if module.startswith(package):
            _, _, rest = item.nodeid.partition("::")
            return f"pytest_vram_specs.{module.removeprefix(package)}::{rest}"
    return item.nodeid
