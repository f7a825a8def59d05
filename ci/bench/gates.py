"""How often are verdicts on tool calls wrong? Thousands of simulated runs with a known truth, through the real judge.

Run from a checkout; prints JSON, with ``--markdown`` the tables of ``docs/toolcall-statistics.md``::

    python ci/bench/gates.py [--runs 2000] [--seed 1] [--part sprt] [--markdown] [--save FILE]

The first five parts: answers are drawn, independent or correlated within the real families of the shipped cases
(beta-binomial with an intraclass correlation), asked one case of each family first, and judged. ``pipeline``: the cases
are asked of a scripted backend with a set true accuracy and a mix of defects, diagnosed and scored; each distinct
answer once, and runs are drawn from them. Ends with 1 where a promise is not kept. Three minutes of one core.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from pytest_vram.spec import Sampling, ToolCalling
from pytest_vram.stats import fixed_sample_size, normal_quantile, sprt
from pytest_vram.toolcalls.cases import CaseSet, load, stratified
from pytest_vram.toolcalls.evaluation import evaluate
from pytest_vram.toolcalls.results import Answer, CaseResult, Results
from pytest_vram.toolcalls.verdict import Mode, Paired, Verdict, compare, judge

TARGET, MARGIN = 0.94, 0.05
CORRELATIONS = (0.0, 0.05, 0.1, 0.3)
RIGHT = Answer(outcome="right", kind="valid")
WRONG = Answer(outcome="wrong", kind="wrong_value", kinds=("wrong_value",))


class Row(NamedTuple):
    """One figure. :ivar promise: ``at most`` or ``at least`` what it must be; "" where it is only told."""

    part: str
    what: str
    setting: str
    correlation: float | None
    runs: int
    figure: float
    unit: str = "share"
    promise: str = ""
    limit: float | None = None
    note: str = ""

    @property
    def kept(self) -> bool:
        """Whether the promise is kept; an error rate may exceed it by what chance does 1 time of 100.

        The sequential test uses up its errors exactly, so that half of its samples lie above them.
        """
        if self.limit is None:
            return True
        if self.promise == "at least":
            return self.figure >= self.limit
        return self.figure <= self.limit + allowed_by_chance(self.limit, self.runs)


def allowed_by_chance(limit: float, runs: int) -> float:
    """How far beyond its limit the share of a sample lies 1 time of 100, where the true share is the limit."""
    return normal_quantile(0.99) * math.sqrt(limit * (1 - limit) / runs)


class Asked(NamedTuple):
    """Cases in the order in which they are asked: both outcomes of each, made once."""

    families: list[str]
    right: list[CaseResult]
    wrong: list[CaseResult]

    @property
    def n(self) -> int:
        return len(self.families)

    def results(self, outcomes: Sequence[bool], name: str = "now") -> Results:
        """Results with these outcomes."""
        chosen = [self.right[i] if held else self.wrong[i] for i, held in enumerate(outcomes)]
        return _results(chosen, name)


def _results(chosen: list[CaseResult], name: str) -> Results:
    return Results(
        backend=name,
        protocol="tools",
        stream=False,
        cases="simulated",
        digest="simulated",
        seed=0,
        planned=len(chosen),
        results=chosen,
    )


def asked(families: Sequence[str]) -> Asked:
    """Cases of these families, in this order."""
    made = [
        [
            CaseResult(id=str(i), family=family, category="single", language="en", first=answer)
            for i, family in enumerate(families)
        ]
        for answer in (RIGHT, WRONG)
    ]
    return Asked(list(families), made[0], made[1])


def made_up(sizes: Sequence[int]) -> Asked:
    """Families of these sizes, one case of each first, then the second of each."""
    return asked([f"f{f}" for turn in range(max(sizes)) for f, size in enumerate(sizes) if turn < size])


def drawn(rng: random.Random, cases: Asked, rate: float, correlation: float) -> list[bool]:
    """Outcomes of cases at a true rate, with a correlation within families (beta-binomial)."""
    if correlation == 0:
        return [rng.random() < rate for _ in range(cases.n)]
    weight = (1 - correlation) / correlation
    rates = {family: rng.betavariate(rate * weight, (1 - rate) * weight) for family in dict.fromkeys(cases.families)}
    return [rng.random() < rates[family] for family in cases.families]


def drawn_pairs(
    rng: random.Random, cases: Asked, lost: float, won: float, correlation: float
) -> tuple[list[bool], list[bool]]:
    """Outcomes before and now, with these probabilities of a change (Dirichlet within families)."""
    shares = dict.fromkeys(dict.fromkeys(cases.families), (lost, won))
    if correlation:
        weight = (1 - correlation) / correlation
        for family in shares:
            parts = [rng.gammavariate(share * weight, 1) if share else 0.0 for share in (lost, won, 1 - lost - won)]
            shares[family] = (parts[0] / sum(parts), parts[1] / sum(parts))
    before, now = [], []
    for family in cases.families:
        loses, wins = shares[family]
        draw = rng.random()
        was = draw < loses or (draw >= loses + wins and rng.random() < TARGET)
        before.append(was)
        now.append(not was if draw < loses + wins else was)
    return before, now


class Bench:
    """Runs of one benchmark: seeded by the row, so that rows can be taken alone."""

    def __init__(self, runs: int, seed: int, families: Sequence[str]) -> None:
        self.runs, self.seed = runs, seed
        self.shipped = asked(families)
        self.first_300 = asked(families[:300])

    def generator(self, *parts: object) -> random.Random:
        return random.Random(f"{self.seed} {parts}")

    def verdicts(
        self, mode: Mode, cases: Asked, rate: float, correlation: float, *, target: float = TARGET
    ) -> Iterator[Verdict]:
        """Verdicts of all runs."""
        rng = self.generator(mode, cases.n, rate, correlation, target)
        for _ in range(self.runs):
            yield judge(cases.results(drawn(rng, cases, rate, correlation)), target=target, mode=mode, margin=MARGIN)

    def share(self, mode: Mode, cases: Asked, rate: float, correlation: float, outcome: str) -> float:
        """How often a mode comes to this outcome."""
        return sum(v.outcome == outcome for v in self.verdicts(mode, cases, rate, correlation)) / self.runs

    def pairs(self, cases: Asked, lost: float, won: float, correlation: float) -> Iterator[Paired]:
        """Comparisons of all runs."""
        rng = self.generator("pairs", cases.n, lost, won, correlation)
        for _ in range(self.runs):
            before, now = drawn_pairs(rng, cases, lost, won, correlation)
            yield compare(cases.results(now), cases.results(before, "before"), judge="first_try", margin=MARGIN)


def _at(cases: Asked) -> str:
    families = len(set(cases.families))
    return f"{cases.n} cases of {families} families" if families < cases.n else f"{cases.n} independent cases"


def not_below(bench: Bench) -> Iterator[Row]:
    """False alarms at the target, and drops that are found."""
    cases = bench.first_300
    for correlation in CORRELATIONS:
        found = bench.share("not_below", cases, TARGET, correlation, "failed")
        yield Row(
            "not_below",
            "false alarms, true rate 94 %",
            _at(cases),
            correlation,
            bench.runs,
            found,
            "share",
            "at most",
            0.05,
        )
    for correlation in CORRELATIONS:
        verdicts = list(bench.verdicts("not_below", cases, TARGET - MARGIN, correlation))
        found = sum(v.outcome == "failed" for v in verdicts) / bench.runs
        drops = sorted(v.detectable for v in verdicts if v.detectable is not None)
        yield Row(
            "not_below",
            "found, true rate 89 %",
            _at(cases),
            correlation,
            bench.runs,
            found,
            "share",
            "at least" if not correlation else "",
            0.85 if not correlation else None,
            f"verdicts name a drop of {100 * drops[len(drops) // 2]:.1f} points",
        )
    for n in (50, 100, 200):
        few = asked([f"f{i}" for i in range(n)])
        found = bench.share("not_below", few, TARGET, 0.0, "failed")
        yield Row(
            "not_below", "false alarms, true rate 94 %", _at(few), None, bench.runs, found, "share", "at most", 0.05
        )
        found = bench.share("not_below", few, TARGET - MARGIN, 0.0, "failed")
        yield Row("not_below", "found, true rate 89 %", _at(few), None, bench.runs, found)


def proven(bench: Bench) -> Iterator[Row]:
    """Proofs of what is not so, and of what is."""
    few = made_up([5] * 14)
    for cases in (bench.first_300, few):
        for correlation in (0.0, 0.1, 0.3):
            found = bench.share("proven", cases, TARGET - 1e-9, correlation, "passed")
            promise = correlation <= 0.1
            yield Row(
                "proven",
                "false proofs, true rate just below 94 %",
                _at(cases),
                correlation,
                bench.runs,
                found,
                "share",
                "at most" if promise else "",
                0.05 if promise else None,
            )
    for rate in (0.97, 0.98, 0.99):
        found = bench.share("proven", bench.first_300, rate, 0.05, "passed")
        yield Row("proven", f"proven, true rate {100 * rate:.0f} %", _at(bench.first_300), 0.05, bench.runs, found)


def sequential(bench: Bench) -> Iterator[Row]:
    """Errors of the sequential test and what it saves beside the fixed test of the same errors."""
    fixed = fixed_sample_size(TARGET, TARGET - MARGIN)
    for cases in (bench.first_300, bench.shipped, asked([f"f{i}" for i in range(400)])):
        correlations: tuple[float | None, ...] = CORRELATIONS if cases is bench.first_300 else (0.0, 0.1)
        for correlation in correlations if len(set(cases.families)) < cases.n else (None,):
            for rate, wrong in ((TARGET, "failed"), (TARGET - MARGIN, "passed")):
                needed, bad, open_ = 0, 0, 0
                for verdict in bench.verdicts("sprt", cases, rate, correlation or 0.0):
                    needed += verdict.decided_after or verdict.n
                    bad += verdict.outcome == wrong
                    open_ += verdict.outcome == "inconclusive"
                name = f"wrongly {wrong}, true rate {100 * rate:.0f} %"
                promise = not correlation or correlation <= 0.05
                yield Row(
                    "sprt",
                    name,
                    _at(cases),
                    correlation,
                    bench.runs,
                    bad / bench.runs,
                    "share",
                    "at most" if promise else "",
                    0.05 if promise else None,
                    f"{100 * open_ / bench.runs:.1f} % inconclusive",
                )
                saved = 1 - needed / bench.runs / fixed
                yield Row(
                    "sprt",
                    f"saved beside {fixed} cases, true rate {100 * rate:.0f} %",
                    _at(cases),
                    correlation,
                    bench.runs,
                    saved,
                    "share",
                    "at least" if not correlation else "",
                    0.4 if not correlation else None,
                    f"{needed / bench.runs:.0f} cases on average",
                )
    test = sprt(TARGET, TARGET - MARGIN, 0.05, 0.05, 300)
    for rate in (1.0, 0.97, 0.915, 0.8, 0.0):
        exact = test.operating_characteristic(rate)
        yield Row(
            "sprt",
            f"cases on average, true rate {100 * rate:g} %",
            "300 independent cases",
            None,
            0,
            exact.average,
            "cases",
            note=f"exact; passed {exact.passed:.2f}, failed {exact.failed:.2f}, inconclusive {exact.inconclusive:.2f}",
        )


def point(bench: Bench) -> Iterator[Row]:
    """How often the literal rule fails what is at its target."""
    for correlation in (0.0, 0.1):
        found = bench.share("point", bench.first_300, TARGET, correlation, "failed")
        yield Row("point", "false alarms, true rate 94 %", _at(bench.first_300), correlation, bench.runs, found)


def paired(bench: Bench) -> Iterator[Row]:
    """Whether the comparison holds its level, and its power."""
    cases = bench.first_300
    levels: list[tuple[str, float, float, Callable[[Paired], bool], bool]] = [
        (
            "shown not worse, true difference -5 points, 8 % changed",
            0.065,
            0.015,
            lambda p: p.outcome == "passed",
            True,
        ),
        ("shown not worse, true difference -5 points, 5 % changed", 0.05, 0.0, lambda p: p.outcome == "passed", True),
        ("failed, true difference 0, 8 % changed", 0.04, 0.04, lambda p: p.outcome == "failed", True),
        ("upper bound below 0, true difference 0, 8 % changed", 0.04, 0.04, lambda p: p.high < 0, True),
        ("shown not worse, true difference 0, 4 % changed", 0.02, 0.02, lambda p: p.outcome == "passed", False),
        ("shown not worse, true difference 0, 8 % changed", 0.04, 0.04, lambda p: p.outcome == "passed", False),
        ("failed, true difference -10 points, 12 % changed", 0.11, 0.01, lambda p: p.outcome == "failed", False),
    ]
    # The two rows with the same truth share their runs.
    made: dict[tuple[float, float, float], list[Paired]] = {}
    for correlation in (0.0, 0.1, 0.3):
        for what, lost, won, counts, level in levels if correlation <= 0.1 else levels[:4]:
            key = (lost, won, correlation)
            if key not in made:
                made[key] = list(bench.pairs(cases, lost, won, correlation))
            found = sum(counts(p) for p in made[key]) / bench.runs
            promise = level and correlation <= 0.1
            yield Row(
                "paired",
                what,
                _at(cases),
                correlation,
                bench.runs,
                found,
                "share",
                "at most" if promise else "",
                0.05 if promise else None,
            )


def pipeline(bench: Bench, cases: CaseSet, seed: int) -> Iterator[Row]:
    """Request, scripted answer, diagnosis, score, verdict."""
    from pytest_vram.testing.scripted import WRONG_KINDS, Script, ScriptedClient

    mix = dict.fromkeys(WRONG_KINDS, 1.0)

    def ask(accuracy: float, seed: int, limit: int | None = None) -> list[CaseResult]:
        script = Script(accuracy=accuracy, defects=mix, seed=seed)
        client = ScriptedClient(script, cases)
        return evaluate(
            client, cases, sampling=Sampling(), calling=ToolCalling(), retries=0, seed=seed, limit=limit
        ).results

    right = {result.id: result for result in ask(1.0, seed)}
    wrong: dict[str, list[CaseResult]] = {}
    for turn in range(4):
        for result in ask(0.0, seed + turn):
            wrong.setdefault(result.id, []).append(result)
    many = [result for results in wrong.values() for result in results]
    taken = sum(result.first.outcome == "right" for result in right.values()) / len(right)
    yield Row(
        "pipeline",
        "right answers that are scored right",
        f"{len(right)} answers",
        None,
        1,
        taken,
        "share",
        "at least",
        1.0,
    )
    taken = sum(result.first.outcome == "wrong" for result in many) / len(many)
    yield Row(
        "pipeline",
        "wrong answers that are scored wrong",
        f"{len(many)} answers",
        None,
        1,
        taken,
        "share",
        "at least",
        1.0,
    )
    order = [case.id for case in stratified(cases.cases, min(300, len(cases.cases)), seed=seed)]
    families = asked([right[id_].family for id_ in order])
    for rate, what, promise, limit in (
        (TARGET, "false alarms, true rate 94 %", "at most", 0.05),
        (TARGET - MARGIN, "found, true rate 89 %", "at least", 0.85),
    ):
        rng = bench.generator("pipeline", rate)
        failed = 0
        for _ in range(bench.runs):
            outcomes = drawn(rng, families, rate, 0.0)
            chosen = [right[i] if held else rng.choice(wrong[i]) for i, held in zip(order, outcomes, strict=True)]
            failed += judge(_results(chosen, "scripted"), target=TARGET).outcome == "failed"
        yield Row("pipeline", what, _at(families), 0.0, bench.runs, failed / bench.runs, "share", promise, limit)


def shipped_families(seed: int) -> tuple[CaseSet, list[str]]:
    """The shipped cases, and their families in the order in which they are asked."""
    cases = load()
    return cases, [case.family for case in stratified(cases.cases, len(cases.cases), seed=seed)]


def markdown(rows: Sequence[Row]) -> str:
    """Tables, one for each part."""
    lines: list[str] = []
    for part in dict.fromkeys(row.part for row in rows):
        lines += [
            f"`{part}`:",
            "",
            "| what | cases | correlation | measured | promised | |",
            "|---|---|---|---|---|---|",
        ]
        for row in rows:
            if row.part == part:
                share = row.unit == "share"
                figure = f"{100 * row.figure:.1f} %" if share else f"{row.figure:.0f}"
                limit = f"{row.promise} {100 * row.limit:g} %" if row.limit is not None else ""
                correlation = "" if row.correlation is None else f"{row.correlation:g}"
                lines.append(f"| {row.what} | {row.setting} | {correlation} | {figure} | {limit} | {row.note} |")
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


PARTS: dict[str, Callable[[Bench], Iterator[Row]]] = {
    "not_below": not_below,
    "proven": proven,
    "sprt": sequential,
    "point": point,
    "paired": paired,
}


def main() -> int:
    """Run the parts; 1 where a promise is not kept."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    parser.add_argument("--runs", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--part", choices=[*PARTS, "pipeline"], action="append")
    parser.add_argument("--markdown", action="store_true", help="print tables")
    parser.add_argument("--save", type=Path, help="write the JSON there as well")
    arguments = parser.parse_args()
    began = time.process_time()
    cases, families = shipped_families(arguments.seed)
    bench = Bench(arguments.runs, arguments.seed, families)
    rows: list[Row] = []
    for name in arguments.part or [*PARTS, "pipeline"]:
        made = pipeline(bench, cases, arguments.seed) if name == "pipeline" else PARTS[name](bench)
        for row in made:
            rows.append(row)
            print(f"{row.part}: {row.what}, {row.setting}: {row.figure:.4f}", file=sys.stderr)
    document = {
        "cases": {"name": cases.name, "digest": cases.digest, "count": len(families), "families": len(set(families))},
        "runs": arguments.runs,
        "seed": arguments.seed,
        "seconds": round(time.process_time() - began, 1),
        "rows": [{**row._asdict(), "kept": row.kept} for row in rows],
        "kept": all(row.kept for row in rows),
    }
    if arguments.save is not None:
        arguments.save.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(
        markdown(rows) if arguments.markdown else json.dumps(document, indent=1), end="" if arguments.markdown else "\n"
    )
    return 0 if document["kept"] else 1


if __name__ == "__main__":
    sys.exit(main())
