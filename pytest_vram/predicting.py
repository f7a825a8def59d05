"""``--vram-device=predicted``: the estimates of a test's backends in place of what a window would have measured.

Nothing is measured and nothing is started for it. A figure that no estimate gives is unmeasurable with the reason, and
an estimate of which a part is unknown is a lower bound, which can break a limit but never hold it.
"""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from pytest_vram.backends import flags, gguf_file, llama_server
from pytest_vram.checks.finding import Finding
from pytest_vram.errors import BackendError, BadInput, EngineNotFound
from pytest_vram.keeper.messages import Closed
from pytest_vram.ledger import Ledger, combined
from pytest_vram.paths import expanded
from pytest_vram.readings import Measured, Reading, Unmeasurable
from pytest_vram.spec import BackendSpec
from pytest_vram.text import encodable

if TYPE_CHECKING:
    from pytest_vram.run import Attempt, Plan, Run
    from pytest_vram.sizing import Estimate
    from pytest_vram.sizing.llama_options import Given
    from pytest_vram.sizing.options import Era
    from pytest_vram.sizing.shape import ModelShape, Note

SOURCE = "estimate"
HOST = "host"
_HERE = "--vram-device=predicted, nothing is measured"
_HOST_UNKNOWN = f"how much host memory its server takes cannot be predicted ({_HERE})"
_NO_RATE = f"how fast it is cannot be predicted ({_HERE})"
NOTHING_MEASURED = "predicted, nothing was measured"
#: The device of a figure that there is none of.
_SOME_DEVICE = "gpu0"
#: Engines whose deployments can be sized from a spec.
_ENGINES = ("llama-server",)
#: Where the engine's name of a device ends, and what it serves or stands for begins.
_ENGINE_NAME = re.compile(r"[\[ (]")
#: Options that are paths, which start from the folder of the spec.
_PATHS = frozenset({"mmproj", "lora", "lora-scaled", "model-draft", "spec-draft-model", "control-vector"})


class Predictions:
    """Estimates by spec, each made once per process."""

    def __init__(self) -> None:
        self._known: dict[bytes, Estimate | Unmeasurable] = {}

    def of(self, spec: BackendSpec) -> Estimate | Unmeasurable:
        """The estimate of this spec, or why there is none."""
        return self._made(_key(spec), lambda: estimate_of(spec))

    def on(
        self, spec: BackendSpec, *, command: Sequence[str], devices: Mapping[str, str], facts: Mapping[str, Any] = {}
    ) -> Estimate | Unmeasurable:
        """The estimate of a backend on the devices that it was started on, or why there is none; see
        :func:`estimate_on`."""
        key = _key(spec, list(command[:1]), dict(devices), str(facts.get("build", "")))
        return self._made(key, lambda: estimate_on(spec, command=command, devices=devices, facts=facts))

    def _made(self, key: bytes, make: Callable[[], Estimate]) -> Estimate | Unmeasurable:
        if key not in self._known:
            try:
                self._known[key] = make()
            except (BadInput, BackendError) as error:
                self._known[key] = Unmeasurable(reason=str(error), source=SOURCE)
        return self._known[key]


def _key(*parts: Any) -> bytes:
    return msgspec.json.encode(encodable([msgspec.to_builtins(part) for part in parts]), order="sorted")


def estimate_of(spec: BackendSpec) -> Estimate:
    """The predicted ledger of a backend's spec; nothing is started.

    :raises BadInput: an engine that cannot be predicted, an option or a model that cannot be used.
    :raises BackendError: no such model.
    """
    _check_engine(spec)
    from pytest_vram.sizing import estimating

    shape = estimating.load(str(gguf_file.resolve(spec)), engine=spec.engine)
    return estimating.of_shape(shape, engine=spec.engine, options=options_of(spec))


def _check_engine(spec: BackendSpec) -> None:
    if spec.engine not in _ENGINES:
        raise BadInput(
            f"backend {spec.name!r} (engine {spec.engine!r}) cannot be predicted: estimates are made for engine"
            f" {', '.join(repr(engine) for engine in _ENGINES)} only"
        )


class Sized(msgspec.Struct, frozen=True, kw_only=True):
    """A deployment as the rules take it: its model, its options and the rules of its build."""

    shape: ModelShape
    given: Given
    era: Era


def estimate_on(
    spec: BackendSpec, *, command: Sequence[str], devices: Mapping[str, str], facts: Mapping[str, Any] = {}
) -> Estimate:
    """The predicted ledger of a backend that was started: by the rules of its build, under the labels of the run.

    :param command: its command line, with what this package put there. :param devices: label → the engine's own name,
        as its log has them, in its order. :param facts: of its boot.
    :raises BadInput: an engine that cannot be predicted, an option or a model that cannot be used.
    :raises BackendError: no such model.
    """
    from pytest_vram.sizing import llama_cpp

    found = sized_on(spec, command=command, devices=devices, facts=facts)
    return llama_cpp.predict(found.shape, found.given.options, found.era, given=found.given)


def sized_on(
    spec: BackendSpec, *, command: Sequence[str], devices: Mapping[str, str], facts: Mapping[str, Any] = {}
) -> Sized:
    """What the estimate of a backend that was started is made from; see :func:`estimate_on`."""
    _check_engine(spec)
    from pytest_vram.sizing import estimating, llama_options

    options = options_of(spec)
    for name, value in itertools.pairwise(command):  # where this package placed it
        if name in ("--rpc", "--device") and name[2:] not in options:
            options[name[2:]] = value
    given = llama_options.read(options)
    seen = {label: _ENGINE_NAME.split(name, maxsplit=1)[0] for label, name in devices.items() if label != HOST}
    chosen = given.options
    if seen and chosen.devices:
        named = llama_options.devices_named(seen.values())
        mine = tuple(msgspec.structs.replace(one, label=label) for one, label in zip(named, seen, strict=True))
        chosen = msgspec.structs.replace(chosen, devices=mine)
        notes = tuple(note for note in given.notes if not note.text.startswith("no --device"))
        given = msgspec.structs.replace(given, options=chosen, notes=notes)
    shape = estimating.load(str(gguf_file.resolve(spec)), engine=spec.engine)
    era, unsure = _era(command, facts)
    return Sized(shape=shape, given=msgspec.structs.replace(given, notes=(*given.notes, *unsure)), era=era)


def _era(command: Sequence[str], facts: Mapping[str, Any]) -> tuple[Era, tuple[Note, ...]]:
    """The rules of the build that was started, by its number where it says one, else by its options."""
    from pytest_vram.sizing import eras

    number = re.match(r"\d{1,7}", str(facts.get("build", "")))
    names: Sequence[str] = ()
    if command:
        with contextlib.suppress(EngineNotFound):  # it is gone by now
            names = flags.help_of(Path(command[0])).long_names()
    return eras.era_of(int(number[0]) if number else None, names)


def options_of(spec: BackendSpec) -> dict[str, Any]:
    """The options of a spec as the engine's process would see them: paths start from the spec's folder.

    :raises BadInput: an option that a spec cannot have.
    """
    from pytest_vram.sizing import engine_options

    origin = f"[backend.{spec.name}] in {spec.origin}"
    for key in spec.options:
        name = engine_options.named(key, origin=origin)[0].name
        if name in llama_server.REFUSED:  # as where the server is started
            raise BadInput(f"option {key!r} ({origin}) cannot be used: {llama_server.REFUSED[name]}")
    return {name: _resolved(name, value, spec.base) for name, value in spec.options.items()}


def _resolved(name: str, value: Any, base: str) -> Any:
    """The value of an option, with a path that is relative to the spec's folder made absolute."""
    if name not in _PATHS:
        return value
    if isinstance(value, list):
        return [_resolved(name, one, base) for one in value]
    return str(Path(base) / expanded(value, f"option {name}")) if isinstance(value, str) else value


def figures(estimates: Sequence[Estimate]) -> dict[str, Measured]:
    """Device label → what all of these deployments take together, as an interval.

    Host memory is not a card's, except that it stands in for one where no deployment has any, as in ``vram fit``.
    """
    low: dict[str, int] = {}
    high: dict[str, int] = {}
    cards = {label for one in estimates for label in {**one.devices, **one.total()} if label != HOST}
    for estimate in estimates:
        lower, upper = estimate.total(), estimate.at_most()
        labels = {**estimate.devices, **lower}
        for label in [one for one in labels if one in cards] if cards else [one for one in labels if one == HOST]:
            low[label] = low.get(label, 0) + lower.get(label, 0)
            high[label] = high.get(label, 0) + upper.get(label, 0)
    return {
        label: Reading(
            bytes=low[label],
            at_most=high[label] if high[label] != low[label] else None,
            source=SOURCE,
            scope="run",
            device=label,
            exact=False,
            note=NOTHING_MEASURED,
        )
        for label in low
    }


def window(run: Run, attempt: Attempt, closed: Closed | None) -> tuple[Closed, Ledger | None]:
    """What a test's window would have seen by the estimates of its backends, and their breakdown.

    :param closed: the real window, which measured nothing, where one was open: what died in it is kept.
    """
    specs, wrong = specs_of(run, attempt)
    made: list[Estimate] = []
    unknown: list[str] = []
    reasons = [wrong] if wrong is not None else []
    for spec in specs:
        found = run.predictions.of(spec)
        if isinstance(found, Unmeasurable):
            reasons.append(found.reason)
            continue
        made.append(found)
        if found.unknown:
            buckets = ", ".join(found.unknown)
            unknown.append(
                f"the estimate of backend {spec.name!r} is a lower bound: not all of {buckets} could be known"
            )
    if not specs and wrong is None:
        reasons.append("this test uses no backend, so there is nothing to predict")
    seen: dict[str, Measured] = {_SOME_DEVICE: Unmeasurable(reason="; ".join(reasons), source=SOURCE)}
    if not reasons:
        seen = figures(made)
    empty: dict[str, Measured] = {
        label: Reading(bytes=0, source="none", scope="run", device=label, exact=True) for label in seen
    }
    base = closed if closed is not None else Closed(t0=0, t1=0)
    predicted = msgspec.structs.replace(
        base,
        run=seen,
        backend=seen,
        process=_not_predicted(seen, "what pytest's own process holds cannot be predicted"),
        device=_not_predicted(seen, "what others hold on the device cannot be predicted"),
        baseline=empty,
        baseline_backend=empty,
        host=Unmeasurable(reason=_HOST_UNKNOWN, source=SOURCE) if attempt.plan.host_limit is not None else None,
        phases={
            limit["phase"]: _not_predicted(seen, f"the peak of phase {limit['phase']!r} alone cannot be predicted")
            for limit in attempt.plan.limits
            if limit["phase"] is not None
        },
        boot=False,
        shares=[],
        overlapped=[],
        sampling=None,
        trouble=unknown,
    )
    return predicted, combined(made) if made else None


def specs_of(run: Run, attempt: Attempt) -> tuple[list[BackendSpec], str | None]:
    """The specs of the backends that the test acquired, or else of the one that it names; or what is wrong with it."""
    used = {backend.key: backend.spec for backend in attempt.backends.values()}
    if used or not attempt.plan.names_backend:
        return list(used.values()), None
    try:
        return [run.pool.spec(attempt.plan.backend, **attempt.plan.overrides)], None
    except BadInput as error:
        return [], str(error)


def concerned(attempt: Attempt) -> bool:
    """Whether there is a backend to predict for this test."""
    return bool(attempt.backends) or attempt.plan.names_backend


def applies(run: Run, attempt: Attempt) -> bool:
    """Whether an estimate is held against something at the end of this test."""
    plan = attempt.plan
    wanted = run.settings.budget is not None or bool(plan.limits) or plan.host_limit is not None
    return (wanted or plan.rate is not None) and concerned(attempt)


def unjudgeable(plan: Plan) -> str | None:
    """Why none of this test's markers can be judged by an estimate; ``None`` where one can, or there is none."""
    if plan.limits:
        if plan.names_backend or plan.may_use_backends:
            return None
        return f"this test uses no backend, so there is nothing to predict ({_HERE})"
    if plan.host_limit is not None:
        return f"@max_host_memory: {_HOST_UNKNOWN}"
    if plan.soak is not None:
        return f"@vram_soak: an estimate says nothing of what becomes of memory over many turns ({_HERE})"
    if plan.idle is not None:
        return f"@idle_rollback: an estimate says nothing of what is held after a test ({_HERE})"
    if plan.rate is not None:
        return f"@min_tokens_per_second: {_NO_RATE}"
    return None


def no_rate(rate: float) -> Finding:
    """The finding for a rate that was asked for beside a limit that can be judged."""
    return Finding(
        check="min_tokens_per_second",
        verdict="inconclusive",
        section="rate undecided",
        text=f"The rate of {rate:g} tokens/s is undecided: {_NO_RATE}.",
        limit_from="@min_tokens_per_second",
    )


def _not_predicted(labels: Iterable[str], reason: str) -> dict[str, Measured]:
    return {label: Unmeasurable(reason=reason, source=SOURCE, device=label) for label in labels}
