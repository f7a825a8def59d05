"""Tracebacks of torch in the words of its releases, as programs with transformers end with them."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import msgspec

from pytest_vram.bootlog.lines import size
from pytest_vram.testing.bootlogs import Written

_PACKAGES = "/opt/env/lib/python3.11/site-packages"
_MODELS = f"{_PACKAGES}/transformers/models/llama/modeling_llama.py"
#: Where it ran out: frames as (file, line, function, source).
_WEIGHTS = (
    (f"{_PACKAGES}/transformers/modeling_utils.py", 277, "from_pretrained", "return func(*args, **kwargs)"),
    (
        f"{_PACKAGES}/transformers/modeling_utils.py",
        4399,
        "_load_pretrained_model",
        "_load_state_dict_into_meta_model(",
    ),
    (f"{_PACKAGES}/accelerate/utils/modeling.py", 400, "set_module_tensor_to_device", "new_value = value.to(device)"),
)
_DECODE = (
    (f"{_PACKAGES}/torch/nn/modules/module.py", 1501, "_call_impl", "return forward_call(*args, **kwargs)"),
    (_MODELS, 209, "forward", "key_states = torch.cat([past_key_value[0], key_states], dim=2)"),
)
_PREFILL = (
    (f"{_PACKAGES}/transformers/generation/utils.py", 2623, "_prefill", "outputs = self(**model_inputs)"),
    (_MODELS, 230, "forward", "attn_weights = nn.functional.softmax(attn_weights, dim=-1, dtype=torch.float32)"),
)
_PLACES = (("weights", _WEIGHTS), ("kv", _DECODE), ("compute", _PREFILL))


def _size(rng: Random, largest: float) -> tuple[str, int]:
    """A size as torch prints it, and its bytes."""
    unit = rng.choice(("GiB", "GiB", "MiB"))
    number = f"{rng.uniform(0.1, largest) * (1 if unit == 'GiB' else 40):.2f}"
    figure = size(number, unit)
    assert figure is not None
    return f"{number} {unit}", figure[0]


def _traceback(rng: Random, message: str) -> str:
    frames = rng.choice(_PLACES)[1]
    lines = (
        ["Loading checkpoint shards: 100%|██████████| 2/2 [00:01<00:00,  1.48it/s]"] if frames is not _WEIGHTS else []
    )
    lines += ["Traceback (most recent call last):", '  File "/app/serve.py", line 12, in <module>', "    main()"]
    for file, line, function, source in frames:
        lines += [f'  File "{file}", line {line}, in {function}', f"    {source}"]
    return "\n".join([*lines, message, ""])


def _written(
    text: str, *, allocated: int, reserved: int | None, device: int | None, kind: str = "cuda", failure: str = ""
) -> Written:
    facts = {"allocated_bytes": allocated} | ({} if reserved is None else {"reserved_bytes": reserved})
    return Written(
        engine="transformers",
        text=text,
        entries=(),
        devices={} if device is None else {f"gpu{device}": f"{kind}:{device}"},
        facts=facts,
        ready=False,
        failure=failure or "out_of_memory",
    )


def _until_2022(rng: Random) -> Written:
    device = rng.randrange(4)
    asked, allocated, free, reserved = (_size(rng, most) for most in (2, 20, 1, 23))
    name = rng.choice(("RuntimeError", "torch.cuda.OutOfMemoryError"))
    text = _traceback(
        rng,
        f"{name}: CUDA out of memory. Tried to allocate {asked[0]} (GPU {device}; 24.00 GiB total capacity;"
        f" {allocated[0]} already allocated; {free[0]} free; {reserved[0]} reserved in total by PyTorch) If reserved"
        " memory is >> allocated memory try setting max_split_size_mb to avoid fragmentation.",
    )
    return _written(text, allocated=allocated[1], reserved=reserved[1], device=device)


def _since_2023(rng: Random, *, capacity: str, name: str, see: str) -> Written:
    device = rng.randrange(4)
    asked, free, used, allocated, rest = (_size(rng, most) for most in (2, 1, 23, 20, 3))
    kind = rng.choice(("CUDA", "HIP"))
    who = rng.choice(("Including non-PyTorch memory, this process has", "Process 2752205 has"))
    text = _traceback(
        rng,
        f"{name}: {kind} out of memory. Tried to allocate {asked[0]}. GPU {device} has a total {capacity} of 24.00 GiB"
        f" of which {free[0]} is free. {who} {used[0]} memory in use. Of the allocated memory {allocated[0]} is"
        f" allocated by PyTorch, and {rest[0]} is reserved by PyTorch but unallocated. If reserved but unallocated"
        f" memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation. {see}",
    )
    return _written(text, allocated=allocated[1], reserved=allocated[1] + rest[1], device=device, kind=kind.lower())


def _in_2023(rng: Random) -> Written:
    see = "See documentation for Memory Management and PYTORCH_CUDA_ALLOC_CONF"
    return _since_2023(rng, capacity="capacty", name="torch.cuda.OutOfMemoryError", see=see)


def _in_2024(rng: Random) -> Written:
    see = "See documentation for Memory Management (https://pytorch.org/docs/stable/notes/cuda.html)"
    return _since_2023(rng, capacity="capacity", name="torch.OutOfMemoryError", see=see)


def _in_2026(rng: Random) -> Written:
    see = "See documentation for Memory Management  (https://docs.pytorch.org/docs/stable/notes/cuda.html)"
    return _since_2023(rng, capacity="capacity", name="torch.OutOfMemoryError", see=see)


def _apple(rng: Random) -> Written:
    unit = rng.choice(("GB", "GiB"))  # both are 2**30 here
    number = f"{rng.uniform(1, 60):.2f}"
    figure = size(number, "GiB")
    assert figure is not None
    text = _traceback(
        rng,
        f"RuntimeError: MPS backend out of memory (MPS allocated: {number} {unit}, other allocations: 464.00 KiB, max"
        f" allowed: 60.00 {unit}). Tried to allocate 384.00 MiB on private pool. Use"
        " PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.0 to disable upper limit for memory allocations.",
    )
    made = _written(text, allocated=figure[0], reserved=None, device=None)
    return msgspec.structs.replace(made, devices={"gpu0": "mps"})


def _host(rng: Random) -> Written:
    text = _traceback(
        rng,
        "RuntimeError: [enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you"
        f" tried to allocate {rng.randrange(1, 1 << 40)} bytes. Error code 12 (Cannot allocate memory)",
    )
    return Written(
        engine="transformers",
        text=text,
        entries=(),
        devices={"host": "CPU"},
        ready=False,
        failure="host_out_of_memory",
    )


WRITERS: dict[str, Callable[[Random], Written]] = {
    "2022": _until_2022,
    "2023": _in_2023,
    "2024": _in_2024,
    "2026": _in_2026,
    "apple": _apple,
    "host": _host,
}
