"""Changes of llama.cpp's settings that may save memory, each with the value that is enough where there is one.

What each saves is not known here but predicted by whoever tries it, with the whole changed deployment.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from pytest_vram.errors import BadInput
from pytest_vram.sizing import ggml, placement
from pytest_vram.sizing.options import Draft, LlamaOptions
from pytest_vram.sizing.shape import ModelShape, Tensor

Fits = Callable[[ModelShape, LlamaOptions], bool]

#: Quantisations of the weights that are tried, from the best; below 4 bits the loss is no longer small.
WEIGHT_TYPES = ("q8_0", "q6_k", "q5_k", "q4_k")
#: Cache types that are tried: the first where others are, the last after everything else, because it costs accuracy.
CACHE_TYPES = ("q8_0", "q4_0")
#: Contexts are multiples of this (``llama-context.cpp``).
STEP = 256
#: Tokens of a prompt at once, from the largest; below the last the buffers hardly shrink and prompts crawl.
UBATCHES = (2048, 1024, 512, 256, 128, 64)
#: What is proposed where none of them is enough.
FRUGAL_UBATCH = 128
#: An override that moves nothing: any turns pipeline parallelism off (``llama-context.cpp``).
NO_TENSOR = ("^$", "CPU")


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """One setting changed.

    :ivar setting: the engine's own long option (several by commas), ``model`` for another file. :ivar before: its value
        now. :ivar after: the value to try. :ivar fields: fields of the options that change.
    :ivar weights: quantisation of the other file.
    """

    setting: str
    before: str
    after: str
    fields: dict[str, Any] = {}
    weights: str | None = None

    def applied(self, shape: ModelShape, options: LlamaOptions) -> tuple[ModelShape, LlamaOptions]:
        """A deployment with this change."""
        if self.weights is not None:
            shape = requantised(shape, self.weights)
        return shape, msgspec.structs.replace(options, **self.fields)


def change(setting: str, before: object, after: object, **fields: Any) -> Change:
    """A change of these fields of the options."""
    return Change(setting=setting, before=str(before), after=str(after), fields=fields)


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


def weights(shape: ModelShape, options: LlamaOptions, fits: Fits) -> Change | None:
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
    if smaller is None:
        return None
    before = shape.quantization or main_type(shape)
    return Change(setting="model", before=before, after=smaller.quantization, weights=smaller.quantization)


def cache(options: LlamaOptions, types: Sequence[str]) -> Change | None:
    """A smaller type of the KV cache: the first of ``types`` that is one. V stays as it is without flash attention."""
    order = ("f16", *CACHE_TYPES)
    before = options.cache_type_k, options.cache_type_v
    rank = min(order.index(name) if name in order else 0 for name in before)
    for name in types:
        value = options.cache_type_v if options.flash_attn == "off" else name
        if order.index(name) > rank and (name, value) != before:
            both = name if name == value else f"{name}/{value}"
            now = before[0] if before[0] == before[1] else "/".join(before)
            return change("cache-type-k, cache-type-v", now, both, cache_type_k=name, cache_type_v=value)
    return None


def one_slot(options: LlamaOptions) -> Change | None:
    """One slot in place of several."""
    if options.parallel is not None and options.parallel <= 1:
        return None
    return change("parallel", options.slots, 1, parallel=1, kv_unified=None)


def context(shape: ModelShape, options: LlamaOptions, fits: Fits, *, least: int = STEP) -> Change | None:
    """The longest context that fits, else half of it.

    :param least: tokens; a shorter one is not looked for, as long as it leaves something to be tried.
    """
    now = options.ctx_size or shape.context
    if now <= STEP or shape.encoder:
        return None

    def enough(steps: int) -> bool:
        return fits(shape, msgspec.structs.replace(options, ctx_size=steps * STEP))

    found = largest(max(1, min(least, now // 2) // STEP), -(-now // STEP) - 1, enough)
    after = STEP * (found or max(1, now // 2 // STEP))
    return change("ctx-size", now, after, ctx_size=after)


def experts(shape: ModelShape, options: LlamaOptions, fits: Fits) -> Change | None:
    """The experts of the fewest blocks that are enough on the CPU, else of all."""
    blocks = len(shape.layers)
    if not shape.experts or not options.devices or options.cpu_moe or options.n_cpu_moe >= blocks:
        return None

    def enough(count: int) -> bool:
        return fits(shape, msgspec.structs.replace(options, n_cpu_moe=count))

    count = smallest(options.n_cpu_moe + 1, blocks, enough) or blocks
    return change("n-cpu-moe", options.n_cpu_moe, count, n_cpu_moe=count)


def layers(shape: ModelShape, options: LlamaOptions, fits: Fits) -> Change | None:
    """The most layers that fit on the devices, else none."""
    if not options.devices:
        return None
    counted = len(shape.layers) + shape.extra_layers + 1  # prediction blocks and the output count as well
    now = counted if options.n_gpu_layers is None else min(options.n_gpu_layers, counted)
    if not now:
        return None

    def enough(kept: int) -> bool:
        return fits(shape, msgspec.structs.replace(options, n_gpu_layers=kept))

    kept = largest(0, now - 1, enough) or 0
    before = "all" if options.n_gpu_layers is None else options.n_gpu_layers
    return change("n-gpu-layers", before, kept, n_gpu_layers=kept)


def unmapped(options: LlamaOptions) -> Change | None:
    """The file read instead of mapped, so that nothing lies in host memory beside its pages."""
    return change("mmap", "on", "off", mmap=False) if options.mmap else None


def flash_attention(options: LlamaOptions) -> Change | None:
    """Flash attention where it was turned off."""
    return change("flash-attn", "off", "on", flash_attn="on") if options.flash_attn == "off" else None


def ubatch(shape: ModelShape, options: LlamaOptions, fits: Fits) -> Change | None:
    """The largest ubatch that fits, else one that is small and still quick.

    The batch of a server of embeddings is its ubatch.
    """
    now = min(options.ubatch_size, options.batch_size)
    embeds = options.embeddings or options.reranking or shape.encoder
    other: Change | None = None
    for size in UBATCHES:
        if size >= now:
            continue
        fields = {"ubatch_size": size, **({"batch_size": size} if embeds else {})}
        tried = change("ubatch-size", now, size, **fields)
        if fits(*tried.applied(shape, options)):
            return tried
        if other is None or size >= FRUGAL_UBATCH:
            other = tried
    return other


def window_cache(shape: ModelShape, options: LlamaOptions) -> Change | None:
    """Sliding windows that keep their window only, where all tokens were asked for."""
    return change("swa-full", "on", "off", swa_full=False) if options.swa_full and shape.window else None


def cache_on_host(shape: ModelShape, options: LlamaOptions) -> Change | None:
    """The KV cache and recurrent state in host memory."""
    cached = any(layer.k_row or layer.recurrent for layer in shape.layers)
    if not options.devices or not options.kv_offload or not cached or options.n_gpu_layers == 0:
        return None
    return change("kv-offload", "on", "off", kv_offload=False)


def projector_on_host(options: LlamaOptions, shape: ModelShape) -> Change | None:
    """The projector on the CPU."""
    if not (options.mmproj or shape.projectors) or not options.mmproj_offload or not options.devices:
        return None
    return change("mmproj-offload", "on", "off", mmproj_offload=False)


def no_draft(options: LlamaOptions) -> Change | None:
    """No speculative decoding."""
    if options.draft is None:
        return None
    return change("spec-type", options.draft.kind, "none", draft=None)


def draft_cache(options: LlamaOptions) -> Change | None:
    """An eight-bit cache for what drafts."""
    if options.draft is None or {options.draft.cache_type_k, options.draft.cache_type_v} != {"f16"}:
        return None
    smaller: Draft = msgspec.structs.replace(options.draft, cache_type_k="q8_0", cache_type_v="q8_0")
    return change("cache-type-k-draft, cache-type-v-draft", "f16", "q8_0", draft=smaller)


def one_copy(options: LlamaOptions) -> Change | None:
    """One copy of the inputs in place of four: no pipeline of batches through several devices."""
    if len(options.devices) < 2 or options.split_mode != "layer" or options.override_tensor:
        return None
    return change("override-tensor", "none", "=".join(NO_TENSOR), override_tensor=(NO_TENSOR,))


def every_card(options: LlamaOptions) -> Change | None:
    """All cards in place of one of several."""
    if options.split_mode != "none" or len(options.devices) < 2:
        return None
    return change("split-mode", "none", "layer", split_mode="layer")


def shares(shape: ModelShape, options: LlamaOptions, device: str, fits: Fits) -> Change | None:
    """Fewer layers on ``device``, and more on the other cards: the fewest moved that are enough, where any are.

    The share of each card is its number of layers, the output counted as one.
    """
    if len(options.devices) < 2 or options.split_mode not in ("layer", "row"):
        return None
    labels = [one.label for one in options.devices]
    where = placement.place(shape, options)
    homes = [*where.layers, where.output]
    counts = [homes.count(label) for label in labels]
    if device not in labels or counts[labels.index(device)] < 2:
        return None
    place = labels.index(device)

    def moved(number: int) -> tuple[float, ...]:
        after = list(counts)
        for _ in range(number):
            after[place] -= 1
            least = min((index for index in range(len(after)) if index != place), key=lambda index: after[index])
            after[least] += 1
        return tuple(map(float, after))

    def enough(number: int) -> bool:
        return fits(shape, msgspec.structs.replace(options, tensor_split=moved(number)))

    # One by one: with too many moved, the others are too small.
    number = next((count for count in range(1, counts[place]) if holds(functools.partial(enough, count))), None)
    if number is None:
        return None
    before, after = (",".join(f"{share:g}" for share in one) for one in (options.tensor_split or counts, moved(number)))
    return change("tensor-split", before, after, tensor_split=moved(number))


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
