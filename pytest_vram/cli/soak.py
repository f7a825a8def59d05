"""``vram soak``: conversations on a deployment for so many turns or hours, resumable, outside of pytest."""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import msgspec

from pytest_vram import advising, judging, sessions, settings, soaking
from pytest_vram.backends.pool import RunningBackend
from pytest_vram.cli import deployment, project
from pytest_vram.cli.output import FAILS, HOLDS, INCONCLUSIVE, INTERRUPTED, Answer, progress
from pytest_vram.cli.runs import ending
from pytest_vram.errors import BadInput, BadSize
from pytest_vram.markers import share
from pytest_vram.needs import Plan
from pytest_vram.report import soaks
from pytest_vram.report.soaks import SoakDocument
from pytest_vram.run import Run, new_identity, ways_on
from pytest_vram.sessions import soak_journal as journals
from pytest_vram.sessions.soak_gates import LEAST_TURNS, Gates
from pytest_vram.spec import Amount
from pytest_vram.units import parse_size

#: What is run where no amount is given: enough for every gate, and a night's is for a night.
DEFAULT = Amount(text=f"{LEAST_TURNS}turns", turns=LEAST_TURNS)
#: Seconds after which another signal stops what the first one did not.
AGAIN = 2.0
_CODES = {"passed": HOLDS, "failed": FAILS, "inconclusive": INCONCLUSIVE}


def run(options: argparse.Namespace, rest: list[str]) -> Answer:
    """Soak, and say what it showed: 0 passed, 1 failed, 3 inconclusive, 130 interrupted.

    :raises BadInput: arguments, or a folder, that cannot be used. :raises VramError: no server starts.
    """
    if rest and rest[0][:1] == "-" and rest[0][1:2].isdigit():  # a negative amount is taken for an option
        options.amount = rest.pop(0)
    if rest:
        raise BadInput(f"vram soak does not take {rest[0]!r}: see vram soak --help")
    for name in ("backend", "dir"):
        if getattr(options, name) == "":
            raise BadInput(f"--{name} is empty: name one, or leave it out")
    amount = _amount(options)
    file = deployment.config(options)
    given = {"budget": options.budget, "device": options.vram_device}
    try:
        found = settings.resolve(
            settings.gather(given, os.environ, {}, file.values, file.path),
            config_path=Path(file.path) if file.path else None,
        )
    except BadInput as error:  # the option is named as it is here
        raise BadInput(str(error).replace("--vram-budget", "--budget")) from None
    if any(device.kind == "predicted" for device in found.device):
        raise BadInput("a soak measures, and --vram-device=predicted measures nothing: name a device, or cpu")
    amount = amount or found.soak or DEFAULT
    # Held against by the soak itself, turn by turn.
    free = msgspec.structs.replace(found, budget=None, reserve=0)
    here = project.find(Path.cwd()).root
    made = Run(free, file, new_identity(here), role="controller", worker=None)
    # What is wrong in a word is said before what is wrong with the machine.
    spec = made.pool.spec(options.backend or found.backend or file.default)
    names = options.conversation or sessions.shipped()
    conversations = tuple(sessions.load(name, base=Path.cwd()) for name in names)
    host_limit = _size(options.host_budget, "--host-budget")
    accuracy = _share(options.target, "target", 1.0)
    retention = _share(options.retention, "retention", 1.0) or Gates().retention
    if not made.measurable:
        raise BadInput(f"{made.why_unmeasurable()}; {ways_on(found, measuring=True)}")
    made.pool.plan(spec)  # what cannot be started is said before anything is
    place = "--budget" if options.budget is not None else found.places.get("budget", "")
    wanted = soaking.Wanted(
        name=spec.name,
        folder=_folder(options, found, here, spec.name),
        amount=amount,
        spec=spec,
        conversations=conversations,
        gates=Gates(
            limit=found.budget,
            limit_from=place,
            host_limit=host_limit,
            accuracy=accuracy,
            retention=retention,
            context=soaking.context_of(spec),
            caps=soaking.caps_of(spec),
            capacity=soaking.capacity_of(made),
        ),
    )
    stopped: list[int] = []

    def told(line: str) -> None:
        if not (options.quiet and line.startswith("soak=")):
            progress(line)

    with _stoppable(stopped), ending(made, "soak"):
        attempt = made.begin(f"soak: {spec.name}", Plan(takes_part=True, backend=spec.name), judged=True)
        try:

            def advise(found: SoakDocument, backend: RunningBackend) -> SoakDocument:
                finding = next(iter(judging.finding_of_soak(found)), None)
                records = [judging.backend_record(backend, dict(found.peak))]
                return advising.of_soak(made, attempt, found, finding, records)

            document, end = soaking.run_soak(made, wanted, told, advise)
        finally:
            made.leave(attempt)
    if end.reason == "interrupted":
        progress(f"vram soak: {end.text}; go on with: {_again(options, amount, wanted.folder)}")
        return Answer(code=128 + stopped[0] if stopped else INTERRUPTED, document=None)
    return Answer(code=_CODES[document.verdict.outcome], document=document, lines=tuple(soaks.lines(document)))


def _again(options: argparse.Namespace, amount: Amount, folder: Path) -> str:
    """The command that goes on with a soak: what it is held against must be the same."""
    words = ["vram", "soak", amount.text, "--resume", "--dir", str(folder)]
    for name in ("backend", "config", "budget", "host_budget", "target", "retention", "vram_device"):
        value = getattr(options, name)
        value = _anywhere(value) if name == "config" and value is not None else value
        words += [] if value is None else [f"--{name.replace('_', '-')}", value]
    for value in options.conversation or []:
        words += ["--conversation", value if value in sessions.shipped() else _anywhere(value)]
    return shlex.join(words)


def _anywhere(path: str) -> str:
    """The same path for a shell in another folder."""
    return str(Path.cwd() / Path(path).expanduser())


def _amount(options: argparse.Namespace) -> Amount | None:
    given = {
        "AMOUNT": options.amount,
        "--turns": None if options.turns is None else f"{options.turns}turns",
        "--hours": None if options.hours is None else f"{options.hours}h",
    }
    named = {name: text for name, text in given.items() if text is not None}
    if len(named) > 1:
        raise BadInput(f"{' and '.join(named)} are two amounts of one soak: write one")
    for name, text in named.items():
        try:
            return settings.parse_soak(text)
        except ValueError as error:
            raise BadInput(f"{error} (from {name})") from None
    return None


def _folder(options: argparse.Namespace, found: settings.Settings, root: Path, name: str) -> Path:
    """Where the journal lies: a soak that was begun there goes on only where that was asked for."""
    if options.dir is not None:
        folder = Path.cwd() / Path(options.dir).expanduser()
        begun = journals.exists(folder)
        if begun and not options.resume:
            raise BadInput(f"{folder} has a soak already: go on with it with --resume, or name another folder")
        if options.resume and not begun:
            raise BadInput(f"--resume: no soak was begun in {folder}")
        return folder
    base = Path(root, found.soak_dir) if found.soak_dir is not None else root / ".vram" / "soaks"
    last, following = soaking.newest(base / soaking.folder_name(name))
    if options.resume and not journals.exists(last):
        raise BadInput(f"--resume: no soak of {name!r} was begun in {last.parent}: name its folder with --dir")
    return last if options.resume or not journals.exists(last) else following


def _size(text: str | None, name: str) -> int | None:
    if text is None:
        return None
    try:
        return parse_size(text)
    except BadSize as error:
        raise BadInput(f"{error} (from {name})") from None


def _share(text: str | None, name: str, most: float) -> float | None:
    if text is None:
        return None
    try:
        return share(name, float(text), most=most)
    except ValueError:
        raise BadInput(f"--{name} {text!r} is not a share above 0 and at most 1: write such as 0.94") from None


@contextlib.contextmanager
def _stoppable(stopped: list[int]) -> Iterator[None]:
    """Let the first signal that ends a process end the soak: committed, and with the command that goes on.

    More of them at once are ignored: a second Ctrl-C would cut short what is written and who is ended.

    :param stopped: gets the number of the signal.
    """
    if threading.current_thread() is not threading.main_thread():  # only there signals can be handled
        yield
        return

    def stop(number: int, _: FrameType | None) -> None:
        # The rest takes a moment, and once is enough; who asks again later means it, or met code that swallowed it.
        if not stopped or time.monotonic() - asked[-1] > AGAIN:
            stopped.append(number)
            asked.append(time.monotonic())
            raise KeyboardInterrupt

    asked: list[float] = []

    numbers = [signal.SIGINT, signal.SIGTERM, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else [])]
    # Who started this with SIGHUP ignored (nohup) wants it so.
    before = {number: signal.getsignal(number) for number in numbers if signal.getsignal(number) != signal.SIG_IGN}
    for number in before:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
