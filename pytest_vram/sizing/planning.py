"""``plan``: the settings of llama-server under which a model fits a budget, best first.

What is given up first is what costs least: a smaller file of the model, then a smaller type of the KV cache, then
context beyond the wish, then experts to the CPU, then layers to the CPU. Every answer is one prediction of its whole
combination; savings are never added up.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

import msgspec

from pytest_vram.errors import BadInput, BadSize
from pytest_vram.settings import parse_budget
from pytest_vram.sizing import estimating, llama_cpp, llama_options, moe
from pytest_vram.sizing.changes import STEP, holds, largest, smallest
from pytest_vram.sizing.llama_options import Given
from pytest_vram.sizing.option_values import shown
from pytest_vram.sizing.options import CURRENT, Era, LlamaOptions
from pytest_vram.sizing.plans import (
    CACHE_LADDER,
    LAST_RESORT,
    Impossible,
    Plan,
    Preference,
    Relaxed,
    Search,
    Wishes,
    rank,
    undominated,
    with_losses,
)
from pytest_vram.sizing.prediction import Estimate, Verdict
from pytest_vram.sizing.shape import ModelShape
from pytest_vram.sizing.verdict import HOST, check_labels, check_reserve, on, verdict
from pytest_vram.spec import Limits
from pytest_vram.units import MIB, mib, parse_size, written

#: Least context where none is asked for (or the trained one, where that is shorter): what llama-server's own
#: ``--fit-ctx`` keeps.
LEAST_CONTEXT = 4096
#: The small cards that this is for → least context where none is asked for.
TIERS = {"4GB": 2048, "6GB": 4096, "8GB": 8192}
#: What is tried to find out whether anything fits at all.
_CHEAPEST = (LAST_RESORT, "f16")
#: Tokens of a prompt at once where nothing fits otherwise: compute buffers grow with them.
_FRUGAL_UBATCH = 128
MOST_PLANS = 12


def plan(
    model: str | Path | Sequence[str | Path],
    budget: str | Limits,
    *,
    engine: str = "llama-server",
    minimum_context: int | None = None,
    slots: int = 1,
    host_memory: str | int | None = None,
    reserve: str | int = 0,
    prefer: Preference = "speed",
    era: Era = CURRENT,
    **options: Any,
) -> list[Plan]:
    """Settings of ``engine`` under which a model fits a budget, best first; empty where nothing does.

    :param model: one model, or several files of it (quantisations) to choose from.
    :param budget: per device, such as ``"4GB"`` or ``"gpu0=6GB,gpu1=4GB"``.
    :param minimum_context: tokens for each slot. :param host_memory: most that the host may give.
    :param options: settings that are kept as they are; what is not named is searched.
    :raises BadInput: a model, a size or an option that cannot be used.

    Why nothing fits, and which wish would make it fit, is what :func:`search` says.
    """
    wishes: dict[str, Any] = {"minimum_context": minimum_context, "slots": slots, "host_memory": host_memory}
    found = search(model, budget, engine=engine, reserve=reserve, prefer=prefer, era=era, **wishes, **options)
    return list(found.plans)


def search(
    model: str | Path | Sequence[str | Path],
    budget: str | Limits,
    *,
    engine: str = "llama-server",
    minimum_context: int | None = None,
    slots: int = 1,
    host_memory: str | int | None = None,
    reserve: str | int = 0,
    prefer: Preference = "speed",
    era: Era = CURRENT,
    **options: Any,
) -> Search:
    """The same as :func:`plan`, with the reasons: where nothing fits, ``impossible`` says how many bytes are missing,
    and which single wish, relaxed to what, makes it fit.

    :raises BadInput: a model, a size or an option that cannot be used.
    """
    check_engine(engine)
    wishes = wishes_of(
        minimum_context=minimum_context, slots=slots, host_memory=host_memory, reserve=reserve, prefer=prefer
    )
    shapes = [estimating.load(one, engine=engine) for one in _models(model)]
    return search_shapes(shapes, budget_of(budget), wishes, llama_options.read(options), era)


def _models(value: object) -> list[Any]:
    if isinstance(value, str | Path):
        return [value]
    if not isinstance(value, Sequence) or isinstance(value, bytes) or not value:
        raise BadInput(f"{shown(value)} names no model: write text, a Path, or a list of them to choose from")
    return list(value)


def check_engine(engine: str) -> None:
    """:raises BadInput: an engine whose settings are not searched."""
    estimating.check_engine(engine)
    if engine != "llama-server":
        raise BadInput(f"plan searches the settings of llama-server; for {engine} use estimate with --budget")


def budget_of(budget: str | Limits) -> Limits:
    """:raises BadInput: not a budget."""
    if isinstance(budget, Limits):
        return budget
    if not isinstance(budget, str):
        raise BadInput(f"budget = {shown(budget)} is no budget: write a size such as '4GB' as text")
    try:
        return parse_budget(budget)
    except (BadSize, ValueError) as error:
        raise BadInput(f"{error} (budget)") from None


def size_of(value: str | int, what: str) -> int:
    """:raises BadInput: not a size."""
    if isinstance(value, int) and not isinstance(value, bool):
        if not 0 <= value < 1 << 62:
            text = "is negative" if value < 0 else "is larger than any device"
            raise BadInput(f"{what} = {shown(value)} {text}: write a size such as 32GB")
        return value
    try:
        return parse_size(value)
    except BadSize as error:
        raise BadInput(f"{error} ({what})") from None


def wishes_of(
    *,
    minimum_context: int | None,
    slots: int,
    host_memory: str | int | None,
    reserve: str | int,
    prefer: Preference,
) -> Wishes:
    """Check what a user wishes.

    :raises BadInput: naming the wish and what is accepted.
    """
    _whole(slots, "slots", llama_options.MOST_SLOTS, "write a number")
    if minimum_context is not None:
        each = "" if slots == 1 else f" for each of {slots} slots"
        _whole(minimum_context, "minimum_context", most_context(slots), f"write a number of tokens{each}")
    if prefer not in get_args(Preference):
        raise BadInput(f"prefer = {prefer!r} cannot be used: write speed, quality or context")
    return Wishes(
        minimum_context=minimum_context,
        slots=slots,
        host_memory=None if host_memory is None else size_of(host_memory, "host_memory"),
        reserve=size_of(reserve, "reserve"),
        prefer=prefer,
    )


def most_context(slots: int) -> int:
    """Tokens of each slot at which the ctx-size of all of them is still a number that llama-server takes."""
    return ((1 << 31) - 1) // slots // STEP * STEP


def _whole(value: object, what: str, most: int, write: str) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        option = what.replace("_", "-")
        raise BadInput(f"{what} = {shown(value)} cannot be used: {write} from 1 to {most} (--{option})")


def search_shapes(
    shapes: Sequence[ModelShape], budget: Limits, wishes: Wishes, given: Given, era: Era = CURRENT
) -> Search:
    """Search models that were read already; see the module.

    :raises BadInput: options that contradict the wishes, or that the engine refuses; a limit for a device that there
        is not.
    """
    for name in ("ctx-size", "kv-unified-per-slot", "parallel"):
        if name in given.given:
            instead = "slots" if name == "parallel" else "minimum_context"
            raise BadInput(
                f"option {name!r} is what plan searches: say {instead} (--{instead.replace('_', '-')}) instead"
            )
    check_labels([HOST, *(device.label for device in given.options.devices)], budget)
    check_reserve(budget, wishes.reserve, cards=bool(given.options.devices))
    if wishes.minimum_context is None:
        wishes = msgspec.structs.replace(wishes, minimum_context=least_context(shapes))
    cases = [_Case(shape, budget, wishes, given, era) for shape in shapes]
    read = [case.without_mapping() for case in cases if case.host_limit is not None]
    frugal = [case.without_mapping().frugal() for case in cases]
    every = (*CACHE_LADDER, LAST_RESORT)
    found: list[Plan] = []
    for group, ladder in ((cases, CACHE_LADDER), (read, CACHE_LADDER), (cases + read, (LAST_RESORT,)), (frugal, every)):
        found = [one for case in group for one in case.plans(ladder)]
        if found:
            break
    if not found:
        return Search(budget=budget, wishes=wishes, impossible=_impossible(frugal))
    largest_file = max(shape.file_bytes for shape in shapes)
    files = {shape.source: shape.file_bytes for shape in shapes}
    best = sorted(undominated(found, files), key=lambda one: rank(one, wishes, files))
    named = tuple(with_losses(one, files, largest_file, given.options) for one in best[:MOST_PLANS])
    return Search(budget=budget, wishes=wishes, plans=named)


def least_context(shapes: Sequence[ModelShape], wanted: int = LEAST_CONTEXT) -> int:
    """Least context where none is asked for: ``wanted``, or the trained one where that is shorter."""
    return min(wanted, *(shape.context or wanted for shape in shapes))


class _Case:
    """One model under one budget and the wishes."""

    def __init__(
        self,
        shape: ModelShape,
        budget: Limits,
        wishes: Wishes,
        given: Given,
        era: Era,
        predict: Callable[[LlamaOptions], Estimate] | None = None,
    ) -> None:
        self.shape, self.budget, self.wishes, self.given, self.era = shape, budget, wishes, given, era
        # One cache for each model: a search asks for the same combination again and again.
        self.predict = functools.cache(self._predict) if predict is None else predict
        self.blocks = len(shape.layers)
        self.counted = self.blocks + shape.extra_layers  # n-gpu-layers counts prediction blocks, the last ones, too
        self.facts = moe.facts(shape)
        self.least = wishes.minimum_context or least_context([shape])
        self.most = max(self.least, min(shape.context, most_context(wishes.slots)))
        self.on_host = not given.options.devices
        # The host has limits of its own: what leaves the card comes to it, so that both pull in opposite directions.
        card = {label: size for label, size in budget.by_label.items() if self.on_host or label != HOST}
        limited = budget.each is not None or budget.total is not None or bool(card)
        self.card_budget = msgspec.structs.replace(budget, by_label=card) if limited else None
        host = [wishes.host_memory, None if self.on_host else budget.by_label.get(HOST)]
        self.host_limit = min((size for size in host if size is not None), default=None)
        self.fixed_experts = "n-cpu-moe" in given.given or "cpu-moe" in given.given
        self.fixed_layers = "n-gpu-layers" in given.given
        self.fixed_cache = "cache-type-k" in given.given or "cache-type-v" in given.given

    def _predict(self, options: LlamaOptions) -> Estimate:
        return llama_cpp.predict(self.shape, options, self.era, given=self.given, facts=self.facts)

    def options(self, context: int, cache: str, experts: int | None, layers: int | None) -> LlamaOptions:
        """The given options with these; ``None`` leaves experts and layers as they were given."""
        base = self.given.options
        changes: dict[str, Any] = {
            "ctx_size": -(-context // STEP) * STEP * self.wishes.slots,
            "parallel": self.wishes.slots,
        }
        if not self.fixed_cache:
            changes["cache_type_k"] = cache
            changes["cache_type_v"] = "f16" if base.flash_attn == "off" else cache
        if not self.fixed_experts and experts is not None:
            changes["n_cpu_moe"] = experts
        if not self.fixed_layers and not self.on_host:
            # Written out, because --fit changes what is not: it would put layers elsewhere than predicted.
            changes["n_gpu_layers"] = self.counted + 1 if layers is None else layers
        return msgspec.structs.replace(base, **changes)

    def judged(self, options: LlamaOptions) -> Verdict:
        return verdict(self.predict(options), self.budget, reserve=self.wishes.reserve)

    def cards_fit(self, options: LlamaOptions) -> bool:
        """Whether the upper end is within every limit of a card."""
        made = self.predict(options)
        if self.card_budget is None:
            return not made.unknown
        return verdict(made, self.card_budget, reserve=self.wishes.reserve).fits == "yes"

    def fits(self, options: LlamaOptions) -> bool:
        """Whether the upper end is within every limit, the host's included."""
        return self.cards_fit(options) and self.host_fits(options)

    def host_fits(self, options: LlamaOptions) -> bool:
        return self.host_limit is None or on(self.predict(options), HOST) <= self.host_limit

    def without_mapping(self) -> _Case:
        """The same with the file read instead of mapped, where the host has a limit: what the CPU keeps in an order of
        its own is then in memory once, and not beside the file's pages."""
        if self.host_limit is None or {"mmap", "load-mode", "mlock", "direct-io"} & set(self.given.given):
            return self
        return self._with(mmap=False)

    def frugal(self) -> _Case:
        """The same with smaller compute buffers, at the price of the speed of prompts: 128 tokens at once, and no
        weights of the host copied to the card for them. What was given stays."""
        changes: dict[str, Any] = {}
        if not {"ubatch-size", "batch-size"} & set(self.given.given):
            changes["ubatch_size"] = min(_FRUGAL_UBATCH, self.given.options.ubatch_size)
        if "op-offload" not in self.given.given and not self.on_host:
            changes["op_offload"] = False
        return self._with(**changes)

    def _with(self, **changes: Any) -> _Case:
        options = msgspec.structs.replace(self.given.options, **changes)
        given = msgspec.structs.replace(self.given, options=options)
        return _Case(self.shape, self.budget, self.wishes, given, self.era)

    def plans(self, ladder: Iterable[str]) -> list[Plan]:
        found: list[Plan] = []
        for cache in self.caches(ladder):
            for experts, layers in self._places(cache):
                made = self._longest(cache, experts, layers)
                if made is not None:
                    found.append(made)
        return found

    def caches(self, ladder: Iterable[str]) -> Iterable[str]:
        """Types of the cache to try."""
        return (self.given.options.cache_type_k,) if self.fixed_cache else ladder

    def _places(self, cache: str) -> list[tuple[int, int | None]]:
        """What goes to the CPU so that the least context fits, and twice that: nothing, else the fewest experts, else
        the fewest layers.

        The cards alone decide: the fewest that they allow is also what takes least of the host. Each place is then
        looked up again for the longest context that it holds, because the host may not hold the one it was made for.
        """
        contexts = [self.least, min(2 * self.least, self.most)]
        if self.wishes.prefer == "context":
            contexts.append(self.most)
        places = [self._reachable(cache, context) for context in dict.fromkeys(contexts)]
        return list(dict.fromkeys(place for place in places if place is not None))

    def _reachable(self, cache: str, context: int) -> tuple[int, int | None] | None:
        """The place for a context, or for the longest below it that the host holds as well."""
        place = self._place(cache, context)
        if place is not None and self._held(cache, context, place):
            return place
        if context == self.least or self.host_limit is None:
            return None
        steps = largest(
            -(-self.least // STEP), context // STEP, lambda n: self._held(cache, n * STEP, self._place(cache, n * STEP))
        )
        return None if steps is None else self._place(cache, steps * STEP)

    def _held(self, cache: str, context: int, place: tuple[int, int | None] | None) -> bool:
        return place is not None and holds(lambda: self.fits(self.options(context, cache, *place)))

    def _place(self, cache: str, context: int) -> tuple[int, int | None] | None:
        def on_cards(experts: int, layers: int | None) -> bool:
            return self.cards_fit(self.options(context, cache, experts, layers))

        if holds(lambda: on_cards(0, None)):
            return 0, None
        if self.on_host:
            return None
        experts = self.blocks if self.shape.experts and not self.fixed_experts else 0
        if experts:
            count = smallest(1, experts, lambda number: on_cards(number, None))
            if count is not None:
                return count, None
        if self.fixed_layers:
            return None
        kept = largest(0, self.counted, lambda number: on_cards(experts, number))
        if kept is None:
            return None
        # Layers are larger steps than experts: what is left of the card takes some experts back.
        return smallest(0, experts, lambda number: on_cards(number, kept)) or 0, kept

    def _longest(self, cache: str, experts: int, layers: int | None) -> Plan | None:
        """The plan with the longest context up to the trained one."""
        low, high = -(-self.least // STEP), -(-self.most // STEP)
        steps = largest(low, high, lambda n: self.fits(self.options(n * STEP, cache, experts, layers)))
        if steps is None:
            return None
        options = self.options(steps * STEP, cache, experts, layers)
        if self.host_limit is not None and "cache-ram" not in self.given.given:
            options = self._bounded(options)
        made = self.predict(options)
        types = options.cache_type_k, options.cache_type_v
        return Plan(
            model=self.shape.source,
            context=steps * STEP,
            slots=self.wishes.slots,
            cache_type=types[0] if types[0] == types[1] else "/".join(types),
            experts_on_cpu=self.blocks if options.cpu_moe else min(options.n_cpu_moe, self.blocks),
            layers_on_gpu=int(made.settings.get("layers_on_gpu") or 0),
            layers=self.blocks,
            options=options,
            estimate=made,
            verdict=self.judged(options),
        )

    def _bounded(self, options: LlamaOptions) -> LlamaOptions:
        """With a prompt cache that the host's limit leaves room for: it grows as requests come."""
        spare = (self.host_limit or 0) - on(self.predict(options), HOST)
        return msgspec.structs.replace(options, cache_ram=min(options.cache_ram, max(0, spare // MIB)))

    def cheapest(self) -> LlamaOptions:
        """What misses least: all that can be given up is, and the parts are put where most of them fit."""
        movable = self.shape.experts and not self.fixed_experts and not self.on_host
        experts = range(self.blocks + 1) if movable else range(1)
        layers = range(1) if self.fixed_layers or self.on_host else range(self.counted + 1)
        tried: list[LlamaOptions] = []
        for cache in _CHEAPEST:
            tried = [self.options(self.least, cache, count, None) for count in experts]
            tried += [self.options(self.least, cache, experts[-1], count) for count in layers]
            possible = [one for one in dict.fromkeys(tried) if holds(functools.partial(self._sized, one))]
            if possible:
                best = min(possible, key=lambda one: self.missing(one)[0])
                # A small cache can need larger compute buffers than it saves.
                plain = (
                    best if self.fixed_cache else msgspec.structs.replace(best, cache_type_k="f16", cache_type_v="f16")
                )
                return min(best, plain, key=lambda one: self.missing(one)[0])
        return tried[-1]  # the engine refuses all of them, and its refusal is the answer

    def _sized(self, options: LlamaOptions) -> bool:
        return bool(self.predict(options).entries)

    def missing(self, options: LlamaOptions) -> tuple[int, str]:
        """Bytes that are missing in all, and the device where most of them are."""
        short: dict[str, int] = {}
        if self.card_budget is not None:
            card = verdict(self.predict(options), self.card_budget, reserve=self.wishes.reserve)
            short[card.device] = max(0, -card.spare)
        if self.host_limit is not None:
            short[HOST] = max(0, on(self.predict(options), HOST) - self.host_limit, short.get(HOST, 0))
        device = max(short, key=lambda label: short[label])
        return sum(short.values()), device

    def relaxed(self, **changes: Any) -> _Case:
        """The same with other wishes."""
        wishes = msgspec.structs.replace(self.wishes, **changes)
        return _Case(self.shape, self.budget, wishes, self.given, self.era, self.predict)

    def possible(self) -> bool:
        """Whether there is any plan."""
        return any(True for _ in self.least_options())

    def least_options(self) -> Iterator[LlamaOptions]:
        """Options with the least context that fit, with the smallest type of the cache and without."""
        for cache in self.caches(_CHEAPEST):
            for experts, layers in self._places(cache):
                options = self.options(self.least, cache, experts, layers)
                if holds(functools.partial(self.fits, options)):
                    yield options


def _impossible(cases: Sequence[_Case]) -> Impossible:
    case, options = min(((case, case.cheapest()) for case in cases), key=lambda pair: pair[0].missing(pair[1])[0])
    missing, device = case.missing(options)
    made = case.predict(options)
    relaxed = tuple(_relaxations(case, options))
    unknown = made.unknown if missing == 0 else ()
    if unknown:
        reason = f"nothing can be promised: {', '.join(unknown)} of this model could not be known"
    else:
        where = "host memory" if device == HOST else device
        reason = f"even the cheapest configuration is {mib(missing)} ({missing:,} bytes) over the limit on {where}"
    return Impossible(missing=missing, device=device, cheapest=made, relaxed=relaxed, reason=reason, unknown=unknown)


def _relaxations(case: _Case, options: LlamaOptions) -> Iterable[Relaxed]:
    """Single wishes that make something fit, each tried with all others kept."""
    if case.wishes.minimum_context and case.least > STEP:
        steps = largest(1, -(-case.least // STEP) - 1, lambda n: case.relaxed(minimum_context=n * STEP).possible())
        if steps is not None:
            yield Relaxed(wish="minimum_context", before=str(case.least), after=str(steps * STEP))
    if case.wishes.slots > 1:
        slots = largest(1, case.wishes.slots - 1, lambda n: case.relaxed(slots=n).possible())
        if slots is not None:
            yield Relaxed(wish="slots", before=str(case.wishes.slots), after=str(slots))
    if case.wishes.reserve and case.relaxed(reserve=0).possible():
        yield Relaxed(wish="reserve", before=written(case.wishes.reserve), after="0")
    if case.wishes.host_memory is not None:
        sizes = [on(case.predict(one), HOST) for one in case.relaxed(host_memory=None).least_options()]
        if sizes:
            least = min(sizes)
            yield Relaxed(
                wish="host_memory", before=written(case.wishes.host_memory), after=f"{-(-least // MIB):,} MiB"
            )
    card = case.judged(options)
    short_of_host = card.device == HOST and not case.on_host
    if card.spare < 0 and not case.predict(options).unknown and (short_of_host or case.host_fits(options)):
        yield Relaxed(wish="budget", before=written(card.limit), after=f"{-(-(card.limit - card.spare) // MIB):,} MiB")
