"""``vram sweep``: what a deployment takes over the values of one setting."""

from __future__ import annotations

import argparse

from pytest_vram.cli import asked as asking
from pytest_vram.cli.output import BAD_USE, HOLDS, Answer
from pytest_vram.errors import BadInput
from pytest_vram.report.prediction_lines import sweep_lines
from pytest_vram.report.predictions import SweepDocument, point_record
from pytest_vram.sizing import estimating
from pytest_vram.sizing.sweep import OVER, check_over, sweep


def run(options: argparse.Namespace, rest: list[str]) -> Answer:
    """Predict every value of one setting; exit code 2 where the engine refuses each of them.

    :raises BadInput: a model, an option or a value that cannot be used.
    """
    if options.over is None:
        raise BadInput(f"no setting to sweep is named: add --over with one of {', '.join(OVER)}")
    check_over(options.over)
    if options.measure:
        from pytest_vram.cli import sweep_measured  # the keeper and all, which predicting does without

        return sweep_measured.run(options, rest)
    for name, value in (("--vram-device", options.vram_device), ("--seconds", options.seconds)):
        if value is not None:
            raise BadInput(f"{name} is about measuring: add --measure")
    wanted = asking.asked(options, rest)
    if wanted.engine != "llama-server":
        raise BadInput(f"sweep predicts settings of llama-server, and has none for {wanted.engine}")
    era, given = asking.era(options, asking.llama_given(wanted))
    shape = estimating.load(wanted.models[0])
    values = [value.strip() for value in options.values.split(",")] if options.values is not None else []
    if not all(values):
        raise BadInput(f"--values {options.values!r} has an empty value: write values with commas between them")
    points = sweep(
        shape,
        given,
        options.over,
        values,
        budget=asking.budget(options.budget),
        reserve=asking.size(options.reserve, "--reserve"),
        era=era,
    )
    document = SweepDocument(model=shape.source, over=options.over, points=[point_record(point) for point in points])
    # Where the engine takes none of the values, nothing was predicted.
    code = HOLDS if any(point.estimate is not None for point in points) else BAD_USE
    return Answer(code=code, document=document, lines=tuple(sweep_lines(points, options.over)))
