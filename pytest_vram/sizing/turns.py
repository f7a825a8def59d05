"""Which setting to turn first where a deployment does not fit: each candidate is predicted, none is guessed.

On the host the mapped file goes first, which costs nothing. The order is then that in which a user should give things
up: weights (a smaller quantisation), the type of the KV cache,
slots, context, experts to the CPU, layers to the CPU, and only then a KV cache of four bits, as in a plan. The first
change that is enough alone is named, else the one that saves most.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence

import msgspec

from pytest_vram.errors import BadInput
from pytest_vram.sizing import ggml
from pytest_vram.sizing.options import LlamaOptions
from pytest_vram.sizing.prediction import Estimate, Turn, Verdict
from pytest_vram.sizing.shape import ModelShape, Tensor
from pytest_vram.sizing.verdict import HOST, on, verdict
from pytest_vram.spec import Limits

Predict = Callable[[ModelShape, LlamaOptions], Estimate]

#: Quantisations of the weights that are tried, from the best; below 4 bits the loss is no longer small.
WEIGHT_TYPES = ("q8_0", "q6_k", "q5_k", "q4_k")
#: Cache types that are tried: the first where others are, the last after everything else, because it costs accuracy.
CACHE_TYPES = ("q8_0", "q4_0")
#: Contexts are multiples of this (``llama-context.cpp``).
STEP = 256


class _Change(msgspec.Struct, frozen=True, kw_only=True):
    setting: str
    before: str
    after: str
    shape: ModelShape
    options: LlamaOptions


def first(shape: ModelShape, options: LlamaOptions, judged: Verdict, limits: Limits, predict: Predict) -> Turn | None:
    """The setting to turn first for a deployment that was judged not to fit; ``None`` where no change saves anything.

    :param predict: gives the estimate of a changed deployment.
    """
    best: Turn | None = None
    for change in _changes(shape, options, judged.device, lambda s, o: _spare(predict(s, o), judged, limits)):
        after = predict(change.shape, change.options)
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
            command=after.command if change.shape is shape else (),
        )
        if enough:
            return turn
        if best is None or turn.saves > best.saves:
            best = turn
    return best


def requantised(shape: ModelShape, name: str) -> ModelShape:
    """The same model with every matrix that takes more room in type ``name``, norms and biases as they are.

    This is what ``llama-quantize --pure`` would write; real mixtures keep a few matrices larger.
    """
    tensors = tuple(_smaller(tensor, name) for tensor in shape.tensors)
    saved = sum(tensor.bytes for tensor in shape.tensors) - sum(tensor.bytes for tensor in tensors)
    return msgspec.structs.replace(shape, tensors=tensors, file_bytes=shape.file_bytes - saved, quantization=name)


def _smaller(tensor: Tensor, name: str) -> Tensor:
    if not tensor.known or len(tensor.dims) < 2 or tensor.dims[0] % ggml.type_of(name).block:
        return tensor
    if tensor.name.endswith(("_norm.weight", "ffn_gate_inp.weight", "position_embd.weight")):
        return tensor
    size = ggml.tensor_bytes(name, tensor.dims)
    return msgspec.structs.replace(tensor, type=name, bytes=size) if size < tensor.bytes else tensor


def main_type(shape: ModelShape) -> str:
    """The type that holds most of a model's bytes."""
    sizes: dict[str, int] = {}
    for tensor in shape.tensors:
        sizes[tensor.type] = sizes.get(tensor.type, 0) + tensor.bytes
    return max(sizes, key=lambda name: sizes[name], default="")


def _spare(estimate: Estimate, judged: Verdict, limits: Limits) -> bool:
    return verdict(estimate, limits, reserve=judged.reserve).fits == "yes"


def _changes(
    shape: ModelShape, options: LlamaOptions, device: str, fits: Callable[[ModelShape, LlamaOptions], bool]
) -> Iterator[_Change]:
    def with_options(**changes: object) -> LlamaOptions:
        return msgspec.structs.replace(options, **changes)

    def change(setting: str, before: object, after: object, **changes: object) -> _Change:
        return _Change(
            setting=setting, before=str(before), after=str(after), shape=shape, options=with_options(**changes)
        )

    if device == HOST and options.mmap:  # costs nothing but the file's pages, which the system could drop
        yield change("mmap", "on", "off", mmap=False)
    yield from _weights(shape, options, fits)
    yield from _cache(options, change, CACHE_TYPES[:1])
    if options.parallel is None or options.parallel > 1:
        yield change("parallel", options.slots, 1, parallel=1, kv_unified=None)
    context = options.ctx_size or shape.context
    if context > STEP and not shape.encoder:
        found = largest(1, -(-context // STEP) - 1, lambda n: fits(shape, with_options(ctx_size=n * STEP)))
        after = STEP * (found or max(1, context // 2 // STEP))
        yield change("ctx-size", context, after, ctx_size=after)
    blocks = len(shape.layers)
    if shape.experts and options.devices and not options.cpu_moe and options.n_cpu_moe < blocks:
        count = smallest(options.n_cpu_moe + 1, blocks, lambda n: fits(shape, with_options(n_cpu_moe=n))) or blocks
        yield change("n-cpu-moe", options.n_cpu_moe, count, n_cpu_moe=count)
    if options.devices:
        counted = blocks + shape.extra_layers + 1  # prediction blocks and the output count as well
        now = counted if options.n_gpu_layers is None else min(options.n_gpu_layers, counted)
        if now:
            kept = largest(0, now - 1, lambda n: fits(shape, with_options(n_gpu_layers=n))) or 0
            before = "all" if options.n_gpu_layers is None else options.n_gpu_layers
            yield change("n-gpu-layers", before, kept, n_gpu_layers=kept)
    yield from _cache(options, change, CACHE_TYPES[1:])


def _weights(
    shape: ModelShape, options: LlamaOptions, fits: Callable[[ModelShape, LlamaOptions], bool]
) -> Iterator[_Change]:
    """The best quantisation that fits, else the smallest that is tried."""
    now = sum(tensor.bytes for tensor in shape.tensors)
    smaller: ModelShape | None = None
    for name in WEIGHT_TYPES:
        tried = requantised(shape, name)
        # Within 5 %: the file has this type already, but for a few matrices.
        if sum(tensor.bytes for tensor in tried.tensors) > now * 0.95:
            continue
        smaller = tried
        if fits(tried, options):
            break
    if smaller is not None:
        before = shape.quantization or main_type(shape)
        yield _Change(setting="model", before=before, after=smaller.quantization, shape=smaller, options=options)


def _cache(options: LlamaOptions, change: Callable[..., _Change], types: Sequence[str]) -> Iterator[_Change]:
    order = ("f16", *CACHE_TYPES)
    before = options.cache_type_k, options.cache_type_v
    rank = min(order.index(name) if name in order else 0 for name in before)
    for name in types:
        value = options.cache_type_v if options.flash_attn == "off" else name
        if order.index(name) > rank and (name, value) != before:
            both = name if name == value else f"{name}/{value}"
            now = before[0] if before[0] == before[1] else "/".join(before)
            yield change("cache-type-k, cache-type-v", now, both, cache_type_k=name, cache_type_v=value)


def smallest(low: int, high: int, fits: Callable[[int], bool]) -> int | None:
    """The least number from ``low`` to ``high`` that holds, where all above one that does hold; ``None`` else."""
    if low > high or not holds(functools.partial(fits, high)):
        return None
    while low < high:
        middle = (low + high) // 2
        if holds(functools.partial(fits, middle)):
            high = middle
        else:
            low = middle + 1
    return high


def largest(low: int, high: int, fits: Callable[[int], bool]) -> int | None:
    """The largest number from ``low`` to ``high`` that holds, where all below one that does hold; ``None`` else."""
    found = smallest(-high, -low, lambda number: fits(-number))
    return None if found is None else -found


def holds(question: Callable[[], bool]) -> bool:
    """The answer to a question about a combination of settings; one that the engine refuses holds nothing."""
    try:
        return question()
    except BadInput:
        return False
