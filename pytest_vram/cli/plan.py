"""``vram plan``: the settings under which a model fits a budget, best first."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import msgspec

from pytest_vram.cli import asked as asking
from pytest_vram.cli.output import FAILS, HOLDS, INCONCLUSIVE, Answer
from pytest_vram.errors import BadInput
from pytest_vram.report.prediction_lines import search_lines, tier_lines
from pytest_vram.report.predictions import PlanDocument, search_record
from pytest_vram.sizing import estimating, llama_options, planning
from pytest_vram.sizing.plans import Plan, Search, Wishes
from pytest_vram.sizing.shape import ModelShape
from pytest_vram.sizing.verdict import HOST, on, verdict
from pytest_vram.spec import Limits

MOST_MODELS = 32


def run(options: argparse.Namespace, rest: list[str]) -> Answer:
    """Search; exit code 0 when something fits (every tier, with ``--tiers``), 1 when nothing does, 3 when that cannot
    be told because a part of the model is unknown.

    :raises BadInput: a model, an option, a size or a wish that cannot be used.
    :raises BackendError: with ``--exact``, when there is no engine that could confirm.
    """
    wanted = asking.asked(options, rest, most=MOST_MODELS)
    planning.check_engine(wanted.engine)
    budgets = [asking.budget(text) for text in planning.TIERS] if options.tiers else [asking.budget(options.budget)]
    limits = [one for one in budgets if one is not None]
    if not limits:
        raise BadInput("no budget is named: add --budget SIZE, such as --budget 6GB, or --tiers")
    if options.tiers and options.budget:
        raise BadInput("--tiers are the budgets 4GB, 6GB and 8GB: leave --budget out")
    wishes = planning.wishes_of(
        minimum_context=_number(options.minimum_context, "--minimum-context"),
        slots=_number(options.slots, "--slots") or 1,
        host_memory=asking.size(options.host_memory, "--host-memory") or None,
        reserve=asking.size(options.reserve, "--reserve"),
        prefer=options.prefer or "speed",
    )
    era, given = asking.era(options, asking.llama_given(wanted))
    shapes = [estimating.load(model) for model in wanted.models]
    searches = [
        planning.search_shapes(shapes, one, _for_tier(wishes, one, shapes) if options.tiers else wishes, given, era)
        for one in limits
    ]
    confirmed = [_confirmed(one, shapes, given.kept) if options.exact else {} for one in searches]
    document = PlanDocument(
        models=[shape.source for shape in shapes],
        wishes=wishes if options.tiers else searches[0].wishes,
        searches=[search_record(one, told) for one, told in zip(searches, confirmed, strict=True)],
    )
    lines = tier_lines(searches) if options.tiers else search_lines(searches[0], confirmed[0])
    codes = [_code(one, told) for one, told in zip(searches, confirmed, strict=True)]
    return Answer(
        code=next((code for code in (FAILS, INCONCLUSIVE) if code in codes), HOLDS),
        document=document,
        lines=tuple(lines),
    )


def _code(search: Search, confirmed: dict[int, bool]) -> int:
    if search.impossible is not None:
        return INCONCLUSIVE if search.impossible.unknown else FAILS
    return HOLDS if confirmed.get(0, True) else FAILS


def _for_tier(wishes: Wishes, budget: Limits, shapes: Sequence[ModelShape]) -> Wishes:
    if wishes.minimum_context is not None:
        return wishes
    least = planning.least_context(shapes, planning.TIERS[budget.text])
    return msgspec.structs.replace(wishes, minimum_context=least)


def _confirmed(search: Search, shapes: list[ModelShape], kept: Sequence[str]) -> dict[int, bool]:
    """Position of a plan → whether it fits by the engine's own dry run."""
    by_source = {shape.source: shape for shape in shapes}
    return {
        index: confirm(plan, by_source[plan.model], search.budget, search.wishes, kept)
        for index, plan in enumerate(search.plans)
    }


def confirm(plan: Plan, shape: ModelShape, budget: Limits, wishes: Wishes, kept: Sequence[str] = ()) -> bool:
    """Whether a plan fits by the engine's own dry run, on the devices that it finds here.

    :param kept: words of the command line for options without a say in memory.
    :raises BadInput: this machine has no device that the layers of the plan could go to.
    :raises BackendError: no engine here, or it has no figures.
    """
    options: dict[str, Any] = asking.as_mapping(plan.options, kept)
    printed, exact = asking.by_dry_run(shape, llama_options.read(options), options)
    made = asking.narrowed(printed, exact)
    if plan.layers_on_gpu and set(made.total()) == {HOST}:
        raise BadInput(
            "--exact needs a device for the plan's layers, and llama-server found none on this machine: leave --exact"
            " out, or name one with --rpc or --device"
        )
    host = wishes.host_memory is None or on(made, HOST) <= wishes.host_memory
    return host and verdict(made, budget, reserve=wishes.reserve).fits == "yes"


def _number(text: str | None, option: str) -> int | None:
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and 0 < len(text) < 11 and int(text) > 0):
        raise BadInput(f"{option} {text}: write a whole number from 1 on")
    return int(text)
