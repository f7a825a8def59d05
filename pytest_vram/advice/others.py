"""Advice for transformers, vLLM and SGLang where the model's files are at hand: each change is one more estimate."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec

from pytest_vram.advice.deployed import enough, reaches, saving
from pytest_vram.advice.goal import Goal
from pytest_vram.advice.records import Advice, Saving, joins
from pytest_vram.errors import BadInput
from pytest_vram.sizing import estimating
from pytest_vram.sizing.changes import largest
from pytest_vram.sizing.prediction import Estimate
from pytest_vram.sizing.shape import ModelShape
from pytest_vram.sizing.verdict import on
from pytest_vram.units import mib

_WORTH = 100
#: Shares of a card.
_SHARES = ("gpu_memory_utilization", "mem_fraction_static")


class _Turn(msgspec.Struct, frozen=True, kw_only=True):
    """One option and the values to try, the gentlest first. :ivar steps: a length is searched in steps of so many.
    :ivar more: whether a larger value saves.
    """

    option: str
    values: tuple[Any, ...] = ()
    steps: int = 0
    more: bool = False
    buckets: tuple[str, ...] = ("kv",)
    cost: str
    proof: str


_VLLM = (
    _Turn(
        option="kv_cache_dtype",
        values=("fp8",),
        cost="a little accuracy",
        proof="`GPU KV cache size` with twice the tokens",
    ),
    _Turn(
        option="max_model_len",
        steps=256,
        cost="shorter requests",
        proof="`Maximum concurrency for N tokens per request`",
    ),
    _Turn(
        option="gpu_memory_utilization",
        values=(0.85, 0.8, 0.7, 0.6, 0.5, 0.4),
        cost="less room for the KV cache: fewer or shorter requests at once",
        proof="fewer tokens in `GPU KV cache size`",
    ),
    _Turn(
        option="max_num_seqs",
        values=(64, 16, 4, 1),
        buckets=("compute",),
        cost="fewer requests at once",
        proof="less memory for `Graph capturing`",
    ),
    _Turn(
        option="enforce_eager",
        values=(True,),
        buckets=("compute",),
        cost="answers are written more slowly",
        proof="no `Graph capturing finished`",
    ),
    _Turn(
        option="tensor_parallel_size",
        values=(2, 4, 8),
        more=True,
        buckets=("weights", "experts", "kv"),
        cost="more cards",
        proof="`Model loading took` less on each card",
    ),
)
_SGLANG = (
    _Turn(option="kv_cache_dtype", values=("fp8_e5m2",), cost="a little accuracy", proof="`#tokens` twice as many"),
    _Turn(option="context_length", steps=256, cost="shorter requests", proof="`context_len=N`"),
    _Turn(
        option="mem_fraction_static",
        values=(0.85, 0.8, 0.7, 0.6, 0.5, 0.4),
        cost="less room for the KV cache: fewer or shorter requests at once",
        proof="fewer `#tokens`",
    ),
    _Turn(
        option="max_running_requests",
        values=(64, 16, 4, 1),
        buckets=("compute", "recurrent"),
        cost="fewer requests at once",
        proof="less in `Capture cuda graph end`",
    ),
    _Turn(
        option="tp_size",
        values=(2, 4, 8),
        more=True,
        buckets=("weights", "experts", "kv"),
        cost="more cards",
        proof="less `mem usage` of the weights on each card",
    ),
)
_TRANSFORMERS = (
    _Turn(option="batch_size", values=(1,), cost="one sequence at a time", proof="`torch.cuda.max_memory_allocated()`"),
    _Turn(
        option="dtype",
        values=("bfloat16",),
        buckets=("weights", "experts"),
        cost="nothing for models that were trained in it",
        proof="`model.get_memory_footprint()`",
    ),
    _Turn(
        option="cache_implementation",
        values=("quantized",),
        cost="a little accuracy, slower decoding, and the package optimum-quanto",
        proof="`torch.cuda.max_memory_allocated()`",
    ),
    _Turn(
        option="max_length", steps=64, cost="shorter prompts and answers", proof="`torch.cuda.max_memory_allocated()`"
    ),
    _Turn(
        option="cache_implementation",
        values=("offloaded",),
        cost="answers are written more slowly",
        proof="`torch.cuda.max_memory_allocated()`",
    ),
)
_TURNS = {"vllm": _VLLM, "sglang": _SGLANG, "transformers": _TRANSFORMERS}


def advise(
    shape: ModelShape, options: Mapping[str, Any], goal: Goal | Callable[[Estimate], Goal], *, engine: str
) -> tuple[Advice, ...]:
    """What to change so that a deployment that takes too much fits; see :func:`pytest_vram.advice.advise`.

    :raises BadInput: an engine that is not sized, or options that it does not have.
    """
    estimating.check_engine(engine)
    given = {name.lstrip("-").replace("-", "_"): value for name, value in options.items()}
    start = estimating.of_shape(shape, engine=engine, options=given)
    wanted = goal(start) if callable(goal) else goal
    if engine != "transformers" and wanted.measured:
        # They take all of their share, so that the upper end of an estimate is what is measured.
        wanted = msgspec.structs.replace(wanted, measured=False)
    if wanted.bucket is None:
        top = start.largest(wanted.device)
        wanted = msgspec.structs.replace(wanted, bucket=top[0] if top else None)
    return tuple(_advice(shape, given, start, wanted, engine))


def _advice(shape: ModelShape, given: dict[str, Any], start: Estimate, goal: Goal, engine: str) -> Iterator[Advice]:
    def made(changes: Mapping[str, Any]) -> Estimate | None:
        try:
            return estimating.of_shape(shape, engine=engine, options={**given, **changes})
        except BadInput:
            return None

    nothing: list[Advice] = []
    done: dict[str, Any] = {}
    now = start
    for turn in sorted(_TURNS[engine], key=lambda one: goal.bucket not in one.buckets):
        before = start.settings.get(turn.option)
        value = _value(turn, before, start, goal, made)
        if value is None:
            continue
        alone, after = made({turn.option: value}), made({**done, turn.option: value})
        if alone is None:
            continue
        one = _one(turn, before, value, start, alone, now, after, goal, engine)
        most = max(
            one.saves_bytes.upper if one.saves_bytes else 0, one.saves_bytes_after.upper if one.saves_bytes_after else 0
        )
        if most <= 0 or most * _WORTH < goal.missing:
            reason = _unknown(turn, start)
            if reason is None:
                nothing.append(
                    _without(one, _idle(turn, goal, most), effect="nothing", enough=False, cost="", proof="")
                )
            else:
                yield _without(one, reason, source="rule", bucket=turn.buckets[0])
            continue
        yield one
        if joins(one) and after is not None:
            done[turn.option] = value
            now = after
    yield from nothing


def _saving(before: Estimate, after: Estimate, device: str) -> Saving:
    """What a device is spared. An engine that fills its share with cache has the upper end in use, not the lower one,
    which is what it needs at least."""
    if before.settings.get("device_memory") is None:
        return saving(before, after, device)
    return Saving(bytes=on(before, device) - on(after, device))


def _unknown(turn: _Turn, start: Estimate) -> str | None:
    """Why an estimate cannot say what a setting saves; ``None`` where it can."""
    if turn.option in _SHARES and start.settings.get("device_memory") is None:
        return "how much it is depends on the size of the card: give device_memory"
    unknown = sorted(set(start.unknown) & set(turn.buckets))
    return f"{', '.join(unknown)} cannot be known from files" if unknown else None


def _idle(turn: _Turn, goal: Goal, saves: int) -> str:
    """Why a setting saves next to nothing."""
    if saves > 0:
        return f"it saves {mib(saves)} on {goal.device}, where {mib(goal.missing)} are missing"
    if turn.option in (*_SHARES, "dtype"):
        return f"it saves nothing on {goal.device}"
    return f"it saves nothing on {goal.device}: what it spares is filled with more cache"


def _without(one: Advice, why: str, **changes: Any) -> Advice:
    """The same advice without figures."""
    return msgspec.structs.replace(
        one,
        why=why,
        saves_bytes=None,
        saves_bytes_after=None,
        saves_by_bucket={},
        **{"enough": None, **changes},
        enough_after=None,
    )


def _value(
    turn: _Turn, before: object, start: Estimate, goal: Goal, made: Callable[[Mapping[str, Any]], Estimate | None]
) -> Any:
    """The gentlest value that is enough, else the gentlest that the engine takes (half of a length)."""

    def fits(value: Any) -> bool:
        found = made({turn.option: value})
        return found is not None and reaches(start, found, goal)

    if turn.steps:
        if not isinstance(before, int) or before <= turn.steps:
            return None
        steps = largest(1, (before - 1) // turn.steps, lambda number: fits(number * turn.steps))
        return turn.steps * (steps or max(1, before // 2 // turn.steps))
    values = [value for value in turn.values if _saves(turn, value, before)]
    for value in values:
        if fits(value):
            return value
    return next((value for value in values if made({turn.option: value}) is not None), None)


def _saves(turn: _Turn, value: Any, before: object) -> bool:
    """Whether a value lies in the direction that saves."""
    if isinstance(value, bool | str) or not isinstance(before, int | float):
        return bool(value != before)
    return bool(value > before if turn.more else value < before)


def _one(
    turn: _Turn,
    before: object,
    value: Any,
    start: Estimate,
    alone: Estimate,
    now: Estimate,
    after: Estimate | None,
    goal: Goal,
    engine: str,
) -> Advice:
    device = goal.device
    filled = start.settings.get("device_memory") is not None
    rows = {
        bucket: start.buckets().get(bucket, {}).get(device, 0) - alone.buckets().get(bucket, {}).get(device, 0)
        for bucket in {**start.buckets(), **alone.buckets()}
    }
    bucket = max(rows, key=lambda name: rows[name], default=None)
    if engine == "transformers":
        name, flag = turn.option, f"{turn.option}={value!r}"
    else:
        name = turn.option.replace("_", "-")
        flag = f"--{name}" if value is True else f"--{name} {value}"
    return Advice(
        setting=name,
        before=str(before),
        after=str(value),
        effect="saves",
        why=f"{bucket} on {device} shrinks" if bucket else f"{device} holds less",
        device=device,
        bucket=bucket,
        saves_bytes=_saving(start, alone, device),
        saves_bytes_after=None if after is None else _saving(now, after, device),
        saves_by_bucket={} if filled else {name: size for name, size in rows.items() if size},
        enough=enough(start, alone, goal),
        enough_after=None if after is None else enough(start, after, goal),
        source="estimate",
        cost=turn.cost,
        flag=flag,
        proof=turn.proof,
    )
