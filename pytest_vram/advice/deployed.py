"""Advice for a deployment of llama.cpp whose model is at hand: every saving is a difference of two predictions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from pytest_vram.advice import idle
from pytest_vram.advice.goal import Goal, grown, least_on
from pytest_vram.advice.knobs import Knob, flag, proof, ranked
from pytest_vram.advice.records import Advice, Saving, joins
from pytest_vram.errors import BadInput
from pytest_vram.sizing import llama_cpp, llama_options
from pytest_vram.sizing.changes import Change
from pytest_vram.sizing.llama_options import Given
from pytest_vram.sizing.options import CURRENT, Era, LlamaOptions
from pytest_vram.sizing.prediction import Estimate
from pytest_vram.sizing.shape import ModelShape
from pytest_vram.sizing.verdict import HOST, on
from pytest_vram.units import MIB, mib

#: A change that saves less than one part of so many of what is missing does nothing worth while.
_WORTH = 100
#: Cards together, where a limit is one on their sum.
_SUM = "sum"


class State(msgspec.Struct, frozen=True):
    """A deployment: its model, its options, and what is predicted for them."""

    shape: ModelShape
    options: LlamaOptions
    made: Estimate


def advise(
    shape: ModelShape,
    options: Given | Mapping[str, Any],
    goal: Goal | Callable[[Estimate], Goal],
    *,
    engine: str = "llama-server",
    era: Era = CURRENT,
    names: Mapping[str, str] | None = None,
) -> tuple[Advice, ...]:
    """What to change so that a deployment that takes too much fits, best first; what would do nothing comes last.

    Settings of the bucket that failed come first, then the others by what they cost the user. Values are chosen so that
    a change is enough alone, else so that it is enough with those before it, where there is such a value.

    :param options: the engine's own options, as :func:`pytest_vram.sizing.llama_options.read` checks them.
    :param goal: how much must be saved, and where; or a function that says so from the estimate of the deployment.
    :param names: device label → name in the engine's log, for proofs; the options' own where it is not given.
    :raises BadInput: options that the engine refuses or does not have.
    """
    if engine != "llama-server":
        from pytest_vram.advice.others import advise as of_others

        if isinstance(options, Given):
            raise BadInput(f"options of llama-server were given for {engine}")
        return of_others(shape, options, goal, engine=engine)
    given = options if isinstance(options, Given) else llama_options.read(options)
    desk = _Desk(given, era)
    start = State(shape, given.options, desk.predicted(shape, given.options))
    wanted = goal(start.made) if callable(goal) else goal
    return desk.advice(start, wanted, dict(names or start.made.devices))


class _Desk:
    """Predicts each changed deployment once."""

    def __init__(self, given: Given, era: Era) -> None:
        self._given, self._era = given, era
        self._known: dict[tuple[str, int, LlamaOptions], Estimate | BadInput] = {}

    def predicted(self, shape: ModelShape, options: LlamaOptions) -> Estimate:
        """The estimate of a deployment.

        :raises BadInput: the engine refuses it.
        """
        # A model differs from another here by its quantisation only.
        key = shape.quantization, shape.file_bytes, options
        if key not in self._known:
            try:
                self._known[key] = llama_cpp.predict(shape, options, self._era, given=self._given)
            except BadInput as error:
                self._known[key] = error
        found = self._known[key]
        if isinstance(found, BadInput):
            raise found
        return found

    def advice(self, start: State, goal: Goal, names: Mapping[str, str]) -> tuple[Advice, ...]:
        """The list for one goal."""
        if goal.bucket is None:
            largest = start.made.largest(goal.device) if goal.device != _SUM else None
            goal = msgspec.structs.replace(goal, bucket=largest[0] if largest else None)
        saving: list[Advice] = []
        nothing: list[Advice] = list(idle.known(start.shape, start.options, goal))
        now = start
        for knob in ranked(goal.bucket):
            change = self._change(knob, start, now, goal)
            if change is None:
                continue
            try:
                alone = self._applied(change, start)
            except BadInput as error:
                if not any(one.setting == change.setting for one in nothing):
                    nothing.append(idle.refused(change, str(error), goal))
                continue
            after = self._after(change, now)
            one = _advice(knob, change, start, alone, now, after, goal, names)
            least = max(one.saves_bytes.upper if one.saves_bytes else 0, _most(one.saves_bytes_after))
            if least <= 0 or least * _WORTH < goal.missing:
                if not any(other.setting == one.setting for other in nothing):
                    nothing.append(idle.tried(change, start.shape, start.options, start.made, goal, least))
                continue
            saving.append(one)
            if joins(one) and after is not None:
                now = after
        return (*saving, *nothing)

    def _change(self, knob: Knob, start: State, now: State, goal: Goal) -> Change | None:
        """The change with the value that is enough alone, else enough after the others, else the knob's own choice."""

        def fits(shape: ModelShape, options: LlamaOptions) -> bool:
            try:
                return reaches(start.made, self.predicted(shape, options), goal)
            except BadInput:
                return False

        try:
            change = knob.make(start.shape, start.options, goal.device, fits)
            if now is start or (change is not None and fits(*change.applied(start.shape, start.options))):
                return change
            later = knob.make(now.shape, now.options, goal.device, fits)
            if later is not None and fits(*later.applied(now.shape, now.options)):
                return later if change is None else msgspec.structs.replace(later, before=change.before)
        except BadInput:
            return None
        return change

    def _applied(self, change: Change, state: State) -> State:
        shape, options = change.applied(state.shape, state.options)
        return State(shape, options, self.predicted(shape, options))

    def _after(self, change: Change, now: State) -> State | None:
        try:
            return self._applied(change, now)
        except BadInput:
            return None


def reaches(before: Estimate, after: Estimate, goal: Goal) -> bool:
    """Whether a changed deployment is within every room by the worst end of its range."""
    found = grown(goal.rooms, before, after, measured=goal.measured)
    return all(most <= goal.rooms[label] for label, (_, most) in found.items())


def enough(before: Estimate, after: Estimate, goal: Goal) -> bool | None:
    """Whether a changed deployment reaches the goal on every device; ``None``: within its range, or not known."""
    found = grown(goal.rooms, before, after, measured=goal.measured)
    if reaches(before, after, goal):
        return True if goal.complete and (goal.measured or not after.unknown) else None
    if any(least > goal.rooms[label] for label, (least, _) in found.items()):
        return None if goal.at_most else False
    return None


def _advice(
    knob: Knob,
    change: Change,
    start: State,
    alone: State,
    now: State,
    after: State | None,
    goal: Goal,
    names: Mapping[str, str],
) -> Advice:
    device = goal.device
    by_bucket = _by_bucket(start.made, alone.made, device)
    bucket = max(by_bucket, key=lambda name: by_bucket[name], default=None)
    saves = saving(start.made, alone.made, device)
    takes = {
        label: more
        for label in {**alone.made.total(), **start.made.total()}
        if label != device
        and not (device == _SUM and label != HOST)
        and (more := on(alone.made, label) - on(start.made, label)) > 0
    }
    fits = enough(start.made, alone.made, goal)
    return Advice(
        setting=change.setting,
        before=change.before,
        after=change.after,
        effect="saves",
        why=_why(bucket, start.made, alone.made, device),
        device=device,
        bucket=bucket,
        saves_bytes=saves,
        saves_bytes_after=None if after is None else saving(now.made, after.made, device),
        saves_by_bucket={name: size for name, size in by_bucket.items() if size},
        takes=takes,
        enough=fits,
        enough_after=None if after is None else enough(start.made, after.made, goal),
        source="estimate",
        cost=_cost(knob, change, takes),
        flag=flag(change),
        proof=proof(knob, change, alone.made, device, names),
    )


def saving(before: Estimate, after: Estimate, device: str) -> Saving:
    """What a device is spared, by both ends of the predictions."""
    ends = least_on(before, device) - least_on(after, device), on(before, device) - on(after, device)
    low, high = min(ends), max(ends)
    return Saving(bytes=low, at_most=high if high != low else None)


def _most(one: Saving | None) -> int:
    return 0 if one is None else one.upper


def _by_bucket(before: Estimate, after: Estimate, device: str) -> dict[str, int]:
    """Bucket → bytes spared on a device at the lower ends."""
    old, new = before.buckets(), after.buckets()

    def held(table: Mapping[Any, Mapping[str, int]], bucket: str) -> int:
        row = table.get(bucket, {})
        if device == _SUM:
            return sum(size for label, size in row.items() if label != HOST)
        return row.get(device, 0)

    return {bucket: held(old, bucket) - held(new, bucket) for bucket in dict.fromkeys([*old, *new])}


def _why(bucket: str | None, before: Estimate, after: Estimate, device: str) -> str:
    if bucket is None:
        return f"{device} holds less"
    rows = []
    for made in (before, after):
        row = made.buckets().get(bucket, {})  # type: ignore[call-overload]  # its name as text
        size = sum(size for label, size in row.items() if label == device or (device == _SUM and label != HOST))
        rows.append(size)
    return f"{bucket} on {device}: {mib(rows[0])} → {mib(rows[1])}"


def _cost(knob: Knob, change: Change, takes: Mapping[str, int]) -> str:
    said = knob.cost.format(after=change.after)
    more = [
        f"{'host memory' if label == HOST else label} takes {mib(size)} more"
        for label, size in takes.items()
        if size >= MIB
    ]
    return "; ".join([said, *more])
