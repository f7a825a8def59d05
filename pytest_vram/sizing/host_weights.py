"""What weights on the host take: mapped from the file, in buffers, and in the order that the CPU prefers.

Two things of llama.cpp decide. ``make_cpu_buft_list`` (``llama-model.cpp``) offers a matrix on the host to the pinned
memory of a card first, where the card's backend has such, then to the CPU backend's own orders (``AMX``,
``CPU_REPACK``), then to plain memory; a pinned one is plain again where the file is mapped. And with the file mapped,
plain weights are not allocated: their buffer is the stretch of the file from the first to the last of them
(``get_mapping_range`` in ``llama-model-loader.cpp``), whatever lies between, so that a matrix in an order of its own
is in memory twice. Confirmed by boots of b10068 on an x86 CPU, mapped and not; what other CPUs reorder is from
``ggml-cpu/repack.cpp`` and ``ggml-cpu/amx``, which no such CPU confirmed. Builds with KleidiAI or SpacemiT's kernels
are not followed.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate

import msgspec

from pytest_vram.sizing.buffers import held
from pytest_vram.sizing.options import LlamaOptions
from pytest_vram.sizing.placement import EXPERT
from pytest_vram.sizing.shape import ModelShape, Tensor

#: Kinds of device whose backend has pinned host memory, which goes before the CPU's own orders.
PINNED = ("cuda", "rocm", "sycl", "vulkan")
#: Families of CPUs: type → what the number of rows must be a multiple of (``ggml_repack_get_optimal_repack_type``).
_AVX2 = {"q4_0": 8, "q4_k": 8, "iq4_nl": 8, "mxfp4": 8}
_AVX512 = {**_AVX2, "q2_k": 8}
_ARM = {"q4_0": 4, "q4_k": 8, "q5_k": 8, "q6_k": 8, "iq4_nl": 4, "mxfp4": 4, "q8_0": 4}
_RISCV = {"q4_0": 16, "q4_k": 16, "iq4_nl": 16, "q8_0": 16, "q2_k": 16}
_FAMILIES: tuple[dict[str, int], ...] = ({}, _AVX2, _AVX512, _ARM, _RISCV)
#: The last family: AVX-512 with AMX, which takes the matrices of these types first: type → (elements of a block, bytes
#: that each block grows by). Source: ``amx/amx.cpp`` (``supports_op``), ``amx/mmq.cpp`` (``get_row_size``).
_AMX = {
    "f16": (16, 0),
    "q4_0": (32, 0),
    "q4_1": (32, 0),
    "q8_0": (32, 4),
    "q4_k": (256, 4),
    "q5_k": (256, 4),
    "q6_k": (256, 0),
    "iq4_xs": (256, 2),
}
_AMX_ROWS = 32
#: Tensors that are looked up, added, scaled or convolved with, and not multiplied by (``LLM_TENSOR_INFOS``).
_NO_MATRIX = re.compile(
    r"^(token_embd|position_embd|token_types|per_layer_token_embd|d2t)\.|norm|conv1d|\.shortconv\.conv\.|\.ssm_[ad]\b"
    r"|\.time_mix_(lerp|decay\.|first|w0|a0|v0|k_k|k_a|r_k|ln)|\.channel_mix_lerp|_rel_b\.|exp_probs_b|tid2eid"
    r"|embed_tokens|_ape\b|sinks|_base\.|_scale\.|\.bias$"
)
WEIGHTS, EXPERTS = 0, 1


class Held(msgspec.Struct, frozen=True):
    """One tensor on the host. :ivar output: whether it is the embedding table in its role as output matrix.
    :ivar shared: whether it is in the table's own place where the CPU does not reorder it."""

    tensor: Tensor
    output: bool = False
    shared: bool = False


class Amounts(msgspec.Struct):
    """Bytes of (weights, experts) on the host, for each family of CPUs.

    :ivar buffers: without a mapping: what is reordered, and the rest in a buffer. :ivar mapped: with one.
    """

    buffers: list[tuple[int, int]]
    mapped: list[tuple[int, int]]


def orders(options: LlamaOptions) -> bool:
    """Whether the CPU may keep matrices on the host in an order of its own."""
    return options.repack and (options.no_host or not any(device.kind in PINNED for device in options.devices))


def amounts(shape: ModelShape, options: LlamaOptions, on_host: Sequence[Held]) -> Amounts:
    """What the host's weights take under each family of CPUs; under one only where none may reorder."""
    families = range(len(_FAMILIES) + 1) if orders(options) else range(1)
    # By what they are reordered by: (lowest, highest) place in each part of the file, and bytes in a buffer.
    spans: dict[tuple[bool, ...], dict[int, tuple[int, int]]] = {}
    plain: dict[tuple[bool, ...], list[int]] = {}
    reordered = [[0, 0] for _ in families]
    for one in on_host:
        tensor = one.tensor
        bucket = EXPERTS if EXPERT.search(tensor.name) else WEIGHTS
        matrix = len(families) > 1 and (one.output or not _NO_MATRIX.search(tensor.name))
        sizes = _sizes(tensor.type, tensor.dims, tensor.bytes, bucket == EXPERTS) if matrix else (0,) * len(families)
        group = tuple(size > 0 for size in sizes)
        for family, size in zip(families, sizes, strict=True):
            reordered[family][bucket] += size
        if not one.shared:
            rest = plain.setdefault(group, [0, 0])
            rest[bucket] += held(tensor.bytes, 1, tensor.type, tensor.elements, None)
        parts = spans.setdefault(group, {})
        low, high = parts.get(tensor.part, (tensor.offset, 0))
        parts[tensor.part] = (min(low, tensor.offset), max(high, tensor.offset + tensor.bytes))
    file = _File(shape)
    made = Amounts(buffers=[], mapped=[])
    for family in families:
        rest = [0, 0]
        stretches: dict[int, tuple[int, int]] = {}
        for group, parts in spans.items():
            if group[family]:
                continue
            for bucket in (WEIGHTS, EXPERTS):
                rest[bucket] += plain.get(group, (0, 0))[bucket]
            for part, (low, high) in parts.items():
                before = stretches.get(part, (low, high))
                stretches[part] = (min(low, before[0]), max(high, before[1]))
        mapped = file.stretch(stretches)
        twice = reordered[family]
        made.buffers.append((rest[WEIGHTS] + twice[WEIGHTS], rest[EXPERTS] + twice[EXPERTS]))
        made.mapped.append((mapped[WEIGHTS] + twice[WEIGHTS], mapped[EXPERTS] + twice[EXPERTS]))
    return made


@lru_cache(maxsize=4096)
def _sizes(type_name: str, dims: tuple[int, ...], size: int, experts: bool) -> tuple[int, ...]:
    """Bytes that a matrix takes in the order of each family of CPUs; 0 where that has none for it."""
    real = len(dims)
    while real > 1 and dims[real - 1] == 1:
        real -= 1
    rows = dims[1] if len(dims) > 1 else 1
    fits = real == (3 if experts else 2)
    padded = held(size, 1, type_name, 1, None)
    found = [padded if fits and rows % family.get(type_name, rows + 1) == 0 else 0 for family in _FAMILIES]
    block, grows = _AMX.get(type_name, (0, 0))
    if block and real > 1 and not experts and rows % _AMX_ROWS == 0 and dims[0] % block == 0:
        elements = 1
        for dim in dims:
            elements *= dim
        found.append(held(size + elements // block * grows, 1, type_name, 1, None))
    else:
        found.append(found[_FAMILIES.index(_AVX512)])
    return tuple(found)


class _File:
    """What of a model's files a stretch covers: experts, and everything else with the padding in between."""

    def __init__(self, shape: ModelShape) -> None:
        self._tensors = shape.tensors
        self._places: dict[int, tuple[list[int], list[int]]] = {}

    def stretch(self, stretches: dict[int, tuple[int, int]]) -> tuple[int, int]:
        """Bytes of (weights, experts) between the given places of each part."""
        total = experts = 0
        for part, (low, high) in stretches.items():
            if high <= low:
                continue
            starts, sums = self._part(part)
            total += high - low
            experts += sums[bisect_left(starts, high)] - sums[bisect_left(starts, low)]
        return total - experts, experts

    def _part(self, part: int) -> tuple[list[int], list[int]]:
        if part not in self._places:
            here = [tensor for tensor in self._tensors if tensor.part == part]
            sizes = (tensor.bytes if EXPERT.search(tensor.name) else 0 for tensor in here)
            self._places[part] = ([tensor.offset for tensor in here], [0, *accumulate(sizes)])
        return self._places[part]
