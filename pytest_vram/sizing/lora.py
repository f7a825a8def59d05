"""What LoRA adapters cost: their tensors, each pair where its base tensor is.

Source: ``src/llama-adapter.cpp`` (one buffer for each device; pairs whose base the CPU keeps in an order of its own go
to the plain host buffer; norm vectors are skipped). Confirmed by real boots on the CPU and on a software GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pytest_vram.errors import BadModel
from pytest_vram.ledger import Entry
from pytest_vram.sizing import gguf
from pytest_vram.sizing.buffers import held, kind_of
from pytest_vram.sizing.options import LlamaOptions
from pytest_vram.sizing.placement import place
from pytest_vram.sizing.shape import ModelShape, Note

_SUFFIXES = (".lora_a", ".lora_b")


def adapters(paths: Sequence[Path], shape: ModelShape, options: LlamaOptions) -> tuple[list[Entry], list[Note]]:
    """Entries of the bucket ``lora``, one for each adapter and device.

    :raises BadModel: a file is no adapter, is of another architecture, or changes a tensor that the model lacks.
    """
    homes = dict(zip((tensor.name for tensor in shape.tensors), place(shape, options).tensors, strict=True))
    entries: list[Entry] = []
    notes: list[Note] = []
    for path in paths:
        read = gguf.read(path)
        _check(path, read, shape)
        sums: dict[str, int] = {}
        for tensor in read.tensors:
            if tensor.name.endswith("_norm.weight"):
                continue
            base = tensor.name[: -len(_SUFFIXES[0])] if tensor.name.endswith(_SUFFIXES) else ""
            if base not in homes:
                raise BadModel(
                    f"{path} changes the tensor {base or tensor.name!r}, which {shape.source} does not have: it was "
                    "made for another model"
                )
            label = homes[base]
            row = tensor.dims[0] if tensor.dims else 1
            sums[label] = sums.get(label, 0) + held(
                tensor.bytes, row, tensor.type, tensor.elements, kind_of(label, options)
            )
            if not tensor.known:
                text = f"{path.name}: {tensor.name} has a type that is not known here and is not counted"
                notes.append(Note(kind="unknown", bucket="lora", text=text))
        entries += [
            Entry(bucket="lora", device=label, bytes=size, source="estimate", detail=path.name)
            for label, size in sums.items()
        ]
    return entries, notes


def _check(path: Path, read: gguf.Gguf, shape: ModelShape) -> None:
    if read.metadata.get("general.type") != "adapter":
        raise BadModel(f"{path} is not a LoRA adapter: its general.type is not 'adapter'; convert it to GGUF first")
    architecture = read.metadata.get("general.architecture")
    if architecture != shape.architecture:
        raise BadModel(f"{path} is an adapter for {architecture}, and {shape.source} is {shape.architecture}")
