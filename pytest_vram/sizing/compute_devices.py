"""What kinds of devices can run, how they lay out memory, and when they take work over from the host."""

from __future__ import annotations

import functools
import math

from pytest_vram.sizing.compute_graph import quantized, row_bytes
from pytest_vram.sizing.compute_replay import NO_LIMIT, Backend, Node
from pytest_vram.sizing.compute_vulkan import reorder
from pytest_vram.sizing.kv import cuda_takes
from pytest_vram.sizing.options import Era, LlamaOptions
from pytest_vram.sizing.placement import used_devices

OFFLOAD_ROWS = 32  # op_offload_min_batch_size of CUDA, Vulkan, Metal
CUDA_ROW = 512  # MATRIX_ROW_PADDING
VULKAN_PIECE = 1 << 30  # suballocation_block_size
VULKAN_TENSOR = 1 << 32  # maxStorageBufferRange of today's drivers, less than


def backends(options: LlamaOptions, era: Era) -> list[Backend]:
    """The scheduler's devices in order, the CPU last."""
    found = []
    for device in used_devices(options):
        if device.kind == "vulkan":
            found.append(
                Backend(
                    device.label,
                    "vulkan",
                    supports=vulkan_supports,
                    alignment=32,
                    limit=VULKAN_PIECE,
                    offload_rows=OFFLOAD_ROWS,
                    reorder=reorder,
                )
            )
        elif device.kind == "rpc":
            found.append(Backend(device.label, "rpc", supports=_everything))
        else:
            found.append(
                Backend(
                    device.label,
                    "cuda",
                    supports=functools.partial(cuda_supports, all_quants=era.cuda_all_quants),
                    alignment=128,
                    limit=NO_LIMIT,
                    offload_rows=OFFLOAD_ROWS,
                    extra=cuda_extra if era.quant_copies_reserved else cuda_rows,
                )
            )
    return [*found, Backend("host", "cpu", supports=_everything)]


def _everything(node: Node) -> bool:
    del node
    return True


def cuda_supports(node: Node, *, all_quants: bool = False) -> bool:
    """Steps that CUDA leaves to the CPU (``ggml-cuda.cu``, ``supports_op``; ``fattn.cu``)."""
    if node.op == "flash":
        q, k, v = node.src[0], node.src[1], node.src[2]
        return cuda_flash(k.dims[0], v.dims[0], q.dims[2] // k.dims[2], k.type, v.type, all_quants=all_quants)
    if node.op == "ssm_scan":
        state, head, heads = node.src[0].dims[:3]
        if node.src[3].dims[0] == 1:
            return state in (128, 256) and head % 16 == 0
        return state == 16 and head == 1 and heads % 128 == 0
    return True


def cuda_rows(node: Node) -> int:
    """CUDA lengthens the last row of a quantised matrix to 512 elements (``ggml-cuda.cu``, ``get_alloc_size``)."""
    short = node.dims[0] % CUDA_ROW
    return row_bytes(node.type, CUDA_ROW - short) if short and quantized(node.type) else 0


def cuda_extra(node: Node) -> int:
    """Beside the rows, f16 copies of a cache of another type for flash attention (#23907, ``fattn.cu``).

    V needs none of its own where it is a view of K, which it is no longer once both were copied from the host.
    """
    if node.op != "flash":
        return cuda_rows(node)
    k, v = node.src[1], node.src[2]
    extra = 0 if k.type == "f16" else 2 * math.prod(k.dims)
    shared = v.root is not None and v.root is (k.root or k)
    return extra + (0 if v.type == "f16" or shared else 2 * math.prod(v.dims))


def cuda_flash(
    key: int, value: int, group: int, type_k: str = "f16", type_v: str = "f16", *, all_quants: bool = False
) -> bool:
    """Head sizes and cache types for which CUDA has a flash attention kernel (``ggml_cuda_get_best_fattn_kernel``)."""
    if not cuda_takes(type_k, type_v, all_quants=all_quants):
        return False
    if key in (40, 64, 72, 80, 96, 112, 128, 256):
        return value == key
    if key == 192:
        return value == 128 and group % 8 == 0
    if key == 320:
        return value == 256 and group % 32 == 0
    if key == 512:
        return value == key and group >= 2
    return key == 576 and value == 512 and group >= 2


def vulkan_supports(node: Node) -> bool:
    """Steps that Vulkan leaves to the CPU (``ggml-vulkan.cpp``, ``supports_op``)."""
    if node.size >= VULKAN_TENSOR or any(source.size >= VULKAN_TENSOR for source in node.src):
        return False
    if node.op == "flash":
        return node.src[1].dims[0] % 8 == 0 and node.src[2].dims[0] % 8 == 0
    if node.op == "mul_mat":
        left, right = node.src
        if left.dims[3] != right.dims[3]:
            return False
        return left.packed or not quantized(left.type) or left.dims[2] == 1
    if node.op == "ssm_scan":
        state, head = node.src[0].dims[:2]
        return node.src[3].dims[0] == 1 and state in (128, 256) and head % 16 == 0
    return True
