"""Cases of tool calls in a run of pytest: what a marker asks for, asking a backend once, and what a test is given.

Two tests with the same backend, cases and way of asking share the answers, within one process of the run; a test that
is run again asks anew.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from pytest_vram import specfile
from pytest_vram.errors import BackendDied, BadCases, BadInput, VramError
from pytest_vram.needs import Plan
from pytest_vram.run import Attempt, Run
from pytest_vram.spec import BackendSpec
from pytest_vram.text import printable
from pytest_vram.toolcalls import cases as case_files
from pytest_vram.toolcalls import evaluation, results, verdict
from pytest_vram.toolcalls.cases import CaseSet
from pytest_vram.toolcalls.results import CaseResult, Results
from pytest_vram.toolcalls.verdict import Verdict

if TYPE_CHECKING:
    from pytest_vram.backends.client import VramClient
    from pytest_vram.backends.pool import RunningBackend

logger = logging.getLogger("pytest_vram.toolcalls")
#: Seconds until a person is told how far the cases are, and between two such lines.
AFTER = 10.0
AGAIN = 30.0
#: Order of the cases: the same in every run, so that runs can be compared.
SEED = 0


class Wanted(NamedTuple):
    """What a ``toolcall_accuracy`` marker asks for, its places read.

    :ivar earlier: results of a file. :ivar baseline: the spec of another backend.
    """

    meaning: Mapping[str, Any]
    cases: CaseSet
    earlier: Results | None = None
    baseline: BackendSpec | None = None


class Asked(NamedTuple):
    """Results of one backend in this run. :ivar path: their file; ``None`` where it could not be written, and why."""

    results: Results
    path: Path | None
    trouble: str | None
    reused: bool = False


class ToolcallResult:
    """What became of a test's cases, as its ``vram_toolcalls`` fixture holds it.

    :ivar results: every case with its answers. :ivar verdict: what they say about the target.
    :ivar baseline: results of what it was compared with. :ivar path: of the results file.
    :ivar reused: whether another test of this run had asked the same already.
    """

    def __init__(self, asked: Asked, found: Verdict, *, baseline: Asked | None) -> None:
        self.asked = asked
        self.compared = baseline
        self.results = asked.results
        self.verdict = found
        self.baseline = baseline.results if baseline is not None else None
        self.path = asked.path
        self.reused = asked.reused

    @property
    def rate(self) -> float | None:
        """Share of the cases that were right, by the answer that is judged; ``None``: no case has an answer."""
        return self.verdict.rate

    @property
    def kinds(self) -> Counter[str]:
        """Kind of defect → cases, by the answer that is judged; cases that are right are not counted."""
        answers = (result.judged(self.verdict.judge) for result in self.results.counted())
        return Counter(answer.kind for answer in answers if answer.outcome == "wrong")

    def case(self, id: str) -> CaseResult:
        """The case with this id.

        :raises KeyError: it was not asked.
        """
        for result in self.results.results:
            if result.id == id:
                return result
        raise KeyError(f"no case {id!r} was asked: there are {len(self.results.results)} of {self.results.cases}")

    def __repr__(self) -> str:
        found = self.verdict
        return f"<tool calls of {self.results.backend}: {found.right} of {found.n} right, {found.outcome}>"


class Accuracy:
    """The cases of a run, and what was answered to them, in this process.

    :param write: tells a person how far it is.
    """

    def __init__(self, run: Run, write: Callable[[str], None] = lambda line: None) -> None:
        self._run = run
        self._write = write
        self._cases: dict[str, CaseSet] = {}
        #: By server and way of asking: the generation that was asked, and what it answered.
        self._answered: dict[tuple[object, ...], tuple[int, Asked]] = {}
        self._files = 0

    # ------------------------------------------------------------ before anything starts

    def wanted(self, plan: Plan, folder: Path) -> Wanted:
        """What a test's marker asks for.

        :param folder: of the test's file: places are looked for there, then in the root folder of the run.
        :raises BadInput: cases or a baseline that cannot be used.
        """
        assert plan.toolcalls is not None
        meaning = plan.toolcalls
        place = meaning["cases"]
        base = self._base(place, folder)
        key = f"{base}\n{place}"
        if key not in self._cases:
            self._cases[key] = case_files.load(place, base=base)
        cases = self._cases[key]
        if meaning["baseline"] is None:
            return Wanted(meaning, cases)
        return self._compared(plan, meaning, cases, folder)

    def _base(self, place: str | None, folder: Path) -> Path:
        root = Path(self._run.identity.rootdir)
        return folder if place is not None and (folder / place).exists() else root

    def _compared(self, plan: Plan, meaning: Mapping[str, Any], cases: CaseSet, folder: Path) -> Wanted:
        name = meaning["baseline"]
        specs = self._run.specs.backends
        if name in specs:
            pool = self._run.pool
            spec = pool.spec(name)
            if spec == pool.spec(plan.backend, **plan.overrides):
                raise BadInput(
                    f"baseline={name!r} is this test's own backend: compare with another one, with an earlier results"
                    " file, or change a setting of this one in @vram_backend"
                )
            return Wanted(meaning, cases, baseline=spec)
        path = self._base(name, folder) / Path(name).expanduser()
        if not path.exists():
            raise BadInput(
                f"baseline={name!r} is neither a backend of the config file nor a results file: there is no file"
                f" {printable(str(path))}; {specfile.known(specs, name)}"
            )
        earlier = results.read(path)
        if earlier.digest != cases.digest:
            raise BadCases(
                f"baseline={name!r} has results of other cases: {earlier.cases!r} with digest {earlier.digest}, and"
                f" this test asks {cases.name!r} with digest {cases.digest}; make it anew with"
                f" `vram toolcalls run --output {name}`"
            )
        return Wanted(meaning, cases, earlier=earlier)

    # ------------------------------------------------------------ asking

    def ask_baseline(self, key: str, plan: Plan, wanted: Wanted) -> list[RunningBackend]:
        """Ask the baseline before the test, in a window of its own, so that its memory is not the test's.

        :returns: the backend that was asked; nothing where there is none to ask, or it was asked already.
        :raises VramError: it could not be started, or died.
        """
        if wanted.baseline is None:
            return []
        key_of_it = self._key(wanted.baseline, wanted)
        if key_of_it in self._answered:
            return []
        run = self._run
        name = f"{key} (baseline {wanted.baseline.name})"
        own = Plan(takes_part=True, wants_backend=True, serial=plan.serial, backend=wanted.baseline.name)
        attempt = run.begin(name, own, judged=False)
        try:
            backend = run.pool.acquire(wanted.baseline)
            asked = self._ask(backend, wanted.baseline, wanted, name)
            self._answered[key_of_it] = (backend.generation, asked)
            backend.take_requests()  # they are no requests of a test that uses it later
        finally:
            run.leave(attempt)
        return [backend]

    def _key(self, spec: BackendSpec, wanted: Wanted, stops: tuple[Any, ...] | None = None) -> tuple[object, ...]:
        """What answers depend on: the server, how it is asked, which cases, and when it is enough."""
        how = msgspec.json.encode([spec.sampling, spec.toolcalls], order="sorted")
        return (self._run.pool.plan(spec).key, how, wanted.cases.digest, wanted.meaning["retries"], SEED, stops)

    def result(self, attempt: Attempt, wanted: Wanted) -> ToolcallResult:
        """Ask the cases of a test, once per attempt, and judge them.

        :raises VramError: its backend could not be started, or died.
        """
        if attempt.toolcalls is not None:
            return attempt.toolcalls
        plan, meaning = attempt.plan, wanted.meaning
        # Not the backend's own spec: those that differ in how tools are offered share a server.
        spec = self._run.pool.spec(plan.backend, **plan.overrides)
        backend = self._run.pool.acquire(spec)
        stops = None
        if meaning["mode"] == "sprt" and wanted.baseline is None and wanted.earlier is None:
            stops = tuple(meaning[name] for name in ("target", "margin", "confidence", "judge"))
        key = self._key(spec, wanted, stops)
        generation, known = self._answered.get(key, (0, None))
        if known is None or generation != backend.generation or attempt.number > 1:
            enough = None
            if stops is not None:
                enough = verdict.sequential(
                    meaning["target"],
                    meaning["margin"],
                    meaning["confidence"],
                    len(wanted.cases.cases),
                    meaning["judge"],
                )
            known = self._ask(backend, spec, wanted, attempt.key, enough)
            self._answered[key] = (backend.generation, known)
        else:
            known = known._replace(reused=True)
        baseline: Asked | None = None
        if wanted.earlier is not None:
            baseline = Asked(wanted.earlier, Path(meaning["baseline"]), None)
        elif wanted.baseline is not None:
            baseline = self._answered[self._key(wanted.baseline, wanted)][1]
        found = verdict.judge(
            known.results,
            target=meaning["target"],
            mode=meaning["mode"],
            confidence=meaning["confidence"],
            margin=meaning["margin"],
            judge=meaning["judge"],
            baseline=baseline.results if baseline is not None else None,
        )
        attempt.toolcalls = ToolcallResult(known, found, baseline=baseline)
        return attempt.toolcalls

    def _ask(
        self,
        backend: RunningBackend,
        spec: BackendSpec,
        wanted: Wanted,
        name: str,
        enough: Callable[[Sequence[CaseResult]], str | None] | None = None,
    ) -> Asked:
        progress = Progress(name, self._write)
        kept: list[Asked] = []
        try:
            found = ask(
                backend.client,
                spec,
                wanted.cases,
                facts=backend.boot.facts,
                retries=wanted.meaning["retries"],
                seed=SEED,
                told=progress,
                kept=lambda partial: kept.append(self._saved(partial, backend.name)),
                **({"enough": enough} if enough is not None else {}),
            )
        except BackendDied as error:
            raise BackendDied(" ".join([str(error), *map(_so_far, kept)])) from None
        return self._saved(found, backend.name)

    def _saved(self, found: Results, name: str) -> Asked:
        self._files += 1
        worker = f"{self._run.worker}-" if self._run.worker else ""
        path = Path(self._run.identity.folder) / f"toolcalls-{name}-{worker}{self._files}.json"
        try:
            results.save(found, path)
        except (VramError, OSError) as error:
            return Asked(found, None, f"the results could not be written: {error}")
        return Asked(found, path, None)


def _so_far(asked: Asked) -> str:
    """How many cases were answered of those that were planned, as a sentence."""
    where = f", and are in {asked.path}" if asked.path is not None else ""
    return f"Before, {len(asked.results.counted())} of {asked.results.planned} cases were answered{where}."


def ask(
    client: VramClient,
    spec: BackendSpec,
    cases: CaseSet,
    *,
    facts: Mapping[str, Any],
    told: Callable[[CaseResult, int], None],
    **how: Any,
) -> Results:
    """Ask a server the cases as a spec says; ``how`` goes to :func:`evaluation.evaluate`.

    The results carry the backend's name and settings, and what its log says of its build (``facts`` of its boot).
    """
    known = {name: facts[name] for name in ("build", "version") if facts.get(name) is not None}
    return evaluation.evaluate(
        client,
        cases,
        sampling=spec.sampling,
        calling=spec.toolcalls,
        told=told,
        spec=spec,
        fingerprint=known,
        **how,
    )


class Progress:
    """Logs every case, and tells a person now and then where it takes long."""

    def __init__(self, name: str, write: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._name = name
        self._write = write
        self._clock = clock
        self._due = clock() + AFTER
        self._done = self._right = self._lost = 0

    def __call__(self, result: CaseResult, planned: int) -> None:
        """A case is done."""
        logger.info("%s", log_line(result))
        self._done += 1
        self._right += result.first.outcome == "right"
        self._lost += result.first.outcome == "infrastructure"
        if self._clock() >= self._due and self._done < planned:
            self._due = self._clock() + AGAIN
            lost = f", {self._lost} without an answer" if self._lost else ""
            done = f"{self._done} of {planned} cases asked, {self._right} right at first try{lost}"
            self._write(f"vram: {self._name}: {done}")


def log_line(result: CaseResult) -> str:
    """One case as a logfmt line: ``case= category= outcome= kind= … latency=``."""
    fields = {
        "case": result.id,
        "category": result.category,
        "outcome": result.first.outcome,
        "kind": result.first.kind or "-",
        "latency": f"{result.first.latency:.3f}s",
    }
    if result.retries:
        fields["after_retry"] = result.last.outcome
        fields["kind_after_retry"] = result.last.kind or "-"
    return " ".join(f"{key}={_quoted(value)}" for key, value in fields.items())


def _quoted(value: str) -> str:
    if value and all(character.isprintable() and character not in ' "=' for character in value):
        return value
    return msgspec.json.encode(value).decode()
