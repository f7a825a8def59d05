"""``vram estimate`` (and ``fit``): what a deployment takes, from the model's files, and whether it fits a budget."""

from __future__ import annotations

import argparse

import msgspec

from pytest_vram.cli import asked as asking
from pytest_vram.cli.output import FAILS, HOLDS, INCONCLUSIVE, Answer
from pytest_vram.errors import BadInput
from pytest_vram.report.prediction_lines import estimate_lines
from pytest_vram.report.predictions import estimate_document
from pytest_vram.sizing import estimating, llama_cpp, llama_options, turns
from pytest_vram.sizing.prediction import Verdict
from pytest_vram.sizing.verdict import verdict

CODES = {"yes": HOLDS, "no": FAILS, "inconclusive": INCONCLUSIVE}


def run(options: argparse.Namespace, rest: list[str]) -> Answer:
    """Predict; with a budget the exit code is 0 when it fits, 1 when it does not, 3 when that cannot be told.

    :raises BadInput: a model, an option or a size that cannot be used.
    :raises BackendError: with ``--exact``, when there is no engine, or it has no figures.
    """
    wanted = asking.asked(options, rest)
    limits = asking.budget(options.budget)
    reserve = asking.size(options.reserve, "--reserve")
    if reserve and limits is None:
        raise BadInput("--reserve keeps a part of a budget free: add --budget SIZE")
    if wanted.engine != "llama-server":
        if options.exact:
            raise BadInput(f"--exact is a dry run of llama-server, and there is none for {wanted.engine}")
        shape = estimating.load(wanted.models[0], engine=wanted.engine)
        made = estimating.of_shape(shape, engine=wanted.engine, options=wanted.options)
        judged = verdict(made, limits, reserve=reserve) if limits is not None else None
        return _answer(estimate_document(made, verdict=judged), estimate_lines(made, verdict=judged), judged)
    era, given = asking.era(options, llama_options.read(wanted.options))
    shape = estimating.load(wanted.models[0])
    exact = None
    if options.exact:
        made, exact = asking.by_dry_run(shape, given, wanted.options)
    else:
        made = llama_cpp.predict(shape, given.options, era, given=given)
    judged = None
    if limits is not None:
        judged = verdict(made, limits, reserve=reserve)
        # Where a part is unknown, no setting makes it known.
        if judged.fits == "no" or (judged.fits == "inconclusive" and not made.unknown):
            first = turns.first(
                shape, given.options, judged, limits, lambda s, o: llama_cpp.predict(s, o, era, given=given)
            )
            judged = msgspec.structs.replace(judged, first=first)
    document = estimate_document(made, verdict=judged, exact=exact)
    return _answer(document, estimate_lines(made, verdict=judged, exact=exact), judged)


def _answer(document: object, lines: list[str], judged: Verdict | None) -> Answer:
    return Answer(code=CODES[judged.fits] if judged is not None else HOLDS, document=document, lines=tuple(lines))
