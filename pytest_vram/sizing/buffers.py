"""How much of a device's memory a tensor takes in a buffer: its bytes, the device's padding, the alignment."""

from __future__ import annotations

from pytest_vram.sizing.options import DeviceKind, LlamaOptions, padded

# Alignment of tensors within a buffer: ggml-cpu (TENSOR_ALIGNMENT), ggml-cuda.cu, ggml-sycl.cpp, ggml-metal.cpp. An RPC
# device has that of the server's device, which is taken to be the CPU's; Vulkan's depends on the driver.
_ALIGNMENT: dict[str, int] = {"cuda": 128, "rocm": 128, "sycl": 128}
_ROW_PADDING = 512
_WHOLE = ("f32", "f16", "bf16", "f64", "i8", "i16", "i32", "i64")


def kind_of(label: str, options: LlamaOptions) -> DeviceKind | None:
    """What a device label stands for; ``None`` for the host."""
    return next((device.kind for device in options.devices if device.label == label), None)


def held(size: int, row: int, type_name: str, elements: int, kind: DeviceKind | None) -> int:
    """Bytes that a tensor takes in a buffer.

    CUDA, ROCm and SYCL read quantised rows in steps of 512 elements, so a tensor whose rows are no multiple of that
    gets the missing part of one row more (``ggml-cuda.cu:ggml_backend_cuda_buffer_type_get_alloc_size``,
    ``MATRIX_ROW_PADDING``); no GPU confirmed this here. The other devices add nothing.

    :param size: bytes of the tensor. :param row: elements of a row. :param elements: of the whole tensor.
    """
    extra = 0
    if kind in ("cuda", "rocm", "sycl") and type_name not in _WHOLE and row % _ROW_PADDING and elements:
        extra = size * (_ROW_PADDING - row % _ROW_PADDING) // elements
    return padded(size + extra, _ALIGNMENT.get(kind or "", 32))
