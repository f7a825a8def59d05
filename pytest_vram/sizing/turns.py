"""Which setting to turn first where a deployment does not fit: each candidate is predicted, none is guessed.

On the host the mapped file goes first, which costs nothing. The order is then that in which a user should give things
up: weights (a smaller quantisation), the type of the KV cache, slots, context, experts to the CPU, layers to the CPU,
and only then a KV cache of four bits, as in a plan. The first change that is enough alone is named, else the one that
saves most; the last two, which save most where everything is given up, only where nothing else saves anything. The
whole list, with what else can be turned, is :mod:`pytest_vram.advice`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from pytest_vram.errors import BadInput
from pytest_vram.sizing import changes
from pytest_vram.sizing.changes import CACHE_TYPES, STEP, Change, holds, largest, requantised, smallest
from pytest_vram.sizing.options import LlamaOptions
from pytest_vram.sizing.prediction import Estimate, Turn, Verdict
from pytest_vram.sizing.shape import ModelShape
from pytest_vram.sizing.verdict import HOST, on, verdict
from pytest_vram.spec import Limits

__all__ = ["STEP", "Predict", "first", "holds", "largest", "requantised", "smallest"]

#: Setting and type of the last resort among caches.
_FOUR_BITS = ("cache-type-k, cache-type-v", CACHE_TYPES[-1])

Predict = Callable[[ModelShape, LlamaOptions], Estimate]


def first(shape: ModelShape, options: LlamaOptions, judged: Verdict, limits: Limits, predict: Predict) -> Turn | None:
    """The setting to turn first for a deployment that was judged not to fit; ``None`` where no change saves anything.

    :param predict: gives the estimate of a changed deployment.
    """

    def fits(shape: ModelShape, options: LlamaOptions) -> bool:
        return verdict(predict(shape, options), limits, reserve=judged.reserve).fits == "yes"

    best: Turn | None = None
    late: Turn | None = None
    for change in _changes(shape, options, judged.device, fits):
        try:
            after = predict(*change.applied(shape, options))
        except BadInput:  # the engine refuses this combination
            continue
        saves = judged.at_most - on(after, judged.device)
        if saves <= 0:
            continue
        enough = verdict(after, limits, reserve=judged.reserve).fits == "yes"
        turn = Turn(
            setting=change.setting,
            before=change.before,
            after=change.after,
            saves=saves,
            enough=enough,
            # Another quantisation is a file that nobody has yet.
            command=after.command if change.weights is None else (),
        )
        if enough:
            return turn
        if turn.setting == "n-gpu-layers" or (turn.setting, change.fields.get("cache_type_k")) == _FOUR_BITS:
            late = turn if late is None or turn.saves > late.saves else late
        elif best is None or turn.saves > best.saves:
            best = turn
    return best or late


def _changes(shape: ModelShape, options: LlamaOptions, device: str, fits: changes.Fits) -> Iterator[Change]:
    ordered: tuple[Callable[[], Change | None], ...] = (
        # Costs nothing but the file's pages, which the system could drop.
        lambda: changes.unmapped(options) if device == HOST else None,
        lambda: changes.weights(shape, options, fits),
        lambda: changes.cache(options, CACHE_TYPES[:1]),
        lambda: changes.one_slot(options),
        lambda: changes.context(shape, options, fits),
        lambda: changes.experts(shape, options, fits),
        lambda: changes.layers(shape, options, fits),
        lambda: changes.cache(options, CACHE_TYPES[1:]),
    )
    for made in ordered:
        found = made()
        if found is not None:
            yield found
