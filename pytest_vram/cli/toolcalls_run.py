"""``vram toolcalls run``: a deployment is asked the cases outside of pytest, and its rate is printed or judged."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from pytest_vram import accuracy, markers, settings, specfile
from pytest_vram.backends.addresses import root_of
from pytest_vram.backends.client import Target, VramClient
from pytest_vram.cli import deployment, project
from pytest_vram.cli.output import FAILS, HOLDS, INCONCLUSIVE, INTERRUPTED, Answer, progress
from pytest_vram.cli.runs import ending
from pytest_vram.errors import BackendDied, BadCases, BadInput, BadMarker, RequestFailed, VramError
from pytest_vram.needs import Plan
from pytest_vram.report.toolcall_lines import asked_lines, defect_lines, paired_lines, rate_line
from pytest_vram.report.toolcalls import (
    AskedRecord,
    ToolcallDocument,
    asked_record,
    defect_tables,
    worst_cases,
)
from pytest_vram.run import Run, new_identity
from pytest_vram.spec import BackendSpec
from pytest_vram.toolcalls import cases as case_files
from pytest_vram.toolcalls import results as results_files
from pytest_vram.toolcalls import verdict
from pytest_vram.toolcalls.cases import CaseSet
from pytest_vram.toolcalls.results import CaseResult, Results

#: Options that say how a rate is judged, and mean nothing without a target.
_JUDGING = ("mode", "confidence")
_CODES = {"passed": HOLDS, "failed": FAILS, "inconclusive": INCONCLUSIVE, "error": INCONCLUSIVE}
_LARGEST = 1_000_000


class Server(NamedTuple):
    """What is asked. :ivar facts: of its boot."""

    client: VramClient
    spec: BackendSpec
    facts: Mapping[str, Any]


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """The arguments, checked. :ivar judged: as the marker would have them; ``None`` without a target."""

    cases: CaseSet
    retries: int
    seed: int
    limit: int | None
    confidence: float
    margin: float
    judge: verdict.Judge
    judged: dict[str, Any] | None
    output: Path | None


class Interrupted(Exception):
    """Ctrl-C while cases were asked, with what became of the answers until then."""


class Asked(NamedTuple):
    """Results, and the file that has them; ``None`` where it could not be written."""

    results: Results
    path: Path | None

    def so_far(self) -> str:
        """How many were answered of those that were planned, as a clause."""
        where = f", and are in {self.path}" if self.path is not None else ""
        return f"{len(self.results.counted())} of {self.results.planned} cases were answered{where}"

    def record(self, *, among: Results | None = None) -> AskedRecord:
        """As reports have it."""
        return asked_record(self.results, file=str(self.path) if self.path is not None else None, among=among)


def run(options: argparse.Namespace, rest: list[str]) -> Answer:
    """Ask, save, print or judge.

    :raises BadInput: arguments, cases or a baseline that cannot be used. :raises VramError: no server answers.
    """
    if rest:
        raise BadInput(f"vram toolcalls run does not take {rest[0]!r}: see vram toolcalls run --help")
    wanted = _wanted(options)
    try:
        with _told_to_end():
            return _asked(options, wanted)
    except Interrupted as stopped:
        progress(f"vram toolcalls: interrupted: {stopped}")
        return Answer(code=INTERRUPTED, document=None)


def _asked(options: argparse.Namespace, wanted: Wanted) -> Answer:
    if options.url is not None:
        return _at_url(options, wanted)
    for name in ("model", "api_key_env"):
        if getattr(options, name) is not None:
            raise BadInput(f"{_flag(name)} belongs to --url: a backend of the config file has its own")
    return _of_config(options, wanted)


@contextlib.contextmanager
def _told_to_end() -> Iterator[None]:
    """SIGTERM and SIGHUP, which CI and a closed terminal send, end a run as Ctrl-C does: nothing answered is lost."""

    def end(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = {}
    if threading.current_thread() is threading.main_thread():
        for name in ("SIGTERM", "SIGHUP"):
            number = getattr(signal, name, None)  # Windows has no SIGHUP
            if number is not None and signal.getsignal(number) == signal.SIG_DFL:
                before[number] = signal.signal(number, end)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# ---------------------------------------------------------------- arguments


def _wanted(options: argparse.Namespace) -> Wanted:
    if options.target is None:
        useless = next((name for name in _JUDGING if getattr(options, name) is not None and not options.baseline), None)
        if useless is not None:
            raise BadInput(f"{_flag(useless)} without --target judges nothing: write the target, such as --target 0.94")
    if options.mode is not None and options.target is None:
        raise BadInput("--mode without --target judges nothing: write the target, such as --target 0.94")
    if options.aa and options.baseline is None:
        raise BadInput("--aa asks the baseline a second time: name a backend with --baseline")
    given = {
        "mode": options.mode,
        "confidence": _number(options.confidence, "confidence"),
        "margin": _number(options.margin, "margin"),
        "retries": _count(options.retries, "retries", 0, markers.RETRIES),
        "judge": options.judge,
        "baseline": options.baseline,
    }
    target = _number(options.target, "target")
    try:
        # Checked as the marker's arguments are; where no target is given, against one that is always right.
        meaning = markers.read(
            "toolcall_accuracy",
            (1.0 if target is None else target,),
            {name: value for name, value in given.items() if value is not None},
        )
    except BadMarker as error:
        message = str(error).removeprefix("@toolcall_accuracy: ").partition("; write toolcall_accuracy(")[0]
        raise BadInput(message) from None
    return Wanted(
        cases=case_files.load(options.cases, base=Path.cwd()),
        retries=meaning["retries"],
        seed=_count(options.seed, "seed", 0, (1 << 63) - 1) or 0,
        limit=_count(options.limit, "limit", 1, _LARGEST),
        confidence=meaning["confidence"],
        margin=meaning["margin"],
        judge=meaning["judge"],
        judged=None if target is None else meaning,
        output=_output(options.output),
    )


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _number(text: str | None, name: str) -> float | None:
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        raise BadInput(f"{_flag(name)} {text!r} is not a number: write a share such as 0.95") from None
    return int(value) if value.is_integer() else value


def _count(text: str | None, name: str, least: int, most: int) -> int | None:
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= 19 and least <= int(text) <= most):
        raise BadInput(f"{_flag(name)} {text!r} is not a whole number from {least} to {most}")
    return int(text)


def _output(text: str | None) -> Path | None:
    if text is None:
        return None
    path = Path.cwd() / Path(text).expanduser()
    try:
        if path.is_dir() or not path.parent.is_dir():
            raise BadInput(f"--output {text}: write the name of a file in a folder that is there")
        results_files.check_place(path)
    except BadCases as error:
        raise BadInput(f"--output {text}: {error}") from None
    except OSError as error:  # such as a name that no file can have
        raise BadInput(f"--output {text}: {error.strerror or error}") from None
    return path


def _calling(options: argparse.Namespace, spec: BackendSpec) -> BackendSpec:
    """The spec with how tools are offered as the command line says; the same server."""
    changed: dict[str, Any] = msgspec.to_builtins(spec.toolcalls)
    if options.protocol is not None:
        changed["protocol"] = options.protocol
        if options.protocol != "tools":  # they mean nothing to the others
            changed = {name: value for name, value in changed.items() if name not in ("tool_choice", "parallel")}
    if options.stream is not None:
        changed["stream"] = options.stream
    try:
        return msgspec.structs.replace(spec, toolcalls=specfile.toolcalls(changed, "toolcalls"))
    except BadInput as error:
        raise BadInput(f"{error} (from --protocol)") from None


# ---------------------------------------------------------------- where it runs


def _at_url(options: argparse.Namespace, wanted: Wanted) -> Answer:
    """A server that runs already, on this machine or another: nothing is started and nothing is measured."""
    for name in ("backend", "config"):
        if getattr(options, name) is not None:
            raise BadInput(f"{_flag(name)} and --url are two servers to ask: name one")
    key = None
    if options.api_key_env is not None:
        key = os.environ.get(options.api_key_env)
        if not key:
            raise BadInput(
                f"--api-key-env {options.api_key_env}: there is no such environment variable, or it is empty"
            )
        if not key.isascii() or not key.isprintable() or key != key.strip():
            raise BadInput(
                f"--api-key-env {options.api_key_env}: the variable holds blanks at its ends, line ends or characters"
                " outside ASCII, so no header can carry it"
            )
    url = root_of(options.url, "--url")
    target = Target(name=options.model or "url", url=url, api_key=key, model=options.model)
    client = VramClient(target)
    target.model = options.model or _only_model(client)
    spec = BackendSpec(
        name=target.model or url.partition("://")[2],
        engine="attach",
        origin="the command line",
        base=str(Path.cwd()),
        url=url,
        served_model=target.model,
    )
    earlier, other = _baseline(options, wanted, {})
    assert other is None
    server = Server(client, _calling(options, spec), {})
    path = wanted.output or _file_name(spec.name)
    return _answer(server, wanted, path, earlier=earlier)


def _file_name(name: str) -> Path:
    """A file in the working folder: where no run has a folder."""
    plain = "".join(letter if letter.isalnum() or letter in "-._" else "-" for letter in name).strip(".-") or "server"
    now = datetime.datetime.now(datetime.UTC)
    return Path.cwd() / f"toolcalls-{plain[:60]}-{now:%Y%m%dT%H%M%SZ}.json"


def _only_model(client: VramClient) -> str | None:
    """The name of the server's model, where it has one; ``None`` where it does not say.

    :raises BadInput: it has several. :raises VramError: it does not answer.
    """
    try:
        answer = client.get("/v1/models")
    except RequestFailed as error:
        if error.status in (401, 403):
            raise BadInput(f"{client.target.url} wants an API key: name its variable with --api-key-env") from None
        return None
    listed = answer.get("data") if isinstance(answer, dict) else None
    names = [row["id"] for row in listed or [] if isinstance(row, dict) and isinstance(row.get("id"), str)]
    if len(names) > 1:
        shown = ", ".join(map(repr, names[:8]))
        raise BadInput(f"{client.target.url} has {len(names)} models ({shown}): name one with --model")
    return names[0] if names else None


def _of_config(options: argparse.Namespace, wanted: Wanted) -> Answer:
    """A backend of the config file, started for this and ended afterwards."""
    file = deployment.config(options)
    found = settings.resolve(
        settings.gather({}, os.environ, {}, file.values, file.path), config_path=Path(file.path) if file.path else None
    )
    free = msgspec.structs.replace(found, budget=None, reserve=0)
    made = Run(free, file, new_identity(project.find(Path.cwd()).root), role="controller", worker=None)
    name = options.backend or found.backend or file.default
    spec = _calling(options, made.pool.spec(name))
    earlier, other = _baseline(options, wanted, file.backends)
    if other is not None:
        other = _calling(options, made.pool.spec(other.name))
        if other == spec:
            raise BadInput(f"--baseline {options.baseline} is the backend that is asked: name another one")
        made.pool.plan(other)
    made.pool.plan(spec)  # what cannot be started is said before anything is
    repeated: Asked | None = None
    with ending(made, "toolcalls"):
        if other is not None:
            earlier, repeated = _asked_before(made, other, wanted, twice=options.aa)
        with _started(made, spec) as server:
            path = wanted.output or Path(made.identity.folder) / f"toolcalls-{spec.name}.json"
            return _answer(server, wanted, path, earlier=earlier, repeated=repeated)


def _baseline(
    options: argparse.Namespace, wanted: Wanted, backends: Mapping[str, BackendSpec]
) -> tuple[Asked | None, BackendSpec | None]:
    """Earlier results of a file, or the spec of another backend."""
    name = options.baseline
    if name is None:
        return None, None
    if name in backends:
        return None, backends[name]
    path = Path.cwd() / Path(name).expanduser()
    if not path.exists():
        raise BadInput(
            f"--baseline {name} is neither a backend of the config file nor a results file: there is no file {path};"
            f" {specfile.known(backends, name)}"
        )
    if options.aa:
        raise BadInput("--aa asks the baseline a second time, which a results file cannot be: name a backend")
    earlier = results_files.read(path)
    if earlier.digest != wanted.cases.digest:
        raise BadInput(
            f"--baseline {name} has results of other cases ({earlier.cases}, digest {earlier.digest}) than are asked"
            f" ({wanted.cases.name}, digest {wanted.cases.digest}): ask both the same"
        )
    return Asked(earlier, path), None


def _asked_before(made: Run, spec: BackendSpec, wanted: Wanted, *, twice: bool) -> tuple[Asked, Asked | None]:
    """The baseline, asked before the backend itself; the keeper ends its server when there is no room for both."""
    with _started(made, spec) as server:
        folder, name = Path(made.identity.folder), f"baseline {spec.name}"
        first = _ask(server, wanted, name, folder / f"toolcalls-{spec.name}.json")
        completion = len(first.results.counted()) / max(1, first.results.due)
        if completion < verdict.COMPLETION:
            progress(f"vram toolcalls: of {name} only {first.so_far()}: nothing can be compared with it")
            if wanted.judged is None:
                raise RequestFailed(
                    f"{name} has too few answers to compare anything with: {first.so_far()}. See to its server."
                )
            twice = False
        second = _ask(server, wanted, f"{name} again", folder / f"toolcalls-{spec.name}-again.json") if twice else None
    return first, second


@contextlib.contextmanager
def _started(made: Run, spec: BackendSpec) -> Iterator[Server]:
    progress(f"starting {spec.name!r} …")
    attempt = made.begin(f"toolcalls: {spec.name}", Plan(takes_part=True), judged=True)
    try:
        backend = made.pool.acquire(spec)
        yield Server(backend.client, spec, backend.boot.facts)
    finally:
        made.leave(attempt)


# ---------------------------------------------------------------- asking and answering


def _ask(
    server: Server,
    wanted: Wanted,
    name: str,
    path: Path,
    *,
    enough: Callable[[Any], str | None] | None = None,
) -> Asked:
    """Ask, and keep the answers in a file, also those until a Ctrl-C.

    :raises Interrupted: Ctrl-C.
    """
    told = Live(name)
    kept: list[Asked] = []
    try:
        found = accuracy.ask(
            server.client,
            server.spec,
            wanted.cases,
            facts=server.facts,
            told=told,
            kept=lambda partial: kept.append(Asked(partial, _saved(partial, path))),
            retries=wanted.retries,
            seed=wanted.seed,
            limit=wanted.limit,
            **({"enough": enough} if enough is not None else {}),
        )
    except KeyboardInterrupt:
        if kept:
            raise Interrupted(kept[0].so_far()) from None
        raise
    except BackendDied as error:
        raise BackendDied(" ".join([str(error), *(f"Before, {one.so_far()}." for one in kept)])) from None
    finally:
        told.close()
    return Asked(found, _saved(found, path))


def _answer(
    server: Server,
    wanted: Wanted,
    path: Path,
    *,
    earlier: Asked | None = None,
    repeated: Asked | None = None,
) -> Answer:
    judged = wanted.judged
    enough = None
    if judged is not None and judged["mode"] == "sprt" and earlier is None:
        most = min(wanted.limit or _LARGEST, len(wanted.cases.cases))
        enough = verdict.sequential(judged["target"], judged["margin"], judged["confidence"], most, wanted.judge)
    found = _ask(server, wanted, server.spec.name, path, enough=enough)
    before = earlier.record(among=found.results) if earlier is not None else None
    return _judged(
        wanted,
        found.results,
        found.record(),
        before,
        earlier.results if earlier is not None else None,
        repeated.results if repeated is not None else None,
    )


def _saved(found: Results, path: Path) -> Path | None:
    try:
        results_files.save(found, path)
    except (VramError, OSError) as error:
        progress(f"vram toolcalls: the results could not be written to {path}: {error}")
        return None
    return path


def _judged(
    wanted: Wanted,
    found: Results,
    asked: AskedRecord,
    before: AskedRecord | None,
    earlier: Results | None,
    repeated: Results | None,
) -> Answer:
    decided: verdict.Verdict | None = None
    paired: verdict.Paired | None = None
    if wanted.judged is not None:
        names = ("target", "mode", "confidence", "margin", "judge")
        decided = verdict.judge(
            found, **{name: wanted.judged[name] for name in names}, baseline=earlier, repeated=repeated
        )
        paired = decided.paired
    elif earlier is not None:
        paired = verdict.compare(
            found,
            earlier,
            judge=wanted.judge,
            confidence=wanted.confidence,
            margin=wanted.margin,
            repeated=repeated,
        )
    document = ToolcallDocument(
        verdict=decided,
        paired=paired,
        asked=asked,
        baseline=before,
        worst=worst_cases(found, wanted.judge, baseline=earlier),
        defects=defect_tables([(before, asked)]),
    )
    return Answer(code=_code(document), document=document, lines=tuple(_lines(document)))


def _code(document: ToolcallDocument) -> int:
    if document.verdict is not None:
        return _CODES[document.verdict.outcome]
    if document.paired is not None:
        return _CODES[document.paired.outcome]
    # Nothing is judged; still, a rate of the few cases that a server answered is not the one that was asked for.
    complete = document.asked.n >= max(1, verdict.COMPLETION * document.asked.planned)
    return HOLDS if complete else INCONCLUSIVE


def _lines(document: ToolcallDocument) -> list[str]:
    lines = document.verdict.text.splitlines() if document.verdict is not None else [rate_line(document.asked)]
    lines += paired_lines(document.paired)
    lines += ["", *asked_lines(document)]
    for table in document.defects:
        lines += ["", *defect_lines(table)]
    return lines


class Live:
    """Keeps every result, and shows on a terminal how far it is; elsewhere a line now and then."""

    def __init__(self, name: str) -> None:
        self.results: list[CaseResult] = []
        self.planned = 0
        self._name = name
        self._log = accuracy.Progress(name, progress)
        self._terminal = sys.stderr is not None and sys.stderr.isatty()
        self._shown = 0.0
        self._right = self._lost = 0

    def __call__(self, result: CaseResult, planned: int) -> None:
        """A case is done."""
        self.results.append(result)
        self.planned = planned
        self._right += result.first.outcome == "right"
        self._lost += result.first.outcome == "infrastructure"
        if not self._terminal:
            self._log(result, planned)
            return
        accuracy.logger.info("%s", accuracy.log_line(result))
        now = time.monotonic()
        if now - self._shown >= 0.1 or len(self.results) == planned:
            self._shown = now
            lost = f", {self._lost} without an answer" if self._lost else ""
            line = f"{self._name}: {len(self.results)} of {planned} cases, {self._right} right at first try{lost}"
            self._write(f"\r{line[:78]:<78}")

    def close(self) -> None:
        """The line is over."""
        if self._terminal and self.results:
            self._write("\n")

    @staticmethod
    def _write(text: str) -> None:
        with contextlib.suppress(OSError):
            sys.stderr.write(text)
            sys.stderr.flush()
