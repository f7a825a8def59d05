"""What a model takes under vLLM: weights per card, the cache's bytes per token, and how many blocks fit.

vLLM takes a share of each card (``gpu_memory_utilization``) and fills it with cache, so the question is not what it
needs but how many tokens are left. Rules from vLLM's ``kv_cache_interface.py`` and ``kv_cache_utils.py`` (V1, releases
0.21 to 0.33); checked against figures that vLLM printed in public reports, not on a card here.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from pytest_vram.errors import BadInput
from pytest_vram.ledger import Entry
from pytest_vram.sizing import moe, serving, textbook
from pytest_vram.sizing.prediction import Estimate
from pytest_vram.sizing.shape import Layer, ModelShape, Note

ENGINE = "vllm"
#: Share of a card that vLLM takes by default (0.33; 0.9 before).
UTILIZATION = 0.92
BLOCK = 16
#: Tokens that one step computes at most, where neither the user nor a large card says otherwise.
BATCHED_TOKENS = 2048
# Elements by which an attention block grows until its page holds a recurrent state (hybrid models).
_ALIGNMENT = 16
_MIB, _GIB = 1 << 20, 1 << 30

Count = Annotated[int, msgspec.Meta(ge=1, le=1 << 40)]
CacheType = Literal[
    "auto",
    "float16",
    "bfloat16",
    "fp8",
    "fp8_e4m3",
    "fp8_e5m2",
    "fp8_inc",
    "fp8_ds_mla",
    "int8_per_token_head",
    "fp8_per_token_head",
    "nvfp4",
]


class Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """vLLM's own options that decide memory, and what must be known of the cards.

    :ivar max_model_len: tokens of one request; 0: the trained context. :ivar kv_cache_memory_bytes: cache on each
        card, which overrides the share. :ivar num_gpu_blocks_override: blocks, which override both.
    :ivar mamba_cache_dtype: of convolution states. :ivar mamba_ssm_cache_dtype: of recurrent states.
    :ivar pp_layer_partition: blocks of each stage, as ``VLLM_PP_LAYER_PARTITION`` writes them (``16,32``).
    :ivar device_memory: bytes of one card. :ivar device_free: of which are free before vLLM starts.
    :ivar activation_memory: bytes that profiling found, per card. :ivar allow_long_max_model_len: as the environment
        variable ``VLLM_ALLOW_LONG_MAX_MODEL_LEN=1``: a request may be longer than the trained context.
    """

    tensor_parallel_size: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 1
    pipeline_parallel_size: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 1
    pp_layer_partition: str = ""
    max_model_len: Annotated[int, msgspec.Meta(ge=0, le=1 << 40)] = 0
    max_num_seqs: Count = 256
    max_num_batched_tokens: Count = BATCHED_TOKENS
    gpu_memory_utilization: Annotated[float, msgspec.Meta(gt=0, le=1)] = UTILIZATION
    kv_cache_memory_bytes: Annotated[int, msgspec.Meta(ge=1, le=serving.LARGEST)] | None = None
    num_gpu_blocks_override: Count | None = None
    kv_cache_dtype: CacheType = "auto"
    block_size: Annotated[int, msgspec.Meta(ge=1, le=4096)] = BLOCK
    dtype: Literal["auto", "half", "float16", "bfloat16", "float", "float32"] = "auto"
    disable_hybrid_kv_cache_manager: bool = False
    enable_prefix_caching: bool = True
    mamba_cache_dtype: Literal["auto", "float32", "float16"] = "auto"
    mamba_ssm_cache_dtype: Literal["auto", "float32", "float16"] = "auto"
    enforce_eager: bool = False
    device_memory: Annotated[int, msgspec.Meta(ge=1, le=serving.LARGEST)] | None = None
    device_free: Annotated[int, msgspec.Meta(ge=0, le=serving.LARGEST)] | None = None
    allow_long_max_model_len: bool = False
    activation_memory: Annotated[int, msgspec.Meta(ge=0, le=serving.LARGEST)] | None = None


class Spec(msgspec.Struct, frozen=True, kw_only=True):
    """How one block of the model keeps its tokens.

    :ivar kind: ``full``, ``window``, ``chunked`` or ``state``. :ivar page: bytes of one cache block. :ivar tokens: in
        one cache block. :ivar reach: window or chunk in tokens.
    """

    kind: Literal["full", "window", "chunked", "state"]
    page: int
    tokens: int
    reach: int = 0

    def blocks(self, length: int, batched: int) -> int:
        """Cache blocks that one request of ``length`` tokens needs at most (``max_memory_usage_bytes``).

        A window needs its last ``window − 1`` tokens, the tokens of one step and a block more, because a window
        need not begin at a block's edge. A recurrent state is one block.
        """
        if self.kind == "state":
            return 1
        if self.kind == "window":
            return -(-min(self.reach - 1 + batched, length) // self.tokens) + 1
        if self.kind == "chunked":
            return -(-min(self.reach + batched, length) // self.tokens)
        return -(-length // self.tokens)


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks of the model that share a table of cache blocks. :ivar layers: how many, padding left out."""

    spec: Spec
    layers: int


class Pool(msgspec.Struct, frozen=True, kw_only=True):
    """The cache of one card.

    :ivar groups: tables of cache blocks. :ivar block_bytes: what one more cache block takes, over all layers.
    """

    groups: tuple[Group, ...]
    block_bytes: int

    def blocks(self, memory: int) -> int:
        """Whole cache blocks in ``memory`` bytes (``get_num_blocks``)."""
        return max(memory, 0) // self.block_bytes if self.block_bytes else 0

    def needed(self, length: int, batched: int = BATCHED_TOKENS) -> int:
        """Bytes that one request of ``length`` tokens needs: what vLLM demands before it starts."""
        return self.block_bytes * sum(group.spec.blocks(length, batched) for group in self.groups)

    def tokens(self, memory: int) -> int:
        """Tokens that vLLM prints as ``GPU KV cache size``."""
        if not self.groups:
            return 0
        return self.blocks(memory) // len(self.groups) * min(group.spec.tokens for group in self.groups)

    def longest(self, memory: int, most: int, batched: int = BATCHED_TOKENS) -> int:
        """The longest request that fits, as vLLM's message estimates it; 0 where none does."""
        low, high = 0, most
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.needed(middle, batched) <= memory else (low, middle - 1)
        return low

    def concurrency(self, memory: int, length: int, batched: int = BATCHED_TOKENS) -> float:
        """Requests of ``length`` tokens at once (``Maximum concurrency``)."""
        needed = sum(group.spec.blocks(length, batched) for group in self.groups)
        return self.blocks(memory) / needed if needed else 0.0


def cache_element(shape: ModelShape, kv_cache_dtype: str, element: int) -> int:
    """Bytes of one element of the cache; ``auto`` is the model's own format."""
    if kv_cache_dtype.startswith(("fp8", "int8", "nvfp4")):
        return 1
    return 2 if kv_cache_dtype in ("float16", "bfloat16") else element


def token_bytes(shape: ModelShape, layer: Layer, tensor_parallel: int, kv_cache_dtype: str, element: int) -> int:
    """Bytes that one token takes in one block of the model on one card.

    K and V heads are divided over the tensor-parallel cards, at least one on each (``get_num_kv_heads``); the latent
    of MLA is not divided (``MLAAttentionSpec`` has one head). An indexer's cache is one byte per element and a
    four-byte scale per 128 of them, on every card (DeepSeek-V3.2). Caches scaled per token and head add two f32;
    NVFP4 packs two elements in a byte and adds a byte per 16. ``fp8_ds_mla`` takes 656 bytes.
    """
    if not layer.k_row:
        return 0
    width = cache_element(shape, kv_cache_dtype, element)
    indexer = layer.indexer_row + 4 * -(-layer.indexer_row // 128) if layer.indexer_row else 0
    if shape.mla is not None:
        return (656 if kv_cache_dtype == "fp8_ds_mla" else layer.k_row * width) + indexer
    heads = max(1, layer.kv_heads // tensor_parallel)
    sizes = (layer.key_length, layer.value_length)
    if kv_cache_dtype == "nvfp4":
        return heads * sum(size // 2 + size // 16 for size in sizes) + indexer
    scales = 8 if kv_cache_dtype.endswith("per_token_head") else 0
    return heads * (sum(sizes) * width + scales) + indexer


def state_page(shape: ModelShape, layer: Layer, tensor_parallel: int, convolution: int, state: int) -> int:
    """Bytes of a recurrent block's state on one card (``MambaStateShapeCalculator``: both parts are divided)."""
    return (layer.state_r * convolution + layer.state_s * state) // tensor_parallel


def pool(shape: ModelShape, options: Options, layers: tuple[Layer, ...] | None = None) -> Pool:
    """The cache of one card for these blocks (all of them, or a pipeline stage's).

    One kind of block makes one group. Several kinds are put in groups of as many layers as the rarest kind has (of
    the commonest, where that is not 1.5 times as many), padded; all share pages of one size, so where heads differ the
    smaller page holds more tokens (``_get_kv_cache_groups_uniform_page_size``). With recurrent blocks the cache block
    grows until its page holds a state: 544 tokens for Qwen3-Next.
    """
    element = serving.loaded_element(shape, options.dtype)
    specs = _specs(shape, options, shape.layers if layers is None else layers, element)
    if not specs:
        return Pool(groups=(), block_bytes=0)
    kinds = {(spec.kind, spec.reach) for spec in specs}
    if len(kinds) == 1:
        # Pages may differ; each layer has its own, and one table serves all.
        first = min(specs, key=lambda spec: spec.tokens)
        return Pool(groups=(Group(spec=first, layers=len(specs)),), block_bytes=sum(spec.page for spec in specs))
    specs = _one_page(specs)
    counts: dict[Spec, int] = {}
    for spec in specs:
        counts[spec] = counts.get(spec, 0) + 1
    rarest, commonest = min(counts.values()), max(counts.values())
    size = commonest if commonest < rarest * 1.5 else rarest
    groups: list[Group] = []
    for spec, count in counts.items():
        number = -(-count // size)
        groups.extend(Group(spec=spec, layers=-(-(count - index) // number)) for index in range(number))
    widest = max(group.layers for group in groups)
    return Pool(groups=tuple(groups), block_bytes=widest * specs[0].page)


def _specs(shape: ModelShape, options: Options, layers: tuple[Layer, ...], element: int) -> list[Spec]:
    parallel, tokens = options.tensor_parallel_size, options.block_size
    per_token = [token_bytes(shape, layer, parallel, options.kv_cache_dtype, element) for layer in layers]
    states = [_state(shape, options, layer, element) for layer in layers]
    attention = min((size for size in per_token if size), default=0)
    if any(states) and attention:
        # The attention page must hold the largest state.
        tokens = max(tokens, _ALIGNMENT * -(-max(states) // (_ALIGNMENT * attention)))
    page_of_state = attention * tokens if attention else 0
    specs: list[Spec] = []
    for layer, size, state in zip(layers, per_token, states, strict=True):
        if size:
            kind: Literal["full", "window", "chunked"] = "full"
            if layer.window and not (options.disable_hybrid_kv_cache_manager and _mixed(layers)):
                kind = "chunked" if "llama4" in str(shape.meta.get("model_type", "")) else "window"
            reach = layer.window if kind != "full" else 0
            specs.append(Spec(kind=kind, page=size * tokens, tokens=tokens, reach=reach))
        if state:
            specs.append(Spec(kind="state", page=max(state, page_of_state), tokens=tokens))
    return specs


def _mixed(layers: tuple[Layer, ...]) -> bool:
    return len({layer.window for layer in layers if layer.k_row}) > 1


def _state(shape: ModelShape, options: Options, layer: Layer, element: int) -> int:
    if not layer.recurrent:
        return 0
    widths = {"auto": element, "float32": 4, "float16": 2}
    state = widths[options.mamba_ssm_cache_dtype]
    if options.mamba_ssm_cache_dtype == "auto" and shape.meta.get("state_dtype") == "float32":
        state = 4
    return state_page(shape, layer, options.tensor_parallel_size, widths[options.mamba_cache_dtype], state)


def _one_page(specs: list[Spec]) -> list[Spec]:
    """All specs with pages of one size, by more tokens in a block where they were smaller.

    :raises BadInput: sizes that do not divide each other, which vLLM refuses as well.
    """
    largest = max(spec.page for spec in specs)
    result: list[Spec] = []
    for spec in specs:
        if largest % spec.page and spec.kind != "state":
            raise BadInput(
                f"vllm cannot bring pages of {spec.page} and {largest} bytes to one size for this model; it refuses to "
                "start, unless disable_hybrid_kv_cache_manager is on."
            )
        ratio = largest // spec.page if spec.kind != "state" else 1
        result.append(msgspec.structs.replace(spec, page=largest, tokens=spec.tokens * ratio))
    return result


def stages(layers: int, options: Options) -> tuple[int, ...]:
    """Blocks of each pipeline stage (``get_pp_indices``: what is left over goes to the stages before the last)."""
    count = options.pipeline_parallel_size
    if options.pp_layer_partition:
        words = options.pp_layer_partition.replace("[", "").replace("]", "").split(",")
        if not all(word.strip().isdecimal() for word in words):
            raise BadInput(f"vllm's pp_layer_partition cannot be {options.pp_layer_partition!r}: write 16,32.")
        given = tuple(int(word) for word in words)
        if len(given) != count or sum(given) != layers:
            raise BadInput(
                f"vllm's pp_layer_partition {options.pp_layer_partition!r} must name {count} stages that add up to "
                f"{layers} blocks."
            )
        return given
    if count > layers:
        raise BadInput(f"vllm's pipeline_parallel_size {count} is more than the model's {layers} blocks.")
    parts = [layers // count] * count
    for index in range(2, layers % count + 2):
        parts[-index] += 1
    return tuple(parts)


def available(memory: int, utilization: float, weights: int, others: int = 0) -> int:
    """Bytes left for cache: the share of the card minus weights, profiled activations and what is not torch's."""
    return int(memory * utilization) - weights - others


def startup_check(memory: int, free: int, utilization: float) -> tuple[bool, float]:
    """Whether vLLM starts at all on a card with ``free`` bytes, and the largest share at which it would.

    It refuses before anything is loaded when less than its share is free (``request_memory``).
    """
    return free >= memory * utilization, free / memory


def predict(shape: ModelShape, **options: object) -> Estimate:
    """Weights and cache on every card.

    With ``kv_cache_memory_bytes`` or ``num_gpu_blocks_override`` the cache is exact. With ``device_memory`` it is a
    range from what one request of full length needs to all that the share leaves. Otherwise the least that vLLM needs
    to start is counted, and a note says that it will take its share of the card.

    :raises BadInput: an option that is not known, or a combination that vLLM refuses.
    """
    given = serving.read_options(ENGINE, options, Options)
    _refuse(shape, given)
    notes = [*shape.notes, *_length(shape, given), *_start(given)]
    element = serving.loaded_element(shape, given.dtype)
    length = given.max_model_len or shape.context
    if not length and not shape.encoder:
        raise BadInput(f"{shape.source} states no trained context: give max_model_len.")
    if not given.max_model_len and not shape.encoder:
        notes.append(
            Note(kind="assumed", bucket="kv", text=f"max_model_len is not given: the trained {length} tokens count.")
        )
    parts = stages(len(shape.layers), given)
    split = serving.Split(tensor=given.tensor_parallel_size, stages=parts)
    entries = serving.weight_entries(shape, split, element)
    first = 0
    for stage, count in enumerate(parts):
        here = pool(shape, given, shape.layers[first : first + count])
        first += count
        for rank in range(given.tensor_parallel_size):
            label = f"gpu{stage * given.tensor_parallel_size + rank}"
            loaded = sum(entry.bytes for entry in entries if entry.device == label)
            entries.extend(_cache(here, given, label, length, loaded, notes))
    notes.extend(_notes(shape, given))
    facts = moe.facts(shape)
    settled = tuple(entry for entry in entries if entry.bytes or entry.at_most)
    return Estimate(
        engine=ENGINE,
        model=facts,
        entries=settled,
        devices={entry.device: "a CUDA card" for entry in settled},
        settings={**msgspec.structs.asdict(given), "max_model_len": length},
        notes=tuple(dict.fromkeys(notes)),
        command=command(shape, options),
        unknown=serving.unknown(notes),
        textbook_kv=textbook.kv(shape, length, cache_element(shape, given.kv_cache_dtype, element)),
        pressure=moe.pressure(facts, settled),
    )


def trained_length(shape: ModelShape) -> int:
    """Tokens that vLLM takes a model to be trained for (``_get_and_verify_max_len``): stretched by its rotary scaling,
    where that is not part of the configured length already."""
    factor = shape.meta.get("rope_factor", 1.0)
    base = shape.meta.get("rope_original", shape.context)
    return int(float(base) * float(factor))


def _length(shape: ModelShape, given: Options) -> list[Note]:
    """A request longer than the trained context, which vLLM refuses unless that is allowed.

    :raises BadInput: where it is not allowed.
    """
    trained = trained_length(shape)
    if not trained or given.max_model_len <= trained:
        return []
    if not given.allow_long_max_model_len:
        raise BadInput(
            f"vllm refuses max_model_len {given.max_model_len} for a model that was trained for {trained} tokens: "
            f"write at most {trained}, or allow_long_max_model_len (VLLM_ALLOW_LONG_MAX_MODEL_LEN=1 for vLLM itself)."
        )
    text = (
        f"max_model_len {given.max_model_len} is longer than the trained {trained} tokens: vllm starts only with "
        "VLLM_ALLOW_LONG_MAX_MODEL_LEN=1 in its environment."
    )
    return [Note(kind="warning", bucket="kv", text=text)]


def _start(given: Options) -> list[Note]:
    """Whether vLLM starts at all, where what is free is known."""
    if given.device_free is None:
        return []
    if given.device_memory is None or given.device_free > given.device_memory:
        raise BadInput("vllm's device_free is a part of device_memory: give that too, and at least as much.")
    starts, share = startup_check(given.device_memory, given.device_free, given.gpu_memory_utilization)
    if starts:
        return []
    text = (
        f"vllm will refuse to start: {_gib(given.device_free)} are free, less than {given.gpu_memory_utilization:g} of "
        f"the card's {_gib(given.device_memory)}; gpu_memory_utilization up to {int(share * 100) / 100:g} would do."
    )
    return [Note(kind="warning", text=text)]


def _refuse(shape: ModelShape, given: Options) -> None:
    """What vLLM itself refuses (``ModelConfig.verify_with_parallel_config``)."""
    parallel = given.tensor_parallel_size
    for layer in shape.layers:
        if layer.heads % parallel:
            raise BadInput(
                f"vllm cannot divide {layer.heads} attention heads over tensor_parallel_size {parallel}: choose a "
                "number that divides them."
            )
        if shape.mla is None and layer.kv_heads and layer.kv_heads % parallel and parallel % layer.kv_heads:
            raise BadInput(
                f"vllm cannot divide {layer.kv_heads} KV heads over tensor_parallel_size {parallel}: one must divide "
                "the other."
            )


def _cache(here: Pool, given: Options, label: str, length: int, loaded: int, notes: list[Note]) -> list[Entry]:
    """The cache of one card, and whether its demand can be met."""
    if not here.block_bytes:
        return []
    batched = given.max_num_batched_tokens
    needed = here.needed(length, batched)
    at_most: int | None = None
    if given.num_gpu_blocks_override is not None:
        size = given.num_gpu_blocks_override * here.block_bytes
        detail = f"{given.num_gpu_blocks_override} blocks"
    elif given.kv_cache_memory_bytes is not None:
        size = here.blocks(given.kv_cache_memory_bytes) * here.block_bytes
        detail = f"{here.blocks(size)} blocks, {here.tokens(size)} tokens"
    elif given.device_memory is not None:
        others = given.activation_memory or 0
        left = available(given.device_memory, given.gpu_memory_utilization, loaded, others)
        whole = here.blocks(left) * here.block_bytes
        size, at_most = (whole, None) if given.activation_memory is not None else (min(needed, whole), whole)
        detail = f"{'' if at_most is None else 'at most '}{here.blocks(whole)} blocks, {here.tokens(whole)} tokens"
        size = max(size, 0)
    else:
        size, detail = needed, f"one request of {length} tokens"
    limit = size if at_most is None else at_most
    if limit < needed:
        longest = here.longest(limit, length, batched)
        notes.append(
            Note(
                kind="warning",
                bucket="kv",
                text=f"vllm will refuse to start on {label}: a request of {length} tokens needs {_gib(needed)} of "
                f"cache and {_gib(limit)} are left; max_model_len up to {longest} fits.",
            )
        )
    elif size != needed or at_most is not None:
        at_once = here.concurrency(limit, length, batched)
        text = f"{'at most ' if at_most else ''}{at_once:.2f} requests of {length} tokens have room at once on {label}"
        text += f", of max_num_seqs {given.max_num_seqs}." if at_once < given.max_num_seqs else "."
        notes.append(Note(kind="rule", bucket="kv", text=text))
    return [Entry(bucket="kv", device=label, bytes=size, at_most=at_most, source="estimate", detail=detail)]


def _notes(shape: ModelShape, given: Options) -> list[Note]:
    fixed = given.kv_cache_memory_bytes is not None or given.num_gpu_blocks_override is not None
    notes: list[Note] = []
    if given.activation_memory is None:
        graphs = "" if given.enforce_eager else " and CUDA graphs (counted by vLLM since 0.21)"
        text = f"activations{graphs} are profiled when vLLM starts; files do not tell."
        notes.append(Note(kind="unknown", bucket="compute", text=text))
    notes.append(
        Note(kind="unknown", bucket="context", text="the CUDA context, NCCL and kernels depend on card and packages.")
    )
    if not fixed:
        share = f"vllm takes {given.gpu_memory_utilization:g} of each card and fills it with cache"
        text = (
            f"{share}; kv_cache_memory_bytes sets the cache instead."
            if given.device_memory is not None
            else f"{share}; counted here is the least that it needs to start: one request of full length."
        )
        notes.append(Note(kind="rule", bucket="kv", text=text))
    if any(layer.window for layer in shape.layers) and given.max_num_batched_tokens == BATCHED_TOKENS:
        text = f"max_num_batched_tokens {BATCHED_TOKENS} is assumed; vllm takes 8192 and more on large cards."
        notes.append(Note(kind="assumed", bucket="kv", text=text))
    if any(layer.recurrent for layer in shape.layers):
        text = (
            "recurrent states live in the cache's blocks, one for each running request (two with prefix caching); they "
            "are part of kv here."
        )
        notes.append(Note(kind="rule", bucket="kv", text=text))
    if shape.mla is not None and given.tensor_parallel_size > 1:
        text = "latent attention is not divided: every card of the group keeps the whole cache of its tokens."
        notes.append(Note(kind="rule", bucket="kv", text=text))
    if shape.quantization and shape.format == "safetensors":
        text = (
            "packed weights are counted as in the files; vllm may repack them for its kernels at about the same size."
        )
        notes.append(Note(kind="rule", bucket="weights", text=text))
    return notes


def command(shape: ModelShape, options: dict[str, object]) -> tuple[str, ...]:
    """vLLM's command line for the options that were given; what is only told to the estimate stays out."""
    own = {"device_memory", "device_free", "activation_memory", "pp_layer_partition", "allow_long_max_model_len"}
    line = ["vllm", "serve", shape.source]
    for written, value in options.items():
        name = written.lstrip("-").replace("-", "_")
        if name in own or value is None:
            continue
        if value is False:
            if getattr(Options(), name, False) is True:
                line.append("--no-" + name.replace("_", "-"))
            continue
        line.append("--" + name.replace("_", "-"))
        if value is not True:
            line.append(str(value))
    return tuple(line)


def _gib(count: int) -> str:
    return f"{count / _GIB:.2f} GiB"
