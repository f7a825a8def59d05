"""Which device each block and each tensor of a model is put on, as llama.cpp decides it.

Sources: ``llama-model.cpp:load_tensors`` (split points, the output layer counted first), ``llama-model-loader.cpp:
create_tensor`` (input, output and repeating tensors, overrides, the first match wins), ``llama-arch.cpp``
(``LLM_TENSOR_INFOS``: which tensor belongs to which), ``common/arg.cpp`` (``--cpu-moe``, ``--n-cpu-moe``). The split
over several GPUs was not confirmed on GPUs, but on two software GPUs.
"""

from __future__ import annotations

import re
import struct
import time
from bisect import bisect_right
from collections.abc import Sequence

from pytest_vram.errors import BadInput
from pytest_vram.sizing import patterns
from pytest_vram.sizing.options import Device, LlamaOptions, Placement
from pytest_vram.sizing.shape import ModelShape, Note

HOST = "host"
_MOST_SECONDS = 10.0  # to look for the patterns of overrides
EVERY_EXPERT = r"\.ffn_(up|down|gate|gate_up)_(ch|)exps"
EXPERT = re.compile(EVERY_EXPERT + r"|\.ffn_(up|down|gate)\.\d+\.")
_BLOCK = re.compile(r"(?:^|\.)blk\.(\d+)\.|^(?:posnet|convnext)\.(\d+)\.")
_INPUT = ("token_embd.", "position_embd.", "token_types.", "per_layer_token_embd.", "masked_embd_")
# Tensors without a number that llama.cpp creates for block 0 (or, duplicated, for each block).
FIRST_BLOCK = (
    "token_embd_norm.",
    "rope_freqs.",
    "rope_factors_long.",
    "rope_factors_short.",
    "per_layer_model_proj.",
    "per_layer_proj_norm.",
    "nextn.pre_projection.",
    "conv1d.",
)


def place(shape: ModelShape, options: LlamaOptions) -> Placement:
    """Device labels of blocks (extra prediction blocks last), of the output and of every tensor.

    :raises BadInput: an override names a buffer type or pattern that the engine would refuse.
    """
    blocks = len(shape.layers) + shape.extra_layers
    devices = used_devices(options)
    wanted = blocks + 1 if options.n_gpu_layers is None or options.n_gpu_layers < 0 else options.n_gpu_layers
    first = max(blocks + 1 - wanted, 0)
    count = min(wanted, blocks + 1) if devices else 0
    splits = _splits(devices, options.tensor_split)

    def home(block: int) -> str:
        if block < first or block - first >= count:
            return HOST
        return devices[bisect_right(splits, _single((block - first) / count))].label

    layers = tuple(home(block) for block in range(blocks))
    output = home(blocks)
    rules = overrides(options)
    tensors = []
    deadline = time.monotonic() + _MOST_SECONDS
    for tensor in shape.tensors:
        tensors.append(_tensor(shape, tensor.name, layers, output, rules))
        if rules and time.monotonic() > deadline:
            raise BadInput(
                f"--override-tensor: looking for these patterns in {len(shape.tensors)} names of tensors takes over"
                f" {_MOST_SECONDS:.0f} s: write simpler ones"
            )
    moved = {
        int(match[1])
        for tensor, label in zip(shape.tensors, tensors, strict=True)
        if label == HOST and EXPERT.search(tensor.name) and (match := re.match(r"blk\.(\d+)\.", tensor.name))
    }
    return Placement(
        layers=layers,
        output=output,
        tensors=tuple(tensors),
        experts_on_host=tuple(sorted(block for block in moved if block < blocks and layers[block] != HOST)),
        overridden=bool(rules),
    )


def used_devices(options: LlamaOptions) -> tuple[Device, ...]:
    """The devices that take layers: all, or the main one with ``--split-mode none`` (``llama.cpp``, model loading)."""
    if options.split_mode != "none" or not options.devices:
        return options.devices
    if options.main_gpu < 0:
        return ()
    if options.main_gpu >= len(options.devices):
        raise BadInput(f"--main-gpu {options.main_gpu} with {len(options.devices)} device(s): they are counted from 0")
    return (options.devices[options.main_gpu],)


def _single(value: float) -> float:
    """``value`` as C's ``float``: a block exactly on a split point must fall where it does in the engine."""
    rounded: float = struct.unpack("f", struct.pack("f", value))[0]
    return rounded


def _splits(devices: Sequence[Device], shares: Sequence[float]) -> list[float]:
    """Cumulative shares of the devices: as given, else by free memory."""
    given = [*shares[: len(devices)], *([0.0] * (len(devices) - len(shares)))]
    if not any(given):
        known = all(device.free for device in devices)
        given = [float(device.free or 0) if known else 1.0 for device in devices]
    total, sums = 0.0, []
    for share in given:
        total = _single(total + _single(share))
        sums.append(total)
    return [_single(value / total) for value in sums[:-1]]


def overrides(options: LlamaOptions) -> list[tuple[re.Pattern[str], str]]:
    """Tensor overrides in the order in which they are tried: ``--override-tensor``, then the experts' own options.

    The engine tries them in the order of its command line; that order is taken to be this one.

    :raises BadInput: a pattern is no regular expression, or its buffer type is of no device here.
    """
    rules = [
        (patterns.compiled(text, "--override-tensor"), _label(buffer, options))
        for text, buffer in options.override_tensor
    ]
    if options.cpu_moe:
        rules.append((re.compile(EVERY_EXPERT), HOST))
    rules += [(re.compile(rf"blk\.{block}{EVERY_EXPERT}"), HOST) for block in range(min(options.n_cpu_moe, 1024))]
    return rules


def _label(buffer: str, options: LlamaOptions) -> str:
    """The device label of a buffer type's name: ``CPU``, ``CUDA0``, ``CUDA_Host``, ``RPC0[127.0.0.1:50052]`` …

    The number of an RPC buffer counts the devices of its own server (``ggml-rpc.cpp``), while that of a device counts
    those of all servers: the second server's is device ``RPC1`` and buffer ``RPC0[HOST:PORT]``.
    """
    if buffer.upper().startswith("CPU") or buffer.endswith("_Host"):
        return HOST
    remote = {f"RPC0[{device.server}]": device.label for device in options.devices if device.server}
    if buffer in remote:
        return remote[buffer]
    for position, device in enumerate(options.devices):
        if device.server:
            continue
        names = {device.label, device.name, device.name.partition("[")[0]} - {""}
        if buffer in names or buffer.partition("[")[0] in names:
            return device.label
        if not device.name and re.fullmatch(rf"[A-Za-z]+{position}(\[.*\])?", buffer):
            return device.label
    known = ", ".join(["CPU", *map(_buffer, options.devices)])
    raise BadInput(f"--override-tensor: {buffer!r} is not a buffer type of a device here; known are {known}")


def _buffer(device: Device) -> str:
    return f"RPC0[{device.server}]" if device.server else device.name or device.label


def _tensor(
    shape: ModelShape, name: str, layers: Sequence[str], output: str, rules: Sequence[tuple[re.Pattern[str], str]]
) -> str:
    for pattern, label in rules:
        if pattern.search(name):
            return label
    return tensor_home(shape, name, layers, output)


def tensor_home(shape: ModelShape, name: str, layers: Sequence[str], output: str) -> str:
    """Where a tensor is put without overrides: inputs on the host, blocks with their device, the rest as the output."""
    if match := _BLOCK.search(name):
        block = int(match[1] or match[2])
        return layers[block] if block < len(layers) else HOST
    if name.startswith("token_embd_norm.") and shape.architecture in ("lfm2", "lfm2moe"):
        return output  # LFM2's files carry the output norm under this name
    if name.startswith(_INPUT):
        return HOST
    if name.startswith(FIRST_BLOCK):
        return layers[0]
    return output


def block_of(name: str) -> int | None:
    """The number of the block that a tensor belongs to, ``None`` for those outside of blocks."""
    match = _BLOCK.search(name)
    return int(match[1] or match[2]) if match else None


def notes(shape: ModelShape, options: LlamaOptions) -> tuple[Note, ...]:
    """What of the placement had to be assumed, or will not do what it seems to."""
    found = []
    devices = used_devices(options)
    if len(devices) > 1 and not any(options.tensor_split) and not all(device.free for device in devices):
        text = "layers are split over the devices by their free memory, unknown here: equal shares are assumed"
        found.append(Note(kind="assumed", text=text))
    if len(devices) > 1 and options.split_mode in ("row", "tensor"):
        for bucket in ("weights", "experts", *(("kv",) if options.split_mode == "tensor" else ())):
            text = (
                f"--split-mode {options.split_mode} cuts {bucket} across the devices: their sum holds, the share of "
                "each device is counted as if layers were split, and no GPU confirmed either"
            )
            found.append(Note(kind="unknown", bucket=bucket, text=text))
    moved = options.n_cpu_moe
    if moved and shape.leading_dense and not options.cpu_moe:
        none = min(moved, shape.leading_dense)
        text = f"--n-cpu-moe {moved} counts layers from 0, and the first {none} have no experts: {moved - none} move"
        found.append(Note(kind="warning", bucket="experts", text=text))
    if moved and not shape.experts:
        found.append(Note(kind="warning", bucket="experts", text="--n-cpu-moe moves nothing: the model has no experts"))
    return tuple(found)
