"""``vram toolcalls``: ``lint`` finds contradictions in cases, ``run`` asks a deployment them outside of pytest."""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_vram.cli import toolcalls_arguments
from pytest_vram.cli.output import FAILS, HOLDS, Answer
from pytest_vram.errors import BadInput

if TYPE_CHECKING:
    from pytest_vram.toolcalls.cases import Case
    from pytest_vram.toolcalls.lint import LintDocument

#: The target at which the detectable drop is told, which is a set's own property at one target only.
EXAMPLE_TARGET = 0.94


def arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of both."""
    actions = parser.add_subparsers(dest="action", metavar="lint|run")
    lint = actions.add_parser("lint", help="find contradictions in cases", allow_abbrev=False)
    lint.add_argument("files", nargs="*", metavar="CASES", help="JSONL file, folder, shipped:NAME[,NAME] or bfcl:NAME")
    run = actions.add_parser("run", help="ask a deployment the cases, and judge the rate", allow_abbrev=False)
    toolcalls_arguments.of_run(run)
    for action in (lint, run):
        action.add_argument("--json", action="store_true", help="print one JSON document and nothing else")


def run(options: argparse.Namespace, rest: list[str]) -> Answer:
    """Do the one or the other. :raises BadInput: neither is named, or cases cannot be read."""
    if options.action is None:
        raise BadInput("say which: vram toolcalls lint [CASES …], or vram toolcalls run")
    if options.action == "run":
        answer: Answer = importlib.import_module("pytest_vram.cli.toolcalls_run").run(options, rest)
        return answer
    if rest:
        raise BadInput(f"vram toolcalls lint does not take {rest[0]!r}: it takes files of cases and --json")
    return _lint(options.files)


def _lint(wanted: list[str]) -> Answer:
    from pytest_vram.stats import detectable_drop
    from pytest_vram.toolcalls import places
    from pytest_vram.toolcalls.lint import Finding, LintDocument, lint

    bad: list[places.BadLine] = []
    sets = [places.read(place, base=Path.cwd(), bad=bad) for place in wanted or [places.SHIPPED]]
    together = sets[0] if len(sets) == 1 else places.case_set("", [case for one in sets for case in one], bad)
    unusable = [Finding(level="error", origin=one.origin, case="", rule="unusable", text=one.why) for one in bad]
    findings = [*unusable, *lint(together.cases)]
    errors = sum(finding.level == "error" for finding in findings)
    document = LintDocument(
        sets=[one.name for one in sets],
        digest=together.digest,
        cases=len(together),
        families=len({case.family for case in together.cases}),
        categories=_counts(together.cases, "category"),
        languages=_counts(together.cases, "language"),
        target=EXAMPLE_TARGET,
        detectable=detectable_drop(len(together), EXAMPLE_TARGET) if len(together) else None,
        errors=errors,
        warnings=len(findings) - errors,
        findings=findings,
    )
    return Answer(code=FAILS if errors else HOLDS, document=document, lines=tuple(_lines(document)))


def _counts(cases: list[Case], field: str) -> dict[str, int]:
    """Value → cases, the most frequent first."""
    found: dict[str, int] = {}
    for case in cases:
        value = getattr(case, field)
        found[value] = found.get(value, 0) + 1
    return dict(sorted(found.items(), key=lambda item: (-item[1], item[0])))


def _lines(document: LintDocument) -> list[str]:
    lines = [
        f"{one.origin}: {one.level}: {one.text} [{f'{one.case}, ' if one.case else ''}{one.rule}]"
        for one in document.findings
    ]
    if lines:
        lines.append("")
    amount = f"{_counted(document.cases, 'case')} of {_counted(document.families, 'family', 'families')}"
    lines.append(f"{', '.join(document.sets)}: {amount}")
    if document.cases:
        lines.append(f"  categories  {_listed(document.categories)}")
        lines.append(f"  languages   {_listed(document.languages)}")
    at = f"at a target of {document.target:.0%}"
    if document.detectable is None:
        lines.append(f"  detects     no drop {at}: there are too few cases")
    else:
        points = f"{100 * document.detectable:.1f} points"
        lines.append(f"  detects     a drop of {points} {at} (80 % power; more where families fail together)")
    lines.append(f"{_counted(document.errors, 'error')}, {_counted(document.warnings, 'warning')}")
    return lines


def _counted(count: int, one: str, several: str = "") -> str:
    return f"{count} {one if count == 1 else several or one + 's'}"


def _listed(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items())
