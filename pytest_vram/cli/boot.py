"""``vram boot``: what an engine's log says of a boot: phases, memory, failure, and what to change."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import msgspec

from pytest_vram import bootlog
from pytest_vram.advice import Advice, doubts, of_boot, reason
from pytest_vram.bootlog.boot import Boot
from pytest_vram.cli import asked as asking
from pytest_vram.cli import boot_follow
from pytest_vram.cli.output import FAILS, HOLDS, INCONCLUSIVE, Answer
from pytest_vram.errors import BadInput
from pytest_vram.report.boot_lines import boot_lines
from pytest_vram.report.booted import boot_document
from pytest_vram.sizing import estimating
from pytest_vram.text import printable

STANDARD_INPUT = "-"
#: Engines whose models are sized by the rules of another.
_SIZED_AS = {"ollama": "llama-server"}


def run(options: argparse.Namespace, rest: list[str]) -> Answer:
    """Read a log; exit code 1 where it shows a failure, 3 where it says nothing of memory, else 0.

    :raises BadInput: no log, or not that of an engine that is known; a model or an option that cannot be used.
    """
    if options.engine is not None and options.engine not in bootlog.engines():
        raise BadInput(
            f"--engine {options.engine!r} has no logs that are read: write one of {', '.join(bootlog.engines())}"
        )
    if options.model is None and rest:
        raise BadInput(
            f"vram boot takes one log and its own options, not {rest[0]!r}; an engine's options go with --model MODEL"
        )
    where = options.log
    name = "standard input" if where == STANDARD_INPUT else where
    if options.follow:
        if where == STANDARD_INPUT:
            raise BadInput("--follow follows a file: name it, or leave out --follow to read standard input to its end")
        boot = boot_follow.follow(Path(where), options.engine, quiet=options.json)
        boot = bootlog.sampled(boot, _samples(options), where)
    else:
        boot = _read(options, where)
    advice, no_advice, doubted = _advice(boot, options, rest)
    boot = msgspec.structs.replace(boot, warnings=(*doubted, *boot.warnings))
    return Answer(
        code=code_of(boot),
        document=boot_document(boot, name, advice, no_advice),
        # Before everything else: the figures of a given model may be what a reader looks for.
        lines=(
            *(f"warning: {printable(one)}" for one in doubted),
            *boot_lines(boot, name, advice=advice, no_advice=no_advice),
        ),
    )


def code_of(boot: Boot) -> int:
    """The exit code of a boot."""
    if boot.failure is not None:
        return FAILS
    return INCONCLUSIVE if boot.evidence == "none" else HOLDS


def _samples(options: argparse.Namespace) -> Path | None:
    return None if options.samples is None else Path(options.samples)


def _read(options: argparse.Namespace, where: str) -> Boot:
    if where != STANDARD_INPUT:
        return bootlog.read(Path(where), engine=options.engine, samples=_samples(options))
    if sys.stdin is None:
        raise BadInput("standard input is closed: name the log file")
    return bootlog.read_stream(sys.stdin.buffer, "standard input", engine=options.engine, samples=_samples(options))


def _advice(
    boot: Boot, options: argparse.Namespace, rest: list[str]
) -> tuple[tuple[Advice, ...], str | None, tuple[str, ...]]:
    """What to change, and where there is nothing, why, if somebody could expect it; and what of a given model is not
    the log's."""
    shape, given = None, None
    if options.model is not None:
        engine = _SIZED_AS.get(boot.engine, boot.engine)
        namespace = argparse.Namespace(engine=engine, verb="boot", backend=None)
        wanted = asking.asked(namespace, [options.model, *rest])
        shape = estimating.load(wanted.models[0], engine=wanted.engine)
        given = wanted.options
    found = of_boot(boot, shape=shape, options=given)
    return found, None if found else reason(boot), doubts(boot, shape=shape, options=given)
