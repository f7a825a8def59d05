"""``vram estimate`` (and ``fit``): what a deployment takes, from the model's files, and whether it fits a budget."""

from __future__ import annotations

import argparse

import msgspec

from pytest_vram.cli import asked as asking
from pytest_vram.cli import deployment
from pytest_vram.cli.output import FAILS, HOLDS, INCONCLUSIVE, Answer
from pytest_vram.errors import BadInput
from pytest_vram.report.prediction_lines import estimate_lines
from pytest_vram.report.predictions import Exact, estimate_document
from pytest_vram.sizing import estimating, llama_cpp, turns
from pytest_vram.sizing.prediction import Estimate, Verdict
from pytest_vram.sizing.verdict import verdict
from pytest_vram.spec import Limits

CODES = {"yes": HOLDS, "no": FAILS, "inconclusive": INCONCLUSIVE}


def run(options: argparse.Namespace, rest: list[str]) -> Answer:
    """Predict; with a budget the exit code is 0 when it fits, 1 when it does not, 3 when that cannot be told.

    :raises BadInput: a model, an option or a size that cannot be used.
    :raises BackendError: with ``--exact``, when there is no engine, or it has no figures.
    """
    if options.engine == "transformers" and options.backend is not None:  # transformers has an option of that name
        rest, options.backend = [*rest, "--backend", options.backend], None
    wanted = asking.asked(options, rest)
    limits, place = _limits(options)
    reserve = asking.size(options.reserve, "--reserve")
    if reserve and limits is None:
        raise BadInput("--reserve keeps a part of a budget free: add --budget SIZE")
    if wanted.engine != "llama-server":
        if options.exact:
            raise BadInput(f"--exact is a dry run of llama-server, and there is none for {wanted.engine}")
        shape = estimating.load(wanted.models[0], engine=wanted.engine)
        made = estimating.of_shape(shape, engine=wanted.engine, options=wanted.options)
        if made.command:
            made = msgspec.structs.replace(made, command=(*made.command, *wanted.kept))
        judged = verdict(made, limits, reserve=reserve) if limits is not None else None
        return _answer(made, judged, None, place)
    era, given = asking.era(options, asking.llama_given(wanted))
    shape = estimating.load(wanted.models[0])
    exact = None
    if options.exact:
        printed, exact = asking.by_dry_run(shape, given, wanted.options)
        made = asking.narrowed(printed, exact)
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
    return _answer(made, judged, exact, place)


def _limits(options: argparse.Namespace) -> tuple[Limits | None, str]:
    """The budget, and what is to be said of where it came from. ``fit`` is a question about one, so that it takes the
    project's own where none is named; ``estimate`` takes it with a backend of the project only."""
    if options.budget is not None:
        return asking.budget(options.budget), ""
    if options.verb == "fit" or options.backend is not None:
        found = deployment.budget(options)
        if found is not None:
            return found[0], f"the budget is that of {found[1]}"
    if options.verb == "fit":
        return None, "no verdict: no budget is named; add --budget SIZE, such as --budget 8GB"
    return None, ""


def _answer(made: Estimate, judged: Verdict | None, exact: Exact | None, said: str) -> Answer:
    lines = estimate_lines(made, verdict=judged, exact=exact)
    if said:
        lines += [said] if judged is not None else ["", said]
    return Answer(
        code=CODES[judged.fits] if judged is not None else HOLDS,
        document=estimate_document(made, verdict=judged, exact=exact),
        lines=tuple(lines),
    )
