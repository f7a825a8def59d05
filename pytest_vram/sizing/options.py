"""llama.cpp's settings that decide memory, under the engine's own long names with underscores.

Validation of what a user wrote (from the command line, a spec file or Python) is in
:mod:`~pytest_vram.sizing.llama_options`; this is the frozen result that every rule reads.
"""

from __future__ import annotations

from typing import Literal

import msgspec

DeviceKind = Literal["cuda", "rocm", "vulkan", "metal", "sycl", "rpc", "other"]


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """A device that layers can be put on.

    :ivar label: ``gpu0``… as in every ledger. :ivar kind: which rules of the compute buffer hold.
    :ivar name: the engine's own name (``CUDA0``). :ivar free: bytes, decides the default split over several.
    :ivar server: ``HOST:PORT`` of an RPC device, where it is known.
    """

    label: str
    kind: DeviceKind = "cuda"
    name: str = ""
    free: int | None = None
    server: str = ""


class Draft(msgspec.Struct, frozen=True, kw_only=True):
    """Speculative decoding.

    :ivar model: path of the draft model; ``None`` for the target's own prediction head (MTP).
    """

    kind: str = "draft-simple"
    model: str | None = None
    n_max: int = 3
    n_gpu_layers: int | None = None
    cache_type_k: str = "f16"
    cache_type_v: str = "f16"
    ctx_size: int = 0


class LlamaOptions(msgspec.Struct, frozen=True, kw_only=True):
    """One configuration of llama.cpp. ``None`` means: not given, the engine's default or automatic value holds.

    :ivar ctx_size: tokens of all slots together; 0: the model's trained context.
    :ivar parallel: slots; ``None``: automatic (4, with a unified cache, in today's llama-server).
    :ivar flash_attn: ``auto`` counts as on, unless the model rules it out.
    :ivar n_gpu_layers: ``None``: automatic, all that fit (counted as all).
    :ivar override_tensor: (regular expression, buffer type) pairs, in the order given.
    :ivar tensor_split: shares per device. :ivar devices: empty: everything on the host.
    """

    ctx_size: int = 0
    batch_size: int = 2048
    ubatch_size: int = 512
    parallel: int | None = None
    kv_unified: bool | None = None
    flash_attn: Literal["on", "off", "auto"] = "auto"
    cache_type_k: str = "f16"
    cache_type_v: str = "f16"
    swa_full: bool = False
    kv_offload: bool = True
    op_offload: bool = True
    n_gpu_layers: int | None = None
    n_cpu_moe: int = 0
    cpu_moe: bool = False
    override_tensor: tuple[tuple[str, str], ...] = ()
    split_mode: Literal["none", "layer", "row", "tensor"] = "layer"
    tensor_split: tuple[float, ...] = ()
    main_gpu: int = 0
    devices: tuple[Device, ...] = (Device(label="gpu0"),)
    mmap: bool = True
    mlock: bool = False
    no_host: bool = False
    repack: bool = True
    embeddings: bool = False
    reranking: bool = False
    pooling: str | None = None
    mmproj: str | None = None
    mmproj_offload: bool = True
    image_max_tokens: int | None = None
    lora: tuple[str, ...] = ()
    draft: Draft | None = None
    cache_ram: int = 8192
    ctx_checkpoints: int = 32

    @property
    def slots(self) -> int:
        """Sequences at once (``n_seq_max``)."""
        return 4 if self.parallel is None else self.parallel

    @property
    def unified(self) -> bool:
        """Whether all slots share one cache: asked for, or because the number of slots is left to llama-server, which
        then shares it whatever else was asked for (``tools/server/server.cpp``)."""
        return self.parallel is None or bool(self.kv_unified)


class Defaults(msgspec.Struct, frozen=True, kw_only=True):
    """What a build chooses where an option is not given; see :mod:`pytest_vram.sizing.defaults`.

    :ivar flash: flash attention where the model and the device allow it. :ivar all_layers: on the device.
    :ivar context: tokens; 0: the trained context. :ivar slots: of which several share one cache.
    :ivar one_slot_is_auto: ``--parallel 1`` counts as not given. :ivar streams: slots may have caches of their own.
    :ivar fit: settings are lowered until they fit. :ivar prompt_cache: prompts are kept in host memory.
    :ivar mlock_maps: ``--mlock`` leaves the file mapped.
    """

    flash: bool = True
    all_layers: bool = True
    context: int = 0
    slots: int = 4
    one_slot_is_auto: bool = False
    streams: bool = True
    fit: bool = True
    prompt_cache: bool = True
    mlock_maps: bool = False


class Era(msgspec.Struct, frozen=True, kw_only=True):
    """Which of the rules that changed over time hold for a build of llama.cpp; the defaults are today's.

    :ivar build: ``b`` number where it is known.
    :ivar mask_f16: the attention mask is reserved as f16 (#23764, May 2026); before, an f32 mask and its f16 copy.
    :ivar outputs_per_slot: logits are reserved for one row per slot (#23861, b9460); before, for every token of the
        ubatch.
    :ivar quant_copies_reserved: f16 copies of a quantised cache for CUDA's flash attention are part of the compute
        buffer (#23907, b9501); before, they grew in the pool after boot.
    :ivar mla_latent_only: no V is stored under MLA (January 2026).
    :ivar mask_padded: rows of the mask are padded to 64 (until #17910, December 2025).
    :ivar extra_blocks_skipped: tensors of extra prediction blocks (MTP) stay in the file unless speculation with them
        is asked for (b10434 was seen to leave them, b10068 to load them always).
    :ivar glm_indexer: GLM's sparse attention (glm-dsa) keeps an indexer's cache (b10434 was seen to, b10068 ran it as
        dense latent attention without).
    :ivar sinks_ignored: where attention sinks are does not decide where flash attention runs (b10434; in b10068 it
        does, so sinks in host memory turn it off under ``auto``).
    :ivar quant_v_settles: a quantised V turns ``auto`` flash attention on (b10434); b10068 looks first whether it can
        run, and refuses to start where it cannot.
    :ivar mamba2_flat: Mamba-2's matrices work on the rows of all sequences as one (October 2026, b10773), which takes
        up to 15 % more; not in b10434. ``None``: not known.
    :ivar defaults: what is chosen where an option is not given.
    :ivar cuda_all_quants: built with ``GGML_CUDA_FA_ALL_QUANTS``, with flash attention for every cache type.
    """

    build: int | None = None
    mask_f16: bool = True
    outputs_per_slot: bool = True
    quant_copies_reserved: bool = True
    mla_latent_only: bool = True
    mask_padded: bool = False
    extra_blocks_skipped: bool = True
    glm_indexer: bool = True
    cuda_all_quants: bool = False
    sinks_ignored: bool = True
    quant_v_settles: bool = True
    mamba2_flat: bool | None = None
    defaults: Defaults = Defaults()


CURRENT = Era()


class Placement(msgspec.Struct, frozen=True, kw_only=True):
    """Where the parts of a model are put: made by :func:`pytest_vram.sizing.placement.place`.

    :ivar layers: device label of each block, ``host`` for those on the CPU; K, V and state follow their block unless
        ``kv_offload`` is off.
    :ivar output: device label of the output norm and matrix. :ivar tensors: device label of each tensor (by position
        in ``shape.tensors``), overrides applied.
    :ivar experts_on_host: blocks on a GPU whose routed experts are on the host.
    :ivar overridden: whether any tensor override is in force, which turns pipeline parallelism off.
    """

    layers: tuple[str, ...]
    output: str
    tensors: tuple[str, ...] = ()
    experts_on_host: tuple[int, ...] = ()
    overridden: bool = False


def padded(count: int, to: int = 256) -> int:
    """``count`` rounded up to a multiple of ``to``."""
    return -(-count // to) * to


class Cells(msgspec.Struct, frozen=True, kw_only=True):
    """The context as llama.cpp lays it out.

    :ivar context: ``n_ctx`` after padding, tokens over all slots. :ivar per_sequence: ``n_ctx_seq``.
    :ivar streams: separate caches: 1 when unified, else one per slot. :ivar ubatch: ``n_ubatch`` in force.
    :ivar slots: ``n_seq_max``.
    """

    context: int
    per_sequence: int
    streams: int
    batch: int
    ubatch: int
    slots: int

    def window(self, tokens: int, *, full: bool) -> int:
        """Cells of one stream of a sliding-window cache (``pad256(min(n_ctx_seq, window · slots + ubatch))``)."""
        if full:
            return self.per_sequence
        slots = self.slots if self.streams == 1 else 1
        return padded(min(self.per_sequence, tokens * slots + self.ubatch))


def cells(options: LlamaOptions, trained: int, *, causal: bool = True) -> Cells:
    """How llama.cpp pads and divides the context (``llama-context.cpp``: ``n_ctx``, ``n_ctx_seq``, ``n_batch``).

    :param trained: the model's trained context in tokens, used when ``ctx_size`` is 0.
    """
    slots = options.slots
    wanted = options.ctx_size or trained
    context = padded(wanted)
    if options.unified:
        per_sequence, streams = context, 1
    else:
        per_sequence, streams = padded(context // slots), slots
        context = per_sequence * slots
    batch = min(wanted, options.batch_size) if causal else options.batch_size  # before any padding
    ubatch = min(batch, options.ubatch_size or options.batch_size)
    return Cells(context=context, per_sequence=per_sequence, streams=streams, batch=batch, ubatch=ubatch, slots=slots)
