"""``sweep``: one setting over its values, each predicted by itself."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from pytest_vram.errors import BadInput
from pytest_vram.sizing import llama_cpp
from pytest_vram.sizing.llama_options import CACHE_TYPES, MOST_SLOTS, Given
from pytest_vram.sizing.options import CURRENT, Era, LlamaOptions
from pytest_vram.sizing.prediction import Estimate, Verdict
from pytest_vram.sizing.shape import ModelShape
from pytest_vram.sizing.verdict import verdict
from pytest_vram.spec import Limits

#: What can be swept → the option that it sets.
OVER = {
    "context": "ctx-size",
    "parallel": "parallel",
    "cache-type": "cache-type-k, cache-type-v",
    "n-cpu-moe": "n-cpu-moe",
}
_CONTEXTS = tuple(1024 << step for step in range(11))
_SLOTS = (1, 2, 4, 8, 16)
_STEPS = 8
_LARGEST = (1 << 31) - 1
#: Values of one sweep: each is a whole prediction.
MOST_VALUES = 256


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """One value, and what the deployment takes with it.

    :ivar refused: why the engine does not start with it; then there is no estimate.
    """

    value: str
    estimate: Estimate | None = None
    verdict: Verdict | None = None
    refused: str = ""


def sweep(
    shape: ModelShape,
    given: Given,
    over: str,
    values: Sequence[str] = (),
    *,
    budget: Limits | None = None,
    reserve: int = 0,
    era: Era = CURRENT,
    in_all: bool = False,
) -> tuple[Point, ...]:
    """Predict a deployment for each value of one setting, all others as given.

    :param over: one of :data:`OVER`. Slots keep the context of each: ``ctx-size`` grows with them where it is given.
    :param in_all: slots share ``ctx-size`` as it is given instead.
    :param values: empty: usual ones, up to what the model has.
    :raises BadInput: no such setting, or a value that it cannot have.
    """
    check_over(over)
    if len(values) > MOST_VALUES:
        raise BadInput(f"{len(values)} values are too many for one sweep: write up to {MOST_VALUES}")
    if over == "n-cpu-moe" and not shape.experts:
        raise BadInput(f"--over n-cpu-moe: {shape.source} has no experts that could go to the CPU")
    points: list[Point] = []
    for value in values or usual(shape, given.options, over):
        options = with_value(given, over, value, in_all=in_all)
        try:
            made = llama_cpp.predict(shape, options, era, given=given)
        except BadInput as error:
            points.append(Point(value=value, refused=str(error)))
            continue
        judged = verdict(made, budget, reserve=reserve) if budget is not None else None
        points.append(Point(value=value, estimate=made, verdict=judged))
    return tuple(points)


def check_over(over: str) -> None:
    """:raises BadInput: nothing that can be swept."""
    if over not in OVER:
        raise BadInput(f"--over {over}: write one of {', '.join(OVER)}")


def usual(shape: ModelShape, options: LlamaOptions, over: str) -> tuple[str, ...]:
    """The values of a sweep where none are given."""
    if over == "context":
        trained = shape.context
        found = [size for size in _CONTEXTS if not trained or size <= trained]
        return tuple(str(size) for size in dict.fromkeys([*found, *([trained] if trained else [])]))
    if over == "parallel":
        return tuple(str(count) for count in _SLOTS)
    if over == "cache-type":
        return ("f16", *(name for name in CACHE_TYPES if name not in ("f32", "f16", "bf16")))
    blocks = len(shape.layers)
    step = max(1, -(-blocks // _STEPS))
    return tuple(str(count) for count in dict.fromkeys([*range(0, blocks, step), blocks]))


def with_value(given: Given, over: str, value: str, *, in_all: bool = False) -> LlamaOptions:
    """The options with one value of what is swept; see :func:`sweep`.

    :raises BadInput: a value that it cannot have.
    """
    options = given.options
    if over == "cache-type":
        if value not in CACHE_TYPES:
            raise BadInput(f"cache type {value!r} cannot be used: write one of {', '.join(CACHE_TYPES)}")
        return msgspec.structs.replace(options, cache_type_k=value, cache_type_v=value)
    least = 0 if over == "n-cpu-moe" else 1
    most = MOST_SLOTS if over == "parallel" else _LARGEST
    if not (value.isascii() and value.isdigit() and len(value) < 11 and least <= int(value) <= most):
        raise BadInput(f"{value!r} cannot be a value of {over}: write a whole number from {least} to {most}")
    number = int(value)
    if over == "context":
        return msgspec.structs.replace(options, ctx_size=number)
    if over == "n-cpu-moe":
        return msgspec.structs.replace(options, n_cpu_moe=number)
    if in_all:
        return msgspec.structs.replace(options, parallel=number)
    # At a fixed ctx-size slots would share it, and a dense model would show no difference at all.
    each = options.ctx_size
    if "kv-unified-per-slot" in given.given and "ctx-size" not in given.given:
        each //= options.slots  # it was already made into tokens of all slots
    if each * number > _LARGEST:
        raise BadInput(
            f"{value} slots of {each} tokens are more than the {_LARGEST} tokens that ctx-size can say: lower one of"
            " the two"
        )
    return msgspec.structs.replace(options, parallel=number, ctx_size=each * number)
