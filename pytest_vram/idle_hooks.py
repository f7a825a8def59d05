"""Where the hooks of a test meet its ``idle_rollback`` marker: the verdict comes with the report of its teardown."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from pytest_vram.outcomes import INCONCLUSIVE

if TYPE_CHECKING:
    from collections.abc import Callable

    from pytest_vram.checks.finding import Finding
    from pytest_vram.run import Attempt, Run


def begin(run: Run, attempt: Attempt) -> None:
    """The window of a test is open: read its baseline, where its marker asks for one.

    :raises KeeperError: the keeper is lost.
    """
    if attempt.plan.idle is None:
        return
    from pytest_vram.idling import Idle  # a run without such a marker imports nothing for it

    attempt.idle = Idle(run, attempt.plan.idle)
    if not run.predicted:
        attempt.idle.begin()


def called(attempt: Attempt, report: pytest.TestReport) -> None:
    """The call of a test is judged: whether it passed, and the turns of its sessions where it did not."""
    attempt.passed = report.passed and report.when == "call" and not hasattr(report, "wasxfail")
    if report.failed:
        _show_turns(attempt, report)


def _show_turns(attempt: Attempt, report: pytest.TestReport) -> None:
    if attempt.sessions:
        from pytest_vram.session_fixture import sections

        report.sections.extend(sections(attempt))


def conclude(
    run: Run,
    item: pytest.Item,
    attempt: Attempt,
    report: pytest.TestReport,
    represent: Callable[[pytest.Item, str], Any],
) -> None:
    """The teardown is over: judge the idle memory of a test that passed until here, and put it on this report.

    What the test had failed for already is not followed by a second failure.
    """
    if attempt.idle is None or not attempt.passed or not report.passed:
        return
    record, findings = attempt.idle.judge()
    data: dict[str, Any] = {"category": None, "idle": msgspec.to_builtins(record), "findings": []}
    if findings:
        data |= _ended(run, item, report, findings, represent)
        _show_turns(attempt, report)
    report.vram = data  # type: ignore[attr-defined]  # pytest keeps it


def _ended(
    run: Run,
    item: pytest.Item,
    report: pytest.TestReport,
    findings: list[Finding],
    represent: Callable[[pytest.Item, str], Any],
) -> dict[str, Any]:
    verdicts = {finding.verdict for finding in findings}
    verdict = next(one for one in ("error", "failed", "inconclusive") if one in verdicts)
    first = next(finding for finding in findings if finding.verdict == verdict)
    rest = [finding for finding in findings if finding is not first]
    report.sections.extend((f"vram: {finding.section}", finding.text) for finding in rest)
    message = first.text
    if verdict == "inconclusive":
        message = INCONCLUSIVE + message
    if verdict == "inconclusive" and run.settings.missing != "fail":
        path, line, _ = item.location
        report.outcome = "skipped"
        report.longrepr = (path, (line or 0) + 1, message)
        outcome = "inconclusive"
    else:
        outcome = "error" if verdict == "error" else "failed"
        if verdict == "inconclusive":
            message += " (--vram-missing=fail makes this a failure)"
        report.outcome = "failed"
        report.longrepr = represent(item, message)
    return {
        "category": outcome,
        "outcome": outcome,
        "reason": message.splitlines()[0][:300],
        "findings": [msgspec.to_builtins(finding) for finding in findings],
    }
