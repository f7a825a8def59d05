"""Drawn models and settings, booted by a real llama-server and predicted beside it."""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import psutil

from pytest_vram import bootlog
from pytest_vram.backends import binary
from pytest_vram.errors import EngineNotFound
from pytest_vram.ledger import Entry
from pytest_vram.sizing import ggml, gguf, gguf_shape, kv, placement, recurrent, weights
from pytest_vram.sizing.options import CURRENT, Device, Era, LlamaOptions
from pytest_vram.sizing.shape import ModelShape
from pytest_vram.testing import attention_recipes, hybrid_recipes, memory, recipes, software_gpu
from pytest_vram.testing.recipes import Recipe, Types
from pytest_vram.testing.software import SoftwareGpu

BOOT_TIMEOUT = 30.0
WEIGHTS = ("f32", "f16", "bf16", "q8_0", "q4_0", "q5_1", "q4_k", "q6_k", "iq4_nl")
LAST = (b"graph nodes", 1)


class Draw(msgspec.Struct, frozen=True, kw_only=True):
    """One configuration. :ivar gpus: software GPUs that it needs."""

    recipe: Recipe
    options: LlamaOptions
    arguments: tuple[str, ...]
    gpus: int


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """Predicted against printed, for one device and bucket, in bytes; ``resolution`` is what the print leaves open."""

    bucket: str
    device: str
    predicted: int
    at_most: int
    printed: int
    resolution: int

    @property
    def error(self) -> int:
        """Bytes outside of what was printed."""
        if self.printed > self.at_most:
            return max(0, self.printed - self.at_most - self.resolution)
        return max(0, self.predicted - self.printed - self.resolution)


def _types(numbers: random.Random) -> Types:
    pick = numbers.choice
    return Types(matrices=pick(WEIGHTS), embedding=pick(WEIGHTS), output=pick(WEIGHTS), experts=pick(WEIGHTS))


def _dense(numbers: random.Random) -> Recipe:
    kv_heads = numbers.choice((1, 2, 4))
    return recipes.llama(
        numbers.choice(("llama", "qwen3")),
        layers=numbers.randint(1, 6),
        embedding=numbers.choice((64, 256, 320)),
        heads=kv_heads * numbers.choice((1, 2, 3)),
        kv_heads=kv_heads,
        head_size=numbers.choice((32, 64, 96, 128)),
        feed_forward=numbers.choice((96, 512)),
        vocabulary=numbers.choice((260, 1000)),
        tied=numbers.random() < 0.5,
        types=_types(numbers),
    )


def _mixture(numbers: random.Random) -> Recipe:
    experts = numbers.choice((2, 4, 8))
    return recipes.qwen3moe(
        layers=numbers.randint(1, 6),
        embedding=numbers.choice((64, 256)),
        heads=4,
        kv_heads=numbers.choice((1, 2, 4)),
        head_size=numbers.choice((32, 64, 128)),
        experts=experts,
        experts_used=numbers.randint(1, experts),
        expert_feed_forward=numbers.choice((64, 256)),
        tied=numbers.random() < 0.3,
        types=_types(numbers),
    )


def _gemma(architecture: Any) -> Callable[[random.Random], Recipe]:
    def make(numbers: random.Random) -> Recipe:
        # A period of 1 leaves no window block, which llama.cpp asserts against in these architectures.
        return recipes.gemma(
            architecture,
            layers=numbers.randint(2, 9),
            head_size=numbers.choice((32, 64)),
            kv_heads=numbers.choice((1, 2, 4)),
            window=numbers.choice((1, 100, 512, 1024, 4096)),
            pattern=numbers.choice((None, 2, 3, 6)),
            tied=numbers.random() < 0.7,
            types=_types(numbers),
        )

    return make


def _mamba(numbers: random.Random) -> Recipe:
    return recipes.mamba(
        layers=numbers.randint(1, 6),
        embedding=numbers.choice((64, 256)),
        state=numbers.choice((8, 16, 32)),
        conv=numbers.choice((2, 4)),
        tied=numbers.random() < 0.7,
        types=_types(numbers),
    )


def _latent(numbers: random.Random) -> Recipe:
    layers = numbers.randint(2, 5)
    return recipes.deepseek2(
        layers=layers,
        kv_rank=numbers.choice((32, 64, 128)),
        rope=numbers.choice((32, 64)),
        nope=numbers.choice((32, 64)),
        value=numbers.choice((32, 64)),
        leading_dense=numbers.randint(0, layers - 1),
        types=_types(numbers),
    )


def _varied(numbers: random.Random) -> Recipe:
    layers = numbers.randint(2, 6)
    kv_heads = [numbers.choice((1, 2, 4)) for _ in range(layers)]
    heads = [4 * numbers.choice((1, 2)) for _ in range(layers)]
    return attention_recipes.openelm(
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        feed_forward=[numbers.choice((96, 256)) for _ in range(layers)],
        head_size=numbers.choice((32, 64)),
        types=_types(numbers),
    )


def _plain(recipe: Callable[..., Recipe]) -> Callable[[random.Random], Recipe]:
    return lambda numbers: recipe(types=_types(numbers))


DRAWN: dict[str, Callable[[random.Random], Recipe]] = {
    "llama": _dense,
    "qwen3moe": _mixture,
    "gemma2": _gemma("gemma2"),
    "gemma3": _gemma("gemma3"),
    "deepseek2": _latent,
    "mamba": _mamba,
    "openelm": _varied,
    "deci": _plain(attention_recipes.deci),
    "gpt-oss": _plain(attention_recipes.gpt_oss),
    "gemma4": _plain(attention_recipes.gemma4),
    "bert": _plain(attention_recipes.bert),
    "mamba2": _plain(hybrid_recipes.mamba2),
    "jamba": _plain(hybrid_recipes.jamba),
    "granitehybrid": _plain(hybrid_recipes.granite_hybrid),
    "nemotron_h": _plain(hybrid_recipes.nemotron_h),
    "qwen3next": _plain(hybrid_recipes.qwen3next),
    "lfm2": _plain(hybrid_recipes.lfm2),
    "rwkv7": _plain(hybrid_recipes.rwkv7),
}


def draw(architecture: str, numbers: random.Random) -> Draw:
    """A model of this architecture and settings that the engine accepts for it."""
    recipe = DRAWN[architecture](numbers)
    layers = int(str(recipe.metadata[f"{architecture_of(recipe)}.block_count"]))
    values: dict[str, Any] = {"ctx_size": numbers.randint(1, 6000), "mmap": numbers.random() < 0.25}
    arguments = ["--ctx-size", str(values["ctx_size"])]

    def give(key: str, value: Any, *words: str) -> None:
        values[key] = value
        arguments.extend(words)

    if numbers.random() < 0.8:
        slots = numbers.randint(1, 4)
        give("parallel", slots, "--parallel", str(slots))
    if numbers.random() < 0.6:
        unified = numbers.random() < 0.5
        give("kv_unified", unified, "--kv-unified" if unified else "--no-kv-unified")
    if numbers.random() < 0.6:
        ubatch = numbers.choice((16, 100, 256, 512, 700))
        give("ubatch_size", ubatch, "--ubatch-size", str(ubatch))
    flash = numbers.choice(("on", "off", "auto"))
    give("flash_attn", flash, "--flash-attn", flash)
    for side, type_name in _cache_types(architecture, flash, numbers):
        give(f"cache_type_{side}", type_name, f"--cache-type-{side}", type_name)
    if numbers.random() < 0.3:
        give("swa_full", True, "--swa-full")
    if numbers.random() < 0.5:
        give("repack", False, "--no-repack")
    # A remote device refuses a cache of no bytes, which DeciLM's blocks without attention make where they are alone.
    gpus = numbers.choice((0, 1)) if architecture == "deci" else numbers.choice((0, 1, 1, 1, 2))
    if not gpus:
        give("devices", (), "--device", "none")
    else:
        devices = [Device(label=f"gpu{index}", kind="rpc", name=f"RPC{index}") for index in range(gpus)]
        values["devices"] = tuple(devices)
        _offload(numbers, layers, gpus, give, split=architecture != "deci")
    return Draw(recipe=recipe, options=LlamaOptions(**values), arguments=tuple(arguments), gpus=gpus)


def _offload(numbers: random.Random, layers: int, gpus: int, give: Callable[..., None], *, split: bool) -> None:
    if split and numbers.random() < 0.8:
        count = numbers.randint(0, layers + 2)
        give("n_gpu_layers", count, "--n-gpu-layers", str(count))
    if numbers.random() < 0.3:
        give("kv_offload", False, "--no-kv-offload")
    kind = numbers.choice(("none", "none", "n_cpu_moe", "n_cpu_moe", "cpu_moe", "override"))
    if kind == "n_cpu_moe":
        moved = numbers.randint(0, layers + 1)
        give("n_cpu_moe", moved, "--n-cpu-moe", str(moved))
    elif kind == "cpu_moe":
        give("cpu_moe", True, "--cpu-moe")
    elif kind == "override":
        pattern = numbers.choice((r"ffn_(up|down)", r"blk\.[02]\.attn_k", "output", "token_embd"))
        target = numbers.choice(("CPU", "RPC0"))
        give("override_tensor", ((pattern, target),), "--override-tensor", f"{pattern}={target}")
    if gpus > 1:
        # Two software GPUs have the memory of one machine, which changes under the engine's eyes: the split is given.
        shares = (numbers.randint(0, 4), numbers.randint(1, 4))
        give("tensor_split", tuple(map(float, shares)), "--tensor-split", ",".join(map(str, shares)))
        if numbers.random() < 0.2:
            # Always the first: a log that shows one device only calls it gpu0.
            give("split_mode", "none", "--split-mode", "none")


def _cache_types(architecture: str, flash: str, numbers: random.Random) -> Iterator[tuple[str, str]]:
    k_type, v_type = numbers.choice(ggml.CACHE_TYPES), numbers.choice(ggml.CACHE_TYPES)
    if flash == "off" and kv.is_quantised(v_type):
        v_type = numbers.choice(("f32", "f16", "bf16"))
    if architecture == "deepseek2":
        k_type = v_type
    yield "k", k_type
    yield "v", v_type


def architecture_of(recipe: Recipe) -> str:
    """The architecture's name in the file, which the recipe may have drawn."""
    return recipe.architecture


def predicted(shape: ModelShape, options: LlamaOptions, era: Era = CURRENT) -> list[Entry]:
    """What the rules say of weights, cache and state."""
    where = placement.place(shape, options)
    return [
        *weights.weights(shape, options, where, era),
        *kv.kv_cache(shape, options, where, era),
        *recurrent.states(shape, options, where),
    ]


def booted(
    executable: Path,
    model: Path,
    one: Draw,
    endpoints: Sequence[str],
    *,
    until: tuple[bytes, int] = LAST,
    warm: bool = False,
) -> bootlog.Boot:
    """What a real boot prints, ended at a line that says that all buffers are allocated, before anything is computed.

    :param until: what that line has in it, and the how manieth such line it is. :param warm: let it warm up, which is
        when it allocates an image encoder's buffer.
    """
    command = [str(executable), "-m", str(model), "--port", "0", "-lv", "5", "--fit", "off"]
    if not warm:
        command.append("--no-warmup")
    if one.gpus:
        # Before the overrides, which may name its buffers.
        command += ["--rpc", ",".join(endpoints[: one.gpus])]
    command += [*(_named(word, endpoints) for word in one.arguments)]
    if not one.options.mmap:
        command += _whole(executable)
    environment = {key: value for key, value in os.environ.items() if not key.startswith("LLAMA_ARG_")}
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment
    )
    watch = threading.Timer(BOOT_TIMEOUT, process.kill)
    watch.start()
    lines: list[bytes] = []
    seen = 0
    try:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            seen += until[0] in line
            if seen == until[1]:
                break
    finally:
        watch.cancel()
        process.kill()
        process.wait(timeout=BOOT_TIMEOUT)
        if process.stdout is not None:
            process.stdout.close()
    return bootlog.read(b"".join(lines).decode(errors="replace"), engine="llama-server")


def _named(word: str, endpoints: Sequence[str]) -> str:
    return f"{word}[{endpoints[0]}]" if word.endswith("=RPC0") else word


def _whole(executable: Path) -> Iterator[str]:
    for name, value in memory.weights_as_buffers(executable).items():
        yield from (f"--{name}", value) if isinstance(value, str) else (f"--{'' if value else 'no-'}{name}",)


def differences(said: Sequence[Entry], printed: Sequence[Entry]) -> list[Difference]:
    """By device and bucket; the engine prints experts and other weights as one figure."""
    rows: dict[tuple[str, str], list[int]] = {}
    for entry in said:
        bucket = "weights" if entry.bucket == "experts" else entry.bucket
        row = rows.setdefault((bucket, entry.device), [0, 0, 0, 0])
        row[0] += entry.bytes
        row[1] += entry.bytes if entry.at_most is None else entry.at_most
    for entry in printed:
        if entry.bucket in ("weights", "experts", "kv", "recurrent"):
            bucket = "weights" if entry.bucket == "experts" else entry.bucket
            row = rows.setdefault((bucket, entry.device), [0, 0, 0, 0])
            row[2] += entry.bytes
            row[3] += entry.resolution
    return [
        Difference(bucket=bucket, device=device, predicted=low, at_most=high, printed=seen, resolution=open_)
        for (bucket, device), (low, high, seen, open_) in rows.items()
    ]


class Gpus:
    """Software GPUs, started anew when one has died: ending an engine in the middle of a transfer may take it along."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._stack = contextlib.ExitStack()
        self._running: tuple[SoftwareGpu, ...] = ()

    def __enter__(self) -> Gpus:
        self._running = self._stack.enter_context(software_gpu(self._count))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def endpoints(self) -> list[str]:
        """Endpoints of devices that are all alive now."""
        if not self.alive():
            self._stack.close()
            self._running = self._stack.enter_context(software_gpu(self._count))
        return [device.endpoint for device in self._running]

    def alive(self) -> bool:
        """Whether every process is there and no corpse."""
        with contextlib.suppress(psutil.NoSuchProcess):
            return all(psutil.Process(device.pid).status() != psutil.STATUS_ZOMBIE for device in self._running)
        return False


def first_engine() -> Path:
    """The llama-server that would be used here; software GPUs are of the same build.

    :raises EngineNotFound: there is none.
    """
    for place in binary.places():
        if place.usable and place.path is not None:
            return place.path
    raise EngineNotFound("no llama-server was found: run `vram demo` once, which fetches one")


def compare(executable: Path, folder: Path, one: Draw, gpus: Gpus) -> list[Difference]:
    """Boot one configuration and hold it against its prediction.

    :raises AssertionError: the engine refused what was drawn.
    """
    model = one.recipe.write(folder / "model.gguf")
    said = predicted(gguf_shape.shape_of(gguf.read(model)), one.options)
    left = 3
    while True:
        left -= 1
        boot = booted(executable, model, one, gpus.endpoints() if one.gpus else [])
        found = differences(said, boot.entries)
        complete = boot.failure is None and boot.entries
        # A device that died under the last boot shows in this one; anything else is what it seems.
        again = left > 0 and one.gpus and (not gpus.alive() or (boot.failure is None and not boot.entries))
        # An assertion of the engine's own that fails once in thousands of boots is no figure; one that stays is told.
        again = again or (left > 0 and boot.failure is not None and boot.failure.kind == "crash")
        if complete and (not again or not any(row.error for row in found)):
            return found
        if not again:
            raise AssertionError(f"the engine did not boot with {' '.join(one.arguments)}: {boot.failure}")
