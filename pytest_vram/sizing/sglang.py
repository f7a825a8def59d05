"""What a model takes under SGLang: weights per card, the cache's bytes per token, and how many tokens fit.

SGLang takes a share of each card for weights and cache together (``mem_fraction_static``) and leaves the rest to
activations and CUDA graphs. Rules from SGLang's ``model_runner.py`` and ``memory_pool.py``; checked against figures
that SGLang printed in public reports, not on a card here.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from pytest_vram.errors import BadInput
from pytest_vram.ledger import Entry
from pytest_vram.sizing import moe, serving, textbook
from pytest_vram.sizing.prediction import Estimate
from pytest_vram.sizing.shape import Layer, ModelShape, Note

ENGINE = "sglang"
#: Tokens in the sliding-window pool for each token in the full pool.
WINDOW_RATIO = 0.8
#: Bytes of recurrent states for each byte of cache, where their number is not given.
MAMBA_RATIO = 0.9
_MIB = 1 << 20
_WIDTHS = {"fp8_e5m2": 1, "fp8_e4m3": 1, "bfloat16": 2, "bf16": 2}

Count = Annotated[int, msgspec.Meta(ge=1, le=1 << 40)]


class Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """SGLang's own options that decide memory, and what must be known of the cards.

    :ivar context_length: tokens of one request; 0: the trained context. :ivar mem_fraction_static: share of a card for
        weights and cache; ``None``: SGLang chooses by the card. :ivar max_total_tokens: tokens of the cache, which
        overrides what the share leaves where it is less. :ivar max_mamba_cache_size: recurrent states kept.
    :ivar device_memory: bytes of one card.
    """

    tp_size: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 1
    pp_size: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 1
    context_length: Annotated[int, msgspec.Meta(ge=0, le=1 << 40)] = 0
    mem_fraction_static: Annotated[float, msgspec.Meta(gt=0, lt=1)] | None = None
    max_total_tokens: Count | None = None
    max_running_requests: Count | None = None
    max_mamba_cache_size: Count | None = None
    page_size: Annotated[int, msgspec.Meta(ge=1, le=4096)] = 1
    kv_cache_dtype: Literal["auto", "fp8_e5m2", "fp8_e4m3", "bfloat16", "bf16"] = "auto"
    mamba_full_memory_ratio: Annotated[float, msgspec.Meta(gt=0)] = MAMBA_RATIO
    swa_full_tokens_ratio: Annotated[float, msgspec.Meta(gt=0, le=1)] = WINDOW_RATIO
    disable_hybrid_swa_memory: bool = False
    dtype: Literal["auto", "half", "float16", "bfloat16", "float", "float32"] = "auto"
    device_memory: Annotated[int, msgspec.Meta(ge=1, le=serving.LARGEST)] | None = None


def cache_element(kv_cache_dtype: str, element: int) -> int:
    """Bytes of one element of the cache; ``auto`` is the model's own format."""
    return _WIDTHS.get(kv_cache_dtype, element)


def token_bytes(
    shape: ModelShape, layer: Layer, tp_size: int, element: int, kv_cache_dtype: str = "auto"
) -> tuple[int, int]:
    """Bytes of K and of V that one token takes in one block of the model on one card.

    K and V heads are divided over the cards, at least one on each (``get_num_kv_heads``); the latent of MLA is stored
    once, whole on each (``MLATokenToKVPool``), with an indexer's keys in 8 bits and a scale per 128 beside it.
    """
    if not layer.k_row:
        return 0, 0
    if shape.mla is not None:
        if layer.indexer_row and kv_cache_dtype == "fp8_e4m3":
            # Sparse attention packs latent, scales and the unquantised rotary part (``calculate_mla_kv_cache_dim``).
            row = shape.mla.kv_rank + 4 * (shape.mla.kv_rank // 128) + 2 * shape.mla.rope
            return row + layer.indexer_row + 4 * (layer.indexer_row // 128), 0
        indexer = layer.indexer_row + 4 * -(-layer.indexer_row // 128) if layer.indexer_row else 0
        return layer.k_row * element + indexer, 0
    heads = max(1, layer.kv_heads // tp_size)
    return heads * layer.key_length * element, heads * layer.value_length * element


class Pool(msgspec.Struct, frozen=True, kw_only=True):
    """The cache of one card, in bytes per token of the full pool.

    :ivar k: of K. :ivar v: of V. :ivar page: tokens in a page; one page more is taken, for padding.
    """

    k: int
    v: int
    page: int

    def size(self, tokens: int) -> int:
        """Bytes of a cache of ``tokens`` tokens, its padding page included."""
        return (tokens + self.page) * (self.k + self.v) if tokens else 0

    def tokens(self, memory: int) -> int:
        """Tokens in ``memory`` bytes, whole pages (``profile_max_num_token``)."""
        each = self.k + self.v
        return max(memory, 0) // each // self.page * self.page if each else 0


def pool(shape: ModelShape, given: Options, layers: tuple[Layer, ...]) -> Pool:
    """The cache of one card for these blocks; window blocks get their share of the tokens.

    With windows in some blocks only, SGLang makes two pools: the window pool has ``swa_full_tokens_ratio`` tokens for
    each of the full pool (``SWATokenToKVPoolAllocator``).
    """
    element = cache_element(given.kv_cache_dtype, serving.loaded_element(shape, given.dtype))
    mixed = len({layer.window > 0 for layer in layers if layer.k_row}) > 1
    k = v = 0.0
    for layer in layers:
        weight = given.swa_full_tokens_ratio if layer.window and mixed and not given.disable_hybrid_swa_memory else 1.0
        one, two = token_bytes(shape, layer, given.tp_size, element, given.kv_cache_dtype)
        k, v = k + weight * one, v + weight * two
    return Pool(k=round(k), v=round(v), page=given.page_size)


def stages(layers: int, count: int) -> tuple[int, ...]:
    """Blocks of each pipeline stage (``get_pp_indices``, as in vLLM)."""
    if count > layers:
        raise BadInput(f"sglang's pp_size {count} is more than the model's {layers} blocks.")
    parts = [layers // count] * count
    for index in range(2, layers % count + 2):
        parts[-index] += 1
    return tuple(parts)


def predict(shape: ModelShape, **options: object) -> Estimate:
    """Weights and cache on every card.

    With ``max_total_tokens`` the cache is that (less where the share does not hold it). With ``mem_fraction_static``
    and ``device_memory`` it is a range from one request of full length to what the share leaves beside the weights.
    Otherwise one request of full length is counted, and a note says that SGLang will take its share.

    :raises BadInput: an option that is not known, or a combination that SGLang refuses.
    """
    given = serving.read_options(ENGINE, options, Options)
    for layer in shape.layers:
        if layer.heads % given.tp_size:
            raise BadInput(f"sglang cannot divide {layer.heads} attention heads over tp_size {given.tp_size}.")
    element = serving.loaded_element(shape, given.dtype)
    length = given.context_length or shape.context
    if not length and not shape.encoder:
        raise BadInput(f"{shape.source} states no trained context: give context_length.")
    notes = [*shape.notes, *_notes(shape, given, length)]
    parts = stages(len(shape.layers), given.pp_size)
    entries = serving.weight_entries(shape, serving.Split(tensor=given.tp_size, stages=parts), element)
    first = 0
    for stage, count in enumerate(parts):
        layers = shape.layers[first : first + count]
        first += count
        here = pool(shape, given, layers)
        for rank in range(given.tp_size):
            label = f"gpu{stage * given.tp_size + rank}"
            loaded = sum(entry.bytes for entry in entries if entry.device == label)
            entries.extend(_cache(here, given, layers, label, length, loaded, element, notes))
    facts = moe.facts(shape)
    settled = tuple(entry for entry in entries if entry.bytes or entry.at_most)
    return Estimate(
        engine=ENGINE,
        model=facts,
        entries=settled,
        devices={entry.device: "a CUDA card" for entry in settled},
        settings={**msgspec.structs.asdict(given), "context_length": length},
        notes=tuple(dict.fromkeys(notes)),
        command=command(shape, options),
        unknown=serving.unknown(notes),
        textbook_kv=textbook.kv(shape, length, cache_element(given.kv_cache_dtype, element)),
        pressure=moe.pressure(facts, settled),
    )


def _cache(
    here: Pool,
    given: Options,
    layers: tuple[Layer, ...],
    label: str,
    length: int,
    loaded: int,
    element: int,
    notes: list[Note],
) -> list[Entry]:
    """The cache and the recurrent states of one card (``profile_max_num_token``, ``handle_max_mamba_cache``).

    What is left beside the weights also holds the CUDA context, which is not known: tokens are then at most these.
    """
    state = sum(layer.state_r * element + layer.state_s * 4 for layer in layers) // given.tp_size
    left: int | None = None
    if given.mem_fraction_static is not None and given.device_memory is not None:
        left = max(int(given.device_memory * given.mem_fraction_static) - loaded, 0)
    entries: list[Entry] = []
    if state:
        count, most = given.max_mamba_cache_size or 0, None
        if not count and left is not None:
            ratio = given.mamba_full_memory_ratio
            most = int(left * ratio / (1 + ratio)) // state
        kept = (count if most is None else most) * state
        left = None if left is None else max(left - kept, 0)
        if kept:
            entries.append(
                Entry(
                    bucket="recurrent",
                    device=label,
                    bytes=kept if most is None else 0,
                    at_most=None if most is None else kept,
                    source="estimate",
                    detail=f"{count or most} states",
                )
            )
    if not here.k + here.v:
        return entries
    tokens, at_most = given.max_total_tokens or length, None
    if left is not None:
        most_tokens = here.tokens(left)
        if most_tokens < length:
            notes.append(
                Note(
                    kind="warning",
                    bucket="kv",
                    text=f"on {label} at most {most_tokens} tokens are left for the cache, fewer than one request of "
                    f"{length}: raise mem_fraction_static or shorten context_length.",
                )
            )
        if given.max_total_tokens is None or given.max_total_tokens > most_tokens:
            tokens, at_most = min(length, most_tokens), here.size(most_tokens)
            detail = f"at most {most_tokens} tokens"
        else:
            detail = f"{tokens} tokens"
    else:
        detail = f"{tokens} tokens"
    size = here.size(tokens)
    entries.append(Entry(bucket="kv", device=label, bytes=size, at_most=at_most, source="estimate", detail=detail))
    return entries


def _notes(shape: ModelShape, given: Options, length: int) -> list[Note]:
    notes = [
        Note(
            kind="unknown",
            bucket="compute",
            text="activations and CUDA graphs use what mem_fraction_static leaves; files do not tell how much.",
        ),
        Note(kind="unknown", bucket="context", text="the CUDA context, NCCL and kernels depend on card and packages."),
    ]
    if given.max_running_requests is not None and length:
        table = given.max_running_requests * length * 4
        text = (
            f"a table of the tokens of {given.max_running_requests} requests (max_running_requests) is not in the sum: "
            f"about {table / _MIB:,.0f} MiB."
        )
        notes.append(Note(kind="unknown", bucket="other", text=text))
    if shape.context and length > shape.context:
        text = f"a context_length of {length} tokens is longer than the trained {shape.context}: sglang "
        text += "refuses it, or warns, by its version and SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN."
        notes.append(Note(kind="warning", bucket="kv", text=text))
    if not given.context_length and not shape.encoder:
        text = f"context_length is not given: the trained {length} tokens count."
        notes.append(Note(kind="assumed", bucket="kv", text=text))
    if given.max_total_tokens is None and (given.mem_fraction_static is None or given.device_memory is None):
        text = (
            "sglang fills its share of each card with cache (by default chosen by the card); counted here is one "
            "request of full length: give mem_fraction_static and device_memory, or max_total_tokens."
        )
        notes.append(Note(kind="rule", bucket="kv", text=text))
    if (
        any(layer.recurrent for layer in shape.layers)
        and given.max_mamba_cache_size is None
        and not (given.mem_fraction_static and given.device_memory)
    ):
        text = "how many recurrent states sglang keeps is decided at start: give max_mamba_cache_size."
        notes.append(Note(kind="unknown", bucket="recurrent", text=text))
    if shape.mla is not None and given.tp_size > 1:
        text = "latent attention is not divided: every card of the group keeps the whole cache of its tokens."
        notes.append(Note(kind="rule", bucket="kv", text=text))
    return notes


def command(shape: ModelShape, options: dict[str, object]) -> tuple[str, ...]:
    """SGLang's command line for the options that were given."""
    line = ["python", "-m", "sglang.launch_server", "--model-path", shape.source]
    for written, value in options.items():
        name = written.lstrip("-").replace("-", "_")
        if name == "device_memory" or value is None or value is False:
            continue
        line.append("--" + name.replace("_", "-"))
        if value is not True:
            line.append(str(value))
    return tuple(line)
