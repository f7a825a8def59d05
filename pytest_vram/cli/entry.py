"""Arguments of ``vram``, the dispatch to a verb, and the one place where errors become exit codes."""

from __future__ import annotations

import argparse
import importlib
import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from pytest_vram.cli import soak_arguments, toolcalls
from pytest_vram.cli.output import (
    BAD_USE,
    FAILS,
    INCONCLUSIVE,
    INTERRUPTED,
    Answer,
    prepare,
    progress,
    refusal,
    show,
)
from pytest_vram.errors import BadInput, EngineRefused, VramError
from pytest_vram.text import printable

#: Verb → (module, one line of help).
VERBS: dict[str, tuple[str, str]] = {
    "boot": ("pytest_vram.cli.boot", "read an engine's boot log: phases, memory, failure, and what to change"),
    "check": ("pytest_vram.cli.check", "run the regression suite against a deployment"),
    "compare": ("pytest_vram.cli.compare", "compare two runs, boot logs or estimates, bucket by bucket"),
    "demo": ("pytest_vram.cli.demo", "fetch a real engine and a small model, then check them"),
    "doctor": ("pytest_vram.cli.doctor", "say what can be measured here, and which engines and models are found"),
    "estimate": ("pytest_vram.cli.estimate", "predict the memory of a model, and whether it fits a budget"),
    "fit": ("pytest_vram.cli.estimate", "the same as estimate"),
    "plan": ("pytest_vram.cli.plan", "search the settings under which a model fits a budget"),
    "soak": ("pytest_vram.cli.soak", "run conversations for hours, resumable, and judge memory, speed and tool calls"),
    "sweep": ("pytest_vram.cli.sweep", "predict, and measure, the memory of a model over the values of one setting"),
    "toolcalls": ("pytest_vram.cli.toolcalls", "check cases of tool calls, or ask a deployment them"),
    "watch": ("pytest_vram.cli.watch", "follow a run: devices, backends, tests, leases and who waits for what"),
}
#: Verbs whose other arguments are a model and the engine's options, in any order.
PREDICTING = ("estimate", "fit", "plan", "sweep")
#: Verbs that take a model and the engine's options besides others.
WITH_ENGINE_OPTIONS = (*PREDICTING, "boot")
#: Their options whose values are numbers or sizes, which somebody may write with a sign.
_SIGNED = ("--budget", "--reserve", "--build", "--minimum-context", "--slots", "--host-memory", "--values")
#: Verbs of later versions, so that asking for one says so instead of "invalid choice".
NOT_BUILT: dict[str, str] = {
    "report": "renders the report of a run",
    "init": "writes a first config file",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``vram``. Returns the exit code: 0 holds, 1 does not, 2 bad use, 3 inconclusive, 130 on Ctrl-C."""
    prepare()
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        answer, as_json = _ended(arguments)
    except OSError as error:
        return _unwritten(error, _undone(_verb(arguments)), arguments)
    try:
        if answer.document is not None:
            show(answer, as_json=as_json)
        if sys.stdout is not None:  # it is None where the caller closed it
            sys.stdout.flush()  # now, and not at the interpreter's end, where nobody could catch it
    except KeyboardInterrupt:
        return INTERRUPTED
    except OSError as error:
        return _unwritten(error, answer.code, arguments)
    return answer.code


def _verb(arguments: list[str]) -> str | None:
    return next((word for word in arguments if not word.startswith("-")), None)


def _undone(verb: str | None) -> int:
    """The code of work that could not be done: of a prediction 1 would say that the model does not fit,
    of a log that its boot failed, and of tool calls that too many are wrong."""
    return INCONCLUSIVE if verb in (*WITH_ENGINE_OPTIONS, "compare", "toolcalls", "soak") else FAILS


def _unwritten(error: OSError, code: int, arguments: list[str]) -> int:
    """The exit code where standard output took nothing more: ``code`` where its reader has gone, and failure else."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if isinstance(error, BrokenPipeError):  # as in `vram fit … | head -1`: it read what it wanted
        return code
    progress(f"vram: the output could not be written: {error.strerror}")
    return _undone(_verb(arguments))


def _ended(arguments: list[str]) -> tuple[Answer, bool]:
    """The answer, without a document where everything was said already; and whether it is to be JSON."""
    as_json = "--json" in _own(arguments)
    try:
        return _run(arguments, as_json=as_json), as_json
    except SystemExit as stop:  # argparse: help was printed, or an argument is wrong
        return _silent(stop.code if isinstance(stop.code, int) else BAD_USE), as_json
    except KeyboardInterrupt:
        return _silent(INTERRUPTED), as_json


def _silent(code: int) -> Answer:
    return Answer(code=code, document=None)


def _run(arguments: list[str], *, as_json: bool) -> Answer:
    parser = _parser()
    wanted = _verb(arguments)
    if wanted in NOT_BUILT and arguments[0] == wanted:
        message = (
            f"this verb ({NOT_BUILT[wanted]}) is not built yet in this version, which has {', '.join(sorted(VERBS))}"
        )
        return _refuse(message, BAD_USE, wanted, as_json=as_json)
    if wanted in WITH_ENGINE_OPTIONS:  # their -h cannot be argparse's, which would see it in an engine's -hf too
        arguments = _joined(["--help" if word == "-h" else word for word in arguments])
    try:
        options, rest = parser.parse_known_args(_own(arguments))
    except BadInput as error:
        if wanted not in WITH_ENGINE_OPTIONS:
            progress(parser.format_usage().rstrip())
        return _refuse(printable(str(error)), BAD_USE, wanted or "", as_json=as_json)
    if options.verb is None:
        progress(parser.format_help().rstrip())
        return _silent(BAD_USE)
    rest += _pytest_only(arguments)
    if rest and options.verb == "doctor":
        message = f"vram doctor does not take {rest[0]!r}: it takes --json and --reap"
        return _refuse(message, BAD_USE, "doctor", as_json=as_json)
    run: Callable[[argparse.Namespace, list[str]], Answer] = importlib.import_module(VERBS[options.verb][0]).run
    undone = _undone(options.verb)
    try:
        return run(options, rest)
    except (BadInput, EngineRefused) as error:
        return _refuse(printable(str(error)), BAD_USE, options.verb, as_json=as_json)
    except VramError as error:
        return _refuse(str(error), undone, options.verb, as_json=as_json)
    except BrokenPipeError:
        raise
    except OSError as error:
        place = f"{error.filename}: " if error.filename else ""
        return _refuse(printable(f"{place}{error.strerror or error}"), undone, options.verb, as_json=as_json)


def _refuse(message: str, code: int, verb: str, *, as_json: bool) -> Answer:
    progress(f"vram {verb}: {message}" if verb in VERBS or verb in NOT_BUILT else f"vram: {message}")
    return refusal(message, code=code, verb=verb) if as_json else _silent(code)


def _joined(arguments: list[str]) -> list[str]:
    """``--budget -1GB`` as one word, so that what is wrong with the value is said: argparse sees an option in it."""
    found: list[str] = []
    for word in arguments:
        if found and found[-1] in _SIGNED and re.match(r"-[\d.]", word):
            found[-1] += f"={word}"
        else:
            found.append(word)
    return found


def _own(arguments: list[str]) -> list[str]:
    """The arguments before a lone ``--``; what follows belongs to pytest as it stands."""
    return arguments[: arguments.index("--")] if "--" in arguments else arguments


def _pytest_only(arguments: list[str]) -> list[str]:
    return arguments[arguments.index("--") + 1 :] if "--" in arguments else []


class _Parser(argparse.ArgumentParser):
    """Raises what is wrong with the arguments, so that --json can say it as well."""

    def error(self, message: str) -> NoReturn:
        valueless = re.fullmatch(r"argument (--[\w-]+): expected one argument", message)
        raise BadInput(f"option {valueless[1]!r} has no value: see vram --help" if valueless else message)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="vram",
        description="VRAM budgets and regression checks for LLM deployments.",
        epilog=f"Not built yet: {', '.join(sorted(NOT_BUILT))}. Exit codes: 0 what was checked holds, 1 it does not,"
        " 2 bad use, 3 inconclusive, 130 Ctrl-C.",
        allow_abbrev=False,
    )
    verbs = parser.add_subparsers(dest="verb", metavar="VERB")
    for name, (_, what) in VERBS.items():
        verb = verbs.add_parser(
            name,
            help=what,
            description=what[0].upper() + what[1:] + ".",
            allow_abbrev=False,
            epilog=_epilog(name),
            # -h would be taken for the beginning of an engine's -hf
            add_help=name not in WITH_ENGINE_OPTIONS,
            usage=_usage(name),
        )
        verb.add_argument("--json", action="store_true", help="print one JSON document and nothing else")
        if name == "check":
            verb.add_argument("--backend", metavar="NAME", help="backend of the config file (default: its default)")
        if name == "doctor":
            verb.add_argument("--reap", action="store_true", help="end what earlier runs left behind, and say what")
        if name == "toolcalls":
            toolcalls.arguments(verb)
        if name == "soak":
            soak_arguments.of_soak(verb)
        if name == "watch":
            verb.add_argument("run", nargs="?", metavar="RUN", help="its id, folder or journal (default: the newest)")
            verb.add_argument("--once", action="store_true", help="one look, without waiting for its end")
            verb.add_argument("--follow", action="store_true", help="go on with the next run, and wait for the first")
        if name == "compare":
            verb.add_argument("before", metavar="A", help="a run, a boot log, or an estimate in JSON; - for stdin")
            verb.add_argument("after", metavar="B", help="the same of the other one")
            verb.add_argument("--backend", metavar="NAME", help="backend of the runs (default: all of them)")
            verb.add_argument("--engine", metavar="NAME", help="whose log it is, where its lines do not tell")
            verb.add_argument("--fail-on", metavar="EXPR", help="most that may grow, such as peak:5%%+64MiB,kv:0%%")
        if name == "boot":
            _boot(verb)
        if name in PREDICTING:
            _predicting(verb, name)
    return parser


def _usage(verb: str) -> str | None:
    if verb == "boot":
        return "vram boot LOG [options] [--model MODEL [engine's options]]"
    return f"vram {verb} MODEL [engine's options] [options]" if verb in PREDICTING else None


def _epilog(verb: str) -> str | None:
    if verb == "doctor":
        return None
    if verb == "compare":
        return (
            "A and B are each a run (its folder, its id or its report.json), a boot log, or what `vram estimate --json`"
            " or `vram boot --json` printed. Exit codes: 0 compared; with --fail-on 0 nothing grew beyond it, 1"
            " something did, 3 that cannot be told."
        )
    if verb == "soak":
        return (
            "Exit codes: 0 every gate held, 1 one did not, 3 that cannot be told, 130 interrupted. A soak that was"
            " interrupted or killed goes on with --resume."
        )
    if verb == "toolcalls":
        return (
            "Exit codes: 0 it holds, 1 it does not, 3 that cannot be told, 130 interrupted; of lint 1 where something"
            " is wrong with the cases."
        )
    if verb == "watch":
        return "Ends with the run, by its verdict: 0 passed, 1 failed or lost, 3 inconclusive."
    if verb == "boot":
        return (
            "Exit codes: 0 no failure, 1 the log shows a failure, 3 it says nothing of memory. With --model the advice"
            " is computed for that model; every other argument is then an option of the engine."
        )
    if verb in PREDICTING:
        return (
            "MODEL is a GGUF file, a folder with config.json, or a name in the local Hugging Face or Ollama store."
            " Every other argument is an option of the engine, long or short; a whole command line can be pasted"
            " behind --, as in `vram fit --budget 8GB -- llama-server -m my.gguf -c 8192`."
        )
    return "Every other argument goes to pytest, such as --vram-budget=4GB, -k idle, -v."


def _boot(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--help", action="help", help="show this and exit")
    parser.add_argument("log", metavar="LOG", help="a file (also packed by gzip), or - for standard input")
    parser.add_argument("--engine", metavar="NAME", help="whose log it is, where its lines do not tell")
    parser.add_argument("--model", metavar="MODEL", help="its model: a file, a folder, or a name in a local store")
    parser.add_argument("--samples", metavar="CSV", help="of nvidia-smi taken meanwhile, or the journal of a run")
    parser.add_argument("--follow", action="store_true", help="read on while it is written, to ready or to a failure")


def _predicting(parser: argparse.ArgumentParser, verb: str) -> None:
    parser.add_argument("--help", action="help", help="show this and exit")
    parser.add_argument("--engine", metavar="NAME", help="llama-server (default), transformers, vllm or sglang")
    parser.add_argument("--budget", metavar="SIZE", help="such as 4GB, 8GiB, gpu0=11GB,gpu1=3GB or sum=14GB")
    parser.add_argument("--reserve", metavar="SIZE", help="room that must stay free on each card")
    parser.add_argument("--build", metavar="N", help="build of llama.cpp whose rules hold (default: today's)")
    if verb in ("estimate", "fit", "sweep"):
        parser.add_argument("--backend", metavar="NAME", help="model and options of a backend of the config file")
        parser.add_argument("--config", metavar="FILE", help="config file (default: the project's vram.toml)")
    if verb != "sweep":
        parser.add_argument("--exact", action="store_true", help="ask the engine itself, by its dry run on the file")
    if verb == "plan":
        parser.add_argument("--tiers", action="store_true", help="the best settings for 4GB, 6GB and 8GB")
        parser.add_argument("--minimum-context", metavar="TOKENS", help="that each slot must hold")
        parser.add_argument("--slots", metavar="N", help="requests at once (default 1)")
        parser.add_argument("--host-memory", metavar="SIZE", help="most that the host may give (default: no limit)")
        parser.add_argument("--prefer", metavar="WHAT", help="speed (default), quality or context: given up last")
    if verb == "sweep":
        parser.add_argument("--over", metavar="WHAT", help="context, parallel, cache-type or n-cpu-moe")
        parser.add_argument("--values", metavar="A,B,…", help="instead of the usual ones")
        parser.add_argument("--measure", action="store_true", help="boot and measure each value as well")
        parser.add_argument("--vram-device", metavar="SPEC", help="measure on: auto (default), cpu, cuda:0, rpc:0 …")
        parser.add_argument("--seconds", metavar="N", help="most that one value may take to measure (default 60)")
